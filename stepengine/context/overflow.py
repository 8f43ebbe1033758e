"""``raise_on_overflow``: a run whose prompt is too large fails before the model is asked."""

from __future__ import annotations

import attrs
from attrs import frozen

from stepengine.context.policy import TOKENS, limits_for_hook, max_prompt_tokens
from stepengine.data.definition import HookContext
from stepengine.errors import ContextOverflow


@frozen
class raise_on_overflow:  # noqa: N801 - a policy is called by its name, as a hook is
    """
    A ``pre_step`` hook that fails the run with ``ContextOverflow`` when its prompt is too large.

    The model is not called, and the error says how many tokens there are and how many may be. Changes neither the view
    nor the record.

    Attributes:
        max_tokens: As in every ``ContextPolicy``.
    """

    max_tokens: int | None = attrs.field(default=None, validator=TOKENS)

    def find_prompt_limit(self, context_window: int | None) -> int:
        """Return how many tokens a prompt may have before the run fails."""
        return max_prompt_tokens(self.max_tokens, context_window)

    def __call__(self, ctx: HookContext) -> None:
        """Raise when the next prompt does not fit."""
        limits, view = limits_for_hook(ctx, self.max_tokens), ctx.state.view
        if ctx.overflow is None and not limits.fits(view):
            msg = (
                f"the next prompt of agent {ctx.agent.id!r} has about {limits.size(view)} tokens, but "
                f"{limits.max_tokens} are allowed; allow more, or install truncate() or summarize() instead of this hook"
            )
            raise ContextOverflow(msg, kind="context_overflow")
