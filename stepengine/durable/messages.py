"""
Messages to runs that are under way: sent by anybody through the database, heard by whoever executes the run, once.

A message waits in the database beside the run. The worker that has the run puts it into the run's inbox, and the next outcome
that is recorded takes it along, as it would in one process. The record of that outcome says which messages were heard with it,
so that whoever resumes the run does not hear them again.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from stepengine.data.messages import UserMessage
from stepengine.data.outcomes import Single, Stop, Value
from stepengine.data.waits import Received
from stepengine.durable.database import DatabaseAway, nul_free_sql
from stepengine.errors import StepEngineError
from stepengine.runtime.logs import LOGGER
from stepengine.runtime.mail import Message

if TYPE_CHECKING:
    from stepengine.durable.wire import Order
    from stepengine.runtime.tree import RunTree

TOPIC = "said"
"""Where messages to a run wait."""
POST = "post:"
DELIVERY_SECONDS = 0.5
"""A person hardly notices half a second; each worker asks the database twice in a second for all of its runs together."""
POSTED = """
    select destination_uuid, message_uuid, topic, message from dbos.notifications
    where destination_uuid = any(%s) and topic like 'post:%%' and serialization = 'portable_json'
        and message_uuid <> all(%s)
    order by created_at_epoch_ms, message_uuid
"""
WAITING = """
    select destination_uuid, message_uuid, message from dbos.notifications
    where destination_uuid = any(%s) and topic = %s and not consumed and serialization = 'portable_json'
        and message_uuid <> all(%s)
    order by created_at_epoch_ms, message_uuid
"""
RECORDED = f"""
    select 1 from dbos.operation_outputs
    where workflow_uuid = %s and serialization = 'portable_json'
        and exists (select from json_array_elements_text({nul_free_sql("output")}::json->'heard') as heard (key) where key = %s)
"""  # noqa: S608 - of names of ours


def find_text_problem(text: str) -> str:
    """Return why a message cannot be recorded; ``""`` if it can."""
    if "\0" in text:
        return "a NUL, which the database does not store"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "half of a surrogate pair, which is not text"
    return ""


class RowReader(Protocol):
    """The read access of an ``Operator`` to the database."""

    async def rows(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        """Return what a statement selects."""


class MessageDelivery:
    """The messages that one execution of a run has received, and those in its inbox."""

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._waiting: dict[int, tuple[str, UserMessage]] = {}
        self._posted: dict[str, str] = {}
        self._refused: list[str] = []

    @property
    def known(self) -> Collection[str]:
        """The keys of the received messages."""
        return self._known

    def note(self, key: str) -> None:
        """Record that a message was received and is stored."""
        self._known.add(key)

    def deliver(self, tree: RunTree, key: str, text: str, path: str = "") -> None:
        """Put a message into the inbox of the run at *path*."""
        message = UserMessage(text)
        self._known.add(key)
        self._waiting[id(message)] = key, message
        tree.inboxes.add(path, message)

    def hand_over(self, tree: RunTree, key: str, message: Message) -> None:
        """Deliver a posted message to the run that receives on its topic."""
        self._known.add(key)
        self._posted[message.id] = key
        tree.mail.arrive(message)

    def taken_by(self, outcome: Single) -> dict[str, Any]:
        """Return once the keys of the messages that an outcome consumed or refused, for its record."""
        inputs = () if isinstance(outcome, Stop) else outcome.inputs
        keys = [self._waiting.pop(id(message))[0] for message in inputs if id(message) in self._waiting]
        if isinstance(outcome, Value) and isinstance(outcome.value, Received):
            keys += self._pop_key(outcome.value.id)
        keys += self._refused
        self._refused = []
        return {"heard": keys} if keys else {}

    # --- as the post box of the run's tree: what is in the database comes by itself ------------------------------------

    def unread(self) -> Sequence[Message]:
        """Return nothing."""
        return ()

    def unheard(self, path: str) -> Sequence[str]:
        """Return nothing: unread messages are in the database."""
        return ()

    def has(self, message_id: str) -> bool:
        """Return ``False``: messages are read from the database, once each."""
        return False

    async def fetch(self) -> Sequence[Message]:
        """Return nothing."""
        return ()

    def keep(self, message: Message) -> bool:
        """Store nothing: the message is in the database."""
        return True

    def refuse(self, message: Message, why: str) -> None:
        """Record that a message fits no receiver; the next outcome stores that."""
        self._refused += self._pop_key(message.id)

    def _pop_key(self, message_id: str) -> list[str]:
        """Return the key of a message once, for the record of the outcome that consumed it."""
        key = self._posted.pop(message_id, None)
        return [] if key is None else [key]

    def post(self, message: Message) -> bool:
        """Refuse: messages to a durable run are sent through the database."""
        msg = f"the message {message.id!r} of a durable run is sent by DurableEngine.post, and not by its tree"
        raise StepEngineError(msg)


class RunExecution(Protocol):
    """An execution of a run."""

    heard: MessageDelivery
    order: Order
    tree: RunTree | None
    is_live: bool
    was_replayed: bool

    @property
    def root(self) -> str | None:
        """The run's id if it is a root, since only roots are spoken to."""


