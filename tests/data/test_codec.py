"""
The codec: every stored value survives JSON, and nothing that is not exactly a stored value is loaded.
"""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from stepengine.data.codec import (
    FORMAT_VERSION,
    STORED,
    decode_stored,
    decode_stored_or_json,
    encode_stored,
    from_json,
    plain,
    to_json,
)
from stepengine.data.hooks import Change
from stepengine.data.json import JsonDict, freeze
from stepengine.data.messages import (
    AssistantMessage,
    ImagePart,
    ToolCallPart,
    ToolMessage,
    ToolResult,
)
from stepengine.data.models import ModelReply
from stepengine.data.outcomes import Failure, Gathered, Stop, Value
from stepengine.data.questions import Answer
from stepengine.data.state import AgentState, RunResult, RunStatus
from stepengine.data.stored import STORED_TYPES
from stepengine.data.tools import ToolSpec
from stepengine.data.transcript import Transcript
from stepengine.data.usage import Usage
from stepengine.errors import DataError, ModelError, StepEngineError, ToolError
from tests import strategies

few = settings(max_examples=5)


def loads(data: Any) -> Any:
    return from_json(json.loads(json.dumps(data)))


# --- round trip -----------------------------------------------------------------------------------------------------


def test_there_is_a_strategy_for_every_stored_class() -> None:
    assert set(STORED) == set(strategies.STORED)


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("requirements:B17", "replay:J10")
@pytest.mark.parametrize("name", sorted(STORED))
@few
@given(data=st.data())
def test_every_stored_class_survives_json(name: str, data: st.DataObject) -> None:
    value = data.draw(strategies.STORED[name])

    loaded = loads(to_json(value))

    assert type(value) is type(loaded)
    assert value == loaded
    assert to_json(value) == to_json(loaded)


@pytest.mark.deep
@pytest.mark.smoke
@settings(max_examples=10)
@given(strategies.states)
def test_state_stores_its_view_only_if_it_differs(state: AgentState) -> None:
    assert ("view" in to_json(state)) == (state.view != state.message_history)
    same = attrs.evolve(state, view=state.message_history)

    loaded = loads(to_json(same))

    assert "view" not in to_json(same)
    assert loaded.view is loaded.message_history


def test_value_distinguishes_json_from_stored_objects_and_tuples() -> None:
    lookalike = freeze({"type": "usage", "input_tokens": 5})

    for value in (lookalike, Usage(5), (), (Answer("yes"), Answer("no")), freeze([]), None, "text"):
        loaded = loads(to_json(Value(value))).value

        assert (type(value), value) == (type(loaded), loaded)


def test_python_values_of_hooks_are_never_stored() -> None:
    assert to_json(Change(values={"db": object()})) == {"stepengine": FORMAT_VERSION, "type": "change"}


def test_cause_and_result_of_an_error_are_not_stored() -> None:
    error = ToolError("boom", tool_name="t", result=ToolResult.error("boom"))

    assert to_json(error) == {"stepengine": FORMAT_VERSION, "type": "tool_error", "message": "boom", "tool_name": "t"}


# --- what cannot be stored ------------------------------------------------------------------------------------------


class Unknown(ToolError):
    pass


UNSTORABLE: list[tuple[Any, str]] = [
    (object(), "$"),
    (Unknown("x"), "$"),
    (Failure(Unknown("x")), "$.error"),
    (Failure(ModelError("x", status="400")), "$.error.status"),  # type: ignore[arg-type]
    (Value({"a": [0, float("nan")]}), "$.value.a[1]"),
    (Value("\ud800"), "$.value"),
    (Value((Usage("many"),)), "$.value[0].input_tokens"),  # type: ignore[arg-type]
    (Gathered((Value(1), Value(10**4300))), "$.outcomes[1].value"),
    (AgentState(system_prompt="\udfff"), "$.system_prompt"),
    (AgentState(step_index=True), "$.step_index"),
    (AgentState(cost=0.5), "$.cost"),  # type: ignore[arg-type]
    (AgentState(cost=Decimal("NaN")), "$.cost"),
    (AgentState(tool_definitions={"t": 5}), "$.tool_definitions.t"),  # type: ignore[dict-item]
    (AgentState(tool_definitions=JsonDict({5: 5})), "$.tool_definitions"),
]


