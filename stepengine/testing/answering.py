"""What a short answer of a test means: the ``StepResult`` that a run would have sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import attrs
from attrs import frozen

from stepengine.data.json import ABSENT, freeze
from stepengine.data.messages import AssistantMessage, ToolResult
from stepengine.data.models import ModelReply, StopReason
from stepengine.data.questions import Question, answered
from stepengine.data.state import AgentState, ChildResult, RunStatus, Waited
from stepengine.data.waiting import ChildRef
from stepengine.data.yields import (
    YIELDS,
    AgentCall,
    Ask,
    Cancel,
    Complete,
    GenerateN,
    Parallel,
    Perform,
    Race,
    Receive,
    Send,
    Sentinel,
    Sleep,
    Start,
    StepResult,
    StepText,
    StepWith,
    ToolCall,
    Wait,
    Yieldable,
)
from stepengine.errors import DataError, PerformError, StepEngineError
from stepengine.machine.author import handler_error
from stepengine.runtime.mail import misfit_of

__all__ = ("HandlerPlace", "answer_to", "passed")
__tracebackhide__ = True  # a failed test ends at its author's line


MISFIT = " is no answer to "


@frozen
class HandlerPlace:
    """
    Where a handler stands when it is answered.

    Attributes:
        state: Its state.
        now: Its time.
        children: How many children it has started in the background.
    """

    state: AgentState
    now: datetime
    children: int = 0


def answer_to(asked: Yieldable, answer: object, place: HandlerPlace) -> StepResult:
    """
    Return the ``StepResult`` that *answer* stands for when *asked* was yielded at *place*.

    Raises:
        DataError: when it does not fit.
    """
    if isinstance(answer, StepResult):
        return answer
    try:
        make = STEPS.get(type(asked))
        if make is not None:
            return make(asked, answer, place)
        return StepResult(place.state, value=_member(asked, answer, place))
    except DataError as error:
        # Raised anew, so that the test is shown its own line and not where the value was looked at.
        known = MISFIT in error.message
        msg = error.message if known else f"{answer!r}{MISFIT}{asked!r}: {error.message}"
        raise DataError(msg) from None


def passed(asked: object, value: object, now: datetime) -> datetime:
    """Return what time it is once *asked*, which was yielded at *now*, gave *value*; only what waits takes time."""
    if isinstance(asked, Sleep) and isinstance(value, datetime):
        return max(now, value)
    if isinstance(asked, Race) and isinstance(value, tuple):
        return passed(asked.members[value[0]], value[1], now)
    if isinstance(asked, Parallel) and isinstance(value, tuple):
        return max([now, *[passed(one, came, now) for one, came in zip(asked.calls, value, strict=False)]])
    is_over = isinstance(asked, Receive) and value is None
    if isinstance(asked, Wait) and isinstance(value, Waited):
        is_over = len(value.done) < asked.need
    patience = getattr(asked, "timeout", None) if is_over else None
    return now if patience is None else now + timedelta(seconds=patience)


def _gathered(asked: Parallel[Any], answer: object, place: HandlerPlace) -> StepResult:
    answers = _items(asked, answer)
    if len(answers) != len(asked.calls):
        raise _misfit(asked, answer, f"a list with one answer for each of its {len(asked.calls)} members")
    value = tuple([_entry(call, given, place) for call, given in zip(asked.calls, answers, strict=True)])
    return StepResult(place.state, tuple([v for v in value if isinstance(v, ToolResult)]), value=value)


def _entry(asked: object, answer: object, place: HandlerPlace) -> Any:
    """Return the entry of a member of a ``Parallel`` or ``Race``, in which an error is a value: that of what failed."""
    if not isinstance(answer, Exception):
        return _member(asked, answer, place)
    if isinstance(asked, ToolCall):
        return ToolResult.error(str(answer), tool_name=asked.tool)
    if isinstance(asked, AgentCall):
        return ChildResult(agent_id=asked.agent_id, status=RunStatus.FAILED, error=_as_known(answer))
    if isinstance(asked, Perform):
        return _as_performed(asked, answer)
    raise _misfit(asked, answer, "an answer, since it does not fail")


def _as_known(error: Exception) -> StepEngineError:
    """Return *error* as the error of a child whose handler let it out."""
    if isinstance(error, StepEngineError):
        return error
    known = handler_error("the child's handler", error)
    known.__cause__ = error
    return known


def _as_performed(asked: Perform[Any], error: Exception) -> PerformError:
    if isinstance(error, PerformError):
        return error
    kind = type(error).__name__
    failed = PerformError(f"Perform({asked.name}) raised {kind}: {error}", kind=kind)
    failed.__cause__ = error
    return failed


def _member(asked: Any, answer: Any, place: HandlerPlace) -> Any:
    """Return the value that *answer* stands for, as it is alone and among others."""
    if answer is ABSENT and type(asked) not in MAY_BE_EMPTY:
        raise _misfit(asked, answer, FORMS.get(type(asked), "a value"))
    return VALUES[type(asked)](asked, answer, place)


def _answer_ask(asked: Ask, answer: Any, _: HandlerPlace) -> Any:
    question = Question("q1", asked.question, asked.options, asked.multi_select, allow_text=asked.allow_text)
    return answered(answer, question).value


def _performed(_: object, answer: Any, __: HandlerPlace) -> Any:
    return answer if isinstance(answer, PerformError) else freeze(answer)


# --- what waits -------------------------------------------------------------------------------------------------------


def _woke(asked: Sleep, answer: object, place: HandlerPlace) -> datetime:
    """Return when a sleeper woke: when it was to, or when the test says."""
    if answer is ABSENT:
        due = place.now + timedelta(seconds=asked.seconds or 0)
        return max(place.now, asked.until.astimezone(UTC)) if asked.until is not None else due
    if isinstance(answer, datetime) and answer.utcoffset() is not None and answer >= place.now:
        return answer.astimezone(UTC)
    raise _misfit(asked, answer, f"nothing, or a date with a time zone that is not before {place.now.isoformat()}")


def _received(asked: Receive[Any], answer: Any, _: HandlerPlace) -> Any:
    if answer is None:
        if asked.timeout is None:
            raise _misfit(asked, answer, "a message, since it has no timeout")
        return None
    message = freeze(answer)
    problem = misfit_of(asked.topic, asked.schema)(message)
    if problem:
        raise _misfit(asked, answer, f"what fits its schema ({problem})")
    return message


def _answer_start(asked: Start[Any], answer: Any, place: HandlerPlace) -> Any:
    """Return references to the children, made up where the test gives none."""
    if answer is ABSENT:
        numbers = range(place.children, place.children + len(asked.calls))
        made = [
            ChildRef(f"{place.state.run_id}-{n}", call.agent_id, str(n))
            for n, call in zip(numbers, asked.calls, strict=True)
        ]
        return made[0] if len(made) == 1 else tuple(made)
    given = answer if isinstance(answer, list | tuple) else (answer,)
    fits = all(isinstance(ref, ChildRef) for ref in given) and len({ref.path for ref in given}) == len(asked.calls)
    if not fits or [ref.agent_id for ref in given] != [call.agent_id for call in asked.calls]:
        of = ", ".join([repr(call.agent_id) for call in asked.calls])
        raise _misfit(asked, answer, f"nothing, or a ChildRef for each of {of}, with a path of its own")
    return given[0] if len(given) == 1 else tuple(given)


def _answer_wait(asked: Wait[Any], answer: object, _: HandlerPlace) -> Waited[Any]:
    if isinstance(answer, Waited):
        waited: Waited[Any] = answer
    else:
        given = _by_ref(asked, answer)
        done = tuple([_end_of_child(ref, came, asked) for ref, came in given.items()])
        waited = Waited(done, tuple([ref for ref in asked.refs if ref not in given]))
    ids = [*[child.run_id for child in waited.done], *[ref.id for ref in waited.open]]
    if sorted(ids) != sorted([ref.id for ref in asked.refs]):
        raise _misfit(asked, answer, "a Waited with each of its children once, by the ids of their references")
    if len(waited.done) < asked.need and asked.timeout is None:
        raise _misfit(asked, answer, f"how {asked.need} of them ended, since it has no timeout")
    return waited


def _by_ref(asked: Wait[Any], answer: Any) -> Mapping[ChildRef[Any], Any]:
    """Return what came of which child, in the order in which they ended; those that are missing are still at work."""
    if answer is ABSENT:
        return {}
    if isinstance(answer, Mapping) and answer and all(isinstance(ref, ChildRef) for ref in answer):
        if not {*answer} <= {*asked.refs}:
            raise _misfit(asked, answer, "no child that it does not wait for")
        return answer
    answers = [answer] if len(asked.refs) == 1 else answer
    if not isinstance(answers, list | tuple) or len(answers) != len(asked.refs):
        raise _misfit(asked, answer, FORMS[Wait])
    return dict(zip(asked.refs, answers, strict=True))


def _end_of_child(ref: ChildRef[Any], answer: object, asked: object) -> ChildResult[Any]:
    """Return how a child in the background ended."""
    if isinstance(answer, Exception):
        return ChildResult(agent_id=ref.agent_id, run_id=ref.id, status=RunStatus.FAILED, error=_as_known(answer))
    if isinstance(answer, ChildResult) and answer.run_id not in ("", ref.id):
        raise _misfit(asked, answer, f"a ChildResult whose run_id is {ref.id!r}, or that has none")
    return attrs.evolve(_child(asked, ref.agent_id, answer), run_id=ref.id)


def _answer_send(asked: Send, answer: object, _: HandlerPlace) -> bool:
    return True if answer is ABSENT else bool(_of(bool, asked, answer))


def _cancelled(asked: Cancel, answer: object, _: HandlerPlace) -> ChildResult[Any]:
    ref = asked.ref
    if answer is ABSENT:
        return ChildResult(agent_id=ref.agent_id, run_id=ref.id, status=RunStatus.CANCELLED)
    return _end_of_child(ref, answer, asked)


def _raced(asked: Race[Any], answer: Any, place: HandlerPlace) -> tuple[int, Any]:
    is_pair = isinstance(answer, list | tuple) and len(answer) == 2  # noqa: PLR2004
    if not is_pair or type(answer[0]) is not int or not 0 <= answer[0] < len(asked.members):
        raise _misfit(asked, answer, FORMS[Race])
    return answer[0], _entry(asked.members[answer[0]], answer[1], place)


# --- calls ------------------------------------------------------------------------------------------------------------


def _tool_result(asked: ToolCall, answer: object, _: HandlerPlace) -> ToolResult:
    result = _block_result(answer)
    return result if result.tool_name else attrs.evolve(result, tool_name=asked.tool)


def _block_result(answer: Any) -> ToolResult:
    if isinstance(answer, ToolResult):
        return answer
    return ToolResult.text(answer) if isinstance(answer, str) else ToolResult.json(answer)


def _child(asked: object, agent_id: str, answer: object) -> ChildResult[Any]:
    if isinstance(answer, ChildResult):
        return answer
    if isinstance(answer, BaseException):
        raise _misfit(asked, answer, "a ChildResult, or its output; throw an error that ends it")
    return ChildResult(agent_id=agent_id, output=answer, text=answer if isinstance(answer, str) else "")


def _stepped(asked: object, answer: object, place: HandlerPlace) -> StepResult:
    state = place.state
    if answer is ABSENT:
        return StepResult(state, steps_complete=asked is Sentinel.STEP_ALL)
    if isinstance(answer, AgentState):
        return StepResult(answer, steps_complete=asked is Sentinel.STEP_ALL)
    reply = _reply(asked, answer)
    if reply.tool_calls:
        raise _misfit(asked, answer, "a StepResult, since the results of tool calls belong into its history")
    history = state.message_history.append(AssistantMessage(reply.content))
    complete = asked is Sentinel.STEP_ALL or reply.stop_reason is StopReason.END_TURN
    after = attrs.evolve(state, message_history=history, view=history, step_index=state.step_index + 1)
    return StepResult(after, steps_complete=complete)


def _reply(asked: object, answer: object) -> ModelReply:
    return ModelReply(answer) if isinstance(answer, str) else _of(ModelReply, asked, answer)


def _items(asked: object, answer: object, *, empty: bool = False) -> Sequence[Any]:
    if answer is ABSENT and empty:
        return ()
    if isinstance(answer, list | tuple):
        return answer
    raise _misfit(asked, answer, "a list")


def _of(kind: type[object], asked: object, answer: object) -> Any:
    if isinstance(answer, kind):
        return answer
    raise _misfit(asked, answer, "a string" if kind is str else f"a string or a {kind.__name__}")


def _misfit(asked: object, answer: object, fine: str) -> DataError:
    given = "nothing" if answer is ABSENT else repr(answer)
    return DataError(f"{given}{MISFIT}{asked!r}; send {fine}, or a StepResult")


def _answer_tool_call(asked: ToolCall, answer: object, place: HandlerPlace) -> StepResult:
    return StepResult(place.state, (_member(asked, answer, place),))


def _answer_step_text(asked: StepText, answer: object, place: HandlerPlace) -> StepResult:
    return StepResult(place.state, tuple([_block_result(r) for r in _items(asked, answer, empty=True)]))


def _candidates(asked: GenerateN, answer: object, place: HandlerPlace) -> StepResult:
    return StepResult(place.state, n_responses=tuple([_of(str, asked, t) for t in _items(asked, answer)]))


STEPS: Mapping[type, Callable[[Any, Any, HandlerPlace], StepResult]] = {
    Sentinel: _stepped,
    StepWith: _stepped,
    StepText: _answer_step_text,
    GenerateN: _candidates,
    ToolCall: _answer_tool_call,
    Parallel: _gathered,
}
"""What is sent for what has more than a value."""

VALUES: Mapping[type, Callable[[Any, Any, HandlerPlace], Any]] = {
    ToolCall: _tool_result,
    AgentCall: lambda asked, answer, _: _child(asked, asked.agent_id, answer),
    Perform: _performed,
    Ask: _answer_ask,
    Complete: lambda asked, answer, _: _reply(asked, answer),
    Sleep: _woke,
    Receive: _received,
    Start: _answer_start,
    Wait: _answer_wait,
    Send: _answer_send,
    Cancel: _cancelled,
    Race: _raced,
}
"""The value of what has one; of a call of a tool, that of its place among others."""

MAY_BE_EMPTY = frozenset([row.kind for row in YIELDS if row.script_may_be_empty])
FORMS: Mapping[type, str] = {row.kind: row.script for row in YIELDS}
