"""Side processes: programs that the host has started in a container, beside the session that asked
for them.

Where programs need an approval, the kernel refuses to start any in all processes except the
supervisor (`confine.refuse_programs`). The supervisor starts an approved program from words that
came from the host: no process of the session takes part in it.

    supervisor     forks a subreaper for each program
    subreaper      parent of the program, and of the processes that it leaves behind. Reports its
                   start and its exit status
    program        enters a landlock of its own, like that of its session, and execs the requested
                   program

Until the exec, it cannot be read from inside: it is not dumpable, like the supervisor. Afterwards
landlock separates it from the session, although both run as the same user; without landlock no
program is started.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple, NoReturn

from . import confine, forkserver

# Beyond every number that the limit of a container allows.
_EVERY_DESCRIPTOR = 65536
_USUAL_PATH = "/usr/bin:/bin"
_number = struct.Struct("=i")


class SideProcess(NamedTuple):
    """A program to start."""

    words: Sequence[str]
    folder: str
    environment: Mapping[str, str]
    # Folders that it may write to.
    folders: Sequence[str]


def start(wanted: SideProcess, stdin: int, outlets: Sequence[int], reporter: socket.socket) -> int:
    """Creates the subreaper of a program. Returns its process id. The program's start and exit
    status are reported on `reporter`.
    """
    subreaper = os.fork()
    if subreaper:
        return subreaper
    try:
        _be_subreaper(wanted, (stdin, *outlets), reporter.detach())
    finally:
        os._exit(1)


def input_of(text: bytes | None) -> int:
    """Returns a program's standard input: a sealed file, or /dev/null."""
    if text is None:
        return os.open(os.devnull, os.O_RDONLY)
    file = os.memfd_create("input", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    view = memoryview(text)
    while view:
        view = view[os.write(file, view) :]
    os.lseek(file, 0, os.SEEK_SET)
    fcntl.fcntl(
        file,
        fcntl.F_ADD_SEALS,
        fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL,
    )
    return file


def places(name: str, path: str | None) -> list[str]:
    """Returns the paths at which a program of this name may be."""
    if not name:
        return []
    if "/" in name:
        return [name]
    folders = (_USUAL_PATH if path is None else path).split(":")
    return [f"{folder or '.'}/{name}" for folder in folders]


def _be_subreaper(wanted: SideProcess, streams: Sequence[int], reporter: int) -> NoReturn:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGCHLD, signal.SIGTERM, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    confine.adopt_orphans()
    result, reporting = os.pipe()
    program = os.fork()
    if program == 0:
        _become(wanted, streams, reporting)
    nothing = os.open(os.devnull, os.O_RDWR)
    reporter, result = _lay_out((nothing, nothing, nothing, reporter, result))[3:]
    reports = socket.socket(fileno=reporter)
    read = os.read(result, _number.size)
    os.close(result)
    error = _number.unpack(read)[0] if len(read) == _number.size else None
    reports.send(json.dumps({"started": program, "error": error}).encode())
    try:
        while True:
            process, status = os.waitpid(-1, 0)
            if process == program:
                reports.send(json.dumps({"ended": process, "status": status}).encode())
    finally:
        os._exit(0)  # No descendant is left.


def _become(wanted: SideProcess, streams: Sequence[int], reporting: int) -> NoReturn:
    """Becomes the program, or reports the kernel's error."""
    fault = errno.EIO
    try:
        os.setsid()
        reporting = _lay_out((*streams, reporting))[3]
        confine.enter_landlock(wanted.folders, forkserver.DEVICES)
        # The session is in another landlock domain, so it can no longer read this process.
        confine.be_readable()
        confine.offer_to_die(forkserver.OF_INTERPRETERS)
        os.chdir(wanted.folder)
        fault = _execute(wanted)
    except OSError as error:
        fault = error.errno or errno.EIO
    finally:
        os.write(reporting, _number.pack(fault))
        os._exit(127)


def _lay_out(descriptors: Sequence[int]) -> list[int]:
    """Moves these descriptors to the lowest numbers, in this order, and closes all others. A
    program inherits the first three.
    """
    aside = [
        fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, len(descriptors))
        for descriptor in descriptors
    ]
    for place, descriptor in enumerate(aside):
        os.dup2(descriptor, place, inheritable=place <= 2)
    os.closerange(len(aside), _EVERY_DESCRIPTOR)
    return list(range(len(aside)))


def _execute(wanted: SideProcess) -> int:
    """Replaces this process with the program. Returns the kernel's error if that fails."""
    fault = errno.ENOENT
    for place in places(wanted.words[0] if wanted.words else "", wanted.environment.get("PATH")):
        try:
            os.execve(place, list(wanted.words), dict(wanted.environment))
        except OSError as error:
            if error.errno == errno.EACCES:
                fault = errno.EACCES  # Another folder may contain an executable one.
            elif error.errno not in (errno.ENOENT, errno.ENOTDIR):
                return error.errno or errno.EIO
    return fault
