"""
Simulated runs on the real engine with real journals: cut after every record and inside it, resumed, and cut again (I11).
"""

from __future__ import annotations

import attrs
import pytest

from stepengine.data.state import RunStatus
from stepengine.errors import UnknownOutcome
from stepengine.journal import MemoryJournal, check
from stepengine.journal.encoding import may_change_world_if_repeated
from stepengine.testing.invariants import find_pairing_problem
from tests.testing.stages import ANSWERS, CAST, Stage

START = 2
"""
Records of a journal before which there is no run to resume.
"""
SEEDS = {"plain": 1, "hooked": 2, "batching": 2, "spent": 2, "root": 0}


async def recorded(agent, journal):
    async with Stage(agent, SEEDS.get(agent.id, 0)) as stage:
        answers = ANSWERS if agent.id == "asking" else None
        return await stage.run(agent, "go", journal=journal, answers=answers)


def told(result):
    """
    Return what must be the same whether or not a process died on the way.
    """
    calls = [attrs.evolve(call, duration_ms=0) for call in result.tool_calls]
    return result.status, result.output, result.text, result.state.message_history, calls


async def resumed(agent, prefix, journal):
    """
    Resume from what a crash left, and check what may and must happen; return the result, and whether anything is unsure.
    """
    before = MemoryJournal(prefix).history()
    sure = {*before.results}
    open_ = {at: before.form(intent) for at, intent in before.intents.items() if at not in sure}
    doubtful = {at for at, form in open_.items() if may_change_world_if_repeated(form)}
    async with Stage(agent, SEEDS.get(agent.id, 0)) as stage:
        result = await stage.resume(journal, agent=agent)
        if result.status is RunStatus.SUSPENDED:
            result = await stage.resume(
                journal, answers={q.id: ANSWERS[q.text] for q in result.pending_questions}, agent=agent
            )
        begun = stage.deeds.begun
    assert not sure & {*begun}, "what is recorded was done again"
    assert not doubtful & {*begun}, "what may have happened, and must not happen twice, was done again"
    assert max(begun.values(), default=0) <= 1
    after = MemoryJournal(journal.lines()).history()
    assert after.results.keys() >= before.results.keys()
    for at in doubtful & after.results.keys():
        assert isinstance(after.outcome(after.results[at]).error, UnknownOutcome), "what nobody knows was guessed"
    assert check(journal).problems == ()
    blobs = [record.fp for record in MemoryJournal(journal.lines()).records() if record.kind == "blob"]
    assert len(blobs) == len({*blobs}), "what is stored once for all is stored twice"
    assert find_pairing_problem(result.state.message_history) is None
    assert find_pairing_problem(result.state.view) is None
    return result, bool(doubtful)


def asked(journal):
    return [(at, intent.type, intent.fp) for at, intent in MemoryJournal(journal.lines()).history().intents.items()]


async def replayed(agent, journal, result):
    """
    Replay a journal, and the journal of that replay.
    """
    async with Stage(agent) as stage:
        again = await stage.replay(journal, agent=agent)
        twice = await stage.replay(again.journal, agent=agent)
        assert not stage.deeds.begun
    assert told(twice) == told(again) == told(result)
    assert twice.usage == again.usage == result.usage
    assert asked(twice.journal) == asked(again.journal) == asked(journal)
    assert twice.journal.lines() == again.journal.lines()


@pytest.mark.deep
@pytest.mark.anyio
@pytest.mark.spec("reliability:I11", "reliability:I3", "reliability:R1", "reliability:R2", "reliability:R3")
@pytest.mark.parametrize("agent", CAST.values(), ids=CAST)
async def test_a_run_resumes_from_every_record_and_every_torn_one(agent):
    journal = MemoryJournal()
    expected = await recorded(agent, journal)
    lines = journal.lines()
    await replayed(agent, journal, expected)
    for size in range(START, len(lines) + 1):
        torn = lines[size][: len(lines[size]) // 2] if size < len(lines) else b""
        for left in {b"".join(lines[:size]), b"".join(lines[:size]) + torn}:
            cut = MemoryJournal(left)
            result, unsure = await resumed(agent, lines[:size], cut)
            assert unsure or told(result) == told(expected)
        await replayed(agent, cut, result)
