"""
``SharedRates``: how often providers are asked by all workers of a database together.

It takes the place of an engine's own limiters, with the same ``RateLimit``. Two small tables hold the counts for each account (a
provider's prefix and the fingerprint of its key): the requests and tokens in each of the last 60 seconds, and for each worker
the number of running requests and since when it waits. One function of the database decides, by the database's clock and one
worker at a time: a request that need not wait takes one query. Nothing here knows what a run is.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, NamedTuple

from stepengine.durable.database import (
    convert_database_errors,
    fetch_value,
    hold_lock,
    list_connection_errors,
    open_connection,
    quote_sql_name,
)
from stepengine.errors import DatabaseUnavailable, StepEngineError
from stepengine.models.base import Provider
from stepengine.runtime.rates import RateLimit, WaitReason, find_rate_limit

WORKER_LOCK = "select pg_advisory_lock(hashtextextended('stepengine-rates:' || %s, 0))"
TABLES_LOCK = "stepengine-rate-tables"
THERE = "select to_regproc('stepengine.let_through_1') is not null"
TABLES = """
create schema if not exists stepengine;
create table if not exists stepengine.rate_seconds (
    account text, second bigint, requests bigint not null, tokens bigint not null, primary key (account, second)
) with (fillfactor = 50);
create table if not exists stepengine.rate_workers (
    account text, worker text, running bigint not null, waits double precision, asked double precision not null,
    primary key (account, worker)
) with (fillfactor = 50);
"""
LET_THROUGH = """
create or replace function stepengine.let_through_1(
    of_account text, of_worker text, under_way bigint, waited double precision[], expected bigint[],
    at_seconds bigint[], by_tokens bigint[], most_requests bigint, most_tokens bigint, most_running bigint,
    out let bigint, out at_second bigint, out obstacle text, out wait double precision, out ahead bigint
) language plpgsql as $$
declare
    now_is double precision;
    requests_are bigint;
    tokens_are bigint;
    oldest_second bigint;
    elsewhere bigint;
    first_elsewhere double precision;
begin
    -- One worker at a time; what the one before wrote is seen by every statement below.
    perform pg_advisory_xact_lock(hashtextextended('stepengine-account:' || of_account, 0));
    now_is := extract(epoch from clock_timestamp());
    at_second := floor(now_is);
    let := 0;
    update stepengine.rate_seconds s set tokens = greatest(0, s.tokens + c.more)
        from (select unnest(at_seconds) as second, unnest(by_tokens) as more) c
        where s.account = of_account and s.second = c.second;
    -- A second counts until its last moment is 60 seconds ago; one that is far ahead is of before the clock was put back.
    delete from stepengine.rate_seconds s
        where s.account = of_account and (s.second <= at_second - 61 or s.second > at_second + 60);
    select coalesce(sum(s.requests), 0), coalesce(sum(s.tokens), 0), min(s.second)
        into requests_are, tokens_are, oldest_second
        from stepengine.rate_seconds s where s.account = of_account;
    select coalesce(sum(w.running), 0) into elsewhere
        from stepengine.rate_workers w where w.account = of_account and w.worker <> of_worker;
    if not exists (select 1 from stepengine.rate_workers w where w.account = of_account and w.worker = of_worker)
        or (elsewhere > 0 and elsewhere + under_way + cardinality(waited) > most_running)
    then
        -- Whoever died holds the lock of its connection no more, and has nothing under way.
        delete from stepengine.rate_workers w
            where w.account = of_account and w.worker <> of_worker and not exists (
                select 1 from pg_locks l
                where l.locktype = 'advisory' and l.granted and l.objsubid = 1
                    and l.database = (select oid from pg_database where datname = current_database())
                    and ((l.classid::bigint << 32) | l.objid::bigint) = hashtextextended('stepengine-rates:' || w.worker, 0)
            );
        select coalesce(sum(w.running), 0) into elsewhere
            from stepengine.rate_workers w where w.account = of_account and w.worker <> of_worker;
    end if;
    -- Whoever waits asks at least every second; whoever no longer asks no longer waits.
    select min(w.waits), count(*) filter (where w.waits < now_is - coalesce(waited[1], 0)) into first_elsewhere, ahead
        from stepengine.rate_workers w
        where w.account = of_account and w.worker <> of_worker and w.waits is not null and w.asked > now_is - 5;
    for n in 1 .. cardinality(waited) loop
        if first_elsewhere < now_is - waited[n] then
            obstacle := 'queue';
        elsif most_running is not null and elsewhere + under_way + let >= most_running then
            obstacle := 'concurrency';
        elsif most_requests is not null and requests_are >= most_requests then
            obstacle := 'requests';
            wait := coalesce(oldest_second, at_second) + 61 - now_is;
        elsif most_tokens is not null and requests_are > 0 and tokens_are + expected[n] > most_tokens then
            obstacle := 'tokens';
            select coalesce(min(c.second), at_second) + 61 - now_is into wait from (
                select s.second, sum(s.tokens) over (order by s.second) as gone
                from stepengine.rate_seconds s where s.account = of_account
            ) c where tokens_are - c.gone <= greatest(0, most_tokens - expected[n]);
        end if;
        exit when obstacle is not null;
        requests_are := requests_are + 1;
        tokens_are := tokens_are + expected[n];
        let := let + 1;
    end loop;
    if let > 0 then
        insert into stepengine.rate_seconds as s
            values (of_account, at_second, let, (select sum(e) from unnest(expected[1:let]) e))
            on conflict (account, second) do update
                set requests = s.requests + excluded.requests, tokens = s.tokens + excluded.tokens;
    end if;
    insert into stepengine.rate_workers as w values (of_account, of_worker, under_way + let, now_is - waited[let + 1], now_is)
        on conflict (account, worker) do update set running = excluded.running, waits = excluded.waits, asked = excluded.asked;
