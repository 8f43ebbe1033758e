"""``RunMessenger``: answers, messages, input, cancels and tool results for the runs of a server."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from stepengine.data.codec import decode_stored, encode_stored
from stepengine.data.json import thaw
from stepengine.data.questions import DOUBT, AnswerLike, Question
from stepengine.errors import AnswerRejected, InputError, JournalMissing, StepEngineError, ToolError
from stepengine.journal.mailbox import MailboxMessage
from stepengine.journal.messages import send_tool_result
from stepengine.journal.sleepers import wake_for_mailbox_message
from stepengine.server.ledger import (
    OPEN,
    RunRow,
    make_count_message_act,
    make_remove_decisions_act,
    make_store_decisions_act,
)
from stepengine.server.problems import Problem
from stepengine.server.quotas import QuotaTable, get_json_size
from stepengine.server.run_requests import make_client_error, require_not_ended, validate_and_sign_answers

if TYPE_CHECKING:
    from stepengine.journal.sources import JournalLike
    from stepengine.journal.store import Journal
    from stepengine.runtime.handle import RunHandle
    from stepengine.server.access import Caller
    from stepengine.server.current_engine import CurrentEngine
    from stepengine.server.live_runs import LiveRuns
    from stepengine.server.run_launcher import RunLauncher
    from stepengine.server.run_reader import RunReader
    from stepengine.server.run_store import RunStore

SUSPEND_SECONDS = 30.0
"""Seconds that a request waits for a run that is being suspended. Its last records take milliseconds, on a busy disk seconds."""
SUSPEND_PAUSE_SECONDS = 0.02
"""Seconds between two checks of such a run."""


class RunMessenger:
    """
    Delivers messages to runs.

    Each message is in the mailbox next to the run's journal before the sender gets the receipt. Then the run is notified, in this process
    or through the ledger. So any server of the store can accept a message, and a server that dies in between loses nothing.

    Args:
        store: The journals and the ledger.
        live: The runs of this process.
        engines: The engines of these runs.
        reader: Finds the open questions of a run.
        launcher: Resumes a suspended run for which something arrived.
        quotas: What each owner uses.
    """

    def __init__(
        self,
        store: RunStore,
        live: LiveRuns,
        *,
        engines: CurrentEngine,
        reader: RunReader,
        launcher: RunLauncher,
        quotas: QuotaTable,
    ) -> None:
        self._store = store
        self._live = live
        self._engines = engines
        self._reader = reader
        self._launcher = launcher
        self._quotas = quotas
        self._resuming: dict[str, asyncio.Task[Any]] = {}

    async def answer(
        self, caller: Caller, row: RunRow, answers: Mapping[str, AnswerLike], *, page_questions: Collection[str] = (),
        user_input: str = "",
    ) -> None:  # fmt: skip
        """
        Store answers to open questions, all or none of them, and notify or resume the run.

        Args:
            caller: The caller who answers.
            row: The run.
            answers: By the ids of their questions.
            page_questions: The questions that a tool of the page answers, and not *caller*.
            user_input: User input that the next model call gets with the answers.

        Raises:
            AnswerRejected: If a question is not open, an answer does not fit it, or another person answered first.
            Problem: If *caller* may not give such an answer.
        """
        require_not_ended(row)
        given = validate_and_sign_answers(
            caller, answers, await self._find_open_questions(row, answers), page_questions
        )
        letters = [
            # The same id for two people who answer one question at the same time, so that the second is refused.
            MailboxMessage(kind="answer", topic=question, value=encode_stored(answer), id=f"{question}@{row.changed}")
            for question, answer in given.items()
            if not question.startswith(DOUBT)
        ]
        if user_input:
            letters.append(MailboxMessage(kind="input", value=user_input, id=f"input:{min(given)}@{row.changed}"))
        # In the ledger and not in the mailbox: a run that is killed while it repeats an effect would find the decision
        # there again, and repeat the effect once more.
        decided = {question: answer for question, answer in given.items() if question.startswith(DOUBT)}
        new: list[str] | None = None
        try:
            if decided:
                # Before the decisions mark the run as running: it cannot be resumed with a mailbox that cannot be read.
                await asyncio.to_thread(self._store.journal(row.run).mailbox().read)
                new = await self._store.write(make_store_decisions_act(row.run, decided))
            if letters:
                await asyncio.to_thread(self._write_mailbox_messages, row, letters)
        except Exception as error:
            if new:
                await self._store.write(make_remove_decisions_act(row.run, new))
            if not isinstance(error, InputError):
                raise
            msg = f"somebody else has answered {' or '.join(map(repr, given))} in the meantime"
            raise AnswerRejected(msg) from None
        await self._notify_or_resume_run(row)

    async def list_stored_answers(self, row: RunRow, questions: Collection[str]) -> list[tuple[str, str, str]]:
        """Return (question id, answerer, answer) from the mailbox for those of *questions* that were answered, the first answer each."""
        return await asyncio.to_thread(_list_mailbox_answers, self._store.journal(row.run), questions)

    async def answer_and_find_handle(
        self, caller: Caller, row: RunRow, answers: Mapping[str, AnswerLike], *, page_questions: Collection[str] = (),
        user_input: str = "",
    ) -> RunHandle | None:  # fmt: skip
        """
        Answer a suspended run, and return the handle of its resumption; ``None`` if no run of this process resumes it.

        Arguments and errors are those of ``answer``.
        """
        before = self._live.find_ended_handle(row.run)
        await self.answer(caller, row, answers, page_questions=page_questions, user_input=user_input)
        if row.run in self._resuming:
            await asyncio.wait((self._resuming[row.run],))
        handle = self._live.handles.get(row.run) or self._live.find_ended_handle(row.run)
        return None if handle is before else handle

    async def _find_open_questions(self, row: RunRow, question_ids: Iterable[str]) -> dict[str, Question]:
        """Return the open questions of a run by id; while it is being suspended, wait up to 30 s for those in *question_ids*."""
        until = time.monotonic() + SUSPEND_SECONDS
        while True:
            is_live = row.run in self._live
            known = {question.id: question for question in (await self._reader.load_details(row)).questions}
            missing = set(question_ids) - known.keys()
            if not (is_live and missing) or time.monotonic() > until:
                return known
            # A run drops its questions before it is suspended; an answer that arrives in between is in time.
            with contextlib.suppress(JournalMissing):
                recorded = (await self._reader.read_details_from_journal(row)).questions
                if not missing.intersection(question.id for question in recorded):
                    return known
            await asyncio.sleep(SUSPEND_PAUSE_SECONDS)

    async def send_message(self, row: RunRow, topic: str, value: object, *, id: str | None, path: str) -> bool:
        """
        Send a message to the receiver of *topic*; return False if *id* was sent before.

        Errors are those of ``Engine.send_message``, and ``Problem`` over a quota.
        """
        require_not_ended(row)
        journal = self._store.journal(row.run)
        handle = self._live.handles.get(row.run)
        async with self._quotas.admit_request(row.owner, get_json_size(value)) as use:
            try:
                try:
                    engine = self._engines.get_engine_for_run(row.run)
                    is_new = await engine.send_message(handle or journal, topic, value, id=id, path=path)
                except StepEngineError:
                    if handle is None or not handle.done:
                        raise
                    # It was suspended in the meantime, and still has its mailbox.
                    is_new = await self._engines.engine.send_message(journal, topic, value, id=id, path=path)
            except StepEngineError as error:
                raise make_client_error(error, StepEngineError, row, journal, status=409, kind="not_possible") from None
            if not is_new:
                use.refund()
        await self._notify_or_resume_run(row)
        return is_new

    async def send_user_input(self, row: RunRow, text: str) -> None:
        """Send user input to a run: its next model call gets it."""
        require_not_ended(row)
        async with self._quotas.admit_request(row.owner, get_json_size(text)):
            if await self._send_mailbox_message(row, MailboxMessage(kind="input", value=text)) is None:
                self._live.handles[row.run].send_input(text)

    async def cancel(self, row: RunRow, reason: str) -> None:
        """Request the cancellation of a run; a run that has ended is not changed."""
        if row.status not in OPEN:
            # A run that is extended counts as stranded meanwhile, and reads no mailbox.
            if row.status == "stranded" and row.run in self._live:
                self._live.handles[row.run].interrupt()
            return
        message = MailboxMessage(kind="cancel", value=reason, id=f"cancel@{row.changed}")
        try:
            if await self._send_mailbox_message(row, message) is None:
                self._live.handles[row.run].interrupt()
        except JournalMissing:
            # Its server died before it started the run, and there was no room for it since.
            if not await self._launcher.cancel_if_unrecorded(row.run, reason):
                raise

    async def deliver_tool_result(self, row: RunRow, call_id: str, result: object, path: str | None) -> None:
        """
        Deliver the result of a call of a deferred tool, whichever process has the run.

        Raises:
            InputError: If the call already has another result, or this one is too long.
            Problem: If no such call waits.
        """
        require_not_ended(row)
        handle, journal = self._live.handles.get(row.run), self._store.journal(row.run)
        try:
            await asyncio.to_thread(_store_or_send_tool_result, handle, journal, call_id, result, path)
        except ToolError as error:
            raise Problem(error.message, status=409, kind="no_such_call") from error
        except StepEngineError as error:
            raise make_client_error(error, StepEngineError, row, journal, status=409, kind="not_possible") from None
        await self._notify_or_resume_run(row)

    async def _send_mailbox_message(self, row: RunRow, message: MailboxMessage) -> MailboxMessage | None:
        """Send a mailbox message, notify the run, and return the message; ``None`` if a run of this process has no mailbox yet."""
        try:
            await asyncio.to_thread(self._write_mailbox_messages, row, [message])
        except JournalMissing:
            if row.run not in self._live:
                raise
            return None
        except InputError:  # the run was cancelled before, with another reason
            return message
        await self._notify_or_resume_run(row)
        return message

    def _write_mailbox_messages(self, row: RunRow, messages: Iterable[MailboxMessage]) -> None:
        """Write all messages to the mailbox next to the journal of a run, or none of them."""
        self._store.journal(row.run).mailbox().send_all(messages)

    async def _notify_or_resume_run(self, row: RunRow) -> None:
        """Make a run read its mailbox: notify it if this process runs it, resume it if no process does."""
        # In the ledger first, also for a run of this process, which may be suspended at this moment: if this process dies
        # now, the run is resumed.
        await self._store.write(make_count_message_act(row.run))
        handle = self._live.handles.get(row.run)
        if handle is not None:
            await handle.fetch_mail()
            return
        # If another process has the run, that one reads the mailbox by itself, and this one finds its lock.
        await asyncio.to_thread(wake_for_mailbox_message, self._store.journal(row.run))
        if row.status in OPEN:
            self._resuming[row.run] = task = self._live.tasks.spawn(self._launcher.resume_or_record_failure(row))
            task.add_done_callback(lambda _: self._resuming.get(row.run) is task and self._resuming.pop(row.run))


def _store_or_send_tool_result(
    handle: RunHandle | None, journal: JournalLike, call_id: str, result: object, path: str | None
) -> bool:
    """
    Store the result of a call; return False if the same result was sent before.

    A live run stores it. If a resumed run has not reached the call again, the result is sent to its journal.
    """
    if handle is not None:
        with contextlib.suppress(ToolError):
            return handle.store_tool_result(call_id, result, path=path)
    return send_tool_result(journal, call_id, result, path=path)


def _list_mailbox_answers(journal: Journal, question_ids: Collection[str]) -> list[tuple[str, str, str]]:
    """Return (question id, answerer, answer) for the first answer to each question in *question_ids*."""
    found: dict[str, tuple[str, str, str]] = {}
    try:
        letters, _ = journal.mailbox().read()
        for letter in letters:
            if letter.kind == "answer" and letter.topic in question_ids:
                answer = decode_stored(thaw(letter.value))
                found.setdefault(letter.topic, (letter.topic, answer.by, answer.value or "(declined)"))
    except (StepEngineError, OSError):
        return []
    return list(found.values())
