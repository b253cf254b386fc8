"""Programs that are started beside a session, and whose a connection is."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import socket
import unittest
from unittest import mock

from cellblock_runner import errands, fences, sockets

_NO_NEW_PRIVILEGES = 38


def _status_of_child(work: object) -> int:
    """Runs work in a child and returns its exit status."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(work())  # type: ignore[operator]
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _start_program() -> int:
    try:
        os.execv("/bin/true", ["true"])
    except OSError as refused:
        return refused.errno or 98


class Places(unittest.TestCase):
    def test_a_program_without_a_slash_is_looked_for_in_its_own_path(self) -> None:
        self.assertEqual(errands.places("perl", "/a:/b"), ["/a/perl", "/b/perl"])
        self.assertEqual(errands.places("perl", ""), ["./perl"])
        self.assertEqual(errands.places("./perl", "/a"), ["./perl"])
        self.assertEqual(errands.places("sh", None), ["/usr/bin/sh", "/bin/sh"])
        self.assertEqual(errands.places("", "/a"), [])


class Input(unittest.TestCase):
    def test_what_a_program_reads_cannot_be_changed(self) -> None:
        file = errands.input_of(b"four")
        self.addCleanup(os.close, file)
        self.assertEqual(os.read(file, 10), b"four")
        with self.assertRaises(PermissionError):
            os.write(file, b"more")
        with self.assertRaises(PermissionError):
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, 0)

    def test_without_input_there_is_nothing_to_read(self) -> None:
        file = errands.input_of(None)
        self.addCleanup(os.close, file)
        self.assertEqual(os.read(file, 10), b"")


def _adopt_one() -> int:
    """Adopts orphans, makes one, and returns how it ended, which only its parent can know."""
    fences.adopt_orphans()
    between = os.fork()
    if between == 0:
        if os.fork() == 0:
            os._exit(7)
        os._exit(0)
    os.waitpid(between, 0)
    return os.waitstatus_to_exitcode(os.waitpid(-1, 0)[1])


class Orphans(unittest.TestCase):
    def test_they_are_adopted_or_it_is_an_error(self) -> None:
        self.assertEqual(_status_of_child(_adopt_one), 7)
        with mock.patch.object(fences, "_library") as library, self.assertRaisesRegex(OSError, "adopt orphans"):
            library.prctl.return_value = -1
            fences.adopt_orphans()


class Refusal(unittest.TestCase):
    def test_programs_are_refused_to_a_process_and_its_children(self) -> None:
        def refused() -> int:
            ctypes.CDLL(None).prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
            before = fences.count_of_filters(os.getpid())
            fences.refuse_programs()
            seen = fences.count_of_filters(os.getpid()) - before
            return _status_of_child(_start_program) if seen == 1 else 97

        self.assertEqual(_status_of_child(_start_program), 0)  # Control.
        self.assertEqual(_status_of_child(refused), errno.EPERM)

    def test_every_known_machine_has_a_filter_whose_jumps_stay_inside(self) -> None:
        for machine in ("x86_64", "aarch64"):
            code = fences.filter_of_programs(machine)
            lines = [code[at : at + 8] for at in range(0, len(code), 8)]
            for number, line in enumerate(lines):
                for jump in line[2:4]:
                    self.assertLess(number + 1 + jump, len(lines) + 1)


class Owners(unittest.TestCase):
    def test_the_process_that_made_a_connection_is_found(self) -> None:
        for family, here in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
            with self.subTest(here), socket.socket(family) as server:
                try:
                    server.bind((here, 0))
                except OSError:
                    continue  # There is no IPv6 here.
                server.listen()
                with socket.create_connection(server.getsockname()[:2]) as client:
                    names = sockets.at(here, client.getsockname()[1])
                    self.assertEqual(len(names), 1)
                    self.assertEqual(list(sockets.holders(names, [os.getppid(), os.getpid()])), [os.getpid()])
                    self.assertEqual(list(sockets.holders(set(), [os.getpid()])), [])


if __name__ == "__main__":
    unittest.main()
