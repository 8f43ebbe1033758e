"""
A journal that somebody else made: what it allows ahead is asked again, and what it did stays done.
"""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from stepengine import AgentDefinition, Answer, Engine, RunResult, ToolCall, tool
from stepengine.journal import FileJournal, MemoryJournal
from stepengine.journal.reopening import permissions_ahead
from stepengine.permissions import Policy


class Till:
    """
    An agent that pays twice, by a tool that asks, and what it paid.
    """

    def __init__(self) -> None:
        self.paid: list[int] = []

        @tool(category="write")
        def pay(x: int) -> str:
            """Pay."""
            self.paid.append(x)
            return f"paid {x}"

        def handle_steps(ctx: Any) -> Generator[Any, Any, Any]:
            first = yield ToolCall("pay", {"x": 1})
            second = yield ToolCall("pay", {"x": 2})
            return [first.tool_result.is_error, second.tool_result.is_error]

        self._agent = AgentDefinition("till", tools=[pay], handle_steps=handle_steps)
        self._tool = pay

    def engine(self, interactor: Any = None) -> Engine:
        return Engine([self._agent], [self._tool], permissions=Policy(), interactor=interactor)


class Says:
    def __init__(self, answer: Any) -> None:
        self.answer, self.asked = answer, 0

    def ask(self, question: Any) -> Any:
        self.asked += 1
        return self.answer


def recorded(answer: Any) -> MemoryJournal:
    journal = MemoryJournal()
    with Till().engine(Says(answer)) as engine:
        engine.run_sync("till", journal=journal, session_id="s").unwrap()
    return journal


def resumed(journal: Any, interactor: Any = None, **options: Any) -> tuple[list[int], RunResult[Any]]:
    till = Till()
    with till.engine(interactor) as engine:
        return till.paid, engine.resume_sync(journal, **options)


ANSWERS = {
    "once": "yes",
    "for the session": Answer(text="yes", remember="session", covers="allow any calls of pay by till in user"),
    "changed": Answer(text="yes", edited_input={"x": 7}),
}


@pytest.mark.spec("requirements:X72")
@pytest.mark.parametrize("answer", ANSWERS)
def test_wherever_a_journal_is_cut_its_own_yes_lets_nothing_run(answer: str) -> None:
    """
    Nobody is there to be asked, so that not one call may run; without the option some do, which the journal allows.
    """
    whole = recorded(ANSWERS[answer]).lines()
    ran = {True: 0, False: 0}
    for count in range(2, len(whole)):
        for again in ran:
            paid, _ = resumed(MemoryJournal(whole[:count]), ask_again=again, in_doubt="fail")
            ran[again] += len(paid)

    assert 0 == ran[True]
    assert ran[False] >= 2


@pytest.mark.spec("requirements:X72")
@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("said", ["yes", "no"])
def test_who_is_asked_again_decides_and_the_run_replays_as_it_went(answer: str, said: str, tmp_path: Path) -> None:
    whole = recorded(ANSWERS[answer]).lines()
    for count in range(2, len(whole)):
        journal = FileJournal(tmp_path / f"{count}.jsonl")
        MemoryJournal(whole[:count]).copy_to(journal)
        history, person = journal.history(), Says(said)
        ahead, before = permissions_ahead(history), journal.path.read_bytes()
        calls = {address: history.form(i) for address, i in history.intents.items() if i.type == "CallTool"}
        paid, result = resumed(journal, person, ask_again=True, in_doubt="retry")
        kept = tmp_path / f"{count}.before-1.jsonl"

        assert "completed" == result.status
        assert 2 - len(calls) == person.asked
        assert said == "yes" or [c["input"]["x"] for a, c in calls.items() if a not in history.results] == paid
        assert bool(ahead) == kept.exists()
        assert not ahead or before == kept.read_bytes()
        with Till().engine() as engine:
            assert result.output == engine.replay_sync(journal).output


@pytest.mark.spec("requirements:X72")
def test_a_run_that_has_ended_or_a_call_that_began_has_nothing_ahead() -> None:
    whole = recorded("yes")
    lines = whole.lines()
    began = [MemoryJournal(lines[:n]).history() for n in range(2, len(lines))]
    ahead = [bool(permissions_ahead(history)) for history in began]
    calls = [sum(intent.type == "CallTool" for intent in history.intents.values()) for history in began]
    asked = [sum(intent.type == "Ask" and a in h.results for a, intent in h.intents.items()) for h in began]

    assert [] == permissions_ahead(whole.history())
    assert [yes > begun for yes, begun in zip(asked, calls, strict=True)] == ahead
    assert 2 == sum(ahead)
