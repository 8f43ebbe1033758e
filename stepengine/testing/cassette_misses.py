"""
Requests that are not in a cassette: the nearest recorded requests, the fields that differ, and the probable cause.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from attrs import frozen

from stepengine.data.alike import list_names
from stepengine.data.json import ABSENT, JsonDifference, find_differences, find_first_difference
from stepengine.testing.cassette_files import RecordedRequest
from stepengine.testing.cassette_matching import ComparedRequest, Matcher, have_equal_headers, parse_compared_url
from stepengine.testing.traffic_redaction import Cleaner

__tracebackhide__ = True  # a failed test ends at its author's line

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
    """
    A recorded request.

    Attributes:
        request: The request, cleaned.
        asked: Its compared parts.
        used: Whether its reply was played.
        has_all_headers: Whether the recording has all of its counted headers.
    """

    request: RecordedRequest
    asked: ComparedRequest
    used: bool
    has_all_headers: bool


@frozen
class Situation:
    """
    The state of a cassette at a miss.

    Attributes:
        source: The name of the cassette in messages.
        exists: Whether its file exists, if it has one.
        recorded: The recorded requests.
        matcher: Computes the compared parts of requests.
        hint: The command that records again, if it is known.
        mode: The mode of recording.
    """

    source: str
    exists: bool
    recorded: Sequence[KnownRequest]
    matcher: Matcher
    hint: str | None = None
    mode: str = "none"


def find_miss_reason(request: RecordedRequest, situation: Situation) -> str:
    """Return the reason code of a miss; ``CassetteMiss`` lists the codes."""
    if not situation.recorded:
        return "empty" if situation.exists else "no_file"
    here = parse_compared_url(request.url)
    same_host = [
        (k, place) for k in situation.recorded if (place := parse_compared_url(k.request.url)).origin == here.origin
    ]
    if not same_host:
        return "host_unknown"
    same_path = [(k, p) for k, p in same_host if p.path == here.path and k.request.method == request.method]
    if not same_path:
        return "path_unknown"
    if not any(p.query == here.query for _, p in same_path):
        return "query_differs"
    asked = situation.matcher.extract_compared_parts(request)
    same = [known for known, _ in same_path if known.asked.key == asked.key]
    if not same:
        return "body_differs"
    if not any(have_equal_headers(known.asked, asked, is_complete=known.has_all_headers) for known in same):
        return "headers_differ"
    return "used_up" if all(known.used for known in same) else "secret_differs"


def find_nearest_requests(request: RecordedRequest, situation: Situation) -> tuple[Candidate, ...]:
    """Return the recorded requests with the same method, host and path that differ least, unused ones first."""
    here = parse_compared_url(request.url)
    now = situation.matcher.parse_compared_json(request)
    found = []
    for index, known in enumerate(situation.recorded):
        recorded = known.request
        place = parse_compared_url(recorded.url)
        if recorded.method != request.method or (place.origin, place.path) != (here.origin, here.path):
            continue
        body = situation.matcher.parse_compared_json(recorded)
        if ABSENT in (now, body):
            body, now_shown = recorded.body.decode(errors="replace"), request.body.decode(errors="replace")
        else:
            now_shown = now
        both = itertools.chain(
            find_differences(_join_values_by_name(place.query), _join_values_by_name(here.query), "?query"),
            _find_header_differences(known, situation.matcher.extract_compared_parts(request)),
            [each._replace(pointer=each.pointer or "(body)") for each in find_differences(body, now_shown)],
        )
        found.append(Candidate(index, known.used, tuple(itertools.islice(both, MAX_COUNTED))))
    return tuple(sorted(found, key=lambda c: (len(c.differences), c.used, c.index))[:MAX_CANDIDATES])


def _join_values_by_name(pairs: Sequence[tuple[str, str]]) -> dict[str, str]:
    joined: dict[str, list[str]] = {}
    for name, value in pairs:
        joined.setdefault(name, []).append(value.removeprefix("="))
    return {name: ", ".join(values) for name, values in joined.items()}


def _find_header_differences(known: KnownRequest, current: ComparedRequest) -> list[JsonDifference]:
    """Return the compared headers whose values differ between a recorded request and *current*."""
    if have_equal_headers(known.asked, current, is_complete=known.has_all_headers):
        return []
    recorded, sent = _join_values_by_name(known.asked.headers), _join_values_by_name(current.headers)
    names = {*recorded, *sent} if known.has_all_headers else {*recorded}
    pairs = [(name, recorded.get(name, ABSENT), sent.get(name, ABSENT)) for name in sorted(names)]
    return [JsonDifference(f"header {name}", a, b) for name, a, b in pairs if a != b]


def describe_miss(request: RecordedRequest, situation: Situation, reason: str, candidates: Sequence[Candidate]) -> str:
    """Return the error message of a miss."""
    unused = [i for i, known in enumerate(situation.recorded) if not known.used]
    first = [*map(str, unused[:MAX_LISTED]), *(["..."] if len(unused) > MAX_LISTED else [])]
    listed = f" ({', '.join(first)})" if unused else ""
    total = len(situation.recorded)
    lines = [
        f"{request.method} {request.url} is not in {situation.source}",
        f"  mode {situation.mode}; {total} recorded, {total - len(unused)} used, {len(unused)} unused{listed}",
    ]
    for candidate in candidates:
        state, count = "used" if candidate.used else "unused", len(candidate.differences)
        lines.append(
            f"  nearest: interaction {candidate.index} ({state}), {count} difference{'' if count == 1 else 's'}"
        )
        lines.extend(map(describe_difference, candidate.differences[:MAX_FIELDS]))
        if count > MAX_FIELDS:
            lines.append(f"    and {count - MAX_FIELDS} more")
    lines.append(f"  cause looks like: {_describe_cause(request, situation, reason, candidates)}")
    if situation.hint:
        lines.append(f"  to record {'again' if situation.exists or total else 'it'}: {situation.hint}")
    return "\n".join(lines)


def describe_difference(difference: JsonDifference, before: str = "recorded", after: str = "now") -> str:
    """Return a line for one field, with both values cut to where they differ and named *before* and *after*."""
    recorded, now = (
        _format_value_at_difference(difference.recorded, difference.now),
        _format_value_at_difference(difference.now, difference.recorded),
    )
    return f"    {difference.pointer:<{POINTER_WIDTH}} {before} {recorded:<{RECORDED_WIDTH}} {after} {now}"


def _format_value_at_difference(value: object, other: object) -> str:
    """Return *value* as JSON without secrets; long JSON is cut to the part where it differs from *other*."""
    if value is ABSENT:
        return repr(ABSENT)
    text, against = (
        Cleaner().clean_text(_to_json(value)),
        "" if other is ABSENT else Cleaner().clean_text(_to_json(other)),
    )
    if len(text) <= VALUE_WIDTH:
        return text
    start = max(0, min(find_first_difference(text, against) - VALUE_WIDTH // 4, len(text) - VALUE_WIDTH))
    return (
        f"{'...' if start else ''}{text[start : start + VALUE_WIDTH]}{'...' if start + VALUE_WIDTH < len(text) else ''}"
    )


def _to_json(value: object) -> str:
    """Return a value as JSON text; values without a JSON form as text."""
    return json.dumps(value, ensure_ascii=False, default=str)


CAUSES = {
    "no_file": "the cassette has not been recorded yet",
    "empty": "the cassette contains no interaction",
    "query_differs": "another query",
    "headers_differ": "another header",
    "secret_differs": "the recorded requests of this kind were made with other secrets",
    "used_up": "the request is sent more often than it was recorded",
}


def _describe_cause(
    request: RecordedRequest, situation: Situation, reason: str, candidates: Sequence[Candidate]
) -> str:
    """Return the probable cause of a miss, for the last lines of its message."""
    here = parse_compared_url(request.url)
    if reason == "host_unknown":
        known = sorted({parse_compared_url(k.request.url).host for k in situation.recorded})
        return f"another base URL: nothing was recorded for {here.host}, only for {list_names(known, here.host)}"
    if reason == "path_unknown":
        known = sorted({f"{k.request.method} {parse_compared_url(k.request.url).path}" for k in situation.recorded})
        return f"another endpoint: the recorded ones are {list_names(known)}"
    if reason in CAUSES:
        return CAUSES[reason]
    return _describe_body_cause(request, candidates[0].differences) if candidates else "another body"


def _describe_body_cause(request: RecordedRequest, differences: Sequence[JsonDifference]) -> str:
    """Return which part of the body changed, such as a message of the conversation."""
    if not differences:
        return "another body"
    first = differences[0].pointer
    place = re.match(r"/(messages|input|contents)/(\d+)", first)
    if place is None:
        return "another body" if first == "(body)" else f"{first.removeprefix('/').split('/')[0]} changed"
    if all(d.recorded is ABSENT for d in differences) or all(d.now is ABSENT for d in differences):
        longer = "longer" if differences[0].recorded is ABSENT else "shorter"
        return f"the conversation is {longer} from message {place[2]} on"
    return f"{_describe_message_role(request, place[1], int(place[2]))} changed at message {place[2]}"


def _describe_message_role(request: RecordedRequest, member: str, index: int) -> str:
    """Return "tool result", or the role of the message at *index* with "message"."""
    messages = Matcher().parse_compared_json(request).get(member, [])
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
        reason: ``"no_file"``, ``"empty"``, ``"used_up"``, ``"body_differs"``, ``"headers_differ"``, ``"secret_differs"``,
            ``"query_differs"``, ``"path_unknown"`` or ``"host_unknown"``.
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

    def __reduce__(self) -> tuple[Any, ...]:
        rebuild = partial(CassetteMiss, reason=self.reason, request=self.request, candidates=self.candidates)
        return rebuild, (str(self),)


class WorkerMiss(Exception):
    """
    A miss in a worker of ``multiprocessing.pool``. It is an ``Exception``, because other errors end the worker instead of reaching the caller.

    Attributes:
        miss: The miss.
    """

    def __init__(self, miss: CassetteMiss) -> None:
        super().__init__(str(miss))
        self.miss = miss

    def __reduce__(self) -> tuple[Any, ...]:
        return WorkerMiss, (self.miss,)


def wrap_miss_if_in_pool_worker(miss: CassetteMiss) -> BaseException:
    """Return *miss*, as a ``WorkerMiss`` if a worker of ``multiprocessing.pool`` is to raise it."""
    pool: Any = sys.modules.get("multiprocessing.pool")
    frame = None if pool is None else sys._getframe()  # noqa: SLF001 - `inspect` has no cheaper way
    while frame is not None:
        if frame.f_code is pool.worker.__code__:
            return WorkerMiss(miss)
        frame = frame.f_back
    return miss
