"""Threads: those of a session go on in its copies.

A plain fork copies one thread. The others are missing in the copy, with whatever locks they held,
and what waits for them waits for ever. So before a copy is made, every other thread is stopped
where it waits, and the copy makes threads that go on from there:

    hold       in the original: a signal stops each thread, and the kernel saves its registers
    release    in the original, afterwards: the handlers return
    go_on      in a copy: a thread is made on each of these stacks, and returns from the handler

The copy is made without the handlers of a fork, because nothing has to be put right: no thread is
missing, so every lock has the owner that it had. That is true only if all of them come along. A
thread that computes may hold a lock of the C library, for which the copy would wait before that
thread goes on; so all must wait in a system call. Nor may one of them wait for Python's own lock:
this thread would hand it over, and wait until it is taken. Otherwise an ordinary fork is made, and
the copy has one thread.

The machine code is that of `threads.s`. A thread in a copy keeps the number that the C library
knows it by, because the library compares that number with the owner of a recursive lock; the kernel
knows it by another one.
"""

from __future__ import annotations

import ctypes
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
# Where in it the parts begin, and what the table behind it holds.
_RESTORER, _GO_ON = 0x90, 0xA0
_TABLE, _SLOTS, _MOST = 4096, 64, 1024
_CLAIMED, _READY, _ROUND, _ACTIVE = 0, 4, 8, 12

# System calls, and flags of some of them.
_CLONE, _TGKILL, _FUTEX, _SIGACTION = 56, 234, 202, 13
# The kernel writes the number of the new thread, and clears it when the thread ends.
_FORK_FLAGS = signal.SIGCHLD | 0x01000000 | 0x00200000
# A handler with information, a restorer, its own stack; system calls are made again.
_ACTION_FLAGS = 0x4 | 0x04000000 | 0x08000000 | 0x10000000
_FUTEX_WAIT, _FUTEX_WAKE = 128, 129
# Without the flags for private memory and for the clock: to wait, and to wait for some bits.
_FUTEX_COMMAND, _FUTEX_WAITS = 0x7F, (0, 9)

# The signal with which the C library cancels threads. It never lets a thread block it, and uses it
# from the first cancellation on.
_UNBLOCKABLE = 32

# Calls in which a thread waits for somebody else, and that it makes again after a signal.
_READING_AND_WRITING = (0, 1, 17, 18, 19, 20, 42, 43, 44, 45, 46, 47, 288, 299, 307)
_POLLING = (7, 23, 232, 270, 271, 281, 441)
_SLEEPING = (34, 35, 61, 65, 128, 130, 202, 220, 230, 247, 449, 454, 455)
_WAITING = frozenset(_READING_AND_WRITING + _POLLING + _SLEEPING)
_ENTER = b"\x0f\x05"
# Offsets in the context that the kernel saves.
_R10, _RDI, _RSI, _RAX, _RIP = 56, 104, 112, 144, 168
_INTERRUPTED = 2**64 - 4

# Python's lock is in a structure of at most this size.
_LARGEST_RUNTIME = 1024 * 1024
# In the C library's description of a thread, which begins where its thread pointer points.
_LARGEST_DESCRIPTION = 0x700
_ROBUST_AFTER_NUMBER = 16

# How long threads may take to stop: until the machine has got round to each of them.
_REACTION = 2.0
# After so long, one that still blocks the signal is not on its way out of the handler.
_LEAVING = 0.1
# How long they may go on computing: pools look for more work for up to 200 ms before they wait.
_BUSY_LIMIT, _BUSY_AGAIN_LIMIT = 0.3, 0.01
_PAUSE = 0.002


class Slot(NamedTuple):
    """Where a thread stands."""

    context: int
    pointer: int
    number: int


class Hold:
    """All other threads of the process, stopped. `lost` counts those that could not be."""

    def __init__(self, slots: list[Slot], lost: int = 0) -> None:
        self._slots = slots
        self.lost = lost

    @property
    def is_whole(self) -> bool:
        """Tells whether there are threads, and all of them are stopped."""
        return bool(self._slots) and not self.lost

    @property
    def is_idle(self) -> bool:
        """Tells whether each of them waits until another wakes it: nothing happens by itself."""
        return not self.lost and all(map(_waits_for_another, self._slots))

    def release(self) -> None:
        """Lets them go on, in the original."""
        if self._slots and _machine is not None:
            _machine.let_go()

    def go_on(self, ended: Collection[int]) -> int:
        """In a copy: makes threads that go on from there. Returns how many could not be made.

        Those of Python that are in `ended` are not wanted any more.
        """
        if not self._slots or _machine is None:
            return 0
        _machine.let_go()
        return _machine.go_on([slot for slot in self._slots if slot.pointer not in ended])


