"""Structured outputs whose schema is not a plain object: which value counts, and what goes out to the providers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import pytest
from pydantic import BaseModel, RootModel

from stepengine import AgentDefinition, Engine, ModelSettings, RunStatus
from stepengine.errors import DataError, DefinitionError
from stepengine.testing import ScriptedModel, text, tool_call
from tests.models.wires import EACH, body


class Flight(BaseModel):
    number: str


class NoFlight(BaseModel):
    reason: str = "none found"


class Found(RootModel[Flight | NoFlight]):
    pass


class Defaults(BaseModel):
    city: str = "Lubeck"
    founded: int = 1143


class Tree(BaseModel):
    name: str = ""
    children: list[Tree] = []


class Envelope(BaseModel):
    data: dict[str, str] | None = None


ANY_OF = {
    "anyOf": [
        {"type": "object", "properties": {"number": {"type": "string"}}, "required": ["number"]},
        {"type": "object", "properties": {"reason": {"type": "string"}}},
    ]
}
FLIGHT = {"number": "A1"}


def ran(schema: Any, *replies: Any, **options: Any) -> Any:
    model = ScriptedModel([*replies])
    agent = AgentDefinition("finder", model="test/model", output_schema=schema, **options)
    with Engine([agent], models=model) as engine:
        return engine.run_sync(agent, "Find it."), model.calls


def set_output(**given: Any) -> Any:
    return tool_call("set_output", given)


def dangling(schema: Any, root: Any = None) -> Iterator[str]:
    root = schema if root is None else root
    if isinstance(schema, list):
        for one in schema:
            yield from dangling(one, root)
    elif isinstance(schema, dict):
        reference = schema.get("$ref")
        if isinstance(reference, str):
            target = root
            for part in reference.removeprefix("#").split("/")[1:]:
                target = target.get(part) if isinstance(target, dict) else None
            if target is None:
                yield reference
        for one in schema.values():
            yield from dangling(one, root)


@pytest.mark.spec("generator-contract:S9")
@pytest.mark.parametrize(
    ("schema", "inside"),
    [
        (Found, FLIGHT),
        (ANY_OF, FLIGHT),
        (Tree, {"name": "root", "children": [{"name": "leaf", "children": []}]}),
        (Defaults, {"city": "Bremen", "founded": 782}),
    ],
)
def test_set_output_unwraps_data_even_if_the_whole_object_fits(schema, inside):
    result, _ = ran(schema, set_output(data=inside), text("done"))
    assert (result.status, result.state.output) == (RunStatus.COMPLETED, inside)


@pytest.mark.spec("generator-contract:S9")
def test_an_object_schema_with_a_member_called_data_keeps_it():
    result, _ = ran(Envelope, set_output(data={"data": "x"}), text("done"))
    assert result.output == Envelope(data={"data": "x"})
    result, _ = ran({"type": "object", "properties": {"data": {}}}, set_output(data={"data": "x"}), text("done"))
    assert result.output == {"data": {"data": "x"}}


@pytest.mark.spec("generator-contract:S9")
def test_a_refusal_names_the_field_inside_data():
    class Strict(RootModel[list[Flight]]):
        pass

    wrong = [{"number": 1}, {"number": 2}]
    _, requests = ran(Strict, set_output(data=wrong), set_output(data=[FLIGHT]), text("done"))
    refused = requests[1].messages[-2].result.text
    assert "0.number: Input should be a valid string; 1.number: Input should be a valid string" in refused


@pytest.mark.spec("generator-contract:S14", "reliability:TL20")
def test_json_schema_references_resolve_inside_the_data_wrapper():
    nested = {
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"$ref": "#"}}, {"$ref": "#/definitions/Old"}],
        "definitions": {"Old": {"enum": [{"$ref": "#/no/reference"}]}},
    }
    _, requests = ran(nested, text("done"), output_retries=0)
    shown = requests[0].tools[0].input_schema
    assert shown["properties"]["data"]["anyOf"][1]["items"] == {"$ref": "#/properties/data"}
    assert shown["properties"]["data"]["anyOf"][2] == {"$ref": "#/definitions/Old"}
    assert shown["definitions"] == nested["definitions"]


@pytest.mark.spec("generator-contract:S14")
def test_object_schema_refused_at_top_level_is_wrapped_in_data():
    schema = {"type": "object", **ANY_OF}
    result, requests = ran(schema, set_output(data=FLIGHT), text("done"))
    assert requests[0].tools[0].input_schema["properties"] == {"data": schema}
    assert result.output == FLIGHT


def test_response_schema_with_a_dangling_reference_is_refused():
    with pytest.raises(DataError, match="'#/\\$defs/Missing'"):
        ModelSettings(response_schema={"type": "object", "properties": {"a": {"$ref": "#/$defs/Missing"}}})


def test_output_schema_with_a_dangling_reference_is_refused():
    agent = AgentDefinition("finder", output_schema={"type": "array", "items": {"$ref": "#/$defs/Missing"}})
    with pytest.raises(DefinitionError, match="'#/\\$defs/Missing'"):
        Engine([agent], models=ScriptedModel([]))


@pytest.mark.spec("reliability:TL20")
@pytest.mark.parametrize("wire", EACH)
@pytest.mark.parametrize("strict", [False, True])
def test_references_resolve_on_every_wire(wire, strict):
    for schema in (Found, Tree, RootModel[list[Flight]]):
        _, requests = ran(schema, text("done"), output_retries=0)
        spec = attrs.evolve(requests[0].tools[0], strict=strict)
        promised = ModelSettings(response_schema=schema.model_json_schema())
        for sent in (
            body(wire, tools=(spec,)),
            body(wire, settings=promised),
            body(wire, settings=attrs.evolve(promised, output="tool")),
        ):
            assert list(dangling_below(sent)) == []


def dangling_below(value: Any) -> Iterator[str]:
    """Yield the dangling references of each schema in a request: a schema starts where an object is described."""
    if isinstance(value, list):
        for one in value:
            yield from dangling_below(one)
    elif isinstance(value, dict):
        if "properties" in value or "$defs" in value or "$ref" in value:
            yield from dangling(value)
        else:
            for one in value.values():
                yield from dangling_below(one)
