"""
A nightly agent whose processes are killed five times (waiting.md, shows): `python -m tests.e2e.nightly --seeds 10`.

A schedule starts it; it starts three children in the background, of which one waits for a webhook, one sleeps for an hour and
one listens for what nobody sends; then it asks a person. Every leg of the night is a process of its own, which reads what time it is from
a file. It kills itself with SIGKILL at the point that was drawn for it: before or after something is done in the world, a journal is
written, or a suspension, a lease or a schedule's time is noted. The next process goes on a minute and a bit later.
What was done in the world stands in a file outside of the engine.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast

import attrs

from stepengine import (
    STEP,
    AgentCall,
    AgentDefinition,
    Ask,
    Engine,
    Perform,
    Race,
    Receive,
    RunResult,
    RunStatus,
    Schedule,
    Scheduler,
    Sleep,
    Start,
    Wait,
)
from stepengine.data.outcomes import Value
from stepengine.engine.schedule_book import ScheduleBook
from stepengine.engine.waker import Waker
from stepengine.errors import UnknownOutcome
from stepengine.journal import FileJournal, Journal, SqliteJournal, check
from stepengine.journal.files import JournalFile
from stepengine.journal.mailbox import Letter
from stepengine.journal.pending_items import find_waits
from stepengine.journal.sleepers import open_wake_index, wake_for_letter
from stepengine.journal.sqlite import SqliteWriter
from stepengine.journal.wake_index import WakeIndex
from stepengine.testing import ScriptedModel, text
from tests.e2e.kills import process

ROOT = Path(__file__).resolve().parents[2]
STORES = ("file", "sqlite")
KILLS = 5
MOST_TRIES = 10
BEGIN = datetime(2026, 3, 2, 1, 59, tzinfo=UTC)
RUN = "nightly-20260302T020000Z"
REPEATABLE = ("mail", "look")
ONCE = ("build", "count before", "count after", "page")
OUTPUT = "paged: build green, alarms 7"


class FileClock:
    """The date that stands in a file; time passes when somebody writes another one."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def now(self) -> datetime:
        return datetime.fromisoformat(self.path.read_text())

    def now_ms(self) -> int:
        return int(time.monotonic() * 1000)

    async def sleep(self, seconds: float) -> None:
        until = self.now() + timedelta(seconds=seconds)
        while self.now() < until:  # noqa: ASYNC110 - another process writes the file
            await asyncio.sleep(0.005)

    def set(self, when: datetime) -> None:
        new = self.path.with_suffix(".new")
        new.write_text(when.isoformat())
        new.replace(self.path)


class Points:
    """Counts the points of one process, and ends it with SIGKILL at the one that was drawn for it."""

    def __init__(self, log: Path, die_at: int) -> None:
        self._log = log
        self._die_at = die_at
        self._passed = 0

    def reach(self, what: str) -> None:
        self._passed += 1
        dies = self._passed == self._die_at
        _append(self._log, f"{os.getpid()} {what}{' KILLED' if dies else ''}")
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)

    def around(self, of: type, name: str) -> None:
        """Make a point before and after each call of a method, in this process alone."""
        inner: Callable[..., Any] = getattr(of, name)

        def call(*args: Any, **named: Any) -> Any:
            self.reach(f"before {of.__name__}.{name}")
            done = inner(*args, **named)
            self.reach(f"after {of.__name__}.{name}")
            return done

        setattr(of, name, call)


def _append(path: Path, line: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, f"{line}\n".encode())
    finally:
        os.close(descriptor)


