"""
Runs the works W1 to W9, each measurement in a process of its own, round by round, and notes what comes out.

Whoever is slow takes part in fewer rounds, and in sizes only as far as one run stays under a cap; the sheet says what was left out.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.judging import FAST, SPEAKING, TOKENS
from benchmarks.peers import AGENTS, ENVIRONMENTS, SDKS, Peers
from benchmarks.sheet import Key, Sheet, load, machine, today
from benchmarks.starts import beside_the_sdks, starts, weights

ROOT = Path(__file__).resolve().parent.parent
OURS = ("floor", "stepengine", "stepengine_handler")
SLOW = tuple(name for name in AGENTS if name != FAST)
NOT_LOADED = ("anthropic", "openai", "google.genai", "vcr", "typer", "rich", "mcp", "dbos", "httpx2", "genai_prices")
SOME = 3
"""Rounds that something takes part in that takes long, and that no peer does beside us."""

TRIES = 5
"""How often engines are measured alternately in a round. On a shared machine a process costs twice as much for some seconds."""

LARGE = 100
"""Requests of a cassette from which vcrpy plays it once: its cost grows with the cube."""

IMPORTS = {
    "pydantic_ai": "import pydantic_ai",
    "bu_agent_sdk": "import bu_agent_sdk",
    "openai_agents": "import agents",
    "langgraph": "from langchain.agents import create_agent",
    "smolagents": "import smolagents",
    "google_adk": "from google.adk.agents import LlmAgent",
    "anthropic": "import anthropic",
    "openai": "import openai",
    "google": "from google import genai",
}
NO_REPLAY = "has no record of a run that can be played again; HTTP traffic is what can be played, with vcrpy"


@dataclass(frozen=True)
class Plan:
    """
    How much is measured.

    Attributes:
        rounds: How often everything is measured that a promise is about.
        slow: How often the rest.
        steps: Lengths of runs in W1.
        long: The length of a very long run, in W1 and W4.
        runs: Numbers of concurrent runs in W2.
        http: Lengths of runs in W3, numbers of messages in W6.
        journal: Lengths of recorded runs in W4.
        cassette: Numbers of requests of a cassette in W4; the last one is played by vcrpy once only.
        imports: How often something is imported in a round; the least counts.
        cap: CPU seconds that one run may take.
    """

    rounds: int = 5
    slow: int = 1
    steps: tuple[int, ...] = (10, 100, 300, 1_000, 3_000, 10_000)
    long: int = 50_000
    runs: tuple[int, ...] = (10, 100, 1_000)
    http: tuple[int, ...] = (10, 100, 300)
    journal: tuple[int, ...] = (100, 1_000, 10_000)
    cassette: tuple[int, ...] = (25, 50, 100, 200)
    imports: int = 2
    cap: float = 2.0


QUICK = Plan(
    2, 1, (10, 100, 1_000), 10_000, (10, 100), (10, 100), (100, 1_000), (10, 20, 40), imports=2, cap=2.0
)  # fmt: skip


class Bench:
    """
    Runs workers and fills a sheet.

    Args:
        peers: Their interpreters.
        plan: How much is measured.
    """

    def __init__(self, peers: Peers, plan: Plan) -> None:
        self.peers = peers
        self.plan = plan
        self.sheet = Sheet()
        self.failed: set[tuple[str, str]] = set()

    def python(self, engine: str) -> str:
        """Return the interpreter that can import an engine."""
        return self.peers.python(engine) if engine in ENVIRONMENTS else sys.executable

    def worker(self, work: str, engine: str, module: str, *arguments: Any, python: str = "") -> dict[str, Any] | None:
        """Return what a worker measured, or ``None`` and a gap in the sheet when it is not installed or failed."""
        if (work, engine) in self.failed:
            return None
        command = [python or self.python(engine), "-m", f"benchmarks.{module}", *map(str, arguments)]
        try:
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
            told = "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        except FileNotFoundError:
            told = "its environment was not made"
        if told:
            self.failed.add((work, engine))
            self.sheet.miss(work, engine, told if "environment" in told else f"failed: {told[:200]}")
            print(f"  {work} {engine}: {told}", file=sys.stderr)
            return None
        measured: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        return measured

    def note(self, of: tuple[str, str, str], unit: str, turn: int, found: Mapping[Any, float] | None) -> None:
        """Put figures by size into the sheet; they are *of* a work, a what and an engine."""
        for count, value in (found or {}).items():
            self.sheet.add(Key(*of, int(count)), value, unit=unit, turn=turn)

    def turns(self, work: str) -> Iterator[int]:
        """Give the rounds."""
        for turn in range(self.plan.rounds):
            started = time.monotonic()
            yield turn
            print(
                f"  {work}, round {turn + 1} of {self.plan.rounds}: {time.monotonic() - started:.0f} s", file=sys.stderr
            )

    def capped(self, work: str, what: str, engine: str, sizes: tuple[int, ...]) -> None:
        """Say which sizes were left out."""
        done = [key.count for key in self.sheet.samples if key[:3] == (work, what, engine)]
        left = [size for size in sizes if done and size > max(done)]
        if left:
            shown = ", ".join([f"{size:,}" for size in left])
            why = f"N={shown} left out: one run would take over {self.plan.cap:g} s of CPU"
            self.sheet.miss(work, engine, why)


def listed(sizes: tuple[int, ...]) -> str:
    """Return sizes as a worker takes them."""
    return ",".join([str(size) for size in sizes])


def in_process(
    bench: Bench, turn: int, of: tuple[str, str, str], unit: str, kind: str, *sizes: int, cap: float | None = None
) -> None:
    """Measure one work of one engine in some sizes; it is *of* a work, a what and an engine."""
    work, _, engine = of
    bench.note(of, unit, turn, bench.worker(work, engine, "worker", kind, engine, listed(sizes), cap or bench.plan.cap))


def in_alternation(
    bench: Bench, turn: int, of: tuple[str, str], sizes: Mapping[str, tuple[int, ...]], *, unit: str, kind: str
) -> None:
    """
    Measure engines alternately in their sizes, so that all meet the machine fast and slow, and note the least of each.

    The figures are *of* a work and a what.
    """
    least: dict[str, dict[str, float]] = {engine: {} for engine in sizes}
    for _ in range(TRIES):
        for engine, counts in sizes.items():
            found = bench.worker(of[0], engine, "worker", kind, engine, listed(counts), bench.plan.cap)
            for count, value in (found or {}).items():
                least[engine][count] = min(value, least[engine].get(count, value))
    for engine, found in least.items():
        bench.note((*of, engine), unit, turn, found)


def w1(bench: Bench) -> None:
    """Measure steps and their growth with history."""
    plan = bench.plan
    for turn in bench.turns("W1"):
        in_alternation(bench, turn, ("W1", "step"), dict.fromkeys((*OURS, FAST), plan.steps), unit="us", kind="steps")
        for engine in SLOW if turn < plan.slow else ():
            in_process(bench, turn, ("W1", "step", engine), "us", "steps", *plan.steps)
        for kind in ("plain", "step", "call", "floor"):
            in_process(bench, turn, ("W1", f"machine, {kind}", "machine"), "us", kind, 1_000)
        if turn < SOME:
            in_process(bench, turn, ("W1", "step, collector off", "stepengine"), "us", "long", 100, plan.long, cap=60)
    for engine in AGENTS:
        bench.capped("W1", "step", engine, plan.steps)


def w2(bench: Bench) -> None:
    """Measure fan-out."""
    plan = bench.plan
    for turn in bench.turns("W2"):
        engines = ("stepengine", "stepengine_handler", FAST)
        in_alternation(bench, turn, ("W2", "run"), dict.fromkeys(engines, plan.runs), unit="ms", kind="runs")
        for engine in SLOW if turn < plan.slow else ():
            in_process(bench, turn, ("W2", "run", engine), "ms", "runs", *plan.runs)
        in_process(bench, turn, ("W2", "children", "stepengine"), "us", "children", 100, 4_000)
        in_process(bench, turn, ("W2", "alone", "stepengine"), "us", "alone", 100)
    in_process(bench, 0, ("W2", "memory", "stepengine"), "bytes", "memory", 200)
    for engine in AGENTS:
        bench.capped("W2", "run", engine, plan.runs)


@contextmanager
def loopback() -> Iterator[str]:
    """Run the server in a process of its own and give its port."""
    command = [sys.executable, "-m", "benchmarks.loopback"]
    server = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        yield server.stdout.readline().strip()
    finally:
        server.stdin.close()
        server.wait(10)
        server.stdout.close()


def over_http(bench: Bench, work: str, kind: str, ours: tuple[str, ...]) -> None:
    """Measure clients against the server: each protocol with the SDK's loop and ours, then the peers."""
    plan = bench.plan
    with loopback() as port:
        for turn in bench.turns(work):
            for protocol, sdk in SDKS.items():
                sizes = plan.http if turn == 0 else plan.http[:2]
                for client, counts in (("bare", sizes), *((name, plan.http) for name in ours)):
                    if client == "stepengine_run" and protocol != "openai_chat":
                        continue
                    python = bench.peers.python(sdk) if client == "bare" else sys.executable
                    engine = f"{client}, {protocol}"
                    arguments = ("http_worker", kind, client, protocol, listed(counts), port, plan.cap)
                    found = bench.worker(work, engine, *arguments, python=python)
                    bench.note((work, kind, engine), "ms", turn, found)
            for engine in AGENTS if turn < (plan.slow if work == "W3" else 1) else ():
                protocol = "google" if engine == "google_adk" else "openai_chat"
                arguments = ("http_worker", kind, engine, protocol, listed(plan.http), port, plan.cap)
                bench.note((work, kind, engine), "ms", turn, bench.worker(work, engine, *arguments))
    for engine in AGENTS:
        bench.capped(work, kind, engine, plan.http)


