"""
Many runs at once, for minutes, over real sockets and among faults; afterwards nothing of them may be left.

``python -m tests.soak --minutes 5`` keeps 1,000 runs under way at a time against a loopback server in a process of its own. They
call tools (plain, in threads, on files, in processes, failing ones), spawn children, are watched, recorded, interrupted and
cancelled; the server fails, cuts, delays and resets replies. When all runs of a round have ended, tasks, threads, processes,
descriptors, objects and memory are counted; rounds do the same work, so after the first ones no count may grow. Says what it
found, and ends with 1 when something was left behind.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import attrs

from stepengine import AgentDefinition, Engine, Limits, RetryPolicy, tool
from stepengine.journal import FileJournal, MemoryJournal
from stepengine.models import OpenAIChatProvider
from stepengine.tools.bundled import file_tools, shell_tools
from stepengine.workspace.threads import THREADS
from tests.faults.scripts import CHAT
from tests.faults.server import Answer, FaultServer, json_answer, sse

__all__ = ("Count", "grown", "main", "soaked")

FAULTS = 0.08
"""The share of requests that something happens to."""
ENDINGS = ("completed", "cancelled", "failed")
WARM = 3
"""Rounds before which nothing is compared: caches fill, pools reach their size."""
ROOT = Path(__file__).resolve().parents[1]


# --- the server -------------------------------------------------------------------------------------------------------


def _calls(number: int, step: int, *, is_child: bool) -> list[tuple[str, dict[str, Any]]]:
    """The tool calls of a run's step; none where it ends."""
    if is_child:
        return [("add", {"a": number, "b": step})] if step == 0 else []
    if step == 0:
        return [("add", {"a": number, "b": 1}), ("slow_add", {"a": number, "b": 2})]
    if step == 1:
        entries = [{"agent_type": "helper", "prompt": f"run {number}"} for _ in range(2)]
        return [
            [("spawn_agents", {"agents": entries})],
            [
                ("write_file", {"path": f"{number}.txt", "content": "x" * 200}),
                ("read_files", {"paths": [f"{number}.txt"]}),
            ],
            [("fail", {"why": "because"}), ("no_such_tool", {})],
        ][number % 3]
    if step == 2 and number % 50 == 0:
        return [("run_terminal_command", {"command": "true"})]
    return []


@attrs.define
class Faulty(FaultServer):
    """
    Answers each request by what it says, and some of them with a fault.
    """

    chance: Random = attrs.field(factory=lambda: Random(7))

    def answer(self, head: bytes, body: bytes) -> Answer:
        request = json.loads(body)
        messages = request["messages"]
        said = next(m["content"] for m in messages if m["role"] == "user")
        number = int((said if isinstance(said, str) else said[0]["text"]).split()[1])
        step = sum(m["role"] == "assistant" for m in messages)
        calls = _calls(number, step, is_child=messages[0]["content"] == "You help.")
        wire = [(name, json.dumps(given)) for name, given in calls]
        stream = CHAT.stream("" if calls else f"run {number} is done", wire, "tool_use" if calls else "end_turn")
        if self.chance.random() >= FAULTS:
            return sse(*stream, "fin")
        return self.chance.choice(
            [
                json_answer(CHAT.error("server_error", "down"), 500),
                json_answer(CHAT.error("rate_limit", "slowly"), 429, retry_after="0"),
                sse(*stream[:-2], "rst"),
                sse(*stream[:-2], "fin"),
                sse(*stream[:2], b"data: {no json\n\n", "fin"),
                sse(stream[0], 0.2, *stream[1:], "fin"),
            ]
        )


async def _serve() -> None:
    """Serve until stdin ends; the address is printed."""
    state = Faulty("", [])
    server = await asyncio.start_server(state.handle, "127.0.0.1", 0, backlog=2_000)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    os._exit(0)