@attrs.frozen
class Night:
    """
    One night: where it is recorded, and what happens outside.
    """

    folder: Path
    store: str

    @property
    def place(self) -> Path:
        return self.folder / "runs.db" if self.store == "sqlite" else self.folder / "runs"

    @property
    def journal(self) -> Journal:
        if self.store == "sqlite":
            return SqliteJournal(self.place, RUN)
        return FileJournal(self.place / f"{RUN}.jsonl")

    @property
    def clock(self) -> FileClock:
        return FileClock(self.folder / "clock")

    @property
    def points(self) -> list[str]:
        path = self.folder / "points.log"
        return path.read_text().splitlines() if path.exists() else []

    def done(self) -> Counter[str]:
        """Return how often each deed was done."""
        path = self.folder / "world.log"
        return Counter(path.read_text().splitlines() if path.exists() else [])

    def schedule(self, points: Points) -> tuple[Schedule, AgentDefinition[Any], ScriptedModel]:
        """Return the agents and their model; what must not be done twice asks the world when nobody knows."""

        def deed(name: str) -> str:
            points.reach(f"before {name}")
            _append(self.folder / "world.log", name)
            points.reach(f"after {name}")
            return name

        def look(name: str) -> bool:
            deed("look")
            return name in self.done()

        def once(name: str) -> Any:
            while True:
                try:
                    return (yield from Perform(deed, name))
                except UnknownOutcome:
                    if (yield from Perform.idempotent(look, name)):
                        return name

        def reply(_: Any) -> Any:
            deed("mail")
            return text("one customer cannot log in")

        def build_steps(ctx: Any) -> Any:
            yield from once("build")
            said = yield from Receive("build-17", timeout=timedelta(hours=4))
            return f"build {cast('Any', said)['status']}"

        def alarm_steps(ctx: Any) -> Any:
            yield from once("count before")
            yield from Sleep(timedelta(hours=1))
            yield from once("count after")
            return "alarms 7"

        def mail_steps(ctx: Any) -> Any:
            yield STEP
            yield from Receive("more-mail")  # nobody sends it, so that it is at work when its parent returns

        def triage_steps(ctx: Any) -> Any:
            refs = yield from Start(*[AgentCall(agent, "Tonight.") for agent in (build, alarms, mail)])
            waited = yield from Wait(*refs, need=2, timeout=timedelta(hours=5))
            assert [ref.agent_id for ref in waited.open] == ["mail"], waited
            ask = Ask("Page the team?", options=("yes", "no"))
            first, answer = yield from Race(ask, Sleep(timedelta(hours=4)))
            assert (first, answer) == (0, "yes"), (first, answer)
            yield from once("page")
            return f"paged: {', '.join(child.output for child in waited.done)}"

        mail = AgentDefinition("mail", model="test/m", handle_steps=mail_steps)
        build = AgentDefinition("build", handle_steps=build_steps)
        alarms = AgentDefinition("alarms", handle_steps=alarm_steps)
        triage = AgentDefinition("triage", handle_steps=triage_steps, spawnable_agents=[mail, build, alarms])
        return Schedule(triage, cron="0 2 * * *", id="nightly"), triage, ScriptedModel([reply])

    def work(self, die_at: int = 0) -> None:
        """Start what the schedule says and go on with what is due, as `stepengine resume --due` does; this is what a process does."""
        points = Points(self.folder / "points.log", die_at)
        for of, name in (
            (JournalFile, "append"), (SqliteWriter, "_insert_rows"), (WakeIndex, "note"), (WakeIndex, "forget"), (WakeIndex, "put_off"), (ScheduleBook, "claim"),
        ):  # fmt: skip
            points.around(of, name)
        asyncio.run(self._work(points))

    async def _work(self, points: Points) -> None:
        schedule, agent, model = self.schedule(points)
        options: Any = {"models": model, "clock": self.clock, "pricing": None, "sleep_in_process": 0}
        results: list[RunResult] = []
        async with Engine([agent], **options) as engine:

            async def resume(journal: Journal, _: object) -> RunResult:
                return await engine.resume(journal)

            def tell(woken: Any) -> None:
                assert woken.error is None, woken
                results.append(woken.result)

            scheduler = Scheduler(engine, [schedule], runs=self.place, clock=self.clock)
            begun = await scheduler.tick()
            await scheduler.finished()
            results += [await one.handle.result() for one in begun]
            await Waker(self.place, resume, tell=tell, clock=self.clock).once()
            if self.is_left_behind():
                results.append(await engine.resume(self.journal))
            for result in results:
                assert result.status in (RunStatus.SUSPENDED, RunStatus.COMPLETED), result.error
            if results and results[-1].status is RunStatus.COMPLETED:
                assert await engine.replay(self.journal) == results[-1]

    async def replayed(self) -> RunResult:
        """Return what the record says, by nothing but the record."""
        _, agent, _ = self.schedule(Points(self.folder / "points.log", 0))
        async with Engine([agent], models=ScriptedModel([]), clock=self.clock, pricing=None) as engine:
            return await engine.replay(self.journal)

    def is_left_behind(self) -> bool:
        """Return whether no waker knows the run, since it was killed before it was suspended for the first time."""
        if not self.journal.is_there() or self.journal.history().is_complete:
            return False
        with open_wake_index(self.place) as index:
            return not index.all()

    def post(self) -> None:
        """Call the webhook twice, each in a process of its own."""
        name = f"{self.place}#{RUN}" if self.store == "sqlite" else str(self.place / f"{RUN}.jsonl")
        for _ in range(2):
            subprocess.run(
                [sys.executable, "-m", "stepengine.cli", "send", name, "--topic", "build-17", '{"status": "green"}', "--id", "hook-1", "--path", "0"],
                cwd=ROOT, check=True, capture_output=True, timeout=60,
            )  # fmt: skip

    def answer(self) -> None:
        """Say yes, once, to what the run asks."""
        (question,) = [one.question for one in find_waits(self.journal.history()) if one.kind == "question"]
        assert question is not None
        self.journal.mailbox().post(Letter(kind="answer", topic=question.id, value="yes", id="yes"))
        wake_for_letter(self.journal)


