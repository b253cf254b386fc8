"""The official Python client, first generation: lists tools, runs cells, gets a plot, cancels.

Arguments: "stdio" and the server's command, or "http" and its address; the token of the latter is
in CELLBLOCK_TOKEN.
"""

from __future__ import annotations

import asyncio
import base64
import os
import sys
from contextlib import asynccontextmanager

from mcp import ClientSession, StdioServerParameters, types
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamablehttp_client

SESSION = "python-v1"


@asynccontextmanager
async def connected(transport: str, target: list[str]):
    if transport == "stdio":
        parameters = StdioServerParameters(command=target[0], args=target[1:], env=dict(os.environ))
        opened = stdio_client(parameters)
    else:
        opened = streamablehttp_client(
            target[0], {"Authorization": f"Bearer {os.environ['CELLBLOCK_TOKEN']}"}
        )
    async with opened as streams, ClientSession(streams[0], streams[1]) as session:
        yield session


async def main(transport: str, target: list[str]) -> None:
    async with connected(transport, target) as session:
        greeting = await session.initialize()
        assert greeting.serverInfo.name == "cellblock", greeting

        tools = {tool.name for tool in (await session.list_tools()).tools}
        assert {"execute_ipython_cell", "reset", "fork_session"} <= tools, tools

        async def cell(code: str, progress=None) -> types.CallToolResult:
            arguments = {"code": code, "session_id": SESSION}
            return await session.call_tool(
                "execute_ipython_cell", arguments, progress_callback=progress
            )

        assert (await cell("x = 20 + 1; print(x)")).content[0].text == "21"
        result = await cell("x * 2")
        assert result.content[0].text == "42" and result.structuredContent["status"] == "ok", result

        result = await cell("1 / 0")
        assert result.isError and "ZeroDivisionError" in result.content[0].text, result

        result = await cell("import matplotlib.pyplot as plt; plt.plot([1, 2]); plt.show()")
        [image] = [block for block in result.content if block.type == "image"]
        assert base64.b64decode(image.data).startswith(b"\x89PNG"), image.mimeType

        begun = asyncio.Event()

        async def progress(_done: float, _total: float | None, message: str | None) -> None:
            if "begun" in (message or ""):
                begun.set()

        running = asyncio.create_task(
            cell("print('begun', flush=True)\nwhile True: pass", progress)
        )
        await begun.wait()
        # This generation has no call for it: a client names the request itself.
        cancelled = types.CancelledNotificationParams(
            requestId=session._request_id - 1, reason="a test"
        )
        notification = types.CancelledNotification(params=cancelled)
        await session.send_notification(types.ClientNotification(notification))
        # The session serves the next cell only when the cancelled one has been stopped.
        assert (await cell("x")).content[0].text == "21"
        running.cancel()
        await session.call_tool("close_session", {"session_id": SESSION})


asyncio.run(asyncio.wait_for(main(sys.argv[1], sys.argv[2:]), 120))
print("all passed")
