"""Fences: what a process in a container does to itself before any user code, beside what the engine has done to it.

Landlock is a second boundary of the file system that holds even if a mount did not, and on newer kernels one for signals: a session cannot
end what watches it. A process that is not dumpable cannot be read or changed through /proc by others of the same user, which is how
the supervisor stays apart from sessions. A filter that refuses to start programs is for containers in which these need an approval; every child
inherits it. All three need no right at all, and none can be taken back.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Sequence

_SET_DUMPABLE, _SET_CHILD_SUBREAPER = 4, 36
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_ASK_VERSION = 1
_BENEATH = 1

# Rights by the version of landlock that knows them: execute … make symbolic links, refer, truncate, control devices.
_FIRST, _REFER, _TRUNCATE, _DEVICES = (1 << 13) - 1, 1 << 13, 1 << 14, 1 << 15
# Execute a file, read a file, read a folder.
_LOOK = 0b1101
# What a rule about a file, not a folder, may grant: execute, write, read, truncate, control a device (terminals need that).
_OF_FILES = 0b111 | _TRUNCATE | _DEVICES
# What stays within a session since the sixth version: names of abstract sockets, and signals.
_SCOPES = 0b11

# Numbers of the architecture, and of the calls that start programs, that load filters.
_CALLS = {"x86_64": (0xC000003E, 59, 322, 157), "aarch64": (0xC00000B7, 221, 281, 167)}
_X32_BIT = 0x40000000
_SET_SECCOMP, _MODE_FILTER = 22, 2
# Instructions of a filter: load a word, compare, return. Where it finds the number of a call, the architecture and the first argument.
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENT = 0, 4, 16
_ALLOW, _NOT_PERMITTED, _END = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x80000000
_instruction = struct.Struct("=HBBI")

_library = ctypes.CDLL(None, use_errno=True)


def be_unreadable() -> None:
    """Keeps other processes of the same user out of the memory and the descriptors of this one."""
    _library.prctl(_SET_DUMPABLE, 0, 0, 0, 0)


def be_readable() -> None:
    """Makes /proc/self the session's own again."""
    _library.prctl(_SET_DUMPABLE, 1, 0, 0, 0)


def adopt_orphans() -> None:
    """Makes this process the parent of every descendant that loses its own. Raises OSError where that cannot be had, as in older gVisors."""
    if _library.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "processes cannot adopt orphans here")


def offer_to_die(score: int) -> None:
    """Says how much rather than others this process should be ended when memory runs out."""
    try:
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write(str(score))
    except OSError:
        pass  # The engine has given a higher score already, or the runtime has no such thing.


def version_of_landlock() -> int:
    """Returns which landlock the kernel has; less than one when it has none."""
    return int(_library.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _ASK_VERSION))


def enter_landlock(folders: Sequence[str], files: Sequence[str]) -> None:
    """Lets this process and all its children change only what is below `folders`, write to `files`, and signal each other.

    It cannot be undone; entering again adds to it. Does nothing where the kernel has no landlock. Raises OSError when it has one that fails.
    """
    version = version_of_landlock()
    if version < 1:
        return
    rights = _FIRST | (_REFER if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0) | (_DEVICES if version >= 5 else 0)
    attributes = struct.pack("=QQQ", rights, 0, _SCOPES) if version >= 6 else struct.pack("=Q", rights)
    ruleset = _check(_library.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0), "landlock")
    try:
        _allow(ruleset, "/", _LOOK)
        for folder in folders:
            _allow(ruleset, folder, rights)
        for path in files:
            _allow(ruleset, path, _OF_FILES & rights)
        _check(_library.syscall(_RESTRICT_SELF, ruleset, 0), "landlock")
    finally:
        os.close(ruleset)


def refuse_programs() -> None:
    """Has the kernel refuse to start programs to this process and all its children, and to load further filters. It cannot be undone.

    Raises OSError when the kernel does not, or not yet, refuse.
    """
    machine = os.uname().machine
    if machine not in _CALLS:
        raise OSError(errno.ENOSYS, f"programs cannot be refused on {machine}")
    code = filter_of_programs(machine)
    memory = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("@HP", len(code) // _instruction.size, ctypes.addressof(memory))
    _check(_library.prctl(_SET_SECCOMP, ctypes.c_ulong(_MODE_FILTER), program, 0, 0), "refuse programs")
    # A folder is no program, so without a filter the kernel says that this is no way to treat it.
    _library.execve(b"/", None, None)
    if ctypes.get_errno() != errno.EPERM:
        raise OSError(ctypes.get_errno(), "the kernel does not refuse programs")


def filter_of_programs(machine: str) -> bytes:
    """Returns the instructions that refuse to start programs."""
    architecture, execute, execute_at, control = _CALLS[machine]
    lines = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 0, 9, architecture),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 7, 0, _X32_BIT),
        (_EQUAL, 5, 0, execute),
        (_EQUAL, 4, 0, execute_at),
        (_EQUAL, 0, 2, control),
        (_LOAD, 0, 0, _ARGUMENT),
        (_EQUAL, 1, 0, _SET_SECCOMP),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _NOT_PERMITTED),
        (_RETURN, 0, 0, _END),
    ]
    return b"".join(_instruction.pack(*line) for line in lines)


def count_of_filters(process: int) -> int:
    """Returns how many filters of system calls a process has, as the kernel tells it; none where it does not tell."""
    with open(f"/proc/{process}/status", encoding="ascii", errors="replace") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name == "Seccomp_filters":
                return int(value)
    return 0


def _check(result: int, attempt: str) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{attempt}: {os.strerror(ctypes.get_errno())}")
    return result


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return  # Nothing there to be changed.
    try:
        _check(_library.syscall(_ADD_RULE, ruleset, _BENEATH, struct.pack("=Qi", rights, place), 0), path)
    finally:
        os.close(place)
