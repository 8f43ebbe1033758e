"""
The lines of a journal are plain ``json.dumps`` of what they hold.
"""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stepengine.data.codec import STORED, bare, bare_any, restored_any
from stepengine.data.effects import CallModel
from stepengine.data.json import freeze
from stepengine.data.messages import AssistantMessage, ImagePart, TextPart, ToolCallPart, ToolMessage, UserMessage
from stepengine.data.models import ModelReply, ModelRequest
from stepengine.data.outcomes import Value
from stepengine.data.transcript import Transcript
from stepengine.errors import DataError
from stepengine.journal import FileJournal, MemoryJournal
from stepengine.journal.encoding import Encoder, outcome_of, unpack_texts
from stepengine.journal.fingerprints import Fingerprints, fingerprint, select_fingerprinted_part
from stepengine.journal.records import Intent, Result
from stepengine.redaction import make_redactor
from tests import strategies

ROOT = Path(__file__).resolve().parents[2]
OFF = make_redactor("off", {})
SEPARATORS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}
LONG = 1 << 30


def plainly(members: dict[str, Any], previous: int = 0) -> bytes:
    """
    Return the line of members as anybody would make it.
    """
    text = json.dumps(members, ensure_ascii=False, allow_nan=False, separators=(",", ":")).translate(SEPARATORS)
    body = text[:-1].encode()
    return body + b',"crc":"%08x"}\n' % crc32(body, previous)


def line_of(record: Any) -> bytes:
    (line,) = Encoder(OFF, link=False, inline=LONG).lines(record)
    return line


def has_special_object(value: Any) -> bool:
    """
    Return whether an object has one member whose name begins with a dollar sign: it is wrapped, which has tests of its own.
    """
    if isinstance(value, dict):
        return (len(value) == 1 and next(iter(value)).startswith("$")) or any(map(has_special_object, value.values()))
    return isinstance(value, list) and any(map(has_special_object, value))


def deep(levels: int) -> Any:
    value: Any = []
    for _ in range(levels - 1):
        value = {"in": value} if levels % 2 else [value]
    return freeze(value)


def replies_with(value: Any) -> ModelReply:
    return ModelReply([TextPart("said"), ToolCallPart("", "tool", {"given": value})])


@pytest.mark.spec("replay:J10", "replay:J1")
@pytest.mark.parametrize("name", sorted(STORED.keys() - {"value", "failure", "stop", "gathered", "child_result"}))
@settings(max_examples=2)
@given(data=st.data())
def test_result_line_is_plain_json_for_every_stored_class(name: str, data: st.DataObject) -> None:
    value = data.draw(strategies.STORED[name].filter(lambda value: not has_special_object(bare(value))))
    said = {"kind": "result", "path": "1.2", "seq": 7, "at": 9, "value": bare(value)}

    assert plainly(said) == line_of(Result("1.2", 7, 9, value))


@pytest.mark.spec("replay:J10", "replay:J1")
@given(strategies.json_values().filter(lambda value: not has_special_object(value)))
@example(1e-7)
@example(1e22)
@example(-0.0)
@example(2**63 - 1)
@example(2**63)
@example(10**4300 - 1)
@example(-(2**63))
@example("\x85\u2028\u2029\x00\x7f\ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16"))
@example([True, False, None, "", [], {}])
@example(deep(150))
def test_call_line_and_fingerprint_equal_plain_json(value: Any) -> None:
    form = {
        "type": "tool_call",
        "tool_name": "töol",
        "input": freeze({"v": value}),
        "tool_call_id": "c1",
        "source": "model",
    }
    said = {"kind": "intent", "path": "", "seq": 3, "fp": fingerprint(select_fingerprinted_part(form)), "effect": form}

    assert plainly(said) == line_of(Intent("", 3, form))


@pytest.mark.spec("replay:J10", "reliability:JR43")
@pytest.mark.parametrize(
    "wrong", [float("nan"), float("inf"), pytest.param(10**4300, id="4301 digits"), "\ud800", b"x"]
)
def test_non_json_value_is_rejected_before_it_is_recorded(wrong: Any) -> None:
    with pytest.raises(DataError):
        replies_with(wrong)
    with pytest.raises(DataError):
        bare_any(wrong)


@pytest.mark.spec("replay:D2", "replay:J10")
@settings(max_examples=12)
@given(strategies.paired_messages(), st.sets(st.integers(1, 12)), st.booleans())
def test_request_line_is_a_slice_plus_new_messages(messages: list[Any], cuts: set[int], has_tail: bool) -> None:
    encoder, transcript, known = Encoder(OFF, link=True, inline=LONG), Transcript(), 0
    tail = (UserMessage("now"),) if has_tail else ()
    # A result stands behind the message that asks for it.
    places = [n for n in sorted(cuts) if n < len(messages) and type(messages[n]) is not ToolMessage]
    crc = 0
    for seq, (start, stop) in enumerate(pairwise([0, *places, len(messages)])):
        transcript = transcript.extend(tuple(messages[start:stop]))
        request = ModelRequest("m/m", messages=transcript, tail=tail)
        record = Intent("", seq, CallModel(seq, request))
        lines = encoder.lines(record)
        fp = Fingerprints(OFF).for_request(request)
        sliced = [{"type": "slice", "seq": seq - 1, "start": 0, "stop": known}] if known else []
        asked: dict[str, Any] = {"model": "m/m", "messages": [*sliced, *map(bare, transcript[known:])]}
        asked |= {"tail": [*map(bare, tail)]} if tail else {}
        effect = {"type": "model_call", "purpose": "step", "request": asked}
        said = {"kind": "intent", "path": "", "seq": seq, "fp": fp, "effect": effect}
        if has_special_object(json.loads(json.dumps(said))):
            return

        assert [plainly(said, crc)] == lines
        crc, known = int(lines[0][-11:-3], 16), len(transcript)


