"""
The mailbox of a journal: messages to its run from other processes.

A journal belongs to one process while its run lives. Any other process or thread can send the run a message here, and the holder
reads it. Messages are only ever appended, and a sent message is as durable as its journal.

A mailbox message is stored with the id of the run that its journal held when it was sent: one that nobody read before the journal
was removed never reaches another run that takes its name.
"""

from __future__ import annotations

import abc
import contextlib
import errno
import os
import re
import secrets
import stat
import string
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, get_args

import attrs
from attrs import frozen

from stepengine.data.codec import decode_stored
from stepengine.data.json import JsonValue, freeze
from stepengine.data.questions import Answer
from stepengine.data.visible import cut_after
from stepengine.data.waits import MESSAGE_ID_BYTES
from stepengine.data.yields import LAST_YEAR
from stepengine.errors import (
    DataError,
    InputError,
    JournalCorrupt,
    JournalError,
    JournalLocked,
    JournalMissing,
    JournalWriteFailed,
    StepEngineError,
)
from stepengine.journal.journal_files import (
    CAREFULLY,
    NO_LINK,
    REOPENED,
    lock_file,
    make_private,
    unlock_and_close,
)
from stepengine.journal.line_reader import parse_members
from stepengine.journal.records import UNREADABLE, Head, check_address, encode_line, to_compact_json, verify_checksum
from stepengine.redaction import Redactor
from stepengine.workspace.after_fork import Lock
from stepengine.workspace.atomic import sync_folder
from stepengine.workspace.calls import OTHERS_WRITE_BITS, OWNER_FILE_MODE
from stepengine.workspace.file_formats import FileFormat
from stepengine.workspace.open_files import describe_os_error

MailboxMessageKind: TypeAlias = Literal["message", "answer", "cancel", "input", "result"]

KINDS = frozenset(get_args(MailboxMessageKind))
MAIL = ".mail"
"""What is put behind the name of a journal's file to get that of its mailbox."""
MAILBOX_FILE = FileFormat("a mailbox", re.compile(rb'\{"run":"'), JournalCorrupt)
# Bounds, because everybody who may post is able to fill the disk and the memory of whoever holds the run: a reader
# reads all that is new at once, and a sender all of the file to look for its id.
MAX_LETTERS = 10_000
MAX_MAILBOX_BYTES = 64 * 1024 * 1024
"""A reader may hold all of it in memory; ten thousand messages of 6 KB fit."""
MAX_VALUE_BYTES = 1024 * 1024
"""A page of text or a large form fits; files are passed by their path. It is also far below what one step may record."""
MAX_LETTER_BYTES = 2 * MAX_VALUE_BYTES
"""Twice the longest value: placeholders of redacted secrets and the rest of the message make it longer."""
MAX_NAME_CHARS = 200
"""Room for a UUID or a digest with a prefix; a longer name is data in the wrong place."""
MAX_PATH_CHARS = 1_000
"""A run that is nested a hundred levels deep has a shorter path; a longer one only costs time to parse."""
MAX_CALL_DIGITS = 15
"""More calls than any run makes, and below 2**53, so that each program reads the number exactly."""
TOPIC = frozenset(string.ascii_letters + string.digits + "_-.:/")
LOCK_SECONDS = 5.0
"""A write holds the lock for milliseconds; five seconds without progress mean a stopped process, and a person still waits that long."""
LOCK_PAUSE_SECONDS = 0.001
"""About the time of one write: shorter pauses only burn CPU time, longer ones make many senders slow."""


def _freeze_value(value: Any) -> Any:
    """Return a JSON value as immutable; raise ``InputError`` for anything else."""
    try:
        return freeze(value)
    except DataError as error:
        msg = f"the value of a mailbox message must be JSON: {error}"
        raise InputError(msg) from error


