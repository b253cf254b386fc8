"""An MCP server that does nothing: the standard library only, one thread, the protocol of
2025-06-18.

Its argument is a file with a list of tools as `tools/list` has them. Every call is answered with
the text `done`.
"""

from __future__ import annotations

import json
import sys
from typing import Any

with open(sys.argv[1], encoding="utf-8") as file:
    TOOLS = json.load(file)

INFORMATION = {
    "protocolVersion": "2025-06-18",
    "capabilities": {"tools": {}},
    "serverInfo": {"name": "list", "version": "1"},
}
RESULTS: dict[str, Any] = {
    "initialize": INFORMATION,
    "tools/list": {"tools": TOOLS},
    "tools/call": {"content": [{"type": "text", "text": "done"}]},
}

for line in sys.stdin:
    message = json.loads(line)
    if "id" not in message:
        continue
    result = RESULTS.get(message["method"])
    answer = (
        {"error": {"code": -32601, "message": "there is no such method"}}
        if result is None
        else {"result": result}
    )
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", "id": message["id"], **answer}) + "\n")
    sys.stdout.flush()
