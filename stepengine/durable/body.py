"""
The body of the one durable workflow: it builds a run from its order, drives it, and returns its stored result.

The body does nothing but drive (durable:U11): whatever comes from outside is a step. It may be executed any number of times, by any
worker of its release, always with the same result.
"""

from __future__ import annotations

from collections.abc import Generator
from datetime import datetime
from functools import partial
from math import inf
from random import Random
from typing import Any, cast

import attrs

from stepengine.data.effects import CallBody, Spawn
from stepengine.data.limits import TREE_WIDE
from stepengine.data.outcomes import Outcome
from stepengine.data.state import AgentState
from stepengine.data.tools import Yielding
from stepengine.durable.executions import DurableRun
from stepengine.durable.sessions import ENTERED, load_previous_turn, make_turn_record, with_previous_turn
from stepengine.durable.step_names import END, LOOKUP
from stepengine.durable.steps import Steps
from stepengine.durable.wire import (
    Ancestor,
    SubmittedRun,
    encode_body_end,
    encode_child_result,
    encode_error,
    encode_result,
    parse_error,
    parse_hook_values,
)
from stepengine.engine.launcher import Launcher
from stepengine.engine.run import EngineRun, make_ended_machine
from stepengine.engine.run_plans import PlannedRun, RunRequest, separate_earlier_answers, with_resolved_system_prompt
from stepengine.errors import StepEngineError
from stepengine.journal.encoding import to_comparable_json
from stepengine.journal.fingerprints import definition_fingerprint
from stepengine.machine.plan import Finished, RunPlan
from stepengine.runtime.performer import child_path
from stepengine.runtime.services import ChildPlanner, MachineMaker, TimeSetting


def make_root_request(launcher: Launcher, order: SubmittedRun) -> RunRequest:
    """
    Return the request of the root run's caller.

    Raises:
        StepEngineError: when it cannot start here: an unknown agent, a wrong answer.
    """
    request = RunRequest(
        agent=launcher.catalog.get_agent(order.agent_id),
        prompt=order.prompt,
        params=order.params,
        previous=order.previous,
        info=order.info,
        limits=order.limits,
        agent_models=order.models,
        answers=dict(order.answers),
        run_id=order.root,
    )
    return separate_earlier_answers(launcher.with_handoff_agent(request, order.previous))


def plan_submitted_run(
    root: PlannedRun, order: SubmittedRun, *, depth: int | None = None
) -> tuple[RunPlan, AgentState]:
    """
    Return the plan and the state with which the run of *order* starts; a child's is planned from its root down.

    Args:
        root: The root run that the order belongs to.
        order: The submitted request.
        depth: How many levels of children have queues; nothing can be spawned below.

    Raises:
        StepEngineError: when it cannot start here.
    """
    plan = attrs.evolve(root.plan, created=datetime.fromisoformat(order.created))
    if depth is not None and (plan.limits.max_depth is None or plan.limits.max_depth > depth):
        plan = attrs.evolve(plan, limits=attrs.evolve(plan.given, max_depth=depth))
    state, services = root.state, root.services
    # Planned down from the root by the same code as in one process: a child's order holds who asked for it and with
    # what, and no plan, since tools and hooks are functions and every worker of the release has them.
    for number, spawn in enumerate(order.spawns, 1):
        is_last = number == len(order.spawns)
        parent = order.parent if is_last and order.parent is not None else AgentState()
        effect = _make_start_effect(spawn, parent)
        plan, state = services.planner(plan, effect, child_path(plan.path, spawn.seq))
    if order.slice is not None:
        plan = attrs.evolve(plan, limits=plan.given.cap({name: getattr(order.slice, name) for name in TREE_WIDE}))
    return attrs.evolve(plan, random=partial(Random, f"{order.seed}:{plan.path}")), state


