"""How a command ends: what its exit codes mean, and how it leaves."""

from __future__ import annotations

import typer

from stepengine.cli.report import Exit

__all__ = ("EXIT_CODES", "leave")

EXIT_CODES = """\
\b
Exit codes:
  0    completed
  1    the run failed
  2    wrong usage or configuration: unknown agent, wrong params, missing key
  3    suspended: a question waits for an answer; its id is printed
  4    a limit was reached, or the reply was cut
  5    a replay did something else than its recording
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
        raise typer.Exit(int(code))
