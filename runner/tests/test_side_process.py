"""Programs that are started beside a session, and whose a connection is."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import socket
import sys
import unittest
from pathlib import Path
from unittest import mock

from cellblock_runner import confine, side_process, sockets

PR_SET_NO_NEW_PRIVS = 38
# As the host sends them; a test of the jail keeps this file up to date.
_FILTERS = json.loads(Path(__file__).with_name("program_filters.json").read_text())


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
        self.assertEqual(side_process.places("perl", "/a:/b"), ["/a/perl", "/b/perl"])
        self.assertEqual(side_process.places("perl", ""), ["./perl"])
        self.assertEqual(side_process.places("./perl", "/a"), ["./perl"])
        self.assertEqual(side_process.places("sh", None), ["/usr/bin/sh", "/bin/sh"])
        self.assertEqual(side_process.places("", "/a"), [])


class Input(unittest.TestCase):
    def test_what_a_program_reads_cannot_be_changed(self) -> None:
        file = side_process.input_of(b"four")
        self.addCleanup(os.close, file)
        self.assertEqual(os.read(file, 10), b"four")
        with self.assertRaises(PermissionError):
            os.write(file, b"more")
        with self.assertRaises(PermissionError):
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, 0)

    def test_without_input_there_is_nothing_to_read(self) -> None:
        file = side_process.input_of(None)
        self.addCleanup(os.close, file)
        self.assertEqual(os.read(file, 10), b"")


def _adopt_one() -> int:
    """Adopts orphans, makes one, and returns how it ended, which only its parent can know."""
    confine.adopt_orphans()
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
        with (
            mock.patch.object(confine, "_library") as library,
            self.assertRaisesRegex(OSError, "adopt orphans"),
        ):
            library.prctl.return_value = -1
            confine.adopt_orphans()


class Refusal(unittest.TestCase):
    def test_programs_are_refused_to_a_process_and_its_children(self) -> None:
        def refused() -> int:
            ctypes.CDLL(None).prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
            before = confine.count_of_filters(os.getpid())
            confine.refuse_programs(_FILTERS)
            seen = confine.count_of_filters(os.getpid()) - before
            return _status_of_child(_start_program) if seen == 1 else 97

        self.assertEqual(_status_of_child(_start_program), 0)  # Control.
        self.assertEqual(_status_of_child(refused), errno.EPERM)

    def test_no_further_filter_can_be_loaded(self) -> None:
        def refused() -> int:
            ctypes.CDLL(None).prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
            confine.refuse_programs(_FILTERS)
            try:
                confine.refuse_programs(_FILTERS)
            except OSError as error:
                return error.errno or 98
            return 97

        self.assertEqual(_status_of_child(refused), errno.EPERM)

    def test_a_filter_that_does_not_refuse_programs_is_an_error(self) -> None:
        def allowed() -> int:
            ctypes.CDLL(None).prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
            # BPF_RET | BPF_K, SECCOMP_RET_ALLOW.
            allow = (0x06).to_bytes(2, sys.byteorder) + bytes(2)
            allow += (0x7FFF0000).to_bytes(4, sys.byteorder)
            try:
                confine.refuse_programs({os.uname().machine: list(allow)})
            except OSError as error:
                return error.errno or 98
            return 97

        self.assertEqual(_status_of_child(allowed), errno.EACCES)

    def test_without_a_filter_for_this_machine_it_is_an_error(self) -> None:
        with self.assertRaisesRegex(OSError, "cannot be refused"):
            confine.refuse_programs({"a machine": [0]})


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
                    self.assertEqual(
                        list(sockets.holders(names, [os.getppid(), os.getpid()])), [os.getpid()]
                    )
                    self.assertEqual(list(sockets.holders(set(), [os.getpid()])), [])


if __name__ == "__main__":
    unittest.main()