@pytest.mark.spec("reliability:JR43")
@pytest.mark.parametrize(("value", "path"), UNSTORABLE, ids=[f"{n}-{path}" for n, (_, path) in enumerate(UNSTORABLE)])
def test_unstorable_value_is_rejected_with_its_path(value: Any, path: str) -> None:
    with pytest.raises(DataError) as caught:
        to_json(value)

    assert path == caught.value.path
    assert f" at {path}" in caught.value.message


def test_bytes_are_stored_as_base64_text() -> None:
    stored = encode_stored(ImagePart(data=b"\0\1"))

    assert "AAE=" == stored["data"]
    assert ImagePart(data=b"\0\1") == decode_stored(stored)
    with pytest.raises(DataError, match="expected base64 text, not"):
        decode_stored({**stored, "data": 5})


def test_too_deeply_nested_value_is_rejected() -> None:
    value = Value(1)
    for _ in range(2_000):
        value = Value(value)

    with pytest.raises(DataError, match="nested too deeply"):
        to_json(value)
    with pytest.raises(DataError, match="nested too deeply"):
        data: Any = {"type": "json", "value": 1}
        for _ in range(20_000):
            data = {"type": "value", "value": data}
        from_json({"stepengine": FORMAT_VERSION, **data})


# --- strictness -----------------------------------------------------------------------------------------------------

WRONG: dict[str, list[Any]] = {
    "str": [1, None, True, ["a"], {"a": 1}, "\ud800"],
    "str | None": [1, True, ["a"], {"a": 1}, "\udfff"],
    "int": ["1", 1.5, True, None, [1], {}, 2**63],
    "int | None": ["1", 1.5, True, [1], {}, -(2**63) - 1],
    "float": ["1", True, None, [1.0], {}, float("nan"), float("inf")],
    "float | None": ["1", True, [1.0], {}, float("nan"), float("-inf")],
    "bool": [0, 1, "true", None, [], {}],
    "bool | None": [0, 1, "true", [], {}],
    "bytes | None": [1, True, "*", "é", "abc", []],
    "Decimal | None": [1, 1.5, True, "one", "NaN", "Infinity", "", [], {}],
    "Decimal | float | None": [True, "one", "NaN", float("nan"), [], {}],
    "JsonDict": [None, 1, "a", True, [], [["a", 1]]],
    "JsonDict | None": [1, "a", True, []],
    "tuple[str, ...]": [None, 1, "ab", {}, [1], ["a", None], [["a"]]],
    "tuple[JsonDict, ...]": [None, 1, "ab", {}, [1], ["a"], [None], [[]]],
    "Sequence[str]": [None, 1, "ab", {}, [1], ["a", None]],
    "StopReason": [None, 1, True, "because", "END_TURN", [], {}],
    "RunStatus": [None, 1, True, "done", [], {}],
    "Mapping[str, ToolSpec]": [None, [], "a", {"a": 1}, {"a": {}}, {"a": {"type": "usage"}}],
    "Mapping[str, Usage]": [None, [], "a", {"a": 1}, {"a": {}}, {"a": {"type": "spending"}}],
    "Mapping[str, Decimal]": [None, [], "a", {"a": 1}, {"a": None}, {"a": "NaN"}, {"a": {}}],
}
"""For every annotation of a field, JSON values that do not fit it."""
OBJECTS = [1, True, "a", [1], {}, {"type": "Foreign"}, {"type": 5}, {"type": "Hooks"}]


def annotations_of(cls: type[Any]) -> dict[str, str]:
    if issubclass(cls, StepEngineError):
        parameters = inspect.signature(cls).parameters
        return {name: parameters[name].annotation for name in ("message", *cls.fields)}
    if cls is Transcript:
        return {"messages": "tuple[Message, ...]"}
    return {a.name: a.type for a in attrs.fields(cls) if a.init and (cls, a.name) != (Change, "values")}


