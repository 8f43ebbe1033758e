"""``stepengine runs``: the recorded runs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from stepengine.cli.conversations import format_run_age
from stepengine.cli.exits import Exit, print_error
from stepengine.cli.journals import iterate_files_and_journals, raise_journal_errors_as_usage
from stepengine.cli.schedules import list_and_print_schedules
from stepengine.cli.screen.render import format_cost, one_line, print_visible, to_ascii_json
from stepengine.cli.settings import UsageProblem
from stepengine.cli.state_folder import list_recorded_runs
from stepengine.data.alike import list_names
from stepengine.journal.recorded_runs import GOES_ON, summarize_journal

APP = "stepengine"
COST = re.compile(r"\d{1,9}(?:\.\d{1,30})?")


_schedules_option = partial(typer.Option, rich_help_panel="Options of --schedules")


def runs(
    files: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FILE|FOLDER]...",
            help="Journals, SQLite files, or folders of them; with --schedules agent files, or folders of them.",
        ),
    ] = None,
    *,
    everywhere: Annotated[bool, typer.Option("--all", help="Runs of all folders.")] = False,
    waiting: Annotated[bool, typer.Option("--waiting", help="Only runs that wait or were interrupted.")] = False,
    schedules: Annotated[
        bool, typer.Option("--schedules", help="List scheduled starts of agents: next and last time.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON array.")] = False,
    place: Annotated[
        str,
        _schedules_option("--runs", help="Where the runs are recorded: a folder, or RUNS.db.", metavar="PLACE"),
    ] = "",
    db: Annotated[
        str,
        _schedules_option(
            help="Database of durable runs whose workers start them, in place of --runs.", metavar="URL|@FILE"
        ),
    ] = "",
    app: Annotated[str, _schedules_option(help="The deployment's name.")] = APP,
    config: Annotated[
        Path | None, _schedules_option(help="Settings file in place of the project's.", metavar="FILE")
    ] = None,
) -> Exit:
    """
    List the recorded runs of this folder, or schedules.

    The list is newest first, with name, age, status, agent, cost, prompt, open questions and other waits. Without
    FILE it has the runs that commands started here. With FILE it has the runs in these journals, SQLite files and
    folders.

    Commands accept the beginning of a name in place of FILE; --last is the newest run. Runs are in
    $STEPENGINE_STATE_DIR, else $XDG_STATE_HOME/stepengine, else ~/.local/state/stepengine. The settings
    journal.keep_runs and journal.keep_bytes limit them: the oldest ended runs are deleted. Waiting and interrupted
    runs stay.

    --schedules lists the schedules of ./agents and of the folders in the setting `agents`, or of the given files.
    An agent file declares one as:

      schedule = Schedule(agent, cron="0 7 * * 1-5",
                          timezone="Europe/Berlin", prompt="Go")

    --runs or --db adds the last time, the status of its run, and the number of missed times.

    Examples:
      stepengine runs
      stepengine runs --waiting
      stepengine runs --all --json
      stepengine runs ./journals
      stepengine runs real.db --waiting
      stepengine runs --schedules
      stepengine runs --schedules ./agents/triage.py --runs ./runs
      stepengine runs --schedules --db @/run/secrets/db --app shop
    """
    if schedules:
        if everywhere or waiting:
            msg = "--schedules lists schedules, not runs; leave out --all and --waiting"
            raise UsageProblem(msg)
        return list_and_print_schedules(files or (), runs=place, db=db, app=app, as_json=as_json, config=config)
    if place or db or config or app != APP:
        msg = "--runs, --db, --app and --config need --schedules; add --schedules, or leave them out to list recorded runs"
        raise UsageProblem(msg)
    chosen = _list_chosen_runs(files or (), everywhere=everywhere, resumable_only=waiting)
    if as_json:
        print(to_ascii_json(chosen))
    elif chosen:
        print_visible("\n".join([line for told in chosen for line in _format_run(told)]), hanging_indent=4)
    else:
        of = " that waits" if waiting else ""
        where = f"in {list_names(files)}" if files else "anywhere" if everywhere else "in this folder"
        hint = "; `stepengine run AGENT` records one"
        if files:
            hint = "; --schedules lists the schedules of agent files"
        elif not everywhere:
            hint += "; --all lists those of all folders"
        print_error(f"no run{of} is recorded {where}{hint}", Exit.COMPLETED)
    return Exit.COMPLETED


def _list_chosen_runs(files: Sequence[str], *, everywhere: bool, resumable_only: bool) -> list[dict[str, Any]]:
    """Return the runs in *files*, or without any the runs that commands started in this folder, or *everywhere*; newest first."""
    if not files:
        found = list_recorded_runs(working_folder=None if everywhere else Path.cwd(), resumable_only=resumable_only)
        return [entry.to_json() for entry in found]
    if everywhere:
        msg = f"--all lists the runs of all folders; leave it out, or {files[0]!r}"
        raise UsageProblem(msg)
    return [told for told in _list_runs_of_files(files) if not resumable_only or told["status"] in GOES_ON]


def _list_runs_of_files(files: Iterable[str]) -> list[dict[str, Any]]:
    """Return the runs in journals, SQLite files and folders, newest first."""
    with raise_journal_errors_as_usage():
        journals = {
            name: journal for file in files for name, journal in iterate_files_and_journals(file) if journal is not None
        }
    told: list[dict[str, Any]] = [summarize_journal(journal, name) for name, journal in journals.items()]
    return sorted(told, key=lambda one: (str(one.get("created") or ""), one["journal"]), reverse=True)


def _format_run(run: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines about a recorded run: name, age, status, agent, cost, title and waits."""
    cost, agent = run.get("cost"), run.get("agent")
    spent = format_cost(Decimal(cost)) if isinstance(cost, str) and COST.fullmatch(cost) else "-"
    agent_id = one_line(str(agent.get("id") or "") if isinstance(agent, dict) else "", 24)
    name, age = run.get("stem") or one_line(str(run["journal"]), 200), format_run_age(str(run.get("created") or ""))
    row = f"{name}  {age:>4}  {run['status']:<11}  {agent_id:<16}  {spent:>8}"
    yield f"{row}  {one_line(str(run.get('title') or ''), 80)}".rstrip()
    waits = run.get("waits") if run["status"] == "suspended" else ()
    for wait in waits if isinstance(waits, list) else ():
        if isinstance(wait, dict):
            yield f"  ~ {one_line(str(wait.get('said')), 200)}"
    questions = run.get("questions")
    for question in questions if isinstance(questions, list) else ():
        if isinstance(question, dict):
            yield f"  ? {one_line(str(question.get('id')), 40)}: {one_line(str(question.get('text')), 120)}"
