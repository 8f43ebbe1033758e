"""
``RunStarts``: the part of a start that is the same wherever runs are stored. It checks a request, counts it, and registers its run.

A run is registered before it starts, so a crash in between loses none. ``RunLauncher`` and ``DurableLauncher`` add the storage.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from attrs import frozen

from stepengine.server.pending_starts import PendingStarts
from stepengine.server.quotas import QuotaTable, get_json_size
from stepengine.server.run_requests import (
    StartRequest,
    require_listed_agent,
    require_may_continue_session,
    require_session_key,
    validate_and_encode_request,
)

if TYPE_CHECKING:
    from stepengine.durable.register import RegisteredRun
    from stepengine.engine import Engine
    from stepengine.server.access import Caller
    from stepengine.server.ledger import RunRow


Row = TypeVar("Row", bound="RunRow | RegisteredRun")


@frozen
class StartPlan:
    """
    A checked request to start a run.

    Attributes:
        agent: The agent's id.
        request: The request as JSON.
        session: The key of the conversation.
        created: When it was requested, in seconds since 1970.
    """

    agent: str
    request: dict[str, Any]
    session: str | None
    created: float


def plan_start(
    caller: Caller, asked: StartRequest, engine: Engine, agents: Sequence[str], *, stores_messages: bool
) -> StartPlan:
    """
    Validate a request to start a run, and return its agent, stored JSON, conversation key and time; nothing is stored.

    Args:
        caller: The caller.
        asked: The request.
        engine: The engine that has the agents.
        agents: The ids of the agents that may be started.
        stores_messages: Whether the messages of conversations are stored apart from their runs.

    Raises:
        InputError: For an invalid agent, limit or name of a conversation.
        Problem: If *caller* may not continue a conversation.
    """
    agent = require_listed_agent(agents, asked.agent)
    require_may_continue_session(caller, asked, stores_messages=stores_messages)
    request, now = validate_and_encode_request(engine.agent(agent).limits, asked), time.time()
    if asked.after is not None:
        # The newest run of a conversation is the one that was created last, also if the clocks of two servers differ.
        now = max(now, asked.after.created + 0.001)
    return StartPlan(agent, request, require_session_key(caller, asked.session), now)


class RunStarts(ABC, Generic[Row]):
    """
    Starts runs.

    Args:
        quotas: What each owner uses.
    """

    def __init__(self, quotas: QuotaTable) -> None:
        self._quotas = quotas
        self._pending = PendingStarts()

    async def start(self, caller: Caller, asked: StartRequest, *, key: str | None = None) -> tuple[str, bool]:
        """
        Register and start a run, and return (id, is new); a repeated *key* returns the earlier run.

        Raises:
            DatabaseUnavailable: If the database cannot be reached; nothing was registered.
            InputError: For an unknown agent, or an invalid prompt, params or metadata.
            Problem: If too many runs are executed, the server stops, the caller's quota is exceeded, or the key belongs to another
                request.
        """
        row = await self._validate_request_and_make_row(caller, asked)
        is_repeat = key is not None and await self._has_idempotency_key(row.owner, key, row.created)
        # A repeated request starts nothing: it is answered also where a new one would be refused.
        size = 0 if is_repeat else get_json_size(row.request)
        with nullcontext() if is_repeat else self._reserve_room(row.owner):
            async with self._quotas.admit_request(row.owner, size, runs=0 if is_repeat else 1) as use:
                # Registered before the start: if this process dies in between, another one starts the run. A run that was
                # started first would have no known owner.
                with self._pending.track_start(row.run):
                    known = await self._register_or_find_earlier_run(row, key)
                    if known is None:
                        await self._start_and_unregister_on_failure(row)
                        return row.run, True
                use.refund()
        if await self._pending.wait_if_pending(known) and not await self._is_registered(known):
            # The first request failed, and its run was removed.
            return await self.start(caller, asked, key=key)
        return known, False

    def _reserve_room(self, owner: str) -> AbstractContextManager[None]:
        """Return a context that reserves room for a run of *owner* in this process, or raises ``Problem``. By default do nothing."""
        return nullcontext()

    @abstractmethod
    async def _validate_request_and_make_row(self, caller: Caller, asked: StartRequest) -> Row:
        """Validate a request to start a run, and return the row of the run, which is not registered yet."""

    @abstractmethod
    async def _has_idempotency_key(self, owner: str, key: str, now: float) -> bool:
        """Return whether an owner has started a run with this key a short time ago."""

    @abstractmethod
    async def _register_or_find_earlier_run(self, row: Row, key: str | None) -> str | None:
        """Register a run and return ``None``; if an earlier run has the same key, return its id instead."""

    @abstractmethod
    async def _start_and_unregister_on_failure(self, row: Row) -> None:
        """Start a run that was just registered; if it cannot be started, remove its registration and raise."""

    @abstractmethod
    async def _is_registered(self, run: str) -> bool:
        """Return whether a run is registered."""
