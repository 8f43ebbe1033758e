"""
Runs in sessions: what they go on from, what they leave, and what happens when two come at once, a store fails, or a process dies.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import secrets
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import attrs
import pytest

from stepengine import (
    STEP,
    AgentCall,
    AgentDefinition,
    AgentState,
    Answer,
    Ask,
    AssistantMessage,
    Engine,
    Hooks,
    Limits,
    RunStatus,
    ToolCall,
    ToolMessage,
    Usage,
    UserMessage,
    call,
    tool,
)
from stepengine.data.messages import TextPart, ToolCallPart
from stepengine.data.questions import Decision
from stepengine.engine.session_queue import SessionQueue
from stepengine.errors import (
    AnswerRejected,
    DefinitionError,
    InputError,
    ReplayDivergence,
    SessionConflict,
    SessionError,
)
from stepengine.events import RunFinished, TextDelta
from stepengine.journal import MailboxMessage, MemoryJournal, SqliteJournal
from stepengine.sessions import FileSessions, MemorySessions, SqliteSessions
from stepengine.testing import ScriptedModel, text, tool_call, tool_calls
from stepengine.tools.bundled import ask_user_tool, spawn_tools
from tests.loop_clock import put_clock_ahead
from tests.sessions.stores import KINDS, Histories, store_of

ROOT = Path(__file__).resolve().parents[2]
BOT = AgentDefinition("bot", model="scripted/m")


@pytest.fixture
def store(request, tmp_path):
    return store_of(getattr(request, "param", "files"), tmp_path)


class Slow(ScriptedModel):
    """
    A model that says whom it answers, after something else has happened.
    """

    def __init__(self, before):
        super().__init__([lambda request: text(f"to {request.messages[-1].text}")] * 9)
        self._before = before

    async def stream(self, request):
        await self._before()
        async for delta in super().stream(request):
            yield delta

    async def complete(self, request):
        await self._before()
        return await super().complete(request)


class States(Histories):
    """
    A store of texts, as a database of keys and values is one.
    """

    def __init__(self):
        super().__init__()
        self.states = {}

    def get_state(self, session_id):
        return json.loads(self.states.get(session_id, "null"))

    def save_state(self, session_id, state):
        self.states[session_id] = json.dumps(state)


def said(request):
    return [message.text for message in request.messages]


def asking(*fields):
    return AgentDefinition("clerk", model="scripted/m", tools=[ask_user_tool(), *fields])


QUESTION = tool_call("ask_user", {"questions": [{"question": "For how many?"}]})


def booking(ctx):
    count = yield from Ask("For how many?")
    when = yield from Ask("When?")
    return f"{count} at {when}"


BOOKING = AgentDefinition("booking", handle_steps=booking)


# --- loading and saving ---------------------------------------------------------------------------------------------


@pytest.mark.spec("requirements:L3", "requirements:L1")
@pytest.mark.parametrize("store", KINDS, indirect=True)
async def test_run_continues_from_its_session_and_saves_the_next_state(store):
    model = ScriptedModel([text("Hello."), text("I said hello.")])
    first = await Engine([BOT], models=model, sessions=store).run(
        BOT, "Hi.", session_id="u:1", user_id="ann", metadata={"lang": "de"}
    )
    other = attrs.evolve(BOT, model="second/n")
    second = await Engine([other], models={"second": model}, sessions=store).run(
        other, "What did you say?", session_id="u:1", metadata={"theme": "dark"}
    )
    elsewhere = await Engine([BOT], models=ScriptedModel([text("Yes?")]), sessions=store).run(
        BOT, "Hi", session_id="u:2"
    )
    session = store.load("u:1")

    assert (True, True, True) == (first.session_saved, second.session_saved, elsewhere.session_saved)
    assert ["Hi.", "Hello.", "What did you say?"] == said(model.calls[1])
    assert ["Hi.", "Hello.", "What did you say?", "I said hello."] == [m.text for m in session.messages]
    assert (2, "bot", "second/n", "second") == (
        session.turns, session.info.agent_id, session.info.model, session.info.provider,
    )  # fmt: skip
    assert ("ann", "completed", {"lang": "de", "theme": "dark"}) == (
        session.info.user_id, session.info.status, dict(session.info.metadata),
    )  # fmt: skip
    assert first.state.run_id != second.state.run_id


@pytest.mark.spec("requirements:L4", "reliability:SS05")
async def test_session_needs_a_store_and_may_omit_its_id(tmp_path):
    store = FileSessions(tmp_path / "below" / "sessions")
    engine = Engine([BOT], models=ScriptedModel([text("a"), text("b"), text("c")]), sessions=store)
    one, two = await engine.run(BOT, "x"), await engine.run(BOT, "x", session_id="ann:1/../bob")
    bare = await Engine([BOT], models=ScriptedModel([text("a")])).run(BOT, "x")

    assert sorted([one.session_id, "ann:1/../bob"]) == sorted([info.session_id for info in store.list()])
    assert (True, None, None) == (one.session_saved, bare.session_id, bare.session_saved)
    assert "ann:1/../bob" == two.session_id
    assert [] == [path for path in tmp_path.rglob("bob") if path.exists()]
    with pytest.raises(SessionError, match="1 to 1,000 characters"):
        await engine.run(BOT, "x", session_id="s" * 1001)


@pytest.mark.spec("requirements:L1", "requirements:L2", "requirements:L4")
async def test_store_with_two_methods_suffices_and_missing_ones_are_named():
    store = Histories()
    model = ScriptedModel([text("Hello."), text("Yes.")])
    engine = Engine([BOT], models=model, sessions=store)
    for prompt in ("Hi.", "Again?"):
        assert (await engine.run(BOT, prompt, session_id="x")).session_saved

    assert ["Hi.", "Hello.", "Again?"] == said(model.calls[1])
    with pytest.raises(DefinitionError, match=r"child_sessions=True\) needs a store with load and save"):
        Engine(sessions=store, child_sessions=True)
    for wrong in ("sessions", FileSessions, object()):
        with pytest.raises(DefinitionError, match=r"Engine\(sessions=\.\.\.\).*get_history and save_history"):
            Engine(sessions=wrong)


@pytest.mark.spec("requirements:L3")
@pytest.mark.parametrize("way", ["run_sync", "stream", "start"])
async def test_streams_handles_and_run_sync_continue_a_session_too(way, tmp_path):
    store = SqliteSessions(tmp_path / "s.db")
    model = ScriptedModel([text("Hello."), text("Yes.")])
    async with Engine([BOT], models=model, sessions=store) as engine:
        await engine.run(BOT, "Hi.", session_id="x")
        if way == "run_sync":
            result = engine.run_sync(BOT, "Still there?", session_id="x")
        elif way == "start":
            handle = engine.start(BOT, "Still there?", session_id="x")
            told = handle.run_id, handle.session_id
            result = await handle.result()
            assert told == (result.state.run_id, "x")
        else:
            events = [event async for event in engine.stream(BOT, "Still there?", session_id="x")]
            result = events[-1].result
            assert isinstance(events[-1], RunFinished)
            assert any(isinstance(event, TextDelta) for event in events)

    assert (True, "Yes.") == (result.session_saved, result.output)
    assert ["Hi.", "Hello.", "Still there?"] == said(model.calls[1])
    assert 2 == store.load("x").turns


@pytest.mark.spec("requirements:X40", "requirements:L3")
async def test_run_is_saved_at_any_end_unless_it_never_began(store):
    def broken(ctx, *_):
        msg = "no"
        raise RuntimeError(msg)

    async def status(model, **fields):
        agent = attrs.evolve(BOT, **fields)
        result = await Engine([agent], models=model, sessions=store).run(agent, "Go.", session_id="x")
        return result.status.value, result.session_saved, len(store.load("x").messages), store.load("x").info.status

    assert ("completed", True, 2, "completed") == await status(ScriptedModel([text("ok")]))
    assert ("failed", True, 3, "failed") == await status(ScriptedModel([]))
    assert ("failed", False, 3, "failed") == await status(ScriptedModel([text("ok")]), hooks=Hooks(pre_run=[broken]))
    assert ("completed", True, 5, "completed") == await status(ScriptedModel([text("ok")]))


@pytest.mark.spec("reliability:SS03")
async def test_store_that_fails_to_load_prevents_the_run(tmp_path):
    class Failing(Histories):
        async def get_history(self, session_id):
            msg = "no connection"
            raise OSError(msg)

    model = ScriptedModel([text("never")])
    async with Engine([BOT], models=model, sessions=Failing()) as engine:
        with pytest.raises(SessionError, match=r"'x' could not be loaded, so nothing was run: OSError: no connection"):
            await engine.run(BOT, "Hi.", session_id="x")
        with pytest.raises(SessionError, match="could not be loaded"):
            await engine.start(BOT, "Hi.", session_id="x").result()
        with pytest.raises(SessionError, match="could not be loaded"):
            [event async for event in engine.stream(BOT, "Hi.", session_id="x")]

    assert not model.calls


@pytest.mark.spec("reliability:SS03")
@pytest.mark.parametrize("error", [OSError, asyncio.CancelledError])
async def test_store_that_fails_to_save_keeps_the_result(caplog, error):
    class Full(Histories):
        async def save_history(self, session_id, messages):
            msg = "disk full"
            raise error(msg)

    result = await Engine([BOT], models=ScriptedModel([text("Hello.")]), sessions=Full()).run(
        BOT, "Hi.", session_id="x"
    )

    assert (RunStatus.COMPLETED, "Hello.", False) == (result.status, result.output, result.session_saved)
    assert [f"the session 'x' was not saved: {error.__name__}: disk full"] == list(result.warnings) == caplog.messages


@pytest.mark.spec("reliability:SS04")
async def test_repair_at_session_load_is_reported_once():
    store = Histories()
    store.kept["x"] = [
        UserMessage("Add."),
        AssistantMessage([ToolCallPart("t1", "add", {"a": 1})]),
        UserMessage("Well?"),
        ToolMessage("t9", "add", [TextPart("3")]),
    ]
    engine = Engine([BOT], models=ScriptedModel([text("Sorry."), text("Yes.")]), sessions=store)
    first, second = await engine.run(BOT, "Hello?", session_id="x"), await engine.run(BOT, "Hm?", session_id="x")

    assert 2 == len(first.warnings)
    assert "the session 'x' was repaired: the call 't1' of add had no result" == first.warnings[0]
    assert () == second.warnings
    assert ["Add.", "", "Well?", "Hello?", "Sorry."] == [m.text for m in store.kept["x"] if m.role != "tool"][:5]


@pytest.mark.spec("requirements:D18")
async def test_previous_replaces_the_stored_session_state(store):
    engine = Engine([BOT], models=ScriptedModel([text("a"), text("b")]), sessions=store)
    await engine.run(BOT, "old", session_id="x")
    await engine.run(BOT, "go on", session_id="x", previous=AgentState.from_messages([UserMessage("new")]))

    assert ["new", "go on", "b"] == [m.text for m in store.load("x").messages]
    assert 2 == store.load("x").version


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("requirements:D18")
@pytest.mark.parametrize("store", ["files", "sqlite"], indirect=True)
async def test_a_conversation_can_be_measured_replaced_and_cleared_between_runs(store):
    async def run(prompt, *replies):
        model = ScriptedModel([attrs.evolve(reply, usage=Usage(input_tokens=10, output_tokens=1)) for reply in replies])
        agent = asking()
        result = await Engine([agent], models=model, sessions=store).run(agent, prompt, session_id="x")
        return result, said(model.calls[0])

    await run("Hi.", text("a"))
    await run("A table.", QUESTION)
    assert Usage(input_tokens=20, output_tokens=2) == attrs.evolve(store.usage("x"), requests=0)
    await run("4", text("b"))
    assert Usage(input_tokens=30, output_tokens=3) == attrs.evolve(store.usage("x"), requests=0)
    store.replace("x", [UserMessage("Once.")])
    assert ["Once.", "Go on."] == (await run("Go on.", text("c")))[1]
    store.clear("x")
    assert ["Anew."] == (await run("Anew.", text("d")))[1]
    assert (5, 50) == (store.load("x").turns, store.usage("x").input_tokens)


@pytest.mark.spec("requirements:D18")
async def test_resumed_handler_counts_earlier_spending_once(tmp_path):
    def handler(ctx):
        yield STEP
        answer = yield from Ask("Well?")
        yield STEP
        return answer

    agent = attrs.evolve(BOT, handle_steps=handler)
    spent = Usage(input_tokens=10, output_tokens=1)
    for prompt, reply in (("go", "a"), ("yes", "b")):
        model = ScriptedModel([text(reply, usage=spent)])
        result = await Engine([agent], models=model, sessions=FileSessions(tmp_path)).run(agent, prompt, session_id="x")

    assert ("yes", 20) == (result.output, result.usage.input_tokens)
    assert result.usage == FileSessions(tmp_path).usage("x")


# --- questions ------------------------------------------------------------------------------------------------------


@pytest.mark.spec("requirements:L3", "requirements:K3", "requirements:K6", "reliability:R2", "requirements:X11")
@pytest.mark.parametrize("kind", ["files", "states", "histories"])
async def test_next_message_answers_the_models_question_without_repeating_calls(kind, tmp_path):
    store = {"states": States, "histories": Histories}.get(kind, lambda: store_of(kind, tmp_path))()
    ran = []

    @tool(in_thread=False)
    def note(word: str) -> str:
        """Note a word."""
        ran.append(word)
        return word

    agent = asking(note)
    batch = tool_calls(tool_call("note", {"word": "a"}), QUESTION, tool_call("note", {"word": "b"}))
    held = await Engine([agent], models=ScriptedModel([batch]), sessions=store).run(agent, "A table.", session_id="x")
    assert (RunStatus.SUSPENDED, True, ["a"]) == (held.status, held.session_saved, ran)
    # Another process, which was given another prompt meanwhile.
    changed = attrs.evolve(agent, step_prompt="Be brief.")
    model = ScriptedModel([text("For 4.")])
    done = await Engine([changed], models=model, sessions=store).run(changed, "4", session_id="x")

    assert (RunStatus.COMPLETED, "For 4.", ["a", "b"]) == (done.status, done.output, ran)
    assert () == done.warnings
    (request,) = model.calls
    assert ["A table."] == [m.text for m in request.messages if m.role == "user"]
    assert [{"question_index": 0, "text": "4"}] == request.messages[3].result.data["answers"]


@pytest.mark.spec("requirements:L3", "requirements:K3", "reliability:R2", "requirements:X11")
@pytest.mark.parametrize("kind", ["memory", "files", "states"])
async def test_next_message_answers_a_handler_through_the_stores_journal(kind, tmp_path):
    def fresh():
        return store if kind in ("memory", "states") else store_of(kind, tmp_path)

    store = States() if kind == "states" else store_of(kind, tmp_path)
    seen = []
    for prompt in ("A table.", "4", "Eight.", "Again."):
        result = await Engine([BOOKING], sessions=fresh()).run("booking", prompt, session_id="ann:1")
        seen.append((result.status.value, result.output, [q.text for q in result.pending_questions]))

    assert [
        ("suspended", None, ["For how many?"]),
        ("suspended", None, ["When?"]),
        ("completed", "4 at Eight.", []),
        ("suspended", None, ["For how many?"]),
    ] == seen
    if kind != "states":
        session = fresh().load("ann:1")
        assert (2, True) == (session.turns, session.journal is not None)
        assert "suspended" == session.info.status


async def test_deleted_sqlite_session_leaves_no_journal_or_mailbox(tmp_path):
    store = SqliteSessions(tmp_path / "sessions.db")
    for name in ("deleted", "kept"):
        await Engine([BOOKING], sessions=store).run("booking", "A table.", session_id=name)
        location = store.get_journal_location(name)
        journal = SqliteJournal(location.database, run=f"{location.prefix}{store.load(name).journal}")
        journal.mailbox().send(MailboxMessage(kind="message", topic="note", id="1"))

    store.delete("deleted")

    database = sqlite3.connect(location.database)
    runs = {table: database.execute(f"SELECT DISTINCT run FROM {table}").fetchall() for table in ("lines", "letters")}
    database.close()
    assert {"lines": [(journal.run,)], "letters": [(journal.run,)]} == runs


@pytest.mark.spec("requirements:X11")
async def test_waiting_handler_without_a_kept_journal_is_refused(tmp_path):
    store = FileSessions(tmp_path)
    own = MemoryJournal()
    held = await Engine([BOOKING], sessions=store).run(BOOKING, "go", session_id="x", journal=own)
    before = store.load("x")
    assert (True, None) == (held.session_saved, before.journal)
    with pytest.raises(AnswerRejected, match=r"agent 'booking' has a handler.*journal=.*save_state"):
        await Engine([BOOKING], sessions=store).run(BOOKING, "4", session_id="x")

    assert before == store.load("x")


@pytest.mark.spec("requirements:K3")
async def test_message_grants_a_permission_and_two_are_answered_in_turn(tmp_path):
    ran = []

    @tool(in_thread=False)
    def pay(amount: int) -> str:
        """Pay."""
        ran.append(amount)
        return "paid"

    def judge(ctx, call):
        return Decision.ask(f"Pay {call.input['amount']}?")

    agent = AgentDefinition("payer", model="scripted/m", tools=[pay], hooks=Hooks(pre_tool=[judge]))
    both = tool_calls(tool_call("pay", {"amount": 1}), tool_call("pay", {"amount": 2}))
    replies = [[both], [], [text("done")]]
    results = []
    for prompt, replied in zip(("Pay.", "yes", "no"), replies, strict=True):
        engine = Engine([agent], models=ScriptedModel(replied), sessions=SqliteSessions(tmp_path / "s.db"))
        results.append(await engine.run(agent, prompt, session_id="x"))

    assert ["suspended", "suspended", "completed"] == [r.status.value for r in results]
    assert [1] == ran


async def test_message_to_another_agent_is_no_answer(store):
    await Engine([BOOKING], sessions=store).run(BOOKING, "A table.", session_id="x")
    model = ScriptedModel([text("Hello.")])
    result = await Engine([BOT, BOOKING], models=model, sessions=store).run(BOT, "Hi.", session_id="x")

    assert ("Hello.", ["Hi."]) == (result.output, said(model.calls[0])[-1:])


@pytest.mark.spec("requirements:K3")
async def test_next_message_answers_the_question_of_a_child_too(tmp_path):
    boss = AgentDefinition("boss", model="scripted/m", tools=spawn_tools(), spawnable_agents=[BOOKING])
    spawn = tool_call("spawn_agents", {"agents": [{"agent_type": "booking", "prompt": "go"}]})
    model = ScriptedModel([spawn, text("Booked.")])
    results = []
    for prompt in ("A table.", "4", "at eight"):
        engine = Engine([boss], models=model, sessions=FileSessions(tmp_path))
        results.append(await engine.run(boss, prompt, session_id="x"))

    assert ["suspended", "suspended", "completed"] == [r.status.value for r in results]
    assert "4 at at eight" in results[-1].state.message_history[-2].text
    assert 2 == len(model.calls)


@pytest.mark.spec("requirements:K3")
async def test_changed_handler_of_a_waiting_session_is_refused_unchanged(store):
    def changed(ctx):
        yield from Ask("How many?")

    await Engine([BOOKING], sessions=store).run(BOOKING, "A table.", session_id="x")
    before = store.load("x")
    other = attrs.evolve(BOOKING, handle_steps=changed)
    with pytest.raises(ReplayDivergence):
        await Engine([other], sessions=store).run(other, "4", session_id="x")

    assert before == store.load("x")
    stopped = await Engine([other], sessions=store).run(other, "4", session_id="x", on_divergence="stop")
    assert (RunStatus.FAILED, before) == (stopped.status, store.load("x"))
    with pytest.raises(InputError, match="on_divergence must be one of raise, stop, keep"):
        await Engine([other], sessions=store).run(other, "4", session_id="x", on_divergence="go")
    done = await Engine([BOOKING], sessions=store).run(BOOKING, "4", session_id="x")
    assert ["When?"] == [q.text for q in done.pending_questions]
    # The way out: the conversation goes on without the answer.
    anew = await Engine([other], sessions=store).run(other, "x", session_id="x", previous=store.load("x").state)
    assert ["How many?"] == [q.text for q in anew.pending_questions]


@pytest.mark.spec("requirements:K3", "requirements:L3")
async def test_attachments_of_an_answer_reach_the_run_and_its_session(tmp_path):
    def handler(ctx):
        answer = yield from Ask("Well?")
        yield STEP
        yield STEP
        return answer

    agent = attrs.evolve(BOT, handle_steps=handler)
    # No engine knows the agent but from the call.
    held = await Engine(models=ScriptedModel([]), sessions=FileSessions(tmp_path)).run(agent, "go", session_id="x")
    model = ScriptedModel([text("a"), text("b")])
    engine = Engine(models=model, sessions=FileSessions(tmp_path))
    answers = {held.pending_questions[0].id: "yes"}
    done = await engine.run(
        agent, "And hurry.", session_id="x", answers=answers, metadata={"via": "mail"}, limits=Limits(max_steps=1)
    )

    assert (RunStatus.MAX_STEPS, ["go", "And hurry."]) == (done.status, said(model.calls[0]))
    assert {"via": "mail"} == dict(FileSessions(tmp_path).load("x").info.metadata)


@pytest.mark.spec("requirements:X54")
async def test_an_answer_that_does_not_fit_changes_nothing(store):
    def handler(ctx):
        return (yield from Ask("Which?", ["red", "blue"]))

    agent = AgentDefinition("chooser", handle_steps=handler)
    held = await Engine([agent], sessions=store).run(agent, "go", session_id="x")
    before = store.load("x")
    for wrong in ({"q99": "red"}, {held.pending_questions[0].id: Answer(selected=["green"])}):
        with pytest.raises(AnswerRejected):
            await Engine([agent], sessions=store).run(agent, session_id="x", answers=wrong)

    assert before == store.load("x")
    done = await Engine([agent], sessions=store).run(agent, session_id="x", answers={"Which?": "red"})
    assert "red" == done.output


# --- several at once, and the end of processes ----------------------------------------------------------------------


@pytest.mark.spec("reliability:SS01")
async def test_two_concurrent_messages_are_serialised_and_none_is_lost(store):
    prompts = [f"message {number}" for number in range(6)]
    engines = [Engine([BOT], models=Slow(lambda: asyncio.sleep(0.01)), sessions=store) for _ in range(2)]
    tasks = [engines[n % 2].run(BOT, prompt, session_id="x") for n, prompt in enumerate(prompts)]
    threads = [asyncio.to_thread(e.run_sync, BOT, f"thread {n}", session_id="y") for n, e in enumerate([*engines] * 1)]
    results = await asyncio.gather(*tasks, *threads)
    for engine in engines:
        await engine.aclose()

    assert [True] * 8 == [r.session_saved for r in results]
    expected = [line for prompt in prompts for line in (prompt, f"to {prompt}")]
    assert expected == [m.text for m in store.load("x").messages]
    assert 4 == len(store.load("y").messages)


@pytest.fixture
def in_line(monkeypatch):
    """
    Wait until so many runs have come to the line before a session, or are in.
    """
    came, enter = [], SessionQueue.enter

    def noted(queue, session_id):
        came.append(session_id)
        return enter(queue, session_id)

    async def have_come(count):
        while len(came) < count:  # noqa: ASYNC110 - a line has no event
            await asyncio.sleep(0.001)

    monkeypatch.setattr(SessionQueue, "enter", noted)
    return have_come


@pytest.mark.spec("requirements:N6", "reliability:I12", "reliability:SS01")
@pytest.mark.parametrize("way", ["interrupt", "max_seconds", "cancel", "shutdown"])
async def test_run_waiting_for_its_session_ends_when_told_to(way, in_line, monkeypatch):
    first_may_end, store = asyncio.Event(), MemorySessions()
    async with Engine([BOT], models=Slow(first_may_end.wait), sessions=store) as engine:
        first = engine.start(BOT, "1", session_id="x")
        limits = Limits(max_seconds=3_000) if way == "max_seconds" else None
        second = engine.start(BOT, "2", session_id="x", limits=limits)
        third = engine.start(BOT, "3", session_id="x")
        await in_line(3)
        if way == "max_seconds":
            put_clock_ahead(monkeypatch, 6_000)
        elif way == "interrupt":
            second.interrupt()
        elif way == "shutdown":
            await second.shutdown()
        elif way == "cancel":
            second._turns.task.cancel()
        async with asyncio.timeout(50):
            if way == "cancel":
                with pytest.raises(asyncio.CancelledError):
                    await second.result()
            else:
                result = await second.result()
            events = [event async for event in second.events()]
        assert not first.done
        first_may_end.set()
        ended = [await handle.result() for handle in (first, third)]

    last = events[-1].result
    assert ("failed" if way == "max_seconds" else "cancelled", False) == (last.status.value, last.session_saved)
    assert ["run_started", "run_finished"] == [event.type for event in events if event.type != "run_failed"]
    assert way == "cancel" or result == last
    assert way != "max_seconds" or "max_seconds=3000" in str(last.error)
    assert ["to 1", "to 3"] == [result.text for result in ended]
    assert ["1", "to 1", "3", "to 3"] == [m.text for m in store.load("x").messages]


@pytest.mark.spec("reliability:SS01")
@pytest.mark.parametrize("who", ["waits", "is in"])
async def test_run_of_a_closed_loop_does_not_block_its_session(who):
    queue, loop = SessionQueue(), asyncio.new_event_loop()
    coming = queue.enter("x")
    own = None if who == "is in" else await queue.enter("x")
    task = loop.create_task(coming)

    def stopped() -> None:
        loop.run_until_complete(asyncio.sleep(0))
        task._log_destroy_pending = False
        loop.close()

    await asyncio.to_thread(stopped)
    async with asyncio.timeout(50):
        if own is not None:
            queue.leave("x", own)
        mine = await queue.enter("x")
        gone = task.result() if task.done() else None
        if gone is not None:
            queue.leave("x", gone)  # what was left of it is collected later; that is nobody else's place
        following = asyncio.ensure_future(queue.enter("x"))
        await asyncio.sleep(0)
        assert not following.done()
        queue.leave("x", mine)
        queue.leave("x", await following)

    assert {} == queue._lines


@pytest.mark.spec("requirements:L4")
async def test_journal_argument_for_an_answering_message_is_refused(tmp_path):
    store = FileSessions(tmp_path)
    async with Engine([BOOKING], sessions=store) as engine:
        await engine.run("booking", "go", session_id="x")
        before = store.load("x")
        with pytest.raises(SessionError, match=r"the journal in the session store.*leave out journal="):
            await engine.run("booking", "4", session_id="x", journal=tmp_path / "own.jsonl")
        assert before == store.load("x")
        assert not (tmp_path / "own.jsonl").exists()
        await engine.run("booking", "4", session_id="x")
        result = await engine.run("booking", "noon", session_id="x")

    assert "4 at noon" == result.output


async def test_sessions_whose_runs_start_each_other_do_not_deadlock():
    both_are_in, inside = asyncio.Event(), []

    @tool(in_thread=False)
    async def cross(other: str) -> str:
        """Start a run in the other session."""
        inside.append(other)
        if len(inside) == 2:
            both_are_in.set()
        await both_are_in.wait()
        try:
            return (await engine.run(BOT, "inner", session_id=other)).output
        except SessionError as error:
            return error.message

    def handler(ctx):
        result = yield from call("cross", str, other=ctx.prompt)
        return result

    agent = AgentDefinition("outer", tools=[cross], handle_steps=handler)
    engine = Engine([agent, BOT], models=ScriptedModel([text("fine")] * 4), sessions=MemorySessions())
    runs = [engine.run(agent, other, session_id=own) for own, other in (("a", "b"), ("b", "a"))]
    results = await asyncio.wait_for(asyncio.gather(*runs), 50)

    said = sorted(str(result.output) for result in results)
    assert "neither can end" in said[0]
    assert "fine" == said[1]
    assert "fine" == (await engine.run(BOT, "after", session_id="a")).output


async def test_nested_run_in_the_same_session_is_refused():
    store = MemorySessions()

    @tool(in_thread=False)
    async def nested() -> str:
        """Start a run."""
        other = await engine.run(BOT, "inner", session_id="y")
        try:
            await engine.run(BOT, "inner", session_id="x")
        except SessionError as error:
            return f"{other.output}; {error.message}"
        return "no"

    def handler(ctx):
        result = yield from call("nested")
        return result

    agent = AgentDefinition("outer", tools=[nested], handle_steps=handler)
    engine = Engine([agent, BOT], models=ScriptedModel([text("fine"), text("after")]), sessions=store)
    result = await engine.run(agent, session_id="x")
    after = await engine.run(BOT, "after", session_id="x")

    assert "fine; a run in the session 'x' was started inside a run that it must wait for" in str(result.output)
    assert after.session_saved


@pytest.mark.deep
@pytest.mark.spec("reliability:SS01")
@pytest.mark.parametrize("kind", ["files", "sqlite"])
async def test_later_save_of_another_process_is_a_conflict(kind, tmp_path):
    async def quicker():
        done = await asyncio.to_thread(process, tmp_path, kind, "quick")
        assert (0, "True quick!") == (done.returncode, done.stdout.strip()), done.stderr

    engine = Engine([BOT], models=Slow(quicker), sessions=store_of(kind, tmp_path))
    late = await engine.run(BOT, "slow", session_id="x")

    assert (RunStatus.COMPLETED, "to slow", False) == (late.status, late.output, late.session_saved)
    assert "was not saved: SessionConflict: the session 'x' was saved by another writer" in late.warnings[0]
    assert ["quick", "quick!"] == [m.text for m in store_of(kind, tmp_path).load("x").messages]


SCRIPT = """
import asyncio, os, signal, sys
from pathlib import Path
from stepengine import AgentDefinition, Ask, Engine
from stepengine.sessions import FileSessions, SqliteSessions
from stepengine.testing import ScriptedModel, text

