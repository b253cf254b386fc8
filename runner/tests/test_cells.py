"""Cells as a user sees them, with a real runner."""

from __future__ import annotations

import base64
import os
import sys
import unittest
from importlib.util import find_spec

from .harness import Died, Result, Runner

_HAS_GROUPS = sys.version_info >= (3, 11)


class CellTest(unittest.TestCase):
    """All tests of a class share one runner. Tests use different names."""

    runner: Runner

    @classmethod
    def setUpClass(cls) -> None:
        cls.runner = Runner()

    @classmethod
    def tearDownClass(cls) -> None:
        assert cls.runner.close() == 0

    def of_its_own(self) -> Runner:
        """Each test has its own runner."""
        runner = Runner()
        self.addCleanup(runner.close)
        return runner

    def run_ok(self, code: str) -> Result:
        result = self.runner.run(code)
        self.assertEqual(result.done["status"], "ok", result.error)
        self.assertIsNone(result.error)
        return result

    def run_failing(self, code: str, name: str) -> Result:
        result = self.runner.run(code)
        self.assertEqual(result.done["status"], "error")
        self.assertEqual(result.error["name"], name, result.error["traceback"])
        self.assertNotIn("\x1b", result.error["traceback"])
        return result

    def assert_order(self, code: str, *expected: str) -> None:
        self.assertEqual(self.run_ok(code).order, list(expected))


class Basics(CellTest):
    def test_hello_names_the_version_and_the_python(self) -> None:
        self.assertEqual(self.runner.hello["version"], 2)
        self.assertEqual(self.runner.hello["python"], ".".join(map(str, sys.version_info[:3])))
        self.assertEqual(len(self.runner.hello["marker"]), 32)

    def test_a_print_and_a_value(self) -> None:
        self.assert_order("print('a')\n1 + 1", "out:a\n", "value:2")

    def test_an_empty_cell_has_no_output(self) -> None:
        for code in ("", "   ", "\n\n", "# only a comment", "pass", "None"):
            self.assert_order(code)

    def test_a_semicolon_silences_the_value(self) -> None:
        self.assert_order("5;")
        self.assert_order("5; # loud")
        self.assert_order("';'", "value:';'")

    def test_state_stays(self) -> None:
        self.run_ok("import math\ndef twice(x): return 2 * x\nstate = 20")
        self.assert_order("twice(state) + math.floor(1.5)", "value:41")

    def test_the_last_results_are_remembered(self) -> None:
        self.run_ok("40 + 2")
        self.assert_order("_ + 1", "value:43")
        self.assert_order("_ + __", "value:85")

    def test_large_results_are_not_kept_alive(self) -> None:
        self.run_ok("import weakref\nclass Big(bytearray): pass")
        self.run_ok("b = Big(3_000_000); w = weakref.ref(b); b[:0]\nb")
        self.run_ok("del b\n1")
        self.run_ok("2")
        self.assert_order("w() is None", "value:True")

    def test_many_results_do_not_pile_up(self) -> None:
        for number in range(30):
            self.run_ok(f"{number}")
        self.assert_order("len(Out) <= 20", "value:True")

    def test_thousand_short_cells_are_complete_and_in_order(self) -> None:
        for number in range(1000):
            self.runner.begin(f"print({number})\n{number}")
            result = self.runner.finish()
            self.assertEqual(result.order, [f"out:{number}\n", f"value:{number}"])

    def test_large_output_arrives_whole(self) -> None:
        self.assertEqual(self.run_ok("print('x' * 500_000)").text, "x" * 500_000 + "\n")
        many = self.run_ok("for i in range(100_000): print(i)").text
        self.assertEqual(many, "".join(f"{number}\n" for number in range(100_000)))

    def test_long_input_runs(self) -> None:
        self.run_ok("\n".join(f"long_{number % 10} = {number}" for number in range(10_000)))
        self.assert_order("long_9", "value:9999")

    def test_text_of_any_kind_survives(self) -> None:
        self.assert_order("print('żółć 🐍 \\0 \\x1b[31m')", "out:żółć 🐍 \0 \x1b[31m\n")
        self.assert_order("print('\\ud800')", "out:\\ud800\n")
        self.assert_order("'\\ud800'", "value:'\\ud800'")

    def test_the_namespace_holds_none_of_our_names(self) -> None:
        names = self.run_ok("sorted(n for n in globals() if not n.startswith('_'))").value
        assert names is not None
        for name in "cellblock_runner serve shell streams session main argparse".split():
            self.assertNotIn(f"'{name}'", names["text/plain"])

    def test_the_environment_asks_for_no_colours(self) -> None:
        self.assert_order(
            "import os\n[os.environ.get(n) for n in ('NO_COLOR', 'TERM', 'FORCE_COLOR', "
            "'CLICOLOR')]",
            "value:['1', 'dumb', None, None]",
        )

    def test_modules_in_the_working_folder_can_be_imported_even_after_chdir(self) -> None:
        self.runner.upload("neighbour.py", b"answer = 42\n", overwrite=True)
        self.assert_order(
            "import os\nos.chdir('/')\nimport neighbour\n"
            "os.chdir(os.path.dirname(neighbour.__file__))\n"
            "neighbour.answer",
            "value:42",
        )

    def test_nothing_is_written_to_the_home_folder(self) -> None:
        self.assertFalse(os.path.exists(self.runner.workdir + "/.home"))

    def test_there_is_one_thread_only(self) -> None:
        self.run_ok("%%bash\ntrue")
        self.run_ok("import asyncio; await asyncio.sleep(0)")
        self.assert_order("import os; len(os.listdir('/proc/self/task'))", "value:1")


