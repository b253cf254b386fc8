"""The shell: IPython, embedded.

A subclass of IPython's InteractiveShell that turns off everything a sandbox does not need (history
database, profile folder, completion, terminal, colours) and has its own outputs: values and
displays go to an sink, errors are kept and rendered once at the end of the cell, commands run as
in `processes`.

`run` never raises. Every cell that does not end the process has an outcome.

A cell passes through phases, which decide how an error that IPython wants to show is handled:

    IDLE → COMPILING ⇄ RUNNING → IDLE       errors of the cell itself are kept for its end
              └ NESTED                      user code runs its own cell: IPython prints as usual
"""

from __future__ import annotations

import ast
import asyncio
import binascii
import builtins
import contextlib
import enum
import fnmatch
import getpass
import io
import linecache
import os
import re
import sys
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from types import TracebackType
from typing import Any, NamedTuple, NoReturn, Protocol

import IPython.core.interactiveshell as ipython_shell
from IPython.core.autocall import ExitAutocall
from IPython.core.compilerop import CachingCompiler
from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.error import UsageError
from IPython.core.inputtransformer2 import TransformerManager
from IPython.core.history import HistoryManager
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.profiledir import ProfileDir
from IPython.utils.text import LSString, SList

from . import loops
from .interrupts import Gate
from .processes import read_command, run_command
from .variables import size_of

# Tracebacks are for reading. The beginning shows the location, the end shows the error.
MAX_TRACEBACK_BYTES = 200_000
# Number of cells whose source is kept, for tracebacks through functions defined long ago.
_KEPT_CELLS = 1000
# `Out` keeps this many results, and none above this size: a result without a name should not fill
# the memory.
_KEPT_RESULTS = 20
_MAX_KEPT_RESULT_BYTES = 1024 * 1024
# Longer tracebacks are formatted by Python's own `traceback` module.
_MAX_FRAMES = 100

_RUNNER_FOLDER = os.path.dirname(__file__) + os.sep
_colour_codes = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")


class OutputSink(Protocol):
    """Receives rich output. Each method may be called from any thread of a cell."""

    def value(self, bundle: dict[str, Any]) -> None: ...

    def display(self, bundle: dict[str, Any], display_id: str | None, update: bool) -> None: ...

    def clear(self, wait: bool) -> None: ...


class Failure(NamedTuple):
    """Describes why a cell failed, in the form of the `error` member of a `done` frame."""

    name: str
    message: str
    traceback: str
    line: int | None


class Phase(enum.Enum):
    IDLE = enum.auto()
    COMPILING = enum.auto()
    RUNNING = enum.auto()
    NESTED = enum.auto()


class Exit(ExitAutocall):
    """`exit` and `quit`: they end the cell, as sys.exit() does."""

    def __call__(self, *code: Any) -> NoReturn:  # type: ignore[override]
        raise SystemExit(*code)


class ValueHook(DisplayHook):
    """Sends the value of a cell's last expression."""

    def quiet(self) -> bool:
        """Reports whether the cell ends in a semicolon, which suppresses its value."""
        code = self.shell.current_code.rstrip()
        if not code.endswith(";") and "#" not in code:
            return False
        try:
            return bool(self.semicolon_at_end_of_expression(code))
        except Exception:
            return False

    def __call__(self, result: Any = None) -> None:
        self.check_for_underscore()
        if result is None or self.quiet():
            return
        bundle, _ = self.compute_format_data(result)
        self.update_user_ns(result)
        self.fill_exec_result(result)
        if bundle:
            self.shell.sink.value(bundle)

    def update_user_ns(self, result: Any) -> None:
        """Keeps `_` always, and `__`, `___`, `_3` and `Out[3]` for small results only."""
        namespace = self.shell.user_ns
        outputs = namespace.get("_oh")
        if result is outputs:
            return
        self.___, self.__, self._ = self.__, self._if_small(self._), result
        if namespace.get("_") is self._previous_underscore:
            namespace["_"], namespace["__"], namespace["___"] = self._, self.__, self.___
            self._previous_underscore = result
        if not isinstance(outputs, dict) or self._if_small(result) is not result:
            return
        number = self.shell.execution_count
        outputs[number] = namespace[f"_{number}"] = result
        while len(outputs) > _KEPT_RESULTS:
            oldest = next(iter(outputs))
            del outputs[oldest]
            namespace.pop(f"_{oldest}", None)

    # A value that the user assigns to `_` is kept: we stop writing there once it is not ours.
    _previous_underscore: Any = ""

    @staticmethod
    def _if_small(value: Any) -> Any:
        size = size_of(value)
        return value if size is not None and size <= _MAX_KEPT_RESULT_BYTES else ""


