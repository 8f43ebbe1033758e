"""``stepengine acp``: an agent for an editor, over stdin and stdout."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import attrs
import typer

from stepengine.cli.exits import Exit
from stepengine.cli.options import ApiKeyEnv, BaseUrl, Config, Options, Price
from stepengine.cli.settings import UsageProblem
from stepengine.errors import DefinitionError

if TYPE_CHECKING:
    from stepengine.data.events import Event
    from stepengine.engine import Engine

__all__ = ("acp",)


def acp(
    agent: Annotated[str, typer.Argument(metavar="AGENT", help="Id or file of the agent.")] = "base2",
    *,
    model: Annotated[
        list[str] | None,
        typer.Option(help="Model of every agent, or of one of them.", metavar="MODEL|AGENT=MODEL"),
    ] = None,
    base_url: BaseUrl = "",
    api_key_env: ApiKeyEnv = "",
    price: Price = "",
    config: Config = None,
) -> Exit:
    """
    Serve an agent to an editor; the editor starts this command.

    It speaks the Agent Client Protocol over stdin and stdout. The agent works in the folder that the editor names. It reads
    and searches by itself; what changes a file or runs a program is shown and asked about first. Sessions are kept in the
    user's state folder. Needs the extra `acp`; `stepengine doctor` tells how it is added.

    In Zed's settings:
      "agent_servers": {"stepengine": {
        "command": "stepengine", "args": ["acp", "base2", "--model", "MODEL"]}}
    """
    options = Options(agent=agent, model=model, base_url=base_url, api_key_env=api_key_env, price=price, config=config)
    return _serve(options.in_force())


def _serve(options: Options) -> Exit:
    from stepengine.acp import serve, take_stdout
    from stepengine.cli.bench import bench_for
    from stepengine.cli.recording import EDITORS, runs_folder
    from stepengine.engine import load_agent

    runs = runs_folder()
    if runs is None:
        msg = "there is no home folder to keep sessions in; set STEPENGINE_STATE_DIR"
        raise UsageProblem(msg)
    options = attrs.evolve(options, write=True, shell=True, asks=True, quiet=True)  # noqa: S604  (no process is started)

    def make(cwd: Path, /, *, observers: tuple[Callable[[Event], object], ...] = ()) -> Engine:
        agent = load_agent(options.agent, folders=options.settings.agent_folders)
        here = attrs.evolve(options, cwd=cwd)
        try:
            return bench_for(here, agent, is_new=True, observers=observers, headless=False).engine
        except UsageProblem as problem:
            raise DefinitionError(str(problem)) from None

    out = take_stdout()
    agent = load_agent(options.agent, folders=options.settings.agent_folders)
    asyncio.run(serve(make, agent.id, runs.parent / EDITORS, out=out))
    return Exit.COMPLETED
