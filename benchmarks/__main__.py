"""
Measure stepengine beside its peers and print tables with ratios: ``python -m benchmarks [--quick] [--peers PYTHON]``.

W1 is the CPU per step of one run and its growth with history, W2 the CPU of 1,000 concurrent runs, W3 the client CPU per
HTTP step beside each official SDK, W4 the CPU of recording and replaying, W5 the CPU of an import, W6 the CPU of one call behind a long history. Peers that the given interpreter cannot import are shown as not installed. Timings never decide a unit test; the
last lines say which budgets hold in this run.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks import calls, replays

ROOT = Path(__file__).resolve().parent.parent
LONG = 10_000
WORKS = ["w1", "w2", "w3", "w4", "w5", "w6"]
OURS = ("floor", "stepengine", "stepengine_handler")
PEERS = ("bu_agent_sdk", "pydantic_ai")
NOT_LOADED = ("anthropic", "openai", "google.genai", "vcr", "typer", "rich", "mcp", "dbos", "httpx2", "genai_prices")


class Bench:
    """Runs workers, each in a process of its own."""

    def __init__(self, peers: str) -> None:
        self.peers = peers
        self.figures: list[dict[str, Any]] = []

    def python_of(self, engine: str) -> str:
        """Return the interpreter that can import an engine."""
        return self.peers if engine in PEERS else sys.executable

    def worker(self, kind: str, engine: str, count: int) -> dict[str, Any] | None:
        """Return what a worker measured, or ``None`` when the engine is not installed or failed."""
        command = [self.python_of(engine), "-m", "benchmarks.worker", kind, engine, str(count)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            reason = done.stderr.strip().splitlines()[-1:] or ["no reason given"]
            print(f"  {engine}: not measured ({reason[0]})", file=sys.stderr)
            return None
        measured: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        self.figures.append({"kind": kind, "engine": engine, "count": count, **measured})
        return measured


def table(title: str, header: list[str], rows: list[list[str]]) -> None:
    """Print a table."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    print(f"\n{title}")
    for row in [header, ["-" * w for w in widths], *rows]:
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))


def w1(bench: Bench, sizes: list[int], verdicts: list[str]) -> None:
    """Measure growth with history."""
    measured: dict[str, dict[int, float]] = {}
    for engine in (*OURS, *PEERS):
        for size in sizes:
            if engine in PEERS and size > (3_000 if engine == "bu_agent_sdk" else 300):
                continue
            got = bench.worker("steps", engine, size)
            if got is None:
                break
            measured.setdefault(engine, {})[size] = got["us_per_step"]
    rows = [
        [engine, *[f"{of[s]:.1f}" if s in of else "-" for s in sizes], f"{of[max(of)] / of[min(of)]:.2f}x"]
        for engine, of in measured.items()
    ]
    table(
        "W1: CPU microseconds per step, and growth from the smallest to the largest N",
        ["engine", *[f"N={s}" for s in sizes], "growth"],
        rows,
    )
    judge_steps(measured, max(sizes), verdicts)
    judge_machine(bench, verdicts)
    if max(sizes) >= LONG:
        growth(bench, verdicts)


def judge_steps(measured: dict[str, dict[int, float]], largest: int, verdicts: list[str]) -> None:
    """Judge W1 against its budgets."""
    ours, fast = measured.get("stepengine", {}), measured.get("bu_agent_sdk", {})
    if {100, largest} <= ours.keys():
        verdicts.append(verdict("Q1", f"W1 at N={largest} against N=100", ours[largest] / ours[100], 1.3))
    if 1_000 in ours and 1_000 in fast:
        verdicts.append(verdict("Q2", "W1 at N=1000 against bu-agent-sdk", ours[1_000] / fast[1_000], 0.3))
        stepping = measured["stepengine_handler"][1_000]
        verdicts.append(verdict("Q2", "the same, a handler yielding every step", stepping / fast[1_000], 0.35))
    if 10 in ours and 10 in fast:
        verdicts.append(verdict("Q2", "W1 at N=10 against bu-agent-sdk", ours[10] / fast[10], 1.1))


def judge_machine(bench: Bench, verdicts: list[str]) -> None:
    """Measure and judge the machine alone."""
    whats = {"plain": "a run without a handler", "step": "a handler's STEP", "call": "a handler's ToolCall"}
    for kind, what in whats.items():
        got = bench.worker(kind, "machine", 1_000)
        if got is not None:
            verdicts.append(verdict("Q2", f"pure machine, us per step, {what}", got["us_per_step"], 12))


def growth(bench: Bench, verdicts: list[str]) -> None:
    """Judge the growth of very long runs, without the collector, which walks a history again and again."""
    long, short = bench.worker("long", "stepengine", 5 * LONG), bench.worker("long", "stepengine", 100)
    if long and short:
        grown = long["us_per_step"] / short["us_per_step"]
        verdicts.append(verdict("Q1", f"W1 at N={5 * LONG} against N=100, collector off", grown, 1.3))


