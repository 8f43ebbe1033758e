"""
Record and replay a program, with a ``Broker``: it holds the cassette, and answers the processes of the program over a Unix socket.

The broker runs in the process that starts the program. Each question is one connection and one line of JSON in each direction.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socketserver
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import attrs

from stepengine.errors import DataError, DefinitionError
from stepengine.redaction import make_redactor
from stepengine.testing.cassette import Cassette, Slot, UnrecordedReply
from stepengine.testing.cassette_files import CASSETTE_FILE, parse_cassette, parse_extras, read_cassette_bytes
from stepengine.testing.cassette_matching import find_mark_key
from stepengine.testing.cassette_misses import CassetteMiss
from stepengine.testing.placeholders import list_hosts, make_replay_variables
from stepengine.testing.processes import bootstrap, channel
from stepengine.testing.processes.child_commands import find_uncovered_reason
from stepengine.testing.processes.doctor import ObservedRun, RequestDifference, find_differing_requests
from stepengine.testing.processes.forms import interaction_from_json, interaction_to_json, request_from_json
from stepengine.testing.processes.frozen import KINDS
from stepengine.testing.processes.frozen_values import FrozenValues

BACKLOG = 128
SIGNALLED = 128
GRACE_SECONDS = 10
"""How long a program may run on behind a request that is not in its cassette."""


@attrs.define(eq=False)
class ProgramRun:
    """
    What a program did that was recorded or replayed.

    Attributes:
        cassette: What was recorded or played.
        exit_code: The exit code of the program; 128 plus the number of the signal that ended it.
        processes: The command line of each Python process that was covered.
        blocked: Messages of connections that were blocked.
        uncovered: The command line of each Python process whose requests were neither recorded nor replayed, with the reason.
        ended: Whether the program was ended, since it did not end by itself after a request that is not in the cassette.
        lost: The number of requests whose process ended before their reply was complete.
        saved: Whether the cassette was written.
        requests: How many requests each of two replays sent.
        differences: The requests that differ between two replays, with the calls of clocks, random functions and the like before them.
    """

    cassette: Cassette
    exit_code: int = 0
    processes: list[str] = attrs.field(factory=list)
    blocked: list[str] = attrs.field(factory=list)
    uncovered: list[str] = attrs.field(factory=list)
    ended: bool = False
    lost: int = 0
    saved: bool = False
    requests: Sequence[int] = ()
    differences: Sequence[RequestDifference] = ()


class Broker(AbstractContextManager["Broker"]):
    """
    Serves the cassette to the processes of one program while its block runs.

    Args:
        cassette: What is played, or what is recorded into.
        replays: Whether it plays.
        allowed: Hosts that the program may reach while it replays.
        frozen: Values of the clock and of random functions; None leaves these functions alone.
        observed: Stores requests and calls, and answers missed requests with the nearest reply; None does neither.

    Attributes:
        run: What the processes did; the starter of the program sets its exit code.
    """

    def __init__(
        self,
        cassette: Cassette,
        *,
        replays: bool,
        allowed: Iterable[str] = (),
        frozen: FrozenValues | None,
        observed: ObservedRun | None = None,
    ) -> None:
        self.run = ProgramRun(cassette)
        self._replays = replays
        self._allowed = [*allowed]
        self._frozen = frozen
        self._observed = observed
        self._slots: list[Slot] = []
        self._ended: set[int | None] = set()
        self._missed_at: float | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        self._folder = TemporaryDirectory(prefix="stepengine-")
        try:
            self._write_site_folder()
            self._server = _BrokerServer(self._socket_path, self)
        except BaseException:
            self._folder.cleanup()
            raise
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self._folder.cleanup()
        self.run.lost = len({*range(len(self._slots))} - self._ended)

    def has_missed_request_since(self, seconds_ago: float) -> bool:
        """Return True if the first missed request was at least *seconds_ago*."""
        return self._missed_at is not None and time.monotonic() - self._missed_at >= seconds_ago

    @property
    def site_folder(self) -> str:
        """The folder for ``PYTHONPATH`` that makes a Python process record or replay."""
        return str(Path(self._folder.name) / "site")

    @property
    def _socket_path(self) -> str:
        return str(Path(self._folder.name) / "s")

    def _write_site_folder(self) -> None:
        """Write the ``sitecustomize`` module that makes a Python process record or replay."""
        folder = Path(self.site_folder)
        folder.mkdir()
        source = bootstrap.SITE.format(path=bootstrap.__file__, folder=self.site_folder)
        (folder / "sitecustomize.py").write_text(source, encoding="utf-8")

    def make_environment(self, before: dict[str, str]) -> dict[str, str]:
        """Return a copy of *before* with the variables that make a Python process record or replay."""
        rest = [before["PYTHONPATH"]] if before.get("PYTHONPATH") else []
        return {
            **before,
            "PYTHONPATH": os.pathsep.join([self.site_folder, *rest]),
            channel.VARIABLE: f"{'replay' if self._replays else 'record'}:{self._socket_path}",
        }

    # --- answers ------------------------------------------------------------------------------------------------------------

    def execute_operation(self, message: dict[str, Any]) -> dict[str, Any]:
        """Execute the operation in a *message* of a process, and return the reply."""
        operations: dict[str, Callable[[dict[str, Any]], dict[str, Any] | None]] = {
            "hello": self._register_process, "take": self._consume_interaction_or_make_miss, "reserve": self._reserve_slot, "finish": self._finish_slot, "times": self._store_frozen_times,
            "has_transport": lambda asked: {"known": self.run.cassette.has_replies_of_transport(asked["name"])},
            "leave_out": self._store_unrecorded_reply,
            "blocked": lambda told: self.run.blocked.append(told["message"]), "uncovered": self._record_uncovered,
            "source": self._store_observed_source,
        }  # fmt: skip
        return operations[message["operation"]](message) or {}

    def _register_process(self, message: dict[str, Any]) -> dict[str, Any]:
        """Record the command of a process that has started, and return its allowed hosts and frozen values."""
        with self._lock:
            self.run.processes.append(shlex.join(message["command"]))
        frozen = None if self._frozen is None else self._frozen.register_process(message["command"])
        return {"allowed": self._allowed, "frozen": frozen, "observes": self._observed is not None}

    def _store_frozen_times(self, message: dict[str, Any]) -> None:
        """Store clock values that a process recorded, unless nothing is frozen."""
        if self._frozen is not None:
            self._frozen.add_times(message["process"], message["values"])

    def _store_observed_source(self, message: dict[str, Any]) -> None:
        """Store a call of a nondeterministic function, if the run is observed."""
        if self._observed is not None:
            self._observed.add_source(message["name"], message["line"])

    def _consume_interaction_or_make_miss(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return the recorded interaction of a request, or its miss; in an observed run the nearest interaction replaces a miss."""
        request = request_from_json(message["request"])
        if self._observed is not None:
            self._observed.add_request(request, message["line"] or "")
        try:
            found = self.run.cassette.consume(request)
        except CassetteMiss as miss:
            nearest = (
                None if self._observed is None else self._observed.pop_nearest_interaction(self.run.cassette, miss)
            )
            if nearest is not None:
                return {"interaction": interaction_to_json(nearest)}
            self._missed_at = self._missed_at or time.monotonic()
            return {"miss": str(miss), "reason": miss.reason}
        return {"interaction": interaction_to_json(found)}

    def _reserve_slot(self, message: dict[str, Any]) -> dict[str, Any]:
        """Reserve the next position of the cassette for a request, and return its number."""
        with self._lock:
            self._slots.append(self.run.cassette.reserve(message["secrets"]))
            return {"slot": len(self._slots) - 1}

    def _finish_slot(self, message: dict[str, Any]) -> None:
        """Store a recorded interaction at its reserved position."""
        self.run.cassette.finish(self._slots[message["slot"]], interaction_from_json(message["interaction"]))
        with self._lock:
            self._ended.add(message["slot"])

    def _store_unrecorded_reply(self, message: dict[str, Any]) -> None:
        """Store a reply that is not recorded; its request has ended if it had a reserved position."""
        self.run.cassette.store_unrecorded_reply(UnrecordedReply(**message["left"]))
        with self._lock:
            self._ended.add(message["slot"])

    def _record_uncovered(self, message: dict[str, Any]) -> None:
        """Store the command and the reason of a process that is neither recorded nor replayed, once."""
        found = f"{shlex.join(message['command'])} ({message['reason']})"
        with self._lock:
            if found not in self.run.uncovered:
                self.run.uncovered.append(found)


