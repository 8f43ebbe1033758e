"""
The stores of the package: in memory, in files, in SQLite.

All of them store whole sessions, compare versions before they save, and may be used from several threads. Files and SQLite may also
be used from several processes. Their methods block while the disk works; the engine calls them in a thread.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
from typing_extensions import override

from stepengine.data import codec
from stepengine.data.json import canonical, compact, freeze
from stepengine.data.messages import Message
from stepengine.data.state import AgentState
from stepengine.data.transcript import Transcript
from stepengine.data.usage import Usage
from stepengine.errors import DataError, SessionConflict, SessionError, StepEngineError
from stepengine.sessions.session import (
    JournalLocation,
    Session,
    SessionInfo,
    messages_from_json,
    messages_to_json,
    repair_transcript,
    require_session_id,
)
from stepengine.workspace.after_fork import Lock
from stepengine.workspace.atomic import create_folder_durably, replace_path
from stepengine.workspace.calls import OWNER_FILE_MODE, OWNER_FOLDER_MODE
from stepengine.workspace.file_formats import FileFormat
from stepengine.workspace.open_files import describe_os_error
from stepengine.workspace.paths import to_path
from stepengine.workspace.write_ahead import Database, describe_database_error

if TYPE_CHECKING:
    import sqlite3

T = TypeVar("T")
Clock = Callable[[], datetime]
MAX_FILE_BYTES = 1024 * 1024 * 1024
"""A session with images may have hundreds of megabytes; a larger file would not fit in memory as text and as values."""
MAX_NAME_BYTES = 100
"""File systems allow 255 bytes; this leaves room for suffixes and fits in lists."""
PLAIN = frozenset(b"abcdefghijklmnopqrstuvwxyz0123456789_-")
BUSY_SECONDS = 10.0
"""Saving a long session may take a second on a slow disk, and several turns may save at once."""
MAX_ATTEMPTS = 100
"""Each failed attempt means that another save succeeded; a hundred in a row indicate a loop."""


def _utc_now() -> datetime:
    """Return the current time in UTC."""
    return datetime.now(UTC)


class Store(ABC):
    """The common part of all stores; subclasses read and write a session."""

    blocking = True
    """Whether its methods wait for a disk, so an event loop calls them in a thread."""

    def __init__(self, *, clock: Clock = _utc_now) -> None:
        self._clock = clock

    @abstractmethod
    def load(self, session_id: str) -> Session:
        """
        Return a session; a new one of version 0 for an unknown id.

        Raises:
            SessionError: if the stored data cannot be read; it contains the location.
        """

    @abstractmethod
    def save(self, session: Session) -> Session:
        """
        Store a session and return it with its new version and time.

        Raises:
            SessionConflict: if it was saved by another writer after it was loaded.
        """

    @abstractmethod
    def get_journal_location(self, session_id: str) -> JournalLocation:
        """Return the location of the journals of a session's runs."""

    @abstractmethod
    def list(self) -> list[SessionInfo]:
        """Return the data of all sessions except messages, the last changed first."""

    @abstractmethod
    def delete(self, session_id: str) -> None:
        """Delete a session with the journals of its runs; an unknown id is not an error."""

    @abstractmethod
    def get_cached(self, key: str) -> Any:
        """Return the JSON value of a key, or ``None`` if there is none or it has expired."""

    @abstractmethod
    def set_cached(self, key: str, value: Any, ttl: float | None = None) -> None:
        """Store a JSON value, for *ttl* seconds or without a limit."""

    def get_history(self, session_id: str) -> Transcript:
        """Return the messages of a session, with repairs; none for an unknown id."""
        return self.load(session_id).messages

    def save_history(self, session_id: str, messages: Sequence[Message]) -> None:
        """Replace the messages of a session and remove its state, whatever version is stored."""
        history = messages if isinstance(messages, Transcript) else Transcript(messages)
        self._change_session_with_retries(
            session_id, lambda session: attrs.evolve(session, messages=history, state=None, journal=None)
        )

    def replace(self, session_id: str, messages: Sequence[Message]) -> None:
        """Replace the messages of a session and remove its state; its other data are unchanged."""
        self.save_history(session_id, messages)

    def clear(self, session_id: str) -> None:
        """Remove the messages and the state of a session; its other data are unchanged."""
        self.save_history(session_id, ())

    def usage(self, session_id: str) -> Usage:
        """Return the tokens of all runs in a session."""
        return self.load(session_id).usage

    def get_state(self, session_id: str) -> dict[str, Any] | None:
        """Return the state after the last run, as JSON."""
        state = self.load(session_id).state
        return None if state is None else codec.to_json(state)

    def save_state(self, session_id: str, state: dict[str, Any]) -> None:
        """Store a state with its messages, whatever version is stored."""
        loaded: AgentState = codec.from_json(state)
        self._change_session_with_retries(
            session_id, lambda s: attrs.evolve(s, messages=loaded.message_history, state=loaded)
        )

    def get_metadata(self, session_id: str) -> Mapping[str, Any]:
        """Return the free JSON of a session."""
        return self.load(session_id).info.metadata

    def set_metadata(self, session_id: str, key: str, value: object) -> None:
        """Set a member of a session's free JSON; ``None`` removes it."""

        def change_member(session: Session) -> Session:
            members = {k: v for k, v in {**session.info.metadata, key: value}.items() if v is not None}
            return attrs.evolve(session, info=attrs.evolve(session.info, metadata=members))

        self._change_session_with_retries(session_id, change_member)

    def add_child(self, session_id: str, child_id: str, *, tool_call_id: str | None = None) -> Session:
        """Save a session as a child of another one, add its id to the parent, and return the child."""
        info = SessionInfo(
            session_id=require_session_id(child_id), parent_session_id=session_id, parent_tool_call_id=tool_call_id
        )
        child = self.save(attrs.evolve(self.load(child_id), info=info))

        def add_child_id(session: Session) -> Session:
            children = session.info.child_session_ids
            if child_id in children:
                return session
            return attrs.evolve(session, info=attrs.evolve(session.info, child_session_ids=(*children, child_id)))

        self._change_session_with_retries(session_id, add_child_id)
        return child

    def _change_session_with_retries(self, session_id: str, change: Callable[[Session], Session]) -> Session:
        """Load a session, change it and save it; after a conflict, repeat this a limited number of times, then raise ``SessionConflict``."""
        for _ in range(MAX_ATTEMPTS):
            try:
                return self.save(change(self.load(session_id)))
            except SessionConflict:
                time.sleep(0.001)
        msg = f"the session {session_id!r} could not be changed in {MAX_ATTEMPTS} attempts, because other writers saved it each time"
        raise SessionConflict(msg)

    def _make_next_version_or_conflict(self, session: Session, version: int) -> Session:
        """Return *session* with the next version and time; raise ``SessionConflict`` if the stored *version* differs from its own."""
        require_session_id(session.session_id)
        if version != session.version:
            msg = (
                f"the session {session.session_id!r} was saved by another writer: version {session.version} was loaded, and "
                f"version {version} is stored. Load it again and continue from there"
            )
            raise SessionConflict(msg)
        now = self._clock()
        info = attrs.evolve(session.info, created_at=session.info.created_at or now, updated_at=now)
        return attrs.evolve(session, info=info, version=version + 1, repairs=())


