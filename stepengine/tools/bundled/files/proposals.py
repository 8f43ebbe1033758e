"""
``propose_write_file`` and ``propose_str_replace``: changes that are shown as a diff and not made.

A proposal for a file is based on the earlier proposals of the run. The proposed content is stored in the run's context, so a replay
and a resumed run have it. Another run does not use it, even if it continues from this run's state.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from stepengine.data.hooks import Change
from stepengine.data.messages import ToolResult
from stepengine.data.state import AgentState
from stepengine.data.tools import ToolAnnotations
from stepengine.errors import ToolError
from stepengine.tools.bundled.files.edits import apply_replacements, unified_diff
from stepengine.tools.bundled.files.write_tools import (
    ALIASES,
    WRITE_BYTES,
    PathText,
    ReplacementInput,
    make_text_replacements,
    read_file_if_small,
)
from stepengine.tools.context import ToolContext
from stepengine.tools.decorator import tool
from stepengine.tools.definition import Tool
from stepengine.workspace.atomic import stat_regular_file
from stepengine.workspace.buffers import Buffers, absolute_path, read_content_in_editor
from stepengine.workspace.line_ends import apply_old_line_ends
from stepengine.workspace.paths import format_display_path
from stepengine.workspace.root import Missing, Root
from stepengine.workspace.text import READ_WHOLE_BYTES, decode_text

PROPOSED_BYTES = 8 * 1024 * 1024
"""Proposals are in the memory of a run and its journal; two full files fit."""

PREFIX = "proposed:"
"""How the members of the context begin that hold proposals; the file's path follows."""

PROPOSES = ToolAnnotations(read_only=True, idempotent=True)


def make_proposal_tools(root: Root, buffers: Buffers | None) -> list[Tool]:
    """Return `propose_write_file` and `propose_str_replace` for *root*; files open in an editor are read from *buffers*."""
    proposed = _ProposedFiles(root, buffers)

    @tool(category="read", annotations=PROPOSES, destinations=())
    def propose_write_file(ctx: ToolContext, path: PathText, content: str, instructions: str = "") -> ToolResult:  # noqa: D417  (the context is no parameter of the tool)
        r"""
        Propose to create a file, or to overwrite a whole file; nothing is written.

        Usage:
            - Give the complete content; the result shows what would change as a diff.
            - A later proposal for the same file starts from this one.

        Examples:
            {"path": "src/new_module.py", "content": "VALUE = 1\n"}

        When not to use:
            - To really write a file, use `write_file`.
            - To propose a change to parts of a file, use `propose_str_replace`.

        Notes:
            - What could not be written by `write_file` cannot be proposed either.
            - Reading tools show files as they are, without proposals. Proposals are forgotten when the run ends.

        Args:
            path: The file.
            content: The complete new content.
            instructions: What the change is for, in a few words; it is only logged.
        """
        before = proposed.read_proposed_text(ctx.agent_state, path)
        ctx.logger.info("propose_write_file", path=path, instructions=instructions)
        word = "create" if before is None else "overwrite"
        after = content if "\r\n" in content else apply_old_line_ends(before or "", content)
        return proposed.make_proposal_result(ctx.agent_state, path, before or "", after, f"Proposed to {word}")

    @tool(category="read", annotations=PROPOSES, aliases=ALIASES, destinations=())
    def propose_str_replace(  # noqa: D417  (the context is no parameter of the tool)
        ctx: ToolContext, path: PathText, replacements: Annotated[list[ReplacementInput], Field(min_length=1)]
    ) -> ToolResult:
        """
        Propose to replace exact pieces of text in a file, all of them or none; nothing is written.

        Usage:
            - `old_string` has to match exactly, white space included, and exactly once, unless `allow_multiple` is set.
            - Replacements are made in order, on what earlier proposals of this run made of the file.

        Examples:
            {"path": "app.py", "replacements": [{"old_string": "def main(", "new_string": "def run("}]}

        When not to use:
            - To really change a file, use `str_replace`.
            - To propose a new file, use `propose_write_file`.

        Notes:
            - If one replacement fails, nothing is proposed and the error says why, with line numbers.
            - Reading tools show files as they are, without proposals. Proposals are forgotten when the run ends.

        Args:
            path: The file.
            replacements: What to replace.
        """
        before = proposed.read_proposed_text(ctx.agent_state, path)
        if before is None:
            msg = f"{path!r} does not exist; use propose_write_file to propose it"
            raise ToolError(msg)
        made = make_text_replacements(replacements)
        after = apply_replacements(before, made, path)
        count = f"{len(made)} replacement{'s' if len(made) > 1 else ''}"
        return proposed.make_proposal_result(ctx.agent_state, path, before, after, f"Proposed {count} in")

    return [propose_write_file, propose_str_replace]


