"""Make an engine from options: its agents, models, tools, policy and prices, and the limits of its runs."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any, NamedTuple

import attrs
from attrs import frozen

from stepengine.cli.approvals import INJECTION, had_command_line_policy, has_guard_rules
from stepengine.cli.options import Options
from stepengine.cli.screen.render import is_terminal
from stepengine.cli.settings import UsageProblem
from stepengine.data.alike import list_names
from stepengine.data.definition import AgentDefinition, normalised_id
from stepengine.data.limits import Limits
from stepengine.data.models import ModelReply
from stepengine.data.usage import Usage
from stepengine.engine.settings import Settings
from stepengine.errors import (
    DefinitionError,
    MissingKey,
    UnknownModel,
)

if TYPE_CHECKING:
    from stepengine.cli.screen.console import TerminalInteractor
    from stepengine.cli.screen.progress import ProgressDisplay
    from stepengine.data.definition import ToolSource
    from stepengine.data.events import Event
    from stepengine.data.hooks import Hooks
    from stepengine.data.tools import ToolLike
    from stepengine.engine import Engine
    from stepengine.journal.history import History
    from stepengine.models import Models, Provider
    from stepengine.permissions import Policy
    from stepengine.runtime.prices import Pricing
    from stepengine.workspace.workspace import Workspace

MILLION = 1_000_000

NO_MODEL = """\
agent {agent!r} needs a model, and none is set. Any of these helps:
  --model anthropic/claude-sonnet-4-5     with ANTHROPIC_API_KEY set
  --model openai/gpt-5                    with OPENAI_API_KEY set
  --model llama3.2 --base-url http://localhost:11434/v1    a local server such as Ollama; no key
  STEPENGINE_MODEL=provider/model         the default for every run
`stepengine demo` shows an agent at work without any of them"""


class EngineSetup(NamedTuple):
    """
    The engine for a run, its progress display and the message for a missing model.

    Attributes:
        engine: The engine.
        progress: The progress display; ``None`` with ``--quiet``.
        without_model: The error message for a run that needs a model and has none.
    """

    engine: Engine
    progress: ProgressDisplay | None
    without_model: str


def choose_limits(options: Options, agent: AgentDefinition) -> Limits | None:
    """Return the limits of a new run: typed options, else the lower of the settings and the agent's own limits."""
    own, chosen = agent.limits, options.settings.limits
    lower = {
        name: min(mine, getattr(chosen, name))
        for name in options.settings.table("limits")
        if (mine := getattr(own, name)) is not None
    }
    limits = attrs.evolve(chosen, **lower)
    if options.max_steps:
        limits = attrs.evolve(limits, max_steps=options.max_steps)
    if options.max_cost is not None:
        limits = attrs.evolve(limits, max_cost_usd=options.max_cost)
    if options.ask_for_more:
        limits = attrs.evolve(limits, ask=True)
    return None if limits == Limits() else limits


