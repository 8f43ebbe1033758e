"""
``stepengine debug --watch``: one place of a recorded run, shown again under the new code whenever a file of the agent is saved.

This process reads the record, and never imports what is edited: each look is one of a process of its own (``debugging.edits``).
"""

from __future__ import annotations

import json
import select
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepengine.cli.bench import bench_for, models_of
from stepengine.cli.exits import Exit, complain
from stepengine.cli.journals import journal_at, recorded_agent
from stepengine.cli.options import Options
from stepengine.cli.screen.render import counted, cut, say
from stepengine.cli.settings import UsageProblem
from stepengine.errors import JournalError

if TYPE_CHECKING:
    from stepengine.data.definition import AgentDefinition
    from stepengine.debugging.edits import MomentView
    from stepengine.engine import Engine
    from stepengine.engine.stepping import Tape

__all__ = ("watch_place",)

FORMAT = "stepengine.watch/1"
EVERY = 0.1
"""How often files are looked at, in seconds: a save is seen before the hand has left the key."""
LISTED = 5
MOST = 20


def watch_place(options: Options, at: str, *, width: int, prints: bool) -> Exit:
    """
    Show a place whenever the code changed, until somebody ends it.

    Raises:
        UsageProblem: where no process can be made, or the run has no such place.
        JournalError: when the journal cannot be used.
    """
    from stepengine.debugging.debugger import can_fork
    from stepengine.engine.stepping import Tape

    _import_libraries(options)
    why = can_fork()
    if why:
        msg = f"--watch needs a process for each look, and there is none here: {why}"
        raise UsageProblem(msg)
    tape = Tape(journal_at(options.journal))
    screen = _Screen(options, tape, at, width=width, prints=prints)
    try:
        screen.look([])
        while screen.wait():
            pass
    except KeyboardInterrupt:
        pass
    finally:
        screen.close()
    return Exit.COMPLETED


def _import_libraries(options: Options) -> None:
    """
    Import here what every look would import anew, which is most of its time: none of it is the author's.

    An engine for an agent that is nobody's knows best what that is. ``bench_for`` would look for agents beside the one that was typed.
    """
    from stepengine.data.definition import AgentDefinition
    from stepengine.engine import Engine
    from stepengine.tools.bundled.bundled import uncalled_tools
    from stepengine.tools.decorator import tool

    @tool
    def nothing(text: str) -> str:
        """
        Do nothing.

        Args:
            text: Anything.
        """
        return text

    Engine(
        [AgentDefinition("nobody", tools=[nothing])], tools=uncalled_tools(options.cwd), models=models_of(options)
    ).close()


