"""
``DurableRuns``: the runs of a server whose work is in a PostgreSQL database, done by this process or by workers elsewhere.

It has the same parts as ``Runs``: a launcher, a reader, a watcher, a mailbox and conversations. The database has the runs, and next to
them whose they are. Each message to a run is a row before the sender is told that it arrived, and a worker finds it. So any of
several servers may be asked, and one that is killed loses nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs

from stepengine.data.codec import plain
from stepengine.data.questions import AnswerLike
from stepengine.data.visible import cut_end
from stepengine.durable import DatabaseUnavailable, DeploymentMaintenance, DurableEngine, DurableScheduler, migrate
from stepengine.durable.register import Register, RegisteredRun, create_register_tables
from stepengine.durable.run_waits import make_question_waits
from stepengine.durable.schedules import list_schedule_states
from stepengine.engine.scheduler import ScheduleStatus
from stepengine.errors import InputError, JournalError, LimitExceeded, StepEngineError
from stepengine.runtime.logs import LOGGER
from stepengine.server.background_tasks import BackgroundTasks
from stepengine.server.ledger import OPEN, RunRow
from stepengine.server.live_runs import RUNNING
from stepengine.server.pending_starts import PendingStarts
from stepengine.server.problems import Problem
from stepengine.server.quotas import Quotas, QuotaTable, QuotaUsage, json_size
from stepengine.server.run_reader import MAX_DETAILS, ServedRun
from stepengine.server.run_requests import (
    StartRequest,
    check_answers,
    check_may_continue,
    check_not_closing,
    check_not_ended,
    extra_request_fields,
    make_session_key,
    options_from_request,
    require_own_run,
    resolve_agent,
    resolve_owner,
)
from stepengine.server.runs import GRACE_SECONDS, Runs

if TYPE_CHECKING:
    from stepengine.data.events import Event
    from stepengine.data.usage import Spending
    from stepengine.durable import Operator
    from stepengine.durable.shared_events import SharedEvents
    from stepengine.engine import Engine
    from stepengine.engine.schedules import Schedule
    from stepengine.journal.file_undo import UndoResult
    from stepengine.server.access import Caller
    from stepengine.server.ledger import SessionRow
    from stepengine.sessions import Session

LOOK_SECONDS = 1.0
"""How often registered runs that were not submitted are looked for: a run starts at most this late after a crash."""
TIDY_SECONDS = 30.0
"""How often old keys of repeated requests are deleted."""
IDLE_SECONDS = 15.0
"""How long the events of a run are read on for a client that may reconnect."""
ANSWER_SECONDS = 5.0
"""How long the database may take to answer before the server reports that it is away."""
MAX_READERS = 100
"""How many clients may watch one run, as with runs on a disk."""


class _DurableStore:
    """
    The database of an engine, and the register of the runs that servers started.

    Args:
        engine: The engine, which may not be open yet.
    """

    def __init__(self, engine: DurableEngine) -> None:
        self.engine = engine

    @property
    def operator(self) -> Operator:
        """The client that reads and controls the runs in the database."""
        return self.engine.operator

    @property
    def register(self) -> Register:
        """The table of the runs that servers started: owner, request, idempotency key."""
        return Register(self.engine.operator.deployment)

    async def usage(self, owner: str) -> QuotaUsage:
        """Return the number of open runs and the stored bytes of an owner."""
        return QuotaUsage(*await self.register.usage(owner))


class DurableLauncher:
    """
    Registers runs and submits them to the database.

    Args:
        store: The database.
        agents: The ids of the agents that may be started.
        quotas: What each owner uses.

    Attributes:
        is_closing: Whether the server shuts down and starts nothing more.
    """

    def __init__(self, store: _DurableStore, agents: Sequence[str], quotas: QuotaTable) -> None:
        self.is_closing = False
        self._store = store
        self._agents = agents
        self._quotas = quotas
        self._pending = PendingStarts()

    async def start(self, caller: Caller, asked: StartRequest, *, key: str | None = None) -> tuple[str, bool]:
        """
        Start a run, and return its id and whether it is new; any number of runs may wait in the database for a worker.

        Raises:
            DatabaseUnavailable: when the database cannot be reached; nothing was registered.
            InputError: when prompt, params or metadata cannot be used.
            Problem: when there is no such agent, the server stops, the caller's quota is exceeded, or the key belongs to another
                request.
        """
        agent = resolve_agent(self._agents, asked.agent)
        check_may_continue(caller, asked, keeps=True)
        check_not_closing(is_closing=self.is_closing)
        request = {"prompt": asked.prompt, "params": plain(asked.params), "metadata": plain(asked.metadata)}
        request |= extra_request_fields(self._store.engine.embedded_engine.agent(agent).limits, asked)
        row = _make_registered(caller, agent, request, make_session_key(caller, asked.session))
        register = self._store.register
        is_repeat = key is not None and await register.has_key(row.owner, key, row.created)
        # A repeated request starts nothing: it is answered also where a new one would be refused.
        size = 0 if is_repeat else json_size(request)
        async with self._quotas.use(row.owner, size, runs=0 if is_repeat else 1) as use:
            with self._pending.track(row.run):
                try:
                    known = await register.add(row, key)
                except InputError as error:
                    raise Problem(error.message, status=409, kind="key_reused") from error
                if known is None:
                    await self._submit_or_remove(row)
                    return row.run, True
            use.refund()
        if await self._pending.wait(known) and await register.find(known) is None:
            # The first request failed, and its run was removed.
            return await self.start(caller, asked, key=key)
        return known, False

    async def _submit_or_remove(self, row: RegisteredRun) -> None:
        """Submit a run that was registered just now; one that cannot be submitted is removed."""
        try:
            await self._submit(row)
        except DatabaseUnavailable as error:
            LOGGER.warning("run %s is registered, and is submitted when the database is back: %s", row.run, error)
        except StepEngineError:
            await self._store.register.remove(row.run)
            raise

    async def _submit(self, row: RegisteredRun) -> None:
        """Submit a registered run; two submissions of one id are one run."""
        asked = row.request
        if "fork" in asked:
            options = dict(asked["fork"])
            await self._store.engine.fork(options.pop("run"), id=row.run, **options)
        else:
            await self._store.engine.submit(
                row.agent, asked["prompt"], id=row.run, params=asked["params"], metadata=asked["metadata"],
                session_id=row.session, user_id=row.owner or None, **options_from_request(asked),
            )  # fmt: skip
        await self._store.register.note_submitted(row.run)

    async def submit_left_behind(self, row: RegisteredRun) -> None:
        """Submit a run that a server registered and did not submit before it died; a run that is refused is recorded so."""
        try:
            await self._submit(row)
        except DatabaseUnavailable:
            raise
        except StepEngineError as error:
            LOGGER.error("run %s could not be submitted: %s", row.run, error.message)
            await self._store.register.refuse(row.run, cut_end(error.message, 2_000))

    async def ensure_submitted(self, row: RunRow) -> None:
        """Submit the run if its server died before it could, so that there is a run to send messages to."""
        found = await self._store.register.find(row.run)
        if found is not None and not found.is_submitted and found.status == "started":
            await self._submit(found)

    async def resume(self, row: RunRow) -> None:
        """
        Resume a run that stopped without a result, or that waits for a worker with the code that started it.

        Raises:
            Problem: when it has ended, or cannot be resumed.
            ReplayDivergence: when this server's agents do something else than is recorded; nothing was changed.
        """
        engine, operator = self._store.engine, self._store.operator
        if row.status in OPEN:
            await self.ensure_submitted(row)
            if (await operator.run(row.run)).release not in (None, engine.release):
                with _refuse_run_errors(status=409, kind="not_possible"):
                    await engine.move(row.run)
            return
        if row.status != "stranded":
            check_not_ended(row)
        with _refuse_run_errors(status=409, kind="not_possible"):
            await operator.retry(row.run)
        await self._store.register.count_try(row.run)

    async def fork(
        self,
        caller: Caller,
        row: RunRow,
        *,
        at: int | str,
        edit: Any,
        has_edit: bool,
        allow_repeat: bool,
        changes: Mapping[str, Any] = {},
    ) -> str:  # fmt: skip
        """
        Fork a run at an effect, and return the id of the new run.

        Raises:
            Problem: when there is no such effect, the caller's quota is exceeded, or *changes* are given: each worker has the agent
                that is deployed there.
            UndoRefused: when effects that changed the world could happen again.
        """
        check_not_closing(is_closing=self.is_closing)
        if changes:
            msg = "a run in a database goes on at whichever worker takes it, with the agent that is deployed there"
            raise _unsupported_problem(msg)
        options = {"edit": plain(edit)} if has_edit else {}
        asked = {"fork": {"run": row.run, "at": at, "allow_repeat": allow_repeat, **options}}
        new = _make_registered(caller, row.agent, asked, row.session)
        async with self._quotas.use(new.owner, json_size(asked), runs=1):
            await self._store.register.add(new, None)
            with _refuse_run_errors(status=422, kind="no_such_place"):
                await self._submit_or_remove(new)
        return new.run


class DurableReader:
    """
    Finds runs and reads them from the database.

    Args:
        store: The database.
        launcher: Submits a run that a dead server had registered, before it is read.
    """

    def __init__(self, store: _DurableStore, launcher: DurableLauncher) -> None:
        self._store = store
        self._launcher = launcher
        self._details: OrderedDict[tuple[str, str, int], ServedRun] = OrderedDict()

    async def find(self, caller: Caller, run: str) -> RunRow:
        """
        Return a run of *caller*.

        Raises:
            Problem: when there is no such run, or it belongs to somebody else; both look the same.
        """
        found = await self._store.register.find(run) if run.isascii() and run.isprintable() else None
        return require_own_run(caller, run, None if found is None else _run_row_from_registered(found))

    async def listed(
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
        Return the runs of *caller*, for an admin those of everybody or of *owner*, newest first.

        Raises:
            Problem: when *owner* is somebody else and *caller* no admin, and for a *session*.
        """
        if session is not None:
            msg = "runs in a database are not listed by conversation"
            raise _unsupported_problem(msg)
        whose = resolve_owner(caller, owner)
        owner = None if owner is None and caller.may("admin") else whose
        if agent is not None and not agent.isprintable():
            return []
        asked = {*statuses} - {*OPEN} | ({*RUNNING} if {*statuses} & {*OPEN} else set())
        shown: list[RunRow] = []
        while True:
            found = await self._store.register.listed(
                owner=owner, agent=agent, statuses=sorted(asked), before=before, limit=limit, search=search
            )
            suspended = await self._store.operator.run_waits.list_suspended(
                [row.run for row in found if row.status == "running"]
            )
            rows = [_run_row_from_registered(row, "suspended" if row.run in suspended else row.status) for row in found]
            shown += [row for row in rows if not statuses or row.status in statuses or _matches_started(row, statuses)]
            if len(found) < limit or len(shown) >= limit:
                return shown[:limit]
            before = found[-1].created, found[-1].run

    async def counts(self) -> list[tuple[str, str, int]]:
        """Return the number of runs that servers started, of each agent in each status."""
        return await self._store.register.counts()

    async def details(self, row: RunRow) -> ServedRun:
        """Return the details of a run from the database."""
        if row.status in OPEN:
            return await self._unfinished_run_details(row)
        key = (row.run, row.status, row.tries)
        known = self._details.get(key)
        if known is not None:
            return attrs.evolve(known, row=row)
        details = self._details[key] = await self._ended_run_details(row)
        while len(self._details) > MAX_DETAILS:
            self._details.popitem(last=False)
        return details

    async def _unfinished_run_details(self, row: RunRow) -> ServedRun:
        # Status and questions in one query: with two, a run could be suspended in between, and a client that waits for its
        # question would be told that there is none.
        operator = self._store.operator
        suspended = await operator.run_waits.list_suspended([row.run]) if row.status != "started" else {}
        is_suspended = row.run in suspended
        asked, left = suspended[row.run] if is_suspended else (await operator.list_questions(row.run), [])
        return ServedRun(
            row=row,
            status="suspended" if is_suspended else "running",
            questions=tuple([question for each in asked for question in each.questions]),
            waits_for=(*make_question_waits(asked), *left) if is_suspended else (),
            parent=_fork_origin(row),
        )

    async def _ended_run_details(self, row: RunRow) -> ServedRun:
        found = await self._store.register.find(row.run)
        if found is not None and not found.is_submitted:
            return ServedRun(row=row, status=row.status, error=row.error)
        try:
            result = await self._store.engine.result(row.run)
        except JournalError:
            raise
        except StepEngineError as error:
            # Why it stopped without a result.
            return ServedRun(row=row, status=row.status, error=error.message)
        has_result = row.status not in ("cancelled", "stranded")
        return ServedRun(
            row=row,
            status=row.status,
            output=plain(result.output),
            text=result.text,
            error=row.error or ("" if result.error is None else str(result.error)),
            usage=plain(result.usage) if has_result else None,
            cost=str(result.cost) if has_result and result.cost is not None else None,
            parent=_fork_origin(row),
            warnings=result.warnings,
        )

    async def content(self, row: RunRow) -> bytes:
        """Return the records of a run as a journal."""
        await self._launcher.ensure_submitted(row)
        with _refuse_run_errors(status=409, kind="not_possible"):
            return (await self._store.engine.export(row.run)).content()

    async def spending(self, row: RunRow) -> Spending:
        """Return the tokens and the cost of a run; raise ``Problem`` unless it has ended with a result."""
        if row.status in OPEN or row.status in ("cancelled", "stranded"):
            msg = "what a run in a database cost is known when it has ended with a result"
            raise _unsupported_problem(msg)
        return (await self._store.engine.result(row.run)).spending


