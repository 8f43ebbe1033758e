"""
``AgentDefinition``: the frozen description of an agent; and ``HookContext``, ``ToolSource`` and ``PromptLike``, which refer to it.

A hook gets the definition of the agent that runs, and a definition may hold sources of tools, which are hooks. So these types are in one
module.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping, Sequence
from datetime import datetime
from inspect import isgenerator, isgeneratorfunction
from types import FunctionType
from typing import Any, Generic, Literal, Never, Protocol, TypeAlias, get_origin, runtime_checkable

import attrs
from attrs import frozen
from typing_extensions import TypeVar

from stepengine.data.alike import NEAR_RATIO, find_nearest, list_names
from stepengine.data.checks import FLAG, FieldCheck, allow_none, make_instance_check, make_validator, with_keyword_hints
from stepengine.data.estimate import Measured
from stepengine.data.functions import (
    accepts_one_argument,
    format_location,
    is_async,
    unwrap_function,
)
from stepengine.data.hooks import Change, Hooks, RunLogger, StepContext
from stepengine.data.json import JsonDict, JsonValue, freeze_object, require_storable_text
from stepengine.data.limits import Limits
from stepengine.data.messages import Message
from stepengine.data.models import DEFAULT_SETTINGS, ModelSettings
from stepengine.data.provenance import Provenance
from stepengine.data.state import AgentState, estimate_next_prompt_tokens
from stepengine.data.tools import ToolLike
from stepengine.data.transcript import Transcript
from stepengine.errors import ContextOverflow, DataError, DefinitionError

OutputMode: TypeAlias = Literal["last_message", "all_messages", "structured_output"]
Schema: TypeAlias = "type[Any] | Mapping[str, Any]"
"""A pydantic model class or a JSON Schema."""
HandleSteps: TypeAlias = Callable[[StepContext], Generator[Any, Any, Any]]
Out = TypeVar("Out", default=Any)

ID = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
MODULES = re.compile(r"(?:[\w<>]+\.)+")
PARTS = re.compile(r"(?:(?P<publisher>[^/@]+)/)?(?P<name>[^/@]+)(?:@(?P<version>[^/@]+))?")


class PromptLike(Protocol):
    """A prompt that is built when a run starts, such as ``stepengine.context.SystemPrompt``."""

    def render(self, ctx: HookContext, /) -> str:
        """Return the prompt's text."""


@frozen(kw_only=True)
class HookContext:
    """
    The first argument of every hook.

    Attributes:
        state: The state at this moment; during a step it is the state before the step.
        agent: The definition of the agent that runs.
        session_id: The conversation's id, if there is one.
        user_id: The user's id, if the caller gave one.
        metadata: The caller's metadata.
        params: The run's params as JSON; ``None`` if it has none.
        values: What hooks of this run shared through ``Change(values=...)``; read-only.
        step_index: The step that runs or comes next, from 0.
        path: The run's path in the tree; ``""`` for the root.
        now: The run's recorded time.
        logger: Log lines that carry run, agent and step.
        added: ``post_run`` only: the messages that this run added.
        context_window: The model's context length in tokens, when known; looked up for agents with ``pre_step`` hooks.
        overflow: ``pre_step`` only: what the provider said when it refused this step's request as too long. The hooks are
            then called once more, and the call is repeated when one of them changed what the model sees.
        refused_tokens: With *overflow*: how large the refused prompt is by estimate, whatever earlier hooks made of it since.
        source: ``pre_tool`` and ``post_tool`` only: who asks for the call: ``"model"``, ``"handler"``, or ``"tool"`` for the
            body of a tool that yields.
        provenance: ``pre_tool`` only: what the run has received, where the policy has rules about untrusted data; else ``None``.
        has_earlier_messages: Whether the run started with messages, such as those of ``previous=`` or of its session.
    """

    state: AgentState
    agent: AgentDefinition
    session_id: str | None = None
    user_id: str | None = None
    metadata: JsonDict = attrs.field(default=JsonDict(), converter=freeze_object)
    params: JsonValue = None
    values: Mapping[str, Any] = attrs.field(factory=dict)
    step_index: int = 0
    path: str = ""
    now: datetime
    logger: RunLogger
    added: tuple[Message, ...] = ()
    context_window: int | None = None
    overflow: ContextOverflow | None = None
    refused_tokens: int | None = None
    source: str = ""
    provenance: Provenance | None = attrs.field(default=None, repr=False, eq=False)
    has_earlier_messages: bool = attrs.field(default=False, repr=False)
    _measured: Measured | None = attrs.field(default=None, repr=False)
    _prompt_limit: int | None = attrs.field(default=None, repr=False)

    @property
    def context_tokens(self) -> int:
        """
        The size of the next prompt in tokens.

        It is the last number that the provider reported, plus an estimate of the newer messages. Without a report, or after the
        prompt was rewritten, the whole size is estimated.
        """
        return estimate_next_prompt_tokens(self.state, self._measured)

    @property
    def remaining_tokens(self) -> int | None:
        """The remaining context tokens, counted as in ``ToolContext.remaining_tokens``; ``None`` if unknown."""
        limit = self.context_window if self._prompt_limit is None else self._prompt_limit
        return None if limit is None else max(0, limit - self.context_tokens)

    @property
    def system_prompt(self) -> str:
        """The resolved system prompt."""
        return self.state.system_prompt

    @property
    def messages(self) -> Transcript:
        """The full record of messages."""
        return self.state.message_history


