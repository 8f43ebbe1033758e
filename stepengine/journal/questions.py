"""
Answers to the open questions of a suspended run, and decisions about effects that are in doubt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

import attrs

from stepengine.data.alike import list_names
from stepengine.data.effects import CallFunction, CallTool
from stepengine.data.json import ABSENT, compact, freeze, thaw
from stepengine.data.messages import ToolResult
from stepengine.data.models import ModelReply
from stepengine.data.outcomes import Failure, Stop, Value
from stepengine.data.questions import Answer, AnswerLike, Question, answer_problem, answered
from stepengine.errors import AnswerRejected, DataError, JournalError, StepEngineError, UnknownOutcome
from stepengine.journal.encoding import name_of, questions_of, restored, touched_world
from stepengine.journal.history import History, parent_of
from stepengine.journal.programs import program_of
from stepengine.journal.records import Intent, shown_address
from stepengine.runtime.performer import Item, child_path

__all__ = (
    "DOUBT",
    "InDoubt",
    "check_answers",
    "decision_about",
    "doubts",
    "in_doubt",
    "kept_answers",
    "outcome_for",
    "sorted_answers",
    "waiting_calls",
)

InDoubt: TypeAlias = Literal["fail", "retry", "ask"]
"""What becomes of an effect that was begun, has no result, and is not idempotent; see ``ResumeOptions``."""

SHOWN_CHARS = 1_000
"""A question or input is quoted up to half a screen: a person must recognize it, and a document must not fill the terminal."""
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
            msg = f"{key[:SHOWN_CHARS]!r} {_why(history, key)}; open are: {_list_waiting(waiting)}"
            raise AnswerRejected(msg)
        _check_answer(question, answer)


def _why(history: History, key: str) -> str:
    for intent in [i for i in history.intents.values() if i.type == "ask"]:
        for question in questions_of(history.form(intent)):
            if key in (question.id, question.text):
                return "was answered already"
    return "is not a question of this run"


def _list_waiting(waiting: Mapping[str, Question]) -> str:
    return list_names([f"{q.id!r} ({q.text[:SHOWN_CHARS]})" for q in waiting.values()])


def _check_answer(question: Question, answer: object) -> None:
    if not isinstance(answer, str | bool | Answer):
        msg = f"the answer to {question.id!r} is a string, a bool or an Answer, not a {type(answer).__name__}"
        raise AnswerRejected(msg)
    if problem := answer_problem(answer, question):
        raise AnswerRejected(problem)


def in_doubt(history: History) -> list[str]:
    """Return the addresses of the effects that may or may not have happened, and that a second time would change again."""
    return [question.id.removeprefix(DOUBT) for question in doubts(history)]


def doubts(history: History) -> list[Question]:
    """Return the questions about effects in doubt, in the order in which they began; ``details`` is what was asked for."""
    return _asked_about(history, lambda i: touched_world(i.effect) and (i.path, i.seq) not in history.waiting)


def waiting_calls(history: History) -> list[Question]:
    """
    Return, as ``doubts``, the calls whose bodies have returned and whose results come from outside.

    They are in no doubt: a resumed run goes on to wait. An answer with a result is one, and ends that.
    """
    return _asked_about(history, lambda i: (i.path, i.seq) in history.waiting)


def _asked_about(history: History, wanted: Callable[[Intent], bool]) -> list[Question]:
    """Return the question about each effect that is wanted, was begun, has no result and can go on."""
    cut_off = [i for a, i in history.intents.items() if a not in history.results and wanted(i)]
    found = []
    for intent in [intent for intent in cut_off if not history.has_ended(intent.path)]:
        form = history.form(intent)
        is_tool = intent.type == "tool_call"
        details = form["input"] if is_tool else {"args": form["args"], "kwargs": form["kwargs"]}
        what = form["tool_name" if is_tool else "name"]
        asked = _doubt_about(what, shown_address(intent.path, intent.seq), intent.path)
        found.append(attrs.evolve(asked, details=details))
    return found


def _check_decision(history: History, key: str, answer: object) -> None:
    """Raise unless *answer* says whether an effect in doubt is done again; what is not a clear word must not decide that."""
    known = [question.id for question in doubts(history)]
    if key not in (*known, *[question.id for question in waiting_calls(history)]):
        msg = f"{key!r} is not an effect in doubt of this run; in doubt are: {list_names(known, key)}"
        raise AnswerRejected(msg)
    if isinstance(answer, Answer) and answer.result is not ABSENT:
        _check_taken(history, key, answer)
        return
    said = answer.value if isinstance(answer, Answer) else answer
    if not isinstance(said, bool) and said not in YES_OR_NO:
        msg = (
            f"the answer to {key!r} is 'yes' (do it again), 'no' (the handler gets UnknownOutcome) or what came of it "
            f"(Answer(result=...), on the command line result:TEXT), not {said!r}"
        )
        raise AnswerRejected(msg)


def _check_taken(history: History, key: str, answer: Answer) -> None:
    """Raise unless what is said to have come of an effect can have come of it."""
    if answer.value or answer.declined:
        msg = f"the answer to {key!r} has a result, and something else beside it"
        raise AnswerRejected(msg)
    intent = next(i for a, i in history.intents.items() if f"{DOUBT}{shown_address(*a)}" == key)
    try:
        outcome_for(history, intent, answer.result, 0)
    except JournalError as error:
        msg = f"the answer to {key!r} is not a result of it: {error.message}"
        raise AnswerRejected(msg) from None


def kept_answers(history: History) -> dict[str, AnswerLike]:
    """Return the answers that came while other questions of the same effect stayed open, by question id."""
    kept = [record.input for record in history.inputs if record.input.get("type") == "answer"]
    return {entry["question_id"]: restored(entry["answer"]) for entry in kept}


def _before(path: str, seq: int) -> str:
    """Return the address after which a fork repeats an effect; for a child's first effect, the child's start is repeated, too."""
    while path and not seq:
        path, seq = parent_of(path)
    return shown_address(path, seq - 1)


def _doubt_about(what: str, address: str, path: str) -> Question:
    """Return the question about an effect that may or may not have happened; *what* names it."""
    text = f"{what} ({address}) was cut off and may have happened. Do it again?"
    return Question(f"{DOUBT}{address}", text, YES_OR_NO, path=path)


def decision_about(
    item: Item, policy: InDoubt, answers: Mapping[str, AnswerLike], history: History
) -> Value | Failure | Stop | None:
    """
    Return what becomes of an effect that may or may not have happened: ``None`` means that it is done again.

    Args:
        item: The effect.
        policy: ``"fail"`` throws ``UnknownOutcome`` at the handler's yield, ``"retry"`` does it again, ``"ask"`` suspends
            until somebody has looked.
        answers: What was answered so far; "yes" means do it again, "no" throws, and a result is taken for that of the
            effect. An answer goes before the policy.
        history: What is recorded.
    """
    address = shown_address(item.path, item.effect.seq)
    effect = item.effect
    what = name_of(effect.call.fn) if isinstance(effect, CallFunction) else getattr(effect, "tool_name", "the effect")
    question = _doubt_about(what, address, item.path)
    key = question.id
    answer = answered(answers[key], question) if key in answers else None
    if answer is None and policy == "ask":
        return Stop("suspended", 0, questions=(question,))
    if answer is not None and answer.result is not ABSENT:
        return outcome_for(history, history.intents[item.path, effect.seq], answer.result, 0)
    if policy == "retry" if answer is None else answer.agrees:
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
    return Failure(UnknownOutcome(msg), 0)


# --- outcomes that somebody says ----------------------------------------------------------------------------------------


def outcome_for(history: History, intent: Intent, value: object, at: int) -> Value | Failure:
    """
    Return *value* as the outcome of an effect of this kind: what ``branch`` takes for an edit.

    Raises:
        JournalError: when it cannot be one.
    """
    where = shown_address(intent.path, intent.seq)
    if intent.begins_run and intent.type == "tool_call":
        what = "a program" if program_of(history.form(intent)) is not None else "a tool that yields"
        msg = (
            f"the result of {where}, a call of {what}, follows from what that asks for; fork at one of its effects, such as "
            f"{shown_address(child_path(intent.path, intent.seq), 0)}, or at the reply that asked for the call"
        )
        raise JournalError(msg)
    if isinstance(value, StepEngineError):
        return Failure(value, at)
    try:
        return Value(_value(history, intent, value), at)
    except (DataError, TypeError, AttributeError) as error:
        msg = f"{value!r} cannot be the outcome of {where}, a {intent.type}: {error}"
        raise JournalError(msg) from error


STORED = {"model_call": "model_reply", "tool_call": "tool_result"}
"""What may be given in the form in which it is stored, by the effect that it is an outcome of."""


def _value(history: History, intent: Intent, value: Any) -> object:
    if intent.type in STORED and isinstance(value, Mapping) and value.get("type") == STORED[intent.type]:
        value = restored(thaw(value))
    replace = REPLACE.get(intent.type)
    if replace is None:
        msg = "the outcome of a child follows from its own effects; fork at one of those"
        raise DataError(msg)
    return replace(value, history, intent)


def _tool_result(value: Any, *_: object) -> object:
    if isinstance(value, ToolResult):
        return value
    return ToolResult.text(value) if isinstance(value, str) else ToolResult.json(value)


def _answers(value: Any, history: History, intent: Intent) -> object:
    given = value if isinstance(value, list | tuple) else [value]
    asked = questions_of(history.form(intent))
    return tuple([answered(answer, question) for question, answer in zip(asked, given, strict=True)])


REPLACE: Mapping[str, Callable[[Any, History, Intent], object]] = {
    "model_call": lambda value, *_: value if isinstance(value, ModelReply) else ModelReply(value),
    "tool_call": _tool_result,
    "perform": lambda value, *_: freeze(value),
    "ask": _answers,
}
"""The outcome of each effect that a fork may replace, made of the value that is given for it."""
