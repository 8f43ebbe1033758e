"""
Which agents and tools an engine has, checked when it is built.

A definition that is met later, because a handler or a caller gave it, is checked in the same way when it is met.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import attrs

from stepengine.data.alike import did_you_mean
from stepengine.data.definition import AgentDefinition, name_of_published, normalised_id
from stepengine.data.hooks import HOOK_POINTS, Change, HookContext, Hooks
from stepengine.data.json import JsonDict, compact, freeze
from stepengine.data.limits import Limits
from stepengine.data.messages import ToolCallPart, system_reminder
from stepengine.data.questions import Decision
from stepengine.data.sources import ToolSource
from stepengine.data.tools import ToolBinding, ToolLike, ToolSpec, Yielding
from stepengine.engine.loading import bundled_agent, bundled_agents, bundled_id
from stepengine.engine.schemas import Compiled, compiled
from stepengine.errors import AgentError, DefinitionError
from stepengine.machine.finding import with_finder
from stepengine.machine.spawning import matching_id, stands_for
from stepengine.permissions import Policy, PolicyFile
from stepengine.runtime.logs import log_once
from stepengine.tooling.control import set_output_binding
from stepengine.tooling.makers import MAKERS, line_for
from stepengine.tooling.spawning import BUILT_IN, carried_by, direct_tool, params_schema

__all__ = ("Agent", "Catalog", "Uses", "check_hooks", "instructions_note", "with_carried")

KEPT = 256
"""How many definitions that were only given for a run stay checked."""
SPAWNERS = ("spawn_agents", "spawn_agent_inline")


class Uses(NamedTuple):
    """
    What the body of a tool may call beside what its caller has.

    Attributes:
        tools: Names of tools.
        agents: Display names of agents by normalised id.
    """

    tools: tuple[str, ...]
    agents: Mapping[str, str]


@attrs.frozen(eq=False)
class Agent:
    """
    A definition and what was made of it once.

    Attributes:
        definition: The definition.
        tools: Every tool that it or its handler may use, by name.
        offered: Names of its own tools, in order.
        specs: The specifications of its own tools by name.
        spawnable: Normalised ids of the agents that it may spawn.
        schemas: Its params and output schemas as functions.
        hooks: The engine's hooks followed by its own.
        limits: The limits that it sets; what it leaves open is taken from the engine's.
        openings: The ``pre_run`` hooks, among *hooks*, by which its sources give it their tools.
        notes: What results of its runs are to say: which agents stand for ids with a publisher.
        uses: By the name of a tool that yields, what its body may call beside what the agent has.
    """

    definition: AgentDefinition
    tools: Mapping[str, ToolBinding]
    offered: tuple[str, ...]
    specs: JsonDict
    spawnable: tuple[str, ...]
    schemas: Compiled
    hooks: Hooks
    limits: Limits
    openings: tuple[Callable[..., Any], ...]
    notes: tuple[str, ...]
    uses: Mapping[str, Uses]
    _family: Mapping[str, Agent] = attrs.field(repr=False)

    def child(self, key: str) -> Agent:
        """Return the agent with a normalised id out of ``spawnable``."""
        return self._family[key]

    @cached_property
    def children(self) -> Mapping[str, str]:
        """The display names of the agents that it may spawn, by normalised id."""
        return {key: self.child(key).definition.display_name for key in self.spawnable}

    @cached_property
    def body_hooks(self) -> Hooks:
        """The hooks that see the calls which the body of a tool makes; those of runs and steps see none of it."""
        return Hooks(pre_tool=self.hooks.pre_tool, post_tool=self.hooks.post_tool)

    @cached_property
    def note(self) -> str:
        """What is added to its instructions, unless it is shown the tools of a parent."""
        return instructions_note(self, None)


class Catalog:
    """
    The agents and tools of one engine.

    Args:
        agents: Definitions; those that they may spawn are collected from them.
        tools: Tools that agents may list by name, and handlers may always use; sources of tools that agents may list.
        hooks: The engine's hooks.
        limits: The engine's limits.
        permissions: The policy for every tool call of every agent, or the file that holds it; without one all are allowed.

    Raises:
        DefinitionError: when ids or tool names are used twice, or name nothing.
    """

    def __init__(
        self,
        agents: Iterable[AgentDefinition],
        tools: Iterable[ToolLike | ToolSource],
        hooks: Hooks,
        limits: Limits,
        permissions: Policy | PolicyFile | None = None,
    ) -> None:
        check_hooks("the engine", hooks)
        self._policy_file = permissions if isinstance(permissions, PolicyFile) else None
        self._permissions = permissions.policy if isinstance(permissions, PolicyFile) else permissions
        self._limits = limits
        self._hooks = hooks
        given = list(tools)
        self._met_sources: dict[int, tuple[ToolSource, ToolSource]] = {}
        self._sources = {t.name: self._met_source(t) for t in given if isinstance(t, ToolSource)}
        self._tools = _by_name("the engine", [t for t in given if not isinstance(t, ToolSource)])
        self._check_folders("the engine", self._tools.values())
        self._bound = {name: tool.binding() for name, tool in {**BUILT_IN, **self._tools}.items()}
        self._agents: dict[str, Agent] = {}
        self._agents = self._family(list(agents), carried_by(self._tools.values()))
        self._met: dict[int, Agent] = {}

    @property
    def definitions(self) -> tuple[AgentDefinition, ...]:
        """Every definition that the engine was given, and those that they may spawn."""
        return tuple([agent.definition for agent in self._agents.values()])

    @property
    def sources(self) -> tuple[ToolSource, ...]:
        """The sources of tools that were met."""
        return tuple([mine for _, mine in self._met_sources.values()])

    def find(self, agent: str | AgentDefinition, *, for_models: bool = False) -> Agent:
        """
        Return an agent by id or definition; a definition need not be among the engine's.

        Models are told what is known, and not where more is to be had: what they are told stands in recorded requests.

        Raises:
            AgentError: when no agent has that id.
            DefinitionError: when the definition cannot be used.
        """
        if isinstance(agent, AgentDefinition):
            known = self._agents.get(normalised_id(agent.id))
            return known if known is not None and known.definition is agent else self._meet(agent)
        if not isinstance(agent, str):
            msg = f"an agent is given by its id or as an AgentDefinition, not as {agent!r}"
            raise AgentError(msg)
        known = self._agents.get(normalised_id(agent)) or self._published(agent)
        if known is None:
            ids = ", ".join([repr(d.id) for d in self.definitions])
            hint = "" if for_models else _no_agent(agent, self._agents)
            msg = f"no agent has the id {agent!r}; known are: {ids or 'none'}{hint}"
            raise AgentError(msg)
        return known

    def _published(self, agent_id: str) -> Agent | None:
        """Return the agent that ``publisher/name[@version]`` stands for: one of the engine's, else a bundled one."""
        name = name_of_published(agent_id)
        if name is None:
            return None
        bundled = None if name in self._agents else bundled_agent(name)
        if name in self._agents or bundled is not None:
            log_once(stands_for(agent_id, name))
        return self._agents.get(name) if bundled is None else self._meet(bundled)

    def _meet(self, definition: AgentDefinition) -> Agent:
        """Return an agent that was given for one run; the last ones are kept, so that they are checked once."""
        known = self._met.get(id(definition))
        if known is None:
            known = self._family([definition])[normalised_id(definition.id)]
            while len(self._met) >= KEPT:
                self._met.pop(next(iter(self._met)), None)
            self._met[id(definition)] = known
        return known

    def info(self, agent_id: str) -> JsonDict:
        """
        Return what is told of an agent of this engine.

        Raises:
            AgentError: when no agent has that id.
        """
        agent = self.find(matching_id(agent_id, self._agents) or agent_id, for_models=True)
        definition = agent.definition
        prompt = definition.input_schema.prompt if definition.input_schema is not None else None
        told = {
            "id": definition.id,
            "full_agent_id": definition.id,
            "display_name": definition.display_name,
            "model": definition.model,
            "tool_names": definition.tool_names,
            "spawnable_agents": agent.spawnable,
            "include_message_history": definition.include_message_history,
            "spawner_prompt": definition.description,
            "input_schema": {"prompt": prompt, "params": params_schema(definition)},
            "output_mode": definition.output_mode,
            "output_schema": agent.schemas.output_schema,
        }
        return JsonDict(freeze(told))

    def _family(self, given: Sequence[AgentDefinition], also: Iterable[AgentDefinition] = ()) -> dict[str, Agent]:
        """Return *given* and what they may spawn, checked; where they name others by id, those are the engine's."""
        definitions = _collected(given, also, self._agents)
        family: dict[str, Agent] = dict(self._agents)
        made = {key: self._agent_of(d, family, {**self._agents, **definitions}) for key, d in definitions.items()}
        family.update(made)
        return made

    def _agent_of(
        self,
        definition: AgentDefinition,
        family: Mapping[str, Agent],
        ids: Mapping[str, Agent | AgentDefinition],
    ) -> Agent:
        named = [t for t in definition.tools if not isinstance(t, str | ToolSource)]
        own = _by_name(f"agent {definition.id!r}", named)
        self._check_folders(f"agent {definition.id!r}", own.values())
        sources = self._sources_of(definition)
        tools: dict[str, ToolBinding] = {**self._bound, **{n: t.binding() for n, t in own.items()}}
        listed = [name for name in definition.tool_names if name not in sources]
        if missing := [name for name in listed if name not in tools]:
            raise _no_tools(definition, missing, [*tools, *self._sources])
        check_hooks(f"agent {definition.id!r}", definition.hooks)
        spawnable = tuple([_spawnable(definition, wanted, ids) for wanted in definition.spawnable_ids])
        notes = [stands_for(*pair) for pair in zip(definition.spawnable_ids, spawnable, strict=True)]
        direct = _direct(definition, [ids[key] for key in spawnable], tools)
        tools |= direct
        uses = _uses(definition, tools, ids)
        offered = (*listed, *direct)
        schemas = compiled(definition)
        if schemas.output_schema is not None:
            tools["set_output"] = set_output_binding(schemas.output_schema)
        specs = JsonDict({name: tools[name].spec for name in offered})
        with_finder(specs, tools)
        openings = tuple([_opening(definition, source, tools) for source in sources.values()])
        return Agent(
            definition=definition,
            tools=tools,
            offered=offered,
            specs=specs,
            spawnable=spawnable,
            schemas=schemas,
            hooks=self._hooks_of(definition, tools, openings),
            limits=definition.limits.over(self._limits),
            openings=openings,
            notes=tuple(filter(None, notes)),
            uses=uses,
            family=family,
        )

    def _check_folders(self, whose: str, tools: Iterable[ToolLike]) -> None:
        """Refuse tools that may change the file which says what they may do."""
        file = self._policy_file
        if file is None or file.below_root:
            return
        for tool in with_carried(tools):
            folder: Sequence[str] | None = getattr(tool, "folder", None)
            if folder is not None and not tool.spec.annotations.read_only and file.is_below(folder):
                msg = (
                    f"{whose} has the tool {tool.spec.name!r}, which works in the folder of the policy file {str(file.path)!r}: a "
                    "model could allow itself everything. Keep the file outside of that folder, or accept it with "
                    "PolicyFile(path, below_root=True)"
                )
                raise DefinitionError(msg)

    def _met_source(self, source: ToolSource) -> ToolSource:
        """Return *source*, or what it gives this engine of itself, and have that closed with the engine."""
        for_engine = getattr(source, "for_engine", None)
        if id(source) not in self._met_sources:
            # The source itself is kept beside it, so that its id stays its own.
            self._met_sources[id(source)] = source, source if for_engine is None else for_engine()
        return self._met_sources[id(source)][1]

    def _sources_of(self, definition: AgentDefinition) -> dict[str, ToolSource]:
        """Return the sources of an agent by name: its own, and those of the engine that it lists."""
        own = {t.name: self._met_source(t) for t in definition.tools if isinstance(t, ToolSource)}
        return own | {t: self._sources[t] for t in definition.tools if isinstance(t, str) and t in self._sources}

    def _hooks_of(
        self,
        definition: AgentDefinition,
        known: Mapping[str, ToolBinding],
        openings: tuple[Callable[..., object], ...],
    ) -> Hooks:
        """Return the engine's hooks, the agent's own, and behind both the policy, which judges the final input."""
        hooks = self._hooks + definition.hooks if definition.hooks else self._hooks
        if openings:
            hooks = Hooks(pre_run=openings) + hooks
        if self._permissions is None:
            return hooks
        specs = {name: binding.spec for name, binding in known.items()}
        if openings:
            return hooks + Hooks(pre_tool=_judging(self._permissions, specs))
        return hooks + Hooks(pre_tool=self._permissions.hook(specs.get))


