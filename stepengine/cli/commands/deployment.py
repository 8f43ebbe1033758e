"""
What is done to runs from outside, by somebody who does not hold them.

``stepengine submit``, ``status``, ``answer``, ``say``, ``cancel``, ``retry``, ``takeover``, ``gc`` and ``migrate`` need the database of durable runs
and nothing else: no agents, no models, no keys. ``answer``, ``say`` and ``cancel`` take the mailbox of a journal as well.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias
from urllib.parse import urlsplit

import attrs
import typer

from stepengine.cli.exits import Exit, complain, exit_code
from stepengine.cli.options import Json, parse_age_option
from stepengine.cli.screen.render import dumps, json_of, message_of, one_line, print_output, say, visible
from stepengine.cli.settings import UsageProblem
from stepengine.cli.trusting import refuse_inside
from stepengine.data.questions import Answer, AnswerLike
from stepengine.data.state import RunInfo, RunResult
from stepengine.errors import JournalError, ReplayDivergence, StepEngineError

if TYPE_CHECKING:
    from stepengine.durable import Operator, Overview, TakenOver, TurnView, Upkeep, Waiting
    from stepengine.journal import Journal

__all__ = (
    "App",
    "Db",
    "Pool",
    "Run",
    "answer",
    "cancel",
    "collect",
    "database_of",
    "migrate",
    "report_problems",
    "retry",
    "say_to",
    "status",
    "submit",
    "takeover",
)

VARIABLE = "STEPENGINE_DB"
Db: TypeAlias = Annotated[
    str,
    typer.Option(
        "--db", help=f"The PostgreSQL database, or @FILE with its URL; default: ${VARIABLE}.", metavar="URL|@FILE"
    ),
]
App: TypeAlias = Annotated[str, typer.Option(help="The deployment's name.")]
Pool: TypeAlias = Annotated[str, typer.Option(help="Which workers: those of this pool.")]
Run: TypeAlias = Annotated[str, typer.Argument(metavar="RUN", help="The run's id, as `stepengine submit` printed it.")]


def database_of(given: str) -> str:
    """
    Return the database that was typed, else that of the variable.

    Raises:
        UsageProblem: when there is none.
    """
    if given:
        if "://" in given and urlsplit(given).password:
            complain(
                f"the password in --db can be read in the list of processes; {VARIABLE} or --db @FILE keeps it out"
            )
        return given
    named = os.environ.get(VARIABLE, "").strip()
    if not named:
        msg = f"which database? Set {VARIABLE}, or give --db URL or --db @FILE with the URL in it"
        raise UsageProblem(msg)
    return named


def report_problems(doing: Coroutine[object, Any, Exit]) -> Exit:
    """Do something in a deployment; what keeps it from being done is one line and its exit code."""
    from stepengine.durable import DatabaseAway, ExecutorBusy

    try:
        return asyncio.run(doing)
    except DatabaseAway as error:
        return complain(message_of(error), Exit.AWAY)
    except ExecutorBusy as error:
        return complain(message_of(error), Exit.BUSY)
    except ReplayDivergence as error:
        return complain(message_of(error), Exit.DIVERGED)


def operate(db: str, act: Callable[[Operator], Awaitable[Exit]], *, app: str, pool: str = "default") -> Exit:
    """Do something with the runs of a database, and say what keeps it from being done."""

    async def acted() -> Exit:
        from stepengine.durable import Operator

        async with await Operator.connect(database_of(db), app=app, pool=pool) as operator:
            return await act(operator)

    return report_problems(acted())


def submit(
    agent: Annotated[str, typer.Argument(metavar="AGENT", help="The agent's id, which a worker knows.")],
    *,
    db: Db = "",
    prompt: Annotated[str, typer.Option(help="What it should do; - reads it from stdin.", metavar="TEXT")] = "",
    params: Annotated[str, typer.Option(help="A JSON object.", metavar="JSON")] = "",
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
      stepengine submit reviewer --prompt "Look at src/" --id review-17
      stepengine submit reviewer --prompt - --wait < task.txt
      stepengine submit helper --prompt "Tomorrow?" --session ann --wait
    """
    given = _object(params)

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