# --- in memory ------------------------------------------------------------------------------------------------------


class MemorySessions(Store):
    """Sessions in the memory of this process; *clock* returns the time of a save."""

    blocking = False

    def __init__(self, *, clock: Clock = _utc_now) -> None:
        super().__init__(clock=clock)
        self._sessions: dict[str, Session] = {}
        self._turns: dict[str, dict[str, Any]] = {}
        self._cache: dict[str, tuple[float | None, Any]] = {}
        self._lock = Lock()

    @override
    def load(self, session_id: str) -> Session:
        """Return a session; a new one of version 0 for an unknown id."""
        found = self._sessions.get(require_session_id(session_id))
        return found or Session(info=SessionInfo(session_id=session_id))

    @override
    def save(self, session: Session) -> Session:
        """Store a session and return it with its new version; raise ``SessionConflict`` if another version is stored."""
        with self._lock:
            stored = self._sessions.get(session.session_id)
            made = self._make_next_version_or_conflict(session, stored.version if stored else 0)
            self._sessions[session.session_id] = made
            return made

    @override
    def get_journal_location(self, session_id: str) -> JournalLocation:
        """Return the location of the session's journals in memory, created at the first call."""
        return JournalLocation(memory=self._turns.setdefault(require_session_id(session_id), {}), keep=1)

    @override
    def list(self) -> list[SessionInfo]:
        """Return the data of all sessions, the last changed first."""
        return _sort_newest_first([session.info for session in self._sessions.copy().values()])

    @override
    def delete(self, session_id: str) -> None:
        """Delete a session with its journals; do nothing for an unknown id."""
        with self._lock:
            self._sessions.pop(session_id, None)
            self._turns.pop(session_id, None)

    @override
    def get_cached(self, key: str) -> Any:
        """Return the value of a key; ``None`` if there is none or it has expired."""
        until, value = self._cache.get(key, (None, None))
        return None if _is_expired(until, self._clock()) else value

    @override
    def set_cached(self, key: str, value: object, ttl: float | None = None) -> None:
        """Store a JSON value, for *ttl* seconds or without a limit, and remove expired values."""
        now = self._clock()
        with self._lock:
            for old in [k for k, (until, _) in self._cache.items() if _is_expired(until, now)]:
                del self._cache[old]
            self._cache[key] = (_make_expiry_time(ttl, now), freeze(value))


def _make_expiry_time(ttl: float | None, now: datetime) -> float | None:
    """Return the timestamp *ttl* seconds after *now*; ``None`` without a limit."""
    return None if ttl is None else now.timestamp() + ttl


def _is_expired(until: float | None, now: datetime) -> bool:
    """Return whether the time *until* has passed; False for ``None``."""
    return until is not None and until <= now.timestamp()


def _sort_newest_first(infos: list[SessionInfo]) -> list[SessionInfo]:
    """Return session data sorted by the time of the last change, the newest first."""
    return sorted(infos, key=lambda i: (i.updated_at or datetime.min.replace(tzinfo=UTC), i.session_id), reverse=True)


