"""
Questions of a run tree: the form that people see, and the choice of the person or rule that answers.

Answers are given in advance, come from an interactor or through the run's handle, or are missing.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, cast

import attrs

from stepengine.data.alike import list_names
from stepengine.data.effects import AskPerson, split_program_lines
from stepengine.data.json import JsonDict, canonical, freeze
from stepengine.data.questions import (
    MAX_QUESTIONS,
    NOBODY,
    REFUSED,
    REMEMBERED,
    Answer,
    AnswerLike,
    Interactor,
    Question,
    find_answer_problem,
    find_offered_rule,
    list_offered_rules,
    require_valid_answer,
    to_answer,
)
from stepengine.data.tools import Ordinary
from stepengine.errors import AnswerRejected, LimitExceeded, StepEngineError
from stepengine.runtime.logs import LOGGER
from stepengine.runtime.performer import Item
from stepengine.tools.definition import ToolPreview
from stepengine.workspace.threads import ThreadPool

# An interactor may be a person who mistyped, or a program that will never do better.
MAX_REPEATED_QUESTIONS = 3
"""A person who mistyped needs one or two more attempts; a program that answers wrongly three times always will."""


IN_PROGRAM = "in the program"
"""Under which name the details of a preview show the program that makes a call; no parameter of a tool is called so."""
SHOWN_LINES_AROUND = 20
"""Lines of a program that are shown before and after the one at which it waits: together about one screen."""
OF_INPUT = {"input", "prefix", "paths", "hosts", "origins"}
"""Members of a rule about calls that say something of one input."""


class RuleStore(Protocol):
    """A durable store for the rules from "always" answers, such as a ``PolicyFile``."""

    def has_rule(self, rule: JsonDict, /) -> bool:
        """Return whether exactly this rule is stored."""

    def add_rule(self, rule: JsonDict, /) -> None:
        """Store a rule durably."""


class RememberedRules:
    """
    The rules from answers of "always allow this".

    A rule answers the questions that it covers. So each call that it allows has its own recorded answer, and a replay or resume
    depends only on the record.

    Args:
        store: The store of the rules that apply in every process.

    Attributes:
        store: The same store.
    """

    def __init__(self, store: RuleStore | None = None) -> None:
        self._rules: dict[str, JsonDict] = {}
        self.store = store

    @property
    def rules(self) -> tuple[JsonDict, ...]:
        """The rules in the form of policy files, in order of creation."""
        return tuple(self._rules.values())

    def add(self, rule: JsonDict) -> None:
        """Add a rule from elsewhere."""
        self._rules[canonical(rule)] = rule

    def add_from_answer(self, question: Question, answer: Answer) -> None:
        """Add the lasting rule that the answer to a permission question creates, if any."""
        rule = rule_from_answer(question, answer)
        if rule is not None:
            self.add(rule)

    def store_rule_if_always(self, question: Question, answer: Answer) -> None:
        """Store the rule of an answer for other processes if it has ``remember="always"``; failures are logged."""
        rule = rule_from_answer(question, answer) if answer.remember == "always" else None
        if rule is None or self.store is None:
            return
        try:
            self.store.add_rule(rule)
        except (StepEngineError, OSError) as error:
            LOGGER.warning("the rule %r is not stored for other processes: %s", rule["id"], error)

    def find_covering_rule(self, question: Question) -> JsonDict | None:
        """Return the narrowest remembered rule that answers a question, or ``None``."""
        try:
            # The narrowest first, so that what is told ("allowed by ...") says no more than what was allowed.
            return next((rule for rule in list_offered_rules(question) if self._is_remembered(rule)), None)
        except (StepEngineError, OSError) as error:
            LOGGER.warning("permanent approvals cannot be read: %s", error)
            return None

    def _is_remembered(self, rule: JsonDict) -> bool:
        return canonical(rule) in self._rules or (self.store is not None and self.store.has_rule(rule))

    def remove_rules(self, ids: Collection[str]) -> None:
        """Remove the rules with these ids; all if there are none."""
        for key, rule in list(self._rules.items()):
            if not ids or rule["id"] in ids:
                self._rules.pop(key, None)


def rule_from_answer(question: Question, answer: Answer) -> JsonDict | None:
    """Return the rule that an answer creates, or ``None``."""
    rule = find_offered_rule(question, answer.covers)
    if rule is None or not answer.agrees or answer.remember is None:
        return None
    call: object = rule["match"].get("call")
    # A rule about what one input holds is not made of an answer that has put another one in its place.
    is_of_input = "values" in rule["match"] or (isinstance(call, Mapping) and bool(call.keys() & OF_INPUT))
    return rule if answer.edited_input is None or not is_of_input else None


class _OpenQuestion:
    """A question that waits for its answer."""

    __slots__ = ("future", "is_late", "question", "timer")

    def __init__(self, question: Question, future: asyncio.Future[Answer | None]) -> None:
        self.question = question
        self.future = future
        self.timer: asyncio.TimerHandle | None = None
        self.is_late = False

    def cancel_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()


class AdvanceAnswers:
    """
    The answers of one run tree that were passed in advance.

    Args:
        given: By question id or text.
        earlier: Questions of the run that this one continues, with their answers; they are asked again under other ids.
            One without a text, of which no more is known than that it is open, is the first that is asked.

    Raises:
        AnswerRejected: when one is not a valid answer.
    """

    def __init__(self, given: Mapping[str, AnswerLike], earlier: Sequence[tuple[Question, AnswerLike]]) -> None:
        for key, value in (*given.items(), *[(question.id, value) for question, value in earlier]):
            _require_answer_type(value, f"for the question {key!r}")
        self._given = given
        self._earlier = list(earlier)
        self._unused = list(given)
        self._misfits: dict[str, str] = {}

    def find_answer_and_mark_used(self, question: Question) -> Answer | None:
        """Return the answer to a question, or ``None``; each of an earlier run serves once."""
        # A run that goes on from a state asks anew, under other ids; the answer belongs to the question that is the
        # same in all else.
        for index, (earlier, value) in enumerate(self._earlier):
            if not earlier.text or attrs.evolve(earlier, id=question.id) == question:
                del self._earlier[index]
                return to_answer(value, question)
        for key in (question.id, question.text):
            if key in self._given:
                self._unused = [other for other in self._unused if other != key]
                problem = find_answer_problem(self._given[key], question)
                if problem is None:
                    return to_answer(self._given[key], question)
                self._misfits[question.id] = problem
        return None

    @property
    def unused_warnings(self) -> tuple[str, ...]:
        """Sentences about answers that were passed in advance but not used: invalid ones, and those without a question."""
        unasked = {*self._unused, *[question.id for question, _ in self._earlier]}
        said = [f"the answer to {key!r} was not used: the run did not ask that question" for key in sorted(unasked)]
        return (*said, *[f"{problem}; it was not used" for problem in self._misfits.values()])


class LimitQuestions:
    """
    The questions of one run tree about limits: runs at the same limit share one.
    """

    def __init__(self) -> None:
        # What runs of the tree have asked, or ask at present, by the id of the question that they have in common.
        self._allowed: dict[str, Answer] = {}
        self._asking: dict[str, asyncio.Future[Answer | None]] = {}
        self._announced: set[str] = set()

    async def ask_or_share_answer(
        self, question: Question, ask: Callable[[Sequence[Question]], Awaitable[list[Answer | None]]]
    ) -> Answer | None:
        """
        Return the answer to a question about a limit; *ask* asks it, once for all runs at the same limit.

        Raises:
            LimitExceeded: as ``OpenQuestions.ask``.
        """
        # Ten children reach the limit of their tree at about the same time. One asks, the others wait for its answer;
        # if that one is stopped, the next of them asks.
        while question.id not in self._allowed:
            asking = self._asking.get(question.id)
            if asking is not None:
                await asyncio.wait((asking,))
                if not asking.cancelled():
                    return asking.result()
                continue  # who asked was stopped: another one asks
            asking = self._asking[question.id] = asyncio.get_running_loop().create_future()
            try:
                (answer,) = await ask((question,))
                asking.set_result(answer)
                if answer is not None:
                    self._allowed[question.id] = answer
                return answer
            finally:
                del self._asking[question.id]
                asking.cancel()
        return self._allowed[question.id]

    def remember_answer(self, question: Question, answer: Answer) -> None:
        """Remember the answer to a question about a limit, live or replayed, so that other runs at this limit share it."""
        self._allowed[question.id] = answer

    def register_if_first(self, question: Question) -> bool:
        """Register the id of a question; return True if it is new, so that the question is shown."""
        is_new = question.id not in self._announced
        self._announced.add(question.id)
        return is_new


class OpenQuestions:
    """
    The open questions of one run tree.

    Args:
        given: The answers given in advance.
        interactor: The interactor of the engine, which answers in this process.
        threads: Where an interactor without ``async`` is called.
        session_rules: The rules of lasting permissions of the conversation, and their store.
        is_task_cancelled: Returns whether the current task was cancelled since it entered the tree.

    Attributes:
        headless: Whether unanswered questions about permissions and limits are denied instead of left open.
        patience: Seconds that a question stays open while no one attends; ``None`` for ever.
        remembered: The rules of lasting permissions of this run tree, recorded answers included.
        given: The answers given in advance.
        limits: The questions about limits.
    """

    def __init__(
        self,
        given: AdvanceAnswers,
        interactor: Interactor | None,
        threads: ThreadPool,
        session_rules: RememberedRules | None,
        *,
        is_task_cancelled: Callable[[], bool],
    ) -> None:
        self.headless = False
        self.patience: float | None = 0.0
        self.remembered = RememberedRules()
        # Two memories: one of this run tree, which is learnt from outcomes and therefore the same on replay, and one of
        # the conversation, which only this process has. What a run was allowed is recorded in its own answers either
        # way.
        self._session_rules = RememberedRules() if session_rules is None else session_rules
        self.given = given
        self.limits = LimitQuestions()
        self._interactor = interactor
        self._threads = threads
        self._is_task_cancelled = is_task_cancelled
        self._open: dict[str, _OpenQuestion] = {}
        self._left: set[str] = set()
        self._shown: dict[tuple[str, int], tuple[Question, ...]] = {}
        self._attending = 0

    def replace_session_rules_by_recorded(self, rules: Iterable[JsonDict]) -> None:
        """Add the recorded *rules* to those of this run, and forget the rules of the conversation."""
        self._session_rules = RememberedRules(self._session_rules.store)
        for rule in rules:
            self.remembered.add(rule)

    async def ask(self, questions: Sequence[Question], interactor: Interactor | None = None) -> list[Answer | None]:
        """
        Return one answer per question, ``None`` where no one can give one; store the rules that answers create.

        An interactor is asked one question after another; questions for a handle are all open at once. A permission for a call
        that its tool will refuse is not asked for; the tool's denial is the answer.

        Args:
            questions: The questions.
            interactor: The interactor to ask instead of the engine's own.

        Raises:
            LimitExceeded: when more questions than a run tree may have would wait for an answer.
        """
        answers = await self._find_or_ask_answers(questions, interactor)
        self._left.update([q.id for q, answer in zip(questions, answers, strict=True) if answer is None])
        for question, answer in zip(questions, answers, strict=True):
            if answer is not None:
                self._session_rules.add_from_answer(question, answer)
                if answer.remember == "always":
                    await self._threads.run(
                        "policy file", partial(self._session_rules.store_rule_if_always, question, answer)
                    )
        return answers

    def get_or_render_questions(self, item: Item) -> tuple[Question, ...]:
        """Return the questions of an ``AskPerson`` with previews, rendered once and kept until ``forget_rendered_questions``."""
        key = item.path, item.effect.seq
        if key not in self._shown:
            self._shown[key] = render_questions(item)
        return self._shown[key]

    def forget_rendered_questions(self, item: Item) -> None:
        """Drop the rendered questions of an ``AskPerson``; they are rendered again next time."""
        self._shown.pop(item.address, None)

    def has_answering_rule(self, question: Question) -> bool:
        """Return whether a lasting permission already answers a question."""
        return self._find_rule_of_run_or_session(question) is not None

    def _find_rule_of_run_or_session(self, question: Question) -> JsonDict | None:
        """Return the narrowest remembered rule that answers *question*, of this run before those of the conversation, or ``None``."""
        return self.remembered.find_covering_rule(question) or self._session_rules.find_covering_rule(question)

    async def _find_or_ask_answers(
        self, questions: Sequence[Question], interactor: Interactor | None
    ) -> list[Answer | None]:
        """Return known answers, then those of an interactor, denials if headless, and answers that arrive while questions are open."""
        # In this order: what was said before, or is settled by itself; then somebody in this process; then, where
        # nobody may be waited for, a no; and only what is left stays open.
        answers = [self._find_known_answer(question) or _find_preview_refusal(question) for question in questions]
        somebody = interactor or self._interactor
        if somebody is not None:
            for index, question in enumerate(questions):
                if answers[index] is None:
                    answers[index] = await self._ask_with_retries(somebody, question)
        if self.headless:
            answers = [
                Answer(declined=True, by=NOBODY) if answer is None and _is_denied_if_unanswered(question) else answer
                for question, answer in zip(questions, answers, strict=True)
            ]
        self._require_question_limit(answers.count(None))
        # Nobody is there and nobody is waited for: the questions go back at once, and the run is suspended, which costs
        # nothing for as long as it lasts.
        if not self._attending and self.patience == 0:
            return answers
        opened = {i: self._open_question(q) for i, q in enumerate(questions) if answers[i] is None}
        try:
            for index, known in opened.items():
                answers[index] = await known.future
        finally:
            for index, known in opened.items():
                known.cancel_timer()
                del self._open[questions[index].id]
        return answers

    def _require_question_limit(self, added_count: int) -> None:
        """Raise ``LimitExceeded`` if *added_count* more questions are too many; unanswered ones count until ``forget_unanswered``."""
        waiting = len(self._open) + len(self._left)
        if added_count and waiting + added_count > MAX_QUESTIONS:
            msg = (
                f"{waiting} questions of this run wait for an answer; {added_count} more would be over the limit of "
                f"{MAX_QUESTIONS}. Ask fewer at once, and the rest when these are answered"
            )
            raise LimitExceeded(msg, kind="questions", limit=MAX_QUESTIONS)

    def _find_known_answer(self, question: Question) -> Answer | None:
        """Return the answer given in advance, marked as used, or that of a remembered rule, or ``None``."""
        known = self.given.find_answer_and_mark_used(question)
        if known is not None:
            return known
        rule = self._find_rule_of_run_or_session(question)
        if rule is None:
            return None
        return Answer(text="yes", by=REMEMBERED, covers="" if rule is question.remember else str(rule["id"]))

    @property
    def has_attendant(self) -> bool:
        """Whether a reader that answers questions is registered, or may register at any time."""
        return self._attending > 0 or self.patience is None

    @property
    def open_questions(self) -> tuple[Question, ...]:
        """The questions that wait for an answer, oldest first."""
        return tuple([known.question for known in list(self._open.values()) if not known.future.done()])

    def is_left_unanswered(self, question_id: str) -> bool:
        """Return whether an unanswered question has no waiter any more, since the run is being suspended."""
        known = self._open.get(question_id)
        if known is None or not known.future.done() or known.future.cancelled():
            return question_id in self._left
        return known.future.result() is None

    def forget_unanswered(self, questions: Iterable[Question]) -> None:
        """Forget unanswered questions whose run continues without their answers."""
        self._left.difference_update([question.id for question in questions])

    def _open_question(self, question: Question) -> _OpenQuestion:
        """Register a question that waits for its answer, with a timer for the patience if that is limited."""
        loop = asyncio.get_running_loop()
        known = self._open[question.id] = _OpenQuestion(question, loop.create_future())
        if self.patience is not None:
            known.timer = loop.call_later(self.patience, self._mark_late_and_end_if_unattended, known)
        return known

    def _mark_late_and_end_if_unattended(self, open_question: _OpenQuestion) -> None:
        """Mark a question as late; without an attendant it ends unanswered."""
        open_question.is_late = True
        if not self._attending:
            _set_answer_once(open_question.future, None)

    def add_attendant(self) -> None:
        """Register a reader that answers questions. Questions then wait instead of suspending the run."""
        self._attending += 1

    def remove_attendant(self) -> None:
        """Unregister a reader that answers questions. After the last one, expired questions suspend the run."""
        self._attending -= 1
        if not self._attending:
            for known in self._open.values():
                if known.is_late or self.patience == 0:
                    _set_answer_once(known.future, None)

    def answer(self, question_id: str, answer: AnswerLike) -> None:
        """
        Answer an open question; may be called from any thread.

        Raises:
            AnswerRejected: when no question with that id is open, it was answered already, or *answer*
                is none, such as a text that is not an option.
        """
        known = self._open.get(question_id)
        if known is None or known.future.done():
            listed = list_names([f"{question.id!r} ({question.text})" for question in self.open_questions])
            msg = f"question {question_id!r} is not open; open questions: {listed}"
            raise AnswerRejected(msg)
        question, future = known.question, known.future
        _require_answer_type(answer, f"to the question {question_id!r}")
        given = require_valid_answer(answer, question)
        # From any thread, and perhaps two at once: which was first is decided in the loop, where `_set_answer_once` looks once
        # more.
        future.get_loop().call_soon_threadsafe(_set_answer_once, future, given)

    async def _ask_with_retries(self, interactor: Interactor, question: Question) -> Answer | None:
        """
        Return a valid answer of an interactor; ``None`` after several invalid ones; if it raises, a denial or ``None``.

        If it raises, or returns a value of a wrong type, a permission is denied and any other question has no answer.
        """
        for _ in range(1 + MAX_REPEATED_QUESTIONS):
            try:
                value = await self._ask_interactor(interactor, question)
                problem = None if value is None else find_answer_problem(value, question)
            # Its cancellation is its own if nobody cancelled this task: it may have awaited a task that was.
            except (Exception, asyncio.CancelledError) as error:
                if isinstance(error, asyncio.CancelledError) and self._is_task_cancelled():
                    raise
                LOGGER.warning(
                    "the interactor raised at question %r, which stays unanswered", question.id, exc_info=error
                )
                return (
                    None if question.tool_name is None else Answer(declined=True)
                )  # without an answer, nothing is approved
            if problem is None:
                return None if value is None else to_answer(value, question)
            LOGGER.warning("%s, so the interactor is asked again", problem)
        return None

    async def _ask_interactor(self, interactor: Interactor, question: Question) -> AnswerLike | None:
        """Return what the interactor answers, called in a thread unless it is async; a value of a wrong type raises."""
        value: Any
        # A function that reads a terminal would hold up the loop for as long as the person thinks, with all other runs.
        if inspect.iscoroutinefunction(interactor.ask):
            value = interactor.ask(question)
        else:
            value = await self._threads.run("interactor", lambda: interactor.ask(question))
        if inspect.isawaitable(value):
            value = await value
        if value is not None:
            _require_answer_type(value, "of the interactor")
        said: AnswerLike | None = value
        return said


def _is_denied_if_unanswered(question: Question) -> bool:
    """Return whether an unanswered question counts as a denial: for permissions and limits."""
    return question.tool_name is not None or bool(question.number)


def _find_preview_refusal(question: Question) -> Answer | None:
    """Return the denial if the tool's preview has a ``problem``; else ``None``."""
    return Answer(declined=True, by=REFUSED, reason=question.problem) if question.problem else None


