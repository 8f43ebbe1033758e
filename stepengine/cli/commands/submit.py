"""``stepengine deploy submit``: submit a durable run."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from stepengine.cli.deployment import App, Db, Pool, run_with_operator
from stepengine.cli.exits import Exit, choose_exit_code, print_error
from stepengine.cli.options import Json, Params, parse_json_params, read_text_or_stdin
from stepengine.cli.screen.render import print_output, result_to_json, to_ascii_json
from stepengine.data.state import RunInfo, RunResult

if TYPE_CHECKING:
    from stepengine.durable import Operator


def submit(
    agent: Annotated[str, typer.Argument(metavar="AGENT", help="The agent's id, as a worker defines it.")],
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="What to do; - reads it from stdin.")] = "",
    *,
    db: Db = "",
    params: Params = "",
    run_id: Annotated[
        str, typer.Option("--id", help="Id of the run; a second submission with the same id starts no new run.")
    ] = "",
    priority: Annotated[int, typer.Option(help="Priority: 0 runs first, then 1; larger numbers run later.", min=0)] = 0,
    release: Annotated[str, typer.Option(help="Release that runs it; default: the latest.")] = "",
    session: Annotated[
        str, typer.Option(help="Session that the run continues as its next turn.", metavar="SESSION")
    ] = "",
    wait: Annotated[bool, typer.Option("--wait", help="Wait for its end, and print the output.")] = False,
    as_json: Json = False,
    pool: Pool = "default",
    app: App = "stepengine",
) -> Exit:
    """
    Submit a durable run, and print its id.

    A worker runs it to its end, even if workers crash meanwhile. Submitting the same --id again has no effect.

    With --session, the run is a turn of that session: it starts after the earlier turns and continues their
    conversation. If the session's agent waits for an answer, the prompt is the answer.

    Exit codes:
      0    it is submitted; with --wait, it completed
      1    with --wait: the run failed
      3    with --wait: it waits for an answer
      4    with --wait: a limit was reached
      5    with --wait: it stopped, because the code diverged from its record
      6    the database cannot be reached

    Examples:
      stepengine deploy submit reviewer "Look at src/" --id review-17
      stepengine deploy submit reviewer - --wait < task.txt
      stepengine deploy submit helper "Tomorrow?" --session ann --wait
    """
    given = parse_json_params(params)

    async def submit_run(operator: Operator) -> Exit:
        """Submit the run and print its id; with ``--wait``, wait for its end and print the result."""
        run = await operator.submit(
            agent, read_text_or_stdin(prompt), id=run_id or None, params=given, priority=priority, release=release or None,
            info=RunInfo(session_id=session or None),
        )  # fmt: skip
        if not wait:
            print(to_ascii_json({"run": run}) if as_json else run)
            return Exit.COMPLETED
        if not as_json:
            print(f"stepengine: {run}", file=sys.stderr, flush=True)
        return await _wait_and_print_result(operator, run, as_json=as_json)

    return run_with_operator(db, submit_run, app=app, pool=pool)


async def _wait_and_print_result(operator: Operator, run: str, *, as_json: bool) -> Exit:
    """Wait for the end of a durable run, and print its output or JSON; return the exit code."""
    from stepengine.cli.perform import print_warnings
    from stepengine.durable import DurableEngine

    async with DurableEngine(db=operator.url, works=False, app=operator.app) as engine:
        result: RunResult = await engine.result(run)
    if as_json:
        print(to_ascii_json({"run": run, **result_to_json(result)}))
    else:
        print_output(result.output)
    for question in result.pending_questions:
        print_error(f"{question.text} -> stepengine send {shlex.quote(run)} --answer {question.id}=TEXT")
    for wait in result.waits_for:
        if wait.awaited_text:
            print_error(f"waits for {wait.awaited_text}")
    print_warnings(result)
    if result.error is not None:
        print_error(str(result.error))
    return choose_exit_code(result)
