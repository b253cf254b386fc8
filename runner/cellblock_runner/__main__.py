"""Serves one session without a warm process: `python -m cellblock_runner --channel-fd 3 --workdir DIR`."""

from __future__ import annotations

import argparse
import socket

from .serve import prepare, serve


def main() -> None:
    parser = argparse.ArgumentParser(prog="cellblock_runner", description="Serves one session on an inherited socket.")
    parser.add_argument("--channel-fd", type=int, required=True, help="the inherited stream socket")
    parser.add_argument("--workdir", required=True, help="the working folder of the session")
    parser.add_argument("--preload", default="", help="modules to import first, separated by commas")
    options = parser.parse_args()
    channel = socket.socket(fileno=options.channel_fd)
    channel.set_inheritable(False)
    serve(prepare([name for name in options.preload.split(",") if name]), channel, options.workdir)


if __name__ == "__main__":
    main()
