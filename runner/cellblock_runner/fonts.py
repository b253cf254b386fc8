"""Fonts for characters that matplotlib's own fonts lack: Chinese, Japanese, Korean, emoji.

The CJK font is in an optional package of the environment; nothing is imported to find out. Emoji
are in a font beside this file (`noto_emoji.ttf`: Noto Emoji without the parts that only browsers
use). These fonts come after any font that a text asks for, so that a style or `rcParams` cannot
lose them.
"""

from __future__ import annotations

import importlib.util
import os
from types import ModuleType
from typing import Any

from .import_hooks import when_imported

# The fonts, by package and path inside it.
_FALLBACKS = (
    ("notojp_matplotlib", "fonts/NotoSansCJKjp-Regular.otf"),
    ("cellblock_runner", "noto_emoji.ttf"),
)
_OF_MATPLOTLIB = ("matplotlib", "mpl-data/fonts/ttf")


def install() -> None:
    """Makes matplotlib use the fonts, as soon as it is imported."""
    when_imported("matplotlib.font_manager", _add_fallbacks)


def folders() -> list[str]:
    """Returns the folders with fonts of the environment."""
    found = [path for path in map(_inside, (_OF_MATPLOTLIB, *_FALLBACKS)) if path is not None]
    return [path if os.path.isdir(path) else os.path.dirname(path) for path in found]


def _inside(place: tuple[str, str]) -> str | None:
    """Returns the path of a package's file or folder, without importing the package."""
    package, name = place
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = os.path.join(folder, name)
        if os.path.exists(path):
            return path
    return None


def _add_fallbacks(manager: ModuleType) -> None:
    paths = [path for path in map(_inside, _FALLBACKS) if path is not None]
    find = getattr(manager.FontManager, "_find_fonts_by_props", None)
    if not paths or find is None:  # Matplotlib before 3.6 uses a single font for a text.
        return
    for path in paths:
        manager.fontManager.addfont(path)

    def find_with_fallbacks(self: Any, *arguments: Any, **options: Any) -> list[str]:
        found = find(self, *arguments, **options)
        return [*found, *(path for path in paths if path not in found)]

    manager.FontManager._find_fonts_by_props = find_with_fallbacks
