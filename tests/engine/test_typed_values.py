"""A typed value comes back as it was, wherever it is stored, or it is refused there with the field and the remedy."""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import json
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Annotated, Any, Generic, Literal, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    PlainSerializer,
    PrivateAttr,
    RootModel,
    SecretStr,
    Tag,
    computed_field,
    create_model,
)
from typing_extensions import TypedDict

from stepengine import AgentCall, AgentDefinition, Ask, Engine, InputSchema, Schedule, call, tool
from stepengine.data.json import freeze_object
from stepengine.errors import (
    ChildError,
    DataError,
    DefinitionError,
    InputError,
    OutputMissing,
    ToolInputError,
)
from stepengine.journal import MemoryJournal
from stepengine.testing import ScriptedModel, text, tool_call

T = TypeVar("T")


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Word(enum.StrEnum):
    A = "a"


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int = Field(9, alias="livesLeft")


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"
    tags: frozenset[str] = frozenset()


class Box(BaseModel, Generic[T]):
    item: T


class Names(RootModel[list[Cat]]):
    pass


@dataclasses.dataclass
class Point:
    x: Decimal
    seen: set[dt.date] = dataclasses.field(default_factory=set)


class Row(TypedDict, total=False):
    number: Annotated[int, Field(alias="rowNumber")]
    day: dt.date


class Computed(BaseModel):
    model_config = ConfigDict(extra="forbid")
    n: int

    @computed_field  # type: ignore[prop-decorator]
    @property
    def twice(self) -> int:
        return 2 * self.n


class Private(BaseModel):
    n: int = 0
    _seen: int = PrivateAttr(default=0)


def cats() -> st.SearchStrategy[Cat]:
    return st.builds(lambda n: Cat(livesLeft=n), st.integers(0, 9))


def private(n: int, seen: int) -> Private:
    made = Private(n=n)
    made._seen = seen
    return made


dates = st.dates()
small = st.integers(-5, 5)
FIELDS: list[tuple[Any, st.SearchStrategy[Any]]] = [
    (int, small), (float, st.floats(allow_nan=False, allow_infinity=False) | small), (str, st.text(max_size=3)), (bool, st.booleans()),
    (int | None, st.none() | small), (int | str, small | st.text(max_size=2)), (dt.date | str, dates | st.text(max_size=2)),
    (bool | int | float, st.booleans() | small | st.floats(-1, 1)), (Color, st.sampled_from(Color)), (Color | str, st.sampled_from(Color)),
    (Word | str, st.sampled_from([Word.A, "b"])), (dt.date, dates), (dt.datetime, st.datetimes(timezones=st.just(dt.UTC))),
    (dt.time, st.times()), (dt.timedelta, st.timedeltas(dt.timedelta(-9), dt.timedelta(9))),
    (Decimal, st.decimals(allow_nan=False, allow_infinity=False, places=2)), (Decimal | float, st.decimals(-1, 1, places=1) | st.floats(-1, 1)),
    (bytes, st.binary(max_size=3)), (set[str], st.sets(st.text(max_size=2), max_size=3)),
    (frozenset[frozenset[int]], st.frozensets(st.frozensets(small, max_size=2), max_size=2)), (tuple[int, str], st.tuples(small, st.text(max_size=1))),
    (list[int] | tuple[int, ...], st.lists(small, max_size=2) | st.lists(small, max_size=2).map(tuple)), (Any, st.sampled_from([1, "a", None, (1,), {1}, [1], freeze_object({"a": [1]})])),
    (dict[str, dt.date], st.dictionaries(st.text(max_size=2), dates, max_size=2)), (dict[int, Color], st.dictionaries(small, st.sampled_from(Color), max_size=2)),
    (Cat, cats()), (BaseModel, cats()), (list[Cat | Dog], st.lists(cats() | st.just(Dog(tags=frozenset("ab"))), max_size=2)), (Names, st.lists(cats(), max_size=2).map(Names)),
    (Annotated[Cat | Dog, Field(discriminator="kind")], cats()), (Box[int], small.map(lambda n: Box[int](item=n))),
    (Annotated[Annotated[Cat, Tag("cat")] | Annotated[Dog, Tag("dog")], Discriminator(lambda v: v["kind"] if isinstance(v, dict) else v.kind)], cats()),
    (Point, st.builds(Point, st.decimals(-9, 9, places=1), st.sets(dates, max_size=2))), (Row, st.builds(lambda n, d: Row(number=n, day=d), small, dates)),
    (Computed, small.map(lambda n: Computed(n=n))), (Private, st.builds(private, small, st.integers(0, 1))), (SecretStr, st.text(max_size=2).map(SecretStr)),
    (int | str, st.sampled_from(["1", "[1]", "null", " a", 3])), (list[int] | str, st.sampled_from(["[1]", [1]])), (str, st.sampled_from(["1", "{}", "true"])),
    (Annotated[int, AfterValidator(lambda v: v + 1)], small), (Annotated[int, AfterValidator(abs)], small),
    (Annotated[int, PlainSerializer(lambda v: f"#{v}")], small), (Annotated[float, PlainSerializer(lambda v: round(v, 1))], st.floats(-1, 1)),
    (Annotated[str, PlainSerializer(str.upper, when_used="json")], st.sampled_from(["a", "B"])),
]  # fmt: skip
OPTIONS: list[dict[str, Any]] = [
    {}, {}, {"alias": "Other"}, {"validation_alias": "Other"}, {"serialization_alias": "Other"}, {"exclude": True},
    {"validation_alias": AliasChoices("Other", "More")}, {"alias": "x", "serialization_alias": "y"}, {"default": None}, {"default_factory": list},
]  # fmt: skip
CONFIGS = [
    {}, {"extra": "forbid"}, {"extra": "allow"}, {"strict": True}, {"frozen": True}, {"populate_by_name": True},
    {"alias_generator": str.upper}, {"revalidate_instances": "always"}, {"serialize_by_alias": True}, {"use_enum_values": True},
]  # fmt: skip


