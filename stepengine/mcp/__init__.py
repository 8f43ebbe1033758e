"""
Tools that come from MCP servers.

What lives here: the adapter that turns a server's tools into `Tool` objects. The package `mcp` is imported only here, on first
use, and always absolutely.

What must not: a client protocol of our own, and anything that a floor below would need.
"""

__all__: tuple[str, ...] = ()
