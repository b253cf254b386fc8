"""The supervisor with real sessions, in a pid namespace instead of a container."""

from __future__ import annotations

import json
import os
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path
from typing import Any

from cellblock_runner import frames, mux

from .harness import RUNNER

_TIMEOUT = 60.0
_FILTERS = json.loads(Path(__file__).with_name("program_filters.json").read_text())
_UNSHARE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
# Forks have their folders at another place than in a container.
_BOOTSTRAP = """
import sys
sys.path[:0] = sys.argv[2:]
from cellblock_runner import bootstrap, forkserver
forkserver.FORKS = sys.argv[1]
bootstrap.main()
"""


def _missing() -> str | None:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return "needs root and unshare (a pid namespace)"
    if subprocess.run([*_UNSHARE, "true"], capture_output=True).returncode != 0:
        return "needs a pid namespace"
    return None


class Host:
    """The host's end of the mux, for one supervisor."""

    def __init__(self, folder: Path, programs: str) -> None:
        self.work = str(folder / "work")
        for name in ("work", "home", "forks"):
            (folder / name).mkdir()
        code_path = [path for path in sys.path if path]
        self.process = subprocess.Popen(
            [*_UNSHARE, sys.executable, "-c", _BOOTSTRAP, str(folder / "forks"), str(RUNNER)]
            + code_path,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        plan = {
            "environment": {"HOME": str(folder / "home")},
            "preload": [],
            "rehearse": False,
            "folders": [str(folder / "home")],
            "programs": programs,
            "program_filters": _FILTERS,
        }
        self._write(json.dumps(plan).encode() + b"\n")
        self._decoder = mux.Decoder()
        self._frames: dict[int, frames.Decoder] = {}
        self._id = 0
        # Text of every stream of a pipe, and the pipes of every interpreter.
        self.text: dict[int, bytes] = {}
        self.pipes: dict[int, list[int]] = {}
        self.program_pipes: list[int] = []
        self.messages: list[dict[str, Any]] = []
        self.requests: list[tuple[int, dict[str, Any]]] = []

    def _write(self, data: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(data)
        self.process.stdin.flush()

    def control(self, **message: Any) -> None:
        self._write(mux.encode(mux.CONTROL, 0, json.dumps(message).encode()))

    def ask(self, **request: Any) -> dict[str, Any]:
        """Sends a request and returns its answer."""
        return self.answer(self.request(**request))

    def request(self, **request: Any) -> int:
        self._id += 1
        self.control(**request, id=self._id)
        return self._id

    def answer(self, number: int) -> dict[str, Any]:
        return self.message(lambda m: m["type"] in ("done", "failed") and m["id"] == number)

    def exited(self, process: int) -> dict[str, Any]:
        status: dict[str, Any] = self.message(
            lambda m: m["type"] == "exited" and m["process"] == process
        )["status"]
        return status

    def message(self, fits: Any) -> dict[str, Any]:
        """Waits for a control message and takes it."""
        message: dict[str, Any] = self._take(self.messages, fits)
        return message

    def frame(self, interpreter: int, kind: str) -> dict[str, Any]:
        """Waits for a frame of an interpreter and takes it."""
        fits = self._take(self.requests, lambda f: f[0] == interpreter and f[1]["type"] == kind)
        header: dict[str, Any] = fits[1]
        return header

    def _take(self, received: list[Any], fits: Any) -> Any:
        deadline = time.monotonic() + _TIMEOUT
        while True:
            for each in received:
                if fits(each):
                    received.remove(each)
                    return each
            if not self._receive(deadline - time.monotonic()):
                raise AssertionError(f"nothing fits in {received}, {self.messages}, {self.text}")

    def wait_for_text(self, stream: int, text: bytes) -> None:
        deadline = time.monotonic() + _TIMEOUT
        while text not in self.text.get(stream, b""):
            if not self._receive(deadline - time.monotonic()):
                raise AssertionError(f"{text!r} is not in {self.text}")

    def _receive(self, timeout: float) -> bool:
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            if timeout <= 0 or not selector.select(timeout):
                return False
        data = os.read(self.process.stdout.fileno(), 1 << 16)
        self._decoder.feed(data)
        while (found := self._decoder.next()) is not None:
            self._handle(*found)
        return bool(data)

    def _handle(self, kind: int, number: int, body: bytes) -> None:
        if kind == mux.CONTROL:
            self.messages.append(json.loads(body))
        elif kind == mux.PIPES:
            self.pipes[number] = [int.from_bytes(body[at : at + 4], "big") for at in (0, 4)]
            self._feed(number, body[8:])
        elif kind == mux.PROGRAM_PIPES:
            self.program_pipes.append(int.from_bytes(body[:4], "big"))
            self._feed(number, body[4:])
        elif kind == mux.DATA and number >= 1 << 31:
            self.text[number] = self.text.get(number, b"") + body
            self._grant(number, len(body))
        elif kind == mux.DATA:
            self._feed(number, body)

    def _feed(self, interpreter: int, data: bytes) -> None:
        decoder = self._frames.setdefault(interpreter, frames.Decoder())
        decoder.feed(data)
        while (found := decoder.next()) is not None:
            self.requests.append((interpreter, dict(found[0])))
        self._grant(interpreter, len(data))

    def _grant(self, stream: int, amount: int) -> None:
        self._write(mux.encode(mux.CREDIT, stream, amount.to_bytes(4, "big")))

    def send(self, interpreter: int, header: dict[str, Any], payload: bytes = b"") -> None:
        self._write(mux.encode(mux.DATA, interpreter, frames.encode(header, payload)))

    def start(self, slot: int, interpreter: int, mode: str = "immediate") -> dict[str, Any]:
        return self.ask(type="start", slot=slot, interpreter=interpreter, mode=mode, work=self.work)

    def execute(self, interpreter: int, code: str) -> dict[str, Any]:
        self.send(interpreter, {"type": "execute", "id": 1}, code.encode())
        return self.frame(interpreter, "done")

    def printed(self, interpreter: int, code: str) -> str:
        """Runs code, and returns what it printed last."""
        done = self.execute(interpreter, f"{code}\nprint('end')")
        stream = self.pipes[interpreter][0]
        self.wait_for_text(stream, b"end\n")
        text = self.text[stream].decode("utf-8", "replace")
        self.text[stream] = b""
        assert done["status"] == "ok", (done, text)
        return text

    def checkpoint(self, slot: int, interpreter: int, number: int) -> dict[str, Any]:
        request = self.request(type="expect_checkpoint", slot=slot, checkpoint=number)
        self.send(interpreter, {"type": "branch", "id": 2, "undo_files": 0, "fork": True})
        self.frame(interpreter, "branched")
        return self.answer(request)

    def close(self) -> int:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        code = self.process.wait(_TIMEOUT)
        self.process.stdout.close()
        return code


@unittest.skipIf(_missing(), f"skipped: {_missing()}")
class SupervisorTest(unittest.TestCase):
    def host(self, programs: str = "free") -> Host:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        host = Host(Path(folder.name), programs)
        self.addCleanup(host.close)
        return host

    def test_a_session_runs_ends_and_starts_again(self) -> None:
        host = self.host()
        self.assertEqual(host.start(1, 7)["type"], "done")
        ready = host.message(lambda m: m["type"] == "ready")
        self.assertEqual(ready["python"], sys.version.split()[0])
        host.frame(7, "hello")
        self.assertIn("42", host.printed(7, "x = 42; print(x)"))
        large = 300_000  # More than the credit of a pipe and of a channel.
        self.assertGreater(len(host.printed(7, f"print('x' * {large})")), large)
        self.assertEqual(host.start(1, 8)["type"], "done")
        self.assertEqual(host.exited(7), {"signal": 9})
        host.frame(8, "hello")
        self.assertIn("False", host.printed(8, "print('x' in globals())"))
        host.send(8, {"type": "execute", "id": 1}, b"import os; os._exit(3)")
        self.assertEqual(host.exited(8), {"code": 3})

    def test_an_interpreter_is_interrupted_and_killed_with_what_it_left(self) -> None:
        host = self.host()
        host.start(1, 7, "primed")
        host.frame(7, "hello")
        # No sleep: Python does not notice a signal that arrives just before it begins to sleep.
        host.send(7, {"type": "execute", "id": 1}, b"print('go')\nwhile True: pass")
        host.frame(7, "started")
        host.wait_for_text(host.pipes[7][0], b"go")
        host.control(type="interrupt", process=7)
        self.assertEqual(host.frame(7, "done")["status"], "error")
        host.printed(7, "import subprocess; p = subprocess.Popen(['sleep', '600'])")
        host.control(type="kill", process=7)
        self.assertEqual(host.exited(7), {"signal": 9})
        host.start(1, 8, "emptied")
        host.frame(8, "hello")
        names = "[open(f'/proc/{n}/comm').read() for n in os.listdir('/proc') if n.isdigit()]"
        self.assertIn("0", host.printed(8, f"import os; print({names}.count('sleep\\n'))"))
        host.control(type="close_channel", interpreter=8)
        self.assertEqual(host.exited(8), {"code": 0})

    def test_a_session_is_restored_and_forked_from_a_checkpoint(self) -> None:
        host = self.host()
        host.start(1, 7)
        host.frame(7, "hello")
        host.printed(7, "x = 'before'; open('file', 'w').write('one')")
        self.assertEqual(host.checkpoint(1, 7, 3)["type"], "done")
        host.printed(7, "x = 'after'")
        fork = host.ask(type="fork", slot=2, interpreter=9, source=1, checkpoint=3, own_folder=True)
        self.assertEqual(fork["type"], "done")
        host.frame(9, "hello")
        self.assertIn("before one", host.printed(9, "print(x, open('file').read())"))
        restored = host.ask(type="restore", slot=1, interpreter=8, checkpoint=3)
        self.assertEqual(restored["type"], "done")
        self.assertEqual(host.exited(7), {"signal": 9})
        host.frame(8, "hello")
        self.assertIn("before", host.printed(8, "print(x)"))

        # A connection belongs to the session that has made it.
        connect = "import socket; s = socket.create_server(('127.0.0.1', 0)); "
        connect += "c = socket.create_connection(s.getsockname()); print(c.getsockname()[1])"
        port = int(host.printed(9, connect).split("end")[0].split()[-1])
        owner = host.ask(type="find_owner", address="127.0.0.1", port=port)
        self.assertEqual(owner["owner"], 2)
        nobody = host.ask(type="find_owner", address="127.0.0.1", port=1)
        self.assertIsNone(nobody["owner"])

        self.assertEqual(host.ask(type="end_slot", slot=2)["type"], "done")
        self.assertEqual(host.exited(9), {"signal": 9})
        discarded = host.ask(type="discard_checkpoint", slot=1, checkpoint=3)
        self.assertEqual(discarded["type"], "done")
        failed = host.ask(type="restore", slot=1, interpreter=10, checkpoint=3)
        self.assertEqual((failed["type"], failed["kind"]), ("failed", "other"))
        self.assertIn("before", host.printed(8, "print(x)"))  # control

    def test_a_checkpoint_that_ends_is_reported(self) -> None:
        host = self.host()
        host.start(1, 7)
        host.frame(7, "hello")
        host.checkpoint(1, 7, 3)
        end = "import os, signal\nfor n in os.listdir('/proc'):\n"
        end += "    if n.isdigit() and int(n) > max(2, os.getpid()): os.kill(int(n), 9)"
        host.send(7, {"type": "execute", "id": 1}, end.encode())
        lost = host.message(lambda m: m["type"] == "checkpoint_lost")
        self.assertEqual((lost["slot"], lost["checkpoint"]), (1, 3))

    def test_a_program_runs_with_the_pipes_of_the_session(self) -> None:
        host = self.host("refused")
        host.start(1, 7)
        host.frame(7, "hello")
        self.assertEqual(self.launched(host, ["sh", "-c", "cat; exit 5"], "input"), {"code": 5})
        host.wait_for_text(host.pipes[7][0], b"input")
        self.assertEqual((self.launched(host, ["no-such-program"])["kind"]), "missing")
        self.assertEqual(self.launched(host, ["/etc/passwd"])["kind"], "refused")
        self.assertEqual(self.launched(host, ["sleep", "600"], kill=True), {"signal": 9})

    def launched(
        self, host: Host, words: list[str], text: str | None = None, kill: bool = False
    ) -> dict[str, Any]:
        """Has the session ask for a program, launches another one, and answers the session."""
        program = 100 + len(host.program_pipes)
        host.send(7, {"type": "execute", "id": 1}, b"!true")
        ask = host.frame(7, "ask")
        pipes = host.program_pipes[-1]
        if text is not None:
            for piece in (b"", text.encode()):
                host._write(mux.encode(mux.INPUT, program, piece))
        launched = host.ask(
            type="launch",
            slot=1,
            program=program,
            pipes=pipes,
            words=words,
            folder=host.work,
            environment=[["A", "b"], ["LANG", None]],
            input=None if text is None else len(text),
        )
        if kill:
            host.control(type="kill", process=program)
        if launched["type"] == "done":
            launched = host.exited(program)
        host.control(type="release_program_pipes", pipes=pipes)
        answer = {"type": "answer", "ask": ask["ask"], "ok": True, "code": 0, "text": None}
        host.send(7, answer)
        host.frame(7, "done")
        return launched

    def test_a_request_that_is_not_known_fails(self) -> None:
        host = self.host()
        unknown = host.ask(type="something")
        self.assertEqual((unknown["type"], unknown["kind"]), ("failed", "other"))
        self.assertEqual(host.ask(type="end_slot", slot=1)["type"], "done")  # control


if __name__ == "__main__":
    unittest.main()
