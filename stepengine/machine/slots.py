"""
One tool call on its way from a request to a result.

A slot holds the call, what validation and judgement made of it, and its result. ``execute`` carries it out by the kind of
its tool: control tools on the run itself, expanding tools as other effects, ordinary tools as ``CallTool``.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, Literal

import attrs

from stepengine.data import events as ev
from stepengine.data.effects import Leaf, Spawn, quick_call_tool
from stepengine.data.json import JsonDict
from stepengine.data.outcomes import Single, Stop
from stepengine.data.parts import ToolCallPart
from stepengine.data.questions import Answer, Question
from stepengine.data.results import ToolResult, quick_log, quick_result
from stepengine.data.run import ChildResult
from stepengine.data.tools import ToolBinding, ToolSpec, Validated
from stepengine.data.yields import ToolCall
from stepengine.errors import LimitReached, StepEngineError, ToolInputError, ToolNotAvailable
from stepengine.machine import requests
from stepengine.machine.control import run_control
from stepengine.machine.inheriting import take_history
from stepengine.machine.live import Live
from stepengine.machine.signals import Stopped, merged
from stepengine.machine.spawning import SpawnBinding, children_of

__all__ = (
    "Slot",
    "execute",
    "execute_ordinary",
    "hook_call",
    "log",
    "named",
    "settle",
    "show",
    "start",
    "take_last_word",
    "unavailable",
)

Steps = Generator[Any, Any, Any]
Source = Literal["model", "handler", "hook"]
NOTHING = JsonDict()


class Slot:
    """One tool call and what has become of it so far."""

    __slots__ = (
        "binding",
        "call",
        "children",
        "closed",
        "duration",
        "edits",
        "effects",
        "fault",
        "lenient",
        "result",
        "source",
        "started",
        "validated",
    )

    def __init__(
        self, call: ToolCallPart, source: Source, binding: ToolBinding | None, *, lenient: bool = False
    ) -> None:
        self.call = call
        self.source: Source = source
        self.binding = binding
        self.lenient = lenient
        self.validated: Validated | None = None
        self.result: ToolResult | None = None
        self.effects: list[Leaf] = []
        self.children: list[Spawn | ChildResult[Any]] = []
        self.started = 0
        self.duration = 0
        self.edits = 0
        """How often a person has changed its input."""
        self.closed = False
        """Whether its result only says why there is none."""
        self.fault = False
        """Whether the call, or one of the children that it asks for, was invalid or unknown, which forces another step."""

    @property
    def spec(self) -> ToolSpec | None:
        """The tool's specification, if the tool is known."""
        return self.binding.spec if self.binding else None

    @property
    def own_call(self) -> ToolCallPart:
        """The call under the tool's own name, by which hooks know it, whatever the model called it."""
        spec = self.spec
        return self.call if spec is None else _renamed(self.call, spec.name)

    @property
    def judged_call(self) -> ToolCallPart:
        """The call as it would run: under the tool's own name, with the input that validation made of what came."""
        call = self.own_call
        return call if self.input is call.input else attrs.evolve(call, input=self.input)

    def change(self, call: ToolCallPart) -> None:
        """Take over what a hook made of the call; its name stays the one that the model used."""
        self.call = _renamed(call, self.call.tool_name)

    def edit(self, input: JsonDict) -> None:
        """Take over what a person made of the input; of the call the model is shown what ran."""
        call = self.call
        self.edits += 1
        self.call = ToolCallPart(call.tool_call_id, call.tool_name, input, provider_data=call.provider_data)

    @property
    def ended_turn(self) -> bool:
        """Whether the tool ran and ends the turn."""
        if self.binding is None or self.result is None:
            return False
        return self.binding.spec.ends_turn and not self.result.is_error

    @property
    def input(self) -> JsonDict:
        """The input as validated, once it was; else as it came."""
        return self.validated.input if self.validated else self.call.input

    def finish(self, result: ToolResult) -> None:
        """Set the result, with the call's own name and id."""
        self.result = named(result, self.call)

    def fail(self, error: StepEngineError) -> None:
        """Set an error result for an invalid or unknown call."""
        self.fault = True
        self.finish(ToolResult.error(error.message))

    def close(self, stop: Stop) -> None:
        """Set a result that says why there is none: the call waits for an answer, or the run ended."""
        self.closed = True
        if stop.kind == "suspended":
            text = "Pending: the run is suspended."
            waiting = stop.questions
            self.finish(ToolResult.pending(waiting[0].id) if waiting else ToolResult.text(text, status="pending"))
        else:
            text = "Cancelled: the run ended before this call gave a result; it may have had effects."
            self.finish(ToolResult.error(text, status="cancelled"))

    def validate(self) -> None:
        """
        Check the call's input.

        Raises:
            ToolInputError: when it does not fit, or a validator of the author's raised.
        """
        assert self.binding is not None  # noqa: S101
        call = self.call
        if call.input_error is not None:
            msg = f"Invalid parameters for {call.tool_name}: the arguments are not a JSON object: {call.input_error}"
            raise ToolInputError(msg, tool_name=call.tool_name, issues=(call.input_error,))
        repair = self.binding.repair if self.lenient else None
        try:
            self.validated = self.binding.validate(repair(call.input) if repair else call.input)
        except StepEngineError:
            raise
        except Exception as error:
            issue = f"the check raised {type(error).__name__}: {error}"
            msg = f"Invalid parameters for {call.tool_name}: {issue}"
            raise ToolInputError(msg, tool_name=call.tool_name, issues=(issue,)) from error


