"""Host calls of a running cell, with a host that answers at once, late, in another order, or not at
all.
"""

from __future__ import annotations

import socket
import unittest
from typing import Any

from cellblock_runner.host_calls import HostCallError, HostCalls
from cellblock_runner.channel import Channel
from cellblock_runner.frames import encode
from cellblock_runner.interrupts import Gate
from cellblock_runner.streams import OutputStreams

from .harness import Died, Runner
from .test_cells import CellTest

_IMPORT = "from cellblock_runner.host_calls import ask, HostCallError\nimport threading\n"


def _echo(question: dict[str, Any]) -> dict[str, Any]:
    return {"ok": True, "text": f"{question['what']} {question.get('name', '')}"}


class AskingTest(CellTest):
    def setUp(self) -> None:
        self.runner.asked.clear()
        self.runner.respond = _echo
        self.run_ok(_IMPORT)


class Questions(AskingTest):
    def test_a_question_reaches_the_host_and_its_answer_is_returned(self) -> None:
        self.assert_order(
            "ask('weather', name='here', options={'deep': [1]})['text']", "value:'weather here'"
        )
        [question] = self.runner.asked
        self.assertEqual(
            (question["what"], question["name"], question["options"]),
            ("weather", "here", {"deep": [1]}),
        )

    def test_numbers_are_never_repeated(self) -> None:
        self.run_ok("for _ in range(3): ask('x')")
        self.run_ok("ask('x')")
        self.assertEqual(len({question["ask"] for question in self.runner.asked}), 4)

    def test_members_cannot_forge_what_the_frame_is(self) -> None:
        self.run_ok("ask('x', type='done', id=99, ask=99)")
        self.assertEqual([question["type"] for question in self.runner.asked], ["ask"])

    def test_a_question_has_its_place_between_the_texts(self) -> None:
        seen: list[str] = []
        text = [""]
        self.runner.respond = lambda question: seen.append(text[0]) or {"ok": True}
        self.runner.begin("print('before')\nask('x')\nprint('after')")
        result = self.runner.finish(watch=lambda so_far: text.__setitem__(0, so_far))
        self.assertEqual(result.order, ["out:before\nafter\n"])
        self.assertNotIn("after", seen[0])

    def test_a_refusal_is_an_answer(self) -> None:
        self.runner.respond = lambda question: {"ok": False, "text": "no"}
        self.assert_order("answer = ask('x')\nanswer['ok'], answer['text']", "value:(False, 'no')")

    def test_a_question_that_cannot_be_sent_disturbs_nothing(self) -> None:
        self.run_failing("ask('x', it=object())", "TypeError")
        self.run_failing("ask('x', it='x' * 40_000_000)", "HostCallError")
        self.assert_order(
            "print('still')\nask('x', name='y')['text']", "out:still\n", "value:'x y'"
        )
        self.assertEqual(len(self.runner.asked), 1)

    def test_an_answer_to_nothing_is_skipped(self) -> None:
        def respond(question: dict[str, Any]) -> dict[str, Any]:
            for number in (question["ask"] + 7, "1", None, [1]):
                self.runner.answer(number, text="wrong")  # type: ignore[arg-type]
            return {"text": "right"}

        self.runner.respond = respond
        self.assert_order("ask('x')['text']", "value:'right'")

    def test_a_request_that_comes_too_early_waits_for_the_end_of_the_cell(self) -> None:
        self.runner.upload("early.txt", b"content", overwrite=True)

        def respond(question: dict[str, Any]) -> dict[str, Any]:
            header = {"type": "read_file", "id": 1_000_000, "path": "early.txt", "limit": 100}
            self.runner.request(header, answers=False)
            return {"text": "answer"}

        self.runner.respond = respond
        self.assert_order("ask('x')['text']", "value:'answer'")
        data, end = self.runner.replies()
        self.assertEqual((end.header["id"], data.payload), (1_000_000, b"content"))

    def test_a_forked_process_cannot_ask_and_its_parent_can(self) -> None:
        result = self.run_ok(
            "import os\nprint('', end='', flush=True)\nchild = os.fork()\n"
            "if child == 0:\n"
            "    try: ask('x')\n"
            "    except HostCallError as error: os.write(1, str(error).encode())\n"
            "    os._exit(0)\n"
            "os.waitpid(child, 0)\nask('x', name='y')['text']"
        )
        self.assertIn("forked cannot ask", result.text)
        self.assertEqual(result.value, {"text/plain": "'x y'"})
        self.assertEqual(len(self.runner.asked), 1)

    def test_a_fork_of_the_session_can_ask(self) -> None:
        copy = self.runner.fork()
        copy.respond = _echo
        self.assertEqual(
            copy.run("ask('x', name='copy')['text']").value, {"text/plain": "'x copy'"}
        )
        self.assert_order("ask('x', name='original')['text']", "value:'x original'")


