"""``Event``, the base of all events, and the register of their classes by type name."""

from __future__ import annotations

from typing import Any, ClassVar

import attrs

__all__ = ("EVENTS", "Event")

EVENTS: dict[str, type[Event]] = {}


@attrs.frozen(kw_only=True)
class Event:
    """
    The base of all events.

    Attributes:
        path: The run's path in the tree; ``""`` for the root.
        seq: The number of the effect that the event belongs to, or of the next effect.
        run_id: The root run's id; ``""`` until the event is emitted.
        epoch: 8 hex digits that are others each time a process drives the run: on from its start, a resume or a fork.
        index: The event's place in the stream of its epoch, over the whole tree, from 0; -1 until it is emitted.
    """

    type: ClassVar[str] = "event"
    path: str = ""
    seq: int = 0
    run_id: str = attrs.field(default="", eq=False)
    epoch: str = attrs.field(default="", eq=False)
    index: int = attrs.field(default=-1, eq=False)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.type = "".join(f"_{c.lower()}" if c.isupper() else c for c in cls.__name__).lstrip("_")
        EVENTS[cls.type] = cls

    @property
    def id(self) -> str:
        """``"<epoch>-<index>"``, which ``handle.events(after=)`` takes; ``""`` when it is not in the stream (``EventsDropped``)."""
        return f"{self.epoch}-{self.index}" if self.index >= 0 else ""

    def to_json(self) -> dict[str, Any]:
        """Return the event as a JSON object; ``"type"`` names its kind in snake_case."""
        from stepengine.data.codec import plain  # noqa: PLC0415

        fields = {a.name: plain(getattr(self, a.name)) for a in attrs.fields(type(self))}
        return {"type": self.type, **fields}
