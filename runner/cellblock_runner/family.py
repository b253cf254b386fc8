"""Family: the processes of one container, as far as they are made here. Nothing outside makes copies of them, so they make them themselves.

    warm process   imports everything once and never runs a user's byte. Asked for a session, it forks
    steward        parent of one session's interpreter, and of whatever that leaves behind, so that all of it can be found and ended.
                   Tells the supervisor how processes ended
    interpreter    serves the session, behind landlock
    checkpoint     a copy of an interpreter that stands still. Asked for an undo, it makes another copy that goes on; asked for a fork,
                   a steward with such a copy

All of them are the same user in the same container. What keeps members of a family apart is landlock, as far as the kernel has it, and
the memory of processes. Who is outside of the container is kept apart by the engine.

Orders come on packet sockets, with descriptors; answers go back on the same. The true system calls are kept because user code
shares a process with most of this and may replace those of `os`. That protects nothing, it only avoids surprises.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
from collections.abc import Sequence
from typing import Any, NoReturn

from . import branch, fences, stock
from .channel import CHANNEL_DESCRIPTOR

# Where a session keeps the socket on which a copy of it introduces itself.
BRANCH_DESCRIPTOR = CHANNEL_DESCRIPTOR - 1

# What every session can write beside its own folder. `/forks` holds the folders of forks, which enter a landlock of their own.
SHARED_FOLDERS = ("/tmp", "/dev/shm")
FORKS = "/forks"
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty", "/dev/ptmx", "/dev/pts")

_LARGEST_ORDER = 1024 * 1024
# Interpreters go before what serves all of them when memory runs out.
OF_INTERPRETERS = 500
# Beyond every number that the limit of a container allows.
_EVERY_DESCRIPTOR = 65536

# How a fresh session begins: at once; after a cell that nobody sees; with an emptied folder.
_PRIMED, _EMPTIED = "p", "e"

_exit, _wait, _get_process = os._exit, os.waitpid, os.getpid
_close, _duplicate, _close_all, _open = os.close, os.dup2, os.closerange, os.open
_pipe, _read, _write = os.pipe, os.read, os.write
_socket, _pair, _receive, _send = socket.socket, socket.socketpair, socket.recv_fds, socket.send_fds
_read_json, _write_json = json.loads, json.dumps


def become_warm(orders: int, plan: bytes) -> NoReturn:
    """Goes on as the warm process, without anything of the supervisor's. Takes over the descriptor for orders."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGHUP, signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        fences.be_unreadable()
        _silence(0, 1)
        _duplicate(orders, _FIRST_FREE)
        _close_all(_FIRST_FREE + 1, _EVERY_DESCRIPTOR)
        wanted = _read_json(plan)
        if wanted.get("programs") == "refused":
            # Before anything else: what sessions have written may be read below, and everything that comes of this process inherits it.
            fences.refuse_programs()
        _wait_warm(_socket(fileno=_FIRST_FREE), wanted)
    except BaseException as error:  # noqa: BLE001 - the process ends either way
        os.write(2, f"the warm interpreter could not start: {error!r}\n".encode())
    finally:
        _exit(1)


def warm_up(plan: dict[str, Any]) -> Any:
    """Imports everything that sessions need, and returns the shell that they are to have."""
    gc.disable()
    stock.offer()
    if not plan["rehearse"]:
        from .zygote import import_some_later

        import_some_later()
    from . import serve  # Imports IPython, which is most of the start.

    os.environ.update(plan["environment"])
    shell = serve.prepare(plan["preload"], rehearse=plan["rehearse"])
    stock.withdraw()
    gc.enable()
    return shell


def _wait_warm(orders: socket.socket, plan: dict[str, Any]) -> NoReturn:
    """Is the warm process: imports, says so, and makes sessions until the supervisor is gone."""
    shell = warm_up(plan)
    orders.send(_write_json({"say": "warm", "environment": dict(os.environ)}).encode())
    while True:
        message, descriptors, _, _ = _receive(orders, _LARGEST_ORDER, 3)
        if not message:
            _exit(0)
        order = _read_json(message)
        between = branch.make_process()
        if between == 0:
            _leave_parent()
            _become_steward(descriptors, None, order["work"])
            _begin(shell, order, asks=plan.get("programs") == "refused")
        _wait(between, 0)
        for descriptor in descriptors:
            _close(descriptor)


def _begin(shell: Any, order: dict[str, Any], asks: bool) -> NoReturn:
    """Is a fresh interpreter, from its first to its last instruction. It `asks` the host for programs where it may start none."""
    from . import commands, interrupts, serve
    from .channel import Channel

    status = 1
    try:
        interrupts.restore_signals()
        branch.copy_by(_make_copy, BRANCH_DESCRIPTOR)
        if asks:
            commands.ask_from_now_on()
        if order["gate"] == _PRIMED:
            serve.prime(shell)
        # What is beside the work folder is the whole family's: a copy finds it there, and nothing of it goes along.
        serve.serve(shell, Channel.in_its_place(), order["work"], (), empty=order["gate"] == _EMPTIED)
    finally:
        _exit(status)