@frozen(kw_only=True)
class MailboxMessage:
    """
    A message to a run from another process.

    Attributes:
        kind: ``"message"`` for a receiver on a topic, ``"answer"`` to a question, ``"cancel"`` to end the run, ``"input"``
            for a text that the next model call sees, ``"result"`` for the result of a deferred tool call.
        value: JSON of at most 1 MiB. For a message and a result any JSON; for an answer a bool, a text, or the stored form of an
            ``Answer``; for a cancel the reason; for an input the text.
        id: 1 to 200 printable characters, unique in the mailbox. A sender that is unsure whether a message arrived sends it again
            with the same id. Random by default.
        path: The path of the receiving run in the tree, such as ``"3.2"``; ``""`` (default) for the root.
        topic: For a message 1 to 200 ASCII letters, digits and ``_ - . : /``; for an answer the question's id; for a result the
            number of the call among the effects of its run, such as ``"3"``; else empty.
        sent: The time of sending, stored in UTC; now by default.

    Raises:
        InputError: for invalid values.
    """

    kind: MailboxMessageKind
    value: JsonValue = attrs.field(default=None, converter=_freeze_value)
    id: str = attrs.field(factory=partial(secrets.token_hex, MESSAGE_ID_BYTES))
    path: str = ""
    topic: str = ""
    sent: datetime = attrs.field(factory=partial(datetime.now, UTC))

    def __attrs_post_init__(self) -> None:
        problem = _find_message_problem(self)
        if problem:
            raise InputError(problem)
        object.__setattr__(self, "sent", self.sent.astimezone(UTC))

    @property
    def content(self) -> tuple[object, ...]:
        """The members in which two mailbox messages with one id must agree."""
        return self.kind, self.path, self.topic, to_compact_json(self.value)


def _find_message_problem(message: Any) -> str:
    """Return the reason why a mailbox message is invalid, or ``""``."""
    if not isinstance(message.kind, str) or message.kind not in KINDS:
        return f"the kind of a mailbox message must be one of {', '.join(get_args(MailboxMessageKind))}, not {_shorten_value(message.kind)}"
    if not _is_valid_name(message.id):
        return f"the id of a mailbox message must be 1 to {MAX_NAME_CHARS} printable characters, not {_shorten_value(message.id)}"
    try:
        is_path = isinstance(message.path, str) and len(message.path) <= MAX_PATH_CHARS
        check_address(message.path if is_path else "?", 0)
    except ValueError:
        return f'the path of a mailbox message must be the path of a run, such as "" or "3.2", not {_shorten_value(message.path)}'
    sent = message.sent
    # What is near the ends of the calendar cannot be told in another time zone.
    if not isinstance(sent, datetime) or sent.tzinfo is None or not 1 < sent.year < LAST_YEAR:
        return f"the time of a mailbox message must be a datetime with a time zone, not {_shorten_value(sent)}"
    return _find_topic_problem(message) or _find_value_problem(message)


def _find_topic_problem(message: Any) -> str:
    topic, given = message.topic, _shorten_value(message.topic)
    if message.kind == "message":
        if not isinstance(topic, str) or not 1 <= len(topic) <= MAX_NAME_CHARS or not TOPIC.issuperset(topic):
            return f"a topic must be 1 to {MAX_NAME_CHARS} ASCII letters, digits and _ - . : /, not {given}"
    elif message.kind == "answer":
        if not _is_valid_name(topic):
            return f"the topic of an answer must be the id of its question, 1 to {MAX_NAME_CHARS} printable characters, not {given}"
    elif message.kind == "result":
        if not isinstance(topic, str) or not topic.isascii() or not topic.isdecimal() or len(topic) > MAX_CALL_DIGITS:
            return f"the topic of a result must be the number of its call, such as '3', not {given}"
    elif topic != "":
        return f"a mailbox message of the kind {message.kind!r} must have no topic, not {given}"
    return ""


