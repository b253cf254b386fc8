"""Packages of MCP servers as files: delivered, changed and removed, without touching files of the
user.
"""

from __future__ import annotations

import os
import unittest
from pathlib import Path

from .harness import Runner
from .merger import Frame

_LAZY = """
from cellblock_runner.tool_modules import modules_when_used as _modules_when_used

__getattr__, __dir__ = _modules_when_used(__name__, {names!r})
"""

Files = dict[str, str]


def package(**modules: str) -> Files:
    """Returns the files of a server, one per module, and its index."""
    return {
        **{f"{name}.py": text for name, text in modules.items()},
        "__init__.py": _LAZY.format(names=sorted(modules)),
    }


class FilesTest(unittest.TestCase):
    def setUp(self) -> None:
        self.runner = Runner()
        self.addCleanup(self.runner.close)
        self.folder = Path(self.runner.workdir) / "mcptools"

    def deliver(self, servers: dict[str, Files], shared: bool = False) -> Frame:
        index = _LAZY.format(names=sorted(servers)) if servers else ""
        members = {} if shared else {"servers": sorted(servers)}
        return self.runner.deliver(servers, index, **members)

    def delivered(self, servers: dict[str, Files], shared: bool = False) -> None:
        answer = self.deliver(servers, shared)
        self.assertEqual(answer.header["type"], "tools_written", answer.header)

    def listed(self) -> list[str]:
        found = (
            path
            for path in self.folder.rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        )
        return sorted(str(path.relative_to(self.folder)) for path in found)

    def stamps(self) -> dict[str, int]:
        return {name: os.stat(self.folder / name).st_ino for name in self.listed()}

    def value(self, code: str) -> str:
        result = self.runner.run(code)
        self.assertIsNone(result.error)
        assert result.value is not None
        return result.value["text/plain"]


class Delivery(FilesTest):
    def test_modules_are_importable_and_no_work_of_a_cell(self) -> None:
        self.delivered({"git": package(log="x = 1", diff="x = 2")})
        result = self.runner.run(
            "from mcptools.git import log\nimport mcptools\n(log.x, mcptools.git.diff.x)"
        )
        self.assertEqual(result.value, {"text/plain": "(1, 2)"})
        self.assertEqual(
            result.done["files"], {"created": [], "changed": [], "deleted": [], "omitted": 0}
        )
        listing = self.runner.request({"type": "list_files", "id": 99, "limit": 10})[-1]
        self.assertEqual(listing.header["entries"], [])

    def test_a_changed_module_is_imported_anew_and_a_removed_one_is_gone(self) -> None:
        self.delivered({"git": package(log="x = 1", diff="x = 2")})
        self.assertEqual(self.value("from mcptools.git import log, diff\nlog.x"), "1")
        self.delivered({"git": package(log="x = 7")})
        self.assertEqual(self.value("from mcptools.git import log\nlog.x"), "7")
        failed = self.runner.run("from mcptools.git import diff")
        self.assertEqual(failed.error["name"], "ImportError")
        self.assertEqual(
            self.listed(),
            [".generated", "__init__.py", "git/.generated", "git/__init__.py", "git/log.py"],
        )

    def test_what_is_there_is_not_written_again(self) -> None:
        servers = {"git": package(log="x = 1"), "time": package(now="x = 2")}
        self.delivered(servers)
        before = self.stamps()
        self.delivered(servers)
        self.assertEqual(self.stamps(), before)
        self.delivered({**servers, "time": package(now="x = 3")})
        changed = {name for name, stamp in self.stamps().items() if before[name] != stamp}
        self.assertEqual(changed, {"time/now.py", "time/__init__.py", "time/.generated"})

    def test_files_may_come_in_many_frames(self) -> None:
        modules = {f"tool_{number}": f"x = {number}" for number in range(40)}
        self.runner.files_in_a_frame = 3
        self.delivered({"git": package(**modules)})
        self.assertEqual(self.value("from mcptools.git import tool_39\ntool_39.x"), "39")
        self.delivered({"git": package(**{"tool_7": "x = 'seven'"})})
        self.assertEqual(self.value("from mcptools.git import tool_7\ntool_7.x"), "'seven'")
        self.assertEqual(len(self.listed()), 5)

    def test_a_fork_has_the_packages(self) -> None:
        self.delivered({"git": package(log="x = 1")})
        fork = self.runner.fork()
        self.assertEqual(fork.run("from mcptools.git import log\nlog.x").value, {"text/plain": "1"})


