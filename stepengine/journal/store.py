"""
The base classes ``Journal`` and ``Writer``, and ``MemoryJournal``, which encodes lines on demand.

``Commits`` makes appended records durable in a thread. Each journal has one running commit at a time, so records reach the disk in the
order in which they were appended. Later requests share the next commit. All journals of a process share the threads, which end with the
last of them.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeVar

import attrs
from attrs import frozen

from stepengine.data.effects import CallModel
from stepengine.data.record_sizes import MAX_INLINE_CHARS, may_exceed_value_limit
from stepengine.data.transcript import Transcript
from stepengine.errors import (
    JournalError,
    JournalLocked,
    JournalMissing,
)
from stepengine.journal.encoding import Encoder
from stepengine.journal.follower import Again, JournalPosition, NewRecords, OffsetPosition
from stepengine.journal.history import History
from stepengine.journal.journal_files import TO_RECORD
from stepengine.journal.line_macs import MacChain, load_or_create_mac_key
from stepengine.journal.line_reader import read_lines
from stepengine.journal.mailbox import Mailbox, MemoryMailbox
from stepengine.journal.records import Head, Input, Intent, Record, Result, to_compact_json
from stepengine.journal.redacted_records import redact_records
from stepengine.redaction import Redact, Redactor, RedactRule, make_redactor
from stepengine.workspace.after_fork import Lock, call_in_forked_child
from stepengine.workspace.threads import ThreadPool

if TYPE_CHECKING:
    from stepengine.journal.signing import SigningKey

# What makes a record findable, such as its path and its fingerprint, is never stored apart.
MIN_INLINE_CHARS = 1_024


@frozen
class Extension:
    """
    The result of extending a journal.

    Attributes:
        kept: The number of effects answered from the record.
        recorded: The number of effects in the record.
        anew: The number of effects that were performed.
        before: The backup of the previous journal; ``None`` if the store makes no backups.
    """

    kept: int
    recorded: int
    anew: int
    before: Journal | None


@frozen
class WakePlace:
    """
    The storage location of a run's wake time.

    Attributes:
        place: A local folder for the index of wake times, or an SQLite file of journals.
        run: The name of the run there.
        journals: The journals of the store by name, from which a lost index is rebuilt. By default those in *place*.
    """

    place: Path
    run: str
    journals: Mapping[str, Journal] | None = None


class Writer(abc.ABC):
    """
    The one writer of a journal; it owns the journal until it is closed.

    Attributes:
        waits: Whether appended records are lost without a ``commit``.
        blocks: Whether ``commit`` may block for a long time, as for a disk. It may run in any thread, parallel to ``append``.
        history: The history of the journal when it was opened.
        repaired: The number of bytes of a torn tail that were cut off when the journal was opened.
    """

    waits = False
    blocks = False
    history: History
    repaired = 0

    @abc.abstractmethod
    def append(self, record: Record) -> None:
        """Append a record; it is durable with the next ``commit``."""

    @abc.abstractmethod
    def commit(self) -> None:
        """
        Make everything appended durable.

        Raises:
            JournalWriteFailed: when that fails; the journal can still be opened, without uncommitted records.
        """

    def announce_commit(self) -> None:  # noqa: B027 - most have nobody to tell
        """Announce that ``commit`` follows, so that another writer's commit may include these records."""

    def enable_macs(self) -> None:  # noqa: B027 - what only this process holds needs none
        """Add to each later line a keyed digest that identifies the journal as this user's; see ``line_macs``."""

    @abc.abstractmethod
    def close(self) -> None:
        """Commit and release the journal; may be called twice."""

    @abc.abstractmethod
    def set_request_base(self, path: str, seq: int, transcript: Transcript) -> None:
        """Store later requests as differences to this one, which the journal holds already."""


