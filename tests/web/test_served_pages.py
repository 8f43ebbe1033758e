"""
Pages below ``serving.app``: whose conversation it is, what is under way, what several servers of a place know, and what is refused.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from itertools import islice
from pathlib import Path
from typing import Any

import httpx2
import pytest

pytest.importorskip("ag_ui", reason="needs the extra 'ag-ui'")

from stepengine import AgentDefinition, Ask, Engine, Receive
from stepengine.server import Caps, Tokens, run_launcher, run_recovery
from stepengine.server.ledger import Ledger
from stepengine.testing import tool_call, tool_calls
from tests.waits import until_async

from .painter import Painter
from .served import served


def asking(ctx: Any) -> Any:
    return (yield from Ask("How large?"))


def receiving(ctx: Any) -> Any:
    return (yield from Receive("hook"))


def reply(request: Any) -> Any:
    said = [message.text for message in request.messages if message.role == "user"]
    if request.messages[-1].role == "tool":
        return f"{request.messages[-1].text} You said {said}."
    words = {
        "Dry.": tool_call("dry", {"what": "door"}, text="Let me see."),
        "Paint.": tool_call("paint", {"what": "door"}),
    }
    return words.get(said[-1], f"You said {said}.")


def make_painter(*replies: Any) -> Painter:
    """
    Return the painter with agents that ask and receive; without *replies* its model says what it was told.
    """
    others = [AgentDefinition("asker", handle_steps=asking), AgentDefinition("receiver", handle_steps=receiving)]
    return Painter(*replies, otherwise=reply, others=others)


class Page:
    """
    A page, by hand: what it sends, and what it is told.
    """

    def __init__(self, client: httpx2.AsyncClient) -> None:
        self.client = client

    async def say(
        self, text: str = "", *, agent: str = "painter", thread: str = "t", **more: Any
    ) -> list[dict[str, Any]]:
        return told(await self.client.post(f"/ag-ui/{agent}", json=run_input(text, thread, **more)))

    async def connect(self, *, agent: str = "painter", thread: str = "t") -> list[dict[str, Any]]:
        return told(await self.client.post(f"/ag-ui/{agent}/connect", json=run_input("", thread)))

    async def chat(self, text: str, *, agent: str = "painter", chat: str = "c") -> list[dict[str, Any]]:
        said = {"id": "u", "role": "user", "parts": [{"type": "text", "text": text}]}
        return told(await self.client.post(f"/vercel/{agent}", json={"id": chat, "messages": [said]}))

    async def again(self, *, agent: str = "painter", chat: str = "c") -> list[dict[str, Any]]:
        return told(await self.client.get(f"/vercel/{agent}/{chat}/stream"))

    async def begin(self, text: str, **more: Any) -> str:
        """
        Say something, leave at the first event, and return the run's id.
        """
        async with self.client.stream("POST", "/ag-ui/painter", json=run_input(text, "t", **more)) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    return str(json.loads(line.removeprefix("data: "))["metadata"]["stepengine"]["run_id"])
        raise AssertionError("nothing was told")

    async def until(self, run: str, status: str) -> dict[str, Any]:
        async with asyncio.timeout(50):
            while (view := (await self.client.get(f"/runs/{run}")).json())["status"] != status:  # noqa: ASYNC110 - the server knows
                await asyncio.sleep(0.01)
        return dict(view)


def run_input(text: str, thread: str, **more: Any) -> dict[str, Any]:
    said = [{"id": "m", "role": "user", "content": text}] if text else []
    return {"threadId": thread, "runId": "r", "messages": said, **more}


def told(answer: httpx2.Response) -> list[dict[str, Any]]:
    assert 200 == answer.status_code, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def refused(answer: httpx2.Response) -> tuple[int, str]:
    assert "application/problem+json" == answer.headers["content-type"], answer.text
    return answer.status_code, answer.json()["type"].rpartition(":")[2]


def text_of(events: list[dict[str, Any]]) -> str:
    return "".join([event["delta"] for event in events if event["type"] in ("TEXT_MESSAGE_CONTENT", "text-delta")])


def interrupts(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return list(events[-1]["outcome"].get("interrupts") or ())


def resolved(interrupt: dict[str, Any], payload: Any) -> list[dict[str, Any]]:
    return [{"interruptId": interrupt["id"], "status": "resolved", "payload": payload}]


@asynccontextmanager
async def paging(folder: Path, painter: Painter, *, name: str = "anna", **options: Any) -> AsyncIterator[Page]:
    async with (
        served(folder, painter.engine, name=name, **options) as (url, headers),
        httpx2.AsyncClient(base_url=url, headers=headers, timeout=30, trust_env=False) as client,
    ):
        yield Page(client)


@asynccontextmanager
async def known_as(page: Page, folder: Path, name: str, scopes: Any = ("read", "run", "answer")) -> AsyncIterator[Page]:
    token = Tokens.open(folder / "tokens.json").add(name, scopes)
    headers = {"authorization": f"Bearer {token}"}
    async with httpx2.AsyncClient(
        base_url=page.client.base_url, headers=headers, timeout=30, trust_env=False
    ) as client:
        yield Page(client)


# --- whose it is --------------------------------------------------------------------------------------------------------


@pytest.mark.deep
@pytest.mark.spec("studio:SV4", "studio:SV11")
async def test_conversation_is_private_to_its_owner(tmp_path: Path) -> None:
    async with paging(tmp_path, make_painter()) as anna, known_as(anna, tmp_path, "bob") as bob:
        asked = await anna.say("Paint.")
        await anna.chat("Hello.")
        (interrupt,) = interrupts(asked)
        answers = run_input("", "t", resume=resolved(interrupt, True))
        stolen = await bob.client.post("/ag-ui/painter", json=answers)
        stream = await bob.client.get("/vercel/painter/c/stream")
        seen = await bob.connect()
        own = await bob.say("Hi.")
        lists = [(await page.client.get("/runs")).json()["runs"] for page in (anna, bob)]
        run = interrupt["id"].partition(":")[0]
        looked = await bob.client.get(f"/runs/{run}")
        ended = await anna.say(resume=resolved(interrupt, True))

    assert (409, "answer_rejected") == refused(stolen)
    assert (204, 404) == (stream.status_code, looked.status_code)
    assert ([], []) == (next(e for e in seen if e["type"] == "MESSAGES_SNAPSHOT")["messages"], interrupts(seen))
    assert "You said ['Hi.']." == text_of(own)
    assert [{"anna"}, {"bob"}] == [{one["owner"] for one in listed} for listed in lists]
    assert [["c", "t"], ["t"]] == [[one["session_id"] for one in listed] for listed in lists]
    assert "The door is red now. You said ['Paint.']." == text_of(ended)


@pytest.mark.deep
@pytest.mark.spec("studio:SV4", "studio:SV11")
async def test_scopes_decide_which_page_requests_are_allowed(tmp_path: Path) -> None:
    async with (
        paging(tmp_path, make_painter()) as anna,
        known_as(anna, tmp_path, "reader", ["read"]) as reader,
        known_as(anna, tmp_path, "runner", ["run", "read"]) as runner,
        httpx2.AsyncClient(base_url=anna.client.base_url, trust_env=False) as nobody,
    ):
        await reader.connect()
        said = await reader.client.post("/ag-ui/painter", json=run_input("Hi.", "t"))
        (interrupt,) = interrupts(await runner.say("Paint."))
        answered = await runner.client.post("/ag-ui/painter", json=run_input("", "t", resume=resolved(interrupt, True)))
        typed = await runner.client.post("/ag-ui/painter", json=run_input("Yes.", "t"))
        unknown = [
            await nobody.post(path, json={}) for path in ("/ag-ui/painter", "/ag-ui/painter/connect", "/vercel/painter")
        ]

    assert [(403, "scope_missing")] * 3 == [refused(one) for one in (said, answered, typed)]
    assert [401, 401, 401] == [one.status_code for one in unknown]


# --- turns --------------------------------------------------------------------------------------------------------------


@pytest.mark.deep
@pytest.mark.spec("studio:SV11")
async def test_conversation_continues_after_a_kill_before_its_state_was_stored(tmp_path: Path) -> None:
    async with paging(tmp_path, make_painter()) as page:
        await page.say("One.")
    ledger = Ledger(tmp_path / "runs")
    ledger.write([lambda database: database.execute("DELETE FROM served_left")])
    ledger.close()
    async with paging(tmp_path, make_painter()) as page:
        after = await page.say("Two.")

    assert "You said ['One.', 'Two.']." == text_of(after)


@pytest.mark.deep
@pytest.mark.spec("studio:SV11")
async def test_conversation_shows_a_run_end_stored_only_in_the_journal(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "runs")
    async with paging(tmp_path, make_painter()) as page:
        asked = await page.say("Paint.")
        ledger.write([lambda database: database.execute("CREATE TABLE before AS SELECT * FROM served_left").fetchall()])
        await page.say(resume=resolved(interrupts(asked)[0], True))
    ledger.write([lambda database: database.execute("INSERT OR REPLACE INTO served_left SELECT * FROM before")])
    ledger.close()
    async with paging(tmp_path, make_painter()) as page:
        seen = await page.connect()

    (snapshot,) = [event for event in seen if event["type"] == "MESSAGES_SNAPSHOT"]
    assert "The door is red now. You said ['Paint.']." == snapshot["messages"][-1]["content"]
    assert [] == interrupts(seen)


@pytest.mark.spec("studio:SV11")
async def test_answer_for_another_run_answers_no_question_of_that_name(tmp_path: Path) -> None:
    async with paging(tmp_path, make_painter()) as page:
        (first,) = interrupts(await page.say("Paint.", thread="one"))
        (second,) = interrupts(await page.say("Paint.", thread="two"))
        wrong = run_input("", "two", resume=resolved(first, True))
        told_ag_ui = await page.client.post("/ag-ui/painter", json=wrong)
        part = {
            "type": "dynamic-tool",
            "state": "approval-responded",
            "approval": {"id": first["id"], "approved": True},
        }
        answer = {"id": "two", "messages": [{"id": "m", "role": "assistant", "parts": [part]}]}
        told_vercel = await page.client.post("/vercel/painter", json=answer)
        again = interrupts(await page.connect(thread="two"))

    assert first["id"].partition(":")[2] == second["id"].partition(":")[2]
    assert [(409, "answer_rejected")] * 2 == [refused(told_ag_ui), refused(told_vercel)]
    assert [second] == again


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("studio:SV11")
async def test_concurrent_turns_are_accepted_or_rejected_as_under_way(tmp_path: Path) -> None:
    painter = make_painter()
    async with paging(tmp_path, painter) as page:
        await page.say("One.")
        asked = [asyncio.create_task(page.client.post("/ag-ui/painter", json=run_input("Dry.", "t"))) for _ in range(4)]
        late = [await one for one in islice(asyncio.as_completed(asked), 3)]
        painter.gate.set()
        taken = [one.status_code for one in await asyncio.gather(*asked)].count(200)
        after = await page.say("Two.")

    assert ([(409, "under_way")] * 3, 1) == ([refused(one) for one in late], taken)
    assert "You said ['One.', 'Dry.', 'Two.']." == text_of(after)


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("studio:SV11")
async def test_head_of_a_chat_stream_ends_at_once(tmp_path: Path) -> None:
    """The next request of the client uses the same connection."""
    painter = make_painter()
    async with paging(tmp_path, painter) as page:
        await page.begin("Dry.")
        head = await page.client.head("/vercel/painter/t/stream")
        async with asyncio.timeout(10):
            after = await page.client.get("/caller")
        painter.gate.set()

    assert (200, 200) == (head.status_code, after.status_code)
    assert "text/event-stream" == head.headers["content-type"]


@pytest.mark.deep
@pytest.mark.spec("studio:SV11")
async def test_waiting_run_and_other_agents_session_reject_input(tmp_path: Path) -> None:
    async with paging(tmp_path, make_painter()) as page:
        waits = await page.say("Wait.", agent="receiver")
        told = await page.client.post("/ag-ui/receiver", json=run_input("Come.", "t"))
        await page.say("Door", agent="asker", thread="other")
        other = await page.client.post("/ag-ui/painter", json=run_input("Hi.", "other"))

    assert "success" == waits[-1]["outcome"]["type"]
    assert [(409, "waits")] * 2 == [refused(told), refused(other)]


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("studio:SV3")
async def test_a_suspended_run_stays_suspended_until_its_end_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    Between the end of a run and its record nobody holds its journal, as if its process had died.
    """
    looks, orphaned_rows = list[Any](), run_recovery.RunRecovery._find_orphaned_runs

    def look(self: Any, *args: Any, **options: Any) -> Any:
        looks.append(orphaned_rows(self, *args, **options))
        return looks[-1]

    monkeypatch.setattr(run_recovery, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(run_recovery.RunRecovery, "_find_orphaned_runs", look)
    painter = make_painter(tool_call("dry", {"what": "door"}), tool_call("paint", {"what": "door"}))
    async with paging(tmp_path, painter) as page:
        run = await page.begin("Go.")
        running = await page.until(run, "running")
        monkeypatch.setattr(run_recovery, "START_SECONDS", 0.0)
        with closing(sqlite3.connect(tmp_path / "runs" / ".serving.db", isolation_level=None)) as ledger:
            ledger.execute("BEGIN IMMEDIATE")
            painter.gate.set()
            await until_async(lambda: looks[-1])
            ledger.execute("ROLLBACK")
        seen = len(looks)
        await until_async(lambda: len(looks) > seen + 1)
        suspended = await page.until(run, "suspended")

    assert running["epoch"] == suspended["epoch"]


# --- coming back --------------------------------------------------------------------------------------------------------


@pytest.mark.deep
@pytest.mark.spec("studio:SV11")
async def test_any_server_shows_and_answers_a_run_of_another_server(tmp_path: Path) -> None:
    painter = make_painter()
    async with paging(tmp_path, painter) as here, paging(tmp_path, make_painter()) as there:
        here.client.headers.update(there.client.headers)
        await here.begin("Dry.")
        busy = await there.client.post("/ag-ui/painter", json=run_input("And?", "t"))
        coming = asyncio.create_task(there.connect())
        painter.gate.set()
        shown = await coming
        asked = await here.say("Paint.")
        ended = await there.say(resume=resolved(interrupts(asked)[0], True))
        after = await here.say("Thanks.")

    assert (409, "under_way") == refused(busy)
    assert "Let me see.The door is dry. You said ['Dry.']." == text_of(shown)
    assert "success" == shown[-1]["outcome"]["type"]
    assert "The door is red now. You said ['Dry.', 'Paint.']." == text_of(ended)
    assert "You said ['Dry.', 'Paint.', 'Thanks.']." == text_of(after)


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("interfaces:IF114", "studio:SV11")
@pytest.mark.parametrize(
    "waiting",
    [[("where", {})], [("paint", {"what": "door"})], [("paint", {"what": "door"})] * 2 + [("where", {}), ("dry", {"what": "door"})]],
    ids=["tool of the page", "permission", "several"],
)  # fmt: skip
async def test_page_reconnecting_to_a_resumed_run_has_all_calls(waiting: Any, tmp_path: Path) -> None:
    """
    Events of a resumed run come from its journal, where a call that waits has not started.
    """
    calls = tool_calls(*[tool_call(name, given) for name, given in waiting])
    painter = make_painter(tool_call("paint", {"what": "door"}), tool_call("dry", {"what": "door"}), calls)
    tools = [{"name": "where", "description": "Say where the user is."}]
    async with paging(tmp_path, painter) as page:
        asked = await page.say("Go.", tools=tools)
        async with page.client.stream(
            "POST", "/ag-ui/painter", json=run_input("", "t", tools=tools, resume=resolved(interrupts(asked)[0], True))
        ) as answer:
            async for line in answer.aiter_lines():
                if '"TOOL_CALL_START"' in line:
                    break
        async with page.client.stream("POST", "/ag-ui/painter/connect", json=run_input("", "t")) as answer:
            lines = answer.aiter_lines()
            shown = [await anext(lines)]
            painter.gate.set()
            shown += [line async for line in lines]
        events = [json.loads(line.removeprefix("data: ")) for line in shown if line]
        later = await page.connect()

    assert events[-1]["outcome"] == later[-1]["outcome"]
    assert known_calls(events) == known_calls(later)
    assert 2 + len(waiting) == len(known_calls(events))


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("interfaces:IF114", "studio:SV11")
async def test_an_answered_question_is_not_asked_before_the_run_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, gate = asyncio.Event(), asyncio.Event()
    resume = run_launcher.RunLauncher.resume_or_record_failure

    async def later(self: Any, row: Any) -> None:
        reached.set()
        await gate.wait()
        await resume(self, row)

    monkeypatch.setattr(run_launcher.RunLauncher, "resume_or_record_failure", later)
    async with paging(tmp_path, make_painter()) as page:
        asked = await page.say("Paint.")
        answering = asyncio.create_task(page.say(resume=resolved(interrupts(asked)[0], True)))
        await reached.wait()
        async with page.client.stream("POST", "/ag-ui/painter/connect", json=run_input("", "t")) as answer:
            lines = answer.aiter_lines()
            shown = [await anext(lines)]
            gate.set()
            shown += [line async for line in lines]
        ended = await answering

    assert "success" == ended[-1]["outcome"]["type"]
    assert ended[-1]["outcome"] == json.loads(shown[-1 if shown[-1] else -2].removeprefix("data: "))["outcome"]


def known_calls(events: list[dict[str, Any]]) -> dict[str, tuple[str, Any]]:
    """
    Return name and input of each call that a page knows after *events*; none is started twice.
    """
    known: dict[str, tuple[str, Any]] = {}
    for event in events:
        for message in event["messages"] if event["type"] == "MESSAGES_SNAPSHOT" else ():
            for call in message.get("toolCalls") or ():
                known[call["id"]] = (call["function"]["name"], json.loads(call["function"]["arguments"]))
        if event["type"] == "TOOL_CALL_START":
            assert event["toolCallId"] not in known
            known[event["toolCallId"]] = (event["toolCallName"], None)
        if event["type"] == "TOOL_CALL_ARGS":
            known[event["toolCallId"]] = (known[event["toolCallId"]][0], json.loads(event["delta"]))
    return known


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("studio:SV11")
async def test_approval_answered_by_typing_continues_in_a_new_message(tmp_path: Path) -> None:
    painter = make_painter()
    async with paging(tmp_path, painter) as page:
        asked = await page.chat("Paint.")
        typed = await page.chat("Not today.")
        again = await page.again()
    async with paging(tmp_path, make_painter()) as page:
        after = await page.again()

    first, second, third, fourth = [events[0]["messageId"] for events in (asked, typed, again, after)]
    assert first != second == third == fourth
    assert text_of(typed) == text_of(again) == text_of(after)
    assert "Not today." in text_of(typed)


# --- what is refused ----------------------------------------------------------------------------------------------------


@pytest.mark.spec("studio:SV11")
async def test_invalid_page_requests_are_rejected_and_start_no_run(tmp_path: Path) -> None:
    said = {"id": "u", "role": "user", "parts": [{"type": "text", "text": "Hi."}]}
    asked: list[tuple[str, Any, dict[str, str]]] = [
        ("/ag-ui/nobody", run_input("Hi.", "t"), {}),
        ("/ag-ui/painter", run_input("Hi.", "t", protocolVersion="2.0"), {}),
        ("/ag-ui/painter", run_input("Hi.", "t", state={"secret": 1}), {}),
        ("/ag-ui/painter", run_input("Hi.", ""), {}),
        ("/ag-ui/painter", run_input("Hi.", "x" * 201), {}),
        ("/ag-ui/painter", run_input("", "t"), {}),
        ("/vercel/nobody", {"id": "c", "messages": [said]}, {}),
        ("/vercel/painter", {"id": "c", "messages": [said]}, {"ai-sdk-version": "4"}),
        ("/vercel/painter", {"id": "c", "messages": [said], "trigger": "regenerate-message"}, {}),
        ("/vercel/painter", {"id": "c", "messages": []}, {}),
        ("/vercel/painter", {"id": "c", "messages": [{**said, "parts": [{"type": "file"}]}]}, {}),
        ("/vercel/painter", {"id": "c", "messages": [{**said, "parts": [{"type": "text", "text": "x" * 70_000}]}]}, {}),
        ("/runs", {"agent": "painter", "metadata": {"ag_ui": {"state": {"secret": 1}}}}, {}),
    ]  # fmt: skip
    async with paging(tmp_path, make_painter(), caps=Caps(body=65_536)) as page:
        answers = [await page.client.post(path, json=body, headers=headers) for path, body, headers in asked]
        listed = (await page.client.get("/runs")).json()["runs"]

    assert [404, 422, 422, 422, 422, 422, 404, 422, 422, 422, 422, 413, 422] == [refused(one)[0] for one in answers]
    assert [] == listed


@pytest.mark.spec("studio:SV11")
async def test_missing_extra_is_named_by_the_route(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepengine.server.ag_ui.find_spec", lambda name: None)
    async with paging(tmp_path, make_painter()) as page:
        answer = await page.client.post("/ag-ui/painter", json=run_input("Hi.", "t"))

    assert (501, "extra_missing") == refused(answer)
    assert "pip install 'stepengine[ag-ui]'" in answer.json()["detail"]


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("studio:SV11")
@pytest.mark.parametrize("cause", ["no journal", "edited", "damaged"])
async def test_conversation_continues_after_a_stranded_run(tmp_path: Path, cause: str) -> None:
    async with paging(tmp_path, make_painter()) as page:
        await page.say("One.")
        await page.say("Two.")
    ledger = Ledger(tmp_path / "runs")
    (run,) = [row.run for row in ledger.list_runs(owner="anna", agent=None, statuses=(), before=None, limit=1)]
    ledger.write([lambda database: database.execute("UPDATE served SET status = 'stranded' WHERE run = ?", (run,))])
    ledger.close()
    journal, painter = tmp_path / "runs" / f"{run}.jsonl", make_painter()
    if cause == "no journal":
        journal.unlink()
    elif cause == "damaged":
        journal.write_bytes(journal.read_bytes().replace(b"Two.", b"Too."))
    else:
        painter.engine.close()
        painter.engine = Engine([AgentDefinition("painter", model="m/m", handle_steps=asking)], models=painter.model)
    async with paging(tmp_path, painter) as page:
        seen = await page.connect()
        after = await page.say("Three.")

    assert "RUN_FINISHED" == seen[-1]["type"], seen
    if cause == "edited":
        assert ["How large?"] == [one["message"] for one in interrupts(after)]
    else:
        assert "You said ['One.', 'Three.']." == text_of(after)
