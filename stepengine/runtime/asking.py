"""Who answers a question: answers given up front, an interactor, whoever holds the run's handle, or nobody (requirements K)."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from stepengine.data.questions import MAX_QUESTIONS, Answer, AnswerLike, Interactor, Question, answered
from stepengine.errors import AnswerRejected, LimitExceeded
from stepengine.runtime.logs import LOGGER
from stepengine.tools.threads import ThreadPool

__all__ = ("Desk",)


class Desk:
    """
    The open questions of one run tree.

    Args:
        given: Answers given up front, by question id or text.
        interactor: Somebody who answers in process.
        threads: Where an interactor without ``async`` is asked.
        earlier: Questions of the run that this one continues, with their answers; they are asked again under other ids.
            One without a text, of which no more is known than that it is open, is the first that is asked.

    Raises:
        AnswerRejected: when an answer given up front is none.
    """

    def __init__(
        self,
        given: Mapping[str, AnswerLike],
        interactor: Interactor | None,
        threads: ThreadPool,
        earlier: Sequence[tuple[Question, AnswerLike]] = (),
    ) -> None:
        self.give(given, earlier)
        self._interactor = interactor
        self._threads = threads
        self._open: dict[str, tuple[Question, asyncio.Future[Answer | None]]] = {}
        self._attending = 0
        self._waiting = 0

    def give(self, given: Mapping[str, AnswerLike], earlier: Sequence[tuple[Question, AnswerLike]] = ()) -> None:
        """
        Have these answers up front, and no others.

        Raises:
            AnswerRejected: when one is none.
        """
        for key, value in (*given.items(), *[(question.id, value) for question, value in earlier]):
            _check(value, f"for the question {key!r}")
        self._given = given
        self._earlier = list(earlier)
        self._unused = set(given)

    @property
    def unused(self) -> tuple[str, ...]:
        """The keys of answers given up front for which nobody asked."""
        return tuple(sorted({*self._unused, *[question.id for question, _ in self._earlier]}))

    async def ask(self, questions: Sequence[Question], interactor: Interactor | None = None) -> list[Answer | None]:
        """
        Return one answer per question; ``None`` where nobody is there to give one.

        An interactor is asked one question after another; those that wait for a handle are open at once.

        Args:
            questions: What is asked.
            interactor: Who answers before the engine's own interactor would.

        Raises:
            LimitExceeded: when more questions than a run tree may have would wait for an answer.
        """
        answers = [self._up_front(question) for question in questions]
        somebody = interactor or self._interactor
        if somebody is not None:
            for index, question in enumerate(questions):
                if answers[index] is None:
                    answers[index] = await self._interact(somebody, question)
        self._wait_for(answers.count(None))
        if not self._attending:
            return answers
        futures = {i: self._opened(q) for i, q in enumerate(questions) if answers[i] is None}
        try:
            for index, future in futures.items():
                answers[index] = await future
        finally:
            for index in futures:
                del self._open[questions[index].id]
                self._waiting -= answers[index] is not None
        return answers

    def _wait_for(self, count: int) -> None:
        """Count questions that wait from now on; those that nobody answers wait until the run has ended."""
        if count and self._waiting + count > MAX_QUESTIONS:
            msg = (
                f"{self._waiting} questions of this run wait for an answer; {count} more would be over the limit of "
                f"{MAX_QUESTIONS}. Ask fewer at once, and the rest when these are answered"
            )
            raise LimitExceeded(msg, kind="questions", limit=MAX_QUESTIONS)
        self._waiting += count

    def _up_front(self, question: Question) -> Answer | None:
        for index, (earlier, value) in enumerate(self._earlier):
            if not earlier.text or attrs.evolve(earlier, id=question.id) == question:
                del self._earlier[index]
                return answered(value, question)
        for key in (question.id, question.text):
            if key in self._given:
                self._unused.discard(key)
                return answered(self._given[key], question)
        return None

    def _opened(self, question: Question) -> asyncio.Future[Answer | None]:
        future: asyncio.Future[Answer | None] = asyncio.get_running_loop().create_future()
        self._open[question.id] = (question, future)
        return future

    def attend(self) -> None:
        """Say that somebody watches and may answer: questions wait instead of suspending the run."""
        self._attending += 1

    def depart(self) -> None:
        """Say that a watcher left; after the last one open questions suspend the run."""
        self._attending -= 1
        if not self._attending:
            for _, future in self._open.values():
                _resolve(future, None)

    def answer(self, question_id: str, answer: AnswerLike) -> None:
        """
        Answer an open question; may be called from any thread.

        Raises:
            AnswerRejected: when no question with that id is open, it was answered already (requirements K12), or *answer*
                is none.
        """
        question, future = self._open.get(question_id, (None, None))
        if question is None or future is None or future.done():
            listed = ", ".join([f"{q.id!r} ({q.text})" for q, f in self._open.values() if not f.done()])
            msg = f"question {question_id!r} is not open; open are: {listed or 'none'}"
            raise AnswerRejected(msg)
        _check(answer, f"to the question {question_id!r}")
        future.get_loop().call_soon_threadsafe(_resolve, future, answered(answer, question))

    async def _interact(self, interactor: Interactor, question: Question) -> Answer | None:
        try:
            value: Any
            if inspect.iscoroutinefunction(interactor.ask):
                value = interactor.ask(question)
            else:
                value = await self._threads.run("interactor", lambda: interactor.ask(question))
            if inspect.isawaitable(value):
                value = await value
            if value is not None:
                _check(value, "of the interactor")
        except Exception as error:  # noqa: BLE001
            LOGGER.warning("the interactor raised at question %r, so nobody answers it", question.id, exc_info=error)
            return None if question.tool_name is None else Answer(declined=True)  # who cannot be asked has not agreed
        return None if value is None else answered(value, question)


def _check(value: Any, whose: str) -> None:
    if not isinstance(value, str | bool | Answer):
        msg = f"the answer {whose} is {value!r}; it is a string, a bool or an Answer"
        raise AnswerRejected(msg)


def _resolve(future: asyncio.Future[Answer | None], answer: Answer | None) -> None:
    if not future.done():
        future.set_result(answer)
