"""
A small real MCP server, run as a process of its own: ``python server.py [MODE ...]``.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import mcp_types as types
from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from pydantic import BaseModel

MODES = sys.argv[1:]
server = MCPServer("small")


@server.tool(annotations=types.ToolAnnotations(read_only_hint=True, idempotent_hint=True))
def add(a: int, b: int) -> int:
    """
    Add two numbers.
    """
    return a + b


@server.tool()
def crash() -> str:
    """
    Die in the middle of a call.
    """
    os.kill(os.getpid(), signal.SIGKILL)
    return "never"


@server.tool()
def once(marker: str) -> str:
    """
    Die in the middle of the first call, and answer every other one.
    """
    if not Path(marker).exists():
        Path(marker).write_text("1")
        os.kill(os.getpid(), signal.SIGKILL)
    return "answered"


@server.tool()
async def wait(seconds: float, marker: str = "") -> str:
    """
    Take a while; a marker file says how it ended.
    """
    try:
        await asyncio.sleep(seconds)
    except BaseException:
        if marker:
            Path(marker).write_text("cancelled")  # noqa: ASYNC240
        raise
    return "done"


@server.tool()
async def steps(count: int, ctx: Context[Any, Any]) -> str:
    """
    Say how far it is.
    """
    for done in range(count):
        await ctx.report_progress(done + 1, count, f"step {done + 1}")
    return "all"


@server.tool()
def fail() -> str:
    """
    Raise.
    """
    raise ValueError("a secret path")


@server.tool()
def spawn(seconds: int) -> int:
    """
    Start a process that outlives its parent.
    """
    return subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({seconds})"]).pid


@server.tool()
def environment() -> list[str]:
    """
    Name the variables that this server sees.
    """
    return sorted(os.environ)


class Size(BaseModel):
    """
    What a person says.
    """

    size: int
    gift: bool


@server.tool()
async def order(what: str, ctx: Context[Any, Any]) -> str:
    """
    Ask a person for a size.
    """
    said = await ctx.elicit(f"Which size of {what}?", Size)
    return f"{said.action}: {said.data.size}, {said.data.gift}" if said.action == "accept" else said.action


@server.resource("note://{name}")
def note(name: str) -> str:
    """
    Read a note.
    """
    return f"note {name}"


@server.prompt()
def greet(who: str) -> str:
    """
    Greet somebody.
    """
    return f"Say hello to {who}."


if "many" in MODES:
    for number in range(60):

        def one(text: str) -> str:
            return f"got {text}"

        server.add_tool(one, name=f"thing_{number}", description=f"Do the thing with the number {number}.")

if __name__ == "__main__":
    if "junk" in MODES:
        print("\n".join(["this is no message"] * 30), flush=True)
    if "noise" in MODES:
        print("\n".join(["this is no message"] * 500), flush=True)
    if "loud" in MODES:
        sys.stderr.write("x" * 1_000_000)
    if "dead" in MODES:
        sys.exit("no licence")
    if "mute" in MODES:
        signal.pause()
    if "stubborn" in MODES:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "http" in MODES:
        server.run("streamable-http", port=int(MODES[-1]))
    server.run("stdio")
