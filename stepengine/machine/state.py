"""
The mutable state of one run, used by the machine alone; values that leave it are frozen.

Code that needs something of the world yields the effect; ``relay_effects`` of ``run`` passes it on and receives the outcome. A
``RunState`` consists of parts. Each has one responsibility and knows nothing of the run. Nearly all changes go through its methods.
Other modules set a few attributes, such as ``history.end_turn_message`` and ``prompt.tail``, and fill the queues ``history.inbox`` and
``side_events.waiting``:

- ``effects``: numbers, clock, and the stop; outcomes are received here, and their sources for policies that follow data.
- ``history``: record and view of the conversation, and the messages that wait for their place in it.
- ``prompt``: what requests carry beside the history, and how large providers found them.
- ``tools``: which tools the run may call and which ones it sends; ids and log of its calls.
- ``progress``: steps and turns, and the author's generators that the run is in.
- ``budget`` and ``spent``: what the run may still do; what it and its children used.
- ``output``: the output so far, and the last texts, which are the output of most runs. ``side_events``: notifications, log lines and warnings.
- ``shared``: the data that tools and hooks share. ``questions``: what people are asked.
- ``children``: the other agents. ``body``: for the body of a tool, what it leaves to its caller.
- ``snapshot``: the frozen state, made from the other parts.

What is left here concerns several parts at once: a change, the end of a tool's body, the context of a hook.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import attrs

from stepengine.data.definition import HookContext
from stepengine.data.estimate import Measured
from stepengine.data.hooks import Change
from stepengine.data.json import JsonDict, JsonValue, freeze
from stepengine.data.messages import Message, RequestedChange, UserMessage
from stepengine.data.models import ModelRequest
from stepengine.data.outcomes import BodyEnd, SetOutput
from stepengine.data.questions import Question
from stepengine.data.state import AgentState
from stepengine.data.tools import RECALL_HISTORY, ToolSpec
from stepengine.errors import BadYield, ContextOverflow
from stepengine.machine.background import Children
from stepengine.machine.budget import Budget
from stepengine.machine.effect_channel import EffectChannel
from stepengine.machine.history import LastTexts, RunHistory
from stepengine.machine.output import Output
from stepengine.machine.plan import RunPlan
from stepengine.machine.progress import Progress
from stepengine.machine.run_tools import ResultShortener, RunTools
from stepengine.machine.side_events import SideEvents
from stepengine.machine.sources import make_run_sources, needs_provenance
from stepengine.machine.usage_totals import UsageTotals


class Prompt:
    """
    System prompt and tail of one run, and the sizes that providers reported.

    Attributes:
        system: The system prompt in force.
        tail: Messages at the end of every request, from ``pre_run``.
        measured: The size that the provider last reported for a request of a step.
        overflow: The refusal of the current request as too long; hooks are shown it.
        refused_tokens: The estimated size of what was refused.
        placeholders: The values of the placeholders in the agent's prompts, by name.
    """

    __slots__ = ("measured", "overflow", "placeholders", "refused_tokens", "system", "tail")

    def __init__(self, system: str) -> None:
        self.system = system
        self.tail: tuple[Message, ...] = ()
        self.measured: Measured | None = None
        self.overflow: ContextOverflow | None = None
        self.refused_tokens: int | None = None
        self.placeholders: Mapping[str, str] = {}

    def record_measure(self, request: ModelRequest, tokens: int) -> None:
        """Record the provider's token count for *request*."""
        self.measured = Measured(request.system_prompt, request.messages, tokens)


class SharedData:
    """
    Context and values of one run.

    Attributes:
        context: JSON that stays with the conversation.
        values: Any objects that hooks share with later ones, until the run ends.
    """

    __slots__ = ("context", "values")

    def __init__(self, context: JsonDict, values: Mapping[str, Any]) -> None:
        self.context = context
        self.values = dict(values)

    def merge(self, context: Mapping[str, Any]) -> None:
        """Merge *context* into the context; ``None`` deletes a member."""
        merged = {**self.context, **context}
        # `None` deletes, since JSON has no other word for that a tool could return.
        self.context = freeze({k: v for k, v in merged.items() if v is not None})

    def replace(self, context: JsonDict) -> None:
        """Replace the context by that of an inline child."""
        self.context = context