def hold() -> Hold:
    """Stops all other threads, or none."""
    global _busy
    others = _others()
    if not others:
        return Hold([])
    machine = _get_machine()
    if machine is None or len(others) > _MOST // 2:
        return Hold([], len(others))
    # Those that computed all the time when it was last tried probably still do.
    deadline = time.monotonic() + (_BUSY_AGAIN_LIMIT if others & _busy else _BUSY_LIMIT)
    while True:
        try:
            slots = machine.stop_all()
        except BaseException:
            machine.let_go()
            raise
        if slots is None:
            machine.let_go()
            return Hold([], len(_others()))
        busy = {slot.number for slot in slots if not machine.waits(slot)}
        if not busy and machine.knows(slots):
            _busy = frozenset()
            return Hold(slots)
        machine.let_go()
        if time.monotonic() > deadline:
            _busy = frozenset(busy)
            return Hold([], len(slots))
        time.sleep(_PAUSE)


def fork() -> int:
    """Copies the process with this thread only, and without the handlers of a fork."""
    assert _machine is not None
    return _machine.fork()


class _Machine:
    """The machine code and its table, in memory of their own."""

    def __init__(self, library: ctypes.PyDLL) -> None:
        self._library = library
        library.syscall.restype = ctypes.c_long
        size = _TABLE + _SLOTS + 32 * _MOST
        self._memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory[: len(_CODE)] = _CODE
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        protect = library.mprotect
        protect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        if protect(self._base, _TABLE, mmap.PROT_READ | mmap.PROT_EXEC):
            raise OSError("no memory for code")
        self._go_on = ctypes.PYFUNCTYPE(ctypes.c_long, *[ctypes.c_size_t] * 5)(self._base + _GO_ON)
        self._words = (ctypes.c_uint32 * 16).from_address(self._base + _TABLE)
        self._slots = (ctypes.c_uint64 * (4 * _MOST)).from_address(self._base + _TABLE + _SLOTS)
        library.pthread_self.restype = ctypes.c_size_t
        self._number_at = _find_number(library.pthread_self())
        self._rseq_at = _find_rseq(library)
        self._runtime = ctypes.addressof(ctypes.c_char.in_dll(library, "_PyRuntime"))
        self._signal = 0

    def stop_all(self) -> list[Slot] | None:
        """Stops all other threads; None when one of them does not stop."""
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
                self._library.syscall(_TGKILL, process, number, self._signal)
            if missing <= asked and all(map(_is_ending, missing)):
                return slots
            asked |= missing
            spent = time.monotonic() - begun
            if spent > _REACTION or (spent > _LEAVING and any(map(self._is_deaf, missing))):
                return None
            self._wait(words[_READY // 4])

    def let_go(self) -> None:
        self._words[_ACTIVE // 4] = 0
        self._words[_ROUND // 4] += 1
        self._futex(_ROUND, _FUTEX_WAKE, _MOST)

    def go_on(self, slots: list[Slot]) -> int:
        numbers = {}
        for slot in slots:
            at = slot.pointer + self._number_at
            rseq = slot.pointer + self._rseq_at if self._rseq_at else 0
            made = self._go_on(slot.context, slot.pointer, at, at + _ROBUST_AFTER_NUMBER, rseq)
            if made > 0:
                numbers[slot.pointer] = made
        for ident, thread in list(threading._active.items()):  # type: ignore[attr-defined]
            if ident in numbers and hasattr(thread, "_native_id"):
                thread._native_id = numbers[ident]
        return len(slots) - len(numbers)

    def knows(self, slots: list[Slot]) -> bool:
        """Tells whether each of them is a thread of the C library."""
        pointers = {slot.pointer for slot in slots}
        return len(pointers) == len(slots) and self._library.pthread_self() not in pointers

    def waits(self, slot: Slot) -> bool:
        """Tells whether a thread waited in a system call, and not for Python's lock."""
        rdi, rax, rip = _registers(slot, _RDI, _RAX, _RIP)
        if 0 <= rdi - self._runtime < _LARGEST_RUNTIME:
            return False
        if ctypes.string_at(rip, 2) == _ENTER:
            return rax in _WAITING
        return rax == _INTERRUPTED and ctypes.string_at(rip - 2, 2) == _ENTER

    def fork(self) -> int:
        at = self._library.pthread_self() + self._number_at
        number = int(self._library.syscall(_CLONE, _FORK_FLAGS, 0, 0, ctypes.c_size_t(at), 0))
        if number < 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
        return number

    def _filled(self) -> Iterator[Slot]:
        slots = self._slots
        for index in range(min(self._words[_READY // 4], _MOST)):
            context, pointer, number, _ = slots[4 * index : 4 * index + 4]
            yield Slot(context, pointer, number)

    def _wait(self, seen: int) -> None:
        """Waits until another thread has stopped, or a moment."""
        pause = (ctypes.c_long * 2)(0, 1_000_000)
        self._futex(_READY, _FUTEX_WAIT, seen, ctypes.byref(pause))

    def _futex(self, word: int, *arguments: Any) -> None:
        self._library.syscall(_FUTEX, ctypes.c_size_t(self._base + _TABLE + word), *arguments)

    def _install(self) -> bool:
        """Finds a signal that nobody uses.

        The handler stays: whoever gets the signal late would die of it.
        """
        others = range(signal.SIGRTMAX - 1, signal.SIGRTMIN + 2, -1)
        for number in (self._signal, _UNBLOCKABLE, *others):
            if not number:
                continue
            present = (ctypes.c_uint64 * 4)()
            if self._library.syscall(_SIGACTION, number, None, ctypes.byref(present), 8):
                continue
            if present[0] == self._base:
                self._signal = number
                return True
            # A sandbox ignores the one that the C library keeps for itself.
            if present[0] > (number == _UNBLOCKABLE):
                continue
            parts = self._base, _ACTION_FLAGS, self._base + _RESTORER, 2**64 - 1
            action = (ctypes.c_uint64 * 4)(*parts)
            if not self._library.syscall(_SIGACTION, number, ctypes.byref(action), None, 8):
                self._signal = number
                return True
        return False

    def _is_deaf(self, number: int) -> bool:
        """Tells whether a thread blocks the signal, so that it stays pending."""
        pending = _status(number, b"SigBlk") & _status(number, b"SigPnd")
        return bool(pending >> (self._signal - 1) & 1)


_machine: _Machine | None = None
_is_supported = True
_busy: frozenset[int] = frozenset()


def _get_machine() -> _Machine | None:
    """Returns the machine; None where there is none for this processor or this C library."""
    global _machine, _is_supported
    if _machine is None and _is_supported:
        try:
            if platform.machine() != "x86_64" or "CS_GNU_LIBC_VERSION" not in os.confstr_names:
                raise OSError("not supported")
            _machine = _Machine(ctypes.PyDLL(None, use_errno=True))
        except (OSError, ValueError, AttributeError):
            _is_supported = False
    return _machine


def _waits_for_another(slot: Slot) -> bool:
    """Tells whether a thread waits on memory, for as long as it takes."""
    operation, limit, rax = _registers(slot, _RSI, _R10, _RAX)
    # A wait that has a limit is not made again by the kernel.
    return rax == _FUTEX and not limit and operation & _FUTEX_COMMAND in _FUTEX_WAITS


def _registers(slot: Slot, *offsets: int) -> list[int]:
    return [ctypes.c_uint64.from_address(slot.context + at).value for at in offsets]


def _find_number(pointer: int) -> int:
    """Finds where the C library keeps the number of a thread, by what stands there."""
    number = threading.get_native_id()
    words = (ctypes.c_uint32 * (_LARGEST_DESCRIPTION // 4)).from_address(pointer)
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
    """Returns where the rseq area of a thread is from its thread pointer; 0 where there is none."""
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
    """Tells whether a thread has ended and is only still visible."""
    try:
        with open(f"/proc/self/task/{number}/stat", "rb", 0) as file:
            fields = file.read().rpartition(b")")[2].split()
        return fields[0] in b"ZX" or bool(int(fields[6]) & 0x4)
    except (OSError, ValueError, IndexError):
        return True


def _status(number: int, name: bytes) -> int:
    try:
        with open(f"/proc/self/task/{number}/status", "rb", 0) as file:
            return int(file.read().partition(b"\n" + name + b":")[2].split(None, 1)[0], 16)
    except (OSError, ValueError, IndexError):
        return 0
