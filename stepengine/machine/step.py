"""
One model step, in the order that design 3 fixes; ``order.py`` holds that order as a table.

expire ephemeral results -> ``pre_step`` hooks -> step prompt -> model call -> tool calls -> message and results appended
together -> ``post_step`` hooks -> end decision. The open step is held outside the transcript until its tools are done.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import attrs

from stepengine.data import events as ev
from stepengine.data.effects import quick_call_model
from stepengine.data.json import compact
from stepengine.data.messages import (
    AssistantMessage,
    Message,
    ToolMessage,
    UserMessage,
    quick_assistant,
    system_reminder,
)
from stepengine.data.models import ModelReply, ModelRequest, StopReason
from stepengine.data.parts import AssistantPart, TextPart, ThinkingPart, ToolCallPart, quick_call
from stepengine.data.results import ToolResult
from stepengine.data.thoughts import parted
from stepengine.data.usage import Usage, add_cost
from stepengine.data.yields import StepWith
from stepengine.errors import ContextOverflow, LimitExceeded, LimitReached, ModelError, StepEngineError
from stepengine.machine import hooks, requests
from stepengine.machine.batch import model_slots, run_batch
from stepengine.machine.lifetimes import expire
from stepengine.machine.live import Live
from stepengine.machine.signals import Stopped
from stepengine.machine.slots import Slot, take_last_word

__all__ = ("budgeted_step", "reopened_step", "run_turn")

Steps = Generator[Any, Any, Any]
MAX_CONTINUES = 5
MAX_THOUGHTS = 3
PLAIN = StepWith()
EXPIRED = "[This result is no longer shown; call the tool again if you need it.]"
CUT_OFF = "Not executed: the reply was cut off at the output limit."


class Reply(NamedTuple):
    """A completed reply, numbered and ready to be stored."""

    model: ModelReply
    message: AssistantMessage
    calls: tuple[ToolCallPart, ...]


def run_turn(live: Live) -> Steps:
    """Run steps until the turn ends or the budget is spent."""
    while not (yield from budgeted_step(live, PLAIN)):
        pass


def budgeted_step(live: Live, over: StepWith) -> Generator[Any, Any, bool]:
    """
    Run one step and return whether the turn is complete.

    At a spent budget the first request does what ``on_max_steps`` says; every further one is refused.

    Raises:
        LimitReached: when the budget is spent.
    """
    live.has_asked = True
    if live.steps_remaining > 0 and live.limit is None:
        live.steps_complete = yield from _step(live, over)
    else:
        live.steps_complete = True
        yield from _spent(live)
    return live.steps_complete


def _spent(live: Live) -> Steps:
    if live.limit is None:
        limit, what = live.limits.max_steps, live.limits.on_max_steps
        msg = f"agent {live.agent.id!r} used all of its {limit} steps; raise Limits(max_steps=...) or end the turn earlier"
        live.limit = LimitExceeded(msg, kind="steps", limit=limit)
        if what == "final_answer":
            yield from _final_answer(live)
            return
        if what == "stop":
            return
    raise LimitReached(live.limit)


def _final_answer(live: Live) -> Steps:
    """Ask once more without tools what was done; a failure leaves the run as ``stop`` would."""
    text = (
        "The step budget of this run is spent and no tool can be called any more. "
        "Say briefly what was done and what is still open."
    )
    try:
        live.take_inbox()
        request = requests.step_request(
            live, StepWith(tools=(), tool_choice=None), [UserMessage(system_reminder(text))]
        )
        reply = yield from _call(live, request, "final_answer")
    except (StepEngineError, LimitReached):
        return
    numbered = _numbered(live, reply)
    _note_thinking(live, numbered.message)
    if live.plan.watched():
        yield from _show(live, numbered)
    slots = model_slots(live, numbered.calls, ())
    for slot in slots:
        slot.finish(ToolResult.error("Skipped: the step budget of this run is spent.", status="skipped"))
    yield from run_batch(live, slots)
    live.commit(numbered.message, _results(slots))
    live.stop_reason = reply.stop_reason


def _step(live: Live, over: StepWith) -> Generator[Any, Any, bool]:
    plan = live.plan
    path, live.step = plan.path, live.step_index
    try:
        if plan.watched():
            yield from live.notify(
                ev.StepStarted(path=path, seq=live.seq, step=live.step, steps_remaining=live.steps_remaining)
            )
        reply, slots = yield from _ask_model(live, over)
        _note_thinking(live, reply.message)
        if plan.watched():
            yield from _show(live, reply)
        spent = yield from _run_tools(live, reply, slots)
        if plan.hooks.post_step:
            yield from hooks.post_step(live, reply.model)
        ended = _ends(live, slots) and (not plan.hooks.on_stop or (yield from _may_end(live)))
        if ended:
            live.refusals = 0
            take_last_word(live, slots)
        if plan.watched():
            yield from live.notify(
                ev.StepFinished(path=path, seq=live.seq, step=live.step, ended_turn=ended, usage=live.spent.usage)
            )
    finally:
        live.step = live.step_index
        if live.lifetimes.known:
            expire(live, "agent_step")
    if spent:
        raise spent
    return ended


def reopened_step(live: Live, message: AssistantMessage, stored: Sequence[ToolMessage]) -> Generator[Any, Any, bool]:
    """
    Finish the step in which the run that this one continues was suspended; return whether the turn is complete.

    Calls that ran keep their results, the others run now, the one that asked with the answer that was given (X11).
    """
    slots = model_slots(live, message.tool_calls, tuple(live.offered))
    for slot, known in zip(slots, stored, strict=True):
        if known.status != "pending":
            slot.fault, slot.result = False, known.result
    reply = Reply(ModelReply(message.content), message, message.tool_calls)
    spent = yield from _run_tools(live, reply, slots)
    yield from hooks.post_step(live, reply.model)
    live.steps_complete = _ends(live, slots) and (yield from _may_end(live))
    if live.steps_complete:
        live.refusals = 0
    if spent:
        raise spent
    return live.steps_complete


def _ask_model(live: Live, over: StepWith) -> Generator[Any, Any, tuple[Reply, list[Slot]]]:
    if live.ephemeral:
        _expire(live)
    if live.inbox:
        live.take_inbox()
    tail: Sequence[Message] = ()
    if live.plan.hooks.pre_step:
        tail = yield from hooks.pre_step(live)
        live.take_inbox()
    request = requests.step_request(live, over, [*tail, *requests.step_prompt(live)])
    try:
        reply = yield from _call(live, request, "step")
    except ContextOverflow as error:
        request = yield from _shorter(live, over, error)
        reply = yield from _call(live, request, "step")
    live.steps_remaining -= 1
    live.step_index += 1
    live.changed()
    numbered = _numbered(live, reply)
    live.stop_reason = reply.stop_reason
    live.truncated = reply.stop_reason is StopReason.MAX_TOKENS
    _count_thoughts(live, numbered.message)
    return numbered, model_slots(live, numbered.calls, _callable(live, request))


def _count_thoughts(live: Live, message: AssistantMessage) -> None:
    """Cut a turn in which the model only thinks; such a reply alone does not end it (requirements X53)."""
    live.only_thoughts = live.only_thoughts + 1 if _is_only_thoughts(message) else 0
    if live.only_thoughts >= MAX_THOUGHTS:
        live.truncated = True
        live.warnings.append(f"the turn was ended after {live.only_thoughts} replies in a row that were only thoughts")


def _callable(live: Live, request: ModelRequest) -> Sequence[str]:
    """Return the tools that the model may call: its own, whatever definitions it inherited (generator-contract L18)."""
    return tuple(live.offered) if request.tools is live.specs else [spec.name for spec in request.tools]


def _shorter(live: Live, over: StepWith, error: ContextOverflow) -> Generator[Any, Any, ModelRequest]:
    """Return the request as the hooks make it when told that it was too long, or raise *error* (requirements I17)."""
    live.take_inbox()
    before = (live.system_prompt, live.view)
    live.overflow, live.refused_tokens = error, live.state().context_tokens
    try:
        tail = yield from hooks.pre_step(live)
    finally:
        live.overflow = live.refused_tokens = None
    if (live.system_prompt, live.view) == before:
        raise error
    live.take_inbox()
    return requests.step_request(live, over, [*tail, *requests.step_prompt(live)])


def _call(live: Live, request: ModelRequest, purpose: Any) -> Generator[Any, Any, ModelReply]:
    """Call the model; a reply that the provider paused is continued (reliability MP56)."""
    effect = quick_call_model(live.number(), request, purpose, live.coming_call_id)
    reply: ModelReply = yield from live.call_model(effect)
    if reply.stop_reason is StopReason.PAUSE:
        reply = yield from _continued(live, request, reply, purpose)
    if reply.stop_reason is StopReason.ERROR:
        msg = (
            f"the model {request.model!r} ended its reply with an error ({reply.raw_stop_reason or 'no reason given'})"
        )
        raise ModelError(msg, kind="reply_error")
    return reply


def _continued(live: Live, request: ModelRequest, reply: ModelReply, purpose: Any) -> Generator[Any, Any, ModelReply]:
    for _ in range(MAX_CONTINUES):
        again = attrs.evolve(request, tail=(*request.tail, AssistantMessage(reply.content)))
        more = yield from live.call_model(quick_call_model(live.number(), again, purpose, _after(live, reply)))
        reply = _joined(reply, more)
        if reply.stop_reason is not StopReason.PAUSE:
            break
    return reply


def _after(live: Live, paused: ModelReply) -> Callable[[int], str]:
    """Return what gives the ids of the calls that follow those of a paused reply."""
    held = sum(type(part) is ToolCallPart for part in paused.content)
    return lambda number: live.coming_call_id(held + number)


def _joined(paused: ModelReply, more: ModelReply) -> ModelReply:
    """Return two parts of a reply as one: the later one's words, everything that both used."""
    known = None if paused.usage is None and more.usage is None else (paused.usage or Usage()) + (more.usage or Usage())
    return attrs.evolve(
        more, content=(*paused.content, *more.content), usage=known, cost=add_cost(paused.cost, more.cost)
    )


