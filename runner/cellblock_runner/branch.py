"""Branch: the one place where a session can be copied while it lives.

The host asks with a `branch` request. The runner looks at what a plain copy of its memory would lose (`luggage`), then stands
still: it gives a sign, and calls the real fork. Whoever watches from outside makes the copy, and keeps it frozen:

    original   fork returns its own number; it puts the luggage down and answers `branched`
    copy       when it is let go, if ever, it is locked in a sandbox already and fork returns 0. All its descriptors but the
               channel are closed. It waits at its gate, unpacks, and says `hello` on a channel of its own

The sign is SIGCONT: seen by whoever watches, and otherwise without effect. When nobody watches (any more), fork makes a plain child;
it ends itself at once, and nothing has happened.

In a container nobody outside can make copies; there a function of this process does (`family`), and takes the place of fork.

The true system calls are kept here because user code may replace those of `os`. That protects nothing, it only avoids surprises: the
copy is made and confined from outside, whatever happens in here.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable

from . import lanes, threads
from .channel import CHANNEL_DESCRIPTOR

_fork, _get_process, _wait_for, _look_at = os.fork, os.getpid, os.waitpid, os.fstat
_send_signal, _get_thread = signal.pthread_kill, threading.get_ident
_copy: Callable[[], int] | None = None

# How processes are made at the branch point, and in a copy until it has arrived.
make_process: Callable[[], int] = _fork

# Descriptors that the maker of copies keeps in the session.
own_descriptors: tuple[int, ...] = ()
# The work folder that a copy found in the place of its original's; None when it has the same name.
moved_to: str | None = None

# From here on Python warns in the original about a fork beside other threads. The user did not fork.
_WARNS_ABOUT_THREADS = sys.version_info >= (3, 12)


def copy_by(maker: Callable[[], int], descriptor: int) -> None:
    """Has copies made by a function in this process, where nobody outside can make them. It returns as fork does at the branch point,
    and makes processes with `make_process`.
    """
    global _copy, _send_signal, own_descriptors
    _copy, own_descriptors = maker, (descriptor,)
    _send_signal = lambda _thread, _signal: None  # noqa: E731 - nobody watches


def stand_still(with_threads: bool) -> bool:
    """Lets the host copy this process. Returns True in a copy, False in the original. Raises OSError when there is no copy.

    `with_threads`, all other threads are stopped, and a copy lets them go on.
    """
    global make_process
    make_process = threads.fork if with_threads else _fork
    try:
        return _stand_still()
    finally:
        make_process = _fork


def _stand_still() -> bool:
    process, channel = _get_process(), _channel()
    with lanes.fork_of_our_own(), warnings.catch_warnings():
        if _WARNS_ABOUT_THREADS:
            warnings.simplefilter("ignore")
        # Nothing may come between these two: whoever watches looks at every system call from the sign to the copy.
        # To this thread: one that was sent to the process might be taken by another thread, which nobody watches.
        _send_signal(_get_thread(), signal.SIGCONT)
        result = (_copy or make_process)()
    if result == 0:
        if _channel() == channel:
            os._exit(0)  # A plain child, on the original's channel.
        return True
    if result != process:
        _wait_for(result, 0)
        raise OSError("nobody watched")
    return False


def _channel() -> tuple[int, int] | None:
    """Tells which socket the channel is. A copy has another one, or none yet had it."""
    try:
        found = _look_at(CHANNEL_DESCRIPTOR)
    except OSError:
        return None
    return found.st_dev, found.st_ino
