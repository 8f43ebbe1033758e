"""
A server of the package fastmcp, in an environment of its own: ``python fastmcp_server.py stdio``, or ``http`` or ``oauth`` and a port.
"""

import sys
from dataclasses import dataclass
from typing import Literal

from fastmcp import Context, FastMCP
from fastmcp.server.auth.providers.in_memory import InMemoryOAuthProvider
from mcp.server.auth.settings import ClientRegistrationOptions

port = int(sys.argv[2]) if len(sys.argv) > 2 else 0
auth = None
if sys.argv[1] == "oauth":
    auth = InMemoryOAuthProvider(
        base_url=f"http://127.0.0.1:{port}",
        client_registration_options=ClientRegistrationOptions(enabled=True, valid_scopes=["use"]),
        required_scopes=["use"],
    )
server = FastMCP("fast", auth=auth)


@dataclass
class Size:
    """
    What a person says.
    """

    size: int
    colour: Literal["red", "blue"] = "red"


@server.tool
def add(a: int, b: int) -> int:
    """
    Add two numbers.
    """
    return a + b


@server.tool
async def order(what: str, ctx: Context) -> str:
    """
    Order something.
    """
    await ctx.info("ordering")
    said = await ctx.elicit(f"Which size of {what}?", response_type=Size)
    return f"{what}: {said.action} {getattr(said, 'data', None)}"


@server.resource("data://one")
def one() -> str:
    """
    Read the one resource.
    """
    return "one"


if sys.argv[1] == "stdio":
    server.run(show_banner=False)
else:
    server.run(transport="http", host="127.0.0.1", port=port, show_banner=False)