class Order(CellTest):
    def test_stdout_stderr_and_displays_interleave_exactly(self) -> None:
        self.assert_order(
            "import sys\nfor i in range(3):\n print('o', i)\n print('e', i, file=sys.stderr)\n"
            " display(i)\n'end'",
            *[item for i in range(3) for item in (f"out:o {i}\n", f"err:e {i}\n", f"display:{i}")],
            "value:'end'",
        )

    def test_text_without_a_newline_keeps_its_place(self) -> None:
        self.assert_order(
            "import sys\nsys.stdout.write('a')\nsys.stderr.write('b')\nsys.stdout.write('c');\n"
            "display('d')\n"
            "sys.stdout.write('e');",
            "out:a",
            "err:b",
            "out:c",
            "display:'d'",
            "out:e",
        )

    def test_bytes_and_descriptor_writes_are_in_order_with_text(self) -> None:
        self.assert_order(
            "import os, sys\nprint('1')\nos.write(1, b'2\\n')\nsys.stdout.write('3')\n"
            "sys.stdout.buffer.write(b'4\\n')\nprint('5')",
            "out:1\n2\n34\n5\n",
        )

    def test_c_code_is_captured(self) -> None:
        self.assert_order(
            "import ctypes\nprint('before')\nctypes.CDLL(None).printf(b'from c\\n')\n"
            "print('after')\n"
            "ctypes.CDLL(None).printf(b'no newline');",
            "out:before\nfrom c\nafter\nno newline",
        )

    def test_subprocess_output_is_in_order(self) -> None:
        self.assert_order(
            "import subprocess, sys\nprint('1')\nsubprocess.run('echo 2; echo 3 >&2', shell=True)\n"
            "print('4')\n"
            "subprocess.run(['echo', '5'])\nprint('6', file=sys.stderr)\nimport os\n"
            "os.system('echo 7');",
            "out:1\n2\n",
            "err:3\n",
            "out:4\n5\n",
            "err:6\n",
            "out:7\n",
        )

    def test_a_background_child_and_python_take_turns(self) -> None:
        self.assert_order(
            "import subprocess\n"
            "PIPE = subprocess.PIPE\n"
            "p = subprocess.Popen('read x; echo e >&2; "
            "echo', shell=True, stdin=PIPE, stdout=PIPE)\n"
            "print('before')\np.communicate(b'go\\n')\nprint('after')",
            "out:before\n",
            "err:e\n",
            "out:after\n",
        )

    def test_closing_or_redirecting_descriptor_one_does_not_silence_python(self) -> None:
        self.assert_order(
            "import os\nsaved = os.dup(1)\nos.close(1)\nprint('closed')\nos.dup2(saved, 1)\n"
            "os.close(saved)\n"
            "print('back')",
            "out:closed\nback\n",
        )
        self.assert_order("import sys\nsys.stdout.close()\nprint('still open')", "out:still open\n")

    def test_a_nonblocking_pipe_loses_nothing(self) -> None:
        self.assertEqual(
            len(
                self.run_ok(
                    "import os\nos.set_blocking(1, False)\nprint('y' * 3_000_000)\n"
                    "os.set_blocking(1, True)"
                ).text
            ),
            3_000_001,
        )

    def test_redirect_and_capture_work(self) -> None:
        self.assert_order(
            "import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()) as t: "
            "print('hidden')\nt.getvalue()",
            "value:'hidden\\n'",
        )
        self.assert_order("%%capture seen\nprint('hidden')\n!echo shell\ndisplay(1)")
        self.assert_order("seen.stdout, len(seen.outputs)", "value:('hidden\\nshell\\n', 1)")

    def test_threads_of_the_cell_are_heard(self) -> None:
        self.assert_order(
            "import threading\nt = threading.Thread(target=print, args=('from a thread',))\n"
            "t.start()\nt.join()",
            "out:from a thread\n",
        )

    def test_what_threads_of_earlier_cells_print_is_late(self) -> None:
        self.run_ok(
            "import sys, threading, queue\ntasks = queue.Queue()\ndef work():\n"
            "  while (task := tasks.get()) is not None:\n    print(task)\n    display(task)\n"
            "    sys.stderr.buffer.write(b'bytes\\n')\n    tasks.task_done()\n"
            "late = threading.Thread(target=work)\nlate.start()"
        )
        result = self.run_ok("tasks.put('late')\ntasks.join()\nprint('mine')")
        self.assertEqual(result.order, ["out:mine\n"])
        self.assertEqual(result.done["late"], {"text": "late\n'late'\nbytes\n", "omitted": 0})
        self.assertNotIn("late", self.run_ok("tasks.put(None)\nlate.join()").done)

    def test_what_a_thread_prints_between_cells_is_told_by_the_next(self) -> None:
        self.run_ok(
            "import os, threading\nreading, writing = os.pipe()\ntold, telling = os.pipe()\n"
            "def work():\n"
            "  os.read(reading, 1); print('between'); os.write(telling, b'.')\n"
            "thread = threading.Thread(target=work); thread.start()"
        )
        number = self.runner.process.pid
        with open(
            f"/proc/{number}/fd/{self.run_ok('writing').value['text/plain']}", "wb", 0
        ) as writing:
            told = open(f"/proc/{number}/fd/{self.run_ok('told').value['text/plain']}", "rb", 0)
            writing.write(b".")
            told.read(1)
            told.close()
        self.assertEqual(
            self.run_ok("thread.join()").done["late"], {"text": "between\n", "omitted": 0}
        )

    def test_a_flood_of_late_text_is_bounded_and_the_newest_is_kept(self) -> None:
        self.run_ok(
            "import threading\ngo = threading.Event()\ndef work():\n  go.wait()\n"
            "  for _ in range(100): print('x' * 9_999)\n  print('last \\udc80')\n"
            "thread = threading.Thread(target=work); thread.start()"
        )
        late = self.run_ok("go.set(); thread.join()").done["late"]
        self.assertEqual(len(late["text"]) + late["omitted"], 100 * 10_000 + len("last \\udc80\n"))
        self.assertLess(len(late["text"]), 66_000)
        self.assertTrue(late["text"].endswith("x\nlast \\udc80\n"))

    def test_a_process_of_the_session_does_not_tell_late_text(self) -> None:
        self.run_ok("import os\nprint('parent')")
        self.assert_order(
            "if os.fork() == 0:\n  print('child', flush=True); os._exit(0)\nos.wait();",
            "out:child\n",
        )

    def test_work_given_to_an_old_thread_by_this_cell_is_heard(self) -> None:
        code = "import asyncio\nawait asyncio.to_thread(print, 'handed over')"
        self.assert_order(code, "out:handed over\n")
        self.assert_order(code, "out:handed over\n")

    def test_a_process_left_behind_is_not_heard_by_the_next_cell(self) -> None:
        before = self.runner.rotations
        self.run_ok(
            "import subprocess\n"
            "p = subprocess.Popen('read x; echo late; "
            "echo late >&2', shell=True, stdin=subprocess.PIPE)"
        )
        self.assert_order(
            "print('first')\np.communicate(b'go\\n');\nprint('second')", "out:first\nsecond\n"
        )
        self.assertGreater(self.runner.rotations, before)

    def test_a_low_limit_on_descriptors_takes_no_pipe_away(self) -> None:
        for limit in ("(200, hard)", "(200, 200)"):
            with self.subTest(limit):
                session = Runner()
                self.addCleanup(session.close)
                session.run(
                    "import resource, subprocess\n"
                    "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
                    f"resource.setrlimit(resource.RLIMIT_NOFILE, {limit})\nsubprocess.run('true');"
                )
                for _ in range(2):
                    result = session.run(
                        "print(1); subprocess.run(['echo', '2']); resource.getrlimit(7)[0]"
                    )
                    self.assertEqual(result.order, ["out:1\n2\n", "value:200"])

    def test_pipes_are_kept_when_nothing_was_started(self) -> None:
        self.run_ok("pass")
        before = self.runner.rotations
        self.run_ok("print(1)")
        self.run_ok("print(2)")
        self.assertEqual(self.runner.rotations, before)

    def test_forked_children_print_plainly(self) -> None:
        self.assert_order(
            "import os\nprint('parent')\npid = os.fork()\nif pid == 0:\n  print('child')\n"
            "  display('shown')\n"
            "  os._exit(0)\n"
            "os.waitpid(pid, 0)\nprint('parent again')",
            "out:parent\nchild\n'shown'\nparent again\n",
        )

    def test_a_forked_child_that_leaves_the_cell_does_not_answer(self) -> None:
        self.assert_order(
            "import os\npid = os.fork()\nif pid: os.waitpid(pid, 0)\nprint('me', pid > 0)",
            "out:me False\nme True\n",
        )

    def test_multiprocessing_works(self) -> None:
        self.assert_order(
            "import multiprocessing as mp\ndef square(x):\n  print('squaring', x)\n  return x * x\n"
            "with mp.get_context('fork').Pool(1) as pool: squares = pool.map(square, [3])\nsquares",
            "out:squaring 3\n",
            "value:[9]",
        )

    def test_clear_output_and_display_updates_have_their_place(self) -> None:
        result = self.run_ok(
            "from IPython.display import clear_output, display, update_display\n"
            "h = display('one', display_id='d')\nprint('x')\n"
            "clear_output(wait=True)\nupdate_display('two', display_id='d')"
        )
        self.assertEqual(result.order, ["display:'one'", "out:x\n", "clear", "display:'two'"])
        first, clear, second = (frame.header for frame in result.frames)
        self.assertEqual((first["display_id"], first["update"]), ("d", False))
        self.assertEqual((second["display_id"], second["update"]), ("d", True))
        self.assertTrue(clear["wait"])