class DurableWatcher:
    """
    The event streams of runs, read once from the database for all clients of a run.

    Args:
        store: The database.
        launcher: Submits a run that a dead server had registered, before it is watched.
        patience: Seconds that a client is kept while a run is suspended.
    """

    def __init__(self, store: _DurableStore, launcher: DurableLauncher, patience: float) -> None:
        self._store = store
        self._launcher = launcher
        self._patience = patience
        self._followed: dict[tuple[str, int], SharedEvents] = {}
        self._readers: Counter[tuple[str, int]] = Counter()
        self._left_at: dict[tuple[str, int], float] = {}

    def _get_shared_events(self, row: RunRow) -> SharedEvents:
        key = row.run, row.tries
        known = self._followed.get(key)
        if known is None:
            known = self._followed[key] = self._store.engine.shared_events(row.run, tries=row.tries)
            self._left_at[key] = time.monotonic()
        return known

    async def may_be_over(self, row: RunRow, after: str | None) -> bool:
        """
        Return whether a run may have no events after the event *after*.

        Raises:
            ReplayDivergence: when the run is of agents that this server does not have.
            LimitExceeded: when too many clients watch it.
            StepEngineError: when *after* is not an id of an event of this run.
        """
        await self._launcher.ensure_submitted(row)
        if self._readers[row.run, row.tries] >= MAX_READERS:
            msg = f"{MAX_READERS} watch this run already; ask again in a moment"
            raise LimitExceeded(msg, kind="readers", limit=MAX_READERS)
        shared = self._get_shared_events(row)
        await shared.find_index(after)
        if shared.is_suspended:
            # It may have been answered since, and a client that is told that nothing follows does not ask again.
            await shared.refresh()
        return shared.is_over or shared.is_suspended

    def position(self, after: str | None) -> None:
        """Return ``None``: at every server, the id of an event alone is the position of a client."""

    async def events(self, row: RunRow, after: str | None) -> AsyncGenerator[Event, None]:
        """
        Yield the events of a run from the first one, or after *after*, with the same ids at every server.

        They come from the record: whole texts, no pieces of them. While the run is suspended a client is kept for a while.
        """
        key = row.run, row.tries
        self._readers[key] += 1
        try:
            shared = self._get_shared_events(row)
            async with contextlib.aclosing(
                shared.read(await shared.find_index(after), patience=self._patience)
            ) as events:
                async for event in events:
                    yield event
        finally:
            self._readers[key] -= 1
            self._left_at[key] = time.monotonic()

    async def drop_idle(self) -> None:
        """Stop following the runs that no client watches."""
        for key in list(self._followed):
            if self._readers[key] <= 0 and time.monotonic() - self._left_at[key] > IDLE_SECONDS:
                del self._readers[key], self._left_at[key]
                await self._followed.pop(key).close()

    async def close(self) -> None:
        """End all streams."""
        for key in list(self._followed):
            await self._followed.pop(key).close()


