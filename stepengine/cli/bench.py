"""From options to what a run is performed with: agents, models, tools and limits in one engine."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from decimal import Decimal, InvalidOperation
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

import attrs
from attrs import frozen

from stepengine.cli.approvals import is_judged
from stepengine.cli.options import Options
from stepengine.cli.screen.render import is_terminal
from stepengine.cli.settings import Settings, UsageProblem
from stepengine.data.alike import list_names
from stepengine.data.definition import AgentDefinition, name_of_published, normalised_id
from stepengine.data.limits import Limits
from stepengine.data.models import ModelReply
from stepengine.data.usage import Usage
from stepengine.errors import (
    DefinitionError,
    MissingKey,
    UnknownModel,
)

if TYPE_CHECKING:
    from stepengine.cli.screen.console import TerminalInteractor
    from stepengine.cli.screen.progress import Progress
    from stepengine.data.definition import ToolSource
    from stepengine.data.events import Event
    from stepengine.data.hooks import Hooks
    from stepengine.data.tools import ToolLike
    from stepengine.engine import Engine
    from stepengine.engine.loading import AgentPlace
    from stepengine.engine.packages import PackagedAgent
    from stepengine.journal.history import History
    from stepengine.models import Models, Provider
    from stepengine.permissions import Policy
    from stepengine.runtime.prices import Pricing
    from stepengine.workspace.workspace import Workspace

__all__ = (
    "Bench",
    "bench_for",
    "family",
    "limits_of",
    "make_progress",
    "models_of",
    "pricing_of",
    "registry_of",
    "served_models",
)

MILLION = 1_000_000
ENDPOINTS: dict[str, Literal["runtime", "mantle", "converse"]] = {
    "bedrock": "runtime",
    "bedrock_mantle": "mantle",
    "bedrock_converse": "converse",
}

NO_MODEL = """\
agent {agent!r} needs a model, and none is set. Any of these helps:
  --model anthropic/claude-sonnet-4-5     with ANTHROPIC_API_KEY set
  --model openai/gpt-5                    with OPENAI_API_KEY set
  --model llama3.2 --base-url http://localhost:11434/v1    a local server such as Ollama; no key
  STEPENGINE_MODEL=provider/model         the default for every run
`stepengine demo` shows an agent at work without any of them"""


class Bench(NamedTuple):
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


def limits_of(options: Options, agent: AgentDefinition) -> Limits | None:
    """Return the limits of a new run: what was typed, else the lower one of what is set and of the agent's own."""
    own, chosen = agent.limits, options.settings.limits
    lower = {name: mine for name in options.settings.table("limits") if (mine := getattr(own, name)) is not None}
    lower = {name: min(mine, getattr(chosen, name)) for name, mine in lower.items()}
    limits = attrs.evolve(chosen, **lower)
    if options.max_steps:
        limits = attrs.evolve(limits, max_steps=options.max_steps)
    if options.ask_for_more:
        limits = attrs.evolve(limits, ask=True)
    return None if limits == Limits() else limits


