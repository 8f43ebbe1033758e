"""Messages about recordings: at a failure, after the last test, and for every test with ``-v``."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from stepengine.pytest_plugin.settings import make_rerun_command

ATTRIBUTE = "stepengine_recordings"
CREDENTIAL = re.compile(r"\b(?:credentials?|api[ _]?key)\b|_API_KEY\b", re.IGNORECASE)
MAX_CHAIN = 20
PACKAGE = Path(__file__).parent.parent


def add_failed_evaluation_sections(report: pytest.TestReport, values: Iterable[object]) -> None:
    """Add a section for each evaluation among *values* with a failed gate, because pytest shortens the text of ``assert``."""
    evaluations = sys.modules.get("stepengine.evaluation.evaluation_report")
    if evaluations is None:
        return
    for value in values:
        if isinstance(value, evaluations.EvaluationReport) and not value.passed:
            report.sections.append((f"evaluation {value.scores.outcome.evaluation.name}", str(value)))


class RecordingReport:
    """
    The report on the recordings of one test.

    Attributes:
        lines: One line for each file that was used.
        written: One line for each file that was written.
        hidden: Misses and divergences that the code under test swallowed, so that its own failure hides them.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.written: list[str] = []
        self.hidden: list[BaseException] = []


def add_advice_note(item: pytest.Item, error: BaseException, *, replays: bool) -> None:
    """Add a note: for a divergence, the commands that accept it; for an error about a key or base URL, how the fixture sets it."""
    from stepengine.errors import ReplayDivergence

    if isinstance(error, ReplayDivergence):
        command = make_rerun_command(item)
        kept = "every effect" if error.kind == "end" else f"the effects before {error.address or 'it'}"
        note = (
            f"if the change is intended, record it\n"
            f"  keeping {kept}: {command} --stepengine-record=extend\n"
            f"  all of it: {command} --stepengine-record=rewrite"
        )
    else:
        note = _find_environment_advice(error) if replays else ""
    if note and note not in getattr(error, "__notes__", ()):
        error.add_note(note)


def _find_environment_advice(error: BaseException) -> str:
    """Return advice for an error about keys or base URLs in a replaying test; ``""`` for other errors."""
    from stepengine.testing.cassette_misses import CassetteMiss
    from stepengine.testing.placeholders import list_key_variables

    if isinstance(error, CassetteMiss):
        if error.reason != "host_unknown":
            return ""
        return (
            "the fixture `stepengine_cassette` uses the base URLs of the environment; set the same ones as when the cassette "
            f"was recorded\n  set now: {_format_set_base_urls() or 'none'}"
        )
    said = "\n".join(f"{type(one).__name__} {one}" for one in _iterate_error_and_causes(error))
    names = sorted(name for name in list_key_variables() if name in said)
    if not names and not CREDENTIAL.search(said):
        return ""
    return (
        "a replaying test has placeholders for keys. The fixture `stepengine_cassette` replaces the keys that are set. It adds keys of the "
        "recorded providers, or of Anthropic, Google and OpenAI if there is no recording\n"
        f"  for another key, in the test: monkeypatch.setenv({(names or ['NAME_API_KEY'])[0]!r}, 'replay')"
    )


def _format_set_base_urls() -> str:
    """Return the variables for base URLs that are set, as text without secrets."""
    found = [
        f"{n}={v}"
        for n, v in sorted(os.environ.items())
        if n.endswith(("_BASE_URL", "_ENDPOINT")) or "_ENDPOINT_URL" in n
    ]
    from stepengine.testing.traffic_redaction import Cleaner

    return Cleaner().clean_text(", ".join(found))


def _iterate_error_and_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its causes or contexts, at most 20."""
    at: BaseException | None = error
    for _ in range(MAX_CHAIN):
        if at is None:
            return
        yield at
        at = at.__cause__ or at.__context__


def trim_traceback_to_author(item: pytest.Item, error: BaseException) -> None:
    """Cut the traceback of a failed recording at the author's own line. The frames below it are irrelevant."""
    if item.config.option.fulltrace:
        return
    last = _find_last_author_frame(item, error)
    if last is not None:
        last.tb_next = None


def was_raised_by_test(item: pytest.Item, error: BaseException) -> bool:
    """Return True if an error was raised in the author's code, and not by the check after the test."""
    return _find_last_author_frame(item, error) is not None


def _find_last_author_frame(item: pytest.Item, error: BaseException) -> TracebackType | None:
    """Return the innermost traceback entry in the author's code; ``None`` without one."""
    last, at = None, error.__traceback__
    while at is not None:
        file = Path(at.tb_frame.f_code.co_filename)
        if (
            file.is_relative_to(item.config.rootpath)
            and not file.is_relative_to(PACKAGE)
            and "site-packages" not in file.parts
        ):
            last = at
        at = at.tb_next
    return last


def format_hidden_errors(errors: Iterable[BaseException], *, full: bool) -> str:
    """Return the report section on hidden misses and divergences; with *full*, all differences."""
    return "\n\n".join([f"{type(e).__name__}: {e}{_format_all_differences(e) if full else ''}" for e in errors])


def _format_all_differences(error: BaseException) -> str:
    """Return all differences of a miss or a divergence, without limits."""
    found = [(d.pointer, d.recorded, d.now) for c in getattr(error, "candidates", ())[:1] for d in c.differences]
    found += [tuple(field) for field in getattr(error, "diff", ())]
    from stepengine.testing.traffic_redaction import Cleaner

    lines = [f"\n  {pointer}\n    recorded {recorded}\n    now      {now}" for pointer, recorded, now in found]
    return Cleaner().clean_text("".join(lines))


def add_recordings_to_report(report: pytest.TestReport, recordings: RecordingReport) -> None:
    """Add the first hidden error and the lines about recordings to the report of a test."""
    setattr(report, ATTRIBUTE, {"lines": recordings.lines, "written": recordings.written})
    crash = getattr(report.longrepr, "reprcrash", None)
    if report.failed and recordings.hidden and crash is not None:
        first = recordings.hidden[0]
        summary = str(first).partition("\n")[0]
        crash.message = f"{type(first).__name__}: {summary} (swallowed; then {crash.message})"


def print_recordings_summary(terminal: Any, orphans: list[Any], orphan_action: str) -> None:
    """Print new recordings, files that no test owns, and with ``-v`` how each test used its recordings."""
    reports = [r for group in terminal.stats.values() for r in group if hasattr(r, ATTRIBUTE)]
    told = [getattr(r, ATTRIBUTE) for r in reports]
    written = [line for entry in told for line in entry["written"]]
    lines = [line for entry in told for line in entry["lines"]] if terminal.verbosity > 0 else []
    if not (written or lines or orphans):
        return
    terminal.section("stepengine recordings")
    for line in (*written, *lines):
        terminal.line(line)
    if orphans:
        count, one = len(orphans), len(orphans) == 1
        gone = f" {'was' if one else 'were'} deleted" if orphan_action == "delete" else ""
        terminal.line(f"{count} recording{'' if one else 's'} that no test uses{gone}:")
        for path in orphans:
            terminal.line(f"  {path}")
        if orphan_action != "delete":
            terminal.line(f"to delete {'it' if one else 'them'}: run the same tests with --stepengine-orphans=delete")
