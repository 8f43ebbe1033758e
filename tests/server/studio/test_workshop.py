"""
The processes of a workshop: what cannot be begun takes nobody's place, and leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from stepengine.debugging.desk import EngineSpec
from stepengine.errors import JournalMissing
from stepengine.server.access import Caller
from stepengine.server.ledger import RunRow
from stepengine.server.problems import Problem
from stepengine.server.processes import JsonChildProcess
from stepengine.server.workshop import MOST_DESKS, MOST_JOBS, InspectionService

ANNA = Caller("anna", frozenset({"admin"}))
ROW = RunRow("one", "anna", "agent", "running", 1.0, 1.0, {"prompt": ""})


class Records:
    def __init__(self) -> None:
        self.kept = b""

    async def content(self, row: RunRow) -> bytes:
        if not self.kept:
            msg = f"nothing is recorded of {row.run}"
            raise JournalMissing(msg, path=row.run)
        return self.kept


async def test_missing_records_occupy_no_desk_or_job_slot() -> None:
    workshop = InspectionService(Records().content, EngineSpec("tests.server.house:engine_in"))

    for _ in range(MOST_JOBS + 1):
        with pytest.raises(JournalMissing):
            await workshop.start_job(ANNA, "impact", [ROW], {})
    for _ in range(MOST_DESKS + 1):
        with pytest.raises(JournalMissing):
            await workshop.start_inspection(ANNA, ROW, "#0")

    assert [] == workshop.list_jobs(ANNA)


async def test_failed_process_start_leaves_no_copy_of_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = Records()
    records.kept = b"what only its owner may read"
    workshop = InspectionService(records.content, EngineSpec("tests.server.house:engine_in"))

    def files() -> list[str]:
        return [one.name for one in tmp_path.rglob("*")]

    async def refused(*_: Any) -> JsonChildProcess:
        assert "one.jsonl" in files()
        raise OSError(11, "no process can be had")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(JsonChildProcess, "start", refused)

    with pytest.raises(OSError, match="no process"):
        await workshop.start_job(ANNA, "impact", [ROW], {})
    with pytest.raises(OSError, match="no process"):
        await workshop.start_inspection(ANNA, ROW, "#0")

    assert [] == files()
    assert [] == workshop.list_jobs(ANNA)


async def test_job_with_oversized_output_line_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = tmp_path / "python"
    child.write_text('#!/bin/sh\n: > "$0.ran"\nread first\necho \'{"done": {"text": "it is done"}}\'\n')
    child.chmod(0o700)
    monkeypatch.setattr("stepengine.server.processes.sys.executable", str(child))
    records = Records()
    records.kept = b"{}"
    workshop = InspectionService(records.content, EngineSpec("tests.server.house:engine_in"))
    monkeypatch.setattr("stepengine.server.processes.LINE", 10)

    job = await workshop.start_job(ANNA, "impact", [ROW], {})
    assert job.task is not None
    await job.task

    assert (tmp_path / "python.ran").exists()
    assert ("failed", "its process ended without a result") == (job.status, job.error)
    with pytest.raises(Problem, match="does not wait for an approval: its status is failed"):
        await workshop.approve_job(job, None)
    await workshop.close()


@pytest.mark.parametrize("moment", ["starting", "pricing"])
async def test_job_cancelled_at_any_moment_stays_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Its process is gone when the cancel returns, also one that had not started."""
    child, start = tmp_path / "python", JsonChildProcess.start
    child.write_text(
        '#!/bin/sh\nread first\necho \'{"price": {"calls": 1, "low": null, "high": null}}\'\nexec sleep 60\n'
    )
    child.chmod(0o700)
    monkeypatch.setattr("stepengine.server.processes.sys.executable", str(child))
    asked, may_start, started = asyncio.Event(), asyncio.Event(), list[JsonChildProcess]()

    async def start_late(*given: Any) -> JsonChildProcess:
        asked.set()
        await may_start.wait()
        started.append(await start(*given))
        return started[0]

    monkeypatch.setattr(JsonChildProcess, "start", start_late)
    records = Records()
    records.kept = b"{}"
    workshop = InspectionService(records.content, EngineSpec("tests.server.house:engine_in"))
    starting = asyncio.create_task(workshop.start_job(ANNA, "blame", [ROW], {}))
    await asked.wait()
    (job,) = workshop.list_jobs(ANNA)
    if moment == "pricing":
        may_start.set()
        await starting
    cancelling = asyncio.create_task(workshop.cancel_job(job))
    await asyncio.sleep(0)
    may_start.set()
    await asyncio.gather(starting, cancelling)
    job.update_from_message({"price": {}})

    assert ("cancelled", "") == (job.status, job.error)
    assert started[0]._child.returncode is not None
    await workshop.close()