@runtime_checkable
class ToolSource(Protocol):
    """
    Tools that become known at the start of a run, such as those of a server; accepted by agent definitions and engines.

    ``stepengine.adapters.mcp.mcp_tools`` makes one. The engine closes the connections that it opened. A source for several
    engines at once has a method ``for_engine()``. Each engine calls it and uses the returned source.
    """

    @property
    def name(self) -> str:
        """Its name, by which an agent lists it if the engine has it."""

    def pre_run(self, ctx: HookContext, /) -> Generator[Any, Any, Change]:
        """Return ``Change(tools=...)``; it is a ``pre_run`` hook, so its ``Perform`` look-ups are recorded."""

    async def aclose(self, blocked: Any = None) -> None:
        """Close all its connections in every event loop but *blocked*, which cannot run and is only notified."""


def _freeze_schema(value: Schema | None) -> Schema | None:
    return freeze_object(value) if isinstance(value, Mapping) else value


def _is_schema(value: object) -> bool:
    return isinstance(value, Mapping) or (isinstance(value, type) and hasattr(value, "model_validate"))


SCHEMA = FieldCheck(_is_schema, "a pydantic model class or a JSON Schema (a dict)")


def _unwrap_prompt_schema(value: Any) -> object:
    """Return the description in *value* if it is the JSON Schema of a string; else *value*."""
    is_schema = isinstance(value, Mapping) and value.get("type") == "string" and value.keys() <= {"type", "description"}
    return value.get("description") if is_schema else value


PROMPT = FieldCheck(
    lambda value: value is None or _is_storable_text(value),
    "text, {'type': 'string', 'description': 'What to do'} or None",
)


@with_keyword_hints
@frozen(kw_only=True)
class InputSchema:
    """
    The input that an agent accepts.

    Attributes:
        prompt: A description of the prompt for spawning agents; ``None`` says nothing about it.
        params: A pydantic model or JSON Schema of ``params``; ``None`` accepts any object.
    """

    prompt: str | None = attrs.field(default=None, converter=_unwrap_prompt_schema, validator=make_validator(PROMPT))
    params: Schema | None = attrs.field(
        default=None, converter=_freeze_schema, validator=make_validator(allow_none(SCHEMA))
    )


def split_agent_id(agent_id: str) -> tuple[str | None, str | None, str | None]:
    """Return publisher, name and version of ``[publisher/]name[@version]``; three ``None`` for any other text."""
    found = PARTS.fullmatch(normalised_id(agent_id.strip()))
    return (found["publisher"], found["name"], found["version"]) if found else (None, None, None)


def find_published_name(agent_id: str) -> str | None:
    """Return the name in ``publisher/name[@version]``, or ``None`` for an id without a publisher."""
    publisher, name, _ = split_agent_id(agent_id)
    return name if publisher else None


def normalised_id(agent_id: str) -> str:
    """Return *agent_id* in the form for comparisons: ``_`` counts as ``-``."""
    return agent_id.replace("_", "-")


