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
from typing import Any, cast

import attrs

from stepengine.data.definition import HookContext
from stepengine.data.effects import AskPerson, CallModel, Compute, Gather, Leaf
from stepengine.data.estimate import Measured
from stepengine.data.hooks import Change
from stepengine.data.json import JsonDict, JsonValue, freeze
from stepengine.data.messages import Message, RequestedChange, ToolCallLog, UserMessage
from stepengine.data.models import ModelReply, StopReason
from stepengine.data.outcomes import BodyEnd, Failure, Gathered, SetOutput, Single, Stop, Value
from stepengine.data.questions import Question
from stepengine.data.state import AgentState
from stepengine.data.tools import RECALL_HISTORY, ToolBinding, ToolLike, ToolSpec
from stepengine.data.usage import Usage
from stepengine.errors import (
    BadYield,
    ContextOverflow,
    StepEngineError,
    UnknownModel,
)
from stepengine.machine.author import Author
from stepengine.machine.background import NO_CHILDREN, Background
from stepengine.machine.budget import Budget, is_spent, raisable_error
from stepengine.machine.finding import with_finder
from stepengine.machine.hand_off import HandOff
from stepengine.machine.history import CallIds, RunHistory
from stepengine.machine.output import Output
from stepengine.machine.plan import RunPlan
from stepengine.machine.protocol import Flow
from stepengine.machine.side_events import SideEvents
from stepengine.machine.signals import Stopped
from stepengine.machine.spent import Spent

__all__ = ("RunState",)

MAX_TOKENS = StopReason.MAX_TOKENS
OF_A_STEP = ("step", "final_answer")
ZERO = Decimal(0)


