"""``stepengine say``: send a message to a run that another process has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from stepengine.cli.deployment import App, Db, Run, find_journal, operate, post_to_journal
from stepengine.cli.exits import Exit
from stepengine.cli.trusting import refuse_inside

if TYPE_CHECKING:
    from stepengine.durable import Operator

__all__ = ("say_to",)


def say_to(
    run: Run,
    text: Annotated[str, typer.Argument(metavar="TEXT", help="What it is told.")],
    *,
    message_id: Annotated[str, typer.Option("--id", help="The message's id: the same again is the same message.")] = "",
    db: Db = "",
    app: App = "stepengine",
) -> Exit:
    """
    Send a message to a run in another process.

    It becomes a user message before the run's next model call. A run that ends before is not told any more; the next turn of
    a session is `stepengine submit --session`. RUN is a durable run with --db, or a journal or recorded run.

    Examples:
      stepengine say review-17 "Leave the tests out."
    """
    refuse_inside("stepengine say")
    if (journal := find_journal(run, db)) is not None:
        return post_to_journal(lambda post: post.tell_journal(journal, text, id=message_id or None))

    async def sent(operator: Operator) -> Exit:
        await operator.say(run, text, id=message_id or None)
        return Exit.COMPLETED

    return operate(db, sent, app=app)
