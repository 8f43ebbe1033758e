"""
The mailbox beside a journal: letters to its run from whoever does not hold it.

A journal belongs to one process while its run lives. Whoever else has something for the run posts it here, from any process
and thread, and the holder reads it. Letters are only ever added, and one that was posted survives what its journal survives.

A letter is stored with the id of the run that its journal held when it was posted: one that nobody read before the journal
was removed never reaches another run that takes its name.
"""

from __future__ import annotations

import abc
import contextlib
import errno
import os
import secrets
import stat
import string
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, get_args

import attrs
from attrs import frozen

from stepengine.data.codec import restored
from stepengine.data.json import JsonValue, freeze
from stepengine.data.questions import Answer
from stepengine.data.yields import LAST_YEAR
from stepengine.errors import (
    DataError,
    InputError,
    JournalCorrupt,
    JournalError,
    JournalMissing,
    JournalWriteFailed,
    StepEngineError,
)
from stepengine.journal.places import (
    CAREFULLY,
    NO_LINK,
    REOPENED,
    close_locked,
    lock_file,
    make_private,
)
from stepengine.journal.reading import members_of
from stepengine.journal.records import UNREADABLE, Head, check_place, checksum_if_right, to_line, to_text
from stepengine.redaction import Redactor
from stepengine.workspace.after_fork import Lock
from stepengine.workspace.atomic import sync_folder
from stepengine.workspace.calls import OTHERS_WRITE_BITS, OWNER_FILE_MODE
from stepengine.workspace.open_files import said

__all__ = (
    "MAIL",
    "MAX_LETTERS",
    "MAX_LETTER_BYTES",
    "MAX_MAILBOX_BYTES",
    "MAX_VALUE_BYTES",
    "FileMailbox",
    "Letter",
    "LetterKind",
    "Mailbox",
    "MailboxOwner",
    "MemoryMailbox",
    "StoredLetter",
    "mailbox_of",
)

LetterKind: TypeAlias = Literal["message", "answer", "cancel", "input", "result"]

KINDS = frozenset(get_args(LetterKind))
MAIL = ".mail"
"""What is put behind the name of a journal's file to get that of its mailbox."""
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
    try:
        return freeze(value)
    except DataError as error:
        msg = f"the value of a letter is JSON: {error}"
        raise InputError(msg) from error


@frozen(kw_only=True)
class Letter:
    """
    Something for a run, from whoever does not hold it.

    Attributes:
        kind: ``"message"`` for whoever receives on a topic, ``"answer"`` to a question, ``"cancel"`` to end the run, ``"input"``
            for a text that its next model call sees, ``"result"`` for what came of a call of a deferred tool.
        value: JSON of at most 1 MiB. Of a message and a result anything; of an answer a bool, a text, or the stored form of an
            ``Answer``; of the others a text: the reason, or what is said.
        id: 1 to 200 printable characters, once in a mailbox: whoever is not sure that a letter arrived posts it again with the
            same id. Made up by default.
        path: Which run of the tree it is for, such as ``"3.2"``; ``""`` (default) for the root.
        topic: Of a message 1 to 200 ASCII letters, digits and ``_ - . : /``; of an answer the question's id; of a result the
            number of the call among the effects of its run, such as ``"3"``; else empty.
        sent: When; now by default. Kept in UTC.

    Raises:
        InputError: for anything else.
    """

    kind: LetterKind
    value: JsonValue = attrs.field(default=None, converter=_freeze_value)
    id: str = attrs.field(factory=partial(secrets.token_hex, 16))
    path: str = ""
    topic: str = ""
    sent: datetime = attrs.field(factory=partial(datetime.now, UTC))

    def __attrs_post_init__(self) -> None:
        problem = _problem(self)
        if problem:
            raise InputError(problem)
        object.__setattr__(self, "sent", self.sent.astimezone(UTC))

    @property
    def content(self) -> tuple[object, ...]:
        """What two letters with one id have to have in common."""
        return self.kind, self.path, self.topic, to_text(self.value)


