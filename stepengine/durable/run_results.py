"""
``ResultReader``: the results of durable runs, as ``Engine`` returns them.

The database holds the result of a run; the agents of this process decode its output into their own type.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import attrs

from stepengine.data.json import freeze
from stepengine.data.state import AgentState, RunResult, RunStatus
from stepengine.data.waits import Waits
from stepengine.durable.body import make_root_request, plan_submitted_run
from stepengine.durable.operator import Operator
from stepengine.durable.run_waits import Waiting, make_question_waits
from stepengine.durable.wire import SubmittedRun, parse_result
from stepengine.engine.launcher import Launcher
from stepengine.errors import AnswerRejected, DatabaseUnavailable, JournalError, ReplayDivergence, StepEngineError

FIRST_POLL_SECONDS = 0.1
"""A caller that waits for a short run hardly notices it, and one query in a tenth of a second costs nothing."""
MAX_AWAY_SECONDS = 60.0
"""Long enough for a restart or a failover of PostgreSQL, short enough that a caller learns of a real outage."""
MAX_POLL_SECONDS = 1.0
"""A thousand callers who wait for long runs ask a thousand times in a second, which one database answers."""


def refuse_child(run: str) -> None:
    """Raise ``JournalError`` if *run* is the id of a child: only root runs have a result for callers."""
    root, _, path = run.partition("/")
    if path:
        msg = f"the run {run!r} is a child, and only its root has a result; use {root!r}, or export({root!r}) to see how the child ended"
        raise JournalError(msg)


class ResultReader:
    """
    Waits for the results of runs.

    Args:
        launcher: The engine's, with the agents.
        get_operator: Returns the operator; raises once the engine is closed.
    """

    def __init__(self, launcher: Launcher, get_operator: Callable[[], Operator]) -> None:
        self._launcher = launcher
        self._get_operator = get_operator

    async def wait_for_result(self, run: str, *, waits: bool = False) -> RunResult:
        """
        Wait until a run has ended and return its result, or a result with the open waits once its whole tree is suspended.

        Args:
            run: A root run's id.
            waits: Whether to wait for the end even while the run is suspended.

        Raises:
            DatabaseUnavailable: when the database is away for more than a minute.
            JournalError: when there is no such root run.
            ReplayDivergence: when it stopped because the code differs from the record.
        """
        refuse_child(run)
        loop = asyncio.get_running_loop()
        until: float | None = None
        pause = FIRST_POLL_SECONDS
        while True:
            try:
                state = await self._get_operator().deployment.wait_for_end(run, pause)
                if state is not None:
                    return await self._make_ended_result(run, state, waits=waits)
                if not waits:
                    beyond = self._launcher.services.time.sleep_in_process
                    asked, left = await self._get_operator().run_waits.find_waits_if_suspended(run, beyond=beyond)
                    if asked or left:
                        return _make_suspended_result(run, asked, left)
                until, pause = None, min(2 * pause, MAX_POLL_SECONDS)
            except DatabaseUnavailable:
                # Workers wait for it as well; a caller learns of a long outage.
                until = until or loop.time() + MAX_AWAY_SECONDS
                if loop.time() > until:
                    raise
                await asyncio.sleep(pause)

    async def _make_ended_result(self, run: str, state: str, *, waits: bool) -> RunResult:
        """
        Return the result of a run that is over in *state*. For a turn that was an answer, wait for the result of the answered run.

        Raises:
            ReplayDivergence: when the run stopped because of one.
        """
        found = await self._get_operator().client.list_workflows_async(workflow_ids=[run])
        status = found[0]
        said = status.attributes or {}
        if said.get("answered"):
            return await self.wait_for_result(said["answered"], waits=waits)
        order = SubmittedRun.from_json(status.input["args"][0])
        session = order.info.session_id
        ended = partial(RunResult, state=AgentState(run_id=run, agent_id=order.agent_id), journal=run)
        if said.get("rejected"):
            return ended(status=RunStatus.FAILED, error=AnswerRejected(said["rejected"]), session_id=session)
        if state == "SUCCESS":
            return attrs.evolve(parse_result(status.output, self._decode_output(order, status.output)), journal=run)
        if state == "CANCELLED":
            return ended(status=RunStatus.CANCELLED, session_id=session)
        name, said = getattr(status.error, "name", type(status.error).__name__), str(status.error)
        if name == ReplayDivergence.__name__:
            raise ReplayDivergence(said)
        msg = f"the run {run!r} stopped as {state} ({name}: {said}); `retry` continues where it stopped"
        return ended(status=RunStatus.FAILED, error=StepEngineError(msg))

    def _decode_output(self, order: SubmittedRun, form: Mapping[str, Any]) -> Any:
        """Return the output as the agent's own type; ``None`` if this engine does not know the agent."""
        output = freeze(form["output"])
        try:
            plan, _ = plan_submitted_run(self._launcher.plan_root_run(make_root_request(self._launcher, order)), order)
            return None if output is None else plan.agent.decode_output(output)
        except StepEngineError:
            return None

    async def wait_for_next_result(self, run: str, answered: frozenset[str]) -> RunResult:
        """Return the result of a run once it has ended or has open questions besides the *answered* ones."""
        while True:
            result = await self.wait_for_result(run)
            open_ = {question.id for question in result.pending_questions}
            if not open_ or open_ - answered or not answered:
                return result
            await asyncio.sleep(FIRST_POLL_SECONDS)


def _make_suspended_result(run: str, open_questions: list[Waiting], other_waits: list[Waits]) -> RunResult:
    """Return the result of a suspended run with its open questions and the other waits in *other_waits*."""
    questions = tuple([question for each in open_questions for question in each.questions])
    state = AgentState(run_id=run, pending=questions)
    waits = make_question_waits(open_questions)
    return RunResult(
        status=RunStatus.SUSPENDED,
        state=state,
        pending_questions=questions,
        journal=run,
        waits_for=(*waits, *other_waits),
    )