def _find_value_problem(message: MailboxMessage) -> str:
    value: Any = message.value
    # An answer is restored here as the run will restore it: what is no answer would else stop the run of somebody else,
    # later, and the sender that could mend it would be told that all was well.
    if message.kind == "answer" and not isinstance(value, bool | str):
        try:
            is_answer = isinstance(decode_stored(value), Answer)
        except (StepEngineError, *UNREADABLE):
            is_answer = False
        if not is_answer:
            return f"an answer must be a bool, a text or the stored form of an Answer, not {_shorten_value(value)}"
    if message.kind in ("cancel", "input") and not isinstance(value, str):
        return (
            f"the value of a mailbox message of the kind {message.kind!r} must be a text, not {_shorten_value(value)}"
        )
    size = len(to_compact_json(value).encode())
    if size > MAX_VALUE_BYTES:
        return (
            f"the value of a mailbox message may have at most {MAX_VALUE_BYTES:,} bytes as JSON; this one has {size:,}"
        )
    return ""


def _is_valid_name(text: object) -> bool:
    return isinstance(text, str) and 1 <= len(text) <= MAX_NAME_CHARS and text.isprintable()


def _shorten_value(value: object) -> str:
    """Return the start of a text, or the type of another value, for an error message."""
    text = repr(value[: MAX_NAME_CHARS + 1] if isinstance(value, str) else type(value).__name__)
    return cut_after(text, MAX_NAME_CHARS)


# --- what is stored -------------------------------------------------------------------------------------------------


class StoredMessage(NamedTuple):
    """A redacted mailbox message and the run it is for, as a mailbox stores it."""

    run: str
    message: MailboxMessage

    @property
    def line(self) -> bytes:
        """The mailbox message as a line with its newline."""
        mailbox_message = self.message
        members = {
            "run": self.run, "id": mailbox_message.id, "kind": mailbox_message.kind, "path": mailbox_message.path, "topic": mailbox_message.topic,
            "value": mailbox_message.value, "sent": mailbox_message.sent.isoformat(),
        }  # fmt: skip
        return encode_line(members, 0)[0]

    @property
    def line_prefix(self) -> bytes:
        """The start of the line, the same for all mailbox messages with this id."""
        # `run` and `id` are the first members of a line, so that a sender which looks for its id compares bytes and
        # reads no JSON: 10,000 mailbox messages are looked through for each one that is posted.
        return to_compact_json({"run": self.run, "id": self.message.id})[:-1].encode() + b","

    @classmethod
    def parse(cls, line: bytes, where: object) -> StoredMessage | None:
        """
        Parse a line without its newline; return ``None`` for a kind of mailbox message that this version does not know.

        Raises:
            JournalCorrupt: when the line is not a mailbox message; the error starts with ``str(where)``.
        """
        if len(line) >= MAX_LETTER_BYTES or verify_checksum(line, 0) is None:
            msg = f"{where} is damaged: its checksum is wrong"
            raise JournalCorrupt(msg)
        members: Mapping[str, Any] = parse_members(line, where)
        try:
            if isinstance(members["kind"], str) and members["kind"] not in KINDS:
                return None
            names = [field.name for field in attrs.fields(MailboxMessage)]
            given = {name: members[name] for name in names} | {"sent": datetime.fromisoformat(members["sent"])}
            if not isinstance(members["run"], str):
                msg = "the id of its run should be a text"
                raise TypeError(msg)
            return cls(members["run"], MailboxMessage(**given))
        except (StepEngineError, *UNREADABLE) as error:
            msg = f"{where} is not a mailbox message: {type(error).__name__}: {error}"
            raise JournalCorrupt(msg) from error


class MailboxOwner(Protocol):
    """The methods of a journal that its mailbox needs."""

    redactor: Redactor

    @property
    def name(self) -> str:
        """The journal's name for messages."""

    def head(self) -> Head | None:
        """Return the first record."""

    def make_missing_error(self) -> JournalMissing:
        """Return the error for a missing run."""


