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
        typer.Option(help="Another model that the editor offers, for all agents.", metavar="MODEL"),
    ] = None,
    allow_bypass: Annotated[
        bool, typer.Option("--allow-bypass", help="Offer a mode without approvals in the editor.")
    ] = False,
    terminals: Annotated[
        bool,
        typer.Option(
            "--terminals",
            help="Run commands in the editor's terminals, if it has any, with its environment variables.",
        ),
    ] = False,
) -> Exit:
    """
    Serve an agent to an editor; the editor starts this command.

    Speaks the Agent Client Protocol over stdin and stdout. The agent works in the folder that the editor opens.
    Reading and searching need no approval; file changes and commands are shown and need approval, unless you choose
    another mode in the editor. MCP servers of the editor are started when the agent first needs them (extra `mcp`).
    Sessions are stored in the state folder. Needs the extra `acp`; `stepengine config doctor` shows how to install
    it.

    In Zed's settings:
      "agent_servers": {"stepengine": {
        "command": "stepengine", "args": ["acp", "base2", "--model", "MODEL"]}}
    """
    options = Options(agent=agent, model=model, base_url=base_url, api_key_env=api_key_env, price=price, config=config)
    return _serve_editor(options.with_settings(), offer or (), allows_bypass=allow_bypass, in_terminals=terminals)


def _serve_editor(options: Options, offered: Sequence[str], *, allows_bypass: bool, in_terminals: bool) -> Exit:
    """Serve an agent over standard input and output until the editor disconnects; return the exit code."""
    from stepengine.adapters.acp import redirect_stdout, serve
    from stepengine.cli.bench import choose_policy, make_asking_policy, make_engine_setup
    from stepengine.cli.state_folder import EDITORS
    from stepengine.engine import load_agent
    from stepengine.journal.recorded_runs import get_runs_folder

    runs = get_runs_folder()
    if runs is None:
        msg = "no home folder found to store sessions in; set STEPENGINE_STATE_DIR"
        raise UsageProblem(msg)
    options = attrs.evolve(options, write=True, shell=True, asks=True, quiet=True)  # noqa: S604  (no process is started)
    policy = choose_policy(options) or make_asking_policy()

    def make_engine(
        cwd: Path,
        /,
        *,
        observers: tuple[Callable[[Event], object], ...] = (),
        mode: str = "",
        model: str = "",
        buffers: Buffers | None = None,
        terminals: Terminals | None = None,
    ) -> Engine:
        """Return the engine of a session with the mode, model, buffers and terminals that the editor chose."""
        agent = load_agent(options.agent, folders=options.settings.agent_folders)
        chosen = attrs.evolve(policy, mode=cast("Any", mode or policy.mode))
        own = terminals if in_terminals else None
        here = attrs.evolve(options, cwd=cwd, policy=chosen, buffers=buffers, terminals=own)
        if model:
            here = attrs.evolve(here, model=[*[one for one in here.model or () if "=" in one], model])
        try:
            return make_engine_setup(here, agent, is_new=True, observers=observers, headless=False).engine
        except UsageProblem as problem:
            raise DefinitionError(str(problem)) from None

    out = redirect_stdout()
    agent = load_agent(options.agent, folders=options.settings.agent_folders)
    modes, models = _list_permission_modes(policy, allows_bypass=allows_bypass), _list_offered_models(options, offered)
    asyncio.run(
        serve(make_engine, agent.id, runs.parent / EDITORS, out=out, mcp=_find_mcp_maker(), modes=modes, models=models)
    )
    return Exit.COMPLETED


def _list_permission_modes(policy: Policy, *, allows_bypass: bool) -> list[str]:
    """Return the modes that can be chosen, the current one first; ``bypass`` only if the command started with it."""
    from stepengine.permissions.policy import MODES

    others = [mode for mode in MODES if mode != policy.mode and (mode != "bypass" or allows_bypass)]
    return [policy.mode, *others]


def _list_offered_models(options: Options, offered: Sequence[str]) -> list[str]:
    """Return the models that the editor may choose: those of ``--model`` and ``--offer``, and the aliases of the settings."""
    registry = options.settings.make_models()
    for model in offered if not options.base_url else ():
        registry.parse(model)
    named = [options.main_model, *offered, *options.settings.table("aliases")]
    return [] if named == [""] else list(dict.fromkeys(named))


def _find_mcp_maker() -> McpMaker | None:
    """Return the function that makes tools of MCP servers; ``None`` if the package ``mcp`` is not installed."""
    if importlib.util.find_spec("mcp") is None:
        return None
    from stepengine.adapters.mcp import mcp_tools

    return mcp_tools
