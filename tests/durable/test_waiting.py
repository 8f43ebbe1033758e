"""
Runs on PostgreSQL that wait for times, messages and children in the background, and the workers that die meanwhile.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from stepengine import (
    AgentCall,
    AgentDefinition,
    Ask,
    Cancel,
    Engine,
    Parallel,
    Race,
    Receive,
    Schedule,
    Send,
    Sleep,
    Start,
    StepContext,
    ToolCall,
    Wait,
    call,
    tool,
)
from stepengine.cli.app import app
from stepengine.durable import DurableEngine, DurableScheduler, migrate
from stepengine.durable.database import open_connection
from stepengine.errors import BadYield, InputError, JournalError
from stepengine.testing import ScriptedModel

from .killed import WORKER, Workers
from .shared import add, note, worker_of


def receiving_steps(ctx: StepContext):
    first = yield from Receive("order", schema={"type": "object"})
    second = yield from Receive("order", timeout=0.4)
    return [first, second]


RECEIVING = AgentDefinition("receiving", handle_steps=receiving_steps)


@pytest.mark.deep
@pytest.mark.spec("waiting:WT31")
async def test_messages_arrive_once_in_order_and_invalid_ones_are_skipped(db: str):
    async with worker_of([RECEIVING], db, works=False) as engine:
        run = await engine.submit("receiving")
        await engine.send_message(run, "order", "no object", id="m0")
        await engine.send_message(run, "order", {"n": 1}, id="m1")
        await engine.send_message(run, "order", {"n": 1}, id="m1")
    async with worker_of([RECEIVING], db) as engine:
        result = await engine.result(run, waits=True)
        assert [{"n": 1}, None] == result.output
        with pytest.raises(JournalError, match="accepts no messages"):
            await engine.send_message(run, "order", {})


@pytest.mark.spec("waiting:WT31")
async def test_invalid_message_is_rejected_before_sending(db: str):
    async with worker_of([RECEIVING], db, works=False) as engine:
        run = await engine.submit("receiving")
        with pytest.raises(BadYield):
            await engine.send_message(run, "no topic", 1)
        with pytest.raises(InputError, match="path"):
            await engine.send_message(run, "order", 1, path="child")
        with pytest.raises(InputError, match="at most"):
            await engine.send_message(run, "order", "x" * 1_100_000)
        with pytest.raises(JournalError, match="no run"):
            await engine.send_message("nobody", "order", 1)


def child_steps(ctx: StepContext):
    name, _, seconds = ctx.prompt.partition(":")
    if name == "slow":
        yield from Receive("begin")
    if seconds:
        yield from Sleep(float(seconds))
    elif ctx.prompt == "listens":
        told = yield from Receive("word")
        yield from call(note, f"{ctx.prompt}-{told}")
        return told
    elif ctx.prompt == "asks":
        return (yield from Ask("How large?"))
    yield from call(note, name)
    return f"did {name}"


CHILD = AgentDefinition("child", tools=[note], handle_steps=child_steps)


def starting_steps(ctx: StepContext):
    slow, quick, ears = yield from Start(
        AgentCall("child", "slow:0.3"), AgentCall("child", "quick"), AgentCall("child", "listens")
    )
    first = yield from Wait(slow, quick, need="any")
    yield from Send(slow, None, topic="begin")
    told = yield from Send(ears, "hello", topic="word")
    rest = yield from Wait(slow, quick, ears)
    late = yield from Send(ears, "again", topic="word")
    return [
        [[child.output for child in first.done], [ref.path for ref in first.open]], told,
        [child.output for child in rest.done], [rest[slow].output, rest[ears].output], late,
    ]  # fmt: skip


STARTING = AgentDefinition("starting", spawnable_agents=[CHILD], handle_steps=starting_steps)


@pytest.mark.deep
@pytest.mark.spec("waiting:WT32", "waiting:WT35")
async def test_background_children_can_be_awaited_and_messaged(db: str):
    async with worker_of([STARTING], db) as engine:
        result = await asyncio.wait_for(engine.run("starting"), 30)
        again = await Engine([STARTING]).replay(await engine.export(result.journal))
        assert None is result.error
        assert [[["did quick"], ["0"]], True] == result.output[:2]
        assert ["did slow", "hello"] == result.output[3]
        assert False is result.output[4]
        assert sorted(result.output[2]) == ["did quick", "did slow", "hello"]
        assert result.output == again.output


def ending_steps(ctx: StepContext):
    _left, ended, waited = yield from Start(
        AgentCall("child", "left:3600"), AgentCall("child", "ended:3600"),
        AgentCall("child", "waited:3600"),
    )  # fmt: skip
    yield from Cancel(ended, "no longer needed")
    known = yield from Wait(ended)
    short = yield from Wait(waited, timeout=0.3)
    return [[known[ended].status.value, str(known[ended].error)], [len(short.done), len(short.open)]]


ENDING = AgentDefinition("ending", spawnable_agents=[CHILD], handle_steps=ending_steps)


@pytest.mark.deep
@pytest.mark.spec("waiting:WT32", "waiting:WT35")
async def test_no_background_child_outlives_its_parent(db: str):
    async with worker_of([ENDING], db) as engine:
        run = await engine.submit("ending")
        result = await asyncio.wait_for(engine.result(run, waits=True), 30)
        assert [["cancelled", "no longer needed"], [0, 1]] == result.output
        views = await engine.operator.tree(run)
        assert ["CANCELLED"] * 3 == [view.state for view in views[1:]]
        again = await Engine([ENDING]).replay(await engine.export(run))
        assert result.output == again.output


@pytest.mark.deep
@pytest.mark.spec("waiting:WT35")
async def test_mailbox_moves_with_the_run_of_a_journal(db: str, tmp_path):
    path = tmp_path / "run.jsonl"
    alone = Engine([RECEIVING], models=ScriptedModel([]))
    assert "suspended" == (await alone.run("receiving", journal=path)).status.value
    assert await alone.send_message(path, "order", {"n": 7}, id="m7")
    async with worker_of([RECEIVING], db) as engine:
        run = await engine.submit_journal(path)
        result = await asyncio.wait_for(engine.result(run, waits=True), 30)
        assert [{"n": 7}, None] == result.output


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("waiting:WT22")
async def test_sleeping_run_is_cancelled_at_once(db: str, until):
    async with worker_of([LONG], db) as engine:
        run = await engine.submit("long")
        await until(lambda: engine.operator.run_waits.list_waits([run]))
        await engine.cancel(run)
        result = await engine.result(run)
        assert "cancelled" == result.status.value

        async def held():
            return list(engine._process.runs)

        await until(held, lambda runs: not runs)


def long_steps(ctx: StepContext):
    yield from Sleep(3600)


LONG = AgentDefinition("long", handle_steps=long_steps)


def leaving_steps(ctx: StepContext):
    ref = yield from Start(AgentCall("child", "orphan:3600"), on_return="cancel")
    yield from Receive("go")
    return ref.path


LEAVING = AgentDefinition("leaving", spawnable_agents=[CHILD], handle_steps=leaving_steps)


@pytest.mark.deep
@pytest.mark.spec("waiting:WT32", "waiting:WT22")
async def test_suspended_run_can_be_exported_and_leaves_no_orphan(db: str):
    async with worker_of([LEAVING], db) as engine:
        result = await asyncio.wait_for(engine.run("leaving"), 30)
        run = result.journal
        assert "suspended" == result.status.value
        assert {"message", "time"} == {wait.kind for wait in result.waits_for}
        journal = await engine.export(run)
        again = await Engine([LEAVING], models=ScriptedModel([])).resume(journal)
        assert {"message", "time"} == {wait.kind for wait in again.waits_for}
        with pytest.raises(JournalError, match="children in the background"):
            await engine.submit_journal(journal)
    async with worker_of([LEAVING], db) as engine:
        await engine.send_message(run, "go", True)
        result = await asyncio.wait_for(engine.result(run, waits=True), 30)
        assert "0" == result.output
        assert ["CANCELLED"] == [view.state for view in (await engine.operator.tree(run))[1:]]


def racing_steps(ctx: StepContext):
    lost = yield from Race(Receive("never"), Sleep(0.2))
    child = yield from Race(Receive("begun"), AgentCall("child", "long:3600"))
    both = yield from Parallel(Race(Sleep(3600), Receive("word")), Sleep(0.1))
    return [lost[0], child[0], *both[0]]


def soon_steps(ctx: StepContext):
    number, _ = yield from Race(Receive("never"), Sleep(1))
    _, _, size = yield from Parallel(Receive("word"), Sleep(1), Ask("Which?"))
    return [number, size]


SOON = AgentDefinition("soon", handle_steps=soon_steps)


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("waiting:WT22")
async def test_run_with_a_near_time_is_not_suspended(db: str):
    async with worker_of([SOON], db) as engine:
        result = await asyncio.wait_for(engine.run("soon"), 30)
        run, waits = result.journal, [wait.kind for wait in result.waits_for]
        await engine.send_message(run, "word", None)
        await engine.answer(run, {"Which?": "one"})
        result = await asyncio.wait_for(engine.result(run, waits=True), 30)

    assert ["question", "message"] == waits
    assert [1, "one"] == result.output


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("waiting:WT22")
async def test_run_with_a_running_tool_is_not_suspended(db: str, until):
    gates = {name: asyncio.Event() for name in ("before", "after")}

    @tool(idempotent=True)
    async def hold(name: str) -> str:
        """
        Wait.

        Args:
            name: For what.
        """
        await gates[name].wait()
        return name

    def holding(ctx: StepContext):
        before, after = [ToolCall("hold", {"name": name}) for name in gates]
        first = yield from Parallel(before, Ask("Which?"), after)
        second = yield from Parallel(Ask("How many?"), before)
        return [first[1], second[0]]

    agent = AgentDefinition("holding", tools=[hold], handle_steps=holding)
    async with worker_of([agent], db) as engine:
        run = await engine.submit(agent)
        found = []
        for gate in gates.values():
            await until(lambda: engine.operator.list_questions(run))
            found.append(await engine.operator.run_waits.find_waits_if_suspended(run))
            gate.set()
        first = await asyncio.wait_for(engine.result(run), 30)
        second = await asyncio.wait_for(engine.resume(run, answers={"Which?": "one"}), 30)
        third = await asyncio.wait_for(engine.resume(run, answers={"How many?": "two"}), 30)

    assert [([], [])] * 2 == found
    assert ["Which?", "How many?"] == [result.pending_questions[0].text for result in (first, second)]
    assert ["one", "two"] == third.output


@pytest.mark.deep
@pytest.mark.spec("waiting:WT22")
async def test_race_with_a_running_tool_is_not_suspended(db: str, until):
    gate = asyncio.Event()

    @tool(idempotent=True)
    async def hold() -> str:
        """
        Wait.
        """
        await gate.wait()
        return "held"

    def racing(ctx: StepContext):
        number, _ = yield from Race(Receive("never"), ToolCall("hold", {}))
        return number

    agent = AgentDefinition("holding", tools=[hold], handle_steps=racing)
    async with worker_of([agent], db) as engine:
        run = await engine.submit(agent)
        await until(lambda: engine.operator.run_waits.list_waits([run]))
        found = await engine.operator.run_waits.find_waits_if_suspended(run)
        gate.set()
        result = await asyncio.wait_for(engine.result(run), 30)

    assert ([], []) == found
    assert 1 == result.output


BLOCKED_LOSERS = """
    create function wait_for_the_test() returns trigger language plpgsql as $$
        begin perform pg_advisory_xact_lock_shared(1); return new; end
    $$;
    create trigger losers before insert or update on dbos.operation_outputs
        for each row when (new.output like '%race_lost%') execute function wait_for_the_test()