def _require_answer_type(value: object, answer_label: str) -> None:
    """Raise ``AnswerRejected`` unless *value* is a text, a bool or an ``Answer``."""
    if not isinstance(value, str | bool | Answer):
        msg = f"the answer {answer_label} must be a string, a bool or an Answer, not {value!r}"
        raise AnswerRejected(msg)


def _set_answer_once(future: asyncio.Future[Answer | None], answer: Answer | None) -> None:
    if not future.done():
        future.set_result(answer)


def render_questions(item: Item) -> tuple[Question, ...]:
    """
    Return the questions of an ``AskPerson`` as shown to people.

    A preview is rendered here and not by the machine: it is the tool's code, may change from version to version, and is no
    part of what was approved, so no record and no fingerprint holds it.
    """
    effect = cast("AskPerson", item.effect)
    if effect.purpose != "permission":
        return effect.questions
    return tuple([_add_preview(item, question, effect.place) for question in effect.questions])


def _add_preview(item: Item, question: Question, program_position: tuple[str, int] | None) -> Question:
    """Return *question* with the tool's preview and, if *program_position* is given, the lines of the program that waits."""
    preview = _make_preview(item, question)
    if program_position is not None:
        preview = preview or JsonDict(action="", details=question.details)
        details = preview["details"]
        known = details if isinstance(details, Mapping) else {} if details is None else {"what": details}
        preview = JsonDict(
            {**preview, "details": freeze({**known, IN_PROGRAM: _format_waiting_lines(*program_position)})}
        )
    return attrs.evolve(question, preview=preview)


