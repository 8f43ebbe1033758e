"""``write_file``, ``str_replace`` and ``delete_file``: tools that change files below a root."""

from __future__ import annotations

import os
import stat
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal, NotRequired, TypeAlias

from attrs import frozen
from pydantic import ConfigDict, Field, with_config
from typing_extensions import TypedDict

from stepengine.data.events import FileChanged
from stepengine.data.json import JsonDict, canonical
from stepengine.data.messages import SideEffect, ToolResult
from stepengine.data.tools import ToolAnnotations
from stepengine.errors import ToolError
from stepengine.tools.bundled.files.edits import TextReplacement, apply_replacements, unified_diff
from stepengine.tools.bundled.files.seen import get_recorded_hash, record_hash
from stepengine.tools.context import ToolContext
from stepengine.tools.decorator import tool
from stepengine.tools.definition import Tool, ToolPreview
from stepengine.workspace import calls
from stepengine.workspace.atomic import hold_file_lock, replace_file, stat_regular_file
from stepengine.workspace.buffers import Buffers, absolute_path, decode_text_for_editor, read_content_in_editor
from stepengine.workspace.calls import FILE, Fd
from stepengine.workspace.line_ends import apply_old_line_ends
from stepengine.workspace.paths import format_display_path
from stepengine.workspace.root import Missing, OpenedEntry, Root
from stepengine.workspace.text import READ_WHOLE_BYTES, decode_text, read_if_small, short_content_hash
from stepengine.workspace.writes import FileWrite, OldFile, content_hash

WRITE_BYTES = 4 * 1024 * 1024
"""More than a model writes; the journal stores the old content, so that a write can be undone."""
SHOWN_DIFFS = 1_000
"""The most calls that wait for approval whose previewed files are remembered."""

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


def make_write_tools(root: Root, *, delete: bool = False, buffers: Buffers | None = None) -> list[Tool]:
    """Return `write_file` and `str_replace` for *root* and the editor's *buffers*; with *delete* also `delete_file`."""
    writer = _Writer(root, buffers)

    @tool(
        category="write",
        annotations=OVERWRITES,
        preview=lambda given: writer.preview_change("Write", given, _make_content_change(given["content"])),
        destinations=(),
    )
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
        given = {"path": path, "content": content, "instructions": instructions, "expected_hash": expected_hash}
        done = writer.apply_change(ctx, given, _make_content_change(content))
        data = done.new or b""
        lines = content.count("\n") + bool(content and not content.endswith("\n"))
        word, file = "Created" if done.action == "created" else "Overwrote", done.file
        ctx.logger.info("write_file", path=file, instructions=instructions)
        return _make_written_result(
            {"file": file, "message": f"{word} {file} ({lines:,} lines, {len(data):,} bytes)."}, file
        )

    @tool(
        category="write",
        annotations=EDITS,
        preview=lambda given: writer.preview_change(
            "Edit", given, _make_replacement_change(given["path"], given["replacements"])
        ),
        aliases=ALIASES,
        destinations=(),
    )
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
        given = {"path": path, "replacements": replacements, "expected_hash": expected_hash}
        done = writer.apply_change(ctx, given, _make_replacement_change(path, replacements))
        count = f"{len(replacements)} replacement{'s' if len(replacements) > 1 else ''}"
        value = {"file": done.file, "message": f"Changed {done.file} ({count}).", "unified_diff": done.diff}
        return _make_written_result(value, done.file)

    @tool(
        category="write",
        annotations=EDITS,
        preview=lambda given: writer.preview_change("Delete", given, _make_delete_change(given["path"])),
        destinations="path",
    )
    def delete_file(ctx: ToolContext, path: PathText, expected_hash: str = "") -> ToolResult:  # noqa: D417  (as above)
        """
        Delete a file.

        Usage:
            - One file per call. Folders are not deleted.

        Examples:
            {"path": "src/old_module.py"}

        When not to use:
            - To empty a file, use `write_file` with an empty `content`.

        Notes:
            - Symbolic links, special, secret and protected files cannot be deleted.

        Args:
            path: The file.
            expected_hash: The `hash` that `read_files` gave; when the file has changed since, nothing is deleted.
        """
        done = writer.apply_change(ctx, {"path": path, "expected_hash": expected_hash}, _make_delete_change(path))
        value = {"file": done.file, "message": f"Deleted {done.file}."}
        return ToolResult.json(value, side_effects=(SideEffect("file_deleted", done.file),))

    return [write_file, str_replace, *([delete_file] if delete else ())]


def _make_content_change(content: str) -> Change:
    """
    Return the change that sets the whole content of a file.

    Content without CRLF gets the line ends of the overwritten text, since models always write LF.
    """

    def set_content(old: FoundFile) -> bytes:
        """Return the new content of the file, with the line ends of the old one."""
        decoded = None if old.data is None or "\r\n" in content else decode_text(old.data)
        text = content if decoded is None else apply_old_line_ends(decoded.text, content)
        return text.encode("utf-8", "replace")

    return set_content


