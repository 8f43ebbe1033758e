"""
What a package of agents is where nothing of its author's is: a process of its own, started by ``stepengine agents check``.

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

__all__ = ("probe",)


def probe(site: str, project: str, out: str) -> None:
    """
    Load the package that lies unpacked in *site*, and write what it is.

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
            f"it has {len(entries)} entries in the group {GROUP!r}; one, called like its publisher, would be fine"
        )
    else:
        told |= {"publisher": entries[0].name, "module": entries[0].module}
        _load(entries[0].value, told)
    own, there = Path(project).resolve(), Path(site).resolve()
    for name, module in sorted(sys.modules.items()) if project else ():
        file = Path(getattr(module, "__file__", None) or there).resolve()
        if file.is_relative_to(own) and not file.is_relative_to(there) and not name.startswith("stepengine"):
            told["problems"].append(
                f"it imports {name!r} from the folder of its author, which nobody else has: {file.relative_to(own)}"
            )
    Path(out).write_text(json.dumps(told), encoding="utf-8")


def _load(value: str, told: dict[str, Any]) -> None:
    """Add what the code has, and why an engine refuses it."""
    from stepengine.engine.packages import declared_of, exceeding, find_installed, held_by

    try:
        held = held_by(value)
    except DefinitionError as error:
        told["problems"].append(error.message)
        return
    told["problems"] += held.problems
    for agent_id, agent in held.agents.items():
        made = declared_of(agent)
        told["agents"][agent_id] = {
            "description": made.description,
            "tools": dict(made.tools),
            "spawns": [*made.spawns],
        }
    # Where more differs, that is told already.
    fits = [p for p in find_installed().packages if p.value == value and not exceeding(p, held)]
    told["problems"] += [said for package in fits for said in _find_refusals(package)]


def _find_refusals(package: Package) -> Iterator[str]:
    """Give why an engine refuses the agents by the ids that others use."""
    from stepengine.cli.bench import family
    from stepengine.engine import Engine, load_agent
    from stepengine.tools.bundled.bundled import uncalled_tools

    for named in [f"{package.publisher}/{agent_id}" for agent_id in package.agents]:
        try:
            Engine(family(load_agent(named), named), uncalled_tools(Path.cwd())).close()
        except DefinitionError as error:
            yield f"{named}: {error.message}"


if __name__ == "__main__":
    probe(*sys.argv[1:])
