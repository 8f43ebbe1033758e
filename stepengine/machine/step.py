"""
One model step, in a fixed order; ``protocol.ORDER`` holds that order as a table.

reports of background children -> expire ephemeral results, append the inbox -> ``pre_step`` hooks -> step prompt -> model call ->
tool calls -> message and results appended together -> ``post_step`` hooks -> end decision. The open step is held outside the
transcript until its tools are done.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import attrs

from stepengine.data import events as ev
from stepengine.data.effects import CallModel, Notify
from stepengine.data.json import compact
from stepengine.data.messages import (
    AssistantMessage,
    AssistantPart,
    Message,
    TextPart,
    ThinkingPart,
    ToolCallPart,
    ToolMessage,
    ToolResult,
    UserMessage,
    system_reminder,
)
from stepengine.data.models import ModelReply, ModelRequest, StopReason
from stepengine.data.outcomes import Value
from stepengine.data.state import RunStatus
from stepengine.data.thoughts import split_thoughts
from stepengine.data.usage import Usage, add_cost
from stepengine.data.yields import StepWith
from stepengine.errors import ContextOverflow, InputError, LimitExceeded, LimitReached, ModelError, StepEngineError
from stepengine.machine import hooks
from stepengine.machine.background import NO_CHILDREN
from stepengine.machine.batch import make_reply_calls, run_batch
from stepengine.machine.blocks import find_call_mark
from stepengine.machine.calls import ToolMember
from stepengine.machine.ceilings import ask_for_more_steps
from stepengine.machine.child_reports import append_ended_children_report, wait_for_child_report
from stepengine.machine.placeholders import fill_prompt_text
from stepengine.machine.protocol import Flow
from stepengine.machine.signals import Stopped, status_from_error
from stepengine.machine.state import RunState

# A provider pauses a reply while tools on its own servers work. One that is always paused again is a fault there, and
# each continuation is paid for (reliability:MP56).
MAX_CONTINUATIONS = 5
# A reply of thoughts alone ends no turn, since the model has said nothing yet and mostly goes on when asked again. A
# model that only thinks would spend the whole step budget so, hence the third in a row is the last
# (generator-contract:G51).
MAX_THOUGHT_REPLIES = 3
PLAIN = StepWith()
UNFINISHED = frozenset({StopReason.PAUSE, StopReason.ERROR, StopReason.MAX_TOKENS})
# Each continuation may be as long as the output limit again; a model that repeats itself would be paid for its whole
# budget.
MAX_CUT_CONTINUATIONS = 3
CONTINUE_TEXT = "Your reply was cut off at its length limit. Go on exactly where it ended: repeat nothing, and say nothing about this."
Purpose: TypeAlias = Literal["step", "final_answer"]
TurnComplete: TypeAlias = bool
OF_A_STEP = ("step", "final_answer")
CUT_OFF_TEXT = "Not executed: the reply was cut off at the output limit."


class StepReply(NamedTuple):
    """
    A completed reply, numbered and ready to be stored.

    Attributes:
        model: As the model gave it.
        message: With our own call ids.
        calls: The calls in it.
        has_words: Whether it holds anything but calls.
    """

    model: ModelReply
    message: AssistantMessage
    calls: Sequence[ToolCallPart]
    has_words: bool = True


def run_turn(run: RunState) -> Flow[None]:
    """Run steps until the turn ends or the budget is spent; reports of background children continue it."""
    # Children in the background may still be at work when the model has ended its turn: what they say is a message,
    # which the model has to answer, so the turn goes on when they have ended.
    while not (yield from run_step_within_budget(run, PLAIN)) or (
        run.children.background is not NO_CHILDREN and (yield from wait_for_child_report(run))
    ):
        pass


def run_step_within_budget(run: RunState, options: StepWith) -> Flow[TurnComplete]:
    """
    Run one step; if the budget is spent, ask for more steps, else end the turn or raise. Return whether the turn is complete.

    If the budget is spent, a person may be asked for more steps. Without more, the first request follows ``on_max_steps``: it requests a
    final answer, ends the turn or raises. Later requests raise.

    Raises:
        LimitReached: when the budget is spent.
    """
    # The generator itself is returned and not iterated here: each `yield from` is one more frame that every value of
    # the step passes, both ways.
    return _run_step(run, options) if run.progress.request_step() else _run_or_end_on_spent_budget(run, options)


def _run_or_end_on_spent_budget(run: RunState, options: StepWith) -> Flow[TurnComplete]:
    """Ask for more steps and run one; without more, follow ``on_max_steps`` or raise. Return whether the turn is complete."""
    budget = run.budget
    if (yield from ask_for_more_steps(run)):
        return (yield from _run_step(run, options))
    # Told before the limit is raised: the handler is resumed once with `steps_complete` true, so that it can put
    # together what it has, and only a further step is refused (generator-contract:G46).
    run.progress.record_turn_completion(is_complete=True)
    # The first request beyond the budget only; who asks again has been told, and gets the error.
    if budget.reached is None:
        limit, what = budget.most_steps, budget.limits.on_max_steps
        msg = f"agent {run.plan.agent.definition.id!r} used all of its {limit} steps; raise Limits(max_steps=...) or end the turn earlier"
        budget.record_spent_budget(LimitExceeded(msg, kind="steps", limit=limit))
        if what == "final_answer":
            yield from _request_final_answer(run)
            return True
        if what == "stop":
            return True
    assert budget.reached is not None  # noqa: S101
    raise LimitReached(budget.reached)


def _request_final_answer(run: RunState) -> Flow[None]:
    """Call the model once more without tools for a final answer; a failure ends the run like ``stop``."""
    # Without this the last thing in the history is a tool's result, and the output of the run is some text from the
    # middle of the work. One more model call makes an answer of what was paid for already. It is a note at the end of
    # this request and in no history, since it is no word of the user's.
    text = (
        "The step budget of this run is spent and no tool can be called any more. "
        "Say briefly what was done and what is still open."
    )
    try:
        # What somebody sent meanwhile is part of what is to be summed up, and nothing after this would read it.
        run.history.append_inbox()
        # No tools at all: a model that is offered any calls one, and the text that says it cannot is read by few.
        # `StepWith(tools=())` means none, where `None` would mean the agent's own.
        request = make_step_request(run, StepWith(tools=(), tool_choice=None), [UserMessage(system_reminder(text))])
        model = yield from _call_model_until_complete(run, request, "final_answer")
    # The answer is a courtesy: where it fails, the run ends as it would have ended without one.
    except (StepEngineError, LimitReached):
        return
    reply = _assign_call_ids(run, model)
    yield from _record_and_emit_reply(run, reply)
    # Some models call tools that they were not offered. The calls stay, with a result each that says why nothing was
    # done, or the history would not pair.
    calls = make_reply_calls(run, reply.calls, ())
    for call in calls:
        call.set_skipped_result("Skipped: the step budget of this run is spent.")
    yield from run_batch(run, calls)
    _commit_reply(run, reply.message, calls)
    run.progress.stop_reason = model.stop_reason


def _run_step(run: RunState, options: StepWith) -> Flow[TurnComplete]:
    plan, spent = run.plan, None
    points, watched = plan.agent.hooks, plan.host.is_watched
    # One `try` around the whole step: whoever watches must see each step that began end once, with a status (that was
    # broken for steps that an error left).
    try:
        if run.children.background is not NO_CHILDREN:
            yield from append_ended_children_report(run)
        if watched():
            # Not yielded: it is shown before the next effect, which follows without anybody's code in between but that
            # of hooks, and what they say is shown behind it.
            run.side_events.waiting.append(_make_step_started_event(run))
        _expire_and_append_inbox(run)
        request = make_step_request(
            run,
            options,
            (yield from _call_hooks_and_collect_tail(run))
            if points.pre_step
            else make_step_prompt(run)
            if run.plan.agent.definition.step_prompt
            else (),
        )
        try:
            model = yield from _call_model_until_complete(run, request, "step")
        # Once only, and only where the hooks make the view shorter: to send the same again costs the same refusal. It
        # is a new effect, so the record shows both requests (reliability:MP02).
        except ContextOverflow as error:
            request = yield from _shorten_request_by_hooks(run, options, error)
            model = yield from _call_model_until_complete(run, request, "step")
        reply, calls = _count_step_and_make_calls(run, model, request)
        # A reply of calls alone has nothing to hear. The question saves a generator for most steps of an agent at work.
        if reply.has_words or not calls:
            yield from _record_and_emit_reply(run, reply)
        spent = yield from _run_calls_and_commit_reply(run, reply, calls)
        yield from hooks.call_post_step_hooks(run, reply.model) if points.post_step else ()
        # After the `post_step` hooks: they may have done I/O while somebody sent a message, which keeps the turn open.
        ended = _append_inbox_or_decide_turn_end(run, calls) and (
            not points.on_stop or (yield from _ask_hooks_to_end_turn(run))
        )
        if ended and calls and not reply.has_words:
            _warn_of_missing_answer(run, calls)
        if watched():
            yield Notify(_make_step_finished_event(run, ended, RunStatus.COMPLETED))
    except BaseException as error:
        # Yielding in an `except` is allowed here since whoever closes the machine is told nothing more: to a
        # `GeneratorExit` no value may be yielded.
        yield from _emit_abandoned_step(run, error)
        raise
    # What lives for one step leaves the history here and not where the next one begins: no handler and no result may
    # show it (generator-contract:L35).
    finally:
        run.progress.step = run.progress.step_index
        run.history.remove_expired("agent_step")
    return _end_step(run, calls, spent, ended=ended)


def _expire_and_append_inbox(run: RunState) -> None:
    """Replace expired ephemeral results in the view, start a new turn of the output if the last turn ended, and append the inbox."""
    # Before the request is made, and in the view alone: what an ephemeral tool said earlier is not sent again, and
    # the record keeps it (requirements:I12).
    run.history.expire_ephemeral_results()
    if run.progress.steps_complete:
        run.output.start_turn()
    if run.history.inbox:
        run.history.append_inbox()


def _end_step(run: RunState, calls: Sequence[ToolMember], spent: LimitReached | None, *, ended: bool) -> TurnComplete:
    """Record the end of a step; return whether the turn is complete, or raise if a limit was spent in it."""
    if ended:
        run.progress.reset_refused_stops()
        record_end_turn_message(run, calls)
    # Raised last, when reply and results stand in the history: the limit ends the run, and its state pairs.
    if spent:
        raise spent
    return run.progress.record_turn_completion(is_complete=ended)


def _make_step_started_event(run: RunState) -> ev.Event:
    return ev.StepStarted(
        path=run.plan.path, seq=run.effects.seq, step=run.progress.step, steps_remaining=run.budget.steps_left
    )


def _emit_abandoned_step(run: RunState, error: BaseException) -> Flow[None]:
    """Report the end of a step that *error* ended, unless the machine is being closed."""
    if run.plan.host.is_watched() and not isinstance(error, GeneratorExit):
        yield Notify(_make_step_finished_event(run, False, status_from_error(error)))


def _make_step_finished_event(run: RunState, ended: bool, status: RunStatus) -> ev.Event:  # noqa: FBT001 - by keyword it takes longer
    # Sums are made when they are asked for, and only where somebody watches: kept up to date with each reply they would
    # be made for nobody.
    usage, cost = run.spent.get_total_usage(), run.spent.cost
    return ev.StepFinished(
        path=run.plan.path,
        seq=run.effects.seq,
        step=run.progress.step,
        ended_turn=ended,
        usage=usage,
        cost=cost,
        status=status,
    )


def finish_reopened_step(run: RunState, message: AssistantMessage, stored: Sequence[ToolMessage]) -> Flow[TurnComplete]:
    """
    Finish the step in which the continued run was suspended; return whether the turn is complete.

    Calls that ran keep their results, the others run now, the one that asked with the answer that was given.
    """
    calls = make_reply_calls(run, message.tool_calls, run.tools.offered)
    # What ran before the suspension has changed the world and is not run again; of the others the results said
    # "pending" and were placeholders.
    for call, known in zip(calls, stored, strict=True):
        if known.status != "pending":
            call.restore_result(known.result)
    # The model is not asked again: this reply was paid for and recorded in the run before. So there is no usage to
    # count either.
    reply = StepReply(ModelReply(message.content), message, message.tool_calls)
    try:
        spent = yield from _run_calls_and_commit_reply(run, reply, calls)
        # The same end as of any step, in the same order: hooks behind the step, then whether the turn is over, then
        # whether hooks let it be.
        yield from hooks.call_post_step_hooks(run, reply.model)
        ended = _append_inbox_or_decide_turn_end(run, calls) and (yield from _ask_hooks_to_end_turn(run))
    finally:
        run.history.remove_expired("agent_step")
    return _end_step(run, calls, spent, ended=ended)


# --- the model --------------------------------------------------------------------------------------------------------


def make_step_request(run: RunState, options: StepWith, tail: Sequence[Message]) -> ModelRequest:
    """
    Return the request of a step: system prompt, view, the tails of run and step, tools and settings.

    Raises:
        InputError: for the first request of a child, when it has no user message.
    """
    settings = (
        run.plan.agent.definition.settings
        if options.settings is None
        else run.plan.agent.definition.settings.merge(options.settings)
    )
    specs = (
        run.tools.specs if options.tools is None else tuple([run.tools.bindings[name].spec for name in options.tools])
    )
    # Several providers refuse a choice of tools in a request that offers none.
    choice = (options.tool_choice or settings.tool_choice) if specs else None
    # The tail stands behind the messages and is in no transcript. Put into the history, a step prompt would change what
    # stands before the next message, and the provider's prompt cache would be lost at every step
    # (generator-contract:L31).
    tail = (*run.prompt.tail, *tail)
    if run.plan.path and run.budget.steps_left == run.budget.most_steps:
        _require_user_message(run, tail)
    return ModelRequest(
        model=options.model or run.plan.model or run.plan.resolve_model(),
        system_prompt=run.prompt.system,
        messages=run.history.view,
        tools=specs,
        tool_choice=choice,
        settings=settings,
        tail=tail,
    )


def _require_user_message(run: RunState, tail: Sequence[Message]) -> None:
    """Raise ``InputError`` if neither the view nor *tail* has a user message, before a child costs anything."""
    if UserMessage in map(type, run.history.view) or UserMessage in map(type, tail):
        return
    agent = run.plan.agent.definition.id
    msg = (
        f"agent {agent!r} was started without a prompt and params, so its first request has no user message. Start it with "
        f"AgentCall({agent!r}, prompt), or give it an instructions_prompt"
    )
    raise InputError(msg)


def make_step_prompt(run: RunState) -> Sequence[Message]:
    """Return the agent's ``step_prompt`` as a message for the end of one request; nothing if it has none."""
    text = fill_prompt_text(run, run.plan.agent.definition.step_prompt)
    return (UserMessage(system_reminder(text), ("STEP_PROMPT",)),) if text else ()