def make_text_replacements(replacements: Sequence[ReplacementInput]) -> list[TextReplacement]:
    """Return the replacements of a call."""
    return [TextReplacement(r["old_string"], r["new_string"], r.get("allow_multiple", False)) for r in replacements]


def _make_replacement_change(path: str, replacements: Sequence[ReplacementInput]) -> Change:
    """
    Return the change that makes these replacements.

    The change raises ``ToolError`` if a replacement fails, and for a file that is missing, binary or too large.
    """
    made = make_text_replacements(replacements)

    def replace_text(old: FoundFile) -> bytes:
        """Return the content of the file after the replacements; raise ``ToolError`` if one fails."""
        if not old.exists:
            msg = f"{path!r} does not exist; use write_file to create it"
            raise ToolError(msg)
        if old.data is None:
            msg = f"{path!r} has more than {READ_WHOLE_BYTES:,} bytes, which is too much to change"
            raise ToolError(msg)
        decoded = decode_text(old.data)
        if decoded is None:
            msg = f"{path!r} is a binary file; str_replace edits text"
            raise ToolError(msg)
        return decoded.encode(apply_replacements(decoded.text, made, path))

    return replace_text


def _make_delete_change(path: str) -> Change:
    """Return the change that deletes a file; the change raises ``ToolError`` if the file does not exist."""

    def check_exists(old: FoundFile) -> None:
        """Raise ``ToolError`` if the file does not exist, else return ``None``, which deletes it."""
        if not old.exists:
            msg = f"{path!r} does not exist"
            raise ToolError(msg)

    return check_exists


def _make_written_result(value: dict[str, Any], file: str) -> ToolResult:
    """Return a result with *value* as JSON and the side effect ``file_written``."""
    return ToolResult.json(value, side_effects=(SideEffect("file_written", file),))


@frozen
class FoundFile:
    """
    The file at a path before a change, if there is one.

    Attributes:
        info: The data of ``stat``; ``None`` if the file does not exist.
        data: The content; ``None`` if the file does not exist or is too large.
        is_unsaved: Whether *data* is the unsaved content in an editor.
    """

    info: os.stat_result | None
    data: bytes | None
    is_unsaved: bool = False

    @property
    def exists(self) -> bool:
        """Whether the file exists."""
        return self.info is not None

    @property
    def digest(self) -> str:
        """The short hash of the content; ``""`` if the file does not exist or was not read."""
        return "" if self.data is None else short_content_hash(self.data)


Change: TypeAlias = Callable[[FoundFile], bytes | None]
"""Returns the new content of a file, ``None`` to delete it; raises ``ToolError`` if the change is impossible."""


@frozen
class ContentChange:
    """
    A change to the content of a file, made or only previewed.

    Attributes:
        file: The path of the file, relative to the root.
        old: The file before the change.
        new: The new content; ``None`` for a deleted file.
    """

    file: str
    old: FoundFile
    new: bytes | None

    @property
    def action(self) -> Literal["created", "modified", "deleted"]:
        """The kind of change."""
        if self.new is None:
            return "deleted"
        return "modified" if self.old.exists else "created"

    @property
    def diff(self) -> str:
        """The difference as a unified diff; a sentence if no diff can be shown."""
        before = decode_text(self.old.data) if self.old.data is not None else None
        after = decode_text(self.new) if self.new is not None else None
        if (self.old.exists and before is None) or (self.new is not None and after is None):
            return "(the file is binary or too large for a diff)"
        return unified_diff(
            before.displayable_text if before else None, after.displayable_text if after else None, self.file
        )


