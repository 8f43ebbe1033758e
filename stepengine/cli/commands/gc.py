"""``stepengine deploy gc``: delete durable runs that ended long ago."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from stepengine.cli.deployment import App, Db, run_with_operator
from stepengine.cli.exits import Exit
from stepengine.cli.options import parse_age_option
from stepengine.cli.screen.render import print_visible

if TYPE_CHECKING:
    from stepengine.durable import Operator


def delete_ended_runs(
    *,
    older_than: Annotated[
        str, typer.Option(help="Minimum time since their end, such as 30d, 12h or 90m.", metavar="AGE")
    ],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list them.")] = False,
    db: Db = "",
    app: App = "stepengine",
) -> Exit:
    """
    Delete durable runs that ended long ago.

    Deletes complete trees, and only those that have ended entirely. Nothing is ever deleted automatically.

    Examples:
      stepengine deploy gc --older-than 30d --dry-run
    """
    age = parse_age_option("--older-than", older_than)

    async def delete_runs(operator: Operator) -> Exit:
        """Delete the runs that ended long enough ago, or only list them, and print their number."""
        from stepengine.durable import DeploymentMaintenance

        roots = await DeploymentMaintenance(operator).collect(age.total_seconds(), dry_run=dry_run)
        if dry_run:
            print("\n".join(roots))
        print_visible(f"{len(roots)} runs {'would be' if dry_run else 'were'} deleted, with their children")
        return Exit.COMPLETED

    return run_with_operator(db, delete_runs, app=app)
