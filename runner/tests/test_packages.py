"""Packages: folders that the host adds to a live session."""

from __future__ import annotations

import shutil
import tempfile
import unittest
from pathlib import Path

from .harness import Runner
from .test_cells import CellTest


def package(root: Path, name: str, files: dict[str, str]) -> str:
    """Creates a folder like those of the store."""
    folder = root / name
    for file, text in files.items():
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    return str(folder)


class PackageTest(CellTest):
    def setUp(self) -> None:
        self.store = Path(tempfile.mkdtemp(prefix="runner-test-store-"))
        self.addCleanup(shutil.rmtree, self.store)

    def add(self, *paths: str) -> list[str]:
        answer = self.runner.add_packages(*paths)
        self.assertEqual(answer.header["type"], "packages_added", answer.header)
        return list(answer.header["loaded"])

    def evaluate(self, code: str) -> str:
        value = self.run_ok(code).value
        assert value is not None
        return value["text/plain"]


class Adding(PackageTest):
    def test_a_package_is_importable_at_once_and_not_before(self) -> None:
        self.run_failing("import fresh_one", "ModuleNotFoundError")
        self.assertEqual(self.add(package(self.store, "f", {"fresh_one.py": "answer = 42"})), [])
        self.assert_order("import fresh_one\nfresh_one.answer", "value:42")

    def test_the_place_is_behind_the_users_files_and_in_front_of_the_environments_packages(
        self,
    ) -> None:
        one, two = (
            package(self.store, "one", {"x1.py": ""}),
            package(self.store, "two", {"x2.py": ""}),
        )
        self.add(one, two)
        self.run_ok(
            "import sys, os, numpy\n"
            f"place = sys.path.index({one!r})\n"
            f"assert sys.path.index({two!r}) == place + 1\n"
            "assert sys.path[0] == '' and sys.path[1] == os.getcwd() and place > 1\n"
            "assert sys.path.index(os.path.dirname(os.path.dirname(numpy.__file__))) > place\n"
            "assert sys.path.index(os.path.dirname(os.__file__)) < place"
        )

    def test_a_later_folder_comes_first_and_each_is_there_once(self) -> None:
        old, new = (
            package(self.store, "old", {"v.py": "which = 'old'"}),
            package(self.store, "new", {"v.py": "which = 'new'"}),
        )
        self.add(old, old)
        self.add(new)
        lists = "(sys.path, os.environ['PYTHONPATH'].split(':'))"
        listed = (
            "import os, sys\n"
            f"[[each.count(path) for path in ({old!r}, {new!r})] for each in {lists}]"
        )
        self.assert_order(listed, "value:[[1, 1], [1, 1]]")
        self.assert_order("import v\nv.which", "value:'new'")
        self.add(old)  # Adding it again moves it.
        self.assert_order(f"sys.path.index({old!r}) < sys.path.index({new!r})", "value:True")
        self.assert_order(listed, "value:[[1, 1], [1, 1]]")

    def test_a_package_does_not_hide_the_standard_library(self) -> None:
        self.assertEqual(
            self.add(package(self.store, "s", {"colorsys.py": "mine = 1", "json.py": "mine = 1"})),
            [],
        )
        self.assert_order("import colorsys\nhasattr(colorsys, 'mine')", "value:False")

    def test_a_python_that_the_session_starts_finds_them(self) -> None:
        self.add(package(self.store, "c", {"in_child.py": "print('found')"}))
        self.assert_order("import sys\n!{sys.executable} -c 'import in_child'", "out:found\n")

    def test_programs_are_found(self) -> None:
        self.assert_order("!type our_tool >/dev/null 2>&1 || echo none", "out:none\n")
        self.add(
            package(self.store, "p", {"bin/our_tool": "#!/bin/sh\necho it runs\n"}),
            package(self.store, "q", {"y.py": ""}),
        )
        self.assert_order("!our_tool", "out:it runs\n")
        self.assert_order(
            f"import os\n{str(self.store / 'q' / 'bin')!r} in os.environ['PATH']", "value:False"
        )
        self.assert_order("!cat /dev/null && echo others stay", "out:others stay\n")

    def test_a_pth_file_is_not_run(self) -> None:
        folder = package(
            self.store, "h", {"hook.pth": "import sys; sys.pth_was_run = True\n", "z.py": ""}
        )
        self.add(folder)
        self.assert_order("import sys, z\nhasattr(sys, 'pth_was_run')", "value:False")
        self.run_ok(f"import site; site.addsitedir({folder!r})")  # Control.
        self.assert_order("sys.pth_was_run", "value:True")

    def test_nothing_changes_when_a_path_is_no_folder(self) -> None:
        good = package(self.store, "g", {"never.py": ""})
        before = self.evaluate(
            "import sys, os\nsys.path, os.environ.get('PYTHONPATH'), os.environ['PATH']"
        )
        for bad in (
            str(self.store / "missing"),
            "relative",
            "",
            str(Path(good) / "never.py"),
            None,
            7,
        ):
            answer = self.runner.add_packages(good, bad)  # type: ignore[arg-type]
            self.assertEqual(
                (answer.header["type"], answer.header["reason"]), ("failed", "missing"), bad
            )
        self.assertEqual(
            self.evaluate("sys.path, os.environ.get('PYTHONPATH'), os.environ['PATH']"), before
        )
        self.assertEqual(self.add(good), [])  # Control.

    def test_the_request_is_answered_whatever_the_user_made_of_the_path(self) -> None:
        good = package(self.store, "g", {"later.py": ""})
        self.run_ok("import sys\nkept = sys.path\nsys.path = None")
        answer = self.runner.add_packages(good)
        self.assertEqual((answer.header["type"], answer.header["reason"]), ("failed", "other"))
        self.run_ok("sys.path = kept")
        self.run_ok("sys.path.append([]); sys.path.append(None)")
        self.add(good)
        self.run_ok("sys.path[-2:] = []\nimport later")


