"""
Messages to running runs: their topics and forms in the database, and those that one execution has received.

The next outcome that is recorded takes a received message along, as it would in one process. Its record names the messages that it
consumed, so that an execution which resumes the run does not receive them again.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stepengine.data.messages import UserMessage
from stepengine.data.outcomes import Single, Stop, Value
from stepengine.data.waits import Received
from stepengine.errors import StepEngineError
from stepengine.runtime.messages import Message

if TYPE_CHECKING:
    from stepengine.runtime.tree import RunTree

TOPIC = "said"
"""The database topic of user input to a root run."""
POST = "post:"


def find_text_problem(text: str) -> str:
    """Return why a message cannot be recorded; ``""`` if it can."""
    if "\0" in text:
        return "a NUL, which the database cannot store"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "half of a surrogate pair, which is not text"
    return ""


class ReceivedMessages:
    """The messages that one execution of a run has received, and those in its inbox."""

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._waiting: dict[int, tuple[str, UserMessage]] = {}
        self._posted: dict[str, str] = {}
        self._refused: list[str] = []

    @property
    def known_keys(self) -> Collection[str]:
        """The keys of the received messages."""
        return self._known

    def mark_received(self, key: str) -> None:
        """Add the key of a message to the known ones, without delivering the message."""
        self._known.add(key)

    def deliver_user_text(self, tree: RunTree, key: str, text: str, path: str = "") -> None:
        """Put a message into the inbox of the run at *path*; the outcome that consumes it records *key*."""
        message = UserMessage(text)
        self._known.add(key)
        self._waiting[id(message)] = key, message
        tree.inboxes.add(path, message)

    def deliver_topic_message(self, tree: RunTree, key: str, message: Message) -> None:
        """Deliver a posted message to the run that receives on its topic; the outcome that consumes it records *key*."""
        self._known.add(key)
        self._posted[message.id] = key
        tree.mail.deliver(message)

    def pop_consumed_message_keys(self, outcome: Single) -> dict[str, Any]:
        """Remove the keys of messages that an outcome consumed or that were refused, and return them as the member ``heard``."""
        inputs = () if isinstance(outcome, Stop) else outcome.inputs
        keys = [self._waiting.pop(id(message))[0] for message in inputs if id(message) in self._waiting]
        if isinstance(outcome, Value) and isinstance(outcome.value, Received):
            keys += self._pop_key(outcome.value.id)
        keys += self._refused
        self._refused = []
        return {"heard": keys} if keys else {}

    # --- as the mailbox of the run's tree, which polls nothing: `deliver_messages_until_cancelled` delivers -----------------------------

    def list_unread_messages(self) -> Sequence[Message]:
        """Return an empty sequence, since unread messages are in the database."""
        return ()

    def list_unreceived_texts(self, path: str) -> Sequence[str]:
        """Return an empty sequence, since unread messages are in the database."""
        return ()

    def has_message(self, message_id: str) -> bool:
        """Return ``False``, since each message is read from the database only once."""
        return False

    async def fetch(self) -> Sequence[Message]:
        """Return an empty sequence at once, since ``deliver_messages_until_cancelled`` delivers the messages."""
        return ()

    def store_message(self, message: Message) -> bool:
        """Return ``True`` and store nothing, since the message is in the database already."""
        return True

    def refuse(self, message: Message, reason: str) -> None:
        """Mark a message as consumed without delivering it. The next outcome stores its key; *reason* is not stored."""
        self._refused += self._pop_key(message.id)

    def _pop_key(self, message_id: str) -> list[str]:
        """Remove the key of a message and return it in a list; an empty list if it was removed before."""
        key = self._posted.pop(message_id, None)
        return [] if key is None else [key]

    def send(self, message: Message) -> bool:
        """Raise ``StepEngineError``: messages to a durable run are sent through the database."""
        msg = f"the message {message.id!r} cannot be sent by the tree of a durable run; use DurableEngine.send_message"
        raise StepEngineError(msg)


def make_database_topic(path: str, topic: str) -> str:
    """Return the database topic for a message to the run at *path*; *topic* is ``""`` for its inbox."""
    return f"{POST}{path}:{topic}"


def parse_database_topic(topic: str) -> tuple[str, str]:
    """Return the run path and the topic of a message from its database topic."""
    path, _, name = topic.removeprefix(POST).partition(":")
    return path, name


def parse_message_json(message: str) -> Mapping[str, object]:
    """Parse a message from JSON; return an empty mapping if the text is not a JSON object."""
    try:
        form = json.loads(message)
    except (ValueError, RecursionError):
        return {}
    return form if isinstance(form, dict) else {}
