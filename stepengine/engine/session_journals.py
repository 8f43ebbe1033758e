"""
The journals of the runs in a session: where a store has them, and which of them have a run that is not saved in the session yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stepengine.errors import JournalError
from stepengine.journal import MemoryJournal
from stepengine.journal.pending_items import find_open_questions, find_waits
from stepengine.sessions import Session

if TYPE_CHECKING:
    from stepengine.data.waits import Waits
    from stepengine.journal import Journal
    from stepengine.journal.history import History


class SessionJournals:
    """
    The journals of the runs in one session, by name; those of later turns have greater names.

    Args:
        place: The place for them in the store, from ``TurnStore.get_journal_location``.
    """

    def __init__(self, place: Any) -> None:
        self.place = place

    def get_journal(self, name: str) -> Journal:
        """Return the journal with a name, existing or new."""
        from stepengine.journal import FileJournal, MemoryJournal, SqliteJournal

        place = self.place
        if place.memory is not None:
            kept: Journal = place.memory.setdefault(name, MemoryJournal())
            return kept
        if place.database is not None:
            return SqliteJournal(place.database, f"{place.prefix}{name}")
        return FileJournal(place.folder / f"{name}.jsonl")

    def list_journal_names(self) -> list[str]:
        """Return the names of the existing journals, sorted."""
        from stepengine.journal import SqliteJournal

        place = self.place
        if place.memory is not None:
            return sorted(place.memory)
        if place.database is not None:
            return [run.removeprefix(place.prefix) for run in SqliteJournal(place.database).runs(place.prefix)]
        return sorted(path.stem for path in place.folder.glob("*.jsonl"))

    def list_unsaved_journals(self, session: Session) -> list[str]:
        """Return the names of the journals whose runs went further than *session* knows."""
        if session.journal is not None and session.state is not None:
            waiting = {question.id for question in session.state.pending}
            history = load_history_or_none(self.get_journal(session.journal))
            if history is not None and (history.is_complete or set(find_open_questions(history)) != waiting):
                return [session.journal]
        new = [name for name in self.list_journal_names() if name.startswith(f"{session.turns + 1:06d}-")]
        known = {name: load_history_or_none(self.get_journal(name)) for name in new}
        return [name for name, history in known.items() if history and (history.is_complete or _is_suspended(history))]

    def make_session_reference(self, name: str) -> str:
        """Return the text that the session stores in ``Session.journal`` for a journal: its name."""
        return name

    def remove_old_journals(self, newest: str | None) -> None:
        """Remove all journals except the newest ones, whose number the store sets; *newest* is that of the saved run."""
        # A run that failed before it began leaves a journal of the same turn, and the end of a name is random.
        names = sorted(self.list_journal_names(), key=lambda name: name == newest)
        for name in names[: -self.place.keep]:
            if self.place.memory is not None:
                del self.place.memory[name]
            else:
                self.get_journal(name).discard()


class EmbeddedJournals(SessionJournals):
    """The journal of a suspended run, for stores that save it within the session and have no place of their own for journals."""

    def __init__(self, session: Session) -> None:
        super().__init__(None)
        self._kept = session.journal
        self._made: dict[str, Journal] = {}

    def get_journal(self, name: str) -> Journal:
        """Return the journal with a name; each time the same object."""
        known = name if name == self._kept else ""
        return self._made.setdefault(name, MemoryJournal(known))

    def list_unsaved_journals(self, _: Session) -> list[str]:
        """Return none: a journal that was not saved is lost with its process."""
        return []

    def make_session_reference(self, name: str) -> str:
        """Return the text that the session stores in ``Session.journal``: the whole journal."""
        return self._made[name].content().decode()

    def remove_old_journals(self, _: str | None) -> None:
        """Do nothing: each save replaces the journal before."""


def find_non_question_waits(journal: Journal) -> list[Waits]:
    """Return the waits of a suspended run, without those for answers of people."""
    history = load_history_or_none(journal)
    return [] if history is None else [one for one in find_waits(history) if one.kind != "question"]


def _is_suspended(history: History) -> bool:
    """Return whether a run was suspended. One that a crash interrupted is not resumed here."""
    is_stopped = history.stop is not None and history.stop.input["kind"] == "suspended"
    return bool(find_open_questions(history)) or (is_stopped and bool(find_waits(history)))


def load_history_or_none(journal: Journal) -> History | None:
    """Return the history of a journal; ``None`` if it is empty or cannot be read."""
    try:
        history = journal.history()
    except JournalError:
        return None
    return None if history.head is None else history
