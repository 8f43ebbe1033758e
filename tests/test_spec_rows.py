"""The list of rows that tests may cite, and the marker that refuses all others."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import spec_rows

PAGE = """\
# A1 in a heading is none
| A1 | first |
| **A2** | bold |
- `A3`: in a list
A4 in a line of text
A5
| A7 ! | marked |
| A7b | with a letter |
| FS09 | padded |
| FS10 | padded |
| not A8 | elsewhere |
"""


def test_a_row_is_an_id_at_the_beginning_of_a_line() -> None:
    assert ("A1", "A2", "A3", "A4", "A7", "A7b", "FS09", "FS10") == spec_rows.rows_of(PAGE)


def test_a_list_of_rows_is_short_and_gives_the_same_rows_again() -> None:
    rows = spec_rows.rows_of(PAGE)

    assert "A1-4 A7 A7b FS09-10" == spec_rows.compact(rows)
    assert sorted(rows) == sorted(spec_rows.expanded(spec_rows.compact(rows)))


def test_the_list_is_that_of_the_specification() -> None:
    if not spec_rows.SPEC.is_dir():
        pytest.skip("the specification is not part of a clone")
    pages = spec_rows.read()

    assert spec_rows.listed(pages) == spec_rows.LIST.read_text(), "run python -m tests.spec_rows"
    assert {f"{page}:{row}" for page, text in pages.items() for row in spec_rows.rows_of(text)} == spec_rows.known()


@pytest.mark.parametrize("row", ["ecosystem:EC120", "requirements:E99", "elsewhere:A1", "A1", 7, ["requirements:E1"]])
def test_a_test_that_cites_what_is_no_row_is_refused_by_name(row, request: pytest.FixtureRequest) -> None:
    (conftest,) = [p for p in request.config.pluginmanager.get_plugins() if hasattr(p, "marker_errors")]
    cite = pytest.mark.spec  # by another name: what is cited here proves nothing
    cited = {"spec": [cite("judging:JG1", "interfaces:IF1", "providers:PV1", row).mark]}
    item = SimpleNamespace(nodeid="test_it", iter_markers=lambda name: iter(cited.get(name, ())))

    assert [f"test_it: the specification has no row {row!r}"] == [
        e.partition(";")[0] for e in conftest.marker_errors(item)
    ]


CITED = re.compile(r'"reliability:([A-Z]{2}[0-9]{2})"')
GROUPS = ("MP", "TL", "GN", "JR", "SP", "SS", "PM", "FS", "SH", "NW", "MC", "UI", "SC", "RS")
NOT_TESTED = {"UI10": "nothing exports CSV or TSV"}
"""Rows of the catalogue of faults that no test cites, each with the reason."""


@pytest.mark.spec("reliability:K20")
def test_every_row_of_the_catalogue_of_faults_is_cited_by_a_test_or_has_a_reason() -> None:
    cited = {row for path in Path(__file__).parent.rglob("test_*.py") for row in CITED.findall(path.read_text())}
    rows = {row.partition(":")[2] for row in spec_rows.known() if row.startswith("reliability:")}
    catalogue = {row for row in rows if row.startswith(GROUPS) and len(row) == 4}

    assert 352 == len(catalogue)
    assert set(NOT_TESTED) == catalogue - cited
