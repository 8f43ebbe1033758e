"""The validator for JSON Schemas: what fits, what does not, and what it refuses to promise."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
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


def tool_for(schema: Any) -> Tool[..., Any]:
    return Tool(
        "t",
        "",
        {
            "properties": {"v": schema},
            "$defs": {"tree": TREE, "twig": {"$anchor": "twig", "type": "string"}, "never": False},
        },
        lambda value: value,
    )


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
def test_a_schema_of_an_old_draft_is_read_as_it_says(given: Any, said: tuple[str, ...]) -> None:
    made = Tool("t", "", DRAFT_7, lambda value: value)
    issues: tuple[str, ...] = ()
    try:
        made.binding().validate(freeze_object(given))
    except ToolInputError as error:
        issues = error.issues

    assert said == issues


@pytest.mark.spec("ecosystem:EC28")
def test_the_validator_is_imported_for_the_first_raw_schema_and_not_before() -> None:
    program = (
        "import sys, stepengine, stepengine.tools\n"
        "stepengine.Engine()\n"
        "@stepengine.tool\ndef add(a: int) -> int:\n    '''Add.'''\n    return a\n"
        "before = 'jsonschema' in sys.modules\n"
        "stepengine.Tool('t', '', {}, lambda value: value)\n"
        "print(before, 'jsonschema' in sys.modules)"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert "False True" == told.stdout.strip()


def test_one_tool_checks_inputs_on_several_threads_at_once() -> None:
    made = tool_for({"items": {"$ref": "#/$defs/tree"}})

    with ThreadPoolExecutor(4) as pool:
        told = list(pool.map(lambda n: fits(made, [{"kids": []} if n % 2 else {"x": 1}] * 50), range(40)))

    assert [n % 2 == 1 for n in range(40)] == told


def test_a_misfit_deep_inside_is_named_by_its_path() -> None:
    made = tool_for({"type": "array", "items": {"properties": {"x": {"type": "integer"}}}})

    with pytest.raises(ToolInputError, match=r"v\.1\.x: should be integer, not string"):
        made.binding().validate(freeze_object({"v": [{"x": 1}, {"x": "a"}]}))


@pytest.mark.spec("reliability:TL20")
@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"$ref": "https://example.com/x"}, r"at #/properties/v/\$ref: 'https://example.com/x' points outside"),
        ({"$ref": "file:///etc/passwd"}, "points outside"),
        ({"$ref": "other.json#/a"}, "points outside"),
        (
            {"items": {"$dynamicRef": "https://example.com/x"}},
            r"at #/properties/v/items/\$dynamicRef: .* is not followed",
        ),
        ({"$ref": "#/$defs/nothing"}, "does not exist"),
        ({"type": "text"}, "is no type"),
        ({"pattern": "("}, "no regular expression"),
        ({"pattern": "(?=a)"}, "without look-around"),
        ({"patternProperties": {"(?=a)": {}}}, "without look-around"),
        ({"pattern": 3}, "at #/properties/v/pattern: 3 does not fit the keyword"),
        ({"minimum": "1"}, "at #/properties/v/minimum: '1' does not fit the keyword"),
        ({"anyOf": []}, r"at #/properties/v/anyOf: \[\] does not fit the keyword"),
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
@pytest.mark.parametrize(
    ("word", "some", "more"),
    [("unevaluatedProperties", {"a": 1}, {"a": 1, "b": 1}), ("unevaluatedItems", [1], [1, 1])],
)
def test_what_nothing_applies_to_is_found_once_on_very_many_ways(word: str, some: Any, more: Any) -> None:
    row = {f"A{n}": {"anyOf": [{"$ref": f"#/$defs/A{n + 1}"}] * 5} for n in range(40)}
    last = {"properties": {"a": {}}, "prefixItems": [{}]}
    schema = {"properties": {"v": {"$ref": "#/$defs/A0", word: False}}, "$defs": {**row, "A40": last}}
    made = Tool("t", "", schema, lambda value: value)

    assert (True, False) == (fits(made, some), fits(made, more))


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
        ({"items": {"enum": [*range(2_000)]}}, [1_999] * 100_000),
        ({"items": {"const": [*range(2_000)]}}, [[*range(2_000)]] * 10_000),
        ({"allOf": [{"uniqueItems": True}] * 2_000}, [*range(10_000)]),
        ({"allOf": [{"propertyNames": {"maxLength": 9}}] * 500}, {f"k{n}": n for n in range(20_000)}),
        ({"anyOf": [*[{"minItems": 9}] * 2_000, {}]}, ["a" * 1_000_000]),
        ({"items": {"allOf": [{"minimum": n} for n in range(2_000)]}}, [9_999] * 100_000),
        ({"items": {"pattern": "^(a{200}){50}$"}}, ["a" * 10_000] * 100),
        ({"patternProperties": {"^(a{200}){50}$": {}}}, {"a" * 100_000: 1}),
        ({"pattern": "^(a{200}){50}$"}, "a" * 100_000),
    ],
)
def test_what_takes_too_long_to_be_compared_is_refused(schema: Any, value: Any) -> None:
    with pytest.raises(ToolInputError, match="takes too long"):
        tool_for(schema).binding().validate(freeze_object({"v": value}))


@pytest.mark.spec("reliability:R23")
def test_what_is_wrong_deep_inside_of_forms_that_refer_to_themselves_is_told_at_its_place() -> None:
    kinds = [
        {"required": ["kind"], "properties": {"kind": {"const": k}, "of": {"$ref": "#/$defs/tree"}}} for k in "abcd"
    ]
    schema = {"properties": {"v": {"$ref": "#/$defs/tree"}}, "$defs": {"tree": {"oneOf": kinds}}}
    bad: Any = {"kind": "e"}
    for _ in range(20):
        bad = {"kind": "d", "of": bad}

    with pytest.raises(ToolInputError, match=r"the nearest one says: v\.of\.of\.of\.of") as caught:
        Tool("t", "", schema, lambda value: value).binding().validate(freeze_object({"v": bad}))

    assert 5_000 > len(str(caught.value))


@pytest.mark.spec("reliability:R23")
def test_a_long_way_through_references_is_followed() -> None:
    row = {f"A{n}": {"$ref": f"#/$defs/A{n + 1}"} for n in range(2_000)}
    schema = {"properties": {"v": {"$ref": "#/$defs/A0"}}, "$defs": {**row, "A2000": {"type": "string"}}}
    made = Tool("t", "", schema, lambda value: value)

    assert (True, False) == (fits(made, "a"), fits(made, 1))


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
