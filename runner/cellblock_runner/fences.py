"""Fences: what a process in a container does to itself before any user code, beside what the engine has done to it.

Landlock is a second boundary of the file system that holds even if a mount did not, and on newer kernels one for signals: a session cannot
end what watches it. A process that is not dumpable cannot be read or changed through /proc by others of the same user, which is how
the supervisor stays apart from sessions. Both need no right at all.
"""

from __future__ import annotations

import ctypes
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
# What a rule about a file, not a folder, may grant: execute, write, read, truncate.
_OF_FILES = 0b111 | _TRUNCATE
# What stays within a session since the sixth version: names of abstract sockets, and signals.
_SCOPES = 0b11

_library = ctypes.CDLL(None, use_errno=True)


def be_unreadable() -> None:
    """Keeps other processes of the same user out of the memory and the descriptors of this one."""
    _library.prctl(_SET_DUMPABLE, 0, 0, 0, 0)


def be_readable() -> None:
    """Makes /proc/self the session's own again."""
    _library.prctl(_SET_DUMPABLE, 1, 0, 0, 0)


def adopt_orphans() -> None:
    """Makes this process the parent of every descendant that loses its own."""
    _library.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


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
