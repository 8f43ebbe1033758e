"""``DurableStore``: the database of a durable server, and the register of the runs that servers started."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from stepengine.durable.register import Register
from stepengine.errors import JournalError
from stepengine.server.problems import Problem
from stepengine.server.quotas import QuotaUsage

if TYPE_CHECKING:
    from stepengine.durable import DurableEngine, Operator


class DurableStore:
    """
    The database of an engine, and the register of the runs that servers started.

    Args:
        engine: The engine, which may not be open yet.
    """

    def __init__(self, engine: DurableEngine) -> None:
        self.engine = engine

    @property
    def operator(self) -> Operator:
        """The client that reads and controls the runs in the database."""
        return self.engine.operator

    @property
    def register(self) -> Register:
        """The table of the runs that servers started: owner, request, idempotency key."""
        return Register(self.engine.operator.deployment)

    async def measure_usage(self, owner: str) -> QuotaUsage:
        """Return the number of open runs and the stored bytes of an owner, counted in the database."""
        return QuotaUsage(*await self.register.count_open_runs_and_bytes(owner))


def make_unsupported_problem(message: str) -> Problem:
    """Return the problem for an operation that runs in a database do not support."""
    return Problem(message, status=409, kind="not_possible")


@contextlib.contextmanager
def raise_run_errors_as_problems(*, status: int, kind: str) -> Iterator[None]:
    """Raise a ``JournalError`` of the block as a ``Problem`` of *kind* with *status*; its subclasses pass unchanged."""
    try:
        yield
    except JournalError as error:
        if type(error) is not JournalError:  # subclasses have statuses of their own
            raise
        raise Problem(error.message, status=status, kind=kind) from None
