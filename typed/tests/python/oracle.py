"""What Python says about generated packages. One request per line on standard input, one answer per
line: a list of problems.

    parse   the source is what it should be, as a tree: only expected nodes, names and calls. Needs nothing but Python.
    load    every module imports and every model builds. Needs Pydantic, like all below.
    row     a tool takes what it should, refuses what it should, sends and returns what it should
    facts   names that Python and Pydantic use for themselves

The first argument is the folder of the runner, whose own code is under the generated modules; only the host is played.
"""

from __future__ import annotations

import ast
import asyncio
import builtins
import importlib
import json
import keyword
import pathlib
import sys
import tempfile
import unicodedata
import warnings
from typing import Any

_NODES = {
    "AnnAssign", "Assign", "AsyncFunctionDef", "Attribute", "Await", "BinOp", "BitOr", "Call", "ClassDef", "Constant", "Dict", "Expr",
    "FunctionDef", "If", "ImportFrom", "Import", "Lambda", "List", "Load", "Module", "Name", "Return", "Store", "Subscript", "Tuple", "USub",
    "UnaryOp", "alias", "arg", "arguments", "keyword",
}
_MODULES = {"__future__", "cellblock_runner.mcptools", "datetime", "pydantic", "typing", "uuid"}
_CALLED = {"Field", "OneOf", "Pattern", "_modules_when_used", "call", "call_async"}
_KNOWN = {"None", "__name__", "bool", "bytes", "dict", "float", "int", "list", "str", "tuple"}


def main() -> None:
    sys.path.insert(0, sys.argv[1])
    sys.dont_write_bytecode = True
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = _ANSWERS[request.pop("do")](**request)
        except Exception as error:
            answer = [f"{type(error).__name__}: {error}"]
        print(json.dumps(answer), flush=True)


def parse(files: dict[str, str]) -> list[str]:
    return [f"{path}: {problem}" for path, text in files.items() for problem in _problems(text)]


def _problems(text: str) -> list[str]:
    tree = ast.parse(text)
    compile(text, "generated", "exec")
    nodes = list(ast.walk(tree))
    problems = [f"unexpected {type(node).__name__}" for node in nodes if type(node).__name__ not in _NODES]
    defined = set(_KNOWN)
    for node in nodes:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            home = node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
            is_own = isinstance(node, ast.ImportFrom) and node.level == 1 and home is None
            if home not in _MODULES and not is_own:
                problems.append(f"imports {home}")
            defined |= {each.asname or each.name for each in node.names}
        elif isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            defined.add(node.name)
            if node.decorator_list:
                problems.append("a decorator")
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            defined.add(node.id)
    top_level = {"ClassDef", "FunctionDef", "AsyncFunctionDef", "ImportFrom", "Import", "Assign", "Expr", "If"}
    problems += [f"{type(node).__name__} at the top" for node in tree.body if type(node).__name__ not in top_level]
    problems += ["an expression at the top" for node in tree.body[1:] if isinstance(node, ast.Expr)]
    for node in nodes:
        if isinstance(node, ast.Name) and node.id not in defined:
            problems.append(f"uses {node.id}")
        if isinstance(node, ast.Call) and not _is_expected(node.func):
            problems.append(f"calls {ast.unparse(node.func)}")
        if isinstance(node, ast.Attribute) and ast.unparse(node) != "dt.date" and node.attr != "model_validate":
            problems.append(f"uses {ast.unparse(node)}")
        if isinstance(node, ast.If) and ast.unparse(node.test) != "TYPE_CHECKING":
            problems.append("decides something")
        if isinstance(node, ast.Lambda) and not (isinstance(node.body, ast.Call) and isinstance(node.body.func, ast.Attribute)):
            problems.append("a lambda")
        if isinstance(node, ast.Expr) and not (isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)):
            problems.append("an expression")
    for name in defined:
        if not name.isascii() or unicodedata.normalize("NFKC", name) != name or keyword.iskeyword(name) and name != "None":
            problems.append(f"the name {name!r}")
    for line in text.split("\n"):
        if any(unicodedata.category(each) in ("Cc", "Cf", "Zl", "Zp") for each in line):
            problems.append(f"something invisible in {line!r}")
    return problems


def _is_expected(function: ast.expr) -> bool:
    if isinstance(function, ast.Attribute):
        return function.attr == "model_validate" and isinstance(function.value, ast.Name)
    return isinstance(function, ast.Name) and function.id in _CALLED


class _Written:
    """A package in a folder of its own, importable."""

    def __init__(self, files: dict[str, str]) -> None:
        self._folder = tempfile.TemporaryDirectory()
        root = pathlib.Path(self._folder.name)
        for path, text in files.items():
            target = root / path
            assert root in target.resolve().parents
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, "utf-8")

    def __enter__(self) -> None:
        sys.path.insert(0, self._folder.name)
        _forget()

    def __exit__(self, *_: object) -> None:
        sys.path.remove(self._folder.name)
        _forget()
        self._folder.cleanup()


