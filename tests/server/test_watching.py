"""
Who watches a run sees all of it, once, whatever server is asked, and whichever of them had the run meanwhile.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from copy import copy
from pathlib import Path
from typing import Any

import httpx2
import pytest

pytest.importorskip("starlette")

from stepengine import STEP, AgentCall, AgentDefinition, Ask, Engine, Parallel, Perform, tool
from stepengine.data.messages import ToolResult
from stepengine.data.state import AgentState, RunResult, RunStatus
from stepengine.events import Event, RunFinished, RunStarted, ToolFinished
from stepengine.journal import FileJournal, MemoryJournal, SqliteJournal, follow_events
from stepengine.journal.event_stream import EventProjection, JournalWatch
from stepengine.redaction import GIVEN
from stepengine.server import watchers
from stepengine.server.event_json import encode_event_stream, encode_sse_event
from stepengine.server.watchers import (
    FollowedEvents,
    ReaderPosition,
    SharedJournals,
    UnreadEvents,
    is_in_both_streams,
    make_event_key,
    stream_recorded_then_live_events,
)
from stepengine.testing import ScriptedModel, text, tool_call, tool_calls
from tests.waits import until

from .house import House, ended, started

pytestmark = pytest.mark.spec("studio:SV3")


@tool
def look(path: str) -> str:
    """Look at a file."""
    return f"{path} is empty"


def help_steps(ctx):
    yield STEP
    yield from Perform(str.upper, "b")
    yield STEP


def review(ctx):
    yield STEP
    yield from Parallel(*[AgentCall("helper", name) for name in "abc"])
    yield from Perform(str.upper, "a")
    if ctx.prompt == "Ask.":
        yield from Ask("Go on?")
    yield STEP


HELPER = AgentDefinition("helper", model="x/small", tools=[look], handle_steps=help_steps)
AGENTS = [
    AgentDefinition("reviewer", model="x/big", tools=[look], spawnable_agents=[HELPER], handle_steps=review),
    HELPER,
]


def reply(request: Any) -> Any:
    calls = sum(message.role == "tool" for message in request.messages)
    return text("Read.") if calls else tool_calls(tool_call("look", {"path": "a"}), tool_call("look", {"path": "b"}))


def recorded(journal: Any) -> list[Event]:
    live: list[Event] = []
    with Engine(AGENTS, models=ScriptedModel([reply] * 50), observers=[live.append]) as engine:
        assert "completed" == engine.run_sync("reviewer", "Go.", journal=journal).status
    return live


async def all_of(events: Any) -> list[Event]:
    return [event async for event in events]


def id_after(events: list[Event]) -> str | None:
    had, place = ReaderPosition.parse(None), None
    for event in events:
        place = had.record_received_event(event)
    return place


def test_live_reader_gets_the_missing_events_from_the_journal_once() -> None:
    journal = MemoryJournal()
    live = recorded(journal)
    told = asyncio.run(all_of(follow_events(journal)))
    keys = Counter(map(make_event_key, told))
    assert {1} == set(keys.values())

    for count in range(len(live) + 1):
        seen = live[:count]
        past = UnreadEvents(told, ReaderPosition.parse(id_after(seen)).marks or {})

        assert keys == Counter([make_event_key(one) for one in (*seen, *past.new) if is_in_both_streams(one)]), count


def test_journal_reader_gets_the_remaining_events_live_once() -> None:
    journal = MemoryJournal()
    live = recorded(journal)

    async def shown_live() -> Any:
        for event in live:
            yield event

    async def both() -> None:
        records = journal.records()
        for count in range(3, len(records), 4):
            # What is recorded up to now, while the process that has the run goes on; the reader has all but the newest of it.
            kept = part(records[:count])
            told = list(EventProjection().project_records(kept.history(), records[:count]))
            seen = told[:-2]
            shared = SharedJournals(lambda _: kept)  # noqa: B023
            rest = await all_of(
                stream_recorded_then_live_events(
                    shown_live(), shared.get_or_create_followed_events("r"), ReaderPosition.parse(id_after(seen))
                )
            )

            assert keys == Counter([make_event_key(one) for one in (*seen, *rest) if is_in_both_streams(one)]), count

    keys = Counter([make_event_key(one) for one in live if is_in_both_streams(one)])
    assert {1} == set(keys.values())
    asyncio.run(both())


def part(records: Any) -> MemoryJournal:
    journal = MemoryJournal()
    writer = journal.writer()
    for record in records:
        writer.append(record)
    writer.close()
    return journal


def read(
    client: httpx2.Client, run: str, after: str | None, last: str = "", count: int = 1_000
) -> list[tuple[str, dict[str, Any]]]:
    """
    Return the events behind an id up to one of a type, or so many, or all that there are; each with the id that it came with.
    """
    headers = {} if after is None else {"last-event-id": after}
    found: list[tuple[str, dict[str, Any]]] = []
    with client.stream("GET", f"/runs/{run}/events", headers=headers) as answer:
        place = ""
        for line in answer.iter_lines():
            if line.startswith("id: "):
                place = line.removeprefix("id: ")
            elif line.startswith("data: "):
                found.append((place, json.loads(line.removeprefix("data: "))))
                place = ""
                if len(found) == count or found[-1][1]["type"] == last:
                    break
    return found


def types(events: list[tuple[str, dict[str, Any]]]) -> list[str]:
    return [event["type"] for _, event in events if event["type"] in watchers.TOLD]


def give_result(client: httpx2.Client, run: str, call: str) -> None:
    assert 202 == client.post(f"/runs/{run}/tool-results/{call}", json={"result": "a table"}).status_code


WHOLE = ["run_started", "tool_started", "tool_finished", "run_finished"]


@pytest.mark.deep
@pytest.mark.smoke
def test_watcher_after_restart_sees_earlier_events_and_one_end(tmp_path: Path) -> None:
    house = House(tmp_path)
    with house.open(), house.client() as client:
        run = started(client, "booker")
        before = read(client, run, None, "tool_started")
        # What had only begun would be in doubt.
        until(lambda: FileJournal(tmp_path / "runs" / f"{run}.jsonl").history().facts.pending_results)
    with house.open(), house.client() as client:
        until(lambda: client.get(f"/runs/{run}").json()["epoch"])
        first = read(client, run, None, "phase_changed")
        call = next(event["tool_call_id"] for _, event in first if event["type"] == "tool_started")
        give_result(client, run, call)
        assert "completed" == ended(client, run)["status"]
        came_back, again = read(client, run, before[-1][0]), read(client, run, first[-1][0])
        late = read(client, run, None)

    assert "tool_started" in types(before)
    assert WHOLE == types([one for one in late if not one[1].get("resumed")])
    assert ["run_started", "tool_started"] == types([one for one in first if not one[1].get("resumed")])
    assert [True] == [event["resumed"] for _, event in first if event.get("resumed")]
    for rest in (came_back, again):
        assert ["tool_finished", "run_finished"] == types([one for one in rest if not one[1].get("resumed")])
        assert "events_dropped" not in [event["type"] for _, event in rest]


@pytest.fixture
def houses(tmp_path: Path) -> Iterator[list[House]]:
    with ExitStack() as stack:
        first = House(tmp_path)
        yield [stack.enter_context(one.open()) for one in (first, copy(first))]


@pytest.mark.deep
@pytest.mark.smoke
def test_reader_alternating_between_servers_sees_each_event_once(houses: list[House]) -> None:
    clients = [one.client() for one in houses]
    run = started(clients[0], "booker")
    has_it = read(clients[0], run, None, "tool_started")
    call = next(event["tool_call_id"] for _, event in has_it if event["type"] == "tool_started")
    seen = read(clients[0], run, None, count=1)
    seen += read(clients[1], run, seen[-1][0], count=1)
    while types(seen)[-1] != "tool_started":
        seen += read(clients[0], run, seen[-1][0], count=1)
    give_result(clients[0], run, call)
    ended(clients[0], run)
    for turn in range(100):
        more = read(clients[(turn + 1) % 2], run, seen[-1][0], count=1)
        seen += more
        if not more or more[-1][1]["type"] == "run_finished":
            break
    for one in clients:
        one.close()

    assert WHOLE == types(seen)
    assert 2 == len({event["epoch"] for _, event in seen})
    assert "events_dropped" not in [event["type"] for _, event in seen]


def test_cancelled_reader_does_not_disturb_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    A thread cannot be cancelled: it reads on when its reader has gone, and beside it nobody may.
    """
    journal = FileJournal(tmp_path / "r.jsonl")
    recorded(journal)
    read_new_events, reading, at_once = JournalWatch.read_new_events, list[JournalWatch](), set[int]()
    begun, goes_on = threading.Event(), threading.Event()

    def slow(watch: JournalWatch) -> list[Event]:
        reading.append(watch)
        at_once.add(len(reading))
        begun.set()
        try:
            assert goes_on.wait(30)
            return read_new_events(watch)
        finally:
            reading.remove(watch)

    async def main() -> list[Event]:
        following = FollowedEvents(journal)
        gone, comes = [
            asyncio.create_task(all_of(following.events(ReaderPosition.parse(None), wait_for_new=False)))
            for _ in range(2)
        ]
        assert await asyncio.to_thread(begun.wait, 30)
        gone.cancel()
        await asyncio.wait([gone])
        # The next one asks as soon as it may.
        for _ in range(20):
            await asyncio.sleep(0)
        await asyncio.to_thread(lambda: None)
        goes_on.set()
        found = await asyncio.wait_for(comes, 30)
        following.close()
        return found

    with monkeypatch.context() as patched:
        patched.setattr(JournalWatch, "read_new_events", slow)
        found = asyncio.run(main())

    assert {1} == at_once
    assert [event.id for event in asyncio.run(all_of(follow_events(journal)))] == [event.id for event in found]


