"""
Measure stepengine beside its peers: ``python -m benchmarks [--quick] [--peers DIR] [--only w1] [--json FILE]``.

W1 is the CPU per step of one run and its growth with history, W2 the CPU of concurrent runs, W3 the client CPU per HTTP
step beside each official SDK, W4 the CPU of recording and replaying, W5 the CPU of an import, W6 the CPU of one call behind a long
history. What is missing is named. Timings never decide a unit test; the last table says which budgets hold.

``python -m benchmarks judge FILE`` prints that table from a file of figures, ``tables FILE`` all tables, ``page FILE`` writes
the page of the documentation and its pictures. ``python -m benchmarks renew --peers DIR`` measures everything and writes that page.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path

from benchmarks import page, tables
from benchmarks.judging import judge
from benchmarks.measuring import QUICK, WORKS, Bench, Plan, measure
from benchmarks.peers import Peers
from benchmarks.sheet import Sheet

READERS = ("judge", "tables", "page")


def read(command: str, file: str) -> int:
    """Do something with a file of figures, and return whether a budget is broken."""
    sheet = Sheet.load(file)
    if command == "page":
        for path in page.write(sheet):
            print(path)
        return 0
    print(tables.budgets(sheet).text() if command == "judge" else tables.everything(sheet))
    return int(bool(tables.broken(judge(sheet))))


def main() -> int:
    """Do what the command line asks for."""
    if sys.argv[1:2] and sys.argv[1] in READERS:
        parser = argparse.ArgumentParser(prog=f"python -m benchmarks {sys.argv[1]}")
        parser.add_argument("file", metavar="FILE", help="what --json wrote")
        return read(sys.argv[1], parser.parse_args(sys.argv[2:]).file)
    renews = sys.argv[1:2] == ["renew"]
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
    parser.add_argument("--rounds", type=int, help="how often everything is measured that a budget is about")
    parser.add_argument("--cap", type=float, help="seconds of CPU that one run of a peer may take")
    asked = parser.parse_args()
    os.environ.pop("PYTHONPATH", None)
    plan = QUICK if asked.quick else Plan()
    plan = replace(plan, **{name: value for name in ("rounds", "cap") if (value := getattr(asked, name)) is not None})
    bench = Bench(Peers(asked.peers), plan)
    kept = page.MEASURED if renews else Path(asked.json) if asked.json else None
    sheet = measure(bench, asked.only or list(WORKS), "quick" if asked.quick else "full", kept)
    print(tables.everything(sheet))
    for path in page.write(sheet) if renews else ():
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
