"""``DurableMessenger``: answers, messages, input and cancels for runs in a database."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from stepengine.data.questions import AnswerLike
from stepengine.server.durable_store import raise_run_errors_as_problems
from stepengine.server.ledger import OPEN, RunRow
from stepengine.server.problems import Problem
from stepengine.server.quotas import QuotaTable, get_json_size
from stepengine.server.run_requests import require_not_ended, validate_and_sign_answers

if TYPE_CHECKING:
    from stepengine.server.access import Caller
    from stepengine.server.durable_launcher import DurableLauncher
    from stepengine.server.durable_store import DurableStore


class DurableMessenger:
    """
    Delivers messages to runs through the database.

    Args:
        store: The database.
        launcher: Submits a run that a dead server had registered, before a message is sent to it.
        quotas: What each owner uses.
    """

    def __init__(self, store: DurableStore, launcher: DurableLauncher, quotas: QuotaTable) -> None:
        self._store = store
        self._launcher = launcher
        self._quotas = quotas

    async def answer(self, caller: Caller, row: RunRow, answers: Mapping[str, AnswerLike]) -> None:
        """
        Answer open questions, all or none of them.

        Raises:
            AnswerRejected: If a question is not open, the answer does not fit it, or another person answered first.
            Problem: If *caller* may not give such an answer.
        """
        require_not_ended(row)
        asked = await self._store.operator.list_questions(row.run)
        open_ = {question.id: question for each in asked for question in each.questions}
        await self._store.operator.answer_first(row.run, validate_and_sign_answers(caller, answers, open_))

    async def list_stored_answers(self, row: RunRow, questions: Collection[str]) -> list[tuple[str, str, str]]:
        """Return an empty list, because the database does not store the authors of answers."""
        return []

    async def send_message(self, row: RunRow, topic: str, value: object, *, id: str | None, path: str) -> bool:
        """
        Send a message to the receiver of *topic*; return False if *id* was sent before.

        Errors are those of ``DurableEngine.send_message``, and ``Problem`` over a quota.
        """
        require_not_ended(row)
        await self._launcher.submit_if_unsubmitted(row)
        size = get_json_size(value)
        async with self._quotas.admit_request(row.owner, size) as use:
            with raise_run_errors_as_problems(status=409, kind="not_possible"):
                is_new = await self._store.operator.send_message(row.run, topic, value, id=id, path=path)
            if is_new:
                await self._store.register.add_client_bytes(row.run, size)
            else:
                use.refund()
        return is_new

    async def send_user_input(self, row: RunRow, text: str) -> None:
        """Send user input to a run: its next model call gets it."""
        require_not_ended(row)
        await self._launcher.submit_if_unsubmitted(row)
        size = get_json_size(text)
        async with self._quotas.admit_request(row.owner, size):
            with raise_run_errors_as_problems(status=409, kind="not_possible"):
                await self._store.operator.send_input(row.run, text)
            await self._store.register.add_client_bytes(row.run, size)

    async def cancel(self, row: RunRow, reason: str) -> None:
        """Cancel a run and its children; one that has ended stays as it is."""
        if row.status not in OPEN:
            return
        await self._launcher.submit_if_unsubmitted(row)
        if reason:
            await self._store.register.record_cancellation(row.run, reason)
        await self._store.operator.cancel(row.run)

    async def deliver_tool_result(self, row: RunRow, call_id: str, result: object, path: str | None) -> None:
        """
        Raise ``Problem``, because a run in a database never waits for the result of a deferred tool.

        Raises:
            Problem: Always: a durable run fails when it calls a deferred tool.
        """
        require_not_ended(row)
        msg = (
            f"the run {row.run} does not wait for the call {call_id[:200]!r}: a run in a database waits for external results with "
            "`Receive`; send them as messages"
        )
        raise Problem(msg, status=409, kind="not_possible")
