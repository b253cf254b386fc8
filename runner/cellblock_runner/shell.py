"""The shell: IPython, embedded.

A subclass of IPython's InteractiveShell with everything off that a sandbox does not need (history database, profile
folder, completion, terminal, colours), and with its own ways out: values and displays go to an outlet, errors are kept
and explained once at the end of the cell, commands run as in `processes`.

`run` never raises. Whatever a cell does short of ending the process, it has an outcome.

A cell passes through phases, which decide what becomes of an error that IPython wants to show:

    IDLE → COMPILING ⇄ RUNNING → IDLE       errors of the cell itself are kept for its end
              └ NESTED                      user code runs a cell of its own: IPython prints as usual
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

# A traceback is for reading. The beginning says where, the end says what.
LARGEST_TRACEBACK = 200_000
# So many cells stay known with their source, for tracebacks through functions defined long ago.
_REMEMBERED_CELLS = 1000
# `Out` keeps so many results, and none above this size: a result that nobody named should not fill the memory.
_REMEMBERED_RESULTS = 20
_LARGEST_REMEMBERED_RESULT = 1024 * 1024
# Longer tracebacks are shown as Python shows them.
_MOST_FRAMES = 100

_OUR_FOLDER = os.path.dirname(__file__) + os.sep
_colour_codes = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")


class Outlet(Protocol):
    """Where rich output goes. Each method may be called from any thread of a cell."""

    def value(self, bundle: dict[str, Any]) -> None: ...

    def display(self, bundle: dict[str, Any], display_id: str | None, update: bool) -> None: ...

    def clear(self, wait: bool) -> None: ...


class Failure(NamedTuple):
    """Why a cell failed, in the form of the `error` member of a `done` frame."""

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
        """Tells whether the cell ends in a semicolon, which asks for silence."""
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
            self.shell.outlet.value(bundle)

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
        while len(outputs) > _REMEMBERED_RESULTS:
            oldest = next(iter(outputs))
            del outputs[oldest]
            namespace.pop(f"_{oldest}", None)

    # A user who assigns `_` keeps it: we stop writing there once it is not what we put.
    _previous_underscore: Any = ""

    @staticmethod
    def _if_small(value: Any) -> Any:
        size = size_of(value)
        return value if size is not None and size <= _LARGEST_REMEMBERED_RESULT else ""


class Publisher(DisplayPublisher):
    """Sends what `display()` shows."""

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
        self.shell.outlet.display(data, None if display_id is None else str(display_id), update)

    def clear_output(self, wait: bool = False) -> None:
        self.shell.outlet.clear(bool(wait))


class Inputs(HistoryManager):
    """What was run, in memory only and bounded, so that `In`, `_i` and `%history` work. No database, no thread."""

    last_three: tuple[str, ...] = ("", "", "")

    def begin(self, number: int, raw: str) -> None:
        """Notes a cell that is about to run: it finds itself in `In[-1]`, and the one before in `_i`."""
        raw = raw.rstrip("\n")
        self.shell.user_ns.update(zip(("_i", "_ii", "_iii"), self.last_three))
        self.last_three = (raw, *self.last_three[:2])
        self.input_hist_parsed.append(raw)
        self.input_hist_raw.append(raw)
        forgotten = number - _REMEMBERED_CELLS
        if forgotten > 0:
            # The lists keep their length, because a cell is found by its number.
            self.input_hist_parsed[forgotten] = self.input_hist_raw[forgotten] = ""

    def get_tail(
        self, n: int = 10, raw: bool = True, output: bool = False, include_latest: bool = False
    ) -> Iterator[tuple[int, int, Any]]:
        """Returns the last cells, which IPython's own way asks the database for."""
        end = len(self.input_hist_raw) - (0 if include_latest else 1)
        return iter(list(self.get_range(0, max(1, end - n), max(1, end), raw=raw, output=output)))


