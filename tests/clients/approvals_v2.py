"""The official Python client, second generation, with a person behind it, in both protocol eras:
every command of a cell is asked about.

Arguments: "stdio" and the server's command, or "http" and its address; the token of the latter is
in CELLBLOCK_TOKEN. The server asks about shell commands and packages.
"""

from __future__ import annotations

import os
import sys
from contextlib import asynccontextmanager

import anyio
from mcp import Client, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client
from mcp.shared._httpx_utils import create_mcp_http_client
from mcp.types import ElicitResult

forms: list[str] = []
answers: list[ElicitResult] = []


async def person(_context, parameters) -> ElicitResult:
    forms.append(parameters.message)
    return answers.pop(0)


def accept(decision: str) -> ElicitResult:
    return ElicitResult(action="accept", content={"decision": decision})


@asynccontextmanager
async def connected(transport: str, target: list[str], mode: str):
    if transport == "stdio":
        parameters = StdioServerParameters(command=target[0], args=target[1:], env=dict(os.environ))
        async with Client(parameters, mode=mode, elicitation_callback=person) as client:
            yield client
    else:
        headers = {"Authorization": f"Bearer {os.environ['CELLBLOCK_TOKEN']}"}
        async with create_mcp_http_client(headers) as http:
            opened = streamable_http_client(target[0], http_client=http)
            async with Client(opened, mode=mode, elicitation_callback=person) as client:
                yield client


async def main(transport: str, target: list[str], mode: str, version: str) -> None:
    session = f"approvals-{mode}"
    forms.clear()
    async with connected(transport, target, mode) as client:
        assert client.protocol_version == version, client.protocol_version

        async def cell(code: str):
            return await client.call_tool(
                "execute_ipython_cell", {"code": code, "session_id": session}
            )

        await cell("runs = []")
        answers.append(accept("once"))
        result = await cell("runs.append(1)\n!echo from {len(runs)}")
        assert "from 1" in result.content[0].text, result
        assert "| echo from 1" in forms[-1] and "approve_shell: ask" in forms[-1], forms
        assert (await cell("print(runs)")).content[0].text == "[1]", "the code ran once"

        answers.extend([accept("once"), ElicitResult(action="decline")])
        result = await cell("!echo one\n!echo two")
        assert "one" in result.content[0].text and "did not allow" in result.content[0].text, result

        answers.append(accept("session"))
        await cell("!echo again")
        asked = len(forms)
        assert "again" in (await cell("!echo again")).content[0].text
        assert len(forms) == asked, forms[asked:]

        answers.append(ElicitResult(action="cancel"))
        result = await client.call_tool(
            "install_package", {"package_name": "polars", "session_id": session}
        )
        assert result.is_error and "nothing was installed" in result.content[0].text, result
        await client.call_tool("close_session", {"session_id": session})


async def both(transport: str, target: list[str]) -> None:
    with anyio.fail_after(120):
        await main(transport, target, "legacy", "2025-11-25")
        await main(transport, target, "auto", "2026-07-28")


anyio.run(both, sys.argv[1], sys.argv[2:])
print("all passed")
