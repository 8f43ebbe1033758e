"""``stepengine deploy migrate``: create and update the tables of durable runs."""

from __future__ import annotations

from typing import Annotated

import typer

from stepengine.cli.deployment import Db, resolve_database, run_deployment_command
from stepengine.cli.exits import Exit


def migrate(
    *,
    role: Annotated[str, typer.Option(help="Role of workers and clients; it gets the rights that they need.")] = "",
    db: Db = "",
) -> Exit:
    """
    Create and update the tables of durable runs.

    Run it as a role with the right to create tables; workers started with --no-migrate need no such right.

    Examples:
      stepengine deploy migrate --db @admin-url --role stepengine_worker
    """

    async def run_migration() -> Exit:
        """Create or update the tables, and return the exit code."""
        from stepengine.durable import migrate as make

        await make(resolve_database(db), role=role or None)
        return Exit.COMPLETED

    return run_deployment_command(run_migration())
