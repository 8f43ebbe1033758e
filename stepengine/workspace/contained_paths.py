"""
The paths that a text may name for a program that splits, decodes, unquotes or expands it.

A path rule knows the arguments that a tool's definition marks as paths. Any other text may be a path, too, or hold some:
``--path=secrets/plan.txt``, ``a.md,secrets/plan.txt``, ``{a,secrets}/plan.txt``. ``find_paths_in_text`` returns each of them:

1. The text is decoded (``%2f``, escapes of JSON) until nothing changes.
2. Backslashes are slashes, or escape the next character; quotes are left out; braces are expanded.
3. The result is split at blanks, control characters and the characters of ``DELIMITERS``.
4. A part loses dashes in front, the letters of options such as ``-I`` and ``-xf``, the ``a/`` of a patch if it is not the whole text, and dots at its end.
5. A part that starts at ``~``, a variable or a drive is absolute: its start is unknown. Its ``..`` are resolved. It is returned as it is
   written, too, since ``..`` behind a link leads elsewhere: only the file system knows where.

``*``, ``?``, ``[...]`` and ``!(...)`` stay in a part, for which they are wildcards. Addresses of the web are no paths. The cost is linear in the length of
the text. ``None`` means that a text is too long or has too many readings, so that it may name any path.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from urllib.parse import unquote

from stepengine.errors import ToolError
from stepengine.workspace.path_rules import BLANKS
from stepengine.workspace.patterns import expand_braces

MAX_TEXT_CHARS = 400_000
"""A person is asked about a longer text, because its search would take seconds."""
MAX_PARTS = 20_000
"""Source files of this length have some thousand words."""
MAX_DECODED = 4
"""A text that can be decoded more often hides something."""
MAX_WORD_CHARS = 1_024
"""Of a word whose braces are expanded; each of up to 64 results is as long."""
MAX_PATH_CHARS = 4_096
"""Linux opens no longer path."""

MAX_LETTERS = 9
"""Options of one letter that share a word with a value; programs have few."""

DELIMITERS = BLANKS + ",;:=@'\"`|<>(){}[]&#!+^" + "“”„‘’‚«»‹›…–—•、。，：；（）【】「」『』"  # noqa: RUF001
"""Characters at which programs split texts, or that they remove before a path."""
_IN_ADDRESS = rf"[^{re.escape(BLANKS)}<>\"'`|{{}}()\[\],;?#&="
WEB_ADDRESS = re.compile(rf"(?<![A-Za-z])(?:https?|wss?|ftp)://{_IN_ADDRESS}/]*(?:/{_IN_ADDRESS}:!]*)?", re.IGNORECASE)
"""The query is none of it: ``url=https://example.org&path=secrets`` is a form with two values. A colon may follow only in the host."""
ESCAPED_CHARACTER = re.compile(r"\\(?:u([0-9A-Fa-f]{4})|x([0-9A-Fa-f]{2})|([0-7]{3})|[abfnrtv])")
ESCAPED_BYTES = re.compile(r"(?:\\(?:x[0-9A-Fa-f]{2}|[0-3][0-7]{2}))+")
"""Bytes in UTF-8, as git and shells write the names of files that are not ASCII."""
PATCH_PREFIXES = frozenset(("a/", "b/", "c/", "i/", "o/", "w/"))
"""The prefixes of file names in a patch of git, which ``patch -p1`` removes."""
QUOTES = re.compile(r"[\\'\"`]")
ESCAPED_BLANK = re.compile(r"\\ |%20|(?<=\w)\+(?=\w)")
KEPT_BLANK = "\ufffe"
"""The placeholder for an escaped blank while a text is split: Unicode has no such character."""
SIGNS = re.compile(r"[^\w\x00-\x7f\ufffe]")
"""Invisible characters, arrows and other signs before paths. They include marks of letters, and split only an additional reading."""
CHARACTER_CLASS = re.compile(r"\[[^\[\]\s/]{1,80}\]")
EXTENDED_PATTERN = re.compile(r"[!@?*+]\([^()\s]{0,200}\)")
"""A pattern of shells such as ``@(a|b)`` and ``!(a)``."""
EMPHASIS = re.compile(
    r"\*\*(?=[^\W_])([^*\n/_]{1,200})\*\*(?![\w*])|(?<=[(,\[{])([ ]?)\*{1,2}([A-Za-z_][\w.]{0,80})(?=[,)\]}])"
)
"""Strong words of Markdown, and arguments such as ``*args``: their stars are no wildcards."""
SEQUENCE = re.compile(r"\{[^{}\s,]{1,40}\.\.[^{}\s,]{1,40}\}")
ATTACHED = re.compile(rf"[^{re.escape(DELIMITERS)}]\{{|\}}[^{re.escape(DELIMITERS)}]")
"""Braces that share a name with adjacent text: other braces are split like the rest of the text."""
PREFIXED = re.compile(
    rf"(?:^|(?<=[{re.escape(DELIMITERS)}]))(?:file:|[A-Za-z]:|@|--?[\w.-]+=|\./)([^/{re.escape(DELIMITERS)}]+)(?![^{re.escape(DELIMITERS)}])",
    re.IGNORECASE,
)
"""A single name that can only be a path, because of its prefix."""
ELSEWHERE = re.compile(r"~|\$|%\w+%/")
WILDCARDS = frozenset("*?")
FILE_NAME = re.compile(
    r"\.{1,2}[^.].*|.*[^.]\.[^\W\d_](?:[\w-]{0,9}|(?:[^\W_]|-){0,80})~?|.*[A-Za-z]\.(?:[0-9][\w-]{0,5}[A-Za-z][\w-]{0,3}|[0-9]{4,10})~?",
    re.DOTALL,
)
"""Long extensions with underscores are attributes. Versions and numbers such as ``v1.2``, ``Fig.3`` and ``1.5GB`` are none."""
NO_FILE_NAMES = frozenset({"e.g", "i.e", "a.m", "p.m"})


