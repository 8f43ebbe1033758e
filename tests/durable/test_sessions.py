"""
Sessions whose turns are durable runs: submitted from anywhere, executed by whichever worker is free, one after the other.
"""

from __future__ import annotations

import asyncio

import pytest

from stepengine import (
    STEP,
    AgentCall,
    AgentDefinition,
    Answer,
    Ask,
    Engine,
    HookContext,
    Hooks,
    StepContext,
    ToolCall,
    call,
    tool,
)
from stepengine.data.state import RunInfo, RunStatus
from stepengine.durable import DeploymentMaintenance, DurableEngine, Operator
from stepengine.durable.database import open_connection
from stepengine.errors import AnswerRejected, DataError, InputError, JournalError, ReplayDivergence, SessionError
from stepengine.journal import FileJournal
from stepengine.permissions import Policy, Rule
from stepengine.sessions import MemorySessions
from stepengine.testing import ScriptedModel, text, tool_call
from tests.cases import case

from .shared import echo, wipe, worker_of

WORDS = ["I am Ann.", "What is my name?", "And again?"]


def chatty() -> ScriptedModel:
    return ScriptedModel([echo] * 100)


CHAT = AgentDefinition("chat", model="test/model")


def book(ctx: StepContext):
    size = yield from Ask("For how many?", options=("two", "four"))
    day = yield from Ask("On which day?")
    return f"{size} on {day}"


BOOK = AgentDefinition("book", handle_steps=book)


def engine(agents, db: str, **options) -> DurableEngine:
    return worker_of(agents, db, **{"models": chatty(), **options})


@pytest.mark.deep
@pytest.mark.spec("durable:UT1", "requirements:L3")
async def test_durable_session_equals_an_in_process_session(db: str):
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


@pytest.mark.deep
@pytest.mark.spec("requirements:K3")
async def test_message_answers_the_sessions_open_question(db: str):
    async with engine([BOOK], db) as worker:
        first = await worker.run(BOOK, "a table", session_id="c")
        with pytest.raises(AnswerRejected):
            await worker.run(BOOK, "nine", session_id="c")
        second = await worker.run(BOOK, "four", session_id="c")
        third = await asyncio.wait_for(worker.run(BOOK, "Fri\0day", session_id="c"), 50)
        turns = await worker.operator.sessions.list_turns("c")

    assert "For how many?" == first.pending_questions[0].text
    assert "On which day?" == second.pending_questions[0].text
    assert "four on Fri\0day" == third.output
    assert not any(turn.is_waiting for turn in turns)
    assert [None, None, first.journal, first.journal] == [turn.answered for turn in turns]


def cleaning(request):
    """
    Wipe what the user says last, and say so.
    """
    last = request.messages[-1]
    return text(last.text) if last.role == "tool" else tool_call("wipe", {"disk": last.text})


CLEANER = AgentDefinition("cleaner", model="test/model", tools=[wipe])
ASKS_FIRST = Policy(rules=[Rule.ask_for_tool("wipe")])


def cleaner(db: str, executor: str) -> DurableEngine:
    return engine([CLEANER], db, executor=executor, models=ScriptedModel([cleaning] * 100), permissions=ASKS_FIRST)


@pytest.mark.deep
@pytest.mark.spec("requirements:M11", "durable:U37")
async def test_remembered_approval_applies_to_later_turns_on_other_workers(db: str, tmp_path):
    async with cleaner(db, "worker-1") as worker, await Operator.connect(db) as operator:
        asked = await worker.run(CLEANER, "a", session_id="s")
        await operator.answer(asked.journal, {asked.pending_questions[0].id: Answer(remember="always", by="ann")})
        first = await worker.result(asked.journal)
    async with cleaner(db, "worker-2") as worker:
        second = await worker.run(CLEANER, "a", session_id="s")
        elsewhere = await worker.run(CLEANER, "a", session_id="t")
        another = await worker.run(CLEANER, "b", session_id="s")
        rules = await worker.operator.sessions.load_rules("s")
        view = await worker.operator.run(second.journal)
        journal = await worker.export(second.journal, tmp_path / "second.jsonl")
    replayed = await Engine([CLEANER], models=ScriptedModel([]), permissions=ASKS_FIRST).replay(
        FileJournal(tmp_path / "second.jsonl")
    )

    assert ("wiped a", "wiped a") == (first.text, second.text)
    assert "worker-2" == view.executor
    assert 1 == len(rules)
    # Another session is asked, and so is this one before another disk is wiped.
    assert "wipe" == elsewhere.pending_questions[0].tool_name
    assert "wipe" == another.pending_questions[0].tool_name
    # The answer that nobody was asked for stands in the record.
    assert "remembered" in b"".join(journal.content().splitlines()).decode()
    assert (second.text, second.state.message_history) == (replayed.text, replayed.state.message_history)


