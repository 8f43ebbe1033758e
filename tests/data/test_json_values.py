"""
Frozen JSON: equal to what it was made of, impossible to change, and refused with its place when it is not JSON.
"""

from __future__ import annotations

import copy
import json
import sys
from enum import IntEnum, StrEnum
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepengine.data.json import (
    ABSENT,
    MAX_DEPTH_LEVELS,
    JsonDict,
    JsonList,
    canonical,
    compact,
    find_differences,
    find_first_difference,
    freeze,
    freeze_object,
    require_storable_text,
    thaw,
)
from stepengine.errors import DataError
from tests import strategies


def nested(levels: int, inner: Any = 1) -> Any:
    for level in range(levels):
        inner = [inner] if level % 2 else {"a": inner}
    return inner


# --- what stays the same --------------------------------------------------------------------------------------------


@given(strategies.json_values())
def test_frozen_value_equals_its_source(value: Any) -> None:
    frozen = freeze(value)

    assert frozen == value
    assert json.loads(json.dumps(frozen)) == json.loads(json.dumps(value))
    assert freeze(frozen) is frozen
    assert copy.copy(frozen) == copy.deepcopy(frozen) == frozen
    assert hash(frozen) == hash(freeze(thaw(frozen)))
    assert type(thaw(frozen)) is type(value)
    assert thaw(frozen) == value


@given(st.dictionaries(strategies.text, strategies.json_values()) | st.lists(strategies.json_values()))
@settings(max_examples=20)
def test_freezing_copies_containers_and_copies_of_frozen_are_shared(value: Any) -> None:
    before = copy.deepcopy(value)
    frozen = freeze(value)
    value.clear()

    assert before == frozen
    assert copy.copy(frozen) is frozen is copy.deepcopy(frozen)
    rebuilt, arguments = frozen.__reduce__()
    assert frozen == rebuilt(*arguments)


class Word(StrEnum):
    A = "a"


class Number(IntEnum):
    ONE = 1


class Pair(NamedTuple):
    x: int
    y: int


def test_subclasses_of_json_types_become_the_plain_types() -> None:
    frozen = freeze([Word.A, Number.ONE, Pair(1, 2), {Word.A: True}])

    assert ["a", 1, [1, 2], {"a": True}] == frozen
    assert [str, int, JsonList, JsonDict] == [type(item) for item in frozen]
    assert [str] == [type(key) for key in frozen[3]]


# --- what cannot change ---------------------------------------------------------------------------------------------

READERS = {"copy", "fromkeys", "get", "items", "keys", "values", "count", "index"}
OPERATORS = {
    dict: {"__setitem__", "__delitem__", "__ior__"},
    list: {"__setitem__", "__delitem__", "__iadd__", "__imul__"},
}


@pytest.mark.spec("requirements:B1", "reliability:GN14")
def test_no_mutator_changes_a_frozen_value() -> None:
    """
    A mutator is a method without an underscore that is no reader, or one of the operators. One class refuses them all.
    """
    for value, plain, change in (
        ({"a": 1}, dict, lambda d: d.update(b=1)),
        ([1], list, lambda v: v.append(1)),
    ):
        frozen = freeze(value)
        mutators = {name for name in vars(plain) if not name.startswith("_")} - READERS | OPERATORS[plain]
        for name in mutators:
            assert getattr(type(frozen), name) is not getattr(plain, name), name
        for wrong in (change, lambda v: v.clear(), lambda v: v.pop(), lambda v: setattr(v, "x", 1)):
            with pytest.raises((TypeError, AttributeError)):
                wrong(frozen)
        assert value == frozen


