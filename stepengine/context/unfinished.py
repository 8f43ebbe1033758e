"""``require_finished_todos``: reminds an agent of open todos before it stops, a few times."""

from __future__ import annotations

from collections.abc import Callable

from stepengine.data.call_text import parse_todos
from stepengine.data.definition import HookContext
from stepengine.data.messages import UserMessage, system_reminder
from stepengine.errors import DefinitionError

UNFINISHED = "UNFINISHED_TODOS"
"""The tag of the reminder."""


def require_finished_todos(max_reminders: int = 1) -> Callable[[HookContext], UserMessage | None]:
    """
    Return an ``on_stop`` hook that lists open todos and continues the turn, *max_reminders* times.

    The todos are those of ``write_todos`` in ``AgentState.context["todos"]``. The message is added to view and record.

    Args:
        max_reminders: The most reminders for one prompt of the user; the machine stops at 10.

    Raises:
        DefinitionError: for a negative number.
    """
    if max_reminders < 0:
        msg = f"require_finished_todos: max_reminders must be a number of at least 0, not {max_reminders!r}"
        raise DefinitionError(msg)

    def check(ctx: HookContext) -> UserMessage | None:
        """Return a reminder that lists the open todos; ``None`` if there are none, or after *max_reminders* reminders."""
        todos = [todo.task for todo in parse_todos(ctx.state.context.get("todos")) if not todo.completed]
        if not todos or _count_reminders(ctx) >= max_reminders:
            return None
        listed = "\n".join([f"- {task}" for task in todos])
        text = (
            f"These todos are still open:\n{listed}\nFinish them; or call write_todos again so that the list says what "
            "was really done, and tell the user what stays open and why."
        )
        return UserMessage(system_reminder(text), (UNFINISHED,))

    return check


def _count_reminders(ctx: HookContext) -> int:
    """Return the number of todo reminders since the last prompt of the user."""
    count = 0
    for message in reversed(ctx.messages):
        tags = message.tags if isinstance(message, UserMessage) else ()
        if "USER_PROMPT" in tags:
            break
        count += UNFINISHED in tags
    return count
