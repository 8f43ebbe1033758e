"""
The mutable inside of one run. Nobody outside the machine ever sees it; what leaves it is frozen.

Whoever needs something of the world yields the effect, and gets the outcome from there; ``exchange`` of ``run`` stands between,
alone. ``receive`` is where an outcome comes back: it sets the run's time, collects messages that were sent meanwhile, and
remembers spent limits and stops. Everybody reads the state; it changes by its own methods only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any, TypeGuard

import attrs

from stepengine.data import events as ev
from stepengine.data.effects import AskPerson, CallModel, Effect, Gather, Leaf
from stepengine.data.estimate import Measured, transcript_tokens
from stepengine.data.hooks import Change, HookContext
from stepengine.data.json import JsonDict, JsonValue, freeze
from stepengine.data.limits import Limits
from stepengine.data.makers import changer_of
from stepengine.data.messages import Message, ToolCallLog, UserMessage
from stepengine.data.models import ModelReply, StopReason
from stepengine.data.outcomes import Failure, Gathered, Single, Stop, Value
from stepengine.data.questions import Question
from stepengine.data.state import AgentState, ChildResult, RunPhase
from stepengine.data.tools import ToolBinding, ToolLike, ToolSpec
from stepengine.data.transcript import Transcript
from stepengine.data.usage import Spending, Usage, add_cost, known_costs, quick_spending, quick_usage
from stepengine.errors import (
    AgentError,
    BadYield,
    ContextOverflow,
    DataError,
    LimitExceeded,
    LimitReached,
    OutputMissing,
    StepEngineError,
    UnknownModel,
)
from stepengine.machine.finding import with_finder
from stepengine.machine.history import CallIds, History
from stepengine.machine.plan import RunPlan
from stepengine.machine.protocol import PHASES, REFUSALS, Flow
from stepengine.machine.signals import Stopped

__all__ = ("RunState", "SideEvents", "Spent", "is_spent", "raised")

MAX_TOKENS = StopReason.MAX_TOKENS
OF_A_STEP = ("step", "final_answer")
ZERO = Decimal(0)

state_now = changer_of(
    AgentState,
    *("child_run_ids", "message_history", "view", "system_prompt", "tool_definitions", "output", "steps_remaining"),
    *("step_index", "usage", "cost", "credits_used", "context", "pending", "next_call"),
)
"""What changes in a run, put into the state that it began with; not by name, since so many names cost a microsecond."""


def is_spent(error: BaseException) -> TypeGuard[LimitExceeded]:
    """Return whether *error* says that a budget of the run is spent, not only that one effect was refused."""
    return isinstance(error, LimitExceeded) and error.kind not in REFUSALS


def raised(error: StepEngineError) -> StepEngineError | LimitReached:
    """Return what is raised for the error of a failed effect: a spent budget arrives as a signal."""
    return LimitReached(error) if is_spent(error) else error


class RunState:
    """
    Everything about a run that changes while it runs.

    Attributes:
        plan: What it was started with.
        agent: Its agent.
        limits: The limits in force.
        bindings: Every tool that it may call, by name.
        offered: The specifications of the agent's own tools, by name.
        specs: The specifications that requests carry: its own or those that it inherited.
        definitions: These by name.
        history: Record and view.
        call_ids: Gives calls their ids; *coming_call_id* tells them before, and holds nothing else of the run.
        spent: What it and its children spent.
        side_events: What handlers and hooks say on the side; their logger.
        seq: The next effect's number.
        now: Milliseconds since the root was created.
        step: The step that runs or comes next.
        step_index: How many steps have begun.
        steps_remaining: How many are left.
        steps_complete: Whether the last step ended the turn, or no step is left.
        has_asked: Whether the handler asked for a step.
        truncated: Whether the last reply was cut, or the turn was.
        only_thoughts: How many replies in a row were only thoughts.
        stop_reason: Why the last reply stopped.
        limit: The first budget that was spent.
        stop: Why the world ended the run.
        system_prompt: The system prompt in force.
        inbox: What was sent to the run and waits for its place.
        tail: Messages at the end of every request, from ``pre_run``.
        output: The output so far; *has_output* tells ``None`` from none, *output_issues* what was wrong with the last attempt.
        pending: The questions that it is suspended on; *waiting* are those that the continued run was suspended on.
        began: Whether it got past its ``pre_run`` hooks.
        measured: What the provider last reported of the prompt.
        tool_log: The calls that were carried out.
        thinking: The thoughts of its replies.
        warnings: What was noted and dropped.
        problems: What went wrong with closing the handler.
    """

    __slots__ = (
        "_actions",
        "_context",
        "_denials",
        "_denied_in_row",
        "_frozen",
        "_overflow",
        "_phase",
        "_question_keys",
        "_refused_tokens",
        "_start",
        "_stops_refused",
        "_values",
        "agent",
        "began",
        "bindings",
        "call_ids",
        "coming_call_id",
        "definitions",
        "has_asked",
        "has_output",
        "history",
        "inbox",
        "limit",
        "limits",
        "measured",
        "now",
        "offered",
        "only_thoughts",
        "output",
        "output_issues",
        "pending",
        "plan",
        "problems",
        "seq",
        "side_events",
        "specs",
        "spent",
        "step",
        "step_index",
        "steps_complete",
        "steps_remaining",
        "stop",
        "stop_reason",
        "system_prompt",
        "tail",
        "thinking",
        "tool_log",
        "truncated",
        "waiting",
        "warnings",
    )

    def __init__(self, plan: RunPlan, state: AgentState, offered: Mapping[str, ToolSpec]) -> None:
        """Begin with *state*; of the plan's tools, which the run may call, *offered* are its agent's own."""
        self.plan = plan
        plan.here()
        self.bindings: dict[str, ToolBinding] = plan.tools  # type: ignore[assignment]  # its own where something may be added
        self.offered = offered
        self.specs = tuple(offered.values()) if plan.sent is None else plan.sent
        self.definitions = JsonDict(offered if plan.sent is None else {s.name: s for s in plan.sent})
        self.agent = plan.definition
        self.limits: Limits = plan.limits
        self.seq, self.now = 0, plan.starts_at
        self.spent = Spent()
        self.side_events = SideEvents(self)
        self.inbox: list[UserMessage] = []
        self.tail: tuple[Message, ...] = ()
        self.stop_reason: StopReason | None = None
        self.steps_complete = self.has_asked = self.truncated = self.began = False
        self.limit: LimitExceeded | None = None
        self.stop: Stop | None = None
        self.measured: Measured | None = None
        self.only_thoughts = 0
        self.output_issues: tuple[str, ...] = ()
        self.pending: tuple[Question, ...] = ()
        self.problems: tuple[str, ...] = ()
        self.warnings: list[str] = []
        self.tool_log: list[ToolCallLog] = []
        self.thinking: list[str] = []
        self._values: dict[str, Any] = {}
        self._phase: tuple[RunPhase, str] = (RunPhase.IDLE, "")
        self._overflow: ContextOverflow | None = None
        self._refused_tokens: int | None = None
        self._actions = self._denials = self._stops_refused = 0
        self._denied_in_row: dict[str, int] = {}
        self._question_keys: set[str] = set()
        self._go_on_from(state)

    def _go_on_from(self, state: AgentState) -> None:
        self._start = state
        keeps = {name: b.spec.ephemeral for name, b in self.bindings.items() if b.spec.ephemeral is not None}
        self.history = History(state.message_history, state.view, keeps)
        self.system_prompt = state.system_prompt
        self._context = state.context
        self.output = state.output
        self.has_output = state.output is not None
        self.waiting = state.pending
        self.call_ids = CallIds(self.history, state.id_prefix, state.next_call)
        self.coming_call_id = self.call_ids.coming
        self.step_index = self.step = state.step_index
        self.steps_remaining = self.limits.max_steps or 0
        self._frozen: AgentState | None = None

    # --- what others are shown --------------------------------------------------------------------------------------

    @property
    def time(self) -> datetime:
        """The run's recorded time."""
        return self.plan.created + timedelta(milliseconds=self.now)

    def frozen(self) -> AgentState:
        """Return the state of this moment, frozen; during a step it is the state before the step."""
        known, history = self._frozen, self.history
        if known is not None and known.message_history is history.record and known.view is history.view:
            return known
        start, spent = self._start, self.spent
        children = spent.children
        self._frozen = value = state_now(
            start,
            tuple([c.run_id for c in children if c.run_id]) if children else (),
            history.record,
            history.view,
            self.system_prompt,
            self.definitions,
            self.output,
            self.steps_remaining,
            self.step_index,
            spent.usage(),
            spent.cost,
            spent.credits_used,
            self._context,
            self.pending,
            self.call_ids.next,
        )
        return value

    def model_of(self, override: str | None = None) -> str:
        """Return the model string in force, or raise ``UnknownModel`` when there is none."""
        model = override or self.plan.model
        if model:
            return model
        msg = (
            f"agent {self.agent.id!r} has no model: set AgentDefinition(model='provider/model') or "
            "Engine(default_model=...), or name one in StepWith or Complete"
        )
        raise UnknownModel(msg, kind="no_model")

    def inheritable(self, call_id: str = "") -> AgentState:
        """Return the state as a child that the call *call_id* spawns may inherit it; ``""`` for a handler's own."""
        state, sides = self.frozen(), self.history.inheritable(call_id)
        if sides.record is state.message_history and sides.view is state.view:
            return state
        return attrs.evolve(state, message_history=sides.record, view=sides.view)

    def hook_context(self, added: Sequence[Message] = ()) -> HookContext:
        """Return what every hook gets first."""
        plan = self.plan
        return HookContext(
            state=self.frozen(),
            agent=self.agent,
            session_id=plan.info.session_id,
            user_id=plan.info.user_id,
            metadata=plan.info.metadata,
            values=JsonDict(self._values),
            step_index=self.step,
            path=plan.path,
            now=self.time,
            logger=self.side_events,
            added=tuple(added),
            context_window=plan.context_window,
            overflow=self._overflow,
            refused_tokens=self._refused_tokens,
            measured=self.measured,
        )

    # --- numbers ----------------------------------------------------------------------------------------------------

    def number(self) -> int:
        """Return the next effect's number."""
        seq = self.seq
        self.seq = seq + 1
        return seq

    def named(self, key: str | None) -> str:
        """
        Return the name of a question that a handler asks, ``""`` for one without.

        Raises:
            BadYield: when this run has asked a question of that name before.
        """
        if key is None:
            return ""
        if key in self._question_keys:
            msg = (
                f"the key {key!r} names a question that this run has asked before; each has a name of its own, or none"
            )
            raise BadYield(msg)
        self._question_keys.add(key)
        return key

    # --- events -----------------------------------------------------------------------------------------------------

    def enter(self, phase: RunPhase, detail: str, seq: int) -> Sequence[ev.Event]:
        """Return what shows that the run does something else now, if it does and anybody watches (requirements N11)."""
        if self._phase == (phase, detail) or not self.plan.watched():
            return ()
        self._phase = (phase, detail)
        return (ev.PhaseChanged(path=self.plan.path, seq=seq, phase=phase, detail=detail),)

    def warn(self, *texts: str) -> None:
        """Note what went wrong and was dropped."""
        self.warnings.extend(texts)

    def tell(self, text: str) -> None:
        """Warn of something once, in the result and in an event."""
        if text not in self.warnings:
            self.warn(text)
            self.side_events.warning(text)

    # --- effects ----------------------------------------------------------------------------------------------------

    def gather(self, effects: Sequence[Leaf], **how: Any) -> Flow[Sequence[Single]]:
        """Ask for several effects at once, *how* as ``Gather`` says, and return one outcome per effect, in their order."""
        return (yield Gather(tuple(effects), **how)).outcomes if effects else ()  # type: ignore[union-attr]

    def before(self, effect: Effect) -> Sequence[ev.Event]:
        """Return what is shown before *effect*: what was said on the side, and the phase that the run enters with it."""
        said = self.side_events.take()
        first = effect.effects[0] if type(effect) is Gather else effect
        phase = PHASES[type(first)](first)
        return said if phase is None else (*said, *self.enter(*phase, first.seq))  # type: ignore[union-attr]

    def receive(self, outcome: Any, effect: Leaf | Gather) -> Single | Gathered:
        """
        Return the outcome of *effect*, after everything that it says beside its value was noted.

        A suspension that names no questions is given those of the ``AskPerson`` that it answers.
        """
        if isinstance(effect, Gather):
            return self._receive_all(outcome, effect.effects)
        kind = type(outcome)
        if kind is not Value and kind is not Failure and kind is not Stop:
            msg = f"the driver answered a {type(effect).__name__} with {outcome!r}"
            raise StepEngineError(msg)
        at = outcome.at
        if at > self.now:  # noqa: PLR1730 - a call less, for every outcome
            self.now = at
        if kind is Stop:
            return self._stopped_by(outcome, effect)
        if outcome.inputs:
            self.inbox.extend(outcome.inputs)
        if kind is Failure:
            self._note_failure(outcome.error, effect)
        received: Single = outcome
        return received

    def _receive_all(self, outcome: Any, effects: Sequence[Leaf]) -> Gathered:
        if type(outcome) is not Gathered or len(outcome.outcomes) != len(effects):
            msg = f"the driver answered a Gather of {len(effects)} with {outcome!r}"
            raise StepEngineError(msg)
        pairs = zip(outcome.outcomes, effects, strict=True)
        return Gathered(tuple([self.receive(one, effect) for one, effect in pairs]))  # type: ignore[misc]  # none is a Gather

    def _stopped_by(self, stop: Stop, effect: Leaf) -> Stop:
        if type(effect) is AskPerson and stop.kind == "suspended" and not stop.questions:
            stop = Stop(stop.kind, stop.at, stop.error, effect.questions)
        self.stop = self.stop or stop
        if stop.begun is not None and type(effect) is CallModel:
            self.spent.count(effect.request.model, stop.begun.usage, stop.begun.cost, 1)
            self._frozen = None
        return stop

    def _note_failure(self, error: StepEngineError, effect: Leaf) -> None:
        usage = getattr(error, "usage", None)
        if type(effect) is CallModel and isinstance(usage, Usage):
            self.spent.count(effect.request.model, usage, None, 0)
            self._frozen = None
        if is_spent(error):
            self.reach(error)

    def unwrap(self, outcome: Single) -> Any:
        """Return the value of a received outcome, or raise what happened instead."""
        if type(outcome) is Value:
            return outcome.value
        if type(outcome) is Failure:
            raise raised(outcome.error)
        self.count_stopped(outcome)  # type: ignore[arg-type]  # the third of three
        raise Stopped(outcome)  # type: ignore[arg-type]

    def take_reply(self, outcome: Any, effect: CallModel) -> ModelReply:
        """Return the reply that *outcome* holds; count it, and note how large the provider found a step's prompt (X45)."""
        reply: ModelReply = outcome.value if type(outcome) is Value else self.unwrap(outcome)
        used, request = reply.usage, effect.request
        self.spent.count(reply.model or request.model, used, reply.cost, 1)
        self._frozen = None
        if used is not None and used.prompt_tokens and effect.purpose in OF_A_STEP:
            self.measured = Measured(request.system_prompt, request.messages, used.prompt_tokens)
        return reply

    # --- spending and limits ----------------------------------------------------------------------------------------

    def count_reply(self, effect: CallModel, reply: ModelReply) -> None:
        """Add what a reply used and cost to the run."""
        self.spent.count(reply.model or effect.request.model, reply.usage, reply.cost, 1)
        self._frozen = None

    def count_child(self, child: ChildResult[Any]) -> None:
        """Add a child and what it spent to the run."""
        self.spent.count_child(child if child.left is None else attrs.evolve(child, left=None))
        self._frozen = None

    def count_stopped(self, stop: Stop) -> None:
        """Add the child whose end a stop reports, if it is one's."""
        if stop.child is not None:
            self.count_child(stop.child)

    def count_credits(self, credits_used: float) -> None:
        """Add credits that a tool reported."""
        self.spent.count_credits(credits_used)
        self._frozen = None

    def count_actions(self, count: int) -> None:
        """
        Count what the handler asked for beside steps (generator-contract G47).

        Raises:
            LimitReached: when that is more than the run may do.
        """
        self._actions += count
        limit = self.limits.max_actions
        if limit is not None and self._actions > limit:
            msg = (
                f"agent {self.agent.id!r} asked for more than {limit} actions; "
                "raise Limits(max_actions=...) or end the run earlier"
            )
            raise LimitReached(self.reach(LimitExceeded(msg, kind="actions", limit=limit)))

    def reach(self, error: LimitExceeded) -> LimitExceeded:
        """Note that a budget is spent; return the first one that was."""
        if self.limit is None:
            self.limit = error
        return self.limit

    def deny(self, tool_name: str) -> int:
        """Count a denied call; return how many calls of its tool in a row that makes. Too many of all end the run."""
        self._denials += 1
        row = self._denied_in_row[tool_name] = self._denied_in_row.get(tool_name, 0) + 1
        most = self.limits.max_denials
        if most is not None and self._denials >= most:
            msg = (
                f"{self._denials} tool calls of agent {self.agent.id!r} were denied, the last one of {tool_name!r}, and "
                f"max_denials is {most}; allow what it needs, tell it in its prompt what it may not do, or raise "
                "Limits(max_denials=...)"
            )
            self.reach(LimitExceeded(msg, kind="denials", limit=most))
        return row

    def allow(self, tool_name: str) -> None:
        """Take note that a call of a tool was not denied."""
        if self._denied_in_row:
            self._denied_in_row.pop(tool_name, None)

    # --- steps and turns --------------------------------------------------------------------------------------------

    def begin_run(self) -> None:
        """Take note that the ``pre_run`` hooks let the run begin."""
        self.began = True

    def ask_step(self) -> bool:
        """Take note that a step is asked for; return whether one is left."""
        self.has_asked = True
        return self.steps_remaining > 0 and self.limit is None

    def begin_step(self) -> None:
        """Make room for a step: results that expired go, what was sent meanwhile stands in its place."""
        self.history.expire_results()
        if self.inbox:
            self.take_inbox()

    def use_step(self) -> None:
        """Take a step from the budget that is none of the turn: candidates."""
        self.steps_remaining -= 1
        self._frozen = None

    def count_step(self, reason: StopReason | None, *, only_thoughts: bool) -> int:
        """Take the step whose reply has come from the budget; return how many replies in a row were only thoughts."""
        self.steps_remaining -= 1
        self.step_index += 1
        self._frozen = None
        self.stop_reason = reason
        self.truncated = reason is MAX_TOKENS
        self.only_thoughts = self.only_thoughts + 1 if only_thoughts else 0
        return self.only_thoughts

    def cut_turn(self, why: str) -> None:
        """End the turn here, whatever the model wants."""
        self.truncated = True
        self.warn(why)

    def end_step(self) -> None:
        """Take note that a step is over."""
        self.step = self.step_index
        self.history.expire("agent_step")

    def end_turn(self, *, complete: bool) -> bool:
        """Take note of whether the turn is complete."""
        self.steps_complete = complete
        return complete

    def let_stop(self) -> None:
        """Take note that a turn ended, so that hooks may refuse the next end as often again."""
        self._stops_refused = 0

    def refuse_stop(self, most: int) -> bool:
        """Take note that a hook wants the turn to go on; return whether it may want that, *most* times in a row."""
        if self._stops_refused >= most:
            return False
        self._stops_refused += 1
        return True

    def end_with(self, reason: StopReason | None) -> None:
        """Take note of why the last words of a run stopped."""
        self.stop_reason = reason

    def too_long(self, overflow: ContextOverflow | None) -> None:
        """Tell hooks from now on that the prompt was refused as too long; ``None`` ends that."""
        self._overflow = overflow
        self._refused_tokens = None if overflow is None else self.frozen().context_tokens

    # --- changes ----------------------------------------------------------------------------------------------------

    def take_inbox(self) -> bool:
        """Append what was sent to the run meanwhile; return whether there was anything (generator-contract G54)."""
        if not self.inbox:
            return False
        self.history.add([m if m.tags else UserMessage(m.content, ("USER_PROMPT",)) for m in self.inbox])
        self.inbox = []
        return True

    def reopen_step(self, said: Sequence[UserMessage]) -> bool:
        """
        Hold the step in which the continued run was suspended beside the history; return whether there is one.

        *said*, what the run begins with, will follow its results.
        """
        later = self.history.reopen()
        if self.history.open_step is None:
            return False
        self.inbox += [*later, *said]
        return True

    def apply(self, change: Change, by: str = "") -> None:
        """Make a change that a hook or tool asked for; *by* names it in the event about a smaller prompt."""
        self._frozen = None
        before = self.history.view
        if change.messages is not None or change.view is not None:
            self.history.replace(change.messages, change.view, has_begun=self.began)
            self.side_events.compacted(by, before, self.history.view, record=change.messages is not None)
        if change.system_prompt is not None:
            self.system_prompt = change.system_prompt
        if change.context is not None:
            merged = {**self._context, **change.context}
            self._context = freeze({k: v for k, v in merged.items() if v is not None})
        if change.values:
            self._values.update(change.values)
        if change.tools:
            self._adopt(change.tools)

    def _adopt(self, tools: Sequence[ToolLike]) -> None:
        """Know tools that were found when the run began, in the plan's own table, where performers look for them, too."""
        for tool in tools:
            self.bindings[tool.spec.name] = tool.binding()
        offered = {**self.offered, **{tool.spec.name: tool.spec for tool in tools}}
        self.offered = with_finder(offered, self.bindings)
        if self.plan.sent is None:
            self.specs = tuple(self.offered.values())
            self.definitions = JsonDict(self.offered)

    def take_history(self, child: ChildResult[Any], call_id: str) -> None:
        """Put history and context that an inline child leaves in the place of the run's own (generator-contract L25, L26)."""
        if child.left is not None and not child.is_error:
            record, view = self.history.left_by_inline(child.left, call_id)
            self._context = child.left.context
            self.apply(Change(messages=record, view=None if view is record else view))

    def keep_tail(self, tail: tuple[Message, ...]) -> None:
        """Send *tail* at the end of every request from now on."""
        self.tail = tail

    def suspend(self, questions: tuple[Question, ...]) -> None:
        """Take note of the questions that the run waits for."""
        self.pending = questions
        self._frozen = None

    def closed_with(self, problems: tuple[str, ...]) -> None:
        """Take note of what went wrong with closing the handler, and tell it."""
        self.problems = problems
        self.warn(*problems)
        for problem in problems:
            self.side_events.waiting.append(
                ev.HandlerNotice(path=self.plan.path, seq=self.seq, kind="handler_ignored_close", message=problem)
            )

    def think(self, *texts: str) -> None:
        """Keep thoughts of a reply."""
        self.thinking.extend(texts)

    def log_call(self, entry: ToolCallLog) -> None:
        """Add a call that has its result to the log of the run (requirements D10)."""
        self.tool_log.append(entry)

    # --- output -----------------------------------------------------------------------------------------------------

    def check_output(self, value: Any) -> Any:
        """
        Return *value* as the JSON that is stored.

        Raises:
            OutputMissing: when it does not fit the schema, or a validator of the author's raised.
        """
        assert self.plan.validate_output is not None  # noqa: S101
        try:
            return self.plan.validate_output(value)
        except StepEngineError:
            raise
        except Exception as error:
            issue = f"the check of the output raised {type(error).__name__}: {error}"
            msg = f"agent {self.agent.id!r}: {issue}"
            raise OutputMissing(msg, issues=(issue,)) from error

    def set_output(self, output: Any) -> None:
        """Replace the output."""
        self.output = freeze(output)
        self.has_output = True
        self.output_issues = ()
        self._frozen = None

    def count_output(self, *, given: bool) -> None:
        """Say whether there is an output, whatever value stands there: one that is no JSON, or one that is void now."""
        self.has_output = given

    def refuse_output(self, issues: tuple[str, ...]) -> None:
        """Take note of what is wrong with an output that was tried."""
        self.output_issues = issues


