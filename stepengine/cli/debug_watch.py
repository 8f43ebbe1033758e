"""
``stepengine debug --watch``: one position of a recorded run, shown again under the new code after each save of an agent's file.

This process reads the record and never imports the edited code: each preview is made in a process of its own (``debugging.edits``).
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

from stepengine.cli.bench import make_model_registry
from stepengine.cli.debug_screen import make_path_relative
from stepengine.cli.exits import Exit, print_error
from stepengine.cli.journals import load_replay_setup, open_journal
from stepengine.cli.options import Options
from stepengine.cli.screen.render import format_count, print_visible, truncate_text
from stepengine.cli.settings import UsageProblem
from stepengine.errors import JournalError

if TYPE_CHECKING:
    from stepengine.data.definition import AgentDefinition
    from stepengine.debugging.edits import MomentPreview
    from stepengine.engine import Engine
    from stepengine.engine.tape import Tape

FORMAT = "stepengine.watch/1"
EVERY = 0.1
"""Seconds between two checks of the files."""
LISTED = 5
MOST = 20


def watch_position(options: Options, at: str, *, prints: bool) -> Exit:
    """
    Show a position again after each change of the code, until the user quits.

    Raises:
        UsageProblem: when no process can be forked, or the run has no such position.
        JournalError: when the journal cannot be used.
    """
    from stepengine.debugging.desk import preload_engine_libraries
    from stepengine.debugging.walks import find_os_fork_problem
    from stepengine.engine.tape import Tape
    from stepengine.tools.bundled.bundled import list_all_workspace_tools

    # Not by `make_engine_setup`: that would look for agents next to the one that was typed.
    preload_engine_libraries(tools=list_all_workspace_tools(options.cwd), models=make_model_registry(options))
    why = find_os_fork_problem()
    if why:
        msg = f"--watch needs forked processes, which are not available here: {why}"
        raise UsageProblem(msg)
    tape = Tape(open_journal(options.journal))
    screen = _WatchScreen(options, tape, at, prints=prints)
    try:
        screen.load_and_print_preview([])
        while screen.wait_and_print_change():
            pass
    except KeyboardInterrupt:
        pass
    finally:
        screen.close()
    return Exit.COMPLETED


class _WatchScreen:
    """
    Prints a position of a run after each change of the code.

    Args:
        options: The typed options.
        tape: The run.
        at: The position.
        prints: Whether the output of the code is shown.
    """

    def __init__(self, options: Options, tape: Tape, at: str, *, prints: bool) -> None:
        from stepengine.debugging.edits import WatchedMoment

        self._options = options
        self._tape = tape
        self._width = shutil.get_terminal_size().columns
        self._last: MomentPreview | None = None
        self._watched = WatchedMoment(
            self._load_engine_and_agent, tape, at, files=lambda: _find_typed_agent_file(options.agent), prints=prints
        )
        if not options.as_json:
            root = tape.history.root
            print_visible(
                f"{options.journal}  {root['agent_id']} · {format_count(tape.count_steps(), 'step')}\n"
                "save a file of the agent to replay the run with the new code; no tool runs, no model is called\n"
                "type a position, such as 12 or 3.2#1, to go there; Ctrl-C stops watching"
            )

    def _load_engine_and_agent(self) -> tuple[Engine, AgentDefinition]:
        """Load the agent of the recorded run, and return it with an engine that performs nothing."""
        agent, bench = load_replay_setup(self._options, self._tape.history)
        return bench.engine, agent

    def close(self) -> None:
        """Stop watching, and end the processes that watch."""
        self._watched.close()

    def load_and_print_preview(self, saved: list[str]) -> None:
        """Load the code in a child process, and print the position or its changes."""
        self._last = self._watched.good
        try:
            found, changes = self._watched.reload_and_preview()
        except JournalError as error:
            if self._last is None:
                raise UsageProblem(error.message) from None
            print_error(error.message)
            return
        self._print_preview(found, saved, changes)

    def wait_and_print_change(self) -> bool:
        """Wait shortly for a saved file or a typed position, and show the result; return ``False`` if the user quits."""
        saved = self._watched.find_saved_files()
        if saved:
            self.load_and_print_preview(saved)
            return True
        typed = _wait_for_typed_line()
        if typed in ("q", "quit"):
            return False
        if typed:
            self._watched.at = typed
            self.load_and_print_preview([])
        return True

    # --- showing ------------------------------------------------------------------------------------------------------

    def _print_preview(self, preview: MomentPreview, saved: list[str], changes: list[str] | None) -> None:
        """Print the position under the saved code, or its changes, as lines or as one JSON object."""
        if self._options.as_json:
            seconds = round(self._watched.seconds, 3)
            told = {"format": FORMAT, "at": self._watched.at, "saved": saved, "seconds": seconds}
            said = {
                **(preview.place or {}),
                "lines": preview.lines,
                "problem": preview.problem,
                "differs": preview.differs,
            }
            more = {
                "ends": preview.ends,
                "differs_at": preview.differs_at,
                "changed": preview.changed,
                "files": preview.files,
            }
            line = json.dumps({**told, **said, **more, "difference": changes})
            print(line.replace("\x7f", "\\u007f"), flush=True)
        else:
            print_visible("\n".join(self._format_preview_lines(preview, saved, changes)))
            sys.stdout.flush()

    def _format_preview_lines(
        self, preview: MomentPreview, saved: list[str], changes: list[str] | None
    ) -> Iterator[str]:
        """Yield the lines about a preview: time, saved files, changes or source, request, and the rest of the run."""
        names = ", ".join([Path(file).name for file in saved])
        head = f"── {datetime.now():%H:%M:%S}{f' · {names} saved' if names else ''} · {self._watched.seconds:.2f} s "  # noqa: DTZ005 - the reader's
        yield f"{head}{'─' * max(2, self._width - len(head))}"
        place = preview.place
        if place is None:
            yield from [f" {preview.problem}"] if preview.problem else self._format_remaining_run_lines(preview)
            yield " still showing the last version" if self._last is not None else ""
            return
        yield f" step {place['step']} · {place['address'] or 'the end'}{' (the last position before it)' if preview.is_before else ''}"
        if changes is None or self._has_changed_lines_or_request(preview):
            yield from self._format_preview_source_lines(preview)
        if changes is None:
            yield from self._format_effect_lines(place)
        else:
            yield from [f" {truncate_text(line, self._width - 1)}" for line in changes[:MOST]] or [
                " no variable is different"
            ]
            yield from [f" and {len(changes) - MOST} more lines; --json prints all"] if len(changes) > MOST else ()
        yield from self._format_remaining_run_lines(preview)

    def _has_changed_lines_or_request(self, preview: MomentPreview) -> bool:
        """Return whether the source line or the request differs from the last version."""
        good = self._last
        return (
            good is None
            or good.lines != preview.lines
            or (good.place or {}).get("asked") != (preview.place or {}).get("asked")
        )

    def _format_preview_source_lines(self, preview: MomentPreview) -> Iterator[str]:
        """Yield the source lines of a preview, with a mark at the current one."""
        frames = (preview.place or {})["frames"]
        if not frames:
            yield " no code of the agent is suspended here"
            return
        yield f" {make_path_relative(frames[0]['file'])}  {frames[0]['function']}"
        for number, text in preview.lines:
            yield f" {'>' if number == frames[0]['line'] else ' '} {number:<4} {truncate_text(text, self._width - 8)}"

    def _format_effect_lines(self, position: Mapping[str, Any]) -> Iterator[str]:
        """Yield the request, the answer and the variables of the outermost frame."""
        yield f" asked     {truncate_text(position['asked'], self._width - 11)}"
        if position["outcome"] is not None:
            yield f" answer    {truncate_text(position['outcome'], self._width - 11)}"
        for frame in position["frames"][:1]:
            for name, text in frame["locals"].items():
                yield f"   {name} = {truncate_text(text, self._width - len(name) - 6)}"

    def _format_remaining_run_lines(self, preview: MomentPreview) -> Iterator[str]:
        """Yield lines about the rest of the run under the new code: changed requests, divergence or end."""
        if preview.changed:
            more = f" and {len(preview.changed) - LISTED} more" if len(preview.changed) > LISTED else ""
            where = ", ".join(preview.changed[:LISTED])
            yield f" assuming the same model replies, although the request differs at {where}{more}"
        if preview.differs:
            yield f" the code diverges at {preview.differs_at or 'the end'}:"
            yield from [f"   {line}" for line in preview.differs.splitlines()]
        elif preview.ends:
            yield f" every effect is as recorded, and the run ends with {preview.ends[1]} (recorded: {preview.ends[0]})"
        elif not preview.changed:
            yield " the run is as recorded to its end"


def _find_typed_agent_file(agent: str) -> list[str]:
    """Return the file of ``--agent`` in a list, so that it is watched even while it cannot be loaded."""
    from stepengine.engine.loader import AgentLocation

    place = AgentLocation.from_text(agent) if agent else None
    return [] if place is None else [str(place.file.resolve())]


def _wait_for_typed_line() -> str | None:
    """Wait at most ``EVERY`` seconds for a line and return it; ``"quit"`` at the end of the input, ``None`` without a line or a terminal."""
    if not sys.stdin.isatty():
        time.sleep(EVERY)
        return None
    ready, _, _ = select.select([sys.stdin], [], [], EVERY)
    if not ready:
        return None
    line = sys.stdin.readline()
    return line.strip() if line else "quit"