def _call_hooks_and_collect_tail(run: RunState) -> Flow[Sequence[Message]]:
    """Call the ``pre_step`` hooks and append the inbox; return the messages for the end of this request, with the step prompt."""
    tail = yield from hooks.call_pre_step_hooks(run)
    # Once more after the hooks, which may have waited for a person or done I/O while somebody sent a message.
    run.history.append_inbox()
    return (*tail, *make_step_prompt(run))


def _count_step_and_make_calls(
    run: RunState, model_reply: ModelReply, request: ModelRequest
) -> tuple[StepReply, list[ToolMember]]:
    """Deduct a step, and end the turn after too many replies with only thinking; return the reply and its calls."""
    run.progress.count_reply(model_reply.stop_reason, has_only_thoughts=_is_only_thoughts(model_reply))
    in_a_row = run.progress.thoughts_in_a_row
    if in_a_row >= MAX_THOUGHT_REPLIES:
        # As for a reply that was cut: its calls are skipped, and the run can end as truncated.
        run.progress.truncated = True
        run.side_events.add_warnings(f"the turn was ended after {in_a_row} consecutive replies with only thinking")
    reply = _assign_call_ids(run, model_reply)
    return reply, make_reply_calls(run, reply.calls, _list_callable_tools(run, request))


def _list_callable_tools(run: RunState, request: ModelRequest) -> Collection[str]:
    """Return the names of the tools in *request*, the only ones that its reply may call."""
    # Only these may be called (generator-contract:L18).
    # By identity: nearly every request carries the very tuple of the run, and to compare schemas at each step would
    # cost more than the step.
    return run.tools.offered if request.tools is run.tools.specs else [spec.name for spec in request.tools]


