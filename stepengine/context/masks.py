"""``mask_tool_results``: old tool results become short notes."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import NamedTuple

import attrs
from attrs import frozen
from typing_extensions import override

from stepengine.context.policy import COUNT, SHARE, ContextLimits, ContextPolicy, group_positions
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


def make_placeholder(message: ToolMessage, mark: str, text: str) -> ToolResult:
    """
    Return the placeholder *text* for a tool result, marked with the length of the text it replaces.

    Args:
        message: The result that makes room.
        mark: Whose placeholder it is.
        text: What the model is told.
    """
    # Known by a mark in the part and not by its text: a tool may print the same words, and its result is none.
    data = JsonDict({"provider": "stepengine", mark: len(message.text)})
    return ToolResult((TextPart(text, provider_data=data),), status=message.status)


def is_placeholder(message: ToolMessage, mark: str) -> bool:
    """Return whether a result is a placeholder with this mark."""
    part = message.content[0] if len(message.content) == 1 else None
    return isinstance(part, TextPart) and part.provider_data is not None and mark in part.provider_data


MARK = "masked"


def _make_mask(message: ToolMessage) -> ToolResult:
    media = sum(isinstance(part, ImagePart | DocumentPart) for part in message.content)
    what = f"{len(message.text):,} characters" + (f" and {media} images or documents" if media else "")
    text = f"[{what} of this result were left out to save space; call {message.tool_name} again if you need them.]"
    return make_placeholder(message, MARK, text)


def _tokens_saved(message: ToolMessage) -> int:
    """Return how many tokens a note in the place of a result saves; 0 for what is a note."""
    if is_placeholder(message, MARK):
        return 0
    # Against what would stand there instead: a short result is shorter than its note, and stays.
    return message_tokens(message) - message_tokens(ToolMessage("", "", _make_mask(message).content))


class MaskableCounts(NamedTuple):
    """How many results could still be masked: long ones, and those of the tools that go first."""

    long: int = 0
    named: int = 0


@frozen
class mask_tool_results(ContextPolicy):  # noqa: N801 - a policy is called by its name, as a hook is
    """
    A ``pre_step`` hook that puts notes in the place of tool results when a prompt is too large.

    Three passes, each only when those before were not enough: results of *tools*, all but the newest *keep_last*; then
    every result over *max_chars*; then, only when the prompt does not fit otherwise, also those that the model has not
    seen yet. Every call keeps its result, and the note says how much was left out. No message is removed, so a history of
    many small messages may stay too large: put ``truncate`` behind it, which is codebuff's older pruner.

    Attributes:
        max_tokens: As in every ``ContextPolicy``, and so is *replace_record*.
        tools: Tools whose results are the first to go.
        keep_last: How many of the newest results of these tools the first pass leaves.
        max_chars: The size over which the second pass masks a result; a result with an image or document is over it.
        free_ratio: How much of the room is made free at once, from 0 on and below 1, so that a prompt cache is not lost
            before every call.
    """

    tools: tuple[str, ...] = attrs.field(default=("run_terminal_command",), converter=to_string_tuple, kw_only=True)
    keep_last: int = attrs.field(default=5, validator=COUNT, kw_only=True)
    max_chars: int = attrs.field(default=1_000, validator=COUNT, kw_only=True)
    free_ratio: float = attrs.field(default=0.25, validator=SHARE, kw_only=True)

    @override
    def rewrite(self, transcript: Transcript, limits: ContextLimits, now: datetime) -> Transcript | None:
        """Return *transcript* with notes in place of results, or ``None`` when it fits or nothing is left to mask."""
        if limits.fits(transcript):
            return None
        # Counted along the history as it grows, and not anew: a long conversation in which nothing is left to mask
        # would else be gone through before each of its model calls.
        left = transcript.fold((MARK, self.tools, self.max_chars), self._count_message, MaskableCounts())
        if not left.long and left.named <= self.keep_last:
            return None  # found without looking through the history at every step
        total, room = transcript_tokens(transcript), limits.room
        target = int(room * (1 - self.free_ratio))
        masked: dict[str, ToolResult] = {}
        for enough, chosen in self._list_passes(transcript, target, room):
            if total <= enough:
                break
            for message in chosen:
                saved = _tokens_saved(message)
                # A result may be in two passes.
                if message.tool_call_id not in masked and saved > 0:
                    masked[message.tool_call_id] = _make_mask(message)
                    total -= saved
        return transcript.resolve_all(masked) if masked else None

    def _count_message(self, left: MaskableCounts, message: Message) -> MaskableCounts:
        """Return the counts of results that could still be masked, with one more message."""
        if not isinstance(message, ToolMessage) or _tokens_saved(message) <= 0:
            return left
        return MaskableCounts(left.long + self._is_long(message), left.named + (message.tool_name in self.tools))

    def _list_passes(self, transcript: Transcript, target: int, room: int) -> Iterator[tuple[int, list[ToolMessage]]]:
        """Give the results to mask in passes, each with the size that makes it unnecessary."""
        newest = group_positions(transcript)[-1].start if transcript else 0
        seen = [m for m in transcript[:newest] if isinstance(m, ToolMessage)]
        named = [m for m in transcript if isinstance(m, ToolMessage) and m.tool_name in self.tools]
        kept = {m.tool_call_id for m in named[len(named) - self.keep_last :]} if self.keep_last else set()
        yield target, [m for m in seen if m.tool_name in self.tools and m.tool_call_id not in kept]
        yield target, [m for m in seen if self._is_long(m)]
        # Last, and against the room alone: these are results that the model asked for just now and has not read.
        yield room, [m for m in transcript[newest:] if isinstance(m, ToolMessage) and self._is_long(m)]

    def _is_long(self, message: ToolMessage) -> bool:
        return len(message.text) > self.max_chars or any(
            isinstance(p, ImagePart | DocumentPart) for p in message.content
        )