def _object(text: str) -> dict[str, Any] | None:
    if not text:
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        msg = f"--params is not JSON: {error}"
        raise UsageProblem(msg) from None
    if not isinstance(found, dict):
        msg = f'--params is a JSON object, such as {{"folder": "src"}}, not {type(found).__name__}'
        raise UsageProblem(msg)
    return found


async def _wait_for_result(operator: Operator, run: str, *, as_json: bool) -> Exit:
    from stepengine.durable import DurableEngine

    async with DurableEngine(db=operator.url, works=False, app=operator.app) as engine:
        result: RunResult = await engine.result(run)
    if as_json:
        print(dumps({"run": run, **json_of(result)}))
    else:
        print_output(result.output)
    for question in result.pending_questions:
        complain(f"{question.text} -> stepengine answer {run} {question.id} VALUE")
    for wait in result.waits_for:
        if wait.said:
            complain(f"waits for {wait.said}")
    if result.error is not None:
        complain(str(result.error))
    return exit_code(result)


def status(
    run: Annotated[str, typer.Argument(metavar="RUN", help="One run, with those below it.")] = "",
    *,
    db: Db = "",
    executors: Annotated[
        bool, typer.Option("--executors", help="Only the workers: who lives, and who has runs.")
    ] = False,
    queues: Annotated[bool, typer.Option("--queues", help="Only the queues, as the database has them.")] = False,
    rates: Annotated[
        bool, typer.Option("--rates", help="Only what providers are asked, where workers limit that.")
    ] = False,
    session: Annotated[
        str, typer.Option(help="One session: its turns, and what was report_problems.", metavar="SESSION")
    ] = "",
    sessions: Annotated[bool, typer.Option("--sessions", help="Only the sessions.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Also count rows that are not portable JSON.")] = False,
    as_json: Json = False,
    app: App = "stepengine",
) -> Exit:
    """
    Show a deployment: runs, workers alive and dead, releases.

    Without RUN: how many runs are in which state and how old the oldest is; the workers, those without runs too, and
    whether a process holds their lock; releases of which no worker lives, whose runs wait for ever; runs that kill
    their workers. With RUN: that run, what is below it, and its open questions.

    Leaves with 1 when something needs a hand: a dead worker has runs, a release has no worker, a run is poison, a row
    cannot be read.

    Examples:
      stepengine status
      stepengine status review-17
      stepengine status --executors --json
      stepengine status --session ann:chat-1
    """

    async def shown(operator: Operator) -> Exit:
        if run:
            return await _one_run(operator, run, as_json=as_json)
        if session:
            return await _one_session(operator, session, as_json=as_json)
        if sessions:
            return await _sessions(operator, as_json=as_json)
        from stepengine.durable import Upkeep

        upkeep = Upkeep(operator)
        if queues:
            return await _queues(upkeep, as_json=as_json)
        if rates:
            return await _rates(upkeep, as_json=as_json)
        view = await upkeep.overview(check=check)
        if as_json:
            print(dumps(attrs.asdict(view)))
        else:
            print("\n".join(_overview(view, only_executors=executors)))
        return Exit.FAILED if _needs_a_hand(view) else Exit.COMPLETED

    return operate(db, shown, app=app)


def _needs_a_hand(view: Overview) -> bool:
    return bool(
        any(not each.is_alive for each in view.executors)
        or any(not each.has_worker for each in view.releases)
        or view.poison
        or view.unreadable
    )


def _overview(view: Overview, *, only_executors: bool) -> list[str]:
    lines: list[str] = []
    if not only_executors:
        lines += _columns(
            "STATE RUNS OLDEST", [(s, str(n), _age(view.oldest[s])) for s, n in sorted(view.states.items())]
        )
        lines.append("")
    rows = [
        (visible(e.id, strict=True), "alive" if e.is_alive else "DEAD", str(e.pending), ", ".join(e.releases))
        for e in view.executors
    ]
    lines += _columns("EXECUTOR STATE HAS RELEASES", rows)
    dead = [e.id for e in view.executors if not e.is_alive]
    lines += [f"  -> stepengine takeover {visible(name, strict=True)}" for name in dead]
    for each in view.releases if not only_executors else ():
        if not each.has_worker:
            lines.append(f"release {each.id}: no worker of it lives, and {each.runs} runs wait for one")
    if view.poison:
        lines.append(
            f"{view.poison} runs were cancelled since they killed their workers; `stepengine retry RUN` tries again"
        )
    for table, count in (view.unreadable or {}).items():
        lines.append(f"{table}: {count} rows are not portable JSON; some client writes with another serializer")
    return lines


