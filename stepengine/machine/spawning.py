"""
Tools that become children: ``spawn_agents``, ``spawn_agent_inline``, and whatever else is bound by a ``SpawnBinding``.

Every entry that is asked for has its result in its place: agents that may not be spawned get an error entry and start
nothing, the others run (generator-contract L2 to L6).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import attrs

from stepengine.data.definition import normalised_id
from stepengine.data.effects import Spawn
from stepengine.data.json import JsonDict, JsonValue, compact, freeze
from stepengine.data.parts import ToolCallPart
from stepengine.data.results import ToolResult
from stepengine.data.run import ChildResult, RunStatus
from stepengine.data.state import AgentState
from stepengine.data.tools import ToolBinding, ToolSpec, Validated
from stepengine.errors import AgentError, DataError, LimitExceeded, StepEngineError, ToolInputError
from stepengine.machine.checks import STRING, described, issues_of, object_schema, validator
from stepengine.machine.state import RunState

__all__ = (
    "SPAWN_BINDINGS",
    "SPAWN_SPECS",
    "Entry",
    "SpawnBinding",
    "children_of",
    "kept_output",
    "listed",
    "matching_id",
    "not_allowed",
    "output_as_json",
    "why_not",
)

SHOWN_CHARS = 100_000
"""Characters of a child's output that its parent's model is shown (reliability SP12, section 4.9)."""
TAIL_SHARE = 5

SPAWN_AGENTS = """\
Run one or more agents at the same time and get their results in order.

Usage: give one entry per agent with its id in `agent_type`, what it should do in `prompt`, and `params` if it takes any.
Examples: {"agents": [{"agent_type": "code-searcher", "params": {"search_queries": [{"pattern": "retry"}]}}]}
When not to use: for what one of your own tools does directly.
Notes: a child that fails gives an entry with `error`; the others are not affected."""
SPAWN_AGENT_INLINE = """\
Run one agent in this conversation: it goes on from your history, and what it leaves replaces your history.

