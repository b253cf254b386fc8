"""Launcher: starts the programs that the host has approved, beside the sessions that asked for them
(`side_process`).

A session hands over pipes for the output of a program with the frame that asks for it. They are
kept here until the host has launched the program, or releases them.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import socket

from . import confine, forkserver, messages, mux_connection, poller, process_table, side_process
from .process_table import Program, Slot

_MAX_REPORT_BYTES = 4096
# Limits on an approved program's input, and on programs with pending input at a time.
_MAX_INPUT_BYTES = 1024 * 1024
_MAX_INPUTS = 64
# Pairs of pipes that sessions have handed over for programs and the host has not released.
_MAX_PIPES = 64


class Launcher:
    def __init__(
        self,
        connection: mux_connection.MuxConnection,
        events: poller.Poller,
        table: process_table.ProcessTable,
        refuses_programs: bool,
    ) -> None:
        self._connection, self._poller, self._table = connection, events, table
        # Whether the kernel refuses programs to sessions, so that a program can be kept apart.
        self._refuses_programs = refuses_programs
        # By the number under which the host knows each pair.
        self._pipes: dict[int, list[int]] = {}
        # Standard input of programs that are about to start.
        self._inputs: dict[int, bytearray] = {}

    def keep_pipes(self, descriptors: list[int]) -> int | None:
        """Keeps a program's output pipes and returns their number. Closes them if there are too
        many already.
        """
        if len(self._pipes) >= _MAX_PIPES:
            for descriptor in descriptors:
                os.close(descriptor)
            return None
        number = self._connection.new_number()
        self._pipes[number] = descriptors
        return number

    def release_pipes(self, number: int) -> None:
        for descriptor in self._pipes.pop(number, ()):
            os.close(descriptor)

    def add_input(self, message: messages.Input) -> None:
        number, text = message
        if number in self._inputs or len(self._inputs) < _MAX_INPUTS:
            taken = self._inputs.setdefault(number, bytearray())
            if len(taken) + len(text) <= _MAX_INPUT_BYTES:
                taken += text

    def discard_input(self, number: int) -> None:
        self._inputs.pop(number, None)

    def launch(self, slot: Slot, request: messages.Launch, environment: dict[str, str]) -> None:
        """Starts a program beside a session, whose fresh environment is given. Answers once its
        subreaper has reported the start.
        """
        given = self._inputs.pop(request["program"], None)
        outlets = self._pipes[request["pipes"]]
        if not self._refuses_programs or confine.version_of_landlock() < 1:
            why = "there is no landlock that could keep it apart from the session"
            self._connection.send(messages.failed(request["id"], why, "unsupported"))
            return
        if request["input"] != (None if given is None else len(given)):
            raise OSError("not all of its input has arrived")
        environment = dict(environment)
        for name, value in request["environment"]:
            environment.pop(name, None)
            if value is not None:
                environment[name] = value
        own = (slot.folder,) if slot.folder else (slot.work or "/", forkserver.FORKS)
        program = side_process.SideProcess(
            request["words"],
            request["folder"],
            environment,
            (*own, *forkserver.SHARED_FOLDERS),
        )
        reports, reporter = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stdin = side_process.input_of(None if given is None else bytes(given))
        try:
            with reporter:
                subreaper = side_process.start(program, stdin, outlets, reporter)
        finally:
            os.close(stdin)
        started = Program(request["program"], request["id"], reports)
        slot.programs[subreaper] = started
        self._poller.listen(reports.fileno(), lambda: self._read_report(slot, subreaper, started))

    def signal(self, program: Program, which: int) -> None:
        """Signals a program and its group while it runs. After its end, the process id may belong
        to another process.
        """
        if program.process is not None:
            process_table.kill_group(program.process, which)
        elif program.request is not None and which == signal.SIGKILL:
            program.is_unwanted = True

    def lose(self, slot: Slot, subreaper: int, program: Program) -> None:
        """Handles the end of a subreaper, after or together with all its descendants."""
        self._poller.ignore(program.reports.fileno())
        program.reports.close()
        slot.programs.pop(subreaper, None)
        if program.request is not None:
            self._connection.send(messages.failed(program.request, "its process ended on the way"))
        if program.process is not None:
            self._report_exit(program, signal.SIGKILL)
            self._table.end_strays()

    def _read_report(self, slot: Slot, subreaper: int, program: Program) -> None:
        message = program.reports.recv(_MAX_REPORT_BYTES)
        if not message:
            self.lose(slot, subreaper, program)
            return
        report = json.loads(message)
        if "started" in report:
            request, program.request = program.request or 0, None
            if report["error"] is None:
                program.process = report["started"]
                answer = messages.done(request)
            elif report["error"] == errno.ENOENT:
                answer = messages.failed(request, "there is no such program", "missing")
            else:
                answer = messages.failed(request, os.strerror(report["error"]), "refused")
            self._connection.send(answer)
            if program.process is not None and program.is_unwanted:
                self.signal(program, signal.SIGKILL)
        elif program.process is not None:
            program.process = None
            self._report_exit(program, report["status"])

    def _report_exit(self, program: Program, status: int) -> None:
        self._connection.send(messages.exited(program.number, exit_status(status)))


def exit_status(status: int) -> messages.ExitStatus:
    """Splits an exit status as `waitpid` returns it."""
    if os.WIFSIGNALED(status):
        return {"signal": os.WTERMSIG(status)}
    return {"code": os.WEXITSTATUS(status)}
