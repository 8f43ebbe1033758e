"""The tools of a run on the command line: the tools that its agents name, if the options or a person can allow them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import attrs
from attrs import frozen

from stepengine.cli.approvals import (
    OPTIONS,
    choose_categories_to_ask_about,
    collect_tool_specs,
    get_disallowed_categories,
    list_tools_needing_approval,
    make_category_approval_policy,
)
from stepengine.cli.options import Options
from stepengine.cli.settings import UsageProblem
from stepengine.cli.state_folder import EDITORS, HISTORY
from stepengine.data.definition import AgentDefinition, ToolSource
from stepengine.data.tools import ToolLike, ToolSpec, Yielding
from stepengine.errors import DefinitionError, WorkspaceLost
from stepengine.journal.recorded_runs import get_runs_folder
from stepengine.workspace.patterns import escape_pattern

if TYPE_CHECKING:
    from stepengine.journal.history import History
    from stepengine.permissions import Policy
    from stepengine.tools.definition import Tool
    from stepengine.workspace.workspace import Workspace

WEB = "network"
"""The category of the bundled tools that need an address, which ``--web`` gives."""


@frozen
class ToolRequest:
    """
    The agents of a run and the tools they need.

    Attributes:
        families: Each agent that can be started, followed by those that it may spawn.
        file_tools: The tools at module level of their files.
        journals: Journals that tools must not show, because a search would find its own input and output in them.
        can_ask: Whether a person can approve a call that the options do not allow.
        is_judged: Whether the user has set a policy, which judges the calls of all tools.
    """

    families: Sequence[Sequence[AgentDefinition]]
    file_tools: Sequence[ToolLike | ToolSource] = ()
    journals: Sequence[str] = ()
    can_ask: bool = False
    is_judged: bool = False

    @property
    def agents(self) -> list[AgentDefinition]:
        """All agents, those in several families several times."""
        return [agent for family in self.families for agent in family]

    def list_bundled_names(self, agent: AgentDefinition) -> list[str]:
        """Return the names of bundled tools that *agent* and the bodies of its tools use."""
        own = {spec.name for spec in collect_tool_specs([*agent.tools, *self.file_tools])}
        names = [one for one in agent.tools if isinstance(one, str)]
        return [name for name in (*names, *_list_called_tool_names(agent)) if name not in own]

    @property
    def all_bundled_names(self) -> list[str]:
        """The names of bundled tools in all agents; a name occurs once for each agent that uses it."""
        return [name for agent in self.agents for name in self.list_bundled_names(agent)]

    def list_bundled_specs(self, agent: AgentDefinition) -> list[ToolSpec]:
        """Return the specs of ``list_bundled_names``."""
        names = self.list_bundled_names(agent)
        return [spec for name, spec in _load_bundled_specs().items() if name in names] if names else []

    def list_all_specs(self, agent: AgentDefinition) -> list[ToolSpec]:
        """Return the specs of the bundled tools that *agent* names, of its own tools and of those of its file."""
        return [*self.list_bundled_specs(agent), *collect_tool_specs([*self.file_tools, *agent.tools])]

    def make_approval_policy(self, options: Options, recorded: History | None) -> Policy | None:
        """Return the policy that asks about calls without an allowing option; a recorded run asks as before."""
        specs = {spec.name: spec for agent in self.agents for spec in self.list_all_specs(agent)}
        categories = get_disallowed_categories(options)
        if recorded is not None:
            categories = choose_categories_to_ask_about(recorded, specs, categories)
        return make_category_approval_policy(categories, specs.values())

    def allow_categories_of_bundled_tools(self, options: Options) -> Options:
        """Return *options* that also allow the categories of the agents' bundled tools if a person can approve each call; else as given."""
        if not self.can_ask:
            return options
        named = {spec.category for agent in self.agents for spec in self.list_bundled_specs(agent)}
        write, shell = options.write or "write" in named, options.shell or "execute" in named
        return attrs.evolve(options, write=write, shell=shell)

    def refuse_missing_options(self, options: Options) -> None:
        """
        Raise if agents need tools that the options do not allow and no person can approve.

        Raises:
            UsageProblem: naming the agent, the tools and the option.
        """
        for category, (does, option) in OPTIONS.items():
            if not self.can_ask and category in get_disallowed_categories(options):
                self._refuse_tools_of_category(category, does, option)
        if not options.web:
            self._refuse_tools_of_category(WEB, "reaches the web", "--web URL, the address of a SearXNG instance")

    def _refuse_tools_of_category(self, category: str, does: str, option: str) -> None:
        """Raise ``UsageProblem`` if an agent has a tool of *category* that the options do not allow; the message names *option*."""
        # An agent that has the tool itself is named before one that only spawns it.
        for family in sorted(self.families, key=lambda family: not self._list_tools_of_category(family[0], category)):
            if names := {name for agent in family for name in self._list_tools_of_category(agent, category)}:
                msg = f"agent {family[0].id!r} {does} with {', '.join(sorted(names))}; allow that with {option}"
                raise UsageProblem(msg)

    def _list_tools_of_category(self, agent: AgentDefinition, category: str) -> list[str]:
        """Return the names of the agent's tools in *category*. For ``web``, or if ``is_judged``, only bundled tools count."""
        bundled = [spec.name for spec in self.list_bundled_specs(agent) if spec.category == category]
        if category == WEB or self.is_judged:
            return bundled
        return [*bundled, *list_tools_needing_approval(collect_tool_specs([*self.file_tools, *agent.tools]), category)]


