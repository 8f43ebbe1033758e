"""
Doing a recorded run again: with tools or models live, extended after an edit, at its own pace, with other limits, in other processes.
"""

from __future__ import annotations

import errno
import gc
import os
import shutil
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from stepengine import (
    STEP,
    STEP_ALL,
    AgentDefinition,
    Ask,
    Engine,
    Limits,
    Perform,
    RunStatus,
    Tool,
    ToolCall,
)
from stepengine.data.tools import ToolAnnotations
from stepengine.errors import JournalError, JournalLocked, JournalMissing, JournalWriteFailed, ReplayDivergence
from stepengine.journal import FileJournal, Journal, MemoryJournal, SqliteJournal, check
from stepengine.testing import ScriptedModel, text, tool_call


class Shop:
    """
    An agent whose model and handler use one tool; what the tool says is `stock`, what was really asked is `asked`.
    """

    def __init__(self, stock: str = "three left", *, word: str = "Hello.", idempotent: bool = True) -> None:
        self.stock, self.asked = stock, []
        tool = Tool(
            name="look", description="Look.", input_schema={"type": "object"}, run=self.look, in_thread=False,
            annotations=ToolAnnotations(idempotent=idempotent),
        )  # fmt: skip

        def handle_steps(ctx: Any) -> Any:
            config = yield from Perform.idempotent(self.configured)
            first = yield from ToolCall("look", {"shelf": 0}, include_tool_call=False)
            yield STEP_ALL
            return [config, first.text, word]

        self.agent = AgentDefinition("shop", model="t/m", tools=[tool], system_prompt=word, handle_steps=handle_steps)

    def look(self, given: Any) -> str:
        self.asked.append(given["shelf"])
        return f"{self.stock} on {given['shelf']}"

    def configured(self) -> str:
        self.asked.append("config")
        return "default"

    def engine(self, *replies: Any, **options: Any) -> Engine:
        return Engine([self.agent], models=ScriptedModel(replies), pricing=None, **options)

    def recorded(self, journal: Any = None) -> Any:
        journal = MemoryJournal() if journal is None else journal
        with self.engine(tool_call("look", {"shelf": 7}), text("done")) as engine:
            assert engine.run_sync("shop", "go", journal=journal).status is RunStatus.COMPLETED
        self.asked.clear()
        return journal


# --- some of it live ------------------------------------------------------------------------------------------------


@pytest.mark.spec("replay:D12")
def test_live_tools_replay_to_the_recorded_result() -> None:
    journal, later = Shop().recorded(), Shop()
    with later.engine() as engine:
        result = engine.replay_sync(journal, live={"tool_call"})
        assert later.asked == [0, 7]
        assert result.output == ["default", "three left on 0", "Hello."]
        assert result.journal is not None
        assert result.journal.content() == journal.content()
        engine.replay_sync(journal, live=["tool_call", "perform"])
    assert later.asked[2:] == ["config", 0, 7]


@pytest.mark.spec("replay:D12")
def test_different_live_result_is_reported_with_both_values() -> None:
    journal, later = Shop().recorded(), Shop("none left")
    with later.engine() as engine, pytest.raises(ReplayDivergence) as caught:
        engine.replay_sync(journal, live={"tool_call"})
    error = caught.value
    assert (error.kind, error.address, later.asked) == ("live_result", "#1", [0])
    assert error.diff == (("/value/content/0/text", '"three left on 0"', '"none left on 0"'),)
    assert "tool_call look has a different result than the recorded one" in error.message
    assert f"{__file__}:" in error.site


@pytest.mark.spec("replay:D12")
def test_live_model_stops_at_the_first_unrecorded_call() -> None:
    journal, later = Shop().recorded(), Shop("never asked")
    say = text("let me see")
    replies = [tool_call("look", {"shelf": 7}), tool_call("look", {"shelf": 0}), say]
    with later.engine(*replies) as engine:
        stopped = engine.replay_sync(journal, live={"model_call"}, on_divergence="stop")
    error = stopped.error
    assert stopped.status is RunStatus.FAILED
    assert isinstance(error, ReplayDivergence)
    assert (error.kind, error.address) == ("extra", "#5")
    assert "tool_call look with this input is not recorded" in error.message
    with later.engine(text("I know that"), text("unused")) as engine:
        quick = engine.replay_sync(journal, live="model_call")
    assert (quick.status, quick.text) == (RunStatus.COMPLETED, "I know that")
    with (
        later.engine(*replies) as engine,
        pytest.raises(ReplayDivergence, match="look with this input is not recorded"),
    ):
        engine.replay_sync(journal, live={"model_call"})
    assert later.asked == []
    assert () == check(quick.journal).problems


