"""Commands: how code of a cell runs programs where its own process may not start any.

There the kernel refuses `execve` to the session and to all processes that it forks. The session
asks the host instead (`asking`, call `shell`): the host decides, perhaps after asking a person, and
starts exactly the requested program beside the session. The command writes into pipes that the
session hands over:

    its own lanes      output that appears in the cell, in order with everything else
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

from . import asking

_READ_SIZE = 64 * 1024

# The environment of a fresh session. None if the session may start programs itself.
_fresh_variables: dict[str, str] | None = None


class CommandRefused(PermissionError):
    """A program was not started, because it needs an approval that it did not get. The message
    states the reason.
    """


class Finished(NamedTuple):
    """The result of a command: its exit code, negative for a signal, and its captured output."""

    code: int
    out: bytes
    err: bytes


def ask_from_now_on() -> None:
    """Makes programs require a host call. Only for a session that has not run any code yet."""
    global _fresh_variables
    _fresh_variables = dict(os.environ)


def must_be_asked_for() -> bool:
    return _fresh_variables is not None


def run(
    what: str | Sequence[str],
    stdin: str | None = None,
    stdout: int | None = None,
    stderr: int | None = None,
    folder: str | None = None,
    environment: Mapping[str, str] | None = None,
    timeout: float | None = None,
) -> Finished:
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
    with _Pipes(stdout, stderr) as pipes:
        try:
            answer = asking.ask_for_command(members, pipes)
        except asking.CannotAsk as cause:
            raise CommandRefused(str(cause)) from None
        out, err = pipes.taken()
    text = answer.get("text")
    if answer.get("ok") is True:
        if text:
            print(text, file=sys.stderr)
        return Finished(int(answer.get("code", 0)), out, err)
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


class _Pipes:
    """The output pipes of a command, for the duration of the block."""

    def __init__(self, stdout: int | None, stderr: int | None) -> None:
        self._ours: dict[int, bytearray] = {}  # By the read end.
        self._theirs: list[int] = []  # Write ends that were created here.
        self._outlets: list[int] = []
        self._taken: list[bytearray] = []
        self._passed_on: list[tuple[int, bytearray]] = []
        lanes = asking.outlets()
        for standard, wanted in ((1, stdout), (2, stderr)):
            taken = bytearray()
            if wanted == subprocess.STDOUT:
                self._outlets.append(self._outlets[0])
            elif wanted is None and lanes[standard - 1] is not None:
                self._outlets.append(lanes[standard - 1])
            else:
                self._make(taken)
                if wanted is None:
                    # The user has redirected this descriptor.
                    self._passed_on.append((standard, taken))
                    taken = bytearray()
            self._taken.append(taken)

    def _make(self, taken: bytearray) -> None:
        ours, theirs = os.pipe()
        os.set_blocking(ours, False)
        self._ours[ours] = taken
        self._theirs.append(theirs)
        self._outlets.append(theirs)

    def __enter__(self) -> _Pipes:
        return self

    def __exit__(self, *_error: Any) -> None:
        self.hand_over()
        for ours in self._ours:
            os.close(ours)
        self._ours.clear()

    @property
    def outlets(self) -> Sequence[int]:
        """The write ends that the command gets."""
        return self._outlets

    def hand_over(self) -> None:
        """Closes our copies of the descriptors sent to the host, so that the pipe ends with the
        command.
        """
        while self._theirs:
            os.close(self._theirs.pop())

    def descriptors(self) -> Sequence[int]:
        """Returns the descriptors to read while waiting for the host."""
        return list(self._ours)

    def wait(self, milliseconds: int) -> None:
        poll = select.poll()
        for ours in self._ours:
            poll.register(ours, select.POLLIN)
        poll.poll(milliseconds)

    def take(self) -> None:
        """Reads available output, without waiting."""
        for ours, taken in list(self._ours.items()):
            with contextlib.suppress(BlockingIOError):
                while data := os.read(ours, _READ_SIZE):
                    taken += data
                os.close(ours)
                del self._ours[ours]

    def taken(self) -> tuple[bytes, bytes]:
        """Returns the captured output. Later output of a process that was left behind is lost."""
        self.take()
        for descriptor, data in self._passed_on:
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
        return bytes(self._taken[0]), bytes(self._taken[1])
