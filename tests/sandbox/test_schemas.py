"""Schema classes that are read from text say what pydantic says of them, or are refused; nothing of the text is run."""

from __future__ import annotations

import ast
import contextlib
import json
import sys
import time
import types
import typing

import pytest
import typing_extensions
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from stepengine.data.json import thaw
from stepengine.errors import DefinitionError
from stepengine.sandbox.schemas import parse_schema_classes
from stepengine.tools.arguments import remove_titles
from stepengine.tools.schemas import JsonSchema

HEAD = """
from __future__ import annotations
from collections.abc import Mapping, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
import typing as t
import pydantic
from typing import Annotated, Any, Dict, List, Literal, Optional, TypeAlias, Union
from typing_extensions import NotRequired, Required, TypedDict
from pydantic import BaseModel, ConfigDict, Field
"""
BEFORE = len(HEAD.splitlines())

CLASSES = {
    "plain types": "class A(BaseModel):\n a: str\n b: int\n c: float\n d: bool\n e: None\n f: Any\n g: object\n",
    "lists": "class A(BaseModel):\n a: list\n b: list[int]\n c: List[str]\n d: Sequence[int]\n e: t.List[t.Any]\n f: Sequence\n",
    "sets": "class A(BaseModel):\n a: set[int]\n b: frozenset[str]\n c: set\n",
    "tuples": "class A(BaseModel):\n a: tuple[int, ...]\n b: tuple[int, str]\n c: tuple\n d: tuple[()]\n",
    "objects": "class A(BaseModel):\n a: dict\n b: dict[str, int]\n c: Dict[str, Any]\n d: Mapping[str, list[int]]\n e: dict[str, object]\n",
    "literals": "class A(BaseModel):\n a: Literal['x']\n b: Literal['x', 'y']\n c: Literal['x', 1, None]\n d: Literal[1, 2]\n e: Literal[True]\n f: Literal[None]\n",
    "literals in literals": "B = Literal['x', 'y']\nclass A(BaseModel):\n a: Literal[B, 'z', 'x']\n b: Literal[Literal['q'], -1]\n c: Literal[1, True]\n",
    "unions": "class A(BaseModel):\n a: int | str\n b: Union[int, str, None]\n c: Optional[int]\n d: None | int | str\n e: Optional[int | str]\n f: int | int\n g: list[int] | List[int] | None\n",
    "unions of anything": "class A(BaseModel):\n a: Optional[Any]\n b: int | Any\n c: list[int | None] | dict[str, str | None]\n",
    "texts with bounds": "class A(BaseModel):\n a: str = Field(min_length=1, max_length=5)\n b: str = Field(pattern='^a+$')\n c: str | None = Field(None, pattern='b', description='q')\n",
    "numbers with bounds": "class A(BaseModel):\n a: int = Field(ge=1, lt=9)\n b: float = Field(gt=0, le=2.5, multiple_of=0.5)\n c: int | None = Field(default=None, ge=-3)\n d: int = Field(multiple_of=5)\n",
    "lists with bounds": "class A(BaseModel):\n a: list[int] = Field(min_length=1, max_length=3)\n b: set[int] = Field(min_length=2)\n c: dict[str, int] = Field(max_length=1)\n d: tuple[int, ...] = Field(max_length=2)\n e: list[str] | None = Field(min_length=2)\n",
    "a union with a bound": "class A(BaseModel):\n a: str | list[str] = Field(min_length=1)\n b: str | int | None = Field(max_length=3)\n",
    "inside of lists": "class A(BaseModel):\n a: list[Annotated[str, Field(min_length=2, description='d')]]\n b: dict[str, Annotated[int, Field(ge=0)] | None]\n",
    "annotated twice": "class A(BaseModel):\n a: Annotated[Annotated[int, Field(ge=1, description='a')], Field(ge=2, description='b')]\n b: Annotated[int, Field(ge=0, default=4)] = Field(le=5)\n c: Annotated[str, Field(default='x')] = 'y'\n d: Annotated[int, Field(alias='D', description='q')] = 3\n",
    "defaults": "class A(BaseModel):\n a: int = 1\n b: str | None = None\n c: list[int] = []\n d: dict[str, Any] = {'x': [1, -2.5, {'y': None}]}\n e: tuple[int, ...] = (1, 2)\n f: int = Field(...)\n g: bool = Field(True)\n h: float = -1.5\n",
    "factories": "class A(BaseModel):\n a: list[int] = Field(default_factory=list)\n b: dict[str, int] = Field(default_factory=dict, description='x')\n",
    "constants": "MOST = 5\nNAMES: t.Final = ('a', 'b')\nTEXT = 'tell'\nclass A(BaseModel):\n a: int = Field(MOST, le=MOST, description=TEXT)\n b: tuple[str, ...] = NAMES\n",
    "examples and titles": "class A(BaseModel):\n a: str = Field(title='T', examples=['q', {'title': 1}], description='two\\n lines')\n b: int = Field(description='')\n title: str = 'x'\n",
    "aliases of names": "class A(BaseModel):\n a: int = Field(alias='aA')\n b: str | None = Field(None, alias='bB')\n",
    "configured": "class A(BaseModel):\n 'Says.'\n model_config = ConfigDict(extra='forbid', title='Z')\n a: int\nclass B(BaseModel):\n model_config = {'extra': 'allow'}\nclass C(BaseModel, extra='forbid'):\n a: int\nclass D(A):\n model_config = ConfigDict(extra='ignore')\nclass E(A):\n b: int\n",
    "docstrings": "class A(BaseModel):\n '''\n    First.\n\n      More of it.\n    '''\n a: int\nclass B(A):\n pass\n",
    "inheritance": "class A(BaseModel):\n a: int\n b: str = 'x'\nclass B(A):\n c: list[int]\n a: str | None = None\nclass C(B):\n b: int\n",
    "an inherited field that is replaced": "class X(BaseModel):\n a: int\nclass A(BaseModel):\n a: X\nclass B(A):\n a: int\n",
    "one in another": "class A(BaseModel):\n 'An A.'\n a: int\nclass B(BaseModel):\n a: A\n b: A | None = None\n c: list[A] = []\n d: dict[str, list[A]] = Field({}, description='d')\n e: A = Field(description='the A')\n",
    "a later one": "class B(BaseModel):\n a: list[A]\nclass A(BaseModel):\n a: int\n",
    "itself": "class Node(BaseModel):\n 'A node.'\n value: int\n children: list[Node] = []\n next: Optional[Node] = None\n",
    "each other": "class A(BaseModel):\n b: B | None = None\nclass B(BaseModel):\n a: A | None = None\nclass C(BaseModel):\n a: A\n",
    "in quotes": "class A(BaseModel):\n a: 'int | None'\n b: list['A']\n c: \"Literal['x']\"\n",
    "aliases": "Severity = Literal['low', 'high']\nNames: TypeAlias = 'list[str]'\nShort = Annotated[str, Field(max_length=3, description='short')]\nMaybe = int | None\nclass A(BaseModel):\n a: Severity\n b: Names = []\n c: Short\n d: Short | None\n e: Maybe | str\n f: list[Maybe]\n",
    "dates": "class A(BaseModel):\n a: datetime\n b: date\n c: time | None = None\n d: timedelta\n",
    "decimals": "class A(BaseModel):\n a: Decimal\n b: Decimal = Field(gt=0)\n c: Decimal | None = Field(None, le=5)\n",
    "enums": "class E(Enum):\n 'Of E.'\n A = 'a'\n B = 'b'\nclass S(StrEnum):\n X = 'x'\nclass I(IntEnum):\n ONE = 1\n TWO = 2\nclass M(str, Enum):\n A = 'a'\nclass O(Enum):\n A = 1\n B = 'x'\n C = None\nclass A(BaseModel):\n e: E\n s: S | None = None\n i: list[I]\n m: M = M.A\n o: O\n",
    "typed dicts": "class A(TypedDict):\n 'Says.'\n a: int\n b: NotRequired[str]\nclass B(TypedDict, total=False):\n a: Required[int]\n b: list[A]\nclass C(B):\n c: str\nclass D(B, total=False):\n _d: str\n",
    "typed dicts in models": "class A(TypedDict):\n a: int\nclass B(BaseModel):\n a: A\n b: list[A] = []\nclass C(TypedDict):\n b: B\n",
    "typed dicts with Field": "class A(TypedDict):\n a: Annotated[int, Field(ge=1, description='x')]\n b: NotRequired[Annotated[str, Field(min_length=1)]]\n",
    "typed dicts in models that say what else there is": "class R(TypedDict):\n a: int\nclass S(TypedDict):\n r: R\nclass A(BaseModel):\n model_config = ConfigDict(extra='forbid')\n s: list[S]\nclass B(A):\n b: int\nclass C(BaseModel):\n a: A\nclass D(BaseModel):\n r: R\n",
    "nothing in it": "class A(BaseModel):\n pass\nclass B(TypedDict):\n ...\n",
    "other names": "from pydantic import BaseModel as Base, Field as F\nMine = Base\nclass A(pydantic.BaseModel):\n a: int = pydantic.Field(3, ge=0)\nclass B(Mine):\n b: t.Optional[int] = F(None)\n",
    "names like keywords of JSON Schema": "class A(BaseModel):\n properties: dict[str, int]\n default: int = 3\n required: Literal['a'] = 'a'\n items: list[str] = Field([], description='x', min_length=0)\n title: str | None = None\n type: Annotated[str, Field(title='x')]\n",
    "null twice": "class A(BaseModel):\n a: Optional[Annotated[int | None, Field(ge=1)]]\n b: Annotated[str | None, Field(min_length=2)] | None = Field(min_length=1)\n",
    "a default of keys": "class A(BaseModel):\n a: dict[str, Any] = {'b': {'z': 1, 'a': 2}, 'a': 1}\n",
}  # fmt: skip