class SideEvents:
    """
    What handlers and hooks say on the side: notifications and log lines, held until the next effect (design 9).

    It is the logger and notifier of one run; it only remembers, the machine shows.
    """

    def __init__(self, run: RunState) -> None:
        self._run: RunState | None = run
        self.waiting: list[ev.Event] = []

    def close(self) -> None:
        """Let go of the run, which has ended, so that it is freed at once and not by the collector."""
        self._run = None

    def take(self) -> list[ev.Event]:
        """Return what waits and forget it."""
        waiting, self.waiting = self.waiting, []
        return waiting

    def _speaker(self, what: str) -> RunState:
        run = self._run
        if run is None:
            msg = f"{what} was used after its run had ended, when nobody is told of anything any more"
            raise AgentError(msg)
        if not run.plan.here():
            msg = (
                f"{what} of agent {run.agent.id!r} was used from another thread; a run is told of things in its own thread "
                "only. Return what the thread found from Perform(fn, ...) and say it in the handler"
            )
            raise AgentError(msg)
        return run

    def notify(self, message: str, data: Any = None) -> None:
        """Remember a notification."""
        run = self._speaker("ctx.notify")
        self.waiting.append(
            ev.Notification(path=run.plan.path, seq=run.seq, message=str(message), data=_json_or_what(data))
        )

    def compacted(self, by: str, before: Transcript, after: Transcript, *, record: bool) -> None:
        """Remember that *by* made what the model sees smaller, if it did (requirements I11)."""
        run, tokens = self._run, (transcript_tokens(before), transcript_tokens(after))
        if run is None or tokens[1] >= tokens[0]:
            return
        event = ev.Compacted(
            path=run.plan.path,
            seq=run.seq,
            by=by,
            record=record,
            tokens_before=tokens[0],
            tokens_after=tokens[1],
            messages_before=len(before),
            messages_after=len(after),
        )
        self.waiting.append(event)

    def todos(self, todos: JsonValue) -> None:
        """Remember that the todos are these now."""
        run = self._run
        if run is not None and run.plan.watched():
            self.waiting.append(ev.TodosChanged(path=run.plan.path, seq=run.seq, todos=todos))

    def debug(self, message: str, /, **data: Any) -> None:
        """Log for developers."""
        self._log("debug", message, data)

    def info(self, message: str, /, **data: Any) -> None:
        """Log for users who asked for detail."""
        self._log("info", message, data)

    def warning(self, message: str, /, **data: Any) -> None:
        """Log what somebody should look at."""
        self._log("warning", message, data)

    def error(self, message: str, /, **data: Any) -> None:
        """Log what went wrong."""
        self._log("error", message, data)

    def _log(self, level: str, message: str, data: dict[str, Any]) -> None:
        run = self._speaker("the logger")
        line = ev.LogLine(
            path=run.plan.path,
            seq=run.seq,
            level=level,
            message=str(message),
            data=_json_or_what(data) if data else None,
            step=run.step,
        )
        self.waiting.append(line)


