"""
A call that waits for its result goes on to wait in the next process: its body, which has begun the work, is not run again.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from stepengine import AgentCall, AgentDefinition, Engine, RunHandle, RunResult, ToolCall, ToolResult, load_agent, tool
from stepengine.cli.app import app
from stepengine.errors import AnswerRejected, InputError, ToolError, UnknownOutcome
from stepengine.journal import FileJournal, Journal, MemoryJournal, send_tool_result
from stepengine.journal.mailbox import MailboxMessage
from stepengine.journal.questions import make_doubt_questions, make_external_result_questions
from stepengine.journal.sleepers import find_first_unread_message_time
from stepengine.runtime.deferred_calls import DeferredCalls
from stepengine.runtime.messages import make_result_message

SECONDS = 30
BEGUN: list[str] = []


@tool(deferred=True, in_thread=False)
def book(city: str) -> str:
    """Book a table; the restaurant calls back."""
    BEGUN.append(city)
    if city == "Nowhere":
        raise ValueError("no such city")
    return "asked"


@tool(deferred=True, in_thread=False, idempotent=True)
def look(city: str) -> str:
    """Look for a table; the restaurant calls back."""
    BEGUN.append(city)
    return "asked"


def steps(ctx: Any) -> Any:
    first = yield from ToolCall("book", {"city": "Rome"})
    second = yield from ToolCall("look", {"city": "Bern"})
    child = yield from AgentCall("child")
    return [first.text, second.text, child]


def child_steps(ctx: Any) -> Any:
    third = yield from ToolCall("book", {"city": "Oslo"})
    return third.text


CHILD = AgentDefinition("child", tools=[book], handle_steps=child_steps)
AGENT = AgentDefinition("clerk", tools=[book, look], spawnable_agents=[CHILD], handle_steps=steps)
RESULTS = {"Rome": "yes", "Bern": "no", "Oslo": "maybe"}


@pytest.fixture(autouse=True)
def nothing_begun() -> None:
    BEGUN.clear()


async def given(handle: RunHandle[Any], results: dict[str, str]) -> RunResult[Any]:
    """
    Give each call its result as soon as somebody sees that it waits.
    """
    async with asyncio.timeout(SECONDS):
        async for event in handle.events():
            if event.type == "tool_started":
                handle.send_tool_result(event.tool_call_id, results[event.input["city"]], path=event.path)
        return await handle.result()


def cut(journal: Journal, at: int) -> MemoryJournal:
    """
    Return what a process left behind that was killed behind a record.
    """
    return MemoryJournal(journal.lines()[:at])


def kinds(journal: Journal) -> list[str]:
    return [json.loads(line).get("input", {}).get("type", "") for line in journal.lines()]


async def recorded() -> MemoryJournal:
    """
    Return the journal of a run whose results all came when their calls had waited.
    """
    journal = MemoryJournal()
    seen = 0
    async with asyncio.timeout(SECONDS), Engine([AGENT]) as engine:
        handle = engine.start("clerk", journal=journal)
        async for event in handle.events():
            if event.type == "tool_started":
                seen += 1
                while kinds(journal).count("result_pending") < seen:  # noqa: ASYNC110 - nobody tells of it
                    await asyncio.sleep(0)
                handle.send_tool_result(event.tool_call_id, RESULTS[event.input["city"]], path=event.path)
        assert [*RESULTS.values()] == (await handle.result()).output
    return journal


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("requirements:E27", "reliability:R3")
async def test_returned_body_is_not_run_again_after_any_cut() -> None:
    whole = await recorded()
    assert 3 == kinds(whole).count("result_pending")

    for at in range(3, len(whole.lines())):
        journal = cut(whole, at)
        history = journal.history()
        known = {
            history.form(i)["input"]["city"]
            for a, i in history.intents.items()
            if i.type == "tool_call" and (a in history.results or a in history.facts.pending_results)
        }
        if make_doubt_questions(history):
            continue
        BEGUN.clear()
        async with Engine([AGENT]) as engine:
            result = await given(await engine.start_resume(journal), RESULTS)
            replayed = await engine.replay(journal)

        assert ([*RESULTS.values()], []) == (result.output, [city for city in BEGUN if city in known]), at
        assert (result.output, result.status) == (replayed.output, replayed.status)


@pytest.mark.spec("requirements:E27", "reliability:R3")
async def test_cut_off_body_is_in_doubt_but_failed_one_not() -> None:
    whole = await recorded()
    before = cut(whole, kinds(whole).index("result_pending"))

    async with Engine([AGENT]) as engine:
        result = await engine.resume(before)
        failed = MemoryJournal()
        nowhere = AgentDefinition("nowhere", tools=[book], handle_steps=_nowhere)
        ended = await engine.run(nowhere, journal=failed)

    assert isinstance(result.error, UnknownOutcome)
    assert ("no such city" in str(ended.output), 0) == (True, kinds(failed).count("result_pending"))


@pytest.mark.spec("requirements:E27", "provenance:PV2")
@pytest.mark.parametrize("results", ["trusted", "names", "untrusted"])
@pytest.mark.parametrize("sent", ["trusted", "untrusted"])
async def test_tool_decides_trust_in_a_late_result_after_resume(results: Any, sent: Any) -> None:
    @tool(deferred=True, in_thread=False, results=results)
    def asks(city: str) -> str:
        """Ask."""
        return "asked"

    def handle_steps(ctx: Any) -> Any:
        found = yield from ToolCall("asks", {"city": "Rome"})
        return found.trust

    async def answered(handle: RunHandle[Any], journal: Journal) -> RunResult[Any]:
        async for event in handle.events():
            if event.type == "tool_started":
                while not kinds(journal).count("result_pending"):  # noqa: ASYNC110 - nobody tells of it
                    await asyncio.sleep(0)
                handle.send_tool_result(event.tool_call_id, ToolResult("yes", trust=sent))
        return await handle.result()

    agent, journal = AgentDefinition("asker", tools=[asks], handle_steps=handle_steps), MemoryJournal()
    async with asyncio.timeout(SECONDS), Engine([agent]) as engine:
        live = await answered(engine.start("asker", journal=journal), journal)
        left = cut(journal, kinds(journal).index("result_pending") + 1)
        resumed = await answered(await engine.start_resume(left), left)

    assert (results, results) == (live.output, resumed.output)


def _nowhere(ctx: Any) -> Any:
    turn = yield ToolCall("book", {"city": "Nowhere"})
    return turn.tool_result.text


@pytest.mark.spec("requirements:E27", "reliability:JR37")
async def test_pending_call_can_be_answered_without_a_handle() -> None:
    whole = await recorded()
    journal = cut(whole, kinds(whole).index("result_pending") + 1)
    (waiting,) = make_external_result_questions(journal.history())

    assert [] == make_doubt_questions(journal.history())
    async with Engine([AGENT]) as engine:
        with pytest.raises(AnswerRejected, match="is not an effect in doubt"):
            await engine.resume(journal, answers={"doubt:#9": "no"})
        handle = await engine.start_resume(journal, answers={waiting.id: "no"})
        result = await handle.result()

    assert isinstance(result.error, UnknownOutcome)
    assert [] == [city for city in BEGUN[3:] if city == "Rome"]


@pytest.mark.spec("requirements:E27", "reliability:R3")
@pytest.mark.parametrize("goes_on", [Engine.resume, partial(Engine.resume, on_divergence="extend")])
async def test_stopping_a_resumed_run_keeps_its_pending_call(
    goes_on: Callable[..., Coroutine[Any, Any, RunResult[Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = await recorded()
    journal, waits = cut(whole, kinds(whole).index("result_pending") + 1), asyncio.Event()
    monkeypatch.setattr(DeferredCalls, "mark_waiting", lambda *_: waits.set())
    async with asyncio.timeout(SECONDS), Engine([AGENT]) as engine:
        running = asyncio.create_task(goes_on(engine, journal))
        await waits.wait()
        running.cancel()
        await asyncio.wait([running])

    assert ("stop", [], 1) == (
        kinds(journal)[-1],
        make_doubt_questions(journal.history()),
        len(make_external_result_questions(journal.history())),
    )


CLERK = """
from stepengine import AgentDefinition, ToolCall, tool

