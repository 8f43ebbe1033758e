"""Engines for tests: providers behind a cassette, a clock that jumps, and the same chance every time (replay Y5, C43)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from functools import partial
from typing import Any

from stepengine.data.events import ModelFinished
from stepengine.engine import Engine
from stepengine.models import Models, Provider
from stepengine.models.keys import Secret, find_key
from stepengine.testing.recordings import TestCassette

__all__ = ("EngineFactory", "JumpingClock", "TestEngine", "recorded_models")

SEED = "0"
CREATED = datetime(2026, 1, 1, tzinfo=UTC)


class JumpingClock:
    """A clock whose time passes only in ``sleep``, which does not wait: back-off and rate limits cost a test nothing."""

    def __init__(self) -> None:
        self._ms = 0

    def now_ms(self) -> int:
        """Return the milliseconds that were slept so far."""
        return self._ms

    async def sleep(self, seconds: float) -> None:
        """Let time pass, and other tasks run."""
        self._ms += round(seconds * 1000)
        await asyncio.sleep(0)


class TestEngine(Engine):
    """An ``Engine`` whose runs are created at one fixed time and draw the same random numbers every time."""

    __test__ = False

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._launcher.seed, self._launcher.created = SEED, CREATED


def recorded_models(transport: Callable[[], Any], key: str | None) -> Models:
    """
    Return the registry of the package's own adapters, each behind a transport of its own and at its provider's own address.

    Args:
        transport: Makes a transport.
        key: The API key of all of them; ``None`` leaves it to the environment.
    """
    from stepengine.models.anthropic import AnthropicProvider
    from stepengine.models.google import GoogleProvider
    from stepengine.models.openai import OpenAIProvider
    from stepengine.models.openai_chat import OpenAIChatProvider
    from stepengine.models.presets import PRESETS

    def made(
        make: Callable[..., Provider], name: str, url: str | None, variables: Sequence[str], *, required: bool
    ) -> Provider:
        """Make a provider; one with an address of its own asks for no key, so the key is asked for here."""
        given = Secret(key) if key is not None else None
        argument = "models=, with a provider that has api_key="
        found = find_key(name, given, variables, required=required, argument=argument)
        return make(name=name, api_key=found.key, base_url=url, transport=transport())

    models = Models()
    for own in (AnthropicProvider, GoogleProvider):
        sample = own("replay")
        settings = sample.settings()
        make = partial(made, own, sample.name, settings.base_url, settings.key_variables, required=True)
        models.register(sample.name, make)
    for name, preset in PRESETS.items():
        adapter = OpenAIProvider if preset.adapter == "openai" else OpenAIChatProvider
        variables = (preset.key_variable,) if preset.key_variable else ()
        models.register(name, partial(made, adapter, name, preset.base_url, variables, required=preset.key_required))
    return models


class EngineFactory:
    """
    Makes the engines of a test, and closes them when it is over.

    Args:
        cassette: What their providers use; ``None`` for providers that are only asked when a journal is recorded.
    """

    def __init__(self, cassette: TestCassette | None) -> None:
        self._cassette = cassette
        self._made: list[TestEngine] = []

    def __call__(self, agents: Any = (), tools: Any = (), models: Any = None, **options: Any) -> Engine:
        """
        Return an engine; arguments are those of ``Engine``.

        Args:
            agents: The agents.
            tools: The tools.
            models: The models; by default the package's adapters, which use the test's cassette.
            options: As for ``Engine``; the clock jumps unless another one is given.
        """
        options.setdefault("clock", JumpingClock())
        if models is None and self._cassette is not None:
            cassette = self._cassette
            models = recorded_models(cassette.transport, "replay" if cassette.replaying else None)
            options["observers"] = (*options.get("observers", ()), self._note)
        engine = TestEngine(agents, tools, models, **options)
        self._made.append(engine)
        return engine

    def _note(self, event: Any) -> None:
        if isinstance(event, ModelFinished) and event.reply is not None and self._cassette is not None:
            self._cassette.calls += 1
            cost = event.reply.cost
            if cost is not None:
                self._cassette.cost = (self._cassette.cost or Decimal(0)) + cost

    def close(self) -> None:
        """Close every engine that was made."""
        for engine in self._made:
            engine.close()
