"""
Generators for authors, to be used with ``yield from``: ``call``, ``retry``, ``best_of``, ``map_agents``.

Lives here: combinators that are built from yieldables alone. Must not be here: anything that the machine would have to
know about, and any I/O.
"""

from stepengine.helpers.agents import best_of, map_agents
from stepengine.helpers.calls import call, retry

__all__ = ("best_of", "call", "map_agents", "retry")
