"""
Replays: equal to the byte, without a world; and divergences, which say what, where, why and what to do.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from datetime import UTC, datetime
from functools import partial
from typing import Any

import attrs
import pytest
from pydantic import BaseModel

from stepengine import (
    STEP,
    STEP_ALL,
    AgentCall,
    AgentDefinition,
    Complete,
    GenerateN,
    Limits,
    Parallel,
    Perform,
    RunStatus,
    Tool,
    ToolCall,
    Usage,
)
from stepengine.errors import ModelError, PerformError, ReplayDivergence
from stepengine.journal import MemoryJournal
from stepengine.journal.runs import replay
from stepengine.runtime import RetryPolicy, SystemClock
from stepengine.testing import failure, text, tool_call
from tests.loop_clock import put_clock_ahead

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}}


def echo(n: Any = None) -> Any:
    return n


def tool(name: str = "act", fn: Any = None, description: str = "Act.") -> Tool:
    return Tool(
        name=name,
        description=description,
        input_schema=SCHEMA,
        run=fn or (lambda given: f"did {given}"),
        in_thread=False,
    )


def here() -> int:
    return inspect.currentframe().f_back.f_lineno


# --- equal ----------------------------------------------------------------------------------------------------------


@pytest.mark.spec("reliability:I3", "replay:J23")
def test_replay_has_no_effects_and_an_equal_byte_identical_journal(world, fresh_world):
    recorded = MemoryJournal()
    expected = world.rig().record(recorded)
    for source in (recorded, MemoryJournal(recorded.lines())):
        elsewhere = fresh_world()
        rig = elsewhere.rig()
        result = rig.replay(source)
        assert elsewhere.done == []
        assert rig.model.calls == []
        assert attrs.evolve(result, journal=None) == attrs.evolve(expected, journal=None)
        assert b"".join(result.journal.lines()) == b"".join(recorded.lines())
        again = fresh_world().rig().replay(result.journal)
        assert again.journal.lines() == result.journal.lines()


@pytest.mark.spec("reliability:I3", "replay:J19", "replay:D1")
def test_every_yieldable_is_answered_from_the_record(rig):
    async def slow(n: int) -> int:
        await asyncio.sleep(0)
        return n * 2

    def broken() -> None:
        raise KeyError("gone")

    def handle_steps(ctx):
        seen = [ctx.random.random(), ctx.now().isoformat(), str(ctx.params)]
        seen.append((yield from Perform(slow, 4)))
        try:
            yield from Perform(broken)
        except PerformError as error:
            seen.append(error.kind)
        seen += yield from GenerateN(2)
        seen.append((yield from Complete("aside")).text)
        try:
            yield from Complete("fails")
        except ModelError as error:
            seen.append(error.status)
        turn = yield STEP_ALL
        seen.append(turn.agent_state.message_history[-1].text)
        refused = yield from Parallel(AgentCall("helper", "", {"wrong": 1}), AgentCall("helper", "hello"))
        seen += [(child.status.value, child.text) for child in refused]
        seen.append(ctx.now().isoformat())
        return seen

    strict = {"type": "object", "properties": {"ok": {"type": "integer"}}, "additionalProperties": False}
    helper = AgentDefinition("helper", model="t/h", input_schema=strict)
    agent = AgentDefinition(
        "all",
        model="t/m",
        tools=[tool()],
        spawnable_agents=[helper],
        handle_steps=handle_steps,
        instructions_prompt="Do.",
    )
    error = ModelError("busy", retryable=True, status=429)
    replies = [
        "one",
        failure(error),
        "two",
        text("aside", usage=Usage(3, 4)),
        failure(ModelError("no", status=400)),
        tool_call("act", {"n": 1}),
        "end",
        "child says",
    ]
    journal = MemoryJournal()
    expected = rig(agent, replies, retry=RetryPolicy(base_seconds=0)).record(journal, params={"a": [1, 2]})
    assert expected.status is RunStatus.COMPLETED, expected.error
    assert b'"attempts":[{"error":{"type":"model_error","message":"busy"' in b"".join(journal.lines())
    result = rig(agent).replay(MemoryJournal(journal.lines()))
    assert attrs.evolve(result, journal=None) == attrs.evolve(expected, journal=None)


@pytest.mark.spec("replay:J12", "replay:D8")
def test_computed_prompt_is_replayed_from_the_record(rig):
    class Clock:
        def __init__(self, now):
            self.now = now

        def render(self, ctx):
            return f"It is {self.now}."

    def agent(now):
        child = AgentDefinition("kid", model="t/m", system_prompt=Clock(now))
        return AgentDefinition(
            "boss", model="t/m", system_prompt=Clock(now), spawnable_agents=[child], handle_steps=steps
        )

    def steps(ctx):
        yield STEP
        return (yield from AgentCall("kid", "hi"))

    journal = MemoryJournal()
    recorder = rig(agent("noon"), ["a", "b"])
    recorder.record(journal)
    assert [r.system_prompt for r in recorder.model.calls] == ["It is noon."] * 2
    later = rig(agent("midnight")).replay(MemoryJournal(journal.lines()))
    assert (later.status, later.state.system_prompt, later.output) == (RunStatus.COMPLETED, "It is noon.", "b")


@pytest.mark.spec("reliability:MP32")
def test_time_never_goes_back_after_a_clock_change(rig):
    def handle_steps(ctx):
        yield from Perform(asyncio.sleep, 0.01)
        first = ctx.now()
        yield from Perform.idempotent(echo, 2)
        return [first.isoformat(), ctx.now().isoformat(), ctx.now() >= first]

    agent = AgentDefinition("clock", handle_steps=handle_steps)

    class Hasty(SystemClock):
        def now_ms(self):
            return 1_000 * super().now_ms()

    journals = [MemoryJournal()]
    rig(agent, clock=Hasty()).record(journals[0])
    lines = journals[0].lines()[:4]

    class Moved(SystemClock):
        def now(self):
            return super().now().replace(year=moved)

    for moved in (datetime.now(UTC).year + 10, 1990):
        journals.append(MemoryJournal(lines))
        _, second, forward = rig(agent, clock=Moved()).resume(journals[-1]).output
        assert forward
        times = [r.line["at"] for r in MemoryJournal(journals[-1].lines()).records() if r.kind == "result"]
        assert times == sorted(times)
        assert second.startswith(str(max(moved, datetime.now(UTC).year)))


@pytest.mark.spec("replay:J12", "requirements:L3")
def test_a_run_that_continued_another_is_replayed_with_its_history(rig):
    agent = AgentDefinition("talker", model="t/m")
    first = rig(agent, ["one"]).record(MemoryJournal(), "hello")
    journal = MemoryJournal()
    expected = rig(agent, ["two"]).record(journal, "and then?", previous=first.state, session_id="s", metadata={"k": 1})
    assert len(expected.state.message_history) == 4
    content = b"".join(journal.lines())
    assert content.count(b'"text":"hello"') == 1
    result = rig(agent).replay(MemoryJournal(content))
    assert (result.state, result.session_id) == (expected.state, "s")


# --- not equal ------------------------------------------------------------------------------------------------------


def recorded(rig, agent, replies=()):
    journal = MemoryJournal()
    result = rig(agent, replies).record(journal)
    assert result.status is RunStatus.COMPLETED, result.error
    return MemoryJournal(journal.lines())


def divergence(rig, agent, journal) -> ReplayDivergence:
    result = rig(agent).replay(journal)
    assert result.status is RunStatus.FAILED
    assert isinstance(result.error, ReplayDivergence)
    return result.error


@pytest.mark.spec("replay:D1")
def test_edited_handler_divergence_names_step_line_field_and_fix(rig):
    lines: dict[str, int] = {}
    schema = {"type": "object"}
    act = Tool(name="act", description="d", input_schema=schema, run=lambda given: "done", in_thread=False)

    def handler(word):
        def handle_steps(ctx):
            for _ in range(7):
                yield STEP
            lines["yield"] = here() + 1
            yield from ToolCall("act", {"word": word})

        return handle_steps

    def agent(word):
        return AgentDefinition("editor", model="t/m", tools=[act], handle_steps=handler(word))

    journal = recorded(rig, agent("old"), ["x"] * 7)
    error = divergence(rig, agent("new"), journal)
    assert (error.kind, error.address, error.step) == ("changed", "#7", 7)
    assert error.site == f"{__file__}:{lines['yield']}"
    assert error.diff == (("/input/word", '"old"', '"new"'),)
    message = str(error)
    assert "at step 7, effect #7 of editor: tool_call act changed" in message
    assert '/input/word                        recorded "old"   now "new"' in message
    assert (
        "cause looks like: the handler was edited, or computes the input from a value that is not recorded" in message
    )
    assert "engine.fork(journal, at='#6')" in message


@pytest.mark.spec("replay:D1", "replay:D4")
def test_inserted_removed_and_reordered_effects_are_distinguished(rig):
    done: list[Any] = []

    def agent(*names):
        def handle_steps(ctx):
            for name in names:
                if name == "step":
                    yield STEP
                else:
                    yield from Perform(done.append, name)

        return AgentDefinition("mover", model="t/m", handle_steps=handle_steps)

    journal = recorded(rig, agent("a", "b", "c", "step"), ["x"])
    done.clear()
    inserted = divergence(rig, agent("a", "new", "b", "c", "step"), journal)
    assert (inserted.kind, inserted.address) == ("changed", "#1")
    removed = divergence(rig, agent("a", "c", "step"), journal)
    assert (removed.kind, removed.address) == ("changed", "#1")
    assert "the same effect was recorded as #2, so an effect was removed before it" in str(removed)
    swapped = divergence(rig, agent("b", "a", "c", "step"), journal)
    assert swapped.address == "#0"
    other = divergence(rig, agent("a", "step"), journal)
    assert (other.kind, other.step) == ("kind", 1)
    assert "model_call instead of perform" in str(other)
    extra = divergence(rig, agent("a", "b", "c", "step", "more"), journal)
    assert (extra.kind, extra.address) == ("extra", "#4")
    assert done == []


@pytest.mark.spec("replay:D15", "replay:D4")
def test_unused_records_are_reported(rig):
    def agent(count):
        def handle_steps(ctx):
            for n in range(count):
                yield from Perform(echo, n)

        return AgentDefinition("counter", handle_steps=handle_steps)

    journal = recorded(rig, agent(3))
    error = divergence(rig, agent(1), journal)
    assert (error.kind, error.address) == ("unused", "#1")
    assert "the run ended, but perform echo was recorded here" in str(error)
    assert re.search(r"test_replay\.py:\d+$", error.site)
    shorter = rig(agent(1))
    assert asyncio.run(replay(journal, shorter.launch, complete=False)).status is RunStatus.COMPLETED
    asyncio.run(shorter.engine.aclose())


@pytest.mark.spec("reliability:JR24", "replay:D2")
def test_changes_without_effect_do_not_diverge(rig):
    def agent(display, *, shout):
        def handle_steps(ctx):
            ctx.notify("a" * shout)
            result = yield from ToolCall("act", {"n": 1})
            # A comment, another name and another limit are the author's business.
            return result.text

        return AgentDefinition(
            "quiet", display_name=display, tools=[tool()], handle_steps=handle_steps, limits=Limits(max_steps=9 + shout)
        )

    journal = recorded(rig, agent("A", shout=1))
    assert rig(agent("A", shout=1)).replay(journal).output == rig(agent("B", shout=3)).replay(journal).output != ""


@pytest.mark.spec("replay:D8", "replay:D7")
@pytest.mark.parametrize(
    ("change", "pointer", "cause"),
    [
        ({"system_prompt": "You judge."}, "/system_prompt", "the system prompt was changed"),
        ({"model": "t/other"}, "/model", "another model"),
        ({"tools": [tool(description="Act now.")]}, "/tools/0/description", "tools of the agent"),
        ({"tools": [tool(), tool("more")]}, "/tools/1", "tools of the agent"),
        ({"instructions_prompt": "Be short."}, "/messages/1", "a prompt was changed"),
        ({"settings": {"temperature": 0.5}}, "/settings", "model settings"),
    ],
)
def test_changed_part_of_a_request_is_named(rig, change, pointer, cause):
    from stepengine import ModelSettings

    if "settings" in change:
        change = {"settings": ModelSettings(temperature=0.5)}
    first = {"model": "t/m", "system_prompt": "You are a judge.", "tools": [tool()]}
    journal = recorded(rig, AgentDefinition("j", **first), ["ok"])
    error = divergence(rig, AgentDefinition("j", **{**first, **change}), journal)
    assert error.step == 1
    assert error.diff[0].pointer == pointer
    assert len(error.diff) == 1
    assert cause in str(error)


@pytest.mark.spec("replay:D1")
def test_diverging_child_stops_the_whole_tree(rig):
    done: list[str] = []
    resumed: list[str] = []

    def agent(word, *, output):
        def kid_steps(ctx):
            yield from Perform(echo, word)
            return output

        def handle_steps(ctx):
            yield from Parallel(AgentCall("kid"), AgentCall("kid"))
            resumed.append(word)
            yield from Perform(done.append, "after")

        kid = AgentDefinition("kid", handle_steps=kid_steps)
        return AgentDefinition("boss", spawnable_agents=[kid], handle_steps=handle_steps)

    journal = recorded(rig, agent("a", output=1))
    done.clear()
    resumed.clear()
    error = divergence(rig, agent("b", output=1), journal)
    assert error.address in ("0#0", "1#0")
    ended = divergence(rig, agent("a", output=2), journal)
    assert "the child kid ended differently" in str(ended)
    assert ended.diff[0] == ("/output", "1", "2")
    # Author code never sees that its child diverged.
    assert done == resumed == []


@pytest.mark.spec("replay:D4", "reliability:R22")
def test_undecodable_outcome_is_a_divergence(rig):
    agent = AgentDefinition("a", model="t/m")
    journal = recorded(rig, agent, ["ok"])
    for record in journal.records():
        if record.kind == "result" and record.line["seq"] == 0:
            record.read_from = {**record.line, "value": {"type": "HologramReply"}}
    error = divergence(rig, agent, journal)
    assert error.kind == "undecodable"
    assert "HologramReply" in str(error)


# --- unfinished and extended ----------------------------------------------------------------------------------------


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("replay:D15")
def test_replay_of_a_crashed_run_ends_with_its_record(world, fresh_world):
    journal = MemoryJournal()
    world.rig().record(journal)
    lines = journal.lines()
    for size in [*range(2, len(lines), 3), len(lines) - 1]:
        elsewhere = fresh_world()
        result = elsewhere.rig().replay(MemoryJournal(lines[:size]))
        # Without the root's end everything is there all the same.
        assert result.status is (RunStatus.COMPLETED if size == len(lines) - 1 else RunStatus.CANCELLED)
        assert elsewhere.done == []


@pytest.mark.spec("replay:J31", "reliability:R2")
def test_child_stopped_by_its_limit_stops_there_again(rig, monkeypatch):
    done: list[str] = []

    async def slow(name):
        done.append(name)
        if name == "second":
            put_clock_ahead(monkeypatch, 6_000)
            await asyncio.Event().wait()

    def kid_steps(ctx):
        yield from Perform.idempotent(slow, "first")
        yield from Perform.idempotent(slow, "second")
        yield from Perform.idempotent(slow, "third")

    def handle_steps(ctx):
        (child,) = yield from Parallel(AgentCall("kid"))
        yield from Perform.idempotent(slow, "after")
        return child.status.value

    kid = AgentDefinition("kid", handle_steps=kid_steps, limits=Limits(max_seconds=3_000))
    agent = AgentDefinition("boss", spawnable_agents=[kid], handle_steps=handle_steps)
    journal = MemoryJournal()
    expected = rig(agent).record(journal)
    assert expected.output == "failed"
    assert done == ["first", "second", "after"]
    lines = journal.lines()
    for source in (MemoryJournal(lines), MemoryJournal(lines[:-1]), MemoryJournal(lines[:-3])):
        result = rig(agent).resume(source)
        assert (result.status, result.output) == (RunStatus.COMPLETED, "failed")
    assert rig(agent).replay(MemoryJournal(lines)).output == "failed"
    assert done == ["first", "second", "after", "after"]


class Busy(ModelError):
    """
    An error that only this process knows.
    """


@pytest.mark.spec("reliability:R22")
def test_unstorable_error_looks_the_same_live_and_replayed(rig):
    def handle_steps(ctx):
        try:
            yield STEP
        except ModelError as error:
            return [type(error).__name__, error.message, error.status]

    agent = AgentDefinition("a", model="t/m", handle_steps=handle_steps)
    journal = MemoryJournal()
    live = rig(agent, [failure(Busy("come back", status=503))]).record(journal)
    assert live.output == ["ModelError", "come back", 503]
    assert rig(agent).replay(MemoryJournal(journal.lines())).output == live.output


@pytest.mark.spec("replay:D1", "replay:D4")
def test_finished_child_that_asks_for_more_diverges_on_resume(rig):
    done: list[str] = []

    def agent(*names):
        def kid_steps(ctx):
            for name in names:
                yield from Perform(done.append, name)

        def handle_steps(ctx):
            yield from AgentCall("kid")
            yield from Perform(done.append, "parent")

        kid = AgentDefinition("kid", handle_steps=kid_steps)
        return AgentDefinition("boss", spawnable_agents=[kid], handle_steps=handle_steps)

    journal = MemoryJournal()
    rig(agent("one")).record(journal)
    done.clear()
    cut = MemoryJournal(journal.lines()[:-3])
    assert not cut.history().is_complete
    result = rig(agent("one", "two")).resume(cut)
    assert isinstance(result.error, ReplayDivergence)
    assert (result.error.kind, result.error.address) == ("extra", "0#1")
    assert done == []


@pytest.mark.spec("reliability:R20", "replay:D2")
def test_non_json_arguments_are_recorded_by_name(rig):
    class Client:
        pass

    class Point(BaseModel):
        x: int

    def use(*things: Any) -> int:
        return len(things)

    def agent(point):
        def handle_steps(ctx):
            state = ctx.agent_state
            return (yield from Perform(partial(use, 1), Client(), Client, Point(x=point), state.usage, echo, lambda: 1))

        return AgentDefinition("a", handle_steps=handle_steps)

    journal = recorded(rig, agent(1))
    form = journal.history().form(journal.history().intents["", 0])
    names = [thing["name"] for thing in form["args"] if thing.get("type") == "object"]
    assert (form["name"], names) == ("use", ["Client", "Client", "echo", "<lambda>"])
    assert form["args"][2] == {"x": 1}
    assert rig(agent(1)).replay(journal).output == 7
    assert divergence(rig, agent(2), journal).diff == (("/args/2/x", "1", "2"),)


class Hostile:
    """
    What raises whatever is asked of it.
    """

    def __getattribute__(self, name: str) -> Any:
        msg = f"no {name}"
        raise RuntimeError(msg)

    def __call__(self) -> int:
        return 5


@pytest.mark.spec("replay:D2")
@pytest.mark.parametrize(
    ("yielded", "output"),
    [(lambda: Perform(lambda x: 1, [Hostile()]), 1), (lambda: Perform(Hostile()), "PerformError")],
    ids=["argument", "function"],
)
def test_hostile_objects_are_recorded_by_type_and_replayed(rig, yielded, output):
    def handle_steps(ctx):
        try:
            return (yield from yielded())
        except PerformError:
            return "PerformError"

    agent = AgentDefinition("a", handle_steps=handle_steps)
    journal = MemoryJournal()
    assert rig(agent).record(journal).output == rig(agent).replay(journal).output == output


@pytest.mark.spec("replay:D14")
def test_accepted_difference_uses_the_recorded_outcome(rig):
    def agent(*words):
        def handle_steps(ctx):
            for word in words:
                value = yield from Perform(echo, word)
                found.append(value)

        return AgentDefinition("a", handle_steps=handle_steps)

    found: list[str] = []
    journal = recorded(rig, agent("old", "same"))
    found.clear()

    def accepts(error: ReplayDivergence) -> bool:
        seen.append((error.address, [f.pointer for f in error.diff]))
        return error.address == "#0"

    seen: list[object] = []
    player = rig(agent("new", "same"))
    asyncio.run(replay(journal, player.launch, on_divergence=accepts))
    assert (found, seen) == (["old", "same"], [("#0", ["/args/0"])])
    other = rig(agent("new", "other"))
    with pytest.raises(ReplayDivergence) as caught:
        asyncio.run(replay(journal, other.launch, on_divergence=accepts))
    assert caught.value.address == "#1"
    asyncio.run(player.engine.aclose())
    asyncio.run(other.engine.aclose())


@pytest.mark.spec("replay:D7")
def test_inserted_message_is_shown_as_one_insertion(rig):
    def agent(extra, tail):
        def handle_steps(ctx):
            if extra:
                yield from ToolCall("add_message", {"role": "user", "content": "psst"})
            yield STEP

        return AgentDefinition("m", model="t/m", handle_steps=handle_steps, instructions_prompt="long " * 100 + tail)

    journal = recorded(rig, agent(extra=False, tail="a"), ["ok"])
    inserted = divergence(rig, agent(extra=True, tail="a"), journal)
    assert [(f.pointer, f.recorded) for f in inserted.diff] == [("/messages/2", "(absent)")]
    assert "psst" in inserted.diff[0].now
    changed = divergence(rig, agent(extra=False, tail="b"), journal)
    (field,) = changed.diff
    assert field.pointer == "/messages/1/content/0/text"
    assert field.recorded.startswith("...")
    assert field.recorded.endswith('g a"')
    assert len(str(changed)) < 1_500


@pytest.mark.spec("replay:D7")
def test_tags_and_ttl_are_no_difference_of_a_request(rig):
    def agent(unseen, tail):
        def handle_steps(ctx):
            messages = [{"role": "user", "content": "hello", **unseen}, {"role": "user", "content": tail}]
            yield from ToolCall("set_messages", {"messages": messages})
            yield STEP

        return AgentDefinition("m", model="t/m", handle_steps=handle_steps)

    journal = recorded(rig, agent({}, "a"), ["ok"])
    changed = divergence(rig, agent({"ttl": "user_prompt", "tags": ["x"]}, "b"), journal)
    assert ["/messages/1/content/0/text"] == [field.pointer for field in changed.diff]
