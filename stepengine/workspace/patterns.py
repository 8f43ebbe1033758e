"""
Patterns of paths and of text, with a bounded matching time for every pattern.

``GlobPattern`` is the form of tools (``*``, ``?``, ``[...]``, ``**``, ``{a,b}``; ``[*]`` is a plain ``*``). ``IgnorePattern`` is a line of a
``.gitignore`` file, with git's meaning. A component becomes an expression that does not backtrack over a ``*``, as ``fnmatch`` makes
them. Components are matched as a set of positions, not by trying one way after another.

``get_max_search_columns`` checks regular expressions for Python's ``re``, which backtracks. Nested repetitions can take exponential
time, so they raise an error, as do long sequences of optional parts and more than two unbounded repetitions. For the remaining ones, the
searched part of a line bounds the time.
"""

from __future__ import annotations

import fnmatch
import itertools
import math
import operator
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

from stepengine.errors import ToolError

MAX_FORMS = 64
"""Braces multiply; a person writes a few, and each one is compared with every path."""
PATTERN_CHARS = 512
"""Far longer than real patterns; each is compared with every path."""
MAX_COMPONENTS = 64
"""Folders are rarely nested twenty deep; the time for `**` grows with their number."""
LINE_CHARS, SLASHES = 4_096, 200
"""Limits of a line of a ``.gitignore`` file: no path is long or deep enough for a longer one."""

BRACES = re.compile(r"(?:(?<!\[)\{|\{(?!\]))((?:\[[{},]\]|[^{}])*+)\}")
COMMA = re.compile(r"(?<!\[),|,(?!\])")
"""A brace or comma alone in brackets is a character of a name."""
CLASS_OR_CHARACTER = re.compile(r"\[.[^\]]*\]|.", re.DOTALL)
MAX_NAME_PRODUCT = 65_536
"""Of the lengths of two names that are compared character by character."""
ESCAPED = re.compile(r"\[.\]", re.DOTALL)
SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(?=/)|(?i:(file)):")
BASE = re.compile(r"~[\w.-]*(?:/|$)|\$(?:\w+|\{\w+\})(?:/|$)|%\w+%(?:/|$)|[A-Za-z]:(?:/|$)")
"""The start of a path for which a shell or another system has its own folder."""
ENCODED_SLASH = re.compile(r"%(?:2[Ff]|5[Cc])")
BLANK_AT_END = re.compile(r"(?<![^/]) +| +(?![^/])")

Component = Callable[[str], object] | None
"""Matches one name; ``None`` is ``**``, any number of names."""


class GlobPattern:
    """
    A glob pattern for paths relative to one folder.

    Args:
        pattern: The pattern.
        dotfiles: Whether wildcards match a name that begins with a dot. In a shell they do not: ``.*`` does.

    Raises:
        ToolError: for an empty or absolute pattern, one with ``..``, and one that is too long or branches too often.
    """

    def __init__(self, pattern: str, *, dotfiles: bool = True) -> None:
        text = pattern.removeprefix("./")
        problem = ""
        if not text or len(text) > PATTERN_CHARS:
            problem = f"a pattern has 1 to {PATTERN_CHARS} characters"
        elif text.startswith("/") or ".." in text.split("/"):
            problem = "patterns are relative to cwd and stay below it"
        if problem:
            msg = f"the pattern {pattern[:PATTERN_CHARS]!r} cannot be used: {problem}"
            raise ToolError(msg)
        self._dotfiles = dotfiles
        self._texts = expand_braces(text)
        self._forms = [_compile_components(form, pattern, dotfiles=dotfiles) for form in self._texts]

    def match(self, parts: Sequence[str]) -> bool:
        """Return whether a path matches."""
        return any(_matches_components(form, parts, dotfiles=self._dotfiles) for form in self._forms)

    def overlaps(self, pattern_parts: Sequence[str]) -> bool:
        """Return whether a path can match this pattern and the one of *pattern_parts*, in which ``*``, ``?`` and ``**`` are wildcards."""
        if len(pattern_parts) > MAX_COMPONENTS:
            return True
        return any(
            _have_common_sequence(
                [n for n in text.split("/") if n not in {"", "."}], pattern_parts, "**", _have_common_name
            )
            for text in self._texts
        )


