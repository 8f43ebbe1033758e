"""
The ``RunPlan`` and the first ``AgentState`` of a run, for roots and children.

Everything that can be wrong before a run exists is found here.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import lru_cache, partial
from random import Random
from threading import get_ident
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import attrs
from attrs import frozen

from stepengine.data.alike import find_nearest
from stepengine.data.definition import AgentDefinition, HookContext, normalised_id
from stepengine.data.effects import CallBody, Spawn
from stepengine.data.events import LogLine
from stepengine.data.json import JsonDict, freeze, require_storable_text
from stepengine.data.limits import MAX_LEVELS, TREE_WIDE, Limits
from stepengine.data.provenance import Provenance
from stepengine.data.questions import Answer, AnswerLike, Question, find_answers_problem, require_valid_answer
from stepengine.data.record_sizes import find_length_problem
from stepengine.data.state import AgentState, RunInfo, find_suspended_reply_index
from stepengine.data.tools import Driving, Spawning, ToolSpec, Yielding
from stepengine.data.transcript import Transcript
from stepengine.engine.catalog import Agent, Catalog, ToolUses, make_instructions_note, remove_instructions_notes
from stepengine.errors import (
    AgentError,
    AnswerRejected,
    DataError,
    HandlerError,
    InputError,
    LimitExceeded,
    StepEngineError,
    UnknownModel,
)
from stepengine.machine.author import add_location, make_handler_error
from stepengine.machine.child_effects import find_matching_id, make_spawn_not_allowed_error
from stepengine.machine.plan import PlannedAgent, RunHost, RunInput, RunPlan, ToolBody
from stepengine.runtime.core_performer import get_call_timeout
from stepengine.runtime.hub import Hub
from stepengine.runtime.logs import LOGGER, LineLogger
from stepengine.runtime.services import Services

if TYPE_CHECKING:
    from stepengine.models import Models

KEPT_LIMITS = 256
"""Results of two functions of limits: more than the agents of most engines, and each is a small value."""
NO_INFO = RunInfo()
NO_CONTEXT = JsonDict()
NO_HISTORY = Transcript()
NO_STATE = AgentState()
"""What a run without a previous state continues from."""


def _require_answers_mapping(_: Any, __: Any, answers: Any) -> None:
    if problem := find_answers_problem(answers):
        raise InputError(problem, issues=("answers should be a mapping",))


def _check_on_divergence(_: object, __: object, value: object) -> None:
    """Raise ``InputError`` for an unknown value of ``on_divergence``."""
    if value not in ("raise", "stop", "keep"):
        msg = f"on_divergence must be one of raise, stop, keep, not {value!r}"
        raise InputError(msg, issues=(msg,))


def _prompt_or_empty(value: str | None) -> str:
    return "" if value is None else value


@frozen(kw_only=True)
class RunRequest:
    """
    A caller's request to run an agent: prompt, params, limits, answers and the state to continue from.

    Attributes:
        agent: The agent.
        prompt: The prompt; ``""`` for none.
        params: The params as given.
        previous: The state that the run continues.
        info: The caller's session, user and metadata.
        limits: Limits of this run.
        answers: Answers given up front, by question id or text.
        earlier: Questions that *previous* waits for, with their answers; the run asks them again under other ids.
        run_id: The run's id, if the caller has it already; else it is random.
        hub: The event stream of a kept-open handle to continue; else the run has one of its own.
        on_divergence: ``raise``, ``stop`` or ``keep``, for the waiting run of a session whose agent was edited since.
        agent_models: Models in place of those that agents name and of the engine's own choice, by agent id.
        predecessors: The agents that handed the conversation over to *agent*, the first one first.
        planned: The plan that was made before the session was loaded; it holds unless another agent has the conversation by now.
    """

    agent: Agent
    prompt: str = attrs.field(default="", converter=_prompt_or_empty)
    params: Any = None
    previous: AgentState | None = None
    info: RunInfo = NO_INFO
    limits: Limits | None = None
    answers: Mapping[str, AnswerLike] | None = attrs.field(default=None, validator=_require_answers_mapping)
    earlier: tuple[tuple[Question, AnswerLike], ...] = ()
    run_id: str | None = None
    hub: Hub | None = None
    on_divergence: str = attrs.field(default="raise", validator=_check_on_divergence)
    agent_models: Mapping[str, str] | None = None
    predecessors: tuple[Agent, ...] = ()
    planned: PlannedRun | None = attrs.field(default=None, eq=False, repr=False)


@frozen(kw_only=True)
class PlannedRun:
    """
    A validated plan of a run: an invalid request has raised by now, and no code of its author was called yet.

    Attributes:
        request: The request of the caller.
        hub: Its event stream.
        plan: Its plan.
        state: Its first state; the system prompt is ``""`` if it has to be resolved.
        services: Its services.
    """

    request: RunRequest
    hub: Hub
    plan: RunPlan
    state: AgentState
    services: Services

    def replan(self, request: RunRequest, created: datetime) -> PlannedRun:
        """Return this plan with the prompt and previous state of *request*, and *created* as its time; all else stays as planned."""
        plan = attrs.evolve(self.plan, input=attrs.evolve(self.plan.input, prompt=request.prompt), created=created)
        return attrs.evolve(
            self, request=request, plan=plan, state=make_root_state(plan, request.agent, request.previous)
        )


def separate_earlier_answers(request: RunRequest) -> RunRequest:
    """
    Return *request* with its answers to questions of the ``previous`` state apart; raise if they are of no use.

    A run continues the step that the state was suspended in when one of these is answered, or nothing else is said. Then
    the state keeps its questions; otherwise they are dropped, and the conversation continues without an answer.

    Raises:
        AnswerRejected: when a run cannot be resumed from a state alone with an answer, or an answer does not
            fit its question.
    """
    previous = request.previous
    if not isinstance(previous, AgentState) or not previous.pending:
        return request
    answers = dict(request.answers or {})
    for question in previous.pending:
        given = answers.get(question.id, answers.get(question.text))
        if isinstance(given, str | bool | Answer):
            require_valid_answer(given, question)
    # By id only. An answer that was given by the text of its question stays among `answers`, where it is found when the
    # run asks again; one by id would not be, since the question has another id then.
    earlier = tuple([(q, answers.pop(q.id)) for q in previous.pending if q.id in answers])
    is_answered = bool(earlier) or any(q.text in answers for q in previous.pending)
    problem = explain_unresumable_state(request.agent.definition, previous)
    if problem is None and (is_answered or not (request.prompt or request.params is not None)):
        return attrs.evolve(request, answers=answers, earlier=earlier)
    # An answer that cannot be used is an error and not dropped: the caller believes that something was allowed or
    # refused with it.
    if is_answered and problem is not None:
        waiting = ", ".join([f"{q.id!r} ({q.text})" for q in previous.pending])
        msg = (
            f"{waiting} cannot be answered with previous= alone: {problem}. Such a run needs its journal: run it with "
            "journal= and answer with engine.resume(journal, answers=...), or store it in a session store with save_state"
        )
        raise AnswerRejected(msg)
    # A new prompt without an answer: the person went on talking. The state must not say any longer that it waits, or
    # the run would end suspended for a question that nobody sees.
    return attrs.evolve(request, previous=attrs.evolve(previous, pending=()))


def explain_unresumable_state(agent: AgentDefinition, state: AgentState) -> str | None:
    """Return why a suspended run cannot be resumed from its state alone; ``None`` when it can."""
    if agent.handle_steps is not None:
        return f"agent {agent.id!r} has a handler, and a state cannot restore the place where it waits"
    if any(q.path for q in state.pending):
        return "the question comes from a child or from a tool that yields, and the state does not contain its progress"
    if find_suspended_reply_index(state.message_history) is None:
        return "the state has no call that waits for an answer"
    return None


class RecordedModels(NamedTuple):
    """
    The models in the record of a run, so that it can be repeated without any.

    Attributes:
        models: The model strings of its requests; they stay as they are.
        default: The model of the root, where neither its agent nor the engine names one.
        chosen: The models that the engine had in place of those that agents name, by agent id; that of ``""`` for all others.
        own: Those that were chosen for this run alone, which go before these.
        is_whole: Whether nothing will be performed, so that no provider and no key is needed.
    """

    models: frozenset[str] = frozenset()
    default: str | None = None
    chosen: Mapping[str, str] = MappingProxyType({})
    own: Mapping[str, str] = MappingProxyType({})
    is_whole: bool = False


NOTHING_RECORDED = RecordedModels()


@frozen(kw_only=True)
class RunModels:
    """
    The models of one root run and its children.

    Attributes:
        registry: The registry in force.
        default: The model of roots that name none.
        chosen: Models in place of those that agents name, by agent id; that of ``""`` for all others.
        recorded: The models in the record of the run.
        keep_names: Whether model strings stay as written, because one provider serves them all.
        window: Gives a model's context length, if it is known.
    """

    registry: Models
    default: str | None
    chosen: Mapping[str, str]
    recorded: RecordedModels = NOTHING_RECORDED
    keep_names: bool
    window: Callable[[str], int | None]

    def find_agent_model(self, agent: AgentDefinition) -> str | None:
        """
        Return the model of an agent: the one chosen for its id, else the one chosen for all, else its own.

        Raises:
            UnknownModel: when the model names no provider.
            MissingKey: when its provider has no key.
        """
        model = agent.model
        if chosen := self.chosen:
            model = chosen.get(normalised_id(agent.id)) or chosen.get("") or model
        return self._resolve_model_string(model) if model else None

    def find_default_model(self) -> str | None:
        """Return the model of a root that names none; raises as ``find_agent_model``."""
        return None if self.default is None else self._resolve_model_string(self.default)

    def _resolve_model_string(self, model: str) -> str:
        """Return a model string as requests have it; raise if its provider cannot be used."""
        require_storable_text(model, "$.model")
        recorded = self.recorded
        # Nothing will be performed, so no key is needed and a provider may be unknown here: a journal of somebody else
        # can be looked at without being set up as they were.
        if recorded.is_whole:
            return model if self.keep_names or model in recorded.models else normalise_model_name(self.registry, model)
        # A string that is in the record stays as it was written there, also when this version would spell it in another
        # way: the request has to be equal to the recorded one, byte for byte.
        canonical = self.registry.check(model)
        return model if self.keep_names or model in recorded.models else canonical


def normalise_model_name(models: Models, model: str) -> str:
    """Return *model* as requests name it; unchanged if no provider serves it, which is reported when a run asks for it."""
    try:
        return str(models.parse(model))
    except UnknownModel:
        return model


NOTHING_USED = ToolUses((), {})


class Planner:
    """
    Makes plans for one root run and its children.

    Args:
        catalog: The engine's agents.
        models: The models of these runs.
        created: When the root run is created, which is now.
        seed: The seed of the run's random numbers; by default its random id.
        watched: Says whether anybody is shown events.
        opened: Called with a function that returns the history of the root run, once that has started.

    Attributes:
        seed: The seed in force, once the root was planned.
    """

    def __init__(
        self,
        catalog: Catalog,
        models: RunModels,
        *,
        created: datetime,
        seed: str | None,
        watched: Callable[[], bool],
        opened: Callable[[Callable[[], Transcript]], None] | None = None,
    ) -> None:
        self._catalog = catalog
        self._models = models
        self.seed = seed or ""
        self._created = created
        self._host = RunHost(is_own_thread=_SameThreadCheck(), is_watched=watched, set_history=opened)
        self._inherited: dict[Agent, _InheritedTools] = {}

    def plan_root(self, request: RunRequest) -> tuple[RunPlan, AgentState]:
        """
        Return plan and state of a root run; its system prompt is not resolved yet.

        Raises:
            InputError: when prompt or params do not fit.
            UnknownModel: when the model names no provider.
            MissingKey: when the provider has no key.
        """
        # An agent that was handed a conversation has the model now that it had in the run in which that happened.
        named = [one.definition for one in (request.agent, *reversed(request.predecessors))]
        model = next(filter(None, map(self._models.find_agent_model, named)), None) or self._models.find_default_model()
        agent, run_id = request.agent, request.run_id or make_random_run_id()
        if why := find_length_problem(
            (request.info, request.previous and _list_unbounded_state_parts(request.previous))
        ):
            msg = f"metadata and previous state of agent {agent.definition.id!r} are too long: {why}; start a new conversation"
            raise InputError(msg, issues=(why,))
        if agent.at_provider is not None:
            agent = _choose_provider_variant(agent, agent.at_provider, model)
        # From the id where none is given, so that a run which is repeated from its journal, where the id stands, draws
        # the same numbers.
        self.seed = self.seed or run_id
        plan = self._make_plan(
            agent,
            run_id=run_id,
            path="",
            prompt=request.prompt,
            params=request.params,
            model=model,
            limits=agent.limits if request.limits is None else request.limits.resolve(agent.limits),
            created=self._created,
            info=request.info,
        )
        return plan, make_root_state(plan, agent, request.previous)

    def plan_child(self, parent: RunPlan, effect: Spawn | CallBody, path: str) -> tuple[RunPlan, AgentState]:
        """
        Return plan and state of a child, or of the body of a tool.

        Raises:
            StepEngineError: when it must not start: too deep, unknown, not allowed, wrong params, no model.
        """
        if path.count(".") >= MAX_LEVELS:
            msg = f"it would be more than {MAX_LEVELS} levels below the root run, the most allowed; start it from one of its callers"
            raise LimitExceeded(msg, kind="depth", limit=MAX_LEVELS)
        if isinstance(effect, CallBody):
            return self._plan_tool_body(parent, effect, path)
        assert isinstance(effect, Spawn)  # noqa: S101 - the second of two
        agent = self._get_allowed_child(parent, effect)
        # The parent's model before the engine's default: a caller that chose a model for the root means what the root
        # starts as well.
        model = self._models.find_agent_model(agent.definition) or parent.model or self._models.find_default_model()
        if agent.at_provider is not None:
            agent = _choose_provider_variant(agent, agent.at_provider, model)
        definition, inherited = agent.definition, effect.parent()
        inherits = not effect.is_hand_off and (definition.inherit_parent_system_prompt or effect.is_inline)
        plan = self._make_plan(
            agent,
            run_id=_make_child_run_id(parent, path),
            path=path,
            prompt=effect.prompt,
            params=effect.params,
            model=model,
            limits=_cap_limits_to_parent(agent.limits, parent.given, parent.limits.max_depth),
            created=parent.created,
            starts_at=effect.at,
            info=parent.info,
            inherited_tools=self._get_inherited_tools(agent, inherited.tool_definitions) if inherits else None,
            is_inline=effect.is_inline,
            provenance=effect.provenance,
        )
        state = _make_child_state(plan, agent, inherited)
        # A child that inherits its parent's system prompt has it already; its own is not even resolved, since that may
        # call code of the author.
        return plan, state if inherits else with_resolved_system_prompt(plan, state)

    def _make_plan(
        self,
        agent: Agent,
        *,
        run_id: str,
        path: str,
        prompt: str,
        params: object,
        model: str | None,
        limits: Limits,
        created: datetime,
        info: RunInfo,
        starts_at: int = 0,
        inherited_tools: _InheritedTools | None = None,
        is_inline: bool = False,
        provenance: Provenance | None = None,
    ) -> RunPlan:
        """Return the plan of a run; raise if its prompt or params are invalid, or a sandbox of its tools is not installed."""
        definition, schemas = agent.definition, agent.schemas
        if not self._models.recorded.is_whole:
            for get_sandbox_name in agent.sandbox_name_getters:
                get_sandbox_name()  # raises for a package that is not installed, before the first model call
        if not isinstance(prompt, str):
            msg = f"the prompt of agent {definition.id!r} must be a string, not a {type(prompt).__name__}"
            raise InputError(msg, issues=("prompt should be a string",))
        try:
            # Found here with the name of the agent; the journal, the provider and every store would each fail with it
            # in a way of its own, after money was spent.
            require_storable_text(prompt)
        except DataError:
            msg = f"the prompt of agent {definition.id!r} holds a lone surrogate, which no encoding can store"
            raise InputError(msg, issues=("prompt should be text that UTF-8 can hold",)) from None
        given = schemas.params(schemas.repair_params(params) if params else params)
        if why := find_length_problem((prompt, given.json)):
            msg = f"prompt and params of agent {definition.id!r} are too long: {why}; write long values to a file and pass its path"
            raise InputError(msg, issues=(why,))
        return RunPlan(
            agent=agent.planned,
            run_id=run_id,
            path=path,
            created=created,
            starts_at=starts_at,
            random=partial(Random, f"{self.seed}:{path}") if definition.handle_steps is not None else None,
            model=model,
            # A copy where hooks may add tools to this run, so that they are not in the agent for all later ones.
            tools=agent.tools.copy() if agent.hooks.pre_run else agent.tools,
            sent=None if inherited_tools is None else inherited_tools.specs,
            note=agent.instructions_note if inherited_tools is None else inherited_tools.note,
            is_inline=is_inline,
            limits=limits,
            input=RunInput(prompt=prompt, params=given.value, json=given.json),
            info=info,
            # Only a `pre_step` hook can ask for it, and the price data may have to be loaded to know it.
            context_window=self._models.window(model) if model and agent.hooks.pre_step else None,
            host=self._host,
            provenance=provenance,
        )

    def _plan_tool_body(self, parent: RunPlan, effect: CallBody, path: str) -> tuple[RunPlan, AgentState]:
        """Return plan and state of a tool's body: it sees its caller's conversation, adds nothing to it, and may call the tools of ``uses=``."""
        binding, agent = parent.tools[effect.tool_name], cast("Agent", parent.agent.source)
        runs = cast("Yielding", binding.runs)
        uses = agent.uses.get(binding.spec.name, NOTHING_USED)
        # Tools that `pre_run` hooks gave the run, such as those of a server, are its agent's own.
        from_hooks = () if parent.tools is agent.tools else [name for name in parent.tools if name not in agent.tools]
        arguments = binding.validate(effect.input).arguments if effect.arguments is None else effect.arguments
        around = parent.body
        body = ToolBody(
            tool_name=effect.tool_name,
            # The body of a tool that is called by the body of another one counts as part of the outer call: that is the
            # one which stands in the conversation, and which events and questions have to name.
            tool_call_id=effect.tool_call_id if around is None else around.tool_call_id,
            by_model=effect.source == "model" if around is None else around.by_model,
            steps=lambda ctx: runs.steps(ctx, arguments),
            timeout=get_call_timeout(parent, effect.tool_name),
            values=effect.values,
        )
        plan = RunPlan(
            agent=PlannedAgent(
                definition=parent.agent.definition,
                offered=tuple(dict.fromkeys([*parent.agent.offered, *uses.tools, *from_hooks])),
                hooks=agent.tool_body_hooks,
                children={**(parent.agent.children or {}), **uses.agents},
                repair_child_params=parent.agent.repair_child_params,
                describe_agent=parent.agent.describe_agent,
                output_schema=parent.agent.output_schema,
                source=agent,
            ),
            run_id=_make_child_run_id(parent, path),
            path=path,
            created=parent.created,
            starts_at=effect.at,
            random=partial(Random, f"{self.seed}:{path}"),
            model=parent.model,
            tools=parent.tools,
            limits=_remove_time_limit(parent.given),
            info=parent.info,
            host=self._host,
            body=body,
            provenance=effect.provenance,
        )
        return plan, _make_body_state(plan, effect.state())

    def _get_inherited_tools(self, agent: Agent, definitions: Mapping[str, ToolSpec]) -> _InheritedTools:
        """Return the tool definitions that a child inherits, with their note; cached, since siblings inherit the same."""
        last = self._inherited.get(agent)
        if last is None or last.definitions is not definitions:
            specs = tuple(definitions.values())
            last = self._inherited[agent] = _InheritedTools(definitions, specs, make_instructions_note(agent, specs))
        return last

    def _get_allowed_child(self, parent: RunPlan, effect: Spawn) -> Agent:
        """Return the agent that an effect spawns; raise if its parent may not spawn it."""
        given = effect.definition
        # The author of the tool decides what it spawns, and put the definition into it; the list of the agent is about
        # what its model and handler may name.
        if isinstance(given, AgentDefinition) and _is_spawn_tool_call(parent, effect):
            return self._catalog.get_agent(given)  # a tool of the parent carries it
        agents = parent.agent.children or {}
        key = find_matching_id(effect.agent_id, agents)
        carried = _find_carried_agent(parent, effect) if key is None and _is_spawn_tool_call(parent, effect) else None
        if carried is not None:
            return self._catalog.get_agent(carried)
        if key is None:
            hint = (
                "" if effect.tool_call_id else f"; list it in spawnable_agents=[...] of {parent.agent.definition.id!r}"
            )
            if parent.body is not None:
                # The name is cut because it comes from a model: the cost of comparing grows with its square.
                near = find_nearest(effect.agent_id, agents, max_count=1)
                meant = f"; did you mean {near[0]!r}? Else" if near else ";"
                hint = f"{meant} list it in uses=[...] of the tool {parent.body.tool_name!r}"
            raise make_spawn_not_allowed_error(parent.agent.definition.id, effect.agent_id, agents, hint)
        spawner: Agent = parent.agent.source
        listed = spawner.get_child(key)
        if not isinstance(given, AgentDefinition) or given is listed.definition:
            return listed
        _require_listed_variant(parent.agent.definition.id, given, listed.definition)
        return self._catalog.get_agent(given)


OVERRIDDEN = frozenset({"model", "tools", "settings", "limits"})
"""In what the agent of an ``AgentCall`` may differ from the listed one (requirements:A5). Another handler or prompt is another agent."""


def _require_listed_variant(parent_id: str, variant: AgentDefinition, listed: AgentDefinition) -> None:
    """
    Raise ``AgentError`` unless *variant* differs from the listed agent in model, tools, settings and limits only.

    Raises:
        AgentError: naming the fields in which they differ.
    """
    names = [field.name for field in attrs.fields(AgentDefinition) if field.name not in OVERRIDDEN]
    other = [name for name in names if getattr(variant, name) != getattr(listed, name)]
    if other:
        msg = (
            f"AgentCall has another agent {variant.id!r} than spawnable_agents of {parent_id!r}: they differ in "
            f"{', '.join(other)}. Give one of them its own id and list both, or write AgentCall({variant.id!r}, ...)"
        )
        raise AgentError(msg)


def _choose_provider_variant(agent: Agent, at_provider: Agent, model: str | None) -> Agent:
    """Return *at_provider* if the provider of *model* runs the programs that call tools; else *agent*."""
    # Imported here: the adapters of providers are loaded by who uses one.
    from stepengine.models._programs import supports_programs

    return at_provider if model is not None and supports_programs(model) else agent


def _is_spawn_tool_call(parent: RunPlan, effect: Spawn) -> bool:
    """Return whether the spawn is the model's call of a spawning tool; ``False`` for spawns that handlers and tool bodies yield."""
    return bool(effect.tool_call_id) and (parent.body is None or effect.tool_call_id != parent.body.tool_call_id)


