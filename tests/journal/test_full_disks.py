"""
A disk that becomes full while a run is recorded: nothing is in doubt, and the run goes on when there is room.
"""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from stepengine import AgentDefinition, Engine, Perform, RunStatus, ToolContext, call, tool
from stepengine.cli.app import app
from stepengine.errors import JournalError, JournalMissing, JournalWriteFailed
from stepengine.journal import FileJournal, Journal, SqliteJournal, check, disk_reserve, files, sqlite
from stepengine.journal.disk_reserve import RESERVE_BYTES, DiskReserve
from stepengine.journal.questions import list_effects_in_doubt

CLOSE = os.close
ROUNDS = 6
RESULT_CHARS = 60_000
DISK = 6 * 1024 * 1024


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """
    A small file system of its own, in memory.
    """
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        pytest.skip(f"there is no mount: {error}")
    if mounted.returncode:
        pytest.skip(f"nothing can be mounted here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path, *, leaving: int = 0) -> None:
    """
    Write until nothing more fits, but for some bytes.
    """
    path = folder / "ballast"
    with contextlib.suppress(OSError), path.open("ab", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    if leaving:
        with path.open("rb+") as file:
            file.truncate(max(0, path.stat().st_size - leaving))


def agent_of(done: list[int], folder: Path, fills: Callable[[int], int | None]) -> AgentDefinition[Any]:
    """
    An agent of several effects, each of which may fill the disk but for some bytes.
    """

    def act(number: int) -> str:
        done.append(number)
        leaving = fills(number)
        if leaving is not None:
            fill(folder, leaving=leaving)
        return str(number) * RESULT_CHARS

    @tool(in_thread=False)
    def write(ctx: ToolContext, number: int) -> str:
        """Write."""
        return act(number)

    def handle_steps(ctx):
        for number in range(ROUNDS):
            yield from Perform(act, number) if number % 2 else call(write, number=number)
        return "done"

    return AgentDefinition("fills", model=None, tools=[write], handle_steps=handle_steps)


@pytest.mark.deep
@pytest.mark.spec("reliability:JR08")
@pytest.mark.parametrize("kind", ["file", "sqlite"])
@pytest.mark.parametrize("leaving", [0, 65_536, RESERVE_BYTES])
@pytest.mark.parametrize("first", [0, ROUNDS - 2])
async def test_run_cut_by_a_full_disk_resumes_without_doubt(disk: Path, kind: str, leaving: int, first: int):
    def journal() -> Journal:
        return FileJournal(disk / "run.jsonl") if kind == "file" else SqliteJournal(disk / "runs.db", "one")

    done: list[int] = []
    engine = Engine([agent_of(done, disk, lambda number: leaving if number >= first else None)])
    result = await engine.run("fills", "go", journal=journal())
    while result.status is RunStatus.FAILED:
        assert isinstance(result.error, JournalWriteFailed), result.error
        assert [] == list_effects_in_doubt(journal().history())
        assert check(journal())
        # Still without room: nothing happens, and nothing is lost.
        before = list(done)
        fill(disk)
        with contextlib.suppress(JournalError):
            assert RunStatus.FAILED is (await engine.resume(journal())).status
        assert before == done
        (disk / "ballast").unlink()
        result = await engine.resume(journal())
    await engine.aclose()

    assert RunStatus.COMPLETED is result.status
    assert [*range(ROUNDS)] == done


# --- without a disk ------------------------------------------------------------------------------------------------------


class Room:
    """
    A disk of so many bytes, in the place of the real one.
    """

    def __init__(self) -> None:
        self.left = 10 * RESERVE_BYTES
        self.kept: dict[int, int] = {}

    def keep(self, folder: Path, size: int) -> int:
        if size > self.left:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.left -= size
        descriptor = os.open(os.devnull, os.O_WRONLY)
        self.kept[descriptor] = size
        return descriptor

    def give_back(self, descriptor: int) -> None:
        self.left += self.kept.pop(descriptor, 0)
        CLOSE(descriptor)

    def write(self, descriptor: int, data: bytes) -> int:
        if len(data) > self.left:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.left -= len(data)
        return os.write(descriptor, data)


@pytest.mark.spec("reliability:JR08")
@pytest.mark.parametrize("taken", [0, 50_000])
async def test_effect_that_fills_the_disk_keeps_its_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: int):
    room = Room()
    monkeypatch.setattr(disk_reserve, "_create_reserve_file", room.keep)
    monkeypatch.setattr(os, "close", room.give_back)
    monkeypatch.setattr(DiskReserve, "_known", {})
    path = tmp_path / "run.jsonl"
    journal = FileJournal(path)
    monkeypatch.setattr(journal, "_write", room.write)
    done: list[int] = []

    def act(number: int) -> str:
        done.append(number)
        room.left = taken
        return str(number) * RESULT_CHARS

    def handle_steps(ctx):
        for number in range(3):
            yield from Perform(act, number)
        return "done"

    async with Engine([AgentDefinition("fills", model=None, handle_steps=handle_steps)]) as engine:
        for number in range(3):
            room.left = 10 * RESERVE_BYTES
            result = await (engine.resume(journal) if number else engine.run("fills", "go", journal=journal))
            assert [*range(number + 1)] == done
            assert [] == list_effects_in_doubt(FileJournal(path).history())

    assert RunStatus.COMPLETED is result.status


@pytest.mark.spec("reliability:JR08")
@pytest.mark.parametrize("kind", ["file", "sqlite"])
def test_full_disk_at_start_leaves_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str):
    def journal() -> Journal:
        return FileJournal(tmp_path / "run.jsonl") if kind == "file" else SqliteJournal(tmp_path / "runs.db", "one")

    def full(folder: Path, size: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(DiskReserve, "_known", {})
    with Engine([agent_of([], tmp_path, lambda _: None)]) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(disk_reserve, "_create_reserve_file", full)
            with pytest.raises(JournalWriteFailed, match=r"Nothing was run or recorded\. Start the run again"):
                engine.run_sync("fills", "go", journal=journal())
        report = check(journal())
        with pytest.raises(JournalMissing, match="holds no run"):
            engine.resume_sync(journal())
        monkeypatch.setattr(DiskReserve, "_known", {})
        again = engine.run_sync("fills", "go", journal=journal())

    assert (0, False) == (report.records, bool(report))
    assert "contains no records" in report.problems[0]
    assert RunStatus.COMPLETED is again.status


@pytest.mark.spec("reliability:JR08")
def test_lone_head_is_no_run_and_is_replaced(tmp_path: Path):
    path, done = tmp_path / "run.jsonl", list[int]()
    with Engine([agent_of(done, tmp_path, lambda _: None)]) as engine:
        engine.run_sync("fills", "go", journal=FileJournal(path))
        path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])
        checked = CliRunner().invoke(app, ["journal", "check", str(path)])
        with pytest.raises(JournalMissing, match="holds no run"):
            engine.resume_sync(FileJournal(path))
        again = engine.run_sync("fills", "go", journal=FileJournal(path))

    assert "no run has started: start it again" in checked.stdout
    assert "can be resumed" not in checked.stdout
    assert RunStatus.COMPLETED is again.status
    assert check(FileJournal(path)).is_complete


@pytest.mark.parametrize("kind", [FileJournal, SqliteJournal])
def test_journal_is_not_written_if_its_folder_cannot_be_synced(kind: Any, tmp_path: Path, monkeypatch: Any) -> None:
    def refuse(folder: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    for module in (files, sqlite):
        monkeypatch.setattr(module, "sync_folder", refuse)
    path = tmp_path / "new" / "runs"

    agent = AgentDefinition("asks", model=None, handle_steps=lambda ctx: (yield Perform(str)))
    with pytest.raises(JournalWriteFailed, match=r"runs.*Input/output error"), Engine([agent]) as engine:
        engine.run_sync("asks", "go", journal=kind(path))
