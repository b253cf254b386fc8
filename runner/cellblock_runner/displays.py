"""Displays of objects whose own representation is made for browsers.

    Audio, Video, IFrame    a line that names them
    Code                    its text, not LaTeX
    drawings (SVG)          an image, if resvg is installed in the environment
    Plotly figures          a summary (`plotly_figures`)

All other objects use their own representation, and the host chooses.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import mimetypes
import os
import re
import resource
import select
import signal
import struct
import time
import warnings
from collections.abc import Callable
from typing import Any

from . import fonts
from .import_hooks import when_imported

# Larger drawings take seconds.
_MAX_DRAWING_BYTES = 4 * 1024 * 1024
# Limits on drawing: seconds, and bytes of memory beyond the session's own.
_TIMEOUT = 5
_MAX_MEMORY = 512 * 1024 * 1024
# Pixels per unit of length.
_PIXELS = {
    None: 1.0,
    "px": 1.0,
    "pt": 4 / 3,
    "pc": 16.0,
    "mm": 96 / 25.4,
    "cm": 96 / 2.54,
    "in": 96.0,
}
# The host would scale a larger image down.
_MAX_SIDE_LENGTH = 1568
# Limit on the `moov` box of an MP4 file.
_MAX_CONTENTS_BYTES = 4 * 1024 * 1024


def install(formatter: Any) -> None:
    """Changes how a shell's display formatter shows objects. Imports nothing."""
    plain, html = formatter.formatters["text/plain"], formatter.formatters["text/html"]
    for module, name, words in (
        ("IPython.lib.display", "Audio", _audio),
        ("IPython.core.display", "Video", _video),
        ("IPython.lib.display", "IFrame", _frame),
    ):
        plain.for_type_by_name(module, name, _printing(words))
        html.for_type_by_name(module, name, _no_output)
    for kind in ("text/latex", "text/html"):
        formatter.formatters[kind].for_type_by_name("IPython.lib.display", "Code", _no_output)
    when_imported("plotly.io._renderers", _show_plotly_figures)


def with_picture(bundle: dict[str, Any]) -> dict[str, Any]:
    """Adds an image to a bundle with a drawing and no image, if the environment can render it."""
    drawing = bundle.get("image/svg+xml")
    if not isinstance(drawing, str) or any(kind in bundle for kind in ("image/png", "image/jpeg")):
        return bundle
    picture = _drawn(drawing)
    return bundle if picture is None else {**bundle, "image/png": picture}


def _no_output(_object: Any) -> None:
    return None


def _printing(words: Callable[[Any], str]) -> Callable[[Any, Any, bool], None]:
    return lambda shown, printer, _cycle: printer.text(words(shown))


def _audio(audio: Any) -> str:
    return _named("Audio", audio, audio.mimetype)


def _video(video: Any) -> str:
    place = video.filename or video.url or ""
    return _named("Video", video, video.mimetype or mimetypes.guess_type(place)[0])


def _frame(frame: Any) -> str:
    return f"{type(frame).__name__}: {frame.src}"


def _named(kind: str, media: Any, mime: str | None) -> str:
    """Returns the type, source, duration and size of a recording."""
    known = [mime or "unknown type"]
    data = media.data.encode() if isinstance(media.data, str) else media.data
    with contextlib.suppress(Exception):  # It is named even if the file is invalid.
        with io.BytesIO(data) if data is not None else open(media.filename, "rb") as file:
            seconds = _seconds(file)
            if seconds is not None:
                known.append(f"{seconds:.1f} s")
            known.append(f"{file.seek(0, os.SEEK_END)} bytes")
    place = media.filename or media.url
    return f"{kind}: {', '.join([*([str(place)] if place else []), *known])}"


def _seconds(file: Any) -> float | None:
    """Returns the duration of a WAV or MP4 file."""
    start = file.read(12)
    file.seek(0)
    if start[:4] == b"RIFF" and start[8:] == b"WAVE":
        import wave

        with wave.open(file) as sound:
            seconds = sound.getnframes() / sound.getframerate()
        return seconds
    if start[4:8] != b"ftyp":
        return None
    while len(header := file.read(8)) == 8:
        size, kind = struct.unpack(">I4s", header)
        if size == 1:
            size = struct.unpack(">Q", file.read(8))[0] - 8
        if kind == b"moov":
            contents = file.read(min(size - 8, _MAX_CONTENTS_BYTES))
            at = contents.index(b"mvhd") + 4
            if contents[at] == 1:
                scale, length = struct.unpack_from(">IQ", contents, at + 20)
            else:
                scale, length = struct.unpack_from(">II", contents, at + 12)
            return float(length) / scale
        if size < 8:
            return None
        file.seek(size - 8, os.SEEK_CUR)
    return None


