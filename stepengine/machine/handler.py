"""
The conversation with the author's handler: advance it, carry out what it yields, send or throw what came of it.

The handler runs before the first model call and again after each step that it asked for (generator-contract G9). Only
returning, or yielding ``end_turn``, ends the run.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from stepengine.data import events as ev
from stepengine.data import yields as y
from stepengine.data.contexts import StepContext
from stepengine.data.effects import Perform, Spawn
from stepengine.data.messages import AssistantMessage, UserMessage
from stepengine.data.models import ModelReply
from stepengine.data.parts import TextPart, ToolCallPart
from stepengine.data.questions import Question
from stepengine.data.results import ToolResult
from stepengine.data.run import ChildResult
from stepengine.errors import LimitExceeded, LimitReached, PerformError, StepEngineError, ToolInputError
from stepengine.machine import requests
from stepengine.machine.author import Author, Returned, describe_yield
from stepengine.machine.batch import close_open, run_batch, run_together
from stepengine.machine.blocks import Block, Broken, Text, split_blocks
from stepengine.machine.control import CONTROL_SPECS
from stepengine.machine.live import Live
from stepengine.machine.signals import EndRun, Stopped
from stepengine.machine.slots import Slot, unavailable
from stepengine.machine.step import budgeted_step, run_turn

__all__ = ("converse", "default_handler")

Steps = Generator[Any, Any, Any]
MAX_LIMIT_THROWS = 2


def default_handler(_: StepContext) -> y.Steps:
    """Behave as an agent without a handler: run steps until the turn ends."""
    yield y.STEP_ALL


def converse(live: Live, author: Author) -> Steps:
    """Advance the handler until it returns; return its value."""
    asked = author.send(None)
    throws = 0
    while not isinstance(asked, Returned):
        if throws >= MAX_LIMIT_THROWS:
            live.warnings.append(f"{author.what} went on after its limit was spent and was closed")
            raise EndRun
        try:
            answer = yield from _answer(live, author, asked)
        except (StepEngineError, LimitReached) as error:
            throws += isinstance(error, LimitReached)
            asked = author.throw(error)
            error.__traceback__ = None
        else:
            asked = author.send(answer)
    return asked.value


def _answer(live: Live, author: Author, asked: Any) -> Generator[Any, Any, y.StepResult]:
    match asked:
        case y.STEP:
            yield from budgeted_step(live, y.StepWith())
        case y.STEP_ALL:
            yield from run_turn(live)
        case y.StepWith():
            _check_tools(live, asked)
            yield from budgeted_step(live, asked)
        case _:
            _count_actions(live, asked)
            return (yield from _act(live, author, asked))
    return _result(live)


def _result(live: Live, results: tuple[ToolResult, ...] = (), value: Any = None) -> y.StepResult:
    return y.StepResult(live.state(), results, live.steps_complete, value=value)


def _check_tools(live: Live, asked: y.StepWith) -> None:
    for name in asked.tools or ():
        if name not in live.offered:
            raise unavailable(live, name, tuple(live.offered))


def _count_actions(live: Live, asked: Any) -> None:
    """Count what the handler asks for beside steps; a spent budget is thrown at its yield (generator-contract G47)."""
    count = 1
    if isinstance(asked, y.Parallel):
        count = len(asked.calls)
    elif isinstance(asked, y.StepText):
        count = max(1, sum(isinstance(p, Block) for p in split_blocks(asked.text)))
    live.actions += count
    limit = live.limits.max_actions
    if limit is not None and live.actions > limit:
        msg = f"agent {live.agent.id!r} asked for more than {limit} actions; raise Limits(max_actions=...) or end the run"
        live.limit = live.limit or LimitExceeded(msg, kind="actions", limit=limit)
        raise LimitReached(live.limit)


def _act(live: Live, author: Author, asked: Any) -> Generator[Any, Any, y.StepResult]:
    match asked:
        case y.ToolCall():
            return (yield from _tool_call(live, asked))
        case y.Parallel():
            return (yield from _parallel(live, asked))
        case y.AgentCall():
            child = yield from live.perform(_spawn(live, asked))
            live.count_child(child)
            return _result(live, value=child)
        case y.Perform():
            return _result(live, value=(yield from requests.perform_call(live, asked)))
        case y.Ask():
            effect = requests.ask_effect(live, _question(asked))
            answers = yield from requests.ask(live, effect)
            return _result(live, value=answers[0].value)
        case y.Complete():
            return _result(live, value=(yield from requests.complete(live, asked)))
        case y.GenerateN():
            return (yield from _generate(live, asked))
        case y.StepText():
            return (yield from _step_text(live, asked))
    raise describe_yield(author.what, asked, author.location)


def _question(asked: y.Ask) -> Question:
    return Question("", asked.question, asked.options, asked.multi_select, details=asked.details)


def _spawn(live: Live, asked: y.AgentCall[Any]) -> Spawn:
    definition = None if isinstance(asked.agent, str) else asked.agent
    return Spawn(live.number(), asked.agent_id, asked.prompt, asked.params, definition=definition, parent=live.state)


def _slot(live: Live, call: y.ToolCall) -> Slot:
    """Return the slot of a handler's call, or raise what is wrong with it."""
    binding = live.bindings.get(call.tool)
    allowed = call.tool in live.offered or not call.include_tool_call
    if binding is None or not (allowed or binding.spec.kind != "ordinary"):
        hint = "" if binding is None else " Other tools of the engine can be called with include_tool_call=False."
        error = unavailable(live, call.tool, tuple(live.offered))
        error.message += hint
        error.args = (error.message,)
        raise error
    return Slot(ToolCallPart(live.new_call_id(), call.tool, call.input), "handler", binding)


