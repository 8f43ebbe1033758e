"""``stepengine check``: what is wrong with journals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import attrs

from stepengine.cli.exits import Exit
from stepengine.cli.journals import journal_at, spread
from stepengine.cli.options import Files, Json
from stepengine.cli.screen.render import dumps, say

if TYPE_CHECKING:
    from stepengine.journal import Report

__all__ = ("check",)


def check(files: Files, *, as_json: Json = False) -> Exit:
    """
    Check journals: are they whole, and free of keys?

    Every record of each FILE is checked: checksums, order, fingerprints, blobs; and what looks like a key.

    Nothing is run or changed. Leaves with 1 when a file is damaged or holds what looks like a secret. A run without an
    end is not a fault.

    Examples:
      stepengine check run.jsonl
      stepengine check journals/*.jsonl --json
    """
    from stepengine.journal import check

    reports = [check(journal_at(file)) for file in spread(files)]
    if as_json:
        print(dumps([{"ok": _is_good(report), **attrs.asdict(report)} for report in reports]))
    else:
        say("\n".join([line for report in reports for line in _describe_report(report)]), hang=4)
    return Exit.COMPLETED if all(map(_is_good, reports)) else Exit.FAILED


def _is_good(report: Report) -> bool:
    return bool(report) and not report.secrets


def _describe_report(report: Report) -> Iterator[str]:
    state = "complete" if report.is_complete else "without an end: it can be resumed"
    state = "and no run has started: start it again" if report.records == 1 else state
    known = "not usable as it is" if report.problems else f"{report.records} records, {state}"
    yield f"{'ok' if _is_good(report) else 'BAD':<4}{report.name}  {known}"
    yield from [f"      {problem}" for problem in report.problems]
    yield from [f"      looks like a secret: {secret}" for secret in report.secrets]
    if report.torn:
        yield f"      {report.torn} bytes at the end belong to no whole record; resuming cuts them off"