class Sources(CachingCompiler):
    """Names the pseudo-files of cells. IPython's own way loads OpenSSL for a hash, which is 4 ms of a session's first cell."""

    def get_code_name(self, raw_code: str, transformed_code: str, number: int) -> str:
        return f"<ipython-input-{number}-{binascii.crc32(transformed_code.encode('utf-8', 'replace')):08x}>"


class PlainFirst(TransformerManager):
    """Looks for magics only in cells that are not Python already.

    The search reads every token in Python code, which costs a session's first cell 5 ms and a long cell much more. The
    compiler answers the same question at once: none of IPython's signs is valid Python.
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
            compile(code, "<cell>", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, True)
    except (SyntaxError, ValueError, OverflowError, MemoryError, RecursionError):
        return False
    return True


class Shell(InteractiveShell):
    """One session's IPython."""

    outlet: Outlet
    gate: Gate

    def __init__(self, **options: Any) -> None:
        self._phase = Phase.IDLE
        self._kept_error: BaseException | None = None
        self._remembered: deque[str] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._cell_file: str | None = None
        self.current_code = ""
        super().__init__(
            colors="nocolor",
            xmode="Context",
            autoindent=False,
            compiler_class=Sources,
            displayhook_class=ValueHook,
            display_pub_class=Publisher,
            **options,
        )
        self.loop_runner = self._run_in_loop
        self.input_transformer_manager = PlainFirst()

    def run(self, code: str, gate: Gate) -> Failure | None:
        """Runs one cell to its end, behind a gate that is open but held. Closes the gate. Never raises."""
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
                _bring_back_builtins()
                if self._loop is not None and loops.current() is None:
                    asyncio.set_event_loop(self._loop)  # `asyncio.run` leaves none behind.
        except BaseException as escaped:
            # For example an interrupt in the last instant. It cannot be followed by another one so soon (see Gate).
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
        return None if error is None else self._explain(error)

    @property
    def has_run(self) -> bool:
        """Tells whether the last cell came as far as its first statement."""
        return self._cell_file is not None

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The loop of cells, once there was one. `asyncio.get_event_loop()` may have made it."""
        if self._loop is None or self._loop.is_closed():
            mine = loops.current()
            self._loop = None if mine is None or mine.is_closed() else mine
        return self._loop

    def ensure_loop(self) -> asyncio.AbstractEventLoop:
        """Returns the loop of cells, which stays: its tasks go on between cells."""
        loop = self._loop = self.loop or asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        return loop

    def remember(self) -> Callable[[], None]:
        """Returns a function that brings names, counter and inputs back to what they are now."""
        names, count = dict(self.user_ns), self.execution_count
        history, hook = self.history_manager, self.displayhook
        parsed, raw, outputs = list(history.input_hist_parsed), list(history.input_hist_raw), dict(history.output_hist)
        inputs = history.last_three
        results = hook._, hook.__, hook.___, hook._previous_underscore
        remembered = list(self._remembered)
        sources = dict(self.compile._filename_map)

        def bring_back() -> None:
            self.user_ns.clear()
            self.user_ns.update(names)
            self.execution_count = count
            history.input_hist_parsed[:], history.input_hist_raw[:] = parsed, raw
            history.output_hist.clear()
            history.output_hist.update(outputs)
            history.last_three = inputs
            hook._, hook.__, hook.___, hook._previous_underscore = results
            self._remembered = deque(remembered)
            self.compile._filename_map.clear()
            self.compile._filename_map.update(sources)
            self.current_code = ""
            if self._loop is not None:
                # A loop holds descriptors, which two processes must not share.
                self._loop.close()
                self._loop = None
                # Not a loop of None: then `asyncio.get_event_loop()` would make none either.
                asyncio.set_event_loop_policy(None)

        return bring_back

    # What IPython calls while it runs a cell.

    def _run_cell(self, *arguments: Any, **options: Any) -> Any:
        outer = self._phase
        self._phase = Phase.COMPILING if outer is Phase.IDLE else Phase.NESTED
        try:
            result = super()._run_cell(*arguments, **options)
        finally:
            self._phase = outer
        if outer is Phase.IDLE:
            self.gate.release()  # What follows are callbacks, for example the drawing of figures.
        return result

    def transform_cell(self, raw_cell: str) -> str:
        # IPython drops empty lines at the beginning. Putting them back keeps line numbers those of the cell.
        dropped = len(raw_cell) - len(raw_cell.lstrip())
        transformed: str = "\n" * raw_cell.count("\n", 0, dropped) + super().transform_cell(raw_cell)
        if self._phase is Phase.COMPILING:
            self.current_code = transformed
        return transformed

    async def run_code(self, code_obj: Any, result: Any = None, *, async_: bool = False) -> bool:
        """Executes one statement of a cell. Returns True when it failed; the error is in `result`.

        Only here do interrupts pass. IPython's own code has places that swallow them, such as destructors.
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
                # Whoever set a handler has seen to it.
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
        """Shows an error, or keeps it when it is the cell's own: that one is explained at the end, once."""
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
        """Does nothing: there are no windows here. `%matplotlib` asks, whatever its backend."""

    def set_next_input(self, s: str, replace: bool = False) -> None:
        """Shows what `%load` and `%recall` would put into the next cell of a notebook."""
        print(s)

    def ask_exit(self) -> NoReturn:
        raise SystemExit

    def _exiter_default(self) -> Exit:
        return Exit(self)

    # Commands. The depth tells var_expand in which frame `{name}` is to be looked up.

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

    def _explain(self, error: BaseException) -> Failure:
        """Describes an error whatever it is: its own methods may raise, or answer nonsense."""
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
        return Failure(name, _cut(message), _cut(_plain(text).rstrip("\n")), self._failing_line(error))

    def _traceback(self, error: BaseException, name: str, message: str) -> str:
        if isinstance(error, SystemExit):
            first_line = f"{name}: {message}" if message else name
            return f"{first_line}\n\nThe session goes on: exit() and sys.exit() end the cell only."
        if isinstance(error, UsageError):
            return f"{name}: {message}"
        if isinstance(error, SyntaxError) and error.__traceback__ is None or self._is_cells_syntax(error):
            return str(self.SyntaxTB.stb2text(self.SyntaxTB.structured_traceback(type(error), error, [])))
        trace = _without_our_frames(error.__traceback__)
        if trace is None:
            return f"{name}: {message}" if message else name
        if _holds_group(error) or _is_long(trace):
            # IPython cannot show exception groups, and takes seconds for the frames of an endless recursion.
            return "".join(traceback.format_exception(type(error), error, trace))
        if hasattr(error, "_render_traceback_"):
            lines = error._render_traceback_()
            if isinstance(lines, list):
                return "\n".join(map(str, lines))
        lines = self.InteractiveTB.structured_traceback(type(error), error, trace, tb_offset=0)
        return str(self.InteractiveTB.stb2text(lines))

    def _with_usual_syntax_error(self, error: BaseException) -> BaseException:
        """Replaces the "incomplete input" that newer Pythons tell to interactive programs by what everybody expects."""
        if type(error) is not getattr(builtins, "_IncompleteInputError", None):
            return error
        try:
            compile(self.current_code, error.filename, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)  # type: ignore[attr-defined]
        except SyntaxError as usual:
            return usual.with_traceback(None)
        return error

    def _is_cells_syntax(self, error: BaseException) -> bool:
        """Tells whether the cell itself could not be compiled, as opposed to something that it compiled."""
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
            self._remembered.append(self._cell_file)
        while len(self._remembered) > _REMEMBERED_CELLS:
            oldest = self._remembered.popleft()
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
            # The cell must not go on when the loop runs next. Cancelling also finds where it was waiting.
            cell.cancel()
            result = loop.run_until_complete(cell)
            if result is not None and result.error_in_exec is not None:
                result.error_in_exec = stop.with_traceback(result.error_in_exec.__traceback__)
                return result
            raise

    # Setting up: each of these replaces work that a sandbox does not need.

    def init_ipython_dir(self, ipython_dir: Any) -> None:
        pass

    def init_profile_dir(self, profile_dir: Any) -> None:
        self.profile_dir = ProfileDir()  # Without a location: nothing is written to the home folder.

    def init_virtualenv(self) -> None:
        pass

    def init_history(self) -> None:
        self.history_manager = Inputs(shell=self, parent=self, hist_file=":memory:", enabled=False)

    def init_completer(self) -> None:
        self.Completer = None

    def init_logstart(self) -> None:
        pass

    def atexit_operations(self) -> None:
        pass


