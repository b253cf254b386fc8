"""Bootstrap: the first process of a container, before it becomes the supervisor.

A session waits for a warm Python, and most of that is importing. So the warm process starts here,
before anything is imported that only the supervisor needs: the two import in parallel.
"""

from __future__ import annotations

import _socket
import gc
import os
import sys

from . import import_cache

_IN = 0
_READ = 64 * 1024


def main() -> None:
    """Reads the plan from the host, one line of JSON, starts the warm process, and supervises until
    the host is gone.
    """
    if os.getpid() != 1:
        sys.exit(
            "the supervisor ends every process that it does not know,"
            " so it must be the first one of a container"
        )
    # Imports leave no garbage.
    gc.disable()
    import_cache.offer()
    plan, received = _read_plan()
    from . import forkserver  # Both need it, and most of its imports.

    ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    warm = os.fork()
    if warm == 0:
        ours.close()
        forkserver.become_warm(theirs.detach(), plan)
    theirs.close()
    from . import supervisor

    import_cache.withdraw()
    gc.enable()
    supervisor.supervise(plan, received, warm, ours.detach())


def _read_plan() -> tuple[bytes, bytes]:
    """Returns the plan, and the input received after it."""
    data = b""
    while b"\n" not in data:
        more = os.read(_IN, _READ)
        if not more:
            os._exit(0)  # The host is gone.
        data += more
    plan, _, received = data.partition(b"\n")
    return plan, received
