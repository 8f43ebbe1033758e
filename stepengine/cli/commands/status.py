"""``stepengine deploy status``: the state of a deployment, of a run or of a session."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any

import attrs
import typer

from stepengine.cli.deployment import App, Db, run_with_operator
from stepengine.cli.exits import Exit
from stepengine.cli.options import Json
from stepengine.cli.screen.render import one_line, to_ascii_json, visible
from stepengine.data.quantities import format_age
from stepengine.errors import JournalError

if TYPE_CHECKING:
    from stepengine.durable import DeploymentMaintenance, DeploymentOverview, Operator, TurnView, Waiting


def status(
    run: Annotated[str, typer.Argument(metavar="RUN", help="One run, with its children.")] = "",
    *,
    db: Db = "",
    executors: Annotated[
        bool, typer.Option("--executors", help="Only the workers: which are alive, and which have runs.")
    ] = False,
    queues: Annotated[
        bool, typer.Option("--queues", help="Only the queues and their limits, as stored in the database.")
    ] = False,
    rates: Annotated[bool, typer.Option("--rates", help="Only the use of rate-limited providers.")] = False,
    session: Annotated[str, typer.Option(help="One session: its turns and messages.", metavar="SESSION")] = "",
    sessions: Annotated[bool, typer.Option("--sessions", help="Only the sessions.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Also count rows that are not portable JSON.")] = False,
    as_json: Json = False,
    app: App = "stepengine",
) -> Exit:
    """
    Show a deployment: runs, live and dead workers, releases.

    Without RUN: the number of runs by state and the age of the oldest; all workers, and whether each is alive;
    releases without a live worker, whose runs cannot continue; runs that crash their workers. With RUN: that run,
    its children and its open questions.

    Exits with 1 if an operator must act: a dead worker has runs, a release has no worker, a run is poison, a row
    cannot be read.

    Examples:
      stepengine deploy status
      stepengine deploy status review-17
      stepengine deploy status --executors --json
      stepengine deploy status --session ann:chat-1
    """

    async def print_status(operator: Operator) -> Exit:
        """Print the chosen part of the deployment's status, and return the exit code."""
        if run:
            return await _print_run_tree(operator, run, as_json=as_json)
        if session:
            return await _print_session(operator, session, as_json=as_json)
        if sessions:
            return await _print_sessions(operator, as_json=as_json)
        from stepengine.durable import DeploymentMaintenance

        maintenance = DeploymentMaintenance(operator)
        if queues:
            return await _print_queues(maintenance, as_json=as_json)
        if rates:
            return await _print_rate_limit_use(maintenance, as_json=as_json)
        view = await maintenance.overview(check=check)
        if as_json:
            print(to_ascii_json(attrs.asdict(view)))
        else:
            print("\n".join(_format_overview_lines(view, only_executors=executors)))
        return Exit.FAILED if _needs_attention(view) else Exit.COMPLETED

    return run_with_operator(db, print_status, app=app)


def _needs_attention(view: DeploymentOverview) -> bool:
    """Return whether a dead worker has runs, a release has no worker, a run is poison or a row is unreadable."""
    return bool(
        any(not each.is_alive for each in view.executors)
        or any(not each.has_worker for each in view.releases)
        or view.poison
        or view.unreadable
    )


def _format_overview_lines(view: DeploymentOverview, *, only_executors: bool) -> list[str]:
    """Return tables of the runs, workers and releases of a deployment, with advice; or only of the workers."""
    lines: list[str] = []
    if not only_executors:
        lines += _format_columns(
            "STATE RUNS OLDEST",
            [(s, str(n), format_age(timedelta(seconds=view.oldest[s]))) for s, n in sorted(view.states.items())],
        )
        lines.append("")
    rows = [
        (visible(e.id, strict=True), "alive" if e.is_alive else "DEAD", str(e.pending), ", ".join(e.releases))
        for e in view.executors
    ]
    lines += _format_columns("EXECUTOR STATE HAS RELEASES", rows)
    dead = [e.id for e in view.executors if not e.is_alive]
    lines += [f"  -> stepengine deploy takeover {visible(shlex.quote(name), strict=True)}" for name in dead]
    for each in view.releases if not only_executors else ():
        if not each.has_worker:
            lines.append(f"release {each.id} has no live worker, and {each.runs} runs wait for one")
    if view.poison:
        lines.append(
            f"{view.poison} runs were cancelled because they killed their workers; to try one again, run `stepengine deploy retry RUN`"
        )
    for table, count in (view.unreadable or {}).items():
        lines.append(f"{table}: {count} rows are not portable JSON; a client uses another serializer")
    return lines


