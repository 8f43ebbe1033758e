"""
Which agents and tools an engine has, checked when it is built.

A definition that is met later, because a handler or a caller gave it, is checked in the same way when it is met.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import attrs
from attrs import frozen

from stepengine.data.alike import did_you_mean, list_names
from stepengine.data.definition import AgentDefinition, HookContext, ToolSource, find_published_name, normalised_id
from stepengine.data.hooks import HOOK_POINTS, Change, Hooks
from stepengine.data.json import JsonDict, JsonValue, compact, freeze
from stepengine.data.limits import Limits
from stepengine.data.messages import Message, TextPart, UserMessage, system_reminder
from stepengine.data.placeholders import Placeholders, find_placeholders
from stepengine.data.schemas import check_references
from stepengine.data.server_tools import Programs
from stepengine.data.tools import ToolBinding, ToolLike, ToolSpec, Yielding
from stepengine.data.transcript import Transcript
from stepengine.engine import packages
from stepengine.engine.handler_sources import AllowedNames, warn_about_agent_sources, warn_about_hook_sources
from stepengine.engine.loader import find_bundled_agent, find_bundled_id, list_bundled_ids
from stepengine.engine.schemas import CompiledSchemas, compile_schemas
from stepengine.engine.workspace_tools import WorkspaceTools
from stepengine.errors import AgentError, DataError, DefinitionError, StepEngineError
from stepengine.machine.child_effects import describe_substitution, find_matching_id
from stepengine.machine.plan import PlannedAgent
from stepengine.machine.tool_search import with_search_tool
from stepengine.runtime.logs import log_once
from stepengine.tools.agent_tools import (
    BUILT_IN,
    get_params_schema,
    iterate_reachable_tools,
    list_agents_run_by_tools,
    make_spawnable_agent_tool,
)
from stepengine.tools.control import make_set_output_binding
from stepengine.tools.makers import MAKERS, WORKSPACE_TOOLS, format_tools_argument

if TYPE_CHECKING:
    from stepengine.journal import SigningKey
    from stepengine.permissions import Policy, PolicyFile
    from stepengine.workspace.workspace import Workspace

# Kept by identity, so that a service that passes the same definition to every run has it checked once; and bounded,
# because one that makes a definition for each run would keep all of them for ever. The figure is a choice.
KEPT_DEFINITIONS = 256
"""How many definitions that were only given for a run stay checked."""
MAY_RUN = "You may run these agents:"
SHOWN_TOOLS = "You are shown the tools of the agent that started you."
NOTES = re.compile(
    rf"<system-reminder>\n(?:{re.escape(MAY_RUN)}|{re.escape(SHOWN_TOOLS)}).*?\n</system-reminder>", re.DOTALL
)
"""What ``make_instructions_note`` adds to the instructions of a run."""
SPAWNERS = ("spawn_agents", "spawn_agent_inline", "start_agents", "hand_off")


class ToolUses(NamedTuple):
    """
    The tools and agents that the body of a tool may call in addition to those of its caller.

    Attributes:
        tools: Names of tools.
        agents: Display names of agents by normalised id.
    """

    tools: tuple[str, ...]
    agents: Mapping[str, str]


@frozen(eq=False)
class Agent:
    """
    An agent definition with its compiled tools, schemas and hooks.

    Attributes:
        definition: The definition.
        tools: Every tool that the agent or its handler may use, by name.
        offered: The names of the agent's own tools, in order.
        specs: The specifications of the agent's own tools by name.
        spawnable: Normalised ids of the agents that it may spawn.
        schemas: The params and output schemas as functions.
        hooks: The engine's hooks followed by the agent's own.
        limits: The agent's limits; unset ones are filled from the engine's.
        openings: The ``pre_run`` hooks, among *hooks*, that add the tools of its sources.
        notes: Notes for results of its runs: which agents were used in place of ids with a publisher.
        uses: By the name of a tool that yields, the tools and agents that its body may call in addition to the agent's.
        at_provider: The variant of the agent for a provider that runs programs which call its tools; ``None`` if there is no
            such variant.
    """

    definition: AgentDefinition
    tools: dict[str, ToolBinding]
    offered: tuple[str, ...]
    specs: JsonDict
    spawnable: tuple[str, ...]
    schemas: CompiledSchemas
    hooks: Hooks
    limits: Limits
    openings: tuple[Callable[..., Any], ...]
    notes: tuple[str, ...]
    uses: Mapping[str, ToolUses]
    at_provider: Agent | None
    _family: Mapping[str, Agent] = attrs.field(repr=False)
    _catalog: Catalog = attrs.field(repr=False)

    def get_child(self, key: str) -> Agent:
        """Return the agent with a normalised id out of ``spawnable``."""
        return self._family[key]

    def find_path_to(self, target: Agent) -> tuple[Agent, ...]:
        """Return the agents on the shortest path from this one to an agent that may spawn *target*; empty without a path."""
        # By identity: a package's agents name each other by ids that other agents have, too.
        waiting: list[tuple[Agent, ...]] = [(self,)]
        met = {id(self)}
        for path in waiting:
            for child in map(path[-1].get_child, path[-1].spawnable):
                if child.definition is target.definition:
                    return path
                if id(child) not in met:
                    met.add(id(child))
                    waiting.append((*path, child))
        return ()

    def find_known_agent(self, key: str) -> Agent | None:
        """Return the agent of ``known_agents`` with a normalised id, which has a publisher if its agent is of another package."""
        return self._family.get(key)

    @property
    def known_agents(self) -> Iterable[Agent]:
        """All agents compiled together with this one, and those of its engine; for a packaged agent, those that its package names."""
        return self._family.values()

    def _collect_reachable(self) -> list[Agent]:
        """Return this agent and all that may run below it, each once."""
        # The list grows while it is gone through, and `met` ends circles: agents may spawn each other.
        found, met = [self], {id(self)}
        for agent in found:
            for child in map(agent.get_child, agent.spawnable):
                if id(child) not in met:
                    met.add(id(child))
                    found.append(child)
        return found

    @cached_property
    def sandbox_name_getters(self) -> Sequence[Callable[[], str]]:
        """Functions that return the sandbox names of the tools of this agent and its descendants; they raise if a sandbox is not installed."""
        runs = [binding.runs for agent in self._collect_reachable() for binding in agent.tools.values()]
        return [one.sandbox for one in runs if isinstance(one, Yielding) and one.sandbox is not None]

    @cached_property
    def planned(self) -> PlannedAgent:
        """The parts of the plans of all its runs that are the same."""
        own = packages.packaged_agent_from_definition(self.definition)
        return PlannedAgent(
            definition=self.definition,
            offered=self.offered,
            hooks=self.hooks,
            children={key: self.get_child(key).definition.display_name for key in self.spawnable},
            repair_child_params=self._repair_child_params,
            describe_agent=self._catalog.describe,
            output_schema=self.schemas.output,
            placeholders=self._find_placeholders(),
            package_id="" if own is None else own.id,
            package_versions=self._get_package_versions(),
            notes=self.notes,
            source=self,
        )

    @cached_property
    def tool_body_hooks(self) -> Hooks:
        """The ``pre_tool`` and ``post_tool`` hooks, the only ones that also apply to calls from the body of a tool."""
        return Hooks(pre_tool=self.hooks.pre_tool, post_tool=self.hooks.post_tool)

    def _repair_child_params(self, child: str | AgentDefinition, params: JsonValue) -> JsonValue:
        """Return params with corrected names and values; unchanged if the agent is unknown or not allowed."""
        try:
            if not isinstance(child, str):
                agent = self._catalog.get_agent(child)
            else:
                key = find_matching_id(child, self.spawnable)
                if key is None:
                    return params
                agent = self.get_child(key)
            repaired: JsonValue = agent.schemas.repair_params(params)
        # A later check refuses the agent with an error for the model. An error here would blame the params.
        except StepEngineError:
            return params
        return repaired

    def _get_package_versions(self) -> Mapping[str, str]:
        """Return the packages of this agent and its descendants: ``name==version`` by ``publisher/name``."""
        members = [packages.packaged_agent_from_definition(agent.definition) for agent in self._collect_reachable()]
        found = {one.id: f"{one.package.name}=={one.package.version}" for one in members if one is not None}
        return dict(sorted(found.items()))

    def _find_placeholders(self) -> Placeholders | None:
        """Return the placeholders in its prompts; ``None`` without any."""
        own = self.definition
        system = own.system_prompt if isinstance(own.system_prompt, str) else ""
        names = find_placeholders(system, own.instructions_prompt, own.step_prompt)
        if not names:
            return None
        from stepengine.context.placeholders import read_placeholders  # for few agents alone

        return Placeholders(names, read_placeholders)

    @cached_property
    def instructions_note(self) -> str:
        """The note that is added to its instructions, unless it inherits the tool definitions of a parent."""
        return make_instructions_note(self, None)


class Catalog:
    """
    The agents and tools of one engine.

    Args:
        agents: Definitions; those that they may spawn are collected from them.
        tools: Tools that agents may list by name, and handlers may always use; sources of tools that agents may list.
        hooks: The engine's hooks.
        limits: The engine's limits.
        permissions: The policy for every tool call of every agent, or the file that holds it; without one all are allowed.
        workspace: Gives agents the bundled tools that they name and *tools* does not have.

    Attributes:
        policy: Decides about tool calls; ``None`` where all are allowed.
        policy_file: The file that holds it, if one does.

    Raises:
        DefinitionError: when ids or tool names are used twice, or name nothing.
    """

    def __init__(
        self,
        agents: Iterable[AgentDefinition],
        tools: Iterable[ToolLike | ToolSource],
        hooks: Hooks,
        limits: Limits,
        *,
        permissions: Policy | PolicyFile | None = None,
        workspace: Workspace | None = None,
    ) -> None:
        require_sync_hooks("the engine", hooks)
        warn_about_hook_sources("the engine", hooks)
        self.policy, self.policy_file = _split_policy_and_file(permissions)
        self._limits = limits
        self._hooks = hooks
        given = list(tools)
        self._met_sources: dict[int, tuple[ToolSource, ToolSource]] = {}
        self._sources = {t.name: self._register_source_for_engine(t) for t in given if isinstance(t, ToolSource)}
        self._tools = _index_tools("the engine", [t for t in given if not isinstance(t, ToolSource)])
        self._refuse_policy_file_writers("the engine", self._tools.values())
        self._workspace_tools = WorkspaceTools(
            workspace, partial(self._refuse_policy_file_writers, "the workspace of the engine")
        )
        # Bound once for all agents, each of which has every tool of the engine: its handler may use it, also when its
        # model is not offered it.
        self._bound = {name: tool.binding() for name, tool in {**BUILT_IN, **self._tools}.items()}
        # Empty while the family is checked, which looks into it for ids that are known already.
        self._agents: dict[str, Agent] = {}
        self._spaces: dict[tuple[str, str], dict[str, Agent]] = {}
        self._agents = self._compile_family(list(agents), list_agents_run_by_tools(self._tools.values()))
        self._met: dict[int, Agent] = {}

    @property
    def definitions(self) -> tuple[AgentDefinition, ...]:
        """The definitions of the engine and of the agents that they may spawn."""
        return tuple([agent.definition for agent in self._agents.values()])

    @property
    def sources(self) -> tuple[ToolSource, ...]:
        """The tool sources of this engine and of the agents compiled so far."""
        return tuple([mine for _, mine in self._met_sources.values()])

    def get_agent(self, agent: str | AgentDefinition, *, is_for_model: bool = False) -> Agent:
        """
        Return the compiled agent with this id or definition; a definition that is new to the engine is compiled.

        Models are told what is known, and not where more is to be had: what they are told stands in recorded requests.

        Raises:
            AgentError: when no agent has that id.
            DefinitionError: when the definition cannot be used.
        """
        if isinstance(agent, AgentDefinition):
            # By identity: a definition that is equal by name and different in its tools is another agent, and the
            # caller means the one that was passed.
            known = self._agents.get(_get_catalog_key(agent))
            return known if known is not None and known.definition is agent else self._get_or_compile(agent)
        if not isinstance(agent, str):
            msg = f"an agent must be an id or an AgentDefinition, not {agent!r}"
            raise AgentError(msg)
        known = self._agents.get(normalised_id(agent)) or self._find_published_agent(agent)
        if known is None:
            ids = list_names([d.id for d in self.definitions], agent, quoted=True)
            hint = "" if is_for_model else _make_unknown_agent_hint(agent, self._agents)
            msg = f"no agent has the id {agent!r}; known are: {ids}{hint}"
            raise AgentError(msg)
        return known

    def _find_published_agent(self, agent_id: str) -> Agent | None:
        """Return the agent for ``publisher/name[@version]``: of a package, or, with a log line, of the engine or a bundled one."""
        name = find_published_name(agent_id)
        if name is None:
            return None
        if (member := packages.find_published_agent(agent_id)) is not None:
            return self._get_or_compile(member.load())
        # One of the engine's own goes before a bundled one, so that an application can put its own in place of an
        # agent that published definitions name.
        bundled = None if name in self._agents else find_bundled_agent(name)
        # Said in the log, once: the name promises an agent of a publisher, and another one runs.
        if name in self._agents or bundled is not None:
            log_once(describe_substitution(agent_id, name))
        return self._agents.get(name) if bundled is None else self._get_or_compile(bundled)

    def _get_or_compile(self, definition: AgentDefinition) -> Agent:
        """Return the compiled agent of a definition that was passed for one run. Recent ones are cached."""
        known = self._met.get(id(definition))
        if known is None:
            known = self._compile_family([definition])[_get_catalog_key(definition)]
            # The oldest goes, and `pop` has a default because threads may share an engine: two can choose the same one.
            # The agent holds its definition, so no other object takes the id that it is kept under.
            while len(self._met) >= KEPT_DEFINITIONS:
                self._met.pop(next(iter(self._met)), None)
            self._met[id(definition)] = known
        return known

    def describe(self, agent_id: str) -> JsonDict:
        """
        Return the id, names, model, tools, children and schemas of an agent of this engine, as JSON.

        Raises:
            AgentError: when no agent has that id.
        """
        agent = self.get_agent(find_matching_id(agent_id, self._agents) or agent_id, is_for_model=True)
        definition = agent.definition
        prompt = definition.input_schema.prompt if definition.input_schema is not None else None
        # Both `id` and `full_agent_id`, as in what Codebuff tells of an agent: handlers that came from there read
        # either.
        told = {
            "id": definition.id,
            "full_agent_id": definition.id,
            "display_name": definition.display_name,
            "model": definition.model,
            "tool_names": definition.tool_names,
            "spawnable_agents": agent.spawnable,
            "include_message_history": definition.include_message_history,
            "spawner_prompt": definition.description,
            "input_schema": {"prompt": prompt, "params": get_params_schema(definition)},
            "output_mode": definition.output_mode,
            "output_schema": None if agent.schemas.output is None else agent.schemas.output.json_schema,
        }
        return JsonDict(freeze(told))

    def _compile_family(
        self, agents: Sequence[AgentDefinition], carried_definitions: Iterable[AgentDefinition] = ()
    ) -> dict[str, Agent]:
        """Compile *agents* and the agents that they may spawn. Other ids refer to agents of the engine."""
        definitions = _collect_reachable_definitions(agents, carried_definitions, self._agents)
        # One mapping for all members, filled when all are made: agents may spawn each other, and each holds the mapping
        # and not its children.
        family: dict[str, Agent] = dict(self._agents)
        ids: dict[str, Agent | AgentDefinition] = {**self._agents, **definitions}
        made = {
            key: self._compile_packaged_agent(d) or self._compile_agent(d, family, ids)
            for key, d in definitions.items()
        }
        family.update(made)
        used = Counter([id(agent.definition.handle_steps) for agent in family.values()])
        for agent in made.values():
            listed = [
                self._tools[tool] for tool in agent.definition.tools if isinstance(tool, str) and tool in self._tools
            ]
            own = [tool for tool in agent.definition.tools if isinstance(tool, ToolLike)]
            is_shared = used[id(agent.definition.handle_steps)] > 1
            names = AllowedNames(agent.tools, agent.offered, agent.spawnable, is_open=bool(agent.hooks.pre_run))
            tools = iterate_reachable_tools([*own, *listed])
            warn_about_agent_sources(agent.definition, names, tools, agent.uses, is_shared=is_shared)
        return made

    def _compile_packaged_agent(self, definition: AgentDefinition) -> Agent | None:
        """
        Return the compiled agent of a package, with the other agents that it names; ``None`` for an agent of no package.

        A package is a space of its own: ids without a publisher that its agents name are those of their package, or come
        with the engine. So two packages may have an agent of the same name, and none takes the place of one of the engine's.
        """
        member = packages.packaged_agent_from_definition(definition)
        if member is None:
            return None
        space = self._spaces.setdefault((member.package.publisher, member.package.name), {})
        known = space.get(member.declared.id)
        if known is None or known.definition is not definition:
            definitions = _collect_reachable_definitions([definition], (), {}, within=member)
            new = {_get_key_within_package(key, d, member): d for key, d in definitions.items()}
            ids: dict[str, Agent | AgentDefinition] = {**space, **new}
            new = {key: d for key, d in new.items() if key not in space or d is definition}
            foreign = {key: d for key, d in new.items() if _is_in_other_package(d, member)}
            space |= {key: self._compile_agent(d, space, ids) for key, d in new.items() if key not in foreign}
            # Last: two packages may name each other's agents.
            for key, other in foreign.items():
                agent = self._compile_packaged_agent(other)
                assert agent is not None  # noqa: S101 - it is of a package
                space[key] = agent
        return space[member.declared.id]

    def _compile_agent(
        self,
        definition: AgentDefinition,
        family: Mapping[str, Agent],
        ids: Mapping[str, Agent | AgentDefinition],
    ) -> Agent:
        """Return an agent with its tools, schemas and hooks; raise ``DefinitionError`` if one of them cannot be used."""
        named = [t for t in definition.tools if not isinstance(t, str | ToolSource)]
        own = _index_tools(f"agent {definition.id!r}", named)
        self._refuse_policy_file_writers(f"agent {definition.id!r}", own.values())
        sources = self._collect_sources(definition)
        tools = self._bound.copy()
        for name, tool in own.items():
            tools[name] = tool.binding()
        listed = [name for name in definition.tool_names if name not in sources]
        used = [one for binding in tools.values() if isinstance(binding.runs, Yielding) for one in binding.runs.uses]
        wanted = [*listed, *[one for one in used if isinstance(one, str)]]
        for name, tool in self._workspace_tools.build_tools([name for name in wanted if name not in tools]).items():
            tools[name] = tool.binding()
        if missing := [name for name in listed if name not in tools]:
            raise _make_unknown_tools_error(definition, missing, [*tools, *self._sources], self._workspace_tools)
        require_sync_hooks(f"agent {definition.id!r}", definition.hooks)
        spawnable = tuple([_resolve_spawnable_id(definition, wanted, ids) for wanted in definition.spawnable_ids])
        notes = [describe_substitution(*pair) for pair in zip(definition.spawnable_ids, spawnable, strict=True)]
        direct = _make_agent_tools(definition, {key: ids[key] for key in spawnable}, tools)
        for name, binding in direct.items():
            tools[name] = binding
        uses = _collect_uses_and_add_tools(definition, tools, ids)
        offered = _expand_offered_names([*listed, *direct], tools)
        schemas = compile_schemas(definition)
        # The tool is made for each agent, since its parameters are the agent's own output schema: a provider can hold
        # the model to it then.
        if schemas.output is not None:
            tools["set_output"] = make_set_output_binding(schemas.output.json_schema)
            _check_schema_references(definition, {"set_output": tools["set_output"].spec})
        specs = JsonDict({name: tools[name].spec for name in offered})
        _check_schema_references(definition, specs)
        with_search_tool(specs, tools)
        openings = tuple([_make_source_hook(definition, source, tools) for source in sources.values()])
        return Agent(
            definition=definition,
            tools=tools,
            offered=offered,
            specs=specs,
            spawnable=spawnable,
            schemas=schemas,
            hooks=self._combine_hooks(definition, tools, openings),
            limits=definition.limits.resolve(self._limits),
            openings=openings,
            notes=tuple(filter(None, notes)),
            uses=uses,
            # A whole agent beside, made now: the tools of one that a provider runs programs for are others, and which
            # one is meant is known when a run has its model. So nothing is checked during a run.
            at_provider=None
            if (other := _make_provider_programs_variant(definition)) is None
            else self._compile_agent(other, family, ids),
            family=family,
            catalog=self,
        )

    def _refuse_policy_file_writers(self, owner: str, tools: Iterable[ToolLike]) -> None:
        """Raise ``DefinitionError`` for tools that can write the policy file that restricts them."""
        file = self.policy_file
        if file is None or file.below_root:
            return
        for tool in iterate_reachable_tools(tools):
            folder: Sequence[str] | None = getattr(tool, "folder", None)
            if folder is not None and not tool.spec.annotations.read_only and file.is_below(folder):
                msg = (
                    f"{owner} has the tool {tool.spec.name!r}, which works in the folder of the policy file {str(file.path)!r}: a "
                    "model could change its own permissions. Keep the file outside of that folder, or accept the risk with "
                    "PolicyFile(path, below_root=True)"
                )
                raise DefinitionError(msg)

    def refuse_signing_key_access(self, agent: Agent, key: SigningKey) -> None:
        """
        Raise if a tool of the engine or of an agent works in a folder that holds the signing key.

        Raises:
            DefinitionError: When such a tool works in a folder that contains the key file.
        """
        agents = {id(each): each for each in (*self._agents.values(), agent, *agent.known_agents)}
        own = [tool for each in agents.values() for tool in each.definition.tools if isinstance(tool, ToolLike)]
        for tool in iterate_reachable_tools([*self._tools.values(), *self._workspace_tools.built.values(), *own]):
            folder: Sequence[str] | None = getattr(tool, "folder", None)
            if folder is not None and key.folder_parts[: len(folder)] == tuple(folder):
                msg = (
                    f"the tool {tool.spec.name!r} works in a folder with the signing key {str(key.path)!r}: an agent could read the key "
                    "and sign anything. Keep the key outside of the folders that agents work in"
                )
                raise DefinitionError(msg)

    def _register_source_for_engine(self, source: ToolSource) -> ToolSource:
        """Return *source*, or the result of its ``for_engine()``, which is called once; register it to be closed with the engine."""
        for_engine = getattr(source, "for_engine", None)
        if id(source) not in self._met_sources:
            # The source itself is kept beside it, so that its id stays its own.
            self._met_sources[id(source)] = source, source if for_engine is None else for_engine()
        return self._met_sources[id(source)][1]

    def _collect_sources(self, definition: AgentDefinition) -> dict[str, ToolSource]:
        """Register the agent's own sources for the engine; return them and the engine's sources that the agent lists, by name."""
        own = {t.name: self._register_source_for_engine(t) for t in definition.tools if isinstance(t, ToolSource)}
        return own | {t: self._sources[t] for t in definition.tools if isinstance(t, str) and t in self._sources}

    def _combine_hooks(
        self,
        definition: AgentDefinition,
        own_tools: Mapping[str, ToolBinding],
        openings: tuple[Callable[..., object], ...],
    ) -> Hooks:
        """Return the hooks of sources, of the engine and of the agent, followed by the policy, which judges the final input."""
        # The policy is the last, since hooks may change the input of a call: judged before them, a call could be
        # allowed with one input and made with another.
        hooks = self._hooks + definition.hooks if definition.hooks else self._hooks
        # Sources first of all: hooks for the beginning of a run that come later see the tools which the sources gave
        # it.
        if openings:
            hooks = Hooks(pre_run=openings) + hooks
        if self.policy is None:
            return hooks
        return hooks + Hooks(pre_tool=self.policy.hook(partial(_find_tool_spec, own_tools)))


def _check_schema_references(definition: AgentDefinition, specs: Mapping[str, ToolSpec]) -> None:
    """Raise ``DefinitionError`` for a tool whose input schema has a reference without a target."""
    for name, spec in specs.items():
        try:
            check_references(f"input_schema of tool {name!r}", spec.input_schema)
        except DataError as error:
            msg = f"agent {definition.id!r}: {error.message}"
            raise DefinitionError(msg) from None


def _make_source_hook(
    definition: AgentDefinition, source: ToolSource, own_tools: Mapping[str, ToolBinding]
) -> Callable[[HookContext], Generator[object, Any, Change]]:
    """Return the ``pre_run`` hook that adds the tools of *source* to a run; it raises for names of the agent's *own_tools*."""
    own = frozenset(own_tools)

    def opening(ctx: HookContext) -> Generator[Any, Any, Change]:
        change = yield from source.pre_run(ctx)
        for tool in change.tools:
            # Found when the run begins, because only then it is known what a server has. An error and no second name:
            # policies and prompts name tools, and one that a server adds must not take the place of one that was
            # allowed.
            if tool.spec.name in own:
                msg = (
                    f"agent {definition.id!r}: {source.name!r} has a tool {tool.spec.name!r}, and the agent has another tool with that "
                    "name; give the source another name, or exclude the tool there"
                )
                raise DefinitionError(msg)
        return change

    return opening