def expand_braces(pattern: str) -> list[str]:
    """
    Return the patterns that the braces of a glob pattern expand to; raise ``ToolError`` for more than 64.

    Raises:
        ToolError: when the pattern expands to more than 64.
    """
    forms, done = [pattern], list[str]()
    while forms:
        if len(forms) + len(done) > MAX_FORMS:
            msg = f"the pattern {pattern!r} cannot be used: its braces stand for more than {MAX_FORMS} patterns"
            raise ToolError(msg)
        form = forms.pop()
        inner = next((found for found in BRACES.finditer(form) if COMMA.search(found[1])), None)
        if inner is None:
            done.append(form)
        else:
            forms += [form[: inner.start()] + choice + form[inner.end() :] for choice in COMMA.split(inner[1])]
    return done


def escape_brackets_and_braces(pattern: str) -> str:
    """Return a pattern in which brackets and braces match themselves."""
    return re.sub(r"[\[\]{}]", r"[\g<0>]", pattern)


def escape_pattern(path: str) -> str:
    """Return a pattern that matches exactly this path."""
    return re.sub(r"[^\w./-]", r"[\g<0>]", path)


def find_pattern_problem(pattern: str) -> str:
    """
    Return why a file pattern is probably a mistake, with a better one if possible; ``""`` if it is fine.

    A pattern is about paths below a root, so forms that only a shell, a browser or another system reads as a path match no file.
    """
    if any(unicodedata.category(character) == "Cc" for character in pattern):
        return "it contains a control character"
    if ".." in pattern.split("/"):
        return "write a path relative to the root, without '..'"
    if "\\" in ESCAPED.sub("", pattern):
        return f"write / between names, as in {pattern.replace(chr(92), '/')!r}; write a backslash in a name as '[\\]'"
    if (address := SCHEME.match(pattern)) and (address[1] or address[2]).lower() != "file":
        return "for a web address, write a rule about domains; for a file, write a path without a scheme"
    if address or BASE.match(pattern):
        plain = pattern[address.end() :] if address else pattern.removeprefix("~/")
        example = f", as in {plain!r}" if plain and BASE.match(plain) is None and not plain.startswith("/") else ""
        return f"write a path relative to the root{example}; write a name that starts with this character as {f'[{pattern[0]}]'!r}..."
    if ENCODED_SLASH.search(pattern):
        return f"write / between names, as in {ENCODED_SLASH.sub('/', pattern)!r}"
    blank = BLANK_AT_END.sub(lambda found: "".join(f"[{character}]" for character in found[0]), pattern)
    return "" if blank == pattern else f"a name in it starts or ends with a blank; if that is intended, write {blank!r}"


def _compile_components(expanded: str, pattern: str, *, dotfiles: bool) -> list[Component]:
    """Return the matchers for the components of a pattern without braces; raise ``ToolError`` for more than 64."""
    names = [n for n in expanded.split("/") if n not in {"", "."}]
    if len(names) > MAX_COMPONENTS:
        msg = f"the pattern {pattern!r} cannot be used: it has more than {MAX_COMPONENTS} components"
        raise ToolError(msg)
    made: list[Component] = []
    for name in names:
        if name != "**":
            start = "" if dotfiles or name.startswith(".") else r"(?!\.)"
            made.append(re.compile(start + fnmatch.translate(re.sub(r"\*{2,}", "*", name))).match)
        elif not made or made[-1] is not None:
            made.append(None)
    return made


def _matches_components(components: Sequence[Component], parts: Sequence[str], *, dotfiles: bool = True) -> bool:
    """Return whether the names of a path match the components of a pattern, all of both."""
    if components and parts and components[0] is not None and not components[0](parts[0]):
        return False  # so it is with most files that a rule is not about
    places = _add_positions_after_stars(components, {0})
    for part in parts:
        if not places:
            return False
        after: set[int] = set()
        for place in places:
            if place < len(components):
                one = components[place]
                if one is None:
                    after.update((place,) if dotfiles or not part.startswith(".") else ())
                elif one(part):
                    after.add(place + 1)
        places = _add_positions_after_stars(components, after)
    return len(components) in places


