"""Pip in cells: the ways in which models install packages, with a host that acts as the
installer."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from .harness import Runner
from .test_cells import CellTest
from .test_packages import package

_TEXT = "Successfully installed {}\n"


class PipTest(CellTest):
    def setUp(self) -> None:
        self.store = Path(tempfile.mkdtemp(prefix="runner-test-store-"))
        self.addCleanup(shutil.rmtree, self.store)
        self.runner.asked.clear()
        self.runner.respond = self.install
        self.run_ok("import os, subprocess, sys")

    def install(self, question: dict[str, Any]) -> dict[str, Any]:
        return {"ok": True, "text": _TEXT.format(" ".join(question["requirements"])), "paths": []}

    @property
    def requirements(self) -> list[list[str]]:
        """Returns the requests since the last call."""
        asked = [question["requirements"] for question in self.runner.asked]
        self.runner.asked.clear()
        return asked


class Ways(PipTest):
    def test_every_usual_way_asks_the_host_and_prints_its_answer(self) -> None:
        for code in (
            "!pip install x",
            "!pip3 install x",
            "!python -m pip install x",
            "!python3 -m pip install x",
            "!{sys.executable} -m pip install x",
            '!"{sys.executable}" -m pip install x',
            "!uv pip install x",
            "!python -m uv pip install x",
            "name = 'x'\n!pip install {name}",
            "name = 'x'\n!pip install $name",
            "!  pip   install x",
            "%pip install x",
            "pip install x",
            "%uv pip install x",
            "%%bash\npip install x",
            "%%sh\npip install x",
            "%%sh\npython -m pip install x",
            "%%script bash\npip install x",
            "get_ipython().system('pip install x')",
            "os.system('pip install x');",
            "subprocess.run(['pip', 'install', 'x']);",
            "subprocess.check_call([sys.executable, '-m', 'pip', 'install', 'x']);",
            "subprocess.call(('pip3', 'install', 'x'));",
            "subprocess.run('pip install x', shell=True);",
            "subprocess.Popen(['uv', 'pip', 'install', 'x']).wait();",
            "import asyncio\nprocess = await asyncio.create_subprocess_exec('pip', 'install', "
            "'x')\nawait process.wait();",
        ):
            with self.subTest(code):
                self.assertEqual(self.run_ok(code).order, [f"out:{_TEXT.format('x')}"])
                self.assertEqual(self.requirements, [["x"]])

    def test_the_shell_does_what_is_the_shells(self) -> None:
        installed = _TEXT.format
        for code, output in (
            ("!pip install x > /dev/null 2>&1", ""),
            ("!pip install x 2>&1 | tail -1 | tr S s", "successfully installed x\n"),
            ("!pip install x && echo yes || echo no", installed("x") + "yes\n"),
            ("!true; pip install x; echo $?", installed("x") + "0\n"),
            ("!if pip install x >/dev/null; then echo good; fi", "good\n"),
            ("!for p in x; do pip install $p; done", installed("x")),
            ("!echo $(pip install x)!", installed("x").strip() + "!\n"),
            ("!pip install -q x", ""),
            ("%pip install x >/dev/null", ""),
            (
                "%%bash\nset -euo pipefail\n# install\npip install x | cat\necho line $LINENO",
                installed("x") + "line 4\n",
            ),
            ("%%bash\nfor p in x\ndo\n  pip install $p\ndone", installed("x")),
        ):
            with self.subTest(code):
                self.assertEqual(self.run_ok(code).text, output)
                self.assertEqual(self.requirements, [["x"]])

    def test_a_command_that_the_shell_does_not_reach_asks_nothing(self) -> None:
        self.run_ok("!false && pip install x")
        self.run_ok("!echo pip install x")
        self.assertEqual(self.requirements, [])
        self.run_ok("!true && pip install x")  # Control.
        self.assertEqual(self.requirements, [["x"]])

    def test_several_installations_in_one_cell_are_several_questions(self) -> None:
        self.run_ok("!pip install a b\n%pip install c")
        self.run_ok("%%bash\npip install d\npip install e & wait")
        self.assertEqual(self.requirements, [["a", "b"], ["c"], ["d"], ["e"]])

    def test_output_can_be_kept(self) -> None:
        self.assert_order("kept = !pip install x\nkept", f"value:{[_TEXT.format('x').strip()]!r}")
        self.assert_order("%%capture taken\n!pip install x\n%pip install y")
        self.assert_order(
            "print(taken.stdout, end='')", f"out:{_TEXT.format('x')}{_TEXT.format('y')}"
        )
        self.assert_order("%%bash --out script\npip install z")
        self.assert_order("print(script, end='')", f"out:{_TEXT.format('z')}")
        self.assert_order(
            "subprocess.run([sys.executable, '-m', 'pip', 'install', 'x'], capture_output=True, "
            "text=True).stdout",
            f"value:{_TEXT.format('x')!r}",
        )

    def test_options_reach_the_host(self) -> None:
        self.run_ok("!pip install -qU 'x[a]>=1; python_version>\"3\"' --no-cache-dir")
        [question] = self.runner.asked
        self.assertEqual(question["what"], "install")
        self.assertEqual(question["requirements"], ['x[a]>=1; python_version>"3"'])
        self.assertEqual(question["options"], {"upgrade": True})

    def test_requirements_files_are_read_where_the_command_runs(self) -> None:
        self.runner.upload("here/r.txt", b"a\n-r more.txt\n", overwrite=True)
        self.runner.upload("here/more.txt", b"b # comment\n", overwrite=True)
        self.run_ok("!cd here && pip install -r r.txt")
        self.run_ok("%pip install -r here/r.txt")
        self.run_ok("subprocess.run(['pip', 'install', '-r', 'r.txt'], cwd='here', check=True)")
        self.assertEqual(self.requirements, [["a", "b"]] * 3)

    def test_other_programs_and_shells_are_as_before(self) -> None:
        self.assert_order("!echo pipes | tr p P", "out:PiPes\n")
        self.assert_order("!python() { echo mine; }; python -m pip install x", "out:mine\n")
        self.assert_order("!{sys.executable} -c 'print(1)  # pip'", "out:1\n")
        self.assert_order("%%bash\nexit 0 # pip")
        self.run_failing("%%bash\nexit 3 # pip", "CalledProcessError")
        self.assert_order(
            "subprocess.run(['echo', 'pip', 'install'], capture_output=True, text=True).stdout",
            "value:'pip install\\n'",
        )
        self.assert_order(
            "subprocess.run(iter(['echo', 'pip']), capture_output=True).stdout", "value:b'pip\\n'"
        )
        self.assert_order("os.system('exit 3 # pip'), os.system('exit 3')", "value:(768, 768)")
        self.assertEqual(self.requirements, [])

    def test_a_process_left_behind_does_not_hold_the_cell(self) -> None:
        self.run_ok("!pip install x; sleep 1000 >/dev/null 2>&1 & echo $! > left")
        self.run_ok("os.kill(int(open('left').read()), 9)")


class Results(PipTest):
    def test_a_package_can_be_imported_in_the_same_cell(self) -> None:
        folder = package(self.store, "p", {"same_cell.py": "answer = 42"})
        self.runner.respond = lambda question: {"ok": True, "text": "", "paths": [folder]}
        self.assert_order("!pip install same_cell\nimport same_cell\nsame_cell.answer", "value:42")

    def test_the_shell_that_installed_a_package_finds_it_too(self) -> None:
        folder = package(
            self.store,
            "p",
            {"shells_own.py": "print('module')", "bin/shells-tool": "#!/bin/sh\necho tool\n"},
        )
        self.runner.respond = lambda question: {"ok": True, "text": "", "paths": [folder]}
        self.run_ok("try: os.environ.pop('PYTHONPATH')\nexcept KeyError: pass")
        self.assert_order(
            "!pip install x && shells-tool && {sys.executable} -c 'import shells_own'",
            "out:tool\nmodule\n",
        )
        python = self.run_ok("print(sys.executable)").text.strip()
        for shell in ("bash", "sh"):
            self.run_ok(
                f"os.environ['PATH'] = os.environ['PATH'].replace({folder + '/bin:'!r}, '')\n"
                "del os.environ['PYTHONPATH']"
            )
            self.run_failing(f"%%{shell}\nset -eu\nshells-tool", "CalledProcessError")  # Control.
            self.assert_order(
                f"%%{shell}\nset -eu\npip install x\nshells-tool\n{python} -c 'import shells_own'",
                "out:tool\nmodule\n",
            )

    def test_a_module_that_was_imported_before_is_told(self) -> None:
        folder = package(self.store, "p", {"json.py": "", "numpy/__init__.py": ""})
        self.run_ok("import numpy")
        self.runner.respond = lambda question: {"ok": True, "text": "done", "paths": [folder]}
        result = self.run_ok(f"!pip install -q numpy\nsys.path.remove({folder!r})")
        self.assertEqual(
            result.order,
            [
                "err:WARNING: numpy was imported before. Reset the session to use what is "
                "installed now.\n"
            ],
        )

    def test_a_module_that_every_session_begins_with_is_told_as_such(self) -> None:
        folder = package(self.store, "i", {"IPython/__init__.py": ""})
        self.runner.respond = lambda question: {"ok": True, "text": "done", "paths": [folder]}
        result = self.run_ok(f"!pip install -q ipython\nsys.path.remove({folder!r})")
        self.assertEqual(len(result.order), 1)
        self.assertIn(
            "WARNING: IPython is preloaded here; a reset does not change that.", result.order[0]
        )
        self.assertNotIn("Reset the session", result.order[0])

    def test_exit_codes_are_those_of_pip(self) -> None:
        self.assert_order("!pip install -q x\n_exit_code", "value:0")
        self.runner.respond = lambda question: {
            "ok": False,
            "text": "ERROR: No matching distribution found for x",
        }
        error = "err:ERROR: No matching distribution found for x\n"
        self.assert_order("!pip install -q x\n_exit_code", error, "value:1")
        self.assert_order("%pip install x\n", error)
        self.assert_order("_exit_code", "value:1")
        self.assert_order("os.system('pip install x') >> 8", error, "value:1")
        self.assert_order("subprocess.call(['pip', 'install', 'x'])", error, "value:1")
        result = self.run_failing(
            "subprocess.check_call([sys.executable, '-m', 'pip', 'install', 'x'])",
            "CalledProcessError",
        )
        self.assertIn("'-m', 'pip', 'install', 'x']", result.error["message"])
        self.run_failing("%%bash\npip install x", "CalledProcessError")

    def test_a_host_that_does_not_know_the_question_is_no_riddle(self) -> None:
        runner = Runner()  # Its host refuses every call.
        try:
            result = runner.run("!pip install x\n_exit_code")
            self.assertEqual(
                result.order, ["err:ERROR: this server does not answer 'install'\n", "value:1"]
            )
        finally:
            runner.close()

    def test_an_answer_of_nonsense_is_an_error(self) -> None:
        folder = str(self.store / "missing")
        good = {"ok": True, "text": "done"}
        for answer in (
            {},
            {"ok": 1},
            {"ok": False},
            {**good, "paths": [folder]},
            {**good, "paths": "x"},
            {**good, "paths": 7},
        ):
            self.runner.respond = lambda question, answer=answer: answer
            with self.subTest(answer):
                result = self.run_ok("!pip install x\n_exit_code")
                self.assertIn("ERROR: ", result.text)
                self.assertEqual(result.value, {"text/plain": "1"})

    def test_refusals_ask_nothing_and_say_what_is_possible(self) -> None:
        for line in (
            "-i http://host x",
            "--target dir x",
            "-e .",
            "./local",
            "x.whl",
            "--frobnicate x",
            "",
        ):
            with self.subTest(line):
                result = self.run_ok(f"!pip install {line}\n_exit_code")
                self.assertTrue(result.stream("stderr").startswith("ERROR: "), result.order)
                self.assertEqual(result.value, {"text/plain": "1"})
        self.assertEqual(self.requirements, [])

    def test_an_interrupt_ends_an_installation_and_the_next_one_works(self) -> None:
        for code in (
            "!pip install x",
            "%pip install x",
            "%%bash\npip install x",
            "subprocess.run(['pip', 'install', 'x'])",
        ):
            with self.subTest(code):
                self.runner.respond = lambda question: self.runner.interrupt()
                self.assertEqual(self.run_failing(code, "KeyboardInterrupt").text, "")
                late = self.runner.asked[-1]["ask"]
                self.runner.answer(late, ok=True, text="late", paths=[])
                self.runner.respond = self.install
                self.assertEqual(self.run_ok("!pip install y").text, _TEXT.format("y"))

    def test_a_forked_process_is_told_that_it_cannot(self) -> None:
        result = self.run_ok(
            "child = os.fork()\n"
            "if child == 0:\n"
            "    subprocess.run(['pip', 'install', 'x'])\n"
            "    os._exit(0)\n"
            "os.waitpid(child, 0);"
        )
        self.assertIn("forked cannot ask", result.text)
        self.assertEqual(self.requirements, [])

    def test_threads_may_install(self) -> None:
        self.run_ok(
            "from concurrent.futures import ThreadPoolExecutor\n"
            "with ThreadPoolExecutor(3) as pool:\n"
            "    codes = list(pool.map(lambda n: subprocess.call(['pip', 'install', '-q', "
            "f'x{n}']), range(6)))"
        )
        self.assert_order("codes", "value:[0, 0, 0, 0, 0, 0]")
        self.assertEqual(sorted(self.requirements), [[f"x{number}"] for number in range(6)])


class Reports(PipTest):
    def setUp(self) -> None:
        super().setUp()
        self.folder = package(
            self.store,
            "p",
            {
                "Demo_Thing-1.5.dist-info/METADATA": "Metadata-Version: 2.1\nName: Demo_Thing\n"
                "Version: 1.5\nSummary: A demo\n"
                "Project-URL: Homepage, https://example.org\nAuthor: A. N. Author\nLicense: MIT\n"
                "Requires-Dist: numpy>=1\n"
                "Requires-Dist: not-there; extra == 'more'\n"
                "Requires-Dist: nowhere; python_version < '3'\n",
                "Demo_Thing-1.5.dist-info/RECORD": "demo.py,,\n",
                "demo.py": "",
            },
        )
        self.runner.add_packages(self.folder)
        self.addCleanup(self.run_ok, f"sys.path.remove({self.folder!r})")

    def test_list_looks_like_pips(self) -> None:
        for command in (
            "!pip list",
            "%pip list",
            "!uv pip list",
            "!python -m pip list --disable-pip-version-check",
        ):
            lines = self.run_ok(command).text.splitlines()
            self.assertRegex(lines[0], r"^Package +Version$")
            self.assertRegex(lines[1], r"^-+ -+$")
            self.assertTrue(any(line.split() == ["Demo_Thing", "1.5"] for line in lines), lines)
            names = [line.split()[0].lower().replace("_", "-") for line in lines[2:]]
            self.assertEqual(names, sorted(names))
        self.assertEqual(
            self.run_ok("!pip list | grep -i demo").text.split(), ["Demo_Thing", "1.5"]
        )
        self.assertIn(
            {"name": "Demo_Thing", "version": "1.5"},
            json.loads(self.run_ok("!pip list --format=json").text),
        )
        self.assertIn("Demo_Thing==1.5\n", self.run_ok("!pip list --format freeze").text)

    def test_freeze_can_be_read_again(self) -> None:
        text = self.run_ok("!pip freeze").text
        self.assertIn("Demo_Thing==1.5\n", text)
        self.assertIn("\nnumpy==", text)
        self.assertNotIn("\npip==", text)
        self.run_ok("!pip freeze > frozen.txt")
        self.run_ok("!pip install -r frozen.txt")
        self.assertEqual(self.requirements, [text.split()])

    def test_what_came_from_an_address_is_frozen_with_it(self) -> None:
        information = Path(self.folder, "Demo_Thing-1.5.dist-info/direct_url.json")
        information.write_text(
            '{"url": "https://host/x", "vcs_info": {"vcs": "git", "commit_id": "abc"}}'
        )
        self.assertIn("Demo_Thing @ git+https://host/x@abc\n", self.run_ok("!pip freeze").text)
        information.write_text('{"url": "https://host/x.whl", "archive_info": {}}')
        self.assertIn("Demo_Thing @ https://host/x.whl\n", self.run_ok("!pip freeze").text)
        information.write_text("nonsense")
        self.assertIn("Demo_Thing==1.5\n", self.run_ok("!pip freeze").text)

    def test_show_looks_like_pips(self) -> None:
        self.assertEqual(
            self.run_ok("!pip show demo.thing").text,
            "Name: Demo_Thing\nVersion: 1.5\nSummary: A demo\nHome-page: https://example.org\n"
            "Author: A. N. Author\n"
            f"Author-email:\nLicense: MIT\nLocation: {self.folder}\nRequires: numpy\n"
            "Required-by:\n",
        )
        self.assertRegex(self.run_ok("!pip show numpy").text, "Required-by: .*Demo_Thing")
        self.assertTrue(self.run_ok("!pip show -f Demo_Thing").text.endswith("Files:\n  demo.py\n"))
        self.assertIn("\n---\nName: ", self.run_ok("!pip show demo-thing numpy").text)
        self.assert_order(
            "!pip show nothing-here\n_exit_code",
            "err:WARNING: Package(s) not found: nothing-here\n",
            "value:1",
        )

    def test_of_two_versions_the_one_that_is_imported_counts(self) -> None:
        newer = package(
            self.store,
            "n",
            {"demo_thing-2.0.dist-info/METADATA": "Name: Demo_Thing\nVersion: 2.0\n"},
        )
        self.runner.add_packages(newer)
        self.assertEqual(self.run_ok("!pip freeze | grep Demo").text, "Demo_Thing==2.0\n")
        self.run_ok(f"sys.path.remove({newer!r})")

    def test_the_version_and_help_are_told(self) -> None:
        self.assertRegex(
            self.run_ok("!pip --version").text, r"^pip \S+ from \S+ \(python 3\.\d+\)\n$"
        )
        self.assertIn("install", self.run_ok("!pip").text)
        self.assertIn("install", self.run_ok("!pip install --help").text)

    def test_other_commands_are_refused_with_what_is_possible(self) -> None:
        for command in (
            "uninstall -y x",
            "download x",
            "frobnicate",
            "list --outdated",
            "list x",
            "show",
        ):
            with self.subTest(command):
                result = self.run_ok(f"!pip {command}\n_exit_code")
                self.assertIn("ERROR: ", result.stream("stderr"))
                self.assertEqual(result.value, {"text/plain": "1"})
        self.assertEqual(
            self.run_ok("!uv pip list >/dev/null\n_exit_code").value, {"text/plain": "0"}
        )  # Control.


class Warmth(CellTest):
    def test_neither_pip_nor_packaging_is_imported(self) -> None:
        self.assert_order(
            "import sys\n[name for name in ('pip', 'packaging') if name in sys.modules]", "value:[]"
        )
        self.run_ok("!pip install .\n!pip list > /dev/null")
        self.assert_order(
            "[name for name in ('pip', 'packaging') if name in sys.modules]", "value:[]"
        )

    def test_an_installation_leaves_neither_thread_nor_descriptor(self) -> None:
        count = "import os\nlen(os.listdir('/proc/self/fd')), len(os.listdir('/proc/self/task'))"
        self.run_ok("!pip install x\n!true")
        self.run_ok(count)
        before = self.run_ok(count).value
        self.run_ok("!pip install x\nkept = !pip list\n!true")
        self.run_ok("pass")
        self.assertEqual(self.run_ok(count).value, before)