class _Writer:
    """Reads, changes and replaces a file while it holds the file's lock."""

    def __init__(self, root: Root, buffers: Buffers | None = None) -> None:
        self._root = root
        self._buffers = buffers
        self._swept: set[tuple[int, int]] = set()
        # By call, the hash of the file from which the previewed diff was made.
        self._shown: OrderedDict[str, str] = OrderedDict()

    def apply_change(self, ctx: ToolContext, call_input: Mapping[str, Any], change: Change) -> ContentChange:
        """
        Change a file under its lock, emit, record and return the change; raise ``ToolError`` if the file has changed since it was read.

        The hash of the new content is recorded for later calls, and the data to undo the write in the journal.

        Args:
            ctx: The call's context.
            call_input: The call's input.
            change: Returns the new content.

        Raises:
            ToolError: If the file has changed since the run read it or a person approved the diff, or cannot be written.
        """
        began, path, made = time.monotonic(), call_input["path"], list[str]()
        try:
            with (
                self._root.open_parent(path, create="content" in call_input, created=made) as (folder, name),
                hold_file_lock(folder, name),
            ):
                self._remove_stale_temporary_files(folder)
                old = self._read_found_file(folder, name, path)
                self._check_unchanged_and_forget_preview(ctx, call_input, old)
                new = change(old)
                self._write_or_delete(folder, name, old, new, path)
                after = "" if new is None else short_content_hash(new)
                record_hash(ctx, self._root.real, self._root.split_path(path), after)
        except OSError as error:
            msg = f"{path!r} was not written: {error.strerror or type(error).__name__}"
            raise ToolError(msg) from error
        done = ContentChange(format_display_path(self._root.split_path(path)), old, new)
        ctx.emit(FileChanged(file=done.file, action=done.action))
        ctx.logger.info(
            "file written" if new is not None else "file deleted",
            path=done.file,
            size=len(new or b""),
            before=old.digest or None,
            after=after or None,
            milliseconds=round((time.monotonic() - began) * 1000),
        )
        if ctx.records_writes:
            ctx.record_write(self._make_undo_record(done, made))
        return done

    def _write_or_delete(self, folder: Fd, name: str, old: FoundFile, new: bytes | None, path: str) -> None:
        """Write the new content, to the editor if the file has unsaved changes there; delete the file for ``None``."""
        if new is None:
            calls.unlink(name, folder)
            return
        if len(new) > WRITE_BYTES:
            msg = f"{path!r} would have {len(new):,} bytes; at most {WRITE_BYTES:,} are written"
            raise ToolError(msg)
        text = decode_text_for_editor(new) if old.is_unsaved else None
        if text is None or self._buffers is None or not self._buffers.write(self._get_absolute_path(path), text):
            replace_file(folder, name, new, old.info)

    def _get_absolute_path(self, path: str) -> str:
        """Return the absolute path of a file below the root."""
        return absolute_path(self._root.real, self._root.split_path(path))

    def _make_undo_record(self, change: ContentChange, created_folders: Sequence[str]) -> FileWrite:
        """Return the record from which a change can be undone."""
        info, new = change.old.info, change.new
        return FileWrite(
            root=self._root.id,
            path=change.file,
            before=None if info is None else OldFile.from_data(change.old.data, stat.S_IMODE(info.st_mode)),
            after=None if new is None else content_hash(new),
            folders=tuple(created_folders),
        )

    def _check_unchanged_and_forget_preview(
        self, ctx: ToolContext, call_input: Mapping[str, Any], old: FoundFile
    ) -> None:
        """Raise ``ToolError`` if the file differs from ``expected_hash``, the read or the previewed version; forget the previewed one."""
        path, shown = call_input["path"], self._shown.pop(_hash_input(call_input), None)
        if shown is not None and shown != old.digest:
            msg = f"{path!r} has changed since its difference was shown to the person who allowed this; read it again"
            raise ToolError(msg)
        expected = call_input["expected_hash"]
        if not expected and old.data is not None:
            expected = get_recorded_hash(ctx, self._root.real, self._root.split_path(path))
        if expected and old.digest != expected:
            msg = f"{path!r} has changed since it was read; read it again"
            raise ToolError(msg)

    def _read_found_file(self, folder: Fd, name: str, path: str) -> FoundFile:
        """Return the file at a path with its content on disk or in the editor; an empty ``FoundFile`` if it does not exist."""
        info = stat_regular_file(folder, name, path)
        if info is None:
            return FoundFile(None, None)
        data = read_file_if_small(self._root, folder, name, path)
        if data is None:
            return FoundFile(info, None)
        edited = read_content_in_editor(self._buffers, self._get_absolute_path(path), data)
        return FoundFile(info, edited, is_unsaved=edited != data)

    def _remove_stale_temporary_files(self, folder: Fd) -> None:
        """Remove temporary files that crashed writes left in a folder, once per folder."""
        info = calls.fstat(folder)
        if (info.st_dev, info.st_ino) not in self._swept:
            self._swept.add((info.st_dev, info.st_ino))
            calls.remove_stale_temporary_files(folder)

    # --- previews ----------------------------------------------------------------------------------------

    def preview_change(self, verb: str, call_input: JsonDict, change: Change) -> ToolPreview:
        """
        Return the diff of a call, and record the file's hash, so that the call fails if the file changes before it runs.

        Only the call itself checks the size limit and ``expected_hash``.
        """
        path = call_input["path"]
        try:
            old = FoundFile(None, None)
            with suppress(Missing), self._root.open_parent(path, create=False) as (folder, name):
                old = self._read_found_file(folder, name, path)
            done = ContentChange(format_display_path(self._root.split_path(path)), old, change(old))
        except (ToolError, OSError) as error:
            why = error.message if isinstance(error, ToolError) else error.strerror or type(error).__name__
            return ToolPreview(f"{verb} {path!r}, which will be refused", {"problem": why}, problem=why)
        self._shown[_hash_input(call_input)] = old.digest
        while len(self._shown) > SHOWN_DIFFS:
            self._shown.popitem(last=False)
        return ToolPreview(f"{verb} {path!r}", {"unified_diff": done.diff})


def _hash_input(call_input: Mapping[str, object]) -> str:
    """Return a hash of a call's input, as the key of its preview."""
    return content_hash(canonical(call_input).encode())


def read_file_if_small(root: Root, folder: Fd, name: str, path: str) -> bytes | None:
    """Return the content on disk of a file that exists; ``None`` if it is too large. Raise ``ToolError`` if it must not be read."""
    fd = calls.open_at(name, FILE, folder)
    try:
        root.check_readable_file(OpenedEntry(fd, root.split_path(path), calls.fstat(fd)), path)
        return read_if_small(fd)
    finally:
        calls.close(fd)
