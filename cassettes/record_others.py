"""
Records a run of every program in ``examples/from_others``: ``python -m cassettes.record_others [FOLDER]``.

The replies of the models and the answers of people are in the programs. No model is asked.
"""

# ruff: noqa: T201 - a script that prints what it wrote

from __future__ import annotations

import importlib.util
import sys
import tempfile
from pathlib import Path
from typing import Any

from stepengine import Engine
from stepengine.journal import FileJournal
from stepengine.tools.bundled import file_tools

HERE = Path(__file__).resolve().parent
OTHERS = HERE / "others"
EXAMPLES = HERE.parent / "examples" / "from_others"


def load_program(name: str) -> Any:
    """Return the module of a program."""
    spec = importlib.util.spec_from_file_location(f"stepengine_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None  # noqa: S101, PT018 - the file is in the repository
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def make_engine(program: Any, files: Path | str, models: Any = None) -> Engine:
    """Return an engine for a program; file tools work in *files*."""
    return Engine([program.agent], file_tools(files, write=True), models)


def record(name: str, folder: Path) -> Path:
    """Record a run into *folder* and return its file."""
    path = folder / f"{name}.jsonl"
    path.unlink(missing_ok=True)
    folder.mkdir(exist_ok=True)
    program = load_program(name)
    with tempfile.TemporaryDirectory() as files, make_engine(program, files, program.make_model()) as engine:
        program.run(engine, FileJournal(path, link=False, stable=True)).unwrap()
    return path


if __name__ == "__main__":
    for program_file in sorted(EXAMPLES.glob("*.py")):
        print(f"recorded {record(program_file.stem, Path(sys.argv[1]) if sys.argv[1:] else OTHERS)}")
