"""
The commands in their groups: what ``stepengine --help`` lists.

A command is a function with its options that returns an exit code; its docstring is its help. Its first line stands in the
list of commands, so that it has at most 62 characters, and indented lines are shown as they are, so that they have at most 76.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer

from stepengine.cli.commands.acp import acp
from stepengine.cli.commands.agents import agents
from stepengine.cli.commands.ask import ask
from stepengine.cli.commands.blame import blame
from stepengine.cli.commands.chaos import chaos
from stepengine.cli.commands.chat import chat
from stepengine.cli.commands.check import check
from stepengine.cli.commands.config import config
from stepengine.cli.commands.debug import debug
from stepengine.cli.commands.demo import demo
from stepengine.cli.commands.deployment import answer, cancel, collect, migrate, retry, say_to, status, submit, takeover
from stepengine.cli.commands.diff import diff
from stepengine.cli.commands.doctor import doctor
from stepengine.cli.commands.evaluate import evaluate
from stepengine.cli.commands.extend import extend
from stepengine.cli.commands.fork import fork
from stepengine.cli.commands.impact import impact
from stepengine.cli.commands.init import init
from stepengine.cli.commands.mcp import inspect_server, serve
from stepengine.cli.commands.models import models
from stepengine.cli.commands.moving import export, import_, move
from stepengine.cli.commands.pin import pin
from stepengine.cli.commands.policy import policy
from stepengine.cli.commands.price import price
from stepengine.cli.commands.ready import ready
from stepengine.cli.commands.repair import repair
from stepengine.cli.commands.replay import replay
from stepengine.cli.commands.resume import resume
from stepengine.cli.commands.run import run
from stepengine.cli.commands.runs import runs
from stepengine.cli.commands.scan import scan
from stepengine.cli.commands.scrub import scrub
from stepengine.cli.commands.seal import seal
from stepengine.cli.commands.show import show
from stepengine.cli.commands.test import suite
from stepengine.cli.commands.tools import tools
from stepengine.cli.commands.undo import undo
from stepengine.cli.commands.view import view
from stepengine.cli.commands.worker import worker
from stepengine.cli.exits import EXIT_CODES, Exit, explained, leave
from stepengine.cli.trusting import OPTION, at_the_gate, trust

__all__ = ("app",)

OVERVIEW = r"""
Run programmatic LLM agents: Python generators decide, the engine performs.

Start here (no key, no network):
  stepengine demo
  stepengine init my-agent
  stepengine agents
  stepengine models
  stepengine run code_searcher \
      --params '{"search_queries": [{"pattern": "def main"}]}'

Every run is recorded. Look at it, go on with it, repeat it:
  stepengine run ./agents/mine.py "Go"
  stepengine chat
  stepengine runs
  stepengine show --last
  stepengine view --last --open
  stepengine resume --last --answer q3=yes
  stepengine replay --last
"""

FIRST = """\
Agents as Python generators: they decide, the engine performs.

  stepengine demo                    watch one work; no key, no network
  stepengine init my-agent           a project: agent, tests, a recorded run
  stepengine doctor                  which models and tools work here
  stepengine run AGENT "Do this"     run one; `stepengine agents` lists them
  stepengine chat                    talk with one; it asks before it acts
  stepengine show --last             every run is recorded: look at it,
  stepengine resume --last           go on with it, or `replay` it for nothing
  stepengine --help                  all commands; COMMAND --help for one"""
"""What is shown to somebody who types no command: how a day begins."""

MARKUP = re.compile(r"\[(?=[a-z#/@])")
"""Where rich would take text for a style."""


def version() -> Exit:
    """Print the version."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        print(f"stepengine {installed('stepengine')}")
    except PackageNotFoundError:
        print("stepengine (not installed: run from its source folder)")
    return Exit.COMPLETED


