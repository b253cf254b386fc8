"""Preparing and forking: the required state of a warm process, and the differences between its
children.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import unittest
from importlib.util import find_spec

from cellblock_runner import variables

from .harness import TIMEOUT, RUNNER, Fresh, Runner


def python(code: str, environment: dict[str, str] | None = None) -> str:
    """Runs `code` in a new interpreter and returns its output."""
    variables_of_process = {**os.environ, "PYTHONPATH": str(RUNNER), **(environment or {})}
    done = subprocess.run(
        [sys.executable, "-c", code], env=variables_of_process, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise AssertionError(done.stderr)
    return done.stdout


# Forks twice; each child draws from `expression` before and after reseed(), and the parent prints
# all four.
_TWO_CHILDREN = """
import os, sys
from cellblock_runner.reseed import reseed
{setup}
def child(renew):
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        if renew: reseed()
        os.write(write, repr({expression}).encode())
        os._exit(0)
    os.close(write)
    os.waitpid(pid, 0)
    return open(read, 'rb').read()
print(child(False) == child(False), child(True) == child(True))
"""


# Every way to access a lazy module, each in a new interpreter, and its output.
_WAYS_TO_ASK = (
    ("hashlib.sha256(b'').hexdigest()[:4]", "'e3b0'"),
    ("exec('from hashlib import *') or sha256(b'').hexdigest()[:4]", "'e3b0'"),
    ("exec('from hashlib import sha256') or sha256(b'').hexdigest()[:4]", "'e3b0'"),
    ("'sha256' in dir(hashlib)", "True"),
    (
        "(hasattr(hashlib, 'sha255'), hasattr(hashlib, '__path__'), hashlib.__package__)",
        "(False, False, '')",
    ),
    ("__import__('asyncio').run(__import__('asyncio.tasks', fromlist=['']).sleep(0, 5))", "5"),
    ("__import__('pickle').loads(__import__('pickle').dumps([1]))", "[1]"),
    # All threads get it, also those that access it while the access of another one runs its code.
    (
        "set(__import__('concurrent.futures', "
        "fromlist=['']).ThreadPoolExecutor(16).map(lambda n: hashlib.sha256(b'').hexdigest()[:4], "
        "range(64)))",
        "{'e3b0'}",
    ),
)


class Preparing(unittest.TestCase):
    def test_modules_that_come_later_come_when_they_are_asked_for(self) -> None:
        for question, answer in _WAYS_TO_ASK:
            told = python(
                "import sys\nfrom cellblock_runner.zygote import import_lazily\n"
                "import_lazily()\n"
                "import hashlib\nbefore = '_hashlib' in sys.modules\nsys.setswitchinterval(1e-6)\n"
                f"print(before, repr({question}))\n"
            )
            self.assertEqual(told, f"False {answer}\n", question)

    def test_prepare_leaves_one_thread_no_names_and_counter_one(self) -> None:
        preload = [
            name
            for name in ("numpy", "pandas", "matplotlib.pyplot", "no_such_module")
            if name[:2] == "no" or find_spec(name.split(".")[0])
        ]
        told = python(
            "import os\nfrom cellblock_runner.serve import prepare\n"
            f"shell = prepare({preload!r})\n"
            "names = shell.user_ns\n"
            "tasks = os.listdir('/proc/self/task')\n"
            "print(len(tasks), shell.execution_count, names['In'], names['Out'], [names['_']])\n"
            "print(sorted(n for n in shell.user_ns if n[0] != '_'))"
        )
        self.assertEqual(told.splitlines()[0], "1 1 [''] {} ['']")
        self.assertEqual(
            told.splitlines()[1], "['In', 'Out', 'exit', 'get_ipython', 'open', 'quit']"
        )

    def test_a_thread_that_was_preloaded_is_refused(self) -> None:
        told = python(
            "import sys, threading, types\n"
            "from cellblock_runner.serve import TooManyThreads, prepare\n"
            "threading.Thread(target=threading.Event().wait, name='stray', daemon=True).start()\n"
            "try: prepare([])\nexcept TooManyThreads as refused: print('stray' in str(refused))"
        )
        self.assertEqual(told, "True\n")

    def test_priming_again_changes_nothing(self) -> None:
        told = python(
            "import sys\nfrom cellblock_runner.serve import prepare, prime\nshell = prepare([])\n"
            "before = dict(shell.user_ns)\n"
            "prime(shell)\nprint(before == shell.user_ns, shell.execution_count, hasattr(sys, "
            "'last_value'))"
        )
        self.assertEqual(told, "True 1 False\n")

    def test_preloaded_modules_are_there(self) -> None:
        runner = Runner(preload="colorsys,no_such_module")
        self.addCleanup(runner.close)
        self.assertEqual(
            runner.run(
                "import sys\n'colorsys' in sys.modules, 'no_such_module' in sys.modules"
            ).order,
            ["value:(True, False)"],
        )


class Zygotes(unittest.TestCase):
    """The warm process, with `fake_tracer`."""

    def start(self) -> tuple[subprocess.Popen[bytes], socket.socket, socket.socket]:
        """Returns a zygote with its socket and the socket on which copies are ordered."""
        copies = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        copies.settimeout(TIMEOUT)
        self.addCleanup(copies.close)
        address = f"cellblock-zygote-{os.getpid()}-{id(self)}"
        copies.bind("\0" + address)
        copies.listen()
        warden, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        warden.settimeout(TIMEOUT)
        self.addCleanup(warden.close)
        command = [
            sys.executable,
            "-m",
            "tests.fake_tracer",
            address,
            "",
            "zygote",
            str(theirs.fileno()),
        ]
        surroundings = {**os.environ, "PYTHONPATH": str(RUNNER)}
        process = subprocess.Popen(
            command,
            pass_fds=[theirs.fileno()],
            env=surroundings,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        self.addCleanup(process.communicate)
        theirs.close()
        return process, warden, copies

    def warm_up(self, warden: socket.socket, work: str) -> None:
        plan = {
            "preload": [],
            "quick": True,
            "environment": [["GIVEN", "yes"]],
            "work_folder": work,
            "later": "ignored",
        }
        warden.send(json.dumps(plan).encode())
        # Nothing of a process that is copied once is moved, so it reports no addresses.
        self.assertEqual(json.loads(warden.recv(4096)), {"say": "warm", "objects": []})

    def test_copies_of_a_parked_zygote_are_fresh_sessions(self) -> None:
        process, warden, copies = self.start()
        work = tempfile.mkdtemp(prefix="runner-test-")
        self.addCleanup(shutil.rmtree, work)
        self.warm_up(warden, work)
        warden.send(json.dumps({"do": "park"}).encode())
        orders, _ = copies.accept()
        self.addCleanup(orders.close)
        self.assertEqual(process.wait(TIMEOUT), 1, "an original that is let go ends")
        for gate in (b"g", b"p"):
            session = Fresh(orders, gate, work)
            self.assertNotIn("lost", session.hello)
            result = session.run(
                "import os, subprocess\nos.environ['GIVEN'], os.getcwd(), "
                "subprocess.call('exit 3', shell=True)"
            )
            self.assertEqual(result.order, [f"value:('yes', '{work}', 3)"])
            self.assertEqual(
                session.run("len(In), 'x' in globals()\nx = 1\nprint(len(In))").order, ["out:3\n"]
            )
            session.hang_up()

    def test_a_zygote_that_is_asked_for_anything_else_ends(self) -> None:
        process, warden, _ = self.start()
        self.warm_up(warden, "/")
        warden.send(b'{"do": "dance"}')
        self.assertEqual(process.wait(TIMEOUT), 1)

    def test_a_zygote_ends_with_its_warden(self) -> None:
        process, warden, _ = self.start()
        self.warm_up(warden, "/")
        warden.close()
        self.assertEqual(process.wait(TIMEOUT), 0)


class Reseeding(unittest.TestCase):
    def check(self, setup: str, expression: str) -> None:
        """Children agree without reseeding (the control) and differ with it."""
        self.assertEqual(
            python(_TWO_CHILDREN.format(setup=setup, expression=expression)), "True False\n"
        )

    @unittest.skipUnless(find_spec("numpy"), "skipped: needs numpy")
    def test_numpys_global_state_differs(self) -> None:
        self.check("import numpy; numpy.random.random()", "numpy.random.random()")

    def test_authentication_keys_of_multiprocessing_differ(self) -> None:
        self.check("import multiprocessing", "bytes(multiprocessing.current_process().authkey)")

    def test_random_names_and_ssl_differ_after_reseeding(self) -> None:
        for setup, expression in (
            ("import random", "random.random()"),
            ("import tempfile", "next(tempfile._get_candidate_names())"),
            ("import ssl; ssl.RAND_bytes(8)", "ssl.RAND_bytes(8)"),
        ):
            told = python(_TWO_CHILDREN.format(setup=setup, expression=expression))
            self.assertEqual(told.split()[1], "False", setup)

    def test_nothing_is_imported(self) -> None:
        told = python(
            "import sys\nfrom cellblock_runner.reseed import reseed\nbefore = set(sys.modules)\n"
            "reseed()\n"
            "print(set(sys.modules) - before)"
        )
        self.assertEqual(told, "set()\n")


class Snapshots(unittest.TestCase):
    def test_a_snapshot_of_fifty_variables_costs_less_than_a_tenth_of_a_millisecond(self) -> None:
        import timeit

        class Plain:
            pass

        values = [1, 2.5, "text", [1, 2, 3], {"a": 1}, (1, 2), {1, 2}, Plain(), bytes(5), print]
        namespace = {f"name{number}": values[number % len(values)] for number in range(50)}
        best = (
            min(timeit.repeat(lambda: variables.snapshot(namespace, {}), number=20, repeat=30)) / 20
        )
        self.assertLess(best, 0.0001)
