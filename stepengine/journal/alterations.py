"""
Find alterations in the lines of a signed journal, and continue its chain of signatures.

Nothing of the journal is believed before a signature vouches for it. What was changed is named by the marks that the next
signature holds, in the numbers that records have now: what comes after a change is judged by itself.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

from stepengine.errors import JournalCorrupt, JournalError, StepEngineError
from stepengine.journal.history import History
from stepengine.journal.line_reader import read_lines
from stepengine.journal.records import TAIL_BYTES, TAIL_FORM, Head, verify_checksum
from stepengine.journal.signing import (
    JournalSignature,
    SignatureChain,
    SigningKey,
    compute_line_digest,
    is_valid_signature,
    key_fingerprint,
)

SHOWN_CHANGES = 20
"""About one screen of changes; further ones are only counted."""
FALSE_SIGNATURE = "record {}, a signature, was altered or was made with another key"
WRONG_CHECKSUM = "record {} was altered: its checksum is wrong"


def verify_and_restore_chain(key: SigningKey, content: bytes, history: History) -> SignatureChain:
    """
    Verify the signatures of a journal, and return the chain with which its writer continues.

    Args:
        key: The key for further signatures.
        content: The bytes of the journal.
        history: The parsed records of the journal.

    Raises:
        JournalCorrupt: when a signed record was changed.
        JournalError: when another key signed the journal.
    """
    if not content:
        return SignatureChain(key)
    scan = JournalScan([key.public])
    scan.scan_lines(content)
    if scan.problems:
        msg = (
            f"{history.name} does not match its signatures: {'; '.join(truncate_problems(scan.problems))}. Nothing was run. `stepengine journal check --key` "
            "lists the problems"
        )
        raise JournalCorrupt(msg)
    if scan.others:
        theirs = ", ".join(sorted({key_fingerprint(other) for other in scan.others}))
        msg = f"{history.name} is signed with {theirs}, but {key.path} has the key {key_fingerprint(key.public)}. Resume with the first key"
        raise JournalError(msg)
    return SignatureChain(
        key,
        scan.hash,
        records=scan.count,
        marks=scan.marks,
        at=history.last_at,
        is_open=bool(history.intents),
        is_closed=scan.is_closed,
    )


def find_head(content: bytes, name: str) -> Head | None:
    """Return the head of a journal, or ``None`` if the first line is not a valid head."""
    try:
        records = read_lines(content[: content.find(b"\n") + 1], name).records
    except StepEngineError:
        return None
    return records[0] if records and isinstance(records[0], Head) else None


def truncate_problems(problems: Sequence[str]) -> list[str]:
    """Return the first 20 problems, then a sentence with the number of omitted problems."""
    more = len(problems) - SHOWN_CHANGES
    return [*problems[:SHOWN_CHANGES], *([f"and {more} more"] if more > 0 else [])]


class JournalScan:
    """
    One scan of all lines of a journal.

    Args:
        trusted: The public keys of trusted signers.

    Attributes:
        count: The number of lines.
        last: The number of the line with the last signature; 0 without a signature.
        signature: The last signature, or ``None``.
        hash: The SHA-256 of all bytes.
        marks: The marks of the lines after the last signature.
        others: The keys of signatures by untrusted signers.
        digests: The SHA-256 of the bytes up to the end of each signature.
        problems: Sentences about lines that contradict a signature.
    """

    def __init__(self, trusted: Collection[str]) -> None:
        self._trusted = frozenset(trusted)
        self.count = self.last = 0
        self.signature: JournalSignature | None = None
        self.hash: Any = hashlib.sha256()
        self.marks: list[str] = []
        self.others: set[str] = set()
        self.digests: list[str] = []
        self.problems: list[str] = []
        self._found: list[str] = []
        self._false: list[int] = []
        self._unchecked: list[int] = []
        self._torn = 0

    @property
    def is_closed(self) -> bool:
        """Whether the last line is a signature that closes the journal."""
        return self.last == self.count and self.signature is not None and self.signature.closes

    def scan_lines(self, content: bytes) -> None:
        """Scan all lines of a journal, and record its signatures and problems."""
        end = content.rfind(b"\n") + 1
        self._torn = len(content) - end
        head = find_head(content, "")
        previous, link = 0, head is not None and head.link
        for line in content[:end].split(b"\n")[:-1]:
            self.count += 1
            if verify_checksum(line, previous) is None:
                self._unchecked.append(self.count)
            # The checksum that a line states for itself, so that an altered line does not make the next ones wrong.
            tail = TAIL_FORM.search(line, max(0, len(line) - TAIL_BYTES)) if link else None
            previous = 0 if tail is None else int(tail[1], 16)
            signature = self._parse_trusted_signature(line)
            if signature is not None:
                self._record_signature_problems(signature)
            self.hash.update(line + b"\n")
            if signature is None:
                self.marks.append(compute_line_digest(line))
            else:
                self._record_signature(signature)
        self.problems += [FALSE_SIGNATURE.format(number) for number in self._false if number > self.last]
        if not self.problems:
            # Of a signature's own line, the checksum alone is not signed by it, or by one after it.
            self.problems += [WRONG_CHECKSUM.format(number) for number in self._unchecked if number <= self.last]

    def _parse_trusted_signature(self, line: bytes) -> JournalSignature | None:
        """Return the valid signature by a trusted key in a line, else ``None``; record untrusted keys and invalid signatures."""
        signature = JournalSignature.from_line(line)
        if signature is None:
            return None
        if signature.key not in self._trusted:
            self.others.add(signature.key)
            return None
        if not is_valid_signature(signature):
            self._false.append(self.count)
            return None
        return signature

    def _record_signature(self, signature: JournalSignature) -> None:
        """Record a signature and start the span of records that the next one covers."""
        if signature.found:
            first, to = self.count - min(signature.found, len(self.marks)), self.count - 1
            self._found.append(
                f"{_format_record_range(first, to)} was unsigned when the run was resumed, and was signed then"
            )
        self.last, self.signature, self.marks = self.count, signature, []
        self.digests.append(self.hash.hexdigest())

    def describe_unsigned_parts(self) -> Iterator[str]:
        """Yield a sentence for each part of the journal that no signature covers."""
        yield from self._found
        if self._torn:
            yield f"{self._torn} bytes at the end are not a whole record: a crash interrupted the write, or the end was cut off"
        if self.signature is None:
            return
        if self.count > self.last:
            behind = " and follows the signature that closed the journal" if self.signature.closes else ""
            yield f"{_format_record_range(self.last + 1, self.count)} is not signed{behind}: anyone may have written it"
        elif not self.signature.closes:
            yield f"record {self.count} is the last one and does not close the journal: a crash ended the run, or later records were removed"

    # --- what a signature says of what stands before it ---------------------------------------------------------------

    def _record_signature_problems(self, signature: JournalSignature) -> None:
        """Record as problems the differences between the lines so far and a signature."""
        if signature.records == self.count - 1 and signature.digest == self.hash.hexdigest():
            return
        expected, first = signature.marks, self.last + 1
        known = len(self.problems)
        # The records between the signature before and those that this one has the marks of: theirs was removed.
        gap = signature.records - len(expected) - (0 if self.signature is None else self.signature.records + 1)
        marks = self.marks
        if gap < 0:
            self.problems.append(f"record {self.count}, a signature, is out of order: it was moved or repeated")
            return
        if gap:
            there = max(0, len(marks) - len(expected))
            self._add_missing_records_problem(gap, there, first)
            marks, first = marks[there:], first + there
        self.problems += describe_record_changes(expected, marks, first)
        if len(self.problems) == known and not known:
            wrong = [WRONG_CHECKSUM.format(number) for number in self._unchecked if number < self.count]
            self.problems += wrong or [
                f"{_format_record_range(1, self.count - 1)} may have been altered: together they do not match their signature"
            ]

    def _add_missing_records_problem(self, missing: int, remaining: int, first_number: int) -> None:
        """Report *missing* removed records without marks, one of them a signature; *remaining* lines from record *first_number* on are there."""
        false = [number for number in self._false if first_number <= number < first_number + remaining]
        for number in false:
            self.problems.append(FALSE_SIGNATURE.format(number))
        if remaining < missing - 1:
            self.problems.append(
                f"{_format_record_count(missing - remaining)} before record {first_number + remaining} was removed, including the signature"
            )
        elif not false:
            self.problems.append(
                f"the signature of {_format_record_range(first_number, first_number + missing - 2)} was removed or altered"
            )


def _format_record_range(first: int, to: int) -> str:
    """Return the numbers of records as text, such as ``each of the records 3 to 5``."""
    return f"record {first}" if first == to else f"each of the records {first} to {to}"


def _format_record_count(number: int) -> str:
    return "one record" if number == 1 else f"each of {number} records"


class _RecordPair(NamedTuple):
    """The present and the signed position of one record; both from 0."""

    now: int
    then: int


def describe_record_changes(expected: Sequence[str], actual: Sequence[str], first: int) -> list[str]:
    """Return a sentence for each removed, added, altered or moved signed record; *actual* starts at record *first*."""
    pairs = _match_positions(expected, actual)
    stayed = [pair for pair in pairs if pair[0] == pair[1]]
    if len(stayed) < len(pairs):
        longest = _find_longest_subsequence(pairs)
        stayed = longest if len(longest) > len(stayed) else stayed
    kept = {now for now, _ in stayed}
    moved = [pair for pair in pairs if pair[0] not in kept]
    told = list(_describe_moves(moved, expected, actual, first))
    gone, new = {then for _, then in moved}, {now for now, _ in moved}
    now, then = -1, -1
    for next_now, next_then in [*stayed, _RecordPair(len(actual), len(expected))]:
        if next_now - now > 1 or next_then - then > 1:  # of most nothing stands between
            come = [n for n in range(now + 1, next_now) if n not in new]
            lost = [n for n in range(then + 1, next_then) if n not in gone]
            both = min(len(come), len(lost))
            told += [f"record {first + n} was altered" for n in come[:both]]
            told += [f"record {first + n} was added" for n in come[both:]]
            if lost[both:]:
                place = f"record {first + next_now}"
                told.append(f"{_format_record_count(len(lost) - both)} before {place} was removed")
        now, then = next_now, next_then
    return told


def _match_positions(expected: Sequence[str], actual: Sequence[str]) -> list[_RecordPair]:
    """Return the positions of equal records, in present order; moved records match, too."""
    places: dict[str, list[int]] = {}
    for place, mark in reversed(list(enumerate(expected))):
        places.setdefault(mark, []).append(place)
    return [_RecordPair(now, places[mark].pop()) for now, mark in enumerate(actual) if places.get(mark)]


def _find_longest_subsequence(pairs: Sequence[_RecordPair]) -> list[_RecordPair]:
    """Return the longest subsequence of pairs whose order is unchanged."""
    ends: list[int] = []
    last: list[int] = []
    before: list[int] = []
    for index, (_, then) in enumerate(pairs):
        place = bisect_left(ends, then)
        if place == len(ends):
            ends.append(then)
            last.append(index)
        else:
            ends[place], last[place] = then, index
        before.append(last[place - 1] if place else -1)
    kept: list[_RecordPair] = []
    index = last[-1] if last else -1
    while index >= 0:
        kept.append(pairs[index])
        index = before[index]
    return kept[::-1]


def _describe_moves(
    moved: Sequence[_RecordPair], expected: Sequence[str], actual: Sequence[str], first: int
) -> Iterator[str]:
    """Yield a sentence for each moved record; two that changed places share one sentence."""
    swapped: set[tuple[int, int]] = set()
    for now, then in moved:
        if then < len(actual) and now < len(expected) and actual[then] == expected[now]:
            places = (now, then) if now < then else (then, now)
            if places not in swapped:
                swapped.add(places)
                yield f"records {first + places[0]} and {first + places[1]} were swapped"
        else:
            yield f"record {first + now} was moved: it was signed as record {first + then}"
