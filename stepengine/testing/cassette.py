"""
``Cassette``: recorded HTTP traffic, looked up by what a request says and never by where it stands.

Headers do not count unless they are asked for. JSON counts as a value: the order of keys and the form of numbers do not
matter, the order of arrays does. A miss tells the nearest recorded requests, the fields that differ, and a guess
at the cause. Files are the business of ``cassette_files``, HTTP objects that of ``transport``.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias
from urllib.parse import parse_qsl, unquote, urlsplit

import attrs
from attrs import frozen

from stepengine.data.alike import list_names
from stepengine.data.json import ABSENT, JsonDifference, differences, first_difference
from stepengine.errors import DataError
from stepengine.redaction import Redactor
from stepengine.testing.cassette_files import (
    CASSETTE_FILE,
    Interaction,
    RecordedRequest,
    RecordedResponse,
    dump_cassette,
    is_json,
    parse_cassette,
)
from stepengine.testing.traffic_redaction import (
    KEPT_REQUEST_HEADERS,
    SHAPES,
    Cleaner,
    SecretFound,
    clean_url,
    secrets_in_headers,
)
from stepengine.workspace.after_fork import Lock
from stepengine.workspace.atomic import replace_path

__tracebackhide__ = True  # a failed test ends at its author's line

Key: TypeAlias = tuple[Any, ...]
PORTS = {"http": 80, "https": 443}


@frozen
class RequestPlace:
    """The parts of a request's URL that are compared."""

    scheme: str
    host: str
    port: int | None
    path: str
    query: tuple[tuple[str, str], ...]

    @property
    def origin(self) -> str:
        """The scheme, host and port."""
        return f"{self.scheme}://{self.host}:{self.port}"


def parse_place(url: str) -> RequestPlace:
    """Return the compared parts of *url*; query pairs are sorted and secret values replaced."""
    parts = urlsplit(clean_url(url))
    query = tuple(sorted(parse_qsl(parts.query, keep_blank_values=True)))
    return RequestPlace(
        parts.scheme, parts.hostname or "", parts.port or PORTS.get(parts.scheme), unquote(parts.path) or "/", query
    )


def _check_kept_headers(_: object, __: object, names: tuple[str, ...]) -> None:
    for name in names:
        if name.lower() not in KEPT_REQUEST_HEADERS:
            msg = f"the header {name!r} is never stored, so it cannot be matched; stored are {list_names(sorted(KEPT_REQUEST_HEADERS), name, quoted=True)}"
            raise DataError(msg)


@frozen
class Matcher:
    """
    Computes the keys by which requests are compared.

    Attributes:
        ignore: JSON pointers of members that do not count, such as ``"/metadata/user_id"``.
        match_headers: Names of headers that count.
    """

    ignore: tuple[str, ...] = ()
    match_headers: tuple[str, ...] = attrs.field(default=(), validator=_check_kept_headers)

    def key(self, request: RecordedRequest) -> Key:
        """Return the key of a cleaned *request*."""
        headers = tuple([request.header(name.lower()) for name in self.match_headers])
        return request.method, parse_place(request.url), self._body_key(request), headers

    def _body_key(self, request: RecordedRequest) -> str:
        if not request.body:
            return ""
        kind = request.header("content-type").lower()
        if kind.startswith("multipart/form-data"):
            return _digest(_without_boundary(request.body, request.header("content-type")))
        if kind.startswith("application/x-www-form-urlencoded"):
            pairs = parse_qsl(request.body.decode(errors="replace"), keep_blank_values=True)
            return _digest(json.dumps(sorted(pairs)).encode())
        tree = self.json(request)
        if tree is ABSENT:
            return _digest(request.body)
        return _digest(json.dumps(tree, sort_keys=True, separators=(",", ":")).encode())

    def json(self, request: RecordedRequest) -> Any:
        """Return the compared part of the body as JSON; ``ABSENT`` if it is not JSON."""
        tree = json_body(request)
        for pointer in self.ignore:
            _remove_member(tree, pointer)
        return tree


