"""
``Sources``: the files of which a served engine was made, and the engine made anew of them once they were saved.

Runs go on with the code that they began with; what is imported anew is for those that begin from then on.
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

from stepengine.debugging.desk import Maker
from stepengine.debugging.edits import error_text, files_since, modules_since, places_of
from stepengine.engine.beside import PREFIX
from stepengine.server.problems import Problem
from stepengine.server.processes import Process

if TYPE_CHECKING:
    from stepengine.engine import Engine

__all__ = ("Sources",)

COARSE = 50_000_000
"""Nanoseconds by which a file system may date a save too early."""
TRIAL_SECONDS = 10.0
"""Importing what an agent file needs may take a while; what is never done with it hangs no server."""
UNKNOWN = b"?"


class Sources:
    """
    The author's files behind an engine; made before the engine is, so that it knows which modules came with it.

    Args:
        load: Makes the engine of the files as they are now, by the rules that held at the start.
        maker: How another process does that, where it is tried first, and which files are watched beside those that are imported.
    """

    def __init__(self, load: Callable[[], Engine], maker: Maker) -> None:
        self._load = load
        self._maker = maker
        self._known = frozenset(sys.modules)
        self._since = time.time_ns()
        self._marks: dict[str, bytes] = {}
        self._refused: dict[str, bytes] | None = None

    def taken(self) -> None:
        """Take note of what the files hold that were imported since this was made."""
        self._marks = {file: self._first_mark(file) for file in self._files()}

    def changed(self, *, again: bool = True) -> bool:
        """Return whether one of the files holds something else than what was imported; unless *again* not what was refused already."""
        now = {file: _mark(file) for file in self._files()}
        for file in now.keys() - self._marks.keys():
            # A handler may import something while it is at work.
            self._marks[file] = self._first_mark(file)
        if not again and now == self._refused:
            return False
        changed = any(self._marks[file] != mark for file, mark in now.items())
        # Until it is known to be sound, which forgets this.
        self._refused = now if changed else None
        return changed

    @property
    def is_refused(self) -> bool:
        """Whether the files made no engine when they were tried last."""
        return self._refused is not None

    async def check(self) -> None:
        """
        Try in a process of its own whether the files make an engine: they could end the one that imports them, or never be done.

        Raises:
            Problem: when they make none.
        """
        process = await Process.begun("stepengine.debugging.trying", {"maker": attrs.asdict(self._maker)})
        told: dict[str, Any] = {"problem": "importing the agents' files ended the process", "file": "", "line": 0}
        try:
            async with asyncio.timeout(TRIAL_SECONDS):
                async for said in process.lines():
                    told = said
        except TimeoutError:
            told = {**told, "problem": f"importing the agents' files was not done after {TRIAL_SECONDS:g} s"}
        finally:
            await process.end()
        if told["problem"]:
            raise _broken(told["problem"], told["file"], told["line"])

    def remade(self) -> Engine:
        """
        Return an engine of the files as they are now; where that fails, all that was imported stays as it is.

        Raises:
            Problem: when they make none.
        """
        since, before = time.time_ns(), {file: _mark(file) for file in self._files()}
        held = self._taken_out()
        try:
            with _sources_alone():
                engine = self._load()
        except (Exception, SystemExit) as error:
            self._taken_out()
            sys.modules.update(held)
            file, line = next(iter(reversed(list(places_of(error)))), ("", 0))
            raise _broken(error_text(error), file, line) from error
        # A file that is saved while it is imported is seen the next time.
        self._since, self._refused = since, None
        self._marks = {file: before.get(file) or self._first_mark(file) for file in self._files()}
        return engine

    def _files(self) -> set[str]:
        return {*files_since(self._known), *[str(Path(file).resolve()) for file in self._maker.watched()]}

    def _first_mark(self, file: str) -> bytes:
        try:
            is_later = Path(file).stat().st_mtime_ns > self._since - COARSE
        except OSError:
            return b""
        # Nobody knows whether it was imported before or after that save.
        return UNKNOWN if is_later else _mark(file)

    def _taken_out(self) -> dict[str, ModuleType]:
        """Take the author's modules out of those that are imported, and return them by name."""
        own = {name for name, _ in modules_since(self._known)}
        # What packages without a file know as their members is imported already.
        own |= {above for name in own for above in _above(name) if above not in self._known}
        own |= {name for name in sys.modules if name.startswith(PREFIX)}
        return {name: sys.modules.pop(name) for name in own if name in sys.modules}


def _above(name: str) -> Iterator[str]:
    while name := name.rpartition(".")[0]:
        yield name


def _mark(file: str) -> bytes:
    try:
        return sha256(Path(file).read_bytes()).digest()
    except OSError:  # an editor may take it away for a moment
        return b""


def _broken(said: str, file: str, line: int) -> Problem:
    where = f"{file}:{line}"
    said = said if not file or where in said else f"{where}: {said}"
    msg = f"the agents' files cannot be loaded as they are now, and the last code that could is kept: {said}"
    return Problem(msg, status=409, kind="broken_code", members={"file": file, "line": line})


@contextlib.contextmanager
def _sources_alone() -> Iterator[None]:
    """Import sources, never bytecode: that is found by the second of a save and by its size, which two saves can share."""
    before = sys.dont_write_bytecode, sys.pycache_prefix
    sys.dont_write_bytecode, sys.pycache_prefix = True, f"{tempfile.gettempdir()}/none-{os.urandom(8).hex()}"
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.dont_write_bytecode, sys.pycache_prefix = before
