"""
Tools that come from MCP servers, and agents that are offered as such tools.

What lives here: ``mcp_tools``, which turns a server's tools into ``Tool`` objects for each run, and what answers a client that
calls our agents. The package ``mcp`` is imported only here, on first use, and always absolutely; a replay does without it.

What must not: a client protocol of our own, and anything that a floor below would need.
"""

from __future__ import annotations

from stepengine.mcp.notices import Notice
from stepengine.mcp.results import Blob, blobs_of
from stepengine.mcp.serving import AgentServer, Offered
from stepengine.mcp.source import McpTools, mcp_tools

__all__ = ("AgentServer", "Blob", "McpTools", "Notice", "Offered", "blobs_of", "mcp_tools")
