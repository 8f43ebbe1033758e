"""
What was measured: samples by work, what, engine and size, with the machine, the versions and the date; as JSON in a file.

A sample belongs to a round. In a round everything is measured once, one after another, so that what the machine does meanwhile
falls on all alike; a ratio is taken within each round, and what is told is the median of them with the least and the most.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

FORMAT = 1
DIGITS = 5
"""Significant digits of a sample: more would be noise, and make files large."""


class Key(NamedTuple):
    """What a figure is of."""

    work: str
    what: str
    engine: str
    count: int


class Spread(NamedTuple):
    """A median, and the least and the most that it is the median of."""

    median: float
    least: float
    most: float
    rounds: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread | None:
        """Return the spread of some values, if there are any."""
        known = sorted(values)
        return cls(statistics.median(known), known[0], known[-1], len(known)) if known else None


class Gap(NamedTuple):
    """Something that was not measured, and why."""

    work: str
    engine: str
    why: str


@dataclass
class Sheet:
    """
    Everything that one run of the benchmarks measured.

    Attributes:
        about: The date, the machine, the versions, the command.
        units: The unit of what each work measures, by work and what.
        samples: The samples by round.
        gaps: What is missing, and why.
    """

    about: dict[str, Any] = field(default_factory=dict)
    units: dict[tuple[str, str], str] = field(default_factory=dict)
    samples: dict[Key, dict[int, float]] = field(default_factory=dict)
    gaps: list[Gap] = field(default_factory=list)

    def add(self, key: Key, value: float, *, unit: str, turn: int) -> None:
        """Note a sample."""
        self.units[key.work, key.what] = unit
        self.samples.setdefault(key, {})[turn] = float(f"{value:.{DIGITS}g}")

    def miss(self, work: str, engine: str, why: str) -> None:
        """Note what is missing, once."""
        gap = Gap(work, engine, why)
        if gap not in self.gaps:
            self.gaps.append(gap)

    def spread(self, key: Key) -> Spread | None:
        """Return what a figure is, if it was measured."""
        return Spread.of(self.samples.get(key, {}).values())

    def median(self, key: Key) -> float | None:
        """Return the median of a figure, if it was measured."""
        spread = self.spread(key)
        return spread and spread.median

    def both(self, one: Key, other: Key, join: Callable[[float, float], float]) -> Spread | None:
        """
        Return what two figures make together, round by round.

        Where the other one was measured in fewer rounds, since it takes long, its median stands in for the rest.
        """
        ours, theirs = self.samples.get(one), self.samples.get(other)
        if not ours or not theirs:
            return None
        usual = statistics.median(theirs.values())
        return Spread.of([join(value, theirs.get(turn, usual)) for turn, value in ours.items()])

    def ratio(self, one: Key, other: Key) -> Spread | None:
        """Return one figure by another, round by round."""
        return self.both(one, other, lambda a, b: a / b)

    def counts(self, work: str, what: str) -> list[int]:
        """Return the sizes of a work, in order."""
        return sorted({key.count for key in self.samples if key[:2] == (work, what)})

    def engines(self, work: str, what: str) -> list[str]:
        """Return who did a work, in the order of measuring."""
        return list(dict.fromkeys(key.engine for key in self.samples if key[:2] == (work, what)))

    def to_json(self) -> str:
        """Return the text of the file: one figure a line."""
        figures = []
        for key, of in self.samples.items():
            samples = [of.get(turn) for turn in range(max(of) + 1)]
            figures.append({**key._asdict(), "unit": self.units[key[:2]], "samples": samples})
        lines = ",\n    ".join([json.dumps(figure) for figure in figures])
        gaps = ",\n    ".join([json.dumps(gap._asdict()) for gap in self.gaps])
        about = json.dumps(self.about, indent=2).replace("\n", "\n  ")
        return (
            f'{{\n  "format": {FORMAT},\n  "about": {about},\n'
            f'  "figures": [\n    {lines}\n  ],\n  "missing": [\n    {gaps}\n  ]\n}}\n'
        )

    @classmethod
    def from_json(cls, text: str) -> Sheet:
        """
        Return what a file holds.

        Raises:
            SystemExit: when the file is of another format.
        """
        held = json.loads(text)
        if not isinstance(held, dict) or held.get("format") != FORMAT:
            msg = f"this is no file of figures of format {FORMAT}; `python -m benchmarks --json FILE` writes one"
            raise SystemExit(msg)
        sheet = cls(held["about"])
        for figure in held["figures"]:
            key = Key(*[figure[name] for name in Key._fields])
            for turn, value in enumerate(figure["samples"]):
                if value is not None:
                    sheet.add(key, value, unit=figure["unit"], turn=turn)
        for gap in held["missing"]:
            sheet.miss(**gap)
        return sheet

    @classmethod
    def load(cls, path: str | Path) -> Sheet:
        """Return what a file holds; see ``from_json``."""
        return cls.from_json(Path(path).read_text(encoding="utf-8"))


def processor() -> str:
    """Return the name of the processor, where the system says it."""
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    return names[0].partition(":")[2].strip() if names else platform.processor() or "unknown"


def machine() -> dict[str, Any]:
    """Return what the measurements ran on."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30 if hasattr(os, "sysconf") else None
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "memory, GiB": memory and round(memory),
        "system": f"{platform.system()} {platform.machine()}",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "niceness": os.nice(0) if hasattr(os, "nice") else None,
        "load at the start": load(),
    }


def load() -> list[float] | None:
    """Return how many processes wanted to run in the last minute, 5 and 15 minutes, where the system says it."""
    return [round(value, 2) for value in os.getloadavg()] if hasattr(os, "getloadavg") else None


def today() -> str:
    """Return the date, in UTC."""
    return datetime.now(UTC).date().isoformat()