def bench_for(
    options: Options,
    agent: AgentDefinition,
    *,
    performs: bool = True,
    into: str = "",
    is_new: bool = False,
    observers: Sequence[Callable[[Event], object]] = (),
    headless: bool | None = None,
    asks_nobody: bool = False,
    unattended: bool = False,
    recorded: History | None = None,
    others: Sequence[AgentDefinition] = (),
    tools: Sequence[ToolLike | ToolSource] | None = None,
) -> Bench:
    """
    Return an engine for *agent* and those that it may spawn.

    Args:
        options: The options.
        agent: The agent.
        performs: Whether tools and models will really be called; a replay calls none, so nothing has to be allowed for it,
            and it reads no script.
        into: A journal beside that of the options, which tools are not to show either.
        is_new: Whether the run begins now: models that are set for agents hold for it, a recorded run keeps its own.
        observers: Who else is shown the events of runs.
        headless: Whether nobody is there to answer; by default that is the case where stdin is not a terminal.
        asks_nobody: Whether the person at the terminal is not asked, who would have to answer for many runs.
        unattended: Whether nobody ever answers a question of the run, as in an evaluation.
        recorded: The record of a run: of the hooks of the command line only those in it are there, and the run asks as it did.
        others: More agents that the engine has, with those that they may spawn.
        tools: The tools that the agents' files hold beside them; ``None`` to look them up.

    Raises:
        UsageProblem: when an option cannot be used, or the agent's tools need ``--write``, ``--shell`` or ``--web``.
    """
    from stepengine.cli.toolset import ToolRequest, add_bundled, allowed_tools, allowed_workspace, tools_beside
    from stepengine.engine import Engine
    from stepengine.engine.packages import id_of
    from stepengine.tools.bundled.bundled import uncalled_tools

    if not options.cwd.is_dir():
        msg = f"--cwd {str(options.cwd)!r} is not a folder"
        raise UsageProblem(msg)
    settings = options.settings
    families = [family(one, options.agent, settings.agent_folders) for one in (agent, *others)]
    known = {normalised_id(id_of(member)): member for members in reversed(families) for member in members}
    agents = [member for members in families for member in members if known.pop(normalised_id(id_of(member)), None)]
    progress = make_progress(options)
    is_chat = options.asks and is_new
    somebody = _somebody(progress, options) if performs and not (is_chat or asks_nobody) else None
    alone = not sys.stdin.isatty() if is_chat else somebody is None
    # The journal that every run has by itself is no sign that somebody will come back to answer.
    denies = True if headless is None and is_new and not options.journal and alone else headless
    homeless = _homeless(options, agents)
    named = next((one for one in agents if one.model and one.model not in homeless), None)
    if options.base_url and is_new and named is not None and not _models_of_server(options):
        msg = (
            f"--base-url is {options.base_url!r}, and no model was named for it: {named.id!r} names {named.model!r}, which is "
            "asked of its own provider; say what that server is asked for with --model NAME"
        )
        raise UsageProblem(msg)
    if options.base_url and not is_new and not any(options.served):
        options = attrs.evolve(options, served=_recorded_models(options.journal))
    models = _script_of(options) if performs and options.script else models_of(options, homeless)
    default, problem = _default_model(models, settings)
    options = attrs.evolve(options, place=_place(options) if performs else None)
    beside = tools_beside(options, agents) if tools is None else tools
    can_ask = not unattended and not denies and (recorded is None or is_judged(recorded, agent))
    policy = policy_of(options)
    request = ToolRequest(families, beside, (options.journal, into), can_ask=can_ask, is_judged=policy is not None)
    root = options.cwd.resolve()
    place = allowed_workspace(options, request) if performs else None
    given = add_bundled(beside, uncalled_tools(root)) if place is None else allowed_tools(options, request, place)
    engine = Engine(
        agents,
        given,
        models,
        pricing=pricing_of(options),
        observers=[*([progress] if progress else []), *observers],
        default_model=default,
        agent_models=_agent_models(options, agents, is_new=is_new),
        hooks=_own_hooks(recorded, agent),
        permissions=policy or (request.policy(options, recorded) if can_ask else None),
        interactor=somebody,
        headless=denies,
        workspace=place or root,
    )
    if options.place is not None:
        weakref.finalize(engine, options.place.close)
    return Bench(engine, progress, problem or NO_MODEL.format(agent=agent.id))


def _place(options: Options) -> Workspace | None:
    """Return where the tools run that ``--workspace`` names; ``None`` for this machine."""
    if not options.workspace:
        return None
    from stepengine.workspace.workspace import Workspace

    try:
        return Workspace.named(options.workspace, options.cwd.resolve())
    except DefinitionError as error:
        msg = f"--workspace: {error.message}"
        raise UsageProblem(msg) from None


def _own_hooks(history: History | None, agent: AgentDefinition) -> Hooks:
    """Return the hooks of the command line; of a run that was recorded those that it had beside the agent's own, or all."""
    from stepengine.context import require_finished_todos, summarize
    from stepengine.data.hooks import Hooks
    from stepengine.journal.encoding import name_of

    own = [name_of(hook) for point in attrs.astuple(agent.hooks, recurse=False) for hook in point]
    recorded = None if history is None else () if history.head is None else history.head.hooks

    def had(hook: object) -> list[Any]:
        name = name_of(hook)
        return [hook] if recorded is None or recorded.count(name) > own.count(name) else []

    # A run of `stepengine serve` was begun by a page, perhaps; no run of the other commands is.
    of_page = []
    if recorded is not None:
        from stepengine.adapters.ag_ui.asked import take_page

        of_page = had(take_page)
    return Hooks(pre_run=of_page, pre_step=had(summarize()), on_stop=had(require_finished_todos()))