def find_paths_in_text(text: str, non_delimiters: str = "") -> frozenset[str] | None:
    """
    Return the paths that a text may name, resolved as text; ``None`` if there may be too many.

    A path that starts somewhere else begins with ``/``, one that leads out with ``..``. A single name that is marked as a path begins
    with ``./``.

    Args:
        text: The text.
        non_delimiters: Characters that belong to names and split nothing.
    """
    if len(text) > MAX_TEXT_CHARS:
        return None
    parts, found = set[str](), set[str]()
    decoded = [text]
    for form in decoded:  # grows meanwhile
        decoded += [other for other in _iterate_decodings(form) if other not in decoded]
        if len(decoded) > MAX_DECODED:
            return None
        try:
            for spelled in _spellings_with_blanks(WEB_ADDRESS.sub(_blank_plain_address, form)):
                new = set(_part_regex(non_delimiters).findall(spelled)) - parts
                parts |= new
                found.update([path for part in new for path in _possible_paths(part, is_whole_text=part == text)])
                found.update([f"./{name}" for name in PREFIXED.findall(spelled)])
                if len(found) > MAX_PARTS:
                    return None
        except ToolError:
            return None
    whole = text.strip(BLANKS)
    return frozenset(found | {whole} if whole and WILDCARDS.issuperset(whole) else found)


def remove_emphasis(text: str) -> str:
    """Return a text without the stars that mark strong words of Markdown and arguments of functions."""
    return EMPHASIS.sub(r"\1\2\3", text) if "*" in text else text


def is_path_like(path: str) -> bool:
    """Return whether a contained path is more than a word: it has a slash, a wildcard, or a name such as ``a.md`` or ``.env``."""
    return (
        "/" in path
        or path == ".."
        or has_wildcards(path)
        or (path not in NO_FILE_NAMES and FILE_NAME.fullmatch(path) is not None)
    )


def has_wildcards(path: str) -> bool:
    """Return whether a contained path may match several paths."""
    return not WILDCARDS.isdisjoint(path)


def _iterate_decodings(text: str) -> Iterator[str]:
    """Yield the percent-decoded text if it contains ``%``, and the text with decoded escapes if it contains a backslash."""
    if "%" in text:
        yield unquote(text)
    if "\\" in text:
        yield ESCAPED_CHARACTER.sub(_decode_character_escape, ESCAPED_BYTES.sub(_decode_escaped_bytes, text))


def _decode_escaped_bytes(escapes: re.Match[str]) -> str:
    """Decode escaped bytes as UTF-8; return the escapes unchanged if they are not UTF-8."""
    codes = escapes[0].split("\\")[1:]
    try:
        return bytes([int(code[1:], 16) if code[0] == "x" else int(code, 8) for code in codes]).decode()
    except UnicodeDecodeError:
        return escapes[0]


