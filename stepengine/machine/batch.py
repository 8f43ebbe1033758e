"""
The members of one reply, or of one yield: validate and judge the calls, carry all out, in one fixed order.

The calls of a reply run one after another, with two exceptions: every call is to a ``parallel_safe`` tool and none ends the
turn, or every call starts children. These batches, and the members of every ``Parallel`` or ``Race``, run together in four
passes: judge all, ask all questions at once, run all that is allowed at once, let the hooks look at all results. Results are
always in the order in which they were asked for, and every call has one, whatever happens.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import attrs

from stepengine.data import events as ev
from stepengine.data.effects import AskPerson, Leaf, Notify, Spawn
from stepengine.data.json import canonical
from stepengine.data.messages import ToolCallPart, ToolResult
from stepengine.data.origins import describe_untrusted_origins
from stepengine.data.outcomes import Failure, Single, Stop
from stepengine.data.questions import NOBODY, REFUSED, REMEMBERED, Answer, Decision, Question, find_offered_rule
from stepengine.data.tools import FIND_TOOLS, Spawning, ToolBinding
from stepengine.data.yields import Parallel
from stepengine.errors import LimitExceeded, LimitReached, StepEngineError
from stepengine.machine import hooks
from stepengine.machine.calls import (
    EffectMember,
    RaceMember,
    ToolMember,
    finish_pending_call,
    make_ask_effect,
    make_unavailable_tool_error,
    run_single_member,
)
from stepengine.machine.protocol import Flow
from stepengine.machine.signals import Stopped, merge_stops
from stepengine.machine.state import RunState
from stepengine.machine.tool_search import list_visible_tools

RUN_FREELY = ("ordinary", "yields")
"""The kinds of tools whose calls may run together with others of a reply: they use nothing of the run itself."""
SPENT = "a limit of the run was spent"
# A person approves an input, a hook changes it, the person is asked about the change, and so on: two sides that never
# agree would ask for ever. After so many rounds the call is denied, since what was approved is what runs or nothing
# does (reliability:R8).
MAX_EDIT_ROUNDS = 10
UNSTEADY = "Not run: whenever a person approves an input of this call, a hook makes another one of it."
# Models take a denial for a hiccup and repeat the call with other words. After the third they are told in plain words;
# `max_denials` ends the run of one that does not listen even then (reliability:PM38).
DENIALS_UNTIL_ADVICE = 3
UNATTENDED = (
    "Denied: a call of {} needs a person's approval, and nobody can give it in this run. Go on without it, and say in the "
    "end what was left undone."
)


def make_reply_calls(run: RunState, calls: Sequence[ToolCallPart], offered: Collection[str]) -> list[ToolMember]:
    """Return the members for the calls of a reply; a call of a tool that was not offered has an error result already."""
    made = []
    for asked in calls:
        # By what was offered in this request, and not by what the engine knows: a model that remembers a name from an
        # earlier step, or guesses one, would call what its agent was not given. Nor is a similar name ever taken for it
        # (reliability:MP48): `delete_file` is one letter from something harmless.
        name = (
            asked.tool_name
            if asked.tool_name in offered
            else _find_name_of_spawning_tool(run, asked.tool_name, offered)
        )
        call = ToolMember(run, asked, "model", None if name is None else run.tools.bindings[name])
        if name is None:
            # With hundreds of tools, of which the model was shown a few and finds the others by a search, a list of all
            # names in an error would be longer than the conversation.
            known = list_visible_tools(offered, run.tools.bindings)
            hint = (
                f" {len(offered) - len(known)} others are found with {FIND_TOOLS}." if len(known) < len(offered) else ""
            )
            # The call stays, with an error for its result: the model has to see that it made it, and every provider
            # refuses a history in which a call has none.
            call.set_error_result(make_unavailable_tool_error(run, asked.tool_name, known, hint))
        made.append(call)
    return made


def _find_name_of_spawning_tool(run: RunState, name: str, offered: Collection[str]) -> str | None:
    """Return the offered tool that starts an agent and is called *name* with underscores for hyphens, or ``None``."""
    # This is generator-contract:L28.
    other = name.replace("-", "_")
    return other if other in offered and run.tools.bindings[other].runs.how == "spawns" else None


def run_batch(run: RunState, members: Sequence[EffectMember], parallel: Parallel[object] | None = None) -> Flow[None]:
    """
    Run all members to their results. Members of a ``Parallel`` run concurrently, even if their tools are not ``parallel_safe``.

    Only a ``Parallel`` may have members other than tool calls.

    Raises:
        LimitExceeded: when there is no room for the children of a ``Parallel``; nothing has started.
        Stopped: when the world ended the run; every call has a result even so.
        LimitReached: when a budget was spent in one of the calls, after all have their results.
        StepEngineError: what is wrong with a handler's own call.
    """
    # An author who writes `Parallel` has said that these may run at once. A model has said nothing by putting two calls
    # into one reply, so there the tools decide.
    if parallel is not None:
        return _run_batch_concurrently(run, members, collect_tool_calls(members), parallel)
    calls: Sequence[ToolMember] = members  # type: ignore[assignment]
    return (
        _run_batch_concurrently(run, calls, calls)
        if len(calls) > 1 and _can_run_concurrently(run, calls)
        else _run_one_by_one(run, calls)
    )


def collect_tool_calls(members: Sequence[EffectMember]) -> list[ToolMember]:
    """Return the tool calls among members, those in races included."""
    calls: list[ToolMember] = []
    for member in members:
        if isinstance(member, ToolMember):
            calls.append(member)
        elif isinstance(member, RaceMember):
            calls += collect_tool_calls(member.members)
    return calls


def _can_run_concurrently(run: RunState, calls: Sequence[ToolMember]) -> bool:
    """Return whether all calls are parallel-safe, or all start children and these may run together."""
    # All or nothing. To run the safe ones of a mixed reply at once and the others in turn was possible, too, but which
    # of a reader and a writer comes first would then depend on their kinds, and the model, which wrote an order, could
    # not rely on it. Calls without a spec have their error already and stand in nobody's way.
    known = [call.binding for call in calls if call.binding is not None]
    return all(map(_is_parallel_safe, known)) or (
        all(map(_only_starts_children, known)) and run.plan.limits.max_concurrent_children != 1
    )


def _is_parallel_safe(tool: ToolBinding) -> bool:
    """Return whether *tool* is ``parallel_safe``, does not end the turn, and uses nothing of the run itself."""
    return tool.spec.parallel_safe and not tool.spec.ends_turn and tool.runs.how in RUN_FREELY


def _only_starts_children(tool: ToolBinding) -> bool:
    """Return whether a call of *tool* only starts children with conversations of their own."""
    # Children work in the same files at most as those of one `spawn_agents` do, which run at once, too. An inline child
    # changes the conversation, and its siblings would have to read it before or after that.
    return isinstance(tool.runs, Spawning) and not tool.runs.is_inline and not tool.spec.ends_turn


def _run_one_by_one(run: RunState, calls: Sequence[ToolMember]) -> Flow[None]:
    """Run calls one after another, each with its permission check and hooks. One that may not run only gets a result and events."""
    # `before` is the limit that was spent already when the batch began, such as the steps of a final answer: only one
    # that is spent within this batch skips the calls behind it.
    why, before, points = "", run.budget.reached, run.plan.agent.hooks
    try:
        for call in calls:
            try:
                # Judged one at a time, right before each runs, since a rule may look at what the calls before did (a
                # file that was just written). In a batch that runs together nothing has happened in between, so there
                # all are judged first, and one suspension asks all questions.
                if _skip_or_validate_call(call, why) and points.pre_tool:
                    yield from _ask_permissions(run, (yield from _run_pre_tool_hooks(call)), together=False)
                if call.result is not None:
                    yield from call.emit_unrun_call_events()
                elif points.post_tool:
                    yield from _run_call_with_post_tool_hooks(call)
                else:
                    yield from run_single_member(call)
            # Not raised yet: the calls behind still get a result each, which says why there was none, and the history
            # pairs. The limit is raised behind the loop, by `raise_if_spent`.
            except LimitReached:
                why = SPENT
            except StepEngineError as error:
                _raise_unless_model_call(call, error)
            why = _find_batch_end_reason(call, before) or why
    # The run ends here, and still each call has a result (reliability:I1): "pending" or "cancelled". A conversation
    # with a call that has none is refused by every provider, so the run could never go on.
    except Stopped as stopped:
        _set_stopped_results(calls, stopped.stop)
        raise
    # Logged on the way out, whichever it is: what ran has happened, also where the batch was stopped behind it.
    finally:
        _append_calls_to_log(calls)
    run.budget.raise_if_spent(before)


def _run_call_with_post_tool_hooks(call: ToolMember) -> Flow[None]:
    """Run a call and the ``post_tool`` hooks behind it; one that failed has a result, too, and its error is raised after the hooks."""
    failure: LimitReached | StepEngineError | None = None
    try:
        yield from run_single_member(call)
    except (LimitReached, StepEngineError) as error:
        failure = error
    yield from _run_post_tool_hooks(call)
    if failure is not None:
        raise failure


def _skip_or_validate_call(call: ToolMember, skip_reason: str) -> bool:
    """Skip a call without result if there is a *skip_reason*, else validate it; return whether it can run."""
    if call.result is not None:
        return False
    if skip_reason:
        call.set_skipped_result(f"Skipped: {skip_reason} before this call.")
        return False
    return _validate_or_set_error(call)


def _raise_unless_model_call(call: ToolMember, error: StepEngineError) -> None:
    """Raise the error of an author's failed call; a model gets it as a result."""
    # A handler's wrong call is a bug, and raised at the line that made it (generator-contract:G32); a model's is data,
    # and the model corrects itself by the result.
    if call.source != "model":
        raise error


