"""
Stored conversations, the protocols of session stores, and the repair of a history that another program broke.

A session is immutable: it is loaded, a run continues it, and a new session is saved. A run does not change a loaded session.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeVar, runtime_checkable

import attrs
from attrs import frozen

from stepengine.data import codec
from stepengine.data.json import JsonDict, freeze_object
from stepengine.data.messages import (
    AssistantMessage,
    AssistantPart,
    Message,
    ToolCallPart,
    ToolMessage,
    UserMessage,
    to_string_tuple,
)
from stepengine.data.state import AgentState
from stepengine.data.transcript import Transcript
from stepengine.data.usage import Usage
from stepengine.errors import SessionError, StepEngineError

T = TypeVar("T")
MaybeAwaitable: TypeAlias = T | Awaitable[T]
MAX_ID_CHARS = 1_000
"""Room for the ids of a user and a conversation. It is a key in databases, whose indexes allow a few thousand bytes."""
LOST = "The result of this call is unavailable: it was not stored with the conversation."


@frozen(kw_only=True)
class SessionInfo:
    """
    The data of a session except its messages.

    Attributes:
        session_id: The id from the caller, such as ``"user:chat"``.
        agent_id: The agent of the last run in it.
        parent_session_id: The session that started this one, for a sub-agent's.
        parent_tool_call_id: The call in the parent's session that started it.
        child_session_ids: The sessions started in this one, in order.
        model: The model string of the last run.
        provider: Its provider.
        user_id: The user of its runs.
        status: The status of the last run in it, such as ``"completed"``.
        created_at: The time of the first save (UTC).
        updated_at: The time of the last save (UTC).
        metadata: Free JSON; that of its runs is merged into it.
    """

    session_id: str
    agent_id: str = ""
    parent_session_id: str | None = None
    parent_tool_call_id: str | None = None
    child_session_ids: tuple[str, ...] = attrs.field(default=(), converter=to_string_tuple)
    model: str | None = None
    provider: str | None = None
    user_id: str | None = None
    status: str | None = None
    created_at: datetime | None = None
    updated_at: datetime | None = None
    metadata: JsonDict = attrs.field(default=JsonDict(), converter=freeze_object)


@frozen(kw_only=True)
class Session:
    """
    A stored conversation.

    Attributes:
        info: Its data except the messages.
        messages: The record: the whole conversation.
        state: The state after its last run, with *messages* as its history; ``None`` if only messages are known.
        turns: The number of root runs.
        journal: The name of the journal of the last run if it waits for an answer; else ``None``. For its location see
            ``TurnStore.get_journal_location``.
        usage: The tokens of all its runs.
        version: The number of saves; 0 for a session that was never saved.
        repairs: The repairs when it was loaded; never stored.
    """

    info: SessionInfo
    messages: Transcript = attrs.field(factory=Transcript)
    state: AgentState | None = None
    turns: int = 0
    journal: str | None = None
    usage: Usage = Usage()
    version: int = 0
    repairs: tuple[str, ...] = attrs.field(default=(), eq=False)

    @property
    def session_id(self) -> str:
        """The session's id."""
        return self.info.session_id


@frozen(kw_only=True)
class JournalLocation:
    """
    The location of the journals of a session's root runs; one of three kinds.

    Attributes:
        folder: A folder with a file for each.
        database: An SQLite file with a run for each.
        prefix: The start of their ids in the database; without one the whole file belongs to the session.
        memory: A dict of this process, from names to journals.
        keep: How many are stored; older ones are removed when the session is saved.
    """

    folder: Path | None = None
    database: Path | None = None
    prefix: str = ""
    memory: dict[str, Any] | None = None
    keep: int = 10


@runtime_checkable
class SessionStore(Protocol):
    """The protocol of every session store; both methods may be ``async``."""

    def get_history(self, session_id: str, /) -> MaybeAwaitable[Sequence[Message]]:
        """Return the messages of a session; none for an unknown id."""

    def save_history(self, session_id: str, messages: Sequence[Message], /) -> MaybeAwaitable[None]:
        """Replace the stored messages of a session."""


@runtime_checkable
class StateStore(Protocol):
    """A store that also stores the state of the last run as JSON, and the name of its journal while it waits."""

    def get_state(self, session_id: str, /) -> MaybeAwaitable[dict[str, Any] | None]:
        """Return the object that ``save_state`` stored, or ``None``."""

    def save_state(self, session_id: str, state: dict[str, Any], /) -> MaybeAwaitable[None]:
        """Store any JSON object."""


@runtime_checkable
class DeletingStore(Protocol):
    """A store that can delete sessions, as ``DELETE /sessions/SESSION`` of a server needs."""

    def delete(self, session_id: str, /) -> MaybeAwaitable[None]:
        """Remove a session with the journals of its runs; do nothing for an unknown session."""


@runtime_checkable
class CacheStore(Protocol):
    """A store that also caches JSON values."""

    def get_cached(self, key: str, /) -> MaybeAwaitable[Any]:
        """Return the value of a key, or ``None`` if there is none or it has expired."""

    def set_cached(self, key: str, value: Any, ttl: float | None = None, /) -> MaybeAwaitable[None]:
        """Store a JSON value, for *ttl* seconds or without a limit."""