def _drawn(drawing: str) -> bytes | None:
    """Renders in a child process, because a drawing can exhaust the memory or crash the process
    that renders it.
    """
    size = _size(drawing)
    if (
        size is None
        or len(drawing) > _MAX_DRAWING_BYTES
        or importlib.util.find_spec("resvg_py") is None
    ):
        return None
    width, height = size

    def draw() -> bytes:
        import resvg_py

        families = {"sans_serif_family": "DejaVu Sans", "serif_family": "DejaVu Serif"}
        families |= {"monospace_family": "DejaVu Sans Mono", "font_family": "DejaVu Sans"}
        # Fonts of the environment, so that a drawing looks the same on every machine.
        families |= {"skip_system_fonts": True, "font_dirs": fonts.folders()}
        return bytes(
            resvg_py.svg_to_bytes(
                drawing, background="white", dpi=96.0, width=width, height=height, **families
            )
        )

    try:
        return _in_child(draw)
    except OSError:
        # No process or no descriptor is left. The host reports what it can about the source.
        return None


def _size(drawing: str) -> tuple[int, int] | None:
    """Returns the size at which a drawing is rendered: its own size, scaled down to the limit."""
    start = re.search(r"<svg\b[^>]*>", drawing)
    if start is None:
        return None
    box = re.search(
        r"\bviewBox\s*=\s*[\"']\s*[^\s,]+[\s,]+[^\s,]+[\s,]+([0-9.]+)[\s,]+([0-9.]+)\s*[\"']",
        start[0],
    )
    sides = []
    for number, name in enumerate(("width", "height"), start=1):
        match = re.search(
            rf"\s{name}\s*=\s*[\"']\s*([0-9.]+)(px|pt|pc|mm|cm|in)?\s*[\"']", start[0]
        )
        if match is not None:
            sides.append(float(match[1]) * _PIXELS[match[2]])
        elif box is not None:
            sides.append(float(box[number]))
        else:
            return None
    longest, shortest = max(sides), min(sides)
    # The renderer keeps the proportions, so a line of a million pixels would be rendered as one.
    if not 0 < longest <= 1000 * shortest:
        return None
    scale = min(1.0, _MAX_SIDE_LENGTH / longest)
    return max(1, round(sides[0] * scale)), max(1, round(sides[1] * scale))


def _in_child(work: Callable[[], bytes]) -> bytes | None:
    """Returns the result of `work` in a copy of this process. Returns None if it fails or exceeds
    the time or memory limit.
    """
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        # Newer Pythons warn if there are threads; the child needs none.
        warnings.simplefilter("ignore")
        child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            _limit_child()
            result = work()
            with open(writing, "wb") as pipe:
                pipe.write(b"+" + result)
        os._exit(0)
    os.close(writing)
    parts = []
    try:
        deadline = time.monotonic() + _TIMEOUT
        while select.select([reading], [], [], max(0.0, deadline - time.monotonic()))[0]:
            part = os.read(reading, 1 << 20)
            if not part:
                break
            parts.append(part)
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)
        # User code may have set SIGCHLD so that the kernel reaps children.
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, 0)
    result = b"".join(parts)
    return result[1:] or None


def _limit_child() -> None:
    """Prepares the child: error messages of libraries are not output of the cell, and memory and
    CPU time are limited.
    """
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    with open("/proc/self/statm") as file:
        held = int(file.read().split()[0]) * resource.getpagesize()
    for kind, most in ((resource.RLIMIT_AS, held + _MAX_MEMORY), (resource.RLIMIT_CPU, _TIMEOUT)):
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(kind, (most, most))


def _show_plotly_figures(renderers: Any) -> None:
    """Replaces Plotly's `show`, whose results need a browser. It also displays a cell's value."""
    original = renderers.show

    def show(fig: Any, renderer: str | None = None, validate: bool = True, **options: Any) -> None:
        from IPython.display import display

        from . import plotly_figures

        chosen = set(str(renderer or renderers.renderers.default).split("+"))
        if (
            chosen <= {"png", "jpeg", "jpg", "svg"}
            and importlib.util.find_spec("kaleido") is not None
        ):
            original(fig, renderer, validate, **options)
            return
        for bundle in plotly_figures.bundles(fig):
            display(bundle, raw=True)

    show.__doc__ = original.__doc__
    renderers.show = show