def require_generator_handler(agent_id: str, handler: object) -> None:
    """
    Raise unless *handler* is a generator function of one argument.

    Raises:
        DefinitionError: naming the function's file and line.
    """
    fn = unwrap_function(handler)
    what = f"handle_steps of {agent_id!r} ({format_location(fn)})"
    if is_async(fn):
        msg = (
            f"{what} is async; handlers are plain generator functions. "
            "Write `def handle_steps(ctx):` and do I/O with `yield from Perform(fn, ...)`"
        )
        raise DefinitionError(msg)
    if isgenerator(fn):
        msg = f"{what} is a generator object; pass the function itself, stepengine calls it once per run"
        raise DefinitionError(msg)
    if not isgeneratorfunction(fn):
        if isinstance(handler, ToolLike):
            msg = f"handle_steps of {agent_id!r} is the tool {handler.spec.name!r}; list the tool in tools=[...] and call it from a handler"
            raise DefinitionError(msg)
        msg = f"{what} is not a generator function; it must contain a `yield`, such as `yield STEP_ALL`"
        raise DefinitionError(msg)
    if not accepts_one_argument(handler):
        msg = f"{what} cannot be called with one argument; a handler is `def handle_steps(ctx):`"
        raise DefinitionError(msg)


ELSEWHERE = {
    "name": "the id, as the first argument",
    "instructions": "system_prompt",
    "instruction": "system_prompt",
    "prompt": "system_prompt",
    "output_type": "output_schema",
    "model_settings": "settings",
    "llm": "model",
    "handoffs": "spawnable_agents",
    "sub_agents": "spawnable_agents",
    "max_steps": "limits=Limits(max_steps=...)",
    "max_turns": "limits=Limits(max_steps=...)",
    "retries": "output_retries",
    "deps_type": "Depends(...) in a tool",
    "tool_names": "tools",
    "spawns": "spawnable_agents",
    "spawner_prompt": "description",
    "reasoning_options": "settings=ModelSettings(thinking=...)",
    "provider_options": "settings=ModelSettings(extra=...)",
    "mcp_servers": "tools=[mcp_tools(...)]",
    "handler": "handle_steps",
}
"""Names of fields in other libraries; ``oneWord`` is looked up as ``one_word``."""
CAPITAL = re.compile(r"(?<=[a-z])(?=[A-Z])")


