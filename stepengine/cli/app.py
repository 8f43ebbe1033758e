"""
The commands in their groups: what ``stepengine --help`` lists.

A command is a function with its options that returns an exit code; its docstring is its help. Its first line stands in the
list of commands, so that it has at most 62 characters, and indented lines are shown as they are, so that they have at most 76.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Annotated, Any, NamedTuple, TypeAlias

import typer
import typer.core
import typer.main

from stepengine.cli import loading
from stepengine.cli.exits import EXIT_CODES, Exit, explained, leave

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


Parsed: TypeAlias = Any
"""A command as typer parses it; the classes of the click inside of typer have no public names."""


class Listed(NamedTuple):
    """
    A command as the list shows it; its module is loaded when it is called, or its own help is asked for.

    Attributes:
        place: Its module below ``stepengine.cli``, and its function.
        text: The first line of that function's docstring.
    """

    place: str
    text: str

    def load(self) -> Callable[..., Exit]:
        """Return the function."""
        module, _, name = self.place.partition(":")
        with loading():
            function: Callable[..., Exit] = getattr(import_module(f"stepengine.cli.{module}"), name)
        return function


GROUPS = {
    "Begin": {
        "demo": Listed("commands.demo:demo", "Watch an agent edit a small project, without a key."),
        "init": Listed("commands.init:init", "Make a project: an agent, its tests, a recorded run, and CI."),
        "agents": Listed("commands.agents:agents", "List the agents that can be run."),
        "tools": Listed("commands.tools:tools", "List the bundled tools, and what they take and give."),
        "models": Listed("commands.models:models", "List the providers of models, and whether their keys are set."),
        "doctor": Listed("commands.doctor:doctor", "Say what is here, what is missing, and how to repair it."),
    },
    "Every day": {
        "run": Listed("commands.run:run", "Run an agent, and print its output."),
        "chat": Listed("commands.chat:chat", "Talk with an agent: watch it work, decide what it may do."),
        "runs": Listed("commands.runs:runs", "List the recorded runs of this folder."),
        "show": Listed("commands.show:show", "Show a run step by step."),
        "view": Listed("commands.view:view", "Write a run as one page for a browser."),
        "resume": Listed("commands.resume:resume", "Go on with a run: answer it, or pick it up after a crash."),
        "replay": Listed("commands.replay:replay", "Repeat a run from its record, without model and network."),
        "debug": Listed("commands.debug:debug", "Stand at any step of a recorded run, and go both ways."),
        "undo": Listed("commands.undo:undo", "Bring back the files that a run wrote."),
        "wake": Listed("commands.wake:wake", "Go on with runs that sleep, when their time has come."),
        "post": Listed("commands.post:post", "Send a message to a run: what its Receive on TOPIC gets."),
        "schedules": Listed(
            "commands.schedules:schedules", "List when agents are started by themselves: next and last."
        ),
    },
    "Test and compare": {
        "test": Listed("commands.test:suite", "Replay runs against the present code, as a test suite."),
        "ready": Listed("commands.ready:ready", "Say which waiting runs go on with the present code."),
        "diff": Listed("commands.diff:diff", "Show what two runs did differently."),
        "extend": Listed("commands.extend:extend", "Record a run again where its agent was changed."),
        "fork": Listed("commands.fork:fork", "Go on from the middle of a run, in a new journal."),
        "eval": Listed("commands.evaluate:evaluate", "Say how good agents are at a set of tasks, with intervals."),
        "improve": Listed("commands.improve:improve", "Search for a better version of an agent, and prove it."),
        "impact": Listed("commands.impact:impact", "Say what a change of an agent does to recorded runs."),
        "blame": Listed("commands.blame:blame", "Find the step at which a failed run lost its chance."),
        "pin": Listed("commands.pin:pin", "Turn a run that failed into a test that fails until repaired."),
        "price": Listed("commands.price:price", "Say what recorded runs would have cost with other models."),
        "chaos": Listed("commands.chaos:chaos", "Run an agent in worlds where models, tools and processes fail."),
    },
    "Models, editors and other programs": {
        "ask": Listed("commands.ask:ask", "Call a model once, and print its reply while it comes."),
        "acp": Listed("commands.acp:acp", "Serve an agent to an editor; the editor starts this command."),
        "serve": Listed("commands.serve:serve", "Serve runs over HTTP until told to stop."),
    },
    "Journals, keys and settings": {
        "check": Listed("commands.check:check", "Check journals: are they whole, and free of keys?"),
        "verify": Listed("commands.verify:verify", "Tell whether a signed journal is as it was written."),
        "seal": Listed("commands.seal:seal", "Make a journal valid again after it was edited by hand."),
        "repair": Listed("commands.repair:repair", "Keep the sound start of a damaged journal in a new file."),
        "scan": Listed("commands.scan:scan", "Look for keys and tokens in files of any kind."),
        "scrub": Listed("commands.scrub:scrub", "Copy a journal without what looks like a secret."),
        "policy": Listed("commands.policy:policy", "Check a policy, and try it on recorded runs."),
        "trust": Listed("trusting:trust", "Let commands run the agent files of a folder."),
        "config": Listed("commands.config:config", "Show every setting, its value and where it came from."),
        "version": Listed("app:version", "Print the version."),
    },
    "Deploy": {
        "worker": Listed("commands.worker:worker", "Run durable runs from a database until told to stop."),
        "submit": Listed("commands.deployment:submit", "Order a durable run, and print its id."),
        "status": Listed("commands.deployment:status", "Show a deployment: runs, workers alive and dead, releases."),
        "answer": Listed("commands.deployment:answer", "Answer what a run asks that somebody else has in hands."),
        "say": Listed("commands.deployment:say_to", "Say something to a run that somebody else has in hands."),
        "cancel": Listed("commands.deployment:cancel", "Cancel a run that somebody else has in hands."),
        "retry": Listed("commands.deployment:retry", "Let a durable run that stopped go on after its last record."),
        "takeover": Listed("commands.deployment:takeover", "Give the runs of a dead worker to the living."),
        "export": Listed("commands.moving:export", "Write a durable run into an ordinary journal file."),
        "import": Listed("commands.moving:import_", "Let a run of a journal file go on as a durable run."),
        "gc": Listed("commands.deployment:collect", "Delete durable runs that ended long ago."),
        "migrate": Listed("commands.deployment:migrate", "Make and update the tables of durable runs."),
    },
}
"""Every command, by its group and its name; those that are needed first and most stand first."""
UNDER = {
    "mcp": (
        "Models, editors and other programs",
        "Agents as tools for MCP clients, and a look at MCP servers.",
        {
            "serve": Listed("commands.mcp:serve", "Offer agents as the tools of an MCP server."),
            "inspect": Listed("commands.mcp:inspect_server", "Show what an MCP server offers."),
        },
    ),
    "release": (
        "Deploy",
        "Let durable runs go on with another version of their agents.",
        {
            "move": Listed("commands.moving:move", "Let runs of one release go on with another."),
        },
    ),
    "tokens": (
        "Deploy",
        "Say who may use a server of runs: tokens, and what each allows.",
        {
            "add": Listed("commands.tokens:add", "Make a token, and print it: it is shown this one time."),
            "list": Listed("commands.tokens:listed", "List who has a token, and for what."),
            "remove": Listed("commands.tokens:remove", "Remove a token: whoever has it is let in no more."),
        },
    ),
    "package": (
        "Begin",
        "Agents as packages: check one before you share it, agree to one.",
        {
            "check": Listed("commands.package:check", "Check what somebody who installs a package of agents meets."),
            "agree": Listed("commands.package:agree", "Agree to what the agents of an installed package want."),
        },
    ),
}
"""Commands of two words: their group, what the first word stands for, and the commands by their second word."""
LISTED = {
    name: (group, listed)
    for group, commands in GROUPS.items()
    for name, listed in [
        *commands.items(),
        *[(first, Listed("", text)) for first, (of, text, _) in UNDER.items() if of == group],
    ]
}
"""What the list shows, by name and in its order: the group, and the command or what a first word stands for."""
AS_TYPED = {"ignore_unknown_options": True, "allow_interspersed_args": False}
RUNNING = ("run", "chat", "ask", "resume", "replay", "fork", "extend")
"""Those that leave with any of the exit codes."""
LOCAL = (
    *RUNNING, "agents", "doctor", "view", "debug", "undo", "test", "ready", "impact", "blame", "pin", "eval", "improve", "acp", "mcp serve",
    "policy", "export", "import", "release move", "schedules", "wake",
)  # fmt: skip
"""Those that look for agents in ./agents, and take --trust."""
ASKING = ("run", "chat")
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


def _leaving(name: str, command: Callable[..., Exit]) -> Callable[..., None]:
    from stepengine.cli.trusting import OPTION, at_the_gate

    @functools.wraps(command)
    def ended(**given: Any) -> None:
        content = given.pop("trust", "") if name in LOCAL else ""

        def judged() -> Exit:
            with at_the_gate(asks=name in ASKING, content=content):
                return command(**given)

        leave(explained(judged))

    if name in LOCAL:
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


class _Commands(Mapping[str, Parsed]):
    """Every command by its name, made when it is asked for."""

    def __init__(self) -> None:
        self._made: dict[str, Parsed] = {}

    def __getitem__(self, name: str) -> Parsed:
        if name not in self._made:
            group, listed = LISTED[name]
            made = _several(name) if name in UNDER else _alone(name, listed)
            made.name, made.rich_help_panel = name, group
            self._made[name] = made
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(LISTED)

    def __len__(self) -> int:
        return len(LISTED)


class _Group(typer.core.TyperGroup):
    """All commands: to list them takes no more than the table above."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = _Commands()  # type: ignore[assignment]
        self._lists = False

    def list_commands(self, ctx: Any) -> list[str]:
        """Return all names, in the order of the list."""
        return [*LISTED]

    def get_command(self, ctx: Any, cmd_name: str) -> Parsed:
        """Return a command; while the list is shown, no more of it than stands there."""
        if not self._lists:
            return super().get_command(ctx, cmd_name)
        group, listed = LISTED[cmd_name]
        return typer.core.TyperCommand(cmd_name, short_help=_escaped(listed.text), rich_help_panel=group)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Show the list."""
        self._lists = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self._lists = False


def _made() -> typer.Typer:
    return typer.Typer(
        name="stepengine",
        cls=_Group,
        help=_shown(OVERVIEW.strip()),
        epilog=_shown(EXIT_CODES),
        callback=_first,
        invoke_without_command=True,
        add_completion=False,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
    )


def _part(**attributes: Any) -> typer.Typer:
    return typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False, **attributes)


def _several(first: str) -> Parsed:
    """Return the group of the commands of two words that begin with *first*."""
    _, text, several = UNDER[first]
    part = _part(name=first, help=text, no_args_is_help=True)
    for name, listed in several.items():
        _add(part, name, listed, f"{first} {name}")
    return typer.main.get_group(part)  # of one command, `get_command` would make that command


def _alone(name: str, listed: Listed) -> Parsed:
    part = _part()
    _add(part, name, listed, name)
    return typer.main.get_command(part)


def _add(part: typer.Typer, name: str, listed: Listed, words: str) -> None:
    command = listed.load()
    part.command(
        name,
        help=_shown(inspect.cleandoc(command.__doc__ or "")),
        short_help=_escaped(listed.text),
        epilog=_shown(EXIT_CODES) if words in RUNNING else None,
        # What follows the command of a server is its own, also where it looks like an option of ours.
        context_settings=AS_TYPED if words == "mcp inspect" else None,
    )(_leaving(words, command))


def _escaped(text: str) -> str:
    return MARKUP.sub(r"\\[", text)


app = _made()
