"""``RunLauncher``: starts, resumes, replays and forks the runs of a server."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Collection
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import attrs

from stepengine.data.questions import Answer
from stepengine.data.state import RunStatus
from stepengine.errors import (
    InputError,
    JournalError,
    JournalLocked,
    JournalMissing,
    ReplayDivergence,
    StepEngineError,
)
from stepengine.journal.forks import branch
from stepengine.journal.questions import make_doubt_questions
from stepengine.journal.show import get_run_status
from stepengine.server.ledger import (
    RunRow,
    make_delete_run_act,
    make_register_run_act,
    make_register_turn_act,
    make_restore_status_act,
    make_resume_act,
    make_store_decisions_act,
    make_store_status_act,
)
from stepengine.server.live_runs import RUNNING
from stepengine.server.problems import Problem
from stepengine.server.quotas import QuotaTable, get_json_size
from stepengine.server.run_requests import (
    ForkRun,
    ResumeRun,
    StartRequest,
    make_client_error,
    require_not_ended,
    start_options_from_request,
)
from stepengine.server.run_starts import RunStarts, plan_start
from stepengine.server.run_store import MAX_RESUME_TRIES, NEVER_STARTED, RunStore

if TYPE_CHECKING:
    from stepengine.data.state import RunResult
    from stepengine.engine import Engine
    from stepengine.journal import ForkReport
    from stepengine.journal.store import Journal
    from stepengine.runtime.handle import RunHandle
    from stepengine.server.access import Caller
    from stepengine.server.current_engine import CurrentEngine
    from stepengine.server.live_runs import LiveRuns
    from stepengine.server.run_reader import RunReader


class RunLauncher(RunStarts[RunRow]):
    """
    Starts, resumes and forks the runs of a folder or an SQLite file.

    Args:
        store: The journals and the ledger.
        live: The runs of this process.
        engines: The engine.
        reader: Reads the last state of the previous run of a conversation.
        quotas: What each owner uses.
        wait_for_answers: Seconds that a question waits in memory before the run is suspended.
    """

    def __init__(
        self,
        store: RunStore,
        live: LiveRuns,
        engines: CurrentEngine,
        reader: RunReader,
        quotas: QuotaTable,
        *,
        wait_for_answers: float,
    ) -> None:
        super().__init__(quotas)
        self._store = store
        self._live = live
        self._engines = engines
        self._reader = reader
        self._patience = wait_for_answers
        self._resuming = WeakValueDictionary[str, asyncio.Lock]()

    # --- starting -----------------------------------------------------------------------------------------------------

    async def _validate_request_and_make_row(self, caller: Caller, asked: StartRequest) -> RunRow:
        """Reload changed agents, validate a request to start a run, and return its row, which is not registered yet."""
        await self._engines.rebuild_if_files_changed()
        engine = self._engines.engine
        plan = plan_start(caller, asked, engine, self._engines.agents, stores_messages=engine.sessions is not None)
        return RunRow(
            secrets.token_hex(16), caller.name, plan.agent, "started", plan.created, plan.created, plan.request, plan.session
        )  # fmt: skip

    async def _has_idempotency_key(self, owner: str, key: str, now: float) -> bool:
        """Return whether an owner has started a run with this key within a day."""
        return await asyncio.to_thread(self._store.ledger.has_idempotency_key, owner, key, now)

    def _reserve_room(self, owner: str) -> AbstractContextManager[None]:
        """Reserve room for a run of *owner* within the block, or raise ``Problem``."""
        return self._live.reserve_room(owner)

    async def _is_registered(self, run: str) -> bool:
        """Return whether the ledger has a run."""
        return await self._store.find(run) is not None

    async def _start_and_unregister_on_failure(self, row: RunRow) -> None:
        """Start a run that was just registered; if it has not started, remove its registration and raise."""
        try:
            await self._start_registered_run(row)
        except JournalLocked:
            # Another server of the place has found the registered run, and is starting it.
            return
        except StepEngineError as error:
            # Another server of the place may have started the registered run first. To check that before each start
            # cost 30 ms a run where a thousand were started at once.
            is_started = await asyncio.to_thread(self._store.journal(row.run).is_there)
            if not is_started:
                await self._store.write(make_delete_run_act(row.run))
            if not (is_started and isinstance(error, JournalError)):
                raise

    async def _register_or_find_earlier_run(self, row: RunRow, key: str | None) -> str | None:
        """Register a run and return ``None``; if an earlier run has the same key, return its id instead."""
        if "turn" in row.request:
            try:
                await self._store.write(make_register_turn_act(row, row.request["turn"]["after"]))
            except InputError as error:
                raise Problem(error.message, status=409, kind="under_way") from error
            return None
        try:
            known: RunRow | None = await self._store.write(make_register_run_act(row, key))
        except InputError as error:
            raise Problem(error.message, status=409, kind="key_reused") from error
        return None if known is None else known.run

    async def _start_registered_run(self, row: RunRow) -> None:
        """Start a registered run in the current engine, from the state of the run before it if it is a turn."""
        request, options = row.request, dict[str, Any]()
        turn = request.get("turn")
        if turn is not None and turn["after"] is not None:
            before = await self._store.find(turn["after"])
            options["previous"] = None if before is None else await self._reader.load_or_replay_state(before)
        options |= start_options_from_request(request, options.get("previous"))
        handle = self._engines.engine.start(
            row.agent,
            request["prompt"],
            run_id=row.run,
            params=request["params"],
            metadata=request["metadata"],
            session_id=row.session,
            user_id=row.owner or None,
            journal=self._store.journal(row.run),
            wait_for_answers=self._get_answer_wait_seconds(row),
            **options,
        )
        self._live.add_and_watch_run(row.run, handle, row.owner)

    def _get_answer_wait_seconds(self, row: RunRow) -> float:
        """Return the seconds that a question of the run waits in memory before the run is suspended."""
        return self._patience if row.request.get("is_patient", True) else 0.0

    async def register_scheduled_run(self, run: str, agent: str, handle: RunHandle) -> None:
        """Register a run that a schedule started. It has no owner, so only admins see it."""
        now = time.time()
        request: dict[str, Any] = {"prompt": "", "params": None, "metadata": None}
        await self._store.write(make_register_run_act(RunRow(run, "", agent, "running", now, now, request), None))
        self._live.add_and_watch_run(run, handle, "")

    async def cancel_if_unrecorded(self, run: str, reason: str) -> bool:
        """Store that a registered run without a record is cancelled, and return True; return False if it has started."""
        await self._pending.wait_if_pending(run)
        # The recovery starts such a run under this lock, and reads its status before.
        lock = self._resuming.setdefault(run, asyncio.Lock())
        async with lock:
            if run in self._live or await asyncio.to_thread(self._store.has_record, run):
                return False
            await self._store.write(make_store_status_act(run, "cancelled", time.time(), error=reason))
        return True

    # --- resuming -----------------------------------------------------------------------------------------------------

    async def resume(self, row: RunRow, asked: ResumeRun | None = None) -> None:
        """
        Resume a stranded or interrupted run. Do nothing for a running one, but raise with *asked*.

        Args:
            row: The run.
            asked: How to resume a run whose code diverges from its record; by default such a run is not changed.

        Raises:
            JournalError: If the run cannot be resumed; ``JournalLocked`` if another process has it.
            Problem: If the run has ended, is running although *asked* is passed, or too many runs are executed.
        """
        if row.run in self._live:
            _require_no_options_for_running_run(row, asked)
            return
        _require_resumable(row)
        self._live.require_room(row.owner)
        # The time of the last change stays that of the suspension, so that of two concurrent answers to a question one is refused.
        await self._resume_or_start(attrs.evolve(row, status="running"), asked)

    async def resume_or_record_failure(self, row: RunRow) -> None:
        """Resume a run, and record an error in the ledger instead of raising it; ignore a locked journal and a full server."""
        try:
            await self._resume_or_start(row)
        except (JournalLocked, Problem):
            pass  # another process has it, or there is no room: the recovery finds it later
        except Exception as error:  # noqa: BLE001 - a fault of one run must not stop the resumption of others
            await self._store.record_failed_resume(row.run, error)

    async def _resume_or_start(self, row: RunRow, asked: ResumeRun | None = None) -> None:
        """Resume a run, or start a run without a journal, in reserved room. Do nothing for a live run, but raise with *asked*."""
        # As long as a resumption has or awaits the lock, the next one finds it.
        lock = self._resuming.setdefault(row.run, asyncio.Lock())
        async with lock:
            if row.run in self._live or self._live.is_closing:
                _require_no_options_for_running_run(row, asked)
                return
            with self._live.reserve_room(row.owner):
                await self._resume_or_start_in_reserved_room(row, asked)

    async def _resume_or_start_in_reserved_room(self, row: RunRow, asked: ResumeRun | None) -> None:
        """Read the present row and journal of a run; then resume it, start it, or store the end in its journal."""
        # The caller saw the row earlier: the run may have ended or been suspended again since, or just now.
        await self._live.wait_until_end_recorded(row.run)
        known = await self._store.find(row.run)
        if known is not None:
            _require_resumable(known)
        if known is None or (known.status not in RUNNING and known.changed != row.changed):
            _require_no_options_for_running_run(row, asked)
            return
        journal = self._store.journal(row.run)
        try:
            ended = await asyncio.to_thread(find_recorded_end_status, journal)
        except JournalMissing:
            if known.status != "started" and (known.status, known.tries) != ("stranded", NEVER_STARTED):
                raise
            await self._start_run_without_journal(row, known)
            return
        if ended is not None:
            await self._store.write(make_store_status_act(row.run, ended, time.time()))
            _require_resumable(attrs.evolve(known, status=ended))
            return
        options = None if asked is None else await self._store_status_and_make_resume_options(row, journal, asked)
        try:
            await self._resume_journal(row, journal, options)
        except BaseException as error:
            # Another process that has the run also records its status.
            if asked is not None or not isinstance(error, JournalLocked):
                await self._store.write(make_restore_status_act(known))
            raise

    async def _start_run_without_journal(self, row: RunRow, present_row: RunRow) -> None:
        """Start a run that was registered and has no journal; *present_row* is its row in the ledger now."""
        await self._start_registered_run(row)
        # Not before: the recovery would see a run that has started and that no process has.
        if present_row.status == "stranded":
            await self._store.write(make_store_status_act(row.run, "started", present_row.changed))

    async def _resume_journal(self, row: RunRow, journal: Journal, divergence: dict[str, Any] | None = None) -> None:
        """Resume a run from its journal, with its stored decisions, in the current engine; store the decisions again if that fails."""
        options: dict[str, Any] = {"in_doubt": "ask", "wait_for_answers": self._get_answer_wait_seconds(row)}
        if "changes" in row.request:
            options["on_divergence"] = "keep"
        options |= divergence or {}
        decided: dict[str, Answer] = {}
        if options.get("on_divergence") != "extend":
            decided = await self._store.write(make_resume_act(row.run))
        if decided:
            open_ = await asyncio.to_thread(
                lambda: {question.id for question in make_doubt_questions(journal.history())}
            )
            options["answers"] = {question: answer for question, answer in decided.items() if question in open_}
        try:
            await self._engines.try_rebuild()
            with self._engines.hold_current_engine() as engine:
                handle = await engine.start_resume(journal, **_make_fork_agent_options(row, engine), **options)
        except BaseException:
            # The next resumption needs the decisions: that of the process that has the run, or one after the error is corrected.
            if decided:
                await self._store.write(make_store_decisions_act(row.run, decided))
            raise
        self._live.add_and_watch_run(row.run, handle, row.owner, is_resumed=True)

    async def _store_status_and_make_resume_options(
        self, row: RunRow, journal: Journal, asked: ResumeRun
    ) -> dict[str, Any]:
        """
        Store the status of a run whose code differs from its record, and return the options of its resume.

        Raises:
            JournalLocked: If another process has the run.
        """
        options: dict[str, Any] = {"on_divergence": asked.on_divergence, "allow_repeat": asked.allow_repeat}
        if asked.on_divergence == "keep":
            status = "running"
        else:
            # An extension writes a copy of the journal until it ends or is suspended: it cannot receive answers.
            if await asyncio.to_thread(journal.is_held):
                msg = f"another process holds the run {row.run}; try again when it has ended"
                raise JournalLocked(msg)
            status, options["wait_for_answers"] = "stranded", 0.0
        # A failure is the last one: the recovery would try it again without what was asked for.
        await self._store.write(make_store_status_act(row.run, status, row.changed, tries=MAX_RESUME_TRIES))
        return options

    async def resume_foreign_journal(self, caller: Caller, run: str, *, listed_agent: str, listed_prompt: str) -> None:
        """
        Resume a journal that no server of this folder started, as a run of *caller*; the ledger lists it with agent and prompt.

        Permissions in the journal are asked for again: its author may have written any approval into it.

        Raises:
            JournalError: If the journal cannot be resumed; ``JournalLocked`` if another process has it.
            Problem: If too many runs are executed, or the caller's quota is exceeded.
        """
        now, request = time.time(), {"prompt": listed_prompt, "params": None, "metadata": None, "is_third_party": True}
        row = RunRow(run, caller.name, listed_agent, "running", now, now, request)
        options: dict[str, Any] = {"in_doubt": "ask", "trust": False, "wait_for_answers": self._patience}
        await self._engines.try_rebuild()
        with self._live.reserve_room(row.owner):
            async with self._quotas.admit_request(row.owner, 0, runs=1):
                with self._engines.hold_current_engine() as engine:
                    handle = await engine.start_resume(self._store.journal(run), **options)
                # Registered last: a server that is killed before has a third-party journal still, and leaves it alone.
                await self._register_or_find_earlier_run(row, None)
                self._live.add_and_watch_run(run, handle, caller.name, is_resumed=True)

    # --- forking ------------------------------------------------------------------------------------------------------

    async def fork(self, caller: Caller, row: RunRow, asked: ForkRun) -> str | tuple[RunRow, ForkReport]:
        """
        Fork a run and return the id of the new run. If the record answers tools (``asked.tools``), return the ended run and a report.

        A run that matches the record, so that ``report.broke_at`` is empty, is not stored.

        Raises:
            Problem: If there is no such effect, too many runs are executed, or the caller's quota is exceeded.
            UndoRefused: If effects on the outside world could happen again.
        """
        await self._engines.rebuild_if_files_changed()
        now, run = time.time(), secrets.token_hex(16)
        changes = {**row.request.get("changes", {}), **asked.given_changes}
        request = {name: value for name, value in row.request.items() if name != "turn"}
        request |= {"changes": changes} if changes else {}
        # Of no conversation: the next turn does not continue from a fork.
        new = RunRow(run, caller.name, row.agent, "running", now, now, request)
        source = self._store.journal(row.run)
        # At most the whole journal is copied.
        with self._live.reserve_room(new.owner):
            size = get_json_size(request) + get_json_size(asked.edit) + await asyncio.to_thread(source.size)
            async with self._quotas.admit_request(new.owner, size, runs=1) as use:
                try:
                    with self._engines.hold_current_engine() as engine:
                        if asked.tools is not None:
                            new, report = await self._fork_from_record(engine, source, new, asked)
                            if not report.broke_at:
                                use.refund()
                            return new, report
                        handle = await self._start_fork(engine, source, new, asked)
                except JournalError as error:
                    raise make_client_error(
                        error, JournalError, row, source, status=422, kind="no_such_place"
                    ) from None
                await self._register_or_find_earlier_run(new, None)
                self._live.add_and_watch_run(run, handle, caller.name, is_resumed=True)
        return run

    async def _start_fork(self, engine: Engine, source: Journal, new: RunRow, asked: ForkRun) -> RunHandle:
        """Start a fork and return its handle; if the agent is changed, copy the journal first and resume the copy."""
        into, changed = self._store.journal(new.run), _make_fork_agent_options(new, engine)
        options: dict[str, Any] = {"at": asked.at, "run_id": new.run, "into": into, **asked.edit_options}
        options["allow_repeat"] = asked.allow_repeat
        if not changed:
            return await engine.start_fork(source, wait_for_answers=self._patience, **options)
        # The part before the fork was requested with the old prompts: `start_fork` would report a divergence.
        await asyncio.to_thread(branch, source, **options)
        try:
            return await engine.start_resume(into, on_divergence="keep", wait_for_answers=self._patience, **changed)
        except BaseException:
            await asyncio.to_thread(into.discard)
            raise

    async def _fork_from_record(
        self, engine: Engine, source: Journal, new: RunRow, asked: ForkRun
    ) -> tuple[RunRow, ForkReport]:
        """
        Fork a run with tools that the record answers, wait for its end, and return its row and report.

        The fork is registered only if it differs from the record; otherwise its journal is deleted.
        """
        into, simulated = self._store.journal(new.run), asked.simulate or {}
        options: dict[str, Any] = {name: getattr(asked, name) for name in ("tools", "at", "reuse", "budget")}
        options |= {"simulate": lambda call, _: simulated.get(call.name), **_make_fork_agent_options(new, engine)}
        report: ForkReport = await engine.fork(source, into=into, **options)
        status, error = report.result.status, str(report.result.error or "").partition("\n")[0]
        if status is RunStatus.SUSPENDED:
            # Never stored as suspended: a resume would perform the tools.
            status, error = RunStatus.FAILED, "the fork is suspended, and a fork with `tools` cannot be resumed"
        new = attrs.evolve(new, status=status.value, error=error.replace(source.name, "its record"))
        if report.broke_at:
            await self._register_or_find_earlier_run(new, None)
        else:
            await asyncio.to_thread(into.discard)
        return new, report

    # --- replaying ----------------------------------------------------------------------------------------------------

    async def replay(self, row: RunRow, live_effects: Collection[str]) -> RunResult:
        """
        Replay a run with the current agents, and return its result; perform the effects of the kinds in *live_effects* again.

        Args:
            row: The run.
            live_effects: The kinds of effects that are performed again and compared; if empty, nothing is performed.

        Raises:
            Problem: If the run cannot be replayed, or too many runs are executed.
            ReplayDivergence: If the agents diverge from the record.
        """
        await self._engines.try_rebuild()
        journal = self._store.journal(row.run)
        try:
            with self._live.reserve_room(row.owner), self._engines.hold_current_engine() as engine:
                return await engine.replay(journal, live=live_effects, **_make_fork_agent_options(row, engine))
        except ReplayDivergence as error:
            error.message = error.message.replace(journal.name, "its record")
            raise
        except JournalError as error:
            raise make_client_error(error, JournalError, row, journal, status=409, kind="not_possible") from None


def _require_resumable(row: RunRow) -> None:
    """Raise ``Problem`` for a run that has ended; a stranded run can be resumed."""
    if row.status != "stranded":
        require_not_ended(row)


def _require_no_options_for_running_run(row: RunRow, asked: ResumeRun | None) -> None:
    """Raise ``Problem`` for a resume with options (*asked*) of a run that is already running."""
    if asked is not None:
        msg = f"the run {row.run} is running, or has changed in the meantime; `on_divergence` needs a run that no process executes"
        raise Problem(msg, status=409, kind="under_way", members={"run_id": row.run})


def _make_fork_agent_options(row: RunRow, engine: Engine) -> dict[str, Any]:
    """Return the options ``agent`` and ``agent_models`` of a fork with its requested changes; an empty dict for other runs."""
    changes = dict(row.request.get("changes", {}))
    if not changes:
        return {}
    agent = engine.agent(row.agent)
    settings = {name: changes.pop(name) for name in ("temperature", "max_tokens") if name in changes}
    # Not as the agent's own model: the model that the server or the start of the run chose has precedence over it.
    model = {"agent_models": {row.agent: changes.pop("model")}} if "model" in changes else {}
    agent = attrs.evolve(agent, **changes, settings=attrs.evolve(agent.settings, **settings))
    return {"agent": agent, **model}


def find_recorded_end_status(journal: Journal) -> str | None:
    """
    Return the status of an ended or cancelled run by its journal, ``None`` before; raise ``JournalMissing`` without one.

    Raises:
        JournalMissing: If the run never started.
    """
    if not journal.is_there():
        raise journal.make_missing_error()
    history = journal.history()
    if history.head is None:
        raise journal.make_missing_error()
    if history.is_complete:
        return get_run_status(history)
    # Its server was killed before it could record the end. A cancel by a person is a message of the mailbox, recorded with
    # the end; what a server cuts off as it stops has none, and is resumed.
    messages = [one.input for one in history.inputs if one.path == "" and one.input.get("type") == "mailbox_message"]
    was_cancelled = history.stop is not None and any(one.get("kind") == "cancel" for one in messages)
    return RunStatus.CANCELLED.value if was_cancelled else None
