"""
``SafeTexts``: any value of a run, or of the author's code, as text that is safe to show.

Values are read without running the author's code: plain values, containers, and the fields of attrs classes, dataclasses and
pydantic models. A class's own ``__repr__`` is only called if the caller allows it, for example in a forked process. Likely secrets in
texts are redacted regardless of the rules of the journal, control characters are shown as escapes, and long values are cut.
"""

from __future__ import annotations

import dataclasses
import enum
import os
from collections import deque
from collections.abc import Iterator
from copy import copy
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from itertools import islice
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any, NamedTuple

import attrs

from stepengine.data.json import ABSENT
from stepengine.data.secret_names import is_secret_name
from stepengine.data.transcript import Transcript
from stepengine.data.visible import cut_after, visible
from stepengine.redaction import READ_AHEAD_CHARS, make_redactor

WIDTH = 200
LINES = 20
DEPTH = 4
ITEMS = 50
COMPARED_CHARS = 10_000
"""The most characters of a variable that are compared with those of another moment."""
COMPARED_DEPTH = 16
MAX_REPR = 2_000
"""The most characters of an own ``repr``."""
BITS = 1_000
MORE = "..."
UNSHOWN = "<a value that cannot be shown>"
PAIR = 2


class _OpenedValue(NamedTuple):
    """A value with members: its opening and closing text, and each member with the text before it."""

    begin: str
    end: str
    members: Iterator[tuple[str, Any]]
    size: int