class RunQuestions:
    """
    The questions of one run.

    Attributes:
        waiting: The questions on which the continued run was suspended.
        pending: The questions on which this run is suspended.
    """

    __slots__ = ("_keys", "pending", "waiting")

    def __init__(self, waiting: tuple[Question, ...]) -> None:
        self.waiting = waiting
        self.pending: tuple[Question, ...] = ()
        self._keys: set[str] = set()

    def register_key(self, key: str | None) -> str:
        """
        Return the unique name of a handler's question, or ``""`` without one.

        Raises:
            BadYield: when this run has asked a question of that name before.
        """
        if key is None:
            return ""
        # An answer is given by name, perhaps days later and from another process; with two questions of one name it
        # would be a matter of chance which of them it answers.
        if key in self._keys:
            msg = f"the key {key!r} names an earlier question of this run; give each question its own key, or no key"
            raise BadYield(msg)
        self._keys.add(key)
        return key


class BodyProgress:
    """
    The progress of a tool's body.

    Attributes:
        changes: What it wants changed in the run of its caller, in this order.
        computed: The result of each of its ``Compute``; ``None`` for one that failed.
    """

    __slots__ = ("changes", "computed")

    def __init__(self) -> None:
        self.changes: list[Change | SetOutput | UserMessage] = []
        self.computed: list[JsonValue] = []


class Snapshot:
    """Makes the frozen state from the parts of a run, and keeps it until one of them has changed."""

    __slots__ = (
        "_budget",
        "_children",
        "_entries",
        "_history",
        "_latest",
        "_output",
        "_progress",
        "_prompt",
        "_questions",
        "_shared",
        "_spent",
        "_start",
        "_state",
        "_tools",
    )

    def __init__(
        self,
        start: AgentState,
        *,
        history: RunHistory,
        prompt: Prompt,
        tools: RunTools,
        progress: Progress,
        budget: Budget,
        spent: UsageTotals,
        output: Output,
        shared: SharedData,
        questions: RunQuestions,
        children: Children,
    ) -> None:
        """Start with *start*, the first state of the run, which has the unchanging values."""
        self._start = start
        self._history = history
        self._prompt = prompt
        self._tools = tools
        self._progress = progress
        self._budget = budget
        self._spent = spent
        self._output = output
        self._shared = shared
        self._questions = questions
        self._children = children
        self._latest: partial[AgentState] | None = None
        self._state: AgentState | None = None

    def state(self) -> AgentState:
        """Return the current state; during a step, the state before it."""
        latest = self.get_state_factory()
        if self._state is None:
            self._state = latest()
        return self._state

    def get_state_factory(self) -> partial[AgentState]:
        """Return a function that creates the current state when it is called: most states are never read."""
        # Kept until something changes: hooks, tools and handlers ask several times within a step, and a state that is
        # equal should be the same object, so that nobody compares transcripts. What has changed is seen by identity, so
        # nobody who changes something has to say so.
        known, history = self._latest, self._history
        if (
            known is not None
            and known.keywords["message_history"] is history.record
            and self._is_current(known.keywords)
        ):
            return known
        start, spent = self._start, self._spent
        self._entries, self._state = spent.entries, None
        self._latest = latest = partial(
            AgentState,
            run_id=start.run_id,
            agent_id=start.agent_id,
            parent_id=start.parent_id,
            ancestor_run_ids=start.ancestor_run_ids,
            id_prefix=start.id_prefix,
            child_run_ids=spent.child_run_ids,
            message_history=history.record,
            view=history.view,
            system_prompt=self._prompt.system,
            tool_definitions=self._tools.definitions,
            output=self._output.value,
            steps_remaining=self._budget.steps_left,
            step_index=self._progress.step_index,
            usage=spent.get_total_usage(),
            cost=spent.cost,
            credits_used=spent.credits_used,
            context=self._shared.context,
            pending=self._questions.pending,
            next_call=self._tools.call_ids.next,
            left_out=history.left_out,
            handed_to=self._children.handed_to,
        )
        return latest

    def _is_current(self, state_fields: Mapping[str, Any]) -> bool:
        """Return whether values equal those of the run, apart from reserved call ids."""
        # Every value that can change, by identity or as a number. What is not asked here follows from what is.
        return (
            state_fields["view"] is self._history.view
            and self._entries == self._spent.entries
            and state_fields["steps_remaining"] == self._budget.steps_left
            and state_fields["step_index"] == self._progress.step_index
            and state_fields["output"] is self._output.value
            and state_fields["context"] is self._shared.context
            and state_fields["system_prompt"] is self._prompt.system
            and state_fields["tool_definitions"] is self._tools.definitions
            and state_fields["pending"] is self._questions.pending
            and state_fields["handed_to"] == self._children.handed_to
        )

    def make_inherited_state(self, call_id: str = "") -> AgentState:
        """Return the state that a child spawned by the call *call_id* inherits; ``""`` for a handler's own child."""
        # While a step is open the record stands before it, and the reply that spawns is held beside: the child sees
        # what that reply said up to the call, and no call without a result (generator-contract:L15).
        state, sides = self.state(), self._history.make_inherited_history(call_id)
        if sides.record is state.message_history and sides.view is state.view:
            return state
        return attrs.evolve(state, message_history=sides.record, view=sides.view)


