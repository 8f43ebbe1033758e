"""
Each time of a schedule is started once: by whichever process, over clocks that jump, weeks off, and deaths.
"""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from stepengine import AgentDefinition, Ask, Engine, HookContext, Hooks, InputSchema, Perform, Schedule, Scheduler
from stepengine.engine.schedule_book import ScheduleBook
from stepengine.engine.scheduler import load_schedule_statuses
from stepengine.errors import AgentError, DefinitionError, JournalError
from stepengine.journal import FileJournal
from stepengine.journal.sleepers import open_wake_index
from tests.engine.clocks import NotingClock
from tests.phrases import NOT_A_DATABASE
from tests.waits import until_async

from .scheduled_runs import PLACES, names

HOUR = timedelta(hours=1)


def handle_steps(ctx):
    yield from ()
    return ctx.prompt


agent = AgentDefinition("nightly", handle_steps=handle_steps)


def at(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


async def ticked(scheduler: Scheduler, now: datetime) -> list[str]:
    """Start what is due, wait for its end, and return its names."""
    started = [one.due.run for one in await scheduler.tick(now)]
    await scheduler.wait_until_idle()
    return started


# --- once per time ----------------------------------------------------------------------------------------------------


@pytest.mark.spec("waiting:WT27")
async def test_clock_set_back_starts_nothing_twice(tmp_path: Path) -> None:
    schedule = Schedule(agent, cron="0 * * * *", id="hourly", catch_up="all")
    begin = at("2026-05-01T00:30")
    async with Engine([agent]) as engine:
        scheduler = Scheduler(engine, [schedule], runs=tmp_path / "runs")
        await ticked(scheduler, begin)
        first = await ticked(scheduler, begin + 3 * HOUR)
        again = [name for hours in range(-2, 4) for name in await ticked(scheduler, begin + hours * HOUR)]
        later = await ticked(scheduler, begin + 4 * HOUR)

    assert [f"hourly-20260501T0{hour}0000Z" for hour in (1, 2, 3)] == first
    assert not set(first) & set(again)
    assert ["hourly-20260501T040000Z"] == later


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("waiting:WT27")
async def test_clock_once_far_ahead_blocks_no_schedule(tmp_path: Path) -> None:
    schedule = Schedule(agent, cron="0 7 * * *", id="daily")
    async with Engine([agent]) as engine:
        scheduler = Scheduler(engine, [schedule], runs=tmp_path)
        await ticked(scheduler, at("2026-05-01T00:00"))
        assert ["daily-20990601T070000Z"] == await ticked(scheduler, at("2099-06-01T08:00"))
        assert [] == await ticked(scheduler, at("2026-05-01T00:01"))

        assert ["daily-20260501T070000Z"] == await ticked(scheduler, at("2026-05-01T07:00"))


@PLACES
@pytest.mark.spec("waiting:WT27")
async def test_claim_of_a_process_dead_before_journaling_is_taken_over(tmp_path: Path, place: str) -> None:
    schedule = Schedule(agent, cron="0 7 * * *", id="daily")
    book = ScheduleBook(tmp_path / place)
    book.register_and_get_decided_times({"daily": "0 7 * * * UTC"}, at("2026-05-01T00:00"))
    assert book.claim_time("daily", at("2026-05-01T07:00"), run="daily-20260501T070000Z")

    async with Engine([agent]) as engine:
        scheduler = Scheduler(engine, [schedule], runs=tmp_path / place)
        found = [await ticked(scheduler, at("2026-05-01T07:01") + minutes * HOUR / 60) for minutes in range(3)]

    assert [["daily-20260501T070000Z"], [], []] == found
    assert ["daily-20260501T070000Z"] == names(tmp_path / place)
    assert (
        "completed"
        == load_schedule_statuses([schedule], runs=tmp_path / place, now=at("2026-05-02T00:00"))[0].last.status
    )


async def test_claim_of_a_process_dead_after_journaling_is_left_alone(
    tmp_path: Path,
) -> None:
    schedule = Schedule(agent, cron="0 7 * * *", id="daily")
    async with Engine([agent]) as engine:
        scheduler = Scheduler(engine, [schedule], runs=tmp_path)
        await ticked(scheduler, at("2026-05-01T00:00"))
        await ticked(scheduler, at("2026-05-01T07:00"))
        file = tmp_path / "daily-20260501T070000Z.jsonl"
        lines = file.read_bytes().splitlines(keepends=True)
        file.write_bytes(lines[0] + lines[1])
        scheduler.book.set_run_status("daily", at("2026-05-01T07:00"), "claimed")

        assert [] == await ticked(scheduler, at("2026-05-01T07:01"))
        assert () == scheduler.book.load_unstarted_claims()
        assert (
            "interrupted"
            == load_schedule_statuses([schedule], runs=tmp_path, now=at("2026-05-01T08:00"))[0].last.status
        )


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("waiting:WT27")
async def test_one_of_two_schedulers_of_one_place_starts_a_time(tmp_path: Path) -> None:
    schedules = [Schedule(agent, cron="*/5 * * * *", id=f"s{n}", catch_up="all") for n in range(2)]
    async with Engine([agent]) as one, Engine([agent]) as other:
        both = [Scheduler(engine, schedules, runs=tmp_path / "runs.db", at_once=50) for engine in (one, other)]
        await asyncio.gather(*[scheduler.tick(at("2026-05-01T00:00")) for scheduler in both])
        started: list[str] = []
        for minutes in (30, 30, 31):
            found = await asyncio.gather(*[s.tick(at("2026-05-01T00:00") + minutes * HOUR / 60) for s in both])
            started += [one.due.run for each in found for one in each]
            for scheduler in both:
                await scheduler.wait_until_idle()

    assert 12 == len(started) == len(set(started)) == len(names(tmp_path / "runs.db"))
    stand = load_schedule_statuses(schedules, runs=tmp_path / "runs.db", now=at("2026-05-01T01:00"))
    assert ["completed"] * 2 == [one.last.status for one in stand]


def test_slow_scheduler_does_not_start_a_time_reported_as_missed(tmp_path: Path) -> None:
    book = ScheduleBook(tmp_path)
    book.register_and_get_decided_times({"s": "x"}, at("2026-05-01T00:00"))
    times = [at("2026-05-01T00:01"), at("2026-05-01T00:02")]

    assert book.claim_time("s", times[1], run="s-2", missed=(times[0],))
    assert not book.claim_time("s", times[0], run="s-1")
    assert not book.claim_time("s", times[1], run="s-2")


@PLACES
@pytest.mark.spec("waiting:WT27")
async def test_scheduled_run_is_due_for_another_process_until_it_ends(tmp_path: Path, place: str) -> None:
    begun, gate = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        begun.set()
        await gate.wait()

    def busy_steps(ctx):
        yield from Perform.idempotent(work)

    busy = AgentDefinition("busy", handle_steps=busy_steps)
    async with Engine([busy]) as engine:
        scheduler = Scheduler(engine, [Schedule(busy, cron="0 7 * * *", id="daily")], runs=tmp_path / place)
        await scheduler.tick(at("2026-05-01T00:00"))
        await scheduler.tick(at("2026-05-01T07:00"))
        await begun.wait()
        now = datetime.now(UTC)
        with open_wake_index(tmp_path / place) as index:
            soon, later = index.list_due(now), index.list_due(now + timedelta(seconds=61))
        gate.set()
        await scheduler.wait_until_idle()
    with open_wake_index(tmp_path / place) as index:
        ended = index.list_all()

    assert ([], ["daily-20260501T070000Z"], []) == (soon, [Path(one.run).stem for one in later], ended)


# --- what was missed --------------------------------------------------------------------------------------------------


@pytest.mark.spec("waiting:WT28")
@pytest.mark.parametrize(
    ("catch_up", "started", "missed"),
    [("one", 1, 2), ("all", 3, 0), ("none", 0, 3)],
)
async def test_catch_up_starts_newest_each_or_none_and_reports_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, catch_up: Any, started: int, missed: int
) -> None:
    schedule = Schedule(agent, cron="0 7 * * *", id="daily", catch_up=catch_up)
    caplog.set_level(logging.WARNING, logger="stepengine")
    async with Engine([agent]) as engine:
        scheduler = Scheduler(engine, [schedule], runs=tmp_path)
        await ticked(scheduler, at("2026-05-01T08:00"))
        found = [one for _ in range(3) for one in await ticked(scheduler, at("2026-05-04T12:00"))]
        on_time = await ticked(scheduler, at("2026-05-05T07:00"))

    assert started == len(found) == len(set(found))
    assert found == sorted(found)
    assert not found or found[-1] == "daily-20260504T070000Z"
    assert ["daily-20260505T070000Z"] == on_time
    stand = load_schedule_statuses([schedule], runs=tmp_path, now=at("2026-05-05T08:00"))[0]
    assert missed == stand.missed
    told = [record.getMessage() for record in caplog.records]
    newest = {2: "2026-05-03T07:00:00", 3: "2026-05-04T07:00:00"}.get(missed, "")
    assert ([f"schedule 'daily' missed {missed} time(s), 2026-05-02T07:00:00+00:00 to {newest}+00:00: no scheduler was running"]
            if missed else []) == told  # fmt: skip
    assert at("2026-05-06T07:00") == stand.next


