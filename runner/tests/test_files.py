"""File requests with a real runner, allowed and refused."""

from __future__ import annotations

import os
import stat
import unittest

from cellblock_runner import files

from .harness import Runner
from .merger import Frame


class FileRequests(unittest.TestCase):
    def setUp(self) -> None:
        self.runner = Runner()
        self.addCleanup(self.runner.close)

    def path(self, name: str) -> str:
        return os.path.join(self.runner.workdir, name)

    def write(self, name: str, data: bytes = b"content") -> None:
        os.makedirs(os.path.dirname(self.path(name)), exist_ok=True)
        with open(self.path(name), "wb") as file:
            file.write(data)

    def assert_failed(self, frame: Frame, reason: str) -> None:
        self.assertEqual(
            (frame.header["type"], frame.header.get("reason")), ("failed", reason), frame.header
        )

    def assert_no_temporaries(self) -> None:
        for _, _, names in os.walk(self.runner.workdir):
            self.assertEqual([name for name in names if name.startswith(".cellblock")], [])

    def test_every_byte_goes_both_ways(self) -> None:
        data = bytes(range(256)) * 20_000
        written = self.runner.upload("new/folder/data.bin", data[:1000], data[1000:])
        self.assertEqual((written.header["size"], written.header["replaced"]), (len(data), False))
        read, end = self.runner.download("new/folder/data.bin")
        self.assertEqual(
            (read, end.header["type"], end.header["size"]), (data, "file_end", len(data))
        )
        self.assertEqual(stat.S_IMODE(os.stat(self.path("new/folder/data.bin")).st_mode), 0o644)
        self.assert_no_temporaries()

    def part(self, path: str, offset: int, length: int) -> tuple[bytes, Frame]:
        frames = self.runner.request(
            {"type": "read_file", "id": 7000, "path": path, "offset": offset, "length": length}
        )
        return b"".join(frame.payload for frame in frames[:-1]), frames[-1]

    def test_a_part_of_a_file(self) -> None:
        data = bytes(range(256)) * 10_000
        self.write("data", data)
        for offset, length in [
            (0, 5),
            (1000, 2_000_000),
            (len(data) - 3, 100),
            (len(data), 1),
            (len(data) + 5, 1),
            (9, 0),
        ]:
            read, end = self.part("data", offset, length)
            self.assertEqual(read, data[offset : offset + length])
            self.assertEqual(
                (end.header["type"], end.header["size"], end.header["total"]),
                ("file_end", len(read), len(data)),
            )
        self.assert_failed(self.part("missing", 0, 1)[1], "missing")
        os.mkfifo(self.path("fifo"))
        self.assert_failed(self.part("fifo", 0, 1)[1], "not_a_file")

    def test_the_version_of_a_file_changes_with_it(self) -> None:
        self.write("data", b"old")
        first = self.part("data", 0, 1)[1].header["version"]
        self.assertEqual(self.part("data", 1, 1)[1].header["version"], first)
        os.utime(self.path("data"), ns=(0, 1))
        self.assertNotEqual(self.part("data", 0, 1)[1].header["version"], first)

    def test_files_are_listed_in_order_without_what_is_hidden(self) -> None:
        for name in ["b", "a/z", "a/y/x", ".git/config", "a/__pycache__/m.pyc", ".hidden"]:
            self.write(name, name.encode())
        os.symlink("b", self.path("link"))
        os.mkfifo(self.path("fifo"))

        def listed(limit: int) -> tuple[list[str], int]:
            (frame,) = self.runner.request({"type": "list_files", "id": 7001, "limit": limit})
            return [entry["path"] for entry in frame.header["entries"]], frame.header["omitted"]

        self.assertEqual(listed(100), ([".hidden", "a/y/x", "a/z", "b"], 0))
        self.assertEqual(listed(2), ([".hidden", "a/y/x"], 2))

    def test_an_empty_file(self) -> None:
        self.assertEqual(self.runner.upload("empty").header["size"], 0)
        self.assertEqual(self.runner.download("./empty")[0], b"")

    def test_existing_files_are_replaced_only_when_asked(self) -> None:
        self.write("there", b"old")
        self.assert_failed(self.runner.upload("there", b"new"), "exists")
        self.assertEqual(self.runner.download("there")[0], b"old")
        self.assertTrue(self.runner.upload("there", b"new", overwrite=True).header["replaced"])
        self.assertEqual(self.runner.download("there")[0], b"new")
        self.assert_no_temporaries()

    def test_a_file_made_during_an_upload_is_not_replaced(self) -> None:
        self.runner.request(
            {"type": "write_begin", "id": 900, "path": "race", "overwrite": False}, answers=False
        )
        self.runner.run("open('race', 'w').write('mine')")
        self.assert_failed(self.runner.request({"type": "write_end", "id": 900})[-1], "exists")
        self.assertEqual(self.runner.download("race")[0], b"mine")
        self.assert_no_temporaries()

    def test_missing_files_and_folders(self) -> None:
        self.write("file")
        for path in ("nothing", "no/such/folder", "file/below"):
            self.assert_failed(self.runner.download(path)[1], "missing")
        self.assert_failed(self.runner.upload("file/below", b"x"), "not_a_file")

    def test_what_is_no_regular_file_is_refused_at_once(self) -> None:
        os.mkdir(self.path("folder"))
        os.mkfifo(self.path("fifo"))
        os.symlink("/dev/zero", self.path("zero"))
        for name in ("folder", "fifo", "zero", "folder/", "."):
            self.assert_failed(self.runner.download(name)[1], "not_a_file")
            self.assert_failed(self.runner.upload(name, b"x", overwrite=True), "not_a_file")

    def test_paths_cannot_leave_the_folder(self) -> None:
        secret = os.path.join(os.path.dirname(self.runner.workdir), f"secret-{os.getpid()}")
        with open(secret, "w") as file:
            file.write("secret")
        self.addCleanup(os.remove, secret)
        os.symlink("..", self.path("up"))
        os.symlink(secret, self.path("link"))
        name = os.path.basename(secret)
        self.write("below")  # The control: an ordinary file is readable.
        self.assertEqual(self.runner.download("below")[0], b"content")
        for path in (f"../{name}", secret, f"up/{name}", f"a/../../{name}"):
            data, answer = self.runner.download(path)
            self.assertEqual(data, b"")
            self.assert_failed(answer, "outside")
            self.assert_failed(self.runner.upload(path, b"x", overwrite=True), "outside")
        self.assert_failed(self.runner.download("link")[1], "not_a_file")
        with open(secret) as file:
            self.assertEqual(file.read(), "secret")

    def test_odd_paths_are_answered(self) -> None:
        for path in ("", "a\0b", "x" * 5000):
            self.assertEqual(self.runner.download(path)[1].header["type"], "failed")
        self.assertEqual(self.runner.upload("żółć 🐍", b"x").header["type"], "written")
        self.assertEqual(self.runner.run("import os; os.listdir()").order, ["value:['żółć 🐍']"])

    def test_the_limit_holds(self) -> None:
        self.write("ten", b"0123456789")
        self.assertEqual(self.runner.download("ten", limit=10)[0], b"0123456789")
        self.assert_failed(self.runner.download("ten", limit=9)[1], "too_large")

    @unittest.skipIf(os.geteuid() == 0, "skipped: needs a user without root's rights")
    def test_unreadable_files_are_denied(self) -> None:
        self.write("closed")
        os.chmod(self.path("closed"), 0)
        self.assert_failed(self.runner.download("closed")[1], "denied")

    def test_an_upload_that_is_never_finished_leaves_nothing(self) -> None:
        self.runner.request(
            {"type": "write_begin", "id": 901, "path": "half", "overwrite": False}, answers=False
        )
        self.runner.request({"type": "write_data", "id": 901}, b"half", answers=False)
        self.assertEqual(self.runner.upload("whole", b"x").header["type"], "written")
        self.assertFalse(os.path.exists(self.path("half")))
        self.assert_no_temporaries()

    def test_requests_that_belong_to_no_upload_are_ignored(self) -> None:
        self.runner.request({"type": "write_data", "id": 902}, b"x", answers=False)
        self.runner.request({"type": "write_end", "id": 902}, answers=False)
        self.runner.request({"type": "from_the_future", "id": 903, "more": [1]}, answers=False)
        self.assertEqual(self.runner.run("1").order, ["value:1"])


class FolderReports(unittest.TestCase):
    def test_an_unknown_state_gives_no_report(self) -> None:
        self.assertIsNone(files.report(None, {}))
        self.assertIsNone(files.report({}, None))

    def test_each_kind_of_change_is_reported(self) -> None:
        before = {"same": (1, 1, 1), "changed": (1, 1, 2), "gone": (1, 1, 3)}
        after = {"same": (1, 1, 1), "changed": (5, 2, 2), "new": (7, 1, 4)}
        self.assertEqual(
            files.report(before, after),
            {
                "created": [{"path": "new", "size": 7}],
                "changed": [{"path": "changed", "size": 5}],
                "deleted": ["gone"],
                "omitted": 0,
            },
        )

    def test_long_lists_are_cut_and_counted(self) -> None:
        report = files.report({}, {f"{number:03}": (0, 0, number) for number in range(60)})
        assert report is not None
        self.assertEqual((len(report["created"]), report["omitted"]), (50, 10))
