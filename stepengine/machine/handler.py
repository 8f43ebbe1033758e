"""
Running the author's handler: advance it, perform what it yields, send or throw the result.

``YIELDS`` in ``data/yields.py`` holds the yieldables, their costs and their effects. The handler runs before the first model
call and again after each step that it asked for. Only returning, or yielding ``end_turn``, ends the
run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeAlias, assert_never, cast

import attrs

from stepengine.data import events as ev
from stepengine.data import yields as y
from stepengine.data.effects import Compute, Notify
from stepengine.data.hooks import StepContext
from stepengine.data.json import freeze
from stepengine.data.messages import (
    AssistantMessage,
    Source,
    TextPart,
    ToolCallPart,
    ToolResult,
)
from stepengine.data.models import ModelReply
from stepengine.data.outcomes import Failure, Stop, Value
from stepengine.data.record_sizes import find_length_problem
from stepengine.data.state import ChildResult
from stepengine.data.tools import Control, Spawning, ToolBinding, ToolSpec
from stepengine.errors import BadYield, InputError, LimitExceeded, LimitReached, StepEngineError, ToolInputError
from stepengine.machine.author import Author, ReturnValue, add_location, find_yield_length_error, make_bad_yield_error
from stepengine.machine.batch import RUN_FREELY, collect_tool_calls, run_batch
from stepengine.machine.blocks import BrokenBlock, CallBlock, TextPiece, split_blocks
from stepengine.machine.calls import (
    CandidatesMember,
    EffectMember,
    RaceMember,
    ToolMember,
    make_single_member,
    make_unavailable_author_call_error,
    make_unavailable_tool_error,
    run_single_member,
)
from stepengine.machine.ceilings import ask_for_more_steps
from stepengine.machine.child_reports import wait_for_child_report
from stepengine.machine.plan import ToolBody
from stepengine.machine.protocol import Flow, format_yieldable_names, get_yield_rows
from stepengine.machine.signals import EndRun, Stopped
from stepengine.machine.state import BodyProgress, RunState
from stepengine.machine.step import (
    PLAIN,
    finish_reopened_step,
    make_step_prompt,
    make_step_request,
    record_end_turn_message,
    run_step_within_budget,
    run_turn,
)

Answer: TypeAlias = Flow[y.StepResult]
# Told once a handler may tidy up and return what it has; told twice it will not listen (reliability:GN09).
MAX_LIMIT_THROWS = 2
SPAWNS = (y.ToolCall, y.AgentCall, y.Parallel)
"""What may ask for children."""
YIELDS = get_yield_rows("handler")
OF_TOOLS = get_yield_rows("tool")
ACCEPTED_OF_TOOLS = format_yieldable_names("tool")
OF_CONVERSATION = ("set_messages", "add_message", "end_turn", "hand_off", "task_completed")
"""Control tools that touch the conversation of a run, which the body of a tool has not."""


def default_handler(_: StepContext) -> y.Steps:
    """Behave as an agent without a handler: run steps until the turn ends."""
    yield y.STEP_ALL


def run_without_handler(run: RunState) -> Flow[None]:
    """Run an agent without a handler like ``default_handler``, without creating states and step results."""
    # An agent without a handler, which is most of them, takes this way and no generator of an author's stands in
    # between: nobody looks at the states that would be made for it at each step. A test compares both ways, effect by
    # effect (generator-contract:G12).
    held = run.history.open_step
    try:
        # The calls of a reopened step may start children in the background, too, and their reports continue the turn.
        if held is None or not (yield from finish_reopened_step(run, *held)) or (yield from wait_for_child_report(run)):
            yield from run_turn(run)
    except StepEngineError as error:
        run.budget.count_actions_or_raise(1)
        raise add_location(error) from error.__cause__


def run_handler(run: RunState, author: Author) -> Flow[Any]:
    """Advance the handler until it returns or ends the run; return its value. The handler is closed on every way out."""
    throws = 0
    run.progress.author_stack.append(author)
    try:
        asked = author.send(None)
        # By `type`: a value of the author may raise when it is asked for its class.
        while type(asked) is not ReturnValue:
            if throws >= MAX_LIMIT_THROWS:
                run.side_events.add_warnings(f"{author.what} continued after its limit was spent, and was closed")
                return None
            try:
                answer = yield from _perform_yield(run, author, asked)
            # Thrown at the author's own `yield`, so that it can be caught where it was asked for. Stops are not among
            # these: a run that was cancelled must not be talked out of it by an `except` (reliability:GN09).
            except (StepEngineError, LimitReached) as error:
                throws += isinstance(error, LimitReached)
                asked = author.throw(error)
                # The frames of the throw hold on to whole states.
                error.__traceback__ = None
            else:
                if isinstance(asked, SPAWNS) and _can_have_spawned(run, asked):
                    _warn_of_ignored_failures(run, author, asked, answer)
                asked = author.send(answer)
        return _output_from_return(run, author, asked.value)
    except EndRun:
        return None
    # On every way out, before the end of the run is told: whoever has the result may rely on the handler's `finally`
    # having run (reliability:I6).
    finally:
        run.side_events.report_close_problems(author.close())
        run.progress.author_stack.pop()


def _output_from_return(run: RunState, author: Author, value: Any) -> Any:
    """Return the handler's return *value*; a ``StepResult`` gives ``None`` and a warning, and raises in the body of a tool."""
    if isinstance(value, y.StepResult):
        if run.plan.body is not None:
            msg = f"{author.what} returned a StepResult, which is not a valid tool result; {y.YIELD_FROM}"
            raise BadYield(msg)
        # A handler of one line, `lambda ctx: (yield STEP)`, returns what its `yield` was sent without meaning it.
        run.side_events.add_warnings(
            f"{author.what} returned a StepResult, which is ignored, so the run has no output; {y.YIELD_FROM}"
        )
        return None
    return value


