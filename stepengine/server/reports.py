"""
``Reports``: the reports of evaluations in a folder, as `stepengine eval` writes them.

Routes do not belong here. Files in the folder are only read, and files that are not reports are ignored.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from collections.abc import Collection, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import jiter
from attrs import frozen
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from stepengine.errors import DefinitionError, StepEngineError
from stepengine.evaluation.scoring import FORMAT
from stepengine.journal.files import FileJournal
from stepengine.server.access import resolve_trusted_path
from stepengine.server.bodies import View

logger = logging.getLogger(__name__)

FILE = "results.json"
MAX_BYTES = 64 * 1024 * 1024
MAX_DEPTH = 4
MAX_FOLDERS = 10_000
MAX_SAMPLES = 100_000
SUMMARIES_KEPT = 2_000
"""Summaries of reports that are in memory; a report of many megabytes is parsed once for all readers of the list."""


class _ReportPart(BaseModel):
    # A newer version may write more.
    model_config = ConfigDict(extra="ignore")


class ReportSample(_ReportPart):
    """A run of a case."""

    side: str
    n: int
    status: str
    passed: bool | None = None
    scores: dict[str, dict[str, Any]] = {}
    cost: str | None = None
    tokens: int = 0
    steps: int = 0
    seconds: float | None = None
    reused: str = "new"
    journal: str = ""
    run_id: str | None = Field(default=None, description="The id of the run in the journal.")


class ReportCase(_ReportPart):
    """A case of an evaluation."""

    id: str
    tags: list[str] = []
    group: str | None = None
    samples: list[ReportSample] = []


class ReportSide(_ReportPart):
    """A tested agent or version of one."""

    name: str
    agent: str = ""
    models: list[str] = []


class Report(_ReportPart):
    """The report of an evaluation."""

    id: str = ""
    name: str
    created: str = ""
    seed: int = 0
    n: int = 0
    sides: list[ReportSide] = []
    checks: list[str] = []
    spent: str = ""
    stopped: str = ""
    cases: list[ReportCase] = []
    summary: list[dict[str, Any]] = []
    pairs: list[dict[str, Any]] = []
    ratios: list[dict[str, Any]] = []


class ReportSummary(View):
    """A report in a list."""

    id: str
    name: str
    created: str
    sides: list[str]
    cases: int
    n: Annotated[int, Field(description="Samples of each case.")]
    spent: Annotated[str, Field(description="US dollars.")]
    stopped: Annotated[str, Field(description="Why the report is partial; empty if it is complete.")]


@frozen
class ReportFile:
    """
    The id, modification time and file of a report.

    Attributes:
        id: The path of its folder below the folder of all reports.
        changed: When it was written, in seconds since 1970.
        file: Its file.
        size: The size of the file in bytes.
    """

    id: str
    changed: float
    file: Path
    size: int


class Reports:
    """
    The reports below a folder.

    Args:
        folder: The folder, such as ``evals``; it may be created later.

    Raises:
        DefinitionError: If it is a file.
        JournalError: If other users could write to the folder.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        if self._folder.exists():
            if not self._folder.is_dir():
                msg = f"reports={str(folder)!r} is not a folder; use the folder in which `stepengine eval` writes, such as 'evals'"
                raise DefinitionError(msg)
            resolve_trusted_path(self._folder)

    def list_summaries(self, before: tuple[float, str] | None, limit: int) -> list[tuple[ReportFile, ReportSummary]]:
        """Return summaries of the reports after the position *before*, newest first; each file is read once."""
        found: list[tuple[ReportFile, ReportSummary]] = []
        for report_file in sorted(self._iterate_report_files(), key=lambda one: (one.changed, one.id), reverse=True):
            if before is not None and (report_file.changed, report_file.id) >= before:
                continue
            with contextlib.suppress(OSError):
                summary = _summarize_file(report_file)
                if summary is not None:
                    found.append((report_file, summary))
            if len(found) >= limit:
                break
        return found

    def find_report(self, report_id: str) -> Report | None:
        """Return a report by its id, with the ids of its runs; ``None`` if it does not exist."""
        found = self._find_and_load_report(report_id)
        if found is None:
            return None
        report_file, report = found
        samples = [sample for case in report.cases for sample in case.samples]
        for sample in samples[:MAX_SAMPLES]:
            sample.run_id = _find_run_id(report_file.file.parent, sample.journal)
        return report

    def find_sample_journal(self, report_id: str, journal: str) -> FileJournal | None:
        """Return the journal of a sample; ``None`` if the report does not name the journal, or the file is missing."""
        found = self._find_and_load_report(report_id)
        if found is None:
            return None
        report_file, report = found
        named = any(sample.journal == journal for case in report.cases for sample in case.samples)
        return _find_journal_in_folder(report_file.file.parent, journal) if named else None

    def _find_and_load_report(self, report_id: str) -> tuple[ReportFile, Report] | None:
        """Return the file and the content of a report; ``None`` if it does not exist."""
        report_file = next((one for one in self._iterate_report_files() if one.id == report_id), None)
        report = None if report_file is None else _load_report(report_file)
        return None if report_file is None or report is None else (report_file, report)

    def _iterate_report_files(self) -> Iterator[ReportFile]:
        """Yield the report file of each folder that has one; links are not followed."""
        folders: list[tuple[Path, int]] = [(self._folder, 0)]
        for seen, (folder, depth) in enumerate(folders):
            if seen >= MAX_FOLDERS:
                logger.warning("there are more than %d folders of reports; the server ignores the others", MAX_FOLDERS)
                return
            try:
                with os.scandir(folder) as entries:
                    inside = list(entries)
            except OSError:
                continue
            own = next((one for one in inside if one.name == FILE and one.is_file(follow_symlinks=False)), None)
            if own is None:
                below = [Path(one.path) for one in inside if one.is_dir(follow_symlinks=False)]
                folders += [(one, depth + 1) for one in sorted(below)] if depth < MAX_DEPTH else []
                continue
            name = folder.relative_to(self._folder).as_posix() if depth else folder.absolute().name
            try:
                status = own.stat(follow_symlinks=False)
            except OSError:
                continue  # it was deleted in the meantime
            yield ReportFile(name, status.st_mtime, Path(own.path), status.st_size)


