"""
What came of an effect in doubt, as somebody says who has looked: it is taken for its result, and the journal says so.
"""

from __future__ import annotations

from typing import Any

import pytest

from stepengine import AgentCall, AgentDefinition, Answer, Engine, Perform, Question, ToolResult, call, tool
from stepengine.data.questions import find_answer_problem
from stepengine.errors import AnswerRejected
from stepengine.journal import MemoryJournal
from stepengine.journal.questions import list_effects_in_doubt

DONE: list[int] = []


def pays(amount: int) -> dict[str, Any]:
    DONE.append(amount)
    return {"paid": amount}


@tool(in_thread=False)
def transfer(amount: int) -> str:
    """Transfer."""
    DONE.append(amount)
    return f"transferred {amount}"


def performs(ctx):
    paid = yield from Perform(pays, 5)
    return ["then", paid]


def transfers(ctx):
    return ["then", (yield from call(transfer, amount=5))]


def asks_child(ctx):
    return (yield from AgentCall("transfers", "go"))


TAKEN_BY = {
    "performs": [({"paid": 7}, {"paid": 7}), (None, None), ("text", "text")],
    "transfers": [("as I saw it", "as I saw it"), (ToolResult.text("seen"), "seen")],
    "asks-child": [("as I saw it", "as I saw it")],
}


@pytest.mark.spec("requirements:X73", "reliability:R3")
@pytest.mark.parametrize(
    ("agent_id", "result", "seen"), [(a, *pair) for a, pairs in TAKEN_BY.items() for pair in pairs]
)
async def test_manual_result_resolves_an_effect_in_doubt_and_is_recorded(agent_id: str, result: Any, seen: Any):
    DONE.clear()
    agents = [
        AgentDefinition("performs", model=None, handle_steps=performs),
        AgentDefinition("transfers", model=None, handle_steps=transfers, tools=[transfer]),
        AgentDefinition("asks-child", model=None, handle_steps=asks_child, spawnable_agents=["transfers"]),
    ]
    engine = Engine(agents)
    whole = MemoryJournal()
    await engine.run(agent_id, "go", journal=whole)
    lines = whole.lines()
    at = next(n for n, line in enumerate(lines) if b'"type":"tool_call"' in line or b'"type":"perform"' in line)
    journal = MemoryJournal(lines[: at + 1])
    (key,) = [f"doubt:{address}" for address in list_effects_in_doubt(journal.history())]
    DONE.clear()
    with pytest.raises(AnswerRejected, match="is not a possible result of the effect"):
        await engine.resume(journal, answers={key: Answer(result=object())})
    with pytest.raises(AnswerRejected, match="has a result and another value"):
        await engine.resume(journal, answers={key: Answer("yes", result="x")})
    done = await engine.resume(journal, answers={key: Answer(result=result, by="Ann", reason="looked")})
    replayed = await engine.replay(journal)
    await engine.aclose()

    assert [] == DONE
    assert ["then", seen] == done.output == replayed.output
    said = [record.input for record in journal.history().inputs if record.input["type"] == "manual_result"]
    assert [{"type": "manual_result", "by": "Ann", "reason": "looked"}] == said
    assert replayed.journal.lines() == journal.lines()


def test_result_answer_is_invalid_for_a_normal_question():
    question = Question("q1", "Ship it?")

    assert "not about an effect in doubt" in find_answer_problem(Answer(result="yes"), question)
