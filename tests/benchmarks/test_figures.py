"""
What the benchmarks make of figures: verdicts, tables, pictures and the page. Nothing here measures.
"""

from __future__ import annotations

import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks import page, plots, tables
from benchmarks.__main__ import read
from benchmarks.judging import judge
from benchmarks.sheet import Key, Sheet, Spread

ROOT = Path(__file__).resolve().parents[2]
BUDGETS = [f"Q{n}" for n in range(1, 16)]


def sheet_of(*figures: tuple[str, str, str, int, list[float]]) -> Sheet:
    sheet = Sheet({"date": "2026-01-01", "machine": {}, "versions": {}})
    for work, what, engine, count, samples in figures:
        for turn, value in enumerate(samples):
            sheet.add(Key(work, what, engine, count), value, unit="us", turn=turn)
    return sheet


def word_of(sheet: Sheet, what: str) -> str:
    (verdict,) = [verdict for verdict in judge(sheet) if what in verdict.what]
    return verdict.word


@pytest.mark.spec(
    "performance:Q1", "performance:Q2", "performance:Q3", "performance:Q4", "performance:Q5", "performance:Q6",
    "performance:Q7", "performance:Q8", "performance:Q9", "performance:Q10", "performance:Q11", "performance:Q12",
    "performance:Q13", "performance:Q14", "performance:Q15",
)  # fmt: skip
def test_every_budget_is_judged_and_what_was_not_measured_is_said() -> None:
    verdicts = judge(Sheet())

    assert set(BUDGETS) == {verdict.budget for verdict in verdicts}
    assert {"not measured"} == {verdict.word for verdict in verdicts}


@pytest.mark.spec("performance:Q1", "performance:Q2")
def test_a_budget_holds_up_to_its_bound_and_is_broken_above_it() -> None:
    ours = ("W1", "step", "stepengine")

    assert "holds" == word_of(sheet_of((*ours, 100, [10.0]), (*ours, 10_000, [13.0])), "N=10,000 against N=100")
    assert "BROKEN" == word_of(sheet_of((*ours, 100, [10.0]), (*ours, 10_000, [13.1])), "N=10,000 against N=100")
    slow = sheet_of((*ours, 1_000, [51.0]), ("W1", "step", "bu_agent_sdk", 1_000, [100.0]))
    assert "BROKEN" == word_of(slow, "N=1,000 against bu-agent-sdk")


@pytest.mark.spec("performance:Q2", "performance:Q6", "performance:Q9")
@pytest.mark.parametrize(
    ("figure", "floor", "most", "what"),
    [
        (("W4", "memory", "stepengine", 1_000), "no journal", 1.6, "a journal, memory, N=1,000"),
        (("W4", "memory", "stepengine", 10_000), "no journal", 2.2, "a journal, memory, N=10,000"),
        (("W4", "file, to the system", "stepengine", 1_000), "no journal", 5.5, "the system, N=1,000"),
        (("W4", "file, to the system", "stepengine", 10_000), "no journal", 5.5, "the system, N=10,000"),
        (("W4", "replay, memory", "stepengine", 1_000), "floor, replay", 6.0, "its floor, from memory"),
        (("W4", "replay, file", "stepengine", 1_000), "floor, replay", 6.6, "its floor, from file"),
        (("W1", "machine, step", "machine", 1_000), "machine, floor", 18.7, "new states, a handler's STEP"),
    ],
)
def test_what_once_had_microseconds_is_judged_by_a_floor_of_the_same_round(
    figure: tuple[str, str, str, int], floor: str, most: float, what: str
) -> None:
    work, _, engine, count = figure
    least = (work, floor, engine, count, [10.0, 40.0])

    assert "holds" == word_of(sheet_of((*figure, [10.0 * most, 40.0 * most]), least), what)
    assert "BROKEN" == word_of(sheet_of((*figure, [10.2 * most, 40.8 * most]), least), what)
    assert "not measured" == word_of(sheet_of((*figure, [1.0])), what)


def held(budget: str, what: str, most: float, *figures: tuple[str, str, str, int, list[float]]) -> Any:
    """
    Return a case: the first of the figures is 1, the second, where there is one, what it is divided by.
    """
    return pytest.param(budget, what, most, figures, id=f"{budget} {what}")


def w3(who: str, count: int) -> tuple[str, str, str, int, list[float]]:
    return ("W3", "steps", who, count, [1.0])


