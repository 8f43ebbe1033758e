"""
Generators for authors, to be used with ``yield from``: ``call``, ``retry``, ``best_of``, ``map_agents``.

They are made of yieldables alone, as an author's own would be: what a helper yields goes to the machine as if the handler had
written it, so it is counted, recorded, replayed and stepped through like that. This is why a kind of retry is a helper and no
option of the engine: an option would have to be known to the machine, to the record and to each driver, and an author who needs
another kind could not write it.

Must not be here: anything that the machine would have to know about, any I/O, and state that outlives a call.

Begin with ``calls``, which is short.
"""

from stepengine.helpers.agents import best_of, map_agents
from stepengine.helpers.calls import call, retry

__all__ = ("best_of", "call", "map_agents", "retry")