def test_known_fingerprint_does_not_omit_messages() -> None:
    """
    Two journals may share a history; who comes second finds nothing to write in what its own fingerprint took, but the tail.
    """
    encoder = Encoder(OFF, link=False, inline=LONG)
    first = Transcript([UserMessage("first")])
    encoder.lines(Intent("", 0, CallModel(0, ModelRequest("m/m", messages=first))))
    request = ModelRequest("m/m", messages=first.extend((UserMessage("second"),)), tail=(UserMessage("now"),))
    Fingerprints(OFF).for_request(request)
    asked = json.loads(encoder.lines(Intent("", 1, CallModel(1, request)))[0])["effect"]["request"]

    assert [{"type": "slice", "seq": 0, "start": 0, "stop": 1}, bare(UserMessage("second"))] == asked["messages"]
    assert [bare(UserMessage("now"))] == asked["tail"]


def journals() -> list[Path]:
    found = [*ROOT.rglob("*.jsonl"), *ROOT.rglob("*.jsonl.sample")]
    heads = [path for path in found if path.read_bytes().startswith(b'{"kind":"head"')]
    return sorted(path for path in heads if not {"node_modules", ".git"} & set(path.parts))


@pytest.mark.spec("replay:J10", "replay:J34")
def test_repository_journals_are_rewritten_byte_for_byte() -> None:
    """
    Each result and each call of a tool is made of the value that its line holds, and its line of that value.
    """
    written_again: Counter[str] = Counter()
    for path in journals():
        history = FileJournal(path).history()
        for record in FileJournal(path).records():
            line = record.line
            if type(record) not in (Result, Intent) or line is None:
                continue
            members = unpack_texts({k: v for k, v in line.items() if k != "crc"}, history.blobs)
            if type(record) is Result and "value" in members and not members.keys() & {"attempts", "writes", "inputs"}:
                made = Result(record.path, record.seq, record.at, outcome_of(members).value)  # type: ignore[union-attr]
                if made.given is None or type(made.given).__name__ == "ChildResult":
                    continue
                # Written by an earlier release, a value may hold what says nothing any more.
                members["value"] = bare_any(restored_any(members["value"]))
            elif type(record) is Intent and record.type == "tool_call":
                made = Intent(
                    record.path, record.seq, members["effect"], "", record.gather, program_line=record.program_line
                )  # type: ignore[assignment]
            else:
                continue
            if has_special_object(members):
                continue
            redacted = "<redacted:" in json.dumps(members)

            assert plainly(members) == line_of(made) or redacted, (path, record)
            written_again[type(record).__name__] += 1

    assert written_again["Result"] > 100
    assert written_again["Intent"] > 50


def test_extra_result_members_keep_their_row_order() -> None:
    extras: dict[str, Any] = {"writes": [{"path": "a"}], "attempts": [{"error": {"type": "model_error"}}]}
    written = json.loads(line_of(Result("", 0, 1, "x", extras)))

    assert list(written) == ["kind", "path", "seq", "at", "attempts", "writes", "value", "crc"]
    with pytest.raises(ValueError, match="'forgotten'"):
        line_of(Result("", 0, 1, "x", {**extras, "forgotten": 1}))


def test_memory_journal_writes_the_same_lines() -> None:
    first = Transcript([UserMessage("add")])
    call = ToolCallPart("c1", "add", {"a": 1})
    longer = first.extend((AssistantMessage([call]), ToolMessage("c1", "add", "1")))
    requests = [ModelRequest("m/m", "Be brief.", messages) for messages in (first, longer)]
    requests.append(ModelRequest("m/other", "Be brief.", longer, tail=(UserMessage([ImagePart(data=b"\x00")]),)))
    form = {"type": "tool_call", "tool_name": "add", "input": freeze({"a": 1}), "tool_call_id": "c1", "source": "model"}
    given = [
        Intent("", 0, CallModel(0, requests[0]), "", None),
        Result("", 0, 3, ModelReply([call])),
        Intent("", 1, form, "", 1),
        Intent("", 2, {**form, "idempotent": True}, "", 1),
        Intent("", 3, form, program_line=4),
        Result("", 1, 5, Value("x", 6)),
        Result("", 2, 5, "x", {"attempts": [{"error": {"type": "model_error", "message": "busy"}}]}),
        Intent("", 4, CallModel(4, requests[1], "final_answer")),
        Intent("", 5, CallModel(5, requests[2])),
    ]
    encoder, journal = Encoder(OFF, link=False), MemoryJournal(redact="off", link=False)
    writer = journal.writer()
    for record in given:
        writer.append(record)
    once = journal.records()

    assert [line for record in given for line in encoder.lines(record)] == journal.lines()
    assert [(type(r), r.path, r.seq) for r in given] == [(type(r), r.path, r.seq) for r in once]  # type: ignore[union-attr]
    writer.append(given[0])
    assert all(a is b for a, b in zip(once, journal.records(), strict=False))
    assert len(given) + 1 == len(journal.records())
