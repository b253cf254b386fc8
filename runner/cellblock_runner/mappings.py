"""Mappings: memory that this process shares with files or with other processes.

A copy of a process has memory of its own, except for what is mapped as shared: that stays one thing for original and copy. In a copy
of a session it must not. Each such area is therefore mapped anew, at the same address, onto the copy's own file or onto new
memory with the content that it had at the moment of the copy.

The content is kept in private memory while the copy waits, because the original goes on writing into the shared one.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import struct
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import NamedTuple

from .descriptors import Identity, counted, write_all

# So much content is kept, in all areas together. What does not fit is copied late, and may be newer than the rest.
LARGEST_KEPT = 8 * 1024 * 1024

# Numbers of the kernel's interface, the same on every architecture.
_READ, _WRITE, _EXECUTE = 1, 2, 4
_SHARED, _FIXED = 0x01, 0x10
_PRIVATE = 0x02
_QUERY_SHARED, _QUERY_NEXT = 0x08, 0x10

# Asks for one area of memory: `struct procmap_query` of Linux 6.11. Elsewhere all areas are read as text, which takes ten times longer.
_query = struct.Struct("=9Q4I2Q")
_PROCMAP_QUERY = 0xC0000000 | _query.size << 16 | ord("f") << 8 | 17
_name = ctypes.create_string_buffer(4096)
_can_query = True

_shared_line = re.compile(rb"s [0-9a-f]+ [0-9a-f]+:[0-9a-f]+ \d+ ")

_library = ctypes.CDLL(None, use_errno=True)
_mmap = _library.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_munmap = _library.munmap
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FAILED = ctypes.c_void_p(-1).value


class Area(NamedTuple):
    """One shared mapping."""

    start: int
    length: int
    protection: int
    offset: int
    identity: Identity
    # As the kernel tells it; it ends in " (deleted)" when the file has no name.
    path: str
    # What it holds; empty when that is known elsewhere or nobody can read it, None when it is too much to keep.
    content: bytes | None = None


def look(writable: Iterable[str]) -> list[Area]:
    """Returns the areas that are shared with what a session can write: files below `writable`, and memory without a name."""
    places = tuple(f"{folder.rstrip('/')}/" for folder in writable)
    return [area for area in _areas() if not _has_name(area) or area.path.startswith(places)]


def keep(areas: Iterable[Area], nameless: Collection[Identity], work: str) -> list[Area]:
    """Returns the areas with their content, as far as there is room.

    It is not needed where others keep it: for the open files without a name in `nameless`, and for files of the work folder.
    """
    room = LARGEST_KEPT
    kept = []
    for area in areas:
        is_elsewhere = area.identity in nameless or (_has_name(area) and area.path.startswith(f"{work}/"))
        if is_elsewhere or not area.protection:
            area = area._replace(content=b"")
        elif area.length <= room:
            area = area._replace(content=_peek(area.start, area.length))
            room -= area.length
        kept.append(area)
    return kept


def bring_back(areas: Iterable[Area], find_file: Callable[[Identity], int | None]) -> list[str]:
    """Maps every area onto something that only this process has. Returns what could not be right.

    `find_file` returns an open descriptor of the file that took the place of another, if that one was open.
    """
    by_object: dict[Identity, list[Area]] = {}
    for area in areas:
        by_object.setdefault(area.identity, []).append(area)
    newer = failed = 0
    for identity, group in by_object.items():
        try:
            newer += _map_again(group, find_file(identity))
        except OSError:
            failed += 1
    texts = []
    if newer:
        texts.append(f"the moment of {counted(newer, 'shared memory area')}")
    if failed:
        texts.append(counted(failed, "shared memory area"))
    return texts


class View(NamedTuple):
    """A file of the original as it can be seen in a copy, without a descriptor."""

    address: int
    size: int

    def bytes(self) -> memoryview:
        return memoryview((ctypes.c_char * self.size).from_address(self.address)).cast("B")


def view(number: int, size: int) -> View:
    """Maps a file for reading only."""
    return View(_map(0, size, _READ, _PRIVATE, number, 0), size)


def drop(seen: View) -> None:
    _munmap(seen.address, seen.size)


def _has_name(area: Area) -> bool:
    return not area.path.endswith(" (deleted)") and not area.path.startswith("/memfd:")


def _map_again(group: list[Area], opened: int | None) -> bool:
    """Gives the areas of one object their new one. Returns whether they had to take content that may be newer."""
    number = os.dup(opened) if opened is not None else _open_named(group)
    is_new = number is None
    late = False
    if number is None:
        number = os.memfd_create("restored")
    try:
        if is_new:
            os.ftruncate(number, max(area.offset + area.length for area in group))
        for area in group:
            content = area.content
            if content is None:
                late = True
                content = _peek(area.start, area.length) if is_new else b""
            if content and (is_new or area.protection & _WRITE):
                _put(number, content, area.offset)
        for area in group:
            _map(area.start, area.length, area.protection, _SHARED | _FIXED, number, area.offset)
    finally:
        os.close(number)
    return late


def _put(number: int, content: bytes, offset: int) -> None:
    """Writes content into a file without making it longer than it is: a mapping may be longer than its file."""
    content = content[: max(0, os.fstat(number).st_size - offset)]
    if os.pread(number, len(content), offset) != content:
        os.lseek(number, offset, os.SEEK_SET)
        write_all(number, content)


def _open_named(group: list[Area]) -> int | None:
    """Opens the file of a mapping, or returns None when there is none of that name."""
    if not _has_name(group[0]):
        return None
    is_written = any(area.protection & _WRITE for area in group)
    try:
        return os.open(group[0].path, (os.O_RDWR if is_written else os.O_RDONLY) | os.O_CLOEXEC)
    except OSError:
        return None


def _map(address: int, length: int, protection: int, flags: int, number: int, offset: int) -> int:
    mapped = _mmap(address, length, protection, flags, number, offset)
    if mapped == _FAILED or mapped is None:
        cause = ctypes.get_errno()
        raise OSError(cause, os.strerror(cause))
    return int(mapped)


def _peek(start: int, length: int) -> bytes | None:
    """Reads memory that may end before its mapping does. Touching it there would end the process; asking the kernel does not.

    Returns None when the kernel does not answer.
    """
    try:
        memory = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    content = bytearray()
    try:
        while len(content) < length:
            part = os.pread(memory, length - len(content), start + len(content))
            if not part:
                break
            content += part
    except OSError:
        pass
    finally:
        os.close(memory)
    return bytes(content)


def _areas() -> Iterator[Area]:
    global _can_query
    maps = os.open("/proc/self/maps", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if _can_query:
            try:
                yield from _ask(maps)
                return
            except OSError:
                _can_query = False
        yield from _parse(_read(maps))
    finally:
        os.close(maps)


def _ask(maps: int) -> Iterator[Area]:
    address = 0
    while True:
        flags = _QUERY_SHARED | _QUERY_NEXT
        question = bytearray(
            _query.pack(_query.size, flags, address, 0, 0, 0, 0, 0, 0, 0, 0, len(_name), 0, ctypes.addressof(_name), 0)
        )
        try:
            fcntl.ioctl(maps, _PROCMAP_QUERY, question)
        except OSError as cause:
            if cause.errno == errno.ENOENT:
                return  # There are no more.
            raise
        _, _, _, start, end, protection, _, offset, inode, major, minor, *_ = _query.unpack(question)
        path = os.fsdecode(_name.value)
        yield Area(start, end - start, protection & 7, offset, (os.makedev(major, minor), inode), path)
        address = end


def _read(maps: int) -> bytes:
    parts = []
    while part := os.read(maps, 1 << 20):
        parts.append(part)
    return b"".join(parts)


def _parse(text: bytes) -> Iterator[Area]:
    for match in _shared_line.finditer(text):
        beginning = text.rfind(b"\n", 0, match.start()) + 1
        end = text.find(b"\n", match.end())
        addresses, rights, offset, device, inode, *path = text[beginning:end].split(None, 5)
        if rights[3:4] != b"s":
            continue  # A path that looks like the beginning of a line.
        first, last = (int(part, 16) for part in addresses.split(b"-"))
        major, minor = (int(part, 16) for part in device.split(b":"))
        protection = (
            (_READ if rights[:1] == b"r" else 0)
            | (_WRITE if rights[1:2] == b"w" else 0)
            | (_EXECUTE if rights[2:3] == b"x" else 0)
        )
        identity = (os.makedev(major, minor), int(inode))
        yield Area(first, last - first, protection, int(offset, 16), identity, os.fsdecode(b"".join(path)))