def _opening(
    definition: AgentDefinition, source: ToolSource, known: Mapping[str, ToolBinding]
) -> Callable[[HookContext], Generator[object, Any, Change]]:
    """Return the ``pre_run`` hook that gives a run the tools of *source*; *known* are those that it has anyway."""
    own = frozenset(known)

    def opening(ctx: HookContext) -> Generator[Any, Any, Change]:
        change = yield from source.pre_run(ctx)
        for tool in change.tools:
            if tool.spec.name in own:
                msg = (
                    f"agent {definition.id!r}: {source.name!r} has a tool {tool.spec.name!r}, and there is another one of that "
                    "name; give the source another name, or exclude the tool there"
                )
                raise DefinitionError(msg)
        return change

    return opening


def _judging(policy: Policy, specs: Mapping[str, ToolSpec]) -> Callable[[HookContext, ToolCallPart], Decision]:
    """Return the policy's hook for runs whose tools are found when they begin."""

    def permission(ctx: HookContext, call: ToolCallPart) -> Decision:
        spec = specs.get(call.tool_name) or ctx.state.tool_definitions.get(call.tool_name)
        return policy.hook(lambda name: spec or ToolSpec(name))(ctx, call)

    return permission


def _spawnable(definition: AgentDefinition, wanted: str, ids: Mapping[str, object]) -> str:
    key = matching_id(wanted, ids)
    if key is None:
        known = f"known are: {', '.join(ids)}{_no_agent(wanted, ids)}"
        msg = f"agent {definition.id!r} may spawn {wanted!r}, which no agent is called; {known}"
        raise DefinitionError(msg)
    return key


