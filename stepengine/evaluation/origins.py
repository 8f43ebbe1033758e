"""Finds the file and line that define an agent, among the loaded modules: a definition does not contain them."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from stepengine.data.definition import AgentDefinition, normalised_id
from stepengine.data.functions import format_location

MAX_SOURCE = 4 * 1024 * 1024


class Origin(NamedTuple):
    """
    The file and line where an agent is defined.

    Attributes:
        file: The file.
        line: The line of the call that creates the agent, else that of its handler; 0 if both are unknown.
    """

    file: Path
    line: int


def find_agent_origin(agent: AgentDefinition) -> Origin | None:
    """Return the origin of an agent, from the module that contains it or from its handler; ``None`` if it is unknown."""
    handler = agent.handle_steps
    location = format_location(handler) if handler is not None else ""
    handled, _, line = location.rpartition(":")
    modules = [
        one
        for one in _list_modules_outside_package()
        if any(_is_same_agent(agent, held) for held in _list_agents_in_module(one))
    ]
    own = next((one for one in modules if one.__file__ == handled), modules[0] if modules else None)
    if own is not None and own.__file__ is not None:
        file = Path(own.__file__)
        at = _get_definition_line(file, agent.id)
        return Origin(file, at or (int(line) if handled == own.__file__ else 0))
    return Origin(Path(handled), int(line)) if handled and line.isdecimal() and Path(handled).is_file() else None


def _list_modules_outside_package() -> Iterator[ModuleType]:
    """Yield all loaded modules that have a file outside of this package, those of other libraries included."""
    package = str(Path(__file__).resolve().parents[1])
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and not str(Path(file)).startswith(f"{package}/") and hasattr(module, "__dict__"):
            yield module


def _list_agents_in_module(module: ModuleType) -> Iterator[AgentDefinition]:
    """Yield the agents that a module holds in its variables, directly or in a list or tuple."""
    for value in list(vars(module).values()):
        if isinstance(value, AgentDefinition):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from [one for one in value if isinstance(one, AgentDefinition)]


def _is_same_agent(agent: AgentDefinition, other: AgentDefinition) -> bool:
    """Return whether two definitions have the same id and handler."""
    # An engine may have added hooks to it, so that it is another object.
    return normalised_id(agent.id) == normalised_id(other.id) and agent.handle_steps is other.handle_steps


def _get_definition_line(file: Path, agent_id: str) -> int:
    """Return the line of the first call with the literal id of an agent; 0 if there is none."""
    try:
        source = file.read_bytes()
        tree = ast.parse(source) if len(source) <= MAX_SOURCE else None
    except (OSError, SyntaxError, ValueError, MemoryError, RecursionError):
        return 0
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.Call):
            named = [one.value for one in node.keywords if one.arg == "id"]
            if any(_is_literal_id(each, agent_id) for each in [*node.args[:1], *named]):
                return node.lineno
    return 0


def _is_literal_id(node: ast.expr, agent_id: str) -> bool:
    return (
        isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and normalised_id(node.value) == normalised_id(agent_id)
    )
