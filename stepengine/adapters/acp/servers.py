"""
The MCP servers that an editor names for a session, as sources of tools of its agent.

This module has the names of servers, and handles servers that do not start. MCP itself is passed in by the program that serves an editor.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Generator, Iterable
from typing import Any, TypeAlias

from stepengine.data.definition import HookContext, ToolSource
from stepengine.data.hooks import Change
from stepengine.data.visible import visible
from stepengine.errors import DefinitionError, ToolError

NAME_CHARS = 28
SHOWN_CHARS = 300
START_SECONDS = 60.0
"""Seconds that a server may take to start: editors name many that `npx` or `uvx` download first."""


McpMaker: TypeAlias = Callable[..., ToolSource]
"""
A function that returns the tools of an MCP server as a source: ``stepengine.adapters.mcp.mcp_tools``, or a wrapper of it.

Its arguments are a command as a list of words, or a URL; ``name`` and ``start_timeout``; and ``env`` and ``cwd``, or ``headers``.
"""


def make_session_sources(
    servers: Iterable[Any], make: McpMaker, taken: Collection[str], *, cwd: str, warn: Callable[[str], object]
) -> tuple[ToolSource, ...]:
    """
    Return a tool source for each MCP server of a session. A server that does not start is reported to *warn* and left out.

    A server starts when a run needs it.

    Args:
        servers: The servers, as objects of the protocol.
        make: Creates the source of one server.
        taken: The names of the agent's own sources.
        cwd: The working folder of the servers' processes.
        warn: Called with a message when a run continues without a server.

    Raises:
        DefinitionError: For a server with an unsupported transport.
    """
    made = list[ToolSource]()
    for server in servers:
        name = _make_unique_server_name(str(server.name), [*taken, *[one.name for one in made]])
        kind = getattr(server, "type", None)
        if kind == "http":
            headers = {header.name: header.value for header in server.headers}
            source = make(server.url, name=name, headers=headers, start_timeout=START_SECONDS)
        elif kind is None:
            env = {variable.name: variable.value for variable in server.env}
            words = [server.command, *server.args]
            source = make(words, name=name, env=env, cwd=cwd, start_timeout=START_SECONDS)
        else:
            msg = f"the MCP server {server.name!r:.80} uses the transport {kind!r}; this agent supports only commands and http"
            raise DefinitionError(msg)
        made.append(_OptionalSource(source, warn))
    return tuple(made)


def make_replay_sources(names: Iterable[str], make: McpMaker) -> tuple[ToolSource, ...]:
    """Return sources for the servers whose tool lists are in a recorded run; a replay starts no server."""
    return tuple([_OptionalSource(make(["recorded"], name=name), lambda _: None) for name in names])


def _make_unique_server_name(server_name: str, taken: Collection[str]) -> str:
    """Return a prefix for tool names, of letters, digits and ``-``, that is not in *taken*."""
    name = re.sub("[^A-Za-z0-9]+", "-", server_name[:NAME_CHARS]).strip("-") or "server"
    number, found = 1, name
    while found in taken:
        number += 1
        found = f"{name}-{number}"
    return found


class _OptionalSource:
    """
    A tool source whose server may fail to start: the run then continues without its tools and reports it.

    An editor names the same servers for every agent. A broken one is no reason to refuse every prompt.
    """

    def __init__(self, source: Any, warn: Callable[[str], object]) -> None:
        self._source = source
        self._warn = warn
        self._last_warning = ""

    @property
    def name(self) -> str:
        """The name of the server, with which its tool names start."""
        return str(self._source.name)

    def for_engine(self) -> _OptionalSource:
        """Return this source for one engine: with a copy of the source within, if that has one per engine."""
        ours = getattr(self._source, "for_engine", None)
        return self if ours is None else _OptionalSource(ours(), self._warn)

    def pre_run(self, ctx: HookContext, /) -> Generator[Any, Any, Change]:
        """Add the tools of the server to the run; without the server, warn and add nothing. An equal warning is not repeated."""
        try:
            change: Change = yield from self._source.pre_run(ctx)
        except (ToolError, DefinitionError) as error:
            warning = f"The MCP server {self.name!r} is left out: {visible(error.message)[:SHOWN_CHARS]}"
            if warning != self._last_warning:  # every turn tries to start the server; an equal warning is not repeated
                self._last_warning = warning
                self._warn(warning)
            return Change()
        else:
            return change

    async def aclose(self, blocked: Any = None) -> None:
        """Close the source within."""
        await self._source.aclose(blocked)
