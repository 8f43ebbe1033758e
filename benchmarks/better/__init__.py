"""
What stepengine does better, beside a peer: our side is a block of ``docs/better.md``, each module here is a peer's side.

A module runs in the peer's environment, and fails when its version no longer shows what the page says.
"""

GONE = "this version does not show what the page says any more"
