"""
Messages to runs that are under way: sent by anybody through the database, heard by whoever executes the run, once.

A message waits in the database beside the run. The worker that has the run puts it into the run's inbox, and the next outcome
that is recorded takes it along, as it would in one process. The record of that outcome says which messages were heard with it,
so that whoever goes on with the run does not hear them again.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from stepengine.data.messages import UserMessage
from stepengine.data.outcomes import Single, Stop
from stepengine.durable.database import DatabaseAway
from stepengine.runtime.logs import LOGGER

if TYPE_CHECKING:
    from stepengine.runtime.tree import RunTree

__all__ = ("TOPIC", "Heard", "form_of", "keep_delivering", "problem_of")

TOPIC = "said"
"""Where messages to a run wait."""
LOOK_SECONDS = 0.5
WAITING = """
    select destination_uuid, message_uuid, message from dbos.notifications
    where destination_uuid = any(%s) and topic = %s and not consumed and serialization = 'portable_json'
        and message_uuid <> all(%s)
    order by created_at_epoch_ms, message_uuid
"""
RECORDED = """
    select 1 from dbos.operation_outputs
    where workflow_uuid = %s and serialization = 'portable_json'
        and exists (select from json_array_elements_text(output::json->'heard') as heard (key) where key = %s)
"""


def problem_of(text: str) -> str:
    """Return what makes a message none that can be recorded; ``""`` for nothing."""
    if "\0" in text:
        return "a NUL, which the database does not store"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "half of a surrogate pair, which is no text"
    return ""


class Database(Protocol):
    """What is needed of an ``Operator``."""

    async def rows(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        """Return what a statement selects."""


class Heard:
    """Which messages one execution of a run has heard, and which of them wait in its inbox."""

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._waiting: dict[int, tuple[str, UserMessage]] = {}

    @property
    def known(self) -> Collection[str]:
        """The messages that were heard."""
        return self._known

    def note(self, key: str) -> None:
        """Take note that a message was heard, and is recorded."""
        self._known.add(key)

    def deliver(self, tree: RunTree, key: str, text: str) -> None:
        """Put a message into the inbox of a run."""
        message = UserMessage(text)
        self._known.add(key)
        self._waiting[id(message)] = key, message
        tree.inbox.append(message)

    def taken_by(self, outcome: Single) -> dict[str, Any]:
        """Return what the record of an outcome says of the messages that it took along."""
        inputs = () if type(outcome) is Stop else outcome.inputs  # type: ignore[union-attr]
        keys = [self._waiting.pop(id(message))[0] for message in inputs if id(message) in self._waiting]
        return {"heard": keys} if keys else {}


class Listening(Protocol):
    """An execution of a run."""

    heard: Heard
    tree: RunTree | None
    is_live: bool
    was_replayed: bool

    @property
    def root(self) -> str | None:
        """The run's id if it is a root, since only roots are spoken to."""


async def keep_delivering(database: Database, runs: Callable[[], Collection[Listening]]) -> None:
    """Put messages into the inboxes of the runs that this process executes, until this is cancelled."""
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        # One that still repeats what is recorded may be about to meet the record of having heard it.
        found = {run.root: run for run in runs() if run.root is not None and run.tree is not None and run.is_live}
        if found:
            try:
                await _deliver(database, found)
            except DatabaseAway:
                continue
            except Exception as error:  # noqa: BLE001  (whatever a row holds, later messages are delivered)
                LOGGER.warning("messages to runs could not be delivered: %s", error)


async def _deliver(database: Database, found: Mapping[str, Listening]) -> None:
    # They stay in the database: what was heard is not read again at every look.
    heard = [key for listening in found.values() for key in listening.heard.known]
    for run, key, said in await database.rows(WAITING, list(found), TOPIC, heard):
        listening = found[run]
        if listening.was_replayed and await database.rows(RECORDED, run, key):
            listening.heard.note(key)
            continue
        text = _text_of(said)
        if text is None:
            listening.heard.note(key)
            LOGGER.warning("the run %r is not told the message %r, which holds no text", run, key)
        elif listening.tree is not None:
            listening.heard.deliver(listening.tree, key, text)


def form_of(said: str) -> Mapping[str, object]:
    """Return what stands in a message; nothing where some other client wrote what is none."""
    try:
        form = json.loads(said)
    except (ValueError, RecursionError):
        return {}
    return form if isinstance(form, dict) else {}


def _text_of(said: str) -> str | None:
    """Return what a message says; ``None`` where that is no text."""
    text = form_of(said).get("text")
    return text if isinstance(text, str) and not problem_of(text) else None
