"""``stepengine agents --tree``: who may spawn whom."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from stepengine.data.definition import AgentDefinition, normalised_id
from stepengine.tools.spawning import carried_by

__all__ = ("tree_lines",)

Children: TypeAlias = Mapping[str, Sequence[str]]


def tree_lines(agents: Iterable[AgentDefinition[Any]]) -> list[str]:
    """
    Return the agents as lines of a tree, each below every agent that may spawn it.

    At the top stand those that no other may spawn, then one of each circle that nothing else leads to. Where a circle
    closes, and where an agent was shown with its children before, its line says so; an agent that does not exist, too.
    """
    children = _children(agents)
    spawned = {child for key, below in children.items() for child in below if child != key}
    lines: list[str] = []
    shown: set[str] = set()
    for key in [*[k for k in children if k not in spawned], *children]:
        if key not in shown:
            lines.append(key)
            lines += _below(key, children, (key,), shown, "")
    return lines


def _children(agents: Iterable[AgentDefinition[Any]]) -> dict[str, list[str]]:
    """Return id to the ids of those that it may spawn, those that are given inside others included."""
    found: dict[str, list[str]] = {}
    waiting = list(agents)
    while waiting:
        agent = waiting.pop(0)
        key = normalised_id(agent.id)
        if key in found:
            continue
        given = [*agent.spawnable_agents, *carried_by(agent.tools)]
        found[key] = list(dict.fromkeys([normalised_id(c if isinstance(c, str) else c.id) for c in given]))
        waiting += [c for c in given if not isinstance(c, str)]
    return found


def _below(key: str, children: Children, trail: tuple[str, ...], shown: set[str], indent: str) -> Iterator[str]:
    shown.add(key)
    below = children.get(key, ())
    for index, child in enumerate(below):
        last = index == len(below) - 1
        again = child in shown and children.get(child)
        note = " (circle)" if child in trail else " (see above)" if again else ""
        missing = "" if child in children else " (not found)"
        yield f"{indent}{'`-- ' if last else '|-- '}{child}{note}{missing}"
        if not note and not missing:
            yield from _below(child, children, (*trail, child), shown, f"{indent}{'    ' if last else '|   '}")