class Database(dict[str, Any]):
    """Where `%store` and `%alias` keep things: in memory, for as long as the session lives."""

    def keys(self, pattern: str = "*") -> Any:
        return fnmatch.filter(super().keys(), pattern)


class NoInput(io.TextIOBase):
    """What user code knows as sys.stdin: always at its end."""

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
    """Makes the one shell of this process, the one that IPython's get_ipython() finds."""
    _prefer_plain_output()
    original = getattr(ipython_shell, "PickleShareDB", None)
    if original is not None:
        # IPython 8 makes a database folder as soon as it starts. A dictionary serves %store and %alias as well.
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
    # Matplotlib reads this when it is imported, if it is. Its backend finds the shell by itself.
    os.environ.setdefault("MPLBACKEND", "module://matplotlib_inline.backend_inline")


def _refuse_input() -> None:
    def refusing(name: str) -> Any:
        def refuse(*_arguments: Any, **_options: Any) -> NoReturn:
            raise EOFError(f"{name}() is not available: nobody can type into this session. Put the value in the code.")

        refuse.__name__ = refuse.__qualname__ = name
        return refuse

    builtins.input = _known_builtins["input"] = refusing("input")
    getpass.getpass = refusing("getpass")


def _refuse_editor(_line: str) -> NoReturn:
    why = "%edit is not available: nobody can type into this session."
    raise UsageError(f"{why} Write the file with %%writefile.")


