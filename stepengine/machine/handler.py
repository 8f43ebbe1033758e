"""
The conversation with the author's handler: advance it, carry out what it yields, send or throw what came of it.

The handler runs before the first model call and again after each step that it asked for (generator-contract G9). Only
returning, or yielding ``end_turn``, ends the run.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from typing import Any, assert_never

from stepengine.data import events as ev
from stepengine.data import yields as y
from stepengine.data.contexts import StepContext
from stepengine.data.effects import Leaf, Perform, Spawn
from stepengine.data.messages import AssistantMessage
from stepengine.data.models import ModelReply
from stepengine.data.outcomes import Single
from stepengine.data.parts import TextPart, ToolCallPart
from stepengine.data.questions import Question
from stepengine.data.results import ToolResult
from stepengine.errors import BadYield, LimitExceeded, LimitReached, PerformError, StepEngineError, ToolInputError
from stepengine.machine import requests
from stepengine.machine.author import Author, Returned, describe_yield, noted
from stepengine.machine.batch import Beside, run_batch
from stepengine.machine.blocks import Block, Broken, Text, split_blocks
from stepengine.machine.control import CONTROL_SPECS
from stepengine.machine.inheriting import inheritable
from stepengine.machine.live import Live
from stepengine.machine.signals import EndRun
from stepengine.machine.slots import Slot, failed_child, take_last_word, unavailable
from stepengine.machine.step import budgeted_step, reopened_step, run_turn

__all__ = ("converse", "default_handler", "run_alone")

Steps = Generator[Any, Any, Any]
Answer = Generator[Any, Any, y.StepResult]
MAX_LIMIT_THROWS = 2
PLAIN = y.StepWith()


def default_handler(_: StepContext) -> y.Steps:
    """Behave as an agent without a handler: run steps until the turn ends."""
    yield y.STEP_ALL


def run_alone(live: Live) -> Steps:
    """Run an agent without a handler as ``default_handler`` would, with nobody to look at states and steps."""
    try:
        if live.open_step is None or not (yield from reopened_step(live, *live.open_step)):
            yield from run_turn(live)
    except StepEngineError as error:
        live.count_actions(1)
        raise noted(error) from error.__cause__


def converse(live: Live, author: Author) -> Steps:
    """Advance the handler until it returns; return its value."""
    asked = author.send(None)
    throws = 0
    while type(asked) is not Returned:
        if throws >= MAX_LIMIT_THROWS:
            live.warnings.append(f"{author.what} went on after its limit was spent and was closed")
            raise EndRun
        try:
            answer = yield from _answer(live, author, asked)
        except (StepEngineError, LimitReached) as error:
            throws += isinstance(error, LimitReached)
            asked = author.throw(error)
            # The frames of the throw hold on to whole states.
            error.__traceback__ = None
        else:
            asked = author.send(answer)
    return asked.value


def _answer(live: Live, author: Author, asked: Any) -> Answer:
    kind = type(asked)
    if kind is y.Sentinel or kind is y.StepWith:
        yield from _steps(live, asked)
        return _result(live)
    act = _ACTS.get(kind)
    if act is None:
        live.count_actions(1)
        raise describe_yield(author.what, asked, author.location)
    return (yield from act(live, asked))


def _result(live: Live, results: tuple[ToolResult, ...] = (), value: Any = None) -> y.StepResult:
    return y.quick_step_result(live.state(), results, live.steps_complete, value=value)


def _steps(live: Live, asked: Any) -> Steps:
    try:
        if asked is y.STEP:
            yield from budgeted_step(live, PLAIN)
        elif asked is y.STEP_ALL:
            yield from run_turn(live)
        else:
            _check_tools(live, asked)
            yield from budgeted_step(live, asked)
    except StepEngineError:
        # A handler that swallows every error and asks again must end, too (reliability GN02).
        live.count_actions(1)
        raise


def _check_tools(live: Live, asked: y.StepWith) -> None:
    for name in asked.tools or ():
        if name not in live.offered:
            raise unavailable(live, name, tuple(live.offered))


# --- calls ----------------------------------------------------------------------------------------------------------


def _slot(live: Live, call: y.ToolCall) -> Slot:
    """Return the slot of a handler's call, or raise what is wrong with it."""
    binding = live.bindings.get(call.tool)
    allowed = call.tool in live.offered or not call.include_tool_call
    if binding is not None and (allowed or binding.spec.kind != "ordinary"):
        return Slot(ToolCallPart(live.new_call_id(), call.tool, call.input), "handler", binding)
    hint = "" if binding is None else " Other tools of the engine can be called with include_tool_call=False."
    raise unavailable(live, call.tool, tuple(live.offered), hint)


