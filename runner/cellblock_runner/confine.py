"""Confinement that a process in a container applies to itself before any user code, in addition to
the restrictions of the container engine.

Landlock is a second boundary for the file system that holds even if a mount does not, and on newer
kernels one for signals: a session cannot end the processes that monitor it. Its rules name folders
by descriptors that are opened in here, so the host cannot send them ready-made. A process that is
not dumpable cannot be read or changed through /proc by other processes of the same user, which
separates the supervisor from sessions. A filter that refuses to start programs is for containers in
which programs need an approval; the host sends it (`jail/src/seccomp.rs`), and every child inherits
it. All three need no privilege, and none can be undone.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Mapping, Sequence

# From <linux/prctl.h>.
PR_SET_DUMPABLE = 4
PR_SET_SECCOMP = 22
PR_SET_CHILD_SUBREAPER = 36

# System calls, with these numbers on every architecture.
SYS_landlock_create_ruleset = 444
SYS_landlock_add_rule = 445
SYS_landlock_restrict_self = 446

# From <linux/landlock.h>.
LANDLOCK_CREATE_RULESET_VERSION = 1 << 0
LANDLOCK_RULE_PATH_BENEATH = 1
LANDLOCK_ACCESS_FS_EXECUTE = 1 << 0
LANDLOCK_ACCESS_FS_WRITE_FILE = 1 << 1
LANDLOCK_ACCESS_FS_READ_FILE = 1 << 2
LANDLOCK_ACCESS_FS_READ_DIR = 1 << 3
LANDLOCK_ACCESS_FS_MAKE_SYM = 1 << 12
LANDLOCK_ACCESS_FS_REFER = 1 << 13
LANDLOCK_ACCESS_FS_TRUNCATE = 1 << 14
LANDLOCK_ACCESS_FS_IOCTL_DEV = 1 << 15
LANDLOCK_SCOPE_ABSTRACT_UNIX_SOCKET = 1 << 0
LANDLOCK_SCOPE_SIGNAL = 1 << 1

# Every right of the first version, of which the last is LANDLOCK_ACCESS_FS_MAKE_SYM.
_FIRST_VERSION = (LANDLOCK_ACCESS_FS_MAKE_SYM << 1) - 1
_READ_ONLY = LANDLOCK_ACCESS_FS_EXECUTE | LANDLOCK_ACCESS_FS_READ_FILE | LANDLOCK_ACCESS_FS_READ_DIR
# The rights that a rule about a file may grant. Terminals need LANDLOCK_ACCESS_FS_IOCTL_DEV.
_OF_FILES = (
    LANDLOCK_ACCESS_FS_EXECUTE
    | LANDLOCK_ACCESS_FS_WRITE_FILE
    | LANDLOCK_ACCESS_FS_READ_FILE
    | LANDLOCK_ACCESS_FS_TRUNCATE
    | LANDLOCK_ACCESS_FS_IOCTL_DEV
)

# From <linux/seccomp.h>, and the size of `struct sock_filter`.
SECCOMP_MODE_FILTER = 2
_INSTRUCTION_SIZE = 8

_library = ctypes.CDLL(None, use_errno=True)


def be_unreadable() -> None:
    """Keeps other processes of the same user out of the memory and the descriptors of this one."""
    _library.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


def be_readable() -> None:
    """Makes /proc/self accessible to the session again."""
    _library.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)


def adopt_orphans() -> None:
    """Makes this process the parent of every descendant that loses its own. Raises OSError where
    that is not supported, as in older gVisors.
    """
    if _library.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "processes cannot adopt orphans here")


def offer_to_die(score: int) -> None:
    """Sets oom_score_adj, as far as permitted."""
    try:
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write(str(score))
    except OSError:
        pass  # The engine has already set a higher score, or the runtime does not support it.


def version_of_landlock() -> int:
    """Returns the kernel's landlock version, or less than one if it has none."""
    create, flags = SYS_landlock_create_ruleset, LANDLOCK_CREATE_RULESET_VERSION
    return int(_library.syscall(create, None, ctypes.c_size_t(0), flags))


def enter_landlock(folders: Sequence[str], files: Sequence[str]) -> None:
    """Restricts this process and all its children to change only files below `folders`, write to
    `files`, and signal each other.

    It cannot be undone; entering again adds to it. Does nothing if the kernel has no landlock.
    Raises OSError if the kernel has one that fails.
    """
    version = version_of_landlock()
    if version < 1:
        return
    rights = (
        _FIRST_VERSION
        | (LANDLOCK_ACCESS_FS_REFER if version >= 2 else 0)
        | (LANDLOCK_ACCESS_FS_TRUNCATE if version >= 3 else 0)
        | (LANDLOCK_ACCESS_FS_IOCTL_DEV if version >= 5 else 0)
    )
    # struct landlock_ruleset_attr: rights for files, rights for networks, scopes. A session cannot
    # signal processes outside, nor connect to their abstract sockets.
    scopes = LANDLOCK_SCOPE_ABSTRACT_UNIX_SOCKET | LANDLOCK_SCOPE_SIGNAL
    attributes = (
        struct.pack("=QQQ", rights, 0, scopes) if version >= 6 else struct.pack("=Q", rights)
    )
    create, size = SYS_landlock_create_ruleset, ctypes.c_size_t(len(attributes))
    ruleset = _check(_library.syscall(create, attributes, size, 0), "landlock")
    try:
        _allow(ruleset, "/", _READ_ONLY)
        for folder in folders:
            _allow(ruleset, folder, rights)
        for path in files:
            _allow(ruleset, path, _OF_FILES & rights)
        _check(_library.syscall(SYS_landlock_restrict_self, ruleset, 0), "landlock")
    finally:
        os.close(ruleset)


def refuse_programs(filters: Mapping[str, Sequence[int]]) -> None:
    """Makes the kernel refuse to start programs, and to load further filters, in this process and
    all its children. It cannot be undone.

    `filters` come from the host: by machine, the bytes of an array of `struct sock_filter`. Raises
    OSError if there is none for this machine, or if the kernel does not refuse programs with it.
    """
    machine = os.uname().machine
    if machine not in filters:
        raise OSError(errno.ENOSYS, f"programs cannot be refused on {machine}")
    code = bytes(filters[machine])
    memory = ctypes.create_string_buffer(code, len(code))
    # struct sock_fprog: the number of instructions, and their address.
    program = struct.pack("@HP", len(code) // _INSTRUCTION_SIZE, ctypes.addressof(memory))
    mode = ctypes.c_ulong(SECCOMP_MODE_FILTER)
    _check(_library.prctl(PR_SET_SECCOMP, mode, program, 0, 0), "refuse programs")
    # A folder is not a program: without a filter, the kernel answers EACCES.
    _library.execve(b"/", None, None)
    if ctypes.get_errno() != errno.EPERM:
        raise OSError(ctypes.get_errno(), "the kernel does not refuse programs")


def count_of_filters(process: int) -> int:
    """Returns the number of seccomp filters of a process according to the kernel. Returns 0 if the
    kernel does not report it.
    """
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
        return  # There is nothing to protect.
    try:
        # struct landlock_path_beneath_attr.
        rule = struct.pack("=Qi", rights, place)
        add = SYS_landlock_add_rule
        _check(_library.syscall(add, ruleset, LANDLOCK_RULE_PATH_BENEATH, rule, 0), path)
    finally:
        os.close(place)
