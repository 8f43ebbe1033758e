"""
Secrets, and their replacement in everything that is written.

Journals, logs, errors, events, cassettes and ``scan`` share one list of secrets and one redactor. It has two kinds of rules.
*Known* values are replaced wherever they appear, in every encoding of ``data/spellings.py``. *Shapes* are texts that look like keys,
and members whose names indicate a secret. Redacting a redacted value changes nothing, so a recording and its replay agree for
any key.

Pure: the environment is passed in as a value. The only state is ``GIVEN``, the secrets registered in this process. The time of every
search is proportional to the length of its text: no expression here backtracks.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from bisect import bisect_left
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from functools import cache, cached_property, lru_cache, partial
from itertools import count
from operator import is_
from typing import Any, Literal, NamedTuple, TypeAlias

import attrs
from attrs import frozen

from stepengine.data.json import JsonDict, JsonList, compact, freeze, make_object_with_unique_keys
from stepengine.data.messages import Message
from stepengine.data.secret_names import (
    VALUE_WORDS,
    Place,
    decode_json_levels,
    is_secret,
    is_secret_name,
    is_text_token_member,
    looks_random,
    may_differ_between_machines,
    may_end_secret_name,
    may_name_secret_member,
)
from stepengine.data.spellings import Spelling, make_spellings, make_truncatable_pattern
from stepengine.data.transcript import Transcript
from stepengine.errors import DataError, SecretFound

Redact: TypeAlias = Literal["known", "all", "off"]
"""``"known"`` replaces only known values, ``"all"`` also shapes and secret members, ``"off"`` nothing."""

# --- secrets ----------------------------------------------------------------------------------------------------------

ESCAPED_BYTES = re.compile(r"(?:%[0-9A-Fa-f]{2})+")
PASSWORD_IN_ADDRESS = re.compile(r"://[^\s/?#:@]*:([^\s/?#@]+)@")
PASSWORD_SHAPE = re.compile(r"""://[^\s/?#:@"'<>(){}\[\]|\\^`]*:([^\s/?#@"'<>(){}\[\]|\\^`,;]+)@""")
"""``PASSWORD_IN_ADDRESS`` within any text: it ends at characters that no address contains, and at the punctuation of lists and prose."""
PASSWORD_WITH_AT = re.compile(r"://[^\s/?#:@]*:([^\s/?#]+)@")
"""Most clients read the last ``@`` as the end of a password."""
PASSWORD_WITHOUT_SCHEME = re.compile(r"[^\s/?#:@]+:([^\s/?#@]+)@(?:[\w.-]+:[0-9]|\w+\()")
"""A password in an address such as ``me:password@proxy:3128`` or ``me:password@tcp(db)/name``: the host has a port or parentheses."""
USER_IN_ADDRESS = re.compile(r"""://([^\s/?#:@"'<>(){}\[\]|\\^`]{16,})@""")
"""A user name in an address; a random one is a token, as in the address of a repository."""
OPTION = re.compile(
    r"""(?:^|(?<=[\s;?&]))-{0,2}([A-Za-z][\w.-]{0,60})=(?:'((?:[^'\\]|\\.)*+)'|"((?:[^"\\]|\\.)*+)"|\{([^}]*)\}|([^\s;&]+))"""
)
"""A setting in the query of an address, in a line such as ``host=db password=...`` or ``Server=db;Password=...``, or in a command."""
MIN_KNOWN = 8
ORDINARY_KEYS = frozenset({
    "dummy-key", "fake-key", "lm-studio", "local-key", "no-key-needed", "not-needed", "not-required", "placeholder",
    "redacted", "test-key",
})  # fmt: skip
"""Placeholders for servers that accept any key: replacing these words would change unrelated texts."""

MAX_CLEAN_CHARS, MAX_CLEAN_TEXTS = 64, 1_024
"""The limits of ``SecretIndex.clean_texts``: the length of a text in characters, and the number of texts."""
NESTED_JSON = 3
READ_AHEAD_CHARS = 8_000
"""How far a text is read after the displayed part, so that a secret at its end is recognized."""
MAX_DEPTH = 200
REDACTED = re.compile(r"<redacted:([^<>]*)>")
PLACEHOLDER = re.compile(rf"{REDACTED.pattern}|<(?:home|cwd|tmp|host|user)>")

QUERY_PAIR = re.compile(r"""(?:(?<=[?&#])|(?<=&amp;)|(?<=\\u0026))([\w.~%\[\]-]{1,100})=([^&#\s"'<>;,\\`]+)""")
"""A parameter of an address, also if the address is quoted in HTML or source code."""
NESTED_PAIR = re.compile(
    r"""(?:(?<=%3f)|(?<=%26)|(?<=%23)|(?<=253f)|(?<=2526)|(?<=2523))([\w.~\[\]-]{1,100})%(?:25){0,3}3d"""
    r"""((?:[^&#\s"'<>;,\\`%]|%(?!(?:25){0,3}2[36])[0-9a-f]{2})+)""",
    re.IGNORECASE,
)
"""A parameter of an address within the value of another parameter."""
JSON_TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)|[{}\[\],:]|[^\s"{}\[\],:]+', re.DOTALL)
"""A piece of JSON, or of a text that is nearly JSON."""
NEARLY_JSON = re.compile(
    r"\s*+(?:\)\]\}',?|for\s*+\(;;\);|while\s*+\(1\);|data:|(?:(?:const|let|var)\s++)?[\w.$]++\s*+[(=])?\s*+[{\[]"
)
"""The start of a text that resembles JSON. It may be truncated, too deep, have duplicate names, or be part of a call or assignment.

Prefixes against execution in pages are allowed. A page that quotes JSON does not match."""
OPENING, CLOSING = ("{", "["), ("}", "]")
JSON_CHARACTER = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\.|.", re.DOTALL
)
"""A character of a JSON string, as spelled there."""
JSON_NUMBER = re.compile(r"-?[0-9][0-9.eE+-]{5,}")
"""A number that is a secret by its name has at least six digits: shorter ones are counts."""

