"""
``make_project``: the files of a new project, or of a package of agents.

The templates are in ``_init`` and ``_init_package``. Must not be here: printing what to do next; the command line does that.
"""

from __future__ import annotations

import keyword
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from stepengine.engine.trust import LOCAL
from stepengine.errors import DefinitionError

TEMPLATE = Path(__file__).parent / "_init"
PACKAGE = Path(__file__).parent / "_init_package"
SHARED = {
    "agents/todos.py": "src/{module}/todos.py",
    "evals/todos.py": "evals/todos.py",
    "tests/test_todos.py": "tests/test_todos.py",
    "tests/journals/test_todos/test_a_run.jsonl": "src/{module}/recordings/tests/test_todos/test_a_run.jsonl",
}
"""Files of a project that a package has, too, and where."""
SAMPLE = ".sample"
"""The suffix that keeps linters, type checkers and test collectors away from the files of a project that is not one yet."""
NAME, MODULE = "{name}", "{module}"
ODD = re.compile(r"[^a-z0-9]+")
LISTED_FILES = 5
"""How many existing files an error names: enough to see which folder it is."""


def make_project(folder: Path, *, package: bool = False) -> list[str]:
    """
    Write a new project with an agent, its tests, a recorded run and CI, and return its files, as sorted paths in *folder*.

    The files are not trusted by this; see ``trust_folder``.

    Args:
        folder: The folder, created if it is missing.
        package: Write an installable package of agents.

    Raises:
        DefinitionError: when one of its files exists already, or *folder* cannot be written; no file is overwritten.
    """
    name, module = derive_project_and_module_names(folder)
    words = {NAME: name, MODULE: module} | (
        {"from agents.todos import": f"from {module}.todos import", '"agents/todos.py"': f'"src/{module}/todos.py"'}
        if package
        else {}
    )
    files = {_fill_template(path, words): file for path, file in _find_templates(package=package)}
    try:
        there = [path for path in files if (folder / path).exists() or (folder / path).is_symlink()]
        if there:
            more = f" and {len(there) - LISTED_FILES} more" if len(there) > LISTED_FILES else ""
            msg = (
                f"{folder} already has {', '.join(there[:LISTED_FILES])}{more}, and existing files are not overwritten; "
                "choose a folder without them"
            )
            raise DefinitionError(msg)
        for path, file in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            with (folder / path).open("x", encoding="utf-8", newline="\n") as made:
                made.write(_fill_template(file.read_text(encoding="utf-8"), words))
    except OSError as error:
        msg = f"{error.filename or folder} cannot be written: {error.strerror}"
        raise DefinitionError(msg) from None
    return sorted(files)


def _find_templates(*, package: bool) -> Iterator[tuple[str, Path]]:
    """Yield the paths of a project with the template file of each."""
    for file in sorted(TEMPLATE.rglob(f"*{SAMPLE}")):
        path = str(file.relative_to(TEMPLATE)).removesuffix(SAMPLE)
        if not package:
            yield path, file
        elif path in SHARED:
            yield SHARED[path], file
    for file in sorted(PACKAGE.rglob(f"*{SAMPLE}")) if package else ():
        yield str(file.relative_to(PACKAGE)).removesuffix(SAMPLE), file


def _fill_template(text: str, replacements: Mapping[str, str]) -> str:
    """Return *text* with each word of *replacements* replaced."""
    for word, meant in replacements.items():
        text = text.replace(word, meant)
    return text


def derive_project_and_module_names(folder: Path) -> tuple[str, str]:
    """Return the name of a project in *folder*, and of its module."""
    name = ODD.sub("-", folder.resolve().name.lower()).strip("-") or "agent"
    module = name.replace("-", "_")
    taken = {*sys.stdlib_module_names, *keyword.kwlist, "stepengine", LOCAL.name}
    return name, module if module.isidentifier() and module not in taken else f"{LOCAL}_{module}"
