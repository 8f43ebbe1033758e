"""
Asking a person for more where a limit of a run, or of the runs above it, has no room for the next effect.

Nothing was spent for what a limit has refused, so a run that is allowed more asks for the same once again, in a new place. The
refusal, the question and its answer are recorded as any other: a replay goes the same way and asks nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from stepengine.data.ceilings import ceiling_from_answer, is_raisable_limit_error, make_limit_question
from stepengine.data.effects import AskPerson, Compute, Gather, Leaf, Notify
from stepengine.data.outcomes import Failure, Gathered, Outcome, Single, Stop, Value
from stepengine.data.questions import Question
from stepengine.errors import LimitExceeded
from stepengine.machine.protocol import Flow
from stepengine.machine.state import RunState


def ask_to_raise_limits(run: RunState, effect: Leaf | Gather | Compute, outcome: Failure | Gathered) -> Flow[Outcome]:
    """
    Ask people to raise the limits that refused *effect*, and return its new outcome; *outcome* is the first one.

    While they allow more, the refused effects are repeated. After a denial they stay refused. Without an answer the run is suspended
    at the question. Only model calls are refused so. Those of a group are candidates: neither a race nor ``fail_fast`` holds any.
    """
    leaves: Sequence[Any] = effect.effects if isinstance(effect, Gather) else (effect,)
    outcomes: list[Single] = list(outcome.outcomes) if isinstance(outcome, Gathered) else [outcome]
    asked: set[str] = set()
    while not any(isinstance(one, Stop) for one in outcomes):
        questions = [_find_limit_question(one) for one in outcomes]
        question = next((q for q in questions if q is not None and q.id not in asked), None)
        if question is None:
            break
        asked.add(question.id)
        places = [n for n, one in enumerate(questions) if one is not None and one.id == question.id]
        asking = AskPerson(run.effects.allocate_number(), (question,), "limit")
        yield from map(Notify, run.side_events.enter_phase_and_pop_events(asking))
        answer = run.effects.record_outcome((yield asking), asking)
        if isinstance(answer, Stop):
            again: Sequence[Single] = [answer] * len(places)
        elif isinstance(answer, Value) and ceiling_from_answer(question, answer.value[0]) is not None:
            again = yield from _perform_refused_again(run, effect, [leaves[n] for n in places])
        else:
            continue
        for n, one in zip(places, again, strict=True):
            outcomes[n] = one
    settled = [_remove_raise_offer(one) for one in outcomes]
    return Gathered(tuple(settled)) if isinstance(outcome, Gathered) else settled[0]


def ask_for_more_steps(run: RunState) -> Flow[bool]:
    """Ask a person for more steps at the step limit, if the limits have ``ask=True``; return whether the limit was raised."""
    budget = run.budget
    if not budget.limits.ask or budget.reached is not None:
        return False
    msg = f"agent {run.plan.agent.definition.id!r} has used all of its {budget.most_steps} steps"
    error = LimitExceeded(
        msg, kind="steps", limit=budget.most_steps, path=run.plan.path, more=budget.limits.max_steps or 1
    )
    question = make_limit_question(error)
    outcome: Any = yield AskPerson(run.effects.allocate_number(), (question,), "limit")
    if isinstance(outcome, Failure):
        return False
    allowed = ceiling_from_answer(question, run.effects.unwrap(outcome)[0])
    if allowed is None:
        return False
    budget.increase_step_limit(int(allowed.most))
    return True


def _find_limit_question(outcome: Single) -> Question | None:
    """Return the question about raising the limit that refused an effect; ``None`` without a raisable limit."""
    error = outcome.error if isinstance(outcome, Failure) else None
    return make_limit_question(error) if is_raisable_limit_error(error) else None


def _perform_refused_again(
    run: RunState, effect: Leaf | Gather | Compute, refused: Sequence[Leaf]
) -> Flow[Sequence[Single]]:
    """Perform the effects that a limit refused again under new numbers."""
    leaves = [attrs.evolve(leaf, seq=run.effects.allocate_number()) for leaf in refused]
    if not isinstance(effect, Gather):
        yield from map(Notify, run.side_events.enter_phase_and_pop_events(leaves[0]))
        return [(yield leaves[0])]  # type: ignore[list-item]
    together = Gather(tuple(leaves), concurrency=effect.concurrency)
    yield from map(Notify, run.side_events.enter_phase_and_pop_events(together))
    return (yield together).outcomes  # type: ignore[union-attr]


def _remove_raise_offer(outcome: Single) -> Single:
    """Return a limit error without the offer to raise the limit; return other outcomes unchanged."""
    if not isinstance(outcome, Failure) or not isinstance(outcome.error, LimitExceeded) or outcome.error.more is None:
        return outcome
    error = outcome.error
    return attrs.evolve(outcome, error=LimitExceeded(error.message, kind=error.kind, limit=error.limit))
