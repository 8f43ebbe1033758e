"""``stepengine run``: from options to an engine, from the engine to a result, from the result to an exit code."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from stepengine.cli.hints import resume_hint
from stepengine.cli.options import Options
from stepengine.cli.recording import Recording
from stepengine.cli.report import Exit, exit_code, json_of, message_of, output_of
from stepengine.cli.screen import dumps, is_terminal, visible
from stepengine.cli.settings import Settings, UsageProblem
from stepengine.cli.signals import interruptible
from stepengine.data.definition import AgentDefinition, normalised_id
from stepengine.data.limits import Limits
from stepengine.data.state import RunResult, RunStatus
from stepengine.errors import ChildError, InputError, LimitExceeded, MissingKey, StepEngineError, UnknownModel

if TYPE_CHECKING:
    from stepengine.cli.console import TerminalInteractor
    from stepengine.cli.progress import Progress
    from stepengine.engine import Engine
    from stepengine.journal import Journal
    from stepengine.models import Models, Provider
    from stepengine.permissions import Policy

__all__ = (
    "Bench",
    "Run",
    "bench_for",
    "complain",
    "ending_of",
    "explained",
    "limits_of",
    "make_progress",
    "models_of",
    "name_of",
    "new_journal",
    "perform",
    "reason_of",
    "registry_of",
    "result_of",
    "run_command",
    "tell_more",
    "told",
    "watched",
)

NO_MODEL = """\
agent {agent!r} needs a model, and none is set. Any of these helps:
  --model anthropic/claude-sonnet-4-5     with ANTHROPIC_API_KEY set
  --model openai/gpt-5                    with OPENAI_API_KEY set
  --model llama3.2 --base-url http://localhost:11434/v1    a local server such as Ollama; no key
  STEPENGINE_MODEL=provider/model         the default for every run
`stepengine demo` shows an agent at work without any of them"""


@attrs.frozen
class Bench:
    """
    What a run is performed with.

    Attributes:
        engine: The engine.
        progress: What shows progress; ``None`` for nothing.
        without_model: What to say when the run needs a model and has none.
    """

    engine: Engine
    progress: Progress | None
    without_model: str


@attrs.frozen
class Run:
    """
    A run that has ended.

    Attributes:
        result: Its result.
        signal: The signal that ended it; ``None`` when none did.
    """

    result: RunResult[Any]
    signal: int | None = None

    @property
    def code(self) -> Exit:
        """The exit code."""
        if self.signal is not None and self.result.status is RunStatus.CANCELLED:
            return Exit.TERMINATED if self.signal == signal.SIGTERM else Exit.INTERRUPTED
        return exit_code(self.result)


def run_command(options: Options) -> Exit:
    """Run an agent and print what came out."""
    return explained(lambda: _run(options.in_force()))


def explained(command: Callable[[], Exit]) -> Exit:
    """Do what *command* does; what went wrong before anything ran is one message on stderr."""
    try:
        return command()
    except UsageProblem as problem:
        return complain(str(problem))
    except InputError as error:
        return complain("\n  ".join([error.message, *[i for i in error.issues if i not in error.message]]))
    except StepEngineError as error:
        return complain(message_of(error))


def complain(message: str, code: Exit = Exit.USAGE) -> Exit:
    """Print one message on stderr and return *code*."""
    print(f"stepengine: {visible(message)}", file=sys.stderr)
    return code


# --- from options to an engine ----------------------------------------------------------------------------------------


def _run(options: Options) -> Exit:
    from stepengine.engine import load_agent

    if options.journal and options.no_journal:
        msg = "--journal and --no-journal exclude each other"
        raise UsageProblem(msg)
    agent = load_agent(options.agent, folders=options.settings.agent_folders)
    params = read_params(options.params)
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    bench = bench_for(options, agent, is_new=True)
    limits = limits_of(options, agent)
    given = new_journal(options.journal) if options.journal else None
    with Recording.begun(options, given, command="run", agent_id=agent.id, prompt=prompt) as recording:
        journal = recording.journal
        run = perform(
            bench.engine,
            agent,
            prompt,
            bench.progress,
            started=recording.started,
            params=params,
            limits=limits,
            journal=journal,
        )
        recording.ended(run.result)
    if journal is not None:
        options = attrs.evolve(options, journal=name_of(journal), stem="" if given else recording.stem)
    return told(run, options, bench)


def limits_of(options: Options, agent: AgentDefinition[Any]) -> Limits | None:
    """Return the limits of a new run: what was typed, else the lower one of what is set and of the agent's own."""
    own, chosen = agent.limits, options.settings.limits
    lower = {name: mine for name in options.settings.table("limits") if (mine := getattr(own, name)) is not None}
    lower = {name: min(mine, getattr(chosen, name)) for name, mine in lower.items()}
    limits = attrs.evolve(chosen, **lower)
    if options.max_steps:
        limits = attrs.evolve(limits, max_steps=options.max_steps)
    return None if limits == Limits() else limits


