"""Prefault: makes the memory that every cell writes to private to the session again after a copy.

A copy shares all pages with the original until one of them writes. The first write to a page then
costs a page fault, and even a small cell writes to several hundred: Python counts references in the
objects themselves. So the original learns which pages it writes between two copies, and after a
copy populates them all at once, while no request waits. This only affects timing; the content of
the pages stays the same.

The kernel reports which pages are not shared (`/proc/self/pagemap`). Those were written since the
last copy.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable

_PAGE = 4096
# Mappings larger than this hold data, and cells write to different parts of it each time.
_MAX_MAPPING_BYTES = 64 * 1024 * 1024
# Limit on the pages that are populated.
_MAX_PAGES = 4096
_MAX_RANGE_LENGTH = 256
# Number of pages between two checks for a waiting request: about 50 microseconds.
_PAGES_PER_CHECK = 64
# From this copy on, pages are inspected at every copy whose number is a multiple of it; before, at
# those that are powers of two.
_REGULAR_INTERVAL = 32

# Makes the kernel do for a range what a write to each of its pages would do. Linux 5.14; elsewhere
# it fails without harm.
MADV_POPULATE_WRITE = 23

_line = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) rw-p \S+ \S+ \d+ *(.*)$", re.MULTILINE)
# In the highest byte of an entry: present (0x80), file-backed (0x20), mapped here only (0x01).
_PRIVATE = bytes(1 if byte & 0xA1 == 0x81 else 0 for byte in range(256))
# Own pages, with gaps so small that skipping them would cost more.
_runs = re.compile(rb"\x01+(?:\x00{1,2}\x01+)*")

_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class WriteSet:
    """The pages that the session writes from copy to copy."""

    def __init__(self) -> None:
        self._copies = 0
        self._ranges: list[tuple[int, int]] = []

    def update(self) -> None:
        """Before some copies: determines which pages were written since the last one."""
        self._copies += 1
        copies = self._copies
        if copies > 1 and (
            copies % _REGULAR_INTERVAL == 0
            or (copies < _REGULAR_INTERVAL and copies & (copies - 1) == 0)
        ):
            try:
                self._ranges = _written()
            except OSError:
                self._ranges = []

    def prefault(self, request_waits: Callable[[], bool]) -> None:
        """After a copy, in the original: makes these pages private, as long as no request waits.

        The kernel skips a mapping that no longer exists.
        """
        pages = 0
        for start, length in self._ranges:
            if pages >= _PAGES_PER_CHECK:
                if request_waits():
                    return
                pages = 0
            _madvise(start, length, MADV_POPULATE_WRITE)
            pages += length // _PAGE


def _written() -> list[tuple[int, int]]:
    with open("/proc/self/maps", "rb") as file:
        mappings = [
            (int(start, 16), int(end, 16), name) for start, end, name in _line.findall(file.read())
        ]
    ranges = []
    left = _MAX_PAGES
    with open("/proc/self/pagemap", "rb", buffering=0) as entries:
        for start, end, name in mappings:
            if end - start > _MAX_MAPPING_BYTES or name == b"[stack]":
                continue
            entries.seek(start // _PAGE * 8)
            private = entries.read((end - start) // _PAGE * 8)[7::8].translate(_PRIVATE)
            for run in _runs.finditer(private):
                length = run.end() - run.start()
                if length <= min(_MAX_RANGE_LENGTH, left):
                    ranges.append((start + run.start() * _PAGE, length * _PAGE))
                    left -= length
    return ranges
