"""Quick makers give the values that constructors and ``attrs.evolve`` give, and nothing that can be changed."""

from __future__ import annotations

import inspect
import linecache
import weakref
from concurrent.futures import ThreadPoolExecutor

import attrs
import pytest

from stepengine.data.makers import changer_of, is_twin, maker_in_order, maker_of, quick


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


def test_a_maker_in_order_takes_what_it_names_by_position_and_the_rest_has_its_defaults():
    make = maker_in_order(Value, "three", "private", "one")

    assert Value(1, three="x", private=3) == make("x", 3, 1)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'one'"):
        make("x", 3)


def test_a_maker_in_order_names_each_parameter_that_has_no_default():
    with pytest.raises(TypeError, match="needs 'one'"):
        maker_in_order(Value, "three")("x")


@pytest.mark.parametrize("make", [maker_of, maker_in_order, changer_of])
def test_a_class_whose_twin_would_have_another_layout_has_no_maker(make):
    @attrs.frozen
    class Other:
        one: int

    with pytest.raises(TypeError, match="weakref_slot=False"):
        make(Other)


@pytest.mark.spec("performance:Q13")
def test_a_maker_is_written_when_it_is_first_called_and_is_then_no_call_more():
    @attrs.frozen(weakref_slot=False)
    class Written:
        one: int
        two: tuple[int, ...] = ()

    make = maker_of(Written)
    change = changer_of(Written, "one")

    def is_written(what: str) -> bool:
        return any(name.startswith(f"<stepengine generated {what} of Written") for name in linecache.cache)

    assert not is_written("maker")
    assert not is_written("changer")
    assert Written(1, (2,)) == make(1, two=(2,)) == make(1, (2,))
    assert Written(3) == change(make(1), 3)
    assert is_written("maker")
    assert is_written("changer")
    assert ("one", "two") == tuple(inspect.signature(make).parameters)
    with pytest.raises(TypeError, match="one"):
        make()


def test_threads_may_call_a_maker_first_at_the_same_time():
    for _ in range(50):
        make = maker_of(Value)
        with ThreadPoolExecutor(8) as pool:
            made = list(pool.map(lambda one, make=make: make(one, [2], "x", 3), range(16)))
        assert [Value(one, [2], "x", private=3) for one in range(16)] == made


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
