"""
Tools that run other agents: ``spawn_tools``, ``task_tool``, ``agent_tool``.

All of them make the same effect. The ``input_schema`` of an agent becomes the input schema of its tool.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from stepengine.data.checks import find_iteration_mistake
from stepengine.data.definition import AgentDefinition, split_agent_id
from stepengine.data.json import JsonDict, JsonValue, compact, freeze, freeze_object, thaw
from stepengine.data.messages import ToolResult
from stepengine.data.result_cuts import ShortenJson
from stepengine.data.schemas import nest_schema_under_property
from stepengine.data.state import ChildResult, RunStatus
from stepengine.data.tools import ChildRequest, Spawning, ToolBinding, ToolLike, ToolSpec, Validated, Yielding
from stepengine.data.typed_values import dump_model, is_model
from stepengine.errors import DataError, DefinitionError, LimitExceeded, ToolInputError
from stepengine.tools.arguments import remove_titles
from stepengine.tools.control import (
    ALIASES,
    ask_user_tool,
    get_control_tools_by_name,
    make_find_tools_tool,
    make_lookup_agent_info_tool,
    make_tool_with_validation,
)
from stepengine.tools.definition import Tool, check_tool_name
from stepengine.tools.repair import make_repairer
from stepengine.tools.schemas import STRING, JsonSchema, make_object_schema, make_validator, with_description

TAIL_DIVISOR = 5
"""A fifth of the kept text is from the end, which has conclusions; the beginning names the subject."""
NOTE_CHARS = 500
"""The note about the omitted part is shorter, even with the longest tool names."""

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
    "agent_type": with_description(STRING, "The agent's id."),
    "prompt": with_description(STRING, "What the agent should do."),
    "params": {"type": "object", "description": "The agent's parameters."},
}
_AGENT = {"type": "object", "properties": _ENTRY, "required": ["agent_type"], "additionalProperties": False}


def spawn_tools(*, inline: bool = False, lookup: bool = False) -> list[Tool]:
    """
    Return ``spawn_agents``, the tool by which a model runs spawnable agents, and optionally two related tools.

    An agent with ``spawn_agents`` also receives each of its spawnable agents as a separate tool: ``file-picker`` as
    ``file_picker(prompt, params)``. A handler may call ``spawn_agents`` and the two tools below even if its agent does not
    have them. To run one agent, a handler uses ``AgentCall``.

    Args:
        inline: Add ``spawn_agent_inline``, whose agent continues from the history and replaces it.
        lookup: Add ``lookup_agent_info``, which describes an agent of the engine.
    """
    names = ["spawn_agents", *(["spawn_agent_inline"] if inline else []), *(["lookup_agent_info"] if lookup else [])]
    return [BUILT_IN[name] for name in names]


def task_tool(agents: Sequence[AgentDefinition]) -> Tool:
    """
    Return ``task``, a simpler tool than ``spawn_agents``: one agent, one prompt, and the agent's final text as result.

    Args:
        agents: The agents to offer; those without a description are omitted.

    Raises:
        DefinitionError: If no agent has a description, or two have the same id.
    """
    if isinstance(agents, AgentDefinition) or find_iteration_mistake(agents):
        msg = f"task_tool takes a list of AgentDefinition objects, such as task_tool([helper]), not {agents!r}"
        raise DefinitionError(msg)
    offered = [agent for agent in agents if agent.description]
    known = {agent.id: agent for agent in offered}
    if not offered or len(known) != len(offered):
        what = "two agents have the same id" if offered else "no agent has a description; describe at least one"
        msg = f"task_tool: {what}; agents: {[agent.id for agent in agents]}"
        raise DefinitionError(msg)
    lines = "\n".join([f"- {agent.id}: {agent.description}" for agent in offered])
    usage = "\n".join(
        [f'Use {{"agent": "{agent.id}", "prompt": "..."}} for {agent.display_name}.' for agent in offered]
    )
    description = f"Hand a task to one of these agents and get its final text:\n{lines}\n\nUsage:\n{usage}"
    schema = make_object_schema(
        ("agent", "prompt"),
        agent=with_description({**STRING, "enum": list(known)}, "The agent's id."),
        prompt=with_description(STRING, "What the agent should do; it knows nothing else."),
    )

    def make_requests(value: JsonDict) -> list[ChildRequest]:
        """Return the request of the only child, of the agent that the input names."""
        return [ChildRequest(value["agent"], value["prompt"], None, known[value["agent"]])]

    return _make_spawn_tool("task", description, schema, make_requests, _result_from_child_text, *offered)


def agent_tool(definition: AgentDefinition, *, name: str | None = None, description: str | None = None) -> Tool:
    """
    Return a tool that runs one agent; its result is the agent's output.

    An agent with the tool may run this agent, even if its ``spawnable_agents`` do not list it.

    Args:
        definition: The agent; its ``input_schema`` becomes the parameters ``prompt`` and ``params``.
        name: The tool's name; by default the agent's id with ``_`` for ``-``.
        description: The text for the model; by default the agent's description.

    Raises:
        DefinitionError: If providers reject the name, or the params have no JSON Schema.
    """
    name = agent_tool_name(definition) if name is None else name
    check_tool_name(name)
    text = _get_agent_tool_description(definition) if description is None else description

    def make_requests(value: JsonDict) -> list[ChildRequest]:
        return [ChildRequest(definition.id, value.get("prompt", ""), value.get("params"), definition)]

    return _make_spawn_tool(
        name, text, _make_agent_input_schema(definition), make_requests, _result_from_child_output, definition
    )


def make_spawnable_agent_tool(definition: AgentDefinition, agent_id: str = "") -> Tool:
    """
    Return the tool by which a parent runs one of its spawnable agents. The tool's name is derived from the agent's id.

    A call has the same effect and result as ``spawn_agents`` with one entry.

    Args:
        definition: The agent.
        agent_id: The id that the parent uses, if it differs from the agent's own; ``publisher/name`` makes the tool
            ``publisher_name``.

    Raises:
        DefinitionError: If the params have no JSON Schema.
    """

    def make_requests(value: JsonDict) -> list[ChildRequest]:
        return [ChildRequest(agent_id or definition.id, value.get("prompt", ""), value.get("params"))]

    publisher, name, _ = split_agent_id(agent_id)
    called = agent_tool_name(definition) if publisher is None else f"{publisher}_{name}".replace("-", "_")
    return _make_spawn_tool(
        called,
        _get_agent_tool_description(definition),
        _make_agent_input_schema(definition),
        make_requests,
        result_from_children,
        shorten_json=shorten_child_outputs,
    )


def list_agents_run_by_tools(tools: Iterable[object]) -> list[AgentDefinition]:
    """Return the agents that *tools*, and the tools that these use, may run, such as those of a ``task`` tool."""
    found: list[AgentDefinition] = []
    for tool in iterate_reachable_tools([tool for tool in tools if isinstance(tool, ToolLike)]):
        way = tool.binding().runs
        if isinstance(way, Spawning):
            found += way.agents
        elif isinstance(way, Yielding):
            found += [used for used in way.uses if isinstance(used, AgentDefinition)]
    return found


def iterate_reachable_tools(tools: Iterable[ToolLike]) -> Iterator[ToolLike]:
    """Yield *tools* and, recursively, the tools that generator tools among them may call, each once."""
    waiting, met = list(tools), set[int]()
    for tool in waiting:
        if id(tool) in met:
            continue
        met.add(id(tool))
        yield tool
        runs = tool.binding().runs
        if isinstance(runs, Yielding):
            waiting += [used for used in runs.uses if isinstance(used, ToolLike)]


def agent_tool_name(definition: AgentDefinition) -> str:
    """Return the default name of the tool that runs an agent: the agent's id with ``_`` for ``-``."""
    return definition.id.replace("-", "_")


