"""
Commands for durable runs that need the agents.

``stepengine journal export``, ``journal import``, ``deploy release``, and ``fork`` with a database. The records of durable runs contain no
requests, so the agents replay them; no effect is performed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from stepengine.cli.code_trust import refuse_inside_tool, refuse_untrusted_module
from stepengine.cli.commands.worker import load_module_contents
from stepengine.cli.deployment import App, Db, Pool, Run, resolve_database, run_deployment_command
from stepengine.cli.exits import Exit, print_error
from stepengine.cli.options import Json, TrustJournal
from stepengine.cli.screen.render import format_error, to_ascii_json, visible
from stepengine.cli.settings import UsageProblem
from stepengine.errors import JournalError, ReplayDivergence

if TYPE_CHECKING:
    from stepengine.durable import DurableEngine

Agents: TypeAlias = Annotated[
    str,
    typer.Option("--agents", help="The agents, as MODULE for `stepengine deploy worker`.", metavar="MODULE"),
]


def _run_with_durable_engine(
    module: str, db: str, act: Callable[[DurableEngine], Awaitable[Exit]], *, app: str, pool: str, release: str = ""
) -> Exit:
    """Run *act* with a durable engine that has the agents of *module* and executes no runs; return the exit code."""
    refuse_untrusted_module(module)
    offered = load_module_contents(module)

    async def act_with_engine() -> Exit:
        """Open the durable engine, run *act* with it, and return the exit code."""
        from stepengine.durable import DurableEngine

        async with DurableEngine(
            offered.agents, offered.tools, offered.models, db=resolve_database(db), works=False, app=app, pool=pool,
            release=release or None, **offered.options,
        ) as engine:  # fmt: skip
            return await act(engine)

    return run_deployment_command(act_with_engine())


def export_run(
    run: Run,
    *,
    agents: Agents = "agents",
    into: Annotated[Path | None, typer.Option(help="The new journal; default: RUN.jsonl.", metavar="FILE")] = None,
    db: Db = "",
    app: App = "stepengine",
    pool: Pool = "default",
) -> Exit:
    """
    Export a durable run to a journal file.

    Use it to replay, fork, compare or inspect a run from production. Pass the agents of the run's own release.

    Exits with 5 if these agents diverge from the record.

    Examples:
      stepengine journal export review-17 --agents mine.py --into review-17.jsonl
    """
    target = into or Path(f"{run.replace('/', '-')}.jsonl")

    async def write_export(engine: DurableEngine) -> Exit:
        """Export the run to the target file, and print its path."""
        await engine.export(run, target)
        print(target)
        return Exit.COMPLETED

    return _run_with_durable_engine(agents, db, write_export, app=app, pool=pool)


def import_run(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A journal of a run that has not ended.")],
    *,
    agents: Agents = "agents",
    release: Annotated[str, typer.Option(help="Release that resumes it; default: the release of these agents.")] = "",
    trust_journal: TrustJournal = False,
    db: Db = "",
    app: App = "stepengine",
    pool: Pool = "default",
) -> Exit:
    """
    Continue the run of a journal file as a durable run.

    The run continues where FILE ends, and no recorded effect is repeated. FILE does not change, and must not be
    resumed elsewhere. Prints the run's id.

    If FILE was written or changed by others, it is refused if it approves calls that have not started, or if only
    FILE requests a call: one that started and did not end, or one of its last model reply. `stepengine resume` asks
    about them; --trust-journal accepts them.

    Examples:
      stepengine journal import run.jsonl --agents my_agents.py
    """
    from stepengine.cli.journals import open_journal, raise_journal_errors_as_usage, refuse_untrusted_approvals
    from stepengine.journal.unknown_calls import refuse_unknown_calls

    if trust_journal:
        refuse_inside_tool("import --trust-journal")
    else:
        journal = open_journal(file)
        refuse_untrusted_approvals(journal, journal.history())
        with raise_journal_errors_as_usage():
            refuse_unknown_calls(journal)

    async def submit_journal(engine: DurableEngine) -> Exit:
        """Submit the run of the journal, and print its id."""
        print(await engine.submit_journal(open_journal(file), trust=trust_journal or None))
        return Exit.COMPLETED

    return _run_with_durable_engine(agents, db, submit_journal, app=app, pool=pool, release=release)


def fork_durable_run(
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
    """Fork a durable run; *edit* changes the last outcome that is kept. Print the id of the new run."""

    async def fork_run(engine: DurableEngine) -> Exit:
        """Fork the run, and print the id of the new one."""
        print(await engine.fork(run, at=at, edit=edit, allow_repeat=allow_repeat))
        return Exit.COMPLETED

    return _run_with_durable_engine(agents, db, fork_run, app=app, pool=pool)


def move_runs_to_release(
    of: Annotated[str, typer.Argument(metavar="FROM", help="The release with runs that have not ended.")],
    to: Annotated[
        str, typer.Argument(metavar="TO", help="The release that resumes them; its workers must be running.")
    ],
    *,
    agents: Agents = "agents",
    check: Annotated[
        bool, typer.Option("--check", help="Only report which runs would move, and which diverge.")
    ] = False,
    only: Annotated[str, typer.Option(help="One run; default: all runs that have not ended.", metavar="RUN")] = "",
    as_json: Json = False,
    db: Db = "",
    app: App = "stepengine",
    pool: Pool = "default",
) -> Exit:
    """
    Move runs from one release to another.

    First replays each run with the agents of TO, without performing effects. A run that would diverge is reported
    and stays with the workers of FROM. A run that fits is interrupted, keeps its record and pending answers, and
    continues with the workers of TO.

    Exit codes:
      0    all runs moved, or would move
      5    some runs diverge
      6    the database cannot be reached

    Examples:
      stepengine deploy release 1.4 1.5 --agents my_agents.py --check
      stepengine deploy release 1.4 1.5 --agents my_agents.py
    """

    async def move_runs(engine: DurableEngine) -> Exit:
        """Move each run that the new release can replay, print the outcomes, and return the exit code."""
        from stepengine.durable import DeploymentMaintenance

        found = [only] if only else await DeploymentMaintenance(engine.operator).list_unfinished(of)
        told = [(run, *await _move_run_if_replayable(engine, run, of, check=check)) for run in found]
        if as_json:
            print(to_ascii_json([{"run": run, "outcome": outcome, "why": why} for run, outcome, why in told]))
        else:
            print(
                "\n".join([_format_move_outcome(*each) for each in told])
                or f"release {visible(of, strict=True)} has no runs left"
            )
        return Exit.DIVERGED if any(outcome == "diverges" for _, outcome, _ in told) else Exit.COMPLETED

    if of == to:
        msg = f"FROM and TO are both {of!r}; `stepengine deploy status` lists the releases"
        raise UsageProblem(msg)
    return _run_with_durable_engine(agents, db, move_runs, app=app, pool=pool, release=to)


async def _move_run_if_replayable(
    engine: DurableEngine, run: str, from_release: str, *, check: bool
) -> tuple[str, str]:
    """Move a run; return ``moved``, ``would move``, ``diverges`` (it was left alone) or ``ended``, and where it diverges."""
    view = await engine.operator.run(run)
    if view.release != from_release:
        msg = f"the run {run!r} belongs to release {view.release}, not to {from_release}"
        raise JournalError(msg)
    differs = await engine.fits(run)
    if differs is not None:
        return "diverges", differs.message
    if check:
        return "would move", ""
    try:
        await engine.move(run)
    except ReplayDivergence as error:  # it recorded more after the check, and that does not fit
        return "diverges", error.message
    except JournalError as error:
        print_error(format_error(error))
        return "ended", ""
    return "moved", ""


def _format_move_outcome(run: str, outcome: str, why: str) -> str:
    """Return the outcome of a move as a line, with the reason on further lines."""
    reason = "".join([f"\n    {visible(line)}" for line in why.splitlines()])
    return f"{outcome:<11}{visible(run, strict=True)}{reason}"
