"""The checks of `run`, inside the virtual machine: every way in which systemd starts Cellblock.

Each context says how the program is started, which layers `doctor` must report, and where the
control groups of sessions must be. In all of them limits must hold and nothing may be left after
`kill -9`.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
import traceback
import urllib.request
from pathlib import Path

PROGRAM = "/usr/local/bin/cellblock"
CGROUPS = Path("/sys/fs/cgroup")
MEMORY = 256 << 20
# What servers on standard input and output log.
LOG = Path("/tmp/servers.log")
ADDRESS = "http://127.0.0.1:8000"
ENVIRONMENT = ["--environment", "minimal"]
# Emulation on a busy host is slow. Nothing here waits this long unless it fails.
LIMIT = 300
# systemd 254 puts the main process of a unit into a group of its own, if asked to.
SYSTEMD = int(re.search(r"systemd (\d+)", subprocess.getoutput("systemctl --version"))[1])
HAS_SUBGROUPS = SYSTEMD >= 254
LAYERS = [
    "namespaces",
    "identity",
    "privileges",
    "system-calls",
    "landlock",
    "network",
    "resources",
]
SCOPE = r"/cellblock-\d+-\d+\.scope/cellblock-\d+-\d+/"
USER_SCOPE = r"^/user\.slice/user-1000\.slice/user@1000\.service/app\.slice" + SCOPE
SYSTEM_SCOPE = r"^/system\.slice" + SCOPE
TRANSIENT_SERVICE = r"^/system\.slice/run-[^/]*\.service/cellblock-\d+-\d+/"


class Failed(Exception):
    """A check that did not hold."""


def expect(holds, what):
    if not holds:
        raise Failed(what)


def unit(*properties, user=None, login=False):
    """Runs a command as a transient service, or as somebody's login session."""
    command = ["systemd-run", "--quiet", "--wait", "--pipe", "--collect"]
    command += [f"--property=User={user or 'root'}"]
    command += ["--property=PAMName=login"] if login else [f"--setenv=HOME={home(user)}"]
    return command + [f"--property={one}" for one in properties]


def home(user):
    return f"/home/{user}" if user else "/root"


def run(command, **options):
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, **options)


