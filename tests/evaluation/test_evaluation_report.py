"""Evaluations from Python: the report that ``evaluate`` returns, its gates, and its options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest

from stepengine import AgentDefinition
from stepengine.errors import DataError
from stepengine.evaluation import Case, Evaluation, contains, evaluate, evaluate_sync, max_cost
from stepengine.testing import ScriptedModel, text, tool_call

pytestmark = pytest.mark.spec("evaluation:JG99")
GREETER = AgentDefinition("greeter", model="test/one", system_prompt="Greet.")
GREETING = Evaluation(
    "greeting",
    cases=[Case(name, f"Greet {name}", checks=[contains(name)]) for name in ("Ann", "Bob")],
    agents={"base": GREETER},
    gates=["pass >= 1"],
)


async def test_a_script_is_played_from_its_beginning_in_each_sample(tmp_path: Path) -> None:
    report = await evaluate(GREETING, replies=[text("Hello Ann and Bob", cost="0.01")], n=2, folder=tmp_path / "out")

    assert report.passed
    assert {"pass >= 1": ""} == report.gates
    assert 1.0 == report.mean() == report.mean("contains", agent="base")
    assert 4 == len(report.scores.outcome.samples)
    assert "0.04" == str(report.spent)
    assert (tmp_path / "out" / "cases" / "Ann" / "base" / "2.jsonl").is_file()
    assert "gate pass >= 1: holds" in str(report)


def test_a_failed_gate_is_reported_with_the_failed_case() -> None:
    report = evaluate_sync(GREETING, replies=[text("Hello Ann")], gates=["cost <= 1"])

    assert not report.passed
    assert ["pass >= 1", "cost <= 1"] == [*report.gates]
    assert report.gates["pass >= 1"]
    assert 0.5 == report.mean()
    assert "Bob base 1: contains: the text does not hold 'Bob': Hello Ann" in str(report)


def test_models_of_the_caller_get_the_given_name() -> None:
    asked: list[str] = []

    def answer(request: Any) -> Any:
        asked.append(request.model)
        return text("Ann Bob")

    report = evaluate_sync(GREETING, models={"mine": ScriptedModel(answer)}, model="mine/two")

    assert report.passed
    assert ["two", "two"] == [name.removeprefix("mine/") for name in asked]


@pytest.mark.parametrize("budget", [-1, float("nan")])
def test_a_budget_that_is_no_amount_is_refused(budget: Any) -> None:
    with pytest.raises(DataError, match="is not an amount of US dollars"):
        evaluate_sync(GREETING, replies=[text("x")], budget=budget)


def test_invalid_options_are_refused_before_anything_runs() -> None:
    with pytest.raises(DataError, match="n is 0"):
        evaluate_sync(GREETING, replies=[text("x")], n=0)
    with pytest.raises(DataError, match="the gate names 'nope'"):
        evaluate_sync(GREETING, replies=[text("x")], gates=["nope >= 1"])
    report = evaluate_sync(attrs.evolve(GREETING, gates=()), replies=[text("x")])
    with pytest.raises(DataError, match=r"no check 'nope' of the agent 'base'; it has base\.pass"):
        report.mean("nope")


def test_a_file_finds_agents_beside_it_and_runs_in_copies(tmp_path: Path) -> None:
    (tmp_path / "repairer.py").write_text(
        "from stepengine import AgentDefinition\n"
        'agent = AgentDefinition("repairer", model="test/one", tools=["write_file"])\n'
    )
    (tmp_path / "evals.py").write_text(
        "from stepengine.evaluation import Case, Evaluation\n"
        "def is_repaired(run):\n    return run.files.text('a.txt') == 'good'\n"
        "evaluation = Evaluation('fix', agents={'base': './repairer.py'}, checks=[is_repaired], keep=['*'],\n"
        "    cases=[Case('a', 'Repair it', files={'a.txt': 'bad'})])\n"
    )
    call = tool_call("write_file", {"path": "a.txt", "content": "good", "instructions": "Repair."})

    report = evaluate_sync(str(tmp_path / "evals.py"), replies=[call, text("done")], gates=["pass >= 1"])

    assert report.passed, str(report)
    json.dumps(report.scores.to_json())


@pytest.mark.parametrize(("cost", "said"), [("0.02", ""), ("0.03", "it cost $0.03, more than $0.02")])
def test_max_cost_fails_only_above_its_amount(cost: str, said: str) -> None:
    case = Case("ann", "Greet Ann", checks=[max_cost("0.02")])
    report = evaluate_sync(attrs.evolve(GREETING, cases=[case]), replies=[text("Hello", cost=cost)])

    (sample,) = report.scores.outcome.samples
    assert said == sample.scores["max_cost"].reason
    assert report.passed is not bool(said)
