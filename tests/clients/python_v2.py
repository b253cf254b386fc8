"""The official Python client, second generation, in both protocol eras: lists tools, runs cells, gets a plot, cancels.

Arguments: a workspace folder with a FIFO named "begun", then the server's command. The environment is handed on.
"""

from __future__ import annotations

import base64
import os
import sys

import anyio
from mcp import Client, StdioServerParameters


async def main(mode: str, version: str, workspace: str, command: list[str]) -> None:
    parameters = StdioServerParameters(command=command[0], args=command[1:], env=dict(os.environ))
    async with Client(parameters, mode=mode) as client:
        assert client.protocol_version == version, client.protocol_version
        tools = [tool.name for tool in (await client.list_tools()).tools]
        assert "execute_ipython_cell" in tools and len(tools) == 11, tools

        async def cell(code: str):
            return await client.call_tool("execute_ipython_cell", {"code": code})

        assert (await cell("x = 20 + 1; print(x)")).content[0].text == "21"
        result = await cell("x * 2")
        assert result.content[0].text == "42" and result.structured_content["status"] == "ok", result

        result = await cell("1 / 0")
        assert result.is_error and "ZeroDivisionError" in result.content[0].text, result

        result = await cell("import matplotlib.pyplot as plt; plt.plot([1, 2]); plt.show()")
        [image] = [block for block in result.content if block.type == "image"]
        assert base64.b64decode(image.data).startswith(b"\x89PNG"), image.mime_type

        async with anyio.create_task_group() as group:
            group.start_soon(cell, "open('begun', 'w').close()\nwhile True: pass")
            await anyio.to_thread.run_sync(wait_for, os.path.join(workspace, "begun"))
            group.cancel_scope.cancel()
        # The session serves the next cell only when the cancelled one has been stopped.
        assert (await cell("x")).content[0].text == "21"


def wait_for(fifo: str) -> None:
    with open(fifo) as file:
        file.read()


async def both(workspace: str, command: list[str]) -> None:
    with anyio.fail_after(120):
        await main("legacy", "2025-11-25", workspace, command)
        await main("auto", "2026-07-28", workspace, command)


anyio.run(both, sys.argv[1], sys.argv[2:])
print("all passed")
