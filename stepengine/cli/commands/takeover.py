"""``stepengine deploy takeover``: give the runs of a dead worker to the others."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from stepengine.cli.deployment import App, Db, operate
from stepengine.cli.exits import Exit
from stepengine.cli.screen.render import visible
from stepengine.cli.settings import UsageProblem

if TYPE_CHECKING:
    from stepengine.durable import Operator, TakenOver

__all__ = ("takeover",)


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
      stepengine deploy takeover web-1
      stepengine deploy takeover --watch --grace 20
    """
    if bool(executor) == watch:
        msg = (
            "whose runs? Name one EXECUTOR (`stepengine deploy status --executors` lists them), or give --watch for all"
        )
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
