"""``stepengine answer``: answer a question of a run that another process has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from stepengine.cli.deployment import App, Db, Run, find_journal, operate, post_to_journal
from stepengine.cli.exits import Exit
from stepengine.cli.settings import UsageProblem
from stepengine.cli.trusting import refuse_inside
from stepengine.data.questions import Answer, AnswerLike

if TYPE_CHECKING:
    from stepengine.durable import Operator

__all__ = ("answer",)


def answer(
    run: Run,
    question: Annotated[
        str, typer.Argument(metavar="QUESTION", help="The question's id; `stepengine status RUN` lists them.")
    ],
    value: Annotated[str, typer.Argument(metavar="VALUE", help="The answer.")],
    *,
    also: Annotated[
        list[str] | None,
        typer.Option("--answer", help="A question that was asked together with it.", metavar="ID=TEXT"),
    ] = None,
    always: Annotated[
        bool, typer.Option("--always", help="Allow such calls for the rest of the session, without asking.")
    ] = False,
    db: Db = "",
    app: App = "stepengine",
) -> Exit:
    """
    Answer a question of a run in another process.

    RUN is a durable run with --db, or a journal or recorded run: of these the answer waits in the mailbox beside the
    journal for the process that has the run, or for `stepengine resume` or `serve`. No worker need be alive.
    Questions that were asked at once are answered at once.

    Examples:
      stepengine answer runs/4f2a.jsonl q1 Friday
      stepengine answer review-17 q3 yes
      stepengine answer review-17 q4 yes --always
    """
    from stepengine.cli.journals import answers_of

    refuse_inside("stepengine answer")
    agreed = Answer(text=value, remember="session") if always else value
    if isinstance(agreed, Answer) and not agreed.agrees:
        msg = f"--always goes with yes, not with {value!r}: what is refused is refused once"
        raise UsageProblem(msg)
    given: dict[str, AnswerLike] = {question: agreed, **answers_of(also or ())}

    if (journal := find_journal(run, db)) is not None:
        return post_to_journal(lambda post: post.answer_journal(journal, given))

    async def sent(operator: Operator) -> Exit:
        await operator.answer(run, given)
        return Exit.COMPLETED

    return operate(db, sent, app=app)