class RunState:
    """
    Everything about a run that changes while it runs.

    Attributes:
        plan: What it was started with.
        agent: Its agent.
        bindings: Every tool that it may call, by name.
        offered: The specifications of the agent's own tools, by name.
        specs: The specifications that requests carry: its own or those that it inherited.
        definitions: These by name.
        history: Record and view.
        call_ids: Gives calls their ids; *coming_call_id* tells them before, and holds nothing else of the run.
        budget: What it may still do.
        spent: What it and its children spent.
        output: Its output so far.
        side_events: What it says beside its effects, and what went wrong; the logger of handlers and hooks.
        seq: The next effect's number.
        now: Milliseconds since the root was created.
        step: The step that runs or comes next.
        step_index: How many steps have begun.
        steps_complete: Whether the last step ended the turn, or no step is left.
        has_asked: Whether the handler asked for a step.
        truncated: Whether the last reply was cut, or the turn was.
        only_thoughts: How many replies in a row were only thoughts.
        stop_reason: Why the last reply stopped.
        stop: Why the world ended the run.
        system_prompt: The system prompt in force.
        inbox: What was sent to the run and waits for its place.
        tail: Messages at the end of every request, from ``pre_run``.
        pending: The questions that it is suspended on; *waiting* are those that the continued run was suspended on.
        began: Whether it got past its ``pre_run`` hooks.
        measured: What the provider last reported of the prompt.
        tool_log: The calls that were carried out.
        thinking: The thoughts of its replies.
        changes: Of the body of a tool, what it wants changed in the run of its caller.
        computed: Of the body of a tool, what each ``Compute`` of it came to; ``None`` for one that failed.
        background: Its children in the background.
        authors: The author's generators that it is in: its handler or the body of a tool, and the hook or tool that this waits for.
        hand_off: Which agent has the conversation.
    """

    # Slots by hand, as this is the one class of the machine that is edited: what is frozen stands around it. A slip in
    # a name is an error so, and no new attribute that nobody reads.
    __slots__ = (
        "_context",
        "_entries",
        "_frozen",
        "_overflow",
        "_question_keys",
        "_refused_tokens",
        "_start",
        "_stops_refused",
        "_values",
        "agent",
        "authors",
        "background",
        "began",
        "bindings",
        "budget",
        "call_ids",
        "changes",
        "coming_call_id",
        "computed",
        "definitions",
        "hand_off",
        "has_asked",
        "history",
        "inbox",
        "measured",
        "now",
        "offered",
        "only_thoughts",
        "output",
        "pending",
        "plan",
        "seq",
        "side_events",
        "specs",
        "spent",
        "step",
        "step_index",
        "steps_complete",
        "stop",
        "stop_reason",
        "system_prompt",
        "tail",
        "thinking",
        "tool_log",
        "truncated",
        "waiting",
    )

    def __init__(self, plan: RunPlan, state: AgentState, offered: Mapping[str, ToolSpec]) -> None:
        """Begin with *state*; of the plan's tools, which the run may call, *offered* are its agent's own."""
        self.plan = plan
        plan.here()
        self.bindings: dict[str, ToolBinding] = plan.tools  # type: ignore[assignment]  # its own where something may be added
        self.offered = offered
        # What is sent and what may be called are two things: a child that inherits its ancestor's prompt sends that
        # one's tools byte for byte, so that the provider's prompt cache holds, and may call its own alone
        # (generator-contract:L18).
        self.specs = tuple(offered.values()) if plan.sent is None else plan.sent
        if plan.body is not None:
            # A child that inherits them is sent what its ancestor's requests began with, and no tool that only the body knows.
            self.definitions = cast("JsonDict", state.tool_definitions)
        else:
            self.definitions = JsonDict(offered if plan.sent is None else {s.name: s for s in plan.sent})
        self.agent = plan.definition
        # A child's time begins where its parent's is, as it is told in its `Spawn`: one clock for the tree, whatever
        # process drives which part.
        self.seq, self.now = 0, plan.starts_at
        self.budget = Budget(plan.limits, plan.definition.id)
        self.spent = Spent()
        self.output = Output(plan, state.output)
        self.side_events = SideEvents(self)
        self.inbox: list[UserMessage] = []
        self.tail: tuple[Message, ...] = ()
        self.stop_reason: StopReason | None = None
        self.steps_complete = self.has_asked = self.truncated = self.began = False
        self.stop: Stop | None = None
        self.measured: Measured | None = None
        self.only_thoughts = 0
        self.pending: tuple[Question, ...] = ()
        self.tool_log: list[ToolCallLog] = []
        self.thinking: list[str] = []
        self.changes: list[Change | SetOutput | UserMessage] = []
        self.computed: list[JsonValue] = []
        self.authors: list[Author] = []
        self.hand_off = HandOff(state.handed_to)
        # One empty value that all runs share: hardly a run has children in the background, and the question `is not
        # NO_CHILDREN` at each step costs no call.
        self.background: Background = NO_CHILDREN
        self._values: dict[str, Any] = {} if plan.body is None else dict(plan.body.values)
        self._overflow: ContextOverflow | None = None
        self._refused_tokens: int | None = None
        self._stops_refused = 0
        self._question_keys: set[str] = set()
        self._go_on_from(state)

    def _go_on_from(self, state: AgentState) -> None:
        self._start = state
        # The body of a tool has no conversation of its own: what it sees is its caller's, so nothing expires in it.
        is_body = self.plan.body is not None
        shown = () if is_body else self.bindings.items()
        keeps = {name: binding.spec.ephemeral for name, binding in shown if binding.spec.ephemeral is not None}
        recalled = RECALL_HISTORY in self.offered
        self.history = RunHistory(
            state.message_history,
            state.view,
            keeps,
            is_callers=is_body,
            left_out=state.left_out,
            keeps_left_out=recalled,
        )
        self.system_prompt = state.system_prompt
        self._context = state.context
        self.waiting = state.pending
        # Goes on where the state that the run starts from had stopped: two turns of one conversation share a history,
        # in which each id may stand once (reliability:I1).
        self.call_ids = CallIds(self.history, state.id_prefix, state.next_call)
        self.coming_call_id = self.call_ids.coming
        self.step_index = self.step = state.step_index
        self._frozen: AgentState | None = None
        self._entries = 0

    # --- what others are shown --------------------------------------------------------------------------------------

    @property
    def place(self) -> tuple[str, int] | None:
        """Of the body of a tool that runs a program of a model: its text, and the line where it waits, from 1."""
        program = self.authors[0].program if self.authors else None
        return None if program is None or program.file or not program.line else (program.code, program.line)

    @property
    def time(self) -> datetime:
        """The run's recorded time."""
        # A handler that asks for the time must be told the same on replay, so it is told the time of the last outcome,
        # which is recorded (generator-contract:G2).
        return self.plan.created + timedelta(milliseconds=self.now)

    def frozen(self) -> AgentState:
        """Return the state of this moment, frozen; during a step it is the state before the step."""
        # Kept until something changes: hooks, tools and handlers ask several times within a step, and a state that is
        # equal should be the same object, so that nobody compares transcripts. What has changed is seen by identity, so
        # nobody who changes something has to say so.
        known, history = self._frozen, self.history
        if known is not None and known.message_history is history.record and self._is_still(known):
            return known
        spent = self.spent
        self._entries = spent.entries
        self._frozen = value = attrs.evolve(
            self._start,
            child_run_ids=tuple(child.run_id for child in spent.children if child.run_id),
            message_history=history.record,
            view=history.view,
            system_prompt=self.system_prompt,
            tool_definitions=self.definitions,
            output=self.output.value,
            steps_remaining=self.budget.steps_left,
            step_index=self.step_index,
            usage=spent.usage(),
            cost=spent.cost,
            credits_used=spent.credits_used,
            context=self._context,
            pending=self.pending,
            next_call=self.call_ids.next,
            left_out=history.left_out,
            handed_to=self.hand_off.handed_to,
        )
        return value

    def _is_still(self, known: AgentState) -> bool:
        """Return whether a state equals that of the run; an id that was merely handed to a call does not make a difference."""
        # Everything that `frozen` puts in and that can change, by identity or as a number. What is not asked here
        # follows from what is.
        return (
            known.view is self.history.view
            and self._entries == self.spent.entries
            and known.steps_remaining == self.budget.steps_left
            and known.step_index == self.step_index
            and known.output is self.output.value
            and known.context is self._context
            and known.system_prompt is self.system_prompt
            and known.tool_definitions is self.definitions
            and known.pending is self.pending
            and known.handed_to == self.hand_off.handed_to
        )

    def model_of(self, override: str | None = None) -> str:
        """Return the model string in force, or raise ``UnknownModel`` when there is none."""
        model = override or self.plan.model
        if model:
            return model
        # Raised when a step is asked for and not when the run is planned: an agent whose handler calls only tools needs
        # no model.
        msg = (
            f"agent {self.agent.id!r} has no model: set AgentDefinition(model='provider/model') or "
            "Engine(default_model=...), or name one in StepWith or Complete"
        )
        raise UnknownModel(msg, kind="no_model")

    def own_background(self) -> Background:
        """Return the registry of background children, for code that starts some."""
        if self.background is NO_CHILDREN:
            self.background = Background()
        return self.background

    def inheritable(self, call_id: str = "") -> AgentState:
        """Return the state as a child that the call *call_id* spawns may inherit it; ``""`` for a handler's own."""
        # While a step is open the record stands before it, and the reply that spawns is held beside: the child sees
        # what that reply said up to the call, and no call without a result (reliability:SP11).
        state, sides = self.frozen(), self.history.inheritable(call_id)
        if sides.record is state.message_history and sides.view is state.view:
            return state
        return attrs.evolve(state, message_history=sides.record, view=sides.view)

    def hook_context(self, added: Sequence[Message] = (), source: str = "") -> HookContext:
        """Return what every hook gets first; *source* is who asks for the call that it is about."""
        plan = self.plan
        return HookContext(
            state=self.frozen(),
            agent=self.agent,
            session_id=plan.info.session_id,
            user_id=plan.info.user_id,
            metadata=plan.info.metadata,
            params=plan.params_json,
            values=JsonDict(self._values),
            step_index=self.step,
            path=plan.path,
            now=self.time,
            logger=self.side_events,
            added=tuple(added),
            # Looked up when the run was planned, and recorded: a price list that knows another window next month must
            # not make an old run prune elsewhere.
            context_window=plan.context_window,
            overflow=self._overflow,
            refused_tokens=self._refused_tokens,
            measured=self.measured,
            source=source,
        )

    # --- numbers ----------------------------------------------------------------------------------------------------

    def number(self) -> int:
        """Return the next effect's number."""
        # When the effect is made, not when it begins or ends: so an address follows from the program alone, whoever is
        # faster (reliability:I2).
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
        # An answer is given by name, perhaps days later and from another process; with two questions of one name it
        # would be a matter of chance which of them it answers.
        if key in self._question_keys:
            msg = (
                f"the key {key!r} names a question that this run has asked before; each has a name of its own, or none"
            )
            raise BadYield(msg)
        self._question_keys.add(key)
        return key

    # --- effects ----------------------------------------------------------------------------------------------------

    def gather(self, effects: Sequence[Leaf], **how: Any) -> Flow[Sequence[Single]]:
        """Ask for several effects at once, *how* as ``Gather`` says, and return one outcome per effect, in their order."""
        # Of nothing there is no effect: an empty Gather would take a turn of the loop, and a place in the record, for
        # no outcome.
        return (yield Gather(tuple(effects), **how)).outcomes if effects else ()  # type: ignore[union-attr]

    def receive(self, outcome: Any, effect: Leaf | Gather | Compute) -> Single | Gathered:
        """
        Return the outcome of *effect*, after noting everything that it carries beside its value.

        A suspension that names no questions is given those of the ``AskPerson`` that it answers.
        """
        if isinstance(effect, Gather):
            return self._receive_all(outcome, effect.effects)
        # A driver that answers with something else is a bug in that driver, and there are several (the loop, walks, the
        # simulation, the debugger). Without this it would show much later, as an AttributeError in an author's handler.
        kind = type(outcome)
        if kind is not Value and kind is not Failure and kind is not Stop:
            msg = f"the driver answered a {type(effect).__name__} with {outcome!r}"
            raise StepEngineError(msg)
        if kind is Stop:
            self.now = max(self.now, outcome.at)
            return self._stopped_by(outcome, effect)
        self.hear(outcome)
        if kind is Failure:
            self._note_failure(outcome.error, effect)
        received: Single = outcome
        return received

    def hear(self, outcome: Value | Failure) -> None:
        """Take note of the time of an outcome, and of what was sent to the run meanwhile."""
        # The only clock of a run: the time of its latest outcome. Outcomes of a group may come back in another order
        # than they ended, hence the maximum; time never goes back (reliability:JR28).
        self.now = max(self.now, outcome.at)
        # Messages that were sent to the run travel inside the outcome of the effect during which they came. So they
        # stand in its record, and a replay has them at the same place (replay:J16).
        if outcome.inputs:
            self.inbox.extend(outcome.inputs)

    def _receive_all(self, outcome: Any, effects: Sequence[Leaf]) -> Gathered:
        # The number is checked, since outcomes belong to their effects by position alone: one that is missing would
        # give everybody behind it the result of its neighbour.
        if not isinstance(outcome, Gathered) or len(outcome.outcomes) != len(effects):
            msg = f"the driver answered a Gather of {len(effects)} with {outcome!r}"
            raise StepEngineError(msg)
        pairs = zip(outcome.outcomes, effects, strict=True)
        return Gathered(tuple([self.receive(one, effect) for one, effect in pairs]))  # type: ignore[misc]  # none is a Gather

    def _stopped_by(self, stop: Stop, effect: Leaf | Compute) -> Stop:
        if isinstance(effect, AskPerson) and stop.kind == "suspended" and not stop.questions:
            stop = Stop(stop.kind, stop.at, stop.error, effect.questions)
        # The first stop is why the run ends; members of a group that are cut because of it bring stops of their own.
        self.stop = self.stop or stop
        # What a model call had used when it was cut off was paid for, although no reply ever came (reliability:MP30).
        if stop.begun is not None and isinstance(effect, CallModel):
            self.spent.count(effect.request.model, stop.begun.usage, stop.begun.cost, 1)
        return stop

    def _note_failure(self, error: StepEngineError, effect: Leaf | Compute) -> None:
        # By name: some errors of models tell what the failed attempts had used, and the sums of the run hold it
        # (reliability:I10).
        usage = getattr(error, "usage", None)
        if isinstance(effect, CallModel) and isinstance(usage, Usage):
            self.spent.count(effect.request.model, usage, None, 0)
        if is_spent(error):
            self.budget.reach(error)

    def unwrap(self, outcome: Single) -> Any:
        """Return the value of a received outcome, or raise what happened instead."""
        if isinstance(outcome, Value):
            return outcome.value
        if isinstance(outcome, Failure):
            # A spent limit is raised as a `BaseException`: an author's `except Exception` around a step must not take
            # it for a tool that failed, or the handler would go on without a budget (reliability:GN09).
            raise raisable_error(outcome.error)
        self.spent.count_stopped(outcome)
        raise Stopped(outcome)

    def take_reply(self, outcome: Any, effect: CallModel) -> ModelReply:
        """Return the reply that *outcome* holds; count it, and note how large the provider found a step's prompt."""
        # The value is taken here without a call where there is one, as nearly always.
        reply: ModelReply = outcome.value if isinstance(outcome, Value) else self.unwrap(outcome)
        used, request = reply.usage, effect.request
        self.spent.count(reply.model or request.model, used, reply.cost, 1)
        # How large the next request is can only be estimated; what the provider counted for this one corrects the
        # estimate (generator-contract:P2). Only steps send the conversation, so only they measure it.
        if used is not None and used.prompt_tokens and effect.purpose in OF_A_STEP:
            self.measured = Measured(request.system_prompt, request.messages, used.prompt_tokens)
        if "unread" in reply.provider_data:
            self.side_events.unread(reply)
        return reply

    # --- steps and turns --------------------------------------------------------------------------------------------

    def begin_run(self) -> None:
        """Take note that the ``pre_run`` hooks let the run begin."""
        self.began = True

    def ask_step(self) -> bool:
        """Take note that a step is asked for; return whether one is left."""
        self.has_asked = True
        return self.budget.steps_left > 0 and self.budget.reached is None

    def begin_step(self) -> None:
        """Prepare a step: expired results are removed, and messages that arrived meanwhile are appended."""
        # Before the request is made, and in the view alone: what an ephemeral tool said earlier is not sent again, and
        # the record keeps it (reliability:TL23).
        self.history.expire_results()
        if self.steps_complete:
            self.output.start_turn()
        if self.inbox:
            self.take_inbox()

    def count_step(self, reason: StopReason | None, *, only_thoughts: bool) -> int:
        """Deduct from the budget the step whose reply has arrived; return how many replies in a row were only thoughts."""
        # Counted when the reply is there, not when it is asked for: a request that failed for good is no step, and a
        # handler that catches the error still has its step.
        self.budget.take_step()
        self.step_index += 1
        self.stop_reason = reason
        self.truncated = reason is MAX_TOKENS
        self.only_thoughts = self.only_thoughts + 1 if only_thoughts else 0
        return self.only_thoughts

    def cut_turn(self, why: str) -> None:
        """End the turn here, whatever the model wants."""
        self.truncated = True
        self.side_events.warn(why)

    def end_step(self) -> None:
        """Take note that a step is over."""
        self.step = self.step_index
        self.history.expire("agent_step")

    def end_turn(self, *, complete: bool) -> bool:
        """Take note of whether the turn is complete."""
        self.steps_complete = complete
        return complete

    def let_stop(self) -> None:
        """Note that a turn ended, so that hooks may refuse the next end just as often."""
        self._stops_refused = 0

    def refuse_stop(self, most: int) -> bool:
        """Note that a hook wants the turn to go on; return whether it may, which is at most *most* times in a row."""
        # A hook that never lets the turn end would spend the whole step budget, with the model saying at each step that
        # it is done.
        if self._stops_refused >= most:
            return False
        self._stops_refused += 1
        return True

    def end_with(self, reason: StopReason | None) -> None:
        """Take note of why the last words of a run stopped."""
        self.stop_reason = reason

    def too_long(self, overflow: ContextOverflow | None) -> None:
        """From now on tell hooks that the prompt was refused as too long; ``None`` ends that."""
        self._overflow = overflow
        # Counted at the moment of the refusal, since a hook shortens the view before others ask how large it was.
        self._refused_tokens = None if overflow is None else self.frozen().context_tokens

    # --- changes ----------------------------------------------------------------------------------------------------

    def take_inbox(self) -> bool:
        """Append what was sent to the run meanwhile; return whether there was anything."""
        if not self.inbox:
            return False
        # Here, and not when they arrive: between a call and its result no message may stand. Untagged ones are what a
        # person typed, and the tag is what pruning goes by: the live request must survive it, however the text came.
        # Messages that tools or policies sent bring tags of their own, and are no request.
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
        # Behind the results that are still to come, for the same reason as in `take_inbox`.
        self.inbox += [*later, *said]
        return True

    def apply(self, change: RequestedChange, by: str = "") -> None:
        """
        Make a change that a hook or tool asked for; *by* names it in the event about a smaller prompt.

        In the body of a tool it waits until the call has its result: the conversation is the caller's. What the next call of the
        body may look at, context and values, is there at once.
        """
        assert isinstance(change, Change)  # noqa: S101 - the one implementation
        # Made here as well, a change would be made twice: now, and when the call has its result. And in between a crash
        # could leave a conversation that a call changed which never ended.
        if self.plan.body is not None:
            self.changes.append(change)
            change = Change(context=change.context, values=change.values)
        before = self.history.view
        if change.messages is not None or change.view is not None:
            self.history.replace(change.messages, change.view, has_begun=self.began)
            self.side_events.compacted(by, before, self.history.view, record=change.messages is not None)
        if change.system_prompt is not None:
            self.system_prompt = change.system_prompt
        if change.context is not None:
            merged = {**self._context, **change.context}
            # `None` deletes, since JSON has no other word for that a tool could return.
            self._context = freeze({k: v for k, v in merged.items() if v is not None})
        if change.values:
            self._values.update(change.values)
        if change.tools:
            self._adopt(change.tools)

    def _adopt(self, tools: Sequence[ToolLike]) -> None:
        """Add tools that were found when the run began to the plan's own table, where performers look for them, too."""
        # Into the table of the plan itself: performers look there for what to run. The plan has its own copy where
        # anything may be added.
        for tool in tools:
            self.bindings[tool.spec.name] = tool.binding()
        offered = {**self.offered, **{tool.spec.name: tool.spec for tool in tools}}
        self.offered = with_finder(offered, self.bindings)
        # A run that sends inherited tools may call the new ones; its requests stay byte for byte what they were.
        if self.plan.sent is None:
            self.specs = tuple(self.offered.values())
            self.definitions = JsonDict(self.offered)

    def take_body(self, body: BodyEnd, by: str, *, was_stopped: bool = False) -> None:
        """
        Count what the body of the tool *by* spent, and make the changes that it leaves, in their order.

        Of one that was stopped only what was sent to it is taken: the rest comes when it has gone on to its end.
        """
        self.spent.count_body(body)
        # In the order in which the body made them, as if the caller had made them itself.
        for change in body.changes:
            if isinstance(change, UserMessage):
                self.inbox.append(change)
            elif was_stopped:
                continue
            elif isinstance(change, Change):
                self.apply(change, by)
                if self.plan.body is None and change.context is not None and "todos" in change.context:
                    self.side_events.todos(change.context["todos"])
            else:
                self.output.set(change.value)
                self.note_output()

    def hand_on_inbox(self) -> None:
        """Pass what was sent to the body of a tool to its caller, to whose conversation it belongs."""
        self.changes += self.inbox
        self.inbox = []

    def note_output(self) -> None:
        """Note that the output was set: what the body of a tool sets belongs to its caller."""
        if self.plan.body is not None:
            self.changes.append(SetOutput(self.output.value))

    @property
    def values(self) -> Mapping[str, Any]:
        """What hooks share with later ones."""
        return self._values

    def take_history(self, left: AgentState, call_id: str = "") -> None:
        """Replace the run's history and context by what an inline child left, which the call *call_id* started."""
        record, view = self.history.left_by_inline(left, call_id)
        self._context = left.context
        self.apply(Change(messages=record, view=None if view is record else view))

    def keep_tail(self, tail: tuple[Message, ...]) -> None:
        """Send *tail* at the end of every request from now on."""
        self.tail = tail

    def suspend(self, questions: tuple[Question, ...]) -> None:
        """Take note of the questions that the run waits for."""
        self.pending = questions

    def think(self, *texts: str) -> None:
        """Keep thoughts of a reply."""
        self.thinking.extend(texts)

    def log_call(self, entry: ToolCallLog) -> None:
        """Add a call that has its result to the log of the run."""
        self.tool_log.append(entry)
