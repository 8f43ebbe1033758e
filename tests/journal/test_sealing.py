"""
Mending by hand: what was edited is shown and made valid, the start of a damaged journal is kept.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stepengine import STEP, AgentDefinition, Engine, Perform, RunStatus
from stepengine.errors import JournalCorrupt, JournalError
from stepengine.journal import FileJournal, MemoryJournal, check, diff, repair, seal_journal
from stepengine.testing import ScriptedModel, text


def agent(asked: str = "first") -> AgentDefinition[Any]:
    def handle_steps(ctx: Any) -> Any:
        one = yield from Perform.idempotent(str, asked)
        yield STEP
        two = yield from Perform.idempotent(str, "second")
        return [one, two]

    return AgentDefinition("a", model="t/m", system_prompt="You help.", handle_steps=handle_steps)


def replayed(journal: Any, definition: AgentDefinition[Any] | None = None) -> Any:
    with Engine([definition or agent()], models=ScriptedModel([])) as engine:
        return engine.replay_sync(journal, on_divergence="stop")


@pytest.fixture(params=[True, False], ids=["linked", "unlinked"])
def path(request: Any, tmp_path: Path) -> Path:
    path = tmp_path / "run.jsonl"
    with Engine([agent()], models=ScriptedModel([text("fine")]), pricing=None) as engine:
        engine.run_sync("a", "go", journal=FileJournal(path, link=request.param))
    return path


def edit(path: Path, old: str, new: str) -> None:
    before = path.read_text()
    assert before.count(old) == 1, before
    path.write_text(before.replace(old, new))


SECOND = '"value":"second"'


@pytest.mark.spec("replay:J37")
def test_edited_result_is_shown_sealed_and_replayed(path: Path) -> None:
    edit(path, SECOND, '"value":"edited"')
    with pytest.raises(
        JournalCorrupt, match=f"`stepengine journal repair {path} --seal` shows what was edited"
    ) as caught:
        FileJournal(path).records()
    assert "--until" in str(caught.value)
    made = seal_journal(path)
    ((number, what),) = [(e.number, e.what) for e in made.edits]
    assert (what, "edited" in made.edits[0].now) == ("result of #2", True)
    assert path.read_text().splitlines()[number - 1].count("edited") == 1
    assert check(made.journal)
    with pytest.raises(JournalCorrupt):
        FileJournal(path).records()
    made.journal.copy_to(FileJournal(path))
    assert check(path)
    assert "the run ended" not in str(replayed(path).error)
    # What follows from the edit by the handler alone, its end, is told, and recorded by who wants it.
    assert "end" == replayed(path).error.kind
    with Engine([agent()], models=ScriptedModel([]), pricing=None) as engine:
        assert ["first", "edited"] == engine.resume_sync(path, on_divergence="extend").output
    assert replayed(path).output == ["first", "edited"]
    assert seal_journal(path).edits == ()


@pytest.mark.spec("replay:J37", "replay:J10")
def test_sealing_updates_fingerprints_of_an_edited_effect(path: Path) -> None:
    before = MemoryJournal(path.read_bytes())
    edit(path, '"args":["first"]', '"args":["other"]')
    made = seal_journal(path).journal
    assert check(made)
    assert replayed(made).error.diff == (("/args/0", '"other"', '"first"'),)
    assert replayed(made, agent("other")).status is RunStatus.COMPLETED
    assert [(c.kind, c.a) for c in diff(before, made).changes] == [("changed", "#0")]


@pytest.mark.spec("replay:J37", "replay:J20")
def test_edited_blob_is_found_by_its_new_fingerprint(path: Path) -> None:
    edit(path, '"data":"You help."', '"data":"You hinder."')
    made = seal_journal(path)
    assert [e.what for e in made.edits] == ["blob"]
    assert check(made.journal)
    assert replayed(made.journal).error.diff == (("/system_prompt", '"You hinder."', '"You help."'),)


@pytest.mark.spec("replay:J37", "replay:J41")
@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda lines: [*lines[:3], b"{oops\n", *lines[3:]], "is not JSON"),
        (lambda lines: [*lines[:2], *lines[3:]], "does not fit the records before it"),
        (lambda lines: [*lines[:3], b"\xff\xfe\n", *lines[3:]], "is not UTF-8"),
    ],
)
def test_damaged_journal_is_not_sealed(path: Path, spoil: Any, said: str) -> None:
    path.write_bytes(b"".join(spoil(path.read_bytes().splitlines(keepends=True))))
    with pytest.raises(JournalCorrupt, match=said):
        seal_journal(path)


@pytest.mark.spec("replay:J37", "reliability:JR02")
def test_records_before_damage_are_kept_and_resumed(path: Path, tmp_path: Path) -> None:
    content = bytearray(path.read_bytes())
    lines = bytes(content).splitlines(keepends=True)
    content[sum(map(len, lines[:5])) + 40] ^= 1
    path.write_bytes(content)
    with pytest.raises(JournalCorrupt, match=f"`stepengine journal repair {path} --until 5`"):
        FileJournal(path).records()
    kept = repair(path, 5, tmp_path / "kept.jsonl")
    assert kept.content() == b"".join(lines[:5])
    assert path.read_bytes() == content
    path = path.rename(tmp_path / "a day of runs.jsonl")
    with pytest.raises(
        JournalCorrupt, match=r"a day of runs.jsonl is damaged: .*`stepengine journal repair FILE --until 5`"
    ):
        FileJournal(path).records()
    with Engine([agent()], models=ScriptedModel([text("again")]), pricing=None) as engine:
        assert engine.resume_sync(kept).text == "again"
    for until in (0, 6, 99):
        with pytest.raises(JournalError):
            repair(path, until, MemoryJournal())
    with pytest.raises(JournalError, match="holds a run already"):
        repair(path, 3, kept)
