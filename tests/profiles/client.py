"""The official Python client goes through one profile: lists its tools and makes the calls that its
documents show first.

Arguments: the profile's name and the server's command.
"""

from __future__ import annotations

import asyncio
import os
import sys

from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client

# For each profile: calls, and what their first text must hold. `{}` stands for the last word of the
# text before.
CALLS = {
    "ipybox": [
        ("execute_ipython_cell", {"code": "x = 20 + 1; print(x)"}, "21"),
        ("execute_ipython_cell", {"code": "x * 2"}, "42"),
        (
            "execute_ipython_cell",
            {"code": "1 / 0"},
            "Error executing tool execute_ipython_cell: ZeroDivisionError",
        ),
        ("reset", {}, None),
        ("execute_ipython_cell", {"code": "x"}, "NameError"),
    ],
    "python-docker-mcp": [
        ("execute-transient", {"code": "y = state['x'] + 1", "state": {"x": 1}}, '"y":2'),
        ("execute-persistent", {"code": "a = 1", "session_id": "s"}, "Session ID: s"),
        (
            "execute-persistent",
            {"code": "print(a + 1)", "session_id": "s"},
            "Execution Result:\n\n2",
        ),
        ("cleanup-session", {"session_id": "s"}, "Session s cleaned up successfully"),
    ],
    "code-executer": [
        (
            "start_code_executer",
            {"dependencies": []},
            "Code execution service started with the name: ",
        ),
        ("execute_code", {"code": "2 ** 10"}, "1024"),
    ],
    "pyexec": [
        ("execute_python", {"code": "v = 3"}, "✓ Execution successful (no output)"),
        ("execute_python", {"code": "print(v); v * 2"}, "3\n6"),
        ("execute_python", {"code": ""}, "Error: No Python code provided"),
    ],
}


async def main(profile: str, command: list[str]) -> None:
    parameters = StdioServerParameters(command=command[0], args=command[1:], env=dict(os.environ))
    async with stdio_client(parameters) as pipes, ClientSession(*pipes) as session:
        await session.initialize()
        tools = {tool.name for tool in (await session.list_tools()).tools}
        for tool, arguments, words in CALLS[profile]:
            assert tool in tools, tools
            result = await session.call_tool(tool, arguments)
            if words is None:
                assert not result.content and not result.isError, result
            else:
                assert words in result.content[0].text, (tool, arguments, result)
        if profile == "code-executer":
            prompts = (await session.list_prompts()).prompts
            assert [prompt.name for prompt in prompts] == ["math_evaluation"], prompts
            prompt = await session.get_prompt("math_evaluation", {"expression": "1 + 1"})
            assert "1 + 1" in prompt.messages[0].content.text, prompt


asyncio.run(asyncio.wait_for(main(sys.argv[1], sys.argv[2:]), 120))
print("all passed")
