"""``stepengine mcp``: serve agents as the tools of an MCP server, or show the tools of a server."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import attrs
import typer

from stepengine.cli.bench import choose_limits, make_engine_setup, require_known_models
from stepengine.cli.exits import Exit, get_exit_code_of_signal
from stepengine.cli.journals import Interrupted, await_unless_interrupted
from stepengine.cli.options import Model, Options, make_unique_dict, with_shared_options
from stepengine.cli.settings import UsageProblem
from stepengine.data.visible import visible
from stepengine.errors import ToolServerError

GIVE, TYPED = "mcp_tools(headers={'Authorization': 'Bearer ...'})", "--header 'Authorization: Bearer ...'"


@partial(with_shared_options, without=("agent", "as_json", "quiet", "verbose"))
def serve(
    options: Options,
    agents: Annotated[list[str], typer.Argument(metavar="AGENT...", help="Ids or files of agents.")],
    *,
    model: Model = None,
    http: Annotated[
        str, typer.Option(help="Listen on this address, at /mcp, instead of standard input.", metavar="[HOST:]PORT")
    ] = "",
    token_env: Annotated[
        str, typer.Option(help="Environment variable with the token that clients of --http must send.", metavar="NAME")
    ] = "",
    journals: Annotated[
        Path | None, typer.Option(help="Record the run of each call in a file of this folder.", metavar="DIR")
    ] = None,
) -> Exit:
    """
    Serve agents as the tools of an MCP server.

    Serves on standard input and output, for an editor or any other client, or with --http over streamable HTTP.
    Each AGENT is an id or the path of an agent file, and becomes one tool with the agent's prompt and params.
    Questions of a run, permissions included, go to the user of the client; if the client cannot show questions,
    they are declined, and the result says so. Calls that change something or run a program need approval, unless
    --write or --shell allows them.

    Examples:
      stepengine mcp serve code_searcher
      stepengine mcp serve ./agents/reviewer.py code_searcher --cwd ../project
      stepengine mcp serve code_searcher --http 8000 --journals runs

    In a client's settings:
      {"mcpServers": {"agents": {
        "command": "stepengine", "args": ["mcp", "serve", "code_searcher"]}}}
    """
    if token_env and not http:
        msg = "--token-env needs --http; a process that you start yourself needs no token"
        raise UsageProblem(msg)
    address, token = (_parse_http_address(http), _read_token_variable(token_env)) if http else (None, "")
    return _serve_agents(attrs.evolve(options, model=model).with_settings(), agents, journals, address, token)


def inspect_server(
    server: Annotated[list[str], typer.Argument(metavar="URL|COMMAND...", help="The server.")],
    *,
    header: Annotated[
        list[str] | None,
        typer.Option(help="HTTP header of each request to a URL; may be repeated.", metavar="'NAME: VALUE'"),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(
            help="Environment variable for the command; NAME alone passes the current value.", metavar="NAME[=VALUE]"
        ),
    ] = None,
    timeout: Annotated[
        float,
        typer.Option(help="Time limit for the start, in seconds; npx may download first.", metavar="SECONDS", min=0.1),
    ] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> Exit:
    r"""
    Show what an MCP server offers.

    Shows each tool with its complete description, hidden characters included, its hints and its digest. The server
    is the URL of an endpoint, or a command to start. No tool is called. Put options before the command; only --json
    may come last.

    Examples:
      stepengine mcp inspect npx -y @modelcontextprotocol/server-filesystem .
      stepengine mcp inspect https://mcp.example.com/mcp --json
      stepengine mcp inspect --header "Authorization: Bearer $TOKEN" \
          https://mcp.example.com/mcp
      stepengine mcp inspect --env API_KEY --timeout 120 npx -y some-server
    """
    server, more = _split_server_and_options(server)
    given = {"timeout": timeout, "as_json": as_json, **more, "header": [*(header or []), *more["header"]]}
    return _connect_and_print_tools(server, env=env or [], **given)


def _split_server_and_options(words: list[str]) -> tuple[list[str], dict[str, Any]]:
    """Split the typed words into a server and options: after a URL all words are options, in a command none but ``--json``."""
    rest = list(words)
    later: dict[str, Any] = {"header": []}
    if rest[-1] == "--json" and len(rest) > 1:
        later["as_json"] = bool(rest.pop())
    while rest[0].startswith(("http://", "https://")) and len(rest) > 1:
        name, sign, value = rest.pop(1).partition("=")
        if name == "--json" and not sign:
            later["as_json"] = True
            continue
        if name not in ("--header", "--timeout") or not (sign or len(rest) > 1):
            msg = f"{name!r} is not valid after the URL of a server; valid options there: --header, --timeout, --json"
            raise UsageProblem(msg)
        value = value if sign else rest.pop(1)
        if name == "--header":
            later["header"].append(value)
        else:
            later["timeout"] = _parse_timeout(value)
    return rest, later


def _parse_timeout(text: str) -> float:
    """Parse ``--timeout`` as seconds; raise ``UsageProblem`` unless it is a number above 0."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        msg = f"--timeout must be a number of seconds above 0, not {text!r}"
        raise UsageProblem(msg)
    return seconds