def merge_bundled_tools(
    own: Sequence[ToolLike | ToolSource], bundled: Iterable[ToolLike]
) -> list[ToolLike | ToolSource]:
    """Return the *own* tools and then the *bundled* ones, except bundled tools with the name of an own tool."""
    names = {tool.spec.name if isinstance(tool, ToolLike) else tool.name for tool in own}
    return [*own, *[tool for tool in bundled if tool.spec.name not in names]]


@cache
def _load_bundled_specs() -> dict[str, ToolSpec]:
    """Return the specs of all bundled tools by name; they are the same for every root."""
    from stepengine.tools.bundled.bundled import list_all_workspace_tools

    return {tool.name: tool.spec for tool in list_all_workspace_tools()}


def _make_journal_patterns(journal: str, root: Path) -> list[str]:
    """Return glob patterns for the files of a journal below *root*."""
    if not journal:
        return []
    from stepengine.journal.sources import get_journal_file, parse_database_path

    database = parse_database_path(journal)
    path = get_journal_file(journal)
    place = path.parent.resolve() / path.name
    if not place.is_relative_to(root):
        return []
    file = place.relative_to(root)
    folder = "" if file.parent == Path() else f"{escape_pattern(file.parent.as_posix())}/"
    stem, suffix, name = map(escape_pattern, (file.stem, file.suffix, file.name))
    more = f"{stem}.before-*{suffix}" if database is None else f"{name}-*"
    return [f"{folder}{name}", f"{folder}{more}"]


def _make_state_patterns(root: Path) -> list[str]:
    """Return glob patterns for recorded runs, editor sessions and chat history below *root*."""
    runs = get_runs_folder()
    kept = [] if runs is None else [(runs, "/"), (runs.parent / EDITORS, "/"), (runs.parent / HISTORY, "")]
    return [
        f"{escape_pattern(place.relative_to(root).as_posix())}{end}"
        for place, end in kept
        if place.is_relative_to(root)
    ]


def make_allowed_workspace(options: Options, request: ToolRequest) -> Workspace:
    """
    Return the workspace of the tools, with the access that the options allow or a person can approve.

    Raises:
        UsageProblem: when a tool that an agent names needs an option that was not given.
    """
    from stepengine.workspace.workspace import Workspace

    options = request.allow_categories_of_bundled_tools(options)
    request.refuse_missing_options(options)
    place: Workspace = options.place or Workspace(options.cwd.resolve())
    try:
        # With --shell a program may be `bash -c` anyhow; without it a person is asked about each command line.
        shell: bool | Literal["bash"] = "bash" if options.shell else False
        return place.with_access(write=options.write, shell=shell, web=options.web or None)
    except DefinitionError as error:
        msg = f"--web: {error.message}"
        raise UsageProblem(msg) from None


def make_allowed_tools(options: Options, request: ToolRequest, workspace: Workspace) -> list[ToolLike | ToolSource]:
    """
    Return the tools of the agents' files and the bundled tools that *workspace* allows; they do not see recorded runs.

    Raises:
        UsageProblem: when a tool that an agent names cannot work in the workspace.
    """
    from stepengine.tools.bundled.bundled import rootless_tools, workspace_tools

    root, tools = options.cwd.resolve(), rootless_tools(workspace.web)
    hidden = [
        *_make_state_patterns(root),
        *[pattern for journal in request.journals for pattern in _make_journal_patterns(journal, root)],
    ]
    try:
        tools += workspace_tools(workspace, withhold=hidden, buffers=options.buffers, terminals=options.terminals)
    except WorkspaceLost as error:
        msg = f"--workspace {options.workspace}: {error.message}"
        raise UsageProblem(msg) from None
    except DefinitionError as error:
        rootless = {tool.name for tool in tools}
        if local := sorted(
            [name for name in request.all_bundled_names if name in _load_bundled_specs() and name not in rootless]
        ):
            why = error.message.partition(";")[0]
            msg = f"{', '.join(local)} cannot work in this folder: {why}; name a project folder with --cwd"
            raise UsageProblem(msg) from None
    return merge_bundled_tools(request.file_tools, tools)