class DurableMessenger:
    """
    Delivers messages to runs through the database.

    Args:
        store: The database.
        launcher: Submits a run that a dead server had registered, before a message is sent to it.
        quotas: What each owner uses.
    """

    def __init__(self, store: _DurableStore, launcher: DurableLauncher, quotas: QuotaTable) -> None:
        self._store = store
        self._launcher = launcher
        self._quotas = quotas

    async def answer(self, caller: Caller, row: RunRow, answers: Mapping[str, AnswerLike]) -> None:
        """
        Answer open questions, all or none of them.

        Raises:
            AnswerRejected: when a question is not open, the answer does not fit it, or somebody else answered first.
            Problem: when *caller* may not give such an answer.
        """
        check_not_ended(row)
        asked = await self._store.operator.list_questions(row.run)
        open_ = {question.id: question for each in asked for question in each.questions}
        await self._store.operator.answer_first(row.run, check_answers(caller, answers, open_))

    async def post(self, row: RunRow, topic: str, value: object, *, id: str | None, path: str) -> bool:
        """
        Send a message to the receiver of *topic*; return False if *id* was sent before.

        Errors are those of ``DurableEngine.send_message``, and ``Problem`` over a quota.
        """
        check_not_ended(row)
        await self._launcher.ensure_submitted(row)
        size = json_size(value)
        async with self._quotas.use(row.owner, size) as use:
            with _refuse_run_errors(status=409, kind="not_possible"):
                is_new = await self._store.operator.send_message(row.run, topic, value, id=id, path=path)
            if is_new:
                await self._store.register.add_bytes(row.run, size)
            else:
                use.refund()
        return is_new

    async def say(self, row: RunRow, text: str) -> None:
        """Send user input to a run: its next model call gets it."""
        check_not_ended(row)
        await self._launcher.ensure_submitted(row)
        size = json_size(text)
        async with self._quotas.use(row.owner, size):
            with _refuse_run_errors(status=409, kind="not_possible"):
                await self._store.operator.send_input(row.run, text)
            await self._store.register.add_bytes(row.run, size)

    async def cancel(self, row: RunRow, reason: str) -> None:
        """Cancel a run and its children; one that has ended stays as it is."""
        if row.status not in OPEN:
            return
        await self._launcher.ensure_submitted(row)
        if reason:
            await self._store.register.record_cancellation(row.run, reason)
        await self._store.operator.cancel(row.run)

    async def give_result(self, row: RunRow, call_id: str, result: object, path: str | None) -> None:
        """
        Refuse the result of a call.

        Raises:
            Problem: always: a durable run fails at a deferred tool, so none of its calls waits.
        """
        check_not_ended(row)
        msg = (
            f"no call {call_id[:200]!r} of the run {row.run} waits: a run in a database waits for results from outside with `Receive`, "
            "and is sent them as messages"
        )
        raise Problem(msg, status=409, kind="not_possible")


