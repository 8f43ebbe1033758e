"""From options to what a run is performed with: agents, models, tools and limits in one engine."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from stepengine.cli.options import Options
from stepengine.cli.render import is_terminal
from stepengine.cli.settings import Settings, UsageProblem
from stepengine.data.definition import AgentDefinition, normalised_id
from stepengine.data.limits import Limits
from stepengine.errors import (
    MissingKey,
    UnknownModel,
)

if TYPE_CHECKING:
    from stepengine.cli.console import TerminalInteractor
    from stepengine.cli.progress import Progress
    from stepengine.data.events import Event
    from stepengine.engine import Engine
    from stepengine.models import Models, Provider
    from stepengine.permissions import Policy

__all__ = ("Bench", "bench_for", "family", "limits_of", "make_progress", "models_of", "registry_of")

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
    observers: Sequence[Callable[[Event], Any]] = (),
    headless: bool | None = None,
) -> Bench:
    """
    Return an engine for *agent* and those that it may spawn.

    Args:
        options: The options.
        agent: The agent.
        performs: Whether tools will really be called; a replay calls none, so nothing has to be allowed for it.
        into: A journal beside that of the options, which tools are not to show either.
        is_new: Whether the run begins now: models that are set for agents hold for it, a recorded run keeps its own.
        observers: Who else is shown the events of runs.
        headless: Whether nobody is there to answer; by default that is the case where stdin is no terminal.

    Raises:
        UsageProblem: when an option cannot be used, or the agent's tools need ``--write``, ``--shell`` or ``--web``.
    """
    from stepengine.cli.toolset import allowed_tools, uncalled_tools
    from stepengine.context import require_finished_todos, summarize
    from stepengine.data.hooks import Hooks
    from stepengine.engine import Engine

    if not options.cwd.is_dir():
        msg = f"--cwd {str(options.cwd)!r} is no folder"
        raise UsageProblem(msg)
    settings = options.settings
    agents = family(agent, options.agent, settings.agent_folders)
    progress = make_progress(options)
    is_chat = options.asks and is_new
    somebody = _somebody(progress, options) if performs and not is_chat else None
    alone = not sys.stdin.isatty() if is_chat else somebody is None
    models = models_of(options)
    default, problem = _default_model(models, settings)
    engine = Engine(
        agents,
        allowed_tools(options, agents, (options.journal, into)) if performs else uncalled_tools(options.cwd.resolve()),
        models,
        observers=[*([progress] if progress else []), *observers],
        default_model=default,
        agent_models=_agent_models(options, agents, is_new=is_new),
        hooks=Hooks(pre_step=[summarize()], on_stop=[require_finished_todos()]),
        permissions=policy_of(options),
        interactor=somebody,
        # The journal that every run has by itself is no sign that somebody will come back to answer.
        headless=True if headless is None and is_new and not options.journal and alone else headless,
        workspace=options.cwd.resolve(),
    )
    return Bench(engine, progress, problem or NO_MODEL.format(agent=agent.id))


def policy_of(options: Options) -> Policy | None:
    """Return what decides about tool calls: what was chosen on the way, what is set, or what a chat asks about."""
    chosen: Policy | None = options.policy
    return chosen or options.settings.policy or (asking_policy() if options.asks else None)


def asking_policy() -> Policy:
    """Return the policy that lets an agent look around and asks about everything else."""
    from stepengine.permissions import Policy, Rule, read_only_commands

    return Policy([Rule.allow_category("read"), Rule.allow_tool("ask_user"), *read_only_commands()])


def _somebody(progress: Progress | None, options: Options) -> TerminalInteractor | None:
    """Return who answers questions of a run: whoever sits at a terminal where questions can be seen and answered."""
    if not (sys.stdin.isatty() and is_terminal()):
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


def family(agent: AgentDefinition[Any], file: str = "", folders: Iterable[Path] = ()) -> list[AgentDefinition[Any]]:
    """
    Return *agent* and every agent that it may spawn, directly or through another one.

    Args:
        agent: The agent.
        file: The file that it was loaded from; agents beside it are found by the names of their files.
        folders: More folders in which ids are looked for.

    Raises:
        DefinitionError: when an id names no agent.
    """
    from stepengine.engine import load_agent

    def by_id(agent_id: str) -> AgentDefinition[Any]:
        beside = Path(file).with_name(f"{agent_id.replace('-', '_')}.py") if file.endswith(".py") else None
        return load_agent(beside if beside is not None and beside.is_file() else agent_id, folders=folders)

    found = {agent.id: agent}
    waiting = [agent]
    while waiting:
        for child in waiting.pop().spawnable_agents:
            definition = by_id(child) if isinstance(child, str) else child
            if definition.id not in found:
                found[definition.id] = definition
                waiting.append(definition)
    return list(found.values())
