"""Branch: the one place where a session can be copied while it lives.

The host asks with a `branch` request. The runner looks at what a plain copy of its memory would lose (`luggage`), then stands
still: it stops itself, and calls the real fork. Whoever watches from outside makes the copy, and keeps it frozen:

    original   fork returns a number that means nothing; it puts the luggage down and answers `branched`
    copy       when it is let go, if ever, it is locked in a sandbox already and fork returns 0. All its descriptors but the
               channel are closed. It waits at its gate, unpacks, and says `hello` on a channel of its own

The true system calls are kept here because user code may replace those of `os`. That protects nothing, it only avoids surprises: the
copy is made and confined from outside, whatever happens in here.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings

from . import lanes

_fork, _send_signal, _get_process = os.fork, os.kill, os.getpid

# From here on Python warns in the original about a fork beside other threads. The user did not fork.
_WARNS_ABOUT_THREADS = sys.version_info >= (3, 12)


def stand_still() -> bool:
    """Lets the host copy this process. Returns True in a copy, False in the original. Raises OSError when there is no copy."""
    process = _get_process()
    with lanes.fork_of_our_own(), warnings.catch_warnings():
        if _WARNS_ABOUT_THREADS:
            warnings.simplefilter("ignore")
        # Nothing may come between these two: whoever watches looks at every system call from the stop to the copy.
        _send_signal(process, signal.SIGSTOP)
        return _fork() == 0