def _make_start_effect(ancestor: Ancestor, parent: AgentState) -> Spawn | CallBody:
    def get_parent() -> AgentState:
        return parent

    if not ancestor.tool_name:
        return Spawn(
            seq=ancestor.seq, agent_id=ancestor.agent_id, prompt=ancestor.prompt, params=ancestor.params,
            tool_call_id=ancestor.tool_call_id, is_inline=ancestor.is_inline, at=ancestor.at, of=ancestor.of,
            parent=get_parent,
        )  # fmt: skip
    return CallBody(
        seq=ancestor.seq, tool_name=ancestor.tool_name, input=ancestor.input, tool_call_id=ancestor.tool_call_id,
        source=ancestor.source, at=ancestor.at, state=get_parent, values=parse_hook_values(ancestor.values),
    )  # fmt: skip


async def execute_run_and_encode_result(
    launcher: Launcher, order: SubmittedRun, run: DurableRun, *, depth: int
) -> dict[str, Any]:
    """
    Drive a run to its end and return its stored result; *depth* is how many levels of children have queues.

    Raises:
        StepEngineError: when it cannot continue here; its record stays, and it can be retried.
        BaseException: why this execution has no result, of the database's own classes.
    """
    if order.turn and not order.spawns:
        order = run.order = await _load_or_record_turn_order(run, order)
    seen = await _prepare_execution(launcher, order, run, depth=depth)
    plan, result = seen.plan, await seen.live.run()
    # Raised only here, when handlers are closed and tools have ended: the machine has been told of a cancellation, and
    # its result belongs to an execution that does not count.
    if run.end.parked is not None:
        raise run.end.parked
    if run.end.fatal is not None:
        raise run.end.fatal
    finished = seen.finished
    assert finished is not None  # noqa: S101 - a run without an end has raised
    if order.spawns:
        # A child has no result of its own here, so its parent's takes what only this process knows of it.
        finished = finished.with_warnings(seen.live.tree.hub.failures.warnings)
    rules = seen.live.tree.questions.remembered.rules
    ended = to_comparable_json(finished.to_child_result())
    if plan.body is not None:
        given = finished.to_call_result(
            cast("Yielding", plan.tools[plan.body.tool_name].runs), is_typed=not plan.body.by_model
        )
        form = encode_body_end(finished, given, descendant_count=run.started, approval_rules=rules)
        ended = {"status": form["status"], "result": form["result"]}
    elif order.spawns:
        form = encode_child_result(finished, plan, descendant_count=run.started, approval_rules=rules)
    else:
        form = encode_result(result)
    if order.turn and not order.spawns:
        form["session"] = make_turn_record(order, result, rules, has_started=finished.began)
    print_ = run.prints.for_value(ended)
    # Named by the fingerprint of the result: a handler that returns something else when it is executed again diverges
    # here, at its very end (durable:U15).
    mark = run.workflow.reserve_next_step(f"{END}:{print_}", {"at": run.clock.elapsed_ms()})
    known = await run.workflow.load_or_record_mark(mark, "its end")
    return form | known if order.spawns else form


async def _prepare_execution(launcher: Launcher, order: SubmittedRun, run: DurableRun, *, depth: int) -> _Execution:
    """Plan a run, record its prompt and context window, start its clock, and return its execution, ready to start."""
    root = launcher.plan_root_run(make_root_request(launcher, order))
    plan, state = plan_submitted_run(root, order, depth=depth)
    plan, state, failed = await _record_prompt_and_window(run, plan, state)
    run.clock.start_execution_time()
    execution = _Execution(run, plan)
    services = attrs.evolve(
        root.services,
        machine=execution.wrap_machine_maker(root.services.machine if failed is None else make_ended_machine(failed)),
        planner=_wrap_planner_with_seed(root.services.planner, order.seed),
        middlewares=(*root.services.middlewares, partial(Steps, run=run)),
        seed=order.seed,
        time=TimeSetting(clock=launcher.services.time.clock, sleep_in_process=inf, since=run.clock.takeover_ms),
        mail=run.messages,
    )
    execution.live = launcher.make_or_fill_engine_run(
        attrs.evolve(root, plan=plan, state=state, services=services), is_news=run.workflow.is_new_event
    )
    run.end.tree = execution.live.tree
    run.tree.questions.replace_session_rules_by_recorded(order.rules)
    # A wait of this run ends in this execution, so its tree is never suspended.
    run.tree.suspension.is_reachable = True
    return execution


