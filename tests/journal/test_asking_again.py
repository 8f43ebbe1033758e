"""
A journal that somebody else made: what it allows ahead is asked again, and what it did stays done.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from stepengine import AgentDefinition, Answer, Engine, Parallel, RunResult, ToolCall, tool
from stepengine.errors import JournalError
from stepengine.journal import FileJournal, MemoryJournal
from stepengine.journal.history import History
from stepengine.journal.permission_reset import find_effective_questions
from stepengine.journal.records import Input, Intent, Result
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


@pytest.mark.spec("requirements:X72")
@pytest.mark.parametrize("answer", ANSWERS)
def test_untrusted_approvals_in_a_cut_journal_run_nothing(answer: str) -> None:
    """
    Nobody is there to be asked, so that not one call may run; without the option some do, which the journal allows.
    """
    whole = recorded(ANSWERS[answer]).lines()
    ran = {True: 0, False: 0}
    for count in range(2, len(whole)):
        for again in ran:
            paid, _ = resumed(MemoryJournal(whole[:count]), trust=not again, in_doubt="fail")
            ran[again] += len(paid)

    assert 0 == ran[True]
    assert ran[False] >= 2


@pytest.mark.spec("requirements:X72")
@pytest.mark.parametrize(("answer", "said"), [*[(answer, "yes") for answer in ANSWERS], ("once", "no")])
def test_second_approval_decides_and_the_run_replays(answer: str, said: str, tmp_path: Path) -> None:
    whole = recorded(ANSWERS[answer]).lines()
    for count in range(2, len(whole)):
        journal = FileJournal(tmp_path / f"{count}.jsonl")
        MemoryJournal(whole[:count]).copy_to(journal)
        history, person = journal.history(), Says(said)
        ahead, before = find_effective_questions(history), journal.path.read_bytes()
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


@pytest.mark.spec("requirements:X72")
def test_finished_run_or_started_call_needs_no_new_approval() -> None:
    whole = recorded("yes")
    lines = whole.lines()
    began = [MemoryJournal(lines[:n]).history() for n in range(2, len(lines))]
    ahead = [bool(find_effective_questions(history)) for history in began]
    calls = [sum(intent.type == "tool_call" for intent in history.intents.values()) for history in began]
    asked = [sum(intent.type == "ask" and a in h.results for a, intent in h.intents.items()) for h in began]

    assert [] == find_effective_questions(whole.history())
    assert [yes > begun for yes, begun in zip(asked, calls, strict=True)] == ahead
    assert 2 == sum(ahead)


@pytest.mark.spec("requirements:X72")
def test_forged_answer_to_an_open_question_is_asked_again() -> None:
    """
    As one is kept that waits for the others of its effect; a permission has no others, so that only a forger writes it.
    """
    forged = MemoryJournal()
    answered = {"type": "answer", "question_id": "q0", "answer": {"type": "answer", "text": "yes"}}
    forged.replace([*MemoryJournal(recorded("yes").lines()[:3]).records(), Input("", 0, 9, answered)])
    lines = forged.lines()

    assert [1] == resumed(MemoryJournal(lines))[0]
    assert [] == resumed(MemoryJournal(lines), trust=False)[0]


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
def test_untrusted_approvals_run_nothing_in_an_extended_run(answer: str) -> None:
    """
    Wherever it says that it ended; without the option some run.
    """
    whole = recorded(ANSWERS[answer]).lines()
    ran = {True: 0, False: 0}
    for number in range(2):
        for again in ran:
            forged = ended_behind(whole, number)
            assert forged.history().is_complete
            paid, _ = extended(forged, trust=not again, allow_repeat=True)
            ran[again] += len(paid)

    assert 0 == ran[True]
    assert ran[False] >= 2


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


@pytest.mark.spec("requirements:X72")
def test_approval_covers_only_the_recorded_input() -> None:
    forged, records, history = MemoryJournal(), [], recorded("yes").history()
    for record in history.records:
        is_call = isinstance(record, Intent) and record.type == "tool_call"
        records.append(
            Intent(record.path, record.seq, {**history.form(record), "input": {"x": 70}}) if is_call else record
        )
    forged.replace(records)
    lines = forged.lines()

    assert 0 == len(extended(MemoryJournal(lines), trust=False, allow_repeat=True)[0])
    assert 0 < len(extended(MemoryJournal(lines), allow_repeat=True)[0])


class Paying(Till):
    """Pays as often as it is told."""

    def __init__(self, times: int) -> None:
        super().__init__()

        def handle_steps(ctx: Any) -> Generator[Any, Any, Any]:
            for x in range(times):
                yield ToolCall("pay", {"x": x}, include_tool_call=False)

        self._agent = AgentDefinition("till", tools=[self._tool], handle_steps=handle_steps)


@pytest.mark.speed
@pytest.mark.spec("requirements:X72")
@pytest.mark.parametrize("goes_on", [Engine.resume_sync, partial(Engine.resume_sync, on_divergence="extend")])
def test_asking_again_reads_each_record_a_constant_number_of_times(
    goes_on: Callable[..., RunResult[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    Half of the calls are recorded, so that there are as many that run anew.
    """
    looks, form = [], History.form
    monkeypatch.setattr(History, "form", lambda history, intent: (looks.append(intent), form(history, intent))[1])
    looked = []
    for times in (6, 12, 18):
        journal = MemoryJournal()
        with Paying(times).engine(Says("yes")) as engine:
            engine.run_sync("till", journal=journal).unwrap()
            looks.clear()
            # Behind the start each call is four records: asked and allowed, begun and ended.
            goes_on(engine, MemoryJournal(journal.lines()[: 2 + 2 * times]), trust=False).unwrap()
        looked.append(len(looks))

    assert looked[2] - looked[1] == looked[1] - looked[0]


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
@pytest.mark.parametrize("live", [["tool_call"], ["tool_call", "perform"]])
@pytest.mark.parametrize("answer", ANSWERS)
def test_live_replay_runs_no_tool_the_journal_approves_itself(answer: str, live: list[str]) -> None:
    whole = recorded(ANSWERS[answer]).lines()
    paid = {}
    for again in (True, False):
        till = Till()
        with till.engine() as engine:
            result = engine.replay_sync(MemoryJournal(whole), live=live, trust=not again)
        paid[again] = len(till.paid)
        assert not again or "nobody here allowed" in str(result.error)
    assert 0 == paid[True]
    assert paid[False] >= 1


@pytest.mark.spec("requirements:X72")
def test_live_replay_of_denied_calls_runs_tools() -> None:
    journal = recorded("no")
    with Till().engine() as engine:
        assert "completed" == engine.replay_sync(journal, live=["tool_call"], trust=False).status
