"""The validator for JSON Schemas: what fits, what does not, and what it refuses to promise."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepengine import Tool
from stepengine.data.json import freeze_object
from stepengine.errors import DataError, DefinitionError, ToolInputError
from tests.strategies import json_values

TREE = {
    "type": "object",
    "properties": {"kids": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
    "additionalProperties": False,
}

NO_OTHERS: dict[str, Any] = {"additionalProperties": False}

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
    ({"additionalProperties": False}, [{}, 1], [{"a": {"b": 1}}]),
    ({"additionalProperties": {"additionalProperties": False}}, [{"a": {}}], [{"a": {"b": 1}}]),
    ({"propertyNames": {"maxLength": 1}}, [{"a": 1}], [{"ab": 1}]),
    ({"$ref": "#/$defs/tree"}, [{"kids": [{"kids": []}]}], [{"kids": [{"x": 1}]}]),
    ({"if": {"required": ["a"]}, "then": {"required": ["b"]}}, [{}, {"a": 1, "b": 1}], [{"a": 1}]),
    ({"contains": {"const": 1}, "minContains": 2}, [[1, 1]], [[1], []]),
    ({"dependentRequired": {"a": ["b"]}}, [{"b": 1}, {"a": 1, "b": 1}], [{"a": 1}]),
    (
        {"$ref": "#/$defs/tree", "properties": {"x": {}}, "unevaluatedProperties": False},
        [{"kids": []}],
        [{"y": 1}],
    ),
    (
        {
            "if": {"required": ["a"]},
            "then": {"properties": {"a": {}, "b": {}}},
            "else": {"properties": {"c": {}}},
            "unevaluatedProperties": False,
        },
        [{"a": 1, "b": 1}, {"c": 1}],
        [{"a": 1, "c": 1}, {"b": 1}],
    ),
    (
        {
            "allOf": [{"properties": {"a": {}}, "additionalProperties": {"type": "integer"}}],
            "unevaluatedProperties": False,
        },
        [{"a": "x", "b": 1}],
        [{"b": "x"}],
    ),
    (
        {"dependentSchemas": {"a": {"patternProperties": {"^.$": {}}}}, "unevaluatedProperties": False},
        [{"a": 1, "b": 1}, {}],
        [{"a": 1, "bb": 1}, {"b": 1}],
    ),
    ({"$ref": "#twig"}, ["a"], [1]),
    ({"$ref": "#/$defs/never"}, [], [1, {}]),
    ({"multipleOf": 0.01}, [4.35, 19.99, 1], [0.005]),
    ({"dependentSchemas": {"a": {"required": ["b"]}}}, [{"b": 1}, {"a": 1, "b": 1}], [{"a": 1}]),
    ({"dependencies": {"a": ["b"], "c": {"required": ["d"]}}}, [{"a": 1, "b": 1}], [{"a": 1}, {"c": 1}]),
    ({"prefixItems": [{}], "contains": {"const": 1}, "unevaluatedItems": {"const": 2}}, [[0, 1, 2]], [[1, 3]]),
    ({"const": {"$ref": "https://example.com/x"}}, [{"$ref": "https://example.com/x"}], [{}]),
    ({"type": "string", "nullable": True, "example": "a"}, ["a"], [None]),
    (False, [], [1]),  # type: ignore[list-item]
]

DRAFT_7 = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "properties": {
        "v": {"items": [{"$ref": "#/definitions/name"}, {"type": "integer"}], "additionalItems": False},
        "w": {"dependencies": {"a": ["b"]}},
    },
    "definitions": {"name": {"type": "string"}},
}


def tool_for(schema: Any, **definitions: Any) -> Tool[..., Any]:
    known = {"tree": TREE, "twig": {"$anchor": "twig", "type": "string"}, "never": False}
    schemas = {"properties": {"v": schema}, "$defs": {**known, **definitions}}
    return Tool("t", "", schemas, lambda value: value)


def fits(made: Tool[..., Any], value: Any) -> bool:
    try:
        made.binding().validate(freeze_object({"v": value}))
    except ToolInputError as error:
        return not all(issue.startswith("v") for issue in error.issues)
    return True


def accepts(made: Tool[..., Any], value: Any) -> bool:
    try:
        made.binding().validate(freeze_object({"v": value}))
    except ToolInputError:
        return False
    return True


@pytest.mark.spec("generator-contract:G32", "requirements:E2")
@pytest.mark.parametrize(("schema", "good", "bad"), CASES, ids=[str(c[0])[:40] for c in CASES])
def test_a_schema_accepts_valid_values_and_locates_invalid_ones(schema: Any, good: Any, bad: Any) -> None:
    made = tool_for(schema)

    assert (good, []) == ([v for v in good if fits(made, v)], [v for v in bad if fits(made, v)])


@pytest.mark.spec("requirements:E2")
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"v": ["a", 1], "w": {"a": 1, "b": 1}}, ()),
        ({"v": [1]}, ("v.0: should be string, not integer",)),
        ({"v": ["a", "b"]}, ("v.1: should be integer, not string",)),
        ({"w": {"a": 1}}, ("w.b: is required",)),
    ],
)
def test_a_draft_7_schema_is_validated_by_its_draft(given: Any, said: tuple[str, ...]) -> None:
    made = Tool("t", "", DRAFT_7, lambda value: value)
    issues: tuple[str, ...] = ()
    try:
        made.binding().validate(freeze_object(given))
    except ToolInputError as error:
        issues = error.issues

    assert said == issues


@pytest.mark.spec("requirements:E2")
@pytest.mark.parametrize(
    ("pattern", "found", "not_found"),
    [
        (r"^\d+$", ["12"], ["٣", "1\n", ""]),
        (r"^\w+$", ["aZ_9"], ["é", "a b"]),
        (r"^[\w.-]+$", ["a.b-c"], ["é"]),
        (r"^[^\W_]+$", ["a9"], ["_", "é"]),
        (r"^\s$", ["\u00a0", "\ufeff", "\u2028", "\t", "\v"], ["\x85", "\u200b", "a"]),
        (r"^\S+$", ["\x85", "a"], ["\ufeff", "a a"]),
        (r"^[^\D5]$", ["4"], ["5", "a", "٣"]),
        (r"^[a\-\d]$", ["a", "-", "7"], ["b"]),
        (r"^[+-\d]$", ["+", "-", "7"], [",", "A"]),
        (r"^\cA[\cB]\cz$", ["\x01\x02\x1a"], ["cAcBcz"]),
        (r"^[[]a[&&b]$", ["[a&", "[ab"], ["[a[", "a"]),
        (r"^[a[b]c]$", ["ac]", "[c]", "bc]"], ["a", "c"]),
        (r"^[~~x]$", ["~", "x"], ["y"]),
        (r"^[--a]$", ["-", "A", "a"], ["+", "b"]),
        (r"^[+--]$", ["+", ",", "-"], ["."]),
        (r"^[!#$%&'*+/=?^_`{|}~-]+$", ["&~-", "{}"], ["a"]),
        (r"^\/\u00e9\x41\{\.$", ["/éA{."], ["/éA{x"]),
        (r"^(?:a|(?<n>b)){2}?$", ["ab"], ["a"]),
        (r"\bfoo\b", ["a foo b"], ["foob"]),
        (r"^\p{L}{2}$", ["éa"], ["1a"]),
        (r"b", ["abc"], ["a"]),
        (r"^\\d$", ["\\d"], ["1"]),
    ],
)
def test_a_pattern_has_its_javascript_meaning(pattern: str, found: list[str], not_found: list[str]) -> None:
    text, name = tool_for({"pattern": pattern}), tool_for({"patternProperties": {pattern: {}}, **NO_OTHERS})

    assert ([*found], []) == ([t for t in found if fits(text, t)], [t for t in not_found if fits(text, t)])
    assert ([*found], []) == ([t for t in found if fits(name, {t: 1})], [t for t in not_found if fits(name, {t: 1})])


@pytest.mark.spec("reliability:R23")
def test_a_backtracking_pattern_is_matched_in_linear_time() -> None:
    made = tool_for({"pattern": "^(a+)+$", "patternProperties": {"^(a+)+$": {"type": "null"}}, **NO_OTHERS})
    text = "a" * 5_000 + "b"

    assert (False, False) == (fits(made, text), fits(made, {text: 1}))


def test_one_tool_checks_inputs_on_several_threads_at_once() -> None:
    made = tool_for({"items": {"$ref": "#/$defs/tree"}})

    with ThreadPoolExecutor(4) as pool:
        told = list(pool.map(lambda n: fits(made, [{"kids": []} if n % 2 else {"x": 1}] * 50), range(40)))

    assert [n % 2 == 1 for n in range(40)] == told


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "minLength": 2}, "born": {"type": "integer"}},
    "required": ["name", "id"],
    "additionalProperties": False,
}


@pytest.mark.spec("requirements:E2")
@pytest.mark.parametrize(
    ("schema", "value", "said"),
    [
        ({"type": ["string", "array", "null"]}, 1.5, ["v: should be null or string or array, not number"]),
        ({"enum": ["b", {"z": 1, "a": 2}]}, {"y": 1, "x": True}, ["""v: should be one of "b", {"a":2,"z":1}; not {'x': True, 'y': 1}"""]),
        ({"minimum": 1.0, "const": 2}, 0, ["v: should be one of 2; not 0", "v: should be at least 1.0, not 0"]),
        ({"minLength": 2.0, "pattern": "^b"}, "a", ["v: should have at least 2 characters", "v: should match '^b'"]),
        ({"maxItems": 1, "uniqueItems": True, "contains": {"const": 1}}, [2, 2],
         ["v: should have at most 1 items", "v: holds an item twice", "v: holds no item, or too many, of the form that it should contain"]),
        (PERSON, {"nick": 1, "born": "x", "name": "a"},
         ["v.id: is required", "v.born: should be integer, not string", "v.name: should have at least 2 characters",
          "v.nick: is not a parameter; the parameters are: born, name"]),
        ({**PERSON, "required": ["id"]}, {"nick": 1, "name": "a"},
         ["v.name: should have at least 2 characters", "v.nick: is not a parameter; the parameters are: born, name", "v.id: is required"]),
        ({"$ref": "#/$defs/person"}, {"nick": 1, "name": "a", "born": "x"},
         ["v.id: is required", "v.born: should be integer, not string", "v.name: should have at least 2 characters",
          "v.nick: is not a parameter; the parameters are: born, name"]),
        ({"anyOf": [{"type": "null"}, PERSON]}, {"name": "ab"}, ["v: fits none of the 2 allowed forms; the nearest one says: v.id: is required"]),
        ({"oneOf": [{}, {"minimum": 1}, {"minimum": 5}]}, 3, ["v: fits 2 of the 3 forms, and exactly one is allowed"]),
        ({"prefixItems": [{}], "items": False}, [1, 2, 3], ["v.1: is not allowed", "v.2: is not allowed"]),
        ({"prefixItems": [{}], "unevaluatedItems": False}, [1, 2, 3], ["v: Unevaluated items are not allowed (2 items)"]),
        ({"properties": {"a": {}}, "unevaluatedProperties": False}, {"c": 1, "a": 1, "b": 1},
         ["v.c: is not a parameter; the parameters are: a", "v.b: is not a parameter; the parameters are: a"]),
        ({"propertyNames": {"maxLength": 1}}, {"ab": 1, "c": 1}, ["v.ab: should have at most 1 characters"]),
        ({"dependentRequired": {"b": ["x"], "a": ["y"]}, "not": {}}, {"b": 1, "a": 1}, ["v.y: is required", "v.x: is required", "v: has a form that is excluded"]),
    ],
)  # fmt: skip
def test_validation_errors_keep_their_recorded_words_and_order(schema: Any, value: Any, said: list[str]) -> None:
    made = Tool("t", "", {"properties": {"v": schema}, "$defs": {"person": PERSON}}, lambda value: value)

    with pytest.raises(ToolInputError) as caught:
        made.binding().validate(freeze_object({"v": value}))

    assert said == [*caught.value.issues]


@pytest.mark.spec("reliability:TL20")
@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"$ref": "https://example.com/x"}, r"at #/properties/v/\$ref: 'https://example.com/x' points outside"),
        ({"$ref": "file:///etc/passwd"}, "points outside"),
        ({"$ref": "other.json#/a"}, "points outside"),
        (
            {"items": {"$dynamicRef": "https://example.com/x"}},
            r"at #/properties/v/items/\$dynamicRef: .* is not supported",
        ),
        ({"$ref": "#/$defs/nothing"}, "does not exist"),
        ({"type": "text"}, "is not a type"),
        ({"pattern": "("}, "not a valid regular expression here"),
        ({"pattern": "(?=a)"}, "look-around and back-references are not supported"),
        ({"patternProperties": {"(?=a)": {}}}, "look-around and back-references are not supported"),
        ({"pattern": 3}, "at #/properties/v/pattern: 3 does not fit the keyword"),
        ({"minimum": "1"}, "at #/properties/v/minimum: '1' does not fit the keyword"),
        ({"anyOf": []}, r"at #/properties/v/anyOf: \[\] does not fit the keyword"),
        (
            {"required": [1]},
            r"at #/properties/v/required: \[1\] does not fit the keyword: required.0: should be string",
        ),
        ({"minLength": -1}, "at #/properties/v/minLength: -1 does not fit the keyword: should be at least 0, not -1"),
        ({"allOf": [{}, 3]}, "at #/properties/v/allOf/1: a schema must be an object, not 3"),
        ({"items": [{}]}, r"at #/properties/v/items: a schema must be an object, not \[{}\]"),
        ({"dependencies": {"a": 3}}, "at #/properties/v/dependencies/a: a schema must be an object, not 3"),
        (3, "a schema must be an object"),
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
    for _ in range(99):
        value = {"kids": [value]}

    assert fits(made, value)
    with pytest.raises(DataError, match="nested deeper than 200 levels"):
        fits(made, {"kids": [value]})


ANY_JSON: dict[str, Any] = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"$ref": "#/$defs/any"}},
        {"type": "object", "additionalProperties": {"$ref": "#/$defs/any"}},
    ]
}


def nested(levels: int, inmost: object) -> Any:
    value = inmost
    for level in range(levels):
        value = [value] if level % 2 else {"a": value}
    return value


@pytest.mark.spec("reliability:R23")
def test_a_recursive_schema_validates_values_of_maximum_depth() -> None:
    made = tool_for({"$ref": "#/$defs/any"}, any=ANY_JSON)

    assert (True, False) == (fits(made, nested(198, "a")), accepts(made, nested(198, 1)))


def leading_to(times: int, word: str) -> Tool[..., Any]:
    """Return a tool whose value is reached through 40 definitions, each of which leads to the next one several times."""
    row = {f"A{n}": {word: [{"$ref": f"#/$defs/A{n + 1}"}] * times} for n in range(40)}
    return tool_for({"$ref": "#/$defs/A0"}, **row, A40={"type": "string"})


@pytest.mark.spec("reliability:R23")
@pytest.mark.parametrize(("word", "times"), [("anyOf", 2), ("oneOf", 1), ("allOf", 2)])
def test_a_value_reachable_on_many_paths_is_checked_once(word: str, times: int) -> None:
    made = leading_to(times, word)

    assert (True, False) == (fits(made, "a"), fits(made, 1))


@pytest.mark.spec("reliability:R23")
@pytest.mark.parametrize(
    ("word", "some", "more"),
    [("unevaluatedProperties", {"a": 1}, {"a": 1, "b": 1}), ("unevaluatedItems", [1], [1, 1])],
)
def test_unevaluated_members_are_found_once_despite_many_paths(word: str, some: Any, more: Any) -> None:
    row = {f"A{n}": {"anyOf": [{"$ref": f"#/$defs/A{n + 1}"}] * 5} for n in range(40)}
    last = {"properties": {"a": {}}, "prefixItems": [{}]}
    made = tool_for({"$ref": "#/$defs/A0", word: False}, **row, A40=last)

    assert (True, False) == (fits(made, some), fits(made, more))


def test_a_reference_that_leads_back_without_an_end_fits_nothing() -> None:
    made = tool_for({"anyOf": [{"type": "string"}, {"$ref": "#/properties/v"}]})

    assert (True, False) == (fits(made, "a"), fits(made, 1))


@pytest.mark.deep
@pytest.mark.spec("reliability:R23")
@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"items": {"enum": [*range(2_000)]}}, [1_999] * 100_000),
        ({"items": {"allOf": [{"const": [*range(1_000)]}] * 30}}, [[*range(1_000)]] * 100),
        ({"allOf": [{"uniqueItems": True}] * 2_000}, [*range(10_000)]),
        ({"allOf": [{"propertyNames": {"maxLength": 9}}] * 500}, {f"k{n}": n for n in range(20_000)}),
        ({"anyOf": [*[{"minItems": 9}] * 2_000, {}]}, ["a" * 1_000_000]),
        ({"items": {"allOf": [{"minimum": n} for n in range(2_000)]}}, [9_999] * 100_000),
        ({"items": {"pattern": "^(a{200}){50}$"}}, ["a" * 10_000] * 100),
        ({"patternProperties": {"^(a{200}){50}$": {}}}, {"a" * 100_000: 1}),
        ({"pattern": "^(a{200}){50}$"}, "a" * 100_000),
    ],
)
def test_a_value_that_takes_too_long_to_compare_is_refused(schema: Any, value: Any) -> None:
    with pytest.raises(ToolInputError, match="takes too long"):
        tool_for(schema).binding().validate(freeze_object({"v": value}))


@pytest.mark.spec("reliability:R23")
def test_an_error_deep_in_recursive_alternatives_has_its_path() -> None:
    kinds = [
        {"required": ["kind"], "properties": {"kind": {"const": k}, "of": {"$ref": "#/$defs/tree"}}} for k in "abcd"
    ]
    bad: Any = {"kind": "e"}
    for _ in range(20):
        bad = {"kind": "d", "of": bad}

    with pytest.raises(ToolInputError, match=r"the nearest one says: v\.of\.of\.of\.of") as caught:
        tool_for({"$ref": "#/$defs/tree"}, tree={"oneOf": kinds}).binding().validate(freeze_object({"v": bad}))

    assert 5_000 > len(str(caught.value))


@pytest.mark.spec("reliability:R23")
def test_a_long_way_through_references_is_followed() -> None:
    row = {f"A{n}": {"$ref": f"#/$defs/A{n + 1}"} for n in range(2_000)}
    made = tool_for({"$ref": "#/$defs/A0"}, **row, A2000={"type": "string"})

    assert fits(made, "a")
    with pytest.raises(ToolInputError, match="does not fit its schema, and is nested too deeply to say where"):
        made.binding().validate(freeze_object({"v": 1}))


def test_at_most_a_hundred_problems_are_reported() -> None:
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
def test_a_schema_that_is_too_large_is_refused(schema: Any, said: str) -> None:
    with pytest.raises(DefinitionError, match=said):
        tool_for(schema)


ODD_KEYWORDS = (
    "type",
    "properties",
    "required",
    "$ref",
    "$defs",
    "items",
    "anyOf",
    "patternProperties",
    "additionalProperties",
)


@pytest.mark.deep
@pytest.mark.smoke
@given(
    schema=json_values() | st.dictionaries(st.sampled_from(ODD_KEYWORDS), json_values()),
    below=st.none() | st.dictionaries(st.sampled_from(ODD_KEYWORDS), json_values()),
    value=json_values(),
)
@pytest.mark.spec("reliability:R23")
def test_any_schema_makes_a_tool_or_a_definition_error(schema: Any, below: Any, value: Any) -> None:
    if isinstance(schema, dict) and below is not None:
        schema = {**schema, "type": "object", "properties": {"a": below}}
    with contextlib.suppress(DefinitionError, ToolInputError):
        binding = Tool("t", "", schema, lambda value: value).binding()
        binding.validate(binding.repair(freeze_object({"a": value})))


@pytest.mark.parametrize("schema", [{"properties": None}, {"properties": [1]}, None])
def test_a_malformed_schema_is_refused_with_the_expected_form(schema: Any) -> None:
    with pytest.raises(DefinitionError, match=r"an object with a schema for each parameter|a JSON Schema of an object"):
        Tool("t", "", schema, lambda value: value)