def _problem(letter: Letter) -> str:
    """Return what is wrong with a letter, as a sentence; ``""`` for nothing."""
    if type(letter.kind) is not str or letter.kind not in KINDS:
        return f"a letter is one of {', '.join(get_args(LetterKind))}, not {_short(letter.kind)}"
    if not _is_name(letter.id):
        return f"the id of a letter has 1 to {MAX_NAME_CHARS} printable characters, which {_short(letter.id)} has not"
    try:
        is_path = type(letter.path) is str and len(letter.path) <= MAX_PATH_CHARS
        check_place(letter.path if is_path else "?", 0)
    except ValueError:
        return f'a letter goes to the path of a run, such as "" or "3.2", which {_short(letter.path)} is not'
    sent = letter.sent
    # What is near the ends of the calendar cannot be told in another time zone.
    if not isinstance(sent, datetime) or sent.tzinfo is None or not 1 < sent.year < LAST_YEAR:
        return f"a letter was sent at a time with its zone, not at {_short(sent)}"
    return _problem_of_topic(letter) or _problem_of_value(letter)


def _problem_of_topic(letter: Letter) -> str:
    topic, given = letter.topic, _short(letter.topic)
    if letter.kind == "message":
        if type(topic) is not str or not 1 <= len(topic) <= MAX_NAME_CHARS or not TOPIC.issuperset(topic):
            return f"a topic has 1 to {MAX_NAME_CHARS} ASCII letters, digits and _ - . : /, which {given} has not"
    elif letter.kind == "answer":
        if not _is_name(topic):
            return f"the topic of an answer is the id of its question, 1 to {MAX_NAME_CHARS} printable characters, not {given}"
    elif letter.kind == "result":
        if type(topic) is not str or not topic.isascii() or not topic.isdecimal() or len(topic) > MAX_CALL_DIGITS:
            return f"the topic of a result is the number of its call, such as '3', not {given}"
    elif topic != "":
        return f"a letter of the kind {letter.kind!r} has no topic, and {given} was given"
    return ""


def _problem_of_value(letter: Letter) -> str:
    value: Any = letter.value
    # An answer is restored here as the run will restore it: what is no answer would else stop the run of somebody else,
    # later, and the sender that could mend it would be told that all was well.
    if letter.kind == "answer" and not isinstance(value, bool | str):
        try:
            is_answer = type(restored(value)) is Answer
        except (StepEngineError, *UNREADABLE):
            is_answer = False
        if not is_answer:
            return f"an answer is a bool, a text or the stored form of an Answer, not {_short(value)}"
    if letter.kind in ("cancel", "input") and not isinstance(value, str):
        return f"the value of a letter of the kind {letter.kind!r} is a text, not {_short(value)}"
    size = len(to_text(value).encode())
    if size > MAX_VALUE_BYTES:
        return f"the value of a letter has at most {MAX_VALUE_BYTES:,} bytes as JSON, and this one has {size:,}"
    return ""


def _is_name(text: object) -> bool:
    return type(text) is str and 1 <= len(text) <= MAX_NAME_CHARS and text.isprintable()


def _short(value: object) -> str:
    """Return the beginning of a value, as a message shows it."""
    text = repr(value[: MAX_NAME_CHARS + 1] if isinstance(value, str) else type(value).__name__)
    return text if len(text) <= MAX_NAME_CHARS else f"{text[:MAX_NAME_CHARS]}..."


# --- what is stored -------------------------------------------------------------------------------------------------


class StoredLetter(NamedTuple):
    """A letter without secrets, and the run that it is for: what a mailbox stores."""

    run: str
    letter: Letter

    @property
    def line(self) -> bytes:
        """The line that holds it, with its newline."""
        letter = self.letter
        members = {
            "run": self.run, "id": letter.id, "kind": letter.kind, "path": letter.path, "topic": letter.topic,
            "value": letter.value, "sent": letter.sent.isoformat(),
        }  # fmt: skip
        return to_line(members, 0)[0]

    @property
    def key(self) -> bytes:
        """How its line begins, and that of no letter with another id."""
        # `run` and `id` are the first members of a line, so that a sender which looks for its id compares bytes and
        # reads no JSON: 10,000 letters are looked through for each one that is posted.
        return to_text({"run": self.run, "id": self.letter.id})[:-1].encode() + b","

    @classmethod
    def read(cls, line: bytes, where: object) -> StoredLetter | None:
        """
        Return what a line without its newline holds; ``None`` for a letter of a kind that this version does not know.

        Raises:
            JournalCorrupt: for what is not a letter; it begins with *where*, a text or what has one.
        """
        if len(line) >= MAX_LETTER_BYTES or checksum_if_right(line, 0) is None:
            msg = f"{where} is damaged: its checksum is wrong"
            raise JournalCorrupt(msg)
        members: Mapping[str, Any] = members_of(line, where)
        try:
            if type(members["kind"]) is str and members["kind"] not in KINDS:
                return None
            names = [field.name for field in attrs.fields(Letter)]
            given = {name: members[name] for name in names} | {"sent": datetime.fromisoformat(members["sent"])}
            if type(members["run"]) is not str:
                msg = "the id of its run should be a text"
                raise TypeError(msg)
            return cls(members["run"], Letter(**given))
        except (StepEngineError, *UNREADABLE) as error:
            msg = f"{where} is not a letter: {type(error).__name__}: {error}"
            raise JournalCorrupt(msg) from error