class _BrokerServer(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    request_queue_size = BACKLOG

    def __init__(self, path: str, broker: Broker) -> None:
        super().__init__(path, _Handler)
        self.broker = broker


class _Handler(socketserver.StreamRequestHandler):
    server: _BrokerServer

    def handle(self) -> None:
        """Read one message of a process, execute its operation, and send the reply."""
        question = json.loads(self.rfile.readline() or b"null")
        if question is not None:
            self.wfile.write(json.dumps(self.server.broker.execute_operation(question)).encode() + b"\n")

    def finish(self) -> None:
        """Close the connection; ignore that the process has ended."""
        try:
            super().finish()
        except OSError:  # the process ended before it read the answer
            return


# --- programs -------------------------------------------------------------------------------------------------------------------


def record_program(path: Path | str, command: Sequence[str], *, freeze: Iterable[str] = ()) -> ProgramRun:
    """
    Run a program to its end, and record the HTTP traffic of its Python processes in the cassette at *path*.

    No file is written if nothing was recorded. An existing file does not change if the program fails.

    Args:
        path: The cassette.
        command: The program and its arguments.
        freeze: Values that replays repeat, some of ``"time"``, ``"random"`` and ``"uuid"``.

    Raises:
        DefinitionError: when there is no such program, its processes cannot be covered, or *freeze* has an unknown word.
        DataError: when the file is not a cassette.
        SecretFound: when a secret is left in the recording.
    """
    kinds = [*freeze]
    if unknown := {*kinds}.difference(KINDS):
        msg = f"freeze has the unknown value {min(unknown)!r}; valid values: {', '.join(KINDS)}"
        raise DefinitionError(msg)
    _check_command(command)
    CASSETTE_FILE.check(path)  # before the program, whose recording would be lost
    existed = Path(path).exists()
    frozen = FrozenValues(kinds) if kinds else None
    key = find_mark_key(parse_cassette(read_cassette_bytes(path), str(path))) if existed else None
    cassette = Cassette(path=path, mark_key=key or None, redactor=make_redactor("all", os.environ))
    with Broker(cassette, replays=False, frozen=frozen) as broker:
        _run_program(broker, command, {})
    run, cassette = broker.run, broker.run.cassette
    if cassette.complete_interactions and not (run.exit_code and existed):
        if frozen is not None:
            cassette.extras = frozen.to_extras()
        cassette.save()
        run.saved = True
    return run


def replay_program(
    path: Path | str, command: Sequence[str], *, allow_hosts: Collection[str] = (), twice: bool = False
) -> ProgramRun:
    """
    Run a program to its end on the replies of a cassette, without network; keys in its environment are placeholders.

    ``cassette.misses`` and ``blocked`` of the result have what the recording does not, ``cassette.unused`` what was not played.

    Args:
        path: The cassette.
        command: The program and its arguments.
        allow_hosts: Hosts that the program may reach, such as that of a database.
        twice: Run the program a second time with other hashes of texts, and compare the requests. The nearest recorded reply
            answers a request that is missing.

    Raises:
        DefinitionError: when there is no such program, or its processes cannot be covered.
        DataError: when there is no such file, or it is not a cassette.
    """
    _check_command(command)
    hint = f"stepengine cassette record {shlex.quote(str(path))} -- {shlex.join(command)}"
    if not Path(path).is_file():
        msg = f"there is no cassette {str(path)!r}. To record it:\n  {hint}"
        raise DataError(msg)
    observed = [ObservedRun(), ObservedRun()] if twice else []
    runs: list[ProgramRun] = []
    for number, one in enumerate(observed or [None], 1):
        cassette = Cassette.load(path, hint=hint, redactor=make_redactor("all", os.environ))
        changes = make_replay_variables(os.environ, list_hosts([i.request.url for i in cassette.interactions]))
        if twice:
            changes["PYTHONHASHSEED"] = str(number)
        frozen = FrozenValues.from_extras(parse_extras(read_cassette_bytes(path), str(path)), str(path))
        with Broker(cassette, replays=True, allowed=allow_hosts, frozen=frozen, observed=one) as broker:
            _run_program(broker, command, changes)
        runs.append(broker.run)
    if twice:
        runs[-1].requests = [len(one.requests) for one in observed]
        runs[-1].differences = [*find_differing_requests(*observed)]
    return runs[-1]


def _check_command(command: Sequence[str]) -> None:
    """Raise ``DefinitionError`` if the command cannot be recorded, or its program does not exist."""
    reason = find_uncovered_reason(command, None, "")
    if reason is not None:
        msg = f"{shlex.join(command)} cannot be recorded or replayed: {reason}. Start it without this option"
        raise DefinitionError(msg)
    if shutil.which(command[0]) is None:
        msg = f"there is no program {command[0]!r}. Write the command as in a shell: stepengine cassette record FILE -- python agent.py"
        raise DefinitionError(msg)


def _wait_for_or_end_program(process: subprocess.Popen[bytes], broker: Broker) -> int:
    """Wait for the program and return its exit code; end the program if it does not end after a missed request."""
    while True:
        try:
            return process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            if not broker.has_missed_request_since(GRACE_SECONDS):
                continue
        broker.run.ended = True
        process.terminate()
        try:
            return process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()


def _run_program(broker: Broker, command: Sequence[str], changes: Mapping[str, str | None]) -> None:
    """Run the program to its end with *changes* to the environment, and store its exit code."""
    before = {}
    variables = {name: value for name, value in {**os.environ, **changes}.items() if value is not None}
    is_main = threading.current_thread() is threading.main_thread()  # no other thread may set handlers
    # Ctrl-C reaches the program by its terminal. A handler, not SIG_IGN, which the program would inherit.
    if is_main:
        before[signal.SIGINT] = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        with subprocess.Popen(command, env=broker.make_environment(variables)) as process:  # noqa: S603 - the caller's command
            if is_main:
                before[signal.SIGTERM] = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
            code = _wait_for_or_end_program(process, broker)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    broker.run.exit_code = SIGNALLED - code if code < 0 else code
