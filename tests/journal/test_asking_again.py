"""
A journal that somebody else made: what it allows ahead is asked again, and what it did stays done.
"""

from __future__ import annotations

from collections.abc import Generator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from stepengine import AgentDefinition, Answer, Engine, Parallel, RunResult, ToolCall, tool
from stepengine.errors import JournalError
from stepengine.journal import FileJournal, MemoryJournal
from stepengine.journal.permission_reset import find_effective_approvals
from stepengine.journal.records import Result
from stepengine.permissions import Policy, Rule


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
        self._policy = Policy()

    def engine(self, interactor: Any = None) -> Engine:
        return Engine([self._agent], [self._tool], permissions=self._policy, interactor=interactor)


class Says:
    def __init__(self, answer: Any) -> None:
        self.answer, self.asked = answer, 0

    def ask(self, question: Any) -> Any:
        self.asked += 1
        return self.answer


@cache
def shared_till() -> Till:
    """Return the agent of the runs that come one after the other: to make its tool takes as long as one of them."""
    return Till()


def recorded(answer: Any) -> MemoryJournal:
    journal = MemoryJournal()
    with shared_till().engine(Says(answer)) as engine:
        engine.run_sync("till", journal=journal, session_id="s").unwrap()
    return journal


def resumed(journal: Any, interactor: Any = None, **options: Any) -> tuple[list[int], RunResult[Any]]:
    till = shared_till()
    till.paid.clear()
    with till.engine(interactor) as engine:
        result = engine.resume_sync(journal, **options)
    return list(till.paid), result


ANSWERS = {
    "once": "yes",
    "for the session": Answer(text="yes", remember="session", covers="allow any calls of pay by till in user"),
    "changed": Answer(text="yes", edited_input={"x": 7}),
}


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("requirements:X72")
@pytest.mark.parametrize(("answer", "said"), [*[(answer, "yes") for answer in ANSWERS], ("once", "no")])
def test_second_approval_decides_and_the_run_replays(answer: str, said: str, tmp_path: Path) -> None:
    whole = recorded(ANSWERS[answer]).lines()
    for count in range(2, len(whole)):
        journal = FileJournal(tmp_path / f"{count}.jsonl")
        MemoryJournal(whole[:count]).copy_to(journal)
        history, person = journal.history(), Says(said)
        ahead, before = find_effective_approvals(history), journal.path.read_bytes()
        calls = [
            address for address, i in history.intents.items() if i.type == "tool_call" and address in history.results
        ]
        paid, result = resumed(journal, person, trust=False, in_doubt="retry")
        kept = tmp_path / f"{count}.before-1.jsonl"

        assert "completed" == result.status
        assert 2 - len(calls) == person.asked
        assert said == "yes" or [] == paid
        assert bool(ahead) == kept.exists()
        assert not ahead or before == kept.read_bytes()
        with shared_till().engine() as engine:
            assert result.output == engine.replay_sync(journal).output


# --- runs that have ended, and tools that really run again ----------------------------------------------------------


def extended(journal: Any, interactor: Any = None, **options: Any) -> tuple[list[int], RunResult[Any] | JournalError]:
    till = Till()
    with till.engine(interactor) as engine:
        try:
            return till.paid, engine.resume_sync(journal, **options, on_divergence="extend")
        except JournalError as error:
            return till.paid, error


def ended_behind(lines: list[bytes], number: int) -> MemoryJournal:
    """Return a journal of a run that has ended right behind its yes with that number, as a forger writes it."""
    records = MemoryJournal(lines).records()
    history = MemoryJournal(lines).history()
    asked = [address for address, intent in history.intents.items() if intent.type == "ask"][number]
    yes = next(i for i, r in enumerate(records) if isinstance(r, Result) and (r.path, r.seq) == asked)
    forged = MemoryJournal()
    forged.replace([*records[: yes + 1], records[-1]])
    return forged


@pytest.mark.spec("requirements:X72")
@pytest.mark.parametrize("answer", ANSWERS)
def test_extended_run_asks_again_and_keeps_done_effects(answer: str) -> None:
    whole = recorded(ANSWERS[answer]).lines()
    for again in (True, False):
        unchanged, person = MemoryJournal(whole), Says("no")
        paid, result = extended(unchanged, person, trust=not again)
        assert ([], "completed", 0) == (paid, result.status, person.asked)
    person = Says("yes")
    paid, result = extended(ended_behind(whole, 1), person, trust=False, allow_repeat=True)

    assert ("completed", 1) == (result.status, person.asked)
    assert [2] == paid


class Together(Till):
    """Pays beside a look that asks nobody, in one batch."""

    def __init__(self, changed: bool = False) -> None:
        super().__init__()

        @tool(category="read", parallel_safe=True)
        def look(x: int) -> int:
            """Look."""
            return x

        def handle_steps(ctx: Any) -> Generator[Any, Any, Any]:
            yield Parallel(ToolCall("look", {"x": 2 if changed else 1}), ToolCall("pay", {"x": 1}))

        self._agent = AgentDefinition("till", tools=[self._tool, look], handle_steps=handle_steps)
        self._policy = Policy(rules=[Rule.allow_tool("look")])


@pytest.mark.spec("requirements:X72")
def test_done_effect_is_not_repeated_on_an_old_approval() -> None:
    """
    The record ends between the permission and its call, at the call beside it, which nobody is asked about.
    """
    journal = MemoryJournal()
    with Together().engine(Says("yes")) as engine:
        engine.run_sync("till", journal=journal).unwrap()
    lines, changed = journal.lines(), Together(changed=True)
    paid = {}
    for again in (True, False):
        with changed.engine() as engine:
            result = engine.resume_sync(
                MemoryJournal(lines), trust=not again, allow_repeat=True, on_divergence="extend"
            )
        paid[again] = (list(changed.paid), result.status)
        if again:
            assert isinstance(result.error, JournalError)
            assert "nobody here allowed" in str(result.error)
    assert {True: ([], "failed"), False: ([1], "completed")} == paid


@pytest.mark.spec("requirements:X72")
@pytest.mark.parametrize("answer", ANSWERS)
def test_live_replay_runs_no_tool_the_journal_approves_itself(answer: str) -> None:
    whole = recorded(ANSWERS[answer]).lines()
    paid = {}
    for again in (True, False):
        till = Till()
        with till.engine() as engine:
            result = engine.replay_sync(MemoryJournal(whole), live=["tool_call"], trust=not again)
        paid[again] = len(till.paid)
        assert not again or "nobody here allowed" in str(result.error)
    assert 0 == paid[True]
    assert paid[False] >= 1