@pytest.mark.parametrize("moment", ["starting", "ending"])
async def test_close_ends_the_process_of_every_inspection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Also one that is being started, and one whose page has just left and which ignores a request to end."""
    child, start = tmp_path / "python", JsonChildProcess.start
    child.write_text("#!/bin/sh\ntrap '' TERM\nread first\nexec sleep 60\n")
    child.chmod(0o700)
    monkeypatch.setattr("stepengine.server.processes.sys.executable", str(child))
    asked, may_start, started = asyncio.Event(), asyncio.Event(), list[JsonChildProcess]()

    async def start_late(*given: Any) -> JsonChildProcess:
        asked.set()
        await may_start.wait()
        started.append(await start(*given))
        return started[0]

    monkeypatch.setattr(JsonChildProcess, "start", start_late)
    records = Records()
    records.kept = b"{}"
    workshop = InspectionService(records.content, EngineSpec("tests.server.house:engine_in"))
    starting = asyncio.create_task(workshop.start_inspection(ANNA, ROW, "#0"))
    await asked.wait()
    if moment == "ending":
        may_start.set()
        ending = asyncio.create_task(workshop.end_inspection(await starting))
        await asyncio.sleep(0)
        await workshop.close()
        assert started[0]._child.returncode is not None
        await ending
    else:
        closing = asyncio.create_task(workshop.close())
        await asyncio.sleep(0)
        may_start.set()
        with pytest.raises(Problem, match="shutting down"):
            await starting
        await closing
        assert started[0]._child.returncode is not None


async def test_cancelled_end_of_a_process_still_kills_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As at the end of a server, whose loop cancels its tasks once and waits for them."""
    child = tmp_path / "python"
    child.write_text("#!/bin/sh\ntrap '' TERM\nread first\nexec sleep 60\n")
    child.chmod(0o700)
    monkeypatch.setattr("stepengine.server.processes.sys.executable", str(child))
    process = await JsonChildProcess.start("none", {})
    ending = asyncio.create_task(process.terminate())
    await asyncio.sleep(0)
    ending.cancel()

    with pytest.raises(asyncio.CancelledError):
        await ending
    assert process._child.returncode is not None


def open_pipes() -> set[str]:
    targets = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor that listed them
            targets.add(str(link.readlink()))
    return {target for target in targets if target.startswith("pipe:")}


@pytest.mark.skipif(sys.platform != "linux", reason="lists descriptors in /proc")
@pytest.mark.spec("reliability:R10")
async def test_escaped_grandchild_of_a_process_keeps_no_pipe_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = tmp_path / "python"
    child.write_text("#!/bin/sh\nread first\nsetsid sh -c 'echo $$; exec sleep 60' &\nexec sleep 60\n")
    child.chmod(0o700)
    monkeypatch.setattr("stepengine.server.processes.sys.executable", str(child))
    before = open_pipes()
    process = await JsonChildProcess.start("none", {})
    escaped = await anext(process.read_messages())

    await process.terminate()
    await asyncio.sleep(0)  # the loop closes them in its next round
    after = open_pipes()
    os.kill(escaped, signal.SIGKILL)

    assert set() == after - before