_BEFORE, _AFTER = r"(?<![A-Za-z0-9+/_-])", r"(?![A-Za-z0-9+/_-])"
# The lookbehind contains every character of the body, so a search starts once in each run and reads no character twice.
SHAPES = (
    # Words with hyphens between them have no digit. Neither has one of 1,500 tokens of ours, which are recognized by their length.
    (
        "provider-key",
        rf"{_BEFORE}[spr]k-(?:(?=[A-Za-z_-]*[0-9])[A-Za-z0-9_-]{{16,}}|stepengine-[A-Za-z0-9_-]{{43}}){_AFTER}",
    ),
    ("groq-key", rf"{_BEFORE}gsk_[A-Za-z0-9]{{20,}}{_AFTER}"),
    ("xai-key", rf"{_BEFORE}xai-[A-Za-z0-9]{{20,}}{_AFTER}"),
    ("cerebras-key", rf"{_BEFORE}csk-[A-Za-z0-9]{{20,}}{_AFTER}"),
    ("fireworks-key", rf"{_BEFORE}fw_[A-Za-z0-9]{{20,}}{_AFTER}"),
    ("huggingface-token", rf"{_BEFORE}hf_[A-Za-z0-9]{{20,}}{_AFTER}"),
    ("nvidia-key", rf"{_BEFORE}nvapi-[A-Za-z0-9_-]{{20,}}{_AFTER}"),
    ("perplexity-key", rf"{_BEFORE}pplx-[A-Za-z0-9]{{20,}}{_AFTER}"),
    ("replicate-token", rf"{_BEFORE}r8_[A-Za-z0-9]{{20,}}{_AFTER}"),
    ("google-key", rf"{_BEFORE}AIza[A-Za-z0-9_-]{{35}}{_AFTER}"),
    ("github-token", rf"{_BEFORE}(?:gh[pousr]_[A-Za-z0-9]{{36}}|github_pat_[A-Za-z0-9_]{{22,}}){_AFTER}"),
    ("slack-token", rf"{_BEFORE}xox[abprs]-[A-Za-z0-9-]{{10,}}{_AFTER}"),
    (
        "slack-webhook",
        r"(?:(?<=hooks\.slack\.com/services/)|(?<=hooks\.slack\.com/workflows/)|(?<=hooks\.slack\.com/triggers/))[A-Za-z0-9/_-]{20,}",
    ),
    ("discord-webhook", r"(?<=/api/webhooks/)[0-9]{15,}/[A-Za-z0-9_-]{40,}"),
    ("telegram-token", r"(?<=/bot)[0-9]{6,}:[A-Za-z0-9_-]{30,}"),
    ("aws-key", rf"{_BEFORE}A(?:KI|SI)A[A-Z0-9]{{16}}{_AFTER}"),
    ("jwt", rf"{_BEFORE}eyJ[A-Za-z0-9_-]{{8,}}\.eyJ[A-Za-z0-9_-]{{8,}}(?:\.[A-Za-z0-9_-]*)?"),
    ("bearer", r"(?i:bearer) +[A-Za-z0-9._~+/=-]{20,}"),
)
# Begins and ends are searched separately: one expression would read the rest of the text for every begin without an end.
PEM_BEGIN = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----")
PEM_END = re.compile(r"-----END [A-Z ]*PRIVATE KEY(?: BLOCK)?-----")
# Cheap substring tests: most texts contain none of these and are not searched.
SHAPE_HINTS = (
    "sk-", "pk-", "rk-", "gsk_", "xai-", "AIza", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "xox", "AKIA", "ASIA",
    "fw_", "hf_", "nvapi-", "pplx-", "r8_", "eyJ", "-----BEGIN", "earer ", "EARER ",
    "hooks.slack.com/", "/api/webhooks/", "/bot",
)  # fmt: skip
CORE = "pydantic_core"
WORTH_LOADING = 50_000_000
"""Characters times texts that are searched one by one before an engine for all texts is loaded; both take 30 ms."""
MAX_TEXTS_AT_ONCE = 64
"""The most texts in one expression. A server may receive a key from each user, and a new key rebuilds the expression."""
# The replacement for the middle of a key when providers show it, and the characters before and after it.
MASK = re.compile(r"\*{3,}|\.{3,}|\u2026")
MASKS = ("***", "...", "\u2026")
BEFORE_MASK = re.compile(r"[\w-]*")
AFTER_MASK = re.compile(r"[\w*.-]*")
VISIBLE_START, VISIBLE_END = 2, 4

# In JSON and source code, an escape such as \n puts a letter directly before a key and hides its start. It is replaced by
# blanks of the same length, so that all positions stay the same.
ESCAPE = re.compile(r"\\+[nrt\"/\\]")


class Span(NamedTuple):
    """The position of a secret in a text, from *start* to *end*, and the name for its placeholder."""

    start: int
    end: int
    name: str


# --- rules of users ---------------------------------------------------------------------------------------------------


@frozen
class RedactHeader:
    """A header that is not recorded, in addition to the built-in list. Names are compared without case."""

    name: str


@frozen
class RedactField:
    """
    A JSON member whose value is replaced.

    Attributes:
        pointer: A pattern of member names, such as ``"/tools/*/env"``; ``*`` matches any one member or index. It matches at
            any depth, and ``~0`` and ``~1`` have no special meaning.
    """

    pointer: str

    def __attrs_post_init__(self) -> None:
        if not self.path_parts:
            msg = f"the pointer of a RedactField must point to a member, such as '/tools/*/env', not {self.pointer!r}"
            raise DataError(msg)

    @property
    def path_parts(self) -> tuple[str, ...]:
        """The non-empty parts of the pointer between slashes; ``*`` matches any member or index."""
        return tuple([part for part in self.pointer.split("/") if part])


def _compile_regex(value: str | re.Pattern[str]) -> re.Pattern[str]:
    """Return the compiled regex; raise ``DataError`` for an invalid one."""
    try:
        return re.compile(value)
    except (re.error, TypeError) as error:
        msg = f"the regex of a RedactPattern is not valid: {error}"
        raise DataError(msg) from error


@frozen
class RedactPattern:
    """
    Text that is replaced wherever a regular expression finds it.

    Attributes:
        regex: The expression. It is applied to untrusted texts without a time limit: write one that cannot backtrack far.
        name: The name in the placeholder.
    """

    regex: re.Pattern[str] = attrs.field(converter=_compile_regex)
    name: str = "pattern"


@frozen(repr=False)
class RedactValue:
    """
    A secret value, replaced wherever it appears, in plain, quoted, escaped and base64 form.

    Attributes:
        text: The value; at least one character.
        name: The name in the placeholder.
    """

    text: str
    name: str = "value"

    def __attrs_post_init__(self) -> None:
        text: object = self.text
        if not isinstance(text, str) or not text:
            msg = "the text of a RedactValue must be a non-empty string"
            raise DataError(msg)

    def __repr__(self) -> str:
        return f"RedactValue(<redacted:{self.name}>)"


RedactRule: TypeAlias = "RedactHeader | RedactField | RedactPattern | RedactValue | Callable[[Any], Any]"
"""One rule of a user; a function receives a JSON value and returns it without secrets."""


def find_redacted_names(text: str) -> tuple[str, ...]:
    """Return the names of the secrets that were redacted in *text*, plain or JSON, each once and sorted."""
    return tuple(sorted({found[1] for found in REDACTED.finditer(text)}))


def digest_secret(value: str) -> str:
    """Return the entry of ``allow_secrets`` for *value*: ``"sha256:"`` and 64 hexadecimal digits."""
    return f"sha256:{hashlib.sha256(value.encode(errors='surrogatepass')).hexdigest()}"


def _validate_digests(values: Iterable[str]) -> frozenset[str]:
    """Return digests as a set; raise ``DataError`` for one that is not ``sha256:`` and 64 hexadecimal digits."""
    digests = frozenset((values,) if isinstance(values, str) else values)
    for digest in digests:
        if not re.fullmatch(r"sha256:[0-9a-f]{64}", digest):
            msg = (
                "allow_secrets must contain hashes such as 'sha256:<64 hexadecimal digits>', not the secrets themselves"
            )
            raise DataError(msg)
    return digests


def _to_rule_tuple(rules: Iterable[RedactRule]) -> tuple[RedactRule, ...]:
    return tuple(rules)


@frozen(kw_only=True)
class RedactionRules:
    """
    The rules that apply in addition to the built-in ones.

    Attributes:
        given: Rules of the user.
        allowed: Hashes of values that look like secrets but are not.
        machine: Texts that identify this machine, each with its placeholder.
    """

    given: tuple[RedactRule, ...] = attrs.field(default=(), converter=_to_rule_tuple)
    allowed: frozenset[str] = attrs.field(default=frozenset(), converter=_validate_digests)
    machine: Mapping[str, str] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        for rule in self.given:
            if not isinstance(rule, RedactHeader | RedactField | RedactPattern | RedactValue) and (
                isinstance(rule, type) or not callable(rule)
            ):
                msg = f"redact must contain RedactHeader, RedactField, RedactPattern, RedactValue or functions, not {rule!r}"
                raise DataError(msg)

    @cached_property
    def headers(self) -> frozenset[str]:
        """Names of headers that are omitted, in lower case."""
        return frozenset(rule.name.lower() for rule in self.given if isinstance(rule, RedactHeader))

    @cached_property
    def fields(self) -> tuple[tuple[str, ...], ...]:
        """The parts of each pointer to a redacted member."""
        return tuple([rule.path_parts for rule in self.given if isinstance(rule, RedactField)])

    @cached_property
    def patterns(self) -> tuple[RedactPattern, ...]:
        """The pattern rules."""
        return tuple([rule for rule in self.given if isinstance(rule, RedactPattern)])

    @cached_property
    def values(self) -> dict[str, str]:
        """The secret values, each with its name."""
        return {rule.text: rule.name for rule in self.given if isinstance(rule, RedactValue)}

    @cached_property
    def functions(self) -> tuple[Callable[[Any], Any], ...]:
        """The redaction functions."""
        return tuple(
            [
                rule
                for rule in self.given
                if not isinstance(rule, RedactHeader | RedactField | RedactPattern | RedactValue)
            ]
        )

    def make_fingerprint(self) -> list[Any]:
        """Return JSON that is equal for rule sets with equal rules; secret values are hashed."""
        return [
            [repr(rule) if not isinstance(rule, RedactValue) else digest_secret(rule.text) for rule in self.given],
            sorted(self.allowed),
            sorted(self.machine.items()),
        ]


