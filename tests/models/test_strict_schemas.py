"""Schemas that a provider is asked to keep to: what is sent for them, and which of them are asked for at all."""

from __future__ import annotations

import datetime as dt
import json
from typing import Any, Literal

import pydantic
import pytest

from stepengine.data.messages import UserMessage
from stepengine.data.models import ModelSettings
from stepengine.data.tools import ToolSpec
from stepengine.models._schemas import make_strict_schema
from tests.models.wires import body


class Place(pydantic.BaseModel):
    """Where it is."""

    row: int = pydantic.Field(ge=1, le=9, description="Counted from one.")
    side: Literal["left", "right"]
    note: str | int | None = None


class Answer(pydantic.BaseModel):
    title: str
    place: Place
    others: list[Place] = pydantic.Field(min_length=2)
    words: list[str] = pydantic.Field(min_length=1)
    day: dt.date
    code: str = pydantic.Field(pattern="^[a-z]+$", max_length=5)


class Full(pydantic.BaseModel):
    title: str
    count: int = pydantic.Field(ge=1)
    words: list[str] = pydantic.Field(min_length=2)
    kind: Literal["a", "b"]
    note: str | None


class Bag(pydantic.BaseModel):
    values: dict[str, int]


class Holder(pydantic.BaseModel):
    full: Full
    bag: Bag


class Pair(pydantic.BaseModel):
    first: Full
    second: Full


def objects(schema: Any) -> list[dict[str, Any]]:
    if isinstance(schema, list):
        return [found for item in schema for found in objects(item)]
    if not isinstance(schema, dict):
        return []
    own = [schema] if schema.get("type") == "object" else []
    return own + [found for item in schema.values() for found in objects(item)]


@pytest.mark.spec("providers:PV43")
@pytest.mark.parametrize("model", [Place, Answer, Full])
def test_anthropic_strict_schema_equals_the_sdk_transformation(model):
    import anthropic

    schema = model.model_json_schema()
    assert make_strict_schema(schema, "anthropic") == anthropic.transform_schema(schema)


@pytest.mark.spec("providers:PV43", "providers:PV44")
@pytest.mark.parametrize("wire", ["anthropic", "openai"])
def test_unsupported_schema_has_no_strict_form(wire):
    whole = {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]}
    assert make_strict_schema(whole, wire) == {**whole, "additionalProperties": False}
    for broken in (
        Bag.model_json_schema(),
        {**whole, "additionalProperties": True},
        {"type": "string"},
        {**whole, "anyOf": [whole]},
        {**whole, "properties": {"x": True}},
        {**whole, "properties": {"x": {}}},
        {**whole, "properties": []},
        {**whole, "required": "x"},
    ):
        assert make_strict_schema(broken, wire) is None
    deep: Any = {"type": "string"}
    for _ in range(5_000):
        deep = {"type": "object", "properties": {"x": deep}, "required": ["x"]}
    assert make_strict_schema(deep, wire) is None


@pytest.mark.spec("providers:PV44")
def test_openai_strict_schema_requires_all_members_and_refuses_others():
    found = make_strict_schema(Full.model_json_schema(), "openai")
    assert all(each["additionalProperties"] is False for each in objects(found))
    assert all(each["required"] == list(each["properties"]) for each in objects(found))
    assert found["properties"]["count"]["minimum"] == 1
    whole = {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]}
    for part in (
        {"type": "string", "maxLength": 3},
        {"type": "string", "default": "a"},
        {"type": "string", "pattern": "(?=a)"},
        {"type": "array"},
        {"oneOf": [{"type": "string"}]},
        {"$ref": "#/$defs/x", "description": "said beside it"},
        {"type": "string", "enum": [str(n) for n in range(1_001)]},
    ):
        assert make_strict_schema({**whole, "properties": {"x": part}}, "openai") is None, part
    assert make_strict_schema({**whole, "required": []}, "openai") is None


# --- on the wires -----------------------------------------------------------------------------------------------------

HI = UserMessage("hi")
FULL, OPEN = Full.model_json_schema(), Answer.model_json_schema()


def definition(name: str, schema: dict[str, Any], *, strict: bool) -> dict[str, Any]:
    (tool,) = body(name, HI, tools=(ToolSpec("t", "T.", schema, strict=strict),))["tools"]
    return tool.get("function", tool)


@pytest.mark.spec("providers:PV43", "providers:PV44")
def test_strict_tool_is_sent_where_server_and_schema_allow():
    for name in ("openai", "openai_chat"):
        form = make_strict_schema(FULL, "openai")
        told = definition(name, FULL, strict=True)
        assert (told["strict"], told["parameters"]) == (True, form)
        for schema, strict in ((OPEN, True), (FULL, False)):
            told = definition(name, schema, strict=strict)
            assert (told.get("strict", False), told["parameters"]) == (False, schema)
    told = definition("anthropic", OPEN, strict=True)
    assert (told["strict"], told["input_schema"]) == (True, make_strict_schema(OPEN, "anthropic"))
    for schema, strict in ((Bag.model_json_schema(), True), (FULL, False)):
        told = definition("anthropic", schema, strict=strict)
        assert ("strict" in told, told["input_schema"]) == (False, schema)
    assert definition("ollama", FULL, strict=True)["parameters"] == FULL
    assert "strict" not in definition("ollama", FULL, strict=True)


@pytest.mark.spec("providers:PV43", "providers:PV44")
def test_answer_schema_is_closed_and_strict_where_possible():
    def asked(name: str, schema: dict[str, Any]) -> dict[str, Any]:
        got = body(name, HI, settings=ModelSettings(response_schema=schema))
        return {"openai": lambda: got["text"]["format"], "anthropic": lambda: got["output_config"]["format"]}.get(
            name, lambda: got["response_format"]["json_schema"]
        )()

    assert all(each["additionalProperties"] is False for each in objects(asked("anthropic", OPEN)["schema"]))
    taken = body("anthropic", HI, settings=ModelSettings(response_schema=Bag.model_json_schema()))
    assert "output_config" not in taken
    assert [tool["input_schema"] for tool in taken["tools"]] == [Bag.model_json_schema()]
    assert [asked("openai", schema)["strict"] for schema in (FULL, OPEN)] == [True, False]
    assert [asked("openai_chat", schema).get("strict") for schema in (FULL, OPEN)] == [True, None]
    assert "strict" not in asked("ollama", FULL)
    assert json.dumps(asked("openai", FULL)["schema"]) == json.dumps(asked("openai_chat", FULL)["schema"])


@pytest.mark.spec("providers:PV43", "providers:PV44")
@pytest.mark.parametrize("wire", ["anthropic", "openai"])
@pytest.mark.parametrize("model", [Place, Answer, Holder, Pair])
def test_older_definitions_are_converted_like_newer_ones(model, wire):
    schema = model.model_json_schema()
    older = json.loads(json.dumps(schema).replace("$defs", "definitions"))
    assert make_strict_schema(older, wire) == make_strict_schema(schema, wire)