end $$;
"""
ASK = """
select let, at_second, obstacle, wait, ahead from stepengine.let_through_1(
    %s, %s, %s::bigint, %s::double precision[], %s::bigint[], %s::bigint[], %s::bigint[], %s::bigint, %s::bigint, %s::bigint)
"""
GRANTS = (
    "grant usage on schema stepengine",
    "grant select, insert, update, delete on stepengine.rate_seconds, stepengine.rate_workers",
)
BATCH_REQUESTS = 100
"""Requests that one question asks for: more than one account lets through in a second."""
MIN_LOOK_SECONDS = 0.1
"""A slot may become free at any moment, and a model call takes a second or more, so a tenth is not noticed."""
MAX_LOOK_SECONDS = 1.0
"""Workers that wait in a long line must see within a second that the line moved."""
REPORT_SECONDS = 0.05
"""A freed slot is reported with the next request if one comes this soon, and alone otherwise: others wait for it."""
FIRST_AWAY_SECONDS = 0.5
"""A lost connection is usually back at the first attempt."""
MAX_AWAY_SECONDS = 5.0
"""All workers ask a database that has restarted within five seconds, and do not keep it busy until then."""


async def create_rate_tables(connection: Any, *, role: str | None = None) -> None:
    """Create the tables of shared rate limits over *connection* and let *role* use them; safe to call concurrently."""
    async with hold_lock(connection, TABLES_LOCK):
        await connection.execute(TABLES)
        await connection.execute(LET_THROUGH)
        for grant in GRANTS if role is not None else ():
            await connection.execute(f"{grant} to {quote_sql_name(role or '')}")


class _AdmittedRequest(NamedTuple):
    """An admitted request: the second of the database's clock at which it was admitted, and the tokens counted for it."""

    second: int
    tokens: int


class _WaitingRequest:
    """A request that waits for admission."""

    __slots__ = ("news", "obstacle", "since", "ticket", "tokens")

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        # This worker's own clock, and told as an age: two workers' clocks need not agree, and the database turns ages
        # into its own time.
        self.since = time.monotonic()
        self.news = asyncio.Event()
        self.obstacle: WaitReason | None = None
        self.ticket: asyncio.Future[_AdmittedRequest] = asyncio.get_running_loop().create_future()

    def record_obstacle(self, obstacle: WaitReason) -> None:
        """Record why the request waits; only the first reason is reported."""
        self.obstacle = self.obstacle or obstacle
        self.news.set()

    def admit_or_fail(self, ticket: _AdmittedRequest | StepEngineError) -> None:
        if isinstance(ticket, StepEngineError):
            self.ticket.set_exception(ticket)
        else:
            self.ticket.set_result(ticket)
        self.news.set()


