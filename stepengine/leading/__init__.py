"""
Agents that somebody else runs, where agents of ours stand: what leading them has in common, and agents of another server of ours.

What must not live here: the Agent Client Protocol, which is ``stepengine.acp``'s.
"""

from stepengine.leading.remote import RemoteAgent

__all__ = ("RemoteAgent",)
