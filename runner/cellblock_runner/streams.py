"""Streams: stdout, stderr and the channel, kept in order by sequence markers.

Python's text goes straight into two pipes, the same that C code and subprocesses use through
descriptors 1 and 2. So nothing is lost when the interpreter dies, and no collector thread is
needed. Markers define the order between the pipes and the frames on the channel (PROTOCOL.md,
"Order").

Rules for writers:

 1. While a cell runs, its main thread and the threads it started write into the cell.
 2. A thread that was alive when the cell started is late, unless it works in the context of this
    cell (asyncio.to_thread hands work, with its context, to threads of earlier cells).
 3. Output of late threads, and all output between cells, is kept within bounds and goes into the
    `done` of the next cell. It is not written to the pipes, which are not read then.
 4. A process that user code forked writes without markers, and has no channel.

The private descriptors have high numbers and are not inherited: user code may close or redirect 1
and 2.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import fcntl
import io
import os
import resource
import select
import sys
import threading
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from .channel import CHANNEL_DESCRIPTOR, Channel
from .frames import Header
from .interrupts import Gate

# Text without a newline is written at this size at the latest.
_BUFFER_SIZE = 8192
# Limit on late text, in characters: far more than one reply shows, far less than memory.
_MAX_LATE_BYTES = 65536
# Fixed numbers of the private write ends: high, because programs tend to choose low numbers
# themselves.
_PRIVATE_DESCRIPTORS = (CHANNEL_DESCRIPTOR + 1, CHANNEL_DESCRIPTOR + 2)

# Audit events before another process starts to share the pipes (or, for exec, replaces this one).
_SPAWNING = frozenset(
    ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "os.exec")
)

_cell: contextvars.ContextVar[int] = contextvars.ContextVar("cellblock_cell", default=0)

# The streams affected by audit events and forks. One process serves at most one session.
_active: OutputStreams | None = None
# True while the runner itself forks.
_is_own_fork = False


class LateText:
    """Text that belongs to no open cell. Drops the oldest first, and counts it."""

    def __init__(self, limit: int = _MAX_LATE_BYTES) -> None:
        self._limit = limit
        self._pieces: deque[str] = deque()
        self._size = 0
        self._omitted = 0

    def add(self, text: str) -> None:
        if not text:
            return
        kept = text[-self._limit :]
        self._pieces.append(kept)
        self._size += len(kept)
        self._omitted += len(text) - len(kept)
        while self._size > self._limit:
            oldest = self._pieces.popleft()
            excess = self._size - self._limit
            if len(oldest) > excess:
                self._pieces.appendleft(oldest[excess:])
            dropped = min(excess, len(oldest))
            self._size -= dropped
            self._omitted += dropped

    def take(self) -> Header | None:
        """Returns the `late` member of a `done` frame and resets the buffer. Returns None if there
        is no text.
        """
        if not self._pieces:
            return None
        text = "".join(self._pieces).encode("utf-8", "backslashreplace").decode()
        omitted = self._omitted
        self.clear()
        return {"text": text, "omitted": omitted}

    def clear(self) -> None:
        self._pieces.clear()
        self._size = self._omitted = 0


class OutputStreams:
    """The two pipes and the channel of one session, and the counter that orders them."""

    def __init__(
        self, gate: Gate, channel: Channel, marker: bytes, descriptors: tuple[int, int]
    ) -> None:
        """`descriptors` are the write ends for text. The streams own them."""
        self._gate = gate
        self._channel = channel
        self._marker_start = b"\x00\x1bCB" + marker
        self._descriptors = descriptors
        self._lock = threading.RLock()
        self._seq = 0
        self._last_used: OutStream | None = None
        self._cell_number = 0
        self._cell_is_open = False
        self._late: dict[int, threading.Thread] = {}
        self._late_text = LateText()
        self._spawned = False
        self.forked = False
        self.stdout = OutStream(self, 0, "<stdout>", eager=False)
        self.stderr = OutStream(self, 1, "<stderr>", eager=True)

    @property
    def descriptors(self) -> tuple[int, int]:
        """The private write ends."""
        return self._descriptors

    def activate(self) -> None:
        """Makes these the streams of the process, which audit events and forks affect."""
        global _active
        _active = self

    def open_cell(self, header: Header) -> None:
        """Starts a cell and sends `header` (`started`), with new pipes if the last cell left
        processes behind.
        """
        read_ends: tuple[int, ...] = ()
        if self is _active and (self._spawned or _has_children()):
            self._descriptors, read_ends = self._replace_pipes()
            self._spawned = False
        main = self._gate.main_thread
        self._late = {
            id(thread): thread for ident, thread in list(threading._active.items()) if ident != main
        }  # type: ignore[attr-defined]
        self._cell_number += 1
        _cell.set(self._cell_number)
        header["rotated"] = bool(read_ends)
        self.send(header, descriptors=read_ends)
        for descriptor in read_ends:
            os.close(descriptor)
        self._cell_is_open = True

    def close_cell(self) -> Header | None:
        """Ends the cell: all its text is in the pipes, and any text printed from now on is late.

        Returns the late text so far, in the form that `done` reports.
        """
        flush_c_stdout()
        held = self._enter()
        try:
            self._flush_text()
            self._cell_is_open = False
            return self._late_text.take()
        finally:
            self._leave(held)

    def send(self, header: Header, payload: bytes = b"", descriptors: Sequence[int] = ()) -> None:
        """Sends a frame in its place between the texts. Adds its `seq`."""
        held = self._enter()
        try:
            self._flush_text()
            self._mark(b"F")
            header["seq"] = self._seq
            self._channel.send(header, payload, descriptors)
        finally:
            self._leave(held)

    def accepts_output(self) -> bool:
        """Reports whether output of the calling thread now belongs to the open cell."""
        if not self._cell_is_open:
            return False
        if not self._late or threading.get_ident() == self._gate.main_thread:
            return True
        return id(threading.current_thread()) not in self._late or _cell.get() == self._cell_number

    def write(self, stream: OutStream, text: str) -> None:
        held = self._enter()
        try:
            if self._last_used is not stream:
                self._switch_to(stream)
            stream.pending.append(text)
            stream.pending_size += len(text)
            if stream.eager or not text or text[-1] == "\n" or stream.pending_size >= _BUFFER_SIZE:
                self._flush_text()
        finally:
            self._leave(held)

    def write_late(self, text: str) -> None:
        """Keeps text that does not belong to the open cell, or is printed between cells."""
        held = self._enter()
        try:
            self._late_text.add(text)
        finally:
            self._leave(held)

    def write_bytes(self, stream: OutStream, data: bytes) -> None:
        held = self._enter()
        try:
            if self._last_used is not stream:
                self._switch_to(stream)
            self._flush_text()
            self._put(stream, data)
        finally:
            self._leave(held)

    def flush(self) -> None:
        held = self._enter()
        try:
            self._flush_text()
        finally:
            self._leave(held)

    def write_ends(self) -> tuple[int | None, int | None]:
        """Returns our write ends of the pipes, for another process to write to. An entry is None
        where 1 or 2 has been redirected.
        """
        return _write_end(1, self._descriptors[0]), _write_end(2, self._descriptors[1])

    def before_spawn(self) -> None:
        """Flushes all earlier output, so that it precedes the output of the new process."""
        if self.forked:
            return
        flush_c_stdout()
        held = self._enter()
        try:
            self._flush_text()
            self._mark(b"P")
            self._spawned = True
        finally:
            self._leave(held)

    def become_child(self) -> None:
        """Called in a process that user code forked: it keeps its output, and loses the channel."""
        self.forked = True
        self._lock = threading.RLock()
        for stream in (self.stdout, self.stderr):
            stream.pending.clear()
            stream.pending_size = 0
        self._channel.close()

    def reset_in_copy(
        self, marker: bytes, descriptors: tuple[int, int], with_threads: bool = False
    ) -> None:
        """Called in a copy of the session: resets everything except the streams, which user code
        holds references to.
        """
        self._marker_start = b"\x00\x1bCB" + marker
        self._descriptors = descriptors
        if not with_threads:
            # A thread that is missing in the copy may have held the old lock.
            self._lock = threading.RLock()
        self._seq = 0
        self._last_used = None
        self._spawned = False
        self._late_text.clear()  # The original reports it.
        for stream in (self.stdout, self.stderr):
            stream.pending.clear()
            stream.pending_size = 0

    # Everything below runs inside the lock, with interrupts held back.

    def _enter(self) -> bool:
        # Interrupts first: once they are held back, none can occur between taking the lock and the
        # caller's `try`.
        held = threading.get_ident() == self._gate.main_thread
        if held:
            self._gate.hold()
        self._lock.acquire()
        return held

    def _leave(self, held: bool) -> None:
        self._lock.release()
        if held:
            self._gate.release()

    def _switch_to(self, stream: OutStream) -> None:
        if self._last_used is not None:
            self._flush_text()
            self._mark(b"P")
        self._last_used = stream

    def _flush_text(self) -> None:
        stream = self._last_used
        if stream is None or not stream.pending:
            return
        text = "".join(stream.pending)
        stream.pending.clear()
        stream.pending_size = 0
        if text:
            self._put(stream, text.encode("utf-8", "backslashreplace"))

    def _put(self, stream: OutStream, data: bytes) -> None:
        if self._spawned:
            # A child may have written to the other pipe meanwhile; the marker orders that before
            # this.
            self._mark(b"P")
            self._last_used = stream
        _write_all(self._descriptors[stream.index], data)

    def _mark(self, kind: bytes) -> None:
        self._last_used = None
        self._seq += 1
        marker = self._marker_start + self._seq.to_bytes(4, "big") + kind + b"\n"
        for descriptor in self._descriptors:
            _write_all(descriptor, marker)

    def _replace_pipes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        for descriptor in self._descriptors:
            os.close(descriptor)
        return make_pipes()


class OutStream(io.TextIOBase):
    """The sys.stdout and sys.stderr of user code."""

    encoding = "utf-8"
    errors = "backslashreplace"
    newlines = None
    mode = "w"
    line_buffering = True
    write_through = False

    def __init__(self, streams: OutputStreams, index: int, name: str, eager: bool) -> None:
        super().__init__()
        self._streams = streams
        self.index = index
        self.name = name
        self.eager = eager
        self.pending: list[str] = []
        self.pending_size = 0
        self.buffer = ByteStream(self, streams)

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        # A subclass of str may override any method.
        plain = text if type(text) is str else str.__str__(text)
        if self._streams.forked:
            _write_all(self.fileno(), plain.encode("utf-8", "backslashreplace"))
        elif self._streams.accepts_output():
            self._streams.write(self, plain)
        else:
            self._streams.write_late(plain)
        return len(text)

    def flush(self) -> None:
        if not self._streams.forked and self._streams.accepts_output():
            self._streams.flush()

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        return self.index + 1

    def reconfigure(self, **_options: Any) -> None:
        """Accepts the usual options of a text stream. The pipe always carries UTF-8."""
        self.flush()

    def close(self) -> None:
        """Flushes and stays open: the next cell prints here too."""
        self.flush()

    def __repr__(self) -> str:
        return f"<OutStream name={self.name!r} encoding='utf-8'>"


class ByteStream(io.BufferedIOBase):
    """The sys.stdout.buffer of user code: bytes, in order with the text."""

    mode = "wb"

    def __init__(self, text: OutStream, streams: OutputStreams) -> None:
        super().__init__()
        self._text = text
        self._streams = streams

    @property
    def name(self) -> str:
        return self._text.name

    @property
    def raw(self) -> ByteStream:  # type: ignore[override]
        return self

    def write(self, data: Any) -> int:
        taken = memoryview(data).tobytes()
        if self._streams.forked:
            _write_all(self.fileno(), taken)
        elif self._streams.accepts_output():
            self._streams.write_bytes(self._text, taken)
        else:
            self._streams.write_late(taken.decode("utf-8", "replace"))
        return len(taken)

    def flush(self) -> None:
        self._text.flush()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._text.fileno()

    def close(self) -> None:
        self.flush()


def make_pipes(redirected: Collection[int] = ()) -> tuple[tuple[int, int], tuple[int, int]]:
    """Puts new pipes under descriptors 1 and 2. Returns our private write ends and the read ends
    for the host.

    A descriptor that the user has redirected is left alone.
    """
    write_ends = []
    read_ends = []
    with _room_for(_PRIVATE_DESCRIPTORS):
        # A session with a thousand open files has no lower numbers left, and a new pipe must not
        # take the reserved numbers.
        nothing = os.open(os.devnull, os.O_RDWR)
        for private in _PRIVATE_DESCRIPTORS:
            if private != nothing:
                with contextlib.suppress(OSError):
                    os.dup2(nothing, private, inheritable=False)
        if nothing not in _PRIVATE_DESCRIPTORS:
            os.close(nothing)
        for standard, private in zip((1, 2), _PRIVATE_DESCRIPTORS):
            read_end, write_end = os.pipe()
            if standard not in redirected:
                os.dup2(write_end, standard, inheritable=True)
            write_ends.append(_put_at(write_end, private))
            os.close(write_end)
            read_ends.append(read_end)
    return (write_ends[0], write_ends[1]), (read_ends[0], read_ends[1])


@contextlib.contextmanager
def _room_for(numbers: Iterable[int]) -> Iterator[None]:
    """During the block, raises a limit that user code has set below these numbers, as far as
    permitted.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_low = soft != resource.RLIM_INFINITY and soft <= max(numbers)
    if is_low:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        yield
    finally:
        if is_low:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _put_at(descriptor: int, number: int) -> int:
    """Duplicates a descriptor to `number`, or to any number if the hard limit is too low. Returns
    the new number.
    """
    try:
        return os.dup2(descriptor, number, inheritable=False)
    except OSError:
        return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)


