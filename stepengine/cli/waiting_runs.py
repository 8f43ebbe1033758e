"""``stepengine replay --waiting``: which waiting runs go on with the present code."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import attrs

from stepengine.cli.exits import Exit
from stepengine.cli.journals import (
    agent_id_of,
    choice_of,
    fields_of,
    find_journal,
    journal_at,
    other_versions,
    repeat,
    spread,
)
from stepengine.cli.options import Options
from stepengine.cli.recording import GOES_ON, entries, latest
from stepengine.cli.screen.render import dumps, one_line, say
from stepengine.cli.settings import UsageProblem
from stepengine.errors import ReplayDivergence, StepEngineError

__all__ = ("replay_waiting",)


ADVICE = "\n  to go on "


def replay_waiting(options: Options, files: Iterable[str], on_divergence: str) -> Exit:
    """
    Replay waiting runs against the present code, and print which of them can be resumed.

    Args:
        options: The options of the command; ``last`` names the newest run of this folder that waits.
        files: Journals, folders of them, SQLite files, and names of runs; by default what `stepengine runs --waiting` lists.
        on_divergence: As it will be given to `stepengine resume`.
    """
    keeps = choice_of("--on-divergence", on_divergence, ("raise", "stop", "keep")) == "keep"
    goes_on = ("ready", "ended", "keep") if keeps else ("ready", "ended")
    told: list[dict[str, Any]] = []
    for file in _waiting(files, last=options.last):
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
