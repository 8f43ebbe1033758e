"""
The tool calls of one reply, or of one yield: validate, judge, carry out, in the order that design 3 fixes.

Calls run one after another, unless every call is to a ``parallel_safe`` tool and none ends the turn; then the batch takes
four passes: judge all, ask all questions at once, run all allowed calls at once, let the hooks look at all results.
Results are always in call order, and every call has one, whatever happens.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Generator, Sequence
from typing import Any

from stepengine.data import events as ev
from stepengine.data.effects import Ask, Leaf
from stepengine.data.json import canonical
from stepengine.data.outcomes import Failure, Single, Stop
from stepengine.data.parts import ToolCallPart
from stepengine.data.questions import NOBODY, REMEMBERED, Answer, Decision, Question
from stepengine.data.results import ToolResult
from stepengine.data.tools import Control, Ordinary, Spawning
from stepengine.data.yields import Parallel
from stepengine.errors import LimitExceeded, LimitReached, StepEngineError
from stepengine.machine import hooks, requests
from stepengine.machine.live import Live
from stepengine.machine.signals import Stopped, merged
from stepengine.machine.slots import Slot, execute, execute_ordinary, log, named, settle, show, start, unavailable

__all__ = ("Beside", "model_slots", "run_batch")

Steps = Generator[Any, Any, Any]
UNSAID = Answer()
SPENT = "a limit of the run was spent"
MAX_EDITS = 10
UNSTEADY = "Not run: whenever a person approves an input of this call, a hook makes another one of it."
TOLD_AT = 3
UNATTENDED = (
    "Denied: a call of {} needs a person's approval, and nobody can give it in this run. Go on without it, and say in the "
    "end what was left undone."
)


class Beside:
    """
    An effect that runs beside the calls of a batch.

    Attributes:
        begin: Makes the effect when it is its turn to get a number.
        take: Turns its outcome into the entry, or raises ``Stopped``.
        entry: What came of it.
    """

    __slots__ = ("begin", "effect", "entry", "take")

    def __init__(self, begin: Callable[[], Leaf], take: Callable[[Single, Leaf], Any]) -> None:
        self.begin = begin
        self.take = take
        self.effect: Leaf
        self.entry: Any = None


def model_slots(live: Live, calls: Sequence[ToolCallPart], offered: Sequence[str]) -> list[Slot]:
    """Return the slots of a model's calls; a call of a tool that was not offered already has its error result."""
    slots = []
    for call in calls:
        name = called(live, call.tool_name, offered)
        slot = Slot(call, "model", None if name is None else live.bindings[name], lenient=True)
        if name is None:
            slot.fail(unavailable(live, call.tool_name, offered))
        slots.append(slot)
    return slots


def called(live: Live, name: str, offered: Container[str]) -> str | None:
    """Return the offered tool that a model means: an agent's tool may be called by its id, too (generator-contract L28)."""
    if name in offered:
        return name
    other = name.replace("-", "_")
    return other if other in offered and type(live.bindings[other].runs) is Spawning else None


def run_batch(live: Live, members: Sequence[Slot | Beside], asked: Parallel[Any] | None = None) -> Steps:
    """
    Give every slot its result; what was *asked* for as a ``Parallel`` runs together whatever its tools say.

    Raises:
        LimitExceeded: when there is no room for the children of a ``Parallel``; nothing has started.
        Stopped: when the world ended the run; every slot has a result even so.
        LimitReached: when a budget was spent in one of the calls, after all slots have their results.
        StepEngineError: what is wrong with a handler's own call.
    """
    slots = [member for member in members if type(member) is Slot]
    before = live.limit
    try:
        if asked is not None:
            yield from _together(live, members, slots, fail_fast=asked.fail_fast, concurrency=asked.concurrency)
        elif len(slots) > 1 and _is_parallel(slots):
            yield from _together(live, members, slots)
        else:
            yield from _in_turn(live, slots)
    except Stopped as stopped:
        for slot in slots:
            if slot.result is None:
                slot.close(stopped.stop)
        raise
    finally:
        for slot in slots:
            log(live, slot)
    limit = live.limit
    if limit is not None and limit is not before and asked is None:
        raise LimitReached(limit)


