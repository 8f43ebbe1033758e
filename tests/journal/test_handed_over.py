"""
What a step records is handed over without a record; here it is held to what the records would have become.
"""

from __future__ import annotations

import errno
import gc
import json
import os
from collections import deque
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stepengine.data.effects import CallModel, CallTool
from stepengine.data.json import freeze
from stepengine.data.messages import (
    AssistantMessage,
    JsonPart,
    SideEffect,
    TextPart,
    ToolCallPart,
    ToolMessage,
    ToolResult,
    UserMessage,
)
from stepengine.data.models import ModelReply, ModelRequest
from stepengine.data.transcript import Transcript
from stepengine.data.usage import Usage
from stepengine.errors import JournalWriteFailed
from stepengine.journal import FileJournal, Journal, MemoryJournal, SqliteJournal, places
from stepengine.journal.encoding import KEPT_BASES, Encoder
from stepengine.journal.journaled_run import JournaledRun
from stepengine.journal.mailbox import Letter
from stepengine.journal.recorder import Recorder
from stepengine.journal.records import Head, Input, Intent, Result
from stepengine.journal.store import Writer
from stepengine.runtime.performer import Item
from stepengine.runtime.performing import NOTHING

HEAD = Head(engine="0", agent="a", definition="0", run="r", seed="0", created="2026-01-01T00:00:00.000Z", link=True)
SPAWN = {"type": "Spawn", "agent_id": "a", "prompt": "", "params": None, "run_id": "r"}
TALK = [UserMessage("add"), AssistantMessage([ToolCallPart("c", "t", {"b": 1, "a": [2]})]), ToolMessage("c", "t", "3")]

words = st.text(max_size=6) | st.sampled_from(("$blob", "\u2028", "x" * 3_000, "sk-ant-api03-0123456789abcdefghij"))
inputs = st.dictionaries(words, words | st.integers(-9, 9) | st.lists(st.integers(0, 9), max_size=2), max_size=3)
told = {
    "usage": st.none() | st.just(Usage(input_tokens=3)),
    "cost": st.none() | st.sampled_from((Decimal("1.0"), Decimal("1.00"))),
}
called = st.builds(
    lambda call_id, data, error: ToolCallPart(call_id, "t", {"a": 1}, provider_data=data, input_error=error),
    st.sampled_from(("", "c")),
    st.none() | st.just({"id": "x"}),
    st.none() | st.just("no JSON"),
)
replies = st.builds(
    ModelReply,
    st.lists(called, min_size=1, max_size=2),
    stop_reason=st.sampled_from(("tool_use", "max_tokens")),
    raw_stop_reason=st.none() | words,
    model=st.none() | words,
    request_id=st.none() | words,
    provider_data=st.just({}) | inputs,
    **told,
)
results = st.builds(
    ToolResult,
    st.lists(st.builds(TextPart, words) | st.builds(JsonPart, st.just(1) | inputs), max_size=2),
    status=st.sampled_from(("ok", "error")),
    tool_name=words,
    tool_call_id=words,
    credits_used=st.sampled_from((0, 1, 1.0)),
    structured=st.none() | st.just(3),
    side_effects=st.just(()) | st.just((SideEffect("file", "x"),)),
    **told,
)
values = (
    st.builds(lambda said: ModelReply([TextPart(said)]), words)
    | replies
    | results
    | st.builds(lambda name, given: ModelReply([ToolCallPart("c", name, given)]), words, inputs)
    | st.builds(lambda said: ToolResult([TextPart(said)]), words)
    | words
    | inputs.map(freeze)
)
calls = st.builds(
    lambda name, given, call_id, line: CallTool(0, name, given, call_id, "handler", program_line=line),
    words,
    inputs,
    words,
    st.integers(0, 2),
)
requests = st.builds(
    lambda length, prompt, has_tail: ModelRequest(
        "m/m", prompt, Transcript(TALK[:length]), tail=TALK[:1] if has_tail else ()
    ),
    st.sampled_from((1, 3)),
    words,
    st.booleans(),
)
steps = st.lists(st.tuples(st.none() | st.just(0), requests | calls | values), max_size=6)


def record_of(seq: int, gather: int | None, what: Any) -> Intent | Result:
    if type(what) is ModelRequest:
        return Intent("", seq, CallModel(seq, what), "", gather)
    if type(what) is CallTool:
        form = {"type": "CallTool", "tool_name": what.tool_name, "input": what.input}
        form |= {"tool_call_id": what.tool_call_id, "source": what.source}
        return Intent("", seq, form, "", gather, program_line=what.program_line)
    return Result("", seq, 7, what)


