"""
What a durable run costs: ``python -m benchmarks.durable [--db URL] [--steps N] [--runs N] [--repeat N] [--json FILE]``.

Per effect: wall time, CPU of the worker and of the database, transactions, bytes and write-ahead log; growth with the length of a run;
what going on with a recorded run costs; what an idle worker costs; steps per second with one worker and with two, of work that waits
and of work that does not. Beside it the same for a worker that was written by hand on DBOS (``bare_dbos.py``): a program of its own on
a database of its own, as ours is, which takes its turn in every round. CPU is that of whole workers, with everything they do beside
the run; transactions are counted by the database. Without ``--db`` a private PostgreSQL is started, and only then the database's CPU
is known. Each figure is the median of ``--repeat`` rounds, each ratio the median of those within a round, with the least and the
most. How busy the machine was is printed. ``--only promised`` prints the CPU that performance promises are about, as JSON. Timings never decide a unit test.
"""

from __future__ import annotations

import abc
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
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import psycopg

from benchmarks.judging import BY_HAND
from benchmarks.sheet import Spread
from stepengine import AgentDefinition, Ask, Engine, Limits, StepContext, ToolAnnotations, call, tool
from stepengine.durable import DeploymentMaintenance, DurableEngine, Operator, run_embedded_postgres
from stepengine.durable.database import make_dbos_client, parse_database_url
from stepengine.journal import SqliteJournal
from stepengine.testing import ScriptedModel

Figures = dict[str, dict[str, list[float]]]
"""Figures of each work by name, one for each round."""
SHORT = 100
SMALL, LARGE = 100, 1_000
"""Bytes of a tool's result."""
PAUSE = 0.5
"""Seconds that a call waits in work that waits."""
SETTLE_SECONDS = 11.0
"""After so long without work a connection of the database has told of all its transactions."""
LOOK_SECONDS = 0.05
FAIR = 32
"""How many runs a worker holds where two share them: as many as it performs effects at once, so that neither takes what it cannot do."""
BARE, OURS, FREE = "bare DBOS", "ours", "ours, tools that may be repeated"
IDLE_BARE, IDLE_OURS = "bare DBOS, idle", "ours, idle"
GOING_ON, LONG_RESULTS = "going on, per recorded step", f"ours, results of {LARGE} bytes"


