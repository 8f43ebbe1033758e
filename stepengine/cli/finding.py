"""Finding agents: the list of those that can be named, and one with everything that it may spawn."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import attrs

from stepengine.cli.report import Exit, message_of
from stepengine.cli.screen import dumps, visible
from stepengine.cli.settings import UsageProblem, in_force
from stepengine.cli.spawning import tree_lines
from stepengine.data.definition import AgentDefinition, normalised_id
from stepengine.errors import DefinitionError

__all__ = ("Listed", "agents_command", "family", "listed")


@attrs.frozen
class Listed:
    """
    An agent file.

    Attributes:
        source: The file.
        agent: What it defines; ``None`` when it cannot be loaded.
        problem: Why it cannot be loaded.
        hidden_by: The file that is taken instead when the agent is named by its id.
    """

    source: Path
    agent: AgentDefinition[Any] | None
    problem: str = ""
    hidden_by: Path | None = None


def listed(folders: Iterable[Path] = ()) -> Iterator[Listed]:
    """Give every agent file in the folders in which ids are looked for; each file once."""
    from stepengine.engine.loading import agent_folders, load_agent

    seen: dict[str, Path] = {}
    for folder in dict.fromkeys([f.resolve() for f in agent_folders(folders)]):
        for file in sorted(folder.glob("[!_]*.py")):
            try:
                agent = load_agent(file)
            except DefinitionError as error:
                yield Listed(file, None, message_of(error))
                continue
            first = seen.setdefault(normalised_id(agent.id), file)
            yield Listed(file, agent, hidden_by=None if first == file else first)


def family(agent: AgentDefinition[Any], file: str = "", folders: Iterable[Path] = ()) -> list[AgentDefinition[Any]]:
    """
    Return *agent* and every agent that it may spawn, directly or through another one.

    Args:
        agent: The agent.
        file: The file that it was loaded from; agents beside it are found by the names of their files.
        folders: More folders in which ids are looked for.

    Raises:
        DefinitionError: when an id names no agent.
    """
    from stepengine.engine import load_agent

    def by_id(agent_id: str) -> AgentDefinition[Any]:
        beside = Path(file).with_name(f"{agent_id.replace('-', '_')}.py") if file.endswith(".py") else None
        return load_agent(beside if beside is not None and beside.is_file() else agent_id, folders=folders)

    found = {agent.id: agent}
    waiting = [agent]
    while waiting:
        for child in waiting.pop().spawnable_agents:
            definition = by_id(child) if isinstance(child, str) else child
            if definition.id not in found:
                found[definition.id] = definition
                waiting.append(definition)
    return list(found.values())


def agents_command(*, as_json: bool, as_tree: bool = False, config: Path | None = None) -> Exit:
    """Print the agents: as blocks, as JSON, or as the tree of who may spawn whom."""
    if as_json and as_tree:
        print("stepengine: --tree is for reading; --json alone has spawnable_agents for each agent", file=sys.stderr)
        return Exit.USAGE
    try:
        entries = list(listed(in_force(config).agent_folders))
    except UsageProblem as problem:
        print(f"stepengine: {visible(str(problem))}", file=sys.stderr)
        return Exit.USAGE
    if as_tree:
        print("\n".join(tree_lines([e.agent for e in entries if e.agent is not None and e.hidden_by is None])))
    elif as_json:
        print(dumps([_json_of(e) for e in entries if e.agent is not None]))
    else:
        print("\n\n".join([_shown(e) for e in entries if e.agent is not None]))
    for entry in entries:
        if entry.agent is None:
            print(f"stepengine: {visible(entry.problem)}", file=sys.stderr)
    return Exit.COMPLETED


def _json_of(entry: Listed) -> dict[str, Any]:
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


def _shown(entry: Listed) -> str:
    agent: Any = entry.agent
    lines = [
        agent.id,
        f"  {visible(agent.description, strict=True)}" if agent.description else "",
        f"  tools   {', '.join(agent.tool_names) or 'none'}",
        f"  spawns  {', '.join(agent.spawnable_ids)}" if agent.spawnable_ids else "",
        f"  model   {visible(agent.model, strict=True)}" if agent.model else "",
        f"  source  {visible(str(entry.source), strict=True)}",
        f"  hidden: the id means {visible(str(entry.hidden_by), strict=True)}" if entry.hidden_by else "",
    ]
    return "\n".join([line for line in lines if line])