def _find_carried_agent(parent: RunPlan, effect: Spawn) -> AgentDefinition | None:
    """Return the agent of this id that a tool of the parent carries, for an effect sent without definition."""
    for binding in parent.tools.values():
        for agent in binding.runs.agents if isinstance(binding.runs, Spawning | Driving) else ():
            if normalised_id(agent.id) == normalised_id(effect.agent_id):
                return cast("AgentDefinition", agent)
    return None


class _InheritedTools(NamedTuple):
    """The tool definitions of a parent, and the note for a child that is shown them."""

    definitions: Mapping[str, ToolSpec]
    specs: tuple[ToolSpec, ...]
    note: str


def make_random_run_id() -> str:
    """Return a short random id of letters, digits, hyphens and underscores."""
    return secrets.token_hex(6)  # 48 bits: of a million runs, two share an id with a probability of 0.2 %


def with_resolved_system_prompt(plan: RunPlan, state: AgentState) -> AgentState:
    """
    Return *state* with the agent's system prompt, rendered if it is an object; raise if it fails or is too long.

    Raises:
        HandlerError: when a prompt object raised, or gave something else than text.
    """
    prompt = plan.agent.definition.system_prompt
    if isinstance(prompt, str):
        _check_prompt_length(plan, prompt)
        # An agent without a prompt of its own keeps that of the history which it continues (`make_root_state`).
        return attrs.evolve(state, system_prompt=prompt) if prompt and state.system_prompt != prompt else state
    what = f"the system prompt {type(prompt).__name__} of agent {plan.agent.definition.id!r}"
    ctx = HookContext(
        state=state,
        agent=plan.agent.definition,
        session_id=plan.info.session_id,
        user_id=plan.info.user_id,
        metadata=plan.info.metadata,
        params=plan.input.json,
        path=plan.path,
        now=plan.created,
        logger=_PromptLogger(plan),
    )
    try:
        text = prompt.render(ctx)
    except StepEngineError as error:
        add_location(error)
        raise
    except Exception as error:
        raise make_handler_error(what, error) from error
    if not isinstance(text, str):
        msg = f"{what} returned a {type(text).__name__}; render() must return a string"
        raise HandlerError(msg, kind="TypeError")
    _check_prompt_length(plan, text)
    return attrs.evolve(state, system_prompt=text)


