"""Shares of owners: event streams and requests of one caller leave room for those of the others."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepengine import AgentDefinition, Ask, Engine, Receive, Sleep, call, tool
from stepengine.adapters.mcp import AgentServer, owned_sessions
from stepengine.server import Caps, Quotas, run_recovery
from stepengine.server.ledger import Ledger
from stepengine.server.owner_shares import OwnerShares
from tests.cases import case
from tests.server.behind import kind_of
from tests.server.house import House, ended, started
from tests.waits import until

CAPS = Caps(at_once=16)
SHARE = 12
"""What one caller may have open of 16."""


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    with House(tmp_path, caps=CAPS).open() as opened:
        yield opened


@contextlib.contextmanager
def streams(client: httpx2.Client, run: str, count: int) -> Iterator[list[httpx2.Response]]:
    """Keep event streams of a run open within the block."""
    with ExitStack() as stack:
        yield [stack.enter_context(client.stream("GET", f"/runs/{run}/events")) for _ in range(count)]


# --- the shares -------------------------------------------------------------------------------------------------------


@pytest.mark.deep
@pytest.mark.smoke
@given(st.integers(1, 60), st.floats(0, 0.9), st.lists(st.tuples(st.sampled_from("abcd"), st.booleans()), max_size=200))
def test_owner_without_slot_gets_one_while_any_is_free(
    slots: int, reserve: float, acts: list[tuple[str, bool]]
) -> None:
    shares, held = OwnerShares(slots, reserve), {name: list[ExitStack]() for name in "abcd"}
    for name, is_wanted in acts:
        free = slots - sum(len(one) for one in held.values())
        assert free >= 0
        if not held[name]:
            assert shares.has_room(name) == (free > 0)
        if is_wanted and shares.has_room(name):
            held[name].append(ExitStack())
            held[name][-1].enter_context(shares.use_slot(name))
        elif not is_wanted and held[name]:
            held[name].pop().close()

        assert [len(held[one]) for one in "abcd"] == [shares.count_used_slots(one) for one in "abcd"]


@pytest.mark.parametrize(("slots", "reserve", "most"), [(768, 0.25, 576), (16, 0.25, 12), (16, 0, 16), (1, 0.25, 1)])
def test_single_owner_uses_all_slots_but_the_reserve(slots: int, reserve: float, most: int) -> None:
    shares, used = OwnerShares(slots, reserve), 0
    with ExitStack() as stack:
        while shares.has_room("anna"):
            stack.enter_context(shares.use_slot("anna"))
            used += 1

    assert most == used


@pytest.mark.parametrize("reserve", [-0.1, 1, float("nan"), True, "0.5"])
def test_invalid_reserve_raises(reserve: Any) -> None:
    with pytest.raises(Exception, match="must be a number of at least 0 and below 1"):
        Caps(reserve=reserve)


# --- over HTTP --------------------------------------------------------------------------------------------------------

SAID = {"role": "user", "id": "m", "content": "Rome", "parts": [{"type": "text", "text": "Rome"}]}
LISTENING = {"accept": "application/json, text/event-stream"}
STREAMED = {
    "events": ("GET", "/runs/{run}/events", None),
    "AG-UI": ("POST", "/ag-ui/asker", {"threadId": "t", "runId": "r", "messages": [SAID]}),
    "AG-UI again": ("POST", "/ag-ui/asker/connect", {"threadId": "t", "runId": "r", "messages": []}),
    "AI SDK": ("POST", "/vercel/asker", {"id": "c", "messages": [SAID]}),
    "AI SDK again": ("GET", "/vercel/asker/c/stream", None),
    "MCP": ("POST", "/mcp", {"jsonrpc": "2.0", "id": 1, "method": "ping"}),
    "MCP listening": ("GET", "/mcp", None),
}


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("studio:SV34")
def test_streams_above_an_owner_share_are_rejected_without_effect(house: House) -> None:
    with house.client() as client, house.client("bob") as other:
        run = started(client)
        with streams(client, run, SHARE):
            for protocol, (method, path, body) in STREAMED.items():
                with case(protocol):
                    refused = client.request(method, path.format(run=run), json=body, headers=LISTENING)
                    assert (429, "too_many_at_once") == (refused.status_code, kind_of(refused))
                    assert "5" == refused.headers["retry-after"]
                    assert "close some of them first" in refused.json()["detail"]
            listed = client.get("/runs").json()["runs"]
            of_bob = other.get("/runs")
            with streams(other, started(other), 1) as watching:
                of_bob_streamed = watching[0].status_code
            cancelled = client.post(f"/runs/{run}/cancel")

    assert [run] == [one["run_id"] for one in listed]
    assert (200, 200, 202) == (of_bob.status_code, of_bob_streamed, cancelled.status_code)


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("studio:SV34")
def test_closed_stream_frees_its_slot(house: House) -> None:
    with house.client() as client:
        run = started(client)
        with streams(client, run, SHARE):
            assert 429 == client.get(f"/runs/{run}/events").status_code

        def is_open() -> bool:
            with streams(client, run, 1) as opened:
                return opened[0].status_code == 200

        until(is_open)


@pytest.mark.spec("studio:SV34")
def test_request_without_free_slot_gets_503(tmp_path: Path) -> None:
    with House(tmp_path, caps=Caps(at_once=1)).open() as house, house.client() as client, house.client("bob") as other:
        run = started(client)
        with streams(client, run, 1):
            refused = other.get("/runs")

    assert (503, "server_full", "5") == (refused.status_code, kind_of(refused), refused.headers["retry-after"])


@pytest.mark.spec("studio:SV32")
def test_event_streams_above_their_quota_are_rejected(tmp_path: Path) -> None:
    with House(tmp_path, quotas=Quotas(event_streams=2)).open() as house, house.client() as client:
        run = started(client)
        with streams(client, run, 2):
            refused = client.get(f"/runs/{run}/events")

    assert (429, "quota_exceeded", "event_streams", 2) == (
        refused.status_code, kind_of(refused), refused.json()["quota"], refused.json()["limit"],
    )  # fmt: skip
    assert "5" == refused.headers["retry-after"]


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("interfaces:IF13")
def test_waiting_runs_of_one_owner_leave_room_for_others(tmp_path: Path) -> None:
    with House(tmp_path, max_live=8).open() as house, house.client() as client, house.client("bob") as other:
        runs = [started(client) for _ in range(6)]
        refused = client.post("/runs", json={"agent": "asker"})
        of_bob = other.post("/runs", json={"agent": "asker"})
        client.post(f"/runs/{runs[0]}/cancel")
        until(lambda: client.post("/runs", json={"agent": "asker"}).status_code == 202)

    assert (429, "too_many_at_once", "5") == (refused.status_code, kind_of(refused), refused.headers["retry-after"])
    assert "6 runs of this caller are running" in refused.json()["detail"]
    assert 202 == of_bob.status_code


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("interfaces:IF13")
def test_starts_that_arrive_together_leave_the_share_of_others(tmp_path: Path) -> None:
    with House(tmp_path, max_live=4).open() as house, house.client() as client, house.client("bob") as other:

        def start(_: int) -> int:
            return client.post("/runs", json={"agent": "asker"}).status_code

        with ThreadPoolExecutor(12) as pool:
            statuses = list(pool.map(start, range(12)))
        of_bob = other.post("/runs", json={"agent": "asker"})

    assert [202] * 3 + [429] * 9 == sorted(statuses)
    assert 202 == of_bob.status_code


def receives_and_asks(ctx: Any) -> Any:
    yield from Receive("go")
    return (yield from Ask("On which day?"))


class ReceivingHouse(House):
    def engine(self) -> Engine:
        return Engine([AgentDefinition("receiver", handle_steps=receives_and_asks)])


@pytest.mark.deep
@pytest.mark.spec("interfaces:IF13")
def test_runs_that_messages_resume_leave_the_share_of_others(tmp_path: Path) -> None:
    with ReceivingHouse(tmp_path, max_live=4).open() as house, house.client() as client, house.client("bob") as other:

        def start() -> Any:
            answer = client.post("/runs", json={"agent": "receiver"})
            return answer.status_code == 202 and answer.json()["run_id"]

        def asking() -> dict[str, str]:
            views = [client.get(f"/runs/{run}").json() for run in runs]
            return {one["run_id"]: one["questions"][0]["id"] for one in views if one["questions"]}

        runs = [until(start) for _ in range(5)]
        until(lambda: all(client.get(f"/runs/{run}").json()["status"] == "suspended" for run in runs))
        for run in runs:
            assert 202 == client.post(f"/runs/{run}/messages", json={"topic": "go"}).status_code
        first = until(lambda: len(found := asking()) == 3 and found)
        of_bob = other.post("/runs", json={"agent": "receiver"})
        for run, question in first.items():
            client.post(f"/runs/{run}/answers", json={"answers": {question: "Monday"}})
        rest = until(lambda: len(found := asking()) == 2 and found)

    assert 202 == of_bob.status_code
    assert {*runs} == {*first, *rest}


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("studio:SV34")
def test_long_searches_of_one_owner_leave_threads_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed, is_there, may_go = Ledger.list_runs, threading.Event(), threading.Event()

    def search(self: Ledger, **options: Any) -> Any:
        is_there.set()
        may_go.wait()
        return listed(self, **options)

    with House(tmp_path).open() as house, house.client() as client, house.client("bob") as other:
        run = started(other)
        monkeypatch.setattr(Ledger, "list_runs", search)
        with ThreadPoolExecutor(40) as pool:
            searches = [pool.submit(client.get, "/runs?search=x") for _ in range(40)]
            is_there.wait()
            try:
                answer = other.get(f"/runs/{run}")
            finally:
                may_go.set()
            found = {one.result().status_code for one in searches}

    assert 200 == answer.status_code
    assert {200} == found


@pytest.mark.spec("studio:SV12")
def test_mcp_session_above_the_limit_closes_the_owners_oldest(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owned_sessions, "SESSIONS_PER_OWNER", 4)
    with house.client() as client, house.client("bob") as other:
        of_bob, first, second = opened_session(other), opened_session(client), opened_session(client)
        assert 202 == in_session(client, first).status_code
        more = [opened_session(client) for _ in range(3)]

        assert 404 == in_session(client, second).status_code
        assert 202 == in_session(client, first).status_code
        assert {202} == {in_session(client, one).status_code for one in more}
        assert 202 == in_session(other, of_bob).status_code


def test_failed_start_of_mcp_is_reported_and_tried_again(
    house: House, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    @contextlib.asynccontextmanager
    async def fail(_: object) -> Any:
        msg = "no room"
        raise OSError(msg)
        yield

    with house.client() as client:
        with monkeypatch.context() as patch:
            patch.setattr(AgentServer, "open_http", fail)
            refused = client.post("/mcp", json={})

        assert (500, "internal") == (refused.status_code, kind_of(refused))
        assert opened_session(client)
    caplog.clear()  # it holds the frames of the error, and they hold the engine with its open folder


def opened_session(client: httpx2.Client) -> str:
    """Open an MCP session and return its id."""
    known = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "x", "version": "1"}}
    hello = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": known}
    opened = client.post("/mcp", json=hello, headers=LISTENING)
    assert 200 == opened.status_code, opened.text
    return str(opened.headers["mcp-session-id"])


def in_session(client: httpx2.Client, session: str) -> httpx2.Response:
    """Send a notification within an MCP session."""
    headers = {**LISTENING, "mcp-session-id": session, "mcp-protocol-version": "2025-11-25"}
    return client.post("/mcp", json={"jsonrpc": "2.0", "method": "notifications/initialized"}, headers=headers)


def sleeps(ctx: Any) -> Any:
    yield Sleep(float(ctx.prompt))
    return "awake"


@tool
async def work() -> str:
    """Work for a minute."""
    await asyncio.sleep(60)
    return "done"


def works(ctx: Any) -> Any:
    return (yield from call(work))


class SleepingHouse(House):
    def engine(self) -> Engine:
        return Engine(
            [
                AgentDefinition("sleeper", handle_steps=sleeps),
                AgentDefinition("worker", tools=[work], handle_steps=works),
            ],
            sleep_in_process=0,
        )


@pytest.mark.deep
@pytest.mark.spec("interfaces:IF13")
def test_due_runs_of_one_owner_keep_none_of_others_asleep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_recovery, "MAX_DUE", 4)
    monkeypatch.setattr(run_recovery, "MAX_DUE_OF_OWNER", 1)
    options = {"max_live": 4, "wait_for_answers": 0}
    with SleepingHouse(tmp_path, **options).open() as house, house.client() as client, house.client("bob") as other:

        def is_started(agent: str, prompt: str = "") -> bool:
            return client.post("/runs", json={"agent": agent, "prompt": prompt}).status_code == 202

        for _ in range(12):
            until(lambda: is_started("sleeper", "4"))
        for _ in range(3):
            until(lambda: is_started("worker"))
        run = started(other, "sleeper", "5")

        assert "completed" == ended(other, run)["status"]
