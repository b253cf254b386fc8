"""Seeds: tracks which process-wide random generators have been seeded by user code.

Code that seeds a generator expects the numbers that follow. So a seeded generator keeps its state
in copies, while an unseeded one is reseeded (`reseed`). The seeding functions are replaced by
functions that record the call, when their module is imported.

Variants that are compared with each other draw the same numbers: each gets the same seed for its
unseeded generators (`share`). They still count as unseeded.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from .import_hooks import when_imported

# For each module, the functions that seed its generator with a seed or a state.
_SEEDING = {
    "random": ("seed", "setstate"),
    "numpy.random": ("seed", "set_state"),
    "torch.random": ("manual_seed", "set_rng_state"),
}
# Packages that import these modules and re-export their functions.
_REEXPORTED = {"torch": "torch.random"}

_seeded: set[str] = set()
# The seed of unseeded generators in this session, including those of modules imported later.
_shared: int | None = None


def watch() -> None:
    """Records seeding from now on, also in modules that are imported later. Call it only once."""
    for name in _SEEDING:
        when_imported(name, functools.partial(_begin, name=name))
    for name, seeding in _REEXPORTED.items():
        when_imported(name, functools.partial(_begin, name=seeding))


def is_seeded(module: str) -> bool:
    return module in _seeded


def seeded() -> list[str]:
    """Returns the modules whose generator was seeded."""
    return sorted(_seeded)


def share(seed: int | None) -> None:
    """Gives this seed to all unseeded generators. Equal seeds draw equal numbers."""
    global _shared
    _shared = seed
    for name in _SEEDING:
        _apply_shared(name)


def state() -> Any:
    """Returns the state of the generator that reseeds itself in every fork, if it was seeded."""
    return sys.modules["random"].getstate() if is_seeded("random") else None


def restore(state: Any) -> None:
    """In a copy: restores the state of that generator."""
    if state is not None:
        sys.modules["random"]._inst.setstate(state)


def forget() -> None:
    """Marks all generators as unseeded."""
    _seeded.clear()
    share(None)


def _apply_shared(name: str) -> None:
    module = sys.modules.get(name)
    if _shared is None or module is None or is_seeded(name):
        return
    # Bypasses the functions that record seeding.
    if name == "random":
        module._inst.seed(_shared)
    elif name == "numpy.random":
        module.mtrand._rand.seed(_shared % 2**32)
    elif hasattr(module, "manual_seed"):
        getattr(module.manual_seed, "__wrapped__", module.manual_seed)(_shared % 2**63)


def _begin(module: ModuleType, name: str) -> None:
    _replace(module, name)
    if module.__name__ != "torch.random":  # It cannot be used before all of torch is imported.
        _apply_shared(name)


def _replace(module: ModuleType, name: str) -> None:
    for function in _SEEDING[name]:
        original = getattr(module, function, None)
        if callable(original) and not hasattr(original, "__wrapped__"):
            setattr(module, function, _recording(original, name))


def _recording(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def recording(*arguments: Any, **options: Any) -> Any:
        result = original(*arguments, **options)
        # Without a seed, or with None, a generator is seeded by the kernel.
        if any(value is not None for value in (*arguments[:1], *options.values())):
            _seeded.add(name)
        else:
            _seeded.discard(name)
        return result

    return recording