def _check_prompt_length(plan: RunPlan, text: str) -> None:
    """Raise ``HandlerError`` if a system prompt is too long for a record."""
    if why := find_length_problem(text):
        msg = f"the system prompt of agent {plan.agent.definition.id!r} is too long: {why}"
        raise HandlerError(msg, kind="too_long")


class _PromptLogger(LineLogger):
    """The logger of a prompt that is resolved before its run exists: straight to the standard logger."""

    def __init__(self, plan: RunPlan) -> None:
        hub = Hub(logger=LOGGER)
        hub.log.add_run(plan.path, plan.run_id, plan.agent.definition.id)
        self._hub = hub
        self._path = plan.path

    def log_line(self, level: str, message: str, data: dict[str, object]) -> None:
        self._hub.log.write(LogLine(path=self._path, level=level, message=message), data)


class _SameThreadCheck:
    """Tells whether the caller is in the thread that called first, in which the run is driven."""

    __slots__ = ("_ident",)

    def __init__(self) -> None:
        self._ident: int | None = None

    def __call__(self) -> bool:
        if self._ident is None:
            self._ident = get_ident()
        return self._ident == get_ident()


def _make_child_run_id(parent: RunPlan, path: str) -> str:
    """Return the id of the child at *path*: the id of the root run, followed by the path."""
    # Known before the child begins, the same when it is repeated, and whoever reads it in a log sees where it belongs.
    return f"{parent.run_id.removesuffix(_get_run_id_suffix(parent.path))}{_get_run_id_suffix(path)}"