def get_params_schema(definition: AgentDefinition) -> JsonDict | None:
    """
    Return the JSON Schema of an agent's params; ``None`` if the agent accepts any params.

    Raises:
        DefinitionError: If the type of the params has no JSON Schema, or none for objects.
    """
    given: Any = definition.input_schema.params if definition.input_schema is not None else None
    if given is None:
        return None
    try:
        schema = thaw(given) if isinstance(given, Mapping) else remove_titles(given.model_json_schema())
        frozen = freeze_object(schema)
    except Exception as error:
        msg = f"agent {definition.id!r}: its params have no JSON Schema, so it cannot be offered as a tool: {error}"
        raise DefinitionError(msg) from error
    if frozen.get("type", "object") != "object":
        msg = f"agent {definition.id!r}: the schema of its params must have the type 'object', not {frozen['type']!r}"
        raise DefinitionError(msg)
    return frozen


def _get_agent_tool_description(definition: AgentDefinition) -> str:
    """Return the description of an agent, or a sentence with its name."""
    return definition.description or f"Run the agent {definition.display_name}."


def _make_agent_input_schema(definition: AgentDefinition) -> JsonDict:
    """Return the input schema of a tool that runs an agent; it moves the definitions in the params' schema to the top level."""
    known = definition.input_schema
    prompt = (known.prompt if known is not None else None) or "What the agent should do."
    params = get_params_schema(definition)
    free = {"type": "object", "description": "The agent's parameters."}
    shown, top = nest_schema_under_property(free if params is None else {"type": "object", **thaw(params)}, "params")
    required = ["params"] if shown.get("required") else []
    properties = {"prompt": with_description(STRING, prompt), "params": shown}
    whole = {"type": "object", "properties": properties, "required": required, "additionalProperties": False, **top}
    return JsonDict(freeze(whole))


