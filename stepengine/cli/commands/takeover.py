"""``stepengine deploy takeover``: assign the runs of a dead worker to live ones."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from stepengine.cli.deployment import App, Db, run_with_operator
from stepengine.cli.exits import Exit
from stepengine.cli.screen.render import visible
from stepengine.cli.settings import UsageProblem

if TYPE_CHECKING:
    from stepengine.durable import Operator, TakeoverResult


def takeover(
    executor: Annotated[str, typer.Argument(metavar="EXECUTOR", help="The dead worker's --executor.")] = "",
    *,
    watch: Annotated[bool, typer.Option("--watch", help="Keep running, and take over every dead worker.")] = False,
    grace: Annotated[float, typer.Option(help="With --watch: seconds to wait after a worker dies.", min=0)] = 30.0,
    force: Annotated[
        bool, typer.Option("--force", help="Take over although the lock is held; only for a machine that is cut off.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only report what would be done.")] = False,
    db: Db = "",
    app: App = "stepengine",
) -> Exit:
    """
    Assign the runs of a dead worker to live ones.

    A worker holds a lock while it is alive. If the lock is free, its runs return to their queues; a second takeover
    has no effect. A run that has crashed five workers without progress is cancelled as poison.

    --watch does this automatically for every worker that has been dead for --grace seconds. Run it on two machines:
    one is active, the other on standby.

    Exit codes:
      0    done
      4    the worker is alive
      6    the database cannot be reached

    Examples:
      stepengine deploy takeover web-1
      stepengine deploy takeover --watch --grace 20
    """
    if bool(executor) == watch:
        msg = "no EXECUTOR given; name one (`stepengine deploy status --executors` lists them), or pass --watch for all"
        raise UsageProblem(msg)

    if watch and (force or dry_run):
        msg = "--force and --dry-run need one EXECUTOR; leave them out with --watch"
        raise UsageProblem(msg)

    async def take_over(operator: Operator) -> Exit:
        """Take over the runs of a dead worker, or with ``--watch`` of all, and print the outcomes."""
        from stepengine.durable import DeploymentMaintenance

        maintenance = DeploymentMaintenance(operator)
        if watch:
            print(f"stepengine: taking over workers that have been dead for {grace:g} s", file=sys.stderr, flush=True)
            async for each in maintenance.watch(grace=grace):
                print(_describe_takeover(each), flush=True)
        found = await maintenance.takeover(executor, force=force, dry_run=dry_run)
        print(
            "\n".join([_describe_takeover(each) for each in found])
            or f"executor {visible(executor, strict=True)} has no runs"
        )
        return Exit.COMPLETED

    return run_with_operator(db, take_over, app=app)


def _describe_takeover(result: TakeoverResult) -> str:
    """Return a line about the takeover of a run from a dead worker."""
    again = f"  (taken over {result.times} times without progress)" if result.times > 1 else ""
    return f"{result.outcome}  {result.run}  from {result.executor}{again}"
