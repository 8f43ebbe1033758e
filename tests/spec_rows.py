"""
The rows of the specification in ``docs/spec``, the places that cite them, and the tests that hold them.

A row is an item of a list that begins with its id: ``- **A13**: What holds.`` A test cites it as ``requirements:A13``, a comment
or a docstring also as ``requirements A13``; tests are read, not imported.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from html import escape
from itertools import groupby
from pathlib import Path

import attrs

ROOT = Path(__file__).resolve().parents[1]
SPEC = ROOT / "docs" / "spec"
CITING = ("stepengine", "tests", "agents", "examples", "benchmarks", ".ci")
"""Folders whose Python files may cite rows."""
ID = r"[A-Z]{1,3}-?[0-9]+[a-z]?"
ROW = re.compile(rf"^- \*\*({ID})\*\*: ", re.MULTILINE)
MORE = rf"{ID}(?:(?:-|, | and | to |, and ){ID})*"
WITHOUT_ROWS = ("features", "index")
PAGES = tuple(sorted(page.stem for page in SPEC.glob("*.md") if page.stem not in WITHOUT_ROWS))
NAMED = re.compile(rf"\b({'|'.join(PAGES)})(?::| (?:section )?)({MORE})\b")
BARE = re.compile(rf"\(({MORE})\)")
ONE = re.compile(rf"(?:{'|'.join(PAGES)}):{ID}")


@attrs.frozen
class Citation:
    """
    A place that names a row. *page* is empty where only the id is said, which any page may have.
    """

    file: Path
    line: int
    page: str
    row: str

    @property
    def resolves(self) -> bool:
        if self.page:
            return f"{self.page}:{self.row}" in known()
        return any(f"{page}:{self.row}" in known() for page in PAGES)

    def __str__(self) -> str:
        where = f"docs/spec/{self.page}.md has" if self.page else "docs/spec has"
        return f"{self.file.relative_to(ROOT)}:{self.line}: {where} no row {self.row!r}"


def rows_of(page: str) -> tuple[str, ...]:
    """Return the ids of the rows in the text of a page, in its order."""
    return tuple(ROW.findall(page))


@cache
def known() -> frozenset[str]:
    """Return every row as ``page:ID``."""
    found = {f"{page}:{row}" for page in PAGES for row in rows_of((SPEC / f"{page}.md").read_text(encoding="utf-8"))}
    return frozenset(found)


# --- who cites ------------------------------------------------------------------------------------------------------


def citing() -> list[Path]:
    """Return the files that may cite rows: Python's, and the pages themselves."""
    return [*sorted(file for folder in CITING for file in (ROOT / folder).rglob("*.py")), *sorted(SPEC.glob("*.md"))]


def citations(file: Path, text: str) -> Iterator[Citation]:
    """Give what a file cites. An id without its page is one where it stands in brackets in a comment or a docstring."""
    for match in NAMED.finditer(text):
        yield from (Citation(file, _line(text, match.start()), match[1], row) for row in re.findall(ID, match[2]))
    candidates = list(BARE.finditer(text))
    prose = _prose(text) if candidates and file.suffix == ".py" else None
    for match in candidates:
        line = _line(text, match.start())
        if prose is None or line in prose:
            yield from (Citation(file, line, "", row) for row in re.findall(ID, match[1]))


def _line(text: str, at: int) -> int:
    return text.count("\n", 0, at) + 1


def _prose(text: str) -> set[int]:
    """Return the lines of docstrings, and of comments."""
    found = {
        number for number, line in enumerate(text.splitlines(), 1) if line.lstrip().startswith("#") or "  # " in line
    }
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            found.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return found


# --- who holds ------------------------------------------------------------------------------------------------------


@cache
def holders(folder: str = "tests") -> dict[str, tuple[str, ...]]:
    """Return the tests of a folder that hold each row, as ``tests/x.py::name``; as ``tests/x.py`` where all tests of a file do."""
    found: dict[str, set[str]] = {}
    for file in sorted((ROOT / folder).rglob("test_*.py")):
        text = file.read_text(encoding="utf-8")
        if "mark.spec(" in text:
            for row, test in _held(ast.parse(text)):
                found.setdefault(row, set()).add(f"{file.relative_to(ROOT).as_posix()}{test}")
    return {row: tuple(sorted(tests)) for row, tests in found.items()}


def _held(module: ast.Module) -> Iterator[tuple[str, str]]:
    """Give rows with the tests of a module that hold them, as what stands behind the name of its file."""
    values = {
        target.id: node.value
        for node in module.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for name, value in values.items():
        if name == "pytestmark" or name.startswith("Test"):
            yield from ((row, "" if name == "pytestmark" else f"::{name}") for row in _rows_in(value, values))
    yield from _held_in(module.body, values, "")


def _held_in(body: list[ast.stmt], values: dict[str, ast.expr], outer: str) -> Iterator[tuple[str, str]]:
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            name = f"{outer}::{node.name}"
            yield from ((row, name) for each in node.decorator_list for row in _rows_in(each, values))
            if isinstance(node, ast.ClassDef):
                yield from _held_in(node.body, values, name)


def _rows_in(mark: ast.expr, values: dict[str, ast.expr]) -> set[str]:
    """Return the rows that a mark says, or that stand in what the names in it are at the top of the module."""
    parts = [mark, *(values[node.id] for node in ast.walk(mark) if isinstance(node, ast.Name) and node.id in values)]
    nodes = [node for part in parts for node in ast.walk(part)]
    if not any(isinstance(node, ast.Attribute) and node.attr == "spec" for node in nodes):
        return set()
    said = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return {row for row in said if ONE.fullmatch(row)}


# --- the site -------------------------------------------------------------------------------------------------------


def with_tests(page: str, text: str) -> str:
    """Return the text of a page with an anchor at each row, and the tests that hold it below."""
    starts = [match.start() for match in ROW.finditer(text)]
    parts = [text[: starts[0]]] if starts else [text]
    for start, end in zip(starts, [*starts[1:], len(text)], strict=True):
        item = text[start:end]
        row = rows_of(item)[0]
        length = len(item.rstrip()) if end == len(text) else _length(item)
        below = _list_of(holders().get(f"{page}:{row}", ()))
        parts += [f'- <span id="{row}"></span>', item[2:length], below, item[length:]]
    return "".join(parts)


def _length(item: str) -> int:
    """Return how many characters of a text that begins with an item belong to it."""
    rest = re.search(r"\n+(?=\S)", item)
    return rest.start() if rest else len(item.rstrip())


def _list_of(tests: tuple[str, ...]) -> str:
    if not tests:
        return ""
    if len(tests) == 1:
        return f"\n\n  <p><small>Held by <code>{escape(tests[0])}</code></small></p>\n"
    items = []
    for file, each in groupby(tests, key=lambda test: test.partition("::")[0]):
        inner = ", ".join(f"<code>{escape(test.removeprefix(file))}</code>" for test in each)
        items.append(f"<li><code>{escape(file)}</code> {inner}</li>")
    return f"\n\n  <details><summary><small>Held by {len(tests)} tests</small></summary><ul>{''.join(items)}</ul></details>\n"
