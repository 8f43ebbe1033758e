"""
Judges the budgets Q1 to Q15 from a sheet. Each is a bound that a median must keep; its spread stands beside it.

Budgets that compare with a peer are ratios of one round, since absolute times drift with the machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from benchmarks.peers import SDKS
from benchmarks.sheet import Key, Sheet, Spread
from benchmarks.starts import LIST, PARTS

FLAT = 1.3
STARTS = (
    ("usable import", "from stepengine import Engine, AgentDefinition, tool", PARTS, 2.0),
    ("stepengine --help", "stepengine --help", LIST, 2.0),
    ("first effect", "stepengine run to its first effect", PARTS, 4.5),
)
"""What is started, in words, its floor, and how many times as much it may cost."""

SPEAKING = ("openai_chat", "anthropic")
TOKENS = 2_000
"""The protocols in which a streamed reply of so many tokens is measured."""

A_THIRD = 4 / 3
"""How much more a token may cost with an observer."""
WATCHED_STEP = 2.5
"""How much more a step may cost with an observer: it has nine events, each an ordinary object that the hub sends on."""

MACHINE = 18.7
"""How many times as much as a generator that makes a new state a step of the machine may cost."""

REPLAY = {"memory": 6.0, "file": 6.6}
"""How many times as much as reading, checking and comparing four lines a replayed step may cost, from each kind of journal."""

RECORDED = {
    ("memory", 1_000): 1.6,
    ("memory", 10_000): 2.2,
    ("file, to the system", 1_000): 5.5,
    ("file, to the system", 10_000): 5.5,
}
"""How many times as much as a step without a journal a recorded one may cost, by the kind of journal and the steps of the run."""

KEPT = {"file, to the system": "a file", "file, to the disk": "a file on the disk", "sqlite": "SQLite"}
"""Journals that outlive their process, and what verdicts call them."""

OF_SDK = {"anthropic": 0.9, "openai_chat": 0.15, "openai": 0.15, "google": 0.2}
"""Each protocol with the share of the SDK's own loop that a step may cost at N=100."""


class Verdict(NamedTuple):
    """Whether a budget holds; *found* is missing where it was not measured."""

    budget: str
    what: str
    found: Spread | None
    most: float
    unit: str = "x"

    @property
    def word(self) -> str:
        """Return the verdict in one word or two."""
        if self.found is None:
            return "not measured"
        return "holds" if self.found.median <= self.most else "BROKEN"


def judge(sheet: Sheet) -> list[Verdict]:
    """Return all verdicts, in the order of the budgets."""
    return [
        *steps(sheet),
        *fan_out(sheet),
        *calls(sheet),
        *replays(sheet),
        *imports(sheet),
        *journals(sheet),
        *children(sheet),
        *watchers(sheet),
    ]


def ours(work: str, what: str, count: int) -> Key:
    """Return the key of one of our figures."""
    return Key(work, what, "stepengine", count)


def steps(sheet: Sheet) -> Iterator[Verdict]:
    """Judge Q1 and Q2."""
    fast = Key("W1", "step", "bu_agent_sdk", 1_000)
    yield Verdict(
        "Q1", "a step at N=10,000 against N=100", sheet.ratio(ours("W1", "step", 10_000), ours("W1", "step", 100)), FLAT
    )
    off = "step, collector off"
    long = max(sheet.counts("W1", off), default=50_000)
    yield Verdict(
        "Q1",
        f"a step at N={long:,} against N=100, collector off",
        sheet.ratio(ours("W1", off, long), ours("W1", off, 100)),
        FLAT,
    )
    yield Verdict("Q2", "a step at N=1,000 against bu-agent-sdk", sheet.ratio(ours("W1", "step", 1_000), fast), 0.5)
    handler = Key("W1", "step", "stepengine_handler", 1_000)
    yield Verdict("Q2", "the same, a handler that yields every step", sheet.ratio(handler, fast), 0.5)
    short = sheet.ratio(ours("W1", "step", 10), fast._replace(count=10))
    yield Verdict("Q2", "a step at N=10 against bu-agent-sdk", short, 1.5)
    floor = Key("W1", "machine, floor", "machine", 1_000)
    for kind, what in {"plain": "no handler", "step": "a handler's STEP", "call": "a handler's ToolCall"}.items():
        alone = sheet.ratio(floor._replace(what=f"machine, {kind}"), floor)
        yield Verdict("Q2", f"a step of the machine alone against a generator with new states, {what}", alone, MACHINE)


def fan_out(sheet: Sheet) -> Iterator[Verdict]:
    """Judge Q3."""
    fast = Key("W2", "run", "bu_agent_sdk", 1_000)
    yield Verdict("Q3", "1,000 runs at once against bu-agent-sdk", sheet.ratio(ours("W2", "run", 1_000), fast), 1.0)
    memory = sheet.samples.get(ours("W2", "memory", 200), {})
    kept = Spread.of([value / 1024 for value in memory.values()])
    yield Verdict("Q3", "kept for a finished run of 5 steps, messages included", kept, 20, "KiB")


