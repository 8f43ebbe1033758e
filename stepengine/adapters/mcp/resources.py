"""A server's resources and prompts, as tools."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from stepengine.adapters.mcp._caps import DESCRIPTION_CHARS, PARTS
from stepengine.adapters.mcp.connection import ServerConnection
from stepengine.adapters.mcp.results import (
    binary_side_effects,
    content_parts,
    failed_result,
    resource_part,
    without_excess_media,
)
from stepengine.adapters.mcp.tool_list import annotations_from_hints, clean_server_text
from stepengine.data.messages import ResultPart, TextPart, ToolResult
from stepengine.data.tools import ToolLike
from stepengine.errors import ToolError
from stepengine.tools.conversion import as_result
from stepengine.tools.definition import Tool

WORST = annotations_from_hints({}, trusted=False)
Session = Callable[[], Awaitable[tuple[ServerConnection, Any]]]


def make_resource_tools(server: str, session: Session) -> list[ToolLike]:
    """Return two tools: one lists the resources of a server, the other reads a resource."""

    async def listed(_: dict[str, Any]) -> ToolResult:
        try:
            connection, client = await session()
            resources = await connection.fetch_pages(client.list_resources, "resources", optional=True)
            templates = await connection.fetch_pages(
                client.list_resource_templates, "resource_templates", optional=True
            )
        except ToolError as error:
            return failed_result(server, error)
        found = [
            *[
                {"uri": r["uri"], "name": r["name"], "about": clean_server_text(r.get("description") or "")}
                for r in resources
            ],
            *[
                {
                    "template": t["uriTemplate"],
                    "name": t["name"],
                    "about": clean_server_text(t.get("description") or ""),
                }
                for t in templates
            ],
        ]
        return as_result(found[: 10 * PARTS])

    async def read(input: dict[str, Any]) -> ToolResult:
        try:
            connection, client = await session()
            result = await connection.guarded(client.read_resource(input["uri"]))
        except ToolError as error:
            return failed_result(server, error)
        contents = [c.model_dump(mode="json", by_alias=True, exclude_none=True) for c in result.contents]
        blocks: list[dict[str, Any]] = [{"type": "resource", "resource": one} for one in contents[:PARTS]]
        kept: list[dict[str, Any]] = [dict(block.get("resource", block)) for block in without_excess_media(blocks)]
        parts = tuple([resource_part(one) for one in kept])
        return as_result(ToolResult(parts, side_effects=binary_side_effects(kept)))

    uri = {"type": "string", "description": "The address of the resource, as the list has it"}
    return [
        Tool(
            f"mcp_resources_{server}",
            f"List what the MCP server {server} has to read; an address in a template has parts to fill in.",
            {"type": "object", "properties": {}},
            listed,
            category="mcp",
            annotations=WORST,
        ),
        Tool(
            f"mcp_read_{server}",
            f"Read a resource of the MCP server {server}.",
            {"type": "object", "properties": {"uri": uri}, "required": ["uri"]},
            read,
            category="mcp",
            annotations=WORST,
        ),
    ]


def make_prompt_tool(server: str, prompts: Sequence[Mapping[str, object]], session: Session) -> ToolLike:
    """Return a tool that reads one of a server's prompts with its arguments filled in."""
    lines = [_introduce_prompt(prompt) for prompt in prompts]
    arguments = {"type": "object", "additionalProperties": {"type": "string"}}
    names = [str(prompt["name"]) for prompt in prompts]

    async def get(input: dict[str, Any]) -> ToolResult:
        try:
            connection, client = await session()
            result = await connection.guarded(client.get_prompt(input["name"], input.get("arguments") or {}))
        except ToolError as error:
            return failed_result(server, error)
        parts: list[ResultPart] = []
        messages = result.messages[:PARTS]
        blocks = [one.content.model_dump(mode="json", by_alias=True, exclude_none=True) for one in messages]
        for message, block in zip(messages, without_excess_media(blocks), strict=True):
            parts += [TextPart(f"{message.role}: "), *content_parts([block])]
        return as_result(ToolResult(tuple(parts)))

    return Tool(
        f"mcp_prompt_{server}",
        "\n".join([f"Get a prompt of the MCP server {server}. It has:", *lines])[:DESCRIPTION_CHARS],
        {
            "type": "object",
            "properties": {"name": {"type": "string", "enum": names}, "arguments": arguments},
            "required": ["name"],
        },
        get,
        category="mcp",
        annotations=WORST,
    )


def _introduce_prompt(prompt: Mapping[str, Any]) -> str:
    named = [f"{one['name']}{'' if one.get('required') else '?'}" for one in prompt.get("arguments") or ()]
    return clean_server_text(f"- {prompt['name']}({', '.join(named)}): {prompt.get('description') or ''}")
