"""The packages of `mcptools` as modules: imported on first use, and again after the host has
rewritten them.

A server can be registered again between two cells. Its modules in memory then differ from its
files. A package is identified by its index file, which is always written last; at the beginning of
a cell, packages whose index file has changed are dropped, so that the next `import` reads them.
Functions that the user holds do not change.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

# The index file of each imported package, and its stamp.
_read: dict[str, tuple[str, Any]] = {}


def modules_when_used(
    package: str, names: list[str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns `__getattr__` and `__dir__` of a package whose modules are imported on first use.
    Called by the package itself.
    """
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
    """Drops packages that have been rewritten or removed."""
    changed = [package for package, (file, then) in _read.items() if stamp(file) != then]
    if not changed:
        return
    for package in changed:
        del _read[package]
        # A change of the index of all servers does not affect the packages in it: unchanged ones
        # stay.
        stale = (
            [package]
            if "." not in package
            else [name for name in sys.modules if f"{name}.".startswith(f"{package}.")]
        )
        for name in stale:
            sys.modules.pop(name, None)
        parent, _, own = package.rpartition(".")
        if parent in sys.modules:
            vars(sys.modules[parent]).pop(own, None)
    importlib.invalidate_caches()


def stamp(file: str) -> Any:
    """Returns a value that identifies the version of a file, or None if it does not exist."""
    try:
        status = os.stat(file)
    except OSError:
        return None
    return status.st_ino, status.st_dev, status.st_mtime_ns, status.st_size