async def write_in_parts(path: Path, journal: MemoryJournal, following: FollowedEvents) -> None:
    """Write a journal as a run does, and read it after each part."""
    lines = list(journal.lines())
    with path.open("ab", buffering=0) as file:
        for start in range(0, len(lines), 10):
            file.write(b"".join(lines[start : start + 10]))
            await following.read_unread_events(ReaderPosition.parse(None))


@pytest.mark.deep
@pytest.mark.smoke
def test_late_reader_gets_evicted_events_from_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = MemoryJournal()
    recorded(journal)
    whole = asyncio.run(all_of(follow_events(journal)))
    monkeypatch.setattr(watchers, "MOST_KEPT", 10)
    path = tmp_path / "run.jsonl"

    async def main() -> None:
        shared = SharedJournals(lambda _: FileJournal(path))
        following = shared.get_or_create_followed_events("r")
        first = asyncio.create_task(all_of(following.events(ReaderPosition.parse(None), wait_for_new=True)))
        await write_in_parts(path, journal, following)
        assert whole[-1].id == (await first)[-1].id
        for count in (*range(0, len(whole) - 12, 40), *range(len(whole) - 12, len(whole) + 1)):
            had = ReaderPosition.parse(id_after(whole[:count]))
            rest = await all_of(following.events(had, wait_for_new=True))
            assert [event.id for event in whole[count:]] == [event.id for event in rest]
            past, _, place = await following.read_unread_events(had)
            assert [event.id for event in whole[count:]] == [event.id for event in past.new]
            assert len(whole) - 1 == place
        shared.close()

    asyncio.run(main())


