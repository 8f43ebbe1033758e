"""
The page of features names each module of the outer packages, and only modules that exist.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from .pages import KERNEL, ROOT, page

PACKAGE = ROOT / "stepengine"
WITHOUT_SECTION = {"drafts", "errors", "events", "helpers", "questions", "redaction"}
"""Packages and modules with one feature each, or without any: facades, errors and secrets."""
HEAD = "| feature | user story | where | other ways, and why they stay |"


def sections() -> dict[str, list[list[str]]]:
    """
    Return the cells of each row of the page, by package.
    """
    parts = re.split(r"^## (\w+)\n", page("spec/features.md"), flags=re.MULTILINE)[1:]
    tables = {}
    for package, text in zip(parts[::2], parts[1::2], strict=True):
        lines = [line for line in text.splitlines() if line.startswith("|")]
        assert [HEAD, "|---|---|---|---|"] == lines[:2], package
        tables[package] = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    return tables


def modules_of(rows: list[list[str]]) -> set[str]:
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row[2])}


def unnamed(folder: Path, named: set[str], prefix: str = "") -> Iterator[str]:
    """
    Give the modules and folders that no row names. A folder is named itself, or by everything in it.
    """
    for entry in sorted(folder.iterdir()):
        name = f"{prefix}{entry.name}{'/' if entry.is_dir() else ''}"
        if entry.name in ("__init__.py", "__pycache__") or name in named:
            continue
        if entry.suffix == ".py":
            yield name
        elif entry.is_dir():
            parts = any(each.startswith(name) for each in named)
            yield from unnamed(entry, named, name) if parts else [name]


def test_each_package_has_a_section() -> None:
    found = {entry.stem for entry in PACKAGE.iterdir() if (entry / "__init__.py").exists() or entry.suffix == ".py"} - {
        "__init__",
        "__main__",
    }

    assert found == {*sections(), *KERNEL, *WITHOUT_SECTION}


def test_each_module_has_a_row() -> None:
    missing = [
        f"{package}/{name}"
        for package, rows in sections().items()
        for name in unnamed(PACKAGE / package, modules_of(rows))
    ]

    assert [] == missing, "docs/spec/features.md needs a row for these modules"


def test_named_modules_exist() -> None:
    named = [f"{package}/{name}" for package, rows in sections().items() for name in modules_of(rows)]

    assert len(named) > 200
    assert [] == [name for name in named if not (PACKAGE / name).exists()]


def test_each_row_is_complete() -> None:
    for package, rows in sections().items():
        for row in rows:
            assert len(row) == 4, (package, row)
            assert all(row), (package, row)
            assert re.fullmatch(r"[A-Z].*\.", row[1]), (package, row[1])


def test_a_new_module_is_reported(tmp_path: Path) -> None:
    for name in ("__init__.py", "old.py", "new.py", "whole/one.py", "part/old.py", "part/new.py", "fresh/x.js"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()

    assert ["fresh/", "new.py", "part/new.py"] == [*unnamed(tmp_path, {"old.py", "whole/", "part/old.py"})]