@pytest.mark.deep
@pytest.mark.spec("durable:U42")
async def test_journal_of_a_turn_replays_and_forks(db: str, tmp_path):
    async with engine([CHAT], db) as worker:
        results = [await worker.run(CHAT, words, session_id="ann") for words in WORDS]
        for number, result in enumerate(results):
            await worker.export(result.journal, tmp_path / f"{number}.jsonl")
        fork = await worker.fork(results[1].journal, at=0)
        forked = await worker.result(fork)
        turns = await worker.operator.sessions.list_turns("ann")
        shown = [event async for event in worker.events(results[2].journal)]
    alone = Engine([CHAT], models=ScriptedModel([]))
    replayed = [await alone.replay(FileJournal(tmp_path / f"{n}.jsonl")) for n in range(3)]

    assert [r.output for r in results] == [r.output for r in replayed]
    assert [r.state.message_history for r in results] == [r.state.message_history for r in replayed]
    # A fork is not a turn: the session does not go on from it.
    assert results[1].output == forked.output
    assert 3 == len(turns)
    assert results[2].output == shown[-1].result.output


@pytest.mark.deep
async def test_message_queued_before_the_question_answers_it(db: str, until):
    async with await Operator.connect(db) as operator:
        runs = [await operator.submit("book", words, info=RunInfo("c")) for words in ("a table", "two", "Monday")]
        async with engine([BOOK], db) as worker:
            results = [await worker.result(run) for run in reversed(runs)]
            shown = [event async for event in worker.events(runs[2])]
            with pytest.raises(JournalError, match="it was the answer to"):
                await worker.export(runs[2])
            with pytest.raises(JournalError, match="cannot be retried"):
                await operator.retry(runs[1])
            stored = await operator.result(runs[1])

    assert ["two on Monday"] * 3 == [result.output for result in results]
    assert "two on Monday" == stored["output"] == shown[-1].result.output


@pytest.mark.deep
async def test_message_for_another_agent_waits_for_the_answer(db: str):
    async with engine([BOOK, CHAT], db) as worker:
        asked = await worker.run(BOOK, "a table", session_id="c")
        other = await worker.submit(CHAT, "hello", session_id="c")
        (_, waiting) = await worker.operator.sessions.list_turns("c")
        kept = await worker.operator.sessions.load("c")
        await worker.answer(asked.journal, {"For how many?": "two"})
        await worker.run(BOOK, "now", session_id="d")  # meanwhile others have their turns
        await worker.resume(asked.journal, answers={"On which day?": "Monday"})
        result = await worker.result(other)

    assert waiting.is_waiting
    assert asked.journal == kept.journal
    assert "a table | hello" == result.output


@pytest.mark.deep
@pytest.mark.smoke
async def test_duplicate_submission_is_one_turn(db: str):
    async with await Operator.connect(db) as one, await Operator.connect(db) as two:
        ids = [f"m{n}" for n in range(8)]
        await asyncio.gather(
            *[each.submit("chat", run, id=run, info=RunInfo("s")) for run in ids for each in (one, two, one)]
        )
        turns = await one.sessions.list_turns("s")
        known = await one.sessions.list_sessions()

    assert set(ids) == {turn.run for turn in turns}
    assert list(range(1, 9)) == [turn.number for turn in turns]
    assert [("s", 8)] == [(view.id, view.turns) for view in known]
    # The first one is where workers take it, all others are in line.
    assert [False, *[True] * 7] == [turn.is_waiting for turn in turns]


