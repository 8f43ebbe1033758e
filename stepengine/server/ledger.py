"""
``Ledger``: the runs that servers started, with their owners, requests and statuses, in an SQLite database next to the journals.

A run is registered before it has a journal, so that the next server starts it if this one is killed. Journals that are not
registered are third-party, and no server resumes one by itself. The ledger also stores the states of conversations, decisions about
effects in doubt, and how many messages arrived for a run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from attrs import frozen

from stepengine.data.codec import decode_stored, encode_stored
from stepengine.data.quantities import IDEMPOTENCY_KEY_SECONDS
from stepengine.errors import InputError, JournalError
from stepengine.journal.mailbox import mailbox_path
from stepengine.journal.records import to_compact_json
from stepengine.journal.sources import parse_database_path
from stepengine.journal.sqlite import BUSY_SECONDS, ensure_database
from stepengine.server.quotas import QuotaUsage
from stepengine.workspace.after_fork import Lock
from stepengine.workspace.write_ahead import Database, describe_database_error

if TYPE_CHECKING:
    import sqlite3

    from stepengine.data.questions import Answer

FILE = ".serving.db"
AT_ONCE = 500
"""Values in one query: any SQLite takes 999."""
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
# If this process dies after this statement, another one resumes the run; a suspended run would wait for a message or a time. The
# column `changed` stays as it is, because the ids of answers to one question are made from it.
UNDER_WAY = "UPDATE served SET status = 'running' WHERE run = ? AND status = 'suspended'"
UNENDED = "SELECT run FROM served WHERE session = ? AND status IN ('started', 'running', 'suspended') LIMIT 1"
COUNTED = (
    "coalesce(sum(status IN ('started', 'running', 'suspended')), 0), coalesce(sum(length(CAST(request AS BLOB))), 0)"
)
LEFT = "SELECT coalesce(sum(length(CAST(state AS BLOB))), 0) FROM served_left WHERE run IN (SELECT run FROM served WHERE owner = ?)"
Made = TypeVar("Made")
Act = Callable[["sqlite3.Connection"], Any]


@frozen
class RunRow:
    """
    A run that a server started.

    Attributes:
        run: Its id, which is also the name of its journal.
        owner: The name of the caller that started it; ``""`` for a scheduled run.
        agent: Its agent.
        status: ``"started"`` from its registration on, also while it runs; ``"running"`` after a suspension, and for forks and for
            scheduled and third-party runs; ``"suspended"``; how it ended; ``"stranded"`` if it could not be resumed or is extended.
        created: When it was requested, in seconds since 1970.
        changed: When it was registered, was suspended, ended or failed to resume; a resume leaves it. In PostgreSQL it is *created*.
        request: The request as JSON: ``prompt``, ``params``, ``metadata`` and others.
        session: The conversation.
        tries: How many times in an hour it failed to resume since it was registered or last suspended; 0 if it is stranded and never
            started. In PostgreSQL the number of retries.
        error: Why it could not be resumed. In PostgreSQL why it was cancelled or refused.
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
        owner: Its owner.
        runs: The number of its runs.
        agent: The agent of the last run.
        status: The status of the last run.
        changed: When the last run was requested, in seconds since 1970.
    """

    session: str
    owner: str
    runs: int
    agent: str
    status: str
    changed: float


class Ledger:
    """
    The runs of the servers of one store. Any number of processes may use it; all methods wait for the disk.

    Args:
        store_path: A folder of journals, or an SQLite file of them.

    Raises:
        JournalError: From each method, if the file cannot be used.
    """

    def __init__(self, store_path: str | Path) -> None:
        self._is_file = parse_database_path(str(store_path)) is not None
        self.path = Path(store_path) if self._is_file else Path(store_path) / FILE
        self._database: Database | None = None
        self._opening = Lock()
        self._is_closed = False

    def close(self) -> None:
        """Close the database when running calls have ended; later calls raise ``JournalError``. May be called twice."""
        with self._opening:
            known, self._database, self._is_closed = self._database, None, True
        if known is not None:
            known.close()

    def write(self, acts: Iterable[Act]) -> list[Any]:
        """
        Execute *acts* in one durable transaction, and return the result of each, or its ``InputError``.

        The result of an act that raises ``InputError`` is that error. Its writes until then stay, so acts check first.
        Any other error undoes all acts of the transaction.
        """
        made: list[Any] = []
        with self._open_shared_database() as known, known.lock, known.write_transaction() as database:
            for act in acts:
                try:
                    made.append(act(database))
                except InputError as error:
                    made.append(error)
        return made

    def find(self, run: str) -> RunRow | None:
        """Return a run by its id; ``None`` if it is not registered."""
        rows = self._select_rows("WHERE run = ?", (run,))
        return rows[0] if rows else None

    def find_owners_and_statuses(self, runs: Sequence[str]) -> dict[str, tuple[str, str]]:
        """Return (owner, status) by id for those of *runs* that are registered."""
        found: dict[str, tuple[str, str]] = {}
        for start in range(0, len(runs), AT_ONCE):
            part = runs[start : start + AT_ONCE]
            query = f"SELECT run, owner, status FROM served WHERE run IN ({', '.join('?' * len(part))})"  # noqa: S608 - of names of ours
            found |= {run: (owner, status) for run, owner, status in self.read(query, part)}
        return found

    def find_newest_run(self, owner: str, session: str | None) -> RunRow | None:
        """Return the last run of a conversation; ``None`` if the owner has no such conversation."""
        rows = self._select_rows(NEWEST, (session, owner))
        return rows[0] if rows else None

    def find_conversation_state_json(self, row: RunRow) -> str | None:
        """Return the stored state of an ended or suspended run as JSON, if it is the last of its conversation."""
        # A run that waited and then ended left two; a process that was killed in between kept the first one alone.
        known = self._fetch_row(
            "SELECT state FROM served_left WHERE session = ? AND run = ? AND status = ?",
            (row.session, row.run, row.status),
        )
        return None if known is None else str(known[0])

    def count_messages_since_suspend(self, run: str) -> int:
        """Return how many messages arrived for a run since it was last suspended."""
        known = self._fetch_row("SELECT times FROM served_woken WHERE run = ?", (run,))
        return 0 if known is None else int(known[0])

    def find_shown_message(self, run: str) -> tuple[str, str] | None:
        """Return (message id, id of the event before its start) of the page message that shows a run; ``None`` without one."""
        known: tuple[str, str] | None = self._fetch_row("SELECT message, place FROM served_shown WHERE run = ?", (run,))
        return known

    def has_idempotency_key(self, owner: str, key: str, now: float) -> bool:
        """Return whether *owner* started a run under an idempotency key within the day before *now*."""
        known = self._fetch_row("SELECT created FROM served WHERE owner = ? AND key = ?", (owner, key))
        return known is not None and now - known[0] < IDEMPOTENCY_KEY_SECONDS

    def measure_usage(self, owner: str) -> QuotaUsage:
        """Count the open runs of *owner* and the stored bytes of all its runs: requests, states, journals and mailboxes."""
        open_runs, stored = self._fetch_row(f"SELECT {COUNTED} FROM served WHERE owner = ?", (owner,), is_slow=True)  # noqa: S608 - of names of ours
        stored += self._fetch_row(LEFT, (owner,), is_slow=True)[0]
        if self._is_file:
            for table in ("lines", "letters"):
                if self._fetch_row("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?", (table,)):
                    own = "SELECT run FROM served WHERE owner = ?"
                    size = f"SELECT coalesce(sum(length(line)), 0) FROM {table} WHERE run IN ({own})"  # noqa: S608 - of names of ours
                    stored += self._fetch_row(size, (owner,), is_slow=True)[0]
        else:
            for (run,) in self.read("SELECT run FROM served WHERE owner = ?", (owner,), is_slow=True):
                journal = self.path.with_name(f"{run}.jsonl")
                stored += _get_file_size_or_zero(journal) + _get_file_size_or_zero(mailbox_path(journal))
        return QuotaUsage(open_runs, stored)

    def _fetch_row(self, statement: str, values: Sequence[object], *, is_slow: bool = False) -> Any:
        """Return the first row of a query; ``None`` without one."""
        with self._open_shared_database() as known, known.read_connection(is_long=is_slow) as database:
            return database.execute(statement, values).fetchone()

    def list_active_run_ids(self) -> list[str]:
        """Return the ids of the runs that are started or running by the ledger, even if their process was killed."""
        with self._open_shared_database() as known, known.read_connection() as database:
            found = database.execute("SELECT run FROM served WHERE status IN ('started', 'running') ORDER BY run")
            return [run for (run,) in found]

    def list_runs(
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
        Return runs, newest first: those of *owner* (``None`` for all) after the position *before*.

        *search* selects runs whose request, id or agent contains the text. Only ASCII letters match in either case.
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
            values += [
                _make_like_pattern(json.dumps(search, ensure_ascii=False)[1:-1]),
                _make_like_pattern(search),
                _make_like_pattern(search),
            ]
        return self._select_rows(
            f"WHERE {' AND '.join(where)} ORDER BY created DESC, run DESC LIMIT ?", (*values, limit), is_slow=True
        )

    def list_sessions(
        self, *, owner: str | None, before: tuple[float, str] | None, limit: int, session: str | None = None
    ) -> list[SessionRow]:
        """Return conversations by their newest run: those of *owner* (``None`` for all) after the position *before*."""
        where, values = ["session IS NOT NULL"], list[object]()
        for column, value in (("owner", owner), ("session", session)):
            if value is not None:
                where.append(f"{column} = ?")
                values.append(value)
        behind = "" if before is None else "HAVING (MAX(created), session) < (?, ?)"
        # With one MAX, SQLite returns the other columns of the row that has the maximum.
        query = (
            f"SELECT session, owner, COUNT(*), agent, status, MAX(created) FROM served WHERE {' AND '.join(where)} "  # noqa: S608 - of names of ours
            f"GROUP BY owner, session {behind} ORDER BY MAX(created) DESC, session DESC LIMIT ?"
        )
        return [SessionRow(*row) for row in self.read(query, (*values, *(before or ()), limit), is_slow=True)]

    def read(self, query: str, values: Sequence[object] = (), *, is_slow: bool = False) -> list[tuple[Any, ...]]:
        """Return the rows of a query. With *is_slow*, for a query that may read every run, other queries do not wait for it."""
        with self._open_shared_database() as known, known.read_connection(is_long=is_slow) as database:
            return list(database.execute(query, values))

    def _select_rows(self, condition: str, values: Sequence[object], *, is_slow: bool = False) -> list[RunRow]:
        """Return the runs that fulfil an SQL condition."""
        found = self.read(f"SELECT {ROW} FROM served {condition}", values, is_slow=is_slow)  # noqa: S608 - of names of ours
        return [_run_row_from_columns(row) for row in found]

    @contextmanager
    def _open_shared_database(self) -> Iterator[Database]:
        """Yield the shared database, opened if needed; raise ``JournalError`` for errors of the file or of SQLite."""
        import sqlite3

        try:
            known = self._open_or_share_database()
            try:
                yield known
            finally:
                known.close()
        except (OSError, sqlite3.Error) as error:
            msg = f"the server cannot store its runs in {self.path}: {describe_database_error(error, BUSY_SECONDS)}"
            raise JournalError(msg) from error

    def _open_or_share_database(self) -> Database:
        """Return a share of the database connection, which the first call opens; raise ``JournalError`` after ``close``."""
        # Calls come from many threads, and those of a cancelled task continue after ``close``. Each counts as a user, and the
        # last one closes the connection.
        with self._opening:
            if self._is_closed:
                msg = f"{self.path} is closed, because its server was closed"
                raise JournalError(msg)
            if self._database is None:
                known = Database.open(self.path, ensure_database(self.path), seconds=BUSY_SECONDS)
                try:
                    with known.lock, known.write_transaction() as database:
                        for statement in SCHEMA.split(";"):
                            database.execute(statement)
                except BaseException:
                    known.close()
                    raise
                self._database = known
            return self._database.share()


def _get_file_size_or_zero(path: Path) -> int:
    """Return the size of a file in bytes; 0 if it does not exist."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _make_like_pattern(text: str) -> str:
    """Return the LIKE pattern for texts that contain *text*."""
    for sign in "!%_":
        text = text.replace(sign, f"!{sign}")
    return f"%{text}%"


