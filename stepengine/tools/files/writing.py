"""``write_file`` and ``str_replace``: writing below a root (requirements F5, F6)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Annotated, Any, NotRequired

from pydantic import ConfigDict, Field, with_config
from typing_extensions import TypedDict

from stepengine.data.events import FileChanged
from stepengine.data.json import JsonDict
from stepengine.data.results import SideEffect, ToolResult
from stepengine.data.tools import ToolAnnotations
from stepengine.errors import ToolError
from stepengine.tools._caps import READ_WHOLE_BYTES, WRITE_BYTES
from stepengine.tools.context import ToolContext
from stepengine.tools.decorator import tool
from stepengine.tools.definition import Tool, ToolPreview
from stepengine.tools.files.atomic import lock_for, replace_file, sweep, target_info
from stepengine.tools.files.edits import Replacement, replace_all, unified_diff
from stepengine.tools.files.paths import display
from stepengine.tools.files.root import FILE, Opened, Root
from stepengine.tools.files.text import FileText, decode, digest, read_capped

__all__ = ("writing_tools",)

OVERWRITES = ToolAnnotations(destructive=True, idempotent=True)
EDITS = ToolAnnotations(destructive=True)
ALIASES = {
    "replacements": ("replacement", "edits"),
    "replacements.old_string": ("old", "old_str", "oldString", "oldStr"),
    "replacements.new_string": ("new", "new_str", "newString", "newStr"),
}
PathText = Annotated[str, Field(min_length=1)]


@with_config(ConfigDict(extra="forbid"))
class ReplacementInput(TypedDict):
    """One replacement."""

    old_string: Annotated[str, Field(description="The exact text to find, white space included.", min_length=1)]
    new_string: Annotated[str, Field(description="What stands in its place, taken literally; may be empty.")]
    allow_multiple: NotRequired[
        Annotated[bool, Field(description="Replace every occurrence; without it there must be exactly one.")]
    ]


def writing_tools(root: Root) -> list[Tool[..., Any]]:
    """Return the tools that write below *root*."""
    writer = _Writer(root)

    @tool(category="write", annotations=OVERWRITES, preview=_preview_write)
    def write_file(  # noqa: D417  (the context is no parameter of the tool)
        ctx: ToolContext, path: PathText, content: str, instructions: str = "", expected_hash: str = ""
    ) -> ToolResult:
        r"""
        Create a file, or overwrite a whole file, with the given content.

        Usage:
            - Give the complete content; nothing of an existing file is kept.
            - Missing parent folders are made.

        Examples:
            {"path": "src/new_module.py", "content": "VALUE = 1\n"}

        When not to use:
            - To change parts of an existing file, use `str_replace`: it is shorter and cannot lose the rest.

        Notes:
            - The path is relative to the root folder, or absolute inside of it. Symbolic links are not followed.
            - At most 4 MiB. The content is written as UTF-8, exactly as given.
            - Files with secrets, and files that other programs run or trust (such as `.git`), cannot be written.

        Args:
            path: The file.
            content: The complete new content.
            instructions: What the change is for, in a few words; it is only logged.
            expected_hash: The `hash` that `read_files` gave; when the file has changed since, nothing is written.
        """

        def new_content(_: bytes | None) -> bytes:
            return content.encode("utf-8", "replace")

        action, _, data = writer.write(ctx, path, new_content, expected_hash, create=True)
        lines = content.count("\n") + bool(content and not content.endswith("\n"))
        word = "Created" if action == "created" else "Overwrote"
        file = display(root.parts(path))
        ctx.logger.info("write_file", path=file, instructions=instructions)
        return _result({"file": file, "message": f"{word} {file} ({lines:,} lines, {len(data):,} bytes)."}, file)

    @tool(category="write", annotations=EDITS, preview=_preview_replace, aliases=ALIASES)
    def str_replace(  # noqa: D417  (the context is no parameter of the tool)
        ctx: ToolContext,
        path: PathText,
        replacements: Annotated[list[ReplacementInput], Field(min_length=1)],
        expected_hash: str = "",
    ) -> ToolResult:
        r"""
        Replace exact pieces of text in a file, all of them or none.

        Usage:
            - Read the file first; `old_string` has to match exactly, white space included, and exactly once.
            - Give enough of the surrounding lines to make a match unique, or set `allow_multiple` to replace them all.
            - Replacements are made in order, each on the result of the one before.

        Examples:
            {"path": "app.py", "replacements": [{"old_string": "def main(", "new_string": "def run("}]}
            {"path": "a.txt", "replacements": [{"old_string": "colour", "new_string": "color", "allow_multiple": true}]}

        When not to use:
            - To create a file, or to write most of one anew, use `write_file`.

        Notes:
            - If one replacement fails, the file stays as it is and the error says why, with line numbers.
            - Encoding, byte order mark and line ends are kept. `new_string` is literal: `$1` and `\1` mean nothing.
            - Files up to 4 MiB; binary, secret and protected files cannot be edited.

        Args:
            path: The file.
            replacements: What to replace.
            expected_hash: The `hash` that `read_files` gave; when the file has changed since, nothing is written.
        """
        made = [Replacement(r["old_string"], r["new_string"], r.get("allow_multiple", False)) for r in replacements]

        def new_content(old: bytes | None) -> bytes:
            decoded = _text(old, path)
            return decoded.encode(replace_all(decoded.text, made, path))

        _, old, data = writer.write(ctx, path, new_content, expected_hash, create=False)
        file = display(root.parts(path))
        diff = unified_diff(_text(old, path).shown, _text(data, path).shown, file)
        count = f"{len(made)} replacement{'s' if len(made) > 1 else ''}"
        return _result({"file": file, "message": f"Changed {file} ({count}).", "unified_diff": diff}, file)

    return [write_file, str_replace]


def _text(data: bytes | None, path: str) -> FileText:
    decoded = decode(data or b"")
    if decoded is None:
        msg = f"{path!r} is a binary file; str_replace edits text"
        raise ToolError(msg)
    return decoded


def _result(value: dict[str, Any], file: str) -> ToolResult:
    return ToolResult.json(value, side_effects=(SideEffect("file_written", file),))


def _preview_write(input: JsonDict) -> ToolPreview:
    return ToolPreview(f"Write {input['path']!r}", {"content": input["content"]})


def _preview_replace(input: JsonDict) -> ToolPreview:
    return ToolPreview(f"Edit {input['path']!r}", {"replacements": input["replacements"]})


class _Writer:
    """Reads, changes and replaces one file while holding its lock."""

    def __init__(self, root: Root) -> None:
        self._root = root
        self._swept: set[tuple[int, int]] = set()

    def write(
        self, ctx: ToolContext, path: str, change: Callable[[bytes | None], bytes], expected_hash: str, *, create: bool
    ) -> tuple[str, bytes | None, bytes]:
        """Return whether the file was created or modified, its old content if it was needed, and its new content."""
        began = time.monotonic()
        try:
            with self._root.parent(path, create=create) as (folder, name), lock_for(folder, name):
                self._sweep(folder)
                info = target_info(folder, name, path)
                old = None if info is None else self._content(folder, name, path)
                if not create:
                    self._check_readable(info, old, path)
                if expected_hash and (old is None or digest(old) != expected_hash):
                    msg = f"{path!r} has changed since it was read; read it again"
                    raise ToolError(msg)
                data = change(old)
                self._check_size(data, path)
                replace_file(folder, name, data, info)
        except OSError as error:
            msg = f"{path!r} was not written: {error.strerror or type(error).__name__}"
            raise ToolError(msg) from error
        action = "created" if info is None else "modified"
        file = display(self._root.parts(path))
        ctx.emit(FileChanged(file=file, action=action))
        ctx.logger.info(
            "file written",
            path=file,
            size=len(data),
            before=None if old is None else digest(old),
            after=digest(data),
            milliseconds=round((time.monotonic() - began) * 1000),
        )
        return action, old, data

    def _content(self, folder: int, name: str, path: str) -> bytes | None:
        """Return the old content; ``None`` when it is too large to be looked at."""
        fd = os.open(name, FILE, dir_fd=folder)
        try:
            self._root.check_file(Opened(fd, self._root.parts(path), os.fstat(fd)), path)
            return read_capped(fd)
        finally:
            os.close(fd)

    def _check_readable(self, info: os.stat_result | None, old: bytes | None, path: str) -> None:
        if info is None:
            msg = f"{path!r} does not exist; use write_file to create it"
            raise ToolError(msg)
        if old is None:
            msg = f"{path!r} has more than {READ_WHOLE_BYTES:,} bytes, which is too much to change"
            raise ToolError(msg)

    def _check_size(self, data: bytes, path: str) -> None:
        if len(data) > WRITE_BYTES:
            msg = f"{path!r} would have {len(data):,} bytes; at most {WRITE_BYTES:,} are written"
            raise ToolError(msg)

    def _sweep(self, folder: int) -> None:
        info = os.fstat(folder)
        if (info.st_dev, info.st_ino) not in self._swept:
            self._swept.add((info.st_dev, info.st_ino))
            sweep(folder)
