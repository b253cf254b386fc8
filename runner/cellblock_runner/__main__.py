"""Serves one session without a warm process.

Usage: `python -m cellblock_runner --channel-fd 3 --workdir DIR`
"""

from __future__ import annotations

import argparse
import os

from . import commands
from .channel import CHANNEL_DESCRIPTOR, Channel
from .serve import prepare, serve


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="cellblock_runner", description="Serves one session on an inherited socket."
    )
    parser.add_argument("--channel-fd", type=int, required=True, help="the inherited stream socket")
    parser.add_argument("--workdir", required=True, help="the working folder of the session")
    parser.add_argument(
        "--preload", default="", help="modules to import first, separated by commas"
    )
    parser.add_argument(
        "--scratch", action="append", default=[], help="another folder of this session alone"
    )
    parser.add_argument(
        "--ask-for-programs", action="store_true", help="programs are started by the host only"
    )
    options = parser.parse_args()
    if options.channel_fd != CHANNEL_DESCRIPTOR:
        os.dup2(options.channel_fd, CHANNEL_DESCRIPTOR)
        os.close(options.channel_fd)
    os.set_inheritable(CHANNEL_DESCRIPTOR, False)
    shell = prepare([name for name in options.preload.split(",") if name])
    if options.ask_for_programs:
        commands.require_approval()
    serve(shell, Channel.in_its_place(), options.workdir, options.scratch)


if __name__ == "__main__":
    main()
