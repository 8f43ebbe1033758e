"""
The tasks for `base2` in `examples/evaluations`: solved they pass, and every check fails where something wrong, or nothing, was done.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stepengine.cli.app import app
from stepengine.evaluation.evaluation_files import load_evaluation

SUITE = Path(__file__).resolve().parents[2] / "examples" / "evaluations"


@pytest.mark.deep
@pytest.mark.spec("evaluation:JG68")
def test_each_check_of_the_suite_fails_without_a_correct_solution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    Played right all ten cases pass; wrong, or not at all, none does.
    """
    monkeypatch.chdir(tmp_path)
    gates = ["--gate", "right.pass >= 1", "--gate", "wrong.pass <= 0", "--gate", "untouched.pass <= 0"]

    said = CliRunner().invoke(app, ["eval", str(SUITE / "base2_scripted.py"), "--shell", "--json", "-q", *gates])

    assert 0 == said.exit_code, said.output
    report = json.loads(said.stdout)
    failed = {
        (case["id"], sample["side"], name)
        for case in report["cases"]
        for sample in case["samples"]
        for name, score in sample["scores"].items()
        if score["passed"] is False and score["state"] == "ok"
    }
    assert not [each for each in failed if each[1] == "right"]
    every = {(case["id"], name) for case in report["cases"] for name in case["samples"][0]["scores"]}
    assert set() == every - {(case, name) for case, _, name in failed}
    assert str(tmp_path) not in said.stdout
    assert not re.search("stepengine-eval-", said.stdout)


@pytest.mark.spec("evaluation:JG68")
def test_the_suite_has_ten_cases_in_three_repositories() -> None:
    suite = load_evaluation(SUITE / "base2.py")

    assert 10 == len(suite.cases)
    assert 3 == len({tuple(sorted(case.files)) for case in suite.cases})
    assert [None] * 10 == [case.replies for case in suite.cases]
    assert [] == suite.problems(SUITE)