def w2(bench: Bench, runs: int, verdicts: list[str]) -> None:
    """Measure fan-out."""
    engines = [e for e in (*OURS, *PEERS) if e != "floor"]
    measured = {e: got["cpu_seconds"] for e in engines if (got := bench.worker("runs", e, runs))}
    table(
        f"W2: CPU seconds of {runs} concurrent runs of 5 steps",
        ["engine", "seconds"],
        [[e, f"{v:.3f}"] for e, v in measured.items()],
    )
    if "bu_agent_sdk" in measured and "stepengine" in measured:
        verdicts.append(
            verdict("Q3", "W2 against bu-agent-sdk", measured["stepengine"] / measured["bu_agent_sdk"], 1.0)
        )
    many, few = bench.worker("children", "stepengine", 4_000), bench.worker("children", "stepengine", 100)
    if many and few:
        each = many["us_per_child"] / few["us_per_child"]
        verdicts.append(verdict("Q12", "a child among 4,000 against one among 100", each, 1.3))
    memory = bench.worker("memory", "stepengine", 200)
    if memory:
        verdicts.append(
            verdict("Q3", "KB kept per finished 5-step run, messages included", memory["bytes_per_run"] / 1024, 20)
        )


def import_cpu(python: str, statement: str) -> float | None:
    """Return the CPU seconds of a process that runs *statement*, less those of an empty process; the best of five."""
    best = {}
    for code in ("pass", statement):
        for _ in range(5):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            done = subprocess.run([python, "-c", code], cwd=ROOT, capture_output=True, check=False)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            if done.returncode:
                return None
            spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            best[code] = min(best.get(code, spent), spent)
    return best[statement] - best["pass"]


def w5(bench: Bench, verdicts: list[str]) -> None:
    """Measure imports."""
    cases = {
        "stepengine": (sys.executable, "import stepengine"),
        "stepengine, every front-door name": (sys.executable, "from stepengine import *"),
        "pydantic": (sys.executable, "import pydantic"),
        "pydantic_ai": (bench.peers, "import pydantic_ai"),
        "bu_agent_sdk": (bench.peers, "import bu_agent_sdk"),
        "anthropic": (sys.executable, "import anthropic"),
    }
    measured = {name: cpu for name, case in cases.items() if (cpu := import_cpu(*case)) is not None}
    table("W5: CPU milliseconds of an import", ["import", "ms"], [[n, f"{v * 1000:.0f}"] for n, v in measured.items()])
    code = f"import sys, stepengine; print([m for m in {NOT_LOADED!r} if m in sys.modules])"
    loaded = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    verdicts.append(
        f"{'holds' if loaded == '[]' else 'BROKEN':<7} Q8  import stepengine loads no SDK and no CLI library: {loaded}"
    )
    if "pydantic_ai" in measured:
        verdicts.append(
            verdict("Q8", "import against pydantic_ai", measured["stepengine"] / measured["pydantic_ai"], 0.2)
        )


def verdict(budget: str, what: str, value: float, most: float) -> str:
    """Return one line that says whether a budget holds."""
    return f"{'holds' if value <= most else 'BROKEN':<7} {budget}  {what}: {value:.{2 if most >= 0.1 else 4}f} (at most {most:g})"


def report(bench: Bench, verdicts: list[str], file: str | None) -> None:
    """Print which budgets hold, and write them with all figures to *file*, if there is one."""
    print("\nBudgets in this run")
    for line in verdicts:
        print(f"  {line}")
    if file:
        written = {"verdicts": verdicts, "figures": bench.figures}
        Path(file).write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Run all works and print what came out."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="smaller sizes, for a first look")
    parser.add_argument(
        "--peers", default=sys.executable, metavar="PYTHON", help="interpreter in which the peers are installed"
    )
    parser.add_argument("--json", metavar="FILE", help="also write the verdicts and every worker's figures to FILE")
    parser.add_argument("--only", choices=WORKS, action="append", help="run only this work; may be repeated")
    asked = parser.parse_args()
    works = asked.only or WORKS
    os.environ.pop("PYTHONPATH", None)
    bench, verdicts = Bench(asked.peers), []
    if "w1" in works:
        w1(bench, [10, 100, 1_000] if asked.quick else [10, 100, 1_000, 10_000], verdicts)
    if "w2" in works:
        w2(bench, 200 if asked.quick else 1_000, verdicts)
    if "w3" in works:
        verdicts += calls.w3([10, 100] if asked.quick else [10, 100, 300], table, verdict)
    if "w4" in works:
        sizes = [100, 1_000] if asked.quick else [1_000, 10_000]
        verdicts += replays.w4(sizes, 60 if asked.quick else 200, table, verdict)
    if "w5" in works:
        w5(bench, verdicts)
    if "w6" in works:
        calls.w6([10, 100] if asked.quick else [10, 100, 300], table)
    report(bench, verdicts, asked.json)


if __name__ == "__main__":
    main()
