"""
``Runs``: the runs of a server: started for somebody, looked after, found again after a crash.

A run is registered on the disk before anything of it happens, under the id that its journal and its events have, too. What is said to
a run, an answer, a message, a cancel, becomes a letter in the mailbox beside its journal before whoever says it is told that it
arrived; then the run is nudged, here or wherever it is held. So it does not matter which of several servers of one place is
asked, and a server that dies in between loses nothing.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import math
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
from attrs import frozen

from stepengine.data import codec
from stepengine.data.alike import list_names
from stepengine.data.codec import bare, plain
from stepengine.data.limits import DEFAULT_LIMITS, Limits
from stepengine.data.messages import ImagePart, UserMessage
from stepengine.data.questions import Answer, AnswerLike, Question
from stepengine.data.state import AgentState, RunResult, RunStatus
from stepengine.data.transcript import Transcript
from stepengine.data.usage import Spending
from stepengine.engine.posting import fitting_answers, result_to_journal
from stepengine.engine.scheduler import Scheduler, Standing, standings
from stepengine.errors import (
    AnswerRejected,
    DefinitionError,
    InputError,
    JournalError,
    JournalLocked,
    JournalMissing,
    StepEngineError,
    ToolError,
)
from stepengine.journal.files import FileJournal
from stepengine.journal.finding import database_of
from stepengine.journal.forks import branch
from stepengine.journal.mailbox import Letter
from stepengine.journal.questions import DOUBT, doubts
from stepengine.journal.records import to_text
from stepengine.journal.show import ended_of, spending_of, status_of
from stepengine.journal.sleeping import index_of, make_due, sleeper
from stepengine.journal.sqlite import SqliteJournal
from stepengine.journal.undoing import undo
from stepengine.runtime.logs import LOGGER
from stepengine.server.access import check_folder
from stepengine.server.ended_runs import EndedRuns, journal_size
from stepengine.server.ledger import (
    OPEN,
    Act,
    Ledger,
    RunRow,
    SessionRow,
    deciding,
    forgetting,
    leaving,
    noting,
    registering,
    removing,
    showing,
    suspending,
    taking_turn,
    taking_up,
    waking,
)
from stepengine.server.problems import Problem
from stepengine.server.quotas import Quotas, QuotaTable, json_size
from stepengine.server.watching import Had, Shared, live_events

if TYPE_CHECKING:
    from stepengine.data.events import Event
    from stepengine.data.waiting import Waits
    from stepengine.engine import Engine
    from stepengine.engine.schedules import Schedule
    from stepengine.journal.history import History
    from stepengine.journal.store import Journal
    from stepengine.journal.undoing import Undone
    from stepengine.runtime.handle import RunHandle
    from stepengine.runtime.hub import ObserverLike
    from stepengine.server.access import Caller
    from stepengine.server.sources import Sources
    from stepengine.sessions import Session
    from stepengine.workspace.workspace import Workspace

__all__ = ("NextTurn", "RunStanding", "Runs", "WantedRun")

UNDER_WAY = ("started", "running")
"""Handles of runs that rest, with their last events: who comes back to one gets them from memory, and else from the journal."""
LOOKS_KEPT = 200
LOOK_SECONDS = 1.0
BEGUN_SECONDS = 2.0
"""How long a run may be registered and have no journal yet, where another server is about to begin it."""
DUE_AT_ONCE = 100
MOST_TRIES = 3
GRACE_SECONDS = 10.0
SUSPEND_SECONDS = 2.0
SUSPENDED_SOON = 0.02
MOST_OPEN = 100


@frozen
class NextTurn:
    """
    The next turn of a conversation.

    Attributes:
        after: Its last run, as whoever takes the turn knows it; ``None`` where there was none.
    """

    after: RunRow | None = None


@frozen(kw_only=True)
class WantedRun:
    """
    What somebody wants to be run.

    Attributes:
        agent: The agent's id.
        prompt: What it should do.
        params: A JSON object for the agent's schema.
        metadata: A JSON object for hooks and tools.
        session: The conversation, by the name that its owner gave it.
        limits: Members of ``Limits`` for this run, each at most what its agent may have.
        model: Its agent's model in this run.
        images: Pictures that are said before the prompt, each with ``mime_type`` and ``data`` in base64.
        turn: That it is the next turn of the conversation, and goes on from what the last run left.
        is_patient: Whether a question waits in memory for a while, before the run is suspended.
    """

    agent: str
    prompt: str = ""
    params: Any = None
    metadata: Mapping[str, Any] | None = None
    session: str | None = None
    limits: Mapping[str, float] | None = None
    model: str | None = None
    images: Sequence[Mapping[str, str]] = ()
    turn: NextTurn | None = None
    is_patient: bool = True


@frozen(kw_only=True)
class RunStanding:
    """
    How a run stands.

    Attributes:
        row: What the server knows.
        status: ``"running"`` while it is under way, else how it ended, ``"suspended"`` or ``"stranded"``.
        phase: What a run of this process is doing.
        epoch: What its events' ids begin with, where it is a run of this process.
        questions: Its open questions.
        output: What came of it.
        text: The same in words.
        error: Why it failed.
        usage: Tokens.
        cost: US dollars; ``None`` where a price is not known.
        waits_for: What a suspended run waits for.
        parent: Of a fork the id of its parent, ``run``, and the last effect that it kept, ``at``.
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


