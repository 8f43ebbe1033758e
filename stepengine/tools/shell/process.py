"""
One command: started by its supervisor, read without blocking, and ended with everything that it started.

The supervisor waits for the command only when all of it is to end, so the number of its group cannot belong to anybody
else. Should the command kill its supervisor, what is left is found by the marker in its environment,
on Linux only and as far as it did not clear it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextvars import Context
from pathlib import Path
from typing import Any, NoReturn

import attrs

from stepengine.errors import ToolError
from stepengine.system.environment import MARKER
from stepengine.tools.shell.output import Capture

__all__ = (
    "Ending",
    "Process",
    "Start",
    "end_marked",
    "marked",
    "start",
    "to_the_end",
)

COMMAND_CHARS = 50_000
COMMAND_OUTPUT_BYTES = 64 * 1024 * 1024
COMMAND_DRAIN_SECONDS = 0.2
COMMAND_TERM_SECONDS = 1.5

SUPERVISOR = str(Path(__file__).with_name("supervisor.py"))
CHUNK = 65_536
DRAIN_READS = 32
POLL_SECONDS = 0.02
DEATH_SECONDS = 5.0
START_SECONDS = 30.0
FULL = {errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM}
FULL_SECONDS = 10.0
REASONS = {
    errno.ENOENT: "it, or the interpreter that its first line names, does not exist",
    errno.EACCES: "it is not executable",
    errno.ENOEXEC: "it is no program of this system, and has no first line such as #!/bin/sh that names an interpreter",
    errno.E2BIG: "its arguments and environment are too large",
}


@attrs.frozen(kw_only=True)
class Start:
    """
    What is started.

    Attributes:
        program: Path of the program.
        argv: What it is given, its own name first.
        env: Its environment.
        folder: Descriptor of the folder that it works in.
        limits: Limits as the supervisor takes them.
        script: What it reads from the descriptor that ``{script}`` in *argv* stands for.
        sink: Is given the bytes of both streams as they come.
        shows: Is given the text as it comes.
        reads: Is given the bytes of the standard output alone as they come.
    """

    program: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    folder: int
    limits: str = ""
    script: bytes | None = None
    sink: Callable[[bytes], None] | None = None
    shows: Callable[[str], None] | None = None
    reads: Callable[[bytes], None] | None = None


@attrs.frozen
class Ending:
    """How a command ended: its exit code or the signal that ended it."""

    code: int | None
    signal: str | None


async def to_the_end(work: asyncio.Task[Any]) -> None:
    """Wait for a task however often this one is cancelled; a cancellation is passed on afterwards."""
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait((work,))
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    work.result()


async def start(what: Start) -> Process:
    """
    Start a command.

    When this process has no free descriptors or processes, it is tried again for 10 seconds.

    Raises:
        ToolError: when the program cannot be executed.
    """
    process = await _patiently(what)
    try:
        await process.check(what)
    except BaseException:
        await to_the_end(asyncio.create_task(process.end()))
        raise
    return process


async def _patiently(what: Start) -> Process:
    """Start the supervisor as soon as there are descriptors and processes for it."""
    give_up = time.monotonic() + FULL_SECONDS
    while True:
        try:
            return _launched(what)
        except OSError as error:
            if error.errno not in FULL or time.monotonic() > give_up:
                msg = f"{what.argv[0]!r} could not be started: {error.strerror}"
                raise ToolError(msg) from None
        await asyncio.sleep(POLL_SECONDS)


def _launched(what: Start) -> Process:
    """Start the supervisor."""
    with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
        made: list[int] = []
        for _ in range(2):
            read, write = os.pipe()
            ours.callback(os.close, read)
            theirs.callback(os.close, write)
            made += [read, write]
        out, out_end, err, err_end = made
        line, line_end = socket.socketpair()
        ours.callback(line.close)
        theirs.callback(line_end.close)
        passed = [line_end.fileno(), what.folder]
        argv = what.argv
        if what.script is not None:
            script = theirs.enter_context(tempfile.TemporaryFile())
            script.write(what.script)
            script.seek(0)
            passed.append(script.fileno())
            argv = tuple([a.replace("{script}", f"/dev/fd/{script.fileno()}") for a in argv])
        popen = subprocess.Popen(  # noqa: S603  (the supervisor; it executes an argument list)
            [sys.executable, "-I", "-S", "-X", "utf8", SUPERVISOR, str(os.getpid()), str(line_end.fileno()),
             str(what.folder), what.limits, what.program, *argv],
            stdin=subprocess.DEVNULL, stdout=out_end, stderr=err_end, env=dict(what.env), pass_fds=passed,
            start_new_session=True, umask=0o022,
        )  # fmt: skip
        ours.pop_all()
    return Process(popen, out, err, line.detach(), what)


class _Pipe:
    """One stream of a command, read by the event loop; callbacks run in no context of a call, so that it may outlive it."""

    def __init__(self, fd: int, feed: Callable[[bytes], None], ends: Callable[[], None] | None = None) -> None:
        self._fd = fd
        self._feed = feed
        self._ends = ends
        self._loop = asyncio.get_running_loop()
        self.closed = asyncio.Event()
        os.set_blocking(fd, False)
        Context().run(self._loop.add_reader, fd, self.read)

    def read(self) -> bool:
        """Read what is there; return whether there was something."""
        if self.closed.is_set():
            return False
        try:
            data = os.read(self._fd, CHUNK)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if data:
            self._feed(data)
        else:
            self.close()
        return bool(data)

    def close(self) -> None:
        """Stop reading."""
        if not self.closed.is_set():
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self.closed.set()
            if self._ends is not None:
                self._ends()


class Process:
    """
    A command that was started.

    Attributes:
        pid: The process id, also the number of its group; 0 before it runs.
        out: What it printed.
        err: What it printed as errors.
        over: Set when it ended, or printed too much.
        news: Set when something was printed or it ended; whoever waits for that clears it.
        flooded: Whether it printed more than 64 MiB.
        seconds: How long it ran, until it ended or now.
    """

    def __init__(self, supervisor: subprocess.Popen[bytes], out: int, err: int, line: int, what: Start) -> None:
        self._supervisor = supervisor
        self.pid = 0
        self.out, self.err = Capture(COMMAND_CHARS), Capture(COMMAND_CHARS)
        self.over, self._gone = asyncio.Event(), asyncio.Event()
        self.news = asyncio.Event()
        self.flooded = False
        self._env = what.env
        self._sink, self._shows, self._reads = what.sink, what.shows, what.reads
        self._began, self._ended = time.monotonic(), 0.0
        self._pipes = (
            _Pipe(out, lambda data: self._feed(self.out, data)),
            _Pipe(err, lambda data: self._feed(self.err, data)),
        )
        self._said = b""
        self._errno = 0
        self._ending: Ending | None = None
        self._known = asyncio.Event()
        self._line_fd = line
        self._line = _Pipe(line, self._told, self._silent)

    def _feed(self, capture: Capture, data: bytes) -> None:
        if self.flooded:
            return
        text = capture.feed(data)
        if self._reads is not None and capture is self.out:
            self._reads(data)
        if self._sink is not None:
            self._sink(data)
        if self._shows is not None:
            self._shows(text)
        if self.out.total + self.err.total > COMMAND_OUTPUT_BYTES:
            self.flooded = True
            self.over.set()
            self.send(signal.SIGKILL)
        self.news.set()

    # --- what the supervisor says ------------------------------------------------------------

    def _told(self, data: bytes) -> None:
        *lines, self._said = (self._said + data).split(b"\n")
        for line in lines:
            what, number = line.decode().split()
            match what:
                case "pid":
                    self.pid = int(number)
                case "errno":
                    self._errno = int(number)
                case "exit":
                    self._left(Ending(int(number), None))
                case _:
                    self._left(Ending(None, _signal_name(int(number))))
        self._known.set()

    def _silent(self) -> None:
        """The supervisor has ended: when it was told to, or because it was killed, and its command with it."""
        self._known.set()
        self._left(self._ending or Ending(None, _signal_name(signal.SIGKILL)))

    def _left(self, ending: Ending) -> None:
        self._ending = ending
        self._ended = self._ended or time.monotonic()
        self._gone.set()
        self.over.set()
        self.news.set()

    @property
    def seconds(self) -> float:
        """How long it ran, until it ended or now."""
        return (self._ended or time.monotonic()) - self._began

    def ending(self) -> Ending | None:
        """Return how the command ended; ``None`` while it runs."""
        return self._ending

    # --- what somebody does with it ----------------------------------------------------------

    async def check(self, what: Start) -> None:
        """Wait until the program runs; raises ``ToolError`` when it could not be executed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_SECONDS):
                await self._known.wait()
        if self._errno:
            _refuse(what, self._errno)
        if not self.pid:
            msg = f"{what.argv[0]!r} was ended: the process that supervises it was stopped or killed, maybe by itself"
            raise ToolError(msg)

    def send(self, number: int) -> None:
        """Send a signal to the process group."""
        # While the supervisor lives, it has not waited for the command, and the number is the command's.
        if self.pid and self._supervisor.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    async def wait(self, seconds: float | None) -> bool:
        """Wait until the leader ended or printed too much; return whether that was in time."""
        try:
            async with asyncio.timeout(seconds):
                await self.over.wait()
        except TimeoutError:
            if self.ending() is None:  # else only the event loop was late
                return False
        await self._closed(COMMAND_DRAIN_SECONDS)
        return True

    async def _closed(self, seconds: float) -> None:
        """Wait until nobody holds the streams any more."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._gone.wait()
                for pipe in self._pipes:
                    await pipe.closed.wait()

    def drain(self) -> None:
        """Read what is in the pipes, but not what somebody may still write into them."""
        for pipe, capture in zip(self._pipes, (self.out, self.err), strict=True):
            for _ in range(DRAIN_READS):
                if not pipe.read():
                    break
            if pipe.closed.is_set():
                capture.end()

    async def end(self, number: int = signal.SIGTERM) -> Ending:
        """End it and all that it started, first gently; return how the command ended."""
        if not self._gone.is_set():
            self.send(number)
            await self._closed(COMMAND_TERM_SECONDS)
        how = self._ending or Ending(None, _signal_name(signal.SIGKILL))
        await self._end_supervisor()
        self.drain()
        for pipe in self._pipes:
            pipe.close()
        self.drain()
        return how

    async def _end_supervisor(self) -> None:
        """Have the supervisor end all that is left; where it is no longer able to, do what can be done without it."""
        if not self._line.closed.is_set():
            with contextlib.suppress(OSError):  # it has ended just now
                os.write(self._line_fd, b"end\n")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DEATH_SECONDS):
                await self._line.closed.wait()
        if not self._line.closed.is_set():
            self.send(signal.SIGKILL)
            self._supervisor.kill()
            self._line.close()
        if self._supervisor.wait():
            await end_marked(self._env)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _refuse(what: Start, number: int) -> NoReturn:
    reason = REASONS.get(number, os.strerror(number))
    msg = f"{what.argv[0]!r} could not be executed: {reason}"
    raise ToolError(msg)


PROC = Path("/proc")
ROUNDS = 40
PAUSE_SECONDS = 0.01


def marked(marker: str) -> list[int]:
    """Return the ids of running processes of ours whose environment holds the marker."""
    wanted, user = f"{MARKER}={marker}".encode(), os.getuid()
    found: list[int] = []
    if not PROC.is_dir():
        return found
    with os.scandir(PROC) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):  # it ended meanwhile, or is not ours to read
                if (
                    entry.name.isdigit()
                    and entry.stat().st_uid == user
                    and wanted in Path(entry, "environ").read_bytes()
                ):
                    found.append(int(entry.name))
    return found


async def end_marked(env: Mapping[str, str]) -> None:
    """Kill every process with the marker of *env*, again and again until there is none; a fork bomb may win."""
    for _ in range(ROUNDS):
        left = marked(env[MARKER])
        if not left:
            return
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(PAUSE_SECONDS)
