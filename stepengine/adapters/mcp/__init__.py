"""
Tools of MCP servers, and agents that are offered as MCP tools.

A server's tools are found when a run begins, by an effect that is recorded, and become ``Tool`` objects of that run; each call is an
effect like any other. So a replay starts no server, and an agent whose server has other tools today diverges where it asks for one.
What a server sends is foreign: names are sifted, sizes capped, hints about what a tool changes are not believed unless the server
is trusted, and nothing that it says is a rule. In the other direction a client calls our agents, and a call is a run.

What lives here: ``mcp_tools``, and what answers a client that calls our agents. The package ``mcp`` is imported only here, on first
use, and always absolutely; a replay does without it.

Must not be here: a client protocol of our own, and anything that a lower layer would need.

Begin with ``source`` and ``connection``; ``agent_server`` for the other direction.
"""

from __future__ import annotations

from stepengine.adapters.mcp.agent_server import AgentServer, OfferedAgent
from stepengine.adapters.mcp.http import McpRun
from stepengine.adapters.mcp.notices import Notice
from stepengine.adapters.mcp.results import BinaryContent, get_non_media_content
from stepengine.adapters.mcp.source import McpTools, mcp_tools

__all__ = (
    "AgentServer",
    "BinaryContent",
    "McpRun",
    "McpTools",
    "Notice",
    "OfferedAgent",
    "get_non_media_content",
    "mcp_tools",
)