class RunState:
    """
    Everything about a run that changes while it runs.

    Attributes:
        plan: What it was started with.
        effects: The numbers, clock and stop of its effects, and the sources of the received values.
        history: Record and view.
        prompt: What requests carry beside the history.
        tools: Its tools and calls.
        progress: Its steps and turns.
        budget: What it may still do.
        spent: What it and its children spent.
        output: Its output so far.
        side_events: Its notifications, log lines and warnings; the logger of handlers and hooks.
        shared: The data that its tools and hooks share.
        questions: What people are asked.
        children: The other agents.
        body: What it has done as the body of a tool; ``None`` for the run of an agent.
        snapshot: Its frozen state.
    """

    # Slots by hand, since the state and its parts are the only objects of the machine that change. An attribute that is
    # misspelt is an error so, and nobody can add one.
    __slots__ = (
        "body",
        "budget",
        "children",
        "effects",
        "history",
        "output",
        "plan",
        "progress",
        "prompt",
        "questions",
        "shared",
        "side_events",
        "snapshot",
        "spent",
        "tools",
    )

    def __init__(self, plan: RunPlan, state: AgentState, offered: Mapping[str, ToolSpec]) -> None:
        """Start with *state*; *offered* are the agent's own tools among those of the plan."""
        self.plan = plan
        plan.host.is_own_thread()
        body = plan.body
        self.body = None if body is None else BodyProgress()
        # The body of a tool has no conversation of its own: what it sees is its caller's, so nothing expires in it.
        shown = plan.tools.items() if body is None else ()
        results = ResultShortener(plan.tools, offered)
        self.history = history = RunHistory(
            state.message_history,
            state.view,
            {name: binding.spec.ephemeral for name, binding in shown if binding.spec.ephemeral is not None},
            shorten=results if body is None else None,
            is_callers=body is not None,
            left_out=state.left_out,
            keeps_left_out=RECALL_HISTORY in offered,
        )
        self.budget = budget = Budget(plan.limits, plan.agent.definition.id)
        self.spent = spent = UsageTotals()
        self.progress = Progress(state.step_index, budget)
        # Hooks before tools are asked for first: hardly a run has any, and `needs_provenance` is a call for each run.
        follows_data = plan.agent.hooks.pre_tool and needs_provenance(plan.agent.hooks)
        sources = make_run_sources(plan, state, self.progress) if follows_data else None
        self.effects = EffectChannel(plan.created, plan.starts_at, history, budget, spent, sources=sources)
        self.prompt = Prompt(state.system_prompt)
        self.tools = RunTools(plan, state, results, history)
        self.output = Output(plan, state.output, LastTexts(history))
        self.side_events = SideEvents(plan, self.effects, self.progress)
        self.shared = SharedData(state.context, {} if body is None else body.values)
        self.questions = RunQuestions(state.pending)
        self.children = Children(state.handed_to)
        self.snapshot = Snapshot(
            state,
            history=history,
            prompt=self.prompt,
            tools=self.tools,
            progress=self.progress,
            budget=budget,
            spent=spent,
            output=self.output,
            shared=self.shared,
            questions=self.questions,
            children=self.children,
        )

    def make_hook_context(self, added: Sequence[Message] = (), call_source: str = "") -> HookContext:
        """Return the context for hooks; *call_source* is the origin of the tool call that the hook is called for."""
        plan, prompt, sources = self.plan, self.prompt, self.effects.sources
        return HookContext(
            state=self.snapshot.state(),
            agent=plan.agent.definition,
            session_id=plan.info.session_id,
            user_id=plan.info.user_id,
            metadata=plan.info.metadata,
            params=plan.input.json,
            values=JsonDict(self.shared.values),
            step_index=self.progress.step,
            path=plan.path,
            now=self.effects.time,
            logger=self.side_events,
            added=tuple(added),
            # Looked up when the run was planned, and recorded: a price list that knows another window next month must
            # not make an old run prune elsewhere.
            context_window=plan.context_window,
            overflow=prompt.overflow,
            refused_tokens=prompt.refused_tokens,
            measured=prompt.measured,
            prompt_limit=plan.agent.hooks.find_prompt_limit(plan.context_window),
            source=call_source,
            provenance=None if sources is None else sources.index,
            has_earlier_messages=self.history.has_earlier_messages,
        )

    def apply_change(self, change: RequestedChange, changed_by: str = "") -> None:
        """
        Apply the change of a hook or tool. In a tool's body, all but context and values waits for the call's result.

        *changed_by* names the hook or tool in the event about a smaller prompt.
        """
        assert isinstance(change, Change)  # noqa: S101 - the one implementation
        # Made here as well, a change would be made twice: now, and when the call has its result. And in between a crash
        # could leave a conversation that a call changed which never ended.
        if self.body is not None:
            self.body.changes.append(change)
            change = Change(context=change.context, values=change.values)
        before = self.history.view
        if change.messages is not None or change.view is not None:
            self.history.replace(change.messages, change.view, has_begun=self.progress.began)
            self.side_events.report_compaction_if_smaller(
                changed_by, before, self.history.view, record=change.messages is not None
            )
        if change.system_prompt is not None:
            self.prompt.system = change.system_prompt
        if change.context is not None:
            self.shared.merge(change.context)
        if change.values:
            self.shared.values.update(change.values)
        if change.tools:
            self.tools.add_tools(change.tools)

    def apply_body_end(self, end: BodyEnd, tool_name: str, *, was_stopped: bool = False) -> None:
        """
        Count the spending of the body of the tool *tool_name* and apply its changes in order.

        Of one that was stopped only what was sent to it is applied: the rest comes when it has run to its end.
        """
        # The children that the body started count as the caller's.
        self.spent.add_children(end.children, end.spending)
        self.side_events.add_body_warnings(end.warnings)
        # In the order in which the body made them, as if the caller had made them itself.
        for change in end.changes:
            if isinstance(change, UserMessage):
                self.history.inbox.append(change)
            elif was_stopped:
                continue
            elif isinstance(change, Change):
                self.apply_change(change, tool_name)
                if self.body is None and change.context is not None and "todos" in change.context:
                    self.side_events.report_todos(change.context["todos"])
            else:
                self.set_output(change.value)

    def apply_inline_child(self, child_state: AgentState, call_id: str = "") -> None:
        """Replace the run's history and context by those of an inline child, started by *call_id*."""
        record, view = self.history.make_history_after_inline_child(child_state, call_id)
        self.shared.replace(child_state.context)
        self.apply_change(Change(messages=record, view=None if view is record else view))

    def set_output(self, value: object) -> None:
        """Replace the output by *value*, which is not checked."""
        self.output.set(value)
        self.forward_output_to_caller()

    def forward_output_to_caller(self) -> None:
        """In a tool's body, record the output as a change for the caller."""
        if self.body is not None:
            self.body.changes.append(SetOutput(self.output.value))
