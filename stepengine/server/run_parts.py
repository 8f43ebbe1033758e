"""
``RunService``: the runs of a server, and the interfaces of its parts.

``Runs`` has its runs in a folder or an SQLite file, ``DurableRuns`` in a PostgreSQL database. They differ only in these parts. A part that
a database does not support is ``None``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from stepengine.server.access import require_caller

if TYPE_CHECKING:
    from starlette.requests import Request

    from stepengine.data.events import Event
    from stepengine.data.questions import AnswerLike
    from stepengine.data.state import RunResult
    from stepengine.data.usage import Spending
    from stepengine.engine import Engine
    from stepengine.engine.scheduler import ScheduleStatus
    from stepengine.journal import ForkReport
    from stepengine.journal.file_undo import UndoResult
    from stepengine.journal.store import Journal
    from stepengine.runtime.hub import ObserverLike
    from stepengine.server.access import Caller
    from stepengine.server.foreign_runs import ForeignRuns
    from stepengine.server.ledger import Ledger, RunRow, SessionRow
    from stepengine.server.problems import Problem
    from stepengine.server.quotas import QuotaTable
    from stepengine.server.run_reader import ServedRun
    from stepengine.server.run_requests import ForkRun, ResumeRun, StartRequest
    from stepengine.server.run_summaries import RunListSummary
    from stepengine.server.run_turns import RunTurns
    from stepengine.server.watchers import ReaderPosition
    from stepengine.sessions import Session


class ServiceState:
    """
    The state of a server process.

    Attributes:
        stopping: Is set when the server starts to stop.
        is_ready: Whether runs can be started.
        is_away: Whether the database cannot be reached; always False for runs on a disk.
    """

    def __init__(self) -> None:
        self.stopping = asyncio.Event()
        self.is_ready = self.is_away = False


class LauncherPart(Protocol):
    """Starts, resumes and forks runs."""

    async def start(self, caller: Caller, asked: StartRequest, *, key: str | None = None) -> tuple[str, bool]:
        """Start a run, and return its id and whether it is new: a repeated *key* returns the earlier run."""

    async def resume(self, row: RunRow, asked: ResumeRun | None = None) -> None:
        """Resume a run that stopped without a result."""

    async def replay(self, row: RunRow, live_effects: Collection[str]) -> RunResult:
        """Replay a run with the current agents, and return its result; perform the effects of the kinds *live_effects* again."""

    async def fork(self, caller: Caller, row: RunRow, asked: ForkRun) -> str | tuple[RunRow, ForkReport]:
        """Fork a run and return the id of the new run. If the record answers tools (``asked.tools``), return the ended run and a report."""


class ReaderPart(Protocol):
    """Finds and reads runs."""

    @property
    def copies_journals(self) -> bool:
        """Whether ``get_journal`` makes a copy, which does not grow with the run."""

    async def get_run(self, caller: Caller, run: str) -> RunRow:
        """Return a run by its id; raise ``Problem`` 404 if it is missing or *caller* may not see it."""

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
        """Return the runs of *caller*, newest first; for an admin those of *owner*, by default of all owners."""

    async def count_runs_by_agent_and_status(self) -> list[tuple[str, str, int]]:
        """Return (agent, status, number of runs) by agent and status."""

    async def load_details(self, row: RunRow) -> ServedRun:
        """Return the status, open questions, result and cost of a run."""

    async def load_summary(self, row: RunRow) -> RunListSummary:
        """Return the steps, cost, waits and output of a run for a list."""

    async def get_journal(self, row: RunRow) -> Journal:
        """Return the journal of a run, or a copy of it."""

    def get_engine_for_run(self, row: RunRow) -> Engine:
        """Return the engine that executes a run, or else would resume it."""

    async def read_journal_bytes(self, row: RunRow) -> bytes:
        """Return the bytes of the journal of a run."""

    async def load_spending(self, row: RunRow) -> Spending:
        """Return the tokens and the cost of a run."""


class WatcherPart(Protocol):
    """Streams the events of runs to clients."""

    def parse_position(self, after: str | None) -> ReaderPosition | None:
        """Return the position of a client that reconnects with the id *after*; ``None`` if the id alone is the position."""

    def events(self, row: RunRow, after: str | None) -> AsyncGenerator[Event, None]:
        """Return the events of a run from the first one, or after the event *after*."""

    async def may_have_no_more_events(self, row: RunRow, after: str | None) -> bool:
        """Return True if no process executes the run, so that no event may follow the event *after*; may raise for *after*."""


class MessengerPart(Protocol):
    """Delivers answers, messages, input, cancels and tool results."""

    async def answer(self, caller: Caller, row: RunRow, answers: Mapping[str, AnswerLike]) -> None:
        """Answer open questions, all or none of them."""

    async def list_stored_answers(self, row: RunRow, questions: Collection[str]) -> list[tuple[str, str, str]]:
        """Return (question id, answerer, answer) for those of *questions* that have a stored answer."""

    async def send_message(self, row: RunRow, topic: str, value: object, *, id: str | None, path: str) -> bool:
        """Send a message to the receiver of *topic*; return False if *id* was sent before."""

    async def send_user_input(self, row: RunRow, text: str) -> None:
        """Send user input to a run: its next model call gets it."""

    async def cancel(self, row: RunRow, reason: str) -> None:
        """Cancel a run; one that has ended stays as it is."""

    async def deliver_tool_result(self, row: RunRow, call_id: str, result: object, path: str | None) -> None:
        """Deliver the result of a call of a deferred tool."""


class ConversationsPart(Protocol):
    """The conversations that runs belong to."""

    @property
    def stores_messages(self) -> bool:
        """Whether the messages of conversations are stored apart from their runs."""

    async def list_sessions(
        self, caller: Caller, *, owner: str | None, before: tuple[float, str] | None, limit: int
    ) -> list[SessionRow]:
        """Return the conversations of *caller*, those with the newest runs first; for an admin those of *owner*, by default of all."""

    async def get_session(
        self, caller: Caller, session: str, *, owner: str | None
    ) -> tuple[SessionRow, Session | None]:
        """Return a conversation of *caller*, or for an admin of *owner*."""

    async def delete_messages(self, caller: Caller, session: str, *, owner: str | None) -> None:
        """Delete the messages of a conversation; its runs stay."""


class RunService(Protocol):
    """The runs of one engine, for many callers."""

    @property
    def state(self) -> ServiceState:
        """Whether the server is stopping, and whether runs can be started."""

    @property
    def quotas(self) -> QuotaTable:
        """The quotas, and the usage of each owner."""

    @property
    def launcher(self) -> LauncherPart:
        """Starts, resumes and forks runs."""

    @property
    def reader(self) -> ReaderPart:
        """Finds and reads runs."""

    @property
    def watcher(self) -> WatcherPart:
        """The event streams of runs."""

    @property
    def messenger(self) -> MessengerPart:
        """Delivers answers, messages and cancels."""

    @property
    def conversations(self) -> ConversationsPart:
        """The conversations of the runs."""

    @property
    def turns(self) -> RunTurns | None:
        """The turns of conversations over AG-UI, Vercel's protocol and MCP; ``None`` for runs in a database."""

    @property
    def foreign(self) -> ForeignRuns | None:
        """The journals of the storage location that no server started; ``None`` for runs in a database."""

    @property
    def ledger(self) -> Ledger | None:
        """The ledger from which webhooks are sent; ``None`` for runs in a database."""

    @property
    def engine(self) -> Engine:
        """The engine that has the agents."""

    @property
    def agents(self) -> tuple[str, ...]:
        """The ids of the agents that may be started."""

    @property
    def load_problem(self) -> Problem | None:
        """Why the files of the engine cannot be loaded as they are now; ``None`` if they can."""

    @property
    def live_count(self) -> int:
        """The number of runs that this process executes."""

    @property
    def open_question_count(self) -> int:
        """The number of unanswered questions of the runs that this process executes."""

    def add_observer(self, observer: ObserverLike) -> None:
        """Send the events of every run to one more observer."""

    def explain_missing_model(self, engine: Engine, agent: str) -> str:
        """Return why the model of an agent of *engine* cannot be called here; ``""`` if it can, or is called elsewhere."""

    async def start(self) -> None:
        """Resume interrupted runs, and start the recovery and the scheduler."""

    async def close(self) -> None:
        """Stop starting runs, wait a while for the open ones, and leave the rest to the next process."""

    async def close_engine(self) -> None:
        """Close the engine, after the runs were closed."""

    async def rebuild_engine_if_changed(self) -> None:
        """Rebuild the engine if its files were saved and can be loaded; otherwise do not replace it."""

    async def undo(
        self, row: RunRow, *, at: int | str = -1, dry_run: bool = False, partial: bool = False
    ) -> UndoResult:
        """Restore the files that a run wrote: all of them or none, unless *partial*."""

    async def load_schedule_statuses(self) -> list[ScheduleStatus]:
        """Return each schedule with its next and last run."""


def get_run_service(request: Request) -> RunService:
    """Return the run service of the server that handles a request."""
    found: RunService = request.app.state.runs
    return found


async def get_requested_run(request: Request, parameter: str = "run") -> RunRow:
    """Return the run whose id is the path parameter *parameter* of a request; raise ``Problem`` unless the caller may see the run."""
    return await get_run_service(request).reader.get_run(require_caller(request), request.path_params[parameter])