@pytest.mark.spec("replay:D12")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"live": {"think"}}, "live='think' is not a kind"),
        ({"live": {"model_call", "tool_call"}}, "live='model_call' cannot be combined"),
        ({"live": {"model_call"}, "speed": 1.0}, "live='model_call' cannot be combined"),
        ({"speed": 0}, "above 0"),
    ],
)
def test_unsupported_replay_options_are_rejected_first(options: Any, said: str) -> None:
    journal, later = Shop().recorded(), Shop()
    with later.engine() as engine, pytest.raises(JournalError, match=said):
        engine.replay_sync(journal, **options)


# --- extended -------------------------------------------------------------------------------------------------------


@pytest.mark.spec("replay:D10", "replay:D1")
def test_extend_reruns_only_what_changed(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    Shop().recorded(path)
    before, later = path.read_bytes(), Shop(word="Good day.")
    with later.engine() as engine:
        with pytest.raises(ReplayDivergence) as caught:
            engine.replay_sync(path)
        assert 'engine.resume(journal, on_divergence="extend")' in caught.value.message
        assert f"stepengine resume {path} --on-divergence extend" in caught.value.message
        assert f"stepengine debug {path}" in caught.value.message
        assert engine.resume_sync(path, on_divergence="extend").status is RunStatus.FAILED
    assert path.read_bytes() == before
    with later.engine(text("changed")) as engine:
        result = engine.resume_sync(path, on_divergence="extend")
        assert (result.text, result.output) == ("changed", ["default", "three left on 0", "Good day."])
        assert engine.replay_sync(path) == result
    assert later.asked == []
    assert path.read_bytes() != before


def charging(charged: list[int], *steps: Any) -> AgentDefinition[Any]:
    def charge(amount: int) -> int:
        charged.append(amount)
        return amount

    def handle_steps(ctx: Any) -> Any:
        for step in steps:
            yield from Perform(charge, step) if isinstance(step, int) else Perform.idempotent(str.upper, step)

    return AgentDefinition("shop", handle_steps=handle_steps)


@pytest.mark.spec("replay:D10")
@pytest.mark.parametrize("kind", [FileJournal, SqliteJournal])
def test_extend_asks_before_repeating_side_effects(kind: Any, tmp_path: Path) -> None:
    charged: list[int] = []
    with Engine([charging(charged, "a", 5, 7, "c")]) as engine:
        journal = engine.run_sync("shop", journal=kind(tmp_path / "run.db")).journal
    before = journal.content()
    with Engine([charging(charged, "b", 5, 7, "c")]) as engine:
        with pytest.raises(JournalError, match=r"#1 perform charge, #2 perform charge.*allow_repeat=True") as caught:
            engine.resume_sync(journal, on_divergence="extend")
        assert "from #0 on" in caught.value.message
        assert (charged, journal.content(), journal.extended) == ([5, 7], before, None)

        assert engine.resume_sync(journal, allow_repeat=True, on_divergence="extend").status is RunStatus.COMPLETED
        again = engine.replay_sync(journal)
    assert charged == [5, 7, 5, 7]
    assert again.status is RunStatus.COMPLETED
    # Two intents are equal to recorded ones, and happened all the same.
    made = journal.extended
    assert (made.kept, made.recorded, made.anew) == (0, 4, 4)
    assert made.before.content() == before

    with Engine([charging(charged, "b", 5, 7, "d")]) as engine:
        engine.resume_sync(journal, on_divergence="extend")
    assert charged == [5, 7, 5, 7]
    assert (journal.extended.kept, journal.extended.recorded, journal.extended.anew) == (3, 4, 1)
    assert "before-2" in journal.extended.before.name
    assert made.before.content() == before


@pytest.mark.spec("reliability:JR08")
def test_extending_without_room_for_a_backup_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path, charged = tmp_path / "run.jsonl", list[int]()
    with Engine([charging(charged, "a", 5)]) as engine:
        engine.run_sync("shop", journal=path)
    before = path.read_bytes()
    monkeypatch.setattr(shutil, "copyfileobj", fail)
    with Engine([charging(charged, "b", 5)]) as engine:
        result = engine.resume_sync(path, allow_repeat=True, on_divergence="extend")

    assert isinstance(result.error, JournalWriteFailed)
    assert "could not be copied to" in str(result.error)
    assert (before, [path]) == (path.read_bytes(), [*tmp_path.iterdir()])


@pytest.mark.spec("replay:D10", "requirements:X73")
@pytest.mark.parametrize(("in_doubt", "status"), [("fail", RunStatus.FAILED), ("retry", RunStatus.COMPLETED)])
def test_extend_decides_effects_in_doubt_like_resume(in_doubt: Any, status: RunStatus) -> None:
    charged: list[int] = []
    with Engine([charging(charged, "a", 5)]) as engine:
        whole = engine.run_sync("shop", journal=MemoryJournal()).journal
    cut = MemoryJournal(whole.lines()[:-2])
    before = cut.lines()
    with Engine([charging(charged, "a", 5, "b")]) as engine:
        assert status is engine.resume_sync(cut, in_doubt=in_doubt, on_divergence="extend").status

    assert ([5] if status is RunStatus.FAILED else [5, 5]) == charged
    assert (status is RunStatus.FAILED) == (before == cut.lines())


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.spec("replay:D10", "replay:J38")
def test_extending_journal_is_locked_until_the_end(store: Callable[..., Journal], *, fails: bool) -> None:
    tried: list[str] = []

    def agent(word: str) -> AgentDefinition[Any]:
        def look() -> str:
            for other in (lambda: engine.resume_sync(store()), lambda: store().writer()):
                with pytest.raises(JournalLocked):
                    other()
                tried.append(word)
            if fails:
                msg = "the shelf is empty"
                raise LookupError(msg)
            return word

        def handle_steps(ctx: Any) -> Any:
            yield from Perform.idempotent(str, word) if word == "old" else Perform(look)

        return AgentDefinition("shop", handle_steps=handle_steps)

    with Engine([agent("old")]) as engine:
        engine.run_sync("shop", journal=store())
    with Engine([agent("new")]) as engine:
        result = engine.resume_sync(store(), on_divergence="extend")
    assert (result.status, tried) == (RunStatus.FAILED if fails else RunStatus.COMPLETED, ["new", "new"])
    store().writer().close()


def test_extending_missing_journal_makes_no_file(tmp_path: Path) -> None:
    with Engine([Shop().agent]) as engine, pytest.raises(JournalMissing):
        engine.resume_sync(tmp_path / "run.jsonl", on_divergence="extend")
    assert not list(tmp_path.iterdir())


# --- at its own pace ------------------------------------------------------------------------------------------------


class Watch:
    """
    A clock whose sleeps are counted and not slept.
    """

    def __init__(self) -> None:
        self.slept: list[float] = []

    def now(self) -> datetime:
        return datetime(2026, 1, 1, tzinfo=UTC)

    def now_ms(self) -> int:
        return int(sum(self.slept) * 1000)

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)


