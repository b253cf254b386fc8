"""Loops: the event loops of a session in its copies.

A loop of the standard library has an epoll and a pair of sockets, with which other threads wake it.
Both are made anew under the same numbers (`private`), so the loop itself notices nothing: what
waits for time goes on. What waits for a connection never does.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any


def find(of_shell: Any, names: dict[str, Any]) -> list[Any]:
    """Returns the open loops: of the shell, of variables, of the main thread, and of threads."""
    events = sys.modules.get("asyncio.base_events")
    if events is None:
        return []
    candidates = [of_shell, current(), *_running(), *names.values()]
    found = {id(each): each for each in candidates if issubclass(type(each), events.BaseEventLoop)}
    return [loop for loop in found.values() if not loop.is_closed()]


def pairs(loops: Iterable[Any]) -> Iterator[tuple[int, int]]:
    """Returns the numbers of the sockets with which loops are woken."""
    for loop in loops:
        try:
            yield loop._ssock.fileno(), loop._csock.fileno()
        except AttributeError:
            continue  # Not one of the standard library.


def count_lost_tasks(loops: Iterable[Any]) -> int:
    """Counts the tasks that cannot go on, because their loop waits for more than time."""
    tasks = sys.modules.get("asyncio.tasks")
    lost = 0
    for loop in loops if tasks is not None else ():
        try:
            if not _waits_for_time_only(loop):
                lost += len(tasks.all_tasks(loop))  # type: ignore[union-attr]
        except Exception:
            continue
    return lost


def forget_threads(loops: Iterable[Any]) -> None:
    """In a copy without the threads: lets loops start new ones."""
    for loop in loops:
        loop._default_executor = None


def rejoin(loops: Iterable[Any]) -> None:
    """In a copy, before its threads go on: has loops that run in them run there again.

    Which loop runs in a thread is known by the number of the process.
    """
    for loop in loops:
        if loop.is_running():
            loop.call_soon_threadsafe(sys.modules["asyncio.events"]._set_running_loop, loop)
            loop._ready.rotate(1)  # Before everything else.


def current() -> Any:
    """The loop of the main thread, if somebody has set one."""
    policy = getattr(sys.modules.get("asyncio.events"), "_event_loop_policy", None)
    return getattr(getattr(policy, "_local", None), "_loop", None)


def _running() -> Iterator[Any]:
    for frame in sys._current_frames().values():
        while frame is not None:
            if frame.f_code.co_name == "run_forever":
                yield frame.f_locals.get("self")
                break
            frame = frame.f_back  # type: ignore[assignment]


def _waits_for_time_only(loop: Any) -> bool:
    threads = getattr(getattr(loop, "_default_executor", None), "_threads", ())
    return len(loop._selector.get_map()) <= 1 and not threads
