"""
What `stepengine deploy release` makes of what its engine says of each run, without a database.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepengine.cli.commands import durable_runs
from stepengine.cli.exits import Exit
from stepengine.errors import JournalError, ReplayDivergence

DIVERGES = ReplayDivergence("#3: another tool is called", kind="changed", address="#3")
ENDED = JournalError("the run has ended, so it cannot continue; replay or fork it")
LOOKED_AT = {"fits": None, "diverges": DIVERGES, "goes on and diverges": None, "ends meanwhile": None}
MOVED = {"goes on and diverges": DIVERGES, "ends meanwhile": ENDED}
TOLD = {"fits": "moved", "diverges": "diverges", "goes on and diverges": "diverges", "ends meanwhile": "ended"}


class Releases:
    """
    An engine over runs of release 1, each of which does what its name says.
    """

    def __init__(self) -> None:
        self.moved: list[str] = []
        self.operator = self

    async def run(self, run: str) -> Any:
        return SimpleNamespace(release="1")

    async def fits(self, run: str) -> ReplayDivergence | None:
        return LOOKED_AT[run.partition("/")[0]]

    async def move(self, run: str) -> list[str]:
        error = MOVED.get(run.partition("/")[0])
        if error is not None:
            raise error
        self.moved.append(run)
        return [run]


@pytest.mark.spec("durable:U36", "durable:U42")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kinds=st.lists(st.sampled_from([*LOOKED_AT]), max_size=5), check=st.booleans())
def test_diverging_run_is_reported_and_the_others_move(
    kinds: list[str], check: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """
    A run may go on between the look at it and its move: that is a divergence, too, and no run that has ended.
    """
    runs = [f"{kind}/{number}" for number, kind in enumerate(kinds)]
    engine = Releases()

    class Found:
        def __init__(self, operator: Any) -> None:
            assert operator is engine

        async def list_unfinished(self, release: str) -> list[str]:
            return runs

    def with_agents(module: str, db: str, act: Any, **_: Any) -> Exit:
        with pytest.raises(StopIteration) as stop:
            act(engine).send(None)
        return stop.value.value

    monkeypatch.setattr("stepengine.durable.DeploymentMaintenance", Found)
    monkeypatch.setattr(durable_runs, "_run_with_durable_engine", with_agents)
    code = durable_runs.move_runs_to_release("1", "2", check=check, as_json=True)
    told = json.loads(capsys.readouterr().out)

    expected = [
        ("diverges" if TOLD[k] == "diverges" and LOOKED_AT[k] else "would move") if check else TOLD[k] for k in kinds
    ]
    assert [(run, what) for run, what in zip(runs, expected, strict=True)] == [(t["run"], t["outcome"]) for t in told]
    assert all(bool(t["why"]) == (t["outcome"] == "diverges") for t in told)
    assert code == (Exit.DIVERGED if "diverges" in expected else Exit.COMPLETED)
    assert engine.moved == ([] if check else [run for run in runs if run.startswith("fits/")])
