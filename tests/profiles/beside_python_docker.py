"""Calls python-docker-mcp 0.2.5 and the profile that stands in for it, as far as that server answers without an engine.

Arguments: the command of python-docker-mcp, "--", the command of ours.
"""

from __future__ import annotations

import asyncio
import os
import sys

from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client

# Calls whose texts agree. Only ours says that they are errors.
SAME = [
    ("no-such-tool", {"a": 1}),
    ("execute-transient", {"code": "import os"}),
    ("execute-transient", {"code": "import subprocess"}),
    ("execute-transient", {"code": "import http"}),
]


def connect(command: list[str]):
    # Whatever engine there is: that server would fill it with containers.
    environment = {**os.environ, "DOCKER_HOST": "unix:///nonexistent/docker.sock"}
    return stdio_client(StdioServerParameters(command=command[0], args=command[1:], env=environment))


async def main(theirs: list[str], ours: list[str]) -> None:
    async with connect(theirs) as their_pipes, connect(ours) as our_pipes:
        async with ClientSession(*their_pipes) as they, ClientSession(*our_pipes) as we:
            names = [(await session.initialize()).serverInfo.name for session in (they, we)]
            assert names[0] == names[1], names
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
            for tool, arguments in SAME:
                results = [await session.call_tool(tool, arguments) for session in (they, we)]
                texts = [[block.text for block in result.content] for result in results]
                assert texts[0] == texts[1], (tool, arguments, texts)
                assert [result.isError for result in results] == [False, True], (tool, arguments, results)


middle = sys.argv.index("--")
asyncio.run(asyncio.wait_for(main(sys.argv[1:middle], sys.argv[middle + 1 :]), 240))
print("all passed")
