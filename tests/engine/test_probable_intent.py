"""What would silently do something else is refused, and the message names the probable intent."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepengine import (
    AgentCall,
    AgentDefinition,
    Ask,
    Change,
    Engine,
    InputSchema,
    Limits,
    ModelSettings,
    Parallel,
    Receive,
    Start,
    StepContext,
    Tool,
    ToolResult,
    map_agents,
)
from stepengine.data.schemas import KEYWORDS, SHORT_KEYWORDS, find_keyword_problem
from stepengine.errors import StepEngineError
from stepengine.evaluation import Case, Evaluation, fits
from stepengine.tools.bundled import task_tool
from stepengine.workspace.path_policy import PathPolicy


def say(ctx: StepContext) -> Generator[Any, Any, str]:
    """Say a word."""
    return "said"
    yield


KID = AgentDefinition("kid", handle_steps=say, description="Talks.")
USERS: dict[str, Callable[[Any], Any]] = {
    "output": lambda schema: Engine([AgentDefinition("a", handle_steps=say, output_schema=schema)]),
    "params": lambda schema: Engine([AgentDefinition("a", handle_steps=say, input_schema=InputSchema(params=schema))]),
    "tool": lambda schema: Tool("t", "A tool.", schema, print),
    "receive": lambda schema: Receive("topic", schema=schema),
    "settings": lambda schema: ModelSettings(response_schema=schema),
    "fits": fits,
}


@pytest.mark.spec("reliability:TL20")
@pytest.mark.parametrize(
    ("user", "schema", "meant"),
    [
        *((user, {"type": "object", "reqired": ["a"]}, "did you mean 'required'?") for user in USERS),
        ("tool", {"type": "object", "additional_properties": False}, "did you mean 'additionalProperties'?"),
        ("tool", {"type": "object", "properties": {"a": {"type": "integer", "min": 3}}}, "did you mean 'minimum'?"),
        ("tool", {"type": "object", "a": {"type": "string"}}, "put it below 'properties'"),
    ],
)
def test_a_misspelt_keyword_of_a_schema_is_refused(user: str, schema: dict[str, Any], meant: str) -> None:
    with pytest.raises(StepEngineError) as refused:
        USERS[user](schema)

    assert meant in str(refused.value)


@given(st.sampled_from(sorted(KEYWORDS - SHORT_KEYWORDS)), st.data())
def test_each_keyword_is_known_and_with_one_slip_refused(keyword: str, data: st.DataObject) -> None:
    at = data.draw(st.integers(1, len(keyword) - 1))
    slip = keyword[:at] + keyword[at + 1 :]

    assert not find_keyword_problem({"type": "object", keyword: True})
    assert slip in KEYWORDS or len(slip) < 4 or "did you mean" in find_keyword_problem({"type": "object", slip: True})


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "string", "hint": "short", "note": "for people", "x-order": 1},
        {"type": "object", "properties": {"typ": {"type": "string"}, "propertis": {"enum": [{"typ": 1}]}}},
        {"$ref": "#/components/a", "components": {"a": {"type": "string"}}},
        {"type": "string", "default": {"typ": 1}, "example": "x", "nullable": True},
    ],
)
def test_annotations_data_and_names_of_members_are_no_slips(schema: dict[str, Any]) -> None:
    assert not find_keyword_problem(schema)


LISTS: dict[str, Callable[[Any], Any]] = {
    "map_agents": lambda items: map_agents(KID, items),
    "map_agents with a prompt": lambda items: map_agents(KID, items, prompt=str),
    "Parallel": Parallel,
    "Ask": lambda items: Ask("Which?", items),
    "task_tool": task_tool,
    "Engine": Engine,
    "tools": lambda items: AgentDefinition("a", tools=items),
    "spawnable_agents": lambda items: AgentDefinition("a", spawnable_agents=items),
    "Change": lambda items: Change(tail=items),
    "side_effects": lambda items: ToolResult.text("x", side_effects=items),
    "PathPolicy": lambda items: PathPolicy(withhold=items),
    "cases": lambda items: Evaluation("e", cases=items, agents={"kid": KID}),
    "gates": lambda items: Evaluation("e", cases=[Case("c", "x")], agents={"kid": KID}, gates=items),
}


@pytest.mark.spec("requirements:J13")
@pytest.mark.parametrize(
    ("user", "items"), [*((user, "abc") for user in LISTS), ("Parallel", b"bytes"), ("Parallel", {"a": 1})]
)
def test_a_text_bytes_or_mapping_is_no_list(user: str, items: Any) -> None:
    with pytest.raises(StepEngineError, match=r"list|must contain AgentDefinition|Parallel can contain"):
        LISTS[user](items)


@pytest.mark.spec("generator-contract:L2", "requirements:A5")
@pytest.mark.parametrize(
    ("way", "listed"),
    [*((way, [KID]) for way in ("AgentCall", "map_agents", "Start", "Parallel")), ("AgentCall", ["kid"])],
)
def test_another_agent_with_a_listed_id_is_refused(way: str, listed: list[Any]) -> None:
    variant = attrs.evolve(KID, limits=Limits(max_steps=3))
    other = AgentDefinition("kid", handle_steps=say, system_prompt="Another one.")
    found: list[Any] = []

    def handle(ctx: StepContext) -> Generator[Any, Any, None]:
        for agent in (KID, variant, other):
            try:
                if way == "AgentCall":
                    found.append((yield from AgentCall(agent, "x")))
                elif way == "Start":
                    found.append((yield from Start(AgentCall(agent, "x"))))
                else:
                    children: Any = (
                        map_agents(agent, ["x"]) if way == "map_agents" else Parallel([AgentCall(agent, "x")])
                    )
                    (child,) = yield from children
                    found.append(child.unwrap())
            except StepEngineError as error:
                found.append(str(error))

    boss = AgentDefinition("boss", handle_steps=handle, spawnable_agents=listed)
    Engine([boss, KID]).run_sync("boss", "go")

    assert "another agent" not in f"{found[0]} {found[1]}"
    assert "another agent 'kid' than spawnable_agents of 'boss': they differ in description, system_prompt" in found[2]
