"""
Workers that are killed with SIGKILL: nothing committed happens again, and every run ends as it would have.
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from stepengine import Engine
from stepengine.data.state import RunInfo
from stepengine.durable import DeploymentMaintenance, Operator

from .killed import WORKER, Workers

FOLLOWS = [
    ("go-0", "go-1"),
    ("go-1", "go-fire"),
    ("go-1", "go-a-look"),
    ("go-a-look", "go-a-measured"),
    *(("go-a-measured", name) for name in ("go-p", "go-q", "go-b-look")),
    ("go-b-look", "go-b-measured"),
    *((name, "go-model") for name in ("go-p", "go-q", "go-b-measured")),
]
"""Effects of the agent ``parent`` in ``worker.py`` and those that its handler only begins with their results."""


async def undisturbed(agent: str, prompt: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """How the same agent ends in one process that nobody kills."""
    monkeypatch.setenv("WORLD", str(tmp_path / "undisturbed.jsonl"))
    spec = importlib.util.spec_from_file_location("durable_worker", WORKER)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return await Engine(module.AGENTS, models=module.model()).run(agent, prompt)


async def restarted_until_done(workers: Workers, operator: Operator, run: str, restart: Callable[[], subprocess.Popen]):
    """Start a worker again whenever it died, until the run has ended; return how often."""
    starts = 0
    process = None
    for _ in range(6_000):
        if process is None or process.poll() is not None:
            process = restart()
            starts += 1
        if (await operator.run(run)).is_over:
            return starts
        await asyncio.sleep(0.05)
    raise AssertionError("the run does not end")


@pytest.mark.smoke
@pytest.mark.deep
@pytest.mark.spec("durable:UF5", "durable:U18", "durable:U30", "reliability:R1", "reliability:R3")
async def test_worker_killed_in_every_effect_repeats_nothing_committed(workers: Workers, tmp_path: Path, monkeypatch):
    expected = await undisturbed("parent", "go", tmp_path, monkeypatch)
    async with await Operator.connect(workers.db) as operator:
        run = await operator.submit("parent", "go")
        await restarted_until_done(workers, operator, run, lambda: workers.start("worker-1", DIES="1"))
        form = await operator.result(run)

    began, died = workers.told("began"), workers.told("died")
    assert {**expected.output, "fired": form["output"]["fired"]} == form["output"]
    # Never twice. Not at all where the kill after `go-1`, 2 ms later, comes between its mark and its beginning: a step takes as long.
    assert began["go-fire"] <= 1
    assert "unknown" == form["output"]["fired"]
    assert all(died[f"in {name}"] == 1 for name in began if name != "go-fire")
    # An effect that follows another's result can only begin when that result is committed.
    order = [line["name"] for line in workers.lines() if line["what"] == "began"]
    for earlier, later in FOLLOWS:
        if later in began:
            assert earlier not in order[order.index(later) :], (earlier, later, order)


@pytest.mark.deep
@pytest.mark.spec("durable:UF7", "durable:U26", "reliability:R1")
async def test_worker_that_resumes_after_takeover_changes_nothing(workers: Workers, tmp_path: Path, until):
    async with await Operator.connect(workers.db) as operator:
        zombie = workers.start("worker-1", SLOW="0.5")
        run = await operator.submit("parent", "go")

        async def began():
            return workers.told("began")["go-fire"]

        await until(began)
        zombie.send_signal(signal.SIGSTOP)
        await operator.client.resume_workflow_async(run, queue_name=operator.get_queue_name(run))
        workers.start("worker-2")

        async def is_over():
            return (await operator.run(run)).is_over

        await until(is_over, seconds=60)
        zombie.send_signal(signal.SIGCONT)
        await asyncio.sleep(3)
        form = await operator.result(run)
        view = await operator.run(run)

    assert "unknown" == form["output"]["fired"]
    assert "done go" == form["output"]["end"]
    assert 1 == workers.told("began")["go-fire"]
    assert "worker-2" == view.executor
    assert max(workers.told("began").values()) <= 2


def spoken(session: str) -> RunInfo:
    return RunInfo(session_id=session)


@pytest.mark.deep
@pytest.mark.spec("durable:UF5", "reliability:SS01", "reliability:SS06", "requirements:L3")
async def test_sessions_keep_order_while_both_workers_are_killed(workers: Workers):
    async with await Operator.connect(workers.db) as operator, await Operator.connect(workers.db) as other:
        runs = {
            session: [
                await (operator, other)[n % 2].submit("talking", f"{session}{n}", info=spoken(session))
                for n in range(3)
            ]
            for session in "ab"
        }
        wanted = [run for of in runs.values() for run in of]
        alive: dict[str, subprocess.Popen[bytes]] = {}
        for _ in range(6_000):
            for name in ("worker-1", "worker-2"):
                if name not in alive or alive[name].poll() is not None:
                    alive[name] = workers.start(name, DIES="1")
            if all([(await operator.run(run)).is_over for run in wanted]):
                break
            await asyncio.sleep(0.05)
        outputs = {s: [(await operator.result(run))["output"] for run in of] for s, of in runs.items()}

    assert {s: [[f"{s}{m}" for m in range(n + 1)] for n in range(3)] for s in "ab"} == outputs
    order = [line["name"] for line in workers.lines() if line["what"] == "began"]
    for session in "ab":
        effects = [f"{session}{n}-{which}" for n in range(3) for which in ("first", "second")]
        for earlier, later in itertools.pairwise(effects):
            assert earlier not in order[order.index(later) :], (earlier, later, order)
    assert all(workers.told("died")[f"in {name}"] == 1 for name in set(order))


@pytest.mark.deep
@pytest.mark.spec("durable:UF18", "durable:UF5", "reliability:I11")
def test_runs_survive_worker_kills_and_database_restarts():
    said = subprocess.run(
        [sys.executable, "-m", "benchmarks.kills", "--runs", "40", "--kills", "6", "--restarts", "3", "--pace", "2"],
        cwd=WORKER.parents[2],
        capture_output=True,
        text=True,
        check=False,
    )

    assert 0 == said.returncode, said.stdout + said.stderr
    assert "restarts                        0" not in said.stdout


AROUND = [
    ("go-alone-child-measured", "go-p"),
    ("go-alone-child-measured", "go-a-inner-first"),
    ("go-b-first", "go-b-second"),
    *((name, "go-last") for name in ("go-p", "go-a-child-measured", "go-b-second")),
]


IN_BODY = [
    (f"go-{of}-{earlier}", f"go-{of}-{later}")
    for of in ("alone", "a")
    for earlier, later in itertools.pairwise(("inner-first", "inner-second", "fire", "child-look", "child-measured"))
]


@pytest.mark.deep
@pytest.mark.spec("programs:PG7", "programs:PG2", "durable:UF5", "durable:U18", "reliability:R1", "durable:U48")
async def test_workers_killed_in_every_effect_of_bodies_repeat_nothing_committed(
    workers: Workers, tmp_path: Path, monkeypatch
):
    expected = await undisturbed("yielding", "go", tmp_path, monkeypatch)
    async with await Operator.connect(workers.db) as operator:
        run = await operator.submit("yielding", "go")
        await restarted_until_done(workers, operator, run, lambda: workers.start("worker-1", DIES="1"))
        form = await operator.result(run)
        views = [view.id.partition("/")[2] for view in await operator.tree(run)]

    began, died = workers.told("began"), workers.told("died")
    fires = ["go-alone-fire", "go-a-fire"]
    # In doubt is only what must not happen twice; the call that it belongs to continues after it.
    assert [text.replace("fired", "unknown") for text in expected.output] == form["output"]
    # It may not begin at all: the kill of another effect can fall between its mark and its beginning.
    assert all(began[fire] <= 1 for fire in fires)
    assert all(died[f"in {name}"] == 1 for name in began)
    # The child of the body alone, two bodies and a child of the first of them: a body alone is no run.
    assert ["", "0.2", "1", "1.2", "3"] == sorted(views)
    order = [line["name"] for line in workers.lines() if line["what"] == "began"]
    for earlier, later in (*IN_BODY, *AROUND):
        if later in began:
            assert earlier not in order[order.index(later) :], (earlier, later, order)


@pytest.mark.deep
@pytest.mark.spec("programs:PG7", "durable:UF5", "durable:U26")
async def test_run_killed_in_mid_body_resumes_on_another_worker(workers: Workers, until):
    async with await Operator.connect(workers.db) as operator:
        first = workers.start("worker-1", SLOW="0.3")
        run = await operator.submit("yielding", "go")

        async def began():
            return workers.told("began")["go-alone-inner-second"]

        await until(began, seconds=60)
        first.kill()
        first.wait()
        workers.start("worker-2")
        await DeploymentMaintenance(operator).takeover("worker-1")
        form = await operator.result(run)
        view = await operator.run(run)

    told = workers.told("began")
    assert "worker-2" == view.executor
    assert 1 == told["go-alone-inner-first"]
    assert 2 == told.pop("go-alone-inner-second")
    assert {1} == set(told.values())
    assert "go-alone-inner-first go-alone-inner-second fired" in form["output"][0]