class Magics(CellTest):
    def test_shell_commands_print_and_leave_their_exit_code(self) -> None:
        self.assert_order(
            "word = 'hi'\n!echo {word} $word; exit 3\n_exit_code", "out:hi hi\n", "value:3"
        )
        self.assert_order("%system echo there", "value:['there']")
        self.assert_order("lines = !printf 'a\\nb'\nlines", "value:['a', 'b']")
        self.assert_order("lines.n", "value:'a\\nb'")

    def test_script_cells_run(self) -> None:
        self.assert_order("%%bash\necho out\necho err >&2", "out:out\n", "err:err\n")
        self.assert_order("%%sh\necho $((1 + 2))", "out:3\n")
        self.assert_order("%%script cat\nall of this", "out:all of this\n")
        self.assert_order("%%bash --out o --err e\necho 1; echo 2 >&2")
        self.assert_order("o, e", "value:('1\\n', '2\\n')")

    def test_a_failing_script_is_an_error_unless_allowed(self) -> None:
        failed = self.run_failing("%%bash\necho before\nexit 4", "CalledProcessError")
        self.assertEqual(failed.text, "before\n")
        self.assertIn("exit status 4", failed.error["message"])
        self.run_ok("%%bash --no-raise-error\nexit 4")

    def test_background_scripts_give_their_pipe_and_process(self) -> None:
        self.run_ok("%%bash --bg --out pipe --proc child\necho background")
        self.assert_order("pipe.read(), child.wait()", "value:(b'background\\n', 0)")

    def test_unknown_programs_and_magics_say_so(self) -> None:
        self.assertIn("Couldn't find program", self.run_ok("%%script no-such-program\nx").text)
        self.assertIn(
            "no_such_magic", self.run_failing("%no_such_magic", "UsageError").error["message"]
        )

    def test_common_magics_work(self) -> None:
        self.assertIn("Wall time", self.run_ok("%%time\ntimed = 5").text)
        self.assert_order("timed", "value:5")
        self.assertIn("loop", self.run_ok("%timeit -n1 -r1 pass").text)
        self.run_ok("%%writefile magic_file.txt\ncontent")
        self.assert_order("!cat magic_file.txt", "out:content\n")
        self.assertIn("magic_file.txt", self.run_ok("%ls").text)
        self.assertIn("timed", self.run_ok("%who").text)
        self.run_ok("%matplotlib inline" if find_spec("matplotlib") else "%pwd")
        self.assertIn(
            "Docstring", str(self.run_ok("len?").text) + str(self.runner.run("len?").order)
        )

    def test_reset_empties_the_namespace_and_the_session_goes_on(self) -> None:
        self.run_ok("gone = 1")
        self.run_ok("%reset -f")
        self.run_failing("gone", "NameError")
        self.assert_order("1 + 1", "value:2")

    def test_history_is_that_of_a_notebook(self) -> None:
        runner = self.of_its_own()
        self.assertEqual(runner.run("print(repr(_i), In[-1])").text, "'' print(repr(_i), In[-1])\n")
        runner.run("x = 1")
        self.assertEqual(
            runner.run("print(_i, '|', _ii, '|', In[2])").text,
            "x = 1 | print(repr(_i), In[-1]) | x = 1\n",
        )
        self.assertEqual(
            runner.run("%history -l 2").text, "x = 1\nprint(_i, '|', _ii, '|', In[2])\n"
        )
        runner.run("x += 1")
        self.assertEqual(runner.run("%rerun -l 1\nprint(x)").text.splitlines()[-1], "3")

    def test_store_keeps_and_brings_back(self) -> None:
        self.assertEqual(
            self.runner.run("x = [1]\n%store x\ndel x\n%store -r x\nprint(x)").text.splitlines()[
                -1
            ],
            "[1]",
        )
        self.assertIn("x", self.runner.run("%store").text)

    def test_load_shows_the_file(self) -> None:
        self.runner.run("open('code.py', 'w').write('y = 5')")
        self.assertIn("y = 5", self.runner.run("%load code.py").text)

    def test_the_folder_before_is_the_work_folder(self) -> None:
        code = "%cd -q /tmp\n%cd -q -\nimport os; print(os.getcwd())"
        self.assertEqual(self.runner.run(code).text, f"{self.runner.workdir}\n")

    def test_a_handler_of_its_own_has_seen_to_an_error(self) -> None:
        runner = self.of_its_own()
        runner.run(
            "def handle(shell, kind, error, trace, tb_offset=None): print('handled', error)\n"
            "get_ipython().set_custom_exc((ValueError,), handle)"
        )
        result = runner.run("raise ValueError('it')")
        self.assertEqual((result.done["status"], result.text), ("ok", "handled it\n"))
        self.assertEqual(runner.run("1 / 0").done["status"], "error")

    @unittest.skipIf(
        sys.version_info >= (3, 14),
        "skipped: needs a Python whose main thread has a loop by default",
    )
    def test_the_old_style_of_asyncio_works(self) -> None:
        self.runner.run(
            "import asyncio\nasync def later():\n    await asyncio.sleep(0.001)\n    return 7"
        )
        self.assertEqual(
            self.runner.run("print(asyncio.get_event_loop().run_until_complete(later()))").text,
            "7\n",
        )
        self.runner.run("task = asyncio.ensure_future(later())")
        self.assertEqual(self.runner.run("print(await task)").text, "7\n")

    def test_an_endless_recursion_is_explained_in_few_lines(self) -> None:
        error = self.runner.run("def f(): return f()\nf()").error
        self.assertEqual(error["name"], "RecursionError")
        self.assertIn("Previous line repeated", error["traceback"])
        self.assertLess(len(error["traceback"].splitlines()), 40)

    def test_errors_that_magics_swallow_are_errors_of_the_cell(self) -> None:
        self.run_failing("%%time\n1/0", "ZeroDivisionError")
        self.runner.upload(
            "failing_script.py", b"print('ran')\nraise KeyError('x')\n", overwrite=True
        )
        self.assertEqual(self.run_failing("%run failing_script.py", "KeyError").text, "ran\n")

    def test_await_works_at_top_level(self) -> None:
        self.assert_order("import asyncio\nawait asyncio.sleep(0, 'slept')", "value:'slept'")
        self.assert_order(
            "task = asyncio.ensure_future(asyncio.sleep(0, 7))\nawait task", "value:7"
        )
        self.assert_order("asyncio.run(asyncio.sleep(0, 8))", "value:8")
        self.assert_order("async with asyncio.Lock(): print('held')", "out:held\n")

    def test_the_loop_of_cells_stays_after_asyncio_run(self) -> None:
        self.run_ok("import asyncio\nawait asyncio.sleep(0)")
        self.assert_order("asyncio.run(asyncio.sleep(0, 8))", "value:8")
        self.assert_order(
            "asyncio.get_event_loop().run_until_complete(asyncio.sleep(0, 9))", "value:9"
        )

    def test_a_cell_cannot_take_builtins_away_from_the_runner(self) -> None:
        for name in ("print", "isinstance", "next", "vars", "len"):
            with self.subTest(name):
                self.runner.run(f"del __builtins__.{name}")
                self.assert_order("print(1)", "out:1\n")
        self.run_failing("input()", "EOFError")

    def test_the_editor_says_that_there_is_none(self) -> None:
        for code in ("%edit", "%ed name"):
            self.assertIn("%%writefile", self.run_failing(code, "UsageError").error["message"])

    def test_input_fails_at_once(self) -> None:
        self.assertIn(
            "input() is not available",
            self.run_failing("input('name?')", "EOFError").error["message"],
        )
        self.run_failing("import getpass\ngetpass.getpass()", "EOFError")
        self.assert_order(
            "import sys\nsys.stdin.read(), sys.stdin.readline(), list(sys.stdin)",
            "value:('', '', [])",
        )
        self.assert_order("!cat", *[])