def _run_row_from_columns(row: tuple[Any, ...]) -> RunRow:
    run, owner, agent, status, created, changed, request, session, tries, error = row
    return RunRow(run, owner, agent, status, created, changed, json.loads(request), session, tries, error)


# --- acts: each function makes a write for `Ledger.write` ---------------------------------------------------------


def make_register_run_act(row: RunRow, key: str | None) -> Act:
    """
    Return an act that registers a run and returns ``None``; if the owner used *key* in the last day, it returns the earlier run.

    It raises ``InputError`` if the earlier request was a different one.
    """

    def register_run(database: sqlite3.Connection) -> RunRow | None:
        """Insert a run, or return the earlier run of a recent idempotency key; raise ``InputError`` if its request differs."""
        if key is not None:
            old = f"SELECT {ROW} FROM served WHERE owner = ? AND key = ?"  # noqa: S608 - of names of ours
            found = database.execute(old, (row.owner, key)).fetchone()
            if found is not None:
                known = _run_row_from_columns(found)
                if row.created - known.created < IDEMPOTENCY_KEY_SECONDS:
                    if (known.agent, known.session, known.request) != (row.agent, row.session, row.request):
                        msg = (
                            f"the idempotency key was already used for another request, which started the run {known.run}; "
                            "use a key for only one request within a day"
                        )
                        raise InputError(msg)
                    return known
                database.execute("UPDATE served SET key = NULL WHERE run = ?", (known.run,))
        database.execute(
            "INSERT INTO served (run, owner, agent, status, created, changed, request, session, error, key) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                row.run,
                row.owner,
                row.agent,
                row.status,
                row.created,
                row.changed,
                _request_to_json(row.request),
                row.session,
                row.error,
                key,
            ),
        )
        return None

    return register_run


