"""`python -m benchmarks.improving [--write]`: prints the table of both searches, and puts it into `benchmarks/README.md`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from benchmarks.improving.measuring import TASKS, improved, measured, page_with, table, write_found

with tempfile.TemporaryDirectory() as folder:
    found = {task: measured(task, improved, Path(folder)) for task in TASKS}
    made = table(found, Path(folder))
print(made)
if "--write" in sys.argv:
    write_found(found)
    page = Path(__file__).resolve().parents[2] / "benchmarks" / "README.md"
    page.write_text(page_with(page.read_text(encoding="utf-8"), made), encoding="utf-8")
