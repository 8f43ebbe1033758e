"""
Answers to the open questions of a suspended run, and decisions about effects that are in doubt (requirements K6-K12, JR37).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from stepengine.data.effects import CallFunction, CallTool
from stepengine.data.json import compact
from stepengine.data.outcomes import Failure, Stop
from stepengine.data.questions import Answer, AnswerLike, Question, answer_problem, answered
from stepengine.errors import AnswerRejected, UnknownOutcome
from stepengine.journal.encoding import name_of, questions_of, restored, touched_world
from stepengine.journal.history import History, parent_of
from stepengine.journal.records import shown_address
from stepengine.runtime.performer import Item

__all__ = ("DOUBT", "InDoubt", "check_answers", "decision_about", "in_doubt", "kept_answers", "sorted_answers")

InDoubt: TypeAlias = Literal["fail", "retry", "ask"]
"""What becomes of an effect that was begun, has no result, and is not idempotent; see ``ResumeOptions``."""

SHOWN_CHARS = 1_000
YES_OR_NO = ("yes", "no")
DOUBT = "doubt:"
"""What the id of a question about an effect in doubt starts with; its address follows."""


def sorted_answers(
    given: Mapping[str, AnswerLike] | None,
) -> tuple[dict[str, AnswerLike], dict[str, AnswerLike]]:
    """
    Return the answers to questions, and the decisions about effects in doubt.

    Raises:
        AnswerRejected: when they are no mapping.
    """
    if given is not None and not isinstance(given, Mapping):
        msg = f"answers go by the question's id or text, such as {{'q3': 'yes'}}, and not in a {type(given).__name__}"
        raise AnswerRejected(msg)
    answers: dict[str, AnswerLike] = {}
    decisions: dict[str, AnswerLike] = {}
    for key, answer in (given or {}).items():
        (decisions if key.startswith(DOUBT) else answers)[key] = answer
    return answers, decisions


def check_answers(history: History, answers: Mapping[str, AnswerLike]) -> None:
    """
    Raise unless every answer fits an open question of a suspended run; nothing is changed by asking.

    Raises:
        AnswerRejected: it names the question, why, and the questions that are open.
    """
    waiting = {key: question for key, (_, question) in history.open_questions().items()}
    by_text = {q.text: q for q in waiting.values()}
    for key, answer in answers.items():
        if key.startswith(DOUBT):
            _check_decision(history, key, answer)
            continue
        question = waiting.get(key) or by_text.get(key)
        if question is None:
            msg = f"{key[:SHOWN_CHARS]!r} {_why(history, key)}; open are: {_listed(waiting)}"
            raise AnswerRejected(msg)
        _check_answer(question, answer)


def _why(history: History, key: str) -> str:
    for intent in [i for i in history.intents.values() if i.type == "Ask"]:
        for question in questions_of(history.form(intent)):
            if key in (question.id, question.text):
                return "was answered already"
    return "is no question of this run"


def _listed(waiting: Mapping[str, Question]) -> str:
    return ", ".join([f"{q.id!r} ({q.text[:SHOWN_CHARS]})" for q in waiting.values()]) or "none"


def _check_answer(question: Question, answer: Any) -> None:
    if not isinstance(answer, str | bool | Answer):
        msg = f"the answer to {question.id!r} is a string, a bool or an Answer, not a {type(answer).__name__}"
        raise AnswerRejected(msg)
    if problem := answer_problem(answer, question):
        raise AnswerRejected(problem)


def in_doubt(history: History) -> list[str]:
    """Return the addresses of the effects that may or may not have happened, and that a second time would change again."""
    cut_off = [intent for address, intent in history.intents.items() if address not in history.results]
    return [shown_address(i.path, i.seq) for i in cut_off if touched_world(i.effect)]


def _check_decision(history: History, key: str, answer: Any) -> None:
    """Raise unless *answer* says whether an effect in doubt is done again; what is no clear word must not decide that."""
    known = [f"{DOUBT}{address}" for address in in_doubt(history)]
    if key not in known:
        msg = f"{key!r} is no effect in doubt of this run; in doubt are: {', '.join(known) or 'none'}"
        raise AnswerRejected(msg)
    said = answer.value if isinstance(answer, Answer) else answer
    if not isinstance(said, bool) and said not in YES_OR_NO:
        msg = f"the answer to {key!r} is 'yes' (do it again) or 'no' (the handler gets UnknownOutcome), not {said!r}"
        raise AnswerRejected(msg)


def kept_answers(history: History) -> dict[str, AnswerLike]:
    """Return the answers that came while other questions of the same effect stayed open, by question id."""
    kept = [record.input for record in history.inputs if record.input.get("type") == "Answered"]
    return {entry["question_id"]: restored(entry["answer"]) for entry in kept}


def _before(path: str, seq: int) -> str:
    """Return the address behind which a fork does an effect again; of the first one of a child also its start."""
    while path and not seq:
        path, seq = parent_of(path)
    return shown_address(path, seq - 1)


def decision_about(item: Item, policy: InDoubt, answers: Mapping[str, AnswerLike], at: int) -> Failure | Stop | None:
    """
    Return what becomes of an effect that may or may not have happened: ``None`` means that it is done again.

    Args:
        item: The effect.
        policy: ``"fail"`` throws ``UnknownOutcome`` at the handler's yield, ``"retry"`` does it again, ``"ask"`` suspends
            until somebody has looked.
        answers: What was answered so far; "yes" means do it again, "no" throws. An answer goes before the policy.
        at: The run's time.
    """
    address = shown_address(item.path, item.effect.seq)
    effect = item.effect
    what = name_of(effect.call.fn) if type(effect) is CallFunction else getattr(effect, "tool_name", "the effect")
    key = f"{DOUBT}{address}"
    question = Question(
        key, f"{what} ({address}) was cut off and may have happened. Do it again?", YES_OR_NO, path=item.path
    )
    again = answered(answers[key], question).agrees if key in answers else policy == "retry"
    if policy == "ask" and key not in answers:
        return Stop("suspended", at, questions=(question,))
    if again:
        return None
    before = _before(item.path, item.effect.seq)
    msg = (
        f"{what} ({address}) was begun, but the process ended before its result was recorded; it may or may not have "
        'happened. Look, and handle this error in the handler; the next time resume with in_doubt="retry" or "ask" '
        f"(--in-doubt). Where it has ended the run, engine.fork(journal, at={before!r}, allow_repeat=True)  or  stepengine "
        f"fork FILE --at '{before}' --allow-repeat  does it again"
    )
    if type(effect) is CallTool:
        msg += f". Its input was: {compact(effect.input)[:SHOWN_CHARS]}"
    return Failure(UnknownOutcome(msg), at)
