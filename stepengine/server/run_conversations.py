"""``RunConversations``: the conversations that the runs of a server belong to."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import TYPE_CHECKING

from stepengine.engine.session_queue import SessionAccess
from stepengine.errors import InputError
from stepengine.server.ledger import OPEN, SessionRow, make_attach_runs_act, make_detach_runs_act
from stepengine.server.problems import Problem
from stepengine.server.run_messenger import SUSPEND_PAUSE_SECONDS, SUSPEND_SECONDS
from stepengine.server.run_requests import make_owner_session_key, require_permitted_owner

if TYPE_CHECKING:
    from stepengine.server.access import Caller
    from stepengine.server.current_engine import CurrentEngine
    from stepengine.server.run_reader import RunReader
    from stepengine.server.run_store import RunStore
    from stepengine.sessions import Session

MAX_OPEN = 100
"""The most unended runs of a conversation that are read before its deletion; one is enough to refuse it."""


class RunConversations:
    """
    Conversations by the names that their owners gave them. No one finds the conversation of another owner by its name.

    Args:
        store: The ledger.
        engines: The engine, whose session store has the messages.
        reader: Reads the status of runs.
    """

    def __init__(self, store: RunStore, engines: CurrentEngine, reader: RunReader) -> None:
        self._store = store
        self._engines = engines
        self._reader = reader

    @property
    def stores_messages(self) -> bool:
        """Whether the engine stores the messages of conversations."""
        return self._engines.engine.sessions is not None

    async def list_sessions(
        self, caller: Caller, *, owner: str | None, before: tuple[float, str] | None, limit: int
    ) -> list[SessionRow]:
        """
        Return the conversations of *caller*, those with the newest runs first; for an admin those of *owner*, by default of all.

        Raises:
            Problem: If *owner* is another one than *caller*, who is not an admin.
        """
        whose = None if owner is None and caller.may("admin") else require_permitted_owner(caller, owner)
        read = partial(self._store.ledger.list_sessions, owner=whose, before=before, limit=limit)
        return await self._store.run_slow_read(caller.name, read)

    async def get_session(
        self, caller: Caller, session: str, *, owner: str | None
    ) -> tuple[SessionRow, Session | None]:
        """
        Return a conversation of *caller*, or for an admin of *owner*, with the engine's session if it stores one.

        Raises:
            Problem: 404 if there is no such conversation.
        """
        whose = require_permitted_owner(caller, owner)
        key = make_owner_session_key(whose, session)
        read = partial(self._store.ledger.list_sessions, owner=whose, before=None, limit=1, session=key)
        found = await self._store.run_slow_read(caller.name, read)
        if not found:
            msg = f"there is no session {session[:200]!r}; GET /sessions lists your sessions"
            raise Problem(msg, status=404, kind="no_such_session")
        sessions = self._engines.engine.sessions
        return found[0], None if sessions is None else await sessions.load(key)

    async def delete_messages(self, caller: Caller, session: str, *, owner: str | None) -> None:
        """
        Delete the messages of a conversation, and detach its runs from it. If the deletion fails, nothing is changed.

        Raises:
            SessionError: If the session store fails.
            Problem: If there is no such conversation, one of its runs has not ended, or the engine cannot delete messages.
        """
        row, _ = await self.get_session(caller, session, owner=owner)
        await self._wait_until_ends_recorded(row.session)
        sessions = self._engines.engine.sessions
        if sessions is None or not sessions.can_delete:
            msg = "the messages of this conversation are not stored, or their store does not delete messages"
            raise Problem(msg, status=409, kind="not_possible")
        # First, because it is refused if another run of the conversation was registered since.
        try:
            runs = await self._store.write(make_detach_runs_act(row.session))
        except InputError as error:
            raise _make_run_not_ended_problem() from error
        # A run that starts meanwhile waits, and starts without these messages. It could not store its own otherwise.
        access = SessionAccess(sessions.queue, row.session)
        try:
            await access.enter()
            await sessions.delete(row.session)
        except BaseException:
            await self._store.write(make_attach_runs_act(row.session, runs))
            raise
        finally:
            access.leave()

    async def _wait_until_ends_recorded(self, session: str) -> None:
        """
        Wait until the ledger has the ends of all runs of a conversation; raise ``Problem`` if a run has not ended.

        Raises:
            Problem: If a run has not ended.
        """
        unended = partial(
            self._store.ledger.list_runs,
            owner=None,
            agent=None,
            statuses=OPEN,
            before=None,
            limit=MAX_OPEN,
            session=session,
        )
        until = time.monotonic() + SUSPEND_SECONDS
        while rows := await asyncio.to_thread(unended):
            statuses = [(await self._reader.load_details(row)).status for row in rows]
            if time.monotonic() > until or any(status in OPEN for status in statuses):
                raise _make_run_not_ended_problem()
            await asyncio.sleep(SUSPEND_PAUSE_SECONDS)


def _make_run_not_ended_problem() -> Problem:
    msg = "a run of this conversation has not ended; answer its questions or cancel it first"
    return Problem(msg, status=409, kind="under_way")
