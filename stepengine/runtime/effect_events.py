"""The Started and Finished events around an effect, as the driver shows them outside everything that records."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from stepengine.data.effects import (
    WAITS,
    AskPerson,
    CallBody,
    CallFunction,
    CallModel,
    CallTool,
    Effect,
    Leaf,
    Spawn,
)
from stepengine.data.events import (
    AgentFinished,
    AgentSpawned,
    AnswerReceived,
    Event,
    ModelFinished,
    ModelStarted,
    PerformFinished,
    PerformStarted,
    PermissionRequested,
    QuestionAsked,
    ToolFinished,
    ToolStarted,
    WaitFinished,
    WaitStarted,
)
from stepengine.data.messages import ToolCallPart, ToolResult
from stepengine.data.models import ModelReply, StopReason
from stepengine.data.outcomes import Failure, Single, Stop, Value
from stepengine.data.questions import Question
from stepengine.data.state import ChildResult, RunStatus
from stepengine.runtime.performer import Item, child_path, make_wait

At: TypeAlias = dict[str, Any]
"""Where an event stands, and what else all of its kind have."""

STOPPED = "the run ended before this returned a result"


def make_start_events(item: Item, questions: Sequence[Question] = ()) -> Sequence[Event]:
    """Return the events for the start of an effect; *questions* are those about a permission, as people see them."""
    effect = item.effect
    at: At = {"path": item.path, "seq": effect.seq}
    if isinstance(effect, AskPerson):
        if effect.purpose == "permission":
            return [_make_permission_event(at, item, effect, question) for question in questions]
        return [QuestionAsked(**at, question=q) for q in effect.questions]
    make = STARTED.get(type(effect))
    return () if make is None else (make(item, effect, at),)


def _make_model_started_event(_: Item, effect: CallModel, at: At) -> Event:
    return ModelStarted(**at, model=effect.request.model, purpose=effect.purpose, request=effect.request)


def _make_tool_started_event(item: Item, effect: CallTool, at: At) -> Event:
    binding = item.plan.tools.get(effect.tool_name)
    return ToolStarted(
        **at,
        tool_name=effect.tool_name,
        tool_call_id=effect.tool_call_id,
        input=effect.input,
        source=effect.source,
        category="" if binding is None else binding.spec.category,
        child_path=child_path(item.path, effect.seq) if isinstance(effect, CallBody) else "",
    )


def _make_spawn_event(item: Item, effect: Spawn, at: At) -> Event:
    return AgentSpawned(
        **at,
        agent_id=effect.agent_id,
        child_path=child_path(item.path, effect.seq),
        prompt=effect.prompt,
        params=effect.params,
        display_name=_get_child_display_name(item, effect),
        parent_agent_id=item.plan.agent.definition.id,
        only_child=effect.of == 1,
        of=effect.of,
        tool_call_id=effect.tool_call_id,
        is_background=effect.is_background,
    )


def _make_wait_start_event(item: Item, _: Leaf, at: At) -> Event:
    wait = make_wait(item)
    wakes_at = "" if wait.wakes_at is None else wait.wakes_at.isoformat(timespec="milliseconds")
    return WaitStarted(**at, kind=wait.kind, wakes_at=wakes_at, topic=wait.topic, children=wait.children)


STARTED: Mapping[type[Effect], Callable[[Item, Any, At], Event]] = {
    CallModel: _make_model_started_event,
    CallTool: _make_tool_started_event,
    CallBody: _make_tool_started_event,
    CallFunction: lambda _, effect, at: PerformStarted(**at, name=effect.call.name),
    Spawn: _make_spawn_event,
    **dict.fromkeys(WAITS, _make_wait_start_event),
}
"""
What is shown before an effect that is no question. What a child is told it shows itself, and how it ends is shown when it does.

