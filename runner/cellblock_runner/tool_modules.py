"""The packages of `mcptools` as modules: imported when they are used, and anew when the host has written them anew.

A server can be registered again between two cells. Its modules in memory are then not what its files say. What is remembered of a package is its index
file, which is written last and always; at the beginning of a cell the packages of which it is another one are forgotten, so that the next `import` reads
them. Functions that the user holds stay what they were.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

# The index file of each imported package, and which one it was.
_read: dict[str, tuple[str, Any]] = {}


def modules_when_used(package: str, names: list[str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns `__getattr__` and `__dir__` of a package whose modules are imported when somebody uses them. For the package itself."""
    module = sys.modules[package]
    _read[package] = (str(module.__file__), stamp(str(module.__file__)))

    def get(name: str) -> Any:
        if name in names:
            return importlib.import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def members() -> list[str]:
        return sorted({*vars(module), *names})

    return get, members


def forget_changed() -> None:
    """Forgets packages that have been written anew, or are gone."""
    changed = [package for package, (file, then) in _read.items() if stamp(file) != then]
    if not changed:
        return
    for package in changed:
        del _read[package]
        # The index of all servers does not stand for what is in it: those that have not changed stay.
        stale = [package] if "." not in package else [name for name in sys.modules if f"{name}.".startswith(f"{package}.")]
        for name in stale:
            sys.modules.pop(name, None)
        parent, _, own = package.rpartition(".")
        if parent in sys.modules:
            vars(sys.modules[parent]).pop(own, None)
    importlib.invalidate_caches()


def stamp(file: str) -> Any:
    """Returns what tells a file from another one of the same name; None when there is none."""
    try:
        status = os.stat(file)
    except OSError:
        return None
    return status.st_ino, status.st_dev, status.st_mtime_ns, status.st_size