def _renamed(call: ToolCallPart, name: str) -> ToolCallPart:
    return call if call.tool_name == name else attrs.evolve(call, tool_name=name)


def named(result: ToolResult, call: ToolCallPart) -> ToolResult:
    """Return *result* as the result of *call*."""
    if result.tool_name == call.tool_name and result.tool_call_id == call.tool_call_id:
        return result
    return quick_result(
        result.content,
        status=result.status,
        tool_name=call.tool_name,
        tool_call_id=call.tool_call_id,
        credits_used=result.credits_used,
        side_effects=result.side_effects,
        change=result.change,
    )


def take_last_word(live: Live, slots: Sequence[Slot]) -> bool:
    """Return whether one of *slots* is an ``end_turn`` that ran; its message is what the run says last, until it says more."""
    for slot in slots:
        if slot.call.tool_name == "end_turn" and slot.ended_turn:
            live.last_word = slot.input.get("message", "")
            return True
    return False


def unavailable(live: Live, name: str, known: Sequence[str], hint: str = "") -> ToolNotAvailable:
    """Return the error for a call of a tool that is not there."""
    listed = ", ".join(known) or "none"
    msg = f"Tool {name!r} is not available for agent {live.agent.id!r}. Available tools: {listed}.{hint}"
    return ToolNotAvailable(msg, tool_name=name, available=known)


def start(live: Live, slot: Slot) -> list[Leaf]:
    """Return the effects that an allowed call needs: none for control tools, one per child for those that spawn."""
    assert slot.binding is not None  # noqa: S101
    assert slot.validated is not None  # noqa: S101
    slot.started = live.now
    if live.denied_in_row:
        live.denied_in_row.pop(slot.binding.spec.name, None)
    call, value = slot.call, slot.validated.input
    if slot.binding.spec.kind == "ordinary":
        effect = quick_call_tool(
            live.number(),
            call.tool_name,
            value,
            call.tool_call_id,
            slot.source,
            arguments=slot.validated.arguments,
            state=live.state,
            step_index=live.step,
            measured=live.measured,
        )
        slot.effects = [effect]
    elif isinstance(slot.binding, SpawnBinding):
        slot.children = children_of(live, call, slot.binding, value)
        slot.effects = [child for child in slot.children if isinstance(child, Spawn)]
        slot.fault = len(slot.effects) < len(slot.children)
    elif call.tool_name == "ask_user":
        asked = [
            Question(
                "", q["question"], q.get("options", ()), q.get("multi_select", False), allow_text=bool(q.get("options"))
            )
            for q in value["questions"]
        ]
        slot.effects = [requests.ask_effect(live, *asked, tool_call_id=call.tool_call_id)]
    return slot.effects


def execute_ordinary(live: Live, slot: Slot) -> Steps:
    """Carry out one allowed call of an ordinary tool, as ``execute`` does; whoever performs it shows its start and end."""
    return _perform(live, slot, start(live, slot)[0])


def execute(live: Live, slot: Slot) -> Steps:
    """
    Carry out one allowed call and set its result.

    Raises:
        Stopped: when the world ended the run meanwhile.
        LimitReached: when a budget was spent; the result says so.
        StepEngineError: when the call's outcome is unknown; the result says so.
    """
    assert slot.binding is not None  # noqa: S101
    if slot.binding.spec.kind == "ordinary":
        yield from execute_ordinary(live, slot)
        return
    yield from _show_start(live, slot)
    effects = start(live, slot)
    try:
        if slot.children:
            settle(live, slot, (yield from live.gather(effects)))
        elif effects:
            yield from _perform(live, slot, effects[0])
        else:
            slot.finish(run_control(live, slot.call.tool_name, slot.input))
    finally:
        if live.stop is None and slot.result is not None:
            yield from _show_end(live, slot)


def _perform(live: Live, slot: Slot, effect: Leaf) -> Steps:
    try:
        if live.stop is not None or live.notes.waiting or live.plan.watched():
            yield from live.prepare(effect)
        value = live.unwrap((yield effect), effect)
    except Stopped as stopped:
        stop = requests.with_questions(stopped.stop, effect)
        slot.close(stop)
        raise Stopped(stop) from None
    except (StepEngineError, LimitReached) as error:
        _take(live, slot, [_failed(effect, error)])
        raise
    _take(live, slot, [value])


