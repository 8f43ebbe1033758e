"""``stepengine mcp``: agents as the tools of an MCP server, and a look at what a server offers."""

from __future__ import annotations

import asyncio
import json
import sys
from functools import partial
from typing import Annotated, Any

import attrs
import typer

from stepengine.cli.bench import bench_for, limits_of
from stepengine.cli.exits import Exit
from stepengine.cli.options import Model, Options, with_options
from stepengine.cli.settings import UsageProblem
from stepengine.data.visible import visible

__all__ = ("inspect_server", "serve")


@partial(with_options, without=("agent", "as_json", "quiet", "verbose"))
def serve(
    options: Options,
    agents: Annotated[list[str], typer.Argument(metavar="AGENT...", help="Ids or files of agents.")],
    *,
    model: Model = None,
) -> Exit:
    """
    Offer agents as the tools of an MCP server.

    It speaks on standard input and output, for an editor or any other client. Each AGENT is an id or the path of an agent
    file; a client sees one tool for each, with the agent's prompt and params. What a run asks, permissions included, is asked
    of whoever sits at the client; a client that cannot ask declines. Nothing is changed and no program run unless --write or
    --shell allows it, as for `stepengine run`.

    Examples:
      stepengine mcp serve code_searcher
      stepengine mcp serve ./agents/reviewer.py code_searcher --cwd ../project

    In a client's settings:
      {"mcpServers": {"agents": {
        "command": "stepengine", "args": ["mcp", "serve", "code_searcher"]}}}
    """
    return _serve(attrs.evolve(options, model=model).in_force(), agents)


def inspect_server(
    server: Annotated[list[str], typer.Argument(metavar="URL|COMMAND...", help="The server.")],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> Exit:
    """
    Show what an MCP server offers.

    Each tool stands there with its whole description, where nothing is hidden, its hints, and its digest. The server is the
    URL of an endpoint, or a command, which is started. Nothing of it is called.

    Examples:
      stepengine mcp inspect npx -y @modelcontextprotocol/server-filesystem .
      stepengine mcp inspect https://mcp.example.com/mcp --json
    """
    return _inspect(server, as_json=as_json)


def _serve(options: Options, names: list[str]) -> Exit:
    # Standard output belongs to the protocol: what an agent file prints goes where people look.
    sys.stdout = sys.stderr
    try:
        from stepengine.engine import load_agent
        from stepengine.mcp.serving import AgentServer, Offered

        offered = []
        for name in names:
            one = attrs.evolve(options, agent=name, quiet=True)
            agent = load_agent(name, folders=options.settings.agent_folders)
            bench = bench_for(one, agent, is_new=True, headless=False)
            limits = limits_of(one, agent)
            offered.append(Offered(bench.engine, agent, {} if limits is None else {"limits": limits}))
        server = AgentServer(offered)
    finally:
        sys.stdout = sys.__stdout__
    asyncio.run(_served(server, [one.engine for one in offered]))
    return Exit.COMPLETED


async def _served(server: Any, engines: list[Any]) -> None:
    try:
        await server.serve_stdio()
    finally:
        for engine in engines:
            await engine.aclose()


def _inspect(server: list[str], *, as_json: bool) -> Exit:
    from stepengine.mcp import mcp_tools

    is_address = len(server) == 1 and server[0].startswith(("http://", "https://"))
    if len(server) == 1 and "://" in server[0] and not is_address:
        msg = f"{server[0]!r} is no address of a server; it begins with http:// or https://"
        raise UsageProblem(msg)
    source = mcp_tools(server[0] if is_address else server, name="server", prompts=True, start_timeout=60)
    found = asyncio.run(_listing(source))
    if as_json:
        print(json.dumps(found, ensure_ascii=True, indent=2))
        return Exit.COMPLETED
    for tool in found["tools"]:
        hints = ", ".join([f"{visible(n, strict=True)}={str(value).lower()}" for n, value in tool["hints"].items()])
        about = "\n".join([f"    {line}" for line in tool["description"].splitlines()])
        name = visible(tool["name"], strict=True)
        print(f"{name}\n{about}\n    hints: {hints or 'none'}\n    digest: {tool['digest']}\n")
    for reason in found["left_out"]:
        print(f"left out: {reason}")
    return Exit.COMPLETED


async def _listing(source: Any) -> Any:
    try:
        return await source.listing(source.name)
    finally:
        await source.aclose()
