"""``ContextPolicy``: what the policies that shorten a history have in common, and how large a prompt is and may be."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import datetime
from typing import Any, TypeAlias

import attrs
from attrs import frozen

from stepengine.data.definition import HookContext
from stepengine.data.estimate import estimate_tokens, message_tokens, transcript_tokens
from stepengine.data.hooks import Change
from stepengine.data.messages import AssistantMessage, ToolMessage, UserMessage
from stepengine.data.state import AgentState
from stepengine.data.transcript import Transcript
from stepengine.errors import DefinitionError

DEFAULT_MAX_TOKENS = 100_000
"""Fits with its reply in the window of 128,000 tokens that most models have at least."""
WINDOW_RATIO = 0.8
"""The rest is for the reply, and for the error of an estimate that counts characters."""
REMINDER_TOKENS = 20
"""What a step prompt takes beside its own text: the message and its reminder tags."""


def max_prompt_tokens(max_tokens: int | None, context_window: int | None) -> int:
    """Return how many tokens a prompt may have."""
    if max_tokens is not None:
        return max_tokens
    return DEFAULT_MAX_TOKENS if context_window is None else int(context_window * WINDOW_RATIO)


@frozen(kw_only=True)
class ContextLimits:
    """
    What a policy has to keep to, in tokens.

    Attributes:
        max_tokens: What a whole prompt may have.
        overhead: What it has beside the messages, by estimate: system prompt, tool definitions, step prompt.
        ratio: How many tokens the provider counts for one that is estimated; 1 while it has reported nothing.
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
        Return the limits for the next prompt of a run, such as for a handler that prunes by itself.

        Args:
            state: The state of the run.
            max_tokens: What a prompt may have; ``None``: 0.8 of *context_window* when it is known, else 100,000.
            context_window: The model's context length in tokens, when known.
            size: How many tokens the prompt has by what the provider reported, when known.
            step_prompt: The agent's step prompt, which is in no state.
        """
        estimated = state.context_tokens
        overhead = estimated - transcript_tokens(state.view)
        if step_prompt:
            overhead += REMINDER_TOKENS + estimate_tokens(step_prompt)
        ratio = 1.0 if size is None or not estimated else size / estimated
        return cls(max_tokens=max_prompt_tokens(max_tokens, context_window), overhead=overhead, ratio=ratio)

    @property
    def room(self) -> int:
        """How many tokens the messages may have, by estimate; never more than they could have if nothing were reported."""
        return max(0, int(self.max_tokens / max(1.0, self.ratio)) - self.overhead)

    def size(self, transcript: Transcript) -> int:
        """Return how large a prompt with *transcript* is in tokens."""
        return round((self.overhead + transcript_tokens(transcript)) * self.ratio)

    def fits(self, transcript: Transcript) -> bool:
        """Return whether a prompt with *transcript* is within the limit, in O(1) once its messages were measured."""
        return self.size(transcript) <= self.max_tokens


def limits_for_hook(ctx: HookContext, max_tokens: int | None = None) -> ContextLimits:
    """
    Return the limits for the prompt that a ``pre_step`` hook is called before.

    A prompt that the provider has just refused as too long may have half of what it had by estimate (reliability:MP02); a
    policy behind another one that made it so short has nothing to do.
    """
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


def message_sizes(transcript: Transcript) -> list[int]:
    """Return the estimated size of every message in tokens; each is measured once."""
    return list(transcript.memo("message_tokens", message_tokens))


def group_positions(transcript: Transcript) -> list[range]:
    """Return the positions of what stays together: a user message, or an assistant message with the results of its calls."""
    groups: list[range] = []
    for index, message in enumerate(transcript):
        if isinstance(message, ToolMessage):
            groups[-1] = range(groups[-1].start, index + 1)
        else:
            assert isinstance(message, (UserMessage, AssistantMessage))  # noqa: S101 - a transcript holds nothing else
            groups.append(range(index, index + 1))
    return groups


def find_last_tagged(transcript: Transcript, tag: str) -> int | None:
    """Return the position of the last user message with *tag*, or ``None``."""
    for index in range(len(transcript) - 1, -1, -1):
        message = transcript[index]
        if isinstance(message, UserMessage) and tag in message.tags:
            return index
    return None


Check: TypeAlias = Callable[[Any, "attrs.Attribute[Any]", Any], None]


def make_option_check(test: Callable[[Any], bool], words: str) -> Check:
    """Return the validator of an option of a policy: *words* say what it is, for the error that names policy and option."""

    def check(policy: object, field: attrs.Attribute[Any], value: object) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float | None) or not test(value):
            msg = f"{type(policy).__name__}: {field.name} is {words}, not {value!r}"
            raise DefinitionError(msg)

    return check


TOKENS = make_option_check(lambda value: value is None or value >= 1, "a number of tokens from 1 on, or None")
COUNT = make_option_check(lambda value: value is not None and value >= 0, "a number from 0 on")
SHARE = make_option_check(lambda value: value is not None and 0 <= value < 1, "a share from 0 on and below 1")


@frozen
class ContextPolicy(ABC):
    """
    A ``pre_step`` hook that shortens a history which has become too large.

    It is called before every model call; what it decides follows from recorded values alone, so a replay decides the same.
    While there is nothing to do its cost does not depend on the length of the history, and it changes nothing.

    A policy is made by calling its class, ``truncate(50_000)``, and is a frozen value.

    A **view** policy (``replace_record=False``) changes what the model is shown and leaves the record whole. A **record**
    policy (``replace_record=True``) replaces the record itself; what is left out then is gone from the result, too.

    Attributes:
        max_tokens: What a prompt may have: system prompt, tools and messages. ``None``: 0.8 of the model's context length
            when it is known, else 100,000.
        replace_record: Whether the record is replaced, not only the view.

    Raises:
        DefinitionError: for an option that makes no sense, such as a limit below 1.
    """

    max_tokens: int | None = attrs.field(default=None, validator=TOKENS)
    replace_record: bool = attrs.field(default=False, kw_only=True)

    def __call__(self, ctx: HookContext) -> Change | None:
        """Return the change that makes the prompt fit, or ``None``."""
        shorter = self.rewrite(self.source(ctx), limits_for_hook(ctx, self.max_tokens), ctx.now)
        return None if shorter is None else self.change(shorter)

    def find_prompt_limit(self, context_window: int | None) -> int:
        """Return how many tokens a prompt may have before this policy shortens it."""
        return max_prompt_tokens(self.max_tokens, context_window)

    def source(self, ctx: HookContext) -> Transcript:
        """Return the history that this policy shortens."""
        return ctx.state.message_history if self.replace_record else ctx.state.view

    def change(self, shorter: Transcript) -> Change:
        """Return *shorter* as a change of the view or of the record."""
        return Change(messages=shorter) if self.replace_record else Change(view=shorter)

    @abstractmethod
    def rewrite(self, transcript: Transcript, limits: ContextLimits, now: datetime) -> Transcript | None:
        """Return a shorter history, or ``None`` when there is nothing to do: a pure function, also for handlers."""
