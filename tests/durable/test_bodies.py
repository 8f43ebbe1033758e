"""
Tools that yield in durable runs: a body alone is part of its caller's run, several at once are runs of their own.
"""

from __future__ import annotations

import contextlib
from typing import Any

import attrs
import pytest

from stepengine import (
    STEP,
    AgentCall,
    AgentDefinition,
    Ask,
    Change,
    Engine,
    Hooks,
    Limits,
    ModelSettings,
    Parallel,
    RunStatus,
    StepContext,
    Steps,
    ToolCall,
    call,
    tool,
)
from stepengine.errors import JournalError, LimitExceeded, ReplayDivergence
from stepengine.journal import MemoryJournal
from stepengine.journal.pending_items import find_open_questions
from stepengine.testing import ScriptedModel, text, tool_call, tool_calls
from stepengine.tools.bundled import agent_tool

from .shared import DONE, echo, note, priced, worker_of

WRITER = AgentDefinition("writer", model="test/model", system_prompt="You write notes.")


@tool(uses=[note])
def noted_twice(ctx: StepContext, name: str) -> Steps[str]:
    """
    Note something twice.

    Args:
        name: What.
    """
    first = yield from call(note, name=f"{name} 1")
    chance = round(ctx.random.random(), 6)
    second = yield from call(note, name=f"{name} 2")
    return f"{first}, {second}, {chance}"


@tool(uses=[note, noted_twice, WRITER])
def release(version: str, asks: bool = True) -> Steps[str]:
    """
    Release a version.

    Args:
        version: Which.
        asks: Whether somebody is asked.
    """
    tested = yield from call(noted_twice, name=f"test {version}")
    if asks:
        sure = yield from Ask(f"Release {version}?", key="sure", options=("yes", "no"))
    else:
        sure = "unasked"
    notes = yield from AgentCall("writer", f"Notes for {version}")
    many = yield from Parallel(ToolCall("note", {"name": f"{version} a"}), ToolCall("note", {"name": f"{version} b"}))
    yield from call(note, name=f"published {version}")
    return f"{version} {sure}: {notes}; {[each.text for each in many]}; {tested}"


def calls_one(ctx: StepContext) -> Steps[Any]:
    told = yield from call(release, version="1.0")
    yield from call(note, name="after")
    return [told, round(ctx.random.random(), 6)]


def calls_three(ctx: StepContext) -> Steps[Any]:
    told = yield from Parallel(
        ToolCall("release", {"version": "1", "asks": False}),
        ToolCall("release", {"version": "2"}),
        ToolCall("noted_twice", {"name": "3"}),
    )
    yield from call(note, name="after")
    return [each.text for each in told]


ONE = AgentDefinition("one", tools=[release, note], handle_steps=calls_one)
THREE = AgentDefinition("three", tools=[release, noted_twice, note], handle_steps=calls_three)


def notes(count: int) -> ScriptedModel:
    return ScriptedModel([text("notes")] * count)


def in_process(agent: AgentDefinition, count: int = 9) -> Engine:
    return Engine([agent], models=notes(count))


async def plain(agent: AgentDefinition, answers: dict[str, str], journal: Any = None) -> Any:
    DONE.clear()
    result = await in_process(agent).run(agent, "", answers=answers, journal=journal)
    done = list(DONE)
    DONE.clear()
    return result, done


def seed_of(journal: MemoryJournal) -> str:
    """What the randomness of a recorded run depends on."""
    head = journal.history().head
    assert head is not None
    return head.seed


def effects(journal: Any) -> dict[Any, Any]:
    """What a journal holds of every effect, without times and what follows from the run's id."""
    history = journal.history()
    found = {}
    for address, intent in history.intents.items():
        if address == ("", -1):
            continue
        form = {} if intent.type == "model_call" else dict(intent.effect)
        result = history.results.get(address)
        value = None if result is None else getattr(history.outcome(result), "value", None)
        found[address] = (intent.type, form, getattr(value, "text", value))
    return found


@attrs.frozen(kw_only=True)
class Runs:
    """
    One agent run in this process; the same by two workers, of which the second goes on where the first was asked; and replayed.
    """

    id: str
    before: list[str]
    asked: dict[str, str]
    after: list[str]
    results: tuple[Any, Any, Any]


