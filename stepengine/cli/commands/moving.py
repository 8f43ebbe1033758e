"""
What is done to durable runs with their agents at hand.

``stepengine journal export``, ``journal import``, ``deploy release``, and ``fork`` with a database: the records hold no requests, so that the
agents repeat what is recorded, and nothing is performed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import attrs
import typer
from attrs import frozen

from stepengine.cli.commands.worker import offered_by
from stepengine.cli.deployment import App, Db, Pool, Run, database_of, report_problems
from stepengine.cli.exits import Exit, complain
from stepengine.cli.options import Json, TrustAnswers
from stepengine.cli.screen.render import dumps, message_of, visible
from stepengine.cli.settings import UsageProblem
from stepengine.cli.trusting import refuse_foreign, refuse_inside
from stepengine.errors import JournalError, ReplayDivergence

if TYPE_CHECKING:
    from stepengine.durable import DurableEngine

__all__ = ("Agents", "export", "fork_durable", "import_", "move")

Agents: TypeAlias = Annotated[
    str,
    typer.Option("--agents", help="The agents: as MODULE of `stepengine deploy worker`.", metavar="MODULE"),
]


def _with_agents(
    module: str, db: str, act: Callable[[DurableEngine], Awaitable[Exit]], *, app: str, pool: str, release: str = ""
) -> Exit:
    refuse_foreign(module)
    offered = offered_by(module)

    async def acted() -> Exit:
        from stepengine.durable import DurableEngine

        async with DurableEngine(
            offered.agents, offered.tools, offered.models, db=database_of(db), works=False, app=app, pool=pool,
            release=release or None, **offered.options,
        ) as engine:  # fmt: skip
            return await act(engine)

    return report_problems(acted())


def export(
    run: Run,
    *,
    agents: Agents = "agents",
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="The journal; default: RUN.jsonl.", metavar="FILE")
    ] = None,
    db: Db = "",
    app: App = "stepengine",
    pool: Pool = "default",
) -> Exit:
    """
    Write a durable run into an ordinary journal file.

    To replay, fork, compare or look at what happened in production. Give the agents of the run's own release.

    Leaves with 5 when these agents ask for something else than is recorded.

    Examples:
      stepengine journal export review-17 --agents my_agents.py -o review-17.jsonl
    """
    into = out or Path(f"{run.replace('/', '-')}.jsonl")

    async def written(engine: DurableEngine) -> Exit:
        await engine.export(run, into)
        print(into)
        return Exit.COMPLETED

    return _with_agents(agents, db, written, app=app, pool=pool)


def import_(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A journal of a run that has not ended.")],
    *,
    agents: Agents = "agents",
    release: Annotated[str, typer.Option(help="Which release resumes it; default: that of these agents.")] = "",
    trust_answers: TrustAnswers = False,
    db: Db = "",
    app: App = "stepengine",
    pool: Pool = "default",
) -> Exit:
    """
    Let a run of a journal file go on as a durable run.

    It goes on where FILE ends, and nothing that is recorded is done again. FILE stays as it is, and must not be resumed
    elsewhere. Prints the run's id.

    FILE is refused where it allows calls that have not begun and is not as your own commands left it: whoever wrote it
    could have said yes. `stepengine resume` asks again; --trust-answers takes what stands there.

    Examples:
      stepengine journal import run.jsonl --agents my_agents.py
    """
    from stepengine.cli.journals import journal_at, refuse_foreign_yes

    if trust_answers:
        refuse_inside("import --trust-answers")
    else:
        journal = journal_at(file)
        refuse_foreign_yes(journal, journal.history())

    async def continued(engine: DurableEngine) -> Exit:
        print(await engine.continued(journal_at(file)))
        return Exit.COMPLETED

    return _with_agents(agents, db, continued, app=app, pool=pool, release=release)


def fork_durable(
    run: str,
    at: str,
    edit: Callable[[Any], object] | None,
    *,
    agents: str,
    db: str,
    allow_repeat: bool,
    app: str,
    pool: str,
) -> Exit:
    """Fork a run of a database with *edit* of the last outcome that is kept, and print the new run's id."""

    async def forked(engine: DurableEngine) -> Exit:
        print(await engine.fork(run, at=at, edit=edit, allow_repeat=allow_repeat))
        return Exit.COMPLETED

    return _with_agents(agents, db, forked, app=app, pool=pool)


@frozen
class Moved:
    """
    What became of a run that should go on with another release.

    Attributes:
        run: Its id.
        outcome: ``moved``, ``would move``, ``diverges`` (it was left alone), or ``ended`` meanwhile.
        why: Where it diverges.
    """

    run: str
    outcome: str
    why: str = ""


def move(
    of: Annotated[str, typer.Argument(metavar="FROM", help="The release that has runs which have not ended.")],
    to: Annotated[str, typer.Argument(metavar="TO", help="The release that resumes them; its workers are up.")],
    *,
    agents: Agents = "agents",
    check: Annotated[bool, typer.Option("--check", help="Only say which would move, and which diverge.")] = False,
    only: Annotated[str, typer.Option(help="One run; default: all that have not ended.", metavar="RUN")] = "",
    as_json: Json = False,
    db: Db = "",
    app: App = "stepengine",
    pool: Pool = "default",
) -> Exit:
    """
    Let runs of one release go on with another.

    First what is recorded is repeated over the agents of TO, which nothing is performed by. A run that would diverge is
    told and left alone: it ends with a worker of FROM. One that fits is interrupted, keeps all that is recorded and every
    answer that waits for it, and goes on with the workers of TO.

    Leaves with:
      0    all moved, or would
      5    some diverge
      6    the database cannot be reached

    Examples:
      stepengine deploy release 1.4 1.5 --agents my_agents.py --check
      stepengine deploy release 1.4 1.5 --agents my_agents.py
    """

    async def moved(engine: DurableEngine) -> Exit:
        from stepengine.durable import Upkeep

        found = [only] if only else await Upkeep(engine.operator).unfinished(of)
        told = [await _move_run(engine, run, of, check=check) for run in found]
        if as_json:
            print(dumps([attrs.asdict(each) for each in told]))
        else:
            print("\n".join([_line(each) for each in told]) or f"no run of release {visible(of, strict=True)} is left")
        return Exit.DIVERGED if any(each.outcome == "diverges" for each in told) else Exit.COMPLETED

    if of == to:
        msg = f"FROM and TO are both {of!r}; `stepengine deploy status` lists the releases"
        raise UsageProblem(msg)
    return _with_agents(agents, db, moved, app=app, pool=pool, release=to)


async def _move_run(engine: DurableEngine, run: str, of: str, *, check: bool) -> Moved:
    view = await engine.operator.run(run)
    if view.release != of:
        msg = f"the run {run!r} belongs to release {view.release}, not to {of}"
        raise JournalError(msg)
    differs = await engine.fits(run)
    if differs is not None:
        return Moved(run, "diverges", differs.message)
    if check:
        return Moved(run, "would move")
    try:
        await engine.move(run)
    except ReplayDivergence as error:  # it went on since it was looked at, and what it recorded meanwhile does not fit
        return Moved(run, "diverges", error.message)
    except JournalError as error:
        complain(message_of(error))
        return Moved(run, "ended")
    return Moved(run, "moved")


def _line(each: Moved) -> str:
    why = "".join([f"\n    {visible(line)}" for line in each.why.splitlines()])
    return f"{each.outcome:<11}{visible(each.run, strict=True)}{why}"
