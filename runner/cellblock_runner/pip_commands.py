"""Pip commands: carries out pip command lines. The host installs; information about installed
packages is read from their metadata, in pip's format.

There is no pip in a session, and nothing here needs one. `importlib.metadata` is imported on first
use.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from . import packages, pip_arguments
from .host_calls import HostCallError, ask
from .pip_arguments import Refused

# The reported version if no pip is installed. It is valid, for programs that parse it.
_OWN_VERSION = "0+cellblock"
# Omitted from `freeze`, as in pip.
_TOOLS = frozenset(("pip", "setuptools", "wheel", "distribute"))

_separators = re.compile(r"[-_.]+")
_name = re.compile(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)")

_HELP = """Usage: pip <command> [options]

Commands that are available in this session:
  install    Install packages from the index of the server: pip install NAME ...,
             pip install -r FILE
  list       List installed packages.
  show       Show information about installed packages.
  freeze     Output installed packages in requirements format.
"""


class Reply(NamedTuple):
    """The result of a pip command: its exit code, its output, and the folders that were added."""

    code: int
    out: str = ""
    err: str = ""
    added: Sequence[str] = ()


def carry_out(arguments: Sequence[str], folder: str) -> Reply:
    """Carries out the arguments of a `pip` command line in `folder`. Raises only interrupts."""
    try:
        command, rest = pip_arguments.split_command(arguments)
        if not command and any(word in ("-V", "--version") for word in rest):
            return Reply(0, _version())
        if command in ("", "help") or "-h" in rest or "--help" in rest:
            return Reply(0, _HELP)
        if command not in _COMMANDS:
            raise Refused(
                _OTHER_COMMANDS.get(
                    command, f'unknown command "{command}"; available: {", ".join(_COMMANDS)}'
                )
            )
        return _COMMANDS[command](rest, folder)
    except (Refused, HostCallError, packages.NotAFolder) as cause:
        return Reply(1, "", f"ERROR: {cause}\n")


def _install(arguments: Sequence[str], folder: str) -> Reply:
    wanted = pip_arguments.read_install(arguments, folder)
    if not wanted.requirements:
        return Reply(0, "", "WARNING: the requirements files contain no requirements\n")
    answer = ask("install", requirements=wanted.requirements, options={"upgrade": wanted.upgrade})
    text = _ended(str(answer.get("text") or ""))
    if answer.get("ok") is not True:
        return Reply(1, "", text or "ERROR: the server did not install anything\n")
    added = answer.get("paths") or []
    if not isinstance(added, list):
        raise packages.NotAFolder(f"{added!r} is not a list of folders")
    loaded = packages.add(added)
    return Reply(0, "" if wanted.quiet else text, _about_loaded(loaded), added)


def _about_loaded(names: Sequence[str]) -> str:
    preloaded = packages.preloaded(names)
    others = [name for name in names if name not in preloaded]
    lines = []
    if others:
        verb = "was" if len(others) == 1 else "were"
        lines.append(
            f"WARNING: {', '.join(others)} {verb} imported before."
            " Reset the session to use what is installed now.\n"
        )
    if preloaded:
        verb = "is" if len(preloaded) == 1 else "are"
        lines.append(
            f"WARNING: {', '.join(preloaded)} {verb} preloaded here; a reset does not change that. "
            "Only a new process (!python) uses what is installed now.\n"
        )
    return "".join(lines)


def _ended(text: str) -> str:
    return text if not text or text.endswith("\n") else text + "\n"


def _list(arguments: Sequence[str], _folder: str) -> Reply:
    options = _read_options(
        arguments,
        {"--format"},
        {"-l", "--local", "--user", "--include-editable", "--exclude-editable"},
    )
    if options.words:
        raise Refused("list takes no names; use show NAME for one package")
    rows = [(found.metadata["Name"], found.version) for found in _installed().values()]
    form = options.values.get("--format", "columns")
    if form == "json":
        return Reply(
            0, json.dumps([{"name": name, "version": version} for name, version in rows]) + "\n"
        )
    if form == "freeze":
        return Reply(0, "".join(f"{name}=={version}\n" for name, version in rows))
    if form != "columns":
        raise Refused(
            f"option --format: invalid choice: {form!r} (choose from 'columns', 'freeze', 'json')"
        )
    return Reply(0, _columns([("Package", "Version"), *rows]))


def _columns(rows: Sequence[tuple[str, str]]) -> str:
    first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
    lines = [f"{name:<{first}} {version}" for name, version in rows]
    lines.insert(1, "-" * first + " " + "-" * second)
    return "".join(line.rstrip() + "\n" for line in lines)


def _freeze(arguments: Sequence[str], _folder: str) -> Reply:
    options = _read_options(
        arguments, set(), {"-l", "--local", "--user", "--all", "--exclude-editable", "--strict"}
    )
    left_out = frozenset() if "--all" in options.flags else _TOOLS
    return Reply(
        0,
        "".join(
            _pinned(found) + "\n" for name, found in _installed().items() if name not in left_out
        ),
    )


def _pinned(found: Any) -> str:
    """Returns the requirement that installs exactly this: by its URL, if it came from one."""
    name = found.metadata["Name"]
    try:
        source = json.loads(found.read_text("direct_url.json") or "{}")
        address = source.get("url")
        if address and "vcs_info" in source:
            address = f"{source['vcs_info']['vcs']}+{address}@{source['vcs_info']['commit_id']}"
    except (ValueError, KeyError, TypeError, AttributeError, OSError):
        address = None
    return f"{name} @ {address}" if address else f"{name}=={found.version}"


def _show(arguments: Sequence[str], _folder: str) -> Reply:
    options = _read_options(arguments, set(), {"-f", "--files", "--verbose", "-v", "--strict"})
    if not options.words:
        return Reply(1, "", "WARNING: ERROR: Please provide a package name or names.\n")
    with_files = bool(options.flags & {"-f", "--files"})
    installed = _installed()
    known = [installed[_normal(name)] for name in options.words if _normal(name) in installed]
    missing = sorted(name for name in options.words if _normal(name) not in installed)
    warning = f"WARNING: Package(s) not found: {', '.join(missing)}\n" if missing else ""
    return Reply(
        0 if known else 1,
        "---\n".join(_describe(found, installed, with_files) for found in known),
        warning,
    )


def _describe(found: Any, installed: dict[str, Any], with_files: bool) -> str:
    about = found.metadata
    own = _normal(about["Name"])
    required = [
        installed[name].metadata["Name"] if name in installed else name
        for name in _required(found, installed)
    ]
    dependents = [
        other.metadata["Name"] for other in installed.values() if own in _required(other, installed)
    ]
    lines = [
        f"Name: {about['Name']}",
        f"Version: {found.version}",
        f"Summary: {about.get('Summary', '')}",
        f"Home-page: {about.get('Home-page') or _home_page(about.get_all('Project-URL') or ())}",
        f"Author: {about.get('Author', '')}",
        f"Author-email: {about.get('Author-email', '')}",
        f"License: {about.get('License-Expression') or about.get('License', '')}",
        f"Location: {found.locate_file('')}",
        f"Requires: {', '.join(sorted(required, key=str.lower))}",
        f"Required-by: {', '.join(sorted(dependents, key=str.lower))}",
    ]
    if with_files:
        lines += ["Files:", *(f"  {path}" for path in sorted(map(str, found.files or ())))]
    return "".join(line.rstrip() + "\n" for line in lines)


def _home_page(addresses: Iterable[str]) -> str:
    for entry in addresses:
        label, _, address = entry.partition(",")
        if re.sub(r"[\W_]", "", label).lower() == "homepage":
            return address.strip()
    return ""


def _required(found: Any, installed: dict[str, Any]) -> set[str]:
    """Returns the names that a package requires here. A condition that does not mention extras is
    assumed to hold if the required package is installed.
    """
    names = set()
    for requirement in found.requires or ():
        text, _, marker = requirement.partition(";")
        match = _name.match(text)
        if match is None or "extra" in marker:
            continue
        name = _normal(match[1])
        if not marker or name in installed:
            names.add(name)
    return names


def _installed() -> dict[str, Any]:
    """Returns all distributions by their normalised names, in order. If several have the same name,
    the first on the path is used.
    """
    from importlib import metadata

    found: dict[str, Any] = {}
    for distribution in metadata.distributions():
        try:
            name, version = distribution.metadata["Name"], distribution.version
        except Exception:
            continue  # Not a distribution, or an incomplete one.
        if name and version:
            found.setdefault(_normal(name), distribution)
    return dict(sorted(found.items()))


def _normal(name: str) -> str:
    return _separators.sub("-", name).lower()


def _version() -> str:
    pip = _installed().get("pip")
    version, place = (
        (pip.version, str(pip.locate_file("pip")))
        if pip
        else (_OWN_VERSION, os.path.dirname(__file__))
    )
    return f"pip {version} from {place} (python {sys.version_info[0]}.{sys.version_info[1]})\n"


class _Options(NamedTuple):
    words: list[str]
    flags: set[str]
    values: dict[str, str]


def _read_options(arguments: Sequence[str], with_value: set[str], flags: set[str]) -> _Options:
    """Parses the arguments of a command that has these options besides the general ones."""
    read = _Options([], set(), {})
    for option, value in pip_arguments.split_options(
        arguments, with_value | pip_arguments.GENERAL_WITH_VALUE
    ):
        if not option:
            read.words.append(value)
        elif option in with_value:
            read.values[option] = value
        elif option in flags:
            read.flags.add(option)
        else:
            pip_arguments.check_option(option)
    return read


_COMMANDS: dict[str, Callable[[Sequence[str], str], Reply]] = {
    "install": _install,
    "list": _list,
    "show": _show,
    "freeze": _freeze,
}

_OTHER_COMMANDS = {
    "uninstall": (
        "uninstall is not available here: installed packages are read-only."
        " Undo the installation instead"
    ),
    **dict.fromkeys(
        (
            "download wheel index search cache config lock compile sync tree check hash inspect"
            " debug completion"
        ).split(),
        "this command is not available here; install, list, show and freeze are",
    ),
}
