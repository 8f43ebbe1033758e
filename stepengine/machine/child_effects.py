"""
Children that tools request: resolve an agent id, make one effect for each child that may start, and collect the results.

Every requested child has a result, in the order of the request. An agent that may not be spawned gets an error entry and
starts nothing; the others run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stepengine.data.alike import list_names
from stepengine.data.definition import normalised_id, split_agent_id
from stepengine.data.effects import Spawn
from stepengine.data.json import JsonDict
from stepengine.data.messages import ToolCallPart
from stepengine.data.outcomes import Failure, Single, Stop
from stepengine.data.state import AgentState, ChildResult
from stepengine.data.tools import ChildRequest, Spawning
from stepengine.errors import AgentError, LimitExceeded
from stepengine.machine.signals import merge_stops
from stepengine.machine.state import RunState


def find_matching_id(wanted: str, allowed: Sequence[str] | Mapping[str, object]) -> str | None:
    """
    Return the first id in *allowed* that matches *wanted*, or ``None``.

    Ids are ``[publisher/]name[@version]``, and ``_`` counts as ``-``. Missing parts of *wanted* match anything. If no
    agent of the publisher has that name, the agent with the name alone matches, such as a bundled agent or one of the engine.
    ``describe_substitution`` reports that the version was not checked.
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


def qualify_with_publisher(namer: str, agent_id: str) -> str:
    """Return *agent_id*, named by the agent *namer*, as agents outside of the package of *namer* name it."""
    publisher, _, _ = split_agent_id(namer)
    return agent_id if publisher is None or "/" in agent_id else f"{publisher}/{agent_id}"


def describe_substitution(wanted: str, found: str) -> str:
    """Return a note that *wanted* was resolved to *found* by its name alone, or ``""``."""
    if "/" not in wanted or "/" in found:
        return ""
    return f"the agent {found!r} stands for {wanted.strip()!r}: publishers and versions are not checked"


def make_spawn_not_allowed_error(
    agent_id: str, wanted: str, allowed: Sequence[str] | Mapping[str, object], hint: str = ""
) -> AgentError:
    """Return the error for an agent that *agent_id* may not spawn; it lists the allowed ones."""
    msg = f"agent {agent_id!r} may not spawn {wanted!r}; it may spawn: {list_names(allowed, wanted)}{hint}"
    return AgentError(msg)


def find_spawnable_agent_id(run: RunState, wanted: str) -> str | None:
    """Return the id of the agent named *wanted* that this run may spawn, or ``None``; warn once if the publisher in *wanted* was ignored."""
    found = find_matching_id(wanted, run.plan.agent.children or {})
    told = describe_substitution(wanted, found) if found is not None else ""
    if told:
        run.side_events.warn_once(told)
    return found


def child_result_from_outcome(outcome: Single, agent_id: str) -> Any:
    """Return the result of a child; one that never ran has failed."""
    if isinstance(outcome, Failure):
        return ChildResult(agent_id=agent_id, status="failed", error=outcome.error)
    return outcome.value  # type: ignore[union-attr]


class RequestedChildren:
    """
    The children that one tool call requests.

    Attributes:
        effects: One ``Spawn`` for each child that may start.
        results: The results of all children, in the order of the request; empty until the children have ended.
    """

    __slots__ = ("_entries", "_run", "effects", "results")

    def __init__(
        self, run: RunState, call: ToolCallPart, runs: Spawning, value: JsonDict, parent: Callable[[], AgentState]
    ) -> None:
        """Number the effects; *parent* returns the state that the children may inherit."""
        requests = runs.entries(value)
        self._run = run
        # In the order of the request: the effect of a child that may start, else its failed result.
        self._entries = [
            _make_spawn_or_failure(run, call, one, parent, is_inline=runs.is_inline, child_count=len(requests))
            for one in requests
        ]
        self.effects = [entry for entry in self._entries if isinstance(entry, Spawn)]
        self.results: Sequence[ChildResult] = ()

    @property
    def has_invalid_entry(self) -> bool:
        """Whether a requested child may not start."""
        return len(self.effects) < len(self._entries)

    def apply_outcomes(self, outcomes: Sequence[Single]) -> Stop | None:
        """Count the spending of the children and set the results; return the stop, if any."""
        stops: list[Stop] = []
        ended: list[ChildResult] = []
        for effect, outcome in zip(self.effects, outcomes, strict=True):
            # Children that ended are counted although the call as a whole is stopped: the sums of a run must include all
            # that was paid (reliability:I4). After a resume they are answered from the record, and none runs twice.
            if isinstance(outcome, Stop):
                self._run.spent.count_stopped_child(outcome)
                stops.append(outcome)
            else:
                ended.append(child_result_from_outcome(outcome, effect.agent_id))
                self._run.spent.count_child(ended[-1])
        if stops:
            return merge_stops(stops)
        # Two lists become one: entries that could never be (an unknown agent) have their error in their own place, so a
        # model can tell which of its requests went wrong.
        rest = iter(ended)
        self.results = [next(rest) if isinstance(entry, Spawn) else entry for entry in self._entries]
        return None

    def warn_of_refused_children(self, tool_name: str) -> None:
        """Warn of children that a limit refused, since the call of *tool_name* as a whole succeeds."""
        # A model sees the entries of its call. An author's program may ignore the list, so the missing children are also
        # in the run's warnings.
        refused = [
            c.error
            for c in self.results
            if isinstance(c.error, LimitExceeded) and c.error.kind == "children" and not c.run_id
        ]
        if refused:
            self._run.side_events.warn_once(
                f"{len(refused)} of {len(self.results)} agents of one {tool_name!r} were not started: {refused[0]}. "
                "Start them with map_agents or Parallel(AgentCall(...), ...), which have no such default, or raise the limit"
            )


def _make_spawn_or_failure(
    run: RunState,
    call: ToolCallPart,
    entry: ChildRequest,
    parent: Callable[[], AgentState],
    *,
    is_inline: bool,
    child_count: int,
) -> Spawn | ChildResult:
    """Return the numbered ``Spawn`` of a requested child, or a failed result if it may not start."""
    agents, agent_id = run.plan.agent.children, entry.agent_id
    if entry.refused is not None:
        return ChildResult(agent_id=agent_id, status="failed", error=entry.refused)
    if entry.definition is None and agents is not None:
        found = find_spawnable_agent_id(run, agent_id)
        if found is None:
            hint = f". {agent_id!r} is a tool: call it directly" if agent_id in run.tools.offered else ""
            error = make_spawn_not_allowed_error(run.plan.agent.definition.id, agent_id, agents, hint)
            return ChildResult(agent_id=agent_id, status="failed", error=error)
        agent_id = found
    sources = run.effects.sources
    params = (
        run.plan.agent.repair_child_params(entry.definition or agent_id, entry.params) if entry.params else entry.params
    )
    return Spawn(
        run.effects.allocate_number(),
        agent_id,
        entry.prompt,
        params,
        call.tool_call_id,
        definition=entry.definition,
        parent=parent,
        is_inline=is_inline,
        of=child_count,
        at=run.effects.now,
        provenance=None if sources is None else sources.make_child_provenance(entry.prompt, params, inherits=is_inline),
    )
