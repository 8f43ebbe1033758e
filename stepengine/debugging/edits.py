"""
``Walker``: replays a recorded run under the current code; ``WatchedMoment``: previews one position of it after every save.

An author who edits a handler sees what the edit does to a recorded run. After every save the run is replayed in a new process. It
is forked from a process that holds the record and has never imported the author's code. The new process compiles the sources,
moves to the position, and returns previews of it and of others. An endless loop is killed, ``os._exit`` ends only that
process, and no module has to be unloaded. Tools, models and the network are out of reach.

The model's replies are those of the record, even if the request is another one now. Otherwise the first changed prompt would end
every preview.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import json
import os
import select
import signal
import site
import socket
import sys
import sysconfig
import tempfile
import time
import traceback
import warnings
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never

import attrs
from attrs import frozen

from stepengine.data.codec import plain, to_json
from stepengine.data.effects import KINDS
from stepengine.data.json import find_first_difference
from stepengine.data.messages import JsonPart, ToolResult
from stepengine.data.models import ModelReply, ModelRequest
from stepengine.data.outcomes import Failure
from stepengine.data.questions import Answer
from stepengine.data.visible import cut_after
from stepengine.debugging.debugger import (
    BEFORE_DIFFERENCE,
    Debugger,
    diff_summaries,
    format_message,
    iterate_source_lines_around,
    summarize_moment,
)
from stepengine.debugging.expressions import refuse_network
from stepengine.debugging.texts import WIDTH, SafeTexts
from stepengine.debugging.walks import PausedWalk
from stepengine.engine.loader import BrokenFile
from stepengine.engine.tape import Tape
from stepengine.errors import AgentError, JournalError, ModelError, ReplayDivergence, StepEngineError
from stepengine.journal import Journal, SharedBudget
from stepengine.journal.recorded_part import AllowedDifferences
from stepengine.journal.records import ROOT
from stepengine.models import ModelDelta, Provider
from stepengine.redaction import remove_secret_variables
from stepengine.runtime.limits import CallEstimate, MeteredCall

if TYPE_CHECKING:
    from stepengine.engine import Engine
    from stepengine.engine.moments import Moment
    from stepengine.engine.options import AgentLike

LOOK_SECONDS = 5.0
"""Seconds of CPU time, since on a busy machine the same replay takes several times as long by the clock."""
WAITING_SECONDS = 20.0
"""Seconds until code that does not answer counts as waiting; on a busy machine a second of CPU time takes several."""
MOST = 4 * 1024 * 1024
"""The most bytes of a reply: variables and descriptions of tools are cut, but there may be many."""
SETTLED = 0.02
"""Seconds after which an editor that writes a file in two steps is done."""
MESSAGES = 60
CHARS = 4_000
EDITABLE = 64 * 1024
"""The most characters of an outcome that is offered for editing; a longer one is left out, since a part would be taken for the whole."""
PIECE = 64 * 1024
Load = Callable[[], tuple["Engine", "AgentLike | None"]]
Stamps = Mapping[str, tuple[int, int, int]]
AROUND = 3
_INSTALLED = [sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
LIBRARIES = frozenset(
    str(Path(path).resolve())
    for path in [*_INSTALLED, *site.getsitepackages(), site.getusersitepackages(), str(Path(__file__).parents[1])]
)
"""The folders of modules alone: the folder of an environment or of the whole installation may hold the author's code, too."""


@frozen(kw_only=True)
class MomentPreview:
    """
    The state of a run at one position under the current code.

    Attributes:
        place: The position, as ``Debugger.to_dict`` returns it; ``None`` if the code could not be loaded or started.
        summary: The values that ``diff_summaries`` compares, from ``summarize_moment``.
        lines: The source around the line that waits: numbers and texts.
        problem: Why *place* is ``None``: the error of loading, or the reason why the process ended; ``""`` if the first effect differs.
        differs: How the replay differs from the record, here or later; ``""`` if no effect differs.
        differs_at: The address of the first effect that differs.
        ends: The recorded end of the run and its end under this code, as cut texts that differ; empty if the ends are equal.
        is_before: Whether this is the last position before the requested one, because the replay differs in between.
        changed: The addresses of model requests that differ, and were answered with the recorded replies.
        files: The author's files that were imported, or that an error names.
        whole: More data of the position, if requested; see ``_position_details_to_json``.
    """

    place: Mapping[str, Any] | None = None
    summary: Mapping[str, Any] | None = None
    lines: tuple[tuple[int, str], ...] = ()
    problem: str = ""
    differs: str = ""
    differs_at: str = ""
    ends: tuple[str, ...] = ()
    is_before: bool = False
    changed: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    whole: Mapping[str, Any] | None = None


