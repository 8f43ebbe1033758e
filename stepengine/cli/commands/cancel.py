"""``stepengine cancel``: cancel a run that another process has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepengine.cli.deployment import App, Db, Run, find_journal_unless_durable, run_mailbox_command, run_with_operator
from stepengine.cli.exits import Exit
from stepengine.cli.screen.render import print_visible

if TYPE_CHECKING:
    from stepengine.durable import Operator


def cancel(run: Run, *, db: Db = "", app: App = "stepengine") -> Exit:
    """
    Cancel a run in another process.

    Its children end, too. A worker interrupts the run within a second, after any tool that must not be interrupted.
    `stepengine deploy retry` resumes it. RUN is a durable run with --db, or a journal or recorded run: the process
    that runs it stops within seconds, and a process that resumes it stops at once.

    Examples:
      stepengine cancel review-17
      stepengine cancel runs/4f2a.jsonl
    """
    if (journal := find_journal_unless_durable(run, db)) is not None:
        return run_mailbox_command(lambda post: post.send_cancel(journal))

    async def cancel_run(operator: Operator) -> Exit:
        """Cancel a durable run, and print the ids of the cancelled runs."""
        ended = await operator.cancel(run)
        print_visible(f"cancelled: {', '.join(ended)}" if ended else f"{run} had already ended")
        return Exit.COMPLETED

    return run_with_operator(db, cancel_run, app=app)
