"""
What is secret, and taking it out of whatever is written.

One list and one redactor: journals, logs, errors, events, cassettes and ``scan`` all ask here. Two kinds of rules: *known*
values are replaced wherever they appear, in every encoding of ``data/spellings.py``; *shapes* are texts that look like
keys, and members with telling names. A cleaned value cleans to itself, so that a recording and its replay agree whatever
the key is.

Pure: the environment comes in as a value. What ``GIVEN`` was told is the one thing that is remembered. Every search takes
a time in proportion to its text, whatever the text is: the expressions here cannot be made to look at it again and again.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property, lru_cache
from operator import attrgetter, is_
from typing import Any, Literal, NamedTuple, TypeAlias

import attrs
from attrs import frozen

from stepengine.data.json import JsonDict, JsonList, compact, freeze
from stepengine.data.messages import Message
from stepengine.data.secret_names import (
    VALUE_WORDS,
    Place,
    is_piece_of_text,
    is_secret,
    is_secret_name,
    looks_random,
    may_differ,
    may_name_secret_member,
)
from stepengine.data.spellings import Spelling, make_truncated_pattern, spellings_of
from stepengine.data.transcript import Transcript
from stepengine.errors import DataError, SecretFound

Redact: TypeAlias = Literal["known", "all", "off"]
"""``"known"`` replaces known values only, ``"all"`` shapes and telling members too, ``"off"`` nothing."""

# --- what is secret ---------------------------------------------------------------------------------------------------

ESCAPED_BYTES = re.compile(r"(?:%[0-9A-Fa-f]{2})+")
PASSWORD_IN_ADDRESS = re.compile(r"://[^\s/?#:@]*:([^\s/?#@]+)@")
PASSWORD_SHAPE = re.compile(r"""://[^\s/?#:@"'<>(){}\[\]|\\^`]*:([^\s/?#@"'<>(){}\[\]|\\^`,;]+)@""")
"""The same within any text: what no address holds ends it, and so do signs that follow an address in lists and in prose."""
PASSWORD_WITH_AT = re.compile(r"://[^\s/?#:@]*:([^\s/?#]+)@")
"""Most clients take the last ``@`` for the end of a password."""
PASSWORD_WITHOUT_SCHEME = re.compile(r"[^\s/?#:@]+:([^\s/?#@]+)@(?:[\w.-]+:[0-9]|\w+\()")
"""In an address such as ``me:password@proxy:3128`` or ``me:password@tcp(db)/name``, whose host has a port or is in parentheses."""
USER_IN_ADDRESS = re.compile(r"""://([^\s/?#:@"'<>(){}\[\]|\\^`]{16,})@""")
"""A random one is a token, as in the address of a repository."""
OPTION = re.compile(
    r"""(?:^|(?<=[\s;?&]))-{0,2}([A-Za-z][\w.-]{0,60})=(?:'((?:[^'\\]|\\.)*+)'|"((?:[^"\\]|\\.)*+)"|\{([^}]*)\}|([^\s;&]+))"""
)
"""In the query of an address, in a line such as ``host=db password=...`` and ``Server=db;Password=...``, or for a program."""
MIN_KNOWN = 8
ORDINARY_KEYS = frozenset({
    "dummy-key", "fake-key", "lm-studio", "local-key", "no-key-needed", "not-needed", "not-required", "placeholder",
    "redacted", "test-key",
})  # fmt: skip
"""What people give to servers that want any key: replacing these words would change texts that speak of something else."""

NO_TEXT = frozenset({int, float, bool, type(None)})
SHORT, MOST_CLEAN = 64, 1_024
"""The longest texts that are known to hold no secret, in characters, and how many of them; with the next secret none is."""
NESTED_JSON = 3
BEYOND = 8_000
"""How far a text is read beyond what is shown of it, so that a secret at the cut is known for one."""
MAX_DEPTH = 200
REDACTED = re.compile(r"<redacted:([^<>]*)>")
PLACEHOLDER = re.compile(rf"{REDACTED.pattern}|<(?:home|cwd|tmp|host|user)>")

QUERY_PAIR = re.compile(r"""(?:(?<=[?&#])|(?<=&amp;)|(?<=\\u0026))([\w.~%\[\]-]{1,100})=([^&#\s"'<>;,\\`]+)""")
"""A parameter of an address, wherever an address is quoted, also in HTML or source."""
NESTED_PAIR = re.compile(
    r"""(?:(?<=%3f)|(?<=%26)|(?<=%23)|(?<=253f)|(?<=2526)|(?<=2523))([\w.~\[\]-]{1,100})%(?:25){0,3}3d"""
    r"""((?:[^&#\s"'<>;,\\`%]|%(?!(?:25){0,3}2[36])[0-9a-f]{2})+)""",
    re.IGNORECASE,
)
"""A parameter of an address that is the value of another parameter."""
JSON_TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)|[{}\[\],:]|[^\s"{}\[\],:]+', re.DOTALL)
"""A piece of JSON, or of a text that is nearly JSON."""
NEARLY_JSON = re.compile(
    r"\s*+(?:\)\]\}',?|for\s*+\(;;\);|while\s*+\(1\);|data:|(?:(?:const|let|var)\s++)?[\w.$]++\s*+[(=])?\s*+[{\[]"
)
"""How a text begins that is JSON broken off, too deep, with repeated names, in a call or assignment, or behind what keeps pages from running it.

A page that quotes JSON is no such text."""
OPENING, CLOSING = ("{", "["), ("}", "]")
JSON_CHARACTER = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\.|.", re.DOTALL
)
"""A character of a JSON string as it is spelled there."""
JSON_NUMBER = re.compile(r"-?[0-9][0-9.eE+-]{5,}")
"""The shortest number that is a secret by its name has six digits: shorter ones are counts."""

