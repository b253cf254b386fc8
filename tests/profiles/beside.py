"""Calls the same tools of ipybox 0.9.2 and of the profile that stands in for it, and compares.

Arguments: the command of ipybox, "--", the command of ours. That server loses the output of short
cells now and then, so that a call of it is repeated until it agrees or has had many chances; ours
is called once.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
from contextlib import asynccontextmanager

from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client

CHANCES = 20
STARTS = 3
CELL = "execute_ipython_cell"

# Calls that both answer alike.
SAME = [
    (CELL, {"code": "print('hi')"}),
    (CELL, {"code": "1 + 1"}),
    (CELL, {"code": ""}),
    (CELL, {"code": "x = 7"}),
    (CELL, {"code": "x"}),
    (CELL, {"code": "print('a'); print('b'); 'value'"}),
    (CELL, {"code": "import sys; print('e', file=sys.stderr)"}),
    (CELL, {"code": "!echo shell"}),
    (CELL, {"code": "await __import__('asyncio').sleep(0); print('awaited')"}),
    (CELL, {"code": "def f(): return 'f'\nf()"}),
    (CELL, {"code": "undefined_name"}),
    (CELL, {"code": "1 / 0"}),
    (CELL, {"code": "def broken(:"}),
    (CELL, {"code": "print('x' * 100)", "max_output_chars": 10}),
    (CELL, {"code": "print('x' * 10)", "max_output_chars": 10}),
    (CELL, {"code": "print('x' * 5001)"}),
    (CELL, {"code": "'as text'", "timeout": "5"}),
    ("no_such_tool", {}),
    ("reset", {}),
    (CELL, {"code": "x"}),
]

# Calls that are answered differently, with what ours must hold beside what that server says.
INTENDED = [
    (CELL, {"code": "print('before'); 1 / 0"}, "Output before the error:\nbefore"),
    (CELL, {"code": "while True: pass", "timeout": 1}, "exceeded timeout of 1.00s"),
    (CELL, {"code": "from IPython.display import HTML; HTML('<b>bold</b>')"}, "bold"),
    (CELL, {"code": "1", "unknown": 1}, "no argument"),
    (CELL, {}, "needs the argument"),
]


def plain(result) -> tuple[bool, list[str]]:
    """Returns what was said, without the numbers of cells and the names of their files, which
    differ from run to run.
    """
    texts = [getattr(block, "text", block.type) for block in result.content]
    texts = [re.sub(r"In\[\d+\]", "In[n]", text) for text in texts]
    return bool(result.isError), [
        re.sub(r"\([^()]+, line (\d+)\)", r"(line \1)", text).rstrip() for text in texts
    ]


@asynccontextmanager
async def connected(command: list[str]):
    """Starts a server, speaks with it, and yields the session with the name that it gives
    itself.
    """
    parameters = StdioServerParameters(command=command[0], args=command[1:], env=dict(os.environ))
    async with stdio_client(parameters) as pipes, ClientSession(*pipes) as session:
        greeting = await session.initialize()
        yield session, greeting.serverInfo.name


async def main(theirs: list[str], ours: list[str]) -> str:
    for _ in range(STARTS):
        started = False
        try:
            async with connected(theirs) as (they, their_name):
                started = True
                async with connected(ours) as (we, our_name):
                    assert their_name == our_name == "ipybox", (their_name, our_name)
                    await compare(they, we)
            return "all passed"
        except Exception:
            # On a busy machine that server gives up waiting for its own kernel.
            if started:
                raise
    return "it does not start"


async def compare(they: ClientSession, we: ClientSession) -> None:
    their_tools, our_tools = [
        {tool.name: tool.inputSchema for tool in (await session.list_tools()).tools}
        for session in (they, we)
    ]
    for name, schema in their_tools.items():
        mine = our_tools[name]
        assert schema.get("required", []) == mine.get("required", []), name
        for argument, described in schema["properties"].items():
            same = mine["properties"][argument]
            for word in ("type", "default"):
                assert described.get(word) == same.get(word), (name, argument, described, same)

    for tool, arguments in SAME:
        mine = plain(await we.call_tool(tool, arguments))
        for _ in range(CHANCES):
            theirs_now = plain(await they.call_tool(tool, arguments))
            if theirs_now == mine:
                break
        else:
            raise AssertionError(f"{tool} {arguments}: {theirs_now} there, {mine} here")

    for tool, arguments, words in INTENDED:
        theirs_now, mine = [
            plain(await session.call_tool(tool, arguments)) for session in (they, we)
        ]
        assert theirs_now != mine and words in mine[1][0], (tool, arguments, theirs_now, mine)

    picture = "import base64\nfrom IPython.display import Image\nImage(base64.b64decode('iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=='))"
    listed = r"Generated images:\n\n- \[[0-9a-f]{8}\]\(/.*/images/[0-9a-f]{8}\.png\)"
    mine = (await we.call_tool(CELL, {"code": picture})).content
    assert [block.type for block in mine] == ["text", "image"] and re.search(
        listed, mine[0].text
    ), mine
    for _ in range(CHANCES):
        (told,) = (await they.call_tool(CELL, {"code": picture})).content
        if re.search(listed, told.text):
            return
    raise AssertionError(f"{told} there")


middle = sys.argv.index("--")
print(asyncio.run(asyncio.wait_for(main(sys.argv[1:middle], sys.argv[middle + 1 :]), 600)))