@tool(deferred=True)
def book(city: str) -> str:
    "Book."
    with open("begun.txt", "a") as file:
        file.write(city + ";")
    return "asked"

def steps(ctx):
    table = yield from ToolCall("book", {"city": "Rome"})
    return table.text

agent = AgentDefinition("clerk", tools=[book], handle_steps=steps)
"""


@pytest.mark.spec("requirements:E27")
def test_resume_command_rejects_pending_calls_without_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the process leaves it that is killed while its call waits."""
    monkeypatch.chdir(tmp_path)
    Path("clerk.py").write_text(CLERK)
    journal, clerk = FileJournal("run.jsonl"), load_agent("clerk.py")

    async def killed() -> None:
        async with asyncio.timeout(SECONDS), Engine([clerk]) as engine:
            handle = engine.start("clerk", journal=journal)
            while b'"result_pending"' not in (journal.path.read_bytes() if journal.path.exists() else b""):  # noqa: ASYNC110 - nobody tells of it
                await asyncio.sleep(0)
            handle.interrupt()
            await handle.result()

    asyncio.run(killed())
    lines = journal.content().splitlines(keepends=True)
    waits = next(n for n, line in enumerate(lines) if b'"result_pending"' in line)
    journal.path.write_bytes(b"".join(lines[: waits + 1]))
    runs = CliRunner()
    refused = runs.invoke(app, ["resume", "run.jsonl", "--agent", "clerk.py", "-q"])
    said = runs.invoke(app, ["resume", "run.jsonl", "--agent", "clerk.py", "-q", "--answer", "doubt:#0=result:at nine"])

    assert (2, True) == (refused.exit_code, "book (#0) waits for an external result" in refused.stderr)
    assert (0, "at nine\n") == (said.exit_code, said.stdout)
    assert "Rome;" == Path("begun.txt").read_text()