def _shorten_request_by_hooks(run: RunState, options: StepWith, error: ContextOverflow) -> Flow[ModelRequest]:
    """Let the ``pre_step`` hooks shorten the prompt after an overflow; return the new request, or raise *error* if nothing changed."""
    run.history.append_inbox()
    # Whether the hooks did something is seen by what the request is made of, and not by what they say they did.
    before = (run.prompt.system, run.history.view)
    # Counted at the moment of the refusal, since a hook shortens the view before others ask how large it was.
    run.prompt.overflow, run.prompt.refused_tokens = error, run.snapshot.state().context_tokens
    try:
        tail = yield from hooks.call_pre_step_hooks(run)
    # Taken back whatever happens: in the next step the context is not too long, and a hook that still read so would
    # prune at every step.
    finally:
        run.prompt.overflow = run.prompt.refused_tokens = None
    if (run.prompt.system, run.history.view) == before:
        raise error
    run.history.append_inbox()
    return make_step_request(run, options, [*tail, *make_step_prompt(run)])


def _call_model_until_complete(run: RunState, request: ModelRequest, purpose: Purpose) -> Flow[ModelReply]:
    """Call the model, and again for missing parts of its reply."""
    # The quick way for the reply that is whole, which is nearly every one: `_complete_reply` is a generator more for all that
    # pass it.
    effect = CallModel(run.effects.allocate_number(), request, purpose, call_id=run.tools.call_ids.peek_id)
    reply = _unwrap_and_count_reply(run, (yield effect), effect)
    return (yield from _complete_reply(run, request, purpose, reply)) if reply.stop_reason in UNFINISHED else reply


