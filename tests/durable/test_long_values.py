"""What is too long for a record is handled in a database as it is in a process."""

from __future__ import annotations

import pytest

from stepengine import AgentCall, AgentDefinition, Engine, Perform, StepContext, ToolCall, tool
from stepengine.data import record_sizes
from stepengine.testing import ScriptedModel

from .shared import worker_of

BIG = "x" * 20_000


@tool(in_thread=False)
def look(text: str = "") -> str:
    """Look."""
    return BIG


def fail() -> None:
    raise ValueError(BIG)


def failing_steps(ctx: StepContext):
    yield from ()
    raise ValueError(BIG)


def long_steps(ctx: StepContext):
    yield from ()
    return BIG


def steps(ctx: StepContext):
    caught = []
    for ask in (
        lambda: Perform(str, BIG),
        lambda: Perform(fail),
        lambda: AgentCall("failing"),
        lambda: AgentCall("long"),
        lambda: AgentCall("long", BIG),
        lambda: ToolCall("look", {"text": BIG}),
        lambda: ToolCall("look"),
    ):
        try:
            value = yield from ask()
            caught.append(f"a {type(value).__name__}, shortened: {'were cut here' in str(value)}")
        except Exception as error:
            caught.append(f"{type(error).__name__}: {error}")
    return caught


AGENT = AgentDefinition(
    "parent",
    tools=[look],
    handle_steps=steps,
    spawnable_agents=[
        AgentDefinition("failing", handle_steps=failing_steps),
        AgentDefinition("long", handle_steps=long_steps),
    ],
)


@pytest.mark.deep
@pytest.mark.spec("reliability:GN38")
async def test_long_values_are_rejected_and_cut_as_in_process(db: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(record_sizes, "MAX_VALUE_BYTES", 3_000)
    monkeypatch.setattr(record_sizes, "MAX_INLINE_CHARS", 1_024)
    monkeypatch.setattr(record_sizes, "MAX_ERROR_CHARS", 200)
    expected = await Engine([AGENT], models=ScriptedModel([])).run(AGENT, "go")

    async with worker_of([AGENT], db, models=ScriptedModel([])) as engine:
        actual = await engine.run(AGENT, "go")

    kinds = ["PerformError", "PerformError", "ChildError", "ChildError", "InputError", "InputError"]
    assert kinds == [text.partition(":")[0] for text in expected.output[:6]]
    assert "shortened: True" in expected.output[6]
    assert (expected.status, expected.output) == (actual.status, actual.output)
