"""What can be submitted to a deployment: the checks of engines and runs, which raise before anything is stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from stepengine.durable.deployment import refuse_asking_limits
from stepengine.durable.operator import Operator
from stepengine.engine.engine import Engine
from stepengine.engine.launcher import Launcher
from stepengine.engine.options import AgentLike
from stepengine.engine.run_plans import RunRequest, pop_run_info, separate_earlier_answers
from stepengine.errors import DefinitionError, InputError
from stepengine.machine.plan import RunPlan
from stepengine.runtime.rates import RateLimits

REFUSED_ENGINE_OPTIONS = {
    "sessions": "the database stores the conversation of each session_id=",
    "child_sessions": "the database stores the conversation of each session_id=, and the run of every child",
    "interactor": "answer questions with engine.answer(run, {id: value}), from any process",
    "headless": "a question waits until it is answered",
}
REFUSED_RUN_OPTIONS = {
    "journal": "the database is the journal; engine.export(run) returns it",
    "on_divergence": "a run stays on the release that started it, and moves to another release only if nothing differs",
    "keep_open": "submit the next turn as a new run, with the same session_id=",
    "wait_for_answers": "a question waits until it is answered",
}
RUN_OPTIONS = ("params", "previous", "limits", "agent_models", "answers")
"""The options of a run that are stored with its order; its session, user and metadata are its ``RunInfo``."""


def refuse_engine_options(options: Mapping[str, Any]) -> None:
    """Raise ``DefinitionError`` for options of ``Engine`` that durable runs do not have."""
    for name, instead in REFUSED_ENGINE_OPTIONS.items():
        if options.get(name) is not None:
            msg = f"a DurableEngine takes no {name}: {instead}"
            raise DefinitionError(msg)


def get_refused_options_and_rate_limits(engine: Engine) -> dict[str, Any]:
    """Return an engine's rate limits and the options that ``refuse_engine_options`` refuses; ``None`` for each unset one."""
    launcher = engine._launcher  # noqa: SLF001 - this is the same engine, on another ground
    rates = launcher.services.models.rates
    return {
        "sessions": launcher.sessions,
        "interactor": launcher.services.interactor,
        "headless": launcher.headless or None,
        "rate_limits": rates.limits if isinstance(rates, RateLimits) else None,
    }


def refuse_unsupported_agents(launcher: Launcher) -> None:
    """Raise ``DefinitionError`` if the engine's models are a ``RunScript``, or an agent's limits have ``ask=True``."""
    if launcher.models.registry.for_run() is not launcher.models.registry:
        # A child is a run of its own, and any worker resumes either: each would start at the first reply again.
        msg = (
            "a DurableEngine takes no RunScript, which counts the replies of a run in one process: "
            "use ScriptedModel(function), whose function chooses the reply by the request"
        )
        raise DefinitionError(msg)
    for known in launcher.catalog.definitions:
        refuse_asking_limits(launcher.catalog.get_agent(known).limits, f"agent {known.id!r}", DefinitionError)


@frozen
class Submission:
    """
    A checked request for a run. Make one with ``make_submission``.

    Attributes:
        request: The request of the caller.
        plan: The plan of this process, which showed that the run can start.
    """

    request: RunRequest
    plan: RunPlan

    async def send(self, operator: Operator, *, id: str | None, priority: int, release: str, seed: str | None) -> str:
        """Submit the run, and return its id; arguments and errors as for ``Operator.submit``."""
        request = self.request
        return await operator.submit(
            request.agent.definition.id,
            request.prompt,
            id=id,
            params=self.plan.input.json,
            limits=request.limits,
            agent_models=request.agent_models,
            previous=request.previous,
            info=request.info,
            answers=request.answers,
            priority=priority,
            release=release,
            seed=seed,
        )


def make_submission(launcher: Launcher, agent: AgentLike, prompt: str | None, options: Mapping[str, Any]) -> Submission:
    """
    Check a run as ``Engine.run`` checks it, and return the submission.

    Args:
        launcher: The launcher of the engine with the agents.
        agent: An agent's id, or its definition.
        prompt: The prompt.
        options: Options of ``RunOptions``.

    Raises:
        StepEngineError: as ``DurableEngine.submit``.
    """
    own = dict(options)
    info = pop_run_info(own)
    unknown = [name for name in own if name not in RUN_OPTIONS]
    if unknown:
        why = REFUSED_RUN_OPTIONS.get(unknown[0])
        msg = f"a durable run takes no {unknown[0]!r}{'' if why is None else f': {why}'}"
        raise InputError(msg, issues=(unknown[0],))
    found = launcher.catalog.get_agent(agent)
    request = RunRequest(agent=found, prompt=prompt, info=info, **own)
    plan = launcher.plan_root_run(separate_earlier_answers(launcher.with_handoff_agent(request, request.previous))).plan
    refuse_asking_limits(plan.limits, f"this run of {found.definition.id!r}", InputError)
    return Submission(request, plan)