class Mailbox(abc.ABC):
    """
    The mailbox messages to the run of a journal; see ``Journal.mailbox()``.

    All methods may be called in any process and thread. They block for the disk, so do not call them in an event loop.

    Args:
        journal: The journal of the receiving run.
    """

    def __init__(self, journal: MailboxOwner) -> None:
        self._journal = journal

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._journal.name}>"

    @property
    def name(self) -> str:
        """The mailbox's name for messages."""
        return f"the mailbox of {self._journal.name}"

    def send(self, mailbox_message: MailboxMessage) -> bool:
        """
        Store a mailbox message durably, redacted by the journal's rules; return whether it is new.

        Returns:
            True if the message was added, False if it is stored already.

        Raises:
            InputError: when another mailbox message has this id; when its id or topic contains a secret.
            SecretFound: as in recording.
            JournalMissing: when the journal holds no run.
            JournalLocked: when a sender in another process has locked the mailbox and makes no progress.
            JournalCorrupt: when the journal has no valid head.
            JournalWriteFailed: when the mailbox is full (10,000 mailbox messages or 64 MiB), or cannot be written.
            JournalError: when another user could have written the mailbox.
        """
        return self.send_all([mailbox_message])

    def send_all(self, mailbox_messages: Iterable[MailboxMessage]) -> bool:
        """
        Store mailbox messages with different ids, all or none of them; return True if at least one is new. Raises as ``send``.
        """
        run = self._read_run_id()
        return self._add_messages(
            [StoredMessage(run, self._redact_message(mailbox_message)) for mailbox_message in mailbox_messages]
        )

    @abc.abstractmethod
    def read(self, after: int = 0) -> tuple[list[MailboxMessage], int]:
        """
        Return the messages after a position, in order of arrival, and the new position.

        Only new messages are read. A message is returned at least once. After a power cut, one that was not yet on the disk may be returned
        again at another position, so compare the ids. Messages of unknown kinds are left out.

        Args:
            after: A position that an earlier call returned; 0 is the start.

        Raises:
            JournalCorrupt: when a mailbox message that is not the last one is damaged; the error names the message.
            JournalError: when the mailbox cannot be read, or another user could have written it.
        """

    @abc.abstractmethod
    def may_have_messages(self, after: int) -> bool:
        """Return whether there may be mailbox messages after a position; a cheap check."""

    @abc.abstractmethod
    def _add_messages(self, messages: Sequence[StoredMessage]) -> bool:
        """Store the messages that are not stored yet, all or none of them; return whether there are any."""

    def _read_run_id(self) -> str:
        """Return the id of the run in the journal now; raise if there is none."""
        # Looked up at each use and not kept: a journal may be removed and another run begin under its name while a
        # sender keeps its mailbox, and a mailbox message never reaches that run.
        head = self._journal.head()
        if head is None:
            raise self._journal.make_missing_error()
        return head.run

    def _redact_message(self, mailbox_message: MailboxMessage) -> MailboxMessage:
        """Return a mailbox message with its value redacted by the journal's rules; raise if its id or topic holds a secret."""
        redactor = self._journal.redactor
        # Nothing is taken out of an id or a topic: the message would be found under another name than its sender knows,
        # and posted a second time.
        for what, text in (("id", mailbox_message.id), ("topic", mailbox_message.topic)):
            if redactor.may_contain_secret(text) and redactor.text(text) != text:
                msg = f"the {what} of a mailbox message contains a secret and would be stored in plain text, so nothing was sent"
                raise InputError(msg)
        text = to_compact_json(mailbox_message.value)
        if not redactor.may_contain_secret(text):
            return mailbox_message
        value = redactor.redact_keeping_machine_details(mailbox_message.value)
        if redactor.shapes:
            redactor.check_no_secrets(value, "the message")
        return attrs.evolve(mailbox_message, value=value)

    def _refuse_changed_duplicate(self, stored: StoredMessage, duplicate: StoredMessage | None) -> None:
        """Raise unless *duplicate*, the message with the same id, has the same content as *stored*."""
        # The time at which it was sent may differ: whoever posts again because it did not hear of the first time does
        # so later.
        if duplicate is None or duplicate.message.content != stored.message.content:
            msg = f"{self.name} has another mailbox message with the id {stored.message.id!r}; give every message its own id"
            raise InputError(msg)

    def _require_within_limits(self, total_count: int, total_size: int) -> None:
        """Raise ``JournalWriteFailed`` if a mailbox with *total_count* messages and *total_size* bytes exceeds a limit."""
        if total_count > MAX_LETTERS or total_size > MAX_MAILBOX_BYTES:
            msg = f"{self.name} is full: it holds at most {MAX_LETTERS:,} mailbox messages and {MAX_MAILBOX_BYTES:,} bytes; nothing was sent"
            raise JournalWriteFailed(msg)


