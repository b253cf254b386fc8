"""The installer that runs inside a hidden sandbox.

It reads request.json, does one of three errands with uv, and writes answer.json. Its working folder
belongs to it alone.

    resolve   which versions and hashes the requirements come to; wheels only, so no code of a package runs
    install   exactly the wheels that were resolved, each written as one stream of files
    build     everything, building what has no wheel; this runs code of packages, so nothing here is believed afterwards

Everything is a file or a variable; no text of a request becomes part of a command line or of code.
"""

from __future__ import annotations

import csv
import errno
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import sysconfig
from collections import Counter
from typing import Any

TARGET = "target"
CACHE = "cache"
# What uv notes about where a wheel came from. Whoever gets the same wheel later must not learn the
# address that somebody else used.
ORIGIN = ("direct_url.json", "uv_cache.json", "uv_build.json")
# How uv says that there would be a package if it were allowed to build it.
NO_WHEEL = re.compile(
    r"no usable wheels|no wheels with a matching|Wheels are required|building (from source|source distributions) is disabled"
)
# How uv says that the disk is full.
NO_ROOM = re.compile(r"No space left on device|os error 28")
NOISE = re.compile(
    r"^(Using (CPython|Python) |Resolved \d+ |Prepared \d+ |warning: Failed to hardlink)"
)


class Failed(Exception):
    """uv ended badly. The text is what it said."""


def main() -> None:
    with open("request.json", encoding="utf-8") as file:
        request = json.load(file)
    errands = {"resolve": resolve, "install": install, "build": build}
    try:
        answer = errands[request["step"]](request)
    except (Failed, OSError) as failure:
        words = str(failure)
        no_room = getattr(failure, "errno", None) == errno.ENOSPC or bool(NO_ROOM.search(words))
        if not no_room and not isinstance(failure, Failed):
            raise
        remove_all()
        answer = {"failed": words, "no_wheel": bool(NO_WHEEL.search(words)), "no_room": no_room}
    with open("answer.json", "w", encoding="utf-8") as file:
        json.dump(answer, file)


def resolve(request: dict[str, Any]) -> dict[str, Any]:
    options = ["--only-binary", ":all:", "--generate-hashes", "--no-annotate", "--no-header"]

    def compiled(wanted: list[str]) -> str:
        # The file with the requirements, then the option for the constraints.
        return uv(request, ["pip", "compile", *options, "--python", sys.executable, *wanted])

    try:
        pins = read_pins(with_constraints(request, compiled))
    except Failed as failure:
        if NO_WHEEL.search(str(failure)):
            refuse_if_replacing_helps(request, compiled)
        raise
    return {"tag": platform_tag(), "pins": pins, "held_back": held_back(request, pins, compiled)}


def refuse_if_replacing_helps(request: dict[str, Any], compiled: Any) -> None:
    """Fails with the packages of the session that are in the way, if there are wheels without them.

    Otherwise the newest version without wheels would be built that has nothing to say about them:
    one of ten years ago.
    """
    if not request["present"]:
        return
    try:
        free, replaced = with_preferences(request, compiled, request["named"])
    except Failed:
        return
    if replaced:
        has = ", ".join(f"{one['name']} {one['version']}" for one in replaced)
        wanted = {name: free[name] for name in request["named"] if name in free}
        wanted |= {one["name"]: one["wanted"] for one in replaced}
        together = ", ".join(f'"{name}=={version}"' for name, version in wanted.items())
        raise Failed(
            f"No version that has a wheel can be used with {has}, which the session has."
            f" To replace what is in the way, install {together} together."
        )


def held_back(
    request: dict[str, Any], pins: list[dict[str, Any]], compiled: Any
) -> list[dict[str, Any]]:
    """Names what was asked for and is older than it would be if packages of the session could be
    replaced.
    """
    present, chosen = request["present"], versions_of(pins)
    new = [
        name for name in request["named"] if name in chosen and chosen[name] != present.get(name)
    ]
    if not present or not new:
        return []
    try:
        # The index has just been asked for these, so that this costs next to nothing.
        newest = versions_of(read_pins(compiled(["wanted.txt", "--no-deps"])))
        older = [name for name in new if newest.get(name, chosen[name]) != chosen[name]]
        if not older:
            return []
        free, replaced = with_preferences(request, compiled, older)
    except Failed:
        return []
    held = [name for name in older if free.get(name, chosen[name]) != chosen[name]]
    return [
        {"name": name, "version": chosen[name], "newer": free[name], "replaced": replaced}
        for name in held
        if replaced
    ]


