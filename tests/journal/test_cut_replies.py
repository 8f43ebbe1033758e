"""Texts that were cut at their limit: runs of today continue them and runs of before did not, and both replay as they were."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from stepengine import STEP, AgentCall, AgentDefinition, Ask, Engine, RunStatus, ToolCall, tool
from stepengine.machine import step
from stepengine.models import ModelReply
from stepengine.testing import ScriptedModel

CUT, MORE, END = (
    ModelReply("One, ", stop_reason="max_tokens"),
    ModelReply("two, ", stop_reason="max_tokens"),
    ModelReply("three."),
)


@tool
def note(text: str) -> str:
    """Keep a text."""
    return text


def twice(ctx: Any) -> Any:
    yield STEP
    yield STEP


def then_a_tool(ctx: Any) -> Any:
    yield STEP
    yield ToolCall("note", {"text": "x"})
    yield STEP


def asks(ctx: Any) -> Any:
    yield STEP
    yield Ask("Go on?")
    yield STEP


def parent(ctx: Any) -> Any:
    yield AgentCall("plain", "Count.")
    yield STEP


PLAIN = AgentDefinition("plain", model="a/b")
AGENTS = {
    "plain": PLAIN,
    **{
        name: AgentDefinition(name, model="a/b", tools=[note], handle_steps=handler, spawnable_agents=[PLAIN])
        for name, handler in {"twice": twice, "then-a-tool": then_a_tool, "asks": asks, "parent": parent}.items()
    },
}  # fmt: skip


def engine(replies: Sequence[ModelReply]) -> Engine:
    return Engine([*AGENTS.values()], models=ScriptedModel(list(replies)))


def told(result: Any) -> tuple[Any, ...]:
    return result.status, result.output, result.state.usage.requests, [m.text for m in result.state.message_history]


@pytest.fixture
def before(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """What was recorded before texts were continued: none of them is, until what this gives is called."""
    monkeypatch.setattr(step, "MAX_CUTS", 0)
    return monkeypatch.undo


@pytest.mark.spec("requirements:X61", "replay:J1")
@pytest.mark.parametrize("name", ["plain", "twice", "then-a-tool", "parent"])
def test_a_run_that_took_a_cut_text_as_it_was_replays_as_it_ended_and_asks_nothing(name, before, tmp_path: Path):
    journal = tmp_path / "run.jsonl"
    with engine([CUT, END]) as recording:
        recorded = recording.run_sync(name, "Count.", journal=journal)
    before()
    kept = journal.read_bytes()

    with engine([]) as replaying:
        replayed = replaying.replay_sync(journal)

    assert told(replayed) == told(recorded)
    assert kept == journal.read_bytes()
    assert (RunStatus.TRUNCATED if name == "plain" else RunStatus.COMPLETED) is replayed.status


@pytest.mark.spec("requirements:X61", "replay:J1")
@pytest.mark.parametrize("name", ["plain", "twice", "then-a-tool", "parent"])
@pytest.mark.parametrize("cuts", [1, 2, 4])
def test_a_run_that_continued_a_cut_text_replays_from_what_was_recorded(name, cuts, tmp_path: Path):
    journal = tmp_path / "run.jsonl"
    with engine([CUT, *[MORE] * (cuts - 1), END, END, END]) as recording:
        recorded = recording.run_sync(name, "Count.", journal=journal)
    kept = journal.read_bytes()

    with engine([]) as replaying:
        replayed = replaying.replay_sync(journal)

    assert told(replayed) == told(recorded)
    assert kept == journal.read_bytes()


@pytest.mark.spec("requirements:X61", "replay:J1")
def test_a_run_of_before_that_went_on_today_replays_each_cut_as_it_was_taken(before, tmp_path: Path):
    journal = tmp_path / "run.jsonl"
    with engine([CUT]) as recording:
        waiting = recording.run_sync("asks", "Count.", journal=journal)
    before()
    with engine([MORE, END]) as resuming:
        ended = resuming.resume_sync(journal, answers={waiting.pending_questions[0].id: "yes"})

    with engine([]) as replaying:
        replayed = replaying.replay_sync(journal)

    assert ["Count.", "One, ", "two, three."] == [m.text for m in ended.state.message_history]
    assert told(replayed) == told(ended)


@pytest.mark.spec("requirements:X61")
def test_a_run_that_stopped_right_after_a_cut_text_continues_it_when_it_is_resumed(before, tmp_path: Path):
    journal = tmp_path / "run.jsonl"
    with engine([CUT]) as recording:
        recording.run_sync("plain", "Count.", journal=journal)
    before()
    lines = journal.read_text(encoding="utf-8").splitlines(keepends=True)
    stopped = tmp_path / "stopped.jsonl"
    stopped.write_text("".join(lines[:-1]), encoding="utf-8")

    with engine([END]) as resuming:
        assert "One, three." == resuming.resume_sync(stopped).unwrap()
