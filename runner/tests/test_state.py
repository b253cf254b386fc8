"""State: the values of a cell's names, as JSON."""

from __future__ import annotations

import json
import unittest
from typing import Any

from cellblock_runner.state import state


def told(namespace: dict[str, Any], given: bool = False, most_characters: int = 1000) -> Any:
    return json.loads(
        state(namespace, {"given": given, "most_characters": most_characters, "longest_text": 20})
    )


class Odd:
    def __str__(self) -> str:
        raise OSError


class States(unittest.TestCase):
    def test_what_json_can_hold_is_told_as_it_is(self) -> None:
        values = {"number": 1, "text": 'ä\n"', "list": [1, None, {"a": True}], "tuple_": (1, 2)}
        self.assertEqual(told(values), {**values, "tuple_": [1, 2]})

    def test_the_rest_is_told_as_text(self) -> None:
        circle: list[Any] = []
        circle.append(circle)
        values = {
            "set_": {1},
            "nan": float("nan"),
            "deep": [float("inf")],
            "circle": circle,
            "odd": Odd(),
            "long": b"x" * 50,
        }
        expected = {
            "set_": "{1}",
            "nan": "nan",
            "deep": "[inf]",
            "circle": "[[...]]",
            "odd": "<Odd>",
            "long": "b'" + "x" * 18,
        }
        self.assertEqual(told(values), expected)

    def test_names_of_ipython_and_with_two_underscores_are_left_out(self) -> None:
        hidden = {"In": [1], "exit": 2}
        own = {
            "__name__": "x",
            "__a": 1,
            "_": 1,
            "_i": "",
            "_iii": "",
            "_12": 1,
            "_i12": "",
            "_oh": {},
            "_dh": [],
            **hidden,
        }
        shell = type("Shell", (), {"user_ns_hidden": hidden})
        self.assertEqual(told({**own, "get_ipython": shell, "_one": 1})["_one"], 1)
        self.assertEqual(
            set(told({**own, "get_ipython": shell, "_one": 1})), {"_one", "get_ipython"}
        )
        self.assertEqual(told({**own, "get_ipython": shell, "In": "mine"})["In"], "mine")

    def test_a_dictionary_that_went_in_comes_out_with_the_names(self) -> None:
        namespace = {"state": {"a": 1, 2: 3, "b": 0}, "b": 5}
        self.assertEqual(told(namespace, given=True), {"a": 1, "2": 3, "b": 5})
        self.assertEqual(told({"state": 7, "b": 5}, given=True), {"b": 5})
        self.assertEqual(told({"state": 7}), {"state": 7})

    def test_what_does_not_fit_is_named(self) -> None:
        self.assertEqual(
            told({"large": "x" * 2000, "small": 1}), {"small": 1, "__omitted__": ["large"]}
        )


if __name__ == "__main__":
    unittest.main()