NO_RULES = RedactionRules()


# --- known values ---------------------------------------------------------------------------------------------------


def find_environment_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the secret values and passwords of at least 8 characters in environment variables, each with its variable's name."""
    # Programs remove a line end and quotes around a value, as files and templates leave them.
    known = {
        value.strip().strip("\"'"): name for name, value in environment.items() if is_secret_name(name, "variable")
    }
    for name, value in environment.items():
        for password in _find_passwords(value):
            known.setdefault(password, name)
    return {value: name for value, name in known.items() if len(value) >= MIN_KNOWN}


def remove_secret_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables without those that have a secret name or contain a password."""
    return {
        name: value
        for name, value in environment.items()
        if not is_secret_name(name, "variable") and not any(True for _ in _find_passwords(value))
    }


def _find_passwords(text: str) -> Iterator[str]:
    """Yield the passwords in the addresses, options and JSON of *text*, as written and decoded."""
    kinds = (PASSWORD_IN_ADDRESS, PASSWORD_WITH_AT) if "://" in text else ()
    found = [match[1] for kind in kinds for match in kind.finditer(text)]
    if (address := PASSWORD_WITHOUT_SCHEME.match(text)) is not None:
        found.append(address[1])
    found += [match[1] for match in USER_IN_ADDRESS.finditer(text) if looks_random(match[1])]
    for option in OPTION.finditer(text) if "=" in text else ():
        name, value = option[1], next(filter(None, option.groups()[1:]), "")
        # At the start of a line, PWD is the name of a folder.
        is_folder = name.lower() == "pwd" and text[: option.start(1)][-1:] not in {";", "?", "&"}
        if not is_folder and may_differ_between_machines(name, value, "parameter"):
            found.append(value)
    for password in found:
        yield password
        yield _decode_percent_escapes(password)
    yield from [value for _, value in find_secret_members(parse_if_json(text.strip()))]


def find_secret_members(tree: object) -> Iterator[tuple[str, str]]:
    """Yield name and value, as text, of each member at any depth of a JSON value that its name marks as a credential."""
    pending = [tree]
    for one in pending:  # grows meanwhile
        pending += one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
        for name, value in one.items() if isinstance(one, dict) else ():
            if type(value) in (str, int) and may_differ_between_machines(name, str(value), "member"):
                yield name, str(value)


def _decode_percent_escapes(text: str) -> str:
    """Return *text* with its percent-encoded characters decoded."""
    return ESCAPED_BYTES.sub(lambda run: bytes.fromhex(run[0].replace("%", "")).decode(errors="replace"), text)


class KnownSecrets:
    """
    A registry of secret values, filled while the process runs.

    A registered value stays known, because it may be written long after its use.

    Attributes:
        count: The number of changes so far; caches compare it.
        names: The values, each with the name for its placeholder.
        spellings: The spellings of the values, by their text.
    """

    def __init__(self) -> None:
        self.count = 0
        self.names: dict[str, str] = {}
        self.spellings: dict[str, Spelling] = {}

    def __repr__(self) -> str:
        return f"<KnownSecrets: {len(self.names)} values>"

    def add(self, value: str, name: str, environment: Mapping[str, str] | None = None) -> None:
        """
        Register *value* as secret, unless it is already known, shorter than 8 characters, or a common placeholder.

        Args:
            value: The secret.
            name: The name for its placeholder, unless a variable of *environment* has the same value.
            environment: The variables to search; one with a secret name is preferred.
        """
        value = value.strip()
        if value in self.names or len(value) < MIN_KNOWN or value.lower() in ORDINARY_KEYS:
            return
        named = [n for n, v in (environment or {}).items() if v.strip() == value]
        named.sort(key=lambda variable: (not is_secret_name(variable, "variable"), variable))
        self._store(value, named[0] if named else name)

    def add_from_environment(self, environment: Mapping[str, str]) -> None:
        """Register the secret values and passwords of an environment; its names replace earlier ones."""
        for value, name in find_environment_secrets(environment).items():
            if self.names.get(value) != name:
                self._store(value, name)

    def _store(self, value: str, name: str) -> None:
        """Store a value with its spellings and name, and count it."""
        self.names = {**self.names, value: name}
        self.spellings = {**self.spellings, **_make_spellings_by_text({value: name})}
        self.count += 1  # last: a redactor that loads the secrets in another thread meanwhile loads them again

    def clear(self) -> None:
        """Remove all values, for tests that share a process."""
        self.names, self.spellings = {}, {}
        self.count += 1


GIVEN = KnownSecrets()
"""The secrets of this process: all keys that it used for a provider, from any source, and those of its environment."""


class SecretIndex:
    """
    Finds known secrets in texts: in all spellings, and masked as providers show them.

    Args:
        spellings: The spellings to find.
        values: The values that are found if masked.
        others: Further texts for ``may_hold``.

    Attributes:
        spellings: As passed.
        may_hold_value: A function that returns False if a text cannot contain a spelling.
        may_hold: A function that returns False if a text can contain no spelling, no masked value and none of *others*.
        clean_texts: A cache of short texts without secrets, which the users of this index fill.
    """

    def __init__(self, spellings: Iterable[Spelling], values: Iterable[str], others: Iterable[str]) -> None:
        self.spellings = tuple(spellings)
        self._ends = sorted({(v[:VISIBLE_START], v[-VISIBLE_END:]) for v in values if len(v) >= MIN_KNOWN})
        anchors = tuple(dict.fromkeys([one.anchor for one in self.spellings]))
        self.may_hold_value = make_text_finder(anchors)
        # The visible ends of a masked value are common in texts, so the mask is searched first.
        self.may_hold = make_text_finder((*anchors, *others, *(MASKS if self._ends else ())))
        self.clean_texts: set[str] = set()

    @cached_property
    def start_pattern(self) -> re.Pattern[str]:
        """The expression for masks and for the starts of spellings, also those cut off by the end of the text."""
        starts = {make_truncatable_pattern(one.parts[:3], "") for one in self.spellings}
        return re.compile("|".join([*map(re.escape, MASKS), *sorted(starts)]))

    def find(self, text: str) -> list[Span]:
        """Return the positions of the known values in *text*, followed by those of the masked values; they may overlap."""
        return [*self.find_values(text), *self.find_masked_values(text)]

    def find_values(self, text: str) -> Iterator[Span]:
        """Yield the positions of the known values in *text*, in order, except those within a placeholder."""
        if not self.may_hold_value(text):
            return
        found = sorted(
            [one for one in self.spellings if one.anchor in text], key=lambda one: len(one.text), reverse=True
        )
        for match in _compile_spelling_pattern(tuple(found)).finditer(text):
            if match.lastindex is not None:
                yield Span(*match.span(), found[match.lastindex - 1].name)

    def find_masked_values(self, text: str) -> Iterator[Span]:
        """
        Yield the positions of known values whose middle is masked, as providers show them: ``sk-...abcd``.

        The text directly before each mask is read once. The last position of an ending is searched once for each run of
        characters that may follow a mask.
        """
        # Required by reliability:R11.
        if not self._ends or not _has_mask(text):
            return
        done = run_end = 0
        last: dict[str, int] = {}
        for mask in MASK.finditer(text):
            begin, end = mask.span()
            before = _get_match_end(BEFORE_MASK, text[done:begin][::-1])
            first = max(done, begin - before - VISIBLE_START)
            if end > run_end:
                run_end = _get_match_end(AFTER_MASK, text, end)
                last = {}
            for opening, ending in self._ends:
                start = text.find(opening, first, begin)
                if start < 0:
                    continue
                if ending not in last:
                    last[ending] = text.rfind(ending, end, run_end + VISIBLE_END)
                if last[ending] >= end:
                    yield Span(start, last[ending] + VISIBLE_END, "abridged")
                    done = last[ending] + VISIBLE_END
                    break
            done = max(done, end)

    def get_incomplete_value_start(self, text: str) -> int:
        """Return the position where a known value starts that the end of *text* cuts off; the length of *text* if there is none."""
        cut = len(text)
        for one in self.spellings:
            found = one.truncated_pattern.search(text, max(0, len(text) - one.max_match_chars))
            if found is not None:
                cut = min(cut, found.start())
        return cut


# --- redaction --------------------------------------------------------------------------------------------------------


def make_redactor(
    redact: Redact | Sequence[RedactRule],
    environment: Mapping[str, str],
    secrets: Mapping[str, str] | None = None,
    *,
    allow_secrets: Iterable[str] = (),
    machine: Mapping[str, str] | None = None,
) -> Redactor:
    """
    Return the redactor for the rules *redact*, which also replaces the secrets of *environment* and of this process.

    Args:
        redact: The rules that apply; a list of your own rules is added to those of ``"all"``.
        environment: The variables; those with secret names are known values.
        secrets: Further known values, each with the name for its placeholder.
        allow_secrets: Hashes of values that look like secrets but are not.
        machine: Texts that identify this machine, each with its placeholder; none by default.

    Raises:
        DataError: if *redact* is neither ``"known"``, ``"all"`` or ``"off"`` nor a list of rules.
    """
    if isinstance(redact, str) and redact not in ("known", "all", "off"):
        msg = f"redact must be 'known', 'all', 'off' or a list of rules, not {redact!r}"
        raise DataError(msg)
    if redact == "off":
        return Redactor({}, shapes=False)
    own = () if isinstance(redact, str) else tuple(redact)
    rules = (
        RedactionRules(given=own, allowed=allow_secrets, machine=machine or {})
        if own or allow_secrets or machine
        else NO_RULES
    )
    given = {v: n for v, n in (secrets or {}).items() if len(v) >= MIN_KNOWN}
    return Redactor(
        {**find_environment_secrets(environment), **given}, shapes=redact != "known", rules=rules, keys=GIVEN
    )


class TextRedactor:
    """
    Replaces the secrets in texts; the base of ``Redactor``, which has the same arguments.

    Attributes:
        shapes: As passed.
        rules: As passed.
    """

    def __init__(
        self,
        known: Mapping[str, str],
        *,
        shapes: bool,
        rules: RedactionRules = NO_RULES,
        keys: KnownSecrets | None = None,
        mark: Callable[[str], str] | None = None,
    ) -> None:
        self._mark = mark
        self._own = {v: n for v, n in {**known, **rules.values}.items() if digest_secret(v) not in rules.allowed}
        self._own_spellings = _make_spellings_by_text(
            {v: self._own[v] for v in sorted(self._own, key=len, reverse=True)}
        )
        self._configured: Mapping[str, str] = self._own
        self._keys = keys
        self._machine = _compile_machine_pattern(rules.machine)
        self._places = {
            form for place in rules.machine for form in (place, json.dumps(place, ensure_ascii=False)[1:-1])
        }
        self.shapes = shapes
        self.rules = rules
        self._needs_whole_texts = shapes or self._machine is not None or bool(rules.patterns)
        # By identity first: the comparison is generated on its first use, which would add half a millisecond to a start.
        is_off = not self._own and not shapes and (rules is NO_RULES or rules == NO_RULES)
        identity = json.dumps([sorted(self._own.items()), shapes, rules.make_fingerprint()])
        self._key = "" if is_off else hashlib.sha256(identity.encode()).hexdigest()[:16]
        self._count = 0 if keys is None else keys.count
        self._index = self._build_index()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self._index.spellings)} texts, shapes={self.shapes})"

    @property
    def cache_key(self) -> str:
        """Equal for redactors with the same results now, ``""`` if nothing is redacted; it does not reveal the values."""
        keys = self._keys
        return f"{self._key}-{keys.count}" if keys is not None and keys.names else self._key

    @property
    def index(self) -> SecretIndex:
        """The index of all values that are known now, rebuilt after new values were registered."""
        keys = self._keys
        if keys is not None and keys.count != self._count:
            count = keys.count
            self._index = self._build_index()
            self._count = count
        return self._index

    def _build_index(self) -> SecretIndex:
        """Return the index of this redactor's own values and of the registered ones."""
        keys = self._keys
        if keys is None:
            return SecretIndex(self._own_spellings.values(), self._own, self._places)
        allowed = self.rules.allowed
        added = {v: n for v, n in keys.names.items() if v not in self._own and digest_secret(v) not in allowed}
        spellings = keys.spellings if len(added) == len(keys.names) else _make_spellings_by_text(added)
        return SecretIndex({**spellings, **self._own_spellings}.values(), (*added, *self._own), self._places)

    def may_contain_secret(self, text: str) -> bool:
        """Return whether *text*, plain or JSON, may contain a secret; a fast test that may return True for a clean text."""
        keys = self._keys
        # As `index`, without a call for each text.
        index = self._index if keys is None or keys.count == self._count else self.index
        if not self._key and not index.spellings:
            return False
        rules = self.rules
        # These rules apply to decoded values, so their JSON cannot be tested.
        if rules.functions or rules.fields or rules.patterns:
            return True
        if index.may_hold(text) and (
            index.may_hold_value(text)
            or any(place in text for place in self._places)
            or next(index.find_masked_values(text), None) is not None
        ):
            return True
        return self.shapes and (
            may_contain_secret_shape(text)
            or any(
                (decoded is not text and may_contain_secret_shape(decoded)) or may_end_secret_name(decoded)
                for decoded in decode_json_levels(text)
            )
        )

    def text(self, text: str) -> str:
        """Return *text* with a placeholder for each secret."""
        index = self.index
        text = self._replace_spans(text, index.find_values(text))
        text = self._replace_spans(text, index.find_masked_values(text))
        for pattern in self.rules.patterns:
            text = pattern.regex.sub(lambda found, rule=pattern: self._make_pattern_placeholder(found[0], rule), text)  # type: ignore[misc]
        if self._machine is not None:
            text = self._machine.sub(lambda found: self.rules.machine[found[0]], text)
        return self._replace_spans(text, find_secret_shapes(text)) if self.shapes else text

    def is_harmless_piece(self, piece: str) -> bool:
        """
        Return True if *piece* of a text certainly contains no secret, and no start of a known value.

        The test is a single search, since it runs for each token of a stream. It searches the first three characters of each
        value, also if the end of *piece* cuts them off. The result may be False for a harmless piece.
        """
        if self._needs_whole_texts:
            return False
        keys = self._keys
        index = self._index if keys is None or keys.count == self._count else self.index
        return index.start_pattern.search(piece) is None

    def redact_beginning(self, text: str, limit: int) -> str:
        """Return the redacted beginning of *text*: at least *limit* characters if possible, and no part of a secret at its end."""
        size = limit + READ_AHEAD_CHARS
        while size < len(text):
            # The end may be a part of a secret. It is left out, also if placeholders made the text before it shorter.
            beginning = self.text(text[:size])[:-READ_AHEAD_CHARS]
            if len(beginning) >= limit:
                return beginning
            size *= 2
        return self.text(text)

    def find_spans(self, text: str) -> list[Span]:
        """
        Return the positions of the secrets in *text*, in order; overlapping ones are merged.

        Shapes are also found after escapes: *text* may be JSON or source code.
        """
        found = self.index.find(text)
        found += [Span(*m.span(), rule.name) for rule in self.rules.patterns for m in rule.regex.finditer(text) if m[0]]
        if self.shapes:
            found += find_secret_shapes(text)
            if "\\" in text:
                found += find_secret_shapes(ESCAPE.sub(lambda escape: " " * len(escape[0]), text))
        return [span for span in _merge_spans(found) if not self._is_exempt(text[span.start : span.end])]

    def find_secrets(self, text: str, string_nesting: int = 0) -> dict[str, str]:
        """Return each secret in *text* with the name of its rule; *string_nesting* counts the JSON strings around *text*."""
        found = {text[start:end]: name for start, end, name in self.index.find(text)}
        for pattern in self.rules.patterns:
            found.update({match[0]: pattern.name for match in pattern.regex.finditer(text) if match[0]})
        if self.shapes and may_contain_secret_shape(text):
            found.update({text[start:end]: name for start, end, name in find_secret_shapes(text)})
            tree = parse_if_json(text) if string_nesting < NESTED_JSON else text
            for inner in _find_strings_and_keys(tree) if tree is not text else ():
                found.update(self.find_secrets(inner, string_nesting + 1))
        return {secret: name for secret, name in found.items() if not self._is_exempt(secret)}

    def redact_binary(self, data: bytes) -> bytes:
        """Return binary *data* with a placeholder for each known value; no other rule is applied."""
        text = data.decode(errors="surrogateescape")
        return self._replace_spans(text, self.index.find_values(text)).encode(errors="surrogateescape")

    def _replace_spans(self, text: str, spans: Iterable[Span]) -> str:
        """Return *text* with a placeholder for each of *spans*, which are in order."""
        made: list[str] = []
        at = 0
        for start, end, name in spans:
            if start >= at:
                made += (text[at:start], self._replace_unless_exempt(text[start:end], name))
                at = end
        return "".join([*made, text[at:]]) if made else text

    def _replace_unless_exempt(self, text: str, name: str) -> str:
        """Return the placeholder for *text*; *text* itself if it is empty or exempt."""
        return text if not text or self._is_exempt(text) else self.make_placeholder(text, name)

    def make_placeholder(self, secret: str, name: str, *, differs_by_machine: bool = True) -> str:
        """
        Return the placeholder for *secret* with this *name*, and with its mark if this redactor has a mark function.

        ``~`` precedes the mark of a credential, which *differs_by_machine*; ``=`` precedes any other mark.
        """
        if self._mark is None:
            return f"<redacted:{name}>"
        return f"<redacted:{name}{'~' if differs_by_machine else '='}{self._mark(secret)}>"

    def make_placeholder_for_named_secret(self, secret: str, name: str, place: Place) -> str:
        """Return the placeholder for *secret*, the value of a member, variable or parameter (*place*) called *name*."""
        is_known = secret in self._configured or (self._keys is not None and secret in self._keys.names)
        return self.make_placeholder(
            secret, name, differs_by_machine=is_known or may_differ_between_machines(name, secret, place)
        )

    def _make_pattern_placeholder(self, text: str, rule: RedactPattern) -> str:
        """Return the placeholder for a match of a user's pattern, which is no credential; an exempt or empty match is unchanged."""
        return (
            text
            if not text or self._is_exempt(text)
            else self.make_placeholder(text, rule.name, differs_by_machine=False)
        )

    def _is_exempt(self, text: str) -> bool:
        """Return whether *text* is a placeholder, or allowed by its digest."""
        allowed = self.rules.allowed
        return PLACEHOLDER.fullmatch(text) is not None or bool(allowed and digest_secret(text) in allowed)