def _decode_character_escape(escape: re.Match[str]) -> str:
    """Return the character that an escape stands for; a blank for one with a letter, such as a line break."""
    code = escape[1] or escape[2]
    return chr(int(code, 16)) if code else chr(int(escape[3], 8)) if escape[3] else " "


def _blank_plain_address(address: re.Match[str]) -> str:
    """Return an address with ``..``, which may be a path; a blank for any other address."""
    return address[0] if ".." in re.split(r"[/\\]", address[0]) else " "


def is_resolved(path: str) -> bool:
    """Return whether a contained path has no ``..`` after a name."""
    return ".." not in path.removeprefix("../").split("/")


def _spellings_with_blanks(text: str) -> Iterator[str]:
    """Yield the spellings of a text, and those with an escaped blank as part of a name."""
    yield from iterate_spellings(text)
    if (kept := ESCAPED_BLANK.sub(KEPT_BLANK, text)) != text:
        yield from iterate_spellings(kept)


def iterate_spellings(text: str) -> Iterator[str]:
    """
    Yield the possible readings of a text's backslashes, quotes, braces and character classes; raise ``ToolError`` for too many braces.

    Raises:
        ToolError: for braces that cannot be expanded.
    """
    bases = {text, text.replace("\\", "/"), QUOTES.sub("", text)}
    if not text.isascii():
        bases |= {SIGNS.sub(" ", base) for base in bases}
    for base in bases:
        yield base
        if "[" in base:
            yield CHARACTER_CLASS.sub("?", CHARACTER_CLASS.sub("?", base))  # twice for `[[:alpha:]]`
        if "(" in base and (plain := EXTENDED_PATTERN.sub("*", EXTENDED_PATTERN.sub("*", base))) != base:
            yield plain
        if "?" in base:
            yield base.replace("?", " ")
        if "{" in base:
            yield SEQUENCE.sub("*", base)
            yield from _expand_words(base)


def _expand_words(text: str) -> Iterator[str]:
    """Yield the expansions of the words with braces in a text."""
    for word in text.split():
        if "{" in word and "," in word and ATTACHED.search(word):
            yield from _expand_word_braces(word)


def _expand_word_braces(word: str) -> list[str]:
    """Return the expansions of the braces in a word; raise ``ToolError`` for a long word or too many."""
    if len(word) > MAX_WORD_CHARS:
        msg = "the word is too long for its braces to be expanded"
        raise ToolError(msg)
    return expand_braces(word)


@lru_cache(16)
def _part_regex(non_delimiters: str) -> re.Pattern[str]:
    """Return the regex for the parts of a text between delimiters; the characters in *non_delimiters* are no delimiters."""
    split_at = "".join([character for character in DELIMITERS if character not in non_delimiters])
    return re.compile(f"[^{re.escape(split_at)}]+")


def _possible_paths(word: str, *, is_whole_text: bool) -> Iterator[str]:
    """Yield the paths that a word of a text may name."""
    parts = {word, word.lstrip("-")}
    if word.startswith("-") and not word.startswith("--"):
        parts.update([word[at:] for at in range(2, MAX_LETTERS)])  # `-xfNAME`
    if not is_whole_text:  # a patch has more than one name
        parts |= {one[2:] for one in parts if one[:2] in PATCH_PREFIXES and len(one) > len("a/")}
    if word[0] in DELIMITERS:  # one that is part of names, as in `@@scope/x`
        parts.add(word[0] + word.lstrip(word[0]))
    parts |= {one.rstrip(".") for one in parts if one.endswith(".") and one.rpartition("/")[2].strip(".")}
    for one in parts:
        for path in (_normalize_part(one.replace(KEPT_BLANK, " ")), one if "/../" in one.lstrip("./") else ""):
            if path and len(path) <= MAX_PATH_CHARS and not WILDCARDS.issuperset(path):
                yield path


def _normalize_part(part: str) -> str:
    """Return a part without steps such as ``./`` and ``a/..``; ``""`` for one that names nothing."""
    if "/" not in part and part not in {".", ".."}:
        return f"/{part}" if part.startswith(("~", "$")) else part
    names, climbs = list[str](), False
    for name in part.split("/"):
        if name == ".." and names:
            names.pop()
        elif name == "..":
            climbs = True
        elif name and name != ".":
            names.append(name)
    start = "../" if climbs else "/" if part.startswith("/") or ELSEWHERE.match(part) else "./" * (len(names) == 1)
    return (start + "/".join(names)).removesuffix("/") if names or climbs else start
