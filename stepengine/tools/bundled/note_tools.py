"""
``remember``, ``recall`` and ``forget``: notes that outlive a run, as tools.

A note of a model is used in later runs. Therefore a person is asked before it is written, secrets in it are redacted, and it is shown
with its origin. Written and found notes are in the journal, as the results of all tools.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, TypeAlias, cast, get_args

from pydantic import Field

from stepengine.data.tools import ToolAnnotations
from stepengine.data.visible import visible
from stepengine.errors import DefinitionError, ToolError
from stepengine.redaction import make_redactor
from stepengine.tools.bundled.bounds import make_excess_notes, make_softly_bounded_field
from stepengine.tools.bundled.memory import MAX_TAGS, NOTE_CHARS, FileMemory, MemoryStore
from stepengine.tools.bundled.skill_tool import get_working_folder
from stepengine.tools.context import ToolContext
from stepengine.tools.decorator import tool
from stepengine.tools.definition import Tool
from stepengine.workspace.skills import get_project_root

Scope: TypeAlias = Literal["project", "user"]
MAX_RECALLED_NOTES = 50
"""A tenth of the notes; a better query finds the others."""
ANSWER_BYTES = 8 * 1024
"""About 2,000 tokens."""


def get_project_scope(folder: Path) -> str:
    """Return the memory scope of the repository that contains *folder*; all its worktrees share one scope."""
    top = get_project_root(folder)
    common = top / ".git"
    try:
        if common.is_file():
            with common.open("rb") as file:
                said = file.read(4_096).decode("utf-8", "replace").strip()
            own = top / said.removeprefix("gitdir:").strip()
            with (own / "commondir").open("rb") as file:
                common = own / file.read(4_096).decode("utf-8", "replace").strip()
    except (OSError, ValueError):
        common = top / ".git"
    real = os.path.realpath(common if common.exists() else top)
    return f"project:{hashlib.sha256(os.fsencode(real)).hexdigest()[:16]}"


def _resolve_allowed_scope(ctx: ToolContext, scope: str, allowed: Sequence[str]) -> str:
    """Return the scope of the store for ``"user"`` or ``"project"``; raise ``ToolError`` if it is not allowed."""
    if scope not in allowed:
        msg = f"there are no notes of the scope {scope!r} here; {', '.join(allowed)} would be fine"
        raise ToolError(msg)
    return "user" if scope == "user" else get_project_scope(get_working_folder(None, ctx))


def make_memory_tools(store: MemoryStore | None, scopes: Sequence[str]) -> list[Tool]:
    """Return ``remember``, ``recall`` and ``forget`` for a store, by default files; raise ``DefinitionError`` for invalid scopes."""
    known = get_args(Scope)
    if isinstance(scopes, str) or not scopes or not set(scopes) <= set(known):
        msg = f"memory_tools(scopes={scopes!r}) is not a list of scopes; use {known!r}, or a list with one of them"
        raise DefinitionError(msg)
    notes, allowed = FileMemory() if store is None else store, cast("tuple[Scope, ...]", tuple(scopes))
    return [make(notes, allowed) for make in (_make_remember_tool, _make_recall_tool, _make_forget_tool)]


def _make_remember_tool(notes: MemoryStore, scopes: tuple[Scope, ...]) -> Tool:
    first = scopes[0]

    @tool(category="memory", annotations=ToolAnnotations(destructive=False), destinations=())
    async def remember(  # noqa: D417  (the context is no parameter of the tool)
        ctx: ToolContext,
        text: Annotated[str, Field(min_length=1, max_length=NOTE_CHARS)],
        scope: Scope = first,
        tags: Annotated[list[Annotated[str, Field(pattern=r"^[\w-]{1,32}$")]], Field(max_length=MAX_TAGS)] = [],  # noqa: B006
    ) -> str:
        """
        Keep a note for later conversations.

        Usage:
            - Note what will be true and useful next time and cannot be read off the files: decisions, preferences, traps.

        Examples:
            {"text": "The integration tests need the database of docker compose.", "tags": ["tests"]}
            {"text": "Prefers small commits.", "scope": "user"}

        When not to use:
            - For the work at hand, use `write_todos`. Never for passwords or keys.

        Notes:
            - At most 2,000 characters; line ends become blanks.

        Args:
            text: What to remember.
            scope: "project" for this repository, "user" for everything that the user does.
            tags: Up to five words that it is found by.
        """
        where = _resolve_allowed_scope(ctx, scope, scopes)
        clean = make_redactor("all", os.environ).text(" ".join(visible(text).split()))
        if not clean:
            msg = "the note is blank; say what to remember"
            raise ToolError(msg)
        if len(clean) > NOTE_CHARS:
            msg = f"the note has {len(clean):,} characters, with hidden ones written out; at most {NOTE_CHARS:,} would be fine"
            raise ToolError(msg)
        origin = f"run {re.sub(r'[^A-Za-z0-9_.-]', '-', ctx.run_id)[:80]}" if ctx.run_id else ""
        note = await notes.write(where, clean, tags, origin)
        return f"Remembered as {note.id} ({scope})."

    return remember


def _make_recall_tool(notes: MemoryStore, scopes: tuple[Scope, ...]) -> Tool:
    @tool(
        category="read",
        annotations=ToolAnnotations(read_only=True, idempotent=True),
        requires_permission=False,
        parallel_safe=True,
        about=(),
        destinations=(),
    )
    async def recall(  # noqa: D417  (the context is no parameter of the tool)
        ctx: ToolContext,
        query: Annotated[str, Field(max_length=NOTE_CHARS)] = "",
        scope: Scope | None = None,
        limit: Annotated[int, make_softly_bounded_field(MAX_RECALLED_NOTES)] = 10,
    ) -> str:
        """
        Search the notes that were kept in earlier conversations.

        Usage:
            - Give a few words; without any the newest notes come.

        Examples:
            {"query": "integration tests"}
            {"query": "commits", "scope": "user"}

        When not to use:
            - To find something in files, use `code_search`.

        Notes:
            - A note says who wrote it and when; it may be out of date, and it permits nothing.

        Args:
            query: Words to look for.
            scope: "project" or "user"; both by default.
            limit: How many notes of each scope at most.
        """
        parts: list[str] = []
        bounded = [f"({note})" for note in make_excess_notes("limit", limit, MAX_RECALLED_NOTES)]
        left = ANSWER_BYTES
        for one in scopes if scope is None else (scope,):
            for note in await notes.search(
                _resolve_allowed_scope(ctx, one, scopes), query, min(limit, MAX_RECALLED_NOTES)
            ):
                line = f"{one} {visible(note.line)}"
                left -= len(line.encode()) + 1
                if left < 0:
                    return "\n".join([*bounded, *parts, "(there are more; give words that tell them apart)"])
                parts.append(line)
        return "\n".join([*bounded, *(parts or ["There are no such notes."])])

    return recall


def _make_forget_tool(notes: MemoryStore, scopes: tuple[Scope, ...]) -> Tool:
    first = scopes[0]

    @tool(category="memory", annotations=ToolAnnotations(destructive=True, idempotent=True), destinations="id")
    async def forget(  # noqa: D417  (the context is no parameter of the tool)
        ctx: ToolContext,
        id: Annotated[str, Field(pattern=r"^m\d{1,9}$")],
        scope: Scope = first,
    ) -> str:
        """
        Forget a note that is wrong or no longer true.

        Usage:
            - Give the id that `recall` showed, such as "m12", and its scope.

        Examples:
            {"id": "m12"}
            {"id": "m3", "scope": "user"}

        When not to use:
            - To correct a note, forget it and keep a new one with `remember`.

        Notes:
            - Ids are never used again.

        Args:
            id: The note.
            scope: Where it is kept.
        """
        if await notes.forget(_resolve_allowed_scope(ctx, scope, scopes), id):
            return f"Forgot {id} ({scope})."
        msg = f"there is no note {id!r} in the scope {scope!r}; recall shows the ids"
        raise ToolError(msg)

    return forget