def calls(sheet: Sheet) -> Iterator[Verdict]:
    """Judge Q4 and Q5."""
    for protocol, most in OF_SDK.items():
        mine, bare = (Key("W3", "steps", f"{who}, {protocol}", 100) for who in ("stepengine", "bare"))
        yield Verdict("Q4", f"an HTTP step at N=100 against the SDK's loop, {protocol}", sheet.ratio(mine, bare), most)
    for protocol in SDKS:
        long, short = (Key("W3", "steps", f"stepengine, {protocol}", count) for count in (300, 10))
        yield Verdict("Q5", f"an HTTP step at N=300 against N=10, {protocol}", sheet.ratio(long, short), 1.5)


def replays(sheet: Sheet) -> Iterator[Verdict]:
    """Judge Q6 and Q7."""
    for kind, most in REPLAY.items():
        what = f"replay, {kind}"
        share = sheet.ratio(ours("W4", what, 1_000), ours("W4", "floor, replay", 1_000))
        yield Verdict("Q6", f"a replayed step against its floor, from {kind}, N=1,000", share, most)
        growth = sheet.ratio(ours("W4", what, 10_000), ours("W4", what, 1_000))
        yield Verdict("Q6", f"a replayed step at N=10,000 against N=1,000, from {kind}", growth, FLAT)
    mine, theirs = (Key("W4", "cassette, playing", who, 200) for who in ("stepengine", "vcrpy"))
    yield Verdict("Q7", "playing a cassette of 200 requests against vcrpy", sheet.ratio(mine, theirs), 0.01)


def imports(sheet: Sheet) -> Iterator[Verdict]:
    """Judge Q8, Q13 and Q14."""
    loaded = sheet.spread(ours("W5", "heavy packages loaded", 1))
    yield Verdict("Q8", "SDKs and command line packages that an import loads", loaded, 0, "")
    for name, what, floor, most in STARTS:
        share = sheet.ratio(Key("W7", "start", name, 1), Key("W7", "start", floor, 1))
        yield Verdict("Q13", f"{what} against {floor}", share, most)
    weight = sheet.spread(ours("W7", "weight beside the SDKs", 1))
    yield Verdict("Q14", "an installation without what the official SDKs bring", weight, 40, "MB")


def journals(sheet: Sheet) -> Iterator[Verdict]:
    """Judge Q9 to Q11."""
    for (kind, count), most in RECORDED.items():
        share = sheet.ratio(ours("W4", kind, count), ours("W4", "no journal", count))
        yield Verdict("Q9", f"a recorded step against one without a journal, {kind}, N={count:,}", share, most)
    known, unknown = (ours("W4", f"file, to the system{more}", 1_000) for more in (", five keys", ""))
    yield Verdict("Q9", "a recorded step where five keys are known, a file", sheet.ratio(known, unknown), 1.2)
    for kind, name in KEPT.items():
        long = max(sheet.counts("W4", kind), default=50_000)
        growth = sheet.ratio(ours("W4", kind, long), ours("W4", kind, 1_000))
        yield Verdict("Q9", f"a recorded step at N={long:,} against N=1,000, {name}", growth, FLAT)
    count = max(sheet.counts("W4", "syncs per effect"), default=10_000)
    syncs = sheet.spread(ours("W4", "syncs per effect", count))
    yield Verdict("Q10", "syncs of an effect, journal on the disk", syncs, 1.5, "")
    reading = sheet.spread(ours("W4", "syncs of reading", count))
    yield Verdict("Q10", "syncs of replaying and reading", reading, 0, "")
    yield Verdict("Q11", "resuming a journal of 10,000 records", sheet.spread(ours("W4", "resuming", 10_000)), 1.0, "s")
    each = "resuming, us per record"
    growth = sheet.ratio(ours("W4", each, 10_000), ours("W4", each, 1_000))
    yield Verdict("Q11", "a record of 10,000 against one of 1,000", growth, FLAT)


def children(sheet: Sheet) -> Iterator[Verdict]:
    """Judge Q12."""
    few, many = (ours("W2", "children", count) for count in (100, 4_000))
    yield Verdict("Q12", "100 children of one parent against 100 runs", sheet.ratio(few, ours("W2", "alone", 100)), 1.5)
    yield Verdict("Q12", "a child among 4,000 against one among 100", sheet.ratio(many, few), FLAT)


def watchers(sheet: Sheet) -> Iterator[Verdict]:
    """Judge Q15."""
    for protocol in SPEAKING:
        floor, run, stream = (Key("W8", f"token, {protocol}", who, TOKENS) for who in ("floor", "run", "stream"))
        yield Verdict("Q15", f"a token through stream against its floor, {protocol}", sheet.ratio(stream, floor), 2.0)
        yield Verdict(
            "Q15", f"a token of a run that nobody watches against it, {protocol}", sheet.ratio(run, floor), 1.2
        )
        what = f"a token through stream against one of a run that nobody watches, {protocol}"
        yield Verdict("Q15", what, sheet.ratio(stream, run), A_THIRD)
    run, stream = (Key("W8", "step", who, 1_000) for who in ("run", "stream"))
    yield Verdict(
        "Q15", "a step that somebody watches against one that nobody does", sheet.ratio(stream, run), WATCHED_STEP
    )
    run, stream = (Key("W8", "step", f"{who}, a key", 1_000) for who in ("run", "stream"))
    yield Verdict("Q15", "the same, in a process that knows a key", sheet.ratio(stream, run), WATCHED_STEP)
