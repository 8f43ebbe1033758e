"""
Which tests prove a module: ``python -m tests.of machine/step``.

Tests go through the doors that people use, so few are named after the module that they prove. What is said here was seen, not guessed:
``--make`` runs the fast suite, notes which file of tests goes through which lines, and writes ``tests/modules.tsv``. A line that few
files reach counts for more than one that all of them pass, or every module's first row would be the same tests of whole runs.

As a plugin of pytest (``-p tests.of``) this module tells coverage which file of tests is at work.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest

from tests.random_mutants import nearness

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "tests" / "modules.tsv"
MOST = 4
NAMING = 2
LEAST = 0.02
"""A file of tests that has less than this share of what is known of a module does not prove it."""
COVERAGE = "[run]\nsource = stepengine\nparallel = True\nbranch = False\ndata_file = {}\n"


@attrs.frozen
class Proof:
    """
    A file of tests that goes through a module.

    Attributes:
        module: As ``machine/step.py``, below ``stepengine/``.
        tests: As ``tests/machine/test_step.py``.
        percent: The share of the statements in the module's functions that it goes through. 0 of a module that works
            in processes of its own, where nothing is noted: these tests are those that name it.
    """

    module: str
    tests: str
    percent: int


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    from coverage import Coverage

    current = Coverage.current()
    if current is not None:
        if (
            sys.gettrace() is None
        ):  # a test of debuggers set its own, and left none: nothing would be noted from there on
            current.stop()
            current.start()
        current.switch_context(item.nodeid.partition("::")[0])
    return (yield)


def modules() -> list[str]:
    """Return the modules whose functions tests can go through."""
    package = ROOT / "stepengine"
    return sorted(
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if not any(part.startswith(("_init", "_demo")) for part in path.parts) and "def " in path.read_text()
    )


def proofs() -> list[Proof]:
    rows = [line.split("\t") for line in TABLE.read_text().splitlines()]
    return [Proof(module, tests, int(percent)) for module, tests, percent in rows]


def in_functions(file: Path) -> frozenset[int]:
    """Return the first lines of the statements that run when something is called, not when the module is imported."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(
        inner.lineno
        for node in ast.walk(ast.parse(file.read_bytes()))
        if isinstance(node, functions)
        for statement in node.body
        if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))
        for inner in ast.walk(statement)
        if isinstance(inner, ast.stmt)
    )


def weighed(module: str, lines: Mapping[str, set[int]]) -> list[tuple[str, float]]:
    """Return files of tests by what they reach of one module, the most telling first: those of its own package count threefold."""
    times = Counter(number for numbers in lines.values() for number in numbers)
    own = f"tests/{module.partition('/')[0]}/"
    scores = {
        tests: (3 if tests.startswith(own) else 1) * sum(1 / times[number] for number in numbers) / len(times)
        for tests, numbers in lines.items()
    }
    return sorted(scores.items(), key=lambda one: (-one[1], one[0]))


def reached(data_files: list[Path]) -> dict[str, dict[str, set[int]]]:
    """Read what coverage noted: of each module the lines in functions, by files of tests."""
    from coverage import CoverageData

    known: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    package = ROOT / "stepengine"
    for file in data_files:
        data = CoverageData(basename=str(file))
        data.read()
        for measured in data.measured_files():
            if (
                Path(measured).is_relative_to(package) and Path(measured).exists()
            ):  # tests compile code under invented names
                lines = known[Path(measured).relative_to(package).as_posix()]
                for number, contexts in data.contexts_by_lineno(measured).items():
                    for tests in contexts:
                        if tests:  # else nothing was tested then: an import, or what a process does at its end
                            lines[tests].add(number)
    for module, lines in known.items():
        bodies = in_functions(package / module)
        for tests in lines:
            lines[tests] &= bodies
    return known


def found(data_files: list[Path]) -> Iterator[Proof]:
    known = reached(data_files)
    for module in modules():
        lines = {tests: numbers for tests, numbers in known.get(module, {}).items() if numbers}
        whole = len(in_functions(ROOT / "stepengine" / module))
        best = [tests for tests, score in weighed(module, lines) if score >= LEAST][:MOST]
        for tests in best:
            yield Proof(module, tests, round(100 * len(lines[tests]) / whole))
        if not best:
            for tests in named(module):
                yield Proof(module, tests, 0)


def named(module: str) -> list[str]:
    """Return the files of tests that name a module which works in processes of its own."""
    near = nearness(f"stepengine/{module}")
    elsewhere = {tests: not tests.startswith(f"tests/{module.partition('/')[0]}/") for tests in near}
    return sorted(near, key=lambda one: (near[one] > 1, elsewhere[one], near[one], one))[:NAMING]


def make() -> int:
    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder) / "coveragerc"
        settings.write_text(COVERAGE.format(Path(folder) / "data"))
        command = [sys.executable, "-m", "pytest", "-n", "auto", "-q", "-p", "tests.of", "--cov=stepengine", f"--cov-config={settings}", "--cov-report="]  # fmt: skip
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        if code not in (0, 1):
            return code
        write(found(sorted(Path(folder).glob("data*"))))
    return 0


def write(rows: Iterable[Proof]) -> None:
    TABLE.write_text("".join(f"{row.module}\t{row.tests}\t{row.percent}\n" for row in rows))


def asked(word: str, rows: list[Proof]) -> list[Proof]:
    """Return the rows of the modules that a word can mean: ``step``, ``machine/step``, ``stepengine/machine/step.py``, ``stepengine.machine.step``."""
    path = word.removesuffix(".py").replace(".", "/").removeprefix("stepengine/")
    return [row for row in rows if f"/{row.module.removesuffix('.py')}".endswith(f"/{path}")]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.of", description="Say which tests prove a module.")
    parser.add_argument("module", nargs="?", help="a module, as step, machine/step or stepengine/machine/step.py")
    parser.add_argument(
        "--add",
        action="store_true",
        help="enter new modules by the tests that name them, and drop what is gone, at once",
    )
    parser.add_argument(
        "--make", action="store_true", help="run the fast suite and write the table anew (about ten minutes)"
    )
    options = parser.parse_args()
    if options.make:
        return make()
    if options.add:
        there = set(modules())
        kept = [row for row in proofs() if row.module in there and (ROOT / row.tests).is_file()]
        new = [Proof(module, tests, 0) for module in there - {row.module for row in kept} for tests in named(module)]
        write(sorted([*kept, *new], key=lambda row: row.module))
        return 0
    if options.module is None:
        parser.error("name a module, or say --add or --make")
    rows = asked(options.module, proofs())
    for row in rows:
        print(
            f"stepengine/{row.module}: {row.tests} " + (f"goes through {row.percent} %" if row.percent else "names it")
        )
    if not rows:
        print(
            f"no test is known to go through a module {options.module!r}; modules are named as in machine/step",
            file=sys.stderr,
        )
    return 0 if rows else 2


if __name__ == "__main__":
    raise SystemExit(main())
