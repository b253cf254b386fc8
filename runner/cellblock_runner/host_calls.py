"""Host calls: requests that code in a running cell sends to the host, and their answers.

    ask("install", requirements=["polars"])  →  frame `ask`  →  host  →  frame `answer`  →  returned
    await ask_async("call_tool", …)          →  the same, while tasks of the event loop continue

While a cell runs, the host sends nothing but answers, so a thread that waits for one may read the
channel. If several threads wait, one of them reads for all and stores each answer with its request;
once it has its own, another thread continues reading. While no thread waits, the event loops whose
tasks wait watch the channel, and the first loop that is notified reads for all.

 1. The lock guards the list of requests (`_pending`) and the reading. Interrupts are held back
    while it is held, so that none leaves it locked.
 2. Waiting happens outside the lock and takes nothing from the channel. Frames that have arrived
    are read inside the lock, and only on behalf of a request that is still on the list. The end of
    the cell empties the list, so a thread that outlives its cell never takes a request that is
    meant for the runner.
 3. An interrupt occurs only while waiting. The request is then removed from the list, and its
    answer, if it arrives, is skipped. The host is notified that the request is withdrawn.
 4. A waiting thread always reads instead of event loops, because it may be the thread whose loop is
    blocked meanwhile. When it is done, it wakes the tasks, and their loops watch again.

Not usable from signal handlers: one may interrupt a thread that holds the lock.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from .channel import Channel
from .frames import MAX_FRAME_BYTES, Header, encode_header
from .interrupts import Gate
from .streams import OutputStreams

if TYPE_CHECKING:
    import asyncio  # Not needed in a session that never awaits.

# Leaves room for the parts of a frame besides its header.
_MAX_CALL_BYTES = MAX_FRAME_BYTES - 1024
# A thread whose cell has ended notices within this many milliseconds.
_END_CHECK_INTERVAL = 1000
# Polling interval, in milliseconds, of a thread that reads other descriptors while another thread
# reads the channel.
_POLL_INTERVAL = 20

# The host calls of the session that this process serves.
_active: HostCalls | None = None


class HostCallError(RuntimeError):
    """The host cannot be reached from here."""


def ask(what: str, **members: Any) -> Header:
    """Sends a request to the host and waits for its answer. Returns the members of the `answer`
    frame; their meaning depends on `what`.

    May be called by any thread while a cell runs. Raises HostCallError if the host cannot answer,
    and KeyboardInterrupt, in the main thread, if the cell is interrupted.
    """
    if _active is None:
        raise HostCallError("the host cannot be reached from here")
    return _active.ask(what, members)


async def ask_async(what: str, **members: Any) -> Header:
    """Like `ask`, but other tasks of the running event loop continue. Cancelling it withdraws the
    request.
    """
    if _active is None:
        raise HostCallError("the host cannot be reached from here")
    return await _active.ask_async(what, members)


def ask_for_command(members: dict[str, Any], pipes: OutputPipes) -> Header:
    """Asks the host to run a command that writes to `pipes.write_ends`. Output of the command is
    read while the caller waits.
    """
    if _active is None:
        raise HostCallError("the host cannot be reached from here")
    return _active.ask_for_command(members, pipes)


def write_ends() -> tuple[int | None, int | None]:
    """Returns write ends of the pipes for a command. An entry is None where the standard descriptor
    does not lead to its pipe.
    """
    return (None, None) if _active is None else _active.write_ends()


class OutputPipes(Protocol):
    """Input that a caller reads while it waits."""

    @property
    def write_ends(self) -> Sequence[int]: ...

    def close_sent(self) -> None: ...

    def descriptors(self) -> Sequence[int]: ...

    def wait(self, milliseconds: int) -> None: ...

    def take(self) -> None: ...


class _PendingCall:
    """A pending request of a thread. `wake` is locked while the thread waits for another one to
    read.
    """

    def __init__(self) -> None:
        self.number = 0
        self.answer: Header | None = None
        self.wake = threading.Lock()
        self.wake.acquire()

    def notify(self) -> None:
        """Makes the thread check again. The caller must hold `HostCalls._lock`."""
        if self.wake.locked():
            self.wake.release()


class _AwaitedCall(_PendingCall):
    """A pending request of a task of an event loop."""

    def __init__(self, host_calls: HostCalls, loop: asyncio.AbstractEventLoop) -> None:
        self.number = 0
        self.answer: Header | None = None
        self.loop = loop
        self.ready: asyncio.Future[None] = loop.create_future()
        self._host_calls = host_calls

    def notify(self) -> None:
        try:
            self.loop.call_soon_threadsafe(self._host_calls.check, self)
        except RuntimeError:
            pass  # The loop is closed, so no task waits.


class HostCalls:
    """The pending requests of one session."""

    def __init__(self, gate: Gate, streams: OutputStreams, channel: Channel) -> None:
        self._gate = gate
        self._streams = streams
        self._channel = channel
        self._last = 0
        self.reset()

    def reset(self) -> None:
        """Resets the state in a copy of the session, where threads that waited or held the lock are
        missing.
        """
        self._lock = threading.Lock()
        self._execution: Any = None
        self._is_open = False
        self._pending: dict[int, _PendingCall] = {}
        self._reader: _PendingCall | None = None
        self._failure = ""
        # The event loops that watch the channel.
        self._watching: set[asyncio.AbstractEventLoop] = set()

    def activate(self) -> None:
        """Makes `ask` use these."""
        global _active
        _active = self

    def open_cell(self, execution: Any) -> None:
        self._execution = execution
        self._is_open = True
        self._failure = "the cell ended before the host had answered"

    def close_cell(self) -> None:
        """Ends the pending requests of the cell. From now on only the runner itself reads the
        channel.
        """
        with self._lock:
            self._is_open = False
            calls, self._pending, self._reader = self._pending, {}, None
            for call in calls.values():
                call.notify()
            for loop in list(self._watching):
                # A copy of the session made between two cells must find a loop that waits for
                # nothing.
                self._watching.discard(loop)
                try:
                    if loop.is_running():  # In a thread of its own.
                        loop.call_soon_threadsafe(loop.remove_reader, self._channel.fileno())
                    else:
                        loop.remove_reader(self._channel.fileno())
                except RuntimeError:
                    pass  # It is closed, and watches nothing.

    def ask(self, what: str, members: dict[str, Any]) -> Header:
        self._refuse_in_fork()
        with self._gate.held():
            call = _PendingCall()
            self._submit(call, what, members)
            try:
                while call.answer is None:
                    self._wait(call)
            finally:
                self._remove(call)
        return call.answer

    def ask_for_command(self, members: dict[str, Any], pipes: OutputPipes) -> Header:
        self._refuse_in_fork()
        with self._gate.held():
            # Earlier output must precede the output of the command, and the next cell must get
            # pipes that the command does not have.
            self._streams.before_spawn()
            call = _PendingCall()
            self._submit(call, "shell", members, pipes.write_ends)
            pipes.close_sent()
            try:
                while call.answer is None:
                    self._wait(call, pipes)
                    pipes.take()
            finally:
                self._remove(call)
        return call.answer

    def write_ends(self) -> tuple[int | None, int | None]:
        return self._streams.write_ends()

    async def ask_async(self, what: str, members: dict[str, Any]) -> Header:
        import asyncio

        self._refuse_in_fork()
        call = _AwaitedCall(self, asyncio.get_running_loop())
        try:
            with self._gate.held():
                self._submit(call, what, members)
                self._watch(call)
            await call.ready
        finally:
            with self._gate.held():
                self._remove(call)
                self._stop_watching(call.loop)
        if call.answer is None:
            raise HostCallError(self._failure)
        return call.answer

    def check(self, call: _AwaitedCall) -> None:
        """Makes a task check its request again. Called by its own event loop."""
        with self._gate.held():
            with self._lock:
                is_settled = call.answer is not None or call.number not in self._pending
            if not is_settled:
                self._watch(call)
            elif not call.ready.done():
                call.ready.set_result(None)

    def _refuse_in_fork(self) -> None:
        if self._streams.forked:
            raise HostCallError(
                "a process that the session has forked cannot ask the host;"
                " do this in the session itself"
            )

    # Everything below runs with interrupts held back, except for the waiting.

    def _submit(
        self,
        call: _PendingCall,
        what: str,
        members: dict[str, Any],
        descriptors: Sequence[int] = (),
    ) -> None:
        with self._lock:
            if not self._is_open:
                raise HostCallError("the host can be asked only while a cell runs")
            self._last += 1
            own = {"type": "ask", "id": self._execution, "ask": self._last, "what": what}
            header = {**own, **members, **own}
            # Checked before the frame gets its sequence number: a frame that is announced and never
            # sent would stall the host.
            if len(encode_header(header)) > _MAX_CALL_BYTES:
                raise HostCallError("the call is too large")
            # A caller that sends many requests must take answers meanwhile. Otherwise both sides
            # could block on sending.
            while self._pending and not self._channel.wait_to_send():
                self._receive()
            call.number = self._last
            self._pending[self._last] = call
            self._streams.send(header, descriptors=descriptors)

    def _remove(self, call: _PendingCall) -> None:
        with self._lock:
            was_waiting = self._pending.pop(call.number, None) is not None and call.answer is None
            if was_waiting and self._is_open:
                self._withdraw(call)
            if self._reader is call:
                self._reader = None
                for other in self._pending.values():
                    other.notify()

    def _withdraw(self, call: _PendingCall) -> None:
        """Notifies the host that a request is withdrawn. The notice is an ordinary request, so that
        every host accepts it; its answer is ignored.
        """
        self._last += 1
        header = {
            "type": "ask",
            "id": self._execution,
            "ask": self._last,
            "what": "withdraw",
            "of": call.number,
        }
        try:
            self._streams.send(header)
        except OSError:
            pass  # The host is gone, so there is nothing to withdraw.

    def _watch(self, call: _AwaitedCall) -> None:
        """Makes the request's event loop watch the channel, unless a thread reads it."""
        with self._lock:
            if self._reader is None and call.loop not in self._watching:
                self._watching.add(call.loop)
                call.loop.add_reader(self._channel.fileno(), self._on_readable, call.loop)

    def _stop_watching(self, loop: asyncio.AbstractEventLoop) -> None:
        """Stops watching when no task of the loop waits any more. Called by the loop itself."""
        with self._lock:
            others = any(
                isinstance(each, _AwaitedCall) and each.loop is loop
                for each in self._pending.values()
            )
            if not others and loop in self._watching:
                self._watching.discard(loop)
                loop.remove_reader(self._channel.fileno())

    def _on_readable(self, loop: asyncio.AbstractEventLoop) -> None:
        """Called by an event loop when the channel is readable."""
        with self._gate.held(), self._lock:
            if self._reader is not None or not self._pending:
                # A thread reads, and wakes us when it is done; or the cell has ended, and the
                # arriving frames are for the runner.
                self._watching.discard(loop)
                loop.remove_reader(self._channel.fileno())
            else:
                self._receive()

    def _wait(self, call: _PendingCall, pipes: OutputPipes | None = None) -> None:
        """Waits until the state of this request may have changed, or there is something to read
        meanwhile.
        """
        if self._reads(call):
            with self._gate.passing():
                self._channel.wait(_END_CHECK_INTERVAL, pipes.descriptors() if pipes else ())
            self._read(call)
        elif pipes is not None and pipes.descriptors():
            with self._gate.passing():
                pipes.wait(_POLL_INTERVAL)
            call.wake.acquire(blocking=False)
        else:
            with self._gate.passing():
                call.wake.acquire()

    def _reads(self, call: _PendingCall) -> bool:
        """Reports whether this request's thread is the reader, or becomes it now."""
        with self._lock:
            if call.answer is not None:
                return False
            if call.number not in self._pending:
                raise HostCallError(self._failure)
            if self._reader is None:
                self._reader = call
            return self._reader is call

    def _read(self, reader: _PendingCall) -> None:
        """Reads the frames that have arrived, if this thread is still the reader."""
        with self._lock:
            if self._reader is reader:
                self._receive()

    def _receive(self) -> None:
        """Assigns each answer that has arrived to its request. The caller must hold the lock."""
        frames = self._channel.receive_arrived()
        if frames is None:
            self._failure = "the host has gone away"
            calls, self._pending = self._pending, {}
            for call in calls.values():
                call.notify()
            return
        for header, payload in frames:
            if header["type"] != "answer":
                self._channel.put_back(header, payload)
                continue
            number = header.get("ask")
            found = self._pending.get(number) if isinstance(number, int) else None
            if found is not None:
                found.answer = header
                found.notify()
