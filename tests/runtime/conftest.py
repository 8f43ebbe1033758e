"""
A small world for the runtime: hand-written machines, a provider that plays what it is given, a clock that only jumps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterable, Iterator
from datetime import UTC, datetime
from random import Random
from typing import Any

import attrs
import pytest

from stepengine.data.definition import AgentDefinition
from stepengine.data.limits import Limits
from stepengine.data.models import ModelReply, ReplyDone, TextChunk
from stepengine.data.state import AgentState, RunStatus
from stepengine.data.yields import STEP
from stepengine.machine.plan import Finished, PlannedAgent, RunPlan
from stepengine.runtime import Hub, RetryPolicy, RunTree, Services
from stepengine.runtime.hub import Watcher
from stepengine.runtime.services import ModelSetting, TimeSetting, ToolSetting
from stepengine.workspace.threads import ThreadPool


class Provider:
    """
    Plays one item per request: a text, a reply, an exception, or an async function of the request.
    """

    def __init__(self, items: Iterable[Any] = (), *, default: Any = "ok") -> None:
        self.items = list(items)
        self.default = default
        self.requests: list[Any] = []

    def provider_for(self, model: str) -> Provider:
        return self

    async def complete(self, request: Any) -> ModelReply:
        item = self._next(request)
        if callable(item):
            item = await item(request)
        if isinstance(item, BaseException):
            raise item
        return ModelReply(item) if isinstance(item, str) else item

    async def stream(self, request: Any) -> Any:
        item = self._next(request)
        if isinstance(item, tuple):
            for delta in item:
                if isinstance(delta, BaseException):
                    raise delta
                yield delta
            return
        if isinstance(item, BaseException):
            raise item
        reply = ModelReply(item) if isinstance(item, str) else item
        yield TextChunk(reply.text)
        yield ReplyDone(reply)

    def _next(self, request: Any) -> Any:
        self.requests.append(request)
        return self.items.pop(0) if self.items else self.default


class JumpingClock:
    """
    A clock whose time passes only in ``sleep``.
    """

    def __init__(self) -> None:
        self.ms = 0
        self.sleeps: list[float] = []

    def now_ms(self) -> int:
        return self.ms

    async def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.ms += int(seconds * 1000)
        await asyncio.sleep(0)


class World:
    """
    Makes trees around hand-written machines.
    """

    Provider = Provider
    JumpingClock = JumpingClock

    def __init__(self) -> None:
        self.threads = ThreadPool(grace=0.2)

    def plan(self, *, limits: Limits | None = None, path: str = "", **fields: Any) -> RunPlan:
        definition = AgentDefinition("worker", handle_steps=lambda_handler, model="test/m")
        fields = {"agent": PlannedAgent(definition=definition), "run_id": "r1", "limits": limits or Limits(), **fields}
        chance = Random(1)
        return RunPlan(path=path, created=datetime(2026, 1, 1, tzinfo=UTC), random=lambda: chance, **fields)

    def tree(
        self,
        machine: Callable[..., Generator[Any, Any, Any]],
        *,
        observers: Iterable[Any] = (),
        answers: Any = None,
        plan: RunPlan | None = None,
        logger: Any = None,
        **settings: Any,
    ) -> RunTree:
        """Return a tree of *machine*; *settings* are fields of ``ModelSetting``, ``TimeSetting`` and ``Services``."""
        settings = {
            "models": Provider(),
            "retry": RetryPolicy(),
            "tools": ToolSetting(threads=self.threads),
            **settings,
        }
        names = [field.name for field in attrs.fields(ModelSetting)]
        models = {name: settings.pop(name) for name in names if name in settings}
        names = [field.name for field in attrs.fields(TimeSetting)]
        times = {name: settings.pop(name) for name in names if name in settings}
        services = Services(
            machine=machine,
            models=ModelSetting(registry=settings.pop("models"), **models),
            time=TimeSetting(**times),
            **settings,
        )
        plan = plan or self.plan()
        hub = Hub([Watcher(o) for o in observers]) if logger is None else Hub([Watcher(o) for o in observers], logger)
        state = AgentState(run_id=plan.run_id, agent_id=plan.agent.definition.id)
        return RunTree(services, plan, state, hub, answers)

    def done(self, state: AgentState, output: Any = None, status: str = "completed", **fields: Any) -> Finished:
        return Finished(status=RunStatus(status), state=state, output=output, **fields)


def lambda_handler(ctx: Any) -> Generator[Any, Any, None]:
    yield STEP


@pytest.fixture
def world() -> Iterator[World]:
    """
    Makes trees around hand-written machines.
    """
    made = World()
    yield made
    made.threads.close()
