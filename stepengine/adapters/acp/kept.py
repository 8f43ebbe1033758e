"""
The stored sessions of an editor: each is a folder with the journals and the prompts of its turns.

The protocol and the execution of turns do not belong here.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import attrs
from attrs import frozen

from stepengine.adapters.acp.session_options import SessionChoices
from stepengine.data.visible import visible
from stepengine.errors import SessionError
from stepengine.workspace.calls import OTHERS_WRITE_BITS

VERSION = 1
ID = re.compile(r"[0-9a-f]{16}")
ABOUT = "session.json"
TITLE_CHARS = 80


@frozen
class PromptRun:
    """
    One prompt of a session and the run that it started.

    Attributes:
        prompt: The user's text, as a replay shows it.
        journal: The journal file of the run.
        is_kept: Whether the conversation continues from its state; False until it ends or asks for text, and if it failed.
        chosen: The mode and model of the run, which a replay needs.
        servers: The names of the MCP servers whose tools the run had.
    """

    prompt: str
    journal: Path
    is_kept: bool = False
    chosen: SessionChoices = SessionChoices()
    servers: tuple[str, ...] = ()

    @property
    def media_file(self) -> Path:
        """The file with the images and documents of the prompt."""
        return self.journal.with_suffix(".media.json")

    def to_dict(self) -> dict[str, object]:
        """Return the turn as JSON."""
        chosen, told = self.chosen, {"prompt": self.prompt, "journal": self.journal.name, "kept": self.is_kept}
        return {**told, "mode": chosen.mode, "model": chosen.model, "servers": list(self.servers)}

    @classmethod
    def from_dict(cls, encoded: Any, folder: Path) -> PromptRun:
        """Return a turn from the JSON that ``to_dict`` returned; *folder* is the folder of its session."""
        chosen = _parse_choices(encoded)
        servers = tuple([str(name) for name in encoded.get("servers", ())])
        return cls(
            str(encoded["prompt"]), folder / Path(encoded["journal"]).name, bool(encoded["kept"]), chosen, servers
        )


@attrs.define(eq=False)
class StoredSession:
    """
    A session in a folder.

    Attributes:
        id: Its id, 16 hex digits.
        folder: Its folder.
        cwd: Its workspace.
        turns: Its turns, the oldest first.
        updated: When it was last changed, as ISO 8601 in UTC.
        chosen: The mode and model of its next turn.
    """

    id: str
    folder: Path
    cwd: Path
    turns: list[PromptRun] = attrs.field(factory=list)
    updated: str = ""
    chosen: SessionChoices = SessionChoices()

    @property
    def title(self) -> str:
        """The start of the first prompt in one line; ``""`` without a prompt."""
        first = self.turns[0].prompt if self.turns else ""
        return visible(" ".join(first.split()), strict=True)[:TITLE_CHARS]

    def add_turn(self, prompt: str, *, servers: tuple[str, ...] = (), media: str = "") -> PromptRun:
        """Add a turn with a new journal path, and save the session and *media*, the images of the prompt as JSON."""
        journal = self.folder / f"{len(self.turns) + 1:04}.jsonl"
        turn = PromptRun(prompt, journal, chosen=self.chosen, servers=servers)
        self.turns.append(turn)
        try:
            if media:
                _write_file_atomically(turn.media_file, media)
            self.save()
        except SessionError:
            self.remove_turn(turn)
            raise
        return turn

    def remove_turn(self, turn: PromptRun) -> None:
        """Remove a turn whose run did not start, and its images, since the next turn has the same files."""
        self.turns.remove(turn)
        with suppress(OSError):
            turn.media_file.unlink(missing_ok=True)

    def save_turn_end(self, turn: PromptRun, *, is_in_conversation: bool) -> None:
        """Store that a turn has ended, and whether the conversation continues from it."""
        self.turns[self.turns.index(turn)] = attrs.evolve(turn, is_kept=is_in_conversation)
        self.save()

    def save(self) -> None:
        """
        Write the session atomically.

        Raises:
            SessionError: If the session cannot be written.
        """
        self.updated = datetime.now(UTC).isoformat(timespec="milliseconds")
        about = {
            "version": VERSION,
            "cwd": str(self.cwd),
            "updated": self.updated,
            "mode": self.chosen.mode,
            "model": self.chosen.model,
            "turns": [turn.to_dict() for turn in self.turns],
        }
        _write_file_atomically(self.folder / ABOUT, json.dumps(about))


class SessionStorage:
    """
    The stored sessions in a folder, which is created for its owner alone and to which no other user may write.

    Raises:
        SessionError: from its methods, when a session is missing, broken, or cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def create_session(self, cwd: Path) -> StoredSession:
        """Create and store an empty session for a workspace, in a private folder of its own."""
        session = StoredSession(secrets.token_hex(8), Path(), cwd)
        session.folder = self._folder / session.id
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._require_private_folder()
            session.folder.mkdir(mode=0o700)
            session.save()
        except OSError as error:
            raise _make_storage_error(self._folder, error) from None
        return session

    def load_session(self, session_id: str) -> StoredSession:
        """Return a stored session by its id; raise an error if it is missing or cannot be read."""
        folder = self._folder / session_id
        if not ID.fullmatch(session_id) or not (folder / ABOUT).is_file():
            msg = f"there is no session {session_id!r:.80}; `session/list` lists the stored sessions"
            raise SessionError(msg)
        try:
            self._require_private_folder()
            about = _read_json(folder / ABOUT)
            turns = [PromptRun.from_dict(turn, folder) for turn in about["turns"]]
            return StoredSession(
                session_id, folder, Path(about["cwd"]), turns, str(about["updated"]), _parse_choices(about)
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            msg = f"the session {session_id!r} cannot be read: {type(error).__name__}"
            raise SessionError(msg) from None

    def _require_private_folder(self) -> None:
        """Raise an error if other users can write to the folder, since agents resume from its files."""
        status = self._folder.stat()
        if status.st_uid != os.geteuid() or status.st_mode & OTHERS_WRITE_BITS:
            msg = f"other users can write to the folder {str(self._folder)!r}; make it private with `chmod 700`"
            raise SessionError(msg)

    def copy_session(self, source: StoredSession, cwd: Path) -> StoredSession:
        """Create a session with copies of another one's turns, journals and images."""
        made = self.create_session(cwd)
        made.chosen = source.chosen
        for turn in source.turns:
            for file in (turn.journal, turn.media_file):
                if file.is_file():
                    try:
                        shutil.copy2(file, made.folder / file.name)
                    except OSError as error:
                        raise _make_storage_error(made.folder, error) from None
            made.turns.append(attrs.evolve(turn, journal=made.folder / turn.journal.name))
        made.save()
        return made

    def delete_session(self, session_id: str) -> None:
        """Delete a session with its journals; an unknown session counts as deleted."""
        folder = self._folder / session_id
        if not ID.fullmatch(session_id) or not folder.is_dir() or folder.is_symlink():
            return
        self._require_private_folder()
        try:
            shutil.rmtree(folder)
        except OSError as error:
            raise _make_storage_error(self._folder, error) from None

    def list_sessions(self, cwd: Path | None) -> list[StoredSession]:
        """Return the sessions of a workspace, or with ``None`` all; the newest first, without unreadable ones."""
        found = []
        for folder in self._folder.iterdir() if self._folder.is_dir() else ():
            try:
                session = self.load_session(folder.name)
            except SessionError:
                continue
            if cwd is None or session.cwd == cwd:
                found.append(session)
        return sorted(found, key=lambda session: session.updated, reverse=True)


def _make_storage_error(folder: Path, error: OSError) -> SessionError:
    """Return the error for a session that cannot be stored in a folder."""
    return SessionError(f"the session cannot be stored in {str(folder)!r}: {error.strerror}")


def _read_json(file: Path) -> dict[str, Any]:
    about: dict[str, object] = json.loads(file.read_text(encoding="utf-8"))
    return about


def _parse_choices(encoded: Any) -> SessionChoices:
    """Return the mode and the model in a stored session or turn, empty ones if they are missing."""
    return SessionChoices(str(encoded.get("mode", "")), str(encoded.get("model", "")))


def _write_file_atomically(file: Path, text: str) -> None:
    """Write a file for its owner alone by an atomic replacement; raise ``SessionError`` if that fails."""
    place = file.with_name(f"{file.name}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as out:
            out.write(text)
        place.replace(file)
    except OSError as error:
        raise _make_storage_error(file.parent, error) from None
    finally:
        with suppress(OSError):
            place.unlink(missing_ok=True)