class MailboxOwner(Protocol):
    """A journal, as its mailbox knows it."""

    redactor: Redactor

    @property
    def name(self) -> str:
        """How the journal is called in messages."""

    def head(self) -> Head | None:
        """Return the first record."""

    def missing(self) -> JournalMissing:
        """Return the error for a run that is not there."""


class Mailbox(abc.ABC):
    """
    The letters to the run of a journal; ``Journal.mailbox()`` gives it.

    All of it may be done in any process and thread, and waits for the disk: not to be done in an event loop.

    Args:
        journal: Whose mailbox it is.
    """

    def __init__(self, journal: MailboxOwner) -> None:
        self._journal = journal

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._journal.name}>"

    @property
    def name(self) -> str:
        """How the mailbox is called in messages."""
        return f"the mailbox of {self._journal.name}"

    def post(self, letter: Letter) -> bool:
        """
        Add a letter, without what the journal's rules take out; it is as durable as a record when this returns.

        Returns:
            Whether it was added: ``False`` when it is there already.

        Raises:
            InputError: when another letter has this id; when its id or topic holds a secret.
            SecretFound: as recording does.
            JournalMissing: when the journal holds no run.
            JournalLocked: when a sender of another process holds the mailbox and does nothing.
            JournalCorrupt: when the journal does not begin as one.
            JournalWriteFailed: when the mailbox is full (10,000 letters or 64 MiB), or cannot be written.
            JournalError: when somebody else could have written the mailbox.
        """
        return self._add(StoredLetter(self._run(), self._redact(letter)))

    @abc.abstractmethod
    def read(self, after: int = 0) -> tuple[list[Letter], int]:
        """
        Return the letters behind a place, in the order in which they arrived, and the place behind them.

        Only what is new is read. A letter is given at least once: one that was read before its sender had it on the disk may come
        again at another place after a power cut, so whoever must not take it twice knows it by its id. Letters of kinds
        that this version does not know are left out.

        Args:
            after: A place that an earlier reading returned; 0 is the beginning.

        Raises:
            JournalCorrupt: when a letter that is not the last one is damaged; it says which.
            JournalError: when the mailbox cannot be read, or somebody else could have written it.
        """

    @abc.abstractmethod
    def changed(self, after: int) -> bool:
        """Return whether something may be behind a place, for little: one look at a file, or one look-up."""

    @abc.abstractmethod
    def _add(self, stored: StoredLetter) -> bool: ...

    def _run(self) -> str:
        # Looked up at each use and not kept: a journal may be removed and another run begin under its name while a
        # sender keeps its mailbox, and a letter never reaches that run.
        head = self._journal.head()
        if head is None:
            raise self._journal.missing()
        return head.run

    def _redact(self, letter: Letter) -> Letter:
        """Return a letter as its run may see it."""
        redactor = self._journal.redactor
        # Nothing is taken out of an id or a topic: the letter would be found under another name than its sender knows,
        # and posted a second time.
        for what, text in (("id", letter.id), ("topic", letter.topic)):
            if redactor.suspicious(text) and redactor.text(text) != text:
                msg = f"the {what} of a letter holds a secret; it is written as it is, so nothing was sent"
                raise InputError(msg)
        text = to_text(letter.value)
        if not redactor.suspicious(text):
            return letter
        value = redactor.seen(letter.value)
        if redactor.shapes:
            redactor.refuse(value, "the letter")
        return attrs.evolve(letter, value=value)

    def _check_same(self, stored: StoredLetter, known: StoredLetter | None) -> None:
        """Raise when *known*, which has the id of the letter that is to be added, is another one."""
        # The time at which it was sent may differ: whoever posts again because it did not hear of the first time does
        # so later.
        if known is None or known.letter.content != stored.letter.content:
            msg = (
                f"{self.name} has another letter with the id {stored.letter.id!r}; every letter needs an id of its own"
            )
            raise InputError(msg)

    def _check_room(self, letters: int, size: int) -> None:
        """Raise when so many letters and bytes, those to be added included, are too many."""
        if letters > MAX_LETTERS or size > MAX_MAILBOX_BYTES:
            msg = f"{self.name} is full: it takes {MAX_LETTERS:,} letters and {MAX_MAILBOX_BYTES:,} bytes; nothing was sent"
            raise JournalWriteFailed(msg)


