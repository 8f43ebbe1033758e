"""
A server of the package whose answers a test writes itself, word by word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mcp_types as types
from mcp.server import Server

OBJECT = {"type": "object", "properties": {}}


def described(name: str, **more: Any) -> types.Tool:
    return types.Tool(**{"name": name, "input_schema": OBJECT, "description": f"Do {name}.", **more})


def text(said: str) -> types.TextContent:
    return types.TextContent(type="text", text=said)


class Foreign:
    """
    What a foreign server offers and answers; tests change it while it runs.
    """

    def __init__(
        self, *tools: types.Tool, answers: Mapping[str, Any] | None = None, prompts: Sequence[types.Prompt] = ()
    ) -> None:
        self.tools: Sequence[types.Tool] = tools
        self.prompts = prompts
        self.answers = dict(answers or {})
        self.called: list[tuple[str, Any]] = []
        self.server: Any = Server(
            "foreign", on_list_tools=self._list, on_call_tool=self._call, on_list_prompts=self._prompts
        )

    async def _list(self, ctx: Any, params: Any) -> types.ListToolsResult:
        return types.ListToolsResult(tools=list(self.tools))

    async def _prompts(self, ctx: Any, params: Any) -> types.ListPromptsResult:
        return types.ListPromptsResult(prompts=list(self.prompts))

    async def _call(self, ctx: Any, params: Any) -> Any:
        self.called.append((params.name, params.arguments))
        return self.answers.get(params.name) or types.CallToolResult(content=[text(f"{params.name} was called")])