async def looked_up(number: int, size: int, seconds: float) -> dict[str, Any]:
    """Do next to nothing, on the event loop, or wait."""
    if seconds:
        await asyncio.sleep(seconds)
    # No two alike, as the database packs what repeats.
    return {"number": number, "payload": os.urandom(size // 2).hex()}


@tool
async def look_up(number: int, size: int, seconds: float) -> dict[str, Any]:
    """
    Look something up, by an ordinary tool: nothing says that it may be repeated.

    Args:
        number: What.
        size: How many bytes it gives.
        seconds: How long that takes.
    """
    return await looked_up(number, size, seconds)


@tool(annotations=ToolAnnotations(idempotent=True))
async def look_again(number: int, size: int, seconds: float) -> dict[str, Any]:
    """
    Look something up, as often as anybody likes.

    Args:
        number: What.
        size: How many bytes it gives.
        seconds: How long that takes.
    """
    return await looked_up(number, size, seconds)


def calling(ctx: StepContext, used: Any = look_up) -> Any:
    """Call a tool as often as the prompt says."""
    count, size, seconds = ctx.prompt.split()
    for number in range(int(count)):
        yield from call(used, number, int(size), float(seconds))
    return "done"


def repeating(ctx: StepContext) -> Any:
    """Do so with one that may be repeated."""
    return (yield from calling(ctx, look_again))


def asking(ctx: StepContext) -> Any:
    """Call a tool as often, then wait for an answer."""
    yield from calling(ctx)
    answer = yield from Ask("Go on?")
    return answer


MANY = Limits(max_actions=10**6)
CALLING = AgentDefinition("bench", tools=[look_up], handle_steps=calling, limits=MANY)
REPEATING = AgentDefinition("bench-repeating", tools=[look_again], handle_steps=repeating, limits=MANY)
ASKING = AgentDefinition("bench-asking", tools=[look_up], handle_steps=asking, limits=MANY)


def engine(db: str, executor: str, concurrency: int = 500) -> DurableEngine:
    """Return a worker, with what workers have by default but the number of runs that it holds."""
    agents, models = [CALLING, REPEATING, ASKING], ScriptedModel([])
    return DurableEngine(agents, models=models, db=db, executor=executor, concurrency=concurrency, pricing=None)


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


class Side(abc.ABC):
    """
    One of the two kinds of workers, with a database of its own and somebody who orders runs there.

    Args:
        name: What it is called.
        url: Its database.
        look: A connection to it.
    """

    def __init__(self, name: str, url: str, look: psycopg.AsyncConnection[Any]) -> None:
        self.name = name
        self.url = url
        self._look = look
        self._asked = 0

    async def rows(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        """Return what a statement selects; it is not counted as a transaction of the workers."""
        self._asked += 1
        return await (await self._look.execute(statement, values or None)).fetchall()

    async def transactions(self) -> int:
        """Return how many transactions others than this object have made in the database so far, as far as it knows by now."""
        statement = "select xact_commit + xact_rollback from pg_stat_database where datname = current_database()"
        ((count,),) = await self.rows(statement)
        return int(count) - self._asked

    @abc.abstractmethod
    async def submit(self, number: int, size: int, seconds: float, *, agent: str = "bench") -> str:
        """Order a run of so many calls, and return its id."""

    @abc.abstractmethod
    def command(self, executor: str) -> list[str]:
        """Return the command of a worker."""

    @contextlib.asynccontextmanager
    async def worker(self, executor: str, concurrency: int = 500) -> AsyncIterator[Worker]:
        """Give a worker that runs, and holds so many runs."""
        pipe = asyncio.subprocess.PIPE
        command = [*self.command(executor), "--concurrency", str(concurrency)]
        process = await asyncio.create_subprocess_exec(sys.executable, *command, stdin=pipe, stdout=pipe)
        try:
            worker = Worker(process)
            await worker.line()
            yield worker
        finally:
            process.kill()
            await process.wait()

    async def until_ended(self, runs: Sequence[str]) -> None:
        """Wait until all of these runs have ended well."""
        statement = "select status, count(*) from dbos.workflow_status where workflow_uuid = any(%s) group by status"
        while (found := dict(await self.rows(statement, list(runs)))) != {"SUCCESS": len(runs)}:
            assert found.keys() <= {"ENQUEUED", "PENDING", "SUCCESS"}, found
            await asyncio.sleep(LOOK_SECONDS)


class Ours(Side):
    """Workers of ours."""

    operator: Operator

    def command(self, executor: str) -> list[str]:
        """Return the command of a worker."""
        return ["-m", "benchmarks.durable", "--serve", executor, "--db", self.url]

    async def submit(self, number: int, size: int, seconds: float, *, agent: str = "bench") -> str:
        """Order a run of so many calls, and return its id."""
        release = engine(self.url, "bench-nobody").release
        return await self.operator.submit(agent, f"{number} {size} {seconds}", release=release)


class Bare(Side):
    """Workers written by hand."""

    client: Any

    def command(self, executor: str) -> list[str]:
        """Return the command of a worker."""
        return ["-m", "benchmarks.bare_dbos", "--db", self.url, "--executor", executor]

    async def submit(self, number: int, size: int, seconds: float, *, agent: str = "bench") -> str:
        """Order a run of so many steps, and return its id."""
        run = uuid.uuid4().hex
        options = {"workflow_name": "bench.loop", "queue_name": "bench", "workflow_id": run, "app_version": "1"}
        await self.client.enqueue_async(options, number, size, seconds)
        return run


class Worker:
    """The process of a worker, which tells its CPU seconds when it is asked."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def line(self) -> str:
        """Return the next line that it says."""
        assert self._process.stdout is not None
        said = await self._process.stdout.readline()
        assert said, "the worker has ended"
        return said.decode()

    async def cpu(self) -> float:
        """Return the CPU seconds of all its threads so far."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        return float(await self.line())


async def written(side: Side) -> tuple[int, int]:
    """Return the bytes of everything that runs leave, and those that were written ahead."""
    tables = ("operation_outputs", "workflow_status", "workflow_input", "workflow_output")
    sizes = " + ".join([f"pg_total_relation_size('dbos.{table}')" for table in tables])
    ((size, wal),) = await side.rows(f"select {sizes}, pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')::bigint")
    return size, wal


async def cost(
    server: Server, side: Side, worker: Worker, count: int, size: int = SMALL, *, agent: str = "bench"
) -> dict[str, float]:
    """Return what one run of *count* calls costs for each of them, whose results have *size* bytes."""
    (size_before, wal_before), database = await written(side), server.cpu()
    cpu, start = await worker.cpu(), time.perf_counter()
    await side.until_ended([await side.submit(count, size, 0.0, agent=agent)])
    wall, used = time.perf_counter() - start, await worker.cpu() - cpu
    database_used = server.cpu()
    size_after, wal_after = await written(side)
    found = {"ms": wall * 1000 / count, "cpu_ms": used * 1000 / count}
    if database is not None and database_used is not None:
        found["database_cpu_ms"] = (database_used - database) * 1000 / count
    return found | {"bytes": (size_after - size_before) / count, "wal_bytes": (wal_after - wal_before) / count}


async def counted(side: Side, works: Sequence[str], count: int) -> dict[str, float]:
    """Return how many transactions a call needs, by agent, and how many a worker makes that has nothing to do, in a second."""
    await asyncio.sleep(SETTLE_SECONDS)
    before, start = await side.transactions(), time.perf_counter()
    await asyncio.sleep(1.5 * SETTLE_SECONDS)
    after = await side.transactions()
    idle = (after - before) / (time.perf_counter() - start)
    found = {"idle": idle}
    for agent in works:
        before, start = await side.transactions(), time.perf_counter()
        run = await side.submit(count, SMALL, 0.0, agent=agent)
        await side.until_ended([run])
        await asyncio.sleep(SETTLE_SECONDS)
        after = await side.transactions()
        found[agent] = (after - before - idle * (time.perf_counter() - start)) / count
    return found


async def idle(worker: Worker, seconds: float) -> dict[str, float]:
    """Return how much of a core a worker takes that has nothing to do."""
    cpu, start = await worker.cpu(), time.perf_counter()
    await asyncio.sleep(seconds)
    used = await worker.cpu() - cpu
    return {"cpu_percent": 100 * used / (time.perf_counter() - start)}


async def journal(folder: Path, count: int) -> dict[str, float]:
    """Return what the same run costs in one process with the SQLite journal."""
    one = Engine([CALLING], models=ScriptedModel([]), pricing=None)
    await one.run(CALLING, f"10 {SMALL} 0", journal=SqliteJournal(folder / "warm.db"))
    file = folder / f"runs-{uuid.uuid4().hex}.db"
    cpu, start = time.process_time(), time.perf_counter()
    result = await one.run(CALLING, f"{count} {SMALL} 0", journal=SqliteJournal(file))
    wall, used = time.perf_counter() - start, time.process_time() - cpu
    assert result.output == "done", result
    return {"ms": wall * 1000 / count, "cpu_ms": used * 1000 / count, "bytes": bytes_of(file) / count}


def bytes_of(file: Path) -> int:
    """Return the bytes of a journal, and of what SQLite keeps beside it."""
    return sum([each.stat().st_size for each in file.parent.glob(f"{file.name}*")])


async def going_on(side: Ours, count: int) -> dict[str, float]:
    """Return what it costs a worker to go on with a run of *count* recorded calls of another one, for each of them."""
    dead, living = f"bench-{uuid.uuid4().hex[:8]}", f"bench-{uuid.uuid4().hex[:8]}"
    async with side.worker(dead):
        run = await side.submit(count, SMALL, 0.0, agent="bench-asking")
        while not (waiting := await side.operator.list_questions(run)):  # noqa: ASYNC110 - it is asked of a database
            await asyncio.sleep(LOOK_SECONDS)
    await side.operator.answer(run, {question.id: "yes" for each in waiting for question in each.questions})
    maintenance = DeploymentMaintenance(side.operator)
    async with side.worker(living) as worker:
        cpu, start = await worker.cpu(), time.perf_counter()
        await maintenance.takeover(dead)
        await side.until_ended([run])
        wall, used = time.perf_counter() - start, await worker.cpu() - cpu
    return {"ms": wall * 1000 / count, "cpu_ms": used * 1000 / count}


async def throughput(side: Side, workers: int, runs: int, count: int, seconds: float) -> dict[str, float]:
    """Return how many steps end per second in *runs* of *count* calls that wait for so many *seconds*, with so many workers."""
    async with contextlib.AsyncExitStack() as opened:
        for number in range(workers):
            await opened.enter_async_context(side.worker(f"bench-w{number}", FAIR))
        start = time.perf_counter()
        ids = [await side.submit(count, SMALL, seconds) for _ in range(runs)]
        submitted = time.perf_counter() - start
        await side.until_ended(ids)
        wall = time.perf_counter() - start
    return {"runs_per_s": runs / wall, "steps_per_s": runs * count / wall, "submit_ms": submitted * 1000 / runs}


async def serve(db: str, executor: str, concurrency: int) -> None:
    """Be a worker until nobody listens any more; tell the CPU seconds of this process for every line."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async with engine(db, executor, concurrency):
        print("serves", flush=True)
        while await reader.readline():
            print(time.process_time(), flush=True)


@contextlib.asynccontextmanager
async def database(given: str | None) -> AsyncIterator[Server]:
    """Give the database that was named, or a private one."""
    if given is not None:
        yield Server(given)
        return
    with tempfile.TemporaryDirectory(prefix="se-bench-") as folder:
        os.environ.setdefault("XDG_RUNTIME_DIR", folder)
        async with run_embedded_postgres(f"{folder}/data") as url:
            yield Server(url, Path(folder, "data"))


@contextlib.asynccontextmanager
async def sides(url: str) -> AsyncIterator[tuple[Bare, Ours, Ours]]:
    """Give a hand-written worker's side and ours, and one of ours where no worker is up, each with a new database."""
    head, _, query = url.partition("?")
    async with contextlib.AsyncExitStack() as opened:
        server = await opened.enter_async_context(await psycopg.AsyncConnection.connect(url, autocommit=True))
        made: list[Any] = []
        for name, kind in ((BARE, Bare), (OURS, Ours), (GOING_ON, Ours)):
            database = f"bench_{uuid.uuid4().hex[:8]}"
            await server.execute(f"create database {database}")
            opened.push_async_callback(server.execute, f"drop database {database} with (force)")
            own = f"{head.rpartition('/')[0]}/{database}{'?' + query if query else ''}"
            look = await opened.enter_async_context(await psycopg.AsyncConnection.connect(own, autocommit=True))
            side = kind(name, own, look)
            async with side.worker("bench-tables"):
                pass
            if isinstance(side, Bare):
                side.client = await asyncio.to_thread(make_dbos_client, parse_database_url(own), app="bench-bare")
                opened.callback(side.client.destroy)
            elif isinstance(side, Ours):
                side.operator = await opened.enter_async_context(await Operator.connect(own))
            made.append(side)
        bare, ours, apart = made
        yield bare, ours, apart


class Measured:
    """All figures, round by round."""

    def __init__(self) -> None:
        self.figures: Figures = {}

    def add(self, name: str, found: dict[str, float]) -> None:
        """Note what a work came to in a round."""
        for figure, value in found.items():
            self.figures.setdefault(name, {}).setdefault(figure, []).append(value)

    async def steps(self, server: Server, bare: Side, ours: Side, count: int, repeat: int) -> None:
        """Measure calls and idle workers, in turns: what is compared met the same neighbours."""
        async with bare.worker("bench-steps") as theirs, ours.worker("bench-steps") as own:
            for side, worker, agent in ((bare, theirs, "bench"), (ours, own, "bench"), (ours, own, "bench-repeating")):
                await cost(server, side, worker, 10, agent=agent)
            works: dict[str, Callable[[], Awaitable[dict[str, float]]]] = {
                BARE: lambda: cost(server, bare, theirs, count),
                OURS: lambda: cost(server, ours, own, count),
                FREE: lambda: cost(server, ours, own, count, agent="bench-repeating"),
                short_of(OURS): lambda: cost(server, ours, own, SHORT),
                LONG_RESULTS: lambda: cost(server, ours, own, count, LARGE),
                IDLE_BARE: lambda: idle(theirs, 2 * SETTLE_SECONDS / repeat),
                IDLE_OURS: lambda: idle(own, 2 * SETTLE_SECONDS / repeat),
            }
            for _ in range(repeat):
                for name, work in works.items():
                    self.add(name, await work())
            found = await asyncio.gather(
                counted(bare, ("bench",), count), counted(ours, ("bench", "bench-repeating"), count)
            )
            self.add(IDLE_BARE, {"transactions_per_s": found[0]["idle"]})
            self.add(IDLE_OURS, {"transactions_per_s": found[1]["idle"]})
            self.add(BARE, {"transactions": found[0]["bench"]})
            self.add(OURS, {"transactions": found[1]["bench"]})
            self.add(FREE, {"transactions": found[1]["bench-repeating"]})

    async def workers(self, bare: Side, ours: Side, runs: int, repeat: int) -> None:
        """Measure what one worker and two get done, in turns."""
        for _ in range(repeat):
            for side in (bare, ours):
                for workers in (1, 2):
                    self.add(by_workers(side, workers, 0.0), await throughput(side, workers, runs, 10, 0.0))
            for workers in (1, 2):
                self.add(by_workers(ours, workers, PAUSE), await throughput(ours, workers, runs, 10, PAUSE))


def short_of(name: str) -> str:
    """Return the name of a work with few calls."""
    return f"{name}, {SHORT} steps"


def by_workers(side: Side | str, workers: int, seconds: float) -> str:
    """Return the name of work for so many workers."""
    name = side if isinstance(side, str) else side.name
    return f"{name}, {workers} worker{'s' if workers > 1 else ''}, steps that wait {seconds:g} s"


async def measured(given: str | None, count: int, runs: int, repeat: int, only: str | None) -> Figures:
    """Return all figures, or those of one part."""
    found, start = Measured(), time.perf_counter()
    async with database(given) as server:
        if given is None:
            found.add("a private PostgreSQL is up", {"s": time.perf_counter() - start})
        async with sides(server.url) as (bare, ours, apart):
            if only in (None, "steps"):
                await found.steps(server, bare, ours, count, repeat)
            if only in (None, "others"):
                with tempfile.TemporaryDirectory() as folder:
                    for _ in range(repeat):
                        found.add("SQLite journal", await journal(Path(folder), count))
                        found.add(GOING_ON, await going_on(apart, count))
            if only in (None, "workers"):
                await found.workers(bare, ours, runs, repeat)
    return found.figures


async def promised(rounds: int) -> dict[str, dict[int, dict[int, float]]]:
    """Return the CPU milliseconds of a step by worker, length of the run and round; the longest run has one round."""
    found: dict[str, dict[int, dict[int, float]]] = {BY_HAND: {}, "stepengine": {}}
    works = ((BY_HAND, 1_000), ("stepengine", 1_000), ("stepengine", SHORT), ("stepengine", 10_000))
    async with (
        database(None) as server,
        sides(server.url) as (bare, ours, _),
        bare.worker("bench-steps") as theirs,
        ours.worker("bench-steps") as own,
    ):
        workers = {BY_HAND: (bare, theirs), "stepengine": (ours, own)}
        for side, worker in workers.values():
            await cost(server, side, worker, 10)
        for turn in range(rounds):
            for name, count in works if turn == 0 else works[:-1]:
                spent = await cost(server, *workers[name], count)
                found[name].setdefault(count, {})[turn] = spent["cpu_ms"]
    return found


def ratios(figures: Figures) -> dict[str, Spread]:
    """Return what holds on other machines: ratios, each taken within a round."""
    compared = {
        "CPU of a step to bare DBOS": (OURS, BARE, "cpu_ms"),
        "CPU of a step to bare DBOS, tools that may be repeated": (FREE, BARE, "cpu_ms"),
        "time of a step to bare DBOS": (OURS, BARE, "ms"),
        "transactions of a step to bare DBOS": (OURS, BARE, "transactions"),
        "transactions of an idle worker to bare DBOS": (IDLE_OURS, IDLE_BARE, "transactions_per_s"),
        "CPU of an idle worker to bare DBOS": (IDLE_OURS, IDLE_BARE, "cpu_percent"),
        "CPU to the SQLite journal": (OURS, "SQLite journal", "cpu_ms"),
        "bytes to the SQLite journal": (OURS, "SQLite journal", "bytes"),
        f"CPU of a step, long run to one of {SHORT}": (OURS, short_of(OURS), "cpu_ms"),
        **{
            f"two workers to one, {name}, steps that wait {seconds:g} s": (
                by_workers(name, 2, seconds), by_workers(name, 1, seconds), "steps_per_s",
            )
            for name, seconds in ((BARE, 0.0), (OURS, 0.0), (OURS, PAUSE))
        },
    }  # fmt: skip
    found = {}
    for what, (one, other, figure) in compared.items():
        if one not in figures or other not in figures:
            continue
        pairs = zip(figures[one][figure], figures[other][figure], strict=True)
        found[what] = Spread.of([mine / theirs for mine, theirs in pairs])
    return {what: spread for what, spread in found.items() if spread is not None}


def report(figures: Figures, load: tuple[float, float], file: Path | None) -> None:
    """Print the figures, and write them to *file*, if there is one."""
    found = ratios(figures)
    cores = os.cpu_count() or 1
    machine = {
        "cores": cores, "python": platform.python_version(), "load_before": load[0], "load_after": load[1],
        "is_shared": max(load) > 0.75 * cores,
    }  # fmt: skip
    for name, values in figures.items():
        spreads = {figure: Spread.of(rounds) for figure, rounds in values.items()}
        print(f"{name:<44}" + "  ".join([f"{figure} {shown(each)}" for figure, each in spreads.items() if each]))
    for name, spread in found.items():
        print(f"{name:<64}{shown(spread)}")
    print(f"{cores} cores, load {load[0]:.1f} before and {load[1]:.1f} after", end="")
    print(": others used the machine, so absolute times are too large" if machine["is_shared"] else "")
    if file is not None:
        told = {what: spread._asdict() for what, spread in found.items()}
        written = {"machine": machine, "figures": figures, "ratios": told}
        file.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")


def shown(spread: Spread) -> str:
    """Return a median, with the least and the most that it is the median of."""
    around = f" ({spread.least:.2f} to {spread.most:.2f})" if spread.rounds > 1 else ""
    return f"{spread.median:.2f}{around}"


def main() -> None:
    """Measure and print what came out."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.durable", description=(__doc__ or "").strip().splitlines()[0]
    )
    parser.add_argument("--db", help="a PostgreSQL for this alone; default: a private one")
    parser.add_argument("--steps", type=int, default=1_000, help="effects of the long run")
    parser.add_argument("--runs", type=int, default=128, help="runs that the workers share")
    parser.add_argument("--repeat", type=int, default=5, help="rounds, of which the median counts")
    parser.add_argument("--only", choices=("steps", "others", "workers", "promised"), help="one part")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything to FILE")
    parser.add_argument("--concurrency", type=int, default=500, help=argparse.SUPPRESS)
    parser.add_argument("--serve", metavar="EXECUTOR", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve is not None:
        asyncio.run(serve(given.db, given.serve, given.concurrency))
        return
    if given.only == "promised":
        print(json.dumps(asyncio.run(promised(given.repeat))))
        return
    before = os.getloadavg()[0]
    figures = asyncio.run(measured(given.db, given.steps, given.runs, given.repeat, given.only))
    report(figures, (before, os.getloadavg()[0]), given.json)


if __name__ == "__main__":
    main()
