"""``RunTurns``: the turns of conversations that pages and MCP clients take: a run that starts, or that is answered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from stepengine.data.events import RunFinished
from stepengine.data.state import AgentState, RunResult, RunStatus
from stepengine.errors import StepEngineError
from stepengine.journal.event_stream import FIRST_PAUSE_SECONDS, JournalWatch, compute_next_pause
from stepengine.journal.pending_items import find_waits
from stepengine.journal.show import compute_spending, find_root_end
from stepengine.server.ledger import OPEN, RunRow, make_store_shown_message_act
from stepengine.server.live_runs import RUNNING
from stepengine.server.run_requests import require_session_key

if TYPE_CHECKING:
    from stepengine.data.events import Event
    from stepengine.data.questions import AnswerLike
    from stepengine.journal.history import History
    from stepengine.runtime.handle import RunHandle
    from stepengine.server.access import Caller
    from stepengine.server.live_runs import LiveRuns
    from stepengine.server.run_messenger import RunMessenger
    from stepengine.server.run_reader import RunReader
    from stepengine.server.run_store import RunStore


class RunTurns:
    """
    Turns of conversations. Each turn streams its events and ends with a result.

    Args:
        store: The journals and the ledger.
        live: The runs of this process.
        reader: Finds runs and reads their states.
        messenger: Delivers answers.
    """

    def __init__(self, store: RunStore, live: LiveRuns, reader: RunReader, messenger: RunMessenger) -> None:
        self._store = store
        self._live = live
        self._reader = reader
        self._messenger = messenger

    async def find_newest_run(self, caller: Caller, session: str) -> RunRow | None:
        """Return the last run of a conversation of *caller*, after waiting until its end is recorded if it has just ended."""
        read = partial(self._store.ledger.find_newest_run, caller.name, require_session_key(caller, session))
        row = await asyncio.to_thread(read)
        handle = None if row is None else self._live.handles.get(row.run)
        if row is not None and (handle.done if handle is not None else row.status in RUNNING):
            await self._live.wait_until_end_recorded(row.run)
            row = await asyncio.to_thread(read)
        return row

    async def load_or_replay_state(self, row: RunRow) -> AgentState:
        """Return the last state of an idle run, from the ledger or else by a replay with the current agents."""
        return await self._reader.load_or_replay_state(row)

    async def load_result(self, row: RunRow) -> RunResult:
        """Return the result of an idle run, from its journal and its last state."""
        state = await self.load_or_replay_state(row)
        return await asyncio.to_thread(_result_from_state, self._store.journal(row.run).history, row, state)

    async def find_last_event_id(self, row: RunRow) -> str | None:
        """Return the id of the last event in the journal of a run."""
        return await asyncio.to_thread(_read_last_event_id, JournalWatch(self._store.journal(row.run)))

    async def answer_and_stream(
        self,
        caller: Caller,
        row: RunRow,
        answers: Mapping[str, AnswerLike],
        *,
        after: str | None = None,
        page_questions: Collection[str] = (),
        user_input: str = "",
    ) -> AsyncGenerator[Event, None]:
        """
        Answer a suspended run, and return the events of its resumption.

        Args:
            caller: The caller who answers.
            row: The run.
            answers: By the ids of their questions.
            after: The last event that the client has, for a run that another process resumes.
            page_questions: The questions that a tool of the page answers, and not *caller*.
            user_input: User input that the next model call gets with the answers.

        The errors are those of ``RunMessenger.answer``.
        """
        handle = await self._messenger.answer_and_find_handle(
            caller, row, answers, page_questions=page_questions, user_input=user_input
        )
        return self._stream_handle_or_journal(caller, row.run, handle, after)

    def events(self, caller: Caller, row: RunRow, after: str | None = None) -> AsyncGenerator[Event, None]:
        """
        Yield the events of a run from the first one, or from the one after the event *after*.

        The texts of a run that started in this process are in pieces, those of others are whole.
        """
        handle = self._live.find_complete_handle(row) if after is None else None
        return self._stream_handle_or_journal(caller, row.run, handle, after)

    def _stream_handle_or_journal(
        self, caller: Caller, run: str, handle: RunHandle | None, after: str | None
    ) -> AsyncGenerator[Event, None]:
        """Return the events of a handle, or else those of the journal after the event *after*."""
        if handle is None:
            return self._follow_journal(caller, run, after)
        return self._delay_last_event(run, handle.events())

    async def _follow_journal(self, caller: Caller, run: str, after: str | None) -> AsyncGenerator[Event, None]:
        """Yield the events of a run from its journal until it is idle, then its result."""
        watch, pause = JournalWatch(self._store.journal(run), after), FIRST_PAUSE_SECONDS
        while True:
            is_idle = await self._is_idle(run)  # first: what was written before that is read by now
            events = await asyncio.to_thread(watch.read_new_events)
            for event in events:
                # A run that was stopped and resumed would show a second end.
                if not isinstance(event, RunFinished) or event.path:
                    yield event
            if is_idle and not watch.is_behind:
                break
            pause = compute_next_pause(pause, has_news=bool(events))
            await asyncio.sleep(0 if watch.is_behind else pause)
        row = await self._reader.get_run(caller, run)
        yield RunFinished(result=await self.load_result(row), run_id=run)

    async def _is_idle(self, run: str) -> bool:
        """Return whether no process executes the run, so that its state only changes when it is resumed."""
        row = await self._store.find(run)
        return row is None or (row.status not in RUNNING and run not in self._live)

    async def _delay_last_event(self, run: str, events: AsyncGenerator[Event, None]) -> AsyncGenerator[Event, None]:
        """Yield events; the last one only after the ledger has the end of the run, so that the next turn may start."""
        try:
            async for event in events:
                if isinstance(event, RunFinished) and not event.path:
                    await self._live.wait_until_end_recorded(run)
                yield event
        finally:
            await events.aclose()

    async def store_shown_message(self, run: str, message: str, after_event: str) -> None:
        """Store the id of the newest page message of a run, and the event *after_event* before its start."""
        await self._store.write(make_store_shown_message_act(run, message, after_event))

    async def find_shown_message(self, run: str) -> tuple[str, str] | None:
        """Return the (message id, event id) that ``store_shown_message`` stored for a run; ``None`` without one."""
        return await asyncio.to_thread(self._store.ledger.find_shown_message, run)


def _read_last_event_id(watch: JournalWatch) -> str | None:
    """Read all new events of *watch*, and return the id of the last one; ``None`` without events."""
    last: str | None = None
    while watch.is_behind:
        for event in watch.read_new_events():
            last = event.id or last
    return last


def _result_from_state(read_history: Callable[[], History], row: RunRow, state: AgentState) -> RunResult:
    """Return the result of a run that no process executes, from its last state *state*."""
    if row.status == "stranded":  # its journal may be missing
        return RunResult(status=RunStatus.FAILED, state=state, error=StepEngineError(row.error))
    history = read_history()
    ended = find_root_end(history)
    if ended is None:
        # The journal of a stopped run has no result, nor has that of one that can be resumed.
        status = RunStatus.SUSPENDED if row.status in OPEN else RunStatus(row.status)
        waits = tuple(find_waits(history)) if row.status in OPEN else ()
        more: dict[str, Any] = {"pending_questions": state.pending, "waits_for": waits}
        return RunResult(status=status, state=state, spending=compute_spending(history), **more)
    return RunResult(
        status=ended.status,
        output=ended.output,
        text=ended.text,
        error=ended.error,
        spending=ended.spending,
        state=state,
        warnings=ended.warnings,
    )
