"""
Children that tools ask for: which agent an id means, and one effect for each child that may be started.

Every entry that is asked for has its result in its place: agents that may not be spawned get an error entry and start
nothing, the others run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from stepengine.data.alike import list_names
from stepengine.data.definition import normalised_id, parts_of_id
from stepengine.data.effects import Spawn
from stepengine.data.json import JsonDict
from stepengine.data.messages import ToolCallPart
from stepengine.data.state import AgentState, ChildResult
from stepengine.data.tools import ChildRequest, Spawning
from stepengine.errors import AgentError
from stepengine.machine.state import RunState

__all__ = ("children_of", "matching_id", "not_allowed", "resolve_agent_id", "stands_for")


def matching_id(wanted: str, allowed: Sequence[str] | Mapping[str, object]) -> str | None:
    """
    Return the first id in *allowed* that *wanted* means, or ``None``.

    Ids are ``[publisher/]name[@version]``, and ``_`` counts as ``-``. What *wanted* leaves out matches anything. One with a
    publisher of whom nothing of that name is there means the agent that is called so alone, as a bundled one or one of the
    engine's own is; ``stands_for`` says that its version is not checked.
    """
    key = normalised_id(wanted.strip())
    if key in allowed:
        return key
    publisher, name, version = parts_of_id(wanted)
    if name is None:
        return None
    is_theirs = False
    for candidate in allowed:
        theirs = parts_of_id(candidate)
        if name == theirs[1] and publisher in (None, theirs[0]) and version in (None, theirs[2]):
            return candidate
        is_theirs = is_theirs or theirs[:2] == (publisher, name)
    return name if publisher and not is_theirs and name in allowed else None


def stands_for(wanted: str, found: str) -> str:
    """Return what is to be said where *found* was taken for *wanted* by its name alone; ``""`` for nothing."""
    if "/" not in wanted or "/" in found:
        return ""
    return f"the agent {found!r} stands for {wanted.strip()!r}: publishers and versions are not checked"


def not_allowed(
    agent_id: str, wanted: str, allowed: Sequence[str] | Mapping[str, object], hint: str = ""
) -> AgentError:
    """Return the error for an agent that *agent_id* may not spawn, which lists those that it may."""
    msg = f"agent {agent_id!r} may not spawn {wanted!r}; it may spawn: {list_names(allowed, wanted)}{hint}"
    return AgentError(msg)


def resolve_agent_id(run: RunState, wanted: str) -> str | None:
    """Return the id of the agent that *wanted* means in this run, and say once where it is taken by its name alone."""
    found = matching_id(wanted, run.plan.agents or {})
    told = stands_for(wanted, found) if found is not None else ""
    if told:
        run.side_events.tell(told)
    return found


def children_of(
    run: RunState, call: ToolCallPart, runs: Spawning, value: JsonDict, parent: Callable[[], AgentState]
) -> list[Spawn | ChildResult]:
    """
    Return one effect for each child that *call* asks for, and a failed result in place of each that may not be.

    *parent* gives the state as they may inherit it.
    """
    entries = runs.entries(value)
    return [_child(run, call, entry, parent, is_inline=runs.is_inline, of=len(entries)) for entry in entries]


def _child(
    run: RunState,
    call: ToolCallPart,
    entry: ChildRequest,
    parent: Callable[[], AgentState],
    *,
    is_inline: bool,
    of: int,
) -> Spawn | ChildResult:
    agents, agent_id = run.plan.agents, entry.agent_id
    if entry.refused is not None:
        return ChildResult(agent_id=agent_id, status="failed", error=entry.refused)
    if entry.definition is None and agents is not None:
        found = resolve_agent_id(run, agent_id)
        if found is None:
            hint = f". {agent_id!r} is a tool: call it directly" if agent_id in run.tools.offered else ""
            error = not_allowed(run.plan.definition.id, agent_id, agents, hint)
            return ChildResult(agent_id=agent_id, status="failed", error=error)
        agent_id = found
    return Spawn(
        run.effects.number(),
        agent_id,
        entry.prompt,
        run.plan.mend_params(entry.definition or agent_id, entry.params) if entry.params else entry.params,
        call.tool_call_id,
        definition=entry.definition,
        parent=parent,
        is_inline=is_inline,
        of=of,
        at=run.effects.now,
    )