def _is_parallel(slots: Sequence[Slot]) -> bool:
    known = [slot.binding for slot in slots if slot.binding is not None]
    return all(b.spec.parallel_safe and not b.spec.ends_turn and type(b.runs) is Ordinary for b in known)


def _in_turn(live: Live, slots: Sequence[Slot]) -> Steps:
    why, before = "", live.limit
    for slot in slots:
        if why and slot.result is None:
            slot.finish(ToolResult.error(f"Skipped: {why} before this call.", status="skipped"))
        try:
            yield from _one(live, slot)
        except LimitReached:
            why = SPENT
        except StepEngineError:
            if slot.source != "model":
                raise
        if slot.ended_turn:
            why = f"{slot.call.tool_name} ended the turn"
        elif live.limit is not None and live.limit is not before and live.limit.kind == "denials":
            why = SPENT


def _one(live: Live, slot: Slot) -> Steps:
    if slot.result is None and _is_valid(slot) and live.plan.hooks.pre_tool:
        question = yield from _judge(live, slot)
        if question is not None:
            yield from _ask_one(live, slot, question)
    if slot.result is not None:
        yield from show(live, slot)
        return
    yield from execute_ordinary(live, slot) if type(slot.binding.runs) is Ordinary else execute(live, slot)  # type: ignore[union-attr]
    if live.plan.hooks.post_tool:
        yield from _after(live, slot)


def _is_valid(slot: Slot) -> bool:
    """Validate a call; what is wrong with a handler's own is raised, a model's gets an error result."""
    try:
        slot.validate()
    except StepEngineError as error:
        if slot.source == "handler":
            raise
        slot.fail(error)
        return False
    return True


def _judge(live: Live, slot: Slot) -> Generator[Any, Any, Question | None]:
    """Ask the ``pre_tool`` hooks about a valid call; return the question when a person must decide."""
    decision = yield from _judged(live, slot)
    if decision is None:
        return None
    if decision.kind == "ask" and slot.spec is not None and slot.spec.requires_permission:
        return _permission_question(slot, decision)
    yield from _decided(live, slot, "deny" if decision.kind == "deny" else "allow", decision.rule_id)
    if decision.kind == "deny":
        _deny(live, slot, decision.message)
    return None


def _judged(live: Live, slot: Slot) -> Generator[Any, Any, Decision | None]:
    def revalidate(changed: ToolCallPart) -> ToolCallPart:
        before = slot.call
        slot.change(changed)
        try:
            slot.validate()
        except StepEngineError:
            slot.call = before
            raise
        return slot.judged_call

    return (yield from hooks.judge_call(live, slot.judged_call, revalidate))


def _deny(live: Live, slot: Slot, message: str) -> None:
    """Give a call the result that it is denied; a model that will not hear it is told so, and in the end stopped."""
    name, most = slot.own_call.tool_name, live.limits.max_denials
    text = message or f"The call of {slot.call.tool_name} was denied."
    live.denials += 1
    row = live.denied_in_row[name] = live.denied_in_row.get(name, 0) + 1
    if row >= TOLD_AT:
        text += (
            f" {name} was denied {row} times in a row: do not call it again, go on without it or say what is missing."
        )
    slot.finish(ToolResult.error(text, status="denied"))
    if most is not None and live.denials >= most:
        msg = (
            f"{live.denials} tool calls of agent {live.agent.id!r} were denied, the last one of {name!r}, and max_denials is "
            f"{most}; allow what it needs, tell it in its prompt what it may not do, or raise Limits(max_denials=...)"
        )
        live.limit = live.limit or LimitExceeded(msg, kind="denials", limit=most)


def _permission_question(slot: Slot, decision: Decision) -> Question:
    name = slot.own_call.tool_name
    text = decision.message or f"May {name} run?"
    return Question("", text, decision.options, tool_name=name, details=slot.input, remember=decision.remember)


