"""What a run is started with, as its journal keeps it: the head, and the Spawn of the root at ``("", -1)`` (replay J11, J12)."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from typing import Any

import attrs

from stepengine.data.definition import AgentDefinition
from stepengine.data.json import JsonDict, JsonValue
from stepengine.data.limits import Limits
from stepengine.data.state import AgentState, RunInfo
from stepengine.errors import JournalCorrupt
from stepengine.journal.fingerprints import definition_fingerprint
from stepengine.journal.forms import bare, name_of, restored
from stepengine.journal.history import History
from stepengine.journal.records import Head
from stepengine.machine.plan import RunPlan

__all__ = (
    "STABLE_CREATED",
    "Opening",
    "changes_since",
    "created_of",
    "new_head",
    "opening_of",
    "root_form",
)

STABLE_CREATED = datetime(2026, 1, 1, tzinfo=UTC)


@attrs.frozen(kw_only=True)
class Opening:
    """
    What an engine needs to start a recorded run again.

    Attributes:
        agent_id: The root's agent.
        prompt: Its prompt.
        params: Its params as JSON; ``None`` for none.
        previous: The state that it continued; ``None`` for none.
        info: What the caller said of it.
        limits: The limits that the caller gave; ``None`` for none.
        run_id: The run's id, which stays the same for ever.
    """

    agent_id: str
    prompt: str = ""
    params: JsonValue = None
    previous: AgentState | None = None
    info: RunInfo = RunInfo()
    limits: Limits | None = None
    run_id: str = ""


@cache
def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("stepengine")
    except PackageNotFoundError:
        return "0"


def new_head(plan: RunPlan, seed: str, *, link: bool) -> Head:
    """Return the head of a new journal."""
    definition: AgentDefinition[Any] = plan.definition
    specs = [plan.tools[name].spec for name in plan.offered if name in plan.tools]
    return Head(
        engine=_version(),
        agent=definition.id,
        definition=definition_fingerprint(definition, specs),
        run=plan.run_id,
        seed=seed,
        created=_text(plan.created),
        hooks=_hooks_of(plan),
        link=link,
    )


def _hooks_of(plan: RunPlan) -> tuple[str, ...]:
    return tuple([name_of(h) for point in attrs.astuple(plan.hooks, recurse=False) for h in point])


def changes_since(head: Head, plan: RunPlan, name: str) -> list[str]:
    """Return what is not as it was when *head* was written; only effects decide whether that matters (reliability JR24)."""
    changes: list[str] = []
    if head.engine != _version():
        changes.append(f"{name} was recorded by stepengine {head.engine}; this is {_version()}")
    hooks = _hooks_of(plan)
    if tuple(head.hooks) != hooks:
        was, now = ", ".join(head.hooks) or "none", ", ".join(hooks) or "none"
        changes.append(f"{name} was recorded with other hooks; then: {was}; now: {now}")
    return changes


def _text(when: datetime) -> str:
    return when.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def created_of(head: Head) -> datetime:
    """
    Return when the recorded root run was created.

    Raises:
        JournalCorrupt: when that is no time.
    """
    try:
        return datetime.fromisoformat(head.created)
    except ValueError as error:
        msg = f"the head says that the run was created at {head.created!r}, which is no time"
        raise JournalCorrupt(msg) from error


def root_form(
    plan: RunPlan, state: AgentState, limits: Limits | None, model: str | None, models: Mapping[str, str]
) -> dict[str, Any]:
    """
    Return the stored form of the Spawn that starts a root run.

    Args:
        plan: Its plan.
        state: Its state.
        limits: The limits that the caller gave.
        model: A model that the agent itself does not name.
        models: Models that were chosen in place of those that agents name, by agent id.
    """
    form: dict[str, Any] = {"type": "Spawn", "agent_id": plan.definition.id, "prompt": plan.prompt}
    form |= {"params": plan.params_json, "run_id": plan.run_id}
    if state.message_history or state.context or state.next_call != 1:
        form["previous"] = bare(attrs.evolve(state, system_prompt="", tool_definitions=JsonDict(), steps_remaining=0))
    form |= {name: value for name, value in attrs.asdict(plan.info, recurse=False).items() if value}
    form |= {"model": model} if model is not None else {}
    form |= {"models": dict(models)} if models else {}
    return form | ({"limits": bare(limits)} if limits is not None else {})


def opening_of(history: History) -> Opening:
    """Return what a recorded run was started with."""
    form = history.root
    previous, limits = form.get("previous"), form.get("limits")
    return Opening(
        agent_id=form["agent_id"],
        prompt=form["prompt"],
        params=form["params"],
        previous=None if previous is None else restored(previous),
        info=RunInfo(form.get("session_id"), form.get("user_id"), form.get("metadata", {})),
        limits=None if limits is None else restored(limits),
        run_id=form["run_id"],
    )