def _can_have_spawned(run: RunState, yielded: Any) -> bool:
    """Return whether *yielded* may have started children; of tool calls only those of tools that spawn may."""
    return not isinstance(yielded, y.ToolCall) or run.tools.bindings[yielded.tool].runs.how == "spawns"


def _warn_of_ignored_failures(run: RunState, author: Author, yielded: object, answer: y.StepResult) -> None:
    """Warn about failed children if the handler ignores the result, as a bare ``yield`` does."""
    # A failed child is a value and no exception, so a handler that throws it away goes on as if all were well. It is
    # told only where the answer is dropped; who looks at it needs no warning.
    why = _describe_child_failures(yielded, answer)
    if why and author.discards_answer:
        run.side_events.warn_each_time(
            f"{author.what} ({author.location}) ignores a failed child: {why}; check the result, or spawn with `yield from AgentCall(...)`, which raises"
        )


def _describe_child_failures(yielded: object, answer: y.StepResult) -> str:
    """Return the reasons why children of *yielded* failed, or ``""``."""
    if not isinstance(yielded, y.ToolCall):
        children = answer.value if isinstance(yielded, y.Parallel) else (answer.value,)
        failed = [c for c in children if isinstance(c, ChildResult) and c.is_error]
        return "; ".join([f"{c.agent_id!r} failed: {c.why or c.status.value}" for c in failed])
    result = answer.tool_result
    if result is None:
        return ""
    entries = result.data if isinstance(result.data, list) else ()
    failed_entries = [
        f"{e.get('agent_type')!r} failed: {e['error']}" for e in entries if isinstance(e, dict) and "error" in e
    ]
    return "; ".join(failed_entries) or (result.text if result.is_error else "")


def _perform_yield(run: RunState, author: Author, yielded: y.Yieldable | Compute) -> Answer:
    """Perform what the handler yielded and return the answer; its table row decides whether it is allowed."""
    if type(yielded) is Compute:
        author.program = yielded.program
        return (
            _compute_or_restore_result(run, yielded) if run.plan.body is not None else _run_sandboxed_turn(run, yielded)
        )
    row = (YIELDS if run.plan.body is None else OF_TOOLS).get(type(yielded)) or _refuse_yield(run, author, yielded)
    # Counted before it is carried out, and also where it is refused: a handler that catches all errors and asks again
    # must come to an end (generator-contract:G47).
    refused = find_yield_length_error(author.what, yielded)
    if actions := row.actions or int(refused is not None):
        run.budget.count_actions_or_raise(actions)
    if refused is not None:
        raise refused
    return ANSWERS[type(yielded)](run, author, yielded)