def _uses(
    definition: AgentDefinition, tools: dict[str, ToolBinding], ids: Mapping[str, Agent | AgentDefinition]
) -> dict[str, Uses]:
    """Return what each tool that yields carries, and add the tools among that to *tools*."""
    found: dict[str, Uses] = {}
    waiting = [name for name, binding in tools.items() if type(binding.runs) is Yielding]
    for name in waiting:
        names: list[str] = []
        agents: dict[str, str] = {}
        for used in tools[name].runs.uses:  # type: ignore[union-attr]  # that of a tool that yields
            if isinstance(used, ToolLike) and not isinstance(used, str | AgentDefinition):
                names.append(used.spec.name)
                if used.spec.name not in tools:
                    tools[used.spec.name] = used.binding()
                    waiting += [used.spec.name] if type(used.binding().runs) is Yielding else []
                elif tools[used.spec.name] != used.binding():
                    msg = (
                        f"agent {definition.id!r}: its tool {name!r} uses a tool {used.spec.name!r}, and the agent has another "
                        "one of that name; names are unique"
                    )
                    raise DefinitionError(msg)
                continue
            wanted = used.id if isinstance(used, AgentDefinition) else str(used)
            if wanted in tools:
                names.append(wanted)
                continue
            key = matching_id(wanted, ids)
            if key is None:
                msg = (
                    f"the tool {name!r} of agent {definition.id!r} uses {wanted!r}, which no tool and no agent is called; tools are: "
                    f"{', '.join(sorted(tools))}; agents are: {', '.join(ids)}{did_you_mean(wanted, [*tools, *ids])}"
                )
                raise DefinitionError(msg)
            other = ids[key]
            agents[key] = (other.definition if isinstance(other, Agent) else other).display_name
        found[name] = Uses(tuple(names), agents)
    return found


