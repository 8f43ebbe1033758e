"""
Crashes: whatever a killed process leaves behind, the run goes on, and nothing that is recorded happens again (I11).
"""

from __future__ import annotations

import json
import re
from collections import Counter

import pytest

from stepengine import (
    AgentCall,
    AgentDefinition,
    Engine,
    Parallel,
    Perform,
    RunStatus,
    Tool,
    ToolAnnotations,
    ToolCall,
    tool,
)
from stepengine.data.messages import ToolResult
from stepengine.errors import AnswerRejected, DefinitionError, UnknownOutcome
from stepengine.journal import MemoryJournal, check
from stepengine.journal.encoding import may_change_world_if_repeated
from stepengine.journal.history import History


def deed(form):
    """
    Return what an effect of the sample agent leaves in its world; `None` for what leaves nothing.
    """
    if form["type"] == "tool_call":
        return f"{form['tool_name']} {form['input']['n']}"
    return f"fetch {form['args'][0]}" if form["type"] == "perform" else None


def facts(history: History):
    """
    Return the deeds of effects with a result, and of those in doubt that must not happen again.
    """
    sure, doubtful = set(), set()
    for address, intent in history.intents.items():
        form = history.form(intent)
        if deed(form) and address in history.results:
            sure.add(deed(form))
        elif deed(form) and may_change_world_if_repeated(form):
            doubtful.add(deed(form))
    return sure, doubtful


def resumed_from(prefix, fresh_world):
    """
    Resume from what a crash left; check what may never happen; return result, journal and whether anything was in doubt.
    """
    world, journal = fresh_world(), MemoryJournal(prefix)
    sure, doubtful = facts(journal.history())
    result = world.rig().resume(journal)
    assert not sure & set(world.done), "what is recorded was done again"
    assert not doubtful & set(world.done), "what is in doubt was done again"
    assert max(Counter(world.done).values(), default=0) <= 1
    assert check(journal).problems == ()
    return result, journal, bool(doubtful)


@pytest.fixture
def undisturbed(fresh_world):
    journal = MemoryJournal()
    result = fresh_world().rig().record(journal)
    return result, journal.lines()


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:I11", "reliability:R1", "reliability:R2", "reliability:R3", "replay:J31")
def test_run_cut_after_any_record_resumes_to_the_same_end(undisturbed, fresh_world):
    expected, lines = undisturbed
    in_doubt = 0
    for size in range(2, len(lines) + 1):
        result, journal, doubtful = resumed_from(lines[:size], fresh_world)
        in_doubt += doubtful
        if doubtful:
            assert "unknown_outcome" in str(journal.lines())
        else:
            assert (result.status, result.output, result.text) == (expected.status, expected.output, expected.text)
            calls = [i for i in MemoryJournal(lines[:size]).history().open.values() if i.type == "model_call"]
            assert result.usage.requests == expected.usage.requests + len(calls)
            assert result.usage.at_least == (expected.usage.at_least or bool(calls))
    assert in_doubt >= 5


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:I11", "reliability:JR01")
def test_run_with_a_torn_last_record_resumes(undisturbed, fresh_world):
    expected, lines = undisturbed
    whole = b"".join(lines)
    # The result of a model call, of a tool, the intent of a Perform, the end of a child.
    for number in (9, 12, 14, 38, len(lines) - 1):
        start = sum(map(len, lines[:number]))
        before = len(lines[:number])
        for size in range(start + 1, start + len(lines[number]) - 1, 13):
            journal = MemoryJournal(whole[:size])
            assert len(journal.records()) == before
        result, _, doubtful = resumed_from(whole[: start + 7], fresh_world)
        assert doubtful or result.output == expected.output


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:I11")
def test_repeated_crashes_during_resume_reach_the_same_end(undisturbed, fresh_world):
    expected, lines = undisturbed
    for first in (11, 31):
        _, journal, doubtful = resumed_from(lines[:first], fresh_world)
        again = journal.lines()
        for second in range(first, len(again), 7):
            result, _, doubtful_too = resumed_from(again[:second], fresh_world)
            assert doubtful or doubtful_too or result.output == expected.output


