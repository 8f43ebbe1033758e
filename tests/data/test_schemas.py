"""Where the references of a JSON Schema lead."""

from __future__ import annotations

import pytest

from stepengine.data.models import ModelSettings
from stepengine.data.schemas import check_references, nest_schema_under_property
from stepengine.errors import DataError

NAME = {"type": "string"}


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": NAME}},
        {"items": {"$ref": "#"}},
        {"$ref": "#name", "$defs": {"A": {**NAME, "$anchor": "name"}}},
        {"$ref": "#/$defs/a~1b~0c%20d", "$defs": {"a/b~c d": NAME}},
        {"enum": [{"$ref": "#/data"}], "properties": {"$ref": NAME}},
    ],
)
def test_a_reference_with_a_target_is_accepted(schema):
    check_references("x", schema)


@pytest.mark.parametrize(
    ("schema", "at"),
    [
        ({"properties": {"a": {"$ref": "#/$defs/A"}}}, "#/properties/a/$ref"),
        ({"properties": {"data": {"$ref": "#/$defs/A", "$defs": {"A": NAME}}}}, "#/properties/data/$ref"),
        ({"items": {"$ref": "#/anyOf/1"}, "anyOf": [NAME]}, "#/items/$ref"),
        ({"$ref": "https://schemas.example/a"}, "#/$ref"),
    ],
)
def test_reference_without_target_is_rejected_with_its_place(schema, at):
    with pytest.raises(DataError, match="does not exist; define its target") as caught:
        check_references("x", schema)
    assert caught.value.message.startswith(f"x at {at}: ")


@pytest.mark.spec("reliability:TL20")
def test_no_settings_hold_a_reference_without_a_target():
    lost = {"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}}
    with pytest.raises(DataError, match="response_schema at #/properties/a/"):
        ModelSettings(response_schema=lost)


def test_a_nested_schema_keeps_the_targets_of_its_references():
    schema = {
        "items": {"anyOf": [{"$ref": "#"}, {"$ref": "#/$defs/A"}, {"$ref": "#/items/anyOf/1"}]},
        "$defs": {"A": NAME},
    }
    inner, definitions = nest_schema_under_property(schema, "data")
    assert definitions == {"$defs": {"A": NAME}}
    assert [one["$ref"] for one in inner["items"]["anyOf"]] == [
        "#/properties/data",
        "#/$defs/A",
        "#/properties/data/items/anyOf/1",
    ]
    check_references("x", {"properties": {"data": inner}, **definitions})