def _permit(live: Live, slot: Slot, effect: Ask, answers: Sequence[Answer]) -> Generator[Any, Any, Question | None]:
    """Do with a call what a person said; return what has to be asked about the input that the person made of it."""
    answer = answers[0]
    if answer.agrees and answer.edited_input is not None:
        return (yield from _edit(live, slot, answer))
    remembered = effect.questions[0].remember if answer.by == REMEMBERED else None
    rule_id = None if remembered is None else str(remembered["id"])
    yield from _decided(live, slot, "allow" if answer.agrees else "deny", rule_id, answer)
    if answer.by == NOBODY:
        _deny(live, slot, UNATTENDED.format(slot.call.tool_name))
    elif not answer.agrees:
        text = answer.reason or answer.text
        said = f": {text}" if text and text.lower() not in ("no", "n") else "."
        _deny(live, slot, f"A person denied the call of {slot.call.tool_name}{said}")
    return None


def _edit(live: Live, slot: Slot, answer: Answer) -> Generator[Any, Any, Question | None]:
    """Take over the input that a person made of a call; it is judged like the first one, and a deny still wins."""
    assert answer.edited_input is not None  # noqa: S101
    slot.edit(answer.edited_input)
    message, allowed = "", False
    try:
        slot.validate()
    except StepEngineError as error:
        message = f"A person changed the input of this call, and it does not fit: {error.message}"
    else:
        approved = slot.input
        decision = yield from _judged(live, slot)
        allowed = decision is None or decision.kind != "deny"
        if allowed and slot.input != approved and slot.edits < MAX_EDITS:
            # A hook made something else of what was approved, and what was approved is what runs.
            asks = decision is not None and decision.kind == "ask"
            return _permission_question(slot, decision if decision is not None and asks else Decision.ask())
        message = decision.message if decision is not None and decision.kind == "deny" else UNSTEADY
        allowed = allowed and slot.input == approved
    yield from _decided(live, slot, "allow" if allowed else "deny", None, answer)
    if not allowed:
        _deny(live, slot, message)
    return None


def _decided(live: Live, slot: Slot, decision: str, rule_id: str | None, answer: Answer = UNSAID) -> Steps:
    event = ev.PermissionDecided(
        path=live.plan.path,
        seq=live.seq,
        tool_name=slot.own_call.tool_name,
        tool_call_id=slot.call.tool_call_id,
        decision=decision,
        rule_id=rule_id,
        by=answer.by,
        reason=answer.reason,
        edited_input=answer.edited_input,
    )
    yield from live.notify(event)


def _after(live: Live, slot: Slot) -> Steps:
    if live.plan.hooks.post_tool and slot.result is not None and not slot.closed:
        slot.result = named((yield from hooks.post_tool(live, slot.own_call, slot.result)), slot.call)


def _together(
    live: Live,
    members: Sequence[Slot | Beside],
    slots: Sequence[Slot],
    *,
    fail_fast: bool = False,
    concurrency: int | None = None,
) -> Steps:
    """Run a batch in four passes; whatever stops it, finished members keep their results."""
    asking: list[tuple[Slot, Question]] = []
    for slot in slots:
        if slot.result is None and _is_valid(slot) and live.plan.hooks.pre_tool:
            question = yield from _judge(live, slot)
            if question is not None:
                asking.append((slot, question))
    yield from _ask_all(live, asking)
    ran = [slot for slot in slots if slot.result is None]
    effects: list[Leaf] = []
    for member in members:
        effects += yield from _begin(live, member)
    failed = fail_fast and any(slot.result is not None and slot.result.is_error for slot in slots)
    outcomes = yield from live.gather(effects, concurrency=concurrency, fail_fast=fail_fast, has_failed=failed)
    if outcomes and all(map(_has_no_room, outcomes)):
        live.unwrap(outcomes[0], effects[0])
    stops = _distribute(live, members, outcomes)
    for slot in ran:
        yield from _after(live, slot)
    if stops:
        raise Stopped(merged(stops))


def _has_no_room(outcome: Single) -> bool:
    """Return whether a member was not begun, because a limit has no room for the children that were asked for with it."""
    return type(outcome) is Failure and isinstance(outcome.error, LimitExceeded) and outcome.error.kind == "children"


