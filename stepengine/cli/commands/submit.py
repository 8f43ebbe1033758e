"""``stepengine deploy submit``: order a durable run."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from stepengine.cli.deployment import App, Db, Pool, operate
from stepengine.cli.exits import Exit, complain, exit_code
from stepengine.cli.options import Json, Params, read_params
from stepengine.cli.screen.render import dumps, json_of, print_output
from stepengine.data.state import RunInfo, RunResult

if TYPE_CHECKING:
    from stepengine.durable import Operator

__all__ = ("submit",)


def submit(
    agent: Annotated[str, typer.Argument(metavar="AGENT", help="The agent's id, which a worker knows.")],
    *,
    db: Db = "",
    prompt: Annotated[str, typer.Option(help="What it should do; - reads it from stdin.", metavar="TEXT")] = "",
    params: Params = "",
    run_id: Annotated[str, typer.Option("--id", help="The run's id: the same again is the same run.")] = "",
    priority: Annotated[int, typer.Option(help="1 is first, larger numbers later; 0 goes before all.", min=0)] = 0,
    release: Annotated[str, typer.Option(help="Which release runs it; default: the latest.")] = "",
    session: Annotated[str, typer.Option(help="The conversation that it is the next turn of.", metavar="SESSION")] = "",
    wait: Annotated[bool, typer.Option("--wait", help="Wait for its end, and print the output.")] = False,
    as_json: Json = False,
    pool: Pool = "default",
    app: App = "stepengine",
) -> Exit:
    """
    Order a durable run, and print its id.

    A worker takes it from the database and runs it to its end, whatever dies meanwhile. Submitting the same --id again
    orders nothing twice.

    With --session it is a turn: it begins when the turns before it are over, and goes on from what they left. Where its agent
    waits for an answer in that session, it is the answer.

    Leaves with:
      0    it is ordered; with --wait, it completed
      1    with --wait: the run failed
      3    with --wait: it waits for an answer
      4    with --wait: a limit was reached
      5    with --wait: it stopped, since the code does something else than
           is recorded
      6    the database cannot be reached

    Examples:
      stepengine deploy submit reviewer --prompt "Look at src/" --id review-17
      stepengine deploy submit reviewer --prompt - --wait < task.txt
      stepengine deploy submit helper --prompt "Tomorrow?" --session ann --wait
    """
    given = read_params(params)

    async def ordered(operator: Operator) -> Exit:
        text = sys.stdin.read() if prompt == "-" else prompt
        run = await operator.submit(
            agent, text, id=run_id or None, params=given, priority=priority, release=release or None,
            info=RunInfo(session_id=session or None),
        )  # fmt: skip
        if not wait:
            print(dumps({"run": run}) if as_json else run)
            return Exit.COMPLETED
        if not as_json:
            print(f"stepengine: {run}", file=sys.stderr, flush=True)
        return await _wait_for_result(operator, run, as_json=as_json)

    return operate(db, ordered, app=app, pool=pool)


async def _wait_for_result(operator: Operator, run: str, *, as_json: bool) -> Exit:
    from stepengine.durable import DurableEngine

    async with DurableEngine(db=operator.url, works=False, app=operator.app) as engine:
        result: RunResult = await engine.result(run)
    if as_json:
        print(dumps({"run": run, **json_of(result)}))
    else:
        print_output(result.output)
    for question in result.pending_questions:
        complain(f"{question.text} -> stepengine send {run} --answer {question.id}=TEXT")
    for wait in result.waits_for:
        if wait.said:
            complain(f"waits for {wait.said}")
    if result.error is not None:
        complain(str(result.error))
    return exit_code(result)