@pytest.mark.spec("waiting:WT28")
async def test_catch_up_after_years_is_capped_at_a_thousand(tmp_path: Path) -> None:
    schedule = Schedule(agent, cron="* * * * *", id="minutely", catch_up="all")
    async with Engine([agent]) as engine:
        scheduler = Scheduler(engine, [schedule], runs=tmp_path)
        scheduler.collect_due_and_skip_missed(at("2020-01-01T00:00"))
        due = scheduler.collect_due_and_skip_missed(at("2026-01-01T00:00"))

    assert (1_000, at("2026-01-01T00:00")) == (len(due), due[-1].at)


@pytest.mark.spec("waiting:WT28")
async def test_schedule_counts_from_first_look_changed_line_or_enabling(tmp_path: Path) -> None:
    def daily(hour: int, *, enabled: bool = True) -> Schedule:
        return Schedule(agent, cron=f"0 {hour} * * *", id="daily", enabled=enabled, catch_up="all")

    async with Engine([agent]) as engine:
        scheduler = Scheduler(engine, [daily(7)], runs=tmp_path)
        assert [] == await ticked(scheduler, at("2026-05-01T12:00"))
        assert ["daily-20260502T070000Z"] == await ticked(scheduler, at("2026-05-02T12:00"))
        scheduler.replace([daily(8)])
        assert [] == await ticked(scheduler, at("2026-05-02T12:01"))
        assert ["daily-20260503T080000Z"] == await ticked(scheduler, at("2026-05-03T12:00"))
        scheduler.replace([daily(8, enabled=False)])
        assert [] == await ticked(scheduler, at("2026-05-09T12:00"))
        assert None is load_schedule_statuses(scheduler.schedules, runs=tmp_path, now=at("2026-05-09T12:00"))[0].next
        scheduler.replace([daily(8)])
        assert [] == await ticked(scheduler, at("2026-05-09T12:01"))
        scheduler.replace([])
        assert [] == await ticked(scheduler, at("2026-05-12T12:00"))


