"""``truncate``: leave out the oldest messages."""

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
    find_last_tagged,
    group_positions,
    message_sizes,
)
from stepengine.data.estimate import message_tokens, transcript_tokens
from stepengine.data.messages import Message, UserMessage, system_reminder, to_string_tuple
from stepengine.data.transcript import Transcript

GAP_TAG = "TRUNCATED"
GAP = system_reminder("Earlier messages were left out here to save space.")


def _make_gap_note() -> UserMessage:
    return UserMessage(GAP, (GAP_TAG,))


@cache
def _gap_note_tokens() -> int:
    return message_tokens(_make_gap_note())


def _is_gap_note(message: Message) -> bool:
    return isinstance(message, UserMessage) and GAP_TAG in message.tags


@frozen
class truncate(ContextPolicy):  # noqa: N801 - a policy is called by its name, as a hook is
    """
    A ``pre_step`` hook that leaves out whole oldest messages when a prompt is too large.

    A call and its result go together. The first and the latest user message, the current prompt and the instructions stay,
    and so does the newest exchange as long as the prompt fits with it. A note stands where something was left out.

    Attributes:
        max_tokens: As in every ``ContextPolicy``, and so is *replace_record*.
        free_ratio: How much of the room is made free at once, from 0 on and below 1, so that a provider's prompt cache is
            lost once and not before every call; 0 leaves out as little as possible.
        keep_tags: User messages with one of these tags stay.
    """

    free_ratio: float = attrs.field(default=0.25, validator=SHARE, kw_only=True)
    keep_tags: tuple[str, ...] = attrs.field(default=(), converter=to_string_tuple, kw_only=True)

    @override
    def rewrite(self, transcript: Transcript, limits: ContextLimits, now: datetime) -> Transcript | None:
        """Return *transcript* without its oldest messages, or ``None`` when it fits or nothing more can be left out."""
        if limits.fits(transcript):
            return None
        groups, sizes = group_positions(transcript), message_sizes(transcript)
        weights = [sum(sizes[group.start : group.stop]) for group in groups]
        dropped = self._choose_dropped(transcript, groups, weights, limits.room)
        # Only notes of an earlier pruning would go, and a note would be put in their place: the history would be
        # written anew at each step, and the provider's cache lost each time, for nothing.
        if all(_is_gap_note(transcript[groups[index].start]) for index in dropped):
            return None
        shorter = Transcript(_drop_groups(transcript, groups, dropped))
        # A note is longer than a very short message; so it is looked at whether anything was saved.
        return shorter if transcript_tokens(shorter) < sum(weights) else None

    def _choose_dropped(
        self, transcript: Transcript, groups: Sequence[range], weights: Sequence[int], room: int
    ) -> frozenset[int]:
        """Return which groups go: the oldest ones, until enough is free; the newest only when there is no other way."""
        kept, total, target = self._protected_positions(transcript), sum(weights), int(room * (1 - self.free_ratio))
        dropped: set[int] = set()
        # In groups of a call and its results, since providers refuse a history in which one stands without the other.
        for index, group in enumerate(groups):
            # Until `target` is reached, which is below the room, so that the next steps have space and nothing is
            # pruned. The newest group goes only when the prompt would not fit else: it holds what the model works on.
            if total <= (room if index == len(groups) - 1 else target):
                break
            if group.start not in kept:
                # The note costs something, once for each row of groups that go.
                total -= weights[index] - (0 if index - 1 in dropped else _gap_note_tokens())
                dropped.add(index)
        return frozenset(dropped)

    def _protected_positions(self, transcript: Transcript) -> frozenset[int]:
        """Return the positions of the messages that are never left out."""
        # The first user message says what the work is, and the latest what was asked for last. A note of an earlier
        # pruning is a user message by its form, and must be neither.
        users = [i for i, m in enumerate(transcript) if isinstance(m, UserMessage) and not _is_gap_note(m)]
        flagged = [i for i in users if set(self.keep_tags).intersection(transcript[i].tags)]  # type: ignore[union-attr]
        current = [find_last_tagged(transcript, tag) for tag in ("USER_PROMPT", "INSTRUCTIONS_PROMPT")]
        return frozenset([*users[:1], *users[-1:], *flagged, *[i for i in current if i is not None]])


def _drop_groups(transcript: Transcript, groups: Sequence[range], dropped: frozenset[int]) -> Iterator[Message]:
    for index, group in enumerate(groups):
        if index not in dropped:
            yield from transcript[group.start : group.stop]
        elif index - 1 not in dropped:
            yield _make_gap_note()