# --- in memory ------------------------------------------------------------------------------------------------------


class MemoryMailbox(Mailbox):
    """The mailbox of a journal in memory. A place is a number of letters."""

    def __init__(self, journal: MailboxOwner) -> None:
        super().__init__(journal)
        self._letters: list[StoredLetter] = []
        self._known: dict[tuple[str, str], StoredLetter] = {}
        self._size = 0
        self._lock = Lock()

    def read(self, after: int = 0) -> tuple[list[Letter], int]:
        """Return the letters behind a place, and the place behind them."""
        head = self._journal.head()
        with self._lock:
            new = self._letters[max(after, 0) :]
            place = len(self._letters)
        return [each.letter for each in new if head is not None and each.run == head.run], place

    def changed(self, after: int) -> bool:
        """Return whether something is behind a place."""
        return len(self._letters) > after

    def _add(self, stored: StoredLetter) -> bool:
        key, size = (stored.run, stored.letter.id), len(stored.line)
        with self._lock:
            known = self._known.get(key)
            if known is not None:
                self._check_same(stored, known)
                return False
            self._check_room(len(self._letters) + 1, self._size + size)
            self._letters.append(stored)
            self._known[key] = stored
            self._size += size
        return True


# --- in a file ------------------------------------------------------------------------------------------------------


def mailbox_of(path: Path) -> Path:
    """Return where the mailbox of a journal's file is."""
    return path.with_name(path.name + MAIL)


class _MailboxLine(NamedTuple):
    """A line of a mailbox's file, in words once somebody needs them."""

    path: Path
    start: int

    # The number of a line is counted when somebody reads the message: to know it, all that stands before has to be
    # read, and a reader begins where it stopped.
    def __str__(self) -> str:
        with self.path.open("rb") as file:
            number = file.read(min(self.start, MAX_MAILBOX_BYTES)).count(b"\n") + 1
        return f"line {number} (byte {self.start}) of {self.path}"