def _compute_or_restore_result(run: RunState, compute: Compute) -> Answer:
    """Let the driver run work in a thread, or restore its recorded result; return the result as the answer."""
    # What a sandbox worked out is recorded, unlike a turn of a handler: a replay then needs no sandbox, and one of
    # another version cannot come to something else.
    body = cast("BodyProgress", run.body)
    known = cast("ToolBody", run.plan.body).recalled(len(body.computed))
    if isinstance(known, Stop):
        run.effects.record_outcome(known, compute)
        raise Stopped(known)
    outcome = yield compute if known is None else attrs.evolve(compute, known=cast("Any", known))
    if isinstance(outcome, Stop):
        raise Stopped(outcome)
    if isinstance(outcome, Failure):
        body.computed.append(None)
        raise outcome.error
    value = freeze(cast("Value", outcome).value)
    if why := find_length_problem(value):
        body.computed.append(None)
        msg = f"a request of the program is too long: {why}"
        raise InputError(msg, issues=(why,))
    body.computed.append(value)
    return _make_step_result(run, value=value)


def _run_sandboxed_turn(run: RunState, compute: Compute) -> Answer:
    """Advance a handler in a sandbox; this is not recorded, since a replay runs the handler again."""
    outcome = yield compute
    if isinstance(outcome, Stop):
        raise Stopped(outcome)
    if isinstance(outcome, Failure):
        raise outcome.error
    return _make_step_result(run, value=cast("Value", outcome).value)


def _refuse_yield(run: RunState, author: Author, yielded: object) -> NoReturn:
    """Count an action and raise ``BadYield`` for a value that the author may not yield here."""
    run.budget.count_actions_or_raise(1)
    if run.plan.body is None:
        raise make_bad_yield_error(author.what, yielded, author.location)
    said = make_bad_yield_error(author.what, yielded, _format_short_location(author), ACCEPTED_OF_TOOLS).message
    if type(yielded) in YIELDS:
        said += " A tool has no conversation of its own: let an agent do it, with AgentCall(...)."
    elif isinstance(yielded, str):
        said += " Its result is what it returns; `ctx.notify(...)` tells whoever watches how far it is."
    raise BadYield(said, location=author.location)


def _format_short_location(author: Author) -> str:
    """Return the author's location without folders: models see the text, which is the same on every machine."""
    return author.location.replace("\\", "/").rpartition("/")[2]


def _make_step_result(
    run: RunState, results: tuple[ToolResult, ...] = (), value: object = None, texts: tuple[str, ...] = ()
) -> y.StepResult:
    """Return the answer for the author, with the current state, the output, and whether the turn is complete."""
    output, complete = run.output, run.progress.steps_complete
    if not output.is_given:
        return y.StepResult(run.snapshot.get_state_factory(), results, complete, texts, value)
    of_turn = output.get_typed_value() if output.is_of_turn else None
    return y.StepResult(output.with_decoded_output(run.snapshot.state()), results, complete, texts, value, of_turn)


def _perform_steps(run: RunState, _: Author, yielded: Any) -> Answer:
    """Run one step, or steps until the turn ends; at its end JSON in the last reply becomes the output."""
    try:
        if yielded is y.STEP:
            yield from run_step_within_budget(run, PLAIN)
        elif yielded is y.STEP_ALL:
            yield from run_turn(run)
        else:
            _require_offered_tools(run, yielded)
            yield from run_step_within_budget(run, yielded)
    except StepEngineError:
        # A handler that swallows every error and asks again must end, too (generator-contract:G47).
        run.budget.count_actions_or_raise(1)
        raise
    # Here as at the end of the run: a handler that checks the output of a turn must see what the result would have.
    if run.progress.steps_complete and not run.output.is_of_turn:
        run.output.set_from_text(run.output.last_texts.get_newest_reply_text())
    return _make_step_result(run)


def _require_offered_tools(run: RunState, step_options: y.StepWith) -> None:
    """Raise if a ``StepWith`` names a tool that the agent does not offer."""
    for name in step_options.tools or ():
        if name not in run.tools.offered:
            raise make_unavailable_author_call_error(run, name)


# --- calls and other members ------------------------------------------------------------------------------------------