_BEFORE, _AFTER = r"(?<![A-Za-z0-9+/_-])", r"(?![A-Za-z0-9+/_-])"
# A lookbehind that holds every character of the body lets a search begin once in each run, so that none is read twice.
SHAPES = (
    # Words with hyphens between them have no digit; nor has one of 1,500 tokens of ours, which are known by their length.
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
    ("aws-key", rf"{_BEFORE}A(?:KI|SI)A[A-Z0-9]{{16}}{_AFTER}"),
    ("jwt", rf"{_BEFORE}eyJ[A-Za-z0-9_-]{{8,}}\.eyJ[A-Za-z0-9_-]{{8,}}(?:\.[A-Za-z0-9_-]*)?"),
    ("bearer", r"(?i:bearer) +[A-Za-z0-9._~+/=-]{20,}"),
)
# Beginnings and ends are looked for apart: in one expression, every beginning without an end would read all that follows.
PEM_BEGIN = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----")
PEM_END = re.compile(r"-----END [A-Z ]*PRIVATE KEY(?: BLOCK)?-----")
# Cheap substring tests: most texts hold none of these, and are not looked into at all.
SHAPE_HINTS = (
    "sk-", "pk-", "rk-", "gsk_", "xai-", "AIza", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "xox", "AKIA", "ASIA",
    "fw_", "hf_", "nvapi-", "pplx-", "r8_", "eyJ", "-----BEGIN", "earer ", "EARER ",
)  # fmt: skip
CORE = "pydantic_core"
WORTH_LOADING = 50_000_000
"""Characters times texts that are looked for one by one before the engine that finds all at once is loaded: 30 ms both."""
MOST_AT_ONCE = 64
"""How many texts are looked for by one expression: a server may be told a key by each of its users, and all of it is made anew for a new one."""
# What providers put for the middle of a key that they show, and what may stand on either side of it.
MASK = re.compile(r"\*{3,}|\.{3,}|\u2026")
MASKS = ("***", "...", "\u2026")
BEFORE_MASK = re.compile(r"[\w-]*")
AFTER_MASK = re.compile(r"[\w*.-]*")
KEPT_BEGIN, KEPT_END = 2, 4

# In JSON and source, an escape such as \n would put a letter directly before a key and hide where it begins. A blank of
# the same length keeps every place where it is.
ESCAPE = re.compile(r"\\+[nrt\"/\\]")


class Span(NamedTuple):
    """A secret in a text, from *start* to *end*, and the name that stands for it."""

    start: int
    end: int
    name: str


# --- what users add -------------------------------------------------------------------------------------------------


@frozen
class RedactHeader:
    """A header that is not recorded, whatever the built-in list says. Names are compared without case."""

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
            msg = f"the pointer of a RedactField names a member, such as '/tools/*/env', not {self.pointer!r}"
            raise DataError(msg)

    @property
    def path_parts(self) -> tuple[str, ...]:
        """The non-empty parts of the pointer between slashes; ``*`` matches any member or index."""
        return tuple([part for part in self.pointer.split("/") if part])


def _compile_regex(value: str | re.Pattern[str]) -> re.Pattern[str]:
    try:
        return re.compile(value)
    except (re.error, TypeError) as error:
        msg = f"the regex of a RedactPattern cannot be used: {error}"
        raise DataError(msg) from error


@frozen
class RedactPattern:
    """
    Text that is replaced wherever a regular expression finds it.

    Attributes:
        regex: The expression. It meets texts of strangers, and nothing holds it to their length: write one that cannot
            backtrack far.
        name: What stands in the placeholder.
    """

    regex: re.Pattern[str] = attrs.field(converter=_compile_regex)
    name: str = "pattern"


@frozen(repr=False)
class RedactValue:
    """
    A secret value, replaced wherever it appears, in plain, quoted, escaped and base64 form.

    Attributes:
        text: The value; at least one character.
        name: What stands in the placeholder.
    """

    text: str
    name: str = "value"

    def __attrs_post_init__(self) -> None:
        text: object = self.text
        if not isinstance(text, str) or not text:
            msg = "the text of a RedactValue is a string that is not empty"
            raise DataError(msg)

    def __repr__(self) -> str:
        return f"RedactValue(<redacted:{self.name}>)"


RedactRule: TypeAlias = "RedactHeader | RedactField | RedactPattern | RedactValue | Callable[[Any], Any]"
"""One rule of a user; a function gets a JSON value and returns it without what is to be hidden."""


def find_redacted_names(text: str) -> tuple[str, ...]:
    """Return the names of the secrets that were taken out of *text*, plain or JSON, each once and sorted."""
    return tuple(sorted({found[1] for found in REDACTED.finditer(text)}))


def digest_of(value: str) -> str:
    """Return what ``allow_secrets`` lists for *value*: ``"sha256:"`` and 64 hexadecimal digits."""
    return f"sha256:{hashlib.sha256(value.encode(errors='surrogatepass')).hexdigest()}"


def _check_digests(values: Iterable[str]) -> frozenset[str]:
    digests = frozenset((values,) if isinstance(values, str) else values)
    for digest in digests:
        if not re.fullmatch(r"sha256:[0-9a-f]{64}", digest):
            msg = "allow_secrets lists hashes such as 'sha256:<64 hexadecimal digits>', never the values themselves"
            raise DataError(msg)
    return digests


def _to_rule_tuple(given: Iterable[RedactRule]) -> tuple[RedactRule, ...]:
    return tuple(given)


@frozen(kw_only=True)
class RedactionRules:
    """
    The rules that apply in addition to the built-in ones.

    Attributes:
        given: Rules of the user.
        allowed: Hashes of values that look like secrets and are none.
        machine: Texts that tell of this machine, each with its placeholder.
    """

    given: tuple[RedactRule, ...] = attrs.field(default=(), converter=_to_rule_tuple)
    allowed: frozenset[str] = attrs.field(default=frozenset(), converter=_check_digests)
    machine: Mapping[str, str] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        for rule in self.given:
            if not isinstance(rule, RedactHeader | RedactField | RedactPattern | RedactValue) and (
                isinstance(rule, type) or not callable(rule)
            ):
                msg = f"redact lists RedactHeader, RedactField, RedactPattern, RedactValue or functions, not {rule!r}"
                raise DataError(msg)

    @cached_property
    def headers(self) -> frozenset[str]:
        """Names of headers to leave out, in lower case."""
        return frozenset(rule.name.lower() for rule in self.given if isinstance(rule, RedactHeader))

    @cached_property
    def fields(self) -> tuple[tuple[str, ...], ...]:
        """The parts of each pointer to members to replace."""
        return tuple([rule.path_parts for rule in self.given if isinstance(rule, RedactField)])

    @cached_property
    def patterns(self) -> tuple[RedactPattern, ...]:
        """The patterns."""
        return tuple([rule for rule in self.given if isinstance(rule, RedactPattern)])

    @cached_property
    def values(self) -> dict[str, str]:
        """The values, each with its name."""
        return {rule.text: rule.name for rule in self.given if isinstance(rule, RedactValue)}

    @cached_property
    def functions(self) -> tuple[Callable[[Any], Any], ...]:
        """The functions."""
        return tuple(
            [
                rule
                for rule in self.given
                if not isinstance(rule, RedactHeader | RedactField | RedactPattern | RedactValue)
            ]
        )

    def fingerprint_parts(self) -> list[Any]:
        """Return what differs between rules that clean differently, as JSON."""
        return [
            [repr(rule) if not isinstance(rule, RedactValue) else digest_of(rule.text) for rule in self.given],
            sorted(self.allowed),
            sorted(self.machine.items()),
        ]


NO_RULES = RedactionRules()


# --- known values ---------------------------------------------------------------------------------------------------


