"""Messages between the host and the supervisor of a container: their names, their fields, and how
each becomes a frame (`mux`). `src/sandbox/container/messages.rs` is the other end. Both read the
examples in `runner/frames/containers`; `PROTOCOL.md` describes the messages ("Containers").

Three kinds of things have numbers that the host chooses: slots (one for each session in the
container), interpreters and programs. An interpreter's number is also that of the stream of its
channel. The supervisor chooses the numbers of pipes.
"""

from __future__ import annotations

import json
import struct
from typing import Any, Literal, NamedTuple, TypedDict

from . import mux

_number = struct.Struct(">I")
_two_numbers = struct.Struct(">II")

# How a fresh interpreter starts: at once; after a cell whose output is discarded; with an emptied
# folder.
StartMode = Literal["immediate", "primed", "emptied"]
# Why a request failed. The first three are about programs.
FailureKind = Literal["missing", "refused", "unsupported", "other"]


# From the host.


class Data(NamedTuple):
    """Bytes for the channel of an interpreter."""

    stream: int
    data: bytes


class Credit(NamedTuple):
    """This many more bytes may be sent on a stream."""

    stream: int
    amount: int


class Input(NamedTuple):
    """The next part of the standard input of a program that is started next."""

    program: int
    data: bytes


class Interrupt(TypedDict):
    """Sends SIGINT to an interpreter, or to a program and its process group."""

    type: Literal["interrupt"]
    process: int


class Kill(TypedDict):
    """Ends an interpreter and the processes that it left behind, or a program and its group."""

    type: Literal["kill"]
    process: int


class CloseChannel(TypedDict):
    """Closes the channel of an interpreter."""

    type: Literal["close_channel"]
    interpreter: int


class ReleaseProgramPipes(TypedDict):
    """Closes two pipes that were kept for a program."""

    type: Literal["release_program_pipes"]
    pipes: int


# Each request is answered with `done` or `failed` and its id. The host ignores answers to id 0.


class Start(TypedDict):
    """Ends the processes of a slot, which may be new, and starts a fresh interpreter in it."""

    type: Literal["start"]
    slot: int
    interpreter: int
    mode: StartMode
    work: str
    id: int


class ExpectCheckpoint(TypedDict):
    """The next copy of the slot's interpreter that sends its handshake is this checkpoint."""

    type: Literal["expect_checkpoint"]
    slot: int
    checkpoint: int
    id: int


class Restore(TypedDict):
    """Replaces the interpreter of a slot with a copy of a checkpoint."""

    type: Literal["restore"]
    slot: int
    interpreter: int
    checkpoint: int
    id: int


class Fork(TypedDict):
    """Starts a copy of a checkpoint of `source` in a new slot, with a folder of its own if
    `own_folder`.
    """

    type: Literal["fork"]
    slot: int
    interpreter: int
    source: int
    checkpoint: int
    own_folder: bool
    id: int


class DiscardCheckpoint(TypedDict):
    """Ends a checkpoint."""

    type: Literal["discard_checkpoint"]
    slot: int
    checkpoint: int
    id: int


class EndSlot(TypedDict):
    """Ends every process of a slot and removes its folder."""

    type: Literal["end_slot"]
    slot: int
    id: int


class Launch(TypedDict):
    """Starts a program beside the interpreter of a slot, with two kept pipes as its output. `input`
    is the number of bytes that its input has, which were sent before.
    """

    type: Literal["launch"]
    slot: int
    program: int
    pipes: int
    words: list[str]
    folder: str
    # Changes to the environment of a fresh session; None removes a variable.
    environment: list[tuple[str, str | None]]
    input: int | None
    id: int


class SendToken(TypedDict):
    """Sends a token in one datagram, which shows that a listener belongs to this container."""

    type: Literal["send_token"]
    token: str
    address: str
    port: int
    id: int


class FindOwner(TypedDict):
    """Asks which slot has made the connection from this address and port."""

    type: Literal["find_owner"]
    address: str
    port: int
    id: int


Request = (
    Start
    | ExpectCheckpoint
    | Restore
    | Fork
    | DiscardCheckpoint
    | EndSlot
    | Launch
    | SendToken
    | FindOwner
)
Control = Interrupt | Kill | CloseChannel | ReleaseProgramPipes | Request


def decode(kind: int, number: int, body: bytes) -> Data | Credit | Input | Control:
    """Reads a message of the host from a frame."""
    if kind == mux.DATA:
        return Data(number, body)
    if kind == mux.CREDIT:
        if len(body) != _number.size:
            raise mux.BrokenStream("a credit has four bytes")
        return Credit(number, *_number.unpack(body))
    if kind == mux.INPUT:
        return Input(number, body)
    if kind == mux.CONTROL:
        control: Control = json.loads(body)
        return control
    raise mux.BrokenStream(f"there is no frame of kind {kind}")


# From the supervisor. Each function returns a frame.


class ExitStatus(TypedDict, total=False):
    """How a process ended. Holds one of the two."""

    code: int
    signal: int


def data(stream: int, data: bytes) -> bytes:
    """Bytes from a channel or a pipe."""
    return mux.encode(mux.DATA, stream, data)


def credit(stream: int, amount: int) -> bytes:
    """This many bytes for a channel were taken."""
    return mux.encode(mux.CREDIT, stream, _number.pack(amount))


def pipes(interpreter: int, output: int, errors: int, data: bytes) -> bytes:
    """Bytes of a channel that came with two new pipes, whose text follows on new streams."""
    return mux.encode(mux.PIPES, interpreter, _two_numbers.pack(output, errors) + data)


def program_pipes(interpreter: int, pipes: int, data: bytes) -> bytes:
    """Bytes of a channel that came with two pipes for a program. The supervisor keeps them under
    one number until the host releases them.
    """
    return mux.encode(mux.PROGRAM_PIPES, interpreter, _number.pack(pipes) + data)


def ready(python: str, landlock: int) -> bytes:
    """The warm process is ready. `landlock` is the version by which sessions are confined."""
    return _control("ready", python=python, landlock=landlock)


def closed(stream: int) -> bytes:
    """A stream has ended."""
    return _control("closed", stream=stream)


def done(id: int, owner: int | None = None) -> bytes:
    """A request was carried out. `owner` is the slot that `find_owner` has found."""
    return _control("done", id=id, owner=owner)


def failed(id: int, why: str, kind: FailureKind = "other") -> bytes:
    """A request was not carried out."""
    return _control("failed", id=id, why=why, kind=kind)


def exited(process: int, status: ExitStatus) -> bytes:
    """An interpreter or a program has ended. All output of an interpreter was sent before."""
    return _control("exited", process=process, status=status)


def checkpoint_lost(slot: int, checkpoint: int) -> bytes:
    """A checkpoint has ended without a request."""
    return _control("checkpoint_lost", slot=slot, checkpoint=checkpoint)


def _control(type: str, **fields: Any) -> bytes:
    body = json.dumps({"type": type, **fields}, separators=(",", ":"))
    return mux.encode(mux.CONTROL, 0, body.encode())
