"""Short answers in a test, and the ``StepResult`` that each stands for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import attrs
from attrs import frozen

from stepengine.data.effects import ROWS
from stepengine.data.json import ABSENT, freeze
from stepengine.data.messages import AssistantMessage, ToolResult
from stepengine.data.models import ModelReply, StopReason
from stepengine.data.questions import Question, to_answer
from stepengine.data.state import AgentState, ChildResult, RunStatus, Waited
from stepengine.data.waits import ChildRef
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
from stepengine.machine.author import make_handler_error
from stepengine.machine.calls import EFFECT_OF
from stepengine.runtime.messages import make_message_checker

__tracebackhide__ = True  # a failed test ends at its author's line


MISFIT = " is not an answer to "


@frozen
class YieldContext:
    """
    The state of a handler at the yield that is answered.

    Attributes:
        state: Its state.
        now: Its time.
        children: How many children it has started in the background.
    """

    state: AgentState
    now: datetime
    children: int = 0


def make_step_result(yielded: Yieldable, answer: object, context: YieldContext) -> StepResult:
    """
    Return the ``StepResult`` for *yielded*, yielded at *context*, from a short *answer* such as a text; raise ``DataError`` for others.

    Raises:
        DataError: when it does not fit.
    """
    if isinstance(answer, StepResult):
        return answer
    try:
        make = STEPS.get(type(yielded))
        if make is not None:
            return make(yielded, answer, context)
        return StepResult(context.state, value=_answer_value(yielded, answer, context))
    except DataError as error:
        # Raised anew, so that the test is shown its own line and not where the value was looked at.
        known = MISFIT in error.message
        msg = error.message if known else f"{answer!r}{MISFIT}{yielded!r}: {error.message}"
        raise DataError(msg) from None


def compute_time_after_yield(yielded: object, value: object, now: datetime) -> datetime:
    """Return the time after *yielded*, yielded at *now*, has returned *value*. Only waits advance the time."""
    if isinstance(yielded, Sleep) and isinstance(value, datetime):
        return max(now, value)
    if isinstance(yielded, Race) and isinstance(value, tuple):
        return compute_time_after_yield(yielded.members[value[0]], value[1], now)
    if isinstance(yielded, Parallel) and isinstance(value, tuple):
        return max(
            [now, *[compute_time_after_yield(one, came, now) for one, came in zip(yielded.calls, value, strict=False)]]
        )
    is_over = isinstance(yielded, Receive) and value is None
    if isinstance(yielded, Wait) and isinstance(value, Waited):
        is_over = len(value.done) < yielded.need
    patience = getattr(yielded, "timeout", None) if is_over else None
    return now if patience is None else now + timedelta(seconds=patience)


def _answer_parallel(yielded: Parallel[Any], answer: object, context: YieldContext) -> StepResult:
    """Return the result of a ``Parallel``: one value per member, and their tool results; raise ``DataError`` for another number of answers."""
    answers = _require_list(yielded, answer)
    if len(answers) != len(yielded.calls):
        raise _make_invalid_answer_error(
            yielded, answer, f"a list with one answer for each of its {len(yielded.calls)} members"
        )
    value = tuple([_answer_member(call, given, context) for call, given in zip(yielded.calls, answers, strict=True)])
    return StepResult(context.state, tuple([v for v in value if isinstance(v, ToolResult)]), value=value)


def _answer_member(yielded: object, answer: object, context: YieldContext) -> Any:
    """Return the entry of a member of a ``Parallel`` or ``Race``. An exception becomes the failed result of the member."""
    if not isinstance(answer, Exception):
        return _answer_value(yielded, answer, context)
    if isinstance(yielded, ToolCall):
        return ToolResult.error(str(answer), tool_name=yielded.tool)
    if isinstance(yielded, AgentCall):
        return ChildResult(agent_id=yielded.agent_id, status=RunStatus.FAILED, error=_to_child_error(answer))
    if isinstance(yielded, Perform):
        return _to_perform_error(yielded, answer)
    raise _make_invalid_answer_error(yielded, answer, "a value, since it cannot fail")


def _to_child_error(error: Exception) -> StepEngineError:
    """Return *error* as the error of a child whose handler let it out."""
    if isinstance(error, StepEngineError):
        return error
    known = make_handler_error("the child's handler", error)
    known.__cause__ = error
    return known


def _to_perform_error(yielded: Perform[Any], error: Exception) -> PerformError:
    """Return *error* as a ``PerformError``; any other error becomes its cause."""
    if isinstance(error, PerformError):
        return error
    kind = type(error).__name__
    failed = PerformError(f"Perform({yielded.name}) raised {kind}: {error}", kind=kind)
    failed.__cause__ = error
    return failed


def _answer_value(yielded: Any, answer: Any, context: YieldContext) -> Any:
    """Return the value for a yield from a short *answer*, alone or as a member of others."""
    if answer is ABSENT and not isinstance(yielded, MAY_BE_EMPTY):
        raise _make_invalid_answer_error(yielded, answer, FORMS.get(type(yielded), "a value"))
    return VALUES.get(type(yielded), _answer_single_effect)(yielded, answer, context)


def _answer_single_effect(yielded: object, answer: object, _: YieldContext) -> object:
    """Return the answer to a yield that becomes one effect: a value of that effect's type, by default an empty one."""
    kind: Any = ROWS[EFFECT_OF[type(yielded)]].outcome
    if answer is ABSENT:
        return kind()
    if isinstance(answer, kind):
        return answer
    raise _make_invalid_answer_error(yielded, answer, FORMS[type(yielded)])