def find_environment_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the values of secret variables, and the passwords in addresses, options and JSON, each with its variable's name."""
    # Programs remove the line end and the quotes that a file or a template left around a value.
    known = {
        value.strip().strip("\"'"): name for name, value in environment.items() if is_secret_name(name, "variable")
    }
    for name, value in environment.items():
        for password in _find_passwords(value):
            known.setdefault(password, name)
    return {value: name for value, name in known.items() if len(value) >= MIN_KNOWN}


def without_secret_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that code which needs no keys may see: neither named like a secret nor with a password in an address."""
    return {
        name: value
        for name, value in environment.items()
        if not is_secret_name(name, "variable") and not any(True for _ in _find_passwords(value))
    }


def _find_passwords(text: str) -> Iterator[str]:
    """Give the passwords in the addresses, options and JSON of *text*, as written and decoded."""
    kinds = (PASSWORD_IN_ADDRESS, PASSWORD_WITH_AT) if "://" in text else ()
    found = [match[1] for kind in kinds for match in kind.finditer(text)]
    if (address := PASSWORD_WITHOUT_SCHEME.match(text)) is not None:
        found.append(address[1])
    found += [match[1] for match in USER_IN_ADDRESS.finditer(text) if looks_random(match[1])]
    for option in OPTION.finditer(text) if "=" in text else ():
        name, value = option[1], next(filter(None, option.groups()[1:]), "")
        # At the start of a line this is the name of a folder.
        is_folder = name.lower() == "pwd" and text[: option.start(1)][-1:] not in {";", "?", "&"}
        if not is_folder and may_differ(name, value, "parameter"):
            found.append(value)
    for password in found:
        yield password
        yield _decode_escapes(password)
    yield from [value for _, value in find_secret_members(parse_if_json(text.strip()))]


def find_secret_members(tree: object) -> Iterator[tuple[str, str]]:
    """Yield the names and values, numbers as texts, of the members of a JSON value that are credentials by their names."""
    pending = [tree]
    for one in pending:  # grows meanwhile
        pending += one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
        for name, value in one.items() if isinstance(one, dict) else ():
            if type(value) in (str, int) and may_differ(name, str(value), "member"):
                yield name, str(value)


def _decode_escapes(text: str) -> str:
    """Return *text* with its percent-encoded characters decoded."""
    return ESCAPED_BYTES.sub(lambda run: bytes.fromhex(run[0].replace("%", "")).decode(errors="replace"), text)


class QuietFlag:
    """
    Whether there is nothing to look for in any text, so that whoever writes many need not ask for each.

    Attributes:
        holds: False for good once it has been.
    """

    __slots__ = ("holds",)

    def __init__(self, *, holds: bool) -> None:
        self.holds = holds


ALWAYS, NEVER = QuietFlag(holds=True), QuietFlag(holds=False)


class KnownSecrets:
    """
    Secret values that are registered while the process runs.

    What was told once is known for good, since what it was used for may be written much later.

    Attributes:
        count: How often something new was told; code that caches what follows from the names compares it.
        names: The values, and the name that stands for each.
        spellings: What to look for, by its text.
        quiet: Holds until the next thing is told.
    """

    def __init__(self) -> None:
        self.count = 0
        self.quiet = QuietFlag(holds=True)
        self.names: dict[str, str] = {}
        self.spellings: dict[str, Spelling] = {}

    def __repr__(self) -> str:
        return f"<KnownSecrets: {len(self.names)} values>"

    def tell(self, value: str, name: str, environment: Mapping[str, str] | None = None) -> None:
        """
        Treat *value* as secret from now on, unless it is known, under 8 characters, or an ordinary word.

        Args:
            value: The secret.
            name: What stands for it, unless a variable of *environment* has the same value.
            environment: Where to look for such a variable; one that is named like a secret goes before others.
        """
        value = value.strip()
        if value in self.names or len(value) < MIN_KNOWN or value.lower() in ORDINARY_KEYS:
            return
        named = [n for n, v in (environment or {}).items() if v.strip() == value]
        named.sort(key=lambda variable: (not is_secret_name(variable, "variable"), variable))
        self._take(value, named[0] if named else name)

    def add_from_environment(self, environment: Mapping[str, str]) -> None:
        """Register the secret values and passwords of an environment; its names replace those given before."""
        for value, name in find_environment_secrets(environment).items():
            if self.names.get(value) != name:
                self._take(value, name)

    def _take(self, value: str, name: str) -> None:
        self.names = {**self.names, value: name}
        self.spellings = {**self.spellings, **_make_spellings({value: name})}
        self._renew_quiet_flag()

    def forget(self) -> None:
        """Know nothing any more: for tests, which share a process."""
        self.names, self.spellings = {}, {}
        self._renew_quiet_flag()

    # Last of all: a redactor in another thread that still takes over the old names has taken over the old quiet, too.
    def _renew_quiet_flag(self) -> None:
        self.count += 1
        over, self.quiet = self.quiet, QuietFlag(holds=True)
        over.holds = False


GIVEN = KnownSecrets()
"""Every key that this process gave to a provider, whichever way it came, and what its environment calls secret."""


def make_redactor(
    redact: Redact | Sequence[RedactRule],
    environment: Mapping[str, str],
    secrets: Mapping[str, str] | None = None,
    *,
    allow_secrets: Iterable[str] = (),
    machine: Mapping[str, str] | None = None,
) -> Redactor:
    """
    Return the redactor of a journal.

    Args:
        redact: Which rules hold; a list of rules of your own holds beside those of ``"all"``.
        environment: Whose variables that are named like secrets are known.
        secrets: Further known values, each with the name that stands for it.
        allow_secrets: Hashes of values that look like secrets and are none.
        machine: Texts that tell of this machine, each with its placeholder; none by default.

    Raises:
        DataError: when *redact* is neither one of the three words nor a list of rules.
    """
    if isinstance(redact, str) and redact not in ("known", "all", "off"):
        msg = f"redact is 'known', 'all', 'off' or a list of rules, not {redact!r}"
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


class Redactor:
    """
    Replaces secrets by ``<redacted:NAME>``, deterministically.

    Args:
        known: Secret values and the name that stands for each.
        shapes: Whether texts that look like keys, and members with telling names, are replaced too.
        rules: What users add and except.
        keys: Values that are told of meanwhile; *known* names win over theirs. None by default.
        mark: Returns what tells a secret from others of its name, ``<redacted:NAME~MARK>``; None by default.

    Attributes:
        shapes: As given.
        rules: As given.
        quiet: While it holds, no text is ``suspicious``.
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
        self._own = {v: n for v, n in {**known, **rules.values}.items() if digest_of(v) not in rules.allowed}
        self._own_spellings = _make_spellings({v: self._own[v] for v in sorted(self._own, key=len, reverse=True)})
        self._configured: Mapping[str, str] = self._own
        self._keys = keys
        self._count = -1
        self._machine = _compile_machine_pattern(rules.machine)
        self._places = {
            form for place in rules.machine for form in (place, json.dumps(place, ensure_ascii=False)[1:-1])
        }
        self.shapes = shapes
        self.rules = rules
        # First by what it is: a start compares no rules, and what compares them takes it half a millisecond to make.
        is_off = not self._own and not shapes and (rules is NO_RULES or rules == NO_RULES)
        told = json.dumps([sorted(self._own.items()), shapes, rules.fingerprint_parts()])
        self._key = "" if is_off else hashlib.sha256(told.encode()).hexdigest()[:16]
        self._begun: tuple[QuietFlag, re.Pattern[str]] = NEVER, MASK
        self._load_new_secrets()

    def __repr__(self) -> str:
        return f"Redactor({len(self._spelled)} texts, shapes={self.shapes})"

    @property
    def key(self) -> str:
        """Equal for redactors that clean alike now, ``""`` for one that does nothing; it tells nothing about the values."""
        keys = self._keys
        return f"{self._key}-{keys.count}" if keys is not None and keys.names else self._key

    def _load_new_secrets(self) -> None:
        """Take over what was told since the last time."""
        keys = self._keys
        quiet = ALWAYS if keys is None else keys.quiet
        if keys is None:
            self._spelled, values, self._count = self._own_spellings, [*self._own], 0
        else:
            self._count = keys.count
            allowed = self.rules.allowed
            told = {v: n for v, n in keys.names.items() if v not in self._own and digest_of(v) not in allowed}
            spellings = keys.spellings if len(told) == len(keys.names) else _make_spellings(told)
            self._spelled, values = {**spellings, **self._own_spellings}, [*told, *self._own]
        self._ends = sorted({(v[:KEPT_BEGIN], v[-KEPT_END:]) for v in values if len(v) >= MIN_KNOWN})
        anchors = tuple(dict.fromkeys([one.anchor for one in self._spelled.values()]))
        self._may_know = make_text_finder(anchors)
        # What is shown with the middle left out shows but its ends, which stand in many texts: its mask is looked for first.
        self._may_hold = make_text_finder((*anchors, *self._places, *(MASKS if self._ends else ())))
        self.quiet = NEVER if self._key or self._spelled else quiet
        self._looks = self.shapes or self.rules is not NO_RULES
        self._clean: set[str] = set()

    def _get_spellings(self) -> Iterable[Spelling]:
        """Return what to look for in a text to find the known values."""
        if self._keys is not None and self._keys.count != self._count:
            self._load_new_secrets()
        return self._spelled.values()

    def with_known(self, known: Mapping[str, str]) -> Redactor:
        """Return a redactor that replaces further *known* values."""
        if not known:
            return self
        made = Redactor({**self._own, **known}, shapes=self.shapes, rules=self.rules, keys=self._keys, mark=self._mark)
        # What one message holds is no reason to take another value for it.
        made._configured = self._configured
        return made

    def with_marks(self, mark: Callable[[str], str]) -> Redactor:
        """Return a redactor whose placeholders tell secrets of one name apart, by what *mark* returns for each."""
        return Redactor(self._own, shapes=self.shapes, rules=self.rules, keys=self._keys, mark=mark)

    def suspicious(self, text: str) -> bool:
        """Return whether *text*, plain or JSON, may hold something to replace; cheap, and true too often."""
        keys = self._keys
        if keys is not None and keys.count != self._count:
            self._load_new_secrets()
        if self.quiet.holds:
            return False
        rules = self.rules
        # Places and anchors of such rules belong to decoded values, and cannot be looked for in their JSON.
        if rules.functions or rules.fields or rules.patterns:
            return True
        if self._may_hold(text) and (
            self._may_know(text)
            or any(place in text for place in self._places)
            or next(self._find_abridged(text), None) is not None
        ):
            return True
        return self.shapes and (looks_secret(text) or may_name_secret_member(text))

    # --- texts ------------------------------------------------------------------------------------------------------

    def text(self, text: str) -> str:
        """Return *text* with a placeholder for each secret in it."""
        text = self._replace_spans(text, self._find_known_values(text))
        if self._ends:
            text = self._replace_spans(text, self._find_abridged(text))
        for pattern in self.rules.patterns:
            text = pattern.regex.sub(lambda found, rule=pattern: self._hide_pattern(found[0], rule), text)  # type: ignore[misc]
        if self._machine is not None:
            text = self._machine.sub(lambda found: self.rules.machine[found[0]], text)
        return self._replace_spans(text, find_shapes(text)) if self.shapes else text

    def leaves(self, piece: str) -> bool:
        """
        Return whether *piece* of a text surely holds nothing to replace, and no known value begins in it.

        One look, since each token of a stream is asked for; ``False`` too often. The first three characters of a value are looked
        for, those that the end of *piece* cuts included.
        """
        told, begun = self._begun
        if not told.holds:
            begun = self._compile_beginnings()
        return begun.search(piece) is None

    def _compile_beginnings(self) -> re.Pattern[str]:
        """Return what finds whatever ``leaves`` looks for."""
        # What was told is asked for first, and kept with what follows from it: where another thread tells of a value
        # meanwhile, this holds no longer, whoever comes last.
        told = ALWAYS if self._keys is None else self._keys.quiet
        begun = {make_truncated_pattern(one.parts[:3], "") for one in self._get_spellings()}
        # What else a redactor may be told to do is looked for in whole texts alone, so no piece is left as it is.
        if self.shapes or self._machine is not None or self.rules.patterns:
            begun = {""}
        found = re.compile("|".join([*map(re.escape, MASKS), *sorted(begun)]))
        self._begun = told, found
        return found

    def beginning(self, text: str, limit: int) -> str:
        """Return the cleaned beginning of *text*, *limit* characters and a little more, whatever stands at the cut."""
        return self.text(text[: limit + BEYOND])

    def spans(self, text: str) -> list[Span]:
        """
        Return where secrets stand in *text*, in their order; those that meet are one.

        Shapes are found behind escapes too: *text* may be JSON or source.
        """
        found = [*self._find_known_values(text), *self._find_abridged(text)]
        found += [Span(*m.span(), rule.name) for rule in self.rules.patterns for m in rule.regex.finditer(text) if m[0]]
        if self.shapes:
            found += find_shapes(text)
            if "\\" in text:
                found += find_shapes(ESCAPE.sub(lambda escape: " " * len(escape[0]), text))
        return [span for span in _merge_spans(found) if not self._is_exempt(text[span.start : span.end])]

    def secrets(self, text: str, level: int = 0) -> dict[str, str]:
        """Return each secret in *text* and its rule; JSON is looked into, since an escape may hide where a key begins."""
        found = {text[start:end]: name for start, end, name in self._find_known_values(text)}
        found.update({text[start:end]: name for start, end, name in self._find_abridged(text)})
        for pattern in self.rules.patterns:
            found.update({match[0]: pattern.name for match in pattern.regex.finditer(text) if match[0]})
        if self.shapes and looks_secret(text):
            found.update({text[start:end]: name for start, end, name in find_shapes(text)})
            tree = parse_if_json(text) if level < NESTED_JSON else text
            for inner in _find_strings(tree) if tree is not text else ():
                found.update(self.secrets(inner, level + 1))
        return {secret: name for secret, name in found.items() if not self._is_exempt(secret)}

    def binary(self, data: bytes) -> bytes:
        """Return *data*, which is not text, without known values; nothing else is looked for in it."""
        text = data.decode(errors="surrogateescape")
        return self._replace_spans(text, self._find_known_values(text)).encode(errors="surrogateescape")

    def _find_known_values(self, text: str) -> Iterator[Span]:
        """Give the known values in *text*; those inside a placeholder are a part of its name."""
        spellings = self._get_spellings()
        if not self._may_know(text):
            return
        found = sorted([one for one in spellings if one.anchor in text], key=lambda one: len(one.text), reverse=True)
        for match in _compile_spellings(tuple(found)).finditer(text):
            if match.lastindex is not None:
                yield Span(*match.span(), found[match.lastindex - 1].name)

    def _find_abridged(self, text: str) -> Iterator[Span]:
        """
        Give the known values that are shown with the middle left out, as providers do: ``sk-...abcd`` (reliability:R11).

        Each mask is looked at once, with what stands directly before it, and the last place of an ending once for each run
        of characters that may follow a mask.
        """
        self._get_spellings()
        if not _has_mask(text):
            return
        done = run_end = 0
        last: dict[str, int] = {}
        for mask in MASK.finditer(text) if self._ends else ():
            begin, end = mask.span()
            before = _end_of_run(BEFORE_MASK, text[done:begin][::-1])
            first = max(done, begin - before - KEPT_BEGIN)
            if end > run_end:
                run_end = _end_of_run(AFTER_MASK, text, end)
                last = {}
            for opening, ending in self._ends:
                start = text.find(opening, first, begin)
                if start < 0:
                    continue
                if ending not in last:
                    last[ending] = text.rfind(ending, end, run_end + KEPT_END)
                if last[ending] >= end:
                    yield Span(start, last[ending] + KEPT_END, "abridged")
                    done = last[ending] + KEPT_END
                    break
            done = max(done, end)

    def _replace_spans(self, text: str, spans: Iterable[Span]) -> str:
        """Return *text* with a placeholder for each of *spans*, which come in their order."""
        made: list[str] = []
        at = 0
        for start, end, name in spans:
            if start >= at:
                made += (text[at:start], self._make_placeholder(text[start:end], name))
                at = end
        return "".join([*made, text[at:]]) if made else text

    def _make_placeholder(self, text: str, name: str) -> str:
        return text if not text or self._is_exempt(text) else self.placeholder(text, name)

    def placeholder(self, secret: str, name: str, *, may_differ: bool = True) -> str:
        """
        Return what stands for *secret*, which has this *name*.

        The sign before the mark is ``~`` for a credential, which *may_differ* between machines, and else ``=``.
        """
        if self._mark is None:
            return f"<redacted:{name}>"
        return f"<redacted:{name}{'~' if may_differ else '='}{self._mark(secret)}>"

    def replace_by_name(self, secret: str, name: str, place: Place) -> str:
        """Return what stands for *secret*, which is one because of its *name* in a *place*."""
        is_known = secret in self._configured or (self._keys is not None and secret in self._keys.names)
        return self.placeholder(secret, name, may_differ=is_known or may_differ(name, secret, place))

    def _hide_pattern(self, text: str, rule: RedactPattern) -> str:
        """Return what stands for a text that a pattern of the user finds: no credential that we know, so it always counts."""
        return text if not text or self._is_exempt(text) else self.placeholder(text, rule.name, may_differ=False)

    def _is_exempt(self, text: str) -> bool:
        allowed = self.rules.allowed
        return PLACEHOLDER.fullmatch(text) is not None or bool(allowed and digest_of(text) in allowed)

    # --- values -----------------------------------------------------------------------------------------------------

    def value(self, value: Any) -> Any:
        """
        Return a JSON value with every secret replaced, keys and JSON inside strings included.

        Raises:
            SecretFound: when a function of the user fails, since what it was to hide is not known then.
        """
        for steps in self.rules.fields:
            value = _redact_pointer(value, steps, self._hide_field)
        return _apply_functions(self.rules.functions, self._redact_tree(value, 0))

    def _hide_field(self, value: object, name: str) -> str:
        """Return what stands for a member that a pointer of the user names, whatever its value is."""
        if isinstance(value, str) and PLACEHOLDER.fullmatch(value):
            return value
        text = value if isinstance(value, str) else _write_value(value)
        return self.placeholder(text, name, may_differ=is_secret_name(name, "member"))

    def redact_for_run(self, value: object) -> Any:
        """Return *value* without secrets, but with details of the local machine, as a run may see it."""
        return self._local_redactor.value(value)

    @cached_property
    def _local_redactor(self) -> Redactor:
        """The redactor of what stays in the process, on this machine."""
        if not self.rules.machine:
            return self
        rules = attrs.evolve(self.rules, machine={})
        return Redactor(self._own, shapes=self.shapes, rules=rules, keys=self._keys)

    def json_text(self, text: str, level: int = 0) -> str:
        """Return *text* cleaned as the JSON that it is, or as text."""
        tree = parse_if_json(text)
        if isinstance(tree, str):
            is_near = self.shapes and NEARLY_JSON.match(text) is not None and may_name_secret_member(text)
            return self.text(self._redact_tokens(text, level) if is_near else text)
        clean = self._redact_tree(tree, level) if level else self.value(tree)
        return text if clean == tree else write_changes(text, tree, clean)

    def member(self, name: str, value: object, level: int = 0) -> Any:
        """Return the value of the member *name*, replaced when the name tells that it is secret."""
        if isinstance(value, str) and self._is_secret_member(name, value):
            return self.replace_by_name(value, name, "member")
        if isinstance(value, list | tuple):
            return [self.member(name, one, level) for one in value]
        if type(value) in (int, float) and self._is_secret_number(name, text := _write_value(value)):
            return self.replace_by_name(text, name, "member")
        if isinstance(value, Mapping) and any(self._is_secret_member(name, value.get(one)) for one in VALUE_WORDS):
            value = {one: self.member(name, v, level) if one in VALUE_WORDS else v for one, v in value.items()}
        return self._redact_tree(value, level)

    def _is_secret_number(self, name: str, text: str) -> bool:
        # Of tokens, numbers are counts and places in a vocabulary.
        is_count = name.rstrip("0123456789_").lower().removesuffix("value").rstrip("_").endswith("token")
        return not is_count and JSON_NUMBER.fullmatch(text) is not None and self._is_secret_member(name, text)

    def _redact_tokens(self, text: str, level: int) -> str:
        """Return a text that holds members as JSON does, but is none: broken off, in a call, too deep, or with repeated names."""
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
                value = _decode_string(piece)
                clean = self._redact_token(name or (lists[-1] if lists else ""), value, piece, level)
                if clean != value:
                    made += (text[at : token.start()], _write_string(piece, clean))
                    at = token.end()
            last = _decode_string(piece) if piece[0] == '"' else ""
        return "".join([*made, text[at:]])

    def _redact_token(self, name: str, value: str, piece: str, level: int) -> str:
        if piece[0] != '"':
            return self.replace_by_name(value, name, "member") if self._is_secret_number(name, value) else value
        if self._is_secret_member(name, value) and not is_piece_of_text(name, {name: value}):
            return self.replace_by_name(value, name, "member")
        return (
            self.json_text(value, level + 1) if level < NESTED_JSON and NEARLY_JSON.match(value) else self.text(value)
        )

    def frozen(self, value: Any) -> Any:
        """
        Return a frozen value of ``data``, such as an event, without secrets; *value* itself when there is nothing in it.

        Enumerations, errors and whatever else holds no text of its own come back as they are.
        """
        return value if self.passes(value) else self._redact_value(value)

    def passes(self, value: object) -> bool:  # noqa: C901, PLR0912 - each event of a run, and each message
        """Return whether there is surely no secret in a frozen value; ``False`` too often."""
        # All its texts at one look: hardly a value holds a secret, and to look into each text of each event on its own took longer
        # than the step that they tell of.
        if self._keys is not None and self._keys.count != self._count:
            self._load_new_secrets()
        clean = self._clean
        texts: list[str] = []
        rest: list[Any] = [value]
        for one in rest:
            kind = type(one)
            if kind is str:
                # Names stand in every event, and what is looked into is joined.
                if one and one not in clean:
                    texts.append(one)
            elif one is None:
                continue
            elif kind is tuple or kind is JsonList:
                rest += one
            elif kind is JsonDict:
                if one:
                    rest += one
                    rest += one.values()
            elif kind is Transcript:
                if self.changes(one):
                    return False
            elif kind not in NO_TEXT:
                rest += TEXTS[kind](one) if kind in TEXTS else _make_text_getter(kind)(one)
        if not texts:
            return True
        if len(texts) == 1:
            return self._redact_frozen_text(texts[0]) is texts[0]
        text = "\n".join(texts)
        return not (self._looks or self._may_hold(text)) or not self.suspicious(text)

    def changes(self, transcript: Transcript) -> bool:
        """Return whether any message of *transcript* holds a secret."""
        # Counted along the history, so that each message is looked at once and not at every step.
        return transcript.fold_on(("redaction", self.key), self._count_changes, 0) > 0

    def _count_changes(self, count: int, messages: Sequence[Message]) -> list[int]:
        if self.passes(tuple(messages)):
            return [count] * len(messages)
        return [count := count + (self.frozen(message) is not message) for message in messages]

    def _redact_value(self, value: Any) -> Any:
        kind = type(value)
        if kind in NO_TEXT:
            return value
        if kind is str:
            return self._redact_frozen_text(value)
        if kind is Transcript:
            return Transcript([self.frozen(message) for message in value]) if self.changes(value) else value
        if kind is JsonDict or kind is JsonList:
            return freeze(self.value(value)) if self.suspicious(compact(value)) else value
        if kind is tuple:
            made = tuple([self._redact_value(member) for member in value])
            return value if all(map(is_, made, value)) else made
        return self._redact_fields(value)

    def _redact_fields(self, value: Any) -> Any:
        self._get_spellings()
        kind, changed, clean = type(value), {}, self._clean
        fields = FIELDS.get(kind)
        for name, alias in _get_fields(kind) if fields is None else fields:
            old = getattr(value, name)
            of = type(old)
            # Most fields hold no text, or a name that stands in every event; each call that is saved here is saved there.
            if of in NO_TEXT or (of is str and old in clean) or FIELDS.get(of) == ():
                continue
            new = self._redact_value(old)
            if new is not old:
                changed[alias] = new
        return attrs.evolve(value, **changed) if changed else value

    def _redact_frozen_text(self, text: str) -> str:
        """Return *text* without secrets; of short ones in which there is nothing, such as names, that is remembered."""
        self._get_spellings()
        if text in self._clean:
            return text
        if self.suspicious(text):
            return self.text(text)
        if len(text) <= SHORT:
            if len(self._clean) >= MOST_CLEAN:
                self._clean.clear()
            self._clean.add(text)
        return text

    def findings(self, value: object, place: str = "") -> Iterator[tuple[str, str]]:
        """Give the JSON pointer and the rule of each secret that is in a JSON value."""
        if isinstance(value, Mapping):
            for key, member in value.items():
                inner = f"{place}/{key}"
                if not is_piece_of_text(key, value) and any(
                    self._is_secret_member(key, one) for one in _iterate_list(member)
                ):
                    yield inner, key
                yield from ((f"{place} (a key)", rule) for rule in self.secrets(key).values())
                yield from self.findings(member, inner)
        elif isinstance(value, list | tuple):
            for index, member in enumerate(value):
                yield from self.findings(member, f"{place}/{index}")
        elif isinstance(value, str):
            yield from ((place, rule) for rule in self.secrets(value).values())

    def refuse(self, value: object, where: str) -> None:
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

    def _redact_tree(self, value: object, level: int) -> object:
        if isinstance(value, Mapping):
            pieces = {k for k in value if is_piece_of_text(k, value)}
            return {
                self.text(k): self._redact_tree(v, level) if k in pieces else self.member(k, v, level)
                for k, v in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._redact_tree(v, level) for v in value]
        if not isinstance(value, str):
            return value
        nested = level < NESTED_JSON and NEARLY_JSON.match(value) is not None
        return self.json_text(value, level + 1) if nested else self.text(value)

    def _is_secret_member(self, name: str, value: object) -> bool:
        if not self.shapes or not isinstance(value, str) or not value or value.startswith("<redacted:"):
            return False
        if not is_secret(name, value, "member"):
            return False
        return not self.rules.allowed or digest_of(value) not in self.rules.allowed


