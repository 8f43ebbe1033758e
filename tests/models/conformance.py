"""
How the codecs fare against recorded traffic, counted: ``python -m tests.models.conformance [FOLDER]``.

The folder holds cassettes, with an ``index.jsonl`` and a list of ``closed_loops.jsonl`` or without them. Every recorded reply
has three readers: our codec, the official SDK of its wire, and the bill that stands in it. Streams are also read in pieces of
1, 7 and 4096 bytes, and cut before every event that precedes the end; every closed loop is encoded again and compared with the
recorded request (recorded uses R6 and R7).

Every file comes out as its worst exchange does:

- ``equal``: all readers read the same;
- ``client's doing``: what differs was made by whoever recorded it, such as a stream that he did not read to its end;
- ``documented``: it differs for a reason that stands here or in ``loops``;
- ``different``: anything else, and the exit status is 1. What the readers read is printed, a line for each.

Files that hold no HTTP exchanges (other YAML, websockets, local models) are counted apart.
"""

from __future__ import annotations

import json
import os
import sys
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
from yaml import YAMLError

from stepengine.data.models import ModelReply
from stepengine.errors import ModelError, TruncatedReply
from stepengine.models._failures import error_from_body
from tests.models.bills import Bill, bill_of, left_out, table
from tests.models.loops import Loop, Verdict, judge, loops
from tests.models.recorded import FOLDER, NAMES, Recording, index_of, json_in, recordings
from tests.models.second_readers import differences, ours_of, theirs_of

COLUMNS = ("files", "plain", "streams", "errors", "failed", "cuts", "read twice", "billed", "loops")
EQUAL, CLIENT, DOCUMENTED, DIFFERENT = WORST = ("equal", "client's doing", "documented", "different")
"""How an exchange, a loop and a file come out, the best first."""

BROKEN = frozenset({"protocol", "truncated"})
"""What an error says of a reply that our codecs do not understand; any other is the provider's own."""
TOKENS = frozenset({"prompt", "completion", "cached", "thought"})


@attrs.frozen
class Reason:
    """Why the SDK, or a bill, may say something else than we do."""

    why: str
    holds: Callable[[Recording, str, Any, Any], bool]


REASONS = (
    Reason(
        "Mistral's thinking stands in pieces of the content, of which the SDK of OpenAI knows nothing",
        lambda r, member, ours, theirs: r.service == "mistral" and member == "thinking" and not theirs,
    ),
    Reason(
        "Mistral says what was cached under a name of its own",
        lambda r, member, ours, theirs: r.service == "mistral" and member == "cached" and not theirs,
    ),
    Reason(
        "Groq's streams say their usage under x_groq",
        lambda r, member, ours, theirs: member in TOKENS and theirs is None and b"x_groq" in r.reply,
    ),
    Reason(
        "the SDK's accumulator forgets a usage behind which another chunk comes",
        lambda r, member, ours, theirs: member in TOKENS and theirs is None and r.stream,
    ),
    Reason(
        "tokens that a service counts in its total alone were thought, of which the SDK knows nothing",
        lambda r, member, ours, theirs: (
            member in {"completion", "thought"}
            and None not in (ours, theirs)
            and 0 < ours - theirs == in_total_alone(r)
        ),
    ),
    Reason(
        "a prompt that was blocked has no reason to stop, and the SDK takes a usage without figures for zero",
        lambda r, member, ours, theirs: b"blockReason" in r.reply and not theirs,
    ),
    Reason(
        "the SDK's accumulator refuses entries of a list that have no number of their own",
        lambda r, member, ours, theirs: member == "raised" and "to have an `index` key" in theirs,
    ),
)
"""What is known of other readers, and is not a fault of ours."""


def in_total_alone(recording: Recording) -> int | None:
    """How many tokens the total of a plain chat completion has more than its parts."""
    body = json_in(recording.reply)
    usage = body.get("usage") if isinstance(body, dict) else None
    if not isinstance(usage, dict) or recording.wire != "openai-chat":
        return None
    figures = [usage.get(name) for name in ("total_tokens", "prompt_tokens", "completion_tokens")]
    total, prompt, completion = [figure if type(figure) is int else 0 for figure in figures]
    return total - prompt - completion


@attrs.define
class Found:
    """What was found of one exchange."""

    kind: str
    cuts: int = 0
    verdict: str = EQUAL
    reasons: list[str] = attrs.field(factory=list)
    bill: Bill | None = None
    twice: bool = False

    def differ(self, what: str) -> None:
        """Note a difference that no reason explains."""
        self.verdict = DIFFERENT
        self.reasons.append(what)

    def worsen(self, verdict: str, why: str) -> None:
        """Note a difference that has its reason."""
        self.verdict = max(self.verdict, verdict, key=WORST.index)
        self.reasons.append(why)


def looked_at(recording: Recording) -> Found:
    """Read one exchange in every way; nothing that stands in it is a traceback."""
    try:
        return read(recording)
    except Exception as error:
        found = Found("different")
        found.differ(f"{type(error).__name__}: {str(error)[:200]}")
        return found


