"""
Stores for notes that outlive a run: the protocol of a store, and a store in files.

A file contains the notes of one scope, one per line. Its owner can read and edit it.
"""

from __future__ import annotations

import asyncio
import os
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Protocol

import attrs
from attrs import frozen

from stepengine.data.messages import to_tuple
from stepengine.errors import ToolError
from stepengine.workspace.atomic import replace_path

NOTE_CHARS = 2_000
"""A paragraph or two: a note is a fact, not a document."""
MAX_NOTES = 500
"""All are searched at each call, and a person can still look through them."""
FILE_BYTES = 256 * 1024
"""Five hundred notes of some sentences; the file is read and written whole."""
MAX_TAGS = 5
"""Tags are for finding a note; with more of them each note fits every search."""
OLDEST_NOTES = 3
"""Candidates for being forgotten that a model is shown."""
WHOLE_WEIGHT, PREFIX = 2, 1
"""A whole word counts twice as much as the start of a word."""
LINE = re.compile(r"- \[m(\d{1,9})\] (\d{4}-\d\d-\d\d)((?: #[^\s#:]{1,32}){0,5})(?: (run [\w.-]{1,80}))?: (.*)")
"""A note. Its tags may hold all that ``remember`` accepts, such as combining marks, which are not in Python's ``\\w``."""
HIGHEST = re.compile(r"<!-- highest: m(\d{1,9}) -->")
KEPT = "surrogateescape"
"""Bytes of a person that are not UTF-8 are written back unchanged."""
WORD = re.compile(r"[\w-]+")
COMBINING = ("Mc", "Me", "Mn")
JOINERS = "-_\u200c\u200d"
"""Characters that join letters to a word; the last two are invisible and are used in some scripts."""
SCOPE = re.compile(r"user|project:[0-9a-f]{16}")


@frozen(kw_only=True)
class Note:
    """
    A stored note.

    Attributes:
        id: The id by which it is deleted, such as ``"m12"``; never used again within its scope.
        text: The text, on one line.
        tags: Further words for searches.
        date: The day (UTC) on which it was written, such as ``"2026-11-20"``.
        origin: Its writer, such as ``"run 3e1a58"``.
    """

    id: str
    text: str
    tags: tuple[str, ...] = attrs.field(default=(), converter=to_tuple)
    date: str = ""
    origin: str = ""

    @property
    def line(self) -> str:
        """The note as a line of its file, which models also see."""
        tags = "".join([f" #{tag}" for tag in self.tags])
        return f"- [{self.id}] {self.date}{tags}{f' {self.origin}' if self.origin else ''}: {self.text}"


class MemoryStore(Protocol):
    """
    Stores notes; implement it to store them elsewhere.

    A scope is ``"user"``, or ``"project:"`` with 16 hexadecimal digits that identify the repository. The written text has been
    checked: it is one line of at most 2,000 characters without secrets. The model receives the message of a ``ToolError``.
    """

    async def write(self, scope: str, text: str, tags: Sequence[str], origin: str) -> Note:
        """Store a note and return it with its id."""

    async def search(self, scope: str, query: str, limit: int) -> list[Note]:
        """Return at most *limit* notes that match a query, best first; for an empty query the newest."""

    async def forget(self, scope: str, id: str) -> bool:
        """Delete a note; return False if it does not exist."""


