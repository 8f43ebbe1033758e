"""
The mechanism of tools: how a function or a schema becomes one, what it is called with, and what its result becomes.

Also the tools that are part of an engine's contract: what ends a turn, sets the output, asks the user or spawns agents.
Must not know of the bundled tools in ``stepengine.tools``, which stand on this as anybody's do.
"""