class Journal(abc.ABC):
    """
    The record of one run and its children.

    Args:
        redact: Which secrets are taken out: ``"known"`` values (default), ``"all"`` shapes too, ``"off"`` none; or a list
            of ``RedactHeader``, ``RedactField``, ``RedactPattern``, ``RedactValue`` and functions, in addition to those of ``"all"``.
        secrets: Further known secret values, each with its placeholder name.
        allow_secrets: Hashes of values that look like secrets but are not, such as ``"sha256:..."``.
        machine: Texts that identify this machine, each with its placeholder, such as ``machine_data()``. The placeholders are
            recorded; the run sees the texts.
        link: Whether each checksum starts from the previous one. Journals for git are not linked, so that a change affects only
            one line.
        stable: Whether two recordings of the same run have the same bytes: constant id, seed and times, records in
            address order. For recordings of tests.
        inline: The maximum length of a text in a record, in characters, at least 1,024. A longer text is stored once, in a ``blob``
            record that other records refer to. 2,048 makes a journal with long tool outputs a quarter to a half smaller;
            32,768 (default) keeps more texts readable in place. Any value can read any journal.
        sign: The key that signs the journal while it is written, or the path of the key's file: see ``SigningKey`` and ``verify``.

    Raises:
        JournalError: when *inline* is not a number of at least 1,024, or the key cannot be used.

    Attributes:
        forks: The number of forks made of this journal.
        extended: The result of the last extension of this journal, or ``None``.
        is_in_memory: Whether only this process has the records.
        is_own: Whether this user's runs wrote all records of a journal in memory; False if they were derived from a journal that is
            not known as this user's. ``None`` for records added by the program itself, and for other stores.
        records_tools: Whether results of tools are recorded as effects; if not, only model requests contain them.
        macs: The keyed digests of lines that are encoded together: those of the journal that records were read from, new
            ones of this user, or none; see ``line_macs``.
    """

    is_in_memory: ClassVar[bool] = False
    is_own: bool | None = None
    records_tools: ClassVar[bool] = True
    macs: Literal["kept", "new", "none"] = "kept"

    def __init__(
        self,
        *,
        redact: Redact | Sequence[RedactRule] = "known",
        secrets: Mapping[str, str] | None = None,
        allow_secrets: Iterable[str] = (),
        machine: Mapping[str, str] | None = None,
        link: bool = True,
        stable: bool = False,
        inline: int = MAX_INLINE_CHARS,
        sign: SigningKey | str | Path | None = None,
    ) -> None:
        if type(inline) is not int or inline < MIN_INLINE_CHARS:
            msg = f"inline must be the most characters that a text in a record may have, at least {MIN_INLINE_CHARS:,}, not {inline!r}"
            raise JournalError(msg)
        self.redact: Redact = redact if isinstance(redact, str) else "all"
        # The environment is read when the journal is made: secrets that are in it are known by value, and replaced
        # wherever they turn up, whatever wrote them there.
        self.redactor: Redactor = make_redactor(
            redact, os.environ, secrets, allow_secrets=allow_secrets, machine=machine
        )
        self.link = link
        self.stable = stable
        self.inline = inline
        self.signing = _load_signing_key(sign) if isinstance(sign, str | Path) else sign
        if self.signing is not None and stable:
            msg = "a journal with stable=True cannot be signed: its records are sorted and lose their times when the run ends. Leave out stable or sign"
            raise JournalError(msg)
        self.forks = 0
        self.extended: Extension | None = None

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The journal's name for messages."""

    @property
    def address(self) -> str:
        """The text that opens the journal on the command line, by default its name."""
        return self.name

    @property
    def file(self) -> Path | None:
        """The file that contains this journal alone; ``None`` (default) in other stores."""
        return None

    def size(self) -> int:
        """Return the size in bytes, 0 for a missing journal. The default reads all of it."""
        return len(self.content())

    def wake_place(self) -> WakePlace | None:
        """Return where the wake time of the suspended run is stored; ``None`` (default) for nowhere."""
        return None

    @property
    def signed_by(self) -> str:
        """The public key of its signatures, as base64 of OpenSSH's form; ``""`` if it is unsigned."""
        return "" if self.signing is None else self.signing.public

    def refuse_unsigned_resume(self, history: History) -> None:
        """
        Raise if a signed, unfinished journal was opened without a signing key.

        Raises:
            JournalError: when the key is missing; the error names it.
        """
        # To go on unsigned would leave an end behind the last signature, which cannot be told from one that somebody
        # forged.
        head = history.head
        if head is not None and head.signed and self.signing is None and not history.is_complete:
            from stepengine.journal.signing import key_fingerprint

            msg = (
                f"{self.name} is signed with {key_fingerprint(head.signed)}. Resume it with that key, as in FileJournal(path, sign=KEY) or "
                "`stepengine resume --sign KEY`, or fork it into another journal"
            )
            raise JournalError(msg)

    @abc.abstractmethod
    def records(self) -> list[Record]:
        """
        Return all records; a torn tail is left out.

        Raises:
            JournalCorrupt: when a record is damaged.
            JournalVersion: when a newer version wrote it.
        """

    @abc.abstractmethod
    def writer(self) -> Writer:
        """
        Lock the journal and return its writer.

        Raises:
            JournalLocked: when another writer has locked the journal.
            JournalCorrupt: when a record is damaged.
            JournalVersion: when a newer version wrote the journal.
            JournalError: when the journal cannot be written.
        """

    def lock(self) -> Callable[[], None]:
        """
        Lock the journal for one writer and return the function that unlocks it; a missing journal may be created.

        Raises:
            JournalLocked: when a writer of this or another process has locked it.
        """
        return self.writer().close

    @abc.abstractmethod
    def replace(self, records: Sequence[Record]) -> None:
        """Replace all records at once, also while the caller has the lock; on failure nothing changes."""

    def discard(self) -> None:
        """Delete the records; a file is removed."""
        self.replace([])

    def make_backup(self) -> Journal | None:
        """Copy the records next to the journal before they are replaced, and return the copy; ``None`` (default) for no copy."""
        return None

    def bind_run(self, run: str) -> Journal:
        """Return the journal to record the run with this id into: this one, or in a store of many runs another one."""
        return self

    def copy_redaction_rules_from(self, other: Journal) -> Self:
        """Change this journal to the redaction rules of *other*, and return it."""
        self.redact, self.redactor = other.redact, other.redactor
        return self

    def history(self) -> History:
        """Return the parsed history of the journal; raises as ``records`` does."""
        return History(self.records(), self.name, self.make_missing_error)

    def head(self) -> Head | None:
        """
        Return the first record without reading others, or ``None`` while there is none.

        Raises:
            JournalCorrupt: when the first record is not a head.
            JournalVersion: when a newer version wrote the journal.
        """
        return self.history().head

    def mailbox(self) -> Mailbox:
        """
        Return the mailbox of this journal, to which other processes send messages for its run.

        Raises:
            JournalError: when this kind of journal has none.
        """
        msg = f"{self.name} has no mailbox; use a FileJournal, SqliteJournal or MemoryJournal"
        raise JournalError(msg)

    def make_start_position(self) -> JournalPosition:
        """Return a position at the start of this journal, for reading new records."""
        return OffsetPosition(self)

    def read_piece(self, start: int, most: int) -> bytes:
        """Return at most *most* stored bytes from offset *start* on; a store that cannot read pieces returns all of them."""
        return self.content()[start:]

    def stamp(self) -> tuple[object, object] | None:
        """Return the identity of the store and a value that changes with its bytes; ``None`` (default) if only reading shows changes."""
        return None

    def is_there(self) -> bool:
        """Return whether the journal exists; one in memory always does."""
        return True

    def is_held(self) -> bool:
        """Return whether a process is writing the run now; False if that is unknown."""
        return False

    def make_missing_error(self) -> JournalMissing:
        """Return the error for a missing run; it names existing ones."""
        return JournalMissing(f"{self.name} holds no run; {TO_RECORD}")

    def lines(self) -> list[bytes]:
        """Return the journal as lines, each with its newline."""
        return self.encode_lines(self.records())

    def encode_lines(self, records: Sequence[Record]) -> list[bytes]:
        """
        Return *records* as this journal stores them, each line with its newline.

        The lines follow the journal's redaction rules: if a record that was read contains a secret, all records are encoded again.

        Raises:
            JournalCorrupt: when a record that must be encoded again cannot be read.
            JournalWriteFailed: when a line would be longer than 20 MiB.
            SecretFound: when the rules look for secrets by shape, and one remains.
        """
        link = records[0].link if records and isinstance(records[0], Head) else self.link
        encoder = Encoder(
            self.redactor,
            link=link,
            stable=self.stable,
            inline=self.inline,
            keeps_macs=self.macs == "kept" and not self.stable,
        )
        key = load_or_create_mac_key(creates_missing=False) if self.macs == "new" else None
        encoder.add_mac = None if key is None else MacChain(key).add_line
        kept = (
            redact_records(History(records, self.name), self.redactor)
            if any(_needs_redaction(record, self.redactor) for record in records)
            else records
        )
        if self.signing is None:
            return [line for record in kept for line in encoder.encode_record_lines(record)]
        return _encode_signed_lines(self.signing, kept, encoder)

    def content(self) -> bytes:
        """Return the journal's bytes as stored; those of a journal in memory are encoded for this."""
        return b"".join(self.lines())

    def copy_to(self, other: Journal) -> None:
        """
        Replace the content of *other* by this journal's, under *other*'s redaction rules.

        Raises:
            JournalError: when this journal cannot be read, or *other* not be written; see ``records`` and ``encode_lines``.
            JournalLocked: when a run writes *other*.
        """
        # A missing one is not locked, since that would create it.
        with hold_lock(other) if other.size() else contextlib.nullcontext():
            other.replace(self.records())


