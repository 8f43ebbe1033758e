"""
Many tools: the model searches them by words and calls what it found by name, instead of being shown all of them.

Its requests stay small and begin alike, whatever a server adds. Rules judge the tool that would run, never the one that passes
the call on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from stepengine.data.json import JsonDict, freeze_object, thaw
from stepengine.data.messages import ToolCallPart, ToolResult
from stepengine.data.sources import Meant
from stepengine.data.tools import Ordinary, ToolAnnotations, ToolBinding, ToolLike, Validated
from stepengine.errors import ToolInputError
from stepengine.mcp._caps import FOUND
from stepengine.tools.context import ToolContext
from stepengine.tools.definition import Tool

__all__ = ("Deferred",)

NAMES_TOLD = 200
WORDS = 50
"""Of a query; each is looked for in the text of every tool."""


class Deferred:
    """
    The tools of a server that a model is not shown.

    Args:
        server: Its name.
        tools: They.

    Attributes:
        tools: ``mcp_search_NAME`` and ``mcp_call_NAME``.
    """

    def __init__(self, server: str, tools: Sequence[ToolLike]) -> None:
        self._known = {tool.spec.name: tool for tool in tools}
        self._texts = {t.spec.name: _plain(f"{t.spec.name} {t.spec.description}") for t in tools}
        self._caller = f"mcp_call_{server}"
        names = ", ".join(list(self._known)[:NAMES_TOLD])
        word: Mapping[str, Any] = {"type": "string", "description": "Words of names and descriptions"}
        search: Tool[..., Any] = Tool(
            f"mcp_search_{server}",
            f"Search the {len(tools)} tools of the MCP server {server}; call one with {self._caller}. They are: {names}",
            {"type": "object", "properties": {"query": word}, "required": ["query"]},
            self._search,
            category="mcp",
            annotations=ToolAnnotations(read_only=True),
            requires_permission=False,
            parallel_safe=True,
            in_thread=False,
        )
        self.tools: tuple[ToolLike, ...] = (search, _Caller(self._caller, server, self._known))

    def _search(self, input: dict[str, Any]) -> list[Any]:
        """Return the tools that have most of the words, with their schemas."""
        words = list(dict.fromkeys(_plain(str(input["query"])).split()))[:WORDS]
        scored = [(sum([word in text for word in words]), name) for name, text in self._texts.items()]
        best = sorted([one for one in scored if one[0]], key=lambda one: (-one[0], one[1]))[:FOUND]
        specs = [self._known[name].spec for _, name in best]
        return [{"tool": s.name, "description": s.description, "input_schema": thaw(s.input_schema)} for s in specs]

    def meant(self, call: ToolCallPart) -> Meant | None:
        """Return the call that ``mcp_call_NAME`` passes on."""
        if call.tool_name != self._caller:
            return None
        found = self._known.get(str(call.input.get("tool")))
        if found is None:
            return None
        inner = call.input.get("input")
        given = freeze_object(inner) if isinstance(inner, Mapping) else JsonDict()
        return Meant(found.spec, ToolCallPart(call.tool_call_id, found.spec.name, given))


def _plain(text: str) -> str:
    return text.casefold().replace("_", " ")


class _Caller(Tool[..., Any]):
    """``mcp_call_NAME``: an input is checked against the schema of the tool that it names."""

    def __init__(self, name: str, server: str, known: Mapping[str, ToolLike]) -> None:
        self._known = known
        schema = {
            "type": "object",
            "properties": {
                "tool": {"type": "string", "description": "The name of the tool"},
                "input": {"type": "object", "description": "Its input"},
            },
            "required": ["tool"],
            "additionalProperties": False,
        }
        super().__init__(
            name, f"Call a tool of the MCP server {server} by its name.", schema, self._pass_on, category="mcp"
        )
        self._outer = self._binding
        self._binding: ToolBinding = attrs.evolve(
            self._outer, validate=self._validated, runs=Ordinary(self, self._follow)
        )

    def _validated(self, value: JsonDict) -> Validated:
        """Check the name and the input behind it; raises ``ToolInputError``."""
        outer = self._outer.validate(value)
        name = str(value["tool"])
        found = self._known.get(name)
        if found is None:
            known = ", ".join(sorted(self._known)[:NAMES_TOLD])
            msg = f"there is no tool {name!r}; known are: {known}"
            raise ToolInputError(msg, tool_name=self.spec.name, issues=(msg,))
        inner = found.binding().validate(freeze_object(value.get("input") or {}))
        given = freeze_object({"tool": name, "input": inner.input})
        return Validated(given, {**outer.arguments, "input": inner.arguments, "tool": name})

    async def _pass_on(self, ctx: ToolContext, input: dict[str, Any]) -> ToolResult:
        found = self._known[input["tool"]]
        return await found.binding().runs.tool.body.fn(ctx, input["input"])  # type: ignore[union-attr,no-any-return]

    def _follow(self, input: JsonDict, given: ToolResult) -> Any:
        runs = self._known[str(input["tool"])].binding().runs
        assert isinstance(runs, Ordinary)  # noqa: S101
        assert runs.follow is not None  # noqa: S101
        return runs.follow(freeze_object(input.get("input") or {}), given)
