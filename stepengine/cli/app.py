"""The commands, in their groups."""

from __future__ import annotations

from collections.abc import Callable

import typer

from stepengine.cli.agents import agents
from stepengine.cli.ask import ASK, ask
from stepengine.cli.chat import CHAT, chat
from stepengine.cli.check import CHECK, check
from stepengine.cli.config import config
from stepengine.cli.demo import demo
from stepengine.cli.diff import DIFF, diff
from stepengine.cli.exits import EXIT_CODES
from stepengine.cli.extend import EXTEND, extend
from stepengine.cli.fork import FORK, fork
from stepengine.cli.models import models
from stepengine.cli.policy import POLICY, _policy
from stepengine.cli.ready import READY, ready
from stepengine.cli.repair import REPAIR, repair
from stepengine.cli.replay import REPLAY, replay
from stepengine.cli.resume import RESUME, resume
from stepengine.cli.run import RUN, run
from stepengine.cli.runs import RUNS, runs
from stepengine.cli.scan import SCAN, _scan
from stepengine.cli.scrub import SCRUB, _scrub
from stepengine.cli.seal import SEAL, seal
from stepengine.cli.show import SHOW, show
from stepengine.cli.test import TEST, suite
from stepengine.cli.undo import UNDO, undo

__all__ = (
    "app",
    "version",
)

OVERVIEW = f"""\
Run programmatic LLM agents: Python generators decide, the engine performs.

\b
Start here (no key, no network):
  stepengine demo
  stepengine agents
  stepengine models
  stepengine run code_searcher --params '{{"search_queries": [{{"pattern": "def main"}}]}}'

\b
Every run is recorded. Look at it, go on with it, repeat it:
  stepengine run ./agents/mine.py "Go"
  stepengine chat
  stepengine runs
  stepengine show --last
  stepengine resume --last --answer q3=yes
  stepengine replay --last

{EXIT_CODES}"""
app = typer.Typer(
    name="stepengine",
    help=OVERVIEW,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def version() -> None:
    """Print the version."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        typer.echo(f"stepengine {installed('stepengine')}")
    except PackageNotFoundError:
        typer.echo("stepengine (not installed: run from its source folder)")


COMMANDS: dict[str, tuple[Callable[..., None], str | None]] = {
    "run": (run, RUN),
    "chat": (chat, CHAT),
    "demo": (demo, None),
    "agents": (agents, None),
    "config": (config, None),
    "ask": (ask, ASK),
    "models": (models, None),
    "version": (version, None),
    "runs": (runs, RUNS),
    "resume": (resume, RESUME),
    "replay": (replay, REPLAY),
    "show": (show, SHOW),
    "fork": (fork, FORK),
    "undo": (undo, UNDO),
    "extend": (extend, EXTEND),
    "diff": (diff, DIFF),
    "check": (check, CHECK),
    "test": (suite, TEST),
    "ready": (ready, READY),
    "seal": (seal, SEAL),
    "repair": (repair, REPAIR),
    "scan": (_scan, SCAN),
    "scrub": (_scrub, SCRUB),
    "policy": (_policy, POLICY),
}
for name, (command, text) in COMMANDS.items():
    app.command(name, help=text)(command)
