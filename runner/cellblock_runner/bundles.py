"""Bundles: IPython's displays, prepared for a frame.

IPython describes one output as a mapping from MIME type to data, where data is text, bytes, base64
text or a structure. A frame carries text in its header and bytes in its payload. All
representations are sent; the host chooses.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from typing import Any

from .frames import encode_header

# Limit on the parts of one output together. Leaves room in a frame of 32 MiB for the rest.
MAX_BUNDLE_BYTES = 24 * 1024 * 1024
# The part that is kept of a text/plain that is itself too large.
_KEPT_TEXT = 4 * 1024 * 1024

_TEXT_LIKE = ("image/svg+xml", "application/javascript", "application/json", "application/xml")


def pack(bundle: Mapping[Any, Any]) -> tuple[dict[str, str], list[dict[str, Any]], bytes]:
    """Returns `data`, `blobs` and the payload for one output. Never raises because of the bundle's
    content.
    """
    texts: dict[str, str] = {}
    binaries: dict[str, bytes] = {}
    for mime, value in bundle.items():
        if not isinstance(mime, str) or value is None:
            continue
        part = _part(mime, value)
        if isinstance(part, bytes):
            binaries[mime] = part
        else:
            texts[mime] = part
    _fit(texts, binaries)
    blobs = [{"mime": mime, "size": len(data)} for mime, data in binaries.items()]
    return texts, blobs, b"".join(binaries.values())


def _part(mime: str, value: Any) -> str | bytes:
    if isinstance(value, (bytes, bytearray, memoryview)):
        data = bytes(value)
        return data.decode("utf-8", "replace") if _is_text(mime) else data
    if isinstance(value, str):
        if _is_text(mime):
            return value
        try:
            return base64.b64decode("".join(value.split()), validate=True)
        except (binascii.Error, ValueError):
            return value
    try:
        return json.dumps(value, ensure_ascii=False, default=str)
    except Exception:
        return f"<{type(value).__name__} that is not JSON>"


def _is_text(mime: str) -> bool:
    if mime.startswith("text/") or mime.endswith(("+json", "+xml")) or mime in _TEXT_LIKE:
        return True
    return not mime.startswith(("image/", "audio/", "video/")) and mime != "application/pdf"


def _fit(texts: dict[str, str], binaries: dict[str, bytes]) -> None:
    """Drops the largest parts until the rest fits, and notes that in text/plain."""
    if sum(map(len, texts.values())) * 6 + sum(map(len, binaries.values())) <= MAX_BUNDLE_BYTES:
        return  # One character takes at most six bytes in JSON.
    sizes = {mime: len(encode_header({"": text})) for mime, text in texts.items()}
    sizes.update((mime, len(data)) for mime, data in binaries.items())
    notes = []
    while sum(sizes.values()) > MAX_BUNDLE_BYTES:
        mime = max(sizes, key=sizes.__getitem__)
        size = sizes.pop(mime)
        if mime == "text/plain":
            texts[mime] = texts[mime][: _KEPT_TEXT // 6]
            notes.append(f"[the text was cut: {size} bytes are too large to send]")
        else:
            texts.pop(mime, None)
            binaries.pop(mime, None)
            notes.append(f"[{mime} was left out: {size} bytes are too large to send]")
    if notes:
        texts["text/plain"] = "\n".join([texts.get("text/plain", ""), *notes]).lstrip("\n")
