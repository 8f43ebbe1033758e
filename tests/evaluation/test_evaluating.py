"""
`stepengine eval`: how good agents are at a set of tasks, and what is run again of it (evaluation JG60-JG67, JG123).
"""

from __future__ import annotations

import ast
import json
import re
import shutil
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from pydantic import BaseModel

from stepengine import AgentDefinition, Perform, tool
from stepengine.cli.exits import Exit
from stepengine.evaluation import equals, evaluate_sync, fits
from stepengine.evaluation.case_runs import Case, Evaluation
from stepengine.testing import text, tool_call

GREETING = '''
from stepengine import AgentDefinition
from stepengine.evaluation import Case, Evaluation, contains
from stepengine.testing import text

NAMES = ["Ann", "Bob", "Carla", "Doris", "Emil", "Fritz", "Gustav", "Hanna", "Ingrid", "Zoe"]

def answer(request):
    """Who is told to greets everybody by name but Zoe, who is not told only those with a short one."""
    name = request.messages[0].text.split()[-1]
    told = "by name" in request.system_prompt
    greets = name != "Zoe" if told else len(name) == 3
    return text(f"Hello {name}!" if greets else "Hello!", cost="0.002" if told else "0.001")

def greeter(prompt):
    return AgentDefinition("greeter", model="t/m", system_prompt=prompt)

evaluation = Evaluation(
    "greeting",
    cases=[Case(name.lower(), f"Greet {name}", checks=[contains(name)], replies=answer) for name in NAMES],
    agents={"old": greeter("Greet people."), "new": greeter("Greet people by name.")},
)
'''
FIXER = '''
from stepengine import *
from stepengine.evaluation import *
from stepengine.testing import text, tool_call

def replies(request):
    """Repair what `fix` names; look first."""
    done = [m.tool_name for m in request.messages if m.role == "tool"]
    if not done:
        return tool_call("read_files", {"paths": ["sums.py"]}, cost="0.01")
    if len(done) == 1 and "only look" not in request.system_prompt:
        old, new = ("a - b", "a + b")
        return tool_call("str_replace", {"path": "sums.py", "replacements": [{"old": old, "new": new}]}, cost="0.01")
    return text("done", cost="0.01")

def is_repaired(run):
    return "a + b" in run.files.text("sums.py")

def fixer(prompt):
    return AgentDefinition("fixer", model="t/m", system_prompt=prompt, tools=["read_files", "str_replace"])

evaluation = Evaluation(
    "fixing",
    cases=[Case("sums", "Repair sums.py", files="repo", replies=replies)],
    agents={"fixer": fixer("Repair.")},
    checks=[is_repaired, only_changes("sums.py"), command(["grep", "-q", "a + b", "sums.py"])],
)
'''


@pytest.fixture
def greeting(folder: Any) -> Any:
    folder.write("greeting.py", GREETING)
    return folder


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """
    Where the first test of the module leaves the evaluation of both prompts for the others.
    """
    return tmp_path_factory.mktemp("evaluated") / "o"


@pytest.fixture
def greeted(greeting: Any, stored: Path) -> Any:
    """
    A folder in which both prompts were evaluated.
    """
    if stored.exists():
        shutil.copytree(stored, "o")
    else:
        words = ["eval", "greeting.py", "--seed", "3", "--out", "o", "-q"]
        greeting.type(*words, "--gate", "new.pass - base.pass > 0")
        shutil.copytree("o", stored)
    return greeting


@pytest.fixture
def fixing(folder: Any) -> Any:
    folder.write("repo/sums.py", "def add(a, b):\n    return a - b\n")
    folder.write("repo/deep/other.txt", "stays")
    (folder.path / "repo" / "outside").symlink_to("/etc")
    folder.write("fixing.py", FIXER)
    return folder


def results(out: str) -> Any:
    return json.loads(Path(out, "results.json").read_text(encoding="utf-8"))


def without_times(report: Any) -> Any:
    """
    Leave out what differs from one time to the next: seconds, and when it was.
    """
    text = re.sub(r'"(seconds|created)": [^,\n}]+', r'"\1": 0', json.dumps(report))
    return json.loads(text)


