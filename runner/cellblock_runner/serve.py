"""Serves one session, from its first frame to its last.

    prepare()   in the warm process: creates the shell, imports popular modules, leaves no thread
    prime()     runs the machinery once, so that its pages and caches are warm; leaves no trace
    serve()     in the session's own process: sends hello, then answers requests one at a time until
                the host closes the channel

Every request is answered. In particular, the end of a cell is reported regardless of what the cell
did to its objects.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import linecache
import os
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NoReturn

from . import (
    PROTOCOL_VERSION,
    branch,
    bundles,
    descriptors,
    displays,
    files,
    folders,
    fonts,
    fork_state,
    interrupts,
    loops,
    packages,
    private_descriptors,
    processes,
    seeds,
    subprocess_shim,
    threads,
    tool_files,
    tool_modules,
    variables,
)
from .channel import Channel
from .files import FileRefused, Upload
from .frames import BrokenFrame, Header
from .host_calls import HostCalls
from .interrupts import Gate
from .prefault import WriteSet
from .readonly_cells import changes_nothing, runs_alone
from .reseed import reseed
from .shell import EmptyStdin, Shell, create_shell
from .streams import OutputStreams, flush_c_stdout, make_pipes, watch_processes

_NO_VARIABLES: dict[str, Any] = {"created": [], "changed": [], "deleted": [], "omitted": 0}

# Gate bytes that the host sends to a copy.
_GATE_FORK = b"f"
_GATE_UNDO = b"u"
# Default limit, in bytes, on the working folder's files that are kept for undo.
_DEFAULT_UNDO_FILES = 64 * 1024 * 1024

# The first things that every session does: nothing, text, a value, text on the other stream.
_PRIMING_CELLS = ("pass", "print('')\n1", "import sys\nprint('', file=sys.stderr)")
# Run in a session that waits in the pool. A value as well would make half a megabyte more of each
# of them private, to save 0.6 ms.
_WAITING_CELLS = ("print('')",)
# Cells that load more code. Only for the warm process: in a session they would make many shared
# pages private.
_LOADING_CELLS = ("await __import__('asyncio').sleep(0)", "1/0", "if")


# Python specializes the code of a new function while it runs. After this many rounds the code is
# stable, and forks share it.
_REHEARSAL_ROUNDS = 20
# This many bytes of each size fill the gaps that imports leave.
_FILLER_BYTES = 250_000
# Keeps the gaps in the memory of the warm process filled.
_fillers: list[list[bytes]] = []

# The original, even if user code replaces it.
_getpid = os.getpid

# Options of pyarrow's allocator.
_ARROW_ALLOCATOR = "JE_ARROW_MALLOC_CONF"

# Names under which Python keeps the last error for debuggers.
_LAST_ERROR = ("last_type", "last_value", "last_traceback", "last_exc")


class TooManyThreads(RuntimeError):
    """The warm process has threads. A fork would lose them, and everything they hold."""


def prepare(preload: list[str], rehearse: bool = True) -> Shell:
    """Creates the shell and imports the given modules, in a process that will be forked or will
    serve by itself.

    Modules that are not installed are skipped. Afterwards the process has exactly one thread. A
    rehearsal takes longer than the first cell it speeds up, so it is for processes that fork more
    than once.
    """
    watch_processes()
    seeds.watch()
    private_descriptors.track_socket_pairs()
    processes.install_script_magic()
    processes.install_pip(lambda: Shell.instance().gate)
    subprocess_shim.install()
    fonts.install()
    shell = create_shell()
    displays.install(shell.display_formatter)
    with _without_background_threads():
        for name in preload:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    if "matplotlib.pyplot" in sys.modules:
        _warm_matplotlib()
    if rehearse:
        _warm_tools()
        _rehearse(shell, _PRIMING_CELLS + _LOADING_CELLS)
        for _ in range(_REHEARSAL_ROUNDS):
            _rehearse(shell, _PRIMING_CELLS)
        # Newer Pythons import it when a package is added, which takes 30 ms.
        importlib.import_module("importlib.metadata")
        # Used by profiles before and after a cell, possibly in a session that is a second old.
        for name in ("imports", "state"):
            importlib.import_module(f"{__package__}.{name}")
        # The first call initializes OpenSSL. Doing it here makes it cheaper for every session.
        reseed()
        gc.collect()
        _fill_gaps()
    packages.note_preloaded()
    _require_one_thread()
    gc.freeze()
    return shell


def prime(shell: Shell) -> None:
    """Runs a few cells and discards their output. Names, counters and error state are unchanged
    afterwards.
    """
    _rehearse(shell, _WAITING_CELLS)


def serve(
    shell: Shell, channel: Channel, workdir: str, scratch: Sequence[str] = (), empty: bool = False
) -> NoReturn:
    """Serves one session on `channel` until the host closes it. Ends the process.

    `scratch` lists the folders, besides the working folder, that belong to this session alone. With
    `empty`, the session is reset to its initial state, without files.
    """
    status = 1
    try:
        seeds.forget()
        reseed()
        fork_state.record_limits()
        os.chdir(workdir)
        # '' follows the user's chdir; the working folder stays importable after a chdir.
        sys.path[:] = ["", workdir, *(path for path in sys.path if path not in ("", workdir))]
        sys.argv[:] = [""]
        shell.user_ns["_dh"][:] = [workdir]  # The target of `%cd -`.
        _close_stdin()
        gate = Gate()
        gate.install()
        streams = OutputStreams(gate, channel, bytes(16), (1, 2))
        session = Session(shell, gate, streams, channel, os.path.abspath(workdir), scratch)
        session.send_hello(_emptied(workdir) if empty else {})
        session.host_calls.activate()
        sys.stdout = sys.__stdout__ = streams.stdout
        sys.stderr = sys.__stderr__ = streams.stderr
        streams.activate()
        while (request := session.next_request()) is not None:
            session.answer(*request)
        session.abandon_upload()
        status = 0
    except (OSError, BrokenFrame):
        pass  # The host is gone or violates the protocol. No peer is left to report to.
    finally:
        # Skips the interpreter's shutdown, which would wait for the user's threads and run the
        # user's handlers.
        os._exit(status)


class Session:
    """Answers requests. Holds the state between two cells: names, files, a pending upload."""

    def __init__(
        self,
        shell: Shell,
        gate: Gate,
        streams: OutputStreams,
        channel: Channel,
        workdir: str,
        scratch: Sequence[str] = (),
    ) -> None:
        self._shell = shell
        self._gate = gate
        self._streams = streams
        self._channel = channel
        self._workdir = workdir
        self._scratch = scratch
        self._home = os.environ.get("HOME", "")
        self._write_set = WriteSet()
        self._kept: folders.Tree | None = None
        self._process = _getpid()
        self._execution: Any = None
        # Whether code ran since the last cell.
        self._ran_between = False
        self.host_calls = HostCalls(gate, streams, channel)
        self._upload: Upload | None = None
        self._upload_id: Any = None
        self._delivery = tool_files.Delivery(workdir)
        shell.sink = self
        self._names = self._snapshot_names() or {}
        self._folder = files.snapshot(workdir)

    def next_request(self) -> tuple[Header, bytes] | None:
        """Waits for a request. Returns None when the host has closed the channel.

        Meanwhile the tasks of the shell's event loop continue. Their code is interrupted only while
        a request is waiting for it.
        """
        loop = self._shell.loop
        if loops.has_work(loop):
            self._ran_between = True
            with self._gate.open_if(self._channel.has_more):
                loops.run_until_readable(loop, self._channel.fileno(), self._channel.has_more())
        return self._channel.receive()

    def answer(self, header: Header, payload: bytes) -> None:
        """Answers one request completely. Ignores types that only a newer host knows."""
        kind, number = header["type"], header.get("id")
        if kind == "execute":
            self._execute(number, payload.decode("utf-8", "replace"), header.get("seed"))
            return
        if kind == "packages":
            self._add_packages(number, header.get("paths"))
            return
        try:
            if kind == "branch":
                self._branch(number, header)
            elif kind == "tools":
                self._take_tools(number, header, payload)
            elif kind == "list_files":
                entries, omitted = files.listing(self._workdir, header.get("limit", 0))
                self._channel.send(
                    {"type": "file_list", "id": number, "entries": entries, "omitted": omitted}
                )
            elif kind == "read_file" and "offset" in header:
                self._read_part(
                    number, header.get("path", ""), header["offset"], header.get("length", 0)
                )
            elif kind == "read_file":
                self._read_file(number, header.get("path", ""), header.get("limit"))
            elif kind == "write_begin":
                self.abandon_upload()
                self._upload = Upload(
                    self._workdir, header.get("path", ""), bool(header.get("overwrite"))
                )
                self._upload_id = number
            elif kind == "write_data" and self._upload is not None and number == self._upload_id:
                self._upload.write(payload)
            elif kind == "write_end" and self._upload is not None and number == self._upload_id:
                upload, self._upload = self._upload, None
                size, replaced = upload.finish()
                self._folder = files.snapshot(self._workdir)
                self._channel.send(
                    {"type": "written", "id": number, "size": size, "replaced": replaced}
                )
        except FileRefused as refused:
            # Later frames of this upload no longer match one, and are dropped.
            self.abandon_upload()
            self._channel.send(
                {"type": "failed", "id": number, "reason": refused.reason, "message": str(refused)}
            )

    def send_hello(self, more: Header) -> None:
        """Sends the first hello, with new pipes and a new marker."""
        self._send_hello(*self._new_pipes(()), more)

    def _new_pipes(
        self, redirected: Collection[int], with_threads: bool = False
    ) -> tuple[bytes, tuple[int, int]]:
        """Returns the new marker and the read ends of the new pipes."""
        marker = os.urandom(16)
        write_ends, read_ends = make_pipes(redirected)
        self._streams.reset_in_copy(marker, write_ends, with_threads)
        return marker, read_ends

    def _send_hello(self, marker: bytes, read_ends: tuple[int, int], more: Header) -> None:
        hello = {
            "type": "hello",
            "version": PROTOCOL_VERSION,
            "python": ".".join(map(str, sys.version_info[:3])),
            "marker": marker.hex(),
            **more,
        }
        self._channel.send(hello, descriptors=read_ends)
        for read_end in read_ends:
            os.close(read_end)

    def _branch(self, number: Any, header: Header) -> None:
        """Lets a copy of the session be made. The original sends an answer; the copy starts a
        connection of its own.
        """
        collects = gc.isenabled()
        # A collection now would write to memory that original and copy could share.
        gc.disable()
        try:
            flush_c_stdout()
            request = fork_state.CopyRequest(
                int(header.get("undo_files", _DEFAULT_UNDO_FILES)),
                bool(header.get("fork")),
                bool(header.get("work_is_shared")),
            )
            context = fork_state.SessionContext(
                self._workdir, self._scratch, self._home, self._streams.descriptors
            )
            if not request.fork:
                self._write_set.update()
            stopped = threads.StoppedThreads([])
            try:
                stopped = threads.stop_others()
                saved = fork_state.save(
                    request,
                    context,
                    loops.find_open(self._shell.loop, self._shell.user_ns),
                    self._kept,
                )
                self._kept = saved.kept
                fork_state.note_lost_threads(saved, stopped)
                is_copy = branch.suspend_for_copy(stopped.is_whole)
            except Exception as cause:
                stopped.resume()
                message = f"the session could not be copied: {cause}"
                self._channel.send(
                    {"type": "failed", "id": number, "reason": "other", "message": message}
                )
                return
            if is_copy:
                self._restore_copy(saved, context, stopped)
            else:
                stopped.resume()
                lost, whole = fork_state.release(saved, context, stopped)
                whole = whole and not loops.has_work(self._shell.loop)
                self._channel.send({"type": "branched", "id": number, "lost": lost, "whole": whole})
                if not request.fork:
                    # For a fork this is skipped: forks are about to start and need the processor
                    # more, and no copy is made before the next cell.
                    self._write_set.prefault(self._channel.has_more)
        finally:
            if collects:
                gc.enable()

    def _restore_copy(
        self,
        saved: fork_state.ForkState,
        context: fork_state.SessionContext,
        stopped: threads.StoppedThreads,
    ) -> None:
        """In a copy: waits for the gate byte, restores what can be restored, and sends hello."""
        interrupts.restore_signals(saved.blocked)
        gate = self._channel.receive_gate()
        if gate not in (_GATE_FORK, _GATE_UNDO):
            raise BrokenFrame("the host did not open the gate")
        self._process = _getpid()
        self.host_calls.reset()
        self._upload = None
        if branch.moved_to is not None:
            saved, context = fork_state.relocate(saved, context, branch.moved_to)
            sys.path[:] = [context.work if path == self._workdir else path for path in sys.path]
            self._workdir, branch.moved_to = context.work, None
        restored = fork_state.restore(saved, context, gate == _GATE_FORK, bool(stopped.lost))
        self._kept = restored.kept
        self._folder = files.snapshot(self._workdir)
        redirected = {item.number for item in saved.opened if item.kind == "file"}
        marker, read_ends = self._new_pipes(redirected, stopped.is_whole)
        descriptors.redirect_to_streams(saved.opened, self._streams.descriptors)
        # Threads resume last, so that they find everything in place.
        missing = stopped.resume_in_copy(restored.ended)
        if missing:
            restored.lost.append(descriptors.counted(missing, "thread"))
        fork_state.record_limits()
        restored.lost.extend(fork_state.apply_limits(saved.limits, saved.initial_limits))
        hello = {
            "lost": restored.lost,
            "files": restored.files,
            "why": restored.why,
            "mapped": restored.mapped,
        }
        hello["seeded"] = seeds.seeded()
        self._send_hello(marker, read_ends, hello)

    def _take_tools(self, number: Any, header: Header, payload: bytes) -> None:
        if "server" in header:
            self._delivery.take(
                str(header["server"]),
                header.get("modules") or (),
                payload,
                bool(header.get("last")),
            )
            return
        self._delivery.finish(payload, header.get("servers"))
        self._channel.send({"type": "tools_written", "id": number})

    def abandon_upload(self) -> None:
        if self._upload is not None:
            self._upload.abandon()
            self._upload = None

    # Methods of the shell's `OutputSink`.

    def value(self, bundle: dict[str, Any]) -> None:
        self._show({"type": "value"}, bundle)

    def display(self, bundle: dict[str, Any], display_id: str | None, update: bool) -> None:
        self._show({"type": "display", "display_id": display_id, "update": update}, bundle)

    def clear(self, wait: bool) -> None:
        if not self._streams.forked and self._streams.accepts_output():
            self._streams.send({"type": "clear", "id": self._execution, "wait": wait})

    def _show(self, header: Header, bundle: dict[str, Any]) -> None:
        if self._streams.forked:
            print(bundle.get("text/plain", ""))
        elif self._streams.accepts_output():
            data, blobs, payload = bundles.pack(displays.with_picture(bundle))
            self._streams.send(
                {**header, "id": self._execution, "data": data, "blobs": blobs}, payload
            )
        else:
            text = bundle.get("text/plain", "")
            self._streams.write_late(f"{text}\n" if isinstance(text, str) else "")

    def _execute(self, number: Any, code: str, seed: int | None = None) -> None:
        self._execution = number
        if seed is not None:
            seeds.share(seed)
        ran_between, self._ran_between = self._ran_between, False
        is_readonly = not ran_between and changes_nothing(code, self._shell)
        tool_modules.forget_changed()
        self._gate.open()
        self._streams.open_cell({"type": "started", "id": number})
        self.host_calls.open_cell(number)
        failure = self._shell.run(code, self._gate)
        if _getpid() != self._process:
            # A child that user code forked ran to the end of the cell. Only its parent answers the
            # host.
            sys.stdout.flush()
            os._exit(0 if failure is None else 1)
        self.host_calls.close_cell()
        late = self._streams.close_cell()
        done = {
            "type": "done",
            "id": number,
            "status": "ok" if failure is None else "error",
            "error": None if failure is None else failure._asdict(),
            "variables": self._variables(),
            "files": self._files(),
        }
        if late is not None:
            done["late"] = late
        did_nothing = not ran_between and not self._shell.has_run
        if is_readonly if failure is None else did_nothing and runs_alone(self._shell):
            done["unchanged"] = True
        self._streams.send(done)

    def _add_packages(self, number: Any, paths: Any) -> None:
        try:
            loaded = packages.add(paths)
        except Exception as cause:
            # The request is answered whatever the user has made of sys.path.
            reason = "missing" if isinstance(cause, packages.NotAFolder) else "other"
            message = f"the packages could not be added: {cause}"
            self._channel.send(
                {"type": "failed", "id": number, "reason": reason, "message": message}
            )
        else:
            preloaded = packages.preloaded(loaded)
            self._channel.send(
                {"type": "packages_added", "id": number, "loaded": loaded, "preloaded": preloaded}
            )

    def _variables(self) -> dict[str, Any]:
        before, after = self._names, self._snapshot_names()
        if after is None:
            return _NO_VARIABLES
        self._names = after
        try:
            return variables.report(before, after, self._shell.user_ns)
        except BaseException:
            return _NO_VARIABLES

    def _snapshot_names(self) -> variables.Snapshot | None:
        try:
            return variables.snapshot(self._shell.user_ns, self._shell.user_ns_hidden)
        except BaseException:
            # An object raised something outside Exception. The changes are unknown, but the end of
            # the cell is still reported.
            return None

    def _files(self) -> dict[str, Any] | None:
        before, self._folder = self._folder, files.snapshot(self._workdir)
        return files.report(before, self._folder)

    def _read_file(self, number: Any, path: str, limit: int | None) -> None:
        size = 0
        for piece in files.read_pieces(self._workdir, path, limit):
            self._channel.send({"type": "file_data", "id": number}, piece)
            size += len(piece)
        self._channel.send({"type": "file_end", "id": number, "size": size})

    def _read_part(self, number: Any, path: str, offset: int, length: int) -> None:
        part = files.FilePart(self._workdir, path, offset, length)
        size = 0
        for piece in part.pieces():
            self._channel.send({"type": "file_data", "id": number}, piece)
            size += len(piece)
        end = {
            "type": "file_end",
            "id": number,
            "size": size,
            "total": part.total,
            "version": part.version,
        }
        self._channel.send(end)


def _emptied(workdir: str) -> Header:
    """Removes all files. Returns the hello fields that report it."""
    left = folders.restore(workdir, {}, removing=True)[1]
    lost = [f"{descriptors.counted(left, 'file')} could not be removed"] if left else []
    return {"lost": lost, "files": "restored", "why": None}


def _rehearse(shell: Shell, cells: tuple[str, ...]) -> None:
    ours, theirs = socket.socketpair()
    descriptors = (
        os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC),
        os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC),
    )
    gate = Gate()
    streams = OutputStreams(gate, Channel(ours), bytes(16), descriptors)
    standard_streams = sys.stdout, sys.stderr
    interrupt_handler = signal.getsignal(signal.SIGINT)
    last_error = {name: vars(sys)[name] for name in _LAST_ERROR if name in vars(sys)}
    undo = shell.save_state()
    known_sources = set(linecache.cache)
    try:
        sys.stdout, sys.stderr = streams.stdout, streams.stderr
        session = Session(shell, gate, streams, Channel(ours), os.devnull)
        for number, code in enumerate(cells):
            session.answer({"type": "execute", "id": number}, code.encode())
    finally:
        sys.stdout, sys.stderr = standard_streams
        undo()
        signal.signal(signal.SIGINT, interrupt_handler)
        for name in _LAST_ERROR:
            vars(sys).pop(name, None)
        vars(sys).update(last_error)
        for source in set(linecache.cache) - known_sources:
            if source.startswith("<ipython-input"):
                del linecache.cache[source]
        for descriptor in descriptors:
            os.close(descriptor)
        ours.close()
        theirs.close()


def _close_stdin() -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    if nothing != 0:
        os.dup2(nothing, 0)
        os.close(nothing)
    sys.stdin = sys.__stdin__ = EmptyStdin()


@contextlib.contextmanager
def _without_background_threads() -> Iterator[None]:
    """Keeps libraries loaded meanwhile from starting threads of their own.

    The allocator of pyarrow, which pandas imports, starts one as soon as it is loaded.
    """
    before = os.environ.get(_ARROW_ALLOCATOR)
    os.environ[_ARROW_ALLOCATOR] = ",".join(filter(None, (before, "background_thread:false")))
    try:
        yield
    finally:
        if before is None:
            del os.environ[_ARROW_ALLOCATOR]
        else:
            os.environ[_ARROW_ALLOCATOR] = before


def _warm_matplotlib() -> None:
    """Draws one figure and discards it, so that fonts and the backend are loaded in every fork."""
    import io

    import matplotlib.font_manager
    import matplotlib.pyplot as pyplot

    try:
        figure = pyplot.figure()
        figure.add_subplot().set_title("warm")
        figure.savefig(io.BytesIO(), format="png")
        pyplot.close("all")
        # Matplotlib clears its font cache in every fork, and that writes to half a megabyte of
        # shared memory.
        matplotlib.font_manager._get_font.cache_clear()
    except Exception as cause:
        warnings.warn(f"matplotlib could not be warmed: {cause}", stacklevel=2)


def _warm_tools() -> None:
    """Imports the dependencies of MCP server modules and has Pydantic create a class, because its
    first class is the most expensive.

    Without Pydantic there is nothing to warm. Any other failure affects only the cells that use
    such modules.
    """
    try:
        tools = importlib.import_module(f"{__package__}.mcptools")
        fields = {"text": str, "count": "int | None", "words": list[str]}
        namespace = {"__annotations__": fields, "__module__": __name__, "count": None}
        tools.arguments(type("_Warm", (tools.Model,), namespace)(text="", words=[]))
    except ImportError:
        return
    except Exception as cause:
        warnings.warn(
            f"what modules of MCP servers need could not be warmed: {cause}", stacklevel=2
        )


def _fill_gaps() -> None:
    """Fills the gaps between the objects of the warm process.

    Otherwise each fork puts its first objects into these gaps, and copies a page for every few
    objects.
    """
    for size in range(48, 513, 16):
        # A bytes object has an overhead of 33 bytes.
        _fillers.append([bytes(size - 33) for _ in range(_FILLER_BYTES // size)])


def _require_one_thread() -> None:
    """Makes sure that a fork loses no thread.

    OpenBLAS starts its threads when numpy is imported, stops them before a fork and restarts them
    on demand. One fork therefore stops them. Any other thread is a bug in a preloaded module.
    """
    if _thread_count() > 1:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        # A joined thread stays visible until the kernel has removed it.
        deadline = time.monotonic() + 1
        while _thread_count() > 1 and time.monotonic() < deadline:
            time.sleep(0.001)
    if _thread_count() > 1:
        names = ", ".join(thread.name for thread in threading.enumerate())
        raise TooManyThreads(
            f"{_thread_count()} threads are left after preparing; Python knows {names}"
        )


def _thread_count() -> int:
    return len(os.listdir("/proc/self/task"))
