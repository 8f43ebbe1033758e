"""What authors write is checked where they write it, and the error says what would have been fine."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

import pytest
from pydantic import BaseModel

from stepengine.data.definition import AgentDefinition, InputSchema
from stepengine.data.hooks import Hooks
from stepengine.data.limits import Limits
from stepengine.data.models import ModelSettings, Thinking
from stepengine.data.tools import ToolAnnotations
from stepengine.data.yields import Complete, StepWith
from stepengine.errors import BadYield, DataError, DefinitionError

WRONG: list[tuple[Any, dict[str, Any], str]] = [
    (ModelSettings, {"thinking": "enabled"}, r"Thinking\(\"high\"\) or None, not 'enabled'"),
    (ModelSettings, {"thinking": {"type": "enabled"}}, r"Thinking\(\"high\"\) or None, not {'type': 'enabled'}"),
    (ModelSettings, {"temperature": "0.5"}, "a number or None, not '0.5'"),
    (ModelSettings, {"temperature": math.nan}, "a number or None, not nan"),
    (ModelSettings, {"max_tokens": 1.5}, "a whole number of at least 0 or None, not 1.5"),
    (ModelSettings, {"stop_sequences": [1]}, "a text or a list of texts, not"),
    (ModelSettings, {"tool_choice": {"name": "add"}}, "'required' or the name of a tool or None, not"),
    (Thinking, {"mode": "high"}, "'none' or 'enabled' or 'extended' or None, not 'high'"),
    (Thinking, {"effort": "lots"}, "'low' or 'medium' or 'high' or 'max' or None, not 'lots'"),
    (Thinking, {"show": "no"}, "True or False, not 'no'"),
    (Limits, {"max_steps": "20"}, "not '20'"),
    (Limits, {"max_children": True}, "not True"),
    (Limits, {"max_cost_usd": "much"}, "a number of at least 0 or None, not 'much'"),
    (Limits, {"max_cost_usd": Decimal("-0.01")}, "a number of at least 0 or None"),
    (Limits, {"on_max_steps": "explode"}, "'final_answer' or 'stop' or 'raise' or None, not 'explode'"),
    (ToolAnnotations, {"read_only": "yes"}, "True or False, not 'yes'"),
    (Hooks, {"pre_step": 5}, r"must be a function or a list of functions, such as Hooks\(pre_step=\[check\]\), not "),
    (InputSchema, {"prompt": 3}, "'description': 'What to do'} or None, not 3"),
    (InputSchema, {"params": int}, r"a pydantic model class or a JSON Schema \(a dict\) or None, not the class int"),
]


@pytest.mark.spec("requirements:A15", "requirements:A16")
@pytest.mark.parametrize(("kind", "written", "said"), WRONG)
def test_value_of_the_wrong_kind_is_rejected_with_its_field(kind: Any, written: dict[str, Any], said: str) -> None:
    (field,) = written

    with pytest.raises(DefinitionError, match=said) as caught:
        kind(**written)

    assert field in caught.value.message


@pytest.mark.parametrize(
    ("kind", "written"),
    [
        (StepWith, {"model": 3}),
        (Complete, {"model": " "}),
        (Complete, {"system_prompt": 3}),
        (Complete, {"settings": {"temperature": 0}}),
        (Complete, {"tools": 3}),
    ],
)
def test_invalid_yieldable_fields_are_rejected_on_construction(kind: Any, written: dict[str, Any]) -> None:
    (field,) = written

    with pytest.raises(BadYield, match=rf"{kind.__name__}\({field}=...\) must be .*, not "):
        kind(**({"messages": "Hi", **written} if kind is Complete else written))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("include_message_history", "no"),
        ("settings", {}),
        ("hooks", {}),
        ("inherit_parent_system_prompt", 1),
        ("output_schema", "a number"),
    ],
)
def test_empty_definition_field_of_the_wrong_kind_is_rejected(field: str, value: Any) -> None:
    with pytest.raises(DefinitionError, match=rf"agent 'a': {field} must be .*, not "):
        AgentDefinition("a", **{field: value})


def test_extra_that_is_no_object_is_rejected() -> None:
    with pytest.raises(DataError, match="expected a JSON object at extra, not a list"):
        ModelSettings(extra=[1])  # type: ignore[arg-type]


class Size(BaseModel):
    size: int


@pytest.mark.spec("requirements:A13")
@pytest.mark.parametrize("params", [Size, {"type": "object", "properties": {"size": {"type": "integer"}}}, None])
@pytest.mark.parametrize("prompt", [{"type": "string", "description": "What to measure."}, "What to measure."])
def test_prompt_and_params_in_one_dict_are_an_input_schema(params: Any, prompt: Any) -> None:
    both = {"prompt": prompt, "params": params} if params is not None else {"prompt": prompt}

    assert AgentDefinition("a", input_schema=both).input_schema == InputSchema(prompt="What to measure.", params=params)


@pytest.mark.parametrize("schema", [{"properties": {"prompt": {"type": "string"}}}, {}])
def test_other_input_schemas_describe_params_alone(schema: Any) -> None:
    assert AgentDefinition("a", input_schema=schema).input_schema == InputSchema(params=schema)


def test_a_prompt_that_is_no_string_is_refused() -> None:
    with pytest.raises(DefinitionError, match="prompt"):
        AgentDefinition("a", input_schema={"prompt": {"type": "object"}, "params": {"type": "object"}})