@frozen(init=False)
class AgentDefinition(Generic[Out]):
    """
    The frozen description of an agent.

    Attributes:
        id: Lower-case letters, digits and hyphens, unique in an engine.
        model: ``provider/model``; ``None`` uses the spawner's or the engine's default.
        display_name: The id by default.
        description: What other agents are shown.
        tools: Tool names, ``Tool`` objects, and sources such as ``mcp_tools(...)``, of which it has all tools.
        spawnable_agents: Ids or definitions of agents that it may spawn.
        system_prompt: Sent as it is; the engine adds nothing. In this and the other prompts, codebuff's placeholders such as
            ``{CODEBUFF_PROJECT_ROOT}`` are filled.
        instructions_prompt: Inserted once per run after the user's input.
        step_prompt: Sent at the end of every request, never stored.
        include_message_history: Whether a spawned child starts with its parent's conversation.
        inherit_parent_system_prompt: Whether a spawned child uses its parent's system prompt and tool definitions.
        input_schema: ``InputSchema``, the same as a dict with the members ``"prompt"`` and ``"params"``, or the schema of
            ``params`` alone.
        output_mode: ``"last_message"``, ``"all_messages"`` or ``"structured_output"``; ``None`` means the last one when
            there is an ``output_schema``, else the first.
        output_schema: A pydantic model or JSON Schema of the output.
        output_retries: How often the model is asked again for a structured output that is missing or does not fit, inside
            the step budget; 0 for never.
        handle_steps: The handler; ``None`` behaves as one that yields ``STEP_ALL``.
        settings: Generation settings.
        hooks: Hooks of this agent, called after the engine's.
        limits: Limits of this agent.

    Raises:
        DefinitionError: when a field cannot be used.
    """

    id: str
    model: str | None
    display_name: str
    description: str
    tools: tuple[str | ToolLike | ToolSource, ...]
    spawnable_agents: tuple[str | AgentDefinition, ...]
    system_prompt: str | PromptLike
    instructions_prompt: str
    step_prompt: str
    include_message_history: bool
    inherit_parent_system_prompt: bool
    input_schema: InputSchema | None
    output_mode: OutputMode
    output_schema: Schema | None
    handle_steps: HandleSteps | None
    settings: ModelSettings
    hooks: Hooks
    limits: Limits
    output_retries: int

    def __init__(
        self,
        id: str,
        *,
        model: str | None = None,
        display_name: str | None = None,
        description: str = "",
        tools: Sequence[str | ToolLike | ToolSource] = (),
        spawnable_agents: Sequence[str | AgentDefinition] = (),
        system_prompt: str | PromptLike | None = "",
        instructions_prompt: str | None = "",
        step_prompt: str | None = "",
        include_message_history: bool = False,
        inherit_parent_system_prompt: bool = False,
        input_schema: InputSchema | Schema | None = None,
        output_mode: OutputMode | None = None,
        output_schema: type[Out] | Mapping[str, object] | None = None,
        handle_steps: Callable[[StepContext], Generator[object, Any, Out]] | None = None,
        settings: ModelSettings | None = None,
        hooks: Hooks | None = None,
        limits: Limits | None = None,
        output_retries: int = 2,
        **unknown: Never,
    ) -> None:
        if unknown:
            known = [field.name for field in attrs.fields(AgentDefinition)]
            meant = [_suggest_field(name, known) for name in unknown]
            hint = f"; you may mean {', '.join(filter(None, meant))}" if any(meant) else ""
            msg = f"agent {id!r} has no argument {', '.join(map(repr, unknown))}{hint}; valid arguments: {list_names(known)}"
            raise DefinitionError(msg)
        self.__attrs_init__(
            id=id,
            model=model,
            display_name=display_name or id,
            description=description,
            tools=_validate_list_field(id, "tools", tools),
            spawnable_agents=_validate_list_field(id, "spawnable_agents", spawnable_agents),
            system_prompt=system_prompt or "",
            instructions_prompt=instructions_prompt or "",
            step_prompt=step_prompt or "",
            include_message_history=include_message_history,
            inherit_parent_system_prompt=inherit_parent_system_prompt,
            input_schema=_make_input_schema(input_schema),
            output_mode=output_mode or ("structured_output" if output_schema is not None else "last_message"),
            output_schema=_freeze_schema(output_schema),
            handle_steps=handle_steps,
            settings=DEFAULT_SETTINGS if settings is None else settings,
            hooks=Hooks() if hooks is None else hooks,
            limits=Limits() if limits is None else limits,
            output_retries=output_retries,
        )
        _validate_agent(self)

    @property
    def tool_names(self) -> tuple[str, ...]:
        """The names of its tools and tool sources, in order."""
        return tuple(
            [t if isinstance(t, str) else t.spec.name if isinstance(t, ToolLike) else t.name for t in self.tools]
        )

    @property
    def spawnable_ids(self) -> tuple[str, ...]:
        """The ids of the agents that it may spawn, in order."""
        return tuple([a if isinstance(a, str) else a.id for a in self.spawnable_agents])


def _make_input_schema(value: Any) -> InputSchema | None:
    """Return *value* as an ``InputSchema``: one of params, or of ``prompt`` and ``params`` if these are its members."""
    if value is None or isinstance(value, InputSchema):
        return value
    # No JSON Schema has members of these names.
    is_both = isinstance(value, Mapping) and value and value.keys() <= {"prompt", "params"}
    return InputSchema(**value) if is_both else InputSchema(params=value)


def _suggest_field(name: str, known: Sequence[str]) -> str:
    """Return a hint at the probable name of an unknown field, or ``""``."""
    ours = CAPITAL.sub("_", name).lower()
    return ELSEWHERE.get(ours) or next(iter(find_nearest(ours, known, min_similarity=NEAR_RATIO)), "")


def _validate_list_field(agent_id: object, field: str, value: object) -> tuple[Any, ...]:
    """Return a list or tuple as a tuple; raise ``DefinitionError`` for any other value of *field*."""
    if isinstance(value, (list, tuple)):
        return tuple(value)
    msg = f"agent {agent_id!r}: {field} must be a list, not {value!r}"
    raise DefinitionError(msg)


def _validate_agent(agent: AgentDefinition) -> None:
    """Raise ``DefinitionError`` with the first problem of an agent."""
    problem = (
        _find_field_problem(agent)
        or _find_listed_items_problem(agent)
        or _find_output_problem(agent)
        or _find_spawning_problem(agent)
    )
    if problem:
        msg = f"agent {agent.id!r}: {problem}"
        raise DefinitionError(msg)
    if agent.handle_steps is not None:
        require_generator_handler(agent.id, agent.handle_steps)


