"""
Handles, fit for a server: who comes late or comes back loses nothing, what is sent arrives, and runs are found by their ids.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import tracemalloc
from collections.abc import Callable
from decimal import Decimal
from functools import partial
from typing import Any

import pytest

from stepengine import (
    STEP,
    AgentCall,
    AgentDefinition,
    AnswerInput,
    Ask,
    Engine,
    Interrupt,
    LogObserver,
    Perform,
    RunStatus,
    ToolContext,
    ToolResult,
    ToolResultInput,
    Usage,
    UserInput,
    call,
    map_agents,
    tool,
)
from stepengine.data.messages import TextPart, ThinkingPart, ToolCallPart
from stepengine.data.models import ModelReply, ReplyDone, StopReason, TextChunk
from stepengine.data.state import RunPhase
from stepengine.errors import (
    AnswerRejected,
    DataError,
    InputError,
    JournalError,
    MissingKey,
    ModelError,
    StepEngineError,
    ToolError,
)
from stepengine.events import (
    AgentFinished,
    EventsDropped,
    ModelFinished,
    RunFinished,
    RunStarted,
    StepFinished,
    TextCompleted,
    TextDelta,
    ThinkingCompleted,
    ThinkingDelta,
    TodosChanged,
    ToolStarted,
)
from stepengine.journal import MemoryJournal
from stepengine.sessions import MemorySessions
from stepengine.testing import ScriptedModel, failure, text, tool_call, tool_calls
from stepengine.tools.bundled import control_tools

SECONDS = 50


def plain(id: str = "a", **options: Any) -> AgentDefinition[Any]:
    return AgentDefinition(id, **{"model": "t/m", **options})


async def all_of(events) -> list[Any]:
    async with asyncio.timeout(SECONDS):
        return [event async for event in events]


async def until(handle, kind: str, **options: Any) -> Any:
    """
    The first event of a kind.
    """
    async with asyncio.timeout(SECONDS):
        async for event in handle.events(**options):
            if event.type == kind:
                return event
    raise AssertionError(kind)


async def turns(count: int = 3) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def holds(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():  # noqa: ASYNC110 - nobody tells of it
            await asyncio.sleep(0)


class Slow(ScriptedModel):
    """
    A model that streams pieces and lets everybody else go on after each one.
    """

    def __init__(self, *pieces: str) -> None:
        super().__init__([])
        self.pieces = pieces
        self.half = asyncio.Event()
        self.go_on = asyncio.Event()

    async def stream(self, request):
        for number, piece in enumerate(self.pieces):
            if number == len(self.pieces) // 2:
                self.half.set()
                await self.go_on.wait()
            yield TextChunk(piece)
            await asyncio.sleep(0)
        yield ReplyDone(ModelReply("".join(self.pieces)))


# --- events -------------------------------------------------------------------------------------------------------------


@pytest.mark.spec("interfaces:IF6", "interfaces:IF2")
async def test_each_subscriber_gets_every_event_at_the_same_position():
    engine = Engine([plain()], models=ScriptedModel(["Hello."]))
    async with engine.start("a", "go") as handle:
        early = handle.events()
        await turns()
        late = handle.events()
        first = await all_of(early)
        second, last = await all_of(late), await all_of(handle.events())

    assert [*range(len(first))] == [e.index for e in first]
    assert isinstance(first[0], RunStarted)
    assert isinstance(first[-1], RunFinished)
    for shown in (second, last):
        # What streamed before it came is not repeated in pieces: the completed text stands for it.
        assert [e.id for e in first if e.type != "text_delta"] == [e.id for e in shown if e.type != "text_delta"]
        assert "Hello." in [e.text for e in shown if isinstance(e, TextCompleted)]
    assert {handle.run_id} == {e.run_id for e in first}
    assert {handle.epoch} == {e.epoch for e in first}
    assert f"{handle.epoch}-0" == first[0].id == f"{first[0].to_json()['epoch']}-{first[0].to_json()['index']}"


async def test_finished_model_calls_name_the_calls_that_follow():
    @tool
    async def look(at: int) -> str:
        """Look."""
        return "seen"

    paused = ModelReply((TextPart("I look."), ToolCallPart("x", "look", {"at": 1})), stop_reason=StopReason.PAUSE)
    script = [paused, tool_call("look", {"at": 2}), "done"]
    async with Engine([plain(tools=[look])], models=ScriptedModel(script)).start("a", "go") as handle:
        events = await all_of(handle.events())

    named = [call_id for event in events if isinstance(event, ModelFinished) for call_id in event.call_ids]
    assert ["c1", "c2"] == named == [event.tool_call_id for event in events if isinstance(event, ToolStarted)]


@pytest.mark.spec("interfaces:IF6", "interfaces:IF4")
async def test_subscriber_in_mid_reply_gets_the_text_sent_before():
    model = Slow(*[f"{n} " for n in range(100)])
    async with Engine([plain()], models=model).start("a", "go") as handle:
        early = handle.events()
        await model.half.wait()
        await turns()
        late = handle.events()
        model.go_on.set()
        shown = [await all_of(each) for each in (early, late)]

    whole = "".join(model.pieces)
    for events in shown:
        assert whole == "".join([e.text for e in events if isinstance(e, TextDelta)])
        assert [e.index for e in events] == sorted([e.index for e in events])
    assert 100 == sum(isinstance(e, TextDelta) for e in shown[0])
    assert sum(isinstance(e, TextDelta) for e in shown[1]) < 60


@pytest.mark.spec("interfaces:IF6")
@pytest.mark.parametrize("cuts", [1, 3, 7])
async def test_reader_that_reconnects_repeatedly_loses_and_doubles_nothing(cuts):
    model = Slow(*[f"{n} " for n in range(40)])
    async with Engine([plain()], models=model).start("a", "go") as handle:
        whole = handle.events()
        model.go_on.set()
        got: list[Any] = []
        after = None
        while not (got and isinstance(got[-1], RunFinished)):
            async with asyncio.timeout(SECONDS):
                events = handle.events(after=after)
                async for event in events:
                    got.append(event)
                    after = event.id
                    if len(got) % cuts == 0:
                        break
                await events.aclose()
        all_events = await all_of(whole)

    assert not [e for e in got if isinstance(e, EventsDropped)]
    assert "".join(model.pieces) == "".join([e.text for e in got if isinstance(e, TextDelta)])
    rest = [[e.id for e in events if not isinstance(e, TextDelta)] for events in (got, all_events)]
    assert rest[0] == rest[1]


@pytest.mark.spec("interfaces:IF6")
async def test_event_id_of_another_process_gets_a_notice():
    async with Engine([plain()], models=ScriptedModel(["ok"])).start("a", "go") as handle:
        await handle.result()
        other = "00000000" if handle.epoch != "00000000" else "00000001"
        shown = await all_of(handle.events(after=f"{other}-3"))

        assert (EventsDropped, "epoch") == (type(shown[0]), shown[0].reason)
        assert [0, -1] == [shown[1].index, shown[0].index]
        for wrong in (
            "",
            "7",
            "x-7",
            f"{handle.epoch}-",
            f"{handle.epoch}--1",
            f"{handle.epoch}-²",
            f"{handle.epoch}-1e9",
        ):
            with pytest.raises(StepEngineError, match="is not the id of an event"):
                handle.events(after=wrong)
        with pytest.raises(StepEngineError, match="names an event that does not exist yet"):
            handle.events(after=f"{handle.epoch}-{shown[-1].index + 1}")
        assert [] == await all_of(handle.events(after=shown[-1].id))


@pytest.mark.spec("interfaces:IF6", "requirements:O4", "interfaces:IF2", "interfaces:IF12")
async def test_observer_can_tell_runs_apart_and_children_carry_the_root():
    seen: list[Any] = []

    def parent(ctx):
        yield AgentCall("kid", prompt="go")

    engine = Engine(
        [plain("boss", handle_steps=parent, spawnable_agents=["kid"]), plain("kid")],
        models=ScriptedModel(["one", "two"]),
        observers=[seen.append],
    )
    results = await asyncio.gather(*[engine.run("boss", "go") for _ in range(2)])

    for result in results:
        own = [e for e in seen if e.run_id == result.state.run_id]
        assert [*range(len(own))] == [e.index for e in own]
        assert {"", "0"} == {e.path for e in own}
        assert 1 == len({e.epoch for e in own})
        started = {e.path: e for e in own if isinstance(e, RunStarted)}
        assert (result.state.run_id, result.children[0].run_id) == (started[""].own_id, started["0"].own_id)
    assert len(seen) == sum(e.run_id in {r.state.run_id for r in results} for e in seen)


@pytest.mark.spec("interfaces:IF6", "interfaces:IF4")
async def test_completed_text_belongs_to_the_call_whose_deltas_it_replaces():
    replies = [ModelReply([ThinkingPart("Hm."), TextPart("Hello.")])]
    events = [e async for e in Engine([plain()], models=ScriptedModel(replies)).stream("a", "go")]
    for pieces, completed in ((TextDelta, TextCompleted), (ThinkingDelta, ThinkingCompleted)):
        deltas, whole = ([e for e in events if isinstance(e, kind)] for kind in (pieces, completed))

        assert {(e.path, e.seq) for e in deltas} == {(e.path, e.seq) for e in whole} != set()


@pytest.mark.spec("interfaces:IF12", "interfaces:IF34", "requirements:N8")
async def test_watcher_sees_texts_failures_spending_and_todos_of_children():
    def boss(ctx):
        yield STEP
        for kid in ("good", "bad"):
            yield AgentCall(kid, prompt="go")

    todos = [{"task": "look", "completed": False}]
    agents = [
        plain("boss", handle_steps=boss, tools=control_tools(), spawnable_agents=["good", "bad"]),
        plain("good"),
        plain("bad"),
    ]
    used = Usage(input_tokens=10, output_tokens=1)
    replies = [
        tool_call("write_todos", {"todos": todos}, usage=used),
        text("Fine.", usage=used),
        failure(ModelError("down")),
    ]
    engine = Engine(agents, models=ScriptedModel(replies), pricing=lambda *_: Decimal("0.5"))
    async with engine, engine.start("boss", "go") as handle:
        events = await all_of(handle.events())

    (changed,) = [e for e in events if isinstance(e, TodosChanged)]
    assert ("", todos) == (changed.path, changed.to_json()["todos"])
    (step,) = [e for e in events if isinstance(e, StepFinished) and not e.path]
    good, bad = [e for e in events if isinstance(e, AgentFinished)]
    assert (Decimal("0.5"), "0.5") == (step.cost, step.to_json()["cost"])
    assert ("Fine.", "", Decimal("0.5"), 11) == (good.text, good.error, good.cost, good.usage.total_tokens)
    assert ("failed", "", True) == (bad.status.value, bad.text, "down" in bad.error)


@pytest.mark.spec("interfaces:IF12")
async def test_watcher_of_a_child_awaiting_an_answer_sees_no_error():
    def boss(ctx):
        yield AgentCall("kid", prompt="go")

    agents = [
        plain("boss", handle_steps=boss, model=None, spawnable_agents=["kid"]),
        plain("kid", handle_steps=asks, model=None),
    ]
    async with Engine(agents) as engine:
        handle = engine.start("boss", "go", journal=MemoryJournal())
        events = await all_of(handle.events())

    assert [("suspended", "")] == [(e.status.value, e.error) for e in events if isinstance(e, AgentFinished)]


@pytest.mark.spec("interfaces:IF6", "reliability:R2", "interfaces:IF2", "interfaces:IF8")
async def test_background_resume_shows_only_new_events_in_another_epoch():
    def handle_steps(ctx):
        yield Perform(turns)
        answer = yield Ask("Which?")
        return answer.value

    agent, journal = plain(handle_steps=handle_steps, model=None), MemoryJournal()
    async with Engine([agent]) as engine:
        async with engine.start("a", "go", journal=journal) as first:
            assert RunStatus.SUSPENDED is (await first.result()).status
            before = await all_of(first.events())
        with pytest.raises(AnswerRejected):
            await engine.start_resume(journal, answers={"other": "x"})
        (question,) = (await first.result()).pending_questions
        handle = await engine.start_resume(journal, answers={question.id: "this"})
        events = await all_of(handle.events(after=before[-1].id))

    assert (handle.run_id, "this") == (first.run_id, (await handle.result()).output)
    assert first.epoch != handle.epoch
    assert ("events_dropped", "epoch", "run_started") == (events[0].type, events[0].reason, events[1].type)
    assert [False, True] == [started.resumed for started in (before[0], events[1])]
    assert "perform_started" in [e.type for e in before]
    assert not [e for e in events if e.type.startswith("perform")]
    with pytest.raises(JournalError):
        await engine.start_resume(MemoryJournal())


@pytest.mark.spec("interfaces:IF8")
async def test_a_fork_in_the_background_can_be_watched_and_answered():
    journal = MemoryJournal()
    async with Engine([plain(handle_steps=asks, model=None)]) as engine:
        first = await engine.run("a", "go", journal=journal, answers={"Which?": "this"})
        hasty = await (await engine.start_fork(journal, at=-1)).result()
        handle = await engine.start_fork(journal, at=-1, wait_for_answers=None)
        await holds(lambda: handle.questions)
        handle.answer(handle.questions[0].id, "that")
        events = await all_of(handle.events())

    assert ("this", "suspended", "that") == (first.output, hasty.status.value, (await handle.result()).output)
    assert {handle.run_id} == {e.run_id for e in events}
    assert ("run_started", "run_finished") == (events[0].type, events[-1].type)


@pytest.mark.spec("interfaces:IF7", "interfaces:IF8")
async def test_next_question_of_a_continuing_run_has_the_configured_timeout():
    def handle_steps(ctx):
        first = yield Ask("Which?")
        second = yield Ask("Why?")
        return f"{first.value} {second.value}"

    ended = []
    async with Engine([plain(handle_steps=handle_steps, model=None)]) as engine:
        for patience, words in ((0, None), (None, "so")):
            journal = MemoryJournal()
            await engine.run("a", "go", journal=journal)
            handle = await engine.start_resume(journal, answers={"Which?": "this"}, wait_for_answers=patience)
            if words is not None:
                await holds(partial(getattr, handle, "questions"))
                handle.answer(handle.questions[0].id, words)
            async with asyncio.timeout(SECONDS):
                ended.append(await handle.result())

    assert [("suspended", None), ("completed", "this so")] == [(r.status.value, r.output) for r in ended]


# --- questions, tools and what else is sent -----------------------------------------------------------------------------


def asks(ctx):
    answer = yield Ask("Which?")
    return answer.value


@pytest.mark.spec("requirements:X54", "interfaces:IF6", "interfaces:IF7")
async def test_watching_page_keeps_no_question_open_and_late_answers_count():
    agent = plain(handle_steps=asks, model=None)
    async with Engine([agent]) as engine:
        recorded = engine.start("a", "go", journal=MemoryJournal())
        watched = await all_of(recorded.events())
        open_ended = engine.start("a", "go")
        await turns(10)
        (question,) = open_ended.questions
        open_ended.send(AnswerInput(question.id, "late"))
        brief = engine.start("a", "go", wait_for_answers=0.01)
        patient = engine.start("a", "go", journal=MemoryJournal())
        asked = await until(patient, "question_asked", answers=True)
        attended = engine.start("a", "go", journal=MemoryJournal())
        async for event in attended.events(answers=True):
            if event.type == "question_asked":
                await turns(10)
                attended.answer(event.question.id, "so")
        ended = [await handle.result() for handle in (recorded, open_ended, brief, patient, attended)]

    assert ["suspended", "completed", "suspended", "suspended", "completed"] == [r.status.value for r in ended]
    assert "late" == ended[1].output
    assert isinstance(watched[-1], RunFinished)
    assert asked.question == ended[3].pending_questions[0]


@pytest.mark.spec("interfaces:IF9", "requirements:N3")
async def test_questions_are_answered_and_turns_interrupted_from_any_thread():
    async def elsewhere(call, *arguments):
        thread = threading.Thread(target=call, args=arguments)
        thread.start()
        await asyncio.to_thread(thread.join)

    async with Engine([plain(handle_steps=asks, model=None)]) as engine:
        answered, ended = engine.start("a", "go"), engine.start("a", "go")
        await holds(lambda: answered.questions and ended.questions)
        await elsewhere(answered.answer, answered.questions[0].id, "here")
        await elsewhere(ended.interrupt)
        async with asyncio.timeout(SECONDS):
            results = [await handle.result() for handle in (answered, ended)]

    assert [("completed", "here"), ("cancelled", None)] == [(r.status.value, r.output) for r in results]


@tool(deferred=True, in_thread=False)
def render(ctx: ToolContext, what: str) -> str:
    """Render something elsewhere."""
    if what == "nothing":
        raise ValueError("nothing to render")
    JOBS.append(ctx.tool_call_id)
    return "begun"


JOBS: list[str] = []


@pytest.mark.spec("requirements:E27", "requirements:N3")
@pytest.mark.parametrize("thread", [False, True])
async def test_deferred_tool_result_is_sent_from_outside(thread):
    JOBS.clear()
    journal = MemoryJournal()
    agent = plain(tools=[render])
    replies = [tool_calls(tool_call("render", {"what": "x"}), tool_call("render", {"what": "nothing"})), "done"]
    async with Engine([agent], models=ScriptedModel(replies)) as engine:
        handle = engine.start("a", "go", journal=journal)
        await holds(lambda: JOBS)
        with pytest.raises(
            ToolError, match=rf"no call 'c9' waits for its result; waiting calls: '{JOBS[0]}' at path ''"
        ):
            handle.send_tool_result("c9", "x")
        if thread:
            sending = threading.Thread(target=handle.send_tool_result, args=(JOBS[0], {"url": "u"}))
            sending.start()
            sending.join()
        else:
            handle.send(ToolResultInput(JOBS[0], ToolResult.json({"url": "u"})))
            with pytest.raises(ToolError, match="waiting calls: none"):
                await turns()
                handle.send_tool_result(JOBS[0], "again")
        result = await handle.result()
        replayed = await engine.replay(journal)

    assert [{"url": "u"}, "ValueError: nothing to render"] == [
        c.result.data or c.result.text for c in result.tool_calls
    ]
    assert "done" == result.text == replayed.text
    assert [c.result for c in result.tool_calls] == [c.result for c in replayed.tool_calls]
    with pytest.raises(ToolError):
        handle.send_tool_result(JOBS[0], "late")


@pytest.mark.spec("requirements:E27")
async def test_deferred_results_of_equal_call_ids_need_the_run_path():
    JOBS.clear()

    def kid(ctx):
        return (yield from call(render, what="x"))

    def boss(ctx):
        first, second = yield from map_agents("kid", ["a", "b"])
        return [first.output, second.output]

    agents = [
        plain("kid", handle_steps=kid, model=None, tools=[render]),
        plain("boss", handle_steps=boss, model=None, spawnable_agents=["kid"]),
    ]
    async with Engine(agents) as engine:
        handle = engine.start("boss", "go")
        await holds(lambda: len(JOBS) == 2)
        assert {("kid", "0"), ("kid", "1")} == {(c.agent_id, c.path) for c in handle.children}
        with pytest.raises(ToolError, match="several calls with this id wait, so pass path="):
            handle.send_tool_result(JOBS[0], "x")
        handle.send_tool_result(JOBS[0], "one", path="0")
        handle.send_tool_result(JOBS[1], "two", path="1")
        assert ["one", "two"] == (await handle.result()).output
        assert () == handle.children

        JOBS.clear()
        other = engine.start("kid", "go")
        await holds(lambda: JOBS)
        other.send(Interrupt())
        assert RunStatus.CANCELLED is (await other.result()).status


@pytest.mark.spec("requirements:E27")
async def test_deferred_result_may_be_sent_when_its_call_is_announced():
    JOBS.clear()
    async with Engine(models=ScriptedModel([tool_call("render", {"what": "x"}), "done"])) as engine:
        handle = engine.start(plain(tools=[render]), "go", journal=MemoryJournal())
        async with asyncio.timeout(SECONDS):
            async for event in handle.events():
                if event.type == "tool_started":
                    handle.send_tool_result(event.tool_call_id, "soon", path=event.path)
        result = await handle.result()

    assert ["soon"] == [c.result.text for c in result.tool_calls]
    assert 1 == len(JOBS)


@pytest.mark.parametrize("given", ["Go on.", 5, None, UserInput])
async def test_handle_send_refuses_anything_but_an_input(given):
    async with Engine([plain()], models=ScriptedModel(["one"])) as engine:
        handle = engine.start("a", "first")
        with pytest.raises(InputError, match=r"not .*; handle\.send_input\(text\) sends a text"):
            handle.send(given)
        assert "one" == (await handle.result()).text


@pytest.mark.parametrize("keep_open", [False, True])
async def test_handle_send_input_refuses_anything_but_text(keep_open):
    async with Engine([plain()], models=ScriptedModel(["one"])) as engine:
        handle = engine.start("a", "first", keep_open=keep_open)
        with pytest.raises(DataError, match="a user message must contain a string or a sequence of parts, not a int"):
            handle.send_input(5)
        assert "one" == (await handle.result()).text


async def test_idempotency_key_is_the_same_for_a_repeated_call():
    keys: list[str] = []

    @tool(in_thread=False, idempotent=True, retries=1)
    def charge(ctx: ToolContext, amount: int) -> str:
        """Charge."""
        keys.append(ctx.idempotency_key)
        if len(keys) in (1, 3):
            raise (RuntimeError if len(keys) == 1 else KeyboardInterrupt)("gone")
        return "ok"

    def pays(ctx):
        yield from call(charge, amount=1)
        yield from call(charge, amount=1)

    agent, journal = plain(handle_steps=pays, model=None, tools=[charge]), MemoryJournal()
    engine = Engine([agent])
    with pytest.raises(KeyboardInterrupt):
        await engine.run("a", "go", journal=journal)
    await engine.resume(journal)
    await engine.run("a", "go")

    retried, crashed, other = keys[:2], keys[2:4], keys[4:]
    assert [1, 1, 2] == [len(set(each)) for each in (retried, crashed, other)]
    assert 4 == len({*retried, *crashed, *other})
    assert 64 == len(keys[0])


# --- from turn to turn --------------------------------------------------------------------------------------------------


@pytest.mark.spec("requirements:N4", "requirements:N6", "requirements:N1", "interfaces:IF9")
@pytest.mark.parametrize("store", [False, True])
async def test_kept_open_handle_is_idle_until_the_next_input(store):
    model = ScriptedModel(["one", "two", "three"])
    engine = Engine([plain()], models=model, sessions=MemorySessions() if store else None)
    async with engine, engine.start("a", "first", session_id="s", metadata={"k": 1}, keep_open=True) as handle:
        events = handle.events()
        assert ["one", RunPhase.IDLE, False] == [(await handle.result()).text, handle.phase, handle.done]
        first = handle.run_id
        handle.send(UserInput("second"))
        second = handle.run_id
        assert "two" == (await handle.result()).text
        sending = threading.Thread(target=handle.send_input, args=("third",))
        sending.start()
        sending.join()
        await holds(lambda: handle.run_id != second)
        assert "three" == (await handle.result()).text
        assert ["first", "one", "second", "two", "third", "three"] == [m.text for m in handle.history]
        assert ("s", {"k": 1}, None, "a", "") == (
            handle.session_id, handle.metadata, handle.parent, handle.agent_id, handle.path,
        )  # fmt: skip
        assert engine.get("s") is engine.get(handle.run_id) is handle
        handle.interrupt()
        await handle.shutdown()
        await handle.shutdown()
        shown = await all_of(events)

    finished = [e for e in shown if isinstance(e, RunFinished)]
    assert [("one", first), ("two", second), ("three", handle.run_id)] == [(e.result.text, e.run_id) for e in finished]
    assert 3 == len({e.run_id for e in shown})
    assert [*range(len(shown))] == [e.index for e in shown]
    assert isinstance(shown[-1], RunFinished)
    assert handle.done
    assert engine.get("s") is None
    with pytest.raises(StepEngineError, match=r"has ended and accepts no input.*previous=result\.state.*start_resume"):
        handle.send_input("late")


@pytest.mark.spec("requirements:N4", "requirements:N3")
async def test_late_input_is_the_next_turn_and_interrupt_ends_one():
    class Waits(ScriptedModel):
        asked = asyncio.Event()

        async def stream(self, request):
            if not self.asked.is_set():
                self.asked.set()
                await asyncio.Event().wait()
            async for delta in super().stream(request):
                yield delta

    model = Waits(["ok"])
    async with Engine([plain()], models=model) as engine:
        handle = engine.start("a", "go", keep_open=True)
        await model.asked.wait()
        handle.send_input("more")
        handle.interrupt()
        cancelled = await handle.result()
        following = await handle.result()
        with pytest.raises(InputError, match=r"sessions=\.\.\."):
            engine.start("a", "go", keep_open=True, journal=MemoryJournal())

    assert [RunStatus.CANCELLED, RunStatus.COMPLETED] == [cancelled.status, following.status]
    assert ["go", "more", "ok"] == [m.text for m in following.state.message_history]
    assert () == following.warnings
    assert handle.done


@pytest.mark.spec("requirements:X16")
async def test_crashed_turn_leaves_handle_and_engine_usable():
    model = ScriptedModel([failure(ValueError("bug")), "fine", "also fine"])
    async with Engine([plain()], models=model) as engine:
        handle = engine.start("a", "go", keep_open=True)
        assert [RunStatus.FAILED, RunPhase.IDLE] == [(await handle.result()).status, handle.phase]
        handle.send_input("again")
        assert "fine" == (await handle.result()).text
        assert "also fine" == (await engine.run("a", "go")).text


@pytest.mark.spec("requirements:N4")
async def test_text_from_a_thread_that_starts_no_turn_stays_unread(monkeypatch):
    """In the event loop of the handle the sender gets the error."""

    def handle_steps(ctx):
        return ctx.prompt
        yield

    monkeypatch.setenv("OPENAI_API_KEY", "an-imagined-key")
    async with Engine([plain(model="openai/some-model", handle_steps=handle_steps)]) as engine:
        handle = engine.start("a", "one", keep_open=True)
        events = handle.events()
        await handle.result()
        monkeypatch.delenv("OPENAI_API_KEY")
        with pytest.raises(MissingKey) as refused:
            handle.send_input("two")
        assert () == handle.unread
        await asyncio.to_thread(handle.send_input, "three")
        await holds(lambda: handle.unread)
        assert ("three",) == handle.unread
        monkeypatch.setenv("OPENAI_API_KEY", "an-imagined-key")
        handle.send_input("four")
        assert ("four", ()) == ((await handle.result()).output, handle.unread)
        await handle.shutdown()
        warnings = [e.message for e in await all_of(events) if e.type == "warned"]

    assert [refused.value.message] == [warning.partition(": ")[2] for warning in warnings]


@pytest.mark.spec("requirements:N4")
async def test_text_from_a_thread_right_before_shutdown_stays_unread():
    events = []
    async with Engine([plain()], models=ScriptedModel(["one"]), observers=[events.append]) as engine:
        handle = engine.start("a", "go", keep_open=True)
        await handle.result()
        sending = threading.Thread(target=handle.send_input, args=("late",))
        sending.start()
        sending.join()
        await handle.shutdown()

        assert ("late",) == handle.unread
    [warning] = [event.message for event in events if event.type == "warned"]
    assert "could not start another turn" in warning
    assert "has ended and accepts no input; start another run with" in warning


def test_input_after_its_event_loop_is_closed_raises():
    async def start():
        handle = Engine([plain()], models=ScriptedModel(["one"])).start("a", "go", keep_open=True)
        await handle.result()
        return handle

    handle = asyncio.run(start())
    with pytest.raises(StepEngineError, match="the event loop of the run"):
        handle.send_input("more")


class Down(BaseException):
    """What a test framework raises in the middle of a run: it is for whoever called it."""


@pytest.mark.spec("requirements:X16", "requirements:X59")
@pytest.mark.parametrize("how", ["raised", "cancelled"])
@pytest.mark.parametrize("turn", [1, 2])
@pytest.mark.parametrize("late", [False, True])
async def test_crashed_turn_ends_its_kept_open_handle_despite_later_input(how, turn, late):
    """
    There is no state to go on from: it is done, nobody waits for its events, and the engine takes the next run.
    """
    at_work = asyncio.Event()

    async def work(given):
        at_work.set()
        if how == "cancelled":
            await asyncio.Event().wait()

    def handle_steps(ctx):
        if ctx.prompt.endswith(str(turn)):
            yield from Perform(work, 1)
            raise Down
        yield from ()

    async with Engine([plain(handle_steps=handle_steps)], models=ScriptedModel([])) as engine:
        handle = engine.start("a", "turn 1", session_id="s", keep_open=True)
        events = handle.events()
        if turn == 2:
            await handle.result()
            handle.send_input("turn 2")
        await at_work.wait()
        if how == "cancelled":
            if late:
                handle.send_input("and more")
            handle._turns.task.cancel()
        elif late:
            # It has ended, and its handle may not have been told of it yet.
            await holds(handle._turns.task.done)
            with pytest.raises(StepEngineError, match="has ended and accepts no input"):
                handle.send_input("and more")
        with pytest.raises(Down if how == "raised" else asyncio.CancelledError):
            await handle.result()
        await all_of(events)

        assert (handle.done, engine.get("s"), engine.get(handle.run_id)) == (True, None, None)
        with pytest.raises(StepEngineError, match="has ended and accepts no input"):
            handle.send_input("again")
        assert (await engine.run("a", "next")).status is RunStatus.COMPLETED


# --- many ---------------------------------------------------------------------------------------------------------------


@pytest.mark.spec("requirements:N1")
async def test_background_runs_are_found_listed_and_ended_by_id():
    async def for_ever():
        await asyncio.Event().wait()

    def waits(ctx):
        yield Perform(for_ever)

    agent = plain(handle_steps=waits, model=None)
    async with Engine([agent]) as engine:
        assert (None, False, (), False) == (
            engine.get("x"), engine.is_running("x"), engine.active(), await engine.shutdown("x"),
        )  # fmt: skip
        one, two = engine.start("a", session_id="one"), engine.start("a")
        plainly = asyncio.create_task(engine.run("a", session_id="plain"))
        await turns()

        assert ("one", two.run_id, "plain") == engine.active()
        assert (one, one, two, None) == tuple(map(engine.get, ("one", one.run_id, two.run_id, "plain")))
        assert [True, True, False] == [engine.is_running(id) for id in ("plain", two.run_id, "other")]
        assert await engine.shutdown("one")
        assert (one.done, two.done, engine.get("one")) == (True, False, None)
        assert await engine.shutdown("plain")
        assert RunStatus.CANCELLED is (await plainly).status
        await engine.shutdown_all()
        assert ((), True) == (engine.active(), two.done)
        assert RunStatus.CANCELLED is (await two.result()).status


@pytest.mark.spec("interfaces:IF9")
def test_start_without_an_event_loop_raises_with_the_remedy():
    engine = Engine([plain()], models=ScriptedModel(["ok"]))
    with pytest.raises(
        StepEngineError, match=r"needs a running event loop: call it inside `async def`, or use run_sync"
    ):
        engine.start("a", "go")
    assert () == engine.active()
    engine.close()


@pytest.mark.spec("requirements:O2")
async def test_log_provider_is_called_only_for_methods_it_has():
    told_of: list[Any] = []

    class Log:
        def on_tool_call(self, name, given):
            told_of.append((name, given["what"]))

        def on_tool_result(self, name, result):
            told_of.append((name, result.text))

        def on_step(self, step, messages):
            told_of.append((step, [message.role for message in messages]))

        def on_complete(self, result):
            told_of.append(result.status)

    @tool(in_thread=False)
    def say(what: str) -> str:
        """Say."""
        return what.upper()

    class Half:
        on_complete = Log.on_complete

    replies = [tool_call("say", {"what": "x"}), "done"]
    for log in (Log(), Half()):
        engine = Engine(models=ScriptedModel(replies), observers=[LogObserver(log)])
        await engine.run(plain(tools=[say]), "go")

    assert [
        (0, ["user"]), ("say", "x"), ("say", "X"), (1, ["user", "assistant", "tool"]), RunStatus.COMPLETED,
        RunStatus.COMPLETED,
    ] == told_of  # fmt: skip


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("interfaces:IF6", "reliability:GN34", "interfaces:IF4")
async def test_reader_behind_the_buffer_gets_the_size_of_the_gap():
    def chatty(ctx):
        for number in range(10_100):
            ctx.notify("n", data=number)
        yield Perform(turns)

    async with Engine([plain(handle_steps=chatty, model=None)]).start("a", "go") as handle:
        result = await handle.result()
        late = await all_of(handle.events())
        back = await all_of(handle.events(after=f"{handle.epoch}-7"))
        in_time = await all_of(handle.events(after=late[1].id))

    assert RunStatus.COMPLETED is result.status
    assert [(EventsDropped, "buffer")] * 2 == [(type(e[0]), e[0].reason) for e in (late, back)]
    assert late[1].index == late[0].count == back[0].count + 8
    assert "" == late[0].id
    assert 10_000 == len(late) - 1
    assert [e.id for e in late[2:]] == [e.id for e in in_time]


LONGER_TEXTS, A_THOUSAND, FIFTY_LONG = 20_000_000, 60_000_000, 6_000_000


class Chatty(ScriptedModel):
    """
    A model that streams as much text as it is told, in small pieces.
    """

    def __init__(self, chars: int) -> None:
        super().__init__([])
        self.pieces = ["abcdefgh"] * (chars // 8)

    async def stream(self, request):
        for number, piece in enumerate(self.pieces):
            yield TextChunk(piece)
            if number % 16 == 0:
                await asyncio.sleep(0)
        yield ReplyDone(ModelReply("".join(self.pieces)))


async def told(events) -> tuple[int, str]:
    """
    How much text a reader is shown, and the last event; nothing is kept.
    """
    chars, last = 0, ""
    async with asyncio.timeout(60):
        async for event in events:
            chars += len(event.text) if isinstance(event, TextDelta) else 0
            last = event.type
    return chars, last


async def crowd(handles: int, chars: int) -> int:
    """
    Run so many handles, each with a reader and one that is stuck; return the most bytes that were in use.
    """
    gc.collect()
    tracemalloc.start()
    async with Engine([plain()], models=Chatty(chars), pricing=None) as engine:
        running = [engine.start("a", "go") for _ in range(handles)]
        stuck = [handle.events() for handle in running]
        for events in stuck:
            await anext(events)
        read = await asyncio.gather(*[told(handle.events()) for handle in running])
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        results = [await handle.result() for handle in running]
        unstuck = [await told(events) for events in stuck]

    assert {RunStatus.COMPLETED} == {result.status for result in results}
    assert {(chars, "run_finished")} == {*read, *unstuck}
    return most


@pytest.mark.memory
@pytest.mark.spec("reliability:GN34", "interfaces:IF6", "interfaces:IF4")
async def test_a_thousand_stuck_readers_need_no_more_for_longer_texts():
    little, much, long = await crowd(1_000, 80), await crowd(1_000, 960), await crowd(50, 8_000)

    # The texts alone are 4 MB more: in replies, transcripts, rings and what waits.
    assert much - little < LONGER_TEXTS, (little, much)
    assert much < A_THOUSAND, (little, much)
    # A thousand pieces that wait one by one would be 10 MB.
    assert long < FIFTY_LONG, long