class Redactor(TextRedactor):
    """
    Replaces the secrets in texts and JSON values by ``<redacted:NAME>``, deterministically.

    Args:
        known: Secret values, each with the name for its placeholder.
        shapes: Whether to replace texts that look like keys, and members with secret names.
        rules: The rules of the user.
        keys: A registry of further values; the names of *known* take precedence. None by default.
        mark: Returns the mark of a secret among those of the same name, ``<redacted:NAME~MARK>``; None by default.
    """

    def with_known_values(self, known: Mapping[str, str]) -> Redactor:
        """Return a redactor that also replaces *known* values."""
        if not known:
            return self
        made = Redactor({**self._own, **known}, shapes=self.shapes, rules=self.rules, keys=self._keys, mark=self._mark)
        # A value of one message is not a configured credential; see `make_placeholder_for_named_secret`.
        made._configured = self._configured
        return made

    def with_marks(self, mark: Callable[[str], str]) -> Redactor:
        """Return a redactor whose placeholders distinguish secrets of the same name by the result of *mark*."""
        return Redactor(self._own, shapes=self.shapes, rules=self.rules, keys=self._keys, mark=mark)

    def value(self, value: Any) -> Any:
        """
        Return a JSON value with every secret replaced, including those in keys and in JSON within strings.

        Raises:
            SecretFound: if a function of the user fails, because its secrets are then unknown.
        """
        for steps in self.rules.fields:
            value = _redact_members_at_pointer(value, steps, self._make_field_placeholder)
        return _apply_redact_functions(self.rules.functions, self._redact_tree(value, 0))

    def _make_field_placeholder(self, value: object, name: str) -> str:
        """Return the placeholder for a member that matches a user's pointer, with a value of any type."""
        if isinstance(value, str) and PLACEHOLDER.fullmatch(value):
            return value
        text = value if isinstance(value, str) else _encode_compact_json(value)
        return self.make_placeholder(text, name, differs_by_machine=is_secret_name(name, "member"))

    def redact_keeping_machine_details(self, value: object) -> Any:
        """Return *value* without secrets, but with the texts that identify this machine, as a run may see it."""
        return self._local_redactor.value(value)

    @cached_property
    def _local_redactor(self) -> Redactor:
        """The redactor for data that stay on this machine: it keeps the texts that identify the machine."""
        if not self.rules.machine:
            return self
        rules = attrs.evolve(self.rules, machine={})
        return Redactor(self._own, shapes=self.shapes, rules=rules, keys=self._keys)

    def redact_json_text(self, text: str, string_nesting: int = 0) -> str:
        """Return *text* redacted: by member names if it is JSON or nearly JSON, else as text."""
        tree = parse_if_json(text)
        if isinstance(tree, str):
            is_near = self.shapes and NEARLY_JSON.match(text) is not None and may_name_secret_member(text)
            return self.text(self._redact_near_json(text, string_nesting) if is_near else text)
        clean = self._redact_tree(tree, string_nesting) if string_nesting else self.value(tree)
        return text if clean == tree else patch_json_text(text, tree, clean)

    def redact_member(self, name: str, value: object, string_nesting: int = 0) -> Any:
        """Return the value of the member *name*, redacted completely if the name indicates a secret."""
        if isinstance(value, str) and self._is_secret_member(name, value):
            return self.make_placeholder_for_named_secret(value, name, "member")
        if isinstance(value, list | tuple):
            return [self.redact_member(name, one, string_nesting) for one in value]
        if type(value) in (int, float) and self._is_secret_number(name, text := _encode_compact_json(value)):
            return self.make_placeholder_for_named_secret(text, name, "member")
        if isinstance(value, Mapping) and any(self._is_secret_member(name, value.get(one)) for one in VALUE_WORDS):
            value = {
                one: self.redact_member(name, v, string_nesting) if one in VALUE_WORDS else v
                for one, v in value.items()
            }
        return self._redact_tree(value, string_nesting)

    def _is_secret_number(self, name: str, text: str) -> bool:
        """Return whether the number in *text* is secret by the member's name; counts of tokens are not."""
        # In members about tokens, numbers are counts and positions in a vocabulary.
        is_count = name.rstrip("0123456789_").lower().removesuffix("value").rstrip("_").endswith("token")
        return not is_count and JSON_NUMBER.fullmatch(text) is not None and self._is_secret_member(name, text)

    def _redact_near_json(self, text: str, string_nesting: int) -> str:
        """Redact a text that resembles JSON, such as truncated or too deeply nested JSON, by its member names."""
        made: list[str] = []
        at = 0
        name, last = "", ""
        lists: list[str] = []
        for token in JSON_TOKEN.finditer(text):
            piece = token[0]
            if piece[0] in "{[":
                lists.append(name if piece == "[" else "")
                name = ""
            elif piece[0] in "}],":
                if lists and piece != ",":
                    lists.pop()
                name = ""
            elif piece == ":":
                name = last
            else:
                value = _decode_json_string(piece)
                clean = self._redact_json_token(name or (lists[-1] if lists else ""), value, piece, string_nesting)
                if clean != value:
                    made += (text[at : token.start()], _encode_like_json_string(piece, clean))
                    at = token.end()
            last = _decode_json_string(piece) if piece[0] == '"' else ""
        return "".join([*made, text[at:]])

    def _redact_json_token(self, name: str, value: str, spelling: str, string_nesting: int) -> str:
        """Return the redacted *value* of a JSON string or number of the member *name*; *spelling* is its text in the JSON."""
        if spelling[0] != '"':
            return (
                self.make_placeholder_for_named_secret(value, name, "member")
                if self._is_secret_number(name, value)
                else value
            )
        if self._is_secret_member(name, value) and not is_text_token_member(name, {name: value}):
            return self.make_placeholder_for_named_secret(value, name, "member")
        return (
            self.redact_json_text(value, string_nesting + 1)
            if string_nesting < NESTED_JSON and NEARLY_JSON.match(value)
            else self.text(value)
        )

    def find_secret_pointers(self, value: object, pointer: str = "") -> Iterator[tuple[str, str]]:
        """Yield the JSON pointer and the rule of each secret in a JSON value."""
        if isinstance(value, Mapping):
            for key, member in value.items():
                inner = f"{pointer}/{key}"
                if not is_text_token_member(key, value) and any(
                    self._is_secret_member(key, one) for one in _flatten_list(member)
                ):
                    yield inner, key
                yield from ((f"{pointer} (a key)", rule) for rule in self.find_secrets(key).values())
                yield from self.find_secret_pointers(member, inner)
        elif isinstance(value, list | tuple):
            for index, member in enumerate(value):
                yield from self.find_secret_pointers(member, f"{pointer}/{index}")
        elif isinstance(value, str):
            yield from ((pointer, rule) for rule in self.find_secrets(value).values())

    def check_no_secrets(self, value: object, where: str) -> None:
        """
        Raise ``SecretFound`` if *value* contains a secret.

        Raises:
            SecretFound: The message has *where*, the JSON pointer and the rule, but not the secret.
        """
        for place, rule in self.find_secret_pointers(value):
            msg = (
                f"{where} contains a secret at {place or '/'} (rule {rule!r}); nothing was written. Remove it from the run, or "
                "pass secrets={value: name} to replace it"
            )
            raise SecretFound(msg, path=place or "/", rule=rule)

    def _redact_tree(self, value: object, string_nesting: int) -> object:
        """Return a JSON value with secrets replaced in names, members and texts."""
        if isinstance(value, Mapping):
            pieces = {k for k in value if is_text_token_member(k, value)}
            made: dict[str, object] = {}
            for k, v in value.items():
                name = _make_unused_name(self.text(k), made)
                made[name] = (
                    self._redact_tree(v, string_nesting) if k in pieces else self.redact_member(k, v, string_nesting)
                )
            return made
        if isinstance(value, list | tuple):
            return [self._redact_tree(v, string_nesting) for v in value]
        if not isinstance(value, str):
            return value
        nested = string_nesting < NESTED_JSON and NEARLY_JSON.match(value) is not None
        return self.redact_json_text(value, string_nesting + 1) if nested else self.text(value)

    def _is_secret_member(self, name: str, value: object) -> bool:
        """Return whether a text is secret by the name of its member, and not a placeholder already."""
        if not self.shapes or not isinstance(value, str) or not value or value.startswith("<redacted:"):
            return False
        if not is_secret(name, value, "member"):
            return False
        return not self.rules.allowed or digest_secret(value) not in self.rules.allowed


