"""
The form of bodies in a cassette file.

JSON has one member per line if its bytes can be restored from that. A compressed body is stored together with its text.
"""

from __future__ import annotations

import contextlib
import json
import re
import zlib
from collections.abc import Mapping
from typing import Any

STYLES: Mapping[str, Mapping[str, Any]] = {
    "compact": {"separators": (",", ":"), "ensure_ascii": False},
    "compact-ascii": {"separators": (",", ":")},
    "spaced": {"ensure_ascii": False},
    "spaced-ascii": {},
    "indented": {"indent": 2, "ensure_ascii": False},
    "indented-ascii": {"indent": 2},
}
"""The JSON styles of servers: options of ``json.dumps`` by the name of the style in a file."""
# What libyaml does not print inside a literal block, and what YAML 1.1 counts as a line break there.
UNPRINTABLE = re.compile(r"[^\n\x20-\x7e\xa0-\u2027\u202a-\ud7ff\ue000-\ufefe\uff00-\ufffd]")
GZIP = frozenset({"gzip", "x-gzip"})
OTHER_ENCODINGS = frozenset({"br", "deflate", "zstd"})
GZIP_HEADER = zlib.MAX_WBITS | 16
PIECE = 4096
"""How much is decompressed at once: what comes before an error is kept."""


def indent_json(text: str) -> tuple[str, str]:
    """
    Return JSON *text* with one member per line, and the name of its original style, with which it can be restored.

    The style is ``""`` where both are equal. Text from which that is not possible, such as ``{"price": 21.50}``, is returned as it is.
    """
    plain = text.rstrip("\n")
    ends = text[len(plain) :]
    if plain[:1] not in ("{", "["):
        return text, ""
    try:
        tree = json.loads(plain)
        indented = format_indented_json(tree) + ends
        if indented == text:
            return text, ""
        styles = [name for name, options in STYLES.items() if json.dumps(tree, **options) == plain]
    except (ValueError, RecursionError):
        return text, ""
    return (indented, styles[0]) if styles else (text, "")


def format_indented_json(tree: object) -> str:
    """
    Return a JSON value in the form of a file, with one member per line.

    Raises:
        ValueError: for a number that is not finite.
    """
    return UNPRINTABLE.sub(_escape_char, json.dumps(tree, ensure_ascii=False, allow_nan=False, indent=2))


def restore_json_style(text: str, style: str) -> str:
    """
    Return indented JSON *text* in its original *style*; the inverse of ``indent_json``.

    Raises:
        ValueError: if *text* is not JSON.
    """
    plain = text.rstrip("\n")
    return json.dumps(json.loads(plain), **STYLES[style]) + text[len(plain) :]


def _escape_char(match: re.Match[str]) -> str:
    """Return the matched character as a JSON escape."""
    return json.dumps(match[0])[1:-1]


def decode_body(body: bytes, encoding: str) -> bytes:
    """Return *body* without its *encoding*, the value of ``content-encoding`` or ``""``, as far as it can be decoded."""
    for name in reversed([part.strip().lower() for part in encoding.split(",") if part.strip()]):
        if name in GZIP:
            body = _decode_gzip(body)
        elif name in OTHER_ENCODINGS:
            body = _decode_one_encoding(body, name)
    return body


def _decode_gzip(body: bytes) -> bytes:
    """Return the content of all members of a gzip file, up to the first error."""
    decoded: list[bytes] = []
    at = 0
    with contextlib.suppress(zlib.error):
        while at < len(body):
            member = zlib.decompressobj(GZIP_HEADER)
            while not member.eof and at < len(body):
                piece = body[at : at + PIECE]
                decoded.append(member.decompress(piece))
                at += len(piece) - len(member.unused_data)
    return b"".join(decoded)


def _decode_one_encoding(body: bytes, encoding: str) -> bytes:
    """Return *body* decompressed by one content encoding, up to the first error."""
    import httpx2

    decoded: list[bytes] = []
    reply = httpx2.Response(200, headers={"content-encoding": encoding}, content=iter([body]))
    with contextlib.suppress(httpx2.DecodingError):
        decoded.extend(reply.iter_bytes())
    return b"".join(decoded)