def watch_processes() -> None:
    """Installs the hooks that detect new processes. They cannot be removed, so this happens once,
    before any fork.
    """
    sys.addaudithook(_on_audit_event)
    os.register_at_fork(after_in_child=_after_fork)
    # Line buffering: C code writes whole lines into the pipe, in order with ours, and little stays
    # buffered.
    if _c_library is not None:
        _c_library.setvbuf(_c_stdout, None, 1, 0)  # _IOLBF is 1 in every C library on Linux.


@contextlib.contextmanager
def own_fork() -> Iterator[None]:
    """Marks a fork inside the block as the runner's own: nothing is written before it, and the copy
    keeps channel and order.
    """
    global _is_own_fork
    _is_own_fork = True
    try:
        yield
    finally:
        _is_own_fork = False


def _on_audit_event(event: str, _arguments: Iterable[Any]) -> None:
    if event in _SPAWNING and _active is not None and not _is_own_fork:
        _active.before_spawn()


def _after_fork() -> None:
    if _active is not None and not _is_own_fork:
        _active.become_child()


def flush_c_stdout() -> None:
    """Flushes the C library's buffer of stdout."""
    # Not all streams at once: a thread that waits for input holds the lock of its stream, and would
    # block us.
    if _c_library is not None:
        _c_library.fflush(_c_stdout)


def _find_c_stdout() -> tuple[ctypes.CDLL | None, ctypes.c_void_p | None]:
    try:
        library = ctypes.CDLL(None)
        return library, ctypes.c_void_p.in_dll(library, "stdout")
    except (OSError, ValueError):
        return None, None


_c_library, _c_stdout = _find_c_stdout()


def _write_end(standard: int, private: int) -> int | None:
    try:
        return private if os.path.sameopenfile(standard, private) else None
    except OSError:
        return None  # The user has closed it.


def _has_children() -> bool:
    """Reports whether any child exists, running or not yet reaped. C code may have created one
    without an audit event.
    """
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except OSError:
        return False
    return True


def _write_all(descriptor: int, data: bytes) -> None:
    """Writes all of `data`, or drops the rest once the pipe has no reader."""
    while data:
        try:
            written = os.write(descriptor, data)
        except BlockingIOError:
            # Another process has made the shared pipe non-blocking, which affects us too.
            poll = select.poll()
            poll.register(descriptor, select.POLLOUT)
            poll.poll()
            continue
        except OSError:
            return
        if written == len(data):
            return
        data = data[written:]