def _unwrap_and_count_reply(run: RunState, outcome: Any, effect: CallModel) -> ModelReply:
    """Return the reply in *outcome*; count it, and record the provider's measure of a step's prompt."""
    # The value is taken here without a call where there is one, as nearly always.
    reply: ModelReply = outcome.value if isinstance(outcome, Value) else run.effects.unwrap(outcome)
    used, request = reply.usage, effect.request
    run.spent.count_reply(effect, reply)
    # How large the next request is can only be estimated; what the provider counted for this one corrects the
    # estimate (generator-contract:P2). Only steps send the conversation, so only they measure it.
    if used is not None and used.prompt_tokens and effect.purpose in OF_A_STEP:
        run.prompt.record_measure(request, used.prompt_tokens)
    if "unread" in reply.provider_data or "dropped" in reply.provider_data:
        run.side_events.warn_of_reply_gaps(reply)
    return reply


def _complete_reply(run: RunState, request: ModelRequest, purpose: Purpose, reply: ModelReply) -> Flow[ModelReply]:
    """
    Request the missing parts of a reply that the provider paused or cut; return the whole reply.

    What is continued after a cut is text alone, at most three times, and not where the settings forbid it.

    Raises:
        ModelError: when the reply ended with an error.
    """
    for _ in range(MAX_CONTINUATIONS):
        if reply.stop_reason is not StopReason.PAUSE:
            break
        reply = _join_replies(reply, (yield from _request_continuation(run, request, purpose, reply)))
    for _ in range(MAX_CUT_CONTINUATIONS):
        how = request.settings
        # Half an answer to a schema cannot be continued: each reply has to be whole.
        # Asked at each turn, of the reply that has grown: with a call in it nothing more is put on, as half a call
        # cannot be continued.
        if purpose != "step" or not how.continue_cut or how.response_schema is not None or not _is_cut_text(reply):
            break
        asked = UserMessage(system_reminder(CONTINUE_TEXT))
        reply = _join_replies(reply, (yield from _request_continuation(run, request, purpose, reply, asked)))
    # Raised after all continuations: what a provider calls an error in its last part makes the whole reply worthless.
    if reply.stop_reason is StopReason.ERROR:
        msg = (
            f"the model {request.model!r} ended its reply with an error ({reply.raw_stop_reason or 'no reason given'})"
        )
        raise ModelError(msg, kind="reply_error")
    return reply


