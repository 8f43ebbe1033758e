"""
How the codecs fare against recorded traffic: ``python -m tests.models.conformance [FOLDER]``.

The folder holds cassettes, with an ``index.jsonl`` and a list of ``closed_loops.jsonl`` or without them. Every recorded reply
has three readers: our codec, the official SDK of its wire, and the bill that stands in it. Streams are also read in pieces of
1, 7 and 4096 bytes, and cut before every event that precedes the end; every closed loop is encoded again and compared with the
recorded request (recorded uses R6 and R7).

Every file comes out as its worst exchange does:

- ``equal``: all readers read the same;
- ``client's doing``: what differs was made by whoever recorded it, such as a stream that he did not read to its end;
- ``documented``: it differs for a reason that stands here or in ``loops``;
- ``different``: anything else, and the exit status is 1. What the readers read is printed, a line for each.
"""

from __future__ import annotations

import json
import sys
import zlib
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import attrs
from yaml import YAMLError

from stepengine.data.json import thaw
from stepengine.data.models import ModelReply
from stepengine.errors import ModelError, TruncatedReply
from stepengine.models._failures import error_from_body
from stepengine.models.pricing import LIST_PRICES
from tests.models.loops import Loop, judge, loops
from tests.models.recorded import FOLDER, NAMES, Recording, index_of, json_in, recordings
from tests.models.second_readers import differences, ours_of, theirs_of

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

    verdict: str = EQUAL
    reasons: list[str] = attrs.field(factory=list)

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
        found = Found()
        found.differ(f"{type(error).__name__}: {str(error)[:200]}")
        return found


def read(recording: Recording) -> Found:
    found = Found()
    if recording.status >= 400:
        assert isinstance(error_from_body(recording.reply, recording.status, {}, recording.call), ModelError)
        return found
    try:
        reply = in_every_way(recording, found)
    except (ModelError, ValueError) as error:
        return refused(recording, error)
    compare(recording, reply, found)
    compare_bills(recording, reply, found)
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
    for number, event in enumerate(before_the_end(recording), 1):
        reader.feed(event)
        try:
            reader.finish()
        except TruncatedReply:
            continue
        found.differ(f"it is a reply already after {number} events")
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
    found = Found()
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
        told = f"ours {str(ours)[:80]!r}, the SDK {str(theirs)[:120]!r}"
        found.differ(f"{member}: {told}")
    elif reason not in found.reasons:
        found.worsen(DOCUMENTED, reason)


def compare_bills(recording: Recording, reply: ModelReply, found: Found) -> None:
    """Compare what we would record with what the service says that it costs, and how many tokens it counts."""
    raw, usage = thaw(reply.provider_data.get("usage")), reply.usage
    raw = raw if isinstance(raw, dict) else {}
    stated = stated_in(raw, recording)
    if stated is not None:
        at = datetime(2026, 11, 1, tzinfo=UTC)
        ours = reply.cost if reply.cost is not None else LIST_PRICES.price_reply(recording.call.model, reply, at)
        if stated != ours:
            found.differ(f"the service says that it cost {stated}, ours {ours}")
    total = raw.get("total_tokens", raw.get("totalTokenCount"))
    if usage is not None and total is not None and total != usage.prompt_tokens + usage.completion_tokens:
        found.differ(f"the service counts {total} tokens, ours {usage.prompt_tokens} + {usage.completion_tokens}")


def stated_in(raw: dict[str, Any], recording: Recording) -> Decimal | None:
    """The dollars that a reply states: read here, and not by what our providers read them with."""
    cost: Any = raw.get("cost")
    if isinstance(cost, dict):
        cost = cost.get("total_cost")
    if cost is None and raw.get("cost_in_usd_ticks") is not None:
        return Decimal(raw["cost_in_usd_ticks"]) / 10**10
    if cost is None:
        return None if (told := recording.answer.get("x-litellm-response-cost")) is None else Decimal(told)
    found = Decimal(str(cost))
    if raw.get("is_byok"):
        found += Decimal(str((raw.get("cost_details") or {}).get("upstream_inference_cost") or 0))
    return found


def judged(loop: Loop) -> Found:
    """How a loop came out; where every reason names the client that recorded it, it is the client's doing."""
    found = Found()
    try:
        verdict = judge(loop)
    except Exception as error:
        found.differ(f"{type(error).__name__}: {str(error)[:200]}")
        return found
    if verdict.kind == DIFFERENT:
        found.differ("the next request differs")
    is_client = verdict.kind == "cannot be built" or all("recording" in why for why in verdict.reasons)
    for why in verdict.reasons:
        found.worsen(CLIENT if is_client else DOCUMENTED, why)
    return found


def main(folder: Path = FOLDER) -> int:
    """Look at a folder and print what is not equal; 1 where anything is different."""
    if not folder.is_dir():
        print(f"the folder with recorded traffic is absent ({folder}); nothing was checked")
        return 0
    try:
        entries, every, pairs = index_of(folder), recordings(folder), loops(folder)
    except (LookupError, TypeError, ValueError, AttributeError, OSError, YAMLError, zlib.error) as error:
        print(f"the index of {folder} cannot be followed: {type(error).__name__}: {error}")
        return 1
    outcomes = [(recording.name, looked_at(recording)) for recording in every]
    outcomes += [(loop.name, judged(loop)) for loop in pairs]
    outcomes += [(e["file"], Found(DIFFERENT, [e["unreadable"]])) for e in entries if "unreadable" in e]
    files: dict[str, str] = {}
    for name, found in outcomes:
        file = name.partition("#")[0]
        files[file] = max(files.get(file, EQUAL), found.verdict, key=WORST.index)
        for why in found.reasons:
            print(f"{found.verdict}: {name}: {why}")
    kinds = Counter(files.values())
    print(f"by file: {', '.join(f'{kinds[kind]} {kind}' for kind in WORST)}", end="")
    print(f"; {sum('foreign' in entry for entry in entries)} without HTTP exchanges")
    return 1 if kinds[DIFFERENT] else 0


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:2])))