def _set_stopped_results(calls: Sequence[ToolMember], stop: Stop) -> None:
    """Set a result for each call that has none: it is pending or cancelled, as *stop* says."""
    # Only those without a result: what ended before the stop keeps what it has.
    for call in calls:
        if call.result is None:
            call.set_stopped_result(stop)


def _append_calls_to_log(calls: Sequence[ToolMember]) -> None:
    for call in calls:
        call.append_to_log()


def _find_batch_end_reason(call: ToolMember, before: LimitExceeded | None) -> str:
    """Return the reason why no call after this one is run, or ``""``."""
    # A limit that was spent earlier is no reason to skip, and neither is one of steps or tokens: these bind model
    # calls, and the calls of a reply that was paid for are carried out. Only a model that is denied again and again is
    # cut off at once.
    if call.has_ended_turn:
        return f"{call.asked.tool_name} ended the turn"
    limit = call.run.budget.reached
    return SPENT if limit is not None and limit is not before and limit.kind == "denials" else ""


def _run_batch_concurrently(
    run: RunState,
    members: Sequence[EffectMember],
    calls: Sequence[ToolMember],
    parallel: Parallel[object] | None = None,
) -> Flow[None]:
    """Run a batch in passes; if it is stopped, finished members keep their results."""
    before = run.budget.reached
    try:
        yield from _judge_and_run_together(run, members, calls, parallel)
    except Stopped as stopped:
        _set_stopped_results(calls, stopped.stop)
        raise
    finally:
        _append_calls_to_log(calls)
    # Of a `Parallel` a spent limit is an entry beside the others, which the author looks at; only calls of a reply
    # raise it.
    if parallel is None:
        run.budget.raise_if_spent(before)


