"""
``Cassette``: recorded HTTP traffic, looked up by the content of a request and not by its position.

Files are the business of ``cassette_files``, equality of requests that of ``cassette_matching``, misses that of ``cassette_misses``, and
HTTP objects that of ``transport``.
"""

from __future__ import annotations

import hmac
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import attrs
from attrs import frozen

from stepengine.data.json import thaw
from stepengine.errors import DataError, SecretFound
from stepengine.redaction import Redactor
from stepengine.testing.cassette_files import (
    CASSETTE_FILE,
    Interaction,
    RecordedRequest,
    dump_cassette,
    parse_cassette,
    parse_cassette_and_extras,
    read_cassette_bytes,
)
from stepengine.testing.cassette_matching import (
    ComparedRequest,
    Key,
    Matcher,
    SecretPairs,
    find_mark_key,
    have_equal_counted_marks,
    have_equal_headers,
)
from stepengine.testing.cassette_misses import (
    CassetteMiss,
    KnownRequest,
    Situation,
    describe_miss,
    find_miss_reason,
    find_nearest_requests,
)
from stepengine.testing.traffic_redaction import (
    SHAPES,
    Cleaner,
    clean_url,
    find_header_secrets,
    find_url_and_body_secrets,
    has_binary_body,
)
from stepengine.workspace.after_fork import Lock
from stepengine.workspace.atomic import replace_path

__tracebackhide__ = True  # a failed test ends at its author's line

MARK_KEY_BYTES = 8
MARK_DIGITS = 4


class CassetteUnused(AssertionError):
    """
    A cassette holds interactions that were not played.

    Attributes:
        unused: Their indices.
    """

    def __init__(self, message: str, *, unused: tuple[int, ...]) -> None:
        super().__init__(message)
        self.unused = unused

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(CassetteUnused, unused=self.unused), (str(self),)


class OpenExchange(Protocol):
    """A request that is being recorded."""

    def finish(self, *, read_to_end: bool) -> None:
        """Store the exchange with the part of its reply that was read."""

    def finish_if_complete(self) -> None:
        """Store the exchange if its reply is complete."""


@frozen
class UnrecordedReply:
    """
    A reply that the program received and that is not recorded.

    Attributes:
        method: The method of the request.
        url: The URL, without secrets.
        status: The status code of the reply; 0 if there was none.
        reason: ``"error_status"``, ``"no_reply"``, ``"not_read"`` if the client closed the stream before its end, ``"cut"`` if the
            stream ended early, ``"presigned"`` if the URL is a credential itself, ``"other_client"`` for a connection of a client
            that is not recorded.
    """

    method: str
    url: str
    status: int
    reason: str

    def __str__(self) -> str:
        why = {
            "error_status": f"status {self.status}",
            "no_reply": "the request got no reply",
            "not_read": "the reply was not read to its end",
            "cut": "the stream ended before its last event",
            "presigned": "the URL itself is a credential, so a replay cannot answer it",
            "other_client": "it did not use a recorded library, such as http.client, httpx or aiohttp",
        }
        return f"{self.method} {self.url}: {why[self.reason]}"


@attrs.define(eq=False)
class Slot:
    """
    The position of an interaction in a cassette, reserved when its request starts.

    Attributes:
        interaction: The recorded interaction; ``None`` while it is running, and if it is not stored.
        known: The request with its compared parts.
        used: Whether it was played.
        secrets: Secret values of the request's headers, to be kept out of the reply.
    """

    interaction: Interaction | None = None
    known: KnownRequest | None = None
    used: bool = False
    secrets: dict[str, str] = attrs.field(factory=dict, repr=False)


