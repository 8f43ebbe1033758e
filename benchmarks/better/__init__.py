"""
What stepengine does better, beside a peer: each file in ``ours`` is our side of a topic of ``docs/better.md``, each module here a peer's.

A module runs in the peer's environment, and fails when its version no longer shows what the page says.
"""

GONE = "this version does not show what the page says any more"
