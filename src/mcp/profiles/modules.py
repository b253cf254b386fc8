"""Which modules a cell imports, and whether it may. Runs in the sandbox, before the cell, on the text of the cell.

`request` holds the text, the lists and the word that begins the answer. The answer is one line on descriptor 1, because
earlier cells may have put something else in the place of `sys.stdout`.

This is advice to whoever wrote the code, not a wall: code that wants to import something finds a way, and then stands before
the sandbox like any other.
"""

import ast
import importlib.util
import json
import os

IMPORTERS = ("__import__", "import_module")


def parse(code):
    """Returns the tree of a cell, or nothing when it is no Python; the cell itself will say so."""
    for text in (code, transformed(code)):
        try:
            return ast.parse(text)
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            pass
    return None


def transformed(code):
    """Returns the cell as plain Python: magics and shell commands become calls."""
    try:
        from IPython.core.inputtransformer2 import TransformerManager

        return TransformerManager().transform_cell(code)
    except Exception:
        return code


def called(node):
    """Returns the last name of what a call calls."""
    function = node.func
    return function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")


def wanted(tree):
    """Yields the top-level modules that a cell names in imports, and how each was written."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.module
        elif isinstance(node, ast.Call) and called(node) in IMPORTERS and node.args:
            first = node.args[0]
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield first.value


def brought_along(module):
    """Tells whether a module was installed into this session, or is a file of its own folder."""
    try:
        spec = importlib.util.find_spec(module)
    except Exception:
        return False
    places = list(spec.submodule_search_locations or []) if spec else []
    places += [spec.origin] if spec and spec.origin else []
    homes = (request["packages"].rstrip("/") + "/", os.getcwd().rstrip("/") + "/")
    return any(str(place).startswith(homes) for place in places)


def problem(tree):
    """Returns what is wrong with a cell and the name of it, or nothing."""
    allowed, blocked = request["allowed"], request["blocked"]
    for name in wanted(tree):
        module = name.partition(".")[0]
        if module in blocked or name in blocked:
            return ["blocked", module]
        if allowed and module not in allowed and name not in allowed and not brought_along(module):
            return ["not listed", module]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in request["calls"]:
            return ["call", node.func.id]
        if isinstance(node, ast.Name) and node.id == "get_ipython" and ("subprocess" in blocked or allowed):
            return ["command", ""]
    return None


tree = parse(request["code"])
answer = json.dumps(problem(tree) if tree is not None else None)
os.write(1, f"\n{request['word']}{answer}\n".encode())
