"""
Measure resuming a long run by replay: ``python -m benchmarks.resuming [EFFECTS] [MODEL_CALLS]``.

Two runs stop at a question. A process of its own resumes each of them from its file with the answer. No function and no model is called
again.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

from stepengine import STEP, AgentDefinition, Ask, Engine, Limits, Perform
from stepengine.journal import FileJournal
from stepengine.testing import ScriptedModel, text

LIMITS = Limits(max_actions=1_000_000, max_steps=1_000_000)
ANSWER = "yes"


def effects(ctx: Any) -> Generator[Any, Any, str]:
    """Perform as many functions as the prompt says, then ask."""
    for number in range(int(ctx.prompt)):
        got = yield from Perform(abs, number)
        assert got == number
    return (yield from Ask("Go on?"))


def calls(ctx: Any) -> Generator[Any, Any, str]:
    """Make as many model calls as the prompt says, then ask."""
    for _ in range(int(ctx.prompt)):
        yield STEP
    return (yield from Ask("Go on?"))


AGENTS = [
    AgentDefinition("effects", handle_steps=effects, limits=LIMITS),
    AgentDefinition("calls", model="test/model", handle_steps=calls, limits=LIMITS),
]


def record(agent: str, count: int, path: Path) -> str:
    """Record a run up to its question, and return the question's id."""
    replies = [text(f"reply {number}") for number in range(count if agent == "calls" else 0)]
    with Engine(AGENTS, models=ScriptedModel(replies)) as engine:
        result = engine.run_sync(agent, str(count), journal=FileJournal(path, sync="write"))
    assert result.status == "suspended", result.error
    return result.pending_questions[0].id


def peak() -> float:
    """Return the most memory that this process had, in MB. ``getrusage`` would include that of the process which started it."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.split("VmHWM:")[1].split()[0]) * 1_024 / 1e6


async def resume(path: Path, question: str) -> None:
    """Resume the run with the answer, and print what that took."""
    before, began = peak(), time.process_time()
    async with Engine(AGENTS, models=ScriptedModel([])) as engine:
        journal = FileJournal(path, sync="write")
        result = await engine.resume(journal, answers={question: ANSWER})
    spent = time.process_time() - began
    assert result.output == ANSWER, result.error
    print(f"{spent:.2f} s of CPU, {peak() - before:.0f} MB of memory")


def main() -> None:
    """Record and resume both runs."""
    if sys.argv[1:2] == ["--resume"]:
        asyncio.run(resume(Path(sys.argv[2]), sys.argv[3]))
        return
    counts = dict(zip(("effects", "calls"), [*map(int, sys.argv[1:]), 50_000, 1_000], strict=False))
    with tempfile.TemporaryDirectory() as folder:
        for agent, count in counts.items():
            path = Path(folder) / f"{agent}.jsonl"
            question = record(agent, count, path)
            size = path.stat().st_size / 1e6
            command = [sys.executable, "-m", "benchmarks.resuming", "--resume", str(path), question]
            took = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
            print(f"{count:,} {agent}: a journal of {size:.1f} MB, resumed in {took}", flush=True)


if __name__ == "__main__":
    main()