def make_engine_setup(
    options: Options,
    agent: AgentDefinition,
    *,
    performs: bool = True,
    hidden_journal: str = "",
    is_new: bool = False,
    observers: Sequence[Callable[[Event], object]] = (),
    headless: bool | None = None,
    asks_nobody: bool = False,
    unattended: bool = False,
    recorded: History | None = None,
    others: Sequence[AgentDefinition] = (),
    tools: Sequence[ToolLike | ToolSource] | None = None,
) -> EngineSetup:
    """
    Return the engine for *agent* and the agents that it may spawn, its progress display, and the error message for a missing model.

    Args:
        options: The options.
        agent: The agent.
        performs: Whether tools and models are called. A replay calls none, so it needs no permissions and reads no script.
        hidden_journal: A second journal that tools must not show, in addition to that of the options.
        is_new: Whether the run is new. A new run gets the models that the settings name for agents; a recorded run keeps its own.
        observers: Further observers of the events of runs.
        headless: Whether questions are denied at once. By default a new run without a journal denies them if no one can be asked.
        asks_nobody: Whether the person at the terminal is not asked, for example because many runs share it.
        unattended: Whether no one ever answers a question of the run, as in an evaluation.
        recorded: The record of a run. The engine then has only the recorded hooks of the command line, and asks the same questions.
        others: Further agents of the engine, together with the agents that they may spawn.
        tools: The tools at module level of the agents' files; ``None`` to look them up.

    Raises:
        UsageProblem: when an option cannot be used, or the agent's tools need ``--write``, ``--shell`` or ``--web``.
    """
    from stepengine.cli.toolset import (
        ToolRequest,
        load_module_tools,
        make_allowed_tools,
        make_allowed_workspace,
        merge_bundled_tools,
    )
    from stepengine.engine import Engine
    from stepengine.engine.agent_family import collect_agent_family
    from stepengine.engine.packages import get_published_id
    from stepengine.tools.bundled.bundled import list_all_workspace_tools

    if not options.cwd.is_dir():
        msg = f"--cwd {str(options.cwd)!r} is not a folder"
        raise UsageProblem(msg)
    settings = options.settings
    families = [collect_agent_family(one, options.agent, settings.agent_folders) for one in (agent, *others)]
    known = {normalised_id(get_published_id(member)): member for members in reversed(families) for member in members}
    agents = [
        member for members in families for member in members if known.pop(normalised_id(get_published_id(member)), None)
    ]
    progress = make_progress_display(options)
    is_chat = options.asks and is_new
    somebody = _make_terminal_interactor(progress, options) if performs and not (is_chat or asks_nobody) else None
    alone = not sys.stdin.isatty() if is_chat else somebody is None
    # Every run is recorded automatically, so only a journal that was named means that someone may resume the run with an answer.
    denies = True if headless is None and is_new and not options.journal and alone else headless
    unserved_models = _list_models_without_provider(options, agents)
    named = next((one for one in agents if one.model and one.model not in unserved_models), None)
    if options.base_url and is_new and named is not None and not _list_base_url_models(options):
        msg = (
            f"--base-url {options.base_url!r} needs a model of that server, but {named.id!r} names {named.model!r}, "
            "which has its own provider; pass the model with --model NAME"
        )
        raise UsageProblem(msg)
    if options.base_url and not is_new and not any(options.served):
        options = attrs.evolve(options, served=_read_recorded_model_overrides(options.journal))
    models = (
        _make_script_provider(options) if performs and options.script else make_model_registry(options, unserved_models)
    )
    default, problem = _get_default_model_or_problem(models, settings)
    options = attrs.evolve(options, place=_parse_workspace_option(options) if performs else None)
    file_tools = load_module_tools(options, agents) if tools is None else tools
    can_ask = not unattended and not denies and (recorded is None or had_command_line_policy(recorded, agent))
    policy = choose_policy(options)
    request = ToolRequest(
        families, file_tools, (options.journal, hidden_journal), can_ask=can_ask, is_judged=policy is not None
    )
    root = options.cwd.resolve()
    place = make_allowed_workspace(options, request) if performs else None
    given = (
        merge_bundled_tools(file_tools, list_all_workspace_tools(root))
        if place is None
        else make_allowed_tools(options, request, place)
    )
    engine = Engine(
        agents,
        given,
        models,
        pricing=make_pricing(options),
        observers=[*([progress] if progress else []), *observers],
        default_model=default,
        agent_models=_choose_model_overrides(options, agents, is_new=is_new),
        hooks=_make_command_line_hooks(recorded, agent),
        permissions=add_guard_rules(
            options, policy or (request.make_approval_policy(options, recorded) if can_ask else None), recorded
        ),
        interactor=somebody,
        headless=denies,
        workspace=place or root,
    )
    if options.place is not None:
        weakref.finalize(engine, options.place.close)
    return EngineSetup(engine, progress, problem or NO_MODEL.format(agent=agent.id))


