"""Values whose comparison, hash and representation are written at their first use."""

from __future__ import annotations

import copy
import inspect
import linecache
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any, ClassVar

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepengine.data import events
from stepengine.data.frozen import frozen


@frozen
class Point:
    x: int
    y: object = 0
    note: str = attrs.field(default="", eq=False, repr=False)
    size: str = attrs.field(default="", eq=str.lower, kw_only=True)


@attrs.frozen
class Reference:
    x: int
    y: object = 0
    note: str = attrs.field(default="", eq=False, repr=False)
    size: str = attrs.field(default="", eq=str.lower, kw_only=True)


@frozen
class Named(Point):
    name: str = "origin"


POINTS = st.builds(
    dict,
    x=st.integers(0, 1),
    y=st.sampled_from([0, 1, (), "a"]),
    note=st.sampled_from("ab"),
    size=st.sampled_from("aAb"),
)


@given(POINTS, POINTS)
def test_a_value_compares_and_shows_itself_as_one_of_attrs(one: dict[str, Any], other: dict[str, Any]) -> None:
    """
    Whatever its fields say of comparison and representation.
    """
    equal = Point(**one) == Point(**other)

    assert (Reference(**one) == Reference(**other)) is equal
    assert (Point(**one) != Point(**other)) is not equal
    assert not equal or hash(Point(**one)) == hash(Point(**other))
    assert repr(Reference(**one)).replace("Reference", "Point") == repr(Point(**one))


