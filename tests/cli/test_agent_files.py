"""
One form of agent file, whichever command takes it: `agent` or `agents`, `FILE#id`, and modules beside it.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stepengine.cli.commands.worker import load_module_contents
from stepengine.errors import DefinitionError
from tests.cli.command import command

TEAM = """
from stepengine import AgentCall, AgentDefinition

from words import GREETING


def boss(ctx):
    said = yield from AgentCall("kid", "say it")
    return f"kid said {said}"


def kid(ctx):
    return GREETING
    yield


agents = [
    AgentDefinition("boss", handle_steps=boss, spawnable_agents=["kid"]),
    AgentDefinition("kid", handle_steps=kid),
]
"""
EVALUATION = """
from stepengine.evaluation import Case, Evaluation, contains

evaluation = Evaluation("said", cases=[Case("one", "go", checks=[contains("hello")])], agents={"a": "team/crew.py#boss"})
"""


@pytest.fixture
def team(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """
    A file of two agents of which one calls the other, in a folder that no id is looked for in.
    """
    (tmp_path / "team").mkdir()
    (tmp_path / "team/crew.py").write_text(TEAM)
    (tmp_path / "team/words.py").write_text('GREETING = "hello"\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("requirements:X74")
def test_every_command_accepts_a_file_of_several_agents(team: Path) -> None:
    boss = "team/crew.py#boss"

    assert "kid said hello\n" == command("run", boss, "go", "-q", "--journal", "run.jsonl").stdout
    assert "kid said hello\n" == command("replay", "run.jsonl", "--agent", boss, "-q").stdout
    assert "run.jsonl  boss" in command("debug", "run.jsonl", "--agent", boss, "--exec", "print ctx.prompt").stdout
    assert "recorded" not in command("test", "run.jsonl", "--agent", boss).stderr
    command("show", "run.jsonl", "--html", "--agent", boss, "-o", "run.html")
    assert "hello\n" == command("run", "team/crew.py#kid", "go", "-q").stdout

    (team / "evals.py").write_text(EVALUATION)
    command("eval", "evals.py", "--yes", "--out", "o", "-q", "--gate", "pass >= 1")
    command("eval", "evals.py", "--yes", "--out", "p", "-q", "--gate", "pass >= 1", "--agent", "b=team/crew.py#kid")

    assert ["boss", "kid"] == [agent.id for agent in load_module_contents("team/crew.py").agents]
    assert ["kid"] == [agent.id for agent in load_module_contents("team/crew.py#kid").agents]


@pytest.mark.spec("requirements:X74")
def test_recorded_run_remembers_which_agent_of_the_file(team: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    What is kept beside a journal says which agent of the file it was.
    """
    monkeypatch.setenv("STEPENGINE_STATE_DIR", str(team / "state"))
    command("run", "team/crew.py#boss", "go", "-q")

    assert "kid said hello\n" == command("replay", "--last", "-q").stdout
    (companion,) = (team / "state/runs").glob("*.json")
    assert json.loads(companion.read_text())["agent"]["file"].endswith("team/crew.py#boss")


@pytest.mark.spec("requirements:X74")
@pytest.mark.parametrize(
    "words", [("run", "{}", "go"), ("replay", "run.jsonl", "--agent", "{}"), ("debug", "run.jsonl", "--agent", "{}")]
)
def test_file_with_both_agent_and_agents_is_rejected(team: Path, words: tuple[str, ...]) -> None:
    command("run", "team/crew.py#kid", "go", "-q", "--journal", "run.jsonl")
    (team / "both.py").write_text(
        "from stepengine import AgentDefinition\nagent = AgentDefinition('a')\nagents = [agent]\n"
    )

    said = command(*[word.format("both.py") for word in words], code=2)

    assert "both.py: defines both 'agent' and 'agents'; keep one of them" in said.stderr


@pytest.mark.spec("requirements:X74")
def test_worker_reports_a_broken_agent_file_and_loads_the_others(
    team: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (team / "agents").mkdir()
    (team / "agents/broken.py").write_text("import nothing_like_this\n")
    (team / "agents/well.py").write_text("from stepengine import AgentDefinition\nagent = AgentDefinition('well')\n")

    assert ["well"] == [agent.id for agent in load_module_contents("agents").agents]
    assert "agents/broken.py: loading it failed with ModuleNotFoundError" in capsys.readouterr().err


@pytest.mark.spec("requirements:X74")
def test_replay_finds_the_recorded_agent_in_a_file_of_several(team: Path) -> None:
    command("run", "team/crew.py#boss", "go", "-q", "--journal", "run.jsonl")

    assert "kid said hello\n" == command("replay", "run.jsonl", "--agent", "team/crew.py", "-q").stdout
    assert (
        "run.jsonl  boss"
        in command("debug", "run.jsonl", "--agent", "team/crew.py", "--exec", "print ctx.prompt").stdout
    )
    (team / "other.py").write_text(
        "from stepengine import AgentDefinition\nagents = [AgentDefinition('a'), AgentDefinition('b')]\n"
    )
    missing = command("replay", "run.jsonl", "--agent", "other.py", "-q", code=2)
    assert "other.py has no agent 'boss'; its agents: 'a', 'b'" in missing.stderr


TOOLS = """
from stepengine import AgentDefinition, ToolCall, tool

@tool
def read_files(paths: list) -> str:
    "Count."
    return f"{len(paths)} of the file's own"

def handle_steps(ctx):
    turn = yield ToolCall("read_files", {"paths": ["a", "b"]})
    return turn.tool_result.text

agents = [AgentDefinition("counter", tools=["read_files"], handle_steps=handle_steps), AgentDefinition("other")]
tools = [read_files, "glob"]
"""


@pytest.mark.spec("requirements:X74")
def test_the_tools_of_a_file_are_there_for_every_command(team: Path) -> None:
    (team / "counter.py").write_text(TOOLS)
    said = "2 of the file's own\n"

    assert said == command("run", "counter.py#counter", "-q", "--journal", "run.jsonl").stdout
    assert said == command("replay", "run.jsonl", "--agent", "counter.py", "-q").stdout
    assert (
        said == command("fork", "run.jsonl", "--at", "0", "--into", "fork.jsonl", "--agent", "counter.py", "-q").stdout
    )
    assert ["read_files"] == [tool.spec.name for tool in load_module_contents("counter.py").tools]


@pytest.mark.spec("requirements:X74")
def test_page_of_a_run_uses_tools_of_its_file(team: Path) -> None:
    (team / "counter.py").write_text(TOOLS.replace("read_files", "count_files"))
    command("run", "counter.py#counter", "-q", "--journal", "run.jsonl")
    command("show", "run.jsonl", "--html", "--strict", "--agent", "counter.py", "-o", "run.html")

    assert (team / "run.html").is_file()


@pytest.mark.spec("requirements:X74")
def test_folder_loads_tools_of_its_files_and_rejects_duplicate_names(team: Path) -> None:
    (team / "agents").mkdir()
    (team / "agents/counter.py").write_text(TOOLS)
    found = [tool.spec.name for tool in load_module_contents("agents").tools]
    (team / "agents/second.py").write_text(TOOLS.replace('"counter"', '"second"').replace('"other"', '"another"'))
    with pytest.raises(DefinitionError, match="both have a tool 'read_files' in their 'tools'"):
        load_module_contents("agents")

    assert ["read_files"] == found
