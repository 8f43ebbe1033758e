"""
Which rows of the fault catalogue hold on which protocol: ``python -m tests.faults.table``.

Runs the tests of the adapters and prints, for every MP row that one of them cites, whether all of its tests passed on each
wire. A row that only other floors can hold (the retry coordinator, the machine, the journal) is listed with where to look.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.spec_rows import known

ROOT = Path(__file__).resolve().parents[2]
WIRES = ("anthropic", "openai", "openai_chat", "google")
ROW = re.compile(r"reliability:MP(\d\d)")
ROWS = tuple(sorted(int(row[1]) for row in map(ROW.fullmatch, known()) if row))
EVERYWHERE = "every wire"
ELSEWHERE = {
    10: "runtime: the wait before the next attempt",
    12: "runtime: how many requests there are in all",
    30: "runtime: usage of lost attempts",
    32: "runtime: monotonic waiting",
    48: "machine: unknown tools",
    55: "machine: cut-off calls are not executed",
    63: "runtime: limits on cost",
    65: "machine: repeated calls",
}
"""Rows whose other half is held by another floor."""

CANNOT = {
    28: ("openai_chat", "google"),
}
"""Rows that a wire has no way to bring about: its chunks have no order to break, or its calls never come in pieces."""


class Collector:
    """Takes the rows from the marks of each test and its outcome."""

    def __init__(self) -> None:
        self.cited: dict[str, set[tuple[int, str]]] = {}
        self.outcomes: dict[tuple[int, str], list[str]] = defaultdict(list)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Note what each test cites."""
        for item in items:
            if item.get_closest_marker("faults"):
                continue  # skipped without llmock, and then they say nothing of what can occur
            rows = [ROW.fullmatch(str(row)) for mark in item.iter_markers("spec") for row in mark.args]
            wire = wire_of(item)
            self.cited[item.nodeid] = {(int(row.group(1)), wire) for row in rows if row}

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Note how a test came out."""
        if report.when == "call" or report.outcome != "passed":
            for key in self.cited.get(report.nodeid, ()):
                self.outcomes[key].append(report.outcome)


def wire_of(item: pytest.Item) -> str:
    """Return the wire that a test runs on."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    named = [str(params[name]) for name in ("wire", "name") if name in params]
    recording = params.get("recording")
    if recording is not None:
        named.append(
            {"openai-chat": "openai_chat", "openai-responses": "openai", "google-gla": "google"}.get(
                recording.wire, recording.wire
            )
        )
    found = next((name for name in named if name in WIRES), None)
    if found is not None:
        return found
    words = {"anthropic": "anthropic", "chat": "openai_chat", "responses": "openai", "gemini": "google"}
    return next((wire for word, wire in words.items() if f"_{word}_" in f"_{item.name}_"), EVERYWHERE)


def cell(outcomes: list[str]) -> str:
    """Return what stands in the table for the outcomes of one row on one wire."""
    if not outcomes:
        return "."
    ran = [outcome for outcome in outcomes if outcome != "skipped"]
    if "failed" in ran:
        return "FAILED"
    return f"ok {len(ran)}" if ran else "cannot occur"


def main() -> int:
    """Run the tests and print the table."""
    collector = Collector()
    arguments = ["-q", "-p", "no:cacheprovider", "--no-header", "--no-summary", "tests/models", "tests/faults"]
    code = pytest.main([f"--rootdir={ROOT}", *arguments, *sys.argv[1:]], plugins=[collector])
    header = ["row", *WIRES, EVERYWHERE, "the rest of it"]
    lines = [header]
    for row in ROWS:
        cells = [
            "cannot occur" if wire in CANNOT.get(row, ()) else cell(collector.outcomes[row, wire])
            for wire in (*WIRES, EVERYWHERE)
        ]
        lines.append([f"MP{row:02}", *cells, ELSEWHERE.get(row, "")])
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    for line in lines:
        print("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