@lru_cache(4_096)
def _have_common_name(one: str, other: str) -> bool:
    """Return whether a name matches both patterns; a class of characters counts as any character."""
    if len(one) * len(other) > MAX_NAME_PRODUCT:
        return True
    first, second = (CLASS_OR_CHARACTER.findall(re.sub(r"\*{2,}", "*", pattern)) for pattern in (one, other))
    return _have_common_sequence(first, second, "*", _have_common_character)


def _have_common_character(one: str, other: str) -> bool:
    """Return whether two items of patterns match a common character; a class counts as any character."""
    first, second = _literal_character(one), _literal_character(other)
    return first is None or second is None or first == second


def _literal_character(item: str) -> str | None:
    """Return the one character that a character or class of a pattern matches; ``None`` if it matches others."""
    if item == "?" or len(item) > len("[x]"):
        return None
    return item[1] if len(item) == len("[x]") else item


def _have_common_sequence(
    first: Sequence[str], second: Sequence[str], any_number: str, have_common_item: Callable[[str, str], bool]
) -> bool:
    """Return whether two sequences of items can be equal, with *any_number* matching any number of items."""
    reached: list[bool] = [True, *itertools.accumulate([item == any_number for item in second], operator.and_)]
    for item in first:
        row: list[bool] = [reached[0] and item == any_number]
        for at, against in enumerate(second):
            if any_number in (item, against):
                row.append(reached[at + 1] or row[at])
            else:
                row.append(reached[at] and have_common_item(item, against))
        reached = row
    return reached[-1]


def _add_positions_after_stars(components: Sequence[Component], positions: set[int]) -> set[int]:
    """Add the positions after each ``**``, which can match no name, to *positions*, and return it."""
    for position in sorted(positions):
        at = position
        while at < len(components) and components[at] is None:
            at += 1
            positions.add(at)
    return positions


# --- .gitignore -----------------------------------------------------------------------------------------------------

# fmt: off
CLASSES = {
    "alnum": "0-9A-Za-z", "alpha": "A-Za-z", "blank": r"\ \t", "cntrl": r"\x00-\x1f\x7f", "digit": "0-9",
    "graph": "!-~", "lower": "a-z", "print": r"\ -~", "punct": r"!-/:-@\[-`{-~", "space": r"\ \t\n\r", "upper": "A-Z",
    "xdigit": "0-9A-Fa-f",
}
# fmt: on
STAR, SEPARATOR, NEVER = "*", "/", "(?!)"
SPECIAL = frozenset("?[\\")


class IgnorePattern:
    """
    One line of a ``.gitignore`` file, with git's meaning.

    Attributes:
        is_negated: Whether what it matches is *not* ignored.
    """

    @classmethod
    def parse(cls, line: str) -> IgnorePattern | None:
        """Return the pattern in a line without its line end; ``None`` if the line is blank, a comment or too long."""
        text = _trim_trailing_blanks(line)
        is_long = len(text) > LINE_CHARS or text.count("/") > SLASHES
        return None if not text or text.startswith("#") or is_long else cls(text)

    def __init__(self, text: str) -> None:
        self.is_negated = text.startswith("!")
        text = text.removeprefix("!")
        self._only_folders = text.endswith("/")
        text = text.removesuffix("/")
        self._any_depth = "/" not in text
        text = text.removeprefix("/")
        plain = SPECIAL.isdisjoint(text)
        names: list[Any] = text.split(SEPARATOR) if plain else _split_tokens_at_slashes(_tokenize_ignore_pattern(text))
        is_any = [not self._any_depth and len(name) > 1 and set(name) == {STAR} for name in names]
        made = _make_star_matcher if plain else _compile_name_matcher
        self._form = [None if is_any[n] else made(name) for n, name in enumerate(names)]
        if is_any[-1]:
            self._form.append(_make_star_matcher(STAR))

    def covers(self, parts: Sequence[str]) -> bool:
        """Return whether a file matches, or a folder above it."""
        folders = range(1, len(parts))
        return self.match(parts, is_folder=False) or any(self.match(parts[:n], is_folder=True) for n in folders)

    def match(self, parts: Sequence[str], *, is_folder: bool) -> bool:
        """Return True if the entry itself matches. The caller checks the folders above it."""
        if self._only_folders and not is_folder:
            return False
        only = self._form[0] if self._any_depth else None
        return bool(only(parts[-1])) if only is not None else _matches_components(self._form, parts)


