"""``RecordedRequests``: the model requests of a journal, whose messages are stored as differences to earlier requests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from stepengine.data.messages import Message
from stepengine.data.models import ModelRequest
from stepengine.data.tools import ToolSpec
from stepengine.data.transcript import Transcript
from stepengine.errors import DataError
from stepengine.journal.encoding import decode_stored, encode_stored
from stepengine.journal.history import History
from stepengine.journal.reading_limit import SHARED_BYTES, ReadingLimit, estimate_json_size
from stepengine.journal.records import ROOT, Address, Intent, format_address

KEPT_TRANSCRIPTS = 64
"""A walk through a run with dozens of children still finds the last request of each; a transcript shares its messages."""

OPENED_BYTES = 256
"""For how many bytes of messages it counts to look into an earlier request, which takes as long as to make so many."""
OPENED_BYTES_DIVISOR = 8
"""A line is parsed about so many times faster than its messages are made and shown."""


class _MessageRange(NamedTuple):
    """The messages from *start* to *stop* of the request at *address*."""

    address: Address
    start: int = 0
    stop: int | None = None


class RecordedRequests:
    """
    Assembles the recorded requests of a journal for one operation, within a limit on their total size.

    Args:
        history: The records. They may grow.

    Attributes:
        history: The records.
    """

    def __init__(self, history: History) -> None:
        self.history = history
        # A request is stored as a difference to an earlier one, which is mostly the one before. Only a few transcripts are
        # cached, or a journal of n steps would hold n conversations again.
        self._built: dict[Address, Transcript] = {}
        self._extended: set[Address] = set()
        self._order: dict[Address, int] = {}
        self._limit = history.blobs.limit.copy_with_zero_count()

    def get_messages(self, intent: Intent) -> list[Mapping[str, Any]]:
        """
        Return the history of a recorded request as JSON, with its slices expanded.

        Raises:
            JournalCorrupt: when the request cannot be read, or exceeds the limit.
        """
        if intent.live is not None:
            return [encode_stored(m) for m in intent.live.request.messages]
        # Each request by itself: who looks at all of them keeps none.
        with self.history.convert_damage_errors(intent):
            return self._expand_messages(intent, self._limit.copy_with_zero_count())

    def _expand_messages(self, intent: Intent, limit: ReadingLimit) -> list[Mapping[str, Any]]:
        """Return the messages of a request as JSON, with slices expanded; raise if they exceed *limit*."""
        found: list[Mapping[str, object]] = []
        # From the last message to the first, without recursion: one request may lead through all before it.
        waiting: list[Mapping[str, object] | _MessageRange] = [_MessageRange(intent.address)]
        while waiting:
            entry = waiting.pop()
            if isinstance(entry, _MessageRange):
                # Nothing of that stays, but it takes time: the whole line is parsed again.
                line = self.history.intents[entry.address]
                limit.count_bytes_or_raise(
                    OPENED_BYTES + (getattr(line, "end", 0) - getattr(line, "start", 0)) // OPENED_BYTES_DIVISOR
                )
                waiting.extend(self._expand_range(entry))
            else:
                limit.count_bytes_or_raise(estimate_json_size(entry))
                found.append(entry)
        found.reverse()
        return found

    def _expand_range(self, message_range: _MessageRange) -> Iterator[Mapping[str, Any] | _MessageRange]:
        """Yield the messages in a range of a request, and the ranges of earlier requests that it refers to."""
        position = 0
        for item in self._list_stored_items(message_range.address):
            sliced = item["type"] == "slice"
            end = position + (item["stop"] - item["start"] if sliced else 1)
            first, last = (
                max(message_range.start, position),
                end if message_range.stop is None else min(message_range.stop, end),
            )
            if first < last:
                offset = item["start"] - position if sliced else 0
                source = (item.get("path", message_range.address[0]), item["seq"]) if sliced else message_range.address
                if sliced:
                    self._check_refers_to_earlier(source, message_range.address)
                yield _MessageRange(source, first + offset, last + offset) if sliced else item
            position = end
        if message_range.stop is not None and position < message_range.stop:
            msg = f"a later request shares {message_range.stop} messages with it, and it has {position}"
            raise self.history.make_corrupt_error(self.history.intents[message_range.address], DataError(msg))

    def _check_refers_to_earlier(self, source: Address, address: Address) -> None:
        """Raise unless a request refers to an earlier one, so that expanding it ends."""
        # A request that shares messages with itself, or two that share with each other, would be put together for ever;
        # no run writes that, but a third-party file may contain it.
        if len(self._order) != len(self.history.intents):
            self._order = {known: number for number, known in enumerate(self.history.intents)}
        known = self.history.intents.get(source)
        if (
            known is None
            or not (source == ROOT or known.type == "model_call")
            or self._order[source] >= self._order[address]
        ):
            msg = f"it shares messages with {format_address(*source)}, which is not an earlier request"
            raise self.history.make_corrupt_error(self.history.intents[address], DataError(msg))

    def _list_stored_items(self, address: Address) -> list[Mapping[str, Any]]:
        """Return the messages and slices of a request as stored; at ``ROOT`` the messages that the root run started with."""
        intent = self.history.intents[address]
        if address == ROOT:
            return list_initial_messages(self.history.root)
        if intent.live is not None:
            return [encode_stored(m) for m in intent.live.request.messages]
        items: list[Mapping[str, object]] = self.history.form(intent)["request"]["messages"]
        return items

    def get_request(self, intent: Intent) -> ModelRequest:
        """Return the request of a recorded model call."""
        if intent.live is not None:
            return intent.live.request
        members = self.history.form(intent)["request"]
        with self.history.convert_damage_errors(intent):
            return self._build_request(intent, members)

    def _build_request(self, intent: Intent, members: Mapping[str, Any]) -> ModelRequest:
        settings = {"settings": decode_stored(members["settings"])} if "settings" in members else {}
        return ModelRequest(
            members["model"],
            members.get("system_prompt", ""),
            self._build_transcript(intent, members["messages"]),
            tuple([ToolSpec(**spec) for spec in members.get("tools", ())]),
            members.get("tool_choice"),
            tail=tuple([decode_stored(m) for m in members.get("tail", ())]),
            **settings,
        )

    def _build_transcript(self, intent: Intent, items: Sequence[Mapping[str, Any]]) -> Transcript:
        """Return the history of a recorded request; one that only grew shares its messages with the one it grew from."""
        first = items[0] if items else {"type": ""}
        source: Address = (str(first.get("path", intent.path)), int(first.get("seq", -2)))
        base = self._built.get(source) if first["type"] == "slice" else None
        grew = base is not None and (first["start"], first["stop"]) == (0, len(base))
        if base is not None and grew and all(item["type"] != "slice" for item in items[1:]):
            # The first that grows from a request shares its list of messages, each later one has a copy.
            self._limit.count_bytes_or_raise(SHARED_BYTES * len(base) if source in self._extended else 0)
            self._extended.add(source)
            made = base.extend([decode_stored(m) for m in items[1:]])
        else:
            known = self._collect_built_messages(intent, items)
            made = Transcript(
                [decode_stored(m) for m in self._expand_messages(intent, self._limit)] if known is None else known
            )
        while len(self._built) >= KEPT_TRANSCRIPTS:
            del self._built[next(iter(self._built))]
        self._built[intent.address] = made
        return made

    def _collect_built_messages(self, intent: Intent, items: Sequence[Mapping[str, Any]]) -> list[Message] | None:
        """
        Return the messages of a request if those it shares are built, else ``None``.

        Without this, a history that is shortened at every step would be expanded through all earlier requests.
        """
        found: list[Message] = []
        for item in items:
            if item["type"] != "slice":
                found.append(decode_stored(item))
                continue
            source: Address = (str(item.get("path", intent.path)), int(item["seq"]))
            base, start, stop = self._built.get(source), item["start"], item["stop"]
            if base is None or stop > len(base):
                return None
            self._check_refers_to_earlier(source, intent.address)
            self._limit.count_bytes_or_raise(SHARED_BYTES * (stop - start))
            found += base[start:stop]
        return found


def list_initial_messages(root: Mapping[str, Any]) -> list[Mapping[str, object]]:
    """Return the messages in view that a root run started with, as JSON."""
    state = root.get("previous") or {}
    transcript = state.get("view") or state.get("message_history") or {"messages": []}
    messages: list[Mapping[str, object]] = transcript["messages"]
    return messages