GROUPS: dict[str, dict[str, Callable[..., Exit]]] = {
    "Begin": {"demo": demo, "init": init, "agents": agents, "tools": tools, "models": models, "doctor": doctor},
    "Every day": {
        "run": run, "chat": chat, "runs": runs, "show": show, "view": view, "resume": resume, "replay": replay, "debug": debug,
        "undo": undo,
    },
    "Test and compare": {
        "test": suite, "ready": ready, "diff": diff, "extend": extend, "fork": fork, "eval": evaluate, "impact": impact, "blame": blame,
        "pin": pin, "price": price, "chaos": chaos,
    },
    "Models, editors and other programs": {"ask": ask, "acp": acp},
    "Journals, keys and settings": {
        "check": check, "seal": seal, "repair": repair, "scan": scan, "scrub": scrub, "policy": policy, "trust": trust,
        "config": config, "version": version,
    },
    "Deploy": {
        "worker": worker, "submit": submit, "status": status, "answer": answer, "say": say_to, "cancel": cancel, "retry": retry,
        "takeover": takeover, "export": export, "import": import_, "gc": collect, "migrate": migrate,
    },
}  # fmt: skip
"""Every command, by its group and its name; those that are needed first and most stand first."""
UNDER: dict[str, tuple[str, str, dict[str, Callable[..., Exit]]]] = {
    "mcp": (
        "Models, editors and other programs",
        "Agents as tools for MCP clients, and a look at MCP servers.",
        {"serve": serve, "inspect": inspect_server},
    ),
    "release": ("Deploy", "Let durable runs go on with another version of their agents.", {"move": move}),
}
"""Commands of two words: their group, what the first word stands for, and the commands by their second word."""
AS_TYPED = {"ignore_unknown_options": True, "allow_interspersed_args": False}
RUNNING = (run, chat, ask, resume, replay, fork, extend)
"""Those that leave with any of the exit codes."""
LOCAL = (
    *RUNNING, agents, doctor, view, debug, undo, suite, ready, impact, blame, pin, evaluate, acp, serve, policy,
    export, import_, move,
)  # fmt: skip
"""Those that look for agents in ./agents, and take --trust."""
ASKING = (run, chat)
"""Those that ask a person at a terminal whether ./agents is trusted; ``acp`` and others have no such person."""


def _shown(text: str) -> str:
    """Return a help text as typer takes it: prose is wrapped where it is shown, indented lines stay as they are."""
    return "\n\n".join(["\n".join(_lines(paragraph)) for paragraph in MARKUP.sub(r"\\[", text).split("\n\n")])


def _lines(paragraph: str) -> Iterator[str]:
    prose: list[str] = []
    for line in paragraph.split("\n"):
        if line.startswith(" "):
            heading = " ".join(prose)
            yield from [f"[bold not dim]{heading}[/]"] if heading else []
            # One backslash at the end would take the mark behind it for text.
            yield f"[not dim]{line}\\[/]" if line.endswith("\\") else f"[not dim]{line}[/]"
            prose = []
        else:
            prose.append(line)
    yield from [" ".join(prose)] if prose else []


def _leaving(command: Callable[..., Exit]) -> Callable[..., None]:
    @functools.wraps(command)
    def ended(**given: Any) -> None:
        content = given.pop("trust", "") if command in LOCAL else ""

        def judged() -> Exit:
            with at_the_gate(asks=command in ASKING, content=content):
                return command(**given)

        leave(explained(judged))

    if command in LOCAL:
        own = inspect.signature(command, eval_str=True)
        option = inspect.Parameter(
            "trust", inspect.Parameter.KEYWORD_ONLY, default="", annotation=Annotated[str, OPTION]
        )
        ended.__signature__ = own.replace(parameters=[*own.parameters.values(), option])  # type: ignore[attr-defined]
    return ended


def _versioned(is_asked: bool) -> None:
    if is_asked:
        version()
        raise typer.Exit


def _first(
    context: typer.Context,
    *,
    _: Annotated[
        bool, typer.Option("--version", callback=_versioned, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(FIRST)


def _made() -> typer.Typer:
    made = typer.Typer(
        name="stepengine",
        help=_shown(OVERVIEW.strip()),
        epilog=_shown(EXIT_CODES),
        callback=_first,
        invoke_without_command=True,
        add_completion=False,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
    )
    for group, commands in GROUPS.items():
        for name, command in commands.items():
            _add(made, name, command, group)
        for first, (of, text, several) in UNDER.items():
            if of == group:
                below = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")
                for name, command in several.items():
                    _add(below, name, command)
                made.add_typer(below, name=first, help=text, rich_help_panel=group)
    return made


def _add(made: typer.Typer, name: str, command: Callable[..., Exit], group: str | None = None) -> None:
    text = inspect.cleandoc(command.__doc__ or "")
    made.command(
        name,
        help=_shown(text),
        short_help=MARKUP.sub(r"\\[", text.partition("\n")[0]),
        epilog=_shown(EXIT_CODES) if command in RUNNING else None,
        rich_help_panel=group,
        # What follows the command of a server is its own, also where it looks like an option of ours.
        context_settings=AS_TYPED if command is inspect_server else None,
    )(_leaving(command))


app = _made()