class StreamRedactor:
    """
    Takes secrets out of a text that comes in pieces: what may be the beginning of a known value waits for what follows.

    Args:
        redactor: Whose known values are taken out.
    """

    def __init__(self, redactor: Redactor) -> None:
        self._redactor = redactor
        self._held = ""

    @property
    def holds(self) -> bool:
        """Whether something waits for what follows."""
        return self._held != ""

    def feed(self, piece: str) -> str:
        """Add *piece* to the text, and return the redacted text that can be shown now."""
        if not self._held and self._redactor.leaves(piece):
            return piece
        text = self._redactor.text(self._held + piece)
        cut = self._find_unfinished(text)
        self._held = text[cut:]
        return text[:cut]

    def rest(self) -> str:
        """Remove and return the text that is held back, when nothing follows any more."""
        text, self._held = self._held, ""
        return text

    def _find_unfinished(self, text: str) -> int:
        """Return where the beginning of a known value stands at the end of *text*; its length when there is none."""
        cut = len(text)
        for one in self._redactor._get_spellings():  # noqa: SLF001 - one concept
            found = one.unfinished.search(text, max(0, len(text) - one.longest))
            if found is not None:
                cut = min(cut, found.start())
        return cut


# --- finding --------------------------------------------------------------------------------------------------------


