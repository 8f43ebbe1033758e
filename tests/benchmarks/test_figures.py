"""
What the benchmarks make of figures: verdicts, tables, pictures and the page. Nothing here measures.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as command
from benchmarks import page, plots, tables
from benchmarks.judging import FAST, PROMISES, Figure, judge
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


@pytest.mark.deep
def test_the_page_is_made_from_the_measured_figures() -> None:
    sheet = Sheet.load(page.MEASURED)

    assert page.text(sheet, page.MEASURED.name) == page.PAGE.read_text(encoding="utf-8")
    assert sheet.to_json() == page.MEASURED.read_text(encoding="utf-8")
    drawn = plots.plots(sheet)
    assert drawn == {path.name: path.read_text(encoding="utf-8") for path in page.PLOTS.glob("*.svg")}
    assert {"steps.svg", "fan-out.svg", "replay.svg"} == set(drawn)