def _tool_call(live: Live, call: y.ToolCall) -> Answer:
    live.count_actions(1)
    slot = _slot(live, call)
    try:
        yield from run_batch(live, (slot,))
    finally:
        _record(live, (call,), (slot,))
    assert slot.result is not None  # noqa: S101
    if take_last_word(live, (slot,)):
        raise EndRun
    return _result(live, (slot.result,))


def _record(live: Live, calls: Sequence[y.ToolCall], slots: Sequence[Slot]) -> None:
    """
    Append calls and their results together.

    Only calls of tools that the model knows enter the history (generator-contract G31).
    """
    kept = [
        (slot.call, slot.result)
        for call, slot in zip(calls, slots, strict=True)
        if slot.result is not None and call.include_tool_call and call.tool in live.offered
    ]
    if kept:
        live.commit(AssistantMessage(tuple([part for part, _ in kept])), [result for _, result in kept])


def _agent_call(live: Live, asked: y.AgentCall[Any]) -> Answer:
    live.count_actions(1)
    try:
        child = yield from live.perform(_spawn(live, asked))
    except LimitExceeded as error:
        if error.kind != "depth":
            raise
        child = failed_child(asked.agent_id, error)
    live.count_child(child)
    return _result(live, value=child)


def _spawn(live: Live, asked: y.AgentCall[Any], *, of: int = 1) -> Spawn:
    definition = None if isinstance(asked.agent, str) else asked.agent
    parent = partial(inheritable, live)
    return Spawn(
        live.number(),
        asked.agent_id,
        asked.prompt,
        asked.params,
        definition=definition,
        parent=parent,
        of=of,
    )


def _perform(live: Live, asked: y.Perform[Any]) -> Answer:
    live.count_actions(1)
    return _result(live, value=(yield from requests.perform_call(live, asked)))


def _ask(live: Live, asked: y.Ask) -> Answer:
    live.count_actions(1)
    answers = yield from requests.ask(live, requests.ask_effect(live, _question(live, asked)))
    return _result(live, value=answers[0].value)


def _question(live: Live, asked: y.Ask) -> Question:
    if asked.key in live.keys:
        msg = f"the key {asked.key!r} names a question that this run has asked before; each has a name of its own, or none"
        raise BadYield(msg)
    live.keys |= {asked.key} if asked.key is not None else set()
    named, several = asked.key or "", asked.multi_select
    return Question(named, asked.question, asked.options, several, details=asked.details, allow_text=asked.allow_text)


def _complete(live: Live, asked: y.Complete) -> Answer:
    live.count_actions(1)
    return _result(live, value=(yield from requests.complete(live, asked)))


# --- several calls at once ------------------------------------------------------------------------------------------


def _parallel(live: Live, asked: y.Parallel[Any]) -> Answer:
    live.count_actions(1)
    children = sum(isinstance(call, y.AgentCall) for call in asked.calls)
    members = [_member(live, call, children=children) for call in asked.calls]
    slots = [member for member in members if type(member) is Slot]
    for slot in slots:
        slot.validate()
    calls = [call for call in asked.calls if isinstance(call, y.ToolCall)]
    try:
        yield from run_batch(live, members, asked)
    finally:
        _record(live, calls, slots)
    if take_last_word(live, slots):
        raise EndRun
    value = tuple([member.result if type(member) is Slot else member.entry for member in members])  # type: ignore[union-attr]
    return _result(live, tuple([slot.result for slot in slots if slot.result is not None]), value)


def _member(live: Live, call: Any, *, children: int) -> Slot | Beside:
    if isinstance(call, y.ToolCall):
        slot = _slot(live, call)
        if slot.binding is not None and slot.binding.spec.kind == "expanding":
            msg = f"{call.tool!r} cannot stand in Parallel; put AgentCall(...) or Ask(...) there instead"
            raise ToolInputError(msg, tool_name=call.tool, issues=(msg,))
        return slot
    if isinstance(call, y.AgentCall):
        return Beside(
            lambda: _spawn(live, call, of=children), lambda outcome, effect: _child(live, call, outcome, effect)
        )
    if isinstance(call, y.Ask):
        question = _question(live, call)
        return Beside(
            lambda: requests.ask_effect(live, question), lambda outcome, effect: _value(live, outcome, effect)
        )
    return Beside(lambda: Perform(live.number(), call), lambda outcome, effect: _value(live, outcome, effect))


def _child(live: Live, asked: y.AgentCall[Any], outcome: Single, effect: Leaf) -> Any:
    try:
        child = live.unwrap(outcome, effect)
    except (StepEngineError, LimitReached) as error:
        child = failed_child(asked.agent_id, error)
    live.count_child(child)
    return child


