"""A server's resources and prompts, as tools."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from stepengine.adapters.mcp._caps import DESCRIPTION_CHARS, PARTS
from stepengine.adapters.mcp.connection import ServerConnection
from stepengine.adapters.mcp.lenient_messages import read_result_as_sent
from stepengine.adapters.mcp.results import (
    make_binary_side_effects,
    make_content_parts,
    make_failed_call_result,
    make_readable_blocks,
    make_recordable,
    make_resource_part,
    replace_excess_media,
    wrap_in_list,
)
from stepengine.adapters.mcp.tool_list import annotations_from_hints, clean_server_text, find_recorded_problem
from stepengine.data.messages import ResultPart, TextPart, ToolResult
from stepengine.data.tools import ToolLike
from stepengine.data.visible import truncate_text, visible
from stepengine.errors import ToolError
from stepengine.tools.conversion import make_tool_result
from stepengine.tools.definition import Tool

WORST = annotations_from_hints({}, trusted=False)
Session = Callable[[], Awaitable[tuple[ServerConnection, Any]]]


def make_resource_tools(server: str, get_or_start_session: Session) -> list[ToolLike]:
    """Return two tools: one lists the resources of a server, the other reads a resource."""

    async def list_resources(_: dict[str, Any]) -> ToolResult:
        try:
            connection, client = await get_or_start_session()
            resources = await connection.fetch_pages(client.list_resources, "resources", optional=True)
            templates = await connection.fetch_pages(
                client.list_resource_templates, "resource_templates", optional=True
            )
        except ToolError as error:
            return make_failed_call_result(server, error)
        found = [*map(_make_resource_entry, resources), *map(_make_resource_entry, templates)]
        most = 10 * PARTS
        more = [{"left_out": f"{len(found) - most:,} more"}] if len(found) > most else []
        return make_tool_result([*found[:most], *more])

    async def read_resource(input: dict[str, Any]) -> ToolResult:
        try:
            connection, client = await get_or_start_session()
            result = await connection.await_response(client.read_resource(input["uri"]))
        except ToolError as error:
            return make_failed_call_result(server, error)
        found = wrap_in_list(make_recordable(read_result_as_sent(result)).get("contents"))
        contents = [{"type": "resource", "resource": one} for one in found[:PARTS]]
        blocks = replace_excess_media(make_readable_blocks(contents))
        parts = [make_resource_part(b["resource"]) if b["type"] == "resource" else TextPart(b["text"]) for b in blocks]
        return make_tool_result(
            ToolResult((*parts, *_make_omission_note(found)), side_effects=make_binary_side_effects(blocks))
        )

    uri = {"type": "string", "description": "The address of the resource, as the list has it"}
    return [
        Tool(
            f"mcp_resources_{server}",
            f"List what the MCP server {server} has to read; an address in a template has parts to fill in.",
            {"type": "object", "properties": {}},
            list_resources,
            category="mcp",
            annotations=WORST,
        ),
        Tool(
            f"mcp_read_{server}",
            f"Read a resource of the MCP server {server}.",
            {"type": "object", "properties": {"uri": uri}, "required": ["uri"]},
            read_resource,
            category="mcp",
            annotations=WORST,
        ),
    ]


def make_prompt_tool(server: str, prompts: Sequence[Mapping[str, object]], get_or_start_session: Session) -> ToolLike:
    """Return a tool that reads a prompt of a server with its arguments filled in."""
    lines = [_describe_prompt(prompt) for prompt in prompts]
    arguments = {"type": "object", "additionalProperties": {"type": "string"}}
    names = [str(prompt["name"]) for prompt in prompts]

    async def get_prompt(input: dict[str, Any]) -> ToolResult:
        try:
            connection, client = await get_or_start_session()
            result = await connection.await_response(client.get_prompt(input["name"], input.get("arguments") or {}))
        except ToolError as error:
            return make_failed_call_result(server, error)
        found = wrap_in_list(make_recordable(read_result_as_sent(result)).get("messages"))
        said = [(role, block) for message in found[:PARTS] for role, block in _split_message_blocks(message)]
        kept = replace_excess_media([block for _, block in said])
        parts: list[ResultPart] = []
        for (role, _), block in zip(said, kept, strict=True):
            parts += [TextPart(f"{role}: "), *make_content_parts([block])]
        return make_tool_result(ToolResult((*parts, *_make_omission_note(found))))

    return Tool(
        f"mcp_prompt_{server}",
        truncate_text("\n".join([f"Get a prompt of the MCP server {server}. It has:", *lines]), DESCRIPTION_CHARS),
        {
            "type": "object",
            "properties": {"name": {"type": "string", "enum": names}, "arguments": arguments},
            "required": ["name"],
        },
        get_prompt,
        category="mcp",
        annotations=WORST,
    )


def _make_resource_entry(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry of a resource or template for a model; for an unreadable one, the reason."""
    if odd := find_recorded_problem(entry):
        return {"name": visible(entry["name"], strict=True), "left_out": odd}
    about = clean_server_text(entry.get("description") or "")
    if "uriTemplate" in entry:
        return {"template": entry["uriTemplate"], "name": entry["name"], "about": about}
    return {"uri": entry["uri"], "name": entry["name"], "about": about}


def _split_message_blocks(message: object) -> list[tuple[str, dict[str, Any]]]:
    """Return the blocks of a message of a prompt, each with the role."""
    if not isinstance(message, Mapping):
        return [("?", block) for block in make_readable_blocks([message])]
    role = message.get("role")
    blocks = make_readable_blocks(wrap_in_list(message.get("content"), default=[None]))
    return [(role if isinstance(role, str) else "?", block) for block in blocks]


def _make_omission_note(parts: Sequence[object]) -> list[ResultPart]:
    """Return a note with the number of parts above the limit; an empty list if there are none."""
    return [TextPart(f"[{len(parts) - PARTS:,} more parts were left out]")] if len(parts) > PARTS else []


def _describe_prompt(prompt: Mapping[str, Any]) -> str:
    """Return a line with the name, arguments and description of a prompt; optional arguments end in ``?``."""
    named = [f"{one['name']}{'' if one.get('required') else '?'}" for one in prompt.get("arguments") or ()]
    return clean_server_text(f"- {prompt['name']}({', '.join(named)}): {prompt.get('description') or ''}")
