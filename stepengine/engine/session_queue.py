"""
``SessionQueue`` and ``SessionAccess``: one run at a time works in a session, and no run waits for a run that waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import weakref
from collections import deque
from concurrent.futures import Future
from typing import Any

import attrs
from attrs import frozen

from stepengine.errors import SessionError
from stepengine.workspace.after_fork import Lock, call_in_forked_child, register_for_fork_reset


@frozen(eq=False)
class QueueEntry:
    """An entry in the queue of a session; the first one has access."""

    loop: asyncio.AbstractEventLoop
    let_in: Future[None] = attrs.field(factory=Future)


class SessionQueue:
    """
    Gives runs access to the sessions of a store: one run at a time for each session, in order of arrival, across event loops.

    An entry is dropped when its event loop is closed: no one would ever remove it.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._lines: dict[str, deque[QueueEntry]] = {}
        register_for_fork_reset(self)

    def reset_after_fork(self) -> None:
        """Remove all entries in a forked child: their runs are in the parent."""
        self._lines.clear()

    async def enter(self, session_id: str) -> QueueEntry:
        """Wait for access to a session; return the entry, which ``leave`` removes."""
        # A line for each session, over all event loops of the process: two messages of one person must not start from
        # the same state, or the second save would overwrite the first answer (reliability:SS01). Futures of threads, as
        # those who wait may be in different loops.
        mine = QueueEntry(asyncio.get_running_loop())
        with self._lock:
            line = self._lines.setdefault(session_id, deque())
            line.append(mine)
            _admit_first(line)
        if mine.let_in.done():
            return mine
        try:
            await asyncio.wrap_future(mine.let_in)
        # Whoever gives up while waiting may have been let in at that very moment; then the place has to be given back.
        except BaseException:
            if not mine.let_in.cancel():
                self.leave(session_id, mine)
            raise
        return mine

    def leave(self, session_id: str, entry: QueueEntry) -> None:
        """Remove an entry and let the next one in; does nothing when it was dropped."""
        with self._lock:
            line = self._lines.get(session_id)
            if not line or line[0] is not entry:
                return
            line.popleft()
            _admit_first(line)
            if not line:
                del self._lines[session_id]


def _admit_first(line: deque[QueueEntry]) -> None:
    """Drop ended waiters from the head of a queue, and let in the first one that is left."""
    while line and (line[0].loop.is_closed() or line[0].let_in.cancelled()):
        line.popleft()
    if line and not line[0].let_in.done() and line[0].let_in.set_running_or_notify_cancel():
        line[0].let_in.set_result(None)


_queues: weakref.WeakKeyDictionary[Any, SessionQueue] = weakref.WeakKeyDictionary()
"""By store: engines that share a store share its queue."""
_queues_lock = Lock()
_inside: contextvars.ContextVar[tuple[SessionAccess, ...]] = contextvars.ContextVar("stepengine_turns", default=())
"""The accesses of the runs that the code of this context is a part of."""
_owners: dict[tuple[int, str], SessionAccess] = {}
"""The access in force, by queue and session."""
_waiting: set[SessionAccess] = set()


@call_in_forked_child
def _reset_after_fork() -> None:
    _owners.clear()
    _waiting.clear()


def get_session_queue(store: object) -> SessionQueue:
    """Return the queue of a session store, which all engines with this store share."""
    with _queues_lock:
        try:
            return _queues.setdefault(store, SessionQueue())
        except TypeError:  # it cannot be referred to weakly
            return SessionQueue()


class SessionAccess:
    """
    The access of one run to a session.

    Args:
        queue: The queue of the session's store.
        session_id: The session.

    Attributes:
        place: The queue and the session.
        enclosing: The accesses of the runs in which this run was started.
    """

    def __init__(self, queue: SessionQueue, session_id: str) -> None:
        self.place = id(queue), session_id
        self.enclosing: tuple[SessionAccess, ...] = ()
        self._queue = queue
        self._session_id = session_id
        self._entry: QueueEntry | None = None
        self._token: contextvars.Token[tuple[SessionAccess, ...]] | None = None

    async def enter(self) -> None:
        """
        Wait until the run has access; raise ``SessionError`` if it would wait for itself.

        Raises:
            SessionError: when it would wait for a run that waits, itself or through others, for this one.
        """
        self.enclosing = _inside.get()
        with _queues_lock:
            self._refuse_deadlock()
            _waiting.add(self)
        try:
            self._entry = await self._queue.enter(self._session_id)
        finally:
            _waiting.discard(self)
        _owners[self.place] = self

    def mark_context(self) -> None:
        """Mark the current context as a part of the run, so that a run started in it cannot wait for this session."""
        self._token = _inside.set((*_inside.get(), self))

    def leave(self) -> None:
        """Let the next run into the session; may be called twice."""
        entry, self._entry = self._entry, None
        if entry is None:
            return
        if _owners.get(self.place) is self:
            del _owners[self.place]
        self._queue.leave(self._session_id, entry)
        if self._token is not None:
            with contextlib.suppress(ValueError):  # in another context than the one that is left
                _inside.reset(self._token)

    def _refuse_deadlock(self) -> None:
        """Raise ``SessionError`` if this run would wait for a run that waits for it, directly or through others."""
        # Found before it happens: two runs that wait for each other's session wait without a word, and for ever.
        places, seen = [self.place], set[SessionAccess]()
        while places:
            owner = _owners.get(places.pop())
            if owner is None or owner in seen:
                continue
            if owner in self.enclosing:
                msg = (
                    f"a run in the session {self._session_id!r} was started inside a run that it must wait for, so neither "
                    "can end. Start it after that run has ended, or in another session"
                )
                raise SessionError(msg)
            seen.add(owner)
            places += [access.place for access in _waiting if owner in access.enclosing]