def _request_continuation(
    run: RunState, request: ModelRequest, purpose: Purpose, started: ModelReply, *extra_messages: Message
) -> Flow[ModelReply]:
    """Send *started* back unchanged, then *extra_messages*; return the reply that continues it, without joining them."""
    # What was said so far goes into the tail, as it came, thoughts and signatures included: a provider continues its
    # own words only when they come back unchanged. The history has none of it yet.
    longer = attrs.evolve(request, tail=(*request.tail, AssistantMessage(started.content), *extra_messages))
    effect = CallModel(run.effects.allocate_number(), longer, purpose, call_id=_make_call_id_function(run, started))
    return _unwrap_and_count_reply(run, (yield effect), effect)


def _is_cut_text(reply: ModelReply) -> bool:
    """Return whether a reply without calls was cut at the output limit."""
    if reply.stop_reason is not StopReason.MAX_TOKENS or not reply.text_without_thoughts.strip():
        return False
    # Thoughts may stand before it, since they go back as they came; half a call may not.
    return all(isinstance(part, (TextPart, ThinkingPart)) for part in reply.content)


def _make_call_id_function(run: RunState, paused: ModelReply) -> Callable[[int], str]:
    """Return the function that looks up the ids of the calls after those of an unfinished reply."""
    # Ids of calls are counters of the run, given in order. The parts of one reply share one sequence, so that the
    # second part's calls do not begin anew with the first one's ids.
    held = sum(isinstance(part, ToolCallPart) for part in paused.content)
    return lambda number: run.tools.call_ids.peek_id(held + number)