# --- the format of sessions -----------------------------------------------------------------------------------------


def _encode_message(message: Message) -> bytes:
    """Return a message as a line of JSON."""
    return compact(codec.encode_stored(message)).encode() + b"\n"


def _encode_messages(messages: Transcript) -> Sequence[bytes]:
    """Return one JSON line per message; the transcript caches them, so each message is encoded once."""
    return messages.memo("session", _encode_message)


def _parse_messages(lines: Iterable[bytes], where: str) -> list[Message]:
    """Return the messages in JSON lines; raise ``SessionError`` for a line that is not a message, with its number."""
    found: list[Message] = []
    for number, line in enumerate(lines, start=1):
        try:
            found += messages_from_json([json.loads(line)])
        except (ValueError, RecursionError, SessionError) as error:
            msg = f"{where}, line {number}, is not a stored message: {error}"
            raise SessionError(msg) from None
    return found


def _format_time(value: datetime | None) -> str | None:
    """Return a time in UTC as text with microseconds; ``None`` unchanged."""
    return None if value is None else value.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _metadata_to_json(session: Session) -> dict[str, object]:
    """Return the metadata of a session as JSON: the members of seed 003 first, then our own."""
    info = session.info
    return {
        "session_id": info.session_id,
        "agent_type": info.agent_id,
        "parent_session_id": info.parent_session_id,
        "parent_tool_use_id": info.parent_tool_call_id,
        "child_session_ids": list(info.child_session_ids),
        "model": info.model,
        "provider": info.provider,
        "created_at": _format_time(info.created_at),
        "updated_at": _format_time(info.updated_at),
        "metadata": info.metadata,
        "version": session.version,
        "turns": session.turns,
        "journal": session.journal,
        "user_id": info.user_id,
        "status": info.status,
        "usage": codec.encode_stored(session.usage),
    }


OPTIONAL_TEXTS = ("parent_session_id", "parent_tool_use_id", "model", "provider", "user_id", "status", "journal")
"""Members of the metadata that are a text or ``null``."""


def _session_from_metadata(data: Any, session_id: str, where: str) -> Session:
    """Return a session without messages and state from its metadata; raise ``SessionError`` if that is invalid or of another session."""
    try:
        if data["session_id"] != session_id:
            msg = f"{where} is about the session {data['session_id']!r}, not {session_id!r}"
            raise SessionError(msg)
        texts = {name: _require_type(data.get(name), str, type(None)) for name in OPTIONAL_TEXTS}
        info = SessionInfo(
            session_id=session_id,
            agent_id=_require_type(data.get("agent_type") or "", str),
            parent_session_id=texts["parent_session_id"],
            parent_tool_call_id=texts["parent_tool_use_id"],
            child_session_ids=tuple([_require_type(c, str) for c in data.get("child_session_ids") or ()]),
            model=texts["model"],
            provider=texts["provider"],
            user_id=texts["user_id"],
            status=texts["status"],
            created_at=_parse_time(data.get("created_at")),
            updated_at=_parse_time(data.get("updated_at")),
            metadata=data.get("metadata") or {},
        )
        turns, version = _require_type(data.get("turns", 0), int), _require_type(data.get("version", 0), int)
        usage = codec.decode_stored(data["usage"]) if data.get("usage") else Usage()
        _require_type(usage, Usage)
    except (KeyError, TypeError, ValueError, AttributeError, DataError) as error:
        msg = f"{where} is not the metadata of a session: {type(error).__name__}: {error}"
        raise SessionError(msg) from None
    return Session(info=info, turns=turns, journal=texts["journal"], version=version, usage=usage)


def _require_type(value: object, *kinds: type) -> Any:
    """Return *value* if its type is exactly one of *kinds*; else raise ``TypeError``."""
    if type(value) not in kinds:
        msg = f"{str(value)[:80]!r} is a {type(value).__name__}, not {' or '.join(k.__name__ for k in kinds)}"
        raise TypeError(msg)
    return value


def _parse_time(text: str | None) -> datetime | None:
    """Return the time in a text, in UTC if it names no zone; ``None`` unchanged."""
    if text is None:
        return None
    made = datetime.fromisoformat(text)
    return made if made.tzinfo else made.replace(tzinfo=UTC)


def _state_to_json_without_history(session: Session) -> dict[str, object] | None:
    """Return the state of a session as JSON, with size and digest of the history instead of messages; ``None`` without a state."""
    state = session.state
    if state is None:
        return None
    own_view = None if state.view is state.message_history else state.view
    bare = attrs.evolve(state, message_history=Transcript(), view=own_view or Transcript())
    return {
        "messages": len(session.messages),
        "digest": _hash_lines(_encode_messages(session.messages)),
        "has_view": own_view is not None,
        "state": codec.to_json(bare),
    }


def _hash_lines(lines: Sequence[bytes]) -> str:
    """Return the SHA-256 of lines as hex digits."""
    made = hashlib.sha256()
    for line in lines:
        made.update(line)
    return made.hexdigest()