def test_operators_that_make_new_values_work() -> None:
    frozen = freeze({"a": 1})

    assert {"a": 1, "b": [2]} == frozen | {"b": [2]}
    assert JsonList is type((frozen | {"b": [2]})["b"])
    assert [1, 1] == freeze([1]) * 2


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.spec("reliability:JR43", "replay:J6", "replay:J7")
@given(strategies.not_json, st.data())
def test_non_json_value_is_rejected_with_its_path(wrong: Any, data: st.DataObject) -> None:
    value, path = wrong, "$"
    for _ in range(data.draw(st.integers(0, 3))):
        if data.draw(st.booleans()):
            before = data.draw(st.lists(strategies.scalars, max_size=2))
            value, path = [*before, value], path.replace("$", f"$[{len(before)}]", 1)
        else:
            value, path = {"first": 1, "k": value}, path.replace("$", "$.k", 1)

    with pytest.raises(DataError) as caught:
        freeze(value)
    with pytest.raises(DataError) as named:
        freeze(value, "$.input")

    assert path == caught.value.path
    assert path.replace("$", "$.input", 1) == named.value.path
    assert f"at {path}" in caught.value.message


@pytest.mark.parametrize("key", [1, None, "\ud800"])
def test_keys_are_strings_that_can_be_stored(key: Any) -> None:
    with pytest.raises(DataError) as caught:
        freeze({"a": [{key: 1}]})

    assert "$.a[0]" == caught.value.path


@pytest.mark.spec("replay:J6")
@pytest.mark.parametrize(
    "number", [2**63, -(2**63) - 1, 10**4300 - 1, 1 - 10**4300, 0, -0.0, 5e-324, 1.7976931348623157e308, True]
)
def test_numbers_of_up_to_4300_digits_are_json(number: Any) -> None:
    assert (number, type(number)) == (freeze(number), type(freeze(number)))
    assert [number] == freeze([number])
    assert {"a": number} == freeze({"a": number})


def test_nesting_is_limited_to_200_levels_however_it_is_built() -> None:
    deepest = freeze(nested(MAX_DEPTH_LEVELS))

    assert nested(MAX_DEPTH_LEVELS) == deepest
    assert deepest == freeze(json.loads(compact(deepest)))
    for too_deep in (
        nested(MAX_DEPTH_LEVELS + 1),
        [deepest],
        {"a": deepest},
        nested(101, freeze(nested(100))),
        (deepest,),
    ):
        with pytest.raises(DataError, match="nested deeper than 200 levels"):
            freeze(too_deep)
    assert nested(200) == freeze(nested(100, freeze(nested(100))))


def test_cycles_are_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    ring: dict[str, Any] = {}
    ring["a"] = [ring]
    wide: list[Any] = []
    wide.extend([wide, wide, wide])

    for value in (loop, ring, wide):
        with pytest.raises(DataError, match="nested deeper than 200 levels"):
            freeze(value)


def test_a_full_stack_is_a_data_error_too() -> None:
    def deep(levels: int) -> Any:
        return freeze(nested(150)) if levels == 0 else deep(levels - 1)

    outcomes = set()
    for levels in range(0, sys.getrecursionlimit(), 20):
        try:
            outcomes.add(type(deep(levels)))
        except DataError as error:
            outcomes.add(type(error))
        except RecursionError:
            break  # not even the call of freeze itself

    assert {JsonDict, JsonList} & outcomes
    assert DataError in outcomes


def test_manually_built_json_containers_are_checked_on_freeze() -> None:
    for by_hand in (JsonDict({"a": object()}), JsonList([object()]), [JsonDict({"a": [object()]})]):
        with pytest.raises(DataError, match="is not JSON"):
            freeze(by_hand)

    mutable = [1]
    frozen = freeze(JsonDict({"a": mutable}))
    mutable.append(2)
    assert {"a": [1]} == frozen
    assert JsonDict() == freeze(JsonDict())
    assert [{}, []] == freeze([JsonDict(), JsonList()])


