"""
What a stored conversation is, what a store can do, and how a history that another program broke is mended.

A session is a frozen value: it is loaded, a run goes on from it, and the new one is saved. A loaded session does not change
when the run goes on.
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
from stepengine.data.messages import AssistantMessage, Message, ToolCallPart, ToolMessage, UserMessage, to_string_tuple
from stepengine.data.state import AgentState
from stepengine.data.transcript import Transcript
from stepengine.data.usage import Usage
from stepengine.errors import SessionError, StepEngineError

T = TypeVar("T")
Now: TypeAlias = T | Awaitable[T]
MAX_ID_CHARS = 1_000
"""Room for the ids of a user and a conversation; it is a key in databases, whose indexes allow some thousand bytes."""
LOST = "The result of this call is unavailable: it was not stored with the conversation."


@frozen(kw_only=True)
class SessionInfo:
    """
    What is known of a session beside its messages.

    Attributes:
        session_id: Whatever the caller chose, such as ``"user:chat"``.
        agent_id: The agent of the last run in it.
        parent_session_id: The session that this one is a part of, for a sub-agent's.
        parent_tool_call_id: The call in the parent's session that began it.
        child_session_ids: Sessions that began in this one, in order.
        model: The model string of the last run.
        provider: Its provider.
        user_id: The user that its runs were started for.
        status: How the last run in it ended, such as ``"completed"``.
        created_at: When it was first saved (UTC).
        updated_at: When it was last saved (UTC).
        metadata: Free JSON; that of its runs is added to it.
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
    A conversation as a store holds it.

    Attributes:
        info: What is known of it.
        messages: The record: the whole conversation.
        state: The state that its last run left, with *messages* as its history; ``None`` when only messages are known.
        turns: How many root runs it has had.
        journal: The name of the journal of the last run when it waits for an answer; else ``None``. The store says where
            the journals of a session are: ``turn_place``.
        usage: The tokens that all its runs have spent.
        version: How often it was saved; 0 for one that never was.
        repairs: What was mended when it was loaded; never stored.
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
class TurnPlace:
    """
    Where the journals of the root runs in a session are: in one of three kinds of places.

    Attributes:
        folder: A folder with a file for each.
        database: An SQLite file with a run for each.
        prefix: What their ids start with there.
        memory: A dict of this process, from names to journals.
        keep: How many of them are kept; older ones are removed when the session is saved.
    """

    folder: Path | None = None
    database: Path | None = None
    prefix: str = ""
    memory: dict[str, Any] | None = None
    keep: int = 10


@runtime_checkable
class SessionStore(Protocol):
    """What every store can do; both methods may be ``async``."""

    def get_history(self, session_id: str, /) -> Now[Sequence[Message]]:
        """Return the messages of a session, none for an id that is not known."""

    def save_history(self, session_id: str, messages: Sequence[Message], /) -> Now[None]:
        """Store the messages of a session in place of what was stored."""


@runtime_checkable
class StateStore(Protocol):
    """
    A store that also keeps what the last run left, as JSON: its state, and its journal while it waits.
    """

    def get_state(self, session_id: str, /) -> Now[dict[str, Any] | None]:
        """Return what ``save_state`` stored, or ``None``."""

    def save_state(self, session_id: str, state: dict[str, Any], /) -> Now[None]:
        """Store a JSON object, whatever it holds."""


@runtime_checkable
class DeletingStore(Protocol):
    """A store that can delete sessions, as ``DELETE /sessions/SESSION`` of a server needs."""

    def delete(self, session_id: str, /) -> Now[None]:
        """Remove a session with the journals of its runs; one that is not known is not an error."""


@runtime_checkable
class CacheStore(Protocol):
    """A store that also caches JSON values."""

    def get_cached(self, key: str, /) -> Now[Any]:
        """Return the value of a key, ``None`` when there is none or its time is over."""

    def set_cached(self, key: str, value: Any, ttl: float | None = None, /) -> Now[None]:
        """Store a JSON value, for *ttl* seconds or, without, for ever."""


@runtime_checkable
class VersionedStore(Protocol):
    """A store that keeps whole sessions and never lets one writer overwrite another's."""

    def load(self, session_id: str, /) -> Now[Session]:
        """Return a session, a new one of version 0 for an id that is not known."""

    def save(self, session: Session, /) -> Now[Session]:
        """
        Store a session and return it with its new version.

        Raises:
            SessionConflict: when the stored version is not the one of *session*.
        """


@runtime_checkable
class TurnStore(Protocol):
    """A store that has a place for the journals of a session's runs."""

    def turn_place(self, session_id: str, /) -> TurnPlace:
        """Return that place; nothing is made there by asking."""


def check_id(session_id: str) -> str:
    """
    Return *session_id* if it is valid, else raise ``SessionError``.

    Raises:
        SessionError: when it is empty, longer than 1,000 characters, or no text.
    """
    given: object = session_id
    if not isinstance(given, str) or not 0 < len(given) <= MAX_ID_CHARS:
        msg = f"a session id has 1 to {MAX_ID_CHARS:,} characters, such as 'user:chat'; this one is {str(session_id)[:80]!r}"
        raise SessionError(msg)
    try:
        session_id.encode()
    except UnicodeEncodeError:
        msg = f"the session id {session_id!r} holds half of a surrogate pair, which is not text"
        raise SessionError(msg) from None
    return session_id


def messages_to_json(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """Return messages as JSON, with everything that they hold, for stores that keep text."""
    return [codec.bare(message) for message in messages]


def messages_from_json(data: Iterable[object]) -> list[Message]:
    """
    Return the messages that ``messages_to_json`` wrote down.

    Raises:
        SessionError: for anything else; it says where.
    """
    found: list[Message] = []
    for number, item in enumerate(data):
        try:
            message = codec.restored(item)
        except StepEngineError as error:
            msg = f"item {number} is not a stored message: {error}"
            raise SessionError(msg) from None
        if not isinstance(message, (UserMessage, AssistantMessage, ToolMessage)):
            msg = f"item {number} is a {type(message).__name__} and no message"
            raise SessionError(msg)
        found.append(message)
    return found


def mended(messages: Iterable[Message]) -> tuple[Transcript, tuple[str, ...]]:
    """
    Return *messages* as a valid transcript, and a note for each repair.

    A call without a result gets one that says so; a result without a call, and a second use of a call id, is left out.
    """
    made: list[Message] = []
    notes: list[str] = []
    waiting: dict[str, ToolCallPart] = {}
    known: set[str] = set()

    def settle() -> None:
        for call in waiting.values():
            made.append(ToolMessage(call.tool_call_id, call.tool_name, LOST, "error"))
            notes.append(f"the call {call.tool_call_id!r} of {call.tool_name} had no result")
        waiting.clear()

    for message in messages:
        if isinstance(message, ToolMessage):
            if waiting.pop(message.tool_call_id, None) is None:
                notes.append(f"a result for {message.tool_call_id!r} had no call")
            else:
                made.append(message)
            continue
        settle()
        if isinstance(message, AssistantMessage):
            again = [call for call in message.tool_calls if call.tool_call_id in known]
            notes += [f"the call id {call.tool_call_id!r} was used twice" for call in again]
            waiting.update({call.tool_call_id: call for call in message.tool_calls if call not in again})
            known.update(waiting)
            made.append(
                attrs.evolve(message, content=[p for p in message.content if p not in again]) if again else message
            )
        else:
            made.append(message)
    settle()
    return Transcript(made), tuple(notes)
