"""Texts that were cut at their limit: a run continues them, and a replay follows its record."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from stepengine import STEP, AgentCall, AgentDefinition, Engine
from stepengine.models import ModelReply
from stepengine.testing import ScriptedModel

CUT, MORE, END = (
    ModelReply("One, ", stop_reason="max_tokens"),
    ModelReply("two, ", stop_reason="max_tokens"),
    ModelReply("three."),
)


def parent(ctx: Any) -> Any:
    yield AgentCall("plain", "Count.")
    yield STEP


PLAIN = AgentDefinition("plain", model="a/b")
PARENT = AgentDefinition("parent", model="a/b", handle_steps=parent, spawnable_agents=[PLAIN])


def engine(replies: Sequence[ModelReply]) -> Engine:
    return Engine([PLAIN, PARENT], models=ScriptedModel(list(replies)))


def told(result: Any) -> tuple[Any, ...]:
    return result.status, result.output, result.state.usage.requests, [m.text for m in result.state.message_history]


@pytest.mark.spec("generator-contract:L37", "replay:J1")
@pytest.mark.parametrize("cuts", [1, 4])
def test_continued_truncated_text_replays_from_its_record(cuts, tmp_path: Path):
    journal = tmp_path / "run.jsonl"
    with engine([CUT, *[MORE] * (cuts - 1), END, END, END]) as recording:
        recorded = recording.run_sync("parent", "Count.", journal=journal)
    kept = journal.read_bytes()

    with engine([]) as replaying:
        replayed = replaying.replay_sync(journal)

    assert told(replayed) == told(recorded)
    assert kept == journal.read_bytes()


@pytest.mark.spec("generator-contract:L37")
def test_resume_continues_a_truncated_text(tmp_path: Path):
    journal = tmp_path / "run.jsonl"
    with engine([CUT, END]) as recording:
        recording.run_sync("plain", "Count.", journal=journal)
    lines = journal.read_text(encoding="utf-8").splitlines(keepends=True)
    (first_result,) = [n for n, line in enumerate(lines) if '"kind":"result","path":"","seq":0' in line]
    stopped = tmp_path / "stopped.jsonl"
    stopped.write_text("".join(lines[: first_result + 1]), encoding="utf-8")

    with engine([END]) as resuming:
        assert "One, three." == resuming.resume_sync(stopped).unwrap()
