"""
What users add to the rules of redaction, and what they except from them (replay K7, K9, K10).
"""

from __future__ import annotations

import getpass
import hashlib
import os
import re
import socket
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import attrs

from stepengine.errors import DataError

__all__ = ("Field", "Header", "Pattern", "RedactRule", "Rules", "Value", "digest_of", "machine_data")

MIN_PATH = 5
MIN_NAME = 3
ORDINARY_NAMES = frozenset({
    "admin", "app", "build", "builder", "container", "default", "docker", "guest", "home", "host", "local", "localhost",
    "name", "node", "none", "nobody", "python", "root", "runner", "server", "test", "tester", "ubuntu", "unknown", "user",
    "worker", "workspace",
})  # fmt: skip
"""Names of users and hosts that are words: replacing them would change texts that do not speak of this machine."""


@attrs.frozen
class Header:
    """A header that is not recorded, whatever the built-in list says. Names are compared without case."""

    name: str


@attrs.frozen
class Field:
    """
    A JSON member whose value is replaced.

    Attributes:
        pointer: Its place, such as ``"/tools/*/env"``: ``*`` is any one member or index. It holds at any depth, so it
            need not begin at the root of a body or record.
    """

    pointer: str

    def __attrs_post_init__(self) -> None:
        if not self.steps:
            msg = f"the pointer of a Field names a member, such as '/tools/*/env', not {self.pointer!r}"
            raise DataError(msg)

    @property
    def steps(self) -> tuple[str, ...]:
        """The names in the pointer."""
        return tuple([step for step in self.pointer.split("/") if step])


def _pattern(value: str | re.Pattern[str]) -> re.Pattern[str]:
    try:
        return re.compile(value)
    except (re.error, TypeError) as error:
        msg = f"the regex of a Pattern cannot be used: {error}"
        raise DataError(msg) from error


@attrs.frozen
class Pattern:
    """
    Text that is replaced wherever a regular expression finds it.

    Attributes:
        regex: The expression.
        name: What stands in the placeholder.
    """

    regex: re.Pattern[str] = attrs.field(converter=_pattern)
    name: str = "pattern"


@attrs.frozen(repr=False)
class Value:
    """
    A secret value, replaced wherever it appears, in plain, quoted, escaped and base64 form.

    Attributes:
        text: The value; at least one character.
        name: What stands in the placeholder.
    """

    text: str
    name: str = "value"

    def __attrs_post_init__(self) -> None:
        text: Any = self.text
        if not isinstance(text, str) or not text:
            msg = "the text of a Value is a string that is not empty"
            raise DataError(msg)

    def __repr__(self) -> str:
        return f"Value(<redacted:{self.name}>)"


RedactRule: TypeAlias = "Header | Field | Pattern | Value | Callable[[Any], Any]"
"""One rule of a user; a function gets a JSON value and returns it without what is to be hidden."""


def digest_of(value: str) -> str:
    """Return what ``allow_secrets`` lists for *value*: ``"sha256:"`` and 64 hexadecimal digits."""
    return f"sha256:{hashlib.sha256(value.encode(errors='surrogatepass')).hexdigest()}"


def _digests(values: Iterable[str]) -> frozenset[str]:
    digests = frozenset((values,) if isinstance(values, str) else values)
    for digest in digests:
        if not re.fullmatch(r"sha256:[0-9a-f]{64}", digest):
            msg = "allow_secrets lists hashes such as 'sha256:<64 hexadecimal digits>', never the values themselves"
            raise DataError(msg)
    return digests


def _rules(given: Iterable[RedactRule]) -> tuple[RedactRule, ...]:
    return tuple(given)


@attrs.frozen(kw_only=True)
class Rules:
    """
    What holds beside the built-in rules.

    Attributes:
        given: Rules of the user.
        allowed: Hashes of values that look like secrets and are none.
        machine: Texts that tell of this machine, each with its placeholder.
    """

    given: tuple[RedactRule, ...] = attrs.field(default=(), converter=_rules)
    allowed: frozenset[str] = attrs.field(default=frozenset(), converter=_digests)
    machine: Mapping[str, str] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        for rule in self.given:
            if not isinstance(rule, Header | Field | Pattern | Value) and (
                isinstance(rule, type) or not callable(rule)
            ):
                msg = f"redact lists Header, Field, Pattern, Value or functions, not {rule!r}"
                raise DataError(msg)

    @property
    def headers(self) -> frozenset[str]:
        """Names of headers to leave out, in lower case."""
        return frozenset(rule.name.lower() for rule in self.given if isinstance(rule, Header))

    @property
    def fields(self) -> tuple[tuple[str, ...], ...]:
        """The pointers of members to replace."""
        return tuple([rule.steps for rule in self.given if isinstance(rule, Field)])

    @property
    def patterns(self) -> tuple[Pattern, ...]:
        """The patterns."""
        return tuple([rule for rule in self.given if isinstance(rule, Pattern)])

    @property
    def values(self) -> dict[str, str]:
        """The values, each with its name."""
        return {rule.text: rule.name for rule in self.given if isinstance(rule, Value)}

    @property
    def functions(self) -> tuple[Callable[[Any], Any], ...]:
        """The functions."""
        return tuple([rule for rule in self.given if not isinstance(rule, Header | Field | Pattern | Value)])

    def told_apart(self) -> list[Any]:
        """Return what differs between rules that clean differently, as JSON."""
        return [
            [repr(rule) if not isinstance(rule, Value) else digest_of(rule.text) for rule in self.given],
            sorted(self.allowed),
            sorted(self.machine.items()),
        ]


def machine_data(cwd: str | os.PathLike[str] | None = None) -> dict[str, str]:
    """
    Return the texts that tell of this machine, each with its placeholder (replay K7).

    They are the working folder ``<cwd>``, the folder for temporary files ``<tmp>``, the home folder ``<home>``, and the
    names of host ``<host>`` and user ``<user>``. Short paths and names that are ordinary words are left out.
    """
    found: dict[str, str] = {}
    for path, placeholder in (
        (os.fspath(cwd) if cwd is not None else _cwd(), "<cwd>"),
        (tempfile.gettempdir(), "<tmp>"),
        (str(Path("~").expanduser()), "<home>"),
    ):
        if len(path) >= MIN_PATH or (placeholder == "<tmp>" and len(path) > 1):
            found.setdefault(str(Path(path)), placeholder)
    for name, placeholder in ((socket.gethostname(), "<host>"), (_user(), "<user>")):
        if len(name) >= MIN_NAME and name.lower() not in ORDINARY_NAMES:
            found.setdefault(name, placeholder)
    return found


def _cwd() -> str:
    try:
        return str(Path.cwd())
    except OSError:  # removed meanwhile
        return ""


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return ""
