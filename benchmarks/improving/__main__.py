"""`python -m benchmarks.improving [--write]`: prints the table of both searches, and puts it into `docs/improving.md`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from benchmarks.improving.measuring import page_with, table

with tempfile.TemporaryDirectory() as folder:
    made = table(Path(folder))
print(made)
if "--write" in sys.argv:
    page = Path(__file__).resolve().parents[2] / "docs" / "improving.md"
    page.write_text(page_with(page.read_text(encoding="utf-8"), made), encoding="utf-8")