@pytest.mark.parametrize("place", ["run.jsonl", "runs.db"])
def test_held_journal_is_detected_without_reading_it(tmp_path: Path, place: str) -> None:
    path = tmp_path / place
    journal = SqliteJournal(path, "one") if place == "runs.db" else FileJournal(path)
    before = journal.is_held()
    writer = journal.writer()
    during = journal.is_held(), journal.is_held()
    writer.close()

    assert (False, (True, True), False) == (before, during, journal.is_held())


def test_stream_without_debug_scope_omits_the_final_state() -> None:
    tool_result = ToolFinished(tool_name="t", result=ToolResult.text("given"), run_id="r", epoch="00000000", index=1)
    finished = RunFinished(result=RunResult(status=RunStatus.COMPLETED, state=AgentState()))

    def shown(event: Event, *, full: bool) -> dict[str, Any]:
        told: dict[str, Any] = json.loads(encode_sse_event(event, full=full).partition("data: ")[2])
        return told

    assert "given" in json.dumps(shown(tool_result, full=False)["result"])
    assert ("result" in shown(finished, full=True), "result" in shown(finished, full=False)) == (True, False)


@pytest.mark.spec("interfaces:IF18")
@pytest.mark.parametrize(
    "key", ["shop-0123456789abcdef", 'shop-"01234\\56789', "shop-01234\n56789", "shop-0123é456789"]
)
async def test_events_show_no_known_key(key: str) -> None:
    async def events() -> Any:
        yield RunStarted(own_id="r", agent_id="a", prompt=f"it is {key}.", run_id="r", epoch="00000000")
        yield RunStarted(
            own_id="r", agent_id="a", params={"list": [key, {key: 1}]}, run_id="r", epoch="00000000", index=1
        )

    GIVEN.add(key, "SHOP_KEY")
    try:
        pieces = [
            piece
            async for piece in encode_event_stream(
                events(), None, position=ReaderPosition.parse(None), full=False, stopping=asyncio.Event()
            )
        ]
    finally:
        GIVEN.clear()

    told = "".join(pieces)
    assert "retry: 2000\n\n" == pieces[0]
    assert 3 == told.count("<redacted:SHOP_KEY>")
    assert key not in told
    assert json.dumps(key)[1:-1] not in told


async def test_reader_of_a_closed_follower_still_gets_new_events(tmp_path: Path) -> None:
    """A sweep of idle journals may come between a reader's first look and its start."""
    whole, journal = MemoryJournal(), FileJournal(tmp_path / "r.jsonl")
    recorded(whole)
    lines = list(whole.lines())
    journal.path.write_bytes(b"".join(lines[:5]))
    following = FollowedEvents(journal)
    events = [following.events(ReaderPosition.parse(None), wait_for_new=True) for _ in range(2)]
    await anext(events[0])
    await events[0].aclose()
    following.close()
    first = await anext(events[1])
    with journal.path.open("ab") as file:
        file.write(b"".join(lines[5:]))
    found = [first, *await asyncio.wait_for(all_of(events[1]), 20)]

    assert ("run_started", "run_finished") == (found[0].type, found[-1].type)
