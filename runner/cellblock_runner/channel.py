"""The channel: a stream socket that carries frames both ways, and sometimes descriptors to the host."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from .frames import Decoder, Header, encode

_READ_SIZE = 1024 * 1024


class Channel:
    """Owns the socket. Sending is one C call per frame, so that a signal or a garbage collection cannot tear one."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(True)
        self._connection = connection
        self._decoder = Decoder()

    def receive(self) -> tuple[Header, bytes] | None:
        """Returns the next frame, or None when the host has closed the channel."""
        while True:
            frame = self._decoder.next()
            if frame is not None:
                return frame
            data = self._connection.recv(_READ_SIZE)
            if not data:
                return None
            self._decoder.feed(data)

    def send(self, header: Header, payload: bytes = b"", descriptors: Sequence[int] = ()) -> None:
        data = encode(header, payload)
        if descriptors:
            # Descriptors ride on the first byte; a stream socket may take fewer bytes than it was given.
            sent = socket.send_fds(self._connection, [data], list(descriptors))
            data = data[sent:]
        self._connection.sendall(data)

    def close(self) -> None:
        self._connection.close()
