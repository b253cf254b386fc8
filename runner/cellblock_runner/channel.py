"""The channel: a stream socket that carries frames both ways, and sometimes descriptors to the host."""

from __future__ import annotations

import select
import socket
from collections import deque
from collections.abc import Sequence

from .frames import Decoder, Header, encode

# The channel is always here, so that a copy of a session finds its own in the place of the original's.
CHANNEL_DESCRIPTOR = 1000

_READ_SIZE = 1024 * 1024


class Channel:
    """Owns the socket. Sending is one C call per frame, so that a signal or a garbage collection cannot tear one."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(True)
        self._connection = connection
        self._decoder = Decoder()
        # Requests that arrived while somebody waited for an answer.
        self._early: deque[tuple[Header, bytes]] = deque()
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)

    @classmethod
    def in_its_place(cls) -> Channel:
        """Takes the socket that was put at the channel's number."""
        return cls(socket.socket(fileno=CHANNEL_DESCRIPTOR))

    def fileno(self) -> int:
        return self._connection.fileno()

    def receive(self) -> tuple[Header, bytes] | None:
        """Returns the next frame, or None when the host has closed the channel."""
        if self._early:
            return self._early.popleft()
        while True:
            frame = self._decoder.next()
            if frame is not None:
                return frame
            data = self._connection.recv(_READ_SIZE)
            if not data:
                return None
            self._decoder.feed(data)

    def has_more(self) -> bool:
        """Tells whether the host has said something that was not received yet."""
        if not self._early and (frame := self._decoder.next()) is not None:
            self._early.append(frame)
        return bool(self._early or self._poll.poll(0))

    def wait(self, milliseconds: int, others: Sequence[int] = ()) -> None:
        """Waits until something has arrived, here or at another descriptor, or for so long. Takes nothing, so any number of threads may wait."""
        poll = select.poll()  # One of its own, because it cannot be used twice at a time.
        poll.register(self._connection, select.POLLIN)
        for descriptor in others:
            poll.register(descriptor, select.POLLIN)
        poll.poll(milliseconds)

    def wait_to_send(self) -> bool:
        """Waits until the host has read what it was sent, or has said something. Returns whether the former is so."""
        poll = select.poll()
        poll.register(self._connection, select.POLLIN | select.POLLOUT)
        return any(events & ~select.POLLIN for _, events in poll.poll())

    def receive_arrived(self) -> list[tuple[Header, bytes]] | None:
        """Returns the frames that have arrived by now, without waiting; None when the host has closed the channel."""
        try:
            data = self._connection.recv(_READ_SIZE, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        if not data:
            return None
        self._decoder.feed(data)
        frames = []
        while (frame := self._decoder.next()) is not None:
            frames.append(frame)
        return frames

    def put_back(self, header: Header, payload: bytes) -> None:
        """Keeps a frame for `receive`."""
        self._early.append((header, payload))

    def send(self, header: Header, payload: bytes = b"", descriptors: Sequence[int] = ()) -> None:
        data = encode(header, payload)
        if descriptors:
            # Descriptors ride on the first byte; a stream socket may take fewer bytes than it was given.
            sent = socket.send_fds(self._connection, [data], list(descriptors))
            data = data[sent:]
        self._connection.sendall(data)

    def receive_gate(self) -> bytes:
        """Returns the one byte with which the host opens the gate of a copy, or nothing when it has closed the channel.

        Requests that the original had received and not yet answered are not the copy's.
        """
        self._decoder = Decoder()
        self._early.clear()
        return self._connection.recv(1)

    def close(self) -> None:
        self._connection.close()
