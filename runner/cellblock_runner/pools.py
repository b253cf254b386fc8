"""Pools: executors in a copy that has lost their threads or processes.

Work submitted to such an executor would never run, and code that waits for it would wait forever.
So thread pools start new threads, and process pools raise at once.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any

_MESSAGE = "this copy of the session does not have the processes of this pool"

_WITH_PROCESSES = (
    "concurrent.futures.process",
    "joblib.externals.loky.process_executor",
    "loky.process_executor",
)
_HANDLERS = ("_handle_workers", "_handle_tasks", "_handle_results")


def start_new_threads() -> None:
    """Makes thread pools start new threads, for pending and future work."""
    for pool in _instances("concurrent.futures.thread", "ThreadPoolExecutor"):
        with contextlib.suppress(AttributeError):
            pool._threads.clear()
            pool._idle_semaphore = threading.Semaphore(0)
            if not pool._work_queue.empty():
                pool._adjust_thread_count()


def break_processes() -> set[int]:
    """Makes process pools raise, for pending and future work.

    Returns the threads that served them. They must not continue without the processes.
    """
    for module in _WITH_PROCESSES:
        for pool in _instances(module, "ProcessPoolExecutor"):
            with contextlib.suppress(AttributeError):
                _break_executor(pool, sys.modules[module])
    for pool in _instances("multiprocessing.pool", "Pool"):
        with contextlib.suppress(AttributeError):
            pool._state = "TERMINATE"
            pool._terminate.cancel()
            pool._pool.clear()
            for result in list(pool._cache.values()):
                result._set(None, (False, RuntimeError(_MESSAGE)))
    active = threading._active  # type: ignore[attr-defined]
    serving = {ident: thread for ident, thread in list(active.items()) if _serves_processes(thread)}
    for ident, thread in serving.items():
        del active[ident]
        _mark_ended(thread)
    return set(serving)


def _break_executor(pool: Any, module: Any) -> None:
    flags = getattr(pool, "_flags", None)
    if flags is not None:  # loky
        flags.broken = module.TerminatedWorkerError(_MESSAGE)
    else:
        pool._broken = _MESSAGE
    wakeup = pool._executor_manager_thread_wakeup
    if wakeup is not None:
        wakeup._closed = True  # Remaining references to it have no effect.
    pool._executor_manager_thread = pool._executor_manager_thread_wakeup = None
    for item in list(pool._pending_work_items.values()):
        with contextlib.suppress(Exception):  # Cancelled meanwhile.
            item.future.set_exception(module.BrokenProcessPool(_MESSAGE))
    pool._pending_work_items.clear()


def _serves_processes(thread: threading.Thread) -> bool:
    if type(thread).__name__ == "_ExecutorManagerThread":  # In the standard library and loky.
        return True
    target = getattr(getattr(thread, "_target", None), "__name__", "")
    return target in _HANDLERS


def _mark_ended(thread: Any) -> None:
    """Marks a thread as ended, as Python does after a fork with threads that are missing."""
    with contextlib.suppress(AttributeError):
        if hasattr(thread, "_handle"):  # Python 3.13 and newer
            thread._handle._set_done()
        else:
            thread._reset_internal_locks(False)
            thread._stop()


def _instances(module: str, name: str) -> Iterator[Any]:
    kind = getattr(sys.modules.get(module), name, None)
    objects: Iterable[Any] = gc.get_objects() if isinstance(kind, type) else ()
    return (each for each in objects if issubclass(type(each), kind))  # type: ignore[arg-type]