def _perform_single_member(run: RunState, _: Author, yielded: Any) -> Answer:
    """Perform a yieldable that is one effect, such as a child run, and return its result as a step result."""
    value = yield from run_single_member(make_single_member(run, yielded))
    return _make_step_result(run, value=value)


def _make_author_call(run: RunState, author: Author, yielded: y.ToolCall) -> ToolMember:
    """Return a handler's or tool body's own call, and record its input as that of the author; or raise its error."""
    binding = run.tools.bindings.get(yielded.tool)
    # A call of a tool that the model does not know may not enter the history, since a provider refuses one with calls
    # of unknown tools. So it has to be asked for as one that leaves no trace; control tools leave none anyway.
    allowed = yielded.tool in run.tools.offered or not yielded.include_tool_call
    if binding is not None and (allowed or binding.runs.how not in RUN_FREELY):
        body = run.plan.body
        if body is not None and _touches_conversation(binding):
            msg = (
                f"{author.what} ({_format_short_location(author)}) calls {yielded.tool!r}, which changes a conversation, and a tool "
                "has none: return the text, or let the agent that calls the tool do it"
            )
            raise BadYield(msg, location=author.location)
        source: Source = "handler" if body is None else "tool"
        if run.effects.sources is not None:
            run.effects.sources.add_handler_values(yielded.input)
        return ToolMember(
            run, ToolCallPart(run.tools.call_ids.allocate_id(), yielded.tool, yielded.input), source, binding
        )
    raise make_unavailable_author_call_error(run, yielded.tool)


def _touches_conversation(binding: ToolBinding) -> bool:
    """Return whether a tool changes the conversation of the run that calls it."""
    runs = binding.runs
    if isinstance(runs, Control) and runs.action in OF_CONVERSATION:
        return True
    return binding.spec.ends_turn or (isinstance(runs, Spawning) and runs.is_inline)


def _perform_tool_call(run: RunState, author: Author, yielded: y.ToolCall) -> Answer:
    """Run an author's tool call and append it to the history; a successful ``end_turn`` raises ``EndRun``."""
    call = _make_author_call(run, author, yielded)
    try:
        yield from run_batch(run, (call,))
    # On a stop, too: what the call did has happened, and its result says how far it came.
    finally:
        _commit_own_calls(run, (yielded,), (call,))
    assert call.result is not None  # noqa: S101
    if record_end_turn_message(run, (call,)):
        # The handler is not told how its own `end_turn` went: nothing comes back from it (generator-contract:G49).
        raise EndRun
    return _make_step_result(run, (call.result,))


def _commit_own_calls(run: RunState, yielded: Sequence[y.ToolCall], calls: Sequence[ToolMember]) -> None:
    """
    Append the calls that belong in the history, and their results, together; the body of a tool has no history.

    Only calls of tools that the model knows enter the history (generator-contract:G31).
    """
    if run.plan.body is not None:
        return
    recorded = [
        call
        for call, of in zip(calls, yielded, strict=True)
        if call.result is not None and of.include_tool_call and of.tool in run.tools.offered
    ]
    if recorded:
        _commit_calls(run, recorded)


def _commit_calls(run: RunState, calls: Sequence[ToolMember]) -> None:
    """Append calls of the handler, which have their results; the run may end with these (generator-contract:S3)."""
    message = AssistantMessage(tuple([call.asked for call in calls]))
    results = [call.result for call in calls if call.result is not None]
    # What a model need not see, such as "Task completed.", is nobody's answer.
    own = {
        call.asked.tool_call_id for call in calls if call.binding is not None and _can_be_last_text(call.binding.spec)
    }
    run.history.append_reply(message, results, own)


def _can_be_last_text(spec: ToolSpec) -> bool:
    """Return whether a handler's call of a tool can be the last text: the tool forces a next step and does not end the turn."""
    return spec.forces_next_step and not spec.ends_turn


def _perform_parallel(run: RunState, author: Author, yielded: y.Parallel[Any]) -> Answer:
    """Run the members of a ``Parallel`` and return their results in order, as one answer."""
    leaves = _flatten_members(yielded.calls)
    members = _make_members(run, author, yielded.calls, leaves)
    for member, line in zip(members, yielded.program_lines, strict=False):  # none but of a program
        member.program_line = line
    results = yield from _run_members(run, leaves, members, yielded)
    return _make_step_result(run, results, tuple([member.result for member in members]))