@pytest.mark.deep
async def test_cancelled_turn_is_skipped(db: str):
    async with await Operator.connect(db) as operator:
        runs = [await operator.submit("chat", str(n), info=RunInfo("s")) for n in range(3)]
        assert [runs[1]] == await operator.cancel(runs[1])
        async with engine([CHAT], db) as worker:
            last = await worker.result(runs[2])
            with pytest.raises(JournalError, match="has started"):
                await operator.retry(runs[1])

    assert "0 | 2" == last.output


class Edited:
    """A tool whose name is in the handler, and the handler edited since."""

    def __init__(self, disk: str) -> None:
        def steps(ctx: StepContext):
            yield ToolCall("wipe", {"disk": disk})
            size = yield from Ask("How large?")
            return [m.text for m in ctx.agent_state.message_history if m.role == "user"] + [size]

        self.agent = AgentDefinition("asks", tools=[wipe], handle_steps=steps)


@pytest.mark.deep
@pytest.mark.spec("durable:UT9", "durable:UC3")
async def test_session_waits_for_a_stopped_turn_until_retry_or_cancel(db: str, until):
    old, new = Edited("a").agent, Edited("b").agent
    async with engine([old], db, release="1") as worker:
        runs = {s: (await worker.run(old, "first", session_id=s)).journal for s in "st"}
    async with engine([new], db, release="1", executor="worker-1") as worker:
        for run in runs.values():
            with pytest.raises(ReplayDivergence):
                await worker.result(run, waits=True)
        later = {s: await worker.submit(new, f"later {s}", session_id=s, answers={"How large?": "L"}) for s in "st"}
        await worker.cancel(runs["t"])
        gone_on = await worker.result(later["t"])
        in_line = (await worker.operator.sessions.list_turns("s"))[1].is_waiting
        with pytest.raises(JournalError, match="has started"):
            await worker.operator.retry(runs["t"])
    async with engine([old], db, release="1") as worker:
        await worker.operator.retry(runs["s"])
        first = await worker.resume(runs["s"], answers={"How large?": "S"})

    assert in_line
    assert ["later t", "L"] == gone_on.output
    assert ["first", "S"] == first.output


class Spawning:
    """A tool whose name is in the handler, before a child that asks."""

    def __init__(self, disk: str) -> None:
        def steps(ctx: StepContext):
            yield ToolCall("wipe", {"disk": disk})
            return (yield from AgentCall("book", "a table"))

        self.agent = AgentDefinition("spawning", tools=[wipe], spawnable_agents=[BOOK], handle_steps=steps)


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("durable:U26")
async def test_cancelling_a_diverged_turn_ends_its_children(db: str):
    async with engine([Spawning("a").agent], db, release="1") as worker:
        run = (await worker.run("spawning", session_id="s")).journal
    async with engine([Spawning("b").agent], db, release="1") as worker:
        with pytest.raises(ReplayDivergence):
            await worker.result(run, waits=True)
        before = [view.state for view in await worker.operator.tree(run)]
        ended = await worker.operator.cancel(run)
        after = [view.state for view in await worker.operator.tree(run)]

    assert ["ERROR", "PENDING"] == before
    assert [run, f"{run}/1"] == ended
    assert ["ERROR", "CANCELLED"] == after


@pytest.mark.deep
@pytest.mark.spec("durable:U36")
async def test_moved_turns_keep_their_order(db: str):
    async with engine([BOOK, CHAT], db, release="1") as worker:
        asked = await worker.run(BOOK, "a table", session_id="s")
        second = await worker.submit(CHAT, "more", session_id="s")
    async with engine([BOOK, CHAT], db, release="2") as worker:
        assert [None, None] == [await worker.fits(run) for run in (asked.journal, second)]
        await worker.move(second)
        # What is interrupted to be moved is waited for, whoever looks meanwhile.
        await worker.operator.cancel(asked.journal, hold_session=True)
        assert not await worker.operator.sessions.advance_session("s")
        await worker.operator.retry(asked.journal, release="2")
        await worker.resume(asked.journal, answers={"For how many?": "two"})
        await worker.resume(asked.journal, answers={"On which day?": "Monday"})
        result = await worker.result(second)
        views = [await worker.operator.run(run) for run in (asked.journal, second)]

    assert "a table | more" == result.output
    assert ["2", "2"] == [view.release for view in views]