def _add_messages_and_state(session: Session, messages: list[Message], stored: object, where: str) -> Session:
    """Return a session with its repaired messages, and with its stored state if that belongs to exactly these messages."""
    transcript, repairs = repair_transcript(messages)
    session = attrs.evolve(session, messages=transcript, repairs=repairs)
    if not isinstance(stored, dict) or repairs or stored.get("state") is None:
        return session
    if stored.get("messages") != len(transcript) or stored.get("digest") != _hash_lines(_encode_messages(transcript)):
        return session  # the state of another, incomplete save: only the messages are valid
    try:
        state: AgentState = _require_type(codec.from_json(stored["state"]), AgentState)
    except (KeyError, TypeError, StepEngineError) as error:
        msg = f"{where} contains a state that cannot be read: {error}"
        raise SessionError(msg) from None
    view = state.view if stored.get("has_view") else transcript
    return attrs.evolve(session, state=attrs.evolve(state, message_history=transcript, view=view))


# --- in files -------------------------------------------------------------------------------------------------------


def make_folder_name(session_id: str) -> str:
    """
    Return a folder name for a session id, different for each id, also on case-insensitive file systems.

    All characters except ``a-z``, ``0-9``, ``_`` and ``-`` are percent-encoded; after 100 bytes a digest replaces the rest.
    """
    encoded = "".join(chr(b) if b in PLAIN else f"%{b:02x}" for b in require_session_id(session_id).encode())
    if len(encoded) <= MAX_NAME_BYTES:
        return encoded
    return f"{encoded[: MAX_NAME_BYTES - 66]}.{hashlib.sha256(session_id.encode()).hexdigest()}"


class FileSessions(Store):
    """
    Sessions in a folder: ``<id>/metadata.json`` and ``<id>/history.jsonl``, one message per line.

    New messages are appended to a history; it is rewritten only if older messages changed. An interrupted save leaves the session
    unchanged: the state and a rewritten history are first saved with the number of their version in the file name, and are valid with
    ``metadata.json``, which is written last. Folders are accessible only to their owner.

    Args:
        root: The folder; created if missing.
        clock: Returns the time of a save.

    Raises:
        SessionError: if *root* cannot be created.
    """

    def __init__(self, root: str | os.PathLike[str], *, clock: Clock = _utc_now) -> None:
        super().__init__(clock=clock)
        self.root = to_path(root, "FileSessions(root)")
        with _convert_os_errors(self.root):
            create_folder_durably(self.root, OWNER_FOLDER_MODE)

    def __repr__(self) -> str:
        return f"FileSessions({str(self.root)!r})"

    def folder(self, session_id: str) -> Path:
        """Return the path of a session's folder; it may not exist."""
        return self.root / make_folder_name(session_id)

    @override
    def load(self, session_id: str) -> Session:
        """Return a session, read under its lock; a new one of version 0 for an unknown id."""
        folder = self.folder(session_id)
        if not folder.is_dir():
            return Session(info=SessionInfo(session_id=session_id))
        with self._lock(folder):
            return self._read_session(session_id, folder)

    def _read_session(self, session_id: str, folder: Path) -> Session:
        """Return a session from its files in *folder*; an empty one if there are none."""
        described = _read_json(folder / METADATA)
        session = Session(info=SessionInfo(session_id=session_id))
        if described is not None:
            session = _session_from_metadata(described, session_id, str(folder / METADATA))
        history, state = (_get_valid_path(folder / name, session.version) for name in (HISTORY, STATE))
        lines = self._read_history(folder, session.version).splitlines()
        messages = _parse_messages(lines, str(history))
        return _add_messages_and_state(session, messages, _read_json(state), str(state))

    def _read_history(self, folder: Path, version: int) -> bytes:
        """Return the complete lines of the history of *version*, without those that an interrupted later save appended."""
        content = _read_file(_get_valid_path(folder / HISTORY, version)) or b""
        interrupted = _read_json(_make_versioned_path(folder / STATE, version + 1))
        if isinstance(interrupted, dict) and type(interrupted.get("kept")) is int:
            content = content[: interrupted["kept"]]
        return content[: content.rfind(b"\n") + 1]

    @override
    def save(self, session: Session) -> Session:
        """Store a session under its lock and return it with its new version; an interrupted save leaves the old version valid."""
        folder = self.folder(session.session_id)
        with _convert_os_errors(folder):
            create_folder_durably(folder, OWNER_FOLDER_MODE)
        with self._lock(folder):
            described = _read_json(folder / METADATA)
            stored = (
                0 if described is None else _session_from_metadata(described, session.session_id, str(folder)).version
            )
            made = self._make_next_version_or_conflict(session, stored)
            self._write_history_and_state(folder, made)
            described = json.dumps(_metadata_to_json(made), indent=2, ensure_ascii=False).encode()
            replace_path(folder / METADATA, described, mode=OWNER_FILE_MODE)
            _rename_versioned_files(folder, made.version)
            return made

    @override
    def get_journal_location(self, session_id: str) -> JournalLocation:
        """Return the folder for the session's journals; it may not exist."""
        return JournalLocation(folder=self.folder(session_id) / "turns")

    def _write_history_and_state(self, folder: Path, session: Session) -> None:
        """Write history and state of a new version; the stored version stays valid until the metadata is written."""
        version, whole = session.version, b"".join(_encode_messages(session.messages))
        _rename_versioned_files(folder, version - 1)
        kept = self._read_history(folder, version - 1)
        history, rewritten = folder / HISTORY, _make_versioned_path(folder / HISTORY, version)
        rewritten.unlink(missing_ok=True)  # it may be that of an interrupted save
        is_longer = history.exists() and whole.startswith(kept)
        if not is_longer:
            replace_path(rewritten, whole, mode=OWNER_FILE_MODE)
        # Before the history becomes longer: `kept` distinguishes the old lines from those of this save.
        state = {**(_state_to_json_without_history(session) or NO_STATE), "kept": len(kept)}
        replace_path(_make_versioned_path(folder / STATE, version), canonical(state).encode(), mode=OWNER_FILE_MODE)
        if is_longer:
            with history.open("r+b") as file:
                file.truncate(len(kept))
                file.seek(len(kept))
                file.write(whole[len(kept) :])
                file.flush()
                os.fsync(file.fileno())

    @override
    def list(self) -> list[SessionInfo]:
        """Return the data of all sessions, the last changed first; folders without metadata of a session are skipped."""
        found = []
        with _convert_os_errors(self.root):
            folders = sorted(self.root.iterdir())
        for folder in folders:
            data = _read_json(folder / METADATA) if folder.is_dir() else None
            if isinstance(data, dict) and isinstance(data.get("session_id"), str):
                found.append(_session_from_metadata(data, data["session_id"], str(folder / METADATA)).info)
        return _sort_newest_first(found)

    @override
    def delete(self, session_id: str) -> None:
        """Delete the files of a session and the journals of its runs; the empty folders stay."""
        folder = self.folder(session_id)
        if not folder.is_dir():
            return
        with self._lock(folder):
            # The metadata last: without them, a versioned file would be that of a later version.
            for pattern in reversed(OWN_FILES):
                for file in folder.glob(pattern):
                    file.unlink(missing_ok=True)
            for kind in ("*.jsonl", "*.jsonl.mail"):
                for file in (folder / "turns").glob(kind):
                    file.unlink(missing_ok=True)

    @override
    def get_cached(self, key: str) -> Any:
        """Return the value of a key; ``None`` if there is none or it has expired."""
        found = _read_json(self._get_cache_path(key))
        if not isinstance(found, dict) or found.get("key") != key or _is_expired(found.get("until"), self._clock()):
            return None
        return freeze(found.get("value"))

    @override
    def set_cached(self, key: str, value: object, ttl: float | None = None) -> None:
        """Store a JSON value in a file of its own, for *ttl* seconds or without a limit."""
        path = self._get_cache_path(key)
        kept = canonical({"key": key, "until": _make_expiry_time(ttl, self._clock()), "value": freeze(value)})
        with _convert_os_errors(path):
            path.parent.mkdir(mode=OWNER_FOLDER_MODE, exist_ok=True)
            CACHE_FILE.check(path)
            replace_path(path, kept.encode(), mode=OWNER_FILE_MODE)

    def _get_cache_path(self, key: str) -> Path:
        """Return the path of the file for a key, named by the hash of the key."""
        return self.root / ".cache" / f"{hashlib.sha256(key.encode()).hexdigest()}.json"

    @contextmanager
    def _lock(self, folder: Path) -> Iterator[None]:
        """Check the files of a session's folder, and hold its lock against other processes and threads; convert ``OSError``."""
        with _convert_os_errors(folder):
            _check_own_files(folder)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = os.open(folder / ".lock", flags, OWNER_FILE_MODE)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                yield
            finally:
                # Unlocked explicitly: a process that was forked meanwhile has the open file, too.
                fcntl.flock(descriptor, fcntl.LOCK_UN)
                os.close(descriptor)


