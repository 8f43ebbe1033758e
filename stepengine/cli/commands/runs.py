"""``stepengine runs``: the recorded runs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Annotated

import typer

from stepengine.cli.conversations import age_of
from stepengine.cli.exits import Exit, complain
from stepengine.cli.recording import GOES_ON, RecordedRun, entries
from stepengine.cli.screen.render import dumps, money, one_line, say

__all__ = ("runs",)


COST = re.compile(r"\d{1,9}(?:\.\d{1,30})?")


def runs(
    *,
    everywhere: Annotated[bool, typer.Option("--all", help="Runs of all folders.")] = False,
    waiting: Annotated[bool, typer.Option("--waiting", help="Only those that wait or were interrupted.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON array.")] = False,
) -> Exit:
    """
    List the recorded runs of this folder.

    Newest first: name, age, status, agent, cost, prompt, open questions, and what else a run waits for.

    The beginning of a name stands for the run wherever a FILE is asked for; --last is the newest one. Runs lie in
    $STEPENGINE_STATE_DIR, else $XDG_STATE_HOME/stepengine, else ~/.local/state/stepengine. The oldest ended ones go, by
    the settings journal.keep_runs and journal.keep_bytes; a run that waits or was interrupted stays.

    Examples:
      stepengine runs
      stepengine runs --waiting
      stepengine runs --all --json
    """
    here = str(Path.cwd())
    chosen = [entry for entry in entries() if everywhere or entry.text("cwd") == here]
    chosen = [entry for entry in chosen if not waiting or entry.status in GOES_ON]
    if as_json:
        print(dumps([{**entry.info, "stem": entry.stem, "status": entry.status} for entry in chosen]))
    elif chosen:
        say("\n".join([line for entry in chosen for line in _row(entry)]), hang=4)
    else:
        complain("there is no such run; --all lists those of all folders", Exit.COMPLETED)
    return Exit.COMPLETED


def _row(entry: RecordedRun) -> Iterator[str]:
    cost = entry.info.get("cost")
    spent = money(Decimal(cost)) if isinstance(cost, str) and COST.fullmatch(cost) else "-"
    agent = one_line(entry.text("agent", "id"), 24)
    row = f"{entry.stem}  {age_of(entry.text('created')):>4}  {entry.status:<11}  {agent:<16}  {spent:>8}"
    yield f"{row}  {one_line(entry.text('title'), 80)}".rstrip()
    waits = entry.info.get("waits") if entry.status == "suspended" else ()
    for wait in waits if isinstance(waits, list) else ():
        if isinstance(wait, dict):
            yield f"  ~ {one_line(str(wait.get('said')), 200)}"
    questions = entry.info.get("questions")
    for question in questions if isinstance(questions, list) else ():
        if isinstance(question, dict):
            yield f"  ? {one_line(str(question.get('id')), 40)}: {one_line(str(question.get('text')), 120)}"