class Interrupts(AskingTest):
    def interrupt_instead(self, _question: dict[str, Any]) -> None:
        self.runner.interrupt()

    def test_an_interrupt_ends_the_waiting(self) -> None:
        self.runner.respond = self.interrupt_instead
        self.run_failing("ask('x')", "KeyboardInterrupt")
        self.runner.respond = _echo
        self.assert_order("ask('x', name='again')['text']", "value:'x again'")

    def test_a_late_answer_between_cells_is_skipped(self) -> None:
        self.runner.respond = self.interrupt_instead
        self.run_failing("ask('x')", "KeyboardInterrupt")
        self.runner.answer(self.runner.asked[-1]["ask"], text="late")
        self.runner.respond = _echo
        self.assert_order("ask('x', name='next')['text']", "value:'x next'")

    def test_a_late_answer_is_not_the_answer_to_the_next_question(self) -> None:
        def respond(question: dict[str, Any]) -> dict[str, Any] | None:
            if question["what"] == "first":
                return self.interrupt_instead(question)
            self.runner.answer(self.runner.asked[0]["ask"], text="late")
            return {"text": "right"}

        self.runner.respond = respond
        self.assert_order(
            "try: ask('first')\nexcept KeyboardInterrupt: print('interrupted')\n"
            "ask('second')['text']",
            "out:interrupted\n",
            "value:'right'",
        )

    def test_another_thread_reads_on_when_the_reader_is_interrupted(self) -> None:
        def respond(question: dict[str, Any]) -> None:
            if question["what"] == "beside":
                self.runner.interrupt()

        def watch(text: str) -> None:
            if "interrupted" in text and not answered:
                answered.append(True)
                [number] = [
                    question["ask"]
                    for question in self.runner.asked
                    if question["what"] == "beside"
                ]
                self.runner.answer(number, text="for the thread")

        answered: list[bool] = []
        self.runner.respond = respond
        self.runner.begin(
            "from cellblock_runner import host_calls\n"
            "def beside():\n"
            "    while host_calls._active._reader is None: pass\n"
            "    print(ask('beside')['text'])\n"
            "thread = threading.Thread(target=beside); thread.start()\n"
            "try: ask('main')\n"
            "except KeyboardInterrupt: print('interrupted')\n"
            "thread.join()"
        )
        self.assertEqual(
            self.runner.finish(watch=watch).order, ["out:interrupted\nfor the thread\n"]
        )


class Threads(AskingTest):
    def test_several_threads_ask_at_once_and_answers_come_in_any_order(self) -> None:
        def respond(question: dict[str, Any]) -> None:
            if len(self.runner.asked) == 8:
                for asked in reversed(self.runner.asked):
                    self.runner.answer(asked["ask"], text=asked["name"])

        self.runner.respond = respond
        self.run_ok(
            "got = {}\n"
            "def one(name): got[name] = ask('x', name=name)['text']\n"
            "threads = [threading.Thread(target=one, args=(str(n),)) for n in range(7)]\n"
            "for thread in threads: thread.start()\n"
            "one('main')\n"
            "for thread in threads: thread.join()"
        )
        self.assert_order(
            "len(got), all(name == text for name, text in got.items())", "value:(8, True)"
        )

    def test_many_questions_of_many_threads_all_get_their_own_answers(self) -> None:
        self.runner.respond = lambda question: {"text": question["name"]}
        self.run_ok(
            "wrong = []\n"
            "def many(thread):\n"
            "    for n in range(100):\n"
            "        name = f'{thread}-{n}'\n"
            "        if ask('x', name=name)['text'] != name: wrong.append(name)\n"
            "threads = [threading.Thread(target=many, args=(n,)) for n in range(4)]\n"
            "for thread in threads: thread.start()\n"
            "many('main')\n"
            "for thread in threads: thread.join()"
        )
        self.assert_order("wrong", "value:[]")
        self.assertEqual(len(self.runner.asked), 500)

    def test_a_thread_of_an_earlier_cell_may_ask_while_a_cell_runs(self) -> None:
        self.run_ok(
            "from concurrent.futures import ThreadPoolExecutor\npool = ThreadPoolExecutor(1)\n"
            "pool.submit(int).result()"
        )
        self.assert_order("pool.submit(ask, 'x', name='pool').result()['text']", "value:'x pool'")
        self.run_ok("pool.shutdown()")

    def test_a_thread_that_outlives_its_cell_takes_no_request_and_is_told(self) -> None:
        self.runner.respond = lambda question: None
        self.run_ok(
            "from cellblock_runner import host_calls\n"
            "told = []\n"
            "def slow():\n"
            "    try: ask('slow')\n"
            "    except HostCallError as error: told.append(str(error))\n"
            "thread = threading.Thread(target=slow); thread.start()\n"
            "while host_calls._active._reader is None: pass"
        )
        for number in range(50):
            self.assert_order(f"{number}", f"value:{number}")
        self.runner.respond = _echo
        self.assert_order("ask('x', name='y')['text']", "value:'x y'")
        self.assert_order(
            "thread.join()\ntold", "value:['the cell ended before the host had answered']"
        )


