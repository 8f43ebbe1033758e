"""
``inject_context`` and ``reminders``: text in every request that is stored nowhere.

They change neither view nor record: what they say stands at the end of one request (``ModelRequest.tail``), so the
prefix that a provider has cached stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from stepengine.data.definition import HookContext
from stepengine.data.hooks import Change
from stepengine.data.messages import UserMessage, UserPart, system_reminder

Said: TypeAlias = "str | Callable[[HookContext], str | None] | None"
"""Text, or a pure function of the hook's context that gives text; ``None`` and ``""`` say nothing."""
Hook: TypeAlias = Callable[[HookContext], Change | None]


def inject_context(*parts: UserPart | Said) -> Hook:
    """
    Return a hook that puts content into every request without it piling up in the history.

    ``Hooks(pre_step=[inject_context("The user is in Oslo.", lambda ctx: ctx.state.context.get("note"))])``

    For ``pre_step``, where functions are asked before each request, or for ``pre_run``, where they are asked once. Changes
    neither the view nor the record.

    Args:
        *parts: Texts, images, documents, or functions of the hook's context that give text.
    """

    def inject(ctx: HookContext) -> Change | None:
        found = [_resolve_text(part, ctx) for part in parts]
        content = tuple([part for part in found if part])
        return Change(tail=(UserMessage(content, ("INJECTED_CONTEXT",)),)) if content else None

    return inject


def reminders(*texts: Said) -> Hook:
    """
    Return a hook that ends every request with ``<system-reminder>`` blocks.

    For ``pre_step``, where functions are asked before each request, or for ``pre_run``, where they are asked once. Changes
    neither the view nor the record.

    Args:
        *texts: Texts, or functions of the hook's context that give text or nothing.
    """

    def remind(ctx: HookContext) -> Change | None:
        found = [_resolve_text(text, ctx) for text in texts]
        content = "\n".join([system_reminder(text) for text in found if text])
        return Change(tail=(UserMessage(content, ("REMINDER",)),)) if content else None

    return remind


def _resolve_text(value: object, ctx: HookContext) -> Any:
    return value(ctx) if callable(value) else value