def _answer_ask(yielded: Ask, answer: Any, _: YieldContext) -> Any:
    """Return the value of the answer to a question after its validation."""
    question = Question("q1", yielded.question, yielded.options, yielded.multi_select, allow_text=yielded.allow_text)
    return to_answer(answer, question).value


def _answer_perform(_: object, answer: Any, __: YieldContext) -> Any:
    """Return *answer* as frozen JSON; a ``PerformError`` stays as it is."""
    return answer if isinstance(answer, PerformError) else freeze(answer)


# --- what waits -------------------------------------------------------------------------------------------------------


def _answer_sleep(yielded: Sleep, answer: object, context: YieldContext) -> datetime:
    """Return the wake time of a sleep: its planned time, or the answer of the test."""
    if answer is ABSENT:
        due = context.now + timedelta(seconds=yielded.seconds or 0)
        return max(context.now, yielded.until.astimezone(UTC)) if yielded.until is not None else due
    if isinstance(answer, datetime) and answer.utcoffset() is not None and answer >= context.now:
        return answer.astimezone(UTC)
    raise _make_invalid_answer_error(
        yielded, answer, f"nothing, or a date with a time zone, not before {context.now.isoformat()}"
    )


def _answer_receive(yielded: Receive[Any], answer: Any, _: YieldContext) -> Any:
    """Return the message for a ``Receive`` after its validation, or None for its timeout."""
    if answer is None:
        if yielded.timeout is None:
            raise _make_invalid_answer_error(yielded, answer, "a message, since it has no timeout")
        return None
    message = freeze(answer)
    problem = make_message_checker(yielded.topic, yielded.schema)(message)
    if problem:
        raise _make_invalid_answer_error(yielded, answer, f"a message that fits its schema ({problem})")
    return message


def _answer_start(yielded: Start[Any], answer: Any, context: YieldContext) -> Any:
    """Return references to the children; invented ones if the test contains none."""
    if answer is ABSENT:
        numbers = range(context.children, context.children + len(yielded.calls))
        made = [
            ChildRef(f"{context.state.run_id}-{n}", call.agent_id, str(n))
            for n, call in zip(numbers, yielded.calls, strict=True)
        ]
        return made[0] if len(made) == 1 else tuple(made)
    given = answer if isinstance(answer, list | tuple) else (answer,)
    fits = all(isinstance(ref, ChildRef) for ref in given) and len({ref.path for ref in given}) == len(yielded.calls)
    if not fits or [ref.agent_id for ref in given] != [call.agent_id for call in yielded.calls]:
        of = ", ".join([repr(call.agent_id) for call in yielded.calls])
        raise _make_invalid_answer_error(yielded, answer, f"nothing, or a ChildRef for each of {of}, with its own path")
    return given[0] if len(given) == 1 else tuple(given)


