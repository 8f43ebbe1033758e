"""
JSON values that cannot change.

``JsonDict`` and ``JsonList`` are real ``dict`` and ``list`` objects, so ``==``, ``isinstance`` and ``json.dumps`` work on
them, but every mutator raises. Outside values become data only by ``freeze``. It raises an error with the path of
any part that is not JSON; there is no fallback.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from types import GeneratorType
from typing import Any, NamedTuple, NoReturn, TypeAlias

from stepengine.errors import DataError

JsonValue: TypeAlias = "str | int | float | bool | Mapping[str, JsonValue] | list[JsonValue] | None"
"""A value of JSON."""

NOT_YIELDED = "a generator does nothing by itself: write `yield from` before it, as in `found = yield from call(...)`"
NOT_AWAITED = "it was not awaited: write `await` in async code, and `yield from Perform(fn, ...)` in a handler"
MAX_DEPTH_LEVELS = 200
"""
A deeper value is refused. Real data has some ten levels, and Python's recursion limit of 1,000 frames is not reached
in 200.
"""
MAX_LINE_DEPTH_LEVELS = MAX_DEPTH_LEVELS + 32
"""The deepest nesting in a line of a journal: a value, and the record around it."""
# One without an end goes to the end of the text: if it matched nothing, each quote in it would be tried.
JSON_STRING = re.compile(rb'(?s)"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)')
NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
FENCE = "```"
NO_JSON = object()
"""The result of parsing a text without JSON, since ``None`` is JSON."""
MAX_DECODINGS = 3
"""Models encode JSON in JSON once, rarely twice; a text with more levels is probably not a value."""
MAX_ARGUMENTS_CHARS = 4 * 1024 * 1024
"""Longer arguments of a tool call are not parsed: no model writes as much, and each copy of the history would hold them."""
MAX_INT = 2**63 - 1
"""The largest integer of 64 bits: a column of SQLite or PostgreSQL stores no larger one. JSON text does."""
MAX_DIGITS = 4_300
"""Python converts no longer number to text and back: the time grows with the square of the digits."""
MAX_NUMBER = 10**MAX_DIGITS - 1
"""The largest whole number of a JSON value."""
MIN_NUMBER = -MAX_NUMBER
"""The smallest one."""


def _refuse_change(self: object, *_: object, **__: object) -> NoReturn:
    msg = f"{type(self).__name__} cannot be changed; make a new value, or thaw() a copy"
    raise TypeError(msg)


class JsonDict(dict[str, Any]):
    """An immutable JSON object. Make one with ``freeze``; one made directly is checked when it is frozen."""

    __slots__ = ("_levels",)
    _levels: int

    __setitem__ = __delitem__ = __ior__ = _refuse_change
    clear = pop = popitem = setdefault = update = _refuse_change

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __copy__(self) -> JsonDict:
        return self

    def __deepcopy__(self, _: object) -> JsonDict:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        return JsonDict, (dict(self),)

    def __or__(self, other: Any) -> Any:
        return freeze({**self, **other})


class JsonList(list[Any]):
    """An immutable JSON array. Make one with ``freeze``; one made directly is checked when it is frozen."""

    __slots__ = ("_levels",)
    _levels: int

    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse_change
    append = extend = insert = remove = clear = reverse = sort = pop = _refuse_change

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self))

    def __copy__(self) -> JsonList:
        return self

    def __deepcopy__(self, _: object) -> JsonList:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        return JsonList, (list(self),)


def freeze(value: Any, path: str = "$") -> Any:
    """
    Return *value* as an immutable JSON value; raise ``DataError`` if it is not JSON.

    Dicts become ``JsonDict``, lists and tuples ``JsonList``; values that are already frozen come back as they are.

    Args:
        value: ``None``, bool, int of at most 4,300 digits, finite float, str, list, tuple or a mapping with str keys, nested at most
            200 deep.
        path: How the place is called in an error.

    Raises:
        DataError: for anything else, naming the place: other types, NaN and infinities, cycles, lone surrogates.
    """
    # By exact type, here and below: of a subclass, which may have methods of its own, a plain copy is stored.
    kind = type(value)
    if value is None or (kind is int and MIN_NUMBER <= value <= MAX_NUMBER) or (kind is str and value.isascii()):
        return value
    if (kind is JsonDict or kind is JsonList) and (hasattr(value, "_levels") or not value):
        return value
    try:
        # Most values that come here are plain dicts, which need no checks for other types.
        if kind is dict:
            return _freeze_mapping(value, path, MAX_DEPTH_LEVELS - 1)
        return _freeze_value(value, path, MAX_DEPTH_LEVELS)
    except RecursionError:
        raise _make_nesting_error(path) from None


def freeze_object(value: Any, path: str = "$") -> JsonDict:
    """
    Return *value*, a mapping, as an immutable JSON object; raise ``DataError`` for anything else.

    Raises:
        DataError: As for ``freeze``, and for anything but a mapping.
    """
    if type(value) is JsonDict and (hasattr(value, "_levels") or not value):
        return value
    frozen = freeze(value, path)
    if not isinstance(frozen, JsonDict):
        msg = f"expected a JSON object at {path}, not {_name_type_with_article(value)}"
        raise DataError(msg, path=path)
    return frozen


def require_storable_text(value: str, path: str = "$") -> str:
    """
    Return *value* if it is a string that can be stored; else raise.

    Raises:
        DataError: For anything but a string, and for lone surrogates.
    """
    if type(value) is str and value.isascii():
        return value
    if not isinstance(value, str):
        msg = f"expected text at {path}, not {_name_type_with_article(value)}"
        raise DataError(msg, path=path)
    try:
        str.encode(value)  # a subclass may override it
    except UnicodeEncodeError:
        msg = f"the text at {path} holds a lone surrogate, which no encoding can store"
        raise DataError(msg, path=path) from None
    return str.__str__(value)


def replace_lone_surrogates(text: str) -> str:
    """Return *text* with lone surrogates replaced by U+FFFD; for messages about values, never for values."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def make_object_with_unique_keys(members: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the members of a parsed JSON object as a dict; raise ``ValueError`` for a repeated key, whose first value would be lost."""
    made = dict(members)
    if len(made) < len(members):
        msg = "an object has a key twice"
        raise ValueError(msg)
    return made