def read(text, file="agent.py"):
    return parse_schema_classes(ast.parse(text), file)


def made(text, monkeypatch):
    """Return the classes that Python makes of a text."""
    for clear in typing._cleanups:  # it gives `int | str` where `str | int` was asked for after it
        clear()
    module = types.ModuleType("made_for_a_test")
    monkeypatch.setitem(sys.modules, "made_for_a_test", module)
    exec(compile(text, "made", "exec"), module.__dict__)
    return vars(module)


def of_pydantic(cls):
    """Return what pydantic says of a class; what holds itself also stands at the top."""
    schema = remove_titles(TypeAdapter(cls).json_schema())
    if "$ref" in schema:
        named = schema["$defs"][schema["$ref"].removeprefix("#/$defs/")]
        schema = {"$defs": schema["$defs"], **named}
    return schema


def shown(schema):
    """Return a schema as text: its order counts, since models are shown it."""
    return json.dumps(thaw(schema))


def is_schema(value):
    return isinstance(value, type) and (hasattr(value, "model_fields") or typing_extensions.is_typeddict(value))


@pytest.mark.spec("programs:PG40")
@pytest.mark.parametrize("text", CLASSES.values(), ids=CLASSES)
def test_a_class_is_read_as_pydantic_writes_it(text, monkeypatch):
    found = read(HEAD + text)
    module = made(HEAD + text, monkeypatch)

    assert {name: shown(of_pydantic(module[name])) for name in found} == {
        name: shown(one.json_schema) for name, one in found.items()
    }
    assert found.keys() == {n for n, one in module.items() if is_schema(one) and one.__module__ == "made_for_a_test"}


