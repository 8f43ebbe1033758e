"""``stepengine cancel``: cancel a run that another process has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepengine.cli.deployment import App, Db, Run, find_journal, operate, post_to_journal
from stepengine.cli.exits import Exit
from stepengine.cli.screen.render import say

if TYPE_CHECKING:
    from stepengine.durable import Operator

__all__ = ("cancel",)


def cancel(run: Run, *, db: Db = "", app: App = "stepengine") -> Exit:
    """
    Cancel a run in another process.

    Everything below it ends, too. What a worker has is interrupted within a second; a tool that must not be interrupted
    ends first. `stepengine deploy retry` resumes it. RUN is a durable run with --db, or a journal or recorded run: whoever has it ends it within
    seconds, and whoever resumes it ends it at once.

    Examples:
      stepengine cancel review-17
      stepengine cancel runs/4f2a.jsonl
    """
    if (journal := find_journal(run, db)) is not None:
        return post_to_journal(lambda post: post.cancel_journal(journal))

    async def cancelled(operator: Operator) -> Exit:
        ended = await operator.cancel(run)
        say(f"cancelled: {', '.join(ended)}" if ended else f"{run} had ended")
        return Exit.COMPLETED

    return operate(db, cancelled, app=app)
