"""Threads of a session in its copies: those that wait continue, and busy ones are reported."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import unittest
from importlib.util import find_spec
from pathlib import Path

from cellblock_runner import threads

from .test_branch import BranchTest

_COUNTING = """
import threading, time
counter = 0
def count():
    global counter
    while True:
        counter += 1
        time.sleep(0.005)
def goes_on():
    before, limit = counter, time.monotonic() + 10
    while counter == before and time.monotonic() < limit: time.sleep(0.001)
    return counter > before
threading.Thread(target=count, daemon=True).start()
"""

_OWN_MACHINE = unittest.skipUnless(
    threads._get_machine_code(), "skipped: needs x86-64 and the GNU C library"
)


@_OWN_MACHINE
class Waiting(BranchTest):
    def test_a_thread_goes_on_in_source_and_copies_and_copies_of_copies(self) -> None:
        self.run_ok(self.source, _COUNTING)
        checkpoint = self.source.branch()
        self.assertEqual((checkpoint.lost, checkpoint.whole), ([], False))
        copy = checkpoint.spawn(b"u")
        self.assertEqual(copy.hello["lost"], [])
        again = copy.branch().spawn(b"u")
        for session in (self.source, copy, again):
            self.assert_shows(session, "goes_on(), threading.active_count()", "value:(True, 2)")

    def test_a_pool_of_threads_works(self) -> None:
        self.run_ok(
            self.source,
            "from concurrent.futures import ThreadPoolExecutor\npool = ThreadPoolExecutor(3)\n"
            "def squares(): return list(pool.map(lambda n: n * n, range(20)))\nbefore = squares()",
        )
        checkpoint = self.source.branch()
        # All of them wait for work, so nothing changes by itself.
        self.assertEqual((checkpoint.lost, checkpoint.whole), ([], True))
        copy = checkpoint.spawn(b"u")
        for session in (copy, self.source):
            self.assert_shows(session, "squares() == before, len(pool._threads)", "value:(True, 3)")
            self.run_ok(session, "pool.shutdown(wait=True)")

    def test_a_lock_keeps_its_owner_and_is_released_by_it(self) -> None:
        self.run_ok(
            self.source,
            "import threading\nlock, again, let_go = threading.Lock(), threading.RLock(), "
            "threading.Event()\n"
            "def hold():\n    with lock, again:\n        let_go.wait()\n"
            "holder = threading.Thread(target=hold); holder.start()\nwhile not lock.locked(): pass",
        )
        copy = self.source.branch().spawn(b"u")
        self.assertEqual(copy.hello["lost"], [])
        self.assert_shows(
            copy, "lock.locked(), again.acquire(blocking=False)", "value:(True, False)"
        )
        self.assert_shows(
            copy,
            "let_go.set(); holder.join(10); lock.locked(), again.acquire(blocking=False)",
            "value:(False, True)",
        )
        self.assert_shows(self.source, "holder.is_alive(), lock.locked()", "value:(True, True)")
        self.run_ok(self.source, "let_go.set(); holder.join()")

    def test_work_under_way_is_finished_by_each(self) -> None:
        self.run_ok(
            self.source,
            "import queue, threading\nwork, done = queue.Queue(), queue.Queue()\n"
            "def serve():\n    while True: done.put(work.get() + 1)\n"
            "threading.Thread(target=serve, daemon=True).start()",
        )
        copy = self.source.branch().spawn(b"u")
        self.assert_shows(copy, "work.put(1); done.get(timeout=10)", "value:2")
        self.assert_shows(self.source, "work.put(5); done.get(timeout=10)", "value:6")

    def test_a_thread_of_a_library_goes_on(self) -> None:
        self.run_ok(
            self.source,
            "import ctypes, threading\nc = ctypes.CDLL(None)\n"
            "id, gate = ctypes.c_ulong(), ctypes.create_string_buffer(64)\n"
            "c.sem_init(gate, 0, 0)\nc.pthread_create(ctypes.byref(id), None, c.sem_wait, gate)\n"
            "def end(): return c.sem_post(gate), c.pthread_join(id, None)",
        )
        copy = self.source.branch().spawn(b"u")
        self.assertEqual(copy.hello["lost"], [])
        self.assert_shows(copy, "end()", "value:(0, 0)")
        self.assert_shows(self.source, "end()", "value:(0, 0)")

    def test_a_thread_of_a_library_that_blocks_signals_goes_on(self) -> None:
        self.run_ok(
            self.source,
            "import ctypes, signal\nc = ctypes.CDLL(None)\nid = ctypes.c_ulong()\n"
            "gate = ctypes.create_string_buffer(64); c.sem_init(gate, 0, 0)\n"
            "old = signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\n"
            "c.pthread_create(ctypes.byref(id), None, c.sem_wait, gate)\n"
            "old = signal.pthread_sigmask(signal.SIG_SETMASK, old)\n"
            "def end(): return c.sem_post(gate), c.pthread_join(id, None)",
        )
        copy = self.source.branch().spawn(b"u")
        self.assertEqual(copy.hello["lost"], [])
        self.assert_shows(copy, "end()", "value:(0, 0)")
        self.assert_shows(self.source, "end()", "value:(0, 0)")

    def test_python_knows_the_new_number_of_a_thread(self) -> None:
        self.run_ok(
            self.source,
            "import threading\nasked, told = threading.Event(), []\n"
            "def tell():\n    asked.wait(); told.append(threading.get_native_id())\n"
            "thread = threading.Thread(target=tell); thread.start()",
        )
        copy = self.source.branch().spawn(b"u")
        self.assert_shows(
            copy, "asked.set(); thread.join(10); told == [thread.native_id]", "value:True"
        )
        self.run_ok(self.source, "asked.set(); thread.join()")

    def test_a_copy_starts_threads_of_its_own_beside_them(self) -> None:
        self.run_ok(self.source, _COUNTING)
        copy = self.source.branch().spawn(b"u")
        self.run_ok(
            copy,
            "for _ in range(20):\n    thread = threading.Thread(target=lambda: None); "
            "thread.start(); thread.join()",
        )
        self.assert_shows(copy, "goes_on(), threading.active_count()", "value:(True, 2)")

    @unittest.skipUnless(find_spec("numpy"), "skipped: needs numpy")
    def test_linear_algebra_works_with_its_threads(self) -> None:
        self.run_ok(self.source, "import numpy\na = numpy.random.rand(500, 500)\nb = a @ a")
        checkpoint = self.source.branch()
        self.assertEqual(checkpoint.lost, [])
        copy = checkpoint.spawn(b"u")
        self.assertEqual(copy.hello["lost"], [])
        for session in (copy, copy.branch().spawn(b"u"), self.source):
            self.assert_shows(session, "numpy.allclose(a @ a, b)", "value:True")


class Busy(BranchTest):
    _SPINNING = (
        "import threading\nover = False\ndef spin():\n    while not over: pass\n"
        "thread = threading.Thread(target=spin); thread.start()"
    )

    def test_a_thread_that_computes_is_told_and_the_source_keeps_it(self) -> None:
        self.run_ok(self.source, self._SPINNING)
        copy = self.source.branch().spawn(b"u")
        self.assertEqual(copy.hello["lost"], ["1 thread"])
        self.assert_shows(copy, "thread.is_alive()", "value:False")
        self.assert_shows(self.source, "thread.is_alive()", "value:True")
        self.run_ok(self.source, "over = True; thread.join()")

    def test_a_thread_that_takes_no_signals_at_all_is_told(self) -> None:
        self.run_ok(
            self.source,
            "import ctypes, threading\nc = ctypes.CDLL(None)\n"
            "mask, blocks = ctypes.c_uint64(2**64 - 1), threading.Event()\n"
            "def wait():\n    c.syscall(14, 2, ctypes.byref(mask), None, 8); blocks.set(); "
            "c.pause()\n"
            "thread = threading.Thread(target=wait, daemon=True); thread.start(); blocks.wait()",
        )
        copy = self.source.branch().spawn(b"u")
        self.assertEqual(copy.hello["lost"], ["1 thread"])
        self.assert_shows(copy, "thread.is_alive()", "value:False")
        self.assert_shows(self.source, "thread.is_alive()", "value:True")


class Code(unittest.TestCase):
    @unittest.skipUnless(shutil.which("as") and shutil.which("objcopy"), "skipped: needs binutils")
    def test_the_machine_code_is_that_of_the_source(self) -> None:
        source = Path(__file__).parent.parent / "threads.s"
        with tempfile.TemporaryDirectory() as folder:
            made, plain = f"{folder}/threads.o", f"{folder}/threads.bin"
            subprocess.run(["as", "--64", "-o", made, source], check=True)
            subprocess.run(["objcopy", "-O", "binary", "-j", ".text", made, plain], check=True)
            self.assertEqual(Path(plain).read_bytes(), threads._CODE)
