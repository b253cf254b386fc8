"""Pip arguments: detects command lines that start pip, and parses them. Pure except for the
reading of requirements files.

Only packages of the host's configured index can be installed, and only to one place. Options that
request otherwise are refused with a message about what is possible; options that make no difference
here are ignored.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

# A larger file is not a list of requirements.
_MAX_FILE_BYTES = 1024 * 1024
# Limit on requirements files that include each other.
_MAX_FILES = 100

_python = re.compile(r"python(\d+(\.\d+)*)?")
_pip = re.compile(r"pip(\d+(\.\d+)*)?")
_quoted = re.compile(r"'[^']*'|\"[^\"$`\\]*\"")
# Characters that a shell does not simply take as a part of a word.
_special = re.compile(r"[$`*?\n#]|(?<![^\s=:])~")
_operator = re.compile(r"[();<>|&]+")
_comment = re.compile(r"(^|\s+)#.*$")
_variable = re.compile(r"\$\{([A-Z0-9_]+)\}")
_file_scheme = re.compile(r"(^|[@+\s])file:", re.IGNORECASE)
_ARCHIVES = (".whl", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".zip")

_QUIET = frozenset(("-q", "--quiet"))
_UPGRADE = frozenset(("-U", "--upgrade"))
_FILE = frozenset(("-r", "--requirement", "--requirements"))

# Options that every command has and that change nothing here; the second set has values.
_IGNORED = frozenset(
    "-v --verbose --debug --isolated --require-virtualenv --no-input --no-color --no-cache-dir"
    " --disable-pip-version-check --no-python-version-warning -y --yes --no-cache -n --no-progress"
    " --no-config --native-tls".split()
)
GENERAL_WITH_VALUE = frozenset(
    "--log --log-file --timeout --default-timeout --retries --resume-retries --exists-action"
    " --cache-dir --color --use-feature --use-deprecated".split()
)
# The same, for `install` alone.
_IGNORED_INSTALL = frozenset(
    "--user --system --break-system-packages --no-warn-script-location --no-warn-conflicts"
    " --compile --no-compile --compile-bytecode --prefer-binary --use-pep517 --no-clean"
    " --ignore-installed -I --force-reinstall --reinstall --ignore-requires-python"
    " --check-build-dependencies --strict".split()
)
_IGNORED_INSTALL_WITH_VALUE = frozenset(
    "--progress-bar --upgrade-strategy --root-user-action --only-binary --python -p"
    " --link-mode".split()
)

_INDEX = "packages come from the index that this server is configured for; omit {}"
_PLACE = "packages are installed where this session imports them from; omit {}"
_LOCAL = (
    "only packages from an index can be installed;"
    " a module in the working folder can be imported without that"
)
_CHOICE = (
    "{} is not supported here; write the wanted versions into the requirements, such as name==1.2"
)
_BUILD = "{} is not supported here; packages are installed as they come from the index"
_HASHES = (
    "{} is not supported here; every file is checked against the hashes of the index anyway,"
    " so omit it"
)

_REFUSED = {
    **dict.fromkeys(
        "-i --index-url --pypi-url --extra-index-url --index --default-index --no-index -f"
        " --find-links --trusted-host --allow-insecure-host --proxy --cert --client-cert"
        " --keyring-provider --index-strategy --offline".split(),
        _INDEX,
    ),
    **dict.fromkeys("-t --target --prefix --root --src".split(), _PLACE),
    **dict.fromkeys("-e --editable".split(), _LOCAL),
    **dict.fromkeys(
        "-c --constraint --constraints --override --overrides --pre --prerelease --resolution"
        " --no-deps --no-dependencies --group --extra --all-extras --exclude-newer -P"
        " --upgrade-package".split(),
        _CHOICE,
    ),
    **dict.fromkeys(
        "--no-binary --no-build-isolation --no-build -C --config-settings --config-setting"
        " --global-option --build-option --platform --python-version --python-platform"
        " --implementation --abi --dry-run --report".split(),
        _BUILD,
    ),
    **dict.fromkeys("--hash --require-hashes --no-verify-hashes".split(), _HASHES),
}


class Refused(ValueError):
    """A command line that cannot be carried out. The message states what is possible."""


class Install(NamedTuple):
    """A parsed `pip install`."""

    requirements: list[str]
    upgrade: bool
    quiet: bool


def arguments_of(words: Sequence[str]) -> list[str] | None:
    """Returns the arguments after `pip`, `python -m pip` or `uv pip` in a command line. Returns
    None if it starts something else.
    """
    if not words:
        return None
    name, rest = os.path.basename(words[0]), list(words[1:])
    if _python.fullmatch(name) and len(rest) > 1 and rest[0] == "-m":
        name, rest = rest[1], rest[2:]
    if _pip.fullmatch(name):
        return rest
    # A uv that is named by its path is a separate program.
    if name == "uv" and rest[:1] == ["pip"] and not words[0].endswith("/uv"):
        return rest[1:]
    return None


def simple_words(command: str) -> list[str] | None:
    """Returns the words of a shell command that consists of nothing but words. Returns None if it
    needs a shell.
    """
    # Most special characters are literal inside quotes.
    if _special.search(_quoted.sub("q", command)):
        return None
    lexer = shlex.shlex(command, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    try:
        words = list(lexer)
    except ValueError:
        return None
    return None if any(_operator.fullmatch(word) for word in words) else words


def split_command(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """Returns the command, or an empty text if there is none, and all other arguments."""
    rest = list(arguments)
    before: list[str] = []
    while rest:
        word = rest.pop(0)
        if not word.startswith("-"):
            return word, before + rest
        before.append(word)
        if word in GENERAL_WITH_VALUE and rest:
            before.append(rest.pop(0))
    return "", before


def split_options(
    arguments: Sequence[str], with_value: Collection[str]
) -> Iterator[tuple[str, str]]:
    """Yields options with their values as pip parses them, and words as values of an option without
    a name.
    """
    rest = list(arguments)

    def value_of(option: str) -> str:
        if not rest:
            raise Refused(f"{option} option requires 1 argument")
        return rest.pop(0)

    while rest:
        word = rest.pop(0)
        if word == "--":
            yield from (("", each) for each in rest)
            return
        if word.startswith("--"):
            option, sign, value = word.partition("=")
            yield option, value if sign or option not in with_value else value_of(option)
        elif word.startswith("-") and len(word) > 1:
            letters = word[1:]
            while letters:
                option, letters = "-" + letters[0], letters[1:]
                if option in with_value:
                    value, letters = letters or value_of(option), ""
                    yield option, value
                else:
                    yield option, ""
        else:
            yield "", word


def check_option(option: str) -> None:
    """Accepts an option that changes nothing for any command, and refuses the others."""
    if option not in _IGNORED and option not in GENERAL_WITH_VALUE and option not in _QUIET:
        raise Refused(f"no such option: {option}")


def read_install(arguments: Sequence[str], folder: str) -> Install:
    """Parses the arguments after `install`. Relative file names refer to `folder`."""
    reading = _Reading()
    reading.take(arguments, folder)
    if not reading.requirements and not reading.files:
        raise Refused('You must give at least one requirement to install (see "pip help install")')
    return Install(reading.requirements, reading.upgrade, reading.quiet)


class _Reading:
    """Collects the parts of an installation."""

    _WITH_VALUE = _FILE | GENERAL_WITH_VALUE | _IGNORED_INSTALL_WITH_VALUE

    def __init__(self) -> None:
        self.requirements: list[str] = []
        self.upgrade = False
        self.quiet = False
        self.files: set[str] = set()

    def take(self, arguments: Sequence[str], folder: str) -> None:
        for option, value in split_options(arguments, self._WITH_VALUE):
            if not option:
                self._take_requirement(value)
            elif option in _FILE:
                self._take_file(value, folder)
            elif option in _UPGRADE:
                self.upgrade = True
            elif option in _QUIET:
                self.quiet = True
            elif option in _REFUSED:
                raise Refused(_REFUSED[option].format(option))
            elif option not in _IGNORED_INSTALL and option not in _IGNORED_INSTALL_WITH_VALUE:
                check_option(option)

    def _take_requirement(self, text: str) -> None:
        text = text.strip()
        if not text:
            return
        if _is_local(text):
            raise Refused(f"{text}: {_LOCAL}")
        self.requirements.append(text)

    def _take_file(self, name: str, folder: str) -> None:
        if "://" in name:
            raise Refused(f"{name}: a requirements file must be in the session; download it first")
        path = os.path.realpath(os.path.join(folder, os.path.expanduser(name)))
        if path in self.files:
            return  # Files may include each other.
        self.files.add(path)
        if len(self.files) > _MAX_FILES:
            raise Refused(f"there are more than {_MAX_FILES} requirements files")
        for line in _lines(_read(path, name)):
            self._take_line(line, os.path.dirname(path))

    def _take_line(self, line: str, folder: str) -> None:
        """Parses a requirement, or options; a requirement with options of its own is refused."""
        words = line.split(" ")
        first_option = next(
            (at for at, word in enumerate(words) if word.startswith("-")), len(words)
        )
        requirement, options = " ".join(words[:first_option]), " ".join(words[first_option:])
        try:
            if requirement and options:
                option = re.split(r"[=\s]", options)[0]
                raise Refused(_REFUSED.get(option, "{} is not supported here").format(option))
            if options:
                self.take(shlex.split(options), folder)
            else:
                self._take_requirement(requirement)
        except ValueError as cause:
            raise Refused(f"in the line {line!r}: {cause}") from None


def _is_local(text: str) -> bool:
    """Reports whether a requirement names a file or a folder."""
    if _file_scheme.search(text):
        return True
    if "://" in text:
        return False
    name = text.partition(";")[0].strip()
    return "/" in name or name.startswith((".", "~", "-")) or name.lower().endswith(_ARCHIVES)


def _read(path: str, name: str) -> str:
    try:
        with open(path, "rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
    except OSError as cause:
        raise Refused(f"Could not open requirements file: {cause.strerror}: {name!r}") from None
    if len(data) > _MAX_FILE_BYTES:
        raise Refused(f"{name}: the file is too large for a list of requirements")
    return data.decode("utf-8-sig", "replace")


def _lines(text: str) -> Iterator[str]:
    """Yields the lines of a requirements file as pip sees them: joined, without comments, with
    variables substituted.
    """
    joined = ""
    for line in [*text.splitlines(), ""]:
        if line.endswith("\\") and not _comment.match(line):
            joined += line[:-1]
            continue
        line = _comment.sub("", joined + line).strip()
        joined = ""
        if line:
            yield _variable.sub(lambda found: os.environ.get(found[1]) or found[0], line)