@pytest.mark.spec("waiting:WT28")
async def test_concurrent_scheduled_runs_are_limited_and_others_follow(tmp_path: Path) -> None:
    under_way, most = 0, 0
    gate = asyncio.Event()

    async def wait(ctx: HookContext) -> None:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await gate.wait()
        under_way -= 1

    def slow(ctx):
        yield Perform(lambda: wait(ctx))

    busy = AgentDefinition("busy", handle_steps=slow)
    async with Engine([busy]) as engine:
        schedules = [Schedule(busy, cron="0 7 * * *", id=f"s{n}") for n in range(5)]
        scheduler = Scheduler(engine, schedules, runs=tmp_path, at_once=2)
        await scheduler.tick(at("2026-05-01T00:00"))
        first = await scheduler.tick(at("2026-05-01T07:00"))
        assert [] == await scheduler.tick(at("2026-05-01T07:00"))
        gate.set()
        await scheduler.wait_until_idle()
        rest = [await scheduler.tick(at("2026-05-01T07:01")) for _ in range(3) if not await scheduler.wait_until_idle()]
        await scheduler.wait_until_idle()

    assert (2, 3) == (len(first), sum(map(len, rest)))
    assert 2 >= most


# --- the runs ---------------------------------------------------------------------------------------------------------


