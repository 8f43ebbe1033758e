"""The text of a fetched page: HTML as Markdown, other text unchanged."""

from __future__ import annotations

import asyncio
import codecs
import json
import re
import sys
from encodings import normalize_encoding
from encodings.aliases import aliases
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from attrs import frozen

from stepengine.errors import ToolError
from stepengine.tools.bundled.web.fetcher import UNSPECIFIED, Fetched, Gates, is_text

WEB_PARSE_SECONDS = 5.0
"""A large page takes half a second."""
WEB_PARSE_BYTES = 1024 * 1024 * 1024
"""A tree of a page takes some hundred times its text."""

SNIFFED_BYTES = 8_192
"""The beginning of a page tells HTML from text, and text from binary data."""
HTML = ("text/html", "application/xhtml+xml")
MARKUP = re.compile(rb"<(?:!doctype\s++html|html)\b", re.IGNORECASE)
CHARSET = re.compile(r"charset\s*+=\s*+[\"']?+([\w.:-]{1,40}+)", re.IGNORECASE)
# fmt: off
CODECS = frozenset((
    "ascii", "latin_1", "utf_8", "utf_8_sig", "utf_16", "utf_16_be", "utf_16_le", "utf_32", "utf_32_be", "utf_32_le",
    *(f"iso8859_{n}" for n in (2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 13, 14, 15, 16)),
    *(f"cp{n}" for n in (437, 866, 874, 932, 949, 1250, 1251, 1252, 1253, 1254, 1255, 1256, 1257, 1258)),
    "mac_roman", "mac_cyrillic", "koi8_r", "koi8_u", "tis_620", "gb2312", "gbk", "gb18030", "big5", "big5hkscs",
    "shift_jis", "euc_jp", "iso2022_jp", "euc_kr",
))
# fmt: on
"""The charsets of the web, as codecs; Python has others, which are no charsets, or take for ever (``punycode``)."""
BOMS = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))
UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]"
)
"""Controls, and what has no width: text that a reader of the page would not see."""
WORKERS = Gates(4)
BUSY = 3
"""How much longer than its time on a processor a worker may take by the clock, for machines that have other work."""


@frozen
class Page:
    """
    A page as text.

    Attributes:
        text: The text; empty for other content.
        title: The title; ``""`` without one.
        description: The description in its metadata; ``""`` without one.
        is_text: Whether the content is text.
    """

    text: str
    title: str = ""
    description: str = ""
    is_text: bool = True


async def read_page(fetched: Fetched) -> Page:
    """
    Return a fetched page as text, HTML as Markdown; for content that is not text, an empty page.

    Raises:
        ToolError: If it is HTML and the extra ``web`` is not installed, or it cannot be converted in time.
    """
    kind, charset = _parse_content_type(fetched)
    if kind in HTML or (kind in ("", "text/plain") and not charset and _starts_with_html(fetched.body[:SNIFFED_BYTES])):
        return await _convert_html_page(fetched, charset)
    bom = any(fetched.body.startswith(mark) for mark, _ in BOMS)
    if not is_text(kind) and kind not in UNSPECIFIED:
        return Page("", is_text=False)
    if (
        b"\0" in fetched.body[:SNIFFED_BYTES]
        and not bom
        and not _find_codec_name(charset).startswith(("utf_16", "utf_32"))
    ):
        return Page("", is_text=False)
    return Page(_remove_invisible_characters(_decode_text(fetched.body, charset)))


def _starts_with_html(data: bytes) -> bool:
    """Return True if the data starts with HTML, possibly after comments."""
    at = 0
    while True:
        at = len(data) - len(data[at:].lstrip())
        if not data.startswith(b"<!--", at):
            return MARKUP.match(data, at) is not None
        end = data.find(b"-->", at + len(b"<!--"))
        if end < 0:
            return False
        at = end + len(b"-->")


def _parse_content_type(fetched: Fetched) -> tuple[str, str]:
    """Return (media type, charset) of a response; the charset is ``""`` if it is missing or unknown."""
    kind, _, rest = fetched.content_type.partition(";")
    found = CHARSET.search(rest)
    charset = found[1].lower() if found else ""
    return kind.strip().lower(), charset if _find_codec_name(charset) else ""


def _find_codec_name(charset: str) -> str:
    """Return the Python codec of a charset of the web; ``""`` for other names. No codec is imported."""
    name = normalize_encoding(charset)
    name = aliases.get(name, name)
    return name if name in CODECS else ""


def _decode_text(data: bytes, charset: str) -> str:
    """Return data as text, by its byte order mark, else by its charset, else as UTF-8."""
    encoding = next((name for mark, name in BOMS if data.startswith(mark)), _find_codec_name(charset) or "utf-8")
    return data.decode(encoding, "replace")


def _remove_invisible_characters(text: str) -> str:
    """Return a text with LF line ends, without invisible characters and surrounding white space."""
    return UNSEEN.sub("", text.replace("\r\n", "\n").replace("\r", "\n")).strip()


async def _convert_html_page(fetched: Fetched, charset: str) -> Page:
    """Return an HTML page with title, description and Markdown text; raise ``ToolError`` without the extra ``web``."""
    found = find_spec("justhtml")
    if found is None or found.origin is None:
        msg = f"{fetched.url} is HTML, and reading HTML needs the extra 'web': pip install 'stepengine[web]'"
        raise ToolError(msg)
    folder = str(Path(found.origin).parent.parent)
    async with WORKERS.get_or_create_semaphore("html"):
        said = await _convert_html_in_worker(fetched, charset, folder)
    return Page(
        _remove_invisible_characters(said["text"]),
        _remove_invisible_characters(said["title"]),
        _remove_invisible_characters(said["description"]),
    )


async def _convert_html_in_worker(fetched: Fetched, charset: str, folder: str) -> dict[str, Any]:
    """Convert HTML in a worker process with limits of time and memory; raise ``ToolError`` if it fails."""
    script = str(Path(__file__).with_name("html_worker.py"))
    limits = (str(int(WEB_PARSE_SECONDS)), str(WEB_PARSE_BYTES))
    worker = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", script, folder, *limits),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={},
        start_new_session=True,
    )
    head = json.dumps({"base": fetched.url, "encoding": charset or None}).encode()
    try:
        async with asyncio.timeout(WEB_PARSE_SECONDS * BUSY):
            out, _ = await worker.communicate(head + b"\n" + fetched.body)
    except TimeoutError:
        out = b""
    finally:
        if worker.returncode is None:
            worker.kill()
            await worker.wait()
    if worker.returncode != 0 or not out:
        msg = f"the HTML of {fetched.url} could not be turned into text within {WEB_PARSE_SECONDS:g} s and a bounded memory"
        raise ToolError(msg)
    said: dict[str, object] = json.loads(out)
    return said
