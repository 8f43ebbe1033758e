"""
The history of a run: an immutable sequence of messages with O(1) append.

Versions share one append-only buffer and differ in length. Appending to the newest version claims the next slot of the
buffer; appending to an older one copies the prefix once. Old versions stay valid, and iteration is contiguous.

A transcript cannot contain an unpaired tool call. An assistant message with calls is followed by one result per call, in
call order, and call ids are unique.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from inspect import CO_GENERATOR
from itertools import islice
from typing import Any, NoReturn, TypeVar, overload

from stepengine.data.functions import discards_result
from stepengine.data.messages import AssistantMessage, Message, ToolCallPart, ToolMessage, ToolResult, UserMessage
from stepengine.data.wire import read_messages, to_dicts
from stepengine.errors import TranscriptError

T = TypeVar("T")

# The generations of copies that are remembered, to know without a search which messages two transcripts share. A policy
# that cuts at every step would otherwise make the list as long as the run.
KEPT_GENERATIONS = 8


class _Buffer:
    """Messages that versions share. ``free`` contains the index of the next slot; popping it is the atomic claim."""

    # All versions of a conversation share one growing list; a version is a list and a length. So appending is O(1), and ten
    # thousand states of a run need the memory of one conversation. That is safe because items below a version's length never
    # change.
    __slots__ = ("calls", "folds", "free", "items", "lineage", "memos", "token")

    def __init__(
        self, items: list[Message], lineage: tuple[tuple[object, int], ...] = (), calls: dict[str, int] | None = None
    ) -> None:
        self.items = items
        # Two threads, or a handler with an old state, may append to the same version. Only one of them may use the next
        # slot. `list.pop` is atomic: the one that gets the index uses it, and the other one copies. A lock would cost more than
        # the append.
        self.free = [len(items)]
        if calls is None:
            calls = {m.tool_call_id: i for i, m in enumerate(items) if isinstance(m, ToolMessage)}
        self.calls = calls
        self.memos: dict[Any, list[Any]] = {}
        self.folds: dict[Any, list[Any]] = {}
        self.token = object()
        self.lineage = lineage

    def copy_calls_below(self, length: int) -> dict[str, int]:
        """Return a copy of the call positions below *length*; newer versions add theirs at the end."""
        calls = self.calls.copy()
        while calls:
            call_id, index = calls.popitem()
            if index < length:
                calls[call_id] = index
                break
        return calls

    def list_ancestors(self, length: int) -> tuple[tuple[object, int], ...]:
        """Return the tokens of this buffer and of its ancestors, each with how many of the first *length* messages it shares."""
        return ((self.token, length), *[(token, min(n, length)) for token, n in self.lineage])


class _Prefix(Sequence[T]):
    """An immutable sequence of the first *length* values of a list that may grow."""

    __slots__ = ("_length", "_values")

    def __init__(self, values: list[T], length: int) -> None:
        self._values = values
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[T]:
        return islice(self._values, self._length)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        if isinstance(index, slice):
            return [self._values[i] for i in range(*index.indices(self._length))]
        return self._values[range(self._length)[index]]


def _require_used_result(method: str) -> None:
    """Raise if a handler discards the result of *method*, as if the transcript were a mutable list."""
    # Users of lists write `history.append(message)` and see no change. Checked only in generators, since handlers are
    # generators; elsewhere an unused result may be intended.
    caller = sys._getframe(2)  # noqa: SLF001 - only the frame shows the use of a result
    if caller.f_code.co_flags & CO_GENERATOR and discards_result(caller):
        msg = (
            f"{method} returns a new transcript, and the result is not used here; use the result, or change "
            'the history of the run with `yield ToolCall("add_message", {"role": "user", "content": "..."})`'
        )
        raise TypeError(msg)


class Transcript(Sequence[Message]):
    """
    An immutable, paired sequence of messages.

    ``Transcript([...])`` makes one from messages; ``append`` and ``extend`` return a longer one. Two transcripts are
    equal when their messages are.

    Raises:
        TranscriptError: For unpaired, repeated or misplaced calls and results, and for objects that are not messages.
    """

    __slots__ = ("_buffer", "_length")

    def __init__(self, messages: Iterable[Message] = ()) -> None:
        if isinstance(messages, Transcript):
            self._buffer: _Buffer = messages._buffer  # noqa: SLF001 - of the same class
            self._length: int = messages._length  # noqa: SLF001
            return
        items = list(messages)
        _require_pairing(items, {}, 0)
        self._buffer = _Buffer(items)
        self._length = len(items)

    @classmethod
    def _make_version(cls, buffer: _Buffer, length: int) -> Transcript:
        """Return a transcript of the first *length* messages of *buffer*, which it shares."""
        version = cls.__new__(cls)
        version._buffer = buffer  # noqa: SLF001 - a constructor
        version._length = length  # noqa: SLF001
        return version

    def _copy_items(self) -> list[Message]:
        return self._buffer.items[: self._length]

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> Message: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Message, ...]: ...
    def __getitem__(self, index: int | slice) -> Message | tuple[Message, ...]:
        if isinstance(index, slice):
            start, stop, step = index.indices(self._length)
            if step == 1:
                return tuple(self._buffer.items[start:stop])
            return tuple([self._buffer.items[i] for i in range(start, stop, step)])
        position = index + self._length if index < 0 else index
        if 0 <= position < self._length:
            return self._buffer.items[position]
        msg = f"there is no message {index} in a transcript of {self._length}"
        raise IndexError(msg)

    def __iter__(self) -> Iterator[Message]:
        return iter(self._copy_items())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Transcript):
            return NotImplemented
        if self._length != other._length:
            return False
        return self._buffer is other._buffer or self._copy_items() == other._copy_items()

    def __hash__(self) -> int:
        # Equal transcripts have equal hashes by this, and to hash all messages would read the whole conversation.
        return hash((self._length, self._buffer.items[self._length - 1] if self._length else None))

    def __repr__(self) -> str:
        return f"<Transcript of {self._length} messages>"

    def __copy__(self) -> Transcript:
        return self

    def __deepcopy__(self, _: object) -> Transcript:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        return Transcript, (self._copy_items(),)

    @classmethod
    def from_dicts(cls, messages: Iterable[object]) -> Transcript:
        """Return a transcript of messages in the widespread ``{"role", "content"}`` form."""
        return cls(read_messages(messages))

    def to_dicts(self) -> list[dict[str, Any]]:
        """
        Return the messages in the widespread ``{"role", "content"}`` form, to pass them to other programs.

        The form lacks provider data, tags, lifetimes, trust, the text of arguments that could not be parsed, and each status of a result
        other than error. Store a history with ``AgentState.to_json``, which loses nothing.
        """
        return to_dicts(self)

    def append(self, message: Message) -> Transcript:
        """
        Return this transcript with one more message, which has no tool calls (``extend`` adds a whole step).

        Raises:
            TypeError: when a handler throws the result away: nothing has changed then.
        """
        _require_used_result("append")
        return self.with_messages((message,))

    def extend(self, messages: Sequence[Message]) -> Transcript:
        """
        Return this transcript with *messages* added; an assistant message's results must follow it directly.

        Raises:
            TypeError: when a handler throws the result away: nothing has changed then.
        """
        _require_used_result("extend")
        return self.with_messages(messages)

    def with_messages(self, messages: Sequence[Message]) -> Transcript:
        """Return this transcript with *messages* added; unlike ``extend``, it does not raise if a handler discards the result."""
        added = messages if isinstance(messages, tuple) else tuple(messages)
        if not added:
            return self
        buffer, length = self._buffer, self._length
        # Nearly every step adds one call with its result. Four comparisons show that it pairs, instead of the general check.
        answered = _find_single_call_id(added, buffer.calls, length)
        if not answered:
            _require_pairing(added, buffer.calls, length)
        if not self._claim_next_slot():
            buffer = self._fork_buffer(self._copy_items(), length)
        if answered:
            buffer.calls[answered] = length + 1
        else:
            for index, message in enumerate(added, length):
                if isinstance(message, ToolMessage):
                    buffer.calls[message.tool_call_id] = index
        buffer.items.extend(added)
        longer = length + len(added)
        buffer.free.append(longer)
        # As ``_make_version``, without a call.
        made = Transcript.__new__(Transcript)
        made._buffer = buffer  # noqa: SLF001 - a constructor
        made._length = longer  # noqa: SLF001
        return made

    def _claim_next_slot(self) -> bool:
        """Claim the buffer's next slot for this version; return False if another version has it or this one is empty."""
        # An empty one may be a module constant; claiming its slot would keep the following conversation in memory forever.
        if not self._length:
            return False
        free = self._buffer.free
        try:
            slot = free.pop()
        except IndexError:
            return False
        if slot == self._length:
            return True
        free.append(slot)
        return False

    def _fork_buffer(self, items: list[Message], kept_count: int) -> _Buffer:
        """Return a claimed buffer with *items*, of which the first *kept_count* are this version's messages."""
        # Computed values of the unchanged messages (digests, sizes) are copied: a fork of a long conversation would otherwise
        # compute all of them again.
        old = self._buffer
        buffer = _Buffer(items, old.list_ancestors(kept_count)[:KEPT_GENERATIONS], old.copy_calls_below(len(items)))
        buffer.free.clear()
        buffer.memos.update({key: values[:kept_count] for key, values in old.memos.items()})
        buffer.folds.update({key: values[:kept_count] for key, values in old.folds.items()})
        return buffer

    def replace_result(self, call_id: str, result: ToolResult) -> Transcript:
        """
        Return this transcript with the result of one call replaced; no other replacement is possible.

        Raises:
            TranscriptError: when no call has that id.
        """
        return self.replace_results({call_id: result})

    def replace_results(self, results: Mapping[str, ToolResult]) -> Transcript:
        """Return this transcript with the results of several calls replaced, as ``replace_result`` does for one."""
        if not results:
            return self
        items, first = self._copy_items(), self._length
        for call_id, result in results.items():
            index = self._buffer.calls.get(call_id, self._length)
            if index >= self._length:
                msg = f"there is no call {call_id!r} in this transcript"
                raise TranscriptError(msg)
            old = items[index]
            name: str = old.tool_name  # type: ignore[union-attr]
            items[index] = ToolMessage(call_id, name, result.content, result.status, trust=result.trust)
            first = min(first, index)
        buffer = self._fork_buffer(items, first)
        buffer.free.append(len(items))
        return Transcript._make_version(buffer, len(items))

    @property
    def parts(self) -> tuple[Any, int]:
        """The arguments of ``from_parts`` for this transcript: the buffer that versions share, and its length."""
        return self._buffer, self._length

    @classmethod
    def from_parts(cls, shared: Any, length: int) -> Transcript:
        """Return the transcript with these ``parts``."""
        return cls._make_version(shared, length)

    def list_messages_after(self, length: int) -> Sequence[Message]:
        """Return the messages without the first *length*."""
        return self._buffer.items[length : self._length]

    def has_call(self, call_id: str) -> bool:
        """Return whether the transcript has a call with this id, in O(1)."""
        return self._buffer.calls.get(call_id, self._length) < self._length

    def shared_prefix_length(self, other: Transcript) -> int:
        """
        Return the number of leading messages known to be shared with *other*, in O(1).

        Versions that grew from one another know it exactly; for unrelated transcripts the answer is 0, even if they are equal.
        """
        if other._buffer is self._buffer:
            return min(self._length, other._length)
        # By their ancestry, without a comparison of messages. For unrelated buffers, 0 may be too low, which only costs the
        # caller work.
        theirs = dict(other._buffer.list_ancestors(other._length))
        return max([min(n, theirs.get(token, 0)) for token, n in self._buffer.list_ancestors(self._length)])

    def find_missing_messages(self, shorter: Transcript) -> tuple[Message, ...]:
        """Return the messages that are missing in *shorter*, in order; duplicates count separately."""
        shared = self.shared_prefix_length(shorter)
        there = Counter(shorter.list_messages_after(shared))
        left: list[Message] = []
        for message in self.list_messages_after(shared):
            if there[message]:
                there[message] -= 1
            else:
                left.append(message)
        return tuple(left)

    def memo(self, key: object, fn: Callable[[Message], T]) -> Sequence[T]:
        """
        Return ``fn(message)`` for every message, cached per message and *key*.

        The values sit on the messages and travel with them into other transcripts. *fn* must be pure.
        """
        # Stored on the messages themselves, so that a message keeps its digest in another transcript.
        buffer, length = self._buffer, self._length
        values = buffer.memos.setdefault(key, [])
        known = len(values)
        if known < length:
            values[known:length] = [_memoize(m, key, fn) for m in buffer.items[known:length]]
        return _Prefix(values, length)

    def fold(self, key: object, fn: Callable[[T, Message], T], start: T) -> T:
        """
        Return ``fn(... fn(fn(start, m0), m1) ..., mn)``, reusing the result cached under *key* for an earlier version.

        *fn* must be pure, and *start* the same for every use of *key*.
        """
        return self.fold_batch(
            key, lambda value, messages: [value := fn(value, message) for message in messages], start
        )

    def fold_batch(self, key: object, fn: Callable[[T, Sequence[Message]], list[T]], start: T) -> T:
        """Return the same as ``fold``, where *fn* receives the last value and all new messages, and returns the value after each."""
        buffer, length = self._buffer, self._length
        values = buffer.folds.setdefault(key, [])
        known = len(values)
        if known >= length:
            return values[length - 1] if length else start
        fresh = fn(values[known - 1] if known else start, buffer.items[known:length])
        values[known:length] = fresh
        return fresh[-1]