FIELDS: dict[type[Any], tuple[tuple[str, str], ...]] = {}
"""The fields of classes that were met, each with the name of its argument; none for what is looked into no further."""


def _get_fields(kind: type[Any]) -> tuple[tuple[str, str], ...]:
    known = FIELDS.get(kind)
    if known is None:
        fields = attrs.fields(kind) if attrs.has(kind) else ()
        known = FIELDS[kind] = tuple([(field.name, field.alias) for field in fields if field.init])
    return known


TEXTS: dict[type[Any], Callable[[Any], tuple[object, ...]]] = {}
"""What gives the fields of classes that were met, as far as they may hold a text."""
NUMBERS = frozenset({
    "Decimal", "Decimal | None", "RunPhase", "RunStatus", "StopReason", "Usage", "bool", "float", "float | None", "int", "int | None",
})  # fmt: skip
"""What is written at fields that hold no text."""


def _make_text_getter(kind: type[Any]) -> Callable[[Any], tuple[object, ...]]:
    from stepengine.data.events import Event

    # Where an event stands is ours, and not known yet.
    place = {field.name for field in attrs.fields(Event)} if issubclass(kind, Event) else set()
    types = {field.name: field.type for field in attrs.fields(kind)} if attrs.has(kind) else {}
    names = [name for name, _ in _get_fields(kind) if types[name] not in NUMBERS and name not in place]
    TEXTS[kind] = attrgetter(*names) if len(names) > 1 else _make_field_getter(names[0]) if names else _return_no_fields
    return TEXTS[kind]