class Runs:
    """
    The runs of one engine in one place.

    Args:
        engine: What runs agents.
        place: A folder of journals, made if there is none, or an SQLite file of them. Any number of servers may share one.
        agents: The ids of the agents that may be started; ``None`` for all of the engine.
        max_live: How many runs may be under way in this process.
        wait_for_answers: Seconds that a question waits in memory before the run is suspended, which costs nothing any more.
        schedules: When agents are started by themselves.
        roots: The folders that the tools of its agents write in; what runs wrote there can be undone.
        drain: Seconds that runs under way have to come to their end when the server is told to stop.
        sources: The files that the engine is made of anew when they were saved; ``None`` where it stays as it is.
        quotas: How much one owner may use.

    Attributes:
        quotas: What each owner uses.
        engine: What runs agents that begin from now on; a run that is under way keeps the one that it began with.
        broken: Why the files make no engine as they are now; ``None`` where they do.
    """

    def __init__(
        self,
        engine: Engine,
        place: str | Path,
        *,
        agents: Iterable[str] | None = None,
        max_live: int = 64,
        wait_for_answers: float = 60.0,
        schedules: Iterable[Schedule] = (),
        roots: Iterable[str | Path | Workspace] = (),
        drain: float = GRACE_SECONDS,
        sources: Sources | None = None,
        quotas: Quotas | None = None,
    ) -> None:
        self.engine = engine
        self.broken: Problem | None = None
        self._sources = sources
        self._renewing = asyncio.Lock()
        self._old: list[Engine] = []
        self._in_use: Counter[Engine] = Counter()
        self._observers: list[ObserverLike] = []
        self._scheduler: Scheduler | None = None
        self.place = Path(place)
        self.max_live = max_live
        self.is_ready = self.is_away = False
        self.stopping = asyncio.Event()
        self._is_database = database_of(str(place)) is not None
        self._chosen = None if agents is None else [engine.agent(agent).id for agent in agents]
        self._patience = wait_for_answers
        self._schedules = tuple(schedules)
        self._roots = tuple(roots)
        self._drain = drain
        self._ledger = Ledger(place)
        self.quotas = QuotaTable(quotas or Quotas(), lambda owner: asyncio.to_thread(self._ledger.usage, owner))
        self._live: dict[str, RunHandle] = {}
        self._rested = EndedRuns()
        self._rested_at: dict[str, float] = {}
        self._went_on: set[str] = set()
        self._shared = Shared(self.journal)
        self._going_on: dict[str, asyncio.Lock] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._caring: asyncio.Task[Any] | None = None
        self._looks: OrderedDict[tuple[str, str, float], RunStanding] = OrderedDict()
        self._acts: list[tuple[Act, asyncio.Future[Any]]] = []
        self._writing: asyncio.Task[None] | None = None
        self._strangers: set[str] = set()
        self._watching: dict[str, asyncio.Task[Any]] = {}
        self._waking: dict[str, asyncio.Task[Any]] = {}
        self._is_closing = False
        self._stack = contextlib.AsyncExitStack()

    # --- from start to end --------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """
        Begin to look after the place: resume what was under way, and what becomes due.

        Raises:
            DefinitionError: when others could write the place.
            JournalError: when it cannot be used.
        """
        await asyncio.to_thread(self._prepare)
        # Before anybody can ask: a run that was killed is under way again when it is looked at. What there is no room for comes
        # when others make some, which may wait for an answer, and to give that the server has to be there.
        await self._sweep(at_once=True)
        self._caring = self._spawn(self._care())
        if self._schedules:
            self._scheduler = Scheduler(self.engine, self._schedules, runs=self.place, tell=self._adopt)
            await self._stack.enter_async_context(self._scheduler)
        self.is_ready = True

    def _prepare(self) -> None:
        folder = self.place.parent if self._is_database else self.place
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            msg = f"{str(folder)!r} cannot be a folder of runs: {error.strerror or type(error).__name__}"
            raise JournalError(msg) from error
        check_folder(folder)
        if self._is_database and self.place.exists():
            check_folder(self.place)
        self._ledger.under_way()
        with index_of(self.place) as index:
            index.all()

    async def close(self) -> None:
        """Take nothing new, let what is under way come to its end for a while, and end the rest so that it goes on next time."""
        self._is_closing, self.is_ready = True, False
        self.stopping.set()
        await self._stack.aclose()
        # In this order: nothing new begins; what is under way may end by itself; only what is left is cut, and told as
        # a shutdown, so that whoever follows it waits for the next process.
        waits = [asyncio.ensure_future(handle.wait()) for handle in self._live.values()]
        if waits:
            await asyncio.wait(waits, timeout=self._drain)
        self._shared.close()
        # From here on what ends is ended by this, and is under way for whoever comes next.
        for handle in list(self._live.values()):
            await handle.shutdown()
        if self._caring is not None:
            self._caring.cancel()
        # The others write down what became of runs that have just ended.
        await asyncio.gather(*self._tasks, *waits, return_exceptions=True)
        if self._writing is not None:
            await self._writing
        for engine in self._old:
            await engine.aclose()
        await asyncio.to_thread(self._ledger.close)

    # --- the engine, and the files that it is made of -------------------------------------------------------------------

    @property
    def agents(self) -> tuple[str, ...]:
        """The ids of the agents that may be started."""
        known = [agent.id for agent in self.engine.agents]
        return tuple(known if self._chosen is None else [one for one in self._chosen if one in known])

    def observe(self, observer: ObserverLike) -> None:
        """Show the events of every run to one more observer, whichever engine it has."""
        self._observers.append(observer)
        self.engine.add_observer(observer)

    def engine_of(self, run: str) -> Engine:
        """Return the engine of a run that is under way; of any other that with which it would go on."""
        return next((engine for engine in self._old if engine.is_running(run)), self.engine)

    async def renew(self, *, again: bool = True) -> None:
        """
        Make the engine anew where its files were saved; files that made none are tried again as they are only if *again* says so.

        Raises:
            Problem: when they make none as they are now; the engine stays what it was.
        """
        if self._sources is None:
            return
        # One at a time: a thousand who start at once import one thing, once.
        async with self._renewing:
            if not await asyncio.to_thread(self._sources.changed, again=again):
                if not self._sources.is_refused:
                    self.broken = None
                return
            try:
                await self._sources.check()
                made = await asyncio.to_thread(self._sources.remade)
            except Problem as problem:
                self.broken = problem
                raise
            self.broken = None
            for observer in self._observers:
                made.add_observer(observer)
            self._old.append(self.engine)
            self.engine = made
            if self._scheduler is not None:
                self._scheduler.engine = made
        await self._close_unused()

    async def renew_if_sound(self) -> None:
        """Make the engine anew where its files were saved, and leave it where they make none: what began is not lost over that."""
        with contextlib.suppress(Problem):
            await self.renew(again=False)

    @contextlib.contextmanager
    def _using(self) -> Iterator[Engine]:
        """Give the engine, which is not closed before the run that it begins is one of its own."""
        engine = self.engine
        self._in_use[engine] += 1
        try:
            yield engine
        finally:
            self._in_use[engine] -= 1

    async def _close_unused(self) -> None:
        """Close the engines of code that is past, once nothing runs in them."""
        unused = [engine for engine in self._old if not self._in_use[engine] and not engine.active()]
        self._old = [engine for engine in self._old if engine not in unused]
        for engine in unused:
            del self._in_use[engine]
            await engine.aclose()

    def _spawn(self, work: Coroutine[Any, Any, object]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # --- writing to the ledger: all that comes together is one transaction ----------------------------------------------

    async def _write(self, act: Act) -> Any:
        """Do *act* in the ledger; what a hundred callers want at once costs one look at the disk."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        # SQLite has one writer and each commit is a sync: a thousand starts at once were a thousand syncs, one after
        # the other. So whatever comes while one commit is under way goes into the next.
        self._acts.append((act, future))
        if self._writing is None:
            self._writing = asyncio.ensure_future(self._write_all())
        # A request that is given up meanwhile must not take the write of others along, nor its own, which somebody may
        # have been told of.
        return await asyncio.shield(future)

    async def _write_all(self) -> None:
        try:
            while self._acts:
                batch, self._acts = self._acts, []
                try:
                    made = await asyncio.to_thread(self._ledger.write, [act for act, _ in batch])
                except Exception as error:  # noqa: BLE001 - whoever asked is told
                    made = [error] * len(batch)
                for (_, future), value in zip(batch, made, strict=True):
                    if future.done():
                        continue
                    if isinstance(value, Exception):
                        future.set_exception(value)
                    else:
                        future.set_result(value)
        finally:
            self._writing = None

    # --- starting -----------------------------------------------------------------------------------------------------

    async def start(self, caller: Caller, asked: WantedRun, *, key: str | None = None) -> tuple[str, bool]:
        """
        Start a run, and return its id and whether it is new: one with the key of an earlier one is that one.

        Raises:
            InputError: when prompt, params or metadata cannot be used.
            Problem: when there is no such agent, too many runs are under way, the caller's quota is exceeded, or the key stands for
                another request.
        """
        await self.renew()
        agent = known_agent(self.agents, asked.agent)
        check_may_converse(caller, asked, keeps=self.engine.sessions is not None)
        request = {"prompt": asked.prompt, "params": asked.params, "metadata": plain(asked.metadata)}
        now, before = time.time(), None if asked.turn is None else asked.turn.after
        request |= further(self.engine.agent(agent).limits, asked)
        if not asked.is_patient:
            request["is_patient"] = False
        if asked.turn is not None:
            request["turn"] = {"after": None if before is None else before.run}
            # The newest run of a conversation is the one that was created last, whatever the clocks of two servers say.
            now = now if before is None else max(now, before.created + 0.001)
        row = RunRow(
            secrets.token_hex(16),
            caller.name,
            agent,
            "started",
            now,
            now,
            request,
            session_of(caller, asked.session),
        )
        is_repeat = key is not None and await asyncio.to_thread(self._ledger.has_key, row.owner, key, now)
        # A repeated request starts nothing: it is answered also where a new one would be refused.
        if not is_repeat:
            self._check_room()
        async with self.quotas.use(
            row.owner, 0 if is_repeat else json_size(request), runs=0 if is_repeat else 1
        ) as use:
            # Registered first and begun then: should this process die in between, the run is under way by the ledger, and
            # whoever sweeps next begins it. The other way round it would be at work and nobody would know whose it is.
            known = await self._registered(row, key)
            if known is not None:
                use.refund()
                return known.run, False
            try:
                await self._begin(row)
            except StepEngineError as error:
                # Another server of the place may have seen the promise before this one could keep it, and keeps it. To look first
                # whether one did cost 30 ms a run where a thousand are started at once: the sweep found them all waiting.
                is_kept = await asyncio.to_thread(self.journal(row.run).is_there)
                if not is_kept:
                    await self._write(removing(row.run))
                if not (is_kept and isinstance(error, JournalError)):
                    raise
        return row.run, True

    async def _registered(self, row: RunRow, key: str | None) -> RunRow | None:
        if "turn" in row.request:
            try:
                await self._write(taking_turn(row, row.request["turn"]["after"]))
            except InputError as error:
                raise Problem(error.message, status=409, kind="under_way") from error
            return None
        try:
            known: RunRow | None = await self._write(registering(row, key))
        except InputError as error:
            raise Problem(error.message, status=409, kind="key_reused") from error
        return known

    def _check_room(self) -> None:
        if self._is_closing:
            msg = "the server is about to stop and starts nothing; ask again in a moment"
            raise Problem(msg, status=503, kind="stopping", headers={"retry-after": "5"})
        # Refused and not queued: whoever asks knows best whether waiting makes sense, and a queue in memory is lost
        # with the process.
        if not self._has_room():
            msg = f"{self.max_live:,} runs are under way, which is as many as this server has at a time; ask again in a moment"
            raise Problem(msg, status=429, kind="too_many_runs", headers={"retry-after": "5"})

    async def _begin(self, row: RunRow) -> None:
        request, options = row.request, dict[str, Any]()
        turn = request.get("turn")
        if turn is not None and turn["after"] is not None:
            before = await asyncio.to_thread(self._ledger.find, turn["after"])
            options["previous"] = None if before is None else await self.state(before)
        options |= started_with(request, options.get("previous"))
        handle = self.engine.start(
            row.agent,
            request["prompt"],
            run_id=row.run,
            params=request["params"],
            metadata=request["metadata"],
            session_id=row.session,
            user_id=row.owner or None,
            journal=self.journal(row.run),
            wait_for_answers=self._patience_of(row),
            **options,
        )
        self._hold(row.run, handle)

    def _patience_of(self, row: RunRow) -> float:
        """Return how long a question is waited for in memory."""
        return self._patience if row.request.get("is_patient", True) else 0.0

    def journal(self, run: str) -> FileJournal | SqliteJournal:
        """Return the journal of a run."""
        return SqliteJournal(self.place, run) if self._is_database else FileJournal(self.place / f"{run}.jsonl")

    def _hold(self, run: str, handle: RunHandle, *, went_on: bool = False) -> RunHandle:
        self._forget(run)
        self._live[run] = handle
        if went_on:
            self._went_on.add(run)
        self._watching[run] = task = self._spawn(self._watch_run(run, handle))
        task.add_done_callback(lambda _: self._watching.get(run) is task and self._watching.pop(run))
        return handle

    def _forget(self, run: str) -> None:
        """Forget what is known of a run that rests."""
        self._rested.remove(run)
        self._rested_at.pop(run, None)
        self._went_on.discard(run)

    async def _adopt(self, run: str, agent: str, handle: RunHandle) -> None:
        """Register a run that a schedule started: it belongs to nobody, so that whoever may do everything sees it."""
        now = time.time()
        request: dict[str, Any] = {"prompt": "", "params": None, "metadata": None}
        await self._write(registering(RunRow(run, "", agent, "running", now, now, request), None))
        self._hold(run, handle)

    async def _watch_run(self, run: str, handle: RunHandle) -> None:
        """Wait for the end of a run of this process, and say in the ledger what became of it."""
        error: BaseException | None = None
        try:
            result: RunResult | None = await handle.result()
        except asyncio.CancelledError:
            raise
        except Exception as problem:  # noqa: BLE001 - a divergence, a broken agent: told in the ledger
            result, error = None, problem
        self._live.pop(run, None)
        if self._old:
            self._spawn(self._close_unused())
        self._keep_ended(run, handle)
        if result is not None and isinstance(result.error, JournalError):
            error = result.error
        if error is not None:
            await self._note_failed_resume(run, error)
        # What closing cut is under way for whoever comes next, so nothing is written down as its end.
        elif result is not None and not (self._is_closing and result.status is RunStatus.CANCELLED):
            await self._rests(run, handle, result)
        size = await asyncio.to_thread(journal_size, self.journal(run))
        if self._rested.get(run) is handle:
            self._keep_ended(run, handle, size)

    def _keep_ended(self, run: str, handle: RunHandle, size: int = 0) -> None:
        self._rested.put(run, handle, size)
        for one in self._rested.over():
            self._forget(one)

    async def _rests(self, run: str, handle: RunHandle, result: RunResult) -> None:
        """Take note of how a run came to rest, and look whether something came for it in the meantime."""
        if handle.session_id is not None:
            left = await asyncio.to_thread(lambda: to_text(codec.to_json(result.state)))
            await self._write(leaving(handle.session_id, run, result.status.value, left))
        now = time.time()
        if result.status is RunStatus.SUSPENDED:
            # In this order: what comes behind the count is seen by the count, and before it by the look. Should this process die
            # in between, the run is under way by the ledger, and whoever sweeps next resumes it.
            woken = await asyncio.to_thread(self._ledger.woken, run)
            has_mail = woken > 0 and await asyncio.to_thread(self._has_mail, run)
            if has_mail or not await self._write(suspending(run, now, woken)):
                await self._go_on_again(run)
                return
        else:
            await self._write(noting(run, result.status.value, now))
        if self._rested.get(run) is handle:
            self._rested_at[run] = now

    async def _go_on_again(self, run: str) -> None:
        """Go on at once with a run for which something came while it lay down."""
        row = await asyncio.to_thread(self._ledger.find, run)
        if row is not None:
            self._spawn(self._go_on(row))

    def _has_mail(self, run: str) -> bool:
        """Return whether something came for a run that rests, and that nobody took in."""
        found = sleeper(self.journal(run), run)
        return found is not None and found.wakes_at is not None and found.wakes_at.timestamp() <= time.time()

    async def _note_failed_resume(self, run: str, error: BaseException) -> None:
        """Take note that nobody could resume a run; after three times it is left alone."""
        if isinstance(error, JournalLocked):
            return
        row = await asyncio.to_thread(self._ledger.find, run)
        tries = 1 if row is None else row.tries + 1
        said = error.message if isinstance(error, StepEngineError) else f"{type(error).__name__}: {error}"
        LOGGER.error("run %s could not go on (%d of %d tries): %s", run, tries, MOST_TRIES, said)
        status = "stranded" if tries >= MOST_TRIES else "running"
        await self._write(noting(run, status, time.time(), tries=tries, error=said[:2_000]))

    # --- going on -----------------------------------------------------------------------------------------------------

    async def _care(self) -> None:
        """Go on with what is due, and with what its process left behind."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            self._shared.drop_idle()
            try:
                for row in await asyncio.to_thread(self._due_rows):
                    if not self._has_room():
                        break
                    await self._go_on(row)
                await self._sweep()
            except StepEngineError as error:
                LOGGER.error("what is to go on is not known now: %s", error)
            except Exception:  # noqa: BLE001 - nobody waits for this loop, and without it nothing goes on any more
                LOGGER.exception("runs could not be looked after; they are looked at again within seconds")

    def _due_rows(self) -> list[RunRow]:
        """
        Return the runs of this ledger whose time has come.

        Others that stand in the place belong to somebody else: whoever put a journal here could have written a yes into it.
        """
        with index_of(self.place) as index:
            due = index.due(datetime.now(UTC), DUE_AT_ONCE + len(self._strangers) + len(self._live))
        rows: list[RunRow] = []
        strangers: set[str] = set()
        for one in due:
            run = one.run if self._is_database else one.run.removesuffix(".jsonl")
            if run in self._live:
                continue
            row = self._ledger.find(run)
            if row is None:
                strangers.add(run)
            elif row.status in OPEN:
                rows.append(row)
        for run in strangers - self._strangers:
            LOGGER.warning("run %s is due, and was not started by this server: it is left alone", run)
        self._strangers = strangers
        return rows

    async def _sweep(self, *, at_once: bool = False) -> None:
        """Go on with what is under way by the ledger, and in nobody's hands, as far as there is room."""
        for row in await asyncio.to_thread(self._left_alone, frozenset(self._live), at_once=at_once):
            if not self._has_room():
                return
            if row.run not in self._live:
                await self._go_on(row)

    def _left_alone(self, live: Collection[str], *, at_once: bool) -> list[RunRow]:
        """Return the runs whose process is gone: nobody has their locks, which is asked before anything of them is read."""
        others = [run for run in self._ledger.under_way() if run not in live]
        free = [
            row for run in others if not self.journal(run).is_held() and (row := self._ledger.find(run)) is not None
        ]
        begun = time.time() - (0.0 if at_once else BEGUN_SECONDS)
        return [row for row in free if row.status == "running" or (row.status == "started" and row.created <= begun)]

    def _has_room(self) -> bool:
        return len(self._live) < self.max_live and not self._is_closing

    async def _go_on(self, row: RunRow, **options: Any) -> None:
        """Go on with a run that nobody has in hands; what is wrong with it is told in the ledger."""
        try:
            await self._taken_up(row, **options)
        except JournalLocked:
            pass  # another process has it
        except Exception as error:  # noqa: BLE001 - whatever is wrong with one run, the others go on
            await self._note_failed_resume(row.run, error)

    async def _taken_up(self, row: RunRow, **options: Any) -> None:
        lock = self._going_on.setdefault(row.run, asyncio.Lock())
        try:
            async with lock:
                if row.run in self._live or self._is_closing:
                    return
                journal = self.journal(row.run)
                try:
                    ended = await asyncio.to_thread(_recorded_end, journal)
                except JournalMissing:
                    if row.status != "started":
                        raise
                    await self._begin(row)
                    return
                if ended is not None:
                    await self._write(noting(row.run, ended, time.time()))
                    return
                await self._resumed(row, journal, options)
        finally:
            if not lock.locked():
                self._going_on.pop(row.run, None)

    async def _resumed(self, row: RunRow, journal: Journal, options: Mapping[str, Any]) -> None:
        decided: dict[str, Answer] = await self._write(taking_up(row.run))
        asked: dict[str, Any] = {
            "in_doubt": "ask",
            "wait_for_answers": self._patience_of(row),
            **options,
        }
        if decided:
            open_ = await asyncio.to_thread(lambda: {question.id for question in doubts(journal.history())})
            asked["answers"] = {question: answer for question, answer in decided.items() if question in open_}
        try:
            await self.renew_if_sound()
            with self._using() as engine:
                handle = await engine.start_resume(journal, **self._changed(row, engine), **asked)
        except JournalLocked:
            # Whoever has the run began before this was decided, and leaves it to the next one.
            if decided:
                await self._write(deciding(row.run, decided))
            raise
        self._hold(row.run, handle, went_on=True)

    async def _nudge(self, row: RunRow) -> None:
        """Let a run take in what was posted for it, wherever it is."""
        # On the disk before anybody is told, also of a run of this process, which may be lying down and past its last look: who
        # dies behind this leaves a run that somebody resumes.
        await self._write(waking(row.run))
        handle = self._live.get(row.run)
        if handle is not None:
            await handle.fetch_mail()
            return
        # Where another process has it, that one looks by itself, and this finds its lock.
        await asyncio.to_thread(make_due, self.journal(row.run))
        if row.status in OPEN:
            self._waking[row.run] = task = self._spawn(self._go_on(row))
            task.add_done_callback(lambda _: self._waking.get(row.run) is task and self._waking.pop(row.run))

    # --- looking ------------------------------------------------------------------------------------------------------

    async def find(self, caller: Caller, run: str) -> RunRow:
        """
        Return a run of *caller*.

        Raises:
            Problem: when there is none of that id, or it is somebody else's, which is not told apart.
        """
        was_here = run in self._watching
        row = await asyncio.to_thread(self._ledger.find, run)
        if row is not None and row.status in UNDER_WAY and was_here and run not in self._live:
            # Its end was seen, and may not have been on the disk when the ledger was read: whoever asks now is not told that it is
            # under way. Whether this process has it was asked before, as its end may be written down while the row is read.
            await self.noted(run)
            row = await asyncio.to_thread(self._ledger.find, run)
        return own_run(caller, run, row)

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
        Return the runs of *caller*, those of everybody for an admin, newest first.

        *owner* leaves only somebody's, which an admin may ask for, *session* only those of a conversation, *search* those whose
        request, id or agent holds it.

        Raises:
            Problem: when *owner* is somebody else.
        """
        whose = owner_of(caller, owner)
        is_everybodys = owner is None and session is None and caller.may("admin")
        look = partial(
            self._ledger.listed,
            owner=None if is_everybodys else whose,
            agent=agent,
            statuses=statuses,
            before=before,
            limit=limit,
            session=None if session is None else session_key(whose, session),
            search=search,
        )
        return await asyncio.to_thread(look)

    async def look(self, row: RunRow) -> RunStanding:
        """Return how a run stands: from its handle where this process has it, else from its journal."""
        handle = self._live.get(row.run)
        if handle is not None:
            return RunStanding(
                row=row, status="running", phase=handle.phase.value, epoch=handle.epoch, questions=handle.questions
            )
        # What rests is as it was: its journal is read once, and not with every look of everybody.
        key = (row.run, row.status, row.changed)
        known = self._looks.get(key)
        if known is not None:
            return attrs.evolve(known, row=row)
        try:
            look = await asyncio.to_thread(self._look_at_record, row)
        except JournalMissing:
            return RunStanding(row=row, status=row.status, error=row.error)
        if row.status not in UNDER_WAY:
            self._looks[key] = look
            while len(self._looks) > LOOKS_KEPT:
                self._looks.popitem(last=False)
        return look

    def _look_at_record(self, row: RunRow) -> RunStanding:
        history = self.journal(row.run).history()
        ended, spending = ended_of(history), spending_of(history)
        status = _status(row, history)
        questions = [] if ended is not None else [one for _, one in history.open_questions().values()]
        if ended is None and row.status == "suspended":
            # Not of a run that another process has, of which whatever is under way looks so.
            questions += doubts(history)
        error = row.error if ended is None or ended.error is None else str(ended.error)
        handle = self._rested.get(row.run)
        return RunStanding(
            row=row,
            status=status,
            epoch=None if handle is None else handle.epoch,
            questions=tuple(questions),
            output=None if ended is None else plain(ended.output),
            text="" if ended is None else ended.text,
            error=error,
            usage=plain(spending.usage),
            cost=None if spending.cost is None else str(spending.cost),
            # Only a run that rests waits: of one under way in another process the record may be behind.
            waits_for=tuple(history.waits()) if ended is None and row.status == "suspended" else (),
            parent=None if history.head is None else history.head.parent,
        )

    def events(self, row: RunRow, after: str | None) -> AsyncGenerator[Event, None]:
        """
        Return what shows the events of a run from its first on, or from behind *after*.

        A run of this process is shown live; what it did before this process resumed it, from its journal. So is one that
        another process has, and one that ended long ago: whole texts and no pieces of them.

        Args:
            row: The run.
            after: The id of the last event that the reader has, as ``sse`` gave it, of whatever stream and server.

        Raises:
            LimitExceeded: when the run has 100 readers already.
            StepEngineError: when *after* is not an id of an event.
        """
        had, handle = Had.of(after), self._shown_by(row)
        if handle is None:
            return self._shared.following(row.run).events(had, stay=row.status in UNDER_WAY)
        is_its = had.place is not None and had.place.epoch == handle.epoch
        after = had.own_id if is_its else None
        if (is_its and not (had.is_mixed and had.marks)) or (had.place is None and row.run not in self._went_on):
            return handle.events(after=after)
        following = self._shared.following(row.run)
        if row.run in self._live:
            return live_events(handle.events(after=after), following, had)
        return following.events(had, stay=False)

    def _shown_by(self, row: RunRow) -> RunHandle | None:
        """Return the handle that has the newest events of a run, if that is one of this process."""
        handle, noted = self._live.get(row.run), self._rested_at.get(row.run, math.inf)
        # Another server may have resumed what rests here; the row of what ended just now may be older.
        is_newest = row.changed < noted or (row.changed == noted and row.status not in UNDER_WAY)
        return handle if handle is not None or not is_newest else self._rested.get(row.run)

    async def may_be_over(self, row: RunRow, after: str | None) -> bool:
        """Return whether there may be no event behind *after*: what is under way, here or in another process, is waited for."""
        return row.run not in self._live and (row.status not in UNDER_WAY or self._shown_by(row) is not None)

    def reader(self, after: str | None) -> Had:
        """
        Return how far a reader has come who brings back the id *after*.

        Raises:
            StepEngineError: when it is not an id of an event.
        """
        return Had.of(after)

    # --- saying something ---------------------------------------------------------------------------------------------

    async def answer(
        self, caller: Caller, row: RunRow, answers: Mapping[str, AnswerLike], *, by: str | None = None, say: str = ""
    ) -> None:
        """
        Answer open questions, all or none of them.

        Args:
            caller: Who answers.
            row: The run.
            answers: By the ids of their questions.
            by: Who answers in the name of *caller*: a tool of a page.
            say: What is said beside: the run's next model call sees it.

        Raises:
            AnswerRejected: when one is not open, or is not answered by that.
            Problem: when *caller* may not answer so.
        """
        check_open(row)
        given = checked(caller, answers, await self._open_questions(row, answers), by)
        letters = [
            # By the id two people are told apart who answer one question at the same time.
            Letter(kind="answer", topic=question, value=bare(answer), id=f"{question}@{row.changed}")
            for question, answer in given.items()
            if not question.startswith(DOUBT)
        ]
        if say:
            letters.append(Letter(kind="input", value=say, id=f"{min(given)}@{row.changed}"))
        # No letters: a run that is killed while it does something again would find them again, and do it once more.
        decided = {question: answer for question, answer in given.items() if question.startswith(DOUBT)}
        try:
            if decided:
                await self._write(deciding(row.run, decided))
            await asyncio.to_thread(self._post, row, letters)
        except InputError:
            msg = f"somebody else has answered {' or '.join(map(repr, given))} in the meantime"
            raise AnswerRejected(msg) from None
        await self._nudge(row)

    async def _open_questions(self, row: RunRow, wanted: Iterable[str]) -> dict[str, Question]:
        """Return the open questions of a run, those in *wanted* also while the run is being suspended because nobody answers."""
        until = time.monotonic() + SUSPEND_SECONDS
        while True:
            is_live = row.run in self._live
            known = {question.id: question for question in (await self.look(row)).questions}
            if not is_live or known.keys() >= set(wanted) or time.monotonic() > until:
                return known
            # A run puts its questions away before it has come to rest, and who answers then is not too late.
            with contextlib.suppress(JournalMissing):
                recorded = (await asyncio.to_thread(self._look_at_record, row)).questions
                if not {question.id for question in recorded}.intersection(wanted):
                    return known
            await asyncio.sleep(SUSPENDED_SOON)

    async def post(self, row: RunRow, topic: str, value: object, *, id: str | None, path: str) -> bool:
        """Send a message to the receiver of *topic*; errors are those of ``Engine.post``, and ``Problem`` over a quota."""
        check_open(row)
        journal = self.journal(row.run)
        handle = self._live.get(row.run)
        async with self.quotas.use(row.owner, json_size(value)) as use:
            try:
                try:
                    is_new = await self.engine_of(row.run).post(handle or journal, topic, value, id=id, path=path)
                except StepEngineError:
                    if handle is None or not handle.done:
                        raise
                    # It lay down in the meantime, and its mailbox is there all the same.
                    is_new = await self.engine.post(journal, topic, value, id=id, path=path)
            except StepEngineError as error:
                raise _of_request(error, StepEngineError, row, journal, status=409, kind="not_possible") from None
            if not is_new:
                use.refund()
        await self._nudge(row)
        return is_new

    async def say(self, row: RunRow, text: str) -> None:
        """Say something to a run: its next model call sees it as what the user says."""
        check_open(row)
        async with self.quotas.use(row.owner, json_size(text)):
            if await self._post_letter(row, Letter(kind="input", value=text)) is None:
                self._live[row.run].send_input(text)

    async def cancel(self, row: RunRow, reason: str) -> None:
        """End a run; one that has ended stays as it is."""
        if row.status not in OPEN:
            return
        if await self._post_letter(row, Letter(kind="cancel", value=reason, id=f"cancel@{row.changed}")) is None:
            self._live[row.run].interrupt()

    async def give_result(self, row: RunRow, call_id: str, result: object, path: str | None) -> None:
        """
        Give a call of a deferred tool its result, whoever has the run.

        Raises:
            InputError: when the call was given another result, or it is too long.
            Problem: when no such call waits.
        """
        check_open(row)
        handle, journal = self._live.get(row.run), self.journal(row.run)
        give = partial(result_to_journal, journal) if handle is None else handle.post_tool_result
        try:
            await asyncio.to_thread(give, call_id, result, path=path)
        except ToolError as error:
            raise Problem(error.message, status=409, kind="no_such_call") from error
        except StepEngineError as error:
            raise _of_request(error, StepEngineError, row, journal, status=409, kind="not_possible") from None
        await self._nudge(row)

    async def _post_letter(self, row: RunRow, letter: Letter) -> Letter | None:
        """Post a letter and return it; ``None`` for a run of this process that has done nothing yet, so that it has no mailbox."""
        try:
            await asyncio.to_thread(self._post, row, [letter])
        except JournalMissing:
            if row.run not in self._live:
                raise
            return None
        except InputError:  # another reason for the same cancel
            return letter
        await self._nudge(row)
        return letter

    def _post(self, row: RunRow, letters: Iterable[Letter]) -> None:
        box = self.journal(row.run).mailbox()
        for letter in letters:
            box.post(letter)

    # --- conversations ------------------------------------------------------------------------------------------------

    async def newest(self, caller: Caller, session: str) -> RunRow | None:
        """Return the last run of a conversation of *caller*, by the name that *caller* gave it, as soon as its end is noted."""
        look = partial(self._ledger.newest, caller.name, session_of(caller, session))
        row = await asyncio.to_thread(look)
        handle = None if row is None else self._live.get(row.run)
        if row is not None and (handle.done if handle is not None else row.status in UNDER_WAY):
            await self.noted(row.run)
            row = await asyncio.to_thread(look)
        return row

    async def noted(self, run: str) -> None:
        """Wait until it is on the disk how a run of this process ended; to be called when its end was seen."""
        task = self._watching.get(run)
        if task is not None:
            await asyncio.wait((task,))

    async def state(self, row: RunRow) -> AgentState:
        """
        Return what a run left that rests.

        Raises:
            JournalError: when its journal cannot be read.
            ReplayDivergence: when its process was killed as it ended, and its agent does something else by now.
        """
        kept = None if row.session is None else await asyncio.to_thread(self._ledger.left, row)
        if kept is not None:
            return await asyncio.to_thread(lambda: codec.from_json(json.loads(kept)))
        return (await self.engine.replay(self.journal(row.run), on_divergence="keep")).state

    async def result(self, row: RunRow) -> RunResult:
        """Return how a run ended that rests; errors are those of ``state``."""
        state = await self.state(row)
        return await asyncio.to_thread(_result, self.journal(row.run).history, row, state)

    async def show(self, run: str, message: str, place: str) -> None:
        """Keep that the newest message which shows a run on a page is *message*, and begins behind the event *place*."""
        await self._write(showing(run, message, place))

    async def shown(self, run: str) -> tuple[str, str] | None:
        """Return what ``show`` kept."""
        return await asyncio.to_thread(self._ledger.shown, run)

    def whole(self, run: str) -> RunHandle | None:
        """Return what shows all events of a run, pieces of texts as well; ``None`` where it did not begin in this process, or long ago."""
        return (self._live.get(run) or self._rested.get(run)) if run not in self._went_on else None

    async def rests(self, run: str) -> bool:
        """Return whether nothing more comes of a run by itself."""
        row = await asyncio.to_thread(self._ledger.find, run)
        return row is None or (row.status not in UNDER_WAY and run not in self._live)

    async def answer_turn(
        self, caller: Caller, row: RunRow, answers: Mapping[str, AnswerLike], *, by: str | None = None, say: str = ""
    ) -> RunHandle | None:
        """
        Answer a run that rests, and return the handle with which it goes on; ``None`` where another process, or nobody, goes on.

        Arguments and errors are those of ``answer``.
        """
        before = self._rested.get(row.run)
        await self.answer(caller, row, answers, by=by, say=say)
        if row.run in self._waking:
            await asyncio.wait((self._waking[row.run],))
        handle = self._live.get(row.run) or self._rested.get(row.run)
        return None if handle is before else handle

    # --- going back ---------------------------------------------------------------------------------------------------

    async def resume(self, row: RunRow) -> None:
        """
        Go on with a run that was left alone, or was cut off.

        Raises:
            JournalError: when it cannot go on; ``JournalLocked`` when somebody else has it.
            Problem: when it has ended, or too many are under way.
        """
        if row.run in self._live:
            return
        if row.status not in (*OPEN, "stranded"):
            check_open(row)
        self._check_room()
        await self._write(noting(row.run, "running", time.time()))
        await self._taken_up(attrs.evolve(row, status="running"))

    async def adopt(self, caller: Caller, run: str, agent: str, prompt: str) -> None:
        """
        Go on with a journal of the place that no server of it started, as a run of *caller*.

        Permissions that it holds are asked for again: whoever put it here could have written any yes into it.

        Raises:
            JournalError: when it cannot go on; ``JournalLocked`` when somebody else has it.
            Problem: when too many runs are under way, or the caller's quota is exceeded.
        """
        self._check_room()
        now, request = time.time(), {"prompt": prompt, "params": None, "metadata": None}
        row = RunRow(run, caller.name, agent, "running", now, now, request)
        options: dict[str, Any] = {"in_doubt": "ask", "ask_again": True, "wait_for_answers": self._patience}
        await self.renew_if_sound()
        async with self.quotas.use(row.owner, 0, runs=1):
            with self._using() as engine:
                handle = await engine.start_resume(self.journal(run), **options)
            # Behind that: a server that is killed before has a journal of a stranger still, and leaves it alone.
            await self._registered(row, None)
            self._hold(run, handle, went_on=True)

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
        Go on from the middle of a run as another run, and return its id.

        Raises:
            Problem: when there is no such place, too many runs are under way, or the caller's quota is exceeded.
            UndoRefused: when effects that changed the world could happen again.
        """
        await self.renew()
        self._check_room()
        now, run = time.time(), secrets.token_hex(16)
        changes = {**row.request.get("changes", {}), **changes}
        request = {**row.request, **({"changes": changes} if changes else {})}
        new = attrs.evolve(
            row, run=run, owner=caller.name, status="running", created=now, changed=now, tries=0, error="", request=request
        )  # fmt: skip
        options: dict[str, Any] = {"run_id": run, **({"edit": edit} if has_edit else {})}
        source, into = self.journal(row.run), self.journal(run)
        # At most the whole journal is copied.
        size = json_size(request) + json_size(edit) + await asyncio.to_thread(journal_size, source)
        async with self.quotas.use(new.owner, size, runs=1):
            try:
                if changes:
                    # The part that is kept was asked for with the prompts that it had: a fork would take that for other code.
                    await asyncio.to_thread(branch, source, at, allow_repeat=allow_repeat, into=into, **options)
                    with self._using() as engine:
                        asked = {**self._changed(new, engine), "wait_for_answers": self._patience}
                        handle = await engine.start_resume(into, **asked)
                else:
                    with self._using() as engine:
                        handle = await engine.start_fork(
                            source,
                            at=at,
                            into=into,
                            allow_repeat=allow_repeat,
                            wait_for_answers=self._patience,
                            **options,
                        )
            except JournalError as error:
                raise _of_request(error, JournalError, row, source, status=422, kind="no_such_place") from None
            await self._registered(new, None)
            self._hold(run, handle, went_on=True)
        return run

    def _changed(self, row: RunRow, engine: Engine) -> dict[str, Any]:
        """Return with what a run goes on that was forked with changes of its agent; nothing for any other."""
        changes = dict(row.request.get("changes", {}))
        if not changes:
            return {}
        agent = engine.agent(row.agent)
        settings = {name: changes.pop(name) for name in ("temperature", "max_tokens") if name in changes}
        # The agent's own model would not do: a model that the server or the start of the run chose goes before it.
        model = {"agent_models": {row.agent: changes.pop("model")}} if "model" in changes else {}
        agent = attrs.evolve(agent, **changes, settings=attrs.evolve(agent.settings, **settings))
        return {"agent": agent, "on_divergence": "keep", **model}

    async def content(self, row: RunRow) -> bytes:
        """Return the journal as it is written."""
        return await asyncio.to_thread(lambda: self.journal(row.run).content())

    async def standings(self) -> list[Standing]:
        """Return how the schedules stand."""
        return await asyncio.to_thread(standings, self._schedules, runs=self.place, now=datetime.now(UTC))

    async def undo(self, row: RunRow, *, at: int | str = -1, dry_run: bool = False, partial: bool = False) -> Undone:
        """
        Bring the files that a run wrote back to what they were: all of them or none, unless *partial* says so.

        Args:
            row: The run; it is not under way.
            at: The last effect whose writes stay; by default none.
            dry_run: Only say what would be done.
            partial: Leave the files that cannot be brought back.

        Raises:
            Problem: when the run is under way, there is no such place, or this server has no folder to undo in.
            UndoRefused: when a file cannot be brought back; nothing was changed.
        """
        if not self._roots:
            msg = "this server was told of no folder that runs write in, so nothing can be undone here"
            raise Problem(msg, status=409, kind="no_folder")
        if row.run in self._live:
            msg = f"the run {row.run} is under way; what it wrote is undone when it rests"
            raise Problem(msg, status=409, kind="under_way")
        journal = self.journal(row.run)
        options: dict[str, Any] = {"at": at, "dry_run": dry_run, "partial": partial}
        try:
            # Only this server writes into its store, on any machine: the state folder of this one need not know its journals.
            return await asyncio.to_thread(undo, journal, self._roots, trust=True, **options)
        except JournalError as error:
            raise _of_request(error, JournalError, row, journal, status=422, kind="no_such_place") from None
        except DefinitionError as error:
            LOGGER.error("the folders that runs write in cannot be used: %s", error.message)
            msg = "the folders that runs write in cannot be used"
            raise Problem(msg, status=503, kind="no_folder") from error

    async def spending(self, row: RunRow) -> Spending:
        """Return what a run spent so far, as far as that is recorded."""
        journal = self.journal(row.run)
        try:
            return await asyncio.to_thread(lambda: spending_of(journal.history()))
        except JournalMissing:
            return Spending()

    # --- conversations ------------------------------------------------------------------------------------------------

    async def sessions(
        self, caller: Caller, *, owner: str | None, before: tuple[float, str] | None, limit: int
    ) -> list[SessionRow]:
        """
        Return the conversations of *caller*, those of everybody for an admin, with the newest runs first.

        Raises:
            Problem: when *owner* is somebody else, and *caller* no admin.
        """
        whose = None if owner is None and caller.may("admin") else owner_of(caller, owner)
        return await asyncio.to_thread(partial(self._ledger.sessions, owner=whose, before=before, limit=limit))

    async def session(self, caller: Caller, session: str, *, owner: str | None) -> tuple[SessionRow, Session | None]:
        """
        Return a conversation of *caller*, or for an admin of *owner*, and what the engine keeps of it, if it does.

        Raises:
            Problem: when there is none.
        """
        whose = owner_of(caller, owner)
        key = session_key(whose, session)
        look = partial(self._ledger.sessions, owner=whose, before=None, limit=1, session=key)
        found = await asyncio.to_thread(look)
        if not found:
            msg = f"there is no session {session[:200]!r}"
            raise Problem(msg, status=404, kind="no_such_session")
        kept = self.engine.sessions
        return found[0], None if kept is None else await kept.load(key)

    async def forget_session(self, caller: Caller, session: str, *, owner: str | None) -> None:
        """
        Forget what was said in a conversation; its runs stay.

        Raises:
            Problem: when there is none, one of its runs has not ended, or the engine keeps none, or cannot forget it.
        """
        row, _ = await self.session(caller, session, owner=owner)
        await self._over(row.session)
        kept = self.engine.sessions
        if kept is None or not await kept.delete(row.session):
            msg = "what was said in this conversation is kept nowhere, or where nothing is deleted"
            raise Problem(msg, status=409, kind="not_possible")
        try:
            await self._write(forgetting(row.session))
        except InputError as error:
            raise _unended() from error

    async def _over(self, session: str) -> None:
        """
        Wait until it stands in the ledger that the runs of a conversation have ended, for those that just have.

        Raises:
            Problem: when one of them has not.
        """
        every = partial(
            self._ledger.listed, owner=None, agent=None, statuses=OPEN, before=None, limit=MOST_OPEN, session=session
        )
        until = time.monotonic() + SUSPEND_SECONDS
        while rows := await asyncio.to_thread(every):
            states = [(await self.look(row)).status for row in rows]
            if time.monotonic() > until or any(state in OPEN for state in states):
                raise _unended()
            await asyncio.sleep(SUSPENDED_SOON)

    @property
    def live(self) -> int:
        """How many runs are under way in this process."""
        return len(self._live)

    @property
    def ledger(self) -> Ledger:
        """What is known of all runs of the place."""
        return self._ledger

    async def counts(self) -> list[tuple[str, str, int]]:
        """Return how many runs of the place there are of each agent in each state."""
        return await asyncio.to_thread(
            self._ledger.read, "SELECT agent, status, count(*) FROM served GROUP BY agent, status"
        )

    @property
    def open_questions(self) -> int:
        """How many questions of runs that are under way in this process wait for an answer."""
        return sum([len(handle.questions) for handle in list(self._live.values())])