@pytest.mark.parametrize("name", [name for name in CLASSES if name not in {"aliases of names", "annotated twice"}])
def test_defaults_are_those_of_pydantic(name, monkeypatch):
    found = read(HEAD + CLASSES[name])
    module = made(HEAD + CLASSES[name], monkeypatch)

    for one in found.values():
        if one.kind == "model":
            fields = module[one.name].model_fields
            wanted = {f: v.get_default(call_default_factory=True) for f, v in fields.items() if not v.is_required()}
            assert TypeAdapter(typing.Any).dump_python(wanted, mode="json") == thaw(dict(one.defaults))


def test_values_equal_in_python_but_not_in_json_stay_distinct():
    text = "class E(Enum):\n A = 1\n B = True\nclass A(BaseModel):\n a: Literal[1, 'x'] | Literal[True, 'x']\n b: E = E.B\n"
    found = thaw(read(HEAD + text)["A"].json_schema)

    assert {"anyOf": [{"enum": [1, "x"]}, {"enum": [True, "x"]}]} == found["properties"]["a"]
    assert "[1] 1" == f"{found['$defs']['E']['enum']} {found['properties']['b']['default']}"


# --- what is drawn --------------------------------------------------------------------------------------------------

LEAVES = ["str", "int", "float", "bool", "None", "Any", "Severity", "Item", "Row", "Color", "Literal['x', 1]", "'int'", "datetime"]  # fmt: skip
SETTINGS = {
    "str": ["min_length=1", "max_length=4", "pattern='a'", "description='d'"],
    "int": ["ge=1", "lt=7", "multiple_of=2", "examples=[1]"],
    "float": ["gt=0.5", "le=3", "title='t'"],
    "list[int]": ["min_length=1", "max_length=2"],
}