def _make_field_getter(name: str) -> Callable[[object], tuple[object, ...]]:
    return lambda value: (getattr(value, name),)


def _return_no_fields(_: object) -> tuple[object, ...]:
    return ()


def _make_spellings(known: Mapping[str, str]) -> dict[str, Spelling]:
    return {one.text: one for value, name in known.items() for one in spellings_of(value, name)}


@lru_cache(maxsize=256)
def _compile_spellings(spellings: tuple[Spelling, ...]) -> re.Pattern[str]:
    """Return the expression for placeholders, which are passed over, and for each of *spellings* as a group."""
    return re.compile("|".join(["<redacted:[^<>]*>", *[f"({one.pattern})" for one in spellings]]))


@cache
def _compile_shapes() -> re.Pattern[str]:
    """Return what finds every shape; few texts are looked into, and compiling it takes as long as the rest of this module."""
    return re.compile("|".join([f"(?P<{name.replace('-', '_')}>{pattern})" for name, pattern in SHAPES]))


def find_shapes(text: str) -> list[Span]:
    """Return where texts that look like keys stand in *text*, in their order."""
    if not looks_secret(text):
        return []
    found = []
    if _may_have_shape(text):
        found += [
            Span(*match.span(), str(match.lastgroup).replace("_", "-")) for match in _compile_shapes().finditer(text)
        ]
    found += [
        Span(*match.span(2), name)
        for kind in (QUERY_PAIR, NESTED_PAIR)
        for match in kind.finditer(text)
        if may_differ(name := _decode_escapes(match[1]), _decode_escapes(match[2]), "parameter")
    ]
    found += [Span(*match.span(1), "password") for match in PASSWORD_SHAPE.finditer(text) if match[1].strip("*")]
    found += [Span(*match.span(1), "user") for match in USER_IN_ADDRESS.finditer(text) if looks_random(match[1])]
    return _merge_spans([*found, *_find_pem_blocks(text)])


