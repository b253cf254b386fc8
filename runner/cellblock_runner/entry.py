"""Entry: the way of a fresh fork into its sandbox.

The warm process forks; the child then joins the sandbox's namespaces, becomes the session's user, gives up every right, and closes
the door behind it. Only then may it read a byte of a user's code. The order matters at every step and is explained there.

Numbers of system calls, limits and the filter come from the jail as a plan, so this module decides nothing. Nor is it trusted: the host
reads the child's state from the kernel before it sends any code. A step that fails ends the child.
"""

from __future__ import annotations

import ctypes
import os
import resource
import struct
from typing import Any

# Constants of the kernel's interface, the same on every architecture.
_PR_SET_DUMPABLE = 4
_PR_CAPBSET_DROP = 24
_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_SET_MODE_FILTER = 1
_CAPABILITY_VERSION_3 = 0x20080522
_EINVAL = 22

# Chosen first when memory runs out: a session before anything that serves other sessions.
_OUT_OF_MEMORY_SCORE = 500


class Entry:
    """A plan, made ready before any fork so that the child has little left to do."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self._syscall = ctypes.CDLL(None, use_errno=True).syscall
        self._syscall.restype = ctypes.c_long
        self._calls: dict[str, int] = plan["calls"]
        self._id: int = plan["id"]
        self._drop_groups: bool = plan["drop_groups"]
        self._limits = [(limit["resource"], limit["value"]) for limit in plan["rlimits"]]
        self._capability_header = ctypes.create_string_buffer(struct.pack("=Ii", _CAPABILITY_VERSION_3, 0))
        self._no_capabilities = ctypes.create_string_buffer(bytes(24))
        steps = bytes.fromhex(plan["closing_filter"])
        self._steps = ctypes.create_string_buffer(steps, len(steps))
        # struct sock_fprog: the number of steps, padding, their address.
        program = struct.pack("@HP", len(steps) // 8, ctypes.addressof(self._steps))
        self._program = ctypes.create_string_buffer(program) if steps else None

    def join(self, namespace: int) -> None:
        """Moves this process, or for a pid namespace its future children, into the namespace."""
        self._call("setns", namespace, 0)

    def lock_down(self, namespaces: list[int], rules: int | None, kept: int) -> None:
        """Enters the sandbox and gives up every right. Only descriptor `kept` stays open."""
        # While /proc still shows this process under its outer number.
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as score:
            score.write(str(_OUT_OF_MEMORY_SCORE))
        # Leaves the process group of the jail: signals to a group reach across namespaces.
        os.setsid()
        # The user namespace comes last: entering the others needs rights that this one takes away.
        for namespace in namespaces:
            self.join(namespace)
        for which, value in self._limits:
            _, most = resource.getrlimit(which)
            # The host may already be stricter, and only it could raise that.
            value = value if most == resource.RLIM_INFINITY else min(value, most)
            resource.setrlimit(which, (value, value))
        if self._drop_groups:
            os.setgroups([])
        os.setresgid(self._id, self._id, self._id)
        os.setresuid(self._id, self._id, self._id)
        # The bounding set needs a capability to be emptied, so it goes before the capabilities.
        for capability in range(64):
            if not self._try("prctl", _PR_CAPBSET_DROP, capability, 0, 0, 0):
                break
        self._call("capset", self._capability_header, self._no_capabilities)
        # The change of user made /proc/self belong to the host's root; give it back.
        self._call("prctl", _PR_SET_DUMPABLE, 1, 0, 0, 0)
        self._call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        if rules is not None:
            self._call("landlock_restrict_self", rules, 0)
        os.closerange(3, kept)
        os.closerange(kept + 1, 65536)
        nothing = os.open("/dev/null", os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(nothing, number)
        os.close(nothing)
        # Last: the filter closes the very calls used above.
        if self._program is not None:
            self._call("seccomp", _SECCOMP_SET_MODE_FILTER, 0, self._program)

    def _call(self, name: str, *arguments: Any) -> None:
        if self._syscall(self._calls[name], *arguments) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"{name}: {os.strerror(number)}")

    def _try(self, name: str, *arguments: Any) -> bool:
        """Like `_call`, but an argument that the kernel does not know is an answer, not an error."""
        try:
            self._call(name, *arguments)
        except OSError as error:
            if error.errno == _EINVAL:
                return False
            raise
        return True