def _load_report(report_file: ReportFile) -> Report | None:
    """Return the report in a file; ``None`` for another kind of file, and for one that cannot be read."""
    try:
        return _parse_report_file(report_file)
    except OSError:
        return None


@lru_cache(maxsize=SUMMARIES_KEPT)
def _summarize_file(report_file: ReportFile) -> ReportSummary | None:
    """Return the summary of the report in a file, which is read once; ``None`` for another kind of file. Raise ``OSError``."""
    report = _parse_report_file(report_file)
    if report is None:
        return None
    return ReportSummary(
        id=report.id,
        name=report.name,
        created=report.created,
        sides=[side.name for side in report.sides],
        cases=len(report.cases),
        n=report.n,
        spent=report.spent,
        stopped=report.stopped,
    )


def _parse_report_file(report_file: ReportFile) -> Report | None:
    """Return the report in a file; ``None`` for another kind of file. Raise ``OSError`` if the file cannot be read."""
    try:
        descriptor = os.open(report_file.file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            data = file.read(MAX_BYTES + 1) if stat.S_ISREG(os.fstat(descriptor).st_mode) else b""
        report = _parse_report(data)
    except (ValidationError, ValueError) as error:
        logger.info("%s is not a report of an evaluation: %s", report_file.file, type(error).__name__)
        return None
    if report is not None:
        report.id = report_file.id
        # Evaluations write the scores of a sample, and not what they come to.
        judges = {row.get("check") for row in report.summary if row.get("judge")}
        for sample in [sample for case in report.cases for sample in case.samples if sample.passed is None]:
            sample.passed = _have_all_checks_passed(sample, judges)
    return report


def _have_all_checks_passed(sample: ReportSample, judges: Collection[Any]) -> bool | None:
    """Return whether all checks other than *judges* passed; ``None`` if a result is unknown, or there are no checks."""
    asked = [score.get("passed") for name, score in sample.scores.items() if name not in judges]
    known = [each for each in asked if isinstance(each, bool)]
    return all(known) if asked and len(known) == len(asked) else None


def _parse_report(data: bytes) -> Report | None:
    """Parse a report; return ``None`` for other JSON, and raise ``ValueError`` if it is damaged."""
    if not 0 < len(data) <= MAX_BYTES:
        return None
    read = jiter.from_json(data)
    return Report.model_validate(read) if isinstance(read, dict) and read.get("format") == FORMAT else None


def _find_run_id(folder: Path, journal: str) -> str | None:
    """Return the id of the run in a journal that a report names; ``None`` if the journal cannot be read."""
    try:
        found = _find_journal_in_folder(folder, journal)
        head = None if found is None else found.head()
    except (StepEngineError, OSError, ValueError):
        return None
    return None if head is None else head.run


def _find_journal_in_folder(folder: Path, journal: str) -> FileJournal | None:
    """Return a journal below *folder*, the report's own; ``None`` if it is missing, elsewhere, or behind a link."""
    try:
        real = folder.resolve()
        place = (real / journal).resolve()
        is_there = place == real / journal and place.is_relative_to(real) and place.is_file()
    except (OSError, ValueError):
        return None
    return FileJournal(place) if is_there else None
