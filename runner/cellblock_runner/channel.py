"""The channel: a stream socket that carries frames in both directions, and sometimes descriptors to
the host.
"""

from __future__ import annotations

import select
import socket
from collections import deque
from collections.abc import Sequence

from .frames import Decoder, Header, encode

# The channel always has this number, so that a copy of a session finds its own channel in place of
# the original's.
CHANNEL_DESCRIPTOR = 1000

_READ_SIZE = 1024 * 1024


class Channel:
    """Owns the socket. Sending is one C call per frame, so that a signal or a garbage collection
    cannot split one.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(True)
        self._connection = connection
        self._decoder = Decoder()
        # Requests that arrived while a thread waited for an answer.
        self._early: deque[tuple[Header, bytes]] = deque()
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)

    @classmethod
    def in_its_place(cls) -> Channel:
        """Takes over the socket at the channel's number."""
        return cls(socket.socket(fileno=CHANNEL_DESCRIPTOR))

    def fileno(self) -> int:
        return self._connection.fileno()

    def receive(self) -> tuple[Header, bytes] | None:
        """Returns the next frame, or None if the host has closed the channel."""
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
        """Reports whether input from the host is pending."""
        if not self._early and (frame := self._decoder.next()) is not None:
            self._early.append(frame)
        return bool(self._early or self._poll.poll(0))

    def wait(self, milliseconds: int, others: Sequence[int] = ()) -> None:
        """Waits until data has arrived, here or on another descriptor, or until the timeout.
        Consumes nothing, so any number of threads may wait.
        """
        poll = select.poll()  # A separate one, because it cannot be used by two threads at a time.
        poll.register(self._connection, select.POLLIN)
        for descriptor in others:
            poll.register(descriptor, select.POLLIN)
        poll.poll(milliseconds)

    def wait_to_send(self) -> bool:
        """Waits until the socket is writable or readable. Returns whether it is writable."""
        poll = select.poll()
        poll.register(self._connection, select.POLLIN | select.POLLOUT)
        return any(events & ~select.POLLIN for _, events in poll.poll())

    def receive_arrived(self) -> list[tuple[Header, bytes]] | None:
        """Returns the frames that have arrived, without waiting. Returns None if the host has
        closed the channel.
        """
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
        """Queues a frame for `receive`."""
        self._early.append((header, payload))

    def send(self, header: Header, payload: bytes = b"", descriptors: Sequence[int] = ()) -> None:
        data = encode(header, payload)
        if descriptors:
            # Descriptors are attached to the first byte; a stream socket may accept fewer bytes
            # than it was given.
            sent = socket.send_fds(self._connection, [data], list(descriptors))
            data = data[sent:]
        self._connection.sendall(data)

    def receive_gate(self) -> bytes:
        """Returns the single byte with which the host opens the gate of a copy. Returns no bytes if
        the host has closed the channel.

        Drops requests that the original had received and not yet answered: they are not the copy's.
        """
        self._decoder = Decoder()
        self._early.clear()
        return self._connection.recv(1)

    def close(self) -> None:
        self._connection.close()
