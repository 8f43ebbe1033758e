"""
Taking secrets out of what is written, and finding those that are left (replay K, reliability R11, SC03, SC07, SC10).

Two kinds of rules: *known* values are replaced wherever they appear, in plain, quoted, escaped and base64 form; *shapes*
are texts that look like keys, and members with telling names. A cleaned value cleans to itself, so that a recording and
its replay agree whatever the key is.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, Literal, TypeAlias
from urllib.parse import quote

import attrs

from stepengine.errors import DataError
from stepengine.journal.redaction_rules import RedactRule, Rules, digest_of

__all__ = (
    "MIN_KNOWN",
    "SHAPE",
    "SHAPE_HINTS",
    "Redact",
    "Redactor",
    "SecretFound",
    "json_in",
    "known_in_environment",
    "redactor_for",
    "shape_name",
)

Redact: TypeAlias = Literal["known", "all", "off"]
"""``"known"`` replaces known values only, ``"all"`` shapes and telling members too, ``"off"`` nothing (replay K13)."""

SECRET_SUFFIXES = ("_KEY", "_TOKEN", "_SECRET", "_PASSWORD")
SECRET_MEMBERS = frozenset({
    "accesstoken", "apikey", "authorization", "clientsecret", "cookie", "idtoken", "passwd", "password", "privatekey",
    "refreshtoken", "secret",
})  # fmt: skip
MIN_KNOWN = 8
NESTED_JSON = 3
NO_RULES = Rules()
PLACEHOLDER = re.compile(r"<redacted:[^<>]*>|<(?:home|cwd|tmp|host|user)>")

_BEFORE, _AFTER = r"(?<![A-Za-z0-9+/_-])", r"(?![A-Za-z0-9+/_-])"
SHAPES = (
    ("provider-key", rf"{_BEFORE}sk-(?=[A-Za-z_-]*[0-9])[A-Za-z0-9_-]{{16,}}{_AFTER}"),
    ("google-key", rf"{_BEFORE}AIza[A-Za-z0-9_-]{{35}}{_AFTER}"),
    ("github-token", rf"{_BEFORE}(?:gh[pousr]_[A-Za-z0-9]{{36}}|github_pat_[A-Za-z0-9_]{{22,}}){_AFTER}"),
    ("slack-token", rf"{_BEFORE}xox[abprs]-[A-Za-z0-9-]{{10,}}{_AFTER}"),
    ("aws-key", rf"{_BEFORE}AKIA[A-Z0-9]{{16}}{_AFTER}"),
    ("jwt", rf"{_BEFORE}eyJ[A-Za-z0-9_-]{{8,}}\.eyJ[A-Za-z0-9_-]{{8,}}(?:\.[A-Za-z0-9_-]*)?"),
    ("private-key", r"-----BEGIN [A-Z ]*PRIVATE KEY-----.+?-----END [A-Z ]*PRIVATE KEY-----"),
    ("bearer", r"(?i:bearer) +[A-Za-z0-9._~+/=-]{20,}"),
)
SHAPE = re.compile("|".join(f"(?P<{name.replace('-', '_')}>{pattern})" for name, pattern in SHAPES), re.DOTALL)
# Cheap substring tests: most texts hold none of these, and are not looked into at all.
SHAPE_HINTS = (
    "sk-", "AIza", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "xox", "AKIA", "eyJ", "-----BEGIN", "earer ",
    "EARER ",
)  # fmt: skip
# A pattern that ignores case takes a hundred times as long over a long text as these take together; what has several
# spellings is looked for only when its last word is there.
TELLING_WORDS = ("secret", "passw", "authoriz", "cookie")
TELLING_PAIRS = {"token": ("access", "refresh", "id"), "key": ("api", "private")}


class SecretFound(DataError):
    """
    Something that was about to be written holds a secret; it was not written (replay K8).

    Attributes:
        rule: What the value looks like, or the name of the known secret; never the value.
    """

    fields: ClassVar[tuple[str, ...]] = ("path", "rule")  # type: ignore[assignment]

    def __init__(self, message: str = "", *, path: str = "$", rule: str = "") -> None:
        super().__init__(message, path=path)
        self.rule = rule


def known_in_environment(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the values of variables that are named like secrets, each with its variable's name (replay K6)."""
    variables = os.environ if environment is None else environment
    return {v: n for n, v in variables.items() if n.upper().endswith(SECRET_SUFFIXES) and len(v) >= MIN_KNOWN}


