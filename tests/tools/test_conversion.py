"""What a body may return, what it becomes, and how typed values come back."""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, NamedTuple
from uuid import UUID

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from stepengine import ToolContext, tool
from stepengine.data.hooks import Change
from stepengine.data.messages import ImagePart, JsonPart, SideEffect, TextPart, ToolResult, UserMessage
from stepengine.errors import DataError, DefinitionError, ToolError
from stepengine.tools.conversion import make_tool_result

IMAGE = ImagePart(data=b"\x89PNG\r\n\x1a\n")


class Color(enum.Enum):
    RED = "red"


class Text(enum.StrEnum):
    A = "a"


class Model(BaseModel):
    when: dt.date
    other: int = Field(alias="otherName")


@dataclasses.dataclass
class Data:
    where: Path
    parts: tuple[int, ...]


@attrs.frozen
class Attrs:
    tags: frozenset[str]


class Named(NamedTuple):
    a: int


class HostileRepr:
    def __repr__(self) -> str:
        raise RuntimeError("repr")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("eq")

    __hash__ = None  # type: ignore[assignment]


class HostileClass:
    @property
    def __class__(self) -> Any:
        raise RuntimeError("class")


CYCLE: list[Any] = []
CYCLE.append({"again": CYCLE})


@pytest.mark.spec("reliability:TL09")
@pytest.mark.parametrize(
    ("value", "json"),
    [
        (None, None), (True, True), (3, 3), (1.5, 1.5), ([1, {"a": None}], [1, {"a": None}]), ((1, 2), [1, 2]),
        ({3, 1, 2}, [1, 2, 3]), (frozenset("ba"), ["a", "b"]), (Color.RED, "red"), (Text.A, None), (Decimal("1.10"), "1.10"),
        (dt.datetime(2026, 1, 2, 3, tzinfo=dt.UTC), "2026-01-02T03:00:00+00:00"), (dt.date(2026, 1, 2), "2026-01-02"),
        (dt.timedelta(minutes=1), 60.0), (UUID(int=1), "00000000-0000-0000-0000-000000000001"), (Path("a/b"), "a/b"),
        (Model(when=dt.date(2026, 1, 2), otherName=1), {"when": "2026-01-02", "otherName": 1}),
        (Data(Path("x"), (1,)), {"where": "x", "parts": [1]}), (Attrs(frozenset("x")), {"tags": ["x"]}), (Named(1), [1]),
        ({1: "a", Color.RED: "b", dt.date(2026, 1, 2): "c"}, {"1": "a", "red": "b", "2026-01-02": "c"}), ([], []),
    ],
    ids=lambda v: str(sorted(v) if isinstance(v, frozenset) else v),
)  # fmt: skip
def test_values_have_their_documented_json(value: Any, json: Any) -> None:
    result = make_tool_result(value)

    assert ("ok", json) == (result.status, result.data)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "bytes": (lambda: b"raw", "a bytes at $"),
    "object": (lambda: {"a": [object()]}, "a object at $.a[0]"),
    "generator": (lambda: (n for n in ()), "a generator at $"),
    "nan": (lambda: [float("nan")], "nan at $[0]"),
    "infinity": (lambda: float("inf"), "inf at $"),
    "cycle": (lambda: CYCLE, "contains itself"),
    "hostile repr": (HostileRepr, "a HostileRepr at $"),
    "hostile class": (HostileClass, "HostileClass"),
    "key": (lambda: {(1, 2): 3}, "a key at $"),
    "surrogate": (lambda: [("\ud800",)], "lone surrogate"),
    "large integer": (lambda: 10**4300, "4,300 digits"),
    "function": (lambda: print, "not JSON"),
    "class": (lambda: Data, "not JSON"),
}


@pytest.mark.spec("reliability:TL09")
@pytest.mark.parametrize("name", REFUSED)
def test_a_non_json_value_is_an_error_with_its_path(name: str) -> None:
    make, said = REFUSED[name]
    result = make_tool_result(make())

    assert result.is_error
    assert said in result.text
    assert "0x" not in result.text


def test_a_lone_surrogate_in_text_is_replaced() -> None:
    assert "a\ufffd" == make_tool_result("a\ud800").text


@pytest.mark.spec("reliability:TL09", "requirements:E12")
def test_texts_parts_and_results_are_returned_unchanged() -> None:
    mine = ToolResult(["x"], credits_used=2, side_effects=(SideEffect("file_written", "a"),))

    assert ToolResult((TextPart("hi"),)) == make_tool_result("hi")
    assert ToolResult((IMAGE,)) == make_tool_result(IMAGE)
    assert ToolResult((TextPart("see"), IMAGE)) == make_tool_result(["see", IMAGE])
    assert ToolResult((JsonPart(["see"]),)) == make_tool_result(["see"])
    assert make_tool_result(mine) is mine


leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
values = st.recursive(
    leaves,
    lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(), v, max_size=3) | st.tuples(v, v),
    max_leaves=10,
)


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, list | tuple) else value


@pytest.mark.deep
@pytest.mark.smoke
@given(values)
def test_any_json_like_value_becomes_equal_json(value: Any) -> None:
    result = make_tool_result(value)

    assert plain(value) == (result.text if isinstance(value, str) else result.data)
    assert not result.is_error


@given(
    st.recursive(
        leaves | st.binary() | st.just(object()) | st.floats(),
        lambda v: st.lists(v) | st.sets(st.integers()) | st.dictionaries(st.integers() | st.text(), v),
        max_leaves=8,
    )
)
def test_no_value_ever_escapes_as_an_exception(value: Any) -> None:
    assert make_tool_result(value).status in {"ok", "error"}


def returns(value: Any, annotation: Any) -> Any:
    def body() -> Any:
        return value

    body.__annotations__["return"] = annotation
    return tool(in_thread=False)(body)


@pytest.mark.parametrize(
    ("value", "annotation"),
    [
        ("text", str), (3, int), (None, None), ([dt.date(2026, 1, 2)], list[dt.date]), ({"a": (1, 2)}, dict[str, tuple[int, int]]),
        (Data(Path("x"), (1,)), Data), (Model(when=dt.date(2026, 1, 2), otherName=1), Model), (Color.RED, Color),
        (dt.timedelta(hours=1), dt.timedelta), ({1, 2}, set[int]), (Decimal("1.5"), Decimal), (IMAGE, ImagePart), ({"x": 1}, Any),
        (None, int | None), ("3", str),
    ],
    ids=lambda v: str(v)[:30],
)  # fmt: skip
async def test_a_typed_value_survives_the_way_through_json(value: Any, annotation: Any) -> None:
    made = returns(value, annotation)
    result = await made.execute({}, ToolContext.for_test())

    again = ToolResult(result.content)
    assert value == made.decode(again)


@given(
    st.dictionaries(
        st.one_of(st.integers(0, 3), st.sampled_from(["0", "1", "x", "A"]), st.sampled_from(Text)), st.booleans()
    )
)
def test_a_mapping_loses_no_entry_or_is_an_error(value: dict[Any, bool]) -> None:
    result = make_tool_result(value)
    texts = [str(key.value if isinstance(key, Text) else key) for key in value]

    if len(set(texts)) == len(texts):
        assert dict(zip(texts, value.values(), strict=True)) == result.data
    else:
        assert result.is_error
        assert "two keys" in result.text
        assert "the same as JSON" in result.text


@pytest.mark.parametrize("value", [{"a": 1}, {}])
async def test_an_annotation_that_cannot_be_hashed_decodes_its_value(value: dict[str, int]) -> None:
    @tool
    def body() -> Annotated[dict, {"unit": "m"}]:  # type: ignore[type-arg]
        return value

    result = await body.execute({}, ToolContext.for_test())
    assert value == body.decode(result)


def test_decoding_a_mismatched_result_raises() -> None:
    with pytest.raises(DataError, match="return annotation"):
        returns(1, int).decode(ToolResult.text("many"))
    with pytest.raises(ToolError, match="failed: no"):
        returns(1, int).decode(ToolResult.error("no"))
    with pytest.raises(DefinitionError, match="Attrs"):
        returns(1, Attrs).decode(ToolResult.json({"tags": []}))
    with pytest.raises(DataError, match="no ImagePart"):
        returns(1, ImagePart).decode(ToolResult.text("x"))


def test_python_arguments_are_encoded_as_call_input() -> None:
    @tool
    def f(ctx: ToolContext, day: dt.date, tags: set[str] = frozenset(), *, flag: bool = False) -> None: ...  # type: ignore[assignment]

    assert {"day": "2026-01-02", "tags": ["x"], "flag": True} == f.arguments(dt.date(2026, 1, 2), {"x"}, flag=True)
    with pytest.raises(TypeError, match="missing"):
        f.arguments()  # type: ignore[call-arg]


def test_an_unsupported_change_is_an_error_naming_the_allowed_hooks() -> None:
    result = make_tool_result(ToolResult.text("x", change=Change(tail=[UserMessage("y")], context={"a": 1})))
    who = "tail is for pre_run hooks, pre_step hooks"

    assert (True, None) == (result.is_error, result.change)
    assert f"the tool returned Change(tail=...), which cannot be used there; {who}" == result.text
    fine = ToolResult.text("x", change=Change(context={"a": 1}, messages=[], view=[], system_prompt="s"))
    assert fine == make_tool_result(fine)
