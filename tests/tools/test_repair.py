"""What is mended in a model's input, and that nothing else is touched."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import TypedDict

from stepengine import Tool, tool
from stepengine.data.json import freeze_object
from stepengine.tools.bundled import file_tools, search_tools, spawn_tools


class Edit(TypedDict):
    old_string: str
    new_string: str


@tool(aliases={"edits.old_string": ("old", "old_str"), "edits.new_string": ("new",), "edits": ("changes",)})
def edit(  # noqa: PLR0917  (a tool of many parameters)
    edits: list[Edit],
    max_results: int = 1,
    text: str = "",
    either: str | list[str] = "",
    params: dict[str, int] | None = None,
    share: float = 0.0,
    wide: bool = False,
    numbers: list[int] = [],  # noqa: B006  (a schema needs the default)
) -> None:
    """Edit."""


def repaired(value: Any) -> Any:
    repair = edit.binding().repair
    assert repair is not None
    return repair(freeze_object(value))


RIGHT = {"old_string": "a", "new_string": "b"}


@pytest.mark.spec("generator-contract:T1", "generator-contract:T2")
@pytest.mark.parametrize(
    ("given_input", "mended"),
    [
        ({"edits": RIGHT}, {"edits": [RIGHT]}),
        ({"edits": json.dumps([RIGHT])}, {"edits": [RIGHT]}),
        ({"edits": json.dumps(json.dumps([RIGHT]))}, {"edits": [RIGHT]}),
        ({"edits": [json.dumps(RIGHT)]}, {"edits": [RIGHT]}),
        ({"edits": [{"old": "a", "newString": "b"}]}, {"edits": [RIGHT]}),
        ({"changes": [{"old_str": "a", "new": "b"}]}, {"edits": [RIGHT]}),
        ({"maxResults": 3, "cb_easp": True}, {"max_results": 3}),
        ({"params": '{"x": 1}'}, {"params": {"x": 1}}),
        ({"max_results": "3"}, {"max_results": 3}),
        ({"share": "0.5"}, {"share": 0.5}),
        ({"share": "2"}, {"share": 2}),
        ({"wide": "true"}, {"wide": True}),
        ({"numbers": "[1, 2]"}, {"numbers": [1, 2]}),
        ({"numbers": ["1", 2]}, {"numbers": [1, 2]}),
        ({"numbers": "7"}, {"numbers": [7]}),
    ],
)
def test_lists_objects_numbers_and_other_spellings_are_repaired(given_input: Any, mended: Any) -> None:
    assert mended == repaired(given_input)


@pytest.mark.spec("generator-contract:T2")
@pytest.mark.parametrize(
    "given_input",
    [
        {"text": '["not", "for", "us"]'},
        {"either": '["a text is fine"]'},
        {"maxResults": 1, "max_results": 2},
        {"edits": "no list at all {"},
        {"unknown": 1},
        {"params": "[1]"},
        {"max_results": "many"},
        {"max_results": "3.5"},
        {"max_results": "true"},
        {"wide": "1"},
        {"share": "NaN"},
        {"share": "1e999"},
    ],
)
def test_ambiguous_input_is_left_unchanged(given_input: Any) -> None:
    found = repaired(given_input)

    assert {**given_input, **({"edits": ["no list at all {"]} if "edits" in given_input else {})} == found


@given(
    st.lists(st.fixed_dictionaries({"old_string": st.text(), "new_string": st.text()}), max_size=3),
    st.integers(-9, 9),
    st.text(),
)
def test_a_right_input_is_returned_as_the_very_object(edits: Any, number: int, text: str) -> None:
    value = freeze_object({"edits": edits, "max_results": number, "text": text})

    assert repaired(value) is value


@pytest.mark.spec("generator-contract:T2", "generator-contract:T1")
def test_bundled_tools_accept_known_spellings_and_publish_their_own(tmp_path: Any) -> None:
    tools = {t.spec.name: t for t in [*file_tools(tmp_path, write=True), *search_tools(tmp_path), *spawn_tools()]}
    cases = {
        "read_files": ({"paths": "a"}, {"paths": ["a"]}),
        "code_search": ({"pattern": "x", "maxResults": 3}, {"pattern": "x", "max_results": 3}),
        "str_replace": (
            {"path": "a", "replacements": {"old": "a", "new": "b", "allowMultiple": True}},
            {"path": "a", "replacements": [{"old_string": "a", "new_string": "b", "allow_multiple": True}]},
        ),
        "spawn_agents": (
            {"agents": {"agentType": "x", "params": '{"n": 1}'}},
            {"agents": [{"agent_type": "x", "params": {"n": 1}}]},
        ),
    }
    for name, (given_input, mended) in cases.items():
        binding = tools[name].binding()
        assert binding.repair is not None
        assert mended == binding.repair(freeze_object(given_input))
        assert "allowMultiple" not in json.dumps(binding.spec.input_schema)


@pytest.mark.spec("reliability:R23")
@pytest.mark.parametrize("word", ["anyOf", "oneOf"])
def test_nested_alternatives_are_each_checked_once(word: str) -> None:
    row = {f"A{n}": {word: [{"$ref": f"#/$defs/A{n + 1}"}] * 2} for n in range(60)}
    end = {word: [{"type": "array", "items": {"type": "object"}}, {"$ref": "#/$defs/A0"}]}
    made = Tool(
        "t", "", {"properties": {"x": {"$ref": "#/$defs/A0"}}, "$defs": {**row, "A60": end}}, lambda value: value
    )
    repair = made.binding().repair
    assert repair is not None

    assert {"x": [{"a": 1}]} == repair(freeze_object({"x": '[{"a": 1}]'}))
