"""Values of a tool's result: its blocks, and the reply that holds them all.

A block keeps everything that the server sent about it. Bytes are decoded on first access. Images
are displayed in IPython without any other package.
"""

from __future__ import annotations

import base64
import functools
import json
import os
from typing import Any


class Block:
    """A part of a tool's result. `raw` is everything that the server sent about it."""

    def __init__(self, raw: dict[str, Any]) -> None:
        self.raw = raw

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._about()}>"

    def _about(self) -> str:
        return str(self.raw.get("type"))


class Text(Block):
    """A text."""

    @property
    def text(self) -> str:
        return str(self.raw.get("text", ""))

    def __str__(self) -> str:
        return self.text

    def _about(self) -> str:
        return repr(self.text if len(self.text) <= 60 else self.text[:60] + "…")


class _Media(Block):
    @property
    def mime(self) -> str:
        """The MIME type, such as `image/png`."""
        return str(self.raw.get("mimeType") or "application/octet-stream")

    @functools.cached_property
    def data(self) -> bytes:
        return base64.b64decode(self.raw.get("data") or "")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the bytes to a file."""
        with open(path, "wb") as file:
            file.write(self.data)

    def _about(self) -> str:
        return f"{self.mime}, {len(self.data)} bytes"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        text = (
            self.data.decode("utf-8", "replace")
            if self.mime == "image/svg+xml"
            else str(self.raw.get("data") or "")
        )
        return {"text/plain": repr(self), self.mime: text}


class Image(_Media):
    """An image. It is shown when it is the value of a cell, or with `display`."""


class Audio(_Media):
    """A sound."""


class Resource(Block):
    """A resource that came with the result: `text`, or `data` in bytes."""

    @property
    def uri(self) -> str:
        return str(self._contents.get("uri", ""))

    @property
    def mime(self) -> str | None:
        mime = self._contents.get("mimeType")
        return str(mime) if mime else None

    @property
    def text(self) -> str | None:
        text = self._contents.get("text")
        return str(text) if text is not None else None

    @functools.cached_property
    def data(self) -> bytes:
        blob = self._contents.get("blob")
        return base64.b64decode(blob) if blob is not None else (self.text or "").encode()

    @property
    def _contents(self) -> dict[str, Any]:
        contents = self.raw.get("resource")
        return contents if isinstance(contents, dict) else {}

    def _about(self) -> str:
        return self.uri


class Link(Block):
    """A link to a resource of the server."""

    @property
    def uri(self) -> str:
        return str(self.raw.get("uri", ""))

    @property
    def name(self) -> str:
        return str(self.raw.get("name", ""))

    @property
    def description(self) -> str | None:
        description = self.raw.get("description")
        return str(description) if description else None

    @property
    def mime(self) -> str | None:
        mime = self.raw.get("mimeType")
        return str(mime) if mime else None

    def _about(self) -> str:
        return self.uri


_BLOCKS: dict[Any, type[Block]] = {
    "text": Text,
    "image": Image,
    "audio": Audio,
    "resource": Resource,
    "resource_link": Link,
}


class Reply(str):
    """The complete result of a tool. As a text, it is the texts, one per line.

    `content` holds all parts in order, `structured` the structured value that the server returned,
    or None.
    """

    content: list[Block]
    structured: Any

    def __new__(cls, content: list[Block], structured: Any = None) -> Reply:
        texts = [block.text for block in content if isinstance(block, Text)]
        if not texts and structured is not None:
            texts = [json.dumps(structured, ensure_ascii=False)]
        reply = super().__new__(cls, "\n".join(texts))
        reply.content, reply.structured = content, structured
        return reply

    def __getnewargs__(self) -> tuple[Any, ...]:
        return (self.content, self.structured)

    @property
    def images(self) -> list[Image]:
        return [block for block in self.content if isinstance(block, Image)]

    @property
    def audio(self) -> list[Audio]:
        return [block for block in self.content if isinstance(block, Audio)]

    @property
    def resources(self) -> list[Resource]:
        return [block for block in self.content if isinstance(block, Resource)]

    @property
    def links(self) -> list[Link]:
        return [block for block in self.content if isinstance(block, Link)]

    def _repr_pretty_(self, printer: Any, _cycle: bool) -> None:
        others = [repr(block) for block in self.content if not isinstance(block, Text)]
        printer.text("\n".join([*([repr(str(self))] if self or not others else []), *others]))

    def _ipython_display_(self) -> None:
        """Displays texts and images in their order. A reply without an image is displayed as a
        text.
        """
        if not self.images:
            raise NotImplementedError
        from IPython.display import display

        for block in self.content:
            display(
                {"text/plain": str(block)} if isinstance(block, Text) else block,
                raw=isinstance(block, Text),
            )


def block(raw: dict[str, Any]) -> Block:
    """Returns the block for a part of a server's result. A part of an unknown type becomes a plain
    `Block`.
    """
    return _BLOCKS.get(raw.get("type"), Block)(raw)
