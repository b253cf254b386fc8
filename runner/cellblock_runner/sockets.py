"""Sockets: finds the processes of a container that hold the socket of a connection, using only
information from the kernel.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterable, Iterator

_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")


def at(address: str, port: int) -> set[str]:
    """Returns the kernel's names of the sockets at this address and port, as the links to
    descriptors show them.
    """
    wanted = ipaddress.ip_address(address)
    found = set()
    for table in _TABLES:
        try:
            with open(table, encoding="ascii") as file:
                lines = file.read().splitlines()[1:]
        except OSError:
            continue  # IPv6 is not available.
        for line in lines:
            fields = line.split()
            where, _, number = fields[1].partition(":")
            if int(number, 16) == port and _read(where) == wanted:
                found.add(f"socket:[{fields[9]}]")
    return found


def holders(names: set[str], processes: Iterable[int]) -> Iterator[int]:
    """Yields those of the processes that have one of these sockets open. A process whose
    descriptors are unreadable is skipped.
    """
    for process in processes:
        folder = f"/proc/{process}/fd"
        try:
            if any(_link(f"{folder}/{descriptor}") in names for descriptor in os.listdir(folder)):
                yield process
        except OSError:
            pass


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""  # It has been closed.


def _read(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Parses an address in the kernel's format: words of four bytes, each in the machine's own
    order.
    """
    words = [bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8)]
    address = ipaddress.ip_address(b"".join(words))
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address
