"""
Safe texts: values of anybody's classes as text that may be shown, without running a line of their code.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from stepengine import Answer
from stepengine.data.json import ABSENT
from stepengine.data.visible import visible
from stepengine.debugging.texts import DEPTH, ITEMS, LINES, WIDTH, SafeTexts
from stepengine.redaction import READ_AHEAD_CHARS

KEY = "sk-ant-api03-" + "aB3dE6gH9jK2mN5pQ8sT1vW4yZ7" * 3


class Hostile:
    """
    Whatever is asked of it runs code.
    """

    def __getattribute__(self, name: str) -> Any:
        raise SystemExit(name)

    def __repr__(self) -> str:
        raise SystemExit

    __len__ = __iter__ = __str__ = __bool__ = __eq__ = __hash__ = __repr__  # type: ignore[assignment]


class Liar(list[Any]):
    def __iter__(self) -> Any:
        raise SystemExit

    def __len__(self) -> int:
        raise SystemExit


class Text(str):
    __slots__ = ()

    def __str__(self) -> str:
        raise SystemExit

    def __getitem__(self, _: Any) -> str:
        raise SystemExit

    def __len__(self) -> int:
        raise SystemExit


class Folder(PurePosixPath):
    def __fspath__(self) -> str:
        raise SystemExit


class Octets(bytes):
    def __getitem__(self, _: Any) -> Any:
        raise SystemExit


class Nameless(type):
    @property
    def __name__(cls) -> str:  # type: ignore[override]
        raise ValueError


class Colour(enum.Enum):
    RED = 1

    def __repr__(self) -> str:
        raise SystemExit


@attrs.frozen
class Point:
    x: int
    hidden: str = attrs.field(default="do not show", repr=False)


@dataclasses.dataclass
class Pair:
    a: Any
    b: Any = 2


class Model(BaseModel):
    n: int = 1
    api_key: str = "short"


@pytest.mark.spec("evaluation:JG32")
@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (Hostile, "<Hostile>"),
        (lambda: [Hostile(), 1], "[<Hostile>, 1]"),
        (lambda: Liar([1, 2]), "[1, 2]"),
        (lambda: Text("said"), "'said'"),
        (lambda: Colour.RED, "Colour.RED"),
        (lambda: Point(1), "Point(x=1)"),
        (lambda: Pair({"k": None}), "Pair(a={'k': None}, b=2)"),
        (Model, "Model(n=1, api_key=<redacted>)"),
        (lambda: (1,), "(1,)"),
        (lambda: 10**5000, "<an int of 16610 bits>"),
        (lambda: {10**5000: 1, b"x": 2, None: 3}, "{<an int of 16610 bits>: 1, b'x': 2, None: 3}"),
        (lambda: Folder("a"), "Path('a')"),
        (lambda: Octets(b"abc"), "b'abc'"),
        (lambda: [Nameless("N", (), {})(), 1], "[<a value that cannot be shown>, 1]"),
        (object, "<object>"),
        (lambda: len, "<function len>"),
        (lambda: int, "<class int>"),
        (lambda: {1: {2: {3: {4: {5: 6}}}}}, "{1: {2: {3: {4: {...}}}}}"),
    ],
)
def test_values_are_rendered_without_running_their_code(value: Any, shown: str) -> None:
    assert shown == SafeTexts().format_value(value()) == SafeTexts().format_variable("it", value())
    assert [shown] == SafeTexts().format_lines(value())


@pytest.mark.spec("evaluation:JG32")
def test_custom_reprs_run_only_when_allowed() -> None:
    class Said:
        def __repr__(self) -> str:
            return "<it said so>"

    class Bad:
        def __repr__(self) -> str:
            raise ValueError

    assert "[<Said>, <Bad>]" == SafeTexts().format_value([Said(), Bad()])
    assert "[<it said so>, <Bad: repr raised ValueError>]" == SafeTexts(runs_reprs=True).format_value([Said(), Bad()])


@pytest.mark.spec("evaluation:JG32", "evaluation:JG20")
@pytest.mark.spec("evaluation:JG5")
def test_absent_fields_and_internal_placeholders_are_not_rendered() -> None:
    said = SafeTexts().format_value(Answer(text="x"))
    assert said.startswith("Answer(selected=(), text='x', declined=False, ")
    assert "result=" not in said
    assert not any("_Absent" in line for line in SafeTexts().format_lines(Answer(text="x")))
    assert "(absent)" == SafeTexts().format_value(ABSENT)


def test_rendered_texts_are_bounded_in_width_depth_and_lines() -> None:
    texts = SafeTexts()
    deep: Any = 1
    for _ in range(100):
        deep = [deep]

    assert WIDTH + 5 >= len(texts.format_value("x" * 10_000_000))
    assert DEPTH + 1 == texts.format_value(deep).count("[")
    assert WIDTH + 3 >= len(texts.format_value(list(range(10**6))))
    assert LINES == len(texts.format_lines({str(n): "y" * 150 for n in range(200)}))
    assert ITEMS + 3 == len(texts.format_lines(list(range(10_000)), max_lines=10**6))


@pytest.mark.spec("evaluation:JG13", "evaluation:JG32")
def test_secrets_are_redacted_by_shape_by_name_and_at_cuts() -> None:
    texts = SafeTexts()
    for place in range(2 * WIDTH):
        shown = texts.format_value(f"{'z ' * (place // 2)}{' ' * (place % 2)}{KEY}")

        assert "aB3dE6" not in shown
    assert "<redacted>" == texts.format_variable("access_token", "anything") == texts.format_variable("token", "t")
    assert "'v'" == texts.format_variable("key", "v")
    assert "hunter2" not in texts.format_value({"password": "hunter2"}) + "".join(
        texts.format_lines({"password": "hunter2"})
    )
    assert "'\\x1b[2J\\u202e'" == texts.format_value("\x1b[2J\u202e")


TOKEN = f"ghp_{'aB3dE6gH9jK2' * 3}"
PEM = f"-----BEGIN RSA PRIVATE KEY-----\n{'A1b2' * 400}\n-----END RSA PRIVATE KEY-----"
FORMATS: dict[str, Callable[[SafeTexts, str], str]] = {
    "text": lambda texts, value: texts.clean(value, WIDTH),
    "string": lambda texts, value: texts.format_value(value),
    "bytes": lambda texts, value: texts.format_value(value.encode()),
    "key": lambda texts, value: texts.format_value({value: 1}),
    "bytes as a key": lambda texts, value: "".join(texts.format_lines({value.encode(): ["x" * 90] * 2})),
}


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("evaluation:JG13", "evaluation:JG32")
@settings(max_examples=60)
@given(
    st.sampled_from(list(FORMATS)),
    st.integers(0, 5),
    st.integers(0, 3 * WIDTH) | st.integers(-READ_AHEAD_CHARS // 20, WIDTH + 20).map(lambda n: READ_AHEAD_CHARS + n),
    st.sampled_from(" \n"),
)
def test_no_cut_shows_a_part_of_a_secret(form: str, keys: int, place: int, before: str) -> None:
    padding = max(0, place - keys * len(PEM) - len(before))
    shown = FORMATS[form](SafeTexts(), f"{PEM * keys}{'z' * padding}{before}{TOKEN}{' z' * READ_AHEAD_CHARS}")

    assert "aB3d" not in shown
    assert "A1b2" not in shown


@pytest.mark.spec("evaluation:JG13", "evaluation:JG32")
@pytest.mark.parametrize(
    "value", ["hunter2", b"hunter2", bytearray(b"hunter2"), 12345678, ["hunter2"], ((b"hunter2",),)], ids=repr
)
def test_secret_name_hides_values_of_every_plain_type(value: object) -> None:
    texts = SafeTexts()

    assert "<redacted>" == texts.format_variable("password", value)
    assert "{'password': <redacted>}" == texts.format_value({"password": value})
    assert "  'password': <redacted>" in texts.format_lines({"password": value, "x": ["y" * 90] * 2})
    assert "hunter2" not in (shown := texts.format_value({f"{'n' * WIDTH}_password": value}))
    assert "12345678" not in shown
    assert ["('a', 'b')", "1234", "{'a': 1}"] == [
        texts.format_variable(name, plain)
        for name, plain in [("sort_key", ("a", "b")), ("token", 1234), ("password", {"a": 1})]
    ]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=25)
@given(JSON)
def test_any_json_renders_as_one_printable_line(value: Any) -> None:
    shown = SafeTexts().format_value(value)

    assert visible(shown, strict=True) == shown
    assert WIDTH + 3 >= len(shown)
