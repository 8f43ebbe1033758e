"""
Measure what rules about provenance stop, and what they cost: ``python -m benchmarks.injection [--write] [--coding]``.

It needs agentdojo 0.1.35 in the environment, and takes some minutes. ``--coding`` measures the coding agents alone, which needs no
agentdojo, and keeps the other figures. ``--write`` puts the figures into ``benchmarks/injection/measured.json``, and the page that is made
of them to ``benchmarks/INJECTION.md``. Nothing leaves this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from benchmarks.injection import coding, page
from benchmarks.injection.attacks import COMPLETED

VERSION = "0.1.35"
FREE = ("no policy", "every effect")
"""These judge no provenance, so labels make no difference."""


def plans() -> Iterator[tuple[str, str]]:
    """Yield each kind of labels with each policy."""
    from benchmarks.injection.policies import POLICIES

    yield from (("any labels", name) for name in FREE)
    yield from ((kind, name) for kind in page.LABELS_OF for name in POLICIES if name not in FREE)


def measured_rows(kind: str, policy: str, *, lookups: bool = False) -> dict[str, Any]:
    """Return the rows of all suites for labels and a policy, as JSON."""
    from benchmarks.injection.dojo import Dojo
    from benchmarks.injection.measuring import measure_all
    from benchmarks.injection.policies import POLICIES, options

    def make(suite: str) -> Dojo:
        return Dojo(suite, options(contacts=kind == "contacts"), POLICIES[policy]())

    rows = asyncio.run(measure_all(make, lookups=lookups))
    return {suite: row.to_json() for suite, row in rows.items()}


def measured_dojo() -> dict[str, Any]:
    """Return all figures of AgentDojo."""
    from benchmarks.injection.dojo import suite_of

    found: dict[str, Any] = {}
    for kind, policy in plans():
        print(f"{kind}: {policy}", file=sys.stderr)
        found.setdefault(kind, {})[policy] = measured_rows(kind, policy)
    tasks = {suite: len(suite_of(suite).user_tasks) for suite in page.SUITES}
    return {
        "agentdojo": VERSION,
        "completed": sum(tasks[suite] for suite, _ in COMPLETED),
        "answers": tasks["travel"],
        "dojo": found,
        "lookups": measured_rows("contacts", "destinations", lookups=True),
    }


def main() -> None:
    """Do what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.injection", description=__doc__)
    parser.add_argument("--write", action="store_true", help="keep the figures, and make the page of them")
    parser.add_argument("--coding", action="store_true", help="measure the coding agents alone")
    asked = parser.parse_args()
    logging.disable()
    warnings.simplefilter("ignore")
    measured = {"coding": coding.measure()}  # first: where a package is missing it fails within seconds
    found = json.loads(page.MEASURED.read_text(encoding="utf-8")) if asked.coding else measured_dojo()
    # As it is stored: the page is made of the same types from a file.
    found = json.loads(json.dumps({**found, **measured}))
    print(page.page(found))
    if asked.write:
        page.MEASURED.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        page.PAGE.write_text(page.page(found), encoding="utf-8")


if __name__ == "__main__":
    main()