class Cassette:
    """
    Recorded HTTP traffic. One cassette serves many clients, sync and async, of several providers, in threads and tasks.

    Args:
        interactions: The recorded interactions.
        path: The file, for messages and for ``save``.
        ignore: JSON pointers of request members that are not compared, such as ``"/metadata/user_id"``.
        ignore_headers: Request headers that are not compared, such as ``"x-run-id"``, in addition to those that never are.
        repeat_last: Play the last matching interaction again when all of them are used.
        hint: The command that records again, for the message of a miss.
        redactor: Redacts requests and replies; by default texts that look like keys, and members whose names indicate a secret.
        mark_key: The key of the marks that distinguish secrets of one name; by default that of *interactions*, or a new one.

    Attributes:
        misses: All misses so far, including those that the program caught.
        left_out: Replies that were not recorded.
        open_exchanges: The exchanges that are being recorded.
        extras: Further data that ``save`` writes with the interactions.
        mode: The recording mode of a test; ``"none"`` for a cassette outside of tests.
    """

    mode: str = "none"

    def __init__(
        self,
        interactions: Iterable[Interaction] = (),
        *,
        path: str | os.PathLike[str] | None = None,
        ignore: Iterable[str] = (),
        ignore_headers: Iterable[str] = (),
        repeat_last: bool = False,
        hint: str | None = None,
        redactor: Redactor = SHAPES,
        mark_key: str | None = None,
    ) -> None:
        interactions = tuple(interactions)
        if mark_key is None:
            mark_key = find_mark_key(interactions) if interactions else secrets.token_hex(MARK_KEY_BYTES)
        self.path = None if path is None else Path(path)
        self.misses: list[CassetteMiss] = []
        self.left_out: list[UnrecordedReply] = []
        self.open_exchanges: set[OpenExchange] = set()
        self.extras: dict[str, Any] = {}
        self.hint = hint
        self.mark_key = mark_key
        self.redactor = make_marking_redactor(redactor, mark_key)
        self._matcher = Matcher(tuple(ignore), tuple(ignore_headers))
        self._repeat_last = repeat_last
        self._lock = Lock()
        self._slots: list[Slot] = []
        self._waiting: dict[Key, list[Slot]] = {}
        self._slots_by_key: dict[Key, list[Slot]] = {}
        self._places_of_marks: dict[Key, set[frozenset[tuple[str, int]]]] = {}
        self._pairs = SecretPairs()
        self._secrets: dict[str, str] = {}
        for interaction in interactions:
            self._fill_slot(self.reserve(), interaction)

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
        interactions, extras = parse_cassette_and_extras(read_cassette_bytes(path), str(path))
        cassette = cls(interactions, path=path, **options)
        cassette.extras = extras
        return cassette

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
    def complete_interactions(self) -> tuple[Interaction, ...]:
        """The interactions that can be replayed, which ``save`` writes."""
        return tuple([interaction for interaction in self.interactions if interaction.is_playable])

    @property
    def unscanned_bodies(self) -> tuple[str, ...]:
        """A line for each body that is not text, in which only known secrets are searched."""
        return tuple(
            [
                f"{interaction.request.method} {interaction.request.url}: its {what} is not text"
                for interaction in self.complete_interactions
                for what, message in (("body", interaction.request), ("reply", interaction.response))
                if has_binary_body(message)
            ]
        )

    @property
    def unused(self) -> tuple[int, ...]:
        """The indexes of the interactions that were not played."""
        with self._lock:
            kept = [s for s in self._slots if s.interaction is not None]
            return tuple([i for i, slot in enumerate(kept) if not slot.used])

    def consume(self, request: RecordedRequest) -> Interaction:
        """
        Return the next unused interaction for *request*, and mark it as used; with ``repeat_last``, the last one again if all are used.

        Raises:
            CassetteMiss: when there is none.
        """
        clean = Cleaner(find_header_secrets(request.headers), base=self.redactor).clean_request(request)
        asked = self._matcher.extract_compared_parts(clean)
        with self._lock:
            slot = self._find_slot_and_pair_secrets(asked, self._waiting.get(asked.key, ()))
            if slot is not None:
                self._waiting[asked.key].remove(slot)
            elif self._repeat_last:
                slot = self._find_slot_and_pair_secrets(asked, self._slots_by_key.get(asked.key, ())[::-1])
            if slot is not None and slot.interaction is not None:
                slot.used = True
                return slot.interaction
        raise self._make_and_store_miss(clean)

    def _find_slot_and_pair_secrets(self, request: ComparedRequest, slots: Sequence[Slot]) -> Slot | None:
        """Return the first of *slots* whose request equals *request*, and store which secrets correspond; None if there is none."""
        # Another machine may have no use for a credential, such as the token of a session. Where the recording has requests with
        # and without it, they are different requests.
        exact = frozenset(request.marks) in self._places_of_marks.get(request.key, ())
        for fits in (self._pairs.can_match, self._pairs.has_no_recorded_secret):
            for slot in slots:
                known = slot.known
                if (
                    known is not None
                    and have_equal_headers(known.asked, request, is_complete=known.has_all_headers)
                    and have_equal_counted_marks(
                        known.asked, request, is_complete=known.has_all_headers and self.mark_key != ""
                    )
                    and (not exact or known.asked.marks.keys() == request.marks.keys())
                    and fits(known.asked, request)
                ):
                    self._pairs.add_pairs(known.asked, request)
                    return slot
        return None

    def reserve(self, secrets: dict[str, str] | None = None) -> Slot:
        """Reserve the next position for a request that starts now; *secrets* are removed from its reply and the file."""
        slot = Slot(secrets=secrets or {})
        with self._lock:
            self._slots.append(slot)
            self._secrets.update(slot.secrets)
        return slot

    def finish(self, slot: Slot, interaction: Interaction) -> None:
        """Store a recorded interaction in its slot without its secrets, ready to be played."""
        clean = _redact_interaction(interaction, Cleaner(slot.secrets, base=self.redactor))
        if "chunks" in clean.extras and clean.response.body != interaction.response.body:
            clean = attrs.evolve(clean, extras={n: v for n, v in clean.extras.items() if n != "chunks"})
        self._fill_slot(slot, attrs.evolve(clean, mark_key=self.mark_key))

    def _fill_slot(self, slot: Slot, interaction: Interaction) -> None:
        """Store *interaction* in its slot, and make it findable by its request."""
        request = Cleaner(slot.secrets, base=self.redactor).clean_request(interaction.request)
        asked = self._matcher.extract_compared_parts(request)
        with self._lock:
            slot.interaction = interaction
            slot.known = KnownRequest(request, asked, used=False, has_all_headers=bool(interaction.mark_key))
            self._waiting.setdefault(asked.key, []).append(slot)
            self._slots_by_key.setdefault(asked.key, []).append(slot)
            self._places_of_marks.setdefault(asked.key, set()).add(frozenset(asked.marks))
            self._pairs.add_recorded_marks(asked.marks.values())

    def assert_all_used(self) -> None:
        """
        Raise an error if an interaction was not played or a request found no recording.

        Raises:
            CassetteUnused: listing the interactions that were not played.
            CassetteMiss: the first miss, even if the program caught it.
        """
        unused, held = self.unused, self.interactions
        # What was not played comes first, since its message tells of the misses, too.
        if unused:
            rest = "".join(f"\n  {i}: {held[i].request.method} {held[i].request.url}" for i in unused)
            missed = (
                f"; {len(self.misses)} requests had no recording; the first: {self.misses[0]}" if self.misses else ""
            )
            msg = f"{len(unused)} of {len(held)} interactions of {self._source_name} were not played:{rest}{missed}"
            raise CassetteUnused(msg, unused=unused)
        if self.misses:
            raise self.misses[0]

    def save(self, path: str | os.PathLike[str] | None = None, *, include_partial: bool = False) -> Path:
        """
        Write the cassette without secrets and incomplete interactions, and return the path. vcrpy and ``load`` can read the file.

        Everything is cleaned once more on its way to the file, which is then parsed back and scanned for secrets. If a secret is
        left in an interaction, a file that exists stays as it was, and a new one gets the other interactions.

        Args:
            path: Where; the cassette's own path by default.
            include_partial: Whether to save interactions whose reply was not read to its end.

        Raises:
            SecretFound: when a secret is left; it names the interactions that were not written.
            DataError: when there is no path, or the file there is not a cassette.
        """
        target = self.path if path is None else Path(path)
        if target is None:
            msg = "this cassette has no path; pass one to save()"
            raise DataError(msg)
        CASSETTE_FILE.check(target)
        for exchange in [*self.open_exchanges]:
            exchange.finish_if_complete()
        cleaner = Cleaner(dict(self._secrets), base=self.redactor)
        kept = [_redact_interaction(i, cleaner) for i in self.interactions if i.is_playable or include_partial]
        data = dump_cassette(kept, self.extras)
        hits = _find_remaining_secrets(parse_cassette(data, str(target)), cleaner)
        if hits and target.exists():
            raise _make_secret_error(hits, f"{target} is unchanged")
        clean = [interaction for index, interaction in enumerate(kept) if index not in hits]
        if clean or not hits:
            target.parent.mkdir(parents=True, exist_ok=True)
            replace_path(target, dump_cassette(clean, self.extras) if hits else data)
            self.path = self.path or target
        if hits:
            raise _make_secret_error(
                hits, f"{target} contains the other {len(clean)}" if clean else "nothing was written"
            )
        return target

    def store_unrecorded_reply(self, reply: UnrecordedReply, slot: Slot | None = None) -> None:
        """Store the fact that a reply was not recorded; a connection counts once."""
        if reply.reason != "other_client" or reply not in self.left_out:
            self.left_out.append(reply)

    def remove_miss(self, miss: CassetteMiss) -> None:
        """Remove a miss: another source answers the request."""
        self.misses.remove(miss)

    def has_replies_of_transport(self, name: str) -> bool:
        """Return True if the cassette has replies of the program's own transport *name*."""
        return any(interaction.extras.get("transport") == name for interaction in self.interactions)

    @property
    def _source_name(self) -> str:
        """The path of the file in messages; ``"this cassette"`` without one."""
        return str(self.path) if self.path else "this cassette"

    def _make_and_store_miss(self, request: RecordedRequest) -> CassetteMiss:
        """Return the error of a request without recording, with its reason and the nearest requests; also add it to the misses."""
        with self._lock:
            recorded = [attrs.evolve(s.known, used=s.used) for s in self._slots if s.known is not None]
        exists = self.path is None or self.path.exists()
        at = Situation(self._source_name, exists, recorded, self._matcher, self.hint, self.mode)
        reason, candidates = find_miss_reason(request, at), find_nearest_requests(request, at)
        message = describe_miss(request, at, reason, candidates)
        miss = CassetteMiss(message, reason=reason, request=request, candidates=candidates)
        with self._lock:
            self.misses.append(miss)
        return miss


