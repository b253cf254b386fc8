"""Commands: how code of a cell has programs run where its own process may start none.

There the kernel refuses `execve` to the session and to all that it forks. The host is asked instead (`asking`, question `shell`): it decides,
perhaps with a person, and starts beside the session exactly what was asked for. The command writes into pipes that the session hands over:

    its own lanes      what appears in the cell, in order with everything else
    a pipe made here   what somebody wants to have, taken while the host is waited for; so no command stands still for a full pipe

What is expanded is expanded before: the host is shown the words that run.
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

# What a fresh session has in its environment. None where the session may start programs itself.
_fresh_variables: dict[str, str] | None = None


class CommandRefused(PermissionError):
    """A program was not started, because it needs an approval that it did not get. Its text says why."""


class Finished(NamedTuple):
    """How a command ended: its exit code, negative for a signal, and what was wanted of its output."""

    code: int
    out: bytes
    err: bytes


def ask_from_now_on() -> None:
    """Says that programs must be asked for. For a session that has not run any code yet."""
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
    """Has a line for the shell, or the words of a program, run to its end.

    `stdout` and `stderr` are None for what belongs to the cell, subprocess.PIPE for what is wanted, and `stderr` may be subprocess.STDOUT. Raises
    CommandRefused, FileNotFoundError when there is no such program, and subprocess.TimeoutExpired.
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
    """Returns how these variables differ from those of a fresh session; None stands for one that is gone."""
    fresh = _fresh_variables or {}
    changed: dict[str, str | None] = {name: value for name, value in variables.items() if fresh.get(name) != value}
    changed.update((name, None) for name in fresh if name not in variables)
    return changed


class _Pipes:
    """Where a command writes to, for as long as the block lasts."""

    def __init__(self, stdout: int | None, stderr: int | None) -> None:
        self._ours: dict[int, bytearray] = {}  # By the read end.
        self._theirs: list[int] = []  # Write ends that were made here.
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
                    # The user has led this descriptor elsewhere.
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
        """The ends that the command gets."""
        return self._outlets

    def hand_over(self) -> None:
        """Closes our copies of what the host has received, so that the end of the command is the end of the pipe."""
        while self._theirs:
            os.close(self._theirs.pop())

    def descriptors(self) -> Sequence[int]:
        """What is to be read while the host is waited for."""
        return list(self._ours)

    def wait(self, milliseconds: int) -> None:
        poll = select.poll()
        for ours in self._ours:
            poll.register(ours, select.POLLIN)
        poll.poll(milliseconds)

    def take(self) -> None:
        """Takes what has arrived, without waiting."""
        for ours, taken in list(self._ours.items()):
            with contextlib.suppress(BlockingIOError):
                while data := os.read(ours, _READ_SIZE):
                    taken += data
                os.close(ours)
                del self._ours[ours]

    def taken(self) -> tuple[bytes, bytes]:
        """Returns what was wanted of the output. What a process that was left behind writes later is lost."""
        self.take()
        for descriptor, data in self._passed_on:
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
        return bytes(self._taken[0]), bytes(self._taken[1])
