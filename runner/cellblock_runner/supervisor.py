"""The supervisor: the first process of a container, which connects the single stream to the host
with all other processes in the container.

It never runs user code and imports nothing that a user could have written. The warm process and the
sessions are its descendants (`forkserver`). It carries out the requests of the host (`messages`):
starts sessions, forwards their frames and output (`mux_connection`), forwards signals, starts
approved programs (`launcher`), finds and ends processes that a session left behind
(`process_table`), and reports exit statuses. When the stream ends, the supervisor exits, and with
it, as the first process, everything in the container.

The host trusts it as little as possible: whether the container is alive, what it uses and why it
ended is reported by the container engine.
"""

from __future__ import annotations

import array
import json
import os
import shutil
import signal
import socket
import struct
import sys
import time
from typing import Any, NoReturn

from . import confine, forkserver, messages, process_table
from .launcher import Launcher, exit_status
from .mux_connection import MuxConnection, received_descriptors
from .poller import Poller
from .process_table import Checkpoint, Interpreter, ProcessTable, Slot

_MAX_REPORT_BYTES = 4096
# The greeting of the warm process includes its environment.
_MAX_GREETING_BYTES = 1024 * 1024
# No process id and no status is larger.
_MAX_NUMBER = (1 << 31) - 1
# The oom_score_adj of checkpoints, which go first when memory runs out.
_OF_CHECKPOINTS = 900

_credentials = struct.Struct("3i")