def _memoize(message: Message, key: object, fn: Callable[[Message], T]) -> T:
    """Return ``fn(message)``, stored in the message under *key* at the first call."""
    memo = message._memo  # noqa: SLF001 - the slot that messages have for this
    if memo is None:
        memo = {}
        object.__setattr__(message, "_memo", memo)
    if key not in memo:
        memo[key] = fn(message)
    value: T = memo[key]
    return value


def _find_single_call_id(added: Sequence[Message], call_positions: Mapping[str, int], length: int) -> str:
    """Return the call id if *added* is one new call and its result, the most frequent case; else ``""``."""
    if len(added) != 2:  # noqa: PLR2004 - a message and a result
        return ""
    message, result = added
    if not isinstance(message, AssistantMessage) or not isinstance(result, ToolMessage) or len(message.content) != 1:
        return ""
    (call,) = message.content
    call_id = result.tool_call_id
    if not isinstance(call, ToolCallPart) or call.tool_call_id != call_id:
        return ""
    return call_id if call_positions.get(call_id, length) >= length else ""


def _require_pairing(added: Sequence[Message], call_positions: Mapping[str, int], length: int) -> None:
    """Raise unless *added* continues a paired history of *length* messages, with calls at *call_positions*."""
    # Pairing is checked where a transcript is made, so no layer above has to check again: a history that does not pair
    # cannot exist (reliability:I1).
    waiting: list[ToolCallPart] = []  # the calls that have no result yet, the next one last
    fresh: set[str] = set()
    for message in added:
        kind = type(message)  # a subclass could not be stored
        if kind is ToolMessage:
            _pop_answered_call(message, waiting)
        elif waiting:
            _raise_unanswered(waiting)
        elif kind is AssistantMessage:
            waiting = [p for p in message.content if isinstance(p, ToolCallPart)]
            for call in waiting:
                _register_call_id(call, call_positions, length, fresh)
            waiting.reverse()
        elif kind is not UserMessage:
            hint = (
                "; AgentState.from_dicts([...]) reads messages that are dicts" if isinstance(message, Mapping) else ""
            )
            msg = f"a transcript can contain user, assistant and tool messages, not a {kind.__name__}{hint}"
            raise TranscriptError(msg)
    if waiting:
        _raise_unanswered(waiting)


