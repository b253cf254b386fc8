"""A small MCP server for tests: the standard library only, lines of JSON, the protocol of
2025-06-18.

Its first argument names a log, in which every call and every cancellation is a line; the second
names the set of tools, so that it can be another server next time.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import Any

LOG = sys.argv[1]
EDITION = sys.argv[2] if len(sys.argv) > 2 else "first"
PICTURE = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="

_writing = threading.Lock()
_cancelled: dict[Any, threading.Event] = {}


def tool(
    name: str, description: str, properties: dict[str, Any], output: dict[str, Any] | None = None
) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    described = {"name": name, "description": description, "inputSchema": schema}
    return {**described, "outputSchema": output} if output else described


TOOLS = [
    tool(
        "add-up",
        "Adds two numbers.",
        {"first": {"type": "integer"}, "second": {"type": "integer"}},
        {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]},
    ),
    tool("echo", f"Says it back, in the {EDITION} edition.", {"text": {"type": "string"}}),
    tool("picture", "Returns a picture.", {}),
    tool("fail", "Reports an error.", {}),
    tool("wait", "Answers when it is cancelled, and tells how far it is.", {}),
    tool("crash", "Ends the server.", {}),
    tool(
        "variable", "Returns a variable of the server's environment.", {"name": {"type": "string"}}
    ),
]
if EDITION == "second":
    TOOLS.append(tool("newer", "Is only in the second edition.", {}))
if EDITION == "hostile":
    TOOLS += [
        tool("huge", "Answers with more than anybody wants.", {"bytes": {"type": "integer"}}),
        tool("half", "Ends in the middle of its answer.", {}),
        tool("change", "Changes what `echo` takes.", {}),
        tool("nested", "Takes anything.", {"value": {}}),
    ]


def log(*words: str) -> None:
    with open(LOG, "a", encoding="utf-8") as file:
        file.write(" ".join(words) + "\n")


def say(message: dict[str, Any]) -> None:
    with _writing:
        sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
        sys.stdout.flush()


def text(value: str, **more: Any) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": value}], **more}


def call(number: Any, params: dict[str, Any]) -> dict[str, Any] | None:
    name, arguments = params["name"], params.get("arguments") or {}
    log("call", name)
    if name == "add-up":
        total = arguments["first"] + arguments["second"]
        return text(f"the sum is {total}", structuredContent={"sum": total})
    if name == "echo":
        return text(f"{EDITION}: {arguments['text']}")
    if name == "picture":
        return {"content": [{"type": "image", "data": PICTURE, "mimeType": "image/png"}]}
    if name == "fail":
        return text("the disk is full", isError=True)
    if name == "crash":
        os._exit(3)
    if name == "huge":
        return text("x" * arguments["bytes"])
    if name == "half":
        sys.stdout.write(
            json.dumps({"jsonrpc": "2.0", "id": number, "result": text("half of it")})[:-20]
        )
        sys.stdout.flush()
        os._exit(3)
    if name == "change":
        echo = next(each for each in TOOLS if each["name"] == "echo")
        echo["inputSchema"] = {
            "type": "object",
            "properties": {"text": {"type": "string"}, "also": {"type": "string"}},
        }
        say({"method": "notifications/tools/list_changed"})
        return text("changed")
    if name == "nested":
        return text(f"{len(json.dumps(arguments))} characters")
    if name == "variable":
        log("variable", os.environ.get(arguments["name"], "(not set)"))
        return text(os.environ.get(arguments["name"], "(not set)"))
    if name == "newer":
        return text("new")
    token = (params.get("_meta") or {}).get("progressToken")
    if token is not None:
        progress = {
            "progressToken": token,
            "progress": 1,
            "total": 2,
            "message": "waiting to be cancelled",
        }
        say({"method": "notifications/progress", "params": progress})
    _cancelled[number].wait()
    log("cancelled", name)
    return None


def answer(number: Any, params: dict[str, Any]) -> None:
    result = call(number, params)
    if result is not None:
        say({"id": number, "result": result})


def main() -> None:
    log("started", EDITION, str(os.getpid()))
    for line in sys.stdin:
        message = json.loads(line)
        method, number, params = (
            message.get("method"),
            message.get("id"),
            message.get("params") or {},
        )
        if method == "initialize":
            version = params.get("protocolVersion", "2025-06-18")
            known = (
                version if version in ("2025-06-18", "2025-03-26", "2024-11-05") else "2025-06-18"
            )
            capabilities = {"tools": {"listChanged": True}}
            information = {"name": "notes", "version": "1"}
            say(
                {
                    "id": number,
                    "result": {
                        "protocolVersion": known,
                        "capabilities": capabilities,
                        "serverInfo": information,
                    },
                }
            )
        elif method == "tools/list":
            say({"id": number, "result": {"tools": TOOLS}})
        elif method == "tools/call":
            _cancelled[number] = threading.Event()
            threading.Thread(target=answer, args=(number, params), daemon=True).start()
        elif method == "notifications/cancelled":
            event = _cancelled.get(params.get("requestId"))
            if event is not None:
                event.set()
        elif number is not None:
            say({"id": number, "error": {"code": -32601, "message": "there is no such method"}})


main()
