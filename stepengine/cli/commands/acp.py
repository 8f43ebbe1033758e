"""``stepengine acp``: an agent for an editor, over stdin and stdout."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import attrs
import typer

from stepengine.cli.exits import Exit
from stepengine.cli.options import ApiKeyEnv, BaseUrl, Config, Options, Price
from stepengine.cli.settings import UsageProblem
from stepengine.errors import DefinitionError

if TYPE_CHECKING:
    from stepengine.adapters.acp.servers import McpMaker
    from stepengine.data.events import Event
    from stepengine.engine import Engine
    from stepengine.permissions import Policy
    from stepengine.workspace.buffers import Buffers
    from stepengine.workspace.terminals import Terminals

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
    offer: Annotated[
        list[str] | None,
        typer.Option(help="Another model that can be chosen in the editor, for all agents.", metavar="MODEL"),
    ] = None,
    allow_bypass: Annotated[
        bool, typer.Option("--allow-bypass", help="Let the mode be chosen in the editor that asks about nothing.")
    ] = False,
    terminals: Annotated[
        bool,
        typer.Option(
            "--terminals",
            help="Run commands in terminals of the editor, whose variables they see, where it offers any.",
        ),
    ] = False,
) -> Exit:
    """
    Serve an agent to an editor; the editor starts this command.

    It speaks the Agent Client Protocol over stdin and stdout. The agent works in the folder that the editor names. It reads
    and searches by itself; what changes a file or runs a program is shown and asked about first, unless another mode is chosen
    in the editor. The MCP servers that the editor names are started when the agent first needs them, which takes the extra `mcp`.
    Sessions are kept in the user's state folder. Needs the extra `acp`; `stepengine config doctor` tells how it is added.

    In Zed's settings:
      "agent_servers": {"stepengine": {
        "command": "stepengine", "args": ["acp", "base2", "--model", "MODEL"]}}
    """
    options = Options(agent=agent, model=model, base_url=base_url, api_key_env=api_key_env, price=price, config=config)
    return _serve(options.in_force(), offer or (), allows_bypass=allow_bypass, in_terminals=terminals)


def _serve(options: Options, offered: Sequence[str], *, allows_bypass: bool, in_terminals: bool) -> Exit:
    from stepengine.adapters.acp import serve, take_stdout
    from stepengine.cli.bench import asking_policy, bench_for, policy_of
    from stepengine.cli.recording import EDITORS, runs_folder
    from stepengine.engine import load_agent

    runs = runs_folder()
    if runs is None:
        msg = "there is no home folder to keep sessions in; set STEPENGINE_STATE_DIR"
        raise UsageProblem(msg)
    options = attrs.evolve(options, write=True, shell=True, asks=True, quiet=True)  # noqa: S604  (no process is started)
    policy = policy_of(options) or asking_policy()

    def make(
        cwd: Path,
        /,
        *,
        observers: tuple[Callable[[Event], object], ...] = (),
        mode: str = "",
        model: str = "",
        buffers: Buffers | None = None,
        terminals: Terminals | None = None,
    ) -> Engine:
        agent = load_agent(options.agent, folders=options.settings.agent_folders)
        chosen = attrs.evolve(policy, mode=cast("Any", mode or policy.mode))
        here = attrs.evolve(options, cwd=cwd, policy=chosen, buffers=buffers)
        if in_terminals:
            here = attrs.evolve(here, terminals=terminals)
        if model:
            here = attrs.evolve(here, model=[*[one for one in here.model or () if "=" in one], model])
        try:
            return bench_for(here, agent, is_new=True, observers=observers, headless=False).engine
        except UsageProblem as problem:
            raise DefinitionError(str(problem)) from None

    out = take_stdout()
    agent = load_agent(options.agent, folders=options.settings.agent_folders)
    modes, models = _modes(policy, allows_bypass=allows_bypass), _models(options, offered)
    asyncio.run(serve(make, agent.id, runs.parent / EDITORS, out=out, mcp=_mcp(), modes=modes, models=models))
    return Exit.COMPLETED


def _modes(policy: Policy, *, allows_bypass: bool) -> list[str]:
    """Return the modes that can be chosen, the one in force first; nobody gets out of being asked who did not begin so."""
    from stepengine.permissions.policy import MODES

    others = [mode for mode in MODES if mode != policy.mode and (mode != "bypass" or allows_bypass)]
    return [policy.mode, *others]


def _models(options: Options, offered: Sequence[str]) -> list[str]:
    """Return the models that can be chosen, those in force first."""
    from stepengine.cli.bench import registry_of

    registry = registry_of(options.settings)
    for model in offered if not options.base_url else ():
        registry.parse(model)
    named = [options.main_model, *offered, *options.settings.table("aliases")]
    return [] if named == [""] else list(dict.fromkeys(named))


def _mcp() -> McpMaker | None:
    """Return what makes tools of MCP servers, where the package is there that speaks with them."""
    if importlib.util.find_spec("mcp") is None:
        return None
    from stepengine.adapters.mcp import mcp_tools

    return mcp_tools
