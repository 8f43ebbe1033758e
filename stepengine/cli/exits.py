"""How a command ends: its exit codes, what is said when it cannot go on, and how it leaves."""

from __future__ import annotations

import contextlib
import os
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

__all__ = ("EXIT_CODES", "Exit", "complain", "exit_code", "explain_errors", "leave", "run_to_exit")


class Exit(IntEnum):
    """What the command line tells its caller."""

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


def exit_code(result: RunResult) -> Exit:
    """Return the exit code of *result*; a run that nobody interrupted and that was cancelled has failed."""
    from stepengine.data.state import RunStatus

    match result.status:
        case RunStatus.COMPLETED:
            return Exit.COMPLETED
        case RunStatus.SUSPENDED:
            return Exit.SUSPENDED
        case RunStatus.MAX_STEPS | RunStatus.TRUNCATED:
            return Exit.LIMIT
        case RunStatus.FAILED | RunStatus.CANCELLED:
            return _code_of_failure(result.error)
        case _ as never:
            assert_never(never)


def _code_of_failure(error: BaseException | None) -> Exit:
    match error:
        case LimitExceeded():
            return Exit.LIMIT
        case ReplayDivergence():
            return Exit.DIVERGED
        case MissingKey() | UnknownModel():
            return Exit.USAGE
        case ChildError(__cause__=MissingKey() | UnknownModel() | ChildError() as cause):
            return _code_of_failure(cause)
        case _:
            return Exit.FAILED


EXIT_CODES = """\
Exit codes:
  0    completed
  1    the run failed
  2    wrong usage or configuration: unknown agent, wrong params, missing key
  3    suspended: an answer, a time or a message is waited for; it is printed
  4    a limit was reached, or the reply was cut; a durable worker is alive
  5    a replay did something else than its recording
  6    the database of a deployment cannot be reached
  130  interrupted (Ctrl-C)
  143  terminated (SIGTERM)

Results go to stdout, everything else to stderr."""


def leave(code: Exit) -> None:
    """
    Leave with *code*.

    Raises:
        typer.Exit: unless all is well.
    """
    if code is not Exit.COMPLETED:
        import typer

        raise typer.Exit(int(code))


def run_to_exit(app: Callable[[], object]) -> None:
    """
    Run the command line; what the system refuses is one line and an exit code of the table, never a traceback.

    Raises:
        SystemExit: always.
    """
    _stand_in_for_closed_streams()
    sys.stderr = _Stderr(sys.stderr)
    warnings.showwarning = _Warned(warnings.showwarning)
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
        # Python would flush again when it ends, and leave with a code of its own.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def _report_os_error(error: OSError) -> Exit:
    from pathlib import Path

    try:
        Path.cwd()
    except OSError:
        message, code = "the working directory was deleted; change to one that exists", Exit.USAGE
    else:
        message, code = f"the system refused: {error.strerror or error}", Exit.FAILED
    print(f"stepengine: {message}", file=sys.stderr)
    return code


def _stand_in_for_closed_streams() -> None:
    """Open ``/dev/null`` for standard streams that are closed: the next file would get their numbers."""
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != fd:
                os.dup2(opened, fd)
                os.close(opened)
            setattr(sys, name, open(fd, "r" if fd == 0 else "w", encoding="utf-8", closefd=False))  # noqa: SIM115


class _Stderr:
    """Standard error, on which nothing depends: where it cannot be written to, a run goes on and has its own exit code."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write *text*, if that can be."""
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush, if that can be."""
        with contextlib.suppress(OSError):
            self._stream.flush()


class _Warned:
    """Shows warnings: those about agent files as one line, once, with the line that is meant; others as Python does."""

    def __init__(self, before: Callable[..., None]) -> None:
        self._before = before
        self._told: set[str] = set()

    def __call__(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        *more: object,
        **named: object,
    ) -> None:
        from stepengine.engine.handler_sources import SourceWarning
        from stepengine.engine.loading import BrokenFile

        if not issubclass(category, BrokenFile | SourceWarning):
            self._before(message, category, filename, lineno, *more, **named)
            return
        text = f"{filename}:{lineno}: {message}" if issubclass(category, SourceWarning) else str(message)
        if text not in self._told:
            self._told.add(text)
            complain(text)


def explain_errors(command: Callable[[], Exit]) -> Exit:
    """Do what *command* does; what went wrong before anything ran is one message on stderr."""
    from stepengine.cli.screen.render import message_of
    from stepengine.cli.settings import UsageProblem

    try:
        return command()
    except UsageProblem as problem:
        return complain(str(problem))
    except InputError as error:
        return complain("\n  ".join([error.message, *[i for i in error.issues if i not in error.message]]))
    except StepEngineError as error:
        return complain(message_of(error))


def complain(message: str, code: Exit = Exit.USAGE) -> Exit:
    """Print one message on stderr and return *code*."""
    print(f"stepengine: {visible(message)}", file=sys.stderr)
    return code
