"""Fork state: the state that a copy of a session needs besides its memory, and the state that it
cannot have.

    save      in the original, before the copy: inspects descriptors, shared memory, folders,
              threads, loops
    release   in the original, afterwards: releases the state held for the copy, and counts losses
              that can only be counted then
    restore   in a copy: restores as much as possible, and reports the rest

State is saved before nearly every cell, so it is cheap when there is little of it: a few dozen
system calls. Everything that cannot be correct in a copy is reported in a short text such as "2
threads"; nothing is silently wrong.
"""

from __future__ import annotations

import _thread
import faulthandler
import os
import resource
import signal
import sys
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

from . import branch, descriptors, folders, interrupts, mappings, pools, seeds
from .channel import CHANNEL_DESCRIPTOR
from .descriptors import OpenDescriptor, counted
from .loops import count_lost_tasks, mark_running, reset_executors, wakeup_sockets
from .reseed import reseed
from .threads import StoppedThreads

# Libraries that keep threads of their own through a fork. Named in a report if loaded.
_WITH_THREADS = ("polars", "torch", "tensorflow", "pyarrow", "duckdb", "sklearn", "numba", "jax")
_MAX_THREAD_COUNT = 64
PF_EXITING = 0x4  # From <linux/sched.h>.

# Limits of this kernel, by name. Each number once: RLIMIT_OFILE is an old name.
_RLIMITS = {
    name: getattr(resource, name)
    for name in sorted(dir(resource))
    if name.startswith("RLIMIT_") and name != "RLIMIT_OFILE"
}

_SQLITE = b"SQLite format 3\0"


class CopyRequest(NamedTuple):
    """The host's options for a copy, from the `branch` frame."""

    undo_files: int
    fork: bool
    work_is_shared: bool


class SessionContext(NamedTuple):
    """The parts of a session that stay the same."""

    work: str
    # Folders besides it that a fork copies, and that undo leaves alone.
    scratch: Sequence[str]
    # The home folder, which is inside one of them in every sandbox.
    home: str
    streams: tuple[int, int]


class ResourceLimits(NamedTuple):
    """Resources that the kernel grants the process: limits, and its scheduling priority."""

    limits: dict[int, tuple[int, int]]
    niceness: int


# The initial limits of this process. Code can only give some of them up.
_initial_limits: ResourceLimits | None = None


class ForkState(NamedTuple):
    request: CopyRequest
    folder: str | None
    mask: int
    blocked: set[int]
    opened: list[OpenDescriptor]
    # Numbers that belong to the runner itself; losing them is not reported.
    own_descriptors: frozenset[int]
    areas: list[mappings.SharedMapping]
    # The work folder as undo restores it, or the reason why it cannot be restored.
    kept: folders.Tree | None
    why: str | None
    # All folders as a fork needs them.
    carried: dict[str, folders.Tree]
    losses: list[str]
    had_children: bool
    loops: list[Any]
    generator: Any
    reports_faults: bool
    limits: ResourceLimits
    initial_limits: ResourceLimits | None


class Restored(NamedTuple):
    """The result of restoring a copy, for its `hello`, and the new state of its work folder."""

    lost: list[str]
    files: str
    why: str | None
    # Whether files of the original were held in memory until now.
    mapped: bool
    kept: folders.Tree | None
    # Threads that no longer have anything to do.
    ended: set[int]


def save(
    request: CopyRequest, context: SessionContext, loops: list[Any], kept: folders.Tree | None
) -> ForkState:
    """Collects everything that a copy will need. `kept` is the result of the last time."""
    own = frozenset(_descriptors_of_tracker())
    children = _count_children()
    opened = descriptors.find_open(
        context.streams,
        (CHANNEL_DESCRIPTOR, *branch.own_descriptors),
        bool(children),
        wakeup_sockets(loops),
    )
    nameless = {item.identity for item in opened if item.content is not None}
    areas = mappings.find_shared((context.work, *context.scratch))
    why = None
    try:
        if not request.undo_files:
            raise folders.SnapshotError("undo_files is 0")
        kept = folders.snapshot(
            context.work, kept, request.undo_files, {area.identity for area in areas}
        )
    except folders.SnapshotError as cause:
        kept, why = None, str(cause)
    except OSError as cause:
        kept, why = None, f"the work folder cannot be read: {cause.strerror}"
    areas = mappings.save(areas, nameless, context.work)
    carried: dict[str, folders.Tree] = {}
    anew = {item.number for item in opened if item.private is not None}
    losses = list(_losses(loops, children, anew))
    if request.fork:
        for root in context.scratch if request.work_is_shared else (context.work, *context.scratch):
            try:
                carried[root] = folders.snapshot_for_fork(
                    root, kept if root == context.work else None
                )
            except (folders.SnapshotError, OSError):
                losses.append(f"the files of {root}")
    return ForkState(
        request,
        _current_folder(),
        _umask(),
        interrupts.blocked(),
        opened,
        own,
        areas,
        kept,
        why,
        carried,
        losses,
        bool(children),
        loops,
        seeds.state(),
        faulthandler.is_enabled(),
        current_limits(),
        _initial_limits,
    )