class SharedRates:
    """
    The limiters of a worker, which it shares with all workers of its database.

    Args:
        limits: One limit that applies to each provider separately, or limits by provider prefix.
        url: The database.
    """

    def __init__(self, limits: RateLimit | Mapping[str, RateLimit], url: str) -> None:
        self._limits = limits
        self._url = url
        self._worker = secrets.token_hex(8)
        self._limiters: dict[str, SharedLimiter] = {}
        self._own: Any = None
        self._asking = asyncio.Lock()
        self._effect_slots: asyncio.Semaphore | None = None
        self._taking: set[asyncio.Task[Any]] = set()

    async def open(self, effect_slots: asyncio.Semaphore, *, migrate: bool) -> None:
        """
        Connect, and check that the tables exist, or create them if *migrate* is true.

        Args:
            effect_slots: The slots of effects: a request lets others use its own while it waits.
            migrate: Whether missing tables are created.

        Raises:
            DatabaseUnavailable: when the database cannot be reached.
            StepEngineError: when the tables are missing.
        """
        self._effect_slots = effect_slots
        with convert_database_errors(self._url):
            own = await self._open_or_get_connection()
            is_there = await fetch_value(own, THERE)
            if migrate and not is_there:
                await create_rate_tables(own)
        if not (is_there or migrate):
            await self.close()
            msg = "the database does not have the tables for rate_limits=: run `stepengine deploy migrate`"
            raise StepEngineError(msg)

    async def close(self) -> None:
        """Stop the limiters and close the connection; waiting requests stay waiting. May be called twice."""
        for limiter in self._limiters.values():
            await limiter.close()
        self._limiters.clear()
        await self._close_connection()

    async def _close_connection(self) -> None:
        own, self._own = self._own, None
        if own is not None:
            await own.close()

    def find_limiter(self, provider: str, source: Provider) -> SharedLimiter | None:
        """
        Return the limiter of a provider and its key, created at the first call; ``None`` if they have no limit.

        Raises:
            ModelError: When there is no key.
        """
        limit = find_rate_limit(self._limits, provider)
        if limit is None or limit == RateLimit():
            return None
        # By provider and key, as the provider counts. The account reveals neither key nor address.
        account = f"{provider}:{source.get_account()}"
        return self._limiters.get(account) or self._limiters.setdefault(account, SharedLimiter(self, account, limit))

    async def request_admissions(self, account: str, *given: Any) -> Any:
        """
        Request admissions for *account* from the database; retry while it is unreachable.

        Raises:
            psycopg.Error: When the query fails for another reason.
        """
        pause = FIRST_AWAY_SECONDS
        lost: tuple[type[Exception], ...] = (DatabaseUnavailable, *list_connection_errors())
        # One question at a time over the one connection; what comes meanwhile is asked for together with the next one.
        async with self._asking:
            while True:
                try:
                    own = await self._open_or_get_connection()
                    return await (await own.execute(ASK, (account, self._worker, *given))).fetchone()
                except lost:
                    await self._close_connection()
                await asyncio.sleep(pause)
                # It waits as long as it takes and does not fail: a request that was not counted would break the limit
                # of all others, and the run has nothing else to do.
                pause = min(2 * pause, MAX_AWAY_SECONDS)

    async def _open_or_get_connection(self) -> Any:
        """Return the open connection, or open one and acquire the lock that marks this worker as alive."""
        if self._own is None or self._own.closed:
            own = await open_connection(self._url)
            # A lock that the database gives back with the connection: others see by it that this worker died, and its
            # requests count no longer, without anybody keeping time.
            await own.execute(WORKER_LOCK, (self._worker,))
            self._own = own
        return self._own

    @contextlib.asynccontextmanager
    async def release_effect_slot(self) -> AsyncIterator[None]:
        """Release this effect's slot while the block waits."""
        effects = self._effect_slots
        if effects is None:
            yield
            return
        # A worker has few places for effects. Requests that only wait for their turn would hold all of them, and no
        # tool could run.
        effects.release()
        try:
            yield
        finally:
            # Whoever is cancelled gives back at its end a place that is only taken here: that comes to the same.
            taken: asyncio.Task[Any] = asyncio.create_task(effects.acquire())
            self._taking.add(taken)
            taken.add_done_callback(self._taking.discard)
        await asyncio.shield(taken)


