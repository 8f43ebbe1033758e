"""
Journals of trees that wait, changed by somebody and sealed again: they are refused, or serve, and nobody waits for what never comes.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Generator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from stepengine import (
    AgentCall,
    AgentDefinition,
    Cancel,
    Engine,
    Perform,
    Race,
    Receive,
    Send,
    Sleep,
    Start,
    Wait,
)
from stepengine.cli.commands.show import show
from stepengine.cli.exits import run_explaining_errors
from stepengine.errors import HandlerError, JournalCorrupt, JournalError, JournalVersion, ReplayDivergence
from stepengine.journal import FileJournal, MemoryJournal
from stepengine.journal.show import make_run_tree, render
from stepengine.testing import ScriptedModel
from tests.cases import case

from .mutants import mutant, places, sealed, unsealed

CHUNK = 20
DEEP = 48
PATIENCE = 50.0
PATHS = ("", "0", "1", "2", "3", "9", "0.0", "1.0.0", "99999999", "0." * 40 + "0")
TIMES = (0, -1, 1, 2**31, 2**53, 2**63, 10**30, -(10**30))
KINDS = (
    "wait",
    "wait_result",
    "cancel",
    "send",
    "receive",
    "received_message",
    "sleep",
    "message",
    "rejected_message",
    "wake_time",
    "mailbox_message",
    "child_ref",
)
Handler = Generator[Any, Any, Any]


def did(what: str) -> str:
    return what


def quick(ctx: Any) -> Handler:
    return (yield from Perform(did, "quick"))


def hears(ctx: Any) -> Handler:
    return (yield from Receive("t", timeout=3_600))


def sleeps(ctx: Any) -> Handler:
    yield from Sleep(3_600)


def whole(ctx: Any) -> Handler:
    first, other = yield from Start(AgentCall("quick"), AgentCall("hears"))
    ended = yield from Wait(first)
    told = yield from Send(other, {"n": 1}, topic="t")
    heard = yield from Wait(other, timeout=3_600)
    last = yield from Start(AgentCall("sleeps"))
    won, _ = yield from Race(Sleep(3_600), Perform(did, "raced"), AgentCall("sleeps"))
    cancelled = yield from Cancel(last, "enough")
    yield from Sleep(0.001)
    if ctx.params["stays"]:
        yield from Start(AgentCall("hears"), AgentCall("sleeps"), on_return="wait")
        yield from Receive("t", timeout=7_200)
    return [len(ended.done), told, len(heard.done), won, cancelled.status.value]


def engine() -> Engine:
    small = [AgentDefinition(one.__name__, handle_steps=one) for one in (quick, hears, sleeps)]
    root = AgentDefinition("root", handle_steps=whole, spawnable_agents=["quick", "hears", "sleeps"])
    return Engine([root, *small], models=ScriptedModel([]), sleep_in_process=0.05)


@pytest.fixture(scope="module")
def good() -> list[list[bytes]]:
    """The lines of a journal of a tree that has ended, of one that waits, and of one that was killed."""

    async def record(journal: MemoryJournal, *, stays: bool) -> str:
        built = engine()
        result = await built.run("root", params={"stays": stays}, journal=journal)
        again = await built.replay(MemoryJournal(journal.lines()))
        assert again == result
        return result.status.value

    ended, waiting = MemoryJournal(link=True), MemoryJournal(link=True)
    assert asyncio.run(record(ended, stays=False)) == "completed"
    assert asyncio.run(record(waiting, stays=True)) == "suspended"
    return [ended.lines(), waiting.lines(), waiting.lines()[: len(waiting.lines()) // 2]]


def aimed(lines: list[bytes], random: Random) -> bytes:
    """Return another journal: what its waits, messages and ends say of runs and times is something else."""
    records = unsealed(lines)
    for _ in range(random.randint(1, 2)):
        random.choice([_moved, _moved, _retold, _retold, _retimed, _repeated, _without_an_end, _another_end])(
            records, random
        )
    return sealed(records)


def _of_waits(record: dict[str, Any]) -> bool:
    said = record.get("effect") or record.get("value") or record.get("input")
    return isinstance(said, dict) and said.get("type") in KINDS


def _ends(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [one for one in records if one["kind"] == "result" and one["seq"] == -1]


def _moved(records: list[dict[str, Any]], random: Random) -> None:
    """Let a record be about another run or effect."""
    one = random.choice([one for one in records if _of_waits(one)] + _ends(records))
    one["path"] = random.choice(PATHS)
    one["seq"] = random.choice([one["seq"], -1, 0, 1, 10**9])


def _retold(records: list[dict[str, Any]], random: Random) -> None:
    """Let what is said of children, messages and numbers be something else."""
    found = [
        (holder, key)
        for record in records
        if _of_waits(record)
        for holder, key in places(record)
        if key in ("children", "done", "child", "need", "id", "topic", "path") and holder is not record
    ]
    holder, key = random.choice(found)
    many = [random.choice(PATHS) for _ in range(random.randint(0, 4))]
    holder[key] = random.choice([many, random.choice(PATHS), random.choice(TIMES), ["1"] * 1_000, holder[key]])


def _retimed(records: list[dict[str, Any]], random: Random) -> None:
    found = [(holder, key) for holder, key in places(records) if key in ("until", "at", "seconds", "timeout")]
    holder, key = random.choice(found)
    holder[key] = random.choice(TIMES)


def _repeated(records: list[dict[str, Any]], random: Random) -> None:
    one = random.choice([one for one in records if _of_waits(one)] + _ends(records))
    records.insert(random.randint(2, len(records)), json.loads(json.dumps(one)))


def _without_an_end(records: list[dict[str, Any]], random: Random) -> None:
    """Let a child that its parent was told of, or anything else of the waits, have no end."""
    known = _ends(records) or [one for one in records if _of_waits(one)]
    records.remove(random.choice(known))


def _another_end(records: list[dict[str, Any]], random: Random) -> None:
    """Let a run have an end at its own path that has another, or none."""
    end: dict[str, Any] = {
        "kind": "result",
        "path": random.choice(PATHS),
        "seq": -1,
        "at": random.choice([0, 1, 5, 10**9]),
    }
    value: dict[str, Any] = {"type": "child_result", "agent_id": random.choice(["quick", "hears", "x"]), "run_id": "r"}
    value |= {"status": random.choice(["completed", "suspended", "cancelled", "failed"]), "output": 1}
    records.insert(random.randint(2, len(records)), {**end, "value": value})


def judge(where: str, act: Callable[[], Any]) -> str:
    """Return what came of reading a mutant; fail for what is no documented error."""
    try:
        error = getattr(act(), "error", None)
    except Exception as raised:
        error = raised
    if error is None or isinstance(error, HandlerError):
        return "served"
    assert isinstance(error, JournalError), f"{where}: {type(error).__name__}: {error}"
    known = isinstance(error, JournalCorrupt | JournalVersion | ReplayDivergence)
    assert known or type(error) is JournalError, (where, error)
    return type(error).__name__


def ways(data: bytes, path: Path) -> dict[str, Callable[[], Any]]:
    path.write_bytes(data)

    async def in_time(act: Callable[[Engine], Any]) -> Any:
        return await asyncio.wait_for(act(engine()), PATIENCE)

    def resumed(*, now: bool) -> Any:
        path.write_bytes(data)
        journal = FileJournal(path, sync="write")
        return asyncio.run(in_time(lambda built: built.resume(journal, in_doubt="retry", now=now)))

    return {
        "replay": lambda: asyncio.run(in_time(lambda built: built.replay(MemoryJournal(data)))),
        "tree": lambda: render(make_run_tree(MemoryJournal(data))),
        "show": lambda: run_explaining_errors(lambda: show(str(path))),
        "resume": lambda: resumed(now=False),
        "wake": lambda: resumed(now=True),
    }


def fuzz(chunk: int, good: list[list[bytes]], path: Path) -> Counter[str]:
    came: Counter[str] = Counter()
    for number in range(chunk * CHUNK, (chunk + 1) * CHUNK):
        random = Random(number)
        lines = random.choice(good)
        data = mutant(lines, random) if random.random() < 0.2 else aimed(lines, random)
        for way, act in ways(data, path).items():
            came[judge(f"mutant {number}, {way}", act)] += 1
    return came


@pytest.mark.spec("reliability:JR02", "reliability:R22")
@pytest.mark.parametrize("chunk", [0, *[pytest.param(n, marks=pytest.mark.deep) for n in range(1, DEEP)]])
def test_mutated_waiting_tree_is_rejected_or_works_and_ends(
    chunk: int, good: list[list[bytes]], tmp_path: Path
) -> None:
    came = fuzz(chunk, good, tmp_path / "mutant.jsonl")

    assert came["served"] > 10
    assert came["JournalCorrupt"] > 10


@pytest.mark.spec("reliability:JR02")
def test_recorded_end_of_a_child_without_an_end_is_rejected(good: list[list[bytes]], tmp_path: Path) -> None:
    whole = unsealed(good[0])
    for end in [one for one in _ends(whole) if one["path"]]:
        data = sealed([one for one in whole if one is not end])
        for way in ("replay", "resume"):
            with pytest.raises(
                JournalError, match=f"reports the end of the child at '{end['path']}', which has not ended"
            ):
                ways(data, tmp_path / "run.jsonl")[way]().unwrap()


@pytest.mark.spec("reliability:JR02")
@pytest.mark.parametrize(
    "change",
    [lambda told: {"done": []}, lambda told: {"done": told["done"] * 2}, lambda told: {"open": ["2"]}],
    ids=["no_end", "an_end_twice", "a_stranger"],
)
@pytest.mark.parametrize("kind", ["wait", "cancel"])
def test_wait_that_reports_other_ends_than_asked_is_rejected(
    kind: str, change: Callable[[Any], Any], good: list[list[bytes]], tmp_path: Path
) -> None:
    whole = unsealed(good[0])
    asked = next(one for one in whole if one.get("effect", {}).get("type") == kind and not one["effect"].get("timeout"))
    answer = next(
        one for one in whole if one["kind"] == "result" and (one["path"], one["seq"]) == (asked["path"], asked["seq"])
    )
    answer["value"] |= change(answer["value"])
    acts = ways(sealed(whole), tmp_path / "run.jsonl")

    for way in ("replay", "resume"):
        with (
            case(way),
            pytest.raises(
                JournalError, match="it reports too few ended children, or children that the wait does not name"
            ),
        ):
            acts[way]().unwrap()


@pytest.mark.spec("reliability:JR02")
def test_child_recorded_at_another_path_is_rejected(good: list[list[bytes]], tmp_path: Path) -> None:
    whole = unsealed(good[0])
    ref = next(one["value"] for one in whole if one["kind"] == "result" and one["value"].get("type") == "child_ref")
    ref["path"] = "1"

    acts = ways(sealed(whole), tmp_path / "run.jsonl")
    with pytest.raises(JournalCorrupt, match="the child that is started there is at '0', not at '1'"):
        acts["tree"]()
    with pytest.raises(JournalError):
        acts["replay"]().unwrap()