def is_nested_deeper(value: Any, levels: int) -> bool:
    """Return whether a parsed JSON value is nested deeper than *levels*; it stops at that level."""
    level = [value]
    for _ in range(levels):
        level = [
            member
            for node in level
            if isinstance(node, (dict, list))
            for member in (node.values() if isinstance(node, dict) else node)
        ]
        if not level:
            return False
    return any(isinstance(node, (dict, list)) for node in level)


def is_text_nested_deeper(text: bytes, levels: int) -> bool:
    """Return whether JSON text is nested deeper than *levels*, without parsing it."""
    # Few texts have so many brackets, and the test for that is the fastest one.
    if text.count(b"[") + text.count(b"{") <= levels:
        return False
    depth = 0
    for bracket in JSON_STRING.sub(b"", text).translate(None, NO_BRACKETS):
        depth += 1 if bracket in b"[{" else -1
        if depth > levels:
            return True
    return False


def _get_depth(value: object) -> int:
    """Return the nesting depth of a frozen container; 0 for other values."""
    return getattr(value, "_levels", 0) if type(value) in (JsonDict, JsonList) else 0


def _freeze_value(value: Any, path: str, levels_left: int) -> object:
    """Return *value* frozen; containers may be nested *levels_left* levels deep."""
    if isinstance(value, str):
        return require_storable_text(value, path)
    if value is None or isinstance(value, (int, float)):
        return _freeze_number(value, path)
    if levels_left == 0:
        raise _make_nesting_error(path)
    if type(value) in (JsonDict, JsonList) and hasattr(value, "_levels"):
        if value._levels > levels_left:  # noqa: SLF001 - made here
            raise _make_nesting_error(path)
        return value
    if isinstance(value, (dict, Mapping)):
        return _freeze_mapping(value, path, levels_left - 1)
    if isinstance(value, (list, tuple)):
        items = JsonList([_freeze_value(v, f"{path}[{i}]", levels_left - 1) for i, v in enumerate(value)])
        items._levels = 1 + max(map(_get_depth, items), default=0)  # noqa: SLF001 - made here
        return items
    msg = f"{_name_type_with_article(value)} at {path} is not JSON; use str, numbers, bool, None, lists or dicts{hint_at_mistake(value)}"
    raise DataError(msg, path=path)


def parse_json_answer(text: str) -> object:
    """Return *text*, or else its only fenced block, parsed as JSON; ``NO_JSON`` if neither is JSON."""
    lines = text.split("\n")
    fences = [n for n, line in enumerate(lines) if line.lstrip().startswith(FENCE)]
    fenced = len(fences) == 2 and lines[fences[1]].strip() == FENCE  # noqa: PLR2004 - one block: it opens and closes
    for candidate in (text, "\n".join(lines[fences[0] + 1 : fences[1]]) if fenced else ""):
        try:
            return json.loads(candidate)
        except (ValueError, RecursionError):
            continue
    return NO_JSON


