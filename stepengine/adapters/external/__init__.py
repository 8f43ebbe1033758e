"""
Agents of other programs and servers, used like the agents of this package: the code for their turns, and agents on a stepengine server.

An agent that is led is an ``AgentDefinition`` whose handler calls one tool: a turn of the other agent is one call of it. So journals,
replay, cancelling, limits and the doubt after a crash are those of every tool, and the machine knows nothing of agents elsewhere. What
the other agent wants to do in between (to be allowed something, to ask somebody) does not happen inside of that call, where no rule and
no person would see it: the call ends with what is wanted, the handler yields that as a call or question of its own, and another call
brings the decision back. A replay therefore needs neither the program nor the server.

What comes from there is foreign: it is cut to a size, believed only as far as it has the shape that was asked for, and never a rule.
A call of a remote agent has a key made from its position in the run, so that a call that is repeated after a crash finds its running
run and does not start a second one.

``turns`` has the code for the turns of all external agents, and ``remote`` agents on another stepengine server.

Must not be here: the Agent Client Protocol, which is ``stepengine.adapters.acp``'s, and the server's own code.

Begin with ``turns``.
"""

from stepengine.adapters.external.remote import RemoteAgent

__all__ = ("RemoteAgent",)
