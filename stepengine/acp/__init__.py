"""
The Agent Client Protocol over stdin and stdout: our agents in editors, and agents of others that ours lead.

What lives here: sessions, prompts, permissions and our events in the protocol's words, and theirs in ours. The package `acp` (of
`agent-client-protocol`) is imported only here, on first use.

What must not: the tools themselves, MCP, and printing.
"""

from stepengine.acp.agent import EditorAgent, MakeEngine
from stepengine.acp.leading import ExternalAgent, ExternalReply
from stepengine.acp.serving import serve, take_stdout

__all__ = ("EditorAgent", "ExternalAgent", "ExternalReply", "MakeEngine", "serve", "take_stdout")
