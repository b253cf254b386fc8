"""The official Python client, second generation, in both protocol eras: lists tools, runs cells,
gets a plot, cancels.

Arguments: "stdio" and the server's command, or "http" and its address; the token of the latter is
in CELLBLOCK_TOKEN.
"""

from __future__ import annotations

import base64
import os
import sys
from contextlib import asynccontextmanager

import anyio
from mcp import Client, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client
from mcp.shared._httpx_utils import create_mcp_http_client

SESSION = "python-v2"


@asynccontextmanager
async def connected(transport: str, target: list[str], mode: str):
    if transport == "stdio":
        parameters = StdioServerParameters(command=target[0], args=target[1:], env=dict(os.environ))
        async with Client(parameters, mode=mode) as client:
            yield client
    else:
        headers = {"Authorization": f"Bearer {os.environ['CELLBLOCK_TOKEN']}"}
        async with create_mcp_http_client(headers) as http:
            async with Client(
                streamable_http_client(target[0], http_client=http), mode=mode
            ) as client:
                yield client


async def main(transport: str, target: list[str], mode: str, version: str) -> None:
    async with connected(transport, target, mode) as client:
        assert client.protocol_version == version, client.protocol_version
        tools = {tool.name for tool in (await client.list_tools()).tools}
        assert {"execute_ipython_cell", "reset", "fork_session"} <= tools, tools

        async def cell(code: str, progress=None):
            arguments = {"code": code, "session_id": SESSION}
            return await client.call_tool(
                "execute_ipython_cell", arguments, progress_callback=progress
            )

        assert (await cell("x = 20 + 1; print(x)")).content[0].text == "21"
        result = await cell("x * 2")
        assert result.content[0].text == "42" and result.structured_content["status"] == "ok", (
            result
        )

        result = await cell("1 / 0")
        assert result.is_error and "ZeroDivisionError" in result.content[0].text, result

        result = await cell("import matplotlib.pyplot as plt; plt.plot([1, 2]); plt.show()")
        [image] = [block for block in result.content if block.type == "image"]
        assert base64.b64decode(image.data).startswith(b"\x89PNG"), image.mime_type

        begun = anyio.Event()

        async def progress(_done: float, _total: float | None, message: str | None) -> None:
            if "begun" in (message or ""):
                begun.set()

        async with anyio.create_task_group() as group:
            group.start_soon(cell, "print('begun', flush=True)\nwhile True: pass", progress)
            await begun.wait()
            group.cancel_scope.cancel()
        # The session serves the next cell only when the cancelled one has been stopped.
        assert (await cell("x")).content[0].text == "21"
        await client.call_tool("close_session", {"session_id": SESSION})


async def both(transport: str, target: list[str]) -> None:
    with anyio.fail_after(120):
        await main(transport, target, "legacy", "2025-11-25")
        await main(transport, target, "auto", "2026-07-28")


anyio.run(both, sys.argv[1], sys.argv[2:])
print("all passed")
