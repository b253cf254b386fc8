"""Messages of containers: the golden messages that the host's language reads too."""

from __future__ import annotations

import json
import unittest
from pathlib import Path
from typing import Any

from cellblock_runner import launcher, messages, mux

GOLDEN = Path(__file__).resolve().parent.parent / "frames" / "containers"
# Members that hold bytes. The manifest has them as hexadecimal text.
_BYTES = "data"


def golden_messages(sender: str) -> list[dict[str, Any]]:
    manifest = json.loads((GOLDEN / "manifest.json").read_text("utf-8"))
    return [entry for entry in manifest["messages"] if entry["sender"] == sender]


def frame_of(name: str) -> bytes:
    return (GOLDEN / f"{name}.bin").read_bytes()


def decoded(data: bytes) -> Any:
    decoder = mux.Decoder()
    decoder.feed(data)
    frame = decoder.next()
    assert frame is not None and decoder.next() is None
    return messages.decode(*frame)


class GoldenMessages(unittest.TestCase):
    def test_messages_of_the_host_are_read(self) -> None:
        for entry in golden_messages("host"):
            with self.subTest(entry["name"]):
                message = decoded(frame_of(entry["name"]))
                if isinstance(message, tuple):
                    fields = message._asdict()  # type: ignore[attr-defined]
                    if _BYTES in fields:
                        fields[_BYTES] = fields[_BYTES].hex()
                    message = {"type": type(message).__name__.lower(), **fields}
                self.assertEqual(message, entry["message"])

    def test_messages_of_the_supervisor_are_written(self) -> None:
        for entry in golden_messages("supervisor"):
            with self.subTest(entry["name"]):
                fields = dict(entry["message"])
                write = getattr(messages, fields.pop("type"))
                if _BYTES in fields:
                    fields[_BYTES] = bytes.fromhex(fields[_BYTES])
                self.assertEqual(write(**fields), frame_of(entry["name"]))

    def test_the_manifest_and_the_folder_agree(self) -> None:
        entries = [*golden_messages("host"), *golden_messages("supervisor")]
        self.assertEqual(
            sorted(f"{entry['name']}.bin" for entry in entries),
            sorted(path.name for path in GOLDEN.glob("*.bin")),
        )

    def test_every_message_of_the_protocol_has_an_example(self) -> None:
        protocol = (GOLDEN.parent.parent / "PROTOCOL.md").read_text("utf-8")
        _, _, protocol = protocol.partition("## Containers")
        rows = [line for line in protocol.splitlines() if line.startswith("| `")]
        named = {row.split("`")[1] for row in rows} - {"type"}
        shown = {
            entry["message"]["type"]
            for entry in (*golden_messages("host"), *golden_messages("supervisor"))
        }
        self.assertEqual(named, shown)


class Broken(unittest.TestCase):
    def test_a_credit_of_another_length_is_refused(self) -> None:
        with self.assertRaises(mux.BrokenStream):
            messages.decode(mux.CREDIT, 1, b"123")
        self.assertEqual(messages.decode(mux.CREDIT, 1, b"\0\0\0\1"), (1, 1))  # control

    def test_a_frame_of_another_kind_is_refused(self) -> None:
        # What only the supervisor sends, and what nobody sends.
        for kind in (mux.PIPES, mux.PROGRAM_PIPES, 6, 255):
            with self.subTest(kind), self.assertRaises(mux.BrokenStream):
                messages.decode(kind, 1, b"")


class ExitStatus(unittest.TestCase):
    def test_a_status_is_a_code_or_a_signal(self) -> None:
        self.assertEqual(launcher.exit_status(9), {"signal": 9})
        self.assertEqual(launcher.exit_status(3 << 8), {"code": 3})


if __name__ == "__main__":
    unittest.main()
