"""The tools of a run on the command line: what the agents name, as far as the options allow it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from stepengine.cli.options import Options
from stepengine.cli.recording import EDITORS, HISTORY, runs_folder
from stepengine.cli.settings import UsageProblem
from stepengine.data.definition import AgentDefinition
from stepengine.data.tools import ToolLike, ToolSpec, Yielding
from stepengine.errors import DefinitionError, WorkspaceLost
from stepengine.system.patterns import escape_pattern

if TYPE_CHECKING:
    from stepengine.journal.history import History
    from stepengine.tooling.definition import Tool

__all__ = ("allowed_tools", "in_code_mode", "is_in_code_mode", "uncalled_tools")

FLAGS = (
    ("write", "changes files", "--write"),
    ("execute", "runs programs", "--shell"),
    ("network", "reaches the web", "--web URL, the address of a SearXNG instance"),
)
"""Category of tools, what they do, and the option that allows it."""


def uncalled_tools(root: Path) -> list[ToolLike]:
    """Return the tools for their names and schemas: what they may touch does not matter, they are never called."""
    from stepengine.tools import file_tools, search_tools, shell_tools

    files = file_tools(root, write=True, propose=True, allow_wide_root=True)
    searches, shell = search_tools(root, allow_wide_root=True), shell_tools(root, allow_wide_root=True, watch=True)
    return [*files, *searches, *shell, *_harmless_tools(), *_web_tools("http://localhost")]


CHILDREN = ("start_agents", "wait_agents", "message_agent", "cancel_agent", "list_agents")
LOCAL = ("file_tools", "search_tools")
HARMLESS = ("suggest_followups", *CHILDREN, "sleep", "recall_history")
"""The tools that no option has to allow: what they start is judged by itself."""


def _harmless_tools() -> list[Tool]:
    from stepengine.tools import child_tools, followup_tools, recall_history_tool, sleep_tool

    return [*followup_tools(), *child_tools(), sleep_tool(), recall_history_tool()]


@cache
def _specs() -> dict[str, ToolSpec]:
    """Return what the tools are called and say of themselves, which is the same below every root."""
    return {tool.spec.name: tool.spec for tool in uncalled_tools(Path("/"))}


def _web_tools(searxng: str) -> list[ToolLike]:
    """Return the tools that reach the public web; searches go to the SearXNG instance at that address."""
    from stepengine.tools import SafeFetcher, SearchedDocs, SearxngSearch, web_tools

    search, fetcher = SearxngSearch(searxng), SafeFetcher(allow="public")
    return [*web_tools(search, SearchedDocs(search, fetcher), fetcher)]


def _files_of(journal: str, root: Path) -> list[str]:
    """Return patterns of the files of a journal that are below *root*."""
    if not journal:
        return []
    from stepengine.journal.finding import database_of

    database = database_of(journal)
    path = Path(journal if database is None else database[0])
    place = path.parent.resolve() / path.name
    if not place.is_relative_to(root):
        return []
    file = place.relative_to(root)
    folder = "" if file.parent == Path() else f"{escape_pattern(file.parent.as_posix())}/"
    stem, suffix, name = map(escape_pattern, (file.stem, file.suffix, file.name))
    more = f"{stem}.before-*{suffix}" if database is None else f"{name}-*"
    return [f"{folder}{name}", f"{folder}{more}"]


def _kept_below(root: Path) -> list[str]:
    """Return the patterns of what is kept of runs, editors' sessions and chats, as far as it is below *root*."""
    runs = runs_folder()
    kept = [] if runs is None else [(runs, "/"), (runs.parent / EDITORS, "/"), (runs.parent / HISTORY, "")]
    return [
        f"{escape_pattern(place.relative_to(root).as_posix())}{end}"
        for place, end in kept
        if place.is_relative_to(root)
    ]


def allowed_tools(options: Options, agents: list[AgentDefinition], journals: Sequence[str] = ()) -> list[ToolLike]:
    """
    Return the tools that the options allow; they do not show *journals*, in which they would find what they say themselves.

    Raises:
        UsageProblem: when a tool that an agent names cannot work, or needs an option that was not given.
    """
    from stepengine.tooling.definition import late_tools, name_of

    named = [name for agent in agents for name in (*agent.tool_names, *_used_names(agent))]
    root = options.cwd.resolve()
    hidden = [*_kept_below(root), *[pattern for journal in journals for pattern in _files_of(journal, root)]]
    make = partial(_local_tools, options, root, hidden)
    tools: list[ToolLike] = []
    try:
        tools += make() if named or _is_special(options, root) else _late_tools(options, root, make)
    except WorkspaceLost as error:
        msg = f"--workspace {options.workspace}: {error.message}"
        raise UsageProblem(msg) from None
    except DefinitionError as error:
        if local := sorted([name for name in named if name in _specs() and _specs()[name].category != "network"]):
            why = error.message.partition(";")[0]
            msg = f"{', '.join(local)} cannot work there: {why}; name a project folder with --cwd"
            raise UsageProblem(msg) from None
    tools += late_tools(HARMLESS, _harmless_tools)
    if options.web:
        try:
            tools += _web_tools(options.web)
        except DefinitionError as error:
            msg = f"--web: {error.message}"
            raise UsageProblem(msg) from None
    missing = {*named} - {name_of(tool) for tool in tools}
    # Where all are there, nothing has to be built to know what those are that are not.
    unmet = {name: spec for name, spec in _specs().items() if name in missing} if missing else {}
    for category, does, flag in FLAGS:
        if names := sorted([name for name, spec in unmet.items() if spec.category == category]):
            msg = f"agent {agents[0].id!r} {does} with {', '.join(names)}; allow that with {flag}"
            raise UsageProblem(msg)
    return tools