def _begin(live: Live, member: Slot | Beside) -> Generator[Any, Any, Sequence[Leaf]]:
    """Return the effects of a member; control tools have none and are done here."""
    if type(member) is Beside:
        member.effect = member.begin()
        return (member.effect,)
    assert type(member) is Slot  # noqa: S101
    if member.result is not None:
        yield from show(live, member)
        return ()
    if member.binding is not None and type(member.binding.runs) is Control:
        yield from execute(live, member)
        return ()
    return start(live, member)


def _distribute(live: Live, members: Sequence[Slot | Beside], outcomes: Sequence[Single]) -> list[Stop]:
    """Give the members their outcomes and return the stops among them."""
    stops: list[Stop] = []
    position = 0
    for member in members:
        try:
            if type(member) is Beside:
                position += 1
                member.entry = member.take(outcomes[position - 1], member.effect)
            elif type(member) is Slot and member.effects:
                first, position = position, position + len(member.effects)
                settle(live, member, outcomes[first:position])
        except Stopped as stopped:
            known = requests.with_questions(stopped.stop, member.effect) if type(member) is Beside else stopped.stop
            stops.append(known)
    return stops


def _ask_one(live: Live, slot: Slot, question: Question) -> Steps:
    waiting: Question | None = question
    while waiting is not None:
        effect = requests.ask_effect(live, waiting, purpose="permission", tool_call_id=slot.call.tool_call_id)
        try:
            answers = yield from requests.ask(live, effect)
        except (StepEngineError, LimitReached) as error:
            _deny(live, slot, f"Nobody could be asked: {error}")
            return
        waiting = yield from _permit(live, slot, effect, answers)


def _ask_all(live: Live, asking: Sequence[tuple[Slot, Question]]) -> Steps:
    """Ask for all permissions of a batch at once, so that a batch with several suspends once."""
    while asking:
        asking = yield from _ask_round(live, asking)


def _ask_round(
    live: Live, asking: Sequence[tuple[Slot, Question]]
) -> Generator[Any, Any, Sequence[tuple[Slot, Question]]]:
    """Ask once, what is the same only once, and return what has to be asked about what people made of the calls."""
    alike = _alike(asking)
    effects = [
        requests.ask_effect(live, question, purpose="permission", tool_call_id=slots[0].call.tool_call_id)
        for question, slots in alike
    ]
    outcomes = yield from live.gather(effects)
    stops: list[Stop] = []
    again: list[tuple[Slot, Question]] = []
    for (_, slots), effect, outcome in zip(alike, effects, outcomes, strict=True):
        try:
            again += yield from _answer(live, slots, effect, outcome)
        except Stopped as stopped:
            stops.append(stopped.stop)
    if stops:
        raise Stopped(merged(stops))
    return again


def _answer(
    live: Live, slots: Sequence[Slot], effect: Ask, outcome: Single
) -> Generator[Any, Any, list[tuple[Slot, Question]]]:
    """Do with the calls that one question is about what came of it."""
    again: list[tuple[Slot, Question]] = []
    try:
        answers = live.unwrap(outcome, effect)
    except Stopped as stopped:
        stop = requests.with_questions(stopped.stop, effect)
        for slot in slots:
            slot.close(stop)
        raise Stopped(stop) from None
    except (StepEngineError, LimitReached) as error:
        for slot in slots:
            _deny(live, slot, f"Nobody could be asked: {error}")
        return again
    for slot in slots:
        question = yield from _permit(live, slot, effect, answers)
        if question is not None:
            again.append((slot, question))
    return again


def _alike(asking: Sequence[tuple[Slot, Question]]) -> list[tuple[Question, list[Slot]]]:
    """Return each question once, with all the calls that ask it (reliability PM38)."""
    found: dict[str, tuple[Question, list[Slot]]] = {}
    for slot, question in asking:
        key = canonical([question.text, question.options, question.tool_name, question.details])
        found.setdefault(key, (question, []))[1].append(slot)
    return list(found.values())
