"""
``summarize`` and ``compact``: replace older history by a summary that the model writes.

By default they change the view: the model receives the summary, and the record contains every message. With
``replace_record=True``, and always with ``compact`` in a handler, they replace the record itself.

To use the provider's prompt cache, the summary request repeats the previous request, with the same model, system prompt, tools and
settings, except those that prevent an answer in plain text. It adds the new messages and the question. Another ``model`` or your own
``summarizer`` does not use this cache. After a compaction only the system prompt and tools are still cached.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from datetime import UTC, datetime
from types import GeneratorType
from typing import Any, TypeAlias

import attrs
from attrs import frozen

from stepengine.context.policy import (
    COUNT,
    TOKENS,
    WINDOW_RATIO,
    ContextLimits,
    compute_prompt_limit,
    find_last_tagged_user_message,
    make_hook_limits,
    make_option_validator,
)
from stepengine.context.truncation import truncate
from stepengine.data.codec import to_json
from stepengine.data.definition import HookContext
from stepengine.data.estimate import message_tokens, transcript_tokens
from stepengine.data.functions import is_async, unwrap_function
from stepengine.data.hooks import Change
from stepengine.data.messages import SUMMARY_REQUEST, Message, ToolMessage, UserMessage
from stepengine.data.models import ModelSettings
from stepengine.data.state import AgentState
from stepengine.data.transcript import Transcript
from stepengine.data.yields import Complete, StepResult, ToolCall, Yieldable
from stepengine.errors import ContextOverflow, DefinitionError

SUMMARY = "SUMMARY"
"""The tag of a summary in the view."""
INSTRUCTIONS = "INSTRUCTIONS_PROMPT"
MAX_CUTS = 4
"""Each attempt shortens the history; a request that is too large after four attempts has another problem."""
UNBOUNDED_TOKENS = 10**12
"""A limit above every context window, for unknown windows."""
NO_TIME = datetime.min.replace(tzinfo=UTC)

REQUEST = """\
Pause the work. This conversation is becoming too long for you, so your next message replaces everything above it: you will \
go on from that message alone. Call no tool and answer nobody; write, as plain text, what you need to go on:

1. The task: what the user wants, with their own words where the wording matters, and every condition they set.
2. What is done, what was decided, and why.
3. What is known and still needed, exactly as it is: names, paths, commands, numbers, ids, short passages of text or code.
4. What was tried and failed, so that it is not tried again.
5. What is open, and the very next action."""

OPENING = "The conversation before this message was replaced by a summary of it. Go on from there."

Summarizer: TypeAlias = Callable[[Sequence[Message]], "str | Generator[Yieldable, StepResult, str]"]
"""Returns a summary of messages: a plain function, or a generator function that yields ``Perform`` or ``Complete``."""


def _check_summarizer(_: object, __: attrs.Attribute[Any], summarizer: object) -> None:
    """Raise ``DefinitionError`` for a summarizer that is async or not a function: an attrs validator."""
    if summarizer is not None and (not callable(summarizer) or is_async(unwrap_function(summarizer))):
        msg = (
            "summarize: a summarizer must be a function that returns text, or a generator function that does I/O with "
            f"`yield from Perform(fn, ...)`, not {summarizer!r}"
        )
        raise DefinitionError(msg)


WINDOW_SHARE = make_option_validator(lambda value: value is not None and 0 < value <= 1, "a share above 0 and up to 1")


@frozen
class summarize:  # noqa: N801 - a policy is called by its name, as a hook is
    """
    A ``pre_step`` hook that replaces older history by a summary that the model writes.

    Afterwards the history is one summary message, followed by unanswered user messages, the instructions of the current
    turn, and *keep_last* messages. The summary request is larger than *max_tokens*, by the newest messages and the
    question; leave room for it below the model's context length.

    Attributes:
        max_tokens: The limit of a prompt; ``None`` for *window_ratio* of the model's context length if it is known, else
            100,000.
        directives: Further topics for the summary; added to the request for it.
        summarizer: Writes the summary instead of a model.
        model: The model that writes it, instead of the run's own.
        window_ratio: The share of the model's context length that a prompt may have.
        keep_last: How many of the newest messages stay unchanged, rounded up to whole exchanges.
        auto: With ``False``, only ``compact`` summarizes.
        enabled: With ``False``, nothing summarizes.
        replace_record: Whether to replace the record, not only the view.

    Raises:
        DefinitionError: for invalid numbers, and for a summarizer that is async or not a function.
    """

    max_tokens: int | None = attrs.field(default=None, validator=TOKENS)
    directives: str = attrs.field(default="", kw_only=True)
    summarizer: Summarizer | None = attrs.field(default=None, validator=_check_summarizer, kw_only=True)
    model: str | None = attrs.field(default=None, kw_only=True)
    window_ratio: float = attrs.field(default=WINDOW_RATIO, validator=WINDOW_SHARE, kw_only=True)
    keep_last: int = attrs.field(default=0, validator=COUNT, kw_only=True)
    auto: bool = attrs.field(default=True, kw_only=True)
    enabled: bool = attrs.field(default=True, kw_only=True)
    replace_record: bool = attrs.field(default=False, kw_only=True)

    def __call__(self, ctx: HookContext) -> Generator[Yieldable, StepResult, Change | None] | None:
        """Return a generator that summarizes, or ``None`` if there is nothing to do."""
        if not (self.enabled and self.auto):
            return None
        limits = make_hook_limits(ctx, self._compute_max_tokens(ctx.context_window))
        return None if limits.fits(ctx.state.view) else self._summarize_to_change(ctx, limits)

    def find_prompt_limit(self, context_window: int | None) -> int | None:
        """Return the most tokens that a prompt may have before it is summarized; ``None`` if no prompt is summarized."""
        is_on = self.enabled and self.auto
        return compute_prompt_limit(self._compute_max_tokens(context_window), context_window) if is_on else None

    def _compute_max_tokens(self, context_window: int | None) -> int | None:
        """Return the given limit, else a share of the context window; ``None`` if neither is known."""
        if self.max_tokens is None and context_window is not None:
            return int(context_window * self.window_ratio)
        return self.max_tokens

    def _summarize_to_change(
        self, ctx: HookContext, limits: ContextLimits
    ) -> Generator[Yieldable, StepResult, Change | None]:
        """Request a summary, and return the change of view or record that inserts it; ``None`` if it saves nothing."""
        if ctx.overflow is None:
            limits = attrs.evolve(limits, max_tokens=ctx.context_window or UNBOUNDED_TOKENS)
        shorter = yield from self.summarize_view(ctx.state, limits)
        if shorter is None:
            return None
        return Change(messages=shorter) if self.replace_record else Change(view=shorter)

    def summarize_view(
        self, state: AgentState, limits: ContextLimits | None = None, settings: ModelSettings | None = None
    ) -> Generator[Yieldable, StepResult, Transcript | None]:
        """
        Request a summary, and return the view with it in place of older messages; ``None`` if that would not be shorter.

        Args:
            state: The state of the run.
            limits: The limits of the summary request; if it is too large, its older messages are omitted.
            settings: The settings of that request; by default the agent's without those that prevent an answer in plain text.
        """
        view = state.view
        fresh = _get_unanswered_start(view)
        cut = _find_cut_before_results(view, min(fresh, len(view) - self.keep_last))
        if all(_is_summary_or_instructions(message) for message in view[:cut]):
            return None
        text = yield from self._write_summary(state, Transcript(view[:fresh]), limits, settings)
        if not text.strip():
            return None
        kept, instructions = view[cut:], find_last_tagged_user_message(view, INSTRUCTIONS)
        if instructions is not None and instructions < cut:
            kept = (view[instructions], *kept)
        shorter = Transcript([_make_summary_message(text), *kept])
        return shorter if transcript_tokens(shorter) < transcript_tokens(view) else None

    def _write_summary(
        self, state: AgentState, old: Transcript, limits: ContextLimits | None, settings: ModelSettings | None
    ) -> Generator[Yieldable, StepResult, str]:
        """
        Request a summary of *old* from the summarizer or the model, and return it.

        Older messages are omitted as long as the request is too large.
        """
        if self.summarizer is not None:
            said = self.summarizer(old)
            if isinstance(said, GeneratorType):
                said = yield from said
            if not isinstance(said, str):
                msg = f"the summarizer {self.summarizer!r} returned a {type(said).__name__}; it must return text"
                raise TypeError(msg)
            return said
        text = "\n\n".join([t for t in (REQUEST, self.directives.strip()) if t])
        request = UserMessage(text, (SUMMARY_REQUEST,))
        limits = limits or ContextLimits.for_state(state, UNBOUNDED_TOKENS)
        room = attrs.evolve(limits, max_tokens=limits.max_tokens - message_tokens(request))
        asked = _drop_oldest_messages_if_too_long(old, room) or old
        for _ in range(MAX_CUTS):
            try:
                return (yield from self._request_summary(state, asked, request, settings))
            except ContextOverflow:
                shorter = _drop_oldest_messages_if_too_long(
                    asked, attrs.evolve(limits, max_tokens=limits.size(asked) // 2)
                )
                if shorter is None:
                    raise
                asked = shorter
        return (yield from self._request_summary(state, asked, request, settings))

    def _request_summary(
        self, state: AgentState, old: Transcript, request: UserMessage, settings: ModelSettings | None
    ) -> Generator[Yieldable, StepResult, str]:
        """Ask the model for a summary of messages, and return its text without thoughts."""
        reply = yield from Complete(
            (*old, request),
            model=self.model,
            system_prompt=state.system_prompt,
            settings=settings,
            tools=tuple(state.tool_definitions.values()),
        )
        return reply.text_without_thoughts


def compact(state: AgentState, policy: summarize | None = None) -> Generator[Yieldable, StepResult, AgentState]:
    """
    Summarize the history of a run now, from a handler, and return the new state.

    ``state = yield from compact(turn.agent_state)`` replaces the record. It returns *state* itself
    if there is nothing to summarize.

    Args:
        state: The newest state of the run.
        policy: The options; its limit and ``auto`` are ignored.
    """
    policy = policy or summarize()
    shorter = (yield from policy.summarize_view(state)) if policy.enabled else None
    if shorter is None:
        return state
    messages = [to_json(message) for message in shorter]
    done = yield ToolCall("set_messages", {"messages": messages}, include_tool_call=False)
    return done.agent_state


def _make_summary_message(text: str) -> UserMessage:
    """Return the user message with the summary *text* between tags."""
    return UserMessage(f"{OPENING}\n\n<summary>\n{text.strip()}\n</summary>", (SUMMARY,))


def _is_summary_or_instructions(message: Message) -> bool:
    """Return whether a user message has the tag of a summary or of instructions."""
    return isinstance(message, UserMessage) and not {SUMMARY, INSTRUCTIONS}.isdisjoint(message.tags)


def _get_unanswered_start(view: Transcript) -> int:
    """Return the position of the first of the user messages that end *view*; the length of *view* if there are none."""
    for start in range(len(view), 0, -1):
        message = view[start - 1]
        if not isinstance(message, UserMessage) or SUMMARY in message.tags:
            return start
    return 0


def _find_cut_before_results(view: Transcript, cut: int) -> int:
    """Return the last position up to *cut* at which a cut separates no result from its call."""
    cut = max(cut, 0)
    while cut < len(view) and isinstance(view[cut], ToolMessage):
        cut -= 1
    return cut


def _drop_oldest_messages_if_too_long(old: Transcript, limits: ContextLimits) -> Transcript | None:
    """Return *old* without its oldest messages so that it fits; ``None`` if nothing was dropped, as when it fits already."""
    return truncate(free_ratio=0).rewrite(old, limits, NO_TIME)