@pytest.mark.spec("reliability:R2", "replay:D15")
def test_resuming_a_finished_run_returns_its_result_without_effects(undisturbed, fresh_world):
    expected, lines = undisturbed
    world, journal = fresh_world(), MemoryJournal(lines)
    result = world.rig().resume(journal)
    assert (result.status, result.output, result.usage) == (expected.status, expected.output, expected.usage)
    assert world.done == []
    assert journal.lines() == lines


# --- in doubt -------------------------------------------------------------------------------------------------------


def doubtful_run(rig, done, catch=True):
    """
    An agent whose only effect is cut off; return it with the lines that a crash in the middle of the effect leaves.
    """

    def handle_steps(ctx):
        try:
            return (yield from Perform(done.append, "paid"))
        except UnknownOutcome as error:
            if not catch:
                raise
            return f"unknown: {error}"

    agent = AgentDefinition("payer", handle_steps=handle_steps)
    journal = MemoryJournal()
    rig(agent).record(journal)
    done.clear()
    return rig(agent), journal.lines()[:3]


@pytest.mark.spec("reliability:R3", "replay:J31")
def test_effect_in_doubt_is_raised_at_its_yield_once(rig):
    done = []
    payer, lines = doubtful_run(rig, done)
    journal = MemoryJournal(lines)
    result = payer.resume(journal)
    assert result.output.startswith(
        "unknown: list.append (#0) was begun, but the process ended before its result was recorded"
    )
    assert done == []
    again = payer.resume(MemoryJournal(journal.lines()[:4]), in_doubt="retry")
    assert (again.output, done) == (result.output, [])


@pytest.mark.spec("reliability:R3", "requirements:E17")
@pytest.mark.parametrize(
    ("options", "repeats"),
    [
        ({"category": "read"}, True),
        ({"idempotent": True}, True),
        ({}, False),
    ],
)
def test_a_tool_that_only_reads_is_repeated_after_a_crash(options, repeats):
    done = []

    @tool(in_thread=False, **options)
    def look() -> str:
        """
        Look.
        """
        done.append("looked")
        return "seen"

    agent = AgentDefinition("a", tools=[look], handle_steps=lambda ctx: (yield ToolCall("look")).tool_result.text)
    with Engine([agent]) as engine:
        journal = MemoryJournal()
        engine.run_sync("a", "go", journal=journal)
        lines = journal.lines()
        begun = 1 + next(n for n, line in enumerate(lines) if b'"tool_call"' in line)
        done.clear()
        result = engine.resume_sync(MemoryJournal(lines[:begun]))

    assert (["looked"] if repeats else []) == done
    if repeats:
        assert "seen" == result.output
    else:
        assert '@tool(idempotent=True), or @tool(category="read") of a tool that changes nothing' in str(result.error)


def test_a_tool_that_reads_cannot_be_destructive():
    with pytest.raises(DefinitionError, match="has category='read', which changes nothing, and destructive=True"):

        @tool(category="read", annotations=ToolAnnotations(destructive=True))
        def wipe() -> None:
            """
            Wipe.
            """


@pytest.mark.spec("reliability:R3")
def test_uncaught_effect_in_doubt_fails_the_run(rig):
    payer, lines = doubtful_run(rig, [], catch=False)
    result = payer.resume(MemoryJournal(lines))
    assert result.status is RunStatus.FAILED
    assert isinstance(result.error, UnknownOutcome)