def _judge_and_run_together(
    run: RunState, members: Sequence[EffectMember], calls: Sequence[ToolMember], parallel: Parallel[object] | None
) -> Flow[None]:
    """Check all calls, ask all questions, number all effects and perform them at once, then apply outcomes and call hooks."""
    # Each pass ends for all members before the next begins, because a number, a question and a hook's change must come
    # in an order that does not depend on who is faster.
    fail_fast, concurrency = (False, None) if parallel is None else (parallel.fail_fast, parallel.concurrency)
    valid = [call for call in calls if call.result is None and _validate_or_set_error(call)]
    if run.plan.agent.hooks.pre_tool:
        yield from _judge_and_ask_calls(run, valid)
        valid = [call for call in valid if call.result is None]
    effects, races = yield from _run_members_or_make_effects(members)
    if parallel is None:
        effects = _copy_with_sibling_counts(effects)
    # A call that was denied or invalid has failed before anything began, and that is a failure like any other: without
    # this its siblings would run although `fail_fast` was asked for.
    failed = fail_fast and any(call.result is not None and call.result.is_error for call in calls)
    outcomes = yield from run.effects.gather(
        effects, concurrency=concurrency, fail_fast=fail_fast, has_failed=failed, races=races
    )
    # Not a single child was begun, since a limit has no room for so many: that is thrown at the yield
    # (reliability:SP02). Where some ran, what they found must not be lost, and the refusal stays in its entry. A model
    # has no yield: it reads every refusal in its entry.
    if parallel is not None and outcomes and all(map(_was_refused_by_child_limit, outcomes)):
        run.effects.unwrap(outcomes[0])
    stops = _apply_outcomes_and_list_stops(members, outcomes)
    # One after another, after all have ended: following up may ask for further effects, whose numbers have to come in
    # the order of the calls.
    for call in valid:
        if call.is_gathered and not stops:
            yield Notify(call.make_finished_event())
        if call.needs_follow_up and not stops:
            yield from finish_pending_call(call)
        yield from _run_post_tool_hooks(call)
    # Stops are merged and raised once, after all outcomes were handed out: of two members that wait for a person both
    # questions stand in the result, and members that had ended keep what they have.
    if stops:
        raise Stopped(merge_stops(stops))
    # Who won a race is said last, when every call of every member has its final result: a hook behind `post_tool` may
    # still have replaced the winner's. A batch that was stopped has no winner; it is decided when the run goes on.
    _set_race_results(members)


