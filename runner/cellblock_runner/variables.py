"""Variables: which names a cell created, changed or deleted.

Before and after a cell every name gets a cheap fingerprint: identity and type, for small values
their content, for arrays and tables a few samples. So a change in the middle of a large value may
be missed; a change that is reported has happened. User code is never called: no `__eq__`,
`__len__`, `__repr__` or property of a class that the user wrote is used, and any exception from a
library's object counts as "unknown".
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

# Limit on the entries in each list of a report. More are better queried explicitly.
MAX_ENTRIES = 50

# Containers up to this length are compared element by element, by identity.
_SMALL = 32
# Arrays up to this many bytes are compared whole; of larger ones this many elements are.
_SMALL_ARRAY = 1024
_SAMPLES = 16

_SCALARS = frozenset((int, float, complex, bool, type(None)))
_TEXTS = frozenset((str, bytes))
_SEQUENCES = frozenset((list, tuple, set, frozenset))
_SIZED = _TEXTS | _SEQUENCES | {dict, bytearray, range}

# Read the real name, even if a metaclass overrides it.
_name_of_type = type.__dict__["__name__"].__get__
_module_of_type = type.__dict__["__module__"].__get__
_bases_of_type = type.__dict__["__mro__"].__get__

Fingerprint = Any
Snapshot = dict[str, Fingerprint]


def snapshot(namespace: Mapping[Any, Any], hidden: Mapping[str, Any]) -> Snapshot:
    """Returns the fingerprints of all names that are the user's own."""
    numpy = sys.modules.get("numpy")
    array_type = getattr(numpy, "ndarray", None)
    found: Snapshot = {}
    for name, value in list(namespace.items()):
        if type(name) is not str or name[:1] == "_" or (name in hidden and hidden[name] is value):
            continue
        kind = type(value)
        if kind in _SCALARS or kind in _TEXTS and len(value) <= 256:
            found[name] = (kind, value)
        elif kind in _SEQUENCES:
            length = len(value)
            found[name] = (
                id(value),
                kind,
                length,
                tuple(map(id, value)) if length <= _SMALL else None,
            )
        elif kind is dict:
            length = len(value)
            content = (
                (tuple(map(id, value)), tuple(map(id, value.values())))
                if length <= _SMALL
                else None
            )
            found[name] = (id(value), kind, length, content)
        elif kind is array_type:
            found[name] = (id(value), _array(value))
        else:
            found[name] = (id(value), id(kind), _content(kind, value))
    return found


def report(before: Snapshot, after: Snapshot, namespace: Mapping[Any, Any]) -> dict[str, Any]:
    """Returns the `variables` member of a `done` frame."""
    created = [name for name in after if name not in before]
    changed = [
        name
        for name, fingerprint in after.items()
        if name in before
        and not _same(before[name], fingerprint)
        and not isinstance(namespace.get(name), ModuleType)
    ]
    deleted = [name for name in before if name not in after]
    return {
        "created": [describe(name, namespace.get(name)) for name in created[:MAX_ENTRIES]],
        "changed": [describe(name, namespace.get(name)) for name in changed[:MAX_ENTRIES]],
        "deleted": deleted[:MAX_ENTRIES],
        "omitted": sum(max(0, len(names) - MAX_ENTRIES) for names in (created, changed, deleted)),
    }


def describe(name: str, value: Any) -> dict[str, Any]:
    """Returns name, type, size and shape of one variable."""
    kind = type(value)
    return {
        "name": name,
        "type": _name_of_type(kind),
        "size": size_of(value),
        "shape": _shape(kind, value),
    }


def size_of(value: Any) -> int | None:
    """Returns the size of `value` itself in bytes, without referenced objects, or None if it is
    unknown.
    """
    kind = type(value)
    try:
        if not _is_users(kind):
            if _module_of_type(kind).startswith("pandas"):
                usage = value.memory_usage(deep=False)
                return int(usage if isinstance(usage, int) else usage.sum())
            size = getattr(value, "nbytes", None)
            if isinstance(size, int):
                return size
            return sys.getsizeof(value)
        # The method of the first base that is not the user's: for a subclass of list, that of list.
        base = next(base for base in _bases_of_type(kind) if _module_of_type(base) != "__main__")
        return int(base.__sizeof__(value))
    except Exception:
        return None


def _same(first: Fingerprint, second: Fingerprint) -> bool:
    try:
        return bool(first == second)
    except Exception:
        return False


def _is_users(kind: type) -> bool:
    """Reports whether inspecting a value of this type could run code that the user wrote."""
    return any(_module_of_type(base) == "__main__" for base in _bases_of_type(kind))


def _array(value: Any) -> Fingerprint:
    try:
        sample = (
            value if value.nbytes <= _SMALL_ARRAY else value.flat[:: max(1, value.size // _SAMPLES)]
        )
        return value.shape, value.dtype.str, sample.tobytes()
    except Exception:
        return None


def _content(kind: type, value: Any) -> Fingerprint:
    """Returns a cheap fingerprint of the content of an object that is not a plain container."""
    try:
        module = _module_of_type(kind)
        if module.startswith("pandas"):
            manager = value._mgr
            arrays = manager.arrays[:8]
            return (
                value.shape,
                tuple(map(id, arrays)),
                tuple(_array(a) for a in arrays),
                tuple(map(id, value.axes)),
            )
        if kind is bytearray:
            return len(value), bytes(value[:64])
        if _is_users(kind) or module == "builtins":
            attributes = object.__getattribute__(value, "__dict__")
            if type(attributes) is dict and len(attributes) <= _SMALL:
                return tuple(map(id, attributes.values()))
            return None
        return len(value) if hasattr(kind, "__len__") else None
    except Exception:
        return None


def _shape(kind: type, value: Any) -> str | None:
    try:
        if kind in _SIZED:
            return f"len {len(value)}"
        if _is_users(kind) or isinstance(value, (type, ModuleType)):
            return None
        shape = getattr(value, "shape", None)
        if (
            isinstance(shape, tuple)
            and len(shape) <= 16
            and all(isinstance(side, int) for side in shape)
        ):
            return (
                "("
                + ", ".join(str(int(side)) for side in shape)
                + ("," if len(shape) == 1 else "")
                + ")"
            )
        return f"len {len(value)}" if hasattr(kind, "__len__") else None
    except Exception:
        return None