Usage: give its id in `agent_type`, what it should do in `prompt`, and `params` if it takes any.
Examples: {"agent_type": "context-pruner", "params": {"max_context_length": 200000}}
When not to use: when you want an answer from the agent; its output is dropped.
Notes: when it fails, the history stays as it was."""

_ENTRY = {
    "agent_type": described(STRING, "The agent's id."),
    "prompt": described(STRING, "What the agent should do."),
    "params": {"type": "object", "description": "The agent's parameters."},
}
_AGENT = {"type": "object", "properties": _ENTRY, "required": ["agent_type"], "additionalProperties": False}
PARTS = re.compile(r"(?:(?P<publisher>[^/@]+)/)?(?P<name>[^/@]+)(?:@(?P<version>[^/@]+))?")


class Entry(NamedTuple):
    """
    One child that is asked for.

    Attributes:
        agent_id: The agent's id as it was given.
        prompt: What it should do.
        params: Its params.
        definition: The agent itself, from tools that carry the agents which they run.
        refused: Why this one cannot be started, when what was asked for is wrong; the others are.
    """

    agent_id: str
    prompt: str = ""
    params: JsonValue = None
    definition: Any = None
    refused: StepEngineError | None = None


@attrs.frozen
class SpawnBinding(ToolBinding):
    """
    A tool that becomes children.

    Attributes:
        entries: Turns a validated input into what is asked for.
        shown: Turns the children's results, in that order, into the tool's result.
        is_inline: Whether the one child goes on from the run's history and leaves its own in its place.
    """

    entries: Callable[[JsonDict], Sequence[Entry]] = attrs.field(kw_only=True)
    shown: Callable[[Sequence[ChildResult[Any]]], ToolResult] = attrs.field(kw_only=True)
    is_inline: bool = attrs.field(default=False, kw_only=True)


def _parts(agent_id: str) -> tuple[str | None, str | None, str | None]:
    found = PARTS.fullmatch(normalised_id(agent_id.strip()))
    return (found["publisher"], found["name"], found["version"]) if found else (None, None, None)


def matching_id(wanted: str, allowed: Sequence[str] | Mapping[str, Any]) -> str | None:
    """
    Return the first id in *allowed* that *wanted* means, or ``None`` (generator-contract L2).

    Ids are ``[publisher/]name[@version]``, and ``_`` counts as ``-``. What *wanted* leaves out matches anything.
    """
    key = normalised_id(wanted.strip())
    if key in allowed:
        return key
    publisher, name, version = _parts(wanted)
    if name is None:
        return None
    for candidate in allowed:
        theirs = _parts(candidate)
        if name == theirs[1] and publisher in (None, theirs[0]) and version in (None, theirs[2]):
            return candidate
    return None


def not_allowed(agent_id: str, wanted: str, allowed: Sequence[str] | Mapping[str, Any], hint: str = "") -> AgentError:
    """Return the error for an agent that *agent_id* may not spawn, which lists those that it may (reliability SP04)."""
    msg = f"agent {agent_id!r} may not spawn {wanted!r}; it may spawn: {', '.join(allowed) or 'none'}{hint}"
    return AgentError(msg)


def children_of(
    run: RunState, call: ToolCallPart, binding: SpawnBinding, value: JsonDict, parent: Callable[[], AgentState]
) -> list[Spawn | ChildResult[Any]]:
    """
    Return one effect for each child that *call* asks for, and a failed result in the place of each that may not be.

    *parent* gives the state as they may inherit it.
    """
    entries = binding.entries(value)
    return [_child(run, call, entry, parent, is_inline=binding.is_inline, of=len(entries)) for entry in entries]


def _child(
    run: RunState, call: ToolCallPart, entry: Entry, parent: Callable[[], AgentState], *, is_inline: bool, of: int
) -> Spawn | ChildResult[Any]:
    agents, agent_id = run.plan.agents, entry.agent_id
    if entry.refused is not None:
        return ChildResult(agent_id=agent_id, status="failed", error=entry.refused)
    if entry.definition is None and agents is not None:
        found = matching_id(agent_id, agents)
        if found is None:
            hint = f". {agent_id!r} is a tool: call it directly" if agent_id in run.offered else ""
            error = not_allowed(run.agent.id, agent_id, agents, hint)
            return ChildResult(agent_id=agent_id, status="failed", error=error)
        agent_id = found
    return Spawn(
        run.number(),
        agent_id,
        entry.prompt,
        entry.params,
        call.tool_call_id,
        definition=entry.definition,
        parent=parent,
        is_inline=is_inline,
        of=of,
    )


# --- what a parent is shown -----------------------------------------------------------------------------------------


def listed(children: Sequence[ChildResult[Any]]) -> ToolResult:
    """Return one entry per child; an error result when every one of them failed (generator-contract L6, L13)."""
    entries: list[Any] = [_shown(child) for child in children]
    all_failed = all("error" in entry for entry in entries)
    return ToolResult.json(entries, status="error" if all_failed else "ok")


def _shown(child: ChildResult[Any]) -> dict[str, Any]:
    entry = {"agent_type": child.agent_id}
    if child.is_error:
        kept = kept_output(child)
        return {**entry, "error": why_not(child), **({} if kept in (None, "") else {"output": kept})}
    try:
        output = output_as_json(child.output)
    except DataError as error:
        return {**entry, "error": f"the output is not JSON: {error.message}"}
    return {**entry, "run_id": child.run_id, "status": child.status.value, "output": output}


def why_not(child: ChildResult[Any]) -> str:
    """Return why a child did not complete."""
    return child.why or f"it ended as {child.status.value}"


def kept_output(child: ChildResult[Any]) -> JsonValue:
    """
    Return what a child that did not complete had when its budget was spent or its reply was cut, else ``None``.

    It is paid for, so its parent gets it (requirements X51, X63).
    """
    was_cut = child.status in (RunStatus.MAX_STEPS, RunStatus.TRUNCATED) or isinstance(child.error, LimitExceeded)
    try:
        return output_as_json(child.text if child.output is None and was_cut else child.output)
    except DataError:
        return None


def output_as_json(output: Any) -> JsonValue:
    """
    Return a child's output as a parent's model is shown it: a pydantic model as its JSON form, a very long one cut.

    Raises:
        DataError: when it is not JSON; the message names the place.
    """
    dump = getattr(output, "model_dump", None)
    frozen: JsonValue = freeze(dump(mode="json") if dump else output, "output")
    text = frozen if isinstance(frozen, str) else compact(frozen)
    shown = _within_cap(text)
    return frozen if shown is text else shown


def _within_cap(text: str) -> str:
    if len(text) <= SHOWN_CHARS:
        return text
    tail = SHOWN_CHARS // TAIL_SHARE
    missing = len(text) - SHOWN_CHARS
    return f"{text[: SHOWN_CHARS - tail]}\n[... {missing} characters of this output are not shown ...]\n{text[-tail:]}"


def _child_entry(value: JsonDict) -> Entry:
    return Entry(value["agent_type"], value.get("prompt", ""), value.get("params"))


def _child_entries(value: JsonDict) -> list[Entry]:
    """Return what the objects of ``agents`` ask for, each judged for itself (generator-contract L3)."""
    entries: list[Entry] = []
    for index, given in enumerate(value["agents"]):
        issues = tuple(issues_of(_AGENT, given, f"agents[{index}]"))
        if issues:
            wanted = given.get("agent_type") if isinstance(given, Mapping) else None
            error = ToolInputError(f"not started: {'; '.join(issues)}", tool_name="spawn_agents", issues=issues)
            entries.append(Entry(wanted if isinstance(wanted, str) else "", refused=error))
        else:
            entries.append(_child_entry(given))
    return entries


def _inline_result(children: Sequence[ChildResult[Any]]) -> ToolResult:
    (child,) = children
    if child.is_error:
        return ToolResult.error(
            f"Agent {child.agent_id} did not complete, the history stays as it was: {why_not(child)}"
        )
    return ToolResult.json({"message": f"Agent {child.agent_id} ran in this conversation."})


def _spec(name: str, description: str, schema: JsonDict) -> ToolSpec:
    return ToolSpec(name, description, schema, kind="expanding", category="agent", requires_permission=False)


def _agents_schema(item: Mapping[str, Any]) -> JsonDict:
    agents = {"type": "array", "items": item, "minItems": 1, "description": "The agents to run."}
    return object_schema(("agents",), agents=agents)


_SPAWN_AGENTS = _spec("spawn_agents", SPAWN_AGENTS, _agents_schema(_AGENT))
_SPAWN_AGENT_INLINE = _spec("spawn_agent_inline", SPAWN_AGENT_INLINE, object_schema(("agent_type",), **_ENTRY))
_check_agents = validator(attrs.evolve(_SPAWN_AGENTS, input_schema=_agents_schema({})))


def _validate_agents(value: JsonDict) -> Validated:
    """Check all but the entries, which have their own results; one object is a list of one (generator-contract L1)."""
    agents = value.get("agents")
    if isinstance(agents, Mapping):
        value = JsonDict(freeze({**value, "agents": [agents]}))
    return _check_agents(value)


SPAWN_BINDINGS: Mapping[str, SpawnBinding] = MappingProxyType(
    {
        "spawn_agents": SpawnBinding(_SPAWN_AGENTS, _validate_agents, entries=_child_entries, shown=listed),
        "spawn_agent_inline": SpawnBinding(
            _SPAWN_AGENT_INLINE,
            validator(_SPAWN_AGENT_INLINE),
            entries=lambda value: [_child_entry(value)],
            shown=_inline_result,
            is_inline=True,
        ),
    }
)
"""The tools that every machine knows by which children are spawned."""

SPAWN_SPECS: Mapping[str, ToolSpec] = MappingProxyType({name: b.spec for name, b in SPAWN_BINDINGS.items()})
