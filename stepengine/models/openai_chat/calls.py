"""
Tool calls from the pieces of a stream, as servers of every kind cut them.

Ids, indices and types may be missing, an index may be 0 for every call, a name may come in pieces or with every piece,
arguments may come whole, in pieces, as an object or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from stepengine.data.json import compact
from stepengine.data.models import ModelDelta, ToolCallChunk, ToolCallEnded, ToolCallStarted
from stepengine.models._json import encode_utf8, find_newer_members, object_at, read_json, text_at

MEMBERS = frozenset({"id", "type", "index", "function"})
FUNCTION_MEMBERS = frozenset({"name", "arguments"})
"""What of a call is read; anything else in it is kept as it came."""


def find_legacy_call(message: Mapping[str, object]) -> Mapping[str, Any] | None:
    """Return the ``function_call`` of *message*, the form before ``tool_calls``; ``None`` for none, or one that says nothing."""
    call = message.get("function_call")
    return call if isinstance(call, Mapping) and (call.get("name") or call.get("arguments")) else None


@attrs.define
class _CallSlot:
    """A call that is being received."""

    number: int
    id: str = ""
    name: str = ""
    pieces: list[str] = attrs.field(factory=list)
    announced: bool = False
    more: dict[str, Any] = attrs.field(factory=dict)
    more_of_function: dict[str, Any] = attrs.field(factory=dict)

    @property
    def arguments(self) -> str:
        return "".join(self.pieces)

    @property
    def complete(self) -> bool:
        """Whether the arguments are a whole JSON value."""
        # Asked for with every piece that repeats the name, of which only few can be the last.
        last = next((piece.rstrip() for piece in reversed(self.pieces) if not piece.isspace()), "")
        if not last.endswith(("}", "]", "l", '"')):
            return False
        try:
            read_json(encode_utf8(self.arguments.strip()))
        except ValueError:
            return False
        return True


class CallPieces:
    """Collects the tool call deltas of one reply."""

    def __init__(self) -> None:
        self._slots: list[_CallSlot] = []
        self._by_index: dict[int, _CallSlot] = {}

    @property
    def complete(self) -> bool:
        """Whether the arguments of every call are whole, or there are none."""
        return all(not slot.pieces or slot.complete for slot in self._slots)

    @property
    def whole(self) -> bool:
        """Whether every call has arguments, and they are whole."""
        return all(slot.complete for slot in self._slots)

    def take(self, entries: Sequence[Mapping[str, object]]) -> list[ModelDelta]:
        """Take the entries of one chunk and return what they add."""
        deltas: list[ModelDelta] = []
        for position, entry in enumerate(entries):
            function, call_id = object_at(entry, "function"), text_at(entry, "id")
            name, arguments = text_at(function, "name"), function.get("arguments")
            text = arguments if isinstance(arguments, str) else "" if arguments is None else compact(arguments)
            slot = self._choose_slot(entry.get("index"), call_id, name, text, first=position == 0)
            slot.more.update(find_newer_members(entry, MEMBERS))
            slot.more_of_function.update(find_newer_members(function, FUNCTION_MEMBERS))
            deltas += self._extend_call(slot, call_id, name, text)
        return deltas

    def end(self) -> list[ModelDelta]:
        """Return the ends of all calls, and the beginnings of those that never had arguments."""
        deltas: list[ModelDelta] = []
        for slot in self._slots:
            deltas += [*self._start_calls(slot), ToolCallEnded(slot.number)]
        return deltas

    def joined(self) -> list[dict[str, Any]]:
        """Return the calls as the server would have sent them in one piece."""
        return [
            {
                **slot.more,
                "id": slot.id,
                "function": {**slot.more_of_function, "name": slot.name, "arguments": slot.arguments},
            }
            for slot in self._slots
        ]

    def _choose_slot(self, index: object, call_id: str, name: str, text: str, *, first: bool) -> _CallSlot:
        found = self._find_slot(index, call_id)
        if found is None or self._starts_new_call(found, index, call_id, name, text, first=first):
            found = _CallSlot(len(self._slots))
            self._slots.append(found)
        if type(index) is int:
            self._by_index[index] = found
        return found

    def _find_slot(self, index: object, call_id: str) -> _CallSlot | None:
        if type(index) is int:
            return self._by_index.get(index)
        named = [slot for slot in self._slots if call_id and slot.id == call_id]
        if named:
            return named[-1]
        return self._slots[-1] if self._slots else None

    def _extend_call(self, slot: _CallSlot, call_id: str, name: str, text: str) -> list[ModelDelta]:
        slot.id = slot.id or call_id
        if name and name != slot.name and not slot.pieces:
            slot.name += name
        if text:
            slot.pieces.append(text)
        if slot.name and slot.pieces and not slot.announced:
            return [*self._start_calls(slot), ToolCallChunk(slot.number, slot.arguments)]
        return [ToolCallChunk(slot.number, text)] if text and slot.announced else []

    def _start_calls(self, last: _CallSlot) -> list[ModelDelta]:
        """Return the beginnings of a call and of those before it: whoever watches counts them in the order of the reply."""
        new = [slot for slot in self._slots[: last.number + 1] if not slot.announced and (slot.name or slot is last)]
        for slot in new:
            slot.announced = True
        return [ToolCallStarted(slot.number, slot.name) for slot in new]

    def _starts_new_call(
        self, slot: _CallSlot, index: object, call_id: str, name: str, text: str, *, first: bool
    ) -> bool:
        if call_id and slot.id:
            return call_id != slot.id
        if not (name and slot.name):
            return False
        if index is None and not first:
            return True
        return slot.complete and (bool(text.strip()) or name != slot.name)