def _join_replies(first: ModelReply, continuation: ModelReply) -> ModelReply:
    """Return two parts of a reply as one: content and usage of both, everything else of the later one."""
    known = (
        None
        if first.usage is None and continuation.usage is None
        else (first.usage or Usage()) + (continuation.usage or Usage())
    )
    return attrs.evolve(
        continuation,
        content=(*first.content, *continuation.content),
        usage=known,
        cost=add_cost(first.cost, continuation.cost),
    )


# --- its reply --------------------------------------------------------------------------------------------------------


def _assign_call_ids(run: RunState, reply: ModelReply) -> StepReply:
    """Assign our ids to the calls of a reply; the last call of a cut reply becomes text."""
    parts: list[AssistantPart] = []
    calls: list[ToolCallPart] = []
    last = len(reply.content) - 1
    for index, part in enumerate(reply.content):
        if not isinstance(part, ToolCallPart):
            parts.append(part)
        # Its input is half of something, which may even parse. Kept as text the model sees what it had begun; kept as a
        # call somebody would carry it out (reliability:MP55).
        elif index == last and reply.stop_reason is StopReason.MAX_TOKENS:
            parts.append(TextPart(f"[cut off: {part.tool_name} {part.raw_input or compact(part.input)}]"))
        else:
            # Our own ids, and not the provider's: calls of handlers have none from anywhere, some providers send none, or
            # one twice (reliability:MP49), and with counters the same run has the same ids on every replay.
            call = part.with_id(run.tools.call_ids.allocate_id())
            parts.append(call)
            calls.append(call)
    return StepReply(reply, AssistantMessage(tuple(parts)), calls, len(calls) < len(parts))