def _perform_race(run: RunState, author: Author, yielded: y.Race[Any]) -> Answer:
    """Run the members of a ``Race`` and return the index and the result of the winner, as one answer."""
    leaves = _flatten_members(yielded.members)
    race = RaceMember(run, _make_members(run, author, yielded.members, leaves))
    results = yield from _run_members(run, leaves, [race], y.Parallel())
    return _make_step_result(run, results, race.result)


def _flatten_members(yielded: Sequence[Any]) -> Sequence[Any]:
    """Return the members of a ``Parallel`` or ``Race``, with those of nested races in their places."""
    if y.Race not in map(type, yielded):
        return yielded
    return [leaf for one in yielded for leaf in (_flatten_members(one.members) if isinstance(one, y.Race) else (one,))]


def _make_members(run: RunState, author: Author, yielded: Sequence[Any], leaves: Sequence[Any]) -> list[EffectMember]:
    children = [*map(type, leaves)].count(y.AgentCall)
    return [_make_member(run, author, one, child_count=children) for one in yielded]


def _run_members(
    run: RunState, leaves: Sequence[Any], members: Sequence[EffectMember], parallel: y.Parallel[Any]
) -> Flow[tuple[ToolResult, ...]]:
    """
    Run members of all kinds together, and append the calls among them to the history; return the results of these calls.

    Calls of tools that the model does not know stay out of the history. All calls are validated before any member starts.

    Raises:
        EndRun: when one of the calls was a successful ``end_turn``.
    """
    calls = collect_tool_calls(members)
    if not calls:
        yield from run_batch(run, members, parallel)
        return ()
    # All of them before any begins: an author's wrong call is raised, and half of a `Parallel` would have happened by
    # then.
    for call in calls:
        call.repair_and_validate_input()
    try:
        yield from run_batch(run, members, parallel)
    finally:
        _commit_own_calls(run, [one for one in leaves if isinstance(one, y.ToolCall)], calls)
    if record_end_turn_message(run, calls):
        raise EndRun
    return tuple([call.result for call in calls if call.result is not None])


def _make_member(run: RunState, author: Author, yielded: Any, *, child_count: int) -> EffectMember:
    """Return a member of a group; tools that may need several effects one after the other raise ``ToolInputError``."""
    if isinstance(yielded, y.Race):
        return RaceMember(run, [_make_member(run, author, one, child_count=child_count) for one in yielded.members])
    if not isinstance(yielded, y.ToolCall):
        return make_single_member(run, yielded, child_count=child_count)
    call = _make_author_call(run, author, yielded)
    # Each of these may need several effects, one after the other, while a member of a group has to say all of its
    # effects at once.
    if run.tools.bindings[yielded.tool].runs.how in ("spawns", "asks", "drives"):
        msg = f"{yielded.tool!r} cannot be in Parallel; use AgentCall(...) or Ask(...) there instead"
        raise ToolInputError(msg, tool_name=yielded.tool, issues=(msg,))
    return call


# --- candidates and text ----------------------------------------------------------------------------------------------


def _perform_generate_n(run: RunState, _: Author, yielded: y.GenerateN) -> Answer:
    """Spend one step on several replies to one request; return their texts and drop their tool calls."""
    if yielded.n > y.MAX_CANDIDATES:
        msg = f"GenerateN({yielded.n}) requests more than {y.MAX_CANDIDATES} candidates"
        run.budget.record_spent_budget(LimitExceeded(msg, kind="candidates", limit=y.MAX_CANDIDATES))
    elif run.budget.steps_left <= 0 and not (yield from ask_for_more_steps(run)):
        msg = f"agent {run.plan.agent.definition.id!r} has no step left for GenerateN; raise Limits(max_steps=...)"
        run.budget.record_spent_budget(LimitExceeded(msg, kind="steps", limit=run.budget.most_steps))
    run.budget.raise_if_spent()
    try:
        request = make_step_request(run, PLAIN, make_step_prompt(run))
    # Also counted if the request is refused: a handler that catches the error and asks again must end (generator-contract:G47).
    finally:
        run.budget.deduct_step()
    replies: list[ModelReply] = yield from run_single_member(CandidatesMember(run, request, yielded.n))
    # Two candidates may each want to write the same file; which of them is taken is decided later, by the handler.
    dropped = sum(len(reply.tool_calls) for reply in replies)
    if dropped:
        text = f"{dropped} tool calls in candidates were dropped; candidates are text"
        yield Notify(ev.HandlerNotice(path=run.plan.path, seq=run.effects.seq, kind="calls_dropped", message=text))
    texts = tuple([reply.text_without_thoughts for reply in replies])
    return _make_step_result(run, texts=texts)