def _judge_and_ask_calls(run: RunState, calls: Sequence[ToolMember]) -> Flow[None]:
    """Check the permissions of calls, and ask all of their questions at once."""
    asking: list[_AskedCall] = []
    for call in calls:
        asking += yield from _run_pre_tool_hooks(call)
    yield from _ask_permissions(run, asking, together=True)


def _run_members_or_make_effects(
    members: Sequence[EffectMember],
) -> Flow[tuple[Sequence[Leaf], tuple[tuple[int, int], ...]]]:
    """Return the effects of all members with the ranges (first, end) of racing ones; control tools run here and have none."""
    effects: list[Leaf] = []
    races: list[tuple[int, int]] = []
    for member in members:
        # A race is told to the driver as a range of effects: members with results before anything began have none, and
        # a race of which nobody is left has no range.
        first = len(effects)
        effects += yield from _make_effects_or_run_member(member)
        if isinstance(member, RaceMember) and len(effects) > first:
            races.append((first, len(effects)))
    return effects, tuple(races)


def _copy_with_sibling_counts(effects: Sequence[Leaf]) -> Sequence[Leaf]:
    """Return *effects* whose children know the number of children that start together."""
    count = sum(isinstance(effect, Spawn) for effect in effects)
    return [attrs.evolve(one, of=count) if isinstance(one, Spawn) and one.of != count else one for one in effects]


def _set_race_results(members: Sequence[EffectMember]) -> None:
    """Set the result of each race among *members*."""
    # Only races have something to conclude. Every other member made its result when it took its outcomes.
    for member in members:
        if isinstance(member, RaceMember):
            member.set_winner_result()


def _was_refused_by_child_limit(outcome: Single) -> bool:
    """Return whether a limit of children refused a member because it has no room for the whole group."""
    return (
        isinstance(outcome, Failure) and isinstance(outcome.error, LimitExceeded) and outcome.error.kind == "children"
    )


def _make_effects_or_run_member(member: EffectMember) -> Flow[Sequence[Leaf]]:
    """Return the effects of a member. A control tool runs here, a call with a result emits its events here, and both have none."""
    if isinstance(member, RaceMember):
        return (yield from _make_race_effects(member))
    if not isinstance(member, ToolMember):
        return member.make_effects()
    if member.result is not None:
        yield from member.emit_unrun_call_events()
        return ()
    # Done here, in its place in the order: a control tool changes the run itself and needs nothing of the world, so it
    # has no effect that could be gathered.
    how = member.binding.runs.how  # type: ignore[union-attr]  # a call without a tool has its error result already
    if how == "control":
        yield from run_single_member(member)
        return ()
    # The driver shows the children, but not the call that starts them.
    if how == "spawns":
        yield Notify(member.make_started_event())
    return member.make_effects()


def _make_race_effects(race: RaceMember) -> Flow[Sequence[Leaf]]:
    """Return the effects of a race's members; none if one of them has ended already and so has won."""
    if not race.set_early_winner():
        for member in race.members:
            yield from _make_effects_or_run_member(member)
            if race.set_early_winner():
                break
    return race.make_effects()


def _apply_outcomes_and_list_stops(members: Sequence[EffectMember], outcomes: Sequence[Single]) -> list[Stop]:
    """Set the results of all members from the outcomes of their effects; return the stops among the outcomes."""
    stops: list[Stop] = []
    position = 0
    # By position: the effects were handed out member by member, so each member's outcomes are one slice. The numbers of
    # effects are no help here, as several may be given to one call.
    for member in members:
        # A call of which no child may start needs nothing, and has its result all the same.
        if member.handed_out or member.result is None:
            first, position = position, position + len(member.handed_out)
            stop = member.apply_outcomes(outcomes[first:position])
            stops += [] if stop is None else [stop]
    return stops


# --- judging ----------------------------------------------------------------------------------------------------------


