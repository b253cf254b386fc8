"""State: the values of a cell's names, as JSON.

Servers that return it call `tell` after a cell. Names that do not begin with two underscores are
reported: as they are if JSON supports them, else as their text. Values that do not fit are named
and left out. The answer is one line on descriptor 1, because the cell may have replaced
`sys.stdout`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from typing import Any

# Besides names with two underscores: IPython's earlier results and inputs.
_IPYTHON_NAMES = re.compile(r"__|_(i*|\d+|i\d+|[iod]h)$")
# Limit on the names of omitted values.
_MAX_OMITTED = 100
# The JSON overhead of a name and a value.
_ENTRY_OVERHEAD = 8


def tell(namespace: dict[str, Any], request: str) -> None:
    """Prints the values. `request` is JSON: the size limits, whether a dictionary `state` was
    passed in, and the word that begins the answer.
    """
    wanted = json.loads(request)
    answer = f"\n{wanted['word']}{state(namespace, wanted)}\n".encode()
    while answer:
        answer = answer[os.write(1, answer) :]


def state(namespace: dict[str, Any], request: dict[str, Any]) -> str:
    """Returns a JSON object."""
    entries: dict[str, str] = {}
    omitted: list[str] = []
    left = request["most_characters"]
    for name, value in _reported(namespace, request["given"]):
        text = _as_json(value, request["longest_text"])
        size = len(text) + len(name) + _ENTRY_OVERHEAD
        if size > left:
            omitted.append(name)
            continue
        left -= size
        entries[name] = text
    members = [f"{json.dumps(name)}: {text}" for name, text in entries.items()]
    if omitted:
        members.append(f'"__omitted__": {json.dumps(omitted[:_MAX_OMITTED])}')
    return f"{{{', '.join(members)}}}"


def _reported(namespace: dict[str, Any], given: bool) -> Iterator[tuple[str, Any]]:
    """Yields names and values: those of the passed-in dictionary, then those of the cell."""
    went_in = namespace.get("state") if given else None
    if isinstance(went_in, dict):
        yield from ((str(name), value) for name, value in list(went_in.items()))
    hidden = _hidden(namespace)
    for name, value in list(namespace.items()):
        is_ours = name in hidden and hidden[name] is value
        if (
            isinstance(name, str)
            and not _IPYTHON_NAMES.match(name)
            and not is_ours
            and not (given and name == "state")
        ):
            yield name, value


def _hidden(namespace: dict[str, Any]) -> dict[str, Any]:
    """Returns the names that IPython defined, with their values."""
    try:
        return dict(namespace["get_ipython"]().user_ns_hidden)
    except Exception:
        return {}


def _as_json(value: Any, longest_text: int) -> str:
    # An exception from one of the user's values must not suppress the others.
    try:
        return json.dumps(value, allow_nan=False)
    except Exception:
        pass
    try:
        return json.dumps(str(value)[:longest_text])
    except Exception:
        return json.dumps(f"<{type(value).__name__}>")
