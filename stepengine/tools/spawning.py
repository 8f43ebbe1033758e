"""
The tools by which agents run other agents: ``spawn_tools``, ``task_tool``, ``agent_tool`` (requirements J1, J11, J17).

All of them become the same effect. What an agent expects stands in its ``input_schema``; here it becomes the schema of a
tool (generator-contract L28 to L30).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs

from stepengine.data.definition import AgentDefinition
from stepengine.data.json import JsonDict, compact, freeze, freeze_object, thaw
from stepengine.data.results import ToolResult
from stepengine.data.run import ChildResult
from stepengine.data.tools import ToolLike, ToolSpec
from stepengine.errors import DataError, DefinitionError
from stepengine.machine.checks import STRING, described, object_schema, validator
from stepengine.machine.spawning import Entry, SpawnBinding, kept_output, listed, output_as_json, why_not
from stepengine.tools.arguments import without_titles
from stepengine.tools.control import MachineTool, machine_tool
from stepengine.tools.definition import check_name
from stepengine.tools.repair import repairer

__all__ = ("agent_tool", "carried_by", "direct_tool", "params_schema", "spawn_tools", "task_tool")

DEFS = "#/$defs/"


def spawn_tools(*, inline: bool = False, lookup: bool = False) -> list[ToolLike]:
    """
    Return ``spawn_agents``, by which a model runs the agents that its own agent may spawn.

    An agent that has it is offered each of its spawnable agents as a tool of its own, too: ``file-picker`` as
    ``file_picker(prompt, params)``. A handler may call ``spawn_agents`` and the two below without having them; one agent it
    runs with ``AgentCall``.

    Args:
        inline: Add ``spawn_agent_inline``, whose agent goes on from the history and leaves its own in its place.
        lookup: Add ``lookup_agent_info``, which tells of an agent of the engine.
    """
    names = ["spawn_agents", *(["spawn_agent_inline"] if inline else []), *(["lookup_agent_info"] if lookup else [])]
    return [machine_tool(name) for name in names]


def task_tool(agents: Sequence[AgentDefinition[Any]]) -> ToolLike:
    """
    Return ``task``, a simpler tool than ``spawn_agents``: one agent, one prompt, and the agent's final text as result.

    Args:
        agents: The agents to offer; those without a description are left out.

    Raises:
        DefinitionError: when none is left, or an id comes twice.
    """
    offered = [agent for agent in agents if agent.description]
    known = {agent.id: agent for agent in offered}
    if not offered or len(known) != len(offered):
        what = "two agents have the same id" if offered else "no agent has a description, so there is nothing to offer"
        msg = f"task_tool: {what}; given are {[agent.id for agent in agents]}"
        raise DefinitionError(msg)
    lines = "\n".join([f"- {agent.id}: {agent.description}" for agent in offered])
    usage = "\n".join(
        [f'Use {{"agent": "{agent.id}", "prompt": "..."}} for {agent.display_name}.' for agent in offered]
    )
    description = f"Hand a task to one of these agents and get its final text:\n{lines}\n\nUsage:\n{usage}"
    schema = object_schema(
        ("agent", "prompt"),
        agent=described({**STRING, "enum": list(known)}, "The agent's id."),
        prompt=described(STRING, "What the agent should do; it knows nothing else."),
    )

    def entries(value: JsonDict) -> list[Entry]:
        return [Entry(value["agent"], value["prompt"], None, known[value["agent"]])]

    return _tool("task", description, schema, entries, _final_text, *offered)


def agent_tool(
    definition: AgentDefinition[Any], *, name: str | None = None, description: str | None = None
) -> ToolLike:
    """
    Return an agent as a tool of its own, whose result is the agent's output (requirements J17).

    Whoever has the tool may run the agent; it need not be among its ``spawnable_agents``.

    Args:
        definition: The agent; its ``input_schema`` becomes the parameters ``prompt`` and ``params``.
        name: The tool's name; by default the agent's id with ``_`` for ``-``.
        description: For the model; by default the agent's.

    Raises:
        DefinitionError: for a name that no provider takes, or params that have no JSON Schema.
    """
    name = tool_name(definition) if name is None else name
    check_name(name)
    text = _description(definition) if description is None else description

    def entries(value: JsonDict) -> list[Entry]:
        return [Entry(definition.id, value.get("prompt", ""), value.get("params"), definition)]

    return _tool(name, text, _input_schema(definition), entries, _output, definition)


def direct_tool(definition: AgentDefinition[Any]) -> ToolLike:
    """
    Return an agent as the tool under which an agent that may spawn it is offered it (generator-contract L28).

    Its call is one of ``spawn_agents`` with one entry, result included.

    Raises:
        DefinitionError: when the params have no JSON Schema.
    """

    def entries(value: JsonDict) -> list[Entry]:
        return [Entry(definition.id, value.get("prompt", ""), value.get("params"))]

    schema = _input_schema(definition)
    return _tool(tool_name(definition), _description(definition), schema, entries, listed)


def carried_by(tools: Iterable[Any]) -> list[AgentDefinition[Any]]:
    """Return the agents that tools such as ``task`` carry; whoever has the tool may run them."""
    return [agent for tool in tools for agent in getattr(tool, "agents", ())]


def tool_name(definition: AgentDefinition[Any]) -> str:
    """Return the name of the tool that an agent is offered as."""
    return definition.id.replace("-", "_")


def params_schema(definition: AgentDefinition[Any]) -> JsonDict | None:
    """
    Return the JSON Schema of an agent's params, or ``None`` when it takes any.

    Raises:
        DefinitionError: when there is none that could be shown (generator-contract L30).
    """
    given: Any = definition.input_schema.params if definition.input_schema is not None else None
    if given is None:
        return None
    try:
        schema = thaw(given) if isinstance(given, Mapping) else without_titles(given.model_json_schema())
        frozen = freeze_object(schema)
    except Exception as error:
        msg = f"agent {definition.id!r}: its params have no JSON Schema, so it cannot be offered as a tool: {error}"
        raise DefinitionError(msg) from error
    if frozen.get("type", "object") != "object":
        msg = f"agent {definition.id!r}: params are an object, but their schema says {frozen['type']!r}"
        raise DefinitionError(msg)
    return frozen


def _description(definition: AgentDefinition[Any]) -> str:
    return definition.description or f"Run the agent {definition.display_name}."


def _input_schema(definition: AgentDefinition[Any]) -> JsonDict:
    """Return the schema of a tool that runs an agent; definitions inside the params' schema move to the top."""
    known = definition.input_schema
    prompt = (known.prompt if known is not None else None) or "What the agent should do."
    params = params_schema(definition)
    shown: dict[str, Any] = {"type": "object", "description": "The agent's parameters."}
    top: dict[str, Any] = {}
    if params is not None:
        shown = _rebased({"type": "object", **thaw(params)})
        if "$defs" in shown:
            top["$defs"] = shown.pop("$defs")
    required = ["params"] if shown.get("required") else []
    properties = {"prompt": described(STRING, prompt), "params": shown}
    whole = {"type": "object", "properties": properties, "required": required, "additionalProperties": False, **top}
    return JsonDict(freeze(whole))


