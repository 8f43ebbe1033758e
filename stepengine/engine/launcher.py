"""
``Launcher``: prepares a requested run, new or recorded, with or without a session.

Lives here: everything that an engine knows of its runs before they begin. What a plan is made of stands in ``run_plans``; who
runs it, in ``run``. The journal's own code is loaded when the first journal is used.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs
from attrs import frozen

from stepengine.data.alike import list_names
from stepengine.data.definition import normalised_id
from stepengine.data.events import Event
from stepengine.data.hooks import Hooks
from stepengine.data.json import JsonDict
from stepengine.data.limits import Limits
from stepengine.data.questions import Question
from stepengine.data.state import AgentState, RunResult
from stepengine.data.usage import add_cost
from stepengine.data.yields import STEP, StepResult
from stepengine.engine.catalog import Agent, Catalog
from stepengine.engine.options import AgentLike, ModelsLike, Overrides
from stepengine.engine.overrides import Override, overrides
from stepengine.engine.run import EngineRun, make_failing_machine
from stepengine.engine.run_plans import (
    NOTHING_RECORDED,
    Planner,
    RecordedModels,
    RunRequest,
    make_root_state,
    new_run_id,
    pop_run_info,
    resolve_system_prompt,
    separate_earlier_answers,
)
from stepengine.errors import InputError, StepEngineError, UnknownModel
from stepengine.machine.plan import RunPlan
from stepengine.runtime.handle import RunHandle
from stepengine.runtime.hub import WATCHED, Hub, Watcher
from stepengine.runtime.questions import RememberedRules
from stepengine.runtime.services import Services
from stepengine.runtime.tree import RunTree
from stepengine.workspace.after_fork import keep_referenced, register_renewable

if TYPE_CHECKING:
    from stepengine.engine.session_turns import EngineSessions
    from stepengine.journal import Journal, JournalLike
    from stepengine.journal.journaled_run import JournaledRun
    from stepengine.journal.recorded_forks import Purse
    from stepengine.models import Models
    from stepengine.permissions import PolicyFile

# What people allowed "for this conversation" lives in memory, and nobody says when a conversation is over. A forgotten
# rule is asked for again.
KEPT_SESSIONS = 10_000
NO_OVERRIDES: Mapping[int, Override] = {}
NOTHING_REPLACED = Override()
ONE_STEP = Limits(max_steps=1, on_max_steps="stop", ask=False)
Prepare: TypeAlias = Callable[[RunPlan, AgentState], tuple[RunPlan, AgentState]]
Wrap: TypeAlias = Callable[[Services], Services]


@frozen(kw_only=True)
class PlannedRun:
    """
    A validated plan of a run: an invalid request has raised by now, and no code of its author was called yet.

    Attributes:
        request: What the caller asks for.
        hub: The event stream that it goes on.
        plan: Its plan.
        state: What it starts from; its system prompt is ``""`` where that has to be resolved.
        services: What it is lent.
    """

    request: RunRequest
    hub: Hub
    plan: RunPlan
    state: AgentState
    services: Services

    def replan(self, request: RunRequest, created: datetime) -> PlannedRun:
        """Return the plan for *request*, made when the run starts, at *created*; definition, tools and models stay."""
        plan = attrs.evolve(self.plan, prompt=request.prompt, created=created)
        return attrs.evolve(
            self, request=request, plan=plan, state=make_root_state(plan, request.agent, request.previous)
        )


@attrs.define(eq=False)
class Launcher:
    """
    Starts the runs of one engine.

    Attributes:
        catalog: The engine's agents.
        models: Its registry.
        keep_names: Whether model strings stay as written, because one provider serves them all.
        default_model: The model of roots that name none.
        agent_models: Models in place of those that agents name, by agent id; that of ``""`` for all others.
        services: What is lent to every run; planner, window, memory and seed are each run's own.
        watchers: Who is shown every event.
        logger: Where log lines go.
        headless: Whether what needs a person's approval is denied.
        sessions: Where conversations are kept between runs.
        seed: The seed of every run that is not recorded; ``None`` for another one for each.
        allowed: The file that keeps what people allow for good; ``None`` where the engine's memory does.
        active: The runs under way.
        handles: The handles of those in the background, in the order in which they were made.
    """

    catalog: Catalog
    models: Models
    keep_names: bool
    default_model: str | None
    agent_models: Mapping[str, str]
    services: Services
    watchers: tuple[Watcher, ...]
    logger: Any
    headless: bool = False
    sessions: EngineSessions | None = None
    seed: str | None = None
    allowed: PolicyFile | None = None
    active: set[EngineRun] = attrs.field(factory=set, init=False)
    handles: dict[RunHandle, None] = attrs.field(factory=dict, init=False)
    _remembered: dict[str, RememberedRules] = attrs.field(factory=dict, init=False)
    # By registry, as another one (`override`) may know other windows; weak, so that a registry of one test is not kept
    # for ever.
    _windows: weakref.WeakKeyDictionary[Models, dict[str, int | None]] = attrs.field(
        factory=weakref.WeakKeyDictionary, init=False
    )

    def renew(self) -> None:
        """Forget the running runs in a forked child: they belong to the parent, and nothing of them moves here."""
        # After a fork the child has copies of objects whose threads, sockets and locks are the parent's. They are left
        # and not closed: closing would close the parent's connections.
        keep_referenced(list(self.active), list(self.handles))
        self.active.clear()
        self.handles.clear()

    def __attrs_post_init__(self) -> None:
        register_renewable(self)
        # Ids are written with `-` or `_`, and a model with or without its provider; both are brought into one form
        # here, once, or a choice for `code_searcher` would silently not hold for `code-searcher`.
        self.agent_models = {normalised_id(agent): self._canonical(model) for agent, model in self.agent_models.items()}

    @property
    def override(self) -> Override:
        """What is replaced in this context."""
        return overrides.get(NO_OVERRIDES).get(id(self), NOTHING_REPLACED)

    @contextmanager
    def replace_temporarily(
        self, models: ModelsLike, dependencies: Overrides | None, purse: Purse | None = None
    ) -> Iterator[None]:
        """Replace models or dependencies, or limit the cost together, of the runs that this context starts."""
        # In a context variable, keyed by this engine: concurrent tasks override without seeing each other, and two
        # engines in one task do not meet (reliability:SS06).
        made = self.override.with_replacements(models, dependencies, purse)
        token = overrides.set({**overrides.get(NO_OVERRIDES), id(self): made})
        try:
            yield
        finally:
            overrides.reset(token)

    # --- what a caller asks for ---------------------------------------------------------------------------------------

    def asked(self, agent: AgentLike, prompt: str | None, options: dict[str, Any], hub: Hub | None = None) -> EngineRun:
        """
        Return the run that a caller asks for with the options of ``RunOptions``; *hub* is the event stream it goes on.
        """
        journal = options.pop("journal", None)
        info = pop_run_info(options)
        request = RunRequest(agent=self.catalog.find(agent), prompt=prompt, info=info, hub=hub, **options)
        request = self.route(request, request.previous)
        if self.sessions is None:
            return self.planned(request, journal)
        return self._in_session(self.sessions, request, journal)

    def route(self, request: RunRequest, previous: object) -> RunRequest:
        """Return *request* to the agent to which the conversation of *previous* was handed over, where it was."""
        agent_id = previous.handed_to if isinstance(previous, AgentState) else None
        if agent_id is None or agent_id == normalised_id(request.agent.definition.id):
            return request
        target = self.catalog.find_hand_off_target(request.agent, agent_id)
        return attrs.evolve(request, agent=target, predecessors=request.agent.find_path_to(agent_id))

    def _in_session(self, sessions: EngineSessions, request: RunRequest, journal: JournalLike | None) -> EngineRun:
        """Return a run that loads its start state at its turn in the session; an invalid request raises at once."""
        from stepengine.engine.session_turns import Turn
        from stepengine.sessions.session import check_id

        info = request.info
        info = attrs.evolve(info, session_id=check_id(new_run_id() if info.session_id is None else info.session_id))
        request = attrs.evolve(request, info=info)
        # Planned twice: now, so that a wrong prompt or a missing key is told to who calls and not in the background;
        # and again when its turn has come, when it is known what the conversation has become. What does not depend on
        # that is taken over (`replan`).
        made = self.plan(attrs.evolve(request, answers=None))
        live = self.make_engine_run(made)
        live.turn = Turn(
            sessions,
            request,
            journal,
            start_new=partial(self.planned, made=made),
            start_recorded=self.again,
            route=self.route,
            now=self.services.clock.now,
        )
        return live

    def planned(
        self,
        request: RunRequest,
        journal: JournalLike | None,
        into: EngineRun | None = None,
        made: PlannedRun | None = None,
    ) -> EngineRun:
        """
        Return a run that starts from *request*, recorded in a journal or not.

        Args:
            request: What it starts from.
            journal: Where it is recorded; ``None`` for nowhere.
            into: The run itself, where it waited for its turn in a session.
            made: How it was planned then, before it was known what it goes on from.
        """
        answers = request.answers
        # Another agent may have the conversation by now.
        made = made if made is not None and made.request.agent is request.agent else None
        request = separate_earlier_answers(request)
        if journal is None:
            return self._make_prepared_run(self._now(request, made), into=into)
        # Here and not at the top: an engine that never records does without the whole floor.
        from stepengine.journal.runs import open_recording

        session = open_recording(journal, answers)
        if session.recorded_part is None:
            return self.make_journaled_run(session, request, into=into, made=made)
        # A journal may decide for itself what is done with it, as those of tests do by their mode. Then this is no new
        # run but the recorded one, repeated or extended, with the answers and models of its record.
        request = attrs.evolve(
            request, answers=session.answers.by_question, hub=request.hub if into is None else into.tree.hub
        )
        return self.make_journaled_run(session, request, _recorded_models(session, None), into)

    def _now(
        self, request: RunRequest, made: PlannedRun | None, recorded: RecordedModels = NOTHING_RECORDED
    ) -> PlannedRun:
        """Return the plan of *request*; *made*, if given, is that plan except for the state that it continues."""
        return self.plan(request, recorded) if made is None else made.replan(request, self.services.clock.now())

    def again(
        self,
        session: JournaledRun,
        into: EngineRun | None = None,
        *,
        agent: AgentLike | None = None,
        limits: Limits | None = None,
        agent_models: Mapping[str, str] | None = None,
        forked: Journal | None = None,
    ) -> EngineRun:
        """Return a run that goes through what *session* has recorded; *agent* stands in for the one that it names."""
        opening = session.opening
        assert opening is not None  # noqa: S101 - it was read from the journal
        # The session holds the journal's lock: whatever goes wrong before the run begins must give it back, or nobody
        # could try again until the process ends.
        try:
            request = RunRequest(
                agent=self.catalog.find(opening.agent_id if agent is None else agent),
                prompt=opening.prompt,
                params=opening.params,
                previous=opening.previous,
                info=opening.info,
                limits=opening.limits if limits is None else _increase_limits_to_record(limits, session),
                agent_models=agent_models,
                answers=session.answers.by_question,
                hub=None if into is None else into.tree.hub,
            )
            # A durable run is recorded under the agent that was named, which may have handed the conversation over before.
            request = self.route(request, opening.previous) if agent is None else request
        except BaseException:
            session.writer.close()
            raise
        return self.make_journaled_run(session, request, _recorded_models(session, forked), into)

    # --- runs that are ready to start ---------------------------------------------------------------------------------

    def make_journaled_run(
        self,
        session: JournaledRun,
        request: RunRequest,
        recorded: RecordedModels = NOTHING_RECORDED,
        into: EngineRun | None = None,
        made: PlannedRun | None = None,
    ) -> EngineRun:
        """Return a run that records into or replays *session*; its journal is closed if the run cannot start."""
        from stepengine.journal.run_start import start_run  # a run that is not recorded loads no journal

        place = self.services.tools.workspace
        try:
            # An agent whose tools may read the folder of the signing key could sign anything (reliability:JR47).
            if session.writer.source.signing is not None:
                self.catalog.check_key_access(request.agent, session.writer.source.signing)
            live = self._make_prepared_run(
                self._now(request, made, recorded),
                prepare=partial(
                    start_run,
                    session,
                    limits=request.limits,
                    models=self.agent_models,
                    own_models=self._run_models(request, recorded),
                    workspace="" if place is None or place.system is None else place.name,
                ),
                wrap=session.wrap,
                shows=session.mode.news(session.recorded_part),
                into=into,
            )
        except BaseException:
            session.writer.close()
            raise
        live.journaled_run = session
        live.tree.hub.resumed = session.mode.resumes
        return live

    def ready(self, request: RunRequest, *, prepare: Prepare | None = None, wrap: Wrap | None = None) -> EngineRun:
        """
        Return a run that is ready to start.

        Args:
            request: What the caller asks for.
            prepare: Gives the plan and the state that the root is really started with.
            wrap: Gives the services that the run is really lent: with recorders among the ``middlewares``, inside the
                meter of limits and outside the gate; with tracers ``outermost``; with another ``clock`` or ``machine``.
        """
        return self._make_prepared_run(self.plan(request), prepare=prepare, wrap=wrap)

    def plan(self, request: RunRequest, recorded: RecordedModels = NOTHING_RECORDED) -> PlannedRun:
        """
        Return the planned run of *request*; *recorded* has the models of its record.

        Raises:
            StepEngineError: when it cannot start: wrong prompt, params or state, a model without provider or key.
        """
        # Read once, here, where the caller's context still holds: the run itself may begin in another task.
        override = self.override
        models = (override.models or self.models).for_run()
        hub = request.hub or Hub(self.watchers, self.logger)
        window = partial(self._context_window, models, offline=recorded.is_whole)
        planner = Planner(
            self.catalog,
            models,
            self._default_root_model(models, recorded),
            window,
            keep_names=override.keep_names if override.models else self.keep_names,
            seed=self.seed,
            created=self.services.clock.now(),
            watched=partial(WATCHED, hub),
            opened=hub.opened,
            recorded=recorded,
            chosen={**(self.agent_models or recorded.chosen), **self._run_models(request, recorded)},
        )
        plan, state = planner.root(request)
        services = attrs.evolve(
            self.services,
            models=models,
            tools=override.apply_to(self.services.tools),
            window=window,
            output_limit=models.output_limit,
            planner=planner.child,
            remembered=self._remembered_rules(plan.info.session_id),
            seed=planner.seed,
        )
        services = override.pay_for_calls(services)
        return PlannedRun(request=request, hub=hub, plan=plan, state=state, services=services)

    def _make_prepared_run(
        self,
        made: PlannedRun,
        *,
        prepare: Prepare | None = None,
        wrap: Wrap | None = None,
        shows: Callable[[Event], bool] | None = None,
        into: EngineRun | None = None,
    ) -> EngineRun:
        """Return the planned run with its prompt resolved and *prepare* and *wrap*, those of a journal, applied."""
        plan, state, services = made.plan, made.state, made.services
        # A prompt that is computed is the author's code, and it fails like a handler: as a failed run, with events and
        # a record, and not as an exception out of `start`.
        try:
            state = resolve_system_prompt(plan, state)
        except StepEngineError as error:
            services = attrs.evolve(services, machine=make_failing_machine(error))
        # In this order: the journal may replace plan and state (its id, its time, its seed), and only then builds
        # itself into the services, which know both.
        if prepare is not None:
            plan, state = prepare(plan, state)
        plan = _with_session_of_hooks(plan)
        if wrap is not None:
            services = wrap(services)
        ready = PlannedRun(request=made.request, hub=made.hub, plan=plan, state=state, services=services)
        return self.make_engine_run(ready, shows=shows, into=into)

    def make_engine_run(
        self, made: PlannedRun, *, shows: Callable[[Event], bool] | None = None, into: EngineRun | None = None
    ) -> EngineRun:
        """
        Return the ``EngineRun`` of a plan; *into*, a run that waited for its turn, is filled instead.

        Args:
            made: What it starts with.
            shows: Says which events are news; by default all are.
            into: The run itself, where it waited for its turn in a session: now it starts from *made*.
        """
        request, services = made.request, made.services
        made.hub.shows = shows
        # A run that waited for its turn has a handle already, which somebody holds: so its tree is filled and not
        # replaced.
        if into is None:
            tree = RunTree(services, made.plan, made.state, made.hub, request.answers, earlier=request.earlier)
            into = EngineRun(tree, self.active)
        else:
            if into.turn is not None:
                services = into.turn.watch_children(services, into.tree)
            into.tree.seat(services, made.plan, made.state, request.answers, earlier=request.earlier)
        into.tree.desk.headless = self.headless
        return into

    def _run_models(self, request: RunRequest, recorded: RecordedModels) -> Mapping[str, str]:
        """Return the models that were chosen for a run alone, by agent id: now, or when it was recorded."""
        if not request.agent_models:
            return recorded.own
        own = {normalised_id(agent): self._canonical(model) for agent, model in request.agent_models.items()}
        known = {"", *[normalised_id(one.definition.id) for one in (request.agent, *request.agent.family)]}
        for agent in own:
            if agent not in known:
                msg = f"agent_models names {agent!r}, which does not run here; {list_names(sorted(known - {''}), agent)} would"
                raise InputError(msg, issues=(msg,))
        # A model for all is for those, too, that had one of their own when the run was recorded.
        return own if "" in own else {**recorded.own, **own}

    def _canonical(self, model: str) -> str:
        """Return how requests name *model*; one that no provider serves stays, and is told when a run asks for it."""
        if self.keep_names:
            return model
        try:
            return str(self.models.parse(model))
        except UnknownModel:
            return model

    def _default_root_model(self, models: Models, recorded: RecordedModels) -> str | None:
        """Return the model of roots that name none: of a recorded run the one that it had, else the only provider's."""
        # A recorded run keeps the model that it had, though the engine's default is another one today: it is to be
        # repeated, not improved. Only a default that the record knows itself is taken.
        own = self.default_model
        if own is None or not recorded.models or own in recorded.models:
            return own or recorded.default or (None if recorded.is_whole else models.default_model)
        try:
            canonical = str(models.parse(own))
        except UnknownModel:
            canonical = own
        return own if canonical in recorded.models else recorded.default or own

    def _context_window(self, models: Models, model: str, *, offline: bool = False) -> int | None:
        """Return a model's context length; without pricing no price data are loaded for it."""
        if self.services.pricing is None:
            return None
        windows = self._windows.setdefault(models, {})
        known = windows.get(model)
        if known is None:  # nor was it known before: the provider may have been asked since
            try:
                known = windows[model] = models.info(model).context_window
            except UnknownModel:
                if not offline:
                    raise
        return known

    # --- what people allowed for good ---------------------------------------------------------------------------------

    def _remembered_rules(self, session_id: str | None) -> RememberedRules | None:
        """Return where the rules of a conversation are kept; those of the oldest conversations are forgotten."""
        if session_id is None:
            return None if self.allowed is None else RememberedRules(self.allowed)
        kept = self._remembered.setdefault(session_id, RememberedRules(self.allowed))
        while len(self._remembered) > KEPT_SESSIONS:
            self._remembered.pop(next(iter(self._remembered)), None)
        return kept

    def rules(self, session_id: str) -> tuple[JsonDict, ...]:
        """Return the rules of a conversation, as policy files have them."""
        kept = self._remembered.get(session_id)
        return () if kept is None else kept.rules

    def forget(self, session_id: str, ids: Collection[str]) -> None:
        """Drop the rules of a conversation that have one of *ids*, or all where there are none."""
        trees = [live.tree for live in list(self.active) if live.tree.root.plan.info.session_id == session_id]
        for kept in (self._remembered.get(session_id), *[tree.desk.remembered for tree in trees]):
            if kept is not None:
                kept.forget(ids)


