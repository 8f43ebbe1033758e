"""The commands and their options; those of journals are in ``journal_app``. What they do stands in other modules."""

from __future__ import annotations

from functools import partial
from typing import Annotated, TypeAlias

import attrs
import typer

from stepengine.cli.ending import EXIT_CODES, leave
from stepengine.cli.journal_app import add_journal_commands
from stepengine.cli.mcp import add_mcp_commands
from stepengine.cli.options import BaseUrl, Config, Options, Quiet, with_options
from stepengine.cli.policies import add_policy_command
from stepengine.cli.scanning import add_scanning_commands

__all__ = ("app",)

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

RUN = f"""\
Run AGENT, and print its output.

AGENT is an id, as `stepengine agents` lists them, or the path of an agent file. Progress is shown while it runs.

\b
Examples:
  stepengine run code_searcher --params '{{"search_queries": [{{"pattern": "def main"}}]}}' --json
  stepengine run editor "Add a docstring to shop.py" --write --model anthropic/claude-sonnet-4-5
  stepengine run editor "Fix the typo" --write --model llama3.2 --base-url http://localhost:11434/v1
  stepengine run ./agents/mine.py --params @params.json --cwd ../project
  git diff | stepengine run ./agents/reviewer.py -
  stepengine run ./agents/mine.py "Go" --journal run.jsonl     (in a file of your own; then: resume run.jsonl)

\b
Models:
  provider/model, such as anthropic/claude-sonnet-4-5; the key comes from the environment
  --model holds for every agent of the run, --model editor=openai/gpt-5 for one; both can be given
  `stepengine models` lists the providers and their variables
  anything else that speaks Chat Completions: --base-url

{EXIT_CODES}"""

CHAT = f"""\
Talk with AGENT: say what to do, watch it work, decide what it may do, say the next thing.

It reads, searches and runs commands that only look (ls, git log) by itself; whatever else runs a program or changes a file is
shown and asked about first (y, n REASON, a for always). What you type while it works is sent to it. Ctrl-C stops a turn; /quit leaves. Each turn is recorded as a run.

\b
Examples:
  stepengine chat --model anthropic/claude-sonnet-4-5
  stepengine chat coder "Look at the failing test"         (the agent is named before what is said)
  stepengine chat ./agents/mine.py "Look at the failing test" --cwd ../project
  printf 'Which files are there?\\n' | stepengine chat     (nobody can be asked: nothing is changed)

{EXIT_CODES}"""

ASK = f"""\
Call MODEL once with PROMPT, and print its reply while it comes.

The shortest way to see whether a key, an address and a model name are right. Usage and cost are shown on stderr.

\b
Examples:
  stepengine ask anthropic/claude-haiku-4-5 "Say hello."
  stepengine ask openai/gpt-5-mini - --system "Answer in one word." < question.txt
  stepengine ask llama3.2 "Say hello." --base-url http://localhost:11434/v1
  stepengine ask "anthropic/claude-haiku-4-5 | openai/gpt-5-mini" "Say hello." --json

{EXIT_CODES}"""

Model: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        help="Model of every agent of the run, or of one of them; default: what each names, else STEPENGINE_MODEL.",
        metavar="MODEL|AGENT=MODEL",
    ),
]
NoJournal: TypeAlias = Annotated[bool, typer.Option("--no-journal", help="Do not record the run.")]