# --- in memory ------------------------------------------------------------------------------------------------------


class MemoryMailbox(Mailbox):
    """The mailbox of a journal in memory. A position is a number of messages."""

    def __init__(self, journal: MailboxOwner) -> None:
        super().__init__(journal)
        self._letters: list[StoredMessage] = []
        self._known: dict[tuple[str, str], StoredMessage] = {}
        self._size = 0
        self._lock = Lock()

    def read(self, after: int = 0) -> tuple[list[MailboxMessage], int]:
        """Return the messages after a position, and the new position."""
        head = self._journal.head()
        with self._lock:
            new = self._letters[max(after, 0) :]
            place = len(self._letters)
        return [each.message for each in new if head is not None and each.run == head.run], place

    def may_have_messages(self, after: int) -> bool:
        """Return whether there are mailbox messages after a position."""
        return len(self._letters) > after

    def _add_messages(self, messages: Sequence[StoredMessage]) -> bool:
        with self._lock:
            new = {(stored.run, stored.message.id): stored for stored in messages}
            for key in new.keys() & self._known.keys():
                self._refuse_changed_duplicate(new.pop(key), self._known[key])
            size = sum([len(stored.line) for stored in new.values()])
            if new:
                self._require_within_limits(len(self._letters) + len(new), self._size + size)
            self._letters += new.values()
            self._known |= new
            self._size += size
        return bool(new)


# --- in stored bytes --------------------------------------------------------------------------------------------------


class MailboxStore(Protocol):
    """The methods of a ``LineJournal`` that a mailbox in stored bytes needs."""

    @property
    def name(self) -> str:
        """The store's name for messages."""

    def read_bytes(self, start: int) -> bytes:
        """Return the bytes from an offset on."""

    def append_bytes(self, data: bytes, at: int) -> None:
        """Append bytes at the end, which is *at*."""

    def truncate_bytes(self, size: int) -> None:
        """Keep the first *size* bytes only."""

    def lock(self) -> Callable[[], None]:
        """Lock the store for one sender and return the function that unlocks it."""


class _LinePosition(NamedTuple):
    """The position of a line in a mailbox, formatted on demand."""

    store: MailboxStore
    start: int

    # The number of a line is counted when somebody reads the message: to know it, all that stands before has to be
    # read, and a reader begins where it stopped.
    def __str__(self) -> str:
        number = self.store.read_bytes(0).count(b"\n", 0, self.start) + 1
        return f"line {number} (byte {self.start}) of {self.store.name}"


