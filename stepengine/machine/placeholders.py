"""The placeholders in an agent's prompts: filled when its run starts, and the number of steps before each step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stepengine.data.effects import CallFunction
from stepengine.data.messages import UserMessage
from stepengine.data.placeholders import PROJECT_NAMES, RUN_NAMES, STEPS, Placeholders, fill_placeholders
from stepengine.data.yields import Perform
from stepengine.errors import PerformError
from stepengine.machine.protocol import Flow
from stepengine.machine.state import RunState


def fill_system_prompt(run: RunState, placeholders: Placeholders) -> Flow[None]:
    """Look up the values of *placeholders*, fill the system prompt, and warn of each placeholder without a value."""
    plan = run.plan
    of_project = [name for name in placeholders.names if name in PROJECT_NAMES]
    found = (yield from _read_project_values(run, placeholders, of_project)) if of_project else {}
    prompts = {"USER_INPUT_PROMPT": _get_user_prompt(run), "INITIAL_AGENT_PROMPT": plan.input.prompt}
    date = f"{plan.created:%B} {plan.created.day}, {plan.created.year}"
    known = {"AGENT_NAME": plan.agent.definition.display_name, "CURRENT_DATE": date, STEPS: str(run.budget.steps_left)}
    values = {**dict.fromkeys(RUN_NAMES, ""), **known, **prompts, **found}
    run.prompt.placeholders = values
    for name in placeholders.names:
        if name not in values:
            run.side_events.warn_once(_describe_unfilled(plan.agent.definition.id, name))
    # A prompt that is inherited, or made by an object, is no text of this definition.
    if run.prompt.system == plan.agent.definition.system_prompt:
        run.prompt.system = fill_placeholders(run.prompt.system, values)


def _get_user_prompt(run: RunState) -> str:
    """Return the last user prompt of the conversation that a child inherits, else the run's own prompt."""
    plan = run.plan
    # A reviewer that inherits the conversation refers to the user's request; its own prompt only says what to review.
    if not (plan.path and (plan.agent.definition.include_message_history or plan.is_inline)):
        return plan.input.prompt
    prompts = (m for m in reversed(run.history.record) if isinstance(m, UserMessage) and "USER_PROMPT" in m.tags)
    return next((prompt.text for prompt in prompts), "")


def _read_project_values(run: RunState, placeholders: Placeholders, names: list[str]) -> Flow[dict[str, str]]:
    """Return the values of the project's placeholders. They are recorded, so a replay does not need the project."""
    effect = CallFunction(run.effects.allocate_number(), Perform.idempotent(placeholders.read, names))
    try:
        read: Any = run.effects.unwrap((yield effect))  # type: ignore[arg-type]  # of one effect comes one outcome
    except PerformError as error:
        run.side_events.warn_once(
            f"agent {run.plan.agent.definition.id!r}: its project could not be read: {error.message}"
        )
        return {}
    for warning in _get_member_or_empty(read, "warnings", list):
        run.side_events.warning(str(warning))
    return {name: text for name, text in _get_member_or_empty(read, "texts", Mapping).items() if isinstance(text, str)}


def _get_member_or_empty(data: object, name: str, kind: type[Any]) -> Any:
    """Return a member of type *kind*, or an empty list or mapping if there is none."""
    value = data.get(name) if isinstance(data, Mapping) else None
    return value if isinstance(value, kind) else kind() if kind is list else {}


def _describe_unfilled(agent_id: str, name: str) -> str:
    placeholder = f"{{CODEBUFF_{name}}}"
    if name in PROJECT_NAMES:
        return (
            f"agent {agent_id!r}: its prompt has {placeholder}, but the run has no workspace on this machine to fill it from, so "
            "it was sent unchanged; use Engine(workspace=folder)"
        )
    return (
        f"agent {agent_id!r}: its prompt has {placeholder}, which is unknown, so it was sent unchanged; known placeholders: "
        f"{', '.join(sorted([*RUN_NAMES, *PROJECT_NAMES]))}"
    )


def fill_prompt_text(run: RunState, text: str) -> str:
    """Return an instructions or step prompt as it is sent now."""
    values = run.prompt.placeholders
    return fill_placeholders(text, {**values, STEPS: str(run.budget.steps_left)}) if values else text
