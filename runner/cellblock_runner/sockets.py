"""Sockets: which processes of a container hold the socket that a connection was made from. Read from the kernel, believed by nobody else."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterable, Iterator

_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")


def at(address: str, port: int) -> set[str]:
    """Returns the names that the kernel has for sockets at this address and port, as the links to descriptors show them."""
    wanted = ipaddress.ip_address(address)
    found = set()
    for table in _TABLES:
        try:
            with open(table, encoding="ascii") as file:
                lines = file.read().splitlines()[1:]
        except OSError:
            continue  # There is no IPv6 here.
        for line in lines:
            fields = line.split()
            where, _, number = fields[1].partition(":")
            if int(number, 16) == port and _read(where) == wanted:
                found.add(f"socket:[{fields[9]}]")
    return found


def holders(names: set[str], processes: Iterable[int]) -> Iterator[int]:
    """Returns those of the processes that have one of these sockets open. One that hides its descriptors is not among them."""
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
    """Reads an address as the kernel writes it: words of four bytes, each in the machine's own order."""
    words = [bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8)]
    address = ipaddress.ip_address(b"".join(words))
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address