def w3(bench: Bench) -> None:
    """Measure steps over a real socket."""
    over_http(bench, "W3", "steps", ("stepengine",))


def w4(bench: Bench) -> None:
    """Measure recording and replaying."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as beside:
        # Two minutes on end, of which only the CPU counts: another core has it, while the rest is measured.
        longest, size = Path(folder) / "longest.yaml", bench.plan.cassette[-1]
        written = bench.worker("W4", "stepengine", "cassette_worker", "write", longest, size)
        playing = (
            beside.submit(bench.worker, "W4", "vcrpy", "cassette_worker", "vcrpy", longest, size) if written else None
        )
        recordings(bench)
        cassettes(bench, Path(folder))
        for what, seconds in ((playing and playing.result()) or {}).items():
            bench.note(("W4", f"cassette, {what}", "vcrpy"), "s", 0, {size: seconds})
    bench.sheet.miss("W4", "every peer", NO_REPLAY)


def journaled(bench: Bench, turn: int, kind: str, *sizes: int) -> None:
    """Measure one kind of work with journals in some sizes."""
    units = {"syncs per effect": "", "syncs of reading": "", "resuming": "s"}
    for size in sizes:
        for what, value in (bench.worker("W4", "stepengine", "replay_worker", kind, size) or {}).items():
            bench.note(("W4", what, "stepengine"), units.get(what, "us"), turn, {size: value})


def recordings(bench: Bench) -> None:
    """Measure journals."""
    plan = bench.plan
    for turn in bench.turns("W4"):
        journaled(bench, turn, "journal", *plan.journal)
        if turn < SOME:  # A minute, most of it spent waiting for the disk.
            journaled(bench, turn, "growth", plan.long)
        journaled(bench, turn, "resume", 1_000, 10_000)


def cassettes(bench: Bench, folder: Path) -> None:
    """Measure one file for each size, played by us, and by vcrpy but for the longest, which it is playing already."""
    plan = bench.plan
    for size in plan.cassette:
        path = folder / f"{size}.yaml"
        written = bench.worker("W4", "stepengine", "cassette_worker", "write", path, size)
        bench.note(("W4", "cassette", "stepengine"), "MB", 0, written and {size: written["megabytes"]})
        for turn in range(plan.rounds):
            is_theirs = size != plan.cassette[-1] and turn < (1 if size >= LARGE else SOME)
            for player in ("stepengine", *(("vcrpy",) if is_theirs else ())):
                found = bench.worker("W4", player, "cassette_worker", player, path, size)
                for what, seconds in (found or {}).items():
                    bench.note(("W4", f"cassette, {what}", player), "s", turn, {size: seconds})


def import_cpu(python: str, statement: str, times: int) -> float | None:
    """Return the CPU seconds of a process that runs *statement*, less those of an empty process; the least of each."""
    least: dict[str, float] = {}
    for code in ("pass", statement):
        for _ in range(times + 1):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            done = subprocess.run([python, "-c", code], cwd=ROOT, capture_output=True, check=False)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            if done.returncode:
                return None
            spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            least[code] = min(least.get(code, spent), spent)
    return least[statement] - least["pass"]


def w5(bench: Bench) -> None:
    """Measure imports."""
    ours = {
        "stepengine": "import stepengine",
        "every front-door name": "from stepengine import *",
        "pydantic": "import pydantic",
    }
    cases = [*[(name, sys.executable, statement) for name, statement in ours.items()]]
    cases += [(name, bench.peers.python(name), statement) for name, statement in IMPORTS.items()]
    for turn in bench.turns("W5"):
        for name, python, statement in cases:
            if name in ENVIRONMENTS and (turn >= bench.plan.slow or not bench.peers.has(name)):
                continue
            seconds = import_cpu(python, statement, bench.plan.imports if turn else bench.plan.imports + 1)
            if seconds is None:
                bench.sheet.miss("W5", name, "not installed")
            else:
                bench.note(("W5", "import", name), "ms", turn, {1: seconds * 1e3})
    code = f"import sys; from stepengine import AgentDefinition, Engine, tool; print(sum(m in sys.modules for m in {NOT_LOADED!r}))"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    bench.note(("W5", "heavy packages loaded", "stepengine"), "", 0, {1: int(loaded.stdout)})


def started(bench: Bench, rounds: int) -> None:
    """Measure starts."""
    for turn, found in enumerate(starts(rounds)):
        for name, seconds in found.items():
            bench.note(("W7", "start", name), "ms", turn, {1: seconds * 1e3})


def w7(bench: Bench) -> None:
    """Measure what it costs until something happens, and what is installed for it."""
    started(bench, max(5, bench.plan.rounds))
    weighed = weights()
    for name, megabytes in weighed.items():
        bench.note(("W7", "weight", name), "MB", 0, {1: megabytes})
    bench.note(("W7", "weight beside the SDKs", "stepengine"), "MB", 0, {1: beside_the_sdks(weighed)})


def w6(bench: Bench) -> None:
    """Measure one call behind a long history."""
    over_http(bench, "W6", "behind", ("stepengine", "stepengine_run"))


def streamed(bench: Bench, turn: int, port: str, *clients: str) -> None:
    """Measure a token for some clients, or for all."""
    for protocol in SPEAKING:
        found = bench.worker("W8", "stepengine", "watching_worker", protocol, TOKENS, port, *clients) or {}
        for client, value in found.items():
            bench.note(("W8", f"token, {protocol}", client), "us", turn, {TOKENS: value})


def w8(bench: Bench) -> None:
    """Measure what who watches a run pays, by token and by step."""
    with loopback() as port:
        for turn in bench.turns("W8"):
            streamed(bench, turn, port)
            for client, value in (bench.worker("W8", "stepengine", "watching_worker", "steps", 1_000) or {}).items():
                bench.note(("W8", "step", client), "us", turn, {1_000: value})


def w9(bench: Bench) -> None:
    """Measure steps of durable runs, next to a worker written by hand."""
    arguments = ("--only", "promised", "--repeat", bench.plan.rounds)
    for who, counts in (bench.worker("W9", "stepengine", "durable", *arguments) or {}).items():
        for count, turns in counts.items():
            for turn, value in turns.items():
                bench.note(("W9", "step", who), "ms", int(turn), {count: value})


WORKS = {"w1": w1, "w2": w2, "w3": w3, "w4": w4, "w5": w5, "w6": w6, "w7": w7, "w8": w8, "w9": w9}


def promised(bench: Bench) -> None:
    """Measure what the promises are about, and nothing else."""
    sizes = {"stepengine": (10, 100, 1_000, 10_000), "stepengine_handler": (1_000,), FAST: (10, 1_000)}
    with loopback() as port:
        for turn in bench.turns("promises"):
            in_alternation(bench, turn, ("W1", "step"), sizes, unit="us", kind="steps")
            concurrent = dict.fromkeys(("stepengine", FAST), (1_000,))
            in_alternation(bench, turn, ("W2", "run"), concurrent, unit="ms", kind="runs")
            journaled(bench, turn, "recorded", *bench.plan.journal)
            streamed(bench, turn, port, "floor", "stream")
    started(bench, bench.plan.rounds)
    w9(bench)


PACKAGES = (
    "stepengine", "bu-agent-sdk", "pydantic-ai-slim", "openai-agents", "langgraph", "langchain", "langchain-openai", "smolagents",
    "google-adk", "anthropic", "openai", "google-genai", "vcrpy", "pydantic", "httpx2",
)  # fmt: skip


def versions(bench: Bench) -> dict[str, dict[str, str]]:
    """Return what is installed where, by environment."""
    code = (
        "import importlib.metadata as m, json\nfound = {}\n"
        f"for name in {PACKAGES!r}:\n try: found[name] = m.version(name)\n except m.PackageNotFoundError: pass\n"
        "print(json.dumps(found))"
    )
    found = {}
    places = {
        "stepengine": sys.executable,
        **{name: bench.peers.python(name) for name in ENVIRONMENTS if name != "temporal"},
    }
    for name, python in places.items():
        if Path(python).exists():
            done = subprocess.run([python, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
            found[name] = json.loads(done.stdout) if done.returncode == 0 else {}
    return found


def measure(bench: Bench, works: list[str], size: str, file: Path | None = None) -> Sheet:
    """Run works and return what came out; what is there after each of them is kept in *file*."""
    started = time.monotonic()
    bench.sheet.about = {"date": today(), "size": size, "machine": machine(), "versions": versions(bench)}
    for name in works:
        WORKS[name](bench)
        if file:
            file.write_text(bench.sheet.to_json(), encoding="utf-8")
    bench.sheet.about["machine"]["load at the end"] = load()
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    bench.sheet.about["minutes"] = round((time.monotonic() - started) / 60, 1)
    bench.sheet.about["minutes of CPU"] = round((spent.ru_utime + spent.ru_stime) / 60, 1)
    if file:
        file.write_text(bench.sheet.to_json(), encoding="utf-8")
    return bench.sheet
