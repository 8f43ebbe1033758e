"""
Functions that are made of the names of a class's fields: their source is there for whoever debugs.
"""

from __future__ import annotations

import inspect
import io
import linecache
import pdb  # noqa: T100  (what the lines are for)
import re
import traceback
from contextlib import suppress

import attrs

from stepengine.data import codec
from stepengine.data.generated import generated
from stepengine.data.makers import changer_of, maker_of
from stepengine.data.messages import ToolCallPart
from stepengine.data.transcript import Transcript
from stepengine.data.usage import Usage


@attrs.frozen(weakref_slot=False)
class Pair:
    left: int
    right: int = 0


def typed(function, *args, commands: str) -> str:
    """
    Return what pdb prints of a call while *commands* are typed.
    """
    shown = io.StringIO()
    debugger = pdb.Pdb(stdin=io.StringIO(commands), stdout=shown, nosigint=True, readrc=False)
    debugger.use_rawinput = False
    debugger.runcall(function, *args)
    return shown.getvalue()


def test_pdb_shows_the_lines_of_a_maker_and_of_a_changer() -> None:
    """
    From their second call on; at the first they are written.
    """
    make, change = maker_of(Pair), changer_of(Pair, "left")
    assert change(make(1), 2) == Pair(2)

    made = typed(make, 1, commands="next\nnext\nlist\ncontinue\n")
    changed = typed(change, Pair(1, 2), 3, commands="next\nlist\ncontinue\n")

    assert "<stepengine generated maker of Pair>" in made
    assert re.search(r"->\s+made\.left = left", made)
    assert re.search(r"\s+made\.right = _of\.right", changed)


def test_a_traceback_through_a_generated_function_shows_its_line() -> None:
    source = "def wrong(value):\n    return value.nothing"
    try:
        generated("test of a traceback", source, {})(1)
    except AttributeError as error:
        lines = "".join(traceback.format_exception(error))

    assert "<stepengine generated test of a traceback>" in lines
    assert "return value.nothing" in lines


def test_two_functions_of_one_name_keep_their_own_lines_whatever_is_checked_meanwhile() -> None:
    first = generated("twin", "def made():\n    return 1", {})
    second = generated("twin", "def made():\n    return 2", {})
    again = generated("twin", "def made():\n    return 1", {})
    linecache.checkcache()

    assert [1, 2, 1] == [first(), second(), again()]
    assert ["return 1", "return 2", "return 1"] == [
        inspect.getsource(f).split("\n")[1].strip() for f in (first, second, again)
    ]


def test_every_quick_maker_and_every_coder_of_a_class_has_a_source() -> None:
    encoders = [codec._shape(kind).encode for kind in codec.QUICK if kind is not Transcript]
    made = [*codec.QUICK.values(), *encoders]

    assert {Usage, ToolCallPart} <= {*codec.QUICK}
    for maker in codec.QUICK.values():
        with suppress(TypeError):  # written when it is first called, with whatever
            maker()
    assert all(inspect.getsource(function).startswith(("def make(", "def made(")) for function in made)
