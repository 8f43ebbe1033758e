"""
Events: every one has an address and becomes JSON under a name of its own.
"""

from __future__ import annotations

import json
import re
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepengine.data import events
from stepengine.data.events import EVENTS, Event, LogLine, ModelStarted, RunFinished, ToolFinished, ToolStarted
from stepengine.data.messages import ToolResult
from stepengine.data.models import ModelRequest
from stepengine.data.state import AgentState, RunPhase, RunResult, RunStatus
from stepengine.errors import DataError
from tests import strategies

CLASSES = [
    cls for cls in vars(events).values() if isinstance(cls, type) and issubclass(cls, Event) and cls is not Event
]
run_results = st.builds(RunResult, status=strategies.statuses, state=strategies.states, output=strategies.frozen_values)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "str": strategies.text,
    "WaitsFor": st.sampled_from(["time", "message", "child"]),
    "tuple[str, ...]": st.lists(strategies.text, max_size=3).map(tuple),
    "int": strategies.counts,
    "float": strategies.floats,
    "float | None": st.none() | strategies.floats,
    "Decimal | None": strategies.costs,
    "str | None": st.none() | strategies.text,
    "bool": st.booleans(),
    "JsonValue": strategies.json_values(),
    "Usage": strategies.usages,
    "RunPhase": st.sampled_from(RunPhase),
    "RunStatus": strategies.statuses,
    "ModelRequest | None": st.none() | strategies.requests,
    "ModelReply | None": st.none() | strategies.replies,
    "ToolResult": strategies.results,
    "Question": strategies.questions,
    "RunResult": run_results,
}


def any_event(cls: type[Event]) -> st.SearchStrategy[Event]:
    return st.builds(cls, **{a.name: FIELDS[str(a.type)] for a in attrs.fields(cls) if a.name != "_clean"})


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("requirements:N8")
@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
@settings(max_examples=5)
@given(data=st.data())
def test_every_event_becomes_json_with_its_type_and_address(cls: type[Event], data: st.DataObject) -> None:
    event = data.draw(any_event(cls))

    shown = json.loads(json.dumps(event.to_json(), allow_nan=False))

    assert (cls.type, event.path, event.seq, event.index) == (
        shown["type"],
        shown["path"],
        shown["seq"],
        shown["index"],
    )
    assert {"type", *(a.name for a in attrs.fields(cls) if a.name != "_clean")} == set(shown)


def test_types_are_unique_and_in_snake_case() -> None:
    assert {row.cls for row in EVENTS} == {*CLASSES}
    assert len(EVENTS) == len({cls.type for cls in CLASSES})
    for cls in CLASSES:
        assert re.fullmatch(r"[a-z]+(_[a-z]+)*", cls.type)
        assert cls.__name__ == "".join(word.capitalize() for word in cls.type.split("_"))


def test_event_equality_ignores_its_stream_index() -> None:
    assert ToolStarted(tool_name="t", index=3) == ToolStarted(tool_name="t", index=9)
    assert ToolStarted(tool_name="t") != ToolStarted(tool_name="t", seq=1)
    assert ModelStarted(model="m/x", request=ModelRequest("m/x")) == ModelStarted(model="m/x")
    assert (-1, 0, "") == (
        ToolStarted(tool_name="t").index,
        ToolStarted(tool_name="t").seq,
        ToolStarted(tool_name="t").path,
    )


def test_unstorable_values_in_events_are_shown_as_text() -> None:
    shown = ToolFinished(tool_name="\ud800", result=ToolResult("x", credits_used=float("nan"))).to_json()
    result: RunResult[Any] = RunResult(
        status=RunStatus.FAILED, state=AgentState(), error=OSError("gone"), journal=object()
    )
    finished = RunFinished(result=result).to_json()

    assert "\ufffd" == shown["tool_name"]
    assert "nan" == shown["result"]["credits_used"]
    assert ("failed", "gone") == (finished["result"]["status"], finished["result"]["error"])
    json.dumps([shown, finished], allow_nan=False).encode()
    with pytest.raises(DataError):
        LogLine(level="info", message="m", data={"a": object()})


def test_events_are_frozen() -> None:
    with pytest.raises(AttributeError):
        ToolStarted(tool_name="t").tool_name = "u"  # type: ignore[misc]
