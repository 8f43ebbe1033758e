"""``DurableLauncher``: starts, resumes and forks runs in a database."""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from stepengine.data.codec import plain
from stepengine.data.visible import cut_end
from stepengine.durable.register import RegisteredRun
from stepengine.errors import DatabaseUnavailable, InputError, StepEngineError
from stepengine.runtime.logs import LOGGER
from stepengine.server.durable_store import make_unsupported_problem, raise_run_errors_as_problems
from stepengine.server.ledger import OPEN, RunRow
from stepengine.server.problems import Problem
from stepengine.server.quotas import QuotaTable, get_json_size
from stepengine.server.run_requests import (
    ForkRun,
    ResumeRun,
    StartRequest,
    require_not_closing,
    require_not_ended,
    start_options_from_request,
)
from stepengine.server.run_starts import RunStarts, plan_start

if TYPE_CHECKING:
    from stepengine.data.state import RunResult
    from stepengine.server.access import Caller
    from stepengine.server.durable_store import DurableStore


class DurableLauncher(RunStarts[RegisteredRun]):
    """
    Registers runs and submits them to the database, where any number may wait for a worker.

    Args:
        store: The database.
        agents: The ids of the agents that may be started.
        quotas: What each owner uses.

    Attributes:
        is_closing: Whether the server is shutting down and starts no more runs.
    """

    def __init__(self, store: DurableStore, agents: Sequence[str], quotas: QuotaTable) -> None:
        super().__init__(quotas)
        self.is_closing = False
        self._store = store
        self._agents = agents

    async def _validate_request_and_make_row(self, caller: Caller, asked: StartRequest) -> RegisteredRun:
        require_not_closing(is_closing=self.is_closing)
        plan = plan_start(caller, asked, self._store.engine.embedded_engine, self._agents, stores_messages=True)
        return _make_new_run_row(caller, plan.agent, plan.request, plan.session, plan.created)

    async def _has_idempotency_key(self, owner: str, key: str, now: float) -> bool:
        """Return whether an owner has started a run with this key a short time ago."""
        return await self._store.register.has_recent_key(owner, key, now)

    async def _is_registered(self, run: str) -> bool:
        """Return whether the table of runs has a run."""
        return await self._store.register.find_run(run) is not None

    async def _register_or_find_earlier_run(self, row: RegisteredRun, key: str | None) -> str | None:
        """Register a run and return ``None``; if an earlier run has the same key, return its id instead."""
        try:
            return await self._store.register.add_run(row, key)
        except InputError as error:
            raise Problem(error.message, status=409, kind="key_reused") from error

    async def _start_and_unregister_on_failure(self, row: RegisteredRun) -> None:
        """Submit a run that was just registered; if it is refused, remove its registration and raise."""
        try:
            await self._submit_registered_run(row)
        except DatabaseUnavailable as error:
            LOGGER.warning("run %s is registered, and is submitted when the database is back: %s", row.run, error)
        except StepEngineError:
            await self._store.register.remove_unsubmitted(row.run)
            raise

    async def _submit_registered_run(self, row: RegisteredRun) -> None:
        """Submit a registered run; two submissions of one id are one run."""
        asked = row.request
        if "fork" in asked:
            options = dict(asked["fork"])
            await self._store.engine.fork(options.pop("run"), id=row.run, **options)
        else:
            await self._store.engine.submit(
                row.agent, asked["prompt"], id=row.run, params=asked["params"], metadata=asked["metadata"],
                session_id=row.session, user_id=row.owner or None, **start_options_from_request(asked),
            )  # fmt: skip
        await self._store.register.record_submitted(row.run)

    async def submit_orphaned_run(self, row: RegisteredRun) -> None:
        """Submit a run of a dead server; record a refusal of the run instead of raising it."""
        try:
            await self._submit_registered_run(row)
        except DatabaseUnavailable:
            raise
        except StepEngineError as error:
            LOGGER.error("run %s could not be submitted: %s", row.run, error.message)
            await self._store.register.record_refusal(row.run, cut_end(error.message, 2_000))

    async def submit_if_unsubmitted(self, row: RunRow) -> None:
        """Submit the run if its server died before it could, so that the database has the run."""
        found = await self._store.register.find_run(row.run)
        if found is not None and not found.is_submitted and found.status == "started":
            await self._submit_registered_run(found)

    async def resume(self, row: RunRow, asked: ResumeRun | None = None) -> None:
        """
        Resume a run without a result, or move a run from older code without workers to the current code.

        Raises:
            Problem: If the run has ended or cannot be resumed, or with *asked*: a database has no divergent resume.
            ReplayDivergence: If this server's agents diverge from the record; nothing was changed.
        """
        if asked is not None:
            msg = "a run in a database is resumed only if the code matches its record; fork it to continue with other code"
            raise make_unsupported_problem(msg)
        engine, operator = self._store.engine, self._store.operator
        if row.status in OPEN:
            await self.submit_if_unsubmitted(row)
            if (await operator.run(row.run)).release not in (None, engine.release):
                with raise_run_errors_as_problems(status=409, kind="not_possible"):
                    await engine.move(row.run)
            return
        if row.status != "stranded":
            require_not_ended(row)
        with raise_run_errors_as_problems(status=409, kind="not_possible"):
            await operator.retry(row.run)
        await self._store.register.increment_retry_count(row.run)

    async def replay(self, row: RunRow, live_effects: Collection[str]) -> RunResult:
        """
        Replay a run with the agents of this server, and return its result; no effect is performed.

        Raises:
            Problem: If *live_effects* is not empty: only workers perform effects.
            ReplayDivergence: If the agents diverge from the record.
        """
        if live_effects:
            msg = "only workers perform the effects of a run in a database; leave out `live`"
            raise make_unsupported_problem(msg)
        engine = self._store.engine
        with raise_run_errors_as_problems(status=409, kind="not_possible"):
            return await engine.embedded_engine.replay(await engine.export(row.run))

    async def fork(self, caller: Caller, row: RunRow, asked: ForkRun) -> str:
        """
        Fork a run at an effect, and return the id of the new run.

        Raises:
            Problem: If there is no such effect, the caller's quota is exceeded, or *asked* has changes or tools: a worker uses the
                agent that is deployed there, and performs its tools.
            UndoRefused: If effects on the outside world could happen again.
        """
        require_not_closing(is_closing=self.is_closing)
        if asked.given_changes or asked.tools is not None:
            msg = "a run in a database continues on any worker, with the agent and tools deployed there; leave out `changes` and `tools`"
            raise make_unsupported_problem(msg)
        request = {
            "fork": {"run": row.run, "at": asked.at, "allow_repeat": asked.allow_repeat, **plain(asked.edit_options)}
        }
        new = _make_new_run_row(caller, row.agent, request, None, time.time())
        async with self._quotas.admit_request(new.owner, get_json_size(request), runs=1):
            await self._store.register.add_run(new, None)
            with raise_run_errors_as_problems(status=422, kind="no_such_place"):
                await self._start_and_unregister_on_failure(new)
        return new.run


def _make_new_run_row(
    caller: Caller, agent: str, request: dict[str, Any], session: str | None, created: float
) -> RegisteredRun:
    """Return the row of a new run with a random id; the caller registers it."""
    return RegisteredRun(
        run=secrets.token_hex(16), owner=caller.name, agent=agent, status="started", created=created,
        request=request, session=session, is_submitted=False,
    )  # fmt: skip
