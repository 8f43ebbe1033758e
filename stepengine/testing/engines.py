"""Engines for tests: providers behind a cassette, a clock that tests set, and the same chance every time."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import partial
from typing import Any, NamedTuple

from stepengine.data.events import ModelFinished
from stepengine.engine import Engine
from stepengine.models import Models, Provider
from stepengine.testing.recordings import CassetteFixture
from stepengine.workspace.after_fork import Lock

__tracebackhide__ = True  # a failed test ends at its author's line

SEED = "0"
CREATED = datetime(2026, 1, 1, tzinfo=UTC)


class Clock:
    """
    A clock for tests: ``sleep`` advances the time at once; if it *waits*, only ``advance`` does.

    Back-off and rate limits cost a test nothing, and hours between two runs are one line:
    ``clock = Clock(); engine = Engine([agent], clock=clock); engine.run_sync(...); clock.advance(minutes=45)``. Give its
    ``now`` to what takes a function for the date, such as ``MemorySessions(clock=clock.now)``.

    With ``Clock(waits=True)`` time passes in ``advance`` alone: who sleeps, wakes when its time has come, in order of time, so that
    two runs that sleep for an hour side by side sleep for one hour. ``await clock.wait_for_sleepers(2)`` waits until both do. Back-off and
    rate limits wait for ``advance`` then, too. A run that is suspended meanwhile sees the time when it is resumed.

    Args:
        start: The date and time at the start; 2026-01-01 UTC by default.
        waits: Whether ``sleep`` waits for ``advance``, instead of letting time pass itself.
    """

    def __init__(self, start: datetime = CREATED, *, waits: bool = False) -> None:
        self._start = start
        self._ms = 0
        self._waits = waits
        self._lock = Lock()
        self._sleepers: list[_Sleeper] = []
        self._watchers: list[tuple[int, _Wake]] = []
        self._count = itertools.count()

    def __repr__(self) -> str:
        sleepers = f", {self.sleepers} asleep" if self._waits else ""
        return f"<Clock at {self.now().isoformat()}{sleepers}>"

    @property
    def sleepers(self) -> int:
        """The number of tasks that wait for ``advance``; 0 if the clock does not wait."""
        with self._lock:
            return len(self._sleepers)

    def now(self) -> datetime:
        """Return the simulated date and time."""
        return self._start + timedelta(milliseconds=self._ms)

    def now_ms(self) -> int:
        """Return the milliseconds that have passed."""
        return self._ms

    def advance(self, *, days: float = 0, hours: float = 0, minutes: float = 0, seconds: float = 0) -> None:
        """
        Advance the time, from any thread, and wake sleepers in the order of their time.

        Those who sleep again do so from the time that it is then: to see every beat of a loop that sleeps, advance by one beat.

        Raises:
            ValueError: when it would go back.
        """
        passed = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
        if passed < timedelta():
            msg = f"a clock cannot go back, here by {-passed}; start with an earlier Clock(start)"
            raise ValueError(msg)
        with self._lock:
            self._ms += passed // timedelta(milliseconds=1)
            due = sorted([sleeper for sleeper in self._sleepers if sleeper.at <= self._ms])
            self._sleepers = [sleeper for sleeper in self._sleepers if sleeper.at > self._ms]
        for sleeper in due:
            sleeper.wake.wake_task()

    async def sleep(self, seconds: float) -> None:
        """Advance the time and let other tasks run. A waiting clock sleeps until ``advance`` passes the time."""
        duration = round(seconds * 1000)
        if not self._waits:
            self._ms += duration
        if not self._waits or duration <= 0:
            await asyncio.sleep(0)
            return
        wake = _Wake()
        with self._lock:
            sleeper = _Sleeper(self._ms + duration, next(self._count), wake)
            self._sleepers.append(sleeper)
            ready = [watcher for least, watcher in self._watchers if least <= len(self._sleepers)]
        for watcher in ready:
            watcher.wake_task()
        try:
            await wake.future
        finally:
            with self._lock:
                if sleeper in self._sleepers:
                    self._sleepers.remove(sleeper)

    async def wait_for_sleepers(self, count: int = 1) -> None:
        """
        Wait until at least *count* tasks sleep.

        Raises:
            ValueError: when this clock does not wait, so that no task ever sleeps.
        """
        if not self._waits:
            msg = "nothing sleeps on a clock that does not wait; create it with Clock(waits=True)"
            raise ValueError(msg)
        wake = _Wake()
        with self._lock:
            if len(self._sleepers) >= count:
                return
            self._watchers.append((count, wake))
        try:
            await wake.future
        finally:
            with self._lock:
                self._watchers.remove((count, wake))


class _Wake:
    """The future of one sleeping task, which any thread may end."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[None] = self._loop.create_future()

    def wake_task(self) -> None:
        """Wake the task; nothing happens if its event loop is closed."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._resolve_future)

    def _resolve_future(self) -> None:
        """Set the result of the future, unless it is done."""
        if not self.future.done():
            self.future.set_result(None)


class _Sleeper(NamedTuple):
    """A sleeping task: its wake time in milliseconds, its number, and its future."""

    at: int
    number: int
    wake: _Wake


class SeededEngine(Engine):
    """An ``Engine`` whose runs draw the same random numbers every time."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._launcher.seed = SEED