def redactor_for(
    redact: Redact | Sequence[RedactRule],
    secrets: Mapping[str, str] | None = None,
    *,
    allow_secrets: Iterable[str] = (),
    machine: Mapping[str, str] | None = None,
) -> Redactor:
    """
    Return the redactor of a journal.

    Args:
        redact: Which rules hold; a list of rules of your own holds beside those of ``"all"`` (replay K10).
        secrets: Further known values, each with the name that stands for it.
        allow_secrets: Hashes of values that look like secrets and are none (replay K9).
        machine: Texts that tell of this machine, each with its placeholder (replay K7); none by default.

    Raises:
        DataError: when *redact* is neither one of the three words nor a list of rules.
    """
    if isinstance(redact, str) and redact not in ("known", "all", "off"):
        msg = f"redact is 'known', 'all', 'off' or a list of rules, not {redact!r}"
        raise DataError(msg)
    if redact == "off":
        return Redactor({}, shapes=False)
    rules = Rules(given=() if isinstance(redact, str) else redact, allowed=allow_secrets, machine=machine or {})
    given = {v: n for v, n in (secrets or {}).items() if len(v) >= MIN_KNOWN}
    return Redactor({**known_in_environment(), **given}, shapes=redact != "known", rules=rules)


class Redactor:
    """
    Replaces secrets by ``<redacted:NAME>``, deterministically.

    Args:
        known: Secret values and the name that stands for each.
        shapes: Whether texts that look like keys, and members with telling names, are replaced too.
        rules: What users add and except.

    Attributes:
        shapes: As given.
        rules: As given.
        key: Equal for redactors with equal rules; it tells nothing about the values.
    """

    def __init__(self, known: Mapping[str, str], *, shapes: bool, rules: Rules = NO_RULES) -> None:
        self._known = {v: n for v, n in {**known, **rules.values}.items() if digest_of(v) not in rules.allowed}
        longest = sorted(self._known, key=len, reverse=True)
        self._written = {form: self._known[value] for value in longest for form in forms_of(value)}
        abridged = [
            rf"{re.escape(v[:2])}[\w-]*(?:\*{{3,}}|\.{{3,}}|\u2026)[\w*.-]*{re.escape(v[-4:])}"
            for v in longest
            if len(v) >= MIN_KNOWN
        ]
        self._abridged = re.compile("|".join(abridged)) if abridged else None
        self._machine = _machine_pattern(rules.machine)
        self._places = {
            form for place in rules.machine for form in (place, json.dumps(place, ensure_ascii=False)[1:-1])
        }
        self.shapes = shapes
        self.rules = rules
        is_off = not self._known and not shapes and rules == NO_RULES
        told = json.dumps([sorted(self._known.items()), shapes, rules.told_apart()])
        self.key = "" if is_off else hashlib.sha256(told.encode()).hexdigest()[:16]

    def __repr__(self) -> str:
        return f"Redactor({len(self._written)} forms, shapes={self.shapes})"

    def with_known(self, known: Mapping[str, str]) -> Redactor:
        """Return a redactor that replaces further *known* values."""
        return Redactor({**self._known, **known}, shapes=self.shapes, rules=self.rules) if known else self

    def suspicious(self, text: str) -> bool:
        """Return whether *text*, plain or JSON, may hold something to replace; cheap, and true too often."""
        if not self.key:
            return False
        rules = self.rules
        # Places and anchors of such rules belong to decoded values, and cannot be looked for in their JSON.
        if rules.functions or rules.fields or rules.patterns:
            return True
        if any(form in text for form in self._written) or any(place in text for place in self._places):
            return True
        if self._abridged is not None and self._abridged.search(text):
            return True
        return self.shapes and (looks_secret(text) or _may_tell(text))

    def text(self, text: str) -> str:
        """Return *text* with a placeholder for each secret in it."""
        for form, name in self._written.items():
            if form in text:
                text = text.replace(form, f"<redacted:{name}>")
        if self._abridged is not None:
            text = self._abridged.sub("<redacted:abridged>", text)
        for pattern in self.rules.patterns:
            text = pattern.regex.sub(lambda found, rule=pattern: self._put(found, rule.name), text)  # type: ignore[misc]
        if self._machine is not None:
            text = self._machine.sub(lambda found: self.rules.machine[found[0]], text)
        if not self.shapes or not looks_secret(text):
            return text
        return SHAPE.sub(lambda found: self._put(found, shape_name(found)), text)

    def binary(self, data: bytes) -> bytes:
        """Return *data*, which is no text, without known values; nothing else is looked for in it (replay K12)."""
        for form, name in self._written.items():
            data = data.replace(form.encode(), f"<redacted:{name}>".encode())
        return data

    def value(self, value: Any) -> Any:
        """
        Return a JSON value with every secret replaced, keys and JSON inside strings included.

        Raises:
            SecretFound: when a function of the user fails, since what it was to hide is not known then (replay K10).
        """
        for steps in self.rules.fields:
            value = _without_field(value, steps)
        return _asked(self.rules.functions, self._walk(value, 0))

    def seen(self, value: Any) -> Any:
        """Return *value* as a run may see it: without secrets, but with what tells of the machine it runs on."""
        return self._within.value(value)

    @cached_property
    def _within(self) -> Redactor:
        """The redactor of what stays in the process, on this machine."""
        if not self.rules.machine:
            return self
        return Redactor(self._known, shapes=self.shapes, rules=attrs.evolve(self.rules, machine={}))

    def json_text(self, text: str, level: int = 0) -> str:
        """Return *text* cleaned as the JSON that it is, or as text."""
        tree = json_in(text)
        if isinstance(tree, str):
            return self.text(text)
        clean = self._walk(tree, level) if level else self.value(tree)
        return text if clean == tree else json.dumps(clean, ensure_ascii=False, separators=(",", ":"))

    def member(self, name: str, value: Any, level: int = 0) -> Any:
        """Return the value of the member *name*, replaced when the name tells that it is secret."""
        return f"<redacted:{name}>" if self._telling(name, value) else self._walk(value, level)

    def secrets(self, text: str, level: int = 0) -> dict[str, str]:
        """Return each secret in *text* and its rule; JSON is looked into, since an escape may hide where a key begins."""
        found = {form: name for form, name in self._written.items() if form in text}
        if self._abridged is not None:
            found.update({match[0]: "abridged" for match in self._abridged.finditer(text)})
        for pattern in self.rules.patterns:
            found.update({match[0]: pattern.name for match in pattern.regex.finditer(text) if match[0]})
        if self.shapes and looks_secret(text):
            found.update({match[0]: shape_name(match) for match in SHAPE.finditer(text)})
            tree = json_in(text) if level < NESTED_JSON else text
            for inner in _strings(tree) if tree is not text else ():
                found.update(self.secrets(inner, level + 1))
        allowed = self.rules.allowed
        return {
            t: n for t, n in found.items() if not PLACEHOLDER.fullmatch(t) and not (allowed and digest_of(t) in allowed)
        }

    def findings(self, value: Any, place: str = "") -> Iterator[tuple[str, str]]:
        """Give the JSON pointer and the rule of each secret that is in a JSON value."""
        if isinstance(value, Mapping):
            for key, member in value.items():
                inner = f"{place}/{key}"
                if self._telling(key, member):
                    yield inner, key
                yield from ((f"{place} (a key)", rule) for rule in self.secrets(key).values())
                yield from self.findings(member, inner)
        elif isinstance(value, list | tuple):
            for index, member in enumerate(value):
                yield from self.findings(member, f"{place}/{index}")
        elif isinstance(value, str):
            yield from ((place, rule) for rule in self.secrets(value).values())

    def refuse(self, value: Any, where: str) -> None:
        """
        Raise unless *value* is free of secrets.

        Raises:
            SecretFound: naming *where* it stands and the rule, never the value.
        """
        for place, rule in self.findings(value):
            msg = (
                f"{where} holds a secret at {place or '/'} (rule {rule!r}); nothing was written. Keep it out of the run, "
                "or name it in secrets={value: name} so that it is replaced"
            )
            raise SecretFound(msg, path=place or "/", rule=rule)

    def _walk(self, value: Any, level: int) -> Any:
        if isinstance(value, Mapping):
            return {self.text(k): self.member(k, v, level) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self._walk(v, level) for v in value]
        if not isinstance(value, str):
            return value
        nested = level < NESTED_JSON and value[:1] in ("{", "[")
        return self.json_text(value, level + 1) if nested else self.text(value)

    def _put(self, found: re.Match[str], name: str) -> str:
        text = found[0]
        is_kept = (
            not text or PLACEHOLDER.fullmatch(text) or (self.rules.allowed and digest_of(text) in self.rules.allowed)
        )
        return text if is_kept else f"<redacted:{name}>"

    def _telling(self, name: str, value: Any) -> bool:
        if not self.shapes or not isinstance(value, str) or not value or value.startswith("<redacted:"):
            return False
        if re.sub(r"[-_]", "", name).lower() not in SECRET_MEMBERS:
            return False
        return not self.rules.allowed or digest_of(value) not in self.rules.allowed


