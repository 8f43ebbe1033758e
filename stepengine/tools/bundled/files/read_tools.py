"""``read_files`` and ``list_directory``: tools that read below a root."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, NoReturn, NotRequired

from pydantic import ConfigDict, Field, with_config
from typing_extensions import TypedDict

from stepengine.data.json import JsonDict, compact
from stepengine.data.provenance import Trust
from stepengine.data.tools import ToolAnnotations
from stepengine.errors import ToolError
from stepengine.tools.bundled.files.seen import record_hash
from stepengine.tools.context import ToolContext
from stepengine.tools.decorator import tool
from stepengine.tools.definition import Tool
from stepengine.workspace import calls
from stepengine.workspace.buffers import Buffers, absolute_path, read_content_in_editor
from stepengine.workspace.calls import Fd
from stepengine.workspace.guard import make_withheld_notes
from stepengine.workspace.paths import format_display_path, printable_name
from stepengine.workspace.root import OpenedEntry, Root
from stepengine.workspace.text import (
    READ_WHOLE_BYTES,
    cut_long_line,
    decode_text,
    guess_binary_kind,
    read_if_small,
    read_line_range,
    short_content_hash,
)
from stepengine.workspace.walk import TEMPORARY, WalkBudget

READ_CHARS = 100_000
"""The size limit of results (``RESULT_CHARS``)."""
READ_LINES = 2_000
"""Most source files in full, at about 20,000 tokens."""
READ_PATHS = 50
"""More files than fit in the characters of one call."""
TOO_MANY = "not read: a call takes at most {} paths; ask for this one in another call"
FIRST_LINE = ("start_line", "first_line")
"""Other names of ``offset``."""

READS = ToolAnnotations(read_only=True, idempotent=True)
ENTRY_CHARS = 190
"""The most characters of an entry in addition to path and content."""


@with_config(ConfigDict(extra="forbid"))
class FileWindow(TypedDict):
    """A part of one file."""

    path: Annotated[str, Field(description="Path of the file, relative to the root folder.", min_length=1)]
    offset: NotRequired[Annotated[int, Field(description="First line to read, counting from 1.", ge=1)]]
    limit: NotRequired[Annotated[int, Field(description="How many lines to read.", ge=1)]]


def _get_trust_of_paths(root: Root, input: JsonDict) -> Trust:
    """Return ``"trusted"`` if all files in the input of a call are trusted, else ``"untrusted"``."""
    paths = [one if isinstance(one, str) else one["path"] for one in input["paths"]]
    return "trusted" if all(map(root.is_trusted, paths)) else "untrusted"


def make_read_tools(root: Root, buffers: Buffers | None = None) -> list[Tool]:
    """Return `read_files` and `list_directory` for *root*; files that are open in an editor are read from *buffers*."""
    aliases = {"paths": ("path", "file_paths", "files"), "offset": FIRST_LINE, "paths.offset": FIRST_LINE}

    @tool(
        category="read",
        annotations=READS,
        parallel_safe=True,
        aliases=aliases,
        results=partial(_get_trust_of_paths, root),
        destinations=(),
    )
    def read_files(  # noqa: D417  (the context is no parameter of the tool)
        ctx: ToolContext,
        paths: Annotated[list[str | FileWindow], Field(json_schema_extra={"maxItems": READ_PATHS})],
        offset: Annotated[int, Field(ge=1)] = 1,
        limit: Annotated[int, Field(ge=1)] = READ_LINES,
        line_numbers: bool = False,  # noqa: FBT001, FBT002  (a parameter of the model's)
    ) -> list[dict[str, Any]]:
        """
        Read one or more text files.

        Each path gives an entry with `content`, or with `error`; one unreadable file does not affect the others.

        Usage:
            - Ask for all files that you need in one call.
            - Long files come in portions: when `has_more` is true, read on with `offset` and `limit`, which count lines.
            - Lines count from 1, as in `code_search` and in error messages: pass such a number as `offset`.
            - The content is exact, so that it can be used in `str_replace`; ask for `line_numbers` only to talk about lines.

        Examples:
            {"paths": ["src/app.py", "README.md"]}
            {"paths": [{"path": "server.log", "offset": 4001, "limit": 200}, "README.md"]}

        When not to use:
            - To see what a folder holds, use `list_directory` or `glob`.
            - To find where something is mentioned, use `code_search` instead of reading many files.

        Notes:
            - Paths are relative to the root folder, or absolute inside of it; files with secrets are not available.
            - At most 50 files and 100,000 characters per call, 2,000 lines per file; longer lines are cut at 2,000 characters.
            - Files over 10 MB are read only with `offset` or `limit`. Binary files and folders give an `error`.
            - `hash` identifies the content; pass it as `expected_hash` to a tool that changes the file.

        Args:
            paths: The files: paths, or objects with `path` and optionally `offset` and `limit`.
            offset: First line to read of each file, counting from 1.
            limit: How many lines to read of each file at most.
            line_numbers: Whether to put the line's number, counting from 1, before each line.
        """
        is_window = offset > 1 or limit != READ_LINES
        wanted = [_WantedPart(p, offset, limit, is_window=is_window) for p in paths]
        seen, entries, left = set(), [], READ_CHARS - 2
        for one in wanted:
            if one.make_dedup_key(root) in seen:
                continue
            seen.add(one.make_dedup_key(root))
            if len(seen) > READ_PATHS:
                entries.append({"path": one.path, "error": TOO_MANY.format(READ_PATHS)})
                continue
            entry = _FileReader(
                ctx, root, one, left, line_numbers=line_numbers, buffers=buffers
            ).read_entry_and_record_hash()
            left -= len(compact(entry)) + 1
            entries.append(entry)
            if ctx.cancelled.is_set():
                break
        return entries

    @tool(category="read", annotations=READS, parallel_safe=True, destinations=())
    def list_directory(ctx: ToolContext, path: str = ".") -> dict[str, Any]:  # noqa: D417  (the context is no parameter of the tool)
        """
        List the files and folders directly in a folder.

        Usage:
            - Start with "." to see the root folder, then go deeper.
            - The names come sorted, files and folders apart.

        Examples:
            {"path": "."}
            {"path": "src/components"}

        When not to use:
            - To find files by name in the whole tree, use `glob`.
            - To read files, use `read_files`.

        Notes:
            - One level only. Symbolic links, special files and files with secrets are left out.
            - At most 20,000 entries; `message` says when there are more.

        Args:
            path: The folder, relative to the root folder; "." is the root folder itself.
        """
        opened = root.open_folder(path or ".")
        try:
            return _list_open_folder(root, opened.fd, opened.parts, WalkBudget(cancelled=ctx.cancelled)) | {
                "path": format_display_path(opened.parts)
            }
        finally:
            calls.close(opened.fd)

    return [read_files, list_directory]


def _list_open_folder(root: Root, fd: Fd, parts: tuple[str, ...], budget: WalkBudget) -> dict[str, Any]:
    """Return the sorted names of files and folders in an open folder, without links and withheld files, and notes."""
    found: dict[str, list[str]] = {"files": [], "directories": []}
    with calls.scandir(fd) as entries:
        for entry in entries:
            kind = "directories" if entry.is_dir(follow_symlinks=False) else "files"
            if kind == "files" and not entry.is_file(follow_symlinks=False):
                continue
            if entry.name.startswith(TEMPORARY) or root.is_withheld((*parts, entry.name)):
                continue
            if not budget.count_entry():
                break
            found[kind].append(printable_name(entry.name))
    result: dict[str, object] = {kind: sorted(names) for kind, names in found.items()}
    notes = [*([f"incomplete: {budget.cut}"] if budget.cut else []), *make_withheld_notes()]
    return {**result, "message": "; ".join(notes)} if notes else result


class _WantedPart:
    """One part of one file."""

    def __init__(self, given: str | FileWindow, offset: int, limit: int, *, is_window: bool) -> None:
        window: FileWindow = {"path": given} if isinstance(given, str) else given
        self.path = window["path"]
        self.offset = window.get("offset", offset)
        self.limit = min(window.get("limit", limit), READ_LINES)
        self.is_window = is_window or "offset" in window or "limit" in window

    def make_dedup_key(self, root: Root) -> Any:
        """Return a key that is equal for equal parts of one file, also if its path is written differently."""
        try:
            parts: object = root.split_path(self.path)
        except ToolError:
            parts = self.path
        return parts, self.offset, self.limit


class _FileReader:
    """Makes the entry of one file."""

    def __init__(
        self,
        ctx: ToolContext,
        root: Root,
        wanted: _WantedPart,
        chars_left: int,
        *,
        line_numbers: bool,
        buffers: Buffers | None,
    ) -> None:
        self._buffers = buffers
        self._ctx = ctx
        self._root = root
        self._wanted = wanted
        self._left = chars_left - ENTRY_CHARS - len(compact(wanted.path))
        self._line_numbers = line_numbers
        self._hash = ""

    def read_entry_and_record_hash(self) -> dict[str, Any]:
        """Read the file, record its hash for later writes, and return the entry with its content or error."""
        wanted = self._wanted
        try:
            self._raise_if_no_room(has_room=self._left > 0)
            opened = self._root.open_file(wanted.path)
            try:
                entry = self._make_lines_entry(*self._read_lines_and_store_hash(opened))
                record_hash(self._ctx, self._root.real, opened.parts, self._hash)
                return entry
            finally:
                calls.close(opened.fd)
        except ToolError as error:
            return {"path": wanted.path, "error": error.message}
        except OSError as error:
            return {"path": wanted.path, "error": f"{wanted.path!r} cannot be read: {error.strerror}"}

    def _raise_if_no_room(self, *, has_room: bool) -> None:
        """Raise ``ToolError`` unless *has_room*: the characters of the call are used up."""
        if not has_room:
            msg = f"the {READ_CHARS:,} characters of this call are used up; read this file in another call"
            raise ToolError(msg)

    def _read_lines_and_store_hash(self, opened: OpenedEntry) -> tuple[list[str], int | None]:
        """Store the file's hash, and return (wanted lines, number of lines in the file), without both for a file over 10 MB."""
        wanted, fd, size = self._wanted, opened.fd, opened.info.st_size
        data = read_if_small(fd) if size <= READ_WHOLE_BYTES else None
        if data is None:
            calls.lseek(fd, 0)
            self._check_large_file_request(fd, size)
            return read_line_range(fd, wanted.offset - 1, wanted.limit)
        data = read_content_in_editor(self._buffers, absolute_path(self._root.real, opened.parts), data)
        self._hash = short_content_hash(data)
        decoded = decode_text(data)
        if decoded is None:
            self._raise_for_binary(data, f"{len(data):,} bytes")
        lines = decoded.displayable_text.split("\n")
        ends = [*[line + "\n" for line in lines[:-1]], *([lines[-1]] if lines[-1] else [])]
        window = ends[wanted.offset - 1 : wanted.offset - 1 + wanted.limit]
        return [cut_long_line(line) for line in window], len(ends)

    def _check_large_file_request(self, fd: Fd, size: int) -> None:
        """Raise ``ToolError`` for a large file that is binary or requested without offset and limit."""
        said = f"{max(size, READ_WHOLE_BYTES):,} bytes or more"
        if not self._wanted.is_window:
            msg = f"{self._wanted.path!r} has {said}; read a part of it with offset and limit, or use code_search"
            raise ToolError(msg)
        head = calls.read(fd, 8_192)
        calls.lseek(fd, 0)
        decoded = decode_text(head)
        if decoded is None or decoded.encoding != "utf-8":
            self._raise_for_binary(head, said)

    def _raise_for_binary(self, data: bytes, size: str) -> NoReturn:
        path = self._wanted.path
        msg = (
            f"{path!r} is a binary file ({guess_binary_kind(data, path)}, {size}); read_files shows text only. "
            "Use list_directory to see what is beside it, or run_terminal_command, if you have it, to inspect it"
        )
        raise ToolError(msg)

    def _make_lines_entry(self, lines: list[str], total: int | None) -> dict[str, object]:
        """Return the entry with as many lines as fit; raise ``ToolError`` for an offset after the end or without room."""
        wanted = self._wanted
        if total is not None and wanted.offset > max(total, 1):
            msg = f"offset {wanted.offset} is after the end; the file has {total} lines, the first is 1"
            raise ToolError(msg)
        if self._line_numbers:
            lines = [f"{number:>6}\t{line}" for number, line in enumerate(lines, wanted.offset)]
        kept = self._count_fitting_lines(lines)
        self._raise_if_no_room(has_room=kept > 0 or not lines)
        entry: dict[str, object] = {
            "path": wanted.path,
            "content": "".join(lines[:kept]),
            "total_lines": total,
            "offset": wanted.offset,
            "has_more": total is None or wanted.offset - 1 + kept < total,
        }
        if self._hash:
            entry["hash"] = self._hash
        if kept < len(lines):
            on = wanted.offset + kept
            entry["message"] = f"cut: the {READ_CHARS:,} characters of this call are used up; read on at offset {on}"
        return entry

    def _count_fitting_lines(self, lines: list[str]) -> int:
        """Return the number of lines that fit into the remaining characters of the call, counted as JSON."""
        if len(compact("".join(lines))) <= self._left:
            return len(lines)
        used = 0
        for number, line in enumerate(lines):
            used += len(compact(line)) - 2
            if used > self._left - 80:
                return number
        return len(lines)