def _answer_wait(yielded: Wait[Any], answer: object, _: YieldContext) -> Waited[Any]:
    """Return the results of a ``Wait``'s ended children and the references of the running ones; raise ``DataError`` for unknown children."""
    if isinstance(answer, Waited):
        waited: Waited[Any] = answer
    else:
        given = _map_results_to_children(yielded, answer)
        done = tuple([_make_background_child_result(ref, came, yielded) for ref, came in given.items()])
        waited = Waited(done, tuple([ref for ref in yielded.refs if ref not in given]))
    ids = [*[child.run_id for child in waited.done], *[ref.id for ref in waited.open]]
    if sorted(ids) != sorted([ref.id for ref in yielded.refs]):
        raise _make_invalid_answer_error(
            yielded, answer, "a Waited with each of its children once, by the ids of their references"
        )
    if len(waited.done) < yielded.need and yielded.timeout is None:
        raise _make_invalid_answer_error(
            yielded, answer, f"the results of at least {yielded.need} of them, since it has no timeout"
        )
    return waited


def _map_results_to_children(yielded: Wait[Any], answer: Any) -> Mapping[ChildRef[Any], Any]:
    """Return the results by child, in the order of their ends; missing children are still running, unknown ones raise ``DataError``."""
    if answer is ABSENT:
        return {}
    if isinstance(answer, Mapping) and answer and all(isinstance(ref, ChildRef) for ref in answer):
        if not {*answer} <= {*yielded.refs}:
            raise _make_invalid_answer_error(yielded, answer, "only children that it waits for")
        return answer
    answers = [answer] if len(yielded.refs) == 1 else answer
    if not isinstance(answers, list | tuple) or len(answers) != len(yielded.refs):
        raise _make_invalid_answer_error(yielded, answer, FORMS[Wait])
    return dict(zip(yielded.refs, answers, strict=True))


def _make_background_child_result(ref: ChildRef[Any], answer: object, yielded: object) -> ChildResult[Any]:
    """Return *answer* as the result of the background child *ref*: a ``ChildResult``, its output, or the exception with which it failed."""
    if isinstance(answer, Exception):
        return ChildResult(agent_id=ref.agent_id, run_id=ref.id, status=RunStatus.FAILED, error=_to_child_error(answer))
    if isinstance(answer, ChildResult) and answer.run_id not in ("", ref.id):
        raise _make_invalid_answer_error(yielded, answer, f"a ChildResult with run_id {ref.id!r} or without one")
    return attrs.evolve(_to_child_result(yielded, ref.agent_id, answer), run_id=ref.id)


def _answer_send(yielded: Send, answer: object, _: YieldContext) -> bool:
    """Return whether the child of a ``Send`` is still running; True by default."""
    return True if answer is ABSENT else bool(_require_type(bool, yielded, answer))


def _answer_cancel(yielded: Cancel, answer: object, _: YieldContext) -> ChildResult[Any]:
    """Return the result of the cancelled child: cancelled, unless the answer says how it had ended before."""
    ref = yielded.ref
    if answer is ABSENT:
        return ChildResult(agent_id=ref.agent_id, run_id=ref.id, status=RunStatus.CANCELLED)
    return _make_background_child_result(ref, answer, yielded)


def _answer_race(yielded: Race[Any], answer: Any, context: YieldContext) -> tuple[int, Any]:
    """Return the index of the winner of a ``Race`` and its value."""
    is_pair = isinstance(answer, list | tuple) and len(answer) == 2  # noqa: PLR2004
    if not is_pair or type(answer[0]) is not int or not 0 <= answer[0] < len(yielded.members):
        raise _make_invalid_answer_error(yielded, answer, FORMS[Race])
    return answer[0], _answer_member(yielded.members[answer[0]], answer[1], context)


# --- calls ------------------------------------------------------------------------------------------------------------


def _make_named_tool_result(yielded: ToolCall, answer: object, _: YieldContext) -> ToolResult:
    result = to_tool_result(answer)
    return result if result.tool_name else attrs.evolve(result, tool_name=yielded.tool)


def to_tool_result(answer: Any) -> ToolResult:
    """Return a short answer as a ``ToolResult``: a text, or any other value as JSON."""
    if isinstance(answer, ToolResult):
        return answer
    return ToolResult.text(answer) if isinstance(answer, str) else ToolResult.json(answer)


def _to_child_result(yielded: object, agent_id: str, answer: object) -> ChildResult[Any]:
    """Return *answer* as a ``ChildResult``: anything else is the output of the child; an exception raises ``DataError``."""
    if isinstance(answer, ChildResult):
        return answer
    if isinstance(answer, BaseException):
        raise _make_invalid_answer_error(
            yielded, answer, "a ChildResult, or its output; to end the handler with an error, use throw"
        )
    return ChildResult(agent_id=agent_id, output=answer, text=answer if isinstance(answer, str) else "")