# What signs is loaded for journals that are signed: few are, and it takes 2 ms of each start.


def _load_signing_key(file: str | Path) -> SigningKey:
    from stepengine.journal.signing import SigningKey

    return SigningKey(file)


def _needs_redaction(record: Record, redactor: Redactor) -> bool:
    """Return whether a record that was parsed from a line holds text that *redactor* replaces."""
    line = record.line
    return line is not None and redactor.may_contain_secret(to_compact_json(line)) and redactor.value(line) != line


def _encode_signed_lines(key: SigningKey, records: Sequence[Record], encoder: Encoder) -> list[bytes]:
    """Return the lines of *records* with the key in the head and one new signature at the end; old signatures are dropped."""
    from stepengine.journal.signing import SignatureChain, compute_line_digest, drop_signatures

    lines: list[bytes] = []
    for record in drop_signatures(records):
        made = record
        if isinstance(record, Head):
            line = None if record.line is None else {**record.line, "signed": key.public}
            made = attrs.evolve(record, signed=key.public, line=line)
        lines += encoder.encode_record_lines(made)
    chain = SignatureChain(
        key,
        hashlib.sha256(b"".join(lines)),
        records=len(lines),
        marks=[compute_line_digest(line[:-1]) for line in lines],
    )
    return [*lines, encoder.encode_text_line(chain.make_signature_text(closes=True))] if lines else []


