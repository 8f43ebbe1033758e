"""
What the benchmarks measure is work that was done: the checks refuse anything else. Peers are not needed here.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import http_worker, loopback, measuring, peers, worker
from benchmarks.engines import UNCOUNTED, Told, Work, bare, checked, floor, stepengine, stepengine_handler

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


def test_the_server_ends_with_a_tool_if_asked() -> None:
    server = loopback.Server()
    server.answer("/reset/0/final_answer")
    (choice,) = json.loads(server.answer("/v1/chat/completions"))["choices"]
    (call,) = choice["message"]["tool_calls"]

    assert ("final_answer", {"answer": "done"}) == (call["function"]["name"], json.loads(call["function"]["arguments"]))
    assert b"1" == server.answer("/count")


def test_a_size_that_takes_too_long_is_skipped() -> None:
    spent: dict[int, float] = {}
    taken = []
    for size in worker.sizes_within([10, 100, 1_000], spent, cap=5.0):
        taken.append(size)
        spent[size] = size / 100  # 1,000 could take 100 s, if it grows with the square

    assert [10, 100] == taken


def test_a_missing_peer_is_reported_with_its_reason(tmp_path: Path) -> None:
    bench = measuring.Bench(peers.Peers(str(tmp_path / "none")), measuring.QUICK)

    assert bench.worker("W1", "langgraph", "worker", "steps", "langgraph", "10", 1) is None
    assert [("W1", "langgraph", "its environment was not made")] == bench.sheet.gaps


def test_peers_are_found_in_a_folder_or_interpreter(tmp_path: Path) -> None:
    assert str(tmp_path / "openai" / "bin" / "python") == peers.Peers(str(tmp_path)).python("openai")
    python = tmp_path / "python"
    python.touch()
    assert str(python) == peers.Peers(str(python)).python("openai")


def test_every_peer_is_pinned_and_has_a_module() -> None:
    engines = Path(bare.__file__).parent

    assert all("==" in wanted for of in peers.ENVIRONMENTS.values() for wanted in of)
    for name in peers.AGENTS:
        source = (engines / f"{name}.py").read_text(encoding="utf-8")
        assert all(f"def {part}(" in source for part in ("run", "over_http", "behind")), name
    assert set(peers.AGENTS) | {"anthropic", "openai", "google"} == set(measuring.IMPORTS)


def test_the_protocol_is_passed_only_to_workers_accepting_one() -> None:
    def several(url: str, protocol: str) -> str:
        return url + protocol

    assert "ab" == http_worker.bound(several, "a", "b")
    assert "a" == http_worker.bound(lambda url: url, "a", "b")
