"""Replacements for `subprocess` and `os` functions where programs require a host call.

`subprocess.run`, the functions built on it (`check_output`, `getoutput`, `call`, `check_call`), and
`os.system` send a host call like `!cmd` does and wait for the end. Functions that start a program
and continue beside it (`Popen`, `os.posix_spawn`, `os.spawn…`) or become one (`os.exec…`) are not
supported. The kernel refuses all of it in any case; this module only explains why.
"""

from __future__ import annotations

import functools
import os
import subprocess
from collections.abc import Callable
from typing import Any

from . import commands, pip_commands, pip_shim
from .commands import CommandRefused

_REFUSAL = (
    "programs need an approval on this server, and {} cannot ask for one; "
    "!command, %%bash, os.system() and subprocess.run() can"
)

# Options that only concern a process of our own, or change nothing.
_IGNORED = frozenset(
    ("bufsize", "close_fds", "start_new_session", "restore_signals", "process_group")
)
_SUPPORTED = frozenset(
    (
        "args",
        "stdin",
        "stdout",
        "stderr",
        "shell",
        "cwd",
        "env",
        "text",
        "universal_newlines",
        "encoding",
        "errors",
    )
)


def install() -> None:
    """Replaces the functions that start programs. Nothing changes where a session may start
    programs.
    """
    for name, replacement in (("run", _run), ("call", _call)):
        setattr(subprocess, name, _instead(getattr(subprocess, name), replacement))
    subprocess.Popen.__init__ = _refusing(  # type: ignore[method-assign]
        subprocess.Popen.__init__, "subprocess.Popen"
    )
    for name in ("execv", "execve", "posix_spawn", "posix_spawnp", "_spawnvef"):
        original = getattr(os, name, None)
        if original is not None:
            setattr(
                os, name, _refusing(original, f"os.{name}" if name != "_spawnvef" else "os.spawn")
            )


def _instead(original: Any, replacement: Callable[..., Any]) -> Any:
    @functools.wraps(original)
    def start(*arguments: Any, **options: Any) -> Any:
        return (replacement if commands.needs_approval() else original)(*arguments, **options)

    return start


def _refusing(original: Any, name: str) -> Any:
    @functools.wraps(original)
    def start(*arguments: Any, **options: Any) -> Any:
        if commands.needs_approval():
            raise CommandRefused(_REFUSAL.format(name))
        return original(*arguments, **options)

    return start


def _run(
    args: Any,
    *more: Any,
    input: Any = None,
    capture_output: bool = False,
    timeout: float | None = None,
    check: bool = False,
    **options: Any,
) -> subprocess.CompletedProcess[Any]:
    """Implements `subprocess.run`."""
    if capture_output:
        if options.get("stdout") is not None or options.get("stderr") is not None:
            raise ValueError("stdout and stderr arguments may not be used with capture_output.")
        options.update(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    _check(more, options, input)
    stdout, stderr = options.get("stdout"), options.get("stderr")
    try:
        code, out, err = _execute(args, _as_text(input, options), options, timeout)
    except subprocess.TimeoutExpired as expired:
        expired.cmd = args
        raise
    results = []
    for wanted, data in ((stdout, out), (stderr, err)):
        if wanted == subprocess.PIPE:
            results.append(_as_wanted(data, options))
        else:
            _deliver(wanted, data)
            results.append(None)
    if check and code != 0:
        raise subprocess.CalledProcessError(code, args, results[0], results[1])
    return subprocess.CompletedProcess(args, code, *results)


def _call(*arguments: Any, timeout: float | None = None, **options: Any) -> int:
    return _run(*arguments, timeout=timeout, **options).returncode


def _execute(
    args: Any, stdin: str | None, options: dict[str, Any], timeout: float | None
) -> tuple[int, bytes, bytes]:
    is_for_shell = bool(options.get("shell"))
    folder = None if options.get("cwd") is None else os.fsdecode(options["cwd"])
    pip = pip_shim.arguments_of_process(args, is_for_shell)
    if pip is not None:
        reply = pip_commands.carry_out(pip, os.path.abspath(folder or "."))
        out, err = reply.out.encode(), reply.err.encode()
        return reply.code, *_write_out(out, err, options)
    words = (
        [os.fsdecode(args)]
        if isinstance(args, (str, bytes, os.PathLike))
        else [os.fsdecode(word) for word in args]
    )
    if is_for_shell:
        words = ["/bin/sh", "-c", *words]
    variables = options.get("env")
    if variables is not None:
        variables = {os.fsdecode(name): os.fsdecode(value) for name, value in variables.items()}
    streams = (options.get("stdout"), options.get("stderr"))
    # Output for a file of the user is captured here and written there.
    wanted = [
        stream if stream in (None, subprocess.STDOUT) else subprocess.PIPE for stream in streams
    ]
    return commands.run(
        words, stdin, *wanted, folder=folder, environment=variables, timeout=timeout
    )


def _write_out(out: bytes, err: bytes, options: dict[str, Any]) -> tuple[bytes, bytes]:
    """Sends output that did not come from a process to where a process would have written it."""
    if options.get("stderr") == subprocess.STDOUT:
        out, err = out + err, b""
    for descriptor, name, data in ((1, "stdout", out), (2, "stderr", err)):
        if options.get(name) is None and data:
            os.write(descriptor, data)
    return out, err


def _check(more: Any, options: dict[str, Any], given: Any) -> None:
    unsupported = sorted(
        name for name, value in options.items() if name not in _SUPPORTED | _IGNORED and value
    )
    if more or unsupported:
        raise CommandRefused(
            _REFUSAL.format(f"subprocess with {', '.join(unsupported) or 'positional options'}")
        )
    stdin = options.get("stdin")
    if given is not None and stdin is not None:
        raise ValueError("stdin and input arguments may not both be used.")
    if stdin not in (None, subprocess.DEVNULL):
        # The approver must see all input of the program.
        raise CommandRefused(
            _REFUSAL.format("subprocess with an open standard input") + "; give it `input` instead"
        )


def _is_text(options: dict[str, Any]) -> bool:
    return bool(
        options.get("text")
        or options.get("universal_newlines")
        or options.get("encoding")
        or options.get("errors")
    )


def _as_text(given: Any, options: dict[str, Any]) -> str | None:
    if given is None or isinstance(given, str):
        return given
    try:
        return bytes(given).decode(options.get("encoding") or "utf-8")
    except UnicodeDecodeError:
        raise CommandRefused(_REFUSAL.format("subprocess with an input that is not text")) from None


def _as_wanted(data: bytes, options: dict[str, Any]) -> Any:
    if not _is_text(options):
        return data
    text = data.decode(options.get("encoding") or "utf-8", options.get("errors") or "strict")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _deliver(wanted: Any, data: bytes) -> None:
    """Writes output to the destination that the user chose."""
    if not data or wanted in (None, subprocess.DEVNULL, subprocess.STDOUT):
        return
    descriptor = wanted if isinstance(wanted, int) else wanted.fileno()
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
