"""Frames: the codec, and the golden frames that the host's tests read too."""

from __future__ import annotations

import json
import unittest
from pathlib import Path

from cellblock_runner.frames import MAX_FRAME_BYTES, BrokenFrame, Decoder, FrameTooLarge, encode

GOLDEN = Path(__file__).resolve().parent.parent / "frames"


def golden_frames() -> list[dict[str, object]]:
    manifest = json.loads((GOLDEN / "manifest.json").read_text("utf-8"))
    return list(manifest["frames"])


class GoldenFrames(unittest.TestCase):
    def test_each_golden_frame_decodes_to_its_manifest_entry(self) -> None:
        for entry in golden_frames():
            with self.subTest(entry["name"]):
                decoder = Decoder()
                decoder.feed((GOLDEN / f"{entry['name']}.bin").read_bytes())
                self.assertEqual(
                    decoder.next(), (entry["header"], bytes.fromhex(str(entry["payload"])))
                )
                self.assertIsNone(decoder.next())

    def test_each_manifest_entry_encodes_to_its_golden_frame(self) -> None:
        for entry in golden_frames():
            with self.subTest(entry["name"]):
                header = dict(entry["header"])  # type: ignore[call-overload]
                data = encode(header, bytes.fromhex(str(entry["payload"])))
                self.assertEqual(data, (GOLDEN / f"{entry['name']}.bin").read_bytes())

    def test_the_manifest_and_the_folder_agree(self) -> None:
        self.assertEqual(
            {f"{e['name']}.bin" for e in golden_frames()},
            {path.name for path in GOLDEN.glob("*.bin")},
        )

    def test_every_type_of_the_protocol_has_a_golden_frame(self) -> None:
        protocol = (GOLDEN.parent / "PROTOCOL.md").read_text("utf-8")
        # The stream into a container has its own messages.
        protocol, _, _ = protocol.partition("## Containers")
        types = {line.split("`")[1] for line in protocol.splitlines() if line.startswith("| `")}
        self.assertGreaterEqual(len(types), 15)
        covered = {entry["header"]["type"] for entry in golden_frames()}  # type: ignore[index]
        self.assertEqual(types - covered, set())

    def test_broken_frames_are_refused(self) -> None:
        broken = sorted((GOLDEN / "broken").glob("*.bin"))
        self.assertGreaterEqual(len(broken), 6)
        for path in broken:
            with self.subTest(path.name), self.assertRaises(BrokenFrame):
                decoder = Decoder()
                decoder.feed(path.read_bytes())
                decoder.next()


class Codec(unittest.TestCase):
    def test_frames_may_arrive_byte_by_byte_and_together(self) -> None:
        data = encode({"type": "a"}, b"1") + encode({"type": "b"})
        decoder = Decoder()
        found = []
        for position in range(len(data)):
            decoder.feed(data[position : position + 1])
            while (frame := decoder.next()) is not None:
                found.append(frame)
        self.assertEqual(found, [({"type": "a"}, b"1"), ({"type": "b"}, b"")])

    def test_a_length_that_is_too_large_is_refused_before_its_bytes_arrive(self) -> None:
        decoder = Decoder()
        decoder.feed((MAX_FRAME_BYTES + 1).to_bytes(4, "big"))
        self.assertRaises(BrokenFrame, decoder.next)

    def test_the_largest_frame_passes_and_one_byte_more_does_not(self) -> None:
        room = MAX_FRAME_BYTES - 4 - len(b'{"type":"x"}')
        decoder = Decoder()
        decoder.feed(encode({"type": "x"}, bytes(room)))
        frame = decoder.next()
        assert frame is not None
        self.assertEqual(len(frame[1]), room)
        self.assertRaises(FrameTooLarge, encode, {"type": "x"}, bytes(room + 1))

    def test_lone_surrogates_become_question_marks(self) -> None:
        decoder = Decoder()
        decoder.feed(encode({"type": "x", "text": "a\ud800b"}))
        self.assertEqual(decoder.next(), ({"type": "x", "text": "a?b"}, b""))