def make_models_with_transport(transport: Callable[[], object], key: str | None) -> Models:
    """
    Return a registry with the package's providers, each with its own transport, and URLs as in an ordinary engine.

    Args:
        transport: Makes a transport.
        key: The API key of all of them; ``None`` leaves it to the environment.
    """
    from stepengine.models.anthropic import AnthropicProvider
    from stepengine.models.clouds import (
        AnthropicAwsProvider,
        AnthropicGoogleProvider,
        BedrockProvider,
        FoundryProvider,
        VertexProvider,
    )
    from stepengine.models.google import GoogleProvider
    from stepengine.models.google.interactions import GoogleInteractionsProvider
    from stepengine.models.openai import OpenAIProvider
    from stepengine.models.openai_chat import OpenAIChatProvider
    from stepengine.models.presets import PRESETS

    def make_provider(make: Callable[..., Provider], name: str) -> Provider:
        """Return a provider with the given key and a new transport."""
        return make(name=name, api_key=key, transport=transport())

    def make_cloud_provider(cloud: Callable[..., Provider], given: Mapping[str, object]) -> Provider:
        return cloud(transport=transport(), **given)

    models = Models()
    for own in (AnthropicProvider, GoogleProvider, GoogleInteractionsProvider):
        name = own("replay").name
        models.register(name, partial(make_provider, own, name))
    for name, preset in PRESETS.items():
        models.register(
            name, partial(make_provider, OpenAIProvider if preset.adapter == "openai" else OpenAIChatProvider, name)
        )
    in_aws: dict[str, object] = {"api_key": key, "region": "us-east-1"}
    in_clouds: tuple[tuple[str, Callable[..., Provider], dict[str, object]], ...] = (
        ("bedrock", BedrockProvider, in_aws),
        ("bedrock_mantle", partial(BedrockProvider, name="bedrock_mantle", endpoint="mantle"), in_aws),
        ("bedrock_converse", partial(BedrockProvider, name="bedrock_converse", endpoint="converse"), in_aws),
        ("vertex", VertexProvider, {"credentials": key, "project": "replay"}),
        ("foundry", FoundryProvider, {"api_key": key, "resource": "replay"}),
        ("anthropic_aws", AnthropicAwsProvider, {"api_key": key, "region": "us-east-1", "workspace_id": "replay"}),
        (
            "anthropic_google",
            AnthropicGoogleProvider,
            {"credentials": key, "project": "replay", "workspace_id": "replay"},
        ),
    )
    for name, cloud, given in in_clouds:
        models.register(name, partial(make_cloud_provider, cloud, given if key is not None else {}))
    return models


class EngineFactory:
    """
    Creates the engines of a test, and closes them at its end.

    Args:
        cassette: What their providers use; ``None`` for providers that are only asked when a journal is recorded.
    """

    def __init__(self, cassette: CassetteFixture | None) -> None:
        self._cassette = cassette
        self._made: list[SeededEngine] = []

    def __call__(self, agents: Any = (), tools: Any = (), models: Any = None, **options: Any) -> Engine:
        """
        Return an engine; arguments are those of ``Engine``.

        Args:
            agents: The agents.
            tools: The tools.
            models: The models; by default the package's adapters, which use the test's cassette.
            options: As for ``Engine``; the clock is a ``Clock()`` unless another one is given.
        """
        options.setdefault("clock", Clock())
        if models is None and self._cassette is not None:
            cassette = self._cassette
            models = make_models_with_transport(cassette.transport, "replay" if cassette.replaying else None)
            options["observers"] = (*options.get("observers", ()), self._count_model_call_and_cost)
        engine = SeededEngine(agents, tools, models, **options)
        self._made.append(engine)
        return engine

    def _count_model_call_and_cost(self, event: object) -> None:
        """Add a finished model call and its cost to the counts of the cassette; ignore other events."""
        if isinstance(event, ModelFinished) and event.reply is not None and self._cassette is not None:
            self._cassette.calls += 1
            cost = event.reply.cost
            if cost is not None:
                self._cassette.cost = (self._cassette.cost or Decimal(0)) + cost

    def close(self) -> None:
        """Close all engines of the factory."""
        with ExitStack() as stack:
            for engine in self._made:
                stack.callback(engine.close)