@contextlib.contextmanager
def hold_lock(journal: Journal) -> Iterator[None]:
    """Lock a journal while the block runs; raises as ``Journal.lock``."""
    unlock = journal.lock()
    try:
        yield
    finally:
        unlock()


class MemoryJournal(Journal):
    """
    A journal in memory: it stores frozen values and encodes lines on demand.

    ``MemoryJournal(lines)`` parses the result of ``lines()`` of another journal.

    Args:
        lines: The lines of a journal, or one text or bytes with all lines.
        options: See ``Journal``.

    """

    is_in_memory = True

    def __init__(self, lines: Iterable[bytes] | bytes | str = (), **options: Any) -> None:
        super().__init__(**options)
        if self.signing is not None:
            msg = "a journal in memory cannot be signed; record into a FileJournal or an SqliteJournal"
            raise JournalError(msg)
        text = lines.encode() if isinstance(lines, str) else lines
        data = text if isinstance(text, bytes) else b"".join(text)
        self._records = read_lines(data, self.name).records
        self._writer: _MemoryWriter | None = None
        self._mailbox = MemoryMailbox(self)

    def __repr__(self) -> str:
        return f"<MemoryJournal of {len(self._records)} records>"

    @property
    def name(self) -> str:
        """The journal's name for messages."""
        return "the journal in memory"

    def records(self) -> list[Record]:
        """Return all records."""
        return list(self._records)

    def writer(self) -> Writer:
        """Lock the journal and return its writer."""
        if self._writer is not None:
            msg = f"{self.name} is being written by another run; every run needs its own journal"
            raise JournalLocked(msg)
        self._writer = _MemoryWriter(self)
        return self._writer

    def replace(self, records: Sequence[Record]) -> None:
        """Replace all records."""
        History(records, self.name)
        self.is_own, self.macs = None, "kept"
        self.replace_records_unchecked(list(records))

    def head(self) -> Head | None:
        """Return the first record, or ``None`` while there is none."""
        # Records may be given by anybody (`MemoryJournal(lines)`), and a journal that is being written is empty at
        # first: what is no head is no answer here, and whoever reads the records is told what is wrong with them, by
        # number.
        records = self._records
        first = records[0] if records else None
        return first if isinstance(first, Head) else None

    def make_start_position(self) -> JournalPosition:
        """Return a position at the start of the records."""
        return _MemoryPosition(self)

    def mailbox(self) -> Mailbox:
        """Return the mailbox of this journal, in memory."""
        return self._mailbox

    def discard(self) -> None:
        """Delete the records and mailbox messages."""
        self.replace([])
        self._mailbox = MemoryMailbox(self)

    def replace_records_unchecked(self, records: list[Record]) -> None:
        """Replace all records, without checking them."""
        self._records = records