class _AskedCall(NamedTuple):
    """
    A call and the permission question that has to be answered before it runs.

    Attributes:
        edits: How often a person has changed its input.
    """

    call: ToolMember
    question: Question
    edits: int = 0


def _validate_or_set_error(call: ToolMember) -> bool:
    """Validate a call and return whether it is valid; the error becomes a model's result, and is raised for an author's call."""
    try:
        call.repair_and_validate_input()
    except StepEngineError as error:
        if call.source != "model":
            raise
        call.set_error_result(error)
        return False
    return True


def _run_pre_tool_hooks(call: ToolMember) -> Flow[Sequence[_AskedCall]]:
    """Run the ``pre_tool`` hooks for a valid call; a denial becomes its result, a question for a person is returned."""
    decision = yield from hooks.call_pre_tool_hooks(call.run, call.judged_call, call.source, call.replace_call_if_valid)
    # No hook said anything, and a call that nobody judges is allowed: permissions are a policy that somebody installs.
    if decision is None:
        return ()
    # A tool whose author says that it needs no permission is not asked about because a default says "ask"; a deny holds
    # for it all the same, and so does a question about untrusted arguments, of which its author knew nothing.
    needs_permission = call.binding is not None and (call.binding.spec.requires_permission or bool(decision.provenance))
    if decision.kind == "ask" and needs_permission:
        return (_AskedCall(call, _make_permission_question(call, decision)),)
    # Told also where nobody was asked: whoever reads the events later wants to know by which rule a call ran.
    yield from _emit_decision(call, "deny" if decision.kind == "deny" else "allow", decision.rule_id)
    if decision.kind == "deny":
        _deny_call(call, decision.message)
    return ()


def _deny_call(call: ToolMember, message: str) -> None:
    """Set a denial as the result of a call. Repeated denials add an advice to stop, and too many of them spend a limit."""
    # By the tool's own name: a model may call an agent by two spellings, and would be told to stop twice as late.
    name = call.own_name
    text = message or f"The call of {call.asked.tool_name} was denied."
    in_a_row = call.run.budget.count_denial(name)
    if in_a_row >= DENIALS_UNTIL_ADVICE:
        text += f" {name} was denied {in_a_row} times in a row: do not call it again, go on without it or say what is missing."
    call.set_result(ToolResult.error(text, status="denied"))


def _make_permission_question(call: ToolMember, decision: Decision) -> Question:
    """Return the question whether *call* may run, still without an id."""
    name = call.own_name
    text = decision.message or f"May {name} run?"
    # Without an id: it is made of the number of the effect, which is given only when the question is really asked.
    return Question(
        "",
        text,
        decision.options,
        tool_name=name,
        details=call.input,
        remember=decision.remember,
        wider=decision.wider,
        provenance=decision.provenance,
    )


def _ask_permissions(run: RunState, asking: Sequence[_AskedCall], *, together: bool) -> Flow[None]:
    """Ask for permissions, with *together* all of a batch at once, so that a batch suspends only once."""
    # A person's answer may change the input, and what a hook makes of that may have to be asked about again: so in
    # rounds, until nothing is left.
    while asking:
        asking = yield from _ask_questions_once(run, asking, together=together)


def _ask_questions_once(run: RunState, asking: Sequence[_AskedCall], *, together: bool) -> Flow[Sequence[_AskedCall]]:
    """Ask all questions, equal ones once; return the questions about calls that people edited."""
    # A model that calls one tool five times with one input means one thing, and to ask a person five times teaches them
    # to agree without reading (reliability:PM38).
    alike = _group_equal_questions(asking)
    effects = [
        make_ask_effect(
            run,
            first.question,
            purpose="permission",
            tool_call_id=first.call.asked.tool_call_id,
            program_line=first.call.program_line,
        )
        for first, *_ in alike
    ]
    outcomes = (yield from run.effects.gather(effects)) if together else [(yield effects[0])]
    stops: list[Stop] = []
    again: list[_AskedCall] = []
    for same, effect, outcome in zip(alike, effects, outcomes, strict=True):
        for one in same:
            if isinstance(outcome, Stop):
                one.call.set_stopped_result(outcome)
            # Nobody who could not be asked has agreed (reliability:PM30).
            elif isinstance(outcome, Failure):
                _deny_call(one.call, f"Nobody could be asked: {outcome.error}")
            else:
                again += yield from _apply_permission_answer(one, effect, outcome.value)  # type: ignore[union-attr]
        stops += [outcome] if isinstance(outcome, Stop) else []
    if stops:
        raise Stopped(merge_stops(stops))
    return again


