"""
A desk: a child process of an application that shows one page one recorded run under the author's current code.

Its first message is a line of JSON with the engine, the journal and the position. It holds the record and never imports edited code:
each version of the code has a process of its own, forked here (``debugging.edits``). Requests and replies are lines of JSON. After
every save of a file it sends a new preview of the position unasked. It ends with its input.

Only ``stepengine.server`` starts ``python -m stepengine.debugging.desk``.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
from attrs import frozen

from stepengine.data.definition import AgentDefinition
from stepengine.debugging.edits import MomentPreview, WatchedMoment
from stepengine.debugging.walks import find_os_fork_problem
from stepengine.engine import Engine
from stepengine.engine.tape import Tape
from stepengine.errors import StepEngineError
from stepengine.journal import FileJournal
from stepengine.tools.decorator import tool

EVERY = 0.1
"""The interval between checks for saved files, in seconds."""
LINE = 1 << 20


@frozen
class EngineSpec:
    """
    The instructions for another process to create the engine of an application from its current files.

    Attributes:
        make: A function, ``"package.module:name"``; it returns an ``Engine``, or an object with one as ``embedded_engine``.
        given: Its keyword arguments: JSON.
        files: The author's files and folders that are watched in addition to imported files.
    """

    make: str
    given: Mapping[str, Any] = attrs.field(factory=dict)
    files: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> EngineSpec:
        """Return the spec in a JSON object, as ``attrs.asdict`` writes it."""
        return cls(data["make"], data["given"], tuple(data["files"]))

    def create_engine(self) -> Engine:
        """Import the author's code, and return its engine."""
        module, _, name = self.make.partition(":")
        if str(Path.cwd()) not in sys.path:
            # Last, so that no file there hides an installed module.
            sys.path.append(str(Path.cwd()))
        made = getattr(importlib.import_module(module), name)(**self.given)
        engine: Engine = getattr(made, "embedded_engine", made)
        return engine

    def iterate_watched_files(self) -> Iterator[str]:
        """Yield the paths of the author's files; for a folder, those of its current Python files."""
        for one in self.files:
            path = Path(one)
            yield from map(str, sorted(path.glob("*.py"))) if path.is_dir() else [str(path.resolve())]


def make_message_reader(descriptor: int) -> Callable[[float | None], list[Any] | None]:
    """
    Return a function that reads the next JSON line from *descriptor*: ``[message]``, ``[]`` after a timeout, ``None`` at the end.

    The list is empty if no line arrives in time. At the end of the input the function returns ``None``.
    """
    rest = bytearray()
    lines: deque[bytes] = deque()

    def read_message(seconds: float | None) -> list[Any] | None:
        """Return the next message in a list: empty after *seconds*, ``None`` at the end of the input."""
        if not lines:
            ready, _, _ = select.select([descriptor], [], [], seconds)
            if not ready:
                return []
            part = os.read(descriptor, LINE)
            if not part:
                return None
            rest.extend(part)
            *whole, left = bytes(rest).split(b"\n")
            rest[:] = left
            lines.extend([line for line in whole if line])
        return [json.loads(lines.popleft())] if lines else []

    return read_message


def move_stdio_to_json_channel() -> tuple[
    Callable[[float | None], list[Any] | None], Callable[[Mapping[str, Any]], None]
]:
    """Move standard input and output to other descriptors; return functions that read and write JSON lines on them."""
    reading, writing = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)

    def write_message(message: Mapping[str, Any]) -> None:
        """Write a message as a JSON line, all of it."""
        line = json.dumps(message).encode() + b"\n"
        while line:
            line = line[os.write(writing, line) :]

    return make_message_reader(reading), write_message


def wait_for_message(read_message: Callable[[float | None], list[Any] | None]) -> Any:
    """Wait for the next message and return it; ``None`` at the end of the input."""
    messages: list[Any] | None = []
    while messages == []:
        messages = read_message(None)
    return messages[0] if messages else None


def preload_engine_libraries(**options: Any) -> None:
    """Import the libraries that every preview needs, by making an engine with *options*, so that forked processes start faster."""

    @tool
    def nothing(text: str) -> str:
        """
        Do nothing.

        Args:
            text: Anything.
        """
        return text

    Engine([AgentDefinition("nobody", tools=[nothing])], **options).close()