def _find_field_problem(agent: AgentDefinition) -> str | None:
    """Return the problem with the id, the model or a text of an agent, or ``None``."""
    if not _is_agent_id(agent.id):
        return "an id must be lower-case letters, digits and single hyphens, such as 'code-reviewer'"
    if agent.model is not None and not (_is_storable_text(agent.model) and agent.model.strip()):
        return f"model must be a string such as 'anthropic/claude-sonnet-4-5' or None, not {agent.model!r}"
    for field in ("display_name", "description", "instructions_prompt", "step_prompt"):
        if not _is_storable_text(getattr(agent, field)):
            return f"{field} must be text without lone surrogates, not {getattr(agent, field)!r}"
    if not _is_storable_text(agent.system_prompt) and not hasattr(agent.system_prompt, "render"):
        return f"system_prompt must be text or an object with a method render(ctx), not {agent.system_prompt!r}"
    if get_origin(agent.output_schema) is not None:
        wanted = MODULES.sub("", repr(agent.output_schema))
        return f"output_schema must be a pydantic model class or a JSON Schema; for {wanted} write RootModel[{wanted}]"
    return next(filter(None, [what.find_problem(field, getattr(agent, field)) for field, what in FIELDS.items()]), None)


FIELDS = {
    "include_message_history": FLAG,
    "inherit_parent_system_prompt": FLAG,
    "settings": make_instance_check(ModelSettings, "ModelSettings(temperature=0)"),
    "hooks": make_instance_check(Hooks, "Hooks(pre_step=[check])"),
    "limits": make_instance_check(Limits, "Limits(max_steps=20)"),
    "output_schema": allow_none(SCHEMA),
}


def _is_agent_id(value: object) -> bool:
    return isinstance(value, str) and ID.fullmatch(value) is not None


def _is_storable_text(value: Any) -> bool:
    try:
        require_storable_text(value)
    except DataError:
        return False
    return True


def _find_listed_items_problem(agent: AgentDefinition) -> str | None:
    """Return the problem with a listed tool or spawnable agent, or ``None``."""
    for tool in agent.tools:
        if not isinstance(tool, (str, ToolLike, ToolSource)):
            hint = f"; put @tool above def {tool.__name__}" if isinstance(tool, FunctionType) else ""
            return f"tools must contain tool names and Tool objects, not {tool!r}{hint}"
    if len(set(agent.tool_names)) != len(agent.tool_names):
        return f"a tool is listed twice in {list(agent.tool_names)}"
    for child in agent.spawnable_agents:
        if not isinstance(child, (str, AgentDefinition)):
            return f"spawnable_agents must contain ids and definitions, not {child!r}"
    return None


def _find_output_problem(agent: AgentDefinition) -> str | None:
    if agent.output_mode not in ("last_message", "all_messages", "structured_output"):
        return f"output_mode must be 'last_message', 'all_messages' or 'structured_output', not {agent.output_mode!r}"
    if type(agent.output_retries) is not int or agent.output_retries < 0:
        return f"output_retries must be the number of repeated requests for an output, at least 0, not {agent.output_retries!r}"
    if agent.output_schema is not None and agent.output_mode != "structured_output":
        return f"output_schema needs output_mode='structured_output', not {agent.output_mode!r}"
    can_output = agent.handle_steps or agent.output_schema is not None or "set_output" in agent.tool_names
    if agent.output_mode == "structured_output" and not can_output:
        return "structured_output needs an output_schema, a handler, or 'set_output' in tools"
    return None


def _find_spawning_problem(agent: AgentDefinition) -> str | None:
    """Return the problem with an inherited prompt, or with spawnable agents that nothing can spawn, or ``None``."""
    if agent.inherit_parent_system_prompt and agent.system_prompt:
        return "inherit_parent_system_prompt cannot be combined with system_prompt"
    can_spawn = agent.handle_steps or {"spawn_agents", "spawn_agent_inline", "start_agents", "task", "hand_off"} & set(
        agent.tool_names
    )
    if agent.spawnable_agents and not can_spawn:
        return "spawnable_agents needs a spawning tool such as 'spawn_agents' in tools, or a handler"
    return None