def make_register_turn_act(row: RunRow, after: str | None) -> Act:
    """
    Return an act that registers the next run of a conversation, after the run *after*.

    It raises ``InputError`` if the conversation has a newer run: of two concurrent turns one is refused.
    """

    def register_next_turn(database: sqlite3.Connection) -> None:
        """Insert the next run of a conversation; raise ``InputError`` if it has a newer one."""
        found = database.execute(f"SELECT run FROM served {NEWEST}", (row.session, row.owner)).fetchone()  # noqa: S608 - of names of ours
        if (None if found is None else found[0]) != after:
            msg = "the conversation has a newer turn; reload it, then send the message again"
            raise InputError(msg)
        make_register_run_act(row, None)(database)

    return register_next_turn


def make_store_conversation_state_act(session: str, run: str, status: str, state: str) -> Act:
    """Return an act that stores the state of an ended or suspended run of a conversation, for its next run."""

    def store_state(database: sqlite3.Connection) -> None:
        """Store the state of a run for the next turn, if the run is still attached to its conversation."""
        # A fork has the conversation in its journal, and does not belong to it.
        database.execute(
            "INSERT OR REPLACE INTO served_left SELECT ?, ?, ?, ? WHERE EXISTS "
            "(SELECT 1 FROM served WHERE run = ? AND session = ?)",
            (session, run, status, state, run, session),
        )

    return store_state


