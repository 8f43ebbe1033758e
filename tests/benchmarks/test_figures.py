"""
What the benchmarks make of figures: verdicts, tables, pictures and the page. Nothing here measures.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as command
from benchmarks import page, plots, tables
from benchmarks.judging import FAST, FIGURES, PROMISES, Figure, judge
from benchmarks.sheet import Key, Sheet, Spread


def sheet_of(*figures: tuple[str, str, str, int, list[float]]) -> Sheet:
    sheet = Sheet({"date": "2026-01-01", "machine": {}, "versions": {}})
    for work, what, engine, count, samples in figures:
        for turn, value in enumerate(samples):
            sheet.add(Key(work, what, engine, count), value, unit="us", turn=turn)
    return sheet


PROMISED = [figure for promise in PROMISES for figure in promise.figures]


def bounds_of(row: str) -> dict[str, float]:
    return {f"{p.what}: {figure.what}": figure.most for p in PROMISES if p.row == row for figure in p.figures}


@pytest.mark.spec("performance:Q1", "performance:Q2", "performance:Q3", "performance:Q9")
@pytest.mark.spec("performance:Q13", "performance:Q15", "durable:UT20")
def test_the_eight_promises_have_their_bounds() -> None:
    growth = ("plain", "recorded in memory", "recorded in a file", "durable")

    assert 8 == len(PROMISES)
    assert [0.5, 0.6, 1.5] == list(bounds_of("performance:Q2").values())
    assert {f"a step at N=10,000 against N=100: {what}": 1.3 for what in growth} == bounds_of("performance:Q1")
    assert [1.5] == list(bounds_of("performance:Q3").values())
    assert [1.6, 5.5] == list(bounds_of("performance:Q9").values())
    assert [3.5] == list(bounds_of("durable:UT20").values())
    assert [2.0, 2.0] == list(bounds_of("performance:Q13").values())
    assert [2.0, 2.0] == list(bounds_of("performance:Q15").values())


@pytest.mark.parametrize("figure", PROMISED, ids=repr)
def test_a_promise_holds_up_to_its_bound(figure: Figure) -> None:
    def word(factor: float) -> str:
        ours, other = (*figure.one, [figure.most * factor] * 2), (*figure.other, [1.0] * 2)
        (found,) = [verdict for verdict in judge(sheet_of(ours, other)) if verdict.figure is figure]
        return found.word

    assert ("holds", "BROKEN") == (word(1.0), word(1.01))


def all_holding() -> Sheet:
    """
    Return a sheet in which all ratios are 1, but for steps next to the fastest peer.
    """
    keys = {key for figure in PROMISED for key in (figure.one, figure.other) if key}
    return sheet_of(*[(*key, [2.0 if key.engine == FAST else 1.0]) for key in sorted(keys)])


def test_the_summary_counts_promises_passed_and_failed() -> None:
    sheet = all_holding()
    lines, failed = tables.summary(sheet)

    assert (8, 0, "8 passed, 0 failed") == (len(lines) - 1, failed, lines[-1])
    sheet.add(Key("W1", "step", "stepengine", 10_000), 1.31, unit="us", turn=0)
    lines, failed = tables.summary(sheet)
    assert (1, "7 passed, 1 failed") == (failed, lines[-1])
    (line,) = [line for line in lines if line.startswith("FAILED")]
    assert "a step at N=10,000 against N=100: plain 1.31 (at most 1.3), recorded in memory 1.00" in line


def test_a_promise_that_was_not_measured_fails() -> None:
    lines, failed = tables.summary(Sheet())

    assert (8, "0 passed, 8 failed") == (failed, lines[-1])
    assert {"not measured"} == {verdict.word for verdict in judge(Sheet())}


@pytest.mark.parametrize(("ratio", "code"), [(1.0, 0), (9.0, 1)])
def test_the_command_exits_with_one_for_a_broken_promise(
    ratio: float, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """
    It makes the environment of the one peer that it needs.
    """
    made = []

    def measured(bench: Any) -> None:
        bench.sheet = all_holding()
        bench.sheet.add(Key("W2", "run", "stepengine", 1_000), 2 * ratio, unit="ms", turn=0)

    monkeypatch.setattr(command, "promised", measured)
    monkeypatch.setattr(command, "make", lambda folder, names, *, newest: made.append((folder, names, newest)))

    assert code == command.promises(["--peers", str(tmp_path), "--rounds", "1"])
    assert f"{8 - code} passed, {code} failed" == capsys.readouterr().out.splitlines()[-1]
    assert [(tmp_path, [FAST], False)] == made


def test_a_ratio_is_taken_within_each_round() -> None:
    """
    A machine that is twice as slow in one round is so for both.
    """
    sheet = sheet_of(("W1", "step", "ours", 1, [1.0, 2.0, 1.0]), ("W1", "step", "peer", 1, [2.0, 4.0, 4.0]))

    assert Spread(0.5, 0.25, 0.5, 3) == sheet.ratio(Key("W1", "step", "ours", 1), Key("W1", "step", "peer", 1))


def test_a_missing_round_is_replaced_by_the_median() -> None:
    sheet = sheet_of(("W1", "step", "ours", 1, [1.0, 2.0]), ("W1", "step", "slow", 1, [10.0]))

    assert (0.1, 0.2, 2) == sheet.ratio(Key("W1", "step", "ours", 1), Key("W1", "step", "slow", 1))[1:]


def test_a_sheet_is_read_back_from_its_json() -> None:
    sheet = sheet_of(("W1", "step", "stepengine", 10, [1.0, 2.0]))
    sheet.add(Key("W2", "run", "late", 5), 3.0, unit="ms", turn=1)
    sheet.miss("W4", "peer", "it cannot")

    assert sheet == Sheet.from_json(sheet.to_json())


@pytest.mark.parametrize("text", ["[]", '{"format": 0}'])
def test_a_file_of_another_format_is_refused(text: str) -> None:
    with pytest.raises(SystemExit, match="python -m benchmarks --json FILE"):
        Sheet.from_json(text)


def test_a_picture_names_each_line_once_and_holds_all_points() -> None:
    figures = [
        ("W1", "step", who, n, [n * f]) for f, who in ((1.0, "stepengine"), (3.0, "langgraph")) for n in (10, 100)
    ]
    picture = plots.plots(sheet_of(*figures))["steps.svg"]
    root = ET.fromstring(picture)
    texts = ["".join(node.itertext()) for node in root.iter("{http://www.w3.org/2000/svg}text")]
    points = [node.get("points", "").split() for node in root.iter("{http://www.w3.org/2000/svg}polyline")]

    assert 1 == texts.count("stepengine") == texts.count("langgraph")
    assert [2, 2] == [len(line) for line in points]
    assert root.get("role") == "img"
    assert "http://" not in picture.replace("http://www.w3.org/2000/svg", "")


def test_names_of_lines_do_not_overlap() -> None:
    placed = plots.apart({"a": 380.0, "b": 381.0, "c": 382.0})
    ys = sorted(placed.values())

    assert all(plots.GAP <= after - before for before, after in pairwise(ys))
    assert plots.HEIGHT - plots.BOTTOM >= ys[-1]


@pytest.mark.deep
def test_the_page_is_made_from_the_measured_figures() -> None:
    sheet = Sheet.load(page.MEASURED)

    assert page.text(sheet, page.MEASURED.name) == page.PAGE.read_text(encoding="utf-8")
    assert sheet.to_json() == page.MEASURED.read_text(encoding="utf-8")
    drawn = plots.plots(sheet)
    assert drawn == {path.name: path.read_text(encoding="utf-8") for path in page.PLOTS.glob("*.svg")}
    assert {"steps.svg", "fan-out.svg", "replay.svg"} == set(drawn)


def test_the_measured_figures_hold_every_work_and_peer() -> None:
    sheet = Sheet.load(page.MEASURED)

    assert {f"W{n}" for n in range(1, 9)} <= {key.work for key in sheet.samples}
    assert [] == [figure.what for figure in FIGURES if figure.spread(sheet) is None]
    for peer in ("bu_agent_sdk", "pydantic_ai", "openai_agents", "langgraph", "smolagents", "google_adk"):
        works = {key.work for key in sheet.samples if key.engine == peer}
        assert {"W1", "W2", "W3", "W5", "W6"} == works, peer


def test_the_page_has_machine_date_and_versions() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    about = Sheet.load(page.MEASURED).about

    assert about["date"] in text
    assert about["machine"]["processor"] in text
    for versions in about["versions"].values():
        for package, version in versions.items():
            assert f"{package} {version}" in text


def test_a_table_is_shown_as_text_and_markdown() -> None:
    table = tables.Table("T", ["a", "b"], [["x", "1"]])

    assert "T\n  a  b\n  -  -\n  x  1" == table.text()
    assert "| a | b |\n| --- | --- |\n| x | 1 |" == table.markdown()


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0"), (1234.5, "1,234"), (12.34, "12.3"), (1.234, "1.23"), (0.1234, "0.123"), (0.00012, "0.00012")],
)
def test_figures_are_shown_in_three_digits(value: float, shown: str) -> None:
    assert shown == tables.short(value)
