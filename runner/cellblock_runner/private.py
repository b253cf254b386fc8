"""Private: descriptors that no other process has, and that a copy can therefore make anew.

    event counters    with the same count
    pipes             with what is in them, if both ends are in this process and it has no children
    pairs of sockets  of which somebody knows that they are one, with what is in them
    epolls            with what they watch, once everything else is in its place

Threads of libraries wake each other with these.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import socket
import struct
import termios
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Union

_EPOLL_ADD = 1
_SEMAPHORE = 1
_SET_SIZE, _GET_SIZE = 1031, 1032
# What is in a pipe is looked at without taking it out, up to so many bytes.
_LARGEST_CONTENT = 1024 * 1024
_NO_WAITING = 2
# A loop that was woken has a byte for each time.
_LARGEST_WAKING = 65536

_library = ctypes.CDLL(None, use_errno=True)


class Counter(NamedTuple):
    """An event counter. Duplicates have the same `identity`."""

    identity: int
    count: int
    is_semaphore: bool
    flags: int


class Pipe(NamedTuple):
    """A pipe: what is in it, how much it holds, and the descriptors that lead to it, with flags."""

    content: bytes
    size: int
    ends: tuple[tuple[int, int], ...]


class Poll(NamedTuple):
    """An epoll: numbers that it watches, with events and data."""

    watched: tuple[tuple[int, int, int], ...]
    flags: int


class Pair(NamedTuple):
    """Two sockets that are connected with each other: number, flags, what waits to be read."""

    sockets: tuple[tuple[int, int, bytes], tuple[int, int, bytes]]


Private = Union[Counter, Pipe, Poll, Pair]


def look(number: int, name: str) -> Private | None:
    """Describes an event counter or an epoll; None for anything else."""
    if name not in ("eventfd", "eventpoll"):
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
        return Poll(tuple(watched), flags)
    try:
        is_semaphore = facts.get("eventfd-semaphore", "0") != "0"
        count = int(facts["eventfd-count"], 16)
        return Counter(int(facts["eventfd-id"]), count, is_semaphore, flags)
    except (KeyError, ValueError):
        return None


def look_at_pairs(pairs: Iterable[tuple[int, int]]) -> dict[int, Private]:
    found: dict[int, Private] = {}
    for one, other in pairs:
        pair = Pair(((one, _flags(one), _waiting(one)), (other, _flags(other), _waiting(other))))
        found[one] = found[other] = pair
    return found


def look_at_pipes(ends: Iterable[tuple[int, tuple[int, int]]]) -> dict[int, Private]:
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
        pipe = Pipe(content, fcntl.fcntl(reading[0], _GET_SIZE), tuple(members))
        found.update((number, pipe) for number, _ in members)
    return found


class Maker:
    """Makes descriptors anew, with everything that belongs together.

    All numbers from `free` on are in nobody's place.
    """

    def __init__(self, free: int) -> None:
        self._free = free
        self._counters: dict[int, int] = {}
        self._made: set[int] = set()

    def make(self, number: int, what: Private) -> None:
        """Puts it in its place. Raises OSError when it cannot be made."""
        if number in self._made:
            return
        if isinstance(what, Counter):
            self._make_counter(number, what)
        elif isinstance(what, Pipe):
            self._make_pipe(what)
            self._made.update(end[0] for end in what.ends)
        elif isinstance(what, Pair):
            self._make_pair(what)
            self._made.update(each[0] for each in what.sockets)
        else:
            _make_poll(number, what)

    def _make_counter(self, number: int, counter: Counter) -> None:
        first = self._counters.get(counter.identity)
        if first is None:
            flags = counter.flags & os.O_NONBLOCK | (_SEMAPHORE if counter.is_semaphore else 0)
            made = _checked(_library.eventfd(0, flags))
            if counter.count:
                os.write(made, struct.pack("=Q", counter.count))
            _move(made, number, counter.flags)
            self._counters[counter.identity] = number
        else:
            os.dup2(first, number, inheritable=not counter.flags & os.O_CLOEXEC)

    def _make_pipe(self, pipe: Pipe) -> None:
        with self._high(os.pipe()) as (reading, writing):
            if fcntl.fcntl(writing, _GET_SIZE) != pipe.size:
                with contextlib.suppress(OSError):  # A user who has many pipes gets smaller ones.
                    fcntl.fcntl(writing, _SET_SIZE, pipe.size)
            if len(pipe.content) > fcntl.fcntl(writing, _GET_SIZE):
                raise OSError("it does not hold what was in it")
            if pipe.content:
                os.write(writing, pipe.content)
            for number, flags in pipe.ends:
                end = reading if flags & os.O_ACCMODE == os.O_RDONLY else writing
                fcntl.fcntl(end, fcntl.F_SETFL, flags & (os.O_NONBLOCK | os.O_DIRECT))
                os.dup2(end, number, inheritable=not flags & os.O_CLOEXEC)

    def _make_pair(self, pair: Pair) -> None:
        one, other = socket.socketpair()
        with self._high((one.detach(), other.detach())) as made:
            for (number, flags, content), mine, theirs in zip(pair.sockets, made, made[::-1]):
                if content:
                    os.write(theirs, content)
                fcntl.fcntl(mine, fcntl.F_SETFL, flags & os.O_NONBLOCK)
                os.dup2(mine, number, inheritable=not flags & os.O_CLOEXEC)

    @contextlib.contextmanager
    def _high(self, pair: tuple[int, int]) -> Iterator[tuple[int, int]]:
        """Gives two descriptors numbers that are free, and closes them in the end."""
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


def _waiting(number: int) -> bytes:
    """Returns what waits to be read from a socket, and stays there."""
    view = socket.socket(fileno=number)
    try:
        return view.recv(_LARGEST_WAKING, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except OSError:
        return b""
    finally:
        view.detach()


def _flags(number: int) -> int:
    is_closed = fcntl.fcntl(number, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    return fcntl.fcntl(number, fcntl.F_GETFL) | (os.O_CLOEXEC if is_closed else 0)


class _Event(ctypes.Structure):
    _pack_ = 1 if os.uname().machine == "x86_64" else 0
    _fields_ = (("events", ctypes.c_uint32), ("data", ctypes.c_uint64))


def _make_poll(number: int, poll: Poll) -> None:
    made = _checked(_library.epoll_create1(0))
    for watched, events, data in poll.watched:
        # One that could not be brought back is not watched: it never has anything to tell.
        _library.epoll_ctl(made, _EPOLL_ADD, watched, ctypes.byref(_Event(events, data)))
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
    """Returns what is in a pipe, which stays there; None when it cannot be looked at."""
    waiting = int(struct.unpack("i", fcntl.ioctl(reading, termios.FIONREAD, bytes(4)))[0])
    if not waiting:
        return b""
    if waiting > _LARGEST_CONTENT:
        return None
    out, into = os.pipe()
    try:
        fcntl.fcntl(into, _SET_SIZE, max(waiting, 65536))
        copied = _library.tee(reading, into, ctypes.c_size_t(waiting), _NO_WAITING)
        if copied != waiting:
            return None
        parts = []
        while waiting:
            parts.append(os.read(out, waiting))
            waiting -= len(parts[-1])
        return b"".join(parts)
    except OSError:
        return None
    finally:
        os.close(out)
        os.close(into)
