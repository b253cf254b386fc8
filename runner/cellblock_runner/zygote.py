"""The zygote: a warm interpreter that forks sessions and never runs a user's code.

It sits in the jail's namespaces and talks to the warden on one packet socket: first it gets its plan, then requests to fork, each with
the descriptors of a sandbox. It answers with the child's number and later tells how the child ended. It has one thread, always: a
fork copies only one.
"""

from __future__ import annotations

import array
import gc
import importlib.util
import json
import os
import select
import socket
import sys
import types
from typing import Any, NoReturn

from .entry import Entry

_SOCKET = 3
_LARGEST_PLAN = 160 * 1024
_MOST_DESCRIPTORS = 32

# What the host sends through a fork's gate.
_GO = b"g"
_GO_AND_PRIME = b"p"


def main() -> NoReturn:
    """Warms up and forks on request until the warden is gone."""
    warden = socket.socket(fileno=_SOCKET)
    plan = json.loads(warden.recv(_LARGEST_PLAN))
    # Nothing that is imported becomes garbage; looking for some costs a tenth of the start.
    gc.disable()
    if plan["quick"]:
        _import_when_used("asyncio")
    from . import serve  # Imports IPython, which is most of the start.

    entry = Entry(plan)
    shell = serve.prepare(plan["preload"], rehearse=not plan["quick"])
    gc.enable()
    own_namespace = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    children: dict[int, int] = {}
    poll = select.poll()
    poll.register(warden, select.POLLIN)
    _say(warden, say="warm")
    while True:
        for descriptor, _ in poll.poll():
            if descriptor != _SOCKET:
                poll.unregister(descriptor)
                _tell_end(warden, children.pop(descriptor))
                os.close(descriptor)
                continue
            message, descriptors = _receive(warden)
            if not message:
                sys.exit(0)
            request = json.loads(message)
            try:
                child = _fork(entry, own_namespace, request, descriptors, shell, plan)
            except OSError as error:
                _say(warden, say="failed", slot=request["slot"], why=str(error))
                continue
            finally:
                for opened in descriptors:
                    os.close(opened)
            handle = os.pidfd_open(child)
            children[handle] = child
            poll.register(handle, select.POLLIN)
            _say(warden, say="forked", slot=request["slot"], generation=request["generation"], pid=child)


def _fork(entry: Entry, own_namespace: int, request: dict[str, Any], descriptors: list[int], shell: Any, plan: dict[str, Any]) -> int:
    """Forks a child that becomes the session; returns its number."""
    channel, pid_namespace, *rest = descriptors
    rules = rest.pop() if request["has_rules"] else None
    doors = [rest.pop() for _ in range(request["doors"])]
    # Only children born after this are in the sandbox's pid namespace; this process itself stays, and goes back for the next one.
    entry.join(pid_namespace)
    try:
        child = os.fork()
        if child == 0:
            _become_session(entry, channel, rest, doors, rules, shell, plan)
    finally:
        entry.join(own_namespace)
    return child


def _become_session(
    entry: Entry,
    channel: int,
    namespaces: list[int],
    doors: list[int],
    rules: int | None,
    shell: Any,
    plan: dict[str, Any],
) -> NoReturn:
    """Runs in the child. Whatever goes wrong, it never returns into the zygote's loop."""
    from . import serve

    status = 1
    try:
        connection = socket.socket(fileno=channel)
        # Where the kernel lets a process enter its control group by itself, that is much faster than being put there. A zero stands for the
        # writer. Elsewhere the host puts this process there before it opens the gate.
        for door in doors:
            os.write(door, b"0")
        gate = connection.recv(1)
        if gate in (_GO, _GO_AND_PRIME):
            entry.lock_down(namespaces, rules, channel)
            os.environ.update(plan["environment"])
            if gate == _GO_AND_PRIME:
                serve.prime(shell)
            serve.serve(shell, connection, plan["work_folder"])
        status = 0
    except BaseException as error:  # noqa: BLE001 - the process ends either way; the host sees a closed channel
        try:
            os.write(2, f"a session could not enter its sandbox: {error!r}\n".encode())
        except OSError:
            pass
    finally:
        os._exit(status)


class _Later(types.ModuleType):
    """A module whose code runs when something of it is first asked for.

    The standard library's lazy loader is no help: to it, the next `import` statement is already such a question.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self.__class__ = types.ModuleType
        self.__spec__.loader.exec_module(self)
        return getattr(self, name)


def _import_when_used(name: str) -> None:
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.loader is not None:
        module = _Later(name)
        module.__spec__, module.__loader__, module.__file__ = spec, spec.loader, spec.origin
        module.__package__, module.__path__ = name, list(spec.submodule_search_locations or [])
        sys.modules[name] = module


def _receive(warden: socket.socket) -> tuple[bytes, list[int]]:
    space = socket.CMSG_SPACE(_MOST_DESCRIPTORS * array.array("i").itemsize)
    message, ancillary, _, _ = warden.recvmsg(65536, space, socket.MSG_CMSG_CLOEXEC)
    descriptors = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    return message, list(descriptors)


def _tell_end(warden: socket.socket, child: int) -> None:
    _, status = os.waitpid(child, 0)
    _say(warden, say="exited", pid=child, status=status)


def _say(warden: socket.socket, **words: Any) -> None:
    warden.send(json.dumps(words).encode())


if __name__ == "__main__":
    main()
