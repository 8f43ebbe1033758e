"""
Regular expressions that find a known text in addresses, JSON, HTML and source code, in any encoding.

Encoders agree on letters and digits and differ in the signs that they escape. The list of all combinations would be endless, so each
sign is matched in each of its spellings. A slash may be plain, after backslashes, ``%2f``, ``%252F``, ``&#47;``, ``&sol;`` or a
number after a backslash. An encoding within another one adds backslashes, ``25`` or ``amp;``. Base64 is a separate text.

All repetitions are bounded, so the time of a search is proportional to the text.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, cached_property

from attrs import frozen

RUNS = re.compile(r"\\+|'+|\"+|[\s\S]")
FIXED_RUN = re.compile(r"[A-Za-z0-9]+")
MAX_BACKSLASHES = 15
"""For a text in three levels of JSON: each level doubles the backslashes and adds one."""
NESTED = "{0,3}"
"""How often ``25`` or ``amp;`` is repeated."""
ESCAPED_BY_LETTER = {"\n": "n", "\t": "t", "\r": "r", "\b": "b", "\f": "f", "\v": "v", "\0": "0", "\a": "a"}
QUOTES = {"'": 3, '"': 2}
"""By how many quotes SQL, CSV and shells write one in a quoted text."""
QUOTE_OF_SHELL = "'\"'\"'"
URL_SAFE = {"+": "-", "/": "_"}
CODED_BACKSLASH = rf"(?:%(?:25){NESTED}5[cC]|&(?:amp;){NESTED}(?:#0{{0,7}}92|#[xX]0{{0,7}}5[cC]|bsol);)"
"""A backslash of JSON or source within an address or HTML."""
SLASHES = rf"(?:\\{{1,{MAX_BACKSLASHES}}}|{CODED_BACKSLASH}{{1,3}})"
AMPERSAND = rf"(?:&|%(?:25){NESTED}26|{SLASHES}u0026)"
HASH, SEMICOLON = (rf"(?:{sign}|%(?:25){NESTED}{code})" for sign, code in (("#", "23"), (";", "3[bB]")))
"""The signs of HTML within an address or JSON."""
CUT = r"[\\%&][\\%&#;A-Za-z0-9]{0,80}"
"""The beginning of an escaped sign, where the end of a text cuts it."""
ANCHOR_CHARS = 8
"""
Long enough to be rare in ordinary text, short enough that most secrets have such a run; texts without it are not
searched.
"""
HEAD_SIGNS = 24
"""So many signs are compared one by one to see whether a text ends within a spelling; more would be nested too deep."""
MAX_SIGN_CHARS = 160
"""One sign has at most so many characters in any spelling."""


@frozen
class Spelling:
    """
    One text to look for, in every spelling.

    Attributes:
        text: The text.
        name: The name of the text.
        is_base64: Whether ``+`` and ``/`` may also be ``-`` and ``_``.
    """

    text: str
    name: str
    is_base64: bool = False

    @cached_property
    def anchor(self) -> str:
        """The end of its longest run of letters and digits, common to all spellings; may be empty."""
        return max(FIXED_RUN.findall(self.text), key=len, default="")[-ANCHOR_CHARS:]

    @cached_property
    def parts(self) -> tuple[str, ...]:
        """A regular expression for each sign, in order."""
        runs = RUNS.findall(self.text)
        inside = range(1, len(runs) - 1)
        return tuple(
            [_make_sign_pattern(run, is_base64=self.is_base64, is_inside=at in inside) for at, run in enumerate(runs)]
        )

    @cached_property
    def pattern(self) -> str:
        """The regular expression for the whole text."""
        return "".join(self.parts)

    @cached_property
    def truncated_pattern(self) -> re.Pattern[str]:
        """The regular expression for a start of the text at the end of another; its last sign may be cut, too."""
        rest = len(self.parts) - HEAD_SIGNS
        return re.compile(
            make_truncatable_pattern(
                self.parts[:HEAD_SIGNS], rf"[\s\S]{{0,{rest * MAX_SIGN_CHARS}}}\Z" if rest > 0 else r"\Z"
            )
        )

    @property
    def max_match_chars(self) -> int:
        """The maximum number of characters of a match."""
        return len(self.text) * MAX_SIGN_CHARS


def make_spellings(value: str, name: str) -> Iterator[Spelling]:
    """Yield the spellings of *value*: as it is, in base64, and inside of longer base64."""
    data = value.encode(errors="replace")
    yield Spelling(value, name)
    yield Spelling(base64.b64encode(data).decode(), name, is_base64=True)
    # Inside of something longer, such as `user:password`: the part that does not depend on the text before and after it.
    for before in range(3):
        inside = base64.b64encode(bytes(before) + data)[(before * 4 + 2) // 3 : (before + len(data)) * 4 // 3]
        yield Spelling(inside.decode(), name, is_base64=True)


def make_truncatable_pattern(parts: Sequence[str], end: str) -> str:
    """Return an expression for *parts* and *end* that also matches where the text's end cuts them off."""
    made = end
    for number, part in reversed([*enumerate(parts)]):
        after = rf"(?:{made}|\Z)" if number < len(parts) - 1 or end else ""
        made = f"(?:{part}{after}|{CUT}\\Z)" if part.startswith("(") else part + after
    return made


