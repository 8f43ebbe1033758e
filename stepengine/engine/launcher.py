"""
``Launcher``: prepares a requested run, new or recorded, with or without a session.

``run_plans`` makes the plans, ``run_models`` chooses the models, and ``run`` runs the result. The journal's own code is loaded when the
first journal is used.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs

from stepengine.data.definition import normalised_id
from stepengine.data.events import Event
from stepengine.data.hooks import Hooks
from stepengine.data.limits import Limits
from stepengine.data.questions import Question
from stepengine.data.state import AgentState, RunResult
from stepengine.data.usage import add_cost
from stepengine.data.yields import STEP, StepResult
from stepengine.engine.catalog import Agent, Catalog
from stepengine.engine.conversation_rules import ConversationRules
from stepengine.engine.handles import EngineRuns
from stepengine.engine.options import AgentLike, ModelsLike, Overrides
from stepengine.engine.overrides import Override, overrides
from stepengine.engine.run import EngineRun, make_ended_machine
from stepengine.engine.run_models import EngineModels, read_recorded_models
from stepengine.engine.run_plans import (
    NOTHING_RECORDED,
    PlannedRun,
    Planner,
    RecordedModels,
    RunRequest,
    make_random_run_id,
    pop_run_info,
    separate_earlier_answers,
    with_resolved_system_prompt,
)
from stepengine.errors import InputError, StepEngineError
from stepengine.machine.plan import RunPlan
from stepengine.runtime.hub import WATCHED, Hub, Watcher
from stepengine.runtime.services import ModelSetting, Services
from stepengine.runtime.tree import RunTree

if TYPE_CHECKING:
    from stepengine.engine.session_turns import EngineSessions
    from stepengine.journal import Journal, JournalLike
    from stepengine.journal.journaled_run import JournaledRun
    from stepengine.journal.recorded_forks import SharedBudget

ONE_STEP = Limits(max_steps=1, on_max_steps="stop", ask=False)
Prepare: TypeAlias = Callable[[RunPlan, AgentState], tuple[RunPlan, AgentState]]
Wrap: TypeAlias = Callable[[Services], Services]


@attrs.define(eq=False)
class Launcher:
    """
    Creates the runs of one engine. A caller starts a run by calling it or its ``start``.

    Attributes:
        catalog: The engine's agents.
        models: The models that it chooses.
        services: The services of every run; planner, window, remembered rules and seed are each run's own.
        watchers: The observers of every event.
        logger: Receives the log lines.
        headless: Whether requests for a person's approval are denied.
        sessions: The session store; ``None`` without one.
        seed: The seed of every run that is not recorded; ``None`` for another one for each.
        runs: Its runs in this process.
        rules: The remembered permission rules of its conversations.
    """

    catalog: Catalog
    models: EngineModels
    services: Services
    watchers: tuple[Watcher, ...]
    logger: Any
    headless: bool
    sessions: EngineSessions | None
    seed: str | None = None
    runs: EngineRuns = attrs.field(factory=EngineRuns, init=False)
    rules: ConversationRules = attrs.field(
        default=attrs.Factory(lambda self: ConversationRules(self.catalog.policy_file), takes_self=True), init=False
    )

    @property
    def override(self) -> Override:
        """The replacements of this context; see ``Engine.override``."""
        return overrides.get().get(id(self)) or Override()

    @contextmanager
    def override_in_context(
        self, models: ModelsLike, dependencies: Overrides | None, budget: SharedBudget | None
    ) -> Iterator[None]:
        """Replace models or dependencies, or limit the cost together, of the runs that this context starts."""
        # In a context variable, keyed by this engine: concurrent tasks override without seeing each other, and two
        # engines in one task do not meet (reliability:SS06).
        made = self.override.with_replacements(models, dependencies, budget)
        token = overrides.set({**overrides.get(), id(self): made})
        try:
            yield
        finally:
            overrides.reset(token)

    # --- what a caller asks for ---------------------------------------------------------------------------------------

    def create_requested_run(
        self, agent: AgentLike, prompt: str | None, options: dict[str, Any], hub: Hub | None = None
    ) -> EngineRun:
        """Return the run for a caller's ``RunOptions``, also with ``run_id``; it is not started. *hub* is an event stream to continue."""
        journal = options.pop("journal", None)
        info = pop_run_info(options)
        request = RunRequest(agent=self.catalog.get_agent(agent), prompt=prompt, info=info, hub=hub, **options)
        request = self.with_handoff_agent(request, request.previous)
        if self.sessions is None:
            return self.create_new_run(request, journal)
        return self._create_session_run(self.sessions, request, journal)

    def with_handoff_agent(self, request: RunRequest, previous: object) -> RunRequest:
        """
        Return *request* with the agent that took over the conversation of *previous*; unchanged without a handoff.

        Raises:
            AgentError: when neither the agent of *request* nor the engine has an agent of that id.
        """
        agent_id = previous.handed_to if isinstance(previous, AgentState) else None
        if agent_id is None or agent_id == normalised_id(request.agent.definition.id):
            return request
        target = request.agent.find_known_agent(agent_id) or self.catalog.get_agent(agent_id)
        return attrs.evolve(request, agent=target, predecessors=request.agent.find_path_to(target))

    def _create_session_run(
        self, sessions: EngineSessions, request: RunRequest, journal: JournalLike | None
    ) -> EngineRun:
        """Return a run that loads its start state at its turn in the session; an invalid request raises at once."""
        from stepengine.engine.session_turns import Turn
        from stepengine.sessions.session import require_session_id

        info = request.info
        info = attrs.evolve(
            info, session_id=require_session_id(make_random_run_id() if info.session_id is None else info.session_id)
        )
        request = attrs.evolve(request, info=info)
        # Planned twice: now, so that a wrong prompt or a missing key is told to who calls and not in the background;
        # and again when its turn has come, when it is known what the conversation has become. What does not depend on
        # that is taken over (`replan`).
        planned = self.plan_root_run(attrs.evolve(request, answers=None))
        live = self.make_or_fill_engine_run(planned)
        live.turn = Turn(
            sessions,
            # The id and the events are the caller's already, also if another agent has the conversation by then.
            attrs.evolve(request, planned=planned, hub=planned.hub, run_id=planned.plan.run_id),
            journal,
            start_new=self.create_new_run,
            start_recorded=self.create_run_from_record,
            with_handoff_agent=self.with_handoff_agent,
            now=self.services.time.clock.now,
        )
        return live

    def create_new_run(
        self, request: RunRequest, journal: JournalLike | None, waiting_run: EngineRun | None = None
    ) -> EngineRun:
        """
        Return a run that starts from *request*, recorded in a journal or not.

        Args:
            request: The request.
            journal: The journal that records the run; ``None`` for none.
            waiting_run: The run to fill, if it waited for its turn in a session.
        """
        answers = request.answers
        request = separate_earlier_answers(request)
        if journal is None:
            return self.create_planned_run(self.plan_root_run(request), waiting_run=waiting_run)
        # Here and not at the top: an engine that never records does not load `journal`.
        from stepengine.journal.runs import open_recording

        session = open_recording(journal, answers)
        if session.recorded_part is None:
            return self.make_journaled_run(session, request, waiting_run=waiting_run)
        # A journal may decide for itself what is done with it, as those of tests do by their mode. Then this is no new
        # run but the recorded one, repeated or extended, with the answers and models of its record.
        request = attrs.evolve(
            request,
            answers=session.answers.by_question,
            hub=request.hub if waiting_run is None else waiting_run.tree.hub,
            planned=None,
        )
        return self.make_journaled_run(session, request, read_recorded_models(session, None), waiting_run)

    def create_run_from_record(
        self,
        session: JournaledRun,
        waiting_run: EngineRun | None = None,
        *,
        agent: AgentLike | None = None,
        limits: Limits | None = None,
        agent_models: Mapping[str, str] | None = None,
        forked: Journal | None = None,
    ) -> EngineRun:
        """Return a run that repeats the record of *session*, and continues it; *agent* replaces the recorded agent."""
        opening = session.opening
        assert opening is not None  # noqa: S101 - it was read from the journal
        # The session holds the journal's lock: whatever goes wrong before the run begins must give it back, or nobody
        # could try again until the process ends.
        try:
            request = RunRequest(
                agent=self.catalog.get_agent(opening.agent_id if agent is None else agent),
                prompt=opening.prompt,
                params=opening.params,
                previous=opening.previous,
                info=opening.info,
                limits=opening.limits if limits is None else _increase_limits_to_record(limits, session),
                agent_models=agent_models,
                answers=session.answers.by_question,
                hub=None if waiting_run is None else waiting_run.tree.hub,
            )
            # A durable run is recorded under the agent that was named, which may have handed the conversation over before.
            request = self.with_handoff_agent(request, opening.previous) if agent is None else request
        except BaseException:
            session.writer.close()
            raise
        return self.make_journaled_run(session, request, read_recorded_models(session, forked), waiting_run)

    # --- runs that are ready to start ---------------------------------------------------------------------------------

    def make_journaled_run(
        self,
        session: JournaledRun,
        request: RunRequest,
        recorded: RecordedModels = NOTHING_RECORDED,
        waiting_run: EngineRun | None = None,
    ) -> EngineRun:
        """Return a run that records into or replays *session*; its journal is closed if the run cannot start."""
        from stepengine.journal.run_start import start_run  # a run that is not recorded loads no journal

        place = self.services.tools.workspace
        try:
            # An agent whose tools may read the folder of the signing key could sign anything (reliability:JR47).
            if session.writer.source.signing is not None:
                self.catalog.refuse_signing_key_access(request.agent, session.writer.source.signing)
            live = self.create_planned_run(
                self.plan_root_run(request, recorded),
                prepare=partial(
                    start_run,
                    session,
                    limits=request.limits,
                    models=self.models.by_agent,
                    own_models=self.models.get_models_chosen_for_run(request, recorded),
                    workspace="" if place is None or place.system is None else place.name,
                ),
                wrap=session.wrap_services,
                is_news=session.mode.make_new_event_filter(session.recorded_part),
                waiting_run=waiting_run,
            )
        except BaseException:
            session.writer.close()
            raise
        live.journaled_run = session
        live.tree.hub.root.is_resumed = session.mode.resumes
        return live

    def plan_root_run(self, request: RunRequest, recorded: RecordedModels = NOTHING_RECORDED) -> PlannedRun:
        """
        Return the planned run of *request*; *recorded* has the models of its record.

        Raises:
            StepEngineError: when it cannot start: wrong prompt, params or state, a model without provider or key.
        """
        earlier = request.planned
        # Another agent may have the conversation by now.
        if earlier is not None and earlier.request.agent is request.agent:
            return earlier.replan(request, self.services.time.clock.now())
        # Read once, here, where the caller's context still holds: the run itself may begin in another task.
        override = self.override
        models = self.models.make_run_models(request, recorded, override)
        hub = request.hub or Hub(self.watchers, self.logger)
        planner = Planner(
            self.catalog,
            models,
            seed=self.seed,
            created=self.services.time.clock.now(),
            watched=partial(WATCHED, hub),
            opened=hub.root.set_history,
        )
        plan, state = planner.plan_root(request)
        shared = self.services
        # All fields that an engine sets, by name: `attrs.evolve` would take a twentieth of the time of a run without steps.
        services = Services(
            machine=shared.machine,
            models=ModelSetting(
                registry=models.registry,
                pricing=shared.models.pricing,
                window=models.window,
                output_limit=models.registry.output_limit,
                retry=shared.models.retry,
                rates=shared.models.rates,
            ),
            tools=override.replace_tool_dependencies(shared.tools),
            time=shared.time,
            planner=planner.plan_child,
            interactor=shared.interactor,
            remembered=self.rules.get_or_create_rules(plan.info.session_id),
            seed=planner.seed,
            middlewares=shared.middlewares,
        )
        services = override.charge_calls_to_budget(services)
        return PlannedRun(request=request, hub=hub, plan=plan, state=state, services=services)

    def create_planned_run(
        self,
        planned: PlannedRun,
        *,
        prepare: Prepare | None = None,
        wrap: Wrap | None = None,
        is_news: Callable[[Event], bool] | None = None,
        waiting_run: EngineRun | None = None,
    ) -> EngineRun:
        """
        Return a run that is ready to start, with its system prompt resolved.

        Args:
            planned: Its plan.
            prepare: Returns the plan and the state that the root starts with in place of those of *planned*.
            wrap: Returns the services of the run in place of those of *planned*: with recorders among the ``middlewares``, inside the
                meter of limits and outside the gate; with another ``time`` or ``machine``.
            is_news: Returns whether an event is news; by default all are.
            waiting_run: The run to fill, if it waited for its turn in a session.
        """
        plan, state, services = planned.plan, planned.state, planned.services
        # A prompt that is computed is the author's code, and it fails like a handler: as a failed run, with events and
        # a record, and not as an exception out of `start`.
        try:
            state = with_resolved_system_prompt(plan, state)
        except StepEngineError as error:
            services = attrs.evolve(services, machine=make_ended_machine(error))
        # In this order: the journal may replace plan and state (its id, its time, its seed), and only then builds
        # itself into the services, which know both.
        if prepare is not None:
            plan, state = prepare(plan, state)
        plan = _with_hook_session_id(plan)
        if wrap is not None:
            services = wrap(services)
        ready = PlannedRun(request=planned.request, hub=planned.hub, plan=plan, state=state, services=services)
        return self.make_or_fill_engine_run(ready, is_news=is_news, waiting_run=waiting_run)

    def make_or_fill_engine_run(
        self,
        planned: PlannedRun,
        *,
        is_news: Callable[[Event], bool] | None = None,
        waiting_run: EngineRun | None = None,
    ) -> EngineRun:
        """
        Return the ``EngineRun`` of a plan; *waiting_run*, a run that waited for its turn, is filled instead.

        Args:
            planned: Its plan.
            is_news: Returns whether an event is news; by default all are.
            waiting_run: The run to fill, if it waited for its turn in a session.
        """
        request, services = planned.request, planned.services
        planned.hub.set_news_filter(is_news)
        # A run that waited for its turn has a handle already, which somebody holds: so its tree is filled and not
        # replaced.
        if waiting_run is None:
            tree = RunTree(services, planned.plan, planned.state, planned.hub, request.answers, earlier=request.earlier)
            waiting_run = EngineRun(tree, self.runs.active)
        else:
            if waiting_run.turn is not None:
                services = waiting_run.turn.children.with_collected_children(services, waiting_run.tree)
            waiting_run.tree.set_plan(services, planned.plan, planned.state, request.answers, earlier=request.earlier)
        waiting_run.tree.questions.headless = self.headless
        return waiting_run

    def remove_rules(self, session_id: str, ids: Collection[str]) -> None:
        """Remove the rules with these *ids*, or all if *ids* is empty, from a conversation and its running runs."""
        self.rules.remove_rules(session_id, ids)
        for tree in [live.tree for live in list(self.runs.active)]:
            if tree.root.plan.info.session_id == session_id:
                tree.questions.remembered.remove_rules(ids)


