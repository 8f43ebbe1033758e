"""What the short answers mean that a test gives to a handler's yields."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import attrs

from stepengine.data.json import freeze
from stepengine.data.messages import AssistantMessage, ToolResult
from stepengine.data.models import ModelReply, StopReason
from stepengine.data.questions import Question, answered
from stepengine.data.state import AgentState, ChildResult
from stepengine.data.yields import (
    AgentCall,
    Ask,
    Complete,
    GenerateN,
    Parallel,
    Sentinel,
    StepResult,
    StepText,
    StepWith,
    ToolCall,
)
from stepengine.errors import DataError, PerformError

__all__ = ("NOTHING", "answer_to")


class _Nothing:
    def __repr__(self) -> str:
        return "nothing"


NOTHING: Final = _Nothing()
"""No answer was given, which is not the JSON value ``None``."""


def answer_to(asked: Any, answer: Any, state: AgentState) -> StepResult:
    """
    Return the ``StepResult`` that *answer* stands for when *asked* was yielded in *state*.

    Raises:
        DataError: when it does not fit.
    """
    if isinstance(answer, StepResult):
        return answer
    if isinstance(asked, Sentinel | StepWith):
        return _stepped(asked, answer, state)
    if isinstance(asked, Parallel):
        return _gathered(asked, answer, state)
    if isinstance(asked, ToolCall):
        return StepResult(state, (_tool_result(asked, answer),))
    if isinstance(asked, StepText):
        return StepResult(state, tuple([_block_result(r) for r in _items(asked, answer, empty=True)]))
    if isinstance(asked, GenerateN):
        return StepResult(state, n_responses=tuple([_of(str, asked, t) for t in _items(asked, answer)]))
    return StepResult(state, value=_reply(asked, answer) if isinstance(asked, Complete) else _member(asked, answer))


def _gathered(asked: Parallel[Any], answer: Any, state: AgentState) -> StepResult:
    answers = _items(asked, answer)
    if len(answers) != len(asked.calls):
        raise _misfit(asked, answer, f"a list with one answer for each of its {len(asked.calls)} members")
    value = tuple([_member(call, given) for call, given in zip(asked.calls, answers, strict=True)])
    return StepResult(state, tuple([v for v in value if isinstance(v, ToolResult)]), value=value)


def _member(asked: Any, answer: Any) -> Any:
    if isinstance(asked, ToolCall):
        return _tool_result(asked, answer)
    if answer is NOTHING:
        raise _misfit(asked, answer, "a value")
    if isinstance(asked, AgentCall):
        return _child(asked, answer)
    if isinstance(asked, Ask):
        question = Question("q1", asked.question, asked.options, asked.multi_select, allow_text=asked.allow_text)
        return answered(answer, question).value
    return answer if isinstance(answer, PerformError) else freeze(answer)


def _tool_result(asked: ToolCall, answer: Any) -> ToolResult:
    if answer is NOTHING:
        raise _misfit(asked, answer, "a ToolResult, a text or a JSON value")
    result = _block_result(answer)
    return result if result.tool_name else attrs.evolve(result, tool_name=asked.tool)


def _block_result(answer: Any) -> ToolResult:
    if isinstance(answer, ToolResult):
        return answer
    return ToolResult.text(answer) if isinstance(answer, str) else ToolResult.json(answer)


def _child(asked: AgentCall[Any], answer: Any) -> ChildResult[Any]:
    if isinstance(answer, ChildResult):
        return answer
    return ChildResult(agent_id=asked.agent_id, output=answer, text=answer if isinstance(answer, str) else "")


def _stepped(asked: Any, answer: Any, state: AgentState) -> StepResult:
    if answer is NOTHING:
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


def _reply(asked: Any, answer: Any) -> ModelReply:
    return ModelReply(answer) if isinstance(answer, str) else _of(ModelReply, asked, answer)


def _items(asked: Any, answer: Any, *, empty: bool = False) -> Sequence[Any]:
    if answer is NOTHING and empty:
        return ()
    if isinstance(answer, list | tuple):
        return answer
    raise _misfit(asked, answer, "a list")


def _of(kind: type[Any], asked: Any, answer: Any) -> Any:
    if isinstance(answer, kind):
        return answer
    raise _misfit(asked, answer, "a string" if kind is str else f"a string or a {kind.__name__}")


def _misfit(asked: Any, answer: Any, fine: str) -> DataError:
    return DataError(f"{answer!r} is no answer to {asked!r}; send {fine}, or a StepResult")