class SafeTexts:
    """
    Converts values to texts that are safe to show: known and likely secrets redacted, control characters escaped.

    Args:
        runs_reprs: Whether own ``__repr__`` methods of the author's and third-party classes are called; default ``False``.
    """

    def __init__(self, *, runs_reprs: bool = False) -> None:
        self._runs_reprs = runs_reprs
        self._width, self._depth, self._items = WIDTH, DEPTH, ITEMS
        self._redactor = make_redactor("all", os.environ)

    def copy_for_comparison(self) -> SafeTexts:
        """Return a converter that shows up to ``COMPARED_CHARS`` characters of each string, and more levels and members."""
        made = copy(self)
        made._width, made._depth, made._items = COMPARED_CHARS, COMPARED_DEPTH, COMPARED_CHARS  # noqa: SLF001 - made here
        return made

    def clean(self, text: str, limit: int | None = None, *, one_line: bool = False) -> str:
        """Return *text* with secrets redacted and control characters escaped, cut after *limit*; *one_line* also escapes line ends."""
        if limit is None:
            return visible(self._redact_beginning(text, len(text)), strict=one_line)
        cleaned = self._redact_beginning(text, limit)
        shown = visible(cleaned[:limit], strict=one_line)
        is_whole = max(len(cleaned), len(shown)) <= limit and len(text) <= limit + READ_AHEAD_CHARS
        return shown if is_whole else f"{shown[:limit]}{MORE}"

    def format_value(self, value: Any, *, limit: int = WIDTH) -> str:
        """Return *value* in one line of at most *limit* characters and a mark that it was cut."""
        return cut_after(self._format_line(value, self._depth, limit), limit, MORE)

    def format_variable(self, name: str, value: Any, *, limit: int = WIDTH) -> str:
        """Return the value of a variable called *name* as text, redacted if the name marks it as secret."""
        return "<redacted>" if self._is_secret_variable(name, value) else self.format_value(value, limit=limit)

    def format_lines(self, value: object, *, max_lines: int = LINES, width: int = WIDTH) -> list[str]:
        """Return *value* in at most *max_lines* lines, one member per line."""
        found: list[str] = []
        for line in self._format_lines(value, "", DEPTH, width):
            if len(found) == max_lines:
                return [*found[:-1], MORE]
            found.append(cut_after(line, width, MORE))
        return found

    def _redact_beginning(self, text: str, limit: int) -> str:
        """Return at least the first *limit* characters of *text*, with secrets redacted."""
        part = text[: limit + READ_AHEAD_CHARS]
        return self._redactor.redact_beginning(text, limit) if self._redactor.may_contain_secret(part) else part

    # --- members ------------------------------------------------------------------------------------------------------

    def _is_secret_variable(self, name: str, value: object, depth: int = DEPTH) -> bool:
        """
        Return whether a variable is secret by its name: a string, bytes, or as in journals a number, or a sequence with one of these.

        ``key`` and ``pat`` alone are ordinary names.
        """
        text = _read_beginning(value)
        if text is not None:
            named = name not in ("key", "pat") and is_secret_name(name, "variable")
            return bool(text) and (named or self._is_secret_member(name, text))
        if type(value) is float or (type(value) is int and value.bit_length() <= BITS):
            return self._is_secret_member(name, value)
        kind = next((known for known, _, _ in SEQUENCES if _has_type(value, known)), None)
        if kind is None or depth == 0 or not is_secret_name(name, "member"):
            return False
        return any(self._is_secret_variable(name, one, depth - 1) for one in islice(kind.__iter__(value), ITEMS))

    def _is_secret_member(self, name: str, value: object) -> bool:
        """Return whether the redactor replaces a member completely because of its name."""
        return bool(self._redactor.redact_member(name, value) == f"<redacted:{name}>")

    def _format_member(self, name: str, value: object, depth: int, room: int) -> str:
        """Return a member as text after its name; redacted if the name marks it as secret."""
        key = name.rstrip("=: ").strip("'")
        shown = self._clean_member_name(name)
        return (
            f"{shown}<redacted>"
            if self._is_secret_variable(key, value)
            else shown + self._format_line(value, depth, room)
        )

    def _format_line(self, value: object, depth: int, room: int) -> str:
        """Return a value in one line of about *room* characters; a placeholder if reading it raises."""
        try:
            return self._format_value(value, depth, room)
        except Exception:  # noqa: BLE001 - an odd value must not hide the others
            return UNSHOWN

    def _format_value(self, value: object, depth: int, room: int) -> str:
        """Return a value in one line, with its members down to *depth* levels while *room* is left."""
        leaf = self._format_leaf(value)
        if leaf is not None:
            return leaf
        opened = self._list_members(value)
        if opened is None:
            return self._format_object(value)
        if depth == 0:
            return f"{opened.begin}{MORE}{opened.end}"
        made: list[str] = []
        used = 0
        for number, (name, member) in enumerate(opened.members):
            if number >= self._items or used > room:
                made.append(MORE)
                break
            made.append(self._format_member(name, member, depth - 1, room - used))
            used += len(made[-1]) + PAIR
        alone = "," if opened.begin == "(" and len(made) == 1 else ""
        return f"{opened.begin}{', '.join(made)}{alone}{opened.end}"

    def _format_lines(self, value: object, name: str, depth: int, width: int) -> Iterator[str]:
        """Yield a value after its name: in one line if it is short, else one member a line, indented."""
        line = self._format_member(name, value, depth, width)
        is_short = depth == 0 or len(line) <= width // 2 or line.endswith(("<redacted>", UNSHOWN))
        opened = None if is_short or self._format_leaf(value) is not None else self._list_members(value)
        if opened is None:
            yield line
            return
        yield f"{self._clean_member_name(name)}{opened.begin}"
        for number, (inner, member) in enumerate(opened.members):
            if number >= ITEMS:
                yield f"  {MORE} {opened.size - number} more"
                break
            for text in self._format_lines(member, inner, depth - 1, width - PAIR):
                yield f"  {text}"
        yield opened.end

    def _clean_member_name(self, name: str) -> str:
        """Return the name of a member on one line, redacted and cut."""
        return self.clean(name, WIDTH, one_line=True)

    def _format_leaf(self, value: object) -> str | None:
        """Return the text of a value without members; ``None`` for containers and objects."""
        kind = type(value)
        if value is ABSENT:
            return "(absent)"
        if value is None or kind is bool:
            return str(value)
        if _has_type(value, enum.Enum):
            return f"{kind.__name__}.{self.clean(str(object.__getattribute__(value, '_name_')), WIDTH, one_line=True)}"
        if _has_type(value, str):
            return self._format_string(str.__str__(value))
        if _has_type(value, (bytes, bytearray)):
            return self._format_bytes(value)
        for known, shown in LEAVES:
            if _has_type(value, known):
                return self.clean(shown(value), WIDTH, one_line=True)
        return None

    def _format_string(self, value: str) -> str:
        """Return a string in quotes, redacted, escaped and cut."""
        width = self._width
        cleaned = self._redact_beginning(value, width)
        more = MORE if len(value) > width + READ_AHEAD_CHARS or len(cleaned) > width else ""
        quoted = cleaned[:width].replace("\\", "\\\\").replace("'", "\\'")
        return f"'{visible(quoted, strict=True)}'{more}"

    def _format_bytes(self, value: Any) -> str:
        """Return bytes as a literal, redacted and cut."""
        held = bytes(memoryview(value)[: self._width + 2 * READ_AHEAD_CHARS])
        is_cut = len(memoryview(value)) > len(held)
        cleaned = self._redact_beginning(_decode_bytes(held), len(held))
        # The end may be a part of a secret.
        shown = (cleaned[:-READ_AHEAD_CHARS] if is_cut else cleaned).encode(errors="surrogateescape")
        more = MORE if is_cut or len(shown) > self._width else ""
        return f"{shown[: self._width]!r}{more}"

    def _format_key(self, key: Any) -> str:
        """Return the key of a dict as text; only the name of its class if its code would run."""
        if _has_type(key, str):
            return f"'{str.__str__(key)}'"
        if type(key) in (int, bytes):
            return _format_int(key) if type(key) is int else self._format_bytes(key)
        return repr(key) if key is None or type(key) in (bool, float) else f"<{type(key).__name__}>"

    def _list_members(self, value: Any) -> _OpenedValue | None:
        """Return the members of a value; ``None`` if reading them would run code of its class."""
        if _has_type(value, dict):
            pairs = ((f"{self._format_key(key)}: ", member) for key, member in dict.items(value))
            return _OpenedValue("{", "}", pairs, dict.__len__(value))
        return _list_sequence_members(value) or _list_object_fields(value)

    def _format_object(self, value: object) -> str:
        """Return the name of an object's class; its own ``repr`` instead, if it has one and that is allowed."""
        name = self.clean(type.__getattribute__(type(value), "__name__"), WIDTH, one_line=True)
        if not self._runs_reprs or _has_default_repr(value):
            return f"<{name}>"
        try:
            said = repr(value)
        except BaseException as error:  # noqa: BLE001 - its own code may raise anything
            return f"<{name}: repr raised {self.clean(type(error).__name__, WIDTH, one_line=True)}>"
        return self.clean(said, MAX_REPR, one_line=True)


