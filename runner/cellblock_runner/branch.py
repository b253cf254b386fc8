"""Branch: the only point at which a live session can be copied.

The host sends a `branch` request. The runner determines what a plain copy of its memory would lose
(`fork_state`), then suspends itself: it raises a signal, and calls the real fork. The tracer
outside makes the copy, and keeps it frozen:

    original   fork returns its own process id; it releases the saved state and answers `branched`
    copy       if it is resumed, it is already confined in a sandbox, and fork returns 0. All its
               descriptors except the channel are closed. It waits for its gate byte, restores the
               state, and sends `hello` on a channel of its own

The signal is SIGCONT: visible to a tracer, and otherwise without effect. Without a tracer, fork
creates a plain child, which exits at once without consequences.

In a container no process outside can make copies; there a function of this process does
(`forkserver`), and replaces fork.

References to the original system calls are kept here because user code may replace those of `os`.
That is not a protection, it only avoids surprises: the copy is made and confined from outside,
whatever happens in here.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable

from . import streams, threads
from .channel import CHANNEL_DESCRIPTOR

_fork, _getpid, _waitpid, _fstat = os.fork, os.getpid, os.waitpid, os.fstat
_send_signal, _get_ident = signal.pthread_kill, threading.get_ident
_copy: Callable[[], int] | None = None

# How processes are created at the branch point, and in a copy until it has been set up.
make_process: Callable[[], int] = _fork

# Descriptors that the maker of copies keeps in the session.
own_descriptors: tuple[int, ...] = ()
# The work folder of a copy, if its name differs from the original's. None if the name is the same.
moved_to: str | None = None

# From this version on, Python warns in the original about a fork beside other threads. The user did
# not fork.
_WARNS_ABOUT_THREADS = sys.version_info >= (3, 12)


def copy_by(make_copy: Callable[[], int], descriptor: int) -> None:
    """Makes copies with a function in this process, where no process outside can make them. At the
    branch point it returns as fork does, and it creates processes with `make_process`.
    """
    global _copy, _send_signal, own_descriptors
    _copy, own_descriptors = make_copy, (descriptor,)
    _send_signal = lambda _thread, _signal: None  # noqa: E731 - there is no tracer


def suspend_for_copy(with_threads: bool) -> bool:
    """Lets the host copy this process. Returns True in a copy, False in the original. Raises
    OSError if no copy was made.

    If `with_threads`, all other threads are stopped, and a copy resumes them.
    """
    global make_process
    make_process = threads.fork if with_threads else _fork
    try:
        return _suspend_for_copy()
    finally:
        make_process = _fork


def _suspend_for_copy() -> bool:
    process, channel = _getpid(), _channel()
    with streams.own_fork(), warnings.catch_warnings():
        if _WARNS_ABOUT_THREADS:
            warnings.simplefilter("ignore")
        # Nothing may come between these two: the tracer inspects every system call from the signal
        # to the copy. The signal goes to this thread: one sent to the process might be delivered to
        # another thread, which is not traced.
        _send_signal(_get_ident(), signal.SIGCONT)
        result = (_copy or make_process)()
    if result == 0:
        if _channel() == channel:
            os._exit(0)  # A plain child, on the original's channel.
        return True
    if result != process:
        _waitpid(result, 0)
        raise OSError("no tracer made a copy")
    return False


def _channel() -> tuple[int, int] | None:
    """Identifies the socket of the channel. A copy has a different one, or none yet."""
    try:
        found = _fstat(CHANNEL_DESCRIPTOR)
    except OSError:
        return None
    return found.st_dev, found.st_ino