class Errors(CellTest):
    def test_an_error_keeps_what_was_printed_and_names_its_line(self) -> None:
        failed = self.run_failing("print('before')\n\n1/0\nprint('never')", "ZeroDivisionError")
        self.assertEqual(failed.order, ["out:before\n"])
        self.assertEqual(failed.error["line"], 3)
        self.assertEqual(failed.error["message"], "division by zero")
        self.assertIn("----> 3 1/0", failed.error["traceback"])
        self.assertTrue(failed.error["traceback"].endswith("ZeroDivisionError: division by zero"))
        self.assertNotIn("run_code", failed.error["traceback"])
        self.assertNotIn("hidden", failed.error["traceback"])

    def test_empty_lines_at_the_beginning_count(self) -> None:
        failed = self.run_failing("\n\n  \n1/0", "ZeroDivisionError")
        self.assertEqual(failed.error["line"], 4)
        self.assertIn("line 4", failed.error["traceback"])

    def test_a_failing_function_of_an_earlier_cell_is_shown_with_its_source(self) -> None:
        self.run_ok("def fails():\n    raise ValueError('inside')")
        failed = self.run_failing("x = 1\nfails()", "ValueError")
        self.assertEqual(failed.error["line"], 2)
        self.assertIn("raise ValueError('inside')", failed.error["traceback"])

    def test_syntax_errors_name_their_line(self) -> None:
        self.assertEqual(self.run_failing("x = 1\nif x\n  pass", "SyntaxError").error["line"], 2)
        self.assertEqual(self.run_failing("if 1:\npass", "IndentationError").error["line"], 2)
        self.run_failing("'open", "SyntaxError")
        self.run_failing("return 5", "SyntaxError")
        inner = self.run_failing("y = 1\neval('1 +')", "SyntaxError")
        self.assertEqual(inner.error["line"], 2)

    def test_a_syntax_error_prints_nothing_to_the_streams(self) -> None:
        self.assertEqual(self.run_failing("(", "SyntaxError").order, [])

    def test_leaving_is_an_error_and_the_session_goes_on(self) -> None:
        self.run_ok("kept = 1")
        for code in ("exit", "quit()", "import sys; sys.exit(3)", "raise SystemExit", "exit(0)"):
            self.run_failing(code, "SystemExit")
        self.assertEqual(
            self.run_failing("import sys; sys.exit('words')", "SystemExit").error["message"],
            "words",
        )
        self.assert_order("kept", "value:1")

    def test_errors_while_awaiting(self) -> None:
        failed = self.run_failing("import asyncio\nawait asyncio.sleep(0)\n{}['key']", "KeyError")
        self.assertEqual(failed.error["line"], 3)

    def test_a_raised_interrupt_and_base_exceptions(self) -> None:
        self.run_failing("raise KeyboardInterrupt", "KeyboardInterrupt")
        self.run_failing("raise GeneratorExit", "GeneratorExit")
        self.run_failing("class Odd(BaseException): pass\nraise Odd('x')", "Odd")

    @unittest.skipUnless(_HAS_GROUPS, "skipped: needs exception groups (Python 3.11)")
    def test_exception_groups_show_their_parts(self) -> None:
        failed = self.run_failing(
            "raise ExceptionGroup('many', [ValueError('one'), KeyError('two')])", "ExceptionGroup"
        )
        self.assertIn("ValueError: one", failed.error["traceback"])
        self.assertEqual(failed.order, [])

    def test_exceptions_that_cannot_describe_themselves(self) -> None:
        for body in (
            "raise RuntimeError",
            "raise KeyboardInterrupt",
            "raise SystemExit",
            "return 5",
            "return str(self)",
        ):
            failed = self.run_failing(
                f"class Mute(Exception):\n  def __str__(self): {body}\nraise Mute", "Mute"
            )
            self.assertIn("Mute", failed.error["traceback"])

    def test_exceptions_that_call_themselves_false_are_still_errors(self) -> None:
        self.run_failing(
            "class Empty(Exception):\n  def __len__(self): return 0\nraise Empty", "Empty"
        )

    def test_endless_recursion(self) -> None:
        failed = self.run_failing("def down(n): return down(n + 1)\ndown(0)", "RecursionError")
        self.assertLess(len(failed.error["traceback"]), 201_000)

    def test_huge_tracebacks_are_cut(self) -> None:
        failed = self.run_failing("raise ValueError('z' * 5_000_000)", "ValueError")
        self.assertLess(len(failed.error["traceback"]), 201_000)
        self.assertIn("characters left out", failed.error["traceback"])

    def test_chained_errors_show_their_cause(self) -> None:
        failed = self.run_failing(
            "try: 1/0\nexcept Exception as e: raise ValueError('second') from e", "ValueError"
        )
        self.assertIn("ZeroDivisionError", failed.error["traceback"])

    def test_a_value_that_cannot_be_shown_does_not_lose_the_end(self) -> None:
        shown = self.run_ok(
            "class Broken:\n  def __repr__(self): raise ValueError('no repr')\nBroken()"
        )
        self.assertIn("no repr", shown.stream("stderr"))
        self.run_failing(
            "class Stop:\n  def __repr__(self): raise SystemExit\nStop()", "SystemExit"
        )

    def test_colours_in_messages_are_removed(self) -> None:
        self.run_failing("raise ValueError('\\x1b[31mred\\x1b[0m')", "ValueError")

    def test_a_nested_cell_prints_its_error(self) -> None:
        nested = self.run_ok("r = get_ipython().run_cell('1/0')\nr.success")
        self.assertIn("ZeroDivisionError", nested.stream("stderr"))
        self.assertEqual(nested.order[-1], "value:False")

    def test_tb_shows_the_last_error_again(self) -> None:
        self.runner.run("1/0")
        self.assertIn("ZeroDivisionError", self.run_ok("%tb").text)


