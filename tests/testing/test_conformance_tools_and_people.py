"""
``check_tool_source`` and ``check_interactor``: what breaks a promise is told which, and our own keep them.
"""

from __future__ import annotations

import io
from collections.abc import Generator
from typing import Any

import pytest

from stepengine import Answer, Change, Perform, Question, Tool
from stepengine.cli import TerminalInteractor
from stepengine.testing import check_interactor, check_tool_source

SCHEMA = {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]}
INPUT = {"word": "heron"}


class Table:
    """
    The smallest source of tools.
    """

    name = "table"

    def __init__(self, reachable: bool) -> None:
        self.reachable, self.is_closed = reachable, False

    def look_up(self) -> list[str]:
        if not self.reachable:
            raise OSError("nobody listens")
        return ["shout"]

    def listed(self) -> Any:
        return (yield from Perform.idempotent(self.look_up))

    def pre_run(self, _ctx: Any) -> Generator[Any, Any, Change]:
        names = yield from self.listed()
        return Change(tools=[Tool(name, "Shout a word.", SCHEMA, self.shout) for name in names])

    def shout(self, input: dict[str, Any]) -> str:
        return str(input["word"]).upper()

    async def aclose(self, blocked: Any = None) -> None:
        self.is_closed = True


@pytest.mark.spec("ecosystem:EC232")
def test_the_smallest_source_keeps_the_promises() -> None:
    check_tool_source(Table, "shout", INPUT)


class Unnamed(Table):
    name = ""


class ClosesForGood(Table):
    def look_up(self) -> list[str]:
        if self.is_closed:
            raise OSError("it is closed")
        return super().look_up()


class WithoutPerform(Table):
    def listed(self) -> Any:
        yield from ()
        return self.look_up()


class HidesFailures(Table):
    def listed(self) -> Any:
        return ["shout"]
        yield


class AnotherEachTime(Table):
    made = 0

    def __init__(self, reachable: bool) -> None:
        super().__init__(reachable)
        type(self).made += 1
        self.name = f"table{self.made}"


@pytest.mark.parametrize(
    ("kind", "promise"),
    [
        (Unnamed, "source"),
        (AnotherEachTime, "source"),
        (ClosesForGood, "call"),
        (HidesFailures, "unreachable"),
        (WithoutPerform, "replay"),
    ],
)
def test_a_broken_promise_of_a_tool_source_is_named(kind: type[Table], promise: str) -> None:
    for only in (promise, ""):
        with pytest.raises(AssertionError, match=f"broken promise '{promise}'") as caught:
            check_tool_source(kind, "shout", INPUT, only=only)

        assert f"check_tool_source(make, tool, input, only={promise!r})" in str(caught.value)


class Listed:
    """
    The smallest surface: a list of what the person says.
    """

    def __init__(self, replies: Any) -> None:
        self.replies = list(replies)

    def ask(self, question: Question) -> Any:
        return self.replies.pop(0) if self.replies else None


@pytest.mark.spec("waiting:WT38")
def test_the_smallest_surface_keeps_the_promises() -> None:
    check_interactor(Listed)


@pytest.mark.spec("waiting:WT38")
def test_the_terminal_keeps_the_promises() -> None:
    def make(replies: Any) -> TerminalInteractor:
        typed = "".join([f"{said}\n" for said in replies])
        return TerminalInteractor(input=io.StringIO(typed), output=io.StringIO(), color="never")

    check_interactor(make)


class WithoutQuestion(Listed):
    def ask(self) -> Any:  # type: ignore[override]
        return None


class Shortens(Listed):
    def ask(self, question: Question) -> Any:
        said = super().ask(question)
        return said and said[:10]


class GuessesAnOption(Listed):
    def ask(self, question: Question) -> Any:
        said = super().ask(question)
        return question.options[0] if question.options and said not in question.options else said


class SaysNo(Listed):
    def ask(self, question: Question) -> Any:
        return super().ask(question) or "no"


class AllowsEverything(Listed):
    def ask(self, question: Question) -> Any:
        said = super().ask(question)
        return said if question.tool_name is None else said and True


class AllowsForGood(Listed):
    def ask(self, question: Question) -> Any:
        said = super().ask(question)
        return Answer(remember="session") if question.tool_name and said == "yes" else said


class ChangesTheInput(Listed):
    def ask(self, question: Question) -> Any:
        said = super().ask(question)
        return Answer(edited_input={"bell": "three"}) if question.tool_name and said == "yes" else said


class FromTheEnd(Listed):
    def ask(self, question: Question) -> Any:
        return self.replies.pop() if self.replies else None


@pytest.mark.parametrize(
    ("kind", "promise"),
    [
        (WithoutQuestion, "object"),
        (Shortens, "text"),
        (GuessesAnOption, "invalid"),
        (FromTheEnd, "order"),
        (SaysNo, "gone"),
        (AllowsEverything, "permission"),
        (AllowsForGood, "permission"),
        (ChangesTheInput, "permission"),
    ],
)
def test_a_broken_promise_of_a_surface_is_named(kind: type[Listed], promise: str) -> None:
    with pytest.raises(AssertionError, match=f"broken promise '{promise}'") as caught:
        check_interactor(kind, only=promise)

    assert f"check_interactor(make, only={promise!r})" in str(caught.value)