def _has_type(value: Any, kinds: Any) -> bool:
    """Return whether the type of a value is one of *kinds* or a subclass; unlike ``isinstance``, no code of the value runs."""
    return issubclass(type(value), kinds)


def _has_default_repr(value: object) -> bool:
    said: object = type(value).__repr__
    return said is object.__repr__


def _decode_bytes(value: bytes) -> str:
    """Return bytes as text; invalid UTF-8 becomes lone surrogates."""
    return value.decode(errors="surrogateescape")


def _read_beginning(value: Any) -> str | None:
    """Return the beginning of a string or of bytes as text; ``None`` for other values."""
    if _has_type(value, str):
        return str.__str__(value)[:READ_AHEAD_CHARS]
    return _decode_bytes(bytes(memoryview(value)[:READ_AHEAD_CHARS])) if _has_type(value, (bytes, bytearray)) else None


def _format_int(value: int) -> str:
    """Return an int as text; its number of bits if it is very large."""
    return int.__repr__(value) if int.bit_length(value) <= BITS else f"<an int of {int.bit_length(value)} bits>"


def _format_time(value: Any) -> str:
    """Return a date or time in ISO format; the name of its class alone if its time zone is not a ``timezone``, whose code would run."""
    zone = getattr(value, "tzinfo", None)
    return value.isoformat() if zone is None or type(zone) is timezone else f"<{type(value).__name__}>"