def _split_policy_and_file(permissions: Policy | PolicyFile | None) -> tuple[Policy | None, PolicyFile | None]:
    """Return the policy of *permissions*, and its policy file; ``None`` for one that does not exist."""
    if permissions is None:
        return None, None
    from stepengine.permissions import PolicyFile

    return (permissions.policy, permissions) if isinstance(permissions, PolicyFile) else (permissions, None)


def _find_tool_spec(own_tools: Mapping[str, ToolBinding], ctx: HookContext, name: str) -> ToolSpec | None:
    """Return the specification of one of *own_tools* or of the tools that sources added to the run; ``None`` for others."""
    binding = own_tools.get(name)
    return ctx.state.tool_definitions.get(name) if binding is None else binding.spec


def _resolve_spawnable_id(definition: AgentDefinition, wanted: str, ids: Mapping[str, object]) -> str:
    """Return the normalised id for an entry of ``spawnable_agents``; raise ``DefinitionError`` if no agent has it."""
    key = find_matching_id(wanted, ids)
    if key is None:
        known = f"known agents: {list_names(ids, wanted)}{_make_unknown_agent_hint(wanted, ids)}"
        msg = f"agent {definition.id!r} lists {wanted!r} in spawnable_agents, but no agent has that id; {known}"
        raise DefinitionError(msg)
    return key