METADATA, HISTORY, STATE = "metadata.json", "history.jsonl", "state.json"
NO_STATE = {"digest": "0" * 64, "has_view": False, "messages": 0, "state": None}
HISTORY_FILE = FileFormat("the history of a session", re.compile(rb'\{"type":"[a-z_]+_message",'), SessionError)
STATE_FILE = FileFormat("the state of a session", re.compile(rb'\{"digest":"[0-9a-f]{64}","has_view":'), SessionError)
OWN_FILES = {
    METADATA: FileFormat("the metadata of a session", re.compile(rb'\s*\{\s*"session_id"\s*:'), SessionError),
    HISTORY: HISTORY_FILE,
    "history.[0-9]*.jsonl": HISTORY_FILE,
    STATE: STATE_FILE,
    "state.[0-9]*.json": STATE_FILE,
}
"""The files of a session by patterns of their names in its folder, the metadata first."""
CACHE_FILE = FileFormat("a cached value", re.compile(rb'\{"key":"'), SessionError)


@contextmanager
def _convert_os_errors(path: Path) -> Iterator[None]:
    """In the block, convert an ``OSError`` to a ``SessionError`` that names *path*."""
    try:
        yield
    except OSError as error:
        msg = f"{str(path)!r} cannot be used for sessions: {describe_os_error(error)}"
        raise SessionError(msg) from error


