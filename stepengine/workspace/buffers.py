"""
``Buffers``: files that are open in an editor, whose text may differ from the disk.

This module must not know the editor, or check whether a path is allowed: callers have opened the file themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from stepengine.workspace.line_ends import apply_old_line_ends
from stepengine.workspace.text import decode_text


class Buffers(Protocol):
    """
    The files that are open in an editor, by absolute paths.

    Its methods are called in a thread of a tool and may block. For the preview of a call they are called on the event loop, and
    return only known data without a request.
    """

    def read(self, path: str, /) -> str | None:
        """Return the text of a file in the editor; ``None`` if the editor does not provide it."""

    def write(self, path: str, text: str, /) -> bool:
        """
        Write and save a file in the editor; return ``False`` if the editor does not support this.

        Raises:
            ToolError: if writing failed.
        """


def absolute_path(root: Sequence[str], parts: Sequence[str]) -> str:
    """Return the absolute path of a file from the root and its path components below the root."""
    return "/" + "/".join((*root, *parts))


def read_content_in_editor(buffers: Buffers | None, path: str, data: bytes) -> bytes:
    """Read the file at *path* from the editor; return *data*, the content on disk, if the editor does not provide it."""
    held = None if buffers is None else decode_text(data)
    text = None if held is None or buffers is None else buffers.read(path)
    if held is None or text is None:
        return data
    try:
        # Many editors remove carriage returns.
        return held.encode(text if "\r\n" in text else apply_old_line_ends(held.text, text))
    except UnicodeEncodeError:
        return data


def decode_text_for_editor(data: bytes) -> str | None:
    """Return the text of *data* for an editor; ``None`` if it is binary, has a byte order mark or is not valid UTF-8."""
    decoded = decode_text(data)
    if decoded is None or decoded.bom or decoded.displayable_text != decoded.text:
        return None
    return decoded.text