def _find_pem_blocks(text: str) -> Iterator[Span]:
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
    """Return *spans* in their order; those that meet are one, with the name of the first."""
    apart: list[Span] = []
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        if apart and span.start < apart[-1].end:
            apart[-1] = apart[-1]._replace(end=max(apart[-1].end, span.end))
        else:
            apart.append(span)
    return apart


def _compile_machine_pattern(machine: Mapping[str, str]) -> re.Pattern[str] | None:
    """Return what finds the texts of *machine* where they stand alone or begin a path."""
    longest = sorted(machine, key=len, reverse=True)
    texts = "|".join(map(re.escape, longest))
    return re.compile(rf"(?<![\w.-])(?:{texts})(?![\w-]|\.\w)") if texts else None


def _redact_pointer(
    value: object, steps: tuple[str, ...], hide: Callable[[object, str], str], begun: Iterable[tuple[str, ...]] = ()
) -> object:
    """Return *value* with what *hide* makes of each place that *steps* lead to; *begun* are the ends of those under way."""
    if not isinstance(value, Mapping | list | tuple):
        return value
    members = value.items() if isinstance(value, Mapping) else enumerate(value)
    made: dict[Any, object] = {}
    for key, member in members:
        left = {end[1:] for end in (steps, *begun) if end[0] in ("*", str(key))}
        made[key] = hide(member, steps[-1]) if () in left else _redact_pointer(member, steps, hide, left)
    return made if isinstance(value, Mapping) else [*made.values()]


def _apply_functions(functions: Iterable[Callable[[Any], Any]], value: Any) -> Any:
    for function in functions:
        name = getattr(function, "__qualname__", type(function).__qualname__)
        try:
            value = function(value)
        except Exception as error:  # noqa: BLE001 - it is told without what it holds
            msg = f"the redact function {name!r} raised {type(error).__name__}; nothing was written"
            raise SecretFound(msg, rule=name) from None  # what it raised may quote the value
    return value


def _has_mask(text: str) -> bool:
    """Return whether anything stands in *text* for the middle of a key; a cheap test before ``MASK``."""
    stars, dots, ellipsis = MASKS
    return stars in text or dots in text or ellipsis in text


def _end_of_run(run: re.Pattern[str], text: str, start: int = 0) -> int:
    """Return where the *run* of characters that begins at *start* ends."""
    found = run.match(text, start)
    return start if found is None else found.end()


