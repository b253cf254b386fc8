"""The supervisor's end of the mux: the stream to the host, and the channels and pipes of
interpreters that share it.

Bytes are read from a channel or a pipe only within its credit. Text that an interpreter wrote to a
pipe before it sent a frame is forwarded before that frame.
"""

from __future__ import annotations

import array
import fcntl
import os
import select
import socket
import stat
from collections.abc import Callable
from functools import partial
from typing import Any

from . import messages, mux, poller

_IN, _OUT = 0, 1
_READ = 64 * 1024
# Pipes of earlier cells that are still drained, so that leftover processes neither block nor die.
_MAX_RETIRED = 16
# Pipes are numbered above interpreters, whose numbers the host chooses.
_FIRST_PIPE = 1 << 31


class Pipe:
    """One of an interpreter's pipes, with its flow-control credit."""

    def __init__(self, stream: int, descriptor: int) -> None:
        self.stream, self.descriptor = stream, descriptor
        self.credit = mux.PIPE_CREDIT
        self.retired = False


class Channel:
    """The channel of an interpreter and the pipes that came with its frames."""

    def __init__(self, number: int, connection: socket.socket) -> None:
        self.number = number
        # None once it is closed.
        self.socket: socket.socket | None = connection
        self.credit = mux.CHANNEL_CREDIT
        # Bytes from the host that the interpreter has not accepted yet.
        self.incoming = bytearray()
        self.pipes: list[Pipe] = []


