"""Descriptors: the open descriptors of a session, and how a copy of it restores them.

A copy begins with every descriptor closed except the standard ones and its channel. Its objects
still hold the old numbers, so each number must refer to the right object again, or to a dead
placeholder: a number that stayed free would be reused for the next opened file, and an old object
would read and write there.

    regular files, folders, devices    reopened by path, at the same offset; locks are taken again
    files without a name               recreated from the content, if it was small enough to keep
    event counters, timers, epolls     recreated (`private_descriptors`)
    own pipes and pairs of sockets     recreated (`private_descriptors`)
    duplicates of our own pipes        redirected to the new ones
    everything else                    dead: reading and writing fail, and the loss is reported
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from . import private_descriptors
from .private_descriptors import Private

# Limit on the kept content of all files without a name together, in bytes.
MAX_KEPT_BYTES = 8 * 1024 * 1024
# Limit on the descriptors compared that are open on the same file at the same offset. Beyond it,
# each is reopened by itself.
_MAX_SIMILAR = 16

_KEPT_FLAGS = (
    os.O_ACCMODE
    | os.O_APPEND
    | os.O_NONBLOCK
    | os.O_SYNC
    | os.O_DIRECTORY
    | os.O_NOFOLLOW
    | os.O_PATH
)
_PIECE = 1024 * 1024
# Major numbers of terminal devices: /dev/tty and /dev/ptmx, and the eight of pseudo-terminals.
_TERMINALS = (5, *range(136, 144))

Identity = tuple[int, int]


class Lock(NamedTuple):
    """A lock on a file. Locks belong to a process or to an open file; a copy has none of them."""

    of_whole_file: bool
    is_exclusive: bool
    start: int
    length: int


class OpenDescriptor(NamedTuple):
    """One descriptor as it was before the copy."""

    number: int
    # Its name in a report. "file" means that it can be reopened.
    kind: str
    identity: Identity
    path: str = ""
    flags: int = 0
    offset: int = 0
    # The content of a file without a name.
    content: bytes | None = None
    # An earlier descriptor of the same file without a name.
    same_file_as: int | None = None
    # An earlier descriptor with the same offset: one is a duplicate of the other.
    duplicate_of: int | None = None
    locks: tuple[Lock, ...] = ()
    # 0 or 1: it leads to the pipe for standard output or for standard error.
    stream: int | None = None
    # How to recreate it, if no other process has it.
    private: Private | None = None


def find_open(
    streams: tuple[int, int],
    ours: Collection[int],
    has_children: bool,
    pairs: Iterable[tuple[int, int]] = (),
) -> list[OpenDescriptor]:
    """Returns the open descriptors, lowest number first.

    `streams` are the private write ends, `ours` the runner's own descriptors, `pairs` sockets that
    are connected to each other.
    """
    pipes = [_identity(os.fstat(number)) for number in streams]
    found: list[OpenDescriptor] = []
    nameless: dict[Identity, int] = {}
    similar: dict[tuple[Identity, int], list[OpenDescriptor]] = {}
    room = MAX_KEPT_BYTES
    for number in sorted(map(int, os.listdir("/proc/self/fd"))):
        if number in ours or number in streams:
            continue
        try:
            opened = _describe(number, pipes, nameless, room)
        except OSError:
            continue  # Closed meanwhile, for example the one that listed the folder.
        if opened is None:
            continue
        if opened.content is not None:
            room -= len(opened.content)
            nameless[opened.identity] = number
        if opened.kind == "file":
            alike = similar.setdefault((opened.identity, opened.offset), [])
            opened = opened._replace(duplicate_of=_find_duplicate(opened, alike))
            # A duplicate shares its offset with one that is already in the list.
            if opened.duplicate_of is None and len(alike) < _MAX_SIMILAR:
                alike.append(opened)
        found.append(opened)
    ends = [
        (item.number, item.identity)
        for item in found
        if item.kind == "pipe" and item.stream is None
    ]
    sockets = [(item.number, item.identity[1]) for item in found if item.path == "unix"]
    anew: dict[int, Private] = {}
    if not has_children:
        anew = {
            **private_descriptors.describe_pipes(ends),
            **private_descriptors.describe_tracked_pairs(sockets),
        }
    anew.update(private_descriptors.describe_pairs(pairs))
    return [
        item._replace(private=anew[item.number]) if item.number in anew else item for item in found
    ]


def restore(
    opened: Sequence[OpenDescriptor], is_known: Callable[[str], bool]
) -> list[OpenDescriptor]:
    """Restores every number, or makes it dead. Returns the dead ones.

    `is_known` reports whether the file at a path counts as the one that was open, even if it is
    another inode by now.
    """
    dead: list[OpenDescriptor] = []
    restorer = private_descriptors.Restorer(1 + max((item.number for item in opened), default=0))
    # Epolls last: they watch the others.
    for item in sorted(
        opened, key=lambda item: isinstance(item.private, private_descriptors.Epoll)
    ):
        try:
            if item.private is not None:
                restorer.restore(item.number, item.private)
            elif item.kind == "file":
                _reopen(item, is_known)
            else:
                raise OSError(errno.EBADF, "cannot be opened again")
        except OSError:
            _put_placeholder(item.number)
            if item.stream is None:
                dead.append(item)
    return dead


def redirect_to_streams(opened: Iterable[OpenDescriptor], streams: tuple[int, int]) -> None:
    """Redirects the numbers that led to the old pipes to the new ones."""
    for item in opened:
        if item.stream is not None:
            os.dup2(streams[item.stream], item.number, inheritable=not item.flags & os.O_CLOEXEC)


def describe_losses(dead: Iterable[OpenDescriptor]) -> list[str]:
    """Returns short texts, such as "2 connections"."""
    kinds: Counter[str] = Counter()
    ends: set[Identity] = set()
    files: list[str] = []
    for item in dead:
        if item.kind == "pipe" and item.identity in ends:
            continue  # The other end of a pipe.
        ends.add(item.identity)
        if item.kind == "file":
            files.append(os.path.basename(item.path))
        else:
            kinds[item.kind] += 1
    texts = [counted(count, kind) for kind, count in kinds.items()]
    if files:
        names = ", ".join(name if len(name) <= 40 else name[:39] + "…" for name in files[:3])
        texts.append(
            f"{counted(len(files), 'open file')} ({names}{', …' if len(files) > 3 else ''})"
        )
    return texts


def counted(count: int, thing: str) -> str:
    """Returns "1 thread" or "2 threads"."""
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def content_of(number: int, size: int) -> bytes:
    """Returns the content of a file, without moving its offset."""
    parts = []
    position = 0
    while position < size:
        part = os.pread(number, min(_PIECE, size - position), position)
        if not part:
            break
        parts.append(part)
        position += len(part)
    return b"".join(parts)


def file_without_name(content: bytes) -> int:
    """Returns a new file in memory."""
    number = os.memfd_create("restored")
    try:
        write_all(number, content)
    except BaseException:
        os.close(number)
        raise
    return number


def write_all(number: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(number, view) :]


def _describe(
    number: int, pipes: list[Identity], nameless: dict[Identity, int], room: int
) -> OpenDescriptor | None:
    status = os.fstat(number)
    identity, kind = _identity(status), stat.S_IFMT(status.st_mode)
    if kind == stat.S_IFIFO:
        stream = pipes.index(identity) if identity in pipes else None
        if stream is not None and number == stream + 1:
            return None  # Standard output and standard error themselves.
        flags = 0 if os.get_inheritable(number) else os.O_CLOEXEC
        path = os.readlink(f"/proc/self/fd/{number}")
        # A named pipe could be reopened by its path, but its content and its other end cannot be
        # restored.
        return OpenDescriptor(number, "pipe", identity, path, flags, stream=stream)
    if kind == stat.S_IFSOCK:
        return OpenDescriptor(number, *_kind_of_socket(number, identity))
    path = os.readlink(f"/proc/self/fd/{number}")
    if kind not in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFCHR):
        name = path.removeprefix("anon_inode:").strip("[]")
        return OpenDescriptor(
            number,
            _kind_of_special(name),
            identity,
            path,
            private=private_descriptors.describe(number, name),
        )
    if kind == stat.S_IFCHR and os.major(status.st_rdev) in _TERMINALS:
        # Reopened, it would be another terminal.
        return OpenDescriptor(number, "terminal", identity, path)
    if number == 0 and path == os.devnull:
        return None
    flags, offset, locks = _read_fdinfo(number)
    if kind == stat.S_IFREG:
        flags &= ~os.O_DIRECTORY  # It is part of O_TMPFILE.
    item = OpenDescriptor(number, "file", identity, path, flags, offset, locks=locks)
    if kind != stat.S_IFREG or _is_at(path, identity):
        return item
    if identity in nameless:
        return item._replace(same_file_as=nameless[identity])
    is_readable = flags & os.O_ACCMODE != os.O_WRONLY or path.startswith("/memfd:")
    if not is_readable or status.st_size > room:
        return item._replace(kind="deleted file")
    try:
        return item._replace(content=content_of(number, status.st_size))
    except OSError:
        return item._replace(kind="deleted file")


def _identity(status: os.stat_result) -> Identity:
    return status.st_dev, status.st_ino


def _is_at(path: str, identity: Identity) -> bool:
    try:
        return _identity(os.stat(path)) == identity
    except OSError:
        return False


def _kind_of_socket(number: int, identity: Identity) -> tuple[str, Identity, str]:
    """Returns kind, identity and family."""
    view = socket.socket(fileno=number)
    family = "unix" if view.family == socket.AF_UNIX else "network"
    try:
        if view.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return "listening socket", identity, family
        return "connection" if view.type == socket.SOCK_STREAM else "socket", identity, family
    except OSError:
        return "socket", identity, family
    finally:
        view.detach()


def _kind_of_special(name: str) -> str:
    return {"eventpoll": "epoll", "": "special descriptor"}.get(name, name[:30])


def _read_fdinfo(number: int) -> tuple[int, int, tuple[Lock, ...]]:
    """Returns flags, offset and locks of a descriptor."""
    with open(f"/proc/self/fdinfo/{number}", "rb", 0) as file:
        lines = file.read().decode("ascii", "replace").splitlines()
    flags = offset = 0
    locks = []
    for line in lines:
        name, _, value = line.partition(":")
        if name == "flags":
            flags = int(value, 8)
        elif name == "pos":
            offset = int(value)
        elif name == "lock":
            locks.append(_read_lock(value.split()))
    return flags, offset, tuple(lock for lock in locks if lock is not None)


def _read_lock(words: list[str]) -> Lock | None:
    """Parses a lock in the kernel's format: `1: POSIX ADVISORY WRITE 123 00:2b:15 0 EOF`."""
    try:
        _, family, _, mode, _, _, start, end = words
        if family not in ("POSIX", "FLOCK"):
            return None
        length = 0 if end == "EOF" else int(end) - int(start) + 1
        return Lock(family == "FLOCK", mode == "WRITE", int(start), length)
    except ValueError:
        return None