def _json_or_what(data: Any) -> Any:
    try:
        return freeze(data)
    except DataError:
        return f"<{type(data).__name__} that is not JSON>"


class Spent:
    """
    Sums that only grow; a part of the cost that is unknown makes the sum unknown for ever (reliability I4).

    Attributes:
        children: The children, in the order in which they ended.
        cost: What the run and its children cost in US dollars; ``None`` when a part is unknown.
        credits_used: The credits that they used.
    """

    __slots__ = ("_by_model", "_children", "_own_cost", "_own_credits", "_usage", "children", "cost", "credits_used")

    def __init__(self) -> None:
        self._by_model: dict[str, _Tally] = {}
        self._own_cost: Decimal | None = ZERO
        self._own_credits: float = 0
        self._usage: Usage | None = None
        self.cost: Decimal | None = ZERO
        self.credits_used: float = 0
        self.children: list[ChildResult[Any]] = []
        self._children = NOTHING

    def count(self, model: str, usage: Usage | None, cost: Decimal | None, requests: int) -> None:
        """Add what one attempt of a model call used; *requests* is 1 when it gave a reply, else 0."""
        self._usage = None
        tally = self._by_model.get(model)
        if tally is None:
            tally = self._by_model[model] = _Tally()
        tally.add(usage, requests, cost)
        own = self._own_cost = None if cost is None or self._own_cost is None else self._own_cost + cost
        self.cost = add_cost(own, self._children.cost) if self.children else own

    def count_credits(self, credits_used: float) -> None:
        """Add credits that a tool reported."""
        self._own_credits += credits_used
        self.credits_used = self._own_credits + self._children.credits_used

    def count_child(self, child: ChildResult[Any]) -> None:
        """Add a child and what it spent."""
        self.children.append(child)
        others = self._children = self._children + child.spending
        self._usage = None
        self.cost = add_cost(self._own_cost, others.cost)
        self.credits_used = self._own_credits + others.credits_used

    def usage(self) -> Usage:
        """Return the tokens that the run and its children used."""
        if self._usage is None:
            if len(self._by_model) == 1:
                (only,) = self._by_model.values()
                own = only.usage()
            else:
                own = sum([tally.usage() for tally in self._by_model.values()], Usage())
            self._usage = own + self._children.usage if self.children else own
        return self._usage

    def total(self, agent_id: str) -> Spending:
        """Return everything, by agent and by model; *agent_id* is the run's own agent."""
        by_model = JsonDict({model: tally.usage() for model, tally in self._by_model.items()})
        own = sum(by_model.values(), Usage())
        by_agent = JsonDict({agent_id: own})
        agent_costs = known_costs(by_agent, {agent_id: self._own_cost})
        model_costs = known_costs(by_model, {model: tally.cost for model, tally in self._by_model.items()})
        mine = quick_spending(own, self._own_cost, self._own_credits, by_agent, by_model, agent_costs, model_costs)
        return mine + self._children if self.children else mine


NOTHING = Spending()


class _Tally:
    """A running sum of ``Usage`` and cost; the value is made when somebody looks."""

    __slots__ = ("_at_least", "_numbers", "_value", "cost")

    def __init__(self) -> None:
        self.cost: Decimal | None = ZERO
        self._numbers = [0, 0, 0, 0, 0, 0]
        self._at_least = False
        self._value: Usage | None = None

    def add(self, usage: Usage | None, requests: int, cost: Decimal | None) -> None:
        self._value = None
        self.cost = None if cost is None or self.cost is None else self.cost + cost
        numbers = self._numbers
        numbers[5] += requests
        if usage is None:
            self._at_least = True
            return
        numbers[0] += usage.input_tokens
        numbers[1] += usage.output_tokens
        numbers[2] += usage.cache_read_tokens
        numbers[3] += usage.cache_write_tokens
        numbers[4] += usage.reasoning_tokens
        self._at_least = self._at_least or usage.at_least

    def usage(self) -> Usage:
        if self._value is None:
            sent, said, read, written, thought, requests = self._numbers
            self._value = quick_usage(sent, said, read, written, thought, requests, self._at_least)
        return self._value
