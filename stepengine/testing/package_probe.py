"""
Inspect a package of agents without its author's environment, in a process that ``check_package`` starts.

It writes one JSON object: ``problems``, and by agent what its code has, as ``stepengine-agents.json`` declares it. What it prints
belongs to the package, which may print whatever it wants.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepengine.errors import DefinitionError

if TYPE_CHECKING:
    from stepengine.engine.packages import Package


def probe_package(site: str, project: str, out: str) -> None:
    """
    Load the package unpacked in *site*, and write its agents and problems to a file.

    Args:
        site: A folder with the content of one wheel, which Python looks through first.
        project: The folder of its author, from which nothing may come; ``""`` for none.
        out: The file to write.
    """
    from stepengine.engine.packages import GROUP

    told: dict[str, Any] = {"problems": [], "agents": {}}
    (dist,) = metadata.distributions(path=[site])
    entries = [*dist.entry_points.select(group=GROUP)]
    if len(entries) != 1:
        told["problems"].append(
            f"it has {len(entries)} entries in the group {GROUP!r}; it needs exactly one, named like its publisher"
        )
    else:
        told |= {"publisher": entries[0].name, "module": entries[0].module}
        _import_package(entries[0].value, told)
    own, there = Path(project).resolve(), Path(site).resolve()
    for name, module in sorted(sys.modules.items()) if project else ():
        file = Path(getattr(module, "__file__", None) or there).resolve()
        if file.is_relative_to(own) and not file.is_relative_to(there) and not name.startswith("stepengine"):
            told["problems"].append(
                f"it imports {name!r} from its author's folder, which is not in the package: {file.relative_to(own)}"
            )
    Path(out).write_text(json.dumps(told), encoding="utf-8")


def _import_package(value: str, report: dict[str, Any]) -> None:
    """Import the package; add its agents, and the reasons why an engine rejects them, to *report*."""
    from stepengine.engine.packages import (
        find_declaration_mismatches,
        import_agents,
        list_installed_agent_packages,
        make_declaration,
    )

    try:
        held = import_agents(value)
    except DefinitionError as error:
        report["problems"].append(error.message)
        return
    report["problems"] += held.problems
    for agent_id, agent in held.agents.items():
        made = make_declaration(agent)
        report["agents"][agent_id] = {
            "description": made.description,
            "tools": dict(made.tools),
            "spawns": [*made.spawns],
        }
    # Where more differs, that is told already.
    fits = [
        p
        for p in list_installed_agent_packages().packages
        if p.value == value and not find_declaration_mismatches(p, held)
    ]
    report["problems"] += [said for package in fits for said in _find_agent_problems(package)]


def _find_agent_problems(package: Package) -> Iterator[str]:
    """Yield the reasons an engine rejects the agents of a package, by their public ids."""
    from stepengine.engine import Engine, load_agent
    from stepengine.engine.agent_family import collect_agent_family
    from stepengine.tools.bundled.bundled import list_all_workspace_tools

    for named in [f"{package.publisher}/{agent_id}" for agent_id in package.agents]:
        try:
            Engine(collect_agent_family(load_agent(named), named), list_all_workspace_tools(Path.cwd())).close()
        except DefinitionError as error:
            yield f"{named}: {error.message}"


if __name__ == "__main__":
    probe_package(*sys.argv[1:])
