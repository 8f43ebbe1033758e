"""
``Ledger``: which runs a server started, for whom, and what became of them, beside the journals.

What a run did stands in its journal. Here stands what has to be known before there is one: who it belongs to, what was asked, and
under which key, so that a server that is killed at any moment starts what it had promised, starts nothing twice, and goes on with
no journal that somebody else put into the place.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from attrs import frozen

from stepengine.data.codec import bare, restored
from stepengine.data.quantities import IDEMPOTENCY_KEY_SECONDS
from stepengine.errors import InputError, JournalError
from stepengine.journal.finding import database_of
from stepengine.journal.mailbox import mailbox_of
from stepengine.journal.records import to_text
from stepengine.journal.sqlite import BUSY_SECONDS, made_database
from stepengine.server.quotas import Usage
from stepengine.workspace.after_fork import Lock
from stepengine.workspace.write_ahead import Database, reason

if TYPE_CHECKING:
    import sqlite3

    from stepengine.data.questions import Answer

__all__ = ("OPEN", "Ledger", "RunRow", "SessionRow")

FILE = ".serving.db"
OPEN = ("started", "running", "suspended")
"""The states of a run that has not ended; one that is ``started`` may have no journal yet."""
SCHEMA = """
CREATE TABLE IF NOT EXISTS served (
    run TEXT PRIMARY KEY, owner TEXT NOT NULL, agent TEXT NOT NULL, status TEXT NOT NULL, created REAL NOT NULL, changed REAL NOT NULL,
    request TEXT NOT NULL, session TEXT, key TEXT, tries INTEGER NOT NULL DEFAULT 0, error TEXT NOT NULL DEFAULT ''
) WITHOUT ROWID;
CREATE UNIQUE INDEX IF NOT EXISTS served_key ON served (owner, key) WHERE key IS NOT NULL;
CREATE INDEX IF NOT EXISTS served_open ON served (run) WHERE status IN ('started', 'running');
CREATE INDEX IF NOT EXISTS served_list ON served (owner, created, run);
CREATE INDEX IF NOT EXISTS served_all ON served (created, run);
CREATE INDEX IF NOT EXISTS served_counts ON served (agent, status);
CREATE TABLE IF NOT EXISTS served_left (session TEXT PRIMARY KEY, run TEXT NOT NULL, status TEXT NOT NULL, state TEXT NOT NULL)
    WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS served_shown (run TEXT PRIMARY KEY, message TEXT NOT NULL, place TEXT NOT NULL) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS served_sessions ON served (owner, session, created) WHERE session IS NOT NULL;