"""
"""While the lock 1 is held, no outcome of a race's loser is recorded."""


@pytest.mark.deep
@pytest.mark.spec("waiting:WT22")
async def test_run_is_not_suspended_before_the_losers_are_recorded(db: str, until):
    def racing(ctx: StepContext):
        number, _ = yield from Race(Receive("never"), Sleep(0.01))
        return number

    async with worker_of([AgentDefinition("racing", handle_steps=racing)], db) as engine:
        async with await open_connection(engine.setting.url) as holder:
            await holder.execute(BLOCKED_LOSERS)
            await holder.execute("select pg_advisory_lock(1)")
            run = await engine.submit("racing")

            async def is_blocked() -> bool:
                blocked = await holder.execute(
                    "select from pg_locks where locktype = 'advisory' and not granted and objid = 1"
                    " and database = (select oid from pg_database where datname = current_database())"
                )
                return blocked.rowcount > 0

            await until(is_blocked)
            found = await engine.operator.run_waits.find_waits_if_suspended(run)
        result = await asyncio.wait_for(engine.result(run), 30)

    assert ([], []) == found
    assert 1 == result.output


def asking_in_a_race(ctx: StepContext):
    return (yield from Race(Ask("Now?"), Sleep(3600)))


RACING = AgentDefinition("racing", spawnable_agents=[CHILD], handle_steps=racing_steps)
HASTY = AgentDefinition("hasty", handle_steps=asking_in_a_race)


