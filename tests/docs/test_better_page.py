"""
`docs/better.md` is so: our side runs, what it shows was printed, the other side's modules are there.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.better.__main__ import PAGE, SHOWN, TOPICS, filled, our_side
from benchmarks.peers import ENVIRONMENTS

TEXT = PAGE.read_text(encoding="utf-8")
SAID = json.loads(SHOWN.read_text(encoding="utf-8"))
SECONDS = re.compile(r"[\d.]+ s of CPU")


@pytest.mark.deep
@pytest.mark.spec("replay:J19", "replay:J20")
@pytest.mark.parametrize("topic", list(TOPICS))
def test_our_example_prints_the_shown_lines(
    topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """
    All but how long it took.
    """
    monkeypatch.chdir(tmp_path)
    file = our_side(topic)
    exec(compile(file.read_text(encoding="utf-8"), str(file), "exec"), {"__name__": "__main__"})
    said = [f"stepengine: {line}" for line in capsys.readouterr().out.strip().splitlines()]
    shown = [line for line in SAID[topic].splitlines() if line.startswith("stepengine: ")]

    assert [SECONDS.sub("", line) for line in shown] == [SECONDS.sub("", line) for line in said]


def test_the_page_shows_the_recorded_output_of_both_sides() -> None:
    assert filled(TEXT, SAID) == TEXT
    assert all(len(said.splitlines()) > 1 for said in SAID.values())


def test_every_topic_has_a_section_and_a_peer() -> None:
    named = re.findall(r"^In the benchmark `(\w+)`, ", TEXT, re.MULTILINE)

    assert list(TOPICS) == named == list(SAID)
    for topic, (environment, _) in TOPICS.items():
        assert environment in ENVIRONMENTS
        for side in (our_side(topic), SHOWN.with_name(f"{topic}.py")):
            assert side.is_file()
            assert f"](../{side.relative_to(PAGE.parents[1]).as_posix()})" in TEXT
