"""
The mutable inside of one run. Nobody outside the machine ever sees it; what leaves it is frozen.

``perform`` is the one place where an effect is handed out and its outcome comes back: it sets the run's time, collects
messages that were sent meanwhile, and turns failures and stops into exceptions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any, TypeAlias

from stepengine.data import events as ev
from stepengine.data.effects import CallModel, CallTool, Effect, Gather, Leaf, Notify
from stepengine.data.hooks import Change, HookContext
from stepengine.data.json import JsonDict, freeze
from stepengine.data.limits import Limits
from stepengine.data.messages import AssistantMessage, Message, ToolMessage, UserMessage
from stepengine.data.models import ModelReply, StopReason
from stepengine.data.outcomes import Failure, Gathered, Outcome, Single, Stop, Value
from stepengine.data.questions import Question
from stepengine.data.results import ToolCallLog, ToolResult
from stepengine.data.run import ChildResult
from stepengine.data.state import AgentState
from stepengine.data.tools import ToolBinding, ToolSpec
from stepengine.data.transcript import Transcript
from stepengine.data.usage import Spending, Usage, add_cost
from stepengine.errors import LimitExceeded, LimitReached, StepEngineError
from stepengine.machine.control import CONTROL_BINDINGS, set_output_binding
from stepengine.machine.notes import Notes
from stepengine.machine.plan import RunPlan
from stepengine.machine.signals import Stopped

__all__ = ("Live", "Machine")

Machine: TypeAlias = Generator[Effect, Outcome | None, Any]


class Live:
    """Everything about a run that changes while it runs."""

    def __init__(self, plan: RunPlan, state: AgentState) -> None:
        self.plan = plan
        self.agent = plan.definition
        self.limits: Limits = plan.limits
        self.seq = 0
        self.now = 0
        self.notes = Notes(self)
        self.inbox: list[UserMessage] = []
        self._take_over(state)
        self._reset_spending()
        self.values: dict[str, Any] = {}
        self.steps_complete = False
        self.stop_reason: StopReason | None = None
        self.truncated = False
        self.limit: LimitExceeded | None = None
        self.output_issues: tuple[str, ...] = ()
        self.warnings: list[str] = []
        self.refusals = 0
        self.tool_log: list[ToolCallLog] = []
        self.thinking: list[str] = []

    def _take_over(self, state: AgentState) -> None:
        self.base = state
        self.record = state.message_history
        self.view = state.view
        self.start = len(state.message_history)
        self.system_prompt = state.system_prompt
        self.context = state.context
        self.output = state.output
        self.has_output = state.output is not None
        self.pending: tuple[Question, ...] = ()
        self.next_call = state.next_call
        self.step_index = state.step_index
        self.steps_remaining = self.limits.max_steps or 0
        self.actions = 0
        self.bindings = self._all_bindings()
        self.offered = self._offered_specs()
        self._find_ephemeral()
        self._state: AgentState | None = None

    def _all_bindings(self) -> dict[str, ToolBinding]:
        bindings = {**CONTROL_BINDINGS, **self.plan.tools}
        if self.plan.validate_output is not None and self.plan.output_json_schema is not None:
            bindings["set_output"] = set_output_binding(self.plan.output_json_schema)
        return bindings

    def _offered_specs(self) -> dict[str, ToolSpec]:
        names = list(self.plan.offered)
        if self.agent.output_schema is not None and "set_output" not in names:
            names.append("set_output")
        return {name: self.bindings[name].spec for name in names}

    def _find_ephemeral(self) -> None:
        """Note which results in the view belong to ephemeral tools, oldest first."""
        self.ephemeral: dict[str, deque[str]] = {
            name: deque() for name, binding in self.bindings.items() if binding.spec.ephemeral is not None
        }
        if self.ephemeral:
            self._note_ephemeral(self.view)

    def _note_ephemeral(self, messages: Iterable[Message]) -> None:
        for message in messages:
            if type(message) is ToolMessage and message.tool_name in self.ephemeral:
                self.ephemeral[message.tool_name].append(message.tool_call_id)

    def _reset_spending(self) -> None:
        self.by_model: dict[str, Usage] = {}
        self.cost: Decimal | None = Decimal(0)
        self.credits_used: float = 0
        self.children: list[ChildResult[Any]] = []
        self.children_spending = Spending()

    @property
    def time(self) -> datetime:
        """The run's recorded time."""
        return self.plan.created + timedelta(milliseconds=self.now)

    @property
    def usage(self) -> Usage:
        """Tokens of this run and its children."""
        own = list(self.by_model.values())
        total = own[0] if len(own) == 1 else sum(own, Usage())
        return total + self.children_spending.usage if self.children else total

    @property
    def spending(self) -> Spending:
        """What this run and its children spent."""
        own = sum(self.by_model.values(), Usage())
        mine = Spending(own, self.cost, self.credits_used, {self.agent.id: own}, self.by_model)
        return mine + self.children_spending

    def changed(self) -> None:
        """Forget the frozen state; the next look builds a new one."""
        self._state = None

    def state(self) -> AgentState:
        """Return the state of this moment; during a step it is the state before the step."""
        if self._state is None:
            base = self.base
            self._state = AgentState(
                run_id=base.run_id,
                agent_id=base.agent_id,
                parent_id=base.parent_id,
                ancestor_run_ids=base.ancestor_run_ids,
                child_run_ids=tuple([c.run_id for c in self.children if c.run_id]),
                message_history=self.record,
                view=self.view,
                system_prompt=self.system_prompt,
                tool_definitions=JsonDict(self.offered),
                output=self.output,
                steps_remaining=self.steps_remaining,
                step_index=self.step_index,
                usage=self.usage,
                cost=add_cost(self.cost, self.children_spending.cost),
                credits_used=self.credits_used + self.children_spending.credits_used,
                context=self.context,
                pending=self.pending,
                next_call=self.next_call,
                id_prefix=base.id_prefix,
            )
        return self._state

    def hook_context(self, added: Sequence[Message] = ()) -> HookContext:
        """Return what every hook gets first."""
        plan = self.plan
        return HookContext(
            state=self.state(),
            agent=self.agent,
            session_id=plan.session_id,
            user_id=plan.user_id,
            metadata=plan.metadata,
            values=JsonDict(self.values),
            step_index=self.step_index,
            path=plan.path,
            now=self.time,
            logger=self.notes,
            added=tuple(added),
        )

    def number(self) -> int:
        """Return the next effect's number."""
        seq = self.seq
        self.seq = seq + 1
        return seq

    def new_call_id(self) -> str:
        """Return a tool call id that the history does not hold yet."""
        while True:
            call_id = f"{self.base.id_prefix}{self.next_call}"
            self.next_call += 1
            if not self.record.has_call(call_id):
                return call_id

    def notify(self, event: ev.Event) -> Machine:
        """Show an event now, after the notes that came before it."""
        yield from self.flush()
        yield Notify(event)

    def flush(self) -> Machine:
        """Show what handlers and hooks noted since the last effect."""
        if self.notes.waiting:
            for event in self.notes.take():
                yield Notify(event)

    def perform(self, effect: Leaf) -> Generator[Effect, Outcome | None, Any]:
        """Hand out one effect and return its value, or raise what happened instead."""
        if self.notes.waiting:
            yield from self.flush()
        return self.unwrap((yield effect))

    def gather(self, effects: Sequence[Leaf], concurrency: int | None = None) -> Generator[Effect, Any, list[Single]]:
        """Hand out several effects at once and return one outcome per effect, in their order."""
        if not effects:
            return []
        yield from self.flush()
        outcome = yield Gather(tuple(effects), concurrency)
        if type(outcome) is not Gathered or len(outcome.outcomes) != len(effects):
            msg = f"the driver answered a Gather of {len(effects)} with {type(outcome).__name__}"
            raise StepEngineError(msg)
        return list(outcome.outcomes)

    def unwrap(self, outcome: Any) -> Any:
        """Return an outcome's value; set the run's time and collect what was sent meanwhile."""
        kind = type(outcome)
        if kind is not Value and kind is not Failure and kind is not Stop:
            msg = f"the driver answered an effect with a {kind.__name__}"
            raise StepEngineError(msg)
        self.now = max(self.now, outcome.at)
        if kind is Stop:
            raise Stopped(outcome)
        if outcome.inputs:
            self.inbox.extend(outcome.inputs)
        if kind is Value:
            return outcome.value
        raise self._failure(outcome.error)

    def _failure(self, error: StepEngineError) -> BaseException:
        usage = getattr(error, "usage", None)
        if isinstance(usage, Usage):
            self._count(self.plan.model or "", usage, None)
        if isinstance(error, LimitExceeded):
            self.limit = self.limit or error
            return LimitReached(error)
        return error

    def call_model(self, effect: CallModel) -> Generator[Effect, Outcome | None, ModelReply]:
        """Call a model and count what it used."""
        reply: ModelReply = yield from self.perform(effect)
        self.count_reply(effect, reply)
        return reply

    def count_reply(self, effect: CallModel, reply: ModelReply) -> None:
        """Add what a reply used and cost to the run."""
        self._count(reply.model or effect.request.model, reply.usage, reply.cost)

    def _count(self, model: str, usage: Usage | None, cost: Decimal | None) -> None:
        known = usage or Usage(at_least=True)
        old = self.by_model.get(model)
        if old is None:
            old = Usage()
        self.by_model[model] = Usage(
            old.input_tokens + known.input_tokens,
            old.output_tokens + known.output_tokens,
            old.cache_read_tokens + known.cache_read_tokens,
            old.cache_write_tokens + known.cache_write_tokens,
            old.reasoning_tokens + known.reasoning_tokens,
            old.requests + 1,
            old.at_least or known.at_least,
        )
        self.cost = add_cost(self.cost, cost)
        self._state = None

    def count_child(self, child: ChildResult[Any]) -> None:
        """Add a child and what it spent to the run."""
        self.children.append(child)
        self.children_spending = self.children_spending + child.spending
        self._state = None

    def count_tool(self, effect: CallTool, result: ToolResult, duration: int) -> None:
        """Add a tool call to the log and its credits to the run."""
        self.log_call(effect.tool_name, effect.input, result, duration, effect.source)

    def log_call(self, name: str, value: Any, result: ToolResult, duration: int, source: Any) -> None:
        """Add a tool call to the log and its credits to the run."""
        self.credits_used += result.credits_used
        self.tool_log.append(ToolCallLog(name, value, result, self.step_index, duration, result.tool_call_id, source))

    def add(self, messages: Sequence[Message]) -> None:
        """Append messages to record and view."""
        same = self.view is self.record
        self.record = self.record.extend(messages)
        self.view = self.record if same else self.view.extend(messages)
        if self.ephemeral:
            self._note_ephemeral(messages)
        self._state = None

    def commit(self, message: AssistantMessage, results: Iterable[ToolResult]) -> None:
        """Append a reply and the results of its calls together, and make the changes that the results carry."""
        results = list(results)
        self.add([message, *[ToolMessage(r.tool_call_id, r.tool_name, r.content, r.status) for r in results]])
        for result in results:
            if result.change is not None:
                self.apply(result.change)

    def take_inbox(self) -> bool:
        """Append what was sent to the run meanwhile; return whether there was anything."""
        if not self.inbox:
            return False
        self.add(self.inbox)
        self.inbox = []
        return True

    def apply(self, change: Change) -> None:
        """Make a change that a hook or tool asked for."""
        self._state = None
        if change.messages is not None:
            self.record = self.view = change.messages
            self.start = min(self.start, len(self.record))
        if change.view is not None:
            self.view = change.view
        if change.messages is not None or change.view is not None:
            self._find_ephemeral()
        if change.system_prompt is not None:
            self.system_prompt = change.system_prompt
        if change.context is not None:
            merged = {**self.context, **change.context}
            self.context = freeze({k: v for k, v in merged.items() if v is not None})
        if change.values:
            self.values.update(change.values)

    def set_output(self, output: Any) -> None:
        """Replace the output."""
        self.output = output
        self.has_output = True
        self.output_issues = ()
        self._state = None

    def set_view(self, view: Transcript) -> None:
        """Show the model another view of the same history."""
        self.view = view
        self._state = None

    def set_context(self, name: str, value: Any) -> None:
        """Set one member of the shared context."""
        self.apply(Change(context=JsonDict({name: value})))

    def replace_history(self, history: Transcript) -> None:
        """Replace record and view."""
        self.apply(Change(messages=history))

    def added(self) -> tuple[Message, ...]:
        """Return the messages that this run added to the record."""
        return self.record[self.start :]
