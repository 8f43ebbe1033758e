"""
How the codecs fare against the recorded traffic, counted: ``python -m tests.models.conformance``.

Every recorded reply is decoded, streams also in pieces of 1, 7 and 4096 bytes and cut before every event that precedes the
end; every closed loop is encoded again and compared with the recorded request (recorded uses R6 and R7).
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

from stepengine.errors import ModelError, TruncatedReply
from stepengine.models._failures import body_failure
from tests.models.loops import judge, loops
from tests.models.recorded import FOLDER, NAMES, Recording, recordings

COLUMNS = ("files", "plain", "streams", "errors", "cuts", "loops", "equal", "documented", "not ours", "different")


def check(recording: Recording) -> tuple[str, int]:
    """
    Decode one recording in every way.

    Returns:
        Which kind it is, and how many cuts of it were refused.
    """
    if recording.status >= 400:
        assert isinstance(body_failure(recording.reply, recording.status, {}, recording.call), ModelError)
        return "errors", 0
    if not recording.stream:
        recording.decoded()
        return "plain", 0
    deltas, whole = recording.streamed(len(recording.reply))
    for piece in (1, 7, 4096):
        assert recording.streamed(piece) == (deltas, whole), (recording.name, piece)
    end = recording.reply.index(recording.marker)
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


def main() -> int:
    """Print the table and the documented differences."""
    if not FOLDER.is_dir():
        print(f"the folder with recorded traffic is absent ({FOLDER}); nothing was checked")
        return 0
    counts: dict[str, Counter[str]] = {name: Counter() for name in NAMES.values()}
    for recording in recordings():
        kind, cuts = check(recording)
        counts[NAMES[recording.wire]].update({kind: 1, "cuts": cuts})
    for wire, name in NAMES.items():
        counts[name]["files"] = len({r.name.partition("#")[0] for r in recordings() if r.wire == wire})
    reasons: Counter[tuple[str, str]] = Counter()
    for loop in loops():
        name, verdict = NAMES[loop.first.wire], judge(loop)
        counts[name].update(["loops", {"cannot be built": "not ours"}.get(verdict.kind, verdict.kind)])
        reasons.update((name, f"{why} [{verdict.kind}]") for why in verdict.reasons)
    show([[name, *[str(count[c]) for c in COLUMNS]] for name, count in counts.items()])
    total: Counter[str] = sum(counts.values(), Counter())
    print(f"in all: {', '.join(f'{total[c]} {c}' for c in COLUMNS)}\n")
    for (name, why), count in sorted(reasons.items()):
        print(f"  {count:>3}  {name}: {why}")
    return 1 if total["different"] else 0


def show(rows: list[list[Any]]) -> None:
    """Print rows under their columns."""
    table = [["wire", *COLUMNS], *rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))


if __name__ == "__main__":
    sys.exit(main())
