"""
Schedules whose processes are killed: each time is started once, and a run that was cut off is resumed by another process.
"""

from __future__ import annotations

import contextlib
import signal
import sqlite3
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.waits import until

from .scheduled_runs import PLACES, names

PROCESS = """
import asyncio, sys
from datetime import UTC, datetime, timedelta
from stepengine import AgentDefinition, Engine, Schedule, Scheduler

def handle_steps(ctx):
    yield from ()
    return "done"

agent = AgentDefinition("a", handle_steps=handle_steps)
place, step = sys.argv[1], int(sys.argv[2])
begin = datetime(2026, 5, 1, tzinfo=UTC)

async def main():
    async with Engine([agent]) as engine:
        scheduler = Scheduler(engine, [Schedule(agent, cron="*/10 * * * *", id="s", catch_up="all")], runs=place, at_once=3)
        await scheduler.tick(begin)
        print("ready", flush=True)
        for number in range(step, 10_000):
            await scheduler.tick(begin + timedelta(minutes=10 * min(number, 60)))
            print(min(number, 60), flush=True)
        await scheduler.wait_until_idle()

asyncio.run(main())
"""


DYING = """
import asyncio, sys, time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from stepengine import AgentDefinition, Engine, Perform, Schedule, Scheduler
from stepengine.engine.waker import Waker

class Later:
    ahead = timedelta()
    def now(self):
        return datetime.now(UTC) + self.ahead

def did(what):
    with open(sys.argv[1], "a") as log:
        print(what, file=log)

def long():
    if sys.argv[3] == "start":
        did("begins")
        time.sleep(60)

def handle_steps(ctx):
    yield from Perform(did, "first")
    yield from Perform.idempotent(long)
    yield from Perform(did, "last")
    return "s"

agent = AgentDefinition("a", handle_steps=handle_steps)

async def main():
    async with Engine([agent]) as engine:
        if sys.argv[3] == "start":
            scheduler = Scheduler(engine, [Schedule(agent, cron="* * * * *", id="s")], runs=sys.argv[2])
            await scheduler.tick(datetime.now(UTC) - timedelta(minutes=2))
            await scheduler.tick(datetime.now(UTC))
            await scheduler.wait_until_idle()
        async def resume(journal, one):
            return await engine.resume(journal, in_doubt="retry")
        clock = Later()
        for seconds in (0, 61):
            clock.ahead = timedelta(seconds=seconds)
            print(seconds, flush=True)
            await Waker(sys.argv[2], resume, clock=clock, tell=lambda w: print(w.run, w.state, w.result.status.value, w.result.output)).once()

asyncio.run(main())
"""


@PLACES
@pytest.mark.spec("waiting:WT27")
@pytest.mark.deep
def test_scheduled_run_of_a_killed_process_is_resumed(tmp_path: Path, place: str) -> None:
    script, log = tmp_path / "process.py", tmp_path / "log"
    script.write_text(DYING)
    words = [sys.executable, str(script), str(log), str(tmp_path / place)]
    with subprocess.Popen([*words, "start"]) as process:
        until(lambda: log.exists() and "begins" in log.read_text())
        process.send_signal(signal.SIGKILL)
    (run,) = names(tmp_path / place)
    woken = subprocess.run([*words, "resume", "--due"], check=False, capture_output=True, text=True)

    suffix = "" if Path(place).suffix else ".jsonl"
    assert ("", f"0\n61\n{run}{suffix} woken completed s\n") == (woken.stderr, woken.stdout)
    assert ["first", "begins", "last"] == log.read_text().split()
    again = subprocess.run([*words, "resume", "--due"], check=False, capture_output=True, text=True)
    assert "0\n61\n" == again.stdout


@pytest.mark.deep
@PLACES
@pytest.mark.spec("waiting:WT27")
def test_two_schedulers_killed_repeatedly_start_each_time_once(tmp_path: Path, place: str) -> None:
    script = tmp_path / "process.py"
    script.write_text(PROCESS)
    runs, reached = tmp_path / place, 1
    for ticks in (1, 2, 4, 8):
        pair = [
            subprocess.Popen([sys.executable, str(script), str(runs), str(reached)], stdout=subprocess.PIPE, text=True)
            for _ in range(2)
        ]
        for process in pair:
            assert "ready\n" == process.stdout.readline()
        told = [int(pair[0].stdout.readline()) for _ in range(ticks)]
        time.sleep(0.002 * ticks)  # somewhere in the next one
        reached = max(reached, *told)
        for process in pair:
            process.send_signal(signal.SIGKILL)
            reached = max([reached, *[int(line) for line in process.communicate()[0].split()]])
    assert reached > 1

    script.write_text(PROCESS.replace("10_000", "100"))
    ended = subprocess.run([sys.executable, str(script), str(runs), "60"], check=False, capture_output=True, text=True)
    assert (0, "") == (ended.returncode, ended.stderr)
    times = [datetime(2026, 5, 1, tzinfo=UTC) + minutes * timedelta(minutes=10) for minutes in range(1, 61)]
    assert [f"s-{moment:%Y%m%dT%H%M%SZ}" for moment in times] == names(runs)
    with contextlib.closing(sqlite3.connect(runs if runs.suffix else runs / ".schedules.db")) as database:
        found = {status for (status,) in database.execute("SELECT DISTINCT status FROM schedule_times")}
    # The run of a process that was killed was begun, and waits to be resumed.
    assert found <= {"completed", "started"}
