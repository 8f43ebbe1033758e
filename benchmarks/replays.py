"""
W4: what recording and replaying cost, beside the run itself and beside vcrpy in the same run.

Budgets: Q6, Q7, Q9, Q10 and Q11 of the performance page.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.calls import Table, Verdict

ROOT = Path(__file__).resolve().parent.parent
FLAT = 1.3
"""Growth of a cost per step or record that still counts as flat."""

KINDS = ("no journal", "memory", "file, to the disk", "file, to the system", "sqlite", "replay, memory", "replay, file")
MEANT = 200
COLUMNS = (*KINDS, "reading the file")


def measured(kind: str, count: int) -> dict[str, Any] | None:
    """Return what a fresh process measured, or ``None`` with the reason on stderr."""
    command = [sys.executable, "-m", "benchmarks.replay_worker", kind, str(count)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"  {kind} of {count}: not measured ({done.stderr.strip().splitlines()[-1:]})", file=sys.stderr)
        return None
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def w4(sizes: list[int], requests: int, table: Table, verdict: Verdict) -> list[str]:
    """Measure journals of runs of *sizes* steps, and a cassette of *requests* requests; return the verdicts."""
    runs = {size: found for size in sizes if (found := measured("journal", size))}
    rows = [[name, *[f"{runs[s][name]:.1f}" for s in runs]] for name in COLUMNS]
    table("W4: CPU microseconds per step of two effects", ["what", *[f"N={s}" for s in runs]], rows)
    return [
        *_journal(runs, verdict),
        *_resume([1_000, 10_000], table, verdict),
        *_cassette(requests, table, verdict),
    ]


def _journal(runs: dict[int, dict[str, Any]], verdict: Verdict) -> list[str]:
    lines = []
    for size, of in runs.items():
        for kind, most in (("memory", 60), ("file", 70)):
            more = of[f"replay, {kind}"] - of["no journal"]
            lines.append(verdict("Q6", f"W4 replay from {kind} at N={size}, us per step above the run", more, most))
        for kind, most in (("memory", 30), ("file, to the system", 60)):
            more = of[kind] - of["no journal"]
            lines.append(verdict("Q9", f"a journal in {kind} at N={size}, us per step above the run", more, most))
    if len(runs) > 1:
        first, last = runs[min(runs)], runs[max(runs)]
        for kind in ("memory", "file"):
            growth = last[f"replay, {kind}"] / first[f"replay, {kind}"]
            lines.append(verdict("Q6", f"W4 replay from {kind}, N={max(runs)} against N={min(runs)}", growth, FLAT))
    if runs:
        of = runs[max(runs)]
        lines.append(verdict("Q10", "syncs per effect of a journal on disk", of["syncs per effect"], 1.5))
        lines.append(verdict("Q10", "syncs of replaying and reading", of["syncs of reading"], 0))
    return lines


def _resume(sizes: list[int], table: Table, verdict: Verdict) -> list[str]:
    found = {size: got for size in sizes if (got := measured("resume", size))}
    rows = [[str(size), f"{of['seconds']:.3f}", f"{of['us_per_record']:.1f}"] for size, of in found.items()]
    table("W4: CPU of resuming a journal", ["records", "seconds", "us per record"], rows)
    lines = []
    if 10_000 in found:
        lines.append(verdict("Q11", "seconds of resuming 10,000 records", found[10_000]["seconds"], 1.0))
    if len(found) > 1:
        growth = found[max(found)]["us_per_record"] / found[min(found)]["us_per_record"]
        lines.append(verdict("Q11", f"a record of {max(found)} against one of {min(found)}", growth, FLAT))
    return lines


def _cassette(requests: int, table: Table, verdict: Verdict) -> list[str]:
    of = measured("cassette", requests)
    if of is None:
        return []
    rows = [[who, f"{of[who]['loading']:.3f}", f"{of[who]['playing']:.3f}"] for who in ("vcrpy", "stepengine")]
    title = (
        f"W4: CPU seconds of a cassette of {requests} growing requests, {of['megabytes']:.0f} MB; vcrpy matches bodies"
    )
    table(title, ["player", "loading", "playing"], rows)
    if requests < MEANT:  # the budget is for 200: vcrpy's cost grows with the cube
        return []
    share = of["stepengine"]["playing"] / of["vcrpy"]["playing"]
    return [verdict("Q7", f"W4 cassette of {requests} requests, playing, of vcrpy's time", share, 0.01)]