def policy_of(options: Options) -> Policy | None:
    """Return what decides about tool calls: what was chosen on the way, what is set, or what a chat asks about."""
    policy: Policy | None = options.policy or options.settings.policy or (asking_policy() if options.asks else None)
    changes: Policy | None = options.policy_changes
    if changes is None:
        return policy
    from stepengine.permissions import Policy

    return attrs.evolve((policy or Policy()).with_rules(*changes.rules), mode=changes.mode)


def asking_policy() -> Policy:
    """Return the policy that lets an agent look around and asks about everything else."""
    from stepengine.permissions import Policy, Rule, read_only_commands

    return Policy([Rule.allow_category("read"), Rule.allow_tool("ask_user"), *read_only_commands()])


def _somebody(progress: Progress | None, options: Options) -> TerminalInteractor | None:
    """Return who answers questions of a run: whoever sits at a terminal where questions can be seen and answered."""
    if not (sys.stdin.isatty() and is_terminal()):
        return None
    from stepengine.cli.screen.console import TerminalInteractor

    return TerminalInteractor(progress=progress, color=options.settings.get("display.color"))


def _agent_models(options: Options, agents: list[AgentDefinition], *, is_new: bool) -> dict[str, str]:
    """Return the models in place of those that agents name: those that were typed before those that are set."""
    typed, known = options.models, [normalised_id(agent.id) for agent in agents]
    if unknown := [name for name in typed if name and name not in known]:
        msg = f"--model {unknown[0]}={typed[unknown[0]]} names no agent of this run; it has {list_names(known, unknown[0])}"
        raise UsageProblem(msg)
    chosen = {} if "" in typed or not is_new else options.settings.table("models")
    return {normalised_id(name): model for name, model in chosen.items()} | typed


def models_of(options: Options, homeless: Iterable[str] = ()) -> Models | Provider:
    """
    Return where replies come from: the registered providers, and for the models that were typed the server at ``--base-url``.

    A model that an agent or a yield names itself goes to its own provider: that server has no model of that name, and a
    request that went there would be priced as what it is not. Those in *homeless* have no provider, so that server gets them.

    Raises:
        UsageProblem: when that is not an address, or a key is named without it.
    """
    models = registry_of(options.settings)
    if not options.base_url:
        if options.api_key_env:
            msg = "--api-key-env names the key of the server at --base-url, which is not given; `stepengine agents models` lists the variables of providers"
            raise UsageProblem(msg)
        return models
    if not options.base_url.startswith(("http://", "https://")):
        msg = f"--base-url is {options.base_url!r}; it is an address such as http://localhost:11434/v1"
        raise UsageProblem(msg)
    from stepengine.models import OpenAIChatProvider
    from stepengine.models.presets import PRESETS

    served = _models_of_server(options)
    # `openai/...` is also how such servers name open-weight models, so it is not taken for a prefix.
    prefix = (served or ("",))[0].partition("/")[0]
    name = prefix if prefix in PRESETS and prefix != "openai" else "openai_chat"
    server = OpenAIChatProvider(name, base_url=options.base_url, key_env=options.api_key_env or None)
    models.register(name, server)
    for model in (*served, *homeless):
        models.serve(model, server)
    return models


def _script_of(options: Options) -> Provider:
    from stepengine.cli.scripts import refuse_two_models, run_script_of

    refuse_two_models(options)
    return run_script_of(options.script)


def _homeless(options: Options, agents: Iterable[AgentDefinition]) -> frozenset[str]:
    """Return the models that agents name and no provider has, where there is a server that may have them."""
    if not options.base_url:
        return frozenset()
    registry, found = registry_of(options.settings), set[str]()
    for model in [agent.model for agent in agents if agent.model]:
        try:
            registry.parse(model)
        except UnknownModel:
            found.add(model)
    return frozenset(found)