LAYOUT = {
    "": "format name seed n sides checks cases summary pairs ratios spent stopped created",
    "sides": "name agent definition models",
    "cases": "id tags group samples",
    "samples": "side n journal status scores cost tokens steps seconds reused counts",
    "scores": "score passed reason state",
    "summary": "side check mean low high cases samples errors judge",
    "pairs": "base side check difference low high p p_adjusted better worse equal",
    "ratios": "base side of ratio low high pairs left_out",
}
"""The members of ``results.json``: programs read them."""


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("evaluation:JG60", "evaluation:JG61", "evaluation:JG64", "evaluation:JG90")
def test_the_better_of_two_prompts_is_reported_with_its_interval(greeted: Any) -> None:
    """
    One prompt is better by construction, in seven of ten cases, and worse in one.
    """
    report = results("o")

    (pair,) = [pair for pair in report["pairs"] if pair["check"] == "pass"]
    assert ("old", "new", 7, 1, 2) == (pair["base"], pair["side"], pair["better"], pair["worse"], pair["equal"])
    assert 0.6 == pytest.approx(pair["difference"])
    # Paired t over ten differences with the standard deviation 0.6992.
    assert (0.0998, 1.0) == (pytest.approx(pair["low"], abs=1e-3), pair["high"])
    means = {row["side"]: (row["mean"], row["low"], row["high"]) for row in report["summary"] if row["check"] == "pass"}
    assert (0.3, 0.9) == (means["old"][0], means["new"][0])
    assert all(low < mean < high for mean, low, high in means.values())
    (cost,) = [ratio for ratio in report["ratios"] if ratio["of"] == "cost"]
    assert 2.0 == pytest.approx(cost["ratio"])
    assert "0.030" == report["spent"]
    journals = [sample["journal"] for case in report["cases"] for sample in case["samples"]]
    assert 20 == len({*journals})
    of_sample = report["cases"][0]["samples"][0]
    assert LAYOUT == {
        "": " ".join(results("o")), "sides": " ".join(report["sides"][0]), "cases": " ".join(report["cases"][0]),
        "samples": " ".join(of_sample), "scores": " ".join(of_sample["scores"]["contains"]),
        "summary": " ".join(report["summary"][0]), "pairs": " ".join(pair), "ratios": " ".join(cost),
    }  # fmt: skip
    assert {f"cases/{c['id']}/{s['side']}/{s['n']}.jsonl" for c in report["cases"] for s in c["samples"]} == {*journals}
    assert "Hello Ann!" in greeted.type("show", f"o/{journals[0]}").stdout


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("evaluation:JG12", "evaluation:JG67", "evaluation:JG90")
@pytest.mark.parametrize(
    ("gate", "code"),
    [
        ("pass >= 0.8", Exit.COMPLETED),
        ("pass > 0.9", Exit.FAILED),
        ("new.pass - old.pass > 0.5", Exit.FAILED),
        ("new.pass - old.pass ~> 0.5", Exit.COMPLETED),
        ("new.pass - old.pass > 0.05", Exit.COMPLETED),
        ("new.pass>=base.pass", Exit.COMPLETED),
        ("new.cost <= 2.1 * old.cost", Exit.COMPLETED),
        ("new.cost <= old.cost * 1.5", Exit.FAILED),
    ],
)
def test_a_gate_decides_the_exit_code(greeted: Any, gate: str, code: Exit) -> None:
    """
    A difference counts by the end of its interval, with ~ by the mean.
    """
    made = greeted.type("eval", "greeting.py", "--recheck", "o", "--gate", gate, "-q", code=code)

    assert code is not Exit.FAILED or f"gate {gate}: " in made.stderr


@pytest.mark.spec("evaluation:JG12", "evaluation:JG67", "evaluation:JG90")
def test_an_invalid_gate_is_refused_before_any_run(greeting: Any) -> None:
    for gate in (
        "new.pass", "new.pass > __import__('os')", "newer.pass > 0.1", "pass - old.pass > 0", "new.cost - old.pass > 0", "new.pass > nan",
    ):  # fmt: skip
        greeting.type("eval", "greeting.py", "--gate", gate, "-q", "--out", "o", code=Exit.USAGE)

        assert not Path("o").exists(), gate


