"""Private descriptors: those that no other process has, and that a copy can therefore recreate.

    event counters    with the same count
    timers            with the remaining time
    pipes             with their content, if both ends are in this process and it has no children
    pairs of sockets  likewise. The kernel does not show which two form a pair, so pairs are
                      recorded when they are created
    epolls            with the descriptors they watch, after everything else is restored

Threads of libraries wake each other with these.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import os
import select
import socket
import struct
import termios
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Union

EPOLL_CTL_ADD = 1
EFD_SEMAPHORE = 1
F_SETPIPE_SZ, F_GETPIPE_SZ = 1031, 1032
# Limit on the content of a pipe, in bytes, which is inspected without consuming it.
_MAX_CONTENT_BYTES = 1024 * 1024
SPLICE_F_NONBLOCK = 2
# Limit on the unread data of one socket. A socket with more is not recreated.
_MAX_WAITING_BYTES = 1024 * 1024
SO_PEEK_OFF = 42
_MAX_PAIRS = 4096
_SECOND = 1_000_000_000

_library = ctypes.CDLL(None, use_errno=True)


class EventCounter(NamedTuple):
    """An event counter. Duplicates have the same `identity`."""

    identity: int
    count: int
    is_semaphore: bool
    flags: int


class Pipe(NamedTuple):
    """A pipe: its content, its capacity, and the descriptors that refer to it, with flags."""

    content: bytes
    size: int
    ends: tuple[tuple[int, int], ...]


class Epoll(NamedTuple):
    """An epoll: the descriptors that it watches, with events and data."""

    watched: tuple[tuple[int, int, int], ...]
    flags: int


class SocketEnd(NamedTuple):
    """One of two sockets: the descriptors that refer to it, with flags, and its unread data."""

    ends: tuple[tuple[int, int], ...]
    unread: tuple[bytes, ...]
    # The other side has shut down writing.
    is_shut_down: bool


class SocketPair(NamedTuple):
    """Two sockets that are connected to each other."""

    kind: int
    sides: tuple[SocketEnd, SocketEnd]


class TimerDescriptor(NamedTuple):
    """A timer: its clock, and the remaining time and the interval in nanoseconds."""

    clock: int
    left: int
    interval: int
    flags: int


Private = Union[EventCounter, Pipe, Epoll, SocketPair, TimerDescriptor]

# For each socket of a pair that this process has created, the inode of the other one.
_tracked_pairs: dict[int, int] = {}


def track_socket_pairs() -> None:
    """Records pairs of sockets from now on. To be called only once."""
    original = socket.socketpair

    @functools.wraps(original)
    def socketpair(*arguments: Any, **options: Any) -> tuple[socket.socket, socket.socket]:
        one, other = original(*arguments, **options)
        if one.family == socket.AF_UNIX and len(_tracked_pairs) < 2 * _MAX_PAIRS:
            first, second = (os.fstat(each.fileno()).st_ino for each in (one, other))
            _tracked_pairs[first], _tracked_pairs[second] = second, first
        return one, other

    socket.socketpair = socketpair


def describe(number: int, name: str) -> Private | None:
    """Describes an event counter, a timer or an epoll. Returns None for anything else."""
    if name not in ("eventfd", "eventpoll", "timerfd"):
        return None
    facts: dict[str, str] = {}
    watched = []
    with open(f"/proc/self/fdinfo/{number}", "rb", 0) as file:
        for line in file.read().decode("ascii", "replace").splitlines():
            key, _, value = line.partition(":")
            if key == "tfd":
                words = value.split()
                watched.append((int(words[0]), int(words[2], 16), int(words[4], 16)))
            else:
                facts[key] = value.strip()
    flags = int(facts.get("flags", "0"), 8)
    if name == "eventpoll":
        return Epoll(tuple(watched), flags)
    try:
        if name == "timerfd":
            left, interval = (_nanoseconds(facts[key]) for key in ("it_value", "it_interval"))
            # A timer that has expired and was not read yet expires again at once.
            return TimerDescriptor(
                int(facts["clockid"]), 1 if int(facts["ticks"]) else left, interval, flags
            )
        is_semaphore = facts.get("eventfd-semaphore", "0") != "0"
        count = int(facts["eventfd-count"], 16)
        return EventCounter(int(facts["eventfd-id"]), count, is_semaphore, flags)
    except (KeyError, ValueError):
        return None


def describe_pairs(pairs: Iterable[tuple[int, int]]) -> dict[int, Private]:
    """Describes pairs that are known by the numbers of their sockets."""
    found: dict[int, Private] = {}
    for numbers in pairs:
        found.update(_describe_pair([[number] for number in numbers]))
    return found


def describe_tracked_pairs(sockets: Iterable[tuple[int, int]]) -> dict[int, Private]:
    """Describes the pairs of which both sockets are among these, given by number and inode.

    Only for a process without children.
    """
    numbers: dict[int, list[int]] = {}
    for number, inode in sockets:
        numbers.setdefault(inode, []).append(number)
    gone = [inode for inode, other in _tracked_pairs.items() if not {inode, other} & numbers.keys()]
    for inode in gone:
        del _tracked_pairs[inode]
    found: dict[int, Private] = {}
    for inode, other in _tracked_pairs.items():
        if inode < other and inode in numbers and other in numbers:
            found.update(_describe_pair([numbers[inode], numbers[other]]))
    return found


def _describe_pair(numbers: list[list[int]]) -> dict[int, Private]:
    sides = []
    kind = 0
    for each in numbers:
        view = socket.socket(fileno=each[0])
        try:
            kind = view.type
            unread = _unread(view)
        finally:
            view.detach()
        if unread is None:
            return {}
        ends = tuple((number, _flags(number)) for number in each)
        sides.append(SocketEnd(ends, unread, _is_shut_down(each[0])))
    pair = SocketPair(kind, (sides[0], sides[1]))
    return {number: pair for each in numbers for number in each}


def describe_pipes(ends: Iterable[tuple[int, tuple[int, int]]]) -> dict[int, Private]:
    """Describes the ends whose other end is among them, in a process without children."""
    by_pipe: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for number, identity in ends:
        by_pipe.setdefault(identity, []).append((number, _flags(number)))
    found: dict[int, Private] = {}
    for identity, members in by_pipe.items():
        reading = [number for number, flags in members if flags & os.O_ACCMODE == os.O_RDONLY]
        if not reading or len(reading) == len(members):
            continue
        content = _content(reading[0])
        if content is None:
            continue
        pipe = Pipe(content, fcntl.fcntl(reading[0], F_GETPIPE_SZ), tuple(members))
        found.update((number, pipe) for number, _ in members)
    return found


class Restorer:
    """Recreates descriptors, together with all descriptors that belong to the same object.

    No number from `free` on is in use.
    """

    def __init__(self, free: int) -> None:
        self._free = free
        self._counters: dict[int, int] = {}
        self._made: set[int] = set()

    def restore(self, number: int, what: Private) -> None:
        """Recreates it under its number. Raises OSError if that fails."""
        if number in self._made:
            return
        if isinstance(what, EventCounter):
            self._make_counter(number, what)
        elif isinstance(what, Pipe):
            self._make_pipe(what)
            self._made.update(end[0] for end in what.ends)
        elif isinstance(what, SocketPair):
            self._make_pair(what)
            self._made.update(number for side in what.sides for number, _ in side.ends)
        elif isinstance(what, TimerDescriptor):
            _make_timer(number, what)
        else:
            _make_epoll(number, what)

    def _make_counter(self, number: int, counter: EventCounter) -> None:
        first = self._counters.get(counter.identity)
        if first is None:
            flags = counter.flags & os.O_NONBLOCK | (EFD_SEMAPHORE if counter.is_semaphore else 0)
            made = _checked(_library.eventfd(0, flags))
            if counter.count:
                os.write(made, struct.pack("=Q", counter.count))
            _move(made, number, counter.flags)
            self._counters[counter.identity] = number
        else:
            os.dup2(first, number, inheritable=not counter.flags & os.O_CLOEXEC)

    def _make_pipe(self, pipe: Pipe) -> None:
        with self._at_free_numbers(os.pipe()) as (reading, writing):
            if fcntl.fcntl(writing, F_GETPIPE_SZ) != pipe.size:
                with contextlib.suppress(OSError):  # A user who has many pipes gets smaller ones.
                    fcntl.fcntl(writing, F_SETPIPE_SZ, pipe.size)
            if len(pipe.content) > fcntl.fcntl(writing, F_GETPIPE_SZ):
                raise OSError("the new pipe is too small for the content")
            if pipe.content:
                os.write(writing, pipe.content)
            for number, flags in pipe.ends:
                end = reading if flags & os.O_ACCMODE == os.O_RDONLY else writing
                fcntl.fcntl(end, fcntl.F_SETFL, flags & (os.O_NONBLOCK | os.O_DIRECT))
                os.dup2(end, number, inheritable=not flags & os.O_CLOEXEC)

    def _make_pair(self, pair: SocketPair) -> None:
        one, other = socket.socketpair(socket.AF_UNIX, pair.kind)
        with self._at_free_numbers((one.detach(), other.detach())) as made:
            for side, mine, theirs in zip(pair.sides, made, made[::-1]):
                writing = socket.socket(fileno=theirs)
                try:
                    for message in side.unread:
                        writing.send(message, socket.MSG_DONTWAIT)
                    if side.is_shut_down:
                        writing.shutdown(socket.SHUT_WR)
                finally:
                    writing.detach()
            for side, mine in zip(pair.sides, made):
                for number, flags in side.ends:
                    fcntl.fcntl(mine, fcntl.F_SETFL, flags & os.O_NONBLOCK)
                    os.dup2(mine, number, inheritable=not flags & os.O_CLOEXEC)

    @contextlib.contextmanager
    def _at_free_numbers(self, pair: tuple[int, int]) -> Iterator[tuple[int, int]]:
        """Moves two descriptors to free numbers for the block, and closes them at the end."""
        raised: list[int] = []
        try:
            for number in pair:
                raised.append(fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, self._free))
            for number in pair:
                os.close(number)
            pair = (raised[0], raised[1])
            raised.clear()
            yield pair
        finally:
            for number in (*pair, *raised):
                os.close(number)


def _unread(view: socket.socket) -> tuple[bytes, ...] | None:
    """Returns the unread data of a socket without consuming it. Returns None if it is too much."""
    messages: list[bytes] = []
    room = _MAX_WAITING_BYTES
    try:
        # Each peek begins where the last one ended.
        view.setsockopt(socket.SOL_SOCKET, SO_PEEK_OFF, 0)
    except OSError:
        return None
    try:
        while room > 0:
            message = view.recv(room, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            if not message:
                return tuple(messages)
            messages.append(message)
            room -= len(message)
        return None
    except OSError:
        return tuple(messages)
    finally:
        view.setsockopt(socket.SOL_SOCKET, SO_PEEK_OFF, -1)


def _is_shut_down(number: int) -> bool:
    poll = select.poll()
    poll.register(number, select.POLLRDHUP)
    return any(events & select.POLLRDHUP for _, events in poll.poll(0))


def _nanoseconds(text: str) -> int:
    """Parses `(1, 500000000)`: seconds and nanoseconds."""
    seconds, _, rest = text.strip("()").partition(",")
    return int(seconds) * _SECOND + int(rest)


def _make_timer(number: int, timer: TimerDescriptor) -> None:
    made = _checked(_library.timerfd_create(timer.clock, timer.flags & os.O_NONBLOCK))
    parts = (*divmod(timer.interval, _SECOND), *divmod(timer.left, _SECOND))
    times = (ctypes.c_long * 4)(*parts)
    if timer.left:
        _checked(_library.timerfd_settime(made, 0, times, None))
    _move(made, number, timer.flags)


def _flags(number: int) -> int:
    is_closed = fcntl.fcntl(number, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    return fcntl.fcntl(number, fcntl.F_GETFL) | (os.O_CLOEXEC if is_closed else 0)


class _Event(ctypes.Structure):
    _pack_ = 1 if os.uname().machine == "x86_64" else 0
    _fields_ = (("events", ctypes.c_uint32), ("data", ctypes.c_uint64))


def _make_epoll(number: int, poll: Epoll) -> None:
    made = _checked(_library.epoll_create1(0))
    for watched, events, data in poll.watched:
        # A descriptor that could not be restored is not watched: it never has events.
        _library.epoll_ctl(made, EPOLL_CTL_ADD, watched, ctypes.byref(_Event(events, data)))
    _move(made, number, poll.flags)


def _move(made: int, number: int, flags: int) -> None:
    keeps = not flags & os.O_CLOEXEC
    if made == number:
        os.set_inheritable(number, keeps)
    else:
        os.dup2(made, number, inheritable=keeps)
        os.close(made)


def _checked(result: int) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result


def _content(reading: int) -> bytes | None:
    """Returns the content of a pipe without consuming it. Returns None if that is impossible."""
    unread = int(struct.unpack("i", fcntl.ioctl(reading, termios.FIONREAD, bytes(4)))[0])
    if not unread:
        return b""
    if unread > _MAX_CONTENT_BYTES:
        return None
    out, into = os.pipe()
    try:
        fcntl.fcntl(into, F_SETPIPE_SZ, max(unread, 65536))
        copied = _library.tee(reading, into, ctypes.c_size_t(unread), SPLICE_F_NONBLOCK)
        if copied != unread:
            return None
        parts = []
        while unread:
            parts.append(os.read(out, unread))
            unread -= len(parts[-1])
        return b"".join(parts)
    except OSError:
        return None
    finally:
        os.close(out)
        os.close(into)
