"""Folders of results: which may be written to, how their files are replaced, and what an earlier one says."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from stepengine.errors import DataError
from stepengine.workspace.file_formats import FileFormat

RESULTS = "results.json"
RESULTS_FILE = FileFormat("a results file", re.compile(rb'\{\s*"format":\s*"stepengine\.(?:eval|improve)/'), DataError)
MAX_RESULTS = 64 * 1024 * 1024


def require_own_result_folder(folder: Path) -> None:
    """
    Raise ``DataError`` if results in *folder* would replace files of another program.

    Raises:
        DataError: it names the file.
    """
    results, names = folder / RESULTS, [RESULTS]
    if RESULTS_FILE.matches(results):
        # A report is written after the results: a report without them belongs to another program.
        names = [] if results.exists() else ["report.html", "improvement.diff"]
    for path in [folder / name for name in names]:
        if path.exists():
            msg = f"{str(path)!r} is not a results file of stepengine and was left unchanged. Use another folder"
            raise DataError(msg)


def read_seed_and_sample_count(folder: Path) -> dict[str, int]:
    """Return the number of samples and the seed in the results of an earlier evaluation, if they can be read."""
    try:
        with (folder / RESULTS).open(encoding="utf-8") as file:
            told = json.loads(file.read(MAX_RESULTS))
        return {name: int(told[name]) for name in ("n", "seed") if name in told}
    except (OSError, ValueError, TypeError, RecursionError):
        return {}


def replace_file(path: Path, data: bytes) -> None:
    """Replace the content of a file as a whole; an existing one keeps its mode."""
    made = path.with_name(f".{path.name}.{os.getpid()}")
    made.write_bytes(data)
    if path.exists():
        made.chmod(path.stat().st_mode & 0o777)
    made.replace(path)