@pytest.mark.deep
@pytest.mark.spec("evaluation:JG66")
def test_equal_seeds_give_equal_results_and_other_seeds_another_order(greeting: Any) -> None:
    orders = []
    for out, seed in (("a", "5"), ("b", "5"), ("c", "6")):
        made = greeting.type("eval", "greeting.py", "--seed", seed, "--out", out, "-n", "2", "--concurrency", "1")
        orders.append([line for line in made.stderr.splitlines() if "completed" in line])
    first, second = results("a"), results("b")

    assert without_times(first) == without_times(second)
    assert orders[0] == orders[1] != orders[2]
    # Whatever is reached, no side is ever ahead by more than one sample.
    sides = [line.split()[2] for line in orders[0]]
    assert all({"old", "new"} == {*sides[i : i + 2]} for i in range(0, 40, 2))
    assert {"old", "new"} == {*sides[::2]}


@pytest.mark.spec("evaluation:JG60", "evaluation:JG61", "evaluation:JG62")
def test_each_sample_works_on_a_private_copy_that_checks_read(fixing: Any) -> None:
    """
    The repository itself stays as it is, and of the copy nothing stays; links out of it are not followed.
    """
    report = fixing.json("eval", "fixing.py", "--out", "o", "-n", "2")

    samples = report["cases"][0]["samples"]
    assert [True] * 6 == [score["passed"] for sample in samples for score in sample["scores"].values()]
    assert "a - b" in Path("repo/sums.py").read_text()
    note = json.loads(Path("o/cases/sums/fixer/1.note.json").read_text())
    assert ["deep/other.txt", "sums.py"] == [*note["files"]["before"]] == [*note["files"]["after"]]
    assert {"deep/other.txt"} == {
        p for p, digest in note["files"]["before"].items() if note["files"]["after"][p] == digest
    }


@pytest.mark.spec("evaluation:JG61")
def test_checks_fail_on_an_agent_that_changes_nothing(fixing: Any) -> None:
    fixing.write("fixing.py", FIXER.replace('fixer("Repair.")', 'fixer("only look")'))

    report = fixing.json("eval", "fixing.py", "--out", "o", "--gate", "pass >= 1", code=1)

    scores = report["cases"][0]["samples"][0]["scores"]
    assert (False, True, False) == (
        scores["is_repaired"]["passed"], scores["only_changes"]["passed"], scores["command"]["passed"],
    )  # fmt: skip
    assert "grep ended with 1" in scores["command"]["reason"]


