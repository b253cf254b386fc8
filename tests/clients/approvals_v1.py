"""The official Python client, first generation, with a person behind it: every command of a cell is
asked about.

Arguments: "stdio" and the server's command, or "http" and its address; the token of the latter is
in CELLBLOCK_TOKEN. The server asks about shell commands and packages.
"""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import asynccontextmanager

from mcp import ClientSession, StdioServerParameters, types
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamablehttp_client

SESSION = "approvals-v1"
forms: list[str] = []
answers: list[types.ElicitResult] = []


async def person(_context, parameters: types.ElicitRequestParams) -> types.ElicitResult:
    forms.append(parameters.message)
    return answers.pop(0)


def accept(decision: str) -> types.ElicitResult:
    return types.ElicitResult(action="accept", content={"decision": decision})


@asynccontextmanager
async def connected(transport: str, target: list[str], callback):
    if transport == "stdio":
        parameters = StdioServerParameters(command=target[0], args=target[1:], env=dict(os.environ))
        opened = stdio_client(parameters)
    else:
        opened = streamablehttp_client(
            target[0], {"Authorization": f"Bearer {os.environ['CELLBLOCK_TOKEN']}"}
        )
    async with opened as streams:
        async with ClientSession(streams[0], streams[1], elicitation_callback=callback) as session:
            await session.initialize()
            yield session


async def main(transport: str, target: list[str]) -> None:
    async with connected(transport, target, person) as session:

        async def cell(code: str) -> types.CallToolResult:
            arguments = {"code": code, "session_id": SESSION}
            return await session.call_tool("execute_ipython_cell", arguments)

        assert (await cell("x = 20 + 1; print(x)")).content[0].text == "21"
        assert not forms, forms

        answers.append(accept("once"))
        result = await cell("!echo from $x")
        assert "from 21" in result.content[0].text, result
        assert "| echo from 21" in forms[-1] and "approve_shell: ask" in forms[-1], forms

        answers.append(types.ElicitResult(action="decline"))
        result = await cell("!echo again")
        assert result.isError and "did not allow" in result.content[0].text, result

        answers.append(accept("session"))
        await cell("!echo again")
        asked = len(forms)
        assert "again" in (await cell("!echo again")).content[0].text
        assert len(forms) == asked, forms[asked:]

        answers.append(types.ElicitResult(action="cancel"))
        result = await session.call_tool(
            "install_package", {"package_name": "polars", "session_id": SESSION}
        )
        assert result.isError and "nothing was installed" in result.content[0].text, result
        assert "polars" in forms[-1], forms[-1]

        result = await cell("import os; os.posix_spawn('/bin/echo', ['echo'], {})")
        assert result.isError, result
        await session.call_tool("close_session", {"session_id": SESSION})

    async with connected(transport, target, None) as session:
        arguments = {"code": "!echo unseen", "session_id": SESSION + "-alone"}
        result = await session.call_tool("execute_ipython_cell", arguments)
        assert result.isError and "approve_shell: ask" in result.content[0].text, result
        await session.call_tool("close_session", {"session_id": SESSION + "-alone"})


asyncio.run(asyncio.wait_for(main(sys.argv[1], sys.argv[2:]), 120))
print("all passed")