class Removal(FilesTest):
    def test_the_last_server_takes_everything_with_it(self) -> None:
        self.delivered({"git": package(log="x = 1")})
        self.assertEqual(self.value("from mcptools.git import log\nlog.x"), "1")
        self.delivered({})
        self.assertFalse(self.folder.exists())
        self.assertEqual(
            self.runner.run("import mcptools.git.log").error["name"], "ModuleNotFoundError"
        )

    def test_files_of_the_user_stay_and_so_do_changed_ones(self) -> None:
        self.delivered({"git": package(log="x = 1", diff="x = 2"), "time": package(now="x = 3")})
        mine = {
            "git/mine.py": "mine",
            "git/sub/deep.py": "mine",
            "own/__init__.py": "mine",
            "notes.txt": "mine",
        }
        for name, text in {**mine, "git/diff.py": "improved"}.items():
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / name).write_text(text)
        saved = Path(self.runner.workdir) / "gentools" / "report" / "api.py"
        saved.parent.mkdir(parents=True)
        saved.write_text("saved")
        self.delivered({})
        self.assertEqual(self.listed(), sorted([*mine, "git/diff.py"]))
        self.assertEqual(saved.read_text(), "saved")

    def test_packages_of_other_sessions_stay_in_a_shared_folder(self) -> None:
        self.delivered({"git": package(log="x = 1")}, shared=True)
        self.delivered({"time": package(now="x = 1")}, shared=True)
        self.assertIn("git/log.py", self.listed())
        self.runner.deliver(
            {"time": {}}, _LAZY.format(names=["git"])
        )  # Named without files: removed.
        self.assertEqual(
            self.listed(),
            [".generated", "__init__.py", "git/.generated", "git/__init__.py", "git/log.py"],
        )


class Places(FilesTest):
    def test_no_link_is_followed(self) -> None:
        outside = Path(self.runner.workdir) / "outside"
        outside.mkdir()
        (outside / "log.py").write_text("mine")
        self.folder.symlink_to(outside)
        answer = self.deliver({"git": package(log="x = 1")})
        self.assertEqual((answer.header["type"], answer.header["reason"]), ("failed", "outside"))
        self.folder.unlink()
        self.folder.mkdir()
        (self.folder / "git").symlink_to(outside)
        self.assertEqual(self.deliver({"git": package(log="x = 1")}).header["type"], "failed")
        (self.folder / "git").unlink()
        (self.folder / "git").mkdir()
        (self.folder / "git" / "log.py").symlink_to(outside / "log.py")
        self.delivered({"git": package(log="x = 1")})  # The control. The link itself is replaced.
        self.assertFalse((self.folder / "git" / "log.py").is_symlink())
        self.assertEqual((outside / "log.py").read_text(), "mine")
        self.assertEqual(os.listdir(outside), ["log.py"])

    def test_names_that_are_no_modules_are_refused(self) -> None:
        for server, file in (
            ("../git", "log.py"),
            ("git", "../log.py"),
            ("git", "a/log.py"),
            ("", "log.py"),
            ("git", ".pth"),
        ):
            with self.subTest(server=server, file=file):
                self.assertEqual(self.deliver({server: {file: "x = 1"}}).header["type"], "failed")
        self.assertFalse((Path(self.runner.workdir) / "git").exists())
        self.delivered({"git": package(log="x = 1")})  # The control, and the session continues.
