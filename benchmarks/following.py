"""
What one more record costs who follows a run, by how long the run is: ``python -m benchmarks.following [STEPS ...]``.

Per length: one look of the page of ``stepengine show --html --serve``, of ``follow_events``, and one that finds nothing, in milliseconds of wall time, the
median of as many records as are left out at the end and put back one by one; beside it what reading and folding the whole journal costs.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stepengine import AgentDefinition, Engine, Hooks, Limits, tool
from stepengine.context import truncate
from stepengine.debugging.viewer.live_page import FollowedJournal
from stepengine.debugging.viewer.payload import PageTexts, RunPayload
from stepengine.journal import FileJournal, LineJournal, SqliteJournal
from stepengine.journal.event_stream import EventProjection, JournalWatch
from stepengine.testing import ScriptedModel, text, tool_call

STEPS = (20, 2_000, 20_000)
RECORDS = 40


@tool
def look(number: int) -> str:
    """
    Look at something.

    Args:
        number: What.
    """
    return f"{number} is as it was. " * 10


def recorded(steps: int, place: Path) -> list[bytes]:
    """Return the lines of a run of so many steps with a tool call each; its history is pruned on the way."""
    replies: list[Any] = [tool_call("look", {"number": number}) for number in range(steps - 1)]

    agent = AgentDefinition(
        "looker",
        model="x/y",
        tools=[look],
        limits=Limits(max_steps=steps + 1),
        hooks=Hooks(pre_step=[truncate(max_tokens=400)]),
    )
    journal = FileJournal(place, sync="write")
    with Engine([agent], models=ScriptedModel([*replies, text("Seen.")])) as engine:
        result = engine.run_sync("looker", "Look.", journal=journal)
        assert result.status == "completed", result
    return journal.lines()


def clocked(work: Callable[[], Any]) -> float:
    """Return the milliseconds that *work* takes."""
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1_000


def measured(journal: LineJournal, lines: list[bytes]) -> dict[str, float]:
    """Return the medians of each kind of look in milliseconds."""
    kept = len(lines) - RECORDS
    before = b"".join(lines[:kept])
    journal.append_bytes(before, 0)
    end = len(before)
    page, watch = FollowedJournal(journal, "run.jsonl"), JournalWatch(journal)
    while watch.is_behind:
        watch.read_new_events()
    times: dict[str, list[float]] = {"view": [], "events": [], "nothing": []}
    for number in range(kept, len(lines)):
        journal.append_bytes(lines[number], end)
        end += len(lines[number])
        offset = page.offset
        times["view"].append(clocked(lambda: (page.read_new_records(), json.dumps(page.get_changes_after(offset)))))  # noqa: B023
        times["events"].append(clocked(watch.read_new_events))
        times["nothing"].append(clocked(watch.follower.may_have_new_records))

    def whole() -> None:
        history = journal.history()
        view = RunPayload(PageTexts(), "run.jsonl")
        view.add_new_records(history)
        json.dumps(view.to_dict())

    def all_events() -> None:
        history = journal.history()
        list(EventProjection().project_records(history, history.records))

    told = {name: statistics.median(found) for name, found in times.items()}
    return told | {"whole view": clocked(whole), "whole events": clocked(all_events)}


async def main(lengths: tuple[int, ...]) -> None:
    """Measure, and print a line for each length and store."""
    print(
        f"{'steps':>7} {'store':>7} {'view':>8} {'events':>8} {'nothing':>8} {'whole view':>12} {'whole events':>13}  (ms)"
    )
    for steps in lengths:
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder)
            lines = await asyncio.to_thread(recorded, steps, place / "made.jsonl")
            for name, journal in (
                ("file", FileJournal(place / "run.jsonl")),
                ("sqlite", SqliteJournal(place / "r.db", "one")),
            ):
                found = measured(journal, lines)
                print(
                    f"{steps:>7} {name:>7} {found['view']:>8.3f} {found['events']:>8.3f} {found['nothing']:>8.4f} "
                    f"{found['whole view']:>12.0f} {found['whole events']:>13.0f}",
                    flush=True,
                )


if __name__ == "__main__":
    asyncio.run(main(tuple(map(int, sys.argv[1:])) or STEPS))
