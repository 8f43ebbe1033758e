"""The validator for JSON Schemas: what fits, what does not, and what it refuses to promise."""

from __future__ import annotations

from typing import Any

import pytest

from stepengine.data.json import freeze_object
from stepengine.errors import DefinitionError, ToolInputError
from stepengine.tools import Tool

TREE = {
    "type": "object",
    "properties": {"kids": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
    "additionalProperties": False,
}

CASES: list[tuple[dict[str, Any], list[Any], list[Any]]] = [
    ({"type": "integer"}, [1, 1.0, -3], [1.5, True, "1", None]),
    ({"type": "number"}, [1, 1.5], [False, "1"]),
    ({"type": ["string", "null"]}, ["", None], [0]),
    ({"type": "boolean"}, [True], [1]),
    ({"enum": [1, "a", None, [1]]}, [1, 1.0, "a", None, [1]], [True, "b", [1, 2]]),
    ({"const": {"a": 1}}, [{"a": 1}], [{"a": True}, {}]),
    ({"minimum": 1, "maximum": 3}, [1, 3, "no number"], [0, 4]),
    ({"exclusiveMinimum": 1, "exclusiveMaximum": 3}, [2], [1, 3]),
    ({"multipleOf": 2}, [4], [3]),
    ({"type": "string", "minLength": 1, "maxLength": 2, "pattern": "^a"}, ["a", "ab"], ["", "b", "abc"]),
    ({"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2}, [[1]], [[], [1, 2, 3], ["a"]]),
    ({"uniqueItems": True}, [[1, 2]], [[1, 1], [{"a": 1}, {"a": 1}]]),
    ({"prefixItems": [{"type": "integer"}], "items": {"type": "string"}}, [[1, "a"], []], [["a"], [1, 2]]),
    ({"anyOf": [{"type": "integer"}, {"minLength": 2}]}, [1, "ab"], ["a"]),
    ({"oneOf": [{"type": "integer"}, {"minimum": 5}]}, [1, 5.5], [7, 0.5]),
    ({"allOf": [{"minimum": 1}, {"maximum": 3}]}, [2], [0, 4]),
    ({"not": {"type": "string"}}, [1], ["a"]),
    (
        {"type": "object", "required": ["a"], "minProperties": 1, "maxProperties": 2},
        [{"a": 1}],
        [{}, {"a": 1, "b": 2, "c": 3}],
    ),
    (
        {"properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}},
        [{"a": 1, "b": "x"}],
        [{"b": 1}],
    ),
    (
        {"patternProperties": {"^x": {"type": "integer"}}, "additionalProperties": False},
        [{"x1": 1}],
        [{"x1": "a"}, {"y": 1}],
    ),
    ({"propertyNames": {"maxLength": 1}}, [{"a": 1}], [{"ab": 1}]),
    ({"$ref": "#/$defs/tree"}, [{"kids": [{"kids": []}]}], [{"kids": [{"x": 1}]}]),
    (False, [], [1]),  # type: ignore[list-item]
]


def tool_for(schema: Any) -> Tool[..., Any]:
    return Tool("t", "", {"properties": {"v": schema}, "$defs": {"tree": TREE}}, lambda value: value)


def fits(made: Tool[..., Any], value: Any) -> bool:
    try:
        made.binding().validate(freeze_object({"v": value}))
    except ToolInputError as error:
        return not all(issue.startswith("v") for issue in error.issues)
    return True


@pytest.mark.spec("requirements:E3", "requirements:E2")
@pytest.mark.parametrize(("schema", "good", "bad"), CASES, ids=[str(c[0])[:40] for c in CASES])
def test_what_fits_a_schema_is_accepted_and_what_does_not_is_refused_with_its_place(
    schema: Any, good: Any, bad: Any
) -> None:
    made = tool_for(schema)

    assert (good, []) == ([v for v in good if fits(made, v)], [v for v in bad if fits(made, v)])


def test_a_misfit_deep_inside_is_named_by_its_path() -> None:
    made = tool_for({"type": "array", "items": {"properties": {"x": {"type": "integer"}}}})

    with pytest.raises(ToolInputError, match=r"v\.1\.x: should be integer, not string"):
        made.binding().validate(freeze_object({"v": [{"x": 1}, {"x": "a"}]}))


@pytest.mark.spec("reliability:TL20")
@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"if": {}, "then": {}}, "'if' cannot be checked"),
        ({"$ref": "https://example.com/x"}, "points outside"),
        ({"$ref": "#/$defs/nothing"}, "does not exist"),
        ({"type": "text"}, "is no type"),
        ({"pattern": "("}, "no regular expression"),
        ({"pattern": "(?=a)"}, "without look-around"),
        ({"pattern": 3}, "no regular expression"),
        ({"minimum": "1"}, "is a number"),
        ({"anyOf": []}, "list of schemas"),
        (3, "a schema is an object"),
    ],
)
def test_a_schema_that_cannot_be_checked_is_refused_at_construction(schema: Any, said: str) -> None:
    with pytest.raises(DefinitionError, match=said):
        tool_for(schema)


