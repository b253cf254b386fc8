"""A host for tests: starts `python -m cellblock_runner`, speaks frames with it and merges its lanes."""

from __future__ import annotations

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

# Nothing in these tests takes this long. A test that waits longer has found a bug.
PATIENCE = 20


class Died(Exception):
    """The runner ended. `events` is what it had said by then."""

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
        return "".join(e.data.decode() for e in self.events if isinstance(e, Text) and e.stream == name)

    @property
    def order(self) -> list[str]:
        """The cell as one readable list: 'out:…', 'err:…', and the text/plain of displays and the value."""
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

    def __init__(self, preload: str = "") -> None:
        self.workdir = tempfile.mkdtemp(prefix="runner-test-")
        self._channel, theirs = socket.socketpair()
        environment = {**os.environ, "PYTHONPATH": str(RUNNER), "HOME": self.workdir + "/.home"}
        environment["MPLCONFIGDIR"] = self.workdir + "/.matplotlib"
        command = [sys.executable, "-m", "cellblock_runner", "--channel-fd", str(theirs.fileno())]
        command += ["--workdir", self.workdir, "--preload", preload]
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=environment)
        theirs.close()
        self._decoder = Decoder()
        self._pipes: list[int] = []
        self._frames_seen: list[tuple[dict[str, Any], bytes]] = []
        self._channel_is_open = True
        self._number = 0
        self.rotations = 0
        while not self._frames_seen:
            if not self._channel_is_open:
                raise Died([])
            self._pump()
        self.hello, _ = self._frames_seen.pop(0)
        self._merger = Merger(bytes.fromhex(self.hello["marker"]))

    def close(self) -> int:
        """Hangs up, waits for the runner and returns its exit status."""
        self._channel.close()
        try:
            status = self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        for pipe in self._pipes:
            os.close(pipe)
        shutil.rmtree(self.workdir, ignore_errors=True)
        return status

    def run(self, code: str) -> Result:
        self.begin(code)
        return self.finish()

    def begin(self, code: str) -> None:
        self._number += 1
        self._send({"type": "execute", "id": self._number}, code.encode())

    def finish(
        self, watch: Callable[[str], None] | None = None, when_started: Callable[[], None] | None = None
    ) -> Result:
        """Reads until the cell is done. `watch` sees the text so far, each time some arrived."""
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
            if not self._pump():
                raise Died(events + self._merger.remains())
            self._take_frames()

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

    def request(self, header: dict[str, Any], payload: bytes = b"", answers: bool = True) -> list[Frame]:
        """Sends a file request and returns the frames that answer it."""
        self._send(header, payload)
        got: list[Frame] = []
        while answers and not (got and got[-1].header["type"] in ("file_end", "written", "failed")):
            while self._frames_seen:
                got.append(Frame(*self._frames_seen.pop(0)))
            if not (got and got[-1].header["type"] in ("file_end", "written", "failed")) and not self._pump():
                raise Died([*got])
        return got

    def upload(self, path: str, *pieces: bytes, overwrite: bool = False) -> Frame:
        self._number += 1
        self.request({"type": "write_begin", "id": self._number, "path": path, "overwrite": overwrite}, answers=False)
        for piece in pieces:
            self.request({"type": "write_data", "id": self._number}, piece, answers=False)
        return self.request({"type": "write_end", "id": self._number})[-1]

    def download(self, path: str, limit: int = 1 << 40) -> tuple[bytes, Frame]:
        self._number += 1
        frames = self.request({"type": "read_file", "id": self._number, "path": path, "limit": limit})
        return b"".join(frame.payload for frame in frames[:-1]), frames[-1]

    def _send(self, header: dict[str, Any], payload: bytes) -> None:
        self._channel.sendall(encode(header, payload))

    def _take_frames(self) -> None:
        while self._frames_seen:
            header, payload = self._frames_seen.pop(0)
            if header.get("rotated"):
                self.rotations += 1
                self._merger.rotate()
            if "seq" in header:
                self._merger.feed_frame(header, payload)

    def _pump(self) -> bool:
        """Waits for something to arrive and takes it. Returns False when the runner has gone and all is read."""
        sources: list[Any] = list(self._pipes)
        if self._channel_is_open:
            sources.append(self._channel)
        if not self._channel_is_open and not self._pipes:
            return False
        readable, _, _ = select.select(sources, [], [], PATIENCE)
        if not readable:
            raise TimeoutError("the runner said nothing")
        for lane, pipe in enumerate(list(self._pipes)):
            if pipe in readable:
                data = os.read(pipe, 1 << 20)
                if data:
                    self._merger.feed_text(lane, data)
                elif not self._channel_is_open:
                    self._pipes = []
        if self._channel in readable:
            data, descriptors, _, _ = socket.recv_fds(self._channel, 1 << 20, 2)
            if descriptors:
                # Everything in front of this frame has been read: the old pipes have nothing more for any cell.
                self._drop_pipes()
                self._pipes = list(descriptors)
            if data:
                self._decoder.feed(data)
                while (frame := self._decoder.next()) is not None:
                    self._frames_seen.append(frame)
            else:
                self._channel_is_open = False
        return True

    def _drop_pipes(self) -> None:
        for pipe in self._pipes:
            os.close(pipe)
