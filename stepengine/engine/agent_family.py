"""The family of an agent: the agent and all agents that it may spawn."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple, Self

import attrs

from stepengine.data.definition import AgentDefinition, find_published_name, normalised_id
from stepengine.engine.loader import (
    AgentLocation,
    find_bundled_agent,
    find_file_named_like,
    find_packaged_agent,
    load_agent,
)
from stepengine.engine.packages import PackagedAgent, get_published_id, packaged_agent_from_definition


def collect_agent_family(agent: AgentDefinition, file: str, folders: Iterable[Path] = ()) -> list[AgentDefinition]:
    """
    Return *agent* and all agents that it may spawn, directly or indirectly.

    Args:
        agent: The agent.
        file: The file that it was loaded from; the other agents in it, and those beside it by the names of their files, are
            found there.
        folders: More folders in which ids are looked for.

    Raises:
        DefinitionError: when an id names no agent.
    """
    finder = _AgentLookup.from_file(file, folders)
    found: dict[str, AgentDefinition] = {}
    held = [agent]
    named: list[tuple[str, PackagedAgent | None]] = []
    while held or named:
        # Ids come last: one of an agent that another holds, or of that agent itself, needs no file.
        if not held and named[-1][1] is None and normalised_id(named[-1][0]) in found:
            named.pop()
            continue
        definition = held.pop() if held else finder.load_named_agent(*named.pop())
        key = normalised_id(get_published_id(definition))
        if key not in found:
            found[key] = definition
            given = definition.spawnable_agents
            named += [(child, packaged_agent_from_definition(definition)) for child in given if isinstance(child, str)]
            held += [child for child in given if not isinstance(child, str)]
    return list(found.values())


class _AgentLookup(NamedTuple):
    """
    Finds agents that others name by id.

    Attributes:
        place: The file of the agent that is run; ``None`` where none was named.
        same: The agents of that file.
        folders: More folders.
    """

    place: AgentLocation | None
    same: Mapping[str, AgentDefinition]
    folders: tuple[Path, ...]

    @classmethod
    def from_file(cls, file: str, folders: Iterable[Path]) -> Self:
        """Return a lookup of the agents in *file*, in its folder and in *folders*."""
        place = AgentLocation.from_text(file) if file else None
        same = {} if place is None else {normalised_id(one.id): one for one in place.load_all()}
        return cls(place, same, tuple(folders))

    def load_named_agent(self, agent_id: str, named_by: PackagedAgent | None) -> AgentDefinition:
        """
        Return the agent with this id. Without a publisher, an agent of the package *named_by* refers to its own agents first.

        Raises:
            DefinitionError: when there is none.
        """
        if (member := find_packaged_agent(agent_id)) is not None:
            return member.load()
        agent_id = find_published_name(agent_id) or agent_id
        own = (
            self.same.get(normalised_id(agent_id))
            if named_by is None
            else named_by.load_sibling(agent_id) or find_bundled_agent(agent_id)
        )
        if own is not None:
            return own
        if self.place is not None:
            # What lies beside a stranger's file is no more trusted than that.
            file = find_file_named_like(agent_id, self.place.file.parent)
            if file is not None:
                return load_agent(str(attrs.evolve(self.place, file=file, id="")), folders=self.folders)
        return load_agent(agent_id, folders=self.folders)
