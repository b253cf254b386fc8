"""Calls python-docker-mcp 0.2.5 and the profile that stands in for it, and compares.

Arguments: "engine" if `DOCKER_HOST` leads to one and else "none", the command of python-docker-mcp,
"--", the command of ours.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
from typing import Any

from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client

TRANSIENT, PERSISTENT, INSTALL, CLEANUP = (
    "execute-transient",
    "execute-persistent",
    "install-package",
    "cleanup-session",
)

# Calls that fail with the same text. Only ours says that they are errors.
SAME_FAILURE: list[tuple[str, dict[str, Any]]] = [
    ("no-such-tool", {"a": 1}),
    (TRANSIENT, {"code": "import os"}),
    (TRANSIENT, {"code": "import subprocess"}),
    (TRANSIENT, {"code": "import http"}),
]

# Calls that both answer alike, but for the state that ours tells behind.
SAME: list[tuple[str, dict[str, Any]]] = [
    (TRANSIENT, {"code": "print('hi')"}),
    (TRANSIENT, {"code": "1 + 1"}),
    (TRANSIENT, {"code": "x = 1"}),
    (TRANSIENT, {"code": "import math\nprint(math.sqrt(4))"}),
    (TRANSIENT, {"code": "for n in range(3):\n    print(n)"}),
    (TRANSIENT, {"code": "print('x' * 10_000)"}),
    (TRANSIENT, {"code": "print('äöü ✓')"}),
    (PERSISTENT, {"code": "print('began')", "session_id": "s"}),
    (PERSISTENT, {"code": "open('kept', 'w').write('file')", "session_id": "s"}),
    (PERSISTENT, {"code": "print(open('kept').read())", "session_id": "s"}),
    (PERSISTENT, {"code": "print(2)"}),
    (CLEANUP, {"session_id": "s"}),
]

# Calls that are answered differently: what that server says, and what ours says. All are rows of
# docs/migrate.
INTENDED: list[tuple[str, dict[str, Any], str, str]] = [
    (
        TRANSIENT,
        {"code": "print(state['x'])", "state": {"x": 5}},
        "name 'state' is not defined",
        "\n\n5\n",
    ),
    (
        TRANSIENT,
        {"code": "left = 1"},
        "Execution Result:\n\n",
        'State: {"__error__":null,"__stderr__":"","__stdout__":"","left":1}',
    ),
    (TRANSIENT, {"code": "open('left', 'w').write('x')"}, "Execution Result:", "Execution Result:"),
    (TRANSIENT, {"code": "print(open('left').read())"}, "\n\nx\n", "FileNotFoundError"),
    (
        TRANSIENT,
        {"code": "print('before')\n1 / 0"},
        "Error: Python execution error: ",
        "Error: Python execution error: ZeroDivisionError: division by zero",
    ),
    (
        TRANSIENT,
        {"code": "print('error: none')"},
        "Error: Python execution error: error: none",
        "Execution Result:\n\nerror: none\n\nState: ",
    ),
    (
        TRANSIENT,
        {"code": "def f(:"},
        "Error: Python execution error:   File",
        "Error: Python execution error: SyntaxError: ",
    ),
    (
        TRANSIENT,
        {"code": "from math import sqrt\nprint(sqrt(4))"},
        "Import 'sqrt' is not in the allowed list",
        "\n\n2.0\n",
    ),
    (
        TRANSIENT,
        {"code": "import math, os\nprint('passed')"},
        "\n\npassed",
        "Import 'os' is blocked",
    ),
    (TRANSIENT, {"code": "print('import os')"}, "Import 'os' is blocked", "\n\nimport os\n"),
    (TRANSIENT, {}, "'code' is a required property", "Missing arguments"),
    (TRANSIENT, {"state": {}}, "'code' is a required property", "Missing code"),
    (CLEANUP, {}, "'session_id' is a required property", "Missing arguments"),
    (PERSISTENT, {"code": "a = 1", "session_id": "t"}, "Session ID: t", "Session ID: t"),
    (PERSISTENT, {"code": "print(a)", "session_id": "t"}, "name 'a' is not defined", "\n\n1\n"),
    (
        PERSISTENT,
        {"code": "print('a\\nb')", "session_id": "t"},
        "unterminated string literal",
        "\n\na\nb\n",
    ),
    (
        PERSISTENT,
        {"code": "print(1)", "session_id": "a b"},
        "Session ID: a b",
        "Error executing execute-persistent: ",
    ),
    # Here the session is made, and the package does not exist.
    (
        INSTALL,
        {"package_name": "no-such-package-of-cellblock", "session_id": "never"},
        "Session never not found",
        "Error installing package: ",
    ),
    (
        CLEANUP,
        {"session_id": "other"},
        "Session other cleaned up successfully",
        "Session other does not exist",
    ),
]


def connect(command: list[str]):
    return stdio_client(
        StdioServerParameters(command=command[0], args=command[1:], env=dict(os.environ))
    )


def told(result) -> str:
    (block,) = result.content
    return block.text


def plain(text: str) -> str:
    """Returns what was said without the state and without the name of a session that nobody
    named.
    """
    text = re.sub(r"^Session ID: \S{20,}\n", "Session ID: …\n", text.partition("\n\nState: ")[0])
    return text.rstrip()


async def compare(they: ClientSession, we: ClientSession, has_engine: bool) -> None:
    listed = []
    for session in (they, we):
        tools = (await session.list_tools()).tools
        listed.append(
            {
                tool.name: (
                    tool.inputSchema.get("required"),
                    {name: what["type"] for name, what in tool.inputSchema["properties"].items()},
                )
                for tool in tools
            }
        )
    assert listed[0] == listed[1], listed
    for tool, arguments in SAME_FAILURE:
        results = [await session.call_tool(tool, arguments) for session in (they, we)]
        # Here refused code gives the state back.
        assert plain(told(results[0])) == plain(told(results[1])), (tool, arguments, results)
        assert [result.isError for result in results] == [False, True], (tool, arguments, results)
    if not has_engine:
        return
    for tool, arguments in SAME:
        results = [await session.call_tool(tool, arguments) for session in (they, we)]
        assert plain(told(results[0])) == plain(told(results[1])), (tool, arguments, results)
        assert [result.isError for result in results] == [False, False], (tool, arguments, results)
    for tool, arguments, theirs, ours in INTENDED:
        results = [told(await session.call_tool(tool, arguments)) for session in (they, we)]
        assert theirs in results[0], (tool, arguments, theirs, results)
        assert ours in results[1], (tool, arguments, ours, results)


async def main(has_engine: bool, theirs: list[str], ours: list[str]) -> None:
    async with connect(theirs) as their_pipes, connect(ours) as our_pipes:
        async with ClientSession(*their_pipes) as they, ClientSession(*our_pipes) as we:
            names = [(await session.initialize()).serverInfo.name for session in (they, we)]
            assert names[0] == names[1], names
            await compare(they, we, has_engine)


middle = sys.argv.index("--")
asyncio.run(
    asyncio.wait_for(main(sys.argv[1] == "engine", sys.argv[2:middle], sys.argv[middle + 1 :]), 240)
)
print("all passed")