def _local_tools(options: Options, root: Path, hidden: Sequence[str]) -> list[Tool]:
    """Return the tools that work in the folder, or in the place that ``--workspace`` names."""
    from stepengine.tools import file_tools, search_tools, shell_tools

    where = root if options.place is None else options.place
    tools = [
        *file_tools(where, write=options.write, propose=True, withhold=hidden, buffers=options.buffers),
        *search_tools(where, withhold=hidden),
    ]
    return tools + shell_tools(where, terminals=options.terminals, watch=True) if options.shell else tools


def _is_special(options: Options, root: Path) -> bool:
    """Return whether making the tools of the folder may fail, or there are others than in every run."""
    from stepengine.system.path_policy import is_wide

    is_plain = not options.shell and options.place is None and options.buffers is None
    return not is_plain or not os.access(root, os.R_OK | os.X_OK) or is_wide(root.stat())


def _late_tools(options: Options, root: Path, make: Callable[[], list[Tool]]) -> list[Tool]:
    """
    Return the tools that *make* makes below *root*, made when a handler first calls one of them.

    No agent names any, so most runs call none, and what makes them takes 6 ms of a start.
    """
    from stepengine.tooling.definition import late_tools
    from stepengine.tooling.makers import MAKERS

    given = {'"."', "propose=True", *(["write=True"] if options.write else [])}
    names = [name for name, by in MAKERS.items() if by and by.function in LOCAL and given >= {*by.arguments}]
    tools = late_tools(names, make)
    folder = tuple([part for part in os.path.realpath(root).split("/") if part])
    for tool in tools:
        tool.folder = folder
    return tools


def _used_names(agent: AgentDefinition) -> list[str]:
    """Return the names of tools that an agent's own tools call in their bodies."""
    own = [tool for tool in agent.tools if isinstance(tool, ToolLike)]
    bodies = [tool.binding().runs for tool in own]
    uses = [one for body in bodies if isinstance(body, Yielding) for one in body.uses]
    return [one for one in uses if isinstance(one, str)]


# --- code mode --------------------------------------------------------------------------------------------------------


RUN_CODE = "run_code"
"""What the tool is called by which a model writes programs over the others."""


def in_code_mode(agent: AgentDefinition) -> AgentDefinition:
    """
    Return an agent whose model calls its tools by programs; tools of the engine itself, and of servers, it calls as before.

    Raises:
        UsageProblem: when the agent has a handler, a tool of that name, or no tool that a program may call.
    """
    from stepengine.programs import code_mode
    from stepengine.tooling.definition import Tool

    problem = ""
    if agent.handle_steps is not None:
        problem = "has a handler, which calls its tools by itself; give it code_mode(...) among its tools in its file"
    elif RUN_CODE in agent.tool_names:
        problem = f"has a tool {RUN_CODE} already"
    inside: dict[int, Tool[..., Any] | ToolSpec] = {}
    for place, one in enumerate(agent.tools):
        known = _specs().get(one) if isinstance(one, str) else one
        if isinstance(known, Tool | ToolSpec) and _is_for_programs(known):
            inside[place] = known
    if not problem and not inside:
        problem = "has no tools that programs may call"
    if problem:
        msg = f"--code-mode: agent {agent.id!r} {problem}"
        raise UsageProblem(msg)
    beside = [one for place, one in enumerate(agent.tools) if place not in inside]
    return attrs.evolve(agent, tools=[code_mode(*inside.values()), *beside])


def _is_for_programs(tool: Tool[..., Any] | ToolSpec) -> bool:
    spec = tool if isinstance(tool, ToolSpec) else tool.spec
    return not spec.ends_turn and spec.category != "control"


def is_in_code_mode(history: History, agent: AgentDefinition) -> bool:
    """Return whether a run was recorded with ``--code-mode``: its model was shown a tool that the agent has not."""
    if agent.handle_steps is not None or RUN_CODE in agent.tool_names:
        return False
    intents = [each for each in history.intents.values() if not each.path and each.type == "CallModel"]
    tools = history.form(intents[0])["request"].get("tools", ()) if intents else ()
    return RUN_CODE in [tool["name"] for tool in tools]