class Server:
    """A server on standard input and output."""

    def __init__(self, how, *flags, memory="256M"):
        command = [*how, PROGRAM, "mcp", *ENVIRONMENT, "--memory", memory, *flags]
        with LOG.open("a") as log:
            pipe = subprocess.PIPE
            self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, text=True)
        self.number = 0
        client = {"name": "vm", "version": "1"}
        self.ask(
            "initialize",
            {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": client},
        )
        self.send({"jsonrpc": "2.0", "method": "notifications/initialized"})

    def send(self, message):
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()

    def ask(self, method, params):
        self.number += 1
        self.send({"jsonrpc": "2.0", "id": self.number, "method": method, "params": params})
        for line in self.process.stdout:
            answer = json.loads(line)
            if answer.get("id") == self.number:
                expect("result" in answer, answer)
                return answer["result"]
        raise Failed(f"the server ended with {self.process.wait()}")

    def call(self, tool, **arguments):
        return text_of(self.ask("tools/call", {"name": tool, "arguments": arguments}))

    def cell(self, code):
        return self.call("execute_ipython_cell", code=code)

    def end(self):
        self.process.stdin.close()
        return self.process.wait(LIMIT)


def text_of(result):
    return "\n".join(part.get("text", "") for part in result["content"])


def doctor(how):
    """Returns the status of `doctor` and the state of each layer."""
    said = run([*how, PROGRAM, "doctor", "--json"])
    expect(said.stdout, f"doctor says nothing, status {said.returncode}: {said.stderr}")
    told = json.loads(said.stdout)
    return said.returncode, told


def expect_layers(how, **differences):
    """Expects all layers to be enforced but those that are named."""
    status, told = doctor(how)
    expect(status == 0 and "layers" in told, f"doctor ended with {status}: {told}")
    states = {name: layer["state"] for name, layer in told["layers"].items()}
    expected = {name: "enforced" for name in LAYERS} | differences
    expect(states == expected, f"layers {states}; {told['layers']['resources']}")
    return told["layers"]


def groups():
    """Every control group that Cellblock has made."""
    found = [Path(folder) / name for folder, names, _ in os.walk(CGROUPS) for name in names]
    return [group for group in found if "cellblock-" in group.name]


def processes():
    """Every process of Cellblock, with its group."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            name, group = (
                (folder / "comm").read_text().strip(),
                (folder / "cgroup").read_text().strip()[3:],
            )
            is_dead = " Z " in (folder / "stat").read_text().rpartition(")")[2][:4]
        except OSError:
            continue
        if (name == "cellblock" or name.startswith("cb-")) and not is_dead:
            found[int(folder.name)] = (name, group)
    return found


def wait_until(holds, what):
    deadline = time.monotonic() + LIMIT
    while not holds():
        expect(time.monotonic() < deadline, what() if callable(what) else what)
        time.sleep(0.2)


def expect_nothing_left():
    wait_until(lambda: not groups() and not processes(), lambda: f"left: {groups()} {processes()}")
    left = run(
        ["systemctl", "list-units", "--all", "--plain", "--no-legend", "cellblock-*.scope"]
    ).stdout
    expect(not left, f"units are left: {left}")


def expect_limits(place):
    """Expects the group of a live session below `place`, with all its limits."""
    sessions = [
        Path(folder) for folder, _, _ in os.walk(CGROUPS) if re.search(r"/session-\d+$", folder)
    ]
    live = [group for group in sessions if (group / "cgroup.procs").read_text()]
    expect(live, f"no session is in a group of its own: {processes()}")
    for group in live:
        path = "/" + str(group.relative_to(CGROUPS))
        expect(re.search(place, path), f"a session is in {path}")
        limits = {
            name: (group / name).read_text().strip()
            for name in ("memory.max", "pids.max", "cpu.max")
        }
        expect(limits["memory.max"] == str(MEMORY), limits)
        expect(limits["pids.max"] != "max" and not limits["cpu.max"].startswith("max"), limits)


def expect_memory_limit(cell):
    """Expects the kernel to end what uses too much, and the caller to hear why."""
    said = cell("kept = bytearray(600 << 20)")
    expect("256 MiB of memory" in said, f"too much memory: {said}")


def works_on_stdio(how, place, layers):
    """The checks that every context passes."""
    expect_layers(how, **layers)
    expect_nothing_left()
    server = Server(how)
    expect("45" in server.cell("print(45)"), "the first cell")
    expect_limits(place)
    expect_memory_limit(server.cell)
    for pid, (name, _) in processes().items():
        if name == "cellblock":
            os.kill(pid, 9)
    expect_nothing_left()
    server.process.wait(LIMIT)


def user_login():
    works_on_stdio(unit(user="u", login=True), USER_SCOPE, {"identity": "reduced"})


def root_login():
    works_on_stdio(unit(login=True), SYSTEM_SCOPE, {})


def delegated_scope():
    how = [
        *unit(user="u", login=True),
        "systemd-run",
        "--user",
        "--quiet",
        "--scope",
        "--property=Delegate=yes",
    ]
    place = r"^/user\.slice/.*/run-[^/]*\.scope/cellblock-\d+-\d+/"
    works_on_stdio(how, place, {"identity": "reduced"})
    # Removing its own groups must not kill a program that ends by itself.
    said = run([*how, PROGRAM, "run", *ENVIRONMENT, "-c", "print(45)"])
    expect((said.returncode, said.stdout) == (0, "45\n"), f"run: {said}")
    expect_nothing_left()
    server = Server(how)
    server.cell("x = 1")
    expect(server.end() == 0, "the server did not end with status 0")
    expect_nothing_left()


def delegated_scope_with_daemon():
    how = [
        *unit(user="u", login=True),
        "systemd-run",
        "--user",
        "--quiet",
        "--scope",
        "--property=Delegate=yes",
    ]
    server = Server(how, "--keep-sessions", "on")
    server.cell("x = 1")
    expect_limits(r"^/user\.slice/.*/run-[^/]*\.scope/cellblock-\d+-\d+/")
    expect_memory_limit(server.cell)
    stopped = run([*unit(user="u", login=True), PROGRAM, "daemon", "stop", "mcp", "--now"])
    expect(stopped.returncode == 0, stopped)
    server.end()
    expect_nothing_left()


def delegated_service_of_user():
    works_on_stdio(unit("Delegate=yes", user="u"), TRANSIENT_SERVICE, {"identity": "reduced"})


def delegated_service_of_root():
    works_on_stdio(unit("Delegate=yes"), TRANSIENT_SERVICE, {})


def plain_service_of_root():
    """The unit is not delegated, so its group stays systemd's, and its slice is that of the
    sessions.
    """
    how = unit("Slice=cells.slice")
    server = Server(how)
    server.cell("x = 1")
    expect_limits(r"^/cells\.slice" + SCOPE)
    service = next(CGROUPS.glob("cells.slice/run-*.service"))
    expect(
        not (service / "cgroup.subtree_control").read_text().strip(),
        "controllers of a unit were touched",
    )
    expect(server.end() == 0, "the server did not end with status 0")
    works_on_stdio(unit(), SYSTEM_SCOPE, {})


def service_of_user_without_bus():
    """Nobody can be asked, and the reason says so."""
    layers = expect_layers(unit(user="u"), identity="reduced", resources="reduced")
    why = layers["resources"]["why"]
    expect("no control group is delegated" in why and "/run/user/1000/bus" in why, why)


def limits_of_a_unit():
    """What a unit may use holds for its sessions."""
    server = Server(unit("Delegate=yes", "MemoryMax=400M", "MemorySwapMax=0"), memory="2G")
    said = server.cell("kept = bytearray(1000 << 20)")
    expect(
        "1000" not in server.cell("print(len(kept) >> 20)"), f"more than the unit may use: {said}"
    )
    server.end()
    expect_nothing_left()


def yama():
    for scope in ["1", "2"]:
        Path("/proc/sys/kernel/yama/ptrace_scope").write_text(scope)
        server = Server(unit(user="u", login=True))
        server.cell("x = 1")
        server.cell("x = 2")
        server.call("undo", cells=1)
        expect("1" in server.cell("print(x)"), f"undo under ptrace_scope={scope}")
        server.end()
    Path("/proc/sys/kernel/yama/ptrace_scope").write_text("0")


def refusals_name_a_cure():
    def refused(how, *words):
        status, told = doctor(how)
        expect(status != 0 and "error" in told, f"not refused: {told}")
        for word in words:
            expect(word in f"{told['error']} {told['cure']}", f"{word} is not in {told}")

    refused(unit("RestrictNamespaces=yes"), "user namespace", "RestrictNamespaces=")
    refused(unit("RestrictNamespaces=~net"), "network namespace", "RestrictNamespaces=")
    refused(unit("ProtectSystem=strict", "ReadWritePaths=/root"), "RuntimeDirectory=cellblock")
    limit = Path("/proc/sys/user/max_net_namespaces")
    before = limit.read_text()
    limit.write_text("0")
    refused(unit(user="u", login=True), "network namespace", "user.max_net_namespaces")
    limit.write_text(before)
    # Control: each of them works without what forbids it.
    expect_layers(unit("RestrictNamespaces=no"))


class Service:
    """The unit of docs/service.md, on HTTP."""

    def __init__(self, user=None):
        self.user = user
        shutil.copy("/payload/cellblock.service", "/etc/systemd/system/cellblock.service")
        more = [
            "[Service]",
            "Environment=CELLBLOCK_ENVIRONMENT=minimal CELLBLOCK_MEMORY=256M CELLBLOCK_AUTH=off",
        ]
        more += [f"User={user}"] if user else []
        drop_in = Path("/etc/systemd/system/cellblock.service.d/test.conf")
        drop_in.parent.mkdir(exist_ok=True)
        drop_in.write_text("\n".join(more) + "\n")
        shutil.rmtree("/var/lib/cellblock", ignore_errors=True)
        shutil.copytree(
            Path("/root", ".local/share/cellblock"), "/var/lib/cellblock", symlinks=True
        )
        self.control("daemon-reload")
        self.control("start")
        self.ready()

    def control(self, verb):
        done = run(["systemctl", verb, *([] if verb == "daemon-reload" else ["cellblock"])])
        expect(done.returncode == 0, done)

    def ready(self):
        def is_ready():
            try:
                return urllib.request.urlopen(f"{ADDRESS}/readyz", timeout=LIMIT).status == 200
            except OSError:
                return False

        wait_until(
            is_ready,
            lambda: run(["journalctl", "--no-pager", "-n", "20", "-u", "cellblock"]).stdout,
        )

    def cell(self, code):
        meta = {
            "io.modelcontextprotocol/protocolVersion": "2026-07-28",
            "io.modelcontextprotocol/clientCapabilities": {},
        }
        params = {
            "name": "execute_ipython_cell",
            "arguments": {"code": code, "session_id": "a"},
            "_meta": meta,
        }
        head = {
            "content-type": "application/json",
            "accept": "application/json, text/event-stream",
            "mcp-protocol-version": "2026-07-28",
            "mcp-method": "tools/call",
            "mcp-name": "execute_ipython_cell",
            "mcp-param-session-id": "a",
        }
        body = json.dumps(
            {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
        ).encode()
        request = urllib.request.Request(f"{ADDRESS}/mcp", body, head)
        return text_of(json.load(urllib.request.urlopen(request, timeout=LIMIT))["result"])

    def end(self):
        """Ends the service, then the sessions that it has left to the daemon."""
        self.control("stop")
        how = unit(user=self.user) + ["--setenv=RUNTIME_DIRECTORY=/run/cellblock"]
        stopped = run([*how, PROGRAM, "daemon", "stop", "serve", "--now"])
        expect(stopped.returncode == 0, stopped)
        expect_nothing_left()
        # The unit keeps it, and it belongs to the user of this one.
        shutil.rmtree("/run/cellblock")


def survives_restarts(service, place):
    service.cell("x = 45")
    if place:
        expect_limits(place)
    for verb in ["restart", "restart"]:
        service.control(verb)
        service.ready()
        expect("45" in service.cell("print(x)"), f"the session is gone after {verb}")
    main = run(["systemctl", "show", "--property=MainPID", "--value", "cellblock"]).stdout.strip()
    os.kill(int(main), 9)
    wait_until(lambda: not Path(f"/proc/{main}").exists(), "the server does not end")
    service.ready()
    expect("45" in service.cell("print(x)"), "the session is gone after the server was killed")
    if place:
        expect_memory_limit(service.cell)
    service.end()


def documented_unit_as_root():
    place = r"^/system\.slice/cellblock\.service/cellblock-" if HAS_SUBGROUPS else SYSTEM_SCOPE
    survives_restarts(Service(), place)


def documented_unit_as_user():
    """Before systemd 254 the user's manager is asked, which runs while the user is logged in or
    lingers.
    """
    run(["loginctl", "enable-linger", "u"], check=True)
    wait_until(Path("/run/user/1000/bus").exists, "the manager of the user does not start")
    place = r"^/system\.slice/cellblock\.service/cellblock-" if HAS_SUBGROUPS else USER_SCOPE
    survives_restarts(Service("u"), place)


def main():
    shutil.copy("/payload/cellblock", PROGRAM)
    print(f"systemd {SYSTEMD}, Linux {os.uname().release}")
    wanted = Path("/payload/only").read_text().split()
    for check in [
        # Before anybody has logged in there is no bus of the user.
        service_of_user_without_bus,
        user_login,
        root_login,
        delegated_scope,
        delegated_scope_with_daemon,
        delegated_service_of_user,
        delegated_service_of_root,
        plain_service_of_root,
        limits_of_a_unit,
        documented_unit_as_root,
        documented_unit_as_user,
        yama,
        refusals_name_a_cure,
    ]:
        if wanted and check.__name__ not in wanted:
            continue
        started = time.monotonic()
        LOG.write_text("")
        try:
            check()
            print(f"ok {check.__name__} ({time.monotonic() - started:.0f} s)")
        except Exception as error:
            why = error if isinstance(error, Failed) else traceback.format_exc()
            print(f"FAILED {check.__name__}: {why}\n{LOG.read_text()[-2000:]}")
        # What one check leaves must not disturb the next.
        for pid in processes():
            os.kill(pid, 9)
        subprocess.run(["systemctl", "stop", "cellblock"], stderr=subprocess.DEVNULL)
        sys.stdout.flush()
    print("complete")


if __name__ == "__main__":
    main()
