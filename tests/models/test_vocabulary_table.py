"""The table of ``docs/models.md``: what each setting becomes on each wire, read from encoded bodies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest

from stepengine.data.messages import UserMessage
from stepengine.data.models import ModelReply, ModelRequest, ModelSettings, Thinking
from stepengine.data.tools import ToolSpec
from stepengine.data.transcript import Transcript
from stepengine.errors import ModelError
from tests.models.wires import provider_of

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- table of settings -->\n", "<!-- end of the table -->\n"
SCHEMA = {
    "type": "object",
    "properties": {"at": {"type": "string"}},
    "required": ["at"],
    "additionalProperties": False,
}
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
}
ROWS: dict[str, dict[str, Any]] = {
    '`Thinking("none")`': {"thinking": Thinking("none")},
    '`Thinking("low")`': {"thinking": Thinking("low")},
    '`Thinking("max")`': {"thinking": Thinking("max")},
    "`Thinking(tokens=4_000)`": {"thinking": Thinking(tokens=4_000)},
    '`Thinking("low", show=False)`': {"thinking": Thinking("low", show=False)},
    "`temperature`": {"temperature": 0.5},
    "`top_p`": {"top_p": 0.5},
    "`max_tokens`": {"max_tokens": 50},
    "`stop_sequences`": {"stop_sequences": ["STOP"]},
    '`tool_choice="none"`': {"tool_choice": "none"},
    '`tool_choice="required"`': {"tool_choice": "required"},
    '`tool_choice="look"`': {"tool_choice": "look"},
    "`parallel_tool_calls=False`": {"parallel_tool_calls": False},
    "`response_schema`": {"response_schema": SCHEMA},
    '`extra={"seed": 7}`': {"extra": {"seed": 7}},
    '`extra={"background": True}`': {"extra": {"background": True}},
}


def request(name: str, tools: tuple[ToolSpec, ...] = TOOLS, **settings: Any) -> ModelRequest:
    history = Transcript([UserMessage("hi")])
    return ModelRequest(f"{name}/{MODELS[name]}", "Be good.", history, tools, settings=ModelSettings(**settings))


def body(name: str, asked: ModelRequest) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(provider_of(name)._encode(asked, stream=False).content)
    return found


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
    if isinstance(value, dict):
        return ", ".join(f"{key} {shown(inner)}" for key, inner in value.items())
    return ", ".join(map(shown, value)) if isinstance(value, list) else json.dumps(value).strip('"')


def cell(name: str, **settings: Any) -> str:
    asked = request(name, **settings)
    try:
        changed = difference(body(name, request(name)), body(name, asked))
    except ModelError:
        return "error"
    if "tools" in changed:
        changed["tools"] = [tool.get("function", tool)["name"] for tool in body(name, asked)["tools"]]
    if changed:
        return "; ".join(f"`{key}: {shown(value)}`" for key, value in changed.items())
    kept = provider_of(name)._finished(ModelReply("a STOP b"), asked)
    return "cut here" if kept.text != "a STOP b" else "not sent"


def strict_cell(name: str) -> str:
    plain, strict = [
        body(name, request(name, (attrs.evolve(TOOLS[0], strict=strict),)))["tools"][0] for strict in (False, True)
    ]
    changed = difference(plain, strict)
    return "; ".join(f"`{key}: {shown(value)}`" for key, value in changed.items()) or "not sent"


def table() -> str:
    lines = [["", *MODELS], ["---"] * (len(MODELS) + 1)]
    lines += [[row, *(cell(name, **settings) for name in MODELS)] for row, settings in ROWS.items()]
    lines.append(["`@tool(strict=True)`", *(strict_cell(name) for name in MODELS)])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


@pytest.mark.spec("requirements:A15", "requirements:A16")
def test_the_table_of_the_page_is_what_the_encoders_send():
    found = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0].strip()
    assert found == table().strip(), f"put this between the marks of {PAGE.name}:\n{table()}"
