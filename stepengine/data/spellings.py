"""
How a text is spelled in whatever encodes it: regular expressions that find a known text in addresses, JSON, HTML and source.

Encoders agree on letters and digits and differ in the signs that they escape. So a text is not encoded in all ways that are
known, which would be a list without an end: each sign is matched in every spelling that it can have. A slash is written
plain, behind backslashes, as ``%2f``, ``%252F``, ``&#47;``, ``&sol;`` or by its number behind a backslash. An encoding
inside of another one adds backslashes, ``25`` or ``amp;``. Base64 is a text of its own.

Every expression here has bounded repetitions only: a search takes time in proportion to the text.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, cached_property

from attrs import frozen

__all__ = ("Spelling", "cut_off", "spellings_of")

RUNS = re.compile(r"\\+|[\s\S]")
FIXED_RUN = re.compile(r"[A-Za-z0-9]+")
BACKSLASHES = 15
"""Text in JSON that is in JSON that is in JSON: each level doubles the backslashes and adds one."""
NESTED = "{0,3}"
"""How often ``25`` or ``amp;`` is repeated."""
ESCAPED_BY_LETTER = {"\n": "n", "\t": "t", "\r": "r", "\b": "b", "\f": "f", "\v": "v", "\0": "0", "\a": "a"}
URL_SAFE = {"+": "-", "/": "_"}
CUT = r"(?:\\{1,15}(?:[uUx][0-9A-Fa-f]{0,8})?(?:\\{1,15}(?:u[0-9A-Fa-f]{0,4})?)?|%(?:[0-9A-Fa-f%]{0,32})|&[A-Za-z0-9#;]{0,32})"
"""The beginning of an escaped sign, where the end of a text cuts it."""
ANCHOR = 8
HEAD = 24
"""So many signs are compared one by one to see whether a text ends within a spelling; more would be nested too deep."""
LONGEST = 40
"""One sign has at most so many characters in any spelling."""


@frozen
class Spelling:
    """
    One text to look for, in every spelling.

    Attributes:
        text: The text.
        name: What it is called.
        is_base64: Whether ``+`` and ``/`` may also be ``-`` and ``_``.
    """

    text: str
    name: str
    is_base64: bool = False

    @cached_property
    def anchor(self) -> str:
        """The end of its longest run of letters and digits, which every spelling holds; may be empty."""
        return max(FIXED_RUN.findall(self.text), key=len, default="")[-ANCHOR:]

    @cached_property
    def parts(self) -> tuple[str, ...]:
        """One expression for each sign, in order."""
        return tuple([_sign(run, is_base64=self.is_base64) for run in RUNS.findall(self.text)])

    @cached_property
    def pattern(self) -> str:
        """The expression for all of it."""
        return "".join(self.parts)

    @cached_property
    def unfinished(self) -> re.Pattern[str]:
        """The expression for a beginning of it at the end of a text; the last sign may be cut, too."""
        rest = len(self.parts) - HEAD
        return re.compile(cut_off(self.parts[:HEAD], rf"[\s\S]{{0,{rest * LONGEST}}}\Z" if rest > 0 else r"\Z"))

    @property
    def longest(self) -> int:
        """How many characters it has at most."""
        return len(self.text) * LONGEST


def spellings_of(value: str, name: str) -> Iterator[Spelling]:
    """Return what to look for to find *value* as it is, in base64, and inside of something longer in base64."""
    data = value.encode(errors="replace")
    yield Spelling(value, name)
    yield Spelling(base64.b64encode(data).decode(), name, is_base64=True)
    # Inside of something longer, such as `user:password`: what of it does not depend on what stands before and behind.
    for before in range(3):
        inside = base64.b64encode(bytes(before) + data)[(before * 4 + 2) // 3 : (before + len(data)) * 4 // 3]
        yield Spelling(inside.decode(), name, is_base64=True)


def cut_off(parts: Sequence[str], end: str) -> str:
    """Return the expression for *parts* and *end* that also matches where the end of the text cuts them."""
    made = end
    for number, part in reversed([*enumerate(parts)]):
        after = rf"(?:{made}|\Z)" if number < len(parts) - 1 or end else ""
        made = f"(?:{part}{after}|{CUT}\\Z)" if part.startswith("(") else part + after
    return made


@cache
def _sign(run: str, *, is_base64: bool) -> str:
    """Return the expression for one sign, or for a run of backslashes, in every spelling."""
    if FIXED_RUN.fullmatch(run):
        return run
    count = len(run)
    sign = run[0]
    plain = (
        rf"\\{{{count},{count * (BACKSLASHES + 1)}}}" if sign == "\\" else rf"\\{{0,{BACKSLASHES}}}{re.escape(sign)}"
    )
    other = [URL_SAFE[sign]] if is_base64 and sign in URL_SAFE else []
    ways = [*(f"(?:{way}){{{count}}}" if count > 1 else way for way in _escapes(sign)), plain, *other]
    return f"(?:{'|'.join(ways)})"


def _escapes(sign: str) -> Iterable[str]:
    data = sign.encode(errors="surrogatepass")
    yield "".join([f"%(?:25){NESTED}{_hex(byte, 2)}" for byte in data])
    code = ord(sign)
    units = sign.encode("utf-16-be", errors="surrogatepass")
    slashes = rf"\\{{1,{BACKSLASHES}}}"
    yield "".join([f"{slashes}u{_hex(units[at] << 8 | units[at + 1], 4)}" for at in range(0, len(units), 2)])
    yield rf"{slashes}(?:U{_hex(code, 8)}|u\{{0{{0,4}}{_hex(code, 1)}\}})"
    if code < 256:  # noqa: PLR2004 - a byte
        yield f"{slashes}x{_hex(code, 2)}"
    if sign in ESCAPED_BY_LETTER:
        yield slashes + ESCAPED_BY_LETTER[sign]
    names = "".join([f"|{name}" for name in _html_names().get(sign, ())])
    yield f"&(?:amp;){NESTED}(?:#0{{0,7}}{code};|#[xX]0{{0,7}}{_hex(code, 1)};{names})"
    if sign == " ":
        yield r"\+"


def _hex(number: int, digits: int) -> str:
    return "".join([d if d.isdigit() else f"[{d}{d.upper()}]" for d in f"{number:0{digits}x}"])


@cache
def _html_names() -> dict[str, list[str]]:
    from html.entities import html5  # noqa: PLC0415 - only a known secret needs it

    names: dict[str, list[str]] = {}
    for name, text in html5.items():
        if name.endswith(";"):
            names.setdefault(text, []).append(name)
    return names
