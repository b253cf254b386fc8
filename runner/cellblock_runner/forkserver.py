"""Fork server: the processes of one container that are made by fork. Nothing outside the
container copies them, so they copy themselves.

    warm process   imports everything once and never runs user code. Forks a session on request
    subreaper      parent of one session's interpreter, and of the processes that it leaves behind,
                   so that all of them can be found and ended. Reports exit statuses to the
                   supervisor
    interpreter    serves the session, behind landlock
    checkpoint     a suspended copy of an interpreter. For an undo, it forks another copy that
                   continues; for a fork, a subreaper with such a copy

All of them run as the same user in the same container. They are separated from each other by
landlock, as far as the kernel supports it, and by process memory. The container engine separates
them from everything outside the container.

Orders arrive on packet sockets, with descriptors; answers go back on the same sockets. References
to the original system calls are kept because user code shares a process with most of this and may
replace those of `os`. That is not a protection, it only avoids surprises.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
from collections.abc import Sequence
from typing import Any, NoReturn

from . import branch, confine, import_cache
from .channel import CHANNEL_DESCRIPTOR

# The socket on which a copy of a session sends its handshake.
BRANCH_DESCRIPTOR = CHANNEL_DESCRIPTOR - 1

# Folders that every session can write besides its own. `/forks` holds the folders of forks, which
# enter a landlock of their own.
SHARED_FOLDERS = ("/tmp", "/dev/shm")
FORKS = "/forks"
DEVICES = (
    "/dev/null",
    "/dev/zero",
    "/dev/full",
    "/dev/random",
    "/dev/urandom",
    "/dev/tty",
    "/dev/ptmx",
    "/dev/pts",
)

_MAX_ORDER_BYTES = 1024 * 1024
# The oom_score_adj of interpreters, which are ended before the processes that serve all of them.
OF_INTERPRETERS = 500
# Beyond every number that the limit of a container allows.
_EVERY_DESCRIPTOR = 65536

# Start modes of a fresh session (`messages.StartMode`): after a cell whose output is discarded;
# with an emptied folder. Any other mode starts at once.
_PRIMED, _EMPTIED = "primed", "emptied"

_exit, _wait, _get_process = os._exit, os.waitpid, os.getpid
_close, _duplicate, _close_all, _open = os.close, os.dup2, os.closerange, os.open
_pipe, _read, _write = os.pipe, os.read, os.write
_socket, _pair, _receive, _send = socket.socket, socket.socketpair, socket.recv_fds, socket.send_fds
_read_json, _write_json = json.loads, json.dumps


def become_warm(orders: int, plan: bytes) -> NoReturn:
    """Continues as the warm process, without any resources of the supervisor. Takes over the
    descriptor for orders.
    """
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGHUP, signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        confine.be_unreadable()
        _silence(0, 1)
        _duplicate(orders, _FIRST_FREE)
        _close_all(_FIRST_FREE + 1, _EVERY_DESCRIPTOR)
        wanted = _read_json(plan)
        if wanted.get("programs") == "refused":
            # First of all: files written by sessions may be read below, and all descendants of this
            # process inherit the filter.
            confine.refuse_programs(wanted["program_filters"])
        _wait_warm(_socket(fileno=_FIRST_FREE), wanted)
    except BaseException as error:  # noqa: BLE001 - the process ends either way
        os.write(2, f"the warm interpreter could not start: {error!r}\n".encode())
    finally:
        _exit(1)


def warm_up(plan: dict[str, Any]) -> Any:
    """Imports everything that sessions need. Returns the shell that they use."""
    gc.disable()
    import_cache.offer()
    if not plan["rehearse"]:
        from .zygote import import_lazily

        import_lazily()
    from . import serve  # Imports IPython, which takes most of the startup time.

    os.environ.update(plan["environment"])
    shell = serve.prepare(plan["preload"], rehearse=plan["rehearse"])
    import_cache.withdraw()
    gc.enable()
    return shell


def _wait_warm(orders: socket.socket, plan: dict[str, Any]) -> NoReturn:
    """Runs as the warm process: imports everything, reports that it is ready, and starts sessions
    until the supervisor is gone.
    """
    shell = warm_up(plan)
    orders.send(_write_json({"say": "warm", "environment": dict(os.environ)}).encode())
    while True:
        message, descriptors, _, _ = _receive(orders, _MAX_ORDER_BYTES, 3)
        if not message:
            _exit(0)
        order = _read_json(message)
        between = branch.make_process()
        if between == 0:
            _leave_parent()
            _become_subreaper(descriptors, None, order["work"])
            _begin(shell, order, asks=plan.get("programs") == "refused")
        _wait(between, 0)
        for descriptor in descriptors:
            _close(descriptor)


def _begin(shell: Any, order: dict[str, Any], asks: bool) -> NoReturn:
    """Runs a fresh interpreter, from its first to its last instruction. If it `asks`, it requests
    programs from the host, because it may not start any.
    """
    from . import commands, interrupts, serve
    from .channel import Channel

    status = 1
    try:
        interrupts.restore_signals()
        branch.copy_by(_make_copy, BRANCH_DESCRIPTOR)
        if asks:
            commands.require_approval()
        if order["mode"] == _PRIMED:
            serve.prime(shell)
        # Everything besides the work folder is shared by all sessions of the container: a copy
        # finds it in place, so none of it is saved.
        serve.serve(
            shell, Channel.in_its_place(), order["work"], (), empty=order["mode"] == _EMPTIED
        )
    finally:
        _exit(status)


def _make_copy() -> int:
    """Replaces the fork at the branch point: leaves a checkpoint behind. Returns 0 in copies of the
    checkpoint. Raises OSError if there is no checkpoint.
    """
    ready, signals = _pipe()
    try:
        between = branch.make_process()
    except OSError:
        _close(ready)
        _close(signals)
        raise
    if between:
        _close(signals)
        _wait(between, 0)
        is_there = _read(ready, 1)
        _close(ready)
        if not is_there:
            raise OSError("the copy could not introduce itself")
        return _get_process()
    try:
        _leave_parent()  # A checkpoint is not a child of the session.
        _wait_for_orders(signals)
    except BaseException:  # noqa: BLE001 - the process ends either way
        # Only a copy that has been set up may continue from here. This process would be a second
        # instance of the session.
        _exit(1)
    return 0


def _wait_for_orders(signals: int) -> None:
    """Runs as a checkpoint. Returns only in its copies, once they are set up."""
    mine, theirs = _pair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    _send(_socket(fileno=BRANCH_DESCRIPTOR), [b"{}"], [theirs.fileno()])
    _write(signals, b"x")
    _keep_only(mine.detach())
    orders = _socket(fileno=_FIRST_FREE)
    while True:
        message, descriptors, _, _ = _receive(orders, _MAX_ORDER_BYTES, 3)
        if not message:
            _exit(0)
        order = _read_json(message)
        between = branch.make_process()
        if between == 0:
            branch.moved_to = order["work"]
            if len(descriptors) == 3:
                _leave_parent()
                _become_subreaper(descriptors, order["work"], order["work"])
                return
            # The session's subreaper becomes the parent.
            copy = branch.make_process()
            if copy:
                orders.send(_write_json({"interpreter": copy}).encode())
                _exit(0)
            _settle(descriptors)
            return
        _wait(between, 0)
        for descriptor in descriptors:
            _close(descriptor)


def _become_subreaper(
    descriptors: Sequence[int], confined_to: str | None, work: str | None
) -> None:
    """Returns in a child, which is the interpreter and has the first two descriptors. The subreaper
    itself stays here until it has no descendants left.

    `confined_to` is the only folder of its own that a fork may write to; a fresh session may write
    to `work` and to those of its forks.
    """
    confine.adopt_orphans()
    interpreter = branch.make_process()
    if interpreter == 0:
        _settle(descriptors[:2])
        confine.be_readable()
        confine.offer_to_die(OF_INTERPRETERS)
        own = (confined_to,) if confined_to else (work or "/", FORKS)
        confine.enter_landlock((*own, *SHARED_FOLDERS), DEVICES)
        return
    try:
        _keep_only(descriptors[2])
        reports = _socket(fileno=_FIRST_FREE)
        reports.send(_write_json({"interpreter": interpreter}).encode())
        while True:
            process, status = _wait(-1, 0)
            reports.send(_write_json({"ended": process, "status": status}).encode())
    finally:
        _exit(0)  # No descendant is left, or the supervisor is gone and with it the container.


def _leave_parent() -> None:
    """Continues in a child whose parent exits at once, so that the subreaper adopts it."""
    if branch.make_process():
        _exit(0)


# The lowest descriptor after the standard streams.
_FIRST_FREE = 3


def _keep_only(descriptor: int) -> None:
    """Closes everything except this descriptor, which gets the lowest number. Redirects the
    standard streams to /dev/null.
    """
    _silence()
    if descriptor != _FIRST_FREE:
        _duplicate(descriptor, _FIRST_FREE, inheritable=False)
    _close_all(_FIRST_FREE + 1, _EVERY_DESCRIPTOR)


def _settle(descriptors: Sequence[int]) -> None:
    """Moves channel and branch socket to their fixed numbers, and closes everything else."""
    channel, copies = descriptors
    _silence()
    _duplicate(channel, CHANNEL_DESCRIPTOR, inheritable=False)
    _duplicate(copies, BRANCH_DESCRIPTOR, inheritable=False)
    _close_all(_FIRST_FREE, BRANCH_DESCRIPTOR)
    _close_all(CHANNEL_DESCRIPTOR + 1, _EVERY_DESCRIPTOR)


def _silence(*standards: int) -> None:
    """Redirects the given standard streams, or all of them, to /dev/null."""
    nothing = _open("/dev/null", os.O_RDWR)
    for standard in standards or (0, 1, 2):
        _duplicate(nothing, standard)
    if nothing > 2:
        _close(nothing)