def _format_columns(head: str, rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return the lines of a table with aligned columns; *head* has the column names."""
    table: list[tuple[str, ...]] = [tuple(head.split()), *rows]
    widths = [max([len(row[column]) for row in table]) for column in range(len(table[0]))]
    return ["  ".join([cell.ljust(width) for cell, width in zip(row, widths, strict=True)]).rstrip() for row in table]


def _print_values(values: Iterable[Any], head: str, rows: Sequence[tuple[str, ...]], *, as_json: bool) -> Exit:
    """Print *values* as JSON, or as a table of *rows*."""
    if as_json:
        print(to_ascii_json([attrs.asdict(value) for value in values]))
    else:
        print("\n".join(_format_columns(head, rows)))
    return Exit.COMPLETED


async def _print_run_tree(operator: Operator, run: str, *, as_json: bool) -> Exit:
    """Print a run and its children with their questions and waits, as text or JSON; return the exit code."""
    tree = await operator.tree(run)
    asked: list[Waiting] = await operator.list_questions(run)
    waits = await operator.run_waits.list_waits([run])
    if as_json:
        questions = _questions_to_json(asked)
        waiting = [{"run": each, "kind": wait.kind, "waits_for": wait.awaited_text} for each, wait in waits]
        print(to_ascii_json({"runs": [attrs.asdict(each) for each in tree], "questions": questions, "waits": waiting}))
        return Exit.COMPLETED
    rows = [(each.id, each.state, each.agent, each.executor or "-", each.release or "-") for each in tree]
    print("\n".join(_format_columns("RUN STATE AGENT EXECUTOR RELEASE", rows)))
    for each, wait in waits:
        print(f"{each} waits for {wait.awaited_text}")
    _print_questions(run, asked)
    return Exit.COMPLETED


async def _print_sessions(operator: Operator, *, as_json: bool) -> Exit:
    """Print a table or JSON of the sessions of a deployment; return the exit code."""
    found = await operator.sessions.list_sessions()
    rows = [(one_line(each.id, 60), str(each.turns), each.state, each.agent) for each in found]
    return _print_values(found, "SESSION TURNS STATE AGENT", rows, as_json=as_json)


async def _print_session(operator: Operator, session: str, *, as_json: bool) -> Exit:
    """Print the turns, messages and questions of a session; raise ``JournalError`` if it does not exist."""
    turns = await operator.sessions.list_turns(session)
    if not turns:
        msg = f"there is no session {session!r} in this database; `stepengine deploy status --sessions` lists them"
        raise JournalError(msg)
    from stepengine.sessions import messages_to_json

    kept = await operator.sessions.load(session)
    asked = [] if kept.journal is None else await operator.list_questions(kept.journal)
    if as_json:
        questions = _questions_to_json(asked)
        messages = messages_to_json(kept.messages)
        print(
            to_ascii_json(
                {"turns": [attrs.asdict(turn) for turn in turns], "questions": questions, "messages": messages}
            )
        )
        return Exit.COMPLETED
    rows = [(str(turn.number), one_line(turn.run, 60), _describe_turn_state(turn), turn.agent) for turn in turns]
    print("\n".join(_format_columns("TURN RUN STATE AGENT", rows)))
    for message in kept.messages:
        if message.text:
            print(f"{message.role}: {one_line(message.text, 400)}")
    _print_questions(kept.journal or "", asked)
    return Exit.COMPLETED


def _describe_turn_state(turn: TurnView) -> str:
    """Return the state of a turn, or the question that it answered."""
    if turn.answered is not None:
        return f"answer to {one_line(turn.answered, 60)}"
    return "no answer" if turn.rejected else "queued" if turn.is_waiting else turn.state


def _questions_to_json(open_questions: Sequence[Waiting]) -> list[dict[str, str]]:
    return [{"run": w.run, "id": q.id, "text": q.text} for w in open_questions for q in w.questions]


def _print_questions(run: str, open_questions: Sequence[Waiting]) -> None:
    for waiting in open_questions:
        for question in waiting.questions:
            print(f"  ? {one_line(question.id, 60)}: {one_line(question.text, 120)}")
            print(
                f"    -> stepengine send {visible(shlex.quote(run), strict=True)} --answer {one_line(question.id, 60)}=TEXT"
            )
            if question.remember is not None:
                print(f"    or --always {one_line(question.id, 60)}: {one_line(str(question.remember['id']), 120)}")


async def _print_queues(maintenance: DeploymentMaintenance, *, as_json: bool) -> Exit:
    """Print the queues of a deployment with their limits; return the exit code."""
    found = await maintenance.list_queue_settings()
    rows = [
        (
            queue.name,
            str(queue.worker_concurrency or "-"),
            str(queue.global_concurrency or "-"),
            "-" if queue.limit is None else f"{queue.limit}/{queue.period:g}s",
            f"{queue.polling:g}s",
        )
        for queue in found
    ]
    return _print_values(found, "QUEUE PER-WORKER ALL LIMIT POLLING", rows, as_json=as_json)


async def _print_rate_limit_use(maintenance: DeploymentMaintenance, *, as_json: bool) -> Exit:
    """Print the current use of rate-limited providers; return the exit code."""
    found = await maintenance.list_rates()
    rows = [(each.account, *[str(n) for n in attrs.astuple(each)[1:]]) for each in found]
    return _print_values(found, "ACCOUNT ACTIVE WAITING REQUESTS/MIN TOKENS/MIN", rows, as_json=as_json)
