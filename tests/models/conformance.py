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
from tests.models.loops import judge, loops
from tests.models.recorded import FOLDER, NAMES, Recording, recordings

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
    ends = [recording.reply.find(marker) for marker in (recording.marker, recording.marker.replace(b':"', b': "'))]
    end = min(place for place in ends if place >= 0)
    events = recording.reply[:end].replace(b"\r\n", b"\n").split(b"\n\n")[:-1]
    reader = recording.reader()
    for event in events:
        reader.feed(event + b"\n\n")
        try:
            reader.finish()
        except TruncatedReply:
            continue
        raise AssertionError(recording.name)
    return "streams", len(events)


def main(folder: Path = FOLDER) -> int:
    """Print the table, the documented differences, and a line for what is not equal."""
    if not folder.is_dir():
        print(f"the folder with recorded traffic is absent ({folder}); nothing was checked")
        return 0
    counts: dict[str, Counter[str]] = {name: Counter() for name in NAMES.values()}
    unequal: list[str] = []
    for recording in recordings(folder):
        counts[NAMES[recording.wire]].update(tried(recording, unequal))
    for wire, name in NAMES.items():
        counts[name]["files"] = len({r.name.partition("#")[0] for r in recordings(folder) if r.wire == wire})
    reasons: Counter[tuple[str, str]] = Counter()
    for loop in loops(folder):
        name, verdict = NAMES[loop.first.wire], judge(loop)
        counts[name].update(["loops", {"cannot be built": "not ours"}.get(verdict.kind, verdict.kind)])
        reasons.update((name, f"{why} [{verdict.kind}]") for why in verdict.reasons)
        if verdict.kind == "different":
            unequal.append(f"{loop.name}: the next request differs")
    show([[name, *[str(count[c]) for c in COLUMNS]] for name, count in counts.items()])
    total: Counter[str] = sum(counts.values(), Counter())
    print(f"in all: {', '.join(f'{total[c]} {c}' for c in COLUMNS)}\n")
    for (name, why), count in sorted(reasons.items()):
        print(f"  {count:>3}  {name}: {why}")
    for line in unequal:
        print(f"not equal: {line}")
    return 1 if unequal else 0


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