@frozen(kw_only=True)
class NextRequest:
    """
    The first model request under the current code that the record does not answer.

    Attributes:
        address: The first effect that differs from the record; ``""`` if there is no request.
        request: The request, in the form of ``MomentPreview.whole``.
        price: The highest possible cost of the call in US dollars; ``None`` if it is unknown.
        served: The number of calls after the first difference that the record answered.
        why: Why there is no request: all requests are recorded, or a call before the next request is not.
    """

    address: str = ""
    request: Mapping[str, Any] | None = None
    price: str | None = None
    served: int = 0
    why: str = ""


class Walker:
    """
    A process that imports the author's current code and replays a recorded run to any of its positions.

    Args:
        load: Loads the author's code, and returns an engine and the agent of the run. Only that process calls it.
        tape: The run.
        prints: Whether the output of the code is shown, on standard error.

    Attributes:
        is_alive: Whether the process accepts requests; ``False`` once it was closed, its code ended it, or it took too long.

    Raises:
        OSError: when no process can be created.
    """

    def __init__(self, load: Load, tape: Tape, *, prints: bool = False) -> None:
        # A garbage collection in either process would copy the shared pages, so shared objects are frozen.
        gc.collect()
        gc.freeze()
        known = frozenset(sys.modules)
        sys.stdout.flush()
        sys.stderr.flush()
        self._own, theirs = socket.socketpair()
        self._pid = os.fork()
        if self._pid == 0:
            self._own.close()
            _WalkerProcess(load, tape, known, prints=prints).serve_and_exit(theirs)
        theirs.close()
        self.is_alive = True

    def preview_position(
        self, at: str = "", *, seconds: float = LOOK_SECONDS, with_details: bool = False
    ) -> MomentPreview:
        """
        Return a preview of a position; the first one of a process also replays the run to its end.

        Args:
            at: The position, as for ``Debugger.goto``; ``""`` is the start.
            seconds: The CPU time that it may take, in seconds.
            with_details: Whether the preview has ``MomentPreview.whole``.

        Raises:
            JournalError: when the run has no such position.
        """
        told = self._send_request({"do": "look", "at": at, "with_details": with_details}, seconds)
        if isinstance(told, str):
            return MomentPreview(problem=told)
        lines = tuple(map(tuple, told["lines"]))
        return MomentPreview(
            **{**told, **{name: tuple(told[name]) for name in ("changed", "files", "ends")}, "lines": lines}
        )

    def replay_to_next_request(self) -> NextRequest:
        """Replay to the first model request that the record does not answer; return the request, or why none exists."""
        told = self._send_request({"do": "next"}, LOOK_SECONDS)
        return NextRequest(why=told) if isinstance(told, str) else NextRequest(**told)

    def _send_request(self, request: Mapping[str, Any], seconds: float) -> dict[str, Any] | str:
        """Send the process a request and return its reply, a text if that is too long; without a reply, close the process and return the reason."""
        if not self.is_alive:
            return "the agent's code ended the process"
        try:
            self._own.sendall(json.dumps({**request, "seconds": seconds}).encode() + b"\n")
            said = _read_line_until(self._own, time.monotonic() + WAITING_SECONDS)
        except OSError:
            said = b""
        if not said:
            ended_by = self.close()
            if said is None:
                return f"the process was stopped after {WAITING_SECONDS:g} s: does the agent's code wait for something?"
            if ended_by == signal.SIGPROF:
                return f"the process was stopped after {seconds:g} s of CPU time: does the agent's code have an endless loop?"
            return "the agent's code ended the process"
        told: dict[str, Any] | str = json.loads(said)
        if isinstance(told, dict) and "no_place" in told:
            raise JournalError(told["no_place"])
        return told

    def close(self) -> int:
        """End the process and its children, and return the signal that ended it; 0 if none did. May be called twice."""
        if not self.is_alive:
            return 0
        self.is_alive = False
        for end in (os.killpg, os.kill):
            with contextlib.suppress(OSError):
                end(self._pid, signal.SIGKILL)
        _, status = os.waitpid(self._pid, 0)
        self._own.close()
        return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def _read_line_until(connection: socket.socket, deadline: float) -> bytes | None:
    """Return a line from a socket: ``b""`` if the socket closes first or the line is too long, ``None`` after the deadline."""
    said = bytearray()
    while not said.endswith(b"\n"):
        ready, _, _ = select.select([connection], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return None
        part = connection.recv(PIECE)
        if not part or len(said) > MOST:
            return b""
        said += part
    return bytes(said)


class _WalkerProcess:
    """The main loop of a ``Walker`` process. It loads the code at the first request."""

    def __init__(self, load: Load, tape: Tape, known: frozenset[str], *, prints: bool) -> None:
        self._load = load
        self._tape = tape
        self._known = known
        self._prints = prints
        self._debugger: Debugger | None = None

    def serve_and_exit(self, connection: socket.socket) -> Never:
        """Isolate this process, answer the requests on the connection until it is closed, and exit the process."""
        try:
            os.setpgid(0, 0)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGPROF):
                signal.signal(number, signal.SIG_DFL)
            disable_bytecode()
            _remove_secret_variables()
            for name in ("connect", "connect_ex", "sendto", "bind"):
                setattr(socket.socket, name, refuse_network)
            with (
                connection.makefile("rb") as asked,
                contextlib.redirect_stdout(sys.stderr if self._prints else io.StringIO()),
            ):
                for line in asked:
                    what = json.loads(line)
                    # The parent process may have ended: then only these timers end an endless loop.
                    signal.setitimer(signal.ITIMER_PROF, what["seconds"])
                    signal.setitimer(signal.ITIMER_REAL, WAITING_SECONDS + 1)
                    said = json.dumps(self._reply_to_request(what)).encode()
                    signal.setitimer(signal.ITIMER_PROF, 0)
                    signal.setitimer(signal.ITIMER_REAL, 0)
                    if len(said) >= MOST:
                        said = json.dumps(f"there is too much to show: more than {MOST:,} bytes").encode()
                    connection.sendall(said + b"\n")
        finally:
            os._exit(0)

    def _reply_to_request(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the reply to one request as JSON; an error of the author's code becomes a text in it."""
        try:
            if request["do"] == "next":
                with add_broken_files_to_error():
                    return attrs.asdict(asyncio.run(self._load_and_replay_to_next_request()))
            go = self._load_code_and_preview if self._debugger is None else self._preview_with_loaded_code
            with add_broken_files_to_error():
                found = go(request["at"], with_details=request["with_details"])
        except _MissingPlace as error:
            return {"no_place": str(error)}
        except BaseException as error:  # noqa: BLE001 - any error of the author's code becomes a text
            said = SafeTexts().clean(format_error_without_advice(error), CHARS)
            if request["do"] == "next":
                return attrs.asdict(NextRequest(why=said))
            found = MomentPreview(problem=said, files=tuple([file for file, _ in iterate_author_locations(error)]))
        files = sorted({*found.files, *find_author_files_imported_since(self._known)})
        return attrs.asdict(attrs.evolve(found, files=tuple(files)), recurse=False)

    async def _load_and_replay_to_next_request(self) -> NextRequest:
        """Load the code and replay to the first model request that the record does not answer; return it, or why there is none."""
        engine, agent = self._load()
        async with engine:
            return await replay_to_next_request(engine, self._tape.journal, agent)

    def _load_code_and_preview(self, at: str, *, with_details: bool) -> MomentPreview:
        """
        Load the code, replay the whole run with it, and return the preview at *at*.

        If the replay differs before *at*, the preview is of the last position before the difference. *with_details* adds
        ``MomentPreview.whole``.
        """
        engine, agent = self._load()
        try:
            stepper = engine.stepper(self._tape, agent=agent, leeway=AllowedDifferences(keeps_replies=True))
        except ReplayDivergence as error:  # its first effect differs, so there is no position
            return _with_divergence(MomentPreview(is_before=True), error)
        debugger = Debugger(engine, PausedWalk(stepper), agent)
        position = _get_position(debugger, at)
        found: MomentPreview | None = None
        differs: ReplayDivergence | None = None
        try:
            stepper.advance_to(position)
            found = _preview_current_position(debugger, is_before=False, with_details=with_details)
            stepper.advance_to(stepper.tape.last_position)
        except ReplayDivergence as error:
            differs = error
        # Later steppers do not compare effects again, so only the first one has the accepted changes.
        changed = tuple(dict.fromkeys(stepper.accepted_addresses))
        ends = _describe_changed_end(debugger) if differs is None else ()
        if found is None:
            found = _move_and_preview(debugger, position, with_details=with_details)
        self._debugger, self._course = debugger, (differs, changed, ends)
        return self._with_first_replay_results(found)

    def _preview_with_loaded_code(self, at: str, *, with_details: bool) -> MomentPreview:
        """Move to a position with the loaded code; return its preview, or the preview of the last position before a difference."""
        debugger = self._debugger
        assert debugger is not None  # noqa: S101 - the first preview creates it
        return self._with_first_replay_results(
            _move_and_preview(debugger, _get_position(debugger, at), with_details=with_details)
        )

    def _with_first_replay_results(self, preview: MomentPreview) -> MomentPreview:
        """Return a preview with the divergence, the changed requests and the changed end that the first replay found."""
        differs, changed, ends = self._course
        return attrs.evolve(_with_divergence(preview, differs), changed=changed, ends=ends)


def _get_position(debugger: Debugger, at: str) -> int:
    """Return the number of a position; 0 for ``""``. A missing position raises ``_MissingPlace``."""
    try:
        return debugger.places.get_position(at) if at else 0
    except JournalError as error:
        raise _MissingPlace(error.message) from None


def disable_bytecode() -> None:
    """
    Stop Python from reading and writing bytecode, which it matches by second and size only.

    Otherwise two saves within a second that do not change the size would show the old code.
    """
    sys.dont_write_bytecode = True
    sys.pycache_prefix = tempfile.gettempdir() + "/none-" + os.urandom(8).hex()


def _remove_secret_variables() -> None:
    """Remove variables with names of secrets from the environment of this process, since replayed code needs none."""
    for name in os.environ.keys() - remove_secret_variables(os.environ).keys():
        del os.environ[name]


class _MissingPlace(Exception):
    """The run has no such position."""


def _with_divergence(preview: MomentPreview, differs: ReplayDivergence | None) -> MomentPreview:
    """Return a preview with the text and address of a divergence; unchanged if it is ``None``."""
    if differs is None:
        return preview
    # The rest of the message explains how to resume the run, which does not help in the middle of an edit.
    said = format_error_without_advice(differs).partition("\n  cause looks like:")[0]
    return attrs.evolve(preview, differs=SafeTexts().clean(said), differs_at=differs.address)


def _describe_changed_end(debugger: Debugger) -> tuple[str, ...]:
    """
    Return the recorded and the current end as two texts; empty if the ends are equal or one is missing.

    Texts are cut after 200 characters. If they differ only after that, they start shortly before the first difference.
    """
    stepper, texts = debugger.stepper, debugger.texts
    known = stepper.tape.history.results.get(ROOT)
    was = None if known is None else getattr(stepper.tape.history.outcome(known), "value", None)
    if was is None or stepper.finished is None:
        return ()
    ends = (was, stepper.finished)
    old, new = [_describe_end(ended, texts.clean(json.dumps(plain(ended.output))), texts, None) for ended in ends]
    if old == new:
        return ()
    told = tuple([_describe_end(ended, texts.format_value(ended.output), texts, CHARS) for ended in ends])
    if told[0] != told[1]:
        return told
    start = max(0, find_first_difference(old, new) - BEFORE_DIFFERENCE)
    return tuple([f"{was.status.value}: ...{cut_after(text[start:], WIDTH)}" for text in (old, new)])


def _describe_end(ended: Any, output: str, texts: SafeTexts, limit: int | None) -> str:
    """Return the status of an ended run with its *output* as text, or with its error if it has no output."""
    is_output = ended.output is not None or ended.error is None
    return f"{ended.status.value}: {output if is_output else texts.clean(str(ended.error), limit)}"


def _move_and_preview(debugger: Debugger, position: int, *, with_details: bool) -> MomentPreview:
    """Move to a position, and preview it or the last one before a difference; if there is none, the preview has no ``place``."""
    try:
        debugger.move_to(position)
    except ReplayDivergence as error:
        if debugger.stepper.diverged is not None:
            return _with_divergence(MomentPreview(is_before=True), error)
        return _preview_current_position(debugger, is_before=True, with_details=with_details)
    return _preview_current_position(debugger, is_before=False, with_details=with_details)


def _preview_current_position(debugger: Debugger, *, is_before: bool, with_details: bool) -> MomentPreview:
    """Return a preview of the debugger's position; *is_before*: the replay diverges after it."""
    place, moment = debugger.to_dict(), debugger.moment()
    frame = next((frame for frame in moment.frames if frame.kind != "package"), None)
    lines = () if frame is None else iterate_source_lines_around(frame, AROUND)
    return MomentPreview(
        place=place,
        summary=summarize_moment(moment, debugger.texts),
        lines=tuple([(number, debugger.texts.clean(text)) for number, text in lines]),
        is_before=is_before,
        whole=_position_details_to_json(debugger) if with_details else None,
    )


def format_error_without_advice(error: BaseException) -> str:
    """
    Return the message of an error of loading or replaying, without advice; other errors than the engine's with file and line.

    Errors other than the engine's start with file and line in the author's code; see ``find_error_location``.
    """
    if isinstance(error, ReplayDivergence):
        return error.message.partition("\n  to continue")[0]
    if isinstance(error, StepEngineError):
        return error.message
    file, line = find_error_location(error)
    where = f"{file}:{line}: " if file else ""
    return f"{where}{type(error).__name__}: {error}"


def find_error_location(error: BaseException) -> tuple[str, int]:
    """
    Return file and line of the author's code that raised an error; ``""`` and 0 without one.

    An engine's error, and one that no code of the author raised, has the location of its cause or context, if Python shows that.
    """
    places = list(_iterate_own_author_locations(error))
    inner = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if inner is not None and (not places or isinstance(error, StepEngineError)):
        found = find_error_location(inner)
        if found[0]:
            return found
    return places[-1] if places else ("", 0)


@contextlib.contextmanager
def add_broken_files_to_error() -> Iterator[None]:
    """
    Inside the block, a missing agent raises an error that also names the agent files that could not be loaded.

    Raises:
        AgentError: with the names of these files; without such files the original error is raised.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", BrokenFile)
        try:
            yield
        except AgentError as error:
            broken = [str(one.message) for one in caught if issubclass(one.category, BrokenFile)]
            if not broken:
                raise
            msg = "; ".join([*broken, error.message])
            raise AgentError(msg) from error


def iterate_author_locations(error: BaseException | None) -> Iterator[tuple[str, int]]:
    """Yield file and line of the author's frames in an error, innermost last, then those of its causes or contexts."""
    while error is not None:
        yield from _iterate_own_author_locations(error)
        error = error.__cause__ or error.__context__


def _iterate_own_author_locations(error: BaseException) -> Iterator[tuple[str, int]]:
    """Yield file and line of the author's frames in the traceback of one error, without its causes."""
    for frame, line in traceback.walk_tb(error.__traceback__):
        if is_editable_source(frame.f_code.co_filename):
            yield frame.f_code.co_filename, line
    if isinstance(error, SyntaxError) and error.filename and is_editable_source(error.filename):
        yield error.filename, error.lineno or 0


def find_author_files_imported_since(known_modules: Iterable[str]) -> Iterator[str]:
    """Yield the author's files that were imported after *known_modules*."""
    return (file for _, file in find_author_modules_imported_since(known_modules))


def find_author_modules_imported_since(known_modules: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield name and file of the author's modules that were imported after *known_modules*."""
    before = frozenset(known_modules)
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name not in before and isinstance(file, str) and is_editable_source(file):
            yield name, file


def is_editable_source(file: str) -> bool:
    """Return whether a file is an existing Python source outside the folders of installed modules and of this package."""
    if not file.endswith(".py"):
        return False
    path = Path(file).resolve()
    return path.is_file() and not any(path.is_relative_to(folder) for folder in LIBRARIES)


# --- details of a position ------------------------------------------------------------------------------------------


def _position_details_to_json(debugger: Debugger) -> dict[str, Any]:
    """
    Return the state, messages, model request and outcome at the debugger's position, as JSON.

    It has the last 60 messages, and texts are cut after 4,000 characters. The value for an edit is complete or left out.
    """
    moment, texts = debugger.moment(), debugger.texts
    return {
        "state": {
            "messages": _last_messages_to_json(moment.state.message_history, texts),
            "left_out": max(0, len(moment.state.message_history) - MESSAGES),
            "context": {key: texts.format_variable(key, value) for key, value in moment.state.context.items()},
            "output": texts.format_value(moment.state.output),
            "steps_remaining": moment.state.steps_remaining,
        },
        "request": None if moment.request is None else _request_to_json(moment.request, texts),
        "outcome": _outcome_lines(moment, texts),
        **_replaceable_outcome_to_dict(moment, debugger),
    }


def _last_messages_to_json(messages: Any, texts: SafeTexts) -> list[dict[str, str]]:
    """Return role and safe text of the last 60 messages; a text includes the message's tool calls."""
    last = list(messages)[-MESSAGES:]
    return [{"role": str(one.role), "text": texts.clean(format_message(one), CHARS)} for one in last]


def _request_to_json(request: ModelRequest, texts: SafeTexts) -> dict[str, Any]:
    messages = [*request.messages, *request.tail]
    return {
        "model": texts.clean(request.model, CHARS),
        "system": texts.clean(request.system_prompt, 4 * CHARS),
        "tools": [{"name": spec.name, "description": texts.clean(spec.description, CHARS)} for spec in request.tools],
        "settings": texts.format_value(request.settings),
        "messages": _last_messages_to_json(messages, texts),
        "left_out": max(0, len(messages) - MESSAGES),
    }


def _outcome_lines(moment: Moment, texts: SafeTexts) -> list[str]:
    """Return the outcome at a moment as lines of safe text; none without an outcome."""
    if moment.outcome is None:
        return []
    if isinstance(moment.outcome, Failure):
        return [texts.clean(f"{type(moment.outcome.error).__name__}: {moment.outcome.error.message}", CHARS)]
    value = moment.outcome.value
    text = getattr(value, "text", None)
    if isinstance(text, str) and text and not getattr(value, "tool_calls", ()):
        return [texts.clean(text, 4 * CHARS)]
    return texts.format_lines(value)


def _replaceable_outcome_to_dict(moment: Moment, debugger: Debugger) -> dict[str, Any]:
    """Return kind and value of the outcome that a fork may replace here; an error, long or redacted value is ``None``."""
    address = debugger.stepper.tape.find_address_at(moment.position)
    intent = None if address is None else debugger.stepper.tape.history.intents.get(address)
    kind = (
        None
        if intent is None or (intent.starts_child_or_body and intent.type == "tool_call")
        else KINDS[intent.type].replaced_by or None
    )
    if kind is None or moment.outcome is None:
        return {"kind": None, "value": None}
    value = None if isinstance(moment.outcome, Failure) else _outcome_to_editable_value(moment.outcome.value)
    text = json.dumps(value, ensure_ascii=False)
    cleaned = debugger.texts.clean(text)
    # A fork would use the placeholder of a secret, or an escape, as if it were the recorded text.
    return {"kind": kind, "value": value if len(text) <= EDITABLE and cleaned == text else None}


def _outcome_to_editable_value(value: object) -> Any:
    """Convert a recorded outcome to the form that the ``edit`` of a fork accepts; the result can be edited and passed to it."""
    if isinstance(value, ModelReply):
        if not value.tool_calls:
            return value.text
        return {name: said for name, said in to_json(value).items() if name in ("type", "content")}
    if isinstance(value, ToolResult):
        # As text, a list would not have the type that the tool's annotation states.
        only = value.content[0] if len(value.content) == 1 else None
        return plain(only.value) if isinstance(only, JsonPart) else value.text
    if isinstance(value, tuple) and all(isinstance(one, Answer) for one in value):
        return value[0].value if len(value) == 1 else [one.value for one in value]
    return plain(value)


# --- the next request ------------------------------------------------------------------------------------------------


class _RequestCapturingProvider(Provider):
    """A provider that stores the first request and raises an error for every request."""

    name = "overheard"
    default_model = "overheard/default"

    def __init__(self) -> None:
        self.first: ModelRequest | None = None

    def supports_model(self, model: str) -> bool:
        return True

    async def complete(self, request: ModelRequest) -> ModelReply:
        """Raise ``ModelError``; store the request if it is the first."""
        self.first = self.first or request
        msg = "the preview calls no model"
        raise ModelError(msg, kind="overheard", retryable=False)

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelDelta]:
        """Raise ``ModelError`` before the first delta; store the request if it is the first."""
        await self.complete(request)
        yield  # type: ignore[misc]  # never reached; it makes this a stream


class _CostCapturingBudget(SharedBudget):
    """An unlimited budget that stores the highest possible cost of the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.first: Decimal | None = None
        self._was_asked = False

    async def reserve(self, estimate: CallEstimate) -> MeteredCall:
        """Store the highest possible cost of the first call, and reserve it."""
        if not self._was_asked:
            self._was_asked, self.first = True, estimate.cost
        return await super().reserve(estimate)


async def replay_to_next_request(engine: Engine, journal: Journal, agent: AgentLike | None = None) -> NextRequest:
    """Fork a run under the current code without a model call; return the first request without a recorded reply, or why there is none."""
    model, budget = _RequestCapturingProvider(), _CostCapturingBudget()
    with engine.override(models=model):
        made = await engine.fork(journal, tools="recorded", agent=agent, budget=budget)
    if model.first is None:
        return NextRequest(why=_explain_no_request(made), served=made.served)
    return NextRequest(
        address=made.broke_at,
        request=_request_to_json(model.first, SafeTexts()),
        price=None if budget.first is None else str(budget.first),
        served=made.served,
    )


def _explain_no_request(report: Any) -> str:
    """Return why a fork sent no new model request."""
    if report.refused is not None:
        return f"the run does not get there: {report.refused.address} is an unrecorded call of {SafeTexts().clean(report.refused.name, 100)}"
    if not report.broke_at:
        return "the run matches its record, so it sends no new request to a model"
    return f"after {report.broke_at} the run sends no new request to a model"


# --- a watched position --------------------------------------------------------------------------------------------


class WatchedMoment:
    """
    A position of a run that is previewed after each save of a file, together with its preview under the previous code.

    Args:
        load: As for ``Walker``.
        tape: The run.
        at: The position.
        files: Returns files that are watched in addition to the imported ones, for example if the code cannot be loaded at
            first.
        prints: As for ``Walker``.

    Attributes:
        at: The position.
        good: The last preview with a ``place``; ``None`` before the first.
        seconds: The duration of the last preview, in seconds.
    """

    def __init__(
        self, load: Load, tape: Tape, at: str = "", *, files: Callable[[], Iterable[str]] = tuple, prints: bool = False
    ) -> None:
        self.at = at
        self.good: MomentPreview | None = None
        self.seconds = 0.0
        self._seen_at = ""
        self._load = load
        self._tape = tape
        self._beside = files
        self._prints = prints
        self._files: Stamps = {}
        self._now: Walker | None = None
        self._before: Walker | None = None

    def find_saved_files(self) -> list[str]:
        """Return the files that were saved since the last preview; if there are any, wait 0.02 s for an editor that saves in two steps."""
        stamps = _read_file_stamps({*self._files, *self._beside()})
        changed = [file for file, stamp in stamps.items() if stamp != self._files.get(file)]
        if changed:
            time.sleep(SETTLED)
        # Imported modules have absolute paths; the other files may be relative, or links.
        return list(dict.fromkeys(map(os.path.realpath, changed)))

    def reload_and_preview(self, *, with_details: bool = False) -> tuple[MomentPreview, list[str] | None]:
        """
        Load the current code in a new process; return a preview of the position, and its differences to the last one.

        Returns:
            The preview, and its differences to the last preview with a ``place``, one per line. ``None`` instead of the differences
            if that preview was of another position, or one of the two has no summary.

        Raises:
            JournalError: when the run has no such position; *at* is then reset to the previous position.
        """
        began = time.monotonic()
        before = _read_file_stamps({*self._files, *self._beside()})
        walker = Walker(self._load, self._tape, prints=self._prints)
        try:
            found = walker.preview_position(self.at, with_details=with_details)
        except BaseException:
            walker.close()
            self.at = self._seen_at
            raise
        # A file that is saved during a preview is found before the next one.
        self._files = {**_read_file_stamps({*self._files, *found.files}), **before}
        self.seconds = time.monotonic() - began
        said = self._diff_with_last_preview(found)
        if found.place is None:
            walker.close()
        else:
            if self._before is not None:
                self._before.close()
            self._before, self._now = self._now, walker
            self.good, self._seen_at = found, self.at
        return found, said

    def move_and_preview(self, at: str) -> tuple[MomentPreview, MomentPreview | None]:
        """
        Move to another position without loading code; return its previews under the last loaded code and the code before that.

        Returns:
            The preview under the last loaded code, and the one under the code before that; ``None`` if there is no such code.

        Raises:
            JournalError: when the run has no such position, or no code could be loaded yet.
        """
        if self._now is None:
            msg = "no version of the code has loaded yet, so there is no position to show; correct the code first"
            raise JournalError(msg)
        found = self._now.preview_position(at, with_details=True)
        old = self.preview_old_code(at)
        if found.place is not None:
            self.at = self._seen_at = at
            self.good = found
        return found, old

    def preview_old_code(self, at: str) -> MomentPreview | None:
        """Return a preview of a position under the code before the last save; ``None`` if there is no such code."""
        return None if self._before is None else self._before.preview_position(at)

    def reload_and_find_next_request(self) -> NextRequest:
        """Load the current code in a new process; return the first model request without a recorded reply, or why there is none."""
        walker = Walker(self._load, self._tape, prints=self._prints)
        try:
            return walker.replay_to_next_request()
        finally:
            walker.close()

    def close(self) -> None:
        """End all processes."""
        for walker in (self._now, self._before):
            if walker is not None:
                walker.close()
        self._now = self._before = None

    def _diff_with_last_preview(self, preview: MomentPreview) -> list[str] | None:
        """Return the differences to the last preview, one per line; ``None`` if it was of another position or a summary is missing."""
        good = self.good
        if good is None or good.summary is None or preview.summary is None:
            return None
        if self.at != self._seen_at or good.is_before != preview.is_before:
            return None  # between different places, nearly every line differs
        return diff_summaries(good.summary, preview.summary)


def _read_file_stamps(files: Iterable[str]) -> dict[str, tuple[int, int, int]]:
    """Return modification time, size and inode of each file, for the detection of saves; zeros for a missing file."""
    found: dict[str, tuple[int, int, int]] = {}
    for file in files:
        try:
            status = Path(file).stat()
        except OSError:  # an editor may take it away for a moment
            found[file] = (0, 0, 0)
        else:
            found[file] = (status.st_mtime_ns, status.st_size, status.st_ino)
    return found
