"""The reference merger: how the host puts three streams back into one order. Pure, and the model
for the merger of the host.

Each pipe is a sequence of segments, separated by markers. Segment *n* follows marker *n*. The
order of everything is: frame *n* (when marker *n* says "F"), then segment *n* of both pipes, then
marker *n + 1*, and so on. So a pipe waits at a marker until the other pipe has reached it and, for
an "F", the frame has arrived. Inside one segment Python itself uses one pipe only; when both have
bytes, a subprocess or C code wrote them, and they are taken as they arrive.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple, Union

_START = b"\x00\x1bCB"
MARKER_SIZE = len(_START) + 16 + 4 + 1 + 1


class Text(NamedTuple):
    stream: str
    data: bytes


class Frame(NamedTuple):
    header: dict[str, Any]
    payload: bytes


Event = Union[Text, Frame]


class Pipe:
    """One pipe: its bytes not yet taken, split at markers."""

    def __init__(self, stream: str, marker: bytes) -> None:
        self.stream = stream
        self._start = _START + marker
        self._bytes = bytearray()

    def feed(self, data: bytes) -> None:
        self._bytes += data

    def take_text(self) -> bytes:
        """Takes the bytes that certainly precede the next marker, and keeps those that may be the
        beginning of one.
        """
        end = self._bytes.find(self._start)
        if end < 0:
            end = len(self._bytes)
            for length in range(min(len(self._start) - 1, end), 0, -1):
                if self._bytes.endswith(self._start[:length]):
                    end -= length
                    break
        text = bytes(self._bytes[:end])
        del self._bytes[:end]
        return text

    def take_all(self) -> bytes:
        """Takes the rest of a pipe that has reached its end."""
        text = bytes(self._bytes)
        self._bytes.clear()
        return text

    def next_marker(self) -> tuple[int, bytes] | None:
        """Returns (seq, kind) when the pipe waits at a complete marker."""
        if not self._bytes.startswith(self._start) or len(self._bytes) < MARKER_SIZE:
            return None
        seq = int.from_bytes(self._bytes[len(self._start) : len(self._start) + 4], "big")
        return seq, bytes(self._bytes[MARKER_SIZE - 2 : MARKER_SIZE - 1])

    def pass_marker(self) -> None:
        del self._bytes[:MARKER_SIZE]


class Merger:
    """Takes bytes and frames as they arrive, and returns events in their order."""

    def __init__(self, marker: bytes) -> None:
        self._marker = marker
        self._frames: deque[Frame] = deque()
        self.pipes = (Pipe("stdout", marker), Pipe("stderr", marker))

    def feed_text(self, index: int, data: bytes) -> None:
        self.pipes[index].feed(data)

    def feed_frame(self, header: dict[str, Any], payload: bytes) -> None:
        self._frames.append(Frame(header, payload))

    def rotate(self) -> None:
        """Starts with new, empty pipes. The rest of the old ones belongs to no cell."""
        self.pipes = (Pipe("stdout", self._marker), Pipe("stderr", self._marker))

    def events(self) -> list[Event]:
        """Returns the events whose order is known."""
        ready: list[Event] = []
        while True:
            for pipe in self.pipes:
                text = pipe.take_text()
                if text:
                    ready.append(Text(pipe.stream, text))
            markers = [pipe.next_marker() for pipe in self.pipes]
            if markers[0] is None or markers[1] is None:
                return ready
            if markers[0] != markers[1]:
                raise ValueError(f"the pipes disagree: {markers}")
            seq, kind = markers[0]
            if kind == b"F":
                if not self._frames:
                    return ready
                frame = self._frames.popleft()
                if frame.header["seq"] != seq:
                    raise ValueError(f"frame {frame.header['seq']} came for marker {seq}")
                ready.append(frame)
            for pipe in self.pipes:
                pipe.pass_marker()

    def remains(self) -> list[Event]:
        """Returns the remaining events after the death of the interpreter."""
        ready = self.events()
        ready += [Text(pipe.stream, text) for pipe in self.pipes if (text := pipe.take_all())]
        return ready