@pytest.mark.deep
async def test_turn_refused_by_a_hook_leaves_the_session_unchanged(db: str):
    def refuse(ctx: HookContext):
        if ctx.messages[-1].text == "bad":
            raise ValueError("no")

    options = {"hooks": Hooks(pre_run=[refuse])}
    async with engine([CHAT], db, **options) as worker:
        results = [await worker.run(CHAT, words, session_id="s", metadata={words: 1}) for words in ("a", "bad", "b")]
        kept = await worker.operator.sessions.load("s")

    assert [RunStatus.COMPLETED, RunStatus.FAILED, RunStatus.COMPLETED] == [r.status for r in results]
    assert [True, False, True] == [r.session_saved for r in results]
    assert "a | b" == results[2].output
    assert (2, {"a": 1, "b": 1}) == (kept.turns, dict(kept.info.metadata))


@pytest.mark.deep
async def test_given_state_replaces_the_session_state(db: str):
    async with engine([CHAT], db) as worker:
        other = await worker.run(CHAT, "elsewhere")
        await worker.run(CHAT, "here", session_id="s")
        result = await worker.run(CHAT, "now", session_id="s", previous=other.state)
        last = await worker.run(CHAT, "then", session_id="s")

    assert "elsewhere | now" == result.output
    assert "elsewhere | now | then" == last.output


@pytest.mark.deep
@pytest.mark.spec("durable:U41")
async def test_cleanup_keeps_the_state_a_session_continues_from(db: str):
    async with engine([CHAT], db) as worker:
        operator = worker.operator
        runs = [(await worker.run(CHAT, str(n), session_id="s")).journal for n in range(3)]
        await worker.run(CHAT, "alone", session_id="t")
        early = await DeploymentMaintenance(operator).collect(3600, dry_run=True)
        await operator.submit("nobody", "", info=RunInfo("s"))
        deleted = await DeploymentMaintenance(operator).collect(0)
        kept = await operator.sessions.load("s")
        gone = await operator.sessions.load("t")

    assert [] == early
    assert set(runs[:2]) < set(deleted)
    assert runs[2] not in deleted
    assert ["0", "1", "2"] == [m.text for m in kept.messages if m.role == "user"]
    assert (0, 0) == (gone.turns, len(gone.messages))


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:SS05")
async def test_session_ids_are_opaque(db: str):
    ids = ["a", "A", "a%", "a_", "a'b", 'a"b', "a/../b", "{}", "x" * 1000, "\u00e4", "a\u0308", "\U0001f600"]
    async with await Operator.connect(db) as operator:
        for number, name in enumerate(ids):
            await operator.submit("chat", str(number), info=RunInfo(name))
        turns = [await operator.sessions.list_turns(name) for name in ids]
        for wrong, error in (("", SessionError), ("x" * 1001, SessionError), ("a\0b", InputError)):
            with pytest.raises(error):
                await operator.submit("chat", "", info=RunInfo(wrong))

    assert [1] * len(ids) == [len(of) for of in turns]


# --- messages to a run that goes on -------------------------------------------------------------------------------------


@tool(idempotent=True)
async def gate(name: str) -> str:
    """
    Wait until the test lets it go.

    Args:
        name: Which one.
    """
    await GATES.setdefault(name, asyncio.Event()).wait()
    return name


GATES: dict[str, asyncio.Event] = {}


def gated(ctx: StepContext):
    yield from call(gate, "one")
    first = yield STEP
    yield from call(gate, "two")
    second = yield STEP
    return [first.text, second.text]


GATED = AgentDefinition("gated", model="test/model", tools=[gate], handle_steps=gated)


async def reached(name: str, until) -> None:
    """
    Wait until a run stands at a gate.
    """

    async def there():
        return name in GATES

    await until(there)