def _get_run_id_suffix(path: str) -> str:
    return f"-{path.replace('.', '-')}" if path else ""


def pop_run_info(options: dict[str, Any]) -> RunInfo:
    """
    Remove session, user and metadata from the options of a run, and return them.

    Raises:
        InputError: when the metadata is not a JSON object.
    """
    session_id, user_id = options.pop("session_id", None), options.pop("user_id", None)
    metadata = options.pop("metadata", None)
    if session_id is None and user_id is None and not metadata:
        return NO_INFO
    return RunInfo(session_id, user_id, _freeze_metadata(metadata) if metadata else JsonDict())


def _freeze_metadata(metadata: Mapping[str, object]) -> JsonDict:
    """Return metadata as an immutable JSON object; raise ``InputError`` for anything else."""
    try:
        frozen = freeze(metadata, "metadata")
    except StepEngineError as error:
        msg = f"the metadata of a run must be a JSON object: {error.message}"
        raise InputError(msg, issues=(error.message,)) from error
    if not isinstance(frozen, JsonDict):
        msg = f"the metadata of a run must be a JSON object, not a {type(metadata).__name__}"
        raise InputError(msg, issues=("metadata should be an object",))
    return frozen


@lru_cache(KEPT_LIMITS)
def _cap_limits_to_parent(limits: Limits, parent_limits: Limits, depth: int | None) -> Limits:
    """
    Return *limits* with tree-wide limits capped to those of the parent; cached, since siblings have the same.

    Args:
        limits: The child's.
        parent_limits: The parent's limits that were set explicitly.
        depth: The parent's depth in force: it has a default that binds all.
    """
    return limits.cap({name: depth if name == "max_depth" else getattr(parent_limits, name) for name in TREE_WIDE})