# IPython and the runner need these, whatever a cell deletes. Below, none of them is looked up.
_builtins = vars(builtins)
_known_builtins = dict(_builtins)


def _bring_back_builtins() -> None:
    for name in _known_builtins.keys() - _builtins.keys():
        _builtins[name] = _known_builtins[name]


def _without_our_frames(trace: TracebackType | None) -> TracebackType | None:
    """Returns the traceback without the runner's own frames at its beginning and its end, or None if that is all."""
    frames = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    is_ours = [step.tb_frame.f_code.co_filename.startswith(_OUR_FOLDER) for step in frames]
    while is_ours and is_ours[-1]:
        is_ours.pop()
    kept: TracebackType | None = None
    for step, ours in zip(reversed(frames[: len(is_ours)]), reversed(is_ours)):
        if not ours:
            kept = TracebackType(kept, step.tb_frame, step.tb_lasti, step.tb_lineno)
    return kept


def _first(*errors: BaseException | None) -> BaseException | None:
    """Returns the first that is an error. Not `or`: an exception may call itself false."""
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
    while trace is not None and length < _MOST_FRAMES:
        trace, length = trace.tb_next, length + 1
    return length >= _MOST_FRAMES


def _plain(text: str) -> str:
    return _colour_codes.sub("", text)


def _cut(text: str) -> str:
    if len(text) <= LARGEST_TRACEBACK:
        return text
    head = LARGEST_TRACEBACK // 3
    tail = LARGEST_TRACEBACK - head
    left_out = len(text) - head - tail
    return f"{text[:head]}\n[… {left_out} characters left out …]\n{text[-tail:]}"
