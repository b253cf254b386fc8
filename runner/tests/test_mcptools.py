"""Tools of MCP servers: calls from cells with a host that answers, values of results, and modules
that change.
"""

from __future__ import annotations

import base64
import importlib.util
import math
import os
import pickle
import shutil
import unittest
from pathlib import Path
from typing import Any

from .harness import Runner
from .test_cells import CellTest

_HAS_PYDANTIC = importlib.util.find_spec("pydantic") is not None

# An image of one pixel.
_PICTURE = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAA"
    "AABJRU5ErkJggg=="
)

_INDEX = """\"\"\"The tools of a server.\"\"\"

from cellblock_runner.mcptools import modules_when_used as _modules_when_used

__all__ = ["echo"]

__getattr__, __dir__ = _modules_when_used(__name__, ["echo"])
"""

_TOOL = '''"""A tool."""

from __future__ import annotations

from cellblock_runner.mcptools import Model, Null, Reply, call, call_async
from pydantic import Field


class Params(Model, extra="forbid"):
    """Arguments of `echo`."""

    text: str
    """What comes back."""

    from_: str | None = Field(default=None, validation_alias="from", serialization_alias="from")
    limit: int | Null = None
    size: float | None = 2.5


class Result(Model, extra="allow"):
    text: str


def run(params: Params) -> Reply:
    """Returns its text."""
    return call("server", "echo", params)


async def run_async(params: Params) -> Reply:
    return await call_async("server", "echo", params)


def run_typed(params: Params) -> Result:
    return call("server", "echo", params, Result)
'''


def _write(runner: Runner, tool: str = _TOOL) -> None:
    """Writes a package as the host does: the index last, as a new file."""
    folder = Path(runner.workdir, "mcptools", "server")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "echo.py").write_text(tool)
    for index in (folder / "__init__.py", folder.parent / "__init__.py"):
        text = _INDEX if index.parent == folder else _INDEX.replace('"echo"', '"server"')
        index.with_suffix(".new").write_text(text)
        os.replace(index.with_suffix(".new"), index)


def _reply(*content: dict[str, Any], **members: Any) -> dict[str, Any]:
    return {"ok": True, "content": list(content), "is_error": False, **members}


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _echo(question: dict[str, Any]) -> dict[str, Any]:
    return _reply(_text(question["arguments"]["text"]))


@unittest.skipUnless(_HAS_PYDANTIC, "skipped: needs Pydantic")
class ToolTest(CellTest):
    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        _write(cls.runner)

    def setUp(self) -> None:
        self.runner.asked.clear()
        self.runner.respond = _echo
        self.run_ok(
            "from mcptools.server import echo\n"
            "from mcptools.server.echo import Params, run, run_async, run_typed"
        )


