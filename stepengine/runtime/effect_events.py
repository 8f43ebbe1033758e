"""The Started and Finished events around an effect, as the driver shows them outside everything that records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, assert_never

from stepengine.data.effects import AskPerson, CallBody, CallFunction, CallModel, CallTool, Spawn
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
)
from stepengine.data.messages import ToolCallPart, ToolResult
from stepengine.data.models import ModelReply, StopReason
from stepengine.data.outcomes import Failure, Single, Stop, Value
from stepengine.data.questions import Question
from stepengine.data.state import ChildResult, RunStatus
from stepengine.runtime.performer import Item, child_path

__all__ = ("finished", "started")

STOPPED = "the run ended before this gave a result"


def started(item: Item, questions: Sequence[Question] = ()) -> list[Event]:
    """Return what is shown before an effect is performed; *questions* are those of a permission as people are shown them."""
    effect = item.effect
    at: dict[str, Any] = {"path": item.path, "seq": effect.seq}
    match effect:
        case CallModel():
            return [ModelStarted(**at, model=effect.request.model, purpose=effect.purpose, request=effect.request)]
        case CallTool(tool_name=name, tool_call_id=call_id):
            return [
                ToolStarted(
                    **at,
                    tool_name=name,
                    tool_call_id=call_id,
                    input=effect.input,
                    source=effect.source,
                    category=_category(item, name),
                    child_path=child_path(item.path, effect.seq) if type(effect) is CallBody else "",
                )
            ]
        case CallFunction():
            return [PerformStarted(**at, name=effect.call.name)]
        case AskPerson(purpose="permission"):
            return [_requested(at, item, effect, question) for question in questions]
        case AskPerson():
            return [QuestionAsked(**at, question=q) for q in effect.questions]
        case Spawn():
            return [
                AgentSpawned(
                    **at,
                    agent_id=effect.agent_id,
                    child_path=child_path(item.path, effect.seq),
                    prompt=effect.prompt,
                    params=effect.params,
                    display_name=_display_name(item, effect),
                    parent_agent_id=item.plan.definition.id,
                    only_child=effect.of == 1,
                    of=effect.of,
                    tool_call_id=effect.tool_call_id,
                )
            ]
        case _ as never:
            assert_never(never)


def _category(item: Item, tool: str) -> str:
    """Return the category of a tool of the run; ``""`` for one that it does not have."""
    binding = item.plan.tools.get(tool)
    return "" if binding is None else binding.spec.category


def _requested(at: dict[str, Any], item: Item, effect: AskPerson, question: Question) -> PermissionRequested:
    return PermissionRequested(
        **at,
        question=question,
        tool_name=question.tool_name or "",
        tool_call_id=effect.tool_call_id,
        input=question.details,
        preview=question.preview,
        remember=question.remember,
        category=_category(item, question.tool_name or ""),
    )


def finished(item: Item, outcome: Single, duration_ms: int) -> list[Event]:
    """Return what is shown after an effect was performed."""
    effect = item.effect
    at: dict[str, Any] = {"path": item.path, "seq": effect.seq}
    error = _error(outcome)
    match effect:
        case CallModel():
            reply = outcome.value if type(outcome) is Value else None
            ids = () if reply is None else _call_ids(effect, reply)
            at |= {"model": effect.request.model, "kind": _kind(outcome), "call_ids": ids}
            return [ModelFinished(**at, reply=reply, error=error, duration_ms=duration_ms)]
        case CallTool(tool_name=name, tool_call_id=call_id):
            result = _result(outcome, error)
            return [
                ToolFinished(
                    **at,
                    tool_name=name,
                    tool_call_id=call_id,
                    result=result,
                    duration_ms=duration_ms,
                    child_path=child_path(item.path, effect.seq) if type(effect) is CallBody else "",
                )
            ]
        case CallFunction():
            return [PerformFinished(**at, name=effect.call.name, error=error, duration_ms=duration_ms)]
        case AskPerson():
            answers = outcome.value if type(outcome) is Value else ()
            pairs = zip(effect.questions, answers, strict=False)
            return [AnswerReceived(**at, question_id=q.id, answer=a.value) for q, a in pairs]
        case Spawn():
            child = _child(outcome) or ChildResult(agent_id=effect.agent_id, status=_status(outcome))
            is_waiting = child.status is RunStatus.SUSPENDED
            return [
                AgentFinished(
                    **at,
                    agent_id=effect.agent_id,
                    child_path=child_path(item.path, effect.seq),
                    status=child.status,
                    usage=child.usage,
                    cost=child.cost,
                    text=child.text,
                    error="" if is_waiting else child.why or error,
                )
            ]
        case _ as never:
            assert_never(never)


def _display_name(item: Item, effect: Spawn) -> str:
    if effect.definition is not None:
        name: str = effect.definition.display_name
        return name
    return (item.plan.agents or {}).get(effect.agent_id, effect.agent_id)


def _error(outcome: Single) -> str:
    if type(outcome) is Failure:
        return outcome.error.message
    return STOPPED if type(outcome) is Stop else ""


def _kind(outcome: Single) -> str:
    """Return the class of the error of an outcome, or why it is none; ``""`` for a value."""
    if type(outcome) is Stop and outcome.error is None:
        return outcome.kind
    return type(outcome.error).__name__ if type(outcome) is Failure or type(outcome) is Stop else ""


def _call_ids(effect: CallModel, reply: ModelReply) -> tuple[str, ...]:
    """Return the ids that the machine is about to give to the calls of a reply."""
    if effect.call_id is None:
        return ()
    number = [*map(type, reply.content)].count(ToolCallPart)
    if number and reply.stop_reason is StopReason.MAX_TOKENS and type(reply.content[-1]) is ToolCallPart:
        number -= 1  # A call that was cut off is not run.
    return tuple(map(effect.call_id, range(number)))


def _result(outcome: Single, error: str) -> ToolResult:
    if type(outcome) is Value:
        result: ToolResult = outcome.value
        return result
    if type(outcome) is Stop and outcome.kind == "suspended":
        # The body of a tool waits for somebody, and goes on where it is.
        return ToolResult.pending(outcome.questions[0].id if outcome.questions else "")
    return ToolResult.error(error, status="cancelled" if type(outcome) is Stop else "error")


def _child(outcome: Single) -> ChildResult[object] | None:
    if type(outcome) is Value:
        child: ChildResult[object] = outcome.value
        return child
    return outcome.child if type(outcome) is Stop else None


def _status(outcome: Single) -> RunStatus:
    if type(outcome) is Stop:
        return RunStatus.SUSPENDED if outcome.kind == "suspended" else RunStatus.CANCELLED
    return RunStatus.FAILED
