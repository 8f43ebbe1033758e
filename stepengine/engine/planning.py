"""
What runs are started with: ``RunPlan`` and ``AgentState`` of roots and children (design 3, 5, 9).

Everything that can be wrong before a run exists is found here.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from decimal import Decimal
from random import Random
from threading import get_ident
from typing import Any

import attrs

from stepengine.data.definition import AgentDefinition, normalised_id
from stepengine.data.effects import Spawn
from stepengine.data.events import LogLine
from stepengine.data.hooks import HookContext
from stepengine.data.json import JsonDict, freeze
from stepengine.data.limits import Limits
from stepengine.data.questions import Answer, AnswerLike, Question, answer_problem
from stepengine.data.state import AgentState, suspended_at
from stepengine.data.transcript import Transcript
from stepengine.engine.catalog import Agent, Catalog
from stepengine.engine.notes import instructions_note
from stepengine.errors import AnswerRejected, HandlerError, InputError, StepEngineError, UnknownModel
from stepengine.machine.author import blamed, noted
from stepengine.machine.plan import RunPlan
from stepengine.machine.spawning import matching_id, not_allowed
from stepengine.models import Models
from stepengine.runtime.hub import Hub
from stepengine.runtime.logs import LOGGER, Lines

__all__ = ("NOTHING_KNOWN", "Known", "Planner", "Request", "new_run_id", "not_from_state", "reopening")

NO_METADATA = JsonDict()
TREE_WIDE = ("max_tokens", "max_cost_usd", "max_seconds", "max_depth", "max_total_children")


def _mapping(_: Any, __: Any, answers: Any) -> None:
    if answers is not None and not isinstance(answers, Mapping):
        msg = f"answers go by the question's id or text, such as {{'q3': 'yes'}}, and not in a {type(answers).__name__}"
        raise InputError(msg, issues=("answers should be a mapping",))


def _divergence(_: Any, __: Any, given: Any) -> None:
    if given not in ("raise", "stop", "keep"):
        msg = f"on_divergence is one of raise, stop, keep, not {given!r}"
        raise InputError(msg, issues=(msg,))


@attrs.frozen(kw_only=True)
class Request:
    """
    What a caller asks for.

    Attributes:
        agent: The agent.
        prompt: The prompt; ``""`` for none.
        params: The params as given.
        previous: The state that the run continues.
        session_id: The conversation.
        user_id: The user.
        metadata: The caller's metadata.
        limits: Limits of this run.
        answers: Answers given up front, by question id or text.
        earlier: Questions that *previous* waits for, with their answers; the run asks them again under other ids.
        run_id: The run's id, where one was told already; else it is drawn.
        on_divergence: What becomes of a run that waits in the session when its agent was edited since.
    """

    agent: Agent
    prompt: str = ""
    params: Any = None
    previous: AgentState | None = None
    session_id: str | None = None
    user_id: str | None = None
    metadata: Mapping[str, Any] | None = None
    limits: Limits | None = None
    answers: Mapping[str, AnswerLike] | None = attrs.field(default=None, validator=_mapping)
    earlier: tuple[tuple[Question, AnswerLike], ...] = ()
    run_id: str | None = None
    on_divergence: str = attrs.field(default="raise", validator=_divergence)


def reopening(request: Request) -> Request:
    """
    Return *request* with the answers to the questions that its ``previous`` state waits for beside the other ones.

    A run goes on with the step that the state was suspended in when one of these is answered, or nothing else is said. Then
    the state keeps its questions; otherwise they are dropped, and the conversation goes on without an answer.

    Raises:
        AnswerRejected: when a state alone cannot be gone on from with an answer (requirements X11), or an answer is none to
            its question (X54).
    """
    previous = request.previous
    if not isinstance(previous, AgentState) or not previous.pending:
        return request
    answers = dict(request.answers or {})
    for question in previous.pending:
        _check_answer(answers, question)
    earlier = tuple([(q, answers.pop(q.id)) for q in previous.pending if q.id in answers])
    is_answered = bool(earlier) or any(q.text in answers for q in previous.pending)
    problem = not_from_state(request.agent.definition, previous)
    if problem is None and (is_answered or not (request.prompt or request.params is not None)):
        return attrs.evolve(request, answers=answers, earlier=earlier)
    if is_answered and problem is not None:
        waiting = ", ".join([f"{q.id!r} ({q.text})" for q in previous.pending])
        msg = (
            f"{waiting} cannot be answered with previous= alone: {problem}. Such a run needs its journal: run it with "
            "journal= and answer with engine.resume(journal, answers=...), or keep it in a session store with save_state"
        )
        raise AnswerRejected(msg)
    return attrs.evolve(request, previous=attrs.evolve(previous, pending=()))


def _check_answer(answers: Mapping[str, AnswerLike], question: Question) -> None:
    given = answers.get(question.id, answers.get(question.text))
    problem = answer_problem(given, question) if isinstance(given, str | bool | Answer) else None
    if problem is not None:
        raise AnswerRejected(problem)


def not_from_state(agent: AgentDefinition[Any], state: AgentState) -> str | None:
    """Return why a suspended run cannot go on from its state alone; ``None`` when it can."""
    if agent.handle_steps is not None:
        return f"agent {agent.id!r} has a handler, which a state does not bring back to where it waits"
    if any(q.path for q in state.pending):
        return "a child asks, whose conversation the state does not hold"
    if suspended_at(state.message_history) is None:
        return "the state holds no call that waits for an answer"
    return None


@attrs.frozen
class Known:
    """
    What the record of a run tells of models, so that it can be repeated without any.

    Attributes:
        models: The model strings of its requests; they stay as they are.
        default: The model of the root, where neither its agent nor the engine names one.
        chosen: The models that were chosen in place of those that agents name, by agent id; that of ``""`` for all others.
        is_whole: Whether nothing will be performed, so that no provider and no key is needed.
    """

    models: frozenset[str] = frozenset()
    default: str | None = None
    chosen: Mapping[str, str] = attrs.field(factory=dict)
    is_whole: bool = False


NOTHING_KNOWN = Known()


class Planner:
    """
    Makes plans for one root run and its children.

    Args:
        catalog: The engine's agents.
        models: The registry in force.
        default_model: The model of roots that name none.
        window: Gives a model's context length, when somebody may want to know it.
        keep_names: Whether model strings stay as written, because one provider serves them all.
        seed: What the randomness of the run depends on; drawn by default.
        created: When the root run was created (UTC); by default now.
        watched: Says whether anybody is shown events.
        known: What a record tells of models.
        chosen: Models in place of those that agents name, by agent id; that of ``""`` for all others.

    Attributes:
        seed: The seed in force.
    """

    def __init__(
        self,
        catalog: Catalog,
        models: Models,
        default_model: str | None,
        window: Callable[[str], int | None],
        *,
        keep_names: bool,
        seed: str | None = None,
        created: datetime | None = None,
        watched: Callable[[], bool] = bool,
        known: Known = NOTHING_KNOWN,
        chosen: Mapping[str, str] | None = None,
    ) -> None:
        self._chosen = chosen or {}
        self._catalog = catalog
        self._models = models
        self._default_model = default_model
        self._window = window
        self._keep_names = keep_names
        self.seed = secrets.token_hex(8) if seed is None else seed
        self._created = created
        self._watched = watched
        self._here = _OwnThread()
        self._known = known

    def root(self, request: Request) -> tuple[RunPlan, AgentState]:
        """
        Return what a root run is started with; its system prompt is not resolved yet.

        Raises:
            InputError: when prompt or params do not fit.
            UnknownModel: when the model names no provider.
            MissingKey: when the provider has no key.
        """
        agent = request.agent
        plan = self._plan(
            agent,
            run_id=request.run_id or new_run_id(),
            path="",
            prompt=request.prompt,
            params=request.params,
            model=self._model(self._asked(agent) or self._default_model),
            limits=agent.limits if request.limits is None else request.limits.over(agent.limits),
            created=self._created or datetime.now(UTC),
            session_id=request.session_id,
            user_id=request.user_id,
            metadata=_metadata(request.metadata),
        )
        state = _continued(plan, agent, request.previous)
        return plan, state

    def child(self, parent: RunPlan, effect: Spawn, path: str) -> tuple[RunPlan, AgentState]:
        """
        Return what a child is started with.

        Raises:
            StepEngineError: when it must not start: unknown, not allowed, wrong params, no model.
        """
        agent = self._allowed(parent, effect)
        definition, inherited = agent.definition, effect.parent()
        inherits = definition.inherit_parent_system_prompt or effect.is_inline
        plan = self._plan(
            agent,
            run_id=f"{parent.run_id.removesuffix(_suffix(parent.path))}{_suffix(path)}",
            path=path,
            prompt=effect.prompt,
            params=effect.params,
            model=self._model(self._asked(agent) or parent.model or self._default_model),
            limits=_within(agent.limits, parent),
            sent=tuple(inherited.tool_definitions.values()) if inherits else None,
            is_inline=effect.is_inline,
            created=parent.created,
            session_id=parent.session_id,
            user_id=parent.user_id,
            metadata=parent.metadata,
        )
        state = _child_state(plan, agent, inherited)
        return plan, state if inherits else with_prompt(plan, state)

    def _plan(self, agent: Agent, *, prompt: str, params: Any, model: str | None, path: str, **fields: Any) -> RunPlan:
        if not isinstance(prompt, str):
            msg = f"the prompt of agent {agent.definition.id!r} is a string, not a {type(prompt).__name__}"
            raise InputError(msg, issues=("prompt should be a string",))
        given = agent.schemas.params(params)
        return RunPlan(
            definition=agent.definition,
            path=path,
            random=Random(f"{self.seed}:{path}") if agent.definition.handle_steps is not None else None,  # noqa: S311
            model=model,
            tools=agent.tools,
            offered=agent.offered,
            agents={key: agent.child(key).definition.display_name for key in agent.spawnable},
            note=instructions_note(agent, fields.get("sent")),
            agent_info=self._catalog.info,
            known=agent,
            hooks=agent.hooks,
            prompt=prompt,
            params=given.value,
            params_json=given.json,
            validate_output=agent.schemas.validate_output,
            decode_output=agent.schemas.decode_output,
            output_json_schema=agent.schemas.output_schema,
            context_window=self._window(model) if model and agent.hooks.pre_step else None,
            here=self._here,
            watched=self._watched,
            **fields,
        )

    def _asked(self, agent: Agent) -> str | None:
        """Return the model of an agent: the one that was chosen for it, for all, or its own."""
        own, chosen = agent.definition.model, self._chosen
        return (chosen.get(normalised_id(agent.definition.id)) or chosen.get("") or own) if chosen else own

    def _model(self, model: str | None) -> str | None:
        if model is None:
            return None
        known = self._known
        if known.is_whole:
            if self._keep_names or model in known.models:
                return model
            try:
                return str(self._models.parse(model))
            except UnknownModel:
                return model
        canonical = self._models.check(model)
        return model if self._keep_names or model in known.models else canonical

    def _allowed(self, parent: RunPlan, effect: Spawn) -> Agent:
        given = effect.definition
        if isinstance(given, AgentDefinition) and effect.tool_call_id:
            return self._catalog.find(given)  # a tool of the parent carries it
        agents = parent.agents or {}
        key = matching_id(effect.agent_id, agents)
        if key is None:
            raise not_allowed(parent.definition.id, effect.agent_id, agents)
        if isinstance(given, AgentDefinition):
            return self._catalog.find(given)
        spawner: Agent = parent.known
        return spawner.child(key)


def new_run_id() -> str:
    """Return a short random id of letters, digits, hyphens and underscores."""
    return secrets.token_hex(6)


def with_prompt(plan: RunPlan, state: AgentState) -> AgentState:
    """
    Return *state* with the agent's system prompt resolved.

    Raises:
        HandlerError: when a prompt object raised, or gave something else than text.
    """
    prompt = plan.definition.system_prompt
    if isinstance(prompt, str):
        return state if state.system_prompt == prompt else attrs.evolve(state, system_prompt=prompt)
    name = type(prompt).__name__
    ctx = HookContext(
        state=state,
        agent=plan.definition,
        session_id=plan.session_id,
        user_id=plan.user_id,
        metadata=plan.metadata,
        path=plan.path,
        now=plan.created,
        logger=_PromptLogger(plan),
    )
    try:
        text = prompt.render(ctx)
    except StepEngineError as error:
        noted(error)
        raise
    except Exception as error:
        what = f"the system prompt {name} of agent {plan.definition.id!r}"
        raise blamed(what, error) from error
    if not isinstance(text, str):
        msg = f"the system prompt {name} of agent {plan.definition.id!r} gave a {type(text).__name__}; render() returns a string"
        raise HandlerError(msg, kind="TypeError")
    return attrs.evolve(state, system_prompt=text)


class _PromptLogger(Lines):
    """The logger of a prompt that is resolved before its run exists: straight to the standard logger."""

    def __init__(self, plan: RunPlan) -> None:
        hub = Hub(logger=LOGGER)
        hub.seat(plan.path, plan.run_id, plan.definition.id)
        self._hub = hub
        self._path = plan.path

    def line(self, level: str, message: str, data: dict[str, Any]) -> None:
        """Log one line."""
        self._hub.log(LogLine(path=self._path, level=level, message=message), data)


class _OwnThread:
    """Says whether the caller is in the thread that asked first, which is the one that the run is driven in."""

    __slots__ = ("_ident",)

    def __init__(self) -> None:
        self._ident: int | None = None

    def __call__(self) -> bool:
        if self._ident is None:
            self._ident = get_ident()
        return self._ident == get_ident()


def _suffix(path: str) -> str:
    return f"-{path.replace('.', '-')}" if path else ""


def _metadata(given: Mapping[str, Any] | None) -> JsonDict:
    if not given:
        return NO_METADATA
    try:
        frozen = freeze(given, "metadata")
    except StepEngineError as error:
        msg = f"the metadata of a run is a JSON object: {error.message}"
        raise InputError(msg, issues=(error.message,)) from error
    if not isinstance(frozen, JsonDict):
        msg = f"the metadata of a run is a JSON object, not a {type(given).__name__}"
        raise InputError(msg, issues=("metadata should be an object",))
    return frozen


def _within(limits: Limits, parent: RunPlan) -> Limits:
    """Return *limits* with nothing tree-wide above what was set for the parent; the depth has a default that binds all."""
    lower: dict[str, Any] = {}
    for name in TREE_WIDE:
        most, own = getattr(parent.limits if name == "max_depth" else parent.given, name), getattr(limits, name)
        if most is not None and (own is None or Decimal(str(own)) > Decimal(str(most))):
            lower[name] = most
    return attrs.evolve(limits, **lower) if lower else limits


def _continued(plan: RunPlan, agent: Agent, previous: AgentState | None) -> AgentState:
    """Return the state of a root run; what *previous* keeps and loses is design 5."""
    if previous is not None and not isinstance(previous, AgentState):
        msg = f"previous is an AgentState, such as result.state, not a {type(previous).__name__}"
        raise InputError(msg, issues=("previous should be an AgentState",))
    history = previous.message_history if previous is not None else Transcript()
    return AgentState(
        run_id=plan.run_id,
        agent_id=plan.definition.id,
        message_history=history,
        view=previous.view if previous is not None else history,
        tool_definitions=agent.specs,
        steps_remaining=plan.limits.max_steps or 0,
        context=previous.context if previous is not None else JsonDict(),
        pending=previous.pending if previous is not None else (),
        next_call=previous.next_call if previous is not None else 1,
        id_prefix=previous.id_prefix if previous is not None else "c",
    )


def _child_state(plan: RunPlan, agent: Agent, parent: AgentState) -> AgentState:
    definition = agent.definition
    inherits = definition.include_message_history or plan.is_inline
    history = parent.message_history if inherits else Transcript()
    same_prompt = plan.sent is not None
    return AgentState(
        run_id=plan.run_id,
        agent_id=definition.id,
        parent_id=parent.run_id,
        ancestor_run_ids=(*parent.ancestor_run_ids, parent.run_id),
        message_history=history,
        view=parent.view if inherits else history,
        system_prompt=parent.system_prompt if same_prompt else "",
        tool_definitions=parent.tool_definitions if same_prompt else agent.specs,
        steps_remaining=plan.limits.max_steps or 0,
        context=parent.context if plan.is_inline else JsonDict(),
        next_call=parent.next_call if inherits else 1,
        id_prefix=f"c{plan.path.replace('.', '_')}_" if inherits else "c",
    )
