"""Parameters that can be read only once are refused where they are defined."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncIterator, Generator, Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal

import pytest
from pydantic import AfterValidator, BaseModel, Field, RootModel, TypeAdapter, model_validator
from typing_extensions import TypedDict

from stepengine import AgentDefinition, Engine, InputSchema, Receive, call, tool
from stepengine.errors import DefinitionError
from stepengine.testing import ScriptedModel, text, tool_call


class Model(BaseModel):
    xs: Iterable[int]

    @model_validator(mode="after")
    def check(self) -> Model:
        return self


class Outer(BaseModel):
    models: list[Model] | None = None


class Root(RootModel[Iterable[int]]):
    pass


class Row(TypedDict):
    xs: Generator[int, None, None]


@dataclasses.dataclass
class Data:
    rows: dict[str, Row]


class Fine(BaseModel):
    xs: Annotated[Iterable[int], AfterValidator(list)]
    ys: Sequence[int] = ()


WORDS = (
    "type",
    "schema",
    "fields",
    "choices",
    "ref",
    "default",
    "metadata",
    "properties",
    "items",
    "enum",
    "config",
    "cls",
    "$ref",
)
"""Names that also have a meaning in schemas."""
Words = TypedDict("Words", dict.fromkeys(WORDS, str))  # type: ignore[misc]  # the names are a constant


class Circle(BaseModel):
    kind: Literal["type"]
    radius: int


class Box(BaseModel):
    kind: Literal["schema"]
    default: int


class Typed(BaseModel):
    type: Iterable[int]


ONE_SHOT: list[tuple[Any, str]] = [
    (Iterable[int], "x"), (Generator[int, None, None], "x"), (Iterable[int] | None, "x"), (list[Iterable[int]], "x"), (Model, "x.xs"),
    (Outer, "x.models.xs"), (Root, "x"), (Row, "x.xs"), (Data, "x.rows.xs"), (Iterator[int], "x"), (AsyncIterator[int], "x"),
    (Typed, "x.type"),
]  # fmt: skip


def make(annotation: Any) -> Any:
    def reads(x: Any) -> Any:
        return [list(x), list(x)]

    reads.__annotations__ = {"x": annotation, "return": list[list[int]]}
    return tool(in_thread=False, description="Read it.")(reads)


@pytest.mark.spec("requirements:E28")
@pytest.mark.parametrize(("annotation", "place"), ONE_SHOT, ids=str)
def test_one_shot_parameters_are_refused_with_name_and_remedy(annotation: Any, place: str) -> None:
    with pytest.raises(DefinitionError, match=rf"'{place}'.*write list\[\.\.\.\] or Sequence\[\.\.\.\]"):
        make(annotation)


@pytest.mark.spec("requirements:E28")
@pytest.mark.parametrize(("kind", "option"), [(Model, "params"), (Outer, "output"), (Root, "params")])
def test_one_shot_fields_of_agents_are_refused(kind: Any, option: str) -> None:
    schema = {"input_schema": InputSchema(params=kind)} if option == "params" else {"output_schema": kind}
    with pytest.raises(DefinitionError, match=r"write list\[\.\.\.\]"):
        Engine([AgentDefinition("reads", model="test/model", **schema)], models=ScriptedModel([]))


@pytest.mark.spec("requirements:E28")
def test_one_shot_messages_and_results_are_refused() -> None:
    @tool(in_thread=False)
    def counts() -> Iterable[int]:
        """Count."""
        return [1, 2]

    def receives(_: Any) -> Any:
        yield from Receive("topic", timeout=0, schema=Model)

    def calls(_: Any) -> Any:
        yield from call(counts)

    for handler in (receives, calls):
        agent = AgentDefinition("reads", tools=[counts], handle_steps=handler)
        with Engine([agent]) as engine:
            assert "write list[...]" in str(engine.run_sync(agent).error)


def test_a_validator_may_turn_an_iterable_into_a_list() -> None:
    reads = make(Sequence[int])
    fine = tool(in_thread=False, description="Read it.")(lambda_of_fine)
    agent = AgentDefinition("reads", model="test/model", tools=[reads, fine])
    replies = [tool_call("reads", {"x": [1, 2]}), tool_call("lambda_of_fine", {"x": {"xs": [1]}}), text("done")]
    with Engine([agent], models=ScriptedModel(replies)) as engine:
        result = engine.run_sync(agent, "Go.")
    assert [one.result.data for one in result.tool_calls] == [[[1, 2], [1, 2]], [1, 1]]


def lambda_of_fine(x: Fine) -> list[int]:
    return [*x.xs, *x.xs, *x.ys]


@pytest.mark.spec("requirements:E28")
def test_fields_and_tags_may_have_the_names_of_schema_members() -> None:
    received: list[object] = []

    @tool(in_thread=False)
    def keep(words: Words, shape: Annotated[Circle | Box, Field(discriminator="kind")], type: int) -> Words:
        """Keep them."""
        received.extend([words, shape, type])
        return words

    given = {word: f"the {word}" for word in WORDS}
    shape = {"kind": "schema", "default": 3}
    model = ScriptedModel([tool_call("keep", {"words": given, "shape": shape, "type": 1}), json.dumps(given)])
    schema = TypeAdapter(Words).json_schema()
    agent = AgentDefinition("keeper", model="test/model", tools=[keep], output_schema=schema)
    with Engine([agent], models=model) as engine:
        result = engine.run_sync("keeper", "Keep them.")

    assert [given, Box(kind="schema", default=3), 1] == received
    assert (None, given) == (result.error, result.output)