def show(live: Live, slot: Slot) -> Steps:
    """Show a call that never ran: unknown, invalid, denied or skipped (requirements X66)."""
    yield from _show_start(live, slot)
    yield from _show_end(live, slot)


def _show_start(live: Live, slot: Slot) -> Steps:
    call = slot.call
    event = ev.ToolStarted(
        path=live.plan.path,
        seq=live.seq,
        tool_name=call.tool_name,
        tool_call_id=call.tool_call_id,
        input=slot.input,
        source=slot.source,
    )
    yield from live.notify(event)


def _show_end(live: Live, slot: Slot) -> Steps:
    call, result = slot.call, slot.result
    assert result is not None  # noqa: S101
    event = ev.ToolFinished(
        path=live.plan.path,
        seq=live.seq,
        tool_name=call.tool_name,
        tool_call_id=call.tool_call_id,
        result=result,
        duration_ms=slot.duration,
    )
    yield from live.notify(event)


def settle(live: Live, slot: Slot, outcomes: Sequence[Single]) -> None:
    """
    Set the result of a call whose effects ran in a ``Gather``.

    Raises:
        Stopped: when one of them was stopped; what finished is counted all the same.
    """
    values: list[Any] = []
    stops: list[Stop] = []
    for effect, outcome in zip(slot.effects, outcomes, strict=True):
        try:
            values.append(_counted(live, live.unwrap(outcome, effect)))
        except Stopped as stopped:
            stops.append(requests.with_questions(stopped.stop, effect))
        except (StepEngineError, LimitReached) as error:
            values.append(_counted(live, _failed(effect, error)))
    if stops:
        stop = merged(stops)
        slot.close(stop)
        raise Stopped(stop)
    _take(live, slot, values)


def _counted(live: Live, value: Any) -> Any:
    if isinstance(value, ChildResult):
        live.count_child(value)
    return value


def _failed(effect: Leaf, error: BaseException) -> Any:
    if isinstance(effect, Spawn):
        return failed_child(effect.agent_id, error)
    return ToolResult.error(f"Not executed: {error}" if isinstance(error, LimitReached) else str(error))


def failed_child(agent_id: str, error: Any) -> ChildResult[Any]:
    """Return the result of a child that never ran."""
    known: StepEngineError = error.error if isinstance(error, LimitReached) else error
    return ChildResult(agent_id=agent_id, status="failed", error=known)


def _take(live: Live, slot: Slot, values: Sequence[Any]) -> None:
    slot.duration = live.now - slot.started
    if slot.children:
        _take_children(live, slot, values)
    elif isinstance(values[0], ToolResult):
        slot.finish(values[0])
    else:
        slot.finish(_answers(values[0]))
    result = slot.result
    assert result is not None  # noqa: S101
    if result.credits_used:
        live.spent.own_credits += result.credits_used
        live.changed()
    if result.change is not None:
        # Here and nowhere else: the next call and every hook see it, and nothing later makes it a second time.
        live.apply(result.change, slot.call.tool_name)


def _take_children(live: Live, slot: Slot, values: Sequence[Any]) -> None:
    """Set the result of a call that spawned; those that never could be have theirs in their place."""
    assert isinstance(slot.binding, SpawnBinding)  # noqa: S101
    ran = iter(values)
    children = [next(ran) if isinstance(child, Spawn) else child for child in slot.children]
    if slot.binding.is_inline:
        take_history(live, slot.call.tool_call_id, children[0])
    slot.finish(slot.binding.shown(children))


def _answers(answers: Sequence[Answer]) -> ToolResult:
    if all(a.declined for a in answers):
        return ToolResult.json({"skipped": True})
    entries: list[Any] = [
        {"question_index": i, **({"selected": list(a.selected)} if a.selected else {"text": a.text})}
        for i, a in enumerate(answers)
    ]
    return ToolResult.json({"answers": entries})


def log(live: Live, slot: Slot) -> None:
    """Add a call that has its result to the log of the run (requirements D10)."""
    result = slot.result
    if result is not None:
        call = slot.call
        entry = quick_log(call.tool_name, slot.input, result, live.step, slot.duration, call.tool_call_id, slot.source)
        live.tool_log.append(entry)


def hook_call(live: Live, asked: ToolCall) -> Generator[Any, Any, ToolResult]:
    """Carry out a hook's own call: unrecorded, validated, past no hooks."""
    binding = live.bindings.get(asked.tool)
    if binding is None or binding.spec.kind != "ordinary":
        ordinary = tuple([n for n, b in live.bindings.items() if b.spec.kind == "ordinary"])
        raise unavailable(live, asked.tool, ordinary)
    slot = Slot(ToolCallPart(live.new_call_id(), asked.tool, asked.input), "hook", binding)
    slot.validate()
    try:
        yield from execute(live, slot)
    finally:
        log(live, slot)
    assert slot.result is not None  # noqa: S101
    return slot.result
