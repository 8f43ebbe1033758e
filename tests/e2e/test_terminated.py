"""
SIGTERM to the command line while a program of the shell tool runs: what is recorded, what is left, how soon it is over.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

AGENT = """
from stepengine import AgentDefinition, ToolCall

def handle_steps(ctx):
    yield ToolCall("run_terminal_command", {"command": ["echo", "committed"]})
    yield ToolCall("run_terminal_command", {"command": ["sh", "-c", SCRIPT], "timeout_seconds": 100})
    yield ToolCall("run_terminal_command", {"command": ["touch", "went-on"]})

SCRIPT = "trap '' TERM INT; sleep 60 & echo $$ $! > pids.new; mv pids.new pids; wait; sleep 60"
agent = AgentDefinition("sleeper", tools=["run_terminal_command", "check_job"], handle_steps=handle_steps)
"""
STANDS_STILL = (
    AGENT
    + """
import time

def handle_steps(ctx, whole=handle_steps):
    try:
        yield from whole(ctx)
    finally:
        open("closing", "w").close()
        time.sleep(60)

agent = AgentDefinition("sleeper", tools=["run_terminal_command", "check_job"], handle_steps=handle_steps)
"""
)
SOON = 10.0
"""Seconds that the first signal may take."""
AT_ONCE = 2.0
"""Seconds that the second one may take, on a busy machine."""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def there(file: Path, process: subprocess.Popen[str]) -> Path:
    """Return *file* as soon as it exists."""
    deadline = time.monotonic() + 50
    while not file.exists():
        assert process.poll() is None, process.communicate()
        if time.monotonic() > deadline:
            process.kill()
            pytest.fail(f"{file.name} was never written: {process.communicate()}")
        time.sleep(0.01)
    return file


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def alive_after(pids: list[int], seconds: float) -> list[int]:
    """Return which of *pids* are still there after *seconds*; what is left is killed."""
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in pids if is_alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.01)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return left


def children_of(pid: int) -> list[int]:
    """Return the processes that *pid* and its children started."""
    mine = [int(n) for file in Path(f"/proc/{pid}/task").glob("*/children") for n in file.read_text().split()]
    return [*mine, *[grandchild for child in mine for grandchild in children_of(child)]]


def started(stepengine: Any, agent: str) -> tuple[Any, list[int]]:
    """Return a run whose program sleeps, and all processes below it."""
    (stepengine.folder / "sleeper.py").write_text(agent)
    process = stepengine.start("run", "./sleeper.py", "--shell", "--journal", "run.jsonl", "--json")
    pids = [int(n) for n in there(stepengine.folder / "pids", process).read_text().split()]
    found = children_of(process.pid)
    assert set(pids) <= set(found)
    return process, found


def records_of(folder: Path) -> list[dict[str, Any]]:
    """Return the records of the journal; every line of it is whole."""
    written = (folder / "run.jsonl").read_text()
    assert written.endswith("\n")
    return [json.loads(line) for line in written.splitlines()]


def terminated(stepengine: Any) -> float:
    """
    Return how long a run takes to end that is told to, seeing how it does. Its program ignores SIGTERM, and so does what that
    started.
    """
    process, pids = started(stepengine, AGENT)
    begun = time.monotonic()
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=50)
    took = time.monotonic() - begun
    left = alive_after(pids, 0)

    assert (143, []) == (process.returncode, left), err
    assert "cancelled" == json.loads(out)["status"]
    assert "Traceback" not in err
    assert not (stepengine.folder / "went-on").exists()
    written = records_of(stepengine.folder)
    assert ["echo", "committed"] == written[2]["effect"]["input"]["command"]
    assert "committed\n" == written[3]["value"]["content"][0]["value"]["stdout"]
    assert {"type": "stop", "kind": "cancelled"} == written[-1]["input"]
    assert 0 == stepengine("journal", "check", "run.jsonl").returncode
    return took


@pytest.mark.speed
@pytest.mark.spec("reliability:RS14")
def test_sigterm_ends_a_run_within_10_seconds(stepengine: Any) -> None:
    assert terminated(stepengine) < SOON


def terminated_twice(stepengine: Any) -> float:
    """Return how long a run takes to end whose cleanup stands still and that is told a second time, seeing how it does."""
    process, pids = started(stepengine, STANDS_STILL)
    process.send_signal(signal.SIGTERM)
    there(stepengine.folder / "closing", process)
    time.sleep(0.5)
    waited_for_it = process.poll() is None
    begun = time.monotonic()
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=80)
    took = time.monotonic() - begun
    left = alive_after(pids, AT_ONCE)

    assert waited_for_it, err
    assert (-signal.SIGTERM, "", []) == (process.returncode, out, left), err
    assert any("committed" in json.dumps(record) for record in records_of(stepengine.folder))
    assert 0 == stepengine("journal", "check", "run.jsonl").returncode
    return took


@pytest.mark.speed
@pytest.mark.spec("reliability:RS14")
def test_a_second_sigterm_ends_a_run_at_once(stepengine: Any) -> None:
    assert terminated_twice(stepengine) < AT_ONCE
