"""``check_interactor``: the promises of a surface that asks people, in runs that ask questions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from stepengine.data.definition import AgentDefinition
from stepengine.data.questions import Interactor, validate_interactor
from stepengine.data.yields import Ask, Parallel, ToolCall
from stepengine.engine.engine import Engine
from stepengine.permissions.policy import Policy
from stepengine.testing.conformance.promises import Promises, require_equal
from stepengine.tools.decorator import tool

MakeInteractor: TypeAlias = Callable[[Sequence[str]], Interactor]

INTERACTOR: Promises[MakeInteractor] = Promises("check_interactor(make")


def check_interactor(make: MakeInteractor, *, only: str = "") -> None:
    """
    Check that an interactor meets the promises of its interface.

    Args:
        make: Returns a surface whose person says these texts, one after the other, and then leaves.
        only: The name of one promise; by default all are checked.

    Raises:
        AssertionError: when a promise is broken; the message names it and the call that checks it alone.
    """
    INTERACTOR.check(make, only)


def _run_with_questions(interactor: Interactor, *questions: Ask) -> Any:
    """Return the result of a run that asks questions one after the other."""

    def handle(_ctx: Any) -> Any:
        answers: list[str] = []
        for question in questions:
            answers.append((yield from question))  # noqa: PERF401 - a comprehension cannot yield
        return answers

    with Engine([AgentDefinition("asker", handle_steps=handle)], interactor=interactor) as engine:
        return engine.run_sync("asker")


@INTERACTOR.add("object", "It is an object with a method `ask` that takes one question.")
def _check_interactor_type(make: MakeInteractor) -> None:
    """Fail unless the interactor has a method ``ask`` with one parameter."""
    validate_interactor(make([]), "the surface")


@INTERACTOR.add("text", "A question without options returns the text of the answer, unchanged.")
def _check_free_text_answer(make: MakeInteractor) -> None:
    """Fail unless a question without options returns the text of the answer, unchanged."""
    for said in ("four, at the window", "ünïcode 漢字", "no"):
        require_equal([said], _run_with_questions(make([said]), Ask("Which table?")).output, "answer")


@INTERACTOR.add("options", "A question with options returns one of them.")
def _check_option_answer(make: MakeInteractor) -> None:
    """Fail unless a question with options returns one of them."""
    for said in ("left", "right"):
        found = _run_with_questions(make([said]), Ask("Where to?", options=["left", "right"])).output
        require_equal([said], found, "answer")


@INTERACTOR.add("invalid", "After an invalid answer the question is asked again; the answer is not converted.")
def _check_invalid_answer(make: MakeInteractor) -> None:
    """Fail unless a question is asked again after an invalid answer."""
    found = _run_with_questions(make(["sideways", "right"]), Ask("Where to?", options=["left", "right"])).output
    require_equal(["right"], found, "answer after an invalid one")


@INTERACTOR.add("order", "Each question gets its own answer.")
def _check_answer_order(make: MakeInteractor) -> None:
    """Fail unless each of several questions in a row gets its own answer."""
    names = ["one", "two", "three"]
    require_equal(names, _run_with_questions(make(names), *[Ask(f"Name {n}?") for n in range(3)]).output, "answers")


@INTERACTOR.add("together", "If several questions are open at the same time, each gets one answer.")
def _check_parallel_questions(make: MakeInteractor) -> None:
    """Fail unless each of several questions that are open at the same time gets one answer."""

    def handle(_ctx: Any) -> Any:
        return list((yield from Parallel(Ask("First?"), Ask("Second?"))))

    with Engine([AgentDefinition("asker", handle_steps=handle)], interactor=make(["one", "two"])) as engine:
        require_equal(["one", "two"], sorted(engine.run_sync("asker").unwrap()), "answers")


@INTERACTOR.add(
    "permission", "A call runs with its own input only after its approval; an approval or denial counts for one call."
)
def _check_permission_answers(make: MakeInteractor) -> None:
    """Fail unless a call runs only after its own approval, with the approved input."""
    rung: list[str] = []

    @tool(category="write")
    def ring(bell: str) -> str:
        """Ring a bell."""
        rung.append(bell)
        return "rung"

    def handle(_ctx: Any) -> Any:
        for bell in ("one", "two", "two"):
            yield ToolCall("ring", {"bell": bell})

    agent, asks = AgentDefinition("ringer", tools=[ring], handle_steps=handle), make(["no", "yes", "no"])
    with Engine([agent], interactor=asks, permissions=Policy()) as engine:
        engine.run_sync("ringer")
    require_equal(["two"], rung, "calls that ran after a denial, an approval and a denial")


@INTERACTOR.add("gone", "When the person has left, the question stays open and the run waits for an answer.")
def _check_absent_person(make: MakeInteractor) -> None:
    """Fail unless a question stays open and the run waits when the person has left."""
    result = _run_with_questions(make(["one"]), Ask("First?"), Ask("Second?"))
    require_equal(["Second?"], [question.text for question in result.pending_questions], "open questions")
