"""
The types of images and files: the type of the bytes takes precedence over the stated type. Pure: no I/O.

Stated types are often wrong: a screenshot that was saved as JPEG with the name of a PNG, ``image/jpg``, upper case, parameters.
Providers reject a request if the stated type differs from that of the bytes, so the type is resolved when the part is made.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable

from stepengine.data.faults import SHOWN_CHARS
from stepengine.errors import DataError

UNKNOWN = "application/octet-stream"
IMAGES = ("image/png", "image/jpeg", "image/gif", "image/webp")
"""Image types that models and browsers commonly accept."""
ALIASES = {
    **dict.fromkeys(("image/jpg", "image/pjpeg", "image/jfif"), "image/jpeg"),
    "image/x-png": "image/png",
    **dict.fromkeys(("audio/x-wav", "audio/wave", "audio/vnd.wave", "audio/x-pn-wav"), "audio/wav"),
    **dict.fromkeys(("audio/mp3", "audio/x-mp3", "audio/x-mpeg"), "audio/mpeg"),
    "audio/x-flac": "audio/flac",
    **dict.fromkeys(("application/x-pdf", "text/pdf"), "application/pdf"),
}
"""Common unregistered names of types."""
ESCAPE = re.compile(rb"%([0-9a-fA-F]{2})")
PLAIN = re.compile(r"(?:image/|video/|application/pdf\b|audio/(?!l[0-9]))")
"""Types whose parameters are meaningless; a text may state its encoding, and raw sound its rate."""


def _make_prefix_check(*starts: bytes) -> Callable[[bytes], bool]:
    return lambda data: data.startswith(starts)


def _make_riff_check(kind: bytes) -> Callable[[bytes], bool]:
    return lambda data: data[:4] == b"RIFF" and data[8:12] == kind


def _make_brand_check(*brands: bytes) -> Callable[[bytes], bool]:
    return lambda data: data[4:8] == b"ftyp" and data[8:12] in brands


SIGNATURES: tuple[tuple[Callable[[bytes], bool], str, tuple[str, ...]], ...] = (
    (_make_prefix_check(b"\x89PNG\r\n\x1a\n"), "image/png", ()),
    (_make_prefix_check(b"\xff\xd8\xff"), "image/jpeg", ()),
    (_make_prefix_check(b"GIF87a", b"GIF89a"), "image/gif", ()),
    (_make_riff_check(b"WEBP"), "image/webp", ()),
    (_make_brand_check(b"avif", b"avis"), "image/avif", ()),
    (_make_brand_check(b"heic", b"heix", b"hevc", b"mif1"), "image/heic", ("image/heif",)),
    (_make_prefix_check(b"II*\x00", b"MM\x00*"), "image/tiff", ("image/x-", "text/")),
    (_make_prefix_check(b"%PDF-"), "application/pdf", ()),
    (_make_riff_check(b"WAVE"), "audio/wav", ()),
    (_make_prefix_check(b"fLaC"), "audio/flac", ("text/",)),
    (_make_prefix_check(b"ID3"), "audio/mpeg", ("audio/", "video/", "text/")),
    (_make_prefix_check(b"OggS"), "audio/ogg", ("audio/", "video/", "text/", "application/ogg")),
    (
        _make_prefix_check(b"\xff\xfb", b"\xff\xf3", b"\xff\xf2"),
        "audio/mpeg",
        ("text/", "audio/", "video/", "application/"),
    ),
)
"""Tests for the start of a file, its type, and the prefixes of stated types that take precedence."""


def find_media_type(data: bytes) -> str:
    """Return the type of a file by its first bytes; ``""`` for an unknown one."""
    return next((kind for fits, kind, _ in SIGNATURES if fits(data)), "")


def normalize_media_type(stated: str) -> str:
    """Return a type in its registered form: lower case, by its usual name, without meaningless parameters."""
    head, mark, parameters = stated.strip().partition(";")
    kind = head.strip().lower()
    kind = ALIASES.get(kind, kind)
    return kind if PLAIN.match(kind) or not mark else f"{kind};{parameters}"


def resolve_media_type(stated: str, data: bytes | None) -> str:
    """Return the type of a file by its bytes *data*, if they are known; else the *stated* type."""
    kind = normalize_media_type(stated)
    for fits, found, before in SIGNATURES:
        if data is not None and fits(data):
            return kind if kind.startswith(before) and kind != UNKNOWN else found
    return kind


def parse_data_url(url: str) -> tuple[str, bytes]:
    """
    Return the stated type and the bytes of a ``data:`` address, of base64 or percent-encoded.

    Raises:
        DataError: when it holds no bytes, or base64 that cannot be decoded.
    """
    head, comma, text = url[len("data:") :].partition(",")
    if not comma:
        msg = "a data: address needs a comma before its content, as in data:image/png;base64,..."
        raise DataError(msg)
    kind, mark, encoding = head.rpartition(";")
    raw = ESCAPE.sub(lambda match: bytes([int(match[1], 16)]), text.encode("utf-8", "replace"))
    if not mark or encoding.strip().lower() != "base64":
        return head, raw
    # Encoders break lines, leave the padding out, or use the alphabet for addresses.
    packed = b"".join(raw.split()).translate(bytes.maketrans(b"-_", b"+/")).rstrip(b"=")
    try:
        return kind, base64.b64decode(packed + b"=" * (-len(packed) % 4), validate=True)
    except binascii.Error:
        msg = f"the data: address of type {kind[:SHOWN_CHARS]!r} holds no base64"
        raise DataError(msg) from None


def is_data_url(url: str | None) -> bool:
    """Return whether *url* is a ``data:`` address, which contains its content."""
    return url is not None and url[:5].lower() == "data:"
