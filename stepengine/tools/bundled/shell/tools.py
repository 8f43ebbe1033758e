"""
``run_terminal_command``, ``check_job`` and ``kill_job``: tools that run programs below a root.

The background commands of a run are its jobs; they end with the run.
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from stepengine.data.alike import list_names
from stepengine.data.json import JsonDict, compact
from stepengine.data.messages import SideEffect, ToolResult
from stepengine.data.result_cuts import RESULT_CHARS
from stepengine.data.tools import ToolAnnotations
from stepengine.data.visible import cut_middle
from stepengine.errors import ToolError
from stepengine.tools.bundled.shell.commands import CommandProgress, Shell, Slots
from stepengine.tools.bundled.shell.output import cut_texts_to_fit
from stepengine.tools.bundled.shell.process import (
    COMMAND_OUTPUT_BYTES,
    CommandProcess,
    Ending,
    wait_despite_cancellation,
)
from stepengine.tools.context import ToolContext
from stepengine.tools.decorator import tool
from stepengine.tools.definition import Tool, ToolPreview
from stepengine.workspace.argv import Argv, Script, command_text
from stepengine.workspace.environment import PrivateFolders, replace_environment_secrets

JOBS_PER_RUN = 4
"""A server, a watcher and some builds; a model forgets jobs, and each uses a core."""
JOB_OUTPUT_BYTES = 16 * 1024 * 1024
"""A server that logs for days must not fill the disk."""


class OutputLog:
    """
    The output of one job, both streams in the order of arrival, with a file of its first 16 MiB.

    All output is in an unnamed file, for searches; a job that prints more than 64 MiB is killed. A job on a remote system writes the
    other file there.
    """

    def __init__(self, path: Path, *, is_here: bool) -> None:
        self.path = path
        self.size = 0
        self._has_lost_output = False
        self._all = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - ``close`` closes it
        self._fd = -1
        if is_here:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    @property
    def is_full(self) -> bool:
        """Whether the job has printed more than its file or the disk may contain."""
        return self._has_lost_output or self.size > JOB_OUTPUT_BYTES

    def write(self, data: bytes) -> None:
        """Append output of the job; output above 16 MiB is not in its named file, and output above the room on the disk in none."""
        try:
            if self._fd >= 0:
                os.write(self._fd, data[: max(0, JOB_OUTPUT_BYTES - self.size)])
            written = self._all.write(data)
        except OSError:
            written = 0
        self.size += written
        self._has_lost_output |= written < len(data)

    def contains(self, text: bytes, start: int) -> bool:
        """Return True if the output contains *text* at or after the byte *start*."""
        return text in os.pread(self._all.fileno(), self.size - start, start)

    def close(self) -> None:
        """Close the files."""
        self._all.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class BackgroundCommand:
    """
    One command in the background.

    Attributes:
        id: Its id.
        command: Its text for people and models.
        process: Its process.
        log: Its output file.
        ended_by_us: Its exit code or signal, if ``end`` ended it.
    """

    def __init__(self, id: str, command: str, process: CommandProcess, log: OutputLog, private: PrivateFolders) -> None:
        self.id = id
        self.command = command
        self.process = process
        self.log = log
        self.ended_by_us: Ending | None = None
        self._private = private

    @property
    def ending(self) -> Ending | None:
        """The exit code or signal of the command; ``None`` while it runs."""
        return self.ended_by_us or self.process.get_ending()

    async def wait(self, text: str | None, seconds: float) -> bool | None:
        """Wait for *text* in the output, and return whether it is there; without *text*, wait for the end and return ``None``."""
        wanted, seen = (text or "").encode(), 0
        end = asyncio.get_running_loop().time() + seconds
        while True:
            self.process.news.clear()
            ending = self.ending
            if ending is not None:
                self.process.drain()
            if wanted and self.log.contains(wanted, max(0, seen - len(wanted))):
                return True
            seen = self.log.size
            left = end - asyncio.get_running_loop().time()
            if ending is not None or left <= 0:
                return False if wanted else None
            try:
                async with asyncio.timeout(left):
                    await self.process.news.wait()
            except TimeoutError:
                continue

    async def end(self, first_signal: int = signal.SIGTERM) -> None:
        """End all processes of the command: with *first_signal*, and after 1.5 s with SIGKILL."""
        was_running = self.ending is None
        ending = await self.process.end(first_signal)
        if was_running:
            self.ended_by_us = ending

    async def discard(self) -> None:
        """End the command, and remove its files."""
        await self.end()
        self.log.close()
        await self._private.remove_without_blocking()


class Jobs:
    """The jobs of one run."""

    def __init__(self) -> None:
        self._jobs: dict[str, BackgroundCommand] = {}
        self._starting = 0

    async def start(self, start_command: Callable[[], Any]) -> BackgroundCommand:
        """
        Call *start_command*, which starts a job, and store and return the job; raise ``ToolError`` if four jobs are running.

        Raises:
            ToolError: If four jobs of the run are running.
        """
        running = [job.id for job in self._jobs.values() if job.ending is None]
        if len(running) + self._starting >= JOBS_PER_RUN:
            msg = f"{JOBS_PER_RUN} background jobs are running already ({', '.join(running)}); stop one with kill_job"
            raise ToolError(msg)
        self._starting += 1
        try:
            job: BackgroundCommand = await start_command()
        finally:
            self._starting -= 1
        self._jobs[job.id] = job
        return job

    def get(self, id: str) -> BackgroundCommand:
        """
        Return a job by its id; raise ``ToolError`` if the run has no such job.

        Raises:
            ToolError: If this run has no such job.
        """
        if id not in self._jobs:
            known = list_names(self._jobs, id)
            msg = f"this run has no job {id!r}; its jobs are: {known}. A job ends with its run, also when that is suspended"
            raise ToolError(msg)
        return self._jobs[id]

    async def aclose(self) -> list[str]:
        """End all jobs, and return a sentence about each job that was running."""
        jobs = list(self._jobs.values())
        running = [
            f"background job {job.id} ({job.command}) was ended with its run" for job in jobs if job.ending is None
        ]
        await asyncio.gather(*[job.discard() for job in jobs])
        self._jobs.clear()
        return running


MIB = 1024 * 1024
"""The number of bytes in a mebibyte."""

RUNS = ToolAnnotations(read_only=False, destructive=True, idempotent=False, open_world=True)
LOOKS = ToolAnnotations(read_only=True, idempotent=True)
SHOWN_CHARS = 2_000
"""A screen of a command; a script in it may have a megabyte."""
ACTION_CHARS = 80
"""One line of a terminal."""
FLOODED = f"it was killed because it printed more than {COMMAND_OUTPUT_BYTES // MIB} MiB"
FOREVER = float("inf")
CONFINED = "files that may hold secrets, or that a rule denies, are left out"


def make_command_tools(shell: Shell) -> list[Tool]:
    """Return `run_terminal_command`, `check_job` and `kill_job` for *shell*."""

    @tool(
        category="execute",
        annotations=RUNS,
        timeout=FOREVER,
        preview=partial(preview_command, shell),
        aliases={"command": ("cmd", "argv")},
    )
    async def run_terminal_command(  # noqa: D417  (the context is no parameter of the tool)
        ctx: ToolContext,
        command: Annotated[str | list[str], Field(min_length=1)],
        process_type: Literal["SYNC", "BACKGROUND"] = "SYNC",
        cwd: str | None = None,
        timeout_seconds: float = shell.timeout,
    ) -> ToolResult:
        """
        Run a program and return what it printed.

        Usage:
            - Give the program and its arguments as a list; nothing has to be quoted.
            - One string works too, when it only needs to be split into words, as in `git log -n 5 --format="%h %s"`.
            - `process_type` "BACKGROUND" starts a program that goes on, such as a server, and returns a `job_id` at once.

        Examples:
            {"command": ["python", "-m", "pytest", "-q"], "timeout_seconds": 120}
            {"command": "git status --short", "cwd": "packages/web"}
            {"command": ["python", "-m", "http.server", "8000"], "process_type": "BACKGROUND"}

        When not to use:
            - To read, list, search or edit files, use the tools for that.

        Notes:
            - Pipes, `&&`, redirection, variables and wildcards need a shell, and are refused where none is allowed.
            - The program has no terminal and no input; what asks a question gets none. Each call starts afresh: no
              variables and no `cd` are left from another call.
            - `exit_code` is 0 on success. After `timeout_seconds` it is stopped and what it printed so far is returned.
            - At most 50,000 characters of each stream are shown, its beginning and its end.

        Args:
            command: The program and its arguments.
            process_type: "SYNC" waits for the end, "BACKGROUND" does not.
            cwd: The folder to run it in, relative to the root folder; the root folder by default.
            timeout_seconds: How long it may take. Has no effect in the background.
        """
        read = shell.parse(command)
        runs = await asyncio.to_thread(shell.restrict_command, read, cwd)
        if process_type == "BACKGROUND":
            return await _run_in_background(ctx, shell, read, runs, cwd)
        async with Slots.get_or_create_semaphore(ctx):
            if shell.terminals is not None and runs == read:
                ran = await _run_in_editor(ctx, shell, read, cwd, shell.resolve_timeout(timeout_seconds))
                if ran is not None:
                    return ran
            return await _run_to_end(ctx, shell, read, runs, cwd, shell.resolve_timeout(timeout_seconds))

    @tool(category="execute", annotations=LOOKS, timeout=FOREVER)
    async def check_job(  # noqa: D417  (the context is no parameter of the tool)
        ctx: ToolContext,
        job_id: Annotated[str, Field(min_length=1)],
        wait_for: str | None = None,
        timeout_seconds: Annotated[float, Field(ge=0)] = 0,
    ) -> ToolResult:
        """
        See how a background job is doing: whether it runs, and what it printed since the last look.

        Usage:
            - With `timeout_seconds` it waits for the job's end, or with `wait_for` for a text in its output.

        Examples:
            {"job_id": "job-c4"}
            {"job_id": "job-c4", "wait_for": "Listening on", "timeout_seconds": 10}

        When not to use:
            - To run a program to its end, use `run_terminal_command` without "BACKGROUND".

        Notes:
            - `status` is "running" or "exited"; `found` says whether the text of `wait_for` was printed.
            - `output_file` holds everything that it printed, up to 16 MiB, until the job is over with its run.

        Args:
            job_id: The `job_id` that `run_terminal_command` returned.
            wait_for: Text to wait for; it may have been printed before.
            timeout_seconds: How long to wait; by default not at all.
        """
        job = _get_or_create_jobs(ctx, shell).get(job_id)
        found = await job.wait(wait_for, min(timeout_seconds, shell.max_timeout))
        return _make_job_result(job, {} if found is None else {"found": found})

    @tool(category="execute", annotations=RUNS, timeout=FOREVER, destinations=())
    async def kill_job(  # noqa: D417  (the context is no parameter of the tool)
        ctx: ToolContext,
        job_id: Annotated[str, Field(min_length=1)],
        signal: Literal["SIGTERM", "SIGINT", "SIGKILL"] = "SIGTERM",
    ) -> ToolResult:
        """
        Stop a background job and everything that it started.

        Usage:
            - Stop servers and watchers that are not needed any more; at most four jobs run at once.

        Examples:
            {"job_id": "job-c4"}

        When not to use:
            - At the end of your work: jobs end by themselves with the run.

        Notes:
            - What has not ended 1.5 seconds after the signal is killed.

        Args:
            job_id: The `job_id` that `run_terminal_command` returned.
            signal: The signal that it gets first.
        """
        job = _get_or_create_jobs(ctx, shell).get(job_id)
        was_running = job.ending is None
        await wait_despite_cancellation(asyncio.create_task(job.end(_get_signal_number(signal))))
        return _make_job_result(job, {} if was_running else {"message": "it had ended already"})

    return [run_terminal_command, check_job, kill_job]


def _get_signal_number(name: str) -> int:
    return signal.Signals[name].value


def _get_or_create_jobs(ctx: ToolContext, shell: Shell) -> Jobs:
    """Return the background jobs of the run, created at the first call."""
    return ctx.get_or_create_run_object((Jobs, shell), Jobs)


async def _run_to_end(  # noqa: PLR0917  (one call, spelled out)
    ctx: ToolContext,
    shell: Shell,
    command: Argv | Script,
    restricted: Argv | Script,
    cwd: str | None,
    seconds: float | None,
) -> ToolResult:
    """Run the *restricted* form of a command until its end or the timeout, end its processes, and return its result."""
    private, progress = await shell.create_private_folders(), CommandProgress(ctx)
    process: CommandProcess | None = None
    in_time = True
    try:
        process = await shell.start(restricted, cwd, private, on_text=progress.add)
        in_time = await process.wait(seconds)
    finally:
        await wait_despite_cancellation(asyncio.create_task(end_and_clean_up(process, private)))
        progress.flush()
    ending = process.get_ending() or Ending(None, None)
    process.raise_if_lost(cut_middle(command_text(command), ACTION_CHARS))
    late = "" if in_time else f"it was stopped because it took longer than {seconds:g} s; this is what it had printed"
    notes = (FLOODED if process.flooded else late, "" if restricted == command else CONFINED)
    _log_command(ctx, restricted, process, ending)
    frame = _make_result_fields(command, process, ending, "; ".join(filter(None, notes)))
    return _make_result_and_clear_output(frame, process, "ok" if in_time and not process.flooded else "error")


async def _run_in_editor(
    ctx: ToolContext, shell: Shell, command: Argv | Script, cwd: str | None, seconds: float | None
) -> ToolResult | None:
    """Run a command to its end in a terminal of the editor, and return its result; ``None`` if the editor has none for it."""
    private, began = await shell.create_private_folders(), time.monotonic()
    try:
        ran = await shell.run_in_terminal(ctx, command, cwd, private, seconds)
    finally:
        private.remove()
    if ran is None:
        return None
    frame: dict[str, object] = {"command": cut_middle(command_text(command), SHOWN_CHARS), "exit_code": ran.code}
    frame |= {"signal": ran.signal} if ran.signal else {}
    frame["duration_seconds"] = round(time.monotonic() - began, 3)
    if not ran.in_time:
        frame["message"] = f"it was stopped because it took longer than {seconds:g} s; this is what it had printed"
    out, _ = cut_texts_to_fit((ran.output, ""), RESULT_CHARS - len(compact(frame)) - 100)
    value: dict[str, Any] = {**frame, "stdout": out, "truncated": ran.is_cut or out != ran.output}
    return ToolResult.json(value, status="ok" if ran.in_time else "error")


async def end_and_clean_up(process: CommandProcess | None, private: PrivateFolders) -> None:
    """End a started command and all its processes, and remove its private folder."""
    try:
        if process is not None:
            await process.end()
    finally:
        await private.remove_without_blocking()


async def _run_in_background(
    ctx: ToolContext, shell: Shell, command: Argv | Script, restricted: Argv | Script, cwd: str | None
) -> ToolResult:
    """Start the *restricted* form of a command as a job of the run, and return a result with its id."""
    job_id = f"job-{ctx.tool_call_id}"
    shown = cut_middle(command_text(command), SHOWN_CHARS)

    async def start_job() -> BackgroundCommand:
        """Start the command with a file for its output, and return it as a job."""
        with ExitStack() as undo:
            private = await shell.create_private_folders()
            undo.callback(private.remove)
            log = OutputLog(private.folder / "output", is_here=private.system is None)
            undo.callback(log.close)
            there = "" if private.system is None else str(log.path)
            process = await shell.start(restricted, cwd, private, on_output=log.write, remote_log=there)
            undo.pop_all()
        return BackgroundCommand(job_id, shown, process, log, private)

    job = await _get_or_create_jobs(ctx, shell).start(start_job)
    effect = SideEffect("job_started", job.id, {"command": shown, "pid": job.process.pid})
    message = "it goes on in the background; look after it with check_job, stop it with kill_job. It ends with this run"
    value: dict[str, Any] = {"command": shown, "job_id": job.id, "pid": job.process.pid, "message": message}
    return ToolResult.json({**value, "output_file": str(job.log.path)}, side_effects=[effect])


def _make_result_fields(
    command: Argv | Script, process: CommandProcess, ending: Ending, message: str
) -> dict[str, object]:
    """Return the result of an ended command without its output: command, exit code or signal, time and *message*."""
    frame: dict[str, object] = {"command": cut_middle(command_text(command), SHOWN_CHARS), "exit_code": ending.code}
    if ending.signal is not None:
        frame["signal"] = ending.signal
    return {**frame, "duration_seconds": round(process.seconds, 3), **({"message": message} if message else {})}


def _make_result_and_clear_output(
    frame: Mapping[str, Any], process: CommandProcess, status: Literal["ok", "error"] = "ok"
) -> ToolResult:
    """Return a result with *frame* and both output streams, cut to the size limit of results, and clear the stored output."""
    is_cut = process.out.is_cut or process.err.is_cut
    texts = process.out.pop_text(), process.err.pop_text()
    room = RESULT_CHARS - len(compact(frame)) - 100
    out, err = cut_texts_to_fit(texts, room)
    value = {**frame, "stdout": out, **({"stderr": err} if err else {}), "truncated": is_cut or (out, err) != texts}
    return ToolResult.json(value, status=status)


def _make_job_result(job: BackgroundCommand, more: Mapping[str, object]) -> ToolResult:
    """Return a job's status with the output since the last call, and clear that output."""
    ending, process = job.ending, job.process
    frame: dict[str, Any] = {"job_id": job.id, "command": job.command, "status": "exited" if ending else "running"}
    if ending is not None:
        frame["exit_code"] = ending.code
        if ending.signal is not None:
            frame["signal"] = ending.signal
    frame |= {"duration_seconds": round(process.seconds, 3), "output_file": str(job.log.path), **more}
    notes = [frame.get("message", ""), FLOODED if process.flooded else ""]
    notes.append("the output file is full, the rest of the output is not in it" if job.log.is_full else "")
    if any(notes):
        frame["message"] = "; ".join(filter(None, notes))
    return _make_result_and_clear_output(frame, process)


