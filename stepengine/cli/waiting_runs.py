"""``stepengine replay --waiting``: which waiting runs go on with the present code."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import attrs

from stepengine.cli.exits import Exit
from stepengine.cli.journals import (
    add_journal_to_options,
    agent_id_of,
    check_choice,
    expand_to_journals,
    fields_to_dicts,
    list_version_changes,
    open_journal,
    replay_recorded_run,
)
from stepengine.cli.options import Options
from stepengine.cli.screen.render import one_line, print_visible, to_ascii_json
from stepengine.cli.settings import UsageProblem
from stepengine.cli.state_folder import get_newest_run, list_recorded_runs
from stepengine.errors import ReplayDivergence, StepEngineError
from stepengine.journal.pending_items import open_questions

ADVICE = "\n  to go on "


def replay_waiting(options: Options, files: Iterable[str], on_divergence: str) -> Exit:
    """
    Replay waiting runs against the present code, and print which of them can be resumed.

    Args:
        options: The options of the command; ``last`` names the newest run of this folder that waits.
        files: Journals, folders of them, SQLite files, and names of runs; by default what `stepengine runs --waiting` lists.
        on_divergence: As it will be given to `stepengine resume`.
    """
    keeps = check_choice("--on-divergence", on_divergence, ("raise", "stop", "keep")) == "keep"
    goes_on = ("ready", "ended", "keep") if keeps else ("ready", "ended")
    told: list[dict[str, Any]] = []
    for file in _find_waiting_runs(files, last=options.last):
        told.append(_replay_for_resume(attrs.evolve(options, journal=file, last=False, quiet=True)))
        if not options.as_json and told[-1]["outcome"] != "ended":
            print_visible("\n".join(_format_resume_entry(told[-1])), hang=4)
    outcomes = [entry["outcome"] for entry in told]
    if options.as_json:
        print(to_ascii_json(told))
    else:
        print_visible(_summarize_outcomes(outcomes))
    if "failed" in outcomes:
        return Exit.FAILED
    return Exit.COMPLETED if all(outcome in goes_on for outcome in outcomes) else Exit.DIVERGED


def _find_waiting_runs(files: Iterable[str], *, last: bool) -> list[str]:
    """Return the given journals, else those that `stepengine runs --waiting` lists."""
    named = list(files)
    if last and named:
        msg = f"--last and {named[0]!r} name different runs; pass one of them"
        raise UsageProblem(msg)
    if last:
        return [get_newest_run(waiting=True).stem]
    return expand_to_journals(named) or [e.stem for e in list_recorded_runs(working_folder=Path.cwd(), waiting=True)]


def _replay_for_resume(options: Options) -> dict[str, object]:
    """Replay a run and return the outcome of resuming it: ready, with ``keep``, diverging or failed."""
    file, first, known = options.journal, dict[str, Any](), dict[str, Any]()
    try:
        own = add_journal_to_options(options).in_force()
        journal = open_journal(own.journal)
        history = journal.history()
        if history.is_complete:
            return {"file": file, "outcome": "ended"}
        asked = [{"id": key, "text": question.text} for key, (_, question) in open_questions(history).items()]
        known = {
            "file": file,
            "agent": agent_id_of(history),
            "questions": asked,
            "packages": list_version_changes(history),
        }
        try:
            replay_recorded_run(journal, own)
        except ReplayDivergence as error:
            first = _divergence_to_dict(error)
        else:
            return {**known, "outcome": "ready"}
        replay_recorded_run(journal, own, on_divergence="keep")
    except ReplayDivergence as error:
        return {**known, "outcome": "diverges", **_divergence_to_dict(error)}
    except (StepEngineError, UsageProblem) as error:
        return {**known, "file": file, "outcome": "failed", "message": str(error)}
    return {**known, "outcome": "keep", **first}


def _divergence_to_dict(error: ReplayDivergence) -> dict[str, Any]:
    """Return a divergence as a dictionary, without the advice to resume."""
    said = error.message.partition(ADVICE)[0]
    place = {"kind": error.kind, "step": error.step, "address": error.address, "site": error.site}
    return {"message": said, **place, "diff": fields_to_dicts(error.diff)}


def _format_resume_entry(entry: dict[str, Any]) -> Iterator[str]:
    yield f"{entry['outcome']:<10}{entry['file']}  {entry.get('agent', '')}".rstrip()
    yield from [f"  ? {one_line(q['id'], 40)}: {one_line(q['text'], 120)}" for q in entry.get("questions", ())]
    yield from [f"  ! {said}" for said in entry.get("packages", ())]
    yield from [f"    {line}" for line in entry.get("message", "").splitlines()]


def _summarize_outcomes(outcomes: list[str]) -> str:
    waiting = [outcome for outcome in outcomes if outcome != "ended"]
    ready, kept, other, failed = [waiting.count(o) for o in ("ready", "keep", "diverges", "failed")]
    ended = f"; {len(outcomes) - len(waiting)} have ended" if len(waiting) < len(outcomes) else ""
    return (
        f"{len(waiting)} waiting: {ready} can be resumed as they are, {kept} with --on-divergence keep, {other} would diverge, "
        f"{failed} could not be tried{ended}"
    )