def _value(live: Live, outcome: Single, effect: Leaf) -> Any:
    """Return a value or answer; a failure stays inside its entry."""
    try:
        value = live.unwrap(outcome, effect)
    except (StepEngineError, LimitReached) as error:
        known = error.error if isinstance(error, LimitReached) else error
        return known if isinstance(known, PerformError) else PerformError(str(known), kind=type(known).__name__)
    return value if isinstance(effect, Perform) else value[0].value


# --- candidates and text --------------------------------------------------------------------------------------------


def _generate(live: Live, asked: y.GenerateN) -> Answer:
    live.count_actions(1)
    if asked.n > y.MAX_CANDIDATES:
        msg = f"GenerateN({asked.n}) asks for more than {y.MAX_CANDIDATES} candidates"
        live.limit = live.limit or LimitExceeded(msg, kind="candidates", limit=y.MAX_CANDIDATES)
    elif live.steps_remaining <= 0:
        msg = f"agent {live.agent.id!r} has no step left for GenerateN; raise Limits(max_steps=...)"
        live.limit = live.limit or LimitExceeded(msg, kind="steps", limit=live.limits.max_steps)
    if live.limit is not None:
        raise LimitReached(live.limit)
    live.steps_remaining -= 1
    live.changed()
    request = requests.step_request(live, PLAIN, requests.step_prompt(live))
    replies = yield from requests.candidates(live, request, asked.n)
    yield from _report_dropped(live, replies)
    texts = tuple([reply.said for reply in replies])
    return y.StepResult(live.state(), steps_complete=live.steps_complete, n_responses=texts)


def _report_dropped(live: Live, replies: list[ModelReply]) -> Steps:
    dropped = sum(len(reply.tool_calls) for reply in replies)
    if dropped:
        text = f"{dropped} tool calls in candidates were dropped; candidates are text"
        yield from live.notify(ev.HandlerNotice(path=live.plan.path, seq=live.seq, kind="calls_dropped", message=text))


def _step_text(live: Live, asked: y.StepText) -> Answer:
    pieces = split_blocks(asked.text)
    live.count_actions(max(1, sum(isinstance(p, Block) for p in pieces)))
    results: list[ToolResult] = []
    ended_by: Slot | None = None
    fault = False
    for piece in pieces:
        match piece:
            case Text(text):
                live.add([AssistantMessage((TextPart(text),))])
                yield from live.notify(ev.TextCompleted(path=live.plan.path, seq=live.seq, text=text))
            case Broken(name, problem):
                fault = True
                results.append((yield from _broken(live, name, problem)))
            case Block(name, value):
                slot = _block_slot(live, ToolCallPart(live.new_call_id(), name, value), ended_by)
                yield from _run_block(live, slot)
                assert slot.result is not None  # noqa: S101
                results.append(slot.result)
                fault = fault or slot.fault
                ended_by = slot if slot.ended_turn else ended_by
            case _:
                assert_never(piece)
    if ended_by is not None and not fault:
        live.steps_complete = not live.take_inbox()
        take_last_word(live, (ended_by,))
    return _result(live, tuple(results))


def _broken(live: Live, name: str, problem: str) -> Generator[Any, Any, ToolResult]:
    text = f"This tool-call block was not executed: {problem}"
    yield from live.notify(ev.HandlerNotice(path=live.plan.path, seq=live.seq, kind="broken_block", message=text))
    return ToolResult.error(text, tool_name=name)


def _block_slot(live: Live, call: ToolCallPart, ended_by: Slot | None) -> Slot:
    known = call.tool_name in live.offered or call.tool_name in CONTROL_SPECS
    slot = Slot(call, "model", live.bindings[call.tool_name] if known else None, lenient=True)
    if not known:
        slot.fail(unavailable(live, call.tool_name, tuple(live.offered)))
    elif ended_by is not None:
        text = f"Skipped: {ended_by.call.tool_name} ended the turn before this call."
        slot.finish(ToolResult.error(text, status="skipped"))
    return slot


def _run_block(live: Live, slot: Slot) -> Steps:
    try:
        yield from run_batch(live, (slot,))
    finally:
        if slot.result is not None and slot.call.tool_name in live.offered:
            live.commit(AssistantMessage((slot.call,)), [slot.result])


_ACTS: Mapping[type, Callable[[Live, Any], Answer]] = {
    y.ToolCall: _tool_call,
    y.AgentCall: _agent_call,
    y.Perform: _perform,
    y.Ask: _ask,
    y.Complete: _complete,
    y.Parallel: _parallel,
    y.GenerateN: _generate,
    y.StepText: _step_text,
}