def _group_equal_questions(asking: Sequence[_AskedCall]) -> list[list[_AskedCall]]:
    found: dict[str, list[_AskedCall]] = {}
    for one in asking:
        question = one.question
        # By all that a person would see. Where two calls differ in anything that is shown, they are two questions.
        key = canonical([question.text, question.options, question.tool_name, question.details])
        found.setdefault(key, []).append(one)
    return list(found.values())


def _apply_permission_answer(
    asked_call: _AskedCall, effect: AskPerson, answers: Sequence[Answer]
) -> Flow[Sequence[_AskedCall]]:
    """Apply a person's decision to a call; return the questions about an edited input."""
    call, answer = asked_call.call, answers[0]
    if answer.agrees and answer.edited_input is not None:
        return (yield from _apply_edited_input(call, answer, asked_call.edits + 1))
    # A yes that an earlier "always" gave is told with the rule that it came from, so that a person can take it back.
    remembered = find_offered_rule(effect.questions[0], answer.covers) if answer.by == REMEMBERED else None
    rule_id = None if remembered is None else str(remembered["id"])
    yield from _emit_decision(call, "allow" if answer.agrees else "deny", rule_id, answer)
    if answer.by == NOBODY:
        name = call.own_name
        call.run.side_events.warn_once(
            f"agent {call.run.plan.agent.definition.id!r}: calls of {name!r} need a person's approval, but this run cannot "
            "ask anyone, so they do not run. Pass journal= and answer with engine.resume(journal, answers=...), or pass an interactor to the engine"
        )
        reasons = describe_untrusted_origins(effect.questions[0].provenance)
        _deny_call(call, UNATTENDED.format(call.asked.tool_name) + (f" The reason: {reasons}." if reasons else ""))
    elif answer.by == REFUSED:  # by the tool, as it would have been after a yes: nobody's no is counted
        call.set_result(ToolResult.error(answer.reason))
    elif not answer.agrees:
        text = answer.reason or answer.text
        said = f": {text}" if text and text.lower() not in ("no", "n") else "."
        _deny_call(call, f"A person denied the call of {call.asked.tool_name}{said}")
    return ()


def _apply_edited_input(call: ToolMember, answer: Answer, edits: int) -> Flow[Sequence[_AskedCall]]:
    """Apply a person's edit, number *edits* from 1, to the input of a call; the call is judged again, and a deny still wins."""
    assert answer.edited_input is not None  # noqa: S101
    call.replace_input(answer.edited_input)
    message, allowed = "", False
    try:
        call.repair_and_validate_input()
    except StepEngineError as error:
        message = f"A person changed the input of this call, and it does not fit: {error.message}"
    else:
        approved = call.input
        decision = yield from hooks.call_pre_tool_hooks(
            call.run, call.judged_call, call.source, call.replace_call_if_valid
        )
        allowed = decision is None or decision.kind != "deny"
        if allowed and call.input != approved and edits < MAX_EDIT_ROUNDS:
            # A hook made something else of what was approved, and what was approved is what runs.
            asks = decision is not None and decision.kind == "ask"
            question = _make_permission_question(call, decision if decision is not None and asks else Decision.ask())
            return (_AskedCall(call, question, edits),)
        message = decision.message if decision is not None and decision.kind == "deny" else UNSTEADY
        allowed = allowed and call.input == approved
    yield from _emit_decision(call, "allow" if allowed else "deny", None, answer)
    if not allowed:
        _deny_call(call, message)
    return ()


def _emit_decision(call: ToolMember, decision: str, rule_id: str | None, answer: Answer | None = None) -> Flow[None]:
    """Emit ``PermissionDecided`` for a call if anyone watches."""
    if not call.run.plan.host.is_watched():
        return
    answer = answer or Answer()
    event = ev.PermissionDecided(
        path=call.run.plan.path,
        seq=call.run.effects.seq,
        tool_name=call.own_name,
        tool_call_id=call.asked.tool_call_id,
        decision=decision,
        rule_id=rule_id,
        by=answer.by,
        reason=answer.reason,
        edited_input=answer.edited_input,
    )
    yield Notify(event)


def _run_post_tool_hooks(call: ToolMember) -> Flow[None]:
    """Run the ``post_tool`` hooks for a call with a final result, and set the result that they return."""
    if call.run.plan.agent.hooks.post_tool and call.result is not None and not call.is_closed:
        result = yield from hooks.call_post_tool_hooks(call.run, call.judged_call, call.source, call.result)
        call.set_result(result)
