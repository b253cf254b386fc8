"""Mappings: memory that this process shares with files or with other processes.

A copy of a process has its own memory, except for shared mappings: those stay common to original
and copy. In a copy of a session they must not. Each such area is therefore mapped anew, at the same
address, onto the copy's own file or onto new memory with the content at the time of the copy.

The content is kept in private memory while the copy waits, because the original continues to write
to the shared memory.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import struct
from collections.abc import Callable, Collection, Iterable, Iterator
from mmap import MAP_PRIVATE, MAP_SHARED, PROT_EXEC, PROT_READ, PROT_WRITE
from typing import NamedTuple

from .descriptors import Identity, counted, write_all

# Limit on the kept content of all areas together. Content beyond it is copied late, and may be
# newer than the rest.
MAX_KEPT_BYTES = 8 * 1024 * 1024

# From <linux/mman.h>, the same on every architecture; Python has no name for it.
MAP_FIXED = 0x10
# From <linux/fs.h>.
PROCMAP_QUERY_VMA_SHARED = 0x08
PROCMAP_QUERY_COVERING_OR_NEXT_VMA = 0x10

# Queries one area of memory: `struct procmap_query` of Linux 6.11. Elsewhere all areas are read as
# text, which takes ten times longer.
_query = struct.Struct("=9Q4I2Q")
# _IOWR(PROCFS_IOCTL_MAGIC, 17, struct procmap_query)
PROCMAP_QUERY = 0xC0000000 | _query.size << 16 | ord("f") << 8 | 17
_name = ctypes.create_string_buffer(4096)
_can_query = True

_shared_line = re.compile(rb"s [0-9a-f]+ [0-9a-f]+:[0-9a-f]+ \d+ ")

_library = ctypes.CDLL(None, use_errno=True)
_mmap = _library.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_munmap = _library.munmap
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_MAP_FAILED = ctypes.c_void_p(-1).value


class SharedMapping(NamedTuple):
    """One shared mapping."""

    start: int
    length: int
    protection: int
    offset: int
    identity: Identity
    # As the kernel reports it; it ends in " (deleted)" if the file has no name.
    path: str
    # Its content. Empty if the content is kept elsewhere or is unreadable, None if it is too large
    # to keep.
    content: bytes | None = None


def find_shared(writable: Iterable[str]) -> list[SharedMapping]:
    """Returns the areas that are shared with writable objects of a session: files below `writable`,
    and memory without a name.
    """
    places = tuple(f"{folder.rstrip('/')}/" for folder in writable)
    return [area for area in _areas() if not _has_name(area) or area.path.startswith(places)]


def save(
    areas: Iterable[SharedMapping], nameless: Collection[Identity], work: str
) -> list[SharedMapping]:
    """Returns the areas with their content, up to the limit.

    Content that is kept elsewhere is skipped: that of the open files without a name in `nameless`,
    and of files of the work folder.
    """
    room = MAX_KEPT_BYTES
    kept = []
    for area in areas:
        is_elsewhere = area.identity in nameless or (
            _has_name(area) and area.path.startswith(f"{work}/")
        )
        if is_elsewhere or not area.protection:
            area = area._replace(content=b"")
        elif area.length <= room:
            area = area._replace(content=_read_memory(area.start, area.length))
            room -= area.length
        kept.append(area)
    return kept


def restore(
    areas: Iterable[SharedMapping], find_file: Callable[[Identity], int | None]
) -> list[str]:
    """Maps every area onto an object that only this process has. Returns texts about failures.

    `find_file` returns an open descriptor of the file that replaced another one, if that one was
    open.
    """
    by_object: dict[Identity, list[SharedMapping]] = {}
    for area in areas:
        by_object.setdefault(area.identity, []).append(area)
    newer = failed = 0
    for identity, group in by_object.items():
        try:
            newer += _remap(group, find_file(identity))
        except OSError:
            failed += 1
    texts = []
    if newer:
        texts.append(f"the exact content of {counted(newer, 'shared memory area')}")
    if failed:
        texts.append(counted(failed, "shared memory area"))
    return texts


class FileView(NamedTuple):
    """A file of the original that is readable in a copy, without a descriptor."""

    address: int
    size: int

    def bytes(self) -> memoryview:
        return memoryview((ctypes.c_char * self.size).from_address(self.address)).cast("B")


def map_file(number: int, size: int) -> FileView:
    """Maps a file for reading only."""
    return FileView(_map(0, size, PROT_READ, MAP_PRIVATE, number, 0), size)


def unmap(view: FileView) -> None:
    _munmap(view.address, view.size)


def _has_name(area: SharedMapping) -> bool:
    return not area.path.endswith(" (deleted)") and not area.path.startswith("/memfd:")


def _remap(group: list[SharedMapping], opened: int | None) -> bool:
    """Maps the areas of one object onto its replacement. Returns whether the content may be newer
    than the copy.
    """
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
                content = _read_memory(area.start, area.length) if is_new else b""
            if content and (is_new or area.protection & PROT_WRITE):
                _write_content(number, content, area.offset)
        for area in group:
            flags = MAP_SHARED | MAP_FIXED
            _map(area.start, area.length, area.protection, flags, number, area.offset)
    finally:
        os.close(number)
    return late


def _write_content(number: int, content: bytes, offset: int) -> None:
    """Writes content into a file without extending it: a mapping may be longer than its file."""
    content = content[: max(0, os.fstat(number).st_size - offset)]
    if os.pread(number, len(content), offset) != content:
        os.lseek(number, offset, os.SEEK_SET)
        write_all(number, content)


def _open_named(group: list[SharedMapping]) -> int | None:
    """Opens the file of a mapping. Returns None if no file has that name."""
    if not _has_name(group[0]):
        return None
    is_written = any(area.protection & PROT_WRITE for area in group)
    try:
        return os.open(group[0].path, (os.O_RDWR if is_written else os.O_RDONLY) | os.O_CLOEXEC)
    except OSError:
        return None


def _map(address: int, length: int, protection: int, flags: int, number: int, offset: int) -> int:
    mapped = _mmap(address, length, protection, flags, number, offset)
    if mapped == _MAP_FAILED or mapped is None:
        cause = ctypes.get_errno()
        raise OSError(cause, os.strerror(cause))
    return int(mapped)


def _read_memory(start: int, length: int) -> bytes | None:
    """Reads memory that may end before its mapping does. Accessing it there would kill the process;
    reading it through the kernel does not.

    Returns None if the kernel does not allow it.
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


