"""Runs that ended are kept in memory in so many bytes, and are read from their journals after that."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from stepengine.runtime.handle import RunHandle
from stepengine.server import ended_runs
from stepengine.server.ended_runs import EndedRuns
from tests.server.house import House, ended, events, started
from tests.waits import until


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[House]:
    monkeypatch.setattr(ended_runs, "KEPT_BYTES", 100_000)
    with House(tmp_path).open() as made:
        yield made


def handles() -> int:
    gc.collect()
    return sum(isinstance(one, RunHandle) for one in gc.get_objects())


def eight_large_runs(client: httpx2.Client, agent: str) -> list[str]:
    runs = [started(client, agent, "x" * 30_000) for _ in range(8)]
    for run in runs:
        assert ended(client, run)["status"] == "completed"
    return runs


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("studio:SV16")
def test_evicted_large_runs_are_read_from_their_journals(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    gone: list[str] = []
    excess = EndedRuns.list_excess_runs
    monkeypatch.setattr(EndedRuns, "list_excess_runs", lambda kept: gone.extend(found := excess(kept)) or found)
    with house.client() as client:
        runs = eight_large_runs(client, "quick")
        until(lambda: len({*gone}) >= 5)
        shown = [events(client, run) for run in runs]

    assert all(shown)


@pytest.mark.memory
@pytest.mark.spec("studio:SV16")
def test_ended_large_runs_are_freed_from_memory(house: House) -> None:
    before = handles()
    with house.client() as client:
        eight_large_runs(client, "talker")
        until(lambda: handles() - before <= 3)


@pytest.mark.spec("studio:SV16")
def test_oldest_ended_runs_exceed_the_bound_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ended_runs, "KEPT", 3)
    monkeypatch.setattr(ended_runs, "KEPT_BYTES", 10)
    kept, handle = EndedRuns(), object()
    made: Any = handle
    for name in "abc":
        kept.put(name, made, 3)
    found = [kept.list_excess_runs()]
    kept.put("a", made, 4)
    found.append(kept.list_excess_runs())
    kept.put("d", made)
    found.append(kept.list_excess_runs())
    kept.remove("b")
    kept.put("e", made, 11)
    found.append(kept.list_excess_runs())

    assert found == [[], [], ["b"], ["c", "a", "d", "e"]]
    assert kept.get("b") is None
    assert kept.get("e") is handle


def test_events_of_a_damaged_journal_get_409_journal_corrupt(tmp_path: Path) -> None:
    house = House(tmp_path)
    with house.open(), house.client() as client:
        run = started(client, "quick")
        ended(client, run)
    (tmp_path / "runs" / f"{run}.jsonl").write_text('{"damaged\n{}\n')
    with house.open(), house.client() as client:
        refused = client.get(f"/runs/{run}/events")

    assert (409, "urn:stepengine:problem:journal_corrupt") == (refused.status_code, refused.json()["type"])