def make_store_shown_message_act(run: str, message: str, after_event: str) -> Act:
    """Return an act for the page message of a run: it stores the message id and the event before its start."""

    def store_shown_message(database: sqlite3.Connection) -> None:
        """Insert or replace the id of the page message that shows a run."""
        database.execute("INSERT OR REPLACE INTO served_shown VALUES (?, ?, ?)", (run, message, after_event))

    return store_shown_message


def make_store_status_act(run: str, status: str, now: float, *, tries: int = 0, error: str = "") -> Act:
    """Return an act that stores the status of a run, unless the run has ended."""

    def update_status(database: sqlite3.Connection) -> None:
        """Store the status of a run, unless it has ended."""
        database.execute(
            "UPDATE served SET status = ?, changed = ?, tries = ?, error = ? WHERE run = ? "
            "AND status IN ('started', 'running', 'suspended', 'stranded')",
            (status, now, tries, error, run),
        )

    return update_status


def make_restore_status_act(row: RunRow) -> Act:
    """Return an act that stores the status, tries and error of *row* again, after a failed resume."""
    return make_store_status_act(row.run, row.status, row.changed, tries=row.tries, error=row.error)


def make_store_decisions_act(run: str, decisions: Mapping[str, Answer]) -> Act:
    """
    Return an act that stores a person's decisions about effects in doubt, and marks a suspended run as running.

    The act returns the questions that were not decided before, or ``None`` if there are none. If a different decision is stored, it stores
    nothing and raises ``InputError``.
    """

    def store_new_decisions(database: sqlite3.Connection) -> list[str] | None:
        """Store new decisions, mark a suspended run as running, and return the new questions; raise for a different decision."""
        texts = {question: to_compact_json(encode_stored(answer)) for question, answer in decisions.items()}
        known = dict(database.execute("SELECT question, answer FROM served_decided WHERE run = ?", (run,)))
        for question in known.keys() & texts.keys():
            if known[question] != texts[question]:
                msg = f"{question!r} already has another decision"
                raise InputError(msg)
        new = [(run, question, text) for question, text in texts.items() if question not in known]
        database.executemany("INSERT INTO served_decided VALUES (?, ?, ?)", new)
        database.execute(UNDER_WAY, (run,))
        return [question for _, question, _ in new] or None

    return store_new_decisions