@lru_cache(KEPT_LIMITS)
def _remove_time_limit(limits: Limits) -> Limits:
    """Return *limits* without ``max_seconds``: the time limit of its caller applies to the body of a tool."""
    return limits if limits.max_seconds is None else attrs.evolve(limits, max_seconds=None)


def _make_body_state(plan: RunPlan, caller: AgentState) -> AgentState:
    """Return the state that the body of a tool starts from: it sees the conversation of its caller, and has no steps."""
    return AgentState(
        run_id=plan.run_id,
        agent_id=plan.agent.definition.id,
        parent_id=caller.run_id,
        ancestor_run_ids=(*caller.ancestor_run_ids, caller.run_id),
        message_history=caller.message_history,
        view=caller.view,
        system_prompt=caller.system_prompt,
        tool_definitions=caller.tool_definitions,
        context=caller.context,
        # What is shown of its calls stands beside those of its caller.
        id_prefix=f"c{plan.path.replace('.', '_')}_",
        left_out=caller.left_out,
    )


def _list_unbounded_state_parts(state: AgentState) -> object:
    """Return the parts of a previous state whose length must be checked; ``None`` for an invalid state."""
    if not isinstance(state, AgentState):
        return None  # refused elsewhere
    view = () if state.view is state.message_history else tuple(state.view)
    return tuple(state.message_history), view, state.context, state.output, state.left_out