def _collect_uses_and_add_tools(
    definition: AgentDefinition, tools: dict[str, ToolBinding], ids: Mapping[str, Agent | AgentDefinition]
) -> dict[str, ToolUses]:
    """Return the tools and agents that each yielding tool carries, and add these tools to *tools*."""
    found: dict[str, ToolUses] = {}
    # The list grows while it is gone through: what a tool carries may yield and carry something in turn.
    waiting = [name for name, binding in tools.items() if isinstance(binding.runs, Yielding)]
    for name in waiting:
        names: list[str] = []
        agents: dict[str, str] = {}
        for used in tools[name].runs.uses:  # type: ignore[union-attr]  # that of a tool that yields
            if isinstance(used, ToolLike):
                waiting += _add_carried_tool(definition, name, used, tools)
                names.append(used.spec.name)
                continue
            wanted = used.id if isinstance(used, AgentDefinition) else str(used)
            if wanted in tools:
                names.append(wanted)
            else:
                key = _resolve_used_agent_id(definition, name, wanted, tools, ids)
                other = ids[key]
                agents[key] = (other.definition if isinstance(other, Agent) else other).display_name
        found[name] = ToolUses(tuple(names), agents)
    return found


def _make_provider_programs_variant(definition: AgentDefinition) -> AgentDefinition | None:
    """Return *definition* with ``Programs`` and its tools in place of ``code_mode(where="provider")``; ``None`` without such a tool."""
    bodies = [body for tool in definition.tools if (body := _find_body_run_at_provider(tool)) is not None]
    if not bodies:
        return None
    own = [tool for tool in definition.tools if _find_body_run_at_provider(tool) is None]
    known = attrs.evolve(definition, tools=own).tool_names
    carried = {tool if isinstance(tool, str) else tool.spec.name: tool for body in bodies for tool in body.uses}
    direct = {*known, *[name for body in bodies for name in body.offers]}
    programs = Programs(list(carried), direct=[name for name in carried if name in direct])
    made = attrs.evolve(
        definition,
        tools=[*own, *[tool for name, tool in carried.items() if name not in known]],
        settings=attrs.evolve(definition.settings, server_tools=[*definition.settings.server_tools, programs]),
    )
    packages.register_in_same_package(made, definition)
    return made


