"""An imitation of what copies a session from outside, for tests without a sandbox.

Run in the place of `python -m cellblock_runner`, with two more arguments: the abstract address of a
test that listens, and the folders that a fork finds empty; or followed by `zygote` and its socket,
in the place of the zygote. The true fork takes the place of the kernel's work. Each `branch` leaves
a process behind that stands still, connects to the test and waits for orders; each order makes a
copy with the facts that PROTOCOL.md promises: every descriptor closed but the standard ones and the
channel, all signals at their default but SIGCHLD, which is ignored, some blocked, another folder,
another mask. A fork gets empty folders, by mounting some.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import socket
import sys
from typing import Any

from cellblock_runner import __main__ as runner
from cellblock_runner import branch, luggage, zygote
from cellblock_runner.channel import CHANNEL_DESCRIPTOR

_NEW_MOUNTS, _NEW_USER = 0x20000, 0x10000000
_PRIVATE_AND_BELOW = 0x40000 | 0x4000
_DEFAULT, _IGNORE = 0, 1
_CHILD_SIGNAL = 17

_limits = luggage.look_at_rights().limits
_niceness = os.getpriority(os.PRIO_PROCESS, 0)
_get_process = os.getpid
_library = ctypes.CDLL(None, use_errno=True)
_set_handler = _library.signal
_set_handler.argtypes = (ctypes.c_int, ctypes.c_void_p)
_set_handler.restype = ctypes.c_void_p


def main() -> None:
    address, folders = sys.argv.pop(1), sys.argv.pop(1).split(",")

    def imitation() -> int:
        between = branch.make_process()
        if between:
            os.waitpid(between, 0)
            return _get_process()
        if branch.make_process():
            os._exit(0)  # So that the frozen process is no child of the session.
        return _stand_until_ordered(address, folders)

    branch._copy = imitation
    branch._send_signal = lambda _process, _signal: None
    if sys.argv[1] == "zygote":
        # Its socket has a number of its own.
        os.dup2(int(sys.argv[2]), 3)
        zygote.main()
    runner.main()


def _stand_until_ordered(address: str, folders: list[str]) -> int:
    """Returns in copies only."""
    os.closerange(3, 4096)
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    os.close(nothing)
    test = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    test.connect("\0" + address)
    while True:
        message, descriptors, _, _ = socket.recv_fds(test, 4096, 1)
        if not message:
            os._exit(0)
        order = json.loads(message)
        child = branch.make_process()
        if child == 0:
            _become_copy(order, descriptors[0], folders)
            return 0
        os.close(descriptors[0])
        test.send(json.dumps({"process": child}).encode())


def _become_copy(order: dict[str, Any], channel: int, folders: list[str]) -> None:
    _give_back_rights(_limits, _niceness)
    if order["fork"]:
        _empty(folders)
    os.dup2(channel, CHANNEL_DESCRIPTOR, inheritable=False)
    os.closerange(3, CHANNEL_DESCRIPTOR)
    os.chdir("/")
    os.umask(0o022)
    # Not with Python's own functions: it must not know.
    for number in range(1, 65):
        _set_handler(number, _IGNORE if number == _CHILD_SIGNAL else _DEFAULT)
    signal.pthread_sigmask(signal.SIG_SETMASK, {signal.SIGUSR1, signal.SIGINT})


def _give_back_rights(limits: dict[int, tuple[int, int]], niceness: int) -> None:
    """A copy begins with the limits and the priority of every session, as far as a test may raise
    them.
    """
    for number, limit in limits.items():
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(number, limit)
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, niceness)


def _empty(folders: list[str]) -> None:
    user, group = os.getuid(), os.getgid()
    if _library.unshare(_NEW_MOUNTS) != 0:
        _check(_library.unshare(_NEW_MOUNTS | _NEW_USER), "unshare")
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"0 {user} 1"),
            ("gid_map", f"0 {group} 1"),
        ):
            with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
                file.write(text)
    _check(_library.mount(None, b"/", None, _PRIVATE_AND_BELOW, None), "mount")
    for folder in folders:
        _check(
            _library.mount(b"none", os.fsencode(folder), b"tmpfs", 0, b"mode=0700"),
            f"mount {folder}",
        )


def _check(result: int, attempt: str) -> None:
    if result != 0:
        os.write(2, f"{attempt}: {os.strerror(ctypes.get_errno())}\n".encode())
        os._exit(1)


if __name__ == "__main__":
    main()
