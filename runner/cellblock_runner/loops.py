"""Loops: the event loops of a session in its copies.

A loop of the standard library has an epoll and a pair of sockets, with which other threads wake it.
Both are recreated under the same numbers (`private`), so the loop itself is not affected: timers
continue, and so do waits on other recreated descriptors. A wait on a connection never completes.

Between two cells the loop of the shell runs in the main thread until the host's next request
arrives, as long as it has something to do: its tasks continue as they do in a notebook. It is
suspended while a cell runs that does not await, and while the session is copied.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from types import ModuleType
from typing import Any

from .import_hooks import when_imported


def has_work(loop: Any) -> bool:
    """Reports whether a loop has pending work, now or later."""
    tasks = sys.modules.get("asyncio.tasks")
    if loop is None or tasks is None:
        return False
    try:
        if loop.is_closed() or loop.is_running():
            return False
        if tasks.all_tasks(loop):
            return True
        handles = (*getattr(loop, "_ready", ()), *getattr(loop, "_scheduled", ()))
        if not all(handle.cancelled() for handle in handles):
            return True
        watches = getattr(loop, "_selector", None)
        return watches is not None and len(watches.get_map()) > 1
    except Exception:
        return False  # A custom loop of the user.


def run_until_readable(loop: Any, descriptor: int, is_readable: bool) -> None:
    """Runs a loop until the descriptor is readable, or the loop cannot be run.

    If it already `is_readable`, all work that is ready is done once, so that requests without a
    pause do not starve the tasks.
    """
    is_over = False

    def stop() -> None:
        nonlocal is_over
        is_over = True
        loop.stop()

    try:
        if is_readable:
            loop.call_soon(stop)
        else:
            loop.add_reader(descriptor, stop)
    except Exception:
        return
    try:
        while not is_over:
            try:
                loop.run_forever()
            except (KeyboardInterrupt, SystemExit):
                continue  # It ended the task that raised it. The others continue.
    except BaseException:
        return
    finally:
        with contextlib.suppress(Exception):
            loop.remove_reader(descriptor)


def let_cells_create_tasks(loop_of_cells: Callable[[], Any]) -> None:
    """Makes `asyncio.create_task` work in a cell that does not await, as in a notebook.

    The task runs after the cell.
    """

    def replace(tasks: ModuleType) -> None:
        original, events = tasks.create_task, sys.modules["asyncio.events"]

        @functools.wraps(original)
        def create_task(*arguments: Any, **options: Any) -> Any:
            is_main = threading.current_thread() is threading.main_thread()
            if events._get_running_loop() is not None or not is_main:
                return original(*arguments, **options)
            events._set_running_loop(loop_of_cells())
            try:
                return original(*arguments, **options)
            finally:
                events._set_running_loop(None)

        tasks.create_task = create_task
        package = sys.modules["asyncio"]
        if vars(package).get("create_task") is original:
            package.create_task = create_task

    when_imported("asyncio.tasks", replace)


def find_open(of_shell: Any, names: dict[str, Any]) -> list[Any]:
    """Returns the open loops: of the shell, of variables, of the main thread, and of threads."""
    events = sys.modules.get("asyncio.base_events")
    if events is None:
        return []
    candidates = [of_shell, current(), *_running(), *names.values()]
    found = {id(each): each for each in candidates if issubclass(type(each), events.BaseEventLoop)}
    return [loop for loop in found.values() if not loop.is_closed()]


def wakeup_sockets(loops: Iterable[Any]) -> Iterator[tuple[int, int]]:
    """Yields the numbers of the sockets with which loops are woken."""
    for loop in loops:
        try:
            yield loop._ssock.fileno(), loop._csock.fileno()
        except AttributeError:
            continue  # Not a loop of the standard library.


def count_lost_tasks(loops: Iterable[Any], carried: Collection[int]) -> int:
    """Counts the tasks that cannot continue: their loop waits for more than timers and `carried`
    descriptors.
    """
    tasks = sys.modules.get("asyncio.tasks")
    lost = 0
    for loop in loops if tasks is not None else ():
        try:
            if not _can_continue(loop, carried):
                lost += len(tasks.all_tasks(loop))  # type: ignore[union-attr]
        except Exception:
            continue
    return lost


def reset_executors(loops: Iterable[Any]) -> None:
    """In a copy without the threads: lets loops start new ones."""
    for loop in loops:
        loop._default_executor = None


def mark_running(loops: Iterable[Any]) -> None:
    """In a copy, before its threads resume: marks loops that run in them as running again.

    asyncio records the running loop of a thread together with the process id, which has changed.
    """
    for loop in loops:
        if loop.is_running():
            loop.call_soon_threadsafe(sys.modules["asyncio.events"]._set_running_loop, loop)
            loop._ready.rotate(1)  # Before all other callbacks.


def current() -> Any:
    """Returns the loop of the main thread, if one has been set."""
    policy = getattr(sys.modules.get("asyncio.events"), "_event_loop_policy", None)
    return getattr(getattr(policy, "_local", None), "_loop", None)


def _running() -> Iterator[Any]:
    for frame in sys._current_frames().values():
        while frame is not None:
            if frame.f_code.co_name == "run_forever":
                yield frame.f_locals.get("self")
                break
            frame = frame.f_back  # type: ignore[assignment]


def _can_continue(loop: Any, carried: Collection[int]) -> bool:
    threads = getattr(getattr(loop, "_default_executor", None), "_threads", ())
    return not threads and all(number in carried for number in loop._selector.get_map())