def _raise_unanswered(waiting: list[ToolCallPart]) -> NoReturn:
    msg = f"the calls {[c.tool_call_id for c in reversed(waiting)]} have no result right after their message"
    raise TranscriptError(msg)


def _pop_answered_call(message: Any, waiting: list[ToolCallPart]) -> None:
    """Remove the next call from *waiting*; raise unless *message* is its result."""
    if not waiting:
        msg = f"the result of {message.tool_call_id!r} ({message.tool_name}) has no call before it"
        raise TranscriptError(msg)
    call_id = waiting.pop().tool_call_id
    if call_id != message.tool_call_id:
        msg = f"expected the result of {call_id!r}, not the result of {message.tool_call_id!r}"
        raise TranscriptError(msg)


def _register_call_id(call: ToolCallPart, call_positions: Mapping[str, int], length: int, added_ids: set[str]) -> None:
    """Add the id of a call to *added_ids*; raise if it is empty or was used before."""
    call_id = call.tool_call_id
    if not call_id:
        msg = f"the call of {call.tool_name!r} has no id"
        raise TranscriptError(msg)
    if call_id in added_ids or call_positions.get(call_id, length) < length:
        msg = f"the call id {call_id!r} is used twice"
        raise TranscriptError(msg)
    added_ids.add(call_id)