def hand_over(writer: Writer, seq: int, gather: int | None, what: Any) -> None:
    if type(what) is ModelRequest:
        writer.add_request("", seq, gather, CallModel(seq, what))
    elif type(what) is CallTool:
        writer.add_call("", seq, gather, what)
    else:
        writer.add_value("", seq, 7, what)


STORES: dict[str, Callable[[Path], Journal]] = {
    "file": lambda folder: FileJournal(folder / "run.jsonl", sync="write", inline=2_048),
    "shapes": lambda folder: MemoryJournal(redact="all", inline=2_048),
    "memory": lambda folder: MemoryJournal(inline=2_048),
    "sqlite": lambda folder: SqliteJournal(folder / "runs.db", "r", inline=2_048),
}


@pytest.mark.spec("replay:J10", "replay:J19")
@pytest.mark.parametrize("store", STORES)
@given(steps=steps)
def test_what_is_handed_over_becomes_the_lines_that_records_would_have_become(
    store: str, steps: list[tuple[int | None, Any]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    journal = STORES[store](tmp_path_factory.mktemp("store"))
    encoder = Encoder(journal.redactor, link=True, inline=journal.inline)
    writer = journal.writer()
    lines: list[bytes] = []
    for record in (HEAD, Intent("", -1, SPAWN)):
        writer.append(record)
        lines += encoder.lines(record)
    for seq, (gather, what) in enumerate(steps):
        hand_over(writer, seq, gather, what)
        lines += encoder.lines(record_of(seq, gather, what))
    writer.close()

    assert b"".join(lines) == journal.content()


HANDED: dict[str, Callable[[Writer], None]] = {
    "request": lambda writer: writer.add_request("", 0, None, CallModel(0, ModelRequest("m/m"))),
    "call": lambda writer: writer.add_call("", 0, None, CallTool(0, "t", {})),
    "value": lambda writer: writer.add_value("", 0, 0, "x"),
}


@pytest.mark.spec("reliability:JR09")
@pytest.mark.parametrize("what", HANDED)
def test_a_journal_that_gave_up_takes_nothing_that_is_handed_over(tmp_path: Path, what: str) -> None:
    writer = FileJournal(tmp_path / "run.jsonl", sync="write").writer()
    with pytest.raises(JournalWriteFailed, match="a record has at most"):
        writer.add_value("", 0, 0, ["x" * 30_000] * 600)
    with pytest.raises(JournalWriteFailed, match="a record has at most"):
        HANDED[what](writer)
    writer.close()


@pytest.mark.spec("reliability:JR08")
@pytest.mark.parametrize("what", HANDED)
def test_where_no_room_is_kept_only_results_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    writer: Any = FileJournal(tmp_path / "run.jsonl", sync="write").writer()

    def full(folder: Path, size: int) -> int:
        raise OSError(errno.ENOSPC, f"{folder} has no {size} bytes left")

    monkeypatch.setattr(places, "_room", full)
    if writer._reserve is None:
        pytest.skip("this system keeps no room")
    assert writer._reserve.spend()
    if what == "value":
        HANDED[what](writer)
    else:
        with pytest.raises(JournalWriteFailed, match="an effect begins only where"):
            HANDED[what](writer)
    assert (what == "value") is bool(writer._lines)
    monkeypatch.undo()
    HANDED[what](writer)
    assert writer._lines, "there is room again"
    assert what == "value" or writer.steps is writer._encoder, "nothing is asked of each record any more"
    writer.close()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks")
@pytest.mark.spec("reliability:SS14")
def test_nothing_is_handed_over_in_a_forked_process(tmp_path: Path) -> None:
    writer = FileJournal(tmp_path / "run.jsonl", sync="write").writer()
    child = os.fork()
    if not child:
        refused = 0
        for hand in HANDED.values():
            try:
                hand(writer)
            except JournalWriteFailed:
                refused += 1
        os._exit(40 + refused)
    assert 43 == os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    writer.close()


# The collector goes through all that is kept, again and again: what only a journal holds makes long runs slower with it.
@pytest.mark.spec("replay:J10")
def test_a_journal_in_memory_keeps_no_container_of_its_own_for_a_step() -> None:
    journal = MemoryJournal()
    writer = journal.writer()
    reply, result = ModelReply([ToolCallPart("", "t", {"a": 1})]), ToolResult.json({"b": 2})
    call, request = CallTool(1, "t", {"a": 1}, "c", "model"), CallModel(0, ModelRequest("m/m"))
    writer.add_request("", 0, None, request)
    writer.add_value("", 0, 1, reply)
    writer.add_call("", 1, None, call)
    writer.add_value("", 1, 2, result)

    kept = [thing for thing in journal._kept.loose if gc.is_tracked(thing) and not callable(thing)]
    of_run = [
        request.request,
        request.request.messages._buffer,
        reply.stop_reason,
        reply.tool_calls[0].input,
        call.input,
    ]
    assert not [thing for thing in kept if not any(thing is one for one in (*of_run, result.content))]
    assert [reply, result] == [record.given for record in journal.records() if type(record) is Result]


REQUEST = ModelRequest("m/m", messages=Transcript(TALK[:1]))


def recorder_of(run: Any) -> Recorder:
    """
    Return who records a new run, around what performs nothing.
    """
    inner: Any = SimpleNamespace(begin=lambda batch: NOTHING)
    return Recorder(inner, run)


def new_run(journal: Journal) -> JournaledRun:
    run = JournaledRun.record(journal)
    run.writer_of_new = run._take(journal.writer())
    return run


def asked(seq: int) -> tuple[Item]:
    plan: Any = SimpleNamespace(tools={})
    return (Item("", CallModel(seq, REQUEST), plan),)


@pytest.mark.spec("replay:J16")
def test_numbers_that_nothing_was_asked_by_are_told_before_what_is_asked_next() -> None:
    journal = MemoryJournal()
    run = new_run(journal)
    recorder = recorder_of(run)
    for seq in (0, 3, 4):
        recorder.begin(asked(seq))
    run.close()

    gap = {"type": "Gap"}
    assert [0, (3, gap), 3, 4] == [
        (record.seq, record.input) if type(record) is Input else record.seq  # type: ignore[union-attr]
        for record in journal.records()
    ]


@pytest.mark.spec("waiting:WT2")
def test_what_is_left_out_of_a_new_run_is_told_before_its_next_record() -> None:
    journal = MemoryJournal()
    run = new_run(journal)
    recorder = recorder_of(run)
    recorder.begin(asked(0))
    run._leave_out(Letter(kind="answer", value="x", id="late", topic="q"), "nobody asks that any more")
    recorder.begin(asked(1))
    run.close()

    first, refused, second = journal.records()
    assert isinstance(refused, Input)
    assert {"type": "Refused", "id": "late", "why": "nobody asks that any more"} == refused.input
    assert [Intent, Intent] == [type(first), type(second)]


# --- differences ----------------------------------------------------------------------------------------------------

moves = st.lists(
    st.tuples(st.sampled_from(("", "", "1")), st.sampled_from(("longer", "same", "other", "new")), st.integers(0, 9)),
    max_size=14,
)


@pytest.mark.spec("replay:J19")
@example([("", "new", 0), ("", "new", 0), *[("", "longer", 0)] * 3, ("", "other", 1)])
@example([("", "new", 0), ("", "new", 0), *[("", "longer", 0)] * 2, ("", "other", 1)])
@example([("", "new", 0), ("", "new", 0), *[("", "longer", 0)] * 2, ("", "new", 0), ("", "other", 1)])
@given(moves)
def test_a_request_is_the_difference_to_that_of_the_last_four_of_its_path_that_it_shares_most_with(moves: Any) -> None:
    """
    Those that go on from each other are counted and not kept; here each of the four is.
    """
    encoder = Encoder(MemoryJournal(redact="off").redactor, link=False)
    kept: dict[str, deque[tuple[int, Transcript]]] = {}
    made: list[Transcript] = [Transcript([UserMessage("go")])]
    for seq, (path, move, pick) in enumerate(moves):
        last = kept[path][-1][1] if path in kept else made[-1]
        if move == "longer":
            transcript = last.extend((UserMessage(f"{seq}"),))
        elif move == "other":
            transcript = made[pick % len(made)]
        else:
            transcript = last if move == "same" else Transcript([UserMessage(f"new {seq}")])
        made.append(transcript)
        asked = Intent(path, seq, CallModel(seq, ModelRequest("m/m", messages=transcript)))
        request = json.loads(encoder.lines(asked)[-1])["effect"]["request"]
        found = [item["seq"] for item in request["messages"] if item["type"] == "Slice"]
        bases = [*kept.get(path, kept.get("", ()) if path else ())]
        best = max(reversed(bases), key=lambda base: (base[1].shared_prefix(transcript), len(base[1])), default=None)

        assert set(found) <= ({best[0]} if best else set())
        assert found or best is None or not best[1].shared_prefix(transcript)
        kept.setdefault(path, deque(maxlen=KEPT_BASES)).append((seq, transcript))