class StoreMailbox(Mailbox):
    """
    A mailbox of lines in stored bytes. A position is a number of bytes.

    An incomplete line of a killed sender is not a mailbox message; the next sender removes it.

    Args:
        journal: The journal of the receiving run.
        store: The store of the mailbox, separate from that of the journal.
    """

    def __init__(self, journal: MailboxOwner, store: MailboxStore) -> None:
        super().__init__(journal)
        self._store = store

    def read(self, after: int = 0) -> tuple[list[MailboxMessage], int]:
        """Return the messages after a position, and the new position; all mailbox messages if the store is shorter or new."""
        data, start = self._read_after(max(after, 0))
        if not data:
            return [], start
        run, mailbox_messages, last = self._read_run_id(), [], start + len(data)
        for line in BytesIO(data):
            end = start + len(line)
            # The last line may be one that somebody writes now, or was killed over: it is left for the next look, also
            # when its newline is there and its checksum is wrong, since the pages of a file may reach the disk in any
            # order. A wrong line with another one behind it is damage.
            if not line.endswith(b"\n") or (end == last and verify_checksum(line[:-1], 0) is None):
                break
            stored = StoredMessage.parse(line[:-1], _LinePosition(self._store, start))
            if stored is not None and stored.run == run:
                mailbox_messages.append(stored.message)
            start = end
        return mailbox_messages, start

    def may_have_messages(self, after: int) -> bool:
        """Return whether there are mailbox messages after a position."""
        return bool(self._read_from_store(after))

    def _read_after(self, after: int) -> tuple[bytes, int]:
        """Return the bytes after a position and their start offset; all bytes and 0 if no message ends at the position."""
        data = self._read_from_store(max(after - 1, 0))
        if not after:
            return data, 0
        # A place that does not stand behind a newline is of another mailbox, which was removed with its journal; all
        # is read then. That gives mailbox messages again in the worst case, and whoever takes them knows them by their ids.
        return (data[1:], after) if data.startswith(b"\n") else (self._read_from_store(0), 0)

    def _add_messages(self, messages: Sequence[StoredMessage]) -> bool:
        unlock = self._lock_store()
        try:
            head = self._journal.head()
            if head is None or any(head.run != stored.run for stored in messages):
                raise self._journal.make_missing_error()
            lines, end = self._repair_and_find_new_lines(messages)
            if lines:
                self._store.append_bytes(lines, end)
        except OSError as error:
            raise self._make_unusable_error(error) from error
        finally:
            unlock()
        return bool(lines)

    def _repair_and_find_new_lines(self, messages: Sequence[StoredMessage]) -> tuple[bytes, int]:
        """
        Return the lines of the messages that are not stored yet and the offset to append them at; remove torn bytes after it.

        Raises:
            InputError: when a stored message with the same id has other content.
            JournalWriteFailed: when the mailbox is full.
        """
        content, new = self._read_from_store(0), {stored.line_prefix: stored for stored in messages}
        keys = tuple(new)
        end = count = 0
        last = b""
        for line in BytesIO(content):
            if line.endswith(b"\n"):
                if line.startswith(keys) and verify_checksum(line[:-1], 0) is not None:
                    key = next(one for one in keys if line.startswith(one))
                    self._refuse_changed_duplicate(new.pop(key), StoredMessage.parse(line[:-1], "it"))
                    if not new:
                        return b"", 0
                end, count, last = end + len(line), count + 1, line
        # What a killed sender left at the end is removed before anything is written behind it. Behind a line without
        # its newline the next mailbox message would be the end of that line, and both would be lost.
        if end == len(content) and last and verify_checksum(last[:-1], 0) is None:
            end, count = end - len(last), count - 1
        if end < len(content):
            self._store.truncate_bytes(end)
        lines = b"".join([stored.line for stored in new.values()])
        self._require_within_limits(count + len(new), end + len(lines))
        return lines, end

    def _lock_store(self) -> Callable[[], None]:
        """Lock the store, waiting at most five seconds for another sender, and return the function that unlocks it."""
        until = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                return self._store.lock()
            except JournalLocked:
                if time.monotonic() > until:
                    raise
                time.sleep(LOCK_PAUSE_SECONDS)
            except OSError as error:
                raise self._make_unusable_error(error) from error

    def _read_from_store(self, start: int) -> bytes:
        try:
            return self._store.read_bytes(start)
        except OSError as error:
            raise self._make_unusable_error(error) from error

    def _make_unusable_error(self, error: OSError) -> JournalWriteFailed:
        return JournalWriteFailed(f"{self._store.name} cannot be used as a mailbox: {describe_os_error(error)}")


# --- in a file ------------------------------------------------------------------------------------------------------


def mailbox_path(path: Path) -> Path:
    """Return the path of a journal file's mailbox."""
    return path.with_name(path.name + MAIL)