def test_objects_and_texts_are_asked_for_by_kind() -> None:
    assert {"a": 1} == freeze_object({"a": 1})
    assert "ä" == require_storable_text("ä")
    assert ("a", str) == (require_storable_text(Word.A), type(require_storable_text(Word.A)))
    for value, kind in (([1], "a list"), (None, "null"), ("a", "a str"), (JsonList(), "a JsonList")):
        with pytest.raises(DataError, match=rf"expected a JSON object at \$\.x, not {kind}"):
            freeze_object(value, "$.x")
    with pytest.raises(DataError, match=r"expected text at \$\.x, not a int"):
        require_storable_text(5, "$.x")  # type: ignore[arg-type]


# --- text forms -----------------------------------------------------------------------------------------------------


def test_compact_text_keeps_key_order_and_characters() -> None:
    assert '{"b":1,"a":["ä",null,-0.0]}' == compact(freeze({"b": 1, "a": ["ä", None, -0.0]}))
    with pytest.raises(ValueError, match="not JSON compliant"):
        compact(float("nan"))


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("replay:J10")
@given(st.dictionaries(strategies.text, strategies.json_values()))
@settings(max_examples=20)
def test_canonical_text_is_independent_of_key_order(value: dict[str, Any]) -> None:
    turned = dict(reversed(value.items()))

    assert canonical(value) == canonical(turned) == canonical(freeze(value))
    assert value == json.loads(canonical(value))


def test_text_of_a_mutable_value_is_not_cached() -> None:
    inner: list[int] = [1]
    made_by_hand = JsonDict({"a": inner})
    assert '{"a":[1]}' == compact(made_by_hand) == canonical(made_by_hand)
    inner.append(2)
    assert '{"a":[1,2]}' == compact(made_by_hand) == canonical(made_by_hand)


@pytest.mark.spec("replay:J10")
def test_canonical_text_distinguishes_int_float_null_and_absent() -> None:
    assert '{"a":[0.0,{"b":1.0}],"z":"é"}' == canonical({"z": "é", "a": [-0.0, {"b": 1.0}]})
    assert 4 == len({canonical(v) for v in ({"a": 1}, {"a": 1.0}, {"a": None}, {})})
    assert 2 == len({canonical("é"), canonical("e\u0301")})


MEMBERS = st.one_of(
    st.text(max_size=3), st.integers(), st.floats(), st.none(), st.booleans(), st.binary(max_size=1), st.just("\ud800"), st.just([1]),
    st.just({"deep": 1}),
)  # fmt: skip


@pytest.mark.spec("reliability:JR43")
@given(st.dictionaries(st.one_of(st.text(max_size=3), st.integers(), st.just("\ud800")), MEMBERS, max_size=3))
@settings(max_examples=20)
def test_freeze_object_agrees_with_freeze(value):
    def outcome(fn):
        try:
            frozen = fn(value)
        except DataError as error:
            return error.message
        return frozen, type(frozen), frozen._levels

    assert outcome(freeze) == outcome(freeze_object)


PARTS = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.sampled_from([0.0, 1.0, "", "a", "~/"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "b/", "~c"]), inner, max_size=3),
    max_leaves=8,
)


@given(PARTS, PARTS)
def test_differences_lead_from_one_value_to_the_other(one: Any, other: Any) -> None:
    found = list(find_differences(one, other))

    assert (compact(freeze(one)) == compact(freeze(other))) or found or canonical(one) == canonical(other)
    assert not list(find_differences(one, one))
    for place, recorded, now in found:
        assert (recorded, now) == (_at(one, place), _at(other, place))


def _at(value: Any, pointer: str) -> Any:
    for part in pointer.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        inside = name in value if isinstance(value, dict) else int(name) < len(value)
        if not inside:
            return ABSENT
        value = value[name] if isinstance(value, dict) else value[int(name)]
    return value


@given(st.text("ab"), st.text("ab"))
def test_first_difference_is_the_length_of_the_common_prefix(one: str, other: str) -> None:
    same = find_first_difference(one, other)

    assert one[:same] == other[:same]
    assert one == other or one[same : same + 1] != other[same : same + 1]