class MuxConnection:
    def __init__(self, events: poller.Poller) -> None:
        self._poller = events
        self._decoder = mux.Decoder()
        self._outgoing: list[bytes] = []
        self._channels: dict[int, Channel] = {}
        self._pipes: dict[int, Pipe] = {}
        self._next_pipe = _FIRST_PIPE
        # Takes over two descriptors for the output of a program, and returns the number under which
        # they are kept, or None if they were closed. Without it such descriptors are closed.
        self.keep_program_pipes: Callable[[list[int]], int | None] | None = None

    # The stream to the host.

    def listen(self, received: bytes, handle: Callable[[int, int, bytes], None]) -> None:
        """Passes every frame of the host to `handle`, beginning with the bytes that were received
        already.
        """
        os.set_blocking(_IN, False)
        self._poller.listen(_IN, lambda: self._read(handle))
        self._receive(received, handle)

    def _read(self, handle: Callable[[int, int, bytes], None]) -> None:
        try:
            received = os.read(_IN, _READ)
        except BlockingIOError:
            return
        if not received:
            os._exit(0)  # The host is gone.
        self._receive(received, handle)

    def _receive(self, received: bytes, handle: Callable[[int, int, bytes], None]) -> None:
        self._decoder.feed(received)
        while (frame := self._decoder.next()) is not None:
            handle(*frame)

    def send(self, frame: bytes) -> None:
        """Queues a frame until the next `flush`."""
        self._outgoing.append(frame)

    def flush(self) -> None:
        data = memoryview(b"".join(self._outgoing))
        self._outgoing.clear()
        while data:
            try:
                data = data[os.write(_OUT, data) :]
            except BlockingIOError:
                select.select((), (_OUT,), ())
            except OSError:
                os._exit(0)  # The host no longer reads.

    # Channels and pipes.

    def new_number(self) -> int:
        """Returns a number for a pipe, or for a pair of pipes of a program."""
        number, self._next_pipe = self._next_pipe, self._next_pipe + 1
        return number

    def open(self, number: int, connection: socket.socket) -> Channel:
        """Begins to forward what arrives on a channel, which does not block."""
        channel = self._channels[number] = Channel(number, connection)
        self._watch(channel)
        return channel

    def give(self, message: messages.Data) -> None:
        """Passes bytes of the host to a channel, if it is open."""
        channel = self._channels.get(message.stream)
        if channel is not None and channel.socket is not None:
            channel.incoming += message.data
            self._push(channel)

    def add_credit(self, message: messages.Credit) -> None:
        pipe = self._pipes.get(message.stream)
        if pipe is not None:
            pipe.credit += message.amount
            if pipe.credit == message.amount:
                self._poller.listen(pipe.descriptor, lambda: self._pull(pipe))
            return
        channel = self._channels.get(message.stream)
        if channel is not None and channel.socket is not None:
            channel.credit += message.amount
            self._watch(channel)

    def hang_up(self, number: int) -> None:
        """Closes a channel. Its pipes stay open."""
        channel = self._channels.get(number)
        if channel is not None:
            self._close_socket(channel)

    def close(self, channel: Channel) -> None:
        """Closes a channel and its pipes."""
        if self._channels.get(channel.number) is channel:
            del self._channels[channel.number]
        self._close_socket(channel)
        for pipe in channel.pipes:
            self._drop(pipe)
        channel.pipes.clear()

    def drain(self, channel: Channel) -> bool:
        """Forwards everything that an interpreter has written. Returns whether more is pending than
        the credit allows.
        """
        waits = False
        if channel.socket is not None:
            waits |= self._carry(channel)
        for pipe in list(channel.pipes):
            if not pipe.retired:
                waits |= self._pull(pipe)
        return waits

    def _close_socket(self, channel: Channel) -> None:
        if channel.socket is not None:
            self._poller.ignore(channel.socket.fileno())
            channel.socket.close()
            channel.socket = None

    def _watch(self, channel: Channel) -> None:
        if channel.socket is None:
            return
        events = (poller.READ if channel.credit > 0 else 0) | (
            poller.WRITE if channel.incoming else 0
        )
        self._poller.watch(channel.socket, events, lambda: self._serve(channel))

    def _serve(self, channel: Channel) -> None:
        if channel.incoming:
            self._push(channel)
        if channel.socket is not None and channel.credit > 0:
            self._carry(channel)

    def _push(self, channel: Channel) -> None:
        """Passes as many bytes from the host to the interpreter as it accepts."""
        if channel.socket is None:
            return
        taken = 0
        try:
            while channel.incoming:
                size = channel.socket.send(memoryview(channel.incoming)[:_READ])
                del channel.incoming[:size]
                taken += size
        except BlockingIOError:
            pass
        except OSError:
            taken += len(channel.incoming)
            channel.incoming.clear()  # It has ended, which is reported elsewhere.
        if taken:
            self.send(messages.credit(channel.number, taken))
        self._watch(channel)

    def _carry(self, channel: Channel) -> bool:
        """Forwards frames to the host. Returns whether more is pending than the credit allows."""
        space = socket.CMSG_SPACE(8 * array.array("i").itemsize)
        while channel.socket is not None:
            if channel.credit <= 0:
                self._watch(channel)
                return True
            try:
                data, ancillary, _, _ = channel.socket.recvmsg(
                    min(channel.credit, mux.PIECE), space
                )
            except BlockingIOError:
                return False
            except OSError:
                data, ancillary = b"", []
            descriptors = received_descriptors(ancillary)
            if not data:
                self.send(messages.closed(channel.number))
                self._close_socket(channel)
                return False
            channel.credit -= len(data)
            # Text that preceded these frames is in the pipes by now, and must arrive first.
            for pipe in list(channel.pipes):
                if not pipe.retired:
                    self._pull(pipe)
            self._forward(channel, data, descriptors)
        return False

    def _forward(self, channel: Channel, data: bytes, descriptors: list[int]) -> None:
        """Forwards bytes of a channel with the descriptors that came with them."""
        if len(descriptors) == 2 and all(map(_is_read_end, descriptors)):
            self._add_pipes(channel, data, descriptors)
            return
        kept = None
        keep = self.keep_program_pipes
        if len(descriptors) == 2 and keep is not None and all(map(_is_write_end, descriptors)):
            kept = keep(descriptors)
        else:
            for descriptor in descriptors:
                os.close(descriptor)
        if kept is None:
            self.send(messages.data(channel.number, data))
        else:
            self.send(messages.program_pipes(channel.number, kept, data))

    def _add_pipes(self, channel: Channel, data: bytes, descriptors: list[int]) -> None:
        for pipe in channel.pipes:
            pipe.retired = True
        retired = list(channel.pipes)
        for pipe in retired[: max(0, len(retired) - _MAX_RETIRED)]:
            channel.pipes.remove(pipe)
            self._drop(pipe)
        streams = []
        for descriptor in descriptors:
            pipe = Pipe(self.new_number(), descriptor)
            os.set_blocking(descriptor, False)
            self._pipes[pipe.stream] = pipe
            channel.pipes.append(pipe)
            self._poller.listen(descriptor, partial(self._pull, pipe))
            streams.append(pipe.stream)
        self.send(messages.pipes(channel.number, streams[0], streams[1], data))

    def _pull(self, pipe: Pipe) -> bool:
        """Forwards text to the host. Returns whether more is pending than the credit allows."""
        while pipe.stream in self._pipes:
            if pipe.credit <= 0:
                self._poller.ignore(pipe.descriptor)
                return True
            try:
                data = os.read(pipe.descriptor, min(pipe.credit, mux.PIECE))
            except BlockingIOError:
                return False
            except OSError:
                data = b""
            if not data:
                self.send(messages.closed(pipe.stream))
                self._drop(pipe)
                return False
            pipe.credit -= len(data)
            self.send(messages.data(pipe.stream, data))
            if len(data) < mux.PIECE:
                return False
        return False

    def _drop(self, pipe: Pipe) -> None:
        if self._pipes.pop(pipe.stream, None) is not None:
            self._poller.ignore(pipe.descriptor)
            os.close(pipe.descriptor)


def received_descriptors(ancillary: list[Any]) -> list[int]:
    """Returns the descriptors that came with a message."""
    found = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
    return list(found)


def _is_write_end(descriptor: int) -> bool:
    return _is_pipe(descriptor, os.O_WRONLY)


def _is_read_end(descriptor: int) -> bool:
    return _is_pipe(descriptor, os.O_RDONLY)


def _is_pipe(descriptor: int, mode: int) -> bool:
    is_pipe = stat.S_ISFIFO(os.fstat(descriptor).st_mode)
    return is_pipe and fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == mode