def _make_unused_name(name: str, used: Container[str]) -> str:
    """Return *name*, or with a number after it if it is used: two redacted names may be equal."""
    numbered = (f"{name}#{number}" for number in count(2))
    return name if name not in used else next(one for one in numbered if one not in used)


class RecordRedaction:
    """
    Replaces the secrets in immutable objects of ``data``, such as events and messages.

    Args:
        redactor: The redactor of their texts and JSON values.
    """

    def __init__(self, redactor: Redactor) -> None:
        self._redactor = redactor
        self._has_rules = redactor.shapes or redactor.rules is not NO_RULES

    def redact(self, value: Any) -> Any:
        """
        Return *value* without secrets; the same object if it contains none.

        Enumerations, errors and other objects without texts of their own are returned unchanged.
        """
        return value if self.is_clean(value) else self._redact_value(value)

    def is_clean(self, value: object) -> bool:  # noqa: C901 - one case for each kind
        """Return True if an object certainly contains no secret; the result may be False for an object without secrets."""
        # All texts are searched at once: few objects contain a secret, and a search of each text of each event took longer
        # than the step of the event.
        index = self._redactor.index
        texts: list[str] = []
        rest: list[Any] = [value]
        for one in rest:
            if isinstance(one, str):
                # Every event has names, and the texts to search are joined.
                if one and one not in index.clean_texts:
                    texts.append(one)
            elif isinstance(one, (tuple, JsonList)):
                rest += one
            elif isinstance(one, JsonDict):
                rest += [*one, *one.values()]
            elif not isinstance(one, Transcript):
                kind: Any = type(one)  # mypy: a frozen class would have no hash
                rest += map(partial(getattr, one), _list_possible_text_fields(kind))
            elif self.has_secrets(one):
                return False
        if not texts:
            return True
        if len(texts) == 1:
            return self._redact_text(texts[0]) is texts[0]
        text = "\n".join(texts)
        return not (self._has_rules or index.may_hold(text)) or not self._redactor.may_contain_secret(text)

    def has_secrets(self, transcript: Transcript) -> bool:
        """Return whether any message of *transcript* contains a secret."""
        # Counted along the history, so that each message is searched once and not at every step.
        return transcript.fold_batch(("redaction", self._redactor.cache_key), self._list_running_secret_counts, 0) > 0

    def _list_running_secret_counts(self, count: int, messages: Sequence[Message]) -> list[int]:
        """Return a running total for each message: *count* plus the number of messages with a secret up to this one."""
        if self.is_clean(tuple(messages)):
            return [count] * len(messages)
        return [count := count + (self.redact(message) is not message) for message in messages]

    def _redact_value(self, value: Any) -> Any:
        """Return any recorded value without secrets: a text, transcript, JSON value, container or attrs object."""
        if isinstance(value, str):
            return value if isinstance(value, Enum) else self._redact_text(value)
        if isinstance(value, Transcript):
            return Transcript([self.redact(message) for message in value]) if self.has_secrets(value) else value
        if isinstance(value, JsonDict | JsonList):
            return freeze(self._redactor.value(value)) if self._redactor.may_contain_secret(compact(value)) else value
        if isinstance(value, tuple):
            made = tuple([self._redact_value(member) for member in value])
            return value if all(map(is_, made, value)) else made
        return self._redact_fields(value)

    def _redact_fields(self, value: Any) -> Any:
        """Return an attrs object with secrets replaced in its fields; the same object if it has none."""
        kind: Any = type(value)  # mypy: a frozen class would have no hash
        changed = {}
        for name, alias in _list_init_fields(kind):
            old = getattr(value, name)
            new = self._redact_value(old)
            if new is not old:
                changed[alias] = new
        return attrs.evolve(value, **changed) if changed else value

    def _redact_text(self, text: str) -> str:
        """Return *text* without secrets; short texts without any, such as names, are cached."""
        clean = self._redactor.index.clean_texts
        if text in clean:
            return text
        if self._redactor.may_contain_secret(text):
            return self._redactor.text(text)
        if len(text) <= MAX_CLEAN_CHARS:
            if len(clean) >= MAX_CLEAN_TEXTS:
                clean.clear()
            clean.add(text)
        return text


