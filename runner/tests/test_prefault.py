"""The pages that a session writes between two copies."""

from __future__ import annotations

import mmap
import os
import resource
import signal
import unittest

from cellblock_runner.prefault import WriteSet

_PAGE = mmap.PAGESIZE


def _faults_of_writing(memory: mmap.mmap) -> int:
    """Writes to every page, and returns the number of page faults."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for offset in range(0, len(memory), _PAGE):
        memory[offset] = 1
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def _copy() -> int:
    """Makes a copy that holds all pages until it is ended."""
    child = os.fork()
    if child == 0:
        while True:
            signal.pause()
    return child


class Pages(unittest.TestCase):
    def _written_again_after(self, renew: bool, waits: bool = False) -> int:
        memory = mmap.mmap(-1, 64 * _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        write_set = WriteSet()
        copies = []
        for _ in range(2):
            _faults_of_writing(memory)
            write_set.update()
            copies.append(_copy())
        if renew:
            write_set.prefault(lambda: waits)
        faults = _faults_of_writing(memory)
        for child in copies:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        memory.close()
        return faults

    def test_pages_that_are_written_from_copy_to_copy_cost_no_fault_after_they_were_renewed(
        self,
    ) -> None:
        self.assertGreaterEqual(
            self._written_again_after(renew=False), 64, "the control: each page costs one"
        )
        self.assertLess(self._written_again_after(renew=True), 16)

    def test_nothing_changes_in_them(self) -> None:
        memory = mmap.mmap(-1, 64 * _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.write(os.urandom(64 * _PAGE))
        before = memory[:]
        write_set = WriteSet()
        write_set.update()
        write_set.update()
        write_set.prefault(lambda: False)
        self.assertEqual(memory[:], before)
        memory.close()

    def test_a_mapping_that_is_gone_is_passed_over(self) -> None:
        memory = mmap.mmap(-1, 64 * _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        _faults_of_writing(memory)
        write_set = WriteSet()
        write_set.update()
        write_set.update()
        memory.close()
        write_set.prefault(lambda: False)


if __name__ == "__main__":
    unittest.main()
