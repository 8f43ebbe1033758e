"""
Four type checkers see what a handler is sent: they infer `handler.py` and refuse each marked line of `wrong_yields.py`.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.scripts import load_script

COUNTERPARTS = (
    ("pypi:mypy", "2.4.1", "works", "strict: types of handlers, wrong yields"),
    (
        "pypi:pyrefly",
        "1.4.1",
        "works",
        "preset `default`: types of handlers, wrong yields",
    ),
    ("pypi:pyright", "1.1.414", "works", "types of handlers, wrong yields"),
    ("pypi:ty", "0.0.105", "works", "types of handlers, wrong yields"),
)

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
MARK = re.compile(r"  # type: ignor[e]\[[a-z-]+\]")


def mypy(file: Path) -> set[int]:
    """
    Return the lines of `file` at which mypy reports an error.
    """
    options = ["--config-file", str(ROOT / "pyproject.toml"), "--strict", "--no-pretty", "--output", "json"]
    done = run([sys.executable, "-m", "mypy", *options, str(file)])
    assert done.returncode in (0, 1), done.stdout + done.stderr
    reports = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return lines_of(file, [(report["file"], report["line"], report) for report in reports])


def pyright(file: Path) -> set[int]:
    """
    Return the lines of `file` at which pyright reports an error. It needs node, which it may have to fetch.
    """
    done = run(
        [installed("pyright"), "--pythonpath", sys.executable, "--pythonversion", "3.11", "--outputjson", str(file)]
    )
    if done.returncode not in (0, 1):
        pytest.skip(f"pyright does not run here: {done.stderr[-300:] or done.stdout[-300:]}")
    reports = json.loads(done.stdout)["generalDiagnostics"]
    return lines_of(file, [(report["file"], report["range"]["start"]["line"] + 1, report) for report in reports])


def pyrefly(file: Path) -> set[int]:
    """
    Return the lines of `file` at which pyrefly reports an error, by the preset that it takes where it is set up.
    """
    options = ["--preset", "default", "--search-path", str(ROOT), "--python-interpreter-path", sys.executable]
    done = run(
        [installed("pyrefly"), "check", *options, "--python-version", "3.11", "--output-format", "json", str(file)]
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return lines_of(file, [(one["path"], one["line"], one) for one in json.loads(done.stdout)["errors"]])


def ty(file: Path) -> set[int]:
    """
    Return the lines of `file` at which ty reports an error.
    """
    options = ["--extra-search-path", str(ROOT), "--python", sys.prefix, "--python-version", "3.11"]
    done = run([installed("ty"), "check", *options, "--output-format", "gitlab", str(file)])
    assert done.returncode in (0, 1), done.stdout + done.stderr
    reports = [(one["location"], {"minor": "warning"}.get(one["severity"], "error")) for one in json.loads(done.stdout)]
    lines = [(at["path"], at["positions"]["begin"]["line"], {"severity": how}) for at, how in reports]
    return lines_of(file, lines)


def installed(command: str) -> str:
    """
    Return the path of a command of this environment; it is a dependency of `dev`.
    """
    program = shutil.which(command, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if program is None:
        pytest.skip(f"{command} is not installed")
    return program


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "MYPYPATH": str(ROOT), "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=env)


def lines_of(file: Path, reports: list[tuple[str, int, dict[str, Any]]]) -> set[int]:
    errors = [(name, line, report) for name, line, report in reports if report["severity"] == "error"]
    print(*errors, sep="\n")
    return {line for name, line, _ in errors if Path(name).name == file.name}


def loaded(name: str) -> Any:
    """
    Return what running a file of this folder defines.
    """
    return load_script(FOLDER / f"{name}.py", f"typed_{name}")


def overloads() -> Iterator[tuple[str, list[set[str]]]]:
    """
    Yield the place of each function with overloads that names options, and the options that each of them, and itself, takes.
    """
    for file in sorted((ROOT / "stepengine").rglob("*.py")):
        for scope in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(scope, (ast.Module, ast.ClassDef)):
                continue
            functions = [node for node in scope.body if isinstance(node, ast.FunctionDef)]
            for name in sorted(
                {f.name for f in functions if any("overload" in ast.unparse(d) for d in f.decorator_list)}
            ):
                forms = [{a.arg for a in f.args.kwonlyargs} for f in functions if f.name == name]
                yield f"{file.relative_to(ROOT)}: {name}", forms


#: The overloads of a decorator, without and with parentheses; and those of a fork, where `tools=` decides what is returned.
APART = {"stepengine/tools/decorator.py: tool", "stepengine/engine/engine.py: fork_sync"}


@pytest.mark.deep
def test_every_overload_takes_every_option_of_its_function() -> None:
    uneven = {place for place, forms in overloads() if any(form != forms[-1] for form in forms)}

    assert APART == uneven


CHECKERS = pytest.mark.parametrize("checker", [mypy, pyrefly, pyright, ty], ids=lambda checker: checker.__name__)


@CHECKERS
@pytest.mark.spec("generator-contract:V1")
@pytest.mark.deep
def test_the_types_of_the_handler_are_inferred(checker: Callable[[Path], set[int]]) -> None:
    assert set() == checker(FOLDER / "handler.py")


@CHECKERS
@pytest.mark.spec("generator-contract:V1")
@pytest.mark.deep
def test_exactly_the_marked_lines_are_type_errors(checker: Callable[[Path], set[int]], tmp_path: Path) -> None:
    source = (FOLDER / "wrong_yields.py").read_text(encoding="utf-8")
    unmarked = tmp_path / "wrong_yields.py"
    unmarked.write_text(MARK.sub("", source), encoding="utf-8")
    marked = {number for number, line in enumerate(source.splitlines(), start=1) if MARK.search(line)}

    assert marked == checker(unmarked)
    assert len(marked) > 40


def test_the_typed_handler_file_can_be_loaded() -> None:
    """
    The file runs: the tools and definitions in it can be built.
    """
    assert ("find_todos", "read_files") == loaded("handler").reviewer.tool_names


@CHECKERS
@pytest.mark.spec("generator-contract:V1")
@pytest.mark.deep
def test_a_program_for_each_public_task_is_well_typed(checker: Callable[[Path], set[int]]) -> None:
    assert set() == checker(FOLDER / "public_tasks.py")