LEAVES: tuple[tuple[Any, Any], ...] = (
    (int, _format_int),
    (float, float.__repr__),
    (complex, complex.__repr__),
    (Decimal, Decimal.__str__),
    ((datetime, date, time), _format_time),
    (timedelta, timedelta.__str__),
    (PurePath, lambda value: f"Path({PurePath.__str__(value)!r})"),
    (type, lambda value: f"<class {type.__getattribute__(value, '__qualname__')}>"),
    (ModuleType, lambda value: f"<module {value.__dict__.get('__name__', '?')}>"),
    (MethodType, lambda value: f"<method {getattr(value.__func__, '__qualname__', '?')}>"),
    ((FunctionType, BuiltinFunctionType), lambda value: f"<function {value.__qualname__}>"),
    (GeneratorType, lambda value: f"<generator {value.__qualname__}>"),
)
"""Types of values without members, and the function for their text, in the order of the tests. No method of a subclass runs."""


def _list_sequence_members(value: Any) -> _OpenedValue | None:
    """Return the members of a list, tuple or other sequence; ``None`` for other values. No method of a subclass runs."""
    for known, begin, end in SEQUENCES:
        if _has_type(value, known):
            name = "" if type(value) is known or begin[0] in "[(" else type(value).__name__
            names = type(value).__dict__.get("_fields") if known is tuple else None
            if isinstance(names, tuple) and len(names) == tuple.__len__(value):
                pairs = zip(names, tuple.__iter__(value), strict=True)
                members = ((f"{field}=", member) for field, member in pairs)
                return _OpenedValue(f"{type(value).__name__}(", ")", members, len(names))
            return _OpenedValue(
                f"{name}{begin}", end, (("", each) for each in known.__iter__(value)), known.__len__(value)
            )
    return None


SEQUENCES: tuple[tuple[Any, str, str], ...] = (
    (list, "[", "]"),
    (tuple, "(", ")"),
    (set, "{", "}"),
    (frozenset, "frozenset{", "}"),
    (deque, "deque[", "]"),
    (Transcript, "Transcript[", "]"),
)


def _list_object_fields(value: Any) -> _OpenedValue | None:
    """Return the fields of an attrs class, dataclass or pydantic model that have a ``repr``; ``None`` for other values."""
    kind = type(value)
    if "__attrs_attrs__" in kind.__dict__:
        names = [field.name for field in attrs.fields(kind) if field.repr is not False]
    elif dataclasses.is_dataclass(kind):
        names = [field.name for field in dataclasses.fields(kind) if field.repr]
    elif any("__pydantic_fields__" in base.__dict__ for base in kind.__mro__):
        names = [name for name, field in kind.__pydantic_fields__.items() if field.repr]
    else:
        return None
    pairs = [(f"{name}=", object.__getattribute__(value, name)) for name in names if _has_stored_value(value, name)]
    # Authors do not see fields without a value.
    pairs = [(name, member) for name, member in pairs if member is not ABSENT]
    return _OpenedValue(f"{kind.__name__}(", ")", iter(pairs), len(pairs))


def _has_stored_value(value: object, name: str) -> bool:
    """Return whether a field holds a stored value, not a computed one."""
    if isinstance(getattr(type(value), name, None), property):
        return False
    try:
        object.__getattribute__(value, name)
    except AttributeError:
        return False
    return True
