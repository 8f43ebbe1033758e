"""
``ProgramConnection``: a connection to a program at the other end of a pipe that performs requests and is not trusted.

All input has limits before it is stored: the size of a frame and of an answer, the unread output of a program, and the time for
an answer. A violation ends the connection, and every call on it raises a typed error. This module does not know the meaning of the
calls.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import signal
import struct
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from attrs import frozen

from stepengine.data.visible import cut_end
from stepengine.errors import UnknownOutcome, WorkspaceLost
from stepengine.workspace.threads import CancelSignal

READY = b"stepengine worker 1\n"
BEFORE_BYTES = 65_536
"""The most output of a log-in before the program answers."""
LENGTHS = struct.Struct(">II")
HEAD_BYTES = 1024 * 1024
"""A head contains names, numbers and paths; a broken remote program must not fill the memory."""
DATA_BYTES = 1024 * 1024
"""Files are sent in pieces of this size, so that other calls can use the pipe in between."""
ANSWER_BYTES = 32 * 1024 * 1024
"""More than a listing of the largest allowed folder."""
UNTAKEN_BYTES = 8 * 1024 * 1024
"""The most unread output of a program; it may send 1 MiB ahead, and its last output."""
SAID_CHARS = 2_000
"""One screen: the last lines of the transport contain the reason of its end."""
CHUNK_BYTES = 262_144
"""A few calls for a piece of a file, with little memory for each connection."""
PROGRAM = (
    "import os;r=lambda n,s=b'':s if len(s)==n else r(n,s+(os.read(0,n-len(s)) or os._exit(1)));"
    "exec(compile(r(int(r(9))),'stepengine worker','exec'),{'__name__':'__main__'})"
)
"""The first code that is executed remotely: it reads and runs the rest. One line, so that it passes through any shell."""
FUTURE = b"from __future__ import annotations\n"
POLL_SECONDS = 0.05
"""How late a cancelled call is noticed: a person does not see a twentieth of a second."""
KILL_SECONDS = 2.0
"""A transport such as ssh ends within milliseconds once its pipe is closed; one that hangs is killed then."""


@frozen
class CallReply:
    """
    The reply to a call.

    Attributes:
        head: The members of its last frame.
        data: The data of all its frames.
        line: The number of the connection.
    """

    head: Mapping[str, Any]
    data: bytes
    line: int


class Listener(Protocol):
    """Receives the output and the end of a program; its methods are called in the reading thread."""

    def handle_output(self, stream: str, data: bytes, /) -> None:
        """Receive output on ``"out"``, ``"err"`` or the ``"line"`` of its supervisor."""

    def handle_end(self, stream: str, /) -> None:
        """Receive the end of a stream."""

    def handle_exit(self, code: int | None, /) -> None:
        """Receive the exit code of the supervisor; ``None`` if the connection ended first."""


class _Pending:
    """A call that waits for its reply."""

    __slots__ = ("answer", "effect", "is_forgotten", "parts", "settled", "size")

    def __init__(self, *, effect: bool) -> None:
        self.settled = threading.Event()
        self.answer: CallReply | None = None
        self.parts: list[bytes] = []
        self.size = 0
        self.effect = effect
        self.is_forgotten = False


class ProgramConnection:
    """
    A connection to a program, and the calls to it; it can be used by several threads.

    Args:
        argv: The command that connects to its standard input and output.
        env: The environment variables of this command.
        name: Its name in messages.
        source: The source code that it runs.
        seconds: The time limit of its start.
        line: The number of the connection, for its replies.
    """

    def __init__(
        self, argv: Sequence[str], env: Mapping[str, str], *, name: str, source: bytes, seconds: float, line: int
    ) -> None:
        self._name = name
        self._line = line
        # Two locks: writing may wait for the other end. The thread that reads answers must not wait, too, or both ends would
        # block with full pipes.
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._pending: dict[int, _Pending] = {}
        self._listeners: dict[int, Listener] = {}
        self._untaken: dict[int, int] = {}
        self._last = 0
        self._why = ""
        self._said = b""
        self._buffer = bytearray()
        self._ready = threading.Event()
        try:
            self._process = subprocess.Popen(  # noqa: S603  (the argument list of the workspace)
                # A separate session, so that Ctrl-C in this terminal does not end it, and all its processes can be ended as one
                # group.
                argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=dict(env), start_new_session=True
            )  # fmt: skip
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            msg = f"the workspace {name} cannot be reached: {argv[0]!r} cannot be executed: {why}"
            raise WorkspaceLost(msg) from None
        streams = (self._process.stdin, self._process.stdout, self._process.stderr)
        self._in, self._out, self._err = [stream.fileno() for stream in streams if stream is not None]
        for fd in (self._in, self._out, self._err):
            # Not blocking, with `select` before each use: a program that reads nothing, or half of a frame, would else
            # hold a thread that no time limit can get out.
            os.set_blocking(fd, False)
        # A pipe to oneself, which wakes the reading thread out of its `select` when the connection is to end.
        self._wakes, self._woken = os.pipe()
        self._thread = threading.Thread(target=self._read_until_ended, name="stepengine-workspace", daemon=True)
        self._thread.start()
        # The program is sent over the same pipe and not installed there: the other end needs a Python and nothing of
        # ours, and both ends are always of one version.
        text = b"%09d" % len(source) + source
        deadline = time.monotonic() + seconds
        with contextlib.suppress(_ConnectionEnded):
            self._write_or_end_connection(text, deadline)
        if not self._ready.wait(max(0.0, deadline - time.monotonic())):
            self._mark_ended(f"its program did not start within {seconds:g} s")
        if self._why:
            raise WorkspaceLost(self._make_lost_message())

    @property
    def is_lost(self) -> bool:
        """Whether the connection has ended."""
        return bool(self._why)

    # --- asking ------------------------------------------------------------------------------------------------------

    def send_call(
        self,
        operation: str,
        data: bytes = b"",
        *,
        has_effect: bool = False,
        seconds: float,
        listener: Listener | None = None,
        **members: object,
    ) -> int:
        """
        Send a call, register its *listener*, and return its number for ``wait_for_reply``; raise ``WorkspaceLost`` without a connection.

        Args:
            operation: The name of the request.
            data: Its data.
            has_effect: Whether it changes something: without a reply, its outcome is then unknown.
            seconds: The time limit for sending it.
            listener: Receives the output of the program that the call starts. It is registered before the call is sent, since the
                program may print before the reply, and output without a listener ends the connection.
            members: Members of the request.

        Raises:
            WorkspaceLost: when the connection has ended; the call was not made.
        """
        pending = _Pending(effect=has_effect)
        with self._lock:
            if self._why:
                raise WorkspaceLost(self._make_lost_message())
            # Noted before it is sent: the answer may be there before `_send_frame` has returned.
            self._last += 1
            number = self._last
            self._pending[number] = pending
            if listener is not None:
                self._listeners[number] = listener
                self._untaken[number] = 0
        try:
            self._send_frame({"do": operation, "id": number, **members}, data, time.monotonic() + seconds)
        except BaseException as error:
            with self._lock:
                self._pending.pop(number, None)
                self._remove_listener(number)
            if not isinstance(error, _ConnectionEnded):
                raise
            raise WorkspaceLost(self._make_lost_message()) from None
        return number

    def notify(self, operation: str, *, seconds: float = 5.0, **members: object) -> None:
        """Send a call without a reply. Nothing happens if the connection has ended."""
        with contextlib.suppress(_ConnectionEnded):
            if not self._why:
                self._send_frame({"do": operation, **members}, b"", time.monotonic() + seconds)

    def wait_for_reply(self, number: int, *, seconds: float, cancelled: CancelSignal | None = None) -> CallReply:
        """
        Wait for the reply to a call. After *seconds*, end the connection and raise; if *cancelled* is set, only raise.

        Raises:
            OSError: when the remote system refused the call.
            UnknownOutcome: when no reply arrived, and the call may have changed something.
            WorkspaceLost: when no reply arrived.
        """
        with self._lock:
            pending = self._pending.get(number)
        if pending is None:
            raise WorkspaceLost(self._make_lost_message())
        until = time.monotonic() + seconds
        while not pending.settled.wait(
            min(POLL_SECONDS if cancelled is not None else seconds, max(0.0, until - time.monotonic()))
        ):
            if cancelled is not None and cancelled.is_set():
                self.discard_reply(number)
                raise self._make_unanswered_error(pending, "the call was cancelled before its reply arrived")
            if time.monotonic() >= until:
                self._mark_ended(f"no reply arrived within {seconds:g} s")
                break
        with self._lock:
            self._pending.pop(number, None)
        if pending.answer is None:
            raise self._make_unanswered_error(pending, self._why)
        head = pending.answer.head
        if "error" in head:
            with self._lock:
                self._remove_listener(number)
            raise self._make_reply_error(head)
        return pending.answer

    def discard_reply(self, number: int) -> None:
        """Discard the reply to a call, now or when it arrives."""
        with self._lock:
            pending = self._pending.get(number)
            if pending is not None:
                pending.is_forgotten = True
                if pending.settled.is_set():  # it arrived at this moment, and no other code removes it
                    del self._pending[number]

    def _remove_listener(self, number: int) -> None:
        """Remove the listener of a program. The lock must be held."""
        self._listeners.pop(number, None)
        self._untaken.pop(number, None)

    def allow_output(self, number: int, size: int) -> None:
        """Permit a program to send *size* more bytes of output."""
        with self._lock:
            if number not in self._untaken:
                return
            self._untaken[number] -= size
        self.notify("allow_output", child=number, size=size)

    def close(self) -> None:
        """End the connection; the program at the other end then ends its processes."""
        self._mark_ended("it was closed")
        if self._thread is not threading.current_thread():
            self._thread.join(KILL_SECONDS * 2)

    # --- receiving ---------------------------------------------------------------------------------------------------

    def _read_until_ended(self) -> None:
        """Read replies, output and errors until the connection ends, then end the program."""
        waiting = select.poll()
        for fd in (self._out, self._err, self._wakes):
            waiting.register(fd, select.POLLIN)
        try:
            while not self._why:
                for fd, _ in waiting.poll():
                    if fd == self._out:
                        self._read_and_handle_stdout()
                    elif fd == self._err and not self._read_and_store_stderr():
                        waiting.unregister(fd)
        except Exception as error:  # noqa: BLE001 - a listener's, too: without a reason the connection would look alive
            self._mark_ended(_make_end_reason(error))
        finally:
            self._end_program()

    def _read_and_handle_stdout(self) -> None:
        """Read and handle the next part of the program's output; if the output has ended, record the end of the connection."""
        data = os.read(self._out, CHUNK_BYTES)
        if data:
            self._parse_and_handle_frames(data)
            return
        until = time.monotonic() + POLL_SECONDS * 4  # the last output of the transport is the reason of its end
        while (
            (left := until - time.monotonic()) > 0
            and select.select([self._err], [], [], left)[0]
            and self._read_and_store_stderr()
        ):
            pass
        self._mark_ended("it ended")

    def _read_and_store_stderr(self) -> bytes:
        """Read the next error output of the transport, store its last 2,000 bytes, and return the new part."""
        try:
            data = os.read(self._err, CHUNK_BYTES)
        except OSError:
            return b""
        self._said = (self._said + data)[-SAID_CHARS:]
        return data

    def _parse_and_handle_frames(self, data: bytes) -> None:
        """Add data to the buffer, and handle each complete frame in it; raise ``_Broken`` for a violation of the protocol."""
        buffer = self._buffer
        buffer += data
        if not self._ready.is_set():
            at = buffer.find(READY)
            if at < 0:
                if len(buffer) > BEFORE_BYTES:
                    msg = f"its program prints more than {BEFORE_BYTES:,} bytes before it starts"
                    raise _Broken(msg)
                return
            del buffer[: at + len(READY)]
            self._ready.set()
        while len(buffer) >= LENGTHS.size:
            head_size, data_size = LENGTHS.unpack_from(buffer)
            if head_size > HEAD_BYTES or data_size > DATA_BYTES:
                msg = f"a frame of {head_size + data_size:,} bytes"
                raise _Broken(msg)
            end = LENGTHS.size + head_size + data_size
            if len(buffer) < end:
                return
            text = bytes(buffer[LENGTHS.size : LENGTHS.size + head_size])
            content = bytes(buffer[LENGTHS.size + head_size : end])
            del buffer[:end]
            self._handle_frame(_parse_frame_head(text), content)

    def _handle_frame(self, head: dict[str, Any], data: bytes) -> None:
        """Store a part of a reply for the waiting call, or pass a program's output to the program's listener."""
        if "on" in head:
            self._handle_program_frame(head, data)
            return
        number = head.get("id")
        with self._lock:
            pending = self._pending.get(number) if type(number) is int else None
            if pending is None or pending.settled.is_set():
                msg = f"a reply to no open request, {str(number)[:40]!r}"
                raise _Broken(msg)
            pending.size += len(data)
            if pending.size > ANSWER_BYTES:
                msg = f"a reply of more than {ANSWER_BYTES:,} bytes"
                raise _Broken(msg)
            if not pending.is_forgotten:
                pending.parts.append(data)
            if head.get("more") is not True:
                pending.answer = CallReply(head, b"".join(pending.parts), self._line)
                pending.parts.clear()
                pending.settled.set()
                if pending.is_forgotten and type(number) is int:
                    del self._pending[number]

    def _handle_program_frame(self, head: dict[str, Any], data: bytes) -> None:
        """Pass the output or end of a program to its listener; raise ``_Broken`` if too much is unread."""
        number = head["on"]
        with self._lock:
            listener = self._listeners.get(number) if type(number) is int else None
            if listener is None:
                msg = f"a notice about a program that was not started, {str(number)[:40]!r}"
                raise _Broken(msg)
            stream = str(head.get("from", head.get("closed")))
            if "gone" not in head and stream not in {"out", "err", "line"}:
                msg = f"news of {stream[:40]!r}"
                raise _Broken(msg)
            self._untaken[number] += len(data)
            if self._untaken[number] > UNTAKEN_BYTES:
                msg = "more output of a program than allowed"
                raise _Broken(msg)
            if "gone" in head:
                self._remove_listener(number)
        if "gone" in head:
            code = head["gone"]
            listener.handle_exit(code if type(code) is int else None)
        elif "from" in head:
            listener.handle_output(stream, data)
        else:
            listener.handle_end(stream)

    # --- how it ends -------------------------------------------------------------------------------------------------

    def _mark_ended(self, reason: str) -> None:
        """Record why the connection ended, unless a reason is known, and wake the reading thread, which ends the program."""
        with self._lock:
            if self._why:
                return
            self._why = reason
            # Before the reading thread may close the pipe, whose number may then be reused.
            os.write(self._woken, b"x")
        self._ready.set()

    def _end_program(self) -> None:
        """End the program, and notify all waiting callers. The thread does this last."""
        process = self._process
        with self._writing:
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()
        with self._lock:
            pending = list(
                self._pending.values()
            )  # they stay: a later request for an answer must report that it may have been performed
            listeners, self._listeners = list(self._listeners.values()), {}
            self._untaken.clear()
        for one in pending:
            one.settled.set()
        for listener in listeners:
            with contextlib.suppress(Exception):  # the others are notified, and the program is ended
                listener.handle_exit(None)
        try:
            process.wait(KILL_SECONDS)  # its end of the pipe is closed, and it may clean up
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process.stderr is not None:
            process.stderr.close()
        with self._lock:
            for fd in (self._wakes, self._woken):
                os.close(fd)
            self._woken = -1

    def _make_lost_message(self) -> str:
        """Return the message of a lost connection, with the last output of its transport."""
        said = self._said.decode("utf-8", "replace").strip()
        printable = "".join([c if c.isprintable() or c == "\n" else " " for c in said])
        return f"the workspace {self._name} cannot be reached: {self._why}{f'; its output: {printable}' if printable else ''}"

    def _make_unanswered_error(self, pending: _Pending, reason: str) -> WorkspaceLost | UnknownOutcome:
        """Return the error for a call without a reply: ``UnknownOutcome`` if it may have changed something."""
        if pending.effect:
            msg = f"the workspace {self._name} was lost during a call, so its result is unknown: {reason}"
            return UnknownOutcome(msg)
        return WorkspaceLost(
            self._make_lost_message() if self._why else f"the workspace {self._name} has not replied: {reason}"
        )

    def _make_reply_error(self, head: Mapping[str, Any]) -> OSError | WorkspaceLost:
        """Return the ``OSError`` that a reply names; ``WorkspaceLost`` for any other error."""
        name = head["error"]
        number = (
            getattr(errno, name, None)
            if isinstance(name, str) and name.isidentifier() and name.startswith("E")
            else None
        )
        if not isinstance(number, int):
            why = cut_end(str(head.get("why", "")), SAID_CHARS)
            return WorkspaceLost(
                f"the workspace {self._name} could not execute the request: {why or 'it gave no reason'}"
            )
        return OSError(number, os.strerror(number))

    # --- sending -----------------------------------------------------------------------------------------------------

    def _send_frame(self, head: Mapping[str, object], data: bytes, deadline: float) -> None:
        """Send one frame; raise ``_ConnectionEnded`` if the connection has ended or the deadline passes."""
        text = json.dumps(head).encode()
        self._write_or_end_connection(LENGTHS.pack(len(text), len(data)) + text + data, deadline)

    def _write_or_end_connection(self, data: bytes, deadline: float) -> None:
        """Write all bytes; end the connection if that fails, since half a frame would make the rest unreadable."""
        with self._writing:
            stream = self._process.stdin
            if self._why or stream is None or stream.closed:
                raise _ConnectionEnded
            try:
                self._write_all(memoryview(data), deadline)
            except _ConnectionEnded:
                raise
            except BaseException:
                self._mark_ended("a call was interrupted while it was sent")
                raise

    def _write_all(self, view: memoryview, deadline: float) -> None:
        """Write all bytes; raise ``_ConnectionEnded`` at the deadline or after the end of the connection."""
        while view:
            try:
                view = view[os.write(self._in, view) :]
            except BlockingIOError:
                left = deadline - time.monotonic()
                if left <= 0 or self._why:
                    self._mark_ended("it does not read the data sent to it")
                    raise _ConnectionEnded from None
                select.select([], [self._in], [], min(left, POLL_SECONDS * 4))
            except OSError:
                self._wait_for_end_reason()
                raise _ConnectionEnded from None

    def _wait_for_end_reason(self) -> None:
        """Wait a moment until the reading thread has recorded why the connection ended; then record a general reason."""
        until = time.monotonic() + POLL_SECONDS * 10
        while not self._why and time.monotonic() < until:
            time.sleep(POLL_SECONDS / 10)
        self._mark_ended("it ended")


class _ConnectionEnded(Exception):
    """The connection has ended."""


class _Broken(Exception):
    """The other end violated the protocol."""


def _make_end_reason(error: Exception) -> str:
    """Return the reason text for an error in the reading thread."""
    if isinstance(error, _Broken):
        return f"it violates the protocol: {error}"
    if isinstance(error, OSError):
        return error.strerror or "it ended"
    return f"its data could not be processed: {type(error).__name__}: {error}"


def _parse_frame_head(text: bytes) -> dict[str, Any]:
    """Return the JSON object in the head of a frame; raise ``_Broken`` for anything else."""
    try:
        head = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError):
        head = None
    if not isinstance(head, dict):
        msg = "a frame that is not a JSON object"
        raise _Broken(msg)
    return head


def join_sources(*names: str) -> bytes:
    """Return the source code of modules of this folder as one program."""
    texts = [Path(__file__).with_name(name).read_bytes() for name in names]
    # A future statement is allowed at the beginning alone.
    return FUTURE + b"\n".join([text.replace(FUTURE, b"") for text in texts])
