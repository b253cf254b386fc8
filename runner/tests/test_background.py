"""Tasks of the event loop between cells: they continue as in a notebook, and requests are
answered."""

from __future__ import annotations

import unittest

from cellblock_runner.streams import LateText

from .harness import Runner
from .test_branch import BranchTest
from .test_cells import CellTest

# Does a step for each byte from one pipe, and reports each step through another one.
_STEPS = """
import asyncio, os
asked, asking = os.pipe()
told, telling = os.pipe()
steps = 0
async def step():
    global steps
    loop = asyncio.get_running_loop()
    while True:
        ready = loop.create_future()
        loop.add_reader(asked, ready.set_result, None)
        await ready
        loop.remove_reader(asked)
        os.read(asked, 1)
        steps += 1
        print('step', steps)
        os.write(telling, b'.')
"""
_BEGIN = _STEPS + "task = asyncio.create_task(step())"


def _number(session: Runner, name: str) -> str:
    value = session.run(name).value
    assert value is not None
    return value["text/plain"]


class Background(CellTest):
    def have_a_step_done(self, interrupted: bool = False) -> None:
        """Between two cells, requests a step of the task and waits until it is done."""
        process = self.runner.process.pid
        asking = open(f"/proc/{process}/fd/{_number(self.runner, 'asking')}", "wb", 0)
        told = open(f"/proc/{process}/fd/{_number(self.runner, 'told')}", "rb", 0)
        with asking, told:
            if interrupted:
                self.runner.interrupt()
            asking.write(b".")
            told.read(1)

    def test_a_task_of_a_cell_without_await_goes_on_between_cells(self) -> None:
        self.run_ok(_BEGIN)
        self.have_a_step_done()
        result = self.run_ok("steps")
        self.assertEqual(result.order, ["value:1"])
        self.assertEqual(result.done["late"], {"text": "step 1\n", "omitted": 0})
        self.run_ok("task.cancel()")

    def test_a_task_of_a_cell_with_await_goes_on_between_cells(self) -> None:
        self.run_ok(_STEPS + "task = asyncio.ensure_future(step()); await asyncio.sleep(0)")
        self.have_a_step_done()
        self.assert_order("steps", "value:1")
        self.run_ok("task.cancel()")

    def test_a_cell_beside_a_task_may_change_something(self) -> None:
        self.run_ok("import asyncio\nwaits = asyncio.create_task(asyncio.sleep(3600))")
        self.assertNotIn("unchanged", self.run_ok("1").done)
        self.assertNotIn("unchanged", self.runner.run("if").done)
        self.run_ok("waits.cancel()")
        # The first cell after the task has ended finds its results.
        self.assertNotIn("unchanged", self.run_ok("1").done)
        self.assertTrue(self.run_ok("1").done["unchanged"])

    def test_a_task_that_leaves_or_stops_the_loop_ends_nothing_else(self) -> None:
        self.run_ok(_BEGIN)
        self.run_ok(
            "async def leave(): raise SystemExit(3)\nleaving = asyncio.create_task(leave())"
        )
        self.run_ok("asyncio.get_event_loop().call_soon(asyncio.get_event_loop().stop)")
        self.have_a_step_done()
        self.assert_order("steps, leaving.done()", "value:(1, True)")
        self.run_ok("task.cancel(); leaving.exception();")

    def test_an_interrupt_between_cells_does_nothing_to_tasks(self) -> None:
        self.run_ok(_BEGIN)
        self.have_a_step_done(interrupted=True)
        self.assert_order("steps, task.done()", "value:(1, False)")
        self.run_ok("task.cancel()")

    def test_an_interrupt_ends_a_task_that_holds_up_a_cell_and_nothing_else(self) -> None:
        self.run_ok(
            "import asyncio, os, time\ntold, telling = os.pipe()\n"
            "async def block():\n    os.write(telling, b'.')\n    while True: time.sleep(0.01)\n"
        )
        process = self.runner.process.pid
        told = open(f"/proc/{process}/fd/{_number(self.runner, 'told')}", "rb", 0)
        self.run_ok("blocking = asyncio.create_task(block())")
        told.read(1)
        told.close()
        self.runner.begin("blocking.done(), type(blocking.exception()).__name__")
        self.runner.interrupt()
        self.assertEqual(self.runner.finish().order, ["value:(True, 'KeyboardInterrupt')"])

    def test_requests_that_came_together_are_all_answered_beside_a_task(self) -> None:
        self.run_ok("import asyncio\nwaits = asyncio.create_task(asyncio.sleep(3600))")
        self.runner.begin("1")
        header = {"type": "list_files", "id": 10_000, "limit": 5}
        self.runner.request(header, answers=False)
        self.assertEqual(self.runner.finish().order, ["value:1"])
        self.assertEqual(self.runner.replies()[-1].header["type"], "file_list")
        self.run_ok("waits.cancel()")


class Copies(BranchTest):
    def test_tasks_go_on_in_source_and_copy_and_such_a_copy_is_not_whole(self) -> None:
        self.run_ok(
            self.source,
            "import asyncio\nticks = 0\nasync def tick():\n    global ticks\n    while True:\n"
            "        ticks += 1\n        await asyncio.sleep(0.001)\n"
            "async def goes_on():\n    before = ticks\n"
            "    while ticks < before + 3: await asyncio.sleep(0.001)\n"
            "    return True\n"
            "task = asyncio.create_task(tick())",
        )
        checkpoint = self.source.branch()
        self.assertEqual((checkpoint.lost, checkpoint.whole), ([], False))
        copy = checkpoint.spawn(b"u")
        for session in (self.source, copy):
            self.assert_shows(session, "await asyncio.wait_for(goes_on(), 10)", "value:True")
        self.run_ok(copy, "task.cancel()")
        self.run_ok(copy, "pass")
        self.assertTrue(copy.branch().whole)

    def test_late_text_is_told_by_the_source_only(self) -> None:
        self.run_ok(
            self.source,
            "import asyncio, os\ntold, telling = os.pipe()\n"
            "async def speak():\n    print('spoken'); os.write(telling, b'.')\n"
            "task = asyncio.create_task(speak())",
        )
        number = _number(self.source, "told")
        with open(f"/proc/{self.source.process.pid}/fd/{number}", "rb", 0) as told:
            told.read(1)
        self.run_ok(
            self.source,
            "async def later(): print('later'); os.write(telling, b'.')\n"
            "asyncio.create_task(later());",
        )
        with open(f"/proc/{self.source.process.pid}/fd/{number}", "rb", 0) as told:
            told.read(1)
        copy = self.source.branch().spawn(b"u")
        self.assertNotIn("late", self.run_ok(copy, "1").done)
        self.assertEqual(self.run_ok(self.source, "1").done["late"]["text"], "later\n")


class Bounds(unittest.TestCase):
    def test_the_oldest_text_is_dropped_and_counted(self) -> None:
        late = LateText(limit=10)
        self.assertIsNone(late.take())
        for text in ("abcdef", "", "ghij", "kl"):
            late.add(text)
        self.assertEqual(late.take(), {"text": "cdefghijkl", "omitted": 2})
        late.add("x" * 25)
        late.add("y")
        self.assertEqual(late.take(), {"text": "x" * 9 + "y", "omitted": 16})
        self.assertIsNone(late.take())
