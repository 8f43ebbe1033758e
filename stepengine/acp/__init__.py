"""
Agents in editors: the Agent Client Protocol over stdin and stdout.

What lives here: sessions, prompts, permissions and our events in the protocol's words. The package `acp` (of
`agent-client-protocol`) is imported only here, on first use.

What must not: files and terminals of the editor (our tools confine themselves and know what they have seen), and printing.
"""

from stepengine.acp.agent import EditorAgent, MakeEngine, serve, take_stdout

__all__ = ("EditorAgent", "MakeEngine", "serve", "take_stdout")