class Calls(ToolTest):
    def test_a_call_reaches_the_host_under_the_names_of_the_server(self) -> None:
        self.assert_order("run(Params(text='hello', from_='here', limit=None))", "value:'hello'")
        [question] = self.runner.asked
        self.assertEqual(
            (question["what"], question["server"], question["tool"]),
            ("call_tool", "server", "echo"),
        )
        self.assertEqual(question["arguments"], {"text": "hello", "from": "here", "limit": None})

    def test_both_ways_to_import_and_the_index_work(self) -> None:
        self.assert_order(
            "echo.run(echo.Params(text='a')) + run(Params(**{'text': 'b', 'from': 'c'}))",
            "value:'ab'",
        )
        self.assert_order(
            "import mcptools\nstr(mcptools.server.echo.run(mcptools.server.echo.Params(text='d')))",
            "value:'d'",
        )
        self.assert_order(
            "'server' in dir(mcptools), 'echo' in dir(mcptools.server)", "value:(True, True)"
        )
        self.run_failing("mcptools.absent", "AttributeError")

    def test_help_shows_what_a_field_is_for(self) -> None:
        result = self.run_ok(
            "import pydoc\nprint(pydoc.render_doc(Params, renderer=pydoc.plaintext))"
        )
        for expected in (
            "Arguments of `echo`.",
            "text: str",
            "What comes back.",
            "(sent as 'from')",
            "size: float | None = 2.5",
        ):
            self.assertIn(expected, result.text)
        self.assertLess(len(result.text.splitlines()), 40)

    def test_tasks_call_at_once(self) -> None:
        def respond(_question: dict[str, Any]) -> None:
            if len(self.runner.asked) == 3:
                for asked in reversed(self.runner.asked):
                    self.runner.answer(asked["ask"], **_echo(asked))

        self.runner.respond = respond
        self.assert_order(
            "import asyncio\n[str(r) for r in await asyncio.gather(*[run_async(Params(text=t)) "
            "for t in 'xyz'])]",
            "value:['x', 'y', 'z']",
        )

    def test_an_interrupt_ends_a_call(self) -> None:
        self.runner.respond = lambda question: (
            self.runner.interrupt() if question["what"] == "call_tool" else None
        )
        self.run_failing("run(Params(text='x'))", "KeyboardInterrupt")
        self.runner.respond = _echo
        self.assert_order("run(Params(text='again'))", "value:'again'")

    def test_structured_values_have_their_type(self) -> None:
        self.runner.respond = lambda question: _reply(structured={"text": "typed", "more": 1})
        self.assert_order(
            "r = run_typed(Params(text='x'))\nr.text, r.more, type(r).__name__",
            "value:('typed', 1, 'Result')",
        )

    def test_a_value_that_does_not_fit_is_returned_with_a_warning(self) -> None:
        self.runner.respond = lambda question: _reply(structured={"text": 5})
        result = self.run_ok("r = run_typed(Params(text='x'))\nr.text, type(r).__name__")
        self.assertEqual(result.value, {"text/plain": "(5, 'Result')"})
        self.assertIn("returned a result that does not match its schema: text", result.text)

    def test_a_server_that_sends_the_value_as_a_text_is_understood(self) -> None:
        self.runner.respond = lambda question: _reply(_text('{"text": "parsed"}'))
        self.assert_order("run_typed(Params(text='x')).text", "value:'parsed'")


class Failures(ToolTest):
    def test_an_error_of_the_tool_is_raised_with_all_that_it_said(self) -> None:
        content = [
            _text("no such file"),
            {"type": "image", "data": _PICTURE, "mimeType": "image/png"},
        ]
        self.runner.respond = lambda question: _reply(
            *content, is_error=True, structured={"code": 2}
        )
        result = self.run_failing("run(Params(text='x'))", "ToolError")
        self.assertEqual(result.error["message"], "no such file")
        self.assert_order(
            "from mcptools import server\nfrom cellblock_runner.mcptools import ToolError\n"
            "try: run(Params(text='x'))\nexcept ToolError as e: print(len(e.content), "
            "e.structured)",
            "out:2 {'code': 2}\n",
        )

    def test_a_call_that_was_not_made_is_another_error(self) -> None:
        for reason, name in (
            ("denied", "ToolCallDenied"),
            ("timeout", "ToolCallTimeout"),
            ("invalid", "ToolCallError"),
        ):
            self.runner.respond = lambda question, reason=reason: {
                "ok": False,
                "reason": reason,
                "text": f"because {reason}",
            }
            result = self.run_failing("run(Params(text='x'))", name)
            self.assertEqual(result.error["message"], f"because {reason}")

    def test_a_host_that_knows_no_tools_is_an_error_too(self) -> None:
        self.runner.respond = lambda question: {
            "ok": False,
            "text": "this server does not answer 'call_tool'",
        }
        self.run_failing("run(Params(text='x'))", "ToolCallError")

    def test_arguments_that_do_not_fit_ask_nobody(self) -> None:
        self.run_failing("run(Params(text=1))", "ValidationError")
        self.run_failing("run(Params(txt='x'))", "ValidationError")
        self.assertEqual(self.runner.asked, [])


