"""Conversations as runs leave them, and what hooks are called with."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from hypothesis import strategies as st

from stepengine.data.definition import AgentDefinition, HookContext
from stepengine.data.messages import (
    AssistantMessage,
    ImagePart,
    JsonPart,
    Message,
    TextPart,
    ThinkingPart,
    ToolCallPart,
    ToolMessage,
    UserMessage,
)
from stepengine.data.state import AgentState
from stepengine.data.transcript import Transcript

NOW = datetime(2026, 1, 1, tzinfo=UTC)
PNG = ImagePart(data=b"\x89PNG")
TOOLS = ("read_files", "run_terminal_command", "write_file", "spawn_agents", "ask_user", "look")


class Lines:
    """A logger that keeps what it is told."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, dict[str, Any]]] = []

    def debug(self, message: str, /, **data: Any) -> None:
        self.lines.append((message, data))

    info = warning = error = debug


def prompt(*content: Any) -> UserMessage:
    return UserMessage(content, ("USER_PROMPT",))


def instructions(text: str = "Be careful.") -> UserMessage:
    return UserMessage(text, ("INSTRUCTIONS_PROMPT",))


def step(number: int, name: str = "look", given: Any = None, result: Any = "seen", **fields: Any) -> list[Message]:
    """One reply with one call, and its result."""
    said = fields.pop("said", ())
    call = ToolCallPart(f"c{number}", name, given or {})
    parts = result if isinstance(result, str | tuple) else (JsonPart(result),)
    return [AssistantMessage((*said, call)), ToolMessage(f"c{number}", name, parts, **fields)]


def context(view: Any, record: Any = None, *, agent: Any = None, **fields: Any) -> HookContext:
    """What a hook gets before a step that shows *view*."""
    view = Transcript(view)
    kept = {name: fields.pop(name) for name in ("system_prompt", "tool_definitions", "context") if name in fields}
    state = AgentState(message_history=view if record is None else Transcript(record), view=view, **kept)
    given = {"now": NOW, "logger": Lines(), "agent": agent or AgentDefinition("a"), **fields}
    return HookContext(state=state, **given)


texts = st.builds(
    lambda word, count: (word + " ") * count, st.sampled_from(["a", "word", "[USER]", "\n---\n"]), st.integers(0, 300)
)
results = st.one_of(
    texts,
    st.builds(lambda text: (text, PNG), texts),
    st.builds(lambda text, code: (JsonPart({"stdout": text, "exit_code": code}),), texts, st.integers(0, 2)),
    st.builds(lambda text: (JsonPart([{"agent_type": "helper", "status": "completed", "output": text}]),), texts),
)
inputs = st.sampled_from(
    [{}, {"path": "a.py"}, {"command": "make test"}, {"paths": ["a.py"]}, {"agents": [{"agent_type": "helper"}]}]
)
statuses = st.sampled_from(["ok", "ok", "error"])


@st.composite
def turns(draw: st.DrawFn, first: int) -> list[Message]:
    """What a user says and what an agent does about it; calls are numbered from *first*."""
    said = draw(texts).strip() or "Go."
    found: list[Message] = [prompt(said, PNG) if draw(st.integers(0, 5)) == 0 else prompt(said)]
    if draw(st.booleans()):
        found.append(instructions(draw(texts)))
    for reply in range(draw(st.integers(0, 5))):
        parts: list[Any] = [ThinkingPart("hm")] if draw(st.booleans()) else []
        parts += [TextPart(draw(texts))] if draw(st.booleans()) else []
        calls = [
            ToolCallPart(f"c{first + reply}_{n}", draw(st.sampled_from(TOOLS)), draw(inputs))
            for n in range(draw(st.integers(0, 2)))
        ]
        found.append(AssistantMessage((*parts, *calls)))
        found += [ToolMessage(c.tool_call_id, c.tool_name, draw(results), draw(statuses)) for c in calls]
        if draw(st.integers(0, 6)) == 0:
            found.append(UserMessage(draw(texts)))
    return found


@st.composite
def conversations(draw: st.DrawFn) -> Transcript:
    """Up to three turns; the last one may not have begun."""
    count = draw(st.integers(1, 3))
    return Transcript([message for turn in range(count) for message in draw(turns(turn * 10))])
