"""The messages of one run tree by run and topic, and the waits for them."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias

import attrs
from attrs import frozen

from stepengine.data.codec import decode_stored
from stepengine.data.effects import AwaitMessage
from stepengine.data.json import JsonValue, freeze
from stepengine.data.messages import UserMessage
from stepengine.data.outcomes import Single, Value
from stepengine.data.questions import Answer, AnswerLike
from stepengine.data.typed_values import model_from_json
from stepengine.data.waits import MESSAGE_ID_BYTES, Received
from stepengine.errors import StepEngineError
from stepengine.runtime.performer import Item
from stepengine.tools.iterables import raise_for_one_shot_fields
from stepengine.tools.schemas import JsonSchema

MessageKind: TypeAlias = Literal["message", "answer", "cancel", "input", "result"]

# Other processes send to a folder or a database, neither of which tells anybody. So it is looked into, only while a run
# waits, and less and less often.
FIRST_POLL_SECONDS = 0.25
"""A reply to what a run has just sent arrives within a quarter of a second or much later."""
MAX_POLL_SECONDS = 2.0
"""A person who posts a message waits this long for its effect, and a thousand waiting runs look 500 times in a second."""
POLL_FACTOR = 1.25
"""From the first pause to the longest one in ten looks, within ten seconds: replies come soon or much later."""


@frozen
class Message:
    """
    Something that was sent to a run.

    Attributes:
        id: Its id, unique among those of the tree.
        path: The path of the run that it is for; ``""`` for the root.
        topic: The topic; ``""`` for a user message from a parent to its child. The id of the question for an answer, the
            number of the call for a result.
        value: Its content, JSON: an answer, the result of a call, or a text for the other kinds.
        kind: ``message`` for a ``Receive``, or an answer, a cancellation, a user message, or the result of a call.
    """

    id: str
    path: str
    topic: str
    value: JsonValue = attrs.field(default=None, converter=freeze)
    kind: MessageKind = "message"


def choose_message_id(given: str | None) -> str:
    """Return the id that a sender gave its message, or a random one."""
    return secrets.token_hex(MESSAGE_ID_BYTES) if given is None else given


def make_result_message(call_address: tuple[str, int], result: object) -> Message:
    """Return the message with *result* for a call; its id is the call's address, so that a call has one result."""
    path, seq = call_address
    return Message(f"result:{path}#{seq}", path, str(seq), result, "result")


def parse_answer(value: JsonValue) -> AnswerLike:
    """Return the answer in a message: a bool, a text, or an ``Answer`` in its stored form."""
    if isinstance(value, bool | str):
        return value
    answer: Answer = decode_stored(value)
    return answer


class MessageStore(Protocol):
    """The store for messages of a run that outlive its process, to which other processes add theirs."""

    def list_unread_messages(self) -> Sequence[Message]:
        """Return the stored messages that no run of the tree has received."""

    def list_unreceived_texts(self, path: str) -> Sequence[str]:
        """Return the texts sent to the run at *path* before this process resumed it and not received."""

    def has_message(self, message_id: str) -> bool:
        """Return whether a message with this id is stored."""

    async def fetch(self) -> Sequence[Message]:
        """
        Return the messages that arrived since the last call; cheap if there are none.

        Messages and what is said are kept from now on. Answers, results and the cancellations of children are given until the
        record says that they had their effect, and may be given twice. A cancellation of the root is given once.

        Raises:
            StepEngineError: when it cannot be read; it can be asked again.
        """

    def store_message(self, message: Message) -> bool:
        """Store a message of this process; return False if its run has not started, so that it stays unread."""

    def refuse(self, message: Message, reason: str) -> None:
        """Record that a message was refused."""

    def send(self, message: Message) -> bool:
        """
        Store a message durably for all processes; return whether its id is new.

        Waits for the disk.
        """


class Inboxes:
    """
    User messages to the runs of one tree that they have not received yet.

    Attributes:
        root: For the root run.
        by_path: For its children, by path.
    """

    __slots__ = ("by_path", "root")

    def __init__(self) -> None:
        self.root: list[UserMessage] = []
        self.by_path: dict[str, list[UserMessage]] = {}

    def add(self, path: str, *messages: UserMessage) -> None:
        """Add user messages for the run at *path*."""
        if messages:
            (self.by_path.setdefault(path, []) if path else self.root).extend(messages)