class FileMailbox(Mailbox):
    """
    A mailbox in a file of lines beside a journal's file: ``run.jsonl.mail``. A place is a number of bytes.

    A line that was cut off when its sender was killed is not a letter, and the next sender removes it.

    Args:
        journal: The journal.
        path: The journal's file.
        sync: Makes an open file durable; ``None`` where the end of the process is all that has to be survived.
        unsafe_no_lock: Go on where the file system has no locks.
    """

    def __init__(
        self, journal: MailboxOwner, path: Path, *, sync: Callable[[int], None] | None, unsafe_no_lock: bool = False
    ) -> None:
        super().__init__(journal)
        self._of = path
        self._path = mailbox_of(path)
        self._sync = sync
        self._unsafe_no_lock = unsafe_no_lock

    def read(self, after: int = 0) -> tuple[list[Letter], int]:
        """Return the letters behind a place, and the place behind them; in a file that is shorter than that, or new, all of them."""
        data, start = self._behind(after)
        if not data:
            return [], start
        run, letters, last = self._run(), [], start + len(data)
        for line in BytesIO(data):
            end = start + len(line)
            # The last line may be one that somebody writes now, or was killed over: it is left for the next look, also
            # when its newline is there and its checksum is wrong, since the pages of a file may reach the disk in any
            # order. A wrong line with another one behind it is damage.
            if not line.endswith(b"\n") or (end == last and checksum_if_right(line[:-1], 0) is None):
                break
            stored = StoredLetter.read(line[:-1], _MailboxLine(self._path, start))
            if stored is not None and stored.run == run:
                letters.append(stored.letter)
            start = end
        return letters, start

    def changed(self, after: int) -> bool:
        """Return whether the file has another length than the place says."""
        try:
            size = os.stat(self._path, follow_symlinks=False).st_size  # noqa: PTH116 - a path object takes its time
        except OSError:
            return False
        # Another length and not a greater one: a file that was made anew under the name may be shorter. What is empty
        # holds nothing.
        return size not in (0, after)

    def _behind(self, after: int) -> tuple[bytes, int]:
        """Return what stands behind a place, and where that begins."""
        descriptor = self._open(os.O_RDONLY)
        if descriptor is None:
            return b"", 0
        try:
            self._check(descriptor)
            size = self._check_size(descriptor)
            # A place that does not stand behind a newline is of another file, which was removed with its journal; all
            # is read then. That gives letters again in the worst case, and whoever takes them knows them by their ids.
            is_place = 0 < after <= size and os.pread(descriptor, 1, after - 1) == b"\n"
            start = after if is_place else 0
            return b"".join(_pieces(descriptor, start, size)), start
        except OSError as error:
            raise self._unusable(error) from error
        finally:
            os.close(descriptor)

    def _add(self, stored: StoredLetter) -> bool:
        try:
            with self._hold_lock() as descriptor:
                self._check_run(stored, descriptor)
                if self._has(descriptor, stored):
                    return False
                self._append(descriptor, stored.line)
        except OSError as error:
            raise self._unusable(error) from error
        return True

    def _check_run(self, stored: StoredLetter, descriptor: int) -> None:
        """Raise unless the journal is there still: whoever removes one removes its mailbox after it."""
        head = self._journal.head()
        if head is None or head.run != stored.run:
            # Between the look at the journal and the lock somebody may have removed both; the file that was just made
            # for nothing goes with them, and would else stand beside the next journal of that name.
            if not os.fstat(descriptor).st_size:
                self._path.unlink(missing_ok=True)
            raise self._journal.missing()

    def _has(self, descriptor: int, stored: StoredLetter) -> bool:
        """
        Return whether the letter is there already; if not, the file ends with a whole line after this.

        Raises:
            InputError: when another letter has its id.
            JournalWriteFailed: when the mailbox is full.
        """
        self._check_size(descriptor)
        whole = end = count = 0
        last, key = b"", stored.key
        with open(descriptor, "rb", closefd=False) as file:
            # Read in pieces of at most `MAX_LETTER_BYTES`: a file without a newline, as another program leaves it, is not read
            # into memory as one line.
            for piece in iter(partial(file.readline, MAX_LETTER_BYTES), b""):
                end += len(piece)
                if piece.endswith(b"\n"):
                    if piece.startswith(key) and checksum_if_right(piece[:-1], 0) is not None:
                        self._check_same(stored, StoredLetter.read(piece[:-1], "it"))
                        return True
                    whole, count, last = end, count + 1, piece
        # What a killed sender left at the end is removed before anything is written behind it. Behind a line without
        # its newline the next letter would be the end of that line, and both would be lost.
        if end == whole and last and checksum_if_right(last[:-1], 0) is None:
            whole, count = end - len(last), count - 1
        if whole < end:
            os.ftruncate(descriptor, whole)
            # The cut is on the disk before the letter is: after a power cut a file might else have its old length and
            # the new bytes in the midst of the old ones.
            if self._sync is not None:
                os.fsync(descriptor)
        self._check_room(count + 1, whole + len(stored.line))
        return False

    def _append(self, descriptor: int, line: bytes) -> None:
        end = os.fstat(descriptor).st_size
        try:
            # One `write` may take a part only, as when the disk becomes full or a signal comes.
            view = memoryview(line)
            while view:
                view = view[os.write(descriptor, view) :]
            if self._sync is not None:
                self._sync(descriptor)
                # The name of a new file is in its folder, which has to be on the disk, too; once, since the name stays.
                if not end:
                    sync_folder(self._path.parent)
        except OSError:
            # It was not posted: nobody is to find it there later.
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, end)
            raise

    @contextlib.contextmanager
    def _hold_lock(self) -> Iterator[int]:
        """Hold the open file, which is made when there is none, for as long as the block lasts."""
        # The file may be removed with its journal between opening and locking it: the lock would be that of a file
        # without a name, and a letter in it reach nobody. So it is looked at again under the lock, and begun anew when
        # it is another one.
        while True:
            descriptor = self._open(REOPENED)
            is_new = descriptor is None
            if descriptor is None:
                descriptor = self._open(REOPENED | os.O_CREAT | os.O_EXCL)
            if descriptor is None:
                continue  # somebody else was quicker
            try:
                if is_new:
                    self._give(descriptor)
                self._lock(descriptor)
                if self._is_still(descriptor):
                    self._check(descriptor)
                    make_private(self._path, descriptor)
                    yield descriptor
                    return
            finally:
                close_locked(descriptor)

    def _is_still(self, descriptor: int) -> bool:
        """Return whether an open file still has its name."""
        try:
            return os.path.samestat(os.fstat(descriptor), self._path.lstat())
        except FileNotFoundError:
            return False

    def _give(self, descriptor: int) -> None:
        """Give a new file to the owner of the journal, if an administrator made it."""
        # Else an administrator who answers a question of somebody's run would leave a file that its holder does not
        # believe, since it belongs to another user.
        owner = self._of.stat()
        if os.name == "posix" and os.geteuid() != owner.st_uid:
            os.fchown(descriptor, owner.st_uid, owner.st_gid)

    def _lock(self, descriptor: int) -> None:
        """Lock the file, waiting for others as long as they make progress."""
        try:
            import fcntl
        except ImportError:
            return lock_file(descriptor, self._path, unsafe_no_lock=self._unsafe_no_lock)
        # Patience is measured from the last letter and not from the beginning: many senders at once are slow, and none
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

    def _open(self, flags: int) -> int | None:
        """Return the open file; ``None`` when there is none, or when there is one and it was to be made."""
        try:
            return os.open(self._path, flags | NO_LINK | CAREFULLY, OWNER_FILE_MODE)
        except (FileNotFoundError, FileExistsError):
            return None
        except OSError as error:
            raise self._unusable(error) from error

    def _check(self, descriptor: int) -> None:
        """Raise for what is not a file, and for letters that somebody else than the journal's owner may have written."""
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            msg = f"{self._path} is not a regular file; a mailbox is one"
            raise JournalError(msg)
        if os.name != "posix":
            return
        try:
            # A letter can allow a tool call. So whoever can write the mailbox can do what the run can: only who owns
            # the journal, and could write that as well, is believed.
            owner = self._of.stat().st_uid
        except FileNotFoundError:
            raise self._journal.missing() from None
        if status.st_uid != owner or status.st_mode & OTHERS_WRITE_BITS:
            whose = "belongs to somebody else" if status.st_uid != owner else "may be written by others"
            msg = (
                f"{self._path} {whose} than the journal, so anybody may have posted what is in it; remove it, or make it private "
                "if you trust its letters"
            )
            raise JournalError(msg)

    def _check_size(self, descriptor: int) -> int:
        """Return the length of the file; raise when it is longer than any sender would make it."""
        size = os.fstat(descriptor).st_size
        if size > MAX_MAILBOX_BYTES + MAX_LETTER_BYTES:
            msg = f"{self._path} has {size:,} bytes, and a mailbox has at most {MAX_MAILBOX_BYTES:,}; remove it"
            raise JournalCorrupt(msg)
        return size

    def _unusable(self, error: OSError) -> JournalError:
        # A link at the place of the mailbox would let whoever made it choose the file that is appended to.
        if error.errno == errno.ELOOP:
            msg = f"{self._path} is a symbolic link; the mailbox of a journal is a file beside it"
            return JournalError(msg)
        return JournalWriteFailed(f"{self._path} cannot be used as a mailbox: {said(error)}")


PIECE_BYTES = 1024 * 1024
"""Few calls for a full mailbox, and little memory beside the messages themselves."""


def _pieces(descriptor: int, start: int, end: int) -> Iterator[bytes]:
    """Give what an open file holds between two places; less when it was cut off meanwhile."""
    while start < end:
        piece = os.pread(descriptor, min(PIECE_BYTES, end - start), start)
        if not piece:
            return
        start += len(piece)
        yield piece