class SharedLimiter:
    """
    Lets the requests of one worker to one account through.

    Args:
        rates: Whom the database is asked through.
        account: The account.
        limit: The rate limit.
    """

    def __init__(self, rates: SharedRates, account: str, limit: RateLimit) -> None:
        self._rates = rates
        self._account = account
        self._limit = limit
        self._waiting: deque[_WaitingRequest] = deque()
        self._running = 0
        self._corrections: dict[int, int] = {}
        self._owes = False
        self._changed = asyncio.Event()
        self._asker: asyncio.Task[None] | None = None

    async def enter(self, tokens: int, notice: Callable[[WaitReason], None]) -> _AdmittedRequest:
        """
        Wait for admission among the requests of all workers; a cancelled wait admits the next one.

        Args:
            tokens: The expected number of tokens of the request.
            notice: Called once with the reason if the request has to wait.

        Raises:
            StepEngineError: When the database refuses the query.
        """
        turn = _WaitingRequest(tokens)
        self._waiting.append(turn)
        self._start_or_wake_admission_task()
        try:
            await turn.news.wait()
            if turn.obstacle is None:
                return await turn.ticket
            notice(turn.obstacle)
            async with self._rates.release_effect_slot():
                return await turn.ticket
        except asyncio.CancelledError:
            self._leave_queue(turn)
            raise

    def _leave_queue(self, turn: _WaitingRequest) -> None:
        """Remove a cancelled request from the queue; if it was just admitted, report its end."""
        ticket = turn.ticket
        if ticket.done() and not ticket.cancelled() and ticket.exception() is None:
            self.leave(ticket.result(), 0)
            return
        ticket.cancel()
        with contextlib.suppress(ValueError):
            self._waiting.remove(turn)
        self._owes = True
        self._start_or_wake_admission_task()

    def leave(self, ticket: _AdmittedRequest, used: int | None) -> None:
        """Release the slot of an ended request and correct its tokens to *used*; ``None`` for an unknown number."""
        self._running -= 1
        if used is not None and used != ticket.tokens and self._limit.tokens_per_minute is not None:
            self._corrections[ticket.second] = self._corrections.get(ticket.second, 0) + used - ticket.tokens
        if self._limit.max_concurrency is not None or self._corrections:
            self._owes = True
            self._start_or_wake_admission_task(is_news=bool(self._waiting))

    def _start_or_wake_admission_task(self, *, is_news: bool = True) -> None:
        """Start the task that asks for admissions if it does not run; with *is_news*, end its pause."""
        if is_news:
            self._changed.set()
        if self._asker is None or self._asker.done():
            self._asker = asyncio.create_task(self._request_admissions_until_done())

    async def _request_admissions_until_done(self) -> None:
        """Ask for admissions while requests wait, or ended requests or corrections are unreported."""
        try:
            while self._waiting or self._owes:
                if not self._waiting:
                    # Whoever comes next takes it along.
                    await self._wait_for_change(
                        MAX_LOOK_SECONDS if self._limit.max_concurrency is None else REPORT_SECONDS
                    )
                self._changed.clear()
                self._owes = False
                pause = await self._request_admissions()
                if pause is not None:
                    await self._wait_for_change(pause)
        except asyncio.CancelledError:
            raise  # by `close`
        except BaseException as error:  # noqa: BLE001 - also one of a test framework must end the waits
            msg = f"the rate limit of {self._account!r}, which all workers share, cannot be read: {error}"
            while self._waiting:
                turn = self._waiting.popleft()
                if not turn.ticket.done():  # a cancelled request leaves the queue only when its task runs
                    turn.admit_or_fail(StepEngineError(msg))

    async def _wait_for_change(self, seconds: float) -> None:
        """Wait until this worker's requests change, up to *seconds*."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    async def _request_admissions(self) -> float | None:
        """Request admission for the waiting requests; return the seconds until the next attempt, ``None`` to retry at once."""
        limit, now = self._limit, time.monotonic()
        asked = list(self._waiting)[:BATCH_REQUESTS]
        corrections, self._corrections = self._corrections, {}
        let, second, obstacle, wait, ahead = await self._rates.request_admissions(
            self._account, self._running, [now - turn.since for turn in asked], [turn.tokens for turn in asked],
            list(corrections), list(corrections.values()),
            limit.requests_per_minute, limit.tokens_per_minute, limit.max_concurrency,
        )  # fmt: skip
        for turn in asked[:let]:
            self._running += 1
            ticket = _AdmittedRequest(second, turn.tokens)
            if turn.ticket.cancelled():
                self.leave(ticket, 0)
                continue
            self._waiting.remove(turn)
            turn.admit_or_fail(ticket)
        if obstacle is None:
            return None
        for turn in self._waiting:
            turn.record_obstacle(WaitReason("queue") if turn is not self._waiting[0] else WaitReason(obstacle, wait))
        pause: float = MIN_LOOK_SECONDS * (1 + ahead) if wait is None else max(wait, MIN_LOOK_SECONDS)
        return min(MAX_LOOK_SECONDS, pause)

    async def close(self) -> None:
        """Cancel the admission task and wait for its end; waiting requests stay waiting."""
        if self._asker is not None:
            self._asker.cancel()
            await asyncio.wait((self._asker,))