class Control(unittest.TestCase):
    def setUp(self) -> None:
        self.runner = Runner()

    def tearDown(self) -> None:
        self.runner.close()

    def interrupted(self, code: str, when: str = "ready\n") -> Result:
        self.runner.begin(code)
        return self.runner.finish(self.runner.interrupt_when(when))

    def test_an_interrupt_ends_the_cell_and_keeps_the_state(self) -> None:
        result = self.interrupted("state = 1\n\nwhile print('ready') is None: pass")
        self.assertEqual(result.error["name"], "KeyboardInterrupt")
        self.assertEqual(result.error["line"], 3)
        self.assertEqual(self.runner.run("state").order, ["value:1"])

    def test_an_interrupt_ends_a_waiting_coroutine_for_good(self) -> None:
        result = self.interrupted(
            "import asyncio\nasyncio.get_running_loop().call_soon(print, 'ready')\n"
            "await asyncio.sleep(100)\n"
            "print('never')"
        )
        self.assertEqual(result.error["name"], "KeyboardInterrupt")
        self.assertEqual(result.error["line"], 3)
        self.assertEqual(self.runner.run("await asyncio.sleep(0.01)\n1").order, ["value:1"])

    def test_an_interrupt_ends_shell_commands_and_their_children(self) -> None:
        for code in (
            "!echo ready; sleep 100 & wait",
            "%%bash\necho ready\nsleep 100 | cat",
            "print('ready')\nx = !sleep 100",
        ):
            result = self.interrupted(code)
            self.assertEqual(result.error["name"], "KeyboardInterrupt", code)
        self.assertEqual(
            self.runner.run("import os\nos.waitpid(-1, os.WNOHANG)").error["name"],
            "ChildProcessError",
        )

    def test_a_cell_cannot_take_interrupts_away_from_later_cells(self) -> None:
        self.runner.run(
            "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
            "signal.pthread_sigmask(signal.SIG_BLOCK, [2])"
        )
        result = self.interrupted("print('ready')\nwhile True: pass")
        self.assertEqual(result.error["name"], "KeyboardInterrupt")

    def test_an_interrupt_is_never_lost_once_the_cell_has_started(self) -> None:
        for _ in range(100):
            self.runner.begin("while True: pass")
            result = self.runner.finish(when_started=self.runner.interrupt)
            self.assertEqual(result.error["name"], "KeyboardInterrupt")
            self.assertNotIn("cellblock", result.error["traceback"])

    def test_interrupts_between_cells_do_nothing(self) -> None:
        for _ in range(50):
            self.runner.interrupt()
            self.runner.run("2 + 2")
        self.runner.interrupt()
        self.assertEqual(self.runner.run("3 + 3").order[-1:], ["value:6"])

    def test_a_storm_of_interrupts_breaks_no_frame_and_no_marker(self) -> None:
        for _ in range(20):
            self.runner.begin(
                "import sys\nfor i in range(3000):\n  print(i)\n  print(i, file=sys.stderr)\n"
                "  display(i)"
            )
            result = self.runner.finish(lambda text: self.runner.interrupt() if text else None)
            numbers = [int(item.split(":")[1]) for item in result.order]
            self.assertEqual(numbers, sorted(numbers))
            self.assertEqual(result.error["name"], "KeyboardInterrupt")
        self.assertEqual(self.runner.run("'fine'").order, ["value:'fine'"])

    def test_what_was_printed_before_a_kill_is_kept(self) -> None:
        self.runner.begin(
            "import os, sys\nprint('one')\nprint('two', end='')\nprint('e', file=sys.stderr)\n"
            "os.kill(os.getpid(), 9)"
        )
        with self.assertRaises(Died) as died:
            self.runner.finish()
        self.assertEqual(Result(died.exception.events, {}).order, ["out:one\ntwo", "err:e\n"])

    def test_os_exit_really_ends_it(self) -> None:
        self.runner.begin("print('bye')\nimport os; os._exit(7)")
        with self.assertRaises(Died) as died:
            self.runner.finish()
        self.assertEqual(Result(died.exception.events, {}).text, "bye\n")
        self.assertEqual(self.runner.process.wait(), 7)

    def test_hanging_up_ends_the_runner_even_with_threads_running(self) -> None:
        self.runner.run("import threading\nthreading.Thread(target=threading.Event().wait).start()")
        self.assertEqual(self.runner.close(), 0)
        self.runner = Runner()

    def test_code_that_catches_one_interrupt_is_ended_by_another(self) -> None:
        # Two interrupts within a few milliseconds count as one, so the cell reports when that time
        # has passed.
        self.runner.begin(
            "import time\ntry:\n  print('ready')\n  while True: pass\n"
            "except KeyboardInterrupt: caught = time.monotonic()\n"
            "while time.monotonic() < caught + 0.03: pass\nprint('again')\nwhile True: pass"
        )
        first, second = self.runner.interrupt_when("ready"), self.runner.interrupt_when("again")
        result = self.runner.finish(lambda text: (first(text), second(text)) and None)
        self.assertEqual(result.error["name"], "KeyboardInterrupt")
        self.assertEqual(result.text, "ready\nagain\n")


