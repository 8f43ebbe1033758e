"""
What a durable run costs: ``python -m benchmarks.durable [--db URL] [--steps N] [--runs N] [--repeat N] [--json FILE]``.

Per effect: wall time, CPU of the worker and of the database, bytes and write-ahead log, beside a bare loop of DBOS steps on the
same database and beside the SQLite journal of one process; growth with the length of a run; what going on with a recorded run
costs; what an idle worker costs; runs per second with one worker and with two. Without ``--db`` a private PostgreSQL is started,
and only then the database's CPU is known. The fastest of ``--repeat`` rounds counts, since others may use the machine; how busy it
was is printed. Ratios of one run hold, absolute times drift. Timings never decide a unit test.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from benchmarks.judging import Verdict
from benchmarks.sheet import Spread
from stepengine import AgentDefinition, Ask, Engine, Limits, Perform, StepContext
from stepengine.durable import DurableEngine, Operator, embedded
from stepengine.journal import SqliteJournal
from stepengine.testing import ScriptedModel

Figures = dict[str, dict[str, float]]
SHORT = 100
SMALL, LARGE = 100, 1_000
"""Bytes of an effect's result."""
ONE, TWO = "1 worker, runs of 10 steps", "2 workers, runs of 10 steps"


async def quick_effect(number: int, size: int) -> dict[str, Any]:
    """Do next to nothing, on the event loop."""
    # No two alike, as the database packs what repeats.
    return {"number": number, "payload": os.urandom(size // 2).hex()}


def steps(ctx: StepContext) -> Any:
    """Perform as many effects of such a size as the prompt says."""
    count, size = map(int, ctx.prompt.split())
    for number in range(count):
        yield from Perform.idempotent(quick_effect, number, size)
    return "done"


def asking(ctx: StepContext) -> Any:
    """Do the same, then wait for an answer."""
    yield from steps(ctx)
    answer = yield from Ask("Go on?")
    return answer


AGENT = AgentDefinition("bench", handle_steps=steps, limits=Limits(max_actions=10**6))
ASKING = AgentDefinition("bench-asking", handle_steps=asking, limits=Limits(max_actions=10**6))


def engine(db: str, executor: str | None = None, *, polling: float = 0.05) -> DurableEngine:
    """Return a worker; by default one that nobody was before, since the lock of one that ended is free a moment later."""
    name = executor or f"bench-{uuid.uuid4().hex[:8]}"
    return DurableEngine([AGENT, ASKING], models=ScriptedModel([]), db=db, executor=name, polling=polling, pricing=None)


class Server:
    """
    The database.

    Args:
        url: Its URL.
        folder: Its files, when it is a private one of this machine.
    """

    def __init__(self, url: str, folder: Path | None = None) -> None:
        self.url = url
        self.folder = folder

    def cpu(self) -> float | None:
        """Return the CPU seconds that all of its processes have used; ``None`` where that cannot be known."""
        if self.folder is None or not Path("/proc/self/stat").exists():
            return None
        main = int((self.folder / "postmaster.pid").read_text().split()[0])
        used = 0.0
        for file in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                # After the name, which may hold anything: state, parent, ..., and from 11 on user, system, and of children that ended.
                fields = file.read_text().rpartition(")")[2].split()
                if int(file.parent.name) == main:
                    used += sum(map(int, fields[11:15]))
                elif int(fields[1]) == main:
                    used += sum(map(int, fields[11:13]))
        return used / os.sysconf("SC_CLK_TCK")


class Meter:
    """What one measurement has used so far: of time, of this process, of the database."""

    def __init__(self, server: Server, operator: Operator) -> None:
        self._server = server
        self._operator = operator

    async def begin(self) -> None:
        """Remember how things are."""
        self._bytes, self._wal = await self._written()
        self._database = self._server.cpu()
        self._cpu, self._start = time.process_time(), time.perf_counter()

    async def ended(self, count: int) -> dict[str, float]:
        """Return what was used per step of *count*."""
        wall, cpu = time.perf_counter() - self._start, time.process_time() - self._cpu
        used = self._server.cpu()
        written, wal = await self._written()
        found = {"ms": wall * 1000 / count, "cpu_ms": cpu * 1000 / count}
        if used is not None and self._database is not None:
            found["database_cpu_ms"] = (used - self._database) * 1000 / count
        return {**found, "bytes": (written - self._bytes) / count, "wal_bytes": (wal - self._wal) / count}

    async def _written(self) -> tuple[int, int]:
        """Return the bytes of everything that runs leave, and those that were written ahead."""
        tables = ("operation_outputs", "workflow_status", "workflow_input", "workflow_output")
        sizes = " + ".join([f"pg_total_relation_size('dbos.{table}')" for table in tables])
        statement = f"select {sizes}, pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')::bigint"
        size, wal = (await self._operator.rows(statement))[0]
        return size, wal


async def cost(server: Server, count: int, size: int) -> dict[str, float]:
    """Return what one run of *count* effects costs, whose results have *size* bytes."""
    async with engine(server.url) as worker:
        await worker.run(AGENT, f"10 {size}")
        meter = Meter(server, worker.operator)
        await meter.begin()
        run = await worker.submit(AGENT, f"{count} {size}")
        form = await worker.operator.result(run)
        found = await meter.ended(count)
        assert form["output"] == "done", form
    return found


async def bare_loop(server: Server, count: int) -> dict[str, float]:
    """Return what a loop of DBOS steps costs that do the same, without us."""
    from dbos import DBOS

    async with engine(server.url) as worker:

        async def loop(number: int) -> str:
            for each in range(number):
                options: Any = {"name": f"perform:{each:032x}", "preemptible": True}
                await DBOS.run_step_async(options, quick_effect, each, SMALL)
            return "done"

        workflow = DBOS.workflow(name=f"bench.{uuid.uuid4().hex}")(loop)
        await (await DBOS.start_workflow_async(workflow, 10)).get_result(polling_interval_sec=0.02)
        meter = Meter(server, worker.operator)
        await meter.begin()
        handle = await DBOS.start_workflow_async(workflow, count)
        await handle.get_result(polling_interval_sec=0.02)
        return await meter.ended(count)


async def journal(folder: Path, count: int) -> dict[str, float]:
    """Return what the same run costs in one process with the SQLite journal."""
    one = Engine([AGENT], models=ScriptedModel([]), pricing=None)
    await one.run(AGENT, f"10 {SMALL}", journal=SqliteJournal(folder / "warm.db"))
    file = folder / f"runs-{uuid.uuid4().hex}.db"
    cpu, start = time.process_time(), time.perf_counter()
    result = await one.run(AGENT, f"{count} {SMALL}", journal=SqliteJournal(file))
    wall, used = time.perf_counter() - start, time.process_time() - cpu
    assert result.output == "done", result
    return {"ms": wall * 1000 / count, "cpu_ms": used * 1000 / count, "bytes": bytes_of(file) / count}


def bytes_of(file: Path) -> int:
    """Return the bytes of a journal, and of what SQLite keeps beside it."""
    return sum([each.stat().st_size for each in file.parent.glob(f"{file.name}*")])


async def going_on(server: Server, count: int) -> dict[str, float]:
    """Return what it costs to go on with a run of *count* recorded effects, per effect."""
    executor = f"bench-{uuid.uuid4().hex[:8]}"
    async with engine(server.url, executor) as worker:
        waiting = await worker.run(ASKING, f"{count} {SMALL}")
        (question,) = waiting.pending_questions
        run = str(waiting.journal)
    async with await Operator.connect(server.url) as operator:
        await operator.answer(run, {question.id: "yes"})
        cpu, start = time.process_time(), time.perf_counter()
        async with engine(server.url, executor):
            form = await operator.result(run)
            wall, used = time.perf_counter() - start, time.process_time() - cpu
    assert form["output"] == "yes", form
    return {"ms": wall * 1000 / count, "cpu_ms": used * 1000 / count}


async def idle(server: Server, seconds: float) -> dict[str, float]:
    """Return what a worker costs that has nothing to do, with the default polling."""
    transactions = "select xact_commit + xact_rollback from pg_stat_database where datname = current_database()"
    connections = "select count(*) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"
    async with await Operator.connect(server.url) as operator, contextlib.AsyncExitStack() as opened:
        ((others,),) = await operator.rows(connections)
        await opened.enter_async_context(engine(server.url, polling=1.0))
        await asyncio.sleep(2)
        ((before,),), cpu, start = await operator.rows(transactions), time.process_time(), time.perf_counter()
        await asyncio.sleep(seconds)
        ((after,),), wall = await operator.rows(transactions), time.perf_counter() - start
        used = time.process_time() - cpu
        ((open_,),) = await operator.rows(connections)
    return {
        "transactions_per_s": (after - before) / wall,
        "cpu_percent": 100 * used / wall,
        "connections": open_ - others,
    }


async def throughput(server: Server, workers: int, runs: int, count: int) -> dict[str, float]:
    """Return how many runs of *count* effects end per second with so many worker processes."""
    async with await Operator.connect(server.url) as operator:
        release = engine(server.url).release
        processes = [
            await asyncio.create_subprocess_exec(
                sys.executable, "-m", "benchmarks.durable", "--serve", f"bench-w{number}", "--db", server.url,
                stdout=asyncio.subprocess.PIPE,
            )
            for number in range(workers)
        ]  # fmt: skip
        try:
            for process in processes:
                assert process.stdout is not None
                await process.stdout.readline()
            start = time.perf_counter()
            ids = [await operator.submit("bench", f"{count} {SMALL}", release=release) for _ in range(runs)]
            submitted = time.perf_counter() - start
            query = "select count(*) from dbos.workflow_status where workflow_uuid = any(%s) and status = 'SUCCESS'"
            while True:
                if [(runs,)] == await operator.rows(query, ids):
                    break
                await asyncio.sleep(0.05)
            wall = time.perf_counter() - start
        finally:
            for process in processes:
                process.kill()
                await process.wait()
    return {"runs_per_s": runs / wall, "steps_per_s": runs * count / wall, "submit_ms": submitted * 1000 / runs}


async def serve(db: str, executor: str) -> None:
    """Be a worker until killed."""
    async with engine(db, executor):
        print("serves", flush=True)
        await asyncio.Event().wait()


@contextlib.asynccontextmanager
async def database(given: str | None) -> AsyncIterator[Server]:
    """Give the database that was named, or a private one."""
    if given is not None:
        yield Server(given)
        return
    with tempfile.TemporaryDirectory(prefix="se-bench-") as folder:
        os.environ.setdefault("XDG_RUNTIME_DIR", folder)
        async with embedded(f"{folder}/data") as url:
            yield Server(url, Path(folder, "data"))


def fewest(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Return the smallest of each figure: what others did at the time only adds to it."""
    return {name: min([each[name] for each in rounds]) for name in rounds[0]}


async def measured(given: str | None, count: int, runs: int, repeat: int) -> Figures:
    """Return all figures; the rounds go in turns, so that what is compared met the same neighbours."""
    start = time.perf_counter()
    rounds: dict[str, list[dict[str, float]]] = {}
    async with database(given) as server:
        up = {} if given else {"a private PostgreSQL is up": {"s": time.perf_counter() - start}}
        with tempfile.TemporaryDirectory() as folder:
            works: dict[str, Callable[[], Awaitable[dict[str, float]]]] = {
                f"durable, {SHORT} steps": lambda: cost(server, SHORT, SMALL),
                f"durable, {count} steps": lambda: cost(server, count, SMALL),
                "bare DBOS loop": lambda: bare_loop(server, count),
                f"durable, results of {LARGE} bytes": lambda: cost(server, count, LARGE),
                "SQLite journal": lambda: journal(Path(folder), count),
                "going on, per recorded step": lambda: going_on(server, count),
            }
            for _ in range(repeat):
                for name, work in works.items():
                    rounds.setdefault(name, []).append(await work())
        figures = {**up, **{name: fewest(found) for name, found in rounds.items()}}
        figures["an idle worker"] = await idle(server, 5.0)
        for workers, name in ((1, ONE), (2, TWO)):
            found = [await throughput(server, workers, runs, 10) for _ in range(repeat)]
            figures[name] = max(found, key=lambda each: each["runs_per_s"])
    return figures


def ratios(figures: Figures, count: int) -> dict[str, float]:
    """Return what holds on other machines."""
    ours, short = figures[f"durable, {count} steps"], figures[f"durable, {SHORT} steps"]
    bare, own = figures["bare DBOS loop"], figures["SQLite journal"]
    one, two = figures[ONE], figures[TWO]
    return {
        "time to a bare loop": ours["ms"] / bare["ms"],
        "CPU to a bare loop": ours["cpu_ms"] / bare["cpu_ms"],
        "time to the SQLite journal": ours["ms"] / own["ms"],
        "CPU to the SQLite journal": ours["cpu_ms"] / own["cpu_ms"],
        "bytes to the SQLite journal": ours["bytes"] / own["bytes"],
        f"time of a step, {count} steps to {SHORT}": ours["ms"] / short["ms"],
        f"CPU of a step, {count} steps to {SHORT}": ours["cpu_ms"] / short["cpu_ms"],
        "two workers to one": two["runs_per_s"] / one["runs_per_s"],
    }


def report(figures: Figures, count: int, load: tuple[float, float], file: Path | None) -> None:
    """Print the figures and which budgets hold, and write them to *file*, if there is one."""
    found = ratios(figures, count)
    cores = os.cpu_count() or 1
    machine = {
        "cores": cores, "python": platform.python_version(), "load_before": load[0], "load_after": load[1],
        "is_shared": max(load) > 0.75 * cores,
    }  # fmt: skip
    growth = f"CPU of a step, {count} steps to {SHORT}"
    verdicts = [
        Verdict("UT20", what, Spread.of([found[name]]), 1.3)
        for what, name in (
            ("CPU of a step against a bare loop", "CPU to a bare loop"),
            (growth, growth),
        )
    ]
    for name, values in figures.items():
        print(f"{name:<32}" + "  ".join([f"{key} {value:.2f}" for key, value in values.items()]))
    for name, value in found.items():
        print(f"{name:<44}{value:.2f}")
    print(f"{cores} cores, load {load[0]:.1f} before and {load[1]:.1f} after", end="")
    print(": others used the machine, so absolute times are too large" if machine["is_shared"] else "")
    lines = [
        f"{v.word:<7} {v.budget}  {v.what}: {v.found.median:.2f} (at most {v.most:g})" for v in verdicts if v.found
    ]
    for line in lines:
        print(line)
    if file is not None:
        written = {"verdicts": lines, "machine": machine, "figures": figures, "ratios": found}
        file.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Measure and print what came out."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.durable", description=(__doc__ or "").strip().splitlines()[0]
    )
    parser.add_argument("--db", help="a PostgreSQL for this alone; default: a private one")
    parser.add_argument("--steps", type=int, default=1_000, help="effects of the long run")
    parser.add_argument("--runs", type=int, default=100, help="runs that the workers share")
    parser.add_argument("--repeat", type=int, default=3, help="rounds, of which the fastest counts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything to FILE")
    parser.add_argument("--serve", metavar="EXECUTOR", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve is not None:
        asyncio.run(serve(given.db, given.serve))
        return
    before = os.getloadavg()[0]
    figures = asyncio.run(measured(given.db, given.steps, given.runs, given.repeat))
    report(figures, given.steps, (before, os.getloadavg()[0]), given.json)


if __name__ == "__main__":
    main()