def _machine_pattern(machine: Mapping[str, str]) -> re.Pattern[str] | None:
    """Return what finds the texts of *machine* where they stand alone or begin a path."""
    longest = sorted(machine, key=len, reverse=True)
    texts = "|".join(map(re.escape, longest))
    return re.compile(rf"(?<![\w.-])(?:{texts})(?![\w-]|\.\w)") if texts else None


def _without_field(value: Any, steps: tuple[str, ...], begun: Iterable[tuple[str, ...]] = ()) -> Any:
    """Return *value* with a placeholder at each place that *steps* lead to; *begun* are the ends of those under way."""
    if not isinstance(value, Mapping | list | tuple):
        return value
    members = value.items() if isinstance(value, Mapping) else enumerate(value)
    made: dict[Any, Any] = {}
    for key, member in members:
        left = {end[1:] for end in (steps, *begun) if end[0] in ("*", str(key))}
        made[key] = f"<redacted:{steps[-1]}>" if () in left else _without_field(member, steps, left)
    return made if isinstance(value, Mapping) else [*made.values()]


def _asked(functions: Iterable[Callable[[Any], Any]], value: Any) -> Any:
    for function in functions:
        name = getattr(function, "__qualname__", type(function).__qualname__)
        try:
            value = function(value)
        except Exception as error:  # noqa: BLE001 - it is told without what it holds
            msg = f"the redact function {name!r} raised {type(error).__name__}; nothing was written"
            raise SecretFound(msg, rule=name) from None  # what it raised may quote the value
    return value


