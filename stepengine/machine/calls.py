"""
The requests of a run to the outside: members with ``make_effects()`` and ``apply_outcomes(outcomes)``, alone or several at once.

A member is a call of a tool, a child, a question, a function of the author's, a wait, or a model call outside of the conversation.
It returns the effects that it needs, receives their outcomes, and then has a result. ``batch`` judges calls before they run, and
decides the order of several.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar, assert_never, cast

import attrs

from stepengine.data import effects as ef
from stepengine.data import events as ev
from stepengine.data import yields as y
from stepengine.data.alike import find_nearest, list_names
from stepengine.data.effects import CallBody, CallTool, Leaf, Notify
from stepengine.data.json import JsonDict
from stepengine.data.messages import SUMMARY_REQUEST, Source, ToolCallLog, ToolCallPart, ToolResult, UserMessage
from stepengine.data.models import ModelReply, ModelRequest, ModelSettings
from stepengine.data.outcomes import Failure, Single, Stop, Value, get_race_winner_index, has_lost_or_stopped
from stepengine.data.questions import Question
from stepengine.data.state import ChildResult, Waited
from stepengine.data.tools import (
    Asking,
    Control,
    Driving,
    Ordinary,
    Spawning,
    ToolBinding,
    ToolSpec,
    Validated,
    Yielding,
)
from stepengine.data.transcript import Transcript
from stepengine.data.waits import ChildRef
from stepengine.errors import (
    HandlerError,
    LimitExceeded,
    LimitReached,
    PerformError,
    StepEngineError,
    ToolInputError,
    ToolNotAvailable,
)
from stepengine.machine.author import Author, ReturnValue, make_bad_yield_error
from stepengine.machine.budget import is_spent_budget_error, to_raisable_error
from stepengine.machine.child_effects import (
    RequestedChildren,
    child_result_from_outcome,
    find_spawnable_agent_id,
    make_spawn_not_allowed_error,
)
from stepengine.machine.control import run_control_tool
from stepengine.machine.protocol import CALLS, Flow
from stepengine.machine.signals import Stopped, merge_stops
from stepengine.machine.state import RunState

C = TypeVar("C", bound=CallTool)

EXAMPLES = "Examples: "
"""How the line begins in the description of a tool that shows inputs."""
# Above `SIMILAR_RATIO`, at which `write_file` is "near" `delete_file` and `read_url` near `read_files`: a wrong
# suggestion is worse than none. Nothing that is near is ever executed; this only words an error.
NEAR_RATIO = 0.7
# The steps of a tool are no actions of its author, which are counted, so without a bound of its own one that never ends
# would hold its run for ever.
MAX_TOOL_YIELDS = 100
"""Yields of one call of a tool: far more than a tool needs, and few enough that an endless loop fails within seconds."""


class EffectMember(ABC):
    """
    One request of a run.

    Attributes:
        run: The run.
        handed_out: Its effects, once they are numbered.
        result: Its result, as an entry among those of other members.
        failure: The error that is raised if the member is alone; among others a failure stays inside its own result.
        program_line: The line of the program that makes the request; 0 without a program.
        is_gathered: Whether its effects are one ``Gather`` even if the member is alone.
    """

    # By hand: a member is filled in as it goes on, so it is no frozen value, and each call of each step makes one.
    __slots__ = ("failure", "handed_out", "program_line", "result", "run")
    is_gathered = False

    def __init__(self, run: RunState) -> None:
        self.run = run
        self.handed_out: Sequence[Leaf] = ()
        self.result: Any = None
        self.failure: StepEngineError | None = None
        self.program_line = 0

    @abstractmethod
    def make_effects(self) -> Sequence[Leaf]:
        """Return its effects, which are numbered now."""

    @abstractmethod
    def apply_outcomes(self, outcomes: Sequence[Single]) -> Stop | None:
        """Set the result from the outcomes of its effects, in their order; return the stop if one was stopped."""


def run_single_member(member: EffectMember) -> Flow[Any]:
    """
    Run a member outside a group, emit the events that the driver does not, and return its result.

    Raises:
        Stopped: when the run was stopped meanwhile.
        LimitReached: when a budget was spent.
        StepEngineError: when the member failed otherwise.
    """
    # The driver emits the events of calls that it performs. Control tools, children and questions have no effect of
    # their own, so they emit their events here. The table lists them.
    if isinstance(member, ToolMember):
        how = member.binding.runs.how  # type: ignore[union-attr]  # a call without a tool has its error result already
        if CALLS[how].is_shown:
            return _run_driving_call(member) if how == "drives" else _run_call_with_events(member)
    return _perform_member_effects(member)


def _perform_member_effects(member: EffectMember) -> Flow[Any]:
    """Perform the effects of a member and return its result, or raise its failure; emit no events."""
    run, effects = member.run, member.make_effects()
    # A single effect is yielded as it is, not as a Gather of one: a Gather creates tasks and a window in the driver, and
    # is recorded as `gather`. Only members that may have several effects (candidates, children in the background, calls
    # that spawn) always use a Gather, so that one and several are recorded alike.
    outcomes: Sequence[Single] = ()
    if member.is_gathered:
        outcomes = yield from run.effects.gather(effects)
    elif effects:
        outcomes = ((yield effects[0]),)  # type: ignore[assignment]  # of one effect comes one outcome
    stop = member.apply_outcomes(outcomes)
    if stop is not None:
        raise Stopped(stop)
    # Raised only here. In a group, the error of one member must not discard the results of the others, so it stays in
    # its own result.
    if member.failure is not None:
        raise to_raisable_error(member.failure)
    result = member.result
    if (
        isinstance(result, ToolResult)
        and result.status == "pending"
        and isinstance(member, ToolMember)
        and member.needs_follow_up
    ):
        yield from finish_pending_call(member)
    return member.result


def finish_pending_call(call: ToolMember) -> Flow[None]:
    """
    Finish a call whose tool needs something from the run before it has its result: an answer, a model's reply, I/O.

    Raises:
        Stopped: when the run ends meanwhile, such as for a question that stays open; the call has a result that says so.
        LimitReached: when a budget was spent; the call has an error result.
    """
    runs, given = cast("Ordinary", cast("ToolBinding", call.binding).runs), call.result
    yield from _run_steps_and_set_result(call, runs.follow(call.input, given))  # type: ignore[misc]


def _run_driving_call(call: ToolMember) -> Flow[ToolResult]:
    """Run a call of a ``Driving`` tool, whose steps yield in the run that makes the call; return its result."""
    call.make_effects()
    runs = cast("Driving", cast("ToolBinding", call.binding).runs)
    yield from _run_steps_and_set_result(call, runs.steps(call.input, call.run.children.ensure_background()))
    return cast("ToolResult", call.result)


def _run_steps_and_set_result(call: ToolMember, steps: Any) -> Flow[None]:
    """Run the steps of a call in the calling run, emit its events and set its result; errors as for ``finish_pending_call``."""
    yield Notify(call.make_started_event())
    # Driven like a handler, by the same class: its frames stand in the traceback, it is closed on every way out, and
    # what it yields wrongly is told with its line.
    author = Author(f"the tool {call.asked.tool_name!r}", steps, by="tool")
    call.run.progress.author_stack.append(author)
    try:
        result = yield from _advance_steps_to_result(call, author)
    except Stopped as stopped:
        call.set_stopped_result(stopped.stop)
        raise
    except LimitReached as reached:
        call.set_result(ToolResult.error(f"Not executed: {reached.error}"))
        raise
    # What goes wrong in the steps of a tool is the tool's failure, which a model is told and an author may catch; but a
    # stop and a spent limit belong to the run, and are raised on after the call has its result.
    except StepEngineError as error:
        result = ToolResult.error(str(error))
    # Closed before the call is settled: what its `finally` says must still stand before the end of the call.
    finally:
        call.run.side_events.add_warnings(*author.close())
        call.run.progress.author_stack.pop()
    call.set_and_apply_result(result, call.run.effects.now)
    yield Notify(call.make_finished_event())


def _advance_steps_to_result(call: ToolMember, author: Author) -> Flow[ToolResult]:
    """Advance the steps of a call until they return, and return its result."""
    run, asked = call.run, author.send(None)
    for _ in range(MAX_TOOL_YIELDS):
        if isinstance(asked, ReturnValue):
            result: ToolResult = asked.value
            return result
        try:
            # No calls of tools: a tool that calls others is a body with a path and a journal of its own (`Yielding`).
            # These steps have the numbers of the run itself.
            if type(asked) not in OF_STEPS:
                raise make_bad_yield_error(author.what, asked, author.location, ", ".join(OF_STEPS.values()))
            member = make_single_member(run, asked)
            if isinstance(member, StartMember):
                member.authorize_start_by_call(call)
            value = yield from run_single_member(member)
        # Thrown in at its own yield, as into a handler, so a tool may do something else when nobody answers.
        except (StepEngineError, LimitReached) as error:
            asked = author.throw(error)
        else:
            asked = author.send(y.StepResult(run.snapshot.state(), value=value))
    msg = f"{author.what} yielded more than {MAX_TOOL_YIELDS} times in one call"
    raise HandlerError(msg, kind="RuntimeError", location=author.location)


def _run_call_with_events(call: ToolMember) -> Flow[Any]:
    """Run a call, and emit its start and end events."""
    yield Notify(call.make_started_event())
    try:
        return (yield from _perform_member_effects(call))
    finally:
        # After a stop nothing is shown of a call: its end is told when the run goes on and the call really ends.
        if call.run.effects.stop is None and call.result is not None:
            yield Notify(call.make_finished_event())


# --- what handlers and hooks ask for ----------------------------------------------------------------------------------


class ChildMember(EffectMember):
    """A child run that a handler asks for. If it is alone and cannot start, the error is raised, except for a spent depth."""

    __slots__ = ("_asked", "_by", "_is_background", "_of")

    def __init__(
        self,
        run: RunState,
        asked: y.AgentCall,
        *,
        sibling_count: int = 0,
        is_background: bool = False,
        tool_call_id: str = "",
    ) -> None:
        """Request the child *asked*, one of *sibling_count* that start at once (0: alone), for the model's call *tool_call_id*."""
        super().__init__(run)
        self._asked = asked
        self._by = tool_call_id
        self._of = sibling_count
        self._is_background = is_background

    def make_effects(self) -> Sequence[Leaf]:
        """Return the numbered ``Spawn``; for a handler, record prompt and params as its own values."""
        run, asked = self.run, self._asked
        body, sources = run.plan.body, run.effects.sources
        params = run.plan.agent.repair_child_params(asked.agent, asked.params) if asked.params else asked.params
        if sources is not None and not self._by:
            sources.add_handler_values([asked.prompt, params])
        spawn = ef.Spawn(
            run.effects.allocate_number(),
            self._resolve_requested_id(),
            asked.prompt,
            params,
            # A child that the body of a model's call starts is one that the model asked for.
            # Limits on what models may spawn would be got around by a tool that spawns for them; so such a child counts
            # as asked for by that call.
            self._by if body is None or not body.by_model else body.tool_call_id,
            self._is_background,
            definition=None if isinstance(asked.agent, str) else asked.agent,
            parent=run.snapshot.make_inherited_state,
            of=self._of or 1,
            at=run.effects.now,
            provenance=None if sources is None else sources.make_child_provenance(asked.prompt, params),
            program_line=self.program_line,
        )
        self.handed_out = (spawn,)
        return self.handed_out

    def _resolve_requested_id(self) -> str:
        """Return the requested id; for one with a publisher, the id of the agent found for it."""
        wanted = self._asked.agent_id
        # Only where there is a publisher. A plain id that is not found stays as it was written, since the error about
        # it is made by who plans the child, with the names that are known there.
        return (find_spawnable_agent_id(self.run, wanted) or wanted) if "/" in wanted else wanted

    def apply_outcomes(self, outcomes: Sequence[Single]) -> Stop | None:
        """
        Set the child's result and count its spending; return the stop if the child was stopped.

        If a single child could not start, the error becomes ``failure``, except for a spent depth.
        """
        (outcome,) = outcomes
        if isinstance(outcome, Stop):
            self.run.spent.count_stopped_child(outcome)
            return outcome
        # A child that stands alone and could not be started is the author's mistake and is raised. But depth is used up
        # by what others did above, so a recursive agent gets a failed child, looks at its status, and ends by itself.
        if isinstance(outcome, Failure) and not self._of and not _is_depth_error(outcome.error):
            self.failure = outcome.error
            return None
        self.result = child_result_from_outcome(outcome, self._asked.agent_id)
        self.run.spent.count_child(self.result)
        return None


