"""Data of cancelled waits of a run tree, kept until it is reported."""

from __future__ import annotations

from typing import Any

from stepengine.data.outcomes import PartialUsage


class Leftovers:
    """
    Data that a cancelled wait cannot return, kept until the outcome that reports it.

    It belongs to the tree, since another run than the cancelled one may make that outcome.

    Attributes:
        ended_children: The ends of children whose parent could not wait for them any more, by path.
        stopped_calls: The usage of stopped model calls, by path and number, until their outcome reports it.
        leaked: Names of threads that could not be stopped.
        reraise: An error that belongs to the caller, such as a ``KeyboardInterrupt`` out of a tool; it is raised when the tree
            has ended.
    """

    __slots__ = ("ended_children", "leaked", "reraise", "stopped_calls")

    def __init__(self) -> None:
        self.ended_children: dict[str, Any] = {}
        self.stopped_calls: dict[tuple[str, int], PartialUsage] = {}
        self.leaked: list[str] = []
        self.reraise: BaseException | None = None

    def forget_run(self, path: str) -> None:
        """Drop the stopped calls of an ended run."""
        # Addresses are few at any time: only calls that were stopped and not told of yet.
        for address in [address for address in self.stopped_calls if address[0] == path]:
            del self.stopped_calls[address]
