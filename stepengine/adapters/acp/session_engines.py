"""The engine, the agent and the MCP servers of a session, made for the choices of a person."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import attrs

from stepengine.adapters.acp import servers
from stepengine.adapters.acp.session_options import MODE, MODEL, SessionChoices
from stepengine.data.definition import AgentDefinition, ToolSource
from stepengine.data.events import Event
from stepengine.engine import Engine
from stepengine.errors import DefinitionError
from stepengine.runtime.logs import LOGGER

BUFFERS, TERMINALS = "buffers", "terminals"


class MakeEngine(Protocol):
    """
    A function that returns an engine for a workspace.

    It is also given those of these by name that it takes: ``mode``, a mode of its policy, and ``model``, the model of all agents,
    each ``""`` where nothing was chosen; ``buffers``, the files that are open in the editor, for ``file_tools(buffers=...)``;
    ``terminals``, the editor's, for ``shell_tools(terminals=...)``; the last two are ``None`` where the editor does not offer them.
    """

    def __call__(self, cwd: Path, /, *, observers: tuple[Callable[[Event], Any], ...] = ()) -> Engine:
        """Return an engine whose tools work in *cwd*, and which shows its runs to *observers*."""


class SessionEngines:
    """
    Makes the engines of sessions.

    Args:
        make: Makes one engine.
        agent_id: The id of the agent.
        mcp: Makes a source of tools of an MCP server; ``None`` if servers are not started.
        offered: The offered values of each choice by its name.

    Attributes:
        agent_id: The id of the agent.
        mcp: As given.

    Raises:
        DefinitionError: For an offered choice that *make* does not accept.
    """

    def __init__(
        self, make: MakeEngine, agent_id: str, mcp: servers.McpMaker | None, offered: dict[str, Sequence[str]]
    ) -> None:
        self.agent_id = agent_id
        self._make: Any = make
        self.mcp = mcp
        self._accepted = _find_accepted_options(make)
        for name, values in offered.items():
            if values and name not in self._accepted:
                msg = f"{name}s= offers a choice, but the function that makes the engine lacks the parameter {name}=''; add it"
                raise DefinitionError(msg)

    def make_engine(
        self,
        cwd: Path,
        chosen: SessionChoices,
        tools: Mapping[str, object],
        observers: tuple[Callable[[Event], Any], ...] = (),
    ) -> Engine:
        """Return an engine from the maker, with the choices and editor tools that the maker accepts."""
        known = {MODE: chosen.mode, MODEL: chosen.model, BUFFERS: None, TERMINALS: None, **tools}
        given = {name: value for name, value in known.items() if name in self._accepted}
        engine: Engine = self._make(cwd, observers=observers, **given)
        return engine

    def get_agent_with_sources(self, engine: Engine, sources: Sequence[ToolSource] = ()) -> AgentDefinition:
        """Return the agent of *engine* with the tools of *sources* added."""
        agent = engine.agent(self.agent_id)
        return attrs.evolve(agent, tools=[*agent.tools, *sources]) if sources else agent

    def make_server_sources(
        self, mcp_servers: Sequence[Any], agent: AgentDefinition, cwd: Path, warn: Callable[[str], None]
    ) -> tuple[ToolSource, ...]:
        """Return the MCP servers that an editor named as sources of tools; none, with a warning, if *mcp* was not passed."""
        if self.mcp is None:
            if mcp_servers:
                LOGGER.warning(
                    "the editor named %d MCP servers; they are not started, because no mcp= was passed",
                    len(mcp_servers),
                )
            return ()
        taken = [tool.name for tool in agent.tools if isinstance(tool, ToolSource)]
        return servers.make_session_sources(mcp_servers, self.mcp, taken, cwd=str(cwd), warn=warn)

    def make_replay_sources(self, names: Sequence[str]) -> tuple[ToolSource, ...]:
        """Return sources for the MCP servers of a recorded run; a replay starts no server."""
        return () if self.mcp is None else servers.make_replay_sources(names, self.mcp)


def _find_accepted_options(make: object) -> frozenset[str]:
    """Return the names of the options that the maker of an engine accepts."""
    try:
        parameters = inspect.signature(make).parameters.values()  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return frozenset()
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters)
    return frozenset((MODE, MODEL, BUFFERS, TERMINALS)) if takes_all else frozenset([each.name for each in parameters])
