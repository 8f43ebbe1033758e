"""``raise_on_overflow``: stops a run with a too large prompt before the model is called."""

from __future__ import annotations

import attrs
from attrs import frozen

from stepengine.context.policy import TOKENS, compute_prompt_limit, make_hook_limits
from stepengine.data.definition import HookContext
from stepengine.errors import ContextOverflow


@frozen
class raise_on_overflow:  # noqa: N801 - a policy is called by its name, as a hook is
    """
    A ``pre_step`` hook that fails the run with ``ContextOverflow`` if its prompt is too large.

    The model is not called. The error contains the number of tokens and the limit. Changes neither the view nor the
    record.

    Attributes:
        max_tokens: As in every ``ContextPolicy``.
    """

    max_tokens: int | None = attrs.field(default=None, validator=TOKENS)

    def find_prompt_limit(self, context_window: int | None) -> int:
        """Return the most tokens that a prompt may have before the run fails."""
        return compute_prompt_limit(self.max_tokens, context_window)

    def __call__(self, ctx: HookContext) -> None:
        """Raise ``ContextOverflow`` if the next prompt is too large; do nothing if the provider has already rejected it."""
        limits, view = make_hook_limits(ctx, self.max_tokens), ctx.state.view
        if ctx.overflow is None and not limits.fits(view):
            msg = (
                f"the next prompt of agent {ctx.agent.id!r} has about {limits.size(view)} tokens, but "
                f"{limits.max_tokens} are allowed; raise the limit, or install truncate() or summarize() instead of this hook"
            )
            raise ContextOverflow(msg, kind="context_overflow")