def _with_session_of_hooks(plan: RunPlan) -> RunPlan:
    """Return *plan* with the session that its own ``session_hooks`` start, which the run id names, if it has no other one."""
    if plan.info.session_id is not None or not plan.hooks.pre_run:
        return plan
    from stepengine.sessions.around import has_session_hooks

    if not has_session_hooks(plan.hooks):
        return plan
    return attrs.evolve(plan, info=attrs.evolve(plan.info, session_id=plan.run_id))


def check_state(state: object) -> None:
    """Raise ``InputError`` unless *state* is one that a step can start from."""
    if not isinstance(state, AgentState):
        msg = f"step() takes an AgentState such as AgentState.from_messages([UserMessage('Hi')]), not {state!r}"
        raise InputError(msg, issues=("state should be an AgentState",))


class StepRun:
    """
    A run of one step: the agent without its handler, its opening prompts and the hooks around a run.

    Args:
        agent: The agent.
        state: The state to go on from.
    """

    def __init__(self, agent: Agent, state: AgentState) -> None:
        self._before = state
        self._step: StepResult | None = None
        # One step is run as a whole run whose handler yields one `STEP`: a second way through the machine would have to
        # be kept equal to the first.
        definition = attrs.evolve(agent.definition, handle_steps=self._handler, instructions_prompt="")
        hooks = attrs.evolve(agent.hooks, pre_run=agent.openings, post_run=()) if agent.hooks else Hooks()
        self.agent = attrs.evolve(agent, definition=definition, hooks=hooks)

    def start(self, plan: RunPlan, fresh: AgentState) -> tuple[RunPlan, AgentState]:
        """Return what the step is started with: the given state under its own id, where it has one."""
        before = self._before
        run_id = before.run_id or fresh.run_id
        state = attrs.evolve(
            before,
            run_id=run_id,
            agent_id=self.agent.definition.id,
            system_prompt=before.system_prompt or fresh.system_prompt,
            tool_definitions=fresh.tool_definitions,
            pending=(),
        )
        return attrs.evolve(plan, run_id=run_id), state

    def result(self, ended: RunResult) -> StepResult:
        """
        Return the state after the step and whether the turn ended.

        Raises:
            StepEngineError: the error that kept the step from ending.
        """
        step, before = self._step, self._before
        # A run may end badly after its step, such as for a spent budget, since it has one step alone and was asked for
        # no more. What the caller wants is the state after the step; an error counts only where there is none.
        if step is None:
            if ended.error is not None:
                raise ended.error
            msg = f"the step of agent {self.agent.definition.id!r} ended as {ended.status.value} before it gave a state"
            raise StepEngineError(msg)
        after = step.agent_state
        budget = before.steps_remaining
        # The caller goes on with this state, so its sums are those of all the steps so far; each run of one step only
        # counted its own.
        state = attrs.evolve(
            after,
            steps_remaining=max(0, budget - 1),
            usage=before.usage + after.usage,
            cost=add_cost(before.cost, after.cost),
            credits_used=before.credits_used + after.credits_used,
            child_run_ids=(*before.child_run_ids, *after.child_run_ids),
        )
        return attrs.evolve(step, agent_state=state)

    def _handler(self, _: object) -> Generator[object, StepResult, None]:
        self._step = yield STEP


