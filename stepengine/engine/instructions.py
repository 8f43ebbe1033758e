"""What an agent's instructions say beside its own: which agents it may run, and which tools are its own (L18, L19)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from stepengine.data.definition import AgentDefinition
from stepengine.data.json import compact
from stepengine.data.messages import system_reminder
from stepengine.data.tools import ToolSpec
from stepengine.tools.spawning import params_schema

if TYPE_CHECKING:
    from stepengine.engine.catalog import Agent

__all__ = ("instructions_note",)

SPAWNERS = ("spawn_agents", "spawn_agent_inline")


def instructions_note(agent: Agent, sent: Sequence[ToolSpec] | None) -> str:
    """
    Return what is added to the instructions of a run; ``""`` when there is nothing to say.

    Args:
        agent: The agent that runs.
        sent: The tool definitions that it inherits, if it does; then it is told what it may really call.
    """
    children = [agent.child(key).definition for key in agent.spawnable] if _may_spawn(agent) else []
    if sent is None:
        lines = [f"- {_introduced(child)}" for child in children]
        text = "\n".join(["You may run these agents:", *lines]) if lines else ""
    else:
        text = "\n\n".join([_own_tools(agent, sent), *[_in_full(child) for child in children]])
    return system_reminder(text) if text else ""


def _may_spawn(agent: Agent) -> bool:
    return any(name in agent.offered for name in SPAWNERS)


def _introduced(child: AgentDefinition[object]) -> str:
    """Return an agent's id and what is known of it beside that."""
    known = child.description or (child.display_name if child.display_name != child.id else "")
    return f"{child.id}: {known}" if known else child.id


def _own_tools(agent: Agent, sent: Sequence[ToolSpec]) -> str:
    own = [*agent.offered, *(["set_output"] if agent.schemas.output_schema is not None else [])]
    names = ", ".join(dict.fromkeys(own)) or "none"
    shown = {spec.name for spec in sent}
    told = "You are shown the tools of the agent that started you. Of these and all others you may call only"
    lines = [f"{told}: {names}. A call of any other tool is refused."]
    for name, spec in agent.specs.items():
        if name not in shown:
            # Into the instructions of an agent with an output schema the machine writes that schema itself.
            is_told = name == "set_output" and agent.schemas.output_schema is not None
            schema = "" if is_told else f"\n  Its input: {compact(spec.input_schema)}"
            lines.append(f"- {name}: {spec.description}{schema}")
    return "\n".join(lines)


def _in_full(child: AgentDefinition[object]) -> str:
    lines = [f"You may run the agent {_introduced(child)}"]
    if child.input_schema is not None and child.input_schema.prompt:
        lines.append(f"Its prompt: {child.input_schema.prompt}")
    params = params_schema(child)
    if params is not None:
        lines.append(f"Its params: {compact(params)}")
    return "\n".join(lines)
