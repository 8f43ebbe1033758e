"""
Answers to the open questions of a suspended run, and decisions about effects that are in doubt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import attrs

from stepengine.data.alike import list_names
from stepengine.data.effects import CallFunction, CallTool
from stepengine.data.json import ABSENT, compact, freeze, thaw
from stepengine.data.messages import ToolResult
from stepengine.data.models import ModelReply
from stepengine.data.outcomes import Failure, Stop, Value
from stepengine.data.questions import (
    DOUBT,
    Answer,
    AnswerLike,
    Question,
    find_answers_problem,
    require_valid_answer,
    to_answer,
)
from stepengine.data.visible import cut_end
from stepengine.errors import AnswerRejected, DataError, JournalError, StepEngineError, UnknownOutcome
from stepengine.journal.encoding import (
    decode_stored,
    encode_effect,
    get_name_without_module,
    get_recorded_questions,
    may_change_world_if_repeated,
)
from stepengine.journal.history import History
from stepengine.journal.pending_items import find_open_questions
from stepengine.journal.programs import find_program_text
from stepengine.journal.records import Address, Intent, format_address, get_starter_address
from stepengine.runtime.performer import Item, child_path

InDoubt: TypeAlias = Literal["fail", "retry", "ask"]
"""How a resumed run treats an effect in doubt that is not idempotent; see ``ResumeOptions``."""

SHOWN_CHARS = 1_000
"""A question or input is quoted up to half a screen: a person must recognize it, and a document must not fill the terminal."""
YES_OR_NO = ("yes", "no")


def split_answers_and_decisions(
    given_answers: Mapping[str, AnswerLike] | None,
) -> tuple[dict[str, AnswerLike], dict[str, AnswerLike]]:
    """
    Split *given_answers* into the answers to questions and the decisions about effects in doubt, both by question id or text.

    Raises:
        AnswerRejected: when *given_answers* is not a mapping with texts as keys.
    """
    if problem := find_answers_problem(given_answers):
        raise AnswerRejected(problem)
    answers: dict[str, AnswerLike] = {}
    decisions: dict[str, AnswerLike] = {}
    for key, answer in (given_answers or {}).items():
        (decisions if key.startswith(DOUBT) else answers)[key] = answer
    return answers, decisions


class GivenAnswers:
    """
    The answers and decisions that the caller gave for one run.

    Args:
        given: The answers, by question id or text.
        in_doubt: The policy for effects in doubt without a decision.

    Attributes:
        by_question: Answers to questions, by question id or text.
        decisions: Answers to questions about effects in doubt, by question id.
        in_doubt: The policy for effects in doubt without a decision.

    Raises:
        AnswerRejected: as ``split_answers_and_decisions``.
    """

    def __init__(self, given: Mapping[str, AnswerLike] | None = None, in_doubt: InDoubt = "fail") -> None:
        self.by_question, self.decisions = split_answers_and_decisions(given)
        self.in_doubt: InDoubt = in_doubt

    def find_answer(self, question: Question) -> AnswerLike | None:
        """Return the answer to a question, or ``None``."""
        return self.by_question.get(question.id, self.by_question.get(question.text))

    def has_answer(self, question: Question) -> bool:
        """Return whether a question is answered."""
        return question.id in self.by_question or question.text in self.by_question

    def add_recorded_answers(
        self, history: History, later_answers: Mapping[str, AnswerLike], *, by_id: bool, asks_again: bool
    ) -> None:
        """
        Add the recorded answers, unless *asks_again*, and the answers *later_answers* to later questions; answers of the caller have priority.

        With *by_id* answers to open questions are stored by id instead of text. Then an answer also fits a question whose text was
        edited since it was recorded.
        """
        # The later ones win: those of the caller over those that the record keeps, and both over those given *ahead*.
        answers = {**({} if asks_again else get_recorded_answers(history)), **self.by_question}
        if by_id:
            by_text: dict[str, list[str]] = {}
            for key, (_, question) in find_open_questions(history).items():
                by_text.setdefault(question.text, []).append(key)
            found = {key: answer for text, answer in answers.items() for key in by_text.get(text, [text])}
            answers = {**found, **{key: answer for key, answer in answers.items() if key not in by_text}}
        self.by_question = {**later_answers, **answers}

    def decide_doubtful_outcome(self, item: Item, history: History) -> Value | Failure | Stop | None:
        """Return the outcome of an effect in doubt, a stop with the question about it, or ``None`` to repeat it."""
        return decide_doubtful_outcome(item, self.in_doubt, self.decisions, history)

    def find_decision(self, address: Address) -> AnswerLike | None:
        """Return the decision about the effect in doubt at an address, or ``None``."""
        return self.decisions.get(f"{DOUBT}{format_address(*address)}")


def require_fitting_answers(history: History, answers: Mapping[str, AnswerLike], *, trusts_calls: bool) -> None:
    """
    Raise unless every answer fits an open question of a suspended run; nothing is changed.

    Args:
        history: The recorded run.
        answers: The answers, by question id or text.
        trusts_calls: ``False`` for a journal whose calls are not trusted. Then every started call without a result is in doubt.

    Raises:
        AnswerRejected: when an answer does not fit; the error names the question, the reason and the open questions.
    """
    waiting = {key: question for key, (_, question) in find_open_questions(history).items()}
    by_text = {q.text: q for q in waiting.values()}
    for key, answer in answers.items():
        if key.startswith(DOUBT):
            _check_decision(history, key, answer, trusts_calls=trusts_calls)
            continue
        question = waiting.get(key) or by_text.get(key)
        if question is None:
            listed = list_names([f"{q.id!r} ({cut_end(q.text, SHOWN_CHARS)})" for q in waiting.values()])
            msg = f"{key[:SHOWN_CHARS]!r} {_describe_rejection(history, key)}; open are: {listed}"
            raise AnswerRejected(msg)
        _check_question_answer(question, answer)


def _describe_rejection(history: History, key: str) -> str:
    """Return why *key* is no open question of the run, as the end of a sentence."""
    for intent in history.intents.values():
        if intent.type == "ask" and any(key in (q.id, q.text) for q in get_recorded_questions(history.form(intent))):
            return "is already answered"
    return "is not a question of this run"


def _check_question_answer(question: Question, answer: object) -> None:
    """Raise ``AnswerRejected`` unless *answer* is a valid answer to *question*."""
    if not isinstance(answer, str | bool | Answer):
        msg = f"the answer to {question.id!r} must be a string, a bool or an Answer, not a {type(answer).__name__}"
        raise AnswerRejected(msg)
    require_valid_answer(answer, question)


def list_effects_in_doubt(history: History) -> list[str]:
    """Return the addresses of effects that may have happened and cannot be repeated safely."""
    return [question.id.removeprefix(DOUBT) for question in make_doubt_questions(history)]


def make_doubt_questions(history: History, *, trusts_calls: bool = True) -> list[Question]:
    """
    Return the questions about effects in doubt, in start order, with their arguments in ``details``.

    Args:
        history: The recorded run.
        trusts_calls: ``False`` for a journal whose calls are not trusted. Then every started call without a result is in doubt.
    """

    def is_in_doubt(intent: Intent) -> bool:
        if may_change_world_if_repeated(intent.effect) and intent.address not in history.facts.pending_results:
            return True
        is_call = intent.type in ("tool_call", "perform")
        return not trusts_calls and (
            is_call or (intent.type == "agent_call" and "tool_call_id" in history.form(intent))
        )

    return _make_call_questions(history, is_in_doubt)


def make_external_result_questions(history: History) -> list[Question]:
    """
    Return a question about each call that waits for a result from outside the process, as ``make_doubt_questions`` does.

    These calls are not in doubt: a resumed run continues to wait. An answer with a result ends the wait.
    """
    return _make_call_questions(history, lambda i: i.address in history.facts.pending_results)


def _make_call_questions(history: History, is_wanted: Callable[[Intent], bool]) -> list[Question]:
    """Return a question about each started effect without result that *is_wanted* accepts, in runs that can continue."""
    cut_off = [i for a, i in history.intents.items() if a not in history.results and is_wanted(i)]
    found = []
    for intent in [intent for intent in cut_off if not history.tree.has_ended(intent.path)]:
        what, details = _get_name_and_arguments(history.form(intent))
        asked = _make_doubt_question(what, format_address(intent.path, intent.seq), intent.path)
        found.append(attrs.evolve(asked, details=details))
    return found


def _get_name_and_arguments(form: Any) -> tuple[str, Mapping[str, Any]]:
    """Return the name of the called tool or function in the stored form of an effect, and its arguments."""
    if form["type"] == "tool_call":
        return form["tool_name"], form["input"]
    if form["type"] == "agent_call":
        return f"the agent {form['agent_id']}", {"prompt": form["prompt"], "params": form["params"]}
    return form["name"], {"args": form["args"], "kwargs": form["kwargs"]}


def _check_decision(history: History, key: str, answer: object, *, trusts_calls: bool) -> None:
    """Raise unless *answer* decides clearly whether an effect in doubt is repeated."""
    known = [question.id for question in make_doubt_questions(history, trusts_calls=trusts_calls)]
    if key not in (*known, *[question.id for question in make_external_result_questions(history)]):
        msg = f"{key!r} is not an effect in doubt of this run; effects in doubt: {list_names(known, key)}"
        raise AnswerRejected(msg)
    if isinstance(answer, Answer) and answer.result is not ABSENT:
        _check_stated_result(history, key, answer)
        return
    said = answer.value if isinstance(answer, Answer) else answer
    if not isinstance(said, bool) and said not in YES_OR_NO:
        msg = (
            f"the answer to {key!r} must be 'yes' (do it again), 'no' (the handler gets UnknownOutcome) or the result "
            f"(Answer(result=...), on the command line result:TEXT), not {said!r}"
        )
        raise AnswerRejected(msg)


def _check_stated_result(history: History, key: str, answer: Answer) -> None:
    """Raise unless the stated result of an effect in doubt is a possible one."""
    if answer.value or answer.declined:
        msg = f"the answer to {key!r} has a result and another value; give only one of them"
        raise AnswerRejected(msg)
    intent = next(i for a, i in history.intents.items() if f"{DOUBT}{format_address(*a)}" == key)
    try:
        make_edited_outcome(history, intent, answer.result, 0)
    except JournalError as error:
        msg = f"the answer to {key!r} is not a possible result of the effect: {error.message}"
        raise AnswerRejected(msg) from None


def get_recorded_answers(history: History) -> dict[str, AnswerLike]:
    """Return the answers in the input records, which an effect may still wait for, by question id."""
    kept = [record.input for record in history.inputs if record.input.get("type") == "answer"]
    return {entry["question_id"]: decode_stored(entry["answer"]) for entry in kept}


def _find_address_before(path: str, seq: int) -> str:
    """Return the address before an effect, at which a fork repeats it; for a child's first effect the one before the child's start."""
    while path and not seq:
        path, seq = get_starter_address(path)
    return format_address(path, seq - 1)


def _make_doubt_question(effect_name: str, address: str, path: str) -> Question:
    """Return the yes-or-no question whether to repeat an effect that may have happened."""
    text = f"{effect_name} ({address}) was cut off and may have happened. Do it again?"
    return Question(f"{DOUBT}{address}", text, YES_OR_NO, path=path)


def make_unknown_call_question(item: Item) -> Question:
    """Return the question about a call that only an untrusted journal requests."""
    what, details = _get_name_and_arguments(encode_effect(item))
    address = format_address(*item.address)
    text = f"A journal that was written or changed by others asks for {what} ({address}), which you did not approve. Do it?"
    return Question(f"{DOUBT}{address}", text, YES_OR_NO, details=details, path=item.path)


IDEMPOTENT_TOOL = '@tool(idempotent=True), or @tool(category="read") of a tool that changes nothing,'


def decide_doubtful_outcome(
    item: Item, policy: InDoubt, answers: Mapping[str, AnswerLike], history: History
) -> Value | Failure | Stop | None:
    """
    Return the outcome of an effect in doubt, a stop with the question about it, or ``None`` to repeat it.

    Args:
        item: The effect.
        policy: ``"fail"`` throws ``UnknownOutcome`` at the handler's yield, ``"retry"`` repeats the effect, ``"ask"`` suspends
            the run until a person has answered.
        answers: The answers so far. "yes" repeats the effect, "no" throws ``UnknownOutcome``, and a result becomes the result of
            the effect. An answer has priority over the policy.
        history: The recorded run.
    """
    address = format_address(*item.address)
    effect = item.effect
    what = (
        get_name_without_module(effect.call.fn)
        if isinstance(effect, CallFunction)
        else getattr(effect, "tool_name", "the effect")
    )
    question = _make_doubt_question(what, address, item.path)
    key = question.id
    answer = to_answer(answers[key], question) if key in answers else None
    if answer is None and policy == "ask":
        return Stop("suspended", 0, questions=(question,))
    if answer is not None and answer.result is not ABSENT:
        return make_edited_outcome(history, history.intents[item.path, effect.seq], answer.result, 0)
    if policy == "retry" if answer is None else answer.agrees:
        return None
    before = _find_address_before(item.path, item.effect.seq)
    msg = (
        f"{what} ({address}) was begun, but the process ended before its result was recorded; it may or may not have "
        'happened. Look, and handle this error in the handler; the next time resume with in_doubt="retry" or "ask" '
        f"(--in-doubt). Where it has ended the run, engine.fork(journal, at={before!r}, allow_repeat=True)  or  stepengine "
        f"fork FILE --at '{before}' --allow-repeat  does it again"
    )
    remedy = "Perform.idempotent(...)" if isinstance(effect, CallFunction) else IDEMPOTENT_TOOL
    msg += f". If it may be done twice, {remedy} repeats it without asking"
    if isinstance(effect, CallTool):
        msg += f". Its input was: {cut_end(compact(effect.input), SHOWN_CHARS)}"
    return Failure(UnknownOutcome(msg), 0)


# --- outcomes that somebody says ----------------------------------------------------------------------------------------


def make_edited_outcome(history: History, intent: Intent, value: object, at: int) -> Value | Failure:
    """
    Return *value*, given by a person or a simulator, as the outcome of a recorded effect.

    Raises:
        JournalError: when the value cannot be an outcome of the effect.
    """
    where = format_address(intent.path, intent.seq)
    if intent.starts_child_or_body and intent.type == "tool_call":
        what = "a program" if find_program_text(history.form(intent)) is not None else "a tool that yields"
        msg = (
            f"the result of {where}, a call of {what}, follows from its own effects; fork at one of them, such as "
            f"{format_address(child_path(intent.path, intent.seq), 0)}, or at the reply that asked for the call"
        )
        raise JournalError(msg)
    if isinstance(value, StepEngineError):
        return Failure(value, at)
    try:
        return Value(_convert_to_outcome_value(history, intent, value), at)
    except (DataError, TypeError, AttributeError) as error:
        msg = f"{value!r} cannot be the outcome of {where}, a {intent.type}: {error}"
        raise JournalError(msg) from error


STORED = {"model_call": "model_reply", "tool_call": "tool_result"}
"""What may be given in the form in which it is stored, by the effect that it is an outcome of."""


def _convert_to_outcome_value(history: History, intent: Intent, value: Any) -> object:
    """Convert a value to the type that an effect of this kind returns; raise if that is impossible."""
    if intent.type in STORED and isinstance(value, Mapping) and value.get("type") == STORED[intent.type]:
        value = decode_stored(thaw(value))
    replace = REPLACE.get(intent.type)
    if replace is None:
        msg = "the outcome of a child follows from its own effects; fork at one of those"
        raise DataError(msg)
    return replace(value, history, intent)


def _to_tool_result(value: Any, *_: object) -> object:
    if isinstance(value, ToolResult):
        return value
    return ToolResult.text(value) if isinstance(value, str) else ToolResult.json(value)


def _to_answers(value: Any, history: History, intent: Intent) -> object:
    """Return one answer for each question of a recorded effect, from one value or a list."""
    asked = get_recorded_questions(history.form(intent))
    given = split_edit_into_answers(value, asked)
    return tuple([to_answer(answer, question) for question, answer in zip(asked, given, strict=True)])


def split_edit_into_answers(value: Any, questions: Sequence[Question]) -> list[Any]:
    """
    Return one answer for each question of an effect; *value* is a list of them, or the answer to a single question.

    For a single question with multiple choices, a list holds the chosen options.

    Raises:
        DataError: when there are more or fewer answers than questions, or a list answers a question with a single choice.
    """
    is_choice = len(questions) == 1 and isinstance(value, list | tuple) and len(value) != 1
    given = [*value] if isinstance(value, list | tuple) and not is_choice else [value]
    if len(given) != len(questions):
        msg = f"{len(questions)} questions need a list of {len(questions)} answers, not {len(given)}"
        raise DataError(msg)
    return [_choice_to_answer(one, question) for one, question in zip(given, questions, strict=True)]


def _choice_to_answer(value: Any, question: Question) -> Any:
    """Return a list of chosen options as an answer, and other values unchanged."""
    if not isinstance(value, list | tuple):
        return value
    if question.multi_select and all(isinstance(one, str) for one in value):
        return to_answer(Answer(selected=value), question)
    msg = f"a list answers the question {question.id!r}, which takes one answer; pass that answer without a list"
    raise DataError(msg)


REPLACE: Mapping[str, Callable[[Any, History, Intent], object]] = {
    "model_call": lambda value, *_: value if isinstance(value, ModelReply) else ModelReply(value),
    "tool_call": _to_tool_result,
    "perform": lambda value, *_: freeze(value),
    "ask": _to_answers,
}
"""The outcome of each effect that a fork may replace, made of the value that is given for it."""
