"""
How a run asks a person for more where one of its limits, or of the runs above it, has no room for what comes next.

Nothing was spent for what a limit has refused, so a run that is allowed more asks for the same once again, in a new place. The
refusal, the question and its answer are recorded as any other: a replay goes the same way and asks nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from stepengine.data.ceilings import asks, ceiling_of, question_about
from stepengine.data.effects import AskPerson, Compute, Gather, Leaf, Notify
from stepengine.data.outcomes import Failure, Gathered, Outcome, Single, Stop, Value
from stepengine.data.questions import Question
from stepengine.errors import LimitExceeded
from stepengine.machine.protocol import Flow
from stepengine.machine.state import RunState

__all__ = ("more_steps", "with_more")


def with_more(run: RunState, effect: Leaf | Gather | Compute, outcome: Failure | Gathered) -> Flow[Outcome]:
    """
    Return the outcome of *effect* after people were asked for what limits had no room for; *outcome* is the first one.

    What was refused is asked for again as long as they allow more. With a no it stays refused; where nobody answers, it is what
    the run is suspended at. Of a race, the members that were refused try again alone: those they had beaten have been given up.
    """
    leaves: Sequence[Any] = effect.effects if isinstance(effect, Gather) else (effect,)
    outcomes: list[Single] = list(outcome.outcomes) if isinstance(outcome, Gathered) else [outcome]
    asked: set[str] = set()
    while not any(isinstance(one, Stop) for one in outcomes):
        questions = [_question_in(one) for one in outcomes]
        question = next((q for q in questions if q is not None and q.id not in asked), None)
        if question is None:
            break
        asked.add(question.id)
        places = [n for n, one in enumerate(questions) if one is not None and one.id == question.id]
        asking = AskPerson(run.effects.number(), (question,), "limit")
        yield from map(Notify, run.side_events.before(asking))
        answer = run.effects.receive((yield asking), asking)
        if isinstance(answer, Stop):
            again: Sequence[Single] = [answer] * len(places)
        elif isinstance(answer, Value) and ceiling_of(question, answer.value[0]) is not None:
            again = yield from _again(run, effect, [leaves[n] for n in places])
        else:
            continue
        for n, one in zip(places, again, strict=True):
            outcomes[n] = one
    settled = [_without_more(one) for one in outcomes]
    return Gathered(tuple(settled)) if isinstance(outcome, Gathered) else settled[0]


def more_steps(run: RunState) -> Flow[bool]:
    """Ask for more steps where the limits of a run say so, and none is left; return whether there are."""
    budget = run.budget
    if not budget.limits.ask or budget.reached is not None:
        return False
    msg = f"agent {run.plan.definition.id!r} has used all of its {budget.most_steps} steps"
    error = LimitExceeded(
        msg, kind="steps", limit=budget.most_steps, path=run.plan.path, more=budget.limits.max_steps or 1
    )
    question = question_about(error)
    outcome: Any = yield AskPerson(run.effects.number(), (question,), "limit")
    if isinstance(outcome, Failure):
        return False
    allowed = ceiling_of(question, run.effects.unwrap(outcome)[0])
    if allowed is None:
        return False
    budget.allow_steps(int(allowed.most))
    return True


def _question_in(outcome: Single) -> Question | None:
    """Return what an outcome wants people to be asked, if it does."""
    error = outcome.error if isinstance(outcome, Failure) else None
    return question_about(error) if asks(error) else None


def _again(run: RunState, effect: Leaf | Gather | Compute, refused: Sequence[Leaf]) -> Flow[Sequence[Single]]:
    """Ask again for what was refused, under new numbers."""
    leaves = [attrs.evolve(leaf, seq=run.effects.number()) for leaf in refused]
    if not isinstance(effect, Gather):
        yield from map(Notify, run.side_events.before(leaves[0]))
        return [(yield leaves[0])]  # type: ignore[list-item]
    together = Gather(tuple(leaves), concurrency=effect.concurrency)
    yield from map(Notify, run.side_events.before(together))
    return (yield together).outcomes  # type: ignore[union-attr]


def _without_more(outcome: Single) -> Single:
    """Return a refusal that nobody will be asked about any more, like one of a limit that does not ask."""
    if not isinstance(outcome, Failure) or not isinstance(outcome.error, LimitExceeded) or outcome.error.more is None:
        return outcome
    error = outcome.error
    return attrs.evolve(outcome, error=LimitExceeded(error.message, kind=error.kind, limit=error.limit))