@attrs.define
class Tally:
    """
    What happened in some nights.
    """

    nights: int = 0
    kills: Counter[str] = attrs.field(factory=Counter)
    repeated: Counter[str] = attrs.field(factory=Counter)

    def __str__(self) -> str:
        where = ", ".join(f"{count} {what}" for what, count in sorted(self.kills.items()))
        return (
            f"{self.nights} nights, {self.kills.total()} processes killed ({where}); effects that must not be repeated "
            f"happened once each; repeatable ones done again: {dict(self.repeated)}"
        )


def begun(folder: Path, store: str) -> Night:
    """Return a night before its schedule has come for the first time."""
    night = Night(folder, store)
    folder.mkdir()
    if store == "file":
        night.place.mkdir()
    night.clock.set(BEGIN)
    return night


def spent(
    night: Night, kills: Sequence[int] = (0, 0, 0, 0), die_at: Callable[[int, int], int] = lambda _, __: 0
) -> list[int]:
    """
    Let a night pass, and return how many points each of its four legs had.

    Args:
        night: The night.
        kills: How many processes of each leg kill themselves.
        die_at: Gives the point at which the next one does, by leg and by how many points those before it have passed.
    """
    legs: tuple[tuple[timedelta, Callable[[], None]], ...] = (
        (timedelta(minutes=1), lambda: None),
        (timedelta(minutes=20), night.post),
        (timedelta(hours=1, minutes=10), lambda: None),
        (timedelta(hours=1, minutes=30), night.answer),
    )
    process(night.work)  # from here on the schedule counts
    lengths: list[int] = []
    for leg, (after, prepare) in enumerate(legs):
        night.clock.set(BEGIN + after)
        prepare()
        before, left = len(night.points), kills[leg]
        while process(partial(night.work, die_at(leg, len(night.points) - before) if left else 0)):
            left -= 1
            night.clock.set(night.clock.now() + timedelta(seconds=61))
        lengths.append(len(night.points) - before)
    return lengths


def check_night(night: Night, tally: Tally) -> None:
    """Check that everything happened once, that nobody is left, and that the record holds."""
    done = night.done()
    assert {name: done[name] for name in ONCE} == dict.fromkeys(ONCE, 1), done
    assert done["mail"] >= 1
    assert not {*done} - {*ONCE, *REPEATABLE}, done
    tally.repeated.update({name: count for name in REPEATABLE if (count := done[name] - (name == "mail"))})
    history = night.journal.history()
    report = check(night.journal)
    assert report, report.problems
    assert report.is_complete
    ends = {
        path: cast("Value", history.outcome(result)).value.status
        for (path, seq), result in history.results.items()
        if path and seq == -1
    }
    assert ends == {"0": RunStatus.COMPLETED, "1": RunStatus.COMPLETED, "2": RunStatus.CANCELLED}, ends
    with open_wake_index(night.place) as index:
        assert index.all() == []
    replayed = asyncio.run(night.replayed())
    assert (replayed.status, replayed.output) == (RunStatus.COMPLETED, OUTPUT)
    assert night.done() == done, "a replay did something"


def killed(folder: Path, store: str, seed: int, tally: Tally) -> None:
    """Kill five processes of one night, and check everything; one that ended before its fifth kill is checked, and does not count."""
    dice = random.Random(f"{seed}:{store}")
    lengths = spent(begun(folder / f"{store}-{seed}-undisturbed", store))

    def die_at(leg: int, passed: int) -> int:
        return dice.randint(1, max(1, lengths[leg] - passed))

    for number in range(MOST_TRIES):
        kills = Counter(dice.choices(range(len(lengths)), lengths, k=KILLS))
        night = begun(folder / f"{store}-{seed}-{number}", store)
        spent(night, [kills[leg] for leg in range(len(lengths))], die_at)
        check_night(night, tally)
        found = [point.partition(" ")[2].removesuffix(" KILLED") for point in night.points if point.endswith("KILLED")]
        if len(found) == KILLS:
            tally.nights += 1
            tally.kills.update(found)
            return
    msg = f"none of {MOST_TRIES} nights had {KILLS} kills"
    raise AssertionError(msg)


def nights(store: str, seeds: range) -> Tally:
    """Spend a night for each seed; failures name theirs."""
    tally = Tally()
    with tempfile.TemporaryDirectory() as folder:
        for seed in seeds:
            try:
                killed(Path(folder), store, seed, tally)
            except Exception as error:
                error.add_note(f"night of seed {seed} in {store}")
                raise
    return tally


def main() -> None:
    """
    Read the command line, spend the nights, and print what came out.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.nightly", description=__doc__)
    parser.add_argument("--seeds", type=int, default=10, help="nights for each store (10)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (0)")
    parser.add_argument("--store", choices=[*STORES, "both"], default="both")
    given = parser.parse_args()
    for store in STORES if given.store == "both" else [given.store]:
        print(f"{store}: {nights(store, range(given.first, given.first + given.seeds))}", flush=True)


if __name__ == "__main__":
    main()