def _list_called_tool_names(agent: AgentDefinition) -> list[str]:
    """Return the names of tools that an agent's own tools call in their bodies."""
    own = [tool for tool in agent.tools if isinstance(tool, ToolLike)]
    bodies = [tool.binding().runs for tool in own]
    uses = [one for body in bodies if isinstance(body, Yielding) for one in body.uses]
    return [one for one in uses if isinstance(one, str)]


def collect_with_spawnable_agents(agents: Iterable[AgentDefinition]) -> list[AgentDefinition]:
    """Return *agents* and the agent definitions that they may spawn, each once."""
    found: list[AgentDefinition] = []
    waiting = list(agents)
    for agent in waiting:
        if not any(agent is one for one in found):
            found.append(agent)
            waiting += [child for child in agent.spawnable_agents if isinstance(child, AgentDefinition)]
    return found


def load_module_tools(options: Options, agents: Sequence[AgentDefinition]) -> list[ToolLike | ToolSource]:
    """
    Return the tools that the files of *agents* hold at module level, ``tools = [...]``, each once.

    Raises:
        DefinitionError: when two files have different tools of one name.
    """
    from stepengine.engine.loader import load_tools_of_file, merge_tools

    return merge_tools({file: load_tools_of_file(file) for file in _find_agent_files(options, agents)})


def _find_agent_files(options: Options, agents: Sequence[AgentDefinition]) -> list[Path]:
    """Return the files of *agents* that are imported: the typed one and those found by id."""
    from stepengine.engine.loader import AgentLocation, find_agent_location
    from stepengine.engine.packages import packaged_agent_from_definition

    typed = AgentLocation.from_text(options.agent) if options.agent else None
    beside = set() if typed is None else {one.id for one in typed.load_all()}
    found: list[Path] = []
    for agent in agents:
        if packaged_agent_from_definition(agent) is not None:
            continue
        place = typed if agent.id in beside else None
        with contextlib.suppress(DefinitionError):
            # `locate_agent` would also read the metadata of all packages to explain a failure, for each sample of an evaluation.
            place = place or find_agent_location(agent.id, folders=options.settings.agent_folders)
        if place is not None and not place.sandboxed:
            found.append(place.file)
    return list(dict.fromkeys(found))


# --- code mode --------------------------------------------------------------------------------------------------------


RUN_CODE = "run_code"
"""The name of the tool with which a model runs programs that call the other tools."""


def convert_to_code_mode(agent: AgentDefinition) -> AgentDefinition:
    """
    Return an agent whose model calls its tools from programs; engine and server tools are called as before.

    Raises:
        UsageProblem: when the agent has a handler, a tool of that name, or no tool that a program may call.
    """
    from stepengine.sandbox import code_mode
    from stepengine.tools.definition import Tool

    problem = ""
    if agent.handle_steps is not None:
        problem = "has a handler that calls its tools; add code_mode(...) to its tools in its file"
    elif RUN_CODE in agent.tool_names:
        problem = f"has a tool {RUN_CODE} already"
    inside: dict[int, Tool[..., Any] | ToolSpec] = {}
    for place, one in enumerate(agent.tools):
        known = _load_bundled_specs().get(one) if isinstance(one, str) else one
        if isinstance(known, Tool | ToolSpec) and _can_run_in_programs(known):
            inside[place] = known
    if not problem and not inside:
        problem = "has no tools that programs may call"
    if problem:
        msg = f"--code-mode: agent {agent.id!r} {problem}"
        raise UsageProblem(msg)
    beside = [one for place, one in enumerate(agent.tools) if place not in inside]
    return attrs.evolve(agent, tools=[code_mode(*inside.values()), *beside])


def _can_run_in_programs(tool: Tool[..., Any] | ToolSpec) -> bool:
    """Return whether programs may call a tool: it neither ends the turn nor controls the run."""
    spec = tool if isinstance(tool, ToolSpec) else tool.spec
    return not spec.ends_turn and spec.category != "control"


def was_in_code_mode(history: History, agent: AgentDefinition) -> bool:
    """Return whether a run was recorded with ``--code-mode``: its model had the tool ``run_code``, and *agent* itself does not have it."""
    if agent.handle_steps is not None or RUN_CODE in agent.tool_names:
        return False
    intents = [each for each in history.intents.values() if not each.path and each.type == "model_call"]
    tools = history.form(intents[0])["request"].get("tools", ()) if intents else ()
    return RUN_CODE in [tool["name"] for tool in tools]