def _check_own_files(folder: Path) -> None:
    """
    Raise ``SessionError`` unless the files of a session in *folder* are missing or in our format.

    After valid metadata no other file is checked: metadata are written last, and a history may be cut off at any byte.
    """
    for pattern, file_format in OWN_FILES.items():
        for path in folder.glob(pattern):
            # Files that are not regular are rejected when they are read. The first save of another process may rename one here.
            with suppress(FileNotFoundError):
                if path.is_file() and not path.is_symlink() and path.stat().st_size:
                    file_format.check(path)
                    if pattern == METADATA:
                        return


def _make_versioned_path(path: Path, version: int) -> Path:
    """Return the path for the file of one version, which is used until that version is valid."""
    return path.with_name(f"{path.stem}.{version}{path.suffix}")


def _get_valid_path(path: Path, version: int) -> Path:
    """Return the path of the valid file of *version*: the versioned path if it exists, after an interrupted save; else *path*."""
    versioned = _make_versioned_path(path, version)
    return versioned if versioned.exists() else path


def _rename_versioned_files(folder: Path, version: int) -> None:
    """Rename the history and state files of a *version* to their usual names."""
    for name in (HISTORY, STATE):
        versioned = _make_versioned_path(folder / name, version)
        if versioned.exists():
            versioned.replace(folder / name)


