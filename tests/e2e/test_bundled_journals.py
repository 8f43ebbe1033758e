"""
Every bundled agent has a recorded run that is replayed from end to end: no network, no model, nothing is performed.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from stepengine import Engine, RunStatus
from stepengine.journal import FileJournal
from stepengine.workspace.network import block_test_network

from .bundled import ROOT, recorder

script = recorder()
CASSETTES = script.AGENTS.parent
PORTS = ("ports/", "others/")
"""Runs of agents that were ported from codebuff and other frameworks; ``tests/examples`` replays them."""
GOLDEN = {name: digest for digest, name in map(str.split, (CASSETTES / "SHA256SUMS").read_text().splitlines())}


@pytest.fixture(scope="module")
def recorded_again(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """
    A folder with the journals that the script makes now.
    """
    folder = tmp_path_factory.mktemp("journals")
    for agent_id in script.BUNDLED:
        script.record(agent_id, folder)
    return folder


def test_every_bundled_agent_has_exactly_one_journal() -> None:
    assert set(script.BUNDLED) == set(script.PLAYS)
    assert {f"{agent_id}.jsonl" for agent_id in script.BUNDLED} == {f.name for f in script.AGENTS.iterdir()}
    assert {file.stem.replace("_", "-") for file in (ROOT / "agents").glob("[!_]*.py")} == set(script.BUNDLED)


@pytest.mark.spec("replay:J34")
def test_committed_journals_match_the_checksums() -> None:
    """
    Journals that users have do not change with the code, so these must not either. A new one gets its line by hand; one that
    was recorded anew shows that journals of users no longer replay: say in the commit which row of the specification changed.
    """
    found = {f.relative_to(CASSETTES).as_posix(): f.read_bytes() for f in CASSETTES.rglob("*.jsonl")}

    assert GOLDEN == {name: hashlib.sha256(content).hexdigest() for name, content in found.items()}


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:I3", "requirements:Q10", "replay:J34")
@pytest.mark.parametrize("name", [name for name in GOLDEN if not name.startswith(PORTS)])
def test_a_recorded_run_replays_byte_for_byte_offline(name: str, tmp_path: Path) -> None:
    path = CASSETTES / name
    agent = script.PLAYS[path.stem].host or script.BUNDLED[path.stem]
    tools = script.tools_for(tmp_path)
    with Engine([agent], tools) as engine, block_test_network([]) as refused:
        result = engine.replay_sync(FileJournal(path))

    assert RunStatus.COMPLETED is result.status
    assert path.read_bytes() == result.journal.content()
    assert [] == refused
    assert [] == list(tmp_path.iterdir())
    assert result.output not in (None, "")


@pytest.mark.deep
@pytest.mark.spec("replay:J23")
def test_the_script_records_the_same_bytes_again(recorded_again: Path) -> None:
    """
    When this fails because an agent was changed on purpose: python -m cassettes.record_agents
    """
    files = sorted(script.AGENTS.iterdir())

    assert {} == {f.name: "differs" for f in files if of_any_version(f) != of_any_version(recorded_again / f.name)}


def of_any_version(file: Path) -> tuple[dict[str, Any], bytes]:
    """
    The head without the version of the package that recorded it and the checksum over that, and all other bytes.
    """
    head, _, rest = file.read_bytes().partition(b"\n")
    return {k: v for k, v in json.loads(head).items() if k not in ("engine", "crc")}, rest
