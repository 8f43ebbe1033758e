"""
``DurableRuns``: the runs of a server whose work is in a database, done by this process or by workers elsewhere.

The database knows the runs; beside them stands whose they are. Nothing of a run is in the hands of a server: what is said to it is a
row before whoever says it is told, and a worker finds it. So it does not matter which of several servers is asked, and a server that
is killed loses nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, Coroutine, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs

from stepengine.data.codec import plain
from stepengine.data.questions import AnswerLike
from stepengine.durable import DatabaseAway, DurableEngine, DurableScheduler, Upkeep, migrate
from stepengine.durable.operate import question_waits
from stepengine.durable.register import Register, Registered, make_register
from stepengine.durable.schedules import durable_standings
from stepengine.engine.scheduler import Standing
from stepengine.errors import InputError, JournalError, LimitExceeded, StepEngineError
from stepengine.runtime.logs import LOGGER
from stepengine.server.ledger import OPEN, RunRow
from stepengine.server.problems import Problem
from stepengine.server.quotas import Quotas, QuotaTable, Usage, json_size
from stepengine.server.runs import (
    GRACE_SECONDS,
    Runs,
    RunStanding,
    WantedRun,
    check_may_converse,
    check_open,
    checked,
    further,
    known_agent,
    own_run,
    owner_of,
    session_of,
    started_with,
)

if TYPE_CHECKING:
    from stepengine.data.events import Event
    from stepengine.data.usage import Spending
    from stepengine.durable import Operator
    from stepengine.durable.shared_events import SharedEvents
    from stepengine.engine.schedules import Schedule
    from stepengine.journal.undoing import Undone
    from stepengine.server.access import Caller
    from stepengine.server.ledger import SessionRow
    from stepengine.sessions import Session

__all__ = ("AnyRuns", "DurableRuns")

LOOK_SECONDS = 1.0
TIDY_SECONDS = 30.0
IDLE_SECONDS = 15.0
"""How long the events of a run are kept up to date for a reader who may come back."""
ANSWER_SECONDS = 5.0
LOOKS_KEPT = 200
MOST_READERS = 100
WAITING = ("started", "running")


class DurableRuns:
    """
    The runs of one durable engine, for many callers.

    Args:
        engine: What submits, and unless it only submits, works; it is opened and closed here.
        agents: The ids of the agents that may be started; ``None`` for all of the engine.
        wait_for_answers: Seconds that a watcher is kept while a run waits.
        schedules: When agents are started by themselves.
        drain: Seconds that effects under way have when the server is told to stop.
        quotas: How much one owner may use.

    Attributes:
        quotas: What each owner uses.
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
        self.engine = engine.embedded_engine
        self.is_ready = self.is_away = False
        self.stopping = asyncio.Event()
        known = [agent.id for agent in engine.agents]
        self.agents = tuple(known if agents is None else [self.engine.agent(agent).id for agent in agents])
        self._durable = engine
        self._patience = wait_for_answers
        self._schedules = tuple(schedules)
        self._drain = drain
        self._tasks: set[asyncio.Task[Any]] = set()
        self._followed: dict[tuple[str, int], SharedEvents] = {}
        self._readers: Counter[tuple[str, int]] = Counter()
        self._left: dict[tuple[str, int], float] = {}
        self._looks: OrderedDict[tuple[str, str, int], RunStanding] = OrderedDict()
        self._is_closing = False
        self._stack = contextlib.AsyncExitStack()

        async def measure(owner: str) -> Usage:
            return Usage(*await self._register.usage(owner))

        self.quotas = QuotaTable(quotas or Quotas(), measure)

    @property
    def _operator(self) -> Operator:
        return self._durable.operator

    @property
    def _register(self) -> Register:
        return Register(self._durable.operator)

    # --- from start to end --------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """
        Connect, work unless the engine only submits, and look after what was promised.

        Raises:
            DatabaseAway: when the database cannot be reached, or has no tables.
            ExecutorBusy: when another process has the same executor id.
            StepEngineError: when the extra is not installed.
        """
        setting = self._durable.setting
        if setting.migrate and not self._durable.works:
            await migrate(setting.url)
        if not self._durable.is_open:
            await self._durable.open()
        try:
            if setting.migrate:
                await make_register(setting.url)
            await self._register.promised()
            if self._schedules:
                await self._stack.enter_async_context(DurableScheduler(self._durable, self._schedules))
        except BaseException:
            await self._durable.aclose(drain=0)
            raise
        self._spawn(self._care())
        if self._durable.works:
            self._spawn(self._take_over())
        self.is_ready = True

    async def close(self) -> None:
        """Take nothing new, and give effects under way a while; what is not over is resumed by whoever works next."""
        self._is_closing, self.is_ready = True, False
        self.stopping.set()
        await self._stack.aclose()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for key in list(self._followed):
            await self._followed.pop(key).close()
        await self._durable.aclose(drain=self._drain)

    def _spawn(self, work: Coroutine[Any, Any, object]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _care(self) -> None:
        """Submit what a server that died had promised, and know whether the database is there."""
        tidied = -TIDY_SECONDS
        while True:
            try:
                async with asyncio.timeout(ANSWER_SECONDS):
                    promised = await self._register.promised()
                    if time.monotonic() - tidied >= TIDY_SECONDS:
                        await self._register.tidy()
                        tidied = time.monotonic()
                self.is_ready, self.is_away = True, False
                for row in promised:
                    await self._keep_promise(row)
            except (DatabaseAway, TimeoutError):
                self.is_ready, self.is_away = False, True
            except Exception:  # noqa: BLE001 - nobody waits for this loop, and without it nothing is looked after any more
                LOGGER.exception("runs could not be looked after; they are looked at again within seconds")
            await self._let_go()
            await asyncio.sleep(LOOK_SECONDS)

    async def _keep_promise(self, row: Registered) -> None:
        try:
            await self._submit(row)
        except DatabaseAway:
            raise
        except StepEngineError as error:
            LOGGER.error("run %s could not be submitted: %s", row.run, error.message)
            await self._register.refuse(row.run, error.message[:2_000])

    async def _take_over(self) -> None:
        """Give the runs of workers that are gone to those that live: of all servers one does so at a time."""
        async for taken in Upkeep(self._operator).watch():
            LOGGER.warning("run %s of worker %s, which is gone: %s", taken.run, taken.executor, taken.outcome)

    # --- starting -----------------------------------------------------------------------------------------------------

    async def start(self, caller: Caller, asked: WantedRun, *, key: str | None = None) -> tuple[str, bool]:
        """
        Start a run, and return its id and whether it is new; there is no bound on how many wait in the database for a worker.

        Raises:
            DatabaseAway: when the database cannot be reached; nothing was taken.
            InputError: when prompt, params or metadata cannot be used.
            Problem: when there is no such agent, the server stops, the caller's quota is exceeded, or the key stands for another
                request.
        """
        agent = known_agent(self.agents, asked.agent)
        check_may_converse(caller, asked, keeps=True)
        self._check_stopping()
        request = {"prompt": asked.prompt, "params": plain(asked.params), "metadata": plain(asked.metadata)}
        request |= further(self.engine.agent(agent).limits, asked)
        row = self._row(caller, agent, request, session_of(caller, asked.session))
        is_repeat = key is not None and await self._register.has_key(row.owner, key, row.created)
        # A repeated request starts nothing: it is answered also where a new one would be refused.
        async with self.quotas.use(
            row.owner, 0 if is_repeat else json_size(request), runs=0 if is_repeat else 1
        ) as use:
            try:
                known = await self._register.add(row, key)
            except InputError as error:
                raise Problem(error.message, status=409, kind="key_reused") from error
            if known is not None:
                use.refund()
                return known, False
            await self._submit_first(row)
        return row.run, True

    def _check_stopping(self) -> None:
        if self._is_closing:
            msg = "the server is about to stop and starts nothing; ask again in a moment"
            raise Problem(msg, status=503, kind="stopping", headers={"retry-after": "5"})

    def _row(self, caller: Caller, agent: str, request: dict[str, Any], session: str | None) -> Registered:
        return Registered(
            run=secrets.token_hex(16), owner=caller.name, agent=agent, status="started", created=time.time(),
            request=request, session=session, is_submitted=False,
        )  # fmt: skip

    async def _submit_first(self, row: Registered) -> None:
        """Submit a run that was registered just now; what cannot be submitted was never there."""
        try:
            await self._submit(row)
        except DatabaseAway as error:
            LOGGER.warning("run %s is registered, and is submitted when the database is back: %s", row.run, error)
        except StepEngineError:
            await self._register.remove(row.run)
            raise

    async def _submit(self, row: Registered) -> None:
        """Submit what is registered; whoever does so twice submits one run."""
        asked = row.request
        if "fork" in asked:
            of = dict(asked["fork"])
            await self._durable.fork(of.pop("run"), id=row.run, **of)
        else:
            await self._durable.submit(
                row.agent, asked["prompt"], id=row.run, params=asked["params"], metadata=asked["metadata"],
                session_id=row.session, user_id=row.owner or None, **started_with(asked),
            )  # fmt: skip
        await self._register.note_submitted(row.run)

    async def _be_submitted(self, row: RunRow) -> None:
        """Make sure that there is a run to which something can be said."""
        found = await self._register.find(row.run)
        if found is not None and not found.is_submitted and found.status == "started":
            await self._submit(found)

    # --- looking ------------------------------------------------------------------------------------------------------

    async def find(self, caller: Caller, run: str) -> RunRow:
        """
        Return a run of *caller*.

        Raises:
            Problem: when there is none of that id, or it is somebody else's, which is not told apart.
        """
        found = await self._register.find(run) if run.isascii() and run.isprintable() else None
        return own_run(caller, run, None if found is None else _row_of(found))

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
        Return the runs of *caller*, those of everybody for an admin, newest first; of an *owner* those of that one.

        Raises:
            Problem: when *owner* is somebody else and *caller* no admin, and for those of a *session*.
        """
        if session is not None:
            msg = "runs in a database are not listed by conversation"
            raise _not_here(msg)
        whose = owner_of(caller, owner)
        owner = None if owner is None and caller.may("admin") else whose
        if agent is not None and not agent.isprintable():
            return []
        asked = {*statuses} - {*OPEN} | ({*WAITING} if {*statuses} & {*OPEN} else set())
        shown: list[RunRow] = []
        while True:
            found = await self._register.listed(
                owner=owner, agent=agent, statuses=sorted(asked), before=before, limit=limit, search=search
            )
            resting = await self._operator.resting([row.run for row in found if row.status == "running"])
            rows = [_row_of(row, "suspended" if row.run in resting else row.status) for row in found]
            shown += [row for row in rows if not statuses or row.status in statuses or _is_meant(row, statuses)]
            if len(found) < limit or len(shown) >= limit:
                return shown[:limit]
            before = found[-1].created, found[-1].run

    async def look(self, row: RunRow) -> RunStanding:
        """Return how a run stands, by the database."""
        if row.status in OPEN:
            return await self._under_way(row)
        key = (row.run, row.status, row.tries)
        known = self._looks.get(key)
        if known is not None:
            return attrs.evolve(known, row=row)
        look = self._looks[key] = await self._look_at_ended(row)
        while len(self._looks) > LOOKS_KEPT:
            self._looks.popitem(last=False)
        return look

    async def _under_way(self, row: RunRow) -> RunStanding:
        # Of one look: what a run that rests asks, asked for by itself, would be what it asked before or after that, and whoever
        # waits for its question would be told that there is none.
        resting = await self._operator.resting([row.run]) if row.status != "started" else {}
        rests = row.run in resting
        asked, left = resting[row.run] if rests else (await self._operator.waiting(row.run), [])
        questions = tuple([question for each in asked for question in each.questions])
        return RunStanding(
            row=row,
            status="suspended" if rests else "running",
            questions=questions,
            waits_for=(*question_waits(asked), *left) if rests else (),
            parent=_parent_of(row),
        )

    async def _look_at_ended(self, row: RunRow) -> RunStanding:
        found = await self._register.find(row.run)
        if found is not None and not found.is_submitted:
            return RunStanding(row=row, status=row.status, error=row.error)
        try:
            result = await self._durable.result(row.run)
        except JournalError:
            raise
        except StepEngineError as error:
            # Why it stopped without a result.
            return RunStanding(row=row, status=row.status, error=error.message)
        has_result = row.status not in ("cancelled", "stranded")
        return RunStanding(
            row=row,
            status=row.status,
            output=plain(result.output),
            text=result.text,
            error=row.error or ("" if result.error is None else str(result.error)),
            usage=plain(result.usage) if has_result else None,
            cost=str(result.cost) if has_result and result.cost is not None else None,
            parent=_parent_of(row),
        )

    # --- watching -----------------------------------------------------------------------------------------------------

    def _shared_events(self, row: RunRow) -> SharedEvents:
        key = row.run, row.tries
        known = self._followed.get(key)
        if known is None:
            known = self._followed[key] = self._durable.shared_events(row.run, tries=row.tries)
            self._left[key] = time.monotonic()
        return known

    async def may_be_over(self, row: RunRow, after: str | None) -> bool:
        """
        Return whether there may be no event behind *after*.

        Raises:
            ReplayDivergence: when the run is of agents that this server does not have.
            LimitExceeded: when too many watch it.
            StepEngineError: when *after* is not an id of an event of this run.
        """
        await self._be_submitted(row)
        if self._readers[row.run, row.tries] >= MOST_READERS:
            msg = f"{MOST_READERS} watch this run already; ask again in a moment"
            raise LimitExceeded(msg, kind="readers", limit=MOST_READERS)
        shared = self._shared_events(row)
        await shared.place(after)
        if shared.is_resting:
            # It may have been answered since: who is told that nothing more comes does not ask again.
            await shared.look()
        return shared.is_over or shared.is_resting

    def reader(self, after: str | None) -> None:
        """Return nothing: an event's own id says how far a reader has come, at every server."""

    async def events(self, row: RunRow, after: str | None) -> AsyncGenerator[Event, None]:
        """
        Give the events of a run from its first on, or from behind *after*, with the same ids by every server.

        They follow the record: texts come whole and not in pieces. Where a run waits, a watcher is kept for a while.
        """
        key = row.run, row.tries
        self._readers[key] += 1
        try:
            shared = self._shared_events(row)
            async with contextlib.aclosing(shared.read(await shared.place(after), patience=self._patience)) as events:
                async for event in events:
                    yield event
        finally:
            self._readers[key] -= 1
            self._left[key] = time.monotonic()

    async def _let_go(self) -> None:
        """Follow no run any more that nobody watches."""
        for key in list(self._followed):
            if self._readers[key] <= 0 and time.monotonic() - self._left[key] > IDLE_SECONDS:
                del self._readers[key], self._left[key]
                await self._followed.pop(key).close()

    # --- saying something ---------------------------------------------------------------------------------------------

    async def answer(self, caller: Caller, row: RunRow, answers: Mapping[str, AnswerLike]) -> None:
        """
        Answer open questions, all or none of them.

        Raises:
            AnswerRejected: when one is not open, is not answered by that, or somebody else was faster.
            Problem: when *caller* may not answer so.
        """
        check_open(row)
        asked = await self._operator.waiting(row.run)
        open_ = {question.id: question for each in asked for question in each.questions}
        await self._operator.answer_first(row.run, checked(caller, answers, open_))

    async def post(self, row: RunRow, topic: str, value: object, *, id: str | None, path: str) -> bool:
        """Send a message to the receiver of *topic*; errors are those of ``DurableEngine.post``, and ``Problem`` over a quota."""
        check_open(row)
        await self._be_submitted(row)
        size = json_size(value)
        async with self.quotas.use(row.owner, size) as use:
            with _of_the_run(status=409, kind="not_possible"):
                is_new = await self._operator.post(row.run, topic, value, id=id, path=path)
            if is_new:
                await self._register.add_bytes(row.run, size)
            else:
                use.refund()
        return is_new

    async def say(self, row: RunRow, text: str) -> None:
        """Say something to a run: its next model call sees it as what the user says."""
        check_open(row)
        await self._be_submitted(row)
        size = json_size(text)
        async with self.quotas.use(row.owner, size):
            with _of_the_run(status=409, kind="not_possible"):
                await self._operator.say(row.run, text)
            await self._register.add_bytes(row.run, size)

    async def cancel(self, row: RunRow, reason: str) -> None:
        """End a run and all below it; one that has ended stays as it is."""
        if row.status not in OPEN:
            return
        await self._be_submitted(row)
        if reason:
            await self._register.note(row.run, reason)
        await self._operator.cancel(row.run)

    async def give_result(self, row: RunRow, call_id: str, result: object, path: str | None) -> None:
        """
        Refuse the result of a call.

        Raises:
            Problem: always: a durable run fails at a deferred tool, and none of its calls waits.
        """
        check_open(row)
        msg = (
            f"no call {call_id[:200]!r} of the run {row.run} waits: a run in a database waits for results from outside with `Receive`, "
            "and is sent them as messages"
        )
        raise Problem(msg, status=409, kind="not_possible")

    # --- going back ---------------------------------------------------------------------------------------------------

    async def resume(self, row: RunRow) -> None:
        """
        Go on with a run that stopped without a result, or that began with other code and waits for a worker that has it.

        Raises:
            Problem: when it has ended, or cannot go on.
            ReplayDivergence: when this server's agents do something else than is recorded; nothing was changed.
        """
        if row.status in OPEN:
            await self._be_submitted(row)
            if (await self._operator.run(row.run)).release not in (None, self._durable.release):
                with _of_the_run(status=409, kind="not_possible"):
                    await self._durable.move(row.run)
            return
        if row.status != "stranded":
            check_open(row)
        with _of_the_run(status=409, kind="not_possible"):
            await self._operator.retry(row.run)
        await self._register.count_try(row.run)

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
            Problem: when there is no such place, the caller's quota is exceeded, or the agent was to be changed: every worker has its own.
            UndoRefused: when effects that changed the world could happen again.
        """
        self._check_stopping()
        if changes:
            msg = "a run in a database goes on at whichever worker takes it, with the agent that is deployed there"
            raise _not_here(msg)
        options = {"edit": plain(edit)} if has_edit else {}
        asked = {"fork": {"run": row.run, "at": at, "allow_repeat": allow_repeat, **options}}
        new = self._row(caller, row.agent, asked, row.session)
        async with self.quotas.use(new.owner, json_size(asked), runs=1):
            await self._register.add(new, None)
            with _of_the_run(status=422, kind="no_such_place"):
                await self._submit_first(new)
        return new.run

    async def content(self, row: RunRow) -> bytes:
        """Return what is recorded as a journal."""
        await self._be_submitted(row)
        with _of_the_run(status=409, kind="not_possible"):
            return (await self._durable.export(row.run)).content()

    async def undo(self, row: RunRow, *, at: int | str = -1, dry_run: bool = False, partial: bool = False) -> Undone:
        """
        Refuse to undo.

        Raises:
            Problem: always: what a run wrote is kept by the journals of files alone.
        """
        msg = "what a run in a database wrote is not kept, so nothing of it can be undone"
        raise _not_here(msg)

    async def spending(self, row: RunRow) -> Spending:
        """Return what a run spent; what it spent so far is not known before its end."""
        if row.status in OPEN or row.status in ("cancelled", "stranded"):
            msg = "what a run in a database cost is known when it has ended with a result"
            raise _not_here(msg)
        return (await self._durable.result(row.run)).spending

    # --- conversations ------------------------------------------------------------------------------------------------

    async def sessions(
        self, caller: Caller, *, owner: str | None, before: tuple[float, str] | None, limit: int
    ) -> list[SessionRow]:
        """Refuse to list conversations."""
        msg = "conversations in a database are shown by the runs that they are made of"
        raise _not_here(msg)

    async def session(self, caller: Caller, session: str, *, owner: str | None) -> tuple[SessionRow, Session | None]:
        """Refuse to show a conversation."""
        msg = "conversations in a database are shown by the runs that they are made of"
        raise _not_here(msg)

    async def forget_session(self, caller: Caller, session: str, *, owner: str | None) -> None:
        """Refuse to forget a conversation."""
        msg = "conversations in a database are forgotten with their runs, by `stepengine deploy gc`"
        raise _not_here(msg)

    # --- beside runs --------------------------------------------------------------------------------------------------

    async def standings(self) -> list[Standing]:
        """Return how the schedules stand."""
        try:
            return await durable_standings(self._operator, self._schedules, now=datetime.now(UTC))
        except JournalError as error:
            if isinstance(error.__cause__, DatabaseAway):
                raise error.__cause__ from None
            raise

    @property
    def live(self) -> int:
        """How many runs this process executes; none where the work is done elsewhere."""
        return self._durable.live

    @property
    def open_questions(self) -> int:
        """How many questions wait in the memory of this process: none, a run that asks is suspended at once."""
        return 0

    async def counts(self) -> list[tuple[str, str, int]]:
        """Return how many runs that were started here there are of each agent in each state."""
        return await self._register.counts()


AnyRuns: TypeAlias = Runs | DurableRuns
"""What routes work with."""


def _parent_of(row: RunRow) -> Mapping[str, str] | None:
    fork = row.request.get("fork")
    return {"run": str(fork["run"]), "at": str(fork["at"])} if isinstance(fork, Mapping) else None


def _not_here(message: str) -> Problem:
    return Problem(message, status=409, kind="not_possible")


def _row_of(found: Registered, status: str = "") -> RunRow:
    # A conversation that somebody started past this server has no name of an owner before its own, and such a run no request.
    session = found.session if found.session is None or found.owner else f":{found.session}"
    return RunRow(
        found.run, found.owner, found.agent, status or found.status, found.created, found.created, found.request or {}, session,
        found.tries, found.error,
    )  # fmt: skip


def _is_meant(row: RunRow, statuses: Sequence[str]) -> bool:
    """Return whether a run that no worker has yet is asked for: it is shown as one that is running."""
    return row.status == "started" and "running" in statuses


@contextlib.contextmanager
def _of_the_run(*, status: int, kind: str) -> Any:
    """Tell a client of an error that says that a run cannot do what was asked."""
    try:
        yield
    except JournalError as error:
        if type(error) is not JournalError:  # subclasses have statuses of their own
            raise
        raise Problem(error.message, status=status, kind=kind) from None
