"""The official Python client, first generation: lists tools, runs cells, gets a plot, cancels.

Arguments: a workspace folder with a FIFO named "begun", then the server's command. The environment is handed on.
"""

from __future__ import annotations

import asyncio
import base64
import os
import sys

from mcp import ClientSession, StdioServerParameters, types
from mcp.client.stdio import stdio_client


async def main(workspace: str, command: list[str]) -> None:
    parameters = StdioServerParameters(command=command[0], args=command[1:], env=dict(os.environ))
    async with stdio_client(parameters) as (reading, writing), ClientSession(reading, writing) as session:
        greeting = await session.initialize()
        assert greeting.serverInfo.name == "cellblock", greeting

        tools = [tool.name for tool in (await session.list_tools()).tools]
        assert "execute_ipython_cell" in tools and len(tools) == 11, tools

        async def cell(code: str) -> types.CallToolResult:
            return await session.call_tool("execute_ipython_cell", {"code": code})

        assert (await cell("x = 20 + 1; print(x)")).content[0].text == "21"
        result = await cell("x * 2")
        assert result.content[0].text == "42" and result.structuredContent["status"] == "ok", result

        result = await cell("1 / 0")
        assert result.isError and "ZeroDivisionError" in result.content[0].text, result

        result = await cell("import matplotlib.pyplot as plt; plt.plot([1, 2]); plt.show()")
        [image] = [block for block in result.content if block.type == "image"]
        assert base64.b64decode(image.data).startswith(b"\x89PNG"), image.mimeType

        running = asyncio.create_task(cell("open('begun', 'w').close()\nwhile True: pass"))
        await asyncio.to_thread(wait_for, os.path.join(workspace, "begun"))
        # This generation has no call for it: a client names the request itself.
        cancelled = types.CancelledNotificationParams(requestId=session._request_id - 1, reason="a test")
        notification = types.CancelledNotification(params=cancelled)
        await session.send_notification(types.ClientNotification(notification))
        assert (await cell("x")).content[0].text == "21"
        running.cancel()


def wait_for(fifo: str) -> None:
    with open(fifo) as file:
        file.read()


asyncio.run(asyncio.wait_for(main(sys.argv[1], sys.argv[2:]), 120))
print("all passed")
