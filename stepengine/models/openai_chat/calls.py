"""
Assemble tool calls from the pieces of a stream, for all known kinds of servers.

This module decides which call a piece belongs to. ``stepengine.models._call_arguments`` joins the arguments of one call.

| dialect | servers known to send it | rule |
|---|---|---|
| id and name first, then arguments by index | OpenAI, vLLM, SGLang, DeepSeek, Groq | the index decides; pieces may alternate |
| index 0 for every call | Ollama until 0.20, Gemini through gateways | a new id with a name, or a name after complete arguments, starts a call |
| no index, or null | Gemini's OpenAI endpoint, Ollama before 0.4.7 | the id decides, else the open call |
| id with every piece | LiteLLM | a known id continues its call |
| another id with every piece | OCI through LiteLLM, mlx-openai-server | a piece without a name, or one that cannot start a call, continues |
| no id, or ``""`` | LM Studio, Mistral's pieces, old llama.cpp | index and name decide |
| name with every piece | vLLM's GLM parsers | counts once |
| name in pieces, or the whole name so far | gateways | joined if the result is an offered tool |
| ``""``, ``null`` or the text "null" as a name | LM Studio, vLLM; old vLLM | no name |
| a call that changes its index | proxies that renumber | a piece without a name goes to the only open call |
| all calls once more at the end | LiteLLM, vLLM's xlam parser | the same id, or no id and complete arguments after pieces |
| several calls in one chunk | Ollama, Gemini | each entry with a name is a call |

Only a piece with a name can start a call. Two ids are two calls, unless the stream has shown that its ids change. Ambiguous
pieces are an error, because a call that runs twice, or two calls merged into one, would be worse than a retry.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn

import attrs
from attrs import frozen

from stepengine.data.json import compact
from stepengine.data.models import ModelDelta, ToolCallChunk, ToolCallEnded, ToolCallStarted
from stepengine.models._call_arguments import ArgumentPieces, can_start_json
from stepengine.models._json import find_unknown_members, get_optional_object, get_optional_text

MEMBERS = frozenset({"id", "type", "index", "function"})
FUNCTION_MEMBERS = frozenset({"name", "arguments"})
"""The known members of a call; unknown ones are stored unchanged."""
NO_NAME = "null"
"""The name in later pieces of calls from old versions of vLLM."""


def find_legacy_call(message: Mapping[str, object]) -> Mapping[str, Any] | None:
    """Return the ``function_call`` of *message*, the predecessor of ``tool_calls``; ``None`` if it is missing or empty."""
    call = message.get("function_call")
    return call if isinstance(call, Mapping) and (call.get("name") or call.get("arguments")) else None


@frozen
class _CallPiece:
    """An entry of ``tool_calls``, and whether it is the first of its chunk."""

    index: int | None
    id: str
    name: str
    text: str
    is_first: bool

    @property
    def is_blank(self) -> bool:
        """Return whether the piece of arguments is empty or only white space."""
        return not self.text.strip()


@attrs.define(eq=False)
class _CallSlot:
    """
    A call that is still being received.

    Attributes:
        number: Its index in the reply.
        chunk: The number of the chunk that started it.
        twin: An earlier call that this one may continue, until that is decided.
        displaced: The call that had the same index before.
    """

    number: int
    chunk: int
    twin: _CallSlot | None = None
    displaced: _CallSlot | None = None
    ids: list[str] = attrs.field(factory=list)
    name: str = ""
    arguments: ArgumentPieces = attrs.field(factory=ArgumentPieces)
    announced: bool = False
    ended: bool = False
    more: dict[str, Any] = attrs.field(factory=dict)
    more_of_function: dict[str, Any] = attrs.field(factory=dict)


class CallPieces:
    """
    Collects the tool call deltas of one reply.

    Args:
        raise_ambiguous: Raises the error for an ambiguous stream; its argument is the reason.
        offered: The names of the offered tools, which decide how the pieces of a name are joined.
    """

    def __init__(self, raise_ambiguous: Callable[[str], NoReturn], offered: Collection[str]) -> None:
        self._raise_ambiguous = raise_ambiguous
        self._offered = offered
        self._slots: list[_CallSlot] = []
        self._by_index: dict[int, _CallSlot] = {}
        self._chunk = 0
        # Whether pieces of one call had different ids so far, and whether an id was repeated.
        self._ids_change = False
        self._ids_stay = False

    @property
    def has_complete_or_empty_arguments(self) -> bool:
        """Whether the arguments of every call are complete or empty."""
        return all(not slot.arguments.count or slot.arguments.is_complete for slot in self._slots)

    @property
    def has_complete_arguments(self) -> bool:
        """Whether every call has arguments, and they are complete."""
        return all(slot.arguments.is_complete for slot in self._slots)

    def add_chunk_entries(self, entries: Sequence[Mapping[str, object]]) -> list[ModelDelta]:
        """Add the ``tool_calls`` entries of one chunk to their calls, and return the deltas; raise if the entries are ambiguous."""
        deltas: list[ModelDelta] = []
        self._chunk += bool(entries)
        for position, entry in enumerate(entries):
            function, index = get_optional_object(entry, "function"), entry.get("index")
            name, arguments = get_optional_text(function, "name"), function.get("arguments")
            text = arguments if isinstance(arguments, str) else "" if arguments is None else compact(arguments)
            piece = _CallPiece(
                index if type(index) is int else None,
                get_optional_text(entry, "id"),
                "" if name == NO_NAME and NO_NAME not in self._offered else name,
                text,
                position == 0,
            )
            slot = self._find_or_start_call(piece)
            slot.more.update(find_unknown_members(entry, MEMBERS))
            slot.more_of_function.update(find_unknown_members(function, FUNCTION_MEMBERS))
            deltas += self._extend_call(slot, piece)
        return deltas

    def end_calls(self) -> list[ModelDelta]:
        """End all calls, and return their missing deltas: starts, arguments and ends; raise if calls stay ambiguous."""
        self._resolve_ambiguous_calls()
        deltas: list[ModelDelta] = []
        for slot in self._slots:
            if slot.ended:
                continue
            slot.ended = True
            deltas += self._announce_calls_up_to(slot)
            if rest := slot.arguments.flush_rest():
                deltas.append(ToolCallChunk(slot.number, rest))
            deltas.append(ToolCallEnded(slot.number))
        return deltas

    def resolve_and_join_calls(self) -> list[dict[str, Any]]:
        """Merge or separate ambiguous calls, raise if that is impossible, and return all calls in the form of a reply without a stream."""
        self._resolve_ambiguous_calls()
        return [
            {
                **slot.more,
                "id": slot.ids[0] if slot.ids else "",
                "function": {**slot.more_of_function, "name": slot.name, "arguments": slot.arguments.text},
            }
            for slot in self._slots
        ]

    # --- which call a piece belongs to --------------------------------------------------------------------------------

    def _find_or_start_call(self, piece: _CallPiece) -> _CallSlot:
        """Return the call that *piece* belongs to, or start a new one; raise if the piece is ambiguous."""
        known = self._find_call(piece)
        is_more = known is not None and self._continues_call(known, piece)
        found = known if known is not None and is_more else self._start_call(piece, known)
        is_elsewhere = piece.index is not None and self._by_index.get(piece.index) is not found
        if piece.index is not None and is_elsewhere and not (is_more and piece.is_blank):
            self._move_call(found, piece.index)
        return found

    def _find_call(self, piece: _CallPiece) -> _CallSlot | None:
        """Return the call that *piece* may continue, by its index or id, else the call before it; ``None`` if it starts a new call."""
        placed = None if piece.index is None else self._by_index.get(piece.index)
        named = [slot for slot in self._slots if piece.id and piece.id in slot.ids]
        if placed is not None and (not named or placed in named):
            return placed if named or placed.displaced is None else self._choose_open_call(piece, placed)
        if named:
            return named[-1]
        if not piece.name:
            return self._find_open_call(piece)
        if not self._slots or piece.index is not None or not piece.is_first:
            return None
        return self._choose_open_call(piece, self._slots[-1])

    def _find_open_call(self, piece: _CallPiece) -> _CallSlot | None:
        """Return the call that a piece without name and known index can continue; ``None`` if no call fits."""
        if not self._slots or (piece.is_blank and piece.id and piece.index is not None):
            return None  # an id before its name
        last, opened = self._slots[-1], [slot for slot in self._slots if not slot.arguments.is_complete]
        if piece.is_blank or opened == [last]:
            return last
        if piece.index is not None and piece.index < len(self._slots) and self._slots[piece.index] in opened:
            return self._slots[piece.index]
        is_more = piece.index is None or last.arguments.is_repeated_by(piece.text)
        found = self._choose_open_call(piece, last)
        return found if is_more or found is not last or not last.arguments.is_complete else None

    def _choose_open_call(self, piece: _CallPiece, last: _CallSlot) -> _CallSlot:
        """Return the open call that a piece without an own id or index continues, *last* if no call fits; raise if several may fit."""
        before = [slot for slot in self._slots if slot is not last and not (piece.id and slot is last.twin)]
        before = [slot for slot in before if not slot.arguments.is_complete and piece.name in ("", slot.name)]
        if not before or piece.is_blank:
            return last
        able = [] if last.arguments.is_complete or piece.name not in ("", last.name) else [last]
        fits = [slot for slot in (*able, *before) if slot.arguments.can_continue_with(piece.text)]
        if len(fits) > 1 or (fits and piece.name and not able):
            names = " and ".join(repr(slot.name) for slot in fits)
            self._raise_ambiguous(
                f"arguments without an id or index of their own while the arguments of {names} are open"
            )
        return fits[0] if fits else last

    def _start_call(self, piece: _CallPiece, indexed_call: _CallSlot | None) -> _CallSlot:
        """Append and return a new call; *indexed_call*, or an earlier call of the same name, may become its ``twin``."""
        new = _CallSlot(len(self._slots), self._chunk)
        if indexed_call is None and piece.name and piece.index is not None:
            # A call without arguments, or one that continues at another index.
            alike = [slot for slot in self._slots if slot.name == piece.name and not slot.arguments.count]
            new.twin = alike[-1] if alike else None
        if indexed_call is not None and indexed_call.name == piece.name and piece.is_first:
            # The same name may also continue a call without arguments so far, or repeat it after its end.
            is_open = not indexed_call.arguments.count or piece.is_blank
            new.twin = indexed_call if is_open and not self._ids_stay else None
        self._slots.append(new)
        return new

    def _move_call(self, slot: _CallSlot, index: int) -> None:
        """Move *slot* to *index*; give its previous index back to the call that had that index before."""
        for old in [old for old, owner in self._by_index.items() if owner is slot]:
            if slot.displaced is not None:
                self._by_index[old] = slot.displaced
        for other in self._slots:
            if other.displaced is slot:
                other.displaced = slot.displaced
        slot.displaced = self._by_index.get(index)
        self._by_index[index] = slot

    def _continues_call(self, slot: _CallSlot, piece: _CallPiece) -> bool:
        """Return whether *piece* continues *slot*, and does not start a new call; raise if both are possible."""
        has_other_id = bool(piece.id and slot.ids and piece.id not in slot.ids)
        if not (piece.name and slot.name):
            return True
        if piece.index is None and not piece.is_first and not (piece.id and piece.id in slot.ids):
            return False
        if piece.name != slot.name:
            return self._continues_name(slot, piece, has_other_id=has_other_id)
        if piece.id in slot.ids and piece.index is not None and piece.index not in self._by_index:
            return self._continues_at_other_index(slot, piece)
        if has_other_id and not self._ids_change:
            return self._continues_with_other_id(slot, piece)
        return piece.id in slot.ids or not slot.arguments.is_complete or self._repeats_or_extends_call(slot, piece)

    def _repeats_or_extends_call(self, slot: _CallSlot, piece: _CallPiece) -> bool:
        """Return whether *piece* repeats the complete call *slot*, or cannot start a call; raise if it may be a second equal call."""
        if piece.is_blank:
            return False  # later arguments decide whether the name is repeated
        if not slot.arguments.is_repeated_by(piece.text):
            return not can_start_json(piece.text)
        is_placed = bool(piece.index) and slot.displaced is None
        if slot.arguments.count == 1 and not is_placed and not (slot.ids and not piece.id):
            what = f"the call of {piece.name!r} twice with the same arguments, without an id that distinguishes them"
            self._raise_ambiguous(what)
        return True

    def _continues_name(self, slot: _CallSlot, piece: _CallPiece, *, has_other_id: bool) -> bool:
        """Return whether a different name in *piece* continues the name of *slot*; raise if that is ambiguous."""
        has_same_id = bool(piece.id) and piece.id in slot.ids
        if slot.arguments.count:
            if has_other_id or (slot.arguments.is_complete and not has_same_id):
                return False
            return self._raise_ambiguous(
                f"the name {piece.name!r} inside the call of {slot.name!r}, without another id or index"
            )
        if has_same_id or not self._offered:
            return not has_other_id
        is_more, is_tool = bool(self._list_possible_names(slot.name, piece.name)), slot.name in self._offered
        if has_other_id:
            return self._ids_change and is_more and not is_tool
        if is_more and is_tool and piece.name in self._offered:
            self._raise_ambiguous(
                f"the names {slot.name!r} and {piece.name!r}, which are two tools and, joined, a third one"
            )
        return is_more or not (is_tool and self._list_possible_names("", piece.name))

    def _continues_at_other_index(self, slot: _CallSlot, piece: _CallPiece) -> bool:
        """Return whether *piece*, with the id and name of *slot* but another index, continues *slot*; raise if that is ambiguous."""
        if slot.arguments.is_complete:
            return False
        if not piece.is_blank and slot.arguments.can_continue_with(piece.text) and not can_start_json(piece.text):
            return True
        return self._raise_ambiguous(f"the id {piece.id!r} of the call of {piece.name!r} at two indices")

    def _continues_with_other_id(self, slot: _CallSlot, piece: _CallPiece) -> bool:
        """Return whether *piece*, with the name of *slot* but another id, continues *slot*; raise if that is ambiguous."""
        if slot.arguments.is_complete:
            if slot.arguments.count > 1 and slot.arguments.is_repeated_by(piece.text):
                self._raise_ambiguous(f"the call of {piece.name!r} with the same arguments and another id")
            return False
        if self._ids_stay or not slot.arguments.count:
            return False
        can_go_on, can_be_new = slot.arguments.can_continue_with(piece.text), can_start_json(piece.text)
        if can_go_on and can_be_new:
            self._raise_ambiguous(f"another id inside the call of {piece.name!r}")
        return can_go_on

    # --- adding a piece to its call -----------------------------------------------------------------------------------

    def _extend_call(self, slot: _CallSlot, piece: _CallPiece) -> list[ModelDelta]:
        """Add *piece* to *slot* and return the new deltas; raise for arguments after complete ones."""
        slot = self._record_id_and_resolve_twin(slot, piece)
        arguments = slot.arguments
        if piece.name and not arguments.count:
            slot.name = self._extend_name(slot.name, piece.name)
        new = ""
        if piece.text:
            is_other = (
                piece.text.lstrip()[:1] == "{" and arguments.is_complete and not arguments.can_continue_with(piece.text)
            )
            if is_other:
                self._raise_ambiguous(f"other arguments after the complete ones of the call of {slot.name!r}")
            new = arguments.append_and_flush_certain(piece.text)
        if arguments.count and slot.twin is not None and slot.twin.arguments.count:
            slot.twin = None  # arguments after complete ones belong to another call
        if slot.ended:
            return []
        if slot.announced:
            return [ToolCallChunk(slot.number, new)] if new else []
        return self._announce_calls_up_to(slot) if slot.name and arguments.count else []

    def _extend_name(self, name: str, more: str) -> str:
        """Return the name of a call after the piece *more*: both joined, or *more* if it repeats the name; raise if both are possible."""
        if not name or name == more:
            return more
        found = self._list_possible_names(name, more)
        if len(found) > 1:
            self._raise_ambiguous(
                f"the names {name!r} and {more!r} for one call, which can be read as {' or '.join(map(repr, found))}"
            )
        return found[0] if found else name + more

    def _list_possible_names(self, name: str, more: str) -> list[str]:
        """Return what the name may be after the piece *more*: both joined, or *more* if it repeats *name*; only starts of offered names."""
        made = dict.fromkeys([name + more, *([more] if more.startswith(name) else [])])
        return [each for each in made if any(offered.startswith(each) for offered in self._offered)]

    def _record_id_and_resolve_twin(self, slot: _CallSlot, piece: _CallPiece) -> _CallSlot:
        """Store the id of *piece*, and record whether ids change; return *slot*, or its twin after merging both."""
        had = bool(slot.ids)
        if piece.id in slot.ids:
            self._ids_stay = True
        elif piece.id:
            self._ids_change = self._ids_change or had
            slot.ids.append(piece.id)
        twin = slot.twin
        if twin is None or not self._ids_change or twin.arguments.count or twin in self._by_index.values():
            return slot
        return self._merge_into_twin(slot, twin)

    def _merge_into_twin(self, slot: _CallSlot, twin: _CallSlot) -> _CallSlot:
        """Merge *slot* into the earlier call *twin*, remove it, and return the twin."""
        twin.arguments = slot.arguments if slot.arguments.count else twin.arguments
        twin.ids += slot.ids
        twin.more.update(slot.more)
        twin.more_of_function.update(slot.more_of_function)
        self._slots.remove(slot)
        for number, other in enumerate(self._slots):
            other.number = number
        for index in [index for index, placed in self._by_index.items() if placed is slot]:
            self._by_index[index] = twin
        return twin

    def _announce_calls_up_to(self, last: _CallSlot) -> list[ModelDelta]:
        """
        Mark the call *last* and the calls before it as announced, and return their missing start deltas.

        The result is empty while one of these calls may still be merged into another, because that changes the numbers.
        """
        before = self._slots[: last.number + 1]
        if any(slot.twin is not None for slot in before):
            return []
        deltas: list[ModelDelta] = []
        for slot in before:
            may_grow = self._offered and slot.name not in self._offered
            if may_grow and not (slot.ended or slot.arguments.count):
                break
            if not slot.announced and (slot.name or slot is last):
                slot.announced = True
                deltas.append(ToolCallStarted(slot.number, slot.name))
                if shown := slot.arguments.certain_text:
                    deltas.append(ToolCallChunk(slot.number, shown))
        return deltas

    def _resolve_ambiguous_calls(self) -> None:
        """At the end of the stream, merge or separate calls that may be the same; raise if a call stays ambiguous."""
        for slot in [slot for slot in self._slots if slot.twin is not None]:
            self._merge_or_separate_twin(slot)
        for slot in self._slots:
            if self._ids_change and not (slot.arguments.count or slot in self._by_index.values()):
                self._raise_ambiguous(
                    f"ids that change, and no arguments of {slot.name!r} before another call replaced it"
                )
            if slot.arguments.is_undecided:
                self._raise_ambiguous(
                    f"arguments of {slot.name!r} where both the joined pieces and the last piece are complete"
                )

    def _merge_or_separate_twin(self, slot: _CallSlot) -> None:
        """At the end of the stream, merge a call into its twin, the earlier call that it may repeat, or keep both; raise if unclear."""
        twin, slot.twin = slot.twin, None
        if twin is None or (slot.arguments.count and twin.arguments.count):
            return
        if slot in self._by_index.values() and twin in self._by_index.values():
            has_own_id = slot.ids and twin.ids and not self._ids_change
            if slot.arguments.count and not has_own_id:
                self._raise_ambiguous(f"the name {slot.name!r} at two indices, and arguments at the second one alone")
        elif self._ids_change or not slot.ids:
            self._merge_into_twin(slot, twin)
        elif not self._ids_stay:
            self._raise_ambiguous(
                f"the name {slot.name!r} with two ids at the same index, and arguments after only one of them"
            )
