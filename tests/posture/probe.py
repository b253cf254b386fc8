"""Facts that the kernel reports to a process about itself, independent of the machine.

Run in a session, in its threads, and after exec; prints one JSON object, which `tests/posture.rs`
compares with the expectation. It must not change anything, and uses the standard library alone.
"""

import ctypes
import json
import os
import resource
import socket
import stat

# Host folders that are bound if they exist; the expectation has their flags, not their names.
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc/")
_OURS_IN_ETC = (
    "/etc/passwd",
    "/etc/group",
    "/etc/hosts",
    "/etc/hostname",
    "/etc/resolv.conf",
    "/etc/nsswitch.conf",
)
# Mount options for access times depend on the host.
_HOSTS_CHOICE = {"relatime", "noatime", "nodiratime", "lazytime", "strictatime"}
_PR_GET_DUMPABLE = 3
_PERSONALITY_QUERY = 0xFFFFFFFF


def _read(path):
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()


def _status(path):
    return dict(line.split(":", 1) for line in _read(path).splitlines() if ":" in line)


def _ids(path):
    """Returns the id map without the outer id, which differs between sessions."""
    return [[int(word) for word in line.split()][::2] for line in _read(path).splitlines()]


def threads():
    names = (
        "Uid",
        "Gid",
        "Groups",
        "CapInh",
        "CapPrm",
        "CapEff",
        "CapBnd",
        "CapAmb",
        "NoNewPrivs",
        "Seccomp",
        "Seccomp_filters",
    )
    found = []
    for task in os.listdir("/proc/self/task"):
        status = _status(f"/proc/self/task/{task}/status")
        facts = {name: " ".join(status[name].split()) for name in names}
        if facts not in found:
            found.append(facts)
    return found


def _mount(line):
    left, right = line.split(" - ")
    place, options = left.split(" ")[4:6]
    kind, _, special = right.split(" ")[:3]
    kept = sorted(set(options.split(",")) - _HOSTS_CHOICE)
    if place.startswith(_SYSTEM) and place not in _OURS_IN_ETC:
        return "a system folder", kept
    if place.startswith("/proc/"):
        return f"a cover in /proc ({'nothing' if kind == 'devtmpfs' else 'an empty folder'})", kept
    if place.startswith("/opt/cellblock/"):
        # Their number depends on the location of the host's Python.
        return "the environment", kept
    if kind == "tmpfs":
        kept += sorted(
            word for word in special.split(",") if word.startswith(("size=", "nr_inodes="))
        )
    if kind == "devpts":
        kept = sorted({*kept, *special.split(",")} - {"rw"}) + ["rw"] * ("rw" in kept)
    return place, ([kind] if kind in ("tmpfs", "proc", "devpts") else ["of the host"]) + kept


def mounts():
    found = {}
    for line in _read("/proc/self/mountinfo").splitlines():
        place, how = _mount(line)
        if found.setdefault(place, how) != how:
            found[place + " (differently)"] = how
    return dict(sorted(found.items()))


def _kind(number):
    kind = os.fstat(number).st_mode
    for is_kind, name in (
        (stat.S_ISFIFO, "pipe"),
        (stat.S_ISSOCK, "socket"),
        (stat.S_ISDIR, "folder"),
    ):
        if is_kind(kind):
            return name
    return os.readlink(f"/proc/self/fd/{number}")


def descriptors():
    """Returns the kinds of the three standard descriptors in order, then of all others."""
    kinds = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            kinds[int(name)] = _kind(int(name))
        except OSError:
            # The descriptor of the listing itself.
            continue
    return [
        [kinds.get(number) for number in range(3)],
        sorted(kind for number, kind in kinds.items() if number > 2),
    ]


def _says_something(path):
    try:
        if os.path.isdir(path):
            return bool(os.listdir(path))
        with open(path, "rb") as file:
            return bool(file.read(1))
    except OSError:
        return False


def facts():
    libc = ctypes.CDLL(None, use_errno=True)
    names = ("CORE", "NOFILE", "FSIZE", "MEMLOCK", "SIGPENDING", "MSGQUEUE", "NPROC", "DATA")
    limits = [f"RLIMIT_{name}" for name in names]
    top = [name for name in os.listdir("/proc") if not name.isdigit()]
    return {
        "cgroup": sorted(
            {line.split(":", 2)[2] for line in _read("/proc/self/cgroup").splitlines()}
        ),
        "descriptors": descriptors(),
        "devices": sorted(os.listdir("/dev")),
        "dumpable": libc.prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0),
        "environment": sorted(os.environ),
        "gid_map": _ids("/proc/self/gid_map"),
        "host name": socket.gethostname(),
        "interfaces": sorted(
            line.split(":")[0].strip() for line in _read("/proc/net/dev").splitlines()[2:]
        ),
        "limits": {name: list(resource.getrlimit(getattr(resource, name))) for name in limits},
        "mounts": mounts(),
        "out of memory score": int(_read("/proc/self/oom_score_adj")),
        "personality": libc.personality(ctypes.c_ulong(_PERSONALITY_QUERY)),
        "proc": sorted(name for name in top if _says_something(f"/proc/{name}")),
        "processes": sorted(
            {_read(f"/proc/{name}/comm").strip() for name in os.listdir("/proc") if name.isdigit()}
        ),
        "root": sorted(name for name in os.listdir("/") if not name.startswith("lib")),
        "routes": [line.split()[0] for line in _read("/proc/net/route").splitlines()[1:]],
        "terminal": _read("/proc/self/stat").rsplit(")", 1)[1].split()[4],
        "threads": threads(),
        "uid_map": _ids("/proc/self/uid_map"),
        "working folder": os.getcwd(),
    }


if __name__ == "__main__":
    print(json.dumps(facts()))
