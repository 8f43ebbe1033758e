"""``RunReader``: finds the runs of a server, and reads their status, result and records from handles or journals."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
from attrs import frozen

from stepengine.data.codec import plain
from stepengine.data.state import AgentState
from stepengine.data.usage import Spending
from stepengine.errors import JournalError, JournalMissing, StepEngineError
from stepengine.journal.pending_items import find_open_questions, find_waits
from stepengine.journal.provenance import are_calls_trusted
from stepengine.journal.questions import make_doubt_questions
from stepengine.journal.show import compute_spending, find_root_end, get_run_status
from stepengine.server.ledger import OPEN, RunRow
from stepengine.server.live_runs import RUNNING
from stepengine.server.run_requests import make_owner_session_key, require_own_run, require_permitted_owner
from stepengine.server.run_summaries import RunSummaries, remove_oldest_entries
from stepengine.server.stored_states import decode_state_with_references

if TYPE_CHECKING:
    from stepengine.data.questions import Question
    from stepengine.data.waits import Waits
    from stepengine.engine import Engine
    from stepengine.journal.history import History
    from stepengine.journal.store import Journal
    from stepengine.server.access import Caller
    from stepengine.server.current_engine import CurrentEngine
    from stepengine.server.live_runs import LiveRuns
    from stepengine.server.run_store import RunStore
    from stepengine.server.run_summaries import RunListSummary

MAX_DETAILS = 200
"""How many ended runs have their details in memory: about as many as the studio lists on a few pages."""


@frozen(kw_only=True)
class ServedRun:
    """
    The details of a run, as the HTTP API returns it.

    Attributes:
        row: The row of the run in the ledger.
        status: ``"running"`` while a process executes it, else how it ended, ``"suspended"`` or ``"stranded"``.
        phase: The current activity of a run of this process.
        epoch: The beginning of the ids of its events, for a run of this process.
        questions: Its open questions.
        output: Its output.
        text: The output as text.
        error: Why it failed.
        usage: Tokens.
        cost: US dollars; ``None`` if a price is unknown.
        waits_for: What a suspended run waits for.
        parent: Of a fork the id of its parent, ``run``, and the last effect that it kept, ``at``.
        warnings: Of an ended run, its warnings and those of its children.
    """

    row: RunRow
    status: str
    phase: str | None = None
    epoch: str | None = None
    questions: tuple[Question, ...] = ()
    output: Any = None
    text: str = ""
    error: str = ""
    usage: Any = None
    cost: Any = None
    waits_for: tuple[Waits, ...] = ()
    parent: Mapping[str, str] | None = None
    warnings: tuple[str, ...] = ()


class RunReader:
    """
    Reads runs.

    Args:
        store: The journals and the ledger.
        live: The runs of this process.
        engines: The engine, which replays a journal whose state is stored nowhere else.

    Attributes:
        copies_journals: Always ``False``: ``get_journal`` returns what runs write.
    """

    copies_journals = False

    def __init__(self, store: RunStore, live: LiveRuns, engines: CurrentEngine) -> None:
        self._store = store
        self._live = live
        self._engines = engines
        self._summaries = RunSummaries(store.journal)
        self._details: OrderedDict[tuple[str, str, float], ServedRun] = OrderedDict()

    async def get_run(self, caller: Caller, run: str) -> RunRow:
        """
        Return a run that *caller* may see; if it has just ended in this process, wait until its end is recorded.

        Raises:
            Problem: 404 for a missing run and for a run of another owner, which look the same.
        """
        was_here = self._live.has_run_without_recorded_end(run)
        row = await self._store.find(run)
        if row is not None and row.status in (*RUNNING, "stranded") and was_here and run not in self._live:
            # The caller may have seen the end of the run, and must not be told that it runs. Whether this process records
            # the end was checked before the row was read, since that may finish meanwhile.
            await self._live.wait_until_end_recorded(run)
            row = await self._store.find(run)
        return require_own_run(caller, run, row)

    async def list_runs(
        self,
        caller: Caller,
        *,
        agent: str | None,
        statuses: Sequence[str],
        before: tuple[float, str] | None,
        limit: int,
        owner: str | None = None,
        session: str | None = None,
        search: str | None = None,
    ) -> list[RunRow]:
        """
        Return the runs of *caller*, newest first; for an admin those of all owners.

        *owner* selects the runs of one owner; only an admin may name another one. *session* selects those of a conversation of *owner*, by default
        of *caller*. *search* selects those whose request, id or agent contains it.

        Raises:
            Problem: If *owner* is another one than *caller*, who is not an admin.
        """
        whose = require_permitted_owner(caller, owner)
        is_everybodys = owner is None and session is None and caller.may("admin")
        return await self._store.run_slow_read(
            caller.name,
            partial(
                self._store.ledger.list_runs,
                owner=None if is_everybodys else whose,
                agent=agent,
                statuses=statuses,
                before=before,
                limit=limit,
                session=None if session is None else make_owner_session_key(whose, session),
                search=search,
            ),
        )

    async def count_runs_by_agent_and_status(self) -> list[tuple[str, str, int]]:
        """Return (agent, status, number of runs) by agent and status."""
        query = "SELECT agent, status, count(*) FROM served GROUP BY agent, status"
        return await asyncio.to_thread(self._store.ledger.read, query)

    async def load_details(self, row: RunRow) -> ServedRun:
        """Return the details of a run: from its handle if this process has it, else from its journal."""
        handle = self._live.handles.get(row.run)
        if handle is not None:
            return ServedRun(
                row=row,
                status="running",
                phase=handle.phase.value,
                epoch=handle.epoch,
                questions=handle.questions,
                parent=await asyncio.to_thread(_find_fork_parent, self._store.journal(row.run)),
            )
        # A run that does not run does not change, so its journal is read once.
        key = (row.run, row.status, row.changed)
        known = self._details.get(key)
        if known is not None:
            return attrs.evolve(known, row=row)
        try:
            details = await self.read_details_from_journal(row)
        except JournalMissing:
            return ServedRun(row=row, status="running" if row.status in RUNNING else row.status, error=row.error)
        if details.status not in (*OPEN, "stranded"):
            # The run may have been resumed, and have ended, since it was looked up here. The caller must not be told that it
            # runs after its end was shown.
            await self._live.wait_until_end_recorded(row.run)
        if row.status not in RUNNING:
            self._details[key] = details
            remove_oldest_entries(self._details, MAX_DETAILS)
        return details

    async def read_details_from_journal(self, row: RunRow) -> ServedRun:
        """Return the details of a run that its journal has; raise ``JournalMissing`` if there is none."""
        return await asyncio.to_thread(self._read_details, row)

    def _read_details(self, row: RunRow) -> ServedRun:
        """Return the status, questions, result and cost of a run from its journal."""
        journal = self._store.journal(row.run)
        history = journal.history()
        ended, spending = find_root_end(history), compute_spending(history)
        questions = [] if ended is not None else [one for _, one in find_open_questions(history).values()]
        if ended is None and row.status == "suspended":
            # Only of a suspended run: every effect that another process executes now would look in doubt.
            questions += make_doubt_questions(history, trusts_calls=are_calls_trusted(journal))
        error = row.error if ended is None or ended.error is None else str(ended.error)
        handle = self._live.find_ended_handle(row.run)
        return ServedRun(
            row=row,
            status=_compute_status(row, history),
            epoch=None if handle is None else handle.epoch,
            questions=tuple(questions),
            output=None if ended is None else plain(ended.output),
            text="" if ended is None else ended.text,
            error=error,
            usage=plain(spending.usage),
            cost=None if spending.cost is None else str(spending.cost),
            # The record of a run that another process executes may be behind.
            waits_for=tuple(find_waits(history)) if ended is None and row.status == "suspended" else (),
            parent=None if history.head is None else history.head.parent,
            warnings=() if ended is None else ended.warnings,
        )

    async def load_or_replay_state(self, row: RunRow) -> AgentState:
        """
        Return the last state of a run that is not running, from the ledger or else by a replay with the current agents.

        Raises:
            JournalError: If the ledger lacks the state, and the journal cannot be read.
            ReplayDivergence: If the ledger lacks the state, and the agent diverges from the record.
        """
        stored = None
        if row.session is not None:
            stored = await asyncio.to_thread(self._store.ledger.find_conversation_state_json, row)
        if stored is not None:
            return await asyncio.to_thread(decode_state_with_references, stored, self._store.journal(row.run))
        journal = self._store.journal(row.run)
        # A run that was cancelled before it started has no journal.
        if row.status == "stranded" or (row.status == "cancelled" and not await asyncio.to_thread(journal.is_there)):
            return await self._replay_stranded_state(row, journal)
        return (await self._engines.engine.replay(journal, on_divergence="keep")).state

    async def _replay_stranded_state(self, row: RunRow, journal: Journal) -> AgentState:
        """Replay a stranded run as far as possible and return its state; else return the last state of the run before it."""
        replay = self._engines.engine.replay
        with contextlib.suppress(StepEngineError):
            return (await replay(journal, on_divergence="keep")).state
        with contextlib.suppress(StepEngineError):
            return (await replay(journal, on_divergence="stop")).state
        before = await self._store.find((row.request.get("turn") or {}).get("after") or "")
        return AgentState() if before is None else await self.load_or_replay_state(before)

    async def load_summary(self, row: RunRow) -> RunListSummary:
        """Return the summary of a run from its journal; an empty one if it cannot be read."""
        return await self._summaries.load_summary(row)

    async def get_journal(self, row: RunRow) -> Journal:
        """Return the journal of a run, which grows while the run is executed."""
        return self._store.journal(row.run)

    def get_engine_for_run(self, row: RunRow) -> Engine:
        """Return the engine that executes a run, or else would resume it."""
        return self._engines.get_engine_for_run(row.run)

    async def read_journal_bytes(self, row: RunRow) -> bytes:
        """Return the bytes of the journal of a run."""
        return await asyncio.to_thread(lambda: self._store.journal(row.run).content())

    async def load_spending(self, row: RunRow) -> Spending:
        """Return the tokens and the cost of a run according to its journal; zero without a journal."""
        journal = self._store.journal(row.run)
        try:
            return await asyncio.to_thread(lambda: compute_spending(journal.history()))
        except JournalMissing:
            return Spending()


def _find_fork_parent(journal: Journal) -> Mapping[str, str] | None:
    """Return the run and the effect that a run was forked from; ``None`` for others, and before the first record."""
    try:
        head = journal.head()
    except JournalError:
        return None
    return None if head is None else head.parent


def _compute_status(row: RunRow, history: History) -> str:
    """Return the status of a run by its row and its journal, which may be newer than the row."""
    if history.is_complete:
        return get_run_status(history)
    if row.status not in OPEN:
        # The journal of a cancelled run has no result and could be resumed; the ledger says that it is not.
        return row.status
    return "suspended" if "suspended" in (row.status, get_run_status(history)) else "running"
