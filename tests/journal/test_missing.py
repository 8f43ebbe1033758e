"""What a journal that is not there answers: no damage, but a path and what lies beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepengine import AgentDefinition, Engine
from stepengine.errors import JournalCorrupt, JournalMissing
from stepengine.journal import FileJournal, MemoryJournal, SqliteJournal, scrub, undo

WAYS = {
    "replay": lambda engine, journal: engine.replay_sync(journal),
    "resume": lambda engine, journal: engine.resume_sync(journal),
    "extend": lambda engine, journal: engine.resume_sync(journal, on_divergence="extend"),
    "fork": lambda engine, journal: engine.fork_sync(journal, at="#1"),
    "undo": lambda engine, journal: undo(journal, "."),
    "scrub": lambda engine, journal: scrub(journal),
}


def handle_steps(ctx):
    yield from ()
    return "done"


@pytest.fixture
def engine():
    with Engine([AgentDefinition("greeter", handle_steps=handle_steps)]) as made:
        yield made


def refused(way: str, engine: Engine, journal: object) -> JournalMissing:
    with pytest.raises(JournalMissing) as caught:
        WAYS[way](engine, journal)
    assert not isinstance(caught.value, JournalCorrupt)
    return caught.value


@pytest.mark.parametrize("way", WAYS)
def test_missing_file_lists_neighbours_and_creates_nothing(way: str, engine: Engine, tmp_path: Path) -> None:
    for name in ("release.jsonl", "other.jsonl", "notes.txt"):
        (tmp_path / name).write_text("")
    error = refused(way, engine, tmp_path / "relase.jsonl")

    assert (str(tmp_path / "relase.jsonl"), ("release.jsonl", "other.jsonl")) == (error.path, error.beside)
    assert "'release.jsonl', 'other.jsonl'" in error.message
    assert sorted(["release.jsonl", "other.jsonl", "notes.txt"]) == sorted(one.name for one in tmp_path.iterdir())


@pytest.mark.parametrize("way", ["replay", "undo"])
def test_missing_folder_is_named_and_not_created(way: str, engine: Engine, tmp_path: Path) -> None:
    error = refused(way, engine, tmp_path / "runs" / "a.jsonl")

    assert f"the folder {str(tmp_path / 'runs')!r} does not exist" in error.message
    assert [] == list(tmp_path.iterdir())


@pytest.mark.parametrize("way", ["resume", "scrub"])
def test_an_empty_journal_holds_no_run(way: str, engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("")

    assert "a.jsonl holds no run" in refused(way, engine, FileJournal(tmp_path / "a.jsonl")).message
    assert "holds no run" in refused(way, engine, MemoryJournal()).message


@pytest.mark.parametrize("way", ["replay", "undo"])
def test_missing_database_run_lists_existing_runs(way: str, engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    known = engine.run_sync("greeter", journal=path).journal
    assert isinstance(known, SqliteJournal)
    assert known.run is not None
    error = refused(way, engine, f"{path}#nobody")

    assert (str(path), (known.run,)) == (error.path, error.beside)
    assert [known.run] == SqliteJournal(path).runs()
    assert "no journal" in refused(way, engine, tmp_path / "gone.db").message
    assert ["runs.db"] == [one.name for one in tmp_path.iterdir() if one.suffix == ".db"]


@pytest.mark.spec("reliability:JR02")
@pytest.mark.parametrize("way", ["run", "resume"])
def test_text_file_is_neither_resumed_nor_overwritten(tmp_path, way):
    """
    A journal whose only line is torn is started again; a file of something else is not.
    """
    path = tmp_path / "notes.txt"
    path.write_text("buy tea")

    agent = AgentDefinition("a", handle_steps=handle_steps)
    with Engine([agent]) as engine, pytest.raises(JournalCorrupt, match="is not a journal"):
        engine.run_sync(agent, journal=path).unwrap() if way == "run" else engine.resume_sync(path, agent=agent)

    assert "buy tea" == path.read_text()