class Loaded(PackageTest):
    def test_modules_that_were_imported_from_elsewhere_are_named(self) -> None:
        self.add(package(self.store, "v1", {"twice.py": "v = 1", "whole/__init__.py": "v = 1"}))
        self.run_ok("import twice, whole")
        newer = package(
            self.store,
            "v2",
            {"twice.py": "v = 2", "whole/__init__.py": "v = 2", "other.py": "v = 2"},
        )
        self.assertEqual(self.add(newer), ["twice", "whole"])
        self.assert_order("import twice, other\ntwice.v, other.v", "value:(1, 2)")
        self.assert_order("import importlib\nimportlib.reload(twice).v", "value:2")
        self.assertEqual(
            self.add(newer), ["whole"]
        )  # Modules that were imported from there are not reported.

    def test_what_the_environment_has_imported_counts(self) -> None:
        self.run_ok("import numpy")
        self.assertEqual(self.add(package(self.store, "n", {"numpy/__init__.py": ""})), ["numpy"])
        self.run_ok(f"sys = __import__('sys'); sys.path.remove({str(self.store / 'n')!r})")

    def test_what_every_session_begins_with_is_told_apart(self) -> None:
        self.run_ok("import numpy")
        answer = self.runner.add_packages(
            package(self.store, "w", {"IPython/__init__.py": "", "numpy/__init__.py": ""})
        )
        self.assertEqual(answer.header["loaded"], ["IPython", "numpy"])
        self.assertEqual(answer.header["preloaded"], ["IPython"])
        self.run_ok(f"sys = __import__('sys'); sys.path.remove({str(self.store / 'w')!r})")

    def test_a_module_of_the_users_own_stays_first_and_is_not_named(self) -> None:
        self.runner.upload("mine.py", b"v = 'mine'", overwrite=True)
        self.run_ok("import mine")
        self.assertEqual(self.add(package(self.store, "m", {"mine.py": "v = 'theirs'"})), [])

    def test_a_package_spread_over_several_folders_grows(self) -> None:
        self.add(package(self.store, "s1", {"spread/one.py": "v = 1"}))
        self.run_ok("import spread.one")
        self.assertEqual(self.add(package(self.store, "s2", {"spread/two.py": "v = 2"})), [])
        self.assert_order("import spread.two\nspread.one.v, spread.two.v", "value:(1, 2)")


class Copies(unittest.TestCase):
    def setUp(self) -> None:
        self.store = Path(tempfile.mkdtemp(prefix="runner-test-store-"))
        self.addCleanup(shutil.rmtree, self.store)
        self.runner = Runner()
        self.addCleanup(self.runner.close)
        self.folder = package(self.store, "f", {"carried.py": "answer = 42"})

    def test_a_fork_carries_packages_and_imports_them_for_itself(self) -> None:
        self.runner.add_packages(self.folder)
        copy = self.runner.fork()
        self.assertEqual(copy.run("import carried\ncarried.answer").value, {"text/plain": "42"})
        self.assertEqual(
            self.runner.run("import sys\n'carried' in sys.modules").value, {"text/plain": "False"}
        )

    def test_undo_takes_an_installation_back(self) -> None:
        self.runner.respond = lambda question: {"ok": True, "text": "", "paths": [self.folder]}
        copy = self.runner.undo_after("!pip install carried\nimport carried")
        self.assertEqual(self.runner.asked[0]["requirements"], ["carried"])
        self.assertEqual(copy.run("import carried").error["name"], "ModuleNotFoundError")
        copy.add_packages(self.folder)  # Control.
        self.assertEqual(copy.run("import carried\ncarried.answer").value, {"text/plain": "42"})
