"""Replays of waiting runs: which of them the current code can resume, and nothing is performed."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepengine import AgentDefinition, Ask, Engine, Sleep
from stepengine.errors import ReplayDivergence
from stepengine.evaluation import replay_waiting

pytestmark = pytest.mark.spec("requirements:X124")


def make_seller(*, question: str = "Which size?", sleeps: bool = False) -> AgentDefinition:
    def sell(ctx):
        if sleeps:
            yield Sleep(1)
        size = yield from Ask(question, key="size")
        return f"Size {size}."

    return AgentDefinition("shop", handle_steps=sell)


@pytest.mark.parametrize(
    ("agent", "outcome", "kind"),
    [
        (make_seller(), "ready", None),
        (make_seller(question="Which one?"), "keep", "changed"),
        (make_seller(sleeps=True), "diverges", "kind"),
    ],
)
async def test_replay_of_a_waiting_run_names_its_outcome(
    agent: AgentDefinition, outcome: str, kind: str | None, tmp_path: Path
) -> None:
    file = tmp_path / "run.jsonl"
    async with Engine() as engine:
        await engine.run(make_seller(), journal=file)
    before = file.read_bytes()
    async with Engine([agent]) as engine:
        (run,) = await replay_waiting(engine, [file])

    assert (outcome, "shop", ["Which size?"]) == (run.outcome, run.agent_id, [one.text for one in run.questions])
    assert kind == (run.error.kind if isinstance(run.error, ReplayDivergence) else None)
    assert before == file.read_bytes()


async def test_ended_and_unreadable_runs_are_reported_as_such(tmp_path: Path) -> None:
    ended, missing = tmp_path / "ended.jsonl", tmp_path / "missing.jsonl"
    async with Engine([make_seller()]) as engine:
        await engine.run("shop", journal=ended, answers={"size": "41"})
        runs = await replay_waiting(engine, [ended, missing])

    assert ["ended", "failed"] == [run.outcome for run in runs]
    assert "missing.jsonl" in str(runs[1].error)
    assert {"file": str(ended), "outcome": "ended"} == runs[0].to_json()