def bench_for(
    options: Options,
    agent: AgentDefinition[Any],
    *,
    performs: bool = True,
    into: str = "",
    is_new: bool = False,
    asks_back: bool = False,
) -> Bench:
    """
    Return an engine for *agent* and those that it may spawn.

    Args:
        options: The options.
        agent: The agent.
        performs: Whether tools will really be called; a replay calls none, so nothing has to be allowed for it.
        into: A journal beside that of the options, which tools are not to show either.
        asks_back: Whether somebody else can be asked what a run wants to know, so that nothing is denied for want of a terminal.
        is_new: Whether the run begins now: models that are set for agents hold for it, a recorded run keeps its own.

    Raises:
        UsageProblem: when an option cannot be used, or the agent's tools need ``--write``, ``--shell`` or ``--web``.
    """
    from stepengine.cli.finding import family
    from stepengine.cli.toolset import allowed_tools, uncalled_tools
    from stepengine.context import Compaction, require_finished_todos
    from stepengine.data.hooks import Hooks
    from stepengine.engine import Engine

    if not options.cwd.is_dir():
        msg = f"--cwd {str(options.cwd)!r} is no folder"
        raise UsageProblem(msg)
    settings = options.settings
    agents = family(agent, options.agent, settings.agent_folders)
    progress = make_progress(options)
    somebody = _somebody(progress, options) if performs else None
    models = models_of(options)
    default, problem = _default_model(models, settings)
    engine = Engine(
        agents,
        allowed_tools(options, agents, (options.journal, into)) if performs else uncalled_tools(options.cwd.resolve()),
        models,
        observers=[progress] if progress else [],
        default_model=default,
        agent_models=_agent_models(options, agents, is_new=is_new),
        hooks=Hooks(pre_step=[Compaction()], on_stop=[require_finished_todos()]),
        permissions=settings.policy or (_asking_policy() if options.asks else None),
        interactor=somebody,
        # The journal that every run has by itself is no sign that somebody will come back to answer.
        headless=True if is_new and not asks_back and not options.journal and not sys.stdin.isatty() else None,
        workspace=options.cwd.resolve(),
    )
    return Bench(engine, progress, problem or NO_MODEL.format(agent=agent.id))


def _asking_policy() -> Policy:
    """Return the policy that lets an agent look around and asks about everything else."""
    from stepengine.permissions import Policy, Rule, read_only_commands

    return Policy([Rule.allow_category("read"), Rule.allow_tool("ask_user"), *read_only_commands()])


def _somebody(progress: Progress | None, options: Options) -> TerminalInteractor | None:
    """Return who answers questions of a run: whoever sits at the terminal that shows it, if it is one."""
    if progress is None or not (sys.stdin.isatty() and is_terminal()):
        return None
    from stepengine.cli.console import TerminalInteractor

    return TerminalInteractor(progress=progress, color=options.settings.get("display.color"))


def _agent_models(options: Options, agents: list[AgentDefinition[Any]], *, is_new: bool) -> dict[str, str]:
    """Return the models in place of those that agents name: those that were typed before those that are set."""
    typed, known = options.models, [normalised_id(agent.id) for agent in agents]
    if unknown := [name for name in typed if name and name not in known]:
        msg = f"--model {unknown[0]}={typed[unknown[0]]} names no agent of this run; it has {', '.join(known)}"
        raise UsageProblem(msg)
    chosen = {} if "" in typed or not is_new else options.settings.table("models")
    return {normalised_id(name): model for name, model in chosen.items()} | typed