class StreamRedactor:
    """
    Replaces the secrets in a text that arrives in pieces; a possible start of a known value is held back until the next piece.

    Args:
        redactor: The redactor of the text.
    """

    def __init__(self, redactor: TextRedactor) -> None:
        self._redactor = redactor
        self._held = ""

    @property
    def has_pending_text(self) -> bool:
        """Whether a part of the text is held back."""
        return self._held != ""

    def feed(self, piece: str) -> str:
        """Add *piece* to the text, and return the redacted text that can be shown now."""
        if not self._held and self._redactor.is_harmless_piece(piece):
            return piece
        text = self._redactor.text(self._held + piece)
        cut = self._redactor.index.get_incomplete_value_start(text)
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """Return and clear the text that was held back; call it at the end of the stream."""
        text, self._held = self._held, ""
        return text


# --- objects of data --------------------------------------------------------------------------------------------------


@cache
def _list_init_fields(kind: type[Any]) -> tuple[tuple[str, str], ...]:
    """Return (field name, argument name) of each constructor field of an attrs class; nothing for any other class."""
    fields = attrs.fields(kind) if attrs.has(kind) else ()
    return tuple([(field.name, field.alias) for field in fields if field.init])


NUMBERS = frozenset({
    "Decimal", "Decimal | None", "RunPhase", "RunStatus", "StopReason", "Usage", "bool", "float", "float | None", "int", "int | None",
})  # fmt: skip
"""The annotations of fields that contain no text."""