def known_agent(agents: Sequence[str], name: str) -> str:
    """Return the id of an agent that may be started; raise ``InputError`` for another one."""
    # Not by what the engine would make of it, which takes paths and other spellings, too.
    if name not in agents:
        msg = f"there is no agent {name[:200]!r} here; there are: {list_names(sorted(agents), name)}"
        raise InputError(msg, issues=(f"agent: {msg}",))
    return name


def further(most: Limits, asked: WantedRun) -> dict[str, Any]:
    """
    Return what is to be kept of the limits and pictures of what somebody asked.

    Raises:
        InputError: for a limit above *most*.
    """
    for name, value in (asked.limits or {}).items():
        here = getattr(most.over(DEFAULT_LIMITS), name)
        if here is not None and value > here:
            msg = f"limits.{name}: {value:g} is more than the agent may have here, {here:g}"
            raise InputError(msg, issues=(msg,))
    kept = {
        "limits": asked.limits and dict(asked.limits),
        "models": asked.model and {asked.agent: asked.model},
        "images": [dict(one) for one in asked.images],
    }
    return {name: value for name, value in kept.items() if value}


def started_with(request: Mapping[str, Any], previous: AgentState | None = None) -> dict[str, Any]:
    """Return the options of a run for what ``further`` kept, which goes on from *previous*."""
    options: dict[str, Any] = {}
    if request.get("limits"):
        options["limits"] = Limits(**request["limits"])
    if request.get("models"):
        options["agent_models"] = request["models"]
    if request.get("images"):
        parts = [ImagePart(data=base64.b64decode(one["data"]), mime_type=one["mime_type"]) for one in request["images"]]
        state = AgentState() if previous is None else previous
        said = [UserMessage(parts)]
        options["previous"] = attrs.evolve(
            state,
            message_history=Transcript([*state.message_history, *said]),
            view=Transcript([*state.view, *said]),
        )
    return options