def _record_and_emit_reply(run: RunState, reply: StepReply) -> Flow[None]:
    """Record the thoughts of a reply, and emit events with its thoughts and text; warn of an empty reply or a call written as text."""
    thinking, text = reply.message.thinking, reply.message.text
    # One look for a character, in place of a search for tags in every reply; the tags themselves are sorted out only
    # where there may be some.
    if thinking or "<" in text:
        run.progress.thinking.extend([*thinking, *split_thoughts(text).thoughts])
    if not reply.calls and run.tools.offered and ("<" in text or "[" in text):
        _warn_of_written_call(run, reply.model)
    if not run.plan.host.is_watched():
        return
    # They belong to the model call, as its deltas do: it is the last effect that was numbered.
    path, seq = run.plan.path, run.effects.seq - 1
    if thinking:
        yield Notify(ev.ThinkingCompleted(path=path, seq=seq, text="".join(thinking)))
    if text:
        yield Notify(ev.TextCompleted(path=path, seq=seq, text=text))
    if _is_empty_reply(reply.model.content):
        yield Notify(ev.Warned(path=path, seq=seq, message="The model sent an empty reply."))


def _warn_of_written_call(run: RunState, reply: ModelReply) -> None:
    """Warn once that a model wrote a call as text, which is not run."""
    # It happens where a server's chat template does not fit its model, or where a prompt shows such blocks, and looks
    # as if the agent had lost its tools. Nothing is called: text is text, unless the provider was told to read calls
    # out of it.
    mark = find_call_mark(reply.text_without_thoughts)
    if not mark:
        return
    run.side_events.warn_once(
        f"agent {run.plan.agent.definition.id!r}: the model wrote {mark!r} into its text, which looks like a tool call, but no tool was called. "
        "OpenAIChatProvider(..., written_calls=True) reads <tool_call> and <codebuff_tool_call> blocks; with a service that "
        "supports tool calls, remove such blocks from the prompts"
    )


def _is_empty_reply(parts: Sequence[AssistantPart]) -> bool:
    """Return whether a reply has no content, not even a blank, which ends a turn."""
    # This is generator-contract:G51.
    return all(isinstance(p, TextPart) and not p.text for p in parts)


def _is_only_thoughts(reply: ModelReply) -> bool:
    """Return whether a reply has content but neither a call nor text, which ends no turn."""
    # This is requirements:X53.
    # Anything else (a call, an image, a refusal, what nobody understands) says something, and ends the turn or goes on
    # by its own rule.
    for part in reply.content:
        if not isinstance(part, (TextPart, ThinkingPart)):
            return False
    return not reply.text_without_thoughts.strip() and not _is_empty_reply(reply.content)


# --- its calls and its end --------------------------------------------------------------------------------------------


