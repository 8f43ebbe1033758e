"""``RunConversations``: the conversations that the runs of a server belong to."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import TYPE_CHECKING

from stepengine.errors import InputError
from stepengine.server.ledger import OPEN, RunRow, SessionRow, make_detach_act, make_shown_message_act
from stepengine.server.live_runs import RUNNING
from stepengine.server.problems import Problem
from stepengine.server.run_messenger import SUSPEND_PAUSE_SECONDS, SUSPEND_SECONDS
from stepengine.server.run_requests import make_session_key, resolve_owner, session_key

if TYPE_CHECKING:
    from stepengine.server.access import Caller
    from stepengine.server.current_engine import CurrentEngine
    from stepengine.server.live_runs import LiveRuns
    from stepengine.server.run_reader import RunReader
    from stepengine.server.run_store import RunStore
    from stepengine.sessions import Session

MAX_OPEN = 100
"""How many unended runs of a conversation are read before it is deleted; one of them is enough to refuse."""


class RunConversations:
    """
    Conversations by the names that their owners gave them. No one finds the conversation of another owner by its name.

    Args:
        store: The ledger.
        live: The runs of this process.
        engines: The engine, whose session store has the messages.
        reader: Reads the status of runs.
    """

    def __init__(self, store: RunStore, live: LiveRuns, engines: CurrentEngine, reader: RunReader) -> None:
        self._store = store
        self._live = live
        self._engines = engines
        self._reader = reader

    async def listed(
        self, caller: Caller, *, owner: str | None, before: tuple[float, str] | None, limit: int
    ) -> list[SessionRow]:
        """
        Return the conversations of *caller*, for an admin those of everybody, with the newest runs first.

        Raises:
            Problem: when *owner* is somebody else, and *caller* no admin.
        """
        whose = None if owner is None and caller.may("admin") else resolve_owner(caller, owner)
        read = partial(self._store.ledger.sessions, owner=whose, before=before, limit=limit)
        return await self._store.scan(caller.name, read)

    async def get(self, caller: Caller, session: str, *, owner: str | None) -> tuple[SessionRow, Session | None]:
        """
        Return a conversation of *caller*, or for an admin of *owner*, with the engine's session if it stores one.

        Raises:
            Problem: when there is no such conversation.
        """
        whose = resolve_owner(caller, owner)
        key = session_key(whose, session)
        read = partial(self._store.ledger.sessions, owner=whose, before=None, limit=1, session=key)
        found = await self._store.scan(caller.name, read)
        if not found:
            msg = f"there is no session {session[:200]!r}"
            raise Problem(msg, status=404, kind="no_such_session")
        sessions = self._engines.engine.sessions
        return found[0], None if sessions is None else await sessions.load(key)

    async def forget(self, caller: Caller, session: str, *, owner: str | None) -> None:
        """
        Delete the messages of a conversation; its runs stay.

        Raises:
            Problem: when there is no such conversation, one of its runs has not ended, or the engine cannot delete it.
        """
        row, _ = await self.get(caller, session, owner=owner)
        await self._wait_until_ends_recorded(row.session)
        sessions = self._engines.engine.sessions
        if sessions is None or not await sessions.delete(row.session):
            msg = "what was said in this conversation is kept nowhere, or where nothing is deleted"
            raise Problem(msg, status=409, kind="not_possible")
        try:
            await self._store.write(make_detach_act(row.session))
        except InputError as error:
            raise _make_run_not_ended_problem() from error

    async def _wait_until_ends_recorded(self, session: str) -> None:
        """
        Wait until the ledger has the ends of those runs of a conversation that have just ended.

        Raises:
            Problem: when one of them has not.
        """
        unended = partial(
            self._store.ledger.listed,
            owner=None,
            agent=None,
            statuses=OPEN,
            before=None,
            limit=MAX_OPEN,
            session=session,
        )
        until = time.monotonic() + SUSPEND_SECONDS
        while rows := await asyncio.to_thread(unended):
            statuses = [(await self._reader.details(row)).status for row in rows]
            if time.monotonic() > until or any(status in OPEN for status in statuses):
                raise _make_run_not_ended_problem()
            await asyncio.sleep(SUSPEND_PAUSE_SECONDS)

    async def find_newest_run(self, caller: Caller, session: str) -> RunRow | None:
        """Return the last run of a conversation of *caller*; one that has just ended once its end is in the ledger."""
        read = partial(self._store.ledger.newest, caller.name, make_session_key(caller, session))
        row = await asyncio.to_thread(read)
        handle = None if row is None else self._live.handles.get(row.run)
        if row is not None and (handle.done if handle is not None else row.status in RUNNING):
            await self._live.wait_recorded(row.run)
            row = await asyncio.to_thread(read)
        return row

    async def store_shown_message(self, run: str, message: str, place: str) -> None:
        """Store the id of the newest message that shows a run on a page, which starts after the event *place*."""
        await self._store.write(make_shown_message_act(run, message, place))

    async def find_shown_message(self, run: str) -> tuple[str, str] | None:
        """Return the message id and the event that ``store_shown_message`` stored for a run."""
        return await asyncio.to_thread(self._store.ledger.find_shown_message, run)


def _make_run_not_ended_problem() -> Problem:
    msg = "a run of this conversation has not ended; answer what it asks, or cancel it, first"
    return Problem(msg, status=409, kind="under_way")
