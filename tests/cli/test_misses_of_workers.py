"""
A request of a worker that is not in the cassette ends the command with exit code 5, whatever the pool makes of the error.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepengine.testing import record_program
from tests.http_programs.odd_server import OddServer, odd_server

ASK = """
import sys, urllib.request
def ask(number):
    return urllib.request.urlopen(f"{sys.argv[1]}/echo?number={number}").read().decode()
NUMBERS = [*range(6)] if len(sys.argv) < 3 else [0, 1, 2, 3, 4, 77]
"""
POOLS = {
    "multiprocessing.Pool": """
import multiprocessing
if __name__ == "__main__":
    with multiprocessing.Pool(2) as pool:
        print(pool.map(ask, NUMBERS))
""",
    "multiprocessing.pool.ThreadPool": """
from multiprocessing.pool import ThreadPool
with ThreadPool(2) as pool:
    print(pool.map(ask, NUMBERS))
""",
    "ThreadPoolExecutor": """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(2) as pool:
    print([*pool.map(ask, NUMBERS)])
""",
    "ProcessPoolExecutor": """
from concurrent.futures import ProcessPoolExecutor
if __name__ == "__main__":
    with ProcessPoolExecutor(2) as pool:
        print([*pool.map(ask, NUMBERS)])
""",
    "threads that nobody joins": """
import threading, time
for number in NUMBERS:
    threading.Thread(target=ask, args=(number,)).start()
""",
    "handled by the program": """
for number in NUMBERS:
    try:
        ask(number)
    except BaseException:
        pass
""",
}


@pytest.fixture(scope="module")
def server() -> Iterator[OddServer]:
    with odd_server() as running:
        yield running


@pytest.mark.spec("replay:Y30", "replay:C14")
@pytest.mark.parametrize("pool", POOLS)
def test_a_miss_of_a_worker_ends_the_command(server: OddServer, pool: str, tmp_path: Path) -> None:
    program, cassette = tmp_path / "program.py", str(tmp_path / "c.yaml")
    program.write_text(ASK + POOLS[pool])
    command = [sys.executable, str(program), f"http://127.0.0.1:{server.server_port}"]
    recorded = record_program(cassette, command)

    replay = [sys.executable, "-m", "stepengine", "cassette", "replay", cassette, "--", *command]
    same = subprocess.run(replay, capture_output=True, text=True, timeout=100, check=False)
    other = subprocess.run([*replay, "other"], capture_output=True, text=True, timeout=100, check=False)

    assert (0, 6, 0) == (recorded.exit_code, len(recorded.cassette.interactions), same.returncode), same.stderr
    assert 5 == other.returncode, other.stderr
    assert "number=77" in other.stderr
