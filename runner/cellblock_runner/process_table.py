"""Process table: which session every process of a container belongs to, according to the kernel.

Each session has a slot. Its processes are descendants of its subreapers: one above the interpreter,
and one above each program that the host has started beside it. So all of them can be found, even
those that a session has left behind. A subreaper and a checkpoint belong to their slot, and are not
processes of the session.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from typing import NamedTuple

from . import mux_connection, sockets

# How long the last output of an ended interpreter may wait for a host that does not read.
DRAIN_TIMEOUT = 1.0
# Timeout for ending the processes of a session. After it, the attempt fails, and the container is
# ended.
_END_TIMEOUT = 8.0


class Interpreter:
    """One interpreter, its channel, and the socket on which its copies send their handshake."""

    def __init__(
        self, number: int, slot: Slot, channel: mux_connection.Channel, copies: socket.socket
    ) -> None:
        self.number, self.slot = number, slot
        self.channel, self.copies = channel, copies
        self.process: int | None = None
        self.status: int | None = None
        # Deadline for forwarding its remaining output.
        self.deadline: float | None = None

    def ended(self, status: int) -> None:
        if self.status is None:
            self.status = status
            self.deadline = time.monotonic() + DRAIN_TIMEOUT


class Checkpoint(NamedTuple):
    process: int
    orders: socket.socket


class Program:
    """A program that the host has started beside a session."""

    def __init__(self, number: int, request: int, reports: socket.socket) -> None:
        self.number, self.reports = number, reports
        # Its process id and process group, from its start to its end.
        self.process: int | None = None
        # The request that waits for the result of its start.
        self.request: int | None = request
        # Cancelled before it started.
        self.is_unwanted = False


class Slot:
    """One session of a container: its subreapers, interpreter, programs and checkpoints."""

    def __init__(self, number: int, folder: str | None, work: str | None) -> None:
        self.number = number
        # A folder that is removed with the session.
        self.folder = folder
        # Its working folder.
        self.work = work
        self.subreapers: dict[int, socket.socket] = {}
        # Programs that the host has started beside it, by their subreapers.
        self.programs: dict[int, Program] = {}
        self.interpreter: Interpreter | None = None
        self.checkpoints: dict[int, Checkpoint] = {}
        # The checkpoint that the host has requested and the id of that request, until the copy
        # sends its handshake.
        self.expected: tuple[int, int] | None = None


class ProcessTable:
    def __init__(self, warm: int) -> None:
        # The warm process.
        self.warm = warm
        self.slots: dict[int, Slot] = {}
        self.interpreters: dict[int, Interpreter] = {}
        # Subreapers that were requested and have not reported yet.
        self.starting = 0

    def program(self, number: int) -> Program | None:
        every = (program for slot in self.slots.values() for program in slot.programs.values())
        return next((program for program in every if program.number == number), None)

    def signal_interpreter(self, interpreter: Interpreter, which: int) -> None:
        """Signals an interpreter that has not ended."""
        if interpreter.process is None or interpreter.status is not None:
            return
        # The process id was reported from inside the sandbox, and may be that of another session.
        if self._subreaper_of(interpreter.process, _parents()) in interpreter.slot.subreapers:
            kill(interpreter.process, which)

    def end_session(self, slot: Slot) -> None:
        """Ends every process of a session except its subreapers and checkpoints."""
        spared = {checkpoint.process for checkpoint in slot.checkpoints.values()}
        own = {*slot.subreapers, *slot.programs}
        if own:
            self._end(
                lambda process, parents: (
                    self._subreaper_of(process, parents) in own and process not in spared
                )
            )

    def end_strays(self) -> None:
        """Ends processes that no longer belong to a session, because their subreaper has ended."""
        if self.starting:
            return  # A subreaper that is being started belongs to no session yet.
        known = {self.warm}
        for slot in self.slots.values():
            known.update(slot.subreapers)
            known.update(slot.programs)
            known.update(checkpoint.process for checkpoint in slot.checkpoints.values())

        def is_stray(process: int, parents: dict[int, int]) -> bool:
            while process > 1:
                if process in known:
                    return False
                process = parents.get(process, 0)
            return True

        self._end(is_stray)
        for interpreter in list(self.interpreters.values()):
            if interpreter.process is not None and not interpreter.slot.subreapers:
                interpreter.ended(signal.SIGKILL)

    def owner(self, address: str, port: int) -> int | None:
        """Returns the slot of the session that made a connection, if the kernel shows it and there
        is exactly one.
        """
        parents = _parents()
        holders = sockets.holders(sockets.at(address, port), parents)
        subreapers = {self._subreaper_of(process, parents) for process in holders}
        slots = {
            slot.number
            for slot in self.slots.values()
            if not subreapers.isdisjoint((*slot.subreapers, *slot.programs))
        }
        return slots.pop() if len(slots) == 1 else None

    def _subreaper_of(self, process: int, parents: dict[int, int]) -> int | None:
        """Returns the nearest subreaper above a process. Returns None for subreapers themselves."""
        subreapers = {
            subreaper
            for slot in self.slots.values()
            for subreaper in (*slot.subreapers, *slot.programs)
        }
        if process in subreapers:
            return None
        while process > 1:
            process = parents.get(process, 0)
            if process in subreapers:
                return process
        return None

    def _end(self, is_meant: Callable[[int, dict[int, int]], bool]) -> None:
        """Stops all matching processes until no new one appears, and then kills them: a stopped
        process cannot create more.
        """
        deadline = time.monotonic() + _END_TIMEOUT
        stopped: set[int] = set()
        while time.monotonic() < deadline:
            parents = _parents()
            victims = {process for process in parents if process > 1 and is_meant(process, parents)}
            if not victims - stopped:
                break
            for process in victims - stopped:
                kill(process, signal.SIGSTOP)
            stopped |= victims
        while time.monotonic() < deadline:
            for process in stopped:
                kill(process, signal.SIGKILL)
            parents = _parents()
            stopped = {process for process in parents if process > 1 and is_meant(process, parents)}
            if not stopped:
                return
            time.sleep(0.0005)
        os.write(2, f"{len(stopped)} processes could not be ended\n".encode())
        os._exit(3)  # The end of the container ends them.


def kill(process: int, which: int) -> None:
    try:
        os.kill(process, which)
    except ProcessLookupError:
        pass  # It has already ended.


def kill_group(leader: int, which: int) -> None:
    try:
        os.killpg(leader, which)
    except ProcessLookupError:
        pass  # The whole group has already ended.


def _parents() -> dict[int, int]:
    """Returns the parent of every process that has not ended."""
    parents = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb", 0) as file:
                state, parent = file.read().rpartition(b")")[2].split()[:2]
        except (OSError, ValueError):
            continue
        if state not in (b"Z", b"X"):
            parents[int(name)] = int(parent)
    return parents
