"""Import hooks: functions that run on a module as soon as it has been imported, now or later.

Nothing is imported for it, and only the effect of the hook is visible afterwards: a module keeps
its specification and its loader.
"""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

_actions: dict[str, Callable[[ModuleType], None]] = {}


def when_imported(name: str, action: Callable[[ModuleType], None]) -> None:
    """Runs an action on a module: now if it is imported, otherwise after its own code has run."""
    if name in sys.modules:
        action(sys.modules[name])
        return
    if not _actions:
        sys.meta_path.insert(0, _Finder())
    _actions[name] = action


class _Finder:
    """Precedes all other finders, and delegates to them for the modules that have a hook."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> Any:
        action = _actions.get(name)
        if action is None:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, action)
                return spec
        return None


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads a module as its own loader does, and runs the action afterwards."""

    def __init__(self, loader: Any, action: Callable[[ModuleType], None]) -> None:
        self._loader, self._action = loader, action

    def __getattribute__(self, name: str) -> Any:
        if name in ("exec_module", "_loader", "_action"):
            return object.__getattribute__(self, name)
        return getattr(self._loader, name)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._action(module)