def _with_hook_session_id(plan: RunPlan) -> RunPlan:
    """Return *plan* with its run id as session id if it has none and its own ``session_hooks`` start a session."""
    if plan.info.session_id is not None or not plan.agent.hooks.pre_run:
        return plan
    from stepengine.sessions.run_hooks import has_session_hooks

    if not has_session_hooks(plan.agent.hooks):
        return plan
    return attrs.evolve(plan, info=attrs.evolve(plan.info, session_id=plan.run_id))


def require_agent_state(state: object) -> None:
    """Raise ``InputError`` unless *state* is one that a step can start from."""
    if not isinstance(state, AgentState):
        msg = f"step() needs an AgentState such as AgentState.from_messages([UserMessage('Hi')]), not {state!r}"
        raise InputError(msg, issues=("state should be an AgentState",))


class StepRun:
    """
    A run of one step: the agent without its handler, its opening prompts and the hooks around a run.

    Args:
        agent: The agent.
        state: The state to continue from.
    """

    def __init__(self, agent: Agent, state: AgentState) -> None:
        self._before = state
        self._step: StepResult | None = None
        self.agent = self._make_one_step_agent(agent)

    def with_caller_state(self, plan: RunPlan, planned_state: AgentState) -> tuple[RunPlan, AgentState]:
        """
        Return the plan and state of the step: the caller's state, with the run id of *planned_state* if it has none.

        The tools are those of the agent. The system prompt is the agent's if the caller's state has none.
        """
        before = self._before
        run_id = before.run_id or planned_state.run_id
        state = attrs.evolve(
            before,
            run_id=run_id,
            agent_id=self.agent.definition.id,
            system_prompt=before.system_prompt or planned_state.system_prompt,
            tool_definitions=planned_state.tool_definitions,
            pending=(),
        )
        return attrs.evolve(plan, run_id=run_id), state

    def make_step_result(self, ended: RunResult) -> StepResult:
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
            msg = f"the step of agent {self.agent.definition.id!r} ended as {ended.status.value} before it returned a state"
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

    def _make_one_step_agent(self, agent: Agent) -> Agent:
        """Return *agent* with a handler of one step, without instructions and without the hooks around a run."""
        # One step is run as a whole run whose handler yields one `STEP`: a second way through the machine would have to
        # be kept equal to the first.
        definition = attrs.evolve(agent.definition, handle_steps=self._run_and_store_step, instructions_prompt="")
        hooks = attrs.evolve(agent.hooks, pre_run=agent.openings, post_run=()) if agent.hooks else Hooks()
        # The plan of the run may choose it.
        other = None if agent.at_provider is None else self._make_one_step_agent(agent.at_provider)
        return attrs.evolve(agent, definition=definition, hooks=hooks, at_provider=other)

    def _run_and_store_step(self, _: object) -> Generator[object, StepResult, None]:
        """Run one step as the handler of the agent, and store its result."""
        self._step = yield STEP


