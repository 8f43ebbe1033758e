"""
Servers that are killed with SIGKILL while many use them: nothing that was accepted is lost, and nothing happens twice.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import signal
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from stepengine.journal.mailbox import MailboxMessage
from stepengine.server.ledger import Ledger

from .served import Client, Serve, Served

pytestmark = pytest.mark.usefixtures("forks")
AGENTS = ("working", "asking", "waiting", "ordering", "talking")


async def check_all(client: Client, server: Served) -> None:
    """
    Check each run of a client: in its journal, in the world, and in what the client saw.
    """
    fired = server.world.done("fire")
    for run, agent in client.runs.items():
        history = server.journal(run).history()
        view, seen = client.views[run], client.seen[run]
        where = f"{agent} {run}"

        assert "completed" == view["status"], (where, view)
        assert history.is_complete, where
        calls = {a for a, i in history.intents.items() if i.type == "tool_call"}
        assert calls <= history.results.keys(), where
        forms = [history.form(history.intents[a]) for a in calls]
        for name in [form["input"]["name"] for form in forms if form["tool_name"] == "fire"]:
            # In a database nobody is asked about a call that was cut off, also one that had not begun: its handler is told.
            is_unknown = bool(server.db) and not fired[name] and "unknown" in str(view["output"])
            assert 1 == fired[name] or is_unknown, (where, name, fired[name])
        # One text, as pytest shortens others: what a server that answers 500 fell over stands in its log alone.
        assert [] == seen.problems, f"{where}: {seen.told()}\n{server.log.read_text()[-40_000:]}"
        assert view["status"] == seen.events[-1]["status"], where
        missing = await seen.unseen(server.journal(run))
        assert not missing or seen.was_told, (where, missing)
        for value in client.said[run]:
            assert value in str(view["output"]), (where, value, view)


async def under_load(servers: list[Served], *, clients: int, kills: int, seed: int, least: int = 0) -> list[Client]:
    """
    Let clients use the servers, kill one of these at a time, and return the clients when all of their runs have ended.

    Each client starts every agent once, and *least* runs, however slow the machine is.
    """
    # In a database no call of a deferred tool waits.
    agents = [agent for agent in AGENTS if not (servers[0].db and agent == "ordering")]
    chance = random.Random(seed)
    goes_on = True
    for server in servers:
        server.start()
    await asyncio.gather(*[server.ready() for server in servers])
    urls = [server.url for server in servers]

    async def use(client: Client) -> None:
        number = 0
        while goes_on or number < max(least, len(agents)):
            agent = agents[(number + len(client.name)) % len(agents)] if number < len(agents) else chance.choice(agents)
            number += 1
            run = await client.start(agent, number)
            try:
                await asyncio.wait_for(client.see_through(run), 90)
            except TimeoutError:
                view = (await client.ask("GET", f"/runs/{run}")).json()
                pytest.fail(
                    f"{agent} does not end: {view}; said {client.said[run]}; seen {client.seen[run].events[-3:]}; {servers[0].said()}"
                )

    async with AsyncExitStack() as stack:
        users = [
            await stack.enter_async_context(servers[0].client(name, urls))
            for name in [f"user{n}" for n in range(clients)]
        ]
        using = [asyncio.create_task(use(client)) for client in users]
        try:
            for _ in range(kills):
                server = chance.choice(servers)
                await asyncio.sleep(chance.uniform(0.1, 1.6))
                await server.restart()
            goes_on = False
            await asyncio.gather(*using)
        finally:
            for task in using:
                task.cancel()
            await asyncio.gather(*using, return_exceptions=True)
        for client in users:
            assert sorted(client.runs) == sorted([one async for one in client.listed()])
    return users


@pytest.mark.spec("studio:SV3")
@pytest.mark.deep
async def test_kill_after_an_answer_loses_no_answered_run(serve: Serve, tmp_path: Path) -> None:
    server = await serve(tmp_path / "runs", patience=0.0, environment={"SLOW": "1"})
    async with server.client("anna") as client:
        run = await client.start("asking", 1)
        for name in ("q1", "q2"):
            view = await client.until(run, lambda view, name=name: [name] == [one["id"] for one in view["questions"]])
            await client.answer(run, view["questions"][0])
        await server.world.until("fire", "anna-1-2")
        await server.restart()
        view = await asyncio.wait_for(client.see_through(run), 50)

    assert "unknown" == view["output"][-1]
    await check_all(client, server)


@pytest.mark.spec("studio:SV3")
@pytest.mark.deep
async def test_input_and_cancellation_survive_a_kill(serve: Serve, tmp_path: Path) -> None:
    server = await serve(tmp_path / "runs", environment={"SLOW": "0.2"})
    async with server.client("anna") as client:
        told, ended = [await client.start("talking", number) for number in range(2)]
        said = await client.ask("POST", f"/runs/{told}/input", {"text": "and hurry"})
        cancelled = await client.ask("POST", f"/runs/{ended}/cancel", {"reason": "it is late"})
        await server.restart()
        heard, stopped = [await asyncio.wait_for(client.see_through(run), 30) for run in (told, ended)]

    assert [202, 202] == [said.status_code, cancelled.status_code]
    assert "and hurry" in heard["text"]
    assert "cancelled" == stopped["status"]


@pytest.mark.smoke
@pytest.mark.spec("studio:SV3", "studio:SV11")
@pytest.mark.parametrize("place", ["runs", "runs.db"])
@pytest.mark.deep
async def test_page_reconnects_after_a_kill_and_decides_the_doubtful_call(
    serve: Serve, tmp_path: Path, place: str
) -> None:
    server = await serve(tmp_path / place, environment={"SLOW": "1"})

    def asks(text: str = "", **more: Any) -> dict[str, Any]:
        said = [{"id": "m", "role": "user", "content": text}] if text else []
        return {"threadId": "t", "runId": "r", "messages": said, **more}

    async with server.client("anna") as client:

        async def told(path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
            answer = await client.ask("POST", path, body)
            assert answer.status_code == 200, answer.text
            lines = [line for line in answer.text.split("\n\n") if line.startswith("data: ")]
            return [json.loads(line.removeprefix("data: ")) for line in lines]

        cut = asyncio.create_task(client.post_once("/ag-ui/asking", asks("anna")))
        await server.world.until("fire", "anna-1")
        server.kill()
        assert await cut is None
        server.start()
        await server.ready()
        seen = await told("/ag-ui/asking/connect", asks())
        for payload in ("no", "large", "three"):
            (interrupt,) = seen[-1]["outcome"]["interrupts"]
            entry = {"interruptId": interrupt["id"], "status": "resolved", "payload": payload}
            seen = await told("/ag-ui/asking", asks(resume=[entry]))
        listed = (await client.ask("GET", "/runs")).json()["runs"]

    assert ["unknown", "large", "three", "fired"] == seen[-1]["result"]
    assert [("completed", "t")] == [(one["status"], one["session_id"]) for one in listed]


@pytest.mark.parametrize("place", ["runs", "runs.db"])
@pytest.mark.spec("studio:SV3", "interfaces:IF15")
@pytest.mark.deep
async def test_deferred_result_given_to_another_server_survives_a_kill(
    servers: list[Served], tmp_path: Path, place: str
) -> None:
    holder, other = (Served(tmp_path, tmp_path / place) for _ in range(2))
    servers += [holder, other]
    for server in servers:
        server.start()
        await server.ready()
    async with holder.client("anna") as client:
        run = await client.start("ordering", 1)
        await client.until(run, lambda _: server_waits(holder, run))
        call = next(iter(holder.journal(run).history().facts.pending_results))
        name = holder.journal(run).history().form(holder.journal(run).history().intents[call])["tool_call_id"]
        holder.signal(signal.SIGSTOP)
        client.urls = [other.url]
        path = f"/runs/{run}/tool-results/{name}"
        given = [
            await client.ask("POST", path, {"result": value}) for value in (f"{run}-result", f"{run}-result", "another")
        ]
        strange = await client.ask("POST", f"/runs/{run}/tool-results/nothing", {"result": 1})
        await holder.restart()
        client.said[run].append(f"{run}-result")
        await asyncio.wait_for(client.see_through(run), 30)

    assert [202, 202, 422, 409] == [one.status_code for one in (*given, strange)]
    assert str(holder.place) not in "".join([one.text for one in (*given, strange)])
    await check_all(client, holder)


def server_waits(server: Served, run: str) -> bool:
    return bool(server.journal(run).is_there() and server.journal(run).history().facts.pending_results)


@pytest.mark.spec("studio:SV3")
@pytest.mark.deep
async def test_cancelled_run_is_not_resumed_after_a_kill(serve: Serve, tmp_path: Path) -> None:
    server = await serve(tmp_path / "runs")
    async with server.client("anna") as client:
        run = await client.start("asking", 1)
        await client.until(run, lambda view: view["questions"])
        await client.ask("POST", f"/runs/{run}/cancel")
        await client.until(run, lambda view: view["status"] == "cancelled")
        server.kill()
        before = server.journal(run).content()
        ledger = Ledger(server.place)
        ledger.write([lambda database: database.execute("UPDATE served SET status = 'running'")])
        ledger.close()
        server.start()
        await server.ready()
        view = (await client.ask("GET", f"/runs/{run}")).json()
        listed = (await client.ask("GET", "/runs?status=cancelled")).json()

    assert "cancelled" == view["status"]
    assert [run] == [one["run_id"] for one in listed["runs"]]
    assert before == server.journal(run).content()


@pytest.mark.deep
@pytest.mark.parametrize("place", ["runs.db", "runs"])
@pytest.mark.spec("studio:SV3")
async def test_kills_of_loaded_servers_lose_nothing(servers: list[Served], tmp_path: Path, place: str) -> None:
    servers += [Served(tmp_path, tmp_path / place, patience=0.5) for _ in range(2)]

    users = await under_load(servers, clients=12, kills=20, seed=3, least=9)

    for client in users:
        await check_all(client, servers[0])
    assert sum(len(client.runs) for client in users) > 100


@pytest.mark.spec("studio:SV3")
@pytest.mark.deep
async def test_server_with_too_many_active_runs_is_ready_at_once(servers: list[Served], tmp_path: Path) -> None:
    many, few = (Served(tmp_path, tmp_path / "runs", options=["--max-live", most]) for most in ("8", "2"))
    servers += [many, few]
    many.start()
    await many.ready()
    async with many.client("anna", [many.url, few.url]) as client:
        runs = [await client.start("asking", number) for number in range(4)]
        for run in runs:
            await client.until(run, lambda view: view["questions"])
        many.kill()
        few.start()
        await few.ready()
        await asyncio.wait_for(asyncio.gather(*[client.see_through(run) for run in runs]), 40)

    await check_all(client, few)


# --- being told to stop ----------------------------------------------------------------------------------------------


@pytest.mark.spec("studio:SV3")
@pytest.mark.deep
async def test_draining_server_finishes_runs_and_the_rest_continues_later(serve: Serve, tmp_path: Path) -> None:
    server = await serve(tmp_path / "runs", options=["--drain", "2"], environment={"SLOW": "0.3"})
    async with server.client("anna") as client:
        asking, working = await client.start("asking", 1), await client.start("working", 2)
        await client.until(asking, lambda view: view["questions"])
        left = await asyncio.to_thread(server.kill, signal.SIGTERM)

        assert 0 == left, server.said()
        assert server.journal(working).history().is_complete
        assert not server.journal(asking).history().is_complete

        server.start()
        await server.ready()
        await asyncio.wait_for(asyncio.gather(client.see_through(asking), client.see_through(working)), 30)

    await check_all(client, server)
    assert ["fired"] * 2 == [client.views[asking]["output"][at] for at in (0, -1)]


@pytest.mark.spec("studio:SV3")
@pytest.mark.deep
async def test_call_cut_off_by_shutdown_is_in_doubt_afterwards(serve: Serve, tmp_path: Path) -> None:
    server = await serve(tmp_path / "runs", options=["--drain", "0"], environment={"SLOW": "3"})
    async with server.client("anna") as client:
        run = await client.start("asking", 1)
        await server.world.until("fire", "anna-1-1")
        assert 0 == await asyncio.to_thread(server.kill, signal.SIGTERM), server.said()
        server.start()
        await server.ready()
        view = await asyncio.wait_for(client.see_through(run), 30)

    assert "unknown" == view["output"][0]
    await check_all(client, server)


@pytest.mark.spec("studio:SV3")
@pytest.mark.deep
async def test_unregistered_journal_with_prepared_answers_is_never_resumed(
    servers: list[Served], tmp_path: Path
) -> None:
    first, other = Served(tmp_path, tmp_path / "first", patience=0.0), Served(tmp_path, tmp_path / "other")
    servers += [first, other]
    first.start()
    await first.ready()
    async with first.client("anna") as client:
        run = await client.start("asking", 1)
        await client.until(run, lambda view: view["questions"])
        first.kill()
        box = first.journal(run).mailbox()
        for question in ("q1", "q2"):
            box.send(MailboxMessage(kind="answer", topic=question, value="yes"))
        other.place.mkdir(mode=0o700)
        for file in first.place.glob(f"{run}.jsonl*"):
            shutil.copy2(file, other.place)
    before = {file.name: file.read_bytes() for file in other.place.iterdir()}

    other.start()
    await other.ready()
    async with asyncio.timeout(50):
        while f"run {run} is due" not in other.said():  # noqa: ASYNC110 - another process says so
            await asyncio.sleep(0.05)
    async with Client("operator", other.token("boss", ["admin"]), [other.url], other.world) as boss:
        known = [await boss.ask("GET", f"/runs/{run}"), await boss.ask("POST", f"/runs/{run}/resume")]

    assert [404, 404] == [one.status_code for one in known]
    assert 0 == other.world.done("fire")["anna-1-2"]
    assert before == {name: (other.place / name).read_bytes() for name in before}


@pytest.mark.spec("studio:SV3")
@pytest.mark.deep
async def test_truncated_copy_of_a_journal_is_not_resumed(serve: Serve, tmp_path: Path) -> None:
    server = await serve(tmp_path / "runs", patience=0.0)
    async with server.client("anna") as client:
        run = await client.start("asking", 1)
        await client.see_through(run)
        server.kill()
        lines = (server.place / f"{run}.jsonl").read_bytes().splitlines(keepends=True)
        cut = next(n for n, line in enumerate(lines) if b'"name":"anna-1-2"' in line)
        copies = [
            server.place / f"{name}.jsonl" for name in ("0" * 32, run.replace(run[0], "f" if run[0] != "f" else "e"))
        ]
        for copy in copies:
            copy.write_bytes(b"".join(lines[:cut]))
        server.start()
        await server.ready()
        # What is registered behind it has been looked for and gone on with by then.
        await client.see_through(await client.start("waiting", 2))

    assert 1 == server.world.done("fire")["anna-1-2"]
    assert [b"".join(lines[:cut])] * 2 == [copy.read_bytes() for copy in copies]


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("studio:SV3", "studio:SV4")
def test_run_database_writable_by_others_stops_the_server(servers: list[Served], tmp_path: Path) -> None:
    server = Served(tmp_path, tmp_path / "runs.db")
    servers.append(server)
    server.place.touch()
    server.place.chmod(0o666)
    server.start()

    assert 2 == server.left()
    assert "others may write" in server.said()
