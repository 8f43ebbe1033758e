"""
The origin of a value: the tokens of texts, ``Source``, and ``Provenance``, an index of everything that a run has received.

A value is looked up by whole tokens: words, addresses, URLs, numbers and ids. A part of a token never matches. Neither does a
look-alike: characters are compared as they are, and case is ignored only in words and names of hosts. Digits in groups are
one number. The day in a date is no number.

Pure. Adding a source reads it once; a look-up reads only the places of the rarest token of its value.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from itertools import islice
from typing import Any, Literal, TypeAlias

import attrs
from attrs import frozen

Trust: TypeAlias = Literal["trusted", "names", "untrusted"]
"""
``"trusted"`` text is from the author or the user; ``"untrusted"`` text may be from third parties. ``"names"`` are texts of a directory,
such as contacts and channels. Each is trusted only as a whole, since third parties may choose their names.
"""
SourceKind: TypeAlias = Literal[
    "prompt", "handler", "person", "tool", "child", "message", "perform", "model", "history", "error"
]

_MONTH = r"(?:jan|feb|mar|apr|may|june?|july?|aug|sept?|oct|nov|dec|january|february|march|april|august|september|october|november|december)"
_DAY = r"[0-9]{1,2}(?:st|nd|rd|th)?"
TOKEN = re.compile(
    rf"""
    (?P<word>(?!(?i:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec))[A-Za-z]+(?=[ \n]))
    |(?P<redacted><redacted:[^<>]*>)
    |(?P<skip>['"(){{}}\[\],;:!?|\#@\u2018-\u201f\u2022\u2026\u2013\u2014\u00ab\u00bb]+)
    |(?P<url>[A-Za-z][A-Za-z0-9+.-]*://[^\s<>"`]+)
    |(?P<grouped>[A-Z]{{2}}[0-9]{{2}}(?:\ [A-Z0-9]{{4}}){{2,8}}(?:\ [A-Z0-9]{{1,3}})?(?!\w)
        |(?:\+[0-9]{{1,3}}[ -])?[0-9]{{2,4}}(?P<joint>[ -])[0-9]{{2,4}}(?:(?P=joint)[0-9]{{2,4}})+(?![\w-]))
    |(?P<number>[0-9]{{1,3}}(?:,[0-9]{{3}})+(?:\.[0-9]+)?(?![\w,]))
    |(?P<date>(?i:{_MONTH}\.?\ {_DAY}(?![\w-])|{_DAY}\.?\ (?:of\ )?{_MONTH}(?![\w-]|\ {_DAY}(?!\w))))
    |(?P<chunk>[^\s<>"`(){{}}\[\],;|\u201c\u201d\u201e\u00ab\u00bb]+)
    """,
    re.VERBOSE,
)
TRAILING = ".,:;!?'\u2019\u2026"
BREAKS = re.compile('[.!?;:,|\n(){}\\[\\]<>"\u2026]')
"""Words on both sides of one of these are not next to each other."""
EMAIL = re.compile(r"([A-Za-z0-9._%+'-]+)@([A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)+)")
HOST = re.compile(r"[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)*\.[A-Za-z]{2,}")
NUMBER = re.compile(r"[+-]?[0-9]+(?:\.[0-9]+)?")
WORD_JOINTS = str.maketrans("", "", "-'\u2019")
NAMED_ADDRESS = re.compile(r"[^<>@]*<([^<>\s]+@[^<>\s]+)>\s*")
URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://([A-Za-z0-9.-]+)(:[0-9]+)?([/?#][^\\]*)?")
ID_WORDS = frozenset({"id", "ids", "number", "numbers", "no", "nr"})
THING_WORDS = frozenset({
    "account", "appointment", "booking", "document", "email", "entry", "event", "file", "folder", "invoice", "issue", "item", "job", "line",
    "mail", "meeting", "message", "note", "order", "page", "payment", "pr", "record", "request", "row", "run", "step", "task", "ticket",
    "transaction", "user",
})  # fmt: skip
"""Words before a short number that is an id; after other words it may be a count, such as of hours."""
LIST_WORDS = frozenset({"and", "or", ""})
MAX_COUNT_DIGITS = 4
"""A number with more digits is no count in a request of a person, so it may be an id anywhere."""
MAX_URL_CHARS = 4_096
"""No browser shows more; a longer address matches only an identical text."""
USUAL_PORTS = {"http": ":80", "https": ":443"}
KEPT_TEXTS = 64
"""Arguments and results are read several times within a step."""
MIN_GROUPED_DIGITS = 9
"""Fewer digits in groups are several numbers, such as a list of ids."""
MAX_COMPARED_TOKENS = 64
"""The tokens of a value that are compared at each position. In a longer value, each source text is searched once."""
MAX_CANDIDATES = 32
"""The most positions at which a piece of a prompt is searched. With a more frequent word, a found piece may be shorter."""
BREAK = ""
"""Separates tokens that are not adjacent."""
END = "\n"
"""Separates two texts; no value contains it."""
NEVER = "\0"
"""Replaces a redacted value, which is found nowhere."""


@frozen
class Source:
    """
    One place of a run in which a value occurs.

    Attributes:
        kind: ``"prompt"`` of the run, ``"handler"``, ``"person"`` who answered or wrote, result of a ``"tool"``, output of a
            ``"child"``, ``"message"`` on a topic, result of a ``"perform"``, tool of the ``"model"``'s provider, ``"history"`` of the conversation
            before this run, or ``"error"``.
        trust: Whether it may hold text of third parties.
        step: The step in which it arrived, from 0; ``None`` before the first.
        tool: The tool, agent, topic or function.
        call_id: The id of the tool call.
        about: The subject of the call, such as the path of a file.
        path: The place in the value, such as ``contacts[3].email``; ``""`` for a text.
    """

    kind: SourceKind
    trust: Trust = "untrusted"
    step: int | None = None
    tool: str = ""
    call_id: str = ""
    about: str = ""
    path: str = ""


# --- tokens -----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=KEPT_TEXTS)
def tokenize(text: str) -> tuple[str, ...]:
    """Return the normalized tokens of a text, with ``BREAK`` between those that are not next to each other."""
    found: list[str] = []
    end = 0
    for match in TOKEN.finditer(text):
        kind, token, start = match.lastgroup, match.group(), match.start()
        # Most tokens are words after one space.
        is_far = start - end > 1 or text[end:start] != " "
        if found and found[-1] and is_far and BREAKS.search(text, end, start):
            found.append(BREAK)
        end = match.end()
        if kind == "word":
            found.append(token.lower())
            continue
        if kind == "skip":
            if found and found[-1] and BREAKS.search(token):
                found.append(BREAK)
            continue
        if kind in ("url", "chunk"):
            token = token.rstrip(TRAILING) or token
            # The stripped signs belong to the gap before the next token.
            end = start + len(token)
        found += _normalize_token(kind or "", token)
    if found and not found[-1]:
        found.pop()
    return tuple(found)


def _normalize_token(kind: str, token: str) -> list[str]:
    match kind:
        case "redacted":
            return [NEVER]
        case "url":
            return [_normalize_url(token)]
        case "number":
            return [_normalize_number(token.replace(",", ""))]
        case "date":
            day = next(re.finditer("[0-9]+", token)).group()
            return [f"{day} {re.sub('[^a-z]|of ', '', re.sub(_DAY, '', token.lower()))[:3]}"]
        case "grouped":
            joined = token.replace(" ", "").replace("-", "")
            if len(joined) >= MIN_GROUPED_DIGITS:
                return [joined]
            return [one for part in token.split(" ") for one in _normalize_chunk(part)]
        case _:
            return _normalize_chunk(token)


def _normalize_chunk(token: str) -> list[str]:
    if NUMBER.fullmatch(token):
        return [_normalize_number(token)]
    if is_word(token):
        word = token[:-2] if token.endswith(("'s", "\u2019s")) else token
        return [_fold_case(word)]
    if "@" in token:
        label, colon, address = token.rpartition(":")
        if (found := EMAIL.fullmatch(address)) and (not colon or label.isalpha()):
            # The part before the @ is an id: providers may distinguish case in it.
            mail = f"{found[1]}@{found[2].lower()}"
            return [*([_fold_case(label), BREAK] if colon and label.lower() != "mailto" else ()), mail]
    return [token.lower() if HOST.fullmatch(token) else token]


def _fold_case(word: str) -> str:
    """Return a word in lower case, except signs whose lower case is another letter: the Kelvin sign does not become k."""
    return word.lower() if word.isascii() else "".join(map(_fold_letter, word))


def _fold_letter(char: str) -> str:
    low = char.lower()
    return low if low.upper() == char or low == char else char


def _normalize_number(text: str) -> str:
    """Return a number without zeros at the end of its fraction; an id or telephone number is unchanged."""
    digits = text.lstrip("+-")
    if text.startswith("+") or (digits.startswith("0") and digits != "0" and not digits.startswith("0.")):
        return text  # an id or a telephone number
    if "." not in text:
        return text
    return text.rstrip("0").rstrip(".")


def _normalize_url(text: str) -> str:
    """Return an address with scheme and host in lower case; as the host alone if it contains nothing else."""
    if len(text) > MAX_URL_CHARS:
        return text
    # A closing bracket after an address is not part of it, unless the address has the opening one, too.
    for opening, closing in ("()", "[]", "{}"):
        while text.endswith(closing) and text.count(closing) > text.count(opening):
            text = text[:-1].rstrip(TRAILING)
    parts = URL.fullmatch(text)
    if parts is None:
        return text  # a name, password or backslash can disguise its host, so it matches only an identical text
    scheme, host, port, rest = parts[1].lower(), parts[2].lower(), parts[3] or "", parts[4] or ""
    if port == USUAL_PORTS.get(scheme):
        port = ""
    if rest in ("", "/") and not port and scheme in USUAL_PORTS:
        return host
    return f"{scheme}://{host}{port}{rest or '/'}"


def is_word(token: str) -> bool:
    """Return whether a token consists of letters, with hyphens and apostrophes between them."""
    return token.translate(WORD_JOINTS).isalpha()


def _is_address(token: str) -> bool:
    return "://" in token or EMAIL.fullmatch(token) is not None or HOST.fullmatch(token.partition("/")[0]) is not None


def _is_short_number(text: str) -> bool:
    digits = text.strip()
    return digits.isdigit() and len(digits) <= MAX_COUNT_DIGITS


def find_addresses(value: object) -> Iterator[tuple[str, str]]:
    """Yield the e-mail addresses, host names and URLs in the texts of a JSON value, each after the path of its text."""
    for path, text in iterate_leaves(value):
        yield from ((path, token) for token in tokenize(text) if _is_address(token))


def iterate_leaves(value: object, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield path and text of each text and number in a JSON value; member names with an address are texts, too."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping):
        for name, member in value.items():
            if "@" in name or "://" in name:
                yield path, name
            yield from iterate_leaves(member, f"{path}.{name}" if path else str(name))
    elif isinstance(value, list | tuple):
        for number, member in enumerate(value):
            yield from iterate_leaves(member, f"{path}[{number}]")
    elif isinstance(value, int | float | Decimal) and not isinstance(value, bool):
        yield path, _format_number(value)


def _format_number(value: float | Decimal) -> str:
    """Return a number in the way in which people write it: 1e3 is 1000."""
    try:
        return format(Decimal(str(value)), "f")
    except InvalidOperation:
        return str(value)


# --- the index --------------------------------------------------------------------------------------------------------


def _return_unchanged(value: Any) -> Any:
    return value


class Provenance:
    """
    An index of all data that a run has received, to find the origins of a value.

    Args:
        outer: The index of the data received before this run, by the caller of a tool's body or the parent of a child that
            continues the conversation.
        clean: Redacts a value as the journal of the run does, so that nothing is found that a replay could not find.

    Attributes:
        saw_untrusted: Whether any data may contain text of third parties.
    """

    __slots__ = (
        "_clean", "_leaf_starts", "_leaves", "_names", "_outer", "_outer_end", "_places", "_tokens", "saw_untrusted",
    )  # fmt: skip

    def __init__(self, outer: Provenance | None = None, clean: Callable[[Any], Any] = _return_unchanged) -> None:
        self._tokens: list[str] = []
        # By trust, so that a decision does not depend on the amount of untrusted data.
        self._places: dict[Trust, dict[str, list[int]]] = {"trusted": {}, "untrusted": {}}
        self._names: dict[tuple[str, ...], list[int]] = {}
        self._leaf_starts: list[int] = []
        self._leaves: list[tuple[Source, str]] = []
        self._outer = outer
        self._outer_end = 0 if outer is None else len(outer._tokens)  # noqa: SLF001  (of the same class)
        self._clean: Callable[[Any], Any] = clean if outer is None else outer._clean  # noqa: SLF001
        self.saw_untrusted: bool = outer is not None and outer.saw_untrusted

    def add(self, source: Source, value: object, *, at: str = "", taints: bool = True) -> None:
        """
        Add the texts and numbers of a JSON value to the index, as data of *source*.

        Args:
            source: The source.
            value: The value, or the part of it at the path *at*.
            at: The path of *value* in the whole value.
            taints: Whether a source that is not trusted, a list of names included, sets ``saw_untrusted``.
        """
        for path, text in iterate_leaves(self._clean(value), at):
            tokens = tokenize(text)
            if tokens:
                self._add_tokens(source, path, tokens)
                self.saw_untrusted = self.saw_untrusted or (taints and source.trust != "trusted")

    def _add_tokens(self, source: Source, path: str, tokens: Sequence[str]) -> None:
        start = len(self._tokens)
        self._leaf_starts.append(start)
        self._leaves.append((source, path))
        places = self._places["trusted" if source.trust == "trusted" else "untrusted"]
        if source.trust == "names":
            self._names.setdefault(tuple(tokens), []).append(start)
        for place, token in enumerate(tokens, start):
            if token not in (BREAK, NEVER):
                places.setdefault(token, []).append(place)
        self._tokens += tokens
        self._tokens.append(END)

    def find_sources(
        self, value: object, *, is_id: bool = False, max_sources_per_text: int | None = None
    ) -> tuple[Source, ...]:
        """
        Return the sources in which a value occurs, the trusted ones first.

        A text occurs as a whole, or by each address in it; of a list or object each member counts. *is_id* is as in ``is_trusted``.
        At most *max_sources_per_text* places count for each text and each kind of trust.
        """
        found: dict[Source, None] = {}
        for _, text in iterate_leaves(value):
            tokens = tokenize(self._clean(text))
            addresses = dict.fromkeys([(token,) for token in tokens if _is_address(token)])
            for wanted in (tokens, *[one for one in addresses if one != tokens]):
                for trust in ("trusted", "untrusted"):
                    sources = self._find_token_sources(wanted, trust, is_id=is_id and _is_short_number(text))
                    found.update(dict.fromkeys(islice(sources, max_sources_per_text)))
        return tuple(found)

    def is_trusted(self, value: object, *, is_id: bool = False) -> bool:
        """
        Return whether each text, number and address in a value occurs in a trusted source; an empty value is trusted.

        With *is_id* a short number must occur as an id: as a whole text, or after a word such as "file". "1 hour" names no file.
        """
        return all(self._is_text_trusted(text, is_id=is_id) for _, text in iterate_leaves(value))

    def _is_text_trusted(self, text: str, *, is_id: bool) -> bool:
        """Return whether a trusted source contains *text*, or each address in it; blank text is trusted."""
        if not text.strip():
            return True
        named = NAMED_ADDRESS.fullmatch(text)
        tokens = tokenize(self._clean(named[1] if named else text))
        if self._occurs_in_trusted(tokens, is_id=is_id and _is_short_number(text)):
            return True
        # Several addresses in one text, such as "a@x.org, b@y.org": each is checked separately.
        alone = [token for token in tokens if token != BREAK]
        return len(alone) > 1 and all(_is_address(token) and self._occurs_in_trusted((token,)) for token in alone)

    def _occurs_in_trusted(self, tokens: tuple[str, ...], *, is_id: bool = False) -> bool:
        return next(self._find_token_sources(tokens, "trusted", is_id=is_id), None) is not None

    def _find_token_sources(
        self, tokens: tuple[str, ...], trust: Trust, end: int | None = None, *, is_id: bool = False
    ) -> Iterator[Source]:
        """Yield the sources of a trust with adjacent *tokens*, before the position *end*."""
        if self._outer is not None:
            yield from self._outer._find_token_sources(tokens, trust, self._outer_end, is_id=is_id)  # noqa: SLF001
        if trust == "trusted":
            yield from self._find_name_list_sources(tokens, end)
        places = self._places[trust]
        counts = [(len(places.get(token, ())), number) for number, token in enumerate(tokens) if token != BREAK]
        count, rarest = min(counts, default=(0, 0))
        last = -1
        for place in places[tokens[rarest]] if count else ():
            if end is not None and place >= end:
                return
            start = place - rarest
            leaf = bisect_right(self._leaf_starts, place) - 1
            if leaf == last or start < 0 or (is_id and not self._is_number_an_id(place)):
                continue
            is_long = len(tokens) > MAX_COMPARED_TOKENS
            if is_long:
                last = leaf
            if (
                self._leaf_contains(leaf, tokens)
                if is_long
                else tuple(self._tokens[start : start + len(tokens)]) == tokens
            ):
                last = leaf
                yield self._get_source(leaf)

    def _find_name_list_sources(self, tokens: tuple[str, ...], end: int | None) -> Iterator[Source]:
        """Yield the sources that list names, before the token position *end*, with *tokens* as a whole entry."""
        for start in self._names.get(tokens, ()):
            if end is None or start < end:
                yield self._get_source(bisect_right(self._leaf_starts, start) - 1)

    def _get_source(self, leaf: int) -> Source:
        source, path = self._leaves[leaf]
        return attrs.evolve(source, path=path) if path else source

    def _leaf_contains(self, leaf: int, tokens: tuple[str, ...]) -> bool:
        """Return whether tokens are adjacent in a text, in time linear in both."""
        starts = self._leaf_starts
        own = self._tokens[starts[leaf] : starts[leaf + 1] - 1 if leaf + 1 < len(starts) else -1]
        return END.join(("", *tokens, "")) in END.join(("", *own, ""))

    def _is_number_an_id(self, place: int) -> bool:
        """Return whether the number at token *place* is an id: a whole text, or after a word such as "order" or "ids", also in a list."""
        first = self._leaf_starts[bisect_right(self._leaf_starts, place) - 1]
        if place == first and self._tokens[place + 1] == END:
            return True
        before = place - 1
        while before >= first and (self._tokens[before] in LIST_WORDS or NUMBER.fullmatch(self._tokens[before])):
            before -= 1
        word = self._tokens[before] if before >= first else ""
        # After the end of a sentence or a colon, only a word for ids belongs to the number.
        is_adjacent = place == first or self._tokens[before + 1] != BREAK
        return word in ID_WORDS or (is_adjacent and (word in THING_WORDS or word.removesuffix("s") in THING_WORDS))

    def make_child_index(self, values: Iterable[object]) -> Provenance:
        """
        Return the index of a child for *values*, its prompt and params; only parts that are trusted here are trusted there.

        The parts of these that occur in a trusted source here are trusted in the child, in the longest possible pieces.
        """
        child = Provenance(clean=self._clean)
        is_whole = True
        for place, text in iterate_leaves(self._clean(list(values))):
            tokens, path = tokenize(text), place.partition("]")[2].lstrip(".")
            pieces = list(self._find_trusted_pieces(tokens))
            for piece in pieces:
                child._add_tokens(Source("prompt", "trusted"), path, piece)
            if tokens and pieces != [tokens]:
                is_whole = False
                child._add_tokens(Source("prompt"), path, tokens)
        # A model that has seen nothing untrusted has written nothing that a third party wanted.
        child.saw_untrusted = self.saw_untrusted and not is_whole
        return child

    def _find_trusted_pieces(self, tokens: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        """Yield the longest sequences of *tokens* that a trusted source contains, from the left."""
        wanted, start = list(tokens), 0
        while start < len(wanted):
            size = 0
            for where, place in islice(self._find_trusted_places(wanted[start]), MAX_CANDIDATES):
                # A longer piece must contain the longest one so far, and one token more.
                if where[place : place + size] != wanted[start : start + size]:
                    continue
                # Each text ends with its own token, so a piece never extends over its end.
                while start + size < len(wanted) and where[place + size] == wanted[start + size] != NEVER:
                    size += 1
            if size:
                yield tokens[start : start + size]
            start += max(size, 1)

    def _find_trusted_places(self, token: str, end: int | None = None) -> Iterator[tuple[list[str], int]]:
        """Yield each occurrence of *token* in trusted text before *end*: the list of tokens and the index."""
        if self._outer is not None:
            yield from self._outer._find_trusted_places(token, self._outer_end)  # noqa: SLF001
        for place in self._places["trusted"].get(token, ()):
            if end is not None and place >= end:
                return
            yield self._tokens, place
