"""Frames: the bytes on the channel, as PROTOCOL.md describes them. Pure: no socket, no state except
a buffer.
"""

from __future__ import annotations

import json
import struct
from typing import Any

# Limit on a frame, counted after its first four bytes. It bounds the memory that one side needs for
# the other.
MAX_FRAME_BYTES = 32 * 1024 * 1024

Header = dict[str, Any]

_lengths = struct.Struct(">II")
_length = struct.Struct(">I")
_to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class BrokenFrame(ValueError):
    """The peer sent bytes that are not a frame. Nothing after them can be decoded."""


class FrameTooLarge(ValueError):
    """A frame that we were about to send is larger than the peer accepts."""


def encode_header(header: Header) -> bytes:
    """Returns the header as JSON. Lone surrogates, which UTF-8 cannot encode, become question
    marks.
    """
    return _to_json(header).encode("utf-8", "replace")


def encode(header: Header, payload: bytes = b"") -> bytes:
    """Returns one whole frame."""
    head = encode_header(header)
    length = 4 + len(head) + len(payload)
    if length > MAX_FRAME_BYTES:
        raise FrameTooLarge(f"a frame of {length} bytes is larger than {MAX_FRAME_BYTES}")
    return _lengths.pack(length, len(head)) + head + payload


class Decoder:
    """Splits a stream of bytes into frames, in whatever pieces the bytes arrive."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def next(self) -> tuple[Header, bytes] | None:
        """Returns the next whole frame, or None if more bytes are needed.

        Raises BrokenFrame as soon as the layout is invalid. A length that is too large is rejected
        before its bytes arrive.
        """
        buffer = self._buffer
        if len(buffer) < 4:
            return None
        (length,) = _length.unpack_from(buffer)
        if not 4 <= length <= MAX_FRAME_BYTES:
            raise BrokenFrame(f"a frame cannot have a length of {length}")
        if len(buffer) < 8:
            return None
        _, header_length = _lengths.unpack_from(buffer)
        if header_length > length - 4:
            raise BrokenFrame("the header is longer than its frame")
        if len(buffer) < 4 + length:
            return None
        header = _parse_header(bytes(buffer[8 : 8 + header_length]))
        payload = bytes(buffer[8 + header_length : 4 + length])
        del buffer[: 4 + length]
        return header, payload


def _parse_header(data: bytes) -> Header:
    try:
        header = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as cause:
        raise BrokenFrame("the header is not JSON") from cause
    if not isinstance(header, dict):
        raise BrokenFrame("the header is not an object")
    if not isinstance(header.get("type"), str):
        raise BrokenFrame("the header has no type")
    return header
