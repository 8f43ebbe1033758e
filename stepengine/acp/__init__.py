"""
Agents in editors: the Agent Client Protocol over stdin and stdout.

What lives here: sessions, prompts, permissions and our events in the protocol's words. The package `acp` (of
`agent-client-protocol`) is imported only here, on first use.

What must not: the tools themselves, MCP, and printing.
"""

from stepengine.acp.agent import EditorAgent, MakeEngine
from stepengine.acp.serving import serve, take_stdout

__all__ = ("EditorAgent", "MakeEngine", "serve", "take_stdout")