class _Screen:
    """
    What is shown, and what it is compared with.

    Args:
        options: What was typed.
        tape: The run.
        at: The place.
        width: Columns of the screen; 0 for those of the terminal.
        prints: Whether what the code prints is shown.
    """

    def __init__(self, options: Options, tape: Tape, at: str, *, width: int, prints: bool) -> None:
        from stepengine.debugging.edits import Watched

        self._options = options
        self._tape = tape
        self._width = width or shutil.get_terminal_size().columns
        self._last: MomentView | None = None
        self._watched = Watched(self._load, tape, at, files=lambda: _file_of(options.agent), prints=prints)
        if not options.as_json:
            root = tape.history.root
            say(
                f"{options.journal}  {root['agent_id']} · {counted(len(tape.steps.get('', ())), 'step')}\n"
                "save a file of the agent, and the run is walked again under the new code; no tool runs, no model is asked\n"
                "type a place, such as 12 or 3.2#1, to go there; Ctrl-C ends this"
            )

    def _load(self) -> tuple[Engine, AgentDefinition]:
        history = self._tape.history
        agent = recorded_agent(self._tape.journal, self._options, history)
        return bench_for(self._options, agent, performs=False, recorded=history).engine, agent

    def close(self) -> None:
        """End what is watched."""
        self._watched.close()

    def look(self, saved: list[str]) -> None:
        """Look, and show what there is."""
        self._last = self._watched.good
        try:
            found, changes = self._watched.look()
        except JournalError as error:
            if self._last is None:
                raise UsageProblem(error.message) from None
            complain(error.message)
            return
        self._show(found, saved, changes)

    def wait(self) -> bool:
        """Wait for a save or for what is typed, and look; return whether to go on."""
        while True:
            saved = self._watched.saved()
            if saved:
                self.look(saved)
                return True
            typed = _read_typed_line(EVERY)
            if typed is None:
                continue
            if typed in ("q", "quit"):
                return False
            if typed:
                self._watched.at = typed
                self.look([])
                return True

    # --- showing ------------------------------------------------------------------------------------------------------

    def _show(self, found: MomentView, saved: list[str], changes: list[str] | None) -> None:
        if self._options.as_json:
            seconds = round(self._watched.seconds, 3)
            told = {"format": FORMAT, "at": self._watched.at, "saved": saved, "seconds": seconds}
            said = {**(found.place or {}), "lines": found.lines, "problem": found.problem, "differs": found.differs}
            more = {"ends": found.ends, "differs_at": found.differs_at, "changed": found.changed, "files": found.files}
            line = json.dumps({**told, **said, **more, "difference": changes})
            print(line.replace("\x7f", "\\u007f"), flush=True)
        else:
            say("\n".join(self._screen(found, saved, changes)))
            sys.stdout.flush()

    def _screen(self, found: MomentView, saved: list[str], changes: list[str] | None) -> Iterator[str]:
        names = ", ".join([Path(file).name for file in saved])
        head = f"── {datetime.now():%H:%M:%S}{f' · {names} saved' if names else ''} · {self._watched.seconds:.2f} s "  # noqa: DTZ005 - the reader's
        yield f"{head}{'─' * max(2, self._width - len(head))}"
        place = found.place
        if place is None:
            yield from [f" {found.problem}"] if found.problem else self._course(found)
            yield " what was shown before stands" if self._last is not None else ""
            return
        yield f" step {place['step']} · {place['address'] or 'the end'}{' (the last place before it)' if found.is_before else ''}"
        if changes is None or self._moved(found):
            yield from self._source(found)
        if changes is None:
            yield from self._place(place)
        else:
            yield from [f" {cut(line, self._width - 1)}" for line in changes[:MOST]] or [" no variable is different"]
            yield from [f" and {len(changes) - MOST} lines more: --json has all"] if len(changes) > MOST else ()
        yield from self._course(found)

    def _moved(self, found: MomentView) -> bool:
        good = self._last
        return (
            good is None
            or good.lines != found.lines
            or (good.place or {}).get("asked") != (found.place or {}).get("asked")
        )

    def _source(self, found: MomentView) -> Iterator[str]:
        frames = (found.place or {})["frames"]
        if not frames:
            yield " nothing of the author's waits here"
            return
        yield f" {_short(frames[0]['file'])}  {frames[0]['function']}"
        for number, text in found.lines:
            yield f" {'>' if number == frames[0]['line'] else ' '} {number:<4} {cut(text, self._width - 8)}"

    def _place(self, place: Mapping[str, Any]) -> Iterator[str]:
        yield f" asked     {cut(place['asked'], self._width - 11)}"
        if place["outcome"] is not None:
            yield f" answer    {cut(place['outcome'], self._width - 11)}"
        for frame in place["frames"][:1]:
            for name, text in frame["locals"].items():
                yield f"   {name} = {cut(text, self._width - len(name) - 6)}"

    def _course(self, found: MomentView) -> Iterator[str]:
        """Say how the run goes on under this code."""
        if found.changed:
            more = f" and {len(found.changed) - LISTED} more" if len(found.changed) > LISTED else ""
            where = ", ".join(found.changed[:LISTED])
            yield f" as if the model still said this: it would be asked something else at {where}{more}"
        if found.differs:
            yield f" the code goes another way at {found.differs_at or 'the end'}:"
            yield from [f"   {line}" for line in found.differs.splitlines()]
        elif found.ends:
            yield f" every effect is as recorded, and the run ends with {found.ends[1]} (recorded: {found.ends[0]})"
        elif not found.changed:
            yield " to its end the run is as recorded"


def _file_of(agent: str) -> list[str]:
    """Return the file that was typed: where it cannot be loaded at first, or is not there, it is what is saved next."""
    from stepengine.engine.loading import AgentPlace

    place = AgentPlace.of_text(agent) if agent else None
    return [] if place is None else [str(place.file.resolve())]


def _short(file: str) -> str:
    """Return a file as seen from here."""
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file


def _read_typed_line(seconds: float) -> str | None:
    """Return a line that was typed within so many seconds; ``None`` for none. Where nobody can type, time passes."""
    if not sys.stdin.isatty():
        time.sleep(seconds)
        return None
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    if not ready:
        return None
    line = sys.stdin.readline()
    return line.strip() if line else "quit"