class DurableConversations:
    """Refuses requests about conversations: a database stores them by run alone."""

    async def listed(
        self, caller: Caller, *, owner: str | None, before: tuple[float, str] | None, limit: int
    ) -> list[SessionRow]:
        """Refuse to list conversations."""
        msg = "conversations in a database are shown by the runs that they are made of"
        raise _unsupported_problem(msg)

    async def get(self, caller: Caller, session: str, *, owner: str | None) -> tuple[SessionRow, Session | None]:
        """Refuse to show a conversation."""
        msg = "conversations in a database are shown by the runs that they are made of"
        raise _unsupported_problem(msg)

    async def forget(self, caller: Caller, session: str, *, owner: str | None) -> None:
        """Refuse to delete a conversation."""
        msg = "conversations in a database are forgotten with their runs, by `stepengine deploy gc`"
        raise _unsupported_problem(msg)


class DurableRuns:
    """
    The runs of one durable engine, for many callers.

    Args:
        engine: Submits runs, and executes them unless it only submits; it is opened and closed here.
        agents: The ids of the agents that may be started; ``None`` for all of the engine.
        wait_for_answers: Seconds that a client is kept while the run that it watches is suspended.
        schedules: When agents are started automatically.
        drain: Seconds that effects may continue when the server is told to stop.
        quotas: How much one owner may use.

    Attributes:
        engine: The engine that has the agents.
        agents: The ids of the agents that may be started.
        quotas: What each owner uses.
        launcher: Starts, resumes and forks runs.
        reader: Finds and reads runs.
        watcher: The event streams of runs.
        messenger: Delivers answers, messages and cancels.
        conversations: Refuses what a database does not offer.
        stopping: Set when the server is told to stop.
        is_ready: Whether runs can be started.
        is_away: Whether the database cannot be reached.
    """

    def __init__(
        self,
        engine: DurableEngine,
        *,
        agents: Iterable[str] | None = None,
        wait_for_answers: float = 60.0,
        schedules: Iterable[Schedule] = (),
        drain: float = GRACE_SECONDS,
        quotas: Quotas | None = None,
    ) -> None:
        self.engine: Engine = engine.embedded_engine
        self.is_ready = self.is_away = False
        self.stopping = asyncio.Event()
        known = [agent.id for agent in engine.agents]
        self.agents = tuple(known if agents is None else [self.engine.agent(agent).id for agent in agents])
        self._store = store = _DurableStore(engine)
        self.quotas = QuotaTable(quotas or Quotas(), store.usage)
        self.launcher = DurableLauncher(store, self.agents, self.quotas)
        self.reader = DurableReader(store, self.launcher)
        self.watcher = DurableWatcher(store, self.launcher, wait_for_answers)
        self.messenger = DurableMessenger(store, self.launcher, self.quotas)
        self.conversations = DurableConversations()
        self._schedules = tuple(schedules)
        self._drain = drain
        self._tasks = BackgroundTasks()
        self._stack = contextlib.AsyncExitStack()

    @property
    def live_count(self) -> int:
        """The number of runs that this process executes; 0 if only workers elsewhere do."""
        return self._store.engine.live

    @property
    def open_question_count(self) -> int:
        """The number of questions in the memory of this process: 0, since a run that asks is suspended at once."""
        return 0

    async def open(self) -> None:
        """
        Connect, start to execute runs unless the engine only submits, and submit what a dead server registered.

        Raises:
            DatabaseUnavailable: when the database cannot be reached, or has no tables.
            ExecutorBusy: when another process has the same executor id.
            StepEngineError: when the extra is not installed.
        """
        engine = self._store.engine
        setting = engine.setting
        if setting.migrate and not engine.works:
            await migrate(setting.url)
        if not engine.is_open:
            await engine.open()
        try:
            if setting.migrate:
                await create_register_tables(setting.url)
            await self._store.register.list_unsubmitted()
            if self._schedules:
                await self._stack.enter_async_context(DurableScheduler(engine, self._schedules))
        except BaseException:
            await engine.aclose(drain=0)
            raise
        self._tasks.spawn(self._submit_left_behind_forever())
        if engine.works:
            self._tasks.spawn(self._reassign_dead_workers_runs())
        self.is_ready = True

    async def close(self) -> None:
        """Start nothing more, and let effects end for a while; the workers resume the rest."""
        self.launcher.is_closing, self.is_ready = True, False
        self.stopping.set()
        await self._stack.aclose()
        await self._tasks.cancel()
        await self.watcher.close()
        await self._store.engine.aclose(drain=self._drain)

    async def _submit_left_behind_forever(self) -> None:
        """Repeatedly submit the runs of dead servers, and store whether the database can be reached."""
        tidied = -TIDY_SECONDS
        while True:
            try:
                async with asyncio.timeout(ANSWER_SECONDS):
                    unsubmitted = await self._store.register.list_unsubmitted()
                    if time.monotonic() - tidied >= TIDY_SECONDS:
                        await self._store.register.remove_stale_entries()
                        tidied = time.monotonic()
                self.is_ready, self.is_away = True, False
                for row in unsubmitted:
                    await self.launcher.submit_left_behind(row)
            except (DatabaseUnavailable, TimeoutError):
                self.is_ready, self.is_away = False, True
            except Exception:  # noqa: BLE001 - nobody awaits this loop, and without it registered runs are lost
                LOGGER.exception("runs could not be looked after; they are looked at again within seconds")
            await self.watcher.drop_idle()
            await asyncio.sleep(LOOK_SECONDS)

    async def _reassign_dead_workers_runs(self) -> None:
        """Move the runs of dead workers to live ones; of all servers one does so at a time."""
        async for taken in DeploymentMaintenance(self._store.operator).watch():
            LOGGER.warning("run %s of worker %s, which is gone: %s", taken.run, taken.executor, taken.outcome)

    async def undo(
        self, row: RunRow, *, at: int | str = -1, dry_run: bool = False, partial: bool = False
    ) -> UndoResult:
        """
        Refuse to undo.

        Raises:
            Problem: always: only journals of files store what a run overwrote.
        """
        msg = "what a run in a database wrote is not kept, so nothing of it can be undone"
        raise _unsupported_problem(msg)

    async def load_schedule_statuses(self) -> list[ScheduleStatus]:
        """Return the state of each schedule."""
        try:
            return await list_schedule_states(self._store.operator, self._schedules, now=datetime.now(UTC))
        except JournalError as error:
            if isinstance(error.__cause__, DatabaseUnavailable):
                raise error.__cause__ from None
            raise