def new_journal(path: str) -> Journal:
    """
    Return a journal for a new run: one more in an SQLite file, else a file of its own.

    Raises:
        UsageProblem: when the file, or the run that is named in it, holds something already.
    """
    from stepengine.journal import FileJournal, SqliteJournal
    from stepengine.journal.finding import database_of

    database = database_of(path)
    if database is not None:
        name, run = database
        taken = run in SqliteJournal(name).runs()
        made: Journal = SqliteJournal(name, run or f"r{secrets.token_hex(6)}")
    else:
        taken = Path(path).is_file() and Path(path).stat().st_size > 0
        made = FileJournal(path)
    if taken:
        msg = (
            f"{path!r} exists already; `stepengine resume {path}` goes on with its run, `stepengine show {path}` shows it. "
            "Name another one to record another run"
        )
        raise UsageProblem(msg)
    return made


def name_of(journal: Journal) -> str:
    """Return how a journal is named on the command line."""
    from stepengine.journal import SqliteJournal

    return f"{journal.path}#{journal.run}" if isinstance(journal, SqliteJournal) else journal.name


def read_params(text: str) -> dict[str, Any] | None:
    """
    Return the params in *text*: JSON, or ``@FILE`` with JSON in it.

    Raises:
        UsageProblem: when it is no JSON object, or there is no such file.
    """
    if not text:
        return None
    source = "--params"
    if text.startswith("@"):
        source = text[1:]
        try:
            text = Path(source).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            msg = f"--params {source!r} cannot be read: {error}"
            raise UsageProblem(msg) from None
    try:
        params = json.loads(text)
    except (ValueError, RecursionError) as error:
        msg = f'{source} is not JSON: {error}. Give an object such as \'{{"files": ["shop.py"]}}\', or @FILE'
        raise UsageProblem(msg) from None
    if not isinstance(params, dict):
        msg = f'{source} is JSON, but no object: give one such as \'{{"files": ["shop.py"]}}\''
        raise UsageProblem(msg)
    return params


def models_of(options: Options) -> Models | Provider:
    """
    Return where replies come from: the registered providers, or the server at ``--base-url``.

    Raises:
        UsageProblem: when that is no address.
    """
    from stepengine.models import OpenAIChatProvider
    from stepengine.models.presets import PRESETS

    if not options.base_url:
        return registry_of(options.settings)
    if not options.base_url.startswith(("http://", "https://")):
        msg = f"--base-url is {options.base_url!r}; it is an address such as http://localhost:11434/v1"
        raise UsageProblem(msg)
    # `openai/...` is also how such servers name open-weight models, so it is not taken for a prefix.
    prefix = (options.main_model or options.settings.get("model") or "").partition("/")[0]
    name = prefix if prefix in PRESETS and prefix != "openai" else "openai_chat"
    return OpenAIChatProvider(name, base_url=options.base_url)


def registry_of(settings: Settings) -> Models:
    """Return the providers that can be named, with the addresses, variables of keys and aliases that are set."""
    from stepengine.models import Models

    models = Models.standard(aliases=settings.table("aliases"))
    addresses = settings.table("base_urls")
    variables = {name.removesuffix(".key"): variable for name, variable in settings.table("providers").items()}
    for prefix in {**addresses, **variables}:
        models.register(prefix, partial(_provider, prefix, addresses.get(prefix), variables.get(prefix)))
    return models


def _provider(prefix: str, address: str | None, variable: str | None) -> Provider:
    """Return the provider of a prefix, elsewhere or with another key; one that nothing is known of speaks Chat Completions."""
    from stepengine.models import AnthropicProvider, GoogleProvider, OpenAIChatProvider, OpenAIProvider
    from stepengine.models.presets import PRESETS

    given: dict[str, Any] = {"base_url": address, "key_env": variable}
    if prefix == "anthropic":
        return AnthropicProvider(**given)
    if prefix == "google":
        return GoogleProvider(**given)
    if prefix in PRESETS and PRESETS[prefix].adapter == "openai":
        return OpenAIProvider(name=prefix, **given)
    return OpenAIChatProvider(prefix, **given)


def _default_model(models: Models | Provider, settings: Settings) -> tuple[str | None, str]:
    """Return the model that is set, or why it cannot be used; an agent that asks no model needs none."""
    model = settings.get("model")
    if not model:
        return None, ""
    try:
        models.check(model)
    except (MissingKey, UnknownModel) as error:
        return None, f"{settings.origin('model')} sets the model to {model!r}: {error.message}"
    return model, ""


