"""Asking: a question that code in a running cell puts to the host, and its answer.

    ask("install", requirements=["polars"])   →  frame `ask`  →  host  →  frame `answer`  →  returned
    await ask_async("call_tool", …)           →  the same, while the tasks of the event loop go on

While a cell runs, the host sends nothing but answers, so whoever waits for one may read the channel. Of several threads that wait, one
reads for all and leaves each answer where its asker finds it; when it has its own, another one reads on. While no thread waits, the event
loops in which tasks wait watch the channel, and whichever notices something reads for all.

 1. The lock guards the list of questions and the reading. Whoever holds it has interrupts held back, so that none leaves it locked.
 2. Waiting happens outside the lock and takes nothing from the channel. What has arrived is read inside the lock, and only on behalf of a
    question that is still on the list. The end of the cell empties the list, so a thread that outlives its cell never takes a
    request that is meant for the runner.
 3. An interrupt strikes only while waiting. The question is then taken off the list, and its answer, when it comes, is skipped. The host is told
    that nobody waits for it any more.
 4. A thread that waits always reads in place of event loops, because it may be the thread whose loop stands still meanwhile. When it is done it
    rouses the tasks, and their loops watch again.

Not for signal handlers: one may strike a thread that holds the lock.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from .channel import Channel
from .frames import LARGEST_FRAME, Header, encode_header
from .interrupts import Gate
from .lanes import Lanes

if TYPE_CHECKING:
    import asyncio  # A session that awaits nothing does without it.

# Leaves room for what a frame has besides its header.
_LARGEST_QUESTION = LARGEST_FRAME - 1024
# A thread whose cell has ended notices within so many milliseconds.
_LOOK_UP = 1000
# One that reads something else while another thread reads the channel looks so often whether its answer is there.
_GLANCE = 20

# The desk of the session that this process serves.
_active: Desk | None = None


class CannotAsk(RuntimeError):
    """There is no way to the host from here."""


def ask(what: str, **members: Any) -> Header:
    """Asks the host and waits for its answer. Returns the members of the `answer` frame; what they mean depends on `what`.

    May be called by any thread while a cell runs. Raises CannotAsk when nobody can answer, and KeyboardInterrupt, in the main thread,
    when the cell is interrupted.
    """
    if _active is None:
        raise CannotAsk("there is no host that could be asked")
    return _active.ask(what, members)


async def ask_async(what: str, **members: Any) -> Header:
    """Does what `ask` does, and lets other tasks of the running event loop go on. Whoever cancels it withdraws the question."""
    if _active is None:
        raise CannotAsk("there is no host that could be asked")
    return await _active.ask_async(what, members)


def ask_for_command(members: dict[str, Any], meanwhile: Meanwhile) -> Header:
    """Asks the host to run a command that writes to `meanwhile.outlets`. What is to be read of it is read while the asker waits."""
    if _active is None:
        raise CannotAsk("there is no host that could be asked")
    return _active.ask_for_command(members, meanwhile)


def outlets() -> tuple[int | None, int | None]:
    """Returns ends of the lanes that a command can write to, each None where the standard descriptor does not lead to its lane."""
    return (None, None) if _active is None else _active.outlets()


class Meanwhile(Protocol):
    """What an asker reads while it waits."""

    @property
    def outlets(self) -> Sequence[int]: ...

    def hand_over(self) -> None: ...

    def descriptors(self) -> Sequence[int]: ...

    def wait(self, milliseconds: int) -> None: ...

    def take(self) -> None: ...


class _Question:
    """One question on the list, whose asker is a thread. `wake` is locked while it waits for somebody else to read."""

    def __init__(self) -> None:
        self.number = 0
        self.answer: Header | None = None
        self.wake = threading.Lock()
        self.wake.acquire()

    def rouse(self) -> None:
        """Lets the asker look again. For whoever holds the lock of the desk."""
        if self.wake.locked():
            self.wake.release()


class _AwaitedQuestion(_Question):
    """One question on the list, whose asker is a task of an event loop."""

    def __init__(self, desk: Desk, loop: asyncio.AbstractEventLoop) -> None:
        self.number = 0
        self.answer: Header | None = None
        self.loop = loop
        self.ready: asyncio.Future[None] = loop.create_future()
        self._desk = desk

    def rouse(self) -> None:
        try:
            self.loop.call_soon_threadsafe(self._desk.look, self)
        except RuntimeError:
            pass  # The loop is closed, and so nobody waits.


class Desk:
    """Where the questions of one session are put."""

    def __init__(self, gate: Gate, lanes: Lanes, channel: Channel) -> None:
        self._gate = gate
        self._lanes = lanes
        self._channel = channel
        self._last = 0
        self.renew()

    def renew(self) -> None:
        """Begins anew, in a copy of the session: threads that asked, or held the lock, did not come along."""
        self._lock = threading.Lock()
        self._execution: Any = None
        self._is_open = False
        self._questions: dict[int, _Question] = {}
        self._reader: _Question | None = None
        self._why_unanswered = ""
        # The event loops that watch the channel.
        self._watching: set[asyncio.AbstractEventLoop] = set()

    def activate(self) -> None:
        """Makes this the desk that `ask` finds."""
        global _active
        _active = self

    def open_cell(self, execution: Any) -> None:
        self._execution = execution
        self._is_open = True
        self._why_unanswered = "the cell ended before the host had answered"

    def close_cell(self) -> None:
        """Ends the questions of the cell. From now on nobody but the runner itself reads the channel."""
        with self._lock:
            self._is_open = False
            questions, self._questions, self._reader = self._questions, {}, None
            for question in questions.values():
                question.rouse()
            for loop in list(self._watching):
                # Whoever copies the session between two cells finds a loop that waits for nothing.
                self._watching.discard(loop)
                try:
                    if loop.is_running():  # In a thread of its own.
                        loop.call_soon_threadsafe(loop.remove_reader, self._channel.fileno())
                    else:
                        loop.remove_reader(self._channel.fileno())
                except RuntimeError:
                    pass  # It is closed, and watches nothing.

    def ask(self, what: str, members: dict[str, Any]) -> Header:
        self._refuse_forked()
        with self._gate.held():
            question = _Question()
            self._put(question, what, members)
            try:
                while question.answer is None:
                    self._wait(question)
            finally:
                self._take_off(question)
        return question.answer

    def ask_for_command(self, members: dict[str, Any], meanwhile: Meanwhile) -> Header:
        self._refuse_forked()
        with self._gate.held():
            # What was printed until now comes before what the command prints, and the next cell gets pipes that it does not have.
            self._lanes.before_spawn()
            question = _Question()
            self._put(question, "shell", members, meanwhile.outlets)
            meanwhile.hand_over()
            try:
                while question.answer is None:
                    self._wait(question, meanwhile)
                    meanwhile.take()
            finally:
                self._take_off(question)
        return question.answer

    def outlets(self) -> tuple[int | None, int | None]:
        return self._lanes.outlets()

    async def ask_async(self, what: str, members: dict[str, Any]) -> Header:
        import asyncio

        self._refuse_forked()
        question = _AwaitedQuestion(self, asyncio.get_running_loop())
        try:
            with self._gate.held():
                self._put(question, what, members)
                self._watch(question)
            await question.ready
        finally:
            with self._gate.held():
                self._take_off(question)
                self._stop_watching(question.loop)
        if question.answer is None:
            raise CannotAsk(self._why_unanswered)
        return question.answer

    def look(self, question: _AwaitedQuestion) -> None:
        """Lets a task look at its question again. For its own event loop."""
        with self._gate.held():
            with self._lock:
                is_settled = question.answer is not None or question.number not in self._questions
            if not is_settled:
                self._watch(question)
            elif not question.ready.done():
                question.ready.set_result(None)

    def _refuse_forked(self) -> None:
        if self._lanes.forked:
            raise CannotAsk("a process that the session has forked cannot ask the host; do this in the session itself")

    # Everything below happens with interrupts held back, but for the waiting.

    def _put(
        self, question: _Question, what: str, members: dict[str, Any], descriptors: Sequence[int] = ()
    ) -> None:
        with self._lock:
            if not self._is_open:
                raise CannotAsk("the host can be asked only while a cell runs")
            self._last += 1
            own = {"type": "ask", "id": self._execution, "ask": self._last, "what": what}
            header = {**own, **members, **own}
            # Before the frame gets its place in the order: one that is announced and does not come would stop the host.
            if len(encode_header(header)) > _LARGEST_QUESTION:
                raise CannotAsk("the question is too large")
            # Whoever puts many questions takes their answers meanwhile. A host that waits until it can answer must not be waited for.
            while self._questions and not self._channel.wait_to_send():
                self._receive()
            question.number = self._last
            self._questions[self._last] = question
            self._lanes.send(header, descriptors=descriptors)

    def _take_off(self, question: _Question) -> None:
        with self._lock:
            was_waiting = self._questions.pop(question.number, None) is not None and question.answer is None
            if was_waiting and self._is_open:
                self._withdraw(question)
            if self._reader is question:
                self._reader = None
                for other in self._questions.values():
                    other.rouse()

    def _withdraw(self, question: _Question) -> None:
        """Tells the host that nobody waits for an answer. That is a question too, so that every host can take it; nobody waits for its answer."""
        self._last += 1
        header = {"type": "ask", "id": self._execution, "ask": self._last, "what": "withdraw", "of": question.number}
        try:
            self._lanes.send(header)
        except OSError:
            pass  # The host has gone away, and knows.

    def _watch(self, question: _AwaitedQuestion) -> None:
        """Has the question's event loop notice what arrives, unless a thread reads."""
        with self._lock:
            if self._reader is None and question.loop not in self._watching:
                self._watching.add(question.loop)
                question.loop.add_reader(self._channel.fileno(), self._noticed, question.loop)

    def _stop_watching(self, loop: asyncio.AbstractEventLoop) -> None:
        """Ends it when no task of the loop waits any more. For the loop itself."""
        with self._lock:
            others = any(isinstance(each, _AwaitedQuestion) and each.loop is loop for each in self._questions.values())
            if not others and loop in self._watching:
                self._watching.discard(loop)
                loop.remove_reader(self._channel.fileno())

    def _noticed(self, loop: asyncio.AbstractEventLoop) -> None:
        """Something has arrived, and an event loop has noticed."""
        with self._gate.held(), self._lock:
            if self._reader is not None or not self._questions:
                # A thread reads, and rouses us when it is done; or the cell has ended, and what arrives is for the runner.
                self._watching.discard(loop)
                loop.remove_reader(self._channel.fileno())
            else:
                self._receive()

    def _wait(self, question: _Question, meanwhile: Meanwhile | None = None) -> None:
        """Waits until something may have changed for this question, or there is something to read meanwhile."""
        if self._reads(question):
            with self._gate.passing():
                self._channel.wait(_LOOK_UP, meanwhile.descriptors() if meanwhile else ())
            self._read(question)
        elif meanwhile is not None and meanwhile.descriptors():
            with self._gate.passing():
                meanwhile.wait(_GLANCE)
            question.wake.acquire(blocking=False)
        else:
            with self._gate.passing():
                question.wake.acquire()

    def _reads(self, question: _Question) -> bool:
        """Tells whether this question's asker is the one that reads, or becomes it now."""
        with self._lock:
            if question.answer is not None:
                return False
            if question.number not in self._questions:
                raise CannotAsk(self._why_unanswered)
            if self._reader is None:
                self._reader = question
            return self._reader is question

    def _read(self, reader: _Question) -> None:
        """Takes what has arrived, and gives each answer to its question."""
        with self._lock:
            if self._reader is reader:
                self._receive()

    def _receive(self) -> None:
        """Gives each answer that has arrived to its question. For whoever holds the lock."""
        frames = self._channel.receive_arrived()
        if frames is None:
            self._why_unanswered = "the host has gone away"
            questions, self._questions = self._questions, {}
            for question in questions.values():
                question.rouse()
            return
        for header, payload in frames:
            if header["type"] != "answer":
                self._channel.put_back(header, payload)
                continue
            number = header.get("ask")
            found = self._questions.get(number) if isinstance(number, int) else None
            if found is not None:
                found.answer = header
                found.rouse()