def _find_body_run_at_provider(tool: object) -> Yielding | None:
    """Return the yielding body of a tool whose programs the provider runs; ``None`` for any other value."""
    runs = tool.binding().runs if isinstance(tool, ToolLike) else None
    return runs if isinstance(runs, Yielding) and runs.at_provider else None


def _expand_offered_names(names: Sequence[str], tools: Mapping[str, ToolBinding]) -> tuple[str, ...]:
    """Return *names* followed by the names that yielding tools among them offer, without duplicates."""
    runs = [tools[name].runs for name in names]
    more = [name for one in runs if isinstance(one, Yielding) for name in one.offers]
    return tuple(dict.fromkeys([*names, *more])) if more else tuple(names)


def _add_carried_tool(
    definition: AgentDefinition, carrier: str, used: ToolLike, tools: dict[str, ToolBinding]
) -> list[str]:
    """Add a tool that *carrier* carries; return its name, in a list, if it is new and yields; raise if its name is taken."""
    name, binding = used.spec.name, used.binding()
    if name not in tools:
        tools[name] = binding
        return [name] if isinstance(binding.runs, Yielding) else []
    if tools[name] != binding:
        msg = (
            f"agent {definition.id!r}: its tool {carrier!r} uses a tool {name!r}, and the agent has another "
            "tool with that name; tool names must be unique"
        )
        raise DefinitionError(msg)
    return []


