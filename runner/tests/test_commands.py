"""Commands: a session whose programs the host starts, and a host that does so, refuses, or is
slow."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from typing import Any, ClassVar

from .harness import Runner
from .test_cells import CellTest

_REFUSED = {"ok": False, "reason": "denied", "text": "not today"}


class CommandTest(CellTest):
    launched: ClassVar[list[subprocess.Popen[bytes]]] = []

    @classmethod
    def setUpClass(cls) -> None:
        cls.runner = Runner(ask_for_programs=True)

    def setUp(self) -> None:
        self.runner.asked.clear()
        self.runner.respond = self.launch
        self.withdrawn: list[int] = []

    def launch(self, question: dict[str, Any]) -> dict[str, Any] | None:
        """Acts as the host: starts the program, and answers when it has ended."""
        if question["what"] == "withdraw":
            self.withdrawn.append(question["of"])
            for process in self.launched:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
            return {"ok": True}
        outlets = self.runner.outlets.pop(question["ask"])
        words = question.get("words") or ["/bin/bash", "-c", question["command"]]
        changes = question["environment"]
        variables = {
            name: value for name, value in {**os.environ, **changes}.items() if value is not None
        }
        try:
            process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=outlets[0],
                stderr=outlets[1],
                cwd=question["folder"],
                env=variables,
                start_new_session=True,
            )
        except FileNotFoundError:
            return {"ok": False, "reason": "missing", "text": "there is no such program"}
        finally:
            for outlet in set(outlets):
                os.close(outlet)
        self.launched.append(process)

        def wait() -> None:
            try:
                process.communicate(question.get("stdin", "").encode(), question.get("timeout"))
                answer = {"ok": True, "code": process.returncode, "text": None}
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                answer = {"ok": False, "reason": "timeout", "text": "it took too long"}
            self.runner.answer(question["ask"], **answer)

        threading.Thread(target=wait).start()
        return None

    def commands(self) -> list[Any]:
        return [question.get("command", question.get("words")) for question in self.runner.asked]


class Magics(CommandTest):
    def test_a_line_is_asked_for_and_its_output_is_the_cells(self) -> None:
        result = self.run_ok(
            "print('before')\n!echo out; echo err >&2; exit 3\nprint('after', _exit_code)"
        )
        self.assertEqual(result.stream("stdout"), "before\nout\nafter 3\n")
        self.assertEqual(result.stream("stderr"), "err\n")
        self.assertTrue(
            result.text.startswith("before\n") and result.text.endswith("after 3\n"), result.text
        )
        self.assertEqual(self.commands(), ["echo out; echo err >&2; exit 3"])

    def test_what_is_expanded_is_expanded_before_it_is_asked(self) -> None:
        self.run_ok("name = 'X'\nitems = {'a': 'b c'}")
        self.run_ok("!echo $name {name.lower()} {items['a']} $$HOME")
        self.run_ok("!echo $undefined")
        self.assertEqual(self.commands(), ["echo X x b c $HOME", "echo $undefined"])

    def test_output_is_taken_as_a_list(self) -> None:
        self.assert_order(
            "x = !echo a; echo b >&2\ntype(x).__name__, list(x), _exit_code",
            "value:('SList', ['a', 'b'], 0)",
        )
        self.assert_order("y = %sx echo a\ny.n", "value:'a'")
        self.assert_order("z = %system echo a\nlist(z)", "value:['a']")

    def test_more_than_a_pipe_holds_is_taken(self) -> None:
        self.assert_order("x = !seq 100000\nlen(x), x[-1]", "value:(100000, '100000')")
        result = self.run_ok("!seq 100000")
        self.assertTrue(result.text.endswith("\n99999\n100000\n"))

    def test_scripts_are_asked_for_with_their_program_and_text(self) -> None:
        self.assert_order("%%bash\necho one\necho two", "out:one\ntwo\n")
        self.assert_order("%%sh\necho three", "out:three\n")
        self.run_failing("%%script bash -e\nfalse\necho never", "CalledProcessError")
        self.assert_order("%%python3\nprint(1 + 1)", "out:2\n")
        texts = [(question["words"], question["stdin"]) for question in self.runner.asked]
        self.assertEqual(texts[0], (["bash"], "echo one\necho two\n"))
        self.assertEqual(texts[2], (["bash", "-e"], "false\necho never\n"))
        self.assertEqual(len(texts), 4)

    def test_the_options_of_scripts_work(self) -> None:
        self.run_ok("%%bash --out o --err e --no-raise-error\necho out; echo err >&2; exit 4")
        self.assert_order("o, e", "value:('out\\n', 'err\\n')")
        self.assert_order(
            "%%script nothing-like-this\nx", "out:Couldn't find program: 'nothing-like-this'\n"
        )
        self.run_failing("%%bash --bg\nsleep 100", "CommandRefused")

    def test_a_capture_captures(self) -> None:
        self.run_ok("%%capture captured\n!echo out\nimport os; os.system('echo more')")
        self.assert_order("captured.stdout", "value:'out\\nmore\\n'")

    def test_a_refusal_is_an_error_with_the_hosts_words(self) -> None:
        self.runner.respond = lambda question: _REFUSED
        for cell in (
            "!ls",
            "x = !ls",
            "%system ls",
            "%sx ls",
            "%%bash\nls",
            "%%perl\n1",
            "import os; os.system('ls')",
        ):
            failure = self.run_failing(cell, "CommandRefused")
            self.assertEqual(failure.error["message"], "not today")
        self.assertEqual(len(self.runner.asked), 7)
        self.assert_order("1", "value:1")

    def test_folder_and_variables_are_told(self) -> None:
        self.run_ok(
            "import os\nos.makedirs('sub', exist_ok=True)\nos.chdir('sub')\n"
            "os.environ['NEW'] = 'x y'\nos.environ.pop('LANG', None)"
        )
        self.assert_order("!echo $$NEW; basename $$PWD", "out:x y\nsub\n")
        [question] = self.runner.asked
        self.assertEqual(question["folder"], os.path.join(self.runner.workdir, "sub"))
        self.assertEqual(question["environment"].get("NEW"), "x y")
        self.assertNotIn("PATH", question["environment"])
        self.run_ok("os.chdir('..'); del os.environ['NEW']")

    def test_redirected_output_goes_where_it_is_led(self) -> None:
        self.run_ok(
            "import os\nkept = os.dup(1)\nfile = os.open('led.txt', os.O_WRONLY | os.O_CREAT)\n"
            "os.dup2(file, 1)\n"
            "!echo led\nos.dup2(kept, 1)"
        )
        self.assert_order("open('led.txt').read()", "value:'led\\n'")

    def test_an_interrupt_ends_the_waiting_and_withdraws_the_question(self) -> None:
        self.runner.begin("print('go', flush=True)\n!echo on; sleep 100")
        result = self.runner.finish(watch=self.runner.interrupt_when("on\n"))
        self.assertEqual(result.error["name"], "KeyboardInterrupt")
        self.assertEqual(len(self.withdrawn), 1)
        self.assert_order("x = !echo again\nlist(x)", "value:['again']")

    def test_the_next_cell_has_pipes_that_a_command_does_not_hold(self) -> None:
        self.run_ok("1")
        before = self.runner.rotations
        self.run_ok("2")
        self.assertEqual(self.runner.rotations, before)  # Control.
        self.run_ok("!echo x")
        self.run_ok("1")
        self.assertEqual(self.runner.rotations, before + 1)

    def test_threads_ask_at_once(self) -> None:
        self.run_ok(
            "from concurrent.futures import ThreadPoolExecutor\nimport subprocess\n"
            "with ThreadPoolExecutor(4) as pool:\n"
            "    found = list(pool.map(lambda n: subprocess.run(['seq', str(n)], "
            "capture_output=True).stdout, [3, 30000, 5, 40000]))"
        )
        self.assert_order("[len(text.split()) for text in found]", "value:[3, 30000, 5, 40000]")


class Pip(CommandTest):
    def test_an_installation_is_no_command(self) -> None:
        self.runner.respond = lambda question: {"ok": True, "text": "done\n", "paths": []}
        for cell in (
            "!pip install polars",
            "%pip install polars",
            "!python -m pip install polars",
            "%%bash\npip install polars",
            "import os; os.system('pip install polars')",
            "import subprocess; subprocess.run(['pip', 'install', 'polars'])",
            "import subprocess; subprocess.check_call('pip install polars', shell=True)",
            "x = !pip install 'polars>=1,<2'",
        ):
            self.runner.asked.clear()
            self.run_ok(cell)
            self.assertEqual(
                [question["what"] for question in self.runner.asked], ["install"], cell
            )

    def test_requirements_with_signs_of_the_shell_need_no_shell(self) -> None:
        self.runner.respond = lambda question: {"ok": True, "text": "", "paths": []}
        self.run_ok("!pip install 'a==1.*' \"b~=2.0\" c~=3.0")
        self.run_ok("%pip install a==1.*")
        requirements = [question["requirements"] for question in self.runner.asked]
        self.assertEqual(requirements, [["a==1.*", "b~=2.0", "c~=3.0"], ["a==1.*"]])

    def test_what_only_lists_asks_nobody(self) -> None:
        self.assertIn("Package", self.run_ok("!pip list").text)
        self.assertIn("Package", self.run_ok("%pip list").text)
        self.assertEqual(self.runner.asked, [])

    def test_a_line_that_does_more_is_a_command(self) -> None:
        self.run_ok("!pip list > /dev/null; true")
        self.assertEqual(self.commands(), ["pip list > /dev/null; true"])


class Subprocesses(CommandTest):
    def test_run_and_its_relatives_ask(self) -> None:
        self.run_ok("import subprocess, os")
        self.assert_order(
            "done = subprocess.run(['echo', 'a b'], capture_output=True, text=True)\n"
            "done.returncode, done.stdout, done.stderr",
            "value:(0, 'a b\\n', '')",
        )
        self.assert_order("subprocess.check_output('echo $0', shell=True)", "value:b'/bin/sh\\n'")
        self.assert_order("subprocess.getoutput('echo x')", "value:'x'")
        self.assert_order("subprocess.call(['false'])", "value:1")
        self.assert_order(
            "subprocess.run(['cat'], input='in', stdout=subprocess.PIPE, text=True).stdout",
            "value:'in'",
        )
        self.assert_order(
            "subprocess.run(['sh', '-c', 'echo e >&2'], stderr=subprocess.STDOUT, "
            "stdout=-1).stdout",
            "value:b'e\\n'",
        )
        self.assert_order("subprocess.run(['echo', 'shown']).returncode", "out:shown\n", "value:0")
        self.assert_order("os.system('exit 3') >> 8", "value:3")
        self.run_failing("subprocess.run(['false'], check=True)", "CalledProcessError")
        self.run_failing("subprocess.run(['no-such-program'])", "FileNotFoundError")
        self.run_failing("subprocess.run(['sleep', '100'], timeout=0.1)", "TimeoutExpired")

    def test_files_environment_and_folder_are_as_given(self) -> None:
        self.run_ok(
            "import subprocess\nwith open('out.txt', 'w') as f: subprocess.run(['echo', 'x'], "
            "stdout=f)"
        )
        self.assert_order("open('out.txt').read()", "value:'x\\n'")
        self.assert_order("subprocess.run(['pwd'], cwd='/', stdout=-1).stdout", "value:b'/\\n'")
        self.assert_order(
            "subprocess.run(['/usr/bin/env'], env={'A': '1'}, stdout=-1).stdout", "value:b'A=1\\n'"
        )

    def test_what_cannot_be_asked_for_is_refused_with_a_reason(self) -> None:
        self.run_ok("import subprocess, os, sys")
        for cell in (
            "subprocess.Popen(['ls'])",
            "os.popen('ls')",
            "os.execv('/bin/ls', ['ls'])",
            "os.execvp('ls', ['ls'])",
            "os.posix_spawn('/bin/ls', ['ls'], {})",
            "os.spawnlp(os.P_WAIT, 'ls', 'ls')",
            "subprocess.run(['ls'], preexec_fn=print)",
            "subprocess.run(['cat'], stdin=open('/dev/zero'))",
            "subprocess.run(['cat'], input=b'\\xff')",
            "await __import__('asyncio').create_subprocess_exec('ls')",
        ):
            failure = self.run_failing(cell, "CommandRefused")
            self.assertIn("subprocess.run() can", failure.error["message"], cell)
        self.assertEqual(self.runner.asked, [])

    def test_a_forked_child_cannot_ask(self) -> None:
        code = (
            "import os\npid = os.fork()\n"
            "if pid == 0:\n"
            "    try:\n        os.system('echo never')\n"
            "    except PermissionError:\n        os._exit(7)\n"
            "    os._exit(0)\n"
            "os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])"
        )
        self.assert_order(code, "value:7")
        self.assertEqual(self.runner.asked, [])


class Control(CellTest):
    def test_where_programs_are_free_nobody_is_asked(self) -> None:
        self.runner.asked.clear()
        self.run_ok(
            "import os, subprocess\n!true\nos.system('true')\nsubprocess.Popen(['true']).wait()\n"
            "x = !echo x"
        )
        self.run_ok("%%bash\ntrue")
        self.assertEqual(self.runner.asked, [])


class Copies(CommandTest):
    def test_a_copy_asks_too(self) -> None:
        self.run_ok("os_name = 'y'")
        copy = self.runner.fork()
        asked: list[str] = []
        copy.respond = lambda question: asked.append(question["command"]) or _REFUSED
        result = copy.run("!echo $os_name")
        self.assertEqual(result.error["name"], "CommandRefused")
        self.assertEqual(asked, ["echo y"])
