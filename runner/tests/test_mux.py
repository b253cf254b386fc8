"""Frames between the supervisor and the host, and what a copy with another work folder brings
along.
"""

from __future__ import annotations

import unittest

from cellblock_runner import fork_state, mux
from cellblock_runner.descriptors import OpenDescriptor
from cellblock_runner.mappings import SharedMapping


class MuxTest(unittest.TestCase):
    def test_frames_survive_however_they_are_cut(self) -> None:
        frames = [
            (mux.DATA, 7, b"text"),
            (mux.CREDIT, 0xFFFF_FFFF, (70_000).to_bytes(4, "big")),
            (mux.CONTROL, 0, b"{}"),
        ]
        stream = b"".join(mux.encode(*frame) for frame in frames)
        for size in range(1, len(stream)):
            decoder = mux.Decoder()
            found = []
            for start in range(0, len(stream), size):
                decoder.feed(stream[start : start + size])
                while (frame := decoder.next()) is not None:
                    found.append(frame)
            self.assertEqual(found, frames)

    def test_a_frame_that_is_too_large_is_refused_by_its_head(self) -> None:
        def head(length: int) -> bytes:
            return bytes([mux.DATA]) + (1).to_bytes(4, "big") + length.to_bytes(4, "big")

        decoder = mux.Decoder()
        decoder.feed(head(mux.MAX_BODY_BYTES))
        self.assertIsNone(decoder.next())  # control: the largest that may come
        decoder = mux.Decoder()
        decoder.feed(head(mux.MAX_BODY_BYTES + 1))
        with self.assertRaises(mux.BrokenStream):
            decoder.next()


class MoveTest(unittest.TestCase):
    def test_every_path_below_the_work_folder_is_moved_and_no_other(self) -> None:
        saved = fork_state.ForkState(
            fork_state.CopyRequest(1, True, False),
            "/work/inner",
            0o22,
            set(),
            [
                OpenDescriptor(5, "file", (1, 2), "/work/a"),
                OpenDescriptor(6, "file", (1, 3), "/workshop/a"),
                OpenDescriptor(7, "file", (1, 4), "/tmp/a"),
            ],
            frozenset(),
            [SharedMapping(0, 1, 0, 0, (1, 2), "/work/b")],
            None,
            None,
            {"/work": {}, "/tmp": {}},
            [],
            False,
            [],
            None,
            False,
            fork_state.ResourceLimits({}, 0),
            None,
        )
        context = fork_state.SessionContext("/work", ("/tmp",), "/tmp/home", (1, 2))
        moved, new_context = fork_state.relocate(saved, context, "/forks/2")
        self.assertEqual(moved.folder, "/forks/2/inner")
        self.assertEqual(
            [item.path for item in moved.opened], ["/forks/2/a", "/workshop/a", "/tmp/a"]
        )
        self.assertEqual(moved.areas[0].path, "/forks/2/b")
        self.assertEqual(sorted(moved.carried), ["/forks/2", "/tmp"])
        self.assertEqual(new_context.work, "/forks/2")
        self.assertTrue(any("/forks/2" in text for text in moved.losses))


if __name__ == "__main__":
    unittest.main()