def _run_calls_and_commit_reply(
    run: RunState, reply: StepReply, calls: Sequence[ToolMember]
) -> Flow[LimitReached | None]:
    """Run the calls of a reply and append message and results together, even if the run is stopped meanwhile."""
    if not calls:
        _commit_reply(run, reply.message, calls)
        return None
    spent: LimitReached | None = None
    # Also those at fault, which have their result already: the batch shows them in their place among the others.
    waiting = [call for call in calls if call.result is None or call.is_fault]
    # Not even the complete calls before the cut are carried out: they may be half of a plan (write the file, then ...)
    # whose other half nobody knows.
    if run.progress.truncated:
        for call in calls:
            call.set_skipped_result(CUT_OFF_TEXT)
    # Beside the transcript, and not in it, until all results are there: at each moment every state that anybody can see
    # pairs, a child that inherits in the middle included.
    run.history.set_open_reply(reply.message)
    try:
        yield from run_batch(run, waiting)
    # Kept until reply and results are committed; `_end_step` raises it.
    except LimitReached as error:
        spent = error
    # Committed on a stop, too: what the calls did has happened, and the results say which of them did not come to their
    # end.
    except Stopped:
        _commit_reply(run, reply.message, calls)
        raise
    finally:
        run.history.set_open_reply(None)
    _commit_reply(run, reply.message, calls)
    return spent


def _commit_reply(run: RunState, message: AssistantMessage, calls: Sequence[ToolMember]) -> None:
    """Append a reply and its results, with the inputs that ran."""
    results: list[ToolResult] = []
    ran: dict[str, AssistantPart] = {}
    for call in calls:
        if call.result is not None:
            results.append(call.result)
        if call.accepted is not None:
            # With its own words in the history the model would take the result for that of another input.
            ran[call.accepted.tool_call_id] = call.accepted
    if ran:
        parts = [
            ran.get(part.tool_call_id, part) if isinstance(part, ToolCallPart) else part for part in message.content
        ]
        message = attrs.evolve(message, content=tuple(parts))
    run.history.append_reply(message, results)


def _append_inbox_or_decide_turn_end(run: RunState, calls: Sequence[ToolMember]) -> bool:
    """Append the inbox, which continues the turn; if it is empty, return whether the step ends the turn, before hooks decide."""
    # First of all: a message that came during the step has to be answered before the turn can end
    # (generator-contract:G54).
    if run.history.inbox:
        run.history.append_inbox()
        return False
    if run.progress.truncated:
        return True
    ended, forced = False, False
    for call in calls:
        # The model must see what was wrong with a call, also when it took its work for done.
        if call.is_fault:
            return False
        spec = None if call.binding is None else call.binding.spec
        if spec is None or spec.forces_next_step:
            forced = True
        if spec is not None and spec.ends_turn and call.has_ended_turn:
            ended = True
    # An agent that has `task_completed` says itself when it is done; a reply without calls is then no end, only a
    # pause.
    if ended or "task_completed" in run.tools.offered:
        return ended
    return not forced if calls else not run.progress.thoughts_in_a_row


def _warn_of_missing_answer(run: RunState, calls: Sequence[ToolMember]) -> None:
    """Warn if all *calls* of an ended turn are of ``think_deeply``, so that an agent without handler has no answer."""
    if run.plan.agent.definition.handle_steps is not None or run.output.is_given:
        return
    if all(call.asked.tool_name == "think_deeply" for call in calls):
        run.side_events.add_warnings(
            f"the turn of agent {run.plan.agent.definition.id!r} ended after 'think_deeply' alone, so it has no answer. Tell it in its prompt to call "
            "'think_deeply' together with its answer or with another tool"
        )


def _ask_hooks_to_end_turn(run: RunState) -> Flow[bool]:
    """Return whether the turn may end, as decided by ``on_stop`` hooks; a spent budget, cut reply or hand-off always ends it."""
    # A hook that sends the model back needs a step to send it to; where none is left its message would stand there
    # unanswered. After a hand-off it is the other agent's turn.
    if not run.plan.agent.hooks.on_stop or run.budget.steps_left <= 0 or run.progress.truncated:
        return True
    if run.children.successor is not None:
        return True
    return not (yield from hooks.call_on_stop_hooks(run))


def record_end_turn_message(run: RunState, calls: Sequence[ToolMember]) -> bool:
    """Record the message of an ``end_turn`` among *calls* that ran; return whether there is one."""
    for call in calls:
        if call.asked.tool_name == "end_turn" and call.has_ended_turn:
            run.history.end_turn_message = call.input.get("message", "")
            return True
    return False
