"""
A session store in Redis, through the protocol of session stores.

The engine needs two methods of a store: `get_history` and `save_history`. With `get_state` and `save_state`, the store also keeps
waiting runs, so that the next message can answer a question. With `get_cached` and `set_cached`, tools have a cache.

``python examples/redis_sessions.py`` needs no key and no server: a dict replaces Redis, and scripted replies replace the model. To use
real ones, install `redis`, pass a `redis.asyncio.Redis()` to `RedisSessions`, omit ``models=`` and set ANTHROPIC_API_KEY.
"""

import asyncio
import json
from collections.abc import Sequence
from typing import Any, Protocol

from stepengine import STEP, AgentDefinition, Ask, Engine, StepContext, Steps
from stepengine.sessions import messages_from_json, messages_to_json
from stepengine.testing import ScriptedModel, text


class Client(Protocol):
    """What is used of ``redis.asyncio.Redis``."""

    async def get(self, name: str) -> Any:
        """Return the bytes of a key, or ``None``."""

    async def set(self, name: str, value: str, *, ex: int | None = None) -> Any:
        """Store a string, for *ex* seconds or, without, for ever."""


class RedisSessions:
    """
    Conversations in Redis, one key for the messages and one for the state.

    Two processes that answer one conversation at once are not told apart: a store that can do that has ``load`` and ``save``,
    as ``stepengine.sessions.VersionedStore`` says.
    """

    def __init__(self, client: Client, *, prefix: str = "stepengine") -> None:
        self._client = client
        self._prefix = prefix

    async def get_history(self, session_id: str) -> Sequence[Any]:
        """Return the messages of a conversation."""
        return messages_from_json(await self._get("history", session_id) or [])

    async def save_history(self, session_id: str, messages: Sequence[Any]) -> None:
        """Store the messages of a conversation."""
        await self._set("history", session_id, messages_to_json(messages))

    async def get_state(self, session_id: str) -> dict[str, Any] | None:
        """Return what the last run left, its journal included where it waits for an answer."""
        return await self._get("state", session_id)

    async def save_state(self, session_id: str, state: dict[str, Any]) -> None:
        """Store what a run left."""
        await self._set("state", session_id, state)

    async def get_cached(self, key: str) -> Any:
        """Return a value that a tool kept; ``None`` when its time is over."""
        return await self._get("cache", key)

    async def set_cached(self, key: str, value: Any, ttl: float | None = None) -> None:
        """Keep a JSON value for *ttl* seconds."""
        await self._set("cache", key, value, ex=None if ttl is None else max(1, round(ttl)))

    async def _get(self, kind: str, key: str) -> Any:
        return json.loads(await self._client.get(f"{self._prefix}:{kind}:{key}") or "null")

    async def _set(self, kind: str, key: str, value: Any, *, ex: int | None = None) -> None:
        await self._client.set(f"{self._prefix}:{kind}:{key}", json.dumps(value), ex=ex)


def book(ctx: StepContext) -> Steps[str]:
    count = yield from Ask("For how many?")
    yield STEP
    return f"A table for {count}."


booking = AgentDefinition("booking", model="anthropic/claude-haiku-4-5", handle_steps=book)


async def message(client: Client, words: str) -> str:
    """Answer one message, with an engine that knows nothing but the store; every process could do it."""
    model = ScriptedModel([text("I will see to it.")])
    async with Engine([booking], models=model, sessions=RedisSessions(client)) as engine:
        result = await engine.run(booking, words, session_id="ann:7")
    return result.pending_questions[0].text if result.pending_questions else result.unwrap()


class StandIn(dict[str, Any]):
    """A client for this page."""

    async def get(self, name: str) -> Any:  # type: ignore[override]
        """Return the text of a key."""
        return dict.get(self, name)

    async def set(self, name: str, value: str, *, ex: int | None = None) -> None:
        """Keep a text; nothing is forgotten here."""
        self[name] = value


async def main() -> None:
    client = StandIn()
    for words in ("A table, please.", "four"):
        answer = await message(client, words)
        print(f"ann: {words}\nbot: {answer}")
    print("keys:", *sorted(client))
    assert answer == "A table for four."


if __name__ == "__main__":
    asyncio.run(main())
