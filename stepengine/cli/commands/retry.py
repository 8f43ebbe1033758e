"""``stepengine deploy retry``: let a stopped durable run continue after its last record."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from stepengine.cli.deployment import App, Db, Run, operate
from stepengine.cli.exits import Exit

if TYPE_CHECKING:
    from stepengine.durable import Operator

__all__ = ("retry",)


def retry(
    run: Run,
    *,
    release: Annotated[str, typer.Option(help="The release that resumes it; default: its own.")] = "",
    db: Db = "",
    app: App = "stepengine",
) -> Exit:
    """
    Continue a stopped durable run after its last record.

    For one that was cancelled, that stopped since the code does something else than is recorded (after that was put
    right), or that was set aside since workers died of it. Nothing that is recorded is done again.

    Examples:
      stepengine deploy retry review-17
    """

    async def again(operator: Operator) -> Exit:
        await operator.retry(run, release=release or None)
        return Exit.COMPLETED

    return operate(db, again, app=app)
