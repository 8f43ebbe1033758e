"""
Random faults are tried here: each before the tests that go through its line, the nearest first, and then before those that
name its module.

Which tests those are is found out once for each layer, by running its tests without any fault. What fails there is left out
and told. With ``--results`` each outcome is appended to a file, and what was caught once is not tried again.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import attrs
from coverage import CoverageData

from tests.mutants import FAILED, GATE, copies, replace, suite_run
from tests.random_mutants import EQUIVALENT, Fault, near, nearness, wider

MOST_TESTS = 400
"""So many tests that go through a line are run."""
MOST_CASES = 4
"""So many cases of one test come before the next test; the rest follows at the end."""
LINES_ABOVE = 40
SECONDS_PER_TEST = 40
UNFINISHED = 1800
TEST_ID = re.compile(r"^(?:FAILED|ERROR) (tests/\S+?\.py(?:::.*?)?)(?: - .*)?$", re.MULTILINE)


@attrs.frozen
class Tried:
    """How one fault fared: *said* is what pytest, or the reason in the list of equivalent ones, has to say."""

    fault: Fault
    verdict: str
    said: str = ""
    seconds: float = 0


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else ""


@attrs.frozen
class Reach:
    """
    Which tests go through which lines of a layer, as one run without faults has found.

    Attributes:
        data: The lines.
        same: The files that are still what they were then.
        failed: The tests that failed then.
    """

    data: CoverageData
    same: frozenset[str]
    failed: frozenset[str]

    @classmethod
    def of(cls, layer: str, root: Path, folder: Path, jobs: int) -> Reach:
        """Read what was found before, or run the tests of a layer in the checkout at *root*."""
        traced, noted = folder / f"{layer}.coverage", folder / f"{layer}.json"
        if not noted.exists():
            print(f"{layer}: which tests go through which line", flush=True)
            failed = _traced(layer, root, traced, jobs)
            hashes = {
                path.relative_to(root).as_posix(): _hash(path)
                for path in (*(root / "stepengine").rglob("*.py"), *(root / "tests").rglob("test_*.py"))
            }
            noted.write_text(json.dumps({"hashes": hashes, "failed": failed}))
            for test in failed:
                print(f"    fails without a fault, left out: {test}", flush=True)
        known = json.loads(noted.read_text())
        data = CoverageData(str(traced))
        data.read()
        same = frozenset(file for file, value in known["hashes"].items() if _hash(root / file) == value)
        return cls(data, same, frozenset(known["failed"]))

    def lines_of(self, file: str) -> Mapping[int, list[str]]:
        """Return the tests by lines; nothing when the file is not the one that was run."""
        if file not in self.same:
            return {}
        path = next((path for path in self.data.measured_files() if path.endswith(f"/{file}")), None)
        return self.data.contexts_by_lineno(path) if path else {}

    def suite(self, fault: Fault) -> list[str]:
        """Return the tests that go through the line of a fault, the nearest first, and before them those that are new."""
        lines = self.lines_of(fault.file)
        through: set[str] = set()
        for line in range(fault.line, max(0, fault.line - LINES_ABOVE), -1):
            through = {name.rpartition("|")[0] for name in lines.get(line, ())} - {""}
            if through:
                break
        scores = nearness(fault.file)
        fresh = [path for path, score in scores.items() if score < 3 and path not in self.same]
        cases: dict[str, list[str]] = defaultdict(list)
        for test in sorted(through - self.failed):
            if "\n" not in test and test.partition("::")[0] in self.same:
                cases[test.partition("[")[0]].append(test)
        ordered = sorted(
            (number // MOST_CASES, scores.get(test.partition("::")[0], 3), test)
            for tests in cases.values()
            for number, test in enumerate(tests)
        )
        return fresh + [test for _, _, test in ordered[:MOST_TESTS]]


def _traced(layer: str, root: Path, traced: Path, jobs: int) -> list[str]:
    """Run the tests of a layer, note which go through which line, and return those that fail."""
    place = f"stepengine/{layer}" if (root / "stepengine" / layer).is_dir() else "stepengine"
    command = [
        sys.executable, "-m", "pytest", "-m", GATE, "-q", "-p", "no:cacheprovider", "-n", str(jobs), "--no-header", "--tb=no",
        f"--cov={place}", f"--cov-config={os.devnull}", "--cov-context=test", "--cov-report=", *wider(layer),
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHON_COLORS": "0", "COVERAGE_FILE": str(traced)}
    ran = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, timeout=UNFINISHED, check=False
    )
    return sorted(set(TEST_ID.findall(ran.stdout)))


def _taken(fault: Fault, root: Path, suite: Sequence[str], failed: frozenset[str], seconds: float) -> Tried:
    began = time.monotonic()
    asked = root / ".mutant-tests"
    left_out = [f"--deselect={test}" for test in failed if any(test.startswith(name) for name in suite)]
    asked.write_text("\n".join([f"--timeout={SECONDS_PER_TEST}", *left_out, *suite]))
    status, said = suite_run(root, [f"@{asked.name}"], seconds)
    # 5: no test was found. Else what cannot even be imported, or never ends, is noticed by whoever runs it.
    verdict = "caught" if status == FAILED or status not in {0, 5} else "SURVIVED"
    return Tried(fault, verdict, said, time.monotonic() - began)


def tried(fault: Fault, root: Path, reach: Reach, seconds: float) -> Tried:
    """Plant a fault in the checkout at *root* and run its tests: those through its line, then those that name its module."""
    if fault.name in EQUIVALENT:
        return Tried(fault, "equivalent", EQUIVALENT[fault.name])
    file = root / fault.file
    sound = file.read_text(encoding="utf-8")
    last = Tried(fault, "SURVIVED", "no test goes through it, or names it")
    try:
        replace(file, fault.source)
        for suite in (reach.suite(fault), near(fault)):
            if suite and last.verdict == "SURVIVED":
                now = _taken(fault, root, suite, reach.failed, seconds)
                last = attrs.evolve(now, seconds=last.seconds + now.seconds)
    finally:
        replace(file, sound)
    return last


def run_random(faults: Sequence[Fault], *, seed: int, jobs: int, results: Path | None, seconds: float) -> int:
    """Try faults, layer after layer, *jobs* at a time; say how each went, and a table of all at the end."""
    done = _known(results)
    outcomes: list[Tried] = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
        roots = list(copies(Path(scratch), jobs))
        kept = results.with_suffix(".reach") if results else Path(scratch, "reach")
        kept.mkdir(parents=True, exist_ok=True)
        for layer in dict.fromkeys(fault.layer for fault in faults):
            known = [Tried(f, "caught") for f in faults if f.layer == layer and done.get(f.name) == "caught"]
            left = [fault for fault in faults if fault.layer == layer and done.get(fault.name) != "caught"]
            outcomes += known
            if any(fault.name not in EQUIVALENT for fault in left):
                reach = Reach.of(layer, roots[0], kept, jobs)
                for number, outcome in enumerate(_each(left, roots, reach, seconds), start=len(known) + 1):
                    outcomes.append(outcome)
                    _tell(outcome, f"{layer} {number:3}/{len(known) + len(left)}", seed, results)
            else:
                outcomes += [Tried(fault, "equivalent", EQUIVALENT[fault.name]) for fault in left]
    return _table(outcomes)


def _each(faults: Sequence[Fault], roots: Sequence[Path], reach: Reach, seconds: float) -> Iterator[Tried]:
    free: queue.SimpleQueue[Path] = queue.SimpleQueue()
    for root in roots:
        free.put(root)

    def one(fault: Fault) -> Tried:
        root = free.get()
        try:
            return tried(fault, root, reach, seconds)
        finally:
            free.put(root)

    with ThreadPoolExecutor(len(roots)) as pool:
        for done in as_completed([pool.submit(one, fault) for fault in faults]):
            yield done.result()


def _known(results: Path | None) -> dict[str, str]:
    """Return the last verdict of each fault that was tried before."""
    if results is None or not results.exists():
        return {}
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    return {line["name"]: line["verdict"] for line in lines}


def _tell(outcome: Tried, where: str, seed: int, results: Path | None) -> None:
    fault = outcome.fault
    print(f"{where} {outcome.verdict:10} {outcome.seconds:5.1f} s  {fault.name} (line {fault.line})", flush=True)
    if results:
        noted = {
            "layer": fault.layer, "name": fault.name, "line": fault.line, "seed": seed, "verdict": outcome.verdict,
            "said": outcome.said, "seconds": round(outcome.seconds, 1),
        }  # fmt: skip
        with results.open("a") as file:
            file.write(json.dumps(noted) + "\n")


def _table(outcomes: Sequence[Tried]) -> int:
    print(f"\n{'layer':12} {'drawn':>6} {'caught':>7} {'equivalent':>11} {'survived':>9}")
    layers = list(dict.fromkeys(outcome.fault.layer for outcome in outcomes))
    for layer in (*layers, "all"):
        count = Counter(o.verdict for o in outcomes if layer in {o.fault.layer, "all"})
        drawn, lost = count.total(), count["SURVIVED"]
        share = 100 * count["caught"] / max(1, count["caught"] + lost)
        print(f"{layer:12} {drawn:6} {count['caught']:7} {count['equivalent']:11} {lost:9}   {share:5.1f} %")
    return int(any(outcome.verdict == "SURVIVED" for outcome in outcomes))