@contextlib.contextmanager
def _server() -> Any:
    with subprocess.Popen(
        [sys.executable, "-m", "tests.soak", "--serve"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.stdin.close()
            process.wait(10)


# --- the runs ---------------------------------------------------------------------------------------------------------


@tool(requires_permission=False, parallel_safe=True)
async def add(a: int, b: int) -> int:
    """Add."""
    await asyncio.sleep(0.001)
    return a + b


@tool(requires_permission=False, parallel_safe=True)
def slow_add(a: int, b: int) -> int:
    """Add in a thread."""
    time.sleep(0.001)
    return a + b


@tool(requires_permission=False)
def fail(why: str) -> str:
    """Fail."""
    raise ValueError(why)


@contextlib.asynccontextmanager
async def _engine(url: str, folder: Path) -> Any:
    tools = [add, slow_add, fail, *file_tools(folder, write=True), *shell_tools(folder)]
    helper = AgentDefinition("helper", description="Helps.", tools=[add], system_prompt="You help.")
    worker = AgentDefinition(
        "worker",
        model="openai_chat/m",
        tools=["add", "slow_add", "fail", "read_files", "write_file", "run_terminal_command", "spawn_agents"],
        spawnable_agents=[helper],
        system_prompt="You work.",
    )
    model = OpenAIChatProvider("openai_chat", api_key="sk-none-0123456789", base_url=f"{url}/v1")
    retry = RetryPolicy(attempts=4, base_seconds=0.05, cap_seconds=0.2)
    engine = Engine([worker], tools, model, retry=retry, limits=Limits(max_steps=10), pricing=None)
    async with engine:
        yield engine


async def _one(engine: Engine, number: int, folder: Path) -> str:
    """One run, as its number says: recorded or not, watched or not, left to end or not. Returns how it ended."""
    chance = Random(number)
    journal: Any = None
    if number % 10 == 3:
        journal = FileJournal(folder / f"{number}.jsonl")
    elif number % 3 == 0:
        journal = MemoryJournal()
    handle = engine.start("worker", f"run {number}", journal=journal)
    watching = asyncio.create_task(_watched(handle)) if number % 4 == 0 else None
    if number % 8 == 5:
        _stuck = handle.events()  # a reader that never reads
    if number % 10 == 7:
        asyncio.get_running_loop().call_later(chance.random() * 0.5, handle.interrupt)
    if number % 25 == 11:
        await asyncio.sleep(chance.random() * 0.5)
        await handle.shutdown()
    result = await handle.result()
    ending = result.status.value if result.status.value != "failed" else f"failed: {str(result.error)[:80]}"
    if watching is not None:
        await watching
    if isinstance(journal, FileJournal):
        os.unlink(journal.path)  # noqa: PTH108  (a file of a temporary folder)
    return ending


async def _watched(handle: Any) -> None:
    async for _ in handle.events():
        pass


# --- what is counted --------------------------------------------------------------------------------------------------


@attrs.frozen
class Count:
    """
    What there is when all runs of a round have ended; *mib* is the resident memory.
    """

    tasks: int
    threads: int
    processes: int
    descriptors: int
    objects: int
    mib: float


def _counted(server: int) -> Count:
    for _ in range(3):
        gc.collect()
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Count(
        tasks=len(asyncio.all_tasks()) - 1 if asyncio._get_running_loop() is not None else 0,
        threads=threading.active_count(),
        processes=len(set(children) - {str(server)}),
        descriptors=len(list(Path("/proc/self/fd").iterdir())),
        objects=len(gc.get_objects()),
        mib=pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
    )


def _settled(server: int, before: Count) -> Count:
    """Count once threads and descriptors are as they were, or after ten seconds: a thread that was told to end needs a moment."""
    for _ in range(100):
        after = _counted(server)
        if after.threads <= before.threads and after.descriptors <= before.descriptors:
            break
        time.sleep(0.1)
    return after


def grown(counts: Sequence[Count]) -> list[str]:
    """
    Return what grew from round to round, after the first ones.

    Tasks and processes must be none. Threads and descriptors belong to pools, whose size the first rounds have shown. Objects
    and memory of the later half are compared with those of the earlier: the least of each, which no accident raises.
    """
    problems = [
        f"{count.tasks} tasks and {count.processes} processes were left"
        for count in counts
        if count.tasks or count.processes
    ]
    rest = counts[WARM:] if len(counts) > WARM + 1 else counts[1:]
    earlier, later = rest[: (len(rest) + 1) // 2], rest[(len(rest) + 1) // 2 :]
    if not later:
        return [*problems, f"{len(counts)} rounds are too few to tell what grows; give it more time, or fewer runs"]
    for name, share, more in (("threads", 1.0, 4), ("descriptors", 1.0, 40), ("objects", 1.01, 500), ("mib", 1.03, 4)):
        before, after = [[getattr(count, name) for count in half] for half in (earlier, later)]
        if min(after) > min(before) * share + more:
            problems.append(f"{name} grew from {min(before):,.0f} to {min(after):,.0f}")
    return problems


async def soaked(url: str, server: int, *, seconds: float, runs: int, folder: Path) -> list[str]:
    """
    Let *runs* be under way at a time until *seconds* are over; return what is wrong.
    """
    began, outcomes, counts = time.monotonic(), Counter[str](), list[Count]()
    async with _engine(url, folder) as engine:
        # Its threads are made when they are needed, up to 32: a pool that fills slowly is no growth.
        await asyncio.gather(*[engine._threads.run("filling", partial(time.sleep, 0.2)) for _ in range(THREADS)])
        while time.monotonic() - began < seconds or len(counts) < WARM + 2:
            started = time.monotonic()
            outcomes.update(await asyncio.gather(*[_one(engine, number, folder) for number in range(runs)]))
            await asyncio.sleep(0.2)  # connections that were reset are closed
            counts.append(_counted(server))
            took, count = time.monotonic() - started, counts[-1]
            print(
                f"{time.monotonic() - began:6.0f} s  round {len(counts):3}: {runs:,} runs in {took:5.1f} s | {count.tasks} tasks, "
                f"{count.threads} threads, {count.processes} processes, {count.descriptors} descriptors, "
                f"{count.objects:,} objects, {count.mib:.1f} MiB",
                flush=True,
            )
    for ending, count in outcomes.most_common(12):
        print(f"{count:8,} runs {ending}")
    problems = grown(counts)
    return problems + [f"a run ended as {ending}" for ending in outcomes if ending.partition(":")[0] not in ENDINGS]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__.strip().partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=5.0, help="how long (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=1_000, help="how many at a time (default: %(default)s)")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve:
        asyncio.run(_serve())
        return 0
    with contextlib.suppress(AttributeError):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    with tempfile.TemporaryDirectory() as folder, _server() as url:
        server = int(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()[0])
        before = _counted(server)
        problems = asyncio.run(soaked(url, server, seconds=asked.minutes * 60, runs=asked.runs, folder=Path(folder)))
        after = _settled(server, before)
    print(f"afterwards: {after.threads} threads, {after.descriptors} descriptors, {after.mib:.1f} MiB")
    if after.threads > before.threads or after.descriptors > before.descriptors:
        problems.append(
            f"{before.threads} threads and {before.descriptors} descriptors at first are {after} in the end"
        )
    for problem in problems:
        print(f"LEFT: {problem}")
    print("FAILED" if problems else "passed: nothing was left behind, and nothing grew")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
