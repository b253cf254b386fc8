"""Mux: multiplexes many streams over one, for sessions in a container. Pure: no descriptor, no
state except a buffer.

In a container the supervisor and the host share a single stream of bytes, the standard streams of
the container's first process. Frames travel on it in both directions:

    1 byte    kind
    4 bytes   big-endian: the number of a stream, or of what the kind says
    4 bytes   big-endian: length of the body
    body

`messages` gives the bodies their meaning. A stream is the channel or a pipe of an interpreter. Each
stream has a credit: the number of bytes that may be in flight before the reader grants more. So a
stream that is not read blocks only itself, never another.
"""

from __future__ import annotations

import struct

# Kinds of frames. The number and the body of each:
DATA = 0  # a stream; bytes of it
CREDIT = 1  # a stream; how many bytes more may be sent on it, in 4 bytes
CONTROL = 2  # 0; a JSON object with a `type`
INPUT = 3  # a program; a part of its standard input
PIPES = 4  # an interpreter; the numbers of two new streams, and bytes of its channel
PROGRAM_PIPES = 5  # an interpreter; the number of a pair of pipes, and bytes of its channel

# Limit on the body of a frame. Data is split into far smaller pieces; only the plan of a session
# comes near it.
MAX_BODY_BYTES = 1024 * 1024
# Pieces of this size keep a busy stream from delaying the others.
PIECE = 32 * 1024

# Initial credit of a stream.
CHANNEL_CREDIT = 256 * 1024
PIPE_CREDIT = 64 * 1024

_head = struct.Struct(">BII")


class BrokenStream(ValueError):
    """The other side sent bytes that are not a frame."""


def encode(kind: int, number: int, body: bytes = b"") -> bytes:
    return _head.pack(kind, number, len(body)) + body


class Decoder:
    """Splits a stream of bytes into frames, in whatever pieces the bytes arrive."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def next(self) -> tuple[int, int, bytes] | None:
        """Returns the kind, number and body of the next complete frame, if there is one."""
        buffer = self._buffer
        if len(buffer) < _head.size:
            return None
        kind, number, length = _head.unpack_from(buffer)
        if length > MAX_BODY_BYTES:
            raise BrokenStream(f"a frame cannot have {length} bytes")
        end = _head.size + length
        if len(buffer) < end:
            return None
        body = bytes(buffer[_head.size : end])
        del buffer[:end]
        return kind, number, body