def _rebased(schema: Any) -> Any:
    """Return a schema whose references hold when it stands under ``params``, its definitions at the top."""
    if isinstance(schema, list):
        return [_rebased(s) for s in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: _rebased(value) for key, value in schema.items()}
    ref = made.get("$ref")
    if isinstance(ref, str) and ref.startswith("#") and not ref.startswith(DEFS):
        made["$ref"] = f"#/properties/params{ref[1:]}"
    return made


def _tool(
    name: str,
    description: str,
    schema: JsonDict,
    entries: Callable[[JsonDict], Sequence[Entry]],
    shown: Callable[[Sequence[ChildResult[Any]]], ToolResult],
    *agents: AgentDefinition[Any],
) -> MachineTool:
    spec = ToolSpec(name, description, schema, kind="expanding", category="agent", requires_permission=False)
    flat = attrs.evolve(spec, input_schema=_flat(schema))
    mend = repairer(schema, {})

    def repair(value: JsonDict) -> JsonDict:
        return _without_strays(mend(value))

    binding = SpawnBinding(spec, validator(flat), repair, entries=entries, shown=shown)
    return MachineTool(spec, agents=agents, binding=binding)


def _flat(schema: JsonDict) -> JsonDict:
    """Return *schema* without what stands in the params: those are checked when the child is made (L4)."""
    properties = {n: {"type": "object"} if n == "params" else s for n, s in schema["properties"].items()}
    return JsonDict({**schema, "properties": JsonDict(properties)})


def _without_strays(value: JsonDict) -> JsonDict:
    """Drop a prompt that is no text and params that are no object (generator-contract L28)."""
    right: dict[str, Any] = {"prompt": str, "params": Mapping}
    kept = {n: v for n, v in value.items() if n not in right or isinstance(v, right[n])}
    return value if len(kept) == len(value) else JsonDict(kept)


def _failed(child: ChildResult[Any]) -> ToolResult:
    """Return why a child did not complete, and what it had when its budget was spent."""
    why, kept = f"Agent {child.agent_id} failed: {why_not(child)}", kept_output(child)
    if kept in (None, ""):
        return ToolResult.error(why)
    return ToolResult.error(f"{why}\nIts output until then: {kept if isinstance(kept, str) else compact(kept)}")


def _final_text(children: Sequence[ChildResult[Any]]) -> ToolResult:
    (child,) = children
    if child.is_error:
        return _failed(child)
    return ToolResult.text(child.text) if child.text or child.output is None else _output(children)


def _output(children: Sequence[ChildResult[Any]]) -> ToolResult:
    (child,) = children
    if child.is_error:
        return _failed(child)
    try:
        output = output_as_json(child.output)
    except DataError as error:
        return ToolResult.error(f"Agent {child.agent_id} failed: its output is not JSON: {error.message}")
    return ToolResult.text(output) if isinstance(output, str) else ToolResult.json(output)