@pytest.mark.spec("requirements:O7")
def test_replay_speed_scales_and_bounds_recorded_waits() -> None:
    def handle_steps(ctx: Any) -> Any:
        for n in range(3):
            yield from Perform.idempotent(str, n)

    agent = AgentDefinition("a", handle_steps=handle_steps)
    journal, watch = MemoryJournal(), Watch()
    with Engine([agent]) as engine:
        engine.run_sync("a", journal=journal)
    for record, at in zip([r for r in journal.records() if r.kind == "result"], [400, 1400, 3_600_000], strict=False):
        record.at = at
    with Engine([agent], clock=watch) as engine:
        first = engine.replay_sync(journal, speed=2.0)
        assert watch.slept == [0.2, 0.5, 10.0]
        assert engine.replay_sync(journal) == first
    assert len(watch.slept) == 3


# --- with other limits ----------------------------------------------------------------------------------------------


@pytest.mark.spec("reliability:JR29")
@pytest.mark.parametrize(
    ("limits", "steps", "status"),
    [
        (Limits(max_steps=1), 3, RunStatus.MAX_STEPS),
        (None, 5, RunStatus.MAX_STEPS),
        (Limits(max_steps=20), 7, RunStatus.COMPLETED),
        (Limits(max_tokens=10), 3, RunStatus.FAILED),
    ],
)
def test_new_limits_apply_to_live_steps_and_count_past_ones(limits: Any, steps: int, status: Any) -> None:
    def handle_steps(ctx: Any) -> Any:
        for _ in range(3):
            yield STEP
        yield from Ask("Go on?")
        for _ in range(4):
            yield STEP

    agent, journal = AgentDefinition("a", model="t/m", handle_steps=handle_steps), MemoryJournal()
    with Engine([agent], models=ScriptedModel([text("x")] * 3), pricing=None) as engine:
        engine.run_sync("a", journal=journal, limits=Limits(max_steps=5))
    with Engine([agent], models=ScriptedModel([text("x")] * 9), pricing=None) as engine:
        result = engine.resume_sync(journal, answers={"Go on?": "yes"}, limits=limits)
    assert (result.status, result.state.step_index) == (status, steps), result.error


# --- in other worlds -----------------------------------------------------------------------------------------------