def _make_agent_tool_spec(name: str, description: str, schema: JsonDict) -> ToolSpec:
    """Return the specification of a tool that runs agents; it needs no permission of its own."""
    return ToolSpec(name, description, schema, category="agent", requires_permission=False)


def _make_spawn_tool(
    name: str,
    description: str,
    schema: JsonDict,
    make_requests: Callable[[JsonDict], Sequence[ChildRequest]],
    make_result: Callable[[Sequence[ChildResult]], ToolResult],
    *agents: AgentDefinition,
    shorten_json: ShortenJson | None = None,
) -> Tool:
    """Return a tool that runs the child agents that *make_requests* returns; *make_result* makes its result from theirs."""
    mend = make_repairer(schema, {})

    def repair_and_drop(value: JsonDict) -> JsonDict:
        """Return the repaired input without an invalid prompt and params."""
        return _drop_invalid_prompt_and_params(mend(value))

    spec, runs = _make_agent_tool_spec(name, description, schema), Spawning(make_requests, make_result, agents=agents)
    validate = make_validator(name, _allow_any_params(schema))
    return Tool.for_binding(ToolBinding(spec, validate, repair_and_drop, runs=runs, shorten_json=shorten_json))


def _allow_any_params(schema: JsonDict) -> JsonDict:
    """Return *schema* with any object allowed as params; the params are validated when the child starts."""
    properties = {n: {"type": "object"} if n == "params" else s for n, s in schema["properties"].items()}
    return JsonDict({**schema, "properties": JsonDict(properties)})


def _drop_invalid_prompt_and_params(value: JsonDict) -> JsonDict:
    """Return the input without its prompt if that is not text, and without its params if they are not an object."""
    right: dict[str, Any] = {"prompt": str, "params": Mapping}
    kept = {n: v for n, v in value.items() if n not in right or isinstance(v, right[n])}
    return value if len(kept) == len(value) else JsonDict(kept)


def _result_from_failed_child(child: ChildResult) -> ToolResult:
    """Return an error result with the reason why a child did not complete, and its partial output if there is one."""
    why, kept = f"Agent {child.agent_id} failed: {explain_child_failure(child)}", find_partial_output(child)
    if kept in (None, ""):
        return ToolResult.error(why)
    return ToolResult.error(f"{why}\nIts output until then: {kept if isinstance(kept, str) else compact(kept)}")