def _recorded(live: Live, call: y.ToolCall) -> bool:
    """Return whether call and result enter the history: only of tools that the model knows (generator-contract G31)."""
    return call.include_tool_call and call.tool in live.offered


def _tool_call(live: Live, call: y.ToolCall) -> Generator[Any, Any, y.StepResult]:
    slot = _slot(live, call)
    try:
        yield from run_batch(live, [slot])
    finally:
        _record(live, [(call, slot)])
    assert slot.result is not None  # noqa: S101
    if call.tool == "end_turn" and not slot.result.is_error:
        raise EndRun
    return _result(live, (slot.result,))


def _record(live: Live, pairs: list[tuple[y.ToolCall, Slot]]) -> None:
    """Append calls and their results together, and make the changes that the results carry."""
    kept = [slot for call, slot in pairs if slot.result is not None and _recorded(live, call)]
    if kept:
        live.commit(AssistantMessage(tuple([s.call for s in kept])), [s.result for s in kept if s.result is not None])
    for _, slot in pairs:
        if slot.result is not None and slot.result.change is not None and slot not in kept:
            live.apply(slot.result.change)


def _parallel(live: Live, asked: y.Parallel[Any]) -> Generator[Any, Any, y.StepResult]:
    calls: list[tuple[y.ToolCall, Slot]] = []
    others: list[tuple[int, Any]] = []
    for index, member in enumerate(asked.calls):
        if isinstance(member, y.ToolCall):
            calls.append((member, _parallel_slot(live, member)))
        else:
            others.append((index, member))
    slots = [slot for _, slot in calls]
    for slot in slots:
        slot.validate()
    effects = [_member_effect(live, member) for _, member in others]
    try:
        outcomes = yield from run_together(live, slots, effects)
    except Stopped as stopped:
        close_open(slots, stopped.stop)
        _record(live, calls)
        raise
    _record(live, calls)
    entries = {index: _entry(live, member, o) for (index, member), o in zip(others, outcomes, strict=True)}
    results = tuple([slot.result for slot in slots if slot.result is not None])
    ordered = iter(results)
    value = tuple([entries[i] if i in entries else next(ordered) for i in range(len(asked.calls))])
    return _result(live, results, value)


def _parallel_slot(live: Live, call: y.ToolCall) -> Slot:
    slot = _slot(live, call)
    if slot.kind == "expanding":
        msg = f"{call.tool!r} cannot stand in Parallel; put AgentCall(...) or Ask(...) there instead"
        raise ToolInputError(msg, tool_name=call.tool, issues=(msg,))
    return slot


def _member_effect(live: Live, member: Any) -> Any:
    if isinstance(member, y.AgentCall):
        return _spawn(live, member)
    if isinstance(member, y.Ask):
        return requests.ask_effect(live, _question(member))
    return Perform(live.number(), member)