def w8(protocol: str, who: str) -> tuple[str, str, str, int, list[float]]:
    return ("W8", f"token, {protocol}", who, 2_000, [1.0])


BOUNDS = [
    held("Q3", "1,000 runs at once", 1.0, ("W2", "run", "stepengine", 1_000, [1.0]), ("W2", "run", "bu_agent_sdk", 1_000, [1.0])),
    held("Q3", "kept for a finished run", 20 * 1024, ("W2", "memory", "stepengine", 200, [1.0])),
    *[
        held("Q4", f"SDK's loop, {protocol}", most, w3(f"stepengine, {protocol}", 100), w3(f"bare, {protocol}", 100))
        for protocol, most in {"openai": 0.15, "openai_chat": 0.15, "google": 0.2, "anthropic": 0.9}.items()
    ],
    *[
        held("Q5", f"N=300 against N=10, {protocol}", 1.5, w3(f"stepengine, {protocol}", 300), w3(f"stepengine, {protocol}", 10))
        for protocol in ("openai", "openai_chat", "google", "anthropic")
    ],
    held(
        "Q7", "against vcrpy", 0.01,
        ("W4", "cassette, playing", "stepengine", 200, [1.0]), ("W4", "cassette, playing", "vcrpy", 200, [1.0]),
    ),
    held("Q11", "resuming a journal of 10,000 records", 1.0, ("W4", "resuming", "stepengine", 10_000, [1.0])),
    held(
        "Q11", "a record of 10,000 against one of 1,000", 1.3,
        ("W4", "resuming, us per record", "stepengine", 10_000, [1.0]), ("W4", "resuming, us per record", "stepengine", 1_000, [1.0]),
    ),
    held(
        "Q12", "100 children of one parent", 1.5,
        ("W2", "children", "stepengine", 100, [1.0]), ("W2", "alone", "stepengine", 100, [1.0]),
    ),
    held(
        "Q12", "a child among 4,000", 1.3,
        ("W2", "children", "stepengine", 4_000, [1.0]), ("W2", "children", "stepengine", 100, [1.0]),
    ),
    *[
        held("Q15", f"one of a run that nobody watches, {protocol}", 4 / 3, w8(protocol, "stream"), w8(protocol, "run"))
        for protocol in ("openai_chat", "anthropic")
    ],
    held("Q15", "a step that somebody watches", 2.5, ("W8", "step", "stream", 1_000, [1.0]), ("W8", "step", "run", 1_000, [1.0])),
]  # fmt: skip


@pytest.mark.spec(
    "performance:Q3", "performance:Q4", "performance:Q5", "performance:Q7", "performance:Q11", "performance:Q12",
    "performance:Q15",
)  # fmt: skip
@pytest.mark.parametrize(("budget", "what", "most", "figures"), BOUNDS)
def test_the_bound_of_a_budget_is_that_of_its_row(budget: str, what: str, most: float, figures: Any) -> None:
    def judged(factor: float) -> tuple[str, str]:
        (mine, *rest) = figures
        sheet = sheet_of((*mine[:4], [most * factor]), *rest)
        (verdict,) = [verdict for verdict in judge(sheet) if verdict.found is not None and what in verdict.what]
        return verdict.budget, verdict.word

    assert (budget, "holds") == judged(0.999)
    assert (budget, "BROKEN") == judged(1.001)


def test_a_ratio_is_taken_within_each_round_and_keeps_its_spread() -> None:
    """
    A machine that is twice as slow in one round is so for both.
    """
    sheet = sheet_of(("W1", "step", "ours", 1, [1.0, 2.0, 1.0]), ("W1", "step", "peer", 1, [2.0, 4.0, 4.0]))

    assert Spread(0.5, 0.25, 0.5, 3) == sheet.ratio(Key("W1", "step", "ours", 1), Key("W1", "step", "peer", 1))


def test_who_took_part_in_fewer_rounds_stands_in_with_the_median() -> None:
    sheet = sheet_of(("W1", "step", "ours", 1, [1.0, 2.0]), ("W1", "step", "slow", 1, [10.0]))

    assert (0.1, 0.2, 2) == sheet.ratio(Key("W1", "step", "ours", 1), Key("W1", "step", "slow", 1))[1:]