class _ProposedFiles:
    """Computes the content of files with the proposals of a run applied."""

    def __init__(self, root: Root, buffers: Buffers | None) -> None:
        self._root = root
        self._buffers = buffers

    def read_proposed_text(self, state: AgentState, path: str) -> str | None:
        """Return the newest proposal of the run for a file, else its current text; ``None`` if it does not exist."""
        name = PREFIX + format_display_path(self._root.split_path(path))
        known = state.context.get(name)
        if known is not None and known["run_id"] == state.run_id:
            return str(known["text"])
        return self._read_current_text(path)

    def _read_current_text(self, path: str) -> str | None:
        """Return the text of a file on disk or in the editor, ``None`` if it is missing; raise ``ToolError`` if it is not readable text."""
        try:
            with self._root.open_parent(path, create=False) as (folder, name):
                if stat_regular_file(folder, name, path) is None:
                    return None
                data = read_file_if_small(self._root, folder, name, path)
        except Missing:
            return None
        except OSError as error:
            msg = f"{path!r} cannot be read: {error.strerror or type(error).__name__}"
            raise ToolError(msg) from error
        if data is not None:
            data = read_content_in_editor(
                self._buffers, absolute_path(self._root.real, self._root.split_path(path)), data
            )
        return _decode_unicode_or_raise(data, path)

    def make_proposal_result(self, state: AgentState, path: str, before: str, after: str, action: str) -> ToolResult:
        """Return a result with the diff of a proposal and the context change that stores it; raise ``ToolError`` if it is too large."""
        file = format_display_path(self._root.split_path(path))
        stale: dict[str, object] = {}
        size = len(after.encode("utf-8", "replace"))
        if size > WRITE_BYTES:
            msg = f"{path!r} would have {size:,} bytes; at most {WRITE_BYTES:,} are written"
            raise ToolError(msg)
        for name, value in state.context.items():
            if not name.startswith(PREFIX) or name == PREFIX + file:
                continue
            if value["run_id"] == state.run_id:
                size += len(value["text"].encode("utf-8", "replace"))
            else:
                stale[name] = None
        if size > PROPOSED_BYTES:
            msg = f"the proposals of this run would have {size:,} bytes in all; at most {PROPOSED_BYTES:,} are kept"
            raise ToolError(msg)
        kept = {PREFIX + file: {"run_id": state.run_id, "text": after}}
        value = {"file": file, "message": f"{action} {file}; nothing was written."}
        return ToolResult.json(
            {**value, "unified_diff": unified_diff(before, after, file)}, change=Change(context={**stale, **kept})
        )


def _decode_unicode_or_raise(data: bytes | None, path: str) -> str:
    """
    Return the text of a file; raise ``ToolError`` if *data* is ``None`` (too large) or not Unicode text.

    Raises:
        ToolError: when the file is too large, or holds text that JSON cannot.
    """
    if data is None:
        msg = f"{path!r} has more than {READ_WHOLE_BYTES:,} bytes, which is too much to change"
        raise ToolError(msg)
    decoded = decode_text(data)
    if decoded is None or decoded.text != decoded.displayable_text:
        msg = f"{path!r} is no text in a Unicode encoding; changes to it cannot be proposed"
        raise ToolError(msg)
    return decoded.text
