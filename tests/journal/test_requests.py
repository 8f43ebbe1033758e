"""
Requests are stored as differences: whatever happens to a history, the recorded request is the one that was sent.
"""

from __future__ import annotations

import json
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepengine.data.effects import CallModel
from stepengine.data.messages import AssistantMessage, UserMessage
from stepengine.data.models import ModelRequest, ModelSettings
from stepengine.data.outcomes import Value
from stepengine.data.tools import ToolSpec
from stepengine.data.transcript import Transcript
from stepengine.journal import MemoryJournal, Redactor
from stepengine.journal.fingerprints import Fingerprints
from stepengine.journal.history import History
from stepengine.journal.recorded_requests import RecordedRequests
from stepengine.journal.records import Head, Input, Intent, Result

HEAD = Head(engine="0", agent="a", definition="0", run="r", seed="0", created="2026-01-01T00:00:00.000Z", link=True)
ROOT = {"type": "agent_call", "agent_id": "a", "prompt": "", "params": None, "run_id": "r"}
PLAIN = Redactor({}, shapes=False)

words = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=4)
messages = st.builds(UserMessage, words, st.just(("T",)) | st.just(())) | st.builds(AssistantMessage, words)
# What a handler or a policy may do to a history between two requests.
moves = st.one_of(
    st.tuples(st.just("append"), st.lists(messages, max_size=3)),
    st.tuples(st.just("drop"), st.integers(0, 4)),
    st.tuples(st.just("keep"), st.integers(0, 4)),
    st.tuples(st.just("rotate"), st.integers(0, 4)),
    st.tuples(st.just("aside"), st.lists(messages, max_size=2)),
    st.tuples(st.just("copy"), st.none()),
)


# Given again and again as they are, as a run does, or changed from one request to the next.
TOOLS = ((), (ToolSpec("t", "d", {"type": "object", "$ref": "x"}),), (ToolSpec("u", "", {}), ToolSpec("t", "d", {})))
SETTINGS = ModelSettings()


def moved(history: Transcript, move: tuple[str, Any]) -> Transcript:
    kind, value = move
    match kind:
        case "append":
            return history.extend(value)
        case "drop":
            return Transcript(history[value:])
        case "keep":
            return Transcript(history[:value])
        case "rotate":
            return Transcript([*history[value:], *history[:value]])
        case "copy":
            return Transcript([attrs.evolve(m) for m in history])
        case _:
            return Transcript(value)


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("replay:J19", "replay:J39")
@given(st.lists(moves, max_size=12), st.lists(words, max_size=2), st.lists(st.sampled_from(TOOLS), max_size=3))
def test_every_request_round_trips(changes, prompts, tools):
    history, journal = Transcript(), MemoryJournal(redact="off")
    writer = journal.writer()
    for record in (HEAD, Intent("", -1, ROOT)):
        writer.append(record)
    sent: list[ModelRequest] = []
    for number, move in enumerate(changes):
        seen = moved(history, move)
        history = history if move[0] == "aside" else seen
        prompt = prompts[number % len(prompts)] if prompts else ""
        specs = tools[number % len(tools)] if tools else ()
        request = ModelRequest(
            "m", prompt, seen, specs, tail=() if number % 3 else (UserMessage("tail"),), settings=SETTINGS
        )
        sent.append(request)
        writer.append(Intent("", number, CallModel(number, request)))
        writer.append(Result("", number, number, Value(None)))
    lines = journal.lines()
    blobs = [json.loads(line)["fp"] for line in lines if line.startswith(b'{"kind":"blob"')]
    assert len(blobs) == len(set(blobs)), "what many requests share is written once, before the first of them"
    read = MemoryJournal(lines, redact="off").history()
    requests = RecordedRequests(read)
    prints = Fingerprints(PLAIN)
    for number, request in enumerate(sent):
        intent = read.intents["", number]
        assert requests.get_request(intent) == request
        assert [m["content"] for m in requests.get_messages(intent)] == [
            [{"type": "text", "text": p.text} for p in m.content] for m in request.messages
        ]
        # A file's fingerprint is that of the request, whatever it was stored as a difference to.
        assert intent.fp == prints.for_request(request)


@pytest.mark.spec("replay:J39", "replay:J10", "replay:D2")
def test_request_fingerprint_covers_exactly_what_the_model_sees():
    prints = Fingerprints(PLAIN)
    base = ModelRequest("m", "s", Transcript([UserMessage("hi", ("A",))]), (ToolSpec("t", "d", {"a": 1, "b": 2}),))
    same = [
        attrs.evolve(base, messages=Transcript([UserMessage("hi", ("B",))])),
        attrs.evolve(base, messages=Transcript([UserMessage("hi")])),
        attrs.evolve(base, tools=(ToolSpec("t", "d", {"b": 2, "a": 1}, timeout=5.0, retries=2),)),
        attrs.evolve(base, messages=Transcript(), tail=(UserMessage("hi"),)),
    ]
    other = [
        attrs.evolve(base, model="n"),
        attrs.evolve(base, system_prompt="s "),
        attrs.evolve(base, messages=Transcript([UserMessage("hi"), UserMessage("")])),
        attrs.evolve(base, messages=Transcript([AssistantMessage("hi")])),
        attrs.evolve(base, tool_choice="none"),
        attrs.evolve(base, tools=(ToolSpec("t", "d", {"a": 1.0, "b": 2}),)),
        attrs.evolve(base, tail=(UserMessage("now"),)),
    ]
    known = prints.for_request(base)
    assert {prints.for_request(r) for r in same} == {known}
    assert known not in {prints.for_request(r) for r in other}
    assert len({prints.for_request(r) for r in other}) == len(other)


@pytest.mark.spec("replay:J41")
def test_recorded_gaps_are_valid_and_other_gaps_are_damage():
    def history(*records):
        return History([HEAD, Intent("", -1, ROOT), *records])

    done = Result("", 0, 0, Value(None))
    tool = {"type": "tool_call", "tool_name": "t", "input": {}}
    assert history(Intent("", 0, tool), done, Input("", 3, 0, {"type": "gap"}), Intent("", 3, tool)).intents
    with pytest.raises(Exception, match="the next effect of path '' is #1, not #3"):
        history(Intent("", 0, tool), done, Intent("", 3, tool))