async def run_in_every_way(agent: AgentDefinition, answers: dict[str, str], db: str) -> Runs:
    """
    Run *agent* in every way; what each leaves is the same.
    """
    journal = MemoryJournal()
    expected, done = await plain(agent, answers, journal)
    async with worker_of([agent], db, models=notes(9)) as worker:
        run = await worker.submit(agent, "", seed=seed_of(journal))
        waiting = await worker.result(run)
        before = list(DONE)
        asked = {view.id: view.state for view in await worker.operator.tree(run)}
    async with worker_of([agent], db, models=notes(9)) as worker:
        result = await worker.resume(run, answers=answers)
        after = [view.id for view in await worker.operator.tree(run)]
        exported = await worker.export(run)
    replayed = await in_process(agent, 0).replay(exported)

    assert sorted(done) == sorted(DONE)
    assert expected.output == result.output == replayed.output
    assert effects(journal) == effects(exported)
    assert expected.usage == result.usage == replayed.usage
    assert list(answers) == [question.text for question in waiting.pending_questions]
    return Runs(
        id=run,
        before=before,
        asked=asked,
        after=after,
        results=(expected, result, replayed),
    )


@pytest.mark.spec("programs:PG7", "durable:U48")
@pytest.mark.deep
async def test_single_body_runs_inside_its_caller_and_resumes(db: str):
    runs = await run_in_every_way(ONE, {"Release 1.0?": "yes"}, db)
    expected, result, replayed = runs.results

    assert ["test 1.0 1", "test 1.0 2"] == runs.before
    assert RunStatus.COMPLETED is result.status
    assert expected.text == result.text
    assert [runs.id] == list(runs.asked)
    # The writer stands below the body, which is none of the runs.
    assert [runs.id, f"{runs.id}/0.2"] == sorted(runs.after)
    assert expected.pending_questions == result.pending_questions
    assert 1 == len(result.children) == len(replayed.children)


@pytest.mark.spec("programs:PG7")
@pytest.mark.deep
async def test_parallel_bodies_are_separate_runs(db: str):
    runs = await run_in_every_way(THREE, {"Release 2?": "no"}, db)
    run, (_, result, replayed) = runs.id, runs.results

    assert {"published 1", "3 2"} <= set(runs.before)
    assert {"published 2", "after"}.isdisjoint(runs.before)
    assert {run, f"{run}/0", f"{run}/0.1", f"{run}/1", f"{run}/2"} == set(runs.asked)
    assert ("SUCCESS", "PENDING", "SUCCESS") == tuple(runs.asked[f"{run}/{n}"] for n in range(3))
    assert 2 == len(result.children) == len(replayed.children)


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("programs:PG7", "programs:PG5")
async def test_bodies_leave_todos_output_and_values_to_their_caller(db: str):
    """Todos and output, in the order of the calls; what hooks share as far as it is JSON."""
    script = [
        tool_calls(tool_call("kept", {"name": "a"}), tool_call("kept", {"name": "b"})),
        tool_call("kept", {"name": "c"}),
        text("done"),
    ]
    seen: list[Any] = []

    def shared(ctx: Any, asked: Any, result: Any) -> Any:
        seen.append((asked.tool_name, ctx.source, ctx.values.get("last")))
        return Change(values={"last": asked.input.get("name", asked.tool_name), "own": object()})

    def agent() -> AgentDefinition:
        return AgentDefinition(
            "keeper",
            model="test/model",
            tools=[kept],
            hooks=Hooks(post_tool=[shared]),
            output_mode="structured_output",
            output_schema=OUTPUT,
        )

    expected = await Engine([agent()], models=ScriptedModel(list(script))).run("keeper", "go")
    shown = list(seen)
    seen.clear()
    async with worker_of([agent()], db, models=ScriptedModel(list(script))) as worker:
        result = await worker.run("keeper", "go")
        views = await worker.operator.tree(result.journal)
        exported = await worker.export(result.journal)

    assert {"name": "c"} == expected.output == result.output
    assert expected.state.context == result.state.context
    assert [call.result.text for call in expected.tool_calls] == [call.result.text for call in result.tool_calls]
    assert {"kept"} == {view.attributes["tool"] for view in views if "/" in view.id}
    assert 3 == len(views)
    assert shown[-2:] == seen[-2:]
    replayed = await Engine([agent()], models=ScriptedModel([])).replay(exported)
    assert (result.output, result.state.context) == (replayed.output, replayed.state.context)


OUTPUT = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}


@tool(parallel_safe=True)
def kept(name: str) -> Steps[str]:
    """
    Keep a name.

    Args:
        name: Which.
    """
    yield ToolCall("write_todos", {"todos": [{"task": name, "completed": True}]})
    yield ToolCall("set_output", {"name": name})
    return f"kept {name}"