def _parse_workspace_option(options: Options) -> Workspace | None:
    """Return the workspace named by ``--workspace``; ``None`` for this machine."""
    if not options.workspace:
        return None
    from stepengine.workspace.workspace import Workspace

    try:
        return Workspace.parse(options.workspace, options.cwd.resolve())
    except DefinitionError as error:
        msg = f"--workspace: {error.message}"
        raise UsageProblem(msg) from None


def _make_command_line_hooks(history: History | None, agent: AgentDefinition) -> Hooks:
    """Return the hooks that the command line adds to those of *agent*; for a recorded run only the ones in its record."""
    from stepengine.context import require_finished_todos, summarize
    from stepengine.data.hooks import Hooks
    from stepengine.journal.encoding import get_name_without_module

    own = [get_name_without_module(hook) for point in attrs.astuple(agent.hooks, recurse=False) for hook in point]
    recorded = None if history is None else () if history.head is None else history.head.hooks

    def keep_if_recorded(hook: object) -> list[Any]:
        """Return a hook in a list; an empty list if the recorded run did not have it from the command line."""
        name = get_name_without_module(hook)
        return [hook] if recorded is None or recorded.count(name) > own.count(name) else []

    # Only runs of `stepengine serve` can have been started by a page, with this hook.
    of_page = []
    if recorded is not None:
        from stepengine.adapters.ag_ui.asked import add_page_data

        of_page = keep_if_recorded(add_page_data)
    return Hooks(
        pre_run=of_page, pre_step=keep_if_recorded(summarize()), on_stop=keep_if_recorded(require_finished_todos())
    )


def choose_policy(options: Options) -> Policy | None:
    """Return the policy for tool calls: the chosen one, else that of the settings or of a chat; with the changes of a recorded chat."""
    policy: Policy | None = (
        options.policy or options.settings.policy or (make_asking_policy() if options.asks else None)
    )
    changes: Policy | None = options.chat_policy
    if changes is None:
        return policy
    from stepengine.permissions import Policy

    return attrs.evolve((policy or Policy()).with_rules(*changes.rules), mode=changes.mode)


def add_guard_rules(options: Options, policy: Policy | None, recorded: History | None = None) -> Policy | None:
    """
    Return the policy with the rules of ``--guard``; a recorded run keeps those with which it started.

    Raises:
        UsageProblem: for another value than ``injection``, and for a policy file of an engine.
    """
    if options.guard not in ("", INJECTION):
        msg = f"--guard {options.guard!r} is unknown; write --guard {INJECTION}"
        raise UsageProblem(msg)
    if not options.guard and not (recorded is not None and has_guard_rules(recorded)):
        return policy
    from stepengine.permissions import Policy, injection_rules

    if policy is None:
        return Policy.guard_injection()
    if not isinstance(policy, Policy):
        msg = "--guard cannot change the policy file of an engine; add {'decision': 'ask', 'match': {'untrusted': '*'}} to that file"
        raise UsageProblem(msg)
    return policy.with_rules(*injection_rules())


def make_asking_policy() -> Policy:
    """Return the policy that allows reading and read-only commands, and asks about all other calls that need permission."""
    from stepengine.permissions import Policy, Rule, read_only_commands

    return Policy([Rule.allow_category("read"), *read_only_commands()])


def _make_terminal_interactor(progress: ProgressDisplay | None, options: Options) -> TerminalInteractor | None:
    """Return an interactor that asks the person at the terminal; ``None`` without a terminal."""
    if not (sys.stdin.isatty() and is_terminal(sys.stderr)):
        return None
    from stepengine.cli.screen.console import TerminalInteractor

    return TerminalInteractor(progress=progress, color=options.settings.get("display.color"))


