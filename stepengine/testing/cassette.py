"""
``Cassette``: recorded HTTP traffic, looked up by what a request says and never by where it stands (replay C).

What lives here holds interactions and hands each out once; files are the business of ``reading`` and ``writing``, HTTP
objects that of ``transport``.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs

from stepengine.errors import DataError
from stepengine.redaction import Redactor
from stepengine.testing.cleaning import SHAPES, Cleaner, SecretFound, known_secrets
from stepengine.testing.interactions import Interaction, RecordedRequest, RecordedResponse
from stepengine.testing.matching import Key, Matcher
from stepengine.testing.misses import Candidate, Known, Situation, describe_miss, nearest, reason_of
from stepengine.testing.reading import parse_cassette
from stepengine.testing.writing import dump_cassette, replace_file

__all__ = ("Cassette", "CassetteMiss", "CassetteUnused", "Slot")


class CassetteMiss(BaseException):
    """
    A request is not in the cassette. No ``Exception``, so that no SDK and no handler swallows or retries it (replay C14).

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
    A cassette holds interactions that nobody asked for.

    Attributes:
        unused: Their indices.
    """

    def __init__(self, message: str, *, unused: tuple[int, ...]) -> None:
        super().__init__(message)
        self.unused = unused


@attrs.define(eq=False)
class Slot:
    """
    A place in a cassette, taken when a request starts (replay C5).

    Attributes:
        interaction: What was recorded; ``None`` while it is under way, and for ever when it is not to be kept.
        asked: Its request as it is looked up.
        used: Whether it was played.
        secrets: Secret values of the request's headers, to be kept out of the reply.
    """

    interaction: Interaction | None = None
    asked: Known | None = None
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
        self.hint = hint
        self.redactor = redactor
        self._matcher = Matcher(tuple(ignore), tuple(match_headers))
        self._repeat_last = repeat_last
        self._lock = threading.Lock()
        self._slots: list[Slot] = []
        self._waiting: dict[Key, deque[Slot]] = {}
        self._last: dict[Key, Slot] = {}
        self._secrets: dict[str, str] = {}
        for interaction in interactions:
            self.finish(self.reserve(), interaction)

    @classmethod
    def load(cls, path: str | os.PathLike[str], **options: Any) -> Cassette:
        """
        Return the cassette in the file *path*: vcrpy's YAML version 1, or one of its relatives (replay C1).

        Args:
            path: The file.
            **options: As for ``Cassette``.

        Raises:
            FileNotFoundError: when there is no such file.
            DataError: naming file, interaction index and key, for whatever is no cassette. No code in it is run.
        """
        return cls(parse_cassette(Path(path).read_bytes(), str(path)), path=path, **options)

    def __repr__(self) -> str:
        return f"Cassette({str(self.path or 'in memory')!r}, {len(self)} interactions, {len(self.unused)} unused)"

    def __len__(self) -> int:
        return len(self.interactions)

    @property
    def interactions(self) -> tuple[Interaction, ...]:
        """What it holds, in the order in which the requests were started."""
        with self._lock:
            return tuple([s.interaction for s in self._slots if s.interaction is not None])

    @property
    def unused(self) -> tuple[int, ...]:
        """The indices of the interactions that were not played."""
        with self._lock:
            kept = [s for s in self._slots if s.interaction is not None]
            return tuple([i for i, slot in enumerate(kept) if not slot.used])

    def take(self, request: RecordedRequest) -> Interaction:
        """
        Return the first unused interaction whose request equals *request*, and mark it as used.

        Raises:
            CassetteMiss: when there is none.
        """
        clean = Cleaner(known_secrets(request.headers), base=self.redactor).request(request)
        key = self._matcher.key(clean)
        with self._lock:
            waiting = self._waiting.get(key)
            slot = waiting.popleft() if waiting else self._last.get(key) if self._repeat_last else None
            if slot is not None and slot.interaction is not None:
                slot.used = True
                return slot.interaction
        raise self._missed(clean)

    def reserve(self, secrets: dict[str, str] | None = None) -> Slot:
        """Take the next place for a request that starts now; *secrets* are kept out of its reply and of the file."""
        slot = Slot(secrets=secrets or {})
        with self._lock:
            self._slots.append(slot)
            self._secrets.update(slot.secrets)
        return slot

    def finish(self, slot: Slot, interaction: Interaction) -> None:
        """Put what was recorded into its place, ready to be played."""
        request = Cleaner(slot.secrets, base=self.redactor).request(interaction.request)
        key = self._matcher.key(request)
        with self._lock:
            slot.interaction, slot.asked = interaction, Known(request, key, used=False)
            self._waiting.setdefault(key, deque()).append(slot)
            self._last[key] = slot

    def assert_all_used(self) -> None:
        """
        Check that everything was played, and that nothing was missed.

        Raises:
            CassetteUnused: listing what was not played.
            CassetteMiss: the first miss, if somebody swallowed it.
        """
        unused, held = self.unused, self.interactions
        if unused:
            rest = "".join(f"\n  {i}: {held[i].request.method} {held[i].request.url}" for i in unused)
            missed = f"; {len(self.misses)} requests were missed, the first: {self.misses[0]}" if self.misses else ""
            msg = f"{len(unused)} of {len(held)} interactions of {self._source} were not played:{rest}{missed}"
            raise CassetteUnused(msg, unused=unused)
        if self.misses:
            raise self.misses[0]

    def save(self, path: str | os.PathLike[str] | None = None, *, allow_partial: bool = False) -> Path:
        """
        Write the file that plain vcrpy and ``load`` read, as a whole or not at all, and return its path (replay C2-C6).

        Everything is cleaned once more on its way to the file, which is then parsed back and scanned for secrets.

        Args:
            path: Where; the cassette's own path by default.
            allow_partial: Keep interactions whose reply was not read to its end.

        Raises:
            SecretFound: when a secret is left; nothing is written.
            DataError: when there is no path.
        """
        target = self.path if path is None else Path(path)
        if target is None:
            msg = "this cassette has no path; give one to save()"
            raise DataError(msg)
        cleaner = Cleaner(dict(self._secrets), base=self.redactor)
        kept = [_cleaned(i, cleaner) for i in self.interactions if i.complete or allow_partial]
        data = dump_cassette(kept)
        for index, interaction in enumerate(parse_cassette(data, str(target))):
            _refuse_secrets(interaction, cleaner, f"{target}: interactions[{index}]")
        replace_file(target, data)
        self.path = self.path or target
        return target

    @property
    def _source(self) -> str:
        return str(self.path) if self.path else "this cassette"

    def _missed(self, request: RecordedRequest) -> CassetteMiss:
        with self._lock:
            recorded = [attrs.evolve(s.asked, used=s.used) for s in self._slots if s.asked is not None]
        exists = self.path is None or self.path.exists()
        at = Situation(self._source, exists, recorded, self._matcher, self.hint, self.mode)
        reason, candidates = reason_of(request, at), nearest(request, at)
        message = describe_miss(request, at, reason, candidates)
        miss = CassetteMiss(message, reason=reason, request=request, candidates=candidates)
        with self._lock:
            self.misses.append(miss)
        return miss


def _cleaned(interaction: Interaction, cleaner: Cleaner) -> Interaction:
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