def wrong_values(annotation: str) -> list[Any]:
    if annotation in WRONG:
        return WRONG[annotation]
    if "Literal" in annotation or annotation in {"ResultStatus", "ToolKind", "StopKind", "OnMaxSteps | None"}:
        return [1, True, "", "whatever", [], {}, ["ok"]]
    if "JsonValue" in annotation or annotation == "Out":
        return [float("nan"), {"a": [10**4300]}, ["\ud800"]]
    if annotation == "Any":
        return [5, None, "a", [], {"type": "json"}, {"type": "json", "value": 1, "x": 2}, {"type": "tuple", "items": 5}]
    if annotation.startswith("tuple["):
        absent = () if annotation.endswith("| None") else (None,)
        return [*absent, 5, "ab", {}, *([item] for item in OBJECTS if not (item == "a" and "[str" in annotation))]
    return OBJECTS


@pytest.mark.parametrize("name", sorted(STORED))
@settings(max_examples=2)
@given(data=st.data())
def test_wrong_value_in_any_field_is_rejected_with_its_path(name: str, data: st.DataObject) -> None:
    stored = to_json(data.draw(strategies.STORED[name]))

    for field, annotation in annotations_of(STORED[name]).items():
        if annotation == "ToolChoice | None":
            annotation = "str | None"  # noqa: PLW2901
        for wrong in wrong_values(annotation):
            with pytest.raises(DataError) as caught:
                from_json({**stored, field: wrong})

            assert caught.value.path.startswith(f"$.{field}"), (field, wrong, caught.value)
            assert f" at {caught.value.path}" in caught.value.message


@pytest.mark.parametrize("kind", ["object", "Hooks", "RunResult", "", None, []])
def test_a_type_outside_the_closed_list_is_refused(kind: Any) -> None:
    with pytest.raises(DataError, match="type"):
        from_json({"stepengine": FORMAT_VERSION, "type": kind})


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.parametrize("name", sorted(STORED))
@settings(max_examples=2)
@given(data=st.data())
def test_an_unknown_field_is_refused_and_named(name: str, data: st.DataObject) -> None:
    stored = to_json(data.draw(strategies.STORED[name]))

    for field in ("surprise", "_memo", "__class__", "py/object", 5):
        with pytest.raises(DataError, match=r"unknown member") as caught:
            from_json({**stored, field: 1})

        assert f"$.{field}" == caught.value.path


@pytest.mark.parametrize("version", [2, 0, "1", 1.0, True, None, [1], 10**400, "x" * 5_000])
def test_another_format_is_refused(version: Any) -> None:
    with pytest.raises(DataError, match="reads format 1") as caught:
        from_json({"type": "text", "text": "a", "stepengine": version})

    assert "$.stepengine" == caught.value.path
    assert len(caught.value.message) < 200


@pytest.mark.parametrize("data", [None, 5, "text", [], {}, {"type": "text", "text": "a"}])
def test_data_without_the_stored_form_is_rejected(data: Any) -> None:
    with pytest.raises(DataError, match="not a stored stepengine value"):
        from_json(data)


def test_a_missing_field_is_named() -> None:
    with pytest.raises(DataError, match="'text' needs this member") as caught:
        from_json({"stepengine": FORMAT_VERSION, "type": "user_message", "content": [{"type": "text"}]})

    assert "$.content[0].text" == caught.value.path


@pytest.mark.spec("requirements:B16")
def test_a_stored_history_that_does_not_pair_is_refused() -> None:
    stored = to_json(
        AgentState.from_messages([AssistantMessage([ToolCallPart("c1", "t")]), ToolMessage("c1", "t", "")])
    )
    del stored["message_history"]["messages"][1]

    with pytest.raises(DataError, match="have no result") as caught:
        from_json(stored)

    assert "$.message_history" == caught.value.path


# --- fuzz -----------------------------------------------------------------------------------------------------------


def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    for key, inner in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        yield from places(inner, (*path, key))


