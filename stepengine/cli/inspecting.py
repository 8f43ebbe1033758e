"""``stepengine runs``, ``diff``, ``check``, ``test`` and ``ready``: listing, comparing, checking, replaying recorded runs."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from stepengine.cli.journals import GoingOn, found, is_cut_off, journal_at, recorded_agent
from stepengine.cli.options import Options, UsageProblem
from stepengine.cli.recording import GOES_ON, Entry, entries, latest
from stepengine.cli.report import Exit, money
from stepengine.cli.running import bench_for, complain, explained
from stepengine.cli.screen import dumps, one_line, visible
from stepengine.errors import JournalError, ReplayDivergence, StepEngineError

if TYPE_CHECKING:
    from stepengine.data.state import RunResult
    from stepengine.journal import Journal, OnDivergence, Report
    from stepengine.journal.divergence import Field

__all__ = ("check_command", "diff_command", "ready_command", "runs_command", "test_command")

SUFFIX = ".jsonl"
ADVICE = "\n  to go on "
COST = re.compile(r"\d{1,9}(?:\.\d{1,30})?")


def diff_command(a: str, b: str, *, last: bool, as_json: bool) -> Exit:
    """Print what two runs did differently; *last* stands for the newest one, alone for the one before it and it."""

    def command() -> Exit:
        from stepengine.journal import diff

        try:
            before, after = _two(a, b, last=last)
            found = diff(journal_at(before), journal_at(after))
        except JournalError as error:
            return complain(error.message, Exit.FAILED)
        print(dumps(found.to_json()) if as_json else visible(str(found)))
        return Exit.FAILED if found else Exit.COMPLETED

    return explained(command)


def _two(a: str, b: str, *, last: bool) -> tuple[str, str]:
    if last and b:
        msg = f"--last, {a!r} and {b!r} name three runs; give two of them"
        raise UsageProblem(msg)
    if last:
        return a or latest(before=1).journal, latest().journal
    if not a or not b:
        msg = "name two runs, A and B, as files or as `stepengine runs` lists them; --last stands for the newest one"
        raise UsageProblem(msg)
    return a, b


def runs_command(*, everywhere: bool, waiting: bool, as_json: bool) -> Exit:
    """Print the recorded runs: those of the working folder, or all."""
    here = str(Path.cwd())
    try:
        found = entries()
    except UsageProblem as problem:
        return complain(str(problem))
    chosen = [entry for entry in found if everywhere or entry.text("cwd") == here]
    chosen = [entry for entry in chosen if not waiting or entry.status in GOES_ON]
    if as_json:
        print(dumps([{**entry.info, "stem": entry.stem, "status": entry.status} for entry in chosen]))
    elif chosen:
        print(visible("\n".join([line for entry in chosen for line in _row(entry)])))
    else:
        complain("there is no such run; --all lists those of all folders", Exit.COMPLETED)
    return Exit.COMPLETED


def _row(entry: Entry) -> Iterator[str]:
    cost = entry.info.get("cost")
    spent = money(Decimal(cost)) if isinstance(cost, str) and COST.fullmatch(cost) else "-"
    agent = one_line(entry.text("agent", "id"), 24)
    row = f"{entry.stem}  {_age(entry.text('created')):>4}  {entry.status:<11}  {agent:<16}  {spent:>8}"
    yield f"{row}  {one_line(entry.text('title'), 80)}".rstrip()
    questions = entry.info.get("questions")
    for question in questions if isinstance(questions, list) else ():
        if isinstance(question, dict):
            yield f"  ? {one_line(str(question.get('id')), 40)}: {one_line(str(question.get('text')), 120)}"


def _age(created: str) -> str:
    try:
        seconds = (datetime.now(UTC) - datetime.fromisoformat(created)).total_seconds()
    except (ValueError, TypeError):
        return "-"
    for unit, length in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= length:
            return f"{int(seconds // length)}{unit}"
    return f"{max(0, int(seconds))}s"


def check_command(files: Iterable[str], *, as_json: bool) -> Exit:
    """Print what is wrong with journals."""

    def command() -> Exit:
        from stepengine.journal import check

        reports = [check(journal_at(file)) for file in _spread(files)]
        if as_json:
            print(dumps([{"ok": _is_good(report), **attrs.asdict(report)} for report in reports]))
        else:
            print(visible("\n".join([line for report in reports for line in _checked(report)])))
        return Exit.COMPLETED if all(map(_is_good, reports)) else Exit.FAILED

    return explained(command)


def _is_good(report: Report) -> bool:
    return bool(report) and not report.secrets


def _checked(report: Report) -> Iterator[str]:
    state = "complete" if report.is_complete else "without an end: it can be resumed"
    known = "not usable as it is" if report.problems else f"{report.records} records, {state}"
    yield f"{'ok' if _is_good(report) else 'BAD':<4}{report.name}  {known}"
    yield from [f"      {problem}" for problem in report.problems]
    yield from [f"      looks like a secret: {secret}" for secret in report.secrets]
    if report.torn:
        yield f"      {report.torn} bytes at the end belong to no whole record; resuming cuts them off"


def test_command(files: Iterable[str], *, agent: str, as_json: bool, config: Path | None) -> Exit:
    """Replay journals against the present code and print which came out differently."""

    def command() -> Exit:
        told: list[dict[str, Any]] = []
        options = Options(agent=agent, quiet=True, config=config).in_force()
        for file in _spread(files):
            told.append(_replayed(file, options))
            if not as_json:
                print(visible("\n".join(_told(told[-1]))), flush=True)
        diverged, broken = [sum(t["outcome"] == o for t in told) for o in ("diverged", "failed")]
        if as_json:
            print(dumps(told))
        else:
            print(f"{len(told) - diverged - broken} of {len(told)} as recorded, {diverged} diverged, {broken} failed")
        return Exit.FAILED if broken else Exit.DIVERGED if diverged else Exit.COMPLETED

    return explained(command)


def _replayed(file: str, options: Options) -> dict[str, Any]:
    try:
        journal = journal_at(file)
        result = _again(journal, options)
    except ReplayDivergence as error:
        return _diverged(file, error.message, error.diff, step=error.step, address=error.address, site=error.site)
    except (StepEngineError, UsageProblem) as error:
        return {"file": file, "outcome": "failed", "message": str(error)}
    other = _other_end(journal, result)
    if other:
        # No effect differs, so a replay goes through; a suite is asked whether the agent still does what it did.
        lines = [f"  {pointer}  recorded {recorded}   now {now}" for pointer, recorded, now in other]
        said = [
            f"every effect is as recorded, but the run ends in another way: {result.error or ''}".rstrip(": "),
            *lines,
        ]
        return _diverged(file, "\n".join(said), other, step=result.state.step_index, address="#-1", site="")
    status = "not ended" if is_cut_off(journal, result) else result.status.value
    return {"file": file, "outcome": "ok", "status": status, "steps": result.state.step_index}


def _again(journal: Journal, options: Options, on_divergence: OnDivergence = "raise") -> RunResult[Any]:
    """Return what the present code makes of a recorded run; nothing is performed."""
    agent = recorded_agent(journal, options)
    bench = bench_for(options, agent, performs=False)

    async def ended() -> RunResult[Any]:
        async with bench.engine:
            return await bench.engine.replay(journal, agent=agent, on_divergence=on_divergence)

    return asyncio.run(ended())


def _diverged(file: str, message: str, diff: Iterable[tuple[str, str, str]], **place: Any) -> dict[str, Any]:
    return {"file": file, "outcome": "diverged", "message": message, **place, "diff": _fields(diff)}


def _fields(diff: Iterable[tuple[str, str, str]]) -> list[dict[str, str]]:
    return [{"pointer": pointer, "recorded": recorded, "now": now} for pointer, recorded, now in diff]


def _other_end(journal: Journal, replayed: RunResult[Any]) -> list[Field]:
    """Return how a run that did the same ends otherwise than it did: in its status, its output, the kind of its error."""
    from stepengine.journal.divergence import fields_between
    from stepengine.journal.encoding import comparable
    from stepengine.journal.show import ended_of

    made = replayed.journal
    recorded, now = ended_of(journal.history()), ended_of(made.history()) if made is not None else None
    if recorded is None or now is None:
        return []
    before, after = [{**comparable(end), "status": end.status.value} for end in (recorded, now)]
    return list(fields_between(before, after))


def _told(entry: dict[str, Any]) -> Iterator[str]:
    if entry["outcome"] == "ok":
        yield f"ok        {entry['file']}  {entry['status']}, {entry['steps']} steps"
        return
    yield f"{entry['outcome'].upper():<10}{entry['file']}"
    yield from [f"    {line}" for line in entry["message"].splitlines()]


def ready_command(options: Options, files: Iterable[str], on_divergence: str) -> Exit:
    """Say which waiting runs would go on with the present code, and which not."""

    def command() -> Exit:
        keeps = GoingOn(on_divergence=on_divergence).checked().on_divergence == "keep"
        goes_on = ("ready", "ended", "keep") if keeps else ("ready", "ended")
        told: list[dict[str, Any]] = []
        for file in _waiting(files, last=options.last):
            told.append(_tried(attrs.evolve(options, journal=file, last=False, quiet=True)))
            if not options.as_json and told[-1]["outcome"] != "ended":
                print(visible("\n".join(_row_of(told[-1]))), flush=True)
        outcomes = [entry["outcome"] for entry in told]
        if options.as_json:
            print(dumps(told))
        else:
            print(_counted(outcomes))
        if "failed" in outcomes:
            return Exit.FAILED
        return Exit.COMPLETED if all(outcome in goes_on for outcome in outcomes) else Exit.DIVERGED

    return explained(command)


def _waiting(files: Iterable[str], *, last: bool) -> list[str]:
    """Return the journals that were named; without any, those that `stepengine runs --waiting` lists."""
    named = list(files)
    if last and named:
        msg = f"--last and {named[0]!r} name different runs; give one of them"
        raise UsageProblem(msg)
    if last:
        return [latest(waiting=True).stem]
    here = str(Path.cwd())
    return _spread(named) or [e.stem for e in entries() if e.status in GOES_ON and e.text("cwd") == here]


def _tried(options: Options) -> dict[str, Any]:
    """Return how a run would go on: as it is, with what ``keep`` takes, or not."""
    file, first, known = options.journal, dict[str, Any](), dict[str, Any]()
    try:
        own = found(options).in_force()
        journal = journal_at(own.journal)
        history = journal.history()
        if history.is_complete:
            return {"file": file, "outcome": "ended"}
        asked = [{"id": key, "text": question.text} for key, (_, question) in history.open_questions().items()]
        known = {"file": file, "agent": str(history.root["agent_id"]), "questions": asked}
        try:
            _again(journal, own)
        except ReplayDivergence as error:
            first = _place(error)
        else:
            return {**known, "outcome": "ready"}
        _again(journal, own, "keep")
    except ReplayDivergence as error:
        return {**known, "outcome": "diverges", **_place(error)}
    except (StepEngineError, UsageProblem) as error:
        return {"file": file, "outcome": "failed", "message": str(error)}
    return {**known, "outcome": "keep", **first}


def _place(error: ReplayDivergence) -> dict[str, Any]:
    """Return where a run diverges, without the advice to whoever resumes it: nothing was resumed."""
    said = error.message.partition(ADVICE)[0]
    place = {"kind": error.kind, "step": error.step, "address": error.address, "site": error.site}
    return {"message": said, **place, "diff": _fields(error.diff)}


def _row_of(entry: dict[str, Any]) -> Iterator[str]:
    yield f"{entry['outcome']:<10}{entry['file']}  {entry.get('agent', '')}".rstrip()
    yield from [f"  ? {one_line(q['id'], 40)}: {one_line(q['text'], 120)}" for q in entry.get("questions", ())]
    yield from [f"    {line}" for line in entry.get("message", "").splitlines()]


def _counted(outcomes: list[str]) -> str:
    waiting = [outcome for outcome in outcomes if outcome != "ended"]
    ready, kept, other, failed = [waiting.count(o) for o in ("ready", "keep", "diverges", "failed")]
    ended = f"; {len(outcomes) - len(waiting)} have ended" if len(waiting) < len(outcomes) else ""
    return (
        f"{len(waiting)} waiting: {ready} go on as they are, {kept} with --on-divergence keep, {other} would diverge, "
        f"{failed} could not be tried{ended}"
    )


def _spread(files: Iterable[str]) -> list[str]:
    """
    Return the files, for a folder the journals in it, and for an SQLite file the runs in it.

    Raises:
        UsageProblem: when a folder holds none.
    """
    from stepengine.journal import SqliteJournal
    from stepengine.journal.finding import database_of

    found: list[str] = []
    for file in files:
        if not Path(file).is_dir():
            runs = SqliteJournal(file).runs() if database_of(file) == (file, "") else []
            found += [f"{file}#{run}" for run in runs] or [file]
            continue
        inside = [str(path) for path in sorted(Path(file).rglob(f"*{SUFFIX}"))]
        if not inside:
            msg = f"there is no *{SUFFIX} in {file!r}; name journals, or a folder that holds some"
            raise UsageProblem(msg)
        found += inside
    return found
