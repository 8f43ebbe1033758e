"""
Agents below ``serving.app`` as tools of MCP: each call is a run of its caller, which the ledger knows and a restart does not end.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest

pytest.importorskip("mcp", reason="needs the extra 'mcp'")

import mcp_types as types
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

from stepengine import AgentDefinition, Ask, Engine, Perform, Receive
from stepengine.server import Tokens

from .served import Address, served

MODES = pytest.mark.parametrize("mode", ["auto", "legacy"])


def asking(ctx: Any) -> Any:
    size = yield from Ask("Which size?", ["s", "m"])
    return f"{ctx.prompt} {size}"


def receiving(ctx: Any) -> Any:
    return (yield from Receive("hook"))


class Shop:
    """
    Agents that ask, wait, or take their time until ``gate`` opens.
    """

    def __init__(self) -> None:
        self.gate, self.has_begun, self.ended = asyncio.Event(), asyncio.Event(), list[str]()

        async def take_time() -> str:
            self.has_begun.set()
            try:
                await self.gate.wait()
            except asyncio.CancelledError:
                self.ended.append("cancelled")
                raise
            return "done"

        def slow(ctx: Any) -> Any:
            return (yield from Perform(take_time))

        agents = [("shop", asking), ("receiver", receiving), ("slow", slow)]
        self.engine = Engine([AgentDefinition(name, handle_steps=steps) for name, steps in agents])


@asynccontextmanager
async def calling(
    address: Address, mode: str = "auto", headers: dict[str, str] | None = None, **options: Any
) -> AsyncIterator[Client]:
    async with (
        httpx2.AsyncClient(headers=headers or address.headers, timeout=30, trust_env=False) as web,
        Client(streamable_http_client(f"{address.url}/mcp", http_client=web), mode=mode, **options) as client,
    ):
        yield client


def saying(answer: str, asked: list[str]) -> Callable[..., Any]:
    async def say(ctx: Any, params: Any) -> types.ElicitResult:
        asked.append(params.message)
        return types.ElicitResult(action="accept", content={"answer": answer})

    return say


async def listed(address: Address, headers: dict[str, str] | None = None) -> list[tuple[str, str, str]]:
    async with httpx2.AsyncClient(headers=headers or address.headers, trust_env=False) as web:
        runs = (await web.get(f"{address.url}/runs")).json()["runs"]
    return [(one["agent"], one["owner"], one["status"]) for one in runs]


@pytest.mark.deep
@pytest.mark.spec("studio:SV12")
@MODES
async def test_mcp_call_is_a_run_that_elicits_its_questions(mode: str, tmp_path: Path) -> None:
    asked: list[str] = []
    async with served(tmp_path, Shop().engine) as address:
        async with calling(address, mode, elicitation_callback=saying("m", asked)) as client:
            tools = [one.name for one in (await client.list_tools()).tools]
            result = await client.call_tool("shop", {"prompt": "shoes"})
        runs = await listed(address)
        journal = tmp_path / "runs" / f"{(result.meta or {})['stepengine/run']}.jsonl"
        is_kept = journal.is_file()

    assert ["shop", "receiver", "slow"] == tools
    assert (["Which size?"], "shoes m") == (asked, result.content[0].text)  # type: ignore[union-attr]
    assert [("shop", "anna", "completed")] == runs
    assert is_kept


@pytest.mark.deep
@pytest.mark.spec("studio:SV12")
async def test_question_is_answered_after_a_restart_only_by_its_caller(tmp_path: Path) -> None:
    shown = saying("m", [])  # that it shows questions is what counts
    async with served(tmp_path, Shop().engine) as address, calling(address, elicitation_callback=shown) as client:
        waits = await client.session.call_tool("shop", {"prompt": "shoes"}, allow_input_required=True)
    assert isinstance(waits, types.InputRequiredResult)
    (question,) = waits.input_requests or {}
    given: Any = {question: types.ElicitResult(action="accept", content={"answer": "m"})}
    more: Any = {"input_responses": given, "request_state": waits.request_state}
    async with served(tmp_path, Shop().engine) as address:
        bob = {"authorization": f"Bearer {Tokens.open(tmp_path / 'tokens.json').add('bob', ['run', 'answer'])}"}
        async with calling(address, headers=bob) as client:
            stolen = await client.call_tool("shop", {}, **more)
        async with calling(address) as client:
            answered = await client.call_tool("shop", {}, **more)
            late = await client.call_tool("shop", {}, **more)

    assert [True, False, True] == [bool(one.is_error) for one in (stolen, answered, late)]
    assert "is not known here" in stolen.content[0].text  # type: ignore[union-attr]
    assert "shoes m" == answered.content[0].text  # type: ignore[union-attr]


@pytest.mark.deep
@pytest.mark.spec("studio:SV12")
@MODES
async def test_caller_without_answer_scope_is_notified_of_the_waiting_run(mode: str, tmp_path: Path) -> None:
    asked: list[str] = []
    async with served(tmp_path, Shop().engine) as address:
        runner = {"authorization": f"Bearer {Tokens.open(tmp_path / 'tokens.json').add('runner', ['run', 'read'])}"}
        async with calling(address, mode, headers=runner, elicitation_callback=saying("m", asked)) as client:
            result = await client.call_tool("shop", {"prompt": "shoes"})
        runs = await listed(address, runner)

    told = result.content[0].text  # type: ignore[union-attr]
    assert "whoever called may not answer:\n- Which size?" in told
    assert (result.meta or {})["stepengine/run"] in told
    assert ([], [("shop", "runner", "suspended")]) == (asked, runs)


@pytest.mark.spec("studio:SV12")
async def test_run_waiting_for_a_message_is_reported_and_continues_alone(tmp_path: Path) -> None:
    async with served(tmp_path, Shop().engine) as address:
        async with calling(address) as client:
            result = await client.call_tool("receiver", {})
        run = (result.meta or {})["stepengine/run"]
        async with httpx2.AsyncClient(base_url=address.url, headers=address.headers, trust_env=False) as web:
            await web.post(f"/runs/{run}/messages", json={"topic": "hook", "value": "hello"})
            async with asyncio.timeout(50):
                while (view := (await web.get(f"/runs/{run}")).json())["status"] != "completed":  # noqa: ASYNC110 - the server knows
                    await asyncio.sleep(0.01)

    assert f"it is kept as the run '{run}' of this server" in result.content[0].text  # type: ignore[union-attr]
    assert "hello" == view["output"]


@pytest.mark.spec("studio:SV12")
@pytest.mark.deep
async def test_cancelled_mcp_call_cancels_its_run(tmp_path: Path) -> None:
    shop = Shop()
    async with served(tmp_path, shop.engine) as address, calling(address) as client:
        call = asyncio.create_task(client.call_tool("slow", {}))
        await shop.has_begun.wait()
        call.cancel()
        await asyncio.wait((call,))
        async with asyncio.timeout(50):
            while (runs := await listed(address)) != [("slow", "anna", "cancelled")]:  # noqa: ASYNC110 - the server knows
                await asyncio.sleep(0.01)

    assert ["cancelled"] == shop.ended
    assert 1 == len(runs)


@pytest.mark.spec("studio:SV12", "studio:SV4")
async def test_mcp_session_is_private_and_requires_a_token(tmp_path: Path) -> None:
    hello = {
        "jsonrpc": "2.0", "id": 1, "method": "initialize",
        "params": {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "x", "version": "1"}},
    }  # fmt: skip
    lists = {"jsonrpc": "2.0", "id": 2, "method": "tools/list", "params": {}}
    accept = {"accept": "application/json, text/event-stream"}
    async with served(tmp_path, Shop().engine) as address:
        tokens = Tokens.open(tmp_path / "tokens.json")
        bob = {"authorization": f"Bearer {tokens.add('bob', ['run', 'answer'])}"}
        reader = {"authorization": f"Bearer {tokens.add('reader', ['read'])}"}
        async with httpx2.AsyncClient(base_url=address.url, headers=accept, trust_env=False) as web:
            begun = await web.post("/mcp", json=hello, headers=address.headers)
            session = {"mcp-session-id": begun.headers["mcp-session-id"], "mcp-protocol-version": "2025-11-25"}
            told = [
                (await web.post("/mcp", json=lists, headers={**session, **who})).status_code
                for who in (address.headers, bob, reader, {})
            ]
            broken = await web.post(
                "/mcp", content=b"{", headers={**address.headers, "content-type": "application/json"}
            )
            odd = await web.get("/mcp", headers={**address.headers, "accept": "text/html"})

    assert 200 == begun.status_code
    assert [200, 404, 403, 401] == told
    assert (400, 406) == (broken.status_code, odd.status_code)


@pytest.mark.spec("studio:SV12")
@pytest.mark.parametrize("why", ["extra", "nobody"])
async def test_mcp_route_reports_why_agents_are_not_offered(
    why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why == "extra":
        monkeypatch.setattr("stepengine.server.mcp.find_spec", lambda name: None)
    offered = {} if why == "extra" else {"agents": []}
    async with (
        served(tmp_path, Shop().engine, **offered) as address,
        httpx2.AsyncClient(base_url=address.url, headers=address.headers, trust_env=False) as web,
    ):
        answer, agents = await web.post("/mcp", json={}), await web.get("/agents")

    kind = {"extra": "extra_missing", "nobody": "not_offered"}[why]
    assert (501, f"urn:stepengine:problem:{kind}") == (answer.status_code, answer.json()["type"])
    assert 200 == agents.status_code


@pytest.mark.deep
@pytest.mark.spec("studio:SV12")
async def test_active_mcp_call_continues_after_a_server_restart(tmp_path: Path) -> None:
    shop, calls = Shop(), list[asyncio.Task[Any]]()

    async def call() -> None:
        with suppress(Exception):  # the connection ends with the server
            async with calling(address) as client:
                await client.call_tool("slow", {})

    async with served(tmp_path, shop.engine) as address:
        calls.append(asyncio.create_task(call()))
        await shop.has_begun.wait()
    calls[0].cancel()
    await asyncio.wait(calls)
    again = Shop()
    again.gate.set()
    async with served(tmp_path, again.engine) as address, asyncio.timeout(50):
        while (runs := await listed(address)) == [("slow", "anna", "running")]:  # noqa: ASYNC110 - the server knows
            await asyncio.sleep(0.01)

    assert ["slow"] == [agent for agent, _, _ in runs]
    assert "cancelled" != runs[0][2]


class Reloads:
    """
    The files of an engine, of which a test makes the next one.
    """

    has_load_failed = False

    def __init__(self) -> None:
        self.next: Engine | None = None

    def mark_and_report_changed_files(self, *, retry: bool = True) -> bool:
        return self.next is not None

    async def require_loadable_in_child_process(self) -> None:
        pass

    def reload_engine(self) -> Engine:
        made, self.next = self.next, None
        assert made is not None
        return made


@pytest.mark.spec("studio:SV12")
async def test_open_session_is_offered_the_reloaded_agents(tmp_path: Path) -> None:
    def engine(*names: str) -> Engine:
        return Engine([AgentDefinition(name, handle_steps=asking) for name in names])

    files, offered = Reloads(), []
    async with served(tmp_path, engine("shop"), sources=files) as address, calling(address, "legacy") as client:
        for names in (("shop",), ("store", "shop"), ("store",)):
            files.next = engine(*names)
            offered.append(sorted(one.name for one in (await client.list_tools()).tools))

    assert [["shop"], ["shop", "store"], ["store"]] == offered