class Publisher(DisplayPublisher):
    """Sends the output of `display()`."""

    def _setup_execution_tracking(self) -> None:
        """Registers no callbacks: IPython swallows an interrupt that arrives during one."""

    def publish(  # type: ignore[override]
        self,
        data: Any,
        metadata: Any = None,
        source: Any = None,
        *,
        transient: dict[str, Any] | None = None,
        update: bool = False,
        **_more: Any,
    ) -> None:
        self._validate_data(data, metadata)
        display_id = (transient or {}).get("display_id")
        self.shell.sink.display(data, None if display_id is None else str(display_id), update)

    def clear_output(self, wait: bool = False) -> None:
        self.shell.sink.clear(bool(wait))


class MemoryHistory(HistoryManager):
    """Input history, bounded and in memory only, so that `In`, `_i` and `%history` work. No
    database, no thread.
    """

    last_three: tuple[str, ...] = ("", "", "")

    def begin(self, number: int, raw: str) -> None:
        """Records a cell that is about to run: it sees itself in `In[-1]`, and the previous cell in
        `_i`.
        """
        raw = raw.rstrip("\n")
        self.shell.user_ns.update(zip(("_i", "_ii", "_iii"), self.last_three))
        self.last_three = (raw, *self.last_three[:2])
        self.input_hist_parsed.append(raw)
        self.input_hist_raw.append(raw)
        forgotten = number - _KEPT_CELLS
        if forgotten > 0:
            # The lists keep their length, because a cell is found by its number.
            self.input_hist_parsed[forgotten] = self.input_hist_raw[forgotten] = ""

    def get_tail(
        self, n: int = 10, raw: bool = True, output: bool = False, include_latest: bool = False
    ) -> Iterator[tuple[int, int, Any]]:
        """Returns the last cells. IPython's own method reads them from the database."""
        end = len(self.input_hist_raw) - (0 if include_latest else 1)
        return iter(list(self.get_range(0, max(1, end - n), max(1, end), raw=raw, output=output)))


class CellCompiler(CachingCompiler):
    """Names the pseudo-files of cells. IPython's own method loads OpenSSL for a hash, which takes 4
    ms of a session's first cell.
    """

    def get_code_name(self, raw_code: str, transformed_code: str, number: int) -> str:
        return (
            f"<ipython-input-{number}-"
            f"{binascii.crc32(transformed_code.encode('utf-8', 'replace')):08x}>"
        )


class PythonFirstTransformer(TransformerManager):
    """Searches for magics only in cells that are not valid Python.

    The search reads every token in Python code, which costs a session's first cell 5 ms and a long
    cell much more. The compiler answers the same question at once: none of IPython's syntax is
    valid Python.
    """

    def __init__(self) -> None:
        super().__init__()
        self._own_transformers = list(self.token_transformers)

    def do_token_transforms(self, lines: list[str]) -> list[str]:
        if self.token_transformers == self._own_transformers and _is_python("".join(lines)):
            return lines
        return super().do_token_transforms(lines)


def _is_python(code: str) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(
                code, "<cell>", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, True
            )
    except (SyntaxError, ValueError, OverflowError, MemoryError, RecursionError):
        return False
    return True