def _forget() -> None:
    for name in [name for name in sys.modules if name == "mcptools" or name.startswith("mcptools.")]:
        del sys.modules[name]
    importlib.invalidate_caches()


def load(files: dict[str, str]) -> list[str]:
    standard = {name: module for name, module in sys.modules.items() if name in sys.stdlib_module_names}
    problems = []
    with _Written(files), warnings.catch_warnings():
        warnings.simplefilter("error")
        for path in files:
            name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            try:
                module = importlib.import_module(name)
                for model in _models(module):
                    model.model_rebuild(force=True)
                    model.model_json_schema()
                    assert model.__doc__ is None or isinstance(model.__doc__, str)
            except Exception as error:
                problems.append(f"{name}: {type(error).__name__}: {error}")
    if any(sys.modules.get(name) is not module for name, module in standard.items()):
        problems.append("a module of the standard library was replaced")
    return problems


def _models(module: Any) -> list[Any]:
    from pydantic import BaseModel

    own = [each for each in vars(module).values() if isinstance(each, type) and issubclass(each, BaseModel)]
    return [each for each in own if each.__module__ == module.__name__]


class _Host:
    """Answers like a host: notes what is asked and returns what was prepared."""

    def __init__(self, structured: Any) -> None:
        self.asked: dict[str, Any] = {}
        self._structured = structured

    def ask(self, what: str, members: dict[str, Any]) -> dict[str, Any]:
        assert what == "call_tool"
        self.asked = members
        return {"ok": True, "content": [], "structured": self._structured, "is_error": False}

    async def ask_async(self, what: str, members: dict[str, Any]) -> dict[str, Any]:
        return self.ask(what, members)


def row(files: dict[str, str], module: str, tool: str, row: dict[str, Any]) -> list[str]:
    with _Written(files):
        imported = importlib.import_module(module)
        return [*_takes(imported, tool, row), *_returns(imported, row)]


def _takes(module: Any, tool: str, row: dict[str, Any]) -> list[str]:
    problems = [f"has no class {name}" for name in row.get("classes", []) if not hasattr(module, name)]
    for case in row["accepts"]:
        try:
            params = _made(module, case)
            sent = _sent(module, tool, params)
            if sent != case["sends"] or json.dumps(sent, sort_keys=True) != json.dumps(case["sends"], sort_keys=True):
                problems.append(f"{case} sends {sent}")
            problems += [f"{case}: {path} is {_at(params, path)!r}" for path, value in case.get("has", {}).items() if _at(params, path) != value]
            described = module.Params.model_json_schema()["properties"] if "schema" in case else {}
            for name, facts in case.get("schema", {}).items():
                problems += [f"{name} has no {fact}" for fact, value in facts.items() if described[name].get(fact) != value]
        except Exception as error:
            problems.append(f"{case}: {type(error).__name__}: {error}")
    for values in row["refuses"]:
        try:
            _made(module, values if "root" in values else {"set": values})
        except ValueError:
            continue
        problems.append(f"{values} is taken")
    return problems


def _made(module: Any, case: dict[str, Any]) -> Any:
    if "root" in case:
        return module.Params(case["root"])
    if "bytes" in case:
        return module.Params(**{name: value.encode() for name, value in case["bytes"].items()})
    return module.Params(**case["set"])


def _sent(module: Any, tool: str, params: Any) -> Any:
    """Returns the arguments that reach the host, by either way of calling."""
    from cellblock_runner import host_calls

    host = host_calls._active = _Host({})  # type: ignore[assignment]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # What it returns here does not fit, and does not matter.
        module.run(params)
        sent = host.asked
        asyncio.run(module.run_async(params))
    assert host.asked == sent and sent["tool"] == tool and sent["server"] == "rows"
    return sent["arguments"]


def _returns(module: Any, row: dict[str, Any]) -> list[str]:
    from cellblock_runner import host_calls

    problems = []
    for case in row.get("returns", []):
        host_calls._active = _Host(case["structured"])  # type: ignore[assignment]
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            result = module.run(_made(module, row["accepts"][0]))
        if bool(warned) != case.get("warns", False):
            problems.append(f"{case}: warned {[str(each.message) for each in warned]}")
        problems += [f"{case}: {path} is {_at(result, path)!r}" for path, value in case["has"].items() if _at(result, path) != value]
    return problems


def _at(value: Any, path: str) -> Any:
    for part in path.split("."):
        value = value[int(part)] if part.isdecimal() else getattr(value, part)
    return value


def facts() -> dict[str, list[str]]:
    from cellblock_runner.mcptools import Model

    classes = [name for name, each in vars(builtins).items() if name[0].isupper() and name not in keyword.kwlist]
    return {"model": [name for name in dir(Model) if not name.startswith("_")], "keywords": [*keyword.kwlist, *keyword.softkwlist], "builtins": classes}


_ANSWERS: dict[str, Any] = {"parse": parse, "load": load, "row": row, "facts": facts}


if __name__ == "__main__":
    main()