def _format_waiting_lines(text: str, line: int) -> str:
    """Return the numbered lines of a program around the waiting line, which is marked."""
    lines = split_program_lines(text)
    first, last = max(0, line - 1 - SHOWN_LINES_AROUND), min(len(lines), line + SHOWN_LINES_AROUND)
    width = len(str(last))
    shown = [f"{'>' if n == line else ' '} {n:>{width}} | {lines[n - 1]}".rstrip() for n in range(first + 1, last + 1)]
    before = [f"  ... {first} lines"] if first else []
    after = [f"  ... {len(lines) - last} lines"] if last < len(lines) else []
    return "\n".join([*before, *shown, *after])


def _make_preview(item: Item, question: Question) -> JsonDict | None:
    """Return the tool's preview of a call; errors are logged, and the person is still asked."""
    binding = item.plan.tools.get(question.tool_name or "")
    runs = None if binding is None else binding.runs
    render = getattr(runs.tool if isinstance(runs, Ordinary) else runs, "preview", None)
    if render is None:
        return None
    try:
        shown: ToolPreview | None = render(question.details)
        if shown is None:
            return None
        preview = {"action": str(shown.action), "details": freeze(shown.details)}
        return JsonDict(preview | ({"problem": str(shown.problem)} if shown.problem else {}))
    # The person is asked all the same, with the bare input: a preview that fails must not become a way around the
    # question, nor a reason to deny.
    except Exception as error:  # noqa: BLE001  (a preview is the tool author's code)
        LOGGER.warning("the preview of %r failed at question %r", question.tool_name, question.id, exc_info=error)
        return None