class Values(ToolTest):
    def test_a_picture_is_shown(self) -> None:
        self.runner.respond = lambda question: _reply(
            {"type": "image", "data": _PICTURE, "mimeType": "image/png"}
        )
        for code in ("run(Params(text='x'))", "run(Params(text='x')).images[0]"):
            [frame] = self.run_ok(code).frames
            self.assertIn("<Image image/png, 70 bytes>", frame.header["data"]["text/plain"])
            self.assertEqual([blob["mime"] for blob in frame.header["blobs"]], ["image/png"])
            self.assertEqual(frame.payload, base64.b64decode(_PICTURE))

    def test_a_reply_shows_its_texts_and_its_pictures_in_order(self) -> None:
        picture = {"type": "image", "data": _PICTURE, "mimeType": "image/png"}
        self.runner.respond = lambda question: _reply(
            _text("before"), picture, _text("after"), picture
        )
        frames = self.run_ok("run(Params(text='x'))").frames
        shown = [frame.header["data"]["text/plain"] for frame in frames]
        picture_text = "<Image image/png, 70 bytes>"
        self.assertEqual(shown, ["before", picture_text, "after", picture_text])
        self.assertEqual([len(frame.header["blobs"]) for frame in frames], [0, 1, 0, 1])

    def test_every_kind_of_content_has_its_value(self) -> None:
        content = [
            _text("one"),
            {"type": "audio", "data": "AAEC", "mimeType": "audio/wav"},
            {
                "type": "resource",
                "resource": {"uri": "file:///a", "mimeType": "text/plain", "text": "inside"},
            },
            {"type": "resource", "resource": {"uri": "file:///b", "blob": "AAEC"}},
            {"type": "resource_link", "uri": "file:///c", "name": "c", "description": "a link"},
            _text("two"),
            {"type": "new_thing", "x": 1},
        ]
        self.runner.respond = lambda question: _reply(*content)
        self.run_ok("r = run(Params(text='x'))")
        self.assert_order("str(r), len(r.content)", "value:('one\\ntwo', 7)")
        self.assert_order(
            "r.audio[0].data, r.audio[0].mime", "value:(b'\\x00\\x01\\x02', 'audio/wav')"
        )
        self.assert_order(
            "[(each.uri, each.text, each.data) for each in r.resources]",
            "value:[('file:///a', 'inside', b'inside'), ('file:///b', None, b'\\x00\\x01\\x02')]",
        )
        self.assert_order(
            "r.links[0].uri, r.links[0].name, r.links[0].description",
            "value:('file:///c', 'c', 'a link')",
        )
        self.assert_order("r.content[-1].raw", "value:{'type': 'new_thing', 'x': 1}")
        self.assert_order(
            "r.audio[0].save('sound.wav')\nopen('sound.wav', 'rb').read()",
            "value:b'\\x00\\x01\\x02'",
        )

    def test_a_value_without_texts_reads_as_json(self) -> None:
        self.runner.respond = lambda question: _reply(structured={"a": [1]})
        self.assert_order(
            "r = run(Params(text='x'))\nstr(r), r.structured", "value:('{\"a\": [1]}', {'a': [1]})"
        )


class Registration(ToolTest):
    def test_modules_that_are_written_anew_take_effect_at_once(self) -> None:
        self.assert_order("run(Params(text='x'))", "value:'x'")
        _write(
            self.runner,
            _TOOL.replace(
                'return call("server", "echo", params)', 'return call("server", "new", params)'
            ),
        )
        self.run_ok("from mcptools.server.echo import Params, run\nrun(Params(text='x'))")
        self.assertEqual([question["tool"] for question in self.runner.asked], ["echo", "new"])

    def test_modules_that_are_not_written_anew_stay_what_they_are(self) -> None:
        self.run_ok("import mcptools.server.echo as first")
        self.assert_order("import mcptools.server.echo as second\nfirst is second", "value:True")

    def test_a_server_that_is_gone_cannot_be_imported(self) -> None:
        shutil.rmtree(Path(self.runner.workdir, "mcptools", "server"))
        self.run_failing("import mcptools.server.echo", "ModuleNotFoundError")
        _write(self.runner)
        self.run_ok("import mcptools.server.echo")  # Control.