class RichOutput(CellTest):
    def test_text_representations_are_all_sent(self) -> None:
        for code, mime, text in (
            ("from IPython.display import HTML\nHTML('<b>x</b>')", "text/html", "<b>x</b>"),
            ("from IPython.display import Markdown\nMarkdown('# x')", "text/markdown", "# x"),
            ("from IPython.display import Latex\nLatex('$x$')", "text/latex", "$x$"),
            ("from IPython.display import SVG\nSVG('<svg></svg>')", "image/svg+xml", "<svg/>"),
            (
                "from IPython.display import JSON\nJSON({'a': [1, None]})",
                "application/json",
                '{"a": [1, null]}',
            ),
        ):
            value = self.run_ok(code).value
            assert value is not None
            self.assertEqual(value[mime].replace("<svg></svg>", "<svg/>"), text)

    def test_own_mime_bundles_are_sent(self) -> None:
        result = self.run_ok(
            "class Plot:\n  def _repr_mimebundle_(self, **kw):\n"
            "    figure = {'data': [], 'layout': {'n': float('nan')}}\n"
            "    return {'application/vnd.plotly.v1+json': figure, 'text/plain': 'plot'}\nPlot()"
        )
        assert result.value is not None
        self.assertIn('"layout"', result.value["application/vnd.plotly.v1+json"])

    def test_binary_parts_travel_as_bytes(self) -> None:
        png = b"\x89PNG\r\n\x1a\n" + bytes(range(256))
        encoded = base64.b64encode(png).decode()
        result = self.run_ok(
            f"import base64\ndata = base64.b64decode('{encoded}')\nclass P:\n"
            "  def _repr_png_(self): return data\n"
            "  def _repr_jpeg_(self): return base64.b64encode(data).decode()\nP()"
        )
        (frame,) = result.frames
        self.assertEqual(
            frame.header["blobs"],
            [{"mime": "image/png", "size": 264}, {"mime": "image/jpeg", "size": 264}],
        )
        self.assertEqual(frame.payload, png + png)

    def test_parts_that_are_too_large_are_left_out_and_named(self) -> None:
        result = self.run_ok(
            "class P:\n  def _repr_png_(self): return bytes(30_000_000)\n"
            "  def __repr__(self): return 'small'\nP()"
        )
        assert result.value is not None
        self.assertEqual(result.frames[0].header["blobs"], [])
        self.assertIn("small\n[image/png was left out", result.value["text/plain"])
        text = self.run_ok("'\\x00' * 30_000_000").value
        assert text is not None
        self.assertIn("the text was cut", text["text/plain"])
        self.assert_order("'next'", "value:'next'")

    @unittest.skipUnless(find_spec("pandas"), "skipped: needs pandas")
    def test_data_frames_have_text_and_html(self) -> None:
        value = self.run_ok("import pandas\npandas.DataFrame({'a': [1, 2]})").value
        assert value is not None
        self.assertIn("<table", value["text/html"])
        self.assertIn("a\n0  1", value["text/plain"])

    @unittest.skipUnless(find_spec("PIL"), "skipped: needs Pillow")
    def test_pillow_images_are_png(self) -> None:
        (frame,) = self.run_ok("from PIL import Image\nImage.new('RGB', (3, 2))").frames
        self.assertEqual(frame.header["blobs"][0]["mime"], "image/png")
        self.assertTrue(frame.payload.startswith(b"\x89PNG"))

    @unittest.skipUnless(find_spec("matplotlib"), "skipped: needs matplotlib")
    def test_figures_are_shown_in_order_and_closed(self) -> None:
        result = self.run_ok(
            "import matplotlib.pyplot as plt\nprint('1')\nplt.plot([1, 2])\nplt.show()\n"
            "print('2')\n"
            "plt.figure(figsize=(2, 1)); plt.plot([2, 1])\nprint('3');"
        )
        kinds = [item.split(":")[0] for item in result.order]
        self.assertEqual(kinds, ["out", "display", "out", "display"])
        for frame in result.frames:
            self.assertEqual([blob["mime"] for blob in frame.header["blobs"]], ["image/png"])
            self.assertTrue(frame.payload.startswith(b"\x89PNG"))
        self.assert_order("plt.get_fignums()", "value:[]")

    def test_importing_the_runner_does_not_import_matplotlib(self) -> None:
        fresh = Runner()
        try:
            self.assertEqual(
                fresh.run("import sys\n'matplotlib' in sys.modules").order, ["value:False"]
            )
        finally:
            fresh.close()


