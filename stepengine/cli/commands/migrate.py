"""``stepengine deploy migrate``: create and update the tables of durable runs."""

from __future__ import annotations

from typing import Annotated

import typer

from stepengine.cli.deployment import Db, database_of, report_problems
from stepengine.cli.exits import Exit

__all__ = ("migrate",)


def migrate(
    *,
    role: Annotated[str, typer.Option(help="The role of workers and clients, which is given what they need.")] = "",
    db: Db = "",
) -> Exit:
    """
    Make and update the tables of durable runs.

    With a role that may: workers started with --no-migrate then need none of its rights.

    Examples:
      stepengine deploy migrate --db @admin-url --role stepengine_worker
    """

    async def made() -> Exit:
        from stepengine.durable import migrate as make

        await make(database_of(db), role=role or None)
        return Exit.COMPLETED

    return report_problems(made())