def _numbered(live: Live, reply: ModelReply) -> Reply:
    """Give every call of a reply our own id; of a reply that was cut off, the last call stays as text."""
    parts: list[AssistantPart] = []
    calls: list[ToolCallPart] = []
    last = len(reply.content) - 1
    for index, part in enumerate(reply.content):
        if type(part) is not ToolCallPart:
            parts.append(part)
        elif index == last and reply.stop_reason is StopReason.MAX_TOKENS:
            parts.append(TextPart(f"[cut off: {part.tool_name} {part.raw_input or compact(part.input)}]"))
        else:
            call = quick_call(
                live.new_call_id(),
                part.tool_name,
                part.input,
                raw_input=part.raw_input,
                input_error=part.input_error,
                provider_data=part.provider_data,
            )
            parts.append(call)
            calls.append(call)
    return Reply(reply, quick_assistant(tuple(parts)), tuple(calls))


def _run_tools(live: Live, reply: Reply, slots: Sequence[Slot]) -> Generator[Any, Any, LimitReached | None]:
    """Run the calls of a reply and append message and results together, also when the run is stopped meanwhile."""
    spent: LimitReached | None = None
    waiting = [slot for slot in slots if slot.result is None or slot.fault]
    if live.truncated:
        for slot in slots:
            slot.finish(ToolResult.error(CUT_OFF, status="skipped"))
    live.open_reply = reply.message
    try:
        if waiting:
            yield from run_batch(live, waiting)
    except LimitReached as error:
        spent = error
    except Stopped:
        live.commit(_as_ran(reply.message, slots), _results(slots))
        raise
    finally:
        live.open_reply = None
    live.commit(_as_ran(reply.message, slots), _results(slots))
    return spent


