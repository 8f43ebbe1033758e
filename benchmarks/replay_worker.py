"""
Measures journals, for W4, in a fresh process: ``python -m benchmarks.replay_worker KIND N``.

KIND ``journal``: CPU microseconds per step of one run of N steps without a journal, with each kind of journal, and repeated
from its journal; those that a promise is about as often as by ``recorded``; in a file also while the process knows five keys; with the file's syncs and the CPU of reading it; and the floors
of these. KIND ``growth``: the same of a very long run, once, without a journal and with each kind. KIND ``recorded``: the best of
several runs without a journal and with each kind that a promise is about. KIND ``resume``: CPU seconds of resuming a journal of N records whose last effects are missing.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Collection
from hashlib import sha256
from pathlib import Path
from typing import Any

from benchmarks.engines.stepengine import engine_for
from benchmarks.journal_floor import floors
from benchmarks.judging import KINDS
from stepengine import Engine, RunResult
from stepengine.journal import FileJournal, Journal, MemoryJournal, SqliteJournal
from stepengine.redaction import GIVEN

REPEATS = 3
LONG = 5_000
"""Steps from which a run onto a disk is measured once."""

SHORT_REPEATS = 10_000
"""A run of fewer steps is repeated until it had about so many of them."""

RECORDS_PER_STEP = 4
SYNCS = ("fsync", "fdatasync")


class Syncs:
    """Counts how often the operating system is asked to put something on disk."""

    def __init__(self) -> None:
        self.count = 0
        for name in SYNCS:
            if hasattr(os, name):
                setattr(os, name, self._counting(getattr(os, name)))

    def _counting(self, sync: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            self.count += 1
            return sync(*args)

        return counted


def cpu(work: Callable[[], Any]) -> tuple[float, Any]:
    """Return the CPU seconds of *work* and what it returned."""
    gc.collect()
    start = time.process_time()
    made = work()
    return time.process_time() - start, made


def checked(result: RunResult, steps: int) -> RunResult:
    """Refuse a measurement of work that was not done."""
    result.unwrap()
    if len(result.tool_calls) != steps:
        msg = f"{len(result.tool_calls)} tools were called in {steps} steps"
        raise SystemExit(msg)
    return result


def best_of(steps: int, run: Callable[[], Awaitable[RunResult]], repeats: int = REPEATS) -> float:
    """Return CPU microseconds per step, the best of a few runs."""

    async def one() -> RunResult:
        return await run()

    return min(cpu(lambda: checked(asyncio.run(one()), steps))[0] for _ in range(repeats)) / steps * 1e6


def journals(folder: Path) -> dict[str, Callable[[], Journal]]:
    """Return what makes a fresh journal of each kind."""
    numbers = iter(range(10_000))
    return {
        "memory": MemoryJournal,
        "file, to the disk": lambda: FileJournal(folder / f"{next(numbers)}.jsonl"),
        "file, to the system": lambda: FileJournal(folder / f"{next(numbers)}.jsonl", sync="write"),
        "sqlite": lambda: SqliteJournal(folder / f"{next(numbers)}.db"),
    }


def syncs_per_effect(folder: Path, syncs: Syncs, steps: int) -> float:
    """Return how often each further effect of a longer run is synced; making the file costs a few, once."""
    counts = []
    for number in (1, steps):
        before = syncs.count
        journal = FileJournal(folder / f"syncs-{number}.jsonl")
        asyncio.run(engine_for(number).run("adder", "add", journal=journal))
        counts.append(syncs.count - before)
    return (counts[1] - counts[0]) / (2 * (steps - 1))


def recorded(engine: Engine) -> MemoryJournal:
    """Return the journal of a run."""
    made = MemoryJournal()
    asyncio.run(engine.run("adder", "add", journal=made))
    return made


def journal(steps: int) -> dict[str, Any]:
    """Measure recording and repeating a run."""
    engine = engine_for(steps)
    syncs = Syncs()
    found = recorded_run(steps)
    with tempfile.TemporaryDirectory() as name:
        for kind, make in journals(Path(name)).items():
            if kind not in KINDS:
                repeats = 1 if steps >= LONG else REPEATS
                found[kind] = best_of(steps, lambda make=make: engine.run("adder", "add", journal=make()), repeats)
        found["syncs per effect"] = syncs_per_effect(Path(name), syncs, steps)
        file = FileJournal(Path(name) / "kept.jsonl", sync="write")
        recorded(engine).copy_to(file)
        # A journal in memory keeps fingerprints once they were computed, so each of these is replayed once only.
        kept = [recorded(engine) for _ in range(REPEATS)]
        before = syncs.count
        found["replay, memory"] = best_of(steps, lambda: engine.replay(kept.pop(), agent="adder"))
        found["replay, file"] = best_of(steps, lambda: engine.replay(file, agent="adder"))
        found["reading the file"] = min(cpu(file.history)[0] for _ in range(REPEATS)) / steps * 1e6
        found["syncs of reading"] = syncs.count - before
        found |= floors(steps, Path(name), lambda work: min(cpu(work)[0] for _ in range(REPEATS)) / steps * 1e6)
        # Last of all: what a process was told it knows for good.
        for number in range(5):
            GIVEN.add(f"sk-ant-{sha256(str(number).encode()).hexdigest()}", f"KEY_{number}")
        (Path(name) / "keys").mkdir()
        kind, make = "file, to the system", journals(Path(name) / "keys")["file, to the system"]
        found[f"{kind}, five keys"] = best_of(
            steps, lambda: engine.run("adder", "add", journal=make()), count_repeats(steps)
        )
    return found


def recording(steps: int, kinds: Collection[str], repeats: int) -> dict[str, Any]:
    """Measure a run without a journal, and recording it in some kinds."""
    engine = engine_for(steps)
    found: dict[str, Any] = {"no journal": best_of(steps, lambda: engine.run("adder", "add"), repeats)}
    with tempfile.TemporaryDirectory() as name:
        made = journals(Path(name))
        for kind in kinds or made:
            found[kind] = best_of(steps, lambda kind=kind: engine.run("adder", "add", journal=made[kind]()), repeats)
    return found


def growth(steps: int) -> dict[str, Any]:
    """Measure recording a very long run."""
    return recording(steps, (), 1)


def recorded_run(steps: int) -> dict[str, Any]:
    """Measure recording a run in the kinds of journals that promises are about, short runs more often."""
    return recording(steps, KINDS, count_repeats(steps))


def count_repeats(steps: int) -> int:
    """Return how often a run that a promise is about is repeated."""
    return max(REPEATS, SHORT_REPEATS // steps)


def resume(records: int) -> dict[str, Any]:
    """Measure going on with a run that was interrupted before its last step."""
    steps = records // RECORDS_PER_STEP
    engine = engine_for(steps)
    whole = MemoryJournal()
    asyncio.run(engine.run("adder", "add", journal=whole))
    lines = whole.lines()[: records - RECORDS_PER_STEP]

    async def one(journal: Journal) -> RunResult:
        return await engine.resume(journal, agent="adder")

    best = float("inf")
    for _ in range(REPEATS):
        spent, result = cpu(lambda: asyncio.run(one(MemoryJournal(lines))))
        checked(result, steps)
        best = min(best, spent)
    return {"resuming": best, "resuming, us per record": best / len(lines) * 1e6}


def main() -> None:
    """Measure what the command line asks for."""
    kind, count = sys.argv[1], int(sys.argv[2])
    print(json.dumps({"journal": journal, "growth": growth, "recorded": recorded_run, "resume": resume}[kind](count)))


if __name__ == "__main__":
    main()
