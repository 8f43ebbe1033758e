"""
Rate limits of an engine: what starts when, who is next, and what is counted.
"""

from __future__ import annotations

import asyncio
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepengine.data.models import ModelReply, ModelRequest, ModelSettings, ReplyDone, TextChunk
from stepengine.data.usage import Usage
from stepengine.errors import DefinitionError, ModelError
from stepengine.models import Models, Provider
from stepengine.runtime import RateLimit, RateLimits
from stepengine.runtime.rates import Limiter, make_rate_limited_provider


class Time:
    """
    A clock that moves on when somebody says so.
    """

    def __init__(self):
        self.ms = 0
        self._sleepers = []

    def now_ms(self):
        return self.ms

    async def sleep(self, seconds):
        future = asyncio.get_running_loop().create_future()
        self._sleepers.append((self.ms + seconds * 1000, future))
        await future

    async def pass_(self, seconds):
        self.ms += int(seconds * 1000)
        for until, future in self._sleepers:
            if until <= self.ms and not future.done():
                future.set_result(None)
        await settle()

    @property
    def sleeping(self):
        return sum(not future.done() for _, future in self._sleepers)


async def settle():
    for _ in range(30):
        await asyncio.sleep(0)


class Crowd:
    """
    Requests to one limiter, each in a task of its own.
    """

    def __init__(self, time, **limit):
        self.limiter = Limiter(RateLimit(**limit), time)
        self.time = time
        self.began = []
        self.obstacles = {}
        self.tickets = {}
        self.tasks = {}

    async def add(self, *names, tokens=1):
        for name in names:
            self.tasks[name] = asyncio.create_task(self._enter(name, tokens))
        await settle()
        return self

    async def _enter(self, name, tokens):
        self.tickets[name] = await self.limiter.enter(tokens, lambda o: self.obstacles.setdefault(name, o))
        self.began.append((name, self.time.ms // 1000))

    async def end(self, name, used=None):
        self.limiter.leave(self.tickets[name], used)
        await settle()


@pytest.mark.spec("requirements:N15")
async def test_requests_per_minute_holds_in_any_sixty_seconds():
    time = Time()
    crowd = await Crowd(time, requests_per_minute=2).add("a")
    await time.pass_(50)
    await crowd.add("b", "c", "d", "e")
    for _ in range(20):
        await time.pass_(10)

    assert [("a", 0), ("b", 50), ("c", 60), ("d", 110), ("e", 120)] == crowd.began
    assert ("requests", 10.0) == crowd.obstacles["c"]
    assert ("queue", None) == crowd.obstacles["d"]
    assert "a" not in crowd.obstacles


@pytest.mark.spec("requirements:N15")
async def test_reserved_tokens_are_corrected_by_use_and_admit_waiters():
    time = Time()
    crowd = await Crowd(time, tokens_per_minute=100).add("a", "b", tokens=60)

    assert [("a", 0)] == crowd.began
    assert ("tokens", 60.0) == crowd.obstacles["b"]

    await crowd.end("a", 40)

    assert [("a", 0), ("b", 0)] == crowd.began

    await crowd.end("b", 95)
    await crowd.add("c", tokens=1)
    await time.pass_(59)

    assert 2 == len(crowd.began)

    await time.pass_(1)

    assert ("c", 60) == crowd.began[-1]


async def test_use_reported_after_its_minute_counts_for_nothing():
    time = Time()
    crowd = await Crowd(time, tokens_per_minute=100).add("a", tokens=60)
    await time.pass_(61)
    await crowd.add("b", tokens=60)
    await crowd.end("a", 1_000)
    await crowd.add("c", tokens=40)

    assert ["a", "b", "c"] == [name for name, _ in crowd.began]


async def test_request_larger_than_the_limit_runs_alone():
    time = Time()
    crowd = await Crowd(time, tokens_per_minute=100).add("a", tokens=5)
    await crowd.add("huge", tokens=500)
    await crowd.add("c", tokens=5)
    await time.pass_(60)

    assert [("a", 0), ("huge", 60)] == crowd.began

    await time.pass_(60)

    assert ("c", 120) == crowd.began[-1]


@pytest.mark.spec("requirements:N15")
async def test_max_concurrency_holds_and_waiters_are_served_in_order():
    time = Time()
    crowd = await Crowd(time, max_concurrency=2).add("a", "b", "c", "d", "e")

    assert ["a", "b"] == [name for name, _ in crowd.began]
    assert ("concurrency", None) == crowd.obstacles["c"]

    for name in "bacde":
        await crowd.end(name)

    assert ["a", "b", "c", "d", "e"] == [name for name, _ in crowd.began]
    assert 0 == time.sleeping


@pytest.mark.parametrize("limit", [{"max_concurrency": 1}, {"requests_per_minute": 1}, {"tokens_per_minute": 1}])
async def test_cancelled_waiter_passes_its_place_on(limit):
    time = Time()
    crowd = await Crowd(time, **limit).add("a", "b", "c")
    crowd.tasks["b"].cancel()
    await settle()
    await crowd.end("a")
    await time.pass_(60)

    assert ["a", "c"] == [name for name, _ in crowd.began]
    assert crowd.tasks["b"].cancelled()
    assert 0 == time.sleeping


@pytest.mark.deep
@given(
    limit=st.builds(
        RateLimit,
        requests_per_minute=st.none() | st.integers(1, 4),
        tokens_per_minute=st.none() | st.integers(10, 60),
        max_concurrency=st.none() | st.integers(1, 3),
    ),
    jobs=st.lists(st.tuples(st.integers(1, 50), st.integers(0, 90), st.integers(0, 50)), max_size=12),
)
def test_rate_limits_hold_and_waiters_are_served_in_order(limit, jobs):
    async def main():
        time, done, running, began = Time(), 0, 0, []
        limiter = Limiter(limit, time)

        async def job(number, tokens, seconds, used):
            nonlocal done, running
            ticket = await limiter.enter(tokens, lambda _: None)
            running += 1
            began.append((number, time.ms, tokens))
            assert limit.max_concurrency is None or running <= limit.max_concurrency
            await time.sleep(seconds)
            running -= 1
            limiter.leave(ticket, min(used, tokens))
            done += 1

        tasks = [asyncio.create_task(job(number, *entry)) for number, entry in enumerate(jobs)]
        await settle()
        for _ in range(200):
            await time.pass_(30)
        assert len(jobs) == done
        assert [number for number, _, _ in began] == list(range(len(jobs)))
        if limit.requests_per_minute is not None:
            for _, at, _ in began:
                assert sum(at <= other < at + 60_000 for _, other, _ in began) <= limit.requests_per_minute
        await asyncio.gather(*tasks)

    asyncio.run(main())


def test_limiter_serves_several_event_loops_and_survives_a_closed_one():
    limiter = Limiter(RateLimit(max_concurrency=1), Time())

    async def enter():
        return await limiter.enter(1, lambda _: None)

    held = asyncio.run(enter())
    dead = asyncio.new_event_loop()
    forgotten = dead.create_task(enter())
    dead.run_until_complete(asyncio.sleep(0))
    forgotten._log_destroy_pending = False
    dead.close()
    got = []
    thread = threading.Thread(target=lambda: got.append(asyncio.run(enter())))
    thread.start()
    while len(limiter._queue) < 1 or limiter._queue[0]._loop is dead:
        pass
    limiter.leave(held, None)
    thread.join()

    assert 1 == len(got)


@pytest.mark.parametrize("wrong", [{"requests_per_minute": 0}, {"tokens_per_minute": -1}, {"max_concurrency": 0}])
def test_limit_of_zero_or_less_raises(wrong):
    with pytest.raises(DefinitionError, match="allows no requests; every limit must be at least 1"):
        RateLimit(**wrong)


# --- around providers -----------------------------------------------------------------------------------------------


class Said(Provider):
    """
    A provider that waits for its gate and then says what it was given.
    """

    def __init__(self, name, reply="ok"):
        self.name = name
        self.reply = reply
        self.gate = asyncio.Event()
        self.asked = 0

    async def complete(self, request):
        self.asked += 1
        await self.gate.wait()
        if isinstance(self.reply, Exception):
            raise self.reply
        return ModelReply("ok", usage=Usage(input_tokens=10)) if self.reply == "ok" else self.reply


async def streamed(provider, request):
    return [delta async for delta in provider.stream(request)]


@pytest.mark.spec("requirements:N15")
@pytest.mark.parametrize("streams", [False, True])
async def test_each_provider_has_its_own_limit(streams):
    a, b = Said("a"), Said("b")
    models, rates = Models({"a": a, "b": b}), RateLimits(RateLimit(max_concurrency=1), Time())
    waiting = []

    def ask(model):
        provider = make_rate_limited_provider(
            models, rates, model, lambda name, obstacle: waiting.append((name, obstacle.limit))
        )
        request = ModelRequest(model)
        return asyncio.create_task(streamed(provider, request) if streams else provider.complete(request))

    tasks = [ask("a/x"), ask("a/y"), ask("b/x")]
    await settle()

    assert (1, 1) == (a.asked, b.asked)
    assert [("a", "concurrency")] == waiting

    a.gate.set()
    b.gate.set()
    replies = await asyncio.gather(*tasks)

    assert 2 == a.asked
    if streams:
        assert [[TextChunk, ReplyDone]] * 3 == [[type(delta) for delta in deltas] for deltas in replies]


async def test_fallback_waits_for_the_limit_of_the_fallback_provider():
    a, b = Said("a", ModelError("gone", retryable=True, status=503)), Said("b")
    a.gate.set()
    models = Models({"a": a, "b": b})
    rates = RateLimits({"b": RateLimit(max_concurrency=1)}, Time())
    waiting = []

    def ask():
        provider = make_rate_limited_provider(models, rates, "a/x | b/x", lambda name, obstacle: waiting.append(name))
        return asyncio.create_task(provider.complete(ModelRequest("a/x | b/x")))

    tasks = [ask(), ask()]
    await settle()

    assert (2, 1, ["b"]) == (a.asked, b.asked, waiting)

    b.gate.set()

    assert ["b/x", "b/x"] == [reply.model for reply in await asyncio.gather(*tasks)]


@pytest.mark.spec("requirements:N15")
@pytest.mark.parametrize(
    ("reply", "passes"),
    [
        ("ok", True),
        (ModelReply("no usage"), False),
        (ModelError("refused", status=500, retryable=True), True),
        (ModelError("lost", retryable=True), False),
        (ModelError("known", retryable=True, usage=Usage(input_tokens=95)), False),
        (ValueError("sdk"), False),
    ],
)
async def test_estimate_is_corrected_only_where_the_use_is_known(reply, passes):
    provider = Said("a", reply)
    provider.gate.set()
    models, time = Models.from_value(provider), Time()
    rates = RateLimits({"a": RateLimit(tokens_per_minute=100)}, time)
    request = ModelRequest("any/m", settings=ModelSettings(max_tokens=90))

    async def ask():
        return await make_rate_limited_provider(models, rates, "any/m", lambda *_: None).complete(request)

    await asyncio.gather(ask(), return_exceptions=True)
    second = asyncio.create_task(asyncio.wait_for(ask(), None))
    await settle()

    assert (2 if passes else 1) == provider.asked

    await time.pass_(60)
    await asyncio.gather(second, return_exceptions=True)

    assert 2 == provider.asked
