"""``ContextPolicy``: what the policies that shorten a history have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from datetime import datetime

import attrs

from stepengine.context.sizes import ContextLimits, limits_of
from stepengine.data.hooks import Change, HookContext
from stepengine.data.transcript import Transcript
from stepengine.errors import DefinitionError

__all__ = ("ContextPolicy", "check_policy")


def check_policy(name: str, max_tokens: int | None, **ratios: float) -> None:
    """Raise ``DefinitionError`` unless *max_tokens* is a positive number and every ratio lies in 0 <= ratio < 1."""
    if max_tokens is not None and max_tokens < 1:
        msg = f"{name}: max_tokens is a number of tokens from 1 on, or None, not {max_tokens!r}"
        raise DefinitionError(msg)
    for option, ratio in ratios.items():
        if not 0 <= ratio < 1:
            msg = f"{name}: {option} is a share from 0 on and below 1, not {ratio!r}"
            raise DefinitionError(msg)


@attrs.frozen(kw_only=True)
class ContextPolicy(ABC):
    """
    A ``pre_step`` hook that shortens a history which has become too large (requirements I2).

    It is called before every model call; what it decides follows from recorded values alone, so a replay decides the same.
    While there is nothing to do its cost does not depend on the length of the history, and it changes nothing.

    A **view** policy (``replace_record=False``) changes what the model is shown and leaves the record whole. A **record**
    policy (``replace_record=True``) replaces the record itself; what is left out then is gone from the result, too.

    Attributes:
        max_tokens: What a prompt may have: system prompt, tools and messages. ``None``: 0.8 of the model's context length
            when it is known, else 100,000.
        replace_record: Whether the record is replaced, not only the view.
    """

    max_tokens: int | None = None
    replace_record: bool = False

    def __call__(self, ctx: HookContext) -> Change | None:
        """Return the change that makes the prompt fit, or ``None``."""
        shorter = self.rewrite(self.source(ctx), limits_of(ctx, self.max_tokens), ctx.now)
        return None if shorter is None else self.change(shorter)

    def source(self, ctx: HookContext) -> Transcript:
        """Return the history that this policy shortens."""
        return ctx.state.message_history if self.replace_record else ctx.state.view

    def change(self, shorter: Transcript) -> Change:
        """Return *shorter* as a change of the view or of the record."""
        return Change(messages=shorter) if self.replace_record else Change(view=shorter)

    @abstractmethod
    def rewrite(self, transcript: Transcript, limits: ContextLimits, now: datetime) -> Transcript | None:
        """Return a shorter history, or ``None`` when there is nothing to do: a pure function, also for handlers."""