def _increase_limits_to_record(limits: Limits, session: JournaledRun) -> Limits:
    """
    Return *limits*, increased to the recorded steps and actions, so that they end nothing that is recorded.

    If the run asked for more steps, it asks again in the same places and receives the recorded answers.
    """
    from stepengine.journal.encoding import get_recorded_questions  # a run that is not recorded loads no journal

    assert session.recorded_part is not None  # noqa: S101 - only recorded runs are started again
    history = session.recorded_part.history
    # Limits that are lower than what the record has spent would end the run in the middle of what it did already. They
    # hold from where it goes live (reliability:JR29).
    own = [i for (path, seq), i in history.intents.items() if not path and seq >= 0]
    asked = {i.seq if i.gather is None else i.gather for i in own}
    spent = {"max_steps": sum(i.type == "model_call" for i in own), "max_actions": len(asked)}
    given = {name: getattr(limits, name) for name in spent}
    limits = attrs.evolve(limits, **{n: max(v, spent[n]) for n, v in given.items() if v is not None})
    steps = _find_first_reached_step_limit(
        question for i in own if i.type == "ask" for question in get_recorded_questions(history.form(i))
    )
    return limits if steps is None else attrs.evolve(limits, max_steps=steps, ask=True)


def _find_first_reached_step_limit(questions: Iterable[Question]) -> int | None:
    """Return how many steps a run had when it first asked for more of them; ``None`` when it never did."""
    for question in questions:
        details: Any = question.details
        if question.number and isinstance(details, Mapping) and details.get("limit") == "steps":
            return int(details["reached"])
    return None