async def resumed(agent: AgentDefinition, journal: Any, answers: dict[str, str]) -> Any:
    """Go on with a recorded run until nothing is asked any more."""
    while True:
        open_ = find_open_questions(journal.history())
        given = {key: answers[question.text] for key, (_, question) in open_.items()}
        result = await in_process(agent).resume(journal, answers=given)
        if not result.pending_questions:
            return result


async def answered_by(worker: Any, run: str, answers: dict[str, str]) -> Any:
    """Go on with a durable run until nothing is asked any more."""
    result = await worker.result(run)
    while result.pending_questions:
        result = await worker.resume(run, answers={q.id: answers[q.text] for q in result.pending_questions})
    return result


def calls_both_ways(ctx: StepContext) -> Steps[Any]:
    alone = yield from call(release, version="1")
    both = yield from Parallel(ToolCall("release", {"version": "2"}), ToolCall("noted_twice", {"name": "3"}))
    return [alone, *[each.text for each in both], round(ctx.random.random(), 6)]


BOTH = AgentDefinition("both", tools=[release, noted_twice, note], handle_steps=calls_both_ways)


@pytest.mark.deep
@pytest.mark.spec("programs:PG7", "durable:U42")
async def test_run_moves_from_a_journal_in_mid_body_and_back(db: str):
    DONE.clear()
    answers = {"Release 1?": "yes", "Release 2?": "no"}
    journal = MemoryJournal()
    waiting = await in_process(BOTH).run(BOTH, "", journal=journal, answers={"Release 1?": "yes"})
    copy = MemoryJournal(journal.lines())
    before_move = list(DONE)
    expected = await resumed(BOTH, copy, answers)
    expected_done = sorted(DONE)
    DONE[:] = before_move
    async with worker_of([BOTH], db, models=notes(9)) as worker:
        run = await worker.submit_journal(journal)
        asked = await worker.result(run)
        result = await answered_by(worker, run, answers)
        exported = await worker.export(run)
    replayed = await in_process(BOTH, 0).replay(exported)

    assert [q.text for q in waiting.pending_questions] == [q.text for q in asked.pending_questions]
    assert expected.output == result.output == replayed.output
    assert expected_done == sorted(DONE)
    assert expected.usage == result.usage == replayed.usage
    assert effects(copy) == effects(exported)
    # What had ended has its times, so that a body that looks at the clock sees the same.
    before, after = journal.history().results, exported.history().results
    assert {address: known.at for address, known in before.items()} == {a: after[a].at for a in before}


EDITED: list[str] = []


@tool
def changing() -> Steps[str]:
    """Do something else since it was edited."""
    yield from call(note, name="other" if "effect" in EDITED else "same")
    sure = yield from Ask("Sure?")
    return "edited" if "result" in EDITED else f"as it was: {sure}"


def calls_alone(ctx: StepContext) -> Steps[Any]:
    told = yield from call(changing)
    sure = yield from Ask("Further?")
    yield from call(note, name="last")
    return [told, sure]


def calls_with_others(ctx: StepContext) -> Steps[Any]:
    told = yield from Parallel(ToolCall("changing", {}), ToolCall("note", {"name": "beside"}))
    sure = yield from Ask("Further?")
    yield from call(note, name="last")
    return [told[0].text, sure]


@pytest.mark.deep
@pytest.mark.parametrize(
    ("handler", "edit"), [(calls_alone, "result"), (calls_with_others, "effect"), (calls_with_others, "result")]
)
@pytest.mark.spec("programs:PG7", "durable:UT9", "replay:D1")
async def test_edited_body_diverges_and_resumes_with_the_original(db: str, handler: Any, edit: str):
    DONE.clear()
    EDITED.clear()
    agent = AgentDefinition("edited", tools=[changing, note], handle_steps=handler)
    is_alone = handler is calls_alone
    async with worker_of([agent], db, release="r1") as worker:
        run = (await worker.run(agent, "")).journal
        if edit == "result":
            await worker.resume(run, answers={"Sure?": "yes"})
    before = list(DONE)
    EDITED.append(edit)
    if is_alone or edit == "effect":
        async with worker_of([agent], db, release="r1") as worker:
            with pytest.raises((ReplayDivergence, JournalError), match="diverges from its record at"):
                await worker.result(run, waits=True)
    assert before == DONE
    EDITED.clear()
    async with worker_of([agent], db, release="r1") as worker:
        if is_alone or edit == "effect":
            await worker.operator.retry(run)
        result = await answered_by(worker, run, {"Sure?": "yes", "Further?": "on"})

    assert ["as it was: yes", "on"] == result.output
    assert [*before, "last"] == DONE


