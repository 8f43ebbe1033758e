"""
A small real MCP server: as a process, ``python server.py [MODE ...]``, and as an object for tests that need no process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import mcp_types as types
from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.resolve import Elicit, Resolve, Sample
from pydantic import BaseModel

READS = types.ToolAnnotations(read_only_hint=True, idempotent_hint=True, open_world_hint=False, destructive_hint=False)


def add(a: int, b: int) -> int:
    """
    Add two numbers.
    """
    return a + b


def crash() -> str:
    """
    Die in the middle of a call.
    """
    os.kill(os.getpid(), signal.SIGKILL)
    return "never"


def once(marker: str) -> str:
    """
    Die in the middle of the first call, and answer every other one.
    """
    if not Path(marker).exists():
        Path(marker).write_text("1")
        os.kill(os.getpid(), signal.SIGKILL)
    return "answered"


async def steps(count: int, ctx: Context[Any, Any]) -> str:
    """
    Say how far it is.
    """
    for done in range(count):
        await ctx.report_progress(done + 1, count, f"step {done + 1}")
    return "all"


def fail() -> str:
    """
    Raise.
    """
    raise ValueError("a secret path")


def spawn(seconds: int) -> int:
    """
    Start a process that outlives its parent.
    """
    return subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({seconds})"]).pid


class Size(BaseModel):
    """
    What a person says.
    """

    size: int
    gift: bool


def ask_size(what: str) -> Elicit[Size]:
    return Elicit(f"Which size of {what}?", Size)


def order(what: str, size: Annotated[Size, Resolve(ask_size)]) -> str:
    """
    Ask a person for a size.
    """
    return f"ordered {what}: {size.size}, {'a gift' if size.gift else 'no gift'}"


def ask_model(about: str) -> Sample:
    said = types.SamplingMessage(role="user", content=types.TextContent(type="text", text=f"A poem about {about}"))
    return Sample([said], max_tokens=100, system_prompt="Rhyme.")


def poem(about: str, said: Annotated[types.CreateMessageResult, Resolve(ask_model)]) -> str:
    """
    Have a poem written by the model of whoever calls.
    """
    return f"A poem: {said.content.text}" if said.content.type == "text" else "no text"


def note(name: str) -> str:
    """
    Read a note.
    """
    return f"note {name}"


def greet(who: str) -> str:
    """
    Greet somebody.
    """
    return f"Say hello to {who}."


def made(*modes: str) -> MCPServer:
    server = MCPServer("small")
    server.tool(annotations=READS)(add)
    server.tool(annotations=READS if "idempotent" in modes else None)(once)
    for tool in (crash, steps, fail, spawn, order, poem):
        server.tool()(tool)
    server.resource("note://{name}")(note)
    server.resource("list://all", name="all")(lambda: "everything")
    server.prompt()(greet)
    for number in range(60 if "many" in modes else 0):

        def thing(text: str, number: int = number) -> str:
            return f"thing {number} got {text}"

        server.add_tool(thing, name=f"thing_{number}", description=f"Do the thing with the number {number}.")
    return server


def main(modes: list[str]) -> None:
    if "stubborn" in modes:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "http" in modes:
        made(*modes).run("streamable-http", port=int(modes[-1]))
    else:
        made(*modes).run("stdio")


if __name__ == "__main__":
    main(sys.argv[1:])
