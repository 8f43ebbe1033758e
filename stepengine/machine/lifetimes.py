"""
How long messages stay: those with a time-to-live leave record and view when their time is over (generator-contract L34, L35).

``agent_step`` ends with the step, ``user_prompt`` with the run. A message of an assistant that holds tool calls never
expires: its results stand on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from stepengine.data.messages import AssistantMessage, Message, TimeToLive
from stepengine.data.transcript import Transcript

if TYPE_CHECKING:
    from stepengine.machine.live import Live

__all__ = ("Lifetimes", "expire", "without")


class Lifetimes:
    """
    Remembers which times-to-live there are in a run's history, so that looking costs nothing while there are none.

    Attributes:
        known: Those that messages in record or view may have.
    """

    __slots__ = ("known",)

    def __init__(self) -> None:
        self.known: set[TimeToLive] = set()

    def note(self, messages: Iterable[Message]) -> None:
        """Take note of messages that join the history."""
        for message in messages:
            if message.ttl is not None:
                self.known.add(message.ttl)

    def has(self, ttl: TimeToLive) -> bool:
        """Return whether a message with this time-to-live may be there."""
        return ttl in self.known

    def over(self, *ttls: TimeToLive) -> tuple[TimeToLive, ...]:
        """Return those of *ttls* that there are, and forget them."""
        found = tuple([ttl for ttl in ttls if ttl in self.known])
        self.known.difference_update(found)
        return found


def expire(live: Live, *ttls: TimeToLive) -> None:
    """Remove the messages whose time is over."""
    over = live.lifetimes.over(*ttls) if live.lifetimes.known else ()
    if not over:
        return
    record = without(live.record, over)
    view = record if live.view is live.record else without(live.view, over)
    live.start -= sum(_ttl_of(m) in over for m in live.record[: live.start])
    live.record, live.view = record, view
    live.changed()


def without(messages: Transcript, ttls: Sequence[TimeToLive]) -> Transcript:
    """Return *messages* without those that have one of these times-to-live."""
    kept = [m for m in messages if _ttl_of(m) not in ttls]
    return messages if len(kept) == len(messages) else Transcript(kept)


def _ttl_of(message: Message) -> TimeToLive | None:
    if message.ttl is None or (type(message) is AssistantMessage and message.tool_calls):
        return None
    return message.ttl