def _find_duplicate(item: OpenDescriptor, similar: list[OpenDescriptor]) -> int | None:
    """Returns one of these descriptors, which have the same file and offset, if it shares its
    offset with this one. Only moving one of them shows that.
    """
    for other in similar:
        if (other.flags ^ item.flags) & ~os.O_CLOEXEC or item.flags & os.O_PATH:
            continue
        try:
            os.lseek(item.number, item.offset + 1, os.SEEK_SET)
            moved = os.lseek(other.number, 0, os.SEEK_CUR) != other.offset
            os.lseek(item.number, item.offset, os.SEEK_SET)
        except OSError:
            continue
        if moved:
            return other.number
    return None


def _reopen(item: OpenDescriptor, is_known: Callable[[str], bool]) -> None:
    keeps = not item.flags & os.O_CLOEXEC
    if item.duplicate_of is not None:
        os.dup2(item.duplicate_of, item.number, inheritable=keeps)
        return
    flags = item.flags & _KEPT_FLAGS
    is_nameless = item.content is not None or item.same_file_as is not None
    if item.content is not None:
        new = file_without_name(item.content)
        try:
            # Through its number, so that a read-only descriptor stays read-only.
            number = os.open(f"/proc/self/fd/{new}", flags & ~os.O_NOFOLLOW)
        finally:
            os.close(new)
    elif item.same_file_as is not None:
        number = os.open(f"/proc/self/fd/{item.same_file_as}", flags & ~os.O_NOFOLLOW)
    else:
        number = os.open(_present_path(item.path), flags)
    try:
        if (
            not is_nameless
            and not is_known(item.path)
            and _identity(os.fstat(number)) != item.identity
        ):
            raise OSError(errno.ENOENT, "another file is in its place")
        if not flags & os.O_PATH and item.offset:
            os.lseek(number, item.offset, os.SEEK_SET)
        if number != item.number:
            os.dup2(number, item.number, inheritable=keeps)
        else:
            os.set_inheritable(number, keeps)
    finally:
        if number != item.number:
            os.close(number)
    for lock in item.locks:
        kind = fcntl.LOCK_EX if lock.is_exclusive else fcntl.LOCK_SH
        if lock.of_whole_file:
            fcntl.flock(item.number, kind | fcntl.LOCK_NB)
        else:
            fcntl.lockf(item.number, kind | fcntl.LOCK_NB, lock.length, lock.start)


def _present_path(path: str) -> str:
    """Returns the current path of a /proc file about this process, whose process id has changed."""
    parts = path.split("/", 3)
    if len(parts) == 4 and parts[1] == "proc" and parts[2].isdigit():
        return f"/proc/self/{parts[3]}"
    return path


def _put_placeholder(number: int) -> None:
    """Puts a descriptor that can be neither read nor written under the number."""
    placeholder = os.open(os.devnull, os.O_PATH | os.O_CLOEXEC)
    if placeholder != number:
        os.dup2(placeholder, number, inheritable=False)
        os.close(placeholder)