class Changes(CellTest):
    def changes(self, code: str) -> dict[str, object]:
        variables = self.run_ok(code).done["variables"]
        return {
            kind: [v["name"] if isinstance(v, dict) else v for v in variables[kind]]
            for kind in ("created", "changed", "deleted")
        }

    def assert_changes(
        self, code: str, created: str = "", changed: str = "", deleted: str = ""
    ) -> None:
        expected = {
            "created": created.split(),
            "changed": changed.split(),
            "deleted": deleted.split(),
        }
        self.assertEqual(self.changes(code), expected, code)

    def test_variables_are_followed(self) -> None:
        self.assert_changes("va = 1; vb = [1]; vc = {'k': 1}; _hidden = 2", created="va vb vc")
        self.assert_changes("va = 1; vb; 5")
        self.assert_changes("va = 2", changed="va")
        self.assert_changes("vb[0] = 'other'", changed="vb")
        self.assert_changes("vc['k'] = 2; del va", changed="vc", deleted="va")
        self.assert_changes("vb.append(vb)", changed="vb")
        self.assert_changes("import json as vj", created="vj")
        self.assert_changes("class V: pass\nvo = V()", created="V vo")
        self.assert_changes("vo.x = 1", changed="vo")
        self.assert_changes("Out = 5", created="Out")

    def test_variables_are_described(self) -> None:
        created = self.run_ok("described = [1, 2, 3]; number = 5").done["variables"]["created"]
        self.assertEqual(
            [(v["name"], v["type"], v["shape"]) for v in created],
            [("described", "list", "len 3"), ("number", "int", None)],
        )
        self.assertGreater(created[0]["size"], 0)

    @unittest.skipUnless(
        find_spec("numpy") and find_spec("pandas"), "skipped: needs numpy and pandas"
    )
    def test_arrays_and_tables_are_followed(self) -> None:
        self.run_ok("import numpy as np, pandas as pd")
        created = self.run_ok(
            "arr = np.zeros((3, 4)); big = np.zeros(100_000); df = pd.DataFrame({'a': [1, 2]})"
        ).done["variables"]["created"]
        self.assertEqual([v["shape"] for v in created], ["(3, 4)", "(100000,)", "(2, 1)"])
        self.assertEqual(created[0]["size"], 96)
        self.assert_changes("arr[1, 1] = 5", changed="arr")
        self.assert_changes("big += 1", changed="big")
        self.assert_changes("df['b'] = 1", changed="df")
        self.assert_changes("df.loc[0, 'a'] = 9", changed="df")
        self.assert_changes("arr.sum(), df.sum(), big.mean()")

    def test_hostile_objects_are_not_asked(self) -> None:
        self.run_ok(
            "asked = []\nclass Hostile:\n  def __getattribute__(self, n): asked.append(n); "
            "raise SystemExit\n"
            "  def __len__(self): asked.append('len'); return -1\n"
            "  def __eq__(self, o): asked.append('eq'); raise SystemExit\n"
            "  def __repr__(self): asked.append('repr'); raise SystemExit\n"
            "  def __sizeof__(self): asked.append('size'); raise SystemExit\n"
            "  __hash__ = None\nclass Sub(dict):\n"
            "  def __len__(self): asked.append('sub'); raise SystemExit\n"
        )
        created = self.run_ok("hostile = Hostile(); sub = Sub(); listed = [hostile]").done[
            "variables"
        ]["created"]
        self.assertEqual([v["name"] for v in created], ["hostile", "sub", "listed"])
        self.assert_order("asked", "value:[]")

    def test_many_variables_are_counted(self) -> None:
        variables = self.run_ok("for i in range(80): globals()[f'many{i}'] = i").done["variables"]
        self.assertEqual(len(variables["created"]), 50)
        self.assertEqual(variables["omitted"], 31)

    def test_odd_names_are_ignored(self) -> None:
        self.assert_changes("globals()[5] = 6; globals()['odd'] = 7", created="odd")

    def test_files_are_followed(self) -> None:
        files = self.run_ok(
            "open('made.txt', 'w').write('abc')\nimport os\n"
            "os.makedirs('deep/er'); open('deep/er/f', 'w').close();"
        ).done["files"]
        self.assertEqual(
            files["created"], [{"path": "deep/er/f", "size": 0}, {"path": "made.txt", "size": 3}]
        )
        files = self.run_ok(
            "with open('made.txt', 'a') as f: f.write('d')\nos.remove('deep/er/f')"
        ).done["files"]
        self.assertEqual(
            (files["changed"], files["deleted"]), ([{"path": "made.txt", "size": 4}], ["deep/er/f"])
        )
        self.runner.upload("uploaded.txt", b"from the host")
        self.assertEqual(self.run_ok("pass").done["files"]["created"], [])

    def test_folders_with_too_many_files_are_not_followed(self) -> None:
        crowded = Runner()
        try:
            self.assertIsNone(
                crowded.run("for i in range(1001): open(f'n{i}', 'w').close()").done["files"]
            )
            self.assertIsNone(
                crowded.run("import os\nfor i in range(1001): os.remove(f'n{i}')").done["files"]
            )
            self.assertEqual(
                crowded.run("open('one', 'w').close()").done["files"]["created"],
                [{"path": "one", "size": 0}],
            )
        finally:
            crowded.close()


if __name__ == "__main__":
    unittest.main()
