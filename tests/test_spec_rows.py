"""
The rows of the specification: what cites one that is not there is told with its place, and the site shows who holds each.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import spec_rows

PAGE = """\
# A1 in a heading is none

Nor is **A2** in a sentence, nor what an item says later: see **A3**.

- **A4**: in a list

  | a | table |
  |---|---|
  | A9 | belongs to it |
- **A7b**: with a letter,
  on two lines
- **FS09**: padded

## Next

- A6: is not bold
"""


def test_a_row_is_a_list_item_starting_with_its_id() -> None:
    assert ("A4", "A7b", "FS09") == spec_rows.rows_of(PAGE)


def test_no_page_defines_a_row_twice() -> None:
    for page in spec_rows.SPEC.glob("*.md"):
        rows = spec_rows.rows_of(page.read_text(encoding="utf-8"))

        assert [] == sorted({row for row in rows if rows.count(row) > 1}), page.name
        assert bool(rows) == (page.stem not in spec_rows.WITHOUT_ROWS), page.name


def test_the_index_lists_every_page() -> None:
    index = (spec_rows.SPEC / "index.md").read_text(encoding="utf-8")

    pages = sorted({page.stem for page in spec_rows.SPEC.glob("*.md")} - {"index"})

    assert pages == sorted(re.findall(r"^([a-z-]+)$", index, re.MULTILINE))
    assert pages == sorted(re.findall(r"^\| \[[^\]]+\]\(([a-z-]+)\.md\) ", index, re.MULTILINE))


@pytest.mark.deep
def test_every_cited_row_exists() -> None:
    cited = [
        each
        for file in spec_rows.citing()
        if file.name != Path(__file__).name
        for each in spec_rows.citations(file, file.read_text(encoding="utf-8"))
    ]

    assert len(cited) > 2_500
    assert "" == "\n".join(str(each) for each in cited if not each.resolves)


@pytest.mark.parametrize(
    ("line", "ids"),
    [
        ("# Rules: replay @1 to @3, reliability @4.", ["A1", "A3", "A4"]),
        ("x = 1  # once (@1, @3 and @4)", ["A1", "A3", "A4"]),
        ('"""Keep it (@1-@3; replay @4)."""', ["A4"]),
        ('"""Keep it (@1-@3)."""', ["A1", "A3"]),
        ('mark("replay:@1", "replay:@4c")', ["A1", "A4c"]),
        ("limits = (@128, @256)", []),
        ("# as UTF-8 (see RFC 3339)", []),
    ],
)
def test_a_citation_needs_its_page_or_brackets(line: str, ids: list[str]) -> None:
    text = line.replace("@", "A")
    found = list(spec_rows.citations(spec_rows.ROOT / "x.py", f"\n{text}\n"))

    assert ids == [each.row for each in found]
    assert {2} >= {each.line for each in found}


def test_a_citation_of_a_missing_row_is_reported_with_place() -> None:
    file = spec_rows.ROOT / "stepengine" / "x.py"
    told = [
        str(each) for each in spec_rows.citations(file, "\n# replay @1, (@2)".replace("@", "ZZ")) if not each.resolves
    ]

    assert [
        "stepengine/x.py:2: docs/spec/replay.md has no row 'ZZ1'",
        "stepengine/x.py:2: docs/spec has no row 'ZZ2'",
    ] == told


@pytest.mark.parametrize("row", ["requirements:E99", "elsewhere:A1", "A1", 7, ["requirements:E1"]])
def test_a_test_citing_a_missing_row_is_refused_by_name(row, request: pytest.FixtureRequest) -> None:
    (conftest,) = [p for p in request.config.pluginmanager.get_plugins() if hasattr(p, "marker_errors")]
    cite = pytest.mark.spec  # by another name: what is cited here proves nothing
    cited = [cite("evaluation:JG1", "interfaces:IF1", "providers:PV1", row).mark]
    item = SimpleNamespace(name="test_it", location=("tests/test_x.py", 6, ""), iter_markers=lambda: iter(cited))

    assert [f"tests/test_x.py:7: test_it: the specification has no row {row!r}"] == [
        e.partition(";")[0] for e in conftest.marker_errors(item)
    ]


CITED = re.compile(r'"reliability:([A-Z]{2}[0-9]{2})"')
GROUPS = ("MP", "TL", "GN", "JR", "SP", "SS", "PM", "FS", "SH", "NW", "MC", "UI", "SC", "RS")


def test_every_fault_row_is_cited() -> None:
    cited = {row for path in Path(__file__).parent.rglob("test_*.py") for row in CITED.findall(path.read_text())}
    rows = {row.partition(":")[2] for row in spec_rows.known() if row.startswith("reliability:")}
    catalogue = {row for row in rows if row.startswith(GROUPS) and len(row) == 4}

    assert set() == catalogue - cited
