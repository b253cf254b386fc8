"""Threads: those of a session continue in its copies.

A plain fork copies one thread. The others are missing in the copy, along with any locks they held,
and code that waits for them waits forever. So before a copy is made, every other thread is stopped
where it waits, and the copy creates threads that continue from there:

    stop_others      in the original: a signal stops each thread, and the kernel saves its registers
    resume           in the original, afterwards: the handlers return
    resume_in_copy   in a copy: a thread is created on each of these stacks, and returns from the
                     handler

The copy is made without fork handlers, because there is nothing to repair: no thread is missing, so
every lock has its owner. That holds only if all threads are copied. A running thread may hold a
lock of the C library, for which the copy would wait before that thread continues; so all threads
must be waiting in a system call. None of them may wait for the GIL either: this thread would hand
it over, and wait until it is taken. Otherwise an ordinary fork is made, and the copy has one
thread.

The machine code is that of `threads.s`. A thread in a copy keeps the thread id that the C library
stores, because the library compares it with the owner of a recursive lock; the kernel assigns a
different one.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import signal
import threading
import time
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

_CODE = bytes.fromhex(
    "4989d04c8d0df60f0000458b61084183790c00747141bd01000000f0450f"
    "c1294181fd00040000733f49c1e5054f8d6c29404d89450064488b042500"
    "00000049894508b8ba0000000f0549894510f041ff4104498d7904be8100"
    "0000ba01000000b8ca0000000f05453961087518498d7908be8000000044"
    "89e24531d2b8ca0000000f05ebe2c3660f1f840000000000b80f0000000f"
    "05660f1f840000000000415441554989cc4d89c54989f04889fe4989d231"
    "d2bf000f2d00b8380000000f054885c07405415d415cc34d85e4740f4c89"
    "e7be18000000b8110100000f054d85ed74174c89efbe2000000031d241ba"
    "53300553b84e0100000f05b80f0000000f05"
)
# Offsets of the entry points in it, and the layout of the table behind it.
_RESTORER, _RESUME_IN_COPY = 0x90, 0xA0
_TABLE, _SLOTS, _SLOT_COUNT = 4096, 64, 1024
_CLAIMED, _READY, _ROUND, _ACTIVE = 0, 4, 8, 12

# System calls of x86-64, and flags of some of them.
SYS_rt_sigaction, SYS_clone, SYS_futex, SYS_tgkill = 13, 56, 202, 234
# The kernel writes the id of the new thread, and clears it when the thread ends.
CLONE_CHILD_CLEARTID, CLONE_CHILD_SETTID = 0x00200000, 0x01000000
_FORK_FLAGS = signal.SIGCHLD | CLONE_CHILD_SETTID | CLONE_CHILD_CLEARTID
SA_SIGINFO, SA_RESTORER, SA_ONSTACK, SA_RESTART = 0x4, 0x04000000, 0x08000000, 0x10000000
_ACTION_FLAGS = SA_SIGINFO | SA_RESTORER | SA_ONSTACK | SA_RESTART
FUTEX_WAIT, FUTEX_WAKE, FUTEX_WAIT_BITSET = 0, 1, 9
FUTEX_PRIVATE_FLAG, FUTEX_CLOCK_REALTIME = 128, 256
PF_EXITING = 0x4  # From <linux/sched.h>.

# The signal with which the C library cancels threads. It never lets a thread block it, and uses it
# from the first cancellation on.
_UNBLOCKABLE = 32

# Calls in which a thread waits for another party, and which it repeats after a signal.
_READING = {"read": 0, "pread64": 17, "readv": 19, "recvfrom": 45, "recvmsg": 47, "recvmmsg": 299}
_WRITING = {"write": 1, "pwrite64": 18, "writev": 20, "sendto": 44, "sendmsg": 46, "sendmmsg": 307}
_CONNECTING = {"connect": 42, "accept": 43, "accept4": 288}
_POLLING = {"poll": 7, "select": 23, "pselect6": 270, "ppoll": 271}
_EPOLL = {"epoll_wait": 232, "epoll_pwait": 281, "epoll_pwait2": 441}
_SLEEPING = {"pause": 34, "nanosleep": 35, "clock_nanosleep": 230}
_PROCESSES_AND_SIGNALS = {"wait4": 61, "waitid": 247, "rt_sigtimedwait": 128, "rt_sigsuspend": 130}
_LOCKS = {"semop": 65, "semtimedop": 220, "futex": 202, "futex_waitv": 449, "futex_wait": 455}
_WAITING = frozenset(
    {
        **_READING,
        **_WRITING,
        **_CONNECTING,
        **_POLLING,
        **_EPOLL,
        **_SLEEPING,
        **_PROCESSES_AND_SIGNALS,
        **_LOCKS,
    }.values()
)
_SYSCALL_INSTRUCTION = b"\x0f\x05"
# Offsets in the context that the kernel saves.
_R10, _RDI, _RSI, _RAX, _RIP = 56, 104, 112, 144, 168
_INTERRUPTED = 2**64 - errno.EINTR

# The GIL is in a structure of at most this size.
_MAX_RUNTIME_BYTES = 1024 * 1024
# Within the C library's thread descriptor, which begins at the thread pointer.
_MAX_DESCRIPTION_BYTES = 0x700
_ROBUST_AFTER_NUMBER = 16

# How long threads may take to stop: until the machine has scheduled each of them.
_STOP_TIMEOUT = 2.0
# After this time, a thread that still blocks the signal is not just returning from the handler.
_HANDLER_EXIT_TIMEOUT = 0.1
# How long they may stay busy: pools look for more work for up to 200 ms before they wait.
_BUSY_LIMIT, _BUSY_AGAIN_LIMIT = 0.3, 0.01
_RETRY_INTERVAL = 0.002


class Slot(NamedTuple):
    """The saved state of a stopped thread."""

    context: int
    pointer: int
    number: int


class StoppedThreads:
    """All other threads of the process, stopped. `lost` counts those that could not be stopped."""

    def __init__(self, slots: list[Slot], lost: int = 0) -> None:
        self._slots = slots
        self.lost = lost

    @property
    def is_whole(self) -> bool:
        """Whether there are threads, and all of them are stopped."""
        return bool(self._slots) and not self.lost

    @property
    def is_idle(self) -> bool:
        """Whether each of them waits until another wakes it, so that nothing happens by itself."""
        return not self.lost and all(map(_waits_on_futex, self._slots))

    def resume(self) -> None:
        """Resumes them in the original."""
        if self._slots and _machine_code is not None:
            _machine_code.resume()

    def resume_in_copy(self, ended: Collection[int]) -> int:
        """In a copy: creates threads that continue from the saved state. Returns how many failed.

        Python threads in `ended` are not created.
        """
        if not self._slots or _machine_code is None:
            return 0
        _machine_code.resume()
        return _machine_code.resume_in_copy(
            [slot for slot in self._slots if slot.pointer not in ended]
        )


def stop_others() -> StoppedThreads:
    """Stops all other threads, or none."""
    global _busy
    others = _others()
    if not others:
        return StoppedThreads([])
    code = _get_machine_code()
    if code is None or len(others) > _SLOT_COUNT // 2:
        return StoppedThreads([], len(others))
    # Threads that were busy throughout the last attempt probably still are.
    deadline = time.monotonic() + (_BUSY_AGAIN_LIMIT if others & _busy else _BUSY_LIMIT)
    while True:
        try:
            slots = code.stop_all()
        except BaseException:
            code.resume()
            raise
        if slots is None:
            code.resume()
            return StoppedThreads([], len(_others()))
        busy = {slot.number for slot in slots if not code.is_waiting(slot)}
        if not busy and code.are_known(slots):
            _busy = frozenset()
            return StoppedThreads(slots)
        code.resume()
        if time.monotonic() > deadline:
            _busy = frozenset(busy)
            return StoppedThreads([], len(slots))
        time.sleep(_RETRY_INTERVAL)


def fork() -> int:
    """Copies the process with this thread only, without fork handlers."""
    assert _machine_code is not None
    return _machine_code.fork()


class _MachineCode:
    """The machine code and its table, in memory of their own."""

    def __init__(self, library: ctypes.PyDLL) -> None:
        self._library = library
        library.syscall.restype = ctypes.c_long
        size = _TABLE + _SLOTS + 32 * _SLOT_COUNT
        self._memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory[: len(_CODE)] = _CODE
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        protect = library.mprotect
        protect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        if protect(self._base, _TABLE, mmap.PROT_READ | mmap.PROT_EXEC):
            raise OSError("no memory for code")
        self._resume_in_copy = ctypes.PYFUNCTYPE(ctypes.c_long, *[ctypes.c_size_t] * 5)(
            self._base + _RESUME_IN_COPY
        )
        self._words = (ctypes.c_uint32 * 16).from_address(self._base + _TABLE)
        self._slots = (ctypes.c_uint64 * (4 * _SLOT_COUNT)).from_address(
            self._base + _TABLE + _SLOTS
        )
        library.pthread_self.restype = ctypes.c_size_t
        self._number_at = _find_number(library.pthread_self())
        self._rseq_at = _find_rseq(library)
        self._runtime = ctypes.addressof(ctypes.c_char.in_dll(library, "_PyRuntime"))
        self._signal = 0

    def stop_all(self) -> list[Slot] | None:
        """Stops all other threads. Returns None if one of them does not stop."""
        if not self._install():
            return None
        words = self._words
        words[_CLAIMED // 4] = words[_READY // 4] = 0
        words[_ACTIVE // 4] = 1
        process, begun = os.getpid(), time.monotonic()
        asked: set[int] = set()
        while True:
            slots = list(self._filled())
            stopped = {slot.number for slot in slots}
            missing = _others() - stopped
            if not missing:
                return slots
            for number in missing - asked:
                self._library.syscall(SYS_tgkill, process, number, self._signal)
            if missing <= asked and all(map(_is_ending, missing)):
                return slots
            asked |= missing
            spent = time.monotonic() - begun
            if spent > _STOP_TIMEOUT or (
                spent > _HANDLER_EXIT_TIMEOUT and any(map(self._has_blocked_signal, missing))
            ):
                return None
            self._wait(words[_READY // 4])

    def resume(self) -> None:
        self._words[_ACTIVE // 4] = 0
        self._words[_ROUND // 4] += 1
        self._futex(_ROUND, FUTEX_WAKE | FUTEX_PRIVATE_FLAG, _SLOT_COUNT)

    def resume_in_copy(self, slots: list[Slot]) -> int:
        numbers = {}
        for slot in slots:
            at = slot.pointer + self._number_at
            rseq = slot.pointer + self._rseq_at if self._rseq_at else 0
            made = self._resume_in_copy(
                slot.context, slot.pointer, at, at + _ROBUST_AFTER_NUMBER, rseq
            )
            if made > 0:
                numbers[slot.pointer] = made
        for ident, thread in list(threading._active.items()):  # type: ignore[attr-defined]
            if ident in numbers and hasattr(thread, "_native_id"):
                thread._native_id = numbers[ident]
        return len(slots) - len(numbers)

    def are_known(self, slots: list[Slot]) -> bool:
        """Reports whether each of them is a thread of the C library."""
        pointers = {slot.pointer for slot in slots}
        return len(pointers) == len(slots) and self._library.pthread_self() not in pointers

    def is_waiting(self, slot: Slot) -> bool:
        """Reports whether a thread waited in a system call, and not for the GIL."""
        rdi, rax, rip = _registers(slot, _RDI, _RAX, _RIP)
        if 0 <= rdi - self._runtime < _MAX_RUNTIME_BYTES:
            return False
        if ctypes.string_at(rip, 2) == _SYSCALL_INSTRUCTION:
            return rax in _WAITING
        return rax == _INTERRUPTED and ctypes.string_at(rip - 2, 2) == _SYSCALL_INSTRUCTION

    def fork(self) -> int:
        at = self._library.pthread_self() + self._number_at
        number = int(self._library.syscall(SYS_clone, _FORK_FLAGS, 0, 0, ctypes.c_size_t(at), 0))
        if number < 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
        return number

    def _filled(self) -> Iterator[Slot]:
        slots = self._slots
        for index in range(min(self._words[_READY // 4], _SLOT_COUNT)):
            context, pointer, number, _ = slots[4 * index : 4 * index + 4]
            yield Slot(context, pointer, number)

    def _wait(self, seen: int) -> None:
        """Waits until another thread has stopped, or for a millisecond."""
        pause = (ctypes.c_long * 2)(0, 1_000_000)
        operation = FUTEX_WAIT | FUTEX_PRIVATE_FLAG
        self._futex(_READY, operation, seen, ctypes.byref(pause))

    def _futex(self, word: int, *arguments: Any) -> None:
        self._library.syscall(SYS_futex, ctypes.c_size_t(self._base + _TABLE + word), *arguments)

    def _install(self) -> bool:
        """Finds an unused signal.

        The handler stays installed: without it, a late signal would kill the process.
        """
        others = range(signal.SIGRTMAX - 1, signal.SIGRTMIN + 2, -1)
        for number in (self._signal, _UNBLOCKABLE, *others):
            if not number:
                continue
            present = (ctypes.c_uint64 * 4)()
            if self._library.syscall(SYS_rt_sigaction, number, None, ctypes.byref(present), 8):
                continue
            if present[0] == self._base:
                self._signal = number
                return True
            # A sandbox ignores the one that the C library reserves.
            if present[0] > (number == _UNBLOCKABLE):
                continue
            parts = self._base, _ACTION_FLAGS, self._base + _RESTORER, 2**64 - 1
            action = (ctypes.c_uint64 * 4)(*parts)
            if not self._library.syscall(SYS_rt_sigaction, number, ctypes.byref(action), None, 8):
                self._signal = number
                return True
        return False

    def _has_blocked_signal(self, number: int) -> bool:
        """Reports whether a thread blocks the signal, so that it stays pending."""
        pending = _status(number, b"SigBlk") & _status(number, b"SigPnd")
        return bool(pending >> (self._signal - 1) & 1)


_machine_code: _MachineCode | None = None
_is_supported = True
_busy: frozenset[int] = frozenset()


def _get_machine_code() -> _MachineCode | None:
    """Returns the code. Returns None if this processor or C library is not supported."""
    global _machine_code, _is_supported
    if _machine_code is None and _is_supported:
        try:
            if platform.machine() != "x86_64" or "CS_GNU_LIBC_VERSION" not in os.confstr_names:
                raise OSError("not supported")
            _machine_code = _MachineCode(ctypes.PyDLL(None, use_errno=True))
        except (OSError, ValueError, AttributeError):
            _is_supported = False
    return _machine_code


def _waits_on_futex(slot: Slot) -> bool:
    """Reports whether a thread waits on a futex without a timeout."""
    operation, limit, rax = _registers(slot, _RSI, _R10, _RAX)
    # The kernel reads 32 bits of the register.
    command = operation & 0xFFFFFFFF & ~(FUTEX_PRIVATE_FLAG | FUTEX_CLOCK_REALTIME)
    # The kernel does not restart a wait that has a timeout.
    return rax == SYS_futex and not limit and command in (FUTEX_WAIT, FUTEX_WAIT_BITSET)


def _registers(slot: Slot, *offsets: int) -> list[int]:
    return [ctypes.c_uint64.from_address(slot.context + at).value for at in offsets]


def _find_number(pointer: int) -> int:
    """Finds the offset at which the C library stores a thread's id, by its value."""
    number = threading.get_native_id()
    words = (ctypes.c_uint32 * (_MAX_DESCRIPTION_BYTES // 4)).from_address(pointer)
    for index in range(0, len(words) - 8, 2):
        offset = 4 * index
        if words[index] != number:
            continue
        # The list of robust locks: an empty one points to itself, and the offset in it is negative.
        robust = (ctypes.c_int64 * 3).from_address(pointer + offset + _ROBUST_AFTER_NUMBER)
        if robust[0] == pointer + offset + _ROBUST_AFTER_NUMBER and robust[1] < 0:
            return offset
    raise OSError("an unknown C library")


def _find_rseq(library: ctypes.PyDLL) -> int:
    """Returns the offset of a thread's rseq area from its thread pointer. Returns 0 if there is
    none.
    """
    try:
        if not ctypes.c_uint.in_dll(library, "__rseq_size").value:
            return 0
        return ctypes.c_ssize_t.in_dll(library, "__rseq_offset").value
    except ValueError:
        return 0


def _others() -> set[int]:
    own = threading.get_native_id()
    return {int(name) for name in os.listdir("/proc/self/task")} - {own}


def _is_ending(number: int) -> bool:
    """Reports whether a thread has ended and is merely still visible."""
    try:
        with open(f"/proc/self/task/{number}/stat", "rb", 0) as file:
            fields = file.read().rpartition(b")")[2].split()
        return fields[0] in b"ZX" or bool(int(fields[6]) & PF_EXITING)
    except (OSError, ValueError, IndexError):
        return True


def _status(number: int, name: bytes) -> int:
    try:
        with open(f"/proc/self/task/{number}/status", "rb", 0) as file:
            return int(file.read().partition(b"\n" + name + b":")[2].split(None, 1)[0], 16)
    except (OSError, ValueError, IndexError):
        return 0
