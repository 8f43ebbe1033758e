"""The list of workers and the journal that is written from the database, each by itself."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepengine import AgentCall, AgentDefinition, Engine, Parallel, Perform, StepContext
from stepengine.debugging import describe_run
from stepengine.durable import Operator, records
from stepengine.durable.register import Register, RegisteredRun, create_register_tables
from stepengine.errors import JournalError
from stepengine.journal import MemoryJournal
from stepengine.journal.questions import list_effects_in_doubt

from .shared import worker_of


@pytest.mark.deep
@pytest.mark.smoke
def test_truncated_journal_keeps_only_started_effects_in_doubt() -> None:
    """And what was asked for together with it and before it: that may have begun too."""

    def handle(ctx: Any) -> Any:
        yield Parallel(Perform(str, 1), AgentCall("below", "go"), Perform(str, 2))
        yield Perform(str, 3)

    agents = [
        AgentDefinition("above", handle_steps=handle, spawnable_agents=["below"]),
        AgentDefinition("below", handle_steps=lambda ctx: (yield Perform(str, 4))),
    ]
    engine, whole = Engine(agents), MemoryJournal()
    engine.run_sync("above", journal=whole)
    lines = whole.lines()

    for count, entries in itertools.product(range(2, len(lines) + 1), (set(), {("", 2)})):
        journal = MemoryJournal(lines[:count])
        known = journal.history()
        paths = {path for path, _ in known.intents}
        begun = [n for at, n in known.intents if not at and ((at, n) in {*entries, *known.results} or str(n) in paths)]
        doubtful = {f"#{n}" for n in range(max(begun, default=-1) + 1)}.intersection(list_effects_in_doubt(known))
        records._remove_unstarted_effects(journal, SimpleNamespace(entries=entries))

        assert doubtful == {*list_effects_in_doubt(journal.history())}
        if not doubtful:
            engine.resume_sync(journal).unwrap()
            assert {*whole.history().results} == {*journal.history().results}
    engine.close()


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("replay:D16")
async def test_exported_journal_has_the_stored_end(db: str) -> None:
    def agent(*, mended: bool) -> AgentDefinition:
        def handle_steps(ctx: StepContext) -> Any:
            yield from Perform(len, "abc")
            if not mended:
                msg = "no"
                raise ValueError(msg)
            return "good"

        return AgentDefinition("root", handle_steps=handle_steps)

    async with worker_of([agent(mended=False)], db, release="r1") as worker:
        failed = await worker.run("root", "go")
    async with worker_of([agent(mended=True)], db, release="r1") as worker:
        again = await worker.resume(failed.journal)
        told = describe_run(await worker.export(failed.journal))

    assert ("failed", "failed", None) == (again.status, told["status"], told["output"])


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("studio:SV35")
def test_registered_run_is_found_by_its_text_and_id(db: str) -> None:
    """In any case of ASCII letters, and other letters as they are written."""

    def swap_ascii_case(text: str) -> str:
        return "".join([letter.swapcase() if letter.isascii() else letter for letter in text])

    with asyncio.Runner() as runner:
        operator = runner.run(Operator.connect(db))
        runner.run(create_register_tables(operator.url))
        register = Register(operator.deployment)

        @given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1))
        def check(text: str) -> None:
            owner = uuid.uuid4().hex
            run = RegisteredRun(
                run=f"Run-{owner.upper()}",
                owner=owner,
                agent="chat",
                status="started",
                created=1.0,
                request={"prompt": f"({text})"},
            )
            runner.run(register.add_run(run, None))
            for search in (text, swap_ascii_case(text), run.run, run.run.lower()):
                found = runner.run(
                    register.list_runs(owner=owner, agent=None, statuses=(), before=None, limit=9, search=search)
                )
                assert [run.run] == [each.run for each in found], search

        try:
            check()
        finally:
            runner.run(operator.close())


@pytest.mark.deep
@pytest.mark.smoke
async def test_result_of_a_child_is_refused_with_its_root(db: str) -> None:
    def handle(ctx: StepContext) -> Any:
        return (yield from AgentCall("below", "go")).output

    agents = [
        AgentDefinition("above", handle_steps=handle, spawnable_agents=["below"]),
        AgentDefinition("below", handle_steps=lambda ctx: (yield Perform(str, 4))),
    ]
    async with worker_of(agents, db) as worker:
        run = (await worker.run("above")).journal
        for ask in (worker.result, worker.resume):
            with pytest.raises(JournalError, match=f"is a child.*use '{run}'"):
                await ask(f"{run}/0")