def _perform_step_text(run: RunState, _: Author, yielded: y.StepText) -> Answer:
    """Append the texts of a reply that the author wrote, and run its tool-call blocks as a model's, in order."""
    pieces = split_blocks(yielded.text)
    run.budget.count_actions_or_raise(max(1, sum(isinstance(p, CallBlock) for p in pieces)))
    results: list[ToolResult] = []
    ended_by: ToolMember | None = None
    fault = False
    # One after another, each with its own message: the model that reads this history later has to find calls and
    # results in the order in which they happened.
    for piece in pieces:
        match piece:
            case TextPiece(text):
                run.history.add([AssistantMessage((TextPart(text),))])
                yield Notify(ev.TextCompleted(path=run.plan.path, seq=run.effects.seq, text=text))
            case BrokenBlock(name, problem):
                fault = True
                results.append((yield from _report_broken_block(run, name, problem)))
            case CallBlock(name, value):
                call = _make_block_call(run, ToolCallPart(run.tools.call_ids.allocate_id(), name, value), ended_by)
                yield from _run_block_call(run, call)
                assert call.result is not None  # noqa: S101
                results.append(call.result)
                fault = fault or call.is_fault
                ended_by = call if call.has_ended_turn else ended_by
            case _:
                assert_never(piece)
    if ended_by is not None and not fault:
        run.progress.record_turn_completion(is_complete=not run.history.inbox)
        run.history.append_inbox()
        record_end_turn_message(run, (ended_by,))
    return _make_step_result(run, tuple(results))


def _report_broken_block(run: RunState, name: str, problem: str) -> Flow[ToolResult]:
    """Emit a notice about a block that cannot be read; return it as an error result."""
    text = f"This tool-call block was not executed: {problem}"
    yield Notify(ev.HandlerNotice(path=run.plan.path, seq=run.effects.seq, kind="broken_block", message=text))
    return ToolResult.error(text, tool_name=name)


def _make_block_call(run: RunState, part: ToolCallPart, ended_by: ToolMember | None) -> ToolMember:
    """Return the call of a block; one of an unavailable tool, or after the end of the turn, has its result already."""
    binding = run.tools.bindings.get(part.tool_name)
    # A text may come from a model, so its calls are judged as a model's are: what was not offered is not there.
    if binding is not None and part.tool_name not in run.tools.offered and binding.runs.how != "control":
        binding = None
    call = ToolMember(run, part, "model", binding)
    if binding is None:
        call.set_error_result(make_unavailable_tool_error(run, part.tool_name, tuple(run.tools.offered)))
    elif ended_by is not None:
        call.set_skipped_result(f"Skipped: {ended_by.asked.tool_name} ended the turn before this call.")
    return call


def _run_block_call(run: RunState, call: ToolMember) -> Flow[None]:
    """Run the call of a block, and append it to the history if it has a result, even if the run is stopped meanwhile."""
    try:
        yield from run_batch(run, (call,))
    finally:
        if call.result is not None and call.asked.tool_name in run.tools.offered:
            _commit_calls(run, (call,))


ANSWERS: Mapping[type, Callable[[RunState, Author, Any], Answer]] = {
    **dict.fromkeys([row.kind for row in YIELDS.values()], _perform_single_member),
    y.Sentinel: _perform_steps,
    y.StepWith: _perform_steps,
    y.ToolCall: _perform_tool_call,
    y.Parallel: _perform_parallel,
    y.Race: _perform_race,
    y.GenerateN: _perform_generate_n,
    y.StepText: _perform_step_text,
}
"""The function that carries out each kind of yield. Kinds without a row of their own are performed as single effects."""