def make_marking_redactor(redactor: Redactor, key: str) -> Redactor:
    """
    Return a redactor whose placeholders distinguish secrets of one name; *redactor* itself if *key* is empty.

    A mark has 16 bits: enough for the secrets of one recording, and too few to find out a password by trying.
    """
    if not key:
        return redactor
    secret = bytes.fromhex(key)
    return redactor.with_marks(
        lambda text: hmac.digest(secret, text.encode(errors="surrogatepass"), "sha256").hex()[:MARK_DIGITS]
    )


def _redact_interaction(interaction: Interaction, cleaner: Cleaner) -> Interaction:
    """Return an interaction without secrets; the reply also loses the credentials in the request's URL and body."""
    request = cleaner.clean_request(interaction.request)
    # The same value in another request is compared as it is, so this holds for the reply alone.
    echoed = find_url_and_body_secrets(interaction.request)
    response = Cleaner({**cleaner.known, **echoed}, base=cleaner.base).clean_response(interaction.response)
    extras = dict(interaction.extras)
    if "error" in extras:  # which may quote the address and the reply
        extras["error"] = cleaner.clean_json_value(thaw(extras["error"]))
    return attrs.evolve(interaction, request=request, response=response, extras=extras)


@frozen
class _Hit:
    """
    A secret in an interaction.

    Attributes:
        exchange: The interaction in messages: its index, method and URL.
        place: The location of the secret, such as ``"response/body"``.
        rule: The kind or the name of the secret.
    """

    exchange: str
    place: str
    rule: str


