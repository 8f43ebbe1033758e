"""The messages of one run tree: what was sent to its runs, on which topic, and who waits for more."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias

import attrs
from attrs import frozen

from stepengine.data.codec import restored
from stepengine.data.effects import AwaitMessage
from stepengine.data.json import JsonValue, freeze, thaw
from stepengine.data.messages import UserMessage
from stepengine.data.outcomes import Single, Value
from stepengine.data.questions import Answer, AnswerLike
from stepengine.data.waiting import Received
from stepengine.errors import StepEngineError
from stepengine.runtime.performer import Item
from stepengine.tools.schemas import JsonSchema

__all__ = ("Mail", "Message", "MessageKind", "PostBox", "answer_in", "message_in", "misfit_of", "result_message")

MessageKind: TypeAlias = Literal["message", "answer", "cancel", "input", "result"]

# Other processes post to a folder or a database, neither of which tells anybody. So it is looked into, only while a run
# waits, and less and less often.
FIRST_POLL_SECONDS = 0.25
"""Seconds until the first look into a post box while a run waits for what somebody else's process may send."""
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
        topic: The topic; ``""`` for what a parent says to its child; of an answer the id of the question, of a result the
            number of the call.
        value: What it says, JSON; of an answer what answers, of a result what came of the call, of the others a text.
        kind: Whether somebody receives it, it answers a question, ends the run, is said to it, or is what came of a call.
    """

    id: str
    path: str
    topic: str
    value: JsonValue = attrs.field(default=None, converter=freeze)
    kind: MessageKind = "message"


def result_message(place: tuple[str, int], result: object) -> Message:
    """Return what tells the call at a place what came of it: by its id each call has one result."""
    path, seq = place
    return Message(f"result:{path}#{seq}", path, str(seq), result, "result")


def answer_in(value: JsonValue) -> AnswerLike:
    """Return the answer that a message of that kind holds: a bool, a text, or an ``Answer`` in its stored form."""
    if isinstance(value, bool | str):
        return value
    answer: Answer = restored(value)
    return answer


class PostBox(Protocol):
    """Where messages of a run are kept that outlive its process, and into which other processes put theirs."""

    def unread(self) -> Sequence[Message]:
        """Return what was kept and no run of the tree took yet."""

    def unheard(self, path: str) -> Sequence[str]:
        """Return what was said to the run at *path* before this process took over, and did not reach it."""

    def has(self, message_id: str) -> bool:
        """Return whether a message of this id was kept."""

    async def fetch(self) -> Sequence[Message]:
        """
        Return what came since this was last asked; costs next to nothing where nothing did.

        Messages and what is said are kept from now on. Whatever answers or ends something is given until the record says
        that it did, and may be given twice.

        Raises:
            StepEngineError: when it cannot be read; it can be asked again.
        """

    def keep(self, message: Message) -> bool:
        """Keep a message of this process; return ``False`` if its run has not begun, so that the message stays unread."""

    def refuse(self, message: Message, why: str) -> None:
        """Take note that a message fits nothing that was waited for."""

    def post(self, message: Message) -> bool:
        """
        Put a message where every process finds it, durably; return whether one of that id was not there before.

        Waits for the disk.
        """


class Inboxes:
    """
    What people said to the runs of one tree and these have not received yet.

    Attributes:
        root: For the root run.
        by_path: For its children, by path.
    """

    __slots__ = ("by_path", "root")

    def __init__(self) -> None:
        self.root: list[UserMessage] = []
        self.by_path: dict[str, list[UserMessage]] = {}

    def add(self, path: str, *messages: UserMessage) -> None:
        """Add what was said to the run at *path*."""
        if messages:
            (self.by_path.setdefault(path, []) if path else self.root).extend(messages)


class Mail:
    """
    The messages of one run tree.

    Args:
        box: What outlives the process; ``None`` for nothing.
        steer: Does what is not a message: answers a question, ends a run, says something to one.
        warn: Tells whoever gets the result what was odd.

    Attributes:
        is_kept: Whether a box outlives this process.
        steer: The same function; it does nothing once the tree has ended.
    """

    def __init__(self, box: PostBox | None, steer: Callable[[Message], object], warn: Callable[[str], object]) -> None:
        self._box = box
        self.steer = steer
        self._warn = warn
        self.is_kept = box is not None
        self._waiting: dict[tuple[str, str], deque[Message]] = {}
        # By id, for as long as the tree lasts: a letter is given again until the record says what it did, and must not
        # be done twice.
        self._seen: set[str] = set()
        self._here: set[str] = set()
        self._arrivals: list[asyncio.Future[None]] = []
        self._watchers = 0
        self._polling: asyncio.Task[None] | None = None
        self._trouble = ""
        self._is_over = False
        self._first: Sequence[Message] = ()
        if box is not None:
            self._first = box.unread()
            self._sort([message for message in self._first if message.kind == "message"])

    def begin(self) -> None:
        """Do what was asked for, beside messages, before this process took over; to be called once, when the tree runs."""
        first, self._first = self._first, ()
        self._do([message for message in first if message.kind != "message"])

    def _do(self, asked: Iterable[Message]) -> None:
        for message in asked:
            self.steer(message)

    def _sort(self, messages: Iterable[Message]) -> bool:
        """Take in messages, and each only once; return whether any is new."""
        news = False
        for message in messages:
            if message.id not in self._seen:
                self._seen.add(message.id)
                self._here.add(message.id)
                self._waiting.setdefault((message.path, message.topic), deque()).append(message)
                news = True
        return news

    def arrive(self, message: Message) -> bool:
        """Take in a message of this process; to be called in the run's event loop. Return whether it was new."""
        if self._is_over or self.has(message.id):
            return False  # what comes too late is in the post box, for whoever goes on
        # Kept before it is told: what a run has acted upon has to be in its record, or a replay would not hear it.
        if self._box is not None and not self._box.keep(message):
            return False
        self._sort((message,))
        self._tell()
        return True

    def has(self, message_id: str) -> bool:
        """Return whether a message of this id came before."""
        return message_id in self._seen or (self._box is not None and self._box.has(message_id))

    def post(self, message: Message) -> bool:
        """Put a message where it outlives this process, if there is such a place; return whether it is new. From any thread."""
        return not self.has(message.id) if self._box is None else self._box.post(message)

    async def fetch(self) -> None:
        """Take in what other processes sent; to be called in the run's event loop."""
        if self._box is None:
            return
        try:
            found = await self._box.fetch()
        except StepEngineError as error:
            # Said once and not at each look, four times a second; it may go well again.
            if self._trouble != error.message:
                self._trouble = error.message
                self._warn(f"what other processes send to this run cannot be read: {error.message}")
            return
        if self._is_over:
            return
        if self._sort([message for message in found if message.kind == "message"]):
            self._tell()
        self._do([message for message in found if message.kind != "message"])

    def unheard(self, path: str) -> Sequence[str]:
        """Return what was said to the run at *path* before this process took over, and did not reach it."""
        return () if self._box is None else self._box.unheard(path)

    def _tell(self) -> None:
        arrivals, self._arrivals = self._arrivals, []
        for future in arrivals:
            if not future.done():
                future.set_result(None)

    def first(self, path: str, topic: str) -> Message | None:
        """Return the oldest message that waits on a topic of the run at *path*; ``take`` or ``refuse`` removes it."""
        waiting = self._waiting.get((path, topic))
        return waiting[0] if waiting else None

    def take(self, message: Message) -> None:
        """Take note that a run has a message, which the record may say, too."""
        if message.id not in self._here:
            return
        self._here.discard(message.id)
        waiting = self._waiting[message.path, message.topic]
        if waiting[0].id == message.id:
            waiting.popleft()
        else:
            self._waiting[message.path, message.topic] = deque([one for one in waiting if one.id != message.id])

    def give_back(self, message: Message) -> None:
        """Let a message be the next on its topic again: who took it lost its race."""
        self._here.add(message.id)
        # In front: it was the next one, and the order of a topic is that in which its messages came.
        self._waiting.setdefault((message.path, message.topic), deque()).appendleft(message)
        self._tell()

    def refuse(self, message: Message, why: str) -> None:
        """Leave out a message that does not fit."""
        self.take(message)
        if self._box is not None:
            self._box.refuse(message, why)

    def arrival(self) -> asyncio.Future[None]:
        """Return a future that is done as soon as a message arrives, for whatever run and topic."""
        self._arrivals = [future for future in self._arrivals if not future.done()]
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._arrivals.append(future)
        return future

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Look into the post box again and again for as long as the block lasts, since a run waits in it."""
        self._watchers += 1
        if self._box is not None and self._polling is None:
            self._polling = asyncio.get_running_loop().create_task(self._poll())
        try:
            yield
        finally:
            self._watchers -= 1
            if not self._watchers:
                self._look_no_more()

    async def _poll(self) -> None:
        """Look less often while nothing comes: a thousand waiting runs must not keep a process busy."""
        pause = FIRST_POLL_SECONDS
        while True:
            await asyncio.sleep(pause)
            await self.fetch()
            pause = min(MAX_POLL_SECONDS, pause * POLL_FACTOR)

    def close(self) -> None:
        """Forget the tree, which has ended."""
        self._is_over = True
        self._look_no_more()
        self.steer = self._warn = _nothing

    def _look_no_more(self) -> None:
        polling, self._polling = self._polling, None
        if polling is not None:
            polling.cancel()


def _nothing(_: object) -> None:
    """Stand in for a tree that has ended."""


def message_in(item: Item, outcome: Single) -> Message | None:
    """Return the message that the outcome of an effect took; ``None`` for none."""
    received = outcome.value if isinstance(outcome, Value) else None
    if not isinstance(item.effect, AwaitMessage) or not isinstance(received, Received):
        return None
    return Message(received.id, item.path, item.effect.topic, received.value)


def misfit_of(topic: str, schema: Any) -> Callable[[JsonValue], str]:
    """
    Return why a message on *topic* does not fit *schema*, ``""`` when it does.

    Raises:
        DefinitionError: when what it has to fit is not a schema.
    """
    if schema is None:
        return lambda _: ""
    if isinstance(schema, Mapping):
        compiled = JsonSchema(f"schema of Receive({topic!r})", schema)
        return lambda value: "; ".join(compiled.issues(value))

    def misfit(value: JsonValue) -> str:
        try:
            schema.model_validate(thaw(value))
        except Exception as error:  # noqa: BLE001 - validators of the author's may raise whatever they like
            return str(error)
        return ""

    return misfit