def test_a_sheet_comes_back_from_its_json() -> None:
    sheet = sheet_of(("W1", "step", "stepengine", 10, [1.0, 2.0]))
    sheet.add(Key("W2", "run", "late", 5), 3.0, unit="ms", turn=1)
    sheet.miss("W4", "peer", "it cannot")

    assert sheet == Sheet.from_json(sheet.to_json())


@pytest.mark.parametrize("text", ["[]", '{"format": 0}'])
def test_a_file_of_another_format_is_refused_with_what_writes_one(text: str) -> None:
    with pytest.raises(SystemExit, match="python -m benchmarks --json FILE"):
        Sheet.from_json(text)


def test_the_command_that_judges_leaves_with_one_when_a_budget_is_broken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seconds, code in ((0.5, 0), (2.0, 1)):
        file = tmp_path / f"{code}.json"
        file.write_text(sheet_of(("W4", "resuming", "stepengine", 10_000, [seconds])).to_json())

        assert code == read("judge", str(file))
        assert ("BROKEN" if code else "holds") in capsys.readouterr().out


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


def test_names_at_the_ends_of_lines_stand_apart_and_in_the_picture() -> None:
    placed = plots.apart({"a": 380.0, "b": 381.0, "c": 382.0})
    ys = sorted(placed.values())

    assert all(plots.GAP <= after - before for before, after in pairwise(ys))
    assert plots.HEIGHT - plots.BOTTOM >= ys[-1]


def test_the_page_is_what_the_command_makes_of_the_measured_figures() -> None:
    sheet = Sheet.load(page.MEASURED)

    assert page.text(sheet, page.MEASURED.name) == page.PAGE.read_text(encoding="utf-8")
    assert sheet.to_json() == page.MEASURED.read_text(encoding="utf-8")
    drawn = plots.plots(sheet)
    assert drawn == {path.name: path.read_text(encoding="utf-8") for path in page.PLOTS.glob("*.svg")}
    assert {"steps.svg", "fan-out.svg", "replay.svg"} == set(drawn)


@pytest.mark.spec(
    "performance:Q1", "performance:Q2", "performance:Q3", "performance:Q4", "performance:Q5", "performance:Q6",
    "performance:Q7", "performance:Q8", "performance:Q9", "performance:Q10", "performance:Q11", "performance:Q12",
    "performance:Q13", "performance:Q14", "performance:Q15",
)  # fmt: skip
@pytest.mark.spec("performance:W1", "performance:W2", "performance:W3")
@pytest.mark.spec("performance:W4", "performance:W5", "performance:W6", "performance:W7", "performance:W8")
def test_the_measured_figures_judge_every_budget_and_hold_every_work() -> None:
    """
    Whether a budget holds is told by the page; that it was measured is held here.
    """
    sheet = Sheet.load(page.MEASURED)

    assert {f"W{n}" for n in range(1, 9)} == {key.work for key in sheet.samples}
    assert [] == [verdict.what for verdict in judge(sheet) if verdict.found is None]
    for peer in ("bu_agent_sdk", "pydantic_ai", "openai_agents", "langgraph", "smolagents", "google_adk"):
        works = {key.work for key in sheet.samples if key.engine == peer}
        assert {"W1", "W2", "W3", "W5", "W6"} == works, peer


def test_the_page_tells_machine_date_and_versions() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    about = Sheet.load(page.MEASURED).about

    assert about["date"] in text
    assert about["machine"]["processor"] in text
    for versions in about["versions"].values():
        for package, version in versions.items():
            assert f"{package} {version}" in text


def test_a_table_stands_in_a_terminal_and_on_a_page() -> None:
    table = tables.Table("T", ["a", "b"], [["x", "1"]])

    assert "T\n  a  b\n  -  -\n  x  1" == table.text()
    assert "| a | b |\n| --- | --- |\n| x | 1 |" == table.markdown()


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0"), (1234.5, "1,234"), (12.34, "12.3"), (1.234, "1.23"), (0.1234, "0.123"), (0.00012, "0.00012")],
)
def test_figures_are_shown_in_three_digits(value: float, shown: str) -> None:
    assert shown == tables.short(value)


@pytest.mark.deep
def test_the_command_prints_the_table_from_the_file() -> None:
    command = [sys.executable, "-m", "benchmarks", "judge", str(page.MEASURED)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)

    assert done.stderr == ""
    assert set(BUDGETS) == set(re.findall(r"^  (Q\d+) ", done.stdout, re.MULTILINE))
