"""
Random trees of runs that wait: recorded, cut after any record, resumed as often as they are suspended, and replayed.

A program is data: what a handler, or the body of a tool, yields one after the other, with children in the background, races,
questions, messages, sleeps of milliseconds and of hours, failures and limits.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Generator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from stepengine import (
    AgentCall,
    AgentDefinition,
    Ask,
    Cancel,
    Engine,
    Hooks,
    Limits,
    Parallel,
    Perform,
    Race,
    Receive,
    RunResult,
    Send,
    Sleep,
    Start,
    ToolCall,
    Wait,
    tool,
)
from stepengine.errors import StepEngineError
from stepengine.journal import FileJournal
from stepengine.testing import ScriptedModel
from tests.engine.clocks import ShiftedClock

pytestmark = pytest.mark.deep

Handler = Generator[Any, Any, Any]
HOUR = 3_600
PATIENCE = 20.0
DONE: Counter[str] = Counter()
MEMBERS = ("sleep", "far", "perform", "slow", "failing", "receive", "tool", "body", "ask")


def program(rng: random.Random, depth: int, length: int) -> list[dict[str, Any]]:
    """Return random instructions; deeper ones start no runs."""
    kinds = ["perform", "sleep", "far", "receive", "race", "parallel", "tool", "ask", "failing"]
    if depth < 3:
        kinds += ["start", "start", "agent", "limited", "wait", "wait", "wait", "cancel", "tell", "body", "group"]
    return [one_of(rng, depth, rng.choice(kinds)) for _ in range(length)]


def one_of(rng: random.Random, depth: int, kind: str) -> dict[str, Any]:
    made: dict[str, Any] = {"kind": kind, "seconds": rng.choice([0, 0.001, 0.003, 0.01])}
    if kind == "far":
        made["seconds"] = rng.choice([HOUR, 2 * HOUR])
    if kind in ("start", "agent", "limited", "body", "group"):
        made["program"] = program(rng, depth + 1, rng.randint(0, 4))
        made["on_return"], made["count"] = rng.choice(["cancel", "wait"]), rng.randint(1, 2)
    if kind == "wait":
        made["need"], made["timeout"] = rng.choice(["all", "any", 0]), rng.choice([None, None, 0.002, 0.02, HOUR])
    if kind == "receive":
        made["timeout"] = rng.choice([0.003, HOUR])
    if kind in ("race", "parallel", "group"):
        other = {"race": ["parallel", "race"], "parallel": ["race"], "group": []}[kind] if depth < 4 else []
        kinds = [*MEMBERS, *other, *(["agent", "agent"] if depth < 3 else [])]
        chosen = [rng.choice(kinds) for _ in range(rng.randint(1, 3))]
        if kind == "group":
            chosen += ["agent"]
        made["members"] = [one_of(rng, depth + 1 if name in ("agent", "body") else 4, name) for name in chosen]
    return made


async def slow(key: str) -> str:
    await asyncio.sleep(0.004)
    DONE[key] += 1
    return key


def quick(key: str) -> str:
    DONE[key] += 1
    return key


def broken(key: str) -> str:
    msg = f"{key} is broken"
    raise ValueError(msg)


@tool
def note(key: str) -> str:
    """Note."""
    return quick(key)


@tool
def carry(key: str, program: list[Any]) -> Handler:
    """Carry a program out."""
    log = yield from carried_out(program, key)
    return str(log)


def member(made: dict[str, Any], key: str) -> Any:
    match made["kind"]:
        case "sleep" | "far":
            return Sleep(made["seconds"])
        case "perform":
            return Perform(quick, key)
        case "slow":
            return Perform(slow, key)
        case "failing":
            return Perform(broken, key)
        case "receive":
            return Receive("t", timeout=made["timeout"])
        case "tool":
            return ToolCall(note, {"key": key})
        case "body":
            return ToolCall(carry, {"key": key, "program": made["program"]})
        case "ask":
            return Ask(f"{key}?")
        case "agent":
            return AgentCall("node", params={"program": made["program"], "key": key})
        case "limited":
            return AgentCall("limited", params={"program": made["program"], "key": key})
        case "parallel" | "group" | "race" as kind:
            members = [member(one, f"{key}.{n}") for n, one in enumerate(made["members"])]
            return Race(*members) if kind == "race" else Parallel(*members, fail_fast=kind == "group")
        case _:
            raise AssertionError(made)


def shown(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [shown(one) for one in value]
    if isinstance(value, datetime | Exception):
        return type(value).__name__
    if hasattr(value, "output"):
        return [value.status.value, value.output]
    return getattr(value, "text", value)


def carried_out(program: list[Any], key: str) -> Handler:
    refs: list[Any] = []
    log: list[Any] = []
    for number, made in enumerate(program):
        at, kind = f"{key}/{number}", made["kind"]
        try:
            if kind == "start":
                calls = [member({**made, "kind": "agent"}, f"{at}.{n}") for n in range(made["count"])]
                got = yield from Start(*calls, on_return=made["on_return"])
                refs += got if len(calls) > 1 else [got]
            elif kind == "wait":
                waited = yield from Wait(*refs, need=made["need"], timeout=made["timeout"])
                log.append([shown(waited.done), len(waited.open)])
            elif kind == "tell" and refs:
                log.append((yield from Send(refs[-1], {"says": at}, topic="t")))
            elif kind == "cancel" and refs:
                log.append(shown((yield from Cancel(refs[0], "enough"))))
            elif kind not in ("tell", "cancel"):
                log.append(shown((yield from member(made, at))))
        except StepEngineError as error:
            log.append(type(error).__name__)
    return log


def handle(ctx: Any) -> Handler:
    log = yield from carried_out(ctx.params["program"], ctx.params["key"])
    if len(log) > 3:
        msg = f"{ctx.params['key']} had enough"
        raise RuntimeError(msg)
    return log


def naps(ctx: Any, *_: Any) -> Handler:
    yield from Sleep(0.001)


def engine(clock: ShiftedClock) -> Engine:
    fields: dict[str, Any] = {
        "model": "test/m",
        "handle_steps": handle,
        "spawnable_agents": ["node", "limited"],
        "tools": [note, carry],
    }
    node = AgentDefinition("node", **fields, hooks=Hooks(pre_run=naps, pre_tool=naps))
    limited = AgentDefinition("limited", **fields, limits=Limits(max_seconds=2))
    root = AgentDefinition("root", **{**fields, "handle_steps": whole})
    return Engine([root, node, limited], models=ScriptedModel([]), clock=clock)


def whole(ctx: Any) -> Handler:
    log = yield from carried_out(ctx.params["program"], ctx.params["key"])
    return log


async def in_time(work: Any) -> Any:
    return await asyncio.wait_for(work, PATIENCE)


async def to_the_end(
    engine: Engine, clock: ShiftedClock, journal: FileJournal, result: RunResult, rng: random.Random
) -> RunResult:
    """Answer, post and sleep until a run has ended."""
    for turn in range(60):
        if result.status != "suspended":
            return result
        assert result.waits_for, result
        questions = [one.question for one in result.waits_for if one.question is not None]
        assert {one.id for one in questions} == {one.id for one in result.pending_questions}, (
            result.waits_for,
            result.pending_questions,
        )
        chosen = rng.sample(questions, rng.randint(1, len(questions))) if questions else []
        topics = [one.path for one in result.waits_for if one.kind == "message"]
        if topics and rng.random() < 0.5:
            await engine.send_message(journal, "t", {"turn": turn}, path=rng.choice(topics))
        elif result.wakes_at is not None and (not chosen or rng.random() < 0.5):
            clock.ahead = max(clock.ahead, result.wakes_at - datetime.now(UTC) + timedelta(milliseconds=2))
        elif not chosen:
            raise AssertionError(("waits for nothing that comes", result.waits_for))
        result = await in_time(engine.resume(journal, answers={one.id: "yes" for one in chosen}, in_doubt="retry"))
    raise AssertionError(("does not end", result.waits_for))


def known_in(journal: FileJournal) -> set[str]:
    history = journal.history()
    values = [getattr(history.outcome(result), "value", None) for result in history.results.values()]
    return {value for value in values if isinstance(value, str)}


async def check(seed: int, folder: Path, cuts: int = 3) -> None:  # noqa: PLR0915 - one story
    """Run one program, and whatever may become of its journal."""
    rng = random.Random(seed)
    made = program(rng, 0, rng.randint(2, 6))
    clock = ShiftedClock()
    built = engine(clock)
    journal = FileJournal(folder / "run.jsonl")
    DONE.clear()
    result = await in_time(built.run("root", params={"program": made, "key": "p"}, journal=journal))
    first = await in_time(built.replay(journal))
    assert first == result, ("replay of what is suspended", first, result)
    result = await to_the_end(built, clock, journal, result, rng)
    assert result.status == "completed", (result.status, result.error)
    again = await in_time(built.replay(journal))
    assert again == result, ("replay", again.output, result.output, again.error)
    lines = (folder / "run.jsonl").read_bytes().splitlines(keepends=True)
    for cut in sorted({rng.randint(2, len(lines)) for _ in range(cuts)}):
        copy = FileJournal(folder / f"cut{cut}.jsonl")
        (folder / f"cut{cut}.jsonl").write_bytes(b"".join(lines[:cut]))
        before = known_in(copy)
        DONE.clear()
        clock.ahead = timedelta()
        try:
            resumed = await in_time(built.resume(copy, in_doubt="retry"))
            resumed = await to_the_end(built, clock, copy, resumed, rng)
            assert resumed.status == "completed", (resumed.status, resumed.error)
            assert not before & set(DONE), ("done again", before & set(DONE))
            assert set(DONE.values()) <= {1}, DONE
            again = await in_time(built.replay(copy))
            assert again == resumed, ("replay", again.output, resumed.output, again.error)
        except BaseException as error:
            error.add_note(f"seed {seed}, cut after {cut} of {len(lines)}: {copy.path}")
            raise
    history = journal.history()
    addresses = [address for address in history.results if address[1] >= 0]
    for path, seq in rng.sample(addresses, min(len(addresses), cuts)):
        clock.ahead = timedelta()
        fork = FileJournal(folder / f"fork{path}-{seq}.jsonl")
        try:
            forked = await in_time(built.fork(journal, at=f"{path}#{seq}", into=fork, allow_repeat=True))
            forked = await to_the_end(built, clock, fork, forked, rng)
            assert forked.status == "completed", (forked.status, forked.error)
            again = await in_time(built.replay(fork))
            assert again == forked, ("replay", again.output, forked.output, again.error)
        except BaseException as error:
            error.add_note(f"seed {seed}, fork at {path}#{seq}: {fork.path}")
            if (
                type(error) is StepEngineError
                or "would be repeated" in str(error)
                or "would happen again" in str(error)
            ):
                continue
            raise


def asks(ctx: Any) -> Handler:
    return (yield from Ask("Go?"))


@tool
def asked() -> Handler:
    """Ask."""
    return (yield from Ask("Sure?"))


@pytest.mark.spec("waiting:WT5")
@pytest.mark.parametrize("member", [AgentCall("asks"), ToolCall(asked)], ids=["child", "body of a tool"])
async def test_race_with_an_asking_member_is_suspended_and_replayed(tmp_path: Path, member: Any) -> None:
    def races(ctx: Any) -> Handler:
        return (yield from Race(Sleep(HOUR), member))[0]

    clock = ShiftedClock()
    agents = [
        AgentDefinition("asks", handle_steps=asks),
        AgentDefinition("root", handle_steps=races, spawnable_agents=["asks"], tools=[asked]),
    ]
    built, journal = Engine(agents, models=ScriptedModel([]), clock=clock), FileJournal(tmp_path / "run.jsonl")
    waiting = await in_time(built.run("root", journal=journal))
    clock.ahead = timedelta(hours=2)
    result = await in_time(built.resume(journal))

    assert (waiting.status, {one.kind for one in waiting.waits_for}) == ("suspended", {"time", "question"})
    assert (result.status, result.output) == ("completed", 0)
    assert await in_time(built.replay(journal)) == result


FOUND = (22, 55, 77, 83, 93, 96, 99, 114, 116, 118, 283, 307, 336, 533)
"""Programs that went wrong once."""


@pytest.mark.spec("waiting:WT3", "waiting:WT5")
@pytest.mark.parametrize("first", [*FOUND, *range(200, 220, 4)])
async def test_waiting_tree_resumes_from_any_record_without_repeats(first: int, tmp_path: Path) -> None:
    for seed in range(first, first + (1 if first in FOUND else 4)):
        folder = tmp_path / str(seed)
        folder.mkdir()
        await check(seed, folder)