async def deliver_messages(database: RowReader, runs: Callable[[], Collection[RunExecution]]) -> None:
    """Deliver messages to the runs of this process until cancelled."""
    while True:
        await asyncio.sleep(DELIVERY_SECONDS)
        # One that still repeats what is recorded may be about to meet the record of having heard it.
        live = [run for run in runs() if run.tree is not None and run.is_live]
        found = {run.root: run for run in live if run.root is not None}
        if live:
            try:
                await _deliver_user_input(database, found)
                await _deliver_topic_messages(database, live)
            except DatabaseAway:
                continue
            except Exception as error:  # noqa: BLE001  (whatever a row holds, later messages are delivered)
                LOGGER.warning("messages to runs could not be delivered: %s", error)


async def _deliver_user_input(database: RowReader, found: Mapping[str, RunExecution]) -> None:
    # They stay in the database: what was heard is not read again at every look.
    heard = [key for listening in found.values() for key in listening.heard.known]
    for run, key, said in await database.rows(WAITING, list(found), TOPIC, heard):
        listening = found[run]
        if listening.was_replayed and await database.rows(RECORDED, run, key):
            listening.heard.note(key)
            continue
        text = _parse_text(said)
        if text is None:
            listening.heard.note(key)
            LOGGER.warning("the run %r is not told the message %r, which holds no text", run, key)
        elif listening.tree is not None:
            listening.heard.deliver(listening.tree, key, text)


async def _deliver_topic_messages(database: RowReader, live: Sequence[RunExecution]) -> None:
    """Deliver the messages that were posted on topics of runs; they are stored for the root of each tree."""
    runs: dict[str, list[RunExecution]] = {}
    for listening in live:
        runs.setdefault(listening.order.root, []).append(listening)
    heard = [set(listening.heard.known) for listening in live]
    for root, key, topic, said in await database.rows(POSTED, list(runs), list(set.intersection(*heard))):
        path, name = parse_database_topic(topic)
        form = parse_message_form(said)
        for listening in runs[root]:
            own = listening.order.path
            # The body of a tool may be part of the run of its caller, which alone knows of it.
            is_for = path == own or (bool(name) and (not own or path.startswith(f"{own}.")))
            if not is_for or key in listening.heard.known:
                continue
            if (
                (listening.was_replayed and await database.rows(RECORDED, listening.order.id, key))
                or listening.tree is None
                or "value" not in form
            ):
                listening.heard.note(key)
            elif name:
                message = Message(key.removesuffix(f"::{root}"), path, name, form["value"])
                listening.heard.hand_over(listening.tree, key, message)
            else:
                listening.heard.deliver(listening.tree, key, str(form["value"]), path)


def make_database_topic(path: str, topic: str) -> str:
    """Return the database topic for a message to the run at *path*; *topic* is ``""`` for its inbox."""
    return f"{POST}{path}:{topic}"


def parse_database_topic(topic: str) -> tuple[str, str]:
    """Return the path and the topic of a message."""
    path, _, name = topic.removeprefix(POST).partition(":")
    return path, name


def parse_message_form(said: str) -> Mapping[str, object]:
    """Parse a message; empty if another client wrote something else."""
    try:
        form = json.loads(said)
    except (ValueError, RecursionError):
        return {}
    return form if isinstance(form, dict) else {}


def _parse_text(said: str) -> str | None:
    """Return the text of a message; ``None`` if it has none."""
    text = parse_message_form(said).get("text")
    return text if isinstance(text, str) and not find_text_problem(text) else None
