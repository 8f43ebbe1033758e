"""
Sessions whose turns are durable runs: submitted from anywhere, executed by whichever worker is free, one after the other.
"""

from __future__ import annotations

import pytest

from stepengine import AgentDefinition, Ask, Engine, StepContext
from stepengine.durable import DurableEngine, Operator
from stepengine.errors import AnswerRejected
from stepengine.sessions import MemorySessions
from stepengine.testing import ScriptedModel, text

pytestmark = pytest.mark.deep  # each starts workers on a database of its own

WORDS = ["I am Ann.", "What is my name?", "And again?"]


def echo(request):
    """
    Say all that the user has said.
    """
    return text(" | ".join(m.text for m in request.messages if m.role == "user"))


def chatty() -> ScriptedModel:
    return ScriptedModel([echo] * 100)


CHAT = AgentDefinition("chat", model="test/model")


def book(ctx: StepContext):
    size = yield from Ask("For how many?", options=("two", "four"))
    day = yield from Ask("On which day?")
    return f"{size} on {day}"


BOOK = AgentDefinition("book", handle_steps=book)


def engine(agents, db: str, **options) -> DurableEngine:
    return DurableEngine(agents, db=db, **{"executor": "worker-1", "polling": 0.05, "models": chatty(), **options})


@pytest.mark.spec("durable:UT1", "requirements:L3")
async def test_a_session_goes_on_as_it_does_in_one_process(db: str):
    store = MemorySessions()
    async with Engine([CHAT], models=chatty(), sessions=store) as alone, engine([CHAT], db) as worker:
        expected = [await alone.run(CHAT, w, session_id="ann", metadata={w[0]: 1}) for w in WORDS]
        actual = [await worker.run(CHAT, w, session_id="ann", metadata={w[0]: 1}) for w in WORDS]
        kept = await worker.operator.sessions.load("ann")

    assert [r.output for r in expected] == [r.output for r in actual]
    assert [r.state.message_history for r in expected] == [r.state.message_history for r in actual]
    assert all(r.session_saved and r.session_id == "ann" for r in actual)
    known = store.load("ann")
    assert (known.messages, known.turns, known.usage) == (kept.messages, kept.turns, kept.usage)
    assert known.info.metadata == kept.info.metadata


async def test_turns_that_are_submitted_at_once_follow_each_other_in_their_order(db: str):
    async with engine([CHAT], db) as worker, await Operator.connect(db) as operator:
        runs = [await operator.submit("chat", str(n), info=worker_info("bob")) for n in range(5)]
        results = [await worker.result(run) for run in runs]

    assert [" | ".join(map(str, range(n + 1))) for n in range(5)] == [r.output for r in results]


def worker_info(session: str):
    from stepengine.data.state import RunInfo

    return RunInfo(session_id=session)


async def test_a_message_is_the_answer_to_what_the_session_waits_for(db: str):
    async with engine([BOOK], db) as worker:
        first = await worker.run(BOOK, "a table", session_id="c")
        with pytest.raises(AnswerRejected):
            await worker.run(BOOK, "nine", session_id="c")
        second = await worker.run(BOOK, "four", session_id="c")
        third = await worker.run(BOOK, "Friday", session_id="c")
        turns = await worker.operator.sessions.turns("c")

    assert "For how many?" == first.pending_questions[0].text
    assert "On which day?" == second.pending_questions[0].text
    assert "four on Friday" == third.output
    assert [None, None, first.journal, first.journal] == [turn.answered for turn in turns]
