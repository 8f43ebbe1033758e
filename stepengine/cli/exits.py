"""The end of a command: exit codes, error messages, and the exit of the process."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import warnings
from collections.abc import Callable
from enum import IntEnum
from typing import TYPE_CHECKING, Any, assert_never

from stepengine.data.visible import visible
from stepengine.errors import (
    ChildError,
    InputError,
    LimitExceeded,
    MissingKey,
    ReplayDivergence,
    StepEngineError,
    UnknownModel,
)

if TYPE_CHECKING:
    from stepengine.data.state import RunResult


class Exit(IntEnum):
    """The exit codes of the command line."""

    COMPLETED = 0
    FAILED = 1
    USAGE = 2
    SUSPENDED = 3
    LIMIT = 4
    BUSY = 4
    """Of a deployment: a worker is alive."""
    DIVERGED = 5
    AWAY = 6
    """Of a deployment: its database cannot be reached."""
    INTERRUPTED = 130
    TERMINATED = 143


def choose_exit_code(result: RunResult) -> Exit:
    """Return the exit code of *result*. A run that was cancelled without a signal has failed."""
    from stepengine.data.state import RunStatus

    match result.status:
        case RunStatus.COMPLETED:
            return Exit.COMPLETED
        case RunStatus.SUSPENDED:
            return Exit.SUSPENDED
        case RunStatus.MAX_STEPS | RunStatus.TRUNCATED:
            return Exit.LIMIT
        case RunStatus.FAILED | RunStatus.CANCELLED:
            return _get_exit_code_of_error(result.error)
        case _ as never:
            assert_never(never)


def _get_exit_code_of_error(error: BaseException | None) -> Exit:
    """Return the exit code for the error of a failed run; a child's missing key or model counts as its own."""
    match error:
        case LimitExceeded():
            return Exit.LIMIT
        case ReplayDivergence():
            return Exit.DIVERGED
        case MissingKey() | UnknownModel():
            return Exit.USAGE
        case ChildError(__cause__=MissingKey() | UnknownModel() | ChildError() as cause):
            return _get_exit_code_of_error(cause)
        case _:
            return Exit.FAILED


EXIT_CODES = """\
Exit codes:
  0    completed
  1    the run failed
  2    wrong usage or configuration: unknown agent, wrong params, missing key
  3    suspended: waits for an answer, a time or a message, which is printed
  4    limit reached, reply truncated, or a durable worker is still alive
  5    a replay differs from its record
  6    the database of a deployment cannot be reached
  130  interrupted (Ctrl-C)
  143  terminated (SIGTERM)

Results go to stdout, everything else to stderr."""


def raise_exit_unless_completed(code: Exit) -> None:
    """
    Exit with *code*; return normally if it is ``COMPLETED``.

    Raises:
        typer.Exit: for any other code.
    """
    if code is not Exit.COMPLETED:
        import typer

        raise typer.Exit(int(code))


def run_to_exit(app: Callable[[], object]) -> None:
    """
    Run the command line and exit. An ``OSError`` becomes one line and an exit code, not a traceback.

    Raises:
        SystemExit: always.
    """
    _reopen_closed_streams()
    sys.stderr = _Stderr(sys.stderr)
    warnings.showwarning = _make_warning_printer(warnings.showwarning)
    code: Any = Exit.COMPLETED
    try:
        app()
    except SystemExit as end:
        code = end.code
    except OSError as error:
        code = _report_os_error(error)
    try:
        sys.stdout.flush()
    except OSError as error:
        code = code or _report_os_error(error)
        # Python would flush stdout again at its end, fail, and exit with its own code.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def get_exit_code_of_signal(number: int | None) -> Exit:
    """Return the exit code of a command that a signal ended: SIGTERM, or else Ctrl-C."""
    return Exit.TERMINATED if number == signal.SIGTERM else Exit.INTERRUPTED


def _report_os_error(error: OSError) -> Exit:
    """Print an operating system error as one line, and return the exit code."""
    from pathlib import Path

    try:
        Path.cwd()
    except OSError:
        message, code = "the working directory was deleted; change to one that exists", Exit.USAGE
    else:
        message, code = f"the operating system reported: {error.strerror or error}", Exit.FAILED
    print(f"stepengine: {message}", file=sys.stderr)
    return code


def _reopen_closed_streams() -> None:
    """Open ``/dev/null`` for closed standard streams, so that no other file gets their numbers."""
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != fd:
                os.dup2(opened, fd)
                os.close(opened)
            setattr(sys, name, open(fd, "r" if fd == 0 else "w", encoding="utf-8", closefd=False))  # noqa: SIM115


class _Stderr:
    """Standard error that ignores write errors, so that they never end a run."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write *text*; ignore errors."""
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush; ignore errors."""
        with contextlib.suppress(OSError):
            self._stream.flush()


def _make_warning_printer(fallback: Callable[..., None]) -> Callable[..., None]:
    """Return a function that prints each warning about an agent file once, in one line; it passes other warnings to *fallback*."""
    told: set[str] = set()

    def print_warning(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, *more: object, **named: object
    ) -> None:
        """Print a warning about an agent file once, in one line; pass any other to *fallback*."""
        from stepengine.engine.handler_sources import SourceWarning
        from stepengine.engine.loader import BrokenFile

        if not issubclass(category, BrokenFile | SourceWarning):
            fallback(message, category, filename, lineno, *more, **named)
            return
        text = f"{filename}:{lineno}: {message}" if issubclass(category, SourceWarning) else str(message)
        if text not in told:
            told.add(text)
            print_error(text)

    return print_warning


def run_explaining_errors(command: Callable[[], Exit]) -> Exit:
    """Run *command*; print a usage problem or an error of stepengine as one message and return its exit code."""
    from stepengine.cli.screen.render import format_error
    from stepengine.cli.settings import UsageProblem

    try:
        return command()
    except UsageProblem as problem:
        return print_error(str(problem))
    except InputError as error:
        return print_error("\n  ".join([error.message, *[i for i in error.issues if i not in error.message]]))
    except StepEngineError as error:
        return print_error(format_error(error))


def print_error(message: str, code: Exit = Exit.USAGE) -> Exit:
    """Print one message on stderr and return *code*."""
    print(f"stepengine: {visible(message)}", file=sys.stderr)
    return code
