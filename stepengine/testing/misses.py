"""
What a miss tells: the nearest recorded requests, the fields that differ, and a guess at the cause (replay C14).
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from typing import Any

import attrs

from stepengine.testing.cleaning import Cleaner
from stepengine.testing.interactions import RecordedRequest
from stepengine.testing.matching import ABSENT, Difference, Key, Matcher, differences, place_of

__all__ = ("Candidate", "Known", "Situation", "describe_miss", "nearest", "reason_of")

MAX_CANDIDATES = 3
MAX_FIELDS = 8
MAX_LISTED = 20
MAX_COUNTED = 10_000
VALUE_WIDTH = 200
POINTER_WIDTH = 31
RECORDED_WIDTH = 22


@attrs.frozen
class Candidate:
    """A recorded request that is near to the one that was missed."""

    index: int
    used: bool
    differences: tuple[Difference, ...]


@attrs.frozen
class Known:
    """A recorded request, cleaned, with its key and whether it is used."""

    request: RecordedRequest
    key: Key
    used: bool


@attrs.frozen
class Situation:
    """
    A cassette at the moment of a miss.

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
    recorded: Sequence[Known]
    matcher: Matcher
    hint: str | None = None
    mode: str = "none"


def reason_of(request: RecordedRequest, at: Situation) -> str:
    """Return why *request* is missing: one of the words of replay C14."""
    if not at.recorded:
        return "empty" if at.exists else "no_file"
    here = place_of(request.url)
    same_host = [(k, place) for k in at.recorded if (place := place_of(k.request.url)).origin == here.origin]
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


def nearest(request: RecordedRequest, at: Situation) -> tuple[Candidate, ...]:
    """Return the recorded requests to the same place that differ least, unused before used."""
    here = place_of(request.url)
    now = at.matcher.json(request)
    found = []
    for index, known in enumerate(at.recorded):
        recorded = known.request
        place = place_of(recorded.url)
        if recorded.method != request.method or (place.origin, place.path) != (here.origin, here.path):
            continue
        body = at.matcher.json(recorded)
        if ABSENT in (now, body):
            body, now_shown = recorded.body.decode(errors="replace"), request.body.decode(errors="replace")
        else:
            now_shown = now
        both = itertools.chain(
            _query(place.query, here.query), _headers(recorded, request, at), differences(body, now_shown)
        )
        found.append(Candidate(index, known.used, tuple(itertools.islice(both, MAX_COUNTED))))
    return tuple(sorted(found, key=lambda c: (len(c.differences), c.used, c.index))[:MAX_CANDIDATES])


def _query(recorded: Any, now: Any) -> Any:
    return differences(dict(recorded), dict(now), "?query") if recorded != now else ()


def _headers(recorded: RecordedRequest, now: RecordedRequest, at: Situation) -> list[Difference]:
    names = [n.lower() for n in at.matcher.match_headers]
    pairs = [(n, recorded.header(n), now.header(n)) for n in names]
    return [Difference(f"header {n}", a or ABSENT, b or ABSENT) for n, a, b in pairs if a != b]


def describe_miss(request: RecordedRequest, at: Situation, reason: str, candidates: Sequence[Candidate]) -> str:
    """Return the message of a miss in its fixed form."""
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
        lines.extend(map(_field, candidate.differences[:MAX_FIELDS]))
        if count > MAX_FIELDS:
            lines.append(f"    and {count - MAX_FIELDS} more")
    lines.append(f"  cause looks like: {_cause(request, at, reason, candidates)}")
    if at.hint:
        lines.append(f"  to record {'again' if at.exists or total else 'it'}: {at.hint}")
    return "\n".join(lines)


def _field(difference: Difference) -> str:
    recorded, now = _shown(difference.recorded, difference.now), _shown(difference.now, difference.recorded)
    return f"    {difference.pointer:<{POINTER_WIDTH}} recorded {recorded:<{RECORDED_WIDTH}} now {now}"


def _shown(value: Any, other: Any) -> str:
    """Return *value* as JSON, cut to a window that begins shortly before it and *other* part ways."""
    if value is ABSENT:
        return repr(ABSENT)
    text, against = Cleaner().text(_json(value)), "" if other is ABSENT else Cleaner().text(_json(other))
    if len(text) <= VALUE_WIDTH:
        return text
    same = next(
        (i for i, (a, b) in enumerate(zip(text, against, strict=False)) if a != b), min(len(text), len(against))
    )
    start = max(0, min(same - VALUE_WIDTH // 4, len(text) - VALUE_WIDTH))
    return (
        f"{'...' if start else ''}{text[start : start + VALUE_WIDTH]}{'...' if start + VALUE_WIDTH < len(text) else ''}"
    )


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _cause(request: RecordedRequest, at: Situation, reason: str, candidates: Sequence[Candidate]) -> str:
    here = place_of(request.url)
    match reason:
        case "no_file":
            return "the cassette has not been recorded yet"
        case "empty":
            return "the cassette holds no interaction"
        case "host_unknown":
            known = sorted({place_of(k.request.url).host for k in at.recorded})
            return f"another base URL: nothing was recorded for {here.host}, only for {', '.join(known)}"
        case "path_unknown":
            known = sorted({f"{k.request.method} {place_of(k.request.url).path}" for k in at.recorded})
            return f"another endpoint: recorded were {', '.join(known[:5])}"
        case "query_differs":
            return "another query"
        case "used_up":
            return "the request is made more often than it was recorded"
        case _:
            pass
    return _body_cause(request, candidates[0].differences) if candidates else "another body"


def _body_cause(request: RecordedRequest, found: Sequence[Difference]) -> str:
    if not found:
        return "another body"
    first = found[0].pointer
    place = re.match(r"/(messages|input|contents)/(\d+)", first)
    if place is None:
        return "another body" if first == "(body)" else f"{first.removeprefix('/').split('/')[0]} changed"
    if all(d.recorded is ABSENT for d in found) or all(d.now is ABSENT for d in found):
        longer = "longer" if found[0].recorded is ABSENT else "shorter"
        return f"the conversation is {longer} from message {place[2]} on"
    return f"{_speaker(request, place[1], int(place[2]))} changed at message {place[2]}"


def _speaker(request: RecordedRequest, member: str, index: int) -> str:
    messages = Matcher().json(request).get(member, [])
    message = messages[index] if isinstance(messages, list) and index < len(messages) else {}
    text = json.dumps(message)
    if any(
        mark in text for mark in ('"tool_result"', '"role": "tool"', '"function_call_output"', '"functionResponse"')
    ):
        return "tool result"
    role = message.get("role") if isinstance(message, dict) else None
    return f"{role} message" if role else "message"
