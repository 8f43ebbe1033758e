"""
Answers to the open questions of a suspended run, and decisions about effects that are in doubt (requirements K6-K12, JR37).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from stepengine.data.effects import CallTool, Perform
from stepengine.data.json import compact
from stepengine.data.outcomes import Failure, Stop
from stepengine.data.questions import Answer, AnswerLike, Question, answered
from stepengine.errors import AnswerRejected, UnknownOutcome
from stepengine.journal.forms import name_of, questions_of, restored
from stepengine.journal.history import History
from stepengine.journal.records import shown_address
from stepengine.runtime.performer import Item

__all__ = ("DOUBT", "check_answers", "decision_about", "kept_answers")

SHOWN_CHARS = 1_000
DOUBT = "doubt:"
"""What the id of a question about an effect in doubt starts with; its address follows."""


def check_answers(history: History, answers: Mapping[str, AnswerLike]) -> None:
    """
    Raise unless every answer fits an open question of a suspended run; nothing is changed by asking.

    Raises:
        AnswerRejected: it names the question, why, and the questions that are open.
    """
    waiting = {key: question for key, (_, question) in history.open_questions().items()}
    by_text = {q.text: q for q in waiting.values()}
    for key, answer in answers.items():
        question = waiting.get(key) or by_text.get(key)
        if question is None:
            msg = f"{key!r} {_why(history, key)}; open are: {_listed(waiting)}"
            raise AnswerRejected(msg)
        _check_answer(question, answer)


def _why(history: History, key: str) -> str:
    for intent in [i for i in history.intents.values() if i.type == "Ask"]:
        for question in questions_of(intent.effect):
            if key in (question.id, question.text):
                return "was answered already"
    return "is no question of this run"


def _listed(waiting: Mapping[str, Question]) -> str:
    return ", ".join([f"{q.id!r} ({q.text})" for q in waiting.values()]) or "none"


def _check_answer(question: Question, answer: Any) -> None:
    if not isinstance(answer, str | bool | Answer):
        msg = f"the answer to {question.id!r} is a string, a bool or an Answer, not a {type(answer).__name__}"
        raise AnswerRejected(msg)
    if not isinstance(answer, Answer):
        return
    unknown = [option for option in answer.selected if option not in question.options]
    if unknown:
        msg = f"the answer to {question.id!r} selects {unknown}; its options are {list(question.options)}"
        raise AnswerRejected(msg)
    if len(answer.selected) > 1 and not question.multi_select:
        msg = f"the answer to {question.id!r} selects {len(answer.selected)} options; only one can be chosen"
        raise AnswerRejected(msg)


def kept_answers(history: History) -> dict[str, AnswerLike]:
    """Return the answers that came while other questions of the same effect stayed open, by question id."""
    kept = [record.input for record in history.inputs if record.input.get("type") == "Answered"]
    return {entry["question_id"]: restored(entry["answer"]) for entry in kept}


def decision_about(
    item: Item, policy: Literal["fail", "retry", "ask"], answers: Mapping[str, AnswerLike], at: int
) -> Failure | Stop | None:
    """
    Return what becomes of an effect that may or may not have happened: ``None`` means that it is done again.

    Args:
        item: The effect.
        policy: ``"fail"`` throws ``UnknownOutcome`` at the handler's yield, ``"retry"`` does it again, ``"ask"`` suspends
            until somebody has looked.
        answers: What was answered so far; "yes" to the question means do it again.
        at: The run's time.
    """
    address = shown_address(item.path, item.effect.seq)
    effect = item.effect
    what = name_of(effect.call.fn) if type(effect) is Perform else getattr(effect, "tool_name", "the effect")
    key = f"{DOUBT}{address}"
    question = Question(
        key, f"{what} ({address}) was cut off and may have happened. Do it again?", ("yes", "no"), path=item.path
    )
    if policy == "ask" and key not in answers:
        return Stop("suspended", at, questions=(question,))
    if policy == "retry" or (policy == "ask" and answered(answers[key], question).agrees):
        return None
    msg = (
        f"{what} ({address}) was begun, but the process ended before its result was recorded; it may or may not have "
        'happened. Look, then handle this error in the handler, or resume with in_doubt="retry" or "ask" (--in-doubt). '
        "Where this error has ended the run, fork it at the effect before"
    )
    if type(effect) is CallTool:
        msg += f". Its input was: {compact(effect.input)[:SHOWN_CHARS]}"
    return Failure(UnknownOutcome(msg), at)
