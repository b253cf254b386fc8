"""A host for tests: starts `python -m cellblock_runner`, exchanges frames with it and merges
its streams.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cellblock_runner.frames import Decoder, encode

from .merger import Event, Frame, Merger, Text

RUNNER = Path(__file__).resolve().parent.parent

# The frames that end a request.
_FINAL_FRAMES = (
    "file_list",
    "file_end",
    "written",
    "failed",
    "branched",
    "packages_added",
    "tools_written",
)

# Nothing in these tests takes this long. A test that waits longer has found a bug.
TIMEOUT = 20


class Died(Exception):
    """The runner ended. `events` are those received before."""

    def __init__(self, events: list[Event]) -> None:
        super().__init__("the runner ended")
        self.events = events


class Result:
    """One cell as the host sees it: events in order, and the last frame."""

    def __init__(self, events: list[Event], done: dict[str, Any]) -> None:
        self.events = events
        self.done = done

    @property
    def text(self) -> str:
        return "".join(event.data.decode() for event in self.events if isinstance(event, Text))

    @property
    def error(self) -> Any:
        return self.done["error"]

    @property
    def frames(self) -> list[Frame]:
        return [event for event in self.events if isinstance(event, Frame)]

    def stream(self, name: str) -> str:
        return "".join(
            e.data.decode() for e in self.events if isinstance(e, Text) and e.stream == name
        )

    @property
    def order(self) -> list[str]:
        """Returns the cell as one readable list: 'out:…', 'err:…', and the text/plain of displays
        and the value.
        """
        short: list[str] = []
        for event in self.events:
            if isinstance(event, Text):
                prefix = "out:" if event.stream == "stdout" else "err:"
                text = event.data.decode()
                if short and short[-1].startswith(prefix):
                    short[-1] += text
                else:
                    short.append(prefix + text)
            elif event.header["type"] == "clear":
                short.append("clear")
            else:
                short.append(f"{event.header['type']}:{event.header['data'].get('text/plain', '')}")
        return short

    @property
    def value(self) -> dict[str, str] | None:
        values = [frame.header["data"] for frame in self.frames if frame.header["type"] == "value"]
        return values[0] if values else None


class Runner:
    """A running runner in a folder of its own."""

    def __init__(
        self, preload: str = "", scratch: bool = False, ask_for_programs: bool = False
    ) -> None:
        """With `scratch`, the session has a second folder that only forks copy,
        `self.scratch`.
        """
        self.workdir = tempfile.mkdtemp(prefix="runner-test-")
        self.scratch = tempfile.mkdtemp(prefix="runner-test-") if scratch else None
        self._checkpoints = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._checkpoints.settimeout(TIMEOUT)
        address = f"cellblock-test-{os.getpid()}-{os.path.basename(self.workdir)}"
        self._checkpoints.bind("\0" + address)
        self._checkpoints.listen()
        self._opened: list[Any] = []
        channel, theirs = socket.socketpair()
        environment = {**os.environ, "PYTHONPATH": str(RUNNER), "HOME": self.workdir + "/.home"}
        environment["MPLCONFIGDIR"] = self.workdir + "/.matplotlib"
        folders = [self.workdir, *([self.scratch] if self.scratch else [])]
        command = [sys.executable, "-m", "tests.fake_tracer", address, ",".join(folders)]
        command += [
            "--channel-fd",
            str(theirs.fileno()),
            "--workdir",
            self.workdir,
            "--preload",
            preload,
        ]
        for folder in folders[1:]:
            command += ["--scratch", folder]
        if ask_for_programs:
            command.append("--ask-for-programs")
        self.process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=environment
        )
        theirs.close()
        self._connect(channel)

    def _connect(self, channel: socket.socket) -> None:
        """Starts a connection: waits for hello."""
        self._channel = channel
        self._decoder = Decoder()
        self._pipes: list[int] = []
        self._frames_seen: list[tuple[dict[str, Any], bytes]] = []
        self._channel_is_open = True
        self._number = 0
        self.rotations = 0
        # The headers of all host calls, and the function that answers them. It returns None for
        # an answer that follows later, by `answer`.
        self.asked: list[dict[str, Any]] = []
        # Descriptors that were sent with host calls for commands, by the number of the call.
        self.outlets: dict[int, list[int]] = {}
        self.respond: Callable[[dict[str, Any]], dict[str, Any] | None] = _refuse
        while not self._frames_seen:
            if not self._channel_is_open:
                channel.close()
                raise Died([])
            self._receive()
        self.hello, _ = self._frames_seen.pop(0)
        self._merger = Merger(bytes.fromhex(self.hello["marker"]))

    def branch(self, **options: Any) -> Checkpoint:
        """Requests a copy and returns it, suspended. `options` are members of the frame."""
        self._number += 1
        [answer] = self.request({"type": "branch", "id": self._number, **options})
        if answer.header["type"] != "branched":
            raise AssertionError(answer.header)
        checkpoint = Checkpoint(
            self, self._checkpoints.accept()[0], answer.header["lost"], answer.header["whole"]
        )
        self._opened.append(checkpoint)
        return checkpoint

    def fork(self, **options: Any) -> Copy:
        """Branches, and resumes one copy as a fork."""
        return self.branch(fork=True, **options).spawn(b"f")

    def undo_after(self, code: str, **options: Any) -> Copy:
        """Branches, runs a cell, kills the session and restores its state before the cell."""
        checkpoint = self.branch(**options)
        self.run(code)
        self.process.kill()
        self.process.wait(TIMEOUT)
        return checkpoint.spawn(b"u")

    def close(self) -> int:
        """Closes the channel, waits for the runner and returns its exit status."""
        self._channel.close()
        try:
            status = self.process.wait(TIMEOUT)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        self._drop_pipes()
        for opened in self._opened:
            opened.close()
        self._checkpoints.close()
        for folder in (self.workdir, self.scratch):
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
        return status

    def run(self, code: str, **members: Any) -> Result:
        self.begin(code, **members)
        return self.finish()

    def begin(self, code: str, **members: Any) -> None:
        self._number += 1
        self._send({"type": "execute", "id": self._number, **members}, code.encode())

    def finish(
        self,
        watch: Callable[[str], None] | None = None,
        when_started: Callable[[], None] | None = None,
    ) -> Result:
        """Reads until the cell is done. `watch` gets the text so far, whenever some arrives."""
        events: list[Event] = []
        started = False
        text = ""
        while True:
            for event in self._merger.events():
                kind = event.header["type"] if isinstance(event, Frame) else "text"
                if kind == "started":
                    started = True
                    if when_started is not None:
                        when_started()
                elif kind == "ask":
                    assert isinstance(event, Frame)
                    self._take_host_call(event.header)
                elif kind == "done":
                    assert isinstance(event, Frame)
                    assert event.header["id"] == self._number
                    return Result(events, event.header)
                elif started:
                    events.append(event)
                    if isinstance(event, Text):
                        text += event.data.decode("utf-8", "replace")
            if watch is not None:
                watch(text)
            if not self._receive():
                raise Died(events + self._merger.remains())
            self._take_frames()

    def answer(self, number: int, **members: Any) -> None:
        """Answers a host call."""
        self._send({"type": "answer", "ask": number, **members}, b"")

    def add_packages(self, *paths: str) -> Frame:
        """Adds folders of packages. Returns the answer."""
        self._number += 1
        return self.request({"type": "packages", "id": self._number, "paths": list(paths)})[-1]

    # Files per frame.
    files_in_a_frame = 100

    def deliver(self, packages: dict[str, dict[str, str]], index: str, **members: Any) -> Frame:
        """Delivers packages of MCP servers. Returns the answer."""
        self._number += 1
        common = {"type": "tools", "id": self._number}
        for server, files in packages.items():
            names = list(files)
            step = self.files_in_a_frame
            for start in range(0, max(len(names), 1), step):
                some = {name: files[name].encode() for name in names[start : start + step]}
                listed = [{"name": name, "size": len(data)} for name, data in some.items()]
                last = start + step >= len(names)
                header = {**common, "server": server, "modules": listed, "last": last}
                self._send(header, b"".join(some.values()))
        return self.request({**common, **members}, index.encode())[-1]

    def _take_host_call(self, question: dict[str, Any]) -> None:
        assert question["id"] == self._number
        self.asked.append(question)
        answer = self.respond(question)
        if answer is not None:
            self.answer(question["ask"], **answer)

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def interrupt_when(self, expected: str) -> Callable[[str], None]:
        """Returns a `watch` that interrupts once, when the cell has printed `expected`."""
        waiting = [True]

        def watch(text: str) -> None:
            if waiting and expected in text:
                waiting.clear()
                self.interrupt()

        return watch

    def request(
        self, header: dict[str, Any], payload: bytes = b"", answers: bool = True
    ) -> list[Frame]:
        """Sends a request and returns the frames that answer it."""
        self._send(header, payload)
        return self.replies() if answers else []

    def replies(self) -> list[Frame]:
        """Returns the frames that answer the oldest unanswered request."""
        got: list[Frame] = []
        while not (got and got[-1].header["type"] in _FINAL_FRAMES):
            if self._frames_seen:
                got.append(Frame(*self._frames_seen.pop(0)))
            elif not self._receive():
                raise Died([*got])
        return got

    def upload(self, path: str, *pieces: bytes, overwrite: bool = False) -> Frame:
        self._number += 1
        self.request(
            {"type": "write_begin", "id": self._number, "path": path, "overwrite": overwrite},
            answers=False,
        )
        for piece in pieces:
            self.request({"type": "write_data", "id": self._number}, piece, answers=False)
        return self.request({"type": "write_end", "id": self._number})[-1]

    def download(self, path: str, limit: int = 1 << 40) -> tuple[bytes, Frame]:
        self._number += 1
        frames = self.request(
            {"type": "read_file", "id": self._number, "path": path, "limit": limit}
        )
        return b"".join(frame.payload for frame in frames[:-1]), frames[-1]

    def _send(self, header: dict[str, Any], payload: bytes) -> None:
        self._channel.sendall(encode(header, payload))

    def _take_frames(self) -> None:
        frames, self._frames_seen = self._frames_seen, []
        for header, payload in frames:
            if header.get("rotated"):
                self.rotations += 1
                self._merger.rotate()
            if "seq" in header:
                self._merger.feed_frame(header, payload)
            elif not header.get("rotated"):
                # The answer to a request that was sent while the cell ran; it may arrive together
                # with the end of the cell.
                self._frames_seen.append((header, payload))

    def _receive(self) -> bool:
        """Waits for input and reads it. Returns False when the runner has ended and everything is
        read.
        """
        sources: list[Any] = list(self._pipes)
        if self._channel_is_open:
            sources.append(self._channel)
        if not self._channel_is_open and not self._pipes:
            return False
        readable, _, _ = select.select(sources, [], [], TIMEOUT)
        if not readable:
            raise TimeoutError("the runner sent nothing")
        for index, pipe in enumerate(list(self._pipes)):
            if pipe in readable:
                data = os.read(pipe, 1 << 20)
                if data:
                    self._merger.feed_text(index, data)
                elif not self._channel_is_open:
                    self._pipes = []
        if self._channel in readable:
            data, descriptors, _, _ = socket.recv_fds(self._channel, 1 << 20, 2)
            arrived = []
            if data:
                self._decoder.feed(data)
                while (frame := self._decoder.next()) is not None:
                    arrived.append(frame)
            else:
                self._channel_is_open = False
            self._frames_seen += arrived
            if descriptors:
                self._adopt(
                    list(descriptors),
                    [header for header, _ in arrived if header.get("what") == "shell"],
                )
        return True

    def _adopt(self, descriptors: list[int], commands: list[dict[str, Any]]) -> None:
        """Takes descriptors that were sent with a frame. They arrive with its first bytes, and a
        command with descriptors is the last frame that was read.
        """
        if commands:
            self.outlets[commands[-1]["ask"]] = descriptors
        else:
            # Everything before this frame has been read: the old pipes have no more output of
            # cells.
            self._drop_pipes()
            self._pipes = descriptors

    def _drop_pipes(self) -> None:
        for pipe in self._pipes:
            os.close(pipe)
        self._pipes = []


def _refuse(question: dict[str, Any]) -> dict[str, Any]:
    """Answers as a host that does not know the call."""
    return {"ok": False, "text": f"ERROR: this server does not answer {question['what']!r}"}


class Checkpoint:
    """A suspended copy."""

    def __init__(self, source: Runner, orders: socket.socket, lost: list[str], whole: bool) -> None:
        self.lost = lost
        self.whole = whole
        self._source = source
        self._orders = orders
        self._orders.settimeout(TIMEOUT)
        self._copies: list[Copy] = []

    def spawn(self, gate: bytes) -> Copy:
        """Makes and resumes a copy of it, as a fork or as an undo. It stays suspended itself."""
        copy = Copy(self._source, *_order_copy(self._orders, gate))
        self._copies.append(copy)
        return copy

    def close(self) -> None:
        for copy in self._copies:
            copy.hang_up()
        self._orders.close()


def _order_copy(orders: socket.socket, gate: bytes) -> tuple[socket.socket, int]:
    """Orders a copy and opens its gate. Returns its channel and its process id."""
    ours, theirs = socket.socketpair()
    socket.send_fds(orders, [json.dumps({"fork": gate == b"f"}).encode()], [theirs.fileno()])
    theirs.close()
    number = json.loads(orders.recv(4096))["process"]
    ours.sendall(gate)
    return ours, number


class Copy(Runner):
    """A resumed copy: a session like any other."""

    def __init__(self, source: Runner, channel: socket.socket, number: int) -> None:
        self.workdir, self.scratch = source.workdir, source.scratch
        self.number = number
        self._checkpoints = source._checkpoints
        self._opened = source._opened
        self._connect(channel)

    def seen(self, path: str) -> Path:
        """Returns the test's name for a path of this copy: a fork has its own mounts."""
        return Path(f"/proc/{self.number}/root{path}")

    def interrupt(self) -> None:
        os.kill(self.number, signal.SIGINT)

    def hang_up(self) -> None:
        self._channel.close()
        self._drop_pipes()


class Fresh(Copy):
    """A copy of a zygote: a new session."""

    def __init__(self, orders: socket.socket, gate: bytes, work: str) -> None:
        self.workdir, self.scratch = work, None
        channel, self.number = _order_copy(orders, gate)
        self._connect(channel)