def _result_from_child_text(children: Sequence[ChildResult]) -> ToolResult:
    """Return the final text of the only child, or its output if it has no text; an error result if it failed."""
    (child,) = children
    if child.is_error:
        return _result_from_failed_child(child)
    return ToolResult.text(child.text) if child.text or child.output is None else _result_from_child_output(children)


def _result_from_child_output(children: Sequence[ChildResult]) -> ToolResult:
    """Return the output of the only child; an error result if it failed or its output is not JSON."""
    (child,) = children
    if child.is_error:
        return _result_from_failed_child(child)
    try:
        output = output_to_json(child.output)
    except DataError as error:
        return ToolResult.error(f"Agent {child.agent_id} failed: its output is not JSON: {error.message}")
    return ToolResult.text(output) if isinstance(output, str) else ToolResult.json(output)


# --- the results of children -----------------------------------------------------------------------------------------


def result_from_children(children: Sequence[ChildResult]) -> ToolResult:
    """Return a result with an entry for each child; it is an error result if there are children and all of them failed."""
    entries: list[Any] = [child_to_json(child) for child in children]
    all_failed = bool(entries) and all("error" in entry for entry in entries)
    return ToolResult.json(entries, status="error" if all_failed else "ok")


def child_to_json(child: ChildResult) -> dict[str, Any]:
    """Return the entry for a child in the result of the tool that ran it."""
    # A child that was not started has no run.
    run = {"run_id": child.run_id} if child.run_id else {}
    entry = {"agent_type": child.agent_id, **run, "status": child.status.value}
    if child.is_error:
        kept = find_partial_output(child)
        return {**entry, "error": explain_child_failure(child), **({} if kept in (None, "") else {"output": kept})}
    try:
        output = output_to_json(child.output)
    except DataError as error:
        return {**entry, "error": f"the output is not JSON: {error.message}"}
    return {**entry, "output": output}


def explain_child_failure(child: ChildResult) -> str:
    """Return a text that explains why a child did not complete."""
    return child.why or f"it ended as {child.status.value}"


def find_partial_output(child: ChildResult) -> JsonValue:
    """
    Return the output of a failed child; without an output, its text if a limit or a cut reply ended it; else ``None``.

    The output has been paid for, so the parent receives it. For an output that is not JSON, the result is ``None``.
    """
    was_cut = child.status in (RunStatus.MAX_STEPS, RunStatus.TRUNCATED) or isinstance(child.error, LimitExceeded)
    try:
        return output_to_json(child.text if child.output is None and was_cut else child.output)
    except DataError:
        return None


def output_to_json(output: object) -> JsonValue:
    """
    Return a child's output as JSON.

    Raises:
        DataError: If it is not JSON; the message has the path in the output.
    """
    frozen: JsonValue = freeze(dump_model(output) if is_model(output) else output, "output")
    return frozen


def shorten_child_outputs(value: JsonValue, limit: int, note_suffix: str) -> JsonValue:
    """Return the entries of children with each long output cut to *limit* characters; a note ending in *note_suffix* reports the cut."""
    if isinstance(value, list):
        return [shorten_child_outputs(entry, limit, note_suffix) for entry in value]
    if not isinstance(value, Mapping):
        return value
    found = {"done": shorten_child_outputs(value["done"], limit, note_suffix)} if "done" in value else {}
    return {
        **value,
        **found,
        **({"output": _cut_long_output(value["output"], limit, note_suffix)} if "output" in value else {}),
    }


