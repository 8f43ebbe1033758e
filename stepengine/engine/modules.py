"""Finds the agents of a module: ``agent = AgentDefinition(...)`` or ``agents = [...]``. For files that are no modules, names the loader."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from stepengine.data.definition import AgentDefinition, normalised_id
from stepengine.errors import DefinitionError

EXPECTED = "`agent = AgentDefinition(...)` or `agents = [AgentDefinition(...), ...]` at module level"


def get_exported_agents(module: ModuleType, label: str) -> tuple[AgentDefinition, ...]:
    """
    Return the agents in the variable ``agent`` or ``agents`` of a module; at least one. Errors call the module *label*.

    Raises:
        DefinitionError: when the module has neither or both variables, or two agents with the same id.
    """
    one, several = getattr(module, "agent", None), getattr(module, "agents", None)
    if one is not None and several is not None:
        msg = f"{label}: defines both 'agent' and 'agents'; keep one of them: {EXPECTED}"
        raise DefinitionError(msg)
    if isinstance(one, AgentDefinition):
        return (one,)
    if not isinstance(several, list | tuple) or not several:
        found = "no 'agent' or 'agents'"
        found = found if one is None else f"an 'agent' that is {one!r}"
        found = found if several is None else f"'agents' that are {several!r}"
        msg = f"{label}: expected {EXPECTED}, found {found}"
        raise DefinitionError(msg)
    ids: set[str] = set()
    for agent in several:
        if not isinstance(agent, AgentDefinition):
            msg = f"{label}: expected {EXPECTED}, found {agent!r} in 'agents'"
            raise DefinitionError(msg)
        if normalised_id(agent.id) in ids:
            msg = f"{label}: 'agents' has two agents with the id {agent.id!r}; give each its own id"
            raise DefinitionError(msg)
        ids.add(normalised_id(agent.id))
    return tuple(several)


def load_sandboxed_agents(file: Path) -> tuple[AgentDefinition, ...]:
    """
    Return the agents of a file, which is not imported and whose handlers run in the sandbox.

    Raises:
        DefinitionError: naming file and line, for code that cannot run there, and when the extra ``programs`` is not installed.
    """
    from stepengine.sandbox.untrusted_handlers import load_file

    return load_file(file)
