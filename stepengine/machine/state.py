"""
The mutable inside of one run. Nobody outside the machine ever sees it; what leaves it is frozen.

Whoever needs something of the world yields the effect, and gets the outcome from there; ``exchange`` of ``run`` stands between,
alone. ``receive`` is where an outcome comes back: it sets the run's time, collects messages that were sent meanwhile, and
remembers spent limits and stops. Everybody reads the state; it changes by its own methods only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, cast

import attrs

from stepengine.data.hooks import Change, HookContext
from stepengine.data.json import JsonDict, JsonValue, freeze
from stepengine.data.messages import Message, ToolCallLog, UserMessage
from stepengine.data.models import StopReason
from stepengine.data.outcomes import BodyEnd, SetOutput
from stepengine.data.questions import Question
from stepengine.data.state import AgentState
from stepengine.data.tools import RECALL_HISTORY, ToolBinding, ToolLike, ToolSpec
from stepengine.errors import (
    BadYield,
    UnknownModel,
)
from stepengine.machine.background import NO_CHILDREN, Background
from stepengine.machine.budget import Budget
from stepengine.machine.effect_channel import EffectChannel
from stepengine.machine.finding import with_finder
from stepengine.machine.hand_off import HandOff
from stepengine.machine.history import CallIds, RunHistory
from stepengine.machine.output import Output
from stepengine.machine.plan import RunPlan
from stepengine.machine.progress import Progress
from stepengine.machine.prompt import Prompt
from stepengine.machine.side_events import SideEvents
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
        computed: Of the body of a tool, what each ``Compute`` of it came to.
        place: Of the body of a tool, the text that it works through and the line of that, from 1, where it is.
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
        "_question_keys",
        "_start",
        "_values",
        "agent",
        "background",
        "bindings",
        "budget",
        "call_ids",
        "changes",
        "coming_call_id",
        "computed",
        "definitions",
        "effects",
        "hand_off",
        "history",
        "offered",
        "output",
        "pending",
        "place",
        "plan",
        "progress",
        "prompt",
        "side_events",
        "specs",
        "spent",
        "tool_log",
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
        self.budget = Budget(plan.limits, plan.definition.id)
        self.spent = Spent()
        self.output = Output(plan, state.output)
        self.side_events = SideEvents(self)
        self.pending: tuple[Question, ...] = ()
        self.tool_log: list[ToolCallLog] = []
        self.changes: list[Change | SetOutput | UserMessage] = []
        self.computed: list[JsonValue] = []
        self.place: tuple[str, int] | None = None
        self.hand_off = HandOff(state.handed_to)
        # One empty value that all runs share: hardly a run has children in the background, and the question `is not
        # NO_CHILDREN` at each step costs no call.
        self.background: Background = NO_CHILDREN
        self._values: dict[str, Any] = {} if plan.body is None else dict(plan.body.values)
        self._question_keys: set[str] = set()
        self._go_on_from(state)
        self.effects = EffectChannel(plan.created, plan.starts_at, self.history, self.budget, self.spent)

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
        self.prompt = Prompt(state.system_prompt)
        self._context = state.context
        self.waiting = state.pending
        # Goes on where the state that the run starts from had stopped: two turns of one conversation share a history,
        # in which each id may stand once (reliability:I1).
        self.call_ids = CallIds(self.history, state.id_prefix, state.next_call)
        self.coming_call_id = self.call_ids.coming
        self.progress = Progress(state.step_index, self.budget)
        self._frozen: AgentState | None = None
        self._entries = 0

    # --- what others are shown --------------------------------------------------------------------------------------

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
            system_prompt=self.prompt.system,
            tool_definitions=self.definitions,
            output=self.output.value,
            steps_remaining=self.budget.steps_left,
            step_index=self.progress.step_index,
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
            and known.step_index == self.progress.step_index
            and known.output is self.output.value
            and known.context is self._context
            and known.system_prompt is self.prompt.system
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
            step_index=self.progress.step,
            path=plan.path,
            now=self.effects.time,
            logger=self.side_events,
            added=tuple(added),
            # Looked up when the run was planned, and recorded: a price list that knows another window next month must
            # not make an old run prune elsewhere.
            context_window=plan.context_window,
            overflow=self.prompt.overflow,
            refused_tokens=self.prompt.refused_tokens,
            measured=self.prompt.measured,
            source=source,
        )

    # --- numbers ----------------------------------------------------------------------------------------------------

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

    # --- changes ----------------------------------------------------------------------------------------------------

    def apply(self, change: Change, by: str = "") -> None:
        """
        Make a change that a hook or tool asked for; *by* names it in the event about a smaller prompt.

        In the body of a tool it waits until the call has its result: the conversation is the caller's. What the next call of the
        body may look at, context and values, is there at once.
        """
        # Made here as well, a change would be made twice: now, and when the call has its result. And in between a crash
        # could leave a conversation that a call changed which never ended.
        if self.plan.body is not None:
            self.changes.append(change)
            change = Change(context=change.context, values=change.values)
        before = self.history.view
        if change.messages is not None or change.view is not None:
            self.history.replace(change.messages, change.view, has_begun=self.progress.began)
            self.side_events.compacted(by, before, self.history.view, record=change.messages is not None)
        if change.system_prompt is not None:
            self.prompt.replace_system(change.system_prompt)
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

    def take_computed(self, value: JsonValue, text: str = "") -> None:
        """Take what a ``Compute`` came to, ``None`` for one that failed, and where in its *text* the body waits then."""
        self.computed.append(value)
        line: Any = value.get("line") if text and isinstance(value, Mapping) else None
        self.place = (text, line) if type(line) is int else None

    def take_body(self, body: BodyEnd, by: str, *, was_stopped: bool = False) -> None:
        """
        Count what the body of the tool *by* spent, and make the changes that it leaves, in their order.

        Of one that was stopped only what was sent to it is taken: the rest comes when it has gone on to its end.
        """
        self.spent.count_body(body)
        # In the order in which the body made them, as if the caller had made them itself.
        for change in body.changes:
            if isinstance(change, UserMessage):
                self.history.inbox.append(change)
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
        self.changes += self.history.remove_inbox()

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

    def suspend(self, questions: tuple[Question, ...]) -> None:
        """Take note of the questions that the run waits for."""
        self.pending = questions

    def log_call(self, entry: ToolCallLog) -> None:
        """Add a call that has its result to the log of the run."""
        self.tool_log.append(entry)