folder, kind, prompt = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
store = FileSessions(folder / "sessions") if kind == "files" else SqliteSessions(folder / "sessions.db")

def booking(ctx):
    count = yield from Ask("For how many?")
    when = yield from Ask("When?")
    return f"{count} at {when}"

if prompt.startswith("kill"):
    store.save = lambda session: os.kill(os.getpid(), signal.SIGKILL)
agents = [AgentDefinition("bot", model="scripted/m"), AgentDefinition("booking", handle_steps=booking)]
with Engine(agents, models=ScriptedModel([text(f"{prompt}!")]), sessions=store) as engine:
    result = engine.run_sync(sys.argv[4] if len(sys.argv) > 4 else "bot", prompt, session_id="x")
print(result.session_saved, result.output)
"""


def process(folder, kind, *arguments):
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder), kind, *arguments],
        check=False, capture_output=True, text=True, cwd=ROOT, timeout=50, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


@pytest.mark.deep
@pytest.mark.spec("reliability:SS02", "requirements:K3", "requirements:X54")
@pytest.mark.parametrize("kind", ["files", "sqlite"])
async def test_answer_taken_by_a_killed_process_is_not_asked_again(kind, tmp_path):
    assert 0 == process(tmp_path, kind, "a table", "booking").returncode
    assert -signal.SIGKILL == process(tmp_path, kind, "kill 4", "booking").returncode
    # The run goes on with the model that it was begun with, so its provider has to be there, called or not.
    engine = Engine([BOOKING], models=ScriptedModel([]), sessions=store_of(kind, tmp_path))
    result = await engine.run(BOOKING, "at eight", session_id="x")

    assert (RunStatus.COMPLETED, "kill 4 at at eight", ()) == (result.status, result.output, result.warnings)
    assert 1 == store_of(kind, tmp_path).load("x").turns


@pytest.mark.spec("reliability:SS02", "reliability:SS01")
@pytest.mark.parametrize("goes_on", [True, False])
async def test_a_run_that_another_process_saved_for_it_is_saved(goes_on, tmp_path):
    ours, theirs = FileSessions(tmp_path), FileSessions(tmp_path)
    save = ours.save

    def quicker(session):
        # They find the journal of our run, which has ended, and save it; their own run may fail before it begins.
        agent = BOT if goes_on else attrs.evolve(BOT, hooks=Hooks(pre_run=[lambda ctx: 1 / 0]))
        with Engine([agent], models=ScriptedModel([text("Theirs.")]), sessions=theirs) as engine:
            assert goes_on == engine.run_sync(agent, "they", session_id="x").session_saved
        return save(session)

    ours.save = quicker
    engine = Engine([BOT], models=ScriptedModel([text("Ours.")]), sessions=ours)
    result = await engine.run(BOT, "we", session_id="x")

    assert (True, ()) == (result.session_saved, result.warnings)
    expected = ["we", "Ours.", *(["they", "Theirs."] if goes_on else [])]
    assert expected == [m.text for m in ours.load("x").messages]


@pytest.mark.spec("reliability:SS03")
async def test_failed_save_is_repeated_by_the_next_message(tmp_path, monkeypatch):
    store = FileSessions(tmp_path)
    engine = Engine([BOT], models=ScriptedModel([text("Hello."), text("Yes.")]), sessions=store)
    with monkeypatch.context() as patch:
        patch.setattr(store, "save", lambda session: 1 / 0)
        assert not (await engine.run(BOT, "Hi.", session_id="x")).session_saved
    second = await engine.run(BOT, "Again?", session_id="x")

    assert (True, ["Hi.", "Hello.", "Again?", "Yes."]) == (
        second.session_saved,
        [m.text for m in store.load("x").messages],
    )


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:SS02")
@pytest.mark.parametrize("is_rewritten", [False, True])
async def test_save_killed_at_any_point_loses_no_answer(is_rewritten, tmp_path, monkeypatch):
    def handler(ctx):
        count = yield from Ask("For how many?")
        yield STEP
        if is_rewritten:
            yield ToolCall(
                "set_messages", {"messages": [{"role": "user", "content": "short"}]}, include_tool_call=False
            )
        when = yield from Ask("When?")
        return f"{count} at {when}"

    agent = attrs.evolve(BOT, handle_steps=handler)
    fsync = os.fsync

    def save_until_killed(session):
        def sync(descriptor):
            if not left:
                raise OSError(errno.EIO, "the process was killed")
            left.pop()
            fsync(descriptor)

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", sync)
            return FileSessions.save(killed, session)

    is_saved, point = False, 0
    while not is_saved:
        left, folder, model = [None] * point, tmp_path / str(point), ScriptedModel([text("four")])
        engine, killed = Engine([agent], models=model, sessions=FileSessions(folder)), FileSessions(folder)
        await engine.run(agent, "a table", session_id="x")
        before, killed.save = killed.load("x"), save_until_killed
        is_saved = (await Engine([agent], models=model, sessions=killed).run(agent, "4", session_id="x")).session_saved
        found = killed.load("x")
        assert before == found or (2, "When?") == (found.version, found.state.pending[0].text)
        last = await engine.run(agent, "eight", session_id="x")

        assert ("4 at eight", (), True) == (last.output, last.warnings, last.session_saved)
        assert 1 == killed.load("x").usage.requests
        point += 1
    assert point > 3


# --- the journals of a session --------------------------------------------------------------------------------------


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("requirements:L9")
@pytest.mark.parametrize("store", ["memory", "files"], indirect=True)
async def test_newest_journals_of_a_session_are_kept_and_deleted_together(store):
    engine = Engine([BOT], models=ScriptedModel([text(f"reply {n}") for n in range(13)]), sessions=store)
    results = [await engine.run(BOT, f"message {n}", session_id="x") for n in range(12)]
    await engine.run(BOT, "message", session_id="y")
    place = store.get_journal_location("x")
    replayed = await Engine([BOT]).replay(results[-1].journal)

    assert ("reply 11", results[-1].state) == (replayed.output, replayed.state)
    kept = [r.state.run_id for r in results if r.journal.records()]
    if place.memory is None:
        assert [r.state.run_id for r in results[-10:]] == kept
        store.delete("x")
        assert [] == [r for r in results if r.journal.records()]
    else:
        assert 1 == len(place.memory)
    assert 1 == store.load("y").turns


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("requirements:L9", "requirements:K3")
@pytest.mark.parametrize("store", KINDS, indirect=True)
async def test_journal_of_a_waiting_run_outlives_failed_runs(store, monkeypatch):
    # Names of one turn end at random. Here, each one is less than those of the runs before.
    ends = iter(range(0xFFFFFFFF, 0, -1))
    monkeypatch.setattr(secrets, "token_hex", lambda _: f"{next(ends):08x}")
    refused = attrs.evolve(BOOKING, hooks=Hooks(pre_run=[lambda ctx: 1 / 0]))
    for _ in range(12):
        assert RunStatus.FAILED is Engine([refused], sessions=store).run_sync(refused, "x", session_id="x").status
    engine = Engine([BOOKING], sessions=store)
    results = [await engine.run(BOOKING, words, session_id="x") for words in ("a table", "4", "eight")]

    assert ("4 at eight", ()) == (results[-1].output, results[-1].warnings)


@pytest.mark.spec("requirements:L13", "requirements:K3")
async def test_child_that_ended_before_a_question_is_listed_once(store):
    leaf = AgentDefinition("leaf", model="scripted/m")

    def handler(ctx):
        yield from AgentCall("leaf", "go")
        count = yield from Ask("For how many?")
        yield from AgentCall("leaf", "go")
        when = yield from Ask("When?")
        return f"{count} at {when}"

    boss = AgentDefinition("boss", handle_steps=handler, spawnable_agents=[leaf])
    engine = Engine([boss], models=ScriptedModel([text("a"), text("b")]), sessions=store, child_sessions=True)
    listed = []
    for words in ("a table", "4", "eight"):
        result = await engine.run(boss, words, session_id="x")
        listed.append([child.rpartition("/")[2] for child in store.load("x").info.child_session_ids])

    assert "4 at eight" == result.output
    assert [list(result.state.child_run_ids[:count]) for count in (1, 2, 2)] == listed


@pytest.mark.spec("requirements:L13")
async def test_conversations_of_children_become_sessions_on_request(tmp_path):
    leaf = AgentDefinition("leaf", model="scripted/m")
    middle = AgentDefinition("middle", model="scripted/m", tools=spawn_tools(), spawnable_agents=[leaf])
    boss = AgentDefinition("boss", model="scripted/m", tools=spawn_tools(), spawnable_agents=[middle, leaf])

    def spawn(*names):
        return tool_call("spawn_agents", {"agents": [{"agent_type": n, "prompt": f"go {n}"} for n in names]})

    def reply(request):
        first, rest = request.messages[0].text, any(m.role == "assistant" for m in request.messages)
        if first == "Go.":
            return text("done") if rest else spawn("middle", "leaf")
        return spawn("leaf") if first == "go middle" and not rest else text(f"did {first}")

    store = FileSessions(tmp_path)
    engine = Engine([boss], models=ScriptedModel([reply] * 6), sessions=store, child_sessions=True)
    result = await engine.run(boss, "Go.", session_id="x")
    root = store.load("x").info
    children = [store.load(child) for child in root.child_session_ids]
    grandchild = store.load(children[0].info.child_session_ids[0])

    assert (True, ()) == (result.session_saved, result.warnings)
    assert ["middle", "leaf"] == [child.info.agent_id for child in children]
    assert ["x", "x"] == [child.info.parent_session_id for child in children]
    assert [result.tool_calls[0].tool_call_id] * 2 == [child.info.parent_tool_call_id for child in children]
    assert (children[0].session_id, "leaf") == (grandchild.info.parent_session_id, grandchild.info.agent_id)
    assert ["go leaf", "did go leaf"] == [m.text for m in grandchild.messages]
    assert ["completed"] * 3 == [session.info.status for session in (*children, grandchild)]
    plain = await Engine([boss], models=ScriptedModel([reply] * 6), sessions=store).run(boss, "Go.", session_id="y")
    assert (True, ()) == (plain.session_saved, store.load("y").info.child_session_ids)


@pytest.mark.spec("requirements:X58", "requirements:K3")
async def test_waiting_session_continues_after_an_edit_when_allowed(store):
    def agent(system):
        def handler(ctx):
            yield STEP
            answer = yield from Ask("How many?")
            turn = yield STEP
            return f"{answer}: {turn.agent_state.message_history[-1].text}"

        return attrs.evolve(BOT, system_prompt=system, handle_steps=handler)

    first, later = ScriptedModel([text("hi")]), ScriptedModel([text("fine")])
    await Engine([agent("a")], models=first, sessions=store).run("bot", "A table.", session_id="x")
    engine = Engine([agent("b")], models=later, sessions=store)
    result = await engine.run("bot", "4", session_id="x", on_divergence="keep")

    assert (RunStatus.COMPLETED, "4: fine", True) == (result.status, result.output, result.session_saved)
    assert ["b"] == [request.system_prompt for request in later.calls]


@pytest.mark.spec("requirements:B1")
async def test_loaded_session_is_unchanged_by_its_continuing_run(store):
    engine = Engine([BOT], models=ScriptedModel([text("a"), text("b")]), sessions=store)
    await engine.run(BOT, "x", session_id="x")
    loaded = store.load("x")
    await engine.run(BOT, "y", session_id="x")

    assert (1, 2) == (loaded.version, len(loaded.messages))
    with pytest.raises(SessionConflict):
        store.save(loaded)
