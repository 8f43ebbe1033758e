"""
Measures recording and replaying (W4) in a fresh process: ``python -m benchmarks.replay_worker KIND N``.

KIND ``journal``: CPU microseconds per step of one run of N steps without a journal, with each kind of journal, and repeated
from its journal; with the file's syncs and the CPU of reading it. KIND ``resume``: CPU seconds of resuming a journal of N
records whose last effects are missing. KIND ``cassette``: CPU seconds of N requests of a growing conversation, played by
vcrpy with its body matcher and by our transport, from one file.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx2

from benchmarks.engines.stepengine import engine_for
from stepengine import Engine, RunResult
from stepengine.journal import FileJournal, Journal, MemoryJournal, SqliteJournal
from stepengine.testing import Cassette, ReplayTransport
from stepengine.testing.cassette_files import Interaction, RecordedRequest, RecordedResponse, dump_cassette

REPEATS = 3
LONG = 5_000
"""Steps from which a run onto a disk is measured once."""

RECORDS_PER_STEP = 4
WORDS = (
    "the",
    "reader",
    "of",
    "a",
    "file",
    "looks",
    "at",
    "every",
    "line",
    "and",
    "tells",
    "what",
    "it",
    "found",
    "there",
)
MESSAGE = " ".join([WORDS[n * n % len(WORDS)] for n in range(230)])
"""The text of each message, about 1 kB as in the measurements of the specification."""

URL = "https://api.benchmark.test/v1/messages"
JSON = (("content-type", "application/json"),)
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
    found: dict[str, Any] = {"no journal": best_of(steps, lambda: engine.run("adder", "add"))}
    with tempfile.TemporaryDirectory() as name:
        for kind, make in journals(Path(name)).items():
            repeats = 1 if steps >= LONG and kind != "memory" else REPEATS
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
    return found


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
    return {"seconds": best, "us_per_record": best / len(lines) * 1e6}


def conversation(steps: int) -> list[dict[str, Any]]:
    """Return the bodies of a run's requests: each holds the one before and two more messages."""
    texts = [{"role": "assistant" if n % 2 else "user", "content": f"{n} {MESSAGE}"} for n in range(2 * steps)]
    return [{"model": "m", "messages": texts[: 2 * n + 1]} for n in range(steps)]


def _written(talks: list[Interaction], path: Path) -> Path:
    path.write_bytes(dump_cassette(talks))
    return path


def cassette(steps: int) -> dict[str, Any]:
    """Measure one file played by vcrpy and by us; every answer is looked at."""
    import vcr

    bodies = conversation(steps)
    talks = [
        Interaction(
            RecordedRequest("POST", URL, JSON, json.dumps(body).encode()),
            RecordedResponse(200, "OK", JSON, json.dumps({"step": n}).encode()),
        )
        for n, body in enumerate(bodies)
    ]

    def play(transport: Any = None) -> None:
        with httpx2.Client(transport=transport) as client:
            for n, body in enumerate(bodies):
                got = client.post(URL, json=body).json()["step"]
                if got != n:
                    msg = f"step {n} was answered as step {got}"
                    raise SystemExit(msg)

    with tempfile.TemporaryDirectory() as name:
        path = _written(talks, Path(name) / "c.yaml")
        small = Cassette.load(_written(talks[:1], path.with_name("small.yaml")))
        with httpx2.Client(transport=ReplayTransport(small)) as client:
            client.post(URL, json=bodies[0])
        loading, held = cpu(lambda: Cassette.load(path))
        playing, _ = cpu(lambda: play(ReplayTransport(held)))
        settings = {"record_mode": "none", "match_on": ["method", "scheme", "host", "port", "path", "query", "body"]}

        tape = vcr.use_cassette(path, **settings)
        their_loading, _ = cpu(tape.__enter__)
        try:
            their_playing, _ = cpu(play)
        finally:
            tape.__exit__(None, None, None)
        ours, theirs = {"loading": loading, "playing": playing}, {"loading": their_loading, "playing": their_playing}
        return {"megabytes": path.stat().st_size / 1e6, "stepengine": ours, "vcrpy": theirs}


def main() -> None:
    """Measure what the command line asks for."""
    kind, count = sys.argv[1], int(sys.argv[2])
    measured = {"journal": journal, "resume": resume, "cassette": cassette}[kind](count)
    print(json.dumps(measured))


if __name__ == "__main__":
    main()
