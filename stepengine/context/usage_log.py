"""``usage_logger``: logs the token usage of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from stepengine.data.definition import HookContext

if TYPE_CHECKING:
    from logging import Logger, LoggerAdapter


def usage_logger(logger: Logger | LoggerAdapter[Any] | None = None) -> Callable[[HookContext, Any], None]:
    """
    Return a ``post_run`` hook that logs session id, input and output tokens after each run.

    The tokens are those of the run and its children. Input includes tokens from the provider's cache, output includes
    thinking. Changes neither the view nor the record.

    Args:
        logger: The logger, used at level ``info``; ``None`` for the run's own logger, whose lines are events.
    """

    def log(ctx: HookContext, result: Any) -> None:
        """Log the session id and the tokens of a run."""
        usage = result.spending.usage
        fields = {"input_tokens": usage.prompt_tokens, "output_tokens": usage.completion_tokens}
        if logger is None:
            ctx.logger.info("usage", session_id=ctx.session_id, **fields)
        else:
            logger.info("session %s: %d input tokens, %d output tokens", ctx.session_id, *fields.values())

    return log
