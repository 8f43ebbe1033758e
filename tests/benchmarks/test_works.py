"""
What the benchmarks measure is work that was done: the checks refuse anything else. Peers are not needed here.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys

import pytest

from benchmarks import measuring
from benchmarks.engines import UNCOUNTED, Told, Work, checked, floor, stepengine, stepengine_handler

DONE = Work(4, [1, 2, 3], "done")


@pytest.mark.parametrize(
    "work",
    [
        DONE._replace(calls=3),
        DONE._replace(results=[1, 2]),
        DONE._replace(results=[1, 2, 4]),
        DONE._replace(text="Done."),
    ],
    ids=["a call is missing", "a result is missing", "a result is wrong", "another text"],
)
def test_incomplete_work_is_no_measurement(work: Work) -> None:
    checked(DONE, 3)
    checked(DONE._replace(calls=UNCOUNTED), 3)

    with pytest.raises(SystemExit, match="did other work"):
        checked(work, 3)


@pytest.mark.parametrize("engine", [floor, stepengine, stepengine_handler], ids=["floor", "engine", "handler"])
def test_our_engines_do_the_work(engine: object) -> None:
    for steps in (1, 7):
        told: Told = asyncio.run(engine.run(steps))  # type: ignore[attr-defined]

        assert Work(steps + 1, [n + 1 for n in range(steps)], "done") == told()


@pytest.mark.deep
@pytest.mark.parametrize(
    ("kind", "client", "protocol"),
    [
        ("steps", "bare", "anthropic"),
        ("behind", "bare", "openai"),
        ("steps", "stepengine", "google"),
        ("behind", "stepengine", "openai_chat"),
    ],
)
def test_both_clients_do_the_work_over_a_socket(kind: str, client: str, protocol: str) -> None:
    """
    The bare loop over the SDK and our provider; a worker that finds other work leaves with an error.
    """
    with measuring.loopback() as port:
        command = [sys.executable, "-m", "benchmarks.http_worker", kind, client, protocol, "3,5", port, "60"]
        done = subprocess.run(command, cwd=measuring.ROOT, capture_output=True, text=True, check=False, timeout=300)

    assert done.returncode == 0, done.stderr
    assert ["3", "5"] == list(json.loads(done.stdout))
