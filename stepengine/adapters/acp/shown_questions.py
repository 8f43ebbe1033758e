"""The questions of a session that an editor shows at the moment."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from stepengine.adapters.acp import questions
from stepengine.adapters.acp.editor import ConnectedEditor
from stepengine.data.choices import answer_for_choice, is_single_choice, list_choices
from stepengine.data.questions import Question
from stepengine.errors import AnswerRejected
from stepengine.runtime.handle import RunHandle

if TYPE_CHECKING:
    from acp import schema


class ShownQuestions:
    """Asks the person at an editor, and answers the run. Lasting approvals hold until the session is closed."""

    def __init__(self, editor: ConnectedEditor, session_id: str) -> None:
        self._editor = editor
        self._session_id = session_id
        self._tasks: set[asyncio.Task[None]] = set()
        # By the ids of the rules. An engine that is made anew has forgotten them.
        self._always: set[str] = set()

    def ask_if_showable(self, handle: RunHandle, question: Question) -> bool:
        """Start to ask a question by a form or by options, and return True; False if the editor can show neither."""
        if self._editor.can_show_forms():
            self.ask_in_background(handle, question, None)
        elif is_single_choice(question):
            self.ask_in_background(handle, question, questions.make_question_call(question))
        else:
            return False
        return True

    def ask_in_background(self, handle: RunHandle, question: Question, call: schema.ToolCallUpdate | None) -> None:
        """Start to ask by the permission request for *call*, or with ``None`` by a form; the answer goes to the run."""
        # In a task: the run's text goes on to be shown while a person thinks.
        task = asyncio.create_task(self._ask_and_answer(handle, question, call))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def cancel(self) -> None:
        """Withdraw the questions that are not answered yet."""
        for task in self._tasks:
            task.cancel()

    async def _ask_and_answer(self, handle: RunHandle, question: Question, call: schema.ToolCallUpdate | None) -> None:
        """
        Show a question and answer the run, or repeat a lasting approval.

        A failure of the editor declines the question. If the connection closes, the question stays open.
        """
        from acp import RequestError

        known = [one.answer for one in list_choices(question) if one.answer.covers in self._always]
        try:
            if known:
                answer = known[0]
            elif call is None:
                answer = await self._editor.ask_by_form(self._session_id, question)
            else:
                answer = await self._editor.ask_by_permission_request(self._session_id, question, call)
        except ConnectionError:
            return
        except (RequestError, ValueError):  # the last for what the protocol does not know
            answer = answer_for_choice(question, None)
        if answer.remember:
            self._always.add(answer.covers)
        # The turn may have been cancelled meanwhile.
        with contextlib.suppress(AnswerRejected):
            handle.answer(question.id, answer)
