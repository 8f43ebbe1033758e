"""
One tool call on its way from a request to a result.

A slot holds the call, what validation and judgement made of it, and its result. ``execute`` carries it out by the kind of
its tool: control tools on the run itself, expanding tools as other effects, ordinary tools as ``CallTool``.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Literal

from stepengine.data import events as ev
from stepengine.data.effects import Ask, CallTool, Leaf, Spawn
from stepengine.data.outcomes import Single, Stop
from stepengine.data.parts import ToolCallPart
from stepengine.data.questions import Answer, Question
from stepengine.data.results import ToolResult
from stepengine.data.run import ChildResult
from stepengine.data.tools import ToolBinding, ToolSpec, Validated
from stepengine.data.yields import ToolCall
from stepengine.errors import LimitReached, StepEngineError, ToolInputError, ToolNotAvailable, UnknownOutcome
from stepengine.machine import requests
from stepengine.machine.control import run_control
from stepengine.machine.live import Live

__all__ = ("Slot", "execute", "hook_call", "settle", "start", "unavailable")

Steps = Generator[Any, Any, Any]
Source = Literal["model", "handler", "hook"]


class Slot:
    """One tool call and what has become of it so far."""

    __slots__ = ("binding", "call", "effects", "fault", "lenient", "result", "source", "started", "validated")

    def __init__(self, call: ToolCallPart, source: Source, binding: ToolBinding | None, *, lenient: bool = False) -> None:
        self.call = call
        self.source: Source = source
        self.binding = binding
        self.lenient = lenient
        self.validated: Validated | None = None
        self.result: ToolResult | None = None
        self.effects: list[Leaf] = []
        self.started = 0
        self.fault = False
        """Whether the call was invalid or unknown, which forces another step."""

    @property
    def spec(self) -> ToolSpec | None:
        """The tool's specification, if the tool is known."""
        return self.binding.spec if self.binding else None

    @property
    def kind(self) -> str:
        """The kind of its tool; ``"ordinary"`` for an unknown one."""
        return self.binding.spec.kind if self.binding else "ordinary"

    def finish(self, result: ToolResult) -> None:
        """Set the result, with the call's own name and id."""
        self.result = named(result, self.call)

    def fail(self, error: StepEngineError) -> None:
        """Set an error result for an invalid or unknown call."""
        self.fault = True
        self.finish(ToolResult.error(error.message))

    def validate(self) -> None:
        """
        Check the call's input.

        Raises:
            ToolInputError: when it does not fit.
        """
        assert self.binding is not None  # noqa: S101
        call = self.call
        if call.input_error is not None:
            msg = f"Invalid parameters for {call.tool_name}: the arguments are not a JSON object: {call.input_error}"
            raise ToolInputError(msg, tool_name=call.tool_name, issues=(call.input_error,))
        repair = self.binding.repair if self.lenient else None
        self.validated = self.binding.validate(repair(call.input) if repair else call.input)


def named(result: ToolResult, call: ToolCallPart) -> ToolResult:
    """Return *result* as the result of *call*."""
    if result.tool_name == call.tool_name and result.tool_call_id == call.tool_call_id:
        return result
    return ToolResult(
        result.content,
        status=result.status,
        tool_name=call.tool_name,
        tool_call_id=call.tool_call_id,
        credits_used=result.credits_used,
        side_effects=result.side_effects,
        change=result.change,
    )


def unavailable(live: Live, name: str, known: tuple[str, ...]) -> ToolNotAvailable:
    """Return the error for a call of a tool that is not there."""
    listed = ", ".join(known) or "none"
    msg = f"Tool {name!r} is not available for agent {live.agent.id!r}. Available tools: {listed}."
    return ToolNotAvailable(msg, tool_name=name, available=known)


def start(live: Live, slot: Slot) -> list[Leaf]:
    """Return the effects that an allowed call needs: none for control tools, several for ``spawn_agents``."""
    assert slot.validated is not None  # noqa: S101
    slot.started = live.now
    call, value = slot.call, slot.validated.input
    if call.tool_name == "spawn_agents":
        slot.effects = [_spawn(live, call, entry) for entry in value["agents"]]
    elif call.tool_name == "ask_user":
        asked = [Question("", q["question"], q.get("options", ()), q.get("multi_select", False)) for q in value["questions"]]
        slot.effects = [requests.ask_effect(live, *asked, tool_call_id=call.tool_call_id)]
    elif slot.kind == "ordinary":
        slot.effects = [
            CallTool(
                live.number(),
                call.tool_name,
                value,
                call.tool_call_id,
                slot.source,
                arguments=slot.validated.arguments,
                state=live.state,
                step_index=live.step_index,
            )
        ]
    return slot.effects


def _spawn(live: Live, call: ToolCallPart, entry: Any) -> Spawn:
    return Spawn(
        live.number(),
        entry["agent_type"],
        entry.get("prompt", ""),
        entry.get("params"),
        call.tool_call_id,
        parent=live.state,
    )


