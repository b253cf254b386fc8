"""Imports: checks which modules a cell imports, and whether they are permitted.

Servers that have lists of modules run `check` before a cell, on the text of the cell. Its answer is
one line on descriptor 1, because earlier cells may have replaced `sys.stdout`.

This is advice to the author of the code, not a security boundary: code can bypass it, and is then
confined by the sandbox like any other.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
import os
import re
import sys
import warnings
from collections.abc import Iterator
from typing import Any

_IMPORTERS = ("__import__", "import_module")
# The kind of problem that an answer reports, and the name concerned.
Problem = tuple[str, str]


def check(request: str) -> None:
    """Prints the problem of a cell, or null. `request` is JSON: the text, the lists, and the word
    that begins the answer.
    """
    wanted = json.loads(request)
    tree = _parse(wanted["code"])
    answer = json.dumps(problem(tree, wanted) if tree is not None else None)
    os.write(1, f"\n{wanted['word']}{answer}\n".encode())


def problem(tree: ast.AST, request: dict[str, Any]) -> Problem | None:
    """Returns the problem of a cell, or None."""
    allowed, blocked = request["allowed"], request["blocked"]
    for name in _imported(tree):
        module = name.partition(".")[0]
        if module in blocked or name in blocked:
            if not (request["requested_wins"] and _requested(module, request["requested"])):
                return "blocked", module
        elif allowed and module not in allowed and name not in allowed:
            if not (
                _is_in_session(module, request["packages"])
                or _requested(module, request["requested"])
            ):
                return "not listed", module
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in request["calls"]
        ):
            return "call", node.func.id
        # Magics and shell commands become this.
        if (
            isinstance(node, ast.Name)
            and node.id == "get_ipython"
            and ("subprocess" in blocked or allowed)
        ):
            return "command", ""
    return None


def _parse(code: str) -> ast.AST | None:
    """Returns the tree of a cell, or None if it is not valid Python; the cell then reports it."""
    for transform in (str, _as_python):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return ast.parse(transform(code))
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            pass
    return None


def _as_python(code: str) -> str:
    """Returns a cell as plain Python: magics and shell commands become calls."""
    from IPython.core.inputtransformer2 import TransformerManager

    return TransformerManager().transform_cell(code)


def _imported(tree: ast.AST) -> Iterator[str]:
    """Yields the modules that a cell names in imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.module
        elif isinstance(node, ast.Call) and node.args and _last_name(node.func) in _IMPORTERS:
            first = node.args[0]
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield first.value


def _last_name(function: ast.expr) -> str:
    return function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")


def _is_in_session(module: str, packages: str) -> bool:
    """Reports whether a module was installed into this session, or is a file of its own folder."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError, AttributeError):
        return False
    if spec is None:
        return False
    places = [*(spec.submodule_search_locations or []), spec.origin or ""]
    homes = tuple(f"{home.rstrip('/')}/" for home in (packages, os.getcwd()))
    return any(place.startswith(homes) for place in places)


def _requested(module: str, requirements: list[str]) -> bool:
    """Reports whether a module belongs to a distribution that was requested by name. Modules of
    Python itself never do.
    """
    if module in sys.stdlib_module_names:
        return False
    names = (
        re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*", requirement.strip()) for requirement in requirements
    )
    return any(module in _modules_of(name.group()) for name in names if name)


def _modules_of(distribution: str) -> set[str]:
    """Returns the top-level modules of a distribution, or none if it is not installed."""
    try:
        found = importlib.metadata.distribution(distribution)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return set()
    named = set((found.read_text("top_level.txt") or "").split())
    files = (file.parts for file in found.files or ())
    return named or {
        parts[0] if len(parts) > 1 else parts[0].partition(".")[0] for parts in files if parts
    }