@pytest.mark.deep
@pytest.mark.spec("requirements:N3")
async def test_message_is_delivered_once_and_journaled(db: str, tmp_path, until):
    GATES.clear()
    async with await Operator.connect(db) as operator:
        async with engine([GATED], db) as worker:
            run = await worker.submit(GATED, "go")
            await reached("one", until)
            for _ in range(2):
                await operator.send_input(run, "left", id="same")
            await heard_by(worker, 1, until)
            GATES["one"].set()
            await reached("two", until)
        await operator.send_input(run, "right", id="other")
        await DeploymentMaintenance(operator).takeover("worker-1")
    GATES.clear()
    async with engine([GATED], db, executor="worker-2") as worker:
        await heard_by(worker, 1, until)
        GATES["two"].set()
        result = await worker.result(run)
        journal = await worker.export(run, tmp_path / "said.jsonl")
        with pytest.raises(JournalError, match="SUCCESS"):
            await worker.operator.send_input(run, "too late")
    replayed = await Engine([GATED], models=ScriptedModel([])).replay(journal)

    # What was heard is not heard again, and what is said while nobody works is not lost.
    assert ["go | left", "go | left | right"] == result.output
    assert result.output == replayed.output
    assert result.state.message_history == replayed.state.message_history


async def heard_by(worker: DurableEngine, count: int, until) -> None:
    """
    Wait until that many messages are in the inboxes of a worker's runs.
    """

    async def there():
        trees = [run.tree for run in worker._process.runs if run.end.tree is not None]
        return sum(len(tree.inboxes.root) for tree in trees)

    await until(there, lambda found: found == count)


@pytest.mark.deep
@pytest.mark.smoke
async def test_malformed_message_does_not_block_later_messages(db: str, until):
    GATES.clear()
    async with engine([GATED], db) as worker:
        run = await worker.submit(GATED, "go")
        await reached("one", until)
        with pytest.raises(InputError, match="surrogate"):
            await worker.operator.send_input(run, "\udcff")
        await worker.operator.client.send_async(run, {"text": "\0"}, "said", idempotency_key="b")
        await worker.operator.client.send_async(run, {"text": 1}, "said", idempotency_key="c")
        await worker.operator.send_input(run, "left", id="d")
        await heard_by(worker, 1, until)


@pytest.mark.deep
@pytest.mark.smoke
async def test_turn_cancelled_while_it_is_promoted_does_not_start(db: str):
    async with await Operator.connect(db) as operator, await Operator.connect(db) as other:
        first = await operator.submit("chat", "a", info=RunInfo("s"))
        second = await operator.submit("chat", "b", info=RunInfo("s"))
        resumed, cancelling = operator.client.resume_workflow_async, []

        async def late(run: str, **options) -> None:
            cancelling.append(asyncio.create_task(other.cancel(run)))
            await asyncio.wait(cancelling, timeout=0.1)
            await resumed(run, **options)

        vars(operator.client)["resume_workflow_async"] = late
        await operator.cancel(first)
        assert await operator.sessions.advance_session("s")
        await asyncio.gather(*cancelling)
        turns = await operator.sessions.list_turns("s")

    assert [(first, "CANCELLED"), (second, "CANCELLED")] == [(turn.run, turn.state) for turn in turns]


@pytest.mark.deep
async def test_turn_held_for_an_abandoned_move_can_be_cancelled(db: str):
    async with engine([CHAT], db) as worker, await Operator.connect(db) as operator:
        await operator.submit("chat", "a", info=RunInfo("s"), id="left", release="none")
        await operator.cancel("left", hold_session=True)  # whoever moves it dies here
        run = await operator.submit("chat", "b", info=RunInfo("s"))
        assert ["left"] == await operator.cancel("left")
        result = await asyncio.wait_for(worker.result(run), 50)

    assert "b" == result.output


@pytest.mark.deep
async def test_failed_lookup_does_not_stop_turns(db: str, monkeypatch):
    async with engine([CHAT], db, polling=0.05) as worker, await Operator.connect(db) as operator:
        mine, failures = worker.operator.deployment.fetch_rows, []

        async def fetch_rows(statement, *values):
            if not failures:
                failures.append(statement)
                raise RuntimeError("cached plan must not change result type")
            return await mine(statement, *values)

        monkeypatch.setattr(worker.operator.deployment, "fetch_rows", fetch_rows)
        for _ in range(1_000):
            if failures:
                break
            await asyncio.sleep(0.05)
        monkeypatch.setattr(worker.operator.deployment, "fetch_rows", mine)
        await operator.submit("chat", "a", info=RunInfo("s"))
        run = await operator.submit("chat", "b", info=RunInfo("s"))
        result = await asyncio.wait_for(worker.result(run), 50)

    assert failures
    assert "a | b" == result.output


