"""Waits of a run other than for models, tools and people: a time, messages, children in the background."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, Generic, Literal, TypeAlias

import attrs
from attrs import frozen
from typing_extensions import TypeVar

from stepengine.data.json import JsonValue, freeze
from stepengine.data.messages import to_tuple
from stepengine.data.questions import Question
from stepengine.data.visible import one_line

Out = TypeVar("Out", default=Any)
WaitsFor: TypeAlias = Literal["question", "time", "message", "child"]
MESSAGE_ID_BYTES = 16
"""As random as a UUID: a message with a known id is taken for a repetition, so no two may draw the same."""
WAIT_CHARS = 300
"""About three lines of a terminal: a question's id or a topic fits, and a list of a hundred children is cut."""
SHOWN_WAITS = 20
"""About one screen of reasons; further ones are only counted."""


@frozen
class ChildRef(Generic[Out]):
    """
    A reference to a child in the background: ``Start`` returns it, and ``Wait``, ``Send`` and ``Cancel`` accept it.

    Attributes:
        id: The child's run id.
        agent_id: Its agent.
        path: Its path in the tree, such as ``"3"``.
    """

    id: str
    agent_id: str
    path: str


@frozen
class Received:
    """
    A received message; ``None`` instead of it is a timeout.

    Attributes:
        id: The message's id.
        value: Its content, JSON.
    """

    id: str
    value: JsonValue = attrs.field(default=None, converter=freeze)


@frozen
class Awaited:
    """
    The recorded result of a ``Wait``. It contains only paths, since the end of each child is recorded at its own address.

    Attributes:
        done: The paths of the children that have ended, in that order.
        open: The paths of the others, in the order of the request.
        ended: The results of the ended children, by path; never stored.
    """

    done: tuple[str, ...] = attrs.field(default=(), converter=to_tuple)
    open: tuple[str, ...] = attrs.field(default=(), converter=to_tuple)
    ended: Mapping[str, Any] = attrs.field(factory=dict, eq=False, repr=False, metadata={"stored": False})


@frozen(kw_only=True)
class Waits:
    """
    One thing that a suspended run waits for.

    Attributes:
        kind: The kind of wait.
        path: The path of the run that waits.
        seq: The number of its effect.
        wakes_at: When a time comes, or the patience for a message or child ends (UTC); ``None`` for never.
        question: The question, where a person is waited for.
        topic: The topic, where a message is.
        children: The paths of the children that are waited for.
    """

    kind: WaitsFor
    path: str = ""
    seq: int = 0
    wakes_at: datetime | None = None
    question: Question | None = None
    topic: str = ""
    children: tuple[str, ...] = attrs.field(default=(), converter=to_tuple)

    @property
    def awaited_text(self) -> str:
        """The awaited time, message or children in words; ``""`` for a question, which has its own text."""
        until = "" if self.wakes_at is None else self.wakes_at.isoformat(timespec="seconds")
        match self.kind:
            case "question":
                return ""
            case "time":
                return until
            case "message":
                return f"a message on {self.topic!r}" + (f" until {until}" if until else "")
            case "child":
                return f"children at {', '.join(self.children)}" + (f" until {until}" if until else "")

    @property
    def description(self) -> str:
        """The activity of the waiting run in words, such as ``"sleeps until 2026-03-02T07:00:00+00:00"``."""
        whose = f" (the child at {self.path})" if self.path else ""
        if self.question is not None:
            return f"waits for an answer to {self.question.id}{whose}"
        return f"{'sleeps until' if self.kind == 'time' else 'waits for'} {self.awaited_text}{whose}"


def describe_waits(waits: Iterable[Waits]) -> str:
    """Return a sentence about the waits of a run other than for people, or ``""``."""
    told = [one.description for one in waits if one.kind != "question"]
    more = f", and {len(told) - SHOWN_WAITS:,} more" if len(told) > SHOWN_WAITS else ""
    return f"The run {'; '.join(told[:SHOWN_WAITS])}{more}." if told else ""


def wait_to_json(wait: Waits) -> dict[str, Any]:
    """Return a wait of a run as JSON; a question by its id."""
    return {
        "kind": wait.kind,
        "said": describe_wait(wait),
        "path": wait.path,
        "seq": wait.seq,
        "wakes_at": wait.wakes_at and wait.wakes_at.isoformat(),
        "question": wait.question and wait.question.id,
        "topic": wait.topic or None,
        "paths": list(wait.children),
    }


def describe_wait(wait: Waits) -> str:
    """Return a wait of a run in words, as one short line."""
    return one_line(wait.description, WAIT_CHARS)
