"""Interrupts: when a SIGINT from the host becomes a KeyboardInterrupt.

From the moment a cell's `started` is sent, so that none is lost, until its code has ended; between
cells only while a request waits for the code of a background task to end; and never in the middle
of writing a marker or a frame: a partial frame would break the connection, and a marker in only one
pipe would break the order. Such an interrupt waits until the write is complete.

Python runs signal handlers in the main thread between two bytecodes, so the fields below need no
lock: the handler and the code that it interrupts run in the same thread.
"""

from __future__ import annotations

import _signal
import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import FrameType

# Two interrupts closer than this count as one. It gives the code that catches the first one time to
# close the gate, so that a second one cannot arrive between "caught" and "closed" and escape into
# the runner.
_MIN_INTERVAL = 0.02

# Two whose action cannot be changed, and two that the C library reserves.
_FIXED = frozenset((signal.SIGKILL, signal.SIGSTOP, 32, 33))


class Gate:
    """Lets interrupts through to user code, and holds them back during writes."""

    def __init__(self) -> None:
        self._open = False
        self._held = 0
        self._waiting = False
        self._last = 0.0
        self._opens_if: Callable[[], bool] | None = None
        self.main_thread = threading.get_ident()

    def open(self) -> None:
        """Starts to accept interrupts for a cell, held back until the first `release`.

        Installs the handler again, because an earlier cell may have replaced it or blocked the
        signal.
        """
        self._waiting = False
        self._last = float("-inf")
        self._held = 1
        self._open = True
        self.install()

    def close(self) -> None:
        """Stops accepting interrupts: from now on they do nothing."""
        self._open = False

    @contextlib.contextmanager
    def open_if(self, request_waits: Callable[[], bool]) -> Iterator[None]:
        """During the block, between two cells, lets an interrupt through if `request_waits`
        returns true when it arrives.
        """
        self._opens_if = request_waits
        try:
            yield
        finally:
            self._opens_if = None

    def install(self) -> None:
        if signal.getsignal(signal.SIGINT) != self._handle:
            signal.signal(signal.SIGINT, self._handle)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))

    def hold(self) -> None:
        """Holds interrupts back. Only for the main thread; calls nest."""
        self._held += 1

    def release(self) -> None:
        """Ends one `hold`, and raises an interrupt that arrived meanwhile."""
        self._held = max(0, self._held - 1)
        if self._waiting and not self._held:
            self._waiting = False
            self._interrupt()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Holds interrupts back during the block. Does nothing in other threads, because interrupts
        do not reach them.
        """
        if threading.get_ident() != self.main_thread:
            yield
            return
        self.hold()
        try:
            yield
        finally:
            self.release()

    @contextlib.contextmanager
    def passing(self) -> Iterator[None]:
        """Inside a `held` block, lets interrupts through again. A pending one is raised at the
        beginning.
        """
        if threading.get_ident() != self.main_thread:
            yield
            return
        try:
            self.release()
            yield
        finally:
            self.hold()

    def _handle(self, _signal: int, _frame: FrameType | None) -> None:
        if self._held:
            self._waiting = True
        else:
            self._interrupt()

    def _interrupt(self) -> None:
        if not self._open and (self._opens_if is None or not self._opens_if()):
            return
        now = time.monotonic()
        if now - self._last >= _MIN_INTERVAL:
            self._last = now
            raise KeyboardInterrupt


def blocked() -> set[int]:
    """Returns the signals that this thread blocks."""
    return _signal.pthread_sigmask(_signal.SIG_BLOCK, ())


def restore_signals(blocked: Iterable[int] = ()) -> None:
    """Makes the kernel's signal state match Python's, in a copy of a process. There, all signals
    have their default action except SIGCHLD, which is ignored, and the set of blocked signals is
    undefined.

    Handlers of C code cannot be restored by Python.
    """
    # Uses `_signal`: the enumerations of `signal` take ten times longer than all of this.
    for number in range(1, _signal.NSIG):
        if number in _FIXED:
            continue
        handler = _signal.getsignal(number)
        is_default = type(handler) is int and handler == _signal.SIG_DFL
        if handler is not None and (not is_default or number == _signal.SIGCHLD):
            _signal.signal(number, handler)
    _signal.pthread_sigmask(_signal.SIG_SETMASK, blocked)