def with_preferences(
    request: dict[str, Any], compiled: Any, wanted: list[str]
) -> tuple[dict[str, str], list[Any]]:
    """Returns the versions that the requirements come to if what the session has is preferred and
    replaced only where it must be, and what is replaced beside those that are wanted by name.
    """
    present = request["present"]
    write_lines("preferred.txt", [f"{name}=={version}" for name, version in present.items()])
    compiled(["wanted.txt", "--quiet", "--output-file", "preferred.txt"])
    with open("preferred.txt", encoding="utf-8") as file:
        free = versions_of(read_pins(file.read()))
    replaced = [
        {"name": name, "version": present[name], "wanted": version}
        for name, version in free.items()
        if name in present and present[name] != version and name not in wanted
    ]
    return free, replaced


def versions_of(pins: list[dict[str, Any]]) -> dict[str, str]:
    return {pin["name"]: pin["version"] for pin in pins if pin["version"]}


def install(request: dict[str, Any]) -> list[dict[str, str]]:
    remove_all()
    lines = []
    for pin in request["pins"]:
        what = f"{pin['name']} @ {pin['url']}" if pin["url"] else f"{pin['name']}=={pin['version']}"
        lines.append(" ".join([what, *(f"--hash={digest}" for digest in pin["hashes"])]))
    write_lines("pins.txt", lines)
    options = ["--no-deps", "--require-hashes", "--only-binary", ":all:", "-r", "pins.txt"]
    install_into_target(request, options)
    found = {normalised(name): (name, version, folder) for name, version, folder in distributions()}
    missing = [pin["name"] for pin in request["pins"] if pin["name"] not in found]
    if missing:
        raise Failed("uv did not install " + ", ".join(missing))
    return pack([found[pin["name"]] for pin in request["pins"]])


def build(request: dict[str, Any]) -> list[dict[str, str]]:
    def installed(wanted: list[str]) -> None:
        shutil.rmtree(TARGET, ignore_errors=True)
        install_into_target(request, ["-r", *wanted])

    with_constraints(request, installed)
    present = request["present"]
    return pack(
        [found for found in distributions() if present.get(normalised(found[0])) != found[1]]
    )


def remove_all() -> None:
    """Gives the room back that earlier errands took: what they packed has been fetched by the
    host.
    """
    for folder in (TARGET, CACHE, "temporary"):
        shutil.rmtree(folder, ignore_errors=True)
    for name in os.listdir():
        if re.fullmatch(r"package-\d+\.stream", name):
            os.unlink(name)


def with_constraints(request: dict[str, Any], attempt: Any) -> Any:
    """Tries with every version kept that the session has; then with those free to change that were
    asked for by name.

    What was not asked for by name is never replaced: other packages of the session rely on it.
    """
    write_lines("wanted.txt", request["requirements"])
    present = request["present"]
    others = {name: version for name, version in present.items() if name not in request["named"]}
    kept = [others] if request["upgrade"] or len(others) == len(present) else [present, others]
    for last, versions in enumerate(kept, start=1):
        write_lines("constraints.txt", [f"{name}=={version}" for name, version in versions.items()])
        constraints = ["-c", "constraints.txt"] if versions else []
        try:
            return attempt(["wanted.txt", *constraints])
        except Failed:
            if last == len(kept):
                raise


def install_into_target(request: dict[str, Any], options: list[str]) -> None:
    place = ["--target", TARGET, "--python", sys.executable, "--compile-bytecode"]
    uv(request, ["pip", "install", *place, *options])
    # What is in the target has other names there. Without them, a file that was packed and removed
    # gives its room back.
    shutil.rmtree(CACHE, ignore_errors=True)


def uv(request: dict[str, Any], arguments: list[str]) -> str:
    here = os.getcwd()
    variables = {
        name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH", "LANG") if name in os.environ
    }
    os.makedirs("temporary", exist_ok=True)
    variables |= {
        "HOME": here,
        "TMPDIR": os.path.join(here, "temporary"),
        "UV_CACHE_DIR": os.path.join(here, CACHE),
        "UV_NO_CONFIG": "1",
        "UV_NO_PROGRESS": "1",
        "UV_PYTHON_DOWNLOADS": "never",
        "UV_LINK_MODE": "hardlink",
        "NO_COLOR": "1",
        # Compiled modules are moved, so they must be good without a look at their source's time.
        "PYC_INVALIDATION_MODE": "UNCHECKED_HASH",
        "GIT_TERMINAL_PROMPT": "0",
    }
    variables |= request["variables"]
    if request["certificates"]:
        certificates = os.path.join(here, request["certificates"])
        variables |= {"SSL_CERT_FILE": certificates, "GIT_SSL_CAINFO": certificates}
    else:
        variables |= {"UV_SYSTEM_CERTS": "true", "UV_NATIVE_TLS": "true"}
    try:
        done = subprocess.run(
            [request["uv"], *arguments],
            env=variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
        )
    except OSError as error:
        # A program that is there and is said to be missing was made for another C library.
        needs = "images need the GNU C library, or a uv that needs none"
        raise Failed(f"the server's uv does not run here ({error.strerror}); {needs}") from None
    if done.returncode == -signal.SIGKILL:
        # Nobody else ends it.
        raise Failed(
            "the kernel ended uv because memory ran out; the server's setting package_memory allows more"
        )
    if done.returncode != 0:
        said = done.stderr.decode("utf-8", "replace").replace(here + "/", "")
        lines = [line for line in said.splitlines() if not NOISE.match(line)]
        raise Failed("\n".join(lines).strip() or f"uv ended with status {done.returncode}")
    return done.stdout.decode("utf-8", "replace")