def _choose_model_overrides(options: Options, agents: list[AgentDefinition], *, is_new: bool) -> dict[str, str]:
    """Return the models that replace those of agents, by agent id: ``--model`` wins over the settings."""
    typed, known = options.models, [normalised_id(agent.id) for agent in agents]
    if unknown := [name for name in typed if name and name not in known]:
        msg = f"--model {unknown[0]}={typed[unknown[0]]} names no agent of this run; its agents: {list_names(known, unknown[0])}"
        raise UsageProblem(msg)
    chosen = {} if "" in typed or not is_new else options.settings.table("models")
    return {normalised_id(name): model for name, model in chosen.items()} | typed


def make_model_registry(options: Options, unserved_models: Iterable[str] = ()) -> Models | Provider:
    """
    Return the registered providers; with ``--base-url``, models of ``--model`` are requested from that server.

    A model that an agent or a yield names itself is requested from its own provider, since the server may not have it and its price
    would be wrong. Models in *unserved_models* have no provider, so they are requested from the server, too.

    Raises:
        UsageProblem: when ``--base-url`` is not an address, or ``--api-key-env`` is given without it.
    """
    models = options.settings.make_models()
    if not options.base_url:
        if options.api_key_env:
            msg = "--api-key-env needs --base-url; `stepengine agents models` lists the variables of providers"
            raise UsageProblem(msg)
        return models
    if not options.base_url.startswith(("http://", "https://")):
        msg = f"--base-url must be an address such as http://localhost:11434/v1, not {options.base_url!r}"
        raise UsageProblem(msg)
    from stepengine.models import OpenAIChatProvider
    from stepengine.models.presets import PRESETS

    served = _list_base_url_models(options)
    # `openai/...` is also how such servers name open-weight models, so it is not taken for a prefix.
    prefix = (served or ("",))[0].partition("/")[0]
    name = prefix if prefix in PRESETS and prefix != "openai" else "openai_chat"
    server = OpenAIChatProvider(name, base_url=options.base_url, key_env=options.api_key_env or None)
    models.register(name, server)
    for model in (*served, *unserved_models):
        models.serve(model, server)
    return models


def _make_script_provider(options: Options) -> Provider:
    """Return a provider with the replies of ``--script``; raise if a server was named, too."""
    from stepengine.cli.scripts import make_run_script, refuse_script_with_server

    refuse_script_with_server(options)
    return make_run_script(options.script)


def _list_models_without_provider(options: Options, agents: Iterable[AgentDefinition]) -> frozenset[str]:
    """Return the models of agents that no registered provider has; nothing without ``--base-url``."""
    if not options.base_url:
        return frozenset()
    registry, found = options.settings.make_models(), set[str]()
    for model in [agent.model for agent in agents if agent.model]:
        try:
            registry.parse(model)
        except UnknownModel:
            found.add(model)
    return frozenset(found)


def _list_base_url_models(options: Options) -> tuple[str, ...]:
    """Return the models to request from the server at ``--base-url``, the main model first."""
    typed = options.models
    default = options.settings.get("model")
    named = [typed.get(""), *typed.values(), *options.served] if typed or any(options.served) else [default]
    return tuple(dict.fromkeys([model for model in named if model]))


def _read_recorded_model_overrides(journal: str) -> tuple[str, ...]:
    """Return the models that replaced those of the agents when the run in *journal* was started."""
    from stepengine.journal import as_journal

    if not journal or not (history := as_journal(journal).history()).intents:
        return ()
    root = history.root
    chosen = {**root.get("models", {}), **root.get("run_models", {})}
    return tuple([str(model) for model in (root.get("model"), *chosen.values()) if model])


def make_pricing(options: Options) -> Pricing:
    """
    Return the packaged prices, extended by ``--price`` for models without one and those at ``--base-url``.

    Raises:
        UsageProblem: when ``--price`` is not a price.
    """
    from stepengine.models.pricing import LIST_PRICES

    # The replies of a script are free, so that a limit in dollars does not stop a run without prices.
    price = options.price or ("0" if options.script else "")
    if not price:
        return LIST_PRICES
    try:
        into, out = [Decimal(text) for text in (price.split("/") * 2)[:2]]
    except InvalidOperation:
        into = out = Decimal("NaN")
    if price.count("/") > 1 or not (into.is_finite() and out.is_finite() and into >= 0 and out >= 0):
        msg = f"--price must be US dollars per million tokens, such as 0, 0.5 or 0.15/0.60 for input and output, not {options.price!r}"
        raise UsageProblem(msg)
    return _CustomPrices(into, out, frozenset(_list_base_url_models(options)) if options.base_url else frozenset())


