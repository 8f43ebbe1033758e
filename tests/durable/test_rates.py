"""
What all workers of a database may ask of a provider together, and how many runs their queues let begin.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stepengine import STEP, AgentDefinition, Perform, RateLimit, StepContext
from stepengine.cli.app import app
from stepengine.durable import DeploymentMaintenance, DurableEngine
from stepengine.durable.rates import SharedRates
from stepengine.errors import DatabaseUnavailable, DefinitionError, StepEngineError
from stepengine.models import Models
from stepengine.testing import ScriptedModel, text

from .shared import worker_of

psycopg = pytest.importorskip("psycopg", reason="needs the extra 'durable'")


class Named(ScriptedModel):
    """
    A provider of which only the account is looked at.
    """

    def __init__(self, account: str = "key") -> None:
        super().__init__([])
        self._account = account

    def get_account(self) -> str:
        return self._account


def rows(db: str, sql: str, *given):
    with psycopg.connect(db, autocommit=True) as connection:
        found = connection.execute(sql, given)
        return found.fetchall() if found.description else []


@pytest.fixture
async def worker(db: str, monkeypatch: pytest.MonkeyPatch):
    """
    Give what makes the limiter of another worker of the same database.
    """
    monkeypatch.setattr("stepengine.durable.rates.MAX_LOOK_SECONDS", 0.03)
    opened = []

    async def made(account: str = "key", **limit):
        rates = SharedRates(RateLimit(**limit), db)
        await rates.open(asyncio.Semaphore(1), migrate=True)
        opened.append(rates)
        return rates, rates.find_limiter("test", Named(account))

    yield made
    for rates in opened:
        await rates.close()


async def taken(limiter, said=None, *, tokens: int = 0):
    """
    Start a request that waits for its turn, and return it once it was told that it has to wait.
    """
    told = asyncio.Event()

    def notice(obstacle) -> None:
        if said is not None:
            said.append(obstacle)
        told.set()

    task = asyncio.create_task(limiter.enter(tokens, notice))
    await asyncio.wait((task, asyncio.ensure_future(told.wait())), return_when=asyncio.FIRST_COMPLETED)
    return task


@pytest.mark.deep
@pytest.mark.spec("durable:U21", "requirements:N15")
async def test_concurrency_limit_is_shared_and_dead_workers_are_not_counted(worker, db: str):
    (_, one), (_, two), (_, other) = (
        await worker(max_concurrency=2),
        await worker(max_concurrency=2),
        await worker("b", max_concurrency=2),
    )
    most = under_way = 0

    async def asks(limiter) -> None:
        nonlocal most, under_way
        ticket = await limiter.enter(0, lambda _: None)
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.01)
        under_way -= 1
        limiter.leave(ticket, None)

    await asyncio.gather(*[asks(limiter) for _ in range(6) for limiter in (one, two)])
    assert 2 == most

    tickets, said = [await one.enter(0, lambda _: None) for _ in range(2)], []
    waits = await taken(two, said)
    # Another key has places of its own.
    other.leave(await other.enter(0, said_nothing), None)
    assert not waits.done()
    assert ["concurrency"] == [obstacle.limit for obstacle in said]
    await one._rates.close()
    two.leave(await waits, None)
    assert 2 == len(tickets)


def said_nothing(obstacle) -> None:
    raise AssertionError(obstacle)


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("durable:U21", "requirements:N15")
async def test_minute_limits_use_the_database_clock(worker, db: str):
    (_, one), (_, two) = await worker(requests_per_minute=3), await worker(requests_per_minute=3)
    said = []
    for limiter in (one, two, one):
        limiter.leave(await limiter.enter(7, said_nothing), 7)
    waits = [await taken(two, said), await taken(one, said)]
    assert ["requests", "queue"] == sorted((obstacle.limit for obstacle in said), reverse=True)
    assert all(0 < obstacle.seconds <= 61 for obstacle in said if obstacle.limit == "requests")
    assert not any(task.done() for task in waits)
    # A minute later.
    rows(db, "update stepengine.rate_seconds set second = second - 61")
    await asyncio.wait_for(asyncio.gather(*waits), 50)

    (_, one), (_, two) = await worker("b", tokens_per_minute=100), await worker("b", tokens_per_minute=100)
    large, said = await one.enter(500, said_nothing), []
    waits = await taken(two, said, tokens=20)
    assert ["tokens"] == [obstacle.limit for obstacle in said]
    # What it really used is told, and there is room for the other one.
    one.leave(large, 80)
    await asyncio.wait_for(waits, 50)
    assert [(100,)] == rows(db, "select sum(tokens) from stepengine.rate_seconds where account = 'test:b'")


async def test_clock_set_back_blocks_no_request(worker, db: str):
    _, limiter = await worker(requests_per_minute=1)
    limiter.leave(await limiter.enter(7, said_nothing), 7)
    # As it stands when the clock of the database was put back by an hour.
    rows(db, "update stepengine.rate_seconds set second = second + 3600")
    await asyncio.wait_for(limiter.enter(7, said_nothing), 50)


@pytest.mark.spec("durable:U21")
async def test_longest_waiting_request_goes_first_across_workers(worker):
    (_, one), (_, two) = await worker(max_concurrency=1), await worker(max_concurrency=1)
    held, order = await one.enter(0, said_nothing), []
    first = await taken(two)
    second = await taken(one)
    for name, task in (("first", first), ("second", second)):
        task.add_done_callback(lambda _, name=name: order.append(name))
    # The worker that gives the place back asks for it at once, and does not get it.
    one.leave(held, None)
    two.leave(await asyncio.wait_for(first, 50), None)
    one.leave(await asyncio.wait_for(second, 50), None)

    assert ["first", "second"] == order


@pytest.mark.spec("durable:U21")
async def test_waiting_request_releases_its_effect_slot(worker):
    rates, one = await worker(max_concurrency=1)
    effects = rates._effect_slots
    held = await one.enter(0, said_nothing)

    async def effect():
        async with effects:
            return await one.enter(0, lambda _: told.set())

    told = asyncio.Event()
    waits = asyncio.create_task(effect())
    await told.wait()
    async with effects:  # there is one place, and it is free
        one.leave(held, None)
        # It has its turn, and waits for a place.
        await asyncio.sleep(0)
        assert not waits.done()
    one.leave(await asyncio.wait_for(waits, 50), None)

    held = await one.enter(0, said_nothing)
    told = asyncio.Event()
    waits = asyncio.create_task(effect())
    await told.wait()
    waits.cancel()
    await asyncio.wait((waits,))
    # Nothing is left of one that was cancelled: neither its place in the queue nor one too many among the effects.
    one.leave(held, None)
    one.leave(await asyncio.wait_for(asyncio.create_task(one.enter(0, lambda _: None)), 50), None)
    async with effects:
        assert effects.locked()


@pytest.mark.spec("durable:U21")
async def test_lost_connection_is_reopened(worker):
    rates, one = await worker(requests_per_minute=1000)
    one.leave(await one.enter(5, said_nothing), 4)
    (pid,) = await (await rates._own.execute("select pg_backend_pid()")).fetchone()
    rows(rates._url, "select pg_terminate_backend(%s)", pid)
    one.leave(await asyncio.wait_for(one.enter(5, said_nothing), 50), 4)


@pytest.mark.speed
@pytest.mark.spec("durable:U21")
async def test_unblocked_request_needs_one_query(worker, monkeypatch):
    asked = []
    ask = SharedRates.request_admissions

    async def counted(self, *given):
        asked.append(given)
        return await ask(self, *given)

    monkeypatch.setattr(SharedRates, "request_admissions", counted)
    _, one = await worker(requests_per_minute=1000)
    for _ in range(20):
        one.leave(await one.enter(5, said_nothing), 4)
    assert 20 == len(asked)
    # Those that come together are asked for together.
    tickets = await asyncio.gather(*[one.enter(5, said_nothing) for _ in range(20)])
    assert 20 == len(tickets)
    assert 22 >= len(asked)


@pytest.mark.spec("durable:U21")
async def test_database_error_fails_the_request_without_hanging(worker, db: str):
    _, one = await worker(max_concurrency=1)
    rows(db, "drop table stepengine.rate_workers")
    with pytest.raises(StepEngineError, match=r"test:key.*cannot be read"):
        await asyncio.wait_for(one.enter(0, said_nothing), 50)


class Verdict(BaseException):
    """The error of a test framework that fails a test."""


@pytest.mark.spec("durable:U21")
async def test_base_exception_fails_the_request_without_hanging(worker, monkeypatch):
    async def fail(self, *given):
        raise Verdict("no")

    _, one = await worker(max_concurrency=1)
    monkeypatch.setattr(SharedRates, "request_admissions", fail)
    with pytest.raises(StepEngineError, match=r"test:key.*cannot be read: no"):
        await asyncio.wait_for(one.enter(0, said_nothing), 50)


@pytest.mark.spec("durable:U21")
async def test_missing_tables_error_names_the_migrate_command(db: str):
    rates = SharedRates(RateLimit(max_concurrency=1), db)
    with pytest.raises(StepEngineError, match="stepengine deploy migrate"):
        await rates.open(asyncio.Semaphore(1), migrate=False)


# --- workers ----------------------------------------------------------------------------------------------------------


def asks(ctx: StepContext):
    said = yield STEP
    return said.text


ASKS = AgentDefinition("asks", model="test/m", handle_steps=asks)


@pytest.mark.deep
@pytest.mark.spec("durable:U21")
async def test_nothing_is_written_without_a_limit(db: str):
    async with engine(db) as plain:
        assert "hi" == (await plain.run(ASKS, "")).output
        assert plain._rates is None
    assert [(None,)] == rows(db, "select to_regclass('stepengine.rate_seconds')::text")

    async with engine(db, rate_limits={"test": RateLimit(requests_per_minute=5)}) as limited:
        assert "hi" == (await limited.run(ASKS, "")).output
    assert [("test:", 1)] == rows(db, "select account, requests from stepengine.rate_seconds")


def engine(db: str, **options) -> DurableEngine:
    models = Models({"test": ScriptedModel([text("hi")] * 50)})
    return worker_of(
        [ASKS, HOLDS], db, **{"models": models, "executor": "rates-1", "release": "1", "pricing": None, **options}
    )


def holds(ctx: StepContext):
    yield from Perform.idempotent(held, ctx.prompt)


async def held(name: str) -> str:
    BEGUN.append(name)
    await GATE[0].wait()
    return name


HOLDS = AgentDefinition("holds", handle_steps=holds)
BEGUN: list[str] = []
GATE: list[asyncio.Event] = []


@pytest.mark.deep
@pytest.mark.spec("durable:U21")
async def test_starts_of_runs_are_limited_across_workers(db: str, until):
    async with engine(db, starts_per_minute=3) as worker:
        runs = [await worker.submit(ASKS, "") for _ in range(5)]
        states = "select count(*) from dbos.workflow_status where status = %s"
        first = await until(
            lambda: worker.operator.deployment.fetch_rows(states, "SUCCESS"), lambda found: found >= [(3,)]
        )
        (queue,) = [
            queue
            for queue in await DeploymentMaintenance(worker.operator).list_queue_settings()
            if queue.name == "se.default.d0"
        ]
        assert [(3,)] == first
        assert [(2,)] == await worker.operator.deployment.fetch_rows(states, "ENQUEUED")
        assert (3, 60.0) == (queue.limit, queue.period)
        # A minute later.
        rows(
            db,
            "update dbos.workflow_status set started_at_epoch_ms = started_at_epoch_ms - 60000 where status = 'SUCCESS'",
        )
        for run in runs:
            await worker.result(run)


@pytest.mark.deep
@pytest.mark.spec("durable:U21")
async def test_global_concurrency_limits_root_runs_across_workers(db: str, until):
    BEGUN.clear()
    GATE[:] = [asyncio.Event()]
    async with engine(db, global_concurrency=2) as worker:
        runs = [await worker.submit(HOLDS, str(number)) for number in range(4)]
        await until(begun, lambda count: 2 == count)
        view = await DeploymentMaintenance(worker.operator).list_queue_settings()
        states = dict(
            await worker.operator.deployment.fetch_rows(
                "select status, count(*) from dbos.workflow_status group by status"
            )
        )
        assert {"PENDING": 2, "ENQUEUED": 2} == states
        assert {"se.default.d0": (2, 2)} == {
            queue.name: (queue.global_concurrency, queue.worker_concurrency)
            for queue in view
            if queue.global_concurrency
        }
        GATE[0].set()
        for run in runs:
            await worker.result(run)
    assert 4 == len(BEGUN)


async def begun() -> int:
    return len(BEGUN)


@pytest.mark.parametrize("option", ["concurrency", "depth"])
def test_zero_bound_is_rejected(option: str):
    with pytest.raises(DefinitionError, match=f"{option}=0"):
        engine("postgresql://nobody@127.0.0.1:1/none", **{option: 0})


# --- the command line -------------------------------------------------------------------------------------------------


AGENT_FILE = """
from stepengine import AgentDefinition, RateLimit
agents = [AgentDefinition("a")]
options = {"rate_limits": RATES}
"""


@pytest.mark.parametrize(
    ("known", "typed", "expected"),
    [
        (
            '{"openai": RateLimit(max_concurrency=4), "local": RateLimit(max_concurrency=1)}',
            [
                "--requests-per-minute",
                "openai=50",
                "--tokens-per-minute",
                "openai=9000",
                "--max-concurrency",
                "local=2",
            ],
            {
                "openai": RateLimit(requests_per_minute=50, tokens_per_minute=9000, max_concurrency=4),
                "local": RateLimit(max_concurrency=2),
            },
        ),
        ("RateLimit(max_concurrency=8)", [], RateLimit(max_concurrency=8)),
        ("RateLimit(max_concurrency=8)", ["--max-concurrency", "openai=8"], "one limit for all providers"),
        ("None", ["--max-concurrency", "openai"], "write PROVIDER=NUMBER, such as anthropic=50"),
    ],
)
def test_typed_limits_override_limits_of_the_module(
    known: str, typed: list[str], expected: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    given: dict[str, object] = {}

    def noted(*_: object, **options: object) -> None:
        given.update(options)
        raise DatabaseUnavailable("noted")

    monkeypatch.setattr("stepengine.durable.DurableEngine", noted)
    (tmp_path / "agents_here.py").write_text(AGENT_FILE.replace("RATES", known))
    words = [
        "deploy",
        "worker",
        str(tmp_path / "agents_here.py"),
        "--db",
        "postgresql://host/x",
        "--global-concurrency",
        "7",
        "--starts-per-minute",
        "9",
    ]
    result = CliRunner().invoke(app, [*words, *typed])

    if isinstance(expected, str):
        assert (2, True) == (result.exit_code, expected in " ".join(result.stderr.split()))
    else:
        assert 6 == result.exit_code, result.output
        assert {"rate_limits": expected, "global_concurrency": 7, "starts_per_minute": 9} == {
            name: given[name] for name in ("rate_limits", "global_concurrency", "starts_per_minute")
        }


async def test_rate_status_shows_accounts_without_keys(worker, db: str):
    shown = await asyncio.to_thread(CliRunner().invoke, app, ["deploy", "status", "--rates", "--db", db])
    assert "ACCOUNT  ACTIVE  WAITING  REQUESTS/MIN  TOKENS/MIN\n" == shown.stdout

    _, one = await worker("fingerprint", max_concurrency=1)
    await one.enter(70, said_nothing)
    waits = await taken(one, tokens=5)
    shown = await asyncio.to_thread(CliRunner().invoke, app, ["deploy", "status", "--rates", "--db", db])
    assert ["test:fingerprint", "1", "1", "1", "70"] == shown.stdout.splitlines()[1].split()
    waits.cancel()
    await asyncio.wait((waits,))
