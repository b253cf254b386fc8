"""The supervisor: the first process of a container, which connects the single stream to the host
with all other processes in the container.

It never runs user code and imports nothing that a user could have written. The warm process and the
sessions are its descendants (`family`). It carries their frames and output over one stream
(`strands`), forwards signals, finds and ends processes that a session left behind, and reports exit
statuses. When the stream ends, the supervisor exits, and with it, as the first process, everything
in the container.

The host trusts it as little as possible: whether the container is alive, what it uses and why it
ended is reported by the container engine.
"""

from __future__ import annotations

import array
import errno
import fcntl
import json
import os
import select
import selectors
import shutil
import signal
import socket
import stat
import struct
import sys
import time
from typing import Any, NamedTuple, NoReturn

from . import confine, errands, family, sockets, strands

_IN, _OUT = 0, 1
_READ = 64 * 1024
_LARGEST_REPORT = 4096
# The greeting of the warm process includes its environment.
_LARGEST_GREETING = 1024 * 1024
# Limits on an approved program's input, and on programs with pending input at a time.
_LARGEST_INPUT = 1024 * 1024
_MOST_INPUTS = 64
# Pairs of pipes that sessions have handed over for programs and the host has not released.
_MOST_OUTLETS = 64

# How long the last output of an ended interpreter may wait for a host that does not read.
_LAST_WORDS = 1.0
# Timeout for ending the processes of a session. After it, the attempt fails, and the container is
# ended.
_SWEEPING = 8.0
# Pipes of earlier cells that are still drained, so that leftover processes neither block nor die.
_MOST_RETIRED = 16
# No process id and no status is larger.
_LARGEST_NUMBER = (1 << 31) - 1
# The oom_score_adj of checkpoints, which go first when memory runs out.
_OF_CHECKPOINTS = 900

# Pipe strands are numbered above interpreters, whose numbers the host chooses.
_FIRST_PIPE = 1 << 31

_credentials = struct.Struct("3i")


class Pipe:
    """One of an interpreter's pipes, with its flow-control credit."""

    def __init__(self, strand: int, descriptor: int, owner: Interpreter) -> None:
        self.strand, self.descriptor, self.owner = strand, descriptor, owner
        self.credit = strands.PIPE_CREDIT
        self.retired = False


class Interpreter:
    """One interpreter and its channel."""

    def __init__(
        self, number: int, member: Member, channel: socket.socket, copies: socket.socket
    ) -> None:
        self.number, self.member = number, member
        self.channel: socket.socket | None = channel
        self.copies = copies
        self.process: int | None = None
        self.credit = strands.CHANNEL_CREDIT
        self.incoming = bytearray()
        self.pipes: list[Pipe] = []
        self.status: int | None = None
        # Deadline for reading its remaining output.
        self.patience: float | None = None


class Checkpoint(NamedTuple):
    process: int
    orders: socket.socket


class Program:
    """A program that the host has started beside a session."""

    def __init__(self, number: int, reports: socket.socket) -> None:
        self.number, self.reports = number, reports
        # Its process id and process group, from its start to its end.
        self.process: int | None = None
        # The request that waits for the result of its start.
        self.ask: int | None = None
        # Cancelled before it started.
        self.is_unwanted = False


class Member:
    """One session of the process tree: its subreapers (`stewards`), interpreter and checkpoints."""

    def __init__(self, number: int, folder: str | None, work: str | None) -> None:
        self.number = number
        # A folder that is removed with the session.
        self.folder = folder
        # Its working folder.
        self.work = work
        self.stewards: dict[int, socket.socket] = {}
        # Programs that the host has started beside it, by their subreapers.
        self.programs: dict[int, Program] = {}
        self.interpreter: Interpreter | None = None
        self.checkpoints: dict[int, Checkpoint] = {}
        # The checkpoint that the host has requested and the id of that request, until the copy
        # sends its handshake.
        self.expected: tuple[int, int] | None = None


