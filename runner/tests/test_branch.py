"""Branching: the effect of a fork and an undo on everything that a session can hold.

Copies are made by `fake_tracer`, so these tests need no sandbox. Forks need permission to mount.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import unittest
from importlib.util import find_spec
from pathlib import Path

from cellblock_runner import fork_state

from .harness import TIMEOUT, Copy, Died, Result, Runner

_has_numpy = unittest.skipUnless(find_spec("numpy"), "skipped: needs numpy")


def _can_mount() -> bool:
    """Reports whether a test may mount folders on this machine."""
    attempts = (["unshare", "--mount"], ["unshare", "--mount", "--user", "--map-root-user"])
    try:
        return any(
            subprocess.run([*attempt, "true"], capture_output=True).returncode == 0
            for attempt in attempts
        )
    except FileNotFoundError:
        return False


_needs_mounts = unittest.skipUnless(_can_mount(), "skipped: needs permission to mount")


class BranchTest(unittest.TestCase):
    """Each test has its own session."""

    preload = ""
    scratch = False

    def setUp(self) -> None:
        self.source = Runner(self.preload, scratch=self.scratch)
        self.addCleanup(self.source.close)

    def run_ok(self, session: Runner, code: str) -> Result:
        result = session.run(code)
        self.assertEqual(result.done["status"], "ok", result.error)
        return result

    def assert_shows(self, session: Runner, code: str, *expected: str) -> None:
        self.assertEqual(self.run_ok(session, code).order, list(expected))

    def assert_fails(self, session: Runner, code: str, name: str) -> None:
        result = session.run(code)
        self.assertEqual(result.done["status"], "error", result.order)
        self.assertEqual(result.error["name"], name, result.error["traceback"])

    def undo(self, code: str = "pass", **options: object) -> Copy:
        """Runs a cell and undoes it."""
        return self.source.undo_after(code, **options)


class Undoing(BranchTest):
    """Tests with undo cover every copy; tests with forks below cover the differences."""

    def test_variables_counter_and_generators_are_as_they_were(self) -> None:
        self.run_ok(self.source, "x = [1]\ncounting = iter(range(10))\nnext(counting)")
        copy = self.undo("x.append(2); next(counting); y = 1")
        self.assertEqual(
            (copy.hello["lost"], copy.hello["files"], copy.hello["why"]), ([], "restored", None)
        )
        result = self.run_ok(copy, "x, next(counting), 'y' in globals(), len(In)")
        self.assertEqual(result.order, ["value:([1], 1, False, 3)"])

    def test_the_first_cell_of_a_copy_reports_its_own_changes_only(self) -> None:
        self.run_ok(self.source, "x = 1\nopen('a', 'w').close()")
        copy = self.undo("x = 2; y = 3; open('b', 'w').close()")
        done = self.run_ok(copy, "z = 5").done
        self.assertEqual([entry["name"] for entry in done["variables"]["created"]], ["z"])
        self.assertEqual(done["variables"]["changed"], [])
        self.assertEqual(done["files"], {"created": [], "changed": [], "deleted": [], "omitted": 0})

    def test_one_checkpoint_gives_many_copies(self) -> None:
        self.run_ok(self.source, "x = 1")
        checkpoint = self.source.branch()
        self.source.process.kill()
        self.source.process.wait(TIMEOUT)
        for _ in range(3):
            copy = checkpoint.spawn(b"u")
            self.assert_shows(copy, "x += 1\nx", "value:2")
            copy.hang_up()

    def test_a_copy_can_be_copied_again_and_again(self) -> None:
        session: Runner = self.source
        self.run_ok(session, "depth = 0")
        for depth in range(1, 5):
            checkpoint = session.branch()
            session = checkpoint.spawn(b"u")
            self.assert_shows(session, "depth += 1\nprint(depth)", f"out:{depth}\n")

    def test_the_source_goes_on_after_a_checkpoint(self) -> None:
        for number in range(20):
            self.assertEqual(self.source.branch().lost, [])
            self.assert_shows(self.source, f"print({number})", f"out:{number}\n")

    def test_output_of_all_kinds_is_in_order_in_a_copy(self) -> None:
        copy = self.undo()
        self.assert_shows(
            copy,
            "import os, sys\nprint('a'); n = os.write(1, b'b\\n'); print('c', file=sys.stderr)\n"
            "!echo d\nprint('e')\n1",
            *["out:a\nb\n", "err:c\n", "out:d\ne\n", "value:1"],
        )
        self.assert_shows(copy, "print('next')", "out:next\n")

    def test_what_c_code_had_printed_is_not_printed_twice(self) -> None:
        self.run_ok(
            self.source,
            "import ctypes\nprintf = ctypes.CDLL(None).printf\nhalf = printf(b'no newline')",
        )
        self.assert_shows(self.undo(), "print('clean')", "out:clean\n")

    def test_an_interrupt_reaches_a_copy(self) -> None:
        copy = self.undo()
        # Python does not notice a signal that arrives just before it begins to sleep, so no sleep
        # is long.
        copy.begin("print('on')\nimport time\nwhile True: time.sleep(0.01)")
        self.assertEqual(
            copy.finish(watch=copy.interrupt_when("on")).error["name"], "KeyboardInterrupt"
        )
        self.assert_shows(copy, "2", "value:2")

    def test_what_a_user_puts_in_the_place_of_fork_and_kill_is_not_called(self) -> None:
        self.run_ok(
            self.source,
            "import os\ndef no(*_): raise ValueError\nos.fork = os.kill = os.getpid = no",
        )
        self.assertEqual(self.source.branch().lost, [])

    def test_a_hook_that_refuses_forks_is_an_answer(self) -> None:
        self.run_ok(
            self.source,
            "import sys\ndef hook(event, arguments):\n"
            "    if event == 'os.fork': raise RuntimeError('never')\n"
            "sys.addaudithook(hook)",
        )
        [answer] = self.source.request({"type": "branch", "id": 99})
        self.assertEqual((answer.header["type"], answer.header["reason"]), ("failed", "other"))
        self.assert_shows(self.source, "1", "value:1")

    def test_fork_handlers_run_in_a_copy(self) -> None:
        self.run_ok(
            self.source,
            "import os\nseen = []\nos.register_at_fork(after_in_child=lambda: "
            "seen.append('child'))",
        )
        self.assert_shows(self.undo(), "'child' in seen", "value:True")
        # The control: they do not run in the source. It has ended by now, so another one shows it.
        other = Runner()
        self.addCleanup(other.close)
        other.run(
            "import os\nseen = []\nos.register_at_fork(after_in_child=lambda: seen.append('child'))"
        )
        other.branch()
        self.assert_shows(other, "seen", "value:[]")

    def test_a_gate_that_is_not_opened_ends_the_copy(self) -> None:
        checkpoint = self.source.branch()
        self.assertRaises(Died, checkpoint.spawn, b"?")
        self.assert_shows(checkpoint.spawn(b"u"), "1", "value:1")


class Randomness(BranchTest):
    preload = "numpy"

    def test_every_source_differs_between_copies_of_one_checkpoint(self) -> None:
        self.run_ok(
            self.source,
            "import random, secrets, ssl, tempfile, uuid, multiprocessing as mp\n"
            "drawn = random.random(), ssl.RAND_bytes(8), uuid.uuid1(), "
            "next(tempfile._get_candidate_names())\n"
            "try:\n    import numpy\n    drawn += (numpy.random.random(),)\n"
            "except ImportError: numpy = None\n",
        )
        checkpoint = self.source.branch()
        one, other = checkpoint.spawn(b"u"), checkpoint.spawn(b"u")
        for expression in (
            "random.random()",
            "secrets.token_hex()",
            "uuid.uuid4()",
            "uuid.uuid1()",
            "ssl.RAND_bytes(8)",
            "next(tempfile._get_candidate_names())",
            "bytes(mp.current_process().authkey)",
            "numpy and numpy.random.random()",
            "numpy and numpy.random.default_rng().random()",
            "os.getpid()",
        ):
            with self.subTest(expression):
                first, second = (
                    self.run_ok(each, f"import os\n{expression}").value for each in (one, other)
                )
                if find_spec("numpy") or "numpy" not in expression:
                    self.assertNotEqual(first, second)

    def test_a_generator_that_was_seeded_draws_the_same_in_source_and_copies(self) -> None:
        self.run_ok(
            self.source,
            "import random\nrandom.seed(1); random.random()\n"
            "try:\n    import numpy; numpy.random.seed(1); numpy.random.rand()\n"
            "except ImportError: numpy = None\n"
            "def draw(): return random.random(), random.gauss(0, 1), numpy and numpy.random.rand()",
        )
        checkpoint = self.source.branch()
        sessions = (
            checkpoint.spawn(b"u"),
            checkpoint.spawn(b"u").branch().spawn(b"u"),
            self.source,
        )
        self.assertEqual(len({str(self.run_ok(each, "draw()").value) for each in sessions}), 1)

    def test_a_generator_that_was_seeded_by_the_kernel_again_differs(self) -> None:
        self.run_ok(self.source, "import random\nrandom.seed(1)")
        self.run_ok(self.source, "random.seed()")
        checkpoint = self.source.branch()
        one, other = (
            self.run_ok(checkpoint.spawn(b"u"), "random.random()").value for _ in range(2)
        )
        self.assertNotEqual(one, other)

    def test_copies_that_are_given_one_seed_draw_the_same_until_they_are_copied(self) -> None:
        self.run_ok(
            self.source, "import random\ndef draw(): return random.random(), random.gauss(0, 1)"
        )
        checkpoint = self.source.branch()
        numbers = "import sys\n" + (
            "import numpy.random\ndraw(), numpy.random.rand()" if find_spec("numpy") else "draw()"
        )
        one, other, third = (checkpoint.spawn(b"u") for _ in range(3))
        first, second = (each.run(numbers, seed=2**63 + 5).value for each in (one, other))
        self.assertEqual(first, second)
        self.assertNotEqual(first, third.run(numbers, seed=7).value)
        # They continue alike, count as unseeded, and their own copies differ.
        self.assertEqual(self.run_ok(one, "draw()").value, self.run_ok(other, "draw()").value)
        kept = one.branch()
        copies = [kept.spawn(b"u") for _ in range(2)]
        self.assertEqual(copies[0].hello["seeded"], [])
        self.assertNotEqual(*(str(self.run_ok(each, "draw()").value) for each in copies))

    def test_a_shared_seed_leaves_a_seeded_generator_alone_and_the_hello_names_it(self) -> None:
        self.run_ok(self.source, "import random\nrandom.seed(1)")
        checkpoint = self.source.branch()
        copy = checkpoint.spawn(b"u")
        self.assertEqual(copy.hello["seeded"], ["random"])
        shared = copy.run("random.random()", seed=5).value
        self.assertEqual(shared, self.run_ok(self.source, "random.random()").value)

    def test_generators_that_a_user_keeps_are_state_like_any_other(self) -> None:
        self.run_ok(self.source, "import random\nmine = random.Random()")
        checkpoint = self.source.branch()
        one, other = checkpoint.spawn(b"u"), checkpoint.spawn(b"u")
        self.assertEqual(
            self.run_ok(one, "mine.random()").value, self.run_ok(other, "mine.random()").value
        )


class Surroundings(BranchTest):
    def test_the_current_folder_stays(self) -> None:
        self.run_ok(self.source, "import os\nos.mkdir('inner'); os.chdir('inner')")
        copy = self.undo("os.chdir('/')")
        self.assert_shows(copy, "print(os.getcwd())", f"out:{self.source.workdir}/inner\n")
        self.assertEqual(copy.hello["lost"], [])

    def test_a_current_folder_that_is_gone_is_told(self) -> None:
        self.run_ok(self.source, "import os, tempfile\nos.chdir(tempfile.mkdtemp())")
        copy = self.undo("os.rmdir(os.getcwd())")
        self.assertEqual(
            copy.hello["lost"], [f"the current folder, which is {self.source.workdir} now"]
        )
        self.assert_shows(copy, "print(os.getcwd())", f"out:{self.source.workdir}\n")

    def test_the_mask_for_new_files_stays(self) -> None:
        self.run_ok(self.source, "import os\nold = os.umask(0o027)")
        self.assert_shows(self.undo(), "oct(os.umask(0))", "value:'0o27'")

    def test_the_mask_for_new_files_stays_beside_threads(self) -> None:
        self.run_ok(
            self.source,
            "import os, threading\nend = threading.Event(); "
            "threading.Thread(target=end.wait).start()",
        )
        self.run_ok(self.source, "old = os.umask(0o027)")
        self.assert_shows(self.undo("end.set()"), "oct(os.umask(0))", "value:'0o27'")

    def test_limits_and_niceness_stay(self) -> None:
        limits = (
            "[resource.getrlimit(each) for each in (resource.RLIMIT_NOFILE, resource.RLIMIT_STACK)]"
        )
        code = (
            "import os, resource\nhard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
            "resource.setrlimit(resource.RLIMIT_NOFILE, (500, hard))\n"
            "resource.setrlimit(resource.RLIMIT_STACK, (4_000_000, 8_000_000))\nos.nice(3)\n"
        )
        self.run_ok(self.source, code)
        niceness = self.run_ok(self.source, "os.nice(0)").value
        expected = self.run_ok(self.source, limits).value
        copy = self.undo()
        self.assertEqual(copy.hello["lost"], [])
        self.assertEqual(self.run_ok(copy, limits).value, expected)
        self.assertEqual(self.run_ok(copy, "os.nice(0)").value, niceness)

    def test_a_limit_that_cannot_be_set_is_named(self) -> None:
        given, wanted = fork_state.current_limits(), fork_state.current_limits()
        hard = wanted.limits[resource.RLIMIT_NOFILE][1]
        wanted.limits[resource.RLIMIT_NOFILE] = (hard + 1, hard)
        self.assertEqual(fork_state.apply_limits(wanted, given), ["the limit RLIMIT_NOFILE"])
        # Limits that the code has not changed are those of the copy.
        self.assertEqual(fork_state.apply_limits(wanted, wanted), [])

    def test_handlers_of_signals_stay(self) -> None:
        self.run_ok(
            self.source,
            "import os, signal\nheard = []\n"
            "old = signal.signal(signal.SIGUSR1, lambda *_: heard.append(1))\n"
            "old = signal.signal(signal.SIGUSR2, signal.SIG_IGN)",
        )
        copy = self.undo()
        self.assert_shows(
            copy,
            "os.kill(os.getpid(), signal.SIGUSR1); os.kill(os.getpid(), signal.SIGUSR2)\n"
            "os.kill(os.getpid(), signal.SIGPIPE)\nheard",
            "value:[1]",
        )

    def test_blocked_signals_stay_blocked_and_others_do_not_become_so(self) -> None:
        self.run_ok(
            self.source,
            "import signal\nold = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})",
        )
        copy = self.undo("old = signal.pthread_sigmask(signal.SIG_SETMASK, ())")
        self.assert_shows(
            copy,
            "print([each.name for each in signal.pthread_sigmask(signal.SIG_BLOCK, ())])",
            "out:['SIGUSR2']\n",
        )

    def test_children_of_a_copy_can_be_waited_for(self) -> None:
        copy = self.undo()
        self.assert_shows(
            copy, "import subprocess\nsubprocess.run('exit 3', shell=True).returncode", "value:3"
        )

    def test_fault_reports_stay_on(self) -> None:
        self.run_ok(self.source, "import faulthandler, os, signal\nfaulthandler.enable()")
        copy = self.undo()
        copy.begin("os.kill(os.getpid(), signal.SIGSEGV)")
        with self.assertRaises(Died) as died:
            copy.finish()
        self.assertIn("Segmentation fault", Result(died.exception.events, {}).text)

    def test_a_timer_is_told(self) -> None:
        self.run_ok(
            self.source,
            "import signal\nold = signal.signal(signal.SIGALRM, lambda *_: None)\n"
            "old = signal.alarm(600)",
        )
        self.assertEqual(self.undo("signal.alarm(0)").hello["lost"], ["1 timer"])


class Descriptors(BranchTest):
    def test_a_file_that_is_read_goes_on_where_it_was(self) -> None:
        self.run_ok(
            self.source,
            "open('a', 'w').write('first\\nsecond\\nthird\\n')\nf = open('a')\nf.readline()",
        )
        copy = self.undo("rest = f.read()")
        self.assert_shows(copy, "f.read()", "value:'second\\nthird\\n'")
        self.assertEqual(copy.hello["lost"], [])

    def test_what_was_written_but_not_flushed_is_written_once(self) -> None:
        self.run_ok(self.source, "f = open('a', 'w')\nf.write('one ')\nf.flush()\nf.write('two ')")
        copy = self.undo("f.write('never'); f.close()")
        self.assert_shows(
            copy, "f.write('three'); f.close(); print(open('a').read())", "out:one two three\n"
        )

    def test_a_file_that_is_appended_to_is_still_appended_to(self) -> None:
        self.run_ok(self.source, "open('a', 'w').write('123')\nf = open('a', 'ab', 0)")
        copy = self.undo("f.write(b'never')")
        self.assert_shows(copy, "f.seek(0); f.write(b'4'); print(open('a').read())", "out:1234\n")

    def test_duplicates_share_their_place_and_others_do_not(self) -> None:
        self.run_ok(
            self.source,
            "import os\nopen('a', 'w').write('0123456789')\n"
            "a = os.open('a', os.O_RDONLY); b = os.dup(a)\n"
            "c = os.open('a', os.O_RDONLY)",
        )
        copy = self.undo("os.read(a, 5)")
        self.assert_shows(
            copy, "os.read(a, 3), os.read(b, 3), os.read(c, 3)", "value:(b'012', b'345', b'012')"
        )

    def test_a_file_without_a_name_keeps_its_content(self) -> None:
        self.run_ok(
            self.source,
            "import os, tempfile\nt = tempfile.TemporaryFile(); t.write(b'abc'); t.flush()\n"
            "m = os.memfd_create('x'); os.write(m, b'memory')\n"
            "r = open('r', 'w+'); r.write('removed'); r.flush(); os.unlink('r')",
        )
        copy = self.undo("t.seek(0); t.write(b'XXX'); t.flush(); os.pwrite(m, b'X', 0)")
        self.assertEqual(copy.hello["lost"], [])
        self.assert_shows(
            copy,
            "t.tell(), t.seek(0), t.read(), os.pread(m, 9, 0), r.seek(0), r.read()",
            "value:(3, 0, b'abc', b'memory', 0, 'removed')",
        )

    def test_a_large_file_without_a_name_is_told(self) -> None:
        self.run_ok(self.source, "import os\nm = os.memfd_create('x'); os.truncate(m, 9 << 20)")
        copy = self.undo()
        self.assertEqual(copy.hello["lost"], ["1 deleted file"])
        self.assert_fails(copy, "os.read(m, 1)", "OSError")

    def test_a_file_that_cannot_be_opened_again_is_dead_and_its_number_is_not_given_away(
        self,
    ) -> None:
        self.run_ok(
            self.source,
            "import os, tempfile\nfolder = tempfile.mkdtemp()\n"
            "f = open(folder + '/data.bin', 'wb', 0); f.write(b'1')",
        )
        copy = self.undo("os.unlink(folder + '/data.bin')")
        self.assertEqual(copy.hello["lost"], ["1 open file (data.bin)"])
        self.run_ok(copy, "other = open('other', 'wb', 0)")
        self.assert_fails(copy, "f.write(b'2')", "OSError")
        self.assert_shows(copy, "f.close(); os.path.getsize('other')", "value:0")

    def test_another_file_in_the_place_of_an_open_one_is_not_taken_for_it(self) -> None:
        self.run_ok(
            self.source,
            "import os, tempfile\nname = tempfile.mkdtemp() + '/x'\nf = open(name, 'w+')",
        )
        copy = self.undo("os.unlink(name); open(name, 'w').write('of another')")
        self.assertEqual(copy.hello["lost"], ["1 open file (x)"])
        self.assert_fails(copy, "f.read()", "OSError")

    def test_devices_folders_and_their_flags_come_back(self) -> None:
        self.run_ok(
            self.source,
            "import os\nz = os.open('/dev/zero', os.O_RDONLY); d = os.open('.', os.O_RDONLY)\n"
            "open('a', 'w').close()\n"
            "i = os.open('/dev/null', os.O_RDONLY); os.set_inheritable(i, True)",
        )
        copy = self.undo()
        self.assert_shows(
            copy,
            "os.read(z, 2), os.listdir(d), os.get_inheritable(i), os.get_inheritable(z)",
            "value:(b'\\x00\\x00', ['a'], True, False)",
        )

    def test_a_duplicate_of_standard_output_leads_to_the_new_pipe(self) -> None:
        self.run_ok(self.source, "import os\nsaved = os.dup(1)")
        copy = self.undo()
        self.assertEqual(copy.hello["lost"], [])
        self.assert_shows(copy, "size = os.write(saved, b'heard\\n')", "out:heard\n")

    def test_what_a_user_has_redirected_stays_redirected(self) -> None:
        self.run_ok(
            self.source,
            "import os\nsaved = os.dup(1)\nf = open('log', 'wb'); n = os.dup2(f.fileno(), 1)\n"
            "os.write(1, b'one ')",
        )
        copy = self.undo("os.write(1, b'never')")
        self.assertEqual(copy.hello["lost"], [])
        self.assert_shows(
            copy, "n = os.write(1, b'two'); print(open('log').read())", "out:one two\n"
        )
        self.assert_shows(copy, "n = os.dup2(saved, 1); n = os.write(1, b'back\\n')", "out:back\n")

    def test_locks_are_held_again(self) -> None:
        self.run_ok(
            self.source,
            "import fcntl, os\nf = open('a', 'w'); fcntl.flock(f, fcntl.LOCK_EX)\n"
            "g = open('b', 'w'); fcntl.lockf(g, fcntl.LOCK_EX, 10, 5)",
        )
        copy = self.undo()
        attempt = (
            "import fcntl\ntry: fcntl.{how}(open('{name}', 'w'), fcntl.LOCK_EX | fcntl.LOCK_NB); "
            "print('free')\n"
            "except OSError: print('held')"
        )
        codes = [
            attempt.format(how=how, name=name) for how, name in (("flock", "a"), ("lockf", "b"))
        ]
        for code in codes:
            self.assert_shows(
                copy,
                f"import subprocess, sys\ndone = subprocess.run([sys.executable, '-c', {code!r}])",
                "out:held\n",
            )
        # The control: no process holds them any more.
        self.run_ok(copy, "f.close(); g.close()")
        for code in codes:
            self.assert_shows(
                copy, f"done = subprocess.run([sys.executable, '-c', {code!r}])", "out:free\n"
            )

    def test_connections_are_told_and_dead(self) -> None:
        self.run_ok(
            self.source,
            "import socket\nlistening = socket.create_server(('127.0.0.1', 0))\n"
            "client = socket.create_connection(listening.getsockname()); "
            "served, _ = listening.accept()\n"
            "plain = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)",
        )
        copy = self.undo("client.send(b'x')")
        self.assertEqual(copy.hello["lost"], ["1 listening socket", "2 connections", "1 socket"])
        self.assert_fails(copy, "client.send(b'x')", "OSError")
        self.assert_fails(copy, "listening.accept()", "OSError")
        self.assert_shows(
            copy,
            "client.close(); listening.close()\n"
            "socket.create_server(('127.0.0.1', 0)).fileno() > 2",
            "value:True",
        )

    def test_pipes_with_both_ends_here_are_made_anew_with_what_is_in_them(self) -> None:
        self.run_ok(
            self.source,
            "import os\na, b = os.pipe(); os.set_blocking(a, False); c = os.dup(b)\n"
            "os.write(b, b'in it'); d, e = os.pipe2(os.O_NONBLOCK)",
        )
        copy = self.source.branch().spawn(b"u")
        self.assertEqual(copy.hello["lost"], [])
        for session in (copy, self.source):
            self.assert_shows(
                session,
                "os.write(c, b', more'); os.write(e, b'x')\n"
                "os.read(a, 99), os.read(d, 9), os.get_blocking(a), os.get_blocking(b), "
                "os.get_blocking(e)",
                "value:(b'in it, more', b'x', False, True, False)",
            )

    def test_half_a_pipe_is_told_and_dead(self) -> None:
        self.run_ok(
            self.source, "import os\na, b = os.pipe(); os.close(b)\nc, d = os.pipe(); os.close(c)"
        )
        copy = self.undo()
        self.assertEqual(copy.hello["lost"], ["2 pipes"])
        self.assert_fails(copy, "os.read(a, 1)", "OSError")
        self.assert_fails(copy, "os.write(d, b'x')", "OSError")

    def test_counters_and_what_watches_them_are_made_anew(self) -> None:
        self.run_ok(
            self.source,
            "import ctypes, os, select, struct\nc = ctypes.CDLL(None)\n"
            "counter = c.eventfd(5, os.O_NONBLOCK); same = os.dup(counter)\n"
            "other = c.eventfd(0, os.O_NONBLOCK | 1)\n"
            "poll = select.epoll(); poll.register(same, select.EPOLLIN); "
            "poll.register(other, select.EPOLLIN)\n"
            "def read(number): return struct.unpack('Q', os.read(number, 8))[0]",
        )
        copy = self.source.branch().spawn(b"u")
        self.assertEqual(copy.hello["lost"], [])
        for session in (copy, self.source):
            self.assert_shows(
                session,
                "first = poll.poll(0) == [(same, 1)]; os.write(counter, struct.pack('Q', 2))\n"
                "os.write(other, struct.pack('Q', 3)); "
                "first, read(same), read(other), read(other), len(poll.poll(0))",
                "value:(True, 7, 1, 1, 1)",
            )


class Lost(BranchTest):
    def test_subprocesses_are_told(self) -> None:
        self.run_ok(self.source, "import subprocess\np = subprocess.Popen(['sleep', '600'])")
        copy = self.undo("p.kill(); p.wait()")
        self.assertEqual(copy.hello["lost"], ["1 subprocess"])

    def test_a_subprocess_with_a_pipe_is_told_with_it(self) -> None:
        self.run_ok(
            self.source, "import subprocess\np = subprocess.Popen(['cat'], stdin=subprocess.PIPE)"
        )
        copy = self.undo("p.communicate()")
        self.assertEqual(copy.hello["lost"], ["1 subprocess", "1 pipe"])
        self.assert_fails(copy, "p.stdin.write(b'x'); p.stdin.flush()", "OSError")

    def test_the_loop_of_cells_that_await_goes_on(self) -> None:
        self.run_ok(
            self.source,
            "import asyncio\nasync def later():\n    await asyncio.sleep(0.01)\n    return 5\n"
            "task = asyncio.create_task(later())\nawait asyncio.sleep(0)",
        )
        copy = self.undo("await task")
        self.assertEqual(copy.hello["lost"], [])
        self.assert_shows(copy, "await task", "value:5")
        self.assert_shows(copy, "await asyncio.to_thread(lambda: 6)", "value:6")

    def test_a_task_that_waits_for_a_connection_is_told(self) -> None:
        self.run_ok(
            self.source,
            "import asyncio, socket\nlistener = socket.create_server(('127.0.0.1', 0))\n"
            "a = socket.create_connection(listener.getsockname()); a.setblocking(False)\n"
            "b = listener.accept()[0]; listener.close()\n"
            "task = asyncio.create_task(asyncio.get_running_loop().sock_recv(a, 1))\n"
            "await asyncio.sleep(0)",
        )
        copy = self.undo("b.send(b'x'); await task")
        self.assertEqual(copy.hello["lost"], ["1 asyncio task", "2 connections"])
        self.assert_shows(copy, "await asyncio.sleep(0, 7)", "value:7")

    def test_a_task_that_waits_for_a_pair_of_sockets_goes_on(self) -> None:
        self.run_ok(
            self.source,
            "import asyncio, socket\na, b = socket.socketpair(); a.setblocking(False)\n"
            "task = asyncio.create_task(asyncio.get_running_loop().sock_recv(a, 1))\n"
            "await asyncio.sleep(0)",
        )
        copy = self.undo("b.send(b'x'); await task")
        self.assertEqual(copy.hello["lost"], [])
        self.assert_shows(copy, "b.send(b'x'); await asyncio.wait_for(task, 10)", "value:b'x'")

    def test_a_loop_that_a_user_keeps_goes_on(self) -> None:
        self.run_ok(self.source, "import asyncio\nmine = asyncio.new_event_loop()")
        copy = self.undo()
        self.assertEqual(copy.hello["lost"], [])
        self.assert_shows(copy, "mine.run_until_complete(asyncio.sleep(0.001, 7))", "value:7")

    def test_a_loop_that_runs_in_a_thread_takes_work_from_others(self) -> None:
        self.run_ok(
            self.source,
            "import asyncio, threading\n"
            "def start():\n    loop = asyncio.new_event_loop()\n"
            "    thread = threading.Thread(target=loop.run_forever, daemon=True)\n"
            "    thread.start()\n    return lambda work: asyncio.run_coroutine_threadsafe(work, "
            "loop).result(10)\nask = start()\n"
            "ask(asyncio.sleep(0, 1))",
        )
        copy = self.source.branch().spawn(b"u")
        self.assertEqual(copy.hello["lost"], [])
        self.assert_shows(copy, "ask(asyncio.sleep(0.001, 7))", "value:7")
        self.assert_shows(self.source, "ask(asyncio.sleep(0.001, 8))", "value:8")

    def test_a_pool_of_threads_starts_new_ones_where_they_are_lost(self) -> None:
        self.run_ok(
            self.source,
            "from concurrent.futures import ThreadPoolExecutor\nimport threading\nover = False\n"
            "def spin():\n    while not over: pass\n"
            "thread = threading.Thread(target=spin); thread.start()\n"
            "pool = ThreadPoolExecutor(2); list(pool.map(str, range(9)))",
        )
        copy = self.source.branch().spawn(b"u")
        self.assert_shows(copy, "pool.submit(lambda: 5).result(10)", "value:5")
        self.run_ok(self.source, "over = True; thread.join()")

    def test_a_pool_of_processes_raises_at_once(self) -> None:
        for code, use, name in (
            (
                "from concurrent.futures import ProcessPoolExecutor\n"
                "pool = ProcessPoolExecutor(1)\npool.submit(abs, -1).result()",
                "pool.submit(abs, -2)",
                "BrokenProcessPool",
            ),
            (
                "from multiprocessing import Pool\npool = Pool(1)\npool.apply(abs, (-1,))",
                "pool.apply(abs, (-2,))",
                "ValueError",
            ),
        ):
            with self.subTest(name):
                source = Runner()
                self.addCleanup(source.close)
                self.run_ok(source, code)
                copy = source.branch().spawn(b"u")
                self.assert_fails(copy, use, name)
                self.run_ok(
                    copy,
                    "pool.shutdown() if hasattr(pool, 'shutdown') else (pool.terminate(), "
                    "pool.join())",
                )
                self.run_ok(
                    source, "pool.shutdown() if hasattr(pool, 'shutdown') else pool.terminate()"
                )

    def test_multiprocessing_works_in_a_copy_of_a_session_that_used_it(self) -> None:
        self.run_ok(
            self.source,
            "from multiprocessing import resource_tracker\nresource_tracker.ensure_running()",
        )
        copy = self.undo()
        self.assertEqual(copy.hello["lost"], [])
        self.assert_shows(
            copy,
            "import multiprocessing as mp\n"
            "with mp.get_context('fork').Pool(1) as pool: print(pool.map(abs, [-1]))",
            "out:[1]\n",
        )
        code = (
            "from multiprocessing import shared_memory\n"
            "n = shared_memory.SharedMemory(create=True, size=5); n.close(); n.unlink()"
        )
        self.assert_shows(copy, code)


class SharedMemory(BranchTest):
    scratch = True

    def test_memory_without_a_name_is_not_shared_with_a_copy(self) -> None:
        self.run_ok(self.source, "import mmap\nm = mmap.mmap(-1, 10000)\nm[:5] = b'first'")
        checkpoint = self.source.branch()
        self.run_ok(self.source, "m[:5] = b'later'")
        copy = checkpoint.spawn(b"u")
        self.assertEqual(copy.hello["lost"], [])
        self.assert_shows(copy, "m[:5]", "value:b'first'")
        self.run_ok(copy, "m[:5] = b'other'")
        self.assert_shows(self.source, "m[:5]", "value:b'later'")

    def test_the_control_a_plain_fork_shares_it(self) -> None:
        self.assert_shows(
            self.source,
            "import mmap, os\nm = mmap.mmap(-1, 10)\nchild = os.fork()\nif child == 0:\n"
            "    m[:1] = b'x'; os._exit(0)\n"
            "os.waitpid(child, 0)\nm[:1]",
            "value:b'x'",
        )

    def test_large_memory_is_copied_late_and_told(self) -> None:
        self.run_ok(self.source, "import mmap\nm = mmap.mmap(-1, 9 << 20)\nm[:5] = b'first'")
        checkpoint = self.source.branch()
        self.run_ok(self.source, "m[:5] = b'later'")
        copy = checkpoint.spawn(b"u")
        self.assertEqual(copy.hello["lost"], ["the exact content of 1 shared memory area"])
        self.run_ok(copy, "m[:5] = b'other'")
        self.assert_shows(self.source, "m[:5]", "value:b'later'")

    def test_a_mapped_file_without_a_name_is_one_with_its_descriptor(self) -> None:
        self.run_ok(
            self.source,
            "import mmap, os\nn = os.memfd_create('x'); os.truncate(n, 8192)\n"
            "m = mmap.mmap(n, 8192)\nm[:5] = b'first'",
        )
        copy = self.undo("m[:5] = b'later'")
        self.assert_shows(copy, "m[:5], os.pread(n, 5, 0)", "value:(b'first', b'first')")
        self.assert_shows(copy, "m[:5] = b'other'\nos.pread(n, 5, 0)", "value:b'other'")

    def test_undo_brings_back_a_mapped_file_of_the_work_folder(self) -> None:
        self.run_ok(
            self.source,
            "import mmap\nopen('a', 'wb').write(b'first' * 2000)\n"
            "f = open('a', 'r+b'); m = mmap.mmap(f.fileno(), 0)",
        )
        copy = self.undo("m[:5] = b'later'")
        self.assertEqual(copy.hello["lost"], [])
        self.assert_shows(copy, "m[:5]\nm[:5] = b'other'; print(open('a').read(5))", "out:other\n")

    def test_undo_that_leaves_files_alone_leaves_mapped_files_alone(self) -> None:
        self.run_ok(
            self.source,
            "import mmap\nopen('a', 'wb').write(b'first' * 2000)\n"
            "f = open('a', 'r+b'); m = mmap.mmap(f.fileno(), 0)",
        )
        copy = self.undo("m[:5] = b'later'", undo_files=0)
        self.assert_shows(copy, "print(m[:5], open('a').read(5))", "out:b'later' later\n")

    def test_a_removed_file_that_is_only_mapped_keeps_its_content(self) -> None:
        self.run_ok(
            self.source,
            "import ctypes, os\nopen('a', 'wb').write(b'first' * 2000)\n"
            "n = os.open('a', os.O_RDWR)\n"
            "c = ctypes.CDLL(None); c.mmap.restype = ctypes.c_void_p\n"
            "m = c.mmap(None, 4096, 3, 1, n, 0); os.close(n); os.unlink('a')",
        )
        copy = self.undo("ctypes.memmove(m, b'later', 5)")
        self.assertEqual(copy.hello["lost"], [])
        self.assert_shows(copy, "ctypes.string_at(m, 5)", "value:b'first'")

    def test_undo_brings_back_mapped_files_of_other_folders(self) -> None:
        self.run_ok(
            self.source,
            f"import mmap\nname = {self.source.scratch!r} + '/x'\n"
            "open(name, 'wb').write(b'first' * 2000)\n"
            "f = open(name, 'r+b'); m = mmap.mmap(f.fileno(), 0)",
        )
        copy = self.undo("m[:5] = b'later'")
        self.assertEqual(copy.hello["lost"], [])
        self.assert_shows(copy, "print(m[:5], open(name).read(5))", "out:b'first' first\n")

    def test_a_mapping_that_is_longer_than_its_file_harms_nobody(self) -> None:
        self.run_ok(
            self.source,
            "import mmap, os\nn = os.memfd_create('x'); os.truncate(n, 1 << 20)\n"
            "m = mmap.mmap(n, 1 << 20)\n"
            "os.truncate(n, 5000); os.close(n); m[0] = 7",
        )
        copy = self.undo()
        self.assert_shows(copy, "m[0]", "value:7")


class Databases(BranchTest):
    def test_a_database_in_memory_is_state_like_any_other(self) -> None:
        self.run_ok(
            self.source,
            "import sqlite3\nc = sqlite3.connect(':memory:'); c.execute('create table t (x)')\n"
            "None",
        )
        copy = self.undo("c.execute('insert into t values (1)')")
        self.assert_shows(copy, "c.execute('select count(*) from t').fetchone()", "value:(0,)")

    def check(self, setup: str = "", in_transaction: bool = False) -> Copy:
        self.run_ok(
            self.source,
            f"import sqlite3\nc = sqlite3.connect('d.db')\n{setup}\n"
            "c.execute('create table t (x)'); c.commit()\n"
            + ("c.execute('insert into t values (1)')\nNone" if in_transaction else ""),
        )
        copy = self.undo("c.execute('insert into t values (2)'); c.commit()")
        self.assertEqual(copy.hello["lost"], [])
        self.run_ok(copy, "c.execute('insert into t values (3)'); c.commit()")
        return copy

    def test_undo_of_a_database_in_a_file(self) -> None:
        self.assert_shows(self.check(), "c.execute('select x from t').fetchall()", "value:[(3,)]")

    def test_undo_of_a_database_with_an_open_transaction(self) -> None:
        copy = self.check(in_transaction=True)
        self.assert_shows(
            copy,
            "sqlite3.connect('d.db').execute('select x from t').fetchall()",
            "value:[(1,), (3,)]",
        )

    def test_undo_of_a_database_with_a_write_ahead_log(self) -> None:
        copy = self.check("c.execute('pragma journal_mode=wal')")
        self.assert_shows(
            copy, "sqlite3.connect('d.db').execute('select x from t').fetchall()", "value:[(3,)]"
        )
        self.assert_shows(copy, "c.execute('pragma integrity_check').fetchall()", "value:[('ok',)]")


class Folders(BranchTest):
    def tree(self) -> dict[str, str]:
        found = {}
        for folder, folders, names in os.walk(self.source.workdir):
            for name in [*folders, *names]:
                path = os.path.join(folder, name)
                inner = os.path.relpath(path, self.source.workdir)
                if os.path.islink(path):
                    found[inner] = f"-> {os.readlink(path)}"
                elif os.path.isdir(path):
                    found[inner] = (
                        f"folder {os.stat(path).st_mode & 0o777:o} {os.stat(path).st_mtime_ns}"
                    )
                else:
                    with open(path, encoding="utf-8") as file:
                        found[inner] = (
                            f"{os.stat(path).st_mode & 0o777:o} {os.stat(path).st_mtime_ns} "
                            f"{file.read()}"
                        )
        return found

    def test_undo_makes_the_folder_what_it_was(self) -> None:
        self.run_ok(
            self.source,
            "import os, shutil\nos.makedirs('d/.hidden/empty'); "
            "open('d/.hidden/x', 'w').write('x')\n"
            "open('same', 'w').write('same'); open('changed', 'w').write('before'); "
            "open('removed', 'w').write('1')\n"
            "os.symlink('same', 'link'); os.symlink('nowhere', 'link2'); "
            "os.chmod('changed', 0o600)\n"
            "open('becomes folder', 'w').close(); os.mkdir('becomes file'); os.mkdir('closed'); "
            "os.chmod('closed', 0o500)",
        )
        before = self.tree()
        inodes = {
            name: os.stat(f"{self.source.workdir}/{name}").st_ino for name in ("same", "changed")
        }
        copy = self.undo(
            "open('changed', 'w').write('after, and longer'); os.chmod('changed', 0o640); "
            "os.unlink('removed')\n"
            "shutil.rmtree('d'); os.makedirs('new/folder'); "
            "open('new/folder/f', 'w').write('new')\n"
            "os.unlink('link'); os.symlink('changed', 'link'); os.unlink('link2')\n"
            "os.unlink('becomes folder'); os.mkdir('becomes folder'); "
            "open('becomes folder/x', 'w').close()\n"
            "os.rmdir('becomes file'); open('becomes file', 'w').close(); os.mkfifo('pipe')\n"
            "os.chmod('closed', 0o700); open('closed/new', 'w').close(); os.chmod('closed', 0o500)"
        )
        self.assertEqual(
            (copy.hello["files"], copy.hello["why"], copy.hello["lost"]), ("restored", None, [])
        )
        self.assertEqual(self.tree(), before)
        self.assertEqual(
            {name: os.stat(f"{self.source.workdir}/{name}").st_ino for name in inodes}, inodes
        )

    def test_a_change_that_keeps_size_and_time_is_seen(self) -> None:
        self.run_ok(self.source, "import os\nopen('a', 'w').write('1')\nos.utime('a', ns=(5, 5))")
        self.source.branch()
        self.run_ok(self.source, "open('a', 'w').write('2')\nos.utime('a', ns=(5, 5))")
        copy = self.undo("open('a', 'w').write('3')\nos.utime('a', ns=(5, 5))")
        self.assert_shows(copy, "print(open('a').read(), os.stat('a').st_mtime_ns)", "out:2 5\n")

    def test_more_than_the_budget_is_left_alone_and_told(self) -> None:
        self.run_ok(self.source, "open('a', 'w').write('x' * 2000000)")
        copy = self.undo("open('a', 'w').write('y')", undo_files=1 << 20)
        self.assertEqual(copy.hello["files"], "left alone")
        self.assertEqual(
            copy.hello["why"], "the work folder holds 1.9 MiB, and 1.0 MiB are kept for undo"
        )
        self.assert_shows(copy, "print(open('a').read())", "out:y\n")

    def test_without_a_budget_files_are_left_alone(self) -> None:
        copy = self.undo("open('a', 'w').write('y')", undo_files=0)
        self.assertEqual(
            (copy.hello["files"], copy.hello["why"]), ("left alone", "undo_files is 0")
        )
        self.assert_shows(copy, "print(open('a').read())", "out:y\n")

    def test_too_many_files_are_left_alone_and_told(self) -> None:
        self.run_ok(self.source, "for number in range(10001): open(str(number), 'w').close()")
        copy = self.undo("open('new', 'w').close()")
        self.assertEqual(copy.hello["files"], "left alone")
        self.assertEqual(copy.hello["why"], "the work folder holds more than 10,000 entries")
        self.assertTrue(os.path.exists(f"{self.source.workdir}/new"))

    def test_undo_many_times_in_a_row(self) -> None:
        session: Runner = self.source
        checkpoints = []
        for number in range(4):
            checkpoints.append(session.branch())
            self.run_ok(
                session,
                f"open('{number}', 'w').write('{number}'); open('all', 'a').write('{number}')",
            )
        self.source.process.kill()
        self.source.process.wait(TIMEOUT)
        for number, checkpoint in reversed(list(enumerate(checkpoints))):
            copy = checkpoint.spawn(b"u")
            expected = [str(earlier) for earlier in range(number)] + (["all"] if number else [])
            self.assert_shows(copy, "import os\nprint(sorted(os.listdir()))", f"out:{expected}\n")
            copy.hang_up()


@_needs_mounts
class Forking(BranchTest):
    scratch = True

    def test_a_fork_has_everything_and_the_two_go_different_ways(self) -> None:
        self.run_ok(self.source, "x = [1]\nopen('a', 'w').write('a')")
        fork = self.source.fork()
        self.assertEqual(
            (fork.hello["lost"], fork.hello["files"], fork.hello["why"]), ([], "restored", None)
        )
        self.run_ok(
            fork, "x.append(2); open('a', 'w').write('of the fork'); open('b', 'w').close()"
        )
        self.assert_shows(
            self.source, "import os\nprint(x, open('a').read(), os.listdir())", "out:[1] a ['a']\n"
        )
        self.run_ok(self.source, "x.append(3)")
        self.assert_shows(fork, "x", "value:[1, 2]")

    def test_a_fork_of_a_fork(self) -> None:
        self.run_ok(self.source, "open('a', 'w').write('a'); x = 1")
        fork = self.source.fork()
        self.run_ok(fork, "open('b', 'w').write('b'); x = 2")
        inner = fork.fork()
        self.assertEqual(inner.hello["lost"], [])
        self.assert_shows(
            inner,
            "import os\nprint(x, sorted(os.listdir()), open('b').read())",
            "out:2 ['a', 'b'] b\n",
        )

    def test_a_fork_can_undo(self) -> None:
        self.run_ok(self.source, "open('a', 'w').write('a')")
        fork = self.source.fork()
        checkpoint = fork.branch()
        self.run_ok(fork, "open('a', 'w').write('b'); open('new', 'w').close()")
        self.assertEqual(sorted(os.listdir(fork.seen(fork.workdir))), ["a", "new"])
        # `fake_tracer` forks each copy from the suspended process, which is not in the mounts of
        # the fork.
        copy = checkpoint.spawn(b"u")
        self.assertEqual(sorted(os.listdir(copy.seen(copy.workdir))), ["a"])

    def test_the_scratch_folder_is_taken_along_and_left_alone_by_undo(self) -> None:
        self.run_ok(
            self.source,
            f"place = {self.source.scratch!r} + '/s'\nopen(place, 'w').write('1'); f = open(place)",
        )
        fork = self.source.fork()
        self.assertEqual(fork.hello["lost"], [])
        self.assert_shows(fork, "open(place, 'w').write('2'); print(f.read())", "out:2\n")
        copy = self.undo("open(place, 'w').write('3')")
        self.assert_shows(copy, "print(open(place).read())", "out:3\n")

    def test_files_beyond_the_budget_of_undo_are_taken_along(self) -> None:
        self.run_ok(
            self.source,
            "import os\nopen('large', 'wb').write(os.urandom(300000)); "
            "open('small', 'w').write('s')",
        )
        for options in ({}, {"undo_files": 1000}, {"undo_files": 0}):
            fork = self.source.fork(**options)
            self.assertEqual((fork.hello["files"], fork.hello["lost"]), ("restored", []), options)
            for name in ("large", "small"):
                ours = Path(self.source.workdir, name)
                self.assertEqual(fork.seen(str(ours)).read_bytes(), ours.read_bytes())
        areas = "print(sum('/large' in line for line in open('/proc/self/maps')))"
        self.assert_shows(self.source, areas, "out:0\n")
        self.assert_shows(fork, areas, "out:0\n")

    def test_a_work_folder_that_is_shared_is_not_copied(self) -> None:
        self.run_ok(
            self.source,
            f"open({self.source.scratch!r} + '/s', 'w').write('s'); open('a', 'w').close()",
        )
        fork = self.source.fork(work_is_shared=True)
        self.assertEqual((fork.hello["files"], fork.hello["why"]), ("shared", None))
        self.assertEqual(os.listdir(fork.seen(fork.workdir)), [])
        self.assertEqual(os.listdir(fork.seen(fork.scratch or "")), ["s"])

    def test_an_open_file_is_that_of_the_fork(self) -> None:
        self.run_ok(self.source, "f = open('a', 'w', buffering=1); f.write('one\\n')")
        fork = self.source.fork()
        self.run_ok(fork, "f.write('fork\\n')")
        self.run_ok(self.source, "f.write('source\\n')")
        self.assert_shows(fork, "print(open('a').read())", "out:one\nfork\n\n")
        self.assert_shows(self.source, "print(open('a').read())", "out:one\nsource\n\n")

    def test_a_mapped_file_is_that_of_the_fork(self) -> None:
        self.run_ok(
            self.source,
            "import mmap\nopen('a', 'wb').write(b'first' * 2000)\n"
            "f = open('a', 'r+b'); m = mmap.mmap(f.fileno(), 0)",
        )
        fork = self.source.fork()
        self.assertEqual(fork.hello["lost"], [])
        self.run_ok(fork, "m[:5] = b'other'")
        self.assert_shows(fork, "print(open('a').read(5))", "out:other\n")
        self.assert_shows(self.source, "print(open('a').read(5), m[:5])", "out:first b'first'\n")

    def test_a_database_in_a_file_can_be_read_and_after_connecting_again_written(self) -> None:
        self.run_ok(
            self.source,
            "import sqlite3\nc = sqlite3.connect('d.db'); c.execute('create table t (x)'); "
            "c.execute('insert into t values (1)')\n"
            "c.commit()",
        )
        fork = self.source.fork()
        self.assertEqual(fork.hello["lost"], ["writing to 1 sqlite connection"])
        self.assert_shows(fork, "c.execute('select x from t').fetchall()", "value:[(1,)]")
        self.assert_fails(fork, "c.execute('insert into t values (2)')", "OperationalError")
        self.run_ok(
            fork, "c = sqlite3.connect('d.db'); c.execute('insert into t values (2)'); c.commit()"
        )
        self.assert_shows(
            self.source,
            "c.execute('insert into t values (3)'); c.commit()\n"
            "c.execute('select x from t').fetchall()",
            "value:[(1,), (3,)]",
        )

    def test_a_database_with_a_write_ahead_log_and_one_with_an_open_transaction(self) -> None:
        self.run_ok(
            self.source,
            "import sqlite3\nfor name in ('a', 'b'):\n"
            "    c = globals()[name] = sqlite3.connect(name)\n"
            "    if name == 'a': c.execute('pragma journal_mode=wal')\n"
            "    c.execute('create table t (x)'); c.commit()\n"
            "b.execute('insert into t values (1)')\nNone",
        )
        fork = self.source.fork()
        self.assertEqual(fork.hello["lost"], ["writing to 1 sqlite connection"])
        for name in ("a", "b"):
            self.run_ok(fork, f"{name}.execute('insert into t values (5)'); {name}.commit()")
            self.assert_shows(
                fork, f"{name}.execute('pragma integrity_check').fetchall()", "value:[('ok',)]"
            )
        look = "[sqlite3.connect(name).execute('select x from t').fetchall() for name in 'ab']"
        self.assert_shows(fork, look, "value:[[(5,)], [(1,), (5,)]]")
        self.assert_shows(self.source, f"b.rollback()\n{look}", "value:[[], []]")

    @_has_numpy
    def test_arrays_in_files_are_those_of_the_fork(self) -> None:
        self.run_ok(
            self.source,
            "import numpy\nm = numpy.memmap('m', dtype='u1', mode='w+', shape=(100000,)); m[0] = 1",
        )
        fork = self.source.fork()
        self.run_ok(fork, "m[0] = 2; m.flush()")
        self.assert_shows(self.source, "int(m[0])", "value:1")
        self.assert_shows(
            fork, "numpy.fromfile('m', dtype='u1', count=1)[0] == 2", "value:np.True_"
        )

    @unittest.skipUnless(find_spec("matplotlib"), "skipped: needs matplotlib")
    def test_figures_go_on_in_both(self) -> None:
        self.run_ok(
            self.source,
            "import matplotlib.pyplot as plt\nfigure, axes = plt.subplots(); plt.close()\n"
            "axes.plot([1])\nNone",
        )
        fork = self.source.fork()
        self.run_ok(fork, "axes.plot([2])\nNone")
        self.assert_shows(fork, "len(axes.lines)", "value:2")
        self.assert_shows(self.source, "len(axes.lines)", "value:1")
        shown = self.run_ok(fork, "display(figure)").frames[0].header
        self.assertEqual([blob["mime"] for blob in shown["blobs"]], ["image/png"])


if __name__ == "__main__":
    sys.exit(unittest.main())
