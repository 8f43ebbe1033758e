"""
Following: who does not hold a run reads each record once, however its bytes come, and is told when what it has does not hold any more.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepengine import STEP, AgentCall, AgentDefinition, Ask, Engine, Parallel, Perform, Receive, Sleep, tool
from stepengine.errors import JournalCorrupt, JournalMissing, StepEngineError
from stepengine.events import Event
from stepengine.journal import FileJournal, Follower, MemoryJournal, follow_events, send_cancel
from stepengine.journal import follower as module
from stepengine.testing import ScriptedModel, text, tool_call, tool_calls

LIVE_ALONE = {"text_delta", "thinking_delta", "tool_input_delta", "phase_changed", "log_line", "notification", "warned"}


@tool
def look(path: str) -> str:
    """
    Look at a file.

    Args:
        path: Which.
    """
    return f"{path} is empty"


def review(ctx: Any) -> Any:
    yield STEP
    yield from Perform(str.upper, "a")
    yield from Parallel(AgentCall("helper", "a"), AgentCall("helper", "b"))
    yield from Sleep(0.001)
    answer = (yield from Ask("Go on?", options=["yes", "no"])) if ctx.prompt == "Ask." else ""
    yield from Receive("go", timeout=0.001)
    yield STEP
    return str(answer)


def agents() -> list[AgentDefinition[Any]]:
    helper = AgentDefinition("helper", model="x/small", tools=[look], system_prompt="help")
    reviewer = AgentDefinition("reviewer", model="x/big", tools=[look], spawnable_agents=[helper], handle_steps=review)
    return [reviewer, helper]


def reply(request: Any) -> Any:
    if request.model == "x/small" or any("ticket" in str(m.content) for m in request.messages):
        return text("Nothing.")
    calls = sum(m.role == "tool" for m in request.messages)
    return text("Read.") if calls else tool_calls(tool_call("look", {"path": "a"}), tool_call("look", {"path": "b"}))


def recorded(journal: Any, prompt: str = "Ask.", seen: list[Event] | None = None) -> Any:
    observers = [] if seen is None else [seen.append]
    with Engine(agents(), models=ScriptedModel([reply] * 20), observers=observers) as engine:
        result = engine.run_sync("reviewer", prompt, journal=journal)
        if prompt == "Ask.":
            assert "suspended" == result.status, result.error
            result = engine.resume_sync(journal, answers={"Go on?": "yes"})
        assert "completed" == result.status, result.error
    return journal


def told(event: Event) -> str:
    return json.dumps([event.id, {k: v for k, v in event.to_json().items() if k != "result"}], default=str)


async def followed(journal: Any, **options: Any) -> list[Event]:
    return [event async for event in follow_events(journal, **options)]


def fed(journal: Any, write: Any, pieces: list[bytes]) -> list[str]:
    """
    Return the lines of the records that a follower is given while pieces are written.
    """
    follower, lines = Follower(journal), []
    for piece in pieces:
        write(piece)
        news = follower.read_new()
        assert "" == news.again
        lines += [json.dumps(record.line) for record in news.records]
        assert not follower.read_new().records
    assert len(b"".join(pieces)) == follower.offset
    return lines


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("studio:ST3")
@settings(max_examples=20)
@given(cuts=st.lists(st.floats(0, 1), max_size=40).map(sorted), link=st.booleans())
def test_each_record_is_returned_once_for_any_torn_bytes(cuts, link, tmp_path_factory):
    content = b"".join(recorded_once(link))
    path = tmp_path_factory.mktemp("torn") / "run.jsonl"
    places = [0, *[int(cut * len(content)) for cut in cuts], len(content)]
    with path.open("ab", buffering=0) as file:
        lines = fed(FileJournal(path), file.write, [content[a:b] for a, b in itertools.pairwise(places)])

    assert [json.dumps(record.line) for record in FileJournal(path).records()] == lines


RECORDED: dict[bool, list[bytes]] = {}


def recorded_once(link: bool) -> list[bytes]:
    if link not in RECORDED:
        RECORDED[link] = recorded(MemoryJournal(link=link)).lines()
    return RECORDED[link]


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("studio:ST3")
def test_incremental_events_equal_events_of_the_whole_journal(store):
    source = recorded(MemoryJournal())
    wanted = [told(event) for event in asyncio.run(followed(source))]
    records = source.records()

    async def both() -> list[str]:
        async def more(_: float) -> None:
            if records:
                writer = store().writer()
                writer.append(records.pop(0))
                writer.close()

        return [told(event) async for event in follow_events(store(), sleep=more)]

    assert wanted == asyncio.run(both())


@pytest.mark.spec("studio:ST3")
def test_followed_run_shows_live_events_except_deltas():
    live: list[Event] = []
    journal = recorded(MemoryJournal(), "Do not ask.", live)

    def brief(events: list[Event]) -> list[tuple[Any, ...]]:
        kept = [event for event in events if event.type not in LIVE_ALONE]
        # Of children at once the order is a matter of time; along one path it is not.
        return sorted(
            [
                (e.path, n, e.type)
                for path in {e.path for e in kept}
                for n, e in enumerate([x for x in kept if x.path == path])
            ]
        )

    shown = asyncio.run(followed(journal))
    assert brief(live) == brief(shown)
    assert [e.text for e in live if e.type == "text_completed"] == [e.text for e in shown if e.type == "text_completed"]
    assert live[-1].result.output == shown[-1].result.output
    assert live[-1].result.usage == shown[-1].result.usage


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("studio:ST3")
def test_following_resumes_after_an_event_id():
    journal = recorded(MemoryJournal())
    events = [told(event) for event in asyncio.run(followed(journal))]
    ids = [event.id for event in asyncio.run(followed(journal))]
    strange = asyncio.run(followed(journal, after="00000000-3"))
    beyond = asyncio.run(followed(journal, after=f"{ids[0].split('-')[0]}-{len(ids) + 4}"))

    assert len(ids) == len(set(ids))
    for number, one in enumerate(ids):
        assert events[number + 1 :] == [told(event) for event in asyncio.run(followed(journal, after=one))]
    assert ("events_dropped", "epoch") == (strange[0].type, strange[0].reason)
    assert events == [told(event) for event in strange[1:]]
    assert [("events_dropped", "journal", 5)] == [(event.type, event.reason, event.count) for event in beyond]
    with pytest.raises(StepEngineError, match="is not the id of an event"):
        asyncio.run(followed(journal, after="nonsense"))


@pytest.mark.spec("studio:ST3")
def test_follower_stays_with_or_leaves_a_waiting_run():
    journal = MemoryJournal()
    with Engine(agents(), models=ScriptedModel([reply] * 20)) as engine:
        engine.run_sync("reviewer", "Ask.", journal=journal)
        left = asyncio.run(followed(journal, stay=False))

        async def stayed() -> list[Event]:
            async def answered(_: float) -> None:
                if not journal.history().is_complete:
                    await engine.resume(journal, answers={"Go on?": "yes"})

            return await followed(journal, sleep=answered)

        events = asyncio.run(stayed())

    assert "question_asked" == left[-1].type
    assert [told(event) for event in left] == [told(event) for event in events[: len(left)]]
    assert "run_finished" == events[-1].type


@pytest.mark.spec("studio:ST3")
def test_cut_rewritten_and_replaced_files_are_reported(tmp_path):
    path = tmp_path / "run.jsonl"
    lines, other = recorded_once(True), recorded(MemoryJournal()).lines()
    path.write_bytes(b"".join(lines))
    follower = Follower(FileJournal(path))
    follower.read_new()
    os.truncate(path, sum(map(len, lines[:7])))
    cut = follower.read_new()
    path.write_bytes(b"".join(other))
    rewritten = follower.read_new()
    (tmp_path / "new").write_bytes(b"".join(other))
    (tmp_path / "new").replace(path)
    replaced = follower.read_new()
    path.unlink()

    assert ("cut", 7, 7) == (cut.again, cut.kept, len(cut.records))
    assert ("rewritten", 0, len(other)) == (rewritten.again, rewritten.kept, len(rewritten.records))
    assert ("replaced", len(other)) == (replaced.again, replaced.kept)
    with pytest.raises(JournalMissing):
        follower.read_new()


@pytest.mark.spec("studio:ST3")
def test_events_of_unstored_records_are_dropped(tmp_path):
    path, lines = tmp_path / "run.jsonl", recorded_once(True)
    path.write_bytes(b"".join(lines[:20]))
    steps = [lambda: os.truncate(path, sum(map(len, lines[:12]))), lambda: path.write_bytes(b"".join(lines))]

    async def grown(_: float) -> None:
        steps.pop(0)()

    events = asyncio.run(followed(FileJournal(path), sleep=grown))
    (dropped,) = [event for event in events if event.type == "events_dropped"]
    kept = events[: events.index(dropped) - dropped.count] + events[events.index(dropped) + 1 :]

    assert "journal" == dropped.reason
    assert [told(event) for event in asyncio.run(followed(FileJournal(path)))] == [told(event) for event in kept]


@pytest.mark.spec("studio:ST3")
def test_damage_raises_until_it_is_repaired(tmp_path, monkeypatch):
    path, lines = tmp_path / "run.jsonl", recorded_once(True)
    path.write_bytes(b"".join(lines[:5]) + lines[5].replace(b"crc", b"cr!") + lines[6])
    follower, looks = Follower(FileJournal(path)), []
    with pytest.raises(JournalCorrupt, match="record 6"):
        follower.read_new()
    monkeypatch.setattr(module, "read_more_lines", lambda *a, **o: looks.append(a))
    with pytest.raises(JournalCorrupt, match="record 6"):
        follower.read_new()
    monkeypatch.undo()
    path.write_bytes(b"".join(lines))

    assert not looks
    assert len(lines) == len(follower.read_new().records)


@pytest.mark.speed
@pytest.mark.spec("studio:ST3")
def test_follower_reads_only_new_bytes(tmp_path, monkeypatch):
    path, lines = tmp_path / "run.jsonl", recorded_once(True)
    path.write_bytes(b"".join(lines[:-3]))
    follower, read = Follower(FileJournal(path)), []
    follower.read_new()
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, n, at: read.append(len(found := pread(fd, n, at))) or found)
    for line in lines[-3:]:
        with path.open("ab") as file:
            file.write(line)
        follower.read_new()
        follower.read_new()

    assert [len(line) + module.LAST_BYTES for line in lines[-3:]] == read


@pytest.mark.spec("studio:SV3")
def test_run_left_to_another_process_has_not_ended():
    journal = MemoryJournal()

    async def left() -> list[Event]:
        async with Engine(agents(), models=ScriptedModel([reply] * 20)) as engine:
            handle = engine.start("reviewer", "Ask.", journal=journal, wait_for_answers=None)
            async for event in handle.events():
                if event.type == "question_asked":
                    break
            await handle.shutdown()
            return await followed(journal, stay=False)

    async def gone_on() -> list[Event]:
        async with Engine(agents(), models=ScriptedModel([reply] * 20)) as engine:
            await engine.resume(journal, answers={"Go on?": "yes"})
            return await followed(journal)

    before, whole = asyncio.run(left()), asyncio.run(gone_on())

    assert "question_asked" == before[-1].type
    assert [told(event) for event in before] == [told(event) for event in whole[: len(before)]]
    assert [True] == [event.resumed for event in whole[len(before) :] if event.type == "run_started"]
    assert ["run_finished"] == [event.type for event in whole if event.type == "run_finished"]


@pytest.mark.spec("studio:SV3")
@pytest.mark.parametrize("shutdowns", [1, 2])
def test_step_left_by_a_shutdown_ends_once(shutdowns: int):
    """Whether or not another process started it again before somebody cancelled the run."""
    journal, agent = MemoryJournal(), AgentDefinition("a", model="x/big")

    class Waits(ScriptedModel):
        async def stream(self, request: Any) -> Any:
            self.reached.set()
            await asyncio.Event().wait()
            yield

    async def left() -> None:
        model = Waits([])
        model.reached = asyncio.Event()
        async with Engine([agent], models=model) as engine:
            handle = (
                await engine.start_resume(journal) if journal.records() else engine.start("a", "go", journal=journal)
            )
            await model.reached.wait()
            await handle.shutdown()

    async def cancelled() -> list[Event]:
        async with Engine([agent], models=ScriptedModel([])) as engine:
            assert "cancelled" == (await engine.resume(journal)).status
            return await followed(journal, stay=False)

    for _ in range(shutdowns):
        asyncio.run(left())
    send_cancel(journal)
    shown = [event.type for event in asyncio.run(cancelled()) if event.type.startswith(("step_", "run_f"))]

    assert ["step_finished", "run_finished"] == shown[-2:]
    assert 1 == shown.count("step_finished")