def with_carried(tools: Iterable[ToolLike]) -> Iterator[ToolLike]:
    """Give *tools*, and those that tools which yield carry."""
    waiting, met = list(tools), set[int]()
    for tool in waiting:
        if id(tool) in met:
            continue
        met.add(id(tool))
        yield tool
        runs = tool.binding().runs
        if type(runs) is Yielding:
            waiting += [used for used in runs.uses if isinstance(used, ToolLike)]


def _direct(
    definition: AgentDefinition, children: Iterable[Agent | AgentDefinition], known: Mapping[str, object]
) -> dict[str, ToolBinding]:
    """Return a tool for each agent that the model of *definition* may spawn."""
    made: dict[str, ToolBinding] = {}
    for child in children if "spawn_agents" in definition.tool_names else ():
        tool = direct_tool(child.definition if isinstance(child, Agent) else child)
        name = tool.spec.name
        if name in known:
            msg = (
                f"agent {definition.id!r}: its spawnable agent {name.replace('_', '-')!r} is offered as the tool {name!r}, "
                "but there is a tool of that name; rename one of them"
            )
            raise DefinitionError(msg)
        made[name] = tool.binding()
    return made


def _collected(
    given: Iterable[object], also: Iterable[AgentDefinition], others: Mapping[str, object]
) -> dict[str, AgentDefinition]:
    """
    Return definitions and those that they may spawn, or carry in their tools, by normalised id.

    Where one names ``publisher/name@version``, and neither they nor *others* are called so, a bundled agent is meant.
    """
    found = _unique(given)
    waiting = list(found.values())
    met = list(also)
    while waiting or met or (met := _bundled(found, others)):
        for child in met:
            key = normalised_id(child.id)
            if key not in found:
                found[key] = child
                waiting.append(child)
            elif found[key] is not child and found[key] != child:
                raise _twice(child.id)
        met = _children(waiting.pop(0)) if waiting else []
    return found