@frozen
class _CustomPrices:
    """
    Prices from ``--price``, with the packaged prices for all other models.

    Attributes:
        into: US dollars for a million tokens of a prompt.
        out: US dollars for a million tokens of a reply.
        own: Models that have this price, even if they have a packaged price.
    """

    into: Decimal
    out: Decimal
    own: frozenset[str]

    def __call__(self, model: str, usage: Usage | None, at: datetime) -> Decimal | None:
        """Return the cost of *usage* of *model* at the time *at*; ``None`` without usage."""
        from stepengine.models.pricing import LIST_PRICES

        listed = None if model in self.own else LIST_PRICES(model, usage, at)
        return self._compute_custom_cost(usage) if listed is None else listed

    def price_reply(self, model: str, reply: ModelReply, at: datetime) -> Decimal | None:
        """Return the cost of *reply* by *model*; ``None`` without usage."""
        from stepengine.models.pricing import LIST_PRICES

        listed = None if model in self.own else LIST_PRICES.price_reply(model, reply, at)
        return self._compute_custom_cost(reply.usage) if listed is None else listed

    def list_unpriced(self, model: str, reply: ModelReply, at: datetime) -> tuple[str, ...]:
        """Return the parts of *reply* of *model* that have no price."""
        from stepengine.models.pricing import LIST_PRICES

        return () if model in self.own else LIST_PRICES.list_unpriced(model, reply, at)

    def _compute_custom_cost(self, usage: Usage | None) -> Decimal | None:
        """Return the cost of *usage* at the prices of ``--price``; ``None`` without usage."""
        if usage is None:
            return None
        return (self.into * usage.prompt_tokens + self.out * usage.completion_tokens) / MILLION


def make_model_registry_for_agents(options: Options, agents: Iterable[AgentDefinition]) -> Models:
    """Return the providers of the models of *agents*, as in ``make_engine_setup``; raises as ``make_model_registry``."""
    from stepengine.models import Models

    return Models.from_value(make_model_registry(options, _list_models_without_provider(options, agents)))


def require_known_models(options: Options, agents: Iterable[AgentDefinition]) -> None:
    """Raise ``UnknownModel`` if a model of ``--model`` has no provider: a server would start, and each of its runs would fail."""
    if not options.script:
        registry = make_model_registry_for_agents(options, agents)
        for model in options.models.values():
            registry.parse(model)


def _get_default_model_or_problem(models: Models | Provider, settings: Settings) -> tuple[str | None, str]:
    """Return the model of the settings and ``""``, or ``None`` and the reason why it cannot be used; both empty without one."""
    model = settings.get("model")
    if not model:
        return None, ""
    try:
        models.check(model)
    except (MissingKey, UnknownModel) as error:
        return None, f"{settings.origin('model')} sets the model to {model!r}: {error.message}"
    return model, ""


def make_progress_display(options: Options) -> ProgressDisplay | None:
    """Return the progress display on stderr; ``None`` with ``--quiet``."""
    if options.quiet:
        return None
    from stepengine.cli.screen.console import make_console
    from stepengine.cli.screen.progress import ProgressDisplay

    settings = options.settings
    color = settings.get("display.color")
    console = make_console(sys.stderr, color="never" if options.as_json and color == "auto" else color)
    live = is_terminal(sys.stderr) and not console.is_dumb_terminal and not os.environ.get("CI")
    return ProgressDisplay(
        console,
        live=live and not settings.get("display.plain"),
        verbose=options.verbose,
        level=settings.get("display.log"),
        thinking=settings.get("display.thinking"),
    )
