"""Quick makers give the values that constructors and ``attrs.evolve`` give, and nothing that can be changed."""

from __future__ import annotations

import attrs
import pytest

from stepengine.data.makers import changer_of, maker_of


@attrs.frozen(weakref_slot=False)
class Base:
    one: int
    two: list[int] = attrs.field(factory=list, converter=list)


@attrs.frozen(weakref_slot=False)
class Value(Base):
    three: str = "three"
    _private: int = 4
    both: tuple[int, str] = attrs.field(
        init=False, default=attrs.Factory(lambda made: (made.one, made.three), takes_self=True)
    )


def test_a_changer_gives_what_evolve_gives_and_leaves_the_rest_alone():
    value = Value(1, [2], private=5)
    changed = changer_of(Value, "two", "_private")(value, two=[7], _private=8)

    assert attrs.evolve(value, two=[7], private=8) == changed
    assert Value is type(changed)
    assert Value(1, [2], private=5) == value
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        changed.one = 2


def test_a_changer_needs_every_value_that_it_changes():
    with pytest.raises(TypeError, match="two"):
        changer_of(Value, "two")(Value(1))


def test_a_maker_gives_what_the_constructor_gives():
    assert Value(1, [2], "x", private=3) == maker_of(Value)(1, [2], "x", 3)


@pytest.mark.parametrize("make", [maker_of, changer_of])
def test_a_class_whose_twin_would_have_another_layout_has_no_maker(make):
    @attrs.frozen
    class Other:
        one: int

    with pytest.raises(TypeError, match="weakref_slot=False"):
        make(Other)