def _log_command(ctx: ToolContext, command: Argv | Script, process: CommandProcess, ending: Ending) -> None:
    """Log the command and its end, but never its output."""
    # Before it is cut: the ends of a secret that was cut would not be recognized.
    message = f"ran {cut_middle(replace_environment_secrets(command_text(command)), SHOWN_CHARS)}"
    ctx.logger.debug(
        message,
        exit_code=ending.code,
        signal=ending.signal,
        seconds=round(process.seconds, 3),
        bytes=process.out.total + process.err.total,
    )


def preview_command(shell: Shell, input: JsonDict) -> ToolPreview:
    """Return a preview of the call with its complete command, or with the reason why the call will fail."""
    given: Any = input.get("command", "")
    try:
        command = shell.parse(given)
    except ToolError as error:
        details = {"command": given, "problem": error.message}
        return ToolPreview("Run a command that will be refused", details, problem=error.message)
    details = {"cwd": input.get("cwd") or "."}
    if isinstance(command, Script):
        details |= {"script": command_text(command), "needs_a_shell_because_of": command.reason}
        action = "Run a shell script"
    else:
        details |= {"command": command_text(command), "argv": list(command)}
        action = f"Run {command_text(command[:1])}"[:ACTION_CHARS]
    if input.get("process_type") == "BACKGROUND":
        action += " in the background"
    return ToolPreview(action, details)