@lru_cache(maxsize=256)
def make_text_finder(texts: tuple[str, ...], *, any_case: bool = False) -> Callable[[str], bool]:
    """Return what says whether any of *texts* stands in a text; in *any_case* also what Unicode takes for one of them."""
    # One look for all of them. Five keys have fifty-five forms, and a search for each in every line of a journal took as long as
    # the rest of the line; in a long text, each search reads all of it. `re` tries every text at every character.
    if len(texts) > MOST_AT_ONCE:
        parts = [
            make_text_finder(texts[at : at + MOST_AT_ONCE], any_case=any_case)
            for at in range(0, len(texts), MOST_AT_ONCE)
        ]
        return lambda text: any(find(text) for find in parts)
    search: Callable[[str], bool] | None = None
    read = 0

    def look_for_each(text: str) -> bool:
        if any_case:
            text = text.lower()
        return any(sought in text for sought in texts)

    def find(text: str) -> bool:
        nonlocal read, search
        if search is None:
            # A program without models and typed tools loads no pydantic, and would take longer for it than for its few texts.
            read += len(text) * len(texts)
            if read < WORTH_LOADING and CORE not in sys.modules:
                return look_for_each(text)
            search = _compile_search(texts, any_case=any_case) or look_for_each
        # Nothing at all is found in a text with half of a character, which JSON may hold.
        return search(text) or (not (text.isascii() or _is_encodable(text)) and look_for_each(text))

    return find if texts else _return_false


def _compile_search(texts: tuple[str, ...], *, any_case: bool) -> Callable[[str], bool] | None:
    """Return an expression that finds any of *texts*, by an engine that cannot backtrack; ``None`` where it takes none so long."""
    from pydantic_core import SchemaError, SchemaValidator, core_schema

    pattern = f"(?{'i' if any_case else 's'}){'|'.join(map(re.escape, texts))}"
    try:
        return SchemaValidator(core_schema.str_schema(pattern=pattern)).isinstance_python
    except (SchemaError, UnicodeError):
        return None


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _return_false(_: str) -> bool:
    return False


_may_have_shape = make_text_finder(SHAPE_HINTS)


def looks_secret(text: str) -> bool:
    """Return True if a text may hold a secret by its shape; a cheap test before the real one."""
    return (
        _may_have_shape(text)
        or ("://" in text and "@" in text)
        or ("=" in text and ("?" in text or "&" in text or "#" in text))
        or "%3D" in text
        or "%3d" in text
    )


def parse_if_json(text: str) -> object:
    """
    Return the JSON object or array that *text* holds, else the text.

    What repeats a name or is nested deeper than 200 is a text: reading it would hide a value, or not come back.
    """
    if text[:1] not in ("{", "["):
        return text
    try:
        tree = json.loads(text, object_pairs_hook=_reject_duplicate_names)
    except (ValueError, RecursionError):
        return text
    return text if _is_nested_too_deeply(text, tree) else tree


def _decode_string(piece: str) -> str:
    """Return the text of a JSON string, or any other *piece* of JSON as it is."""
    if piece[:1] != '"':
        return piece
    try:
        return str(json.loads(piece))
    except ValueError:
        return piece.strip('"')


def write_changes(text: str, old: object, new: object) -> str:
    """Return the JSON *text* of *old* as one of *new*, in which all that is equal stays as it is written."""
    made: list[str] = []
    at = 0
    for start, end, piece in _find_changes(JSON_TOKEN.finditer(text), old, new):
        made += (text[at:start], piece)
        at = end
    return "".join([*made, text[at:]])


def _find_changes(tokens: Iterator[re.Match[str]], old: object, new: object) -> Iterator[tuple[int, int, str]]:
    """Take the tokens of *old*, and yield the start, end and new text of each part that differs in *new*."""
    first = next(tokens)
    if isinstance(old, dict) and isinstance(new, Mapping) and len(old) == len(new) > 0:
        for (name, member), (new_name, new_member) in zip(old.items(), new.items(), strict=True):
            key, _colon = next(tokens), next(tokens)
            if name != new_name:
                yield *key.span(), _write_string(key[0], new_name)
            yield from _find_changes(tokens, member, new_member)
            next(tokens)
    elif isinstance(old, list) and isinstance(new, list | tuple) and len(old) == len(new) > 0:
        for member, new_member in zip(old, new, strict=True):
            yield from _find_changes(tokens, member, new_member)
            next(tokens)
    else:
        last, depth = first, int(first[0] in OPENING)
        while depth:
            last = next(tokens)
            depth += (last[0] in OPENING) - (last[0] in CLOSING)
        if old is not new and (type(old) is not type(new) or old != new):
            piece = _write_string(first[0], new) if isinstance(new, str) else _write_value(new)
            yield first.start(), last.end(), piece


def _write_string(piece: str, text: str) -> str:
    """Return *text* as a JSON string that begins and ends with the spelling of *piece*, as far as both are equal there."""
    if piece[0] != '"' or not _is_json_string(piece):
        return _write_value(text)
    spelled = JSON_CHARACTER.findall(piece[1:-1])
    before = [json.loads(f'"{one}"') if one[0] == "\\" else one for one in spelled]
    most = min(len(before), len(text))
    same = next((at for at in range(most) if before[at] != text[at]), most)
    most -= same
    end = next((at for at in range(most) if before[-1 - at] != text[-1 - at]), most)
    middle = _write_value(text[same : len(text) - end])[1:-1]
    return f'"{"".join(spelled[:same])}{middle}{"".join(spelled[len(spelled) - end :])}"'


def _is_json_string(piece: str) -> bool:
    try:
        return isinstance(json.loads(piece), str)
    except ValueError:
        return False


def _write_value(value: object) -> str:
    """Return *value* as JSON as programs write it, numbers that are not finite included."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text if _is_encodable(text) else json.dumps(value, separators=(",", ":"))


def _reject_duplicate_names(pairs: list[tuple[str, object]]) -> dict[str, object]:
    made = dict(pairs)
    if len(made) != len(pairs):
        msg = "a name stands twice in an object, and one of its values would be lost"
        raise ValueError(msg)
    return made


def _is_nested_too_deeply(text: str, tree: Any) -> bool:
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return False
    level = [tree]
    for _ in range(MAX_DEPTH + 1):
        inner = [[*node.values()] if type(node) is dict else node for node in level if type(node) in (dict, list)]
        if not inner:
            return False
        level = [member for node in inner for member in node]
    return True


def _iterate_list(value: object) -> Iterator[object]:
    """Yield *value*, or what is in it at any depth if it is a list."""
    if isinstance(value, list | tuple):
        for member in value:
            yield from _iterate_list(member)
    else:
        yield value


def _find_strings(value: object) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, member in value.items():
            yield key
            yield from _find_strings(member)
    elif isinstance(value, list):
        for member in value:
            yield from _find_strings(member)
    elif isinstance(value, str):
        yield value


KNOWN = Redactor({}, shapes=False, keys=GIVEN)
"""What takes out the values that this process knows to be secret, and nothing else."""

ANY = Redactor({}, shapes=True, keys=GIVEN)
"""The same, and what looks like a secret."""