def hint_at_mistake(value: object) -> str:
    """Return a hint at a probable mistake with a value that is not JSON, such as a missing ``await``, or ``""``."""
    kind = type(value)
    if hasattr(kind, "__await__"):
        return f"; {NOT_AWAITED}"
    if issubclass(kind, GeneratorType):
        return f"; {NOT_YIELDED}"
    hint: str = getattr(kind, "_not_json", "")
    return f"; {hint}" if hint else ""


def _freeze_mapping(value: Mapping[Any, Any], path: str, levels_left: int) -> JsonDict:
    """Return a mapping as an immutable JSON object; raise ``DataError`` for a key that is no text or a value that is not JSON."""
    members, levels = {}, 0
    for key, item in value.items():
        if not isinstance(key, str):
            msg = f"the key {key!r} at {path} is {_name_type_with_article(key)}; JSON keys are strings"
            raise DataError(msg, path=path)
        name = key if type(key) is str and key.isascii() else require_storable_text(key, path)
        kind = type(item)
        if (kind is str and item.isascii()) or (kind is int and MIN_NUMBER <= item <= MAX_NUMBER):
            members[name] = item
        else:
            members[name] = frozen = _freeze_value(item, f"{path}.{name}", levels_left)
            levels = max(levels, _get_depth(frozen))
    made = JsonDict(members)
    made._levels = levels + 1  # noqa: SLF001 - made here
    return made


def _freeze_number(value: Any, path: str) -> object:
    """Return a number, bool or ``None`` as a builtin type; raise ``DataError`` for one that is not finite or too long."""
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        msg = f"{value!r} at {path} is not JSON: only finite numbers are"
        raise DataError(msg, path=path)
    if value is None or isinstance(value, bool) or MIN_NUMBER <= value <= MAX_NUMBER:
        return value if value is None or isinstance(value, bool) else int(value)
    msg = f"the number at {path} has more than {MAX_DIGITS:,} digits; make it a text (str)"
    raise DataError(msg, path=path)


def _make_nesting_error(path: str) -> DataError:
    return DataError(f"nested deeper than {MAX_DEPTH_LEVELS} levels at {path}", path=path)


def _name_type_with_article(value: object) -> str:
    return "null" if value is None else f"a {type(value).__name__}"


def thaw(value: object) -> Any:
    """Return a mutable copy of a frozen JSON value: plain dicts and lists all the way down."""
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, (dict, Mapping)):
        return {k: thaw(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [thaw(v) for v in value]
    return value


_COMPACT = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
_CANONICAL = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"), sort_keys=True)


def compact(value: object) -> str:
    """Return *value* as JSON text without spaces, keys in their own order, non-ASCII characters as they are."""
    return _COMPACT.encode(value)


def canonical(value: object) -> str:
    """Return *value* as canonical JSON text: keys sorted, no spaces, ``-0.0`` as ``0.0`` (replay:J10)."""
    text = _CANONICAL.encode(value)
    return _CANONICAL.encode(_normalize_zeros(value)) if "-0.0" in text else text


def _normalize_zeros(value: object) -> object:
    if isinstance(value, float):
        return value + 0.0
    if isinstance(value, Mapping):
        return {k: _normalize_zeros(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_normalize_zeros(v) for v in value]
    return value


# --- where two values differ ----------------------------------------------------------------------------------------


class _Absent:
    def __repr__(self) -> str:
        return "(absent)"


ABSENT = _Absent()
"""A missing value, as opposed to the JSON value ``None``, such as a member that one side of a ``JsonDifference`` lacks."""


class JsonDifference(NamedTuple):
    """
    One place at which two JSON values differ.

    Attributes:
        pointer: JSON pointer; empty for the whole.
        recorded: The part of the first value at the pointer, or ``ABSENT``.
        now: The part of the second value there, or ``ABSENT``.
    """

    pointer: str
    recorded: Any
    now: Any


def find_differences(recorded: object, now: object, pointer: str = "") -> Iterator[JsonDifference]:
    """Yield the differences between two JSON values, in the order of the first; ``1``, ``1.0`` and ``true`` differ."""
    if isinstance(recorded, Mapping) and isinstance(now, Mapping):
        for name in dict.fromkeys([*recorded, *now]):
            at = f"{pointer}/{name.replace('~', '~0').replace('/', '~1')}"
            yield from find_differences(recorded.get(name, ABSENT), now.get(name, ABSENT), at)
    elif isinstance(recorded, list | tuple) and isinstance(now, list | tuple):
        for index, (one, other) in enumerate(zip_longest(recorded, now, fillvalue=ABSENT)):
            yield from find_differences(one, other, f"{pointer}/{index}")
    elif type(recorded) is not type(now) or recorded != now:
        yield JsonDifference(pointer, recorded, now)


def find_first_difference(one: Sequence[object], other: Sequence[object]) -> int:
    """Return the index of the first differing item of two lists or character of two texts, or the length of the shorter one."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))
