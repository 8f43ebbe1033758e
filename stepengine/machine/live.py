"""
The mutable inside of one run. Nobody outside the machine ever sees it; what leaves it is frozen.

``perform`` and ``gather`` are the places where effects are handed out, ``unwrap`` the one where an outcome comes back: it
sets the run's time, collects messages that were sent meanwhile, and turns failures and stops into exceptions. After a
stop nothing is handed out any more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any, TypeAlias

import attrs

from stepengine.data import events as ev
from stepengine.data.effects import Ask, CallModel, CallTool, Effect, Gather, Leaf, Notify, Spawn
from stepengine.data.estimate import Measured
from stepengine.data.hooks import Change, HookContext
from stepengine.data.json import JsonDict, freeze
from stepengine.data.limits import Limits
from stepengine.data.messages import AssistantMessage, Message, ToolMessage, UserMessage, quick_tool
from stepengine.data.models import ModelReply, StopReason
from stepengine.data.outcomes import Failure, Gathered, Outcome, Single, Stop, Value
from stepengine.data.questions import Question
from stepengine.data.results import ToolCallLog, ToolResult
from stepengine.data.run import ChildResult, RunPhase
from stepengine.data.state import AgentState, quick_state, suspended_at
from stepengine.data.tools import ToolBinding, ToolSpec
from stepengine.data.transcript import Transcript
from stepengine.data.usage import Usage
from stepengine.errors import ContextOverflow, LimitExceeded, LimitReached, OutputMissing, StepEngineError
from stepengine.machine.control import CONTROL_BINDINGS, HANDLER_ONLY, set_output_binding
from stepengine.machine.lifetimes import Lifetimes
from stepengine.machine.notes import Notes
from stepengine.machine.plan import RunPlan
from stepengine.machine.signals import Stopped
from stepengine.machine.spent import Spent

__all__ = ("Live", "Machine")

Machine: TypeAlias = Generator[Effect, Outcome | None, None]
OF_A_STEP = ("step", "final_answer")
REFUSALS = ("depth", "children", "questions")
"""Kinds of limits that refuse one effect and leave the run what it has (requirements J16, reliability SP01)."""


class Live:
    """Everything about a run that changes while it runs."""

    __slots__ = (
        "_state",
        "actions",
        "agent",
        "base",
        "began",
        "bindings",
        "context",
        "definitions",
        "denials",
        "denied_in_row",
        "ephemeral",
        "has_asked",
        "has_output",
        "inbox",
        "keys",
        "last_word",
        "lifetimes",
        "limit",
        "limits",
        "measured",
        "next_call",
        "notes",
        "now",
        "offered",
        "only_thoughts",
        "open_reply",
        "open_step",
        "opening",
        "output",
        "output_issues",
        "overflow",
        "pending",
        "phase",
        "plan",
        "problems",
        "record",
        "refusals",
        "refused_tokens",
        "seq",
        "specs",
        "spent",
        "start",
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
        "values",
        "view",
        "waiting",
        "warnings",
    )

    def __init__(self, plan: RunPlan, state: AgentState) -> None:
        self.plan = plan
        plan.here()
        self.agent = plan.definition
        self.limits: Limits = plan.limits
        self.seq = 0
        self.now = 0
        self.notes = Notes(self)
        self.inbox: list[UserMessage] = []
        self._take_over(state)
        self.spent = Spent()
        self.values: dict[str, Any] = {}
        self.tail: tuple[Message, ...] = ()
        self.steps_complete = False
        self.stop_reason: StopReason | None = None
        self.truncated = False
        self.only_thoughts = 0
        self.limit: LimitExceeded | None = None
        self.open_reply: AssistantMessage | None = None
        self.stop: Stop | None = None
        self.phase: tuple[RunPhase, str] = (RunPhase.IDLE, "")
        self.output_issues: tuple[str, ...] = ()
        self.last_word = ""
        self.has_asked = False
        self.warnings: list[str] = []
        self.problems: tuple[str, ...] = ()
        self.refusals = 0
        self.measured: Measured | None = None
        self.overflow: ContextOverflow | None = None
        self.refused_tokens: int | None = None
        self.denials = 0
        self.denied_in_row: dict[str, int] = {}
        self.keys: set[str] = set()
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
        self.waiting = state.pending
        self.pending: tuple[Question, ...] = ()
        self.began = False
        self.next_call = state.next_call
        self.step_index = self.step = state.step_index
        self.steps_remaining = self.limits.max_steps or 0
        self.actions = 0
        self.bindings = self._all_bindings()
        self.offered = self._offered_specs()
        sent = self.plan.sent
        self.specs = tuple(self.offered.values()) if sent is None else sent
        self.definitions = JsonDict(self.offered) if sent is None else JsonDict({s.name: s for s in sent})
        self.lifetimes = Lifetimes()
        self.lifetimes.note(self.record)
        self.opening: tuple[Message, ...] = ()
        self.open_step: tuple[AssistantMessage, tuple[ToolMessage, ...]] | None = None
        self._find_ephemeral()
        self._state: AgentState | None = None

    def _all_bindings(self) -> dict[str, ToolBinding]:
        bindings = {**CONTROL_BINDINGS, **self.plan.tools}
        if self.plan.validate_output is not None and self.plan.output_json_schema is not None:
            bindings["set_output"] = set_output_binding(self.plan.output_json_schema)
        return bindings

    def _offered_specs(self) -> dict[str, ToolSpec]:
        names = [name for name in self.plan.offered if name not in HANDLER_ONLY]
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

    @property
    def time(self) -> datetime:
        """The run's recorded time."""
        return self.plan.created + timedelta(milliseconds=self.now)

    def changed(self) -> None:
        """Forget the frozen state; the next look builds a new one."""
        self._state = None

    def state(self) -> AgentState:
        """Return the state of this moment; during a step it is the state before the step."""
        if self._state is None:
            base, spent = self.base, self.spent
            self._state = quick_state(
                run_id=base.run_id,
                agent_id=base.agent_id,
                parent_id=base.parent_id,
                ancestor_run_ids=base.ancestor_run_ids,
                child_run_ids=tuple([c.run_id for c in spent.children if c.run_id]),
                message_history=self.record,
                view=self.view,
                system_prompt=self.system_prompt,
                tool_definitions=self.definitions,
                output=self.output,
                steps_remaining=self.steps_remaining,
                step_index=self.step_index,
                usage=spent.usage,
                cost=spent.cost,
                credits_used=spent.credits_used,
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
            step_index=self.step,
            path=plan.path,
            now=self.time,
            logger=self.notes,
            added=tuple(added),
            context_window=plan.context_window,
            overflow=self.overflow,
            refused_tokens=self.refused_tokens,
            measured=self.measured,
        )

    def number(self) -> int:
        """Return the next effect's number."""
        seq = self.seq
        self.seq = seq + 1
        return seq

    def new_call_id(self) -> str:
        """Return a tool call id that neither record nor view holds yet."""
        while True:
            call_id = f"{self.base.id_prefix}{self.next_call}"
            self.next_call += 1
            same = self.view is self.record
            if not (self.record.has_call(call_id) or (not same and self.view.has_call(call_id))):
                return call_id

    def notify(self, event: ev.Event) -> Machine:
        """Show an event now, after the notes that came before it."""
        if self.notes.waiting:
            yield from self.flush()
        yield Notify(event)

    def flush(self) -> Machine:
        """Show what handlers and hooks noted since the last effect."""
        for event in self.notes.take():
            yield Notify(event)

    def enter(self, phase: RunPhase, detail: str, seq: int) -> Machine:
        """Show that the run does something else now, if it does (requirements N11)."""
        if self.phase != (phase, detail) and self.plan.watched():
            self.phase = (phase, detail)
            yield Notify(ev.PhaseChanged(path=self.plan.path, seq=seq, phase=phase, detail=detail))

    def prepare(self, effect: Leaf) -> Machine:
        """Show what an effect is preceded by; refuse it once the run is stopped."""
        if self.stop is not None:
            raise Stopped(self.stop)
        if self.notes.waiting:
            yield from self.flush()
        kind = type(effect)
        if kind is CallModel:
            yield from self.enter(RunPhase.CALLING_MODEL, "", effect.seq)
        elif kind is CallTool:
            yield from self.enter(RunPhase.EXECUTING_TOOL, effect.tool_name, effect.seq)  # type: ignore[union-attr]
        elif type(effect) is Spawn:
            yield from self.enter(RunPhase.AWAITING_AGENT, effect.agent_id, effect.seq)
        elif type(effect) is Ask:
            asks = effect.purpose == "permission"
            phase = RunPhase.AWAITING_PERMISSION if asks else RunPhase.AWAITING_ANSWER
            yield from self.enter(phase, effect.questions[0].tool_name or "", effect.seq)

    def perform(self, effect: Leaf) -> Generator[Effect, Outcome | None, Any]:
        """Hand out one effect and return its value, or raise what happened instead."""
        if self.stop is not None or self.notes.waiting or self.plan.watched():
            yield from self.prepare(effect)
        return self.unwrap((yield effect), effect)

    def gather(self, effects: Sequence[Leaf], **how: Any) -> Generator[Effect, Any, list[Single]]:
        """Hand out several effects at once, *how* as ``Gather`` says, and return one outcome per effect, in their order."""
        if not effects:
            return []
        yield from self.prepare(effects[0])
        outcome = yield Gather(tuple(effects), **how)
        if type(outcome) is not Gathered or len(outcome.outcomes) != len(effects):
            msg = f"the driver answered a Gather of {len(effects)} with {outcome!r}"
            raise StepEngineError(msg)
        return list(outcome.outcomes)

    def unwrap(self, outcome: Any, effect: Leaf) -> Any:
        """Return the value of the outcome of *effect*; set the run's time and collect what was sent meanwhile."""
        kind = type(outcome)
        if kind is not Value and kind is not Failure and kind is not Stop:
            msg = f"the driver answered a {type(effect).__name__} with {outcome!r}"
            raise StepEngineError(msg)
        self.now = max(self.now, outcome.at)
        if kind is Stop:
            if outcome.child is not None:
                self.count_child(outcome.child)
            self.stop = self.stop or outcome
            raise Stopped(outcome)
        if outcome.inputs:
            self.inbox.extend(outcome.inputs)
        if kind is Value:
            return outcome.value
        raise self._failure(outcome.error, effect)

    def _failure(self, error: StepEngineError, effect: Leaf) -> BaseException:
        if type(effect) is CallModel and isinstance(getattr(error, "usage", None), Usage):
            self.spent.count(effect.request.model, error.usage, None, 0)  # type: ignore[attr-defined]
            self._state = None
        if isinstance(error, LimitExceeded) and error.kind not in REFUSALS:
            self.limit = self.limit or error
            return LimitReached(error)
        return error

    def count_actions(self, count: int) -> None:
        """
        Count what the handler asked for beside steps (generator-contract G47).

        Raises:
            LimitReached: when that is more than the run may do.
        """
        self.actions += count
        limit = self.limits.max_actions
        if limit is not None and self.actions > limit:
            msg = (
                f"agent {self.agent.id!r} asked for more than {limit} actions; "
                "raise Limits(max_actions=...) or end the run earlier"
            )
            self.limit = self.limit or LimitExceeded(msg, kind="actions", limit=limit)
            raise LimitReached(self.limit)

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

    def call_model(self, effect: CallModel) -> Generator[Effect, Outcome | None, ModelReply]:
        """Call a model, count what it used, and take note of how large it found the prompt of a step (requirements X45)."""
        if self.stop is not None or self.notes.waiting or self.plan.watched():
            yield from self.prepare(effect)
        reply: ModelReply = self.unwrap((yield effect), effect)
        self.count_reply(effect, reply)
        used, request = reply.usage, effect.request
        if used is not None and used.prompt_tokens and effect.purpose in OF_A_STEP:
            self.measured = Measured(request.system_prompt, request.messages, used.prompt_tokens)
        return reply

    def count_reply(self, effect: CallModel, reply: ModelReply) -> None:
        """Add what a reply used and cost to the run."""
        self.spent.count(reply.model or effect.request.model, reply.usage, reply.cost, 1)
        self._state = None

    def count_child(self, child: ChildResult[Any]) -> None:
        """Add a child and what it spent to the run."""
        self.spent.count_child(child if child.left is None else attrs.evolve(child, left=None))
        self._state = None

    def add(self, messages: Sequence[Message]) -> None:
        """Append messages to record and view."""
        if self.last_word and any(type(m) is AssistantMessage and m.text.strip() for m in messages):
            self.last_word = ""
        record = self.record.extend(messages)
        self.view = record if self.view is self.record else self.view.extend(messages)
        self.record = record
        self.lifetimes.note(messages)
        if self.ephemeral:
            self._note_ephemeral(messages)
        self._state = None

    def commit(self, message: AssistantMessage, results: Iterable[ToolResult]) -> None:
        """Append a reply and the results of its calls together."""
        self.add([message, *[quick_tool(r.tool_call_id, r.tool_name, r.content, r.status) for r in results]])

    def take_inbox(self) -> bool:
        """Append what was sent to the run meanwhile; return whether there was anything (generator-contract G54)."""
        if not self.inbox:
            return False
        self.add([m if m.tags else UserMessage(m.content, ("USER_PROMPT",)) for m in self.inbox])
        self.inbox = []
        return True

    def apply(self, change: Change, by: str = "") -> None:
        """Make a change that a hook or tool asked for; *by* names it in the event about a smaller prompt."""
        self._state = None
        before = self.view
        if change.messages is not None:
            self.record = self.view = change.messages
            self.start = min(self.start, len(self.record))
        if change.view is not None:
            self.view = change.view
        if change.messages is not None or change.view is not None:
            self._find_ephemeral()
            self.lifetimes.note(self.view)
            self.notes.compacted(by, before, self.view, record=change.messages is not None)
        if change.system_prompt is not None:
            self.system_prompt = change.system_prompt
        if change.context is not None:
            merged = {**self.context, **change.context}
            self.context = freeze({k: v for k, v in merged.items() if v is not None})
        if change.values:
            self.values.update(change.values)

    def set_output(self, output: Any) -> None:
        """Replace the output."""
        self.output = freeze(output)
        self.has_output = True
        self.output_issues = ()
        self._state = None

    def take_open_step(self) -> None:
        """
        Take the step in which the continued run was suspended out of the history: it is held beside it while it runs.

        What came after it will follow its results (requirements K6, X11).
        """
        record, at = self.record, suspended_at(self.record)
        reply = None if at is None else record[at]
        if at is None or type(reply) is not AssistantMessage:
            return
        after = at + 1 + len(reply.tool_calls)
        self.open_step = (reply, tuple([m for m in record[at + 1 : after] if type(m) is ToolMessage]))
        self.inbox.extend([m for m in record[after:] if type(m) is UserMessage])
        shown = next((i for i in range(len(self.view) - 1, -1, -1) if self.view[i] is reply), len(self.view))
        same = self.view is record
        self.record = Transcript(record[:at])
        self.view = self.record if same else Transcript(self.view[:shown])
        self.start = min(self.start, at)
        self._find_ephemeral()
        self._state = None

    def set_view(self, view: Transcript) -> None:
        """Show the model another view of the same history."""
        self.view = view
        self._state = None

    def added(self) -> tuple[Message, ...]:
        """Return the messages that this run added to the record."""
        return self.record[self.start :]
