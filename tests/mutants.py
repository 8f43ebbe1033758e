"""
Random faults: each is put into a copy of the checkout, one at a time, and the tests that should catch it are run.

``python -m tests.mutants --random 40 --seed 7 --layer machine`` draws and plants them. A fault that no test notices has
survived, and there is no promise that the behaviour which it breaks holds.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.random_mutants import LAYERS, drawn

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = shutil.ignore_patterns(
    ".git", "__pycache__", ".*_cache", ".hypothesis", ".import_linter_cache", "*.egg-info"
)
SECONDS = 300
DRAWN = 40
"""How many faults are drawn when no number is given."""
FAILED = 1
GATE = "(smoke or not deep) and not (speed or memory)"
"""The tests that the gate runs: those of README's command, and smoke tests."""


def replace(file: Path, text: str) -> None:
    """Write a source file and forget what was compiled from it: its time alone may not tell one second's two texts apart."""
    for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
        compiled.unlink()
    file.write_text(text, encoding="utf-8")


def suite_run(root: Path, suite: Sequence[str], seconds: float = SECONDS) -> tuple[int | None, str]:
    """Run tests in the checkout at *root*; return pytest's status, ``None`` when it took too long, and what it says."""
    command = [
        sys.executable, "-m", "pytest", "-m", GATE, "-x", "-q", "-p", "no:cacheprovider", "-n", "0", "--no-header", *suite
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHON_COLORS": "0"}
    # A session of its own, so that nothing that a hanging test started outlives it.
    with subprocess.Popen(
        command, cwd=root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    ) as process:
        try:
            said, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return None, f"no end after {seconds:g} s"
    lines = said.decode(errors="replace").strip().splitlines()
    first = next((line for line in lines if line.startswith(("FAILED ", "ERROR "))), lines[-1] if lines else "")
    return process.returncode, first


def copies(folder: Path, count: int) -> Iterator[Path]:
    """Give copies of the checkout that import their own code."""
    look = "import stepengine; print(stepengine.__file__)"
    for number in range(count):
        root = folder / f"copy{number}"
        shutil.copytree(ROOT, root, ignore=LEFT_OUT, symlinks=True)
        seen = subprocess.run(
            [sys.executable, "-c", look],
            cwd=root, env={**os.environ, "PYTHONPATH": str(root)}, capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        if Path(seen.strip()).parent.parent != root:
            msg = f"a process in {root} imports {seen.strip()}, so that no mutant there would be seen"
            raise RuntimeError(msg)
        yield root


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.strip().partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time (default: %(default)s)")
    parser.add_argument("--list", action="store_true", help="only print the faults")
    parser.add_argument("--random", type=int, default=DRAWN, metavar="N", help="how many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="what they are drawn with (default: %(default)s)")
    parser.add_argument(
        "--layer", action="append", help="draw from this layer only, such as machine; may be given again"
    )
    parser.add_argument("--results", type=Path, help="append the outcomes of drawn faults, and skip what was caught")
    parser.add_argument(
        "--seconds",
        type=float,
        default=SECONDS,
        help="after which a drawn fault counts as caught (default: %(default)s)",
    )
    asked = parser.parse_args()
    faults = drawn(asked.random, asked.seed, tuple(asked.layer or LAYERS))
    if asked.list:
        print("\n".join([f"{fault.name} (line {fault.line})" for fault in faults]))
        return 0
    from tests.random_runs import run_random  # needs coverage, which drawing needs not

    results = asked.results and asked.results.resolve()
    return run_random(faults, seed=asked.seed, jobs=max(1, asked.jobs), results=results, seconds=asked.seconds)


if __name__ == "__main__":
    sys.exit(main())
