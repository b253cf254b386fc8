"""The state of a run as JSON. Runs in the sandbox, after the cell; `namespace` holds the cell's names, `request` what is wanted.

Names that do not begin with two underscores are told: as they are if JSON can hold them, else as their text. What does not fit
is named and left out.
"""

import json
import os
import re

# IPython's own: earlier results and inputs.
OWN = re.compile(r"__|_(i*|\d+|i\d+|[iod]h)$")


def hidden():
    """Returns the names that IPython put there, with their values."""
    try:
        return namespace["get_ipython"]().user_ns_hidden
    except Exception:
        return {}


def as_json(value):
    try:
        return json.dumps(value, allow_nan=False)
    except Exception:
        pass
    try:
        return json.dumps(str(value)[: request["longest_text"]])
    except Exception:
        return json.dumps(f"<{type(value).__name__}>")


def told():
    """Yields names and values: those of the dictionary that went in, then those of the cell."""
    state = namespace.get("state") if request["given"] else None
    if isinstance(state, dict):
        yield from ((str(name), value) for name, value in list(state.items()))
    ours = hidden()
    for name, value in list(namespace.items()):
        if not isinstance(name, str) or OWN.match(name) or (request["given"] and name == "state"):
            continue
        if name in ours and ours[name] is value:
            continue
        yield name, value


entries, omitted, left = {}, [], request["most_characters"]
for name, value in told():
    text = as_json(value)
    if len(text) + len(name) + 8 > left:
        omitted.append(name)
        continue
    left -= len(text) + len(name) + 8
    entries[name] = text
members = [f"{json.dumps(name)}: {text}" for name, text in entries.items()]
if omitted:
    members.append(f'"__omitted__": {json.dumps(omitted[:100])}')
answer = f"\n{request['word']}{{{', '.join(members)}}}\n".encode()
while answer:
    answer = answer[os.write(1, answer) :]
