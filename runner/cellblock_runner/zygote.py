"""The zygote: a warm interpreter that every fresh session is a copy of. It never runs user code.

It runs in the jail's namespaces and communicates with the warden on one packet socket: it receives
its plan, warms up, reports that, and is then asked to park. From then on it stays suspended. The
warden copies it, puts each copy into a sandbox and confines it from outside; only then does the
copy continue, in `_become_session`. The zygote has one thread, because a copy has only one.
"""

from __future__ import annotations

import _thread
import ctypes
import gc
import importlib.util
import json
import os
import signal
import socket
import sys
import types
from typing import Any, NoReturn

_SOCKET = 3
_MAX_PLAN_BYTES = 160 * 1024
# Objects whose addresses agree above this many bits are in the same part of memory: half an arena
# of Python's allocator at its smallest size.
_REGION_BITS = 17

# Folders that a session can write besides its work folder.
_SCRATCH = ("/tmp", "/dev/shm")

# Modules that IPython and the runner import and few cells use. Most of the cost is `asyncio`, and
# OpenSSL, which `hashlib` loads.
_LAZY_MODULES = ("asyncio", "hashlib", "ipaddress", "pickle")

# Gate bytes that the host sends to a fresh session.
_FRESH = b"g"
_FRESH_PRIMED = b"p"
_FRESH_EMPTIED = b"e"
# For work of the server itself, which may always start programs.
_FRESH_UNRESTRICTED = b"o"


def main() -> NoReturn:
    """Warms up, parks, and in each copy serves a session."""
    warden = socket.socket(fileno=_SOCKET)
    plan = json.loads(warden.recv(_MAX_PLAN_BYTES))
    if not plan["quick"]:
        _keep_blocks_in_heap(True)
    # Imports leave no garbage; collecting would cost a tenth of the startup time.
    gc.disable()
    if plan["quick"]:
        import_lazily()
    from . import branch, serve  # Imports IPython, which takes most of the startup time.

    shell = serve.prepare(plan["preload"], rehearse=not plan["quick"])
    gc.enable()
    objects = [] if plan["quick"] else _object_addresses()
    warden.send(json.dumps({"say": "warm", "objects": objects}).encode())
    message = warden.recv(_MAX_PLAN_BYTES)
    if not message:
        sys.exit(0)  # The warden is gone.
    if json.loads(message).get("do") != "park":
        sys.exit("the zygote was asked for something that it cannot do")
    if not plan["quick"]:
        _keep_blocks_in_heap(False)
    # The exit statuses of copies are not needed.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    if not branch.suspend_for_copy(with_threads=False):
        os._exit(1)  # The original is never resumed.
    _become_session(warden, shell, plan)


def _become_session(warden: socket.socket, shell: Any, plan: dict[str, Any]) -> NoReturn:
    """Runs in a copy. On any error, the process ends here."""
    from . import commands, interrupts, serve
    from .channel import Channel

    status = 1
    try:
        warden.detach()  # Its descriptor was closed from outside, like all except the channel.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        interrupts.restore_signals()
        channel = Channel.in_its_place()
        gate = channel.receive_gate()
        if gate in (_FRESH, _FRESH_PRIMED, _FRESH_EMPTIED, _FRESH_UNRESTRICTED):
            os.environ.update(plan["environment"])
            if plan.get("programs") == "refused" and gate != _FRESH_UNRESTRICTED:
                commands.require_approval()
            if gate == _FRESH_PRIMED:
                serve.prime(shell)
            serve.serve(shell, channel, plan["work_folder"], _SCRATCH, empty=gate == _FRESH_EMPTIED)
        status = 0
    except BaseException as error:  # noqa: BLE001 - the process ends either way
        # The host sees a closed channel.
        try:
            os.write(2, f"a session could not be served: {error!r}\n".encode())
        except OSError:
            pass
    finally:
        os._exit(status)


# Options of the C library's mallopt.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
M_MMAP_MAX = -4


def _keep_blocks_in_heap(keep: bool) -> None:
    """Makes the C library put large blocks into its heap, or into separate mappings as usual.

    The warden moves the heap and the arenas of the warm process into a file that all copies share.
    A mapping that the C library could resize must not be among them.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return  # Another C library; its large blocks stay where they are, and are not moved.
    mallopt(M_MMAP_MAX, 0 if keep else 65536)
    if not keep:
        # Setting an option turns off the library's own adaptation; these values are in the middle
        # of its range.
        mallopt(M_MMAP_THRESHOLD, 4 * 1024 * 1024)
        mallopt(M_TRIM_THRESHOLD, 8 * 1024 * 1024)


def _object_addresses() -> list[int]:
    """Returns addresses of objects, one for each part of memory that contains any."""
    gc.unfreeze()  # Frozen objects are not listed.
    regions = {id(thing) >> _REGION_BITS for thing in gc.get_objects()}
    gc.freeze()
    return [region << _REGION_BITS for region in regions]


class _LazyModule(types.ModuleType):
    """A module whose code runs on the first access to an attribute.

    The standard library's lazy loader does not help: the next `import` statement already triggers
    it.
    """

    def __getattr__(self, name: str) -> Any:
        # `from asyncio import *` reads this one.
        if name.startswith("__") and name != "__all__":
            raise AttributeError(name)
        _load(self)
        return types.ModuleType.__getattribute__(self, name)

    def __dir__(self) -> list[str]:
        _load(self)
        return list(types.ModuleType.__dir__(self))


# For each lazy module, a lock for threads that access it at the same time.
_loading: dict[str, _thread.RLock] = {}
_begun: set[str] = set()


def _load(module: types.ModuleType) -> None:
    name = module.__name__
    with _loading[name]:
        # Its own code may access attributes that do not exist yet.
        if not isinstance(module, _LazyModule) or name in _begun:
            return
        _begun.add(name)
        try:
            module.__spec__.loader.exec_module(module)  # type: ignore[union-attr]
            module.__class__ = types.ModuleType
        finally:
            _begun.discard(name)


def import_lazily() -> None:
    """Makes modules that few cells use run their code on the first access to an attribute."""
    for name in _LAZY_MODULES:
        spec = importlib.util.find_spec(name) if name not in sys.modules else None
        if spec is not None and spec.loader is not None:
            module = _LazyModule(name)
            module.__spec__, module.__loader__, module.__file__ = spec, spec.loader, spec.origin
            module.__package__ = spec.parent
            if spec.submodule_search_locations is not None:
                module.__path__ = list(spec.submodule_search_locations)
            _loading[name] = _thread.RLock()
            sys.modules[name] = module


if __name__ == "__main__":
    main()
