"""
What docstrings that users see cite: nothing that cannot be opened with the package or its pages.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import stepengine
from tests.spec_rows import PAGES

from .pages import public_modules

SECTION = re.compile(rf"\b(?:design|{'|'.join(PAGES)}) (?:section )?(?:[A-Z]{{1,3}}\d+|\d+(?:\.\d+)?\b)")
CITED = re.compile(r"\(((?:[A-Z]{1,3}-?\d+(?:-[A-Z]*\d+)?(?:, )?)+)\)")
ROW = re.compile(r"[A-Z]{1,3}-?\d+")
FILE = re.compile(r"\bspec/|\bdesign\.md|(?:^|[\s`\"(])/(?:root|home|work|Users)/")
MODULE = re.compile(r"\bstepengine(?:\.[a-z_]+)+")
OF_SIMULATE = {*(f"I{number}" for number in range(1, 13)), "R3"}
"""Names of what ``simulate`` checks: its docstring says what each means, and its failures show them."""


def documented() -> Iterator[tuple[str, str]]:
    """
    Give the name and the docstring of every public module, class, function and method, and of the options of runs.
    """
    options = importlib.import_module("stepengine.engine.options")
    for module in [*map(importlib.import_module, public_modules()), options]:
        names = {name: getattr(module, name) for name in module.__all__}
        yield module.__name__, inspect.getdoc(module) or ""
        for name, member in names.items():
            yield f"{module.__name__}.{name}", inspect.getdoc(member) or ""
            if inspect.isclass(member) and member.__module__.startswith("stepengine"):
                for inner, value in inspect.getmembers(member):
                    if not inner.startswith("_"):
                        yield f"{module.__name__}.{name}.{inner}", inspect.getdoc(value) or ""


def private(text: str) -> list[str]:
    """
    Return what *text* cites that its reader cannot open.
    """
    modules = [
        found.removesuffix(".")
        for found in MODULE.findall(text)
        if not any(importable(part) for part in (found, found.rpartition(".")[0]))
    ]
    return [
        *SECTION.findall(text),
        *(set(ROW.findall(" ".join(CITED.findall(text)))) - OF_SIMULATE),
        *FILE.findall(text),
        *modules,
    ]


def importable(name: str) -> bool:
    """
    Say whether *name* is a module of the package, or a name in one.
    """
    return name in public_modules() or (Path(stepengine.__file__).parents[1] / f"{name.replace('.', '/')}.py").is_file()


@pytest.mark.parametrize(
    "text",
    [
        "Run it (requirements K3).",
        "Kept (reliability section 4).",
        "Asked (EC75).",
        "See spec/replay.md.",
        f"In /{'root'}/x.",
    ],
)
def test_an_inaccessible_citation_is_found(text: str) -> None:
    assert private(text)


@pytest.mark.deep
@pytest.mark.smoke
def test_public_docstrings_cite_only_accessible_sources() -> None:
    told = dict(documented())

    assert len(told) > 900
    assert {} == {name: found for name, text in told.items() if (found := private(text))}
