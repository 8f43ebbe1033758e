"""
What is wrong in the lists and results of a server costs that tool, prompt or block, and never the run.

The server sends each reply as it is written here: the package would not let it be made.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from stepengine import AgentDefinition, Engine, RunStatus
from stepengine.adapters.mcp import mcp_tools
from stepengine.events import LogLine
from stepengine.testing import ScriptedModel, tool_call

LOOK = {"name": "look", "description": "Look.", "inputSchema": {"type": "object", "properties": {}}}
SEEN = {"content": [{"type": "text", "text": "seen"}]}
HALF = "\ud83d"
"""Half of a character, as JavaScript leaves it where it cuts a text."""


def deep(levels: int) -> Any:
    return json.loads('{"type":"object","properties":{"a":' * levels + "{}" + "}}" * levels)


def with_inputs(**schema: Any) -> dict[str, Any]:
    return {"inputSchema": {"type": "object", **schema}}


async def run(odd: Any, tmp_path: Path, replies: dict[str, Any], *calls: Any, **options: Any) -> Any:
    """
    Run an agent with the tools of a server that gives these replies; return the result, the last requests and the log.
    """
    file, lines = tmp_path / "replies.json", list[str]()
    file.write_text(json.dumps({name: json.dumps(reply) for name, reply in replies.items()}))

    def note(event: Any) -> None:
        if isinstance(event, LogLine):
            lines.append(event.message)

    model = ScriptedModel([*calls, "ok"])
    agent = AgentDefinition("worker", model="test/model", tools=[odd("given", str(file), **options)])
    async with Engine([agent], models=model, observers=[note]) as engine:
        result = await engine.run("worker", "Go.", journal=str(tmp_path / "run.jsonl"))
        said = [*lines]
        assert [one.result for one in (await engine.replay(tmp_path / "run.jsonl")).tool_calls] == [
            one.result for one in result.tool_calls
        ]
    return result, model, said


WRONG_TOOLS: dict[str, tuple[Any, str]] = {
    "properties-null": (with_inputs(properties=None), "its 'properties' are None"),
    "properties-list": (with_inputs(properties=[]), "inputSchema.properties"),
    "parameter-null": (with_inputs(properties={"a": None}), "inputSchema.properties.a"),
    "required-null": (with_inputs(required=None), "#/required: None"),
    "type-unknown": (with_inputs(properties={"a": {"type": "any"}}), "'any' is not a type"),
    "reference-null": (with_inputs(properties={"a": {"$ref": None}}), "None does not fit the keyword"),
    "reference-lost": (with_inputs(properties={"a": {"$ref": "#/$defs/A"}}), "'#/$defs/A' does not exist"),
    "schema-null": ({"inputSchema": None}, "inputSchema"),
    "schema-deep": (with_inputs(properties={"a": deep(150)}), "nested more than 32 deep"),
    "schema-large": (with_inputs(properties={"a": {"description": "x" * 70_000}}), "more than 64 KiB"),
    "name-number": ({"name": 5}, "name: Input should be a valid string"),
    "name-empty": ({"name": ""}, "its name is empty"),
    "name-half": ({"name": HALF}, "has an invalid character"),
    "output-list": ({"outputSchema": []}, "outputSchema"),
    "execution-odd": ({"execution": {"taskSupport": 5}}, "execution.taskSupport"),
}
ODD_TOOLS: dict[str, Any] = {
    "recursive": with_inputs(properties={"a": {"$ref": "#"}}),
    "itself": with_inputs(properties={"a": {"$ref": "#/properties/a"}}),
    "any": with_inputs(properties={"a": True}),
    "pattern": with_inputs(properties={"a": {"pattern": "(?=x)"}}),
    "described": {"description": f"Half {HALF} of it."},
    "promised": {"outputSchema": {"type": "object", "properties": None}},
    "promised-deep": {"outputSchema": deep(150)},
}
"""What is odd and can be used."""


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("interfaces:IF62", "interfaces:IF61")
async def test_invalid_tool_is_left_out_alone_with_a_reason(odd: Any, tmp_path: Path) -> None:
    wrong = [{**LOOK, "name": name, **change} for name, (change, _) in WRONG_TOOLS.items()]
    fine = [{**LOOK, "name": name, **change} for name, change in ODD_TOOLS.items()]
    tools = [*wrong, None, "no tool", LOOK, {**LOOK, "title": "another"}, *fine]

    result, model, lines = await run(
        odd, tmp_path, {"tools/list": {"tools": tools}, "look": SEEN}, tool_call("odd__look", {})
    )

    assert RunStatus.COMPLETED is result.status
    assert ["seen"] == [one.result.text for one in result.tool_calls]
    assert {"odd__look", *[f"odd__{name}" for name in ODD_TOOLS]} == {one.name for one in model.calls[0].tools}
    assert len(wrong) + 3 == len(lines)
    for (name, (change, why)), line in zip(WRONG_TOOLS.items(), lines, strict=False):
        assert repr("?" if change.get("name") == 5 else change.get("name", name).replace(HALF, "\ufffd")) in line
        assert why in line
    assert {True} == {"The MCP server 'odd'" in line and "exclude=" in line for line in lines}


RESULTS: dict[str, tuple[Any, str, str]] = {
    "value": ({"structuredContent": {"a": 1}}, "ok", '{"a":1}'),
    "list": ({**SEEN, "structuredContent": [1, 2]}, "ok", "[1,2]seen"),
    "number": ({"structuredContent": {"a": 2**70}}, "ok", '{"a":1180591620717411303424}'),
    "unknown": (
        {"content": [*SEEN["content"], {"type": "video", "mimeType": "video/mp4"}]}, "ok", "seen[video of the type video/mp4 was left out]",
    ),
    "unknown-text": ({"content": [{"type": "markdown", "text": "seen"}]}, "ok", '["markdown", shown as text] seen'),
    "untyped": ({"content": [{"text": "seen"}]}, "ok", "seen"),
    "null": ({"content": [*SEEN["content"], None]}, "ok", "seen[null is no block of content, so it was left out]"),
    "image": (
        {"content": [*SEEN["content"], {"type": "image", "data": 5, "mimeType": "image/png"}]}, "ok",
        "seen[a block of the type 'image' has no text as its 'data', so it was left out]",
    ),
    "resource": (
        {"content": [*SEEN["content"], {"type": "resource", "resource": "x"}]}, "ok",
        "seen[a resource has neither a text nor a blob, so it was left out]",
    ),
    "annotated": ({"content": [{**SEEN["content"][0], "annotations": 5, "_meta": []}]}, "ok", "seen"),
    "text": ({"content": "seen"}, "ok", "seen"),
    "nothing": ({}, "ok", ""),
    "other": ({"toolResult": "seen"}, "ok", '{"toolResult":"seen"}'),
    "meta": ({**SEEN, "_meta": 5}, "ok", "seen"),
    "no-error-text": ({"content": [*SEEN["content"], 5], "isError": "false"}, "ok", "seen[5 is no block of content, so it was left out]"),
    "error": ({**SEEN, "isError": {"code": 7}}, "error", 'seen\n[isError is {"code": 7}, which is taken for an error]'),
    "unread": (
        {"content": [{"type": "text", "text": 5}]}, "error",
        "the call was carried out, but nothing of its result can be read:\n[a block of the type 'text' has no text as its 'text', so it was left out]",
    ),
    "broken-promise": (
        {"content": [*SEEN["content"], 5]}, "error",
        (
            "the result is not what 'odd__broken-promise' promises: it promises structured content, and gave none\n"
            "The call was carried out, and gave: seen[5 is no block of content, so it was left out]"
        ),
    ),
}  # fmt: skip


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:MC10", "interfaces:IF62")
async def test_invalid_result_is_shown_as_far_as_readable(odd: Any, tmp_path: Path) -> None:
    """The call was carried out, so nobody is told that it failed because of the form of its result."""
    tools = [{**LOOK, "name": name} for name in RESULTS]
    tools[-1]["outputSchema"] = {"type": "object"}
    replies = {"tools/list": {"tools": tools}, **{name: given for name, (given, _, _) in RESULTS.items()}}

    result, _, _ = await run(odd, tmp_path, replies, *[tool_call(f"odd__{name}", {}) for name in RESULTS])

    seen = [(one.result.status, one.result.text) for one in result.tool_calls]
    assert {name: (status, said) for name, (_, status, said) in RESULTS.items()} == dict(
        zip(RESULTS, seen, strict=True)
    )


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("interfaces:IF62", "reliability:MC10")
async def test_invalid_prompts_and_resources_are_left_out_alone(odd: Any, tmp_path: Path) -> None:
    ask = {"name": "ask"}
    replies = {
        "tools/list": {"tools": [LOOK]},
        "prompts/list": {"prompts": [{"name": "odd", "arguments": 5}, None, {"name": ""}, ask, {**ask, "title": "x"}]},
        "prompts/get": {"messages": ["hi", None, {"role": "user", "content": [{"type": "text", "text": "you"}]}]},
        "resources/list": {"resources": [{"name": "lost"}, {"uri": "a://b", "name": "b"}]},
        "resources/templates/list": {"resourceTemplates": []},
        "resources/read": {"contents": [None, {"text": "seen", "mimeType": 5}]},
    }
    calls = [
        tool_call("mcp_prompt_odd", {"name": "ask"}),
        tool_call("mcp_resources_odd", {}),
        tool_call("mcp_read_odd", {"uri": "a://b"}),
    ]

    result, _, lines = await run(odd, tmp_path, replies, *calls, prompts=True, resources=True)

    got, listed, read = [one.result for one in result.tool_calls]
    assert "?: hi?: [null is no block of content, so it was left out]user: you" == got.text
    assert [("b", None), ("lost", "it is not what the protocol knows: uri: Field required")] == [
        (one["name"], one.get("left_out")) for one in listed.data
    ]
    assert "[a resource has neither a text nor a blob, so it was left out]seen" == read.text
    assert ["'odd'", "'?'", "''", "'ask'"] == [line.partition("the prompt ")[2].partition(":")[0] for line in lines]


@pytest.mark.parametrize("prompts", [None, {}, "ask"])
async def test_invalid_prompt_list_loses_only_the_prompts(odd: Any, tmp_path: Path, prompts: Any) -> None:
    replies = {"tools/list": {"tools": [LOOK]}, "prompts/list": {"prompts": prompts}}

    result, model, lines = await run(odd, tmp_path, replies, prompts=True)

    assert RunStatus.COMPLETED is result.status
    assert ["odd__look"] == [one.name for one in model.calls[0].tools]
    assert ["its prompts"] == [line.partition("left out: ")[2].partition(":")[0] for line in lines]


@pytest.mark.parametrize("kind", ["application/json", "text/event-stream"])
@pytest.mark.spec("interfaces:IF62", "reliability:MC10")
async def test_invalid_tool_over_http_is_left_out_alone(kind: str) -> None:
    tools = [{**LOOK, "name": "deep", **with_inputs(properties={"a": deep(150)})}, {**LOOK, "description": HALF}]
    about = {
        "protocolVersion": "2025-11-25",
        "capabilities": {"tools": {}},
        "serverInfo": {"name": "o", "version": "1"},
    }
    replies = {"initialize": about, "tools/list": {"tools": tools}, "tools/call": {"structuredContent": [1]}}

    async def serve(reader: Any, writer: Any) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        status, body = b"405 Method Not Allowed", b""
        if head.startswith(b"post"):
            asked = json.loads(await reader.readexactly(int(head.partition(b"content-length:")[2].split()[0])))
            status = b"200 OK" if "id" in asked else b"202 Accepted"
            reply = {"jsonrpc": "2.0", "id": asked.get("id"), "result": replies.get(asked["method"], {})}
            body = json.dumps(reply).encode() if "id" in asked else b""
        if body and kind != "application/json":
            body = b"event: message\ndata: " + body + b"\n\n"
        length = str(len(body)).encode()
        writer.write(b"HTTP/1.1 %s\r\ncontent-type: %s\r\ncontent-length: %s\r\n" % (status, kind.encode(), length))
        writer.write(b"connection: close\r\n\r\n" + body)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/mcp"
        source = mcp_tools(url, name="far", protocol="legacy")
        model = ScriptedModel([tool_call("far__look", {}), "ok"])
        async with Engine([AgentDefinition("worker", model="test/model", tools=[source])], models=model) as engine:
            result = await engine.run("worker", "Go.")

    assert ["far__look"] == [one.name for one in model.calls[0].tools]
    assert [("ok", "[1]")] == [(one.result.status, one.result.text) for one in result.tool_calls]