def _parse_http_address(text: str) -> tuple[str, int]:
    """Parse ``[HOST:]PORT``, with 127.0.0.1 as the default host."""
    host, _, port = text.rpartition(":")
    if not port.isascii() or not port.isdecimal() or len(port) > len("65535"):
        msg = f"--http must be a port, or HOST:PORT, such as 8000 or 127.0.0.1:8000, not {text!r}"
        raise UsageProblem(msg)
    return host.removeprefix("[").removesuffix("]") or "127.0.0.1", int(port)


def _read_token_variable(name: str) -> str:
    """Return the token in an environment variable, ``""`` without a name; raise ``UsageProblem`` if it is unset."""
    if name and not os.environ.get(name):
        msg = f"--token-env {name}: the environment variable is not set, or is empty"
        raise UsageProblem(msg)
    return os.environ[name] if name else ""


def _serve_agents(
    options: Options, names: list[str], journals: Path | None, address: tuple[str, int] | None, token: str
) -> Exit:
    """Serve agents over HTTP at *address*, or over standard input and output, until stopped; return the exit code."""
    # Standard output belongs to the protocol, so the output of agent files goes to stderr.
    out, sys.stdout = sys.stdout, sys.stderr
    try:
        from stepengine.adapters.mcp.agent_server import AgentServer, OfferedAgent
        from stepengine.engine import load_agent

        offered = []
        for name in names:
            one = attrs.evolve(options, agent=name, quiet=True)
            agent = load_agent(name, folders=options.settings.agent_folders)
            bench = make_engine_setup(one, agent, is_new=True, asks_nobody=True, headless=False)
            require_known_models(one, [agent])
            limits = choose_limits(one, agent)
            offered.append(OfferedAgent(bench.engine, agent, {} if limits is None else {"limits": limits}))
        server = AgentServer(offered, journals=journals)
        engines = [one.engine for one in offered]
        if address is not None:
            return asyncio.run(_serve_http(server, engines, *address, token))
    finally:
        sys.stdout = out
    asyncio.run(_await_and_close_engines(server.serve_stdio(), engines))
    return Exit.COMPLETED


async def _await_and_close_engines(serving: Coroutine[Any, Any, None], engines: list[Any]) -> None:
    try:
        await serving
    finally:
        for engine in engines:
            await engine.aclose()


async def _serve_http(server: Any, engines: list[Any], host: str, port: int, token: str) -> Exit:
    """Serve over HTTP until Ctrl-C or SIGTERM, close *engines*, and return the exit code."""

    def print_url(url: str) -> None:
        print(f"listening at {url}", file=sys.stderr, flush=True)

    serving = server.serve_http(host=host, port=port, token=token, ready=print_url)
    try:
        await await_unless_interrupted(_await_and_close_engines(serving, engines))
    except Interrupted as interrupted:
        return get_exit_code_of_signal(interrupted.number)
    return Exit.COMPLETED


def _connect_and_print_tools(
    server: list[str], header: list[str], env: list[str], *, timeout: float, as_json: bool
) -> Exit:
    """Connect to an MCP server, and print its tools as text or JSON; return the exit code."""
    from stepengine.adapters.mcp import mcp_tools

    is_address = len(server) == 1 and server[0].startswith(("http://", "https://"))
    if len(server) == 1 and "://" in server[0] and not is_address:
        msg = f"{server[0]!r} is not the URL of a server; it must start with http:// or https://"
        raise UsageProblem(msg)
    if (is_address and env) or (header and not is_address):
        msg = "--header is for a URL, and --env for a command"
        raise UsageProblem(msg)
    source = mcp_tools(
        server[0] if is_address else server,
        name="server",
        prompts=True,
        headers=make_unique_dict("--header", map(_parse_header, header)) or None,
        env=make_unique_dict("--env", map(_parse_environment_variable, env)) or None,
        start_timeout=timeout,
        timeout=timeout,
    )
    try:
        found = asyncio.run(_list_tools_and_close(source))
    except ToolServerError as error:
        # The advice is for Python code; replace it by options.
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


def _parse_header(text: str) -> tuple[str, str]:
    """Parse a typed header; its value may be a secret and is in no message."""
    name, colon, value = text.partition(":")
    fits = name.strip().isascii() and name.strip() and not set(text) & set("\r\n\0")
    if not colon or not fits:
        msg = "--header must be a name and a value, such as --header 'Authorization: Bearer ...'"
        raise UsageProblem(msg)
    return name.strip(), value.strip()


def _parse_environment_variable(text: str) -> tuple[str, str]:
    """Parse ``NAME=VALUE``; for ``NAME`` alone, return the value in this environment."""
    name, sign, value = text.partition("=")
    if not name or (not sign and name not in os.environ):
        msg = f"--env {name}: the environment variable is not set; pass a value with NAME=VALUE"
        raise UsageProblem(msg)
    return name, value if sign else os.environ[name]


async def _list_tools_and_close(source: Any) -> Any:
    """Return the tools of an MCP server, and close the connection."""
    try:
        return await source.listing(source.name)
    finally:
        await source.aclose()