def _bundled(found: Mapping[str, AgentDefinition], others: Mapping[str, object]) -> list[AgentDefinition]:
    """Return the bundled agents that *found* name by ids with a publisher, which nothing else is called."""
    named = {
        name_of_published(c) for d in found.values() for c in d.spawnable_agents if isinstance(c, str) and "/" in c
    }
    bundled = [bundled_agent(name) for name in sorted(filter(None, named)) if name not in found and name not in others]
    return [agent for agent in bundled if agent is not None]


def _children(definition: AgentDefinition) -> list[AgentDefinition]:
    return [*[c for c in definition.spawnable_agents if not isinstance(c, str)], *carried_by(definition.tools)]


def _unique(given: Iterable[object]) -> dict[str, AgentDefinition]:
    found: dict[str, AgentDefinition] = {}
    for definition in given:
        if not isinstance(definition, AgentDefinition):
            msg = f"agents holds AgentDefinition objects, not {definition!r}"
            raise DefinitionError(msg)
        if normalised_id(definition.id) in found:
            raise _twice(definition.id)
        found[normalised_id(definition.id)] = definition
    return found


def check_hooks(owner: str, hooks: Hooks) -> None:
    """
    Raise unless every hook is a plain or generator function.

    Raises:
        DefinitionError: naming the owner, the point and the hook.
    """
    for point in HOOK_POINTS:
        for hook in hooks.at(point):
            name = getattr(hook, "__qualname__", type(hook).__qualname__)
            call = hook if inspect.isroutine(hook) else getattr(hook, "__call__", None)  # noqa: B004
            if not callable(hook):
                msg = f"{owner}: a {point} hook is a function, not {hook!r}"
                raise DefinitionError(msg)
            if inspect.iscoroutinefunction(call) or inspect.isasyncgenfunction(call):
                msg = (
                    f"{owner}: the {point} hook {name!r} is async; write a plain function, or a generator function that does "
                    "I/O with `yield from Perform(fn, ...)`"
                )
                raise DefinitionError(msg)


def _by_name(owner: str, tools: Iterable[object]) -> dict[str, ToolLike]:
    named: dict[str, ToolLike] = {}
    for tool in tools:
        if isinstance(tool, str) or not isinstance(tool, ToolLike):
            hint = "; decorate the function with @tool" if inspect.isroutine(tool) else ""
            if isinstance(tool, str):
                line = line_for([tool])
                hint = f"; give it {line}" if line else "; a name stands in the tools of an agent"
            msg = f"{owner}: tools holds Tool objects, not {tool!r}{hint}"
            raise DefinitionError(msg)
        name = tool.spec.name
        if name in named:
            msg = f"{owner}: two tools are called {name!r}; names are unique"
            raise DefinitionError(msg)
        named[name] = tool
    return named


def _twice(agent_id: str) -> DefinitionError:
    msg = f"two agents have the id {agent_id!r} ('_' counts as '-'); ids are unique in an engine"
    return DefinitionError(msg)


def _no_tools(definition: AgentDefinition, names: Sequence[str], known: Iterable[str]) -> DefinitionError:
    """Return the error for tools that an agent lists and nobody gave; of those of the package it says what gives them."""
    bundled, strange = [n for n in names if n in MAKERS], [n for n in names if n not in MAKERS]
    parts = [f"which the engine was not given; available are: {', '.join(sorted(known))}"]
    if bundled:
        parts.append(f"{_all_of(bundled)} with stepengine: give the engine {line_for(bundled)}")
    all_known = [*known, *MAKERS]
    parts += [f"{name!r} does not exist{did_you_mean(name, all_known)}" for name in strange]
    told = " ".join([part if part.endswith("?") else f"{part}." for part in parts]).removesuffix(".")
    msg = f"agent {definition.id!r} lists the tool{'s' * (len(names) > 1)} {', '.join(map(repr, names))}, {told}"
    return DefinitionError(msg)


def _all_of(names: Sequence[str]) -> str:
    return f"{', '.join(map(repr, names))} come{'s' * (len(names) == 1)}"


def _no_agent(agent_id: str, known: Iterable[str]) -> str:
    """Return what is known of an agent that an engine does not have: that it comes with the package, or a likelier id."""
    found = bundled_id(agent_id)
    if found is not None:
        return f"; it comes with stepengine: give it as load_agent({found!r})"
    return did_you_mean(normalised_id(agent_id), [*known, *bundled_agents()])


# --- what an agent is told of the others: which it may run, and which tools are its own -------------------


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