@st.composite
def bounded(draw):
    kind = draw(st.sampled_from(list(SETTINGS)))
    said = draw(st.lists(st.sampled_from(SETTINGS[kind]), min_size=1, unique=True))
    null = draw(st.sampled_from(["", " | None"]))
    return f"Annotated[{kind}{null}, Field({', '.join(said)})]"


ANNOTATIONS = st.recursive(
    st.sampled_from(LEAVES) | bounded(),
    lambda inner: st.one_of(
        inner.map(lambda one: f"list[{one}]"),
        inner.map(lambda one: f"dict[str, {one}]"),
        inner.map(lambda one: f"tuple[{one}, ...]"),
        inner.map(lambda one: f"Optional[{one}]"),
        st.lists(inner, min_size=2, max_size=3).map(lambda ones: f"Union[{', '.join(ones)}]"),
        st.lists(inner, min_size=1, max_size=3).map(lambda ones: f"tuple[{', '.join(ones)}]"),
    ),
    max_leaves=6,
)
DRAWN = """
Severity = Literal['low', 'high'] | None
class Color(Enum):
    RED = 'red'
class Item(BaseModel):
    a: int = Field(3, ge=0)
    more: list[Item] = []
class Row(TypedDict, total=False):
    item: Item
class Drawn(BaseModel):
    model_config = ConfigDict(extra='forbid')
"""


@pytest.mark.deep
@pytest.mark.spec("programs:PG40")
@settings(max_examples=400, deadline=None)
@given(st.lists(ANNOTATIONS, min_size=1, max_size=4))
def test_any_annotation_is_read_as_pydantic_writes_it(annotations):
    text = HEAD + DRAWN + "\n".join([f"    f{number}: {one}" for number, one in enumerate(annotations)]) + "\n"
    with pytest.MonkeyPatch.context() as monkeypatch:
        wanted = of_pydantic(made(text, monkeypatch)["Drawn"])

    assert shown(wanted) == shown(read(text)["Drawn"].json_schema)


# --- what else is told ----------------------------------------------------------------------------------------------


def test_schema_classes_inside_values_are_described():
    text = """
class Item(BaseModel):
    a: int
class Row(TypedDict):
    item: Item
class Other(BaseModel):
    item: Item
    items: tuple[Item, ...]
    maybe: Item | None = None
    lists: dict[str, Sequence[Item]] | None
    pair: tuple[Item, int]
    either: Item | Row | str
    plain: list[int]
    me: list[Other]
"""
    found = read(HEAD + text)

    assert dict(found["Other"].models) == {
        "item": "Item",
        "items": "list[Item]",
        "maybe": "Item | None",
        "lists": "dict[str, list[Item]] | None",
        "pair": "tuple[Item, Any]",
        "either": "Item | Row | Any",
        "me": "list[Other]",
    }
    assert [("Item", "model", {}), ("Row", "typed_dict", {"item": "Item"})] == [
        (name, found[name].kind, dict(found[name].models)) for name in ("Item", "Row")
    ]


def test_json_names_of_fields_are_known():
    found = read(HEAD + CLASSES["aliases of names"])["A"]

    assert ({"a": "aA", "b": "bB"}, {"b": None}) == (dict(found.aliases), dict(found.defaults))


