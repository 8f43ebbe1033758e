# ruff: noqa: INP001
"""
Write ``docs/reference/works-with.md`` from what the contract tests say: ``python docs/make_counterparts.py``.

``make_counterparts.py pip NAME...`` prints what pip has to install of the packages that stand in an environment of their own; ``.ci/deep``
asks so.
"""

from __future__ import annotations

import ast
import sys
from itertools import groupby
from pathlib import Path

import attrs

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "docs" / "reference" / "works-with.md"
CONSTANT = "COUNTERPARTS"
VERDICTS = ("works", "partly", "refused")
REGISTRIES = ("npm", "pypi")
SUBJECTS = {
    "models": "Models",
    "faults": "Models",
    "mcp": "MCP",
    "acp": "Editors",
    "web": "Web pages",
    "server": "Runs over HTTP",
    "otel": "Traces",
    "typing": "Type checkers",
    "examples": "Programs recorded and replayed unchanged",
}
"""The heading for the tests of a folder; what stands in others comes last, under `ELSE`."""
ELSE = "Servers, durable runs, event loops"
HEAD = """\
# Compatibility: what it works with

Find the tested versions of SDKs, MCP servers, editors, web clients and tools. Other versions may work.

Packages are from PyPI, `npm:` from npm. Links lead to the tests. **Partly**: the text names what is missing. **Refused**: an error before
anything runs.

<!-- Made by docs/make_counterparts.py from the constant COUNTERPARTS of the tests. -->
"""


@attrs.frozen(order=True)
class Counterpart:
    """A foreign program as a contract test names it, the file of the test, and how that is run."""

    test: str
    package: str
    version: str
    verdict: str
    covers: str
    kind: str

    @property
    def registry(self) -> str:
        """Where it comes from: ``"npm"`` or ``"pypi"``."""
        return self.package.partition(":")[0]

    @property
    def name(self) -> str:
        """What it is called there."""
        return self.package.partition(":")[2]

    @property
    def result(self) -> str:
        """What was tested, with the verdict if it is not ``"works"``."""
        return self.covers if self.verdict == "works" else f"**{self.verdict}**: {self.covers}"

    @property
    def subject(self) -> str:
        """The heading that it stands under."""
        return SUBJECTS.get(self.test.removeprefix("tests/").removeprefix("adapters/").split("/")[0], ELSE)


def counterparts() -> list[Counterpart]:
    """Return the rows of all contract tests, those of one subject side by side."""
    found = [row for file in sorted((ROOT / "tests").rglob("test_*.py")) for row in rows_of(file)]
    order = list(dict.fromkeys([*SUBJECTS.values(), ELSE]))
    return sorted(found, key=lambda row: (order.index(row.subject), row.name, numbers(row.version), row.test))


def rows_of(file: Path) -> list[Counterpart]:
    """Return the rows that stand in the constant of a test file; it is read, not run."""
    text = file.read_text(encoding="utf-8")
    if CONSTANT not in text:
        return []
    tree = ast.parse(text)
    values = [
        node.value
        for node in tree.body
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and CONSTANT in {ast.unparse(one) for one in targets(node)}
    ]
    marks = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    kind = next((mark for mark in ("faults", "deep") if mark in marks), "fast")
    path = file.relative_to(ROOT).as_posix()
    return [Counterpart(path, *row, kind=kind) for value in values if value for row in ast.literal_eval(value)]


def targets(node: ast.Assign | ast.AnnAssign) -> list[ast.expr]:
    """Return what an assignment assigns to."""
    return node.targets if isinstance(node, ast.Assign) else [node.target]


def numbers(version: str) -> tuple[int, ...]:
    """Return a version as numbers, so that 10 stands behind 9."""
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def pip(*names: str) -> list[str]:
    """Return what pip has to install for the packages of these names."""
    found = sorted(
        {f"{row.name}=={row.version}" for row in counterparts() if row.package in {f"pypi:{n}" for n in names}}
    )
    if len(found) != len(names):
        msg = f"{names} are to be one version each, and the tests name {found}"
        raise SystemExit(msg)
    return found


def page() -> str:
    """Return the whole page."""
    lines = [HEAD]
    for subject, found in groupby(counterparts(), lambda row: row.subject):
        tested: dict[tuple[str, str, str], list[str]] = {}
        for row in sorted(found, key=lambda row: (row.name, row.test)):
            tested.setdefault((row.package, row.result, row.test), []).append(row.version)
        cells: dict[str, list[str]] = {}
        for (package, result, test), versions in tested.items():
            name = f"{package.removeprefix('pypi:')} {', '.join(versions)}"
            cells.setdefault(name, []).append(f"[{result}](../../{test})")
        lines += [f"## {subject}\n"]
        names: dict[str, list[str]] = {}
        for name, results in cells.items():
            names.setdefault("; ".join(results), []).append(name)
        lines += [*(f"- {', '.join(same)}: {results}" for results, same in names.items()), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    match sys.argv[1:]:
        case []:
            TARGET.write_text(page(), encoding="utf-8")
        case ["pip", *names] if names:
            print(*pip(*names))  # noqa: T201 - a script
        case _:
            raise SystemExit(__doc__)
