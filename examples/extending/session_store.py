"""
A session store in a database table: conversations are JSON texts by key, here in SQLite.

`TableSessions` has the three methods that `DocumentSessions` needs, and says where the journals of waiting runs are. Any database that
can compare and replace a value in one step does the same in as many lines.

``python examples/extending/session_store.py`` needs no key and no network: the model's replies are written below.
"""

import hashlib
import sqlite3
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from stepengine import STEP, AgentDefinition, Ask, Engine, StepContext, Steps
from stepengine.sessions import DocumentSessions, JournalLocation
from stepengine.testing import ScriptedModel, text

TABLE = "CREATE TABLE IF NOT EXISTS documents (key TEXT PRIMARY KEY, text TEXT NOT NULL)"


class TableSessions(DocumentSessions):
    """
    Conversations in a table, for threads and processes of one machine.

    Args:
        folder: The folder of the database and of the journals.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        with self._transaction() as table:
            table.execute(TABLE)

    def read_document(self, key: str) -> str | None:
        """Return a text."""
        with self._transaction() as table:
            row = table.execute("SELECT text FROM documents WHERE key = ?", (key,)).fetchone()
        return None if row is None else row[0]

    def write_document(self, key: str, text: str | None, replaces: str | None) -> bool:
        """Store a text if nothing else has changed it; a transaction makes this one step."""
        with self._transaction() as table:
            row = table.execute("SELECT text FROM documents WHERE key = ?", (key,)).fetchone()
            if (None if row is None else row[0]) != replaces:
                return False
            if text is None:
                table.execute("DELETE FROM documents WHERE key = ?", (key,))
            else:
                table.execute("REPLACE INTO documents VALUES (?, ?)", (key, text))
            return True

    def list_keys(self) -> Sequence[str]:
        """Return all keys."""
        with self._transaction() as table:
            return [key for (key,) in table.execute("SELECT key FROM documents")]

    def get_journal_location(self, session_id: str) -> JournalLocation:
        """Keep the journals of a session in a folder of its own."""
        return JournalLocation(folder=self._folder / "journals" / hashlib.sha256(session_id.encode()).hexdigest())

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Give a connection that no other writer disturbs; errors of SQLite become OSError."""
        try:
            database = sqlite3.connect(self._folder / "documents.db", timeout=10, isolation_level=None)
            try:
                database.execute("BEGIN IMMEDIATE")
                yield database
                database.execute("COMMIT")
            finally:
                database.close()
        except sqlite3.Error as error:
            msg = f"{self._folder / 'documents.db'}: {error}"
            raise OSError(msg) from error


def book(ctx: StepContext) -> Steps[str]:
    count = yield from Ask("For how many?")
    yield STEP
    return f"A table for {count}."


booking = AgentDefinition("booking", model="anthropic/claude-haiku-4-5", handle_steps=book)


def answer(folder: Path, words: str) -> str:
    """Answer one message with an engine that knows nothing but the store, as another process would."""
    model = ScriptedModel([text("I will see to it.")])
    with Engine([booking], models=model, sessions=TableSessions(folder)) as engine:
        result = engine.run_sync(booking, words, session_id="ann:7")
    return result.pending_questions[0].text if result.pending_questions else str(result.unwrap())


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        for words in ("A table, please.", "four"):
            said = answer(Path(name), words)
            print(f"ann: {words}\nbot: {said}")
    assert said == "A table for four."


if __name__ == "__main__":
    main()