@pytest.mark.deep
async def test_retried_run_stays_in_its_pool(db: str):
    async with engine([CHAT], db, pool="slow") as worker, await Operator.connect(db) as operator:
        plain = await worker.submit(CHAT, "a", release="none")
        turn = await worker.submit(CHAT, "a", release="none", session_id="s")
        for run in (plain, turn):
            await operator.cancel(run)
            await operator.retry(run, release=worker.release)
        results = [await asyncio.wait_for(worker.result(run), 50) for run in (plain, turn)]

    assert ["a", "a"] == [result.output for result in results]


async def test_unstorable_request_raises_our_data_error(db: str):
    async with await Operator.connect(db) as operator:
        for given in ({"prompt": "\udc80"}, {"info": RunInfo("s", "\udc80")}, {"agent": "a\0"}, {"release": "a\0"}):
            with case(given):
                with pytest.raises(DataError, match=r"surrogate|NUL"):
                    await operator.submit(**{"agent": "chat", "info": RunInfo("s"), **given})
                assert not await operator.sessions.list_turns("s")
        with pytest.raises(DataError):
            await operator.run("a\0")


@pytest.mark.deep
@pytest.mark.smoke
async def test_concurrent_retries_happen_once(db: str):
    async with await Operator.connect(db) as one, await Operator.connect(db) as two:
        run = await one.submit("chat", "a")
        await one.cancel(run)
        said = await asyncio.gather(one.retry(run), two.retry(run), return_exceptions=True)

    assert [JournalError, list] == sorted(map(type, said), key=lambda kind: kind.__name__)


def wiping(ctx: StepContext):
    done = yield ToolCall("wipe", {"disk": ctx.prompt})
    return done.tool_result.text


WIPER = AgentDefinition("wiper", tools=[wipe], handle_steps=wiping)


def around(ctx: StepContext):
    before = yield from AgentCall("wiper", ctx.prompt)
    after = yield from AgentCall("wiper", ctx.prompt)
    return [before, after]


AROUND = AgentDefinition("around", spawnable_agents=[WIPER], handle_steps=around)


@pytest.mark.deep
@pytest.mark.spec("requirements:M11", "durable:U37")
async def test_remembered_approval_in_a_child_applies_to_its_tree(db: str):
    async with engine([AROUND], db, permissions=ASKS_FIRST) as worker:
        asked = await worker.run(AROUND, "x", session_id="s")
        first = await worker.resume(asked.journal, answers={asked.pending_questions[0].id: Answer(remember="session")})
    async with engine([AROUND], db, executor="worker-2", permissions=ASKS_FIRST) as worker:
        second = await worker.run(AROUND, "x", session_id="s")

    assert ["wiped x", "wiped x"] == first.output
    assert ["wiped x", "wiped x"] == second.output


@pytest.mark.deep
async def test_frozen_session_lock_blocks_no_other_session(db: str):
    lock = "select pg_advisory_lock(hashtextextended('stepengine-session:stepengine:' || %s, 0))"
    async with engine([CHAT], db) as worker, await Operator.connect(db) as operator:
        first = await operator.submit("chat", "a", info=RunInfo("frozen"), release="none")
        await operator.submit("chat", "b", info=RunInfo("frozen"))
        frozen = await open_connection(operator.url)
        try:
            await frozen.execute(lock, ("frozen",))
            await operator.client.cancel_workflow_async(first)
            waiting = asyncio.create_task(worker.submit(CHAT, "c", session_id="frozen"))
            await asyncio.wait((waiting,), timeout=1.0)
            results = [await asyncio.wait_for(worker.run(CHAT, word, session_id="other"), 50) for word in ("a", "b")]
            assert not waiting.done()
        finally:
            await frozen.close()
        last = await asyncio.wait_for(worker.result(await waiting), 50)

    assert ["a", "a | b"] == [result.output for result in results]
    assert "b | c" == last.output