def make_root_state(plan: RunPlan, agent: Agent, previous: AgentState | None) -> AgentState:
    """Return the state of a root run, which continues from *previous*."""
    if previous is not None and not isinstance(previous, AgentState):
        msg = f"previous must be an AgentState, such as result.state, not a {type(previous).__name__}"
        raise InputError(msg, issues=("previous should be an AgentState",))
    before = NO_STATE if previous is None else previous
    own = before.agent_id in ("", plan.agent.definition.id)
    history, view = _get_inherited_history(before, has_same_prompt=own)
    # The next run of the conversation keeps it as the first one does, which took it from a history from elsewhere.
    keeps_prompt = own and not agent.definition.system_prompt
    return AgentState(
        run_id=plan.run_id,
        agent_id=plan.agent.definition.id,
        message_history=history,
        view=view,
        system_prompt=before.system_prompt if keeps_prompt else _get_constant_system_prompt(agent),
        tool_definitions=agent.specs,
        steps_remaining=plan.limits.max_steps or 0,
        context=before.context,
        pending=before.pending,
        next_call=before.next_call,
        id_prefix=before.id_prefix,
        left_out=before.left_out,
        handed_to=before.handed_to,
    )


def _get_constant_system_prompt(agent: Agent) -> str:
    """Return an agent's system prompt; ``""`` when it has to be resolved first."""
    prompt = agent.definition.system_prompt
    return prompt if isinstance(prompt, str) else ""