def execute(live: Live, slot: Slot) -> Steps:
    """Carry out one allowed call and set its result; raise ``Stopped`` when the world ends the run meanwhile."""
    effects = start(live, slot)
    if not effects:
        yield from _control(live, slot)
    elif slot.call.tool_name == "spawn_agents":
        settle(live, slot, (yield from live.gather(effects, live.limits.max_concurrent_children)))
    else:
        try:
            value = yield from _perform(live, effects[0])
        except (UnknownOutcome, LimitReached) as error:
            slot.finish(ToolResult.error(f"Not executed: {error}" if isinstance(error, LimitReached) else str(error)))
            _log(live, slot)
            raise
        _take(live, slot, [value])


def _perform(live: Live, effect: Leaf) -> Steps:
    if type(effect) is Ask:
        return (yield from requests.ask(live, effect))
    return (yield from live.perform(effect))


def _control(live: Live, slot: Slot) -> Steps:
    assert slot.validated is not None  # noqa: S101
    call, at = slot.call, {"path": live.plan.path, "seq": live.seq}
    name, call_id = call.tool_name, call.tool_call_id
    yield from live.notify(ev.ToolStarted(**at, tool_name=name, tool_call_id=call_id, input=call.input, source=slot.source))
    slot.finish(run_control(live, name, slot.validated.input))
    assert slot.result is not None  # noqa: S101
    yield from live.notify(ev.ToolFinished(**at, tool_name=name, tool_call_id=call_id, result=slot.result))
    _log(live, slot)


def settle(live: Live, slot: Slot, outcomes: list[Single]) -> None:
    """
    Set the result of a call whose effects ran in a ``Gather``.

    Raises:
        Stopped: when one of them was stopped; what finished is counted all the same.
    """
    values: list[Any] = []
    for effect, outcome in sorted(zip(slot.effects, outcomes, strict=True), key=lambda pair: type(pair[1]) is Stop):
        try:
            values.append(live.unwrap(outcome))
        except (StepEngineError, LimitReached) as error:
            values.append(_failed(effect, error))
    _take(live, slot, values)


def _failed(effect: Leaf, error: BaseException) -> Any:
    known = error.error if isinstance(error, LimitReached) else error
    if isinstance(effect, Spawn):
        return ChildResult(agent_id=effect.agent_id, status="failed", error=known)  # type: ignore[arg-type]
    return ToolResult.error(f"Not executed: {error}" if isinstance(error, LimitReached) else str(error))


def _take(live: Live, slot: Slot, values: list[Any]) -> None:
    if slot.call.tool_name == "spawn_agents":
        slot.finish(_children(live, values))
    elif isinstance(values[0], ToolResult):
        slot.finish(values[0])
    else:
        slot.finish(_answers(values[0]))
    _log(live, slot)


def _children(live: Live, children: list[ChildResult[Any]]) -> ToolResult:
    entries: list[dict[str, Any]] = []
    for child in children:
        live.count_child(child)
        if child.is_error:
            why = child.error.message if child.error else f"ended as {child.status.value}"
            entries.append({"agent_type": child.agent_id, "error": why})
        else:
            entries.append({
                "agent_type": child.agent_id,
                "run_id": child.run_id,
                "status": child.status.value,
                "output": shown_output(child.output),
            })
    all_failed = all("error" in entry for entry in entries)
    return ToolResult.json(entries, status="error" if all_failed else "ok")


def shown_output(output: Any) -> Any:
    """Return a child's output as JSON: a pydantic model as its JSON form."""
    dump = getattr(output, "model_dump", None)
    return dump(mode="json") if dump else output


def _answers(answers: tuple[Answer, ...]) -> ToolResult:
    if all(a.declined for a in answers):
        return ToolResult.json({"skipped": True})
    return ToolResult.json({
        "answers": [
            {"question_index": i, **({"selected": list(a.selected)} if a.selected else {"text": a.text})}
            for i, a in enumerate(answers)
        ]
    })


def _log(live: Live, slot: Slot) -> None:
    assert slot.result is not None  # noqa: S101
    value = slot.validated.input if slot.validated else slot.call.input
    live.log_call(slot.call.tool_name, value, slot.result, live.now - slot.started, slot.source)


def hook_call(live: Live, asked: ToolCall) -> Generator[Any, Any, ToolResult]:
    """Carry out a hook's own call: unrecorded, validated, past no hooks."""
    binding = live.bindings.get(asked.tool)
    if binding is None or binding.spec.kind != "ordinary":
        ordinary = tuple([n for n, b in live.bindings.items() if b.spec.kind == "ordinary"])
        raise unavailable(live, asked.tool, ordinary)
    slot = Slot(ToolCallPart(live.new_call_id(), asked.tool, asked.input), "hook", binding)
    slot.validate()
    yield from execute(live, slot)
    assert slot.result is not None  # noqa: S101
    return slot.result