@frozen
class FileMemory:
    """
    Stores notes as lines of Markdown that only their owner can read: ``user.md``, and ``projects/DIGITS.md`` per repository.

    Other lines belong to the owner and are not changed. A file contains at most 500 notes and 256 KiB. Processes wait for each
    other, and a file is replaced as a whole.

    Attributes:
        folder: The folder of the files; by default ``stepengine/memory`` in ``$XDG_DATA_HOME``, else in ``~/.local/share``.
        clock: Returns the current time, for the date of a note.
    """

    folder: Path | None = attrs.field(default=None, converter=attrs.converters.optional(Path))
    clock: Callable[[], datetime] = attrs.field(default=partial(datetime.now, UTC), kw_only=True)

    async def write(self, scope: str, text: str, tags: Sequence[str], origin: str) -> Note:
        """Append a note with a new id and return it; raise ``ToolError`` with the oldest notes if the file is full."""
        return await asyncio.to_thread(self._append_note, scope, text, tuple(tags), origin)

    async def search(self, scope: str, query: str, limit: int) -> list[Note]:
        """Return the notes with the best scores: 2 for each whole word or tag of the query, 1 for the start of a word."""
        return await asyncio.to_thread(self._search_notes_file, scope, query, limit)

    def _search_notes_file(self, scope: str, query: str, limit: int) -> list[Note]:
        """Return at most *limit* notes of the scope's file, those with the highest score first."""
        notes = _parse_notes(self._read_lines(scope))
        wanted = set(_split_folded_words(query))
        ranked = [(_score_note_by_words(note, wanted), int(note.id[1:]), note) for note in notes]
        found = sorted([one for one in ranked if one[0] or not query.strip()], key=lambda one: one[:2], reverse=True)
        return [note for *_, note in found[:limit]]

    async def forget(self, scope: str, id: str) -> bool:
        """Delete a note from its file; return whether it was there."""
        return await asyncio.to_thread(self._remove_note, scope, id)

    def _get_notes_path(self, scope: str) -> Path:
        """Return the path of a scope's file; raise ``ToolError`` for an unknown scope."""
        if not SCOPE.fullmatch(scope):
            msg = f"{scope!r} is no scope of notes; 'user' or 'project:' with 16 hexadecimal digits would be fine"
            raise ToolError(msg)
        kind, _, digits = scope.partition(":")
        return self._get_notes_folder() / (f"projects/{digits}.md" if kind == "project" else "user.md")

    def _get_notes_folder(self) -> Path:
        """Return the folder of the notes: the given one, else a folder in the user's data folder."""
        if self.folder is not None:
            return self.folder
        data = os.environ.get("XDG_DATA_HOME", "")
        base = Path(data) if data.startswith("/") else Path(os.path.expanduser("~"), ".local", "share")  # noqa: PTH111
        return base / "stepengine" / "memory"

    def _read_lines(self, scope: str) -> list[str]:
        """Return the lines of a scope's file, none if it is missing; raise ``ToolError`` if it is a link or too large."""
        path = self._get_notes_path(scope)
        try:
            with open(path, "rb", opener=_open_without_following) as file:
                data = file.read(2 * FILE_BYTES + 1)
        except FileNotFoundError:
            return []
        except OSError as error:
            msg = f"the file of notes {path.name!r} cannot be read: {error.strerror}"
            raise ToolError(msg) from None
        if len(data) > 2 * FILE_BYTES:
            msg = f"the file of notes {path.name!r} has more than {2 * FILE_BYTES:,} bytes, so it was not read"
            raise ToolError(msg)
        return data.decode("utf-8", KEPT).split("\n")

    def _append_note(self, scope: str, text: str, tags: tuple[str, ...], origin: str) -> Note:
        """Append a note with the next unused id to the file, under its lock, and return it; raise ``ToolError`` if the file is full."""
        with self._lock_file(scope) as path:
            lines = self._read_lines(scope)
            while lines and not lines[-1].strip():
                lines.pop()
            notes = _parse_notes(lines)
            numbers = [int(note.id[1:]) for note in notes] + [
                int(m[1]) for line in lines if (m := HIGHEST.fullmatch(line))
            ]
            number = max(numbers, default=0) + 1
            day = self.clock().date().isoformat()
            note = Note(id=f"m{number}", text=text, tags=tags, date=day, origin=origin)
            kept = [line for line in lines if not HIGHEST.fullmatch(line)]
            data = "\n".join([*kept, note.line, f"<!-- highest: m{number} -->", ""]).encode("utf-8", KEPT)
            if len(notes) >= MAX_NOTES or len(data) > FILE_BYTES:
                oldest = "\n".join([one.line for one in notes[:OLDEST_NOTES]])
                msg = f"there is no room for another note ({len(notes)} of {MAX_NOTES}, {FILE_BYTES:,} bytes); forget some. The oldest:\n{oldest}"
                raise ToolError(msg)
            replace_path(path, data, mode=0o600)
        return note

    def _remove_note(self, scope: str, identity: str) -> bool:
        """Remove a note from the file under its lock; return False if it is not there."""
        with self._lock_file(scope) as path:
            lines = self._read_lines(scope)
            kept = [line for line in lines if not (m := LINE.fullmatch(line)) or f"m{m[1]}" != identity]
            if len(kept) == len(lines):
                return False
            replace_path(path, "\n".join(kept).encode("utf-8", KEPT), mode=0o600)
        return True

    @contextmanager
    def _lock_file(self, scope: str) -> Iterator[Path]:
        """Hold the lock of a notes file against other threads and processes, and yield the path of the notes file."""
        import fcntl

        path = self._get_notes_path(scope)
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            fd = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
                yield path
            finally:
                # Unlocked explicitly: a process that was forked meanwhile has the open file, too.
                fcntl.flock(fd, fcntl.LOCK_UN)
                os.close(fd)
        except OSError as error:
            msg = f"notes cannot be kept: {error.strerror or type(error).__name__}"
            raise ToolError(msg) from None


def _open_without_following(path: str, flags: int) -> int:
    """Open a file, but no link, without waiting for the writer of a pipe."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def _parse_notes(lines: Sequence[str]) -> list[Note]:
    """Return the notes in the lines of a file; other lines are skipped."""
    found = [m for line in lines if (m := LINE.fullmatch(line))]
    return [
        Note(
            id=f"m{m[1]}",
            date=m[2],
            tags=[tag[1:] for tag in m[3].split()],
            origin=m[4] or "",
            text=m[5].encode("utf-8", KEPT).decode("utf-8", "replace"),
        )
        for m in found
    ]


def _split_folded_words(text: str) -> list[str]:
    """Return the words of a text, normalised and casefolded. Combining marks and joiners are parts of words."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    if folded.isascii():
        return WORD.findall(folded)
    chars = [c if c.isalnum() or c in JOINERS or unicodedata.category(c) in COMBINING else " " for c in folded]
    return "".join(chars).split()


def _score_note_by_words(note: Note, wanted: set[str]) -> int:
    """Return the score of a note: more for whole words and tags, less for words that only start with a wanted one."""
    words, tags = set(_split_folded_words(note.text)), set(_split_folded_words(" ".join(note.tags)))
    whole = WHOLE_WEIGHT * (len(wanted & words) + len(wanted & tags))
    return whole + PREFIX * sum([any(word.startswith(w) and word != w for word in words) for w in wanted])
