"""``stepengine mcp``: agents as the tools of an MCP server, and a look at what a server offers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import attrs
import typer
from attrs import frozen

from stepengine.cli.bench import bench_for, limits_of
from stepengine.cli.exits import Exit
from stepengine.cli.options import Model, Options, with_options
from stepengine.cli.screen.interrupting import interruptible
from stepengine.cli.settings import UsageProblem
from stepengine.data.visible import visible
from stepengine.errors import ToolServerError

__all__ = ("inspect_server", "serve")

GIVE, TYPED = "mcp_tools(headers={'Authorization': 'Bearer ...'})", "--header 'Authorization: Bearer ...'"


@partial(with_options, without=("agent", "as_json", "quiet", "verbose"))
def serve(
    options: Options,
    agents: Annotated[list[str], typer.Argument(metavar="AGENT...", help="Ids or files of agents.")],
    *,
    model: Model = None,
    http: Annotated[
        str, typer.Option(help="Listen here, at /mcp, instead of on standard input.", metavar="[HOST:]PORT")
    ] = "",
    token_env: Annotated[
        str, typer.Option(help="Variable with the token that clients of --http have to bring.", metavar="NAME")
    ] = "",
    journals: Annotated[
        Path | None, typer.Option(help="Record each call's run in a file of this folder.", metavar="DIR")
    ] = None,
) -> Exit:
    """
    Offer agents as the tools of an MCP server.

    It speaks on standard input and output, for an editor or any other client, or with --http over streamable HTTP. Each AGENT
    is an id or the path of an agent file; a client sees one tool for each, with the agent's prompt and params. What a run
    asks, permissions included, is asked of whoever sits at the client; for a client that shows no questions they are declined,
    and the result says so. Each call that changes something or runs a program is asked about, unless --write or --shell allows it.

    Examples:
      stepengine mcp serve code_searcher
      stepengine mcp serve ./agents/reviewer.py code_searcher --cwd ../project
      stepengine mcp serve code_searcher --http 8000 --journals runs

    In a client's settings:
      {"mcpServers": {"agents": {
        "command": "stepengine", "args": ["mcp", "serve", "code_searcher"]}}}
    """
    if token_env and not http:
        msg = "--token-env is for --http; a process that you start yourself needs no token"
        raise UsageProblem(msg)
    place = _ServerAddress(*_host_and_port(http), token=_token(token_env)) if http else None
    return _serve(attrs.evolve(options, model=model).in_force(), agents, place=place, journals=journals)


def inspect_server(
    server: Annotated[list[str], typer.Argument(metavar="URL|COMMAND...", help="The server.")],
    *,
    header: Annotated[
        list[str] | None,
        typer.Option(help="A header of every request to a URL; may be repeated.", metavar="'NAME: VALUE'"),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(
            help="A variable that the command sees, NAME alone with the value that it has here.", metavar="NAME[=VALUE]"
        ),
    ] = None,
    timeout: Annotated[
        float,
        typer.Option(help="Seconds that starting it may take; npx may fetch it first.", metavar="SECONDS", min=0.1),
    ] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> Exit:
    r"""
    Show what an MCP server offers.

    Each tool stands there with its whole description, where nothing is hidden, its hints, and its digest. The server is the
    URL of an endpoint, or a command, which is started. Nothing of it is called. Options stand before a command, whose words
    after its name are its own; only --json may be the last one.

    Examples:
      stepengine mcp inspect npx -y @modelcontextprotocol/server-filesystem .
      stepengine mcp inspect https://mcp.example.com/mcp --json
      stepengine mcp inspect --header "Authorization: Bearer $TOKEN" \
          https://mcp.example.com/mcp
      stepengine mcp inspect --env API_KEY --timeout 120 npx -y some-server
    """
    server, more = _server_and_options(server)
    timeout = timeout if more.timeout is None else more.timeout
    headers = [*(header or []), *more.header]
    return _inspect(server, headers, env or [], timeout=timeout, as_json=as_json or more.as_json)


@attrs.define
class _Later:
    """Options that were typed behind a server."""

    as_json: bool = False
    header: list[str] = attrs.field(factory=list)
    timeout: float | None = None


def _server_and_options(words: list[str]) -> tuple[list[str], _Later]:
    """Return the words of a server, and the options behind it: a URL has no words of its own, of a command all are its own."""
    later, rest = _Later(), list(words)
    if rest[-1] == "--json" and len(rest) > 1:
        later.as_json = bool(rest.pop())
    while rest[0].startswith(("http://", "https://")) and len(rest) > 1:
        name, sign, value = rest.pop(1).partition("=")
        if name == "--json" and not sign:
            later.as_json = True
            continue
        if name not in ("--header", "--timeout") or not (sign or len(rest) > 1):
            msg = f"{name!r} follows the URL of a server; there may be --header, --timeout and --json"
            raise UsageProblem(msg)
        value = value if sign else rest.pop(1)
        if name == "--header":
            later.header.append(value)
        else:
            later.timeout = _seconds(value)
    return rest, later


def _seconds(given: str) -> float:
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        msg = f"--timeout is a number of seconds above 0, not {given!r}"
        raise UsageProblem(msg)
    return seconds


@frozen
class _ServerAddress:
    """Where clients reach a server over HTTP, and what they have to bring."""

    host: str
    port: int
    token: str = attrs.field(kw_only=True, repr=False)


def _host_and_port(given: str) -> tuple[str, int]:
    host, _, port = given.rpartition(":")
    if not port.isascii() or not port.isdecimal() or len(port) > len("65535"):
        msg = f"--http is a port, or HOST:PORT, such as 8000 or 127.0.0.1:8000, not {given!r}"
        raise UsageProblem(msg)
    return host.removeprefix("[").removesuffix("]") or "127.0.0.1", int(port)


def _token(name: str) -> str:
    if name and not os.environ.get(name):
        msg = f"--token-env {name}: there is no such variable, or it is empty"
        raise UsageProblem(msg)
    return os.environ[name] if name else ""


def _serve(options: Options, names: list[str], *, place: _ServerAddress | None, journals: Path | None) -> Exit:
    # Standard output belongs to the protocol: what an agent file prints goes where people look.
    out, sys.stdout = sys.stdout, sys.stderr
    try:
        from stepengine.adapters.mcp.serving import AgentServer, Offered
        from stepengine.engine import load_agent

        offered = []
        for name in names:
            one = attrs.evolve(options, agent=name, quiet=True)
            agent = load_agent(name, folders=options.settings.agent_folders)
            bench = bench_for(one, agent, is_new=True, headless=False)
            limits = limits_of(one, agent)
            offered.append(Offered(bench.engine, agent, {} if limits is None else {"limits": limits}))
        server = AgentServer(offered, journals=journals)
        if place is not None:
            return asyncio.run(_until_a_signal(server, [one.engine for one in offered], place))
    finally:
        sys.stdout = out
    asyncio.run(_serve_and_close(server.serve_stdio(), [one.engine for one in offered]))
    return Exit.COMPLETED


async def _serve_and_close(serving: Coroutine[Any, Any, None], engines: list[Any]) -> None:
    try:
        await serving
    finally:
        for engine in engines:
            await engine.aclose()


async def _until_a_signal(server: Any, engines: list[Any], place: _ServerAddress) -> Exit:
    """Serve over HTTP until Ctrl-C or SIGTERM, which is how such a server is ended."""

    def tell(url: str) -> None:
        print(f"listening at {url}", file=sys.stderr, flush=True)

    loop = asyncio.get_running_loop()
    serving = server.serve_http(host=place.host, port=place.port, token=place.token, ready=tell)
    task = asyncio.ensure_future(_serve_and_close(serving, engines))
    with interruptible(lambda: loop.call_soon_threadsafe(task.cancel)) as received:
        try:
            await task
        except asyncio.CancelledError:
            if not received:
                raise
            return Exit.TERMINATED if received[0] == signal.SIGTERM else Exit.INTERRUPTED
    return Exit.COMPLETED


def _inspect(server: list[str], header: list[str], env: list[str], *, timeout: float, as_json: bool) -> Exit:
    from stepengine.adapters.mcp import mcp_tools

    is_address = len(server) == 1 and server[0].startswith(("http://", "https://"))
    if len(server) == 1 and "://" in server[0] and not is_address:
        msg = f"{server[0]!r} is not an address of a server; it begins with http:// or https://"
        raise UsageProblem(msg)
    if (is_address and env) or (header and not is_address):
        msg = "--header is for a URL, and --env for a command"
        raise UsageProblem(msg)
    source = mcp_tools(
        server[0] if is_address else server,
        name="server",
        prompts=True,
        headers=dict([_header(one) for one in header]) or None,
        env=dict([_variable(one) for one in env]) or None,
        start_timeout=timeout,
        timeout=timeout,
    )
    try:
        found = asyncio.run(_listing(source))
    except ToolServerError as error:
        # What it advises is for code; here it is typed.
        raise UsageProblem(error.message.replace(GIVE, TYPED).replace("start_timeout=", "--timeout ")) from None
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


def _header(given: str) -> tuple[str, str]:
    """Return a header as it was typed; the value, which may be a secret, is in no message."""
    name, colon, value = given.partition(":")
    fits = name.strip().isascii() and name.strip() and not set(given) & set("\r\n\0")
    if not colon or not fits:
        msg = "--header is a name and a value, such as --header 'Authorization: Bearer ...'"
        raise UsageProblem(msg)
    return name.strip(), value.strip()


def _variable(given: str) -> tuple[str, str]:
    name, sign, value = given.partition("=")
    if not name or (not sign and name not in os.environ):
        msg = f"--env {name}: there is no such variable here; give it a value with NAME=VALUE"
        raise UsageProblem(msg)
    return name, value if sign else os.environ[name]


async def _listing(source: Any) -> Any:
    try:
        return await source.listing(source.name)
    finally:
        await source.aclose()