class Shell(InteractiveShell):
    """One session's IPython."""

    sink: OutputSink
    gate: Gate

    def __init__(self, **options: Any) -> None:
        self._phase = Phase.IDLE
        self._kept_error: BaseException | None = None
        self._kept_sources: deque[str] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._cell_file: str | None = None
        self.current_code = ""
        super().__init__(
            colors="nocolor",
            xmode="Context",
            autoindent=False,
            compiler_class=CellCompiler,
            displayhook_class=ValueHook,
            display_pub_class=Publisher,
            **options,
        )
        self.loop_runner = self._run_in_loop
        self.input_transformer_manager = PythonFirstTransformer()

    def run(self, code: str, gate: Gate) -> Failure | None:
        """Runs one cell to its end, behind a gate that is open but held. Closes the gate. Never
        raises.
        """
        self.gate = gate
        self._kept_error = None
        self._cell_file = None
        number = self.execution_count
        error: BaseException | None = None
        counts = bool(code) and not code.isspace()
        if counts:
            self.history_manager.begin(number, code)
        try:
            try:
                result = self.run_cell(code, store_history=False)
                error = _first(result.error_before_exec, result.error_in_exec)
            finally:
                gate.close()
                _restore_builtins()
                if self._loop is not None and loops.current() is None:
                    asyncio.set_event_loop(self._loop)  # `asyncio.run` leaves no current loop.
        except BaseException as escaped:
            # For example an interrupt at the last moment. A second one cannot follow so soon (see
            # Gate).
            gate.close()
            error = _first(error, escaped)
        self._phase = Phase.IDLE
        if counts:
            self.execution_count = number + 1
            with contextlib.suppress(IndexError):  # A cell may have emptied the list.
                self.history_manager.input_hist_parsed[number] = self.current_code.rstrip("\n")
            self._forget_old_cells()
        error = _first(error, self._kept_error)
        self._kept_error = None
        return None if error is None else self._failure(error)

    @property
    def has_run(self) -> bool:
        """Whether the last cell reached its first statement."""
        return self._cell_file is not None

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop of cells, if any. `asyncio.get_event_loop()` may have created it."""
        if self._loop is None or self._loop.is_closed():
            mine = loops.current()
            self._loop = None if mine is None or mine.is_closed() else mine
        return self._loop

    def ensure_loop(self) -> asyncio.AbstractEventLoop:
        """Returns the event loop of cells. It persists: its tasks continue between cells."""
        loop = self._loop = self.loop or asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        return loop

    def save_state(self) -> Callable[[], None]:
        """Returns a function that restores the current names, counter and inputs."""
        names, count = dict(self.user_ns), self.execution_count
        history, hook = self.history_manager, self.displayhook
        parsed, raw, outputs = (
            list(history.input_hist_parsed),
            list(history.input_hist_raw),
            dict(history.output_hist),
        )
        inputs = history.last_three
        results = hook._, hook.__, hook.___, hook._previous_underscore
        remembered = list(self._kept_sources)
        sources = dict(self.compile._filename_map)

        def restore() -> None:
            self.user_ns.clear()
            self.user_ns.update(names)
            self.execution_count = count
            history.input_hist_parsed[:], history.input_hist_raw[:] = parsed, raw
            history.output_hist.clear()
            history.output_hist.update(outputs)
            history.last_three = inputs
            hook._, hook.__, hook.___, hook._previous_underscore = results
            self._kept_sources = deque(remembered)
            self.compile._filename_map.clear()
            self.compile._filename_map.update(sources)
            self.current_code = ""
            if self._loop is not None:
                # A loop holds descriptors, which two processes must not share.
                self._loop.close()
                self._loop = None
                # Not set_event_loop(None): then `asyncio.get_event_loop()` would not create a loop
                # either.
                asyncio.set_event_loop_policy(None)

        return restore

    # Called by IPython while it runs a cell.

    def _run_cell(self, *arguments: Any, **options: Any) -> Any:
        outer = self._phase
        self._phase = Phase.COMPILING if outer is Phase.IDLE else Phase.NESTED
        try:
            result = super()._run_cell(*arguments, **options)
        finally:
            self._phase = outer
        if outer is Phase.IDLE:
            self.gate.release()  # Callbacks follow, for example the drawing of figures.
        return result

    def transform_cell(self, raw_cell: str) -> str:
        # IPython drops empty lines at the beginning. Restoring them keeps the cell's line numbers.
        dropped = len(raw_cell) - len(raw_cell.lstrip())
        transformed: str = "\n" * raw_cell.count("\n", 0, dropped) + super().transform_cell(
            raw_cell
        )
        if self._phase is Phase.COMPILING:
            self.current_code = transformed
        return transformed

    async def run_code(self, code_obj: Any, result: Any = None, *, async_: bool = False) -> bool:
        """Executes one statement of a cell. Returns True when it failed; the error is in `result`.

        Interrupts are delivered only here. Parts of IPython's own code, such as destructors,
        swallow them.
        """
        __tracebackhide__ = "__ipython_bottom__"
        outer_hook, sys.excepthook = sys.excepthook, self.excepthook
        outer_phase = self._phase
        is_outermost = outer_phase is Phase.COMPILING
        if is_outermost:
            self._phase = Phase.RUNNING
            self._cell_file = code_obj.co_filename
        try:
            if is_outermost:
                self.gate.release()
            if async_:
                await eval(code_obj, self.user_global_ns, self.user_ns)
            else:
                exec(code_obj, self.user_global_ns, self.user_ns)
            return False
        except BaseException as error:
            if self.custom_exceptions and isinstance(error, self.custom_exceptions):
                # A custom handler is set and takes care of the error.
                self.CustomTB(type(error), error, error.__traceback__)
                return True
            if result is not None:
                result.error_in_exec = error
            if outer_phase is Phase.NESTED:
                self.showtraceback()
            return True
        finally:
            if is_outermost:
                self.gate.hold()
            self._phase = outer_phase
            sys.excepthook = outer_hook

    def showtraceback(self, exc_tuple: Any = None, *arguments: Any, **options: Any) -> None:
        """Shows an error, or keeps it if it is the cell's own: that one is rendered once, at the
        end.
        """
        if self._phase is Phase.COMPILING:
            return
        being_handled = sys.exc_info()[1]
        if self._phase is Phase.RUNNING and exc_tuple is None and being_handled is not None:
            # Some magics (%%time, %run) catch the error of the code they ran, show it and return.
            self._kept_error = being_handled
            return
        super().showtraceback(exc_tuple, *arguments, **options)

    def showsyntaxerror(self, *arguments: Any, **options: Any) -> None:
        if self._phase is not Phase.COMPILING:
            super().showsyntaxerror(*arguments, **options)

    def _showtraceback(self, etype: Any, evalue: Any, stb: list[str]) -> None:
        print(_plain("\n".join(stb)), file=sys.stderr)

    @contextlib.contextmanager
    def _tee(self, channel: str) -> Iterator[None]:
        """Replaces IPython's copy of all output, which would fill the memory."""
        yield

    def enable_gui(self, gui: Any = None) -> None:
        """Does nothing: there are no windows here. `%matplotlib` calls it for every backend."""

    def set_next_input(self, s: str, replace: bool = False) -> None:
        """Prints the text that `%load` and `%recall` would put into the next cell of a notebook."""
        print(s)

    def ask_exit(self) -> NoReturn:
        raise SystemExit

    def _exiter_default(self) -> Exit:
        return Exit(self)

    # Commands. The depth selects the frame in which var_expand looks up `{name}`.

    def system(self, cmd: str) -> None:
        """Runs `!cmd`."""
        code = run_command(self.var_expand(cmd, depth=1), self.gate)
        self.user_ns["_exit_code"] = code
        self._check_exit_code(code, cmd)

    system_piped = system
    system_raw = system

    def getoutput(self, cmd: str, split: bool = True, depth: int = 0) -> Any:
        """Runs `x = !cmd`."""
        output, code = read_command(self.var_expand(cmd, depth=depth + 1), self.gate)
        self.user_ns["_exit_code"] = code
        self._check_exit_code(code, cmd)
        return SList(output.splitlines()) if split else LSString(output)

    def _check_exit_code(self, code: int, command: str) -> None:
        if code != 0 and getattr(self, "system_raise_on_error", False):
            from subprocess import CalledProcessError

            raise CalledProcessError(code, command)

    # Errors.

    def _failure(self, error: BaseException) -> Failure:
        """Describes any error. Its own methods may raise or return invalid values."""
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        if sys.version_info >= (3, 12):
            sys.last_exc = error
        error = self._with_usual_syntax_error(error)
        name = type.__dict__["__name__"].__get__(type(error))
        message = _message(error)
        try:
            text = self._traceback(error, name, message)
        except BaseException:
            try:
                text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
            except BaseException:
                text = f"{name}: {message}"
        return Failure(
            name, _cut(message), _cut(_plain(text).rstrip("\n")), self._failing_line(error)
        )

    def _traceback(self, error: BaseException, name: str, message: str) -> str:
        if isinstance(error, SystemExit):
            first_line = f"{name}: {message}" if message else name
            return (
                f"{first_line}\n\nThe session continues: exit() and sys.exit() end the cell only."
            )
        if isinstance(error, UsageError):
            return f"{name}: {message}"
        if (
            isinstance(error, SyntaxError)
            and error.__traceback__ is None
            or self._is_cells_syntax(error)
        ):
            return str(
                self.SyntaxTB.stb2text(self.SyntaxTB.structured_traceback(type(error), error, []))
            )
        trace = _without_our_frames(error.__traceback__)
        if trace is None:
            return f"{name}: {message}" if message else name
        if _holds_group(error) or _is_long(trace):
            # IPython cannot show exception groups, and takes seconds for the frames of an infinite
            # recursion.
            return "".join(traceback.format_exception(type(error), error, trace))
        if hasattr(error, "_render_traceback_"):
            lines = error._render_traceback_()
            if isinstance(lines, list):
                return "\n".join(map(str, lines))
        lines = self.InteractiveTB.structured_traceback(type(error), error, trace, tb_offset=0)
        return str(self.InteractiveTB.stb2text(lines))

    def _with_usual_syntax_error(self, error: BaseException) -> BaseException:
        """Replaces the "incomplete input" error, which newer Pythons raise for interactive
        programs, with the usual syntax error.
        """
        if type(error) is not getattr(builtins, "_IncompleteInputError", None):
            return error
        try:
            compile(
                self.current_code,
                error.filename,  # type: ignore[attr-defined]
                "exec",
                ast.PyCF_ALLOW_TOP_LEVEL_AWAIT,
            )
        except SyntaxError as usual:
            return usual.with_traceback(None)
        return error

    def _is_cells_syntax(self, error: BaseException) -> bool:
        """Reports whether the cell itself could not be compiled, as opposed to code that it
        compiled.
        """
        return isinstance(error, SyntaxError) and error.filename in self.compile._filename_map

    def _failing_line(self, error: BaseException) -> int | None:
        try:
            if self._is_cells_syntax(error):
                return error.lineno  # type: ignore[attr-defined]
            line = None
            trace = error.__traceback__
            while trace is not None:
                if trace.tb_frame.f_code.co_filename == self._cell_file:
                    line = trace.tb_lineno
                trace = trace.tb_next
            return line
        except Exception:
            return None

    def _forget_old_cells(self) -> None:
        if self._cell_file is not None:
            self._kept_sources.append(self._cell_file)
        while len(self._kept_sources) > _KEPT_CELLS:
            oldest = self._kept_sources.popleft()
            linecache.cache.pop(oldest, None)
            self.compile._filename_map.pop(oldest, None)

    # Await.

    def _run_in_loop(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Runs a cell that awaits."""
        loop = self.ensure_loop()
        cell = loop.create_task(coroutine)
        try:
            return loop.run_until_complete(cell)
        except (KeyboardInterrupt, SystemExit) as stop:
            # The cell must not continue when the loop runs next. Cancelling also finds where it was
            # waiting.
            cell.cancel()
            result = loop.run_until_complete(cell)
            if result is not None and result.error_in_exec is not None:
                result.error_in_exec = stop.with_traceback(result.error_in_exec.__traceback__)
                return result
            raise

    # Initialization: each of these replaces work that a sandbox does not need.

    def init_ipython_dir(self, ipython_dir: Any) -> None:
        pass

    def init_profile_dir(self, profile_dir: Any) -> None:
        # Without a location, so that nothing is written to the home folder.
        self.profile_dir = ProfileDir()

    def init_virtualenv(self) -> None:
        pass

    def init_history(self) -> None:
        self.history_manager = MemoryHistory(
            shell=self, parent=self, hist_file=":memory:", enabled=False
        )

    def init_completer(self) -> None:
        self.Completer = None

    def init_logstart(self) -> None:
        pass

    def atexit_operations(self) -> None:
        pass


class Database(dict[str, Any]):
    """Storage of `%store` and `%alias`: in memory, for the lifetime of the session."""

    def keys(self, pattern: str = "*") -> Any:
        return fnmatch.filter(super().keys(), pattern)


class EmptyStdin(io.TextIOBase):
    """The sys.stdin of user code: always at end of file."""

    encoding = "utf-8"
    errors = "strict"
    name = "<stdin>"
    mode = "r"

    def __init__(self) -> None:
        super().__init__()
        self.buffer = io.BytesIO()

    def readable(self) -> bool:
        return True

    def read(self, _size: int | None = -1) -> str:
        return ""

    def readline(self, _size: int | None = -1) -> str:  # type: ignore[override]
        return ""

    def fileno(self) -> int:
        return 0

    def isatty(self) -> bool:
        return False


def create_shell() -> Shell:
    """Creates the only shell of this process, which IPython's get_ipython() returns."""
    _prefer_plain_output()
    original = getattr(ipython_shell, "PickleShareDB", None)
    if original is not None:
        # IPython 8 creates a database folder when it starts. A dictionary is enough for %store and
        # %alias.
        ipython_shell.PickleShareDB = lambda _path: {}
    try:
        shell = Shell.instance()
    finally:
        if original is not None:
            ipython_shell.PickleShareDB = original
    InteractiveShell._instance = shell
    shell.db = Database()
    shell.extension_manager.load_extension("storemagic")
    for name in ("edit", "ed"):
        shell.register_magic_function(_refuse_editor, "line", name)
    loops.let_cells_create_tasks(shell.ensure_loop)
    _refuse_input()
    return shell


def _prefer_plain_output() -> None:
    os.environ.update(NO_COLOR="1", TERM="dumb", PAGER="cat")
    for name in ("CLICOLOR", "CLICOLOR_FORCE", "FORCE_COLOR"):
        os.environ.pop(name, None)
    # Read by matplotlib when it is imported. Its backend finds the shell by itself.
    os.environ.setdefault("MPLBACKEND", "module://matplotlib_inline.backend_inline")


def _refuse_input() -> None:
    def refusing(name: str) -> Any:
        def refuse(*_arguments: Any, **_options: Any) -> NoReturn:
            raise EOFError(
                f"{name}() is not available: this session has no interactive input."
                " Put the value in the code."
            )

        refuse.__name__ = refuse.__qualname__ = name
        return refuse

    builtins.input = _saved_builtins["input"] = refusing("input")
    getpass.getpass = refusing("getpass")


def _refuse_editor(_line: str) -> NoReturn:
    why = "%edit is not available: this session has no interactive input."
    raise UsageError(f"{why} Write the file with %%writefile.")


# IPython and the runner need these even if a cell deletes them. No builtin is looked up below.
_builtins = vars(builtins)
_saved_builtins = dict(_builtins)


def _restore_builtins() -> None:
    for name in _saved_builtins.keys() - _builtins.keys():
        _builtins[name] = _saved_builtins[name]


def _without_our_frames(trace: TracebackType | None) -> TracebackType | None:
    """Returns the traceback without the runner's own frames at its beginning and its end, or None
    if no other frame is left.
    """
    frames = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    is_ours = [step.tb_frame.f_code.co_filename.startswith(_RUNNER_FOLDER) for step in frames]
    while is_ours and is_ours[-1]:
        is_ours.pop()
    kept: TracebackType | None = None
    for step, ours in zip(reversed(frames[: len(is_ours)]), reversed(is_ours)):
        if not ours:
            kept = TracebackType(kept, step.tb_frame, step.tb_lasti, step.tb_lineno)
    return kept


def _first(*errors: BaseException | None) -> BaseException | None:
    """Returns the first that is not None. Not `or`: an exception may be falsy."""
    return next((error for error in errors if error is not None), None)


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException as cause:
        return f"<no message: its __str__ raised {type.__dict__['__name__'].__get__(type(cause))}>"


def _holds_group(error: BaseException | None) -> bool:
    group = getattr(builtins, "BaseExceptionGroup", None)  # Python 3.11 and newer
    seen = set()
    while error is not None and id(error) not in seen:
        if group is not None and isinstance(error, group):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def _is_long(trace: TracebackType | None) -> bool:
    length = 0
    while trace is not None and length < _MAX_FRAMES:
        trace, length = trace.tb_next, length + 1
    return length >= _MAX_FRAMES


def _plain(text: str) -> str:
    return _colour_codes.sub("", text)


def _cut(text: str) -> str:
    if len(text) <= MAX_TRACEBACK_BYTES:
        return text
    head = MAX_TRACEBACK_BYTES // 3
    tail = MAX_TRACEBACK_BYTES - head
    left_out = len(text) - head - tail
    return f"{text[:head]}\n[… {left_out} characters left out …]\n{text[-tail:]}"
