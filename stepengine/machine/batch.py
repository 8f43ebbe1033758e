"""
The tool calls of one reply, or of one yield: validate, judge, carry out, in the order that design 3 fixes.

Calls run one after another, unless every call is to a ``parallel_safe`` tool and none ends the turn; then the batch takes
four passes: judge all, ask all questions at once, run all allowed calls at once, let the hooks look at all results.
Results are always in call order, and every call has one, whatever happens.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from stepengine.data import events as ev
from stepengine.data.effects import Ask, Leaf
from stepengine.data.outcomes import Single, Stop
from stepengine.data.parts import ToolCallPart
from stepengine.data.questions import Answer, Decision, Question
from stepengine.data.results import ToolResult
from stepengine.errors import LimitReached, StepEngineError, ToolInputError, UnknownOutcome
from stepengine.machine import hooks, requests
from stepengine.machine.live import Live
from stepengine.machine.signals import Stopped
from stepengine.machine.slots import Slot, execute, named, settle, start, unavailable

__all__ = ("close_open", "model_slots", "run_batch", "run_together")

Steps = Generator[Any, Any, Any]


def model_slots(live: Live, calls: Sequence[ToolCallPart], offered: Sequence[str]) -> list[Slot]:
    """Return the slots of a model's calls; a call of a tool that was not offered already has its error result."""
    slots = []
    for call in calls:
        known = call.tool_name in offered
        slot = Slot(call, "model", live.bindings[call.tool_name] if known else None, lenient=True)
        if not known:
            slot.fail(unavailable(live, call.tool_name, tuple(offered)))
        slots.append(slot)
    return slots


def run_batch(live: Live, slots: Sequence[Slot]) -> Steps:
    """
    Give every slot its result.

    Raises:
        Stopped: when the world ended the run; every slot has a result even so.
        LimitReached: when a budget was spent in one of the calls, after all slots have their results.
    """
    try:
        if len(slots) > 1 and _is_parallel(slots):
            yield from run_together(live, slots)
        else:
            yield from _in_turn(live, slots)
    except Stopped as stopped:
        close_open(slots, stopped.stop)
        raise


def _is_parallel(slots: Sequence[Slot]) -> bool:
    specs = [s.spec for s in slots if s.spec is not None]
    return all(spec.parallel_safe and not spec.ends_turn and spec.kind == "ordinary" for spec in specs)


def close_open(slots: Sequence[Slot], stop: Stop) -> None:
    """Give every slot without a result one that says why there is none."""
    for slot in slots:
        if slot.result is None:
            if stop.kind == "suspended":
                waiting = stop.questions[0].id if stop.questions else ""
                slot.finish(ToolResult.pending(waiting))
            else:
                text = "Cancelled: the run ended before this call gave a result; it may have had effects."
                slot.finish(ToolResult.error(text, status="cancelled"))


def _in_turn(live: Live, slots: Sequence[Slot]) -> Steps:
    ended_by = ""
    spent: LimitReached | None = None
    for slot in slots:
        if slot.result is not None:
            continue
        if ended_by or spent:
            why = f"{ended_by} ended the turn" if ended_by else "a limit of the run is spent"
            slot.finish(ToolResult.error(f"Skipped: {why} before this call.", status="skipped"))
            continue
        try:
            yield from _one(live, slot)
        except UnknownOutcome:
            if slot.source != "model":
                raise
        except LimitReached as error:
            spent = error
        if slot.spec is not None and slot.spec.ends_turn and slot.result is not None and not slot.result.is_error:
            ended_by = slot.call.tool_name
    if spent:
        raise spent


def _one(live: Live, slot: Slot) -> Steps:
    question = yield from _judge(live, slot)
    if question is not None:
        effect = requests.ask_effect(live, question, purpose="permission", tool_call_id=slot.call.tool_call_id)
        yield from _permit(live, slot, (yield from requests.ask(live, effect)))
    if slot.result is None:
        yield from execute(live, slot)
        yield from _after(live, slot)


def _judge(live: Live, slot: Slot) -> Generator[Any, Any, Question | None]:
    """Validate a call and ask the ``pre_tool`` hooks; return the question when a person must decide."""
    try:
        slot.validate()
    except ToolInputError as error:
        if slot.source == "handler":
            raise
        slot.fail(error)
        return None
    if not live.plan.hooks.pre_tool:
        return None

    def revalidate(call: ToolCallPart) -> None:
        slot.call = call
        slot.validate()

    decision, slot.call = yield from hooks.judge_call(live, slot.call, revalidate)
    if decision is None:
        return None
    if decision.kind == "ask" and slot.spec is not None and slot.spec.requires_permission:
        return _permission_question(slot, decision)
    yield from _decided(live, slot, "deny" if decision.kind == "deny" else "allow", decision.rule_id)
    if decision.kind == "deny":
        _deny(slot, decision.message)
    return None