def _trim_trailing_blanks(line: str) -> str:
    """Return a line without trailing blanks, except escaped ones."""
    text = line.rstrip(" ")
    escapes = len(text) - len(text.rstrip("\\"))
    return text + " " if escapes % 2 and len(text) < len(line) else text


def _tokenize_ignore_pattern(text: str) -> list[str]:
    """Return a pattern as ``*``, ``/`` and expressions that match exactly one character each."""
    tokens, at = list[str](), 0
    while at < len(text):
        character = text[at]
        at += 1
        if character in (STAR, SEPARATOR):
            tokens.append(character)
        elif character == "?":
            tokens.append(".")
        elif character == "[":
            token, at = _parse_character_class(text, at)
            tokens.append(token)
        elif character == "\\":
            following = text[at : at + 1]
            tokens.append(following if following == SEPARATOR else re.escape(following) or NEVER)
            at += 1
        else:
            tokens.append(re.escape(character))
    return tokens


def _parse_character_class(text: str, position: int) -> tuple[str, int]:
    """Parse a character class at *position*, and return its regex and end. An unclosed class matches nothing."""
    is_negated = text[position : position + 1] in ("!", "^")
    start = position = position + is_negated
    members, before = list[str](), ""
    while position < len(text) and (text[position] != "]" or position == start):
        name = _read_class_name(text, position)
        if name:
            if name not in CLASSES:
                break
            members.append(CLASSES[name])
            before, position = "", position + len(name) + len("[::]")
        elif text[position] == "-" and before and text[position + 1 : position + 2] not in ("", "]"):
            last, position = _parse_class_member(text, position + 1)
            if before <= last:
                members.append(f"{re.escape(before)}-{re.escape(last)}")
            before = ""
        else:
            before, position = _parse_class_member(text, position)
            members.append(re.escape(before))
    if text[position : position + 1] != "]" or position == start:
        return NEVER, len(text)
    made = "".join(members)
    if not made:
        return "." if is_negated else NEVER, position + 1
    return f"[^{made}]" if is_negated else f"[{made}]", position + 1


def _read_class_name(text: str, position: int) -> str:
    """Return the name of a class such as ``[:alpha:]`` at a position, a blank for an empty name, ``""`` if there is none."""
    if not text.startswith("[:", position):
        return ""
    end = text.find("]", position + 2)
    return (text[position + 2 : end - 1] or " ") if end > position + 2 and text[end - 1] == ":" else ""


def _parse_class_member(text: str, position: int) -> tuple[str, int]:
    """Return one character of a class, possibly escaped, and its end."""
    position += text[position] == "\\"
    return text[position : position + 1], position + 1


def _split_tokens_at_slashes(tokens: Iterable[str]) -> list[list[str]]:
    """Return the tokens of each name, without the slashes between the names."""
    names: list[list[str]] = [[]]
    for token in tokens:
        if token == SEPARATOR:
            names.append([])
        else:
            names[-1].append(token)
    return names


def _make_star_matcher(text: str) -> Component:
    """Return a matcher for a name with only stars. It is created without a regex, so that long files load fast."""
    first, *others = text.split(STAR)
    if not others:
        return first.__eq__
    *middle, last = others

    def fits(name: str) -> bool:
        """Return whether a name has all texts between the stars in order."""
        at, end = len(first), len(name) - len(last)
        if at > end or not name.startswith(first) or not name.endswith(last):
            return False
        for run in middle:
            at = name.find(run, at, end)
            if at < 0:
                return False
            at += len(run)
        return True

    return fits