def check_may_converse(caller: Caller, asked: WantedRun, *, keeps: bool) -> None:
    """Raise ``Problem`` for who speaks in a conversation that is kept, and may not answer in it."""
    if asked.session is not None and keeps and not caller.may("answer"):
        msg = (
            "what is said in a conversation may answer what the run before it asked, so that the scope 'answer' is needed "
            "beside 'run'; leave `session_id` out, or use another token"
        )
        raise Problem(msg, status=403, kind="scope_missing", members={"scope": "answer"})


def session_of(caller: Caller, session: str | None) -> str | None:
    """Return the id under which a conversation of *caller* is kept."""
    if session is not None and not session.isprintable():
        msg = "the name of a conversation has printable characters alone, so that it can stand in an address"
        raise InputError(msg, issues=(f"session_id: {msg}",))
    return None if session is None else session_key(caller.name, session)


def own_run(caller: Caller, run: str, row: RunRow | None) -> RunRow:
    """Return *row*; raise ``Problem`` when there is none, or it is not *caller*'s, which is not told apart."""
    if row is None or not (row.owner == caller.name or caller.may("admin")):
        msg = f"there is no run {run[:200]!r}"
        raise Problem(msg, status=404, kind="no_such_run")
    return row


def check_open(row: RunRow) -> None:
    """Raise ``Problem`` for a run that has ended."""
    if row.status not in OPEN:
        msg = f"the run {row.run} has ended ({row.status}), and takes nothing any more"
        raise Problem(msg, status=409, kind="ended", members={"run_status": row.status})


