"""The table of ``docs/reference/model-settings.md``: what each setting becomes on each wire, read from encoded bodies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest

from stepengine.data.messages import UserMessage
from stepengine.data.models import ModelReply, ModelRequest, ModelSettings
from stepengine.data.tools import ToolSpec
from stepengine.data.transcript import Transcript
from stepengine.errors import ModelError
from stepengine.models import CodeExecution, FileSearch, Programs, UrlContext, WebSearch
from tests.models.wires import provider_of

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "model-settings.md"
BEGIN, END = "<!-- table of settings -->\n", "<!-- end of the table -->\n"
SCHEMA = {
    "type": "object",
    "properties": {"at": {"type": "string"}},
    "required": ["at"],
    "additionalProperties": False,
}
MAP = {"type": "object", "additionalProperties": {"type": "string"}}
TOOLS = (ToolSpec("look", "Looks.", SCHEMA), ToolSpec("hear", "Hears.", SCHEMA))
MODELS = {
    "anthropic": "claude-sonnet-5",
    "openai": "gpt-5",
    "openai_chat": "gpt-5",
    "google": "gemini-3-pro",
    "openrouter": "anthropic/claude-sonnet-5",
    "deepseek": "deepseek-v4",
    "mistral": "mistral-large-latest",
    "ollama": "llama3",
    "bedrock_converse": "amazon.nova-2-lite-v1:0",
    "google_interactions": "gemini-3-pro",
}
ROWS: dict[str, dict[str, Any]] = {
    "`temperature`": {"temperature": 0.5},
    "`top_p`": {"top_p": 0.5},
    "`max_tokens`": {"max_tokens": 50},
    "`stop_sequences`": {"stop_sequences": ["STOP"]},
    '`tool_choice="none"`': {"tool_choice": "none"},
    '`tool_choice="required"`': {"tool_choice": "required"},
    '`tool_choice="look"`': {"tool_choice": "look"},
    "`parallel_tool_calls=False`": {"parallel_tool_calls": False},
    "`response_schema`": {"response_schema": SCHEMA},
    '`response_schema, output="tool"`': {"response_schema": SCHEMA, "output": "tool"},
    "`response_schema`, a map": {"response_schema": MAP},
    '`service_tier="standard"`': {"service_tier": "standard"},
    '`service_tier="flex"`': {"service_tier": "flex"},
    '`service_tier="priority"`': {"service_tier": "priority"},
    '`service_tier="fast"`': {"service_tier": "fast"},
    "`seed=7`": {"seed": 7},
    "`logprobs=2`": {"logprobs": 2},
    "`store=True`": {"store": True},
    '`safety={"harassment": "only_high"}`': {"safety": {"harassment": "only_high"}},
    '`cache="5m"`': {"cache": "5m"},
    '`cache="1h"`': {"cache": "1h"},
    '`cache="off"`': {"cache": "off"},
    '`cache_key="docs"`': {"cache_key": "docs"},
    '`fallbacks=["claude-opus-4-8"]`': {"fallbacks": ["claude-opus-4-8"]},
    '`fallbacks="default"`': {"fallbacks": "default"},
    "`WebSearch()`": {"server_tools": [WebSearch()]},
    "`WebSearch(max_uses=3)`": {"server_tools": [WebSearch(max_uses=3)]},
    '`WebSearch(allowed_domains="a.org")`': {"server_tools": [WebSearch(allowed_domains="a.org")]},
    '`WebSearch(location={"city": "Bonn"})`': {"server_tools": [WebSearch(location={"city": "Bonn"})]},
    "`UrlContext()`": {"server_tools": [UrlContext()]},
    "`CodeExecution()`": {"server_tools": [CodeExecution()]},
    '`Programs("hear")`': {"server_tools": [Programs("hear")]},
    '`FileSearch("store")`': {"server_tools": [FileSearch("store")]},
    '`extra={"top_k": 7}`': {"extra": {"top_k": 7}},
    '`extra={"background": True}`': {"extra": {"background": True}},
}


def request(name: str, tools: tuple[ToolSpec, ...] = TOOLS, **settings: Any) -> ModelRequest:
    history = Transcript([UserMessage("hi")])
    return ModelRequest(f"{name}/{MODELS[name]}", "Be good.", history, tools, settings=ModelSettings(**settings))


def body(name: str, asked: ModelRequest) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(provider_of(name)._encode(asked, stream=False).content)
    config = found.get("toolConfig", {})
    return {**found, "tools": config.pop("tools")} if "tools" in config else found


def difference(before: Any, after: Any, path: str = "") -> dict[str, Any]:
    """What *after* says that *before* does not, by the path of the member; tools count by their number and marks."""
    found: dict[str, Any] = {}
    for key, value in after.items():
        old = before.get(key)
        if isinstance(value, dict) and isinstance(old, dict):
            found |= difference(old, value, f"{path}{key}.")
        elif value != old:
            found[f"{path}{key}"] = value
    return found


def shown(value: Any) -> str:
    """A value in a few words: its first members, a schema as what it is."""
    if value == SCHEMA:
        return "schema"
    if value == {}:
        return "{}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {shown(inner)}" for key, inner in value.items())
    return ", ".join(map(shown, value)) if isinstance(value, list) else json.dumps(value).strip('"')


def cell(name: str, **settings: Any) -> str:
    """What becomes of *settings*: what is sent for them, how else they are kept, or that they are not."""
    plain, asked = request(name), request(name, **settings)
    provider = provider_of(name)
    try:
        before, after = body(name, plain), body(name, asked)
    except ModelError:
        return "error"
    said = [f"`{key}: {shown(value)}`" for key, value in changes(before, after).items()]
    dropped = provider._list_unsupported_settings(asked)
    if not said and not dropped:
        kept = provider._postprocess_reply(ModelReply("a STOP b"), asked)
        return (
            "cut here"
            if kept.text != "a STOP b"
            else "by itself"
            if set(settings) <= {"cache", "service_tier"}
            else "not sent"
        )
    return "; ".join([*said, *(["dropped"] if dropped and not said else [f"without {word}" for word in dropped])])


def changes(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """What is different in *after*, the tools shown by what is new or missing among them."""
    tools = [entry for data in (before, after) for entry in [data.pop("tools", None)]]
    changed = difference(before, after)
    if tools[0] != tools[1]:
        old, new = [functions(entry or []) for entry in tools]
        if len(new) > len(old):  # a mark of the last one that moved says nothing
            old, new = [[{**tool, "cache_control": None} for tool in side] for side in (old, new)]
        added = [{name: value for name, value in tool.items() if value is not None} for tool in new if tool not in old]
        changed["tools"] = [f"only {len(new)}" if new else "none"] if not added else [named(tool) for tool in added]
    return changed


def functions(tools: list[Any]) -> list[Any]:
    """Tools in a row, also those that a wire puts together."""
    return [inner for tool in tools for inner in tool.get("functionDeclarations", [tool])]


def named(tool: dict[str, Any]) -> str:
    """A tool by what tells it from others."""
    function = tool.get("toolSpec") or tool.get("function", tool)
    if "description" not in function:
        return shown(tool)
    return shown(
        {name: function[name] for name in ("name", "strict", "allowed_callers", "cache_control") if name in function}
    )


def strict_cell(name: str) -> str:
    tools = tuple([attrs.evolve(tool, strict=True) for tool in TOOLS[:1]])
    plain = body(name, request(name, TOOLS[:1]))
    strict = body(name, asked := request(name, tools))
    said = difference(plain.pop("tools")[0], strict.pop("tools")[0]) | difference(plain, strict)
    told = [f"`{key}: {shown(value)}`" for key, value in said.items()]
    return (
        "; ".join([*told, *(["dropped"] if "strict" in provider_of(name)._list_unsupported_settings(asked) else [])])
        or "not sent"
    )


def table() -> str:
    lines = [["", *MODELS], ["---"] * (len(MODELS) + 1)]
    lines += [[row, *(cell(name, **settings) for name in MODELS)] for row, settings in ROWS.items()]
    lines.append(["`@tool(strict=True)`", *(strict_cell(name) for name in MODELS)])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


@pytest.mark.spec(
    "requirements:A15", "requirements:A16", "ecosystem:EC84", "providers:PV65", "providers:PV66", "providers:PV67"
)
def test_settings_table_of_the_page_matches_the_encoders():
    found = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0].strip()
    assert found == table().strip(), f"put this between the marks of {PAGE.name}:\n{table()}"
    assert "not sent" not in found
