"""Processes: `!cmd`, `x = !cmd` and `%%script` without a terminal and without threads.

IPython runs shell commands under a pseudo-terminal and scripts on an event loop in a thread of its own. A sandbox has
no terminals, and a thread would spoil every later fork. Here a child simply inherits descriptors 1 and 2, or gets a
pipe when somebody wants its output. An interrupt ends the child with all of its process group, and goes on.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from typing import IO, Any

from IPython.core.magics.script import ScriptMagics
from IPython.utils.process import arg_split

from .interrupts import Gate
from .lanes import OutStream

# How long an interrupted command may take to end by itself.
_GRACE = 0.3


def run_command(command: str, gate: Gate) -> int:
    """Runs a shell command whose output belongs to the cell. Returns its exit code, negative for a signal."""
    if _prints_to_lanes():
        process, _ = _run(_shell(command), gate, stdin=subprocess.DEVNULL)
    else:
        process, output = _run(
            _shell(command), gate, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        sys.stdout.write(output[0].decode("utf-8", "replace"))
    return process.returncode


def read_command(command: str, gate: Gate) -> tuple[str, int]:
    """Runs a shell command and returns what it printed, errors included, with its exit code."""
    process, output = _run(
        _shell(command), gate, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    return output[0].decode("utf-8", "replace"), process.returncode


def install_script_magic() -> None:
    """Replaces the implementation of `%%script`, and so of `%%bash`, `%%sh`, `%%python` and the others."""
    original = ScriptMagics.shebang
    for attribute in ("parser", "argcmd_name", "has_arguments", "decorators", "__doc__", "__name__"):
        if hasattr(original, attribute):
            setattr(_run_script, attribute, getattr(original, attribute))
    ScriptMagics.shebang = _run_script


def _run_script(self: Any, line: str, cell: str) -> None:
    options, command = _run_script.parser.parse_known_args(arg_split(line, posix=True))  # type: ignore[attr-defined]
    if not cell.endswith("\n"):
        cell += "\n"
    is_captured = not _prints_to_lanes()
    with _readable(cell.encode("utf-8", "replace")) as script:
        try:
            if options.bg:
                _run_in_background(self, command, options, script)
                return
            process, outputs = _run(
                command,
                self.shell.gate,
                stdin=script,
                stdout=subprocess.PIPE if options.out or is_captured else None,
                stderr=subprocess.PIPE if options.err or is_captured else None,
            )
        except FileNotFoundError:
            print(f"Couldn't find program: {command[0]!r}")
            return
    for name, data, stream in zip((options.out, options.err), outputs, (sys.stdout, sys.stderr)):
        text = data.decode("utf-8", "replace")
        if name:
            self.shell.user_ns[name] = text
        elif text:
            stream.write(text)
    if options.raise_error and process.returncode != 0:
        raise subprocess.CalledProcessError(process.returncode, cell)


def _run_in_background(magics: Any, command: list[str], options: Any, script: IO[bytes]) -> None:
    process = subprocess.Popen(
        command,
        stdin=script,
        stdout=subprocess.PIPE if options.out else subprocess.DEVNULL,
        stderr=subprocess.PIPE if options.err else subprocess.DEVNULL,
        start_new_session=True,
    )
    magics.bg_processes.append(process)
    for name, value in ((options.out, process.stdout), (options.err, process.stderr), (options.proc, process)):
        if name:
            magics.shell.user_ns[name] = value


def _prints_to_lanes() -> bool:
    """Tells whether what a child writes to 1 and 2 appears where Python's own output appears (no `%%capture`)."""
    return isinstance(sys.stdout, OutStream) and isinstance(sys.stderr, OutStream)


def _shell(command: str) -> list[str]:
    return [shutil.which("bash") or "/bin/sh", "-c", command]


def _run(command: list[str], gate: Gate, **streams: Any) -> tuple[subprocess.Popen[bytes], tuple[bytes, bytes]]:
    """Runs a program to its end. Returns it with what came out of its pipes, if it has any.

    Interrupts wait while it starts: one in the middle would leave a process that nobody knows.
    """
    with gate.held():
        process = subprocess.Popen(command, start_new_session=True, **streams)
        try:
            with gate.passing():
                output, errors = process.communicate()
        except BaseException:
            _end_group(process)
            raise
    return process, (output or b"", errors or b"")


def _readable(data: bytes) -> IO[bytes]:
    """Returns an open file with this content. Unlike a pipe it needs nobody to feed it."""
    try:
        file: IO[bytes] = open(os.memfd_create("script"), "w+b")
    except OSError:
        file = tempfile.TemporaryFile()
    file.write(data)
    file.seek(0)
    return file


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Ends the child and its descendants, politely first."""
    try:
        os.killpg(process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE)
        os.killpg(process.pid, signal.SIGKILL)
    except OSError:
        pass
    process.wait()
