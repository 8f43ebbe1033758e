"""
The lines of a journal are plain ``json.dumps`` of what they hold.
"""

from __future__ import annotations

import json
from typing import Any
from zlib import crc32

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stepengine.data.codec import STORED, encode_stored
from stepengine.data.effects import CallModel
from stepengine.data.json import freeze
from stepengine.data.messages import UserMessage
from stepengine.data.models import ModelRequest
from stepengine.data.transcript import Transcript
from stepengine.journal.encoding import Encoder
from stepengine.journal.fingerprints import Fingerprints, fingerprint, select_fingerprinted_part
from stepengine.journal.records import Intent, Result
from stepengine.redaction import make_redactor
from tests import strategies

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
    (line,) = Encoder(OFF, link=False, inline=LONG).encode_record_lines(record)
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


@pytest.mark.spec("replay:J10", "replay:J1")
@pytest.mark.parametrize("name", sorted(STORED.keys() - {"value", "failure", "stop", "gathered", "child_result"}))
@settings(max_examples=2)
@given(data=st.data())
def test_result_line_is_plain_json_for_every_stored_class(name: str, data: st.DataObject) -> None:
    value = data.draw(strategies.STORED[name].filter(lambda value: not has_special_object(encode_stored(value))))
    said = {"kind": "result", "path": "1.2", "seq": 7, "at": 9, "value": encode_stored(value)}

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


def test_known_fingerprint_does_not_omit_messages() -> None:
    """
    Two journals may share a history; who comes second finds nothing to write in what its own fingerprint took, but the tail.
    """
    encoder = Encoder(OFF, link=False, inline=LONG)
    first = Transcript([UserMessage("first")])
    encoder.encode_record_lines(Intent("", 0, CallModel(0, ModelRequest("m/m", messages=first))))
    request = ModelRequest("m/m", messages=first.extend((UserMessage("second"),)), tail=(UserMessage("now"),))
    Fingerprints(OFF).for_request(request)
    asked = json.loads(encoder.encode_record_lines(Intent("", 1, CallModel(1, request)))[0])["effect"]["request"]

    assert [{"type": "slice", "seq": 0, "start": 0, "stop": 1}, encode_stored(UserMessage("second"))] == asked[
        "messages"
    ]
    assert [encode_stored(UserMessage("now"))] == asked["tail"]


def test_extra_result_members_keep_their_row_order() -> None:
    extras: dict[str, Any] = {"writes": [{"path": "a"}], "attempts": [{"error": {"type": "model_error"}}]}
    written = json.loads(line_of(Result("", 0, 1, "x", extras)))

    assert list(written) == ["kind", "path", "seq", "at", "attempts", "writes", "value", "crc"]
    with pytest.raises(ValueError, match="'forgotten'"):
        line_of(Result("", 0, 1, "x", {**extras, "forgotten": 1}))