def _answer_step(yielded: object, answer: object, context: YieldContext) -> StepResult:
    """Return the result of a step: empty, with the given state, or with the given reply added to the history."""
    state = context.state
    if answer is ABSENT:
        return StepResult(state, steps_complete=yielded is Sentinel.STEP_ALL)
    if isinstance(answer, AgentState):
        return StepResult(answer, steps_complete=yielded is Sentinel.STEP_ALL)
    reply = _to_model_reply(yielded, answer)
    if reply.tool_calls:
        raise _make_invalid_answer_error(
            yielded, answer, "a StepResult, since its history must contain the results of tool calls"
        )
    history = state.message_history.append(AssistantMessage(reply.content))
    complete = yielded is Sentinel.STEP_ALL or reply.stop_reason is StopReason.END_TURN
    after = attrs.evolve(state, message_history=history, view=history, step_index=state.step_index + 1)
    return StepResult(after, steps_complete=complete)


def _to_model_reply(yielded: object, answer: object) -> ModelReply:
    """Return a text as a ``ModelReply``; a ``ModelReply`` unchanged."""
    return ModelReply(answer) if isinstance(answer, str) else _require_type(ModelReply, yielded, answer)


def _require_list(yielded: object, answer: object, *, allow_empty: bool = False) -> Sequence[Any]:
    """Return a list of answers, an empty one for none if allowed; else raise ``DataError``."""
    if answer is ABSENT and allow_empty:
        return ()
    if isinstance(answer, list | tuple):
        return answer
    raise _make_invalid_answer_error(yielded, answer, "a list")


def _require_type(kind: type[object], yielded: object, answer: object) -> Any:
    """Return *answer* if it is a *kind*; raise ``DataError`` otherwise."""
    if isinstance(answer, kind):
        return answer
    raise _make_invalid_answer_error(yielded, answer, "a string" if kind is str else f"a string or a {kind.__name__}")


def _make_invalid_answer_error(yielded: object, answer: object, expected: str) -> DataError:
    """Return the error for an answer that does not fit the yield, with the *expected* form."""
    given = "nothing" if answer is ABSENT else repr(answer)
    return DataError(f"{given}{MISFIT}{yielded!r}; send {expected}, or a StepResult")


def _answer_tool_call(yielded: ToolCall, answer: object, context: YieldContext) -> StepResult:
    return StepResult(context.state, (_answer_value(yielded, answer, context),))


def _answer_step_text(yielded: StepText, answer: object, context: YieldContext) -> StepResult:
    """Return the result of a ``StepText`` with the tool results in *answer*; none by default."""
    return StepResult(
        context.state, tuple([to_tool_result(r) for r in _require_list(yielded, answer, allow_empty=True)])
    )


def _answer_generate_n(yielded: GenerateN, answer: object, context: YieldContext) -> StepResult:
    return StepResult(
        context.state, n_responses=tuple([_require_type(str, yielded, t) for t in _require_list(yielded, answer)])
    )


STEPS: Mapping[type, Callable[[Any, Any, YieldContext], StepResult]] = {
    Sentinel: _answer_step,
    StepWith: _answer_step,
    StepText: _answer_step_text,
    GenerateN: _answer_generate_n,
    ToolCall: _answer_tool_call,
    Parallel: _answer_parallel,
}
"""What is sent for what has more than a value."""

VALUES: Mapping[type, Callable[[Any, Any, YieldContext], Any]] = {
    ToolCall: _make_named_tool_result,
    AgentCall: lambda yielded, answer, _: _to_child_result(yielded, yielded.agent_id, answer),
    Perform: _answer_perform,
    Ask: _answer_ask,
    Complete: lambda yielded, answer, _: _to_model_reply(yielded, answer),
    Sleep: _answer_sleep,
    Receive: _answer_receive,
    Start: _answer_start,
    Wait: _answer_wait,
    Send: _answer_send,
    Cancel: _answer_cancel,
    Race: _answer_race,
}
"""The value of what has one, unless it just becomes one effect; of a call of a tool, that of its place among others."""

MAY_BE_EMPTY = tuple([row.kind for row in YIELDS if row.script_may_be_empty])
FORMS: Mapping[type, str] = {row.kind: row.script for row in YIELDS}
