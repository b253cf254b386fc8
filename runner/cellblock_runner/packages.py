"""Packages: folders of installed packages that the host adds to a live session.

The packages of a session are defined by its `sys.path`, so copies inherit them and an undo removes
them without further work. The folders are read-only. Nothing in them is run here: `.pth` files are
not read.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import PathFinder, all_suffixes

# All folders that were added, the latest first.
_added: list[str] = []

# Top-level modules that every session begins with. A reset does not change them.
_preloaded: frozenset[str] = frozenset()

_SITE_FOLDERS = ("site-packages", "dist-packages")


class NotAFolder(ValueError):
    """A path is not a folder of packages."""


def add(paths: Sequence[str]) -> list[str]:
    """Makes the packages in these folders importable, in the session and in Python processes that
    it starts.

    They come before the environment's own packages, so that a newer version wins, and after the
    standard library and the user's files. Returns the modules in them that were already imported
    from elsewhere: those are not replaced.
    """
    folders = list(dict.fromkeys(paths))
    for folder in folders:
        if not (isinstance(folder, str) and os.path.isabs(folder) and os.path.isdir(folder)):
            raise NotAFolder(f"{folder!r} is not a folder of packages")
    sys.path[:] = _inserted(folders, sys.path, _is_site)
    _set_variable("PYTHONPATH", "", folders, _is_nothing)
    _set_variable("PATH", os.defpath, programs(folders), _is_anything)
    _added[:] = _inserted(folders, _added, _is_anything)
    importlib.invalidate_caches()
    return sorted(
        {name for folder in folders for name in _modules(folder) if _is_stale(name, folder)}
    )


def note_preloaded() -> None:
    """Records the modules that are imported now, in the process that sessions are copied from."""
    global _preloaded
    _preloaded = frozenset(name for name in sys.modules if "." not in name)


def preloaded(names: Sequence[str]) -> list[str]:
    """Returns those of these modules that every session begins with."""
    return [name for name in names if name in _preloaded]


def programs(folders: Sequence[str]) -> list[str]:
    """Returns the folders of programs in these folders of packages."""
    return [path for path in map(_programs, folders) if os.path.isdir(path)]


def _inserted(
    new: Sequence[str], entries: Sequence[str], comes_before: Callable[[object], bool]
) -> list[str]:
    """Returns the entries with the new ones before those that were added earlier, or before the
    first entry for which `comes_before` is true.
    """
    rest = [entry for entry in entries if entry not in new]
    earlier = [*_added, *map(_programs, _added)]
    place = next(
        (at for at, entry in enumerate(rest) if entry in earlier or comes_before(entry)), len(rest)
    )
    return [*rest[:place], *new, *rest[place:]]


def _set_variable(
    name: str, default: str, new: Sequence[str], comes_before: Callable[[object], bool]
) -> None:
    if new:
        value = os.environ.get(name) or default
        os.environ[name] = os.pathsep.join(
            _inserted(new, value.split(os.pathsep) if value else [], comes_before)
        )


def _is_site(entry: object) -> bool:
    return isinstance(entry, str) and os.path.basename(entry) in _SITE_FOLDERS


def _is_anything(_entry: object) -> bool:
    return True


def _is_nothing(_entry: object) -> bool:
    return False


def _programs(folder: str) -> str:
    return os.path.join(folder, "bin")


def _modules(folder: str) -> Iterator[str]:
    """Yields the names of the top-level modules in a folder."""
    for entry in os.scandir(folder):
        if entry.is_dir():
            name = entry.name
        else:
            suffix = next(
                (suffix for suffix in all_suffixes() if entry.name.endswith(suffix)), None
            )
            if suffix is None:
                continue
            name = entry.name[: -len(suffix)]
        if name.isidentifier() and name != "__pycache__":
            yield name


def _is_stale(name: str, folder: str) -> bool:
    """Reports whether an imported module differs from the one that an import would now find in this
    folder.
    """
    module = sys.modules.get(name)
    origin = getattr(module, "__file__", None)
    if not isinstance(origin, str):
        # Not imported, or a namespace package, which then includes the new folder by itself.
        return False
    try:
        spec = PathFinder.find_spec(name)
    except Exception:
        return False  # A finder of the user failed.
    found = None if spec is None else spec.origin
    return found is not None and found != origin and found.startswith(folder + os.sep)
