"""Imports: which modules a cell imports, and whether they are permitted."""

from __future__ import annotations

import ast
import json
import os
import sys
import tempfile
import unittest
from contextlib import contextmanager
from typing import Any, Iterator

from cellblock_runner import imports


@contextmanager
def descriptor_1() -> Iterator[Any]:
    """Captures descriptor 1."""
    with tempfile.TemporaryFile() as file:
        kept = os.dup(1)
        sys.stdout.flush()
        os.dup2(file.fileno(), 1)
        try:
            yield file
        finally:
            os.dup2(kept, 1)
            os.close(kept)


def request(code: str, **lists: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {
        "allowed": [],
        "blocked": [],
        "calls": [],
        "packages": "/packages",
        "word": "word",
    }
    asked: dict[str, Any] = {"requested": [], "requested_wins": False}
    return {**usual, **asked, **lists, "code": code}


def problem(code: str, **lists: Any) -> Any:
    return imports.problem(ast.parse(code), request(code, **lists))


class Imports(unittest.TestCase):
    def test_every_way_to_write_an_import_is_seen(self) -> None:
        for code in (
            "import os",
            "import math, os",
            "import os.path as p",
            "from os import path",
            "from os.path import join",
            "def f():\n    if True:\n        import os",
            "__import__('os').system('ls')",
            "importlib.import_module('os.path')",
        ):
            self.assertEqual(problem(code, blocked=["os"]), ("blocked", "os"), code)

    def test_what_only_looks_like_an_import_is_left_alone(self) -> None:
        for code in (
            "# import os",
            "'import os'",
            "pathos.y",
            "os.system('x')",
            "from . import os",
            "imported = os",
            "__import__(name)",
        ):
            self.assertIsNone(problem(code, blocked=["os"]), code)

    def test_with_a_list_of_allowed_ones_others_are_refused(self) -> None:
        self.assertIsNone(problem("import math, os.path", allowed=["math", "os.path"]))
        self.assertEqual(problem("import math, json", allowed=["math"]), ("not listed", "json"))
        self.assertEqual(
            problem("import no_such_module", allowed=["math"]), ("not listed", "no_such_module")
        )

    def test_a_blocked_module_is_refused_although_it_is_allowed(self) -> None:
        self.assertEqual(
            problem("import math", allowed=["math"], blocked=["math"]), ("blocked", "math")
        )

    def test_what_was_installed_or_lies_in_the_folder_need_not_be_listed(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            folder = os.path.realpath(folder)
            open(os.path.join(folder, "brought_along.py"), "w").close()
            sys.path.insert(0, folder)
            try:
                self.assertIsNone(
                    problem("import brought_along", allowed=["math"], packages=folder)
                )
                self.assertEqual(
                    problem("import brought_along", allowed=["math"]),
                    ("not listed", "brought_along"),
                )
                blocked = problem(
                    "import brought_along", blocked=["brought_along"], packages=folder
                )
                self.assertEqual(blocked, ("blocked", "brought_along"))
            finally:
                sys.path.remove(folder)

    def test_what_was_asked_for_and_is_there_already_need_not_be_listed(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            info = os.path.join(folder, "Some_Dist-1.0.dist-info")
            os.makedirs(info)
            os.makedirs(os.path.join(folder, "some_module"))
            with open(os.path.join(info, "METADATA"), "w") as file:
                file.write("Metadata-Version: 2.1\nName: Some.Dist\nVersion: 1.0\n")
            with open(os.path.join(info, "RECORD"), "w") as file:
                file.write(
                    "some_module/__init__.py,,\none_file.py,,\nos/__init__.py,,\n"
                    "Some_Dist-1.0.dist-info/METADATA,,\n"
                )
            sys.path.insert(0, folder)
            try:
                for module in ("some_module", "some_module.inner", "one_file"):
                    code = f"import {module}"
                    top = module.partition(".")[0]
                    asked = {"requested": ["other", "some-dist[extra]>=1"]}
                    self.assertIsNone(problem(code, allowed=["math"], **asked), module)
                    self.assertEqual(problem(code, allowed=["math"]), ("not listed", top))
                    self.assertEqual(
                        problem(code, blocked=[top], **asked),
                        ("blocked", top),
                        "a list of names to block is stronger",
                    )
                    self.assertIsNone(problem(code, blocked=[top], requested_wins=True, **asked))
                    self.assertEqual(
                        problem(code, blocked=[top], requested_wins=True), ("blocked", top)
                    )
                wins = {"requested": ["some-dist"], "requested_wins": True}
                self.assertEqual(
                    problem("import os", blocked=["os"], **wins),
                    ("blocked", "os"),
                    "a module of Python is nobody's",
                )
            finally:
                sys.path.remove(folder)

    def test_calls_are_refused_by_name_and_methods_are_not(self) -> None:
        self.assertEqual(problem("x = eval('1')", calls=["eval"]), ("call", "eval"))
        self.assertIsNone(problem("model.eval()", calls=["eval"]))

    def test_magics_and_commands_are_refused_where_programs_are(self) -> None:
        def answer(code: str, **lists: Any) -> Any:
            with descriptor_1() as file:
                imports.check(json.dumps(request(code, **lists)))
                file.seek(0)
                (line,) = [line for line in file.read().decode().splitlines() if line]
            self.assertTrue(line.startswith("word"))
            return json.loads(line[len("word") :])

        self.assertEqual(answer("!ls", blocked=["subprocess"]), ["command", ""])
        self.assertEqual(answer("%%bash\nls", allowed=["math"]), ["command", ""])
        self.assertIsNone(answer("!ls", blocked=["os"]))
        self.assertIsNone(
            answer("def f(:", blocked=["os"]), "the cell itself says what is wrong with it"
        )
        self.assertEqual(answer("await x\nimport os", blocked=["os"]), ["blocked", "os"])


if __name__ == "__main__":
    unittest.main()
