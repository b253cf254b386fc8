"""The program behind `pip` in a shell command of a cell.

It sends its arguments to the runner that started the shell and prints pip's output. It writes the
commands for the shell to run next to descriptor 3. Its first argument is the number of the
inherited socket of `pip_shim.PipServer`; then come the name of a program and its arguments.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys


_COMMANDS_DESCRIPTOR = 3


def main() -> None:
    try:
        server = socket.socket(fileno=int(sys.argv[1]))
        ours, theirs = socket.socketpair()
        socket.send_fds(
            server, [json.dumps([os.getcwd(), sys.argv[2:]]).encode()], [theirs.fileno()]
        )
        theirs.close()
        reply = json.loads(ours.makefile("rb").read())
    except (OSError, ValueError):
        reason = (
            "ERROR: pip works only while the command of its cell runs, and in the session itself\n"
        )
        reply = {"out": "", "err": reason, "then": "return 1"}
    _write(_COMMANDS_DESCRIPTOR, reply["then"])
    _write(1, reply["out"])
    _write(2, reply["err"])


def _write(descriptor: int, text: str) -> None:
    data = text.encode("utf-8", "replace")
    try:
        while data:
            data = data[os.write(descriptor, data) :]
    except OSError:
        pass  # The reader is gone, or the descriptor is closed.


if __name__ == "__main__":
    # An interrupt ends it like any program of a shell, without a traceback of ours.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    main()
