"""
Measure stepengine beside its peers: ``python -m benchmarks [--quick] [--peers DIR] [--only w1] [--json FILE]``.

W1 is the CPU per step of one run and its growth with history, W2 the CPU of concurrent runs, W3 the client CPU per HTTP
step beside each official SDK, W4 the CPU of recording and replaying, W5 the CPU of an import, W6 the CPU of one call behind a long
history, W7 and W8 starts and streams, W9 durable steps. What is missing is named. Timings never decide a unit test.

``python -m benchmarks promises`` measures and judges the eight promises alone. ``tables FILE`` prints all tables from a file of
figures, ``page FILE`` writes RESULTS.md and its pictures. ``renew`` measures everything and writes that page. ``promises`` and ``renew``
make the environments of peers that ``--peers`` (``.peers``) lacks.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path

from benchmarks import page, tables
from benchmarks.judging import FAST
from benchmarks.measuring import QUICK, WORKS, Bench, Plan, measure, promised
from benchmarks.peers import MEASURED, Peers, make
from benchmarks.sheet import Sheet

READERS = ("tables", "page")
PEERS = ".peers"
"""The folder of the peers' environments, unless another one is named."""


def read(command: str, file: str) -> None:
    """Print all tables of a file of figures, or write the page."""
    sheet = Sheet.load(file)
    if command == "page":
        for path in page.write(sheet):
            print(path)
    else:
        print(tables.everything(sheet))


def make_missing(folder: str, names: list[str]) -> Peers:
    """Return the peers of a folder, after making those environments of *names* that it lacks."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    peers = Peers(folder)
    make(Path(folder), [name for name in names if not peers.has(name)], newest=False)
    return peers


def promises(arguments: list[str]) -> int:
    """Measure and judge the promises, and return 1 if one is broken or was not measured."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks promises", description=promises.__doc__)
    parser.add_argument("--peers", metavar="DIR", default=PEERS, help="where the peer's environment is, or is made")
    parser.add_argument("--rounds", type=int, default=3, help="how often everything is measured; the median counts")
    asked = parser.parse_args(arguments)
    bench = Bench(make_missing(asked.peers, [FAST]), Plan(rounds=asked.rounds))
    promised(bench)
    lines, failed = tables.summary(bench.sheet)
    print("\n".join(lines))
    return int(failed > 0)


def main() -> int:
    """Do what the command line asks for."""
    os.environ.pop("PYTHONPATH", None)
    command = "".join(sys.argv[1:2])
    if command == "promises":
        return promises(sys.argv[2:])
    if command in READERS:
        parser = argparse.ArgumentParser(prog=f"python -m benchmarks {command}")
        parser.add_argument("file", metavar="FILE", help="what --json wrote")
        read(command, parser.parse_args(sys.argv[2:]).file)
        return 0
    renews = command == "renew"
    if renews:
        del sys.argv[1]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="smaller sizes and fewer rounds, for a first look")
    where = "the folder that `python -m benchmarks.peers --make DIR` filled, or one interpreter that has some of them"
    parser.add_argument("--peers", metavar="DIR", help=where)
    parser.add_argument("--json", metavar="FILE", help="also write all figures, the machine and the versions to FILE")
    parser.add_argument("--only", choices=list(WORKS), action="append", help="run only this work; may be repeated")
    parser.add_argument("--rounds", type=int, help="how often everything is measured that a promise is about")
    parser.add_argument("--cap", type=float, help="seconds of CPU that one run of a peer may take")
    asked = parser.parse_args()
    plan = QUICK if asked.quick else Plan()
    plan = replace(plan, **{name: value for name in ("rounds", "cap") if (value := getattr(asked, name)) is not None})
    bench = Bench(make_missing(asked.peers or PEERS, MEASURED) if renews else Peers(asked.peers), plan)
    kept = page.MEASURED if renews else Path(asked.json) if asked.json else None
    sheet = measure(bench, asked.only or list(WORKS), "quick" if asked.quick else "full", kept)
    print(tables.everything(sheet))
    for path in page.write(sheet) if renews else ():
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
