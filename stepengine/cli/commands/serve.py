"""``stepengine serve``: runs over HTTP, without an application to write."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import attrs
import typer

from stepengine.cli.bench import bench_for
from stepengine.cli.commands.undo import root_of
from stepengine.cli.commands.worker import offered_by
from stepengine.cli.exits import Exit, complain
from stepengine.cli.options import Model, Options, with_options
from stepengine.cli.settings import UsageProblem
from stepengine.data.visible import visible
from stepengine.errors import StepEngineError
from stepengine.runtime.logs import LOGGER

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from stepengine.engine import Engine
    from stepengine.engine.schedules import Schedule
    from stepengine.serving import Application

__all__ = ("serve",)

OPERATOR = "operator"
NEAR = ("127.0.0.1", "::1", "localhost")


@partial(with_options, without=("agent", "as_json", "quiet", "verbose"))
def serve(
    options: Options,
    module: Annotated[
        str,
        typer.Argument(
            metavar="MODULE", help="An agent file, a folder of them, a module, or MODULE:FUNCTION that makes an engine."
        ),
    ],
    *,
    model: Model = None,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port; 0 takes a free one.", min=0, max=65535)] = 8000,
    runs: Annotated[Path, typer.Option(help="Where runs are recorded: a folder, or RUNS.db.", metavar="PLACE")] = Path(
        "runs"
    ),
    tokens: Annotated[
        Path | None,
        typer.Option(help="Who may come in, by `stepengine tokens`; default: a token for this time.", metavar="FILE"),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(help="A name under which clients reach it; may be repeated.", metavar="NAME[:PORT]"),
    ] = None,
    cors: Annotated[
        list[str] | None,
        typer.Option(help="Pages of this origin may call it with a token; may be repeated.", metavar="ORIGIN"),
    ] = None,
    reports: Annotated[
        Path | None, typer.Option(help="Show the reports of evaluations in this folder.", metavar="FOLDER")
    ] = None,
    max_live: Annotated[int, typer.Option(help="Runs that may be under way at a time.", min=1)] = 64,
    drain: Annotated[float, typer.Option(help="Seconds that runs get when it is told to stop.", min=0)] = 10.0,
    share: Annotated[
        list[str] | None,
        typer.Option(help="A member of an agent's context that pages see and set; may be repeated.", metavar="NAME"),
    ] = None,
    no_schedules: Annotated[
        bool, typer.Option("--no-schedules", help="Leave the schedules beside the agents to others.")
    ] = False,
) -> Exit:
    r"""
    Serve runs over HTTP until told to stop.

    Clients start runs, watch them as server-sent events, answer what they ask, say something, cancel, go back. All that can
    be asked stands in /openapi.json. Pages that speak AG-UI go to /ag-ui/AGENT, those with the AI SDK to /vercel/AGENT, and
    clients of MCP find the agents as tools at /mcp. Each request brings a token; a run belongs to whoever started it. Without --tokens
    there is one token, which is shown at the start and ends with the server.

    MODULE names agents as for `stepengine worker`: `agents = [...]` or `agent = ...`, and beside them, where they are
    needed, `tools`, `models` and `options`. For agents without these, tools are allowed as for `stepengine run`: nothing
    is changed and no program run unless --write or --shell says so.

    What is under way when the server is stopped, or killed, goes on at the next start with the same --runs. Several may
    share one place. Journals that it did not start are left alone. Needs the extra `serve`.

    Leaves with:
      0    it was told to stop
      2    wrong usage or configuration

    Examples:
      stepengine serve agents
      stepengine tokens add web --scopes run,read,answer --file tokens.json
      stepengine serve my_agents.py --tokens tokens.json --runs runs.db
      stepengine serve shop.agents:make_engine --tokens tokens.json \
          --host 0.0.0.0 --allow-host shop.example.com
    """
    from stepengine.serving import app
    from stepengine.serving.access import LOOPBACK
    from stepengine.serving.extra import check_extra

    check_extra()
    check_extra("uvicorn")
    if host not in NEAR and (tokens is None or not allow_host):
        msg = (
            f"--host {host} lets other machines in: name those that may come with --tokens FILE, and the names under which they "
            "reach it with --allow-host NAME"
        )
        raise UsageProblem(msg)
    asked = attrs.evolve(options, model=model, quiet=True).in_force()
    engine, schedules = _engine(module, asked)
    with _tokens(tokens) as (file, token):
        try:
            served = app(
                engine,
                runs=runs,
                tokens=file,
                schedules=() if no_schedules else schedules,
                roots=[root_of(asked)],
                reports=reports,
                max_live=max_live,
                drain=drain,
                shares=share or (),
                hosts=allow_host or LOOPBACK,
                cors=cors or (),
            )
        except StepEngineError as error:
            raise UsageProblem(error.message) from error
        with _warnings_shown():
            return asyncio.run(_until_told(served, host, port, token, [agent.id for agent in engine.agents]))


def _engine(module: str, options: Options) -> tuple[Engine, Sequence[Schedule]]:
    """
    Return the engine of what was typed, and the schedules beside its agents.

    Raises:
        UsageProblem: when there is none.
    """
    from stepengine.ag_ui import page_hooks
    from stepengine.engine import Engine

    name, colon, function = module.rpartition(":")
    if colon and function.isidentifier() and not Path(module).exists():
        return _made(name, function), ()
    offered = offered_by(module)
    # What a page of AG-UI sends beside words: its tools, context and state.
    agents = [attrs.evolve(agent, hooks=agent.hooks + page_hooks()) for agent in offered.agents]
    if offered.tools or offered.models is not None or offered.options:
        return Engine(agents, offered.tools, offered.models, **offered.options), offered.schedules
    first, *others = agents
    file = module if Path(module).is_file() else ""
    bench = bench_for(
        attrs.evolve(options, agent=file), first, others=others, is_new=True, asks_nobody=True, headless=False
    )
    return bench.engine, offered.schedules


def _made(module: str, function: str) -> Engine:
    from stepengine.engine import Engine

    # The command stands in another folder than its user. Last: nothing here takes the place of what is installed.
    sys.path.append(str(Path.cwd()))
    try:
        made: Any = getattr(importlib.import_module(module), function)()
    except Exception as error:
        msg = f"{module}:{function} makes no engine: {type(error).__name__}: {error}"
        raise UsageProblem(msg) from error
    if not isinstance(made, Engine):
        msg = f"{module}:{function} returned a {type(made).__name__}; a function without arguments that returns an Engine would be fine"
        raise UsageProblem(msg)
    return made


@contextlib.contextmanager
def _tokens(file: Path | None) -> Iterator[tuple[Path, str]]:
    """Give the file of tokens; without one that of a token for this time, and the token."""
    from stepengine.serving import Tokens

    if file is not None:
        if not file.exists():
            msg = f"there is no {file}; `stepengine tokens add NAME --file {file}` writes it"
            raise UsageProblem(msg)
        yield file, ""
        return
    with tempfile.TemporaryDirectory(prefix="stepengine-") as folder:
        made = Path(folder) / "tokens.json"
        yield made, Tokens.open(made).add(OPERATOR, ["admin"])


class _Shown(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


@contextlib.contextmanager
def _warnings_shown() -> Iterator[None]:
    """Show on stderr what the engine warns of: the logger is silent by itself, and nothing else says why a run was left alone."""
    handler = logging.StreamHandler()
    handler.setLevel(logging.WARNING)
    handler.setFormatter(_Shown("%(asctime)s %(levelname)s %(message)s"))
    LOGGER.addHandler(handler)
    try:
        yield
    finally:
        LOGGER.removeHandler(handler)


async def _until_told(served: Application, host: str, port: int, token: str, agents: Sequence[str]) -> Exit:
    from stepengine.serving.listening import listen

    try:
        has_listened = await listen(served, host, port, lambda url: _say_where(url, token, agents))
    except StepEngineError as error:
        raise UsageProblem(error.message) from error
    if has_listened:
        return Exit.COMPLETED
    return complain(f"{host}:{port} cannot be listened on; the log says why", Exit.USAGE)


def _say_where(url: str, token: str, agents: Sequence[str]) -> None:
    print(f"stepengine: {url} serves {', '.join(agents)}", file=sys.stderr)
    if token:
        print(f"stepengine: the token of this time, for all that there is: {token}", file=sys.stderr)
        print(
            f"  curl -H 'Authorization: Bearer {token}' -H 'Content-Type: application/json' \\\n"
            f'    -d \'{{"agent": "{agents[0]}", "prompt": "..."}}\' {url}/runs',
            file=sys.stderr,
        )
    sys.stderr.flush()
