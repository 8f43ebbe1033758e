"""
A request of a worker that is not in the cassette ends the command with exit code 5, whatever the pool makes of the error.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from stepengine.testing import record_program
from tests.cli.command import command
from tests.http_programs.odd_server import odd_server

PROGRAM = """
import multiprocessing, sys, threading, urllib.request
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing.pool import ThreadPool

def ask(number):
    return urllib.request.urlopen(f"{sys.argv[1]}/echo?number={number}").read().decode()

def one_after_the_other(numbers):
    for number in numbers:
        ask(number)

def unjoined_threads(numbers):
    for number in numbers:
        threading.Thread(target=ask, args=(number,)).start()

def pool(kind):
    def ask_all(numbers):
        with kind(2) as workers:
            list(workers.map(ask, numbers))
    return ask_all

ways = [one_after_the_other, *map(pool, [multiprocessing.Pool, ThreadPool, ThreadPoolExecutor, ProcessPoolExecutor]), unjoined_threads]

if __name__ == "__main__":
    errors = []
    for n, way in enumerate(ways):
        try:
            way([10 * n, 10 * n + 1, 10 * n + (7 if "other" in sys.argv else 2)])
        except BaseException as error:
            errors.append(error)
    if errors:
        raise errors[-1]
"""


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("replay:Y30", "replay:C14")
def test_a_miss_of_a_worker_ends_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Each kind of worker sends two requests that are recorded and one that is not. The program raises the last error when all kinds have run.
    """
    # A program that hides a miss is ended after a while; this one has five kinds of workers to run after the first miss.
    monkeypatch.setattr("stepengine.testing.processes.broker.GRACE_SECONDS", 50)
    program, cassette = tmp_path / "program.py", str(tmp_path / "c.yaml")
    program.write_text(PROGRAM)
    with odd_server() as server:
        words = [sys.executable, str(program), f"http://127.0.0.1:{server.server_port}"]
        recorded = record_program(cassette, words)
    same = command("cassette", "replay", cassette, "--", *words)
    other = command("cassette", "replay", cassette, "--", *words, "other", code=5)

    assert (0, 18) == (recorded.exit_code, len(recorded.cassette.interactions))
    assert "replayed" in same.stderr
    assert ["17", "27", "37", "47", "57", "7"] == sorted(re.findall(r"number=(\d+) is not in", other.stderr))