@pytest.mark.spec("evaluation:JG63", "evaluation:JG64", "evaluation:JG12")
def test_a_check_that_raises_is_broken_and_no_failed_case(fixing: Any) -> None:
    fixing.write("fixing.py", FIXER.replace('return "a + b" in', 'return 1 / 0 or "a + b" in'))

    made = fixing.type("eval", "fixing.py", "--out", "o", code=1)

    score = results("o")["cases"][0]["samples"][0]["scores"]["is_repaired"]
    assert ("broken", None) == (score["state"], score["passed"])
    assert "the check is_repaired is broken: ZeroDivisionError" in made.stdout
    (row,) = [row for row in results("o")["summary"] if row["check"] == "is_repaired"]
    assert (None, 0, 1) == (row["mean"], row["samples"], row["errors"])


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("evaluation:JG63")
def test_a_failed_run_scores_zero_and_provider_errors_are_excluded(folder: Any) -> None:
    """
    Of ten cases one ends at its limit, one waits for an answer, and one has a provider that fails: that side is not measured.
    """
    folder.write(
        "evals.py",
        """
        from stepengine import AgentDefinition, Ask, Limits, STEP, ToolCall
        from stepengine.errors import ModelError
        from stepengine.evaluation import Case, Evaluation, contains
        from stepengine.testing import failure, tool_call

        def handle(ctx):
            if ctx.prompt == "ask":
                yield from Ask("which?")
            while not (yield STEP).steps_complete:
                pass

        agent = AgentDefinition("one", model="t/m", handle_steps=handle, tools=["read_files"])
        looks = tool_call("read_files", {"paths": ["a"]})
        cases = [Case(f"c{i}", "do", replies=["well"]) for i in range(7)]
        cases += [Case("loops", "do", replies=[looks, looks, looks, looks]), Case("asks", "ask", replies=["well"])]
        cases += [Case("told", "ask", answers="this", replies=["well"])]
        down = failure(ModelError("down", kind="http", status=500))
        cases += [Case("down", "do", replies=[down])]
        limits = Limits(max_steps=2, on_max_steps="stop")
        evaluation = Evaluation("ends", cases=cases, agents={"one": agent}, checks=[contains("well")], limits=limits)
        """,
    )

    report = folder.json("eval", "evals.py", "--out", "o", "--gate", "pass > 0", code=1)

    ends = {case["id"]: case["samples"][0] for case in report["cases"]}
    assert ("max_steps", 0.0) == (ends["loops"]["status"], ends["loops"]["scores"]["contains"]["score"])
    assert ("suspended", 0.0) == (ends["asks"]["status"], ends["asks"]["scores"]["contains"]["score"])
    assert ("completed", 1.0) == (ends["told"]["status"], ends["told"]["scores"]["contains"]["score"])
    assert ("error", False) == (ends["down"]["status"], ends["down"]["counts"])
    (row,) = [row for row in report["summary"] if row["check"] == "pass"]
    assert (0.8, 10, 1) == (row["mean"], row["samples"], row["errors"])


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("evaluation:JG66", "evaluation:JG12", "evaluation:JG95")
def test_the_budget_ends_an_evaluation_after_whole_blocks(greeting: Any) -> None:
    greeting.type("eval", "greeting.py", "--out", "o", "--budget", "0.010", "--seed", "1", code=4)

    report = results("o")
    assert float(report["spent"]) <= 0.010
    assert "the budget of 0.010 US dollars is spent" == report["stopped"]
    counted = [[s["side"] for s in case["samples"] if s["counts"]] for case in report["cases"]]
    assert {0, 2} == {len(sides) for sides in counted}


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("evaluation:JG67")
def test_a_gate_over_an_incomplete_evaluation_is_not_decided(greeting: Any) -> None:
    words = ("eval", "greeting.py", "--seed", "1", "--gate", "pass >= 0")
    partial = greeting.type(*words, "--out", "o", "--budget", "0.010", code=4)
    again = greeting.type(*words, "--recheck", "o", "--html", code=1)
    whole = greeting.type(*words, "--continue", "o", code=0)

    for said in (partial, again):
        assert re.search(r"gate pass >= 0: not decided: \d+ of 20 samples are missing", " ".join(said.stderr.split()))
        assert "gate pass >= 0: holds" not in said.output
    assert "not decided" in Path("o/report.html").read_text()
    assert "gate pass >= 0: holds" in whole.stdout


@pytest.mark.spec("evaluation:JG12", "evaluation:JG119", "evaluation:JG123")
def test_an_invalid_evaluation_is_reported_completely_before_any_cost(folder: Any) -> None:
    folder.write(
        "evals.py",
        """
        from stepengine import AgentDefinition
        from stepengine.evaluation import Case, Evaluation, contains
        cases = [Case("a", files=".."), Case("A", checks=[contains("x")]), Case("../b", checks=[3], files={"/etc/x": "y"})]
        evaluation = Evaluation("x", cases=cases, agents={"one": AgentDefinition("one", model="t/m")})
        """,
    )

    said = folder.type("eval", "evals.py", code=2).stderr

    for part in (
        "the case id '../b' is not valid",
        "2 cases have the id 'a'",
        "'a': it has no check",
        "'..' is outside of",
        "3 is not a check",
        "'/etc/x'",
    ):
        assert part in said
    assert not Path("evals").exists()


