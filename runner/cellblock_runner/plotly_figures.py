"""Text descriptions of Plotly figures: Plotly draws in a browser, and there is none here.

A figure is summarized by its kinds of traces, their names, their numbers of points and ranges, and
by its titles and axes. Its JSON is never shown, because most of it is numbers and the default
template; the host keeps it for a reader who asks for it.
"""

from __future__ import annotations

import datetime
import itertools
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any

# More add no information, and each costs the reader.
_MAX_TRACES = 20
_MAX_AXES = 8
_MAX_TEXTS = 5
_MAX_TEXT_LENGTH = 100
# Limit on the values of a list that are read. Numpy arrays are read completely.
_VALUES_READ = 100_000

# Members of traces that hold data, in the order of the report. The first one present determines the
# number of points.
_DATA = (
    "x", "y", "z", "labels", "values", "parents", "locations", "lat", "lon", "r", "theta",
    "a", "b", "c", "open", "high", "low", "close", "value", "u", "v", "w",
)  # fmt: skip

# A larger figure is not sent; `write_json` writes it to a file.
_MAX_SOURCE_BYTES = 4 * 1024 * 1024
_MIME = "application/vnd.plotly.v1+json"

_NOTE = (
    "No picture: Plotly draws in a browser."
    " The figure stays in its variable; write_html and write_json write it to a file."
)


def bundles(figure: Any) -> Iterator[dict[str, Any]]:
    """Yields the display bundle of a figure, or of a dictionary that describes one."""
    if isinstance(figure, dict):
        from plotly.graph_objects import Figure

        figure = Figure(figure)
    bundle = {"text/plain": f"{summary(figure)}\n{_NOTE}"}
    source = figure.to_json()
    if len(source) <= _MAX_SOURCE_BYTES:
        bundle[_MIME] = source
    yield bundle


def summary(figure: Any) -> str:
    """Describes a figure."""
    layout = figure.layout
    title = _title(layout)
    traces = list(figure.data)
    lines = [f"Plotly figure{f': {title}' if title else ''}{'' if traces else ' without data'}"]
    lines += [f"  {_trace(trace)}" for trace in traces[:_MAX_TRACES]]
    if len(traces) > _MAX_TRACES:
        lines.append(f"  … and {len(traces) - _MAX_TRACES} more traces")
    axes = list(itertools.islice(_axes(layout), _MAX_AXES + 1))
    lines += [f"  {axis}" for axis in axes[:_MAX_AXES]]
    if len(axes) > _MAX_AXES:
        lines.append("  … and more axes")
    notes = [_short(note.text) for note in layout.annotations if note.text]
    if notes:
        more = f", … ({len(notes)} in all)" if len(notes) > _MAX_TEXTS else ""
        lines.append(f"  annotations: {', '.join(notes[:_MAX_TEXTS])}{more}")
    return "\n".join(lines)


def _trace(trace: Any) -> str:
    kind = str(trace.type)
    if "mode" in trace and trace.mode:
        kind += f" ({trace.mode})"
    parts: list[str] = []
    count = None
    for member in _DATA:
        values = trace[member] if member in trace else None
        if values is None or isinstance(values, (str, bytes)) or not hasattr(values, "__len__"):
            if isinstance(values, (int, float)):
                parts.append(f"{member}: {values:.6g}")
            continue
        if count is None:
            count = _size(values)
        described = _values(values)
        if described:
            parts.append(f"{member}: {described}")
    if count is not None:
        parts.insert(0, count)
    name = f' "{_short(trace.name)}"' if trace.name else ""
    return f"{kind}{name}{': ' if parts else ''}{'; '.join(parts)}"


def _size(values: Any) -> str:
    shape = getattr(values, "shape", None)
    if shape is None and len(values) and isinstance(values[0], (list, tuple)):
        shape = (len(values), len(values[0]))
    if shape is not None and len(shape) > 1:
        return f"{'×'.join(map(str, shape))} values"
    return f"{len(values)} point{'' if len(values) == 1 else 's'}"


def _values(values: Any) -> str:
    """Returns the range of the values, or the distinct values."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(values, numpy.ndarray):
        if values.dtype.kind in "iuf":
            numbers = values[numpy.isfinite(values)]
            return _between(numbers.min(), numbers.max()) if numbers.size else ""
        if values.dtype.kind == "M":
            times = values[~numpy.isnat(values)].astype("datetime64[s]")
            return _between(times.min(), times.max()) if times.size else ""
        values = values.ravel().tolist()
    flat = [
        value
        for value in itertools.islice(_flat(values), _VALUES_READ)
        if value is not None and value == value
    ]
    for kinds in ((int, float), (datetime.date,)):
        if flat and all(isinstance(value, kinds) and not isinstance(value, bool) for value in flat):
            return _between(min(flat), max(flat))
    texts = list(dict.fromkeys(map(str, flat)))
    if texts and all(re.match(r"\d{4}-\d\d", text) for text in texts):
        return _between(min(texts), max(texts))
    more = f", … ({len(texts)} different)" if len(texts) > _MAX_TEXTS else ""
    return ", ".join(map(_short, texts[:_MAX_TEXTS])) + more


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)) or hasattr(value, "ravel"):
            yield from _flat(value)
        else:
            yield value


def _between(least: Any, most: Any) -> str:
    first, last = _number(least), _number(most)
    return first if first == last else f"{first} to {last}"


def _number(value: Any) -> str:
    try:
        return f"{float(value):.6g}"
    except (TypeError, ValueError):
        return str(value).replace("T00:00:00", "").replace(" 00:00:00", "")


def _axes(layout: Any) -> Iterator[str]:
    """Describes the axes that have a title, type or range."""
    plain = layout.to_plotly_json()
    plain.pop("template", None)
    scenes = [
        ("", plain),
        *((f" of {name}", plain[name]) for name in sorted(plain) if name.startswith("scene")),
    ]
    for place, scene in scenes:
        for name in sorted(scene, key=lambda name: (len(name), name)):
            match = re.fullmatch(r"([xyz])axis(\d*)|coloraxis\d*", name)
            axis = scene[name]
            if match is None or not isinstance(axis, dict):
                continue
            title = _title(axis) or _title(axis.get("colorbar") or {})
            parts = [f'"{title}"'] if title else []
            if axis.get("type") and axis["type"] != "linear":
                parts.append(str(axis["type"]))
            if axis.get("range") is not None and len(axis["range"]) == 2:
                power = "10^" if axis.get("type") == "log" else ""
                parts.append(
                    "range " + " to ".join(f"{power}{_number(end)}" for end in axis["range"])
                )
            if parts:
                label = f"{match[1]} axis {match[2]}".rstrip() if match[1] else "colours"
                yield f"{label}{place}: {', '.join(parts)}"


def _title(holder: Any) -> str:
    title = holder["title"] if "title" in holder else None
    text = (
        title
        if isinstance(title, str)
        else (title["text"] if title is not None and "text" in title else None)
    )
    return _short(text) if text else ""


def _short(text: Any) -> str:
    plain = " ".join(re.sub(r"<[^>]*>", " ", str(text)).split())
    return plain if len(plain) <= _MAX_TEXT_LENGTH else plain[:_MAX_TEXT_LENGTH] + "…"