class _MemoryPosition(JournalPosition):
    def __init__(self, journal: MemoryJournal) -> None:
        self._journal = journal
        self._records: list[Record] = journal._records  # noqa: SLF001 - one of its parts
        self._given: list[Record] = []
        self._must_restart = False

    @property
    def offset(self) -> int:
        """Where the next read starts: the number of returned records."""
        return len(self._given)

    def may_have_new_records(self) -> bool:
        """Return whether records were added or replaced."""
        now = self._journal._records  # noqa: SLF001
        return self._must_restart or now is not self._records or len(now) != len(self._given)

    def read_new_records(self) -> NewRecords:
        """Return the records added since the last call."""
        now, given = self._journal._records, self._given  # noqa: SLF001
        if now is self._records and len(now) >= len(given) and not self._must_restart:
            more = now[len(given) :]
            given += more
            return NewRecords(more)
        is_other, self._must_restart = now is not self._records, False
        self._records, self._given = now, list(now)
        pairs = enumerate(zip(given, now, strict=False))
        kept = next((n for n, (was, one) in pairs if was is not one), min(len(given), len(now)))
        why: Again = "replaced" if is_other else "rewritten"
        return NewRecords(list(now), why if given else "", kept)

    def restart(self) -> None:
        """Reset the position so that the next read returns all records."""
        self._must_restart = True


class _MemoryWriter(Writer):
    def __init__(self, journal: MemoryJournal) -> None:
        self._journal = journal
        self._records = journal._records  # noqa: SLF001 - one of its two halves
        self.history = History(self._records, journal.name, journal.make_missing_error)

    def append(self, record: Record) -> None:
        """
        Add a record; raise if it is too long for a journal.

        Raises:
            JournalWriteFailed: when the record could not be stored as a line.
        """
        given: object = None
        if isinstance(record, (Intent, Result)):
            given = record.given
        elif isinstance(record, Input):
            given = record.input
        # A record that no line could hold is refused here as by every other journal: an agent that records in memory in
        # its tests must not fail in production with the first long output.
        if given is not None and not isinstance(given, CallModel) and may_exceed_value_limit(given):
            journal = self._journal
            Encoder(journal.redactor, link=False, inline=journal.inline).encode_record_lines(record)
        self._records.append(record)

    def set_request_base(self, path: str, seq: int, transcript: Transcript) -> None:
        """Do nothing: lines are encoded on demand."""

    def commit(self) -> None:
        """Do nothing: there is no disk."""

    def close(self) -> None:
        if self._journal._writer is self:  # noqa: SLF001 - one of its two halves
            self._journal._writer = None  # noqa: SLF001