@unittest.skipUnless(_HAS_PYDANTIC, "skipped: needs Pydantic")
class Arguments(unittest.TestCase):
    """The arguments that are sent for a model, without a session."""

    def test_what_was_set_is_sent_and_nothing_else(self) -> None:
        from cellblock_runner.tool_models import Model, Null, arguments

        class Inner(Model):
            x: int = 1
            y: int | None = None

        class Params(Model):
            must: int | None
            may: int | None = 5
            null: int | Null = None
            inner: list[Inner] = []

        # Annotations are resolved when a model is first used, and these are names of this function.
        Params.model_rebuild(_types_namespace={"Inner": Inner, "Null": Null})
        for params, expected in (
            (Params(must=None), {"must": None}),
            (Params(must=1, may=None), {"must": 1}),
            (Params(must=1, may=5, null=None), {"must": 1, "may": 5, "null": None}),
            (
                Params(must=1, inner=[Inner(x=1), Inner(y=None)]),
                {"must": 1, "inner": [{"x": 1}, {}]},
            ),
        ):
            self.assertEqual(arguments(params), expected)
        # A dump of a model is the same as without our serializer.
        self.assertEqual(
            Params(must=1).model_dump(), {"must": 1, "may": 5, "null": None, "inner": []}
        )

    def test_numbers_are_numbers_of_json(self) -> None:
        from cellblock_runner.tool_models import arguments

        self.assertEqual(
            repr(arguments({"a": 5.0, "b": [0.5, -0.0, 1e300], "c": True})),
            "{'a': 5, 'b': [0.5, 0, 1e+300], 'c': True}",
        )
        for wrong in (math.inf, math.nan):
            with self.assertRaises(ValueError):
                arguments({"a": wrong})

    def test_arguments_that_are_nested_too_deeply_are_refused(self) -> None:
        from cellblock_runner.tool_models import arguments

        def nested(levels: int) -> Any:
            value: Any = 1
            for _ in range(levels):
                value = [value]
            return {"a": value}

        self.assertEqual(arguments(nested(99)), nested(99))
        for wrong in (nested(100), nested(254), nested(300), nested(5000)):
            with self.assertRaisesRegex(ValueError, "nested more than 100 levels deep"):
                arguments(wrong)

    def test_types_of_fields_keep_texts_as_they_were_written(self) -> None:
        from typing import Annotated

        from cellblock_runner.mcptools import Base64, Email, OneOf, Pattern, Url
        from pydantic import TypeAdapter, ValidationError

        for kind, right, wrong in (
            (Url, "http://example.com", "nowhere"),
            (Email, "a@example.com", "a@"),
            (Annotated[str, Pattern("^a+$")], "aa", "b"),
            (Annotated[float, OneOf([0.5])], 0.5, 1.5),
        ):
            self.assertEqual(TypeAdapter(kind).validate_python(right), right)
            with self.assertRaises(ValidationError):
                TypeAdapter(kind).validate_python(wrong)
        self.assertEqual(TypeAdapter(Annotated[str, Pattern("(?<no>")]).validate_python("x"), "x")
        self.assertEqual(TypeAdapter(Base64).validate_python("aGk="), b"hi")
        self.assertEqual(TypeAdapter(Base64).dump_python(b"hi", mode="json"), "aGk=")

    def test_a_reply_can_be_kept(self) -> None:
        from cellblock_runner.mcptools import Image, Reply, Text

        reply = Reply(
            [
                Text({"type": "text", "text": "x"}),
                Image({"type": "image", "data": _PICTURE, "mimeType": "image/png"}),
            ],
            {"a": 1},
        )
        copy = pickle.loads(pickle.dumps(reply))
        self.assertEqual(
            (copy, copy.structured, copy.images[0].data), ("x", {"a": 1}, reply.images[0].data)
        )

    def test_without_a_host_the_error_says_so(self) -> None:
        from cellblock_runner.mcptools import ToolCallError, call

        with self.assertRaisesRegex(ToolCallError, "host cannot be reached"):
            call("server", "tool", {})
