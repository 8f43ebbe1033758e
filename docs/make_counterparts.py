# ruff: noqa: INP001
"""
Write ``docs/works-with.md`` from what the contract tests say: ``python docs/make_counterparts.py``.

``make_counterparts.py pip NAME...`` prints what pip has to install of the packages that stand in an environment of their own; ``.ci/run``
asks so.
"""

from __future__ import annotations

import ast
import sys
from itertools import groupby
from pathlib import Path

import attrs

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "docs" / "works-with.md"
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
    "durable": "Durable runs",
    "typing": "Type checkers",
    "examples": "Programs that are recorded and replayed unchanged",
}
"""The heading for the tests of a folder; what stands in others comes last, under `ELSE`."""
ELSE = "What programs are run and packed with"
HEAD = """\
# Compatibility: what it works with

Programs that others wrote, each connected in a test of its own: which version, and whether it works.

Made by `python docs/make_counterparts.py` from the constant `COUNTERPARTS` of the tests; do not edit it by hand. **works** is all that the
row says; **partly** says what is missing; **refused** means that it says so, in words, before anything is done. Older and newer
versions may work as well: these are the ones that were tried. A test that is *deep* runs with `python -m pytest -m deep FILE`, one of the
*faults* with `python -m pytest -m faults FILE`, the others with `python -m pytest FILE`; `.ci/run` installs every one of these
versions and runs all of it.
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
    for subject, rows in groupby(counterparts(), lambda row: row.subject):
        lines += [
            f"## {subject}\n",
            "| counterpart | version | | what was tried | in which test |",
            "|---|---|---|---|---|",
        ]
        lines += [line(row) for row in rows]
        lines.append("")
    return "\n".join(lines)


def line(row: Counterpart) -> str:
    """Return a row of the page."""
    origin = {"npm": "npm", "pypi": "PyPI"}[row.registry]
    kind = "" if row.kind == "fast" else f" ({row.kind})"
    return f"| {row.name} ({origin}) | {row.version} | {row.verdict} | {row.covers} | `{row.test}`{kind} |"


if __name__ == "__main__":
    match sys.argv[1:]:
        case []:
            TARGET.write_text(page(), encoding="utf-8")
        case ["pip", *names] if names:
            print(*pip(*names))  # noqa: T201 - a script
        case _:
            raise SystemExit(__doc__)