def session_key(owner: str, session: str) -> str:
    """Return the id under which a conversation of *owner* is kept: nobody reaches another one's by its name."""
    return f"{hashlib.sha256(owner.encode()).hexdigest()[:16]}:{session}"


def owner_of(caller: Caller, owner: str | None) -> str:
    """Return whose things are asked for: those of *caller*, unless an admin names somebody."""
    if owner is None or owner == caller.name:
        return caller.name
    caller.must("admin")
    return owner


def _unended() -> Problem:
    msg = "a run of this conversation has not ended; answer what it asks, or cancel it, first"
    return Problem(msg, status=409, kind="under_way")


def _recorded_end(journal: Journal) -> str | None:
    """
    Return how a run ended by its journal; ``None`` for one that did not, or waits.

    Raises:
        JournalMissing: when it was never begun.
    """
    if not journal.is_there():
        raise journal.missing()
    history = journal.history()
    if history.head is None:
        raise journal.missing()
    if history.is_complete:
        return status_of(history)
    # Its server was killed before it took note. The letter is written down with the end that it asked for: what a server ends as it
    # stops has none, and is to go on.
    said = [one.input for one in history.inputs if one.path == "" and one.input.get("type") == "mailbox_message"]
    was_cancelled = history.stop is not None and any(one.get("kind") == "cancel" for one in said)
    return RunStatus.CANCELLED.value if was_cancelled else None