def _note_thinking(live: Live, message: AssistantMessage) -> None:
    thinking, text = message.thinking, message.text
    if thinking or "<" in text:
        live.thinking.extend((*thinking, *parted(text).thoughts))


def _as_ran(message: AssistantMessage, slots: Sequence[Slot]) -> AssistantMessage:
    """Return the reply with the inputs that people changed as they ran: the model must not take its own for what happened."""
    ran: dict[str, AssistantPart] = {slot.call.tool_call_id: slot.call for slot in slots if slot.edits}
    if not ran:
        return message
    parts = [ran.get(part.tool_call_id, part) if type(part) is ToolCallPart else part for part in message.content]
    return attrs.evolve(message, content=tuple(parts))


def _show(live: Live, reply: Reply) -> Steps:
    # They belong to the model call, as its deltas do: it is the last effect that was numbered.
    path, seq = live.plan.path, live.seq - 1
    thinking, text = reply.message.thinking, reply.message.text
    if thinking:
        yield from live.notify(ev.ThinkingCompleted(path=path, seq=seq, text="".join(thinking)))
    if text:
        yield from live.notify(ev.TextCompleted(path=path, seq=seq, text=text))
    if _is_empty(reply.model.content):
        yield from live.notify(ev.Warned(path=path, seq=seq, message="The model sent an empty reply."))


def _results(slots: Sequence[Slot]) -> list[ToolResult]:
    return [slot.result for slot in slots if slot.result is not None]


def _ends(live: Live, slots: Sequence[Slot]) -> bool:
    """Return whether a step ends the turn, hooks aside (design 3, generator-contract G51)."""
    if live.inbox and live.take_inbox():
        return False
    if live.truncated:
        return True
    ended, forced = False, False
    for slot in slots:
        # The model must see what was wrong with a call, also when it took its work for done.
        if slot.fault:
            return False
        ended = ended or slot.ended_turn
        forced = forced or slot.binding is None or slot.binding.spec.forces_next_step
    if ended or "task_completed" in live.offered:
        return ended
    return not forced if slots else not live.only_thoughts


def _may_end(live: Live) -> Generator[Any, Any, bool]:
    """Ask the ``on_stop`` hooks whether a turn that would end may; one whose budget is spent or reply was cut does."""
    if not live.plan.hooks.on_stop or live.steps_remaining <= 0 or live.truncated:
        return True
    return not (yield from hooks.on_stop(live))


def _is_empty(parts: Sequence[AssistantPart]) -> bool:
    """Return whether a reply says nothing at all, not even a blank, which ends a turn (generator-contract G53)."""
    return all(type(p) is TextPart and not p.text for p in parts)


def _is_only_thoughts(message: AssistantMessage) -> bool:
    """Return whether a reply holds something, but neither a call nor anything said (requirements X53)."""
    for part in message.content:
        kind = type(part)
        if kind is not TextPart and kind is not ThinkingPart:
            return False
    if _is_empty(message.content):
        return False
    return not message.said.strip()


def _expire(live: Live) -> None:
    """Replace ephemeral results in the view by a placeholder, all but the newest of each tool (requirements I12)."""
    expired: dict[str, ToolResult] = {}
    for name, waiting in live.ephemeral.items():
        keep = live.bindings[name].spec.ephemeral or 0
        while len(waiting) > keep:
            expired[waiting.popleft()] = ToolResult.text(EXPIRED)
    if expired:
        live.set_view(live.view.resolve_all(expired))