def test_the_lines_of_classes_are_known():
    found = read(HEAD + "class B(A):\n pass\n\nclass A(BaseModel):\n a: str = (\n  'x'\n )\n")

    assert [("B", 1, 2), ("A", 4, 7)] == [(n, one.line - BEFORE, one.end_line - BEFORE) for n, one in found.items()]


def test_other_classes_are_left_out():
    text = """
from dataclasses import dataclass
from stepengine import ToolError
@dataclass
class Point:
    x: int
class Over(Exception):
    pass
class Of(t.Generic[t.T]):
    pass
class Low(ToolError):
    pass
class Color(Enum):
    RED = make()
"""

    assert {} == dict(read(HEAD + text))


@pytest.mark.skipif(sys.version_info < (3, 12), reason="`type` is a statement of Python 3.12")
@pytest.mark.parametrize(
    "text",
    [
        "type X = Literal['a', 'b']\nclass A(BaseModel):\n a: X\n b: X | None = None\n",
        "type Json = dict[str, Json] | list[Json] | str | None\nclass A(BaseModel):\n a: Json\n",
        "type X = list[B]\nclass B(BaseModel):\n a: int\nclass A(BaseModel):\n a: X\n",
    ],
)
def test_a_type_statement_is_read_as_pydantic_writes_it(text, monkeypatch):
    found = read(HEAD + text)

    assert shown(of_pydantic(made(HEAD + text, monkeypatch)["A"])) == shown(found["A"].json_schema)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="`type` is a statement of Python 3.12")
def test_a_type_alias_that_holds_itself_holds_no_schema_class():
    text = "class B(BaseModel):\n a: int\ntype X = list[X] | Y\ntype Y = list[X] | B\nclass A(BaseModel):\n a: X\n"
    with pytest.raises(
        DefinitionError, match=f"agent.py:{BEFORE + 6}: .* a recursive type alias cannot contain schema classes"
    ):
        read(HEAD + text)


# --- what is refused ------------------------------------------------------------------------------------------------


def model(*lines, before=""):
    return f"{before}\nclass A(BaseModel):\n" + "\n".join(f"    {line}" for line in lines) + "\n"


REFUSED = {
    "a validator": (model("a: int", "@field_validator('a')", "def low(cls, a): return a"), "'low' is a method, which is not supported here; keep only fields"),
    "a method": (model("def run(self): pass"), "'run' is a method, which is not supported here; keep only fields"),
    "a default that is called": (model("a: list = make()"), "a call of 'make' is not a literal"),
    "a factory": (model("a: list = Field(default_factory=make)"), "default_factory must be `list` or `dict`"),
    "an f-string": (model("a: str = f'{1}'"), "an f-string is not a literal"),
    "another word of Field": (model("a: int = Field(exclude=True)"), r"Field\(exclude=...\) is not supported here"),
    "another setting": (model("model_config = ConfigDict(frozen=True)"), "the setting 'frozen' is not supported here"),
    "a long pattern": (model(f"a: str = Field(pattern={'a' * 501!r})"), "501 characters; use at most 500"),
    "a pattern that looks around": (model("a: str = Field(pattern='(?=a)')"), "is not a valid regular expression here"),
    "a pattern that repeats": (model("a: str = Field(pattern='x')", "b: str = Field(pattern='(a{999}){999}')"), "makes the patterns of this schema too large"),
    "a bound on what has none": (model("a: bool = Field(ge=1)"), "does not apply to this type"),
    "a bound that is none": (model("a: int = Field(ge=1.5)"), "must be a number that fits the type"),
    "a length below nothing": (model("a: str = Field(min_length=-1)"), "must be a whole number of at least 0"),
    "a private name": (model("_a: int = 1"), "not a valid field name"),
    "no annotation": (model("a = 1"), "Assign is not supported here"),
    "a class variable": (model("a: t.ClassVar[int] = 1"), "is not a supported type; use one of "),
    "a plain class": (model("a: B", before="class B:\n pass\n"), "'B' is not a supported type; use one of "),
    "an Enum of calls": (model("a: B", before="class B(Enum):\n X = auto()\n"), "a call of 'auto' is not a literal"),
    "keys that are no texts": (model("a: dict[int, str]"), "the keys of an object must be str"),
    "a set of models": (model("a: set[A]"), "a set cannot contain schema classes"),
    "words beside a type": (model("a: Annotated[int, 'x']"), r"use Annotated\[..., Field\(...\)\]"),
    "a constant that changes": (model("a: int = N", before="N = 1\nN += 1\n"), "'N' is not a readable constant"),
    "a number without an end": (model("a: float = 1e999"), "infinity and NaN are not JSON"),
    "a large number": (model(f"a: int = {10**4300:#x}"), "a number may have at most 4,300 digits"),
    "half a character": (model("a: str = '\\ud800'"), "it is not JSON"),
    "a default of a TypedDict": ("class A(TypedDict):\n a: int = 1\n", "cannot have a default"),
    "NotRequired in a model": (model("a: NotRequired[int]"), "are only for a TypedDict"),
    "a field that hides its type": (model("date: date | None = None"), "means the field of that name"),
    "a typed dict below two settings": (
        "class R(TypedDict):\n a: int\nclass B(BaseModel, extra='forbid'):\n r: R\nclass C(BaseModel):\n b: B\n r: R\n",
        "models with different extra=... share the typed dict 'R'",
    ),
    "two bases": ("class A(BaseModel, Mixin):\n a: int\n", "its bases are not supported"),
    "one in a function": ("def f():\n class A(BaseModel):\n  a: int\n", "must be at the top level of its file"),
    "one field twice": (model("a: int", "a: str"), "it is declared twice"),
}  # fmt: skip