@st.composite
def models(draw: st.DrawFn) -> BaseModel:
    """Generate an instance of a generated model class."""
    fields, values = {}, {}
    for name in ("one", "two")[: draw(st.integers(1, 2))]:
        annotation, value = draw(st.sampled_from(FIELDS))
        options = dict(draw(st.sampled_from(OPTIONS)))
        if options.get("alias") and name == "two":
            options["alias"] = "Second"
        fields[name] = (annotation, Field(**options))
        values[name] = draw(value)
    kind = create_model("Made", __config__=ConfigDict(**draw(st.sampled_from(CONFIGS))), **fields)  # type: ignore[call-overload]
    if draw(st.booleans()):
        outer: Any = create_model("Outer", inner=(kind, ...), many=(list[kind], []))  # type: ignore[valid-type]
        return outer.model_construct(inner=kind.model_construct(**values), many=[kind.model_construct(**values)])
    return kind.model_construct(**values)


def same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(one == other)


def echo_of(kind: Any) -> Any:
    def echo(x: Any) -> Any:
        return x

    echo.__annotations__ = {"x": kind, "return": kind}
    return tool(in_thread=False, description="Return it.")(echo)


def through_params(value: Any) -> list[Any]:
    """Return the params as the handler sees them at first, when resumed after a question, in a replay and in a fork."""
    seen: list[Any] = []

    def handler(ctx: Any) -> Any:
        seen.append(ctx.params)
        yield from Ask("Go on?", key="q")
        return "done"

    agent = AgentDefinition("asks", input_schema=InputSchema(params=type(value)), handle_steps=handler)
    journal = MemoryJournal()
    with Engine([agent]) as engine:
        assert engine.run_sync(agent, params=value, journal=journal).status == "suspended"
        engine.resume_sync(journal, answers={"q": "yes"}).unwrap()
        engine.replay_sync(journal)
        engine.fork_sync(journal, at=0, answers={"q": "no"}).unwrap()
    assert len(seen) >= 4
    return seen