def _get_inherited_history(parent: AgentState, *, has_same_prompt: bool) -> tuple[Transcript, Transcript]:
    """Return record and view as a child inherits them; without the parent's system prompt, instructions notes are removed."""
    # Byte for byte with the parent's prompt, for the provider's cache. Without it nothing is cached, and the child would
    # take its parent's agents for its own.
    if has_same_prompt:
        return parent.message_history, parent.view
    record = remove_instructions_notes(parent.message_history)
    return record, record if parent.view is parent.message_history else remove_instructions_notes(parent.view)


def _make_child_state(plan: RunPlan, agent: Agent, parent: AgentState) -> AgentState:
    """Return the first state of a child, with the parts of its parent's state that it inherits."""
    definition = agent.definition
    inherits = definition.include_message_history or plan.is_inline
    same_prompt = plan.sent is not None
    history, view = (
        _get_inherited_history(parent, has_same_prompt=same_prompt) if inherits else (NO_HISTORY, NO_HISTORY)
    )
    return AgentState(
        run_id=plan.run_id,
        agent_id=definition.id,
        parent_id=parent.run_id,
        ancestor_run_ids=(*parent.ancestor_run_ids, parent.run_id),
        message_history=history,
        view=view,
        system_prompt=parent.system_prompt if same_prompt else _get_constant_system_prompt(agent),
        tool_definitions=parent.tool_definitions if same_prompt else agent.specs,
        steps_remaining=plan.limits.max_steps or 0,
        context=parent.context if plan.is_inline else NO_CONTEXT,
        next_call=parent.next_call if inherits else 1,
        id_prefix=f"c{plan.path.replace('.', '_')}_" if inherits else "c",
        left_out=parent.left_out if inherits else (),
    )
