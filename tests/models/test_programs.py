"""Programs that a model writes and its provider runs: they call tools of the agent, wait for them, and are gone on with or given up."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import attrs
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stepengine import AgentDefinition, Engine, ModelSettings, RetryPolicy, tool
from stepengine.data.messages import AssistantMessage, OpaquePart, ToolMessage, UserMessage
from stepengine.data.models import ModelRequest, Thinking
from stepengine.data.tools import ToolSpec
from stepengine.data.transcript import Transcript
from stepengine.errors import DefinitionError, ModelError
from stepengine.models import (
    AnthropicProvider,
    CodeExecution,
    GoogleProvider,
    Models,
    OpenAIChatProvider,
    OpenAIProvider,
    Programs,
)
from stepengine.models._failures import LOST_PROGRAM
from stepengine.models.anthropic.decode import decode
from stepengine.models.anthropic.request import encode_provider_settings
from stepengine.models.clouds import FOUNDRY, MANTLE, RUNTIME, VERTEX
from tests.faults.server import Rule, fault_server
from tests.models.wires import TOOL, made, provider_of

CLAUDE, GPT = "claude-sonnet-5", "gpt-5.6"
PROGRAM = "code_execution_20260120"
FIND = ToolSpec("find", "Finds.", TOOL.input_schema, strict=True)
CALLER = {"type": PROGRAM, "tool_id": "srvtoolu_1"}
CODE = {"type": "server_tool_use", "id": "srvtoolu_1", "name": "code_execution", "input": {"code": "await look('1')"}}
RAN = {
    "type": "code_execution_tool_result",
    "tool_use_id": "srvtoolu_1",
    "content": {"type": "code_execution_result", "stdout": "saw 1\n", "stderr": "", "return_code": 0, "content": []},
}


def claude(*blocks: dict[str, Any], stop: str = "end_turn", container: str = "") -> dict[str, Any]:
    where = {"container": {"id": container, "expires_at": "2026-11-22T10:00:00Z"}} if container else {}
    usage = {"input_tokens": 20, "output_tokens": 5}
    return {"id": "msg_1", "role": "assistant", "model": CLAUDE, "content": [*blocks], "stop_reason": stop, "usage": usage, **where}  # fmt: skip


def use(number: int = 1, **more: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"toolu_{number}", "name": "look", "input": {"at": str(number)}, **more}


def said(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


# --- what is offered --------------------------------------------------------------------------------------------------


def body(name: str, *messages: Any, model: str = "", **fields: Any) -> dict[str, Any]:
    model = model or (CLAUDE if name == "anthropic" else GPT)
    request = ModelRequest(f"{name}/{model}", "", Transcript(messages or [UserMessage("hi")]), (TOOL, FIND), **fields)
    return json.loads(provider_of(name)._encode(request, stream=False).content)


WORDS = {"anthropic": PROGRAM, "openai": "programmatic"}
RUNNER = {
    "anthropic": {"type": PROGRAM, "name": "code_execution"},
    "openai": {"type": "programmatic_tool_calling"},
}


@pytest.mark.spec("providers:PV121")
@pytest.mark.parametrize("name", WORDS)
def test_tool_lists_its_allowed_callers_only_for_programs(name) -> None:
    word = WORDS[name]
    for programs, look in ((Programs("look"), [word]), (Programs("look", direct="look"), ["direct", word])):
        tools = body(name, settings=ModelSettings(server_tools=[programs]))["tools"]
        callers = {tool["name"]: tool.get("allowed_callers") for tool in tools if tool.get("name") in {"look", "find"}}

        assert {"look": look, "find": None} == callers
        assert [RUNNER[name]] == [tool for tool in tools if tool.get("name") not in {"look", "find"}]
    plain = body(name)["tools"]
    assert all("allowed_callers" not in tool for tool in plain)


@pytest.mark.spec("providers:PV121")
def test_claude_programs_share_one_container_and_drop_strict_tools():
    settings = ModelSettings(server_tools=[CodeExecution(), Programs(["look", "find"])], parallel_tool_calls=False)
    found = body("anthropic", settings=settings)
    strict = [tool["name"] for tool in body("anthropic")["tools"] if tool.get("strict")]

    assert [RUNNER["anthropic"]] == [tool for tool in found["tools"] if tool["name"] == "code_execution"]
    assert ["find"] == strict
    assert not any("strict" in tool for tool in found["tools"])
    assert "tool_choice" not in found
    request = ModelRequest(f"anthropic/{CLAUDE}", "", Transcript([UserMessage("hi")]), (TOOL, FIND), settings=settings)
    assert {"strict", "parallel_tool_calls"} == set(AnthropicProvider("k")._list_unsupported_settings(request))


REFUSED: dict[str, tuple[Callable[[], Any], str, str]] = {
    "does not offer this tool": (lambda: GoogleProvider("k"), "google/gemini-3-pro", "look"),
    "does not offer this tool for it": (
        lambda: OpenAIChatProvider("openrouter", "k"),
        "openrouter/openai/gpt-5",
        "look",
    ),
    "xai does not offer this tool": (lambda: OpenAIProvider("k", name="xai"), "xai/grok-4", "look"),
    "only Claude 4.5 and newer models can call tools from programs": (
        lambda: AnthropicProvider("k"),
        "anthropic/claude-sonnet-4-0",
        "look",
    ),
    "none of 'lok' is among the agent's tools: 'look', 'find'": (
        lambda: AnthropicProvider("k"),
        f"anthropic/{CLAUDE}",
        "lok",
    ),
    "none of 'lok' is among": (lambda: OpenAIProvider("k"), f"openai/{GPT}", "lok"),
}


@pytest.mark.spec("providers:PV121", "providers:PV56")
@pytest.mark.parametrize("words", REFUSED)
def test_programs_are_refused_early_where_unsupported_or_without_tools(
    words,
) -> None:
    make, model, name = REFUSED[words]
    settings = ModelSettings(server_tools=[Programs(name)])
    request = ModelRequest(model, "", Transcript([UserMessage("hi")]), (TOOL, FIND), settings=settings)
    with pytest.raises(ModelError, match=words) as caught:
        make()._encode(request, stream=False)

    assert "settings" == caught.value.kind


@pytest.mark.spec("providers:PV121")
@pytest.mark.parametrize(("site", "runs"), [(RUNTIME, False), (MANTLE, False), (VERTEX, False), (FOUNDRY, True)])
def test_of_the_clouds_only_foundry_runs_programs_of_claude(site, runs) -> None:
    settings = ModelSettings(server_tools=[Programs("look")])
    request = ModelRequest(f"anthropic/{CLAUDE}", "", Transcript([UserMessage("hi")]), (TOOL,), settings=settings)
    if runs:
        assert [RUNNER["anthropic"]] == encode_provider_settings(request, CLAUDE, site).members["tools"]
        return
    with pytest.raises(ModelError, match=f"{site.name} does not offer this tool"):
        encode_provider_settings(request, CLAUDE, site)


def test_directly_called_tools_must_be_program_tools() -> None:
    with pytest.raises(DefinitionError, match="names 'find', which is not among"):
        Programs("look", direct=["find"])


# --- whole runs against servers that keep the providers' rules -----------------------------------------------------------


def encoded(reply: dict[str, Any]) -> bytes:
    return json.dumps(reply).encode()


def rules_of_claude(asked: dict[str, Any]) -> str:
    messages = asked["messages"]
    uses = {block["id"] for m in messages for block in m["content"] if block["type"] == "server_tool_use"}
    ended = {b["tool_use_id"] for m in messages for b in m["content"] if b["type"].endswith("execution_tool_result")}
    calls = [block for m in messages for block in m["content"] if block["type"] == "tool_use"]
    callers = {call["caller"]["tool_id"] for call in calls if "caller" in call}
    last = messages[-2]["content"] if len(messages) > 1 else []
    waits = {block["caller"]["tool_id"] for block in last if "caller" in block and block["type"] == "tool_use"}
    if [m["role"] for m in messages] != ["user", "assistant"] * (len(messages) // 2) + ["user"]:
        return "roles must alternate"
    if not callers <= uses or not ended <= uses:
        return "no such server_tool_use"
    if not uses <= ended | waits:
        return "server_tool_use without a result"
    if waits and asked.get("container") != "c1":
        return "container_id is required when there are pending tool uses generated by code execution with tools."
    if waits and any(block["type"] != "tool_result" for block in messages[-1]["content"]):
        return "only tool_result blocks may answer calls of a program"
    return ""


def gpt(*items: dict[str, Any]) -> dict[str, Any]:
    usage = {"input_tokens": 20, "output_tokens": 5, "total_tokens": 25}
    return {"id": "resp_1", "model": GPT, "status": "completed", "output": items, "usage": usage}


FIRST = {
    "type": "program",
    "id": "prog_1",
    "call_id": "call_p",
    "code": "await tools.look({at: '1'})",
    "fingerprint": "f",
}
CALL = {
    "type": "function_call",
    "id": "fc_1",
    "call_id": "call_1",
    "name": "look",
    "arguments": '{"at":"1"}',
    "caller": {"type": "program", "caller_id": "call_p"},
    "status": "completed",
}
OVER = {"type": "program_output", "id": "po_1", "call_id": "call_p", "result": "saw 1", "status": "completed"}


def text_item(text: str, number: int) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"type": "message", "id": f"msg_{number}", "role": "assistant", "status": "completed", "content": content}


def rules_of_gpt(asked: dict[str, Any]) -> str:
    items = asked["input"]
    programs = {item["call_id"] for item in items if item.get("type") == "program" and item["fingerprint"] == "f"}
    calls = {item["call_id"]: item.get("caller") for item in items if item.get("type") == "function_call"}
    outputs = {item["call_id"]: item.get("caller") for item in items if item.get("type") == "function_call_output"}
    if any(caller["caller_id"] not in programs for caller in calls.values() if caller):
        return "the program of a call is missing"
    return "" if calls == outputs else "an output says another caller than its call"


@tool
def look(at: str) -> str:
    """Look at something."""
    return f"saw {at}"


async def ran(provider: Any, model: str, *prompts: str) -> Any:
    settings = ModelSettings(server_tools=[Programs("look")])
    agent = AgentDefinition("a", model=model, tools=[look], settings=settings)
    models = Models({model.partition("/")[0]: provider})
    async with Engine([agent], models=models, retry=RetryPolicy(attempts=2, base_seconds=0)) as engine:
        result = None
        for prompt in prompts:
            result = await engine.run("a", prompt, previous=None if result is None else result.state)
            result.unwrap()
    return result


@pytest.mark.anyio
@pytest.mark.spec("providers:PV121", "providers:PV79")
async def test_claude_program_resumes_in_its_container_and_returns_unchanged() -> None:
    replies = [
        claude(said("I look."), CODE, use(1, caller=CALLER), stop="tool_use", container="c1"),
        claude(RAN, said("I saw 1."), container="c1"),
        claude(said("You are welcome.")),
    ]
    async with fault_server(rules := Rule(*map(encoded, replies), rules=(rules_of_claude,))) as server:
        result = await ran(AnthropicProvider("k", server.url), f"anthropic/{CLAUDE}", "Look.", "Thanks.")
    assert [] == rules.refused
    assert [None, "c1", None] == [asked.get("container") for asked in rules.bodies]
    history = rules.bodies[-1]["messages"]
    assert [said("I look."), CODE, use(1, caller=CALLER)] == history[1]["content"]
    assert [RAN, said("I saw 1.")] == history[3]["content"]
    assert result.cost > 0
    shown = [p.text for m in result.state.message_history for p in m.content if isinstance(p, OpaquePart)]
    assert ["await look('1')", "saw 1"] == shown


@pytest.mark.anyio
@pytest.mark.spec("providers:PV121", "reliability:MP60")
async def test_lost_container_ends_the_program_and_renders_its_results() -> None:
    replies = [
        claude(CODE, use(1, caller=CALLER), stop="tool_use", container="gone"),
        claude(said("I saw 1.")),
        claude(said("You are welcome.")),
    ]
    async with fault_server(rules := Rule(*map(encoded, replies), rules=(rules_of_claude,))) as server:
        result = await ran(AnthropicProvider("k", server.url), f"anthropic/{CLAUDE}", "Look.", "Thanks.")
    assert "You are welcome." == result.text
    assert 1 == len(rules.refused)
    assert "The tool look was called with" in json.dumps(rules.bodies[2])
    assert "saw 1" in json.dumps(rules.bodies[2])
    assert rules.bodies[2]["messages"] == rules.bodies[3]["messages"][:1]


@pytest.mark.anyio
@pytest.mark.spec("providers:PV121", "providers:PV58")
async def test_openai_program_returns_with_fingerprint_and_callers() -> None:
    replies = [gpt(FIRST, CALL), gpt(OVER, text_item("I saw 1.", 1)), gpt(text_item("You are welcome.", 2))]
    async with fault_server(rules := Rule(*map(encoded, replies), rules=(rules_of_gpt,))) as server:
        result = await ran(OpenAIProvider("k", server.url), f"openai/{GPT}", "Look.", "Thanks.")
    assert [] == rules.refused
    items = rules.bodies[-1]["input"]
    assert [FIRST, OVER] == [item for item in items if item.get("type") in {"program", "program_output"}]
    assert [CALL["caller"]] * 2 == [item["caller"] for item in items if "caller" in item]
    shown = [p.text for m in result.state.message_history for p in m.content if isinstance(p, OpaquePart)]
    assert ["await tools.look({at: '1'})", "saw 1"] == shown


# --- any conversation -------------------------------------------------------------------------------------------------


def reply_of(message: dict[str, Any], number: int, model: str) -> AssistantMessage:
    reply = decode(message, made("anthropic", model), model, None)
    parts = [attrs.evolve(p, tool_call_id=f"c{number}") if hasattr(p, "tool_call_id") else p for p in reply.content]
    return AssistantMessage(parts)


STEPS = st.lists(st.sampled_from(["program", "again", "end", "plain", "user", "call"]), max_size=9)


def conversation(steps: list[str], model: str) -> list[Any]:
    """Messages as runs make them: programs that wait, go on, end, or are spoken over."""
    messages: list[Any] = [UserMessage("Look.")]
    open_program, count = "", 0
    for count, step in enumerate(steps):
        name = f"srvtoolu_{count}"
        caller = {"caller": {"type": PROGRAM, "tool_id": open_program}}
        if step == "program":
            open_program = name
            blocks = [{**CODE, "id": name}, use(count, caller={"type": PROGRAM, "tool_id": name})]
        elif step == "again" and open_program:
            blocks = [use(count, **caller)]
        elif step == "end" and open_program:
            blocks, open_program = [{**RAN, "tool_use_id": open_program}, said("Done.")], ""
        elif step == "call":
            blocks, open_program = [use(count)], ""
        elif step == "plain":
            blocks, open_program = [said("Well.")], ""
        else:
            messages.append(UserMessage(f"Word {count}."))
            open_program = ""
            continue
        calls = any(block["type"] == "tool_use" for block in blocks)
        messages.append(
            reply_of(claude(*blocks, stop="tool_use" if calls else "end_turn", container="c1"), count, model)
        )
        messages += [ToolMessage(f"c{count}", "look", [f"saw {count}"])] if calls else []
    return messages


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("providers:PV121", "ecosystem:EC83")
@example(steps=["program", "user"], tail=False, lost=False, thinks=False, model=CLAUDE)
@example(steps=["program", "again", "program"], tail=True, lost=False, thinks=False, model=CLAUDE)
@example(
    steps=["program", "user", "again", "end", "plain"], tail=False, lost=False, thinks=True, model="claude-sonnet-4-5"
)
@given(
    steps=STEPS,
    tail=st.booleans(),
    lost=st.booleans(),
    thinks=st.booleans(),
    model=st.sampled_from([CLAUDE, "claude-sonnet-4-5"]),
)
def test_any_program_history_keeps_the_rules_and_loses_no_results(steps, tail, lost, thinks, model) -> None:
    messages = conversation(steps, model)
    settings = ModelSettings(
        server_tools=[Programs("look")], thinking=Thinking("extended", 2_000) if thinks else None, max_tokens=9_000
    )
    request = ModelRequest(
        f"anthropic/{model}",
        "",
        Transcript(messages),
        (TOOL,),
        settings=settings,
        tail=(UserMessage("Mind the time."),) if tail else (),
    )
    provider = AnthropicProvider("k")
    asked = json.loads(provider._encode(request, stream=False, previous_failure=LOST_PROGRAM if lost else "").content)

    for message in asked["messages"]:
        for block in message["content"]:
            if block["type"] == "tool_use" and not thinks:
                assert any(f"saw {block['input']['at']}" in json.dumps(m) for m in asked["messages"])
    words = json.dumps(asked["messages"])
    for number in range(len(steps)):
        if f"Word {number}." in str(messages):
            assert f"Word {number}." in words
        if f"saw {number}" in str(messages):
            assert f"saw {number}" in words
    assert not lost or "container" not in asked
    if "container" not in asked:
        assert not tail or "Mind the time." in words
    else:
        assert {"tool_result"} == {block["type"] for block in asked["messages"][-1]["content"]}
    assert "" == rules_of_claude(asked)
