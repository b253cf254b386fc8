"""The reference merger: order from streams that arrive in any order."""

from __future__ import annotations

import unittest

from .merger import Event, Frame, Merger, Text

KEY = bytes(range(16))


def mark(seq: int, kind: bytes) -> bytes:
    return b"\x00\x1bCB" + KEY + seq.to_bytes(4, "big") + kind + b"\n"


def frame(seq: int) -> Frame:
    return Frame({"type": "display", "seq": seq}, b"")


class Merging(unittest.TestCase):
    def setUp(self) -> None:
        self.merger = Merger(KEY)

    def feed(self, stdout: bytes = b"", stderr: bytes = b"", *frames: Frame) -> list[Event]:
        self.merger.feed_text(0, stdout)
        self.merger.feed_text(1, stderr)
        for item in frames:
            self.merger.feed_frame(*item)
        return self.merger.events()

    def test_a_marker_orders_the_two_pipes(self) -> None:
        events = self.feed(
            b"a" + mark(1, b"P") + mark(2, b"P") + b"c", mark(1, b"P") + b"b" + mark(2, b"P")
        )
        self.assertEqual(events, [Text("stdout", b"a"), Text("stderr", b"b"), Text("stdout", b"c")])

    def test_a_lane_waits_for_the_other_and_for_the_frame(self) -> None:
        self.assertEqual(self.feed(stdout=mark(1, b"F") + b"after"), [])
        self.assertEqual(self.feed(stderr=mark(1, b"F")), [])
        self.assertEqual(self.feed(b"", b"", frame(1)), [frame(1), Text("stdout", b"after")])

    def test_text_streams_before_the_next_marker_is_there(self) -> None:
        self.assertEqual(self.feed(stdout=b"early"), [Text("stdout", b"early")])

    def test_a_marker_in_pieces_is_never_taken_for_text(self) -> None:
        marker = mark(1, b"P")
        for position in range(1, len(marker)):
            self.setUp()
            self.assertEqual(self.feed(b"x" + marker[:position], marker), [Text("stdout", b"x")])
            self.assertEqual(self.feed(marker[position:] + b"y"), [Text("stdout", b"y")])

    def test_bytes_that_only_resemble_a_marker_are_text(self) -> None:
        self.assertEqual(self.feed(stdout=b"\x00\x1bCBno"), [Text("stdout", b"\x00\x1bCBno")])

    def test_lanes_that_disagree_are_refused(self) -> None:
        with self.assertRaises(ValueError):
            self.feed(mark(1, b"P"), mark(2, b"P"))

    def test_what_is_left_after_a_death_is_given(self) -> None:
        self.feed(b"a" + mark(1, b"P")[:5])
        self.assertEqual(self.merger.remains(), [Text("stdout", mark(1, b"P")[:5])])