def _is_depth_error(error: StepEngineError) -> bool:
    return isinstance(error, LimitExceeded) and error.kind == "depth"


class SingleEffectMember(EffectMember):
    """One effect, whose outcome is the handler's value; a failure is raised, or stays in its entry among others."""

    __slots__ = ("_asked",)

    def __init__(self, run: RunState, asked: Any) -> None:
        super().__init__(run)
        self._asked = asked

    def make_effect(self) -> Leaf:
        """Return the effect, with its number: by default the one in the row of the yieldable, with the same attributes."""
        given = attrs.asdict(self._asked, recurse=False)
        effect: Leaf = EFFECT_OF[type(self._asked)](self.run.effects.allocate_number(), **given)
        return effect

    def to_handler_value(self, outcome: Value) -> Any:
        """Return the handler's value for an outcome."""
        return outcome.value

    def to_failure_entry(self, error: StepEngineError) -> StepEngineError:
        """Return the entry of a failed member among the results of its group: by default the error itself."""
        return error

    def make_effects(self) -> Sequence[Leaf]:
        """Number, store and return the one effect."""
        self.handed_out = (self.make_effect(),)
        return self.handed_out

    def apply_outcomes(self, outcomes: Sequence[Single]) -> Stop | None:
        """Set the handler's value as the result, or the error as failure and entry; return the stop if there is one."""
        (outcome,) = outcomes
        if isinstance(outcome, Value):
            self.result = self.to_handler_value(outcome)
        elif isinstance(outcome, Failure):
            self.failure = outcome.error
            self.result = self.to_failure_entry(outcome.error)
        return outcome if isinstance(outcome, Stop) else None

    def compute_wake_time(self, timeout: float | None) -> int | None:
        """Return the end of *timeout* seconds from now, in milliseconds since the root run was created."""
        # A moment and no span: whoever goes on with the run after a crash must wait for what is left and not begin
        # anew. It is counted from the run's recorded time, since the machine has no clock.
        return None if timeout is None else self.run.effects.now + round(timeout * 1_000)


