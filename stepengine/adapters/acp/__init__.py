"""
The Agent Client Protocol over stdin and stdout: our agents in editors, and agents of others that ours lead.

Two directions meet here and share only the words of the protocol. ``agent`` answers an editor: a session is a conversation, a prompt is
a run, our events are its updates, and a permission that a policy asks for is the editor's dialogue. ``remote_agent`` starts somebody else's
agent as a program, which then stands where an agent of ours stands: a turn of it is one call of a tool, and so is what it wants to
read, write or run, which rules and people judge as any other. Stdout belongs to the protocol, so it is taken away from everything
else in the process before anything can print.

What lives here: sessions, prompts, permissions and our events in the protocol's words, and theirs in ours. The package ``acp`` (of
``agent-client-protocol``) is imported only here, on first use.

Must not be here: the tools themselves, MCP, and printing.

Begin with ``agent`` and ``updates``; ``remote_agent`` for the other direction.
"""

from stepengine.adapters.acp.agent import EditorAgent
from stepengine.adapters.acp.remote_agent import ExternalAgent, ExternalReply
from stepengine.adapters.acp.session_engines import MakeEngine
from stepengine.adapters.acp.stdio import redirect_stdout, serve

__all__ = ("EditorAgent", "ExternalAgent", "ExternalReply", "MakeEngine", "redirect_stdout", "serve")