def read(recording: Recording) -> Found:
    if recording.status >= 400:
        assert isinstance(error_from_body(recording.reply, recording.status, {}, recording.call), ModelError)
        return Found("errors")
    found = Found("streams" if recording.stream else "plain")
    try:
        reply = in_every_way(recording, found)
    except (ModelError, ValueError) as error:
        return refused(recording, error)
    compare(recording, reply, found)
    found.bill = bill_of(recording, reply)
    compare_bills(found, found.bill)
    return found


def in_every_way(recording: Recording, found: Found) -> ModelReply:
    """Decode one recording, a stream also in pieces and cut before each event that precedes its end."""
    if not recording.stream:
        return recording.decoded()
    deltas, whole = recording.streamed(len(recording.reply))
    for piece in (1, 7, 4096):
        if recording.streamed(piece) != (deltas, whole):
            found.differ(f"in pieces of {piece} bytes it is another reply")
    reader = recording.reader()
    for event in before_the_end(recording):
        reader.feed(event)
        try:
            reader.finish()
        except TruncatedReply:
            found.cuts += 1
            continue
        found.differ(f"it is a reply already after {found.cuts + 1} events")
        break
    return whole


def before_the_end(recording: Recording) -> list[bytes]:
    """The events of a stream before the one that ends it; found by what the protocols say, and not by our accumulators."""
    if recording.wire == "bedrock":
        return recording.events
    events = [event + b"\n\n" for event in recording.reply.replace(b"\r\n", b"\n").split(b"\n\n")]
    wire = NAMES[recording.wire]
    ends = [number for number, event in enumerate(events) if is_end(wire, data_of(event))]
    if not ends:
        ends = [number for number, event in enumerate(events) if event.strip() == b"data: [DONE]"]
    return events[: ends[0]] if ends else []


def data_of(event: bytes) -> Any:
    lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
    try:
        return json.loads(b"\n".join(lines) or b"null")
    except ValueError:
        return None


def is_end(wire: str, event: Any) -> bool:
    """Whether an event ends the stream of a wire."""
    if not isinstance(event, dict):
        return False
    if wire in {"anthropic", "openai"}:
        ends = {"message_stop", "response.completed", "response.incomplete", "response.failed"}
        return event.get("type") in ends
    member, reason = ("candidates", "finishReason") if wire == "google" else ("choices", "finish_reason")
    return any(choice.get(reason) for choice in event.get(member) or ()) or "blockReason" in str(event)


def refused(recording: Recording, error: Exception) -> Found:
    """What comes of a reply that our codecs refuse: as it should where the SDK finds no whole reply in it, either."""
    found = Found("failed")
    if isinstance(error, ModelError) and error.kind not in BROKEN:
        return found
    if isinstance(error, TruncatedReply) and not before_the_end(recording):
        found.worsen(CLIENT, "whoever recorded the stream did not read it to its end")
        return found
    try:
        theirs = theirs_of(recording)
    except Exception:
        return found
    found.differ(f"{type(error).__name__}: {str(error)[:200]}; the SDK reads {theirs}")
    return found


def compare(recording: Recording, reply: ModelReply, found: Found) -> None:
    """Compare what we read with what the SDK reads; of Bedrock none of the three is a reader."""
    if recording.wire == "bedrock":
        return
    found.twice = True
    try:
        theirs = theirs_of(recording)
    except Exception as error:
        explain(recording, found, "raised", "a reply", f"{type(error).__name__}: {str(error)[:120]}")
        return
    ours = ours_of(reply)
    for member in differences(ours, theirs):
        explain(recording, found, member, getattr(ours, member), getattr(theirs, member))


def explain(recording: Recording, found: Found, member: str, ours: Any, theirs: Any) -> None:
    reason = next((r.why for r in REASONS if r.holds(recording, member, ours, theirs)), None)
    if reason is None:
        told = differences_told(ours, theirs)
        found.differ(f"{member}: {told}")
    elif reason not in found.reasons:
        found.worsen(DOCUMENTED, reason)


def differences_told(ours: Any, theirs: Any) -> str:
    return f"ours {str(ours)[:80]!r}, the SDK {str(theirs)[:120]!r}"


def compare_bills(found: Found, bill: Bill) -> None:
    """Compare what we would record with what the service says that it costs, and how many tokens it counts."""
    if bill.service is not None and bill.service != bill.ours:
        found.differ(f"the service says that it cost {bill.service}, ours {bill.ours}")
    if bill.tokens:
        found.differ(f"the service's total of tokens and ours: {bill.tokens}")


def judged(loop: Loop) -> Verdict:
    """How a loop came out; one that cannot even be read is different."""
    try:
        return judge(loop)
    except Exception as error:
        return Verdict(DIFFERENT, (f"{type(error).__name__}: {str(error)[:200]}",))


def kind_of(verdict: Verdict) -> str:
    """How a loop comes out: where every reason names the client that recorded it, it is his doing."""
    if verdict.kind == "cannot be built":
        return CLIENT
    if verdict.kind == DOCUMENTED and all("recording" in why for why in verdict.reasons):
        return CLIENT
    return verdict.kind


