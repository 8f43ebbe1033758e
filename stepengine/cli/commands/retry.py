"""``stepengine deploy retry``: let a stopped durable run continue after its last record."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from stepengine.cli.deployment import App, Db, Run, run_with_operator
from stepengine.cli.exits import Exit

if TYPE_CHECKING:
    from stepengine.durable import Operator


def retry(
    run: Run,
    *,
    release: Annotated[str, typer.Option(help="Release that resumes it; default: its own.")] = "",
    db: Db = "",
    app: App = "stepengine",
) -> Exit:
    """
    Resume a stopped durable run after its last record.

    Use it for a run that was cancelled, that diverged from its record (after the code is fixed), or that was set
    aside because it crashed workers. Recorded effects are not repeated.

    Examples:
      stepengine deploy retry review-17
    """

    async def retry_run(operator: Operator) -> Exit:
        """Resume the stopped run after its last record."""
        await operator.retry(run, release=release or None)
        return Exit.COMPLETED

    return run_with_operator(db, retry_run, app=app)