@st.composite
def broken(draw: st.DrawFn) -> Any:
    """
    The stored form of a value in which some members were replaced, removed, moved or added.
    """
    data = copy.deepcopy(to_json(draw(strategies.stored())))
    for _ in range(draw(st.integers(1, 3))):
        found = list(places(data))
        if not found:
            break
        *way, last = draw(st.sampled_from(found))
        owner = data
        for key in way:
            owner = owner[key]
        match draw(st.sampled_from(["replace", "remove", "type", "graft"])):
            case "replace":
                owner[last] = draw(strategies.json_values() | st.sampled_from([float("nan"), "\ud800", 2**70]))
            case "remove":
                del owner[last]
            case "type":
                owner[last] = {"type": draw(st.sampled_from([*STORED, "json", "tuple"]))}
            case "graft":
                owner[last] = {k: v for k, v in to_json(draw(strategies.stored())).items() if k != "stepengine"}
    return data


@pytest.mark.spec("reliability:R20")
@given(broken())
@settings(max_examples=25)
def test_mutated_stored_form_loads_consistently_or_raises_data_error(data: Any) -> None:
    try:
        loaded = from_json(data)
    except DataError as error:
        place = error.path
    else:
        place = "$"
        assert loaded == from_json(to_json(loaded))

    assert place.startswith("$")


# --- for people -----------------------------------------------------------------------------------------------------


class Output(BaseModel):
    mode: str = "json"


def test_plain_shows_anything_and_never_fails() -> None:
    result = RunResult(
        status=RunStatus.COMPLETED, state=AgentState(), output=Output(), error=KeyError("k"), journal=object()
    )
    shown = plain(
        {
            "usage": Usage(5),
            "result": result,
            "broken": Stop("limit", error=Unknown("x")),
            "set": {1},
            3: float("nan"),
            "text": "\ud800",
            "reply": ModelReply("x", cost=Decimal("0.5")),
            "class": Output,
        }
    )

    assert shown["usage"] == {"type": "usage", "input_tokens": 5}
    assert shown["result"]["status"] == "completed"
    assert shown["result"]["output"] == {"mode": "json"}
    assert shown["result"]["error"] == "'k'"
    assert "journal" not in shown["result"]
    assert shown["broken"]["error"] == "x"
    assert shown["set"] == [1]
    assert shown["3"] == "nan"
    assert shown["text"] == "�"
    assert shown["reply"]["cost"] == "0.5"
    json.dumps(shown, allow_nan=False).encode()


@pytest.mark.parametrize("value", [ToolResult.text("x"), (Usage(1), Usage(2)), (), {"a": [1, None]}, "x", None])
def test_bare_value_restores_like_a_value_inside_an_outcome(value: Any) -> None:
    inside = encode_stored(Value(value))["value"]
    assert decode_stored_or_json(inside) == value == decode_stored({"type": "value", "value": inside}).value


def test_unknown_type_inside_a_bare_value_is_rejected_with_path() -> None:
    with pytest.raises(DataError, match=r"unknown type 'Nothing' at \$\.items\[1\]"):
        decode_stored_or_json({"type": "tuple", "items": [{"type": "usage"}, {"type": "Nothing"}]})


def test_tool_without_time_limit_survives_json():
    spec = ToolSpec("wait", timeout=float("inf"))

    assert "inf" == to_json(spec)["timeout"]
    assert spec == from_json(json.loads(json.dumps(to_json(spec))))
    assert [ToolSpec("a", timeout=3.5), ToolSpec("b")] == [
        from_json(to_json(each)) for each in (ToolSpec("a", timeout=3.5), ToolSpec("b"))
    ]


def test_from_json_names_the_type_it_received_instead() -> None:
    with pytest.raises(
        DataError, match=r"AgentState\.from_json needs the output of AgentState\.to_json, not a stored Usage"
    ):
        AgentState.from_json(to_json(Usage()))


@pytest.mark.spec("replay:J34")
def test_tags_and_classes_of_the_table_are_unique() -> None:
    assert len(STORED_TYPES) == len({row.tag for row in STORED_TYPES}) == len({row.cls for row in STORED_TYPES})