def _entry(live: Live, member: Any, outcome: Any) -> Any:
    """Return the entry of a member that is no tool call; a failure stays inside it."""
    try:
        value = live.unwrap(outcome)
    except (StepEngineError, LimitReached) as error:
        known = error.error if isinstance(error, LimitReached) else error
        if isinstance(member, y.AgentCall):
            child: ChildResult[Any] = ChildResult(agent_id=member.agent_id, status="failed", error=known)  # type: ignore[arg-type]
            return child
        return known if isinstance(known, PerformError) else PerformError(str(known), kind=type(known).__name__)
    if isinstance(member, y.AgentCall):
        live.count_child(value)
    return value[0].value if isinstance(member, y.Ask) else value


def _generate(live: Live, asked: y.GenerateN) -> Generator[Any, Any, y.StepResult]:
    if asked.n > y.MAX_CANDIDATES:
        msg = f"GenerateN({asked.n}) asks for more than {y.MAX_CANDIDATES} candidates"
        live.limit = live.limit or LimitExceeded(msg, kind="candidates", limit=y.MAX_CANDIDATES)
        raise LimitReached(live.limit)
    if live.steps_remaining <= 0 or live.limit is not None:
        msg = f"agent {live.agent.id!r} has no step left for GenerateN"
        live.limit = live.limit or LimitExceeded(msg, kind="steps", limit=live.limits.max_steps)
        raise LimitReached(live.limit)
    live.steps_remaining -= 1
    live.changed()
    tail = []
    if live.agent.step_prompt:
        tail = [UserMessage(f"<system-reminder>\n{live.agent.step_prompt}\n</system-reminder>", ("STEP_PROMPT",))]
    request = requests.step_request(live, y.StepWith(), list(tail))
    replies = yield from requests.candidates(live, request, asked.n)
    yield from _report_dropped(live, replies)
    texts = tuple([reply.text for reply in replies])
    return y.StepResult(live.state(), steps_complete=live.steps_complete, n_responses=texts)


def _report_dropped(live: Live, replies: list[ModelReply]) -> Steps:
    dropped = sum(len(reply.tool_calls) for reply in replies)
    if dropped:
        text = f"{dropped} tool calls in candidates were dropped; candidates are text"
        yield from live.notify(ev.HandlerNotice(path=live.plan.path, seq=live.seq, kind="calls_dropped", message=text))


def _step_text(live: Live, asked: y.StepText) -> Generator[Any, Any, y.StepResult]:
    results: list[ToolResult] = []
    ended_by = ""
    for piece in split_blocks(asked.text):
        match piece:
            case Text(text):
                live.add([AssistantMessage((TextPart(text),))])
            case Broken(name, problem):
                results.append((yield from _broken(live, name, problem)))
            case Block(name, value):
                slot = _block_slot(live, ToolCallPart(live.new_call_id(), name, value), ended_by)
                yield from _run_block(live, slot)
                assert slot.result is not None  # noqa: S101
                results.append(slot.result)
                if slot.spec is not None and slot.spec.ends_turn and not slot.result.is_error:
                    ended_by = name
    if ended_by == "end_turn":
        raise EndRun
    return _result(live, tuple(results))


def _broken(live: Live, name: str, problem: str) -> Generator[Any, Any, ToolResult]:
    text = f"This tool-call block was not executed: {problem}"
    yield from live.notify(ev.HandlerNotice(path=live.plan.path, seq=live.seq, kind="broken_block", message=text))
    return ToolResult.error(text, tool_name=name)


def _block_slot(live: Live, call: ToolCallPart, ended_by: str) -> Slot:
    known = call.tool_name in live.offered or call.tool_name in CONTROL_SPECS
    slot = Slot(call, "model", live.bindings[call.tool_name] if known else None, lenient=True)
    if not known:
        slot.fail(unavailable(live, call.tool_name, tuple(live.offered)))
    elif ended_by:
        slot.finish(ToolResult.error(f"Skipped: {ended_by} ended the turn before this call.", status="skipped"))
    return slot


def _run_block(live: Live, slot: Slot) -> Steps:
    try:
        yield from run_batch(live, [slot])
    finally:
        if slot.result is not None and slot.call.tool_name in live.offered:
            live.commit(AssistantMessage((slot.call,)), [slot.result])