@pytest.mark.spec("waiting:WT29")
async def test_scheduled_run_knows_its_schedule_local_time_and_missed_times(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []
    hooked = AgentDefinition(
        "hooked",
        handle_steps=handle_steps,
        hooks=Hooks(pre_run=[lambda ctx: seen.append(dict(ctx.metadata))]),
        input_schema=InputSchema(params={"type": "object", "properties": {"n": {"type": "integer"}}}),
    )
    schedule = Schedule("hooked", cron="0 7 * * *", timezone="Europe/Berlin", prompt="Go", params={"n": 1}, id="daily")
    async with Engine([hooked]) as engine:
        scheduler = Scheduler(engine, [schedule], runs=tmp_path)
        await scheduler.tick(at("2026-03-27T12:00"))
        started = await scheduler.tick(at("2026-03-29T12:00"))
        result = await started[0].handle.result()
        await scheduler.wait_until_idle()

    assert [{"schedule": "daily", "scheduled_for": "2026-03-29T07:00:00+02:00", "missed": 1}] == seen
    assert "Go" == result.output
    root = FileJournal(tmp_path / "daily-20260329T050000Z.jsonl").history().root
    assert ("hooked", "Go", {"n": 1}) == (root["agent_id"], root["prompt"], root["params"])
    assert 0o600 == (tmp_path / ".schedules.db").stat().st_mode & 0o777


@pytest.mark.spec("waiting:WT29")
async def test_unstartable_schedule_is_reported_and_blocks_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    strict = AgentDefinition(
        "strict",
        handle_steps=handle_steps,
        input_schema=InputSchema(params={"type": "object", "required": ["n"], "properties": {"n": {"type": "integer"}}}),
    )  # fmt: skip
    keyless = AgentDefinition("keyless", model="anthropic/claude-sonnet-4-5")

    def broken(ctx):
        yield from ()
        msg = "no such order"
        raise ValueError(msg)

    failing = AgentDefinition("failing", handle_steps=broken)
    schedules = [
        Schedule(one, cron="0 7 * * *", id=one.id) for one in (strict, keyless, failing, agent)
    ]  # fmt: skip
    async with Engine([strict, keyless, failing, agent]) as engine:
        scheduler = Scheduler(engine, schedules, runs=tmp_path)
        await ticked(scheduler, at("2026-05-01T00:00"))
        await ticked(scheduler, at("2026-05-01T07:00"))
        assert [] == await ticked(scheduler, at("2026-05-01T07:01"))

    stand = {
        one.schedule.id: one.last
        for one in load_schedule_statuses(schedules, runs=tmp_path, now=at("2026-05-01T08:00"))
    }
    assert {"strict": "failed", "keyless": "failed", "failing": "failed", "nightly": "completed"} == {
        id_: last.status for id_, last in stand.items()
    }
    assert "no such order" in stand["failing"].error
    for id_ in ("strict", "keyless", "failing"):
        assert [True] == [True for r in caplog.records if f"{id_!r}" in r.getMessage() and r.levelname == "ERROR"]


@pytest.mark.spec("waiting:WT29")
async def test_scheduled_run_that_loses_its_journal_is_reported_as_failed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def losing(ctx):
        yield Perform(lambda: next(tmp_path.glob("*.jsonl")).unlink())
        yield Perform(int)

    careless = AgentDefinition("careless", handle_steps=losing)
    schedules = [Schedule(careless, cron="0 7 * * *", id="daily")]
    async with Engine([careless]) as engine:
        scheduler = Scheduler(engine, schedules, runs=tmp_path)
        await ticked(scheduler, at("2026-05-01T00:00"))
        await ticked(scheduler, at("2026-05-01T07:00"))
    (status,) = load_schedule_statuses(schedules, runs=tmp_path, now=at("2026-05-01T08:00"))

    assert "failed" == status.last.status
    assert "the file was moved, deleted or replaced during the run" in status.last.error
    assert [record.levelname for record in caplog.records if "'daily'" in record.getMessage()] == ["ERROR"]


@pytest.mark.spec("waiting:WT29")
async def test_started_run_counts_until_its_end_though_tell_raises(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gate = asyncio.Event()

    def slow(ctx):
        yield Perform(gate.wait)
        return ctx.prompt

    async def tell(run: str, agent_id: str, handle: object) -> None:
        raise OSError("no room for that row")

    busy = AgentDefinition("busy", handle_steps=slow)
    schedules = [Schedule(busy, cron="0 7 * * *", id=id_, prompt="Go") for id_ in ("a", "b")]
    async with Engine([busy]) as engine:
        scheduler = Scheduler(engine, schedules, runs=tmp_path, at_once=1, tell=tell)
        await scheduler.tick(at("2026-05-01T00:00"))
        (first,) = await scheduler.tick(at("2026-05-01T07:00"))
        at_once = await scheduler.tick(at("2026-05-01T07:00"))
        gate.set()
        await scheduler.wait_until_idle()
        before = load_schedule_statuses(schedules, runs=tmp_path, now=at("2026-05-01T08:00"))
        await ticked(scheduler, at("2026-05-01T07:01"))

    assert "Go" == (await first.handle.result()).output
    assert ([], ["completed"]) == (at_once, [one.last.status for one in before if one.last])
    told = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert [f"the run {id_}-20260501T070000Z of schedule {id_!r} was started and continues" for id_ in ("a", "b")] == [
        line.partition(",")[0] for line in told
    ]


async def test_asking_scheduled_run_is_suspended_with_status_in_its_journal(tmp_path: Path) -> None:
    def asking(ctx):
        return (yield Ask("Go on?", key="go"))

    one = AgentDefinition("asking", handle_steps=asking)
    schedule = Schedule(one, cron="0 7 * * *", id="daily")
    async with Engine([one]) as engine:
        scheduler = Scheduler(engine, [schedule], runs=tmp_path)
        await ticked(scheduler, at("2026-05-01T00:00"))
        await ticked(scheduler, at("2026-05-01T07:00"))
        before = load_schedule_statuses([schedule], runs=tmp_path, now=at("2026-05-01T08:00"))[0].last.status
        result = await engine.resume(tmp_path / "daily-20260501T070000Z.jsonl", answers={"Go on?": "yes"})
        after = load_schedule_statuses([schedule], runs=tmp_path, now=at("2026-05-01T08:00"))[0].last.status

    assert ("suspended", "completed", "completed") == (before, result.status.value, after)


@pytest.mark.spec("waiting:WT29")
@PLACES
async def test_unusable_schedule_database_is_reported_and_retried(tmp_path: Path, place: str) -> None:
    book = tmp_path / "runs.db" if place == "runs.db" else tmp_path / "runs" / ".schedules.db"
    book.parent.mkdir(exist_ok=True)
    book.write_bytes(b"this is not a database, whatever it is called; " * 100)
    async with Engine([agent]) as engine:
        scheduler = Scheduler(engine, [Schedule(agent, cron="0 7 * * *", id="daily")], runs=tmp_path / place)
        with pytest.raises(JournalError, match=f"cannot store schedules: it is {NOT_A_DATABASE}"):
            await scheduler.tick(at("2026-05-01T00:00"))
        book.unlink()
        await ticked(scheduler, at("2026-05-01T00:00"))

        assert ["daily-20260501T070000Z"] == await ticked(scheduler, at("2026-05-01T07:00"))


def test_a_look_makes_nothing(tmp_path: Path) -> None:
    schedule = Schedule(agent, cron="0 7 * * *", id="daily")
    for place in (tmp_path / "runs", tmp_path / "runs.db"):
        stand = load_schedule_statuses([schedule], runs=place, now=at("2026-05-01T08:00"))[0]

        assert (at("2026-05-02T07:00"), None, 0) == (stand.next, stand.last, stand.missed)
    assert [] == list(tmp_path.iterdir())


def test_the_newest_thousand_times_are_remembered(tmp_path: Path) -> None:
    book = ScheduleBook(tmp_path)
    begin = at("2026-05-01T00:00")
    book.register_and_get_decided_times({"s": "x"}, begin)
    with book._write_transaction() as database:
        rows = [("s", int((begin + n * HOUR).timestamp()), f"s-{n}", 0, "completed") for n in range(1, 1_500)]
        database.executemany(
            "INSERT INTO schedule_times (schedule, at, run, missed, status) VALUES (?, ?, ?, ?, ?)", rows
        )
    book.claim_time("s", begin + 1_500 * HOUR, run="s-1500")
    with book._read_transaction() as database:
        kept = database.execute("SELECT count(*), min(run) FROM schedule_times").fetchone()

    assert 1_001 == kept[0]


# --- what is refused --------------------------------------------------------------------------------------------------


def test_ids_are_unique_and_agents_known_before_anything_comes(tmp_path: Path) -> None:
    daily = Schedule(agent, cron="0 7 * * *", id="daily")
    with Engine([agent]) as engine:
        with pytest.raises(DefinitionError, match="two schedules have the id 'daily'"):
            Scheduler(engine, [daily, Schedule(agent, cron="0 8 * * *", id="daily")], runs=tmp_path)
        with pytest.raises(AgentError, match="nobody"):
            Scheduler(engine, [Schedule("nobody", cron="0 7 * * *")], runs=tmp_path)
        with pytest.raises(DefinitionError, match="at_once"):
            Scheduler(engine, [daily], runs=tmp_path, at_once=0)
        with pytest.raises(DefinitionError, match="Schedule objects, not 'daily'"):
            Scheduler(engine, ["daily"], runs=tmp_path)


# --- the loop ---------------------------------------------------------------------------------------------------------


@pytest.mark.spec("waiting:WT27")
async def test_background_scheduler_waits_for_times_and_notices_changes(tmp_path: Path) -> None:
    clock = NotingClock(at("2026-05-01T06:59:30"), waits=True)
    async with Engine([agent]) as engine:
        scheduler = Scheduler(engine, [Schedule(agent, cron="0 7 * * *", id="daily")], runs=tmp_path, clock=clock)
        async with scheduler:
            await clock.wait_for_sleepers()
            assert 30.0 == clock.sleeps[0]
            clock.advance(seconds=30)
            await until_async(lambda: names(tmp_path))
            await scheduler.wait_until_idle()
            scheduler.replace([*scheduler.schedules, Schedule(agent, cron="* * * * *", id="minutely")])
            # Who begins to sleep when the clock was set already, for as long as it meant to before, sleeps too long.
            await until_async(lambda: "minutely" in scheduler.book.load_known_schedules() and clock.sleepers)
            clock.advance(minutes=1)
            await until_async(lambda: len(names(tmp_path)) == 2)
            await scheduler.wait_until_idle()

    assert ["daily-20260501T070000Z", "minutely-20260501T070100Z"] == names(tmp_path)
    assert 60.0 >= max(clock.sleeps)


async def test_any_failed_look_is_followed_by_the_next_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = NotingClock(at("2026-05-01T06:59"), waits=True)
    async with Engine([agent]) as engine:
        scheduler = Scheduler(engine, [Schedule(agent, cron="0 7 * * *", id="daily")], runs=tmp_path, clock=clock)
        monkeypatch.setattr(scheduler.book, "register_and_get_decided_times", lambda *_: 1 / 0)
        async with scheduler:
            await until_async(
                lambda: "the scheduler failed to check its schedules; it retries within a minute" in caplog.text
            )
            monkeypatch.undo()
            scheduler.replace(scheduler.schedules)
            await until_async(lambda: "daily" in scheduler.book.load_known_schedules() and clock.sleepers)
            clock.advance(minutes=1)
            await until_async(lambda: names(tmp_path))
            await scheduler.wait_until_idle()

    assert ["daily-20260501T070000Z"] == names(tmp_path)