# Commits of different journals do not wait for each other's disk. More than a few make no disk faster.
COMMIT_THREADS = 8
Made = TypeVar("Made")


class Commits:
    """
    The commits of one journal.

    Args:
        writer: Its writer.
    """

    _pool: ClassVar[ThreadPool] = ThreadPool(COMMIT_THREADS)
    _users: ClassVar[int] = 0
    _lock: ClassVar[Lock] = Lock()

    @classmethod
    def reset_in_forked_child(cls) -> None:
        """Forget the parent's journals in a forked child, which lacks their threads."""
        cls._users = 0

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._waiting: list[asyncio.Future[None]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._uses_pool = False
        self._is_closed = False

    def request_commit(self) -> asyncio.Future[None]:
        """
        Start a commit soon, and return a future that is done once everything appended before is durable.

        The future fails with a ``StepEngineError`` if the commit fails. Cancelling the future does not cancel the commit.
        """
        # A future and no task: the commit runs in a thread, and all who asked in one turn of the loop are told
        # together. A task for each cost about as much as the commit of a small record.
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        if self._loop is not loop:
            # None is under way, or one of a loop that has ended, where nobody waits any more.
            self._loop, self._waiting = loop, []
            # At the end of this turn, so that results of other effects that end in it go along: a group of ten shares
            # one sync.
            loop.call_soon(self._start_commit)
        self._waiting.append(future)
        self._writer.announce_commit()
        return future

    async def run_in_thread(self, work: Callable[[], Made]) -> Made:
        """Run *work*, which may wait for the disk, in a thread and return its result."""
        made: Made = await self._get_thread_pool().run("journal", work)
        return made

    def close(self) -> None:
        """Commit the rest and release the journal; may be called twice."""
        try:
            self._writer.close()
        finally:
            # Whoever waits for the commit behind one that is under way is told when that has ended.
            self._is_closed = True
            if self._uses_pool:
                self._uses_pool = False
                self._add_pool_users(-1)

    @classmethod
    def _add_pool_users(cls, count: int) -> None:
        """Add *count*, which may be negative, to the number of users of the thread pool; close the pool at 0."""
        with cls._lock:
            cls._users += count
            if not cls._users:
                cls._pool.close()

    def _get_thread_pool(self) -> ThreadPool:
        """Return the thread pool, and count these commits as one user of it until they are closed."""
        if not self._uses_pool and not self._is_closed:
            self._uses_pool = True
            self._add_pool_users(1)
        return self._pool

    def _start_commit(self) -> None:
        """Start one commit in a thread for all waiting callers; after closing, only tell them how it ended."""
        batch, self._waiting = self._waiting, []
        tell = partial(self._finish_batch, batch)
        try:
            if self._is_closed:
                self._writer.commit()  # what was left is stored: there is nothing to wait for, only to be told
                tell(None, None)
            else:
                self._get_thread_pool().start_with_callback("journal", self._writer.commit, tell)
        except (RuntimeError, JournalError) as error:  # the system gives no thread, or what was left is lost
            tell(None, error)

    def _finish_batch(self, batch: Sequence[asyncio.Future[None]], _: None, error: BaseException | None) -> None:
        """Complete the futures of a commit that has ended, and start the next commit if others wait."""
        for future in batch:
            if not future.done():
                future.set_result(None) if error is None else future.set_exception(error)
        # Whoever came while that commit ran was not in it, so the next begins at once; and there is never more than one
        # under way, since lines are chained.
        if self._waiting:
            self._start_commit()
        else:
            self._loop = None


call_in_forked_child(Commits.reset_in_forked_child)