CREATE TABLE IF NOT EXISTS served_woken (run TEXT PRIMARY KEY, times INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS served_decided (
    run TEXT NOT NULL, question TEXT NOT NULL, answer TEXT NOT NULL, PRIMARY KEY (run, question)
) WITHOUT ROWID
"""
NEWEST = "WHERE session = ? AND owner = ? ORDER BY created DESC, run DESC LIMIT 1"
ROW = "run, owner, agent, status, created, changed, request, session, tries, error"
# Whoever dies behind this leaves a run that somebody resumes: what is suspended waits for a letter or a time. When it changed
# stays as it is, since by that answers to one question are told apart.
UNDER_WAY = "UPDATE served SET status = 'running' WHERE run = ? AND status = 'suspended'"
UNENDED = "SELECT run FROM served WHERE session = ? AND status IN ('started', 'running', 'suspended') LIMIT 1"
COUNTED = "coalesce(sum(status IN ('started', 'running', 'suspended')), 0), coalesce(sum(length(request)), 0)"
Made = TypeVar("Made")
Act = Callable[["sqlite3.Connection"], Any]


@frozen
class RunRow:
    """
    A run that a server started.

    Attributes:
        run: Its id, which is the name of its journal, too.
        owner: Who started it.
        agent: Its agent.
        status: ``"started"`` until it is known that there is a journal, then ``"running"``, ``"suspended"``, how it ended, or
            ``"stranded"`` for one that nobody could resume.
        created: When it was asked for, in seconds since 1970.
        changed: When the status changed.
        request: What was asked: ``prompt``, ``params``, ``metadata`` and the like.
        session: The conversation.
        tries: How many times going on with it failed in a row.
        error: Why it is stranded.
    """

    run: str
    owner: str
    agent: str
    status: str
    created: float
    changed: float
    request: dict[str, Any]
    session: str | None = None
    tries: int = 0
    error: str = ""


@frozen
class SessionRow:
    """
    A conversation of runs that a server started.

    Attributes:
        session: Its id, as the runs have it.
        owner: Whose it is.
        runs: How many runs there were in it.
        agent: The agent of the last one.
        status: How that stands.
        changed: When that was asked for, in seconds since 1970.
    """

    session: str
    owner: str
    runs: int
    agent: str
    status: str
    changed: float


class Ledger:
    """
    The runs of the servers of one place. Any number of processes may use one; all of it waits for the disk.

    Args:
        place: A folder of journals, or an SQLite file of them.

    Raises:
        JournalError: by each call, when the file cannot be used.
    """

    def __init__(self, place: str | Path) -> None:
        self._is_file = database_of(str(place)) is not None
        self.path = Path(place) if self._is_file else Path(place) / FILE
        self._database: Database | None = None
        self._opening = Lock()
        self._is_closed = False

    def close(self) -> None:
        """Give the connection back, once the calls under way have ended; may be called twice, and later calls are refused."""
        with self._opening:
            known, self._database, self._is_closed = self._database, None, True
        if known is not None:
            known.close()

    def write(self, acts: Iterable[Act]) -> list[Any]:
        """
        Do all of *acts* in one transaction, which is on the disk when this returns, and return what each gave.

        One that raises ``InputError`` gives that error and does not spoil the others.
        """
        made: list[Any] = []
        with self._use_database() as known, known.lock, known.writing() as database:
            for act in acts:
                try:
                    made.append(act(database))
                except InputError as error:
                    made.append(error)
        return made

    def find(self, run: str) -> RunRow | None:
        """Return a run by its id."""
        rows = self._rows("WHERE run = ?", (run,))
        return rows[0] if rows else None

    def newest(self, owner: str, session: str | None) -> RunRow | None:
        """Return the last run of a conversation."""
        rows = self._rows(NEWEST, (session, owner))
        return rows[0] if rows else None

    def left(self, row: RunRow) -> str | None:
        """Return the state that a run left, as JSON, where it was the last one of its conversation to come to rest."""
        # A run that waited and then ended left two; a process that was killed in between kept the first one alone.
        known = self._find_row(
            "SELECT state FROM served_left WHERE session = ? AND run = ? AND status = ?",
            (row.session, row.run, row.status),
        )
        return None if known is None else str(known[0])

    def woken(self, run: str) -> int:
        """Return how often something came for a run since it was suspended last."""
        known = self._find_row("SELECT times FROM served_woken WHERE run = ?", (run,))
        return 0 if known is None else int(known[0])

    def shown(self, run: str) -> tuple[str, str] | None:
        """Return the id of the message of a page that shows a run, and behind which event of it that begins."""
        known: tuple[str, str] | None = self._find_row("SELECT message, place FROM served_shown WHERE run = ?", (run,))
        return known

    def has_key(self, owner: str, key: str, now: float) -> bool:
        """Return whether *owner* started a run under an idempotency key within the day before *now*."""
        known = self._find_row("SELECT created FROM served WHERE owner = ? AND key = ?", (owner, key))
        return known is not None and now - known[0] < IDEMPOTENCY_KEY_SECONDS

    def usage(self, owner: str) -> Usage:
        """Return what the runs of *owner* use: their requests, journals and mailboxes."""
        open_runs, stored = self._find_row(f"SELECT {COUNTED} FROM served WHERE owner = ?", (owner,))  # noqa: S608 - of names of ours
        if self._is_file:
            for table in ("lines", "letters"):
                if self._find_row("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?", (table,)):
                    own = "SELECT run FROM served WHERE owner = ?"
                    size = f"SELECT coalesce(sum(length(line)), 0) FROM {table} WHERE run IN ({own})"  # noqa: S608 - of names of ours
                    stored += self._find_row(size, (owner,))[0]
        else:
            for (run,) in self.read("SELECT run FROM served WHERE owner = ?", (owner,)):
                journal = self.path.with_name(f"{run}.jsonl")
                stored += _file_size(journal) + _file_size(mailbox_of(journal))
        return Usage(open_runs, stored)

    def _find_row(self, statement: str, values: Sequence[object]) -> Any:
        with self._use_database() as known, known.reading() as database:
            return database.execute(statement, values).fetchone()

    def under_way(self) -> list[str]:
        """Return the ids of the runs that are not known to rest or to have ended: what goes on when its process was killed."""
        with self._use_database() as known, known.reading() as database:
            found = database.execute("SELECT run FROM served WHERE status IN ('started', 'running') ORDER BY run")
            return [run for (run,) in found]

    def listed(
        self,
        *,
        owner: str | None,
        agent: str | None,
        statuses: Sequence[str],
        before: tuple[float, str] | None,
        limit: int,
        session: str | None = None,
        search: str | None = None,
    ) -> list[RunRow]:
        """
        Return runs, newest first: those of *owner* (``None`` for everybody's) that come behind the place *before*.

        *search* leaves those whose request, id or agent holds it; of letters beyond ASCII only as they are written.
        """
        where, values = ["1"], list[object]()
        for column, value in (("owner", owner), ("agent", agent), ("session", session)):
            if value is not None:
                where.append(f"{column} = ?")
                values.append(value)
        if statuses:
            where.append(f"status IN ({', '.join('?' * len(statuses))})")
            values += statuses
        if before is not None:
            where.append("(created, run) < (?, ?)")
            values += before
        if search is not None:
            where.append("(request LIKE ? ESCAPE '!' OR run LIKE ? ESCAPE '!' OR agent LIKE ? ESCAPE '!')")
            values += [_like(json.dumps(search)[1:-1]), _like(search), _like(search)]
        return self._rows(f"WHERE {' AND '.join(where)} ORDER BY created DESC, run DESC LIMIT ?", (*values, limit))

    def sessions(
        self, *, owner: str | None, before: tuple[float, str] | None, limit: int, session: str | None = None
    ) -> list[SessionRow]:
        """Return conversations, those with the newest runs first: of *owner* (``None`` for everybody's), behind the place *before*."""
        where, values = ["session IS NOT NULL"], list[object]()
        for column, value in (("owner", owner), ("session", session)):
            if value is not None:
                where.append(f"{column} = ?")
                values.append(value)
        behind = "" if before is None else "HAVING (MAX(created), session) < (?, ?)"
        # Beside one MAX SQLite gives the other columns of the row that it is of.
        query = (
            f"SELECT session, owner, COUNT(*), agent, status, MAX(created) FROM served WHERE {' AND '.join(where)} "  # noqa: S608 - of names of ours
            f"GROUP BY owner, session {behind} ORDER BY MAX(created) DESC, session DESC LIMIT ?"
        )
        return [SessionRow(*row) for row in self.read(query, (*values, *(before or ()), limit))]

    def read(self, query: str, values: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """Return the rows of a query."""
        with self._use_database() as known, known.reading() as database:
            return list(database.execute(query, values))

    def _rows(self, condition: str, values: Sequence[object]) -> list[RunRow]:
        return [_row(row) for row in self.read(f"SELECT {ROW} FROM served {condition}", values)]  # noqa: S608 - of names of ours

    @contextmanager
    def _use_database(self) -> Iterator[Database]:
        import sqlite3

        try:
            known = self._share_database()
            try:
                yield known
            finally:
                known.close()
        except (OSError, sqlite3.Error) as error:
            msg = f"{self.path} cannot be used to remember what is served: {reason(error, BUSY_SECONDS)}"
            raise JournalError(msg) from error

    def _share_database(self) -> Database:
        # Calls come from many threads, and those of a cancelled task go on after ``close``: each counts as a user, so that
        # whoever is the last one closes the connection, and nobody opens one that no one closes.
        with self._opening:
            if self._is_closed:
                msg = f"{self.path} is not used any more: the server that it belongs to was closed"
                raise JournalError(msg)
            if self._database is None:
                known = Database.at(self.path, made_database(self.path), seconds=BUSY_SECONDS)
                try:
                    with known.lock, known.writing() as database:
                        for statement in SCHEMA.split(";"):
                            database.execute(statement)
                except BaseException:
                    known.close()
                    raise
                self._database = known
            return self._database.share()


def _file_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _like(text: str) -> str:
    for sign in "!%_":
        text = text.replace(sign, f"!{sign}")
    return f"%{text}%"


def _row(row: tuple[Any, ...]) -> RunRow:
    run, owner, agent, status, created, changed, request, session, tries, error = row
    return RunRow(run, owner, agent, status, created, changed, json.loads(request), session, tries, error)


# --- what is written: each of these is one of the acts of `Ledger.write` --------------------------------------------


def registering(row: RunRow, key: str | None) -> Act:
    """
    Return what registers a run and gives ``None``, or gives the run that its owner started under the same key within a day.

    It raises ``InputError`` where that one was asked for something else.
    """

    def register(database: sqlite3.Connection) -> RunRow | None:
        if key is not None:
            old = f"SELECT {ROW} FROM served WHERE owner = ? AND key = ?"  # noqa: S608 - of names of ours
            found = database.execute(old, (row.owner, key)).fetchone()
            if found is not None:
                known = _row(found)
                if row.created - known.created < IDEMPOTENCY_KEY_SECONDS:
                    if (known.agent, known.session, known.request) != (row.agent, row.session, row.request):
                        msg = (
                            f"the idempotency key was used for another request, whose run is {known.run}; a key stands "
                            "for one request for a day"
                        )
                        raise InputError(msg)
                    return known
                database.execute("UPDATE served SET key = NULL WHERE run = ?", (known.run,))
        database.execute(
            "INSERT INTO served (run, owner, agent, status, created, changed, request, session, key) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (row.run, row.owner, row.agent, row.status, row.created, row.changed, _text(row.request), row.session, key),
        )
        return None

    return register


def taking_turn(row: RunRow, after: str | None) -> Act:
    """
    Return what registers the next run of a conversation behind the run *after*.

    It raises ``InputError`` where another one is there by now: of two who take a turn at the same time one comes too late.
    """

    def take(database: sqlite3.Connection) -> None:
        found = database.execute(f"SELECT run FROM served {NEWEST}", (row.session, row.owner)).fetchone()  # noqa: S608 - of names of ours
        if (None if found is None else found[0]) != after:
            msg = "the conversation went on in the meantime; come back to it, and see how"
            raise InputError(msg)
        registering(row, None)(database)

    return take


def leaving(session: str, run: str, status: str, state: str) -> Act:
    """Return what keeps the state that a run of a conversation left, from which the next one goes on."""

    def leave(database: sqlite3.Connection) -> None:
        database.execute("INSERT OR REPLACE INTO served_left VALUES (?, ?, ?, ?)", (session, run, status, state))

    return leave


def showing(run: str, message: str, place: str) -> Act:
    """Return what keeps that another message of a page than the first one shows a run, from behind the event *place* on."""

    def show(database: sqlite3.Connection) -> None:
        database.execute("INSERT OR REPLACE INTO served_shown VALUES (?, ?, ?)", (run, message, place))

    return show


def noting(run: str, status: str, now: float, *, tries: int = 0, error: str = "") -> Act:
    """Return what says what became of a run; one that has ended stays as it is, as another server may have gone on meanwhile."""

    def note(database: sqlite3.Connection) -> None:
        database.execute(
            "UPDATE served SET status = ?, changed = ?, tries = ?, error = ? WHERE run = ? "
            "AND status IN ('started', 'running', 'suspended', 'stranded')",
            (status, now, tries, error, run),
        )

    return note


def deciding(run: str, decisions: Mapping[str, Answer]) -> Act:
    """
    Return the action that keeps decisions about effects in doubt until somebody resumes the run, and lets it go on.

    It raises ``InputError`` where something else was decided, and nobody has gone on yet.
    """

    def decide(database: sqlite3.Connection) -> None:
        for question, answer in decisions.items():
            text = to_text(bare(answer))
            database.execute("INSERT OR IGNORE INTO served_decided VALUES (?, ?, ?)", (run, question, text))
            known = "SELECT answer FROM served_decided WHERE run = ? AND question = ?"
            if database.execute(known, (run, question)).fetchone() != (text,):
                msg = f"{question!r} was decided otherwise"
                raise InputError(msg)
        database.execute(UNDER_WAY, (run,))

    return decide


def waking(run: str) -> Act:
    """Return what says that something came for a run: one that rests is to go on, and one that lies down looks whether it may."""

    def wake(database: sqlite3.Connection) -> None:
        database.execute(UNDER_WAY, (run,))
        database.execute(
            "INSERT INTO served_woken VALUES (?, 1) ON CONFLICT (run) DO UPDATE SET times = times + 1", (run,)
        )

    return wake


def suspending(run: str, now: float, woken: int) -> Act:
    """
    Return what says that a run is suspended, and gives ``True``, unless something came for it that nobody looked for.

    Args:
        run: The run.
        now: When, in seconds since 1970.
        woken: What ``Ledger.woken`` gave before it was looked whether something had come.
    """

    def suspend(database: sqlite3.Connection) -> bool:
        came = database.execute("SELECT times FROM served_woken WHERE run = ?", (run,)).fetchone() or (0,)
        decided = database.execute("SELECT 1 FROM served_decided WHERE run = ?", (run,)).fetchone()
        if came != (woken,) or decided is not None:
            return False
        database.execute("DELETE FROM served_woken WHERE run = ?", (run,))
        noting(run, "suspended", now)(database)
        return True

    return suspend


def taking_up(run: str) -> Act:
    """
    Return the action that notes that somebody resumes a run, and gives what was decided about its effects in doubt, by question.

    Each decision counts once: when a process is killed while it does something a second time, that is in doubt anew, and is
    asked anew.
    """

    def take(database: sqlite3.Connection) -> dict[str, Answer]:
        database.execute(UNDER_WAY, (run,))
        known = "SELECT question, answer FROM served_decided WHERE run = ?"
        found = {question: restored(json.loads(text)) for question, text in database.execute(known, (run,)).fetchall()}
        database.execute("DELETE FROM served_decided WHERE run = ?", (run,))
        return found

    return take


def forgetting(session: str) -> Act:
    """
    Return what lets the runs of a conversation stand alone; they stay.

    It raises ``InputError`` while one of them has not ended.
    """

    def forget(database: sqlite3.Connection) -> None:
        if database.execute(UNENDED, (session,)).fetchone() is not None:
            msg = "a run of this conversation has not ended"
            raise InputError(msg)
        database.execute("UPDATE served SET session = NULL WHERE session = ?", (session,))

    return forget


def removing(run: str) -> Act:
    """Return what forgets a run that never began."""

    def remove(database: sqlite3.Connection) -> None:
        database.execute("DELETE FROM served WHERE run = ?", (run,))

    return remove


def _text(request: object) -> str:
    # Sorted: two requests with one key are compared.
    return json.dumps(request, sort_keys=True, separators=(",", ":"))