class FileMailbox(StoreMailbox):
    """
    A mailbox in a file next to the journal's: ``run.jsonl.mail``.

    Args:
        journal: The journal.
        path: The journal's file.
        sync: Makes an open file durable; ``None`` if the content only has to survive the end of the process.
        unsafe_no_lock: Continue without a lock if the file system has none.
    """

    def __init__(
        self, journal: MailboxOwner, path: Path, *, sync: Callable[[int], None] | None, unsafe_no_lock: bool
    ) -> None:
        super().__init__(journal, _MailboxFile(journal, path, sync, unsafe_no_lock=unsafe_no_lock))
        self._path = mailbox_path(path)

    def may_have_messages(self, after: int) -> bool:
        """Return whether the file's length differs from the position."""
        try:
            size = os.stat(self._path, follow_symlinks=False).st_size  # noqa: PTH116 - a path object takes its time
        except OSError:
            return False
        # Another length and not a greater one: a file that was made anew under the name may be shorter. What is empty
        # holds nothing.
        return size not in (0, after)


class _MailboxFile:
    """The file of a mailbox. It is trusted only if its writers could also write the journal."""

    def __init__(
        self, journal: MailboxOwner, path: Path, sync: Callable[[int], None] | None, *, unsafe_no_lock: bool
    ) -> None:
        self._journal = journal
        self._of = path
        self._path = mailbox_path(path)
        self._sync = sync
        self._unsafe_no_lock = unsafe_no_lock
        # The file that a sender has locked, in its thread: where there are no locks, several threads have one.
        self._locked = threading.local()

    @property
    def name(self) -> str:
        return str(self._path)

    def read_bytes(self, start: int) -> bytes:
        """Return the bytes from *start* on, none of a missing file; raise for a file that is too long or not trusted."""
        descriptor = self._try_open(os.O_RDONLY)
        if descriptor is None:
            return b""
        try:
            self._require_trusted_file(descriptor)
            size = os.fstat(descriptor).st_size
            if size > MAX_MAILBOX_BYTES + MAX_LETTER_BYTES:
                msg = (
                    f"{self._path} has {size:,} bytes, and a mailbox may have at most {MAX_MAILBOX_BYTES:,}; remove it"
                )
                raise JournalCorrupt(msg)
            return os.pread(descriptor, size, start)
        finally:
            os.close(descriptor)

    def append_bytes(self, data: bytes, at: int) -> None:
        """Write *data* at the end, and sync it; cut the file at *at* if that fails."""
        descriptor = self._locked.descriptor
        try:
            # One `write` may take a part only, as when the disk becomes full or a signal comes.
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
            if self._sync is not None:
                self._sync(descriptor)
                # The name of a new file is in its folder, which has to be on the disk, too; once, since the name stays.
                if not at:
                    sync_folder(self._path.parent)
        except OSError:
            # It was not posted: nobody is to find it there later.
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, at)
            raise

    def truncate_bytes(self, size: int) -> None:
        """Cut the file to *size* bytes, and sync that."""
        os.ftruncate(self._locked.descriptor, size)
        # The cut is on the disk before the message is: after a power cut a file might else have its old length and
        # the new bytes in the midst of the old ones.
        if self._sync is not None:
            os.fsync(self._locked.descriptor)

    def lock(self) -> Callable[[], None]:
        """Open and lock the file; a missing one is created."""
        # The file may be removed with its journal between opening and locking it: the lock would be that of a file
        # without a name, and a mailbox message in it reach nobody. So it is looked at again under the lock, and begun anew when
        # it is another one.
        while True:
            descriptor = self._try_open(REOPENED)
            is_new = descriptor is None
            if descriptor is None:
                descriptor = self._try_open(REOPENED | os.O_CREAT | os.O_EXCL)
            if descriptor is None:
                continue  # somebody else was quicker
            try:
                if is_new:
                    self._copy_owner_of_journal(descriptor)
                self._lock_file(descriptor)
                if self._is_file_at_path(descriptor):
                    self._require_trusted_file(descriptor)
                    MAILBOX_FILE.check(self._path, descriptor)
                    make_private(self._path, descriptor)
                    self._locked.descriptor = descriptor
                    return partial(self._remove_if_empty_and_close, descriptor)
            except BaseException:
                unlock_and_close(descriptor)
                raise
            unlock_and_close(descriptor)

    def _remove_if_empty_and_close(self, descriptor: int) -> None:
        """Remove the file if it is empty, then unlock and close it."""
        # One that was made for nothing would else stand beside the next journal of that name.
        if not os.fstat(descriptor).st_size:
            self._path.unlink(missing_ok=True)
        unlock_and_close(descriptor)

    def _is_file_at_path(self, descriptor: int) -> bool:
        """Return whether an open file still has its name."""
        try:
            return os.path.samestat(os.fstat(descriptor), self._path.lstat())
        except FileNotFoundError:
            return False

    def _copy_owner_of_journal(self, descriptor: int) -> None:
        """Change the owner of a new file to that of the journal, if another user, such as an administrator, created it."""
        # Else an administrator who answers a question of somebody's run would leave a file that its holder does not
        # believe, since it belongs to another user.
        owner = self._of.stat()
        if os.name == "posix" and os.geteuid() != owner.st_uid:
            os.fchown(descriptor, owner.st_uid, owner.st_gid)

    def _lock_file(self, descriptor: int) -> None:
        """Lock the file; wait for other holders while they make progress."""
        try:
            import fcntl
        except ImportError:
            return lock_file(descriptor, self._path, unsafe_no_lock=self._unsafe_no_lock)
        # Patience is measured from the last mailbox message and not from the beginning: many senders at once are slow, and none
        # is stuck. A process that was stopped with the lock makes the file no longer, and five seconds later the error
        # names it.
        until, seen = 0.0, -1
        while True:
            try:
                return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                now, size = time.monotonic(), os.fstat(descriptor).st_size
                if size != seen:
                    until, seen = now + LOCK_SECONDS, size
                elif now >= until:
                    return lock_file(descriptor, self._path)
                # A lock that waits by itself (without LOCK_NB) cannot be given up after a time by a thread.
                time.sleep(LOCK_PAUSE_SECONDS)
            except OSError:
                return lock_file(descriptor, self._path, unsafe_no_lock=self._unsafe_no_lock)

    def _try_open(self, flags: int) -> int | None:
        """Return the open file; ``None`` if it is missing, or exists although it was to be created."""
        try:
            return os.open(self._path, flags | NO_LINK | CAREFULLY, OWNER_FILE_MODE)
        except FileExistsError:
            return None
        except FileNotFoundError:
            if flags & os.O_CREAT:  # its folder is missing, and so is the journal
                raise self._journal.make_missing_error() from None
            return None
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            # A link at the place of the mailbox would let whoever made it choose the file that is appended to.
            msg = f"{self._path} is a symbolic link; a mailbox must be a regular file next to its journal"
            raise JournalError(msg) from error

    def _require_trusted_file(self, descriptor: int) -> None:
        """Raise unless the open file is a regular file that only the journal's owner can write."""
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            msg = f"{self._path} is not a regular file; a mailbox must be one"
            raise JournalError(msg)
        if os.name != "posix":
            return
        try:
            # A mailbox message can allow a tool call. So whoever can write the mailbox can do what the run can: only who owns
            # the journal, and could write that as well, is believed.
            owner = self._of.stat().st_uid
        except FileNotFoundError:
            raise self._journal.make_missing_error() from None
        if status.st_uid != owner or status.st_mode & OTHERS_WRITE_BITS:
            whose = "has another owner than the journal" if status.st_uid != owner else "is writable by other users"
            msg = (
                f"{self._path} {whose}, so anyone may have sent the messages in it. Remove it, or make it private "
                "if you trust its messages"
            )
            raise JournalError(msg)