class PerformMember(SingleEffectMember):
    """A function of the author's that is called outside of the machine."""

    __slots__ = ()

    def make_effect(self) -> Leaf:
        """Return the ``CallFunction``."""
        return ef.CallFunction(self.run.effects.allocate_number(), self._asked)

    def to_failure_entry(self, error: StepEngineError) -> StepEngineError:
        """Return the failure as it is after a replay: an exception of the author's own class may not be storable."""
        return error if isinstance(error, PerformError) else PerformError(str(error), kind=type(error).__name__)


class QuestionMember(PerformMember):
    """A question that a handler asks; it fails as a ``Perform`` does."""

    __slots__ = ()

    def make_effect(self) -> Leaf:
        """Return the ``AskPerson``."""
        asked = self._asked
        question = Question(
            # By the author's own name, where there is one: an answer can be given up front, before anybody knows the
            # number that the question will have.
            self.run.questions.register_key(asked.key),
            asked.question,
            asked.options,
            asked.multi_select,
            details=asked.details,
            allow_text=asked.allow_text,
        )
        return make_ask_effect(self.run, question, program_line=self.program_line)

    def to_handler_value(self, outcome: Value) -> Any:
        """Return the answer's value."""
        return outcome.value[0].value


def make_ask_effect(
    run: RunState, *questions: Question, purpose: Any = "question", tool_call_id: str = "", program_line: int = 0
) -> ef.AskPerson:
    """Return the effect that asks *questions*; their ids are their names or derived from the effect's address."""
    seq, path = run.effects.allocate_number(), run.plan.path
    # Made of the address: whoever answers days later names the question by it, so it must be the same in each process
    # that runs the handler again. Random ids would change with every replay.
    number = f"{path}.q{seq}" if path else f"q{seq}"
    numbered = [
        Question(
            id=_add_path_to_name(question.id, path) or (number if len(questions) == 1 else f"{number}.{index}"),
            text=question.text,
            options=question.options,
            multi_select=question.multi_select,
            tool_name=question.tool_name,
            details=question.details,
            path=path,
            allow_text=question.allow_text,
            remember=question.remember,
            wider=question.wider,
            descriptions=question.descriptions,
            provenance=question.provenance,
        )
        for index, question in enumerate(questions)
    ]
    # Only of a permission the person is shown where in the program it is asked for; a question of the author's says
    # itself what it is about.
    place = run.progress.program_position if purpose == "permission" else None
    return ef.AskPerson(seq, tuple(numbered), purpose, tool_call_id, place=place, program_line=program_line)


def _add_path_to_name(name: str, path: str) -> str:
    """Return the question id for an author's *name* in the run at *path*; ``""`` without a name."""
    return f"{path}:{name}" if name and path else name


class ModelCallMember(EffectMember):
    """Model calls outside of the conversation; those that fail are left out, unless all do."""

    __slots__ = ()

    def apply_outcomes(self, outcomes: Sequence[Single]) -> Stop | None:
        """Count the replies and set the result: the list of them, or the one reply of a single call."""
        replies: list[ModelReply] = []
        for effect, outcome in zip(self.handed_out, outcomes, strict=True):
            # All of them are counted first: each reply was paid for, even if a sibling was stopped and the replies are
            # not used.
            if isinstance(outcome, Value):
                self.run.spent.count_reply(effect, outcome.value)  # type: ignore[arg-type]
                self.run.side_events.warn_of_reply_gaps(outcome.value)
                replies.append(outcome.value)
        stops = [outcome for outcome in outcomes if isinstance(outcome, Stop)]
        if stops:
            return merge_stops(stops)
        if replies:
            self.result = replies if self.is_gathered else replies[0]
        else:
            # One failure is enough: the requests were the same, so the cause mostly is, too.
            self.failure = outcomes[0].error  # type: ignore[union-attr,assignment]
        return None


