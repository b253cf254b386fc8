"""Commands: how code of a cell runs programs where its own process may not start any.

There the kernel refuses `execve` to the session and to all processes that it forks. The session
asks the host instead (`host_calls`, call `shell`): the host decides, perhaps after asking a person,
and starts exactly the requested program beside the session. The command writes into pipes that the
session sends:

    its own pipes      output that appears in the cell, in order with everything else
    a pipe made here   captured output, read while waiting for the host, so that no command blocks
                       on a full pipe

Expansions happen beforehand: the host sees the exact words that run.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from . import host_calls

_READ_SIZE = 64 * 1024

# The environment of a fresh session. None if the session may start programs itself.
_fresh_variables: dict[str, str] | None = None


class CommandRefused(PermissionError):
    """A program was not started, because it needs an approval that it did not get. The message
    states the reason.
    """


class CommandResult(NamedTuple):
    """The result of a command: its exit code, negative for a signal, and its captured output."""

    code: int
    out: bytes
    err: bytes


def require_approval() -> None:
    """Makes programs require a host call. Only for a session that has not run any code yet."""
    global _fresh_variables
    _fresh_variables = dict(os.environ)


def needs_approval() -> bool:
    return _fresh_variables is not None


def run(
    what: str | Sequence[str],
    stdin: str | None = None,
    stdout: int | None = None,
    stderr: int | None = None,
    folder: str | None = None,
    environment: Mapping[str, str] | None = None,
    timeout: float | None = None,
) -> CommandResult:
    """Runs a shell line, or a program with its arguments, to its end.

    `stdout` and `stderr` are None for output that belongs to the cell and subprocess.PIPE for
    output to capture; `stderr` may be subprocess.STDOUT. Raises CommandRefused, FileNotFoundError
    if the program does not exist, and subprocess.TimeoutExpired.
    """
    members: dict[str, Any] = {"command": what} if isinstance(what, str) else {"words": list(what)}
    members["folder"] = os.getcwd() if folder is None else os.path.abspath(folder)
    members["environment"] = _differences(os.environ if environment is None else environment)
    if stdin is not None:
        members["stdin"] = stdin
    if timeout is not None:
        members["timeout"] = timeout
    with _OutputPipes(stdout, stderr) as pipes:
        try:
            answer = host_calls.ask_for_command(members, pipes)
        except host_calls.HostCallError as cause:
            raise CommandRefused(str(cause)) from None
        out, err = pipes.captured()
    text = answer.get("text")
    if answer.get("ok") is True:
        if text:
            print(text, file=sys.stderr)
        return CommandResult(int(answer.get("code", 0)), out, err)
    if answer.get("reason") == "missing":
        raise FileNotFoundError(2, str(text), what if isinstance(what, str) else what[0])
    if answer.get("reason") == "timeout":
        raise subprocess.TimeoutExpired(what, timeout or 0.0, out, err)
    raise CommandRefused(str(text))


def _differences(variables: Mapping[str, str]) -> dict[str, str | None]:
    """Returns the differences of these variables from those of a fresh session. None marks a
    removed variable.
    """
    fresh = _fresh_variables or {}
    changed: dict[str, str | None] = {
        name: value for name, value in variables.items() if fresh.get(name) != value
    }
    changed.update((name, None) for name in fresh if name not in variables)
    return changed


class _OutputPipes:
    """The output pipes of a command, for the duration of the block."""

    def __init__(self, stdout: int | None, stderr: int | None) -> None:
        self._read_ends: dict[int, bytearray] = {}  # By the read end.
        self._sent_ends: list[int] = []  # Write ends that were created here.
        self._write_ends: list[int] = []
        self._captured: list[bytearray] = []
        self._redirected: list[tuple[int, bytearray]] = []
        streams = host_calls.write_ends()
        for standard, wanted in ((1, stdout), (2, stderr)):
            captured = bytearray()
            if wanted == subprocess.STDOUT:
                self._write_ends.append(self._write_ends[0])
            elif wanted is None and streams[standard - 1] is not None:
                self._write_ends.append(streams[standard - 1])
            else:
                self._make_pipe(captured)
                if wanted is None:
                    # The user has redirected this descriptor.
                    self._redirected.append((standard, captured))
                    captured = bytearray()
            self._captured.append(captured)

    def _make_pipe(self, captured: bytearray) -> None:
        read_end, write_end = os.pipe()
        os.set_blocking(read_end, False)
        self._read_ends[read_end] = captured
        self._sent_ends.append(write_end)
        self._write_ends.append(write_end)

    def __enter__(self) -> _OutputPipes:
        return self

    def __exit__(self, *_error: Any) -> None:
        self.close_sent()
        for read_end in self._read_ends:
            os.close(read_end)
        self._read_ends.clear()

    @property
    def write_ends(self) -> Sequence[int]:
        """The write ends that the command gets."""
        return self._write_ends

    def close_sent(self) -> None:
        """Closes our copies of the descriptors sent to the host, so that the pipe ends with the
        command.
        """
        while self._sent_ends:
            os.close(self._sent_ends.pop())

    def descriptors(self) -> Sequence[int]:
        """Returns the descriptors to read while waiting for the host."""
        return list(self._read_ends)

    def wait(self, milliseconds: int) -> None:
        poll = select.poll()
        for read_end in self._read_ends:
            poll.register(read_end, select.POLLIN)
        poll.poll(milliseconds)

    def take(self) -> None:
        """Reads available output, without waiting."""
        for read_end, captured in list(self._read_ends.items()):
            with contextlib.suppress(BlockingIOError):
                while data := os.read(read_end, _READ_SIZE):
                    captured += data
                os.close(read_end)
                del self._read_ends[read_end]

    def captured(self) -> tuple[bytes, bytes]:
        """Returns the captured output. Later output of a process that was left behind is lost."""
        self.take()
        for descriptor, data in self._redirected:
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
        return bytes(self._captured[0]), bytes(self._captured[1])
