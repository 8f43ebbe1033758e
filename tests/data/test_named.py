"""Named tuples, and dictionaries with known keys, whose annotations nobody compiles: otherwise they are those of ``typing``."""

from __future__ import annotations

import copy
import inspect
import pickle
import typing
from collections.abc import Callable
from typing import Any, get_type_hints

import pytest

from stepengine.data import named
from stepengine.data.named import NamedTuple, TypedDict


class Row(NamedTuple):
    """A row."""

    name: str
    effects: tuple[str, ...] = ()
    test: Callable[[int], bool] = lambda number: number > 0

    def __str__(self) -> str:
        return f"{self.name}!"

    @property
    def longer(self) -> str:
        """The name twice."""
        return self.name * 2

    @classmethod
    def of(cls, *names: str) -> list[Row]:
        """Return one for each name."""
        return [cls(name) for name in names]


class Reference(typing.NamedTuple):
    """A row."""

    name: str
    effects: tuple[str, ...] = ()
    test: Callable[[int], bool] = Row("").test


USES: dict[str, Callable[[Any], object]] = {
    "fields": lambda row: row._fields,
    "defaults": lambda row: row._field_defaults,
    "documentation": lambda row: row.__doc__,
    "types": get_type_hints,
    "signature": lambda row: [(p.name, p.default, p.kind) for p in inspect.signature(row).parameters.values()],
    "base": lambda row: row.__mro__[1:],
    "module": lambda row: row.__module__,
    "dict": lambda row: row("a")._asdict(),
    "replaced": lambda row: tuple(row("a")._replace(effects=("b",))),
    "by keyword": lambda row: row(effects=("b",), name="a") == ("a", ("b",), Row("").test),
    "hash": lambda row: hash(row("a", ("b",))),
    "representation": lambda row: repr(row("a")).partition("(")[2],
    "match": lambda row: row.__match_args__,
}


@pytest.mark.parametrize("use", USES)
def test_a_row_is_what_typing_would_make_of_it(use: str) -> None:
    assert USES[use](Reference) == USES[use](Row)


def test_what_is_declared_beside_the_fields_is_there() -> None:
    first, second = Row.of("a", "b")

    assert ("a!", "bb") == (str(first), second.longer)
    assert first.test(1)
    assert not first.test(0)


def test_a_row_can_be_pickled_and_copied_and_not_changed() -> None:
    row = Row("a", ("b",), str.isdigit)

    assert row == pickle.loads(pickle.dumps(row)) == copy.copy(row)
    assert type(row) is type(copy.deepcopy(row))
    with pytest.raises(AttributeError):
        row.name = "b"  # type: ignore[misc]


def test_a_field_without_a_default_behind_one_that_has_one_is_refused() -> None:
    with pytest.raises(TypeError, match="Wrong: each field behind 'name'"):
        exec("class Wrong(NamedTuple):\n    name: str = ''\n    effects: int\n", {**vars(named), "__name__": "wrong"})


def test_no_annotation_of_a_row_is_looked_up_before_somebody_asks() -> None:
    body = "from __future__ import annotations\nclass Later(NamedTuple):\n    name: Missing[str]\n"
    exec(body, names := {**vars(named), "__name__": "later"})

    assert "a" == names["Later"]("a").name
    assert {"name": "Missing[str]"} == names["Later"].__annotations__


class Options(TypedDict, total=False):
    """Options."""

    name: str
    limit: int | None


class MoreOptions(Options, total=False):
    """More of them."""

    keep: bool


def test_keywords_are_known_with_those_of_the_bases_and_what_is_made_is_a_dictionary() -> None:
    made = MoreOptions(name="a", keep=True)

    assert ["name", "limit", "keep"] == [*MoreOptions.__annotations__]
    assert get_type_hints(Options) | {"keep": bool} == get_type_hints(MoreOptions)
    assert ("More of them.", False) == (MoreOptions.__doc__, MoreOptions.__total__)
    assert {"name": "a", "keep": True} == made
    assert type(made) is dict