class RunMessages:
    """
    The messages of one run tree.

    Args:
        box: The store that outlives the process; ``None`` without one.
        apply: Carries out messages for the tree itself: answers a question, ends a run, adds a user message.
        warn: Adds a warning to the result.
        stop_tree: Stops the tree for an unexpected error while it polls.

    Attributes:
        is_kept: Whether there is a box.
        apply: The same function; it does nothing once the tree has ended.
    """

    def __init__(
        self,
        box: MessageStore | None,
        apply: Callable[[Message], object],
        warn: Callable[[str], object],
        stop_tree: Callable[[BaseException], object],
    ) -> None:
        self._box = box
        self.apply = apply
        self._warn = warn
        self._stop_tree = stop_tree
        self.is_kept = box is not None
        self._waiting: dict[tuple[str, str], deque[Message]] = {}
        # By id, for as long as the tree lasts, with the number of its arrival: a message for a `Receive` is queued once, even
        # if it is returned again. Messages of the other kinds are applied whenever the store returns them.
        self._seen: dict[str, int] = {}
        self._arrivals: list[asyncio.Future[None]] = []
        self._watchers = 0
        self._polling: asyncio.Task[None] | None = None
        self._trouble = ""
        self._is_over = False
        self._first: Sequence[Message] = ()
        if box is not None:
            self._first = box.list_unread_messages()
            self._enqueue_new([message for message in self._first if message.kind == "message"])

    def apply_earlier_messages(self) -> None:
        """Apply the steering messages of earlier processes; to be called once, when the tree runs."""
        first, self._first = self._first, ()
        self._apply_all([message for message in first if message.kind != "message"])

    def _apply_all(self, messages: Iterable[Message]) -> None:
        for message in messages:
            self.apply(message)

    def _enqueue_new(self, messages: Iterable[Message]) -> bool:
        """Queue messages by run and topic, each once; return whether any is new."""
        news = False
        for message in messages:
            if message.id not in self._seen:
                self._seen[message.id] = len(self._seen)
                self._waiting.setdefault((message.path, message.topic), deque()).append(message)
                news = True
        return news

    def deliver(self, message: Message) -> bool:
        """Store and queue a message of this process and wake its waiters; return whether it was accepted as new."""
        if self._is_over or self.has_message(message.id):
            return False  # what comes too late is in the mailbox, for whoever goes on
        # Kept before it is told: what a run has acted upon has to be in its record, or a replay would not hear it.
        if self._box is not None and not self._box.store_message(message):
            return False
        self._enqueue_new((message,))
        self._notify_waiters()
        return True

    def has_message(self, message_id: str) -> bool:
        """Return whether a message with this id has arrived before."""
        return message_id in self._seen or (self._box is not None and self._box.has_message(message_id))

    def send(self, message: Message) -> bool:
        """Store a message durably if there is a store; return whether it is new. May be called from any thread."""
        return not self.has_message(message.id) if self._box is None else self._box.send(message)

    async def fetch(self) -> None:
        """Fetch, queue and apply the messages of other processes; a failure becomes a warning. Call it in the run's event loop."""
        if self._box is None:
            return
        try:
            found = await self._box.fetch()
        except StepEngineError as error:
            # Said once and not at each look, four times a second; it may go well again.
            if self._trouble != error.message:
                self._trouble = error.message
                self._warn(f"messages of other processes to this run cannot be read: {error.message}")
            return
        if self._is_over:
            return
        if self._enqueue_new([message for message in found if message.kind == "message"]):
            self._notify_waiters()
        self._apply_all([message for message in found if message.kind != "message"])

    def list_unreceived_texts(self, path: str) -> Sequence[str]:
        """Return the texts sent to the run at *path* before this process resumed it and not received."""
        return () if self._box is None else self._box.list_unreceived_texts(path)

    def _notify_waiters(self) -> None:
        """Wake everything that waits for a message."""
        arrivals, self._arrivals = self._arrivals, []
        for future in arrivals:
            if not future.done():
                future.set_result(None)

    def find_oldest_message(self, path: str, topic: str) -> Message | None:
        """Return the oldest waiting message on a topic of the run at *path*; ``remove`` or ``refuse`` removes it."""
        waiting = self._waiting.get((path, topic))
        return waiting[0] if waiting else None

    def remove(self, message: Message) -> None:
        """Remove a message that a run has received; a replay may do so, too."""
        waiting = self._waiting.get((message.path, message.topic))
        if waiting and waiting[0].id == message.id:
            waiting.popleft()
        elif waiting:
            self._waiting[message.path, message.topic] = deque([one for one in waiting if one.id != message.id])

    def put_back_message(self, message: Message) -> None:
        """Return a message to its place in its topic, since its receiver lost a race."""
        # The order of a topic is that in which its messages came. What only the record knows came before all others.
        key = message.path, message.topic
        waiting = [*self._waiting.get(key, ()), message]
        self._waiting[key] = deque(sorted(waiting, key=lambda one: self._seen.get(one.id, -1)))
        self._notify_waiters()

    def refuse(self, message: Message, reason: str) -> None:
        """Remove a message that does not fit and record why."""
        self.remove(message)
        if self._box is not None:
            self._box.refuse(message, reason)

    def make_message_future(self) -> asyncio.Future[None]:
        """Return a future that is done when any message arrives."""
        self._arrivals = [future for future in self._arrivals if not future.done()]
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._arrivals.append(future)
        return future

    @contextlib.contextmanager
    def poll_in_block(self) -> Iterator[None]:
        """Poll the mailbox for the duration of the block, since a run waits in it."""
        self._watchers += 1
        if self._box is not None and self._polling is None:
            self._polling = asyncio.get_running_loop().create_task(self._poll_or_stop_tree())
        try:
            yield
        finally:
            self._watchers -= 1
            if not self._watchers:
                self._stop_polling()

    async def _poll_or_stop_tree(self) -> None:
        """Poll the mailbox; an unexpected error stops the tree, which would otherwise wait forever."""
        try:
            await self._poll()
        except asyncio.CancelledError:
            raise  # the wait has ended
        except BaseException as error:  # noqa: BLE001 - also one of a test framework must end the wait
            self._stop_tree(error)

    async def _poll(self) -> None:
        """Poll the mailbox, less often while nothing arrives."""
        pause = FIRST_POLL_SECONDS
        while True:
            await asyncio.sleep(pause)
            await self.fetch()
            pause = min(MAX_POLL_SECONDS, pause * POLL_FACTOR)

    def close(self) -> None:
        """Stop polling and ignore later messages, since the tree has ended."""
        self._is_over = True
        self._stop_polling()
        self.apply = self._warn = self._stop_tree = _ignore_message

    def _stop_polling(self) -> None:
        """Cancel the task that polls for messages, if it runs."""
        polling, self._polling = self._polling, None
        if polling is not None:
            polling.cancel()


def _ignore_message(_: object) -> None:
    """Ignore a message, for an ended tree."""


def find_received_message(item: Item, outcome: Single) -> Message | None:
    """Return the message that an effect received, or ``None``."""
    received = outcome.value if isinstance(outcome, Value) else None
    if not isinstance(item.effect, AwaitMessage) or not isinstance(received, Received):
        return None
    return Message(received.id, item.path, item.effect.topic, received.value)


def make_message_checker(topic: str, schema: Any) -> Callable[[JsonValue], str]:
    """
    Return a function that returns the reason why a message does not fit *schema*, or ``""``.

    Raises:
        DefinitionError: when what it has to fit is not a schema.
    """
    if schema is None:
        return lambda _: ""
    if isinstance(schema, Mapping):
        compiled = JsonSchema(f"schema of Receive({topic!r})", schema)
        return lambda value: "; ".join(compiled.issues(value))
    raise_for_one_shot_fields(schema, f"schema of Receive({topic!r})")

    def find_misfit(value: JsonValue) -> str:
        try:
            model_from_json(schema, value)
        except Exception as error:  # noqa: BLE001 - validators of the author's may raise whatever they like
            return str(error)
        return ""

    return find_misfit