class Report:
    """What was found in a folder, as it is counted and told."""

    def __init__(self) -> None:
        self.counts: dict[str, Counter[str]] = {}
        self.files: dict[str, str] = {}
        self.reasons: Counter[tuple[str, str, str]] = Counter()
        self.unequal: list[str] = []
        self.foreign: list[str] = []
        self.bills: list[Bill] = []

    def entry(self, entry: dict[str, Any]) -> None:
        """Take a file."""
        if "foreign" in entry:
            self.foreign.append(entry["file"])
        elif "unreadable" in entry:
            self.differ(f"{entry['file']}: {entry['unreadable']}")

    def exchange(self, recording: Recording, found: Found) -> None:
        """Take an exchange."""
        name = recording.service or NAMES[recording.wire]
        counts = self.counts.setdefault(name, Counter())
        counts.update({found.kind: 1, "cuts": found.cuts, "read twice": int(found.twice)})
        counts["billed"] += int(found.bill is not None and found.bill.service is not None)
        self.bills += [found.bill] if found.bill is not None else []
        self.take(recording.name, name, found.verdict, found.reasons)

    def loop(self, loop: Loop, verdict: Verdict) -> None:
        """Take a closed loop."""
        name = NAMES[loop.first.wire]
        self.counts.setdefault(name, Counter())["loops"] += 1
        kind = kind_of(verdict)
        whys = verdict.reasons or (("the next request differs",) if kind == DIFFERENT else ())
        self.take(loop.name, name, kind, list(whys))

    def take(self, exchange: str, name: str, kind: str, reasons: list[str]) -> None:
        self.worsen(exchange, kind)
        if kind == DIFFERENT:
            self.unequal += [f"{exchange}: {why}" for why in reasons]
        else:
            self.reasons.update([(kind, name, why) for why in reasons])

    def differ(self, line: str) -> None:
        self.worsen(line.partition(": ")[0], DIFFERENT)
        self.unequal.append(line)

    def worsen(self, exchange: str, kind: str) -> None:
        """Let the file of an exchange be no better than *kind*."""
        file = exchange.partition("#")[0]
        self.files[file] = max(self.files.get(file, EQUAL), kind, key=WORST.index)

    def show(self, files: dict[str, set[str]]) -> None:
        """Print the table, the reasons, the bills, and by file what is not equal."""
        for name, counts in self.counts.items():
            counts["files"] = len(files.get(name, ()))
        grid([[name, *[str(counts[c]) for c in COLUMNS]] for name, counts in sorted(self.counts.items())])
        total: Counter[str] = sum(self.counts.values(), Counter())
        print(f"in all: {', '.join(f'{total[c]} {c}' for c in COLUMNS)}\n")
        for (kind, name, why), count in sorted(self.reasons.items()):
            print(f"  {count:>4}  {kind}, {name}: {why}")
        if self.bills:
            print("\nUS dollars:", *table(self.bills), *left_out(self.bills), sep="\n")
        kinds = Counter(self.files.values())
        print(f"\nby file: {', '.join(f'{kinds[kind]} {kind}' for kind in WORST)}", end="")
        print(f"; {len(self.foreign)} without HTTP exchanges" if self.foreign else "")
        for file, kind in sorted(self.files.items()):
            if kind != EQUAL:
                print(f"  {kind}: {file}")
        for line in self.unequal:
            print(f"not equal: {line}")


def grid(rows: list[list[str]]) -> None:
    """Print rows under their columns."""
    whole = [["service", *COLUMNS], *rows]
    widths = [max(len(row[i]) for row in whole) for i in range(len(whole[0]))]
    for row in whole:
        print("  ".join([cell.ljust(width) for cell, width in zip(row, widths, strict=True)]).rstrip())


def main(folder: Path = FOLDER) -> int:
    """Look at a folder and tell what was found; 1 where anything is different."""
    if not folder.is_dir():
        print(f"the folder with recorded traffic is absent ({folder}); nothing was checked")
        return 0
    try:
        entries, every, pairs = index_of(folder), recordings(folder), loops(folder)
    except (LookupError, TypeError, ValueError, AttributeError, OSError, YAMLError, zlib.error) as error:
        print(f"the index of {folder} cannot be followed: {type(error).__name__}: {error}")
        return 1
    report, files = Report(), dict[str, set[str]]()
    for entry in entries:
        report.entry(entry)
    for recording in every:
        files.setdefault(recording.service or NAMES[recording.wire], set()).add(recording.name.partition("#")[0])
        report.exchange(recording, looked_at(recording))
    for loop in pairs:
        report.loop(loop, judged(loop))
    report.show(files)
    return 1 if report.unequal else 0


def ended(folder: list[str]) -> int:
    """Run the command; a reader of its output that has seen enough is not an error."""
    try:
        status = main(*map(Path, folder[:1]))
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status


if __name__ == "__main__":
    sys.exit(ended(sys.argv[1:]))
