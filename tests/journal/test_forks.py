"""
Forks, differences, checks and copies without secrets.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from stepengine import (
    STEP,
    AgentCall,
    AgentDefinition,
    Ask,
    Engine,
    Parallel,
    Perform,
    RunStatus,
    Start,
    Tool,
    ToolCall,
    Wait,
)
from stepengine.debugging import describe_run, render_text
from stepengine.errors import AnswerRejected, JournalError, PerformError
from stepengine.journal import MemoryJournal, SqliteJournal, check, decisions, diff
from stepengine.journal.forks import branch
from stepengine.journal.runs import fork
from stepengine.testing import Clock, ScriptedModel
from tests.journal.mutants import sealed, unsealed


@pytest.fixture
def recorded(fresh_world):
    journal = MemoryJournal()
    result = fresh_world().rig().record(journal)
    return result, MemoryJournal(journal.lines())


# --- forks ----------------------------------------------------------------------------------------------------------


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("replay:D11", "reliability:R2")
def test_run_forked_at_any_effect_reaches_the_same_end(recorded, fresh_world):
    expected, journal = recorded
    history = journal.history()
    for path, seq in list(history.intents):
        made = branch(journal, f"{path}#{seq}", allow_repeat=True)
        kept = set(made.history().results)
        world = fresh_world()
        result = world.rig().resume(made)
        assert (result.status, result.output) == (expected.status, expected.output)
        assert result.state.run_id == expected.state.run_id
        head = made.history().head
        assert head.run != history.head.run
        assert head.parent == {"run": history.head.run, "at": f"{path}#{seq}"}
        assert check(made)
        assert ((path, seq) in kept) == (seq >= 0)
    assert journal.lines() == recorded[1].lines()


@pytest.mark.spec("replay:D11", "reliability:I2")
def test_fork_inside_a_child_keeps_a_finished_sibling(recorded, fresh_world):
    _, journal = recorded
    made = branch(journal, "9#0", allow_repeat=True)
    results = made.history().results
    assert ("8", 2) in results
    assert ("", 8) in results
    assert ("9", 0) in results
    assert ("9", 1) not in results
    assert ("", 9) not in results
    assert ("", 10) in results
    world = fresh_world()
    world.rig().resume(made)
    assert world.done == ["look 5", "send 5"]


def runner(done: list[str]) -> AgentDefinition[Any]:
    def work(name: str) -> str:
        done.append(name)
        return name

    def handle_steps(ctx):
        try:
            first = yield from Perform(work, "first")
        except PerformError as error:
            first = error.message
        tool = yield from ToolCall("act", {"n": 1})
        turn = yield STEP
        asked = yield from Ask("Sure?", options=["yes", "no"])
        last = yield from Perform(work, f"{first} {tool.text} {turn.agent_state.message_history[-1].text} {asked}")
        return last

    schema = {"type": "object"}
    act = Tool(name="act", description="d", input_schema=schema, run=lambda given: work("tool"), in_thread=False)
    return AgentDefinition("runner", model="t/m", tools=[act], handle_steps=handle_steps)


@pytest.mark.spec("replay:D11", "replay:D10")
@pytest.mark.parametrize(
    ("at", "edit", "replies", "output"),
    [
        (0, "edited", ["said"], "edited tool said yes"),
        ("#0", lambda value: value.upper(), ["said"], "FIRST tool said yes"),
        (0, PerformError("it failed"), ["said"], "it failed tool said yes"),
        (1, lambda result: {"json": result.text}, ["said"], 'first {"json":"tool"} said yes'),
        (2, "rewritten", [], "first tool rewritten yes"),
        (3, "no", [], "first tool said no"),
    ],
)
def test_run_continues_from_an_edited_outcome(rig, at, edit, replies, output):
    done: list[str] = []
    journal = MemoryJournal()
    rig(runner(done), ["said"]).record(journal, answers={"Sure?": "yes"})
    before = journal.lines()
    done.clear()
    player = rig(runner(done), replies)

    async def run():
        result = await fork(
            journal, player.launch, at=at, edit=edit, allow_repeat=True, answers={"Sure?": "yes"} if at != 3 else None
        )
        await player.engine.aclose()
        return result

    # A question that is not asked yet cannot be answered up front.
    if at == 3:
        result = asyncio.run(run())
    else:
        made = branch(journal, at, edit, allow_repeat=True)
        waiting = player.resume(made)
        assert waiting.status is RunStatus.SUSPENDED
        result = rig(runner(done)).resume(made, {"Sure?": "yes"})
    assert (result.status, result.output) == (RunStatus.COMPLETED, output)
    assert done[-1] == output
    assert journal.lines() == before


@pytest.mark.spec("replay:D10")
def test_fork_that_repeats_side_effects_needs_allow_repeat(recorded):
    _, journal = recorded
    with pytest.raises(JournalError, match=r"#11 tool_call send. Pass allow_repeat=True \(--allow-repeat\)") as caught:
        branch(journal, 10)
    assert "look" not in str(caught.value)
    assert branch(journal, 11).history().results


@pytest.mark.spec("reliability:I2", "replay:D11")
@pytest.mark.parametrize(
    ("at", "said"),
    [
        (99, "has no effect #99: the run there has the effects 0 to 11"),
        ("77#0", "there is no run at that path"),
        ("x", "an address must be the number"),
        (True, "an address must be the number"),
        ("9#0", "no result yet; resume the run"),
        (8, "the outcome of a child follows from its own effects"),
        (-1, "the start of a run has no outcome to edit"),
    ],
)
def test_invalid_fork_is_rejected_with_a_reason(recorded, at, said):
    journal = recorded[1]
    if at == "9#0":
        lines = journal.lines()
        journal = MemoryJournal(lines[: next(i for i, x in enumerate(lines) if b'"path":"9","seq":0' in x) + 1])
    with pytest.raises(JournalError, match=said):
        branch(journal, at, "edited", allow_repeat=True)


def test_fork_writes_to_its_own_file_or_store(recorded, fresh_world, tmp_path):
    expected, journal = recorded
    store = SqliteJournal(tmp_path / "runs.db")
    for into in (tmp_path / "fork.jsonl", store, store):
        made = branch(journal, 7, allow_repeat=True, into=into)
        assert fresh_world().rig().resume(made, asks_about_calls=False).output == expected.output
    assert len(store.runs()) == 2
    with pytest.raises(JournalError, match="a fork needs its own journal"):
        branch(journal, 7, allow_repeat=True, into=tmp_path / "fork.jsonl")


# --- differences ----------------------------------------------------------------------------------------------------


@pytest.mark.spec("replay:D13")
def test_diff_aligns_added_removed_and_changed_effects(rig):
    def recording(*names, prompt="go", answer="fine"):
        def kid_steps(ctx):
            yield from Perform(str, ctx.prompt)
            return ctx.prompt

        def handle_steps(ctx):
            for name in names:
                yield from Perform(str, name)
            yield from Parallel(AgentCall("kid", names[-1]))
            yield STEP

        kid = AgentDefinition("kid", handle_steps=kid_steps)
        agent = AgentDefinition("a", model="t/m", spawnable_agents=[kid], handle_steps=handle_steps)
        journal = MemoryJournal()
        rig(agent, [answer]).record(journal, prompt)
        return MemoryJournal(journal.lines())

    base = recording("a", "b", "c")
    shown = [(c.kind, c.a, c.b) for c in diff(base, recording("a", "new", "b", "c")).changes]
    assert shown == [("added", "", "#1")]
    assert [(c.kind, c.a) for c in diff(base, recording("a", "c")).changes] == [("removed", "#1")]
    other = diff(base, recording("a", "b", "C"))
    assert [(c.kind, c.a, c.b) for c in other.changes[:2]] == [("changed", "#2", "#2"), ("outcome", "#2", "#2")]
    assert ("3#0", "perform str") in [(c.a, c.what) for c in other.changes]
    said = diff(base, recording("a", "b", "c", prompt="stop", answer="bad"))
    assert [c.kind for c in said.changes] == ["start", "changed", "outcome", "end"]
    assert "/messages/0/content/0/text" in str(said)
    assert said.to_json()["changes"][2]["fields"][0]["now"] == '"bad"'
    assert said.totals["model calls"] == (1, 1)


@pytest.mark.spec("replay:D13", "reliability:JR48")
def test_background_childs_end_is_compared_and_no_decision():
    def recording(word):
        def kid_steps(ctx):
            answer = yield from Ask("Which?", options=["a", "b"])
            return f"{answer}, {word}"

        def handle_steps(ctx):
            child = yield from Start(AgentCall("kid"))
            yield from Wait(child)

        kid = AgentDefinition("kid", handle_steps=kid_steps)
        agent = AgentDefinition("a", spawnable_agents=[kid], handle_steps=handle_steps)
        with Engine([agent]) as engine:
            return engine.run_sync("a", journal=MemoryJournal(), answers={"Which?": "b"}).journal

    here, there = recording("said here"), recording("said there")
    assert ("end", "0#-1", "0#-1") in [(c.kind, c.a, c.b) for c in diff(here, there).changes]
    assert not diff(here, recording("said here"))
    assert [("Which?", "b")] == [(one.asked, one.said) for one in decisions(here)]


@pytest.mark.spec("replay:D11")
def test_fork_with_rejected_answer_leaves_nothing_behind(tmp_path):
    def handle_steps(ctx):
        return (yield from Parallel(Ask("Which?", options=["red", "blue"]), Perform(str, "done")))

    into = tmp_path / "fork.jsonl"
    with Engine([AgentDefinition("a", handle_steps=handle_steps)]) as engine:
        waits = engine.run_sync("a", journal=MemoryJournal())
        question = waits.pending_questions[0].id
        with pytest.raises(AnswerRejected):
            engine.fork_sync(waits.journal, at=1, into=into, answers={question: "green"})
        assert not into.exists()
        assert (
            engine.fork_sync(waits.journal, at=1, into=into, answers={question: "blue"}).status is RunStatus.COMPLETED
        )


# --- checks and copies ----------------------------------------------------------------------------------------------


@pytest.mark.spec("reliability:JR02")
def test_check_lists_all_problems_without_raising(recorded, tmp_path):
    _, journal = recorded
    good = check(journal)
    assert (bool(good), good.is_complete, good.torn) == (True, True, 0)
    assert good.records == len(journal.lines())
    assert check(tmp_path / "nothing.jsonl").problems == (f"{tmp_path / 'nothing.jsonl'} contains no records",)
    path = tmp_path / "j.jsonl"
    path.write_bytes(b"".join(journal.lines()[:-1]) + b"\x00" * 9)
    assert (check(path).torn, check(path).is_complete) == (9, False)
    path.write_bytes(b"rubbish\n" + b"".join(journal.lines()))
    assert "record 1 (byte 0)" in check(path).problems[0]

    def forged(number, old, new):
        records = unsealed(journal.lines())
        records[number] = json.loads(json.dumps(records[number]).replace(old, new))
        path.write_bytes(sealed(records))
        return check(path).problems

    assert forged(2, '"config"', '"forged"') == ("the fingerprint of the intent #0 does not match its effect",)
    assert "does not match its fingerprint" in forged(6, "You decide.", "You obey.")[0]
    assert "the result of #0 cannot be read" in forged(3, '"json"', '"hologram"')[0]


@pytest.mark.spec("replay:D11", "replay:J11")
@pytest.mark.parametrize("tools", [None, "working-copy"])
def test_the_time_of_a_fork_starts_at_its_creation(tools: str | None) -> None:
    clock = Clock()

    def work(n: int) -> int:
        clock.advance(seconds=n)
        return n

    def handle_steps(ctx):
        yield from Perform(work, 5)
        yield from Perform(work, size)

    size = 2
    with Engine(
        [AgentDefinition("worker", handle_steps=handle_steps)], models=ScriptedModel([]), clock=clock
    ) as engine:
        journal = MemoryJournal()
        engine.run_sync("worker", "go", journal=journal)
        clock.advance(minutes=20)
        size = 3
        how = {"tools": tools} if tools else {"allow_repeat": True}
        fork = engine.fork_sync(journal, at=0, **how).journal

    assert (7_000, 3_000) == (describe_run(journal)["milliseconds"], describe_run(fork)["milliseconds"])
    assert render_text(fork).partition("\n")[0].endswith(", 3.0 s")
    assert (7_000, 3_000) == diff(journal, fork).totals["milliseconds"]
