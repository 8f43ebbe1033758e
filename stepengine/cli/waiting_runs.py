"""``stepengine replay --waiting``: which waiting runs the current code can resume."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from stepengine.cli.exits import Exit
from stepengine.cli.journals import (
    add_journal_to_options,
    expand_to_journals,
    load_replay_setup,
    open_journal,
    require_choice,
)
from stepengine.cli.options import Options
from stepengine.cli.screen.render import one_line, print_visible, to_ascii_json
from stepengine.cli.settings import UsageProblem
from stepengine.cli.state_folder import get_newest_run, list_recorded_runs
from stepengine.errors import StepEngineError

if TYPE_CHECKING:
    from stepengine.evaluation import WaitingRun


def replay_and_print_waiting_runs(options: Options, files: Iterable[str], on_divergence: str) -> Exit:
    """
    Replay waiting runs with the current code, and print which of them can be resumed.

    Args:
        options: The options of the command; ``last`` names the newest run of this folder that waits.
        files: Journals, folders of them, SQLite files, and names of runs; by default what `stepengine runs --waiting` lists.
        on_divergence: The value that `stepengine resume` will get.
    """
    keeps = require_choice("--on-divergence", on_divergence, ("raise", "stop", "keep")) == "keep"
    goes_on = ("ready", "ended", "keep") if keeps else ("ready", "ended")
    found: list[WaitingRun] = []
    for file in _list_waiting_runs(files, last=options.last):
        found.append(_replay_waiting_run(attrs.evolve(options, journal=file, last=False, quiet=True)))
        if not options.as_json and found[-1].outcome != "ended":
            print_visible("\n".join(_format_run(found[-1])), hanging_indent=4)
    outcomes = [run.outcome for run in found]
    if options.as_json:
        print(to_ascii_json([run.to_json() for run in found]))
    else:
        print_visible(_summarize_outcomes(outcomes))
    if "failed" in outcomes:
        return Exit.FAILED
    return Exit.COMPLETED if all(outcome in goes_on for outcome in outcomes) else Exit.DIVERGED


def _list_waiting_runs(files: Iterable[str], *, last: bool) -> list[str]:
    """Return the journals in *files*, the newest waiting run with *last*, or else all runs that `stepengine runs --waiting` lists."""
    named = list(files)
    if last and named:
        msg = f"--last and {named[0]!r} name different runs; pass one of them"
        raise UsageProblem(msg)
    if last:
        return [get_newest_run(resumable_only=True).stem]
    return expand_to_journals(named) or [
        e.stem for e in list_recorded_runs(working_folder=Path.cwd(), resumable_only=True)
    ]


def _replay_waiting_run(options: Options) -> WaitingRun:
    """Replay a waiting run, and return whether the current code can resume it, or the error. An ended run is not replayed."""
    from stepengine.evaluation import WaitingRun, replay_waiting
    from stepengine.evaluation.waiting_runs import read_waiting_run

    run = WaitingRun(options.journal, "failed")
    try:
        own = add_journal_to_options(options).with_settings()
        journal = open_journal(own.journal)
        run = attrs.evolve(read_waiting_run(journal), file=options.journal)
        if run.outcome == "ended":
            return run
        agent, bench = load_replay_setup(own, journal.history())
        with bench.engine as engine:
            (replayed,) = asyncio.run(replay_waiting(engine, [journal], agent=agent))
    except (StepEngineError, UsageProblem) as error:
        return attrs.evolve(run, error=error)
    return attrs.evolve(replayed, file=options.journal)


def _format_run(run: WaitingRun) -> Iterator[str]:
    """Yield the lines about a waiting run: outcome, questions, package changes and error."""
    yield f"{run.outcome:<10}{run.file}  {run.agent_id}".rstrip()
    yield from [f"  ? {one_line(one.id, 40)}: {one_line(one.text, 120)}" for one in run.questions]
    yield from [f"  ! {said}" for said in run.packages]
    yield from [f"    {line}" for line in run.to_json().get("message", "").splitlines()]


def _summarize_outcomes(outcomes: list[str]) -> str:
    """Return a text with the numbers of runs that can be resumed, diverge or failed."""
    waiting = [outcome for outcome in outcomes if outcome != "ended"]
    ready, kept, other, failed = [waiting.count(o) for o in ("ready", "keep", "diverges", "failed")]
    ended = f"; {len(outcomes) - len(waiting)} have ended" if len(waiting) < len(outcomes) else ""
    return (
        f"{len(waiting)} waiting: {ready} can be resumed as they are, {kept} with --on-divergence keep, {other} would diverge, "
        f"{failed} could not be checked{ended}"
    )
