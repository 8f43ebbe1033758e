"""
Which tool calls need an option or an approval, for bundled tools and for those of agent files alike.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.command import typed
from tests.cli.in_process_server import run_until_settled, serve_in_process
from tests.waits import until

NAMESAKE = """
from stepengine import AgentDefinition, ToolCall, tool

@tool
def {name}(text: str) -> str:
    "Say it."
    return f"own {{text}}"

def handle_steps(ctx):
    turn = yield ToolCall("{name}", {{"text": "words"}})
    return turn.tool_result.text

agent = AgentDefinition("asker", tools=[{name}], handle_steps=handle_steps)
"""
EVALUATION = """
from stepengine.evaluation import Case, Evaluation, contains

evaluation = Evaluation("said", cases=[Case("one", "go", checks=[contains("own words")])], agents={"a": "asker.py"})
"""
WRITER = """
from stepengine import AgentDefinition, ToolCall, tool

@tool(category="write")
def note(text: str) -> str:
    "Write a note."
    with open("note.txt", "w") as file:
        file.write(text)
    return "noted"

def handle_steps(ctx):
    turn = yield ToolCall("note", {"text": "milk"})
    return turn.tool_result.text

agent = AgentDefinition("own", tools=[note], handle_steps=handle_steps)
"""
BUNDLED = """
from stepengine import AgentDefinition, ToolCall

def handle_steps(ctx):
    turn = yield ToolCall("write_file", {"path": "note.txt", "content": "milk"})
    return turn.tool_result.text

agent = AgentDefinition("bundled", tools=["write_file"], handle_steps=handle_steps)
"""
READER = """
from stepengine import AgentDefinition
agent = AgentDefinition("a-reader", tools=["read_files"], model="test/m")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tmp_path.chmod(0o700)
    (tmp_path / "shop").mkdir()
    monkeypatch.chdir(tmp_path / "shop")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "shop"


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("requirements:X121")
@pytest.mark.parametrize("name", ["web_search", "write_file", "run_terminal_command"])
def test_own_tool_named_like_a_bundled_one_needs_no_option(folder: Path, name: str) -> None:
    (folder / "asker.py").write_text(NAMESAKE.format(name=name))
    (folder / "evals.py").write_text(EVALUATION)
    ran = typed("run", "asker.py", "-q")
    evaluated = typed("eval", "evals.py", "--yes", "--out", "out", "-q", "--gate", "pass >= 1")

    assert (0, "own words\n") == (ran.exit_code, ran.stdout), ran.stderr
    assert 0 == evaluated.exit_code, evaluated.output


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("requirements:X121")
def test_server_asks_about_changing_tools_bundled_or_own(folder: Path) -> None:
    (folder / "agents").mkdir()
    for name, text in (("a_reader", READER), ("own", WRITER), ("bundled", BUNDLED)):
        (folder / "agents" / f"{name}.py").write_text(text)
    (folder / "agents" / "asker.py").write_text(NAMESAKE.format(name="web_search"))
    with serve_in_process("serve", "agents") as (client, _):
        asked = {agent: run_until_settled(client, agent) for agent in ("own", "bundled")}
        before = (folder / "note.txt").exists()
        free = run_until_settled(client, "asker")
        run, question = asked["own"]["run_id"], asked["own"]["questions"][0]["id"]
        client.post(f"/runs/{run}/answers", json={"answers": {question: "yes"}}).raise_for_status()
        until(lambda: client.get(f"/runs/{run}").json()["status"] not in ("running", "suspended"))
        answered = client.get(f"/runs/{run}").json()
    replayed = typed("replay", f"runs/{run}.jsonl", "--agent", "agents/own.py", "-q")

    assert ["May note run?", "May write_file run?"] == [view["questions"][0]["text"] for view in asked.values()]
    assert not before
    assert ("completed", "own words") == (free["status"], free["output"])
    assert ("completed", "noted") == (answered["status"], answered["output"])
    assert (0, "noted\n") == (replayed.exit_code, replayed.stdout), replayed.stderr


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("requirements:X121")
def test_served_file_with_own_models_asks_about_changing_tools(folder: Path) -> None:
    models = "\nfrom stepengine.testing import ScriptedModel\nmodels = ScriptedModel([])\n"
    (folder / "own.py").write_text(WRITER + models)
    with serve_in_process("serve", "own.py") as (client, _):
        asked = run_until_settled(client, "own")
    with serve_in_process("serve", "own.py", "--write", "--runs", "others") as (client, _):
        done = run_until_settled(client, "own")

    assert ["May note run?"] == [one["text"] for one in asked["questions"]]
    assert ("completed", "noted") == (done["status"], done["output"])


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("requirements:X121")
@pytest.mark.parametrize(("text", "name", "tool"), [(WRITER, "own", "note"), (BUNDLED, "bundled", "write_file")])
def test_changing_tool_waits_with_a_journal_and_is_rejected_without(
    folder: Path, text: str, name: str, tool: str
) -> None:
    (folder / "it.py").write_text(text)
    refused = typed("run", "it.py", "-q")
    asked = typed("run", "it.py", "-q", "--journal", "run.jsonl")
    written = (folder / "note.txt").exists()
    resumed = typed("resume", "run.jsonl", "--agent", "it.py", "-q", "--answer", "q0=yes")
    replayed = typed("replay", "run.jsonl", "--agent", "it.py", "-q")
    (folder / "note.txt").unlink()
    allowed = typed("run", "it.py", "-q", "--write")

    assert 2 == refused.exit_code
    assert f"agent '{name}' changes files with {tool}; allow that with --write" in refused.stderr
    assert (3, False) == (asked.exit_code, written), asked.stderr
    assert [0, 0, 0] == [one.exit_code for one in (resumed, replayed, allowed)], resumed.stderr + replayed.stderr
    assert resumed.stdout == replayed.stdout == allowed.stdout
    assert "milk" == (folder / "note.txt").read_text()


@pytest.mark.spec("requirements:X121")
def test_a_tool_that_needs_no_permission_runs(folder: Path) -> None:
    (folder / "it.py").write_text(WRITER.replace('category="write"', 'category="write", requires_permission=False'))
    ran = typed("run", "it.py", "-q")

    assert (0, "noted\n") == (ran.exit_code, ran.stdout), ran.stderr
