"""
Children that tools request: resolve an agent id, and make one effect for each child that may start.

Every entry that is asked for has its result in its place: agents that may not be spawned get an error entry and start
nothing, the others run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from stepengine.data.alike import list_names
from stepengine.data.definition import normalised_id, split_agent_id
from stepengine.data.effects import Spawn
from stepengine.data.json import JsonDict
from stepengine.data.messages import ToolCallPart
from stepengine.data.state import AgentState, ChildResult
from stepengine.data.tools import ChildRequest, Spawning
from stepengine.errors import AgentError
from stepengine.machine.state import RunState


def find_matching_id(wanted: str, allowed: Sequence[str] | Mapping[str, object]) -> str | None:
    """
    Return the first id in *allowed* that matches *wanted*, or ``None``.

    Ids are ``[publisher/]name[@version]``, and ``_`` counts as ``-``. What *wanted* leaves out matches anything. One with a
    publisher of whom nothing of that name is there means the agent that is called so alone, as a bundled one or one of the
    engine's own is; ``describe_substitution`` says that its version is not checked.
    """
    key = normalised_id(wanted.strip())
    if key in allowed:
        return key
    publisher, name, version = split_agent_id(wanted)
    if name is None:
        return None
    is_theirs = False
    for candidate in allowed:
        theirs = split_agent_id(candidate)
        if name == theirs[1] and publisher in (None, theirs[0]) and version in (None, theirs[2]):
            return candidate
        is_theirs = is_theirs or theirs[:2] == (publisher, name)
    return name if publisher and not is_theirs and name in allowed else None


def describe_substitution(wanted: str, found: str) -> str:
    """Return a note that *wanted* was resolved to *found* by its name alone, or ``""``."""
    if "/" not in wanted or "/" in found:
        return ""
    return f"the agent {found!r} stands for {wanted.strip()!r}: publishers and versions are not checked"


def spawn_not_allowed_error(
    agent_id: str, wanted: str, allowed: Sequence[str] | Mapping[str, object], hint: str = ""
) -> AgentError:
    """Return the error for an agent that *agent_id* may not spawn; it lists the allowed ones."""
    msg = f"agent {agent_id!r} may not spawn {wanted!r}; it may spawn: {list_names(allowed, wanted)}{hint}"
    return AgentError(msg)


def resolve_agent_id(run: RunState, wanted: str) -> str | None:
    """Return the id of the agent that *wanted* names in this run; warn once if only the name matches."""
    found = find_matching_id(wanted, run.plan.agents or {})
    told = describe_substitution(wanted, found) if found is not None else ""
    if told:
        run.side_events.tell(told)
    return found


def make_child_effects(
    run: RunState, call: ToolCallPart, runs: Spawning, value: JsonDict, parent: Callable[[], AgentState]
) -> list[Spawn | ChildResult]:
    """
    Return one effect for each child that *call* requests, or a failed result where it is not allowed.

    *parent* gives the state as they may inherit it.
    """
    entries = runs.entries(value)
    return [
        _make_child_effect(run, call, entry, parent, is_inline=runs.is_inline, of=len(entries)) for entry in entries
    ]


def _make_child_effect(
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
            error = spawn_not_allowed_error(run.plan.definition.id, agent_id, agents, hint)
            return ChildResult(agent_id=agent_id, status="failed", error=error)
        agent_id = found
    sources = run.effects.sources
    params = run.plan.mend_params(entry.definition or agent_id, entry.params) if entry.params else entry.params
    return Spawn(
        run.effects.number(),
        agent_id,
        entry.prompt,
        params,
        call.tool_call_id,
        definition=entry.definition,
        parent=parent,
        is_inline=is_inline,
        of=of,
        at=run.effects.now,
        provenance=None if sources is None else sources.make_child_index(entry.prompt, params, inherits=is_inline),
    )
