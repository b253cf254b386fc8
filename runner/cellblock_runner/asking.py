"""Asking: a question that code in a running cell puts to the host, and its answer.

    ask("install", requirements=["polars"])   →  frame `ask`  →  host  →  frame `answer`  →  returned

While a cell runs, the host sends nothing but answers, so whoever waits for one may read the channel. Of several threads that wait, one
reads for all and leaves each answer where its asker finds it; when it has its own, another one reads on.

 1. The lock guards the list of questions and the reading. Whoever holds it has interrupts held back, so that none leaves it locked.
 2. Waiting happens outside the lock and takes nothing from the channel. What has arrived is read inside the lock, and only on behalf of a
    question that is still on the list. The end of the cell empties the list, so a thread that outlives its cell never takes a
    request that is meant for the runner.
 3. An interrupt strikes only while waiting. The question is then taken off the list, and its answer, when it comes, is skipped.

Not for signal handlers: one may strike a thread that holds the lock.
"""

from __future__ import annotations

import threading
from typing import Any

from .channel import Channel
from .frames import LARGEST_FRAME, Header, encode_header
from .interrupts import Gate
from .lanes import Lanes

# Leaves room for what a frame has besides its header.
_LARGEST_QUESTION = LARGEST_FRAME - 1024
# A thread whose cell has ended notices within so many milliseconds.
_LOOK_UP = 1000

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


class _Question:
    """One question on the list. `wake` is locked while its asker waits for somebody else to read."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.answer: Header | None = None
        self.wake = threading.Lock()
        self.wake.acquire()

    def rouse(self) -> None:
        """Lets the asker look again. For whoever holds the lock of the desk."""
        if self.wake.locked():
            self.wake.release()


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

    def activate(self) -> None:
        """Makes this the desk that `ask` finds."""
        global _active
        _active = self

    def open_cell(self, execution: Any) -> None:
        self._execution = execution
        self._is_open = True

    def close_cell(self) -> None:
        """Ends the questions of the cell. From now on nobody but the runner itself reads the channel."""
        with self._lock:
            self._is_open = False
            questions, self._questions, self._reader = self._questions, {}, None
            for question in questions.values():
                question.rouse()

    def ask(self, what: str, members: dict[str, Any]) -> Header:
        if self._lanes.forked:
            raise CannotAsk("a process that the session has forked cannot ask the host; do this in the session itself")
        with self._gate.held():
            question = self._put(what, members)
            try:
                while question.answer is None:
                    self._wait(question)
            finally:
                self._take_off(question)
        return question.answer

    # Everything below happens with interrupts held back, but for the waiting.

    def _put(self, what: str, members: dict[str, Any]) -> _Question:
        with self._lock:
            if not self._is_open:
                raise CannotAsk("the host can be asked only while a cell runs")
            self._last += 1
            own = {"type": "ask", "id": self._execution, "ask": self._last, "what": what}
            header = {**own, **members, **own}
            # Before the frame gets its place in the order: one that is announced and does not come would stop the host.
            if len(encode_header(header)) > _LARGEST_QUESTION:
                raise CannotAsk("the question is too large")
            question = self._questions[self._last] = _Question(self._last)
            self._lanes.send(header)
            return question

    def _take_off(self, question: _Question) -> None:
        with self._lock:
            self._questions.pop(question.number, None)
            if self._reader is question:
                self._reader = None
                for other in self._questions.values():
                    other.rouse()

    def _wait(self, question: _Question) -> None:
        """Waits until something may have changed for this question."""
        if self._reads(question):
            with self._gate.passing():
                self._channel.wait(_LOOK_UP)
            self._read(question)
        else:
            with self._gate.passing():
                question.wake.acquire()

    def _reads(self, question: _Question) -> bool:
        """Tells whether this question's asker is the one that reads, or becomes it now."""
        with self._lock:
            if question.answer is not None:
                return False
            if question.number not in self._questions:
                raise CannotAsk("the cell ended before the host had answered")
            if self._reader is None:
                self._reader = question
            return self._reader is question

    def _read(self, reader: _Question) -> None:
        """Takes what has arrived, and gives each answer to its question."""
        with self._lock:
            if self._reader is not reader:
                return
            frames = self._channel.receive_arrived()
            if frames is None:
                raise CannotAsk("the host has gone away")
            for header, payload in frames:
                if header["type"] != "answer":
                    self._channel.put_back(header, payload)
                    continue
                number = header.get("ask")
                question = self._questions.get(number) if isinstance(number, int) else None
                if question is not None:
                    question.answer = header
                    question.rouse()
