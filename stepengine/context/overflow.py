"""``raise_on_overflow``: a run whose prompt is too large fails before the model is asked."""

from __future__ import annotations

from collections.abc import Callable

from stepengine.context.policy import check_policy, limits_of
from stepengine.data.hooks import HookContext
from stepengine.errors import ContextOverflow

__all__ = ("raise_on_overflow",)


def raise_on_overflow(max_tokens: int | None = None) -> Callable[[HookContext], None]:
    """
    Return a ``pre_step`` hook that fails the run with ``ContextOverflow`` when its prompt is too large (requirements I7).

    The model is not called, and the error says how many tokens there are and how many may be. Changes neither the view
    nor the record.

    Args:
        max_tokens: What a prompt may have; ``None``: 0.8 of the model's context length when known, else 100,000.

    Raises:
        DefinitionError: for a limit below 1.
    """
    check_policy("raise_on_overflow", max_tokens)

    def check(ctx: HookContext) -> None:
        limits, view = limits_of(ctx, max_tokens), ctx.state.view
        if ctx.overflow is None and not limits.fits(view):
            msg = (
                f"the next prompt of agent {ctx.agent.id!r} has about {limits.size(view)} tokens, but "
                f"{limits.max_tokens} are allowed; allow more, or install truncate() or summarize() instead of this hook"
            )
            raise ContextOverflow(msg, kind="context_overflow")

    return check