class Supervisor:
    def __init__(self, plan: bytes, warm: int, orders: int) -> None:
        self._plan = plan
        self._selector = selectors.DefaultSelector()
        self._decoder = strands.Decoder()
        self._outgoing: list[bytes] = []
        self._members: dict[int, Member] = {}
        self._interpreters: dict[int, Interpreter] = {}
        self._pipes: dict[int, Pipe] = {}
        self._next_pipe = _FIRST_PIPE
        # Pipes for programs, by the number under which the host knows each pair.
        self._outlets: dict[int, list[int]] = {}
        # Standard input of programs that are about to start.
        self._inputs: dict[int, bytearray] = {}
        # The environment of a fresh session.
        self._environment: dict[str, str] | None = None
        self._refuses_programs = json.loads(plan).get("programs") == "refused"
        # Subreapers that were requested and have not reported yet.
        self._unborn = 0
        # Exit statuses reported before the process id was known.
        self._early: dict[int, int] = {}
        self._warm = warm
        self._orders = socket.socket(fileno=orders)

    def run(self, heard: bytes) -> NoReturn:
        os.set_blocking(_IN, False)
        self._selector.register(_IN, selectors.EVENT_READ, self._hear_host)
        wake_reader, wake_writer = os.pipe()
        for end in (wake_reader, wake_writer):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wake_writer)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for ignored in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
            signal.signal(ignored, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
        self._selector.register(wake_reader, selectors.EVENT_READ, lambda: self._bury(wake_reader))
        self._listen(self._orders.fileno(), self._hear_warm)
        self._heed(heard)
        while True:
            waiting = [
                each.patience for each in self._interpreters.values() if each.patience is not None
            ]
            pause = max(0.0, min(waiting) - time.monotonic()) if waiting else None
            for key, _ in self._selector.select(pause):
                # An earlier callback may have closed it, and its descriptor number may be in use
                # again.
                if self._selector.get_map().get(key.fd) is key:
                    key.data()
            for interpreter in list(self._interpreters.values()):
                if interpreter.patience is not None:
                    self._finish(interpreter)
            self._flush()

    # To and from the host.

    def _say(self, message: bytes) -> None:
        self._outgoing.append(message)

    def _answer(self, ask: int, why: str | None = None, kind: str | None = None) -> None:
        self._say(strands.encode_json(b"a", ask, {"ok": why is None, "why": why, "kind": kind}))

    def _flush(self) -> None:
        data = memoryview(b"".join(self._outgoing))
        self._outgoing.clear()
        while data:
            try:
                data = data[os.write(_OUT, data) :]
            except BlockingIOError:
                select.select((), (_OUT,), ())
            except OSError:
                os._exit(0)  # The host no longer reads.

    def _hear_host(self) -> None:
        try:
            data = os.read(_IN, _READ)
        except BlockingIOError:
            return
        if not data:
            os._exit(0)  # The host is gone.
        self._heed(data)

    def _heed(self, data: bytes) -> None:
        self._decoder.feed(data)
        while (message := self._decoder.next()) is not None:
            self._obey(*message)

    def _obey(self, kind: bytes, number: int, rest: bytes) -> None:
        if kind == b"d":
            interpreter = self._interpreters.get(number)
            if interpreter is not None and interpreter.channel is not None:
                interpreter.incoming += rest
                self._push(interpreter)
        elif kind == b"w":
            self._give_credit(number, strands.amount(rest))
        elif kind == b"i":
            self._signal(number, signal.SIGINT)
        elif kind == b"k":
            self._kill(number)
        elif kind == b"h":
            self._hang_up(number)
        elif kind == b"t":
            self._take_input(number, rest)
        elif kind == b"y":
            self._release_outlets(number)
        else:
            self._carry_out(kind, number, json.loads(rest))

    def _carry_out(self, kind: bytes, number: int, order: dict[str, Any]) -> None:
        ask = order["ask"]
        try:
            if kind == b"b":
                self._begin(number, order)
            elif kind == b"c":
                self._members[number].expected = (order["checkpoint"], ask)
            elif kind == b"u":
                self._undo(number, order)
            elif kind == b"f":
                self._fork(number, order)
            elif kind == b"o":
                self._forget(number, order["checkpoint"])
                self._answer(ask)
            elif kind == b"x":
                self._end_member(number)
                self._answer(ask)
            elif kind == b"g":
                self._launch(number, order)
            elif kind == b"v":
                self._say(
                    strands.encode_json(
                        b"a",
                        ask,
                        {"ok": True, "member": self._owner(order["address"], order["port"])},
                    )
                )
            elif kind == b"n":
                _knock(order["word"], (order["address"], order["port"]))
                self._answer(ask)
            else:
                self._answer(ask, "the supervisor does not know this order")
        except (OSError, KeyError) as cause:
            self._answer(ask, f"{type(cause).__name__}: {cause}")

    def _give_credit(self, strand: int, amount: int) -> None:
        pipe = self._pipes.get(strand)
        if pipe is not None:
            pipe.credit += amount
            if pipe.credit == amount:
                self._listen(pipe.descriptor, lambda: self._pull(pipe))
            return
        interpreter = self._interpreters.get(strand)
        if interpreter is not None and interpreter.channel is not None:
            interpreter.credit += amount
            self._watch_channel(interpreter)

    # Orders.

    def _begin(self, number: int, order: dict[str, Any]) -> None:
        member = self._members.get(number)
        if member is None:
            member = self._members[number] = Member(number, None, order["work"])
        self._sweep(member, with_checkpoints=False)
        self._make(member, order, self._orders, {"gate": order["gate"], "work": order["work"]})

    def _fork(self, number: int, order: dict[str, Any]) -> None:
        checkpoint = self._members[order["of"]].checkpoints[order["checkpoint"]]
        folder = None
        if order["folder"]:
            folder = f"{family.FORKS}/{number}"
            os.mkdir(folder, 0o700)
        member = self._members[number] = Member(
            number, folder, folder or self._members[order["of"]].work
        )
        self._make(member, order, checkpoint.orders, {"work": folder}, gate=b"f")

    def _make(
        self,
        member: Member,
        order: dict[str, Any],
        maker: socket.socket,
        words: dict[str, Any],
        gate: bytes = b"",
    ) -> None:
        """Requests a subreaper with an interpreter. Both report on a socket of their own."""
        interpreter, theirs = self._prepare(member, order["interpreter"], gate)
        reports, reporter = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        reports.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._unborn += 1
        self._listen(
            reports.fileno(), lambda: self._hear_steward(reports, interpreter, order["ask"])
        )
        with reporter:
            self._send_order(maker, words, (*theirs, reporter))

    def _undo(self, number: int, order: dict[str, Any]) -> None:
        member = self._members[number]
        checkpoint = member.checkpoints[order["checkpoint"]]
        self._sweep(member, with_checkpoints=False)
        interpreter, theirs = self._prepare(member, order["interpreter"], b"u")
        self._send_order(checkpoint.orders, {"work": None}, theirs)
        checkpoint.orders.settimeout(_LAST_WORDS)
        message = checkpoint.orders.recv(_LARGEST_REPORT)
        checkpoint.orders.settimeout(None)
        if not message:
            raise OSError("the checkpoint has ended")
        interpreter.process = _numbers(message).get("interpreter")
        if interpreter.process is None:
            raise OSError("the checkpoint does not say what it has made")
        self._answer(order["ask"])
        self._recall_end(interpreter)

    def _prepare(
        self, member: Member, number: int, gate: bytes
    ) -> tuple[Interpreter, tuple[socket.socket, socket.socket]]:
        ours, channel = socket.socketpair()
        mine, copies = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        mine.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        ours.setblocking(False)
        if gate:
            ours.send(gate)
        interpreter = Interpreter(number, member, ours, mine)
        member.interpreter = self._interpreters[number] = interpreter
        self._watch_channel(interpreter)
        self._listen(mine.fileno(), lambda: self._hear_copy(interpreter))
        return interpreter, (channel, copies)

    def _send_order(
        self, maker: socket.socket, words: dict[str, Any], theirs: tuple[socket.socket, ...]
    ) -> None:
        try:
            socket.send_fds(maker, [json.dumps(words).encode()], [each.fileno() for each in theirs])
        finally:
            for each in theirs:
                each.close()

    def _forget(self, number: int, checkpoint: int) -> None:
        member = self._members.get(number)
        kept = member.checkpoints.pop(checkpoint, None) if member is not None else None
        if member is not None and member.expected is not None and member.expected[0] == checkpoint:
            member.expected = None
        if kept is not None:
            self._ignore(kept.orders.fileno())
            kept.orders.close()
            _kill(kept.process, signal.SIGKILL)

    def _end_member(self, number: int) -> None:
        member = self._members.get(number)
        if member is None:
            return
        self._sweep(member, with_checkpoints=True)
        for steward, reports in list(member.stewards.items()):
            _kill(steward, signal.SIGKILL)
            self._drop_steward(member, steward, reports)
        for steward, program in list(member.programs.items()):
            _kill(steward, signal.SIGKILL)
            self._lose_program(member, steward, program)
        for interpreter in [each for each in self._interpreters.values() if each.member is member]:
            # Its output is no longer needed.
            interpreter.status = (
                signal.SIGKILL if interpreter.status is None else interpreter.status
            )
            self._tell_end(interpreter)
        del self._members[number]
        if member.folder is not None:
            shutil.rmtree(member.folder, ignore_errors=True)

    # The family.

    def _start_warm(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._warm = os.fork()
        if self._warm == 0:
            family.become_warm(theirs.detach(), self._plan)
        theirs.close()
        self._orders = ours
        self._listen(ours.fileno(), self._hear_warm)

    def _hear_warm(self) -> None:
        message = self._orders.recv(_LARGEST_GREETING)
        if message:
            if self._refuses_programs and confine.count_of_filters(
                self._warm
            ) <= confine.count_of_filters(os.getpid()):
                os.write(2, b"the kernel does not show that programs are refused to sessions\n")
                os._exit(3)
            if self._environment is None:
                # Later ones may have read files written by sessions.
                self._environment = json.loads(message)["environment"]
            landlock = confine.version_of_landlock()
            self._say(
                strands.encode_json(
                    b"r", 0, {"python": sys.version.split()[0], "landlock": landlock}
                )
            )
            return
        # A session has ended it. An identical process replaces it.
        self._ignore(self._orders.fileno())
        self._orders.close()
        self._start_warm()

    def _hear_steward(self, reports: socket.socket, interpreter: Interpreter, ask: int) -> None:
        message, ancillary, _, _ = reports.recvmsg(
            _LARGEST_REPORT, socket.CMSG_SPACE(_credentials.size)
        )
        member = interpreter.member
        steward = next(
            (process for process, theirs in member.stewards.items() if theirs is reports), None
        )
        if not message:
            self._ignore(reports.fileno())
            reports.close()
            if steward is None:
                self._unborn -= 1
                self._answer(ask, "the interpreter did not start")
            else:
                del member.stewards[steward]
            self._end_strays()
            return
        report = _numbers(message)
        if steward is None:
            self._unborn -= 1
            member.stewards[_sender(ancillary)] = reports
            interpreter.process = report.get("interpreter")
            self._answer(ask)
            return
        process, status = report.get("ended"), report.get("status")
        current = member.interpreter
        if process is None or status is None or current is None:
            return
        if current.process == process:
            self._ended(current, status)
        elif current.process is None:
            self._early[process] = status

    def _hear_copy(self, interpreter: Interpreter) -> None:
        """Handles the handshake of a checkpoint, or of a process that claims to be one."""
        message, ancillary, _, _ = interpreter.copies.recvmsg(
            _LARGEST_REPORT,
            socket.CMSG_SPACE(_credentials.size) + socket.CMSG_SPACE(8 * array.array("i").itemsize),
        )
        descriptors = _descriptors(ancillary)
        member = interpreter.member
        if not message:
            self._ignore(interpreter.copies.fileno())
        sender = _sender(ancillary) if message else 0
        # The session itself is not a copy.
        if (
            not sender
            or sender == interpreter.process
            or member.expected is None
            or len(descriptors) != 1
        ):
            for descriptor in descriptors:
                os.close(descriptor)
            return
        orders = _packet_socket(descriptors[0])
        if orders is None:
            return
        (number, ask), member.expected = member.expected, None
        checkpoint = Checkpoint(sender, orders)
        _offer_to_die(checkpoint.process, _OF_CHECKPOINTS)
        member.checkpoints[number] = checkpoint
        self._listen(checkpoint.orders.fileno(), lambda: self._lose_checkpoint(member, number))
        self._answer(ask)

    def _lose_checkpoint(self, member: Member, number: int) -> None:
        """Handles the end of a checkpoint: it never sends unprompted, so its socket has closed."""
        checkpoint = member.checkpoints.pop(number, None)
        if checkpoint is not None:
            self._ignore(checkpoint.orders.fileno())
            checkpoint.orders.close()
            self._say(strands.encode_json(b"l", member.number, {"checkpoint": number}))

    def _recall_end(self, interpreter: Interpreter) -> None:
        """Applies an exit status that the subreaper reported before the process id was known."""
        status = self._early.pop(interpreter.process or 0, None)
        self._early.clear()
        if status is not None:
            self._ended(interpreter, status)

    def _ended(self, interpreter: Interpreter, status: int) -> None:
        if interpreter.status is None:
            interpreter.status = status
            interpreter.patience = time.monotonic() + _LAST_WORDS

    def _finish(self, interpreter: Interpreter) -> None:
        """Reports the end of an interpreter once all its output has been forwarded, or the deadline
        for that has passed.
        """
        waits = False
        if interpreter.channel is not None:
            waits |= self._carry(interpreter)
        for pipe in list(interpreter.pipes):
            if not pipe.retired:
                waits |= self._pull(pipe)
        if waits and interpreter.patience is not None and time.monotonic() < interpreter.patience:
            return
        self._tell_end(interpreter)

    def _tell_end(self, interpreter: Interpreter) -> None:
        self._close(interpreter)
        self._tell_status(interpreter.number, interpreter.status or 0)

    def _tell_status(self, number: int, status: int) -> None:
        how = (
            {"signal": os.WTERMSIG(status)}
            if os.WIFSIGNALED(status)
            else {"code": os.WEXITSTATUS(status)}
        )
        self._say(strands.encode_json(b"e", number, how))

    def _close(self, interpreter: Interpreter) -> None:
        self._interpreters.pop(interpreter.number, None)
        interpreter.patience = None
        if interpreter.channel is not None:
            self._ignore(interpreter.channel.fileno())
            interpreter.channel.close()
            interpreter.channel = None
        self._ignore(interpreter.copies.fileno())
        interpreter.copies.close()
        for pipe in interpreter.pipes:
            self._drop_pipe(pipe)
        interpreter.pipes.clear()
        if interpreter.member.interpreter is interpreter:
            interpreter.member.interpreter = None

    def _bury(self, wake_reader: int) -> None:
        """Reaps ended children. The sockets identify them."""
        try:
            os.read(wake_reader, _LARGEST_REPORT)
        except BlockingIOError:
            pass
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass

    def _drop_steward(self, member: Member, steward: int, reports: socket.socket) -> None:
        self._ignore(reports.fileno())
        reports.close()
        member.stewards.pop(steward, None)

    # Programs.

    def _announce_outlets(
        self, interpreter: Interpreter, descriptors: list[int], data: bytes
    ) -> None:
        """Keeps a program's output pipes until the host has used or released them."""
        if len(self._outlets) >= _MOST_OUTLETS:
            for descriptor in descriptors:
                os.close(descriptor)
            self._say(strands.encode(b"d", interpreter.number, data))
            return
        number, self._next_pipe = self._next_pipe, self._next_pipe + 1
        self._outlets[number] = descriptors
        self._say(strands.encode_outlets(b"q", interpreter.number, number, data))

    def _release_outlets(self, number: int) -> None:
        for descriptor in self._outlets.pop(number, ()):
            os.close(descriptor)

    def _take_input(self, number: int, text: bytes) -> None:
        if number in self._inputs or len(self._inputs) < _MOST_INPUTS:
            taken = self._inputs.setdefault(number, bytearray())
            if len(taken) + len(text) <= _LARGEST_INPUT:
                taken += text

    def _launch(self, number: int, order: dict[str, Any]) -> None:
        """Starts a program beside a session. Answers once its subreaper has reported the start."""
        given = self._inputs.pop(order["program"], None)
        member, outlets = self._members[number], self._outlets[order["outlets"]]
        if not self._refuses_programs or confine.version_of_landlock() < 1:
            self._answer(
                order["ask"],
                "there is no landlock that could keep it apart from the session",
                "unsupported",
            )
            return
        if order["input"] != (None if given is None else len(given)):
            raise OSError("not all of its input has arrived")
        environment = {**(self._environment or {})}
        for name, value in order["environment"]:
            environment.pop(name, None)
            if value is not None:
                environment[name] = value
        own = (member.folder,) if member.folder else (member.work or "/", family.FORKS)
        errand = errands.Errand(
            order["words"], order["folder"], environment, (*own, *family.SHARED_FOLDERS)
        )
        reports, reporter = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stdin = errands.input_of(None if given is None else bytes(given))
        try:
            with reporter:
                steward = errands.start(errand, stdin, outlets, reporter)
        finally:
            os.close(stdin)
        program = member.programs[steward] = Program(order["program"], reports)
        program.ask = order["ask"]
        self._listen(reports.fileno(), lambda: self._hear_program(member, steward, program))

    def _hear_program(self, member: Member, steward: int, program: Program) -> None:
        message = program.reports.recv(_LARGEST_REPORT)
        if not message:
            self._lose_program(member, steward, program)
            return
        report = json.loads(message)
        if "begun" in report:
            ask, program.ask = program.ask, None
            if report["fault"] is None:
                program.process = report["begun"]
                self._answer(ask or 0)
                if program.is_unwanted:
                    self._signal_program(program, signal.SIGKILL)
            elif report["fault"] == errno.ENOENT:
                self._answer(ask or 0, "there is no such program", "missing")
            else:
                self._answer(ask or 0, os.strerror(report["fault"]), "refused")
        elif program.process is not None:
            program.process = None
            self._tell_status(program.number, report["status"])

    def _lose_program(self, member: Member, steward: int, program: Program) -> None:
        """Handles the end of a subreaper, after or together with all its descendants."""
        self._ignore(program.reports.fileno())
        program.reports.close()
        member.programs.pop(steward, None)
        if program.ask is not None:
            self._answer(program.ask, "its process ended on the way")
        if program.process is not None:
            self._tell_status(program.number, signal.SIGKILL)
            self._end_strays()

    def _program(self, number: int) -> Program | None:
        every = (
            program for member in self._members.values() for program in member.programs.values()
        )
        return next((program for program in every if program.number == number), None)

    def _signal_program(self, program: Program, which: int) -> None:
        """Signals a program and its group while it runs. After its end, the process id may belong
        to another process.
        """
        if program.process is not None:
            _kill_group(program.process, which)
        elif program.ask is not None and which == signal.SIGKILL:
            program.is_unwanted = True

    # Signals.

    def _signal(self, number: int, which: int) -> None:
        program = self._program(number)
        if program is not None:
            self._signal_program(program, which)
            return
        interpreter = self._interpreters.get(number)
        if interpreter is None or interpreter.process is None or interpreter.status is not None:
            return
        # The process id was reported from inside the sandbox, and may be that of another session.
        if self._steward_of(interpreter.process, _parents()) in interpreter.member.stewards:
            _kill(interpreter.process, which)

    def _kill(self, number: int) -> None:
        self._inputs.pop(number, None)
        program = self._program(number)
        if program is not None:
            self._signal_program(program, signal.SIGKILL)
            return
        interpreter = self._interpreters.get(number)
        if interpreter is not None:
            self._sweep(interpreter.member, with_checkpoints=False)

    def _hang_up(self, number: int) -> None:
        interpreter = self._interpreters.get(number)
        if interpreter is not None and interpreter.channel is not None:
            self._ignore(interpreter.channel.fileno())
            interpreter.channel.close()
            interpreter.channel = None

    def _sweep(self, member: Member, with_checkpoints: bool) -> None:
        """Ends every process of a session except its subreapers and, unless `with_checkpoints`, its
        checkpoints.
        """
        if with_checkpoints:
            for number in list(member.checkpoints):
                self._forget(member.number, number)
        spared = {checkpoint.process for checkpoint in member.checkpoints.values()}
        if member.stewards or member.programs:
            own = {*member.stewards, *member.programs}
            self._end(
                lambda process, parents: (
                    self._steward_of(process, parents) in own and process not in spared
                )
            )
        for steward, reports in list(member.stewards.items()):
            self._hear_ends(member, reports)

    def _hear_ends(self, member: Member, reports: socket.socket) -> None:
        """Reads pending reports of a subreaper before the interpreter is replaced."""
        interpreter = member.interpreter
        if interpreter is None or interpreter.process is None:
            return
        deadline = time.monotonic() + _LAST_WORDS
        while interpreter.status is None and time.monotonic() < deadline:
            reports.settimeout(0.05)
            try:
                message = reports.recv(_LARGEST_REPORT)
            except (TimeoutError, OSError):
                continue
            finally:
                reports.settimeout(None)
            if not message:
                return
            report = _numbers(message)
            if report.get("ended") == interpreter.process:
                self._ended(interpreter, report.get("status", signal.SIGKILL))

    def _end_strays(self) -> None:
        """Ends processes that no longer belong to a session, because their subreaper has ended."""
        if self._unborn:
            return  # A subreaper that is being started belongs to no session yet.
        known = {self._warm}
        for member in self._members.values():
            known.update(member.stewards)
            known.update(member.programs)
            known.update(checkpoint.process for checkpoint in member.checkpoints.values())

        def is_stray(process: int, parents: dict[int, int]) -> bool:
            while process > 1:
                if process in known:
                    return False
                process = parents.get(process, 0)
            return True

        self._end(is_stray)
        for interpreter in list(self._interpreters.values()):
            if interpreter.process is not None and not interpreter.member.stewards:
                self._ended(interpreter, signal.SIGKILL)

    def _end(self, is_meant: Any) -> None:
        """Stops all matching processes until no new one appears, and then kills them: a stopped
        process cannot create more.
        """
        deadline = time.monotonic() + _SWEEPING
        stopped: set[int] = set()
        while time.monotonic() < deadline:
            parents = _parents()
            victims = {process for process in parents if process > 1 and is_meant(process, parents)}
            if not victims - stopped:
                break
            for process in victims - stopped:
                _kill(process, signal.SIGSTOP)
            stopped |= victims
        while time.monotonic() < deadline:
            for process in stopped:
                _kill(process, signal.SIGKILL)
            parents = _parents()
            stopped = {process for process in parents if process > 1 and is_meant(process, parents)}
            if not stopped:
                return
            time.sleep(0.0005)
        os.write(2, f"{len(stopped)} processes could not be ended\n".encode())
        os._exit(3)  # The end of the container ends them.

    def _owner(self, address: str, port: int) -> int | None:
        """Returns the session that made a connection, if the kernel shows it and there is exactly
        one.
        """
        parents = _parents()
        holders = sockets.holders(sockets.at(address, port), parents)
        stewards = {self._steward_of(process, parents) for process in holders}
        members = {
            member.number
            for member in self._members.values()
            if not stewards.isdisjoint((*member.stewards, *member.programs))
        }
        return members.pop() if len(members) == 1 else None

    def _steward_of(self, process: int, parents: dict[int, int]) -> int | None:
        """Returns the nearest subreaper above a process. Returns None for subreapers themselves."""
        stewards = {
            steward
            for member in self._members.values()
            for steward in (*member.stewards, *member.programs)
        }
        if process in stewards:
            return None
        while process > 1:
            process = parents.get(process, 0)
            if process in stewards:
                return process
        return None

    # Bytes.

    def _watch_channel(self, interpreter: Interpreter) -> None:
        channel = interpreter.channel
        if channel is None:
            return
        events = (selectors.EVENT_READ if interpreter.credit > 0 else 0) | (
            selectors.EVENT_WRITE if interpreter.incoming else 0
        )
        self._ignore(channel.fileno())
        if events:
            self._selector.register(channel, events, lambda: self._serve_channel(interpreter))

    def _serve_channel(self, interpreter: Interpreter) -> None:
        if interpreter.incoming:
            self._push(interpreter)
        if interpreter.channel is not None and interpreter.credit > 0:
            self._carry(interpreter)

    def _push(self, interpreter: Interpreter) -> None:
        """Passes as many bytes from the host to the interpreter as it accepts."""
        channel = interpreter.channel
        if channel is None:
            return
        taken = 0
        try:
            while interpreter.incoming:
                size = channel.send(memoryview(interpreter.incoming)[:_READ])
                del interpreter.incoming[:size]
                taken += size
        except BlockingIOError:
            pass
        except OSError:
            taken += len(interpreter.incoming)
            interpreter.incoming.clear()  # It has ended, which is reported elsewhere.
        if taken:
            self._say(strands.encode_amount(b"w", interpreter.number, taken))
        self._watch_channel(interpreter)

    def _carry(self, interpreter: Interpreter) -> bool:
        """Forwards frames to the host. Returns whether more is pending than the credit allows."""
        channel = interpreter.channel
        space = socket.CMSG_SPACE(8 * array.array("i").itemsize)
        while channel is not None:
            if interpreter.credit <= 0:
                self._watch_channel(interpreter)
                return True
            try:
                data, ancillary, _, _ = channel.recvmsg(
                    min(interpreter.credit, strands.PIECE), space
                )
            except BlockingIOError:
                return False
            except OSError:
                data, ancillary = b"", []
            descriptors = _descriptors(ancillary)
            if not data:
                self._say(strands.encode(b"h", interpreter.number))
                self._hang_up(interpreter.number)
                return False
            interpreter.credit -= len(data)
            # Text that preceded these frames is in the pipes by now, and must arrive first.
            for pipe in list(interpreter.pipes):
                if not pipe.retired:
                    self._pull(pipe)
            if (
                len(descriptors) == 2
                and self._refuses_programs
                and all(map(_only_takes, descriptors))
            ):
                self._announce_outlets(interpreter, descriptors, data)
            elif len(descriptors) == 2 and all(map(_only_gives, descriptors)):
                self._announce_pipes(interpreter, descriptors, data)
            else:
                for descriptor in descriptors:
                    os.close(descriptor)
                self._say(strands.encode(b"d", interpreter.number, data))
        return False

    def _announce_pipes(
        self, interpreter: Interpreter, descriptors: list[int], data: bytes
    ) -> None:
        for pipe in interpreter.pipes:
            pipe.retired = True
        retired = [pipe for pipe in interpreter.pipes if pipe.retired]
        for pipe in retired[: max(0, len(retired) - _MOST_RETIRED)]:
            interpreter.pipes.remove(pipe)
            self._drop_pipe(pipe)
        new = []
        for descriptor in descriptors:
            pipe = Pipe(self._next_pipe, descriptor, interpreter)
            self._next_pipe += 1
            os.set_blocking(descriptor, False)
            self._pipes[pipe.strand] = pipe
            interpreter.pipes.append(pipe)
            self._listen(descriptor, lambda pipe=pipe: self._pull(pipe))
            new.append(pipe.strand)
        self._say(strands.encode_pipes(b"p", interpreter.number, new[0], new[1], data))

    def _pull(self, pipe: Pipe) -> bool:
        """Forwards text to the host. Returns whether more is pending than the credit allows."""
        while pipe.strand in self._pipes:
            if pipe.credit <= 0:
                self._ignore(pipe.descriptor)
                return True
            try:
                data = os.read(pipe.descriptor, min(pipe.credit, strands.PIECE))
            except BlockingIOError:
                return False
            except OSError:
                data = b""
            if not data:
                self._say(strands.encode(b"h", pipe.strand))
                self._drop_pipe(pipe)
                return False
            pipe.credit -= len(data)
            self._say(strands.encode(b"d", pipe.strand, data))
            if len(data) < strands.PIECE:
                return False
        return False

    def _drop_pipe(self, pipe: Pipe) -> None:
        if self._pipes.pop(pipe.strand, None) is not None:
            self._ignore(pipe.descriptor)
            os.close(pipe.descriptor)

    def _listen(self, descriptor: int, handler: Any) -> None:
        self._ignore(descriptor)
        self._selector.register(descriptor, selectors.EVENT_READ, handler)

    def _ignore(self, descriptor: int) -> None:
        try:
            self._selector.unregister(descriptor)
        except (KeyError, ValueError):
            pass


def _knock(word: str, door: tuple[str, int]) -> None:
    """Sends a datagram with a token to a host listener (`door`), which identifies the listener as
    belonging to this container.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as caller:
        caller.sendto(word.encode(), door)


def _kill(process: int, which: int) -> None:
    try:
        os.kill(process, which)
    except ProcessLookupError:
        pass  # It has already ended.


def _kill_group(leader: int, which: int) -> None:
    try:
        os.killpg(leader, which)
    except ProcessLookupError:
        pass  # The whole group has already ended.


def _only_takes(descriptor: int) -> bool:
    """Reports whether this is the write end of a pipe."""
    return _is_pipe(descriptor, os.O_WRONLY)


def _only_gives(descriptor: int) -> bool:
    """Reports whether this is the read end of a pipe."""
    return _is_pipe(descriptor, os.O_RDONLY)


def _is_pipe(descriptor: int, mode: int) -> bool:
    is_pipe = stat.S_ISFIFO(os.fstat(descriptor).st_mode)
    return is_pipe and fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == mode


def _packet_socket(descriptor: int) -> socket.socket | None:
    """Takes over a descriptor that came from a session if it is a SOCK_SEQPACKET socket, which
    orders require. Closes it otherwise.
    """
    try:
        taken = socket.socket(fileno=descriptor)
    except OSError:
        os.close(descriptor)
        return None
    if (taken.family, taken.type) == (socket.AF_UNIX, socket.SOCK_SEQPACKET):
        return taken
    taken.close()
    return None


def _numbers(message: bytes) -> dict[str, int]:
    """Parses the report of a session's process: names with numbers. Drops everything else, because
    the report is untrusted.
    """
    try:
        report = json.loads(message)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(report, dict):
        return {}
    # Process ids and exit statuses.
    return {
        name: value
        for name, value in report.items()
        if type(value) is int and 0 <= value <= _LARGEST_NUMBER
    }


def _offer_to_die(process: int, score: int) -> None:
    try:
        with open(f"/proc/{process}/oom_score_adj", "w", encoding="ascii") as file:
            file.write(str(score))
    except OSError:
        pass


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


def _sender(ancillary: list[Any]) -> int:
    """Returns the process that sent a message, according to the kernel."""
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
            return int(_credentials.unpack(data[: _credentials.size])[0])
    raise OSError("the kernel did not tell who sent a message")


def _descriptors(ancillary: list[Any]) -> list[int]:
    found = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
    return list(found)


def supervise(plan: bytes, heard: bytes, warm: int, orders: int) -> NoReturn:
    """Supervises until the host is gone. `heard` is the input received after the plan, `orders` is
    the socket to the warm process.
    """
    confine.be_unreadable()
    try:
        # The first process adopts orphans anyway, but subreapers need this call to work.
        confine.adopt_orphans()
    except OSError as error:
        sys.exit(f"sessions cannot be kept apart under this runtime: {error.strerror}")
    for folder in json.loads(plan)["folders"]:
        os.makedirs(folder, 0o700, exist_ok=True)
    Supervisor(plan, warm, orders).run(heard)