# --- results that were sent to whoever has the run ------------------------------------------------------------------


@pytest.mark.spec("requirements:E27", "studio:SV3")
async def test_mailed_result_is_used_once_by_the_resumed_run() -> None:
    whole = await recorded()
    tried = 0
    for at in range(3, len(whole.lines())):
        journal = cut(whole, at)
        history = journal.history()
        waiting = [a for a in history.open if a in history.facts.pending_results]
        if not waiting:
            continue
        tried += 1
        form = history.form(history.intents[waiting[0]])
        city, call = form["input"]["city"], form["tool_call_id"]
        with pytest.raises(ToolError, match="no call 'nothing' waits"):
            send_tool_result(journal, "nothing", "x")
        assert [True, False] == [send_tool_result(journal, call, f"by letter: {city}") for _ in range(2)]
        with pytest.raises(InputError, match="another mailbox message"):
            send_tool_result(journal, call, "something else")
        assert find_first_unread_message_time(journal, journal.history())
        BEGUN.clear()
        async with Engine([AGENT]) as engine:
            handle = await engine.start_resume(journal)
            async with asyncio.timeout(SECONDS):
                async for event in handle.events():
                    if event.type == "tool_started" and event.input["city"] != city:
                        handle.send_tool_result(event.tool_call_id, RESULTS[event.input["city"]], path=event.path)
                output = (await handle.result()).output

        assert {**RESULTS, city: f"by letter: {city}"} == dict(zip(RESULTS, output, strict=True))
        assert city not in BEGUN
        assert find_first_unread_message_time(journal, journal.history()) is None

    assert 3 <= tried


async def test_early_result_settles_that_the_call_happened() -> None:
    whole = await recorded()
    at = next(
        n for n, line in enumerate(whole.lines()) if json.loads(line).get("input", {}).get("type") == "result_pending"
    )
    journal = cut(whole, at)
    place = next(a for a, i in journal.history().open.items() if i.type == "tool_call")
    assert ["doubt:#0"] == [one.id for one in make_doubt_questions(journal.history())]
    message = make_result_message(place, "it was booked")
    journal.mailbox().send(
        MailboxMessage(kind="result", id=message.id, path=message.path, topic=message.topic, value=message.value)
    )

    async with Engine([AGENT]) as engine:
        handle = await engine.start_resume(journal)
        async with asyncio.timeout(SECONDS):
            async for event in handle.events():
                if event.type == "tool_started" and event.input["city"] != "Rome":
                    handle.send_tool_result(event.tool_call_id, "later", path=event.path)
            result = await handle.result()

    assert ["it was booked", "later", "later"] == result.output
    assert 1 == BEGUN.count("Rome")


async def test_posted_result_is_stored_before_the_post_returns() -> None:
    journal = MemoryJournal()
    async with asyncio.timeout(SECONDS), Engine([AGENT]) as engine:
        handle = engine.start("clerk", journal=journal)
        async for event in handle.events():
            if event.type == "tool_started":
                city = event.input["city"]
                assert handle.store_tool_result(event.tool_call_id, RESULTS[city], path=event.path)
                assert RESULTS[city] == journal.mailbox().read()[0][-1].value
        assert [*RESULTS.values()] == (await handle.result()).output
        with pytest.raises(ToolError):
            handle.store_tool_result("nothing", "x")


@pytest.mark.parametrize(("topic", "value"), [("", 1), ("-1", 1), ("\u0663", 1), ("9" * 16, 1), (3, 1), ("1", {1, 2})])
def test_result_message_names_a_valid_call_number(topic: Any, value: Any) -> None:
    with pytest.raises(InputError):
        MailboxMessage(kind="result", topic=topic, value=value)
