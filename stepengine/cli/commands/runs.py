"""``stepengine runs``: the recorded runs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from stepengine.cli.conversations import age_of
from stepengine.cli.exits import Exit, complain
from stepengine.cli.recording import GOES_ON, RecordedRun, entries
from stepengine.cli.schedules import list_schedules
from stepengine.cli.screen.render import dumps, money, one_line, say
from stepengine.cli.settings import UsageProblem

__all__ = ("runs",)


APP = "stepengine"
COST = re.compile(r"\d{1,9}(?:\.\d{1,30})?")


_schedules_option = partial(typer.Option, rich_help_panel="Options of --schedules")


def runs(
    files: Annotated[
        list[str] | None,
        typer.Argument(metavar="[FILE|FOLDER]...", help="With --schedules: agent files, or folders of them."),
    ] = None,
    *,
    everywhere: Annotated[bool, typer.Option("--all", help="Runs of all folders.")] = False,
    waiting: Annotated[bool, typer.Option("--waiting", help="Only those that wait or were interrupted.")] = False,
    schedules: Annotated[
        bool, typer.Option("--schedules", help="List when agents start by themselves: next and last time.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON array.")] = False,
    place: Annotated[
        str,
        _schedules_option("--runs", help="Where their runs are recorded: a folder, or RUNS.db.", metavar="PLACE"),
    ] = "",
    db: Annotated[
        str, _schedules_option(help="Or a database of durable runs whose workers start them.", metavar="URL|@FILE")
    ] = "",
    app: Annotated[str, _schedules_option(help="The deployment's name.")] = APP,
    config: Annotated[
        Path | None, _schedules_option(help="Settings of this file in place of the project's.", metavar="FILE")
    ] = None,
) -> Exit:
    """
    List the recorded runs of this folder, or schedules.

    Newest first: name, age, status, agent, cost, prompt, open questions, and what else a run waits for.

    The beginning of a name stands for the run wherever a FILE is asked for; --last is the newest one. Runs are in
    $STEPENGINE_STATE_DIR, else $XDG_STATE_HOME/stepengine, else ~/.local/state/stepengine. The oldest ended ones are
    deleted, by the settings journal.keep_runs and journal.keep_bytes; a run that waits or was interrupted stays.

    With --schedules the schedules of ./agents, and of the folders in the setting `agents`, are listed, or those of the
    files given. An agent file has one as:

      schedule = Schedule(agent, cron="0 7 * * 1-5",
                          timezone="Europe/Berlin", prompt="Go")

    With --runs or --db also the last time, how its run ended, and how many times were missed.

    Examples:
      stepengine runs
      stepengine runs --waiting
      stepengine runs --all --json
      stepengine runs --schedules
      stepengine runs --schedules ./agents/triage.py --runs ./runs
      stepengine runs --schedules --db @/run/secrets/db --app shop
    """
    if schedules:
        if everywhere or waiting:
            msg = "--schedules lists schedules, not runs; leave out --all and --waiting"
            raise UsageProblem(msg)
        return list_schedules(files or (), runs=place, db=db, app=app, as_json=as_json, config=config)
    if files or place or db or config or app != APP:
        msg = "files, --runs, --db, --app and --config are of --schedules; add --schedules"
        raise UsageProblem(msg)
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