@pytest.mark.spec("evaluation:JG123", "evaluation:JG119")
@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("raises.py",), "RuntimeError: no"),
        (("gone.py",), "there is no evaluation file"),
        (("greeting.py", "--case", "nobody*"), "no case"),
        (("greeting.py", "--recheck", "gone"), "not a folder of results"),
        (("live.py",), "--budget USD"),
        (("alias.yaml",), "alias"),
    ],
)
def test_wrong_usage_is_one_message(greeting: Any, words: tuple[str, ...], part: str) -> None:
    greeting.write("raises.py", "raise RuntimeError('no')")
    greeting.write("live.py", GREETING.replace(", replies=answer", ""))
    greeting.write("alias.yaml", "a: &a [1]\nb: *a\n")

    assert part in greeting.type("eval", *words, code=2).stderr


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("evaluation:JG60")
def test_an_evaluation_in_yaml_needs_no_function(folder: Any) -> None:
    folder.write(
        "shop.yaml",
        """
        name: shop
        agents: {shop: agents/shop.py}
        checks:
          - contains: three
          - called: {tool: look, input: {shelf: left}}
          - never_called: [count]
        cases:
          - {id: left, prompt: "What is left?", tags: [short]}
          - id: other
            prompt: What is right?
            checks: [{max_steps: 1}, {command: ["true"]}]
        """,
    )
    folder.write("replies.json", '[{"tool": "look", "input": {"shelf": "left"}}, "three"]')

    report = folder.json("eval", "shop.yaml", "--script", "replies.json", "--out", "o")
    short = folder.json("eval", "shop.yaml", "--script", "replies.json", "--out", "p", "--tag", "short")

    passed = {case["id"]: {n: s["passed"] for n, s in case["samples"][0]["scores"].items()} for case in report["cases"]}
    common = {"contains": True, "called_look": True, "never_called": True}
    assert {"left": common, "other": {**common, "max_steps": False, "command": True}} == passed
    assert ["left"] == [case["id"] for case in short["cases"]]


# --- what is run again ------------------------------------------------------------------------------------------------

LOOKER = '''
from stepengine import AgentDefinition, tool
from stepengine.evaluation import Case, Evaluation, contains, called
from stepengine.testing import text, tool_call

def replies(request):
    """Look twice, then tell what was seen; writes down that it was asked."""
    with open("asked.txt", "a") as file:
        file.write("x")
    seen = [m.text for m in request.messages if m.role == "tool"]
    return tool_call("look", {"shelf": len(seen)}) if len(seen) < 2 else text(f"seen {seen}")

@tool
def look(shelf: int) -> str:
    """Look at a shelf."""
    return f"shelf {shelf}"

agent = AgentDefinition("looker", model="t/m", tools=[look])
evaluation = Evaluation(
    "looking", cases=[Case("one", "a", replies=replies), Case("two", "b", replies=replies)], agents={"base": agent},
    checks=[contains("shelf 1")],
)
'''


def asked(folder: Any, *words: str, code: int = 0) -> tuple[int, list[str]]:
    """
    Return how often a model was asked in an evaluation, and where its samples are from.
    """
    Path("asked.txt").write_text("")
    report = folder.json("eval", "looking.py", *words, code=code)
    return len(Path("asked.txt").read_text()), [s["reused"] for case in report["cases"] for s in case["samples"]]


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("evaluation:JG65")
def test_only_changed_samples_are_run_again(folder: Any) -> None:
    """
    Nothing for the same; only the case whose prompt changed; with another body of the tool from its first call on.
    """
    folder.write("looking.py", LOOKER)
    assert (6, ["new", "new"]) == asked(folder, "--out", "a")
    assert (0, ["journal", "journal"]) == asked(folder, "--against", "a", "--out", "b")
    folder.write("looking.py", LOOKER.replace('Case("two", "b"', 'Case("two", "another"'))
    assert (3, ["journal", "new"]) == asked(folder, "--against", "b", "--out", "c")
    folder.write("looking.py", LOOKER.replace('return f"shelf {shelf}"', 'return f"the shelf {shelf}"'))
    number, places = asked(folder, "--against", "a", "--out", "d", "--gate", "pass >= 1")

    # The first reply is kept, both later ones are asked for anew.
    assert (4, ["from #1", "from #1"]) == (number, places)
    assert "the shelf 1" in folder.type("show", "d/cases/one/base/1.jsonl").stdout


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("evaluation:JG62", "evaluation:JG12")
def test_a_changed_check_asks_no_model_and_divergence_is_reported(folder: Any) -> None:
    folder.write("looking.py", LOOKER)
    asked(folder, "--out", "a", "-n", "2", "--seed", "9")
    folder.write("looking.py", LOOKER.replace('contains("shelf 1")', 'contains("shelf 77")'))
    assert (0, ["journal"] * 4) == asked(folder, "--recheck", "a", "--gate", "pass >= 1", code=1)
    assert {False} == {s["scores"]["contains"]["passed"] for case in results("a")["cases"] for s in case["samples"]}
    assert (2, 9) == (results("a")["n"], results("a")["seed"])

    folder.write("looking.py", LOOKER.replace("Look at a shelf.", "Look."))
    folder.type("eval", "looking.py", "--recheck", "a", code=5)
    Path("empty").mkdir()
    assert "partial: 2 of 2 samples" in folder.type("eval", "looking.py", "--recheck", "empty", code=1).stdout


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("evaluation:JG62")
def test_a_recheck_of_files_is_correct_or_unknown(fixing: Any) -> None:
    """
    What a command said holds while it is the same command; a file is there when it was kept; else nothing is said.
    """
    fixing.type("eval", "fixing.py", "--out", "o")
    fixing.write(
        "fixing.py",
        FIXER.replace('"a + b" in run', '"a+b" in run').replace('only_changes("sums.py")', "only_changes()"),
    )

    scores = fixing.json("eval", "fixing.py", "--recheck", "o")["cases"][0]["samples"][0]["scores"]
    kept = FIXER.replace("checks=[", 'keep=["sums*"], checks=[')
    fixing.write("fixing.py", kept)
    fixing.type("eval", "fixing.py", "--out", "p")
    fixing.write("fixing.py", kept.replace('"a + b" in run', '"a ** b" in run'))
    later = fixing.json("eval", "fixing.py", "--recheck", "p")["cases"][0]["samples"][0]["scores"]

    assert ("unknown", None) == (scores["is_repaired"]["state"], scores["is_repaired"]["passed"])
    assert (False, "it changed sums.py") == (scores["only_changes"]["passed"], scores["only_changes"]["reason"])
    assert (True, "ok") == (scores["command"]["passed"], scores["command"]["state"])
    assert (False, "ok") == (later["is_repaired"]["passed"], later["is_repaired"]["state"])


