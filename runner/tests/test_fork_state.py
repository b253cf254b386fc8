"""Fork state: the parts that can be tested without a session."""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import tempfile
import time
import unittest
from unittest import mock

from cellblock_runner import descriptors, folders, mappings


class FolderTest(unittest.TestCase):
    def setUp(self) -> None:
        self.root = tempfile.mkdtemp(prefix="runner-test-")
        self.addCleanup(shutil.rmtree, self.root)

    def write(self, name: str, content: str) -> str:
        path = os.path.join(self.root, name)
        with open(path, "w", encoding="utf-8") as file:
            file.write(content)
        return path

    def keep(self, previous: folders.Tree | None = None, budget: int = 1 << 20) -> folders.Tree:
        return folders.snapshot(self.root, previous, budget, ())


class Keeping(FolderTest):
    def test_a_file_that_did_not_change_is_not_read_again(self) -> None:
        self.write("a", "old")
        os.utime(os.path.join(self.root, "a"), ns=(5, 5))
        # Long after the file was written, according to the clock that `snapshot` reads.
        with mock.patch.object(time, "time_ns", return_value=time.time_ns() + 10**9):
            first = self.keep()
        with mock.patch.object(folders, "content_of", side_effect=AssertionError("it was read")):
            self.assertIs(self.keep(first)["a"], first["a"])
        # The control: a changed file is read.
        self.write("a", "new")
        self.assertEqual(self.keep(first)["a"].content, b"new")

    def test_a_file_that_changed_a_moment_ago_is_read_again(self) -> None:
        self.write("a", "old")
        first = self.keep()
        self.assertFalse(first["a"].settled)
        self.assertEqual(self.keep(first)["a"].content, b"old")

    def test_a_file_that_is_mapped_is_read_every_time(self) -> None:
        status = os.stat(self.write("a", "old"))
        with mock.patch.object(time, "time_ns", return_value=time.time_ns() + 10**9):
            self.assertTrue(folders.snapshot(self.root, None, 100, ())["a"].settled)
            mapped = {(status.st_dev, status.st_ino)}
            self.assertFalse(folders.snapshot(self.root, None, 100, mapped)["a"].settled)

    def test_the_budget_is_for_all_files_together(self) -> None:
        self.write("a", "x" * 60)
        self.write("b", "x" * 40)
        self.assertEqual(len(self.keep(budget=100)), 2)
        self.assertRaises(folders.SnapshotError, self.keep, None, 99)

    @unittest.skipIf(os.geteuid() == 0, "skipped: needs a user whom permissions stop")
    def test_a_folder_that_cannot_be_seen_is_not_kept(self) -> None:
        closed = os.path.join(self.root, "closed")
        os.mkdir(closed, 0)
        self.addCleanup(os.chmod, closed, 0o700)
        self.assertRaises(folders.SnapshotError, self.keep)

    def test_what_is_mounted_below_a_folder_is_not_entered(self) -> None:
        if not os.path.ismount("/dev/shm"):
            self.skipTest("skipped: needs a mount below /dev")
        with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
            found = folders._walk("/dev", None, is_strict=False)
            self.assertIn("null", found)
            self.assertNotIn("shm", found)
            self.assertNotIn(f"shm/{os.path.basename(file.name)}", found)

    def test_looking_at_a_folder_that_did_not_change_is_fast(self) -> None:
        for number in range(20):
            self.write(str(number), "x" * 1000)
        with mock.patch.object(time, "time_ns", return_value=time.time_ns() + 10**9):
            kept = self.keep()
        best = min(self.seconds(kept) for _ in range(30))
        self.assertLess(best, 0.0002)

    def seconds(self, kept: folders.Tree) -> float:
        started = time.perf_counter()
        self.keep(kept)
        return time.perf_counter() - started