def _models_of_server(options: Options) -> tuple[str, ...]:
    """Return the models that the server at ``--base-url`` is asked for, that of most agents first."""
    typed = options.models
    default = options.settings.get("model")
    named = [typed.get(""), *typed.values(), *options.served] if typed or any(options.served) else [default]
    return tuple(dict.fromkeys([model for model in named if model]))


def _recorded_models(journal: str) -> tuple[str, ...]:
    """Return the models that the run in *journal* was begun with in place of those that its agents name."""
    from stepengine.journal import as_journal

    if not journal or not (history := as_journal(journal).history()).intents:
        return ()
    root = history.root
    chosen = {**root.get("models", {}), **root.get("run_models", {})}
    return tuple([str(model) for model in (root.get("model"), *chosen.values()) if model])


def pricing_of(options: Options) -> Pricing:
    """
    Return what replies cost: the packaged prices, and what ``--price`` says of models that have none or are at ``--base-url``.

    Raises:
        UsageProblem: when that is not a price.
    """
    from stepengine.models.pricing import cost_of

    if not options.price:
        return cost_of
    try:
        into, out = [Decimal(text) for text in (options.price.split("/") * 2)[:2]]
    except InvalidOperation:
        into = out = Decimal("NaN")
    if options.price.count("/") > 1 or not (into.is_finite() and out.is_finite() and into >= 0 and out >= 0):
        msg = f"--price is {options.price!r}; it is US dollars for a million tokens, such as 0, 0.5 or 0.15/0.60 for in and out"
        raise UsageProblem(msg)
    return _Priced(into, out, frozenset(_models_of_server(options)) if options.base_url else frozenset())


@frozen
class _Priced:
    """
    Prices of a user's own.

    Attributes:
        into: US dollars for a million tokens of a prompt.
        out: US dollars for a million tokens of a reply.
        own: Models that have this price whatever the packaged prices say.
    """

    into: Decimal
    out: Decimal
    own: frozenset[str]

    def __call__(self, model: str, usage: Usage | None, at: datetime) -> Decimal | None:
        """Return what *usage* of *model* costs; ``None`` without usage."""
        from stepengine.models.pricing import cost_of

        listed = None if model in self.own else cost_of(model, usage, at)
        return self._of(usage) if listed is None else listed

    def of_reply(self, model: str, reply: ModelReply, at: datetime) -> Decimal | None:
        """Return what *reply* of *model* cost; ``None`` without usage."""
        from stepengine.models.pricing import cost_of

        listed = None if model in self.own else cost_of.of_reply(model, reply, at)
        return self._of(reply.usage) if listed is None else listed

    def unpriced(self, model: str, reply: ModelReply, at: datetime) -> tuple[str, ...]:
        """Return the parts of *reply* of *model* that have no price."""
        from stepengine.models.pricing import cost_of

        return () if model in self.own else cost_of.unpriced(model, reply, at)

    def _of(self, usage: Usage | None) -> Decimal | None:
        if usage is None:
            return None
        return (self.into * usage.prompt_tokens + self.out * usage.completion_tokens) / MILLION


def served_models(options: Options, agents: Iterable[AgentDefinition]) -> Models:
    """Return where the replies to *agents* come from, as ``bench_for`` has it; errors as ``models_of``."""
    from stepengine.models import Models

    return Models.of(models_of(options, _homeless(options, agents)))


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
    from stepengine.models import (
        AnthropicProvider,
        FoundryProvider,
        GoogleInteractionsProvider,
        GoogleProvider,
        OpenAIChatProvider,
        OpenAIProvider,
    )
    from stepengine.models.presets import PRESETS

    if prefix in (*ENDPOINTS, "vertex", "anthropic_aws", "anthropic_google"):
        return _in_cloud(prefix, address, variable)
    given: dict[str, Any] = {"base_url": address, "key_env": variable}
    if prefix == "anthropic":
        return AnthropicProvider(**given)
    if prefix in ("google", "google_interactions"):
        return (GoogleProvider if prefix == "google" else GoogleInteractionsProvider)(**given)
    if prefix == "foundry":
        return FoundryProvider(**given)
    if prefix in PRESETS and PRESETS[prefix].adapter == "openai":
        return OpenAIProvider(name=prefix, **given)
    return OpenAIChatProvider(prefix, **given)