def _deny(slot: Slot, message: str) -> None:
    text = message or f"The call of {slot.call.tool_name} was denied."
    slot.finish(ToolResult.error(text, status="denied"))


def _permission_question(slot: Slot, decision: Decision) -> Question:
    assert slot.validated is not None  # noqa: S101
    name = slot.call.tool_name
    return Question(
        "", decision.message or f"May {name} run?", decision.options, tool_name=name, details=slot.validated.input
    )


def _permit(live: Live, slot: Slot, answers: tuple[Answer, ...]) -> Steps:
    answer = answers[0]
    yield from _decided(live, slot, "allow" if answer.agrees else "deny", None)
    if not answer.agrees:
        said = f": {answer.text}" if answer.text and answer.text.lower() not in ("no", "n") else "."
        _deny(slot, f"A person denied the call of {slot.call.tool_name}{said}")


def _decided(live: Live, slot: Slot, decision: str, rule_id: str | None) -> Steps:
    event = ev.PermissionDecided(
        path=live.plan.path,
        seq=live.seq,
        tool_name=slot.call.tool_name,
        tool_call_id=slot.call.tool_call_id,
        decision=decision,
        rule_id=rule_id,
    )
    yield from live.notify(event)


def _after(live: Live, slot: Slot) -> Steps:
    if live.plan.hooks.post_tool and slot.result is not None:
        slot.result = named((yield from hooks.post_tool(live, slot.call, slot.result)), slot.call)


def run_together(live: Live, slots: Sequence[Slot], others: Sequence[Leaf] = ()) -> Generator[Any, Any, list[Single]]:
    """
    Run a batch in four passes; *others* are effects that run beside its calls. Return their outcomes.

    Raises:
        Stopped: when something was stopped; finished members keep their results.
    """
    questions: list[tuple[Slot, Ask]] = []
    for slot in slots:
        question = None if slot.result is not None else (yield from _judge(live, slot))
        if question is not None:
            effect = requests.ask_effect(live, question, purpose="permission", tool_call_id=slot.call.tool_call_id)
            questions.append((slot, effect))
    yield from _ask_all(live, questions)
    allowed = [slot for slot in slots if slot.result is None]
    for slot in allowed:
        if not start(live, slot):
            yield from execute(live, slot)
    running = [slot for slot in allowed if slot.effects]
    effects = [effect for slot in running for effect in slot.effects]
    limit = live.limits.max_concurrent_children if others else None
    outcomes = yield from live.gather([*effects, *others], limit)
    stops = _settle_all(live, running, outcomes)
    stops += [_with_questions(o, e) for e, o in zip(others, outcomes[len(effects) :], strict=True) if type(o) is Stop]
    for slot in allowed:
        yield from _after(live, slot)
    if stops:
        raise Stopped(_merged(stops))
    return outcomes[len(effects) :]


def _ask_all(live: Live, questions: list[tuple[Slot, Ask]]) -> Steps:
    outcomes = yield from live.gather([effect for _, effect in questions])
    stops: list[Stop] = []
    for (slot, effect), outcome in zip(questions, outcomes, strict=True):
        if type(outcome) is Stop:
            stops.append(_with_questions(outcome, effect))
            continue
        try:
            answers = live.unwrap(outcome)
        except (StepEngineError, LimitReached) as error:
            _deny(slot, f"Nobody could be asked: {error}")
        else:
            yield from _permit(live, slot, answers)
    if stops:
        raise Stopped(_merged(stops))


def _with_questions(stop: Stop, effect: Leaf) -> Stop:
    if stop.questions or type(effect) is not Ask or stop.kind != "suspended":
        return stop
    return Stop(stop.kind, stop.at, stop.error, effect.questions)


def _settle_all(live: Live, running: Sequence[Slot], outcomes: list[Single]) -> list[Stop]:
    """Give finished slots their results and return the stops."""
    stops: list[Stop] = []
    position = 0
    for slot in running:
        mine = outcomes[position : position + len(slot.effects)]
        position += len(slot.effects)
        try:
            settle(live, slot, mine)
        except Stopped as stopped:
            stops.append(_with_questions(stopped.stop, slot.effects[0]))
    return stops


def _merged(stops: Sequence[Stop]) -> Stop:
    """Return one stop for several: anything harder than a suspension wins, questions are collected."""
    first = next((s for s in stops if s.kind != "suspended"), stops[0])
    questions = tuple([q for s in stops for q in s.questions])
    return Stop(first.kind, max(s.at for s in stops), first.error, questions)