def make_remove_decisions_act(run: str, questions: Iterable[str]) -> Act:
    """Return an act that removes decisions about effects in doubt whose request was refused."""

    def delete_decisions(database: sqlite3.Connection) -> None:
        """Delete the decisions about some effects in doubt of a run."""
        database.executemany(
            "DELETE FROM served_decided WHERE run = ? AND question = ?", [(run, question) for question in questions]
        )

    return delete_decisions


def make_count_message_act(run: str) -> Act:
    """Return an act that counts an arrived message for a run, and marks a suspended run as running."""

    def count_message_and_wake(database: sqlite3.Connection) -> None:
        """Count an arrived message, and mark a suspended run as running."""
        database.execute(UNDER_WAY, (run,))
        database.execute(
            "INSERT INTO served_woken VALUES (?, 1) ON CONFLICT (run) DO UPDATE SET times = times + 1", (run,)
        )

    return count_message_and_wake


def make_suspend_act(run: str, now: float, known_message_count: int) -> Act:
    """
    Return an act that marks a run as suspended and returns True; if a message or decision has arrived, it returns False.

    Args:
        run: The run.
        now: The time of the suspension, in seconds since 1970.
        known_message_count: The result of ``Ledger.count_messages_since_suspend`` from before the mailbox was checked.
    """

    def suspend_unless_woken(database: sqlite3.Connection) -> bool:
        """Mark a run as suspended and return True; return False if a message or decision has arrived."""
        came = database.execute("SELECT times FROM served_woken WHERE run = ?", (run,)).fetchone() or (0,)
        decided = database.execute("SELECT 1 FROM served_decided WHERE run = ?", (run,)).fetchone()
        if came != (known_message_count,) or decided is not None:
            return False
        database.execute("DELETE FROM served_woken WHERE run = ?", (run,))
        make_store_status_act(run, "suspended", now)(database)
        return True

    return suspend_unless_woken


def make_resume_act(run: str) -> Act:
    """
    Return an act that marks a suspended or stranded run as running, and removes and returns its decisions about effects in doubt.

    Each decision counts once: if a process is killed while it repeats an effect, that effect is in doubt again, and the question
    is asked again.
    """

    def resume_and_take_decisions(database: sqlite3.Connection) -> dict[str, Answer]:
        """Mark a suspended or stranded run as running; remove and return its decisions by question."""
        database.execute(
            "UPDATE served SET status = 'running', tries = 0, error = '' "
            "WHERE run = ? AND status IN ('suspended', 'stranded')",
            (run,),
        )
        known = "SELECT question, answer FROM served_decided WHERE run = ?"
        found = {
            question: decode_stored(json.loads(text)) for question, text in database.execute(known, (run,)).fetchall()
        }
        database.execute("DELETE FROM served_decided WHERE run = ?", (run,))
        return found

    return resume_and_take_decisions


def make_detach_runs_act(session: str) -> Act:
    """
    Return an act that detaches all runs from a conversation without deleting them, and returns their ids.

    It raises ``InputError`` while one of them has not ended.
    """

    def detach_runs(database: sqlite3.Connection) -> list[str]:
        """Detach the runs of a conversation and return their ids; raise ``InputError`` if one has not ended."""
        if database.execute(UNENDED, (session,)).fetchone() is not None:
            msg = "a run of this conversation has not ended"
            raise InputError(msg)
        runs = [run for (run,) in database.execute("SELECT run FROM served WHERE session = ?", (session,)).fetchall()]
        database.execute("UPDATE served SET session = NULL WHERE session = ?", (session,))
        return runs

    return detach_runs


def make_attach_runs_act(session: str, runs: Iterable[str]) -> Act:
    """Return an act that attaches detached runs to their conversation again."""

    def attach(database: sqlite3.Connection) -> None:
        """Attach runs to a conversation again."""
        database.executemany("UPDATE served SET session = ? WHERE run = ?", [(session, run) for run in runs])

    return attach


def make_delete_run_act(run: str) -> Act:
    """Return an act that deletes the row of a run, for one that has not started."""

    def delete_row(database: sqlite3.Connection) -> None:
        database.execute("DELETE FROM served WHERE run = ?", (run,))

    return delete_row


def _request_to_json(request: object) -> str:
    """Encode a request as compact JSON with sorted keys."""
    # Sorted: two requests with one key are compared. Escapes would take up to three times the bytes of other scripts.
    return json.dumps(request, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
