"""Quick makers give the values that constructors and ``attrs.evolve`` give, and nothing that can be changed."""

from __future__ import annotations

import weakref

import attrs
import pytest

from stepengine.data.makers import changer_of, is_twin, maker_of, quick


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


@attrs.frozen
class Weak:
    one: int


@attrs.frozen(weakref_slot=False)
class Derived(Weak):
    two: str = "two"


def test_a_base_that_can_be_referred_to_weakly_hinders_no_maker():
    made = maker_of(Derived)(1, "x")

    assert Derived(1, "x") == made
    assert made is weakref.ref(made)()
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        made.one = 2


def test_a_twin_of_a_derived_class_has_nothing_of_its_base_that_refuses_a_change():
    # With the base's `__delattr__` the interpreter sets each field by the long way.
    twins: list[type[object]] = []

    class Listing:
        __slots__ = ()

        def __init_subclass__(cls) -> None:
            twins.append(cls)

    @attrs.frozen(weakref_slot=False)
    class Refusing(Listing):
        one: int

    @attrs.frozen(weakref_slot=False)
    class Own(Refusing):
        two: int

    maker_of(Own)(1, 2)
    (twin,) = [cls for cls in twins if cls.__name__ == "OpenOwn"]

    assert (object.__setattr__, object.__delattr__) == (twin.__setattr__, twin.__delattr__)
    assert is_twin(twin)
    assert not is_twin(Own)


def test_a_quick_maker_is_made_once():
    assert quick(Value) is quick(Value)
    assert Value(1, [2], "x", private=3) == quick(Value)(1, [2], "x", 3)
