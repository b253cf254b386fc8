"""Processes: `!cmd`, `x = !cmd` and `%%script` without a terminal and without threads.

IPython runs shell commands under a pseudo-terminal and scripts on an event loop in a separate
thread. A sandbox has no terminals, and a thread would spoil every later fork. Here a child simply
inherits descriptors 1 and 2, or gets a pipe if its output is captured. An interrupt ends the child
with its whole process group, and is then raised.

If a command may start pip, its shell gets functions that lead to `pip_commands` (see
`pip_shim`).

Where programs need an approval, the host runs all of this (see `commands`).
"""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import IO, Any

from IPython.core.magics.packaging import PackagingMagics
from IPython.core.magics.script import ScriptMagics
from IPython.utils.process import arg_split

from . import commands, pip_arguments, pip_commands, pip_shim
from .interrupts import Gate
from .streams import OutStream
from .pip_shim import PipServer

# Grace period for an interrupted command to exit by itself.
_GRACE = 0.3
# Shells in which pip can be defined as a function.
_SHELLS = ("bash", "sh", "dash")


def run_command(command: str, gate: Gate) -> int:
    """Runs a shell command whose output belongs to the cell. Returns its exit code, negative for a
    signal.
    """
    if commands.needs_approval():
        return _ask_for(command)
    if _prints_to_streams():
        return _run_shell(command, gate)[0]
    code, output = _run_shell(command, gate, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    sys.stdout.write(output)
    return code


def read_command(command: str, gate: Gate) -> tuple[str, int]:
    """Runs a shell command. Returns its output, including errors, and its exit code."""
    if commands.needs_approval():
        reply = _pip_reply(command)
        if reply is not None:
            return reply.out + reply.err, reply.code
        finished = commands.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        return finished.out.decode("utf-8", "replace"), finished.code
    code, output = _run_shell(command, gate, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return output, code


def install_script_magic() -> None:
    """Replaces the implementation of `%%script`, and so of `%%bash`, `%%sh`, `%%python` and the
    others.
    """
    original = ScriptMagics.shebang
    for attribute in (
        "parser",
        "argcmd_name",
        "has_arguments",
        "decorators",
        "__doc__",
        "__name__",
    ):
        if hasattr(original, attribute):
            setattr(_run_script, attribute, getattr(original, attribute))
    ScriptMagics.shebang = _run_script


def install_pip(gate: Callable[[], Gate]) -> None:
    """Makes `%pip`, `%uv`, `os.system` and `subprocess` do pip's work without pip. `gate` returns
    the gate of the running cell.
    """
    pip_shim.install_in_subprocess()
    for name in ("pip", "uv"):
        original = getattr(PackagingMagics, name, None)
        if original is not None:
            setattr(PackagingMagics, name, _magic(name, original))
    system = os.system

    @functools.wraps(system)
    def run(command: Any) -> int:
        is_ours = isinstance(command, str) and (
            commands.needs_approval() or pip_shim.may_start_pip(command)
        )
        if not is_ours:
            return system(command)
        code = run_command(command, gate())
        return code << 8 if code >= 0 else -code

    os.system = run


def _magic(name: str, original: Any) -> Any:
    """Creates `%pip` or `%uv`. Like the shell command, except that it never raises."""

    @functools.wraps(original)
    def run(self: Any, line: str) -> None:
        if commands.needs_approval():
            # No shell is needed to parse the line.
            line = shlex.join(arg_split(line, posix=True))
        self.shell.user_ns["_exit_code"] = run_command(f"{name} {line}", self.shell.gate)

    return run


def _run_script(self: Any, line: str, cell: str) -> None:
    options, command = _run_script.parser.parse_known_args(  # type: ignore[attr-defined]
        arg_split(line, posix=True)
    )
    if not cell.endswith("\n"):
        cell += "\n"
    is_captured = not _prints_to_streams()
    if commands.needs_approval():
        _ask_for_script(self, command, options, cell)
        return
    name = os.path.basename(command[0]) if command else ""
    is_for_shell = name in _SHELLS and not options.bg
    with _pip_server(cell if is_for_shell else "", name) as server:
        functions = server.functions if server else ""
        with _readable((functions + cell).encode("utf-8", "replace")) as script:
            try:
                if options.bg:
                    _run_in_background(self, command, options, script)
                    return
                process, outputs = _run(
                    command,
                    self.shell.gate,
                    server,
                    stdin=script,
                    stdout=subprocess.PIPE if options.out or is_captured else None,
                    stderr=subprocess.PIPE if options.err or is_captured else None,
                )
            except FileNotFoundError:
                print(f"Couldn't find program: {command[0]!r}")
                return
    _end_script(self, options, cell, process.returncode, outputs)


def _end_script(
    magics: Any, options: Any, cell: str, code: int, outputs: tuple[bytes, bytes]
) -> None:
    for name, data, stream in zip((options.out, options.err), outputs, (sys.stdout, sys.stderr)):
        text = data.decode("utf-8", "replace")
        if name:
            magics.shell.user_ns[name] = text
        elif text:
            stream.write(text)
    if options.raise_error and code != 0:
        raise subprocess.CalledProcessError(code, cell)


def _ask_for(command: str) -> int:
    """Makes the host run a command whose output belongs to the cell, unless it is a pip command.
    Returns its exit code.
    """
    reply = _pip_reply(command)
    if reply is not None:
        sys.stdout.write(reply.out)
        sys.stderr.write(reply.err)
        return reply.code
    if _prints_to_streams():
        return commands.run(command).code
    finished = commands.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    sys.stdout.write(finished.out.decode("utf-8", "replace"))
    return finished.code


def _ask_for_script(magics: Any, command: list[str], options: Any, cell: str) -> None:
    """Implements `%%script` through the host."""
    if options.bg:
        raise commands.CommandRefused(
            "programs need an approval on this server, and none can be asked for with --bg"
        )
    is_captured = not _prints_to_streams()
    reply = (
        _pip_reply(cell.strip()) if command and os.path.basename(command[0]) in _SHELLS else None
    )
    try:
        if reply is None:
            stdout = subprocess.PIPE if options.out or is_captured else None
            stderr = subprocess.PIPE if options.err or is_captured else None
            code, *outputs = commands.run(command, cell, stdout, stderr)
        else:
            code, outputs = reply.code, [reply.out.encode(), reply.err.encode()]
    except FileNotFoundError:
        print(f"Couldn't find program: {command[0]!r}")
        return
    _end_script(magics, options, cell, code, (outputs[0], outputs[1]))


def _pip_reply(command: str) -> pip_commands.Reply | None:
    """Does pip's work if the command does nothing else. No program is needed for it."""
    words = pip_arguments.simple_words(command) if pip_shim.may_start_pip(command) else None
    arguments = None if words is None else pip_arguments.arguments_of(words)
    return None if arguments is None else pip_commands.carry_out(arguments, os.getcwd())


def _run_in_background(magics: Any, command: list[str], options: Any, script: IO[bytes]) -> None:
    process = subprocess.Popen(
        command,
        stdin=script,
        stdout=subprocess.PIPE if options.out else subprocess.DEVNULL,
        stderr=subprocess.PIPE if options.err else subprocess.DEVNULL,
        start_new_session=True,
    )
    magics.bg_processes.append(process)
    for name, value in (
        (options.out, process.stdout),
        (options.err, process.stderr),
        (options.proc, process),
    ):
        if name:
            magics.shell.user_ns[name] = value


def _prints_to_streams() -> bool:
    """Reports whether the output of a child on 1 and 2 appears where Python's own output appears
    (no `%%capture`).
    """
    return isinstance(sys.stdout, OutStream) and isinstance(sys.stderr, OutStream)


def _run_shell(command: str, gate: Gate, **streams: Any) -> tuple[int, str]:
    """Runs a command in the shell. Returns its exit code and the output from its pipe, if it has
    one.
    """
    shell = shutil.which("bash") or "/bin/sh"
    with _pip_server(command, os.path.basename(shell)) as server:
        functions = server.functions if server else ""
        process, output = _run(
            [shell, "-c", functions + command], gate, server, stdin=subprocess.DEVNULL, **streams
        )
    return process.returncode, output[0].decode("utf-8", "replace")


@contextlib.contextmanager
def _pip_server(command: str, shell: str) -> Iterator[PipServer | None]:
    """Opens a server for a shell whose command may start pip, for the duration of the block."""
    if not pip_shim.may_start_pip(command):
        yield None
        return
    server = PipServer(is_bash=shell == "bash")
    try:
        yield server
    finally:
        server.close()


def _run(
    command: list[str], gate: Gate, server: PipServer | None, **streams: Any
) -> tuple[subprocess.Popen[bytes], tuple[bytes, bytes]]:
    """Runs a program to its end. Returns it with the output from its pipes, if it has any.

    Interrupts are held back while it starts: one in the middle would leave an untracked process.
    """
    if server is not None:
        return _run_with_server(command, gate, server, **streams)
    with gate.held():
        process = subprocess.Popen(command, start_new_session=True, **streams)
        try:
            with gate.passing():
                output, errors = process.communicate()
        except BaseException:
            _end_group(process)
            raise
    return process, (output or b"", errors or b"")


def _run_with_server(
    command: list[str], gate: Gate, server: PipServer, **streams: Any
) -> tuple[subprocess.Popen[bytes], tuple[bytes, bytes]]:
    """Like `_run`, with a server for pip. Uses files instead of pipes: a pipe could not be drained
    while the host handles a call.
    """
    files = {name: _readable(b"") for name, stream in streams.items() if stream == subprocess.PIPE}
    with gate.held():
        process = subprocess.Popen(
            command, start_new_session=True, pass_fds=(server.descriptor,), **{**streams, **files}
        )
        try:
            with gate.passing():
                server.serve(process)
        except BaseException:
            _end_group(process)
            raise
    return process, (_content(files.get("stdout")), _content(files.get("stderr")))


def _content(file: IO[bytes] | None) -> bytes:
    if file is None:
        return b""
    with file:
        file.seek(0)
        return file.read()


def _readable(data: bytes) -> IO[bytes]:
    """Returns an open file with this content. Unlike a pipe, it needs no writer."""
    try:
        file: IO[bytes] = open(os.memfd_create("script"), "w+b")
    except OSError:
        file = tempfile.TemporaryFile()
    file.write(data)
    file.seek(0)
    return file


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Ends the child and its descendants: SIGINT first, then SIGKILL."""
    try:
        os.killpg(process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE)
        os.killpg(process.pid, signal.SIGKILL)
    except OSError:
        pass
    process.wait()