class PuttingBack(FolderTest):
    def test_what_is_as_it_should_be_is_not_written(self) -> None:
        path = self.write("a", "same")
        with mock.patch.object(time, "time_ns", return_value=time.time_ns() + 10**9):
            kept = self.keep()
        before = os.stat(path)
        with mock.patch.object(folders, "write_all", side_effect=AssertionError("it was written")):
            self.assertEqual(folders.restore(self.root, kept, removing=True), (kept, 0))
        self.assertEqual(os.stat(path), before)

    def test_what_cannot_be_brought_back_is_counted(self) -> None:
        self.write("a", "text")
        kept = self.keep()
        kept["a"] = kept["a"]._replace(content=None)
        os.unlink(os.path.join(self.root, "a"))
        self.assertEqual(folders.restore(self.root, kept, removing=True), ({}, 1))

    def test_large_files_are_mapped_and_put_down(self) -> None:
        content = "x" * 200_000
        path = self.write("large", content)
        carried = folders.snapshot_for_fork(self.root, None)
        self.assertIsInstance(carried["large"].content, mappings.FileView)
        os.unlink(path)
        _, failures = folders.restore(self.root, carried, removing=False)
        folders.release(carried)
        self.assertEqual(failures, 0)
        with open(path, encoding="utf-8") as file:
            self.assertEqual(file.read(), content)

    def test_a_fork_knows_whether_files_are_mapped(self) -> None:
        self.write("small", "text")
        self.assertFalse(folders.is_mapped(folders.snapshot_for_fork(self.root, None)))
        self.write("large", "x" * 200_000)
        carried = folders.snapshot_for_fork(self.root, None)
        self.assertTrue(folders.is_mapped(carried))
        folders.release(carried)

    def test_a_folder_is_untouched_as_long_as_only_an_empty_home_is_in_it(self) -> None:
        home = os.path.join(self.root, "home")
        self.assertTrue(folders.is_unused(self.root, home))
        os.mkdir(home)
        self.assertTrue(folders.is_unused(self.root, home))
        self.assertFalse(folders.is_unused(self.root, "/home"))
        self.write("home/file", "text")
        self.assertFalse(folders.is_unused(self.root, home))
        self.assertFalse(folders.is_unused(os.path.join(self.root, "none"), home))

    def test_a_mapped_file_that_became_shorter_meanwhile_is_counted_and_ends_nothing(self) -> None:
        path = self.write("large", "x" * 200_000)
        carried = folders.snapshot_for_fork(self.root, None)
        os.truncate(path, 10)
        other = tempfile.mkdtemp(prefix="runner-test-")
        self.addCleanup(shutil.rmtree, other)
        _, failures = folders.restore(other, carried, removing=False)
        folders.release(carried)
        self.assertEqual(failures, 1)


class Areas(unittest.TestCase):
    def test_both_ways_of_asking_the_kernel_find_the_same(self) -> None:
        with mmap.mmap(-1, 12288) as shared:
            address = ctypes.addressof(ctypes.c_char.from_buffer(shared))
            asked = list(mappings._areas())
            with mock.patch.object(mappings, "_can_query", False):
                read = list(mappings._areas())
            self.assertEqual(asked, read)
            [ours] = [area for area in read if area.start == address]
            self.assertEqual(
                (ours.length, ours.protection, ours.path), (12288, 3, "/dev/zero (deleted)")
            )

    def test_paths_with_odd_names_are_read(self) -> None:
        text = (
            b"7f0000000000-7f0000002000 rw-s 00001000 00:2b 15                         /work/a s 0 "
            b"b\n"
            b"7f0000003000-7f0000004000 r--p 00000000 00:2b 16                         /work/-s "
            b"00000000 00:2b 17 x\n"
        )
        [area] = mappings._parse(text)
        self.assertEqual(area.path, "/work/a s 0 b")
        self.assertEqual(
            (area.length, area.offset, area.identity), (8192, 4096, (os.makedev(0, 0x2B), 15))
        )

    def test_areas_of_places_that_cannot_be_written_are_no_concern(self) -> None:
        area = mappings.SharedMapping(0, 4096, 1, 0, (1, 2), "/usr/lib/cache")
        with mock.patch.object(mappings, "_areas", return_value=iter([area])):
            self.assertEqual(mappings.find_shared(["/work"]), [])
        with mock.patch.object(mappings, "_areas", return_value=iter([area])):
            self.assertEqual(mappings.find_shared(["/usr"]), [area])


class Texts(unittest.TestCase):
    def test_losses_are_counted_and_short(self) -> None:
        def opened(number: int, kind: str, path: str = "") -> descriptors.OpenDescriptor:
            return descriptors.OpenDescriptor(number, kind, (1, number), path)

        ends = descriptors.OpenDescriptor(9, "pipe", (1, 8))
        dead = [
            opened(3, "connection"),
            opened(4, "connection"),
            opened(8, "pipe"),
            ends,
            opened(5, "file", "/a/" + "b" * 100),
        ]
        self.assertEqual(
            descriptors.describe_losses(dead),
            ["2 connections", "1 pipe", f"1 open file ({'b' * 39}…)"],
        )
        many = [opened(number, "file", f"/a/{number}") for number in range(5)]
        self.assertEqual(descriptors.describe_losses(many), ["5 open files (0, 1, 2, …)"])

    def test_locks_are_read_as_the_kernel_writes_them(self) -> None:
        self.assertEqual(
            descriptors._read_lock("1: POSIX  ADVISORY  WRITE 123 00:2b:15 5 14".split()),
            descriptors.Lock(of_whole_file=False, is_exclusive=True, start=5, length=10),
        )
        self.assertEqual(
            descriptors._read_lock("1: FLOCK  ADVISORY  READ 123 00:2b:15 0 EOF".split()),
            descriptors.Lock(of_whole_file=True, is_exclusive=False, start=0, length=0),
        )
        self.assertIsNone(descriptors._read_lock("1: LEASE ACTIVE WRITE 123".split()))

    def test_a_terminal_is_lost_and_other_devices_are_opened_again(self) -> None:
        outer, inner = os.openpty()
        device = os.open(os.devnull, os.O_RDWR)
        try:
            kinds = [descriptors._describe(number, [], {}, 0) for number in (outer, inner, device)]
        finally:
            for number in (outer, inner, device):
                os.close(number)
        self.assertEqual([item and item.kind for item in kinds], ["terminal", "terminal", "file"])
