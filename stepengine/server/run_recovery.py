"""``RunRecovery``: resumes the runs of a store that are due, and those whose process died."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from stepengine.errors import StepEngineError
from stepengine.journal.sleepers import open_wake_index
from stepengine.runtime.logs import LOGGER
from stepengine.server.ledger import OPEN, RunRow

if TYPE_CHECKING:
    from stepengine.server.live_runs import LiveRuns
    from stepengine.server.run_launcher import RunLauncher
    from stepengine.server.run_store import RunStore

LOOK_SECONDS = 1.0
"""Seconds between two checks of the store: a run that is due starts at most this late."""
START_SECONDS = 2.0
"""Seconds that a run may be registered without a journal: another server may be about to start it."""
MAX_DUE = 100
"""The most due runs that are resumed at a time; the others follow a second later."""
MAX_DUE_OF_OWNER = 25
"""The most of them that belong to one owner, so that its runs do not delay those of others."""


class RunRecovery:
    """
    Resumes runs in the background.

    Args:
        store: The journals and the ledger.
        live: The runs of this process.
        launcher: Resumes a run.
        drop_idle: Called once a second, to drop what no client reads any more.
    """

    def __init__(self, store: RunStore, live: LiveRuns, launcher: RunLauncher, drop_idle: Callable[[], None]) -> None:
        self._store = store
        self._live = live
        self._launcher = launcher
        self._drop_idle = drop_idle
        self._third_party: set[str] = set()
        self._watching: asyncio.Task[Any] | None = None

    async def start(self) -> None:
        """Resume interrupted runs, then start a task for runs that become due or lose their process."""
        # Before the first request: a client of a run whose server was killed finds it running. Runs for which there is no
        # room now are resumed when others make some, which may need an answer, and so a server.
        await self._resume_orphaned_runs(include_new=True)
        self._watching = self._live.tasks.spawn(self._resume_runs_forever())

    def stop(self) -> None:
        """Stop the task, so that no more runs are resumed."""
        if self._watching is not None:
            self._watching.cancel()

    async def _resume_runs_forever(self) -> None:
        """Every second, resume due runs and those whose process died, and stop following idle journals; errors are logged."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            self._drop_idle()
            try:
                for row in await asyncio.to_thread(self._find_due_runs):
                    if not self._live.has_room():
                        break
                    if not self._live.has_room_for(row.owner):
                        continue
                    await self._launcher.resume_or_record_failure(row)
                await self._resume_orphaned_runs()
            except StepEngineError as error:
                LOGGER.error("the runs to resume could not be listed: %s", error)
            except Exception:  # noqa: BLE001 - nobody awaits this loop, and without it no run is resumed any more
                LOGGER.exception("runs could not be checked; the server tries again within seconds")

    def _find_due_runs(self) -> list[RunRow]:
        """
        Return the runs of the ledger that are due and have room, and log due journals that are not in the ledger.

        Other journals of the store are third-party: their author could have written an approval into them.
        """
        limit = MAX_DUE + len(self._third_party) + len(self._live)
        while True:
            with open_wake_index(self._store.place) as index:
                due = index.list_due(datetime.now(UTC), limit)
            names = [one.run if self._store.is_database else one.run.removesuffix(".jsonl") for one in due]
            known = self._store.ledger.find_owners_and_statuses(names)
            chosen = self._choose_runs_with_room(names, known)
            if len(chosen) >= MAX_DUE or len(due) < limit:
                break
            # Those that were due first may all be of owners without room.
            limit *= 2
        third_party = {run for run in names if run not in known and run not in self._live}
        for run in third_party - self._third_party:
            LOGGER.warning("run %s is due, but this server did not start it and does not resume it", run)
        self._third_party = third_party
        return [row for run in chosen if (row := self._store.ledger.find(run)) is not None]

    def _choose_runs_with_room(self, names: Iterable[str], ledger_states: Mapping[str, tuple[str, str]]) -> list[str]:
        """Return the first runs in *names* with room, at most 25 of an owner; *ledger_states* has (owner, status) by run."""
        chosen: list[str] = []
        counts = Counter[str]()
        for run in names:
            owner, status = ledger_states.get(run, ("", ""))
            if status not in OPEN or run in self._live:
                continue
            if counts[owner] < MAX_DUE_OF_OWNER and self._live.has_room_for(owner):
                counts[owner] += 1
                chosen.append(run)
        return chosen[:MAX_DUE]

    async def _resume_orphaned_runs(self, *, include_new: bool = False) -> None:
        """Resume the runs whose process died, as far as there is room; with *include_new* also those registered a moment ago."""
        for row in await asyncio.to_thread(
            self._find_orphaned_runs, frozenset(self._live.handles), include_new=include_new
        ):
            if not self._live.has_room():
                return
            if row.run not in self._live and self._live.has_room_for(row.owner):
                await self._launcher.resume_or_record_failure(row)

    def _find_orphaned_runs(self, live: Collection[str], *, include_new: bool) -> list[RunRow]:
        """Return the active runs whose lock no process holds; without *include_new*, not those that may be about to start."""
        ledger = self._store.ledger
        others = [run for run in ledger.list_active_run_ids() if run not in live]
        free = [
            row for run in others if not self._store.journal(run).is_held() and (row := ledger.find(run)) is not None
        ]
        latest = time.time() - (0.0 if include_new else START_SECONDS)
        return [row for row in free if row.status == "running" or (row.status == "started" and row.created <= latest)]
