"""``ContextPolicy``: the base of the policies that shorten a history, and the size of prompts and its limits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import datetime
from typing import Any, TypeAlias

import attrs
from attrs import frozen

from stepengine.data.definition import HookContext
from stepengine.data.estimate import estimate_tokens, transcript_tokens
from stepengine.data.hooks import Change
from stepengine.data.messages import AssistantMessage, ToolMessage, UserMessage
from stepengine.data.state import AgentState
from stepengine.data.transcript import Transcript
from stepengine.errors import DefinitionError

DEFAULT_MAX_TOKENS = 100_000
"""A prompt of this size and its reply fit in a window of 128,000 tokens, which most models have."""
WINDOW_RATIO = 0.8
"""The rest is for the reply, and for the error of an estimate by characters."""
REMINDER_TOKENS = 20
"""The tokens of a step prompt in addition to its text: the message and its reminder tags."""


def compute_prompt_limit(max_tokens: int | None, context_window: int | None) -> int:
    """Return the limit of a prompt in tokens: *max_tokens*, else 0.8 of the context window, else 100,000."""
    if max_tokens is not None:
        return max_tokens
    return DEFAULT_MAX_TOKENS if context_window is None else int(context_window * WINDOW_RATIO)


@frozen(kw_only=True)
class ContextLimits:
    """
    The limits of a policy, in tokens.

    Attributes:
        max_tokens: The limit of a whole prompt.
        overhead: The estimated size of the prompt without the messages: system prompt, tool definitions, step prompt.
        ratio: The provider's token count for each estimated token; 1 before it has reported any.
    """

    max_tokens: int
    overhead: int = 0
    ratio: float = 1.0

    @classmethod
    def for_state(
        cls,
        state: AgentState,
        max_tokens: int | None = None,
        *,
        context_window: int | None = None,
        size: int | None = None,
        step_prompt: str = "",
    ) -> ContextLimits:
        """
        Return the limits for the next prompt of a run, for example for a handler that prunes by itself.

        Args:
            state: The state of the run.
            max_tokens: The limit of a prompt; ``None`` for 0.8 of *context_window* if it is known, else 100,000.
            context_window: The model's context length in tokens, if known.
            size: The number of tokens of the prompt that the provider reported, if known.
            step_prompt: The agent's step prompt, which the state does not contain.
        """
        estimated = state.context_tokens
        overhead = estimated - transcript_tokens(state.view)
        if step_prompt:
            overhead += REMINDER_TOKENS + estimate_tokens(step_prompt)
        ratio = 1.0 if size is None or not estimated else size / estimated
        return cls(max_tokens=compute_prompt_limit(max_tokens, context_window), overhead=overhead, ratio=ratio)

    @property
    def room(self) -> int:
        """The limit of the messages in estimated tokens; a provider's token counts can only lower it."""
        return max(0, int(self.max_tokens / max(1.0, self.ratio)) - self.overhead)

    def size(self, transcript: Transcript) -> int:
        """Return the estimated size of a prompt with *transcript*, in tokens of the provider."""
        return round((self.overhead + transcript_tokens(transcript)) * self.ratio)

    def fits(self, transcript: Transcript) -> bool:
        """Return whether a prompt with *transcript* is within the limit, in O(1) after its messages were measured."""
        return self.size(transcript) <= self.max_tokens


def make_hook_limits(ctx: HookContext, max_tokens: int | None = None) -> ContextLimits:
    """
    Return the limits for the prompt after a ``pre_step`` hook; after a rejection as too long, half of the rejected size.

    So a policy has nothing to do if an earlier policy has already halved the rejected prompt.
    """
    # Required by reliability:MP02.
    limits = ContextLimits.for_state(
        ctx.state,
        max_tokens,
        context_window=ctx.context_window,
        size=ctx.context_tokens,
        step_prompt=ctx.agent.step_prompt,
    )
    if ctx.overflow is None:
        return limits
    refused = ctx.state.context_tokens if ctx.refused_tokens is None else ctx.refused_tokens
    half = (limits.overhead - ctx.state.context_tokens + transcript_tokens(ctx.state.view) + refused) // 2
    return attrs.evolve(limits, max_tokens=min(limits.max_tokens, half), ratio=1.0)