async def _load_or_record_turn_order(run: DurableRun, order: SubmittedRun) -> SubmittedRun:
    """Return the order of a turn with the state from which the turn continues. The state is looked up once and recorded."""

    async def load_turn_state() -> dict[str, Any]:
        run.workflow.is_live = True
        return await load_previous_turn(await run.sessions, order)

    print_ = run.prints.for_value({"session": order.info.session_id, "turn": order.turn})
    return with_previous_turn(
        order, await run.workflow.reserve_and_load_or_perform_step(f"{ENTERED}:{print_}", load_turn_state, "its turn")
    )


async def _record_prompt_and_window(
    run: DurableRun, plan: RunPlan, state: AgentState
) -> tuple[RunPlan, AgentState, StepEngineError | None]:
    """Load the prompt and context window, or compute and record them; return plan and state with them, and the error of the prompt."""
    if plan.body is not None:
        return plan, state, None  # its caller has looked
    own = not isinstance(plan.agent.definition.system_prompt, str) and plan.sent is None
    if not own and plan.context_window is None:
        return plan, with_resolved_system_prompt(plan, state) if plan.sent is None else state, None

    # A computed prompt may differ on another worker an hour later, so the run keeps the prompt that it started with.
    async def compute_prompt_and_window() -> dict[str, Any]:
        run.workflow.is_live = True
        try:
            text = with_resolved_system_prompt(plan, state).system_prompt if own else state.system_prompt
        except StepEngineError as error:
            return {"error": encode_error(error)}
        return {"prompt": text if own else None, "window": plan.context_window}

    known = run.seed.lookups.get(plan.path)
    print_ = definition_fingerprint(plan.agent.definition, [plan.tools[name].spec for name in plan.agent.offered])
    found = known or await run.workflow.reserve_and_load_or_perform_step(
        f"{LOOKUP}:{print_}", compute_prompt_and_window, "its start"
    )
    if "error" in found:
        return plan, state, parse_error(found["error"])
    if found["prompt"] is not None:
        state = attrs.evolve(state, system_prompt=found["prompt"])
    return attrs.evolve(plan, context_window=found["window"]), state, None


class _Execution:
    """One execution of a run: its machines and the end of the run."""

    live: EngineRun

    def __init__(self, run: DurableRun, plan: RunPlan) -> None:
        self._run = run
        self.plan = plan
        self.finished: Finished | None = None

    def wrap_machine_maker(self, inner: MachineMaker) -> MachineMaker:
        """Return a function that creates the machines of the run and of its tool bodies, and observes the end of the run."""

        def run_and_observe_machine(plan: RunPlan, state: AgentState) -> Generator[Any, Outcome | None, Finished]:
            end = self._run.end
            around, end.machine = end.machine, inner(plan, state)
            try:
                finished: Finished = yield from end.machine
            finally:
                end.machine = around or end.machine
            if plan.path == self._run.order.path:
                self.finished = finished
            return finished

        return run_and_observe_machine


def _wrap_planner_with_seed(inner: ChildPlanner, seed: str) -> ChildPlanner:
    """Return a planner whose tool bodies draw random numbers from the *seed* of the order and their path."""

    def plan_with_seed(parent: RunPlan, effect: Any, path: str) -> tuple[RunPlan, AgentState]:
        plan, state = inner(parent, effect, path)
        return attrs.evolve(plan, random=partial(Random, f"{seed}:{path}")), state

    return plan_with_seed
