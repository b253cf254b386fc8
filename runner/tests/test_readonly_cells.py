"""Read-only cells: which certainly change nothing."""

from __future__ import annotations

import unittest
from importlib.util import find_spec

from .test_cells import CellTest


class HarmlessCells(CellTest):
    def check(self, code: str, unchanged: bool) -> None:
        with self.subTest(code):
            self.assertEqual(self.runner.run(code).done.get("unchanged", False), unchanged)

    def test_nothing_constants_names_and_prints_change_nothing(self) -> None:
        self.run_ok("number, text, several = 5, 'text', (1, ('a', None))")
        for code in (
            "",
            "  \n",
            "# only words",
            "pass",
            "1",
            "-1.5",
            "'text'",
            "...",
            "None",
            "number",
            "text;",
        ):
            self.check(code, True)
        for code in (
            "several",
            "number, 1",
            "print()",
            "print('a', number, several)",
            "number\npass\ntext\n",
        ):
            self.check(code, True)

    def test_a_cell_that_does_not_compile_changes_nothing(self) -> None:
        for code in ("if", "def f(:", "x = = 1", "x = 1\n  y = 2", "return 5"):
            self.check(code, True)

    def test_everything_else_may_change_something(self) -> None:
        self.run_ok(
            "import sys\nitems = [1]\nclass Loud:\n"
            "    def __repr__(self): items.append(2); return 'loud'\nloud = Loud()"
        )
        for code in (
            "x = 1",
            "items",
            "loud",
            "print(items)",
            "print(loud)",
            "print(print(1))",
            "(1, loud)",
            "1 / 0",
            "len('a')",
        ):
            self.check(code, False)
        for code in (
            "sys.path",
            "print(1, file=sys.stderr)",
            "f'{loud}'",
            "not_there",
            "%time 1",
            "!true",
            "await x",
            "1 if loud else 2",
        ):
            self.check(code, False)

    def test_names_without_being_shown_are_not_asked(self) -> None:
        self.run_ok("hidden = [1]")
        self.check("hidden\npass", True)
        self.check("hidden\n1", True)

    def test_a_print_of_the_users_own_is_not_trusted(self) -> None:
        self.run_ok("def print(*values): values_seen.extend(values)\nvalues_seen = []")
        self.check("print(1)", False)
        self.run_ok("del print")
        self.check("print(1)", True)

    def test_output_that_goes_elsewhere_is_not_trusted(self) -> None:
        self.run_ok("import io, sys\nkept = sys.stdout; sys.stdout = io.StringIO()")
        self.check("print(1)", False)
        self.run_ok("sys.stdout = kept")
        self.check("print(1)", True)

    def test_a_thread_or_a_hook_beside_the_cell_is_not_trusted(self) -> None:
        self.run_ok(
            "import threading\nend = threading.Event()\n"
            "thread = threading.Thread(target=end.wait)\nthread.start()"
        )
        self.check("1", False)
        self.check("if", False)
        self.run_ok("end.set(); thread.join()")
        self.check("1", True)
        self.run_ok("def hook(*_): pass\nget_ipython().events.register('pre_run_cell', hook)")
        self.check("1", False)
        self.run_ok("get_ipython().events.unregister('pre_run_cell', hook)")
        self.check("1", True)

    def test_a_formatter_of_the_users_own_is_not_trusted(self) -> None:
        self.run_ok(
            "html = get_ipython().display_formatter.formatters['text/html']\n"
            "old = html.for_type(int, str)"
        )
        self.check("1", False)
        self.run_ok("kind = html.pop(int)")
        self.check("1", True)

    @unittest.skipUnless(find_spec("matplotlib"), "skipped: needs matplotlib")
    def test_a_figure_that_waits_to_be_shown_is_a_change(self) -> None:
        self.run_ok("import matplotlib.pyplot as plt")
        self.check("1", True)
        self.run_ok(
            "plt.ioff(); get_ipython().run_line_magic('config', "
            "'InlineBackend.close_figures = False'); plt.figure()\nNone"
        )
        self.check("1", False)
        self.run_ok("plt.close('all')")
        self.check("1", True)
