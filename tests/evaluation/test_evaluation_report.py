"""Evaluations from Python: the report that ``evaluate`` returns, its gates, and its options."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepengine import STEP, AgentDefinition, Ask, Engine, Limits, StepContext, Steps, Tool, ToolCall, ToolContext, tool
from stepengine.errors import DataError, DefinitionError, LimitExceeded
from stepengine.evaluation import (
    Case,
    Criterion,
    Evaluation,
    EvaluationReport,
    contains,
    evaluate,
    evaluate_sync,
    judge,
    max_cost,
)
from stepengine.evaluation.case_runs import Sample
from stepengine.evaluation.samples import CostEstimate
from stepengine.journal import SharedBudget
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


@tool(category="write")
def write_latin_1_name(ctx: ToolContext) -> None:
    """Create a file whose name is not UTF-8."""
    assert ctx.workspace is not None
    assert ctx.workspace.local_folder is not None
    (ctx.workspace.local_folder / os.fsdecode(b"caf\xe9.txt")).touch()


def test_names_of_files_need_not_be_utf_8(tmp_path: Path) -> None:
    def handle_steps(ctx: StepContext) -> Steps[str]:
        yield ToolCall("write_latin_1_name", {})
        return "done"

    agent = AgentDefinition("writer", tools=[write_latin_1_name], handle_steps=handle_steps)
    case = Case("one", files="files", checks=[judge(AgentDefinition("reads", model="test/one"), "Good?")])
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / os.fsdecode(b"\xe9t\xe9.txt")).touch()
    names, out = Evaluation("names", [case], {"one": agent}), tmp_path / "out"

    report = evaluate_sync(names, replies=['{"score": 1, "reason": "good"}'], root=tmp_path, folder=out)
    again = evaluate_sync(names, root=tmp_path, recheck=out)

    assert report.passed, str(report)
    assert again.passed, str(again)


def test_a_refused_evaluation_leaves_no_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    with pytest.raises(DataError, match="cannot be run"):
        evaluate_sync(attrs.evolve(GREETING, cases=[]))
    with pytest.raises(DataError, match="is not a gate"):
        evaluate_sync(GREETING, gates=["pass"])

    assert not [*tmp_path.iterdir()]


def test_a_failed_gate_is_reported_with_the_failed_case() -> None:
    report = evaluate_sync(GREETING, replies=[text("Hello Ann")], gates=["cost <= 1"])

    assert not report.passed
    assert ["pass >= 1", "cost <= 1"] == [*report.gates]
    assert report.gates["pass >= 1"]
    assert 0.5 == report.mean()
    assert "Bob base 1: contains: the text does not contain 'Bob': Hello Ann" in str(report)


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
    with pytest.raises(DataError, match="the gate has an unknown name 'nope'"):
        evaluate_sync(GREETING, replies=[text("x")], gates=["nope >= 1"])
    report = evaluate_sync(attrs.evolve(GREETING, gates=()), replies=[text("x")])
    with pytest.raises(DataError, match=r"no check 'nope' for the agent 'base'; its checks: base\.pass"):
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


FINE = [text("Hello Ann and Bob", cost="0.01")]


def samples(report: EvaluationReport) -> list[tuple[str, str, str]]:
    return [(sample.case, sample.side, sample.reused) for sample in report.scores.outcome.samples]


@pytest.mark.parametrize(
    ("options", "chosen"),
    [({"cases": "A*"}, ["Ann"]), ({"tags": ["short"]}, ["Bob"]), ({"cases": ["A*", "Bob"], "tags": "short"}, ["Bob"])],
)
def test_cases_are_chosen_by_id_and_tag(options: Any, chosen: list[str]) -> None:
    cases = [attrs.evolve(case, tags=["short"] if case.id == "Bob" else []) for case in GREETING.cases]
    evaluation = attrs.evolve(GREETING, cases=cases)

    assert chosen == [case for case, _, _ in samples(evaluate_sync(evaluation, replies=FINE, **options))]
    with pytest.raises(
        DataError, match="no case of the evaluation 'greeting' has one of the chosen ids and tags; its cases:"
    ):
        evaluate_sync(evaluation, replies=FINE, cases="C*")


def test_given_agents_replace_those_of_the_evaluation(tmp_path: Path) -> None:
    (tmp_path / "short.py").write_text(
        'from stepengine import AgentDefinition\nagent = AgentDefinition("short", model="test/one")\n'
    )
    report = evaluate_sync(
        GREETING, replies=FINE, agents={"old": GREETER, "new": "short.py"}, root=tmp_path, gates=["new.pass >= 1"]
    )

    assert report.passed
    assert {"old", "new"} == {side for _, side, _ in samples(report)}


def test_a_missing_tool_is_refused_before_confirmation() -> None:
    with pytest.raises(DefinitionError, match="no_such_tool"):
        evaluate_sync(
            attrs.evolve(GREETING, agents={"base": attrs.evolve(GREETER, tools=["no_such_tool"])}),
            confirm=lambda _: pytest.fail("it asked"),
        )


@pytest.mark.deep
@pytest.mark.smoke
def test_earlier_results_are_compared_rechecked_and_resumed(tmp_path: Path) -> None:
    first = evaluate_sync(GREETING, replies=FINE, n=2, seed=7, cases="Ann", folder=tmp_path / "a")
    asked: list[object] = []
    live = {"models": ScriptedModel(lambda _: asked.append(0) or FINE[0])}

    against = evaluate_sync(GREETING, n=2, against=tmp_path / "a", folder=tmp_path / "b", **live)
    assert [("Ann", "base", "journal")] * 2 + [("Bob", "base", "new")] * 2 == samples(against)
    resumed = evaluate_sync(GREETING, resume=tmp_path / "a", **live)
    assert (tmp_path / "a", 2, 7) == (resumed.folder, resumed.scores.outcome.n, resumed.scores.outcome.seed)
    assert samples(against) == samples(resumed)
    stricter = attrs.evolve(GREETING, checks=[contains("Hello Bob")], gates=())
    rechecked = evaluate_sync(stricter, recheck=tmp_path / "a", confirm=lambda _: pytest.fail("it asked"), **live)
    assert 4 == len(asked)
    assert (1.0, 0.0) == (first.mean(), rechecked.mean())
    with pytest.raises(DataError, match="against, recheck and resume cannot be combined; pass only one of them"):
        evaluate_sync(GREETING, recheck=tmp_path / "a", resume=tmp_path / "a")
    with pytest.raises(DataError, match="is not a folder of results"):
        evaluate_sync(GREETING, recheck=tmp_path / "gone")


@pytest.mark.parametrize("option", ["against", "resume"])
def test_a_folder_without_results_is_refused(option: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a folder of results"):
        evaluate_sync(GREETING, replies=FINE, **{option: tmp_path})

    assert [] == [*tmp_path.iterdir()]


def test_samples_without_end_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="at most 10,000"):
        evaluate_sync(GREETING, n=10_001, replies=FINE, folder=tmp_path)


@pytest.mark.parametrize("keep", [False, True])
def test_working_copies_are_kept_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: bool) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    evaluate_sync(attrs.evolve(GREETING, files={"a.txt": "x"}), replies=FINE, keep=keep, folder=tmp_path / "out")

    assert (2 if keep else 0) == len([*tmp_path.glob("stepengine-eval-*/*/a.txt")])


async def test_confirm_refuses_or_sets_the_budget_of_live_runs(tmp_path: Path) -> None:
    estimates: list[CostEstimate] = []

    def refuse(estimate: CostEstimate) -> None:
        estimates.append(estimate)
        raise DataError("too many")

    async def approve(_: CostEstimate) -> SharedBudget:
        return SharedBudget("0.005", allow_unpriced=True)

    with pytest.raises(DataError, match="too many"):
        await evaluate(GREETING, n=3, confirm=refuse, folder=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert [CostEstimate(6, None, None)] == estimates
    scripted = attrs.evolve(GREETING, cases=[attrs.evolve(GREETING.cases[0], replies=FINE), *GREETING.cases[1:]])
    with pytest.raises(DataError, match="too many"):
        await evaluate(scripted, n=3, confirm=refuse, folder=tmp_path / "out")
    assert CostEstimate(3, None, None) == estimates[1]
    assert (await evaluate(GREETING, replies=FINE, confirm=refuse)).passed
    with pytest.raises(LimitExceeded, match=r"max_cost_usd is 0\.005"):
        await evaluate(GREETING, models=ScriptedModel(lambda _: FINE[0]), confirm=approve, concurrency=1)


def test_samples_are_reported_when_they_end() -> None:
    ended: list[Sample] = []
    report = evaluate_sync(GREETING, replies=FINE, on_sample=ended.append)

    assert {sample.case for sample in report.scores.outcome.samples} == {sample.case for sample in ended}


def test_results_and_pages_are_written_without_secrets(tmp_path: Path) -> None:
    key = f"sk-ant-api03-{'a1B2' * 20}"
    said = [text(f"Hello Ann and Bob {key}")]
    evaluation = attrs.evolve(GREETING, checks=[contains("Eve")])
    evaluate_sync(evaluation, replies=said, folder=tmp_path, render_page=lambda journal: journal.name)

    results = json.loads((tmp_path / "results.json").read_text())
    assert ("stepengine.eval/1", 1) == (results["format"], results["n"])
    assert "1.jsonl" == (tmp_path / "cases" / "Ann" / "base" / "1.html").read_text()
    page = (tmp_path / "report.html").read_text()
    assert "cases/Ann/base/1.html" in page
    assert key not in page + json.dumps(results)


def test_files_of_another_program_stay_unchanged(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text("{}")
    with pytest.raises(DataError, match="was left unchanged"):
        evaluate_sync(GREETING, replies=FINE, folder=tmp_path)
    assert ["results.json"] == [path.name for path in tmp_path.iterdir()]


def test_agents_and_engines_are_made_by_the_caller(tmp_path: Path) -> None:
    made: list[tuple[str, bool]] = []

    def make(agent: AgentDefinition, root: Path, *, performs: bool) -> Engine:
        made.append((agent.id, performs))
        return Engine([agent], models=ScriptedModel(lambda _: FINE[0]))

    evaluation = attrs.evolve(GREETING, agents={"base": "by name"})
    report = evaluate_sync(evaluation, load_agent=lambda name: GREETER, make_engine=make, folder=tmp_path)

    assert report.passed
    assert {("greeter", True)} == {*made}


def judged(request: Any) -> Any:
    """Play the judge: write a file, then decide; the judged agent says "Hello"."""
    if "Rubric" not in request.messages[0].text:
        return text("Hello", cost="0.01")
    if not any(message.role == "tool" for message in request.messages):
        given = {"path": "precious.txt", "content": "written by the judge", "instructions": "Take a note."}
        return tool_call("write_file", given, cost="0.01")
    return text('{"score": 1, "reason": "fine"}', cost="0.01")


def test_a_judge_changes_no_file_of_the_author(tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("precious")
    strict = AgentDefinition("strict", model="test/one", tools=["write_file"])
    evaluation = attrs.evolve(GREETING, checks=[judge(strict, "Is it fine?")], gates=())
    options: Any = {"replies": judged, "root": tmp_path, "cases": "Ann"}
    first = evaluate_sync(evaluation, folder=tmp_path / "out", **options)
    again = evaluate_sync(evaluation, recheck=tmp_path / "out", **options)

    assert "precious" == (tmp_path / "precious.txt").read_text()
    assert 1.0 == first.mean("judge") == again.mean("judge")
    assert ("0.03", "0") == (str(first.spent), str(again.spent))


@pytest.mark.parametrize("recorded", ["Ann", "C*"])
def test_a_recheck_with_missing_samples_does_not_pass(tmp_path: Path, recorded: str) -> None:
    whole = attrs.evolve(GREETING, cases=[*GREETING.cases, Case("Carl", "Greet Carl", checks=[contains("Ann")])])
    evaluate_sync(whole, replies=FINE, cases=recorded, folder=tmp_path)
    report = evaluate_sync(attrs.evolve(GREETING, gates=()), recheck=tmp_path)
    gated = evaluate_sync(GREETING, recheck=tmp_path)

    assert not report.passed
    assert not report.is_complete
    assert f"samples are not recorded in {tmp_path}" in str(report)
    assert "not decided" in gated.gates["pass >= 1"]


def take_steps(ctx: Any) -> Any:
    for _ in range(int(ctx.prompt)):
        yield STEP


@pytest.mark.parametrize("seed", range(3))
def test_a_run_dearer_than_all_before_stays_within_the_budget(seed: int) -> None:
    walker = AgentDefinition("walker", model="test/one", handle_steps=take_steps)
    cases = [Case(f"c{steps}", str(steps)) for steps in (1, 9, 1, 20)]
    cases = [attrs.evolve(case, id=f"{case.id}-{number}") for number, case in enumerate(cases)]
    evaluation = Evaluation("walks", cases=cases, agents={"base": walker}, checks=[contains("x")])
    report = evaluate_sync(evaluation, replies=lambda _: text("x", cost="0.01"), budget=1, seed=seed, concurrency=1)

    assert report.passed, str(report)
    assert "0.31" == str(report.spent)


def take_five_steps(ctx: Any) -> Any:
    for _ in range(5):
        yield STEP
    return {"score": 1}


def test_a_judge_dearer_than_the_runs_uses_the_budget() -> None:
    strict = AgentDefinition("strict", model="test/one", handle_steps=take_five_steps)
    evaluation = attrs.evolve(GREETING, checks=[judge(strict, "Is it fine?")], gates=())
    options: Any = {"replies": lambda _: text("Hello", cost="0.01"), "concurrency": 1}
    paid, spent = [evaluate_sync(evaluation, budget=budget, **options) for budget in (1, "0.03")]

    assert paid.is_complete
    assert 1.0 == paid.mean("judge")
    assert "0.12" == str(paid.spent)
    assert not spent.is_complete
    assert not spent.scores.broken


def test_a_budget_leaves_the_limits_of_the_agent_in_force() -> None:
    limits = Limits(max_cost_usd=0.02, allow_unpriced=True)
    walker = AgentDefinition("walker", model="test/one", handle_steps=take_steps, limits=limits)
    evaluation = Evaluation("walks", [Case("far", "9"), Case("near", "1")], {"base": walker}, checks=[contains("x")])
    scripted: Any = {"replies": lambda _: text("x", cost="0.01")}
    free, bounded = [evaluate_sync(evaluation, budget=budget, **scripted) for budget in (None, 5)]

    assert bounded.is_complete
    assert [s.status for s in free.scores.outcome.samples] == [s.status for s in bounded.scores.outcome.samples]
    assert 0.5 == free.mean() == bounded.mean()


def make_asker(result: str, first: str = "Sure?", last: str = "Really?") -> AgentDefinition:
    """Return an agent that calls a tool and asks two questions, each after a step."""

    def ask(ctx: Any) -> Any:
        for effect in (lambda: ToolCall("look", {}), lambda: Ask(first), lambda: Ask(last)):
            yield STEP
            yield from effect()

    look = Tool(name="look", description="Look.", input_schema={"type": "object"}, run=lambda _: result)
    return AgentDefinition("asker", model="test/one", tools=[look], handle_steps=ask)


ANSWERS: list[Any] = ["yes", lambda question: "yes", {"Sure?": "yes", "Really?": "yes", "Certain?": "yes"}]


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.parametrize("answers", ANSWERS)
@pytest.mark.parametrize(
    ("changed", "spent"), [(("new",), "0.02"), (("old", "Certain?"), "0.01"), (("old", "Sure?", "Certain?"), "0")]
)
def test_a_continued_run_gets_the_answers_of_its_case(
    tmp_path: Path, answers: Any, changed: tuple[str, ...], spent: str
) -> None:
    case = Case("one", "Look", answers=answers, checks=[contains("x")])
    evaluation = Evaluation("looks", [case], {"base": make_asker("old")})
    options: Any = {"replies": lambda _: text("x", cost="0.01")}
    evaluate_sync(evaluation, folder=tmp_path, **options)
    report = evaluate_sync(evaluation, agents={"base": make_asker(*changed)}, against=tmp_path, **options)

    (sample,) = report.scores.outcome.samples
    assert "completed" == sample.status
    assert "from #" in sample.reused
    assert spent == str(report.spent)
    assert 1.0 == report.mean()


@pytest.mark.spec("evaluation:JG123")
@pytest.mark.parametrize("name", ["pass", "cost", "steps", "tokens"])
def test_a_check_with_the_name_of_a_measure_is_refused(name: str) -> None:
    with pytest.raises(DataError, match=f"the check '{name}' has the name of a built-in measure"):
        evaluate_sync(attrs.evolve(GREETING, checks=[contains("x").named(name)]), replies=FINE)


@given(st.lists(st.sampled_from(["c", "c-2", "c-2-2", "d"]), max_size=6), st.integers(0, 6))
def test_no_check_is_lost_by_its_name(names: list[str], common: int) -> None:
    checks = [contains(str(number)).named(name) for number, name in enumerate(names)]
    case = Case("one", checks=checks[common:])
    evaluation = Evaluation("names", [case, Case("two")], {"base": GREETER}, checks=checks[:common])
    named = evaluation.get_named_checks(case)

    assert checks == [*named.values()]
    assert evaluation.get_named_checks(Case("two")).items() <= named.items()


class HasText:
    """A check with state, as an object."""

    def __init__(self, expected: str) -> None:
        self.expected = expected

    def __call__(self, run: Any) -> bool:
        return run.files.text("a.txt") == self.expected


def is_old(run: Any) -> bool:
    return run.files.text("a.txt") == "old"


def is_new(run: Any) -> bool:
    return run.files.text("a.txt") == "new"


def ask_strict(prompt: str) -> Criterion:
    return judge(AgentDefinition("strict", model="test/one", system_prompt=prompt), "Is it fine?")


EDITED: list[tuple[Any, Any]] = [
    (Criterion("mine", is_old), Criterion("mine", is_new)),
    (HasText("old"), HasText("new")),
    (ask_strict("Be kind."), ask_strict("Be strict.")),
]


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("evaluation:JG62")
@pytest.mark.parametrize(("old", "new"), EDITED)
def test_a_recheck_reuses_no_verdict_of_an_edited_check(tmp_path: Path, old: Any, new: Any) -> None:
    evaluation = Evaluation("files", [Case("one", files={"a.txt": "old"})], {"base": GREETER}, checks=[old])
    evaluate_sync(evaluation, replies=lambda _: text('{"score": 1}'), folder=tmp_path)
    states = [
        [
            score.state
            for score in evaluate_sync(attrs.evolve(evaluation, checks=[check]), recheck=tmp_path)
            .scores.outcome.samples[0]
            .scores.values()
        ]
        for check in (old, new)
    ]

    assert [["ok"], ["unknown"]] == states