@cache
def _make_sign_pattern(run: str, *, is_base64: bool, is_inside: bool) -> str:
    """
    Return the expression for one sign, or a run of backslashes or quotes, in every spelling.

    Only *is_inside* of a text do more quotes stand for one: those at an end may be quotes around it.
    """
    if FIXED_RUN.fullmatch(run):
        return run
    count = len(run)
    sign = run[0]
    plain = (
        rf"\\{{{count},{count * (MAX_BACKSLASHES + 1)}}}"
        if sign == "\\"
        else rf"\\{{0,{MAX_BACKSLASHES}}}{re.escape(sign)}"
    )
    if sign in QUOTES:
        most = count * QUOTES[sign] if is_inside else count
        plain = rf"(?:\\{{0,{MAX_BACKSLASHES}}}{sign}){{{count},{most}}}"
    other = [URL_SAFE[sign]] if is_base64 and sign in URL_SAFE else []
    coded = [rf"(?:{CODED_BACKSLASH}{{1,3}}{re.escape(sign)}){{{count}}}"]
    if sign == "\\":
        coded = [rf"{CODED_BACKSLASH}{{{count},{count * 8}}}"]
    ways = [
        *(f"(?:{way}){{{count}}}" if count > 1 else way for way in _make_escaped_patterns(sign)),
        plain,
        *coded,
        *other,
    ]
    return f"(?:{'|'.join(ways)})"


def _make_escaped_patterns(sign: str) -> Iterable[str]:
    data = sign.encode(errors="surrogatepass")
    # Backslashes before a backslash could be shared out in very many ways, and a search would try them all.
    slashes = rf"\\{{1,{MAX_BACKSLASHES}}}" if sign == "\\" else SLASHES
    before = "" if sign == "\\" else f"{SLASHES}?"
    yield before + "".join([f"%(?:25){NESTED}{_make_hex_pattern(byte, 2)}" for byte in data])
    code = ord(sign)
    units = sign.encode("utf-16-be", errors="surrogatepass")
    yield "".join(
        [f"{slashes}u{_make_hex_pattern(units[at] << 8 | units[at + 1], 4)}" for at in range(0, len(units), 2)]
    )
    yield rf"{slashes}(?:U{_make_hex_pattern(code, 8)}|u\{{0{{0,4}}{_make_hex_pattern(code, 1)}\}})"
    if code < 256:  # noqa: PLR2004 - a byte
        yield f"{slashes}x{_make_hex_pattern(code, 2)}"
    yield "".join([f"{slashes}{byte:03o}" for byte in data])
    if len(data) > 1:
        yield "".join([f"{slashes}x{_make_hex_pattern(byte, 2)}" for byte in data])
        if code < 256:  # noqa: PLR2004 - a byte
            yield f"%{_make_hex_pattern(code, 2)}"  # of an address in Latin-1
    if sign in ESCAPED_BY_LETTER:
        yield slashes + ESCAPED_BY_LETTER[sign]
    names = "".join([f"|{name.removesuffix(';')}" for name in _map_chars_to_html_entities().get(sign, ())])
    number = f"{HASH}(?:0{{0,7}}{code}|[xX]0{{0,7}}{_make_hex_pattern(code, 1)})"
    yield f"{before}{AMPERSAND}(?:amp{SEMICOLON}){NESTED}(?:{number}{names}){SEMICOLON}"
    if sign == "'":
        yield QUOTE_OF_SHELL
    if sign == " ":
        yield r"\+"


def _make_hex_pattern(number: int, digits: int) -> str:
    return "".join([d if d.isdigit() else f"[{d}{d.upper()}]" for d in f"{number:0{digits}x}"])


@cache
def _map_chars_to_html_entities() -> dict[str, list[str]]:
    from html.entities import html5  # noqa: PLC0415 - only a known secret needs it

    names: dict[str, list[str]] = {}
    for name, text in html5.items():
        if name.endswith(";"):
            names.setdefault(text, []).append(name)
    return names
