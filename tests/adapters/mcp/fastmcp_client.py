"""
A client of the package fastmcp, in an environment of its own: what it is shown and answered, as JSON on standard output.

    python fastmcp_client.py ANSWER COMMAND...     python fastmcp_client.py ANSWER URL     ANSWER is "" for no elicitation
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from fastmcp import Client
from fastmcp.client.transports import StdioTransport

ANSWER, FIRST, *REST = sys.argv[1:]


async def main() -> None:
    asked: list[str] = []

    async def answer(message: str, response_type: Any, params: Any, context: Any) -> Any:
        asked.append(message)
        return {"answer": ANSWER}

    target = FIRST if FIRST.startswith("http") else StdioTransport(FIRST, REST)
    options: dict[str, Any] = {"elicitation_handler": answer} if ANSWER else {}
    async with Client(target, **options) as client:
        tools = await client.list_tools()
        result = await client.call_tool("order_taker", {"prompt": "shoes"}, raise_on_error=False)
    print(
        json.dumps(
            {
                "tools": [one.name for one in tools],
                "asked": asked,
                "texts": [one.text for one in result.content],
                "structured": result.structured_content,
            }
        )
    )


asyncio.run(main())
