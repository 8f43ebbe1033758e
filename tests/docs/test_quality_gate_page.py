"""
`docs/quality-gate.md` is so: its test runs as written, and every option that it names exists.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from stepengine.evaluation import evaluate

from .pages import follow, page


@pytest.mark.spec("evaluation:JG99")
def test_the_gate_runs_as_written(tmp_path: Path) -> None:
    follow("quality-gate.md", tmp_path)

    assert (tmp_path / "test_quality.py").is_file()


def test_the_table_names_only_options_that_exist() -> None:
    told = re.findall(r"^\| `(\w+)=", page("quality-gate.md"), re.MULTILINE)

    assert told
    assert {*told} <= {*inspect.signature(evaluate).parameters}
