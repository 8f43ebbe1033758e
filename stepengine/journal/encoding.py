"""
Records to lines: differences between requests, blobs, secrets taken out, checksums (replay J19, J20, K2, J4, J5).

A request is stored as slices of earlier requests and the messages that are new, so that a growing history costs what it
grows by, and a sliding window what slides in (prototype N9).
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from operator import is_
from typing import Any, TypeAlias, cast

from stepengine.data.codec import written, written_any
from stepengine.data.effects import CallModel
from stepengine.data.fields import PLAIN
from stepengine.data.json import quoted
from stepengine.data.models import ModelRequest
from stepengine.data.outcomes import Value
from stepengine.data.state import ChildResult
from stepengine.data.transcript import Transcript
from stepengine.errors import JournalWriteFailed
from stepengine.journal.fingerprints import DEFAULT_SETTINGS, Fingerprints, fingerprint, offered_tool
from stepengine.journal.forms import bare, outcome_members, restored
from stepengine.journal.records import (
    ROOT,
    Address,
    Blob,
    Head,
    Input,
    Intent,
    Record,
    Result,
    for_line,
    shown_address,
    to_line,
    to_text,
)
from stepengine.redaction import Redactor

__all__ = ("Encoder", "packed", "request_members", "unpacked")

MAX_INLINE = 32 * 1024
MAX_LINE = 16 * 1024 * 1024
KEPT_BASES = 4
Shared: TypeAlias = "tuple[str, str, Any]"
"""A member of a request that nearly every one holds, its fingerprint, and its value."""
VOLATILE = frozenset({"created", "id", "service_tier", "system_fingerprint"})


class Encoder:
    """
    Makes the lines of one journal, in order.

    Args:
        redactor: What takes secrets out.
        link: Whether each checksum starts from the one before.
        previous: The checksum of the last line that is there already.
        blobs: Fingerprints of blobs that are there already.
        stable: Whether what differs between two recordings of the same thing is left out (replay J23).
    """

    def __init__(
        self, redactor: Redactor, *, link: bool, previous: int = 0, blobs: Sequence[str] = (), stable: bool = False
    ) -> None:
        self.prints = Fingerprints(redactor)
        self._redactor = redactor
        self._link = link
        self._previous = previous
        self._blobs = set(blobs)
        self._stable = stable
        self._bases = _Bases(self.prints)
        self._last_frame: tuple[tuple[Any, ...], tuple[str, str]] | None = None

    def remember(self, path: str, seq: int, transcript: Transcript) -> None:
        """Let later requests be stored as differences to one that is in the journal already."""
        self._bases.remember(path, seq, transcript)

    def lines(self, record: Record) -> list[bytes]:
        """
        Return the lines of a record: those of its blobs, then its own.

        Raises:
            JournalWriteFailed: when the line would be longer than 16 MiB.
            SecretFound: when shapes are looked for and one is left.
        """
        made: list[bytes] = []
        for members in self._all_members(record):
            line, crc = to_line(members, self._previous)
            if len(line) > MAX_LINE:
                where = shown_address(getattr(record, "path", ""), getattr(record, "seq", -1))
                msg = f"the {record.kind} of {where} has {len(line)} bytes; a record has at most {MAX_LINE}"
                raise JournalWriteFailed(msg)
            self._previous = crc if self._link else 0
            made.append(line)
        return made

    def _all_members(self, record: Record) -> Iterator[Mapping[str, Any] | str]:
        """Give the members of each line, or its text where that was made already."""
        if isinstance(record, Blob):
            self._blobs.add(record.fp)
        line = record.line
        if line is not None:
            yield {name: value for name, value in line.items() if name != "crc"}
            return
        shared = self._shared(record.live.request) if type(record) is Intent and record.live is not None else []
        text = self._text(record, shared)
        if len(text) <= MAX_INLINE and text.count('"$') == len(shared) and not self._redactor.suspicious(text):
            yield from self._share(shared)
            yield text
        else:
            yield from self._packed(record, json.loads(text), shared)

    def _packed(self, record: Record, members: dict[str, Any], shared: Sequence[Shared]) -> Iterator[Mapping[str, Any]]:
        """Give what stands in lines without secrets and long texts."""
        for name, _, _ in shared:
            members["effect"]["request"][name] = None
        text = to_text(members)
        if self._redactor.suspicious(text):
            members = self._cleaned(members, record.kind)
            text = to_text(members)
        if len(text) > MAX_INLINE or '"$' in text:
            blobs: dict[str, Any] = {}
            members = packed(members, blobs)
            for fp, data in blobs.items():
                yield from self._new_blob(fp, data)
        for name, fp, _ in shared:
            members["effect"]["request"][name] = {"$blob": fp}
        yield from self._share(shared)
        yield members

    def _cleaned(self, members: dict[str, Any], kind: str) -> dict[str, Any]:
        clean: dict[str, Any] = self._redactor.value(members)
        if self._redactor.shapes:
            self._redactor.refuse(clean, f"the {kind} record")
        return clean

    def _shared(self, request: ModelRequest) -> list[Shared]:
        """Return what nearly every request holds: the member, its fingerprint, its value."""
        shared: list[Shared] = []
        if request.system_prompt:
            shared.append(("system_prompt", self.prints.prompt(request.system_prompt), request.system_prompt))
        if request.tools:
            shared.append(("tools", self.prints.tools(request.tools), request.tools))
        return shared

    def _share(self, shared: Sequence[Shared]) -> Iterator[Mapping[str, Any]]:
        """Give the blobs of what the members name by fingerprints."""
        for name, fp, value in shared:
            if fp not in self._blobs:
                data = value if name == "system_prompt" else [offered_tool(t) for t in value]
                clean = self._redactor.value(data) if self._redactor.suspicious(to_text(data)) else data
                yield from self._new_blob(fp, clean)

    def _new_blob(self, fp: str, data: Any) -> Iterator[Mapping[str, Any]]:
        if fp not in self._blobs:
            self._blobs.add(fp)
            yield {"kind": "blob", "fp": fp, "data": data}

    def _text(self, record: Record, shared: Sequence[Shared]) -> str:
        """Return the text of a record, in which fingerprints stand for what is *shared*."""
        match record:
            case Intent():
                return self._intent(record, shared)
            case Result():
                return self._quick_result(record) or to_text(self._result(record))
            case Head():
                return to_text(head_members(record))
            case Input():
                address = {"kind": "input", "path": record.path, "seq": record.seq}
                return to_text({**address, "at": record.at, "input": record.input})
            case Blob():
                return to_text({"kind": "blob", "fp": record.fp, "data": record.data})

    def _intent(self, record: Intent, shared: Sequence[Shared]) -> str:
        effect = record.effect
        record.fp = record.fp or self.prints.of(effect)
        if type(effect) is CallModel:
            request = self._request(record, effect, {name: fp for name, fp, _ in shared})
            form = f'{{"type":"CallModel","purpose":{quoted(effect.purpose)},"request":{request}}}'
        else:
            stored = cast("Mapping[str, Any]", effect)
            form = PLAIN.json(stored)
            if (record.path, record.seq) == ROOT and stored.get("previous"):
                # Known by its messages, not by its buffer: the run goes on from a copy of this state.
                self._bases.remember(*ROOT, restored(stored["previous"]).view)
        together = "" if record.gather is None else f',"gather":{record.gather}'
        return for_line(f'{_address(record)},"fp":"{record.fp}","effect":{form}{together}}}')

    def _request(self, record: Intent, effect: CallModel, shared: Mapping[str, str]) -> str:
        request = effect.request
        items = self._bases.difference((record.path, record.seq), request.messages)
        self._bases.remember(record.path, record.seq, request.messages)
        messages = ",".join([PLAIN.json(i) if type(i) is dict else written(i, PLAIN) for i in items])
        before, after = self._frame(request, shared)
        return f"{before}[{messages}]{after}"

    def _frame(self, request: ModelRequest, shared: Mapping[str, str]) -> tuple[str, str]:
        """Return the text of a request before its messages, and after them; in a run it is nearly always the same."""
        parts = (
            request.model,
            request.system_prompt,
            request.tools,
            request.tool_choice,
            request.settings,
            request.tail,
        )
        known = self._last_frame
        if known is not None and all(map(is_, known[0], parts)):
            return known[1]
        members = request_members(request, (), whole=False) | {name: {"$blob": fp} for name, fp in shared.items()}
        before, _, after = PLAIN.json(members).partition('"messages":[]')
        self._last_frame = (parts, (f'{before}"messages":', after))
        return self._last_frame[1]

    def _quick_result(self, record: Result) -> str:
        """Return the text of a result without attempts, writes and messages, of which there are most; ``""`` for any other one."""
        outcome = record.outcome
        if type(outcome) is not Value or record.attempts or record.writes or outcome.inputs or self._stable:
            return ""
        if type(outcome.value) is ChildResult:
            return ""
        return for_line(f'{_address(record)},"at":{record.at},"value":{written_any(outcome.value, PLAIN)}}}')

    def _result(self, record: Result) -> dict[str, Any]:
        members: dict[str, Any] = {"kind": "result", "path": record.path, "seq": record.seq, "at": record.at}
        if record.attempts:
            members["attempts"] = list(record.attempts)
        if record.writes:
            members["writes"] = list(record.writes)
        assert record.outcome is not None  # noqa: S101 - a result of this process has its outcome
        members.update(outcome_members(record.outcome))
        value = members.get("value")
        if self._stable and isinstance(value, dict) and value.get("type") == "ModelReply":
            value.pop("request_id", None)
            said = {k: v for k, v in value.pop("provider_data", {}).items() if k not in VOLATILE}
            members["value"] = {**value, **({"provider_data": said} if said else {})}
        return members


def _address(record: Intent | Result) -> str:
    return f'{{"kind":"{record.kind}","path":"{record.path}","seq":{record.seq}'


def head_members(head: Head) -> dict[str, Any]:
    """Return the members of a head."""
    members: dict[str, Any] = {"kind": "head", "format": head.format, "engine": head.engine, "agent": head.agent}
    members |= {"definition": head.definition, "run": head.run, "seed": head.seed, "created": head.created}
    members |= {"parent": head.parent} if head.parent else {}
    members |= {"hooks": list(head.hooks)} if head.hooks else {}
    return members | ({"link": True} if head.link else {})


def request_members(request: ModelRequest, messages: Sequence[Any], *, whole: bool) -> dict[str, Any]:
    """Return the stored form of a request whose history is *messages*; *whole* says whether prompt and tools are in it."""
    members: dict[str, Any] = {"model": request.model}
    if request.system_prompt:
        members["system_prompt"] = request.system_prompt if whole else None
    members["messages"] = list(messages)
    if request.tools:
        members["tools"] = [offered_tool(t) for t in request.tools] if whole else None
    if request.tool_choice is not None:
        members["tool_choice"] = request.tool_choice
    if request.settings != DEFAULT_SETTINGS:
        members["settings"] = bare(request.settings)
    if request.tail:
        members["tail"] = [bare(m) for m in request.tail]
    return members


# --- blobs ----------------------------------------------------------------------------------------------------------


def packed(value: Any, blobs: dict[str, Any]) -> Any:
    """
    Return *value* with long texts replaced by ``{"$blob": fp}`` and put into *blobs*.

    An object of the user's with a single member that starts with ``$`` is wrapped in ``{"$obj": ...}`` (replay J8).
    """
    if isinstance(value, str):
        return _blob(value, blobs) if len(value) > MAX_INLINE else value
    if isinstance(value, list | tuple):
        return [packed(v, blobs) for v in value]
    if not isinstance(value, Mapping):
        return value
    members = {k: packed(v, blobs) for k, v in value.items()}
    return {"$obj": members} if _is_special(members) else members


def _blob(value: Any, blobs: dict[str, Any]) -> dict[str, str]:
    fp = fingerprint(value)
    blobs[fp] = value
    return {"$blob": fp}


def _is_special(members: Mapping[str, Any]) -> bool:
    return len(members) == 1 and next(iter(members)).startswith("$")


def unpacked(value: Any, blobs: Mapping[str, Any]) -> Any:
    """
    Return what ``packed`` made *value* of, which was read from a line.

    Raises:
        KeyError: when a blob is missing.
    """
    if type(value) is list:
        return [unpacked(v, blobs) for v in value]
    if type(value) is not dict:
        return value
    if _is_special(value):
        name, inner = next(iter(value.items()))
        if name == "$blob":
            return blobs[inner]
        return {k: unpacked(v, blobs) for k, v in inner.items()} if name == "$obj" else value
    return {k: unpacked(v, blobs) for k, v in value.items()}


# --- differences ----------------------------------------------------------------------------------------------------


class _Bases:
    """The last requests of each path, which later ones are stored as differences to."""

    def __init__(self, prints: Fingerprints) -> None:
        self._prints = prints
        self._known: dict[str, deque[tuple[Address, Transcript]]] = {}

    def remember(self, path: str, seq: int, transcript: Transcript) -> None:
        """Keep a request; handlers that ask beside the conversation must not push the conversation out at once."""
        self._known.setdefault(path, deque(maxlen=KEPT_BASES)).append(((path, seq), transcript))

    def difference(self, address: Address, transcript: Transcript) -> list[Any]:
        """Return *transcript* as slices of earlier requests, which are objects, and messages."""
        base = self._best(address[0], transcript)
        if base is None:
            return list(transcript)
        (path, seq), known, shared = base
        where: dict[str, Any] = {"type": "Slice"} | ({"path": path} if path != address[0] else {}) | {"seq": seq}
        made: list[Any] = [{**where, "start": 0, "stop": shared}] if shared else []
        if shared in (len(known), len(transcript)):
            return made + list(transcript[shared:])
        return made + list(self._matched(where, known, transcript, shared))

    def _best(self, path: str, transcript: Transcript) -> tuple[Address, Transcript, int] | None:
        """Return the request that most of *transcript* is known to come from; a child may have begun with its parent's."""
        candidates: list[tuple[Address, Transcript]] = []
        while True:
            candidates += reversed(self._known.get(path, ()))
            if candidates or not path:
                break
            path = path.rpartition(".")[0]
        if not candidates or not transcript:
            return None
        address, known = candidates[0]
        shared = known.shared_prefix(transcript)
        if shared == len(known) >= max([len(other) for _, other in candidates]):
            return address, known, shared  # none of the others can share more
        found = [(address, known, known.shared_prefix(transcript)) for address, known in candidates]
        return max(found, key=lambda base: (base[2], len(base[1])))

    def _matched(
        self, where: Mapping[str, Any], known: Transcript, transcript: Transcript, start: int
    ) -> Iterator[Any]:
        """Give the part of *transcript* from *start* on, with runs that stand in *known* as slices."""
        places: dict[bytes, int] = {}
        theirs, ours = self._prints.digests(known), self._prints.digests(transcript)
        for index in range(len(known)):
            places.setdefault(theirs[index], index)
        index = start
        while index < len(transcript):
            place = places.get(ours[index], -1)
            count = 0
            while place >= 0 and _equal_at(known, place + count, transcript, index + count):
                count += 1
            if count:
                yield {**where, "start": place, "stop": place + count}
            else:
                yield transcript[index]
            index += count or 1


def _equal_at(a: Transcript, i: int, b: Transcript, j: int) -> bool:
    return i < len(a) and j < len(b) and (a[i] is b[j] or a[i] == b[j])
