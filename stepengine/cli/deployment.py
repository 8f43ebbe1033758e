"""
Shared code of the commands on a deployment: the database, the mailbox of a journal, and the errors of both.

Commands on a durable run need its database, and those on a journal its mailbox; none needs agents, models or keys.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from stepengine.cli.exits import Exit, print_error
from stepengine.cli.screen.render import format_error
from stepengine.cli.settings import UsageProblem
from stepengine.errors import (
    BadYield,
    DatabaseUnavailable,
    DataError,
    ExecutorBusy,
    InputError,
    ReplayDivergence,
    StepEngineError,
)

if TYPE_CHECKING:
    from stepengine.durable import Operator
    from stepengine.journal import Journal

VARIABLE = "STEPENGINE_DB"
Db: TypeAlias = Annotated[
    str,
    typer.Option(
        "--db", help=f"The PostgreSQL database, or @FILE with its URL; default: ${VARIABLE}.", metavar="URL|@FILE"
    ),
]
App: TypeAlias = Annotated[str, typer.Option(help="The deployment's name.")]
Pool: TypeAlias = Annotated[str, typer.Option(help="Name of the worker pool.")]
Run: TypeAlias = Annotated[
    str, typer.Argument(metavar="RUN", help="The run's id, as `stepengine deploy submit` printed it.")
]


def resolve_database(typed: str) -> str:
    """
    Return the database of ``--db``, else of the environment variable; warn about a password in ``--db``.

    Raises:
        UsageProblem: when there is none.
    """
    if typed:
        if re.match("[^:/?#]*://[^:/?#]*:.+@", typed):
            print_error(
                f"other users can read the password of --db in the list of processes; use {VARIABLE} or --db @FILE instead"
            )
        return typed
    named = os.environ.get(VARIABLE, "").strip()
    if not named:
        msg = f"no database given; set {VARIABLE}, or pass --db URL or --db @FILE with the URL in it"
        raise UsageProblem(msg)
    return named


def run_deployment_command(command: Coroutine[object, Any, Exit]) -> Exit:
    """Run a command on a deployment to its end. Print the error of an expected failure and return its exit code."""
    try:
        return asyncio.run(command)
    except DatabaseUnavailable as error:
        return print_error(format_error(error), Exit.AWAY)
    except ExecutorBusy as error:
        return print_error(format_error(error), Exit.BUSY)
    except ReplayDivergence as error:
        return print_error(format_error(error), Exit.DIVERGED)


def run_with_operator(db: str, act: Callable[[Operator], Awaitable[Exit]], *, app: str, pool: str = "default") -> Exit:
    """Connect to a database and run *act* with its operator. Errors are printed as in ``run_deployment_command``."""

    async def act_with_operator() -> Exit:
        """Connect to the database, run *act* with the operator, and return the exit code."""
        from stepengine.durable import Operator

        async with await Operator.connect(resolve_database(db), app=app, pool=pool) as operator:
            return await act(operator)

    return run_deployment_command(act_with_operator())


def find_journal_unless_durable(run: str, db: str) -> Journal | None:
    """
    Return the journal that *run* names; ``None`` for a durable run.

    A run is durable with ``--db``, or if ``$STEPENGINE_DB`` is set and no journal has that name.

    Raises:
        UsageProblem: when there is neither a journal nor a database.
    """
    from stepengine.cli.journals import open_journal

    if db:
        return None
    try:
        return open_journal(run)
    except UsageProblem:
        if os.environ.get(VARIABLE, "").strip():
            return None
        raise


def run_mailbox_command(send: Callable[[Any], object]) -> Exit:
    """Call *send* with the module ``journal.messages`` to send something to a mailbox; report errors and return the exit code."""
    from stepengine.journal import messages

    try:
        send(messages)
    except (InputError, BadYield, DataError):
        raise  # wrong usage
    except StepEngineError as error:
        return print_error(error.message, Exit.FAILED)
    return Exit.COMPLETED
