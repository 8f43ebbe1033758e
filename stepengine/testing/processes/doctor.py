"""Compare two runs of a program: the requests that differ, and the calls that may be the reason."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import attrs
from attrs import frozen

from stepengine.data.json import ABSENT, JsonDifference, find_differences
from stepengine.testing.cassette import Cassette
from stepengine.testing.cassette_files import Interaction, RecordedRequest
from stepengine.testing.cassette_matching import Matcher
from stepengine.testing.cassette_misses import CassetteMiss
from stepengine.testing.traffic_redaction import Cleaner, find_header_secrets


@frozen
class _SentRequest:
    request: RecordedRequest
    line: str
    sources: tuple[tuple[str, str], ...]


@frozen
class RequestDifference:
    """
    A request that differs between two runs.

    Attributes:
        request: The request of the first run.
        line: The file and line that sent it.
        differences: Differences between the JSON bodies, the first run as ``recorded``; empty if neither body is JSON.
        sources: Function and line of each call of a source before the request, the last one first.
    """

    request: RecordedRequest
    line: str
    differences: tuple[JsonDifference, ...]
    sources: tuple[tuple[str, str], ...]


@attrs.define(eq=False)
class ObservedRun:
    """The requests and calls of a program's processes in one run."""

    requests: list[_SentRequest] = attrs.field(factory=list)
    sources: list[tuple[str, str]] = attrs.field(factory=list)
    _played: set[int] = attrs.field(factory=set)
    _lock: threading.Lock = attrs.field(factory=threading.Lock)

    def add_source(self, name: str, line: str) -> None:
        """Store the function and the line of a call of a source of nondeterminism, once."""
        with self._lock:
            if (name, line) not in self.sources:
                self.sources.append((name, line))

    def add_request(self, request: RecordedRequest, line: str) -> None:
        """Store a request, with the sources that were called before it."""
        clean = Cleaner(find_header_secrets(request.headers)).clean_request(request)
        with self._lock:
            self.requests.append(_SentRequest(clean, line, tuple(reversed(self.sources))))

    def pop_nearest_interaction(self, cassette: Cassette, miss: CassetteMiss) -> Interaction | None:
        """Return the interaction nearest to a missed request, each at most once; None if all its candidates were returned."""
        with self._lock:
            for candidate in miss.candidates:
                if candidate.index not in self._played:
                    self._played.add(candidate.index)
                    return cassette.interactions[candidate.index]
        return None


def find_differing_requests(first: ObservedRun, second: ObservedRun) -> Iterator[RequestDifference]:
    """Yield each request of the first run that the second did not send, with its differences from one that only the second sent."""
    matcher = Matcher()
    rest = [(matcher.extract_compared_parts(sent.request), sent) for sent in second.requests]
    alone: list[_SentRequest] = []
    for sent in first.requests:
        asked = matcher.extract_compared_parts(sent.request)
        found = next((i for i, (other, _) in enumerate(rest) if other == asked), None)
        if found is None:
            alone.append(sent)
        else:
            rest.pop(found)
    for sent in alone:
        other = rest.pop(0)[1].request if rest else None
        now = ABSENT if other is None else matcher.parse_compared_json(other)
        yield RequestDifference(
            sent.request,
            sent.line,
            tuple(find_differences(matcher.parse_compared_json(sent.request), now)),
            sent.sources,
        )
