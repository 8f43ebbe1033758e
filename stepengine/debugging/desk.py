"""
A desk: a process beside an application, in which one recorded run is looked at under the author's code, for one page.

It reads a line of JSON that says what it is for, holds the record, and never imports what is edited: each version of the code has a process
of its own that is forked here (``debugging.edits``). What it is asked for comes in lines, and so do its answers; at every save of a file it
tells by itself what the place looks like now. It ends when nobody can ask any more.

``python -m stepengine.debugging.desk`` is started by ``stepengine.server``, and by nobody else.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
from attrs import frozen

from stepengine.data.definition import AgentDefinition
from stepengine.debugging.debugger import can_fork
from stepengine.debugging.edits import MomentView, Watched
from stepengine.engine import Engine
from stepengine.engine.stepping import Tape
from stepengine.errors import StepEngineError
from stepengine.journal import FileJournal
from stepengine.tools.decorator import tool

if TYPE_CHECKING:
    from stepengine.engine.options import AgentLike

__all__ = ("Maker", "lines_of", "talk")

EVERY = 0.1
"""How often files are looked at, in seconds."""
LINE = 1 << 20


@frozen
class Maker:
    """
    How another process makes the engine of an application from the files as they are now.

    Attributes:
        make: A function, ``"package.module:name"``; it returns an ``Engine``, or what has one as its ``embedded_engine``.
        given: What it is called with by name: JSON.
        files: The author's files, and folders of them, that are watched beside those which were imported.
    """

    make: str
    given: Mapping[str, Any] = attrs.field(factory=dict)
    files: tuple[str, ...] = ()

    @classmethod
    def of_json(cls, told: Mapping[str, Any]) -> Maker:
        """Return what ``attrs.asdict`` made JSON of."""
        return cls(told["make"], told["given"], tuple(told["files"]))

    def engine(self) -> Engine:
        """Import the author's code, and return its engine."""
        module, _, name = self.make.partition(":")
        if str(Path.cwd()) not in sys.path:
            # Last: nothing there takes the place of what is installed.
            sys.path.append(str(Path.cwd()))
        made = getattr(importlib.import_module(module), name)(**self.given)
        engine: Engine = getattr(made, "embedded_engine", made)
        return engine

    def load(self) -> tuple[Engine, AgentLike | None]:
        """Return the engine, and no agent: the one that the journal names is meant."""
        return self.engine(), None

    def watched(self) -> Iterator[str]:
        """Give the author's files: of a folder those that are there now."""
        for one in self.files:
            path = Path(one)
            yield from map(str, sorted(path.glob("*.py"))) if path.is_dir() else [str(path.resolve())]


def lines_of(descriptor: int) -> Callable[[float | None], list[Any] | None]:
    """Return what gives the lines that came within so many seconds, as JSON; ``None`` once nobody writes any more."""
    rest = bytearray()

    def come(seconds: float | None) -> list[Any] | None:
        ready, _, _ = select.select([descriptor], [], [], seconds)
        if not ready:
            return []
        part = os.read(descriptor, LINE)
        if not part:
            return None
        rest.extend(part)
        *whole, left = bytes(rest).split(b"\n")
        rest[:] = left
        return [json.loads(line) for line in whole if line]

    return come


def talk() -> tuple[Callable[[float | None], list[Any] | None], Callable[[Mapping[str, Any]], None]]:
    """Return what hears and what says lines of JSON, out of the reach of whatever the author's code prints or reads."""
    reading, writing = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)

    def say(told: Mapping[str, Any]) -> None:
        line = json.dumps(told).encode() + b"\n"
        while line:
            line = line[os.write(writing, line) :]

    return lines_of(reading), say


def _import_libraries() -> None:
    """Import here what every look would import anew, which is most of its time: none of it is the author's."""

    @tool
    def nothing(text: str) -> str:
        """
        Do nothing.

        Args:
            text: Anything.
        """
        return text

    Engine([AgentDefinition("nobody", tools=[nothing])]).close()


class _Desk:
    """
    What is done at a desk.

    Args:
        say: Tells the page something.
        maker: How the engine is made.
        file: The journal.
        at: Where to begin.
    """

    def __init__(self, say: Callable[[Mapping[str, Any]], None], maker: Maker, file: str, at: str) -> None:
        self._say = say
        self._file = file
        self._at = at
        self._watched = Watched(maker.load, Tape(FileJournal(file)), at, files=maker.watched)

    def sit(self, hear: Callable[[float | None], list[Any] | None]) -> None:
        """Look whenever somebody asks or a file is saved, until nobody can ask any more."""
        self._look([])
        if self._watched.good is None and self._watched.at != self._at:
            # There is no such place: that was said, and the beginning is a place of every run.
            self._look([])
        while (asked := hear(EVERY)) is not None:
            for one in asked:
                self._do(one)
            saved = self._watched.saved()
            if saved:
                self._look(saved)

    def close(self) -> None:
        self._watched.close()

    def _look(self, saved: list[str]) -> None:
        before = self._watched.good
        try:
            found, changes = self._watched.look(whole=True)
        except StepEngineError as error:
            self._say({"event": "problem", "problem": self._clean(error.message), "saved": saved})
            return
        seconds = round(self._watched.seconds, 3)
        told = {"event": "look", "at": self._watched.at, "saved": saved, "seconds": seconds, "difference": changes}
        self._say(
            {**told, "now": self._shown(found), "before": self._shown(self._beside(found, before) if saved else None)}
        )

    def _beside(self, found: MomentView, before: MomentView | None) -> MomentView | None:
        """Return what was where a look stands, under the code before it: what was elsewhere would be no change."""
        if found.place is None or before is None or before.place is None:
            return None
        return (
            before if found.place["address"] == before.place["address"] else self._watched.old(found.place["address"])
        )

    def _do(self, asked: Mapping[str, Any]) -> None:
        act: Callable[[], Mapping[str, Any]] = partial(self._goes, str(asked.get("at", "")))
        if asked["do"] == "next":
            act = self._next
        try:
            told = act()
        except StepEngineError as error:
            told = {"refused": self._clean(error.message)}
        self._say({"id": asked["id"], **told})

    def _goes(self, at: str) -> dict[str, Any]:
        found, old = self._watched.go(at, whole=True)
        return {"now": self._shown(found), "before": self._shown(old)}

    def _next(self) -> dict[str, Any]:
        return attrs.asdict(self._watched.next())

    def _shown(self, found: MomentView | None) -> dict[str, Any] | None:
        if found is None:
            return None
        told = attrs.asdict(found, recurse=False, filter=lambda one, _: one.name != "summary")
        return {**told, "problem": self._clean(found.problem), "differs": self._clean(found.differs)}

    def _clean(self, said: str) -> str:
        """Leave out where the record lies meanwhile, which tells nobody anything."""
        return said.replace(self._file, Path(self._file).stem)


def main() -> None:
    """Do what the first line says."""
    hear, say = talk()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    asked: list[Any] | None = []
    while not asked:
        asked = hear(None)
        if asked is None:
            return
    first, *_ = asked
    why = can_fork()
    if why:
        say({"event": "ended", "problem": f"a desk needs processes of its own, and there are none here: {why}"})
        return
    _import_libraries()
    try:
        desk = _Desk(say, Maker.of_json(first["maker"]), first["file"], first["at"])
    except (StepEngineError, OSError) as error:
        say({"event": "ended", "problem": f"the record cannot be read: {error}"})
        return
    try:
        desk.sit(hear)
    except KeyboardInterrupt:
        pass
    except BrokenPipeError:
        pass
    finally:
        desk.close()


if __name__ == "__main__":
    main()