def _increase_limits_to_record(limits: Limits, session: JournaledRun) -> Limits:
    """
    Return *limits*, increased to the recorded steps and actions, since lower ones apply only to what is new.

    Where the run has asked for more steps, it asks at the same places again, and is told the recorded answers.
    """
    from stepengine.journal.encoding import questions_of  # a run that is not recorded loads no journal

    assert session.recorded_part is not None  # noqa: S101 - only recorded runs are started again
    history = session.recorded_part.history
    # Limits that are lower than what the record has spent would end the run in the middle of what it did already. They
    # hold from where it goes live (reliability:JR29).
    own = [i for (path, seq), i in history.intents.items() if not path and seq >= 0]
    asked = {i.seq if i.gather is None else i.gather for i in own}
    spent = {"max_steps": sum(i.type == "model_call" for i in own), "max_actions": len(asked)}
    given = {name: getattr(limits, name) for name in spent}
    limits = attrs.evolve(limits, **{n: max(v, spent[n]) for n, v in given.items() if v is not None})
    steps = _first_reached_step_limit(
        question for i in own if i.type == "ask" for question in questions_of(history.form(i))
    )
    return limits if steps is None else attrs.evolve(limits, max_steps=steps, ask=True)


def _first_reached_step_limit(questions: Iterable[Question]) -> int | None:
    """Return how many steps a run had when it first asked for more of them; ``None`` when it never did."""
    for question in questions:
        told: Any = question.details
        if question.number and isinstance(told, Mapping) and told.get("limit") == "steps":
            return int(told["reached"])
    return None


def _recorded_models(session: JournaledRun, forked: Journal | None) -> RecordedModels:
    """Return what the journal of *session* tells of models, or the one that it was forked from."""
    assert session.recorded_part is not None  # noqa: S101 - only recorded runs are started again
    history = session.recorded_part.history if forked is None else forked.history()
    # Of a fork the journal that it was forked from is asked: its own holds only what stands before the cut, which may
    # be before the first model call.
    models: dict[str, str] = {}
    for (path, _), intent in history.intents.items():
        if intent.type == "model_call":
            models.setdefault(history.model(intent), path)
    root = history.root.get("model") or next((model for model, path in models.items() if not path), None)
    if root is not None:
        models.setdefault(root, "")
    is_whole = session.mode.is_closed(session.recorded_part.history)
    chosen, own = history.root.get("models") or {}, history.root.get("run_models") or {}
    return RecordedModels(frozenset([*models, *chosen.values(), *own.values()]), root, chosen, own, is_whole)
