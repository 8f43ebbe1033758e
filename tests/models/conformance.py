"""
How the codecs fare against recorded traffic, counted: ``python -m tests.models.conformance [FOLDER]``.

The folder holds cassettes, with an ``index.jsonl`` and a list of ``closed_loops.jsonl`` or without them. Every file that is
not equal, and every reply that cannot be decoded, is one line.

Every recorded reply is decoded, streams also in pieces of 1, 7 and 4096 bytes and cut before every event that precedes the
end; every closed loop is encoded again and compared with the recorded request (recorded uses R6 and R7).
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

from stepengine.errors import ModelError, TruncatedReply
from stepengine.models._failures import body_failure
from tests.models.loops import Loop, Verdict, judge, loops
from tests.models.recorded import FOLDER, NAMES, Recording, index_of, recordings

COLUMNS = (
    "files",
    "plain",
    "streams",
    "errors",
    "failed",
    "cuts",
    "loops",
    "equal",
    "documented",
    "not ours",
    "different",
)


BROKEN = frozenset({"protocol", "truncated"})
"""What an error says of a reply that our codecs do not understand; any other is the provider's own."""


def check(recording: Recording) -> tuple[str, int]:
    """
    Decode one recording in every way.

    Returns:
        Which kind it is, ``"failed"`` where the reply itself ends with an error, and how many cuts of it were refused.
    """
    try:
        return decoded(recording)
    except TruncatedReply:
        raise
    except ModelError as error:
        if error.kind in BROKEN:
            raise
        return "failed", 0


def decoded(recording: Recording) -> tuple[str, int]:
    """Decode one recording in every way, whose reply is whole."""
    if recording.status >= 400:
        assert isinstance(body_failure(recording.reply, recording.status, {}, recording.call), ModelError)
        return "errors", 0
    if not recording.stream:
        recording.decoded()
        return "plain", 0
    deltas, whole = recording.streamed(len(recording.reply))
    for piece in (1, 7, 4096):
        assert recording.streamed(piece) == (deltas, whole), (recording.name, piece)
    events, reader = recording.events, recording.reader()
    for event in events:
        reader.feed(event)
        try:
            reader.finish()
        except TruncatedReply:
            continue
        raise AssertionError(recording.name)
    return "streams", len(events)


def main(folder: Path = FOLDER) -> int:
    """Print the table, the documented differences, and by file what is not equal."""
    if not folder.is_dir():
        print(f"the folder with recorded traffic is absent ({folder}); nothing was checked")
        return 0
    try:
        entries, every, pairs = index_of(folder), recordings(folder), loops(folder)
    except (LookupError, TypeError, ValueError, AttributeError, OSError) as error:
        print(f"the index of {folder} cannot be followed: {type(error).__name__}: {error}")
        return 1
    counts: dict[str, Counter[str]] = {name: Counter() for name in NAMES.values()}
    unequal = [f"{entry['file']}: {entry['unreadable']}" for entry in entries if "unreadable" in entry]
    verdicts: dict[str, str] = {file_of(line): "different" for line in unequal}
    for recording in every:
        known = len(unequal)
        counts[NAMES[recording.wire]].update(tried(recording, unequal))
        worsen(verdicts, recording.name, "equal" if len(unequal) == known else "different")
    for wire, name in NAMES.items():
        counts[name]["files"] = len({file_of(r.name) for r in every if r.wire == wire})
    reasons: Counter[tuple[str, str]] = Counter()
    for loop in pairs:
        name, verdict = NAMES[loop.first.wire], judged(loop)
        kind = {"cannot be built": "not ours"}.get(verdict.kind, verdict.kind)
        counts[name].update(["loops", kind])
        worsen(verdicts, loop.name, kind)
        reasons.update((name, f"{why} [{verdict.kind}]") for why in verdict.reasons)
        if verdict.kind == "different":
            unequal.append(f"{loop.name}: the next request differs{''.join(f': {why}' for why in verdict.reasons)}")
    show([[name, *[str(count[c]) for c in COLUMNS]] for name, count in counts.items()])
    total: Counter[str] = sum(counts.values(), Counter())
    print(f"in all: {', '.join(f'{total[c]} {c}' for c in COLUMNS)}\n")
    for (name, why), count in sorted(reasons.items()):
        print(f"  {count:>3}  {name}: {why}")
    tell(verdicts)
    for line in unequal:
        print(f"not equal: {line}")
    return 1 if unequal else 0


WORST = ("equal", "documented", "not ours", "different")
"""How a file comes out: as its worst exchange does. What is documented is the recording client's own doing or ours, with its reason."""


def file_of(name: str) -> str:
    """The file of an exchange or a loop, or of a line about one."""
    return name.partition(": ")[0].partition("#")[0]


def worsen(verdicts: dict[str, str], name: str, kind: str) -> None:
    """Let a file be no better than *kind*."""
    file = file_of(name)
    verdicts[file] = max(verdicts.get(file, WORST[0]), kind, key=WORST.index)


def tell(verdicts: dict[str, str]) -> None:
    """Print how many files came out how, and by name those that are not equal."""
    counted = Counter(verdicts.values())
    print(f"by file: {', '.join(f'{counted[kind]} {kind}' for kind in WORST)}")
    for file, kind in sorted(verdicts.items()):
        if kind != WORST[0]:
            print(f"  {kind}: {file}")


def judged(loop: Loop) -> Verdict:
    """How a loop came out; one that cannot even be read is different."""
    try:
        return judge(loop)
    except Exception as error:
        return Verdict("different", (f"{type(error).__name__}: {str(error)[:200]}",))


def tried(recording: Recording, unequal: list[str]) -> dict[str, int]:
    """Return what a recording counts as; one that our codecs do not take is a line of *unequal*."""
    try:
        kind, cuts = check(recording)
    except Exception as error:
        unequal.append(f"{recording.name}: {type(error).__name__}: {str(error)[:200]}")
        return {"different": 1}
    return {kind: 1, "cuts": cuts}


def show(rows: list[list[Any]]) -> None:
    """Print rows under their columns."""
    table = [["wire", *COLUMNS], *rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:2])))