def json_body(request: RecordedRequest) -> object:
    """Return the JSON value of a body, whole floats as ints; ``ABSENT`` when it is not JSON."""
    if not is_json(request) and request.body[:1].strip() not in (b"{", b"["):
        return ABSENT
    try:
        return json.loads(request.body, parse_float=_parse_number, parse_constant=_reject_constant)
    except (ValueError, RecursionError):
        return ABSENT


def _parse_number(text: str) -> int | float:
    number = float(text)
    return int(number) if number.is_integer() else number


def _reject_constant(text: str) -> Any:
    raise ValueError(text)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _without_boundary(body: bytes, content_type: str) -> bytes:
    found = re.search(r'boundary="?([^";]+)', content_type)
    return body.replace(found[1].encode(), b"BOUNDARY") if found else body


def _remove_member(tree: object, pointer: str) -> None:
    *path, last = [part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")[1:]] or [""]
    for part in path:
        tree = _get_member(tree, part)
    if isinstance(tree, dict):
        tree.pop(last, None)
    elif isinstance(tree, list) and last.isdigit() and int(last) < len(tree):
        del tree[int(last)]


def _get_member(tree: object, part: str) -> Any:
    if isinstance(tree, dict):
        return tree.get(part)
    return tree[int(part)] if isinstance(tree, list) and part.isdigit() and int(part) < len(tree) else None


MAX_CANDIDATES = 3
MAX_FIELDS = 8
MAX_LISTED = 20
MAX_COUNTED = 10_000
VALUE_WIDTH = 200
POINTER_WIDTH = 31
RECORDED_WIDTH = 22


@frozen
class Candidate:
    """A recorded request that is similar to the missed one."""

    index: int
    used: bool
    differences: tuple[JsonDifference, ...]


@frozen
class KnownRequest:
    """A recorded request, cleaned, with its key and whether it is used."""

    request: RecordedRequest
    key: Key
    used: bool


@frozen
class Situation:
    """
    The state of a cassette at a miss.

    Attributes:
        source: How the cassette is called.
        exists: Whether its file exists, if it has one.
        recorded: Each recorded request.
        matcher: How requests are compared.
        hint: How to record again, if it is known.
        mode: The mode of recording.
    """

    source: str
    exists: bool
    recorded: Sequence[KnownRequest]
    matcher: Matcher
    hint: str | None = None
    mode: str = "none"


def miss_reason(request: RecordedRequest, at: Situation) -> str:
    """Return the reason code of a miss; ``CassetteMiss`` lists the codes."""
    if not at.recorded:
        return "empty" if at.exists else "no_file"
    here = parse_place(request.url)
    same_host = [(k, place) for k in at.recorded if (place := parse_place(k.request.url)).origin == here.origin]
    if not same_host:
        return "host_unknown"
    same_path = [(k, p) for k, p in same_host if p.path == here.path and k.request.method == request.method]
    if not same_path:
        return "path_unknown"
    same_query = [k for k, p in same_path if p.query == here.query]
    if not same_query:
        return "query_differs"
    key = at.matcher.key(request)
    return "used_up" if any(k.key == key for k in same_query) else "body_differs"


def find_nearest(request: RecordedRequest, at: Situation) -> tuple[Candidate, ...]:
    """Return the recorded requests to the same URL that differ least, unused ones first."""
    here = parse_place(request.url)
    now = at.matcher.json(request)
    found = []
    for index, known in enumerate(at.recorded):
        recorded = known.request
        place = parse_place(recorded.url)
        if recorded.method != request.method or (place.origin, place.path) != (here.origin, here.path):
            continue
        body = at.matcher.json(recorded)
        if ABSENT in (now, body):
            body, now_shown = recorded.body.decode(errors="replace"), request.body.decode(errors="replace")
        else:
            now_shown = now
        both = itertools.chain(
            _query_differences(place.query, here.query),
            _header_differences(recorded, request, at),
            _body_differences(body, now_shown),
        )
        found.append(Candidate(index, known.used, tuple(itertools.islice(both, MAX_COUNTED))))
    return tuple(sorted(found, key=lambda c: (len(c.differences), c.used, c.index))[:MAX_CANDIDATES])


def _body_differences(recorded: object, now: object) -> list[JsonDifference]:
    return [each._replace(pointer=each.pointer or "(body)") for each in differences(recorded, now)]


def _query_differences(recorded: Any, now: Any) -> Any:
    return differences(dict(recorded), dict(now), "?query") if recorded != now else ()


def _header_differences(recorded: RecordedRequest, now: RecordedRequest, at: Situation) -> list[JsonDifference]:
    names = [n.lower() for n in at.matcher.match_headers]
    pairs = [(n, recorded.header(n), now.header(n)) for n in names]
    return [JsonDifference(f"header {n}", a or ABSENT, b or ABSENT) for n, a, b in pairs if a != b]


def describe_miss(request: RecordedRequest, at: Situation, reason: str, candidates: Sequence[Candidate]) -> str:
    """Return the error message of a miss."""
    unused = [i for i, known in enumerate(at.recorded) if not known.used]
    first = [*map(str, unused[:MAX_LISTED]), *(["..."] if len(unused) > MAX_LISTED else [])]
    listed = f" ({', '.join(first)})" if unused else ""
    total = len(at.recorded)
    lines = [
        f"{request.method} {request.url} is not in {at.source}",
        f"  mode {at.mode}; {total} recorded, {total - len(unused)} used, {len(unused)} unused{listed}",
    ]
    for candidate in candidates:
        state, count = "used" if candidate.used else "unused", len(candidate.differences)
        lines.append(
            f"  nearest: interaction {candidate.index} ({state}), {count} difference{'' if count == 1 else 's'}"
        )
        lines.extend(map(describe_difference, candidate.differences[:MAX_FIELDS]))
        if count > MAX_FIELDS:
            lines.append(f"    and {count - MAX_FIELDS} more")
    lines.append(f"  cause looks like: {_describe_cause(request, at, reason, candidates)}")
    if at.hint:
        lines.append(f"  to record {'again' if at.exists or total else 'it'}: {at.hint}")
    return "\n".join(lines)


def describe_difference(difference: JsonDifference, before: str = "recorded", after: str = "now") -> str:
    """Return a line for one field, with both values cut to where they differ and named *before* and *after*."""
    recorded, now = (
        _window_on_difference(difference.recorded, difference.now),
        _window_on_difference(difference.now, difference.recorded),
    )
    return f"    {difference.pointer:<{POINTER_WIDTH}} {before} {recorded:<{RECORDED_WIDTH}} {after} {now}"


def _window_on_difference(value: object, other: object) -> str:
    """Return *value* as JSON, cut to a window that starts shortly before it differs from *other*."""
    if value is ABSENT:
        return repr(ABSENT)
    text, against = Cleaner().text(_to_json(value)), "" if other is ABSENT else Cleaner().text(_to_json(other))
    if len(text) <= VALUE_WIDTH:
        return text
    start = max(0, min(first_difference(text, against) - VALUE_WIDTH // 4, len(text) - VALUE_WIDTH))
    return (
        f"{'...' if start else ''}{text[start : start + VALUE_WIDTH]}{'...' if start + VALUE_WIDTH < len(text) else ''}"
    )


def _to_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _describe_cause(request: RecordedRequest, at: Situation, reason: str, candidates: Sequence[Candidate]) -> str:
    here = parse_place(request.url)
    match reason:
        case "no_file":
            return "the cassette has not been recorded yet"
        case "empty":
            return "the cassette holds no interaction"
        case "host_unknown":
            known = sorted({parse_place(k.request.url).host for k in at.recorded})
            return f"another base URL: nothing was recorded for {here.host}, only for {list_names(known, here.host)}"
        case "path_unknown":
            known = sorted({f"{k.request.method} {parse_place(k.request.url).path}" for k in at.recorded})
            return f"another endpoint: recorded were {list_names(known)}"
        case "query_differs":
            return "another query"
        case "used_up":
            return "the request is made more often than it was recorded"
        case _:
            pass
    return _describe_body_cause(request, candidates[0].differences) if candidates else "another body"


def _describe_body_cause(request: RecordedRequest, found: Sequence[JsonDifference]) -> str:
    if not found:
        return "another body"
    first = found[0].pointer
    place = re.match(r"/(messages|input|contents)/(\d+)", first)
    if place is None:
        return "another body" if first == "(body)" else f"{first.removeprefix('/').split('/')[0]} changed"
    if all(d.recorded is ABSENT for d in found) or all(d.now is ABSENT for d in found):
        longer = "longer" if found[0].recorded is ABSENT else "shorter"
        return f"the conversation is {longer} from message {place[2]} on"
    return f"{_describe_role(request, place[1], int(place[2]))} changed at message {place[2]}"


def _describe_role(request: RecordedRequest, member: str, index: int) -> str:
    messages = Matcher().json(request).get(member, [])
    message = messages[index] if isinstance(messages, list) and index < len(messages) else {}
    text = json.dumps(message)
    if any(
        mark in text for mark in ('"tool_result"', '"role": "tool"', '"function_call_output"', '"functionResponse"')
    ):
        return "tool result"
    role = message.get("role") if isinstance(message, dict) else None
    return f"{role} message" if role else "message"


class CassetteMiss(BaseException):
    """
    A request is not in the cassette. No ``Exception``, so that no SDK and no handler swallows or retries it.

    Attributes:
        reason: ``"no_file"``, ``"empty"``, ``"used_up"``, ``"body_differs"``, ``"query_differs"``, ``"path_unknown"`` or
            ``"host_unknown"``.
        request: The request, cleaned.
        candidates: The nearest recorded requests and what differs.
    """

    def __init__(
        self, message: str, *, reason: str, request: RecordedRequest, candidates: tuple[Candidate, ...]
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.request = request
        self.candidates = candidates


class CassetteUnused(AssertionError):
    """
    A cassette holds interactions that were not played.

    Attributes:
        unused: Their indices.
    """

    def __init__(self, message: str, *, unused: tuple[int, ...]) -> None:
        super().__init__(message)
        self.unused = unused


class OpenExchange(Protocol):
    """A request that is being recorded."""

    def end(self, *, read_to_end: bool) -> None:
        """Store the exchange with the part of its reply that was read."""

    def end_if_complete(self) -> None:
        """Store the exchange if its reply is complete."""


@frozen
class LeftOut:
    """
    A reply that the program received and that is not recorded.

    Attributes:
        method: The method of the request.
        url: The URL, without secrets.
        status: The status code of the reply; 0 if there was none.
        reason: ``"error_status"``, ``"no_reply"``, ``"not_read"`` if the client closed the stream before its end, ``"cut"`` if the
            stream ended early.
    """

    method: str
    url: str
    status: int
    reason: str

    def __str__(self) -> str:
        why = {
            "error_status": f"status {self.status}",
            "no_reply": "there was no reply",
            "not_read": "the reply was not read to its end",
            "cut": "the stream ended before its last event",
        }
        return f"{self.method} {self.url}: {why[self.reason]}"


@attrs.define(eq=False)
class Slot:
    """
    The position of an interaction in a cassette, reserved when its request starts.

    Attributes:
        interaction: What was recorded; ``None`` while it is under way, and for ever when it is not to be kept.
        asked: Its request as it is looked up.
        used: Whether it was played.
        secrets: Secret values of the request's headers, to be kept out of the reply.
    """

    interaction: Interaction | None = None
    asked: KnownRequest | None = None
    used: bool = False
    secrets: dict[str, str] = attrs.field(factory=dict, repr=False)


class Cassette:
    """
    Recorded HTTP traffic. One cassette serves many clients, sync and async, of several providers, in threads and tasks.

    Args:
        interactions: What was recorded.
        path: Its file, for messages and for ``save``.
        ignore: JSON pointers of request members that do not count, such as ``"/metadata/user_id"``.
        match_headers: Request headers that count, such as ``"anthropic-beta"``; none by default.
        repeat_last: Play the last interaction of a key again when all of them are used.
        hint: How to record again, for the message of a miss.
        redactor: What is taken out of requests and replies; by default texts that look like keys, and telling members.

    Attributes:
        misses: Every miss so far, also those that somebody caught.
        left_out: Replies that were not recorded.
        open_exchanges: What is being recorded and has not ended.
        extras: What ``save`` writes beside the interactions.
        mode: How a test records; a cassette by itself does not.
    """

    mode: str = "none"

    def __init__(
        self,
        interactions: Iterable[Interaction] = (),
        *,
        path: str | os.PathLike[str] | None = None,
        ignore: Iterable[str] = (),
        match_headers: Iterable[str] = (),
        repeat_last: bool = False,
        hint: str | None = None,
        redactor: Redactor = SHAPES,
    ) -> None:
        self.path = None if path is None else Path(path)
        self.misses: list[CassetteMiss] = []
        self.left_out: list[LeftOut] = []
        self.open_exchanges: set[OpenExchange] = set()
        self.extras: dict[str, Any] = {}
        self.hint = hint
        self.redactor = redactor
        self._matcher = Matcher(tuple(ignore), tuple(match_headers))
        self._repeat_last = repeat_last
        self._lock = Lock()
        self._slots: list[Slot] = []
        self._waiting: dict[Key, deque[Slot]] = {}
        self._last: dict[Key, Slot] = {}
        self._secrets: dict[str, str] = {}
        for interaction in interactions:
            self.finish(self.reserve(), interaction)

    @classmethod
    def load(cls, path: str | os.PathLike[str], **options: Any) -> Cassette:
        """
        Return the cassette in the file *path*: vcrpy's YAML version 1, or one of its relatives.

        Args:
            path: The file.
            **options: As for ``Cassette``.

        Raises:
            FileNotFoundError: when there is no such file.
            DataError: naming file, interaction index and key, for whatever is not a cassette. No code in it is run.
        """
        return cls(parse_cassette(Path(path).read_bytes(), str(path)), path=path, **options)

    def __repr__(self) -> str:
        return f"Cassette({str(self.path or 'in memory')!r}, {len(self)} interactions, {len(self.unused)} unused)"

    def __len__(self) -> int:
        return len(self.interactions)

    @property
    def interactions(self) -> tuple[Interaction, ...]:
        """The interactions, in the order in which their requests started."""
        with self._lock:
            return tuple([s.interaction for s in self._slots if s.interaction is not None])

    @property
    def complete(self) -> tuple[Interaction, ...]:
        """The interactions whose reply was read to its end: what ``save`` writes."""
        return tuple([interaction for interaction in self.interactions if interaction.complete])

    @property
    def unused(self) -> tuple[int, ...]:
        """The indexes of the interactions that were not played."""
        with self._lock:
            kept = [s for s in self._slots if s.interaction is not None]
            return tuple([i for i, slot in enumerate(kept) if not slot.used])

    def take(self, request: RecordedRequest) -> Interaction:
        """
        Return the next unused interaction for *request*, and mark it as used; with ``repeat_last``, the last one again if all are used.

        Raises:
            CassetteMiss: when there is none.
        """
        clean = Cleaner(secrets_in_headers(request.headers), base=self.redactor).request(request)
        key = self._matcher.key(clean)
        with self._lock:
            waiting = self._waiting.get(key)
            slot = waiting.popleft() if waiting else self._last.get(key) if self._repeat_last else None
            if slot is not None and slot.interaction is not None:
                slot.used = True
                return slot.interaction
        raise self._record_miss(clean)

    def reserve(self, secrets: dict[str, str] | None = None) -> Slot:
        """Reserve the next position for a request that starts now; *secrets* are removed from its reply and the file."""
        slot = Slot(secrets=secrets or {})
        with self._lock:
            self._slots.append(slot)
            self._secrets.update(slot.secrets)
        return slot

    def finish(self, slot: Slot, interaction: Interaction) -> None:
        """Store a recorded interaction in its slot, ready to be played."""
        request = Cleaner(slot.secrets, base=self.redactor).request(interaction.request)
        key = self._matcher.key(request)
        with self._lock:
            slot.interaction, slot.asked = interaction, KnownRequest(request, key, used=False)
            self._waiting.setdefault(key, deque()).append(slot)
            self._last[key] = slot

    def assert_all_used(self) -> None:
        """
        Raise an error if an interaction was not played or a request found no recording.

        Raises:
            CassetteUnused: listing what was not played.
            CassetteMiss: the first miss, if somebody swallowed it.
        """
        unused, held = self.unused, self.interactions
        # What was not played comes first, since its message tells of the misses, too.
        if unused:
            rest = "".join(f"\n  {i}: {held[i].request.method} {held[i].request.url}" for i in unused)
            missed = f"; {len(self.misses)} requests were missed, the first: {self.misses[0]}" if self.misses else ""
            msg = f"{len(unused)} of {len(held)} interactions of {self._source_name} were not played:{rest}{missed}"
            raise CassetteUnused(msg, unused=unused)
        if self.misses:
            raise self.misses[0]

    def save(self, path: str | os.PathLike[str] | None = None, *, allow_partial: bool = False) -> Path:
        """
        Write the file that plain vcrpy and ``load`` read, as a whole or not at all, and return its path.

        Everything is cleaned once more on its way to the file, which is then parsed back and scanned for secrets.

        Args:
            path: Where; the cassette's own path by default.
            allow_partial: Keep interactions whose reply was not read to its end.

        Raises:
            SecretFound: when a secret is left; nothing is written.
            DataError: when there is no path, or the file there is not a cassette.
        """
        target = self.path if path is None else Path(path)
        if target is None:
            msg = "this cassette has no path; give one to save()"
            raise DataError(msg)
        CASSETTE_FILE.check(target)
        for exchange in [*self.open_exchanges]:
            exchange.end_if_complete()
        cleaner = Cleaner(dict(self._secrets), base=self.redactor)
        kept = [_clean_interaction(i, cleaner) for i in self.interactions if i.complete or allow_partial]
        data = dump_cassette(kept, self.extras)
        for index, interaction in enumerate(parse_cassette(data, str(target))):
            _refuse_secrets(interaction, cleaner, f"{target}: interactions[{index}]")
        target.parent.mkdir(parents=True, exist_ok=True)
        replace_path(target, data)
        self.path = self.path or target
        return target

    def leave_out(self, left: LeftOut) -> None:
        """Store the fact that a reply was not recorded."""
        self.left_out.append(left)

    def forget(self, miss: CassetteMiss) -> None:
        """Remove a miss: another source answers the request."""
        self.misses.remove(miss)

    @property
    def _source_name(self) -> str:
        return str(self.path) if self.path else "this cassette"

    def _record_miss(self, request: RecordedRequest) -> CassetteMiss:
        with self._lock:
            recorded = [attrs.evolve(s.asked, used=s.used) for s in self._slots if s.asked is not None]
        exists = self.path is None or self.path.exists()
        at = Situation(self._source_name, exists, recorded, self._matcher, self.hint, self.mode)
        reason, candidates = miss_reason(request, at), find_nearest(request, at)
        message = describe_miss(request, at, reason, candidates)
        miss = CassetteMiss(message, reason=reason, request=request, candidates=candidates)
        with self._lock:
            self.misses.append(miss)
        return miss


def _clean_interaction(interaction: Interaction, cleaner: Cleaner) -> Interaction:
    request, response = cleaner.request(interaction.request), cleaner.response(interaction.response)
    return attrs.evolve(interaction, request=request, response=response)


def _refuse_secrets(interaction: Interaction, cleaner: Cleaner, where: str) -> None:
    messages: tuple[tuple[str, RecordedRequest | RecordedResponse], ...] = (
        ("request", interaction.request),
        ("response", interaction.response),
    )
    for name, message in messages:
        for place, rule in cleaner.findings(message):
            msg = f"{where}.{name} holds a secret at {place} (rule {rule}); nothing was written. Take it out of the traffic"
            raise SecretFound(msg, path=f"{name}/{place}", rule=rule)