def _in_cloud(prefix: str, address: str | None, variable: str | None) -> Provider:
    """Return the provider of a cloud that is let in by more than a key, elsewhere or with what a variable holds."""
    from stepengine.models import AnthropicAwsProvider, AnthropicGoogleProvider, BedrockProvider, VertexProvider

    key = os.environ.get(variable, "").strip() or None if variable is not None else None
    if variable is not None and key is None:
        msg = f"there is no key for {prefix!r}: set {variable}, which the settings name, or leave it out of them"
        raise MissingKey(msg, kind="missing_key")
    if prefix == "vertex":
        return VertexProvider(base_url=address, credentials=key)
    if prefix == "anthropic_google":
        return AnthropicGoogleProvider(base_url=address, credentials=key)
    if prefix == "anthropic_aws":
        return AnthropicAwsProvider(key, address)
    return BedrockProvider(key, address, name=prefix, endpoint=ENDPOINTS[prefix])


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
    from stepengine.cli.screen.console import console_on
    from stepengine.cli.screen.progress import Progress

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


def family(agent: AgentDefinition, file: str = "", folders: Iterable[Path] = ()) -> list[AgentDefinition]:
    """
    Return *agent* and every agent that it may spawn, directly or through another one.

    Args:
        agent: The agent.
        file: The file that it was loaded from; the other agents in it, and those beside it by the names of their files, are
            found there.
        folders: More folders in which ids are looked for.

    Raises:
        DefinitionError: when an id names no agent.
    """
    from stepengine.engine.packages import id_of, member_of

    finder = _Named.beside(file, folders)
    found: dict[str, AgentDefinition] = {}
    held = [agent]
    named: list[tuple[str, PackagedAgent | None]] = []
    while held or named:
        # Ids come last: one of an agent that another holds, or of that agent itself, needs no file.
        if not held and named[-1][1] is None and normalised_id(named[-1][0]) in found:
            named.pop()
            continue
        definition = held.pop() if held else finder.found(*named.pop())
        key = normalised_id(id_of(definition))
        if key not in found:
            found[key] = definition
            given = definition.spawnable_agents
            named += [(child, member_of(definition)) for child in given if isinstance(child, str)]
            held += [child for child in given if not isinstance(child, str)]
    return list(found.values())


class _Named(NamedTuple):
    """
    Where agents are looked for that others name by id.

    Attributes:
        place: The file of the agent that is run; ``None`` where none was named.
        same: The agents of that file.
        folders: More folders.
    """

    place: AgentPlace | None
    same: Mapping[str, AgentDefinition]
    folders: tuple[Path, ...]

    @classmethod
    def beside(cls, file: str, folders: Iterable[Path]) -> Self:
        """Return where it is looked for by what is in *file*, and beside it."""
        from stepengine.engine.loading import AgentPlace

        place = AgentPlace.of_text(file) if file else None
        same = {} if place is None else {normalised_id(one.id): one for one in place.agents()}
        return cls(place, same, tuple(folders))

    def found(self, agent_id: str, by: PackagedAgent | None) -> AgentDefinition:
        """
        Return the agent that is called so; one of a package, *by*, means its own where it names no publisher.

        Raises:
            DefinitionError: when there is none.
        """
        from stepengine.engine.loading import bundled_agent, find_packaged, load_agent

        if (member := find_packaged(agent_id)) is not None:
            return member.load()
        agent_id = name_of_published(agent_id) or agent_id
        own = self.same.get(normalised_id(agent_id)) if by is None else by.beside(agent_id) or bundled_agent(agent_id)
        if own is not None:
            return own
        if self.place is not None:
            # What lies beside a stranger's file is no more trusted than that.
            file = self.place.file.with_name(f"{agent_id.replace('-', '_')}.py")
            if file.is_file():
                return load_agent(str(attrs.evolve(self.place, file=file, id="")), folders=self.folders)
        return load_agent(agent_id, folders=self.folders)