class Supervisor:
    def __init__(self, plan: bytes, warm: int, orders: int) -> None:
        self._plan = plan
        self._refuses_programs = json.loads(plan).get("programs") == "refused"
        self._poller = Poller()
        self._connection = MuxConnection(self._poller)
        self._table = ProcessTable(warm)
        self._launcher = Launcher(
            self._connection, self._poller, self._table, self._refuses_programs
        )
        if self._refuses_programs:
            self._connection.keep_program_pipes = self._launcher.keep_pipes
        # The socket on which the warm process takes orders.
        self._orders = socket.socket(fileno=orders)
        # The environment of a fresh session.
        self._environment: dict[str, str] | None = None
        # Exit statuses reported before the process id was known.
        self._early: dict[int, int] = {}

    def run(self, received: bytes) -> NoReturn:
        wake_reader, wake_writer = os.pipe()
        for end in (wake_reader, wake_writer):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wake_writer)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for ignored in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
            signal.signal(ignored, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
        self._poller.listen(wake_reader, lambda: self._reap(wake_reader))
        self._poller.listen(self._orders.fileno(), self._read_warm)
        self._connection.listen(received, self._handle)
        self._connection.flush()
        interpreters = self._table.interpreters
        while True:
            waiting = [each.deadline for each in interpreters.values() if each.deadline is not None]
            self._poller.wait(max(0.0, min(waiting) - time.monotonic()) if waiting else None)
            for interpreter in list(interpreters.values()):
                if interpreter.deadline is not None:
                    self._finish(interpreter)
            self._connection.flush()

    # Messages of the host.

    def _handle(self, kind: int, number: int, body: bytes) -> None:
        message = messages.decode(kind, number, body)
        if isinstance(message, messages.Data):
            self._connection.give(message)
        elif isinstance(message, messages.Credit):
            self._connection.add_credit(message)
        elif isinstance(message, messages.Input):
            self._launcher.add_input(message)
        elif message["type"] == "interrupt":
            self._interrupt(message["process"])
        elif message["type"] == "kill":
            self._kill(message["process"])
        elif message["type"] == "close_channel":
            self._connection.hang_up(message["interpreter"])
        elif message["type"] == "release_program_pipes":
            self._launcher.release_pipes(message["pipes"])
        else:
            self._carry_out(message)

    def _carry_out(self, request: messages.Request) -> None:
        """Carries out a request, and answers it now or when its process has reported."""
        try:
            if request["type"] == "start":
                self._start(request)
            elif request["type"] == "expect_checkpoint":
                slot = self._table.slots[request["slot"]]
                slot.expected = (request["checkpoint"], request["id"])
            elif request["type"] == "restore":
                self._restore(request)
            elif request["type"] == "fork":
                self._fork(request)
            elif request["type"] == "discard_checkpoint":
                self._discard_checkpoint(request["slot"], request["checkpoint"])
                self._done(request)
            elif request["type"] == "end_slot":
                self._end_slot(request["slot"])
                self._done(request)
            elif request["type"] == "launch":
                slot = self._table.slots[request["slot"]]
                self._launcher.launch(slot, request, self._environment or {})
            elif request["type"] == "send_token":
                _send_token(request["token"], (request["address"], request["port"]))
                self._done(request)
            elif request["type"] == "find_owner":
                owner = self._table.owner(request["address"], request["port"])
                self._connection.send(messages.done(request["id"], owner))
            else:
                self._failed(request["id"], "the supervisor does not know this request")
        except (OSError, KeyError) as cause:
            self._failed(request["id"], f"{type(cause).__name__}: {cause}")

    def _done(self, request: messages.Request) -> None:
        self._connection.send(messages.done(request["id"]))

    def _failed(self, request: int, why: str) -> None:
        self._connection.send(messages.failed(request, why))

    def _interrupt(self, number: int) -> None:
        program = self._table.program(number)
        if program is not None:
            self._launcher.signal(program, signal.SIGINT)
            return
        interpreter = self._table.interpreters.get(number)
        if interpreter is not None:
            self._table.signal_interpreter(interpreter, signal.SIGINT)

    def _kill(self, number: int) -> None:
        self._launcher.discard_input(number)
        program = self._table.program(number)
        if program is not None:
            self._launcher.signal(program, signal.SIGKILL)
            return
        interpreter = self._table.interpreters.get(number)
        if interpreter is not None:
            self._end_session(interpreter.slot)

    # Requests for interpreters.

    def _start(self, request: messages.Start) -> None:
        slot = self._table.slots.get(request["slot"])
        if slot is None:
            slot = self._table.slots[request["slot"]] = Slot(request["slot"], None, request["work"])
        self._end_session(slot)
        order = {"mode": request["mode"], "work": request["work"]}
        self._make(slot, request, self._orders, order)

    def _fork(self, request: messages.Fork) -> None:
        source = self._table.slots[request["source"]]
        checkpoint = source.checkpoints[request["checkpoint"]]
        number, folder = request["slot"], None
        if request["own_folder"]:
            folder = f"{forkserver.FORKS}/{number}"
            os.mkdir(folder, 0o700)
        slot = self._table.slots[number] = Slot(number, folder, folder or source.work)
        self._make(slot, request, checkpoint.orders, {"work": folder}, gate=b"f")

    def _make(
        self,
        slot: Slot,
        request: messages.Start | messages.Fork,
        maker: socket.socket,
        order: dict[str, Any],
        gate: bytes = b"",
    ) -> None:
        """Orders a subreaper with an interpreter. Both report on a socket of their own."""
        interpreter, theirs = self._prepare(slot, request["interpreter"], gate)
        reports, reporter = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        reports.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._table.starting += 1
        self._poller.listen(
            reports.fileno(), lambda: self._read_subreaper(reports, interpreter, request["id"])
        )
        with reporter:
            _send_order(maker, order, (*theirs, reporter))

    def _restore(self, request: messages.Restore) -> None:
        slot = self._table.slots[request["slot"]]
        checkpoint = slot.checkpoints[request["checkpoint"]]
        self._end_session(slot)
        interpreter, theirs = self._prepare(slot, request["interpreter"], b"u")
        _send_order(checkpoint.orders, {"work": None}, theirs)
        checkpoint.orders.settimeout(process_table.DRAIN_TIMEOUT)
        message = checkpoint.orders.recv(_MAX_REPORT_BYTES)
        checkpoint.orders.settimeout(None)
        if not message:
            raise OSError("the checkpoint has ended")
        interpreter.process = _numbers(message).get("interpreter")
        if interpreter.process is None:
            raise OSError("the checkpoint does not say what it has made")
        self._done(request)
        self._apply_early_exit(interpreter)

    def _prepare(
        self, slot: Slot, number: int, gate: bytes
    ) -> tuple[Interpreter, tuple[socket.socket, socket.socket]]:
        """Makes the sockets of an interpreter that is about to be made."""
        ours, channel = socket.socketpair()
        mine, copies = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        mine.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        ours.setblocking(False)
        if gate:
            ours.send(gate)
        interpreter = Interpreter(number, slot, self._connection.open(number, ours), mine)
        slot.interpreter = self._table.interpreters[number] = interpreter
        self._poller.listen(mine.fileno(), lambda: self._read_copy(interpreter))
        return interpreter, (channel, copies)

    def _discard_checkpoint(self, number: int, checkpoint: int) -> None:
        slot = self._table.slots.get(number)
        if slot is None:
            return
        kept = slot.checkpoints.pop(checkpoint, None)
        if slot.expected is not None and slot.expected[0] == checkpoint:
            slot.expected = None
        if kept is not None:
            self._poller.ignore(kept.orders.fileno())
            kept.orders.close()
            process_table.kill(kept.process, signal.SIGKILL)

    def _end_slot(self, number: int) -> None:
        slot = self._table.slots.get(number)
        if slot is None:
            return
        for checkpoint in list(slot.checkpoints):
            self._discard_checkpoint(number, checkpoint)
        self._end_session(slot)
        for subreaper, reports in list(slot.subreapers.items()):
            process_table.kill(subreaper, signal.SIGKILL)
            self._poller.ignore(reports.fileno())
            reports.close()
            del slot.subreapers[subreaper]
        for subreaper, program in list(slot.programs.items()):
            process_table.kill(subreaper, signal.SIGKILL)
            self._launcher.lose(slot, subreaper, program)
        for interpreter in list(self._table.interpreters.values()):
            if interpreter.slot is slot:
                # Its output is no longer needed.
                interpreter.ended(signal.SIGKILL)
                self._report_exit(interpreter)
        del self._table.slots[number]
        if slot.folder is not None:
            shutil.rmtree(slot.folder, ignore_errors=True)

    def _end_session(self, slot: Slot) -> None:
        """Ends every process of a session except its subreapers and checkpoints."""
        self._table.end_session(slot)
        for reports in list(slot.subreapers.values()):
            self._await_exit(slot, reports)

    # Reports of other processes.

    def _start_warm(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._table.warm = os.fork()
        if self._table.warm == 0:
            forkserver.become_warm(theirs.detach(), self._plan)
        theirs.close()
        self._orders = ours
        self._poller.listen(ours.fileno(), self._read_warm)

    def _read_warm(self) -> None:
        message = self._orders.recv(_MAX_GREETING_BYTES)
        if message:
            if self._refuses_programs and confine.count_of_filters(
                self._table.warm
            ) <= confine.count_of_filters(os.getpid()):
                os.write(2, b"the kernel does not show that programs are refused to sessions\n")
                os._exit(3)
            if self._environment is None:
                # Later ones may have read files written by sessions.
                self._environment = json.loads(message)["environment"]
            landlock = confine.version_of_landlock()
            self._connection.send(messages.ready(sys.version.split()[0], landlock))
            return
        # A session has ended it. An identical process replaces it.
        self._poller.ignore(self._orders.fileno())
        self._orders.close()
        self._start_warm()

    def _read_subreaper(
        self, reports: socket.socket, interpreter: Interpreter, request: int
    ) -> None:
        message, ancillary, _, _ = reports.recvmsg(
            _MAX_REPORT_BYTES, socket.CMSG_SPACE(_credentials.size)
        )
        slot = interpreter.slot
        subreaper = next(
            (process for process, theirs in slot.subreapers.items() if theirs is reports), None
        )
        if not message:
            self._poller.ignore(reports.fileno())
            reports.close()
            if subreaper is None:
                self._table.starting -= 1
                self._failed(request, "the interpreter did not start")
            else:
                del slot.subreapers[subreaper]
            self._table.end_strays()
            return
        report = _numbers(message)
        if subreaper is None:
            self._table.starting -= 1
            slot.subreapers[_sender(ancillary)] = reports
            interpreter.process = report.get("interpreter")
            self._connection.send(messages.done(request))
            return
        process, status = report.get("ended"), report.get("status")
        current = slot.interpreter
        if process is None or status is None or current is None:
            return
        if current.process == process:
            current.ended(status)
        elif current.process is None:
            self._early[process] = status

    def _await_exit(self, slot: Slot, reports: socket.socket) -> None:
        """Reads pending reports of a subreaper before the interpreter is replaced."""
        interpreter = slot.interpreter
        if interpreter is None or interpreter.process is None:
            return
        deadline = time.monotonic() + process_table.DRAIN_TIMEOUT
        while interpreter.status is None and time.monotonic() < deadline:
            reports.settimeout(0.05)
            try:
                message = reports.recv(_MAX_REPORT_BYTES)
            except (TimeoutError, OSError):
                continue
            finally:
                reports.settimeout(None)
            if not message:
                return
            report = _numbers(message)
            if report.get("ended") == interpreter.process:
                interpreter.ended(report.get("status", signal.SIGKILL))

    def _apply_early_exit(self, interpreter: Interpreter) -> None:
        """Applies an exit status that the subreaper reported before the process id was known."""
        status = self._early.pop(interpreter.process or 0, None)
        self._early.clear()
        if status is not None:
            interpreter.ended(status)

    def _read_copy(self, interpreter: Interpreter) -> None:
        """Handles the handshake of a checkpoint, or of a process that claims to be one."""
        message, ancillary, _, _ = interpreter.copies.recvmsg(
            _MAX_REPORT_BYTES,
            socket.CMSG_SPACE(_credentials.size) + socket.CMSG_SPACE(8 * array.array("i").itemsize),
        )
        descriptors = received_descriptors(ancillary)
        slot = interpreter.slot
        if not message:
            self._poller.ignore(interpreter.copies.fileno())
        sender = _sender(ancillary) if message else 0
        # The session itself is not a copy.
        if (
            not sender
            or sender == interpreter.process
            or slot.expected is None
            or len(descriptors) != 1
        ):
            for descriptor in descriptors:
                os.close(descriptor)
            return
        orders = _packet_socket(descriptors[0])
        if orders is None:
            return
        (number, request), slot.expected = slot.expected, None
        _set_oom_score_adj(sender, _OF_CHECKPOINTS)
        slot.checkpoints[number] = Checkpoint(sender, orders)
        self._poller.listen(orders.fileno(), lambda: self._lose_checkpoint(slot, number))
        self._connection.send(messages.done(request))

    def _lose_checkpoint(self, slot: Slot, number: int) -> None:
        """Handles the end of a checkpoint: it never sends unprompted, so its socket has closed."""
        checkpoint = slot.checkpoints.pop(number, None)
        if checkpoint is not None:
            self._poller.ignore(checkpoint.orders.fileno())
            checkpoint.orders.close()
            self._connection.send(messages.checkpoint_lost(slot.number, number))

    def _finish(self, interpreter: Interpreter) -> None:
        """Reports the end of an interpreter once all its output has been forwarded, or the deadline
        for that has passed.
        """
        waits = self._connection.drain(interpreter.channel)
        deadline = interpreter.deadline
        if not waits or deadline is None or time.monotonic() >= deadline:
            self._report_exit(interpreter)

    def _report_exit(self, interpreter: Interpreter) -> None:
        """Closes everything of an interpreter that has ended, and reports how."""
        self._table.interpreters.pop(interpreter.number, None)
        interpreter.deadline = None
        self._connection.close(interpreter.channel)
        self._poller.ignore(interpreter.copies.fileno())
        interpreter.copies.close()
        if interpreter.slot.interpreter is interpreter:
            interpreter.slot.interpreter = None
        status = exit_status(interpreter.status or 0)
        self._connection.send(messages.exited(interpreter.number, status))

    def _reap(self, wake_reader: int) -> None:
        """Reaps ended children. The sockets identify them."""
        try:
            os.read(wake_reader, _MAX_REPORT_BYTES)
        except BlockingIOError:
            pass
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass


def _send_order(
    maker: socket.socket, order: dict[str, Any], theirs: tuple[socket.socket, ...]
) -> None:
    """Sends an order with sockets, which are closed here."""
    try:
        socket.send_fds(maker, [json.dumps(order).encode()], [each.fileno() for each in theirs])
    finally:
        for each in theirs:
            each.close()


def _send_token(token: str, listener: tuple[str, int]) -> None:
    """Sends a datagram with a token to a listener of the host, which identifies the listener as
    belonging to this container.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.sendto(token.encode(), listener)


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
        if type(value) is int and 0 <= value <= _MAX_NUMBER
    }


def _set_oom_score_adj(process: int, score: int) -> None:
    try:
        with open(f"/proc/{process}/oom_score_adj", "w", encoding="ascii") as file:
            file.write(str(score))
    except OSError:
        pass


def _sender(ancillary: list[Any]) -> int:
    """Returns the process that sent a message, according to the kernel."""
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
            return int(_credentials.unpack(data[: _credentials.size])[0])
    raise OSError("the kernel did not tell who sent a message")


def supervise(plan: bytes, received: bytes, warm: int, orders: int) -> NoReturn:
    """Supervises until the host is gone. `received` is the input received after the plan, `orders`
    is the socket to the warm process.
    """
    confine.be_unreadable()
    try:
        # The first process adopts orphans anyway, but subreapers need this call to work.
        confine.adopt_orphans()
    except OSError as error:
        sys.exit(f"sessions cannot be kept apart under this runtime: {error.strerror}")
    for folder in json.loads(plan)["folders"]:
        os.makedirs(folder, 0o700, exist_ok=True)
    Supervisor(plan, warm, orders).run(received)
