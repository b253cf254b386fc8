"""Replaces the tracer that copies a session from outside, for tests without a sandbox.

Run instead of `python -m cellblock_runner`, with two more arguments: the abstract address of a
listening test, and the folders that are empty in a fork; or followed by `zygote` and its socket,
instead of the zygote. Copies are made with a real fork. Each `branch` leaves a suspended process
behind, which connects to the test and waits for orders; each order makes a copy in the state that
PROTOCOL.md specifies: all descriptors closed except the standard ones and the channel, all signals
at their default except SIGCHLD, which is ignored, some blocked, another folder, another umask. A
fork gets empty folders, by mounts.
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
from cellblock_runner import branch, fork_state, zygote
from cellblock_runner.channel import CHANNEL_DESCRIPTOR

# From <linux/sched.h>, <linux/mount.h> and <signal.h>.
CLONE_NEWNS, CLONE_NEWUSER = 0x20000, 0x10000000
MS_REC, MS_PRIVATE = 0x4000, 0x40000
SIG_DFL, SIG_IGN = 0, 1

_limits = fork_state.current_limits().limits
_niceness = os.getpriority(os.PRIO_PROCESS, 0)
_getpid = os.getpid
_library = ctypes.CDLL(None, use_errno=True)
_set_handler = _library.signal
_set_handler.argtypes = (ctypes.c_int, ctypes.c_void_p)
_set_handler.restype = ctypes.c_void_p


def main() -> None:
    address, folders = sys.argv.pop(1), sys.argv.pop(1).split(",")

    def make_copy() -> int:
        between = branch.make_process()
        if between:
            os.waitpid(between, 0)
            return _getpid()
        if branch.make_process():
            os._exit(0)  # So that the suspended process is not a child of the session.
        return _wait_for_orders(address, folders)

    branch._copy = make_copy
    branch._send_signal = lambda _process, _signal: None
    if sys.argv[1] == "zygote":
        # Its socket has a fixed number.
        os.dup2(int(sys.argv[2]), 3)
        zygote.main()
    runner.main()


def _wait_for_orders(address: str, folders: list[str]) -> int:
    """Returns only in copies."""
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
    _reset_limits(_limits, _niceness)
    if order["fork"]:
        _empty(folders)
    os.dup2(channel, CHANNEL_DESCRIPTOR, inheritable=False)
    os.closerange(3, CHANNEL_DESCRIPTOR)
    os.chdir("/")
    os.umask(0o022)
    # Not with Python's own functions, which would record the change.
    for number in range(1, 65):
        _set_handler(number, SIG_IGN if number == signal.SIGCHLD else SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, {signal.SIGUSR1, signal.SIGINT})


def _reset_limits(limits: dict[int, tuple[int, int]], niceness: int) -> None:
    """Gives a copy the limits and the priority of a fresh session, as far as a test may raise
    them."""
    for number, limit in limits.items():
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(number, limit)
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, niceness)


def _empty(folders: list[str]) -> None:
    user, group = os.getuid(), os.getgid()
    if _library.unshare(CLONE_NEWNS) != 0:
        _check(_library.unshare(CLONE_NEWNS | CLONE_NEWUSER), "unshare")
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"0 {user} 1"),
            ("gid_map", f"0 {group} 1"),
        ):
            with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
                file.write(text)
    _check(_library.mount(None, b"/", None, MS_REC | MS_PRIVATE, None), "mount")
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