class CompleteMember(ModelCallMember):
    """One model call outside of the conversation."""

    __slots__ = ("_asked",)

    def __init__(self, run: RunState, asked: y.Complete) -> None:
        super().__init__(run)
        self._asked = asked

    def make_effects(self) -> Sequence[Leaf]:
        """Number, store and return the ``CallModel``."""
        run, asked = self.run, self._asked
        # One or the other and not both merged: a call beside the conversation, such as a summary, must not inherit the
        # response schema or the thinking budget that the agent's own turns have once it states its own.
        settings = asked.settings or run.plan.agent.definition.settings
        if asked.settings is None and _is_summary_request(asked):
            settings = _make_plain_text_settings(settings)
        if asked.schema is not None:
            settings = attrs.evolve(settings, response_schema=cast("Any", asked.schema).model_json_schema())
        request = ModelRequest(
            run.plan.resolve_model(asked.model),
            asked.system_prompt or "",
            Transcript(asked.messages),
            asked.tools,
            # Several providers refuse a choice of tools where none are offered.
            settings.tool_choice if asked.tools else None,
            settings,
        )
        self.handed_out = (ef.CallModel(run.effects.allocate_number(), request, "complete"),)
        return self.handed_out


def _is_summary_request(complete: y.Complete) -> bool:
    last = complete.messages[-1] if complete.messages else None
    return isinstance(last, UserMessage) and SUMMARY_REQUEST in last.tags


def _make_plain_text_settings(settings: ModelSettings) -> ModelSettings:
    """Return *settings* without those that prevent an answer in plain text."""
    if settings.response_schema is None and settings.tool_choice in (None, "auto", "none"):
        return settings
    choice = settings.tool_choice if settings.tool_choice in (None, "auto") else "none"
    return attrs.evolve(settings, response_schema=None, tool_choice=choice)


class CandidatesMember(ModelCallMember):
    """Several replies to one request."""

    __slots__ = ("_count", "_request")
    is_gathered = True

    def __init__(self, run: RunState, request: ModelRequest, count: int) -> None:
        super().__init__(run)
        self._request = request
        self._count = count

    def make_effects(self) -> Sequence[Leaf]:
        """Number, store and return one ``CallModel`` for each candidate."""
        run = self.run
        self.handed_out = [
            ef.CallModel(run.effects.allocate_number(), self._request, "candidate") for _ in range(self._count)
        ]
        return self.handed_out


# --- what only waits, and children in the background ------------------------------------------------------------------