AnyRuns: TypeAlias = Runs | DurableRuns
"""The runs that routes work with."""


def _make_registered(caller: Caller, agent: str, request: dict[str, Any], session: str | None) -> RegisteredRun:
    return RegisteredRun(
        run=secrets.token_hex(16), owner=caller.name, agent=agent, status="started", created=time.time(),
        request=request, session=session, is_submitted=False,
    )  # fmt: skip


def _fork_origin(row: RunRow) -> Mapping[str, str] | None:
    fork = row.request.get("fork")
    return {"run": str(fork["run"]), "at": str(fork["at"])} if isinstance(fork, Mapping) else None


def _unsupported_problem(message: str) -> Problem:
    return Problem(message, status=409, kind="not_possible")


def _run_row_from_registered(found: RegisteredRun, status: str = "") -> RunRow:
    # A conversation that was started without this server has no owner before its name, and such a run no request.
    session = found.session if found.session is None or found.owner else f":{found.session}"
    return RunRow(
        found.run, found.owner, found.agent, status or found.status, found.created, found.created, found.request or {}, session,
        found.tries, found.error,
    )  # fmt: skip


def _matches_started(row: RunRow, statuses: Sequence[str]) -> bool:
    """Return whether a run that no worker has yet is requested: it is shown as running."""
    return row.status == "started" and "running" in statuses


@contextlib.contextmanager
def _refuse_run_errors(*, status: int, kind: str) -> Iterator[None]:
    """Raise a ``Problem`` for an error that says that a run cannot do what was requested."""
    try:
        yield
    except JournalError as error:
        if type(error) is not JournalError:  # subclasses have statuses of their own
            raise
        raise Problem(error.message, status=status, kind=kind) from None