def through_output(value: Any) -> list[Any]:
    """Return the output of a run, of a child and of the run that is replayed."""
    seen: list[Any] = []

    def child(_: Any) -> Any:
        yield from ()
        return value

    def parent(_: Any) -> Any:
        seen.append((yield from AgentCall(kid)))
        return seen[-1]

    kid = AgentDefinition("kid", output_schema=type(value), handle_steps=child)
    top = AgentDefinition("top", output_schema=type(value), spawnable_agents=[kid], handle_steps=parent)
    journal = MemoryJournal()
    with Engine([top]) as engine:
        seen.append(engine.run_sync(top, journal=journal).unwrap())
        seen.append(engine.resume_sync(journal).unwrap())
        engine.replay_sync(journal)
    return seen


def through_child_params(value: Any) -> list[Any]:
    seen: list[Any] = []

    def child(ctx: Any) -> Any:
        seen.append(ctx.params)
        yield from ()
        return "done"

    def parent(_: Any) -> Any:
        yield from AgentCall(kid, params=value)

    kid = AgentDefinition("kid", input_schema=InputSchema(params=type(value)), handle_steps=child)
    top = AgentDefinition("top", spawnable_agents=[kid], handle_steps=parent)
    with Engine([top]) as engine:
        unwrap(engine.run_sync(top, journal=MemoryJournal()))
    return seen


def through_call(value: Any, kind: Any = None) -> list[Any]:
    seen: list[Any] = []
    echo = echo_of(type(value) if kind is None else kind)

    def handler(_: Any) -> Any:
        seen.append((yield from call(echo, value)))

    agent = AgentDefinition("calls", tools=[echo], handle_steps=handler)
    journal = MemoryJournal()
    with Engine([agent]) as engine:
        unwrap(engine.run_sync(agent, journal=journal))
        engine.replay_sync(journal)
    return seen


def through_schedule(value: Any) -> list[Any]:
    stored = Schedule("daily", cron="@daily", params=value).params
    return [type(value).model_validate_json(json.dumps(stored))]


def unwrap(result: Any) -> None:
    if result.error is not None:
        raise result.error


WAYS: list[Callable[[Any], list[Any]]] = [
    through_params, through_output, through_child_params, through_call, through_schedule,
]  # fmt: skip
REFUSALS = (ChildError, DataError, InputError, OutputMissing, ToolInputError, DefinitionError)


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("generator-contract:S15")
@settings(deadline=None, max_examples=30)
@given(value=models())
def test_typed_values_come_back_equal_or_are_refused(value: Any) -> None:
    for way in WAYS:
        try:
            seen = way(value)
        except REFUSALS as error:
            refused: str | None = str(error)
        else:
            refused = None
        if refused is not None:
            assert ";" in refused, f"{way.__name__}: the remedy"
            continue
        assert seen, way.__name__
        assert all(same(back, value) for back in seen), way.__name__


class Renamed(BaseModel):
    n: int = Field(0, alias="number")


class Read(BaseModel):
    n: int = Field(0, validation_alias="number")


class Added(BaseModel):
    n: Annotated[int, AfterValidator(lambda v: v + 1)]


class Hidden(BaseModel):
    n: int = Field(0, exclude=True)


class Shown(BaseModel):
    n: Annotated[int, PlainSerializer(lambda v: f"#{v}")]


class Strict(BaseModel):
    model_config = ConfigDict(strict=True)
    days: tuple[dt.date, ...] = ()


class Locked(BaseModel):
    token: SecretStr


class LockedToo(BaseModel):
    n: int = Field(validation_alias="number")
    tokens: list[SecretStr]