@cache
def _list_possible_text_fields(kind: Any) -> list[str]:
    """Return the names of a class's fields that may contain a text of others; fields with the address of an event never do."""
    from stepengine.data.events import Event

    # The address of an event is generated by the engine and contains no text of others.
    place = {field.name for field in attrs.fields(Event)} if issubclass(kind, Event) else set()
    types = {field.name: field.type for field in attrs.fields(kind)} if attrs.has(kind) else {}
    return [name for name, _ in _list_init_fields(kind) if types[name] not in NUMBERS and name not in place]


def _make_spellings_by_text(names_by_value: Mapping[str, str]) -> dict[str, Spelling]:
    return {one.text: one for value, name in names_by_value.items() for one in make_spellings(value, name)}


@lru_cache(maxsize=256)
def _compile_spelling_pattern(spellings: tuple[Spelling, ...]) -> re.Pattern[str]:
    """Return the expression for placeholders, without a group, and for each of *spellings* as a group."""
    return re.compile("|".join(["<redacted:[^<>]*>", *[f"({one.pattern})" for one in spellings]]))


@cache
def _compile_shape_pattern() -> re.Pattern[str]:
    """Return the expression for all shapes; cached on first use, since it takes as long to compile as this module."""
    return re.compile("|".join([f"(?P<{name.replace('-', '_')}>{pattern})" for name, pattern in SHAPES]))


def find_secret_shapes(text: str) -> list[Span]:
    """Return the positions of the texts in *text* that look like keys, in order."""
    if not may_contain_secret_shape(text):
        return []
    found = []
    if _may_have_shape(text):
        found += [
            Span(*match.span(), str(match.lastgroup).replace("_", "-"))
            for match in _compile_shape_pattern().finditer(text)
        ]
    found += [
        Span(*match.span(2), name)
        for kind in (QUERY_PAIR, NESTED_PAIR)
        for match in kind.finditer(text)
        if may_differ_between_machines(
            name := _decode_percent_escapes(match[1]), _decode_percent_escapes(match[2]), "parameter"
        )
    ]
    found += [Span(*match.span(1), "password") for match in PASSWORD_SHAPE.finditer(text) if match[1].strip("*")]
    found += [Span(*match.span(1), "user") for match in USER_IN_ADDRESS.finditer(text) if looks_random(match[1])]
    return _merge_spans([*found, *_find_private_key_blocks(text)])


def _find_private_key_blocks(text: str) -> Iterator[Span]:
    """Yield the positions of PEM blocks with private keys, each from its start to the next end."""
    if "-----BEGIN " not in text:
        return
    ends = [match.span() for match in PEM_END.finditer(text)]
    starts = [start for start, _ in ends]
    done = 0
    for match in PEM_BEGIN.finditer(text):
        nearest = bisect_left(starts, match.end() + 1)
        if match.start() >= done and nearest < len(ends):
            done = ends[nearest][1]
            yield Span(match.start(), done, "private-key")


def _merge_spans(spans: Iterable[Span]) -> list[Span]:
    """Return *spans* in order; overlapping ones are merged, with the name of the first."""
    apart: list[Span] = []
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        if apart and span.start < apart[-1].end:
            apart[-1] = apart[-1]._replace(end=max(apart[-1].end, span.end))
        else:
            apart.append(span)
    return apart


def _compile_machine_pattern(machine: Mapping[str, str]) -> re.Pattern[str] | None:
    """Return the expression for the texts of *machine* as whole words or at the start of a path."""
    longest = sorted(machine, key=len, reverse=True)
    texts = "|".join(map(re.escape, longest))
    return re.compile(rf"(?<![\w.-])(?:{texts})(?![\w-]|\.\w)") if texts else None


def _redact_members_at_pointer(
    value: object,
    pointer_parts: tuple[str, ...],
    hide: Callable[[object, str], str],
    partial_matches: Iterable[tuple[str, ...]] = (),
) -> object:
    """Return *value* with *hide* applied to the members that a pointer matches; *partial_matches* are its unmatched ends so far."""
    if not isinstance(value, Mapping | list | tuple):
        return value
    members = value.items() if isinstance(value, Mapping) else enumerate(value)
    made: dict[Any, object] = {}
    for key, member in members:
        left = {end[1:] for end in (pointer_parts, *partial_matches) if end[0] in ("*", str(key))}
        made[key] = (
            hide(member, pointer_parts[-1])
            if () in left
            else _redact_members_at_pointer(member, pointer_parts, hide, left)
        )
    return made if isinstance(value, Mapping) else [*made.values()]


def _apply_redact_functions(functions: Iterable[Callable[[Any], Any]], value: Any) -> Any:
    """Return *value* after all redaction functions of the user; raise ``SecretFound`` if one fails."""
    for function in functions:
        name = getattr(function, "__qualname__", type(function).__qualname__)
        try:
            value = function(value)
        except Exception as error:  # noqa: BLE001 - reported without its text, which may contain the value
            msg = f"the redact function {name!r} raised {type(error).__name__}; nothing was written"
            raise SecretFound(msg, rule=name) from None
    return value


def _has_mask(text: str) -> bool:
    """Return whether *text* may contain a masked key; a cheap test before ``MASK``."""
    stars, dots, ellipsis = MASKS
    return stars in text or dots in text or ellipsis in text


