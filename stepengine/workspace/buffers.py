"""
``Buffers``: files that are open in somebody's editor, where they may stand otherwise than on the disk.

What must not be here: which editor that is, and whether a path may be touched: whoever asks has opened the file itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from stepengine.workspace.text import FileText, decode

__all__ = ("Buffers", "as_edited", "edited_text", "place_of")


class Buffers(Protocol):
    """
    The files that are open in an editor, by absolute paths.

    Its methods are called in a thread of a tool and may block; where a person is about to be shown what a call would do they are
    called on the event loop, and give what is known without asking.
    """

    def read(self, path: str, /) -> str | None:
        """Return the text of a file as the editor has it; ``None`` where it does not say."""

    def write(self, path: str, text: str, /) -> bool:
        """
        Have the editor write a file and save it; return ``False`` where it does not offer to.

        Raises:
            ToolError: when it tried and could not.
        """


def place_of(root: Sequence[str], parts: Sequence[str]) -> str:
    """Return the absolute path of a file by its place below a root."""
    return "/" + "/".join((*root, *parts))


def as_edited(buffers: Buffers | None, path: str, data: bytes) -> bytes:
    """Return the content of the file at *path*, of which the disk has *data*, as it stands in the editor."""
    held = None if buffers is None else decode(data)
    text = None if held is None or buffers is None else buffers.read(path)
    if held is None or text is None:
        return data
    try:
        return held.encode(_with_its_line_ends(held, text))
    except UnicodeEncodeError:
        return data


def edited_text(data: bytes) -> str | None:
    """Return the text that an editor can be given for a new content; ``None`` for one that it would write otherwise."""
    decoded = decode(data)
    if decoded is None or decoded.bom or decoded.shown != decoded.text:
        return None
    return decoded.text


def _with_its_line_ends(held: FileText, text: str) -> str:
    """Return an editor's text with the line ends of the file: many editors keep their texts without carriage returns."""
    if "\r\n" not in held.text or "\r\n" in text:
        return text
    same = held.text.replace("\r\n", "\n")
    return held.text if text == same else text.replace("\n", "\r\n")
