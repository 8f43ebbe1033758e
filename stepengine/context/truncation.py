"""``truncate``: removes the oldest messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from functools import cache

import attrs
from attrs import frozen
from typing_extensions import override

from stepengine.context.policy import (
    SHARE,
    ContextLimits,
    ContextPolicy,
    find_last_tagged_user_message,
    group_calls_with_results,
)
from stepengine.data.estimate import message_tokens, transcript_tokens
from stepengine.data.messages import Message, UserMessage, system_reminder, to_string_tuple
from stepengine.data.transcript import Transcript

GAP_TAG = "TRUNCATED"
GAP = system_reminder("Earlier messages were left out here to save space.")


def _make_gap_note() -> UserMessage:
    """Return the note that replaces dropped messages."""
    return UserMessage(GAP, (GAP_TAG,))


@cache
def _count_gap_note_tokens() -> int:
    """Return the estimated tokens of the note for dropped messages."""
    return message_tokens(_make_gap_note())


def _is_gap_note(message: Message) -> bool:
    return isinstance(message, UserMessage) and GAP_TAG in message.tags


@frozen
class truncate(ContextPolicy):  # noqa: N801 - a policy is called by its name, as a hook is
    """
    A ``pre_step`` hook that removes the oldest messages if a prompt is too large.

    A call and its result are removed together. The first and the latest user message, the current prompt and the
    instructions stay. The newest exchange stays if the prompt fits with it. A note replaces the removed messages.

    Attributes:
        max_tokens: As in every ``ContextPolicy``, and so is *replace_record*.
        free_ratio: The share of the room that is freed at once, from 0 to below 1. It avoids a change, and a loss of the
            prompt cache, before every call; 0 removes as little as possible.
        keep_tags: User messages with one of these tags stay.
    """

    free_ratio: float = attrs.field(default=0.25, validator=SHARE, kw_only=True)
    keep_tags: tuple[str, ...] = attrs.field(default=(), converter=to_string_tuple, kw_only=True)

    @override
    def rewrite(self, transcript: Transcript, limits: ContextLimits, now: datetime) -> Transcript | None:
        """Return *transcript* without its oldest messages, or ``None`` if it fits or nothing more can be removed."""
        if limits.fits(transcript):
            return None
        groups, sizes = group_calls_with_results(transcript), list(transcript.memo("message_tokens", message_tokens))
        weights = [sum(sizes[group.start : group.stop]) for group in groups]
        dropped = self._choose_dropped_groups(transcript, groups, weights, limits.room)
        # If only notes of an earlier pruning would be replaced by a new note, the history would change at each step, and
        # the provider's cache would be lost each time for nothing.
        if all(_is_gap_note(transcript[groups[index].start]) for index in dropped):
            return None
        shorter = Transcript(_replace_dropped_groups(transcript, groups, dropped))
        # A note is longer than a very short message, so this checks whether anything was saved.
        return shorter if transcript_tokens(shorter) < sum(weights) else None

    def _choose_dropped_groups(
        self, transcript: Transcript, groups: Sequence[range], weights: Sequence[int], room: int
    ) -> frozenset[int]:
        """Return the indexes of the groups to drop: the oldest without protected messages; the newest only if the rest is too large."""
        kept, total, target = (
            self._find_protected_positions(transcript),
            sum(weights),
            int(room * (1 - self.free_ratio)),
        )
        dropped: set[int] = set()
        # In groups of a call and its results, since providers reject a history with only one of them.
        for index, group in enumerate(groups):
            # `target` is below the room, so the next steps have space without pruning. The newest group is dropped only if
            # the prompt would not fit otherwise: the model works on it.
            if total <= (room if index == len(groups) - 1 else target):
                break
            if group.start not in kept:
                # The note has a cost, once for each sequence of dropped groups.
                total -= weights[index] - (0 if index - 1 in dropped else _count_gap_note_tokens())
                dropped.add(index)
        return frozenset(dropped)

    def _find_protected_positions(self, transcript: Transcript) -> frozenset[int]:
        """Return the positions of the messages that are never removed."""
        # The first user message describes the task, and the latest the last request. A note of an earlier pruning has
        # the form of a user message and must be neither.
        users = [i for i, m in enumerate(transcript) if isinstance(m, UserMessage) and not _is_gap_note(m)]
        flagged = [i for i in users if set(self.keep_tags).intersection(transcript[i].tags)]  # type: ignore[union-attr]
        current = [find_last_tagged_user_message(transcript, tag) for tag in ("USER_PROMPT", "INSTRUCTIONS_PROMPT")]
        return frozenset([*users[:1], *users[-1:], *flagged, *[i for i in current if i is not None]])


def _replace_dropped_groups(
    transcript: Transcript, groups: Sequence[range], dropped: frozenset[int]
) -> Iterator[Message]:
    """Yield the remaining messages, with one note for each sequence of dropped groups."""
    for index, group in enumerate(groups):
        if index not in dropped:
            yield from transcript[group.start : group.stop]
        elif index - 1 not in dropped:
            yield _make_gap_note()