Waits are derived from their rows in ``EFFECTS``. The other events are written out, since each has members that its effect lacks: the
name of the function, the path of the child, the category of the tool.
"""


def _get_tool_category(item: Item, tool: str) -> str:
    """Return the category of a tool of the run, or ``""`` for an unknown tool."""
    binding = item.plan.tools.get(tool)
    return "" if binding is None else binding.spec.category


def _make_permission_event(
    at: dict[str, Any], item: Item, effect: AskPerson, question: Question
) -> PermissionRequested:
    return PermissionRequested(
        **at,
        question=question,
        tool_name=question.tool_name or "",
        tool_call_id=effect.tool_call_id,
        input=question.details,
        preview=question.preview,
        remember=question.remember,
        category=_get_tool_category(item, question.tool_name or ""),
    )


def _make_model_end_events(item: Item, outcome: Single, at: At) -> list[Event]:
    effect: CallModel = item.effect  # type: ignore[assignment]
    if isinstance(outcome, Value):
        reply: ModelReply = outcome.value
        return [ModelFinished(**at, model=effect.request.model, reply=reply, call_ids=_predict_call_ids(effect, reply))]
    error, kind = _get_error_text(outcome), _get_error_kind(outcome)
    return [ModelFinished(**at, model=effect.request.model, error=error, kind=kind)]


def _make_tool_end_events(item: Item, outcome: Single, at: At) -> list[Event]:
    effect: CallTool = item.effect  # type: ignore[assignment]
    finished = ToolFinished(
        **at,
        tool_name=effect.tool_name,
        tool_call_id=effect.tool_call_id,
        result=outcome.value if isinstance(outcome, Value) else _make_substitute_result(outcome),
        child_path=child_path(item.path, effect.seq) if isinstance(effect, CallBody) else "",
    )
    return [finished]


def make_end_events(item: Item, outcome: Single, duration_ms: int) -> Sequence[Event]:
    """Return the events for the end of an effect, none for a kind that has none."""
    make = FINISHED.get(type(item.effect))
    at: At = {"path": item.path, "seq": item.effect.seq, "duration_ms": duration_ms}
    return () if make is None else make(item, outcome, at)


def _make_answer_events(item: Item, outcome: Single, at: At) -> list[Event]:
    """Return an event for each answer; *at* loses its ``duration_ms``."""
    effect: AskPerson = item.effect  # type: ignore[assignment]
    answers = outcome.value if isinstance(outcome, Value) else ()
    del at["duration_ms"]
    pairs = zip(effect.questions, answers, strict=False)
    return [AnswerReceived(**at, question_id=q.id, answer=a.value) for q, a in pairs]


def _make_spawn_end_events(item: Item, outcome: Single, _: At) -> list[Event]:
    effect: Spawn = item.effect  # type: ignore[assignment]
    return [] if effect.is_background and isinstance(outcome, Value) else make_child_end_events(item, outcome)


def _make_function_end_events(item: Item, outcome: Single, at: At) -> list[Event]:
    effect: CallFunction = item.effect  # type: ignore[assignment]
    return [PerformFinished(**at, name=effect.call.name, error=_get_error_text(outcome))]


def _make_wait_end_events(item: Item, outcome: Single, at: At) -> list[Event]:
    return [WaitFinished(**at, kind=make_wait(item).kind, is_over=isinstance(outcome, Value))]


FINISHED: Mapping[type[Effect], Callable[[Item, Single, At], list[Event]]] = {
    CallModel: _make_model_end_events,
    CallTool: _make_tool_end_events,
    CallBody: _make_tool_end_events,
    CallFunction: _make_function_end_events,
    AskPerson: _make_answer_events,
    Spawn: _make_spawn_end_events,
    **dict.fromkeys(WAITS, _make_wait_end_events),
}
"""What is shown after an effect."""


def make_child_end_events(item: Item, outcome: Single) -> list[Event]:
    """Return the events for the end of a child, in the background or not."""
    effect = item.effect
    assert isinstance(effect, Spawn)  # noqa: S101
    child = _find_child_result(outcome) or ChildResult(agent_id=effect.agent_id, status=_status_from_outcome(outcome))
    is_waiting = child.status is RunStatus.SUSPENDED
    return [
        AgentFinished(
            path=item.path,
            seq=effect.seq,
            agent_id=effect.agent_id,
            child_path=child_path(item.path, effect.seq),
            status=child.status,
            usage=child.usage,
            cost=child.cost,
            text=child.text,
            error="" if is_waiting else child.why or _get_error_text(outcome),
            is_background=effect.is_background,
        )
    ]


def _get_child_display_name(item: Item, effect: Spawn) -> str:
    """Return the display name of a child's agent, or its id if the agent is unknown."""
    if effect.definition is not None:
        name: str = effect.definition.display_name
        return name
    return (item.plan.agent.children or {}).get(effect.agent_id, effect.agent_id)


def _get_error_text(outcome: Single) -> str:
    """Return the message of a failure, a fixed text for a stop, ``""`` for a value."""
    if isinstance(outcome, Failure):
        return outcome.error.message
    return STOPPED if isinstance(outcome, Stop) else ""


def _get_error_kind(outcome: Single) -> str:
    """Return the class of an outcome's error, or the kind of a stop without one; ``""`` for a value."""
    if isinstance(outcome, Stop) and outcome.error is None:
        return outcome.kind
    return type(outcome.error).__name__ if isinstance(outcome, (Failure, Stop)) else ""


def _predict_call_ids(effect: CallModel, reply: ModelReply) -> tuple[str, ...]:
    """Return the ids that the machine will assign to the calls of a reply."""
    if effect.call_id is None:
        return ()
    content = reply.content
    number = [*map(type, content)].count(ToolCallPart)
    if number and reply.stop_reason is StopReason.MAX_TOKENS and isinstance(content[-1], ToolCallPart):
        number -= 1  # A call that was cut off is not run.
    return tuple(map(effect.call_id, range(number)))


def _make_substitute_result(outcome: Single) -> ToolResult:
    """Return the result shown for a call without one, since it failed, was stopped or is suspended."""
    if isinstance(outcome, Stop) and outcome.kind == "suspended":
        # The body of a tool waits for somebody, and goes on where it is.
        return ToolResult.make_pending(outcome.questions[0].id if outcome.questions else "")
    return ToolResult.error(_get_error_text(outcome), status="cancelled" if isinstance(outcome, Stop) else "error")


def _find_child_result(outcome: Single) -> ChildResult[object] | None:
    """Return the result of a child in an outcome; ``None`` for a failure or a stop without one."""
    if isinstance(outcome, Value):
        child: ChildResult[object] = outcome.value
        return child
    return outcome.child if isinstance(outcome, Stop) else None


def _status_from_outcome(outcome: Single) -> RunStatus:
    """Return the status for an outcome without a result: suspended or cancelled for a stop, else failed."""
    if isinstance(outcome, Stop):
        return RunStatus.SUSPENDED if outcome.kind == "suspended" else RunStatus.CANCELLED
    return RunStatus.FAILED
