"""
The eight performance promises, each a few bounds, and the figures that no promise is about; both are read from a sheet.

A bound is about the ratio of two costs. Ratios are taken within a round, since absolute times drift with the machine.
"""

from __future__ import annotations

from typing import NamedTuple

from benchmarks.peers import SDKS
from benchmarks.sheet import Key, Sheet, Spread
from benchmarks.starts import LIST, PARTS

FAST = "bu_agent_sdk"
"""The fastest peer, in W1 and W2: it takes part in every round."""

OURS, BY_HAND = "stepengine", "DBOS by hand"

SPEAKING = ("openai_chat", "anthropic")
TOKENS = 2_000
"""The protocols in which a streamed reply of so many tokens is measured."""

KINDS = {"memory": "in memory", "file, to the system": "in a file"}
"""The kinds of journals that promises are about."""


class Bound(NamedTuple):
    """The most that one cost may be of another."""

    what: str
    one: Key
    other: Key
    most: float


class Promise(NamedTuple):
    """A promise, and the row of the specification that makes it."""

    row: str
    what: str
    bounds: tuple[Bound, ...]


class Verdict(NamedTuple):
    """Whether a bound holds; *found* is missing where it was not measured."""

    promise: Promise
    bound: Bound
    found: Spread | None

    @property
    def word(self) -> str:
        """Return the verdict in one word or two."""
        if self.found is None:
            return "not measured"
        return "holds" if self.found.median <= self.bound.most else "BROKEN"


class Figure(NamedTuple):
    """Something that is measured and not promised: a cost, or without a unit the ratio of two, or a count."""

    what: str
    one: Key
    other: Key | None = None
    unit: str = ""

    def spread(self, sheet: Sheet) -> Spread | None:
        """Return the figure, if it was measured."""
        return sheet.spread(self.one) if self.other is None else sheet.ratio(self.one, self.other)


def _step(count: int, engine: str = OURS) -> Key:
    return Key("W1", "step", engine, count)


def _recorded(kind: str, count: int) -> Key:
    return Key("W4", kind, OURS, count)


def _durable(count: int, engine: str = OURS) -> Key:
    return Key("W9", "step", engine, count)


def _start(name: str) -> Key:
    return Key("W7", "start", name, 1)


def _token(protocol: str, client: str) -> Key:
    return Key("W8", f"token, {protocol}", client, TOKENS)


def _run(engine: str) -> Key:
    return Key("W2", "run", engine, 1_000)


def _step_of_machine(kind: str) -> Key:
    return Key("W1", f"machine, {kind}", "machine", 1_000)


def _children(count: int) -> Key:
    return Key("W2", "children", OURS, count)


def _http(protocol: str, count: int, client: str = OURS) -> Key:
    return Key("W3", "steps", f"{client}, {protocol}", count)


def _watched(client: str) -> Key:
    return Key("W8", "step", client, 1_000)


PROMISES = (
    Promise(
        "performance:Q2",
        "a step against bu-agent-sdk",
        (
            Bound("N=1,000", _step(1_000), _step(1_000, FAST), 0.5),
            Bound("N=1,000, with a handler", _step(1_000, "stepengine_handler"), _step(1_000, FAST), 0.6),
            Bound("N=10", _step(10), _step(10, FAST), 1.5),
        ),
    ),
    Promise(
        "performance:Q1",
        "a step at N=10,000 against N=100",
        (
            Bound("plain", _step(10_000), _step(100), 1.3),
            *[
                Bound(f"recorded {place}", _recorded(kind, 10_000), _recorded(kind, 100), 1.3)
                for kind, place in KINDS.items()
            ],
            Bound("durable", _durable(10_000), _durable(100), 1.3),
        ),
    ),
    Promise(
        "performance:Q3", "1,000 runs at once against bu-agent-sdk", (Bound("a run", _run(OURS), _run(FAST), 1.5),)
    ),
    Promise(
        "performance:Q9",
        "a recorded step against one without a journal, N=1,000",
        tuple(
            Bound(place, _recorded(kind, 1_000), _recorded("no journal", 1_000), most)
            for (kind, place), most in zip(KINDS.items(), (1.6, 5.5), strict=True)
        ),
    ),
    Promise(
        "durable:UT20",
        "a durable step against DBOS by hand",
        (Bound("N=1,000", _durable(1_000), _durable(1_000, BY_HAND), 3.5),),
    ),
    Promise(
        "performance:Q13",
        "a usable import against pydantic and attrs",
        (Bound("CPU", _start("usable import"), _start(PARTS), 2.0),),
    ),
    Promise(
        "performance:Q13",
        "--help against typer and rich",
        (Bound("CPU", _start("stepengine --help"), _start(LIST), 2.0),),
    ),
    Promise(
        "performance:Q15",
        "a streamed token against raw httpx2 and jiter",
        tuple(Bound(protocol, _token(protocol, "stream"), _token(protocol, "floor"), 2.0) for protocol in SPEAKING),
    ),
)

