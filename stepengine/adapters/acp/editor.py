"""The connected editor: its capabilities, and the updates and questions that a session sends to it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepengine.adapters.acp import questions
from stepengine.adapters.acp.editor_files import EditorBuffers, EditorTerminals
from stepengine.data.choices import answer_for_choice
from stepengine.data.questions import Answer, Question

if TYPE_CHECKING:
    from acp import schema
    from acp.interfaces import Client


class ConnectedEditor:
    """
    The editor, as one session of an agent reaches it.

    Attributes:
        client: The connection; ``None`` before there is one.
        capabilities: The capabilities that the editor named; ``None`` before it did.
    """

    def __init__(self) -> None:
        self.client: Client | None = None
        self.capabilities: Any = None
        self._later: set[asyncio.Task[None]] = set()

    async def send_update(self, session_id: str, update: Any) -> None:
        """Send an update of a session to the editor."""
        await self._get_client().session_update(session_id, update)

    def send_after_reply(self, sending: Awaitable[None]) -> None:
        """Await *sending* in a background task, so that the editor receives the reply to the current request first."""
        task: asyncio.Task[None] = asyncio.create_task(_await_ignoring_disconnect(sending))
        self._later.add(task)
        task.add_done_callback(self._later.discard)

    def cancel_pending_updates(self) -> None:
        """Cancel the updates that ``send_after_reply`` has not sent yet."""
        for task in self._later:
            task.cancel()

    def can_show_forms(self) -> bool:
        """Return whether the editor can ask a person by a form."""
        can = getattr(self.capabilities, "elicitation", None)
        return can is not None and can.form is not None

    async def ask_by_permission_request(
        self, session_id: str, question: Question, call: schema.ToolCallUpdate
    ) -> Answer:
        """Show the options of a question as a permission request for *call*, and return the chosen answer."""
        response = await self._get_client().request_permission(
            session_id, call, questions.make_permission_options(question)
        )
        return answer_for_choice(question, getattr(response.outcome, "option_id", None))

    async def ask_by_form(self, session_id: str, question: Question) -> Answer:
        """Show a question as a form, and return the answer."""
        from acp import schema

        mode = schema.ElicitationFormSessionMode(
            session_id=session_id, requested_schema=questions.make_question_form(question)
        )
        response = await self._get_client().create_elicitation(question.text, mode)
        return questions.parse_form_answer(question, response)

    def make_buffers_and_terminals(
        self, session_id: str, cwd: Path, show_terminal: Callable[[str, str, str], Awaitable[None]]
    ) -> dict[str, object]:
        """Return the ``buffers`` and ``terminals`` that the editor offers to the tools of a session."""
        can, client = self.capabilities, self.client
        offered: dict[str, object] = {}
        if can is None or client is None:
            return offered
        fs = getattr(can, "fs", None)
        reads, writes = bool(getattr(fs, "read_text_file", False)), bool(getattr(fs, "write_text_file", False))
        if reads or writes:
            offered["buffers"] = EditorBuffers(client, session_id, cwd, reads=reads, writes=writes)
        if can.terminal:
            offered["terminals"] = EditorTerminals(client, session_id, cwd, show_terminal)
        return offered

    def _get_client(self) -> Client:
        """Return the client; a connection has set it before any request."""
        assert self.client is not None  # noqa: S101 - somebody is connected, or nothing would run
        return self.client


async def _await_ignoring_disconnect(sending: Awaitable[None]) -> None:
    """Await *sending*; ignore the error of a closed connection."""
    with contextlib.suppress(ConnectionError):
        await sending
