"""Strands: multiplexes many streams over one, for sessions in a container. Pure: no descriptor, no
state except a buffer.

In a container the supervisor and the host share a single stream of bytes, the standard streams of
the container's first process. Messages travel on it in both directions:

    1 byte    kind
    4 bytes   big-endian: number of an interpreter, a member or a strand
    4 bytes   big-endian: length of the rest
    rest      bytes of a strand, or a JSON object

Each strand has a credit: the number of bytes that may be in flight before the reader grants more.
So a strand that is not read blocks only itself, never another. `PROTOCOL.md` lists the kinds
("Containers").
"""

from __future__ import annotations

import json
import struct
from typing import Any

# Limit on the bytes after the head of a message. Data is split into far smaller pieces; only the
# plan of a session comes near it.
LARGEST_MESSAGE = 1024 * 1024
# Pieces of this size keep a busy strand from delaying the others.
PIECE = 32 * 1024

# Initial credit of a strand.
CHANNEL_CREDIT = 256 * 1024
PIPE_CREDIT = 64 * 1024

_head = struct.Struct(">cII")
_amount = struct.Struct(">I")
_two = struct.Struct(">II")


class BrokenStream(ValueError):
    """The other side sent bytes that are not a message."""


def encode(kind: bytes, number: int, rest: bytes = b"") -> bytes:
    return _head.pack(kind, number, len(rest)) + rest


def encode_json(kind: bytes, number: int, thing: dict[str, Any]) -> bytes:
    return encode(kind, number, json.dumps(thing).encode())


def amount(rest: bytes) -> int:
    """Returns the credit that a message grants."""
    if len(rest) != _amount.size:
        raise BrokenStream("a credit has four bytes")
    return int(_amount.unpack(rest)[0])


def encode_amount(kind: bytes, number: int, value: int) -> bytes:
    return encode(kind, number, _amount.pack(value))


def encode_pipes(kind: bytes, number: int, out: int, err: int, rest: bytes) -> bytes:
    """Announces two new strands together with the bytes that they came with."""
    return encode(kind, number, _two.pack(out, err) + rest)


def encode_outlets(kind: bytes, number: int, outlets: int, rest: bytes) -> bytes:
    """Announces two pipes for a program, under one number, together with the bytes that they came
    with.
    """
    return encode(kind, number, _amount.pack(outlets) + rest)


class Decoder:
    """Splits a stream of bytes into messages, in whatever pieces the bytes arrive."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def next(self) -> tuple[bytes, int, bytes] | None:
        buffer = self._buffer
        if len(buffer) < _head.size:
            return None
        kind, number, length = _head.unpack_from(buffer)
        if length > LARGEST_MESSAGE:
            raise BrokenStream(f"a message cannot have {length} bytes")
        end = _head.size + length
        if len(buffer) < end:
            return None
        rest = bytes(buffer[_head.size : end])
        del buffer[:end]
        return kind, number, rest