def given(ctx: Any) -> Change:
    """Give a run a tool that its agent has not."""
    return Change(tools=[kept])


def calls_given(ctx: StepContext) -> Steps[Any]:
    alone = yield ToolCall("kept", {"name": "a"}, include_tool_call=False)
    both = yield Parallel(
        ToolCall("kept", {"name": "b"}, include_tool_call=False), ToolCall("note", {"name": "beside"})
    )
    return [alone.tool_result.text, [each.text for each in both.value]]


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("programs:PG7", "durable:U48")
async def test_tool_added_by_a_hook_cannot_run_in_parallel(db: str):
    agent = AgentDefinition("given", tools=[note], hooks=Hooks(pre_run=[given]), handle_steps=calls_given)
    async with worker_of([agent], db) as worker:
        result = await worker.run(agent, "")
        exported = await worker.export(result.journal)
    replayed = await Engine([agent]).replay(exported)

    alone, (refused, beside) = result.output
    assert ("kept a", "beside") == (alone, beside)
    assert "call it alone" in refused
    assert result.output == replayed.output


CARRIED = agent_tool(AgentDefinition("carried", model="test/model", description="Is carried."))


@tool(uses=[CARRIED])
def carrying() -> Steps[str]:
    """Let the carried agent say something."""
    answer = yield ToolCall("carried", {"prompt": "x"})
    return str(answer.tool_result.text)


def calls_carried(ctx: StepContext) -> Steps[Any]:
    answer = yield ToolCall("carried", {"prompt": "x"})
    return answer.tool_result.text


def calls_carrying(ctx: StepContext) -> Steps[Any]:
    answer = yield ToolCall("carrying", {})
    return answer.tool_result.text


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("programs:PG4", "programs:PG7")
async def test_agent_tool_runs_as_its_own_workflow(db: str):
    alone = AgentDefinition("alone", tools=[CARRIED], handle_steps=calls_carried)
    in_a_body = AgentDefinition("in-a-body", tools=[carrying], handle_steps=calls_carrying)
    async with worker_of([alone, in_a_body], db, models=ScriptedModel([text("said")] * 2)) as worker:
        outputs = [(await worker.run(agent, "")).output for agent in (alone, in_a_body)]

    assert ["said", "said"] == outputs


def asker_steps(ctx: StepContext) -> Steps[Any]:
    return (yield from Ask("How many?"))


ASKER = AgentDefinition("asker", handle_steps=asker_steps)


@tool
def asked_here() -> Steps[str]:
    """Ask."""
    return str((yield from Ask("Here?")))


def hears(ctx: StepContext) -> Steps[Any]:
    yield from call(asked_here)
    first = yield STEP
    yield from AgentCall("asker", "")
    second = yield STEP
    yield from Parallel(ToolCall("asked_here", {}), ToolCall("note", {"name": "beside"}))
    third = yield STEP
    return [first.text, second.text, third.text]


HEARS = AgentDefinition(
    "hears", model="test/model", tools=[asked_here, note], spawnable_agents=[ASKER], handle_steps=hears
)


@pytest.mark.deep
@pytest.mark.spec("programs:PG7", "programs:PG5", "requirements:N3")
async def test_messages_during_a_body_or_child_are_journaled(db: str, until):
    said = ["left", "right", "straight on"]
    async with worker_of([HEARS], db, models=ScriptedModel([echo] * 9)) as worker:
        result = await worker.run(HEARS, "go")
        run = result.journal
        for word in said:
            await worker.operator.send_input(run, word)

            async def is_there():
                return any(each.end.tree is not None and each.tree.inboxes.root for each in worker._process.runs)

            await until(is_there)
            result = await worker.resume(run, answers={result.pending_questions[0].id: "yes"})
        exported = await worker.export(run)
    replayed = await Engine([HEARS], models=ScriptedModel([])).replay(exported)

    assert ["go | left", "go | left | right", "go | left | right | straight on"] == result.output
    assert result.output == replayed.output
    assert result.state.message_history == replayed.state.message_history


SCRIBE = AgentDefinition("scribe", model="test/model", settings=ModelSettings(max_tokens=96))


@tool(uses=[SCRIBE])
def many_notes(count: int) -> Steps[int]:
    """
    Let notes be written.

    Args:
        count: How many.
    """
    written = 0
    with contextlib.suppress(LimitExceeded):
        for number in range(count):
            answer = yield AgentCall("scribe", f"Note {number}")
            written += answer.value.status is RunStatus.COMPLETED
    return written


