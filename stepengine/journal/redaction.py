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
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, Literal, TypeAlias
from urllib.parse import quote

from stepengine.errors import DataError

__all__ = ("SHAPE", "SHAPE_HINTS", "Redact", "Redactor", "SecretFound", "known_in_environment", "redactor_for")

Redact: TypeAlias = Literal["known", "all", "off"]
"""``"known"`` replaces known values only, ``"all"`` shapes and telling members too, ``"off"`` nothing (replay K13)."""

SECRET_SUFFIXES = ("_KEY", "_TOKEN", "_SECRET", "_PASSWORD")
SECRET_MEMBERS = frozenset({
    "accesstoken", "apikey", "authorization", "clientsecret", "cookie", "idtoken", "passwd", "password", "privatekey",
    "refreshtoken", "secret",
})  # fmt: skip
MIN_KNOWN = 8
NESTED_JSON = 3

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
MEMBER_HINT = re.compile(
    r"(?i)(?:access|refresh|id)[-_]?token|api[-_]?key|private[-_]?key|secret|passw|authoriz|cookie"
)


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


def redactor_for(redact: Redact, secrets: Mapping[str, str] | None = None) -> Redactor:
    """
    Return the redactor of a journal.

    Args:
        redact: Which rules hold.
        secrets: Further known values, each with the name that stands for it.

    Raises:
        DataError: when *redact* is none of the three words.
    """
    if redact not in ("known", "all", "off"):
        msg = f"redact is 'known', 'all' or 'off', not {redact!r}"
        raise DataError(msg)
    if redact == "off":
        return Redactor({}, shapes=False)
    given = {v: n for v, n in (secrets or {}).items() if len(v) >= MIN_KNOWN}
    return Redactor({**known_in_environment(), **given}, shapes=redact == "all")


class Redactor:
    """
    Replaces secrets by ``<redacted:NAME>``, deterministically.

    Args:
        known: Secret values and the name that stands for each.
        shapes: Whether texts that look like keys, and members with telling names, are replaced too.

    Attributes:
        shapes: As given.
        key: Equal for redactors with equal rules; it tells nothing about the values.
    """

    def __init__(self, known: Mapping[str, str], *, shapes: bool) -> None:
        longest = sorted(known, key=len, reverse=True)
        self._written = {form: known[value] for value in longest for form in forms_of(value)}
        abridged = [rf"{re.escape(v[:2])}[\w-]*(?:\*{{3,}}|\.{{3,}}|\u2026)[\w*.-]*{re.escape(v[-4:])}" for v in known]
        self._abridged = re.compile("|".join(abridged)) if abridged else None
        self.shapes = shapes
        rules = json.dumps([sorted(known.items()), shapes])
        self.key = hashlib.sha256(rules.encode()).hexdigest()[:16] if known or shapes else ""

    def __repr__(self) -> str:
        return f"Redactor({len(self._written)} forms, shapes={self.shapes})"

    def suspicious(self, text: str) -> bool:
        """Return whether *text*, plain or JSON, may hold something to replace; cheap, and true too often."""
        if not self.key:
            return False
        if any(form in text for form in self._written):
            return True
        if self._abridged is not None and self._abridged.search(text):
            return True
        return self.shapes and (looks_secret(text) or MEMBER_HINT.search(text) is not None)

    def text(self, text: str) -> str:
        """Return *text* with a placeholder for each secret in it."""
        for form, name in self._written.items():
            if form in text:
                text = text.replace(form, f"<redacted:{name}>")
        if self._abridged is not None:
            text = self._abridged.sub("<redacted:abridged>", text)
        if not self.shapes or not looks_secret(text):
            return text
        return SHAPE.sub(lambda found: f"<redacted:{shape_name(found)}>", text)

    def value(self, value: Any, level: int = 0) -> Any:
        """Return a JSON value with every secret replaced, keys and JSON inside strings included."""
        if isinstance(value, Mapping):
            return {self.text(k): self._member(k, v, level) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(v, level) for v in value]
        if not isinstance(value, str):
            return value
        nested = level < NESTED_JSON and value[:1] in ("{", "[")
        return self._nested(value, level + 1) if nested else self.text(value)

    def findings(self, value: Any, place: str = "") -> Iterator[tuple[str, str]]:
        """Give the JSON pointer and the rule of each secret that is in a JSON value."""
        if isinstance(value, Mapping):
            for key, member in value.items():
                inner = f"{place}/{key}"
                if self._telling(key, member):
                    yield inner, key
                yield from ((f"{place} (a key)", rule) for rule in self._rules(key))
                yield from self.findings(member, inner)
        elif isinstance(value, list | tuple):
            for index, member in enumerate(value):
                yield from self.findings(member, f"{place}/{index}")
        elif isinstance(value, str):
            yield from ((place, rule) for rule in self._rules(value))

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

    def _rules(self, text: str) -> Iterable[str]:
        return self._secrets(text).values()

    def _secrets(self, text: str, level: int = 0) -> dict[str, str]:
        """Return each secret in *text* and its rule; JSON is looked into, since an escape may hide where a key begins."""
        found = {form: name for form, name in self._written.items() if form in text}
        if self._abridged is not None:
            found.update({match[0]: "abridged" for match in self._abridged.finditer(text)})
        if self.shapes and looks_secret(text):
            found.update({match[0]: shape_name(match) for match in SHAPE.finditer(text)})
            tree = json_in(text) if level < NESTED_JSON else text
            for inner in _strings(tree) if tree is not text else ():
                found.update(self._secrets(inner, level + 1))
        return found

    def _nested(self, text: str, level: int) -> str:
        tree = json_in(text)
        if isinstance(tree, str):
            return self.text(text)
        clean = self.value(tree, level)
        return text if clean == tree else json.dumps(clean, ensure_ascii=False, separators=(",", ":"))

    def _member(self, name: str, value: Any, level: int) -> Any:
        return f"<redacted:{name}>" if self._telling(name, value) else self.value(value, level)

    def _telling(self, name: str, value: Any) -> bool:
        if not self.shapes or not isinstance(value, str) or not value or value.startswith("<redacted:"):
            return False
        return re.sub(r"[-_]", "", name).lower() in SECRET_MEMBERS


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
