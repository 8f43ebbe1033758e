"""``DurableReader``: finds the runs of a server in a database, and reads their status, result and records."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import attrs

from stepengine.data.codec import plain
from stepengine.durable.run_waits import make_question_waits
from stepengine.errors import JournalError, StepEngineError
from stepengine.journal.store import MemoryJournal
from stepengine.server.durable_store import make_unsupported_problem, raise_run_errors_as_problems
from stepengine.server.ledger import OPEN, RunRow
from stepengine.server.live_runs import RUNNING
from stepengine.server.run_reader import MAX_DETAILS, ServedRun
from stepengine.server.run_requests import require_own_run, require_permitted_owner
from stepengine.server.run_summaries import (
    MAX_WAITS,
    RunListSummary,
    describe_wait,
    remove_oldest_entries,
    shorten_output,
)

if TYPE_CHECKING:
    from stepengine.data.usage import Spending
    from stepengine.durable.register import RegisteredRun
    from stepengine.engine import Engine
    from stepengine.server.access import Caller
    from stepengine.server.durable_launcher import DurableLauncher
    from stepengine.server.durable_store import DurableStore


class DurableReader:
    """
    Finds runs and reads them from the database.

    Args:
        store: The database.
        launcher: Submits a run that a dead server had registered, before it is read.

    Attributes:
        copies_journals: Always ``True``: ``get_journal`` is made of the rows of the database.
    """

    copies_journals = True

    def __init__(self, store: DurableStore, launcher: DurableLauncher) -> None:
        self._store = store
        self._launcher = launcher
        self._details: OrderedDict[tuple[str, str, int], ServedRun] = OrderedDict()

    async def get_run(self, caller: Caller, run: str) -> RunRow:
        """
        Return a run by its id; raise ``Problem`` 404 unless *caller* owns it or is an admin.

        Raises:
            Problem: 404 for a missing run and for a run of another owner, which look the same.
        """
        found = await self._store.register.find_run(run) if run.isascii() and run.isprintable() else None
        return require_own_run(caller, run, None if found is None else _run_row_from_registered(found))

    async def list_runs(
        self,
        caller: Caller,
        *,
        agent: str | None,
        statuses: Sequence[str],
        before: tuple[float, str] | None,
        limit: int,
        owner: str | None = None,
        session: str | None = None,
        search: str | None = None,
    ) -> list[RunRow]:
        """
        Return the runs of *caller*, newest first; for an admin those of *owner*, by default of all owners.

        Raises:
            Problem: If *owner* is another one than *caller*, who is not an admin, and with a *session*.
        """
        if session is not None:
            msg = "runs in a database cannot be listed by conversation; leave out `session`"
            raise make_unsupported_problem(msg)
        whose = require_permitted_owner(caller, owner)
        owner = None if owner is None and caller.may("admin") else whose
        if agent is not None and not agent.isprintable():
            return []
        asked = {*statuses} - {*OPEN} | ({*RUNNING} if {*statuses} & {*OPEN} else set())
        shown: list[RunRow] = []
        while True:
            found = await self._store.register.list_runs(
                owner=owner, agent=agent, statuses=sorted(asked), before=before, limit=limit, search=search
            )
            suspended = await self._store.operator.run_waits.list_waits_of_suspended(
                [row.run for row in found if row.status == "running"]
            )
            rows = [_run_row_from_registered(row, "suspended" if row.run in suspended else row.status) for row in found]
            shown += [row for row in rows if not statuses or row.status in statuses]
            if len(found) < limit or len(shown) >= limit:
                return shown[:limit]
            before = found[-1].created, found[-1].run

    async def count_runs_by_agent_and_status(self) -> list[tuple[str, str, int]]:
        """Return (agent, status, number of runs) for the runs that servers started, by agent and status."""
        return await self._store.register.count_by_agent_and_status()

    async def load_details(self, row: RunRow) -> ServedRun:
        """Return the details of a run from the database; those of an ended run are kept in memory."""
        if row.status in OPEN:
            return await self._load_unfinished_run_details(row)
        key = (row.run, row.status, row.tries)
        known = self._details.get(key)
        if known is not None:
            return attrs.evolve(known, row=row)
        details = self._details[key] = await self._load_ended_run_details(row)
        remove_oldest_entries(self._details, MAX_DETAILS)
        return details

    async def _load_unfinished_run_details(self, row: RunRow) -> ServedRun:
        """Return the questions and waits of a run that has not ended, from the database."""
        # Status and questions in one query: with two, a run could be suspended in between, and a client that waits for its
        # question would be told that there is none.
        operator = self._store.operator
        suspended = await operator.run_waits.list_waits_of_suspended([row.run]) if row.status != "started" else {}
        is_suspended = row.run in suspended
        asked, left = suspended[row.run] if is_suspended else (await operator.list_questions(row.run), [])
        return ServedRun(
            row=row,
            status="suspended" if is_suspended else "running",
            questions=tuple([question for each in asked for question in each.questions]),
            waits_for=(*make_question_waits(asked), *left) if is_suspended else (),
            parent=_find_fork_origin(row),
        )

    async def _load_ended_run_details(self, row: RunRow) -> ServedRun:
        """Return the result or the error of an ended run, from the database."""
        found = await self._store.register.find_run(row.run)
        if found is not None and not found.is_submitted:
            return ServedRun(row=row, status=row.status, error=row.error)
        try:
            result = await self._store.engine.result(row.run)
        except JournalError:
            raise
        except StepEngineError as error:
            # Why it stopped without a result, without the lines that name files and commands of the worker.
            return ServedRun(row=row, status=row.status, error=error.message.partition("\n")[0])
        has_result = row.status not in ("cancelled", "stranded")
        return ServedRun(
            row=row,
            status=row.status,
            output=plain(result.output),
            text=result.text,
            error=row.error or ("" if result.error is None else str(result.error)),
            usage=plain(result.usage) if has_result else None,
            cost=str(result.cost) if has_result and result.cost is not None else None,
            parent=_find_fork_origin(row),
            warnings=result.warnings,
        )

    async def load_summary(self, row: RunRow) -> RunListSummary:
        """Return the summary of a run from its details: its journal would have to be copied from the database."""
        look = await self.load_details(row)
        waits = [describe_wait(one) for one in look.waits_for] or [one.text for one in look.questions]
        times = [one.wakes_at for one in look.waits_for if one.wakes_at is not None]
        return RunListSummary(
            cost=look.cost,
            waits=tuple(waits[:MAX_WAITS]),
            wakes=min(times, default=None),
            asks=bool(look.questions),
            output=shorten_output(look.output),
            parent=None if look.parent is None else look.parent["run"],
        )

    async def get_journal(self, row: RunRow) -> MemoryJournal:
        """Copy the records of a run from the database, and return them as a journal in memory."""
        return MemoryJournal(await self.read_journal_bytes(row))

    def get_engine_for_run(self, row: RunRow) -> Engine:
        """Return the engine of this server, whichever worker executes the run."""
        return self._store.engine.embedded_engine

    async def read_journal_bytes(self, row: RunRow) -> bytes:
        """Return the records of a run as the bytes of a journal, after submitting the run if a dead server did not."""
        await self._launcher.submit_if_unsubmitted(row)
        with raise_run_errors_as_problems(status=409, kind="not_possible"):
            return (await self._store.engine.export(row.run)).content()

    async def load_spending(self, row: RunRow) -> Spending:
        """Return the tokens and the cost of a run; raise ``Problem`` unless it has ended with a result."""
        if row.status in OPEN or row.status in ("cancelled", "stranded"):
            msg = "the cost of a run in a database is known once the run has ended with a result"
            raise make_unsupported_problem(msg)
        return (await self._store.engine.result(row.run)).spending


def _find_fork_origin(row: RunRow) -> Mapping[str, str] | None:
    """Return the run and the effect that a run was forked from; ``None`` for other runs."""
    fork = row.request.get("fork")
    return {"run": str(fork["run"]), "at": str(fork["at"])} if isinstance(fork, Mapping) else None


def _run_row_from_registered(row: RegisteredRun, status: str = "") -> RunRow:
    """Convert a row of the table of runs to a ``RunRow``, by default with the registered status."""
    # A conversation that was started without this server has no owner before its name, and such a run no request.
    session = row.session if row.session is None or row.owner else f":{row.session}"
    return RunRow(
        row.run, row.owner, row.agent, status or row.status, row.created, row.created, row.request or {}, session,
        row.tries, row.error,
    )  # fmt: skip