@pytest.mark.spec("reliability:R3")
@pytest.mark.parametrize("in_child", [False, True])
def test_doubt_error_names_the_fork_that_repeats_the_effect(in_child):
    """
    The address stands in the error: of the first effect of a child it is that of the effect before the child.
    """
    done = []

    def pay(ctx):
        return (yield from Perform(done.append, "paid"))

    def lead(ctx):
        yield from Perform(done.append, "looked")
        yield from AgentCall("payer")

    agents = [
        AgentDefinition("payer", handle_steps=pay),
        AgentDefinition("lead", handle_steps=lead, spawnable_agents=["payer"]),
    ]
    name, path = ("lead", "1") if in_child else ("payer", "")
    whole = MemoryJournal()
    with Engine(agents) as engine:
        engine.run_sync(name, journal=whole)
        lines = whole.lines()
        records = [json.loads(line) for line in lines]
        began = next(
            n for n, r in enumerate(records) if (r["kind"], r.get("path"), r.get("seq")) == ("intent", path, 0)
        )
        journal = MemoryJournal(lines[: began + 1])
        done.clear()
        said = str(engine.resume_sync(journal).error)
        (place,) = re.findall(r"engine\.fork\(journal, at='([^']+)', allow_repeat=True\)", said)

        assert done == []
        assert engine.fork_sync(journal, at=place, allow_repeat=True).status is RunStatus.COMPLETED

    assert ["paid"] == done


@pytest.mark.spec("reliability:R3")
def test_effect_in_doubt_is_retried_on_request(rig):
    done = []
    payer, lines = doubtful_run(rig, done)
    assert payer.resume(MemoryJournal(lines), in_doubt="retry").status is RunStatus.COMPLETED
    assert done == ["paid"]


@pytest.mark.spec("reliability:R3", "reliability:R2")
@pytest.mark.parametrize(("answer", "deeds"), [("yes", ["paid"]), ("no", [])])
def test_a_person_can_decide_about_an_effect_in_doubt(rig, answer, deeds):
    done = []
    payer, lines = doubtful_run(rig, done)
    journal = MemoryJournal(lines)
    asked = payer.resume(journal, in_doubt="ask")
    assert asked.status is RunStatus.SUSPENDED
    (question,) = asked.pending_questions
    assert (question.id, question.options) == ("doubt:#0", ("yes", "no"))
    assert done == []
    result = payer.resume(journal, {question.id: answer}, in_doubt="ask")
    assert result.status is RunStatus.COMPLETED
    assert done == deeds


@pytest.mark.spec("reliability:R3", "replay:J31")
def test_model_call_in_doubt_is_repeated_and_lost_attempt_recorded(world, undisturbed):
    _, lines = undisturbed
    number = next(i for i, line in enumerate(lines) if b'"type":"model_call"' in line)
    journal = MemoryJournal(lines[: number + 1])
    rig = world.rig()
    assert rig.resume(journal).status is RunStatus.COMPLETED
    assert b'"attempts":[{"error":{"type":"unknown_outcome"' in journal.lines()[number + 1]


@pytest.mark.spec("requirements:X73", "replay:J31", "generator-contract:G39")
def test_call_in_doubt_in_a_batch_gets_an_error_result(rig):
    schema = {"type": "object"}
    tools = [Tool(name=n, description="d", input_schema=schema, run=lambda given: "ok", in_thread=False) for n in "ab"]

    def handle_steps(ctx):
        results = yield from Parallel(ToolCall("a"), ToolCall("b"))
        return [(r.status, r.text[:20]) for r in results if isinstance(r, ToolResult)]

    agent = AgentDefinition("batch", tools=tools, handle_steps=handle_steps)
    journal = MemoryJournal()
    rig(agent).record(journal)
    # Both intents and one result: the other call is in doubt.
    result = rig(agent).resume(MemoryJournal(journal.lines()[:5]))
    assert sorted(result.output) == [("error", "b (#1) was begun, bu"), ("ok", "ok")]


@pytest.mark.spec("reliability:R3")
@pytest.mark.parametrize("key", ["doubt:#9", "doubt:0/1#0"])
def test_decision_about_an_effect_not_in_doubt_is_rejected(rig, key):
    done = []
    payer, lines = doubtful_run(rig, done)
    journal = MemoryJournal(lines)

    with pytest.raises(AnswerRejected, match=r"is not an effect in doubt of this run; effects in doubt: doubt:#0$"):
        payer.resume(journal, {key: "yes"}, in_doubt="ask")
    assert (lines, []) == (journal.lines(), done)
