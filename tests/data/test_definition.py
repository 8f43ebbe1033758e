"""
Agent definitions: immutable, checked where they are built, with errors that name the place.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
from pydantic import BaseModel

from stepengine.data.definition import ELSEWHERE, AgentDefinition, InputSchema, normalised_id
from stepengine.data.functions import accepts_one_argument, format_location
from stepengine.data.hooks import Hooks
from stepengine.data.json import JsonDict
from stepengine.data.limits import Limits
from stepengine.data.messages import ToolResult
from stepengine.data.models import ModelSettings, Thinking
from stepengine.data.tools import ToolBinding, ToolSpec, Validated
from stepengine.data.yields import STEP, STEP_ALL
from stepengine.errors import DataError, DefinitionError

FILE = Path(__file__).name


@attrs.frozen
class FakeTool:
    """A tool that is equal to its copies."""

    spec: ToolSpec

    def binding(self) -> ToolBinding:
        return ToolBinding(self.spec, lambda value: Validated(value, value))

    def arguments(self, **kwargs: Any) -> JsonDict:
        return JsonDict(kwargs)

    def decode(self, result: ToolResult, /) -> Any:
        return result.data


class Model(BaseModel):
    n: int


def handler(ctx: Any) -> Any:
    yield STEP_ALL


class Prompt:
    def render(self, ctx: Any) -> str:
        return "rendered"


FULL: dict[str, Any] = {
    "id": "reviewer",
    "model": "anthropic/claude",
    "display_name": "The Reviewer",
    "description": "reviews",
    "tools": ("read_files", FakeTool(ToolSpec("add"))),
    "spawnable_agents": ("helper", AgentDefinition("other-helper")),
    "system_prompt": "You review.",
    "instructions_prompt": "Review.",
    "step_prompt": "Go on.",
    "include_message_history": True,
    "inherit_parent_system_prompt": False,
    "input_schema": InputSchema(prompt="what", params={"type": "object"}),
    "output_mode": "structured_output",
    "output_schema": {"type": "object"},
    "handle_steps": handler,
    "settings": ModelSettings(temperature=0.5, thinking=Thinking("extended")),
    "hooks": Hooks(pre_step=print),
    "limits": Limits(max_steps=5),
}


# --- the value ------------------------------------------------------------------------------------------------------


@pytest.mark.spec("requirements:B1")
def test_an_unknown_or_assigned_field_is_refused() -> None:
    with pytest.raises(
        DefinitionError, match=r"agent 'a' has no argument 'surprise'; valid arguments: id, model, display_name, "
    ):
        AgentDefinition("a", surprise=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        AgentDefinition("a", "model")  # type: ignore[misc]
    with pytest.raises(AttributeError):
        AgentDefinition("a").model = "m"  # type: ignore[misc]


@pytest.mark.parametrize(("name", "meant"), sorted(ELSEWHERE.items()))
def test_field_name_of_another_library_suggests_ours(name: str, meant: str) -> None:
    ours = {field.name for field in attrs.fields(AgentDefinition)}

    assert name not in ours
    assert {*re.findall(r"^\w+(?=$|=)", meant)} <= ours
    with pytest.raises(
        DefinitionError, match=f"has no argument '{name}'; you may mean {re.escape(meant)}; valid arguments: id, "
    ):
        AgentDefinition("a", **{name: "x"})  # type: ignore[arg-type]


def test_camel_case_fields_and_typos_get_suggestions() -> None:
    with pytest.raises(
        DefinitionError,
        match="has no argument 'displayName', 'toolNames', 'handleSteps', 'spawnerPrompt'; "
        "you may mean display_name, tools, handle_steps, description; valid arguments: id, ",
    ):
        AgentDefinition("a", displayName="A", toolNames=[], handleSteps=None, spawnerPrompt="x")  # type: ignore[arg-type]
    with pytest.raises(
        DefinitionError, match="has no argument 'sytem_prompt'; you may mean system_prompt; valid arguments: id, "
    ):
        AgentDefinition("a", sytem_prompt="x")  # type: ignore[arg-type]


@pytest.mark.spec("requirements:B1")
def test_definitions_with_equal_fields_are_equal() -> None:
    assert AgentDefinition(**FULL) == AgentDefinition(**FULL) == copy.deepcopy(AgentDefinition(**FULL))
    assert FULL == {name: getattr(AgentDefinition(**FULL), name) for name in FULL}
    assert hash(AgentDefinition(**FULL)) == hash(AgentDefinition(**FULL))
    others: dict[str, Any] = {
        "id": "other",
        "system_prompt": Prompt(),
        "handle_steps": lambda ctx: (yield STEP),
        "limits": None,
        "include_message_history": False,
    }
    for name, value in others.items():
        assert AgentDefinition(**FULL) != AgentDefinition(**{**FULL, name: value}), name


@pytest.mark.spec("requirements:H16", "requirements:A2", "generator-contract:S1", "requirements:A16")
def test_the_smallest_agent_needs_an_id_and_has_documented_defaults() -> None:
    agent = AgentDefinition("x")

    assert (
        AgentDefinition(
            "x",
            model=None,
            display_name="x",
            description="",
            tools=(),
            spawnable_agents=(),
            system_prompt="",
            instructions_prompt="",
            step_prompt="",
            include_message_history=False,
            inherit_parent_system_prompt=False,
            input_schema=None,
            output_mode="last_message",
            output_schema=None,
            handle_steps=None,
            settings=ModelSettings(),
            hooks=Hooks(),
            limits=Limits(),
        )
        == agent
    )
    assert agent.settings.thinking is None
    assert ((), ()) == (agent.tool_names, agent.spawnable_ids)


@pytest.mark.spec("requirements:A8")
def test_prompts_are_kept_verbatim() -> None:
    agent = AgentDefinition("a", system_prompt=" X\n", instructions_prompt=None, step_prompt=None)

    assert (" X\n", "", "") == (agent.system_prompt, agent.instructions_prompt, agent.step_prompt)
    assert AgentDefinition("a", system_prompt=None).system_prompt == ""


def test_tools_and_agents_are_known_by_name_and_by_object() -> None:
    agent = AgentDefinition(**FULL)

    assert ("read_files", "add") == agent.tool_names
    assert ("helper", "other-helper") == agent.spawnable_ids
    assert AgentDefinition(**{**FULL, "tools": list(FULL["tools"])}) == agent


@pytest.mark.spec("requirements:A2")
def test_ids_compare_with_underscores_as_hyphens() -> None:
    assert "code-reviewer" == normalised_id("code_reviewer") == normalised_id("code-reviewer")


@pytest.mark.spec("requirements:A13")
def test_an_input_schema_may_be_the_schema_of_params_alone() -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    agent = AgentDefinition("a", input_schema=schema)
    schema["type"] = "changed"

    assert agent.input_schema == InputSchema(params={"type": "object", "properties": {"n": {"type": "integer"}}})
    assert type(agent.input_schema.params) is JsonDict  # type: ignore[union-attr]
    assert AgentDefinition("a", input_schema=Model).input_schema == InputSchema(params=Model)
    with pytest.raises(DataError, match=r"\$\.a"):
        AgentDefinition("a", output_schema={"a": object()})


@pytest.mark.spec("generator-contract:S1")
def test_an_output_schema_means_structured_output() -> None:
    assert AgentDefinition("a", output_schema={"type": "object"}).output_mode == "structured_output"
    assert AgentDefinition("a", output_schema=Model).output_schema is Model


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.spec("requirements:A2", "generator-contract:S13")
@pytest.mark.parametrize("agent_id", ["", "A", "a_b", "a-", "a\n", None])
def test_an_id_that_is_not_kebab_case_is_refused(agent_id: Any) -> None:
    with pytest.raises(DefinitionError, match="an id must be lower-case letters, digits and single hyphens") as caught:
        AgentDefinition(agent_id)

    assert repr(agent_id) in caught.value.message


@pytest.mark.spec("requirements:A2", "requirements:G12")
def test_ids_and_models_of_any_provider_are_accepted() -> None:
    for agent_id, model in (("a", "anthropic/claude"), ("0", "somebody/else"), ("code-reviewer-2", None)):
        agent = AgentDefinition(agent_id, model=model)

        assert (agent_id, model) == (agent.id, agent.model)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "model empty": ({"model": " "}, "model must be a string such as"),
    "description": ({"description": 5}, "description must be text"),
    "step prompt": ({"step_prompt": "\ud800"}, "step_prompt must be text without lone surrogates"),
    "system prompt": ({"system_prompt": 5}, "system_prompt must be text or an object with a method render"),
    "limits": ({"limits": 5}, "limits must be a Limits"),
    "tools one string": ({"tools": "read_files"}, "tools must be a list, not 'read_files'"),
    "tools no tool": ({"tools": [5]}, "tools must contain tool names and Tool objects, not 5"),
    "tool twice": (
        {"tools": ["add", FakeTool(ToolSpec("add"))]},
        "a tool is listed twice in ['add', 'add']",
    ),
    "agents one string": ({"spawnable_agents": "helper", "handle_steps": handler}, "spawnable_agents must be a list"),
    "agents without a way": ({"spawnable_agents": ["b"]}, "spawnable_agents needs a spawning tool"),
    "output mode": ({"output_mode": "json"}, "output_mode must be 'last_message', 'all_messages' or"),
    "schema and mode": ({"output_mode": "all_messages", "output_schema": {}}, "output_schema needs output_mode="),
    "structured from nowhere": ({"output_mode": "structured_output"}, "structured_output needs an output_schema"),
    "two prompts": (
        {"inherit_parent_system_prompt": True, "system_prompt": "x"},
        "cannot be combined with system_prompt",
    ),
}


@pytest.mark.spec("generator-contract:S13", "generator-contract:S1")
@pytest.mark.parametrize("case", sorted(REFUSED))
def test_a_definition_that_cannot_work_is_refused(case: str) -> None:
    fields, reason = REFUSED[case]

    with pytest.raises(DefinitionError) as caught:
        AgentDefinition("broken", **fields)

    assert caught.value.message.startswith("agent 'broken': ")
    assert reason in caught.value.message


@pytest.mark.spec("generator-contract:S13")
@pytest.mark.parametrize(
    "fields",
    [
        {"spawnable_agents": ["b"], "tools": ["spawn_agents"]},
        {"spawnable_agents": ["b"], "tools": ["spawn_agent_inline"]},
        {"spawnable_agents": ["b"], "tools": ["task"]},
        {"spawnable_agents": ["b"], "handle_steps": handler},
        {"output_mode": "structured_output", "handle_steps": handler},
        {"output_mode": "structured_output", "tools": ["set_output"]},
        {"tools": ["set_output"]},
        {"output_mode": "all_messages"},
        {"inherit_parent_system_prompt": True},
        {"system_prompt": Prompt()},
    ],
    ids=lambda fields: "+".join(map(str, fields)) + str(len(str(fields))),
)
def test_unusual_but_valid_definitions_are_accepted(fields: dict[str, Any]) -> None:
    assert "a" == AgentDefinition("a", **fields).id


# --- handlers -------------------------------------------------------------------------------------------------------


async def async_generator(ctx: Any) -> Any:
    yield STEP_ALL


async def coroutine(ctx: Any) -> Any:
    return STEP_ALL


def plain_function(ctx: Any) -> Any:
    return STEP_ALL


def two_arguments(ctx: Any, other: Any) -> Any:
    yield STEP_ALL


class Handler:
    def __call__(self, ctx: Any) -> Any:
        yield STEP_ALL

    def method(self, ctx: Any) -> Any:
        yield STEP_ALL

    @classmethod
    def of_class(cls, ctx: Any) -> Any:
        yield STEP_ALL

    @staticmethod
    def static(ctx: Any) -> Any:
        yield STEP_ALL


class AsyncHandler:
    async def __call__(self, ctx: Any) -> Any:
        yield STEP_ALL


def line_of(fn: Any) -> int:
    line: int = fn.__code__.co_firstlineno
    return line


lambda_without_yield = lambda ctx: STEP_ALL  # noqa: E731
WRONG: dict[str, tuple[Any, str, int | None]] = {
    "async generator": (async_generator, "is async; handlers are plain generator functions", line_of(async_generator)),
    "coroutine": (coroutine, "do I/O with `yield from Perform(fn, ...)`", line_of(coroutine)),
    "async object": (AsyncHandler(), "is async", line_of(AsyncHandler.__call__)),
    "plain function": (plain_function, "is not a generator function", line_of(plain_function)),
    "lambda": (lambda_without_yield, "it must contain a `yield`", line_of(lambda_without_yield)),
    "class": (Handler, "is not a generator function", line_of(Handler.__call__) - 1),
    "generator object": (handler(None), "is a generator object; pass the function itself", line_of(handler)),
    "two arguments": (two_arguments, "cannot be called with one argument", line_of(two_arguments)),
    "bound too far": (partial(handler, 1), "cannot be called with one argument", line_of(handler)),
    "builtin": (print, "is not a generator function", None),
}


@pytest.mark.spec("generator-contract:G1", "reliability:GN11")
@pytest.mark.parametrize("case", sorted(WRONG))
def test_handler_that_is_no_generator_function_is_rejected_with_location(case: str) -> None:
    fn, reason, line = WRONG[case]

    with pytest.raises(DefinitionError) as caught:
        AgentDefinition("broken", handle_steps=fn)

    assert caught.value.message.startswith("handle_steps of 'broken' (")
    assert reason in caught.value.message
    if line is not None:
        assert f"{FILE}:{line})" in caught.value.message


@pytest.mark.spec("generator-contract:G1", "reliability:GN11")
@pytest.mark.parametrize(
    "fn",
    [
        handler,
        lambda ctx: (yield STEP),
        partial(handler),
        partial(two_arguments, other=1),
        partial(partial(two_arguments, other=1)),
        Handler(),
        Handler().method,
        Handler.of_class,
        Handler.static,
    ],
)
def test_every_kind_of_generator_function_is_accepted(fn: Callable[[Any], Any]) -> None:
    agent = AgentDefinition("a", handle_steps=fn)

    assert agent.handle_steps is fn
    assert next(fn(None)) in (STEP, STEP_ALL)


@pytest.mark.spec("generator-contract:S12")
@pytest.mark.parametrize("wrong", [-1, 1.5, True])
def test_output_retries_must_be_a_whole_number(wrong):
    with pytest.raises(DefinitionError, match="output_retries must be the number of repeated requests for an output"):
        AgentDefinition("a", output_retries=wrong)


class Flight(BaseModel):
    number: str


@pytest.mark.spec("generator-contract:S13")
@pytest.mark.parametrize(
    ("schema", "wanted"),
    [(list[Flight], "list[Flight]"), (Flight | None, "Flight | None")],
)
def test_unsupported_output_schema_type_suggests_a_root_model(schema, wanted):
    with pytest.raises(DefinitionError) as caught:
        AgentDefinition("finder", output_schema=schema)
    assert caught.value.message.endswith(f"for {wanted} write RootModel[{wanted}]")


def test_functions_without_source_or_signature_are_described() -> None:
    made = type("Made", (), {"__module__": "nowhere"})

    assert ["builtins.int", "nowhere.Made"] == [format_location(int), format_location(made)]
    assert accepts_one_argument(getattr)
    assert not accepts_one_argument(lambda: None)