@pytest.mark.spec("reliability:TL20")
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array"},
        {"anyOf": [{"type": "object"}]},
        {"properties": {"two words": {}}},
        {"properties": {"x" * 65: {}}},
        {"properties": {"a": object()}},
    ],
)
def test_a_schema_that_every_provider_refuses_is_refused_at_construction(schema: Any) -> None:
    with pytest.raises(DefinitionError, match="input_schema of tool 't'"):
        Tool("t", "", schema, lambda value: value)


def test_a_deeply_nested_input_is_refused_and_not_a_crash() -> None:
    made = tool_for({"$ref": "#/$defs/tree"})
    value: Any = {}
    for _ in range(95):
        value = {"kids": [value]}

    assert fits(made, value) in {True, False}


def leading_to(times: int, word: str) -> Tool[..., Any]:
    """Return a tool whose value is reached through 40 definitions, each of which leads to the next one several times."""
    row = {f"A{n}": {word: [{"$ref": f"#/$defs/A{n + 1}"}] * times} for n in range(40)}
    return Tool(
        "t",
        "",
        {"properties": {"v": {"$ref": "#/$defs/A0"}}, "$defs": {**row, "A40": {"type": "string"}}},
        lambda value: value,
    )


@pytest.mark.spec("reliability:R23")
@pytest.mark.parametrize(("word", "times"), [("anyOf", 2), ("anyOf", 5), ("oneOf", 1), ("allOf", 2), ("allOf", 5)])
def test_a_schema_that_leads_to_a_value_on_very_many_ways_is_checked_once_for_each(word: str, times: int) -> None:
    made = leading_to(times, word)

    assert (True, False) == (fits(made, "a"), fits(made, 1))


@pytest.mark.spec("reliability:R23")
def test_forms_that_share_a_member_take_no_longer_the_deeper_the_value_is() -> None:
    kinds = [
        {"type": "object", "required": ["kind"], "properties": {"kind": {"const": k}, "of": {"$ref": "#/$defs/tree"}}}
        for k in "abcd"
    ]
    made = Tool(
        "t",
        "",
        {"properties": {"v": {"$ref": "#/$defs/tree"}}, "$defs": {"tree": {"oneOf": kinds}}},
        lambda value: value,
    )
    good, bad = {"kind": "d"}, {"kind": "e"}
    for _ in range(40):
        good, bad = {"kind": "d", "of": good}, {"kind": "d", "of": bad}

    assert (True, False) == (fits(made, good), fits(made, bad))


@pytest.mark.spec("reliability:R23")
@pytest.mark.parametrize("word", ["anyOf", "oneOf", "allOf"])
def test_a_schema_nested_in_itself_is_compiled_once(word: str) -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(30):
        schema = {word: [schema]}

    assert (True, False) == (fits(tool_for(schema), "a"), fits(tool_for(schema), 1))


def test_a_reference_that_leads_back_without_an_end_fits_nothing() -> None:
    made = tool_for({"anyOf": [{"type": "string"}, {"$ref": "#/properties/v"}]})

    assert (True, False) == (fits(made, "a"), fits(made, 1))


@pytest.mark.spec("reliability:R23")
@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"items": {"enum": [*range(2_000)]}}, [-1] * 1_000),
        ({"items": {"allOf": [{"minimum": n} for n in range(2_000)]}}, [9_999] * 1_000),
        ({"pattern": "^(a{200}){50}$"}, "a" * 100_000),
    ],
)
def test_what_takes_too_long_to_be_compared_is_refused(schema: Any, value: Any) -> None:
    with pytest.raises(ToolInputError, match="takes too long"):
        tool_for(schema).binding().validate(freeze_object({"v": value}))


def test_of_very_many_problems_a_hundred_are_told() -> None:
    with pytest.raises(ToolInputError, match="and there is more") as caught:
        tool_for({"items": {"type": "string"}}).binding().validate(freeze_object({"v": [1] * 10_000}))

    assert 101 == len(caught.value.issues)


@pytest.mark.spec("reliability:R23")
@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"pattern": "(a{1000}){100}"}, "too large"),
        ({"properties": {f"a{n}": {"pattern": r"\w{90}"} for n in range(60)}}, "too large"),
        ({"allOf": [True] * 20_000}, "more than 10,000 schemas"),
    ],
)
def test_a_schema_that_would_take_too_long_is_refused_at_construction(schema: Any, said: str) -> None:
    with pytest.raises(DefinitionError, match=said):
        tool_for(schema)