def _compile_name_matcher(tokens: Sequence[str]) -> Component:
    """Return a matcher for one name. Between two stars only the leftmost match is tried."""
    first, *others = _join_tokens_between_stars(tokens)
    if not others:
        source = first or NEVER
    else:
        *middle, last = others
        source = f"{first}{''.join(f'(?>.*?{run})' for run in middle if run)}.*{last}"
    return re.compile(source, re.DOTALL).fullmatch


def _join_tokens_between_stars(tokens: Iterable[str]) -> list[str]:
    """Return the joined expressions before, between and after the stars."""
    runs = [""]
    for token in tokens:
        if token == STAR:
            runs.append("")
        else:
            runs[-1] += token
    return runs


SEARCH_COLUMNS = 2_000
"""Lines that people write are shorter, and Python's search cannot be stopped within a line."""

UNBOUNDED_REPEATS = 20
"""From here on a repetition costs as much as one without an end."""
LIMITS = ((SEARCH_COLUMNS, 1_024), (SEARCH_COLUMNS, 64), (300, 16))
"""By the number of unbounded repetitions: how much of a line is searched, and how many ways the rest may match."""

REPEATS = frozenset({"MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"})
REFUSED = frozenset({"GROUPREF", "GROUPREF_EXISTS", "ATOMIC_GROUP"})
GROUPS = {"SUBPATTERN": 3, "ASSERT": 1, "ASSERT_NOT": 1}


def get_max_search_columns(pattern: str) -> int:
    """
    Return how many characters of a line may be searched with a regular expression; raise ``ToolError`` for an invalid or slow one.

    Raises:
        ToolError: when it is not a regular expression, or a search could take too long.
    """
    try:
        re.compile(pattern)
        parsed = re._parser.parse(pattern)  # type: ignore[attr-defined]  # noqa: SLF001  (the only parser of its syntax)
    except (re.error, RecursionError, OverflowError) as error:
        msg = f"the pattern is not a regular expression: {error}"
        raise ToolError(msg) from None
    unbounded, ways = _measure_match_cost(parsed, inside=False)
    if unbounded >= len(LIMITS) or ways > LIMITS[unbounded][1]:
        msg = f"without ripgrep a pattern has at most {len(LIMITS) - 1} repetitions such as '.*' and few optional parts"
        raise ToolError(msg)
    return LIMITS[unbounded][0]


def _measure_match_cost(parsed: Any, *, inside: bool) -> tuple[int, int]:
    """
    Return the number of unbounded repetitions, and of ways in which the rest can match.

    Raises:
        ToolError: for a repetition or an alternative *inside* a repetition, and for references to groups.
    """
    costs = [_measure_operation_cost(str(operation), argument, inside=inside) for operation, argument in parsed]
    return sum(c[0] for c in costs), math.prod(c[1] for c in costs)


def _measure_operation_cost(name: str, argument: Any, *, inside: bool) -> tuple[int, int]:
    """Return the number of unbounded repetitions, and of other ways to match, of one parsed operation; refuse nested repetitions."""
    if name in REFUSED or (inside and (name in REPEATS or name == "BRANCH")):
        msg = "without ripgrep a pattern may not nest repetitions, repeat alternatives or refer back to groups"
        raise ToolError(msg)
    if name in REPEATS:
        low, high, body = int(argument[0]), int(argument[1]), argument[2]
        unbounded, ways = _measure_match_cost(body, inside=high > 1)
        return (unbounded + 1, ways) if high > UNBOUNDED_REPEATS else (unbounded, ways * (high - low + 1))
    if name == "BRANCH":
        costs = [_measure_match_cost(branch, inside=inside) for branch in argument[1]]
        return max(c[0] for c in costs), sum(c[1] for c in costs)
    if name in GROUPS:
        return _measure_match_cost(argument[GROUPS[name]], inside=inside)
    return 0, 1