def forms_of(value: str) -> Iterator[str]:
    """Return the forms in which a known secret may stand in a text: plain, quoted, escaped, base64."""
    yield value
    yield quote(value, safe="")
    yield json.dumps(value)[1:-1]
    yield json.dumps(value, ensure_ascii=False)[1:-1]
    yield base64.b64encode(value.encode()).decode()


def looks_secret(text: str) -> bool:
    """Return whether *text* may hold a secret by its shape; a cheap test before the real one."""
    return any(hint in text for hint in SHAPE_HINTS)


def _may_tell(text: str) -> bool:
    """Return whether *text* may hold a member with a telling name."""
    lower = text.lower()
    if any(word in lower for word in TELLING_WORDS):
        return True
    return any(
        f"{first}{between}{last}" in lower
        for last, firsts in TELLING_PAIRS.items()
        if last in lower
        for first in firsts
        for between in ("", "-", "_")
    )


def shape_name(found: re.Match[str]) -> str:
    """Return the name of the shape that was found."""
    return str(found.lastgroup).replace("_", "-")


def json_in(text: str) -> Any:
    """Return the JSON object or array that *text* holds, else the text."""
    try:
        return json.loads(text) if text[:1] in ("{", "[") else text
    except (ValueError, RecursionError):
        return text


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, member in value.items():
            yield key
            yield from _strings(member)
    elif isinstance(value, list):
        for member in value:
            yield from _strings(member)
    elif isinstance(value, str):
        yield value
