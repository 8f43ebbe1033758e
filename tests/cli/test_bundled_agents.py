"""
The bundled agents on the command line: the flags that they need, and ``base2`` at work.
"""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from stepengine.cli import bench
from stepengine.cli.app import app
from stepengine.testing import ScriptedModel, tool_call

AGENTS = Path(__file__).resolve().parents[2] / "agents"
OUTSIDE = ("browser-use", "librarian")
"""What they teach starts a browser from the network, or clones from it; their recorded runs are replayed instead."""
WITHOUT_MODEL = ("basher", "code-searcher", "directory-lister", "glob-matcher")


def taught() -> list[list[str]]:
    """
    Return the command that each agent's docstring shows, as arguments.
    """
    texts = [ast.get_docstring(ast.parse(file.read_text())) or "" for file in sorted(AGENTS.glob("[!_]*.py"))]
    found = [re.search(r"``stepengine (run [^`]+)``", text, re.DOTALL) for text in texts]
    return [shlex.split(match[1].replace("$(git diff)", "+x = 1")) for match in found if match is not None]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """
    A small project; without a key, a model or agents of its own.
    """
    monkeypatch.delenv("STEPENGINE_MODEL", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shop.py").write_text("def total(order):\n    return sum(order)\n")
    return tmp_path


def command(*arguments: str, replies: Any = None, code: int = 0) -> Result:
    with pytest.MonkeyPatch.context() as patch:
        if replies is not None:
            model = ScriptedModel(replies)
            patch.setattr(bench, "make_model_registry", lambda *_: model)
            arguments = (*arguments, "--model", "test/m")
        result = CliRunner().invoke(app, list(arguments))
        if replies is not None:
            model.assert_complete()
    assert result.exit_code == code, (result.stdout, result.stderr, result.exception)
    return result


@pytest.mark.spec("generator-contract:B1", "requirements:F1")
@pytest.mark.parametrize(
    ("agent", "flags", "said"),
    [
        ("base2", [], "'base2' changes files with str_replace, write_file; allow that with --write"),
        ("base2", ["--write"], "'base2' runs programs with run_terminal_command; allow that with --shell"),
        ("basher", [], "'basher' runs programs with run_terminal_command; allow that with --shell"),
        ("researcher-web", [], "'researcher-web' reaches the web with read_url, web_search; allow that with --web URL"),
    ],
)
def test_a_flag_that_is_missing_is_named_in_one_sentence(agent: str, flags: list[str], said: str) -> None:
    assert f"stepengine: agent {said}" in command("run", agent, "Go.", *flags, code=2).stderr


@pytest.mark.spec("generator-contract:B1", "generator-contract:B2", "generator-contract:B9")
def test_editing_agents_start_with_write_and_shell() -> None:
    assert "Hello.\n" == command("run", "base2", "Hi.", "--write", "--shell", "-q", replies=["Hello."]).stdout


@pytest.mark.spec("requirements:Q8", "generator-contract:B6")
def test_read_only_agents_need_no_flag() -> None:
    replies = [*["Hello."] * 3, tool_call("set_output", {"thought_id": "A"})]

    assert "Hello." in command("run", "thinker-best-of-n", "Hi.", "-q", replies=replies).stdout


@pytest.mark.spec("requirements:F20")
def test_open_todos_are_reminded_of_only_once() -> None:
    seen: list[int] = []

    def again(request: Any) -> str:
        seen.append(sum("These todos are still open" in m.text for m in request.messages))
        return "It stays open."

    todos = tool_call("write_todos", {"todos": [{"task": "Write it", "completed": False}]})
    command("run", "coder", "Go.", "--write", "--shell", "-q", replies=[todos, "Done.", again])

    assert [1] == seen


@pytest.mark.parametrize("agent", ["thinker", "file-picker"])
def test_missing_model_of_an_agent_or_child_is_explained(agent: str) -> None:
    said = command("run", agent, "Hi.", code=2).stderr

    assert f"agent '{agent}' needs a model, and none is set" in said
    assert "--model anthropic/" in said


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.parametrize("arguments", [a for a in taught() if a[1] not in OUTSIDE], ids=lambda a: a[1])
def test_the_command_that_an_agent_teaches_is_accepted(arguments: list[str]) -> None:
    """
    With nobody to play the model, an agent that needs one fails at its first request, and the others complete.
    """
    needs_model = arguments[1] not in WITHOUT_MODEL
    with pytest.MonkeyPatch.context() as patch:
        model = ScriptedModel()
        patch.setattr(bench, "make_model_registry", lambda *_: model)
        result = CliRunner().invoke(app, [*arguments, "--model", "test/m", "-q"])

    children_fail = arguments[1] in ("code-reviewer-multi-prompt", "editor-multi-prompt")
    assert (1 if needs_model and not children_fail else 0) == result.exit_code, result.stderr
    assert needs_model is bool(model.calls)


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:SC08", "reliability:FS21")
@pytest.mark.parametrize("journal", ["run.jsonl", "logs/runs.db"])
@pytest.mark.parametrize(
    ("agent", "params"),
    [
        ("code-searcher", '{"search_queries": [{"pattern": "needle"}]}'),
        ("glob-matcher", '{"patterns": [{"pattern": "**/*"}]}'),
        ("directory-lister", '{"directories": [{"path": "."}]}'),
    ],
)
def test_no_search_finds_the_journal_of_its_own_run(journal: str, agent: str, params: str, folder: Path) -> None:
    (folder / "needle.txt").write_text("a needle\n")
    (folder / "logs").mkdir()
    (folder / "run.before-1.jsonl").write_text('{"needle": 1}\n')
    found = command("run", agent, "--params", params, "--journal", journal, "-q").stdout
    assert (folder / journal).exists()
    assert "needle" in found
    hidden = (
        ["run.jsonl", "run.before-1.jsonl"] if journal == "run.jsonl" else ["runs.db", "runs.db-wal", "runs.db-shm"]
    )
    assert [] == [name for name in hidden if f'"{name}' in found or f"/{name}" in found or f"{name}:" in found]