@pytest.mark.spec("generator-contract:S15")
@pytest.mark.parametrize(
    ("kind", "said", "expected"),
    [
        (Renamed, {"number": 5}, Renamed(number=5)), (Read, {"number": 5}, Read(number=5)), (Computed, {"n": 1}, Computed(n=1)),
        (Added, {"n": 1}, Added(n=1)), (Hidden, {"n": 5}, Hidden(n=5)), (Shown, {"n": 1}, Shown(n=1)),
        (Strict, {"days": ["2026-01-02"]}, Strict(days=(dt.date(2026, 1, 2),))),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)  # fmt: skip
def test_json_is_validated_once(kind: Any, said: Any, expected: BaseModel) -> None:
    """What a model or a caller gives as JSON is validated as it was given, in a resumed run and a parent, too."""
    seen: list[Any] = []

    def handler(ctx: Any) -> Any:
        seen.append(ctx.params)
        seen.append((yield from AgentCall(writer, "Write.")))
        seen.append((yield from call(echo, said)))
        yield from Ask("Go on?", key="q")
        return seen[1]

    echo = echo_of(kind)
    writer = AgentDefinition("writer", model="test/model", output_schema=kind)
    agent = AgentDefinition(
        "asks", input_schema=InputSchema(params=kind), output_schema=kind, spawnable_agents=[writer], tools=[echo],
        handle_steps=handler,
    )  # fmt: skip
    journal = MemoryJournal()
    with Engine([agent], models=ScriptedModel([tool_call("set_output", said), text("done")])) as engine:
        waiting = engine.run_sync(agent, params=said, journal=journal)
        if kind in {Read, Hidden, Shown, Added}:  # what the tool returns again has no JSON of its own
            assert "does not come back equal" in str(waiting.error) or "not read back" in str(waiting.error)
            return
        assert waiting.status == "suspended", waiting.error
        done = engine.resume_sync(journal, answers={"q": "yes"})
        assert engine.replay_sync(journal).unwrap() == done.unwrap() == expected
    assert seen
    assert all(same(back, expected) for back in seen)


@pytest.mark.spec("generator-contract:S15")
@pytest.mark.parametrize(
    ("way", "value", "field"),
    [
        *((way, Hidden(n=5), "n") for way in WAYS),
        *((way, Locked(token="xyz"), "token") for way in WAYS),
        (through_params, Read(number=5), "n"),
        (through_params, Added(n=1), "n"),
        (through_params, Shown(n=1), "n"),
    ],
    ids=lambda v: getattr(v, "__name__", type(v).__name__),
)
def test_lossy_objects_are_refused_with_field_and_remedy(way: Any, value: BaseModel, field: str) -> None:
    with pytest.raises(REFUSALS) as caught:
        way(value)
    assert re.search(rf"\.{field}\b", str(caught.value))
    assert "write" in str(caught.value) or "alias" in str(caught.value) or "secret is not stored" in str(caught.value)
    assert "xyz" not in str(caught.value)


@pytest.mark.spec("generator-contract:S15")
@pytest.mark.parametrize(
    ("kind", "said"),
    [(Locked, {"token": "abc"}), (LockedToo, {"number": 1, "tokens": ["abc"]})],
    ids=["plain", "nested"],
)
def test_secrets_given_as_json_are_never_stored(kind: Any, said: Any) -> None:
    def handler(_: Any) -> Any:
        yield from ()

    agent = AgentDefinition("keeps", input_schema=InputSchema(params=kind), handle_steps=handler)
    with Engine([agent]) as engine, pytest.raises(InputError, match=r"token.*a secret is not stored"):
        engine.run_sync(agent, params=said)


@pytest.mark.spec("generator-contract:S15")
def test_handlers_are_refused_lossy_results_and_models_see_them() -> None:
    @tool(in_thread=False)
    def hidden() -> Hidden:
        """Return it."""
        return Hidden(n=5)

    def handler(_: Any) -> Any:
        yield from call(hidden)

    agent = AgentDefinition("calls", model="test/model", tools=[hidden], handle_steps=handler)
    plain = AgentDefinition("plain", model="test/model", tools=[hidden])
    with Engine([agent, plain], models=ScriptedModel([tool_call("hidden"), text("done")])) as engine:
        assert "result.n does not come back equal" in str(engine.run_sync(agent).error)
        assert engine.run_sync(plain, "Go.").tool_calls[0].result.status == "ok"  # a model reads what is shown


class Words(BaseModel):
    words: set[str]
    nested: list[frozenset[str]]


def test_sets_are_stored_in_the_same_order_by_each_process() -> None:
    """
    The order in which a set gives its items is another one in each process, so they are sorted.
    """
    greek, latin = {"alpha", "beta", "gamma", "delta", "epsilon"}, frozenset("zyxwvu")
    params = AgentCall("kid", params=Words(words=greek, nested=[latin])).params

    assert ([*params["words"]], [*params["nested"][0]]) == (sorted(greek), sorted(latin))