def _find_remaining_secrets(interactions: Iterable[Interaction], cleaner: Cleaner) -> dict[int, _Hit]:
    """Return the first remaining secret of each interaction that has one, by index."""
    found = {}
    for index, interaction in enumerate(interactions):
        for place, rule in _iterate_remaining_secrets(interaction, cleaner):
            # The URL of a request that holds a secret may be where it stands.
            url = "" if place.startswith("request") else f" {clean_url(interaction.request.url)}"
            found[index] = _Hit(f"interactions[{index}], {interaction.request.method}{url},", place, rule)
            break
    return found


def _iterate_remaining_secrets(interaction: Interaction, cleaner: Cleaner) -> Iterator[tuple[str, str]]:
    """Yield the place and the rule of each secret that is left."""
    yield from [(f"request/{place}", rule) for place, rule in cleaner.find_remaining_secrets(interaction.request)]
    yield from [(f"response/{place}", rule) for place, rule in cleaner.find_remaining_secrets(interaction.response)]
    error = thaw(interaction.extras.get("error"))
    if cleaner.clean_json_value(error) != error:
        yield "x_stepengine/error", "error"


def _make_secret_error(hits: Mapping[int, _Hit], outcome: str) -> SecretFound:
    """Return the error about interactions with secrets; *outcome* describes the file."""
    listed = "\n".join(
        [f"  {hit.exchange} contains a secret at {hit.place} (rule {hit.rule})" for hit in hits.values()]
    )
    msg = f"{len(hits)} recorded interaction(s) contain a secret and were not written; {outcome}. Remove it from the traffic\n{listed}"
    first = next(iter(hits.values()))
    return SecretFound(msg, path=first.place, rule=first.rule)