@pytest.mark.parametrize("first", ["hash(Named(1))", "repr(Named(1))", "Named(1) == Point(1)", "Point(1) == Named(1)"])
def test_whichever_method_comes_first_a_subclass_keeps_its_own(first: str) -> None:
    """
    In a process of its own, where none was used before.
    """
    code = (
        "import attrs\nfrom stepengine.data.frozen import frozen\n"
        "@frozen\nclass Point:\n x: int\n"
        "@frozen\nclass Named(Point):\n name: str = 'origin'\n"
        f"{first}\n"
        "print(Named(1), Named(1) == Point(1), Point(1) == Named(1), Named(1) == Named(1, 'b'), len({Named(1), Named(1)}), Point(1))"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert "Named(x=1, name='origin') False False False 1 Point(x=1)\n" == done.stdout


def test_a_class_keeps_the_methods_that_it_has_itself() -> None:
    @frozen
    class Own:  # noqa: PLW1641 - Python says then that it has no hash
        x: int

        def __eq__(self, other: object) -> bool:
            return True

        def __repr__(self) -> str:
            return "own"

    assert Own(1) == Own(2)
    assert Own(1) == 3
    assert "own" == repr(Own(1))
    with pytest.raises(TypeError, match="unhashable"):
        hash(Own(1))


def test_a_subclass_that_asks_its_base_gets_an_answer() -> None:
    @frozen
    class Base:
        x: int

    class Asking(Base):
        def __eq__(self, other: object) -> bool:
            return super().__eq__(other)

        def __hash__(self) -> int:
            return super().__hash__()

    assert Asking(1) == Asking(1)
    assert Asking(1) != Asking(2)
    assert hash(Asking(1)) == hash(Asking(1))


@pytest.mark.parametrize("options", [{"eq": False}, {"cache_hash": True}, {"order": True}])
def test_what_is_said_of_the_methods_holds(options: dict[str, Any]) -> None:
    ours, theirs = (
        declare(**options)(type("Value", (), {"__annotations__": {"x": int}})) for declare in (frozen, attrs.frozen)
    )

    assert (theirs(1) == theirs(1)) == (ours(1) == ours(1))
    assert hasattr(theirs(1), "__lt__") == hasattr(ours(1), "__lt__")
    assert (hash(theirs(1)) == hash(theirs(1))) == (hash(ours(1)) == hash(ours(1)))


def test_a_value_can_be_copied_stored_and_not_changed() -> None:
    value = Named(1, name="a")

    assert value == copy.deepcopy(value) == pickle.loads(pickle.dumps(value)) == attrs.evolve(value, note="other")
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        value.x = 2  # type: ignore[misc]


# --- what waits for attrs ---------------------------------------------------------------------------------------------


def written(kind: type[object]) -> bool:
    """Return whether attrs has written the methods of a class: it leaves their source where debuggers look."""
    begin = f"<attrs generated methods {kind.__module__}.{kind.__qualname__}"
    return any(name.startswith(begin) for name in linecache.cache)


@pytest.mark.spec("performance:Q13")
def test_attrs_is_not_asked_about_a_class_that_nobody_uses() -> None:
    @frozen
    class Unused:
        x: int

    @frozen
    class Used(Unused):
        y: int = 2

    assert not written(Unused)
    assert not written(Used)
    assert Used(1).y == 2
    assert written(Used)


def test_a_class_registers_its_subclasses_once_and_those_that_are_used() -> None:
    """
    Attrs writes for a twin in the end, which must not take the place of the class in anybody's list.
    """
    kinds = {
        name: kind for name, kind in vars(events).items() if isinstance(kind, type) and issubclass(kind, events.Event)
    }
    del kinds["Event"]
    assert all(attrs.fields(kind) for kind in kinds.values())

    assert {kind.type: kind for kind in kinds.values()} == events.EVENTS


USES: dict[str, Callable[[Any], object]] = {
    "match": lambda kind: kind.__match_args__,
    "signature": lambda kind: str(inspect.signature(kind)),
    "fields": lambda kind: [
        (a.name, a.default, a.kw_only, a.inherited, a.metadata, a.type) for a in attrs.fields(kind)
    ],
    "hints": lambda kind: kind.__init__.__annotations__,
    "refused": lambda kind: kind.__setattr__ is attrs.frozen(type("Any", (), {})).__setattr__,
    "made": lambda kind: attrs.asdict(kind(1, "b", z=3)),
    "told": lambda kind: kind(1, "b", z=3).told(),
    "stored": lambda kind: attrs.asdict(kind.__new__(kind).__setstate__({"x": 1}) or kind(1, z=0)),
    "slots": lambda kind: sorted(kind.__slots__),
    "weak": lambda kind: weakref.ref(kind(1, z=0))() is None,
    "after": lambda kind: kind(1, z=7).late,
}


@pytest.mark.parametrize("use", USES)
def test_whatever_is_asked_first_is_answered_as_attrs_answers(use: str) -> None:
    found = []
    for declare in (frozen, attrs.frozen):

        @declare(eq=False, repr=False)
        class Base:
            x: int
            kind: ClassVar[str] = "base"

            def told(self) -> str:
                return f"{self.kind} {self.x}"

        @declare(eq=False, repr=False)
        class Value(Base):
            x: int = attrs.field(validator=attrs.validators.instance_of(int))
            y: str = attrs.field(default="a", converter=str.upper, metadata={"m": 1})
            z: int = attrs.field(kw_only=True)
            late: int = attrs.field(init=False, default=0)

            def __attrs_post_init__(self) -> None:
                object.__setattr__(self, "late", self.z + 1)

            def told(self) -> str:
                return f"{super().told()} {self.y}"

        found.append(USES[use](Value))

    ours, theirs = found
    assert theirs == ours


def test_a_class_with_a_constructor_of_its_own_has_that_of_attrs_beside_it() -> None:
    @frozen
    class Own:
        x: int

        def __init__(self, text: str) -> None:
            self.__attrs_init__(len(text))

    assert Own("abc").x == 3
    assert Own("abc") == Own("xyz")


def test_threads_may_use_a_class_first_at_the_same_time() -> None:
    for _ in range(20):

        @frozen
        class Value:
            x: int

        with ThreadPoolExecutor(8) as pool:
            made = list(pool.map(Value, range(8)))  # type: ignore[arg-type]
        assert [*range(8)] == [each.x for each in made]


@pytest.mark.parametrize(
    ("body", "options"),
    [
        ({"__annotations__": {"x": int}, "half": cached_property(lambda self: self.x / 2)}, {}),
        ({"__annotations__": {"x": int}}, {"order": True}),
        ({"__annotations__": {"x": int}, "__slots__": ()}, {}),
        ({"__annotations__": {"x": int}}, {"slots": False}),
    ],
)
def test_what_is_more_than_fields_and_methods_is_left_to_attrs_at_once(body: dict[str, Any], options: Any) -> None:
    made = frozen(**options)(type("Value", (), dict(body)))

    assert not any(type(member).__name__ == "_Waiting" for member in vars(made).values())
    assert 4 == made(4).x