def group_calls_with_results(transcript: Transcript) -> list[range]:
    """Return the position ranges of messages that must not be separated: one message, or a reply with the results of its calls."""
    groups: list[range] = []
    for index, message in enumerate(transcript):
        if isinstance(message, ToolMessage):
            groups[-1] = range(groups[-1].start, index + 1)
        else:
            assert isinstance(message, (UserMessage, AssistantMessage))  # noqa: S101 - a transcript holds nothing else
            groups.append(range(index, index + 1))
    return groups


def find_last_tagged_user_message(transcript: Transcript, tag: str) -> int | None:
    """Return the position of the last user message with *tag*; ``None`` if there is none."""
    for index in range(len(transcript) - 1, -1, -1):
        message = transcript[index]
        if isinstance(message, UserMessage) and tag in message.tags:
            return index
    return None


Check: TypeAlias = Callable[[Any, "attrs.Attribute[Any]", Any], None]


def make_option_validator(test: Callable[[Any], bool], words: str) -> Check:
    """Return an attrs validator for a number or ``None``; an invalid value raises ``DefinitionError`` with the expected *words*."""

    def check_option(policy: object, field: attrs.Attribute[Any], value: object) -> None:
        """Raise ``DefinitionError`` unless the option is ``None`` or a number that passes the test."""
        if isinstance(value, bool) or not isinstance(value, int | float | None) or not test(value):
            msg = f"{type(policy).__name__}: {field.name} must be {words}, not {value!r}"
            raise DefinitionError(msg)

    return check_option


TOKENS = make_option_validator(lambda value: value is None or value >= 1, "a number of tokens, at least 1, or None")
COUNT = make_option_validator(lambda value: value is not None and value >= 0, "a number of at least 0")
SHARE = make_option_validator(lambda value: value is not None and 0 <= value < 1, "a share of at least 0 and below 1")


@frozen
class ContextPolicy(ABC):
    """
    A ``pre_step`` hook that shortens a too large history.

    It is called before every model call. Its decision depends only on recorded values, so a replay decides the same. If
    there is nothing to do, its cost does not depend on the length of the history.

    To make a policy, call its class, as in ``truncate(50_000)``. The policy is immutable.

    A **view** policy (``replace_record=False``) changes the history for the model and leaves the record complete. A
    **record** policy (``replace_record=True``) replaces the record itself, so the omitted parts are also missing in the result.

    Attributes:
        max_tokens: The limit of a prompt: system prompt, tools and messages. ``None`` for 0.8 of the model's context length
            if it is known, else 100,000.
        replace_record: Whether to replace the record, not only the view.

    Raises:
        DefinitionError: for an invalid option, such as a limit below 1.
    """

    max_tokens: int | None = attrs.field(default=None, validator=TOKENS)
    replace_record: bool = attrs.field(default=False, kw_only=True)

    def __call__(self, ctx: HookContext) -> Change | None:
        """Return the change that shortens the history; ``None`` if it fits or cannot be shortened."""
        shorter = self.rewrite(self.get_history(ctx), make_hook_limits(ctx, self.max_tokens), ctx.now)
        return None if shorter is None else self.make_change(shorter)

    def find_prompt_limit(self, context_window: int | None) -> int:
        """Return the most tokens that a prompt may have before this policy shortens it."""
        return compute_prompt_limit(self.max_tokens, context_window)

    def get_history(self, ctx: HookContext) -> Transcript:
        """Return the history that this policy shortens: the view, or the record with ``replace_record``."""
        return ctx.state.message_history if self.replace_record else ctx.state.view

    def make_change(self, shorter: Transcript) -> Change:
        """Return the change that replaces the view by *shorter*, or the record with ``replace_record``."""
        return Change(messages=shorter) if self.replace_record else Change(view=shorter)

    @abstractmethod
    def rewrite(self, transcript: Transcript, limits: ContextLimits, now: datetime) -> Transcript | None:
        """Return a shorter history, or ``None`` if there is nothing to do: a pure function, also for handlers."""
