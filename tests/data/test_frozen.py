"""Values whose comparison, hash and representation are written at their first use."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

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