def _get_match_end(pattern: re.Pattern[str], text: str, start: int = 0) -> int:
    """Return the end of the match of *pattern* at *start*; *start* if it does not match."""
    found = pattern.match(text, start)
    return start if found is None else found.end()


@lru_cache(maxsize=256)
def make_text_finder(texts: tuple[str, ...]) -> Callable[[str], bool]:
    """Return a function that tests whether a text contains any of *texts*."""
    # One search for all of them. Five keys have fifty-five forms; a search for each in every line of a journal would double
    # the time of the line. `re` is no faster, because it tries every text at every character.
    if len(texts) > MAX_TEXTS_AT_ONCE:
        parts = [make_text_finder(texts[at : at + MAX_TEXTS_AT_ONCE]) for at in range(0, len(texts), MAX_TEXTS_AT_ONCE)]
        return lambda text: any(part(text) for part in parts)
    search: Callable[[str], bool] | None = None
    read = 0

    def contains_any_slowly(text: str) -> bool:
        """Return whether a text contains any of the texts, searched one after the other."""
        return any(sought in text for sought in texts)

    def contains_any(text: str) -> bool:
        """Return whether a text contains any of the texts; after much text, by one compiled expression."""
        nonlocal read, search
        if search is None:
            # A program without models and typed tools does not load pydantic; for its few texts that would take longer.
            read += len(text) * len(texts)
            if read < WORTH_LOADING and CORE not in sys.modules:
                return contains_any_slowly(text)
            search = _compile_text_finder(texts) or contains_any_slowly
        # The engine finds nothing in a text with half of a surrogate pair, which JSON may contain.
        return search(text) or (not (text.isascii() or _is_utf8_encodable(text)) and contains_any_slowly(text))

    return contains_any if texts else lambda _: False


def _compile_text_finder(texts: tuple[str, ...]) -> Callable[[str], bool] | None:
    """Return a function that tests whether a text contains any of *texts*; ``None`` if the expression is too long for the engine."""
    from pydantic_core import SchemaError, SchemaValidator, core_schema

    pattern = f"(?s){'|'.join(map(re.escape, texts))}"
    try:
        return SchemaValidator(core_schema.str_schema(pattern=pattern)).isinstance_python
    except (SchemaError, UnicodeError):
        return None


def _is_utf8_encodable(text: str) -> bool:
    """Return whether a text has no lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


_may_have_shape = make_text_finder(SHAPE_HINTS)


def may_contain_secret_shape(text: str) -> bool:
    """Return True if a text may contain a text that looks like a key or password; a fast test before the exact one."""
    return (
        _may_have_shape(text)
        or ("://" in text and "@" in text)
        or ("=" in text and ("?" in text or "&" in text or "#" in text))
        or "%3D" in text
        or "%3d" in text
    )


def parse_if_json(text: str) -> object:
    """
    Return the JSON object or array in *text*, else the text.

    JSON with duplicate names, or nested deeper than 200, is returned as text: parsing would lose a value or not end.
    """
    if text[:1] not in ("{", "["):
        return text
    try:
        tree = json.loads(text, object_pairs_hook=make_object_with_unique_keys)
    except (ValueError, RecursionError):
        return text
    return text if _is_nested_too_deeply(text, tree) else tree


def _decode_json_string(piece: str) -> str:
    """Return the text of a JSON string, or any other *piece* of JSON unchanged."""
    if piece[:1] != '"':
        return piece
    try:
        return str(json.loads(piece))
    except ValueError:
        return piece.strip('"')


def patch_json_text(text: str, old: object, new: object) -> str:
    """Return the JSON *text* of *old* changed to *new*; equal parts keep their spelling."""
    made: list[str] = []
    at = 0
    for start, end, piece in _find_json_changes(JSON_TOKEN.finditer(text), old, new):
        made += (text[at:start], piece)
        at = end
    return "".join([*made, text[at:]])


def _find_json_changes(tokens: Iterator[re.Match[str]], old: object, new: object) -> Iterator[tuple[int, int, str]]:
    """Yield the start, end and new text of each part that differs in *new*; *tokens* are the remaining JSON tokens of *old*."""
    first = next(tokens)
    if isinstance(old, dict) and isinstance(new, Mapping) and len(old) == len(new) > 0:
        for (name, member), (new_name, new_member) in zip(old.items(), new.items(), strict=True):
            key, _colon = next(tokens), next(tokens)
            if name != new_name:
                yield *key.span(), _encode_like_json_string(key[0], new_name)
            yield from _find_json_changes(tokens, member, new_member)
            next(tokens)
    elif isinstance(old, list) and isinstance(new, list | tuple) and len(old) == len(new) > 0:
        for member, new_member in zip(old, new, strict=True):
            yield from _find_json_changes(tokens, member, new_member)
            next(tokens)
    else:
        last, depth = first, int(first[0] in OPENING)
        while depth:
            last = next(tokens)
            depth += (last[0] in OPENING) - (last[0] in CLOSING)
        if old is not new and (type(old) is not type(new) or old != new):
            piece = _encode_like_json_string(first[0], new) if isinstance(new, str) else _encode_compact_json(new)
            yield first.start(), last.end(), piece


def _encode_like_json_string(piece: str, text: str) -> str:
    """Return *text* as a JSON string; where it equals the start and end of *piece*, the spelling of *piece* is used."""
    if piece[0] != '"' or not _is_json_string(piece):
        return _encode_compact_json(text)
    spelled = JSON_CHARACTER.findall(piece[1:-1])
    before = [json.loads(f'"{one}"') if one[0] == "\\" else one for one in spelled]
    most = min(len(before), len(text))
    same = next((at for at in range(most) if before[at] != text[at]), most)
    most -= same
    end = next((at for at in range(most) if before[-1 - at] != text[-1 - at]), most)
    middle = _encode_compact_json(text[same : len(text) - end])[1:-1]
    return f'"{"".join(spelled[:same])}{middle}{"".join(spelled[len(spelled) - end :])}"'


def _is_json_string(piece: str) -> bool:
    try:
        return isinstance(json.loads(piece), str)
    except ValueError:
        return False


def _encode_compact_json(value: object) -> str:
    """Return *value* as compact JSON, including numbers that are not finite."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text if _is_utf8_encodable(text) else json.dumps(value, separators=(",", ":"))


def _is_nested_too_deeply(text: str, tree: Any) -> bool:
    """Return whether a JSON value has more levels than the limit."""
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return False
    level = [tree]
    for _ in range(MAX_DEPTH + 1):
        inner = [
            [*node.values()] if isinstance(node, dict) else node for node in level if isinstance(node, dict | list)
        ]
        if not inner:
            return False
        level = [member for node in inner for member in node]
    return True


def _flatten_list(value: object) -> Iterator[object]:
    """Yield *value*, or the items of a list at any depth."""
    if isinstance(value, list | tuple):
        for member in value:
            yield from _flatten_list(member)
    else:
        yield value


def _find_strings_and_keys(value: object) -> Iterator[str]:
    """Yield all strings in a JSON value, including names of members."""
    if isinstance(value, Mapping):
        for key, member in value.items():
            yield key
            yield from _find_strings_and_keys(member)
    elif isinstance(value, list):
        for member in value:
            yield from _find_strings_and_keys(member)
    elif isinstance(value, str):
        yield value


KNOWN = Redactor({}, shapes=False, keys=GIVEN)
"""The redactor of the secrets that this process knows, without shapes."""
KNOWN_RECORDS = RecordRedaction(KNOWN)
"""``KNOWN`` for objects of ``data``, such as events."""

ANY = Redactor({}, shapes=True, keys=GIVEN)
"""The redactor of the secrets that this process knows, and of texts with the shape of a secret."""
