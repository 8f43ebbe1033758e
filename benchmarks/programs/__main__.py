"""
Measure what programs save: ``python -m benchmarks.programs [--peers DIR] [--write]``.

Without peers only our side is measured, and shown beside what was measured of theirs before. ``--write`` puts the figures into ``benchmarks/programs/measured.json``, and the table that is made of
them into ``benchmarks/README.md``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.peers import Peers, label
from benchmarks.programs.market import ITEMS, WAYS, opened

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "benchmarks" / "README.md"
MEASURED = Path(__file__).with_name("measured.json")
BEGIN, END = "<!-- made by benchmarks.programs -->\n", "<!-- until here -->"
PEER = "pydantic_ai_harness"
PRICED = "openai/gpt-5"
FIRST, PER_SECOND = 1.0, 60
"""Seconds until a model begins to answer, and tokens that it writes in one."""


def measured(engine: str, way: str, python: str, rounds: int) -> dict[str, Any]:
    """Return what one engine needs for one way."""
    with opened() as (url, shop):
        command = [python, "-m", "benchmarks.programs.working", engine, way, url, str(rounds)]
        ran = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
        told = json.loads(ran.stdout)
        calls = len(shop.asked) // (rounds + 1)
        asked = shop.asked[:calls]
    sent, repeated, written = [sum(column) for column in zip(*asked, strict=True)]
    return {
        "model calls": calls,
        "sent": sent,
        "repeated": repeated,
        "written": written,
        "model, s": round(FIRST * calls + written / PER_SECOND, 1),
        "engine, ms": round(median(told["ms"]), 1),
        "cost": str(cost(sent, 0, written)),
        "cost, cached": str(cost(sent, repeated, written)),
        "versions": told["versions"],
    }


def cost(sent: int, cached: int, written: int) -> Decimal:
    """Return dollars by the list of prices."""
    from stepengine import Usage
    from stepengine.models.pricing import ListPrices

    usage = Usage(input_tokens=sent - cached, cache_read_tokens=cached, output_tokens=written)
    price = ListPrices()(PRICED, usage, datetime.now(UTC))
    if price is None:
        msg = f"{PRICED} has no price"
        raise SystemExit(msg)
    return round(price, 6)


def table(found: dict[str, dict[str, dict[str, Any]]]) -> str:
    """Return the figures as a table with what stands below it."""
    lines = [
        "| | | requests | tokens read | written | cost | with a cache | a model's seconds | the engine's ms |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for engine, ways in found.items():
        for way, row in ways.items():
            costs = [f"{Decimal(row[key]) * 100:.2f} ct" for key in ("cost", "cost, cached")]
            numbers = [f"{row[key]:,}" for key in ("model calls", "sent", "written")]
            rest = [str(row[key]) for key in ("model, s", "engine, ms")]
            lines.append(f"| {label(engine)} | {way} | {' | '.join([*numbers, *costs, *rest])} |")
    versions = {
        name: number for ways in found.values() for row in ways.values() for name, number in row["versions"].items()
    }
    shown = ", ".join([f"{name} {number}" for name, number in versions.items()])
    return "\n".join(lines) + f"\n\nMeasured with {shown}."


def page_with(page: str, made: str) -> str:
    """Return the page with this table in its place."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{made}\n{END}{tail}"


def main() -> None:
    """Do what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.programs", description=__doc__)
    parser.add_argument("--peers", metavar="DIR", help="what `python -m benchmarks.peers --make DIR` made")
    parser.add_argument("--rounds", type=int, default=20, help="how often each is measured (default: 20)")
    parser.add_argument("--write", action="store_true", help="keep the figures, and put the table into the page")
    asked = parser.parse_args()
    pythons = {"stepengine": sys.executable}
    if asked.peers:
        pythons["pydantic_ai"] = Peers(asked.peers).python(PEER)
    found = {
        engine: {way: measured(engine, way, python, asked.rounds) for way in WAYS} for engine, python in pythons.items()
    }
    if not asked.peers and MEASURED.exists():
        found = {**json.loads(MEASURED.read_text(encoding="utf-8")), **found}
    made = table(found)
    print(f"{len(ITEMS)} lookups and a sum\n\n{made}")
    if asked.write:
        MEASURED.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        PAGE.write_text(page_with(PAGE.read_text(encoding="utf-8"), made), encoding="utf-8")


if __name__ == "__main__":
    main()
