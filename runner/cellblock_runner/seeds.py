"""Seeds: which of the generators that a whole process shares have been seeded by its code.

Whoever seeds one wants the numbers that follow. So it keeps its state in copies, while one that
nobody has seeded is renewed (`reseed`). The functions that seed are replaced by functions that take
note, when their module is imported.
"""

from __future__ import annotations

import functools
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

# For each module: where its generator is seeded, by a function that is given a seed or a state.
_SEEDING = {
    "random": ("seed", "setstate"),
    "numpy.random": ("seed", "set_state"),
    "torch.random": ("manual_seed", "set_rng_state"),
}
# What brings these modules in, and hands their functions on.
_HANDED_ON = {"torch": "torch.random"}

_seeded: set[str] = set()


def watch() -> None:
    """Takes note of seeds from now on, also in modules that are imported later. For once only."""
    for name in _SEEDING:
        if name in sys.modules:
            _replace(sys.modules[name], name)
    sys.meta_path.insert(0, _Finder())


def is_seeded(module: str) -> bool:
    return module in _seeded


def state() -> Any:
    """Returns the state of the generator that renews itself in every fork, if it was seeded."""
    return sys.modules["random"].getstate() if is_seeded("random") else None


def bring_back(state: Any) -> None:
    """In a copy: gives that generator the state that it had."""
    if state is not None:
        sys.modules["random"]._inst.setstate(state)


def forget() -> None:
    """Takes all generators for unseeded."""
    _seeded.clear()


def _replace(module: ModuleType, name: str) -> None:
    for function in _SEEDING[name]:
        original = getattr(module, function, None)
        if callable(original) and not hasattr(original, "__wrapped__"):
            setattr(module, function, _noting(original, name))


def _noting(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def noting(*arguments: Any, **options: Any) -> Any:
        result = original(*arguments, **options)
        # Without a seed, or with None, a generator is seeded by the kernel.
        if any(value is not None for value in (*arguments[:1], *options.values())):
            _seeded.add(name)
        else:
            _seeded.discard(name)
        return result

    return noting


class _Finder:
    """Stands before all other finders, and has them find the modules that seed."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> Any:
        watched = name if name in _SEEDING else _HANDED_ON.get(name)
        if watched is None:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, watched)
                return spec
        return None


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads a module as its own loader does, and replaces its functions afterwards."""

    def __init__(self, loader: Any, watched: str) -> None:
        self._loader, self._watched = loader, watched

    def __getattribute__(self, name: str) -> Any:
        if name in ("exec_module", "_loader", "_watched"):
            return object.__getattribute__(self, name)
        return getattr(self._loader, name)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        _replace(module, self._watched)