def _resolve_used_agent_id(
    definition: AgentDefinition, carrier: str, wanted: str, tools: Iterable[str], ids: Mapping[str, object]
) -> str:
    """Return the normalised id of an agent that *carrier* carries; raise ``DefinitionError`` if there is none."""
    key = find_matching_id(wanted, ids)
    if key is None:
        msg = (
            f"the tool {carrier!r} of agent {definition.id!r} uses {wanted!r}, but no tool or agent has that name; tools: "
            f"{list_names(sorted(tools), wanted)}; agents: {list_names(ids, wanted)}{did_you_mean(wanted, [*tools, *ids])}"
        )
        raise DefinitionError(msg)
    return key


def _make_agent_tools(
    definition: AgentDefinition, children: Mapping[str, Agent | AgentDefinition], taken_names: Mapping[str, object]
) -> dict[str, ToolBinding]:
    """Return a tool for each spawnable agent if ``spawn_agents`` is among the tools; raise ``DefinitionError`` for a taken name."""
    made: dict[str, ToolBinding] = {}
    for key, child in children.items() if "spawn_agents" in definition.tool_names else ():
        # The definitions are all that is needed, so one may be offered whose own `Agent` is not made yet: families have
        # circles.
        tool = make_spawnable_agent_tool(
            child.definition if isinstance(child, Agent) else child, key if "/" in key else ""
        )
        name = tool.spec.name
        if name in taken_names:
            msg = (
                f"agent {definition.id!r}: its spawnable agent {(key if '/' in key else name.replace('_', '-'))!r} is offered as the tool {name!r}, "
                "but the agent has a tool with that name; rename one of them"
            )
            raise DefinitionError(msg)
        made[name] = tool.binding()
    return made