def make_judged_source(verdict: str) -> str:
    """
    Return `LOOKER` with a judge whose model replies *verdict*.
    """
    asks = f'    if "Rubric" in request.messages[0].text:\n        return {verdict}\n'
    judge = 'judge(AgentDefinition("strict", model="t/m"), "Is it short?")'
    source = LOOKER.replace("called", "judge").replace("checks=[", f"checks=[{judge}, ")
    return source.replace("    seen = [", f"{asks}    seen = [")


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("evaluation:JG61")
@pytest.mark.parametrize("score", ["true", '"1"', "1.5", "NaN"])
def test_a_judge_score_must_be_a_number_up_to_one(folder: Any, score: str) -> None:
    folder.write("looking.py", make_judged_source(f"""'{{"score": {score}, "reason": "yes"}}'"""))
    sample = folder.json("eval", "looking.py", "--out", "a", code=1)["cases"][0]["samples"][0]

    assert "the judge replied" in sample["scores"]["judge"]["reason"]


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("evaluation:JG61", "evaluation:JG62")
def test_a_judge_is_recorded_read_again_and_counted_by_itself(folder: Any) -> None:
    """
    Its score is not part of `pass`; while it is asked the same it is not asked again.
    """
    judged = make_judged_source("""'{"score": 0.25, "reason": "long"}'""")
    folder.write("looking.py", judged)
    assert 8 == asked(folder, "--out", "a")[0]
    assert 0 == asked(folder, "--recheck", "a")[0]

    rows = {row["check"]: (row["mean"], row["judge"]) for row in results("a")["summary"]}
    assert {"pass": (1.0, False), "judge": (0.25, True), "contains": (1.0, False)} == rows
    assert Path("a/cases/one/base/1.judge.jsonl").is_file()
    folder.write("looking.py", judged.replace("Is it short?", "Is it long?"))
    report = folder.json("eval", "looking.py", "--recheck", "a")
    assert "unknown" == report["cases"][0]["samples"][0]["scores"]["judge"]["state"]


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("evaluation:JG62")
def test_a_judge_runs_programs_only_with_shell(folder: Any) -> None:
    verdict = """tool_call("run_terminal_command", {"command": "touch ran.txt"})"""
    source = make_judged_source(verdict).replace('"strict", ', '"strict", tools=["run_terminal_command"], ')
    folder.write("looking.py", source)
    report = folder.json("eval", "looking.py", "--case", "one", "--out", "a", code=1)

    assert "--shell" in report["cases"][0]["samples"][0]["scores"]["judge"]["reason"]
    assert not Path("ran.txt").exists()


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("evaluation:JG66")
def test_judges_spend_the_same_budget_and_stay_unknown_without_room(folder: Any) -> None:
    judged = make_judged_source("""text('{"score": 0.25, "reason": "long"}', cost="0.02")""")
    folder.write("looking.py", judged)

    folder.json("eval", "looking.py", "--out", "free")
    assert 0.04 == float(results("free")["spent"])

    folder.json("eval", "looking.py", "--out", "a", "--budget", "0.03", "--concurrency", "1", code=4)
    samples = [sample for case in results("a")["cases"] for sample in case["samples"]]
    assert 0.02 == float(results("a")["spent"])
    assert ["ok"] == [sample["scores"]["judge"]["state"] for sample in samples]
    assert "budget" in results("a")["stopped"]

    folder.write(
        "looking.py", judged.replace("checks=[", 'checks=[judge(AgentDefinition("kind", model="t/m"), "Is it kind?"), ')
    )
    folder.json("eval", "looking.py", "--out", "b", "--budget", "0.02", "--concurrency", "1", code=4)
    # The order of the runs is drawn, so the one that the budget allows is of any case.
    (sample,) = [sample for case in results("b")["cases"] for sample in case["samples"]]
    second = sample["scores"]["judge-2"]
    assert ("unknown", "the budget of 0.02 US dollars is spent") == (second["state"], second["reason"])