@pytest.mark.spec("replay:D8")
def test_nondeterministic_handler_diverges_at_the_dependent_effect() -> None:
    def handle_steps(ctx: Any) -> Any:
        known = time.time_ns()
        yield from Perform.idempotent(str, str(ctx.now()))
        yield from Perform.idempotent(str, ctx.random.random())
        yield from Perform.idempotent(str, known)

    journal = MemoryJournal()
    with Engine([AgentDefinition("a", handle_steps=handle_steps)]) as engine:
        engine.run_sync("a", journal=journal)
        error = engine.replay_sync(journal, on_divergence="stop").error
    assert isinstance(error, ReplayDivergence)
    assert (error.address, error.diff[0][0]) == ("#2", "/args/0")
    assert "ctx.now()" in error.message
    assert "ctx.random" in error.message


# --- long -----------------------------------------------------------------------------------------------------------


@pytest.mark.speed
@pytest.mark.spec("performance:Q6")
def test_long_journal_is_replayed_without_parsing_its_effects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from stepengine.journal import line_reader

    monkeypatch.setattr(line_reader, "MAX_HELD_BYTES", 1000)
    effects = 2_000

    def handle_steps(ctx: Any) -> Any:
        for n in range(effects):
            yield from Perform.idempotent(str, n)

    agent = AgentDefinition("a", handle_steps=handle_steps)
    path = tmp_path / "run.jsonl"
    with Engine([agent]) as engine:
        engine.run_sync("a", journal=FileJournal(path, sync="write"), limits=Limits(max_actions=effects + 1))
    parsed: list[bytes] = []
    real = line_reader.parse_members

    def spied(line: bytes, where: str) -> Any:
        parsed.append(line)
        return real(line, where)

    monkeypatch.setattr(line_reader, "parse_members", spied)
    history = FileJournal(path).history()
    assert len(history.intents) == effects + 1
    assert len(parsed) <= 2, "opening reads the head whole, and nothing else"
    with Engine([agent]) as engine:
        assert engine.replay_sync(path).status is RunStatus.COMPLETED
    # Of every effect its result is read, once; of intents only the root's.
    results = [line for line in parsed if line.startswith(b'{"kind":"result"')]
    assert effects <= len(results) <= effects + 5
    assert len(parsed) - len(results) <= 20


def adder_with(steps: int) -> tuple[AgentDefinition[Any], list[Any]]:
    add = Tool("add", "Add.", {"type": "object"}, lambda given: given["n"])
    replies = [*[tool_call("add", {"n": n}) for n in range(steps)], text("done")]
    return AgentDefinition("a", model="scripted/m", system_prompt="Add.", tools=[add]), replies


@pytest.mark.memory
@pytest.mark.spec("performance:Q6")
def test_replay_keeps_no_second_copy_of_records(tmp_path: Path) -> None:
    def kept_by_replaying(steps: int) -> int:
        agent, replies = adder_with(steps)
        path = tmp_path / f"{steps}.jsonl"
        with Engine([agent], models=ScriptedModel(replies)) as engine:
            engine.run_sync("a", journal=FileJournal(path, sync="write"), limits=Limits(max_steps=steps + 1))
        with Engine([agent], models=ScriptedModel([])) as engine:
            engine.replay_sync(path)
            gc.collect()
            before = len(gc.get_objects())
            result = engine.replay_sync(path)
            gc.collect()
            assert result.text == "done"
            return len(gc.get_objects()) - before

    # Four records, a reply, a call and its result, and the two messages of the history; a second record of each is nine more.
    assert (kept_by_replaying(400) - kept_by_replaying(200)) / 200 <= 16


# --- forks ----------------------------------------------------------------------------------------------------------


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:JR35", "replay:D11")
def test_nested_forks_share_kept_records() -> None:
    from stepengine.journal.forks import branch

    def handle_steps(ctx: Any) -> Any:
        for n in range(30):
            yield from Perform.idempotent(str, n)

    agent, journal = AgentDefinition("a", handle_steps=handle_steps), MemoryJournal()
    with Engine([agent]) as engine:
        engine.run_sync("a", journal=journal)
        made = journal
        for _ in range(1_000):
            made = branch(made, 20)
        originals = {id(record) for record in journal.records()}
        strange = [r for r in made.records() if id(r) not in originals]
        assert [r.kind for r in strange] == ["head"]
        assert len(made.history().results) == 21
        again = MemoryJournal(made.lines())
        assert check(again)
        assert engine.resume_sync(again).status is RunStatus.COMPLETED
    assert len(journal.history().results) == 31


@pytest.mark.spec("reliability:JR35")
def test_number_of_forks_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    from stepengine.journal import forks
    from stepengine.journal.forks import branch

    assert forks.MAX_FORKS == 10_000
    monkeypatch.setattr(forks, "MAX_FORKS", 3)
    journal = Shop().recorded()
    for _ in range(3):
        branch(journal, 0)
    with pytest.raises(JournalError, match="3 forks"):
        branch(journal, 0)
    assert branch(MemoryJournal(journal.lines()), 0)
