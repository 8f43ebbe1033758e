"""``stepengine agents list``: the agents that can be run, as a list or as a tree of the agents that they may spawn."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from stepengine.cli.exits import Exit, print_error
from stepengine.cli.options import Config
from stepengine.cli.screen.render import can_draw_lines, format_error, print_visible, to_ascii_json, visible
from stepengine.cli.settings import UsageProblem, load_settings
from stepengine.data.definition import AgentDefinition, find_published_name, normalised_id
from stepengine.tools.agent_tools import list_agents_run_by_tools

if TYPE_CHECKING:
    from stepengine.engine import ListedAgent
    from stepengine.engine.packages import Package


def agents(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON array.")] = False,
    as_tree: Annotated[bool, typer.Option("--tree", help="Show as a tree which agents each agent may start.")] = False,
    config: Config = None,
) -> Exit:
    r"""
    List the agents that can be run.

    Lists agents in ./agents, shipped agents, and those of installed packages, with their description, tools and
    file. The setting `agents` adds folders.

    Packages are not imported for this: version, requested access and your approval (`stepengine agents agree`) come
    from their metadata.

    Examples:
      stepengine agents list
      stepengine agents list --tree
      stepengine run code_searcher \
          --params '{"search_queries": [{"pattern": "def main"}]}'
      stepengine run publisher/reviewer "Look at it"
    """
    from stepengine.engine import list_agents
    from stepengine.engine.packages import list_installed_agent_packages

    if as_json and as_tree:
        msg = "--tree and --json exclude each other; --json lists the spawnable_agents of each agent"
        raise UsageProblem(msg)
    entries, found = list_agents(load_settings(config).agent_folders), list_installed_agent_packages()
    if as_tree:
        known = [e.agent for e in entries if e.agent is not None and e.hidden_by is None]
        print("\n".join([_to_box_drawing(line) for line in format_agent_tree(known)]))
    elif as_json:
        print(
            to_ascii_json(
                [
                    *[_agent_to_dict(e) for e in entries if e.agent is not None],
                    *_packages_to_agent_dicts(found.packages),
                ]
            )
        )
    else:
        shown = [
            *[_describe_agent(e) for e in entries if e.agent is not None],
            *map(_format_agents_of_package, found.packages),
        ]
        print_visible("\n\n".join(shown), hanging_indent=8)
    for entry in entries:
        if entry.problem is not None:
            print_error(format_error(entry.problem))
    for problem in [*found.problems.values(), *_describe_duplicate_ids(found.packages)]:
        print_error(problem)
    return Exit.COMPLETED


def _agent_to_dict(entry: ListedAgent) -> dict[str, object]:
    """Return an agent as JSON values for ``--json``."""
    agent: Any = entry.agent
    return {
        "id": agent.id,
        "description": agent.description,
        "model": agent.model,
        "tools": list(agent.tool_names),
        "spawnable_agents": list(agent.spawnable_ids),
        "source": str(entry.source),
        "hidden_by": entry.hidden_by and str(entry.hidden_by),
    }


def _describe_agent(entry: ListedAgent) -> str:
    """Return an agent as lines: id, description, tools, children, model and source."""
    agent: Any = entry.agent
    lines = [
        agent.id,
        f"  {visible(agent.description, strict=True)}" if agent.description else "",
        f"  tools   {', '.join(agent.tool_names) or 'none'}",
        f"  spawns  {', '.join(agent.spawnable_ids)}" if agent.spawnable_ids else "",
        f"  model   {visible(agent.model, strict=True)}" if agent.model else "",
        f"  source  {visible(str(entry.source), strict=True)}",
        f"  hidden: the id refers to {visible(str(entry.hidden_by), strict=True)}" if entry.hidden_by else "",
    ]
    return "\n".join([line for line in lines if line])


def _format_agents_of_package(package: Package) -> str:
    """Return a block of lines for each agent of a package: tools, children, source and requested access."""
    from stepengine.engine.trust import find_unapproved_access

    missing = find_unapproved_access(package.access_request)
    agreed = "approved" if missing == () else f"not approved: {package.access_request.approve_command}"
    folders = [
        f"reads {', '.join(package.reads)}" * bool(package.reads),
        f"writes {', '.join(package.writes)}" * bool(package.writes),
    ]
    wants = ", ".join([*filter(None, folders), *[f"host {host}" for host in package.hosts]])
    blocks = []
    for agent_id, agent in package.agents.items():
        tools = ", ".join([f"{name} ({kind})" if kind else name for name, kind in agent.tools.items()])
        lines = [
            f"{package.publisher}/{agent_id}",
            f"  {visible(agent.description, strict=True)}" if agent.description else "",
            f"  tools   {visible(tools, strict=True) or 'none'}",
            f"  spawns  {visible(', '.join(agent.spawns), strict=True)}" if agent.spawns else "",
            f"  package {visible(str(package), strict=True)}; publisher {package.publisher}; {agreed}",
            f"  requests {visible(wants, strict=True)} (declared by the package, not enforced)" if wants else "",
        ]
        blocks.append("\n".join([line for line in lines if line]))
    return "\n\n".join(blocks)


def _packages_to_agent_dicts(packages: Iterable[Package]) -> Iterator[dict[str, object]]:
    """Yield each agent of installed packages as JSON values, with the approval of its package."""
    from stepengine.engine.trust import find_unapproved_access

    for package in packages:
        for agent_id, agent in package.agents.items():
            yield {
                "id": f"{package.publisher}/{agent_id}",
                "description": agent.description,
                "model": None,
                "tools": list(agent.tools),
                "spawnable_agents": list(agent.spawns),
                "source": str(package.folder),
                "hidden_by": None,
                "publisher": package.publisher,
                "package": package.name,
                "version": package.version,
                "categories": dict(agent.tools),
                "reads": list(package.reads),
                "writes": list(package.writes),
                "hosts": list(package.hosts),
                "agreed": find_unapproved_access(package.access_request) == (),
            }


def _describe_duplicate_ids(packages: Sequence[Package]) -> Iterator[str]:
    """Yield a message for each agent id of several packages, since it is ambiguous."""
    having: dict[str, list[str]] = {}
    for package in packages:
        for agent_id in package.agents:
            having.setdefault(f"{package.publisher}/{agent_id}", []).append(str(package))
    for agent_id, several in having.items():
        if len(several) > 1:
            yield f"{agent_id!r} is an agent of both {' and '.join(several)}, so it is ambiguous; uninstall one of them"


Children: TypeAlias = Mapping[str, Sequence[str]]
LINES = {"|-- ": "\u251c\u2500\u2500 ", "`-- ": "\u2514\u2500\u2500 ", "|   ": "\u2502   "}
"""The box-drawing characters for the lines of a tree."""


def _to_box_drawing(line: str) -> str:
    """Return a line of a tree with box-drawing characters if stdout can encode them."""
    for mark, drawn in LINES.items() if can_draw_lines() else ():
        line = line.replace(mark, drawn)
    return line


def format_agent_tree(agents: Iterable[AgentDefinition]) -> list[str]:
    """
    Return the agents as lines of a tree, each below every agent that may spawn it.

    The top level has the agents that no other may spawn, then one agent of each cycle that no other agent leads to. The line of an agent
    is marked if it closes a cycle, was shown with its children before, or does not exist.
    """
    children = _map_child_ids(agents)
    spawned = {child for key, below in children.items() for child in below if child != key}
    lines: list[str] = []
    shown: set[str] = set()
    for key in [*[k for k in children if k not in spawned], *children]:
        if key not in shown:
            lines.append(key)
            lines += _format_child_lines(key, children, (key,), shown, "")
    return lines


def _map_child_ids(agents: Iterable[AgentDefinition]) -> dict[str, list[str]]:
    """Return the ids of the agents that each agent may spawn, nested definitions included."""
    found: dict[str, list[str]] = {}
    waiting = list(agents)
    while waiting:
        agent = waiting.pop(0)
        key = normalised_id(agent.id)
        if key in found:
            continue
        given = [*agent.spawnable_agents, *list_agents_run_by_tools(agent.tools)]
        ids = [c if isinstance(c, str) else c.id for c in given]
        # A published agent is looked up by its name.
        found[key] = list(dict.fromkeys([find_published_name(one) or normalised_id(one) for one in ids]))
        waiting += [c for c in given if not isinstance(c, str)]
    return found


def _format_child_lines(
    key: str, children: Children, trail: tuple[str, ...], shown: set[str], indent: str
) -> Iterator[str]:
    """Yield the lines of the children of an agent, and add the agents in them to *shown*."""
    shown.add(key)
    below = children.get(key, ())
    for index, child in enumerate(below):
        last = index == len(below) - 1
        again = child in shown and children.get(child)
        note = " (circle)" if child in trail else " (see above)" if again else ""
        missing = "" if child in children else " (not found)"
        yield f"{indent}{'`-- ' if last else '|-- '}{child}{note}{missing}"
        if not note and not missing:
            yield from _format_child_lines(
                child, children, (*trail, child), shown, f"{indent}{'    ' if last else '|   '}"
            )
