"""
Evaluation files: what they may import, and checks that do not fit the output.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stepengine.cli.app import app
from stepengine.errors import DataError
from stepengine.evaluation import evaluate_sync
from stepengine.evaluation.evaluation_files import load_evaluation

EVALUATION = """
from stepengine import AgentDefinition
from stepengine.evaluation import Case, Evaluation, contains, matches

from words import WORDS


def handle_steps(ctx):
    return OUTPUT
    yield


evaluation = Evaluation(
    "words",
    cases=[Case("one", "Go", checks=[contains(*WORDS), matches("l+")])],
    agents={"one": AgentDefinition("one", handle_steps=handle_steps)},
)
"""


def evaluated(folder: Path, monkeypatch: pytest.MonkeyPatch, output: object, name: str) -> tuple[int, dict[str, str]]:
    monkeypatch.chdir(folder)
    Path("words.py").write_text("WORDS = ['hello']\n")
    Path(name).write_text(EVALUATION.replace("OUTPUT", repr(output)))
    done = CliRunner().invoke(app, ["eval", name, "--yes", "--json", "--out", "out"])
    assert done.stdout, done.stderr
    told = json.loads(Path("out/results.json").read_text())
    (sample,) = told["cases"][0]["samples"]
    return done.exit_code, {name: f"{score['state']} {score['reason']}" for name, score in sample["scores"].items()}


@pytest.mark.spec("evaluation:JG60")
@pytest.mark.parametrize("name", ["words_eval.py", "my-words.py"])
def test_an_evaluation_file_imports_its_neighbours(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, said = evaluated(tmp_path, monkeypatch, "hello", name)

    assert (0, {"contains": "ok ", "matches": "ok "}) == (code, said)


@pytest.mark.spec("evaluation:JG61")
def test_a_text_check_of_structured_output_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, said = evaluated(tmp_path, monkeypatch, {"greeting": "hello"}, "words_eval.py")

    assert 1 == code
    for check in ("contains", "matches"):
        assert said[check].startswith(f"broken DataError: {check}() reads the text of a run")
        assert "equals(...), fits(...)" in said[check]


@pytest.mark.spec("evaluation:JG60")
def test_an_evaluation_in_yaml_may_expect_null(tmp_path: Path) -> None:
    file = tmp_path / "evals.yaml"
    source = "agents: {base: ./one.py}\ncases:\n- id: a\n  checks: [CHECK]\n"
    file.write_text(source.replace("CHECK", "{equals: null}, only_changes, {only_changes: null}"))
    (tmp_path / "one.py").write_text(
        "from stepengine import AgentDefinition\n\n\ndef handle_steps(ctx):\n    return\n    yield\n\n\n"
        'agent = AgentDefinition("one", handle_steps=handle_steps)\n'
    )
    assert evaluate_sync(file).passed
    file.write_text(source.replace("CHECK", "equals"))
    with pytest.raises(DataError, match="equals"):
        load_evaluation(file)


@pytest.mark.spec("evaluation:JG123")
@pytest.mark.parametrize(
    "check",
    [
        "contains: 42",
        "contains: [word, 42]",
        "contains",
        "never_called: 42",
        "never_called",
        "max_steps: 'x'",
        "only_changes: 42",
        "fits: 42",
        "fits: [word]",
    ],
)
def test_a_check_that_cannot_judge_is_refused_when_loaded(check: str, tmp_path: Path) -> None:
    file = tmp_path / "evals.yaml"
    file.write_text(f"agents: {{base: ./one.py}}\ncases:\n- id: a\n  checks:\n  - {check}\n")

    with pytest.raises(DataError, match=rf"case 'a': .*{check.partition(':')[0]}\(\)"):
        load_evaluation(file)


@pytest.mark.spec("evaluation:JG123")
@pytest.mark.parametrize(
    ("field", "problem"),
    [
        ("name: 42", "the evaluation name 42 is not valid: use a text"),
        ("cases: [{id: 42}]", "the case id 42 is not valid: use a text"),
        ("agents: {42: ./one.py}", "the agent name 42 is not valid: use a text"),
        ("n: few", "n is 'few'"),
        ("files: 42", "files: 42 must be"),
        ("files: [a.txt]", r"files: \['a.txt'\] must be"),
        ("gates: [42]", "'42' is not a gate"),
        ("cases: [{id: a, prompt: 42}]", "'a': the prompt must be a text"),
    ],
)
def test_a_value_of_another_type_is_a_problem(field: str, problem: str, tmp_path: Path) -> None:
    valid = {"agents": "{one: ./one.py}", "checks": "[{contains: done}]", "cases": "[{id: a}]"}
    fields = [field, *[f"{name}: {value}" for name, value in valid.items() if not field.startswith(name)]]
    (tmp_path / "evals.yaml").write_text("\n".join(fields))
    (tmp_path / "one.py").write_text("from stepengine import AgentDefinition\n\nagent = AgentDefinition('one')\n")

    with pytest.raises(DataError, match=problem):
        evaluate_sync(tmp_path / "evals.yaml", replies=["done"], folder=tmp_path / "out")


@pytest.mark.spec("evaluation:JG60")
def test_a_folder_is_reported_as_one_and_not_suggested(tmp_path: Path) -> None:
    with pytest.raises(DataError) as refused:
        load_evaluation(tmp_path)

    assert f"there is no evaluation file {str(tmp_path)!r}; it is a folder" == refused.value.message
