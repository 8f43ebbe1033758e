"""
W3 and W6: what a model call costs the client, beside a bare loop over each official SDK in the same run.

W3 goes over a loopback server in another process, W6 over a transport in memory. Budgets: Q4 and Q5 of the performance page.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTOCOLS = {"anthropic": 0.9, "openai_chat": 0.15, "openai": 0.15, "google": 0.2}
"""Each protocol with the share of the SDK's own loop that a step may cost at N=100 (Q4)."""

FLAT = 1.5
Table = Callable[[str, list[str], list[list[str]]], None]
Verdict = Callable[[str, str, float, float], str]


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


def measured(kind: str, protocol: str, client: str, count: int, port: str = "") -> float | None:
    """Return milliseconds, or ``None`` with the reason on stderr."""
    command = [sys.executable, "-m", "benchmarks.http_worker", kind, protocol, client, str(count), port]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"  {client} over {protocol}: not measured ({done.stderr.strip().splitlines()[-1:]})", file=sys.stderr)
        return None
    return float(json.loads(done.stdout.strip().splitlines()[-1])["ms"])


def rows_of(kind: str, sizes: list[int], port: str = "") -> dict[tuple[str, str], dict[int, float]]:
    """Measure every protocol with both clients."""
    found: dict[tuple[str, str], dict[int, float]] = {}
    for protocol in PROTOCOLS:
        for client in ("sdk", "stepengine"):
            for size in sizes:
                ms = measured(kind, protocol, client, size, port)
                if ms is not None:
                    found.setdefault((protocol, client), {})[size] = ms
    return found


def shown(found: dict[tuple[str, str], dict[int, float]], sizes: list[int]) -> list[list[str]]:
    """Return the figures as the rows of a table, with the ratio to the SDK for each size."""
    rows = []
    for (protocol, client), of in found.items():
        bare = found.get((protocol, "sdk"), {})
        cells = [f"{of[s]:.2f}" if s in of else "-" for s in sizes]
        ratios = [f"{of[s] / bare[s]:.3f}x" if s in of and s in bare else "-" for s in sizes]
        rows.append([protocol, client, *cells, *(ratios if client == "stepengine" else ["" for _ in sizes])])
    return rows


def w3(sizes: list[int], table: Table, verdict: Verdict) -> list[str]:
    """Measure steps over a real socket and return the verdicts."""
    with loopback() as port:
        found = rows_of("steps", sizes, port)
    header = ["protocol", "client", *[f"N={s}" for s in sizes], *[f"of SDK, {s}" for s in sizes]]
    table(
        "W3: client CPU milliseconds per HTTP step (bare SDK loop; engine, agent, validated tool)",
        header,
        shown(found, sizes),
    )
    lines = []
    for protocol, most in PROTOCOLS.items():
        bare, ours = found.get((protocol, "sdk"), {}), found.get((protocol, "stepengine"), {})
        if 100 in bare and 100 in ours:
            lines.append(verdict("Q4", f"W3 {protocol} at N=100 against the SDK's loop", ours[100] / bare[100], most))
        if {10, max(sizes)} <= ours.keys():
            what = f"W3 {protocol} at N={max(sizes)} against N=10"
            lines.append(verdict("Q5", what, ours[max(sizes)] / ours[10], FLAT))
    return lines


def w6(sizes: list[int], table: Table) -> None:
    """Measure one call behind a history, without a socket."""
    found = rows_of("encode", sizes)
    header = ["protocol", "client", *[f"n={s}" for s in sizes], *[f"of SDK, {s}" for s in sizes]]
    table("W6: CPU milliseconds of one call behind n messages, in memory", header, shown(found, sizes))
