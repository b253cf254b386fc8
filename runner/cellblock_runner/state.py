"""State: what the names of a cell hold, as JSON.

`tell` is asked after a cell by servers that return it. Names that do not begin with two underscores are told: as they are if
JSON can hold them, else as their text. What does not fit is named and left out. Its answer is one line on descriptor 1, because
the cell may have put something else in the place of `sys.stdout`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from typing import Any

# Beside names with two underscores: IPython's earlier results and inputs.
_OWN = re.compile(r"__|_(i*|\d+|i\d+|[iod]h)$")
# Names of what did not fit; more are only more of the same.
_MOST_OMITTED = 100
# What JSON needs around a name and a value.
_AROUND = 8


def tell(namespace: dict[str, Any], request: str) -> None:
    """Says what the names hold. `request` is JSON: how much may be said, whether a dictionary `state` went in, the first word."""
    wanted = json.loads(request)
    answer = f"\n{wanted['word']}{state(namespace, wanted)}\n".encode()
    while answer:
        answer = answer[os.write(1, answer) :]


def state(namespace: dict[str, Any], request: dict[str, Any]) -> str:
    """Returns an object of JSON."""
    entries: dict[str, str] = {}
    omitted: list[str] = []
    left = request["most_characters"]
    for name, value in _told(namespace, request["given"]):
        text = _as_json(value, request["longest_text"])
        size = len(text) + len(name) + _AROUND
        if size > left:
            omitted.append(name)
            continue
        left -= size
        entries[name] = text
    members = [f"{json.dumps(name)}: {text}" for name, text in entries.items()]
    if omitted:
        members.append(f'"__omitted__": {json.dumps(omitted[:_MOST_OMITTED])}')
    return f"{{{', '.join(members)}}}"


def _told(namespace: dict[str, Any], given: bool) -> Iterator[tuple[str, Any]]:
    """Yields names and values: those of the dictionary that went in, then those of the cell."""
    went_in = namespace.get("state") if given else None
    if isinstance(went_in, dict):
        yield from ((str(name), value) for name, value in list(went_in.items()))
    hidden = _hidden(namespace)
    for name, value in list(namespace.items()):
        is_ours = name in hidden and hidden[name] is value
        if isinstance(name, str) and not _OWN.match(name) and not is_ours and not (given and name == "state"):
            yield name, value


def _hidden(namespace: dict[str, Any]) -> dict[str, Any]:
    """Returns the names that IPython put there, with their values."""
    try:
        return dict(namespace["get_ipython"]().user_ns_hidden)
    except Exception:
        return {}


def _as_json(value: Any, longest_text: int) -> str:
    # Whatever a value of the user's raises is no reason to tell nothing of the others.
    try:
        return json.dumps(value, allow_nan=False)
    except Exception:
        pass
    try:
        return json.dumps(str(value)[:longest_text])
    except Exception:
        return json.dumps(f"<{type(value).__name__}>")