def _columns(head: str, rows: Sequence[tuple[str, ...]]) -> list[str]:
    table: list[tuple[str, ...]] = [tuple(head.split()), *rows]
    widths = [max([len(row[column]) for row in table]) for column in range(len(table[0]))]
    return ["  ".join([cell.ljust(width) for cell, width in zip(row, widths, strict=True)]).rstrip() for row in table]


def _age(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{int(seconds // size)}{unit}"
    return f"{int(seconds)}s"


async def _one_run(operator: Operator, run: str, *, as_json: bool) -> Exit:
    tree = await operator.tree(run)
    asked: list[Waiting] = await operator.waiting(run)
    waits = await operator.waits(run)
    if as_json:
        questions = [{"run": w.run, "id": q.id, "text": q.text} for w in asked for q in w.questions]
        waiting = [{"run": each, "kind": wait.kind, "waits_for": wait.said} for each, wait in waits]
        print(dumps({"runs": [attrs.asdict(each) for each in tree], "questions": questions, "waits": waiting}))
        return Exit.COMPLETED
    rows = [(each.id, each.state, each.agent, each.executor or "-", each.release or "-") for each in tree]
    print("\n".join(_columns("RUN STATE AGENT EXECUTOR RELEASE", rows)))
    for each, wait in waits:
        print(f"{each} waits for {wait.said}")
    _show_questions(run, asked)
    return Exit.COMPLETED


async def _sessions(operator: Operator, *, as_json: bool) -> Exit:
    found = await operator.sessions.all()
    if as_json:
        print(dumps([attrs.asdict(each) for each in found]))
        return Exit.COMPLETED
    rows = [(one_line(each.id, 60), str(each.turns), each.state, each.agent) for each in found]
    print("\n".join(_columns("SESSION TURNS STATE AGENT", rows)))
    return Exit.COMPLETED


async def _one_session(operator: Operator, session: str, *, as_json: bool) -> Exit:
    turns = await operator.sessions.turns(session)
    if not turns:
        msg = f"there is no session {session!r} in this database; `stepengine status --sessions` lists them"
        raise JournalError(msg)
    from stepengine.sessions import messages_to_json

    kept = await operator.sessions.load(session)
    asked = [] if kept.journal is None else await operator.waiting(kept.journal)
    if as_json:
        questions = [{"run": w.run, "id": q.id, "text": q.text} for w in asked for q in w.questions]
        messages = messages_to_json(kept.messages)
        print(dumps({"turns": [attrs.asdict(turn) for turn in turns], "questions": questions, "messages": messages}))
        return Exit.COMPLETED
    rows = [(str(turn.number), one_line(turn.run, 60), _shown_state(turn), turn.agent) for turn in turns]
    print("\n".join(_columns("TURN RUN STATE AGENT", rows)))
    for message in kept.messages:
        if message.text:
            print(f"{message.role}: {one_line(message.text, 400)}")
    _show_questions(kept.journal or "", asked)
    return Exit.COMPLETED


def _shown_state(turn: TurnView) -> str:
    if turn.answered is not None:
        return f"answer to {one_line(turn.answered, 60)}"
    return "no answer" if turn.rejected else "in line" if turn.is_in_line else turn.state


def _show_questions(run: str, asked: Sequence[Waiting]) -> None:
    for waiting in asked:
        for question in waiting.questions:
            print(f"  ? {one_line(question.id, 60)}: {one_line(question.text, 120)}")
            print(f"    -> stepengine answer {run} {one_line(question.id, 60)} VALUE")
            if question.remember is not None:
                print(f"    --always: {one_line(str(question.remember['id']), 120)}")


async def _queues(upkeep: Upkeep, *, as_json: bool) -> Exit:
    found = await upkeep.queues()
    if as_json:
        print(dumps([attrs.asdict(queue) for queue in found]))
        return Exit.COMPLETED
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
    print("\n".join(_columns("QUEUE PER-WORKER ALL LIMIT POLLING", rows)))
    return Exit.COMPLETED


async def _rates(upkeep: Upkeep, *, as_json: bool) -> Exit:
    found = await upkeep.rates()
    if as_json:
        print(dumps([attrs.asdict(rate) for rate in found]))
        return Exit.COMPLETED
    rows = [(each.account, *[str(n) for n in attrs.astuple(each)[1:]]) for each in found]
    print("\n".join(_columns("ACCOUNT UNDER-WAY WAITING REQUESTS/MIN TOKENS/MIN", rows)))
    return Exit.COMPLETED


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
    Answer what a run asks that somebody else has in hands.

    RUN is a durable run with --db, or a journal or recorded run: of these the answer waits in the mailbox beside the
    journal for the process that has the run, or for `stepengine wake`, `serve` or `resume`. No worker need be alive.
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

    if (journal := _find_journal(run, db)) is not None:
        return _post(lambda post: post.answer_journal(journal, given))

    async def sent(operator: Operator) -> Exit:
        await operator.answer(run, given)
        return Exit.COMPLETED

    return operate(db, sent, app=app)


def _find_journal(run: str, db: str) -> Journal | None:
    """Return the journal that is meant; ``None`` for a durable run, as every id is that names no journal where a database is set."""
    from stepengine.cli.journals import journal_at

    if db:
        return None
    try:
        return journal_at(run)
    except UsageProblem:
        if os.environ.get(VARIABLE, "").strip():
            return None
        raise


def _post(post: Callable[[Any], object]) -> Exit:
    """Let *post* put something into a mailbox by what `posting` has, which is loaded only here."""
    from stepengine.engine import posting

    try:
        post(posting)
    except StepEngineError as error:
        return complain(error.message, Exit.FAILED)
    return Exit.COMPLETED


def say_to(
    run: Run,
    text: Annotated[str, typer.Argument(metavar="TEXT", help="What it is told.")],
    *,
    message_id: Annotated[str, typer.Option("--id", help="The message's id: the same again is the same message.")] = "",
    db: Db = "",
    app: App = "stepengine",
) -> Exit:
    """
    Say something to a run that somebody else has in hands.

    It becomes a user message before the run's next model call. A run that ends before is not told any more; the next turn of
    a session is `stepengine submit --session`. RUN is a durable run with --db, or a journal or recorded run.

    Examples:
      stepengine say review-17 "Leave the tests out."
    """
    refuse_inside("stepengine say")
    if (journal := _find_journal(run, db)) is not None:
        return _post(lambda post: post.tell_journal(journal, text, id=message_id or None))

    async def sent(operator: Operator) -> Exit:
        await operator.say(run, text, id=message_id or None)
        return Exit.COMPLETED

    return operate(db, sent, app=app)


def cancel(run: Run, *, db: Db = "", app: App = "stepengine") -> Exit:
    """
    Cancel a run that somebody else has in hands.

    Everything below it ends, too. What a worker has is interrupted within a second; a tool that must not be interrupted
    ends first. `stepengine retry` resumes it. RUN is a durable run with --db, or a journal or recorded run: whoever has it ends it within
    seconds, and whoever resumes it ends it at once.

    Examples:
      stepengine cancel review-17
      stepengine cancel runs/4f2a.jsonl
    """
    if (journal := _find_journal(run, db)) is not None:
        return _post(lambda post: post.cancel_journal(journal))

    async def cancelled(operator: Operator) -> Exit:
        ended = await operator.cancel(run)
        say(f"cancelled: {', '.join(ended)}" if ended else f"{run} had ended")
        return Exit.COMPLETED

    return operate(db, cancelled, app=app)


def retry(
    run: Run,
    *,
    release: Annotated[str, typer.Option(help="The release that resumes it; default: its own.")] = "",
    db: Db = "",
    app: App = "stepengine",
) -> Exit:
    """
    Let a durable run that stopped go on after its last record.

    For one that was cancelled, that stopped since the code does something else than is recorded (after that was put
    right), or that was set aside since workers died of it. Nothing that is recorded is done again.

    Examples:
      stepengine retry review-17
    """

    async def again(operator: Operator) -> Exit:
        await operator.retry(run, release=release or None)
        return Exit.COMPLETED

    return operate(db, again, app=app)


def takeover(
    executor: Annotated[str, typer.Argument(metavar="EXECUTOR", help="The dead worker's --executor.")] = "",
    *,
    watch: Annotated[
        bool, typer.Option("--watch", help="Take over every dead worker, for ever: the fail-over.")
    ] = False,
    grace: Annotated[float, typer.Option(help="With --watch: seconds that a worker may be away.", min=0)] = 30.0,
    force: Annotated[
        bool, typer.Option("--force", help="Though its process holds its lock: its machine is cut off.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")] = False,
    db: Db = "",
    app: App = "stepengine",
) -> Exit:
    """
    Give the runs of a dead worker to the living.

    A worker holds a lock for as long as it lives; where the lock is free, its runs go back into their queues. Doing it
    twice does nothing the second time. A run of which workers died five times without its getting a step further is
    cancelled as poison.

    --watch does this by itself for every worker that has been away for --grace seconds. Run it on two machines: one acts,
    the other stands by.

    Leaves with:
      0    done
      4    the worker is alive
      6    the database cannot be reached

    Examples:
      stepengine takeover web-1
      stepengine takeover --watch --grace 20
    """
    if bool(executor) == watch:
        msg = "whose runs? Name one EXECUTOR (`stepengine status --executors` lists them), or give --watch for all"
        raise UsageProblem(msg)

    if watch and (force or dry_run):
        msg = "--watch acts by itself and never by force: --force and --dry-run go with one EXECUTOR"
        raise UsageProblem(msg)

    async def taken(operator: Operator) -> Exit:
        from stepengine.durable import Upkeep

        upkeep = Upkeep(operator)
        if watch:
            print(f"stepengine: taking over whoever is away for {grace:g} s", file=sys.stderr, flush=True)
            async for each in upkeep.watch(grace=grace):
                print(_describe_takeover(each), flush=True)
        found = await upkeep.takeover(executor, force=force, dry_run=dry_run)
        print(
            "\n".join([_describe_takeover(each) for each in found])
            or f"executor {visible(executor, strict=True)} has no runs"
        )
        return Exit.COMPLETED

    return operate(db, taken, app=app)


def _describe_takeover(each: TakenOver) -> str:
    again = f"  (taken over {each.times} times without getting further)" if each.times > 1 else ""
    return f"{each.outcome}  {each.run}  from {each.executor}{again}"


def collect(
    *,
    older_than: Annotated[str, typer.Option(help="Age since they ended, such as 30d, 12h or 90m.", metavar="AGE")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say which.")] = False,
    db: Db = "",
    app: App = "stepengine",
) -> Exit:
    """
    Delete durable runs that ended long ago.

    Whole trees, and only those of which everything has ended. Nothing is ever deleted by itself.

    Examples:
      stepengine gc --older-than 30d --dry-run
    """
    age = parse_age_option("--older-than", older_than)

    async def deleted(operator: Operator) -> Exit:
        from stepengine.durable import Upkeep

        roots = await Upkeep(operator).collect(age.total_seconds(), dry_run=dry_run)
        if dry_run:
            print("\n".join(roots))
        say(f"{len(roots)} runs {'would be' if dry_run else 'were'} deleted, with what was below them")
        return Exit.COMPLETED

    return operate(db, deleted, app=app)


def migrate(
    *,
    role: Annotated[str, typer.Option(help="The role of workers and clients, which is given what they need.")] = "",
    db: Db = "",
) -> Exit:
    """
    Make and update the tables of durable runs.

    With a role that may: workers started with --no-migrate then need none of its rights.

    Examples:
      stepengine migrate --db @admin-url --role stepengine_worker
    """

    async def made() -> Exit:
        from stepengine.durable import migrate as make

        await make(database_of(db), role=role or None)
        return Exit.COMPLETED

    return report_problems(made())