class _RunInspector:
    """
    Answers a page's requests about one run under the author's current code.

    Args:
        write_message: Sends a message to the page.
        maker: Creates the engine.
        file: The journal.
        at: The first position.
    """

    def __init__(
        self, write_message: Callable[[Mapping[str, Any]], None], maker: EngineSpec, file: str, at: str
    ) -> None:
        self._write_message = write_message
        self._file = file
        self._at = at
        tape = Tape(FileJournal(file))
        # The journal names the agent.
        self._watched = WatchedMoment(
            lambda: (maker.create_engine(), None), tape, at, files=maker.iterate_watched_files
        )

    def serve_requests(self, read_message: Callable[[float | None], list[Any] | None]) -> None:
        """Send a preview, then answer requests and send a new preview when a file is saved, until the input ends."""
        self._reload_and_send_preview([])
        if self._watched.good is None and self._watched.at != self._at:
            # The position does not exist, which was reported. Use the start instead, which every run has.
            self._reload_and_send_preview([])
        while (asked := read_message(EVERY)) is not None:
            for one in asked:
                self._answer_request(one)
            saved = self._watched.find_saved_files()
            if saved:
                self._reload_and_send_preview(saved)

    def close(self) -> None:
        """End the processes of the previews."""
        self._watched.close()

    def _reload_and_send_preview(self, saved: list[str]) -> None:
        """
        Reload the code and send the preview of the position; send an error of the reload as a problem.

        Args:
            saved: The files that were saved. If there are any, the preview under the old code is sent, too.
        """
        before = self._watched.good
        try:
            found, changes = self._watched.reload_and_preview(with_details=True)
        except StepEngineError as error:
            self._write_message({"event": "problem", "problem": self._hide_journal_path(error.message), "saved": saved})
            return
        seconds = round(self._watched.seconds, 3)
        told = {"event": "look", "at": self._watched.at, "saved": saved, "seconds": seconds, "difference": changes}
        self._write_message(
            {
                **told,
                "now": self._preview_as_json(found),
                "before": self._preview_as_json(self._find_preview_before_save(found, before) if saved else None),
            }
        )

    def _find_preview_before_save(self, current: MomentPreview, previous: MomentPreview | None) -> MomentPreview | None:
        """Return the preview of the same position under the code before the last save; ``None`` if a preview has no ``place``."""
        if current.place is None or previous is None or previous.place is None:
            return None
        return (
            previous
            if current.place["address"] == previous.place["address"]
            else self._watched.preview_old_code(current.place["address"])
        )

    def _answer_request(self, request: Mapping[str, Any]) -> None:
        """Send the next model request, or the previews of another position, with the id of the request."""
        try:
            if request["do"] == "next":
                told = attrs.asdict(self._watched.reload_and_find_next_request())
            else:
                found, old = self._watched.move_and_preview(str(request.get("at", "")))
                told = {"now": self._preview_as_json(found), "before": self._preview_as_json(old)}
        except StepEngineError as error:
            told = {"refused": self._hide_journal_path(error.message)}
        self._write_message({"id": request["id"], **told})

    def _preview_as_json(self, preview: MomentPreview | None) -> dict[str, Any] | None:
        """Return a preview as JSON, without its summary and the path of the journal; ``None`` unchanged."""
        if preview is None:
            return None
        told = attrs.asdict(preview, recurse=False, filter=lambda one, _: one.name != "summary")
        return {
            **told,
            "problem": self._hide_journal_path(preview.problem),
            "differs": self._hide_journal_path(preview.differs),
        }

    def _hide_journal_path(self, text: str) -> str:
        """Replace the temporary path of the journal in a text by the name of the run."""
        return text.replace(self._file, Path(self._file).stem)


def main() -> None:
    """Read the first message and serve its requests."""
    read_message, write_message = move_stdio_to_json_channel()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    first = wait_for_message(read_message)
    if first is None:
        return
    why = find_os_fork_problem()
    if why:
        write_message({"event": "ended", "problem": f"the debugger cannot start processes here: {why}"})
        return
    preload_engine_libraries()
    try:
        inspector = _RunInspector(write_message, EngineSpec.from_json(first["maker"]), first["file"], first["at"])
    except (StepEngineError, OSError) as error:
        write_message({"event": "ended", "problem": f"the journal cannot be read: {error}"})
        return
    try:
        inspector.serve_requests(read_message)
    except (KeyboardInterrupt, BrokenPipeError):
        pass
    finally:
        inspector.close()


if __name__ == "__main__":
    main()