@pytest.mark.deep
@pytest.mark.spec("waiting:WT5")
async def test_first_of_a_race_wins_and_losers_are_cancelled(db: str, until):
    async with worker_of([RACING, HASTY], db) as engine:
        run = await engine.submit("racing")
        await engine.send_message(run, "word", "now")
        await until(lambda: engine.operator.tree(run), lambda tree: len(tree) == 2)
        await engine.send_message(run, "begun", None)
        result = await asyncio.wait_for(engine.result(run, waits=True), 30)
        assert [1, 0, 1, "now"] == result.output
        assert ["CANCELLED"] == [view.state for view in (await engine.operator.tree(run))[1:]]
        again = await Engine([RACING]).replay(await engine.export(run))
        assert result.output == again.output
        refused = await asyncio.wait_for(engine.run("hasty"), 30)
        assert "a durable run cannot ask a person in a race" in str(refused.error)
        assert [] == await engine.operator.list_questions(refused.journal)


@pytest.mark.deep
@pytest.mark.spec("waiting:WT22")
async def test_killed_workers_do_everything_once_in_a_nightly_run(workers: Workers, monkeypatch, until):
    monkeypatch.setenv("WORLD", str(workers.world))
    spec = importlib.util.spec_from_file_location("durable_worker", WORKER)
    agents = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(agents)
    at_work = {name: workers.start(name) for name in ("worker-1", "worker-2")}

    def kill(name: str) -> None:
        at_work[name].kill()
        at_work[name].wait()

    def restart(name: str) -> None:
        at_work[name] = workers.start(name)

    async with DurableEngine(agents.AGENTS, models=agents.model(), db=workers.db, works=False) as engine:
        run = await engine.submit("nightly", "45")

        async def asked():
            return await engine.operator.list_questions(run)

        async def has_ended(path: str) -> bool:
            return any(view.id == f"{run}/{path}" and view.is_over for view in await engine.operator.tree(run))

        async def waits_for_children() -> bool:
            return any(wait.kind == "child" for _, wait in await engine.operator.run_waits.list_waits([run]))

        (waiting,) = await until(asked, seconds=60)
        for name in ("worker-1", "worker-2", "worker-1"):  # whichever has the run, and its children
            kill(name)
            await asyncio.sleep(0.3)
            restart(name)
            await asyncio.sleep(1.5)
        kill("worker-2")
        await engine.send_message(run, "webhook", {"name": "hooked"}, id="delivery-1", path="1")
        await engine.send_message(run, "webhook", {"name": "hooked"}, id="delivery-1", path="1")
        restart("worker-2")
        await until(lambda: has_ended("1"), seconds=60)
        await engine.answer(run, {waiting.questions[0].id: "large"})
        # Not before it is recorded: what was in flight would be in doubt.
        await until(waits_for_children, seconds=60)
        kill("worker-1")
        restart("worker-1")
        result = await asyncio.wait_for(engine.result(run, waits=True), 120)
        assert result.error is None
        assert ["worker-look", "worker-fire"] == result.output[0]
        assert "large" == result.output[1]
        names = ["hooked", "sleeper", "worker"]
        assert [[f"{name}-look", f"{name}-fire"] for name in names] == result.output[2]
        journal = await engine.export(run)
    fired = {name: count for name, count in workers.told("began").items() if not name.endswith("-look")}
    assert dict.fromkeys(("begin", "asked", "end", *(f"{name}-fire" for name in names)), 1) == fired
    again = await Engine(agents.AGENTS, models=agents.model()).replay(journal)
    assert result.output == again.output


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("waiting:WT36")
async def test_scheduled_time_starts_one_run_across_schedulers(
    db: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    schedule = Schedule("receiving", cron="* * * * *", id="every-minute", prompt="scheduled")
    noon = datetime(2026, 1, 1, 12, 0, 30, tzinfo=UTC)
    async with worker_of([RECEIVING], db, works=False) as engine:
        await migrate(db)
        one, other = DurableScheduler(engine, [schedule]), DurableScheduler(engine, [schedule])
        await asyncio.gather(one.tick(noon), other.tick(noon))
        later = noon + timedelta(minutes=3)
        await asyncio.gather(one.tick(later), other.tick(later))
        await asyncio.gather(one.wait_until_idle(), other.wait_until_idle())
        run = "every-minute-20260101T120300Z"
        told = one.book.load_known_schedules()["every-minute"]
        assert (run, "started", 2) == (told.last.run, told.last.status, told.missed)
        assert [run] == [
            row
            for (row,) in await engine.operator.deployment.fetch_rows("select workflow_uuid from dbos.workflow_status")
        ]
        # One that died after it had claimed a time, and before it was submitted.
        died = noon + timedelta(minutes=4)
        assert one.book.claim_time("every-minute", died, run="every-minute-20260101T120430Z")
        assert not other.book.claim_time("every-minute", died, run="every-minute-20260101T120430Z")
        await other.tick(died)
        await other.wait_until_idle()
        assert 2 == len(await engine.operator.deployment.fetch_rows("select workflow_uuid from dbos.workflow_status"))
        assert () == other.book.load_unstarted_claims()
    # The database wakes its runs; an index of sleepers in the folder of whoever looks would be of nobody's journals.
    assert not (await asyncio.to_thread(lambda: list(tmp_path.iterdir())))


@pytest.mark.spec("waiting:WT36")
async def test_missing_schedule_tables_name_the_migrate_command(db: str):
    async with worker_of([RECEIVING], db, works=False) as engine:
        scheduler = DurableScheduler(engine, [Schedule("receiving", cron="* * * * *")])
        with pytest.raises(JournalError, match="stepengine deploy migrate"):
            await scheduler.tick(datetime(2026, 1, 1, 12, 0, 30, tzinfo=UTC))


SCHEDULED = """
from stepengine import AgentDefinition, Schedule


def handle_steps(ctx):
    yield from ()


agent = AgentDefinition("receiving", handle_steps=handle_steps)
schedule = Schedule(agent, cron="* * * * *", id="every-minute", prompt="scheduled")
"""


@pytest.mark.deep
@pytest.mark.spec("waiting:WT30", "waiting:WT36")
async def test_cli_lists_scheduled_runs_and_sends_messages(db: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    schedule = Schedule("receiving", cron="* * * * *", id="every-minute", prompt="scheduled")
    await asyncio.to_thread(Path("agents.py").write_text, SCHEDULED)

    async def typed(*words: str) -> Any:
        shown = await asyncio.to_thread(CliRunner().invoke, app, [*words, "--db", db, "--app", "shop"])
        assert not shown.stderr.strip(), shown.stderr
        return shown

    async with worker_of([RECEIVING], db, app="shop") as engine:
        await migrate(db)
        scheduler = DurableScheduler(engine, [schedule])
        noon = datetime(2026, 1, 1, 12, 0, 30, tzinfo=UTC)
        await scheduler.tick(noon)
        await scheduler.tick(noon + timedelta(minutes=1))
        await scheduler.wait_until_idle()
        run = "every-minute-20260101T120100Z"
        (waits,) = json.loads((await typed("runs", "--schedules", "agents.py", "--json")).stdout)
        assert (run, 0) == (waits["last"]["run"], waits["missed"])
        assert waits["last"]["status"] in ("ENQUEUED", "PENDING")  # a worker has it, or is about to
        posted = await typed("send", run, "--topic", "order", '{"n": 7}', "--id", "one")
        assert (0, "one") == (posted.exit_code, posted.stdout.strip())
        assert [{"n": 7}, None] == (await engine.result(run, waits=True)).output
        (ended,) = json.loads((await typed("runs", "--schedules", "agents.py", "--json")).stdout)
        assert "SUCCESS" == ended["last"]["status"]
    with pytest.raises(AssertionError, match=r"--runs and --db both name .*; pass one of them"):
        await typed("runs", "--schedules", "agents.py", "--runs", "runs")


SECONDS = 8.0


def sleeping_steps(ctx: StepContext):
    before = yield from call(add, 1, 2)
    woke = yield from Sleep(SECONDS)
    after = yield from call(add, before, 1)
    return [after, woke.isoformat()]


SLEEPING = AgentDefinition("sleeping", tools=[add], handle_steps=sleeping_steps)


@pytest.mark.spec("waiting:WT22")
@pytest.mark.speed
async def test_run_does_not_sleep_again_on_another_worker(db: str, until):
    """
    A run goes on, in another worker, when the time of its sleep is over.
    """
    # As long as it sleeps whoever sleeps again would be seen, however busy the machine is.
    async with worker_of([SLEEPING], db) as engine:
        run = await engine.submit("sleeping")
        ((_, wait),) = await until(lambda: engine.operator.run_waits.list_waits([run]))
    await asyncio.sleep(max(0.0, (wait.wakes_at - datetime.now(UTC)).total_seconds()) + 0.2)
    async with worker_of([SLEEPING], db) as engine:
        began = asyncio.get_running_loop().time()
        result = await engine.result(run)
        took = asyncio.get_running_loop().time() - began

    assert 4 == result.output[0]
    assert wait.wakes_at <= datetime.fromisoformat(result.output[1])
    assert took < SECONDS, "it slept again"