def _collect_reachable_definitions(
    definitions: Iterable[object],
    carried: Iterable[AgentDefinition],
    other_agents: Mapping[str, object],
    within: packages.PackagedAgent | None = None,
) -> dict[str, AgentDefinition]:
    """
    Return definitions and those that they may spawn, or carry in their tools, by normalised id.

    Where one names ``publisher/name@version``, the agent of that package is meant. Where there is none, or it names an agent
    without a publisher, and neither they nor *other_agents* are called so, a bundled agent is meant. Agents *within* a package name
    those beside them without a publisher.
    """
    found = _index_definitions(definitions)
    waiting = list(found.values())
    met = [(_get_catalog_key(child), child) for child in carried]
    while (
        waiting
        or met
        # In this order: what a package has is in *found* by the time that bundled agents of the same names are looked up.
        or (met := _find_spawnable_packaged_agents(found, other_agents, within))
        or (met := _find_spawnable_bundled_agents(found, other_agents, within))
    ):
        for key, child in met:
            if key not in found:
                found[key] = child
                waiting.append(child)
            # Equal definitions are one agent: a module may be loaded twice, and a tool carry a copy of what is listed
            # as well.
            elif found[key] is not child and found[key] != child:
                raise _make_duplicate_agent_error(child.id)
        met = []
        if waiting and not _is_in_other_package(last := waiting.pop(0), within):
            met = [(_get_catalog_key(child), child) for child in _list_child_definitions(last)]
    return found


def _get_catalog_key(definition: AgentDefinition) -> str:
    """Return the id by which an engine finds an agent; for an agent of a package, ``publisher/name``."""
    return normalised_id(packages.get_published_id(definition))


