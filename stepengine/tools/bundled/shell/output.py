"""The output of a command: decoded, without terminal escapes, reduced to its head and tail."""

from __future__ import annotations

import codecs
import re

from stepengine.data.json import compact
from stepengine.data.visible import cut_middle

ESCAPE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*+[ -/]*+[@-~]"  # CSI: colours, cursor
    r"|(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x80-\x9f]*+(?:\x07|\x1b\\|\x9c)"  # OSC, DCS and the like
    r"|\x1b[ -/]*+[0-OQ-WYZ\\`-~]"  # what is one character long
)
"""Where one escape begins, another one ends unfinished; so no character is looked at for more than one of them."""
OPENING = re.compile(r"[\x1b\x9b\x9d\x90\x98\x9e\x9f]")
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
UNFINISHED_CHARS = 512
"""How long a terminal escape may be that arrives in pieces."""


class Capture:
    """
    Stores the start and the end of a stream, half of *limit* characters each.

    Attributes:
        total: The number of bytes received.
    """

    def __init__(self, limit: int) -> None:
        self._head_limit = limit // 2
        self._tail_limit = limit - limit // 2
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pending = ""
        self.total = 0
        self._clear_stored_text()

    def _clear_stored_text(self) -> None:
        """Remove the stored text and the count of characters that were left out."""
        self._head = self._tail = ""
        self._left_out = 0

    def feed(self, data: bytes) -> str:
        """Append bytes of the stream, and return their text without escapes; an unfinished escape is held back."""
        self.total += len(data)
        return self._store_and_drop_middle(self._strip_control_characters(self._decoder.decode(data)))

    def _strip_control_characters(self, text: str, *, final: bool = False) -> str:
        """Return text without control characters and escape sequences; an unfinished sequence is held back unless *final*."""
        text = self._pending + text
        if not OPENING.search(text):
            self._pending = ""
            return CONTROL.sub("", text)
        text = ESCAPE.sub("", text)
        opening = OPENING.search(text)
        start = len(text) if opening is None else opening.start()
        if final or len(text) - start > UNFINISHED_CHARS:
            start = len(text)
        self._pending = text[start:]
        return CONTROL.sub("", text[:start])

    def _store_and_drop_middle(self, text: str) -> str:
        """Store text as part of the start or the end of the stream, drop the middle, and return the text."""
        room = self._head_limit - len(self._head)
        self._head += text[:room]
        self._tail += text[room:] if room else text
        if len(self._tail) > 2 * self._tail_limit:
            self._left_out += len(self._tail) - self._tail_limit
            self._tail = self._tail[-self._tail_limit :]
        return text

    def end(self) -> str:
        """End the stream, and return the text that was held back as an unfinished sequence."""
        return self._store_and_drop_middle(
            self._strip_control_characters(self._decoder.decode(b"", final=True), final=True)
        )

    @property
    def is_cut(self) -> bool:
        """Whether some text was left out."""
        return bool(self._left_out) or len(self._tail) > self._tail_limit

    def text(self) -> str:
        """Return the stored text, with a note where text was left out."""
        if not self.is_cut:
            return self._head + self._tail
        tail = self._tail[-self._tail_limit :]
        missing = self._left_out + len(self._tail) - len(tail)
        return f"{self._head}\n[... {missing:,} characters were left out here ...]\n{tail}"

    def pop_text(self) -> str:
        """Return the stored text, and clear it."""
        text = self.text()
        self._clear_stored_text()
        return text


def cut_texts_to_fit(texts: tuple[str, str], room: int) -> tuple[str, str]:
    """Return both texts, cut so that together they have at most *room* characters as JSON; the longer text is cut first."""
    sizes = [len(compact(text)) for text in texts]
    if sum(sizes) <= room:
        return texts
    small = min(sizes)
    shares = [min(size, max(room - small, room // 2)) for size in sizes]
    made = [_cut_to_json_size(text, share) for text, share in zip(texts, shares, strict=True)]
    return made[0], made[1]


def _cut_to_json_size(text: str, room: int) -> str:
    """Return a text whose middle is cut until it has at most *room* characters as JSON."""
    limit = len(text)
    made = text
    while len(compact(made)) > room:
        limit = limit * 9 // 10
        made = cut_middle(text, limit)
    return made
