"""Read-only cells: detects cells that certainly leave a session unchanged.

The state before such a cell need not be saved. The decision is made from the cell's text and from
the types of the values that it names, before it runs; when in doubt the answer is no. A cell that
does not compile is read-only too, which is known only at its end.
"""

from __future__ import annotations

import ast
import builtins
import sys
import threading
from typing import Any

from . import loops
from .streams import OutStream

# Longer cells are not analysed.
_MAX_LENGTH = 2000
_PLAIN_TYPES = (int, float, complex, bool, str, bytes, type(None), type(Ellipsis))
# A tuple may be shown if its items may be, down to this depth.
_MAX_DEPTH = 4

# Callbacks of IPython and matplotlib around every cell. Without a figure they do nothing.
_IDLE_CALLBACKS = {
    ("IPython.core.interactiveshell", "_clear_warning_registry"),
    ("matplotlib.pyplot", "_draw_all_if_interactive"),
    ("matplotlib_inline.backend_inline", "flush_figures"),
}

_print = builtins.print


def changes_nothing(code: str, shell: Any) -> bool:
    """Reports whether running this cell can change nothing but the output."""
    if len(code) > _MAX_LENGTH:
        return False
    try:
        module = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    if not all(_is_simple(statement, shell.user_ns) for statement in module.body):
        return False
    last = module.body[-1] if module.body else None
    if (
        isinstance(last, ast.Expr)
        and not isinstance(last.value, ast.Call)
        and not _may_be_shown(last.value, shell)
    ):
        return False
    return runs_alone(shell)


def runs_alone(shell: Any) -> bool:
    """Reports whether nothing runs besides the code of a cell: no thread, task, hook or
    transformation.
    """
    if threading._active.keys() - {threading.main_thread().ident}:  # type: ignore[attr-defined]
        return False
    if loops.has_work(shell.loop):
        return False
    if shell.ast_transformers or shell.ast_node_interactivity != "last_expr":
        return False
    return all(
        _does_nothing(callback)
        for callbacks in shell.events.callbacks.values()
        for callback in callbacks
    )


def _does_nothing(callback: Any) -> bool:
    """Reports whether a callback that IPython runs around every cell currently changes nothing."""
    if (
        getattr(callback, "__module__", None),
        getattr(callback, "__name__", None),
    ) not in _IDLE_CALLBACKS:
        return False
    helpers = sys.modules.get("matplotlib._pylab_helpers")
    return helpers is None or not helpers.Gcf.figs


def _is_simple(statement: ast.stmt, names: dict[str, Any]) -> bool:
    if isinstance(statement, ast.Pass):
        return True
    if not isinstance(statement, ast.Expr):
        return False
    value = statement.value
    if not isinstance(value, ast.Call):
        return _is_plain(value)
    is_print = (
        isinstance(value.func, ast.Name) and value.func.id == "print" and "print" not in names
    )
    is_ours = getattr(builtins, "print", None) is _print and type(sys.stdout) is OutStream
    if not is_print or not is_ours or value.keywords:
        return False
    return all(_is_plain(part) and _has_plain_value(part, names) for part in value.args)


def _is_plain(node: ast.expr) -> bool:
    """Reports whether evaluating an expression runs no custom code."""
    if isinstance(node, ast.Tuple):
        return all(_is_plain(part) for part in node.elts)
    if isinstance(node, ast.UnaryOp):
        is_number = isinstance(node.operand, ast.Constant) and type(node.operand.value) in (
            int,
            float,
            complex,
        )
        return is_number and isinstance(node.op, (ast.USub, ast.UAdd))
    return isinstance(node, (ast.Constant, ast.Name))


def _has_plain_value(node: ast.expr, names: dict[str, Any]) -> bool:
    """Reports whether converting the value of a plain expression to text runs no custom code."""
    if isinstance(node, ast.Tuple):
        return all(_has_plain_value(part, names) for part in node.elts)
    if isinstance(node, ast.Name):
        return node.id in names and _is_plain_value(names[node.id], _MAX_DEPTH)
    return True


def _is_plain_value(value: Any, depth: int) -> bool:
    if type(value) in (tuple, frozenset):
        return (
            depth > 0
            and len(value) <= 100
            and all(_is_plain_value(part, depth - 1) for part in value)
        )
    return type(value) in _PLAIN_TYPES


def _may_be_shown(node: ast.expr, shell: Any) -> bool:
    """Reports whether showing the value of the last expression runs no custom code. A registered
    formatter is custom code.
    """
    if not _has_plain_value(node, shell.user_ns):
        return False
    formatters = shell.display_formatter.formatters
    return all(
        kind not in formatter.type_printers
        for mime, formatter in formatters.items()
        if mime != "text/plain"
        for kind in (*_PLAIN_TYPES, tuple, frozenset, object)
    )