def _get_key_within_package(key: str, definition: AgentDefinition, sibling: packages.PackagedAgent) -> str:
    """Return the id by which agents of the package of *sibling* name *definition*: their own have no publisher."""
    member = packages.packaged_agent_from_definition(definition)
    return key if member is None or member.package != sibling.package else member.declared.id


def _is_in_other_package(definition: AgentDefinition, within: packages.PackagedAgent | None) -> bool:
    """Return whether an agent belongs to a package other than that of *within*."""
    member = packages.packaged_agent_from_definition(definition)
    return member is not None and (within is None or member.package != within.package)


def _find_spawnable_packaged_agents(
    agents: Mapping[str, AgentDefinition], others: Mapping[str, object], within: packages.PackagedAgent | None
) -> list[tuple[str, AgentDefinition]]:
    """
    Return the packaged agents that *agents* may spawn, each with its key, without those in *agents* or *others*.

    An id with a publisher is its own key. An id without one, in an agent of a package, means an agent of that package or a bundled
    agent; its key is that of ``_get_catalog_key``.
    """
    named: dict[str, AgentDefinition] = {}
    for definition in [d for d in agents.values() if not _is_in_other_package(d, within)]:
        member = packages.packaged_agent_from_definition(definition)
        for wanted in [normalised_id(c.strip()) for c in definition.spawnable_agents if isinstance(c, str)]:
            key, meant = wanted, None
            if wanted in agents or wanted in others:
                continue
            if "/" in wanted:
                other = packages.find_published_agent(wanted)
                meant = None if other is None else other.load()
            elif (
                member is not None and (meant := member.load_sibling(wanted) or find_bundled_agent(wanted)) is not None
            ):
                key = _get_catalog_key(meant)
            if meant is not None and key not in agents:
                named[key] = meant
    return list(named.items())


def _find_spawnable_bundled_agents(
    agents: Mapping[str, AgentDefinition], others: Mapping[str, object], within: packages.PackagedAgent | None
) -> list[tuple[str, AgentDefinition]]:
    """
    Return the bundled agents that *agents* may spawn, each with its id, without those in *agents* or *others*.

    An id without a publisher in an agent of a package is not looked up here: ``_find_spawnable_packaged_agents`` has it.
    """
    named = {
        find_published_name(c) if "/" in c else normalised_id(c.strip())
        for d in agents.values()
        if not _is_in_other_package(d, within)
        for c in d.spawnable_agents
        if isinstance(c, str) and normalised_id(c.strip()) not in agents
        if "/" in c or packages.packaged_agent_from_definition(d) is None
    }
    bundled = [
        find_bundled_agent(name) for name in sorted(filter(None, named)) if name not in agents and name not in others
    ]
    return [(normalised_id(agent.id), agent) for agent in bundled if agent is not None]


def _list_child_definitions(definition: AgentDefinition) -> list[AgentDefinition]:
    """Return the definitions that an agent may spawn as objects, and those that its tools carry; ids are left out."""
    return [
        *[c for c in definition.spawnable_agents if not isinstance(c, str)],
        *list_agents_run_by_tools(definition.tools),
    ]


def _index_definitions(definitions: Iterable[object]) -> dict[str, AgentDefinition]:
    """Return definitions by catalog id; raise ``DefinitionError`` for other objects and repeated ids."""
    found: dict[str, AgentDefinition] = {}
    for definition in definitions:
        if not isinstance(definition, AgentDefinition):
            msg = f"agents must contain AgentDefinition objects, not {definition!r}"
            raise DefinitionError(msg)
        if _get_catalog_key(definition) in found:
            raise _make_duplicate_agent_error(definition.id)
        found[_get_catalog_key(definition)] = definition
    return found


def require_sync_hooks(owner: str, hooks: Hooks) -> None:
    """
    Raise unless every hook is a plain or generator function.

    Raises:
        DefinitionError: naming the owner, the point and the hook.
    """
    for point in HOOK_POINTS:
        for hook in hooks.get_hooks(point):
            name = getattr(hook, "__qualname__", type(hook).__qualname__)
            call = hook if inspect.isroutine(hook) else getattr(hook, "__call__", None)  # noqa: B004
            if not callable(hook):
                msg = f"{owner}: a {point} hook must be a function, not {hook!r}"
                raise DefinitionError(msg)
            if inspect.iscoroutinefunction(call) or inspect.isasyncgenfunction(call):
                msg = (
                    f"{owner}: the {point} hook {name!r} is async; write a plain function, or a generator function that does "
                    "I/O with `yield from Perform(fn, ...)`"
                )
                raise DefinitionError(msg)


def _index_tools(owner: str, tools: Iterable[object]) -> dict[str, ToolLike]:
    """Return tools by name; raise ``DefinitionError`` for other objects and repeated names."""
    named: dict[str, ToolLike] = {}
    for tool in tools:
        if not isinstance(tool, ToolLike):
            hint = "; decorate the function with @tool" if inspect.isroutine(tool) else ""
            if isinstance(tool, str):
                line = format_tools_argument([tool])
                hint = f"; pass {line}" if line else "; names go into the tools of an agent"
            msg = f"{owner}: tools must contain Tool objects, not {tool!r}{hint}"
            raise DefinitionError(msg)
        name = tool.spec.name
        if name in named:
            msg = f"{owner}: two tools have the name {name!r}; tool names must be unique"
            raise DefinitionError(msg)
        named[name] = tool
    return named


def _make_duplicate_agent_error(agent_id: str) -> DefinitionError:
    msg = f"two agents have the id {agent_id!r} ('_' counts as '-'); ids must be unique in an engine"
    return DefinitionError(msg)