def writes_alone(ctx: StepContext) -> Steps[Any]:
    first = yield from call(many_notes, count=3)
    second = yield from call(many_notes, count=3)
    return [first, second]


def writes_beside(ctx: StepContext) -> Steps[Any]:
    told = yield from Parallel(ToolCall("many_notes", {"count": 3}), ToolCall("many_notes", {"count": 3}))
    third = yield from call(many_notes, count=3)
    return [*[int(each.text) for each in told], third]


@pytest.mark.deep
@pytest.mark.parametrize("handler", [writes_alone, writes_beside])
@pytest.mark.spec("programs:PG7", "programs:PG3", "durable:U23")
async def test_children_of_bodies_share_the_callers_budget(db: str, handler: Any):
    agent = AgentDefinition("writing", tools=[many_notes], handle_steps=handler)
    async with worker_of([agent], db, models=priced(99), pricing=None) as worker:
        poor = await worker.run(agent, "", limits=Limits(max_tokens=450))
        few = await worker.run(agent, "", limits=Limits(max_total_children=4))
        rich = await worker.run(agent, "")

    assert poor.usage.total_tokens <= 450
    assert 0 < sum(poor.output) < 6
    assert sum(each for each in rich.output) == 3 * len(rich.output)
    assert 300 * len(rich.output) == rich.usage.total_tokens
    assert 4 == sum(few.output) == len(few.children)


def cuts_others(ctx: StepContext) -> Steps[Any]:
    told = yield Parallel(ToolCall("waits_long", {}), ToolCall("fails_at_once", {}), fail_fast=True)
    return [[each.status, each.text] for each in told.value]


@tool
def fails_at_once() -> Steps[str]:
    """Fail."""
    yield from call(note, name="begun")
    raise ValueError("no")


@tool
def waits_long() -> Steps[str]:
    """Wait for somebody."""
    yield from Ask("Will anybody say?")
    return "never"


@pytest.mark.deep
@pytest.mark.spec("programs:PG7")
async def test_failed_body_cancels_its_siblings(db: str):
    agent = AgentDefinition("cutter", tools=[waits_long, fails_at_once, note], handle_steps=cuts_others)
    DONE.clear()
    async with worker_of([agent], db) as worker:
        # A look between the failure and the end of the other body finds a question that waits.
        result = await worker.result(await worker.submit(agent, ""), waits=True)
        states = {view.id.partition("/")[2]: view.state for view in await worker.operator.tree(result.journal)}
        exported = await worker.export(result.journal)
    replayed = await Engine([agent]).replay(exported)

    assert ["cancelled", "error"] == [status for status, _ in result.output]
    assert "ValueError: no" == result.output[1][1]
    assert result.output == replayed.output
    assert {"": "SUCCESS", "0": "CANCELLED", "1": "SUCCESS"} == states
    assert "begun" in DONE


def waits_in_bodies(ctx: StepContext) -> Steps[Any]:
    yield Parallel(ToolCall("waits_long", {}), ToolCall("waits_long", {}))


@pytest.mark.deep
@pytest.mark.spec("programs:PG7", "durable:U5")
async def test_cancelled_run_ends_its_bodies(db: str):
    agent = AgentDefinition("patient", tools=[waits_long, note], handle_steps=waits_in_bodies)
    async with worker_of([agent], db) as worker:
        waiting = await worker.run(agent, "")
        ended = await worker.operator.cancel(waiting.journal)
        states = {view.state for view in await worker.operator.tree(waiting.journal)}

    assert 2 == len(waiting.pending_questions)
    assert {waiting.journal, f"{waiting.journal}/0", f"{waiting.journal}/1"} == set(ended)
    assert {"CANCELLED"} == states


@pytest.mark.deep
@pytest.mark.spec("programs:PG7", "durable:U44")
async def test_events_of_bodies_can_be_followed_elsewhere(db: str):
    answers = {"Release 1?": "yes", "Release 2?": "no"}
    async with worker_of([BOTH], db, models=notes(9)) as worker:
        run = await worker.submit(BOTH, "", answers=answers)
        followed = [event async for event in worker.events(run)]
        result = await worker.result(run)

    shown = [event.tool_name for event in followed if type(event).__name__ == "ToolStarted"]
    assert 2 == shown.count("release")
    assert RunStatus.COMPLETED is result.status
    assert result.output == followed[-1].result.output