class SleepMember(SingleEffectMember):
    """A time that has to come."""

    __slots__ = ()

    def make_effect(self) -> Leaf:
        """Return the ``AwaitTime``."""
        run, asked = self.run, self._asked
        if asked.until is None:
            wakes = self.compute_wake_time(asked.seconds) or 0
        else:
            # Rounded up, by the double negation: a date in the middle of a millisecond must not be over before it has come.
            wakes = max(run.effects.now, -((run.plan.created - asked.until) // timedelta(milliseconds=1)))
        return ef.AwaitTime(
            run.effects.allocate_number(),
            asked.seconds,
            asked.until,
            wakes=wakes,
            asked=run.effects.now,
            program_line=self.program_line,
        )

    def to_handler_value(self, outcome: Value) -> Any:
        """Return the time when the run woke."""
        return self.run.plan.created + timedelta(milliseconds=outcome.at)


class ReceiveMember(SingleEffectMember):
    """The next message on a topic."""

    __slots__ = ()

    def make_effect(self) -> Leaf:
        """Return the ``AwaitMessage``."""
        run, asked = self.run, self._asked
        wakes = self.compute_wake_time(asked.timeout)
        return ef.AwaitMessage(
            run.effects.allocate_number(),
            asked.topic,
            asked.timeout,
            schema=asked.schema,
            wakes=wakes,
            asked=run.effects.now,
        )

    def to_handler_value(self, outcome: Value) -> Any:
        """Return the value of the message, or ``None`` after the timeout."""
        return None if outcome.value is None else outcome.value.value


class StartMember(EffectMember):
    """
    Children that are started in the background.

    Attributes:
        tool_call_id: The call of a tool that asks for them; ``""`` for a handler.
    """

    __slots__ = ("_asked", "tool_call_id")
    is_gathered = True

    def __init__(self, run: RunState, asked: y.Start[Any]) -> None:
        super().__init__(run)
        self._asked = asked
        self.tool_call_id = ""

    def authorize_start_by_call(self, call: ToolMember) -> None:
        """
        Check that a tool call may start the children; store its id if a model made the call or its tool carries their definitions.

        Raises:
            AgentError: for a name that the run may not spawn; by a definition a tool may start what it carries.
        """
        run, carried = (
            self.run,
            call.binding.runs.agents if call.binding and isinstance(call.binding.runs, Driving) else (),
        )
        allowed = run.plan.agent.children
        for one in self._asked.calls:
            # A name could be any agent of the engine, so what this run may spawn is asked. A definition is an object
            # that only the tool's author can have, and needs no leave.
            if isinstance(one.agent, str) and allowed is not None and find_spawnable_agent_id(run, one.agent) is None:
                raise make_spawn_not_allowed_error(run.plan.agent.definition.id, one.agent, allowed)
        if call.source == "model" or any(one.agent is agent for one in self._asked.calls for agent in carried):
            self.tool_call_id = call.asked.tool_call_id

    def make_effects(self) -> Sequence[Leaf]:
        """Number, store and return one ``Spawn`` for each child."""
        calls = self._asked.calls
        more: Any = {"sibling_count": len(calls), "is_background": True, "tool_call_id": self.tool_call_id}
        children = [ChildMember(self.run, call, **more) for call in calls]
        self.handed_out = [spawn for child in children for spawn in child.make_effects()]
        return self.handed_out

    def apply_outcomes(self, outcomes: Sequence[Single]) -> Stop | None:
        """Set the references; if one could not start, the others keep running and end with the run."""
        refs: list[ChildRef[Any]] = []
        stops: list[Stop] = []
        for outcome in outcomes:
            if isinstance(outcome, Stop):
                stops.append(outcome)
            elif isinstance(outcome, Failure):
                self.failure = self.failure or outcome.error
            else:
                ref: ChildRef[Any] = outcome.value
                refs.append(ref)
                # Those that did start are taken note of although a sibling failed: they are at work, and have to be
                # ended with the run.
                self.run.children.ensure_background().record_start(ref, on_return=self._asked.on_return)
        if stops:
            return merge_stops(stops)
        self.result = refs[0] if len(self._asked.calls) == 1 and refs else tuple(refs)
        return None


class WaitMember(SingleEffectMember):
    """A wait for background children: the result of a ``Wait``."""

    __slots__ = ()

    def make_effect(self) -> Leaf:
        """Return the ``AwaitRuns``."""
        run, asked = self.run, self._asked
        # Known are the children that this run has started itself: a reference that came from elsewhere (a param, a
        # message) raises here, at the handler's yield.
        paths = tuple([run.children.background.get_own_child_path(ref) for ref in asked.refs])
        wakes = self.compute_wake_time(asked.timeout)
        return ef.AwaitRuns(
            run.effects.allocate_number(), paths, asked.need, asked.timeout, wakes=wakes, asked=run.effects.now
        )

    def to_handler_value(self, outcome: Value) -> Any:
        """Return the results of the ended children, and count each the first time."""
        awaited, refs = outcome.value, {ref.path: ref for ref in self._asked.refs}
        done = tuple([_count_child_once(self.run, path, awaited.ended[path]) for path in awaited.done])
        return Waited(done, tuple([refs[path] for path in awaited.open]))


def _count_child_once(run: RunState, path: str, child: ChildResult) -> ChildResult:
    """Return *child*, and add its spending to the run unless its end was reported before."""
    # Several waits may tell of one child, and a replayed one does so again; what it spent counts the first time only.
    if run.children.background.mark_reported(path):
        run.spent.count_child(child)
    return child


class SendMember(SingleEffectMember):
    """A message to a background child."""

    __slots__ = ()

    def make_effect(self) -> Leaf:
        """Return the ``SendToRun``."""
        asked = self._asked
        path = self.run.children.background.get_own_child_path(asked.ref)
        return ef.SendToRun(self.run.effects.allocate_number(), path, asked.value, asked.topic)


class CancelMember(SingleEffectMember):
    """A child in the background that is ended."""

    __slots__ = ()

    def make_effect(self) -> Leaf:
        """Return the ``EndRuns``."""
        asked = self._asked
        return ef.EndRuns(
            self.run.effects.allocate_number(),
            (self.run.children.background.get_own_child_path(asked.ref),),
            asked.reason,
        )

    def to_handler_value(self, outcome: Value) -> Any:
        """Return the child's result, and add its spending to the run the first time."""
        (path,) = self.handed_out[0].children  # type: ignore[union-attr]
        return _count_child_once(self.run, path, outcome.value.ended[path])


def end_or_await_children(run: RunState) -> Flow[None]:
    """
    End the run's background children, or wait for them, before it ends.

    Raises:
        Stopped: when the world ended the run meanwhile.
    """
    for kind, paths in run.children.background.group_unfinished_children():
        effect: Leaf
        if kind == "wait":
            effect = ef.AwaitRuns(run.effects.allocate_number(), paths, len(paths), asked=run.effects.now)
        else:
            effect = ef.EndRuns(run.effects.allocate_number(), paths, "the run around it has ended")
        # As an effect, so recorded: which children were still at work when the handler returned is a matter of time,
        # and a replay has to find the same.
        awaited = run.effects.unwrap((yield effect))  # type: ignore[arg-type]  # of one effect comes one outcome
        for path in awaited.done:
            _count_child_once(run, path, awaited.ended[path])


EFFECT_OF: Mapping[type, Any] = {
    row.kind: effect for row in y.YIELDS for effect in ef.ROWS if row.effects == (effect.__name__,)
}
"""The effect of each yieldable whose row names one."""
MEMBERS: Mapping[type, type[Any]] = {
    y.Ask: QuestionMember,
    y.Complete: CompleteMember,
    y.Perform: PerformMember,
    y.Sleep: SleepMember,
    y.Receive: ReceiveMember,
    y.Start: StartMember,
    y.Wait: WaitMember,
    y.Send: SendMember,
    y.Cancel: CancelMember,
}
"""The member class of each yieldable that needs more than ``SingleEffectMember``."""
OF_STEPS = {
    row.kind: row.name
    for row in y.YIELDS
    if row.for_tools and row.kind not in (y.ToolCall, y.AgentCall, y.Parallel, y.Race)
}
"""The names of the yieldables that the steps of a call may yield in the calling run, by class."""


def make_single_member(run: RunState, yielded: Any, *, child_count: int = 0) -> EffectMember:
    """Return the member for a single yieldable; *child_count* is the number of children in its ``Parallel``."""
    if isinstance(yielded, y.AgentCall):
        return ChildMember(run, yielded, sibling_count=child_count)
    member: EffectMember = MEMBERS.get(type(yielded), SingleEffectMember)(run, yielded)
    return member


class RaceMember(EffectMember):
    """
    Several members of which the first to end wins.

    Attributes:
        members: The racing members, in the order of the yield.
    """

    __slots__ = ("_won", "members")

    def __init__(self, run: RunState, members: Sequence[EffectMember]) -> None:
        super().__init__(run)
        self.members = members
        self._won = 0

    def make_effects(self) -> Sequence[Leaf]:
        """Return the effects of all members, numbered already."""
        # Each member has asked for its own already, so that the numbers are in order; here they are only put side by
        # side.
        self.handed_out = [effect for member in self.members for effect in member.handed_out]
        return self.handed_out

    def make_member_effects(self) -> Sequence[Leaf]:
        """Number and return the effects of all members, none of which can have a result yet."""
        for member in self.members:
            if isinstance(member, RaceMember):
                member.make_member_effects()
            else:
                member.make_effects()
        return self.make_effects()

    def set_early_winner(self) -> bool:
        """Set the first member that has a result already as the winner; return whether there is one. No other starts then."""
        if all(member.result is None for member in self.members):
            return False
        for member in self.members:
            # A call that is denied or invalid has its result before anything was performed, and so has won. What its
            # rivals asked for is taken back: their numbers stay unused, which the record tells as a gap.
            member.handed_out = ()
        self._won = next(n for n, member in enumerate(self.members) if member.result is not None)
        self.set_winner_result()
        return True

    def apply_outcomes(self, outcomes: Sequence[Single]) -> Stop | None:
        """Set the outcomes of the members, of which the first has won; a nested race has a winner of its own."""
        stops: list[Stop] = []
        ends: list[int] = []
        for number, member in enumerate(self.members):
            first = len(ends)
            # A member may have several effects, so the place of an outcome tells its member only by this list.
            ends += [number] * len(member.handed_out)
            stop = member.apply_outcomes(outcomes[first : len(ends)])
            stops += [] if stop is None else [stop]
        won = get_race_winner_index(outcomes)
        # Being given up is how a loser ends. Where the first outcome in time is itself one, nobody has won: the run was
        # stopped in the middle, and the race is run to its end when it goes on.
        if stops and has_lost_or_stopped(outcomes[won]):
            return merge_stops(stops)
        self._won = ends[won]
        return None

    def set_winner_result(self) -> None:
        """Set the result once the winner has one."""
        winner = self.members[self._won]
        if isinstance(winner, RaceMember):
            winner.set_winner_result()
        self.result = self._won, winner.result


# --- calls of tools ---------------------------------------------------------------------------------------------------


class ToolMember(EffectMember):
    """
    One call of a tool and its state.

    Attributes:
        asked: The requested call, with the input as changed by hooks and people.
        accepted: The call in the history, if its input was corrected or changed by a person; else ``None``.
        source: The origin of the call, such as a model or a handler.
        binding: The tool; ``None`` if it is unknown.
        is_closed: Whether its result is a placeholder: pending, or cancelled by the end of the run.
        is_fault: Whether the call, or one of the children that it asks for, was invalid or unknown, which forces another step.
    """

    __slots__ = (
        "_children",
        "_duration",
        "_started",
        "_validated",
        "accepted",
        "asked",
        "binding",
        "is_closed",
        "is_fault",
        "source",
    )

    def __init__(self, run: RunState, asked: ToolCallPart, source: Source, binding: ToolBinding | None) -> None:
        super().__init__(run)
        self.asked = asked
        self.source: Source = source
        self.binding = binding
        self.accepted: ToolCallPart | None = None
        self.is_closed = self.is_fault = False
        self._validated: Validated | None = None
        self._children: RequestedChildren | None = None
        self._started = self._duration = 0

    @property
    def is_gathered(self) -> bool:  # type: ignore[override]  # of most members it is known without looking
        """Whether its own effects are one ``Gather``, even if the call is alone: true for a numbered call that spawns."""
        return self._children is not None

    @property
    def own_name(self) -> str:
        """The tool's own name, which hooks receive, even if the model used another name."""
        return self.asked.tool_name if self.binding is None else self.binding.spec.name

    @property
    def judged_call(self) -> ToolCallPart:
        """The call as it would run: with the tool's own name and its validated input."""
        call = _rename_call(self.asked, self.own_name)
        return call if self.input is call.input else attrs.evolve(call, input=self.input)

    @property
    def input(self) -> JsonDict:
        """The validated input; before validation, the original one."""
        return self._validated.input if self._validated else self.asked.input

    @property
    def needs_follow_up(self) -> bool:
        """Whether the result is pending and its ordinary tool has steps that finish it; see ``finish_pending_call``."""
        if self.result is None or self.result.status != "pending" or self.binding is None:
            return False
        runs = self.binding.runs
        return isinstance(runs, Ordinary) and runs.follow is not None

    @property
    def has_ended_turn(self) -> bool:
        """Whether the tool ran and ends the turn."""
        if self.binding is None or self.result is None:
            return False
        # Only one that went well: a refused `end_turn` says that the work is not done, and the model has to see why.
        return self.binding.spec.ends_turn and not self.result.is_error

    # --- before it runs ---------------------------------------------------------------------------------------------

    def repair_and_validate_input(self) -> None:
        """
        Correct names and common mistakes in the input, then validate it; a corrected input replaces that of the call.

        Raises:
            ToolInputError: when it does not fit, or a validator of the author's raised.
        """
        binding, asked = self.binding, self.asked
        assert binding is not None  # noqa: S101
        # Kept until here, since the call must stand in the history with what the model wrote; it is refused like any
        # other wrong input (reliability:MP40).
        if asked.input_error is not None:
            msg = f"Invalid parameters for {asked.tool_name}: the arguments are not a JSON object: {asked.input_error}"
            raise ToolInputError(msg, tool_name=asked.tool_name, issues=(asked.input_error,))
        try:
            given = binding.repair(asked.input) if binding.repair is not None else asked.input
            validate = binding.validate
            self._validated = validate(given)
        except ToolInputError as error:
            raise error if self.source == "model" else _add_example(error, binding.spec) from None
        except StepEngineError:
            raise
        # A validator of the author's own may raise anything. It says only that this input does not fit; it must not end
        # the run.
        except Exception as error:
            issue = f"the check raised {type(error).__name__}: {error}"
            msg = f"Invalid parameters for {asked.tool_name}: {issue}"
            raise ToolInputError(msg, tool_name=asked.tool_name, issues=(issue,)) from error
        if given is not asked.input:
            # The history holds the accepted form: a handler that makes a model's call again must not be refused, and a
            # model learns the right form from its own calls (generator-contract:T2).
            self.asked = self.accepted = attrs.evolve(asked, input=given)

    def replace_call_if_valid(self, changed: ToolCallPart) -> ToolCallPart:
        """Validate *changed* and replace the call by it, or raise and keep the call; return the call as it would run."""
        # What a hook makes of a call is validated before rules judge it, for a rule looks at validated values only. If
        # it does not fit, the call stays what it was, and the hook is the one that is refused.
        before, accepted = self.asked, self.accepted
        self.asked = _rename_call(changed, before.tool_name)
        try:
            self.repair_and_validate_input()
        except StepEngineError:
            self.asked = before
            raise
        finally:
            self.accepted = accepted
        return self.judged_call

    def replace_input(self, input: JsonDict) -> None:
        """Replace the input by that of a person, without validation; the history shows the call that ran."""
        asked = self.asked
        self.asked = self.accepted = ToolCallPart(
            asked.tool_call_id, asked.tool_name, input, provider_data=asked.provider_data
        )

    # --- how it runs ------------------------------------------------------------------------------------------------

    def make_effects(self) -> Sequence[Leaf]:
        """Return the effects of the call: none for control tools, which run here; one per child for those that spawn."""
        run, asked, validated, binding = self.run, self.asked, self._validated, self.binding
        assert binding is not None and validated is not None  # noqa: S101, PT018
        self._started = run.effects.now
        # Denials are counted in a row: a call that is allowed ends the row.
        run.budget.denied.pop(binding.spec.name, None)
        match binding.runs:
            case Ordinary():
                self.handed_out = (self._make_effect(CallTool, validated),)
            case Control(action):
                self.set_result(run_control_tool(run, action, validated.input))
            case Spawning() as runs:
                # A function and no state: what a child inherits is frozen only for one that inherits, and then at the
                # moment in which the child is planned.
                parent = partial(run.snapshot.make_inherited_state, asked.tool_call_id)
                self._children = children = RequestedChildren(run, asked, runs, validated.input, parent)
                self.handed_out = children.effects
                self.is_fault = children.has_invalid_entry
            case Yielding():
                body = self._make_effect(CallBody, validated)
                known = None if run.effects.sources is None else run.effects.sources.make_body_provenance()
                self.handed_out = (attrs.evolve(body, at=run.effects.now, values=run.shared.values, provenance=known),)
            case Driving():
                self.handed_out = ()
            case Asking(questions):
                asks = questions(validated.input)
                self.handed_out = (make_ask_effect(run, *asks, tool_call_id=asked.tool_call_id),)
            case never:
                assert_never(never)
        return self.handed_out

    def _make_effect(self, effect_type: type[C], validated: Validated) -> C:
        """Return the numbered effect of the call, of the class *effect_type*."""
        run, asked = self.run, self.asked
        # State and size go as functions: most tools look at neither, and a state that is frozen for nobody would cost a
        # microsecond for each call.
        return effect_type(
            run.effects.allocate_number(),
            asked.tool_name,
            validated.input,
            asked.tool_call_id,
            self.source,
            arguments=validated.arguments,
            state=run.snapshot.state,
            step_index=run.progress.step,
            measured=run.prompt.measured,
            program_line=self.program_line,
        )

    # --- what came of it --------------------------------------------------------------------------------------------

    def apply_outcomes(self, outcomes: Sequence[Single]) -> Stop | None:
        """Set the result from the outcomes of the effects, and apply the call's changes to its run."""
        runs = self.binding.runs  # type: ignore[union-attr]
        if isinstance(runs, Control):
            return None
        if isinstance(runs, Spawning) and self._children is not None:
            return self._apply_child_outcomes(runs, self._children, outcomes)
        (outcome,) = outcomes
        if isinstance(outcome, Stop):
            # What the body did until it was stopped is counted now, since it was paid for; the changes it wants are
            # made when it has come to its end, or they would be made twice.
            if outcome.body is not None:
                self.run.apply_body_end(outcome.body, self.asked.tool_name, was_stopped=True)
            self.set_stopped_result(outcome)
            return outcome
        if isinstance(outcome, Failure):
            error = self.failure = outcome.error
            result = ToolResult.error(f"Not executed: {error}" if is_spent_budget_error(error) else str(error))
        else:
            value = outcome.value
            result = runs.shown(value) if isinstance(runs, Asking) else value
            # Before the call is settled: what the body changed must be there when the result appears, so that the very
            # next call or hook finds it. A `Failure` has changed nothing, as it never got to the body.
            if outcome.body is not None:
                self.run.apply_body_end(outcome.body, self.asked.tool_name)
        self.set_and_apply_result(result, outcome.at)
        return None

    def _apply_child_outcomes(
        self, runs: Spawning, children: RequestedChildren, outcomes: Sequence[Single]
    ) -> Stop | None:
        """Set the result from the children, an error for one that could not start; return the stop, if any."""
        stop = children.apply_outcomes(outcomes)
        if stop is not None:
            self.set_stopped_result(stop)
            return stop
        results = children.results
        if self.source != "model":
            children.warn_of_refused_children(self.asked.tool_name)
        # A child that failed may have left half of something; the conversation then stays as it was
        # (generator-contract:L23).
        left = results[0].left if runs.is_inline and not results[0].is_error else None
        if left is not None:
            self.run.apply_inline_child(left.state, self.asked.tool_call_id)
        self.set_and_apply_result(runs.shown(results), max([outcome.at for outcome in outcomes], default=0))
        return None

    def set_and_apply_result(self, result: ToolResult, ended_at: int) -> None:
        """Set the result and duration of a call that ended at *ended_at*, count its cost, and apply its change to the run."""
        # Both are times of the run and not of a clock, so a replay shows the same. A clock that was set back could make
        # it negative.
        self._duration = max(0, ended_at - self._started)
        self.result = result.with_call(self.asked)
        if result.credits_used:
            self.run.spent.count_credits(result.credits_used)
        if result.usage is not None or result.cost is not None:
            self.run.spent.count_usage(self.asked.tool_name, result.usage, result.cost, 0)
        if result.change is not None:
            # Here and nowhere else: the next call and every hook see it, and nothing later makes it a second time.
            self.run.apply_change(result.change, self.asked.tool_name)

    def set_result(self, result: ToolResult) -> None:
        """Set or replace the result, with the call's own name and id; nothing is counted and no change is applied."""
        self.result = result.with_call(self.asked)

    def restore_result(self, result: ToolResult) -> None:
        """Set the result from before the run was suspended; the call is no fault any more."""
        # It had its result when the run was suspended; what was wrong with it then was told then.
        self.is_fault = False
        self.result = result

    def set_error_result(self, error: StepEngineError) -> None:
        """Set an error result for an invalid or unknown call."""
        self.is_fault = True
        self.set_result(ToolResult.error(error.message))

    def set_skipped_result(self, reason: str) -> None:
        """Set a result that gives the reason why the call was not run."""
        self.set_result(ToolResult.error(reason, status="skipped"))

    def set_stopped_result(self, stop: Stop) -> None:
        """Set a result that gives the reason why there is none: an open question, or the end of the run."""
        self.is_closed = True
        if stop.kind == "suspended":
            text = "Pending: the run is suspended."
            waiting = stop.questions
            self.set_result(
                ToolResult.make_pending(waiting[0].id) if waiting else ToolResult.text(text, status="pending")
            )
        else:
            # Said so openly because a model that is told of it, when the run goes on, must not take it for granted that
            # nothing happened.
            text = "Cancelled: the run ended before this call gave a result; it may have had effects."
            self.set_result(ToolResult.error(text, status="cancelled"))

    def append_to_log(self) -> None:
        """Add the call to the log of the run if it has its result."""
        if self.result is not None:
            asked, run, validated = self.asked, self.run, self._validated
            # What ran, and so with defaults filled in and names mended; what was asked stands in the history.
            given = asked.input if validated is None else validated.input
            run.tools.log.append(
                ToolCallLog(
                    asked.tool_name,
                    given,
                    self.result,
                    run.progress.step,
                    self._duration,
                    asked.tool_call_id,
                    self.source,
                    run.plan.path,
                )
            )

    # --- what is shown of it ----------------------------------------------------------------------------------------

    def emit_unrun_call_events(self) -> Flow[None]:
        """Emit the start and end events of a call that has a result but never ran: unknown, invalid, denied or skipped."""
        yield Notify(self.make_started_event())
        yield Notify(self.make_finished_event())

    def make_started_event(self) -> ev.Event:
        """Return the event for its start."""
        return ev.ToolStarted(
            path=self.run.plan.path,
            seq=self.run.effects.seq,
            tool_name=self.asked.tool_name,
            tool_call_id=self.asked.tool_call_id,
            input=self.input,
            source=self.source,
            category="" if self.binding is None else self.binding.spec.category,
        )

    def make_finished_event(self) -> ev.Event:
        """Return the event for its end."""
        assert self.result is not None  # noqa: S101
        return ev.ToolFinished(
            path=self.run.plan.path,
            seq=self.run.effects.seq,
            tool_name=self.asked.tool_name,
            tool_call_id=self.asked.tool_call_id,
            result=self.result,
            duration_ms=self._duration,
        )


def _add_example(error: ToolInputError, spec: ToolSpec) -> ToolInputError:
    """Return an author's input error, with the tool's example of a valid input if it has one."""
    shown = next((line for line in spec.description.split("\n") if line.startswith(EXAMPLES)), "")
    if not shown or not error.issues:
        return error
    msg = f"Invalid parameters for {error.tool_name}: {'; '.join(error.issues)}. Fine would be: {shown.removeprefix(EXAMPLES)}"
    return ToolInputError(msg, tool_name=error.tool_name, issues=error.issues)


def _rename_call(call: ToolCallPart, name: str) -> ToolCallPart:
    return call if call.tool_name == name else attrs.evolve(call, tool_name=name)


def make_unavailable_tool_error(run: RunState, name: str, available: Sequence[str], hint: str = "") -> ToolNotAvailable:
    """Return the error for a call of an unavailable tool."""
    msg = f"Tool {name!r} is not available for agent {run.plan.agent.definition.id!r}. Available tools: {list_names(available, name)}.{hint}"
    return ToolNotAvailable(msg, tool_name=name, available=available)


def make_unavailable_author_call_error(run: RunState, name: str) -> ToolNotAvailable:
    """Return the error for a handler's or tool body's call of an unavailable tool, with a suggestion how to allow or correct it."""
    # An author can be told more than a model: what was probably meant, and which line to write; a model is told what it
    # may call.
    known = tuple(run.tools.offered)
    near = find_nearest(name, [*known, *run.tools.bindings], max_count=1, min_similarity=NEAR_RATIO)
    body = run.plan.body
    if body is not None and (name in run.tools.bindings or not near):
        hint = f" List it in uses=[...] of the tool {body.tool_name!r}."
    elif name in run.tools.bindings:
        hint = (
            " Give it to the agent in tools=[...], or call it with include_tool_call=False; then the model does not see the "
            "call and its result."
        )
    elif near:
        hint = f" Did you mean {near[0]!r}?"
    else:
        hint = (
            ""
            if known
            else " The agent has no tools; give it some in tools=[...], or the engine in Engine(tools=[...])."
        )
    listed = f" Available tools: {list_names(known, name)}." if known else ""
    msg = f"Tool {name!r} is not available for agent {run.plan.agent.definition.id!r}.{listed}{hint}"
    return ToolNotAvailable(msg, tool_name=name, available=known)


def run_tool_call_of_hook(run: RunState, yielded: y.ToolCall) -> Flow[ToolResult]:
    """Run a tool call that a hook yields: only of an ordinary tool, validated, without hooks, and kept out of the history."""
    binding = run.tools.bindings.get(yielded.tool)
    # A hook runs inside a step, or around a call: a child, a question or a control tool from there would change the
    # turn while it is being decided.
    if binding is None or binding.runs.how != "ordinary":
        ordinary = tuple([name for name, b in run.tools.bindings.items() if b.runs.how == "ordinary"])
        near = find_nearest(yielded.tool, ordinary, max_count=1, min_similarity=NEAR_RATIO)
        raise make_unavailable_tool_error(run, yielded.tool, ordinary, f" Did you mean {near[0]!r}?" if near else "")
    call = ToolMember(run, ToolCallPart(run.tools.call_ids.allocate_id(), yielded.tool, yielded.input), "hook", binding)
    # Past hooks and rules, as whoever installed the hook is trusted as its host is (reliability:PM39); judged by hooks
    # it would also call itself.
    call.repair_and_validate_input()
    try:
        result: ToolResult = yield from run_single_member(call)
    except Stopped as stopped:
        if call.result is None:
            call.set_stopped_result(stopped.stop)
        raise
    finally:
        call.append_to_log()
    return result
