"""
How the root run of a journaled run starts: for the first time, or again over its record.

Everything that a record says of a start is compared or restored here: workspace, id, time, seed, limits and models.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping

import attrs

from stepengine.data.limits import Limits
from stepengine.data.state import AgentState
from stepengine.errors import JournalError, StepEngineError
from stepengine.journal.divergence import find_definition_line
from stepengine.journal.history import (
    STABLE_CREATED,
    ChosenModels,
    History,
    describe_plan_changes,
    encode_root_start,
    make_head,
    parse_created,
)
from stepengine.journal.journaled_run import JournaledRun
from stepengine.journal.records import ROOT, Intent
from stepengine.machine.plan import RunPlan


def start_run(
    run: JournaledRun,
    plan: RunPlan,
    state: AgentState,
    *,
    limits: Limits | None = None,
    models: Mapping[str, str] | None = None,
    own_models: Mapping[str, str] | None = None,
    workspace: str = "",
) -> tuple[RunPlan, AgentState]:
    """
    Record the start of the root run, or verify it against the record, and return the plan and state to use.

    Args:
        run: The run; if it cannot start, its journal is released.
        plan: The plan made by the engine; for a recorded run made from ``opening``.
        state: The state, with its system prompt resolved.
        limits: The limits that the caller passed.
        models: The engine's models that replace those of agents, by agent id.
        own_models: The models chosen for this run alone, by agent id.
        workspace: The name of the engine's workspace; ``""`` for a folder of this machine.

    Raises:
        JournalError: when the journal is locked, damaged, of a newer version, holds a run already or cannot be written, or its
            run has its workspace in another container, sandbox or machine.
        ReplayDivergence: when agent, prompt or params differ from the recorded ones.
    """
    chosen = (models or {}, own_models or {})
    # Two kinds of failure, one rule: the journal is given back. What is ours is kept as the reason why nothing goes
    # on, so that a second look at the run says the same.
    try:
        if run.recorded_part is None:
            return _start_new_run(run, plan, state, limits, chosen, workspace=workspace)
        _check_same_workspace(run, run.recorded_part.history, workspace)
        return _start_recorded_run(run, plan, state, limits, chosen)
    except StepEngineError as error:
        run.writer.close()
        raise run.writer.keep_first_fatal_error(error) from error.__cause__
    except BaseException:
        run.writer.close()
        raise


def _check_same_workspace(run: JournaledRun, history: History, workspace: str) -> None:
    """
    Raise if a run would continue in another workspace than its recorded container or sandbox.

    Raises:
        JournalError: when the workspaces differ.
    """
    recorded = "" if history.head is None else history.head.workspace
    if recorded and recorded != workspace and run.mode.appends_to_source(history):
        now = workspace or "a folder of this machine"
        msg = (
            f"{run.writer.source.name} has a run that works in {recorded!r}, and would continue in {now}. "
            "Pass the original workspace with Engine(workspace=...) or --workspace, or fork the run"
        )
        raise JournalError(msg)


def _start_new_run(
    run: JournaledRun, plan: RunPlan, state: AgentState, limits: Limits | None, models: ChosenModels, *, workspace: str
) -> tuple[RunPlan, AgentState]:
    """Open the journal, write the head and the start, and return plan and state with id, creation time and random numbers."""
    machines, writer = run.machines, run.writer
    # Committed recordings: each of these would differ in every recording, and a diff of an agent's test would show
    # nothing but ids and times.
    if writer.source.stable:
        machines.seed = "0"
        plan = attrs.evolve(plan, run_id="run", created=STABLE_CREATED)
    else:
        machines.seed = machines.seed or secrets.token_hex(8)  # 64 bits: no two runs draw the same
        # Cut to milliseconds here, as the record does: a handler that asks `ctx.now()` must be told the same live
        # and on replay.
        created = plan.created
        plan = attrs.evolve(plan, created=created.replace(microsecond=created.microsecond // 1_000 * 1_000))
    plan, state = machines.add_seeded_random(plan), attrs.evolve(state, run_id=plan.run_id)
    writer.open_for_new_run(plan.run_id)
    # What is committed is the same on every machine, and names of places have paths of this one.
    where = "" if writer.source.stable else workspace
    journal = writer.journal
    writer.append(make_head(plan, machines.seed, link=journal.link, signed=journal.signed_by, workspace=where))
    # Recorded only where the engine chose it: a model that the agent names comes from its code, and a change of it
    # is to be seen.
    model = plan.model if plan.agent.definition.model is None else None
    writer.append(Intent(*ROOT, encode_root_start(plan, state, limits, model, models)))
    return machines.restore_and_record_lookups(plan, state)


def _start_recorded_run(
    run: JournaledRun, plan: RunPlan, state: AgentState, limits: Limits | None, models: ChosenModels
) -> tuple[RunPlan, AgentState]:
    """Compare the start with the record, and return plan and state with the recorded id, time, seed and lookups."""
    past, machines = run.recorded_part, run.machines
    assert past is not None  # noqa: S101 - asked for a recorded run
    history, head = past.history, past.history.head
    assert head is not None  # noqa: S101 - an opening was read from it
    past.handler_line = find_definition_line(plan.agent.definition.handle_steps)
    run.writer.warnings += describe_plan_changes(head, plan, history.name)
    machines.seed = head.seed
    # As the engine made it, the plan is created now, by the engine's clock.
    created, now = parse_created(head), plan.created
    plan = attrs.evolve(plan, run_id=str(history.root["run_id"]), created=created)
    plan, state = machines.add_seeded_random(plan), attrs.evolve(state, run_id=plan.run_id)
    model, chosen = (
        history.root.get("model"),
        (history.root.get("models") or {}, history.root.get("run_models") or {}),
    )
    # The limits of then are compared with, not those of now: other limits on resume hold for what is live, and are
    # no divergence (reliability:JR29).
    recorded = run.opening.limits if run.opening else None
    asked = Intent(*ROOT, encode_root_start(plan, state, recorded, model, chosen))
    # The start is compared like any effect: an agent that is resumed with another prompt would take all the
    # recorded answers for answers to that.
    is_equal = past.is_same_effect(history.intents[ROOT], asked)
    if run.mode.cuts_off:
        if not is_equal:
            past.discard_all()
        models = (models[0] or chosen[0], models[1] or chosen[1])
        asked = Intent(*ROOT, encode_root_start(plan, state, recorded if is_equal else limits, model, models))
    elif not is_equal:
        assert run.replayer is not None  # noqa: S101 - there is one for everything recorded
        run.replayer.accept_or_raise_start_difference(asked)
    run.timing.continue_from(history.last_at, created, now)
    run.mode.write_start(run.writer, history, head, asked, is_equal=is_equal)
    run.mail.record_collected_messages()
    return machines.restore_and_record_lookups(plan, state)
