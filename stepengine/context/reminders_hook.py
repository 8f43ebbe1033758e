"""
``inject_context`` and ``reminders``: text that is added to every request and not stored.

They change neither view nor record. Their text is at the end of one request (``ModelRequest.tail``), so the prefix in the
provider's cache stays valid.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from stepengine.data.definition import HookContext
from stepengine.data.hooks import Change
from stepengine.data.messages import UserMessage, UserPart, system_reminder

ReminderText: TypeAlias = "str | Callable[[HookContext], str | None] | None"
"""Text, or a pure function of the hook's context that returns text; ``None`` and ``""`` add nothing."""
Hook: TypeAlias = Callable[[HookContext], Change | None]


def inject_context(*parts: UserPart | ReminderText) -> Hook:
    """
    Return a hook that adds content to every request but not to the history.

    ``Hooks(pre_step=[inject_context("The user is in Oslo.", lambda ctx: ctx.state.context.get("note"))])``

    Use it as ``pre_step`` to call the functions before each request, or as ``pre_run`` to call them once. Changes neither
    the view nor the record.

    Args:
        *parts: Texts, images, documents, or functions of the hook's context that return text.
    """

    def inject(ctx: HookContext) -> Change | None:
        """Add the parts, with functions called, to the end of the request."""
        found = [_resolve_text(part, ctx) for part in parts]
        content = tuple([part for part in found if part])
        return Change(tail=(UserMessage(content, ("INJECTED_CONTEXT",)),)) if content else None

    return inject


def reminders(*texts: ReminderText) -> Hook:
    """
    Return a hook that adds ``<system-reminder>`` blocks at the end of every request.

    Use it as ``pre_step`` to call the functions before each request, or as ``pre_run`` to call them once. Changes neither
    the view nor the record.

    Args:
        *texts: Texts, or functions of the hook's context that return text or nothing.
    """

    def remind(ctx: HookContext) -> Change | None:
        """Add the texts, with functions called, as ``<system-reminder>`` blocks to the end of the request."""
        found = [_resolve_text(text, ctx) for text in texts]
        content = "\n".join([system_reminder(text) for text in found if text])
        return Change(tail=(UserMessage(content, ("REMINDER",)),)) if content else None

    return remind


def _resolve_text(value: object, ctx: HookContext) -> Any:
    """Return a text or part unchanged; call a function with the hook's context."""
    return value(ctx) if callable(value) else value