def make_progress(options: Options) -> Progress | None:
    """Return what shows progress on stderr; ``None`` when nothing is to be shown."""
    if options.quiet:
        return None
    from stepengine.cli.console import console_on
    from stepengine.cli.progress import Progress

    settings = options.settings
    color = settings.get("display.color")
    console = console_on(sys.stderr, color="never" if options.as_json and color == "auto" else color)
    live = is_terminal() and not console.is_dumb_terminal and not os.environ.get("CI")
    return Progress(
        console,
        live=live and not settings.get("display.plain"),
        verbose=options.verbose,
        level=settings.get("display.log"),
        thinking=settings.get("display.thinking"),
    )


# --- from the engine to a result --------------------------------------------------------------------------------------


def perform(
    engine: Engine,
    agent: AgentDefinition[Any],
    prompt: str,
    progress: Progress | None,
    *,
    started: Callable[[str], object] = str,
    **options: Any,
) -> Run:
    """
    Run *agent* to its end; Ctrl-C and SIGTERM end it gracefully, a second one at once.

    *started* is told the run's id when it has begun.
    """

    async def ended() -> Run:
        async with engine, engine.start(agent, prompt, wait_for_answers=0, **options) as handle:
            started(handle.run_id)
            with interruptible(handle.interrupt) as received:
                result = await result_of(handle.result())
        return Run(result, received[0] if received else None)

    return watched(ended, progress)


async def result_of(run: Awaitable[RunResult[Any]]) -> RunResult[Any]:
    """Return the result of *run*, also of one that raises when it is at a limit (``on_max_steps="raise"``)."""
    try:
        return await run
    except LimitExceeded as error:
        if error.result is None:
            raise
        result: RunResult[Any] = error.result
        return result


def watched(run: Callable[[], Coroutine[Any, Any, Run]], progress: Progress | None) -> Run:
    """Run to the end while *progress*, if there is one, is shown."""
    with nullcontext() if progress is None else progress.shown():
        return asyncio.run(run())


# --- from the result to an exit code ----------------------------------------------------------------------------------


def told(run: Run, options: Options, bench: Bench) -> Exit:
    """Print the result on stdout and everything else on stderr; return the exit code."""
    result = run.result
    if bench.progress is not None and run.code is not Exit.USAGE:
        bench.progress.finish(result)
    if options.as_json:
        print(dumps(json_of(result)))
    elif result.output not in (None, ""):
        print(_printed(output_of(result.output)))
    if run.code is not Exit.USAGE:
        tell_more(result, options)
    if run.code is not Exit.COMPLETED:
        complain(reason_of(run, options, bench))
    return run.code


def reason_of(run: Run, options: Options, bench: Bench) -> str:
    """Return why a run did not complete, and what helps where it had no model."""
    if run.code is not Exit.USAGE:
        return ending_of(run)
    error = run.result.error
    while isinstance(error, ChildError):
        error = error.__cause__
    no_model = isinstance(error, UnknownModel) and not (options.models or run.result.state.usage.requests)
    return bench.without_model if no_model else _unknown(error, options)


def _unknown(error: BaseException | None, options: Options) -> str:
    """Return what an error says, and of a model that a yield names that ``--model`` does not stand in for it."""
    model = options.main_model
    if not isinstance(error, UnknownModel) or not model or model in str(error):
        return str(error)
    return f"{error}. A handler names it itself: --model {model} stands in only for models that agents name"


def tell_more(result: RunResult[Any], options: Options) -> None:
    """Tell what waits for an answer, and what was odd."""
    waits = options.journal and (result.pending_questions or result.status is RunStatus.CANCELLED)
    again = resume_hint(options, result.state.agent_id) if waits else ""
    if result.pending_questions and not options.journal:
        complain("this run was not recorded, so that it cannot be gone on with")
    for question in result.pending_questions:
        choices = f" ({', '.join(question.options)})" if question.options else ""
        complain(f"question {question.id} waits for an answer: {question.text}{choices}")
        if again:
            complain(f"answer it with: {again} --answer {question.id}=TEXT")
    if again and result.status is RunStatus.CANCELLED:
        complain(f"go on with: {again}")
    for warning in (*result.warnings, *[f"could not be stopped: {name}" for name in result.leaked]):
        complain(f"warning: {warning}")


def ending_of(run: Run) -> str:
    """Return a sentence that says why a run did not complete."""
    if run.signal is not None:
        return f"{signal.Signals(run.signal).name}: the run was cancelled"
    error = run.result.error
    return message_of(error) if error is not None else f"the run ended as {run.result.status.value}"


def _printed(output: Any) -> str:
    return visible(output) if isinstance(output, str) else dumps(output)
