"""
``stepengine debug --watch``: what is shown at each save, until somebody ends it.
"""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stepengine import Engine, load_agent
from tests import forked_processes
from tests.waits import HANG_SECONDS

CODE = '''
from stepengine import AgentDefinition, call, tool


@tool
def price_of(item: str) -> int:
    """Return the price of an item."""
    return 10 * len(item)


def handle_steps(ctx):
    total = 0
    for item in ctx.prompt.split():
        price = yield from call(price_of, item)
        total = price
    return total


agent = AgentDefinition("tally", tools=[price_of], handle_steps=handle_steps)
'''
pytestmark = pytest.mark.usefixtures("forks")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tally.py").write_text(CODE)
    agent = load_agent("tally.py")
    with Engine([agent]) as engine:
        engine.run_sync(agent, "tea milk sugar", journal="run.jsonl")
    return tmp_path


def started(*words: str, **options: Any) -> subprocess.Popen[str]:
    line = [sys.executable, "-m", "stepengine", "debug", "run.jsonl", "--agent", "tally.py", "--watch", *words]
    return forked_processes.Process(line, text=True, stdout=subprocess.PIPE, **options)


@pytest.fixture
def watch(project: Path) -> Iterator[subprocess.Popen[str]]:
    process = started("--at", "#2", "--json")
    with process:
        yield process
        process.kill()


def told(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    said: dict[str, Any] = json.loads(process.stdout.readline())
    return said


@pytest.mark.spec("studio:ST6")
@pytest.mark.deep
def test_each_save_prints_a_line_and_errors_until_fixed(project: Path, watch: subprocess.Popen[str]) -> None:
    file = project / "tally.py"
    first = told(watch)
    save(file, CODE.replace("total = price", "total += price"))
    mended = told(watch)
    save(file, CODE.replace("for item in", "for item of"))
    broken = told(watch)
    _other(project, CODE.replace("call(price_of, item)", "call(price_of, item.upper())")).replace(file)
    another = told(watch)
    save(file, CODE)
    again = told(watch)
    watch.send_signal(signal.SIGINT)

    assert ("stepengine.watch/1", "40", None) == (
        first["format"],
        first["frames"][0]["locals"]["total"],
        first["difference"],
    )
    assert (["~ total 40 -> 70"], [str(file)]) == (mended["difference"], mended["saved"])
    assert ["completed: 50", "completed: 120"] == mended["ends"]
    assert "SyntaxError" in broken["problem"]
    assert ("#0", "") == (another["differs_at"], another["problem"])
    assert (["~ total 70 -> 40"], []) == (again["difference"], again["ends"])
    assert 0 == watch.wait(HANG_SECONDS)


def save(file: Path, code: str) -> None:
    """
    Save a file in its place, in one go: one that is emptied first may be looked at before it is filled, on a busy machine.
    """
    with file.open("r+b", buffering=0) as opened:
        opened.write(code.encode().ljust(file.stat().st_size, b"\n"))


def _other(project: Path, code: str) -> Path:
    """
    A file as editors write one that they put in place of another.
    """
    other = project / "tally.py~"
    other.write_text(code)
    return other


@pytest.mark.spec("studio:ST6")
@pytest.mark.deep
def test_terminal_watch_shows_differences_and_moves_on_request(project: Path) -> None:
    ours, theirs = pty.openpty()
    process = started(stdin=theirs, env={**os.environ, "COLUMNS": "90"})
    os.close(theirs)
    assert process.stdout is not None
    pipe, shown = process.stdout.fileno(), ""

    def until(text: str) -> str:
        nonlocal shown
        while not re.search(text, shown):
            assert select.select([pipe], [], [], HANG_SECONDS)[0], shown
            shown += os.read(pipe, 1 << 16).decode()
        said, shown = shown, ""
        return said

    try:
        first = until("as recorded")
        os.write(ours, b"#2\n")
        second = until("as recorded")
        save(project / "tally.py", CODE.replace("total = price", "total += price"))
        third = until("run ends with")
        os.write(ours, b"#9\n")
        os.write(ours, b"quit\n")
        code = process.wait(HANG_SECONDS)
    finally:
        process.kill()
        process.communicate()
        os.close(ours)

    assert "step 0 · #0" in first
    assert re.search(r"> 14 .* price = yield from call\(price_of, item\)\n", second)
    assert "total = 40" in second
    assert re.search(
        r"(?s)tally.py saved · \d.\d\d s ─+\n step 0 · #2\n.*\n   15 +total \+= price\n ~ total 40 -> 70\n", third
    )
    assert "completed: 120 (recorded: completed: 50)" in third
    assert 0 == code


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("studio:ST6")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--exec", "where"], "leave out --exec and --no-fork"),
        (["--no-fork"], "leave out --exec and --no-fork"),
        (["--at", "7"], "step 7 does not exist; the run has 0 steps"),
        (["--at", "?"], "an address must be the number of an effect"),
    ],
)  # fmt: skip
def test_invalid_watch_options_are_rejected(project: Path, words: list[str], said: str) -> None:
    with started(*words, stderr=subprocess.PIPE) as process:
        _, error = process.communicate(timeout=HANG_SECONDS)

    assert (2, True) == (process.returncode, said in error), error
