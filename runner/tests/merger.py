"""The reference merger: how the host puts three lanes back into one order. Pure, and the model for
the host's own.

Each pipe is a row of segments, separated by markers. Segment *n* is what follows marker *n*. The
order of everything is: frame *n* (when marker *n* says "F"), then segment *n* of both pipes, then
marker *n + 1*, and so on. So a lane waits at a marker until the other lane has reached it and, for
an "F", the frame has arrived. Inside one segment Python itself uses one pipe only; when both have
bytes, a subprocess or C code wrote them, and they are taken as they come.
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


class Lane:
    """One pipe: its bytes not yet taken, split at markers."""

    def __init__(self, stream: str, marker: bytes) -> None:
        self.stream = stream
        self._start = _START + marker
        self._bytes = bytearray()

    def feed(self, data: bytes) -> None:
        self._bytes += data

    def take_text(self) -> bytes:
        """Takes what surely comes before the next marker; keeps back what may be the beginning of
        one.
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
        """Returns (seq, kind) when the lane waits at a complete marker."""
        if not self._bytes.startswith(self._start) or len(self._bytes) < MARKER_SIZE:
            return None
        seq = int.from_bytes(self._bytes[len(self._start) : len(self._start) + 4], "big")
        return seq, bytes(self._bytes[MARKER_SIZE - 2 : MARKER_SIZE - 1])

    def pass_marker(self) -> None:
        del self._bytes[:MARKER_SIZE]


class Merger:
    """Takes bytes and frames as they arrive, gives events in their order."""

    def __init__(self, marker: bytes) -> None:
        self._marker = marker
        self._frames: deque[Frame] = deque()
        self.lanes = (Lane("stdout", marker), Lane("stderr", marker))

    def feed_text(self, lane: int, data: bytes) -> None:
        self.lanes[lane].feed(data)

    def feed_frame(self, header: dict[str, Any], payload: bytes) -> None:
        self._frames.append(Frame(header, payload))

    def rotate(self) -> None:
        """Begins with new, empty pipes. What the old ones still hold belongs to no cell."""
        self.lanes = (Lane("stdout", self._marker), Lane("stderr", self._marker))

    def events(self) -> list[Event]:
        """Returns what can be put in order by now."""
        ready: list[Event] = []
        while True:
            for lane in self.lanes:
                text = lane.take_text()
                if text:
                    ready.append(Text(lane.stream, text))
            markers = [lane.next_marker() for lane in self.lanes]
            if markers[0] is None or markers[1] is None:
                return ready
            if markers[0] != markers[1]:
                raise ValueError(f"the lanes disagree: {markers}")
            seq, kind = markers[0]
            if kind == b"F":
                if not self._frames:
                    return ready
                frame = self._frames.popleft()
                if frame.header["seq"] != seq:
                    raise ValueError(f"frame {frame.header['seq']} came for marker {seq}")
                ready.append(frame)
            for lane in self.lanes:
                lane.pass_marker()

    def remains(self) -> list[Event]:
        """Returns what is left when the interpreter has died."""
        ready = self.events()
        ready += [Text(lane.stream, text) for lane in self.lanes if (text := lane.take_all())]
        return ready
