"""``stepengine ready``: which waiting runs go on with the present code."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import attrs
import typer

from stepengine.cli.commands.replay import repeat
from stepengine.cli.commands.test import fields_of
from stepengine.cli.exits import Exit
from stepengine.cli.journals import GoingOn, agent_id_of, find_journal, journal_at, other_versions, spread
from stepengine.cli.options import Options, with_options
from stepengine.cli.recording import GOES_ON, entries, latest
from stepengine.cli.screen.render import dumps, one_line, say
from stepengine.cli.settings import UsageProblem
from stepengine.errors import ReplayDivergence, StepEngineError

__all__ = ("ready",)


ADVICE = "\n  to go on "


@partial(with_options, without=("write", "shell", "web", "quiet", "verbose"))
def ready(
    options: Options,
    files: Annotated[list[str] | None, typer.Argument(metavar="FILE", help="Journals, or names of runs.")] = None,
    *,
    last: Annotated[
        bool, typer.Option("--last", help="The newest run of this folder that waits, in place of FILE.")
    ] = False,
    on_divergence: Annotated[str, typer.Option(help="raise or keep, as it will be given to resume.")] = "raise",
) -> Exit:
    """
    Say which waiting runs go on with the present code.

    For a look before a deployment: which would go on, and which would diverge.

    A run that waits for an answer, or that a crash ended, goes on in the code of today: `stepengine resume` first
    repeats what is recorded, and ends where the code asks for something else. This command does the repeating and stops
    there: nothing is performed or changed, no key is needed. FILE is a journal, a folder of them, an SQLite file or a
    run's name; without one, what `stepengine runs --waiting` lists. Runs that have ended do not count.

    For each run, and the first place that differs:
      ready      it goes on as it is
      keep       it goes on with `resume --on-divergence keep`: what is
                 recorded are effects of the same kind, with other content
      diverges   effects were added, removed or exchanged: put the old code
                 back until it has ended, or use extend or fork
      failed     it could not be tried: the journal is damaged, or its agent
                 is not found

    Leaves with:
      0    every waiting run goes on; with --on-divergence keep, also those
           of `keep`
      1    a run could not be tried
      5    a run would diverge

    Examples:
      stepengine ready
      stepengine ready journals/ --agent ./agents/mine.py
      stepengine ready runs.db --on-divergence keep --json
      stepengine ready --last
    """
    keeps = GoingOn(on_divergence=on_divergence).checked().on_divergence == "keep"
    goes_on = ("ready", "ended", "keep") if keeps else ("ready", "ended")
    told: list[dict[str, Any]] = []
    for file in _waiting(files or (), last=last):
        told.append(_try_resume(attrs.evolve(options, journal=file, last=False, quiet=True)))
        if not options.as_json and told[-1]["outcome"] != "ended":
            say("\n".join(_row_of(told[-1])), hang=4)
    outcomes = [entry["outcome"] for entry in told]
    if options.as_json:
        print(dumps(told))
    else:
        say(_summarize_outcomes(outcomes))
    if "failed" in outcomes:
        return Exit.FAILED
    return Exit.COMPLETED if all(outcome in goes_on for outcome in outcomes) else Exit.DIVERGED


def _waiting(files: Iterable[str], *, last: bool) -> list[str]:
    """Return the journals that were named; without any, those that `stepengine runs --waiting` lists."""
    named = list(files)
    if last and named:
        msg = f"--last and {named[0]!r} name different runs; give one of them"
        raise UsageProblem(msg)
    if last:
        return [latest(waiting=True).stem]
    here = str(Path.cwd())
    return spread(named) or [e.stem for e in entries() if e.status in GOES_ON and e.text("cwd") == here]


def _try_resume(options: Options) -> dict[str, object]:
    """Return how a run would go on: as it is, with what ``keep`` takes, or not."""
    file, first, known = options.journal, dict[str, Any](), dict[str, Any]()
    try:
        own = find_journal(options).in_force()
        journal = journal_at(own.journal)
        history = journal.history()
        if history.is_complete:
            return {"file": file, "outcome": "ended"}
        asked = [{"id": key, "text": question.text} for key, (_, question) in history.open_questions().items()]
        known = {"file": file, "agent": agent_id_of(history), "questions": asked, "packages": other_versions(history)}
        try:
            repeat(journal, own)
        except ReplayDivergence as error:
            first = _place(error)
        else:
            return {**known, "outcome": "ready"}
        repeat(journal, own, "keep")
    except ReplayDivergence as error:
        return {**known, "outcome": "diverges", **_place(error)}
    except (StepEngineError, UsageProblem) as error:
        return {**known, "file": file, "outcome": "failed", "message": str(error)}
    return {**known, "outcome": "keep", **first}


def _place(error: ReplayDivergence) -> dict[str, Any]:
    """Return where a run diverges, without the advice to whoever resumes it: nothing was resumed."""
    said = error.message.partition(ADVICE)[0]
    place = {"kind": error.kind, "step": error.step, "address": error.address, "site": error.site}
    return {"message": said, **place, "diff": fields_of(error.diff)}


def _row_of(entry: dict[str, Any]) -> Iterator[str]:
    yield f"{entry['outcome']:<10}{entry['file']}  {entry.get('agent', '')}".rstrip()
    yield from [f"  ? {one_line(q['id'], 40)}: {one_line(q['text'], 120)}" for q in entry.get("questions", ())]
    yield from [f"  ! {said}" for said in entry.get("packages", ())]
    yield from [f"    {line}" for line in entry.get("message", "").splitlines()]


def _summarize_outcomes(outcomes: list[str]) -> str:
    waiting = [outcome for outcome in outcomes if outcome != "ended"]
    ready, kept, other, failed = [waiting.count(o) for o in ("ready", "keep", "diverges", "failed")]
    ended = f"; {len(outcomes) - len(waiting)} have ended" if len(waiting) < len(outcomes) else ""
    return (
        f"{len(waiting)} waiting: {ready} go on as they are, {kept} with --on-divergence keep, {other} would diverge, "
        f"{failed} could not be tried{ended}"
    )