def current_limits() -> ResourceLimits:
    limits = {number: resource.getrlimit(number) for number in _RLIMITS.values()}
    return ResourceLimits(limits, os.getpriority(os.PRIO_PROCESS, 0))


def record_limits() -> None:
    """At the start of a session or a copy: records its initial limits."""
    global _initial_limits
    _initial_limits = current_limits()


def apply_limits(kept: ResourceLimits, initial_limits: ResourceLimits | None) -> list[str]:
    """In a copy, once everything else is restored: gives up the limits that code in the original
    has given up.

    Those are the differences between `kept` and the `initial_limits` of the original. Returns the
    limits that could not be set.
    """
    lost = []
    for name, number in _RLIMITS.items():
        try:
            if initial_limits is not None and kept.limits[number] != initial_limits.limits[number]:
                resource.setrlimit(number, kept.limits[number])
        except (OSError, ValueError):
            lost.append(f"the limit {name}")
    try:
        if initial_limits is not None and kept.niceness != initial_limits.niceness:
            os.setpriority(os.PRIO_PROCESS, 0, kept.niceness)
    except OSError:
        lost.append("the niceness")
    return lost


def note_lost_threads(state: ForkState, stopped: StoppedThreads) -> None:
    """In the original, before the copy is made: records the threads that are not copied."""
    threads = _thread._count()
    if stopped.lost and threads:
        state.losses.insert(0, counted(threads, "thread"))


def release(
    state: ForkState, context: SessionContext, stopped: StoppedThreads
) -> tuple[list[str], bool]:
    """Releases the state in the original, right after the copy was made.

    Returns losses of the copy that only the original can see, and whether the copy is whole: it has
    everything that a fork needs, and nothing in the original continues by itself.
    """
    for tree in state.carried.values():
        folders.release(tree)
    if stopped.is_whole and not stopped.is_idle:
        return [], False
    native = 0 if stopped.is_whole else _native_threads()
    if not native:
        has_files = state.request.work_is_shared or state.kept is not None
        untouched = all(folders.is_unused(root, context.home) for root in context.scratch)
        return [], has_files and not state.losses and untouched
    names = ", ".join(name for name in _WITH_THREADS if name in sys.modules)
    return [counted(native, "native thread") + (f" ({names})" if names else "")], False


def relocate(
    state: ForkState, context: SessionContext, work: str
) -> tuple[ForkState, SessionContext]:
    """Adjusts state and context for a copy whose work folder has a different name than the
    original's.
    """
    old = context.work

    def moved(path: str) -> str:
        return work + path[len(old) :] if path == old or path.startswith(f"{old}/") else path

    state = state._replace(
        folder=None if state.folder is None else moved(state.folder),
        opened=[item._replace(path=moved(item.path)) for item in state.opened],
        areas=[area._replace(path=moved(area.path)) for area in state.areas],
        carried={moved(root): tree for root, tree in state.carried.items()},
        losses=[*state.losses, f"the name of the work folder, which is {work} now"],
    )
    return state, context._replace(work=work)


def restore(
    state: ForkState, context: SessionContext, is_fork: bool, lost_threads: bool
) -> Restored:
    """In a copy: restores everything. Failures are reported and are not fatal. With `lost_threads`,
    other threads were not copied.
    """
    reseed()
    seeds.restore(state.generator)
    lost = list(state.losses)
    mapped = any(map(folders.is_mapped, state.carried.values()))
    files, why, kept, known = _restore_folders(state, context, is_fork, lost)
    _change_folder(state.folder, context.work, lost)
    os.umask(state.mask)

    def is_known(path: str) -> bool:
        return any(
            path == root or (path.startswith(root + "/") and path[len(root) + 1 :] in tree)
            for root, tree in known.items()
        )

    dead = descriptors.restore(state.opened, is_known)
    lost += descriptors.describe_losses(
        item for item in dead if item.number not in state.own_descriptors
    )
    if is_fork and "_sqlite3" in sys.modules:
        lost += _describe_databases(state.opened, known)
    numbers = {item.identity: item.number for item in state.opened if item.content is not None}
    lost += mappings.restore(state.areas, numbers.get)
    if lost_threads:
        reset_executors(state.loops)
        pools.start_new_threads()
    else:
        mark_running(state.loops)
    ended = pools.break_processes() if state.had_children else set()
    _reset_tracker()
    if state.reports_faults:
        faulthandler.disable()
        faulthandler.enable()
    return Restored(lost, files, why, mapped, kept, ended)


