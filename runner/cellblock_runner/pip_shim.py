"""Pip shim: handles cells that start pip as a program. There is no pip in a sandbox; the host
installs.

    a shell      gets functions named pip, uv and python, which send pip's arguments to a server;
                 the runner runs the server while the shell runs. So pipes, redirections,
                 conditions and loops are handled by the shell, as usual
    subprocess   for a list of words, or a shell command of words alone: pip's work is done first,
                 and a process that prints the result is started instead

Other Pythons, and shells that subprocess starts for more than words, find no pip.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import re
import select
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from . import packages, pip_arguments, pip_commands

# Low numbers belong to the script.
_LOWEST_DESCRIPTOR = 500
_MAX_MESSAGE_BYTES = 192 * 1024
# Interval, in milliseconds, for polling whether a shell has ended, if a process that it left behind
# still holds the socket.
_POLL_INTERVAL = 50
# The kernel's limit on one argument is 128 KiB.
_MAX_ARGUMENT_BYTES = 120_000

_CLIENT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "pip_client.py")
_PRINT_SCRIPT = 'printf %s "$1"; printf %s "$2" >&2; exit "$3"'

# Without line breaks, so that the lines of a script keep their numbers. The client writes the
# commands for the shell to run afterwards to its descriptor 3; 4 is the output of the function.
_CALL = '_cellblock_pip() {{ {{ eval "$({client} {descriptor} "$@" 3>&1 >&4 4>&-)"; }} 4>&1; }}; '
_PIP = '{name}() {{ _cellblock_pip pip "$@"; }}; '
_UV = 'uv() { if [ "${1-}" = pip ]; then _cellblock_pip uv "$@"; else command uv "$@"; fi; }; '
_PYTHON = (
    '{name}() {{ if [ "${{1-}}" = -m ] && {{ [ "${{2-}}" = pip ] || [ "${{2-}}" = uv ]; }}; '
    'then shift; _cellblock_pip "$@"; else command {name} "$@"; fi; }}; '
)
# Names that every shell accepts for a function, and those that only bash does.
_plain_name = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_bash_name = re.compile(r"[A-Za-z0-9_./+-]+")


def may_start_pip(command: str) -> bool:
    """Reports whether a command may start pip. Other commands get no special handling."""
    return "pip" in command


class PipServer:
    """Serves the functions of one shell. `functions` goes in front of its script, `descriptor` must
    be inherited by it.
    """

    def __init__(self, is_bash: bool) -> None:
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.descriptor = fcntl.fcntl(
                theirs.fileno(), fcntl.F_DUPFD_CLOEXEC, _LOWEST_DESCRIPTOR
            )
        self._is_closed = False
        self._clients: list[socket.socket] = []
        self.functions = _functions(self.descriptor, is_bash)

    def close(self) -> None:
        self._close_descriptor()
        self._close_clients()
        self._ours.close()

    def serve(self, process: subprocess.Popen[bytes]) -> None:
        """Answers until the shell has ended."""
        self._close_descriptor()
        poll = select.poll()
        poll.register(self._ours, select.POLLIN)
        while process.poll() is None:
            if poll.poll(_POLL_INTERVAL) and not self._serve_one():
                process.wait()

    def _close_descriptor(self) -> None:
        """Closes our copy of the inherited descriptor, so that its end can be detected."""
        if not self._is_closed:
            self._is_closed = True
            os.close(self.descriptor)

    def _serve_one(self) -> bool:
        """Answers one client. Returns False if there can be no more. Drops messages that are not
        from a client.
        """
        message, descriptors, _, _ = socket.recv_fds(self._ours, _MAX_MESSAGE_BYTES, 1)
        if not message:
            return False
        # If an interrupt ends this, clients keep waiting and are ended with their shell. Otherwise
        # they would report an error.
        self._clients += [socket.socket(fileno=number) for number in descriptors]
        with contextlib.suppress(ValueError, TypeError, OSError):
            folder, words = json.loads(message)
            reply = _reply([str(word) for word in words], str(folder))
            answer = {"out": reply.out, "err": reply.err, "then": _shell_commands(reply)}
            for client in self._clients:
                client.sendall(json.dumps(answer).encode())
        self._close_clients()
        return True

    def _close_clients(self) -> None:
        while self._clients:
            self._clients.pop().close()


def _reply(words: list[str], folder: str) -> pip_commands.Reply:
    arguments = pip_arguments.arguments_of(words)
    if arguments is None:
        return pip_commands.Reply(1, "", "ERROR: only `uv pip` is available here\n")
    return pip_commands.carry_out(arguments, folder)


def _shell_commands(reply: pip_commands.Reply) -> str:
    """Returns the commands for the shell to run after pip, so that it also finds what was
    installed.
    """
    lists = {"PATH": packages.programs(reply.added), "PYTHONPATH": reply.added}
    exports = (
        f'export {name}={shlex.quote(os.pathsep.join(new))}"${{{name}:+{os.pathsep}${name}}}"; '
        for name, new in lists.items()
        if new
    )
    return f"{''.join(exports)}return {reply.code}"


def _functions(descriptor: int, is_bash: bool) -> str:
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    may_be_named = _bash_name if is_bash else _plain_name

    def define(template: str, *names: str) -> Iterator[str]:
        return (template.format(name=name) for name in names if may_be_named.fullmatch(name))

    client = shlex.join((sys.executable, "-I", "-S", _CLIENT))
    pythons = dict.fromkeys(("python", "python3", f"python{version}", sys.executable))
    return "".join(
        (
            _CALL.format(client=client, descriptor=descriptor),
            *define(_PIP, "pip", "pip3", f"pip{version}"),
            _UV,
            *define(_PYTHON, *pythons),
        )
    )


def install_in_subprocess() -> None:
    """Makes `subprocess`, and everything built on it, do pip's work without pip."""
    original = subprocess.Popen.__init__

    @functools.wraps(original)
    def start(self: Any, args: Any, *more: Any, **options: Any) -> None:
        arguments = None if more else arguments_of_process(args, bool(options.get("shell")))
        if arguments is None:
            original(self, args, *more, **options)
            return
        reply = pip_commands.carry_out(
            arguments, os.path.abspath(os.fsdecode(options.get("cwd") or "."))
        )
        texts = (_as_argument(reply.out), _as_argument(reply.err), str(reply.code))
        options.update(shell=False, executable=None)
        original(self, ["/bin/sh", "-c", _PRINT_SCRIPT, "pip", *texts], **options)
        self.args = args

    subprocess.Popen.__init__ = start  # type: ignore[method-assign]


def arguments_of_process(args: Any, is_for_shell: bool) -> list[str] | None:
    """Returns pip's arguments if the process would run pip, or None."""
    try:
        if isinstance(args, (str, bytes, os.PathLike)):
            command = os.fsdecode(args)
            words = (
                pip_arguments.simple_words(command)
                if is_for_shell and may_start_pip(command)
                else None
            )
        elif isinstance(args, (list, tuple)) and not is_for_shell:
            words = [os.fsdecode(word) for word in args]
        else:
            return None
    except (TypeError, ValueError):
        return None
    return None if words is None else pip_arguments.arguments_of(words)


def _as_argument(text: str) -> bytes:
    data = text.replace("\0", "").encode("utf-8", "replace")
    return data if len(data) <= _MAX_ARGUMENT_BYTES else data[:_MAX_ARGUMENT_BYTES] + b"\n[...]\n"