def _cut_long_output(output: JsonValue, limit: int, note_suffix: str) -> JsonValue:
    """Return an output; if its text is much longer than *limit* characters, the text with a note in place of its middle."""
    text = output if isinstance(output, str) else compact(output)
    # With room for the note, so that a cut text is not cut again.
    if len(text) <= limit + NOTE_CHARS:
        return output
    tail = limit // TAIL_DIVISOR
    note = f"[... {len(text) - limit} characters of this output are not shown{note_suffix} ...]"
    return f"{text[: limit - tail]}\n{note}\n{text[len(text) - tail :]}"


# --- the tools of every run --------------------------------------------------------------------------------------


def _parse_child_request(value: JsonDict) -> ChildRequest:
    """Return the request of a validated tool input."""
    return ChildRequest(value["agent_type"], value.get("prompt", ""), value.get("params"))


@functools.cache
def _get_spawn_entry_schema() -> JsonSchema:
    """Return the JSON Schema of an entry in ``agents``, which checks entries one by one."""
    return JsonSchema("an entry of tool 'spawn_agents'", _AGENT)


def _parse_child_requests(value: JsonDict) -> list[ChildRequest]:
    """Parse the entries of ``agents``; the request of an invalid entry has ``refused`` set."""
    entries: list[ChildRequest] = []
    for index, given in enumerate(value["agents"]):
        issues = tuple(_get_spawn_entry_schema().issues(given, f"agents.{index}"))
        if issues:
            wanted = given.get("agent_type") if isinstance(given, Mapping) else None
            error = ToolInputError(f"not started: {'; '.join(issues)}", tool_name="spawn_agents", issues=issues)
            entries.append(ChildRequest(wanted if isinstance(wanted, str) else "", refused=error))
        else:
            entries.append(_parse_child_request(given))
    return entries


def _result_from_inline_child(children: Sequence[ChildResult]) -> ToolResult:
    """Return a message that the only child ran in this conversation; an error result if it failed."""
    (child,) = children
    if child.is_error:
        return ToolResult.error(
            f"Agent {child.agent_id} did not complete, the history stays as it was: {explain_child_failure(child)}"
        )
    return ToolResult.json({"message": f"Agent {child.agent_id} ran in this conversation."})


def _make_spawn_input_schema(item: Mapping[str, object]) -> JsonDict:
    agents = {"type": "array", "items": item, "description": "The agents to run."}
    return make_object_schema(("agents",), agents=agents)


def _make_spawn_agents_tool() -> Tool:
    """Return the tool ``spawn_agents``, which runs several agents."""
    spec = _make_agent_tool_spec("spawn_agents", SPAWN_AGENTS, _make_spawn_input_schema(_AGENT))
    check = make_validator(spec.name, _make_spawn_input_schema({}))

    def validate(value: JsonDict) -> Validated:
        """Validate the input except its entries, which are validated later; a single object counts as a list of one."""
        # generator-contract:T2
        agents = value.get("agents")
        if isinstance(agents, Mapping):
            value = JsonDict(freeze({**value, "agents": [agents]}))
        return check(value)

    mend = make_repairer(spec.input_schema, ALIASES)
    runs = Spawning(_parse_child_requests, result_from_children)
    return Tool.for_binding(ToolBinding(spec, validate, mend, runs=runs, shorten_json=shorten_child_outputs))


def _make_spawn_inline_tool() -> Tool:
    """Return the tool ``spawn_agent_inline``, which runs an agent in the same conversation."""
    spec = _make_agent_tool_spec(
        "spawn_agent_inline", SPAWN_AGENT_INLINE, make_object_schema(("agent_type",), **_ENTRY)
    )
    return make_tool_with_validation(
        spec, Spawning(lambda value: [_parse_child_request(value)], _result_from_inline_child, is_inline=True)
    )


BUILT_IN: Mapping[str, Tool] = {
    tool.name: tool
    for tool in (
        *get_control_tools_by_name().values(),
        make_lookup_agent_info_tool(),
        make_find_tools_tool(),
        ask_user_tool(),
        _make_spawn_agents_tool(),
        _make_spawn_inline_tool(),
    )
}
"""The tools that every run has by name, even if its agent does not list them: handlers may always use them."""