def _restore_folders(
    state: ForkState, context: SessionContext, is_fork: bool, lost: list[str]
) -> tuple[str, str | None, folders.Tree | None, dict[str, folders.Tree]]:
    """Returns `files` and `why` of the hello, the tree now kept of the work folder, and the files
    that are unchanged.
    """
    request, kept, failures = state.request, state.kept, 0
    known: dict[str, folders.Tree] = {}
    if is_fork:
        trees = dict(state.carried)
        if kept is not None and not request.work_is_shared:
            trees.setdefault(context.work, kept)
        for root, tree in trees.items():
            known[root], missed = folders.restore(root, tree, removing=False)
            failures += missed
            folders.release(tree)
    else:
        for tree in state.carried.values():
            folders.release(tree)
        if kept is not None:
            known[context.work], failures = folders.restore(context.work, kept, removing=True)
    state.carried.clear()
    if failures:
        lost.append(counted(failures, "file") + " could not be restored")
    if kept is not None and context.work in known:
        now = known[context.work]
        kept = {path: now[path] for path in kept if path in now}
    if is_fork and request.work_is_shared:
        return "shared", None, kept, known
    if context.work in known:
        return "restored", None, kept, known
    return "left alone", state.why or "the work folder was not saved", None, known


def _current_folder() -> str | None:
    try:
        return os.getcwd()
    except OSError:
        return None


def _umask() -> int:
    if _thread._count():
        # os.umask() changes it for a moment, and another thread may create a file just then.
        with open("/proc/self/status", "rb", 0) as file:
            told = file.read().partition(b"\nUmask:")[2].split(None, 1)
        if told:  # gVisor does not report it.
            return int(told[0], 8)
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _change_folder(folder: str | None, work: str, lost: list[str]) -> None:
    for place in (folder, work, "/"):
        try:
            if place is not None:
                os.chdir(place)
                break
        except OSError:
            continue
    else:
        place = None
    if place != folder or folder is None:
        lost.append(f"the current folder, which is {place} now")


def _losses(loops: list[Any], children: int, carried: Collection[int]) -> Iterator[str]:
    """Yields the losses of a copy, apart from descriptors."""
    if children:
        yield counted(children, "subprocess").replace("processs", "processes")
    tasks = count_lost_tasks(loops, carried)
    if tasks:
        yield counted(tasks, "asyncio task")
    if any(
        signal.getitimer(which)[0]
        for which in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
    ):
        yield "1 timer"
    gpu = sys.modules.get("torch.cuda")
    if gpu is not None and gpu.is_initialized():
        yield "the GPU's memory"


def _count_children() -> int:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except OSError:
        return 0
    tracker = _tracker()
    ours = {getattr(tracker, "_pid", None)}
    count = 0
    try:
        for thread in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{thread}/children", "rb", 0) as file:
                count += sum(1 for child in file.read().split() if int(child) not in ours)
    except OSError:
        return 1  # A kernel that does not report how many.
    return count


def _native_threads() -> int:
    """Counts threads that Python did not start and that the fork handlers did not stop."""
    threads = os.listdir("/proc/self/task")
    if len(threads) - 1 <= _thread._count():
        return 0
    exiting = 0
    for thread in threads[:_MAX_THREAD_COUNT]:
        # A joined thread is visible until the kernel has removed it.
        try:
            with open(f"/proc/self/task/{thread}/stat", "rb", 0) as file:
                exiting += bool(int(file.read().rpartition(b")")[2].split()[6]) & PF_EXITING)
        except (OSError, ValueError, IndexError):
            exiting += 1
    return max(0, len(threads) - 1 - exiting - _thread._count())


def _tracker() -> Any:
    module = sys.modules.get("multiprocessing.resource_tracker")
    return getattr(module, "_resource_tracker", None)


def _descriptors_of_tracker() -> Iterator[int]:
    number = getattr(_tracker(), "_fd", None)
    if number is not None:
        yield number


def _reset_tracker() -> None:
    """Lets multiprocessing start a new resource tracker; the old one belongs to the original."""
    tracker = _tracker()
    number = getattr(tracker, "_fd", None)
    if number is not None:
        os.close(number)
        tracker._fd = tracker._pid = None


def _describe_databases(
    opened: Sequence[OpenDescriptor], known: dict[str, folders.Tree]
) -> list[str]:
    """Describes the affected sqlite connections: without a write-ahead log they refuse to write to
    a file that is not the one they opened.
    """
    paths = {item.path for item in opened}
    count = 0
    for item in opened:
        can_write = (
            item.kind == "file" and item.content is None and item.flags & os.O_ACCMODE == os.O_RDWR
        )
        if (
            not can_write
            or f"{item.path}-wal" in paths
            or not any(item.path.startswith(f"{root}/") for root in known)
        ):
            continue
        try:
            count += os.pread(item.number, len(_SQLITE), 0) == _SQLITE
        except OSError:
            continue
    return [f"writing to {counted(count, 'sqlite connection')}"] if count else []
