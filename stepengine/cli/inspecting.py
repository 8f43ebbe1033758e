"""``stepengine diff``, ``check`` and ``test``: comparing, checking and replaying recorded runs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import attrs

from stepengine.cli.journals import journal_at, recorded_agent
from stepengine.cli.report import Exit
from stepengine.cli.running import Options, UsageProblem, bench_for, complain, explained
from stepengine.cli.screen import dumps, visible
from stepengine.errors import JournalError, ReplayDivergence, StepEngineError

__all__ = ("check_command", "diff_command", "test_command")

SUFFIX = ".jsonl"


def diff_command(a: str, b: str, *, as_json: bool) -> Exit:
    """Print what two runs did differently."""

    def command() -> Exit:
        from stepengine.journal import diff

        try:
            found = diff(journal_at(a), journal_at(b))
        except JournalError as error:
            return complain(error.message, Exit.FAILED)
        print(dumps(found.to_json()) if as_json else visible(str(found)))
        return Exit.FAILED if found else Exit.COMPLETED

    return explained(command)


def check_command(files: Iterable[str], *, as_json: bool) -> Exit:
    """Print what is wrong with journals."""

    def command() -> Exit:
        from stepengine.journal import check

        reports = [check(journal_at(file)) for file in _spread(files)]
        if as_json:
            print(dumps([{"ok": bool(r) and not r.secrets, **attrs.asdict(r)} for r in reports]))
        else:
            print(visible("\n".join([line for report in reports for line in _checked(report)])))
        return Exit.COMPLETED if all(reports) and not any(r.secrets for r in reports) else Exit.FAILED

    return explained(command)


def _checked(report: Any) -> Iterator[str]:
    good = bool(report) and not report.secrets
    state = "complete" if report.is_complete else "without an end: it can be resumed"
    known = "not usable as it is" if report.problems else f"{report.records} records, {state}"
    yield f"{'ok' if good else 'BAD':<4}{report.name}  {known}"
    yield from [f"      {problem}" for problem in report.problems]
    yield from [f"      looks like a secret: {secret}" for secret in report.secrets]
    if report.torn:
        yield f"      {report.torn} bytes at the end belong to no whole record; resuming cuts them off"


def test_command(files: Iterable[str], *, agent: str, as_json: bool) -> Exit:
    """Replay journals against the present code and print which came out differently."""

    def command() -> Exit:
        told: list[dict[str, Any]] = []
        for file in _spread(files):
            told.append(_replayed(file, agent))
            if not as_json:
                print(visible("\n".join(_told(told[-1]))), flush=True)
        diverged, broken = [sum(t["outcome"] == o for t in told) for o in ("diverged", "failed")]
        if as_json:
            print(dumps(told))
        else:
            print(f"{len(told) - diverged - broken} of {len(told)} as recorded, {diverged} diverged, {broken} failed")
        return Exit.FAILED if broken else Exit.DIVERGED if diverged else Exit.COMPLETED

    return explained(command)


def _replayed(file: str, given: str) -> dict[str, Any]:
    try:
        journal = journal_at(file)
        options = Options(agent=given, quiet=True)
        found = recorded_agent(journal, options)
        bench = bench_for(options, found, performs=False)

        async def ended() -> Any:
            async with bench.engine:
                return await bench.engine.replay(journal, agent=found)

        result = asyncio.run(ended())
    except ReplayDivergence as error:
        place = {"step": error.step, "address": error.address, "site": error.site}
        diff = [{"pointer": p, "recorded": a, "now": b} for p, a, b in error.diff]
        return {"file": file, "outcome": "diverged", "message": error.message, **place, "diff": diff}
    except (StepEngineError, UsageProblem) as error:
        return {"file": file, "outcome": "failed", "message": str(error)}
    return {"file": file, "outcome": "ok", "status": result.status.value, "steps": result.state.step_index}


def _told(entry: dict[str, Any]) -> Iterator[str]:
    if entry["outcome"] == "ok":
        yield f"ok        {entry['file']}  {entry['status']}, {entry['steps']} steps"
        return
    yield f"{entry['outcome'].upper():<10}{entry['file']}"
    yield from [f"    {line}" for line in entry["message"].splitlines()]


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