def read_pins(compiled: str) -> list[dict[str, Any]]:
    pins = []
    for line in compiled.replace("\\\n", " ").splitlines():
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        digests = [word.removeprefix("--hash=") for word in words if word.startswith("--hash=")]
        name, _, version = words[0].partition("==")
        url = words[2] if len(words) > 2 and words[1] == "@" else None
        name = normalised(name.partition("[")[0])
        pins.append(
            {"name": name, "version": None if url else version, "url": url, "hashes": digests}
        )
    return pins


def distributions() -> list[tuple[str, str, str]]:
    """Returns name, version and describing folder of everything in the target."""
    found = []
    for folder in sorted(os.listdir(TARGET)):
        name, dash, version = folder.removesuffix(".dist-info").partition("-")
        if folder.endswith(".dist-info") and dash:
            found.append((name, version, folder))
    return found


def pack(chosen: list[tuple[str, str, str]]) -> list[dict[str, str]]:
    """Writes one stream for each distribution and removes its files on the way, so that the room is
    needed once.
    """
    files = [files_of(folder) for _, _, folder in chosen]
    owners = Counter(path for paths in files for path in paths)
    for number, paths in enumerate(files):
        with open(f"package-{number}.stream", "wb") as stream:
            for path in paths:
                write_file(stream, path)
                owners[path] -= 1
                if owners[path] == 0:
                    os.unlink(os.path.join(TARGET, path))
            stream.write(json.dumps({"end": len(paths)}).encode() + b"\n")
    return [{"name": normalised(name), "version": version} for name, version, _ in chosen]


def files_of(folder: str) -> list[str]:
    """Returns the plain files that a distribution's own list names, and their bytecode."""
    paths = set()
    for path in listed_files(folder):
        parent, name = os.path.split(path)
        paths.add(path)
        if name.endswith(".py"):
            compiled = f"{name.removesuffix('.py')}.{sys.implementation.cache_tag}.pyc"
            paths.add(os.path.join(parent, "__pycache__", compiled))
    return sorted(path for path in paths if is_plain_file(path))


def listed_files(folder: str) -> list[str]:
    """Reads the list, after it was written anew without the notes about the origin."""
    place = os.path.join(TARGET, folder, "RECORD")
    with open(place, encoding="utf-8", newline="") as record:
        rows = [row for row in csv.reader(record) if row]
    rows = [row for row in rows if row[0] not in [f"{folder}/{note}" for note in ORIGIN]]
    os.unlink(place)
    with open(place, "w", encoding="utf-8", newline="") as record:
        csv.writer(record, lineterminator="\n").writerows(rows)
    return [os.path.normpath(row[0]) for row in rows]


def is_plain_file(path: str) -> bool:
    if os.path.isabs(path) or path.split("/")[0] == "..":
        raise Failed(f"the package wants a file outside of its folder: {path}")
    try:
        return stat.S_ISREG(os.lstat(os.path.join(TARGET, path)).st_mode)
    except OSError:
        return False


def write_file(stream: Any, path: str) -> None:
    full = os.path.join(TARGET, path)
    found = os.stat(full)
    header = {"path": path, "size": found.st_size, "program": bool(found.st_mode & 0o100)}
    stream.write(json.dumps(header).encode() + b"\n")
    with open(full, "rb") as source:
        shutil.copyfileobj(source, stream, 1 << 20)


def platform_tag() -> str:
    """Everything that decides what is installed for a wheel: which one fits, and which Python its
    scripts name.
    """
    libc = os.confstr("CS_GNU_LIBC_VERSION") if "CS_GNU_LIBC_VERSION" in os.confstr_names else None
    interface = sysconfig.get_config_var("SOABI") or sys.implementation.cache_tag
    return " ".join(
        [str(interface), sysconfig.get_platform(), libc or "another libc", sys.executable]
    )


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def write_lines(name: str, lines: list[str]) -> None:
    with open(name, "w", encoding="utf-8") as file:
        file.writelines(line + "\n" for line in lines)


main()