FIGURES = (
    Figure(
        "a step at N=50,000 against N=100, collector off",
        _step(50_000)._replace(what="step, collector off"),
        _step(100)._replace(what="step, collector off"),
    ),
    *[
        Figure(
            f"a step of the machine alone against a generator with new states, {what}",
            _step_of_machine(kind),
            _step_of_machine("floor"),
        )
        for kind, what in {"plain": "no handler", "step": "a handler's STEP", "call": "a handler's ToolCall"}.items()
    ],
    Figure("kept for a finished run of 5 steps, messages included", Key("W2", "memory", OURS, 200), unit="bytes"),
    Figure("100 children of one parent against 100 runs", _children(100), Key("W2", "alone", OURS, 100)),
    Figure("a child among 4,000 against one among 100", _children(4_000), _children(100)),
    *[
        Figure(f"an HTTP step at N=100 against the SDK's loop, {name}", _http(name, 100), _http(name, 100, "bare"))
        for name in SDKS
    ],
    *[Figure(f"an HTTP step at N=300 against N=10, {name}", _http(name, 300), _http(name, 10)) for name in SDKS],
    *[
        Figure(
            f"a replayed step against its floor, from {kind}, N=1,000",
            _recorded(f"replay, {kind}", 1_000),
            _recorded("floor, replay", 1_000),
        )
        for kind in ("memory", "file")
    ],
    *[
        Figure(
            f"a replayed step at N=10,000 against N=1,000, from {kind}",
            _recorded(f"replay, {kind}", 10_000),
            _recorded(f"replay, {kind}", 1_000),
        )
        for kind in ("memory", "file")
    ],
    Figure(
        "playing a cassette of 200 requests against vcrpy",
        _recorded("cassette, playing", 200),
        Key("W4", "cassette, playing", "vcrpy", 200),
    ),
    *[
        Figure(
            f"a recorded step against one without a journal, {place}, N=10,000",
            _recorded(kind, 10_000),
            _recorded("no journal", 10_000),
        )
        for kind, place in KINDS.items()
    ],
    Figure(
        "a recorded step where five keys are known, in a file",
        _recorded("file, to the system, five keys", 1_000),
        _recorded("file, to the system", 1_000),
    ),
    *[
        Figure(f"a recorded step at N=50,000 against N=1,000, {place}", _recorded(kind, 50_000), _recorded(kind, 1_000))
        for kind, place in {**KINDS, "file, to the disk": "in a file on the disk", "sqlite": "in SQLite"}.items()
    ],
    Figure("syncs of an effect, journal on the disk", _recorded("syncs per effect", 10_000)),
    Figure("syncs of replaying and reading", _recorded("syncs of reading", 10_000)),
    Figure("resuming a journal of 10,000 records", _recorded("resuming", 10_000), unit="s"),
    Figure(
        "resuming a record of 10,000 against one of 1,000",
        _recorded("resuming, us per record", 10_000),
        _recorded("resuming, us per record", 1_000),
    ),
    Figure("SDKs and command line packages that an import loads", Key("W5", "heavy packages loaded", OURS, 1)),
    Figure(f"stepengine run to its first effect against {PARTS}", _start("first effect"), _start(PARTS)),
    Figure(
        "an installation without what the official SDKs bring",
        Key("W7", "weight beside the SDKs", OURS, 1),
        unit="MB",
    ),
    *[
        Figure(
            f"a token of an unobserved run against raw httpx2 and jiter, {protocol}",
            _token(protocol, "run"),
            _token(protocol, "floor"),
        )
        for protocol in SPEAKING
    ],
    *[
        Figure(
            f"a token through stream against one of an unobserved run, {protocol}",
            _token(protocol, "stream"),
            _token(protocol, "run"),
        )
        for protocol in SPEAKING
    ],
    Figure("an observed step against an unobserved one", _watched("stream"), _watched("run")),
    Figure(
        "the same, in a process that knows a key",
        _watched("stream, a key"),
        _watched("run, a key"),
    ),
)


def judge(sheet: Sheet) -> list[Verdict]:
    """Return the verdicts of all bounds, in the order of the promises."""
    return [
        Verdict(promise, bound, sheet.ratio(bound.one, bound.other)) for promise in PROMISES for bound in promise.bounds
    ]
