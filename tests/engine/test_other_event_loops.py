"""
An engine under an event loop that is not asyncio's: it says so before anything is made, and its synchronous twins work.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from stepengine import AgentDefinition, AgentState, Engine
from stepengine.errors import StepEngineError
from stepengine.testing import ScriptedModel

trio = pytest.importorskip("trio", reason="needs the extra 'dev'")
COUNTERPARTS = (
    (
        "pypi:trio",
        "0.35.0",
        "refused",
        "call `run_sync` in a thread",
    ),
)

BOT = AgentDefinition("bot", model="m/m")


def engine() -> Engine:
    return Engine([BOT], models=ScriptedModel(["Hello.", "Hello again."]))


def on_trio(body: Callable[[], Awaitable[Any]]) -> Any:
    return anyio.run(body, backend="trio")


async def streamed(of: Engine, journal: Any) -> None:
    async for _ in of.stream("bot", "Hi.", journal=journal):
        pass


async def started(of: Engine, journal: Any) -> None:
    of.start("bot", "Hi.", journal=journal)


WAYS: dict[str, Callable[[Engine, Any], Awaitable[Any]]] = {
    "run()": lambda of, journal: of.run("bot", "Hi.", journal=journal),
    "stream()": streamed,
    "start()": started,
    "step()": lambda of, _: of.step(AgentState.from_messages([], agent_id="bot")),
    "resume()": lambda of, journal: of.resume(journal),
    "replay()": lambda of, journal: of.replay(journal),
    "fork()": lambda of, journal: of.fork(journal, at=1),
    "start_resume()": lambda of, journal: of.start_resume(journal),
    "send_message()": lambda of, journal: of.send_message(journal, "topic", 1),
    "start_fork()": lambda of, journal: of.start_fork(journal, at=1),
}


@pytest.mark.spec("ecosystem:EC231")
@pytest.mark.parametrize("name", WAYS)
def test_run_under_trio_raises_with_a_remedy_and_creates_nothing(name: str, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"

    async def body() -> None:
        async with engine() as of:
            await WAYS[name](of, str(path))

    with pytest.raises(StepEngineError) as told:
        on_trio(body)
    words = f"{name} needs asyncio's event loop, but trio's is running: use anyio with its backend 'asyncio', or call "
    assert str(told.value).startswith(words)
    with engine() as of:  # nothing is recorded, and nobody holds the journal
        assert "Hello." == of.run_sync("bot", "Hi.", journal=path).text


@pytest.mark.spec("ecosystem:EC231")
@pytest.mark.deep
def test_run_sync_in_a_thread_works_under_trio() -> None:
    async def body() -> str:
        async with engine() as of:
            result = await anyio.to_thread.run_sync(partial(of.run_sync, "bot", "Hi."))
            return result.unwrap()

    assert "Hello." == on_trio(body)