@runtime_checkable
class VersionedStore(Protocol):
    """A store of whole sessions in which no writer overwrites the changes of another."""

    def load(self, session_id: str, /) -> MaybeAwaitable[Session]:
        """Return a session; a new one of version 0 for an unknown id."""

    def save(self, session: Session, /) -> MaybeAwaitable[Session]:
        """
        Store a session and return it with its new version.

        Raises:
            SessionConflict: if the stored version differs from that of *session*.
        """


@runtime_checkable
class TurnStore(Protocol):
    """A store with a location for the journals of a session's runs."""

    def get_journal_location(self, session_id: str, /) -> JournalLocation:
        """Return the location of the journals, without creating it."""


def require_session_id(session_id: str) -> str:
    """
    Return *session_id* if it is a text of 1 to 1,000 characters; else raise ``SessionError``.

    Raises:
        SessionError: If it is empty, longer than 1,000 characters, or not a text.
    """
    given: object = session_id
    if not isinstance(given, str) or not 0 < len(given) <= MAX_ID_CHARS:
        msg = (
            f"a session id must be 1 to {MAX_ID_CHARS:,} characters, such as 'user:chat', not {str(session_id)[:80]!r}"
        )
        raise SessionError(msg)
    try:
        session_id.encode()
    except UnicodeEncodeError:
        msg = f"the session id {session_id!r} contains half of a surrogate pair, which is not text"
        raise SessionError(msg) from None
    return session_id


def messages_to_json(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """Return messages as complete JSON, for stores of texts."""
    return [codec.encode_stored(message) for message in messages]


def messages_from_json(data: Iterable[object]) -> list[Message]:
    """
    Return messages from the JSON of ``messages_to_json``; raise ``SessionError`` for an invalid item.

    Raises:
        SessionError: For an item that is not a stored message, with its position.
    """
    found: list[Message] = []
    for number, item in enumerate(data):
        try:
            message = codec.decode_stored(item)
        except StepEngineError as error:
            msg = f"item {number} is not a stored message: {error}"
            raise SessionError(msg) from None
        if not isinstance(message, (UserMessage, AssistantMessage, ToolMessage)):
            msg = f"item {number} is a {type(message).__name__}, not a message"
            raise SessionError(msg)
        found.append(message)
    return found


class _TranscriptRepair:
    """Makes valid messages from any, one after the other; *notes* describe the repairs."""

    def __init__(self) -> None:
        self.made: list[Message] = []
        self.notes: list[str] = []
        self._waiting: dict[str, ToolCallPart] = {}
        self._results: dict[str, ToolMessage] = {}
        self._known = {""}

    def add_message(self, message: Message) -> None:
        """Add a message; drop duplicate results, results without a call and invalid calls, with a note for each."""
        if isinstance(message, ToolMessage):
            if message.tool_call_id in self._waiting and message.tool_call_id not in self._results:
                self._results[message.tool_call_id] = message
            else:
                self.notes.append(f"a result for {message.tool_call_id!r} had no call")
            return
        self.flush_results()
        self.made.append(self._remove_invalid_calls(message) if isinstance(message, AssistantMessage) else message)

    def flush_results(self) -> None:
        """Append the results of the last reply in the order of its calls, an error result for a missing one; call it at the end, too."""
        found = self._results
        if [call_id for call_id in self._waiting if call_id in found] != list(found):
            self.notes.append(
                f"the results of the calls {', '.join(map(repr, found))} were not in the order of the calls"
            )
        for call_id, call in self._waiting.items():
            if call_id not in found:
                self.notes.append(f"the call {call_id!r} of {call.tool_name} had no result")
            self.made.append(found.get(call_id) or ToolMessage(call_id, call.tool_name, LOST, "error"))
        self._waiting, self._results = {}, {}

    def _remove_invalid_calls(self, reply: AssistantMessage) -> AssistantMessage:
        """Return a reply without calls that have no id or a used one, with a note for each, and record its other calls."""
        content: list[AssistantPart] = []
        for part in reply.content:
            if isinstance(part, ToolCallPart):
                if part.tool_call_id in self._known:
                    twice = f"the call id {part.tool_call_id!r} was used twice"
                    self.notes.append(twice if part.tool_call_id else f"a call of {part.tool_name} had no id")
                    continue
                self._known.add(part.tool_call_id)
                self._waiting[part.tool_call_id] = part
            content.append(part)
        return reply if len(content) == len(reply.content) else attrs.evolve(reply, content=content)


def repair_transcript(messages: Iterable[Message]) -> tuple[Transcript, tuple[str, ...]]:
    """
    Return *messages* as a valid transcript, with a note for each repair.

    A call without a result gets an error result. A result without a call, and a call without an id or with a used one, is removed.
    Results get the order of their calls.
    """
    repair = _TranscriptRepair()
    for message in messages:
        repair.add_message(message)
    repair.flush_results()
    return Transcript(repair.made), tuple(repair.notes)
