"""
Random handlers, each run as it is and in the sandbox: in worlds where things go wrong, and over the other's journal.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from stepengine import AgentDefinition, AgentState, Engine, RunResult, RunStatus, tool
from stepengine.data.events import Event
from stepengine.data.messages import ToolResult
from stepengine.errors import StepEngineError
from stepengine.journal import FileJournal
from stepengine.sandbox.untrusted_handlers import load_source
from stepengine.testing import Clock, ScriptedModel, simulate, simulation, text, tool_call

from .handler_texts import file_of

pytest.importorskip("pydantic_monty", reason="needs the extra programs")

MANY = int(os.environ.get("STEPENGINE_TESTS_HANDLERS", "64"))
MOST_RESUMED = 80
RESULTS = {"note": lambda given: f"noted {given.get('n')}", "broken": ToolResult.error("it is broken")}
Agents = Sequence[AgentDefinition[Any]]


class Both(NamedTuple):
    """The agents of a file, imported and only read."""

    plain: Agents
    read: Agents


def both_of(seed: int, folder: Path) -> Both:
    file = folder / f"handlers_{seed}.py"
    file.write_text(source := file_of(seed), encoding="utf-8")
    names: dict[str, Any] = {"__name__": file.stem, "__file__": str(file)}
    exec(compile(source, str(file), "exec"), names)
    return Both(names["agents"], load_source(source, file=str(file)))


# --- in worlds where things go wrong ----------------------------------------------------------------------------------


def happened(agents: Agents, seed: int, faults: tuple[str, ...] | None, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return all that happens in a world, or what a simulation has against it."""
    seen: list[str] = []
    shown: Sequence[Event] = ()
    check: Any = simulation._run_and_check_world

    def noted(setting: Any, world: Any) -> Any:
        finished = check(setting, world)
        performed = [f"{at}: {effect}" for at, effect in world.effects.performed.items()]
        seen.extend([repr(finished), *performed, repr(shown)])
        return finished

    def keep_events(_: AgentState, events: Sequence[Event]) -> None:
        nonlocal shown
        shown = events

    with monkeypatch.context() as patched:
        patched.setattr(simulation, "_run_and_check_world", noted)
        try:
            simulate(
                agents[0],
                [seed],
                agents=agents[1:],
                results=RESULTS,
                may_raise=(Exception,),
                faults=faults,
                invariants=[keep_events],
            )
        except simulation.SimulationFailed as failed:
            seen.append(str(failed))
    return seen


@pytest.mark.deep
@pytest.mark.spec("programs:PG42")
@pytest.mark.parametrize("part", range(8))
def test_random_worlds_are_equal_in_the_sandbox(part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(part, 25 + MANY, 8):
        both = both_of(seed, tmp_path)
        for world, faults in [(0, ()), (1, None)]:
            plain, read = [happened(agents, world, faults, monkeypatch) for agents in both]
            assert plain == read, (seed, world)


# --- over the other's journal -----------------------------------------------------------------------------------------


@tool
def note(n: int, deep: object = None) -> str:
    """Note."""
    return f"noted {n}"


@tool
def broken(n: int, deep: object = None) -> str:
    """Fail."""
    msg = f"{n} is broken"
    raise ValueError(msg)


def reply(request: Any) -> Any:
    told = len(request.messages)
    return tool_call("note", {"n": told}) if told % 3 == 1 and request.tools else text(f"said {told}")


def engine(agents: Agents, clock: Clock) -> Engine:
    return Engine(agents, [note, broken], models=ScriptedModel(reply), default_model="test/m", clock=clock)


async def to_its_end(agents: list[Agents], journal: FileJournal) -> RunResult:
    """Bring a run to its end, by engines that take turns; one that is in the journal is gone on with."""
    clock = Clock(datetime(2026, 1, 1, tzinfo=UTC))
    answers: dict[str, Any] = {}
    for turn in range(MOST_RESUMED):
        async with engine(agents[turn % len(agents)], clock) as one:
            if journal.records():
                result = await one.resume(journal, answers=answers, in_doubt="retry")
            else:
                result = await one.run("root", "go", params={"n": 1}, journal=journal)
            if result.status is not RunStatus.SUSPENDED:
                return result
            answers = {
                question.id: question.options[0] if question.options else "yes" for question in result.pending_questions
            }
            for waiting in result.waits_for:
                if waiting.kind == "message":
                    await one.send_message(journal, "t", {"turn": turn}, path=waiting.path)
        clock.advance(hours=3)
    raise AssertionError((turn, result.waits_for))


async def carry(seed: int, folder: Path) -> None:
    """Run a file as it is; go on from anywhere, and replay, in the sandbox, and the other way round."""
    rng = random.Random(seed)
    both = both_of(seed, folder)
    for name, (first, other) in {"plain": both, "read": both[::-1]}.items():
        path = folder / f"{seed}-{name}.jsonl"
        result = await to_its_end([first, other], journal := file_at(path))
        await replayed(other, journal, result)
        lines = path.read_bytes().splitlines(keepends=True)
        cut = folder / f"{seed}-{name}-cut.jsonl"
        cut.write_bytes(b"".join(lines[: rng.randint(2, len(lines))]))
        await replayed(first, file_at(cut), await to_its_end([other], file_at(cut)))
        at = [f"{at}#{seq}" for at, seq in journal.history().results if seq >= 0]
        if at:
            await fork(first, other, journal, rng.choice(at), file_at(folder / f"{seed}-{name}-fork.jsonl"))


async def fork(first: Agents, other: Agents, journal: FileJournal, at: str, into: FileJournal) -> None:
    async with engine(other, Clock(datetime(2026, 1, 2, tzinfo=UTC))) as one:
        try:
            await one.fork(journal, at=at, into=into, allow_repeat=True)
        except StepEngineError as error:
            if (
                "would be repeated" in str(error)
                or "would happen again" in str(error)
                or type(error) is StepEngineError
            ):
                return
            raise
    await replayed(first, into, await to_its_end([other], into))


def file_at(path: Path) -> FileJournal:
    """Return the journal in a file. Processes end here, the power stays: nothing has to wait for the disk."""
    return FileJournal(path, sync="write")


async def replayed(agents: Agents, journal: FileJournal, result: RunResult) -> None:
    async with engine(agents, Clock(datetime(2026, 1, 1, tzinfo=UTC))) as one:
        again = await one.replay(journal)
    assert (result.status, result.output, str(result.error)) == (again.status, again.output, str(again.error))
    assert result.state.message_history == again.state.message_history
    assert result.usage == again.usage


@pytest.mark.deep
@pytest.mark.anyio
@pytest.mark.spec("programs:PG42")
@pytest.mark.parametrize("part", range(16))
async def test_runs_resume_and_replay_with_and_without_the_sandbox(part: int, tmp_path: Path) -> None:
    for seed in range(part, 12 + MANY, 16):
        await carry(seed, tmp_path)