@pytest.mark.spec("programs:PG40")
@pytest.mark.parametrize(("text", "why"), REFUSED.values(), ids=REFUSED)
def test_an_unsupported_schema_is_refused_with_file_and_line(text, why):
    with pytest.raises(DefinitionError, match=rf"(?s)^agent\.py:\d+: .*{why}"):
        read(HEAD + text)


def test_a_refusal_names_the_line_of_the_field():
    with pytest.raises(DefinitionError, match=rf"^agent\.py:{BEFORE + 4}: class 'A', field 'b': .*; write a literal$"):
        read(HEAD + "\nclass A(BaseModel):\n a: int\n b: str = make()\n")


def many(number, form, join="\n"):
    return join.join(form.format(n=n, m=n + 1, half=n // 2) for n in range(number))


HOSTILE = {
    "deep lists": model(f"a: {'list[' * 90}int{']' * 90}"),
    "deep quotes": model("a: " + repr("x" * 3_000)),
    "a union without an end": model("a: " + " | ".join(["int"] * 400)),
    "thousands of fields": model(*[f"f{n}: int" for n in range(5_000)]),
    "thousands of classes": many(2_000, "class A{n}(BaseModel):\n a: int"),
    "a chain of bases": "class A0(BaseModel):\n x: int\n" + many(2_000, "class A{m}(A{n}):\n a{m}: int"),
    "a chain of classes": "class A2000(BaseModel):\n x: int\n" + many(2_000, "class A{n}(BaseModel):\n a: A{m}"),
    "all in all": many(60, "class A{n}(BaseModel):\n " + many(60, "a{n}: A{n}", "\n ").replace("A{n}", "A{{n}}")),
    "heirs of a large one": model(*[f"f{n}: int" for n in range(490)]) + many(2_000, "class B{n}(A):\n pass"),
    "a circle of bases": "class A(B):\n a: int\nclass B(A):\n b: int\n",
    "a circle of aliases": model("a: X", before="X = list[Y]\nY = list[X]\n"),
    "aliases that double": model("a: X0", before=many(20, "X{n} = tuple[X{m}, X{m}]") + "\nX20 = int\n"),
    "literals that double": model("a: X0", before=many(30, "X{n} = Literal[X{m}, X{m}]") + "\nX30 = Literal[1]\n"),
    "a megabyte of Literal": model(f"a: Literal[{'x' * 1_000_000!r}]"),
    "a Literal of a megabyte": model("a: Literal[" + ", ".join([f"'{n:06}'" for n in range(100_000)]) + "]"),
    "a long text in many places": model(*[f"a{n}: str = T" for n in range(400)], before=f"T = {'x' * 60_000!r}\n"),
    "a deep default": model(f"a: Any = {'[' * 90}{']' * 90}"),
    "BaseModel is another class": "class BaseModel:\n pass\n" + model("a: int"),
    "BaseModel is bound again": "BaseModel = 3\n" + model("a: int"),
    "BaseModel is bound in a function": "def f():\n global BaseModel\n BaseModel = 3\n" + model("a: int"),
    "BaseModel is deleted": "del BaseModel\n" + model("a: int"),
    "str is another one": model("a: str", before="str = int\n"),
    "str is bound in a match": model("a: str", before="match 1:\n case str:\n  pass\n"),
    "all names of a module": "from somewhere import *\n" + model("a: set"),
    "a call as a base": "class A(make()):\n a: int\n",
    "a metaclass": "class A(BaseModel, metaclass=Meta):\n a: int\n",
    "keywords of anybody": "class A(BaseModel, **words):\n a: int\n",
    "a decorator": "@final\n" + model("a: int"),
    "an f-string as a type": model("a: f'{x}'"),
    "a chain of calls": model("a: " + "a" + ".b()" * 200),
    "an Enum of thousands": model("a: B", before="class B(Enum):\n" + many(5_000, " X{n} = {n}") + "\n"),
    "large patterns": model(*[f"a{n}: str = Field(pattern='{n}' '(a{{999}})' '{{40}}')" for n in range(200)]),
    "a pattern of letters": model(f"a: str = Field(pattern={chr(92) + 'w{4900}'!r})"),
    "a pattern without case": model(f"a: str = Field(pattern={'(?i)' + chr(92) + 'pL{4000}'!r})"),
    "classes within the bounds": many(490, "class A{n}(BaseModel):\n a: A{half}\n b: int"),
    "a chain within the bounds": "class A490(BaseModel):\n x: int\n" + many(490, "class A{n}(BaseModel):\n a: A{m}"),
    "typed dicts in all models": many(240, "class R{n}(TypedDict):\n a: R{m}") + "\nclass R240(TypedDict):\n x: int\n" + many(240, "class A{n}(BaseModel):\n a: R0\n b: A{half}"),
    "a body of ifs": model("if True:", "    a: int"),
    "an override of settings": model("model_config: int = 3"),
    "a reference as a default": model("a: dict[str, Any] = {'$ref': '#/$defs/Nothing'}"),
}  # fmt: skip


EACH_HOSTILE = pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("programs:PG40")
@EACH_HOSTILE
def test_a_hostile_text_is_read_or_refused_in_few_words(text):
    tree = ast.parse(HEAD + text)
    said, found = "", {}
    try:
        found = parse_schema_classes(tree, "agent.py")
    except DefinitionError as error:
        said = str(error)

    assert len(said) < 2_000
    assert said.startswith("agent.py:") or all(JsonSchema("x", one.json_schema) for one in [*found.values()][:20])


@pytest.mark.speed
@pytest.mark.spec("programs:PG40")
@EACH_HOSTILE
def test_a_hostile_text_is_read_or_refused_within_a_second(text):
    tree = ast.parse(HEAD + text)
    begin = time.thread_time()
    with contextlib.suppress(DefinitionError):
        parse_schema_classes(tree, "agent.py")

    assert time.thread_time() - begin < 1


def test_rebound_names_are_not_taken_for_the_originals():
    for name in (
        "BaseModel is another class",
        "BaseModel is bound again",
        "BaseModel is bound in a function",
        "BaseModel is deleted",
        "a call as a base",
    ):
        with pytest.raises(DefinitionError, match="its bases are not supported"):
            read(HEAD + HOSTILE[name])
    with pytest.raises(DefinitionError, match="'str' is not a supported type"):
        read(HEAD + HOSTILE["str is bound in a match"])
    assert {"type": "integer"} == thaw(read(HEAD + HOSTILE["str is another one"])["A"].json_schema)["properties"]["a"]


@pytest.mark.spec("programs:PG40")
def test_a_file_has_five_hundred_schema_classes_and_no_more():
    text = HEAD + "".join([f"class A{n}(BaseModel):\n    a: int\n" for n in range(500)])

    read(text)
    with pytest.raises(DefinitionError, match="there are too many schema classes; a file may have at most 500"):
        read(f"{text}class More(BaseModel):\n    a: int\n")
