"""``mask_tool_results``: replaces old tool results by short notes."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import NamedTuple

import attrs
from attrs import frozen
from typing_extensions import override

from stepengine.context.policy import COUNT, SHARE, ContextLimits, ContextPolicy, group_calls_with_results
from stepengine.data.estimate import message_tokens, transcript_tokens
from stepengine.data.json import JsonDict
from stepengine.data.messages import (
    DocumentPart,
    ImagePart,
    Message,
    TextPart,
    ToolMessage,
    ToolResult,
    to_string_tuple,
)
from stepengine.data.transcript import Transcript


def make_result_placeholder(message: ToolMessage, mark: str, text: str) -> ToolResult:
    """
    Return a result that replaces *message* with *text*, and stores *mark* and the original length in its part.

    Args:
        message: The result to replace.
        mark: The mark of the policy.
        text: The text for the model.
    """
    # Identified by a mark in the part and not by its text, because a tool may print the same words.
    data = JsonDict({"provider": "stepengine", mark: len(message.text)})
    return ToolResult((TextPart(text, provider_data=data),), status=message.status)


def is_placeholder(message: ToolMessage, mark: str) -> bool:
    """Return True if a result is the placeholder that ``make_result_placeholder`` made with this mark."""
    part = message.content[0] if len(message.content) == 1 else None
    return isinstance(part, TextPart) and part.provider_data is not None and mark in part.provider_data


MARK = "masked"


def _make_mask_note(message: ToolMessage) -> ToolResult:
    """Return the note that replaces a tool result; it reports the size of the result."""
    media = sum(isinstance(part, ImagePart | DocumentPart) for part in message.content)
    what = f"{len(message.text):,} characters" + (f" and {media} images or documents" if media else "")
    text = f"[{what} of this result were left out to save space; call {message.tool_name} again if you need them.]"
    return make_result_placeholder(message, MARK, text)


def _count_saved_tokens(message: ToolMessage) -> int:
    """Return the number of tokens that a note saves in place of a result; below 0 if the note is longer, 0 for a note."""
    if is_placeholder(message, MARK):
        return 0
    # A result shorter than its note stays.
    return message_tokens(message) - message_tokens(ToolMessage("", "", _make_mask_note(message).content))


class MaskableCounts(NamedTuple):
    """The numbers of results that could still be masked: long ones, and those of the preferred tools."""

    long: int = 0
    named: int = 0


@frozen
class mask_tool_results(ContextPolicy):  # noqa: N801 - a policy is called by its name, as a hook is
    """
    A ``pre_step`` hook that replaces tool results by notes if a prompt is too large.

    It makes three passes, each only if the earlier ones were not enough. The first masks results of *tools*, all but the newest
    *keep_last*. The second masks every result over *max_chars*. The third also masks results that the model has not seen
    yet, and only if the prompt does not fit otherwise. Every call keeps its result, and the note contains the omitted
    length. No message is removed, so a history of many small messages may stay too large: add ``truncate`` after it.

    Attributes:
        max_tokens: As in every ``ContextPolicy``, and so is *replace_record*.
        tools: The tools whose results are masked first.
        keep_last: How many of the newest results of these tools the first pass leaves.
        max_chars: The size over which the second pass masks a result; a result with an image or document is always over it.
        free_ratio: The share of the room that is freed at once, from 0 to below 1. It avoids a change, and a loss of the
            prompt cache, before every call.
    """

    tools: tuple[str, ...] = attrs.field(default=("run_terminal_command",), converter=to_string_tuple, kw_only=True)
    keep_last: int = attrs.field(default=5, validator=COUNT, kw_only=True)
    max_chars: int = attrs.field(default=1_000, validator=COUNT, kw_only=True)
    free_ratio: float = attrs.field(default=0.25, validator=SHARE, kw_only=True)

    @override
    def rewrite(self, transcript: Transcript, limits: ContextLimits, now: datetime) -> Transcript | None:
        """Return *transcript* with notes in place of results, or ``None`` if it fits or nothing can be masked."""
        if limits.fits(transcript):
            return None
        # Counted incrementally as the history grows. Otherwise a long conversation with nothing left to mask would be
        # searched before each of its model calls.
        left = transcript.fold((MARK, self.tools, self.max_chars), self._add_to_maskable_counts, MaskableCounts())
        if not left.long and left.named <= self.keep_last:
            return None
        total, room = transcript_tokens(transcript), limits.room
        target = int(room * (1 - self.free_ratio))
        masked: dict[str, ToolResult] = {}
        for enough, chosen in self._iterate_mask_passes(transcript, target, room):
            if total <= enough:
                break
            for message in chosen:
                saved = _count_saved_tokens(message)
                # A result may be in two passes.
                if message.tool_call_id not in masked and saved > 0:
                    masked[message.tool_call_id] = _make_mask_note(message)
                    total -= saved
        return transcript.replace_results(masked) if masked else None

    def _add_to_maskable_counts(self, counts: MaskableCounts, message: Message) -> MaskableCounts:
        """Return *counts* plus *message*, if it is a result and masking it saves tokens."""
        if not isinstance(message, ToolMessage) or _count_saved_tokens(message) <= 0:
            return counts
        return MaskableCounts(
            counts.long + self._is_long_or_has_media(message), counts.named + (message.tool_name in self.tools)
        )

    def _iterate_mask_passes(
        self, transcript: Transcript, target: int, room: int
    ) -> Iterator[tuple[int, list[ToolMessage]]]:
        """Yield (sufficient prompt size in tokens, results to mask) for each pass of masking."""
        newest = group_calls_with_results(transcript)[-1].start if transcript else 0
        seen = [m for m in transcript[:newest] if isinstance(m, ToolMessage)]
        named = [m for m in transcript if isinstance(m, ToolMessage) and m.tool_name in self.tools]
        kept = {m.tool_call_id for m in named[max(0, len(named) - self.keep_last) :]}
        yield target, [m for m in seen if m.tool_name in self.tools and m.tool_call_id not in kept]
        yield target, [m for m in seen if self._is_long_or_has_media(m)]
        # Last, and against the whole room: the model has just requested these results and has not read them.
        yield room, [m for m in transcript[newest:] if isinstance(m, ToolMessage) and self._is_long_or_has_media(m)]

    def _is_long_or_has_media(self, message: ToolMessage) -> bool:
        """Return True for a result above ``max_chars``, and for one with an image or document."""
        return len(message.text) > self.max_chars or any(
            isinstance(p, ImagePart | DocumentPart) for p in message.content
        )