@pytest.mark.spec("evaluation:JG13", "evaluation:JG64")
def test_the_report_is_escaped_linked_and_without_secret(folder: Any) -> None:
    key = "sk-ant-" + "api03-" + "Zx9" * 20
    hostile = f"<script>alert(1)</script> {key}"
    folder.write("looking.py", LOOKER.replace('return f"shelf {shelf}"', f"return {hostile!r}"))

    folder.type("eval", "looking.py", "--out", "a", "--html", "-q")

    page, told = Path("a/report.html").read_text(), Path("a/results.json").read_text()
    assert "&lt;script&gt;alert(1)" in page
    assert "<script" not in page
    assert key not in page + told
    assert "default-src 'none'" in page
    samples = [sample for case in results("a")["cases"] for sample in case["samples"]]
    links = re.findall(r'<a href="([^"]*)">([^<]*)</a>', page)

    assert [unescape(text) for _, text in links] == [sample["journal"] for sample in samples]
    for href, journal in links:
        file = Path("a", unquote(unescape(href)))
        assert file == Path("a", unescape(journal)).with_suffix(".html")
        run = file.read_text()
        assert run.startswith("<!doctype html>")
        assert key not in run


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("evaluation:JG12", "evaluation:JG65")
@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_signal_decides_the_exit_code_and_keeps_finished_samples(
    folder: Any, monkeypatch: pytest.MonkeyPatch, name: str, code: int
) -> None:
    """
    The third case sends the signal; the first two are in the results, and only the others are run when it goes on.
    """
    (folder.path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder.path / "tmp"))
    folder.write(
        "looking.py",
        LOOKER.replace(
            "    seen = [",
            '    if request.messages[0].text == "now" and not Path("sent").exists():\n'
            '        Path("sent").touch()\n'
            f"        os.kill(os.getpid(), signal.{name})\n        time.sleep(0.01)\n    seen = [",
        )
        .replace(
            'Case("two", "b", replies=replies)',
            'Case("two", "now", replies=replies), Case("three", "b", replies=replies)',
        )
        .replace(
            "from stepengine import", "import os, signal, time\nfrom pathlib import Path\nfrom stepengine import", 1
        ),
    )

    made = folder.type("eval", "looking.py", "--out", "a", "--concurrency", "1", "--seed", "4", code=code)

    before = [case["id"] for case in results("a")["cases"] if case["samples"]]
    number, places = asked(folder, "--continue", "a", "--seed", "4")
    assert "interrupted" == results_partial(made.stdout)
    assert len(before) < 3
    assert 3 * (3 - len(before)) == number
    assert len(before) == places.count("journal")
    assert [] == [*(folder.path / "tmp").iterdir()]


