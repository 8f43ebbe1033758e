"""
The eight performance promises, and the figures that no promise is about; both are read from a sheet.

A promise is about ratios of two costs. Ratios are taken within a round, since absolute times drift with the machine.
"""

from __future__ import annotations

from math import inf
from typing import Any, NamedTuple

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


class Figure(NamedTuple):
    """Something that is measured: a cost, or without a unit the ratio of two, or a count; a promise says the most."""

    what: str
    one: Key
    other: Key | None = None
    unit: str = ""
    most: float = inf

    def spread(self, sheet: Sheet) -> Spread | None:
        """Return the figure, if it was measured."""
        return sheet.spread(self.one) if self.other is None else sheet.ratio(self.one, self.other)


class Promise(NamedTuple):
    """A promise, and the row of the specification that makes it."""

    row: str
    what: str
    figures: tuple[Figure, ...]


class Verdict(NamedTuple):
    """Whether a figure of a promise holds; *found* is missing where it was not measured."""

    promise: Promise
    figure: Figure
    found: Spread | None

    @property
    def word(self) -> str:
        """Return the verdict in one word or two."""
        if self.found is None:
            return "not measured"
        return "holds" if self.found.median <= self.figure.most else "BROKEN"


def _by(what: str, one: Key, most: float = inf, /, **other: Any) -> Figure:
    """Return the ratio of a cost to that of another engine, work or size."""
    return Figure(what, one, one._replace(**other), most=most)


def _step(count: int, engine: str = OURS) -> Key:
    return Key("W1", "step", engine, count)


def _recorded(kind: str, count: int) -> Key:
    return Key("W4", kind, OURS, count)


def _start(name: str) -> Key:
    return Key("W7", "start", name, 1)


def _token(protocol: str, client: str) -> Key:
    return Key("W8", f"token, {protocol}", client, TOKENS)


_durable = Key("W9", "step", OURS, 1_000)
PROMISES = (
    Promise("performance:Q2", "a step against bu-agent-sdk", (
        _by("N=1,000", _step(1_000), 0.5, engine=FAST),
        _by("N=1,000, with a handler", _step(1_000, "stepengine_handler"), 0.6, engine=FAST),
        _by("N=10", _step(10), 1.5, engine=FAST),
    )),
    Promise("performance:Q1", "a step at N=10,000 against N=100", (
        _by("plain", _step(10_000), 1.3, count=100),
        *[_by(f"recorded {place}", _recorded(kind, 10_000), 1.3, count=100) for kind, place in KINDS.items()],
        _by("durable", _durable._replace(count=10_000), 1.3, count=100),
    )),
    Promise("performance:Q3", "1,000 runs at once against bu-agent-sdk", (
        _by("a run", Key("W2", "run", OURS, 1_000), 1.5, engine=FAST),
    )),
    Promise("performance:Q9", "a recorded step against one without a journal, N=1,000", (
        _by("in memory", _recorded("memory", 1_000), 1.6, what="no journal"),
        _by("in a file", _recorded("file, to the system", 1_000), 5.5, what="no journal"),
    )),
    Promise("durable:UT20", "a durable step against DBOS by hand", (_by("N=1,000", _durable, 3.5, engine=BY_HAND),)),
    Promise("performance:Q13", "a usable import against pydantic and attrs", (
        _by("CPU", _start("usable import"), 2.0, engine=PARTS),
    )),
    Promise("performance:Q13", "--help against typer and rich", (
        _by("CPU", _start("stepengine --help"), 2.0, engine=LIST),
    )),
    Promise("performance:Q15", "a streamed token against raw httpx2 and jiter", tuple(
        _by(protocol, _token(protocol, "stream"), 2.0, engine="floor") for protocol in SPEAKING
    )),
)  # fmt: skip

_machine, _child = Key("W1", "machine, ", "machine", 1_000), Key("W2", "children", OURS, 100)
_http = {protocol: Key("W3", "steps", f"{OURS}, {protocol}", 100) for protocol in SDKS}
_watched = Key("W8", "step", "stream", 1_000)
FIGURES = (
    _by("a step at N=50,000 against N=100, collector off", Key("W1", "step, collector off", OURS, 50_000), count=100),
    *[
        _by(
            f"a step of the machine alone against a generator with new states, {what}",
            _machine._replace(what=f"machine, {kind}"),
            what="machine, floor",
        )
        for kind, what in {"plain": "no handler", "step": "a handler's STEP", "call": "a handler's ToolCall"}.items()
    ],
    Figure("kept for a finished run of 5 steps, messages included", Key("W2", "memory", OURS, 200), unit="bytes"),
    _by("100 children of one parent against 100 runs", _child, what="alone"),
    _by("a child among 4,000 against one among 100", _child._replace(count=4_000), count=100),
    *[
        _by(f"an HTTP step at N=100 against the SDK's loop, {name}", key, engine=f"bare, {name}")
        for name, key in _http.items()
    ],
    *[
        _by(f"an HTTP step at N=300 against N=10, {name}", key._replace(count=300), count=10)
        for name, key in _http.items()
    ],
    *[
        _by(f"a replayed step against its floor, {kind}", _recorded(f"replay, {kind}", 1_000), what="floor, replay")
        for kind in ("memory", "file")
    ],
    *[
        _by(f"a replayed step at N=10,000 against N=1,000, {kind}", _recorded(f"replay, {kind}", 10_000), count=1_000)
        for kind in ("memory", "file")
    ],
    _by("playing a cassette of 200 requests against vcrpy", _recorded("cassette, playing", 200), engine="vcrpy"),
    *[
        _by(
            f"a recorded step against one without a journal, {place}, N=10,000",
            _recorded(kind, 10_000),
            what="no journal",
        )
        for kind, place in KINDS.items()
    ],
    _by(
        "a recorded step where five keys are known, in a file",
        _recorded("file, to the system, five keys", 1_000),
        what="file, to the system",
    ),
    *[
        _by(f"a recorded step at N=50,000 against N=1,000, {place}", _recorded(kind, 50_000), count=1_000)
        for kind, place in {**KINDS, "file, to the disk": "in a file on the disk", "sqlite": "in SQLite"}.items()
    ],
    Figure("syncs of an effect, journal on the disk", _recorded("syncs per effect", 10_000)),
    Figure("syncs of replaying and reading", _recorded("syncs of reading", 10_000)),
    Figure("resuming a journal of 10,000 records", _recorded("resuming", 10_000), unit="s"),
    _by("resuming a record of 10,000 against one of 1,000", _recorded("resuming, us per record", 10_000), count=1_000),
    Figure("SDKs and command line packages that an import loads", Key("W5", "heavy packages loaded", OURS, 1)),
    _by(f"stepengine run to its first effect against {PARTS}", _start("first effect"), engine=PARTS),
    Figure("an installation without the official SDKs", Key("W7", "weight beside the SDKs", OURS, 1), unit="MB"),
    *[
        _by(f"a token of an unobserved run against raw httpx2 and jiter, {name}", _token(name, "run"), engine="floor")
        for name in SPEAKING
    ],
    *[
        _by(f"a token through stream against one of an unobserved run, {name}", _token(name, "stream"), engine="run")
        for name in SPEAKING
    ],
    _by("an observed step against an unobserved one", _watched, engine="run"),
    _by("the same, in a process that knows a key", _watched._replace(engine="stream, a key"), engine="run, a key"),
)


def judge(sheet: Sheet) -> list[Verdict]:
    """Return the verdicts of all promises, in their order."""
    return [Verdict(promise, each, each.spread(sheet)) for promise in PROMISES for each in promise.figures]