def _read_file(path: Path) -> bytes | None:
    """Return the bytes of a file, ``None`` if it is missing; raise ``SessionError`` for a link, a special or a too large file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        msg = f"{str(path)!r} cannot be read: {error.strerror}"
        raise SessionError(msg) from None
    try:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode) or info.st_size > MAX_FILE_BYTES:
            msg = f"{str(path)!r} is not a regular file of at most {MAX_FILE_BYTES:,} bytes"
            raise SessionError(msg)
        with open(descriptor, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(descriptor)


def _read_json(path: Path) -> object:
    """Return the value of a JSON file, ``None`` if it is missing; raise ``SessionError`` if it is invalid."""
    return _parse_json(_read_file(path), repr(str(path)))


# --- in SQLite ------------------------------------------------------------------------------------------------------

SCHEMA = """
CREATE TABLE IF NOT EXISTS sessions (id TEXT PRIMARY KEY, version INTEGER NOT NULL, updated TEXT, described TEXT NOT NULL, state TEXT);
CREATE TABLE IF NOT EXISTS messages (id TEXT NOT NULL, number INTEGER NOT NULL, line BLOB NOT NULL, PRIMARY KEY (id, number)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS cache (key TEXT PRIMARY KEY, until REAL, value TEXT NOT NULL);
"""


class SqliteSessions(Store):
    """
    Sessions in one SQLite file, for threads and processes of one machine.

    Args:
        path: The file; created with access only for its owner.
        clock: Returns the time of a save.

    Raises:
        SessionError: if it cannot be opened, or is not a database.
    """

    def __init__(self, path: str | os.PathLike[str], *, clock: Clock = _utc_now) -> None:
        super().__init__(clock=clock)
        self.path = to_path(path, "SqliteSessions(path)")
        self._status: os.stat_result | None = None
        with self._open_database() as database, database.lock:
            database.get_or_open_writer().executescript(SCHEMA)

    def __repr__(self) -> str:
        return f"SqliteSessions({str(self.path)!r})"

    @contextmanager
    def _open_database(self) -> Iterator[Database]:
        """Yield the database for one operation; errors of SQLite and the system become ``SessionError``."""
        import sqlite3

        try:
            # Created only once: if the file was deleted, an empty one would hide the loss of all sessions.
            if self._status is None:
                _create_private_file(self.path)
                self._status = self.path.lstat()
            database = Database.open(self.path, self._status, seconds=BUSY_SECONDS)
        except OSError as error:
            msg = f"{str(self.path)!r} cannot be opened: {describe_os_error(error)}"
            raise SessionError(msg) from None
        try:
            yield database
        except (OSError, sqlite3.Error) as error:
            msg = f"{str(self.path)!r}: {describe_database_error(error, BUSY_SECONDS)}"
            raise SessionError(msg) from error
        finally:
            database.close()

    @contextmanager
    def _read_transaction(self) -> Iterator[sqlite3.Connection]:
        """Yield a connection with a read transaction, which sees one state of the database."""
        with self._open_database() as database, database.read_connection() as connection:
            connection.execute("BEGIN")
            try:
                yield connection
            finally:
                connection.execute("ROLLBACK")

    @contextmanager
    def _write_transaction(self) -> Iterator[sqlite3.Connection]:
        """Yield a connection with a write transaction, under the lock of the database."""
        with self._open_database() as database, database.lock, database.write_transaction() as connection:
            yield connection

    @override
    def load(self, session_id: str) -> Session:
        """Return a session from one state of the database; a new one of version 0 for an unknown id."""
        require_session_id(session_id)
        with self._read_transaction() as database:
            row = database.execute("SELECT described, state FROM sessions WHERE id = ?", (session_id,)).fetchone()
            if row is None:
                return Session(info=SessionInfo(session_id=session_id))
            found = database.execute("SELECT line FROM messages WHERE id = ? ORDER BY number", (session_id,))
            lines = [bytes(line) for (line,) in found]
        where = f"{str(self.path)!r}, session {session_id!r}"
        session = _session_from_metadata(_parse_json(row[0], where), session_id, where)
        return _add_messages_and_state(session, _parse_messages(lines, where), _parse_json(row[1], where), where)

    @override
    def save(self, session: Session) -> Session:
        """Store a session and its changed messages in one transaction, and return it with its new version."""
        identity = session.session_id
        with self._write_transaction() as database:
            row = database.execute("SELECT version FROM sessions WHERE id = ?", (identity,)).fetchone()
            made = self._make_next_version_or_conflict(session, row[0] if row else 0)
            self._replace_changed_messages(database, identity, _encode_messages(made.messages))
            state = _state_to_json_without_history(made)
            database.execute(
                "REPLACE INTO sessions (id, version, updated, described, state) VALUES (?, ?, ?, ?, ?)",
                (
                    identity, made.version, _format_time(made.info.updated_at), canonical(_metadata_to_json(made)),
                    None if state is None else canonical(state),
                ),
            )  # fmt: skip
            return made

    def _replace_changed_messages(self, database: sqlite3.Connection, identity: str, lines: Sequence[bytes]) -> None:
        stored = database.execute("SELECT line FROM messages WHERE id = ? ORDER BY number", (identity,))
        same = 0
        for (line,) in stored:
            if same == len(lines) or bytes(line) != lines[same]:
                break
            same += 1
        database.execute("DELETE FROM messages WHERE id = ? AND number >= ?", (identity, same))
        rows = [(identity, number, line) for number, line in enumerate(lines[same:], start=same)]
        database.executemany("INSERT INTO messages (id, number, line) VALUES (?, ?, ?)", rows)

    @override
    def get_journal_location(self, session_id: str) -> JournalLocation:
        """Return the database for journals, which is a separate file, with a prefix for the session."""
        return JournalLocation(
            database=self._journals_path,
            prefix=f"s{hashlib.sha256(require_session_id(session_id).encode()).hexdigest()[:40]}-",
        )

    @property
    def _journals_path(self) -> Path:
        """The file of the runs' journals; it is separate, so a run commits there without waiting for saves of sessions."""
        return self.path.with_name(f"{self.path.stem}.turns{self.path.suffix}")

    @override
    def list(self) -> list[SessionInfo]:
        """Return the data of all sessions, the last changed first."""
        with self._read_transaction() as database:
            rows = database.execute("SELECT id, described FROM sessions").fetchall()
        where = repr(str(self.path))
        return _sort_newest_first(
            [_session_from_metadata(_parse_json(text, where), identity, where).info for identity, text in rows]
        )

    @override
    def delete(self, session_id: str) -> None:
        """Delete a session, and then the journals of its runs in their own database."""
        with self._write_transaction() as database:
            for table in ("sessions", "messages"):
                database.execute(f"DELETE FROM {table} WHERE id = ?", (session_id,))  # noqa: S608  (names of ours)
        _delete_journals(self.get_journal_location(session_id))

    @override
    def get_cached(self, key: str) -> Any:
        """Return the value of a key; ``None`` if there is none or it has expired."""
        with self._read_transaction() as database:
            row = database.execute("SELECT until, value FROM cache WHERE key = ?", (key,)).fetchone()
        if row is None or _is_expired(row[0], self._clock()):
            return None
        return freeze(_parse_json(row[1], f"{str(self.path)!r}, cache {key!r}"))

    @override
    def set_cached(self, key: str, value: object, ttl: float | None = None) -> None:
        """Store a JSON value, for *ttl* seconds or without a limit, and remove expired values."""
        now = self._clock()
        with self._write_transaction() as database:
            database.execute("DELETE FROM cache WHERE until <= ?", (now.timestamp(),))
            database.execute(
                "REPLACE INTO cache VALUES (?, ?, ?)", (key, _make_expiry_time(ttl, now), canonical(freeze(value)))
            )


# --- in documents of other stores -----------------------------------------------------------------------------------

SESSION, CACHE = "session/", "cache/"
"""Prefixes of the keys of documents."""


class DocumentSessions(Store):
    """
    Sessions in a store of texts by key, for example of another project. A subclass implements four methods.

    Methods raise ``OSError`` if the store cannot be used. They are called in several threads at once. A key is any text.

    Args:
        clock: Returns the time of a save.
    """

    @abstractmethod
    def read_document(self, key: str) -> str | None:
        """Return the stored text of a key; ``None`` if there is none."""

    @abstractmethod
    def write_document(self, key: str, text: str | None, replaces: str | None) -> bool:
        """
        Store *text* durably if the stored text equals *replaces*, and return True; else return False.

        ``None`` means no document: as *text* it deletes the document. The comparison and the write are atomic.
        """

    @abstractmethod
    def list_keys(self) -> Sequence[str]:
        """Return the keys of all documents."""

    @override
    def load(self, session_id: str) -> Session:
        """Return the session in its document; a new one of version 0 for an unknown id."""
        text = self._call_converting_os_errors(partial(self.read_document, SESSION + require_session_id(session_id)))
        return self._parse_session(session_id, text)

    @override
    def save(self, session: Session) -> Session:
        """Store a session and return it with its new version; raise ``SessionConflict`` if its document was changed meanwhile."""
        identity = session.session_id
        before = self._call_converting_os_errors(partial(self.read_document, SESSION + identity))
        made = self._make_next_version_or_conflict(session, self._parse_session(identity, before).version)
        document = {
            "session": _metadata_to_json(made), "messages": messages_to_json(made.messages), "state": _state_to_json_without_history(made),
        }  # fmt: skip
        if not self._call_converting_os_errors(
            partial(self.write_document, SESSION + identity, canonical(freeze(document)), before)
        ):
            msg = f"the session {identity!r} was saved by another writer at the same time. Load it again and continue from there"
            raise SessionConflict(msg)
        return made

    @override
    def list(self) -> list[SessionInfo]:
        """Load all sessions, and return their data, the last changed first."""
        keys = [key for key in self._call_converting_os_errors(self.list_keys) if key.startswith(SESSION)]
        return _sort_newest_first([self.load(key.removeprefix(SESSION)).info for key in keys])

    @override
    def delete(self, session_id: str) -> None:
        """Delete the document of a session, and then the journals of its runs."""
        self._replace_document(SESSION + session_id, None)
        _delete_journals(self.get_journal_location(session_id))

    @override
    def get_cached(self, key: str) -> Any:
        """Return the value of a key; ``None`` if there is none or it has expired."""
        found: Any = _parse_json(
            self._call_converting_os_errors(partial(self.read_document, CACHE + key)), f"the cached value of {key!r}"
        )
        return None if found is None or _is_expired(found["until"], self._clock()) else freeze(found["value"])

    @override
    def set_cached(self, key: str, value: object, ttl: float | None = None) -> None:
        """Store a JSON value in a document, for *ttl* seconds or without a limit."""
        cached = {"until": _make_expiry_time(ttl, self._clock()), "value": freeze(value)}
        self._replace_document(CACHE + key, canonical(freeze(cached)))

    def _replace_document(self, key: str, text: str | None) -> None:
        """Store *text*, or delete the document for ``None``, whatever is stored; raise ``SessionConflict`` after too many attempts."""
        for _ in range(MAX_ATTEMPTS):
            before = self._call_converting_os_errors(partial(self.read_document, key))
            if before == text or self._call_converting_os_errors(partial(self.write_document, key, text, before)):
                return
        msg = f"{key!r} could not be stored in {MAX_ATTEMPTS} attempts, because other writers changed it each time"
        raise SessionConflict(msg)

    def _parse_session(self, session_id: str, text: str | None) -> Session:
        """Return the session in the text of a document, a new session for ``None``; raise ``SessionError`` for an invalid text."""
        if text is None:
            return Session(info=SessionInfo(session_id=session_id))
        where = f"the document of the session {session_id!r}"
        stored: Any = _parse_json(text, where)
        if not isinstance(stored, dict) or not isinstance(stored.get("messages"), list):
            msg = f"{where} is not a stored session"
            raise SessionError(msg)
        session = _session_from_metadata(stored.get("session"), session_id, where)
        return _add_messages_and_state(session, messages_from_json(stored["messages"]), stored.get("state"), where)

    def _call_converting_os_errors(self, method: Callable[[], T]) -> T:
        """Call a method of the subclass and return its value; an ``OSError`` becomes ``SessionError``."""
        try:
            return method()
        except OSError as error:
            msg = f"{type(self).__name__} cannot be used: {describe_os_error(error)}"
            raise SessionError(msg) from error


def _delete_journals(location: JournalLocation) -> None:
    """Delete the journals of a session with their mailboxes, in memory, in a folder or in a database."""
    import sqlite3

    if location.memory is not None:
        location.memory.clear()
    if location.folder is not None:
        shutil.rmtree(location.folder, ignore_errors=True)
    if location.database is None or not location.database.exists():
        return
    database = Database.open(location.database, location.database.lstat(), seconds=BUSY_SECONDS)
    try:
        with database.lock, database.write_transaction() as connection:
            found = connection.execute(
                "SELECT name FROM sqlite_master WHERE type = 'table' AND name IN ('lines', 'letters')"
            )
            for (table,) in found.fetchall():
                connection.execute(
                    f"DELETE FROM {table} WHERE run >= ? AND run < ?",  # noqa: S608 - names of ours
                    (location.prefix, f"{location.prefix}~"),
                )
    except (OSError, sqlite3.Error) as error:
        msg = f"{str(location.database)!r}: {describe_database_error(error, BUSY_SECONDS)}"
        raise SessionError(msg) from error
    finally:
        database.close()


def _create_private_file(path: Path) -> None:
    """
    Create a file that only its owner can access, if it is missing; raise ``SessionError`` if the path is not a regular file.

    An existing file is not opened: closing its descriptor would release the locks that SQLite holds for other threads.
    """
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, OWNER_FILE_MODE))
    except FileExistsError:
        if not stat.S_ISREG(path.lstat().st_mode):
            msg = f"{str(path)!r} is not a regular file"
            raise SessionError(msg) from None


def _parse_json(text: str | bytes | None, where: str) -> object:
    """Return the value of a JSON text, ``None`` for ``None``; raise ``SessionError`` for invalid JSON."""
    if text is None:
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        msg = f"{where} is not JSON: {error}"
        raise SessionError(msg) from None