class Tasks(AskingTest):
    """Host calls of tasks in an event loop."""

    def setUp(self) -> None:
        super().setUp()
        self.run_ok("import asyncio\nfrom cellblock_runner.host_calls import ask_async")

    def answer_when_all_asked(self, count: int) -> None:
        def respond(_question: dict[str, Any]) -> None:
            if len(self.runner.asked) == count:
                for asked in reversed(self.runner.asked):
                    self.runner.answer(asked["ask"], text=asked["name"])

        self.runner.respond = respond

    def test_a_task_gets_its_answer(self) -> None:
        self.assert_order("(await ask_async('x', name='task'))['text']", "value:'x task'")
        self.assert_order("asyncio.run(ask_async('x', name='loop'))['text']", "value:'x loop'")

    def test_many_tasks_ask_at_once_and_answers_come_in_any_order(self) -> None:
        self.answer_when_all_asked(50)
        self.assert_order(
            "answers = await asyncio.gather(*[ask_async('x', name=str(n)) for n in range(50)])\n"
            "[answer['text'] for answer in answers] == [str(n) for n in range(50)]",
            "value:True",
        )

    def test_answers_are_taken_while_questions_are_put(self) -> None:
        # This host answers each call before it reads the next one, and blocks until it can.
        self.runner.respond = lambda question: {"text": question["name"] + "x" * 2000}
        self.assert_order(
            "answers = await asyncio.gather(*[ask_async('x', name=str(n)) for n in range(1000)])\n"
            "[answer['text'].rstrip('x') for answer in answers] == [str(n) for n in range(1000)]",
            "value:True",
        )

    def test_other_tasks_go_on_while_one_waits(self) -> None:
        self.runner.respond = lambda question: (
            None if question["what"] == "slow" else self.answer_first()
        )
        self.assert_order(
            "async def other():\n"
            "    for _ in range(3): await asyncio.sleep(0)\n"
            "    print('went on')\n"
            "    ask('now')\n"
            "(await asyncio.gather(ask_async('slow'), other()))[0]['text']",
            "out:went on\n",
            "value:'slow'",
        )

    def answer_first(self) -> dict[str, Any]:
        self.runner.answer(self.runner.asked[0]["ask"], text="slow")
        return {"text": "now"}

    def test_a_thread_and_a_task_and_a_blocked_loop_ask_at_once(self) -> None:
        # The task waits first; then its own thread waits without the loop, and another thread too.
        self.answer_when_all_asked(3)
        self.assert_order(
            "got = {}\n"
            "def one(name): got[name] = ask('x', name=name)['text']\n"
            "async def task(): got['task'] = (await ask_async('x', name='task'))['text']\n"
            "waiting = asyncio.ensure_future(task())\n"
            "await asyncio.sleep(0)\n"
            "thread = threading.Thread(target=one, args=('thread',)); thread.start()\n"
            "one('blocked')\n"
            "thread.join()\n"
            "await waiting\n"
            "sorted(got.items())",
            "value:[('blocked', 'blocked'), ('task', 'task'), ('thread', 'thread')]",
        )

    def test_loops_of_several_threads_ask_at_once(self) -> None:
        self.answer_when_all_asked(8)
        self.assert_order(
            "got = []\n"
            "async def two(name): return [a['text'] for a in await asyncio.gather(ask_async('x', "
            "name=name + '1'), ask_async('x', name=name + '2'))]\n"
            "def run(name): got.append(asyncio.run(two(name)))\n"
            "threads = [threading.Thread(target=run, args=(name,)) for name in 'abc']\n"
            "for thread in threads: thread.start()\n"
            "got.append(await two('m'))\n"
            "for thread in threads: thread.join()\n"
            "sorted(got)",
            "value:[['a1', 'a2'], ['b1', 'b2'], ['c1', 'c2'], ['m1', 'm2']]",
        )

    def test_a_task_that_is_cancelled_withdraws_its_question(self) -> None:
        self.runner.respond = lambda question: (
            None if question["what"] == "slow" else {"text": "ok"}
        )
        self.run_ok(
            "try: await asyncio.wait_for(ask_async('slow'), 0.01)\n"
            "except asyncio.TimeoutError: pass\n"
            "else: raise AssertionError"
        )
        slow, withdrawn = self.runner.asked
        self.assertEqual(
            (slow["what"], withdrawn["what"], withdrawn["of"]), ("slow", "withdraw", slow["ask"])
        )
        self.assert_order("(await ask_async('x'))['text']", "value:'ok'")

    def test_an_interrupt_ends_the_waiting_of_a_task(self) -> None:
        self.runner.respond = lambda question: (
            self.runner.interrupt() if question["what"] == "slow" else {"text": "ok"}
        )
        self.run_failing("await ask_async('slow')", "KeyboardInterrupt")
        self.runner.answer(self.runner.asked[0]["ask"], text="late")
        self.assert_order("(await ask_async('x'))['text']", "value:'ok'")

    def test_an_interrupted_thread_withdraws_its_question(self) -> None:
        self.runner.respond = lambda question: (
            self.runner.interrupt() if question["what"] == "slow" else None
        )
        self.assert_order(
            "try: ask('slow')\nexcept KeyboardInterrupt: print('interrupted')", "out:interrupted\n"
        )
        self.assertEqual([question["what"] for question in self.runner.asked], ["slow", "withdraw"])

    def test_a_task_that_outlives_its_cell_is_told_and_takes_no_request(self) -> None:
        self.runner.respond = lambda question: (
            None if question["what"] == "slow" else {"text": "ok"}
        )
        self.run_ok("left = asyncio.ensure_future(ask_async('slow'))\nawait asyncio.sleep(0)")
        for number in range(20):
            self.assert_order(f"{number}", f"value:{number}")
        self.assert_order(
            "try: await left\nexcept HostCallError as error: print(error)",
            "out:the cell ended before the host had answered\n",
        )
        self.assert_order("(await ask_async('x'))['text']", "value:'ok'")

    def test_a_copy_loses_nothing_by_it_and_can_ask(self) -> None:
        self.run_ok("(await ask_async('x'))['text']")
        copy = self.runner.fork()
        self.assertEqual(copy.hello["lost"], [])
        copy.respond = _echo
        self.assertEqual(
            copy.run("(await ask_async('x', name='copy'))['text']").value,
            {"text/plain": "'x copy'"},
        )
        self.assert_order("(await ask_async('x', name='original'))['text']", "value:'x original'")


class WithoutAHost(unittest.TestCase):
    def test_nobody_can_ask_between_cells(self) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs, open("/dev/null", "wb") as nothing:
            gate, channel = Gate(), Channel(ours)
            descriptors = (nothing.fileno(), nothing.fileno())
            streams = OutputStreams(gate, channel, bytes(16), descriptors)
            calls = HostCalls(gate, streams, channel)
            with self.assertRaisesRegex(HostCallError, "only while a cell runs"):
                calls.ask("x", {})
            calls.open_cell(1)
            theirs.sendall(encode({"type": "answer", "ask": 1, "text": "now"}))
            self.assertEqual(calls.ask("x", {})["text"], "now")  # Control.
            calls.close_cell()
            with self.assertRaisesRegex(HostCallError, "only while a cell runs"):
                calls.ask("x", {})

    def test_the_end_of_the_host_ends_the_waiting_and_the_runner(self) -> None:
        runner = Runner()
        runner.respond = lambda question: runner._channel.shutdown(socket.SHUT_RDWR)
        with self.assertRaises(Died):
            runner.run(_IMPORT + "ask('x')")
        runner.process.wait(20)
        runner.close()
