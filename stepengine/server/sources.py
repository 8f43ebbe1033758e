"""
``EngineSources``: the author's files of a served engine, from which the engine is rebuilt when they were saved.

Runs continue with the code that started them; reloaded code is used by later runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import attrs

from stepengine.debugging.desk import EngineSpec
from stepengine.debugging.edits import (
    find_author_files_imported_since,
    find_author_modules_imported_since,
    find_error_location,
    format_error_without_advice,
)
from stepengine.engine.neighbour_imports import PREFIX
from stepengine.server.problems import Problem
from stepengine.server.processes import JsonChildProcess

if TYPE_CHECKING:
    from stepengine.engine import Engine

COARSE = 50_000_000
"""Nanoseconds by which the modification time of a file may be too early."""
TRIAL_SECONDS = 60.0
"""Large libraries take tens of seconds to import on a busy machine. An import that never ends hangs no server."""
UNKNOWN = b"?"


class EngineSources:
    """
    The author's files of an engine; created before the engine, so that it knows which modules the engine imported.

    Args:
        load: Makes the engine from the current files, with the options of the start.
        maker: How a child process makes the engine, which is tried first, and which files are watched in addition to imported ones.
    """

    def __init__(self, load: Callable[[], Engine], maker: EngineSpec) -> None:
        self._load = load
        self._maker = maker
        self._known = frozenset(sys.modules)
        self._since = time.time_ns()
        self._marks: dict[str, bytes] = {}
        self._refused: dict[str, bytes] | None = None

    def record_file_hashes(self) -> None:
        """Store the hashes of the watched files, as imported."""
        self._marks = {file: self._hash_or_mark_saved_file(file) for file in self._list_watched_files()}

    def mark_and_report_changed_files(self, *, retry: bool = True) -> bool:
        """Return whether a watched file changed, and store the changed version as not loaded; without *retry*, ignore a stored one."""
        now = {file: _hash_file(file) for file in self._list_watched_files()}
        for file in now.keys() - self._marks.keys():
            # A handler may import a file while it runs.
            self._marks[file] = self._hash_or_mark_saved_file(file)
        if not retry and now == self._refused:
            return False
        changed = any(self._marks[file] != mark for file, mark in now.items())
        # A successful load clears it.
        self._refused = now if changed else None
        return changed

    @property
    def has_load_failed(self) -> bool:
        """Whether the current version of the files is stored as not loaded, because loading failed or is not done."""
        return self._refused is not None

    async def require_loadable_in_child_process(self) -> None:
        """
        Load the files in a child process, which they could end or block; raise ``Problem`` if they create no engine.

        Raises:
            Problem: If they create no engine, end the process, or take more than 60 s.
        """
        process = await JsonChildProcess.start("stepengine.debugging.load_check", {"maker": attrs.asdict(self._maker)})
        told: dict[str, Any] = {"problem": "importing the agents' files ended the process", "file": "", "line": 0}
        try:
            async with asyncio.timeout(TRIAL_SECONDS):
                async for said in process.read_messages():
                    told = said
        except TimeoutError:
            told = {**told, "problem": f"importing the agents' files did not finish within {TRIAL_SECONDS:g} s"}
        finally:
            await process.terminate()
        if told["problem"]:
            raise _make_source_problem(told["problem"], told["file"], told["line"])

    def reload_engine(self) -> Engine:
        """
        Import the current files, and return their engine; if that fails, the imported modules are restored.

        Raises:
            Problem: If they create no engine.
        """
        since, before = time.time_ns(), {file: _hash_file(file) for file in self._list_watched_files()}
        held = self._unload_author_modules()
        try:
            with _ignore_bytecode():
                engine = self._load()
        except (Exception, SystemExit) as error:
            self._unload_author_modules()
            sys.modules.update(held)
            file, line = find_error_location(error)
            raise _make_source_problem(format_error_without_advice(error), file, line) from error
        # A file that is saved while it is imported is seen the next time.
        self._since, self._refused = since, None
        self._marks = {
            file: before.get(file) or self._hash_or_mark_saved_file(file) for file in self._list_watched_files()
        }
        return engine

    def _list_watched_files(self) -> set[str]:
        """Return the paths of the author's imported files and of the files that the engine reads."""
        return {
            *find_author_files_imported_since(self._known),
            *[str(Path(file).resolve()) for file in self._maker.iterate_watched_files()],
        }

    def _hash_or_mark_saved_file(self, file: str) -> bytes:
        """Return the hash of a file; ``UNKNOWN``, which differs from every hash, if it may have been saved since the import."""
        try:
            is_later = Path(file).stat().st_mtime_ns > self._since - COARSE
        except OSError:
            return b""
        # It is unknown whether the file was imported before or after that save.
        return UNKNOWN if is_later else _hash_file(file)

    def _unload_author_modules(self) -> dict[str, ModuleType]:
        """Remove the author's modules from ``sys.modules``, and return them by name."""
        own = {name for name, _ in find_author_modules_imported_since(self._known)}
        # What packages without a file know as their members is imported already.
        own |= {above for name in own for above in _iterate_parent_packages(name) if above not in self._known}
        own |= {name for name in sys.modules if name.startswith(PREFIX)}
        return {name: sys.modules.pop(name) for name in own if name in sys.modules}


def _iterate_parent_packages(name: str) -> Iterator[str]:
    """Yield the names of the packages that contain a module, the nearest first."""
    while name := name.rpartition(".")[0]:
        yield name


def _hash_file(file: str) -> bytes:
    """Return the SHA-256 of a file; empty bytes if it cannot be read."""
    try:
        return sha256(Path(file).read_bytes()).digest()
    except OSError:  # an editor may take it away for a moment
        return b""


def _make_source_problem(message: str, file: str, line: int) -> Problem:
    """Return the problem 409 for files that cannot be loaded, with the place of the error."""
    where = f"{file}:{line}"
    message = message if not file or where in message else f"{where}: {message}"
    msg = f"the agents' files cannot be loaded, so the server uses the last version that loaded: {message}"
    return Problem(msg, status=409, kind="broken_code", members={"file": file, "line": line})


@contextlib.contextmanager
def _ignore_bytecode() -> Iterator[None]:
    """Import only sources within the block: ignore and write no bytecode, which is matched by second and size only."""
    before = sys.dont_write_bytecode, sys.pycache_prefix
    sys.dont_write_bytecode, sys.pycache_prefix = True, f"{tempfile.gettempdir()}/none-{os.urandom(8).hex()}"
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.dont_write_bytecode, sys.pycache_prefix = before