def _make_copy() -> int:
    """Takes the place of the fork at the branch point: leaves a checkpoint behind. Returns 0 in copies of that. Raises OSError when there is none."""
    hears, tells = _pipe()
    try:
        between = branch.make_process()
    except OSError:
        _close(hears)
        _close(tells)
        raise
    if between:
        _close(tells)
        _wait(between, 0)
        is_there = _read(hears, 1)
        _close(hears)
        if not is_there:
            raise OSError("the copy could not introduce itself")
        return _get_process()
    try:
        _leave_parent()  # A checkpoint is no child of the session.
        _stand_until_ordered(tells)
    except BaseException:  # noqa: BLE001 - the process ends either way
        # Only a copy that is in its place may go on from here. In this one the session would be there twice.
        _exit(1)
    return 0


def _stand_until_ordered(tells: int) -> None:
    """Is a checkpoint. Returns in its copies only, once they are in their place."""
    mine, theirs = _pair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    _send(_socket(fileno=BRANCH_DESCRIPTOR), [b"{}"], [theirs.fileno()])
    _write(tells, b"x")
    _keep_only(mine.detach())
    orders = _socket(fileno=_FIRST_FREE)
    while True:
        message, descriptors, _, _ = _receive(orders, _LARGEST_ORDER, 3)
        if not message:
            _exit(0)
        order = _read_json(message)
        between = branch.make_process()
        if between == 0:
            branch.moved_to = order["work"]
            if len(descriptors) == 3:
                _leave_parent()
                _become_steward(descriptors, order["work"], order["work"])
                return
            # The steward of the session becomes the parent.
            copy = branch.make_process()
            if copy:
                orders.send(_write_json({"interpreter": copy}).encode())
                _exit(0)
            _settle(descriptors)
            return
        _wait(between, 0)
        for descriptor in descriptors:
            _close(descriptor)


def _become_steward(descriptors: Sequence[int], confined_to: str | None, work: str | None) -> None:
    """Returns in a child, which is the interpreter and has the first two descriptors. The steward itself stays here until nobody is left below it.

    `confined_to` is the only folder of its own that a fork may write to; a fresh session may write to `work` and to those of its forks.
    """
    fences.adopt_orphans()
    interpreter = branch.make_process()
    if interpreter == 0:
        _settle(descriptors[:2])
        fences.be_readable()
        fences.offer_to_die(OF_INTERPRETERS)
        own = (confined_to,) if confined_to else (work or "/", FORKS)
        fences.enter_landlock((*own, *SHARED_FOLDERS), DEVICES)
        return
    try:
        _keep_only(descriptors[2])
        reports = _socket(fileno=_FIRST_FREE)
        reports.send(_write_json({"interpreter": interpreter}).encode())
        while True:
            process, status = _wait(-1, 0)
            reports.send(_write_json({"ended": process, "status": status}).encode())
    finally:
        _exit(0)  # Nobody is left, or the supervisor is gone and with it the container.


def _leave_parent() -> None:
    """Goes on in a child whose parent ends at once, so that whoever adopts orphans adopts it."""
    if branch.make_process():
        _exit(0)


# The lowest number beside the standard streams.
_FIRST_FREE = 3


def _keep_only(descriptor: int) -> None:
    """Closes everything but this descriptor, which gets the lowest number, and has the standard streams lead nowhere."""
    _silence()
    if descriptor != _FIRST_FREE:
        _duplicate(descriptor, _FIRST_FREE, inheritable=False)
    _close_all(_FIRST_FREE + 1, _EVERY_DESCRIPTOR)


def _settle(descriptors: Sequence[int]) -> None:
    """Puts channel and branch socket in their places, and closes everything else."""
    channel, copies = descriptors
    _silence()
    _duplicate(channel, CHANNEL_DESCRIPTOR, inheritable=False)
    _duplicate(copies, BRANCH_DESCRIPTOR, inheritable=False)
    _close_all(_FIRST_FREE, BRANCH_DESCRIPTOR)
    _close_all(CHANNEL_DESCRIPTOR + 1, _EVERY_DESCRIPTOR)


def _silence(*standards: int) -> None:
    """Has standard streams lead nowhere: those that are named, or all."""
    nothing = _open("/dev/null", os.O_RDWR)
    for standard in standards or (0, 1, 2):
        _duplicate(nothing, standard)
    if nothing > 2:
        _close(nothing)