def results_partial(said: str) -> str:
    """
    Return why a report is partial.
    """
    return next(line.removeprefix("partial: ") for line in said.splitlines() if line.startswith("partial: "))


def test_a_lost_server_is_no_fault_of_the_agent(tmp_path: Path) -> None:
    def lost() -> Any:
        return {"lost": True, "error": "the connection was lost"}

    def handler(ctx: Any) -> Any:
        yield from Perform(lost)

    agent = AgentDefinition("boss", handle_steps=handler)
    evaluation = Evaluation("lost", [Case("one", "Go.", checks=[equals("x")])], {"base": agent})
    report = evaluate_sync(evaluation, n=1, folder=tmp_path)
    (sample,) = report.scores.outcome.samples
    (score,) = sample.scores.values()

    assert ("error", "not asked") == (sample.status, score.state)
    assert score.reason.startswith("#0 was cut off: the connection was lost")


class Total(BaseModel):
    n: int


def test_a_check_receives_the_output_as_its_type() -> None:
    seen: list[object] = []

    def is_three(run: Any) -> bool:
        seen.append(run.output)
        return run.output.n == 3

    agent = AgentDefinition("adder", model="test/m", output_schema=Total)
    checks = [is_three, equals(Total(n=3)), equals({"n": 3}), fits(Total)]
    evaluation = Evaluation("sums", [Case("one", "1+2", checks=checks)], {"base": agent}, gates=["pass >= 1"])
    report = evaluate_sync(evaluation, replies=lambda request: text('{"n": 3}'))

    assert [Total(n=3)] == seen
    assert report.passed, report


def test_each_call_after_a_hand_off_is_judged_once(tmp_path: Path) -> None:
    seen: list[tuple[str, str]] = []

    def look(run: Any) -> bool:
        seen.extend([(call.tool, call.path) for call in run.tool_calls])
        return True

    @tool
    def price(article: str) -> float:
        """Return a price."""
        return 12

    billing = AgentDefinition("billing", model="t/m", tools=[price])
    desk = AgentDefinition("desk", model="t/m", tools=["hand_off"], spawnable_agents=[billing])
    replies = [tool_call("hand_off", {"agent": "billing"}), tool_call("price", {"article": "tea"}), text("12.")]
    evaluation = Evaluation(
        "desk", cases=[Case("bill", "A bill.", checks=[look], replies=replies)], agents={"one": desk}
    )
    evaluate_sync(evaluation, n=1, folder=tmp_path)

    assert [("hand_off", ""), ("price", "1")] == seen


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("evaluation:JG1")
@pytest.mark.parametrize(("package", "other"), [("evaluation", "testing"), ("testing", "evaluation")])
def test_evaluation_prints_nothing_and_shares_no_import_with_testing(package: str, other: str) -> None:
    root = Path(__file__).resolve().parents[2] / "stepengine"
    for file in (root / package).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                assert package == "testing" or "print" != getattr(node.func, "id", ""), file
            elif isinstance(node, ast.Import | ast.ImportFrom):
                modules = [getattr(node, "module", None) or "", *[alias.name for alias in node.names]]
                assert not any(f"stepengine.{other}" in module for module in modules), file


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("evaluation:JG67", "evaluation:JG90")
def test_the_p_value_agrees_with_the_interval_and_the_gate(greeted: Any) -> None:
    """
    With several looks at once the p value for all of them stands behind, under its own name.
    """
    checks = 'agents={"old": greeter("Greet people.")'
    greeted.write(
        "greeting.py",
        GREETING.replace(checks, f"checks=[max_steps(2)],\n    {checks}").replace(
            "contains\n", "contains, max_steps\n"
        ),
    )

    said = greeted.type("eval", "greeting.py", "-q", "--recheck", "o", "--gate", "new.pass - old.pass > 0").stdout

    (pair,) = [pair for pair in results("o")["pairs"] if pair["check"] == "pass"]
    assert pair["low"] > 0
    assert (0.024, 0.072) == pytest.approx((pair["p"], pair["p_adjusted"]), abs=1e-3)
    assert "(+0.10 to +1.00), p 0.024, adjusted for 3 comparisons 0.072; " in " ".join(said.split())
    assert "gate new.pass - old.pass > 0: holds" in said
