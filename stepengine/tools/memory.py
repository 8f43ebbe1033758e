"""
``remember``, ``recall`` and ``forget``: notes that outlive a run, and what keeps them (interfaces IF105 to IF107).

A note that a model wrote once comes back in later runs, so writing one is asked about, secrets are taken out of it, and
it is shown with where it came from. What is written and found is in the journal as any tool's result is.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, TypeAlias, cast, get_args

import attrs
from pydantic import Field

from stepengine.data.tools import ToolAnnotations
from stepengine.data.visible import visible
from stepengine.errors import DefinitionError, ToolError
from stepengine.redaction import redactor_for
from stepengine.tools.context import ToolContext
from stepengine.tools.decorator import tool
from stepengine.tools.definition import Tool
from stepengine.tools.files.atomic import replace_path
from stepengine.tools.skills import project_top, working_folder

__all__ = ("FileMemory", "MemoryStore", "Note", "memory_tools_of")

Scope: TypeAlias = Literal["project", "user"]
NOTE_CHARS = 2_000
NOTES = 500
FILE_BYTES = 256 * 1024
ANSWER_BYTES = 8 * 1024
TAGS, TAG_CHARS = 5, 32
OLDEST = 3
WHOLE, PREFIX = 2, 1
LINE = re.compile(r"- \[m(\d{1,9})\] (\d{4}-\d\d-\d\d)((?: #[\w-]{1,32}){0,5})(?: (run [\w.-]{1,80}))?: (.*)")
HIGHEST = re.compile(r"<!-- highest: m(\d{1,9}) -->")
WORD = re.compile(r"[\w-]+")
SCOPE = re.compile(r"user|project:[0-9a-f]{16}")


def _tags(given: Iterable[str]) -> tuple[str, ...]:
    return tuple(given)


@attrs.frozen(kw_only=True)
class Note:
    """
    Something that was remembered.

    Attributes:
        id: What it is forgotten by, such as ``"m12"``; never used again within its scope.
        text: One line.
        tags: Words that it is found by as well.
        date: The day (UTC) on which it was written, such as ``"2026-11-20"``.
        origin: Who wrote it, such as ``"run 3e1a58"``.
    """

    id: str
    text: str
    tags: tuple[str, ...] = attrs.field(default=(), converter=_tags)
    date: str = ""
    origin: str = ""

    @property
    def line(self) -> str:
        """The note as a line of a file, and as a model is shown it."""
        tags = "".join([f" #{tag}" for tag in self.tags])
        return f"- [{self.id}] {self.date}{tags}{f' {self.origin}' if self.origin else ''}: {self.text}"


class MemoryStore(Protocol):
    """
    Keeps notes; bring your own to keep them elsewhere.

    A scope is ``"user"``, or ``"project:"`` with 16 hexadecimal digits that stand for the repository. What is written has
    been checked: one line of at most 2,000 characters without secrets. A ``ToolError`` tells the model what is wrong.
    """

    async def write(self, scope: str, text: str, tags: Sequence[str], origin: str) -> Note:
        """Keep a note and return it with its id."""

    async def search(self, scope: str, query: str, limit: int) -> list[Note]:
        """Return at most *limit* notes, best first; for an empty query the newest."""

    async def forget(self, scope: str, id: str) -> bool:
        """Forget a note; return whether there was one."""


def _today() -> datetime:
    return datetime.now(UTC)


@attrs.frozen
class FileMemory:
    """
    Keeps notes as lines of Markdown: ``user.md``, and ``projects/DIGITS.md`` for each repository, for their owner only.

    Lines that are no notes are a person's and stay. A file holds at most 500 notes and 256 KiB. Processes wait for each
    other; a file is replaced as a whole.

    Attributes:
        folder: Where the files are; by default ``stepengine/memory`` in ``$XDG_DATA_HOME``, else in ``~/.local/share``.
        clock: Gives the time that notes are dated by.
    """

    folder: Path | None = attrs.field(default=None, converter=attrs.converters.optional(Path))
    clock: Callable[[], datetime] = attrs.field(default=_today, kw_only=True)

    async def write(self, scope: str, text: str, tags: Sequence[str], origin: str) -> Note:
        """Add a note; raises ``ToolError`` when the file is full, naming the oldest three."""
        return await asyncio.to_thread(self._write, scope, text, tuple(tags), origin)

    async def search(self, scope: str, query: str, limit: int) -> list[Note]:
        """Return the notes with words of the query: a whole word or a tag counts 2, a beginning 1; ties newest first."""
        notes = _notes(await asyncio.to_thread(self._lines, scope))
        wanted = set(_words(query))
        ranked = [(_rank(note, wanted), int(note.id[1:]), note) for note in notes]
        found = sorted([one for one in ranked if one[0] or not wanted], key=lambda one: one[:2], reverse=True)
        return [note for *_, note in found[:limit]]

    async def forget(self, scope: str, id: str) -> bool:
        """Take a note out of its file."""
        return await asyncio.to_thread(self._forget, scope, id)

    def _path(self, scope: str) -> Path:
        if not SCOPE.fullmatch(scope):
            msg = f"{scope!r} is no scope of notes; 'user' or 'project:' with 16 hexadecimal digits would be fine"
            raise ToolError(msg)
        kind, _, digits = scope.partition(":")
        return self._base() / (f"projects/{digits}.md" if kind == "project" else "user.md")

    def _base(self) -> Path:
        if self.folder is not None:
            return self.folder
        data = os.environ.get("XDG_DATA_HOME", "")
        base = Path(data) if data.startswith("/") else Path(os.path.expanduser("~"), ".local", "share")  # noqa: PTH111
        return base / "stepengine" / "memory"

    def _lines(self, scope: str) -> list[str]:
        """Return the lines of a file; a link, or what is larger than a file of notes can be, is refused."""
        path = self._path(scope)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return []
        except OSError as error:
            msg = f"the file of notes {path.name!r} cannot be read: {error.strerror}"
            raise ToolError(msg) from None
        with os.fdopen(fd, "rb") as file:
            data = file.read(2 * FILE_BYTES + 1)
        if len(data) > 2 * FILE_BYTES:
            msg = f"the file of notes {path.name!r} has more than {2 * FILE_BYTES:,} bytes, so it was not read"
            raise ToolError(msg)
        return data.decode("utf-8", "replace").split("\n")

    def _write(self, scope: str, text: str, tags: tuple[str, ...], origin: str) -> Note:
        with self._held(scope) as path:
            lines = [line for line in self._lines(scope) if line.strip()]
            notes = _notes(lines)
            numbers = [int(note.id[1:]) for note in notes] + [
                int(m[1]) for line in lines if (m := HIGHEST.fullmatch(line))
            ]
            number = max(numbers, default=0) + 1
            day = self.clock().date().isoformat()
            note = Note(id=f"m{number}", text=text, tags=tags, date=day, origin=origin)
            kept = [line for line in lines if not HIGHEST.fullmatch(line)]
            data = "\n".join([*kept, note.line, f"<!-- highest: m{number} -->", ""]).encode()
            if len(notes) >= NOTES or len(data) > FILE_BYTES:
                oldest = "\n".join([one.line for one in notes[:OLDEST]])
                msg = f"there is no room for another note ({len(notes)} of {NOTES}, {FILE_BYTES:,} bytes); forget some. The oldest:\n{oldest}"
                raise ToolError(msg)
            replace_path(path, data, mode=0o600)
        return note

    def _forget(self, scope: str, identity: str) -> bool:
        with self._held(scope) as path:
            lines = self._lines(scope)
            kept = [line for line in lines if not (m := LINE.fullmatch(line)) or f"m{m[1]}" != identity]
            if len(kept) == len(lines):
                return False
            replace_path(path, "\n".join(kept).encode(), mode=0o600)
        return True

    @contextmanager
    def _held(self, scope: str) -> Iterator[Path]:
        """Hold the lock of a file, which lies beside it, against other threads and processes."""
        import fcntl

        path = self._path(scope)
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            fd = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            msg = f"notes cannot be kept: {error.strerror or type(error).__name__}"
            raise ToolError(msg) from None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield path
        finally:
            os.close(fd)


def _notes(lines: Sequence[str]) -> list[Note]:
    found = [m for line in lines if (m := LINE.fullmatch(line))]
    return [
        Note(id=f"m{m[1]}", date=m[2], tags=[tag[1:] for tag in m[3].split()], origin=m[4] or "", text=m[5])
        for m in found
    ]


def _words(text: str) -> list[str]:
    return WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def _rank(note: Note, wanted: set[str]) -> int:
    words, tags = set(_words(note.text)), set(_words(" ".join(note.tags)))
    whole = WHOLE * (len(wanted & words) + len(wanted & tags))
    return whole + PREFIX * sum([any(word.startswith(w) and word != w for word in words) for w in wanted])


def project_scope(folder: Path) -> str:
    """Return the scope of the repository that *folder* is in; all work trees of one repository have the same."""
    top = project_top(folder)
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


@attrs.frozen
class _Notes:
    """The notes of one set of tools: what keeps them, and which may be used."""

    store: MemoryStore
    scopes: tuple[Scope, ...]

    def place(self, ctx: ToolContext, scope: str) -> str:
        """Return the scope as a store knows it; raises ``ToolError`` for one that may not be used."""
        if scope not in self.scopes:
            msg = f"there are no notes of the scope {scope!r} here; {', '.join(self.scopes)} would be fine"
            raise ToolError(msg)
        return "user" if scope == "user" else project_scope(working_folder(None, ctx))


def memory_tools_of(store: MemoryStore | None, scopes: Sequence[str]) -> list[Tool[..., Any]]:
    """Return the tools; ``memory_tools`` documents them."""
    known = get_args(Scope)
    if isinstance(scopes, str) or not scopes or not set(scopes) <= set(known):
        msg = (
            f"memory_tools(scopes={scopes!r}) is no list of scopes; {known!r}, or one of them in a list, would be fine"
        )
        raise DefinitionError(msg)
    notes = _Notes(FileMemory() if store is None else store, cast("tuple[Scope, ...]", tuple(scopes)))
    return [_remembering(notes), _recalling(notes), _forgetting(notes)]


def _remembering(notes: _Notes) -> Tool[..., Any]:
    first = notes.scopes[0]

    @tool(category="memory", annotations=ToolAnnotations(destructive=False))
    async def remember(  # noqa: D417  (the context is no parameter of the tool)
        ctx: ToolContext,
        text: Annotated[str, Field(min_length=1, max_length=NOTE_CHARS)],
        scope: Scope = first,
        tags: Annotated[list[Annotated[str, Field(pattern=r"^[\w-]{1,32}$")]], Field(max_length=TAGS)] = [],  # noqa: B006
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
        where = notes.place(ctx, scope)
        clean = redactor_for("all", os.environ).text(" ".join(visible(text).split()))
        if not clean:
            msg = "the note is blank; say what to remember"
            raise ToolError(msg)
        origin = f"run {re.sub(r'[^A-Za-z0-9_.-]', '-', ctx.run_id)[:80]}" if ctx.run_id else ""
        note = await notes.store.write(where, clean[:NOTE_CHARS], tags, origin)
        return f"Remembered as {note.id} ({scope})."

    return remember


def _recalling(notes: _Notes) -> Tool[..., Any]:
    @tool(
        category="read",
        annotations=ToolAnnotations(read_only=True, idempotent=True),
        requires_permission=False,
        parallel_safe=True,
    )
    async def recall(  # noqa: D417  (the context is no parameter of the tool)
        ctx: ToolContext,
        query: Annotated[str, Field(max_length=NOTE_CHARS)] = "",
        scope: Scope | None = None,
        limit: Annotated[int, Field(ge=1, le=50)] = 10,
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
        left = ANSWER_BYTES
        for one in notes.scopes if scope is None else (scope,):
            for note in await notes.store.search(notes.place(ctx, one), query, limit):
                line = f"{one} {visible(note.line)}"
                left -= len(line.encode()) + 1
                if left < 0:
                    return "\n".join([*parts, "(there are more; give words that tell them apart)"])
                parts.append(line)
        return "\n".join(parts) or "There are no such notes."

    return recall


def _forgetting(notes: _Notes) -> Tool[..., Any]:
    first = notes.scopes[0]

    @tool(category="memory", annotations=ToolAnnotations(destructive=True, idempotent=True))
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
            scope: Where it is notes.store.
        """
        if await notes.store.forget(notes.place(ctx, scope), id):
            return f"Forgot {id} ({scope})."
        msg = f"there is no note {id!r} in the scope {scope!r}; recall shows the ids"
        raise ToolError(msg)

    return forget