def _areas() -> Iterator[SharedMapping]:
    global _can_query
    maps = os.open("/proc/self/maps", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if _can_query:
            try:
                yield from _query_areas(maps)
                return
            except OSError:
                _can_query = False
        yield from _parse(_read(maps))
    finally:
        os.close(maps)


def _query_areas(maps: int) -> Iterator[SharedMapping]:
    address = 0
    while True:
        flags = PROCMAP_QUERY_VMA_SHARED | PROCMAP_QUERY_COVERING_OR_NEXT_VMA
        query = bytearray(
            _query.pack(
                _query.size,
                flags,
                address,
                0,
                0,
                0,
                0,
                0,
                0,
                0,
                0,
                len(_name),
                0,
                ctypes.addressof(_name),
                0,
            )
        )
        try:
            fcntl.ioctl(maps, PROCMAP_QUERY, query)
        except OSError as cause:
            if cause.errno == errno.ENOENT:
                return  # There are no more areas.
            raise
        _, _, _, start, end, protection, _, offset, inode, major, minor, *_ = _query.unpack(query)
        path = os.fsdecode(_name.value)
        protection &= PROT_READ | PROT_WRITE | PROT_EXEC
        yield SharedMapping(
            start, end - start, protection, offset, (os.makedev(major, minor), inode), path
        )
        address = end


def _read(maps: int) -> bytes:
    parts = []
    while part := os.read(maps, 1 << 20):
        parts.append(part)
    return b"".join(parts)


def _parse(text: bytes) -> Iterator[SharedMapping]:
    for match in _shared_line.finditer(text):
        beginning = text.rfind(b"\n", 0, match.start()) + 1
        end = text.find(b"\n", match.end())
        addresses, rights, offset, device, inode, *path = text[beginning:end].split(None, 5)
        if rights[3:4] != b"s":
            continue  # A path that looks like the beginning of a line.
        first, last = (int(part, 16) for part in addresses.split(b"-"))
        major, minor = (int(part, 16) for part in device.split(b":"))
        protection = (
            (PROT_READ if rights[:1] == b"r" else 0)
            | (PROT_WRITE if rights[1:2] == b"w" else 0)
            | (PROT_EXEC if rights[2:3] == b"x" else 0)
        )
        identity = (os.makedev(major, minor), int(inode))
        yield SharedMapping(
            first, last - first, protection, int(offset, 16), identity, os.fsdecode(b"".join(path))
        )
