"""Pip arguments: parsing of command lines, without a session."""

from __future__ import annotations

import os
import shlex
import tempfile
import unittest
from pathlib import Path
from unittest import mock

from cellblock_runner.pip_arguments import (
    Install,
    Refused,
    arguments_of,
    read_install,
    simple_words,
    split_command,
)


def read(line: str, folder: str = "/") -> Install:
    return read_install(shlex.split(line), folder)


class Programs(unittest.TestCase):
    def test_the_usual_ways_to_start_pip_are_known(self) -> None:
        for line in (
            "pip install x",
            "pip3 install x",
            "pip3.12 install x",
            "/usr/local/bin/pip install x",
            "python -m pip install x",
            "python3 -m pip install x",
            "/opt/env/bin/python3.12 -m pip install x",
            "uv pip install x",
            "python -m uv pip install x",
        ):
            self.assertEqual(arguments_of(line.split()), ["install", "x"], line)

    def test_other_programs_are_left_alone(self) -> None:
        for line in (
            "",
            "pipx install x",
            "python x.py",
            "python -m pipx",
            "python -m",
            "uv add x",
            "uv",
            "echo pip install x",
        ):
            self.assertIsNone(arguments_of(line.split()), line)

    def test_the_command_is_found_behind_general_options(self) -> None:
        self.assertEqual(split_command(["-q", "install", "x"]), ("install", ["-q", "x"]))
        self.assertEqual(
            split_command(["--timeout", "60", "install", "x"]),
            ("install", ["--timeout", "60", "x"]),
        )
        self.assertEqual(split_command(["--version"]), ("", ["--version"]))

    def test_a_line_of_words_alone_needs_no_shell(self) -> None:
        self.assertEqual(
            simple_words("pip install 'x>=1' \"y[a]\"  z==2"),
            ["pip", "install", "x>=1", "y[a]", "z==2"],
        )
        for line in (
            "pip install x | cat",
            "pip install x > f",
            "a && b",
            "a; b",
            "$A",
            "`a`",
            "a *",
            "a 'b",
            "a\nb",
            "(a)",
            "a &",
        ):
            self.assertIsNone(simple_words(line), line)


class Options(unittest.TestCase):
    def test_requirements_stay_as_they_are(self) -> None:
        requirements = [
            "x",
            "y>=1,<2",
            "z[a,b]==1.0",
            "w; python_version < '3.13'",
            "git+https://host/x@v1",
            "https://host/x-1-py3-none-any.whl",
            "u @ https://host/u.zip",
        ]
        self.assertEqual(read(shlex.join(requirements)).requirements, requirements)

    def test_harmless_options_are_passed_over_with_their_values(self) -> None:
        for options in (
            "--no-cache-dir",
            "--user",
            "--disable-pip-version-check",
            "--no-input -v -vvv",
            "--progress-bar off",
            "--progress-bar=off",
            "--root-user-action=ignore",
            "--timeout 100 --retries=3",
            "--break-system-packages",
            "--system",
            "--force-reinstall",
            "--prefer-binary --only-binary :all:",
            "-y",
            "--",
        ):
            self.assertEqual(read(f"{options} x"), Install(["x"], False, False), options)

    def test_upgrade_and_quiet_are_understood_in_every_spelling(self) -> None:
        for options, upgrade, quiet in (
            ("-U", True, False),
            ("--upgrade", True, False),
            ("-q", False, True),
            ("-qq", False, True),
            ("--quiet", False, True),
            ("-Uq", True, True),
            ("-qU", True, True),
        ):
            self.assertEqual(read(f"{options} x"), Install(["x"], upgrade, quiet), options)
            self.assertEqual(read(f"x {options}"), Install(["x"], upgrade, quiet), options)

    def test_options_that_change_source_place_or_choice_are_refused(self) -> None:
        for options in (
            "-i http://a",
            "-ihttp://a",
            "--index-url http://a",
            "--index-url=http://a",
            "--extra-index-url http://a",
            "--default-index http://a",
            "-f dir",
            "--find-links=dir",
            "--no-index",
            "--trusted-host a",
            "--proxy a",
            "--cert a",
            "-t dir",
            "--target dir",
            "--prefix=dir",
            "--root dir",
            "-e .",
            "-qe .",
            "--editable=.",
            "-c file",
            "--constraint file",
            "--pre",
            "--no-deps",
            "--no-binary :all:",
            "--config-settings a=b",
            "--hash sha256:00",
            "--require-hashes",
            "--dry-run",
            "--python-version 3.9",
        ):
            with self.subTest(options), self.assertRaisesRegex(Refused, "omit|supported|imported"):
                read(f"{options} x")
        self.assertEqual(read("x").requirements, ["x"])  # Control.

    def test_unknown_options_are_named(self) -> None:
        with self.assertRaisesRegex(Refused, "no such option: --frobnicate"):
            read("--frobnicate x")
        with self.assertRaisesRegex(Refused, "no such option: -Z"):
            read("-qZ x")
        with self.assertRaisesRegex(Refused, "requires 1 argument"):
            read("x -r")

    def test_local_files_are_refused(self) -> None:
        for name in (
            ".",
            "./x",
            "..",
            "/abs/x",
            "~/x",
            "sub/x",
            "x-1.0-py3-none-any.whl",
            "x.tar.gz",
            "X.ZIP",
            "file:///x.whl",
            "x @ file:///x.whl",
            "x@file:x.whl",
            "git+file:///x",
            "x @ ./x.whl",
            "-",
        ):
            with self.subTest(name), self.assertRaisesRegex(Refused, "only packages from an index"):
                read_install([name], "/")
        with self.assertRaisesRegex(Refused, "only packages from an index"):
            read_install(["--", "-x"], "/")

    def test_no_requirement_is_an_error_as_with_pip(self) -> None:
        for line in ("", "-q", "-U --user"):
            with self.assertRaisesRegex(Refused, "at least one requirement"):
                read(line)