def _result(history: Callable[[], History], row: RunRow, state: AgentState) -> RunResult:
    """Return how a run ended that rests, and left *state*, as its journal has it."""
    found = history()
    ended = ended_of(found)
    if row.status == "stranded":
        return RunResult(status=RunStatus.FAILED, state=state, error=StepEngineError(row.error))
    if ended is None:
        # How a run ended that was stopped stands in no result of it; while it can go on, neither does its end.
        status = RunStatus.SUSPENDED if row.status in OPEN else RunStatus(row.status)
        waits = tuple(found.waits()) if row.status in OPEN else ()
        more: dict[str, Any] = {"pending_questions": state.pending, "waits_for": waits}
        return RunResult(status=status, state=state, spending=spending_of(found), **more)
    return RunResult(
        status=ended.status,
        output=ended.output,
        text=ended.text,
        error=ended.error,
        spending=ended.spending,
        state=state,
    )


def _status(row: RunRow, history: History) -> str:
    if history.is_complete:
        return status_of(history)
    if row.status not in OPEN:
        # How a cancelled run ended stands in no result: its journal could go on, which nobody here lets it.
        return row.status
    return "suspended" if "suspended" in (row.status, status_of(history)) else "running"


def _of_request(
    error: StepEngineError, own: type[StepEngineError], row: RunRow, journal: Journal, *, status: int, kind: str
) -> Exception:
    """Return what clients are told of an error: an error of a class in *own*, and not of a subclass, says that a run cannot do what was asked."""
    told = error.message.replace(journal.name, f"run {row.run}")
    if isinstance(error, InputError):
        return InputError(told, issues=(told,))
    return Problem(told, status=status, kind=kind) if type(error) is own else error


def checked(
    caller: Caller, answers: Mapping[str, AnswerLike], open_: Mapping[str, Question], by: str | None = None
) -> dict[str, Answer]:
    """Return the answers as those of *caller*; raise unless every one of them fits an open question, and *caller* may say so."""
    given = fitting_answers(answers, open_, by=by or caller.name)
    needs_admin = any(
        one.remember == "always" or one.edited_input is not None or (question.startswith(DOUBT) and one.agrees)
        for question, one in given.items()
    )
    if needs_admin and not caller.may("admin"):
        msg = (
            "to allow something for good, to change what is run, or to do again what may have happened, the scope `admin` is "
            "needed; nothing was taken"
        )
        raise Problem(msg, status=403, kind="scope_missing", members={"scope": "admin"})
    return given
