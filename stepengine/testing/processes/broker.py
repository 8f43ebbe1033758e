"""
``Broker``: holds the cassette of a program, and answers the processes of the program over a Unix socket.

It runs in the process of the command. Each question is one connection and one line of JSON in each direction.
"""

from __future__ import annotations

import json
import os
import socketserver
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Self

from attrs import frozen

from stepengine.testing.cassette import Cassette, CassetteMiss, LeftOut, Slot
from stepengine.testing.processes import bootstrap, channel
from stepengine.testing.processes.doctor import ObservedRun
from stepengine.testing.processes.forms import interaction_from_json, interaction_to_json, request_from_json
from stepengine.testing.processes.frozen_values import FrozenValues

__all__ = ("Broker", "Uncovered")

BACKLOG = 128


@frozen
class Uncovered:
    """
    A Python process that was neither recorded nor replayed.

    Attributes:
        command: Its words.
        reason: Why not.
    """

    command: tuple[str, ...]
    reason: str


class Broker(AbstractContextManager["Broker"]):
    """
    Serves one program for as long as its block lasts.

    Args:
        cassette: What is played, or what is recorded into.
        replays: Whether it plays.
        allowed: Hosts that the program may reach while it replays.
        frozen: Values of the clock and of random functions; None leaves these functions alone.
        observed: Stores requests and calls, and answers missed requests with the nearest reply; None does neither.

    Attributes:
        cassette: As given.
        processes: The process id and command of each Python process that was covered.
        blocked: Messages of connections that were blocked.
        uncovered: Python processes that were not covered.
        exit_code: The exit code of the program, set by its starter.
    """

    def __init__(
        self,
        cassette: Cassette,
        *,
        replays: bool,
        allowed: Iterable[str] = (),
        frozen: FrozenValues | None = None,
        observed: ObservedRun | None = None,
    ) -> None:
        self.cassette = cassette
        self.processes: list[tuple[int, tuple[str, ...]]] = []
        self.blocked: list[str] = []
        self.uncovered: list[Uncovered] = []
        self.exit_code = 0
        self._replays = replays
        self._allowed = [*allowed]
        self._frozen = frozen
        self._observed = observed
        self._slots: list[Slot] = []
        self._finished = 0
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        self._folder = TemporaryDirectory(prefix="stepengine-")
        try:
            self._write_site()
            self._server = _Server(self._socket, self)
        except BaseException:
            self._folder.cleanup()
            raise
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self._folder.cleanup()

    @property
    def site(self) -> str:
        """The entry of ``PYTHONPATH`` that covers a Python process."""
        return str(Path(self._folder.name) / "site")

    @property
    def _socket(self) -> str:
        return str(Path(self._folder.name) / "s")

    def _write_site(self) -> None:
        folder = Path(self.site)
        folder.mkdir()
        source = bootstrap.SITE.format(path=bootstrap.__file__, folder=self.site)
        (folder / "sitecustomize.py").write_text(source, encoding="utf-8")

    def environment(self, before: dict[str, str]) -> dict[str, str]:
        """Return the environment *before* with the variables that cover a Python process."""
        rest = [before["PYTHONPATH"]] if before.get("PYTHONPATH") else []
        return {
            **before,
            "PYTHONPATH": os.pathsep.join([self.site, *rest]),
            channel.VARIABLE: f"{'replay' if self._replays else 'record'}:{self._socket}",
        }

    @property
    def lost(self) -> int:
        """How many requests were started whose process ended before their reply did."""
        return max(0, len(self._slots) - self._finished - len(self.cassette.left_out))

    # --- answers ------------------------------------------------------------------------------------------------------------

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """Answer a question of a process."""
        operations: dict[str, Callable[[dict[str, Any]], dict[str, Any] | None]] = {
            "hello": self._hello, "take": self._take, "reserve": self._reserve, "finish": self._finish, "times": self._add_times,
            "leave_out": lambda told: self.cassette.leave_out(LeftOut(**told["left"])),
            "blocked": lambda told: self.blocked.append(told["message"]), "uncovered": self._note_uncovered,
            "source": self._add_source,
        }  # fmt: skip
        return operations[question["operation"]](question) or {}

    def _hello(self, question: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            self.processes.append((question["pid"], tuple(question["command"])))
        frozen = None if self._frozen is None else self._frozen.start_process(question["command"])
        return {"allowed": self._allowed, "frozen": frozen, "observes": self._observed is not None}

    def _add_times(self, question: dict[str, Any]) -> None:
        if self._frozen is not None:
            self._frozen.add_times(question["process"], question["values"])

    def _add_source(self, question: dict[str, Any]) -> None:
        if self._observed is not None:
            self._observed.add_source(question["name"], question["line"])

    def _take(self, question: dict[str, Any]) -> dict[str, Any]:
        request = request_from_json(question["request"])
        if self._observed is not None:
            self._observed.add_request(request, question["line"] or "")
        try:
            found = self.cassette.take(request)
        except CassetteMiss as miss:
            nearest = None if self._observed is None else self._observed.find_nearest(self.cassette, miss)
            if nearest is not None:
                return {"interaction": interaction_to_json(nearest)}
            return {"miss": str(miss), "reason": miss.reason}
        return {"interaction": interaction_to_json(found)}

    def _reserve(self, question: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            self._slots.append(self.cassette.reserve(question["secrets"]))
            return {"slot": len(self._slots) - 1}

    def _finish(self, question: dict[str, Any]) -> None:
        self.cassette.finish(self._slots[question["slot"]], interaction_from_json(question["interaction"]))
        with self._lock:
            self._finished += 1

    def _note_uncovered(self, question: dict[str, Any]) -> None:
        found = Uncovered(tuple(question["command"]), question["reason"])
        with self._lock:
            if found not in self.uncovered:
                self.uncovered.append(found)


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    request_queue_size = BACKLOG

    def __init__(self, path: str, broker: Broker) -> None:
        super().__init__(path, _Handler)
        self.broker = broker


class _Handler(socketserver.StreamRequestHandler):
    server: _Server

    def handle(self) -> None:
        question = json.loads(self.rfile.readline() or b"null")
        if question is not None:
            self.wfile.write(json.dumps(self.server.broker.answer(question)).encode() + b"\n")

    def finish(self) -> None:
        try:
            super().finish()
        except OSError:  # the process ended before it read the answer
            return