app = typer.Typer(
    name="stepengine",
    help=OVERVIEW,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.command("run", help=RUN)
@with_options
def run(
    options: Options,
    agent: Annotated[str, typer.Argument(help="Id or file of the agent.")],
    prompt: Annotated[str, typer.Argument(help="What to do; - reads it from stdin.")] = "",
    *,
    params: Annotated[str, typer.Option(help="Params as JSON, or @FILE.", metavar="JSON|@FILE")] = "",
    model: Model = None,
    max_steps: Annotated[
        int, typer.Option(help="Model steps that the run may take; 0 for the agent's own limit.", min=0)
    ] = 0,
    journal: Annotated[
        str,
        typer.Option(
            help="Record the run into a new file, in place of the user's state folder; RUNS.db holds many runs.",
            metavar="FILE",
        ),
    ] = "",
    no_journal: NoJournal = False,
) -> None:
    """Run an agent; ``RUN`` is what users read."""
    from stepengine.cli.running import run_command

    options = attrs.evolve(options, agent=agent, prompt=prompt, params=params, model=model)
    options = attrs.evolve(options, max_steps=max_steps, journal=journal, no_journal=no_journal)
    leave(run_command(options))


@app.command("chat", help=CHAT)
@partial(with_options, without=("write", "shell", "as_json", "quiet"))
def chat(
    options: Options,
    agent: Annotated[str, typer.Argument(help="Id or file of the agent.")] = "coder",
    prompt: Annotated[str, typer.Argument(help="The first thing to say.")] = "",
    *,
    model: Model = None,
    no_journal: NoJournal = False,
) -> None:
    """Talk with an agent; ``CHAT`` is what users read."""
    from stepengine.cli.chatting import chat_command

    leave(chat_command(attrs.evolve(options, agent=agent, prompt=prompt, model=model, no_journal=no_journal)))


@app.command()
def demo(
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the edited copy of the project and say where it is.")
    ] = False,
    quiet: Quiet = False,
    config: Config = None,
) -> None:
    """
    Watch a generator agent edit a small project, without a key and without network.

    The model's replies are played from a recording through the real SDK; the tools really read and edit files, in a
    temporary copy. One recorded reply holds a mistake, which the agent's handler finds and has repaired.
    """
    from stepengine.cli.demo import demo_command

    leave(demo_command(keep=keep, quiet=quiet, config=config))


@app.command()
def agents(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON array.")] = False,
    as_tree: Annotated[bool, typer.Option("--tree", help="Show who may spawn whom.")] = False,
    config: Config = None,
) -> None:
    """
    List the agents that `stepengine run` knows: those in ./agents and those that are shipped.

    Each with what it does, its tools and its file. The setting `agents` names more folders.
    """
    from stepengine.cli.finding import agents_command

    leave(agents_command(as_json=as_json, as_tree=as_tree, config=config))


@app.command()
def config(
    key: Annotated[str, typer.Argument(help="One setting, such as limits.max_steps; default: all.")] = "",
    *,
    file: Config = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """
    Show every setting, its value and where it came from.

    An option wins over a variable, a variable over the project's file (stepengine.toml, or [tool.stepengine] in
    pyproject.toml), the project's over your own (~/.config/stepengine/config.toml). A variable is STEPENGINE_ and the
    setting in capitals, `__` for the dot: STEPENGINE_LIMITS__MAX_STEPS=20.
    """
    from stepengine.cli.settings import config_command

    leave(config_command(key, config=file, as_json=as_json))


@app.command(help=ASK)
def ask(
    model: Annotated[str, typer.Argument(help="Model, such as anthropic/claude-sonnet-4-5.")],
    prompt: Annotated[str, typer.Argument(help="What to say; - reads it from stdin.")],
    *,
    system: Annotated[str, typer.Option(help="System prompt.", metavar="TEXT")] = "",
    base_url: BaseUrl = "",
    max_tokens: Annotated[
        int, typer.Option(help="Tokens that the reply may have; 0 for the provider's default.", min=0)
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, at the end.")] = False,
    config: Config = None,
) -> None:
    """Call a model once; ``ASK`` is what users read."""
    from stepengine.cli.asking import ask_command

    options = Options(agent="ask", model=[model], prompt=prompt, base_url=base_url, as_json=as_json, config=config)
    leave(ask_command(options, system=system, max_tokens=max_tokens))


@app.command()
def models(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[MODEL]...", help="Models to describe; without one, all providers are listed."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON array.")] = False,
    config: Config = None,
) -> None:
    """
    List the providers that a model string can name, and whether their keys are set; keys themselves are never shown.

    For a MODEL: its context window and its price, where the data of the package know them. Nothing is asked over the
    network; `stepengine ask MODEL hi` does that.
    """
    from stepengine.cli.listing import models_command

    leave(models_command(names or (), as_json=as_json, config=config))


@app.command()
def version() -> None:
    """Print the version."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        typer.echo(f"stepengine {installed('stepengine')}")
    except PackageNotFoundError:
        typer.echo("stepengine (not installed: run from its source folder)")


add_journal_commands(app)
add_scanning_commands(app)
add_policy_command(app)
add_mcp_commands(app)