def _make_unknown_tools_error(
    definition: AgentDefinition, names: Sequence[str], known_names: Iterable[str], workspace: WorkspaceTools
) -> DefinitionError:
    """Return the error for tools that the engine does not have; for bundled tools, it shows the argument that adds them."""
    of_workspace = [n for n in names if n in WORKSPACE_TOOLS]
    bundled = [n for n in names if n in MAKERS and n not in WORKSPACE_TOOLS]
    all_known = [*known_names, *MAKERS, *WORKSPACE_TOOLS]
    parts = [f"which the engine does not have; available: {list_names(sorted(known_names), names[0])}"]
    if of_workspace:
        line = f"{workspace.format_workspace_argument(of_workspace)}, with `from stepengine import Workspace`"
        parts.append(f"{_format_names_with_verb(of_workspace)} with stepengine: pass the engine {line}")
    if bundled:
        parts.append(
            f"{_format_names_with_verb(bundled)} with stepengine: pass the engine {format_tools_argument(bundled)}"
        )
    strange = [n for n in names if n not in all_known]
    parts += [f"{name!r} does not exist{did_you_mean(name, all_known)}" for name in strange]
    told = " ".join([part if part.endswith("?") else f"{part}." for part in parts]).removesuffix(".")
    msg = f"agent {definition.id!r} lists the tool{'s' * (len(names) > 1)} {', '.join(map(repr, names))}, {told}"
    return DefinitionError(msg)


def _format_names_with_verb(names: Sequence[str]) -> str:
    """Return the quoted names, followed by "come", or "comes" for a single name."""
    return f"{', '.join(map(repr, names))} come{'s' * (len(names) == 1)}"


def _make_unknown_agent_hint(agent_id: str, known_ids: Iterable[str]) -> str:
    """Return a hint for an unknown agent id: that the agent is bundled, or a similar id."""
    found = find_bundled_id(agent_id)
    if found is not None:
        return f"; it comes with stepengine: pass load_agent({found!r})"
    return did_you_mean(normalised_id(agent_id), [*known_ids, *list_bundled_ids()])


# --- what an agent is told of the others: which it may run, and which tools are its own -------------------


def make_instructions_note(agent: Agent, inherited: Sequence[ToolSpec] | None) -> str:
    """
    Return the note for the instructions of a run: the agents and, of inherited tools, those it may use; ``""`` if there is none.

    Args:
        agent: The agent that runs.
        inherited: The tool definitions that it inherits, if it does; then it is told what it may really call.
    """
    children = {key: agent.get_child(key).definition for key in agent.spawnable} if _has_spawning_tool(agent) else {}
    if inherited is None:
        lines = [f"- {_describe_child(key, child)}" for key, child in children.items()]
        text = "\n".join([MAY_RUN, *lines]) if lines else ""
    else:
        text = "\n\n".join(
            [
                _describe_own_tools(agent, inherited),
                *[_describe_child_in_full(key, child) for key, child in children.items()],
            ]
        )
    return system_reminder(text) if text else ""


def remove_instructions_notes(history: Transcript) -> Transcript:
    """Return *history* without the notes of ``make_instructions_note`` in its instruction messages; they are for one agent."""
    if not any(
        isinstance(m, UserMessage) and "INSTRUCTIONS_PROMPT" in m.tags and NOTES.search(m.text) for m in history
    ):
        return history
    return Transcript([left for m in history if (left := _remove_instructions_note(m)) is not None])


def _remove_instructions_note(message: Message) -> Message | None:
    """Return *message* without notes of ``make_instructions_note``; ``None`` if nothing else is in it."""
    if not isinstance(message, UserMessage) or "INSTRUCTIONS_PROMPT" not in message.tags:
        return message
    left = NOTES.sub("", message.text).strip()
    if left == message.text:
        return message
    return attrs.evolve(message, content=(TextPart(left),)) if left else None


def _has_spawning_tool(agent: Agent) -> bool:
    return any(name in agent.offered for name in SPAWNERS)


def _describe_child(key: str, child: AgentDefinition[object]) -> str:
    """Return an agent's id and description; an agent of another package is named with its publisher."""
    known = child.description or (child.display_name if child.display_name != child.id else "")
    named = key if "/" in key else child.id
    return f"{named}: {known}" if known else named


def _describe_own_tools(agent: Agent, inherited: Sequence[ToolSpec]) -> str:
    """Return a text with the tools that an agent may call, and with the specifications of those missing in *inherited*."""
    own = [*agent.offered, *(["set_output"] if agent.schemas.output is not None else [])]
    names = ", ".join(dict.fromkeys(own)) or "none"
    shown = {spec.name for spec in inherited}
    lines = [f"{SHOWN_TOOLS} Of these and all others you may call only: {names}. A call of any other tool is refused."]
    for name, spec in agent.specs.items():
        if name not in shown:
            # Into the instructions of an agent with an output schema the machine writes that schema itself.
            is_told = name == "set_output" and agent.schemas.output is not None
            schema = "" if is_told else f"\n  Its input: {compact(spec.input_schema)}"
            lines.append(f"- {name}: {spec.description}{schema}")
    return "\n".join(lines)


def _describe_child_in_full(key: str, child: AgentDefinition[object]) -> str:
    """Return an agent's id and description, with the description of its prompt and the schema of its params."""
    lines = [f"You may run the agent {_describe_child(key, child)}"]
    if child.input_schema is not None and child.input_schema.prompt:
        lines.append(f"Its prompt: {child.input_schema.prompt}")
    params = get_params_schema(child)
    if params is not None:
        lines.append(f"Its params: {compact(params)}")
    return "\n".join(lines)