class Files(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def write(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, "utf-8")

    def lines(self, text: str) -> list[str]:
        self.write("r.txt", text)
        return read("-r r.txt", str(self.folder)).requirements

    def test_lines_become_requirements(self) -> None:
        text = (
            "\ufeff# head\n\nx==1  # pinned\n  y[a]>=2 ; python_version < '4'\n"
            "z @ https://host/z#egg=z\r\nlast"
        )
        self.assertEqual(
            self.lines(text),
            ["x==1", "y[a]>=2 ; python_version < '4'", "z @ https://host/z#egg=z", "last"],
        )

    def test_lines_are_joined_and_variables_put_in(self) -> None:
        with mock.patch.dict(os.environ, {"WANTED": "7"}):
            self.assertEqual(
                self.lines("x\\\n==1\ny==${WANTED}\nz==${UNKNOWN}\n"),
                ["x==1", "y==7", "z==${UNKNOWN}"],
            )

    def test_files_name_files_beside_them_even_in_a_circle(self) -> None:
        self.write("sub/more.txt", "b\n-r ../r.txt\n--requirement=third.txt\n")
        self.write("sub/third.txt", "c")
        self.assertEqual(self.lines("a\n-r sub/more.txt\nd"), ["a", "b", "c", "d"])

    def test_names_and_files_mix_and_options_of_a_file_count(self) -> None:
        self.write("r.txt", "--prefer-binary\na")
        self.assertEqual(read("-Urr.txt b", str(self.folder)), Install(["a", "b"], True, False))

    def test_what_is_refused_on_the_line_is_refused_in_a_file(self) -> None:
        for line in (
            "-i http://a",
            "--index-url=http://a",
            "-e .",
            "./x",
            "-c more.txt",
            "x==1 --hash=sha256:00",
            "x --frobnicate",
        ):
            with self.subTest(line), self.assertRaisesRegex(Refused, "in the line"):
                self.lines(f"a\n{line}\n")
        self.assertEqual(self.lines("a\n"), ["a"])  # Control.

    def test_a_file_that_cannot_be_read_is_named(self) -> None:
        with self.assertRaisesRegex(Refused, "No such file or directory: 'none.txt'"):
            read("-r none.txt", str(self.folder))
        with self.assertRaisesRegex(Refused, "download it first"):
            read("-r https://host/r.txt", str(self.folder))
        self.write("big.txt", "x\n" * 600_000)
        with self.assertRaisesRegex(Refused, "too large"):
            read("-r big.txt", str(self.folder))

    def test_an_endless_chain_of_files_is_refused(self) -> None:
        for number in range(101):
            self.write(f"{number}.txt", f"-r {number + 1}.txt")
        with self.assertRaisesRegex(Refused, "more than 100"):
            read("-r 0.txt", str(self.folder))

    def test_an_empty_file_asks_for_nothing(self) -> None:
        self.assertEqual(self.lines("# nothing\n"), [])
