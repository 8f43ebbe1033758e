"""
The recorded runs of the bundled agents, one result at a time.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from stepengine import Engine
from stepengine.journal import FileJournal
from stepengine.journal.records import ROOT, Result

from .bundled import recorder

script = recorder()


@pytest.mark.spec("evaluation:JG2", "evaluation:JG3")
@pytest.mark.parametrize("agent_id", ["base2", "editor-multi-prompt", "thinker-best-of-n"])
def test_stepping_a_shipped_run_ends_like_its_replay(agent_id: str, tmp_path: Path) -> None:
    journal = FileJournal(script.AGENTS / f"{agent_id}.jsonl")
    agent = script.PLAYS[agent_id].host or script.BUNDLED[agent_id]
    places = [(r.path, r.seq) for r in journal.records() if type(r) is Result]
    with Engine([agent], script.tools_for(tmp_path)) as engine:
        replayed = engine.replay_sync(journal)
        with engine.stepper(journal) as stepper:
            met = [moment.address for moment in stepper.moments()]
            ended = stepper.finished

    assert [*[f"{path}#{seq}" for path, seq in places if (path, seq) != ROOT], ""] == met
    assert ended is not None
    assert replayed.output == ended.output
    assert replayed.state.message_history == ended.state.message_history
    assert [] == list(tmp_path.iterdir())
